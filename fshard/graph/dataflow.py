"""The flow of values through a graph: readers, writers and shared memory."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.node import Argument

from ..core.random import draws
from ..core.storage import address
from .inspect import arguments, operator, values
from .memory import storages_of

REDUCTIONS = ("fshard.reduce_scatter", "fshard.all_reduce")
PLACED = (*REDUCTIONS, "fshard.all_gather_into")  # these take memory for the result, and return a ticket for `wait`
VIEWS = (
    *("getitem", "detach", "alias", "view", "_unsafe_view", "reshape", "split_with_sizes", "split", "slice", "select"),
    *("unbind", "as_strided", "expand", "t", "transpose", "permute", "unsqueeze", "squeeze"),
)
# If the result of such an operator equals an argument, Inductor reads the argument in place of the result.
REPEATING = (
    *("clone", "copy_", "_to_copy", "cat", "stack", "repeat", "constant_pad_nd", "slice_scatter", "view_copy", "pow"),
    *("ceil", "floor", "round", "trunc", "rot90", "fshard.joined"),
)

# These operators write to running statistics; their schemas do not say so.
_UNMARKED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")


def is_call(node: fx.Node, *names: str) -> bool:
    return node.op == "call_function" and operator(node) in names


@dataclass(frozen=True)
class GatherNodes:
    """The nodes of an all-gather. `views` return the gathered buffer or a view of it."""

    start: fx.Node
    ticket: fx.Node  # the result of `start` for `wait`
    wait: fx.Node
    views: list[fx.Node]
    readers: list[fx.Node]

    @property
    def unit(self) -> str:
        return arguments(self.start)["label"]

    @property
    def fixed(self) -> bool:
        return is_fixed(self.start)

    @property
    def nbytes(self) -> int:
        return values(self.start)[0].nbytes

    @property
    def read_at(self) -> fx.Node:
        return self.wait if arguments(self.start)["lent"] or not self.readers else self.readers[0]


def is_fixed(start: fx.Node) -> bool:
    """Return True if a collective has no label, so no pass moves it (Note [What a pass must keep] in `passes.py`)."""
    return not arguments(start)["label"]


def acts(node: fx.Node) -> bool:
    """Return True if a call must run even without a reader: another library's operator may have any effect."""
    namespace = getattr(node.target, "namespace", "aten")
    return namespace not in ("aten", "prims", "fshard", "higher_order") or has_effect(node)


