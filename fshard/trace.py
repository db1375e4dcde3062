"""A function of trees as one graph of operators on tensors.

Note [Traced functions]
    The function runs once, on fake tensors that have shapes and no values, and every operator it calls becomes a node:
    forward, backward, collectives, update, torch.func's transforms included. What Python decides on the way (which unit
    is gathered when, which branch is taken) is decided then, for all calls of one signature (Note [What a graph
    depends on] in `signature.py`).
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

# Private: the fake tensors that torch's own tracers run on; there is no public way to make some (test_jit.py notices).
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from . import tree
from .captures import captures
from .record import frame_of

_UNLIKELY = 0x6A17_C0DE_5EED


class TraceError(RuntimeError):
    """A function cannot become a graph: what it does, and where."""


@dataclass(frozen=True)
class Trace:
    """A graph with the structures of what goes in and comes out.

    Its inputs are the tensors among the leaves that go in; its outputs those among the leaves that come out. `results`
    says of each leaf that comes out which output it is, or what it is if it is no tensor.
    """

    module: fx.GraphModule
    spec: tree.Spec
    out_spec: tree.Spec
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Output:
    """The output of a graph of that number."""

    number: int


def tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """Those of some leaves that are tensors."""
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def trace(fn: Callable[..., Any], leaves: Sequence[Any], spec: tree.Spec) -> Trace:
    """The graph of `fn(*args, **kwargs)`, whose leaves and structure these are. TraceError says what cannot be one."""
    found: dict[str, Any] = {}

    def flat(*given: Tensor) -> list[Tensor]:
        before = [_identity(x) for x in given]
        args, kwargs = tree.unflatten(spec, _merged(leaves, given))
        out, found["spec"] = tree.flatten(fn(*args, **kwargs))
        _check_same(given, before, leaves, spec)
        results: list[Any] = []
        outputs: list[Tensor] = []
        for leaf in out:
            results.append(Output(len(outputs)) if isinstance(leaf, Tensor) else leaf)
            outputs += [leaf] * isinstance(leaf, Tensor)
        found["results"] = tuple(results)
        return outputs

    mode = _mode_of(leaves)
    # Private: torch has no public way to keep what a thread dispatches to. An error inside torch.func's transforms may
    # leave it in the middle of one, unable to start another (test_func_losses.py notices when this goes).
    try:
        given = [_fake(mode, leaf) for leaf in tensors(leaves)]
        with _without_random_state(), torch._C._PreserveDispatchKeyGuard():
            try:
                module = make_fx(flat, tracing_mode="fake", record_stack_traces=True)(*given)
            except Exception as failure:
                _let_go(failure)
                raise
    except (TraceError, ValueError, TypeError, NotImplementedError):
        raise
    except Exception as failure:
        raise _explained(failure, fn) from failure
    return Trace(module, spec, found["spec"], found["results"])


def abstract(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `fn` gives, in fake tensors: shapes, dtypes and devices, nothing computed, sent or kept.

    Meta tensors among the arguments stand for tensors on the default device. `lower` takes what this gives.

    >>> abstract(lambda x: x @ x, torch.empty(3, 3, device="meta")).shape
    torch.Size([3, 3])

    Source: jax.eval_shape.
    """
    leaves, spec = tree.flatten((args, kwargs))
    mode = _mode_of(leaves)
    fakes = [_fake(mode, leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    with mode:
        given, named = tree.unflatten(spec, fakes)
        return fn(*given, **named)


def _mode_of(leaves: Sequence[Any]) -> FakeTensorMode:
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    return fakes[0].fake_mode if fakes else FakeTensorMode(shape_env=_shapes())


def _shapes() -> ShapeEnv:
    """No shape depends on a value; without one of these Inductor would not look into its cache."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)


def _fake(mode: FakeTensorMode, leaf: Tensor) -> Tensor:
    """A fake of a leaf; a meta tensor stands for one of the default device."""
    if isinstance(leaf, FakeTensor):
        return leaf
    if leaf.device.type == "meta":
        with mode:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=torch.get_default_device())
    return mode.from_tensor(leaf, static_shapes=True)


def _merged(leaves: Sequence[Any], given: Sequence[Tensor]) -> list[Any]:
    fakes = iter(given)
    return [next(fakes) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def input_paths(leaves: Sequence[Any], spec: tree.Spec) -> list[str]:
    """The paths of the leaves that are tensors: what a graph's inputs are called."""
    return [path for path, leaf in zip(tree.paths(spec), leaves, strict=True) if isinstance(leaf, Tensor)]


def _identity(x: Tensor) -> tuple[Any, ...]:
    """What only an assignment to an attribute of a tensor changes: its memory, and its gradient."""
    return x.untyped_storage()._cdata, x.shape, id(x.grad) if x.is_leaf else None


def _check_same(given: Sequence[Tensor], before: Sequence[Any], leaves: Sequence[Any], spec: tree.Spec) -> None:
    for path, x, (*memory, grad) in zip(input_paths(leaves, spec), given, before, strict=True):
        *now, new_grad = _identity(x)
        if now != memory:
            raise TraceError(f"jit: the function assigns to .data of its argument {path!r}: make a new tensor instead")
        if new_grad != grad:
            raise TraceError(
                f"jit: the function assigns to .grad of its argument {path!r}, as .backward() does: take gradients "
                "with torch.autograd.grad, torch.func.grad or fshard.value_and_grad"
            )


@contextmanager
def _without_random_state() -> Iterator[None]:
    """TraceError if random numbers are seeded, or drawn in Python: a graph would have those of the first call."""
    saved, np = torch.default_generator.get_state(), sys.modules.get("numpy")

    def state() -> list[Any]:
        own = [] if np is None else [str(np.random.get_state()[1:])]
        return [torch.default_generator.get_state().tolist(), random.getstate(), *own]

    try:
        torch.default_generator.manual_seed(_UNLIKELY)  # to see a seed that is the one there was
        before = state()
        yield
        if state() != before:
            raise TraceError(
                "jit: the function seeds torch's generator, or draws Python's or numpy's random numbers, which a graph "
                "would repeat: seed outside, draw torch's inside (a step's come from its state)"
            )
    finally:
        torch.default_generator.set_state(saved)


def _let_go(failure: BaseException | None) -> None:
    """Free what the frames of an error hold: guards among it would change what the thread dispatches to, later on."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)
        failure = failure.__context__


def _explained(failure: Exception, fn: Callable[..., Any]) -> TraceError:
    text, where = str(failure), _site(failure)
    frames = traceback.extract_tb(failure.__traceback__)
    # where forward mode is on, as on simulated ranks, torch fails while it words the refusal
    refused = any(f.name == "validate" and f.filename.endswith("fake_tensor.py") for f in frames)
    if refused or "convert all Tensors to FakeTensors" in text:
        names = ", ".join(c.name for c in captures(fn) if isinstance(c.read(), Tensor))
        if not names and any(f.name == "_jvp_with_argnums" for f in frames):
            return TraceError(
                f"jit: torch cannot trace what stands at {where}: in a vmap of forward mode (jacfwd, hessian) a "
                "product with a tensor that does not vary along the direction. Use reverse mode (jacrev of jacrev for "
                "a Hessian), or do not jit"
            )
        names = names or "a tensor"
        return TraceError(
            f"jit: the function uses a tensor that is not among its arguments ({names}) at {where}: pass it as one, "
            "or in the state's `extra`"
        )
    if any(word in text for word in ("data-dependent", "value out of a tracing tensor", "_local_scalar_dense")) or (
        type(failure).__name__ in ("DataDependentOutputException", "GuardOnDataDependentSymNode")
    ):
        return TraceError(
            f"jit: the function asks for the value of a tensor (if, while, int, float, .item(), .tolist(), print) at "
            f"{where}, which a graph does not know: use torch.where or fshard.select, or do it outside"
        )
    return TraceError(
        f"jit: tracing failed at {where}: {type(failure).__name__}: {text.splitlines()[0] if text else ''}"
    )


def _site(failure: BaseException) -> str:
    """The innermost line of the user's code, or of any."""
    frame = frame_of(failure)
    return f"{frame.filename}:{frame.lineno} ({frame.line})"
