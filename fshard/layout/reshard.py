"""Move a tree from one layout to another between ranks: to owners of whole leaves, back, to all ranks, to one rank.

Every rank knows both layouts, so it knows what it sends to each rank and receives from each, without looking at what
moves between others. A rank sends one message to every other rank along each axis over which the tree is sharded,
however many leaves move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate, digits, num_ranks
from ..comm.ranks import Ranks
from ..core import tree
from ..core.tree import Tree
from .cuts import EVERYONE, Holder, Span, Whole
from .layout import Layout, Leaf
from .pieces import Pieces, device_of, layout_of, pieces, typed

T = TypeVar("T")


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assign items to ranks: the costliest first, each to the rank with the least total cost so far.

    >>> assign([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    # no more ranks than items get one. No heap: torch.compile cannot trace it
    load, ranks = [0.0] * min(num_ranks, len(costs)), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[i] = load.index(min(load))
        load[ranks[i]] += costs[i]
    return ranks


def owned(layout: Layout, mesh: AnyMesh, axes: Axes, cost: Callable[[Leaf], float] = lambda leaf: leaf.numel) -> Layout:
    """The layout in which every leaf is whole on one rank along `axes`, balanced by cost."""
    numbers = layout.numbers
    ranks = assign([cost(layout.leaves[n]) for n in numbers], num_ranks(mesh, axes))
    owners = {n: Holder(rank, 0, layout.leaves[n].numel) for n, rank in zip(numbers, ranks, strict=True)}
    source = ("owned", layout.source, axes, tuple(ranks))
    return replace(layout, source=source, cut=Whole(owners), flat=False, mesh=mesh, axes=axes, origin=None)


def on_rank(layout: Layout, mesh: AnyMesh, axes: Axes, rank: int) -> Layout:
    """The layout in which one rank along `axes` (or `EVERYONE`) holds all leaves whole."""
    owners = {n: Holder(rank, 0, layout.leaves[n].numel) for n in layout.numbers}
    source = ("on", layout.source, axes, rank)
    return replace(layout, source=source, cut=Whole(owners), flat=False, mesh=mesh, axes=axes, origin=None)


class Item(NamedTuple):
    """Elements [begin, begin + numel) of a leaf, which move from the span of rank `source` to that of `target`."""

    leaf: int
    begin: int
    source: int
    target: int
    numel: int


@dataclass(frozen=True)
class Stage:
    """The items this rank sends to, and receives from, each rank along one axis."""

    axis: str
    sends: list[list[Item]]  # one list for each rank along the axis, this one included
    recvs: list[list[Item]]


@dataclass(frozen=True)
class Route:
    """The items that this rank sends, receives or passes on between two layouts, in the order they are sent."""

    rank: int
    items: list[Item]
    stages: list[Stage]


def _route(old: Layout, new: Layout) -> Route:
    """Return the route between two layouts; the old one keeps it."""
    if torch.compiler.is_compiling():  # dynamo cannot hash a layout; it traces this only once
        return _make_route(old, new)
    routes = old.derived.routes
    if new.source not in routes:
        routes[new.source] = _make_route(old, new)
    return routes[new.source]


def _way(old: Layout, new: Layout) -> tuple[AnyMesh, Axes]:
    """The mesh of two layouts, and the axes along which their ranks are numbered."""
    return (old.mesh, old.axes) if old.axes else (new.mesh, new.axes)


def _make_route(old: Layout, new: Layout) -> Route:
    """Find what this rank sends, receives and passes on, and split it into one stage for each axis."""
    mesh, axes = _way(old, new)
    all_sizes, rank = axis_sizes(mesh), coordinate(mesh, axes)
    sizes = [all_sizes[axis] for axis in axes]
    known = set(old.numbers)
    leaves = [n for n in new.numbers if n in known]
    through = (item for n in leaves for k in range(len(sizes) + 1) for item in _items(old, new, n, rank, sizes, k))
    items = sorted(set(through))  # in the same order on all ranks
    moves = [(i, digits(i.source, sizes), digits(i.target, sizes)) for i in items]
    local = digits(rank, sizes)
    return Route(rank, items, [_stage(k, axes[k], sizes[k], local, moves) for k in reversed(range(len(sizes)))])


def _items(old: Layout, new: Layout, leaf: int, rank: int, sizes: Sequence[int], k: int) -> Iterator[Item]:
    """Yield what of a leaf is on this rank after the stages of all axes from number `k` on.

    The last axis comes first: such an item is at its source's coordinates along axes before `k`, at its target's along
    the others.
    """
    block = math.prod(sizes[k:])  # ranks whose coordinates before `k` are equal follow one another
    sources = range(rank - rank % block, rank - rank % block + block)
    targets = range(rank % block, math.prod(sizes), block)
    if next(old.cut.holders(leaf, sources), None) is None:
        return  # before it goes through the targets, which may be all ranks
    for give in new.cut.holders(leaf, targets):
        for take in old.cut.holders(leaf, sources):
            begin = max(take.begin, give.begin)
            numel = min(take.begin + take.numel, give.begin + give.numel) - begin
            for target in (targets if give.rank == EVERYONE else [give.rank]) if numel > 0 else ():
                if take.rank != EVERYONE:
                    yield Item(leaf, begin, take.rank, target, numel)
                elif target == rank:  # what all ranks hold does not move
                    yield Item(leaf, begin, rank, rank, numel)


def _stage(k: int, axis: str, size: int, local: list[int], moves: Sequence[tuple[Item, list[int], list[int]]]) -> Stage:
    """Return the stage along axis number `k`; `moves` are items with coordinates of their source and target rank."""
    sends: list[list[Item]] = [[] for _ in range(size)]
    recvs: list[list[Item]] = [[] for _ in range(size)]
    for item, source, target in moves:
        # the last axis comes first: before this stage an item is at its target's coordinates along later axes only
        before, after = [*source[: k + 1], *target[k + 1 :]], [*source[:k], *target[k:]]
        if before == local:
            sends[target[k]].append(item)
        if after == local:
            recvs[source[k]].append(item)
    return Stage(axis, sends, recvs)


def _moved(x: Tree, new: Layout, label: str) -> dict[int, list[tuple[int, Tensor]]]:
    """Move elements; return pairs of begin and elements, for each leaf that this rank has a span of in `new`."""
    old, rows = typed(x), tree.leaves(x)
    route = _route(old, new)
    held_items = {i: _elements(rows, old.span_of[i.leaf], i) for i in route.items if i.source == route.rank}  # views
    mesh, dtypes = _way(old, new)[0], [leaf.dtype for leaf in old.leaves]
    for stage in route.stages:
        held_items = _along(primitives.along(mesh, stage.axis), dtypes, stage, held_items, label)
    arrived: dict[int, list[tuple[int, Tensor]]] = {span.leaf: [] for span in new.mine}
    for item, elements in held_items.items():
        arrived[item.leaf].append((item.begin, elements))
    return arrived


def _elements(rows: Sequence[Tensor], span: Span, item: Item) -> Tensor:
    """Return the view of an item's elements in the span of its leaf: (numel,)."""
    start = span.start + item.begin - span.begin
    return rows[span.row].reshape(-1)[start : start + item.numel]