def has_effect(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.is_impure()
    # `is_impure` counts all operators tagged as random, also attention without dropout and all of fshard's
    is_random = draws(target, node.args, node.kwargs)
    return is_random or is_write(node) or not target._schema.returns or node.is_impure(impure_random=False)


def is_write(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or (operator(node) in _UNMARKED and bool(written_by(node)))


def returns_place(node: fx.Node) -> bool:
    """Return True if a node writes to its first argument and returns it with its shape and strides, unlike `t_`."""
    if not is_write(node) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    pair = (values(each) for each in (node, node.args[0]))
    made, given = ([(address(x), x.shape, x.stride(), x.storage_offset(), x.dtype) for x in xs] for xs in pair)
    return len(made) == 1 and made == given


def written_inputs(graph: fx.Graph) -> list[int]:
    inputs, memory = [node for node in graph.nodes if node.op == "placeholder"], written(graph.nodes)
    return [number for number, node in enumerate(inputs) if memory & set(storages_of(node))]


def written(nodes: Iterable[fx.Node]) -> set[int]:
    return {key for node in nodes if is_write(node) for x in written_by(node) for key in storages_of(x)}


def repeated(graph: fx.Graph, memory: set[int]) -> set[int]:
    """Follow the contents of `memory` through a graph: add storages of possible copies, drop overwritten ones."""
    memory = {*memory}
    for node in graph.nodes:
        read = node.all_input_nodes[-1:] if is_call(node, "copy_") else node.all_input_nodes
        if is_call(node, *REPEATING) and any(not memory.isdisjoint(storages_of(x)) for x in read):
            memory.update(storages_of(node))
        elif is_write(node):
            memory -= written([node])
    return memory


def written_by(node: fx.Node) -> list[fx.Node]:
    by_name, schema = arguments(node), node.target._schema  # type: ignore[union-attr]
    marked = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if is_call(node, *_UNMARKED) and by_name["training"]:
        marked += ["running_mean", "running_var"]
    written: list[fx.Node] = []
    fx.node.map_arg([by_name[name] for name in marked if name in by_name], written.append)
    return written


@dataclass(frozen=True)
class NodeIndex:
    """The number of each node (`order`), and the nodes with access to each storage, in order.

    `returned`: nodes returning a storage; `written`: numbers of writes to it; `read`: numbers of reads after a write.
    If the graph changes, its index does not. One index serves all collectives: a scan for each would take quadratic
    time.
    """

    order: Mapping[fx.Node, int]
    returned: Mapping[int, Sequence[fx.Node]]
    written: Mapping[int, Sequence[int]]
    read: Mapping[int, Sequence[int]]

    def first_write(self, values: Iterable[fx.Node], after: int) -> int:
        """Return the number of the first node after `after` that writes to `values`; else the number of nodes."""
        return self._first(self.written, values, after)

    def last_write(self, values: Iterable[fx.Node], before: int) -> int:
        """Return the number of the last node before `before` that writes to `values`; else -1."""
        numbers = [self.written.get(storage, ()) for value in values for storage in storages_of(value)]
        return max((at[i - 1] for at in numbers if (i := bisect_left(at, before))), default=-1)

    def first_reader(self, wait: fx.Node) -> int:
        """Return the number of the first reader of a wait's result; else the number of nodes."""
        return self._first(self.read, [wait.args[0]], self.order[wait])  # type: ignore[list-item]

    def _first(self, numbers: Mapping[int, Sequence[int]], values: Iterable[fx.Node], after: int) -> int:
        lists = [numbers.get(storage, ()) for value in values for storage in storages_of(value)]
        return min((at[i] for at in lists if (i := bisect(at, after)) < len(at)), default=len(self.order))


def index(graph: fx.Graph) -> NodeIndex:
    order, memory = dict[fx.Node, int](), dict[fx.Node, set[int]]()  # memory: storages of a node's result
    returned = defaultdict[int, list[fx.Node]](list)
    written, read = (defaultdict[int, list[int]](list) for _ in range(2))
    for number, node in enumerate(graph.nodes):
        order[node], made = number, {*storages_of(node)}
        memory[node], is_writer = made, is_write(node)
        for storage in made:
            returned[storage].append(node)
        for x in read_by(node):
            for storage in memory[x]:
                if storage in written and (is_writer or storage not in made):  # a view reads nothing
                    read[storage].append(number)
        for x in written_by(node) if is_writer else ():  # a wait writes to the result
            for storage in memory[x]:
                written[storage].append(number)
    return NodeIndex(order, returned, written, read)


def gathers(nodes: NodeIndex) -> list[GatherNodes]:
    """Return the all-gathers in the order of first readers; a loss's (`lent`) in the order of its reads."""
    # first readers differ between ranks of one row and of several
    order, result = nodes.order, []
    for start in (node for node in order if is_call(node, "fshard.all_gather")):
        same = [node for node in nodes.returned[next(storages_of(start))] if node is not start]
        first = min((order[node] for node in same if is_write(node)), default=len(order))
        views = [node for node in same if order[node] < first]  # nodes after the first write count as readers
        users = {user for node in [start, *views] for user in node.users}
        # among these: waits of collectives that send this buffer
        waits = {user for user in users if is_call(user, "fshard.wait")}
        (ticket,) = (user for user in start.users if is_call(user, "getitem") and user.args[1] == 1)
        (wait,) = (user for user in waits if arguments(user)["ticket"] is ticket)
        readers = users - {start, ticket, *waits, *views}
        result.append(GatherNodes(start, ticket, wait, views, sorted(readers, key=order.__getitem__)))
    return sorted(result, key=lambda gather: order[gather.read_at])


def read_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node reads. A start does not read its result's memory; a wait reads nothing."""
    name = operator(node)
    return [] if name == "fshard.wait" else [arguments(node)["x"]] if name in PLACED else node.all_input_nodes


def copy(graph: fx.Graph, node: fx.Node, other: Mapping[fx.Node, fx.Node]) -> fx.Node:
    new = graph.node_copy(node, lambda x: other.get(x, x))
    if values(node):
        # anew: the copy has another storage
        new.meta["val"] = computed(new)
    return new


def computed(node: fx.Node) -> object:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with next(x for n in node.all_input_nodes for x in values(n)).fake_mode:  # type: ignore[attr-defined]
        return node.target(*args, **kwargs)  # type: ignore[operator]


def call(graph: fx.Graph, target: Callable[..., object], *args: Argument, **kwargs: Argument) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = computed(node)
    return node


def insert_copy(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return call(graph, torch.ops.fshard.materialize.default, x)
