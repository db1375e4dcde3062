"""Estimate the memory that a graph uses, node by node.

Note [Memory of a graph]
    Each storage is counted from the node that creates it to the last node that reads it, in the order of execution.
    Inputs are counted for the whole graph, because the caller holds them, and outputs from their creation to the end.
    Values that a compiler fuses into their readers are not counted: an elementwise value whose readers all come before
    the next node that is not fused (a matrix product, attention, a collective). A value that can reuse a same-sized
    input's storage (its last use) is counted once. An exact sum on an accelerator receives the parts of the peers in a
    buffer that is not a value of the graph; this buffer is counted from the node that starts the sum to the node that
    waits for the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..comm.mesh import MESHES
from ..comm.traced import is_direct
from .inspect import arguments, operator, values


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

    def draw(self, path: str | Path) -> None:
        """Write a plot of the bytes by purpose over the nodes to `path`. Needs matplotlib."""
        from matplotlib.figure import Figure

        kinds = list(dict.fromkeys(kind for row in self.bytes for kind in row))
        figure = Figure(figsize=(9, 4), layout="constrained")
        axes = figure.subplots()
        axes.stackplot(
            range(len(self.nodes)), [[row.get(k, 0) / 2**20 for row in self.bytes] for k in kinds], labels=kinds
        )
        axes.set(xlabel="node", ylabel="MiB", title=f"peak {self.peak / 2**20:.1f} MiB at {self.at}")
        axes.legend(loc="upper left", fontsize="small")
        figure.savefig(path)


@dataclass
class _Storage:
    nbytes: int
    what: str
    first: int
    last: int
    fusible: bool
    sources: list[int] = field(default_factory=list)


def footprint(graph: fx.Graph, inputs: Sequence[str]) -> Footprint:
    """Estimate the memory of a graph. `inputs` gives the purpose of each input, such as "parameters"."""
    nodes = list(graph.nodes)
    found = _storages(nodes, inputs)
    barriers = [i for i, node in enumerate(nodes) if node.op == "call_function" and _is_barrier(node)]
    held = [s for s in found.values() if not (s.fusible and s.last <= _next(barriers, s.first, len(nodes)))]
    changes: list[Counter[str]] = [Counter() for _ in range(len(nodes) + 2)]
    for s in held:
        changes[s.first][s.what] += s.nbytes
        changes[s.last + 1][s.what] -= s.nbytes
    _in_place(held, found, changes)
    numbers = {node: i for i, node in enumerate(nodes)}
    for node, nbytes in ((node, _received(node)) for node in nodes):
        changes[numbers[node]]["gradients"] += nbytes
        changes[max([numbers[node], *(numbers[user] for user in node.users)]) + 1]["gradients"] -= nbytes
    now, rows = Counter[str](), list[dict[str, int]]()
    for change in changes[: len(nodes)]:
        now.update(change)
        rows.append({k: v for k, v in now.items() if v})
    return Footprint(tuple(node.name for node in nodes), tuple(rows))


def _received(node: fx.Node) -> int:
    """Return the bytes of the receive buffer of an exact sum, in which this rank adds the parts of its peers.

    0 for other nodes, and on the CPU, where a rank reads the parts of its peers in shared memory.
    """
    if operator(node) not in ("fshard.reduce_scatter", "fshard.all_reduce"):
        return 0
    given = arguments(node)
    (x,), op = values(given["x"]), given.get("op", "sum")
    if x.device.type == "cpu" or (given["fast"] and op == "sum"):
        return 0
    mesh = MESHES.find(given["mesh"])
    size = mesh.size(given["axis"])
    if "op" in given and is_direct(x, size, op):
        return x.nbytes * size  # all ranks' inputs, gathered, including this rank's
    return x.nbytes // size * (size - 1)


def _in_place(held: Sequence[_Storage], found: dict[int, _Storage], changes: list[Counter[str]]) -> None:
    """A value that can reuse a same-sized input's storage (its last use) is counted once."""
    live, taken = {id(s) for s in held}, set[int]()
    for s in held:
        for key in s.sources if s.fusible else []:
            old = found[key]
            if id(old) in live and key not in taken and old.last == s.first and old.nbytes == s.nbytes:
                changes[s.first][old.what] -= old.nbytes
                changes[s.first + 1][old.what] += old.nbytes
                taken.add(key)
                break


def _storages(nodes: Sequence[fx.Node], inputs: Sequence[str]) -> dict[int, _Storage]:
    found: dict[int, _Storage] = {}
    given, numbers = iter(inputs), {node: i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        what = next(given) if node.op == "placeholder" else _what(node)
        sources = [key for source in node.all_input_nodes for key in storages_of(source)]
        for value, key in zip(values(node), storages_of(node), strict=True):
            storage = found.setdefault(
                key, _Storage(value.untyped_storage().nbytes(), what, i, i, _is_fusible(node), sources)
            )
            storage.last = max([storage.last, *(numbers[user] for user in node.users)])
            if node.op == "placeholder" or any(user.op == "output" for user in node.users):
                storage.last, storage.fusible = len(nodes), False
                storage.what = "results" if storage.what == "activations" else storage.what
        for place in _places(node):
            for key in storages_of(place):
                found[key].what = "gradients" if found[key].what == "activations" else found[key].what
    return found


def _places(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of the buffers that gradients are packed and reduced in."""
    if operator(node) != "fshard.reduce_scatter":
        return []
    given = arguments(node)
    return [given["place"], given["x"]]


def _what(node: fx.Node) -> str:
    return {"fshard.all_gather": "gathered", "fshard.room": "gradients"}.get(operator(node), "activations")


def storages_of(node: fx.Node) -> Iterator[int]:
    """Yield a number for each tensor that a node produces, equal for tensors that share a storage."""
    # Private API, for the reason given in Tape._register: the address of the storage itself.
    return (value.untyped_storage()._cdata for value in values(node))


def _next(barriers: Sequence[int], i: int, end: int) -> int:
    return next((b for b in barriers if b > i), end)


def _is_barrier(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    return operator(node).startswith("fshard.") or packet in flop_registry or "attention" in operator(node)


def _is_fusible(node: fx.Node) -> bool:
    return node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())
