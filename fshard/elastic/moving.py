"""`move`: make a state of any ranks, mesh, plan and strategy from the parts in the memory of all ranks.

Note [One whole state]
    Ranks tell each other the intervals of leaves in their memory. From these every rank finds the same last whole
    state, and the same sender of each interval. A message goes along one mesh axis after the other. New ranks hold
    nothing; spare ranks want nothing.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..checkpoint.contents import Contents, SavedSpan, contents_of, made_like
from ..checkpoint.restoring import latest
from ..comm import consensus
from ..comm.mesh import AnyMesh, axis_sizes, digits, num_ranks, rank_in
from ..comm.primitives import along
from ..core.arguments import expect
from ..core.differences import Form, form_difference, name_differences
from ..core.tree import Tree
from ..files.index import Json
from ..files.safetensors_file import DTYPES, NAMES
from ..layout.layout import Picks, picks_in, within
from ..layout.pieces import mesh_of
from ..whole.moves import Item, moved_along, stage
from .keeping import Kept, StateKey, batches, live

_MISSING_SHOWN = 3  # intervals in an error


class LostError(RuntimeError):
    """Elements of a state are gone with the ranks that held them."""


class LeafHolders(NamedTuple):
    """The holders of a leaf: `ranks[i]` hold elements [edges[i], edges[i + 1])."""

    edges: list[int]
    ranks: list[list[int]]

    def cut(self, begin: int, end: int) -> Iterator[tuple[int, int, list[int]]]:
        """Cut [begin, end) by holders: yield (begin, end, ranks)."""
        i = bisect_right(self.edges, begin) - 1
        while begin < end:
            stop = min(self.edges[i + 1], end)
            yield begin, stop, self.ranks[i]
            begin, i = stop, i + 1


def _holders_of(numel: int, intervals: Sequence[tuple[int, int, int]]) -> LeafHolders:
    edges = sorted({0, numel, *(edge for begin, end, _ in intervals for edge in (begin, end))})
    ranks: list[list[int]] = [[] for _ in edges[1:]]
    for begin, end, rank in intervals:
        for i in range(bisect_left(edges, begin), bisect_left(edges, end)):
            ranks[i].append(rank)
    return LeafHolders(edges, ranks)


@dataclass(frozen=True)
class Common:
    """A state in the memory of all ranks together. Leaves are numbered in the order of `forms`."""

    key: StateKey
    forms: dict[str, Form]
    orders: dict[str, tuple[int, ...]]
    values: dict[str, Json]
    leaves: list[LeafHolders]

    def missing(self) -> list[str]:
        """Return the intervals without a holder."""
        cuts = zip(self.forms, self.leaves, strict=True)
        return [
            f"{name!r}[{begin}:{end}]"
            for name, leaf in cuts
            for begin, end, ranks in leaf.cut(0, leaf.edges[-1])
            if not ranks
        ]


def last_whole(held: Sequence[Kept], mesh: AnyMesh) -> StateKey | None:
    """Return the key (round, step) of the last whole state; every rank of the mesh must call this.

    `move` makes this state. `held`: the states kept by this rank; `mesh`: all ranks. None if no rank holds anything;
    LostError if no state is whole.

    >>> from fshard import elastic
    >>> elastic.last_whole([elastic.keep({"w": torch.ones(2)}, step) for step in (3, 4)], None)
    (0, 4)
    """
    common = _common([kept for kept in held if not kept.life.given_away], mesh, None)
    return None if common is None else common.key


def move(
    held: Sequence[Kept],
    like: Tree,
    *,
    mesh: AnyMesh = None,
    donate: bool = False,
    dir: str | os.PathLike[str] | None = None,
) -> Tree:
    """Make a state like `like` from the last whole state in all ranks' memory; every rank of the mesh must call this.

    The state has the bits of the last (round, step) with every element on some rank. `like` gives tree, plan, dtypes
    and devices, as for `checkpoint.restore`: number of ranks, mesh, units, splits, strategy and floating dtypes may
    differ from the kept state's.

    - `held`: the states kept by this rank; [] on a new rank. States given away are passed over.
    - `like`: None on a spare rank: it sends its parts, and the result is None.
    - `mesh`: all ranks, if some have no `like`; by default the mesh of `like`.
    - `donate=True`: give `like` away, and write into its memory.
    - `dir`: checkpoints, of which LostError names the last.

    LostError on all ranks if no rank holds anything, or no state is whole: it names step, leaf and missing elements.
    ValueError lists names and shapes unlike those of `like`. Dual: `keep`.

    >>> from fshard import elastic
    >>> before = elastic.keep({"w": torch.ones(2)}, step=3)
    >>> elastic.move([before, elastic.keep({"w": torch.zeros(2)}, step=4)], {"w": torch.empty(2, device="meta")})
    {'w': tensor([0., 0.])}
    """
    mesh = mesh_of(like) if mesh is None else mesh
    wanted = consensus.together(mesh, lambda: _wanted(held, like))
    usable = [kept for kept in held if not kept.life.given_away]
    common = _common(usable, mesh, dir)
    if common is None:
        raise LostError(f"move: no rank holds a state: begin with a new one{_last_checkpoint(dir, mesh)}")
    consensus.together(mesh, lambda: None if wanted is None else _check_like(common, wanted))
    state = None if like is None else made_like(like, mesh, donate, lambda path, _: common.values[path])
    spans = [] if state is None else contents_of(state, "move", mesh_of(state)).parts
    _fill_spans(spans, [kept for kept in usable if kept.key == common.key], common, mesh)
    return state


def replan(state: Tree, like: Tree, *, mesh: AnyMesh = None, donate: bool = False) -> Tree:
    """Make a state like `like` from a live state, on the same ranks; every rank must call this.

    `like` may have another plan, strategy, split and floating dtype. No copies are made in host memory. `mesh`: the
    ranks, for states without sharded leaves. `donate`: give `like` away, and write into its memory. Errors are as for
    `keep` and `move`.

    >>> from fshard import elastic
    >>> elastic.replan({"w": torch.ones(2)}, {"w": torch.zeros(2, dtype=torch.float64)})
    {'w': tensor([1., 1.], dtype=torch.float64)}
    """
    mesh = mesh_of(state) if mesh is None else mesh
    return move([live(state, mesh)], like, mesh=mesh, donate=donate)


def _wanted(held: Sequence[Kept], like: Tree) -> Contents | None:
    expect("move: held", held, isinstance(held, list | tuple), "a list of what `keep` returned")
    for kept in held:
        expect("move: held", kept, isinstance(kept, Kept), "a list of what `keep` returned")
    return None if like is None else contents_of(like, "move", mesh_of(like))


def _common(held: Sequence[Kept], mesh: AnyMesh, dir: str | os.PathLike[str] | None) -> Common | None:
    """Return the last whole state; None if no rank holds anything."""
    keys = [json.loads(text) for text in consensus.of_all(json.dumps([kept.key for kept in held]), mesh)]
    first = {(*key,): rank for rank, of_rank in reversed([*enumerate(keys)]) for key in of_rank}
    records = [_record(kept, with_forms=first[kept.key] == rank_in(mesh)) for kept in held]
    by_rank = [json.loads(text) for text in consensus.of_all(json.dumps(records), mesh)]
    missing = ""
    for key in sorted(first, reverse=True):
        records = [(rank, *rest) for rank, rows in enumerate(by_rank) for at, *rest in rows if (*at,) == key]
        common = _of_key(key, records)
        if not (gone := common.missing()):
            return common
        shown = ", ".join(gone[:_MISSING_SHOWN]) + ", ..." * (len(gone) > _MISSING_SHOWN)
        missing = missing or f"step {key[1]} (round {key[0]}), no rank has {shown}"
    if missing:
        raise LostError(f"move: no state is whole: of {missing}{_last_checkpoint(dir, mesh)}")
    return None


def _last_checkpoint(dir: str | os.PathLike[str] | None, mesh: AnyMesh) -> str:
    step = None if dir is None else latest(dir, mesh)
    return "" if step is None else f". Restore step {step} of {dir}"


def _record(kept: Kept, with_forms: bool) -> Json:
    """Return key, leaves (for other ranks to know, from one rank alone) and intervals, for JSON."""
    forms = [[name, form.shape, NAMES[form.dtype], kept.orders.get(name, ())] for name, form in kept.forms.items()]
    number = {name: n for n, name in enumerate(kept.forms)}
    intervals = [(number[name], begin, begin + numel) for block in kept.intervals for name, begin, numel in block]
    return [kept.key, [forms, dict(kept.values)] if with_forms else None, intervals]


def _of_key(key: StateKey, records: Sequence[tuple[int, Json, list[tuple[int, int, int]]]]) -> Common:
    forms, values = next(head for _, head, _ in records if head is not None)
    by_leaf: list[list[tuple[int, int, int]]] = [[] for _ in forms]
    for rank, _, intervals in records:
        for number, begin, end in intervals:
            by_leaf[number].append((begin, end, rank))
    named = {name: Form((*shape,), DTYPES[dtype]) for name, shape, dtype, _ in forms}
    leaves = [_holders_of(form.numel, of_leaf) for form, of_leaf in zip(named.values(), by_leaf, strict=True)]
    return Common(key, named, {name: (*order,) for name, *_, order in forms}, values, leaves)


def _check_like(common: Common, wanted: Contents) -> None:
    names = [*wanted.forms, *wanted.values]
    differences = [*name_differences([[name] for name in names], [*common.forms, *common.values], "`like`")]
    for name, form in wanted.forms.items():
        if name in common.values:
            differences.append(f"{name!r}: expected a tensor, got a number or a string")
        elif name in common.forms and (text := form_difference(name, form, common.forms[name])):
            differences.append(text)
    numbers = [name for name in wanted.values if name in common.forms]
    differences += [f"{name!r}: expected a number or a string, got a tensor" for name in numbers]
    if differences:
        raise ValueError(f"move: the state of step {common.key[1]} differs from `like`: {'; '.join(differences)}")


def _source_of(span: SavedSpan, common: Common) -> tuple[Picks, int, int]:
    """Return numbers of a span's elements, if in another order, and the interval with all of them."""
    order, numel = common.orders[span.name], span.elements.numel()
    if order == span.order:
        return None, span.begin, span.begin + numel
    picks = picks_in(order, common.forms[span.name].shape, span.order, span.begin, numel)
    return picks, int(picks[0][0]), int(picks[0][-1]) + 1


