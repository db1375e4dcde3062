"""`Parts`: trees with some elements on each rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh, OnMesh, mesh_device
from ..core import tree
from ..core.arguments import shown
from ..core.differences import Form
from ..core.storage import clear_outside_, cleared_outside
from ..core.tree import Tree
from .layout import Layout, Leaf
from .row import Row, Span

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


_NO_NAMES = (
    "of this tree a rank has some leaves alone, so it has no subtrees by name. fshard.tree.map goes over them; a "
    "transformation that reads subtrees is optim.Transform(init, update, over='tree')"
)


class Parts(OnMesh):
    """A tree with some elements on this rank: a pytree node whose leaves are this rank's tensors.

    Examples: the leaves with one label, or the whole leaves of this rank.
    """

    def __init__(self, layout: Layout, tensors: Sequence[Tensor]):
        self._layout, self._tensors = layout, tuple(tensors)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors; after a map over the tree, the results of the mapped function."""
        return self._tensors

    @property
    def mesh(self) -> AnyMesh:
        return self.layout.mesh

    @property
    def home(self) -> Any:  # a subclass has a Plan
        return self.layout

    @property
    def key(self) -> Hashable:
        return self.layout

    @property
    def trainable(self) -> Parts:
        return self

    @property
    def for_state(self) -> Parts:
        return self

    def __getitem__(self, key: object) -> Tree:
        raise TypeError(f"[{key!r}]: {_NO_NAMES}")

    def __getattr__(self, name: str) -> Tree:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {_NO_NAMES}")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{list(getattr(t, 'shape', ['?']))}" for t in self.tensors)
        return f"{type(self).__name__}({len(self.layout.numbers)} leaves of {len(self.layout.leaves)}: {shapes})"


tree.register(Parts, lambda x: (x.tensors, x.layout, x.layout.names), Parts)


class Misplaced(TypeError):
    """An optimizer's state has tensors or shapes unknown to other ranks."""


@dataclass(frozen=True)
class Views(Generic[Key]):
    """`Parts` as views of another tree's tensors: the views `runs[i]`, end to end, are tensor i.

    `Views` is no pytree node, so a function over leaves fails instead of writing to copies.
    """

    make: Callable[[Key, Sequence[Tensor]], Parts]  # (key, tensors) -> the tree with tensors of its own
    key: Key
    runs: Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Unreduced:
    """Whole gradients of this rank alone. Unreduced gradients can be added; `reduce_grads` sums over the mesh, once."""

    local: Tree


tree.register_fields(Unreduced, ("local",), names=("",))  # no name: leaves have the paths of the parameters


def packed(x: Tree) -> Tree:
    return x.make(x.key, [torch.cat(list(run)) for run in x.runs]) if isinstance(x, Views) else x


def map_parts(fn: Callable[..., Tensor], x: T, *rest: Tree) -> T:
    """Apply `fn` to each tensor of one dim or more in the `Parts` of a tree, and to its counterparts in `rest`.

    Other leaves come from the last tree.
    """

    def mapped(*xs: Tree) -> Tree:
        return fn(*xs) if isinstance(xs[-1], Tensor) and xs[-1].dim() else xs[-1]

    return tree.map_tops(
        lambda *nodes: tree.map(mapped, *nodes) if isinstance(nodes[0], Parts) else nodes[-1], Parts, x, *rest
    )


def copied(x: T) -> T:
    """Return a copy to write to. Copied `Views` have the same boundaries, so kernels round alike."""
    if not isinstance(x, Views):
        return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
    return replace(x, runs=[torch.cat(list(run)).split([view.numel() for view in run]) for run in x.runs])


def mesh_of(x: Tree) -> AnyMesh:
    return next((part.mesh for part in tree.nodes(x, Parts) if part.mesh is not None), None)


def device_of(x: Tree) -> torch.device:
    mesh = mesh_of(x)
    leaves = tree.leaves(x) if mesh is None else []
    return leaves[0].device if leaves else mesh_device(mesh)


def layout_of(x: Tree) -> Layout:
    """Return the layout of a tree; a plain tree is whole on every rank."""
    if isinstance(x, Parts):
        return x.layout
    tensors, spec = tree.flatten(x)
    named = zip(tree.leaf_paths(spec), tensors, strict=True)
    leaves = tuple(Leaf(path, tuple(leaf.shape), leaf.dtype) for path, leaf in named)
    rows = tuple(Row((number,), (0,), (leaf.shape,), leaf.numel) for number, leaf in enumerate(leaves))
    return Layout((spec, leaves), spec, tuple(range(len(leaves))), leaves, rows, False, None, ())


