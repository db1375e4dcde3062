"""Move a tree from one layout to another between ranks: to owners of whole leaves, back, to all ranks, to one rank.

Every rank knows both layouts, hence its sends and receives. Along each axis over which the tree is cut, a rank sends
one message to every other rank, however many leaves move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate, num_ranks
from ..comm.ranks import Ranks
from ..core import tree
from ..core.func_levels import refuse_derivative
from ..core.tree import Tree
from ..layout.layout import Layout, Leaf
from ..layout.pieces import Parts, device_of, elements, layout_of, pieces, typed, write
from ..layout.row import Row
from ..layout.rules import COPIES, Rule

T = TypeVar("T")


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assign items to ranks: the costliest first, each to the rank with the least total cost so far.

    >>> assign([1, 5, 3, 3], 2)
    [0, 0, 1, 1]
    """
    # no heap: torch.compile cannot trace it
    load, ranks = [0.0] * min(num_ranks, len(costs)), [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        ranks[i] = load.index(min(load))
        load[ranks[i]] += costs[i]
    return ranks


def owned(layout: Layout, mesh: AnyMesh, axes: Axes, cost: Callable[[Leaf], float] = lambda leaf: leaf.numel) -> Layout:
    """The layout with every leaf whole on one rank along `axes`; ranks get about equal costs."""
    ranks = assign([cost(layout.leaves[n]) for n in layout.numbers], num_ranks(mesh, axes))
    return _whole_layout(replace(layout, mesh=mesh, axes=axes), [Rule(axes, at=rank) for rank in ranks])


def on_rank(layout: Layout, rank: int | None = None) -> Layout:
    """The layout with whole leaves on every rank, or on one (its number along `layout.axes`)."""
    rules = [COPIES if rank is None else Rule(layout.axes, at=rank)] * len(layout.numbers)
    if torch.compiler.is_compiling():  # as in `_moves`
        return _whole_layout(layout, rules)
    known = layout.derived.layouts
    if rank not in known:
        known[rank] = _whole_layout(layout, rules)
    return known[rank]


def _whole_layout(layout: Layout, rules: Sequence[Rule]) -> Layout:
    pairs = [(n, layout.leaves[n], rule) for n, rule in zip(layout.numbers, rules, strict=True)]
    rows = tuple(Row((n,), (0,), (leaf.shape,), leaf.numel, rule=rule) for n, leaf, rule in pairs)
    source = ("whole", layout.source, layout.axes, tuple(rule.at for rule in rules))
    return replace(layout, source=source, rows=rows, flat=False, packed=False, origin=None)


class Item(NamedTuple):
    """Elements [begin, begin + numel) of a leaf, and the coordinates of the ranks between which these move."""

    leaf: int
    begin: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    numel: int


Lists = list[list[Item]]  # one for each rank along an axis, this rank included


class Moves(NamedTuple):
    """Items sent, received or passed on by this rank between two layouts, in the order of sending."""

    here: tuple[int, ...]  # this rank's coordinates
    items: list[Item]
    stages: list[tuple[str, Lists, Lists]]  # (axis, sends, receives)


def _moves(old: Layout, new: Layout) -> Moves:
    if torch.compiler.is_compiling():  # dynamo cannot hash a layout, and traces this call only once
        return _find_moves(old, new)
    known = old.derived.moves
    if new.source not in known:
        known[new.source] = _find_moves(old, new)
    return known[new.source]


def _way(old: Layout, new: Layout) -> tuple[AnyMesh, Axes]:
    """The mesh of two layouts, and the axes along which elements move."""
    return old.mesh if old.axes else new.mesh, tuple(dict.fromkeys(old.axes + new.axes))


def _find_moves(old: Layout, new: Layout) -> Moves:
    mesh, axes = _way(old, new)
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if axis in axes}
    here = {axis: coordinate(mesh, (axis,)) for axis in axes}
    known = set(old.numbers)
    leaves = [n for n in new.numbers if n in known]
    through = (item for n in leaves for k in range(len(axes) + 1) for item in _items_held(old, new, n, here, sizes, k))
    items = sorted(set(through))  # the same order on all ranks
    local = tuple(here.values())
    stages = [(axes[k], *stage(k, sizes[axes[k]], local, items)) for k in reversed(range(len(axes)))]
    return Moves(local, items, stages)


