"""A pass over a graph that merges consecutive small collectives of one kind."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import fx

from .dataflow import REDUCTIONS, VIEWS, call, copy, first_reader, first_write, gathers, is_call, is_fixed
from .inspect import arguments, operator, values

_aten, _fshard = torch.ops.aten, torch.ops.fshard
Order = Mapping[fx.Node, int]  # the index of every node


@dataclass(frozen=True)
class _Collective:
    """A collective of flat tensors: its start, its wait, and the nodes that are its result."""

    start: fx.Node
    wait: fx.Node
    places: Sequence[fx.Node]

    @property
    def x(self) -> fx.Node:
        return arguments(self.start)["x"]

    @property
    def numel(self) -> int:
        return values(self.places[0])[0].numel()

    @property
    def nbytes(self) -> int:
        return max(values(node)[0].nbytes for node in (self.x, self.places[0]))

    @property
    def kind(self) -> tuple[object, ...]:
        """What two collectives must have in common to be merged: operator, dtypes, mesh, axis, options."""
        by_name = arguments(self.start)
        dtypes = [values(node)[0].dtype for node in (self.x, self.places[0])]
        return self.start.target, *dtypes, *(by_name.get(name) for name in ("mesh", "axis", "op", "fast", "lent"))


def bucket(graph: fx.Graph, nbytes: int) -> None:
    """Merge consecutive labelled collectives of one kind, of flat tensors, into ones of up to `nbytes` bytes."""
    order = _order(graph)
    for group in _groups(_gathers(graph, order), partial(_may_start_early, order=order), nbytes):
        _merge_gathers(graph, group, _order(graph))
    order = _order(graph)  # anew: a merged gather may read what a reduction wrote
    for group in _groups(_reductions(order), partial(_may_start_late, order=order), nbytes):
        _merge_reductions(graph, group, _order(graph))


def _order(graph: fx.Graph) -> Order:
    return {node: i for i, node in enumerate(graph.nodes)}


def _gathers(graph: fx.Graph, order: Order) -> list[_Collective]:
    collectives = []
    for gather in gathers(graph):
        places = [view for view in gather.views if is_call(view, "getitem") and view.args[0] is gather.start]
        if all(order[view] > order[gather.wait] for view in gather.views if view not in places):
            collectives.append(_Collective(gather.start, gather.wait, places))
    return sorted(collectives, key=lambda collective: order[collective.start])


def _reductions(order: Order) -> Iterator[_Collective]:
    for start in (node for node in order if is_call(node, *REDUCTIONS)):
        (wait,) = (user for user in start.users if is_call(user, "fshard.wait"))
        yield _Collective(start, wait, [arguments(start)["place"]])


def _groups(
    collectives: Iterable[_Collective], joins: Callable[[list[_Collective], _Collective], bool], nbytes: int
) -> list[list[_Collective]]:
    last, groups = dict[object, list[_Collective]](), list[list[_Collective]]()  # last: the open group of each kind
    for collective in collectives:
        if values(collective.x)[0].dim() != 1 or not collective.numel or is_fixed(collective.start):
            continue
        group = last.get(collective.kind, [])
        if not group or sum(x.nbytes for x in group) + collective.nbytes > nbytes or not joins(group, collective):
            last[collective.kind] = group = []
            groups.append(group)
        group.append(collective)
    return [group for group in groups if len(group) > 1]


def _may_start_early(group: Sequence[_Collective], collective: _Collective, order: Order) -> bool:
    """Whether the input of a gather exists, with the same values, where the first gather of a group starts."""
    first = order[group[0].start]
    return _is_there(collective.x, first, order) and first_write([collective.x], first, order) > order[collective.start]


def _is_there(x: fx.Node, at: int, order: Order) -> bool:
    return order[x] < at or (operator(x) in VIEWS and all(_is_there(y, at, order) for y in x.all_input_nodes))


def _may_start_late(group: Sequence[_Collective], collective: _Collective, order: Order) -> bool:
    """Whether all reductions of a group may start where `collective` does: nothing uses their buffers before."""
    at = order[collective.start]
    return all(first_reader(m.wait, order) > at and first_write([m.x], order[m.start], order) > at for m in group)


def _ends(group: Sequence[_Collective], parts: int) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((collective.numel // parts for collective in group), initial=0)))


def _start(graph: fx.Graph, group: Sequence[_Collective], place: Sequence[fx.Node], x: fx.Node) -> fx.Node:
    """Insert the start of the merged collective, with the options of the first of the group."""
    by_name = [arguments(collective.start) for collective in group]
    options = {k: v for k, v in by_name[0].items() if k not in ("place", "x", "label", "nbytes")}
    label, nbytes = "+".join(a["label"] for a in by_name), sum(a["nbytes"] for a in by_name)
    at = (options.pop("mesh"), options.pop("axis"), label, nbytes)
    return call(graph, group[0].start.target, *place, x, *at, *options.values())  # type: ignore[arg-type]


def _merge_gathers(graph: fx.Graph, group: Sequence[_Collective], order: Order) -> None:
    """Gather all shards as one, at the first start. Collective i gathers n_i elements; n is the sum of the n_i."""
    first = group[0].start
    size = group[0].numel // values(group[0].x)[0].numel()  # W, the number of ranks
    with graph.inserting_before(first):
        row = call(
            graph, _aten.cat.default, [_there(graph, collective.x, order[first], order) for collective in group]
        )  # (n / W,)
        start = _start(graph, group, [], row)
        place, ticket = (call(graph, python.getitem, start, i) for i in range(2))
    with graph.inserting_before(min((collective.wait for collective in group), key=order.__getitem__)):
        call(graph, _fshard.wait.default, place, ticket, [row])
        rows = call(graph, _aten.view.default, place, [size, -1])  # (W, n / W): each rank's shards
        parts = [call(graph, _aten.slice.Tensor, rows, 1, *ends) for ends in _ends(group, size)]
        # copies: readers may ask for strides and offsets, which count from the start of a buffer
        whole = {"memory_format": torch.contiguous_format}
        parts = [call(graph, _aten.clone.default, part, **whole) for part in parts]
        parts = [call(graph, _aten.view.default, part, [-1]) for part in parts]
    for collective, part in zip(group, parts, strict=True):
        graph.erase_node(collective.wait)
        for old in collective.places:
            old.replace_all_uses_with(part)
        for old in [*collective.start.users, collective.start]:
            graph.erase_node(old)


def _there(graph: fx.Graph, x: fx.Node, at: int, order: Order) -> fx.Node:
    """`x`, or, if it is a view that comes later, a copy of the view."""
    if order[x] < at:
        return x
    return copy(graph, x, {y: _there(graph, y, at, order) for y in x.all_input_nodes})


def _merge_reductions(graph: fx.Graph, group: Sequence[_Collective], order: Order) -> None:
    """Reduce all inputs as one, at the last start. Collective i has a result of m_i elements; m is the sum of the m_i.

    Each input is viewed as rows, one for each rank that gets a part of the sum: one row for an all-reduce.
    """
    size = values(group[0].x)[0].numel() // group[0].numel  # the number of rows: W, or 1
    nodes, ends = list(order), _ends(group, 1)
    until = min(
        max(order[collective.wait] for collective in group),
        *(first_reader(collective.wait, order) for collective in group),
    )
    with graph.inserting_before(group[-1].start.next):
        rows = [call(graph, _aten.view.default, collective.x, [size, -1]) for collective in group]  # (size, m_i)
        row = call(graph, _aten.reshape.default, call(graph, _aten.cat.default, rows, 1), [-1])  # (size * m,)
        place = call(graph, _aten.new_empty.default, group[0].places[0], [ends[-1][1]])  # (m,)
        ticket = _start(graph, group, [place], row)
    with graph.inserting_before(nodes[until]):
        call(graph, _fshard.wait.default, place, ticket, [row])
        for collective, end in zip(group, ends, strict=True):
            call(graph, _aten.copy_.default, collective.places[0], call(graph, _aten.slice.Tensor, place, 0, *end))
    for collective in group:
        graph.erase_node(collective.wait)
        graph.erase_node(collective.start)
