"""Tools for traced code: modes, hooks, operators, marks, names in profiles, context variables."""

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

# True: trace every unit; False: copy the nodes of equal units
UNROLLS: ContextVar[bool] = ContextVar("fshard.core.tracing", default=False)
# True in a trace whose graph writes results over its first argument
IN_PLACE: ContextVar[bool] = ContextVar("fshard.core.in_place", default=False)
T = TypeVar("T")
Operator: TypeAlias = Any  # its class is private to torch
# arguments, as modes and tensor subclasses get them
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any] | None
Ctx: TypeAlias = Any  # torch's context of a function: forward sets any attributes for backward
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class Rerun(Protocol):
    """A function that `fshard.remat` runs, with its units as inputs."""

    def unit(self, tape: Any, number: int) -> Sequence[Tensor]: ...


RERUN: ContextVar[Rerun | None] = ContextVar("fshard.core.rerun", default=None)  # the innermost running `Rerun`


def is_tracing() -> bool:
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace the next line
        return False
    # private: no public way to ask (test_jit.py)
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# private: no public way to leave a trace's modes (test_scan.py)
unseen: Callable[[], AbstractContextManager[None]] = _disable_current_modes


@contextmanager
def unrecorded() -> Iterator[None]:
    """Run on fake tensors inside a trace: modes see nothing, and no graph records it."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with torch._C.DisableTorchFunction(), unseen(), fake:
        yield


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# private: no public way to take hooks off (test_prefetch.py)
_peek_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextmanager
def unhooked() -> Iterator[Sequence[tuple[Callable[..., object], Callable[..., object]]]]:
    """Take saved-tensor hooks off; yield them, innermost first."""
    hooks = []
    while top := _peek_hooks(True):
        hooks.append(top)
        _pop_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)


class memo(cached_property[T]):
    """A cached_property without a lock: simulated ranks would wait for the lock, dynamo cannot trace it."""

    def __init__(self, fn: Callable[..., T]):
        super().__init__(fn)
        self.lock = nullcontext()  # private to functools (test_tracing.py)


class Marked(Tensor):
    """Base of tensor classes that tell a tensor's origin. In a graph, nodes are marked instead."""


def mark(x: Tensor, kind: type[Tensor]) -> Tensor:
    """Return `x` as a `kind`, in the same memory; if `x` is traced, mark its node."""
    if kind is Tensor:
        return x
    if not is_tracing() and not torch.compiler.is_compiling():
        return x.as_subclass(kind)
    node = node_of(x)
    if node is not None:
        node.meta["kind"] = kind
    return x


def kind_of(x: Tensor) -> type[Tensor]:
    """Return the class marking a tensor or its node."""
    if isinstance(x, Marked):
        return type(x)
    node = node_of(x) if is_tracing() else None
    while node is not None and _renames(node):
        (node,) = node.all_input_nodes
    return Tensor if node is None else node.meta.get("kind", Tensor)


def _renames(node: Node) -> bool:
    """True for `detach` and in-place operators: their results keep the class in eager code.

    torch 2.13 records `detach` as `aten.detach`, torch 2.14 as `aten.alias`, so the schema decides.
    """
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    info = arguments[0].alias_info if len(arguments) == 1 else None
    return info is not None and _node_form(node) == _node_form(node.all_input_nodes[0])


def _node_form(node: Node) -> object:
    x = node.meta["val"]
    return (x.dtype, x.shape, x.layout is torch.strided and x.stride(), x.is_conj(), x.is_neg())


def node_of(x: Tensor) -> Node | None:
    # private: no public name (test_loss_scale.py)
    mode = get_proxy_mode()
    traced = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return None if traced is None else traced.proxy.node


_LIBRARY = torch.library.Library("fshard", "DEF")


def define(
    schema: str, run: Callable[..., object], shapes: Callable[..., object], exact: bool = False, captured: bool = False
) -> None:
    """Define `torch.ops.fshard.<name>`: `run` implements it, `shapes` returns fake results.

    Tags forbid compilers to merge equal calls, to run a call while compiling, and to put it into a CUDA graph (a
    collective would repeat without its Python). `exact`: arguments keep their strides; else no copies are made to keep
    them. `captured`: a CUDA graph may contain the operator.
    """
    layout = torch.Tag.needs_exact_strides if exact else torch.Tag.flexible_layout
    unsafe = [] if captured else [torch.Tag.cudagraph_unsafe]
    _LIBRARY.define(schema, tags=[torch.Tag.nondeterministic_seeded, *unsafe, layout])
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)


_EVERY, _OF_TORCH = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))


def lead(key: str, functions: Mapping[str, Callable[..., object]]) -> None:
    """Replace torch's operators under a dispatch key. A function's first argument is the keyset."""
    _EVERY.fallback(torch.library.fallthrough_kernel, key)
    for name, run in functions.items():
        _OF_TORCH.impl(name, run, key, with_keyset=True)


define("materialize(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def fresh_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy, aligned to 64 bytes."""
    # a compiler would remove a clone
    if is_tracing():
        return torch.ops.fshard.materialize(x.contiguous())
    return x.clone(memory_format=torch.contiguous_format)


_UNNAMED = nullcontext()


def profiled(what: str, label: str) -> AbstractContextManager[object]:
    """Return a block named `fshard.<what> <label>` in profiles.

    >>> with profiled("all_gather", "blocks.0"):
    ...     pass
    """
    # private: `record_function` costs 2 us even without a profiler (test_profiling.py)
    if not profiler._is_profiler_enabled or is_tracing():
        return _UNNAMED
    return profiler.record_function(f"fshard.{what} {label}".rstrip())