def _items_held(
    old: Layout, new: Layout, leaf: int, here: Mapping[str, int], sizes: Mapping[str, int], k: int
) -> Iterator[Item]:
    """Yield the leaf's items on this rank after messages along `axes[k]`, `axes[k + 1]`, ... have arrived.

    Messages go along the last axis first, so an item is at its source's coordinates along `axes[:k]`, and at its
    target's along other axes. If ranks along an axis have copies, the rank at the target's coordinate sends.
    """
    source_row, target_row = old.row_of[leaf], new.row_of[leaf]
    passed = [axis for axis in list(here)[:k] if axis in source_row.over]  # messages along these are to come
    from_here = {axis: here[axis] for axis in list(here)[:k]}
    to_here = {axis: number for axis, number in here.items() if axis not in passed}
    if next(source_row.shards_of(leaf, sizes, from_here), None) is None:
        return  # saves the loop over targets, which may be all ranks
    for target_at, give in target_row.shards_of(leaf, sizes, to_here):
        for source_at, take in source_row.shards_of(leaf, sizes, from_here):
            begin = max(take.begin, give.begin)
            numel = min(take.begin + take.numel, give.begin + give.numel) - begin
            known = to_here | dict(zip(target_row.over, target_at, strict=True))
            choices = [[known[axis]] if axis in known else range(sizes[axis]) for axis in here]
            for target in product(*choices) if numel > 0 else ():
                moved = dict(zip(here, target, strict=True)) | dict(zip(source_row.over, source_at, strict=True))
                yield Item(leaf, begin, tuple(moved.values()), target, numel)


def stage(k: int, size: int, here: tuple[int, ...], items: Sequence[Item]) -> tuple[Lists, Lists]:
    sends: Lists = [[] for _ in range(size)]
    recvs: Lists = [[] for _ in range(size)]
    for item in items:
        # along later axes the item is already at its target's coordinates
        if item.source[: k + 1] + item.target[k + 1 :] == here:
            sends[item.target[k]].append(item)
        if item.source[:k] + item.target[k:] == here:
            recvs[item.source[k]].append(item)
    return sends, recvs


def _moved_elements(x: Tree, new: Layout, label: str) -> dict[int, list[tuple[int, Tensor]]]:
    """Return pairs (begin, elements) for each leaf with a span of this rank in `new`."""
    old = typed(x)
    moves = _moves(old, new)
    local = {span.leaf: (span.begin, x) for span, x in elements(x, old)}
    items = [(item, *local[item.leaf]) for item in moves.items if item.source == moves.here]
    held_items = {item: x[item.begin - begin :][: item.numel] for item, begin, x in items}  # views
    mesh, dtypes = _way(old, new)[0], [leaf.dtype for leaf in old.leaves]
    for axis, sends, recvs in moves.stages:
        held_items = moved_along(primitives.along(mesh, axis), dtypes, sends, recvs, held_items, label)
    arrived: dict[int, list[tuple[int, Tensor]]] = {span.leaf: [] for span in new.mine}
    for item, part in held_items.items():
        arrived[item.leaf].append((item.begin, part))
    return arrived


def moved_along(
    ranks: Ranks, by_leaf: Sequence[torch.dtype], sends: Lists, recvs: Lists, held_items: dict[Item, Tensor], label: str
) -> dict[Item, Tensor]:
    """Move items along one axis, with one message to each rank; return this rank's new items."""
    refuse_derivative([*held_items.values()], label or "a move of leaves")
    result = {item: held_items[item] for item in sends[ranks.rank]}  # these stay on this rank
    sends, recvs = ([x if p != ranks.rank else [] for p, x in enumerate(lists)] for lists in (sends, recvs))
    forms = [[(by_leaf[item.leaf], item.numel) for item in items] for items in recvs]
    arrived = primitives.swap([[held_items[item] for item in items] for items in sends], forms, ranks, label)
    for items, tensors in zip(recvs, arrived, strict=True):
        result.update(zip(items, tensors, strict=True))
    return result


def collect(x: Tree, layout: Layout, label: str = "") -> Parts:
    """Return whole leaves, on the ranks of `layout` and the device of `x`. Dual: `spread`."""
    arrived = _moved_elements(x, layout, label)
    tensors, device = [], device_of(x)
    for span in layout.mine:
        leaf, parts = layout.leaves[span.leaf], sorted(arrived[span.leaf], key=lambda part: part[0])
        # sorted parts, end to end, are the leaf
        flat = [part.to(device) for _, part in parts] or [torch.empty(0, dtype=leaf.dtype, device=device)]
        tensors.append(leaf.shaped(flat[0] if len(flat) == 1 else torch.cat(flat)))
    return Parts(layout, tensors)


def spread(x: Tree, like: T, label: str = "") -> T:
    """Return the elements of `x` in the layout of `like`; padding is zero. Dual: `collect`."""
    out = tree.map(lambda row: torch.zeros_like(row, memory_format=torch.contiguous_format), like)
    if not (layout := layout_of(like)).flat:
        write(out, collect(x, layout, label))
        return out
    arrived = _moved_elements(x, layout, label)
    for span, piece in elements(out):
        for begin, part in arrived[span.leaf]:
            start = begin - span.begin  # in the piece
            piece[start : start + part.numel()] = part
    return out


def gathered(x: Tree) -> Tree:
    layout = layout_of(x)
    tensors = dict(pieces(collect(x, on_rank(layout))))
    return tree.unflatten(layout.spec, [None if n is None else tensors.get(n) for n in layout.leaf_at])
