"""Rows: flat buffers of leaves, their elements in each shard, and the ranks of each leaf.

Note [One rank's spans]
    The spans of all ranks are too many for a list: 664,000 for a model of 70B parameters on 8192 ranks. A step needs
    this rank's spans alone, so a row computes spans by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress, pairwise, product
from operator import not_
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh, Axes, coordinate, digits, number_of
from ..core.storage import MOST
from ..core.tracing import define, is_tracing, memo
from .rules import COPIES, Rule

L = TypeVar("L")
M = TypeVar("M")


class Span(NamedTuple):
    """Elements [begin, begin + numel) of a leaf, in the order of `Leaf.flat`, and their position in a rank's tensors.

    The elements lie in tensor number `tensor`, from element `start` on. In spans of a `Row`, `start` counts from the
    beginning of the shard.
    """

    leaf: Any  # a number, or a `Slot` of a plan, as in `Row.leaves`
    tensor: int
    start: int
    begin: int
    numel: int


class RowSplit(NamedTuple):
    """The parts' bounds and the split dim of each leaf split over one axis."""

    axis: str
    bounds: tuple[tuple[int, ...], ...]  # by leaf
    dims: tuple[int, ...]

    def of(self, leaves: Sequence[int]) -> RowSplit:
        return RowSplit(self.axis, tuple(self.bounds[i] for i in leaves), tuple(self.dims[i] for i in leaves))


