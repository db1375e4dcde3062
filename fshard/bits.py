"""Tensors as bytes, and bytes as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .nodes import is_tracing


def views(data: Tensor, held: Sequence[tuple[torch.dtype, int]], step: int = 1) -> Iterator[Tensor]:
    """The flat tensors that bytes hold, told by dtype and number of elements, each from a multiple of `step` on."""
    for dtype, numel in held:
        size = dtype.itemsize * numel
        yield from_bytes(data[:size], dtype)
        data = data[size + -size % step :]


def bitcast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor's bits as another dtype."""
    # Inductor gets fused casts of bits wrong on CPUs (torch 2.13, test_compile.py)
    return torch.ops.fshard.bitcast(x, dtype) if is_tracing() and x.dtype != dtype else x.view(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor's bytes, end to end."""
    flat = x.detach().reshape(-1)
    if flat.numel() == 1 and flat.stride() != (1,):  # of one element a compiler may make any stride
        flat = flat.as_strided((1,), (1,))
    return bitcast(torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat, torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The flat tensor that bytes are of."""
    if dtype.is_complex:
        return torch.view_as_complex(bitcast(data, dtype.to_real()).view(-1, 2))
    return bitcast(data, dtype)
