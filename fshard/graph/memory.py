"""Estimate the memory that a graph uses, node by node.

Note [Memory of a graph]
    1. A storage counts from its creation to its last reader, an output to the end. An input always counts: the caller
       holds it.
    2. A fused value does not count. Elementwise values are fused if nothing reads them after the next barrier (matrix
       product, attention, collective).
    3. One loop computes all elementwise values of one size between two barriers, so the loop's inputs stay until its
       last value.
    4. A value may overwrite an input of its size at the input's last use: the two count once.
    5. An exact sum on an accelerator, or of more than 8 CPU ranks on several hosts, receives all ranks' parts in a
       buffer outside the graph. The buffer counts from start to wait.
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

_MADE = {"fshard.all_gather": "gathered", "fshard.parts": "gathered", "fshard.room": "gradients"}
_FILLED = {"fshard.reduce_scatter": ("place", "x"), "fshard.put": ("place",)}  # buffers of gradients
# Compilers fuse these operators, but never write their results over inputs.
_DECOMPOSED = (
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("nll_loss_forward", "nll_loss_backward"),
)


@dataclass(frozen=True)
class Footprint:
    """The bytes in memory at node `nodes[i]`: `bytes[i]`, by purpose.

    Purposes: arguments, parameters, optimizer, gathered, gradients, activations, results.
    """

    nodes: tuple[str, ...]
    bytes: tuple[dict[str, int], ...]

    @property
    def peak(self) -> int:
        """The most bytes at any node."""
        return sum(self.by.values())

    @property
    def at(self) -> str:
        """The name of the node with the most bytes."""
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
    """Memory allocated by `node`, in use from node number `first` to `last`."""

    node: fx.Node
    value: torch.Tensor
    what: str  # purpose
    nbytes: int
    first: int
    last: int


@dataclass
class _Storage(MemorySpan):
    fusible: bool  # a compiler may compute it inside its readers
    sources: list[int] = field(default_factory=list)  # storages of the node's arguments


def footprint(graph: fx.Graph, inputs: Sequence[str]) -> Footprint:
    names = tuple(node.name for node in graph.nodes)
    return Footprint(names, tuple(rows(spans(graph, inputs), len(names))))


def rows(counted: Iterable[MemorySpan], number: int) -> list[dict[str, int]]:
    # changes[i]: new bytes at node i, less bytes last needed at node i - 1
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
    nodes = list(graph.nodes)
    storages = _storages(nodes, inputs)
    barriers = [i for i, node in enumerate(nodes) if node.op == "call_function" and _is_barrier(node)] + [len(nodes)]
    counted = [s for s in storages.values() if not s.fusible or s.last > barriers[bisect(barriers, s.first)]]
    reused = _in_place(barriers, counted, storages)
    loops = {i: (bisect(barriers, i), values(node)[0].numel()) for i, node in enumerate(nodes) if _is_fusible(node)}
    ends = {loops[s.first]: s.first for s in counted if s.first in loops}
    for key, s in storages.items():
        s.last = s.last - 1 if key in reused else max(s.last, ends.get(loops.get(s.last, (-1, -1)), 0))
    numbers = {node: i for i, node in enumerate(nodes)}
    received = list[MemorySpan]()
    for node, nbytes in ((node, _received_bytes(node)) for node in nodes):
        waits = [numbers[user] for user in node.users if operator(user) == "fshard.wait"]
        if nbytes:
            (x,) = values(arguments(node)["x"])
            received.append(MemorySpan(node, x, "gradients", nbytes, numbers[node], max([numbers[node], *waits])))
    return [*counted, *received]


def _received_bytes(node: fx.Node) -> int:
    """Return the bytes of the buffer for other ranks' parts of an exact sum; 0 if shared memory has the parts."""
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
    """Return the storages that a value of their size overwrites at their last use: each ends a node earlier.

    The last use must be the only use between two barriers.
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
            # compilers fuse no write to a part of a storage
            storage.fusible &= not (operator(node).endswith("_") and value.nbytes < storage.nbytes)
            if node.op == "placeholder" or any(user.op == "output" for user in node.users):
                storage.last, storage.fusible = len(nodes), False
                storage.what = "results" if storage.what == "activations" else storage.what
        for name in _FILLED.get(operator(node), ()):
            for key in storages_of(arguments(node)[name]):
                storages[key].what = "gradients" if storages[key].what == "activations" else storages[key].what
    return storages


def storages_of(node: fx.Node) -> Iterator[int]:
    """Yield a number for each tensor of a node, equal for tensors of one storage."""
    return map(address, values(node))


def _is_barrier(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    # `materialize` ends no loop
    is_ours = operator(node).startswith("fshard.") and operator(node) != "fshard.materialize"
    return is_ours or packet in flop_registry or "attention" in operator(node)


def _is_fusible(node: fx.Node) -> bool:
    return _is_pointwise(node) or (node.op == "call_function" and operator(node) in _DECOMPOSED)


def _is_pointwise(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
