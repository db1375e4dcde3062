"""A traced function with all passes applied, to inspect or compile."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..comm.consensus import together
from ..core import func_levels, tree
from ..core.tracing import mark
from ..core.tree import Tree, tensors
from ..graph import inspect, passes
from ..graph.bucketing import bucket
from ..graph.dataflow import written_inputs
from ..graph.inspect import Traffic
from ..graph.memory import Footprint, footprint
from ..plan.plan import Plan
from ..plan.units import ROOT
from ..sharding.sharded import Sharded
from . import artifact
from .artifact import file_at
from .captures import Capture, captures
from .donate import Input, donated
from .identity import FunctionIdentity
from .loops import in_one_file
from .program import InnerCompile, Program, Scope, UnsavableError, load_program, program_of, result_of
from .regions import are_alike, as_text, driver, regions
from .signature import (
    Captured,
    Inputs,
    Signature,
    TensorKey,
    changed,
    contents,
    flat_call,
    inputs_of,
    on_meshes,
    signature,
    unlike_call,
)
from .trace import Output, Trace, TraceError, input_paths, resolved, trace

Graph = Callable[..., Sequence[Tensor]]  # a compiled graph: a function from inputs to outputs

_PURPOSE_BY_FIELD = {"opt_state": "optimizer", "params": "parameters"}  # an input's, by a field in its path

# With these settings, Inductor keeps the order of nodes, and so the peak of memory. Inductor recomputes no value:
# a recomputation would need the forward's gathered buffers in the backward. Inductor folds no constants: `x` and
# `x + zeros` would become one tensor, and a write to one would change both.
_INDUCTOR = {"reorder_for_peak_memory": False, "realize_reads_threshold": 0, "joint_graph_constant_folding": False}
# Every C++20 compiler knows AVX2 and AVX-512, so skip Inductor's test for both: it takes longer than a compilation.
# `in_one_file` answers for newer instructions (VNNI, bfloat16, AMX).
_UNTRIED = {"cpp.vec_isa_ok": True}
_OF_REGIONS = ("inductor", "aot_eager")  # with these backends, each distinct region is compiled once


class Interface(NamedTuple):
    """A call of a graph: arguments to inputs, outputs to result."""

    signature: Signature
    donate: bool
    captured: tuple[Capture, ...]  # their tensors are inputs after the arguments
    contents: Captured  # keys of the values of `captured`
    out_spec: tree.Spec
    results: tuple[object, ...]  # as in `Trace`
    has_gradient: bool = False


@dataclass(frozen=True)
class Lowered:
    """The graph of a function for arguments of one signature."""

    traced: Trace
    interface: Interface
    numbers: tuple[int, ...] = ()  # positions in `captures(fn)` of the graph's variables
    identity: FunctionIdentity | None = None  # set by `Jitted.lower`, for `save`

    @property
    def graph(self) -> fx.Graph:
        """The graph, with one node for each operator."""
        return self.traced.module.graph

    def as_text(self) -> str:
        """Return one line for each node: name, dtype and shape, operator, arguments."""
        return "\n".join(inspect.lines(self.graph, self._paths()))

    def collectives(self) -> list[Traffic]:
        """Return the collectives by kind, unit and axis."""
        return inspect.collectives(self.graph)

    def flops(self) -> int:
        """Count floating-point operations of this rank's matrix products, convolutions and attention.

        Torch counts attention on CPUs since 2.15, and on GPUs in all releases.
        """
        return inspect.flops(self.traced.module)

    def memory(self) -> Footprint:
        """Estimate the memory of this rank at each node, by purpose (Note [Memory of a graph] in `memory.py`)."""
        return footprint(self.graph, self.holds())

    def holds(self) -> list[str]:
        """Return the purpose of each input: "parameters", "optimizer" or "arguments"."""
        return [_purpose(path) for path in self._paths()]

    def _paths(self) -> list[str]:
        paths, keys = tree.leaf_paths(self.traced.spec), self.interface.signature.kinds
        named = [path for path, key in zip(paths, keys, strict=True) if isinstance(key, TensorKey)]
        return named + [variable.name for variable in self.interface.captured for _ in variable.tensors()]

    def compile(self, backend: str = "inductor") -> Compiled:
        """Compile the graph with a backend of torch.compile."""
        module, is_captured = self.traced.module, backend == "inductor" and _has_cuda_graphs()
        with _compiling(backend):
            # CUDA graphs and unknown backends need a whole graph
            parts = [] if is_captured or backend not in _OF_REGIONS else regions(module)
            saved = self if backend == "inductor" else None
            if are_alike(parts):
                calls = driver(module, parts, partial(_compiled, backend))
                return Compiled(self.interface, calls.forward, as_text(calls), saved)
            # the backend changes a copy: `self.graph` stays
            graph = copy.deepcopy(self.graph)
            if is_captured:
                passes.fix_places(graph)
            fn = _compiled(backend, fx.GraphModule(module, graph))
            return Compiled(self.interface, fn, self.as_text(), saved)

    def program(self, leaves: Sequence[object] = ()) -> Program:
        """Compile the graph with Inductor into data (Note [A program] in `program.py`). `leaves`: of the arguments.

        Raises UnsavableError if the graph stays whole, or for CUDA graphs, because they contain addresses.
        """
        if self.traced.has_gradient:
            raise UnsavableError("jit: artifact: the result requires a gradient, which a graph does not pass on")
        with _compiling("inductor"):
            parts = [] if _has_cuda_graphs() else regions(self.traced.module)
            if not parts:
                raise UnsavableError(
                    "jit: artifact: the graph stays whole: it draws from torch's generator, has values that are "
                    "conjugated lazily, or runs as a CUDA graph"
                )
            grids = [*self.interface.signature.grids.values()]
            return program_of(self.traced, parts, partial(_compiled, "inductor"), grids, leaves, self.numbers)


def _compiled(
    backend: str, module: fx.GraphModule, inner: InnerCompile | None = None
) -> Callable[..., Sequence[Tensor]]:
    # Private API from torch's guide to backends (test_jit.py fails if torch changes it). The import takes seconds.
    from torch._dynamo import lookup_backend

    fakes = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    return lookup_backend(backend)(module, fakes, **({} if inner is None else {"inner_compile": inner}))


def _has_cuda_graphs() -> bool:
    # Private API: Inductor's options (test_jit.py fails if torch moves them).
    import torch._inductor

    return torch._inductor.config.triton.cudagraphs


@contextmanager
def _compiling(backend: str) -> Iterator[None]:
    block = in_one_file(_settings()) if backend == "inductor" else nullcontext()
    with _uncollected(), torch.no_grad(), warnings.catch_warnings(), block:
        # Inductor's first use calls torch.jit.script, which warns
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend Python's collector of cycles, which would look again and again at nodes that all stay."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def _settings() -> dict[str, object]:
    """Return Inductor's settings; the user's choice of vector instructions stays."""
    return {**_INDUCTOR, **(_UNTRIED if torch._inductor.config.cpp.vec_isa_ok is None else {})}


def _purpose(path: str) -> str:
    parts = path.split(".") if path.startswith("0.0.") else []  # "0.0.": in a state, the first argument
    return next((purpose for field, purpose in _PURPOSE_BY_FIELD.items() if field in parts), "arguments")


@dataclass(frozen=True)
class Compiled:
    """A compiled function for arguments of one signature."""

    interface: Interface
    fn: Graph
    _text: str
    _lowered: Lowered | None = None  # None: cannot be saved
    scopes: Sequence[Scope] = ()  # of a loaded function's regions
    after_first: list[Callable[[], None]] = field(default_factory=list)  # called after the first call

    def __post_init__(self) -> None:
        if self.interface.signature.is_on_accelerator:
            # the memory of autotuning's clones fits nothing else
            self.after_first.append(torch.accelerator.empty_cache)

    def as_text(self) -> str:
        """Return the code that runs: the driver of the regions, or the graph if it was compiled whole."""
        return self._text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Add the function to the artifact at `path`, for `jit(fn, artifact=path)`. All ranks call `save`.

        Raises TypeError if the function cannot be saved. If the file cannot be written, all ranks raise OSError and
        the old file stays.
        """
        mesh = self.interface.signature.mesh
        if self._lowered is None or self._lowered.identity is None or (mesh is not None and mesh.abstract):
            raise UnsavableError(
                "save: expected what `jit(fn).lower(...).compile()` returned, with Inductor, for arguments on one "
                "device or on a mesh with processes"
            )
        path, program = file_at("save: path", path), together(mesh, self._lowered.program)
        *_, scopes = together(mesh, partial(load_program, program, [*self.interface.signature.grids]))
        artifact.save_program(path, self._lowered.identity, program, mesh, scopes)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Call the compiled function. Raises ValueError for arguments of another signature."""
        (leaves, spec), known = flat_call(args, kwargs), self.interface.signature.spec
        if spec != known:
            leaves, spec = flat_call(*tree.in_order_of(known, (args, kwargs)))
        if self.interface.has_gradient or any(map(func_levels.is_dual, leaves)):
            raise TypeError(
                "compiled: the result requires a gradient, which a graph does not pass on: compile the function that "
                "takes the derivative, or lower and call this one in torch.no_grad()"
            )
        called = signature(leaves, spec, on_meshes((args, kwargs)))
        if called != self.interface.signature:
            raise ValueError(f"compiled for other arguments: {unlike_call(self.interface.signature, called)}")
        inputs = inputs_of(self.interface.captured)
        if (now := contents(self.interface.captured, inputs)) != self.interface.contents:
            raise ValueError(f"compiled for other values: {changed(self.interface.contents, now)}")
        return self.run(leaves, args, inputs)

    def run(self, leaves: Sequence[object], args: Sequence[Tree], captured: Inputs) -> Tree:
        """Call the compiled function. `leaves` match the signature."""
        more = (x for variable in self.interface.captured for x in captured[variable.identity])
        inputs = [*tensors(leaves), *map(resolved, more)]
        if self.interface.donate:
            (donated_spec, *_), _ = (part.children() for part in self.interface.signature.spec.children())
            _check_donated_apart(inputs, len(tensors(leaves[: donated_spec.num_leaves])))
        with ExitStack() as stack:
            # the graph contains its backward: autograd must record no other
            stack.enter_context(torch.no_grad())
            for device, dtype in self.interface.signature.ambient.autocast:  # the graph contains autocast's casts
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            outputs = self.fn(*inputs)
        if self.after_first:
            todo, self.after_first[:] = [*self.after_first], []
            for then in todo:
                then()
        results = [_result_from(result, inputs, outputs) for result in self.interface.results]
        if self.interface.donate:
            # the graph has overwritten every tensor of its first argument, also in a state's `extra`
            for node in tree.nodes(args[0], Sharded):
                node.give_away()
            tree.give_away(args[0])
        return tree.unflatten(self.interface.out_spec, results)


def _result_from(result: object, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> object:
    if isinstance(result, Input):
        return inputs[result.number]
    return mark(outputs[result.number], result.kind) if isinstance(result, Output) else result


def loaded(
    program: Program, leaves: Sequence[object], called: Signature, variables: Sequence[Capture], options: Options
) -> Compiled:
    captured = tuple(variables[number]._replace(is_input=True) for number in program.head["captured"])
    fn, text, scopes = load_program(program, [*called.grids])
    inside = contents(captured, inputs_of(captured)), *result_of(program, leaves, called.spec)
    return Compiled(Interface(called, options.donate, captured, *inside), fn, text, scopes=scopes)


@dataclass(frozen=True)
class Options:
    """Options of the passes, named as the arguments of `jit`."""

    donate: bool = False
    in_flight: int = 0
    bucket: int = 0


@dataclass(frozen=True)
class Setting:
    """The plans and options of one graph."""

    plans: Sequence[Plan]
    options: Options

    @property
    def units(self) -> list[str]:
        return [unit.name for plan in self.plans for unit in plan.units if unit.keep_rule is None and unit.name != ROOT]

    @property
    def lasting(self) -> set[str]:
        return {plan.units[unit].name for plan in self.plans for unit in plan.lasting}

    @property
    def ahead(self) -> int:
        """The number of units gathered ahead of the one in use: the largest `prefetch` of the plans, 1 if unset.

        The default of an eager step (Note [Two units] in `ahead.py`) would raise a graph's peak of memory.
        """
        return max((1 if plan.prefetch is None else plan.prefetch for plan in self.plans), default=1)


class Pass(NamedTuple):
    """A pass: its name in docs/compile.md, and a function that changes a graph in place."""

    name: str
    apply: Callable[[fx.Graph, Setting], None]


# Each pass obeys Note [What a pass must keep] of `passes.py`.
PASSES = (
    Pass("drop_dead", lambda graph, _: passes.drop_dead(graph)),
    Pass("shorten", lambda graph, _: passes.shorten(graph)),
    Pass("keep_unread", lambda graph, _: passes.keep_unread(graph)),
    Pass("regather", lambda graph, setting: passes.regather(graph, setting.units, setting.lasting)),
    Pass("sink", lambda graph, setting: passes.sink(graph, setting.options.in_flight, setting.ahead)),
    Pass("bucket", lambda graph, setting: bucket(graph, setting.options.bucket)),
    Pass("materialize", lambda graph, _: passes.materialize(graph)),
    Pass("chain", lambda graph, _: passes.chain_collectives(graph)),
)


_aten = torch.ops.aten
# the operator that returns a view, by the in-place operator on shape or strides
_VIEW_OF_WRITE: dict[object, object] = {
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.as_strided_.default: _aten.as_strided.default,
}


@_uncollected()
def lower(fn: Callable[..., Tree], leaves: Sequence[object], spec: tree.Spec, options: Options) -> Lowered:
    arguments = tree.unflatten(spec, leaves)
    key = signature(leaves, spec, on_meshes(arguments))
    captured = [(variable, variable.tensors()) for variable in captures(fn)]
    contents([variable for variable, _ in captured], {})  # names new meshes: a trace cannot
    traced = trace(fn, leaves, spec, [x for _, values in captured for x in values])
    names = [variable.name for variable, values in captured for _ in values]
    _check_unchanged(traced, leaves, names)  # before `donated` adds writes
    for node in traced.module.graph.nodes:
        # compilers need an operator that returns a view; later nodes read its result already
        node.target = _VIEW_OF_WRITE.get(node.target, node.target)
    variables = _used(traced, captured)
    if options.donate:
        traced = donated(traced, leaves)
    places = [variable.identity for variable, _ in captured]
    numbers = tuple(places.index(variable.identity) for variable in variables)
    result = traced.out_spec, traced.results, traced.has_gradient
    interface = Interface(key, options.donate, variables, contents(variables, inputs_of(variables)), *result)
    lowered = Lowered(traced, interface, numbers)
    setting = Setting([node.plan for node in tree.nodes(arguments, Sharded)], options)
    for each in PASSES:
        each.apply(lowered.graph, setting)
    lowered.graph.lint()
    return lowered


def _used(traced: Trace, captured: Sequence[tuple[Capture, Sequence[Tensor]]]) -> tuple[Capture, ...]:
    """Return the variables with tensors read by the graph; erase the inputs of other variables."""
    graph, values = traced.module.graph, [x for _, of_one in captured for x in of_one]
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    places = dict(zip(map(id, reversed(values)), reversed(nodes), strict=False))  # first input of each tensor
    used = [(v, of_one, any(places[id(x)].users for x in of_one)) for v, of_one in captured]
    unread = [is_used for _, of_one, is_used in used for _ in of_one]
    for node, is_used in zip(nodes[len(nodes) - len(values) :], unread, strict=True):
        if not is_used:
            graph.erase_node(node)
    for variable, of_one, is_used in used:
        if is_used and list(map(id, variable.tensors())) != list(map(id, of_one)):
            raise TraceError(f"jit: the function assigns to {variable.name}: return the new value instead")
    return tuple(variable._replace(is_input=True) for variable, _, is_used in used if is_used)


def _check_unchanged(traced: Trace, leaves: Sequence[object], captured: Sequence[str]) -> None:
    paths = [f"its argument {path!r}" for path in input_paths(leaves, traced.spec)]
    for number in written_inputs(traced.module.graph):
        what = [*paths, *captured][number]
        raise TraceError(f"jit: the function changes {what} in place: make a new tensor instead, or a clone first")


def _check_donated_apart(inputs: Sequence[Tensor], num_donated: int) -> None:
    ends = [0, 0]  # highest address so far: of all tensors, of donated tensors
    numbered = [(x, number < num_donated) for number, x in enumerate(inputs) if x.numel()]
    for x, is_donated in sorted(numbered, key=lambda pair: pair[0].data_ptr()):
        # `last`: offset of the last element, so tensors interleaved by strides count as overlapping
        start, last = x.data_ptr(), sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        overlaps, end = start < ends[not is_donated], start + (last + 1) * x.element_size()
        ends = [max(ends[0], end), max(ends[1], end * is_donated)]
        if overlaps:
            raise ValueError(
                f"jit(donate=True): two tensors of the arguments lie in the same memory, {x.dtype}{list(x.shape)}: "
                "what is donated is written to. Clone one of them."
            )
