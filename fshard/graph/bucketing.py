"""A pass over a graph that merges consecutive small collectives of one kind."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from .dataflow import REDUCTIONS, VIEWS, NodeIndex, call, copy, gathers, index, is_call, is_fixed
from .inspect import arguments, operator, values

_aten, _fshard = torch.ops.aten, torch.ops.fshard


@dataclass(frozen=True)
class _FlatCollective:
    start: fx.Node
    wait: fx.Node
    results: Sequence[fx.Node]

    @property
    def x(self) -> fx.Node:
        return arguments(self.start)["x"]

    @property
    def numel(self) -> int:
        return values(self.results[0])[0].numel()

    @property
    def nbytes(self) -> int:
        return max(values(node)[0].nbytes for node in (self.x, self.results[0]))

    @property
    def kind(self) -> tuple[object, ...]:
        by_name = arguments(self.start)
        dtypes = [values(node)[0].dtype for node in (self.x, self.results[0])]
        return self.start.target, *dtypes, *(by_name.get(name) for name in ("mesh", "axis", "op", "fast", "lent"))


@dataclass
class _Bucket:
    """Collectives to merge, their bytes, and `limit`, the number of a node.

    Gathers: all inputs must exist at `limit`, the first start. Reductions: all must start before `limit`, the first
    node that reads a result or writes to a sent buffer.
    """

    collectives: list[_FlatCollective]
    nbytes: int
    limit: int


def bucket(graph: fx.Graph, nbytes: int) -> None:
    """Merge consecutive collectives of one kind, with labels and flat tensors, up to `nbytes` bytes each."""
    nodes = index(graph)
    order = dict(nodes.order)  # an inserted node gets the number of the node after it
    early = [(x, order[x.start]) for x in _gathers(nodes)]
    groups = _merged_groups(early, nbytes, partial(_may_start_at, nodes))
    _erase(graph, [x for group in groups for x in _merge_gathers(graph, group, order)])
    nodes = index(graph)  # anew: the first reader of a reduction may now be a merged gather
    in_order = list(nodes.order)
    used = ((x, nodes.first_reader(x.wait), nodes.first_write([x.x], nodes.order[x.start])) for x in _reductions(nodes))
    groups = _merged_groups([(x, min(ends)) for x, *ends in used], nbytes, lambda x, end: nodes.order[x.start] < end)
    _erase(graph, [x for group in groups for x in _merge_reductions(graph, group, nodes, in_order)])


def _erase(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase nodes; readers come before values. Call this after all merges: a merge may insert before such a node."""
    for node in nodes:
        graph.erase_node(node)


def _gathers(nodes: NodeIndex) -> list[_FlatCollective]:
    collectives, order = [], nodes.order
    for gather in gathers(nodes):
        results = [view for view in gather.views if is_call(view, "getitem") and view.args[0] is gather.start]
        if all(order[view] > order[gather.wait] for view in gather.views if view not in results):
            collectives.append(_FlatCollective(gather.start, gather.wait, results))
    return sorted(collectives, key=lambda collective: order[collective.start])


def _reductions(nodes: NodeIndex) -> Iterator[_FlatCollective]:
    for start in (node for node in nodes.order if is_call(node, *REDUCTIONS)):
        (wait,) = (user for user in start.users if is_call(user, "fshard.wait"))
        yield _FlatCollective(start, wait, [arguments(start)["place"]])


def _merged_groups(
    limited: Iterable[tuple[_FlatCollective, int]], nbytes: int, joins: Callable[[_FlatCollective, int], bool]
) -> list[Sequence[_FlatCollective]]:
    """Return groups to merge. A collective may join a group if `joins(collective, the group's least limit)`."""
    last, buckets = dict[object, _Bucket](), list[_Bucket]()  # last bucket of each kind; all buckets
    for collective, limit in ((x, limit) for x, limit in limited if _may_merge(x)):
        bucket = last.get(collective.kind)
        fits = bucket is not None and bucket.nbytes + collective.nbytes <= nbytes
        if bucket is None or not fits or not joins(collective, bucket.limit):
            bucket = last[collective.kind] = _Bucket([], 0, limit)
            buckets.append(bucket)
        bucket.collectives.append(collective)
        bucket.nbytes += collective.nbytes
        bucket.limit = min(bucket.limit, limit)
    return [bucket.collectives for bucket in buckets if len(bucket.collectives) > 1]


def _may_merge(collective: _FlatCollective) -> bool:
    return values(collective.x)[0].dim() == 1 and collective.numel > 0 and not is_fixed(collective.start)


