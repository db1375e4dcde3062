"""Layouts: which elements of which leaf lie in which row of this rank, and which ranks hold the others.

Note [Layouts]
    A rank holds a tree as a few tensors, called *rows*: flat tensors with intervals of many leaves, or whole leaves. A
    `Layout` says in plain integers which elements of every leaf lie in which row of this rank, and which ranks hold
    the others (Note [One rank's spans] in `cuts.py`). An optimizer derives all that it needs to know about leaves from
    the layout (norms of leaves, leaves with one label, whole matrices), and so does not depend on how parameters are
    cut or on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..comm.mesh import AnyMesh, Axes, coordinate
from ..core import tree
from ..core.lazy import Container
from .cuts import EVERYONE, Cut, Span

S = TypeVar("S")
T = TypeVar("T")


class memo(Generic[S, T]):  # lower case, because it is a decorator like `property`
    """functools.cached_property, without the lock it takes before Python 3.12, which torch.compile cannot trace."""

    def __init__(self, fn: Callable[[S], T]):
        self.fn: Callable[[S], T] = fn
        self.__doc__ = fn.__doc__

    def __get__(self, instance: S, owner: type[S]) -> T:
        value = self.fn(instance)
        # hides this descriptor, so that it runs once; past the refusal of a frozen dataclass
        object.__setattr__(instance, self.fn.__name__, value)
        return value


@dataclass(eq=False)
class Derived:
    """Memoized results of pure functions of a plan or a layout, which therefore never become stale.

    Layouts, routes and schedules refer neither to a plan nor to a `Derived`, so they are in no reference cycle. Graphs
    are in one, because their outputs refer to the plan: Python's garbage collector frees them.
    """

    layouts: dict[Hashable, Layout] = field(default_factory=dict)  # of a plan, by view
    # The values of `routes`, `runs`, `schedules` and `graphs` are of modules that import this one.
    runs: dict[Hashable, Any] = field(default_factory=dict)  # of a label's layout, by what a view holds
    routes: dict[Hashable, Any] = field(default_factory=dict)  # of a layout, by the `source` of the target layout
    containers: dict[Hashable, Container] = field(default_factory=dict)  # of a plan, by first leaf and number of nodes
    units: dict[Hashable, tuple[int, int]] = field(
        default_factory=dict
    )  # of a plan, by first leaf and number of leaves
    schedules: dict[Hashable, Any] = field(default_factory=dict)  # of a plan, by what a view holds of it
    graphs: WeakKeyDictionary[object, dict[Any, Any]] = field(default_factory=WeakKeyDictionary)  # of a plan, by `jit`


@dataclass(frozen=True)
class Leaf:
    """A leaf of the whole tree: its path, and its shape and dtype before it is cut."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)


@tree.constant
@dataclass(frozen=True, eq=False)
class Layout:
    """Where the elements of a tree's leaves lie. Two layouts are equal if their `source` is equal."""

    source: tuple[Hashable, ...]  # everything that determines the layout
    spec: tree.Spec
    places: tuple[int | None, ...]  # index of the leaf at each position of the tree; None if it was left out
    leaves: tuple[Leaf, ...]
    cut: Cut  # how the leaves are cut among ranks
    flat: bool  # True: rows are 1-D with spans of many leaves; False: each row is one whole leaf
    mesh: AnyMesh
    axes: Axes  # the axes along which ranks are counted; the first varies slowest
    origin: Layout | None = None  # the layout that `pick` made this one from

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.source == other.source)

    def __hash__(self) -> int:
        return hash(self.source)

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self  # immutable; a copied state keeps its mesh

    def __getstate__(self) -> dict[str, object]:
        # without the memos, and without the mesh, which has processes of this run
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "mesh": None}

    def live_mesh(self) -> AnyMesh:
        """Return the mesh. ValueError for an unpickled layout, which has none."""
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
        """The spans that this rank holds: first those that every rank holds, each sorted by row and start."""
        return (*self.cut.of(EVERYONE), *self.cut.of(self.rank))

    @memo
    def span_of(self) -> dict[int, Span]:
        """The span of each leaf that this rank holds elements of."""
        return {span.leaf: span for span in self.mine}

    @memo
    def shared(self) -> frozenset[int]:
        """The leaves that every rank holds."""
        return frozenset(s.leaf for s in self.cut.of(EVERYONE))

    @memo
    def is_cut(self) -> bool:
        """Whether any rank holds elements that other ranks do not hold."""
        return any(n not in self.shared and self.leaves[n].numel for n in self.numbers)

    @memo
    def shared_rows(self) -> frozenset[int]:
        """The rows that every rank holds; all others are cut."""
        return frozenset(s.row for s in self.cut.of(EVERYONE))

    @memo
    def filled(self) -> dict[int, list[tuple[int, int]]]:
        """The intervals [start, stop) of this rank's flat rows that hold leaves, by row; adjacent ones are merged."""
        by_row: dict[int, list[tuple[int, int]]] = {}
        for span in (s for s in self.mine if s.numel):
            runs = by_row.setdefault(span.row, [])
            runs.append((runs.pop()[0] if runs and runs[-1][1] == span.start else span.start, span.start + span.numel))
        return by_row

    @memo
    def numbers(self) -> tuple[int, ...]:
        """The indices of the leaves in this layout, each once, in the order of the tree."""
        return tuple(dict.fromkeys(n for n in self.places if n is not None))

    def prepared(self) -> Layout:
        """Fill every memo now, so that torch.compile does not see new attributes and recompile; returns self.

        Only for layouts made by `pick`.
        """
        for name in (name for name, attribute in vars(Layout).items() if isinstance(attribute, memo)):
            getattr(self, name)
        return self

    def pick(self, numbers: Iterable[int]) -> Layout:
        """Return a layout of some leaves only. Flat rows are packed without padding; empty rows are dropped."""
        keep = set(numbers)
        return replace(
            self,
            source=(self.source, tuple(sorted(keep))),
            cut=self.cut.pick(keep),
            places=tuple(n if n in keep else None for n in self.places),
            origin=self,
        )

    @memo
    def derived(self) -> Derived:
        """Memoized results computed from this layout, which are freed with the layout."""
        return Derived()

    @memo
    def origin_rows(self) -> list[int]:
        """The rows of `origin` that hold leaves of this layout; this layout's flat rows are packed from them."""
        assert self.origin is not None
        return sorted({self.origin.cut.row(n) for n in self.numbers} if self.flat else ())

    @memo
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """For each row of this rank, the intervals (row, start, length) of `origin` in which its elements lie."""
        assert self.origin is not None
        keep = set(self.numbers)
        spans = [s for s in self.origin.mine if s.leaf in keep]
        if not self.flat:
            return [[(s.row, 0, s.numel)] for s in spans]
        by_row: dict[int, list[tuple[int, int, int]]] = {row: [] for row in self.origin_rows}
        for span in spans:
            runs = by_row[span.row]
            # a span that begins where the last interval ends makes it longer: fewer views, and fewer kernels
            if runs and sum(runs[-1][1:]) == span.start:
                span = replace(span, start=runs[-1][1], numel=runs.pop()[2] + span.numel)
            runs.append((span.row, span.start, span.numel))
        return [*by_row.values()]
