"""A traced function with the passes applied: to be looked at, or compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from . import tree
from .shard import Sharded
from .trace import Output, Trace, difference, signature, tensors, trace
from .train import TrainState

_copy_ = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Lowered:
    """The graph of a function for arguments of one signature."""

    traced: Trace
    signature: tuple[Any, ...]
    donate: bool

    @property
    def graph(self) -> fx.Graph:
        """The graph: one node for every operator."""
        return self.traced.module.graph

    def compile(self, backend: str = "inductor") -> Compiled:
        """What runs it, made by one of torch.compile's backends."""
        # Private, but what torch's guide to backends imports; nothing public calls one by name (test_jit.py notices).
        # It takes seconds to import.
        from torch._dynamo import lookup_backend

        module = fx.GraphModule(self.traced.module, copy.deepcopy(self.graph))
        fakes = [node.meta["val"] for node in self.graph.nodes if node.op == "placeholder"]
        with torch.no_grad():
            return Compiled(self, lookup_backend(backend)(module, fakes))


@dataclass(frozen=True)
class Compiled:
    """A compiled function, for arguments of one signature: call it like the function."""

    lowered: Lowered
    fn: Callable[..., Sequence[Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`. ValueError for arguments of another signature."""
        leaves, spec = tree.flatten((args, kwargs))
        if (given := signature(leaves, spec)) != self.lowered.signature:
            raise ValueError(f"compiled for other arguments: {difference(self.lowered.signature, given)}")
        return self.run(leaves, args)

    def run(self, leaves: Sequence[Any], args: Sequence[Any]) -> Any:
        """The same for arguments that were flattened, and are known to be of the signature."""
        given, traced = tensors(leaves), self.lowered.traced
        if self.lowered.donate:
            _check_apart(given)
        with torch.no_grad():
            outputs = self.fn(*given)
        results = [_result(r, given, outputs) for r in traced.results]
        if self.lowered.donate:
            _give_away(args[0])
        return tree.unflatten(traced.out_spec, results)


@dataclass(frozen=True)
class Input:
    """The input of a graph of that number, written to."""

    number: int


def _result(result: Any, given: Sequence[Tensor], outputs: Sequence[Any]) -> Any:
    if isinstance(result, Input):
        return given[result.number]
    return outputs[result.number] if isinstance(result, Output) else result


def lower(fn: Callable[..., Any], leaves: Sequence[Any], spec: tree.Spec, donate: bool) -> Lowered:
    """Trace, and apply the passes."""
    traced = trace(fn, leaves, spec)
    if donate:
        traced = donated(traced, leaves)
    return Lowered(traced, signature(leaves, spec), donate)


def donated(traced: Trace, leaves: Sequence[Any]) -> Trace:
    """The tensors of the first argument written to: what comes out, or first of what does, takes their place."""
    first = traced.spec.child(0).child(0) if traced.spec.child(0).num_children else None
    outs = [traced.out_spec, *traced.out_spec.children()[:1]]
    if first is None or first not in outs:
        raise ValueError(
            "jit(donate=True): the function must give back, first of all, a tree of the structure of its first "
            f"argument, {first}: it gives {traced.out_spec}. Use donate=False."
        )
    graph, results = copy.deepcopy(traced.module.graph), list(traced.results)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = graph.output_node()
    values: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    numbers = iter(range(len(inputs)))
    places = [next(numbers) if isinstance(leaf, Tensor) else None for leaf in leaves[: first.num_leaves]]
    with graph.inserting_before(output):
        moved = [(i, place) for i, place in enumerate(places) if place is not None and isinstance(results[i], Output)]
        moved = [(i, place) for i, place in moved if values[results[i].number] is not inputs[place]]
        # an input that takes another's place is read before that is written to
        news = [_apart(graph, values[results[i].number]) for i, _ in moved]
        for (i, place), new in zip(moved, news, strict=True):
            graph.call_function(_copy_, (inputs[place], new))
            results[i] = Input(place)
    kept = [r.number for r in results if isinstance(r, Output)]
    output.args = ([values[number] for number in kept],)
    results = [Output(kept.index(r.number)) if isinstance(r, Output) else r for r in results]
    return Trace(fx.GraphModule(traced.module, graph), traced.spec, traced.out_spec, tuple(results))


def _apart(graph: fx.Graph, value: fx.Node) -> fx.Node:
    if value.op != "placeholder":
        return value
    new = graph.call_function(torch.ops.aten.clone.default, (value,))
    new.meta = dict(value.meta)
    return new


def _check_apart(given: Sequence[Tensor]) -> None:
    """What is written to must not be what something else is read from."""
    seen: dict[int, int] = {}
    for number, x in enumerate(given):
        if x.numel() and seen.setdefault(x.data_ptr(), number) != number:
            raise ValueError(
                f"jit(donate=True): two tensors of the arguments lie in the same memory, {x.dtype}{list(x.shape)}: "
                "what is donated is written to. Clone one of them."
            )


def _give_away(x: Any) -> None:
    """Nothing that was donated may be used again."""
    for part in tree.nodes(x, Sharded):
        part.give_away()
    if isinstance(x, TrainState):
        vars(x).clear()
