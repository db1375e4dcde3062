"""A pass that writes results over the tensors of the donated first argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ..core import tree
from ..core.storage import address
from ..graph.dataflow import NodeIndex, call, computed, index, insert_copy, is_call, repeated
from ..graph.early import early_updates
from ..graph.inspect import arguments
from .trace import Output, Trace

_EMPTY = (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)


@dataclass(frozen=True)
class Input:
    """A placeholder for a result that the graph writes over input number `number`."""

    number: int


class _Move(NamedTuple):
    """The numbers of a leaf, and of the input and output with its old and new value."""

    leaf: int
    input: int
    output: int


def donated(traced: Trace, leaves: Sequence[object]) -> Trace:
    """Change a graph to write each tensor of its first result over the same leaf of the first argument."""
    first, traced = _first_argument(traced)
    graph, results = traced.module.graph, list(traced.results)
    inputs, output = [node for node in graph.nodes if node.op == "placeholder"], graph.output_node()
    outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    moves = [*_donated_moves(leaves[: first.num_leaves], results)]
    moves = [move for move in moves if outputs[move.output] is not inputs[move.input]]
    _check_fit(moves, inputs, outputs, tree.leaf_paths(first))
    old = repeated(graph, {_storage(inputs[move.input]) for move in moves})
    others = _fill_inputs(graph, moves, inputs, outputs)
    with graph.inserting_before(output):
        # If an output is an input to be overwritten, or a view of one, as in a swap of two leaves, copy the output
        # first. Inductor would replace a clone by a read after the write, so `copied` makes none.
        outputs = [insert_copy(graph, node) if _storage(node) in old else node for node in outputs]
    _write(graph, others, inputs, outputs)
    if any(is_call(node, "fshard.joined") for node in outputs):  # updates by unit
        early_updates(graph)
    for move in moves:
        results[move.leaf] = Input(move.input)
    kept = [result.number for result in results if isinstance(result, Output)]
    output.args = ([outputs[number] for number in kept],)
    results = [replace(x, number=kept.index(x.number)) if isinstance(x, Output) else x for x in results]
    return replace(traced, results=tuple(results))


def _fill_inputs(
    graph: fx.Graph, moves: Sequence[_Move], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> list[_Move]:
    """If a collective fills a result after the input's last read, let the collective fill the input.

    Return the other moves.
    """
    nodes, storages, others = index(graph), [_storage(node) for node in outputs], list[_Move]()
    for move in moves:
        value, place = outputs[move.output], inputs[move.input]
        is_alone = storages.count(_storage(value)) == 1 and _storage(place) not in storages
        filled = nodes.first_write([value], -1)
        if value.target in _EMPTY and is_alone and _is_alike(value, place) and _last_use(place, nodes) < filled:
            views = nodes.returned[_storage(value)][1:]
            value.replace_all_uses_with(place)
            graph.erase_node(value)
            for view in views:  # now in the input's memory
                view.meta["val"] = computed(view)
        else:
            others.append(move)
    return others


def _last_use(x: fx.Node, nodes: NodeIndex) -> int:
    return max((nodes.order[user] for view in nodes.returned[_storage(x)] for user in view.users), default=-1)


def _is_alike(a: fx.Node, b: fx.Node) -> bool:
    """Return True if two values are contiguous, in storages of one size."""
    x, y = a.meta["val"], b.meta["val"]
    return x.is_contiguous() and y.is_contiguous() and x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


def _write(graph: fx.Graph, moves: Sequence[_Move], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
    """Copy each output to its input as early as possible: the compiler then frees the output early."""
    nodes, anchors = index(graph), list[fx.Node]()
    in_order = list(nodes.order)
    for move in moves:
        value, place = outputs[move.output], inputs[move.input]
        ready = max(nodes.order[value], nodes.last_write([value], len(in_order)), _last_use(place, nodes))
        # copy after all placeholders, before the output node
        anchors.append(in_order[min(max(ready + 1, len(inputs)), len(in_order) - 1)])
    for move, anchor in zip(moves, anchors, strict=True):
        with graph.inserting_before(anchor):
            for place, value in _parts_and_places(nodes, inputs[move.input], outputs[move.output]):
                graph.call_function(torch.ops.aten.copy_.default, (place, value))


def _parts_and_places(nodes: NodeIndex, place: fx.Node, value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return (place, value), or for a `fshard.joined` its parts and their places if no later node writes to these."""
    parts: list[fx.Node] = arguments(value)["parts"] if is_call(value, "fshard.joined") else []
    if not parts or nodes.last_write([value, *parts], len(nodes.order)) > nodes.order[value]:
        return [(place, value)]
    ends = accumulate((part.meta["val"].numel() for part in parts), initial=0)
    slices = [call(place.graph, torch.ops.aten.slice.Tensor, place, 0, *bounds) for bounds in pairwise(ends)]
    return [*zip(slices, parts, strict=True)]


def _first_argument(traced: Trace) -> tuple[tree.Spec, Trace]:
    """Return the structure of the first argument, and the trace, its first result's dicts in the argument's order."""
    arguments = traced.spec.child(0)
    if not arguments.num_children:
        raise ValueError(
            "jit(donate=True): expected the first argument, which is given away, by position, and the call has keyword "
            "arguments alone. Pass it without its name."
        )
    first = arguments.child(0)
    if first in _first_results(traced):
        return first, traced
    out = tree.unflatten(traced.out_spec, range(len(traced.results)))
    several = [type(out)([tree.in_order_of(first, out[0]), *out[1:]])] if type(out) in (tuple, list) and out else []
    for same in (tree.in_order_of(first, out), *several):
        numbers, form = tree.flatten(same)
        ordered = replace(traced, results=tuple(traced.results[number] for number in numbers), out_spec=form)
        if first in _first_results(ordered):
            return first, ordered
    raise ValueError(
        "jit(donate=True): the function must give back, first of all, a tree of the structure of its first "
        f"argument, {first}: it gives {traced.out_spec}. Use donate=False."
    )


def _first_results(traced: Trace) -> list[tree.Spec]:
    return [traced.out_spec, *traced.out_spec.children()[:1]]


def _donated_moves(leaves: Sequence[object], results: Sequence[object]) -> Iterator[_Move]:
    number = 0  # number of the input: each tensor leaf is an input
    for i, (leaf, result) in enumerate(zip(leaves, results, strict=False)):  # `results` may have more
        if isinstance(leaf, Tensor):
            if isinstance(result, Output):
                yield _Move(i, number, result.number)
            number += 1


def _check_fit(moves: Sequence[_Move], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], paths: list[str]) -> None:
    for move in moves:
        place, value = inputs[move.input].meta["val"], outputs[move.output].meta["val"]
        if any(n > 1 and stride == 0 for n, stride in zip(place.shape, place.stride(), strict=True)):
            raise ValueError(
                f"jit(donate=True): leaf {paths[move.leaf]!r} of the first argument, {place.dtype}{list(place.shape)}, "
                "holds several of its elements in the same memory, as .expand makes it, and cannot be written to. Pass "
                "leaf.contiguous(), or use donate=False."
            )
        if (place.shape, place.dtype, place.device) != (value.shape, value.dtype, value.device):
            raise ValueError(
                f"jit(donate=True): leaf {paths[move.leaf]!r} of what comes out first must take the place of "
                f"{place.dtype}{list(place.shape)}, and is {value.dtype}{list(value.shape)}. Use donate=False."
            )


def _storage(node: fx.Node) -> int:
    return address(node.meta["val"])
