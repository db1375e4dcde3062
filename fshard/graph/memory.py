"""Estimate the memory that a graph uses, node by node.

Note [Memory of a graph]
    Each storage is counted from the node that creates it to the last node that reads it, in the order of execution.
    Inputs are counted for the whole graph, because the caller holds them, and outputs from their creation to the end.
    Values that a compiler fuses into their readers are not counted: an elementwise value whose readers all come before
    the next node that is not fused (a matrix product, attention, a collective). Elementwise values of one size between
    two such nodes are written by one loop: what it reads is there until the last of them is. A value that can reuse a
    same-sized input's storage (its last use) is counted once. An exact sum on an accelerator, or between more than a
    few hosts, receives the parts of all ranks in a buffer that is not a value of the graph; this buffer is counted from
    the node that starts the sum to the node that waits for the result.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..comm.mesh import MESHES
from ..comm.primitives import is_direct
from ..comm.process_groups import FEW
from ..core.storage import address
from .inspect import arguments, operator, values

_MADE = {"fshard.all_gather": "gathered", "fshard.room": "gradients"}
# Operators that compilers write as sums and pointwise operators, which are fused, but not written over what they read.
_DECOMPOSED = (
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward"),
)


@dataclass(frozen=True)
class Footprint:
    """The bytes in memory at every node, by purpose.

    Purposes are arguments, parameters, optimizer, gathered, gradients, activations and results. `bytes[i]` is the
    number of bytes by purpose at the node `nodes[i]`.
    """

    nodes: tuple[str, ...]
    bytes: tuple[dict[str, int], ...]

    @property
    def peak(self) -> int:
        """The largest number of bytes in memory at any node."""
        return sum(self.by.values())

    @property
    def at(self) -> str:
        """The name of the node at which memory use is largest."""
        return self.nodes[self._top]

    @property
    def by(self) -> dict[str, int]:
        """The bytes at the peak, by purpose."""
        return self.bytes[self._top]

    @property
    def _top(self) -> int:
        return max(range(len(self.bytes)), key=lambda i: sum(self.bytes[i].values()))


@dataclass
class MemorySpan:
    """Memory that a node allocates, from the node where it is first there to the last one at which it is."""

    node: fx.Node
    value: torch.Tensor
    what: str  # its purpose
    nbytes: int
    first: int  # indices of nodes
    last: int


@dataclass
class _Storage(MemorySpan):
    fusible: bool  # whether a compiler may compute it inside its readers
    sources: list[int] = field(default_factory=list)  # storages of the arguments of the node that creates it


def footprint(graph: fx.Graph, inputs: Sequence[str]) -> Footprint:
    """Estimate the memory of a graph. `inputs` gives the purpose of each input, such as "parameters"."""
    names = tuple(node.name for node in graph.nodes)
    return Footprint(names, tuple(rows(spans(graph, inputs), len(names))))


def rows(counted: Iterable[MemorySpan], number: int) -> list[dict[str, int]]:
    """Return the bytes in memory by purpose at each of so many nodes."""
    # changes[i]: bytes by purpose that appear at node i, or were last needed at node i - 1
    changes: list[Counter[str]] = [Counter() for _ in range(number + 2)]
    for s in counted:
        changes[s.first][s.what] += s.nbytes
        changes[s.last + 1][s.what] -= s.nbytes
    now, result = Counter[str](), list[dict[str, int]]()
    for change in changes[:number]:
        now.update(change)
        result.append({k: v for k, v in now.items() if v})
    return result


def spans(graph: fx.Graph, inputs: Sequence[str]) -> list[MemorySpan]:
    """Return the memory that is counted, in the order of the nodes that allocate it."""
    nodes = list(graph.nodes)
    storages = _storages(nodes, inputs)
    barriers = [i for i, node in enumerate(nodes) if node.op == "call_function" and _is_barrier(node)] + [len(nodes)]
    # what is read up to the next barrier alone is computed inside its readers
    counted = [s for s in storages.values() if not s.fusible or s.last > barriers[bisect(barriers, s.first)]]
    # what a loop reads is kept until its last result is there: an optimizer's gradients until it has written all
    reused = _in_place(barriers, counted, storages)
    loops = {i: (bisect(barriers, i), values(node)[0].numel()) for i, node in enumerate(nodes) if _is_fusible(node)}
    ends = {loops[s.first]: s.first for s in counted if s.first in loops}
    for key, s in storages.items():
        s.last = s.last - 1 if key in reused else max(s.last, ends.get(loops.get(s.last, (-1, -1)), 0))
    numbers = {node: i for i, node in enumerate(nodes)}
    received = list[MemorySpan]()
    for node, nbytes in ((node, _received(node)) for node in nodes):
        waits = [numbers[user] for user in node.users if operator(user) == "fshard.wait"]
        if nbytes:
            (x,) = values(arguments(node)["x"])
            received.append(MemorySpan(node, x, "gradients", nbytes, numbers[node], max([numbers[node], *waits])))
    return [*counted, *received]


def _received(node: fx.Node) -> int:
    """Return the bytes of the receive buffer of an exact sum, in which this rank adds the parts of its peers.

    0 for other nodes, and where a rank reads the parts of its peers in shared memory.
    """
    if operator(node) not in ("fshard.reduce_scatter", "fshard.all_reduce"):
        return 0
    by_name = arguments(node)
    (x,), op = values(by_name["x"]), by_name.get("op", "sum")
    mesh = MESHES.find(by_name["mesh"])
    size, few = mesh.size(by_name["axis"]), not mesh.abstract or mesh.size(by_name["axis"]) <= FEW
    if by_name["fast"] and op == "sum":
        return 0
    if x.device.type == "cpu" and few and mesh.ranks(by_name["axis"]).built_in is None:
        return 0
    if "op" in by_name and is_direct(x, size, op):
        return x.nbytes * size  # all ranks' inputs, gathered
    return -(-x.numel() // size) * size * x.itemsize  # padded to equal parts


def _in_place(barriers: Sequence[int], counted: Sequence[_Storage], storages: dict[int, _Storage]) -> set[int]:
    """Return the storages over which a value of their size is written: its last use, and the only one of its loops.

    At most one value reuses a storage; the storage is freed one node earlier.
    """
    counted_ids, reused = {id(s) for s in counted}, set[int]()
    uses = {(key, bisect(barriers, s.first), s.first) for s in storages.values() for key in s.sources}
    number = Counter((key, part) for key, part, _ in uses)
    for s in counted:
        for key in s.sources if s.fusible and _is_pointwise(s.node) else []:
            old, only = storages[key], number[key, bisect(barriers, s.first)] == 1
            if only and id(old) in counted_ids and key not in reused and (old.last, old.nbytes) == (s.first, s.nbytes):
                reused.add(key)
                break
    return reused


def _storages(nodes: Sequence[fx.Node], inputs: Sequence[str]) -> dict[int, _Storage]:
    """Return the storages of all values, by the number that `storages_of` gives them."""
    storages: dict[int, _Storage] = {}
    purposes, numbers = iter(inputs), {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        what = next(purposes) if node.op == "placeholder" else _MADE.get(operator(node), "activations")
        sources = [key for source in node.all_input_nodes for key in storages_of(source)]
        for value, key in zip(values(node), storages_of(node), strict=True):
            storage = storages.setdefault(
                key, _Storage(node, value, what, value.untyped_storage().nbytes(), i, i, _is_fusible(node), sources)
            )
            storage.last = max([storage.last, *(numbers[user] for user in node.users)])
            # what is written part by part is stored: a compiler fuses no writes to a part
            storage.fusible &= not (operator(node).endswith("_") and value.nbytes < storage.nbytes)
            if node.op == "placeholder" or any(user.op == "output" for user in node.users):
                storage.last, storage.fusible = len(nodes), False
                storage.what = "results" if storage.what == "activations" else storage.what
        # the buffers that gradients are packed and reduced in
        names = ("place", "x") if operator(node) == "fshard.reduce_scatter" else ()
        for name in names:
            for key in storages_of(arguments(node)[name]):
                storages[key].what = "gradients" if storages[key].what == "activations" else storages[key].what
    return storages


def storages_of(node: fx.Node) -> Iterator[int]:
    """Yield a number for each tensor that a node produces, equal for tensors that share a storage."""
    return map(address, values(node))


def _is_barrier(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    # a number that is made before loops is no end of them
    is_ours = operator(node).startswith("fshard.") and operator(node) != "fshard.materialize"
    return is_ours or packet in flop_registry or "attention" in operator(node)


def _is_fusible(node: fx.Node) -> bool:
    return _is_pointwise(node) or (node.op == "call_function" and operator(node) in _DECOMPOSED)


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
