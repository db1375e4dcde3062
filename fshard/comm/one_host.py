"""Ranks that are processes of one host: messages through shared memory, with no thread and no network between them.

Note [Messages on one host]
    Two ranks share a Unix socket. A small message travels in it; of a large one only a header does, and the data lie in
    a memory segment that both have mapped (a memfd, which needs no name and dies with its processes). The receiver
    reads the segment when it waits for the message, and acknowledges it; the sender then uses it again. Sending never
    waits for the receiver, so ranks may start as many messages as they like, and wait for them in any order. Every
    header carries the call it belongs to: a rank that calls something else is an error that names both, not a hang.
    Large flat buffers are made in segments to begin with (`empty`): their memory is used again instead of being asked
    of the system in every step, and sending one that is lent, which its owner must not write to again, copies nothing.

    On two cores this takes the place of gloo's sockets and of the threads that serve them, which take time from the
    ranks' own: a 16 KiB message costs about 0.05 ms instead of 0.3.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..core.bits import as_bytes, from_bytes
from . import primitives
from .consensus import rows_of_bytes
from .links import SMALL, Link
from .log import Call
from .mesh import AnyMesh, Mesh, ProcessMesh, adapted
from .primitives import along
from .ranks import Ranks
from .rendezvous import links_to
from .shared_memory import Memory, Segment, refusal, tensor_in

_LARGE = 1 << 20  # bytes from which a buffer of ours lies in a segment


@dataclass
class _Exchange:
    """Messages under way from each peer."""

    links: dict[int, Link]
    numbers: dict[int, int]
    recvs: list[Tensor | None]
    like: Tensor
    call: str
    held: list[tuple[Link, int]] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        parts = [self.like if recv is None else recv for recv in self.recvs]
        for peer, link in self.links.items():
            message = link.take(self.numbers[peer], self.call)
            recv = self.recvs[peer]
            if recv is None:
                parts[peer] = from_bytes(message.data, self.like.dtype).view(self.like.shape)
                if message.segment is not None:
                    self.held.append((link, message.segment))
                continue
            if recv.numel():
                recv.copy_(from_bytes(message.data, recv.dtype).view(recv.shape))
            if message.segment is not None:
                link.acknowledge(message.segment)
        return parts

    def done(self) -> None:
        for link, segment in self.held:
            link.acknowledge(segment)
        self.held.clear()


class _HostRanks:
    built_in = None
    whole = None
    device = torch.device("cpu")

    def __init__(self, ranks: Any, links: dict[int, Link]):
        self.axis, self.rank, self.size = ranks.axis, ranks.rank, ranks.size
        # links know the memory, and not the other way round: all of it goes with the last reference to the ranks
        self._memory, self.links, self.timeout = Memory(), links, ranks.timeout
        for link in links.values():
            link.memory = self._memory
            weakref.finalize(self, link.socket.close)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        if numel * like.itemsize < _LARGE:
            return like.new_empty(numel)
        size = numel * like.itemsize
        return from_bytes(tensor_in(self._room(size), size, lent), like.dtype)

    def _room(self, size: int) -> Segment:
        segment = self._memory.free(size)
        if segment is None:
            for link in self.links.values():
                link.drain()
            segment = self._memory.free(size) or self._memory.new(size)
        return segment

    def _place(self, data: Tensor) -> tuple[Segment, int]:
        """The segment and offset the data lie at: their own, or one they are copied to."""
        if found := self._memory.find(data):
            return found
        segment = self._room(data.numel())
        segment.data[: data.numel()].copy_(data)
        return segment, 0

    def idle(self, x: Tensor) -> bool:
        found = self._memory.find(x)
        if found and found[0].readers:
            for link in self.links.values():
                link.drain()
        return not (found and found[0].readers)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> _Exchange:
        text = str(call)
        places: dict[int, tuple[Segment, int]] = {}
        numbers = {}
        for peer, link in self.links.items():
            x = sends[peer]
            data = as_bytes(x)
            if data.numel() > SMALL and id(x) not in places:
                places[id(x)] = self._place(data)
            link.send(text, data, places.get(id(x)))
            numbers[peer], link.num_expected = link.num_expected, link.num_expected + 1
        return _Exchange(self.links, numbers, list(recvs), sends[self.rank], text)


class HostMesh(ProcessMesh):
    """A `ProcessMesh` some of whose axes lie on one host: along those, messages go through shared memory."""

    def __init__(self, mesh: ProcessMesh, ranks: dict[str, Ranks]):
        self.__dict__.update(vars(mesh))
        self._ranks, self._kept = ranks, {}

    def is_quiet(self) -> bool:
        """Whether all messages that this rank expects have come, no more, and all peers are there."""
        hosts = [ranks for ranks in self._ranks.values() if isinstance(ranks, _HostRanks)]
        return all(link.is_quiet() for ranks in hosts for link in ranks.links.values())


class _Connection:
    """Where a `ProcessMesh` keeps its connected twin."""

    def __init__(self, mesh: ProcessMesh):
        self.twin: HostMesh | None = None


def _has_hosts(mesh: Mesh | None) -> TypeGuard[ProcessMesh]:
    """Whether processes of a mesh may share memory: those of CPUs, on Linux."""
    return type(mesh) is ProcessMesh and mesh.device_type == "cpu" and hasattr(os, "memfd_create")


def connected(mesh: AnyMesh) -> Mesh | None:
    """`connect(mesh)`, made once for a mesh and shared by all plans on it.

    Every rank must call it. It is made again, on all ranks, if on any of them messages were left over by a call that
    failed: the ranks ask each other over their process groups.
    """
    grid = adapted(mesh)
    if not _has_hosts(grid):
        return grid
    kept = grid.once(_Connection)
    is_missing = kept.twin is None or not kept.twin.is_quiet()
    if primitives.total(
        torch.tensor(is_missing, dtype=torch.uint8, device=grid.device), grid, op="max", label="connections"
    ).item():
        kept.twin = None  # before others are made: should that fail on any rank, all of them have none
        kept.twin = connect(grid)
    return kept.twin


def connect(mesh: AnyMesh) -> Any:
    """The mesh, with shared memory along those axes of a DeviceMesh of CPU processes that lie on one host.

    Every rank must call it. Meshes of GPUs, of one device, simulated ones and other systems than Linux are left alone.
    """
    grid = adapted(mesh)
    if not _has_hosts(grid):
        return grid
    return HostMesh(grid, {axis: _connected(along(grid, axis)) for axis in grid.mesh_dim_names})


def _connected(ranks: Ranks) -> Ranks:
    refusals = [row.decode() for row in rows_of_bytes(refusal().encode(), ranks)]
    if told := [f"rank {p} of axis {ranks.axis!r}: {text}" for p, text in enumerate(refusals) if text]:
        if ranks.rank == 0:
            warnings.warn(f"no shared memory, so that all messages go through sockets: {told[0]}", stacklevel=1)
        return ranks
    links = links_to(ranks)
    return ranks if links is None else _HostRanks(ranks, links)