@dataclass(frozen=True, eq=False)
class Row(Generic[L]):
    """A flat buffer (numel,) of the leaves of one unit and kind, and its rule.

    Leaf number i begins at `starts[i]`; the rest is padding. The buffer is cut into `shards` equal intervals; a rank's
    interval begins at `start` of its tensor `tensor`. If leaves are split, each rank along the axis of `split`
    has its own buffer; shards are then numbered part by part.
    """

    leaves: tuple[L, ...]  # in memory order
    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: int  # padding included
    unit: int = 0
    kind: int = 0
    rule: Rule = COPIES
    shards: int = 1
    tensor: int = 0
    start: int = 0
    block: int = 1  # elements in a block; if over 1 (scales of 8-bit moments), spans count blocks
    split: RowSplit | None = None  # of split leaves

    @memo
    def length(self) -> int:
        return self.numel if self.rule.at is not None else self.numel // self.shards

    @property
    def stop(self) -> int:
        return self.start + self.length

    @memo
    def over(self) -> Axes:
        """The axes along which ranks hold different elements."""
        return self.rule.over if self.split is None else (self.split.axis, *self.rule.over)

    def number(self, mesh: AnyMesh) -> int:
        return coordinate(mesh, self.over)

    @memo
    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def has_elements(self) -> bool:
        return any(self.numels if self.split is None else (bounds[-1] for bounds in self.split.bounds))

    @memo
    def _number(self) -> dict[L, int]:
        return {leaf: i for i, leaf in enumerate(self.leaves)}

    @memo
    def _cuts(self) -> list[tuple[int, bool]]:
        """(size, is_leaf) of leaves and gaps, in memory order, without empty gaps."""
        ends = [start + numel for start, numel in zip(self.starts, self.numels, strict=True)]
        edges = [0, *(edge for pair in zip(self.starts, ends, strict=True) for edge in pair), self.numel]
        sizes = [(end - start, number % 2 == 1) for number, (start, end) in enumerate(pairwise(edges))]
        return [(size, is_leaf) for size, is_leaf in sizes if is_leaf or size]

    @memo
    def _sizes(self) -> list[int]:
        return [size for size, _ in self._cuts]

    @memo
    def _is_leaf(self) -> list[bool]:
        return [is_leaf for _, is_leaf in self._cuts]

    @memo
    def _others(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(number, shape) for number, shape in enumerate(self.shapes) if len(shape) != 1]  # not vectors

    @memo
    def _turned(self) -> list[tuple[int, int]]:
        """(leaf, dim) of leaves stored with dim `dim` first."""
        return [(i, dim) for i, dim in enumerate(self.split.dims) if dim] if self.split is not None else []

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the leaves as views of the buffer (numel,). Dual: `put`."""
        # the backward of one split is one cat; that of each narrow fills a buffer of zeros
        leaves = self._shaped(flat.split_with_sizes(self._sizes))
        for number, dim in self._turned:
            leaves[number] = leaves[number].movedim(0, dim)
        return leaves

    def _shaped(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        leaves = [*compress(pieces, self._is_leaf)]
        for number, shape in self._others:
            leaves[number] = leaves[number].view(shape)
        return leaves

    def put(self, flat: Tensor, leaves: list[Tensor], add: bool = False, most: int = MOST) -> None:
        """Copy all leaves into the buffer and zero the gaps. With `add`, add leaves, and keep gaps."""
        for number, dim in self._turned:
            leaves = [*leaves[:number], leaves[number].movedim(dim, 0), *leaves[number + 1 :]]
        # one node: Inductor would fuse copies into one kernel, searching for each element's leaf
        if is_tracing():
            torch.ops.fshard.put(flat, leaves, self.starts, add)
            return
        gaps = len(self._sizes) > len(self.starts)
        if not (add or gaps) and flat.device.type == "cpu" and all(map(Tensor.is_contiguous, leaves)):
            # one cat takes half the time of leaf copies
            torch.cat([leaf if leaf.dim() == 1 else leaf.view(-1) for leaf in leaves], out=flat)
            return
        pieces = flat.split_with_sizes(self._sizes)
        into = self._shaped(pieces)  # views of `flat` in the leaves' shapes
        # foreach kernels copy pairs of unlike strides one by one, and may index with int32
        fits = [self.numel <= most and x.stride() == y.stride() for x, y in zip(into, leaves, strict=True)]
        if not all(fits):
            for to, leaf in compress(zip(into, leaves, strict=True), map(not_, fits)):
                to.add_(leaf) if add else to.copy_(leaf)
            into, leaves = [*compress(into, fits)], [*compress(leaves, fits)]
        # Private: one call, and on a GPU one kernel, instead of one for each leaf (tested in test_blocks.py)
        if into:
            (torch._foreach_add_ if add else torch._foreach_copy_)(into, leaves)
        if gaps and not add:
            torch._foreach_zero_([*compress(pieces, map(not_, self._is_leaf))])

    @memo
    def _interval(self) -> slice:
        return slice(self.start, self.stop)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[self.tensor][self._interval]

    def at(self, rule: Rule, sizes: Mapping[str, int], tensor: int, start: int) -> Row[L]:
        shards = math.prod(sizes[axis] for axis in rule.over)
        return replace(self, rule=rule, shards=shards, tensor=tensor, start=start)

    def renamed(self, names: Mapping[L, M]) -> Row[M]:
        kept = [i for i, leaf in enumerate(self.leaves) if leaf in names]
        leaves: Any = tuple(names[self.leaves[i]] for i in kept)  # leaves of another type
        starts, shapes = tuple(self.starts[i] for i in kept), tuple(self.shapes[i] for i in kept)
        split = self.split and self.split.of(kept)
        return replace(self, leaves=leaves, starts=starts, shapes=shapes, split=split)  # type: ignore[return-value]

    def _bounds(self, i: int, part: int) -> tuple[int, int]:
        return (0, self.numels[i]) if self.split is None else self.split.bounds[i][part : part + 2]  # type: ignore[return-value]

    def _holding(self, i: int, part: int = 0) -> range:
        """Return the numbers of shards, within a part, holding elements of leaf i."""
        if self.rule.at is not None:
            return range(self.rule.at, self.rule.at + 1)
        length, start, (low, high) = max(self.length, 1), self.starts[i], self._bounds(i, part)
        return range(start // length, -(-(start + high - low) // length)) if self.shards > 1 else range(1)

    def _span(self, i: int, shard: int, part: int = 0) -> Span:
        low, (first, last) = 0 if self.rule.at is not None else shard * self.length, self._bounds(i, part)
        start = self.starts[i]
        begin, end = max(start, low), min(start + last - first, low + self.length)
        in_leaf, block = first + begin - start, self.block
        return Span(self.leaves[i], self.tensor, (begin - low) // block, in_leaf // block, -(-(end - begin) // block))

    def spans(self, number: int) -> Iterator[Span]:
        part, shard = (0, number) if self.split is None else divmod(number, self.shards)
        return (self._span(i, shard, part) for i in range(len(self.leaves)) if shard in self._holding(i, part))

    def shards_of(
        self, leaf: L, sizes: Mapping[str, int], at: Mapping[str, int]
    ) -> Iterator[tuple[tuple[int, ...], Span]]:
        """For each shard at coordinates `at` holding elements of a leaf, yield (coordinates along `over`, span)."""
        i, over, parts = self._number[leaf], self.rule.over, range(1)
        if self.split is not None:
            part = at.get(self.split.axis)
            parts = range(sizes[self.split.axis]) if part is None else range(part, part + 1)
        of_axes, free = [sizes[axis] for axis in over], [sizes[axis] for axis in over if axis not in at]
        for part in parts:
            numbers = self._holding(i, part)
            if len(numbers) <= math.prod(free):  # fewer shards hold the leaf than have these coordinates
                shards = ((number, tuple(digits(number, of_axes))) for number in numbers)
                holders = (x for x in shards if all(at.get(axis, n) == n for axis, n in zip(over, x[1], strict=True)))
            else:
                choices = product(*([at[axis]] if axis in at else range(sizes[axis]) for axis in over))
                holders = (x for x in ((number_of(x, of_axes), x) for x in choices) if x[0] in numbers)
            for number, coordinates in holders:
                yield (*([part] * (self.split is not None)), *coordinates), self._span(i, number, part)

    def step(self, leaf: L, packed: bool) -> int:
        """Return the greatest common divisor of `begin` in a leaf's spans and, unless `packed`, of `start`."""
        i = self._number[leaf]
        parts = range(1 if self.split is None else len(self.split.bounds[i]) - 1)
        # three spans are enough: from the second on, `begin` grows by one shard's length
        spans = [self._span(i, number, part) for part in parts for number in self._holding(i, part)[:3]]
        return math.gcd(*(span.begin for span in spans), *(0 if packed else self.start + span.start for span in spans))

    def filled(self, number: int) -> list[tuple[int, int]]:
        return [(span.start, span.start + span.numel) for span in self.spans(number) if span.numel]

    def lengths(self, shard: int, shards: int) -> list[int]:
        """Return each leaf's length, with its padding, in one of `shards` intervals."""
        length = self.numel // shards
        begin, end = shard * length, (shard + 1) * length
        edges = [min(max(edge, begin), end) for edge in (0, *self.starts[1:], self.numel)]
        return [high - low for low, high in pairwise(edges)]

    def fill(self, flat: Callable[[L], Tensor], number: int, out: Tensor) -> Tensor:
        """Fill shard `out` from whole leaves: `flat(leaf)` gives elements, padding is zero."""
        parts, filled = [], 0  # elements of `out`, (n / W,), filled so far
        for leaf, _, start, begin, numel in (span for span in self.spans(number) if span.numel):
            parts += [out.new_zeros(start - filled)] * (start > filled)
            parts.append(flat(leaf)[begin : begin + numel].to(out.device))
            filled = start + numel
        # `cat` also casts to the dtype of `out`
        return torch.cat([*parts, out.new_zeros(out.numel() - filled)], out=out)


def end_to_end(spans: Iterable[Span]) -> list[Span]:
    ends, result = dict[int, int](), list[Span]()
    for span in spans:
        result.append(span._replace(start=ends.get(span.tensor, 0)))
        ends[span.tensor] = result[-1].start + span.numel
    return result


@cache  # graphs put the same leaves in each step
def _row_of(starts: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], numel: int) -> Row[int]:
    return Row(tuple(range(len(shapes))), starts, shapes, numel)


def put(place: Tensor, leaves: Sequence[Tensor], starts: Sequence[int], add: bool = False, most: int = MOST) -> None:
    _row_of(tuple(starts), tuple(leaf.shape for leaf in leaves), place.numel()).put(place, list(leaves), add, most)


define("joined(Tensor[] parts) -> Tensor", torch.cat, torch.cat)


def joined_row(parts: Sequence[Tensor]) -> Tensor:
    """Join parts (n,) in a graph as one node, for passes."""
    row: Tensor = torch.ops.fshard.joined(parts)
    return row


define(
    "put(Tensor(a!) place, Tensor[] parts, int[] starts, bool add) -> ()", put, lambda place, parts, starts, add: None
)