def typed(x: Tree) -> Layout:
    """Return the layout of `x` with its tensors' dtypes: optimizer state may have other dtypes."""
    layout = layout_of(x)
    if not layout.flat:
        return layout
    tensors = _checked_entries(x, layout) if isinstance(x, Parts) else tree.leaves(x)
    dtypes = {number: tensors[layout.row_of[number].tensor].dtype for number in layout.numbers}
    if all(layout.leaves[n].dtype == dtype for n, dtype in dtypes.items()):
        return layout
    leaves = tuple(replace(leaf, dtype=dtypes.get(n, leaf.dtype)) for n, leaf in enumerate(layout.leaves))
    return replace(layout, source=(layout.source, tuple(dtypes.items())), leaves=leaves)


def reshaped(layout: Layout, forms: Mapping[int, Form]) -> Layout:
    """Return the layout of the whole leaves in `forms`, in their new forms."""
    leaves = tuple(_as(leaf, forms.get(n)) for n, leaf in enumerate(layout.leaves))
    part = layout.pick(forms)
    pairs = ((row, leaves[row.leaves[0]]) for row in part.rows)  # each row has one whole leaf
    rows = tuple(replace(row, shapes=(leaf.shape,), numel=leaf.numel) for row, leaf in pairs)
    return replace(part, source=(*forms.items(), part.source), leaves=leaves, rows=rows, origin=None)


def _as(leaf: Leaf, form: Form | None) -> Leaf:
    if form is None:
        return leaf
    return replace(leaf, shape=form.shape, dtype=form.dtype, split=leaf.split if form.shape == leaf.shape else None)


def structure_key(x: Tree) -> Hashable:
    return x.key if isinstance(x, Parts | Views) else tree.flatten(x)[1]


def pieces(x: Tree, layout: Layout | None = None) -> list[tuple[int, Tensor]]:
    """Return this rank's pieces of leaves: (leaf number, flat view or whole leaf).

    TypeError if a mapped function has put anything but tensors into the tree.
    """
    layout = layout or layout_of(x)
    tensors = _checked_entries(x, layout) if isinstance(x, Parts) else tree.leaves(x)
    if not layout.flat:
        return [(s.leaf, tensors[s.tensor]) for s in layout.mine]
    return [(s.leaf, tensors[s.tensor][s.start : s.start + s.numel]) for s in layout.mine]


def path_of(layout: Layout, number: int) -> str:
    return next((layout.leaves[span.leaf].path for span in layout.mine if span.tensor == number), "")


def _checked_entries(x: Parts, layout: Layout) -> Sequence[Tensor]:
    for number, entry in enumerate(x.tensors):
        if not isinstance(entry, Tensor) or (layout.flat and entry.dim() != 1):
            leaf = path_of(layout, number)
            raise TypeError(
                f"leaf {leaf!r}: expected a {'flat ' * layout.flat}tensor, got {shown(entry)}, which a function mapped "
                "over the tree has put there. Keep a tensor of its shape (torch.zeros_like), or a value beside the tree"
            )
    for form, entry in () if layout.flat else ((layout.leaves[s.leaf], x.tensors[s.tensor]) for s in layout.mine):
        if entry.shape != form.shape:
            raise TypeError(
                f"leaf {form.path!r}: expected a tensor of shape {form.shape}, got {shown(entry)}: other ranks know "
                "its shape from `init`. Start with its final shape (torch.zeros_like)"
            )
    return x.tensors


class NamedLeaf(NamedTuple):
    """A leaf, or this rank's piece of it: path, unit that gathers it (or None), value."""

    path: str
    unit: str | None
    value: object


def named_leaves(x: Tree) -> list[NamedLeaf]:
    """Return the leaves in order. `Parts` give this rank's pieces, and each row's padding."""
    result = list[NamedLeaf]()
    for path, node in tree.paths_to(x, Parts):
        result += _named_leaves_of(path, node) if isinstance(node, Parts) else [NamedLeaf(path, None, node)]
    return result


def _named_leaves_of(path: str, x: Parts) -> Iterator[NamedLeaf]:
    plan, layout = getattr(x, "plan", None), x.layout
    units = {} if plan is None else {slot.path: plan.units[slot.unit].name for slot in plan.slots}
    for number, piece in pieces(x, layout):
        leaf = layout.leaves[number].path
        yield NamedLeaf(tree.joined(path, leaf), units.get(leaf), piece)
    for number, row in enumerate(tree.leaves(x) if layout.flat else []):
        covered = torch.zeros(len(row), dtype=torch.bool, device=row.device)  # (n / W,)
        for start, stop in layout.filled.get(number, ()):
            covered[start:stop] = True  # not padding
        yield NamedLeaf(tree.joined(path, f"(padding of row {number})"), None, row[~covered])


