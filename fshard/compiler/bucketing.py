"""A pass over a graph: consecutive small collectives of one kind are merged into one."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from .dataflow import REDUCTIONS, VIEWS, call, copy, first_reader, first_write, gathers, is_call
from .inspect import arguments, operator, values

_aten, _fshard = torch.ops.aten, torch.ops.fshard
Order = Mapping[fx.Node, int]  # the index of every node


@dataclass(frozen=True)
class _One:
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
    def kind(self) -> tuple[Any, ...]:
        """What two collectives must have in common to be merged: operator, dtypes, mesh, axis, options."""
        known = arguments(self.start)
        dtypes = [values(node)[0].dtype for node in (self.x, self.places[0])]
        return self.start.target, *dtypes, *(known.get(name) for name in ("mesh", "axis", "op", "fast"))


def bucket(graph: fx.Graph, nbytes: int) -> None:
    """Merge consecutive collectives of one kind, of flat tensors, up to `nbytes` each."""
    order = _order(graph)
    early, late = (partial(fits, order=order) for fits in (_may_start_early, _may_start_late))
    for group in _groups(_gathers(graph, order), early, nbytes):
        _merge_gathers(graph, group, _order(graph))
    for group in _groups(_reductions(order), late, nbytes):
        _merge_reductions(graph, group, _order(graph))


def _order(graph: fx.Graph) -> Order:
    return {node: i for i, node in enumerate(graph.nodes)}


def _gathers(graph: fx.Graph, order: Order) -> list[_One]:
    ones = []
    for gather in gathers(graph):
        places = [view for view in gather.views if is_call(view, "getitem") and view.args[0] is gather.start]
        if all(order[view] > order[gather.wait] for view in gather.views if view not in places):
            ones.append(_One(gather.start, gather.wait, places))
    return sorted(ones, key=lambda one: order[one.start])


def _reductions(order: Order) -> Iterator[_One]:
    for start in (node for node in order if is_call(node, *REDUCTIONS)):
        (wait,) = (user for user in start.users if is_call(user, "fshard.wait"))
        yield _One(start, wait, [arguments(start)["place"]])


def _groups(ones: Iterable[_One], joins: Callable[[list[_One], _One], bool], nbytes: int) -> list[list[_One]]:
    last, found = dict[Any, list[_One]](), list[list[_One]]()
    for one in ones:
        if values(one.x)[0].dim() != 1 or not one.numel:
            continue
        group = last.get(one.kind, [])
        if not group or sum(x.nbytes for x in group) + one.nbytes > nbytes or not joins(group, one):
            last[one.kind] = group = []
            found.append(group)
        group.append(one)
    return [group for group in found if len(group) > 1]


def _may_start_early(group: Sequence[_One], one: _One, order: Order) -> bool:
    """Whether the input of a gather exists, with the same values, where the first gather of a group starts."""
    first = order[group[0].start]
    return _is_there(one.x, first, order) and first_write([one.x], first, order) > order[one.start]


def _is_there(x: fx.Node, at: int, order: Order) -> bool:
    return order[x] < at or (operator(x) in VIEWS and all(_is_there(y, at, order) for y in x.all_input_nodes))


def _may_start_late(group: Sequence[_One], one: _One, order: Order) -> bool:
    """Whether all reductions of a group may start where `one` does: nothing reads or writes their buffers before."""
    at = order[one.start]
    return all(first_reader(m.wait, order) > at and first_write([m.x], order[m.start], order) > at for m in group)


def _ends(group: Sequence[_One], parts: int) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((one.numel // parts for one in group), initial=0)))


def _start(graph: fx.Graph, group: Sequence[_One], place: Sequence[fx.Node], x: fx.Node) -> fx.Node:
    known = [arguments(one.start) for one in group]
    rest = {k: v for k, v in known[0].items() if k not in ("place", "x", "label", "nbytes")}
    label, nbytes = "+".join(k["label"] for k in known), sum(k["nbytes"] for k in known)
    at = (rest.pop("mesh"), rest.pop("axis"), label, nbytes)
    return call(graph, group[0].start.target, *place, x, *at, *rest.values())  # type: ignore[arg-type]


def _merge_gathers(graph: fx.Graph, group: Sequence[_One], order: Order) -> None:
    first = group[0].start
    size = group[0].numel // values(group[0].x)[0].numel()
    with graph.inserting_before(first):
        row = call(graph, _aten.cat.default, [_there(graph, one.x, order[first], order) for one in group])
        start = _start(graph, group, [], row)
        place, ticket = (call(graph, python.getitem, start, i) for i in range(2))
    with graph.inserting_before(min((one.wait for one in group), key=order.__getitem__)):
        call(graph, _fshard.wait.default, place, ticket, [row])
        rows = call(graph, _aten.view.default, place, [size, -1])
        parts = [call(graph, _aten.slice.Tensor, rows, 1, *ends) for ends in _ends(group, size)]
        # copies: readers may ask for strides and offsets, which count from the start of a buffer
        whole = {"memory_format": torch.contiguous_format}
        parts = [call(graph, _aten.clone.default, part, **whole) for part in parts]
        parts = [call(graph, _aten.view.default, part, [-1]) for part in parts]
    for one, part in zip(group, parts, strict=True):
        graph.erase_node(one.wait)
        for old in one.places:
            old.replace_all_uses_with(part)
        for old in [*one.start.users, one.start]:
            graph.erase_node(old)


def _there(graph: fx.Graph, x: fx.Node, at: int, order: Order) -> fx.Node:
    """`x`, or, if it is a view that comes later, a copy of the view."""
    if order[x] < at:
        return x
    return copy(graph, x, {y: _there(graph, y, at, order) for y in x.all_input_nodes})


def _merge_reductions(graph: fx.Graph, group: Sequence[_One], order: Order) -> None:
    size = values(group[0].x)[0].numel() // group[0].numel
    nodes, ends = list(order), _ends(group, 1)
    until = min(max(order[one.wait] for one in group), *(first_reader(one.wait, order) for one in group))
    with graph.inserting_before(group[-1].start.next):
        rows = [call(graph, _aten.view.default, one.x, [size, -1]) for one in group]
        row = call(graph, _aten.reshape.default, call(graph, _aten.cat.default, rows, 1), [-1])
        place = call(graph, _aten.new_empty.default, group[0].places[0], [ends[-1][1]])
        ticket = _start(graph, group, [place], row)
    with graph.inserting_before(nodes[until]):
        call(graph, _fshard.wait.default, place, ticket, [row])
        for one, end in zip(group, ends, strict=True):
            call(graph, _aten.copy_.default, one.places[0], call(graph, _aten.slice.Tensor, place, 0, *end))
    for one in group:
        graph.erase_node(one.wait)
        graph.erase_node(one.start)