def _fill_spans(spans: Sequence[SavedSpan], held: Sequence[Kept], common: Common, mesh: AnyMesh) -> None:
    """Fill spans of this rank's new state from all ranks' parts."""
    number = {name: n for n, name in enumerate(common.forms)}
    sources = {number[span.name]: (span, *_source_of(span, common)) for span in spans if span.elements.numel()}
    parts: list[list[tuple[int, Tensor]]] = [[] for _ in number]
    for name, begin, x in (part for kept in held for part in kept.parts()):
        parts[number[name]].append((begin, x))
    intervals = [(leaf, begin, end) for leaf, (_, _, begin, end) in sources.items()]
    asked: list[list[tuple[int, int, int]]] = [[] for _ in number]
    for rank, text in enumerate(consensus.of_all(json.dumps(intervals), mesh)):
        for leaf, begin, end in json.loads(text):
            asked[leaf].append((begin, end, rank))
    for names in batches(common.forms, num_ranks(mesh)):
        leaves = [number[name] for name in names]
        items = sorted({item for leaf in leaves for item in _items_of(leaf, common.leaves[leaf], asked[leaf], mesh)})
        for item, x in _arrived(items, parts, common, mesh).items():
            _write_item(x, item.begin, *sources[item.leaf][:2])


def _items_of(leaf: int, holders: LeafHolders, asked: Sequence[tuple[int, int, int]], mesh: AnyMesh) -> Iterator[Item]:
    """Yield a leaf's items, from the rank itself if it holds the elements, else from the next holder after it."""
    size, sizes = num_ranks(mesh), [*axis_sizes(mesh).values()]
    for begin, end, rank in asked:
        for low, high, ranks in holders.cut(begin, end):
            source = min(ranks, key=lambda holder: (holder - rank) % size)
            yield Item(leaf, low, (*digits(source, sizes),), (*digits(rank, sizes),), high - low)


