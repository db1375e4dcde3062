"""Trace a function of trees into one torch.fx graph of tensor operators.

Note [Traced functions]
    Tracing runs the function once on fake tensors, with shapes and without values. Every operator becomes a node:
    forward, backward, collectives, optimizer update, and operators of torch.func's transforms. Python's decisions (when
    to gather a unit, which branch to take) are fixed in the graph, for all calls with the same signature (Note [What a
    graph depends on] in `signature.py`).
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from numbers import Number
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, fx, nn

# Private API: fake tensors have no public constructor. test_jit.py fails if torch moves or changes these classes.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import tree
from ..core.arguments import NOT_THE_USER, call_site, check_function, frame_of, line_of
from ..core.random import draws
from ..core.storage import address, with_tensors
from ..core.tracing import RERUN, SET_DATA, Args, Kwargs, Marked, Operator, assigned, kind_of, mark, unhooked
from ..core.tree import Tree, tensors
from .captures import captures, generators, state_of

P = ParamSpec("P")
R = TypeVar("R")
_Identity = tuple[int, torch.Size, Tensor | None]  # storage, shape, gradient

_UNLIKELY = 0x6A17_C0DE_5EED
_OF_THE_CACHE = "has_fw_view"  # in torch 2.13's error, if forward mode gets a view from the cache of fake tensors


class TraceError(RuntimeError):
    """Raised if a function cannot be traced. The message names the operation and the user's line."""


@dataclass(frozen=True)
class Trace:
    """A traced graph, with the structures of the function's arguments (`spec`) and of its result (`out_spec`).

    `module` takes the tensors of the arguments, then captured tensors, and returns the result's tensors.
    `results` has an `Output` for each tensor of the result, and each other leaf itself.
    """

    module: fx.GraphModule
    spec: tree.Spec
    out_spec: tree.Spec
    results: tuple[object, ...]
    has_gradient: bool = False  # a result requires a gradient


@dataclass(frozen=True)
class Output:
    """A placeholder for output number `number` of a graph. `kind`: the result's class, Tensor or a `Marked`."""

    number: int
    kind: type[Tensor]


def resolved(x: Tensor) -> Tensor:
    """Resolve conjugate and negative bits, unseen by graphs. Make a module's parameter a plain tensor."""
    if type(x) is not Tensor:
        if is_lazy(x):  # `signature` refuses lazy tensors
            return x
        x = x.view_as(x) if type(x).__module__.startswith("fshard.module.") else x
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def trace(fn: Callable[..., Tree], leaves: Sequence[object], spec: tree.Spec, captured: Sequence[Tensor] = ()) -> Trace:
    """Trace `fn(*args, **kwargs)`. `captured`: tensors of closures and globals, as further inputs of the graph."""
    out_spec: tree.Spec
    results: list[object] = []
    has_gradient = False
    caches = True
    zeros: list[object] | None = []  # calls that made zero tangents without memory; None: make zeros with memory

    def flat(*inputs: Tensor) -> list[Tensor]:
        nonlocal out_spec, has_gradient
        inputs, more = inputs[: len(tensors(leaves))], inputs[len(tensors(leaves)) :]
        fake_of = {id(x): fake for x, fake in reversed([*zip(captured, more, strict=True)])}
        before = [_identity(x) for x in (*inputs, *more)]
        for x, leaf in zip(inputs, tensors(leaves), strict=True):
            if isinstance(leaf, Marked):
                mark(x, type(leaf))
        args, kwargs = tree.unflatten(spec, with_tensors(leaves, inputs))
        with _without_random_state(fake_of, zeros), _Captured(fake_of, [*inputs, *more]), _undrawn(fn, leaves):
            out, out_spec = tree.flatten(fn(*args, **kwargs))
        out = [fake_of.get(id(leaf), leaf) for leaf in out]
        has_gradient = any(leaf.requires_grad for leaf in tensors(out))
        _check_same([*inputs, *more], before, [*paths, *("a captured tensor" for _ in more)])
        _check_constants(out, out_spec, leaves)
        numbers = count()
        results.extend(Output(next(numbers), kind_of(x)) if isinstance(x, Tensor) else x for x in out)
        return tensors(out)

    def traced() -> fx.GraphModule:
        results.clear()
        # Private API: torch has no public way to restore dispatch keys. An error inside a transform of torch.func may
        # leave its keys set, so later transforms fail (test_func_losses.py).
        with _mode_of(leaves, caches) as mode, torch._C._PreserveDispatchKeyGuard(), _alone():
            fakes = list(_fakes(mode, [*tensors(leaves), *map(resolved, captured)]))
            try:
                return make_fx(flat, tracing_mode="fake")(*fakes)
            except Exception as failure:
                _let_go(failure)
                raise

    paths = input_paths(leaves, spec)
    try:
        while True:
            try:
                module = traced()
                break
            except (RuntimeError, AssertionError) as failure:
                if caches and _OF_THE_CACHE in str(failure):
                    caches = False
                elif zeros and not isinstance(failure, TraceError):  # a view of a zero tangent is no fake tensor
                    zeros = None
                else:
                    raise
    except (TraceError, ValueError, TypeError):
        raise
    except Exception as failure:
        raise _explained(failure, fn) from failure
    _check_bodies(module)
    return Trace(module, spec, out_spec, tuple(results), has_gradient)


