"""A traced function with the passes applied, for inspection and for compilation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..core import tree
from ..sharding.sharded import Sharded
from ..sharding.units import ROOT
from . import inspect, passes
from .bucketing import bucket
from .dataflow import written_inputs
from .donate import Input, donated
from .inspect import Traffic
from .memory import Footprint, footprint
from .signature import Signature, difference, flatten, on_meshes, signature
from .trace import Output, Trace, TraceError, input_paths, tensors, trace

_HELD = {"opt_state": "optimizer", "params": "parameters"}

# Inductor keeps the order of nodes, which decides the peak of memory, and keeps values that are read again: computing
# them again from the parameters would keep every gathered buffer of the forward in memory until the backward.
_INDUCTOR = {"reorder_for_peak_memory": False, "realize_reads_threshold": 0}


@dataclass(frozen=True)
class Lowered:
    """The graph of a function for arguments of one signature."""

    traced: Trace
    signature: Signature
    donate: bool

    @property
    def graph(self) -> fx.Graph:
        """The graph: one node for every operator."""
        return self.traced.module.graph

    def as_text(self) -> str:
        """One line for each node: name, dtype and shape, operator, arguments."""
        return inspect.as_text(self.graph, self._paths())

    def collectives(self) -> list[Traffic]:
        """The collectives by kind, unit and axis: how many, and the bytes that a rank sends in them."""
        return inspect.collectives(self.graph)

    def flops(self) -> int:
        """Floating-point operations of this rank's matrix products, convolutions and attention."""
        return inspect.flops(self.traced.module)

    def memory(self) -> Footprint:
        """The memory on this rank at each node, by what is held in it (Note [Memory of a graph])."""
        return footprint(self.graph, self.holds())

    def holds(self) -> list[str]:
        """For each input of the graph: "parameters", "optimizer" or "arguments"."""
        return [_holds(path) for path in self._paths()]

    def _paths(self) -> list[str]:
        spec, kinds = self.traced.spec, self.signature.kinds
        return [path for path, kind in zip(tree.paths(spec), kinds, strict=True) if kind[0] is Tensor]

    def compile(self, backend: str = "inductor") -> Compiled:
        """The function compiled by one of torch.compile's backends."""
        # Private, but what torch's guide to backends imports; nothing public calls one by name (test_jit.py notices).
        # It takes seconds to import.
        from torch._dynamo import lookup_backend

        module = fx.GraphModule(self.traced.module, copy.deepcopy(self.graph))
        fakes = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        with torch.no_grad(), warnings.catch_warnings():
            # torch 2.13 scripts a few functions when inductor is first used, and warns of that itself
            warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
            how = {"config_patches": _INDUCTOR} if backend == "inductor" else {}
            return Compiled(self, lookup_backend(backend)(module, fakes, **how))


def _holds(path: str) -> str:
    parts = path.split(".")
    return next((name for field, name in _HELD.items() if field in parts), "arguments")


@dataclass(frozen=True)
class Compiled:
    """A compiled function, for arguments of one signature: call it like the function."""

    lowered: Lowered
    fn: Callable[..., Sequence[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`. ValueError for arguments of another signature."""
        leaves, spec = flatten(args, kwargs)
        if (given := signature(leaves, spec, on_meshes((args, kwargs)))) != self.lowered.signature:
            raise ValueError(f"compiled for other arguments: {difference(self.lowered.signature, given)}")
        return self.run(leaves, args)

    def run(self, leaves: Sequence[Any], args: Sequence[Any]) -> Any:
        """The same for arguments that are flattened already and known to have the signature."""
        given, traced = tensors(leaves), self.lowered.traced
        if self.lowered.donate:
            _check_apart(given)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device, dtype in self.lowered.signature.ambient.autocast:  # the graph has the casts already
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            outputs = self.fn(*given)
        results = [_result(r, given, outputs) for r in traced.results]
        if self.lowered.donate:
            # also a `Sharded` in the `extra` of a state: the graph writes to every tensor of its first argument
            for part in tree.nodes(args[0], Sharded):
                part.give_away()
            tree.give_away(args[0])
        return tree.unflatten(traced.out_spec, results)


def _result(result: Any, given: Sequence[Tensor], outputs: Sequence[Any]) -> Any:
    if isinstance(result, Input):
        return given[result.number]
    return outputs[result.number] if isinstance(result, Output) else result


@dataclass(frozen=True)
class Options:
    """The options of the passes: `jit`'s arguments of these names."""

    donate: bool = False
    in_flight: int = 0
    budget: int | None = None
    recompute: Callable[[fx.Node], bool] = passes.is_cheap
    bucket: int = 0


def lower(fn: Callable[..., Any], leaves: Sequence[Any], spec: tree.Spec, options: Options) -> Lowered:
    """Trace a function and apply the passes."""
    given = tree.unflatten(spec, leaves)
    key = signature(leaves, spec, on_meshes(given))
    traced = trace(fn, leaves, spec)
    _check_unchanged(traced, leaves)
    if options.donate:
        traced = donated(traced, leaves)
    lowered = Lowered(traced, key, options.donate)
    graph, parts = lowered.graph, tree.nodes(given, Sharded)
    passes.drop_dead(graph)
    passes.wait_for_unread(graph)
    passes.regather(graph, [unit.name for x in parts if x.plan.regather for unit in x.plan.units if unit.name != ROOT])
    passes.sink(graph, options.in_flight)
    if options.bucket:
        bucket(graph, options.bucket)
    if options.budget is not None:
        passes.recompute(graph, lowered.holds(), options.budget, options.recompute)
    passes.once(graph)
    graph.lint()
    return lowered


def _check_unchanged(traced: Trace, leaves: Sequence[Any]) -> None:
    for number in written_inputs(traced.module.graph):
        path = input_paths(leaves, traced.spec)[number]
        raise TraceError(
            f"jit: the function changes its argument {path!r} in place: make a new tensor instead, or a clone first"
        )


def _check_apart(given: Sequence[Tensor]) -> None:
    """Raise ValueError if two tensors share memory: the graph writes to the donated ones."""
    ends = 0
    for x in sorted((x for x in given if x.numel()), key=Tensor.data_ptr):
        start, last = x.data_ptr(), sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        overlaps, ends = start < ends, max(ends, start + (last + 1) * x.element_size())
        if overlaps:
            raise ValueError(
                f"jit(donate=True): two tensors of the arguments lie in the same memory, {x.dtype}{list(x.shape)}: "
                "what is donated is written to. Clone one of them."
            )
