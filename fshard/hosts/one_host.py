"""Ranks as processes of one host: messages through shared memory, without extra threads or a network.

Note [Messages on one host]
    Each pair of ranks has a Unix socket for small messages. For a large message the socket carries only a header, and
    the data lie in a memory segment mapped by both ranks (a memfd, without a name, freed with its last process). The
    receiver reads the segment when it waits for the message, then acknowledges; the sender may reuse the segment.
    Sending never waits, so ranks may start any number of messages and wait for them in any order. Every header has the
    text of its call: if two ranks call different collectives, the error names both calls, and no rank hangs.

    Large flat buffers are allocated in segments (`empty`), so steps reuse memory. A lent buffer is sent without a
    copy (Note [Lent memory] in `ranks.py`).

    Gloo's threads take processor time from the ranks: on two cores 16 KiB take 0.3 ms by gloo, 0.05 ms by these
    sockets.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.announce import Announced
from ..comm.consensus import rows_of_bytes
from ..comm.mesh import MESHES, AnyMesh, Mesh, ProcessMesh, unconnected
from ..comm.primitives import along
from ..comm.process_groups import Connections, GroupRanks
from ..comm.ranks import Call, MismatchError, Ranks, differing_sizes, message_timeout
from ..core.storage import as_bytes, from_bytes
from .links import PLANS, SMALL, Link, Segment, SegmentPool, leave, refusal, tensor_in
from .rendezvous import links_to

_SEGMENT_BYTES = 1 << 20  # buffers of this size or larger lie in a segment


@dataclass
class _Exchange:
    links: dict[int, Link]
    numbers: dict[int, int]  # by peer, of the expected message
    recvs: list[Tensor | None]
    like: Tensor  # this rank's own result; results without `recvs` have its dtype and shape
    call: str
    unread: list[tuple[Link, int]] = field(default_factory=list)  # segments to acknowledge in `done`

    def wait(self) -> list[Tensor]:
        parts = [self.like if recv is None else recv for recv in self.recvs]  # missing `recvs` are replaced below
        for peer, link in self.links.items():
            message = link.take(self.numbers[peer], self.call)
            recv = self.recvs[peer]
            if recv is None:
                parts[peer] = from_bytes(message.data, self.like.dtype).view(self.like.shape)
                if message.segment is not None:
                    self.unread.append((link, message.segment))
                continue
            if recv.nbytes != message.data.numel():
                raise link.fault(differing_sizes(self.call, link.peer, message.data.numel(), recv.nbytes))
            if recv.numel():
                recv.copy_(from_bytes(message.data, recv.dtype).view(recv.shape))
            if message.segment is not None:
                link.acknowledge(message.segment)
        return parts

    def done(self) -> None:
        for link, segment in self.unread:
            link.acknowledge(segment)
        self.unread.clear()


class _HostRanks:
    built_in = None
    whole = None
    device = torch.device("cpu")

    def __init__(self, ranks: Ranks, links: dict[int, Link]):
        self.axis, self.rank, self.size = ranks.axis, ranks.rank, ranks.size
        # no cycle: the pool does not refer to links
        self._memory, self.links, self.timeout = SegmentPool(), links, message_timeout(ranks)
        for link in links.values():
            link.memory = self._memory
            weakref.finalize(self, link.socket.close)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        if numel * like.itemsize < _SEGMENT_BYTES:
            return like.new_empty(numel)
        size = numel * like.itemsize
        return from_bytes(tensor_in(self._room(size), size, lent), like.dtype)

    def _room(self, size: int) -> Segment:
        segment = self._memory.free(size)
        if segment is None:
            for link in self.links.values():
                link.drain()  # acknowledgements may free a segment
            segment = self._memory.free(size) or self._memory.new(size)
        return segment

    def _place(self, data: Tensor) -> tuple[Segment, int]:
        """Return the segment and offset of lent data, else of a copy."""
        if lent := self._memory.find(data):
            return lent
        segment = self._room(data.numel())
        segment.data[: data.numel()].copy_(data)
        return segment, 0

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> _Exchange:
        text = str(call)
        places: dict[int, tuple[Segment, int]] = {}  # by id: a tensor sent to every peer is copied once
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
    """A `ProcessMesh` with shared memory along axes of one host."""

    def __init__(self, mesh: ProcessMesh, ranks: dict[str, Ranks]):
        # `_kept` begins empty: old results of `once` may refer to old ranks
        self.__dict__.update(vars(mesh))
        self._ranks, self._kept, self.twin = ranks, {}, None
        # sockets: links would form a cycle
        self.connections.leave = partial(leave, [link.socket for link in self._links])
        apart = [axis for axis, each in ranks.items() if not isinstance(each, _HostRanks)]
        for link in self._links:
            link.give_up = partial(_give_up, self.connections, self.connections.leave, apart)
        MESHES.connected.add(self)

    @property
    def _links(self) -> list[Link]:
        hosts = [ranks for ranks in self._ranks.values() if isinstance(ranks, _HostRanks)]
        return [link for ranks in hosts for link in ranks.links.values()]

    def _end(self, why: str) -> None:
        for link in self._links:
            link.close(why)
        super()._end(why)

    def all_plan(self) -> bool:
        """Wait until all peers make a plan; return True if links are open and no message is unread.

        MismatchError if a peer is in a collective instead.
        """
        links = self._links
        for link in links:
            with suppress(MismatchError):  # a closed link is found below
                link.say(PLANS)
        are_quiet, failures = list[bool](), list[MismatchError]()
        for link in links:  # also after an error: else an answer would stay unread
            try:
                are_quiet.append(link.plans())
            except MismatchError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]
        return all(are_quiet)


def _give_up(connections: Connections, leave: Callable[[str], None], axes: Sequence[str], text: str) -> None:
    """Close a mesh's links, and hang up along axes without links; a new plan still connects ranks of one host again."""
    leave(text)
    connections.hang_up(text, axes)


