"""Passes over the graph of a traced function: each changes it in place, and what it computes stays the same.

Note [Order of a graph]
    A graph runs in the order of its nodes, so where nodes stand decides what is in memory when, and what overlaps. A
    step gathers a unit when it is touched, and again in its backward, so its graph has that order from the start. In
    other functions (a torch.func gradient of a loss that gathers all before it begins) `regather` and `sink` see to it.
"""

from __future__ import annotations

import operator as python
from bisect import bisect, bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from .footprint import footprint, storages_of
from .reading import arguments, operator, values

_get, _as_strided = python.getitem, torch.ops.aten.as_strided.default
_REDUCTIONS = ("fshard.reduce_scatter", "fshard.all_reduce")
# What a compiler fuses into its readers, and norms: a pass over memory, where a matrix product is many.
_CHEAP = ("native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "clone", "_to_copy")


VIEWS = (
    *("getitem", "detach", "alias", "view", "_unsafe_view", "reshape", "split_with_sizes", "split", "slice", "select"),
    *("unbind", "as_strided", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze"),
)


def _is(node: fx.Node, *names: str) -> bool:
    return node.op == "call_function" and operator(node) in names


@dataclass(frozen=True)
class Gather:
    """An all-gather: its start, its ticket, its wait, the nodes that give its buffer or a view, and those that read."""

    start: fx.Node
    ticket: fx.Node
    wait: fx.Node
    views: list[fx.Node]
    readers: list[fx.Node]

    @property
    def unit(self) -> str:
        """The unit it brings together."""
        return arguments(self.start)["label"]

    @property
    def nbytes(self) -> int:
        """The size of its buffer."""
        return values(self.start)[0].nbytes


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for place in dict.fromkeys(storages_of(node)):
            found.setdefault(place, []).append(node)
    return found


def gathers(graph: fx.Graph) -> list[Gather]:
    """The all-gathers of a graph, in the order of their first reader; those that nobody reads first."""
    order, found = {node: i for i, node in enumerate(graph.nodes)}, []
    inside = _by_storage(order)
    for start in (node for node in order if _is(node, "fshard.all_gather")):
        same = [node for node in inside[next(storages_of(start))] if node is not start]
        first = min((order[node] for node in same if _writes(node)), default=len(order))
        views = [node for node in same if order[node] < first]  # what is written to is read
        users = {user for node in [start, *views] for user in node.users}
        waits = {user for user in users if _is(user, "fshard.wait")}  # others name it as what was sent
        (ticket,) = (user for user in start.users if _is(user, "getitem") and user.args[1] == 1)
        (wait,) = (user for user in waits if arguments(user)["ticket"] is ticket)
        readers = users - {start, ticket, *waits, *views}
        found.append(Gather(start, ticket, wait, views, sorted(readers, key=order.__getitem__)))
    return sorted(found, key=lambda gather: order[gather.readers[0]] if gather.readers else -1)


def drop_dead(graph: fx.Graph) -> None:
    """What nobody reads goes, gathers of leaves that are not used among it."""
    _drop_unread(graph)
    while dead := [gather for gather in gathers(graph) if not gather.readers]:
        for gather in dead:
            for node in (gather.wait, *reversed(gather.views), gather.ticket, gather.start):
                graph.erase_node(node)
        _drop_unread(graph)


def _drop_unread(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not _writes(node):
            graph.erase_node(node)


def once(graph: fx.Graph) -> None:
    """A number that elements of tensors are computed with is worked out beforehand, not again for each of them."""
    for node in [n for n in graph.nodes if _is_number(n) and torch.Tag.pointwise in getattr(n.target, "tags", ())]:
        readers = [user for user in node.users if values(user) and not _is_number(user)]
        if readers:
            with graph.inserting_after(node):
                number = graph.call_function(torch.ops.fshard.once.default, (node,))
                number.meta["val"] = node.meta["val"]
            for reader in readers:
                reader.replace_input_with(node, number)


def _is_number(node: fx.Node) -> bool:
    found = values(node)
    return node.op == "call_function" and bool(found) and all(x.dim() == 0 for x in found)


def _first_write(values: Iterable[fx.Node], after: float, order: Mapping[fx.Node, float]) -> float:
    """Where the memory of some values is first written to."""
    places = {place for value in values for place in storages_of(value)}
    writers = (n for n in order if _writes(n) and not _is(n, "fshard.wait", *_REDUCTIONS) and order[n] > after)
    return min(
        (order[n] for n in writers if any(places & set(storages_of(x)) for x in n.all_input_nodes[:1])),
        default=float(len(order)),
    )


def _arrange(graph: fx.Graph, keys: Mapping[fx.Node, float]) -> None:
    """Nodes in the order of their keys; those without one stay where they are."""
    order = {node: (keys.get(node, i), i) for i, node in enumerate(graph.nodes)}
    output = graph.output_node()
    for node in sorted(order, key=order.__getitem__):
        if node.op not in ("placeholder", "output"):
            output.prepend(node)


def sink(graph: fx.Graph, in_flight: int = 0) -> None:
    """A gather starts one unit before its first reader, or as many as `in_flight` bytes allow, and is waited for there.

    Reductions are waited for as late as those bytes allow.
    """
    order, keys = {node: float(i) for i, node in enumerate(graph.nodes)}, dict[fx.Node, float]()
    found = gathers(graph)
    for i, gather in enumerate(found):
        at = order[gather.readers[0]]
        before = [g for g in found[:i] if order[g.readers[0]] < at]
        head, nbytes = at - 0.5, gather.nbytes
        for number, earlier in enumerate(reversed(before)):
            if number and nbytes > in_flight:
                break
            head = order[earlier.readers[0]]
            nbytes += earlier.nbytes
        head = min(head, _first_write([arguments(gather.start)["x"]], order[gather.start], order))
        keys |= dict.fromkeys([gather.wait, *gather.views], at - 0.4)
        start = max([head - 0.3, *(keys.get(x, order[x]) for x in gather.start.all_input_nodes)])
        keys |= dict.fromkeys([gather.start, gather.ticket], start)
    _arrange(graph, keys)
    if in_flight:
        _delay(graph, in_flight)


def _delay(graph: fx.Graph, in_flight: int) -> None:
    order, keys, waiting = {node: float(i) for i, node in enumerate(graph.nodes)}, dict[fx.Node, float](), []
    for start in (node for node in order if _is(node, *_REDUCTIONS)):
        (wait,) = (user for user in start.users if _is(user, "fshard.wait"))
        waiting.append((wait, values(arguments(start)["x"])[0].nbytes))
        while sum(nbytes for _, nbytes in waiting) > in_flight and len(waiting) > 1:
            keys[waiting.pop(0)[0]] = order[start] - 0.5
    for wait, _ in waiting:
        keys[wait] = float(len(order))
    for wait in keys:
        sent: list[fx.Node] = arguments(wait)["sent"]
        end = min(_first_reader(wait, order), _first_write(sent, order[wait], order))
        keys[wait] = max(order[wait], min(keys[wait], end - 0.5))
    _arrange(graph, keys)


def _first_reader(wait: fx.Node, order: Mapping[fx.Node, float]) -> float:
    """Where what a reduction writes to is read first."""
    place = set(storages_of(wait.args[0]))  # type: ignore[arg-type]
    views = [node for node in order if place & set(storages_of(node))]
    users = {user for node in views for user in node.users if user not in views or _writes(user)}
    readers = [order[user] for user in users if any(place & set(storages_of(x)) for x in _read_by(user))]
    return min((at for at in readers if at > order[wait]), default=float(len(order)))


def _read_by(node: fx.Node) -> list[fx.Node]:
    """What a node reads of what it is given: a reduction not the place it writes to, a wait nothing."""
    if _is(node, "fshard.wait"):
        return []
    return [arguments(node)["x"]] if _is(node, *_REDUCTIONS) else node.all_input_nodes


def regather(graph: fx.Graph, units: Iterable[str]) -> None:
    """A buffer of these units that is read again after another unit's is gathered once more, rather than kept."""
    wanted, found = set(units), gathers(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    heads = sorted({order[gather.readers[0]] for gather in found})
    for gather in (g for g in found if g.unit in wanted):
        chain = sorted([gather.start, gather.ticket, gather.wait, *gather.views], key=order.__getitem__)
        sent = [arguments(gather.start)["x"]]
        end = order[gather.readers[-1]] if gather.readers else 0
        if any(map(_writes, gather.readers)) or _first_write(sent, order[gather.start], order) < end:
            continue  # what is gathered again is not the same
        groups = _apart([order[reader] for reader in gather.readers], heads)
        for first, last in groups[1:]:
            _put_copies(graph, chain, {}, gather.readers[first:last])


def _apart(places: Sequence[int], heads: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of places between two of which there is no head."""
    cuts = [i for i in range(1, len(places)) if bisect(heads, places[i - 1]) < bisect_left(heads, places[i])]
    return list(pairwise([0, *cuts, len(places)]))


def _put_copies(
    graph: fx.Graph, nodes: Iterable[fx.Node], other: dict[fx.Node, fx.Node], readers: list[fx.Node]
) -> None:
    """Copies of nodes before the first of some readers, which read them; `other` takes the place of arguments."""
    with graph.inserting_before(readers[0]):
        for node in nodes:
            other[node] = _copy(graph, node, other)
    for reader in readers:
        for old, new in other.items():
            reader.replace_input_with(old, new)


def _copy(graph: fx.Graph, node: fx.Node, other: Mapping[fx.Node, fx.Node]) -> fx.Node:
    new = graph.node_copy(node, lambda x: other.get(x, x))
    if found := values(node):  # memory of its own, or a view of another
        args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda x: x.meta["val"])
        with found[0].fake_mode:  # type: ignore[attr-defined]
            new.meta["val"] = new.target(*args, **kwargs)  # type: ignore[operator]
    return new


def is_cheap(node: fx.Node) -> bool:
    """Whether a node is a pass over memory."""
    return _is(node, *_CHEAP) or (
        node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
    )


def recompute(graph: fx.Graph, inputs: list[str], budget: int, policy: Callable[[fx.Node], bool] = is_cheap) -> None:
    """Values are made again before they are read late, largest first, until the peak is at most `budget` bytes.

    Those that `policy` allows, and all that they are made from is in memory then anyhow.
    """
    tried = set[fx.Node]()
    while (now := footprint(graph, inputs)).peak > budget:
        nodes = list(graph.nodes)
        top = now.nodes.index(now.at)
        late = {place for node in nodes[top + 1 :] for x in node.all_input_nodes for place in storages_of(x)}
        candidates = [n for n in nodes[:top] if n not in tried and policy(n) and late & set(storages_of(n))]
        if not candidates:
            return
        best = max(candidates, key=lambda n: values(n)[0].nbytes)
        tried.add(best)
        _make_again(graph, best, {node: i for i, node in enumerate(nodes)}, top)
        drop_dead(graph)


def _make_again(graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], top: int) -> None:
    places = set(storages_of(node))
    if places & {place for x in node.all_input_nodes for place in storages_of(x)}:
        return  # a view, or written in place
    views = [other for other in order if other is not node and places & set(storages_of(other))]
    readers = sorted({user for one in [node, *views] for user in one.users} - set(views), key=order.__getitem__)
    late = [reader for reader in readers if order[reader] > top]
    if not late or late[-1].op == "output" or any(operator(v) not in VIEWS for v in views):
        return
    found = {x: _there(graph, x, late[0], order) for x in node.all_input_nodes}
    if all(found.values()):
        other = {x: new for x, new in found.items() if new is not None and new is not x}
        _put_copies(graph, [node, *views], other, late)


def _there(graph: fx.Graph, x: fx.Node, reader: fx.Node, order: dict[fx.Node, int]) -> fx.Node | None:
    """`x` itself if it is in memory where `reader` runs anyhow, or the same of the unit's buffer that is; else None."""
    places = set(storages_of(x))
    users = {user for node in order if places & set(storages_of(node)) for user in node.users}
    if x.op == "placeholder" or any(order[user] >= order[reader] for user in users if user in order):
        return x
    mine = [g for g in gathers(graph) if places & set(storages_of(g.start))]
    again = [g for g in gathers(graph) if mine and g.unit == mine[0].unit and order.get(g.wait, 0) > order[x]]
    fits = [g for g in again if order[g.wait] < order[reader] <= order[g.readers[-1]]]
    if not fits:
        return None
    with graph.inserting_after(fits[0].wait):
        place = graph.call_function(_get, (fits[0].start, 0))
        place.meta["val"] = fits[0].start.meta["val"][0]
    with graph.inserting_after(place):
        (value,) = values(x)
        new = graph.call_function(_as_strided, (place, list(value.shape), list(value.stride()), value.storage_offset()))
        new.meta["val"] = place.meta["val"].as_strided(value.shape, value.stride(), value.storage_offset())
    order |= {place: order[fits[0].wait], new: order[fits[0].wait]}
    return new