def _may_start_at(nodes: NodeIndex, gather: _FlatCollective, first: int) -> bool:
    exists = _is_there(gather.x, first, nodes.order)
    return exists and nodes.first_write([gather.x], first) > nodes.order[gather.start]


def _is_there(x: fx.Node, at: int, order: Mapping[fx.Node, int]) -> bool:
    return order[x] < at or (operator(x) in VIEWS and all(_is_there(y, at, order) for y in x.all_input_nodes))


def _start(graph: fx.Graph, group: Sequence[_FlatCollective], place: Sequence[fx.Node], x: fx.Node) -> fx.Node:
    by_name = [arguments(collective.start) for collective in group]
    options = {k: v for k, v in by_name[0].items() if k not in ("place", "x", "label", "nbytes")}
    label, nbytes = "+".join(a["label"] for a in by_name), sum(a["nbytes"] for a in by_name)
    at = (options.pop("mesh"), options.pop("axis"), label, nbytes)
    return call(graph, group[0].start.target, *place, x, *at, *options.values())  # type: ignore[arg-type]


def _merge_gathers(graph: fx.Graph, group: Sequence[_FlatCollective], order: dict[fx.Node, int]) -> list[fx.Node]:
    """Gather all shards in one collective at the first start, and return the nodes to erase.

    A shard gathered twice is sent once. n: elements of all distinct results. Adds the results to `order`.
    """
    by_source = dict[object, _FlatCollective]()
    for collective in group:
        by_source.setdefault(_source(collective.x), collective)
    sent, numbers = [*by_source.values()], {source: number for number, source in enumerate(by_source)}
    first = group[0].start
    size = group[0].numel // values(group[0].x)[0].numel()  # W, the number of ranks
    with graph.inserting_before(first):
        shards = [_there(graph, collective.x, order[first], order) for collective in sent]
        row = call(graph, _fshard.merged.default, shards, 1)  # (n / W,)
        start = _start(graph, sent, [], row)
        place, ticket = (call(graph, python.getitem, start, i) for i in range(2))
    wait = min((collective.wait for collective in group), key=order.__getitem__)
    with graph.inserting_before(wait):
        call(graph, _fshard.wait.default, place, ticket, [row])
        # a copy for each result: readers may write to it, or use its strides and storage offset
        chosen = [numbers[_source(collective.x)] for collective in group]
        copies = call(graph, _fshard.parts.default, place, [x.numel // size for x in sent], chosen, size)
        parts = [call(graph, python.getitem, copies, i) for i in range(len(group))]
    order |= dict.fromkeys(parts, order[wait])
    for collective, part in zip(group, parts, strict=True):
        part.meta["unit"] = arguments(collective.start)["label"]
        for old in collective.results:
            old.replace_all_uses_with(part)
    return [x for collective in group for x in (collective.wait, *collective.start.users, collective.start)]


def _source(x: fx.Node) -> Any:  # hashable
    if operator(x) not in VIEWS:
        return x
    return x.target, fx.map_arg((x.args, tuple(x.kwargs.items())), _source)


def _there(graph: fx.Graph, x: fx.Node, at: int, order: Mapping[fx.Node, int]) -> fx.Node:
    if order[x] < at:
        return x
    return copy(graph, x, {y: _there(graph, y, at, order) for y in x.all_input_nodes})


def _merge_reductions(
    graph: fx.Graph, group: Sequence[_FlatCollective], nodes: NodeIndex, in_order: Sequence[fx.Node]
) -> list[fx.Node]:
    """Reduce all inputs in one collective at the last start, and return the nodes to erase.

    The result of reduction i has m_i elements; m is their sum. An all-reduce views each input as one row, a
    reduce-scatter as W rows, one for each rank.
    """
    size = values(group[0].x)[0].numel() // group[0].numel  # W or 1
    waits = [collective.wait for collective in group]
    until = min(max(nodes.order[wait] for wait in waits), *map(nodes.first_reader, waits))
    with graph.inserting_before(group[-1].start.next):
        for room in (x.x for x in group if is_call(x.x, "fshard.room")):
            room.target, room.args = _aten.new_empty.default, (room.args[0], [room.args[1]])  # no peer reads it
        row = call(graph, _fshard.merged.default, [collective.x for collective in group], size)  # (size * m,)
        place = call(graph, _aten.new_empty.default, group[0].results[0], [sum(x.numel for x in group)])  # (m,)
        ticket = _start(graph, group, [place], row)
    with graph.inserting_before(in_order[until]):
        call(graph, _fshard.wait.default, place, ticket, [row])
        call(graph, _fshard.fill.default, [collective.results[0] for collective in group], place)
    return [x for collective in group for x in (collective.wait, collective.start)]
