"""A function of trees as one graph of operators on tensors.

Note [Traced functions]
    The function runs once, on fake tensors that have shapes and no values, and every operator it calls becomes a node:
    forward, backward, collectives, update, torch.func's transforms included. What Python decides on the way (which unit
    is gathered when, which branch is taken) is decided then, for all calls whose arguments have the same structure,
    shapes, dtypes, devices and static values (`signature`).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

# Private: the fake tensors that torch's own tracers run on; there is no public way to make some (test_jit.py notices).
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from . import tree
from .record import frame_of


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


def signature(leaves: Sequence[Any], spec: tree.Spec) -> tuple[Any, ...]:
    """What calls must have in common to run the same graph."""
    return (spec, tuple(_kind(leaf) for leaf in leaves))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        device = torch.get_default_device() if leaf.device.type == "meta" else leaf.device  # as `_fake` has it
        return Tensor, leaf.shape, leaf.stride(), leaf.dtype, device, leaf.requires_grad
    return type(leaf), leaf


def difference(old: tuple[Any, ...], new: tuple[Any, ...]) -> str:
    """Where two signatures begin to differ, in words."""
    if old[0] != new[0]:
        return "the structure of the arguments, or what their nodes carry (a plan, say), differs"
    path, a, b = next((path, a, b) for path, a, b in zip(tree.paths(new[0]), old[1], new[1], strict=True) if a != b)
    return f"argument {path!r} was {_words(a)}, is {_words(b)}"


def _words(kind: Any) -> str:
    if kind[0] is not Tensor:
        return repr(kind[1])
    _, shape, stride, dtype, device, requires_grad = kind
    words = f"{str(dtype).removeprefix('torch.')}{list(shape)} strides {list(stride)} on {device}"
    return words + " that requires a gradient" * requires_grad


def trace(fn: Callable[..., Any], leaves: Sequence[Any], spec: tree.Spec) -> Trace:
    """The graph of `fn(*args, **kwargs)`, whose leaves and structure these are. TraceError says what cannot be one."""
    found: dict[str, Any] = {}

    def flat(*given: Tensor) -> list[Tensor]:
        versions = [x._version for x in given]
        args, kwargs = tree.unflatten(spec, _merged(leaves, given))
        out, found["spec"] = tree.flatten(fn(*args, **kwargs))
        _check_unchanged(given, versions, leaves, spec)
        results: list[Any] = []
        outputs: list[Tensor] = []
        for leaf in out:
            results.append(Output(len(outputs)) if isinstance(leaf, Tensor) else leaf)
            outputs += [leaf] * isinstance(leaf, Tensor)
        found["results"] = tuple(results)
        return outputs

    mode = _mode_of(leaves)
    try:
        given = [_fake(mode, leaf) for leaf in tensors(leaves)]
        module = make_fx(flat, tracing_mode="fake", record_stack_traces=True)(*given)
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


def _check_unchanged(given: Sequence[Tensor], versions: Sequence[int], leaves: Sequence[Any], spec: tree.Spec) -> None:
    paths = [path for path, leaf in zip(tree.paths(spec), leaves, strict=True) if isinstance(leaf, Tensor)]
    for path, x, version in zip(paths, given, versions, strict=True):
        if x._version != version:
            raise TraceError(
                f"jit: the function changes its argument {path!r} in place: make a new tensor instead, or a clone first"
            )


def _explained(failure: Exception, fn: Callable[..., Any]) -> TraceError:
    text, where = str(failure), _site(failure)
    frames = traceback.extract_tb(failure.__traceback__)
    # where forward mode is on, as on simulated ranks, torch fails while it words the refusal
    refused = any(f.name == "validate" and f.filename.endswith("fake_tensor.py") for f in frames)
    if refused or "convert all Tensors to FakeTensors" in text:
        names = ", ".join(_captured(fn)) or "a tensor"
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


def _captured(fn: Any, seen: frozenset[int] = frozenset()) -> Iterator[str]:
    """The names of tensors that a function, or one it calls by name, finds elsewhere than in its arguments."""
    if isinstance(fn, partial):
        yield from _captured(fn.func, seen)
    while hasattr(fn, "run"):  # a step's own function, maybe checked
        fn = fn.run
    fn = inspect.unwrap(fn)
    if not inspect.isfunction(fn) or id(fn) in seen or fn.__module__.startswith(("torch.", "fshard.kernels")):
        return
    held = inspect.getclosurevars(fn)
    for name, value in {**held.globals, **held.nonlocals}.items():
        if isinstance(value, Tensor):
            yield f"{name!r} of {fn.__qualname__}"
        elif callable(value):
            yield from _captured(value, seen | {id(fn)})
