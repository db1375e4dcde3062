"""CRC-32 of a leaf, computed from the checksums of its blocks: the same wherever pieces and blocks begin."""

from __future__ import annotations

from functools import lru_cache

from .index import Entry
from .safetensors_file import CHUNK

_POLYNOMIAL = 0xEDB88320  # of zlib's CRC-32, whose bit 31 is the coefficient of 1, and bit 0 that of x ** 31


def of_leaf(entry: Entry) -> int | None:
    """Return the CRC-32 of all bytes of a leaf, as zlib.crc32 gives it; None if the index has no checksums.

    The CRC-32 of A + B is that of A times x ** (8 * len(B)), plus that of B, as polynomials over the two-element field.
    """
    value = 0
    for piece in entry.pieces:
        if not piece.checksums:
            return None
        rest = piece.numel * entry.dtype.itemsize  # bytes
        for checksum in piece.checksums:
            value = _product(_power(8 * min(rest, CHUNK)), value) ^ checksum
            rest -= CHUNK
    return value


def _product(a: int, b: int) -> int:
    """The product of two polynomials modulo the polynomial."""
    result = 0
    for bit in range(31, -1, -1):  # the coefficients of a, that of 1 first
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1  # times x
    return result


@lru_cache(maxsize=64)  # most blocks are as long as others
def _power(exponent: int) -> int:
    """x ** exponent modulo the polynomial."""
    result, square = 1 << 31, 1 << 30  # 1 and x
    while exponent:
        if exponent & 1:
            result = _product(result, square)
        square = _product(square, square)
        exponent >>= 1
    return result
