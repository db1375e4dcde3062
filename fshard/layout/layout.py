"""Layouts: where each element of each leaf lies, in a tensor of this rank or on other ranks.

Note [Layouts]
    A rank holds a tree as a few tensors: flat tensors, with shards of many rows end to end, or whole leaves. From the
    `Layout` alone an optimizer derives norms of leaves, leaves of one label and whole matrices, so it depends neither
    on cuts nor on the number of ranks. Ranks with the same coordinates along a row's cut axes have copies of one shard.

Note [Order of a split leaf]
    A leaf split along dim d is stored in the order of `movedim(d, 0)`, part by part, so a rank's part is one interval.
    A loss sees its rank's part as a strided view. If a leaf has several blocks end to end (gate and up in one matrix),
    each part has rows of every block. Parts have the sizes of `torch.chunk`: the last may be shorter, or empty.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh, Axes, coordinate
from ..core import tree
from ..core.lazy import Container
from ..core.tracing import memo
from .row import Row, Span, end_to_end


@dataclass(eq=False)
class Derived:
    """Memoized results of pure functions of a plan or a layout."""

    layouts: dict[Hashable, Layout] = field(default_factory=dict)  # by view, or by rank
    rows: dict[Hashable, Any] = field(default_factory=dict)  # by contents of a view
    # `Any`: types of modules that import this one
    runs: dict[Hashable, Any] = field(default_factory=dict)  # by contents of a view
    moves: dict[Hashable, Any] = field(default_factory=dict)  # by the target's `source`
    containers: dict[Hashable, Container] = field(default_factory=dict)  # by first leaf and number of nodes
    units: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # by first leaf and number of leaves
    schedules: dict[Hashable, Any] = field(default_factory=dict)  # by contents of a view
    changing: tuple[object, ...] | None = None  # mutable values in the tree's nodes; None until asked
    graphs: WeakKeyDictionary[object, dict[object, object]] = field(default_factory=WeakKeyDictionary)  # by `jit`


class Split(NamedTuple):
    """A leaf split along `dim`, by blocks, over an axis of `parts` ranks (Note [Order of a split leaf])."""

    axis: str
    parts: int
    dim: int
    blocks: int = 1

    @property
    def order(self) -> tuple[int, ...]:
        """The order of elements: () for row-major, (dim,) for one block, else (dim, blocks, parts)."""
        return (self.dim, self.blocks, self.parts) if self.blocks > 1 else (self.dim,) * (self.dim > 0)

    @staticmethod
    def of(order: Sequence[int]) -> Split | None:
        dim, blocks, parts = (*order, 1, 1)[:3] if order else (0, 1, 1)
        return Split("", parts, dim, blocks) if order else None

    def __str__(self) -> str:
        return f"split over {self.axis} along dim {self.dim}" + f", {self.blocks} blocks" * (self.blocks > 1)

    def _edges(self, shape: Sequence[int]) -> list[int]:
        rows = shape[self.dim] // self.blocks
        most = -(-rows // self.parts)
        return [min(part * most, rows) for part in range(self.parts + 1)]

    def shape(self, whole: Sequence[int], part: int) -> tuple[int, ...]:
        low, high = self._edges(whole)[part : part + 2]
        return (*whole[: self.dim], self.blocks * (high - low), *whole[self.dim + 1 :])

    def stored(self, whole: Sequence[int], part: int) -> tuple[int, ...]:
        shape = self.shape(whole, part)
        return (shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :])

    def bounds(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the number of each part's first element, and the number of all elements."""
        rest = math.prod(shape[: self.dim]) * math.prod(shape[self.dim + 1 :])
        return tuple(self.blocks * edge * rest for edge in self._edges(shape))

    def flat(self, x: Tensor) -> Tensor:
        """Return a whole leaf's elements in `order`: (numel,). Dual: `shaped`."""
        rows = x.movedim(self.dim, 0)
        if self.blocks == 1:
            return rows.reshape(-1)
        edges = self._edges(x.shape)
        parts = rows.unflatten(0, (self.blocks, -1)).split([high - low for low, high in pairwise(edges)], 1)
        return torch.cat([part.reshape(-1) for part in parts])

    def shaped(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
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

    def row_major(self, shape: Sequence[int], begin: int, numel: int) -> Tensor:
        """Return the row-major positions of elements in `order`. Dual: `numbers`."""
        inner, rest = self._sizes(shape)
        number = torch.arange(begin, begin + numel, device="cpu")
        row, other = number // rest, number % rest
        if self.blocks > 1:
            edges = torch.tensor(self._edges(shape), device="cpu")
            part = torch.bucketize(row, self.blocks * edges[1:], right=True)
            in_part, length = row - self.blocks * edges[part], edges.diff()[part]
            row = in_part // length * edges[-1] + edges[part] + in_part % length
        return (other // inner * shape[self.dim] + row) * inner + other % inner

    def numbers(self, shape: Sequence[int], places: Tensor) -> Tensor:
        """Return the positions in `order` of elements at row-major `places`."""
        inner, rest = self._sizes(shape)
        row, other = places // inner % shape[self.dim], places // (inner * shape[self.dim]) * inner + places % inner
        if self.blocks > 1:
            edges = torch.tensor(self._edges(shape), device="cpu")
            block, in_block = row // edges[-1], row % edges[-1]
            part = torch.bucketize(in_block, edges[1:], right=True)
            row = self.blocks * edges[part] + block * edges.diff()[part] + in_block - edges[part]
        return row * rest + other

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        inner = math.prod(shape[self.dim + 1 :])
        return inner, inner * math.prod(shape[: self.dim])


# (sorted numbers of elements, their positions); None: element n is at position n
Picks: TypeAlias = tuple[Tensor, Tensor] | None


def numbers_in(other: Sequence[int], shape: Sequence[int], order: Sequence[int], begin: int, numel: int) -> Tensor:
    """Return the positions in order `other` of elements of `order`: int64."""
    old, new = Split.of(order), Split.of(other)
    places = torch.arange(begin, begin + numel, device="cpu") if old is None else old.row_major(shape, begin, numel)
    return places if new is None else new.numbers(shape, places)


def picks_in(
    other: Sequence[int], shape: Sequence[int], order: Sequence[int], begin: int, numel: int
) -> tuple[Tensor, Tensor]:
    """Return sorted `numbers_in`, and their positions before sorting."""
    numbers, places = numbers_in(other, shape, order, begin, numel).sort()
    return numbers, places


def within(picks: Picks, start: int, stop: int) -> tuple[Any, Any] | None:
    """Return the picked elements of [start, stop), counted from `start`, and their positions."""
    if picks is None:
        return slice(0, stop - start), slice(start, stop)
    low, high = torch.searchsorted(picks[0], torch.tensor([start, stop], device="cpu")).tolist()
    return (picks[0][low:high] - start, picks[1][low:high]) if low < high else None


@dataclass(frozen=True)
class Leaf:
    """A leaf before any cut. Intervals count elements in the order of `flat`."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    split: Split | None = field(default=None, kw_only=True)  # None: row-major order

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        return () if self.split is None else self.split.order

    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(-1) if self.split is None else self.split.flat(x)

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.view(self.shape) if self.split is None else self.split.shaped(flat, self.shape)


@tree.register_constant
@dataclass(frozen=True, eq=False)
class Layout:
    """The ranks and tensors of a tree's elements. Layouts are equal if their `source` is equal."""

    source: tuple[Hashable, ...]  # determines the other fields
    spec: tree.Spec
    leaf_at: tuple[int | None, ...]  # leaf's number by position in the tree; None: left out
    leaves: tuple[Leaf, ...]
    rows: tuple[Row[int], ...]  # of leaf numbers
    flat: bool  # True: 1-D tensors of many leaves; False: whole leaves
    mesh: AnyMesh
    axes: Axes  # rows are cut over some of these
    packed: bool = False  # flat tensors without padding
    origin: Layout | None = None  # the layout before `pick`
    frozen: tuple[str, ...] = ()  # paths of frozen leaves

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.source == other.source)

    def __hash__(self) -> int:
        return hash(self.source)

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self  # immutable; a copied state keeps its mesh

    def __getstate__(self) -> dict[str, object]:
        # without memos, and without the mesh of this run
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "mesh": None}

    def live_mesh(self) -> AnyMesh:
        if self.mesh is None and self.axes:
            raise ValueError(
                "this layout has no mesh (it was unpickled): make a state with init, and shard_state into it"
            )
        return self.mesh

    @memo
    def mine(self) -> tuple[Span, ...]:
        """The spans on this rank, sorted by tensor and start."""
        mesh, overs = self.live_mesh(), dict.fromkeys(row.over for row in self.rows)
        numbers = {over: coordinate(mesh, over) for over in overs}
        spans = [
            span._replace(start=row.start // row.block + span.start)
            for row in self.rows
            for span in row.spans(numbers[row.over])
        ]
        if not self.flat:  # whole leaves: tensors are numbered from 0
            return tuple(span._replace(tensor=number) for number, span in enumerate(spans))
        spans.sort(key=lambda span: (span.tensor, span.start))
        return tuple(end_to_end(spans) if self.packed else spans)

    @memo
    def names(self) -> tuple[str, ...] | None:
        """The paths of this rank's whole leaves; None for flat tensors."""
        return None if self.flat else tuple(self.leaves[span.leaf].path for span in self.mine)

    @memo
    def span_of(self) -> dict[int, Span]:
        return {span.leaf: span for span in self.mine}

    @memo
    def row_of(self) -> dict[int, Row[int]]:
        return {leaf: row for row in self.rows for leaf in row.leaves}

    @memo
    def shared(self) -> frozenset[int]:
        return frozenset(leaf for leaf, row in self.row_of.items() if not row.over)

    @memo
    def counted(self) -> frozenset[int]:
        """The leaves this rank adds to a sum over `axes`: only the first of ranks with copies adds."""
        left = {row.over: [axis for axis in self.axes if axis not in row.over] for row in self.rows}
        first = {over for over, axes in left.items() if coordinate(self.live_mesh(), axes) == 0}
        return frozenset(leaf for leaf, row in self.row_of.items() if row.over in first)

    @memo
    def cut_over(self) -> dict[int, Axes]:
        if not self.flat:
            return {number: self.row_of[span.leaf].over for number, span in enumerate(self.mine)}
        return {row.tensor: row.over for row in self.rows}

    @memo
    def cut_axes(self) -> tuple[Axes, ...]:
        """The axes of rows with elements, or of empty whole leaves: an owner has a tensor for an empty leaf."""
        overs = (row.over for row in self.rows if row.over and (row.has_elements or not self.flat))
        return tuple(dict.fromkeys(overs))

    @memo
    def filled(self) -> dict[int, list[tuple[int, int]]]:
        """By tensor, the merged intervals [start, stop) of leaves in this rank's flat tensors."""
        by_tensor: dict[int, list[tuple[int, int]]] = {}
        for span in (s for s in self.mine if s.numel):
            runs = by_tensor.setdefault(span.tensor, [])
            runs.append((runs.pop()[0] if runs and runs[-1][1] == span.start else span.start, span.start + span.numel))
        return by_tensor

    @memo
    def numbers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(n for n in self.leaf_at if n is not None))

    def prepared(self) -> Layout:
        """Fill every memo now: torch.compile recompiles for new attributes."""
        for x in (self, *self.rows):
            for name in (name for name, attribute in vars(type(x)).items() if isinstance(attribute, memo)):
                getattr(x, name)
        return self

    def pick(self, numbers: Iterable[int]) -> Layout:
        """Return a layout of some leaves: flat tensors lose padding; tensors without these leaves are dropped."""
        keep = {number: number for number in numbers}
        there = dict.fromkeys(self.row_of[number] for number in sorted(keep))
        rows = [row.renamed(keep) for row in sorted(there, key=lambda row: (row.tensor, row.start))]
        tensors = {tensor: number for number, tensor in enumerate(sorted({row.tensor for row in rows}))}
        return replace(
            self,
            source=(self.source, tuple(sorted(keep))),
            rows=tuple(replace(row, tensor=tensors[row.tensor]) for row in rows),
            leaf_at=tuple(n if n in keep else None for n in self.leaf_at),
            packed=self.flat,
            origin=self,
        )

    @memo
    def derived(self) -> Derived:
        return Derived()

    @memo
    def origin_tensors(self) -> list[int]:
        assert self.origin is not None
        return sorted({self.origin.row_of[n].tensor for n in self.numbers} if self.flat else ())

    @memo
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """By tensor, its intervals in `origin`: (tensor of `origin`, start, length)."""
        assert self.origin is not None
        keep = set(self.numbers)
        spans = [s for s in self.origin.mine if s.leaf in keep]
        if not self.flat:
            return [[(s.tensor, 0, s.numel)] for s in spans]
        by_tensor: dict[int, list[tuple[int, int, int]]] = {tensor: [] for tensor in self.origin_tensors}
        for _, tensor, start, _, numel in spans:
            runs = by_tensor[tensor]
            # adjacent intervals are merged: fewer kernels
            if runs and sum(runs[-1][1:]) == start:
                _, start, before = runs.pop()
                numel += before
            runs.append((tensor, start, numel))
        return [*by_tensor.values()]
