"""Trees seen leaf by leaf, wherever their elements lie: on this rank, or cut over the ranks of a mesh.

Note [Layouts]
    A rank holds a tree as a few tensors, its *rows*: flat ones with intervals of many leaves, or whole leaves. A
    `Layout` says of every leaf which of its elements lie where, on every rank, as plain integers. What an optimizer
    must know of leaves (a norm for each, those with one label, whole matrices) is worked out from it alone, so it
    needs to know neither how its parameters are cut nor how many ranks there are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from . import comm, tree
from .comm import Axes, Mesh

EVERYONE = -1


class memo:  # it is used as property is
    """functools.cached_property, without the lock it takes before Python 3.12, which torch.compile cannot trace."""

    def __init__(self, fn: Callable[[Any], Any]):
        self.fn, self.__doc__ = fn, fn.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        found = self.fn(instance)
        object.__setattr__(instance, self.fn.__name__, found)
        return found


@dataclass(frozen=True)
class Leaf:
    """A leaf of the whole tree."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
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
    mesh: Mesh
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

    @memo
    def rank(self) -> int:
        """This rank's number."""
        if self.mesh is None and self.axes:
            raise ValueError(
                "this layout has no mesh (it was unpickled): make a state with init, and shard_state into it"
            )
        return comm.coordinate(self.mesh, self.axes)

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
    def routes(self) -> dict[Layout, Any]:
        """The ways to other layouts that were worked out (`move.Route`): a memo, nothing else."""
        return {}

    @memo
    def graphs(self) -> WeakKeyDictionary[Any, dict[Any, Any]]:
        """Graphs for what is laid out so, by the `jit` that traced them: a memo, which goes with the mesh."""
        return WeakKeyDictionary()

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


class OnMesh(ABC):
    """A node of a tree that lies on a mesh."""

    @property
    @abstractmethod
    def home(self) -> Any:
        """The plan or layout it is laid out by, which has the mesh; None if there is none."""


class Parts(OnMesh):
    """A tree of which this rank holds some elements, in rows: a pytree node whose leaves are the rows."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Where they lie."""

    @property
    def mesh(self) -> Mesh:
        """The mesh they lie on."""
        return self.layout.mesh

    @property
    def home(self) -> Any:
        """Their layout."""
        return self.layout

    @property
    @abstractmethod
    def key(self) -> Any:
        """What parts that go together have in common: equal if their layouts are."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Any, ...]:
        """The rows: memory, never a copy made for the occasion."""


class Pieces(Parts):
    """Some leaves of a tree, or parts of them: those with one label, or those this rank owns."""

    def __init__(self, layout: Layout, tensors: Sequence[Any]):
        self._layout, self._tensors = layout, tuple(tensors)

    @property
    def layout(self) -> Layout:
        """Where they lie."""
        return self._layout

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The rows."""
        return self._tensors

    @property
    def key(self) -> Any:
        """Its layout."""
        return self._layout

    def __repr__(self) -> str:
        held = ", ".join(f"{list(getattr(t, 'shape', ['?']))}" for t in self.tensors)
        return f"Pieces({len(self.layout.numbers)} leaves of {len(self.layout.leaves)}: {held})"


tree.register(Pieces, lambda x: (x.tensors, x.layout), Pieces)


@dataclass(frozen=True)
class Views:
    """Parts that lie in rows of others: for each row the views it is made of, end to end.

    Not a pytree node, and without rows: a function over leaves fails on it, where it would read or write a copy.
    `packed` copies the elements into rows, `write` writes to where they lie.
    """

    make: Callable[[Any, Sequence[Tensor]], Parts]  # what has such rows, of `key` and rows
    key: Any
    runs: Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Unreduced:
    """Gradients of this rank alone, whole: trees of them can be added; `reduce_grads` makes them the mesh's, once."""

    local: Any


tree.register_fields(Unreduced, ("local",), names=("",))  # paths of leaves are those of the parameters


def packed(x: Any) -> Any:
    """Parts with rows of their own, copied from views; anything else as it is."""
    return x.make(x.key, [torch.cat(list(run)) for run in x.runs]) if isinstance(x, Views) else x


def copied(x: Any) -> Any:
    """A copy that may be written to: of views, cut alike, so that kernels round every element alike."""
    if not isinstance(x, Views):
        return tree.map(torch.clone, x)
    return replace(x, runs=[torch.cat(list(run)).split([view.numel() for view in run]) for run in x.runs])


def mesh_of(x: Any) -> Mesh:
    """The mesh that the parts in a tree lie on; None if there are none, or on no mesh."""
    return next((part.mesh for part in tree.nodes(x, Parts) if part.mesh is not None), None)


def device_of(x: Any) -> torch.device:
    """Where a tree is computed with: its mesh's device, or that of its first leaf."""
    mesh = mesh_of(x)
    leaves = tree.leaves(x) if mesh is None else []
    return leaves[0].device if leaves else comm.mesh_device(mesh)


def layout_of(x: Any) -> Layout:
    """The layout of parts, or of a plain tree of whole tensors (the same on every rank)."""
    if isinstance(x, Parts):
        return x.layout
    flat, spec = tree.flatten(x)
    leaves = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in zip(tree.paths(spec), flat, strict=True))
    spans = tuple(Span(i, EVERYONE, i, 0, 0, leaf.numel) for i, leaf in enumerate(leaves))
    return Layout((spec, leaves), spec, tuple(range(len(leaves))), leaves, spans, False, None, ())


