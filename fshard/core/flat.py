"""Flat tensors: clear what lies between leaves, and limit the elements one kernel takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CACHED = 1 << 15  # elements of a block that stays in a CPU's cache, with its moments
_LARGE_BLOCK = 1 << 24  # elements on an accelerator: enough for a kernel to fill it


def block_size(x: Tensor, cached: int) -> int:
    """The number of elements to process at a time: `cached` on a CPU, elsewhere enough to fill a device."""
    return cached if x.device.type == "cpu" else max(cached, _LARGE_BLOCK)


MOST = 1 << 30  # elements of one tensor in a foreach kernel or a reduction: some index with int32


def _gaps(length: int, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The non-empty intervals of [0, length) outside `spans`, which are in order."""
    end = 0
    for start, stop in (*spans, (length, length)):
        if start > end:
            yield end, start
        end = stop


def clear_outside_(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Set a flat tensor to zero, in place, outside these intervals, which are in order."""
    for start, stop in _gaps(len(row), spans):
        row[start:stop].zero_()
    return row


def cleared_outside(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """A copy of a flat tensor with zeros outside these intervals, which are in order; `row` if nothing is outside.

    >>> cleared_outside(torch.tensor([1.0, torch.nan, 3.0]), [(0, 1), (2, 3)])
    tensor([1., 0., 3.])
    """
    gaps = list(_gaps(len(row), spans))
    if not gaps:
        return row
    # one tensor of zeros for all gaps, as long as the longest; what a gap held may be NaN, so it is not multiplied by 0
    zeros = row.new_zeros(max(stop - start for start, stop in gaps))
    begins = [0, *(stop for _, stop in gaps)]  # of what is kept: one before each gap, one after the last
    parts = [
        x for begin, (start, stop) in zip(begins, gaps, strict=False) for x in (row[begin:start], zeros[: stop - start])
    ]
    return torch.cat([*parts, row[begins[-1] :]])
