"""The checksum of a block of bytes: as fast as memory is read, so that every block is compared.

With numpy, the checksum of `block` (bytes) is:

    end = len(block) // 65528 * 65528
    sums = np.frombuffer(block[:end], "<i8").reshape(-1, 8191).sum(0)
    zlib.crc32(block[end:], zlib.crc32(sums.tobytes()) if end else 0)
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .places import Reader

_COLUMNS = 8191  # a prime: sectors and pages that are exchanged come into other columns


def checksum(data: Tensor, columns: int = _COLUMNS) -> int:
    """Return the CRC-32 of sums of 64-bit words, which are counted off in columns, and of the bytes left over.

    Of `data`, a flat uint8 tensor on any device, the sums alone go to the host. Words that change their places by a
    multiple of `columns` leave the checksum as it is.

    >>> checksum(torch.tensor([49, 50, 51], dtype=torch.uint8)) == zlib.crc32(b"123")
    True
    """
    if data.storage_offset() % 8:  # words must be aligned
        data = data.clone()
    end = len(data) // (8 * columns) * 8 * columns
    sums = data[:end].view(torch.int64).view(-1, columns).sum(0)  # (columns,), modulo 2^64
    return zlib.crc32(_bytes(data[end:]), zlib.crc32(_bytes(sums.view(torch.uint8))) if end else 0)


def read_block(file: Reader, offset: int, view: memoryview, expected: int | None) -> bool:
    """Fill `view` with the bytes of a file from `offset` on; False if it ends before, or their checksum is another one.

    Without an expected checksum nothing is compared.
    """
    if file.read_into(offset, view) != len(view):
        return False
    return expected is None or checksum(torch.frombuffer(view, dtype=torch.uint8)) == expected


def _bytes(x: Tensor) -> bytearray:
    memory = bytearray(len(x))
    if memory:  # torch.frombuffer refuses an empty one
        torch.frombuffer(memory, dtype=torch.uint8).copy_(x)
    return memory
