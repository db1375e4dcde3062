"""Which nodes of a graph belong to one collective, and which nodes read or write a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .inspect import arguments, operator, values
from .memory import storages_of

REDUCTIONS = ("fshard.reduce_scatter", "fshard.all_reduce")
VIEWS = (
    *("getitem", "detach", "alias", "view", "_unsafe_view", "reshape", "split_with_sizes", "split", "slice", "select"),
    *("unbind", "as_strided", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze"),
)


def is_call(node: fx.Node, *names: str) -> bool:
    """Whether a node calls one of these operators."""
    return node.op == "call_function" and operator(node) in names


@dataclass(frozen=True)
class Gather:
    """The nodes of an all-gather: start, ticket, wait, those that return its buffer or a view of it, and readers."""

    start: fx.Node
    ticket: fx.Node
    wait: fx.Node
    views: list[fx.Node]
    readers: list[fx.Node]

    @property
    def unit(self) -> str:
        """The name of the unit that is gathered."""
        return arguments(self.start)["label"]

    @property
    def nbytes(self) -> int:
        """The bytes of the gathered buffer."""
        return values(self.start)[0].nbytes


def writes(node: fx.Node) -> bool:
    """Whether a node writes to an argument in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_inputs(graph: fx.Graph) -> list[int]:
    """The numbers of a graph's inputs whose memory a node writes to."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    places = {place for node in graph.nodes if writes(node) for x in _written_by(node) for place in storages_of(x)}
    return [number for number, node in enumerate(inputs) if places & set(storages_of(node))]


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node writes to, also inside of lists."""
    marked = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    known = arguments(node)
    found: list[fx.Node] = []
    fx.node.map_arg([known[name] for name in marked if name in known], found.append)
    return found


def _by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for place in dict.fromkeys(storages_of(node)):
            found.setdefault(place, []).append(node)
    return found


def gathers(graph: fx.Graph) -> list[Gather]:
    """The all-gathers of a graph, in the order of their first readers; those without readers come first."""
    order, found = {node: i for i, node in enumerate(graph.nodes)}, []
    inside = _by_storage(order)
    for start in (node for node in order if is_call(node, "fshard.all_gather")):
        same = [node for node in inside[next(storages_of(start))] if node is not start]
        first = min((order[node] for node in same if writes(node)), default=len(order))
        views = [node for node in same if order[node] < first]  # from the first write on, nodes count as readers
        users = {user for node in [start, *views] for user in node.users}
        waits = {
            user for user in users if is_call(user, "fshard.wait")
        }  # waits of other collectives have it among what they sent
        (ticket,) = (user for user in start.users if is_call(user, "getitem") and user.args[1] == 1)
        (wait,) = (user for user in waits if arguments(user)["ticket"] is ticket)
        readers = users - {start, ticket, *waits, *views}
        found.append(Gather(start, ticket, wait, views, sorted(readers, key=order.__getitem__)))
    return sorted(found, key=lambda gather: order[gather.readers[0]] if gather.readers else -1)


def first_write(values: Iterable[fx.Node], after: int, order: Mapping[fx.Node, int]) -> int:
    """The index of the first node after index `after` that writes to the memory of these values; else one past all."""
    return min((at for at in _written(values, order) if at > after), default=len(order))


def last_write(values: Iterable[fx.Node], before: int, order: Mapping[fx.Node, int]) -> int:
    """The index of the last node before index `before` that writes to the memory of these values; else -1."""
    return max((at for at in _written(values, order) if at < before), default=-1)


def _written(values: Iterable[fx.Node], order: Mapping[fx.Node, int]) -> Iterator[int]:
    """The indices of all nodes that write to the memory of these values; a wait writes what was received."""
    places = {place for value in values for place in storages_of(value)}
    for node in filter(writes, order):
        if any(places & set(storages_of(x)) for x in _written_by(node)):
            yield order[node]


def first_reader(wait: fx.Node, order: Mapping[fx.Node, int]) -> int:
    """The index of the first node after a reduction's wait that reads what the reduction wrote; else one past all."""
    result = set(storages_of(wait.args[0]))  # type: ignore[arg-type]
    views = [node for node in order if result & set(storages_of(node))]
    users = {user for node in views for user in node.users if user not in views or writes(user)}
    readers = [order[user] for user in users if any(result & set(storages_of(x)) for x in _read_by(user))]
    return min((at for at in readers if at > order[wait]), default=len(order))


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node reads: of a reduction not its output buffer, of a wait none."""
    if is_call(node, "fshard.wait"):
        return []
    return [arguments(node)["x"]] if is_call(node, *REDUCTIONS) else node.all_input_nodes


def copy(graph: fx.Graph, node: fx.Node, other: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """A copy of a node; `other` maps arguments to those of the copy."""
    new = graph.node_copy(node, lambda x: other.get(x, x))
    if found := values(node):  # memory of its own, or a view of another
        args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda x: x.meta["val"])
        with found[0].fake_mode:  # type: ignore[attr-defined]
            new.meta["val"] = new.target(*args, **kwargs)  # type: ignore[operator]
    return new


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new node that calls `target`, with its value on fake tensors; tensors must be among `args`, not `kwargs`."""
    node = graph.call_function(target, args, kwargs)
    given = fx.node.map_arg(args, lambda x: x.meta["val"])
    with next(x for n in node.all_input_nodes for x in values(n)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(*given, **kwargs)
    return node
