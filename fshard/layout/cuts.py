"""Cuts: which elements of each leaf a rank holds, and which ranks hold a leaf, without a list of all ranks.

Note [One rank's spans]
    A tree of n leaves on W ranks has a span for almost every leaf of every rank: 664,000 of a model of 70B parameters
    on 8192 ranks. A step needs those of this rank alone. So a cut is a rule: `of` gives the spans of one rank, and
    `holders` the ranks that hold elements of one leaf, which is what moving elements between layouts needs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

EVERYONE = -1  # in place of a rank: all ranks hold it


@dataclass(frozen=True)
class Span:
    """Elements [begin, begin + numel) of a leaf, at `start` in a row of one rank (or of all ranks, `EVERYONE`)."""

    leaf: int
    rank: int
    row: int
    start: int
    begin: int
    numel: int


class Holder(NamedTuple):
    """A rank (or `EVERYONE`) that holds elements [begin, begin + numel) of a leaf."""

    rank: int
    begin: int
    numel: int


class Cut:
    """How leaves are cut among ranks. A rank holds at most one interval of a leaf."""

    @abstractmethod
    def of(self, rank: int) -> Sequence[Span]:
        """Return the spans that are of this rank, or of `EVERYONE`, sorted by row and start."""

    @abstractmethod
    def holders(self, leaf: int, ranks: range) -> Iterator[Holder]:
        """Yield those of these ranks that hold elements of a leaf, in order; `EVERYONE` if all ranks hold it."""

    @abstractmethod
    def pick(self, leaves: Collection[int]) -> Cut:
        """Return the cut of some leaves only: flat rows are packed without padding."""

    def in_blocks(self, block: int) -> Cut:
        """Return the cut of leaves that have one element for each `block` elements of these."""
        return InBlocks(self, block)

    def row(self, leaf: int) -> int:
        """Return the flat row in which a leaf lies, the same on all ranks."""
        raise TypeError(f"{type(self).__name__}: the row of a whole leaf differs from rank to rank")

    def step(self, leaf: int, packed: bool = False) -> int:
        """Return the largest number that divides where spans begin in the leaf and, unless packed, start in the row."""
        raise TypeError(f"{type(self).__name__}: only leaves in flat rows are cut at multiples of a number")


class Interval(NamedTuple):
    """A leaf at `start` in a flat buffer. Each rank holds `length` elements of the buffer, at `base` in its row."""

    row: int
    base: int
    length: int
    start: int
    numel: int
    shared: bool  # every rank holds the whole buffer

    def parts(self) -> range:
        """The numbers of the intervals that the leaf reaches into."""
        length = max(self.length, 1)
        return range(self.start // length, -(-(self.start + self.numel) // length))

    def span(self, leaf: int, part: int) -> Span:
        """Return the part of the leaf that lies in one of its intervals."""
        low = max(self.start, part * self.length)
        high = min(self.start + self.numel, (part + 1) * self.length)
        rank, start = EVERYONE if self.shared else part, self.base + low - part * self.length
        return Span(leaf, rank, self.row, start, low - self.start, high - low)


@dataclass(frozen=True)
class Intervals(Cut):
    """Leaves in flat buffers: rank r holds the r-th of equal intervals of each."""

    intervals: dict[int, Interval]  # by leaf

    def of(self, rank: int) -> Sequence[Span]:
        """Return the spans of this rank, or of `EVERYONE`, sorted by row and start."""
        part = max(rank, 0)  # what all ranks hold is one interval
        spans = [
            interval.span(leaf, part)
            for leaf, interval in self.intervals.items()
            if interval.shared == (rank == EVERYONE) and part in interval.parts()
        ]
        return sorted(spans, key=lambda span: (span.row, span.start))

    def holders(self, leaf: int, ranks: range) -> Iterator[Holder]:
        """Yield those of these ranks that hold elements of a leaf."""
        interval = self.intervals[leaf]
        for part in interval.parts() if interval.shared else _common(interval.parts(), ranks):
            span = interval.span(leaf, part)
            yield Holder(span.rank, span.begin, span.numel)

    def pick(self, leaves: Collection[int]) -> Cut:
        """Return the cut of some leaves only, packed."""
        return _packed(self, leaves)

    def row(self, leaf: int) -> int:
        """Return the row of a leaf."""
        return self.intervals[leaf].row

    def step(self, leaf: int, packed: bool = False) -> int:
        """Return the largest number that divides where spans begin and, unless packed, start; 0 for one span at 0."""
        # parts after the third follow at the distance between the second and the third
        spans = [self.intervals[leaf].span(leaf, part) for part in self.intervals[leaf].parts()[:3]]
        return math.gcd(*(span.begin for span in spans), *(0 if packed else span.start for span in spans))


@dataclass(frozen=True)
class Packed(Cut):
    """Some leaves of a cut in flat rows: each rank's spans lie end to end, in rows that are numbered from 0."""

    cut: Cut
    rows: dict[int, int]  # of each leaf the row

    def of(self, rank: int) -> Sequence[Span]:
        """Return the spans of this rank, or of `EVERYONE`, end to end in each row."""
        filled, spans = dict.fromkeys(self.rows.values(), 0), list[Span]()
        for span in (s for s in self.cut.of(rank) if s.leaf in self.rows):
            row = self.rows[span.leaf]
            spans.append(replace(span, row=row, start=filled[row]))
            filled[row] += span.numel
        return spans

    def holders(self, leaf: int, ranks: range) -> Iterator[Holder]:
        """Yield those of these ranks that hold elements of a leaf."""
        return self.cut.holders(leaf, ranks)

    def pick(self, leaves: Collection[int]) -> Cut:
        """Return the cut of fewer leaves."""
        return _packed(self.cut, leaves)

    def row(self, leaf: int) -> int:
        """Return the row of a leaf."""
        return self.rows[leaf]

    def step(self, leaf: int, packed: bool = False) -> int:
        """Return the largest number that divides where each span begins in the leaf."""
        return self.cut.step(leaf, packed=True)


