"""Tracing: whether it is on, operators that it records, names in the traces of torch.profiler; values of a block."""

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

# Whether a trace calls a function for each unit, even of equal ones: someone looks at its operators.
UNROLLS: ContextVar[bool] = ContextVar("fshard.core.tracing", default=False)
T = TypeVar("T")
Operator: TypeAlias = Any  # an operator as dispatch modes and graphs see it: its class is private to torch
# The arguments of a function of torch, or of an operator, as modes and subclasses of tensors are given them.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any] | None


class Rerun(Protocol):
    """A function that `fshard.remat` runs: the units of parameters that it reads become its inputs."""

    def unit(self, tape: Any, number: int) -> Sequence[Tensor]:
        """Return what the function is given as the leaves of a unit of a tape."""


RERUN: ContextVar[Rerun | None] = ContextVar("fshard.core.rerun", default=None)  # the innermost one that runs


def is_tracing() -> bool:
    """Whether operators are being traced with fake tensors instead of being run."""
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace the question below
        return False
    # Private: there is no public way to ask (test_jit.py notices when it goes).
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


# Private: there is no public way to leave the modes of a trace (test_scan.py notices when it goes).
unseen: Callable[[], AbstractContextManager[None]] = _disable_current_modes


@contextmanager
def unrecorded() -> Iterator[None]:
    """A block in a trace whose operators run on fake tensors, and are seen by nothing else: no mode, no graph."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with torch._C.DisableTorchFunction(), unseen(), fake:
        yield


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A block in which a context variable has a value; after it the one from before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# private: there is no public way to take hooks off (test_prefetch.py notices when it goes)
_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextmanager
def unhooked() -> Iterator[Sequence[tuple[Any, Any]]]:
    """Take the hooks on saved tensors off for a block, which is given them, innermost first."""
    hooks = []
    while top := _top_hooks(True):
        hooks.append(top)
        _pop_hooks()
    try:
        yield hooks
    finally:
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)


class memo(cached_property[T]):  # lower case, because it is a decorator like `property`
    """functools.cached_property, without the lock of all threads that it has before Python 3.12.

    Inside of it a simulated rank would wait for others, and torch.compile cannot trace it.
    """

    def __init__(self, fn: Callable[[Any], T]):
        super().__init__(fn)
        self.lock = nullcontext()  # private to functools (test_tracing.py notices when it goes)


class Marked(Tensor):
    """Base of classes that say how a tensor was made. In a graph, where tensors have no class, a node is marked."""


def mark(x: Tensor, kind: type[Tensor]) -> Tensor:
    """Return `x` as a tensor of this class, in the same memory; while tracing `x` itself, whose node is marked."""
    if kind is Tensor:
        return x
    if not is_tracing() and not torch.compiler.is_compiling():
        return x.as_subclass(kind)
    node = node_of(x)
    if node is not None:
        node.meta["kind"] = kind
    return x


def kind_of(x: Tensor) -> type[Tensor]:
    """The class with which a tensor, or the node that made it, was marked; `Tensor` for any other one."""
    if isinstance(x, Marked):
        return type(x)
    node = node_of(x) if is_tracing() else None
    while node is not None and _renames(node):
        (node,) = node.all_input_nodes
    return Tensor if node is None else node.meta.get("kind", Tensor)


def _renames(node: Node) -> bool:
    """Whether a node returns its only argument, as `detach` and operators in place do, which eagerly keep the class.

    By what it does: torch 2.13 records `detach` as `aten.detach`, torch 2.14 as `aten.alias`.
    """
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    info = arguments[0].alias_info if len(arguments) == 1 else None
    return info is not None and _form(node) == _form(node.all_input_nodes[0])


def _form(node: Node) -> object:
    x = node.meta["val"]
    return (x.dtype, x.shape, x.layout is torch.strided and x.stride(), x.is_conj(), x.is_neg())


def node_of(x: Tensor) -> Node | None:
    """Return the node of a traced tensor; None for what no graph records."""
    # Private: where make_fx keeps the node of a tensor has no public name (test_loss_scale.py notices when it goes).
    mode = get_proxy_mode()
    traced = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    return None if traced is None else traced.proxy.node


_LIBRARY = torch.library.Library("fshard", "DEF")


def define(
    schema: str, run: Callable[..., object], shapes: Callable[..., object], exact: bool = False, captured: bool = False
) -> None:
    """Define the operator `torch.ops.fshard.<name>`: `run` implements it, `shapes` returns fake results.

    The tags tell compilers not to merge two calls with equal arguments, not to run a call while compiling, not to put
    it into a CUDA graph, which would repeat a collective without its Python, and not to change the layout of an
    argument: they would copy it for each node, and `wait` would keep a copy of what is sent. With `exact` they give
    every argument the strides that it has in the trace. With `captured` it may be a part of a CUDA graph.
    """
    layout = torch.Tag.needs_exact_strides if exact else torch.Tag.flexible_layout
    unsafe = [] if captured else [torch.Tag.cudagraph_unsafe]
    _LIBRARY.define(schema, tags=[torch.Tag.nondeterministic_seeded, *unsafe, layout])
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)


_EVERY, _OF_TORCH = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))


def lead(key: str, functions: Mapping[str, Callable[..., object]]) -> None:
    """Lead operators of torch to functions, which get their keys first, where a dispatch key is on."""
    _EVERY.fallback(torch.library.fallthrough_kernel, key)
    for name, run in functions.items():
        _OF_TORCH.impl(name, run, key, with_keyset=True)


define("materialize(Tensor x) -> Tensor", torch.clone, torch.empty_like)


def copied(x: Tensor) -> Tensor:
    """A contiguous copy in memory of its own, which starts where torch's memory starts: at a multiple of 64 bytes."""
    # a compiler would leave a clone out, and read `x` where it lies
    if is_tracing():
        return torch.ops.fshard.materialize(x.contiguous())
    return x.clone(memory_format=torch.contiguous_format)


_NOTHING = nullcontext()


def named(what: str, label: str) -> AbstractContextManager[object]:
    """A block that a running profiler shows as `fshard.<what> <label>`; nothing is recorded in graphs.

    >>> with named("all_gather", "blocks.0"):
    ...     pass
    """
    # `_is_profiler_enabled` is private: a `record_function` takes 2 us where no profiler runs, and there is no public
    # way to ask (test_profiling.py notices when it goes)
    if not profiler._is_profiler_enabled or is_tracing():
        return _NOTHING
    return profiler.record_function(f"fshard.{what} {label}".rstrip())