def _check_bodies(module: fx.GraphModule) -> None:
    read = module.graph.find_nodes(op="get_attr")
    if any(isinstance(getattr(module, str(node.target)), FakeTensor) for node in read):
        raise TraceError(
            "jit: the function uses a tensor that the body of a scan put somewhere: a body is traced once for several "
            "units, so that it returns what others read (`carry, y`)"
        )


def eval_shape(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the result of `fn(*args, **kwargs)` with fake tensors: shapes, dtypes and devices without values.

    Nothing is computed, sent to another rank or stored. A meta tensor among the arguments stands for a tensor on the
    default device; tensors in closures and globals give their shapes. `lower` takes the returned fake tensors as
    arguments.

    >>> eval_shape(lambda x: x @ x, torch.empty(3, 3, device="meta")).shape
    torch.Size([3, 3])

    Source: jax.eval_shape.
    """
    check_function("eval_shape: fn", fn, "fn(*args)")
    leaves, spec = tree.flatten((args, kwargs))

    def fake(x: object) -> object:
        return _fake(mode, x) if isinstance(x, Tensor) else x

    with _mode_of(leaves, caches=False, takes_real=True) as mode, mode:
        fake_args, fake_kwargs = tree.unflatten(spec, [*map(fake, leaves)])
        out = fn(*fake_args, **fake_kwargs)
        captured = [x for x in tree.leaves(out) if isinstance(x, Tensor) and not isinstance(x, FakeTensor)]
        return tree.map(fake, out) if captured else out


@contextmanager
def _alone() -> Iterator[None]:
    """Hide a block from a checkpoint or `remat` around it, for both may run their function again.

    In the block, functions decorated by torch.compile run as written.
    """
    inlined = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with assigned(RERUN, None), unhooked(), inlined, warnings.catch_warnings():
        # torch reads `.grad` of results, and hides the warning unless warnings are errors
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def _mode_of(leaves: Sequence[object], caches: bool, takes_real: bool = False) -> Iterator[FakeTensorMode]:
    """Yield a mode for fake tensors. Its cache halves the time. `takes_real`: operators take real tensors, too."""
    # An operator takes fake tensors of one mode only: if arguments are fake, use their mode.
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    # This ShapeEnv refuses shapes that depend on values. Without a ShapeEnv, Inductor does not use its cache.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = fakes[0].fake_mode if fakes else FakeTensorMode(shape_env=shapes)
    before = mode.cache_enabled, mode.allow_non_fake_inputs
    mode.cache_enabled, mode.allow_non_fake_inputs = caches, takes_real
    try:
        yield mode
    finally:
        mode.cache_enabled, mode.allow_non_fake_inputs = before


def _fake(mode: FakeTensorMode, leaf: Tensor) -> Tensor:
    if leaf.device.type == "meta" or (isinstance(leaf, FakeTensor) and leaf.fake_mode is not mode):
        return _of_kind(leaf, alone(leaf, mode))
    if isinstance(leaf, FakeTensor):
        return leaf
    return _of_kind(leaf, mode.from_tensor(leaf, static_shapes=True))


def kind_in_key(x: Tensor) -> type:
    """Return a tensor's class as `isinstance` sees it; for a fake tensor, the class that it stands for."""
    kind = type(x)
    if kind is Tensor or issubclass(kind, FakeTensor):
        return nn.Parameter if getattr(x, "_is_param", False) else nn.Buffer if hasattr(x, "_is_buffer") else Tensor
    return kind


def _of_kind(leaf: Tensor, fake: Tensor) -> Tensor:
    kind = kind_in_key(leaf)
    if kind is nn.Parameter:
        fake._is_param = True
    elif kind is nn.Buffer:
        fake._is_buffer = True  # type: ignore[attr-defined]
    return fake


def alone(x: Tensor, mode: FakeTensorMode | None = None) -> Tensor:
    """Return a fake tensor like `x`, in new memory."""
    device = torch.get_default_device() if x.device.type == "meta" else x.device
    with mode or x.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def _fakes(mode: FakeTensorMode, leaves: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a fake tensor for each leaf, without shared memory: a later call may have separate tensors.

    Leaves that require a gradient still share memory: autograd sums the gradients of all views.
    """
    seen = set[int]()  # storages
    for leaf in leaves:
        memory = address(leaf)
        is_apart = memory in seen and not leaf.requires_grad
        yield _of_kind(leaf, alone(leaf, mode)) if is_apart else _fake(mode, leaf)
        seen.add(memory)


def input_paths(leaves: Sequence[object], spec: tree.Spec) -> list[str]:
    return [path for path, leaf in zip(tree.leaf_paths(spec), leaves, strict=True) if isinstance(leaf, Tensor)]


def _identity(x: Tensor) -> _Identity:
    """Return the properties of a tensor that only assignments to `x.data` or `x.grad` change."""
    return address(x), x.shape, x.grad if x.is_leaf else None  # reading a non-leaf's .grad warns


def _check_same(inputs: Sequence[Tensor], before: Sequence[_Identity], paths: Sequence[str]) -> None:
    for path, x, (*old_memory, old_grad) in zip(paths, inputs, before, strict=True):
        *memory, grad = _identity(x)
        if memory != old_memory:
            raise TraceError(f"jit: the function assigns to .data of its argument {path!r}: make a new tensor instead")
        if grad is not old_grad:
            raise TraceError(
                f"jit: the function assigns to .grad of its argument {path!r}, as .backward() does: take gradients "
                "with torch.autograd.grad, torch.func.grad or fshard.value_and_grad"
            )


# Types of a result's leaves: immutable, because every call returns the objects of the traced call.
_CONSTANTS = (Tensor, Number, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _check_constants(out: Sequence[object], spec: tree.Spec, leaves: Sequence[object]) -> None:
    argument_ids = {id(leaf) for leaf in leaves}  # may have any type: the cache key has them
    for path, leaf in zip(tree.leaf_paths(spec), out, strict=True):
        if not isinstance(leaf, _CONSTANTS) and id(leaf) not in argument_ids:
            at = f" at {path!r}" if path else ""
            raise TraceError(
                f"jit: the function gives back a {type(leaf).__name__}{at}, which a graph cannot make: give back trees "
                "of tensors, numbers, strings and None"
            )


def _with_fakes(fake_of: Mapping[int, Tensor], x: Tree) -> Tree:
    return tree.map(lambda leaf: fake_of.get(id(leaf), leaf), x)


class _Captured(TorchFunctionMode):
    """Replace captured tensors by fake tensors, also in `.tolist()` and `.data`, which call no operator.

    Raise TraceError if the function asks for an input's offset in its storage (a later input may have another), or
    assigns to `.data` of a tensor other than an input (no operator records the assignment).
    """

    def __init__(self, fake_of: Mapping[int, Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._fake_of, self._inputs = fake_of, {id(x): address(x) for x in inputs}

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        args, kwargs = _with_fakes(self._fake_of, (args, kwargs or {})) if self._fake_of else (args, kwargs or {})
        if func == SET_DATA and id(args[0]) not in self._inputs:  # for inputs, `_check_same` raises, with the path
            raise TraceError(
                f"jit: the function assigns to .data of a tensor at {call_site()}, which no graph has: give the new "
                "tensor a name of its own, or write into this one with .copy_() in torch.no_grad()"
            )
        asks = func is Tensor.storage_offset and address(args[0]) in self._inputs.values()
        if asks and not sys._getframe(1).f_code.co_filename.startswith(NOT_THE_USER):
            raise TraceError(f"jit: storage_offset() of an argument at {call_site()}: pass that number as an argument")
        if func in (Tensor.tolist, torch.tensor):  # both read memory without an operator: let `_Watch` see the tensors
            tree.map(lambda x: torch.detach(x) if isinstance(x, Tensor) else x, args)
        return func(*args, **kwargs)


_LIFTS = {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default}  # called by `torch.tensor` on its result


class _Watch(TorchDispatchMode):
    """Raise TraceError for sparse tensors, and for random numbers that a graph would repeat in every call.

    Before each draw, torch's generator gets a new seed. If the function seeds it or restores a state (fork_rng,
    set_rng_state, torch.utils.checkpoint), `check` finds another seed and raises. A step draws from the train state
    instead (Note [Random numbers in a graph] in `random.py`).
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so torch.compile inside the traced function (flex_attention) still compiles."""
        return True

    def __init__(self, fake_of: Mapping[int, Tensor], zeros: list[object] | None) -> None:
        super().__init__()
        self._fake_of, self._zeros = fake_of, zeros
        self._seed = _UNLIKELY
        # no user sets this seed, so `check` notices any manual_seed
        torch.default_generator.manual_seed(_UNLIKELY)

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._fake_of:
            args, kwargs = _with_fakes(self._fake_of, (args, kwargs))  # `_Captured` does not see every call
        if func is torch.ops.aten._efficientzerotensor.default:
            if self._zeros is None:
                return torch.zeros(*args, **kwargs)
            self._zeros.append(func)
        if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in args) and func not in _LIFTS:
            # torch raises this itself, but not for a tensor of one element
            raise RuntimeError("convert all Tensors to FakeTensors")
        if draws(func, args, kwargs):
            if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
                raise TraceError(f"jit: {func} with a generator of its own at {call_site()}{_REPEATED}")
            self.check(f" before {func} at {call_site()}")
            self._seed += 1  # a state saved before this draw has an older seed
            torch.default_generator.manual_seed(self._seed)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.layout is not torch.strided:
            raise TraceError(
                f"jit: {func} makes a sparse tensor at {call_site()}, and none can be traced: use dense tensors, and "
                "sparse=False in embedding and embedding_bag"
            )
        return out

    def check(self, where: str = "") -> None:
        if torch.default_generator.initial_seed() != self._seed:
            raise TraceError(
                "jit: the function seeds torch's generator, or puts back its state (fork_rng, set_rng_state, "
                f"torch.utils.checkpoint around what draws){where}{_REPEATED}"
            )


_REPEATED = (
    ": a graph would repeat the numbers of its first call. Random numbers inside jit come from the state's seed (in a "
    "step) or from torch's own generator, seeded outside; or pass drawn numbers as arguments"
)


@contextmanager
def _without_random_state(fake_of: Mapping[int, Tensor], zeros: list[object] | None) -> Iterator[None]:
    saved = torch.default_generator.get_state()
    try:
        with _Watch(fake_of, zeros) as watch:
            yield
        watch.check()
    finally:
        torch.default_generator.set_state(saved)


@contextmanager
def _undrawn(fn: Callable[..., Tree], leaves: Sequence[object]) -> Iterator[None]:
    before = [(kind, x, state_of(x)) for kind, x in generators(fn, leaves)]
    yield
    for kind, generator, state in before:
        if state_of(generator) != state:
            numbers = f"from a {kind} that it holds" if kind else "Python's or numpy's random numbers"
            raise TraceError(
                f"jit: the function draws {numbers}, which a graph would repeat: draw torch's inside (a step's come "
                "from its state), or pass drawn numbers as arguments. If another thread draws meanwhile, give it a "
                "generator of its own"
            )


def _let_go(failure: BaseException | None) -> None:
    """Clear variables in tracebacks: a dispatch guard freed later would change the thread's dispatch keys."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__context__


def _explained(failure: Exception, fn: Callable[..., Tree]) -> TraceError:
    text, where = str(failure), _site(failure)
    frames = traceback.extract_tb(failure.__traceback__)
    # In forward-mode AD (always, for simulated ranks) torch fails to format its message: look at the frames.
    refused = any(f.name == "validate" and f.filename.endswith("fake_tensor.py") for f in frames)
    if refused or "convert all Tensors to FakeTensors" in text:
        read = [(c.name, value if isinstance(value := c.read(), tuple) else (value,)) for c in captures(fn)]
        names = ", ".join(name for name, values in read if tensors(values)) or "a tensor"
        return TraceError(
            f"jit: the function uses a tensor that is not among its arguments ({names}) at {where}: pass it as one, "
            "or in the state's `extra`. A graph reads tensors of closures and globals, also in dicts and lists, unless "
            "they require a gradient, and none of other objects"
        )
    asks = any(word in text for word in ("data-dependent", "value out of a tracing tensor", "_local_scalar_dense"))
    if asks or type(failure).__name__ in ("DataDependentOutputException", "GuardOnDataDependentSymNode"):
        return TraceError(
            f"jit: the function asks for the value of a tensor (if, while, int, float, .item(), .tolist(), print) at "
            f"{where}, which a graph does not know: use torch.where or fshard.select, or do it outside"
        )
    if type(failure).__name__ == "DynamicOutputShapeException":
        return TraceError(
            f"jit: the shape of {text.removesuffix('.default')}'s result at {where} depends on the values of a tensor "
            "(x[mask], nonzero, masked_select, unique): keep all rows, as in torch.where(mask, loss, 0).sum() with "
            "mask.sum() as count of fshard.Mean, or select rows before the call"
        )
    if "hasPrimaryContext" in text:  # autograd's engine asks for the stream of an absent GPU
        return TraceError(
            "jit: torch's backward asks for the stream of a GPU, and this machine has none: lower the function on one "
            "that has, or for AbstractMesh(shard=...), without a device, whose graph has the same collectives. A "
            "function without a backward needs no GPU"
        )
    return TraceError(
        f"jit: tracing failed at {where}: {type(failure).__name__}: {text.splitlines()[0] if text else ''}"
    )


def _site(failure: BaseException) -> str:
    frame = frame_of(failure)
    return f"{line_of(frame.filename, frame.lineno)} ({frame.line})"
