"""Trees of which a rank holds some elements: their rows, views of leaves, and picking leaves."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..comm.mesh import Mesh, OnMesh, mesh_device
from ..core import tree
from ..core.flat import clear_outside_, cleared_outside
from .layout import EVERYONE, Layout, Leaf, Span


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


class Parameters(Parts):
    """Parameters, of which a state may hold smaller parts than the parameters do."""

    @property
    @abstractmethod
    def for_state(self) -> Any:
        """The trainable ones, cut as optimizer state is: `Views` of these rows where they are cut less finely."""

    @abstractmethod
    def with_trained(self, fine: Any) -> Any:
        """These parameters with the trainable ones taken from `fine`, which is cut as optimizer state is."""


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
    return leaves[0].device if leaves else mesh_device(mesh)


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


def without_padding(x: Any) -> Any:
    """A tree with zeros where flat rows hold no leaf, for functions that mix elements (the scale of a block).

    A step's gradients are zero there, but a user's function of elements (`g / |g|`) may make NaN of these zeros.
    """
    if not isinstance(x, Parts) or not x.layout.flat:
        return x
    (rows, spec), filled = tree.flatten(x), x.layout.filled
    return tree.unflatten(spec, [cleared_outside(row, filled.get(n, ())) for n, row in enumerate(rows)])
