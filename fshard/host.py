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

    Words alone travel in the same links, which between hosts are TCP connections (Note [Lines] in `lines.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .agree import rows_of_bytes
from .bits import as_bytes, from_bytes
from .comm import Mesh, MismatchError, Ranks, along, axis_sizes
from .record import Record

_HEADER = struct.Struct("<BHIQQ")  # what it is, length of the call's text, segment, offset in it, bytes of data
_INLINE, _SEGMENT, _NEW_SEGMENT, _ACKNOWLEDGED = range(4)
_SMALL = 1 << 15  # bytes that travel in the socket
_LARGE = 1 << 20  # bytes from which a buffer of ours lies in a segment
_READ = 1 << 18
_TIMEOUT = 1800.0  # seconds, as torch's own process groups
_GREETING = 5.0  # seconds a connection has to say who it is


class _Segment:
    """Memory that several processes have mapped."""

    def __init__(self, fd: int, number: int):
        self.fd, self.number = fd, number
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)
        self.used = False  # by a tensor of this rank
        self.lent = False  # that tensor may be read by others until it is freed
        self.readers = 0  # messages in it that are not acknowledged
        weakref.finalize(self, os.close, fd)

    def release(self) -> None:
        self.used = False


class _Memory:
    """This rank's segments: one that no tensor lies in, and that all readers have acknowledged, is used again."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        self.links: list[Link] = []

    def take(self, size: int) -> _Segment:
        segment = self._free(size)
        if segment is None:
            for link in self.links:
                link.drain()
            segment = self._free(size) or self._new(size)
        return segment

    def _free(self, size: int) -> _Segment | None:
        fits = [s for s in self.segments if not (s.used or s.readers) and size <= s.data.numel() <= 2 * size]
        return min(fits, key=lambda s: s.data.numel(), default=None)

    def _new(self, size: int) -> _Segment:
        fd = os.memfd_create("fshard")
        os.ftruncate(fd, size)
        self.segments.append(_Segment(fd, len(self.segments)))
        return self.segments[-1]

    def empty(self, size: int, lent: bool) -> Tensor:
        """Bytes in a segment that is used until the tensor's memory is freed."""
        segment = self.take(size)
        segment.used, segment.lent = True, lent
        # torch lets go of the array when it frees the storage
        array = (ctypes.c_char * size).from_buffer(segment.map)
        weakref.finalize(array, segment.release).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8)

    def find(self, data: Tensor) -> tuple[_Segment, int] | None:
        """The lent segment, and the offset in it, that data lie at."""
        begin = data.data_ptr()
        for segment in (s for s in self.segments if s.used and s.lent):
            offset = begin - segment.data.data_ptr()
            if 0 <= offset < segment.data.numel():
                return segment, offset
        return None

    def place(self, data: Tensor) -> tuple[_Segment, int]:
        """The segment and offset the data lie at: their own, or one they are copied to."""
        if found := self.find(data):
            return found
        segment = self.take(data.numel())
        segment.data[: data.numel()].copy_(data)
        return segment, 0


@dataclass
class _Message:
    call: str
    data: Tensor
    segment: int | None


@dataclass
class Link:
    """The socket to one peer, and what has arrived on it."""

    socket: socket.socket
    peer: str
    memory: _Memory = field(default_factory=_Memory)
    num_expected: int = 0
    num_arrived: int = 0
    arrived: dict[int, _Message] = field(default_factory=dict)
    mapped: dict[int, _Segment] = field(default_factory=dict)
    shown: set[int] = field(default_factory=set)
    stream: bytearray = field(default_factory=bytearray)
    fds: deque[int] = field(default_factory=deque)

    def send(self, call: str, data: Tensor, place: tuple[_Segment, int] | None) -> None:
        """Send a call's data, or where they are."""
        text, size = call.encode(), data.numel()
        if place is None:
            payload = ctypes.string_at(data.data_ptr(), size) if size else b""
            self._write(_HEADER.pack(_INLINE, len(text), 0, 0, size) + text + payload, [], call)
            return
        segment, offset = place
        segment.readers += 1
        known = segment.number in self.shown
        kind, fds = (_SEGMENT, []) if known else (_NEW_SEGMENT, [segment.fd])
        self.shown.add(segment.number)
        self._write(_HEADER.pack(kind, len(text), segment.number, offset, size) + text, fds, call)

    def say(self, text: str) -> None:
        """Send words alone."""
        self.send(text, torch.empty(0, dtype=torch.uint8), None)

    def hear(self) -> str | None:
        """The next words that have arrived."""
        message = self.arrived.pop(self.num_expected, None)
        if message is None:
            return None
        self.num_expected += 1
        return message.call

    def acknowledge(self, segment: int) -> None:
        """Say that a message in a segment has been read."""
        with suppress(MismatchError):  # a peer that has gone, having sent all we asked of it, needs none
            self._write(_HEADER.pack(_ACKNOWLEDGED, 0, segment, 0, 0), [], "an acknowledgement")

    def _write(self, data: bytes, fds: list[int], call: str) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = socket.send_fds(self.socket, [view], fds) if fds else self.socket.send(view)
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT, call)
                self.drain()  # the peer may be waiting to write as well
            except (BrokenPipeError, ConnectionResetError):
                raise self._gone(call) from None
            else:
                view, fds = view[sent:], []

    def _wait(self, events: int, call: str) -> None:
        _poll([self], events, call)

    def _gone(self, call: str) -> MismatchError:
        return MismatchError(
            f"{self.peer} has gone (its process ended, or it let go of its plan) before it took part in {call}"
        )

    def take(self, number: int, call: str) -> _Message:
        """The message of that number, when it is there."""
        while number not in self.arrived:
            if not self.drain(call):
                self._wait(select.POLLIN, call)
        message = self.arrived.pop(number)
        if message.call != call:
            raise MismatchError(
                f"ranks called different collectives: this rank {call}, {self.peer} {message.call}. "
                "All ranks must call the same ones in the same order."
            )
        return message

    def drain(self, call: str = "") -> bool:
        """Read what is there; whether there was anything."""
        try:
            data, fds, _, _ = socket.recv_fds(self.socket, _READ, 16)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, fds = b"", []
        if not data:
            if call:
                raise self._gone(call)
            return False
        self.stream += data
        self.fds.extend(fds)
        while self._parse():
            pass
        return True

    def _parse(self) -> bool:
        if len(self.stream) < _HEADER.size:
            return False
        kind, length, number, offset, size = _HEADER.unpack_from(self.stream)
        begin = _HEADER.size + length
        end = begin + (size if kind == _INLINE else 0)
        if len(self.stream) < end:
            return False
        call, payload = self.stream[_HEADER.size : begin].decode(), self.stream[begin:end]
        del self.stream[:end]
        if kind == _ACKNOWLEDGED:
            self.memory.segments[number].readers -= 1
            return True
        if kind == _NEW_SEGMENT:
            self.mapped[number] = _Segment(self.fds.popleft(), number)
        if kind == _INLINE:
            data = torch.frombuffer(payload, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
            message = _Message(call, data, None)
        else:
            message = _Message(call, self.mapped[number].data[offset : offset + size], number)
        self.arrived[self.num_arrived] = message
        self.num_arrived += 1
        return True


def _poll(links: Collection[Link], events: int, call: str) -> list[Link]:
    poll, by = select.poll(), {link.socket.fileno(): link for link in links}
    for number in by:
        poll.register(number, events)
    if ready := poll.poll(_TIMEOUT * 1000):
        return [by[number] for number, _ in ready]
    peers = ", ".join(link.peer for link in links)
    raise MismatchError(f"{peers} did not answer within {_TIMEOUT:.0f} s in {call}: it is stuck or stopped")


def listen(links: Collection[Link], call: str) -> None:
    """Wait until something has arrived on one of them, and read it."""
    for link in _poll(links, select.POLLIN, call):
        link.drain(call)


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

    def __init__(self, ranks: Ranks, links: dict[int, Link]):
        self.axis, self.rank, self.size = ranks.axis, ranks.rank, ranks.size
        self.record = Record("", ranks.axis, "", 0)
        self._memory, self._links = _Memory(), links
        self._memory.links = list(links.values())
        for link in links.values():
            link.memory = self._memory
            weakref.finalize(self, link.socket.close)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        if numel * like.itemsize < _LARGE:
            return like.new_empty(numel)
        return from_bytes(self._memory.empty(numel * like.itemsize, lent), like.dtype)

    def idle(self, x: Tensor) -> bool:
        found = self._memory.find(x)
        if found and found[0].readers:
            for link in self._links.values():
                link.drain()
        return not (found and found[0].readers)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: str) -> _Exchange:
        places: dict[int, tuple[_Segment, int]] = {}
        numbers = {}
        for peer, link in self._links.items():
            x = sends[peer]
            data = as_bytes(x)
            if data.numel() > _SMALL and id(x) not in places:
                places[id(x)] = self._memory.place(data)
            link.send(call, data, places.get(id(x)))
            numbers[peer], link.num_expected = link.num_expected, link.num_expected + 1
        return _Exchange(self._links, numbers, list(recvs), sends[self.rank], call)


class HostMesh:
    """A DeviceMesh of CPU processes some of whose axes lie on one host: there, messages go through shared memory."""

    def __init__(self, mesh: Any, ranks: dict[str, Ranks]):
        self.device_mesh, self._ranks = mesh, ranks
        self.mesh_dim_names, self.device_type = mesh.mesh_dim_names, mesh.device_type

    def size(self, dim: int | None = None) -> int:
        """The number of ranks along a dimension of the mesh (None: in all)."""
        return self.device_mesh.size(dim)

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """This rank's number along an axis."""
        return self.device_mesh.get_local_rank(axis)

    def get_rank(self) -> int:
        """This process's number among all."""
        return self.device_mesh.get_rank()

    def ranks(self, axis: str) -> Ranks:
        """The ranks along one axis."""
        return self._ranks[axis]


def connect(mesh: Mesh) -> Mesh:
    """The mesh, with shared memory along those axes of a DeviceMesh of CPU processes that lie on one host.

    Every rank must call it. Meshes of GPUs, of one device, simulated ones and other systems than Linux are left alone.
    """
    if not hasattr(mesh, "get_group") or mesh.device_type != "cpu" or not hasattr(os, "memfd_create"):
        return mesh
    ranks = {axis: along(mesh, axis) for axis in axis_sizes(mesh)}
    return HostMesh(mesh, {axis: _connected(r) for axis, r in ranks.items()})


def _connected(ranks: Ranks) -> Ranks:
    links = links_to(ranks)
    return ranks if links is None else _HostRanks(ranks, links)


def links_to(ranks: Ranks, anywhere: bool = False) -> dict[int, Link] | None:
    """A link to every peer: a Unix socket on one host; between hosts None, or `anywhere` a TCP connection."""
    hosts = rows_of_bytes(_host().encode(), ranks)
    near = all(host == hosts[0] for host in hosts)
    if not near and not anywhere:
        return None
    token = secrets.token_hex(16)  # tells the ranks' connections from anybody's
    with _listener(token, near) as listener:
        rows = [row.decode().split() for row in rows_of_bytes(_address(listener, token, near).encode(), ranks)]
        sockets = {peer: _dial(*rows[peer], rank=ranks.rank) for peer in range(ranks.rank)}
        sockets.update(_answered(listener, token, ranks.size - 1 - ranks.rank))
    return {p: Link(s, f"rank {p} of axis {ranks.axis!r}") for p, s in sorted(sockets.items())}


def _host() -> str:
    # an abstract address is seen inside one network namespace of one running kernel
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() + str(os.stat("/proc/self/ns/net").st_ino) if boot.exists() else secrets.token_hex(16)


def _listener(token: str, near: bool) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX if near else socket.AF_INET)
    # an abstract address: no file to clean up
    listener.bind(b"\0fshard-" + token.encode() if near else ("", 0))
    listener.listen()
    listener.settimeout(_TIMEOUT)
    return listener


def _address(listener: socket.socket, token: str, near: bool) -> str:
    if near:
        return token
    return f"{token} {socket.gethostbyname(socket.gethostname())} {listener.getsockname()[1]}"


def _answered(listener: socket.socket, token: str, num: int) -> dict[int, socket.socket]:
    """So many connections from ranks that know the token, by rank."""
    found: dict[int, socket.socket] = {}
    while len(found) < num:
        peer, _ = listener.accept()
        peer.settimeout(_GREETING)
        with suppress(TimeoutError, ConnectionError):
            greeting = b""
            while len(greeting) < len(token) + 4 and (more := peer.recv(len(token) + 4 - len(greeting))):
                greeting += more
            if greeting[:-4] == token.encode():
                found[struct.unpack("<I", greeting[-4:])[0]] = _quick(peer)
                continue
        peer.close()
    return found


def _dial(token: str, host: str = "", port: str = "", *, rank: int) -> socket.socket:
    peer = socket.socket(socket.AF_INET if host else socket.AF_UNIX)
    try:
        peer.connect((host, int(port)) if host else b"\0fshard-" + token.encode())
    except OSError as failure:
        peer.close()
        raise ConnectionError(
            f"no connection to a rank at {host or 'this host'} {port}: {failure}. Between hosts, a rank's host name "
            "must resolve to an address that the others reach."
        ) from failure
    peer.sendall(token.encode() + struct.pack("<I", rank))
    return _quick(peer)


def _quick(peer: socket.socket) -> socket.socket:
    """A connection that neither blocks nor keeps small messages back."""
    peer.setblocking(False)
    if peer.family == socket.AF_INET:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
