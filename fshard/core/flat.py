"""Flat tensors: copy parts in at offsets, clear the gaps, and limit the elements one kernel takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from operator import not_

import torch
from torch import Tensor

from .tracing import define, is_tracing

CACHED = 1 << 15  # elements of a block that stays in a CPU's cache, with its moments
_LARGE_BLOCK = 1 << 24  # elements on an accelerator: enough for a kernel to fill it


def block_size(x: Tensor, cached: int) -> int:
    """The number of elements to process at a time: `cached` on a CPU, elsewhere enough to fill a device."""
    return cached if x.device.type == "cpu" else max(cached, _LARGE_BLOCK)


MOST = 1 << 30  # elements of one tensor in a foreach kernel or a reduction: some index with int32


class Places:
    """Where parts lie in a flat tensor of `numel` elements: part n, of shape `shapes[n]`, begins at `starts[n]`.

    >>> places, flat = Places(6, [0, 2], [(1,), (2, 2)]), torch.ones(6)
    >>> places.put(flat, [torch.full((1,), 2.0), torch.full((2, 2), 3.0)])
    >>> flat, [part.tolist() for part in places.views(flat)]
    (tensor([2., 0., 3., 3., 3., 3.]), [[2.0], [[3.0, 3.0], [3.0, 3.0]]])
    """

    def __init__(self, numel: int, starts: Sequence[int], shapes: Sequence[Sequence[int]]):
        self.numel, self.starts = numel, list(starts)
        ends = [start + math.prod(shape) for start, shape in zip(starts, shapes, strict=True)]
        edges = [0, *(edge for pair in zip(starts, ends, strict=True) for edge in pair), numel]
        sizes = [end - start for start, end in pairwise(edges)]  # of gap and part in turn, a gap first and last
        # all parts, and gaps of some elements
        there = [number for number, size in enumerate(sizes) if number % 2 or size]
        self._sizes = [sizes[number] for number in there]
        self._parts, self._gaps = ([i for i, n in enumerate(there) if n % 2 == is_part] for is_part in (1, 0))
        # a piece has the shape of a vector already
        self._shapes = [(number, shape) for number, shape in enumerate(shapes) if len(shape) != 1]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts as views of the flat tensor (numel,). Dual: `put`."""
        # split, not narrow: one operator, and its derivative is one cat; that of each narrow is a buffer of zeros
        return self._shaped(flat.split_with_sizes(self._sizes))

    def _shaped(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        parts = [pieces[number] for number in self._parts]
        for number, shape in self._shapes:
            parts[number] = parts[number].view(shape)
        return parts

    def put(self, flat: Tensor, parts: list[Tensor], add: bool = False, most: int = MOST) -> None:
        """Copy all parts into the flat tensor and zero the gaps; with `add`, accumulate and leave the gaps."""
        # one node: Inductor would fuse one copy for each part into one kernel that searches the part of each element
        if is_tracing():
            torch.ops.fshard.put(flat, parts, self.starts, add)
            return
        if not (add or self._gaps) and flat.device.type == "cpu" and all(map(Tensor.is_contiguous, parts)):
            # takes half as long as a view of `flat` for each part, and copies to those
            torch.cat([part if part.dim() == 1 else part.view(-1) for part in parts], out=flat)
            return
        pieces = flat.split_with_sizes(self._sizes)
        into = self._shaped(pieces)  # views of `flat`, each of its part's shape
        # for one pair of unlike strides torch would start a kernel for each pair of the list, and a foreach kernel may
        # index the elements of a tensor with int32
        fits = [self.numel <= most and x.stride() == y.stride() for x, y in zip(into, parts, strict=True)]
        if not all(fits):
            for to, part in compress(zip(into, parts, strict=True), map(not_, fits)):
                to.add_(part) if add else to.copy_(part)
            into, parts = [*compress(into, fits)], [*compress(parts, fits)]
        # Private: one call, and on a GPU one kernel, where a loop starts one for each leaf (test_blocks.py notices
        # when they go)
        if into:
            (torch._foreach_add_ if add else torch._foreach_copy_)(into, parts)
        if self._gaps and not add:
            torch._foreach_zero_([pieces[number] for number in self._gaps])


def put(place: Tensor, parts: Sequence[Tensor], starts: Sequence[int], add: bool = False, most: int = MOST) -> None:
    """`Places.put` of parts that begin at `starts`."""
    Places(place.numel(), starts, [part.shape for part in parts]).put(place, list(parts), add, most)


define(
    "put(Tensor(a!) place, Tensor[] parts, int[] starts, bool add) -> ()",
    put,
    lambda place, parts, starts, add: None,
)


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
