"""Memory segments that processes of one host share: memfds, sealed so that no process can change their size.

Note [Pages of peers]
    A gather leaves the same bytes on every rank, so a rank need not copy what its peers send: it maps their pages where
    it would copy them. Part p of a gathered buffer has the same offset in the segments of all ranks, so its whole pages
    fit; the bytes of a page that belongs to two parts are copied. What costs time is not the call that maps pages but
    the faults of the pages that are touched first. So a segment in which a gather ends keeps its peers' pages, and only
    gathers of parts of the same size use it again. A rank that is behind takes the segment that has the pages that have
    arrived, and they are not mapped anew: both segments are free, because their last gather was the same one. At most
    `_MOST_ALIKE` segments are kept so for a size, and `_MOST_PAIRED` in all, because they keep memory from other uses.
    A gather that gets none copies what arrives; where all sizes have too many, one becomes memory for anything.

    A rank reads its peers' pages until its buffer is freed. The acknowledgement waits as long, and the peer uses the
    memory again only after it (Note [Lent memory] in `ranks.py`). A finalizer must not write to a socket, because it
    may run while a message is being written: it notes the acknowledgement as due, and the next collective sends it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from . import pages

# If a mapped segment were truncated, a process reading it would die of SIGBUS: the seals forbid truncation.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LARGE = 1 << 20  # bytes
_TOO_FEW = (errno.EMFILE, errno.ENFILE)
_MOST_ALIKE, _MOST_PAIRED = 3, 8  # segments that gathers of one size alone use: of a size, of all sizes


class Segment:
    """A memory segment, mapped into this process and any number of others."""

    def __init__(self, fd: int, number: int):
        self.fd, self.number = fd, number
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)  # duplicates the descriptor
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)  # (bytes,)
        self.used = False  # whether a tensor of this rank lies in it
        self.lent = False  # whether peers may read this tensor until it is freed
        self.readers = 0  # number of messages in it that are not acknowledged yet
        # Note [Pages of peers]
        self.part = 0  # bytes of each rank's part in the gathers that use it; 0 for any use
        self.theirs: dict[int, tuple[int, int]] = {}  # where peers' pages are: begin -> end, and their other address
        self.owed: list[tuple[deque[int], int]] = []  # what is due, and to which link, when the tensor is freed

    def leave(self) -> None:
        """Give the pages back that this process has read of a peer's segment, which keeps them.

        They would count as resident in both processes for good.
        """
        if self.data.numel() >= _LARGE:  # pages come back one system call and a few hundred faults later
            self.map.madvise(mmap.MADV_DONTNEED)

    def release(self) -> None:
        """Mark the segment as unused by tensors of this rank, so that its memory can be reused."""
        self.used = False
        for due, number in self.owed:
            due.append(number)
        self.owed.clear()

    def is_own(self, offset: int, size: int) -> bool:
        """Whether no peer's pages are mapped over these bytes."""
        return all(end <= offset or offset + size <= begin for begin, (end, _) in self.theirs.items())

    def has_pages(self, offset: int, data: Tensor) -> bool:
        """Whether the whole pages of these bytes of a peer's segment are mapped at `offset`."""
        begin, end, source = _place(offset, data)
        return self.theirs.get(begin) == (end, source)

    def take_pages(self, offset: int, data: Tensor) -> bool:
        """Put bytes of a peer's segment at `offset`, mapping their whole pages; False if that cannot be: copy them."""
        begin, end, source = _place(offset, data)
        address = self.data.data_ptr()
        if not self.part or source % pages.SIZE or begin >= end:
            return False
        if not self.has_pages(offset, data):
            try:
                pages.again(source, end - begin, address + begin)
            except OSError:
                pages.of_file(self.fd, begin, end - begin, address + begin)
                self.theirs.pop(begin, None)
                return False
            self.theirs[begin] = end, source
        for start, stop in ((0, begin - offset), (end - offset, data.numel())):
            if start < stop:
                self.data[offset + start : offset + stop].copy_(data[start:stop])
        return True

    def give_back_pages(self) -> None:
        """Map this rank's own pages where those of peers were: the segment is memory for anything."""
        for begin, (end, _) in self.theirs.items():
            pages.of_file(self.fd, begin, end - begin, self.data.data_ptr() + begin)
        self.theirs.clear()
        self.part = 0


