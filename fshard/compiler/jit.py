"""`jit`: trace a pure function of trees into one graph, compile the graph, and cache it by signature."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..comm.consensus import of_all, together
from ..core import func_levels, tree
from ..core.arguments import check_flags, check_whole, expect
from ..core.losses import running
from ..core.tracing import is_tracing
from ..core.tree import tensors
from ..hosts.check import Checked, is_wanted
from ..plan.plan import Plan
from ..plan.precision import Policy
from ..sharding.sharded import Sharded
from . import artifact as artifacts
from .artifact import file_at
from .captures import Capture, captures
from .identity import identity_of
from .lowered import Compiled, Lowered, Options, loaded, lower
from .signature import Captured, Signature, changed, contents, flat_call, inputs_of, on_meshes, signature, unlike_call

P = ParamSpec("P")
R = TypeVar("R")
_CacheKey = tuple[Signature, Captured]
_Graph = Compiled | None  # None: a result requires a gradient, so the function itself runs
_RUNS_AS_WRITTEN = (
    "not compiled: a result requires a gradient, so the function runs as it is written. Jit the function that takes "
    "the derivative, or call this one in torch.no_grad()"
)
_CASTS = (
    "not compiled: it was called in a loss of parameters with a policy, by which modules cast, so the function runs as "
    "it is written. Jit the function that takes the derivative, fshard.predict(fn) or fshard.evaluate(fn)"
)

# Bytes. Below, the start of a collective takes most of its time. Units of a large model are far larger.
_BUCKET_BYTES = 1 << 20


class Jitted(Generic[P, R]):
    """A function returned by `jit`."""

    def __init__(self, fn: Callable[P, R], backend: str, options: Options, path: str | None):
        self._fn, self._backend, self._path = fn, backend, path
        self.options: Options = options
        self.__wrapped__ = fn  # read by `captures`
        self._graphs: dict[_CacheKey, _Graph] = {}  # graphs for arguments without a mesh
        self._captures: list[Capture] = []
        self._inputs = set[tuple[int, str]]()  # `Capture.identity` of inputs of any graph
        self._reasons: list[str] = []
        self._checked = is_wanted()

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Return the graph for these arguments, to inspect or compile. Arguments may be meta or fake tensors."""
        leaves, spec = flat_call(args, kwargs)
        known = identity_of(self._fn, signature(leaves, spec, on_meshes((args, kwargs))), self.options)
        return replace(lower(self._fn, leaves, spec, self.options), identity=known)

    def explain(self) -> str:
        """Return one line for each trace, with its reason."""
        return "\n".join(self._reasons) or "not traced yet"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function. For a new signature, trace and compile it first."""
        # a trace or transform around the call cannot see into a compiled graph
        if is_tracing() or torch.compiler.is_compiling() or func_levels.inside():
            return self._fn(*args, **kwargs)
        checked = self._checked and tree.nodes((args, kwargs), Sharded)
        return (Checked(self._run) if checked else self._run)(*args, **kwargs)

    def _run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        (leaves, spec), nodes = flat_call(args, kwargs), on_meshes((args, kwargs))
        if why := _RUNS_AS_WRITTEN if _has_derivative(leaves) else _CASTS if _in_loss_with_policy() else "":
            self._reasons += [why] * (why not in self._reasons)
            return self._fn(*args, **kwargs)
        homes = [node.home for node in nodes if node.home is not None]
        homes = homes or [plan for plan in _plans_of_loss() if plan.mesh]
        # the arguments' plan or layout keeps these graphs, and frees them with itself
        graphs = homes[0].derived.graphs.setdefault(self, {}) if homes else self._graphs
        called, variables = signature(leaves, spec, nodes), self._captures
        inputs = inputs_of(variables)
        compiled = graphs.get((called, contents(variables, inputs)), ...)
        if compiled is ...:
            compiled, variables, how = self._compiled(leaves, called)
            inputs = inputs_of(variables)
            key = called, contents(variables, inputs)
            reason = how or self._reason(graphs, key)
            self._reasons.append(reason if compiled else f"{reason}, and {_RUNS_AS_WRITTEN}")
            graphs[key] = compiled
        return self._fn(*args, **kwargs) if compiled is None else compiled.run(leaves, args, inputs)

    def _compiled(self, leaves: list[object], called: Signature) -> tuple[_Graph, list[Capture], str]:
        variables = list(captures(self._fn))
        before = contents(variables, {})
        if self._path is not None:
            compiled, how = self._from_artifact(self._path, leaves, called, variables)
        else:
            lowered = lower(self._fn, leaves, called.spec, self.options)
            compiled, how = (None, "") if lowered.traced.has_gradient else (lowered.compile(self._backend), "")
        self._inputs |= {variable.identity for variable in (compiled.interface.captured if compiled else ())}
        # If tracing changed a variable, such as a counter of traces, compare only its input tensors, or nothing.
        compared = zip(variables, before, contents(variables, {}), strict=True)
        known = [v._replace(is_input=v.identity in self._inputs, of_tensors=old != new) for v, old, new in compared]
        self._captures = [variable for variable in known if variable.is_input or not variable.of_tensors]
        return compiled, self._captures, how

    def _from_artifact(
        self, path: str, leaves: list[object], called: Signature, variables: list[Capture]
    ) -> tuple[_Graph, str]:
        known, mesh, first = identity_of(self._fn, called, self.options), called.mesh, not self._reasons
        # later, only some ranks may have new arguments, so no rank waits for others
        others = mesh if first else None
        program, how = together(others, lambda: artifacts.find(path, known, mesh)), f"loaded from {path}"
        reasons = of_all(program if isinstance(program, str) else "", others)
        if isinstance(program, str) or any(reasons):
            how = f"traced, and written to {path}" if first else "traced again, and not written"
            rank = next(rank for rank, reason in enumerate(reasons) if reason)
            how += f": {program if isinstance(program, str) else f'rank {rank}: {reasons[rank]}'}"
            lowered = together(others, partial(lower, self._fn, leaves, called.spec, self.options))
            if lowered.traced.has_gradient:
                return None, ""
            program = together(others, partial(lowered.program, leaves))
            if first:
                artifacts.save_program(path, known, program, mesh)
        compiled = loaded(program, leaves, called, variables, self.options)
        if first and how.startswith("traced") and called.is_on_accelerator:
            compiled.after_first.append(partial(self._save_kernels, path, known, program, mesh, compiled.scopes))
        return compiled, how

    def _save_kernels(self, path: str, *program: Any) -> None:
        try:
            artifacts.save_program(path, *program)
        except OSError as error:  # an error would lose the call's result
            self._reasons.append(f"{path} has no kernels: {error}")

    def _reason(self, graphs: dict[_CacheKey, _Graph], key: _CacheKey) -> str:
        if not self._reasons:
            return "traced for the first call"
        if not graphs:
            return "traced again: for another plan, or on another mesh"
        (old_signature, old_contents), (new_signature, new_contents) = next(iter(graphs)), key
        if old_signature == new_signature:
            return f"traced again: {changed(old_contents, new_contents)}"
        return f"traced again: {unlike_call(old_signature, new_signature)}"


def _in_loss_with_policy() -> bool:
    """Return True inside a loss with a policy: a policy finds leaves by their memory, and a graph has other memory."""
    return any(plan.policy != Policy() for plan in _plans_of_loss())


def _plans_of_loss() -> list[Plan]:
    return [tape.plan for tape in loss.tapes] if (loss := running()) is not None else []


def _has_derivative(leaves: Sequence[object]) -> bool:
    is_made = torch.is_grad_enabled() and any(x.grad_fn is not None for x in tensors(leaves))
    return is_made or any(map(func_levels.is_dual, leaves))


def jit(
    fn: Callable[P, R],
    donate: bool = False,
    *,
    backend: str = "inductor",
    in_flight: int = 0,
    bucket: int = _BUCKET_BYTES,
    artifact: str | os.PathLike[str] | None = None,
) -> Jitted[P, R]:
    """Return a function that runs `fn` (a step, a loss, a gradient, any pure function) as one compiled graph.

    `fn` is traced again if one of these changes; `.explain()` gives the reason:

    - structure, shapes, strides, dtypes, devices, mesh or rank of the arguments, or an argument other than a tensor;
    - torch's settings: autocast, default dtype and device, grad mode, deterministic algorithms, precision of matrix
      products, enabled attention kernels;
    - a number, string, array or function read from a closure, a global, a default, an argument of a partial, or by name
      from a module, class or object, also inside Python's containers.

    Arguments:

    - `donate`: reuse the memory of the first argument for the first result; both have the same structure.
    - `backend`: the name of a backend of torch.compile.
    - `in_flight`: start gathers of parameters up to this many bytes ahead; 0 means the plan's `prefetch`, or one unit.
    - `bucket`: merge consecutive collectives of one kind, up to this many bytes (default 1 MiB); 0 merges none. All
      merged buffers are in memory at once. Results have the same bits.
    - `artifact`: a file of compiled functions. The first call loads `fn` from the file. If the file lacks `fn`, ranks
      trace `fn` and rank 0 adds it; `.explain()` gives the reason. All ranks must see the file, and make the first call
      together. Loading an artifact runs its code: load only a file that you trust.

    A graph passes no gradient on: take the gradient inside `fn`. If a result requires a gradient, or a transform of
    torch.func runs, `fn` itself is called and nothing is compiled.

    Raises TraceError if `fn` depends on the value of a tensor, uses a tensor other than its arguments, assigns to
    attributes of its arguments, seeds or uses a random generator of its own, makes sparse tensors, or returns a leaf
    other than a tensor, number, string or None. Raises TypeError if an argument cannot be compared with a later call's,
    or is a tensor of a class other than Tensor and Parameter.

    >>> jit(lambda x: {"y": 2 * x}, backend="eager")(torch.tensor(1.0))
    {'y': tensor(2.)}

    Source: jax.jit; SimpleFSDP (Zhang et al., 2024) for the whole step as one graph.
    """
    expect("jit: fn", fn, callable(fn) and not isinstance(fn, type), "a function of trees: a step, a loss, a gradient")
    check_flags(**{"jit: donate": donate})
    expect("jit: backend", backend, isinstance(backend, str), "the name of a backend of torch.compile")
    check_whole("jit: in_flight", in_flight, least=0, what="a number of bytes")
    check_whole("jit: bucket", bucket, least=0, what="a number of bytes")
    if artifact is not None:
        artifact = file_at("jit: artifact", artifact)
        expect("jit: artifact: backend", backend, backend == "inductor", "inductor, whose code can be saved")
    return Jitted(fn, backend, Options(donate, in_flight, bucket), artifact)
