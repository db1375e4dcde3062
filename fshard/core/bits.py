"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .tracing import define, is_tracing

STEP = 16  # packed tensors begin at multiples of so many bytes, because kernels load 16 bytes at once
Held = Sequence[tuple[torch.dtype, int]]  # dtype and number of elements of each packed tensor


def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Pack tensors of any dtypes into one flat uint8 tensor, with zeros between them. Dual: `unpack`.

    >>> unpack(pack([torch.ones(1), torch.tensor([2, 3])]), [(torch.float32, 1), (torch.int64, 2)])
    [tensor([1.]), tensor([2, 3])]
    """
    parts = list[Tensor]()
    for data in map(as_bytes, tensors):
        gap = -data.numel() % STEP  # bytes to the next multiple of STEP
        parts += [data, data.new_zeros(gap)] if gap else [data]
    return torch.cat(parts, out=out)


def packed_size(held: Held) -> int:
    """The number of bytes of a packed tensor."""
    return sum(-(-dtype.itemsize * numel // STEP) * STEP for dtype, numel in held)


def unpack(data: Tensor, held: Held) -> list[Tensor]:
    """Return the packed tensors, flat, as views of `data`. Dual: `pack`."""
    tensors = list[Tensor]()
    for dtype, numel in held:
        tensors.append(from_bytes(data[: dtype.itemsize * numel], dtype))  # (numel,)
        data = data[packed_size([(dtype, numel)]) :]
    return tensors


def bitcast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bits of a tensor as another dtype."""
    # an operator of its own, because Inductor fuses casts of bits wrongly on CPUs (torch 2.13, test_compile.py)
    return torch.ops.fshard.bitcast(x, dtype) if is_tracing() and x.dtype != dtype else x.view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor."""
    flat = x.detach().reshape(-1)
    if flat.numel() == 1 and flat.stride() != (1,):  # a compiler may give one element any stride
        flat = flat.as_strided((1,), (1,))
    return bitcast(torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat, torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret a flat uint8 tensor as a flat tensor of `dtype`."""
    if dtype.is_complex:
        return torch.view_as_complex(bitcast(data, dtype.to_real()).view(-1, 2))
    return bitcast(data, dtype)


define(
    "bitcast(Tensor x, ScalarType dtype) -> Tensor",
    # a copy, so that the last stride is 1: a compiler may give one element any stride
    lambda x, dtype: x.new_empty(x.numel()).copy_(x).view(dtype),
    lambda x, dtype: x.new_empty(x.nbytes // dtype.itemsize, dtype=dtype),
)
