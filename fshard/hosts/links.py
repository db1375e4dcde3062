"""Direct links between the ranks of one host: sockets and shared memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm.ranks import SAME_ORDER, MismatchError

# If a mapped segment were truncated, a process reading it would die of SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOO_FEW = (errno.EMFILE, errno.ENFILE)
_ENDED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)  # EBADF: this rank has closed its end


class Segment:
    """Memory mapped into this process and any number of others."""

    def __init__(self, fd: int, number: int):
        self.fd, self.number = fd, number
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)  # duplicates the descriptor
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)
        self.used = False  # by a tensor of this rank
        self.lent = False  # peers may read it until the tensor is freed
        self.readers = 0  # unacknowledged messages

    def release(self) -> None:
        self.used = False


class SegmentPool:
    """This rank's segments, reused if free: without a tensor and unacknowledged messages."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def free(self, size: int) -> Segment | None:
        # much larger segments stay free for large buffers
        fits = [s for s in self.segments if not (s.used or s.readers) and size <= s.data.numel() <= 2 * size]
        return min(fits, key=lambda s: s.data.numel(), default=None)

    def new(self, size: int) -> Segment:
        try:
            segment = _made_segment(size, len(self.segments))
        except OSError as failure:
            raise OSError(failure.errno, f"no shared memory of {size:,} bytes: {reason(failure)}") from failure
        self.segments.append(segment)
        return segment

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        begin = data.data_ptr()
        for segment in (s for s in self.segments if s.used and s.lent):
            offset = begin - segment.data.data_ptr()
            if 0 <= offset < segment.data.numel():
                return segment, offset
        return None


def tensor_in(segment: Segment, size: int, lent: bool) -> Tensor:
    """Return bytes (size,) in a segment, in use until these bytes are freed."""
    segment.used, segment.lent = True, lent
    # torch drops the array when it frees the storage
    array = (ctypes.c_char * size).from_buffer(segment.map)
    weakref.finalize(array, segment.release).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _made_segment(size: int, number: int) -> Segment:
    fd = _sealed(size)
    try:
        segment = Segment(fd, number)
    except OSError:
        os.close(fd)
        raise
    weakref.finalize(segment, os.close, fd)
    return segment


