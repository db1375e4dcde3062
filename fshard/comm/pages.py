"""Pages of memory that are mapped again: at another address, or from their file, over what was mapped there."""

from __future__ import annotations

import ctypes
import mmap
import os

SIZE = mmap.PAGESIZE
_FIXED = 0x10  # of Linux's MAP_ constants, and MREMAP_MAYMOVE | MREMAP_FIXED: Python's mmap module has none of them
_MOVED = 0x1 | 0x2
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)


def whole(begin: int, end: int) -> tuple[int, int]:
    """Return the part of [begin, end) that consists of whole pages; if there is none, its end is not after its begin.

    >>> whole(1, 3 * SIZE + 1) == (SIZE, 3 * SIZE)
    True
    """
    return -(-begin // SIZE) * SIZE, end // SIZE * SIZE


def again(source: int, size: int, to: int) -> None:
    """Map the pages at address `source`, of shared memory, at address `to` as well. OSError if the system refuses it.

    What was mapped at `to` may then be gone.
    """
    mremap = _LIBC.mremap
    mremap.restype, void, long = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    # of an old size of 0, mremap leaves the old mapping as it is
    _check(mremap(void(source), long(0), long(size), ctypes.c_int(_MOVED), void(to)), "mremap")


def of_file(fd: int, offset: int, size: int, to: int) -> None:
    """Map pages of a file at address `to`. OSError if the system refuses it."""
    call = _LIBC.mmap
    call.restype, void, long = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    access, how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED
    _check(call(void(to), long(size), access, how, ctypes.c_int(fd), ctypes.c_long(offset)), "mmap")


def _check(address: int | None, call: str) -> None:
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