def _has_hosts(mesh: Mesh | None) -> TypeGuard[ProcessMesh]:
    return type(mesh) is ProcessMesh and mesh.device_type == "cpu" and hasattr(os, "memfd_create")


def connected(mesh: AnyMesh) -> Mesh | None:
    """Return `connect(mesh)`, made once for a mesh and shared by all plans on it.

    Every rank must call; if a peer is in a collective instead, both ranks get a MismatchError. If a failed collective
    left messages unread, all ranks connect again.
    """
    grid = unconnected(mesh)
    if not _has_hosts(grid):
        return grid
    for axis in grid.mesh_dim_names:
        ranks = along(grid, axis)  # RuntimeError if called in a second thread
        if isinstance(ranks, Announced):
            ranks.announce(PLANS)
    is_missing = not (isinstance(grid.twin, HostMesh) and grid.twin.all_plan())
    missing = torch.tensor(is_missing, dtype=torch.uint8, device=grid.device)
    if primitives.total(missing, grid, op="max", label="connections").item():
        grid.twin = None  # first: if `connect` fails on any rank, no rank keeps its old twin
        grid.twin = connect(grid)
    return grid.twin


def connect(mesh: AnyMesh) -> Any:  # a Mesh, or None
    """Connect CPU processes of a Linux host by shared memory, along axes of gloo, MPI or UCC. All ranks must call."""
    grid = unconnected(mesh)
    if not _has_hosts(grid):
        return grid
    return HostMesh(grid, {axis: _connected_ranks(grid, axis) for axis in grid.mesh_dim_names})


def _connected_ranks(mesh: ProcessMesh, axis: str) -> Ranks:
    ranks = mesh.ranks(axis)
    if isinstance(ranks, GroupRanks) and not ranks.may_be_replaced:
        return ranks
    return _connected(along(mesh, axis))


def _connected(ranks: Ranks) -> Ranks:
    """Connect ranks by shared memory. On several hosts, or if any rank lacks it, return `ranks` itself."""
    refusals = [row.decode() for row in rows_of_bytes(refusal().encode(), ranks)]
    if told := [f"rank {p} of axis {ranks.axis!r}: {text}" for p, text in enumerate(refusals) if text]:
        if ranks.rank == 0:
            warnings.warn(f"no shared memory, so that all messages go through sockets: {told[0]}", stacklevel=1)
        return ranks
    links = links_to(ranks)
    return ranks if links is None else _HostRanks(ranks, links)