def _sealed(size: int) -> int:
    fd = os.memfd_create("fshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def received(fd: int, number: int) -> Segment:
    """Map a peer's segment and close `fd`. ValueError unless it is a sealed memfd; OSError without room."""
    try:
        seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or not size:
            raise ValueError(f"memory that may change its size under its readers (seals {seals}, {size} bytes)")
        return Segment(fd, number)
    except OSError as failure:
        if failure.errno in (errno.ENOMEM, *_TOO_FEW):
            raise
        raise ValueError(f"a descriptor that cannot be mapped ({reason(failure)})") from failure
    finally:
        os.close(fd)


def refusal() -> str:
    """Return why segments cannot be allocated; "" if they can, or if only descriptors ran out."""
    try:
        os.close(_sealed(mmap.PAGESIZE))
    except OSError as failure:
        return "" if failure.errno in _TOO_FEW else f"memfd_create: {failure}"
    return ""


def reason(failure: Exception) -> str:
    text = str(failure)
    if isinstance(failure, OSError) and failure.errno in _TOO_FEW:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text += f". A process may have {most} open files: raise the limit (ulimit -n)"
    return text


_HEADER = struct.Struct("<BHIQQ")  # kind, length of the call's text, segment, offset in the segment, bytes of data
_INLINE, _SEGMENT, _NEW_SEGMENT, _ACKNOWLEDGED = range(4)
SMALL = 1 << 15  # most bytes of data sent in the socket itself
_LONGEST_TEXT = (1 << 16) - 1  # bytes of a call's text
_READ = 1 << 18
_MOST_FDS = 16
PLANS = "make_plan"  # sent before making a plan
_REFUSES = "refuses: "  # answer of a rank that expected no plan
_ACKNOWLEDGEMENT = "an acknowledgement"
_LEAVING = "leaves: "  # before the error of a rank that closes its links
_FOREVER = (1 << 31) - 1  # milliseconds, the longest timeout of poll
_FD_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass
class _Message:
    call: str
    data: Tensor
    segment: int | None


@dataclass
class Link:
    """The socket to one peer. Without `memory`, messages have at most `SMALL` bytes."""

    socket: socket.socket
    peer: str
    timeout: float  # seconds
    memory: SegmentPool | None = None
    give_up: Callable[[str], None] = lambda text: None  # closes all the mesh's links, and tells their peers why
    num_expected: int = 0
    num_arrived: int = 0
    arrived: dict[int, _Message] = field(default_factory=dict)
    mapped: dict[int, Segment] = field(default_factory=dict)
    shown: set[int] = field(default_factory=set)
    is_open: bool = True  # until the end of the stream is read
    reason: str = "its process ended, or it let go of its plan"  # why the peer has closed the link
    closed: str = ""  # why this rank has
    stream: bytearray = field(default_factory=bytearray)
    fds: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_all, self.fds)

    def send(self, call: str, data: Tensor, place: tuple[Segment, int] | None) -> None:
        """Send data, or only `place`: their segment and offset."""
        text, size = _sent(call), data.numel()
        if place is None:
            payload = ctypes.string_at(data.data_ptr(), size) if size else b""
            self._write(_HEADER.pack(_INLINE, len(text), 0, 0, size) + text + payload, [], call)
            return
        segment, offset = place
        segment.readers += 1
        # a peer gets a segment's descriptor once
        is_shown = segment.number in self.shown
        kind, fds = (_SEGMENT, []) if is_shown else (_NEW_SEGMENT, [segment.fd])
        self.shown.add(segment.number)
        self._write(_HEADER.pack(kind, len(text), segment.number, offset, size) + text, fds, call)

    def say(self, text: str) -> None:
        self.send(text, torch.empty(0, dtype=torch.uint8, device="cpu"), None)

    def hear(self) -> str | None:
        message = self.arrived.pop(self.num_expected, None)
        if message is None:
            return None
        self.num_expected += 1
        return message.call

    def acknowledge(self, segment: int) -> None:
        with suppress(MismatchError):
            self._write(_HEADER.pack(_ACKNOWLEDGED, 0, segment, 0, 0), [], _ACKNOWLEDGEMENT)

    def _write(self, data: bytes, fds: list[int], call: str) -> None:
        """Write all of `data`; file descriptors go with the first byte."""
        view = memoryview(data)
        while view:
            try:
                sent = socket.send_fds(self.socket, [view], fds) if fds else self.socket.send(view)
            except BlockingIOError:
                _poll([self], select.POLLIN | select.POLLOUT, call)
                self.drain()  # the peer may be blocked until this rank reads
            except OSError as failure:
                if failure.errno not in _ENDED:
                    raise
                if call == _ACKNOWLEDGEMENT:
                    return  # a peer that has closed its end has sent all its data
                raise self._gone(call) from None
            else:
                view, fds = view[sent:], []

    def _gone(self, call: str) -> MismatchError:
        if self.closed:
            return MismatchError(f"{call}: {self.closed}")
        with suppress(MismatchError):
            while self.drain():  # the peer may have said why
                pass
        return self.fault(f"{self.peer} has gone ({self.reason}) before it took part in {call}")

    def fault(self, text: str) -> MismatchError:
        """Close the links of this rank's mesh, and tell their peers why; return the error to raise.

        A traceback may keep the plan alive, so links would not close by themselves.
        """
        self.give_up(text)
        return MismatchError(text)

    def close(self, why: str) -> None:
        """Close this rank's end, and free what peers have sent; `why` is what this rank has done."""
        leave([self.socket], f"it {why}")
        self.socket.close()
        self.closed, self.is_open, self.give_up = f"this rank {why}", False, lambda text: None
        for kept in (self.arrived, self.mapped, self.stream, [] if self.memory is None else self.memory.segments):
            kept.clear()
        _close_all(self.fds)

    def take(self, number: int, call: str) -> _Message:
        """Wait for message `number`. MismatchError if the message is of another call, or the peer is gone."""
        while number not in self.arrived:
            if planning := [n for n, x in self.arrived.items() if x.call == PLANS]:
                number = planning[0]  # the peer has left out this call, and perhaps others
            elif not self.drain(call):
                _poll([self], select.POLLIN, call)
        message = self.arrived.pop(number)
        if message.call == PLANS:
            self.say(_REFUSES + call)  # the peer waits for this rank's plan, and would wait for ever
        if message.call != call and message.call != _read(_sent(call)):
            raise self.fault(
                f"ranks called different collectives: this rank {call}, {self.peer} {message.call}. {SAME_ORDER}"
            )
        return message

    def plans(self) -> bool:
        """Wait for the peer's `PLANS`; return False if other messages came before, or the peer is gone.

        If the peer waits for a collective, close the link and raise MismatchError.
        """
        number, self.num_expected = self.num_expected, self.num_expected + 1
        try:
            while not (numbers := [n for n, x in self.arrived.items() if x.call.startswith((PLANS, _REFUSES))]):
                if not self.drain(PLANS):
                    _poll([self], select.POLLIN, PLANS)
        except MismatchError:
            if self.is_open:
                raise
            return False
        call = self.arrived.pop(numbers[0]).call
        if call != PLANS:
            with suppress(OSError):  # this rank's `PLANS` must not answer a later plan
                self.socket.shutdown(socket.SHUT_RDWR)
            raise MismatchError(
                f"ranks called different collectives: this rank {PLANS}, {self.peer} {call.removeprefix(_REFUSES)}. "
                f"{SAME_ORDER}"
            )
        return numbers[0] == number

    def is_ahead(self) -> bool:
        """True if the peer has sent a message not yet expected."""
        self.drain()
        return self.num_arrived > self.num_expected

    def drain(self, call: str = "") -> bool:
        """Read arrived bytes, without waiting; return True if there were any.

        MismatchError for bytes that no rank sends, and with a `call`, for a closed link.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self.socket, _READ, _MOST_FDS, _FD_FLAGS)
        except BlockingIOError:
            return False
        except OSError as failure:
            if failure.errno not in _ENDED:
                raise
            data, fds, flags = b"", [], 0
        self.fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise self._refused(f"descriptors that this process has no room for ({reason(OSError(errno.EMFILE, ''))})")
        if not data:
            self.is_open = False
            if call:
                raise self._gone(call)
            return False
        self.stream += data
        while self._parse():
            pass
        # a descriptor comes with the first byte of a header, maybe before the rest
        if len(self.fds) > (_MOST_FDS if self.stream and self.memory is not None else 0):
            raise self._refused(f"{len(self.fds)} descriptors of no segment")
        return True

    def _refused(self, what: str) -> MismatchError:
        """Close the link; return the error to raise."""
        self.stream.clear()
        _close_all(self.fds)
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        return MismatchError(f"{self.peer} sent {what}, which no rank does: the link to it is closed")

    def _parse(self) -> bool:
        if len(self.stream) < _HEADER.size:
            return False
        kind, length, number, offset, size = _HEADER.unpack_from(self.stream)
        if wrong := self._fault(kind, number, offset, size):
            raise self._refused(wrong)
        begin = _HEADER.size + length
        end = begin + (size if kind == _INLINE else 0)
        if len(self.stream) < end:
            return False
        call, payload = _read(self.stream[_HEADER.size : begin]), self.stream[begin:end]
        del self.stream[:end]
        if call.startswith(_LEAVING):
            self.reason = call.removeprefix(_LEAVING)
            return True
        if kind == _ACKNOWLEDGED:
            self.memory.segments[number].readers -= 1  # type: ignore[union-attr]  # `_fault` has checked
            return True
        if kind == _INLINE:
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            data = torch.frombuffer(payload, dtype=torch.uint8) if size else nothing
            message = _Message(call, data, None)
        else:
            message = _Message(call, self._part(number, offset, size), number)
        self.arrived[self.num_arrived] = message
        self.num_arrived += 1
        return True

    def _fault(self, kind: int, number: int, offset: int, size: int) -> str:
        """Describe a wrong header, or ""; before memory of its size is allocated."""
        if kind == _INLINE:
            return f"a message of {size:,} bytes (at most {SMALL:,})" if size > SMALL else ""
        if self.memory is None or kind > _ACKNOWLEDGED:
            return f"a message of kind {kind}"
        if kind == _ACKNOWLEDGED:
            segments = self.memory.segments
            has_readers = number < len(segments) and segments[number].readers > 0
            return "" if has_readers else f"an acknowledgement of segment {number}, of which nothing was sent"
        if (kind == _NEW_SEGMENT) == (number in self.mapped):
            return f"segment {number} " + ("twice" if number in self.mapped else "without having shown it")
        if kind == _NEW_SEGMENT and not self.fds:
            return f"segment {number} without its descriptor"
        return ""

    def _part(self, number: int, offset: int, size: int) -> Tensor:
        try:
            if number not in self.mapped:
                self.mapped[number] = received(self.fds.popleft(), number)
            data = self.mapped[number].data
            if offset + size > data.numel():
                raise ValueError(f"bytes {offset:,} to {offset + size:,} of segment {number}, of {data.numel():,}")
        except OSError as lack:
            self._refused("")  # else later messages would have wrong numbers
            raise OSError(lack.errno, f"this rank lacks room for memory of {self.peer}: {reason(lack)}") from lack
        except ValueError as wrong:
            raise self._refused(str(wrong)) from wrong
        return data[offset : offset + size]


def leave(sockets: Sequence[socket.socket], text: str) -> None:
    """Shut sockets of links down, and tell their peers why."""
    said = _sent(f"{_LEAVING}{text}")
    for peer in sockets:
        with suppress(OSError):
            peer.send(_HEADER.pack(_INLINE, len(said), 0, 0, 0) + said)
        with suppress(OSError):
            peer.shutdown(socket.SHUT_RDWR)


def _sent(call: str) -> bytes:
    return call.encode(errors="replace")[:_LONGEST_TEXT]


def _read(text: bytes | bytearray) -> str:
    return text.decode(errors="ignore")  # `_sent` may have cut a character


def _close_all(fds: deque[int]) -> None:
    while fds:
        os.close(fds.popleft())


def _poll(links: Collection[Link], events: int, call: str) -> list[Link]:
    poll, by = select.poll(), {link.socket.fileno(): link for link in links}
    for number in by:
        poll.register(number, events)
    seconds = min(link.timeout for link in links)
    if ready := poll.poll(min(seconds * 1000, _FOREVER)):
        return [by[number] for number, _ in ready]
    peers = ", ".join(link.peer for link in links)
    raise next(iter(links)).fault(f"{peers} did not answer within {seconds:.0f} s in {call}: it is stuck or stopped")


def listen(links: Collection[Link], call: str, beside: Collection[Link] = ()) -> None:
    """Wait until bytes arrive on one of `links` or `beside`, and read them.

    MismatchError after the shortest timeout, and if a peer or this rank has closed one of `links`.
    """
    if closed := [link for link in links if link.closed]:
        raise closed[0]._gone(call)
    still_open = [link for link in beside if link.is_open]
    for link in _poll([*links, *still_open], select.POLLIN, call):
        link.drain(call if link in links else "")
