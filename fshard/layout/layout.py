"""Which elements of which leaf lie where, on every rank.

Note [Layouts]
    A rank holds a tree as a few tensors, its *rows*: flat ones with intervals of many leaves, or whole leaves. A
    `Layout` says of every leaf which of its elements lie where, on every rank, as plain integers. What an optimizer
    must know of leaves (a norm for each, those with one label, whole matrices) is worked out from it alone, so it
    needs to know neither how its parameters are cut nor how many ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..comm.mesh import AnyMesh, Axes, coordinate
from ..core import tree

EVERYONE = -1


class memo:  # it is used as property is
    """functools.cached_property, without the lock it takes before Python 3.12, which torch.compile cannot trace."""

    def __init__(self, fn: Callable[[Any], Any]):
        self.fn, self.__doc__ = fn, fn.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        found = self.fn(instance)
        object.__setattr__(instance, self.fn.__name__, found)
        return found


@dataclass(eq=False)
class Derived:
    """What was worked out from a plan or a layout: results of pure functions of it, so that none is ever stale.

    No layout or route refers to a plan, or to this: plans and layouts are in no reference cycle. Graphs are, as what
    they give back names its plan: those wait for Python's collector.
    """

    layouts: dict[Any, Any] = field(default_factory=dict)  # of a plan, by view
    routes: dict[Any, Any] = field(default_factory=dict)  # of a layout, by what the layout they lead to follows from
    graphs: WeakKeyDictionary[Any, dict[Any, Any]] = field(
        default_factory=WeakKeyDictionary
    )  # by the `jit` they are of


@dataclass(frozen=True)
class Leaf:
    """A leaf of the whole tree."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Span:
    """Elements [begin, begin + numel) of a leaf: on a rank (or on all, `EVERYONE`), from `start` on in one row."""

    leaf: int
    rank: int
    row: int
    start: int
    begin: int
    numel: int


@tree.constant
@dataclass(frozen=True, eq=False)
class Layout:
    """Where the elements of a tree's leaves lie. Two are equal if what they were made from (`source`) is."""

    source: Any
    spec: tree.Spec
    places: tuple[int | None, ...]  # the number of the leaf at each place of the tree, None for one left out
    leaves: tuple[Leaf, ...]
    spans: tuple[Span, ...]  # in the order of rank, row and start
    flat: bool  # rows are 1-D with spans of many leaves; else each is one whole leaf
    mesh: AnyMesh
    axes: Axes  # that ranks are counted along, the first the slowest
    origin: Layout | None = None  # what this was picked from

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.source == other.source)

    def __hash__(self) -> int:
        return hash(self.source)

    def __deepcopy__(self, memo: Any) -> Layout:
        return self  # immutable; a copied state keeps its mesh

    def __getstate__(self) -> dict[str, Any]:
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "mesh": None}

    def live_mesh(self) -> AnyMesh:
        """The mesh, or an error for a layout that came out of a pickle."""
        if self.mesh is None and self.axes:
            raise ValueError(
                "this layout has no mesh (it was unpickled): make a state with init, and shard_state into it"
            )
        return self.mesh

    @memo
    def rank(self) -> int:
        """The number of this rank along `axes`."""
        return coordinate(self.live_mesh(), self.axes)

    @memo
    def mine(self) -> tuple[Span, ...]:
        """What this rank holds."""
        return tuple(s for s in self.spans if s.rank in (self.rank, EVERYONE))

    @memo
    def shared(self) -> frozenset[int]:
        """The leaves that every rank holds."""
        return frozenset(s.leaf for s in self.spans if s.rank == EVERYONE)

    @memo
    def is_cut(self) -> bool:
        """Whether any rank holds what others do not."""
        return any(s.rank != EVERYONE for s in self.spans)

    @memo
    def shared_rows(self) -> frozenset[int]:
        """The rows that every rank holds; all others are cut."""
        return frozenset(s.row for s in self.spans if s.rank == EVERYONE)

    @memo
    def filled(self) -> dict[int, list[tuple[int, int]]]:
        """Where this rank's flat rows hold leaves, by row: intervals from one element up to another, none touching."""
        found: dict[int, list[tuple[int, int]]] = {}
        for span in (s for s in self.mine if s.numel):
            runs = found.setdefault(span.row, [])
            runs.append((runs.pop()[0] if runs and runs[-1][1] == span.start else span.start, span.start + span.numel))
        return found

    @memo
    def numbers(self) -> tuple[int, ...]:
        """The leaves that are in it."""
        return tuple(dict.fromkeys(n for n in self.places if n is not None))

    def prepared(self) -> Layout:
        """A picked one, with all that is worked out once: what an update worked out would have it compiled again."""
        for name in (name for name, kept in vars(Layout).items() if isinstance(kept, memo)):
            getattr(self, name)
        return self

    def pick(self, numbers: Iterable[int]) -> Layout:
        """Of some leaves alone. Flat rows are packed, without padding, and those without a leaf dropped."""
        keep = set(numbers)
        chosen = [s for s in self.spans if s.leaf in keep]
        return replace(
            self,
            source=(self.source, tuple(sorted(keep))),
            spans=tuple(_packed(chosen) if self.flat else _renumbered(chosen)),
            places=tuple(n if n in keep else None for n in self.places),
            origin=self,
        )

    @memo
    def derived(self) -> Derived:
        """What was worked out from it: a memo, which goes with the layout."""
        return Derived()

    @memo
    def origin_rows(self) -> list[int]:
        """The rows of what it was picked from that it has leaves of: those its own, flat rows are packed from."""
        assert self.origin is not None
        keep = set(self.numbers)
        return sorted({s.row for s in self.origin.spans if s.leaf in keep})

    @memo
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """For each row, where its elements lie on this rank in what it was picked from: row, start, length."""
        assert self.origin is not None
        keep = set(self.numbers)
        mine = [s for s in self.origin.mine if s.leaf in keep]
        if not self.flat:
            return [[(s.row, 0, s.numel)] for s in mine]
        found: dict[int, list[tuple[int, int, int]]] = {row: [] for row in self.origin_rows}
        for span in mine:
            runs = found[span.row]
            if runs and sum(runs[-1][1:]) == span.start:
                span = replace(span, start=runs[-1][1], numel=runs.pop()[2] + span.numel)
            runs.append((span.row, span.start, span.numel))
        return [*found.values()]


def _packed(spans: Sequence[Span]) -> Iterator[Span]:
    rows = {row: number for number, row in enumerate(sorted({s.row for s in spans}))}
    for _, group in groupby(spans, lambda s: (s.rank, s.row)):
        start = 0
        for span in group:
            yield replace(span, row=rows[span.row], start=start)
            start += span.numel


def _renumbered(spans: Sequence[Span]) -> Iterator[Span]:
    for _, group in groupby(spans, lambda s: s.rank):
        yield from (replace(span, row=row) for row, span in enumerate(group))