def _packed(cut: Cut, leaves: Collection[int]) -> Packed:
    rows = {leaf: cut.row(leaf) for leaf in leaves}
    numbers = {row: number for number, row in enumerate(sorted(set(rows.values())))}
    return Packed(cut, {leaf: numbers[row] for leaf, row in rows.items()})


@dataclass(frozen=True)
class InBlocks(Cut):
    """A cut of leaves in flat rows that have one element for each `block` elements of those of another cut."""

    cut: Cut
    block: int

    def of(self, rank: int) -> Sequence[Span]:
        """Return the spans of this rank, or of `EVERYONE`, in blocks."""
        return [
            replace(s, start=s.start // self.block, begin=s.begin // self.block, numel=-(-s.numel // self.block))
            for s in self.cut.of(rank)
        ]

    def holders(self, leaf: int, ranks: range) -> Iterator[Holder]:
        """Yield those of these ranks that hold elements of a leaf."""
        for rank, begin, numel in self.cut.holders(leaf, ranks):
            yield Holder(rank, begin // self.block, -(-numel // self.block))

    def pick(self, leaves: Collection[int]) -> Cut:
        """Return the cut of some leaves only, packed."""
        return _packed(self, leaves)

    def row(self, leaf: int) -> int:
        """Return the row of a leaf."""
        return self.cut.row(leaf)


@dataclass(frozen=True)
class Whole(Cut):
    """Whole leaves, each a row of its own on one rank, or on every rank; a rank's rows are numbered from 0."""

    owners: dict[int, Holder]  # of each leaf, in the order of the rows

    def of(self, rank: int) -> Sequence[Span]:
        """Return the spans of this rank, or of `EVERYONE`."""
        on_rank = [(leaf, numel) for leaf, (owner, _, numel) in self.owners.items() if owner == rank]
        return [Span(leaf, rank, row, 0, 0, numel) for row, (leaf, numel) in enumerate(on_rank)]

    def holders(self, leaf: int, ranks: range) -> Iterator[Holder]:
        """Yield the rank that holds a leaf, if it is one of these ranks."""
        if self.owners[leaf].rank == EVERYONE or self.owners[leaf].rank in ranks:
            yield self.owners[leaf]

    def pick(self, leaves: Collection[int]) -> Cut:
        """Return the cut of some leaves only."""
        return Whole({leaf: owner for leaf, owner in self.owners.items() if leaf in leaves})

    def in_blocks(self, block: int) -> Cut:
        """Return the cut of leaves that have one element for each `block` elements of these."""
        return self.resized({leaf: -(-owner.numel // block) for leaf, owner in self.owners.items()})

    def resized(self, numels: Mapping[int, int]) -> Whole:
        """Return the same owners of leaves that have other numbers of elements."""
        return Whole({leaf: owner._replace(numel=numels[leaf]) for leaf, owner in self.owners.items()})


def _common(parts: range, ranks: range) -> range:
    """The numbers that are in both ranges; the steps of `parts` are 1.

    >>> _common(range(3, 9), range(1, 100, 4))
    range(5, 9, 4)
    """
    first = max(parts.start, ranks.start)
    first += (ranks.start - first) % ranks.step
    return range(first, min(parts.stop, ranks.stop), ranks.step)
