"""A pass over the graph of a donated step: it moves each unit's update to the unit's gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from ..core.random import draws
from ..core.storage import address, ranges_meet
from .dataflow import VIEWS, acts, is_call, is_write, read_by, written_by
from .inspect import values
from .passes import AFTER, ITSELF, arrange


def early_updates(graph: fx.Graph) -> None:
    """Move each node that depends on gradients to the last node before which it cannot run.

    Nodes that only moved nodes need move with them. Memory of a unit's gradients is then free before the next unit's.
    """
    _share_parts(graph)
    nodes = list(graph.nodes)
    number, before = {node: i for i, node in enumerate(nodes)}, _predecessors(nodes)
    moved = {node for node in nodes if is_call(node, "fshard.put")}  # these stay themselves
    last, earliest = max((number[node] for node in moved), default=len(nodes)), dict[fx.Node, int]()
    for i, node in enumerate(nodes):
        is_free = i > last and _may_move(node)
        earliest[node] = max((earliest[x] for x in before[node]), default=0) if is_free else i
        if is_free and not moved.isdisjoint(before[node]):
            moved.add(node)
    places = {node: (earliest[node], AFTER) for node in moved if number[node] > last}
    for node in reversed(nodes[last + 1 :]):
        place, _ = places.get(node, (number[node], ITSELF))
        for x in before[node]:
            if number[x] > last and place < places.get(x, (number[x], ITSELF))[0]:
                places[x] = (place, AFTER)
    arrange(graph, places, {})


def writes_parts(graph: fx.Graph) -> bool:
    """Return True if a graph writes to slices of its inputs: only graphs with early updates do."""
    places: list[fx.Node] = [node.args[0] for node in graph.nodes if is_call(node, "copy_")]
    return any(is_call(x, "slice") and x.all_input_nodes[0].op == "placeholder" for x in places)


def _may_move(node: fx.Node) -> bool:
    is_torchs = node.op == "call_function" and getattr(node.target, "namespace", "aten") in ("aten", "prims")
    return is_torchs and not draws(node.target, node.args, node.kwargs) and (is_write(node) or not acts(node))


def _share_parts(graph: fx.Graph) -> None:
    """Let equal slices of an input be one node: a region gets each as an input of its own."""
    known = dict[object, fx.Node]()
    for node in graph.nodes:
        if is_call(node, "slice") and node.args[0].op == "placeholder":
            node.replace_all_uses_with(known.setdefault(node.args, node))


def _predecessors(nodes: Sequence[fx.Node]) -> Mapping[fx.Node, list[fx.Node]]:
    """Return the nodes that run before each node: its arguments, and nodes with the same memory if one writes to it."""
    before, known = dict[fx.Node, list[fx.Node]](), defaultdict[int, list[tuple[Tensor, bool, fx.Node]]](list)
    for node in nodes:
        before[node], into = list(node.all_input_nodes), written_by(node) if is_write(node) else []
        sources = [] if is_call(node, *VIEWS) else read_by(node)
        for x, writes in ((x, source in into) for source in sources for x in values(source)):
            others = known[address(x)]
            before[node] += [n for y, wrote, n in others if (writes or wrote) and n is not node and ranges_meet(x, y)]
            others.append((x, writes, node))
    return before
