"""Memory segments that processes of one host have mapped: memfds, sealed so that no process can change their size."""

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

# Who maps a segment that is cut afterwards dies of SIGBUS: what is mapped must be sealed against it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOO_FEW = (errno.EMFILE, errno.ENFILE)


class Segment:
    """Memory that several processes have mapped."""

    def __init__(self, fd: int, number: int):
        self.fd, self.number = fd, number
        self.map = mmap.mmap(fd, os.fstat(fd).st_size)  # has a descriptor of its own
        self.data = torch.frombuffer(self.map, dtype=torch.uint8)
        self.used = False  # by a tensor of this rank
        self.lent = False  # that tensor may be read by others until it is freed
        self.readers = 0  # messages in it that are not acknowledged

    def release(self) -> None:
        """Let its memory be used again."""
        self.used = False


class Memory:
    """This rank's segments: one that no tensor lies in, and that all readers have acknowledged, is used again."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def free(self, size: int) -> Segment | None:
        """The smallest segment that is free and fits, but not twice as large."""
        fits = [s for s in self.segments if not (s.used or s.readers) and size <= s.data.numel() <= 2 * size]
        return min(fits, key=lambda s: s.data.numel(), default=None)

    def new(self, size: int) -> Segment:
        """A new segment. OSError if the system has none to give."""
        try:
            segment = _made(size, len(self.segments))
        except OSError as failure:
            raise OSError(failure.errno, f"no shared memory of {size:,} bytes: {reason(failure)}") from failure
        self.segments.append(segment)
        return segment

    def find(self, data: Tensor) -> tuple[Segment, int] | None:
        """The lent segment, and the offset in it, that data lie at."""
        begin = data.data_ptr()
        for segment in (s for s in self.segments if s.used and s.lent):
            offset = begin - segment.data.data_ptr()
            if 0 <= offset < segment.data.numel():
                return segment, offset
        return None


def tensor_in(segment: Segment, size: int, lent: bool) -> Tensor:
    """Bytes in a segment that is used until the tensor's memory is freed."""
    segment.used, segment.lent = True, lent
    # torch lets go of the array when it frees the storage
    array = (ctypes.c_char * size).from_buffer(segment.map)
    weakref.finalize(array, segment.release).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _made(size: int, number: int) -> Segment:
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
    """A peer's segment, mapped; its descriptor is closed. ValueError for what is not sealed, or no memory."""
    try:
        seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        if seals & _SEALS != _SEALS or not size:
            raise ValueError(f"memory that may change its size under its readers (seals {seals}, {size} bytes)")
        return Segment(fd, number)
    except OSError as failure:  # of what is no memfd at all
        raise ValueError(f"a descriptor that cannot be mapped ({reason(failure)})") from failure
    finally:
        os.close(fd)


def refusal() -> str:
    """Why this process cannot make segments; empty if it can, or would with more descriptors."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        os.close(_sealed(mmap.PAGESIZE))
    except OSError as failure:
        return "" if failure.errno in _TOO_FEW else f"memfd_create: {failure}"
    return ""


def reason(failure: Exception) -> str:
    """What went wrong, and what to do about it."""
    text = str(failure)
    if isinstance(failure, OSError) and failure.errno in _TOO_FEW:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text += f". A process may have {most} open files: raise the limit (ulimit -n)"
    return text