def _arrived(
    items: Sequence[Item], parts: Sequence[Sequence[tuple[int, Tensor]]], common: Common, mesh: AnyMesh
) -> dict[Item, Tensor]:
    """Send items along one axis after the other; return the items for this rank."""
    sizes, dtypes = axis_sizes(mesh), [form.dtype for form in common.forms.values()]
    here = (*digits(rank_in(mesh), [*sizes.values()]),)
    holding = {item: _elements(parts[item.leaf], item) for item in items if item.source == here}
    for k, axis in reversed([*enumerate(sizes)]):
        sends, recvs = stage(k, sizes[axis], here, items)
        holding = moved_along(along(mesh, axis), dtypes, sends, recvs, holding, "move")
    return holding


def _elements(parts: Sequence[tuple[int, Tensor]], item: Item) -> Tensor:
    ends = item.begin + item.numel
    begin, x = next((begin, x) for begin, x in parts if begin <= item.begin and ends <= begin + x.numel())
    return x[item.begin - begin :][: item.numel]


def _write_item(x: Tensor, begin: int, span: SavedSpan, picks: Picks) -> None:
    """Write elements [begin, begin + n) of the common state to their positions in a span."""
    out = span.elements.view(-1)
    if picks is None:
        out[begin - span.begin :][: len(x)].copy_(x)
    elif picked := within(picks, begin, begin + len(x)):
        numbers, places = picked
        out[places] = x[numbers].to(out)