def elements(x: Tree, layout: Layout | None = None) -> Iterator[tuple[Span, Tensor]]:
    """Yield this rank's spans with their elements in the order of the leaf, (numel,).

    Elements of a whole leaf may be a copy: write to its `pieces`.
    """
    layout = layout or layout_of(x)
    for span, (number, piece) in zip(layout.mine, pieces(x, layout), strict=True):
        yield span, piece if layout.flat else layout.leaves[number].flat(piece)


def pick(x: Tree, layout: Layout) -> Parts | Views[Layout]:
    """Return the leaves of `x` in `layout`: views of flat tensors, or whole leaves."""
    if not layout.flat:
        tensors = tree.leaves(x)
        return Parts(layout, [tensors[number] for ((number, _, _),) in layout.runs])
    views = _runs(x)  # by tensor of `layout.origin`
    picked = [[view for number, *run in runs for view in _between(views[number], *run)] for runs in layout.runs]
    # a tensor without elements on this rank has an empty view
    empty = [views[tensor][0][:0] for tensor in layout.origin_tensors]
    return Views(Parts, layout, [runs or [nothing] for runs, nothing in zip(picked, empty, strict=True)])


def _runs(x: Tree) -> Sequence[Sequence[Tensor]]:
    return x.runs if isinstance(x, Views) else [[leaf] for leaf in tree.leaves(x)]


def _between(views: Sequence[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    if len(views) == 1:
        yield views[0][start : start + numel]
        return
    ends = list(accumulate(view.numel() for view in views))
    number = bisect_right(ends, start)  # the first view with an end after `start`
    while numel:
        begin = start - ends[number] + views[number].numel()  # start in this view
        view = views[number][begin : begin + numel]
        yield view
        start, numel, number = start + view.numel(), numel - view.numel(), number + 1


def put_part(x: T, part: Tree, layout: Layout) -> T:
    """Return `x` with the leaves of `part`; flat tensors are written in place."""
    if layout.flat:
        write(pick(x, layout), part)
        return x
    tensors, spec = tree.flatten(x)
    for ((number, _, _),), new in zip(layout.runs, tree.leaves(part), strict=True):
        tensors[number] = new
    return tree.unflatten(spec, tensors)


def write(into: Tree, x: Tree) -> None:
    if into is not x:
        for to, new in zip(*aligned_views(into, x), strict=True):
            to.copy_(new)


def aligned_views(*trees: Tree) -> list[list[Tensor]]:
    """Return each tree's elements as views; view i has one size in all trees."""
    result: list[list[Tensor]] = [[] for _ in trees]
    for groups in zip(*map(_runs, trees), strict=True):
        same = groups if all(len(group) == 1 for group in groups) else _cut_alike(groups)
        for into, group in zip(result, same, strict=True):
            into.extend(group)
    return result


def _cut_alike(groups: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Split tensors, each a list of 1-D views, at all their boundaries."""
    sizes = [[view.numel() for view in group] for group in groups]
    finest = max(sizes, key=len)
    if not all(len(lengths) == 1 or lengths == finest for lengths in sizes):
        ends = sorted({end for lengths in sizes for end in accumulate(lengths) if end})
        finest = [end - begin for begin, end in pairwise([0, *ends])]
    return [
        group if lengths == finest else group[0].split(finest) if len(lengths) == 1 else _split(group, finest)
        for group, lengths in zip(groups, sizes, strict=True)
    ]


def _split(views: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Split 1-D views, end to end, into `sizes`; no size may cross a boundary."""
    result, left = list[Tensor](), list(views)  # `left`: not yet split
    for size in sizes:
        while not left[0].numel():
            left.pop(0)
        result.append(left[0][:size])
        left[0] = left[0][size:]
    return result


def clear_padding_(x: T) -> T:
    """Zero the padding in place. `x` must be no subtree: other leaves lie in a subtree's gaps."""
    layout, tensors = layout_of(x), tree.leaves(x)
    for number, flat in enumerate(tensors if layout.flat else []):
        clear_outside_(flat, layout.filled.get(number, ()))
    return x


def without_padding(x: T) -> T:
    """Return `x` with zero padding: a user's function (`g / |g|`) may have made padding NaN."""
    if not isinstance(x, Parts) or not x.layout.flat:
        return x
    (tensors, spec), filled = tree.flatten(x), x.layout.filled
    return tree.unflatten(spec, [cleared_outside(flat, filled.get(n, ())) for n, flat in enumerate(tensors)])
