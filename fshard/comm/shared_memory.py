"""Memory segments that processes of one host share: memfds, sealed so that no process can change their size."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import weakref

import torch
from torch import Tensor

# If a mapped segment were truncated, a process reading it would die of SIGBUS: the seals forbid truncation.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOO_FEW = (errno.EMFILE, errno.ENFILE)


class Segment:
    """A memory segment, mapped into this process and any number of others."""

    def __init__(self, fd: int, number: int):
        self.fd, self.number = fd, number
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)  # duplicates the descriptor
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)  # (bytes,)
        self.used = False  # whether a tensor of this rank lies in it
        self.lent = False  # whether peers may read this tensor until it is freed
        self.readers = 0  # number of messages in it that are not acknowledged yet

    def release(self) -> None:
        """Mark the segment as unused by tensors of this rank, so that its memory can be reused."""
        self.used = False


class Memory:
    """The segments of this rank. Segments with no tensor and no unacknowledged message are reused."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def free(self, size: int) -> Segment | None:
        """Return the smallest free segment of `size` to `2 * size` bytes, or None."""
        # not a much larger one: a small buffer would keep its memory from large ones
        fits = [s for s in self.segments if not (s.used or s.readers) and size <= s.data.numel() <= 2 * size]
        return min(fits, key=lambda s: s.data.numel(), default=None)

    def new(self, size: int) -> Segment:
        """Allocate a new segment. OSError if the system refuses it."""
        try:
            segment = _made(size, len(self.segments))
        except OSError as failure:
            raise OSError(failure.errno, f"no shared memory of {size:,} bytes: {reason(failure)}") from failure
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
