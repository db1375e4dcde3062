"""Splits: a leaf of which the ranks along an axis have different parts, and the order of its elements.

Note [Order of a split leaf]
    A leaf that is split along dim d lies in the order of `movedim(d, 0)`, part by part. So what a rank has of it is one
    interval of that order, as of every other leaf: its shard, its moments, its piece of a checkpoint, an owner's whole
    leaf. A loss sees its part as a strided view. Of a leaf with several blocks end to end (gate and up in one matrix)
    each part has its rows of every block. Parts are as `torch.chunk` cuts them: all are as long as the first, the last
    ones may be shorter, or empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


class Split(NamedTuple):
    """A leaf that is split along `dim`, by blocks, over an axis of `parts` ranks (Note [Order of a split leaf])."""

    axis: str
    parts: int
    dim: int
    blocks: int = 1

    @property
    def order(self) -> tuple[int, ...]:
        """What tells the order of elements: () is row-major, else (dim,), or (dim, blocks, parts)."""
        return (self.dim, self.blocks, self.parts) if self.blocks > 1 else (self.dim,) * (self.dim > 0)

    @staticmethod
    def of(order: Sequence[int]) -> Split | None:
        """A split with this order of elements; None for row-major order. Dual: `order`."""
        dim, blocks, parts = (*order, 1, 1)[:3] if order else (0, 1, 1)
        return Split("", parts, dim, blocks) if order else None

    def __str__(self) -> str:
        return f"split over {self.axis} along dim {self.dim}" + f", {self.blocks} blocks" * (self.blocks > 1)

    def _edges(self, shape: Sequence[int]) -> list[int]:
        """Where the parts begin among the rows of one block, and its number of rows."""
        rows = shape[self.dim] // self.blocks
        most = -(-rows // self.parts)
        return [min(part * most, rows) for part in range(self.parts + 1)]

    def shape(self, whole: Sequence[int], part: int) -> tuple[int, ...]:
        """The shape of a part as a loss sees it."""
        low, high = self._edges(whole)[part : part + 2]
        return (*whole[: self.dim], self.blocks * (high - low), *whole[self.dim + 1 :])

    def stored(self, whole: Sequence[int], part: int) -> tuple[int, ...]:
        """The shape of a part as it lies in memory: the dim that is split comes first."""
        shape = self.shape(whole, part)
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def bounds(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Where the parts begin in the order of elements, and the number of all elements."""
        rest = math.prod(shape[: self.dim]) * math.prod(shape[self.dim + 1 :])
        return tuple(self.blocks * edge * rest for edge in self._edges(shape))

    def flat(self, x: Tensor) -> Tensor:
        """The elements of a whole leaf in their order: (numel,). Dual: `shaped`."""
        rows = x.movedim(self.dim, 0)
        if self.blocks == 1:
            return rows.reshape(-1)
        edges = self._edges(x.shape)
        parts = rows.unflatten(0, (self.blocks, -1)).split([high - low for low, high in pairwise(edges)], 1)
        return torch.cat([part.reshape(-1) for part in parts])

    def shaped(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """The whole leaf of this shape from its elements in their order, (numel,). Dual: `flat`."""
        rest = (*shape[: self.dim], *shape[self.dim + 1 :])
        if self.blocks == 1:
            rows = flat.view(shape[self.dim], *rest)
        else:
            edges = self._edges(shape)
            pairs = zip(
                flat.split([high - low for low, high in pairwise(self.bounds(shape))]), pairwise(edges), strict=True
            )
            parts = [part.view(self.blocks, high - low, *rest) for part, (low, high) in pairs]
            rows = torch.cat(parts, 1).flatten(0, 1)
        return rows.movedim(0, self.dim).contiguous()

    def places(self, shape: Sequence[int], begin: int, numel: int) -> Tensor:
        """Where elements [begin, begin + numel) lie in row-major order: (numel,), int64. Dual: `numbers`."""
        inner, rest = self._sizes(shape)
        number = torch.arange(begin, begin + numel, device="cpu")
        row, other = number // rest, number % rest
        if self.blocks > 1:  # rows of the order are those of each block of the first part, then of the second
            edges = torch.tensor(self._edges(shape), device="cpu")
            part = torch.bucketize(row, self.blocks * edges[1:], right=True)
            in_part, length = row - self.blocks * edges[part], edges.diff()[part]
            row = in_part // length * edges[-1] + edges[part] + in_part % length
        return (other // inner * shape[self.dim] + row) * inner + other % inner

    def numbers(self, shape: Sequence[int], places: Tensor) -> Tensor:
        """The numbers in the order of elements at these places in row-major order: int64. Dual: `places`."""
        inner, rest = self._sizes(shape)
        row, other = places // inner % shape[self.dim], places // (inner * shape[self.dim]) * inner + places % inner
        if self.blocks > 1:
            edges = torch.tensor(self._edges(shape), device="cpu")
            block, in_block = row // edges[-1], row % edges[-1]
            part = torch.bucketize(in_block, edges[1:], right=True)
            row = self.blocks * edges[part] + block * edges.diff()[part] + in_block - edges[part]
        return row * rest + other

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """The elements of a row behind the dim that is split, and of all of a row."""
        inner = math.prod(shape[self.dim + 1 :])
        return inner, inner * math.prod(shape[: self.dim])


# The numbers of elements, rising, and the place of each in a tensor; None: element n is at place n.
Picks: TypeAlias = tuple[Tensor, Tensor] | None


def numbers_in(other: Sequence[int], shape: Sequence[int], order: Sequence[int], begin: int, numel: int) -> Tensor:
    """The numbers, in another order, of elements [begin, begin + numel) of a leaf in an order: int64."""
    old, new = Split.of(order), Split.of(other)
    places = torch.arange(begin, begin + numel, device="cpu") if old is None else old.places(shape, begin, numel)
    return places if new is None else new.numbers(shape, places)


def picks_in(
    other: Sequence[int], shape: Sequence[int], order: Sequence[int], begin: int, numel: int
) -> tuple[Tensor, Tensor]:
    """`numbers_in`, rising, and the place of each among these elements."""
    numbers, places = numbers_in(other, shape, order, begin, numel).sort()
    return numbers, places


def within(picks: Picks, start: int, stop: int) -> tuple[Any, Any] | None:
    """Which of elements [start, stop) are picked, counted from `start`, and their places; None if there are none."""
    if picks is None:
        return slice(0, stop - start), slice(start, stop)
    low, high = torch.searchsorted(picks[0], torch.tensor([start, stop], device="cpu")).tolist()
    return (picks[0][low:high] - start, picks[1][low:high]) if low < high else None
