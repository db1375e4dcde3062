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
from typing import NamedTuple

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

    def runs(self, shape: Sequence[int], begin: int, numel: int) -> list[tuple[int, int]]:
        """Where elements [begin, begin + numel) lie in row-major order: pairs of a first one and a number."""
        places = self.flat(torch.arange(math.prod(shape)).view(*shape))[begin : begin + numel]
        starts = [0, *((places.diff() != 1).nonzero().flatten() + 1).tolist(), numel]
        return [(int(places[low]), high - low) for low, high in pairwise(starts) if low < high]
