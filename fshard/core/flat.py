"""Flat tensors: parts copied in at offsets, gaps zeroed, and how many elements one kernel takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .tracing import define, is_tracing

CACHED = 1 << 15  # elements that stay in a CPU's cache, with their moments
_LARGE_BLOCK = 1 << 24  # elements on an accelerator: enough for a kernel to fill it


def block_size(x: Tensor, cached: int) -> int:
    """Elements of a tensor to work on at a time: `cached` of them on a CPU, elsewhere as many as fill a device."""
    return cached if x.device.type == "cpu" else max(cached, _LARGE_BLOCK)


MOST = 1 << 30  # elements of one tensor for kernels over lists, and for reductions: some count in int32


def put(place: Tensor, parts: Sequence[Tensor], starts: Sequence[int], add: bool = False, most: int = MOST) -> None:
    """Write tensors to a flat one, from these elements on, and zeros between them; or add them, and nothing between."""
    if is_tracing():  # one node: as many copies a compiler would fuse to one that asks of each element whose it is
        torch.ops.fshard.put(place, parts, starts, add)
        return
    ends = [start + part.numel() for part, start in zip(parts, starts, strict=True)]
    into = [place[start:end].view(part.shape) for part, start, end in zip(parts, starts, ends, strict=True)]
    if len(place) > most:  # a kernel over lists may count the elements of one in int32
        for to, part in zip(into, parts, strict=True):
            to.add_(part) if add else to.copy_(part)
    # Private: one call, and on a GPU one kernel, where a loop starts one for each leaf (test_blocks.py notices
    # when they go)
    elif parts:
        (torch._foreach_add_ if add else torch._foreach_copy_)(into, list(parts))
    if add:
        return
    if gaps := [place[end:start] for end, start in zip([0, *ends], [*starts, len(place)], strict=True) if end < start]:
        torch._foreach_zero_(gaps)


define(
    "put(Tensor(a!) place, Tensor[] parts, int[] starts, bool add) -> ()",
    put,
    lambda place, parts, starts, add: None,
)


def clear_outside_(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Make a flat tensor zero, in place, but for these intervals, which are in order."""
    end = 0
    for start, stop in (*spans, (len(row), 0)):
        if start > end:
            row[end:start].zero_()
        end = stop
    return row