def _place(offset: int, data: Tensor) -> tuple[int, int, int]:
    """Where the whole pages of bytes at `offset` begin and end in a segment, and the address of those of `data`."""
    begin, end = pages.whole(offset, offset + data.numel())
    return begin, end, data.data_ptr() + begin - offset


class Memory:
    """The segments of this rank. Segments with no tensor and no unacknowledged message are reused."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def free(self, size: int, part: int = 0, arrived: Sequence[tuple[int, Tensor]] = ()) -> Segment | None:
        """Return the smallest free segment of `size` to `2 * size` bytes, or None.

        For a gather of parts of `part` bytes it is one of those that have such parts (Note [Pages of peers]), the one
        with the pages that have `arrived`, if there is one: peers' parts, and their offsets.
        """
        idle = [s for s in self.segments if not (s.used or s.readers)]
        same = [s for s in idle if part and s.part == part]
        if same:
            return min(same, key=lambda s: sum(not s.has_pages(*place) for place in arrived))
        num_alike, num_paired = self._paired(part)
        if part and num_alike < _MOST_ALIKE and num_paired < _MOST_PAIRED:
            return None
        # not a much larger one: a small buffer would keep its memory from large ones
        fits = [s for s in idle if size <= s.data.numel() <= 2 * size and not (s.part and num_paired < _MOST_PAIRED)]
        smallest = min(fits, key=lambda s: (s.part > 0, s.data.numel()), default=None)
        if smallest is not None:
            smallest.give_back_pages()
        return smallest

    def _paired(self, part: int) -> tuple[int, int]:
        """The number of segments that gathers of parts of this size alone use, and that gathers of one size use."""
        parts = [segment.part for segment in self.segments if segment.part]
        return parts.count(part), len(parts)

    def new(self, size: int, part: int = 0) -> Segment:
        """Allocate a new segment, for gathers of such parts if they may have one. OSError if the system refuses it."""
        try:
            segment = _made(size, len(self.segments))
        except OSError as failure:
            raise OSError(failure.errno, f"no shared memory of {size:,} bytes: {reason(failure)}") from failure
        num_alike, num_paired = self._paired(part)
        segment.part = part if num_alike < _MOST_ALIKE and num_paired < _MOST_PAIRED else 0
        self.segments.append(segment)
        return segment

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        """Return the lent segment in which `data` lies, and its offset there; None if it lies in none."""
        begin = data.data_ptr()
        for segment in (s for s in self.segments if s.used and s.lent):
            offset = begin - segment.data.data_ptr()
            if 0 <= offset < segment.data.numel():
                return segment, offset
        return None


def tensor_in(segment: Segment, size: int, lent: bool) -> Tensor:
    """Return a (size,) byte tensor at the start of a segment; the segment is in use until the tensor is freed."""
    segment.used, segment.lent = True, lent
    # torch drops its reference to the array when it frees the storage
    array = (ctypes.c_char * size).from_buffer(segment.map)
    weakref.finalize(array, segment.release).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _made(size: int, number: int) -> Segment:
    """Allocate a segment, whose file descriptor is closed when the segment is freed."""
    fd = _sealed(size)
    try:
        segment = Segment(fd, number)
    except OSError:
        os.close(fd)
        raise
    weakref.finalize(segment, os.close, fd)
    return segment


def _sealed(size: int) -> int:
    """Return the file descriptor of new memory whose size cannot change."""
    fd = os.memfd_create("fshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def received(fd: int, number: int) -> Segment:
    """Map a peer's segment and close `fd`. ValueError if `fd` is not a sealed memfd or cannot be mapped."""
    try:
        seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or not size:
            raise ValueError(f"memory that may change its size under its readers (seals {seals}, {size} bytes)")
        return Segment(fd, number)
    except OSError as failure:  # the descriptor is not a memfd, or cannot be mapped
        raise ValueError(f"a descriptor that cannot be mapped ({reason(failure)})") from failure
    finally:
        os.close(fd)


def refusal() -> str:
    """Return why this process cannot allocate segments; empty if it can, or lacks only file descriptors."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        os.close(_sealed(mmap.PAGESIZE))
    except OSError as failure:
        return "" if failure.errno in _TOO_FEW else f"memfd_create: {failure}"
    return ""


def reason(failure: Exception) -> str:
    """Return the text of an error; where file descriptors have run out, with advice to raise the limit."""
    text = str(failure)
    if isinstance(failure, OSError) and failure.errno in _TOO_FEW:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text += f". A process may have {most} open files: raise the limit (ulimit -n)"
    return text