def typed(x: Any) -> Layout:
    """The layout of `x`, with the dtypes its flat rows have: a state may keep another than the parameters'."""
    layout, rows = layout_of(x), tree.leaves(x)
    if not layout.flat:
        return layout
    dtypes = {span.leaf: rows[span.row].dtype for span in layout.spans}
    if all(layout.leaves[n].dtype == dtype for n, dtype in dtypes.items()):
        return layout
    leaves = tuple(replace(leaf, dtype=dtypes.get(n, leaf.dtype)) for n, leaf in enumerate(layout.leaves))
    return replace(layout, source=(layout.source, tuple(dtypes.items())), leaves=leaves)


def structure(x: Any) -> Any:
    """What trees that go together have in common."""
    return x.key if isinstance(x, Parts | Views) else tree.flatten(x)[1]


def pieces(x: Any, layout: Layout | None = None) -> list[tuple[int, Tensor]]:
    """This rank's pieces of leaves: the leaf's number, and a view of the row it lies in."""
    layout, rows = layout or layout_of(x), tree.leaves(x)
    if not layout.flat:
        return [(s.leaf, rows[s.row]) for s in layout.mine]
    return [(s.leaf, rows[s.row][s.start : s.start + s.numel]) for s in layout.mine]


def pick(x: Any, layout: Layout) -> Pieces | Views:
    """The leaves of `x`, parts or views, that are in a layout picked from its own: views of flat rows, else rows."""
    if not layout.flat:
        rows = tree.leaves(x)
        return Pieces(layout, [rows[row] for ((row, _, _),) in layout.runs])
    held = _runs(x)
    picked = [[view for row, *run in runs for view in _between(held[row], *run)] for runs in layout.runs]
    none = [held[row][0][:0] for row in layout.origin_rows]
    return Views(Pieces, layout, [runs or [empty] for runs, empty in zip(picked, none, strict=True)])


def _runs(x: Any) -> Sequence[Sequence[Tensor]]:
    """What each row of a tree is made of: its views, or the row itself."""
    return x.runs if isinstance(x, Views) else [[row] for row in tree.leaves(x)]


def _between(views: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """Elements [start, start + numel) of 1-D tensors that lie end to end."""
    if len(views) == 1:
        yield views[0][start : start + numel]
        return
    ends = list(accumulate(view.numel() for view in views))
    number = bisect_right(ends, start)
    while numel:
        begin = start - ends[number] + views[number].numel()
        found = views[number][begin : begin + numel]
        yield found
        start, numel, number = start + found.numel(), numel - found.numel(), number + 1


def put(x: Any, part: Any, layout: Layout) -> Any:
    """`x` with the leaves of a layout picked from its own taken from `part`: flat rows of `x` are written to."""
    if layout.flat:
        write(pick(x, layout), part)
        return x
    rows, spec = tree.flatten(x)
    for ((row, _, _),), new in zip(layout.runs, tree.leaves(part), strict=True):
        rows[row] = new
    return tree.unflatten(spec, rows)


def write(into: Any, x: Any) -> None:
    """Copy the elements of `x` to where those of `into`, of the same layout, lie: either may be views."""
    if into is not x:
        for to, new in zip(*aligned(into, x), strict=True):
            to.copy_(new)


def aligned(*trees: Any) -> list[list[Tensor]]:
    """The elements of trees of one structure as lists of tensors of the same sizes, views of what each lies in."""
    result: list[list[Tensor]] = [[] for _ in trees]
    for groups in zip(*map(_runs, trees), strict=True):
        same = groups if all(len(group) == 1 for group in groups) else _cut_alike(groups)
        for into, group in zip(result, same, strict=True):
            into.extend(group)
    return result


def _cut_alike(groups: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """1-D tensors that lie end to end, several such rows of one length: cut wherever one of them is."""
    sizes = [[view.numel() for view in group] for group in groups]
    finest = max(sizes, key=len)
    if not all(len(own) == 1 or own == finest for own in sizes):
        ends = sorted({end for own in sizes for end in accumulate(own) if end})
        finest = [end - begin for begin, end in pairwise([0, *ends])]
    return [
        group if own == finest else group[0].split(finest) if len(own) == 1 else _split(group, finest)
        for group, own in zip(groups, sizes, strict=True)
    ]


def _split(views: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """1-D tensors that lie end to end, cut further into these sizes."""
    found, left = list[Tensor](), list(views)
    for size in sizes:
        while not left[0].numel():
            left.pop(0)
        found.append(left[0][:size])
        left[0] = left[0][size:]
    return found


def clear_padding_(x: Any) -> Any:
    """Make what lies in rows but in no leaf zero, in place."""
    layout, rows = layout_of(x), tree.leaves(x)
    for number, row in enumerate(rows if layout.flat else []):
        clear_outside_(row, layout.filled.get(number, ()))
    return x


def clear_outside_(row: Tensor, spans: Iterable[tuple[int, int]]) -> Tensor:
    """Make a flat tensor zero, in place, but for these intervals, which are in order."""
    end = 0
    for start, stop in (*spans, (len(row), 0)):
        if start > end:
            row[end:start].zero_()
        end = stop
    return row
