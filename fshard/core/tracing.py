"""Tracing, its operators, names for torch.profiler, and context variables of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

# True: a trace calls a function for each unit, even for equal ones
UNROLLS: ContextVar[bool] = ContextVar("fshard.core.tracing", default=False)
T = TypeVar("T")
Operator: TypeAlias = Any  # its class is private to torch
# Arguments of a function or operator, as modes and tensor subclasses get them.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any] | None


class Rerun(Protocol):
    """A function run by `fshard.remat`, with the units it reads as inputs."""

    def unit(self, tape: Any, number: int) -> Sequence[Tensor]:
        """Return the function's leaves of a unit of a tape."""


RERUN: ContextVar[Rerun | None] = ContextVar("fshard.core.rerun", default=None)  # the innermost running one


def is_tracing() -> bool:
    """True if operators are traced with fake tensors."""
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace the next line
        return False
    # Private: there is no public way to ask (test_jit.py notices when it goes).
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# Private: there is no public way to leave the modes of a trace (test_scan.py notices when it goes).
unseen: Callable[[], AbstractContextManager[None]] = _disable_current_modes


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run a block on fake tensors inside a trace, unseen by modes and graphs."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with torch._C.DisableTorchFunction(), unseen(), fake:
        yield


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Private: torch has no public way to take hooks off (test_prefetch.py notices when it goes).
_peek_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextmanager
def unhooked() -> Iterator[Sequence[tuple[Callable[..., object], Callable[..., object]]]]:
    """Take saved-tensor hooks off inside a block; yields them, innermost first."""
    hooks = []
    while top := _peek_hooks(True):
        hooks.append(top)
        _pop_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)


class memo(cached_property[T]):  # a decorator like `property`
    """functools.cached_property without its lock: simulated ranks would wait, and dynamo cannot trace it."""

    def __init__(self, fn: Callable[[Any], T]):
        super().__init__(fn)
        self.lock = nullcontext()  # private to functools (test_tracing.py notices when it goes)


class Marked(Tensor):
    """Base of classes that say how a tensor was made. In a graph, nodes are marked instead."""


def mark(x: Tensor, kind: type[Tensor]) -> Tensor:
    """Return `x` as a tensor of this class, in the same memory; while tracing mark its node."""
    if kind is Tensor:
        return x
    if not is_tracing() and not torch.compiler.is_compiling():
        return x.as_subclass(kind)
    node = node_of(x)
    if node is not None:
        node.meta["kind"] = kind
    return x


def kind_of(x: Tensor) -> type[Tensor]:
    """Return the class that marks a tensor or its node; `Tensor` without a mark."""
    if isinstance(x, Marked):
        return type(x)
    node = node_of(x) if is_tracing() else None
    while node is not None and _renames(node):
        (node,) = node.all_input_nodes
    return Tensor if node is None else node.meta.get("kind", Tensor)


def _renames(node: Node) -> bool:
    """True if a node returns its only argument, as `detach` and in-place operators: eagerly the class stays.

    torch 2.13 records `detach` as `aten.detach`, torch 2.14 as `aten.alias`: the schema decides.
    """
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    info = arguments[0].alias_info if len(arguments) == 1 else None
    return info is not None and _form(node) == _form(node.all_input_nodes[0])


def _form(node: Node) -> object:
    x = node.meta["val"]
    return (x.dtype, x.shape, x.layout is torch.strided and x.stride(), x.is_conj(), x.is_neg())


def node_of(x: Tensor) -> Node | None:
    # Private: no public name (test_loss_scale.py notices when it goes).
    mode = get_proxy_mode()
    traced = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return None if traced is None else traced.proxy.node


_LIBRARY = torch.library.Library("fshard", "DEF")


def define(
    schema: str, run: Callable[..., object], shapes: Callable[..., object], exact: bool = False, captured: bool = False
) -> None:
    """Define the operator `torch.ops.fshard.<name>`: `run` implements it, `shapes` returns fake results.

    Tags forbid compilers to merge equal calls, to run a call while compiling, to put it into a CUDA graph (a collective
    would repeat without its Python), and to change an argument's layout (each node would get a copy). `exact`:
    arguments keep their strides. `captured`: a CUDA graph may contain the operator.
    """
    layout = torch.Tag.needs_exact_strides if exact else torch.Tag.flexible_layout
    unsafe = [] if captured else [torch.Tag.cudagraph_unsafe]
    _LIBRARY.define(schema, tags=[torch.Tag.nondeterministic_seeded, *unsafe, layout])
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)


_EVERY, _OF_TORCH = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))


def lead(key: str, functions: Mapping[str, Callable[..., object]]) -> None:
    """Replace operators of torch where a dispatch key is on. Functions get the operators' keys first."""
    _EVERY.fallback(torch.library.fallthrough_kernel, key)
    for name, run in functions.items():
        _OF_TORCH.impl(name, run, key, with_keyset=True)


define("materialize(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def copied(x: Tensor) -> Tensor:
    """Return a contiguous copy, aligned to 64 bytes as all memory of torch."""
    # a compiler would remove a clone, and read `x` itself
    if is_tracing():
        return torch.ops.fshard.materialize(x.contiguous())
    return x.clone(memory_format=torch.contiguous_format)


_UNNAMED = nullcontext()


def named(what: str, label: str) -> AbstractContextManager[object]:
    """Return a block named `fshard.<what> <label>` in a running profiler.

    >>> with named("all_gather", "blocks.0"):
    ...     pass
    """
    # private: a `record_function` costs 2 us even without a profiler (test_profiling.py notices when it goes)
    if not profiler._is_profiler_enabled or is_tracing():
        return _UNNAMED
    return profiler.record_function(f"fshard.{what} {label}".rstrip())