def _along(
    ranks: Ranks, by_leaf: Sequence[torch.dtype], stage: Stage, held_items: dict[Item, Tensor], label: str
) -> dict[Item, Tensor]:
    """Move items along one axis, one message to each rank; return the items that this rank then holds."""
    sends = [[held_items[item] for item in items] if p != ranks.rank else [] for p, items in enumerate(stage.sends)]
    dtypes = [  # and the sizes of what each rank sends here
        [(by_leaf[i.leaf], i.numel) for i in items] if p != ranks.rank else [] for p, items in enumerate(stage.recvs)
    ]
    arrived = primitives.swap(sends, dtypes, ranks, label)
    result = {item: held_items[item] for item in stage.sends[ranks.rank]}  # these stay on this rank
    for peer, items in enumerate(stage.recvs):
        if peer != ranks.rank:
            result.update(zip(items, arrived[peer], strict=True))
    return result


def collect(x: Tree, layout: Layout, label: str = "") -> Pieces:
    """Return the leaves of a tree whole on the ranks that `layout` names, on the device. Dual: `spread`."""
    arrived = _moved(x, layout, label)
    rows, device = [], device_of(x)
    for span in layout.mine:
        leaf, parts = layout.leaves[span.leaf], sorted(arrived[span.leaf], key=lambda part: part[0])
        # sorted by begin, the parts are the leaf, end to end
        elements = [part.to(device) for _, part in parts] or [torch.empty(0, dtype=leaf.dtype, device=device)]
        rows.append((elements[0] if len(elements) == 1 else torch.cat(elements)).view(leaf.shape))
    return Pieces(layout, rows)


def spread(x: Tree, like: T, label: str = "") -> T:
    """Return a tree with the layout of `like` and the elements of `x`; padding is zero. Dual: `collect`."""
    out = tree.map(lambda row: torch.zeros_like(row, memory_format=torch.contiguous_format), like)
    layout = layout_of(like)
    arrived = _moved(x, layout, label)
    for span, (_, piece) in zip(layout.mine, pieces(out), strict=True):
        for begin, elements in arrived[span.leaf]:
            start = begin - span.begin  # in the piece
            piece.view(-1)[start : start + elements.numel()] = elements
    return out


def gathered(x: Tree, rank: int = EVERYONE) -> Tree:
    """Return the tree of whole leaves, on every rank, or on `rank` alone (others get None in place of leaves)."""
    layout = layout_of(x)
    whole = collect(x, on_rank(layout, layout.mesh, layout.axes, rank))
    rows = dict(zip((s.leaf for s in whole.layout.mine), whole.tensors, strict=True))
    return tree.unflatten(layout.spec, [None if n is None else rows.get(n) for n in layout.places])
