"""One place: whatever says which elements of which leaf lie where, says what Note [Flat buffers] in `plan.py` says.

Each element of a drawn tree has a number of its own, from 1 on, and padding is 0: a row says by itself what lies in it.
`Note` makes every rank's rows of these numbers, from the words of the note alone.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import permutations
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fshard
from fshard import optim
from fshard.checkpoint.contents import contents_of, own_pieces
from fshard.comm.mesh import axis_sizes, coordinate
from fshard.core import tree
from fshard.layout.pieces import Parts, layout_of, packed, pick, pieces
from fshard.sharding.sharded import refine
from fshard.testing import World
from fshard.whole import moves

Axes = tuple[str, ...]


# These functions alone read what is inside the package.


def units_of(plan: fshard.Plan) -> list[int]:
    """For each leaf of the tree, tied ones included, the number of the unit that claims it."""
    return [*plan.claims]


def said(x: Any) -> dict[str, tuple[int, Tensor]]:
    """What the layout says is here of each leaf, by path: the number of the first element, and the elements."""
    layout, rows, places = layout_of(x), tree.leaves(x), {}
    for span, (number, piece) in zip(layout.mine, pieces(x), strict=True):
        row = rows[span.tensor].reshape(-1)[span.start : span.start + span.numel]
        assert (span.leaf, span.numel) == (number, piece.numel())
        assert row.tolist() == piece.flatten().tolist()
        if span.numel:
            places[layout.leaves[number].path] = span.begin, piece.flatten()
    return places


def filled(x: Any) -> list[list[bool]]:
    """Of each element of each flat row, whether the layout says that it is no padding."""
    masks = [[False] * len(row) for row in tree.leaves(x)]
    for number, runs in layout_of(x).filled.items():
        for start, stop in runs:
            masks[number][start:stop] = [True] * (stop - start)
    return masks


def trained(x: fshard.Sharded, over: Axes) -> Any:
    """The trainable leaves, cut over axes that extend their own."""
    return packed(refine(x.trainable, over))


def of_labels(x: Any, labels: dict[str, str]) -> dict[str, tuple[Any, list[str]]]:
    """The leaves of each label, as an optimizer has them, and their paths; and of each label every other leaf."""
    tx = optim.by_label(dict.fromkeys("ab", optim.adamw(0.1)), lambda path, leaf: labels[path])
    state, parts = tx.init(x), {}
    assert_state(optim.adamw(0.1).init(x), x)
    for label, layout in state.layouts:
        fewer = layout.pick(layout.numbers[1::2])
        part = packed(pick(x, layout))
        parts |= {label: (part, layout), f"{label} fewer": (packed(pick(part, fewer)), fewer)}
        assert_state(state.inner[label], part)
    return {name: (part, [layout.leaves[n].path for n in layout.numbers]) for name, (part, layout) in parts.items()}


def assert_state(state: Any, x: Any) -> None:
    """Each moment of an optimizer's state lies as `x` does."""
    moments = tree.nodes(state, Parts)
    assert len(moments) == 2
    for moment in moments:
        assert layout_of(moment) == layout_of(x)
        assert [row.shape for row in moment.tensors] == [row.shape for row in x.tensors]


def saved(state: Any, mesh: Any) -> tuple[list[tuple[str, int, Tensor, int, int]], list[tuple[str, int, Tensor]]]:
    """What a checkpoint has of a rank, (name, begin, elements, holder, holders), and what the rank writes of it."""
    contents = contents_of(state, "save", mesh)
    parts = [(x.name, x.begin, x.elements.flatten(), x.holder, x.holders) for x in contents.parts]
    written = [(name, begin, torch.cat(xs).flatten()) for name, begin, _, xs in own_pieces(contents, set())]
    return parts, written


def by_owners(x: Any) -> tuple[dict[str, Tensor], Any, list[Any]]:
    """The leaves that this rank has, whole, if each has one owner; the tree made of them again; and all leaves whole,
    from the owners and from the tree."""
    layout = layout_of(x)
    owned = moves.collect(x, moves.owned(layout, layout.mesh, layout.axes))
    leaves = {owned.layout.leaves[number].path: leaf for number, leaf in pieces(owned)}
    return leaves, moves.spread(owned, x), [moves.gathered(owned), moves.gathered(x)]


def on_last(x: Any) -> tuple[bool, Any]:
    """Whether this rank is the last of those that the tree is cut over, and the leaves, which that rank alone has."""
    layout = layout_of(x)
    last = math.prod(axis_sizes(layout.mesh)[axis] for axis in layout.axes) - 1
    owned = moves.collect(x, moves.on_rank(layout, last))
    leaves = dict(zip((span.leaf for span in owned.layout.mine), owned.tensors, strict=True))
    whole = tree.unflatten(layout.spec, [None if n is None else leaves.get(n) for n in layout.leaf_at])
    return coordinate(layout.mesh, layout.axes) == last, whole


def moved(x: Any, like: Any) -> Any:
    """The elements of a tree, as another lies."""
    return moves.spread(x, tree.map(torch.zeros_like, like))


# A case, and what the note says of it.

SHAPES = [(), (0,), (1,), (3,), (7,), (13,), (33,), (3, 0), (1, 9), (7, 3), (2, 2, 3), (4, 1, 5)]
MESHES: list[dict[str, int]] = [
    {},
    *({"shard": size} for size in (1, 2, 3, 5, 12)),
    *({"replicate": r, "shard": s} for r, s in [(1, 1), (2, 1), (1, 4), (2, 2), (3, 2), (2, 3), (4, 3)]),
    *({"pod": p, "replicate": r, "shard": s} for p, r, s in [(2, 2, 2), (2, 1, 3), (1, 2, 2), (3, 2, 2), (2, 2, 3)]),
]
Keys = tuple[Any, ...]  # from the top of a tree to a subtree


def subtrees(x: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every subtree, the whole first."""
    yield keys, x
    for key, child in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list | tuple) else ():
        yield from subtrees(child, (*keys, key))


def at(x: Any, keys: Keys) -> Any:
    """The subtree of a tree, which may be sharded."""
    for key in keys:
        x = x[key]
    return x


def path_of(keys: Keys) -> str:
    """The path of a subtree, as patterns and names have it."""
    return ".".join(map(str, keys))


def numbers_of(leaf: Tensor) -> range:
    """The numbers of a leaf's elements."""
    return range(first := int(leaf.reshape(-1)[0]), first + leaf.numel()) if leaf.numel() else range(0)


class Case:
    """A tree of leaves of numbers, a mesh, and arguments of a plan."""

    def __init__(self, seed: int):
        draw = self.draw = random.Random(seed)
        self.params = self._nested(self._leaves(), top=True)
        self.leaves = [(keys, x) for keys, x in subtrees(self.params) if isinstance(x, Tensor)]  # tied ones, too
        self.first = {id(x): path_of(keys) for keys, x in reversed(self.leaves)}  # the path of each tensor
        self.whole_leaves = {self.first[id(x)]: x for _, x in self.leaves}
        self.sizes = draw.choice(MESHES)
        self.ranks = math.prod(self.sizes.values())
        self.policy = draw.choice([None, None, None, "compute=bf16"])
        self.whole, self.frozen, self.block = self._some(3), self._frozen(), draw.choice([1, 1, 4, 8])
        self.params_over, self.grads_over, self.state_over = self._partitions()
        over = {name: getattr(self, name) for name in ("params_over", "grads_over", "state_over")}
        self.options: dict[str, Any] = {
            "units": self._units(),
            "block": self.block,
            "policy": self.policy,
            "bucket": draw.choice([0, 300, 3000]),
            "whole": self.whole or None,
            "frozen": self.frozen or None,
            **over,
        }

    def _leaves(self) -> list[Tensor]:
        """Leaves of one to eight places; the first trains."""
        leaves, begin = list[Tensor](), 1
        for number in range(self.draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 8, 8])):
            if number and self.draw.random() < 0.15:
                leaves.append(self.draw.choice(leaves))
                continue
            shape = self.draw.choice(SHAPES)
            dtype = self.draw.choice([torch.float64, torch.float32] + [torch.int64] * (number > 0))
            leaves.append(torch.arange(begin, begin + math.prod(shape), dtype=dtype).reshape(shape))
            begin += math.prod(shape)
        return leaves

    def _nested(self, leaves: list[Tensor], top: bool = False) -> Any:
        """A tree of these leaves, in this order."""
        if len(leaves) == 1 and self.draw.random() < (0.3 if top else 0.8):
            return leaves[0]
        ends = sorted({len(leaves), *(self.draw.randint(1, len(leaves)) for _ in range(2 + 2 * top))})
        children = [self._nested(leaves[i:j]) for i, j in zip([0, *ends], ends, strict=False)]
        names = self.draw.sample(["w", "b", "10", "2", "head"], len(children))
        return self.draw.choice([list, tuple, lambda xs: dict(zip(names, xs, strict=True))])(children)

    def _some(self, most: int) -> list[str]:
        """The paths of some leaves."""
        paths = [path_of(keys) for keys, _ in self.leaves if keys]
        return self.draw.sample(paths, min(self.draw.choice([0, 0, 1, most]), len(paths)))

    def _frozen(self) -> list[str]:
        """The paths of some leaves, never that of the first."""
        tied = {path_of(keys) for keys, x in self.leaves if x is self.leaves[0][1]}
        return [path for path in self._some(2) if path not in tied]

    def _units(self) -> Any:
        """Nothing, a number, some subtrees, or two of them as one unit and others."""
        paths = [path_of(keys) for keys, _ in subtrees(self.params) if keys]
        chosen = self.draw.sample(paths, self.draw.randint(min(1, len(paths)), min(6, len(paths))))
        together = [tuple(chosen[:2]), *chosen[2:]] if len(chosen) > 1 else chosen
        return self.draw.choice([None, self.draw.randint(1, 30), chosen or None, together or None])

    def _partitions(self) -> list[Axes]:
        """Axes of parameters, gradients and state: each begins with the axes of the one before."""
        axes = self.draw.sample([*self.sizes], len(self.sizes))
        ends = [min(self.draw.choice([0, 1, 1, 3]), len(axes))]
        for _ in range(2):
            ends.append(self.draw.randint(ends[-1], len(axes)))
        return [tuple(axes[:end]) for end in ends]

    def plan(self, mesh: Any, **others: Any) -> fshard.Plan:
        """The plan of the case on a mesh."""
        return fshard.make_plan(self.params, mesh, **{**self.options, **others})

    def mesh(self, rank: int) -> Any:
        """The mesh as a rank sees it, without other ranks."""
        return fshard.AbstractMesh(**self.sizes, rank=rank) if self.sizes else None

    def picked(self, paths: Collection[str], path: str) -> bool:
        """Whether one of these paths is a place of the leaf that is first at `path`."""
        return any(self.first[id(x)] == path for keys, x in self.leaves if path_of(keys) in paths)


class Kind(NamedTuple):
    """What leaves of one buffer have in common."""

    dtype: torch.dtype
    trainable: bool
    whole: bool


class Note:
    """The rows that Note [Flat buffers] says each rank of a case has."""

    def __init__(self, case: Case):
        self.case = case
        alone, joined = units_of(case.plan(case.mesh(0), bucket=0)), units_of(case.plan(case.mesh(0)))
        places = [(path_of(keys), x) for keys, x in case.leaves]
        self.unit, self.kind = dict[str, int](), dict[str, Kind]()  # by the path of the leaf
        self.buffers = defaultdict[tuple[int, Kind], list[int]](list)
        order = [n for n, (path, x) in enumerate(places) if case.first[id(x)] == path]
        for number in order:
            path, leaf = places[number]
            trains = leaf.is_floating_point() and not case.picked(case.frozen, path)
            self.unit[path], self.kind[path] = joined[number], Kind(leaf.dtype, trains, case.picked(case.whole, path))
        self.kinds = [*dict.fromkeys(self.kind.values())]
        # joined units lie one after the other
        for number in sorted(order, key=lambda number: (alone[number], number)):
            path, leaf = places[number]
            self._put(self.unit[path], self.kind[path], [*numbers_of(leaf)], 1)
        for unit, kind in [*self.buffers]:
            self._put(unit, kind, [], case.ranks)

    def _put(self, unit: int, kind: Kind, numbers: list[int], times: int) -> None:
        """Put a leaf at the end of a buffer, and zeros up to where the next may start, or intervals may end."""
        narrow = 2 if self.case.policy and kind.dtype.is_floating_point else kind.dtype.itemsize
        step = math.lcm(16 // narrow, self.case.block) * times
        buffer = self.buffers[unit, kind]
        buffer += numbers
        buffer += [0] * (-len(buffer) % step)

    def rows(self, rank: int, over: Axes, kinds: Collection[Kind], units: range = range(1000)) -> list[list[int]]:
        """A row of each kind: this rank's intervals of all units."""
        place = dict[str, int]()
        for axis, size in reversed(self.case.sizes.items()):
            rank, place[axis] = divmod(rank, size)

        def interval(unit: int, kind: Kind) -> list[int]:
            buffer, number, parts = self.buffers[unit, kind], 0, 1
            for axis in () if kind.whole else over:
                number, parts = number * self.case.sizes[axis] + place[axis], parts * self.case.sizes[axis]
            length = len(buffer) // parts
            return buffer[number * length : (number + 1) * length]

        there = sorted({unit for unit, _ in self.buffers} & {*units})
        return [[n for unit in there for n in interval(unit, kind)] for kind in kinds]


def here(rows: list[list[int]], leaf: Tensor) -> tuple[int, list[int]]:
    """What rows have of a leaf: the first element, and the numbers."""
    of_leaf = numbers_of(leaf)
    numbers = [n for row in rows for n in row if n in of_leaf]
    return numbers[0] - of_leaf.start if numbers else 0, numbers


def assert_lies(x: Any, rows: list[list[int]], leaves: dict[str, Tensor]) -> None:
    """A tree has these rows, and its layout says of each number which element of which of these leaves it is."""
    assert [row.tolist() for row in x.tensors] == rows
    of_leaves = {n for leaf in leaves.values() for n in numbers_of(leaf)}
    assert filled(x) == [[n in of_leaves for n in row] for row in rows]
    expected = {path: here(rows, leaf) for path, leaf in leaves.items()}
    assert {path: (begin, piece.tolist()) for path, (begin, piece) in said(x).items()} == {
        path: place for path, place in expected.items() if place[1]
    }


def assert_views(case: Case, x: fshard.Sharded, rows: list[list[int]], keys: Keys, kinds: dict[str, Kind]) -> None:
    """The views of a subtree, by the paths of all its leaves whose kinds it has, are what its rows have of them."""
    below = [(place, leaf) for place, leaf in case.leaves if place[: len(keys)] == keys]
    expected = {path_of(place): here(rows, leaf)[1] for place, leaf in below if case.first[id(leaf)] in kinds}
    assert {path: view.tolist() for path, view in x.local_views().items()} == expected


def assert_saved(leaves: dict[str, dict[str, Tensor]], of_ranks: list[Any]) -> None:
    """Of each element, one rank writes it, and those that have it are numbered from 0, as many as each of them says."""
    holders, writers = defaultdict[tuple[str, int, int, int], list[int]](list), Counter[tuple[str, int]]()
    wholes = {".".join(filter(None, (top, path))): x for top, below in leaves.items() for path, x in below.items()}
    for parts, written in of_ranks:
        for name, begin, elements, holder, number in parts:
            assert elements.tolist() == wholes[name].flatten()[begin : begin + len(elements)].tolist()
            if len(elements):
                holders[name, begin, len(elements), number].append(holder)
        for name, begin, elements in written:
            assert elements.tolist() == wholes[name].flatten()[begin : begin + len(elements)].tolist()
            writers.update((name, begin + n) for n in range(len(elements)))
    for (*_, number), numbers in holders.items():
        assert sorted(numbers) == [*range(number)]
    assert writers == {(name, n): 1 for name, leaf in wholes.items() for n in range(leaf.numel())}


def assert_whole(case: Case, found: Any, leaves: dict[str, Tensor]) -> None:
    """A tree has these leaves, bit for bit and tied as they were, and None in place of others."""
    for keys, leaf in case.leaves:
        path, value = case.first[id(leaf)], at(found, keys)
        assert (value is not None) == (path in leaves)
        if value is not None:
            assert (value.dtype, value.shape, value.tolist()) == (leaf.dtype, leaf.shape, leaf.tolist())
            first = next(place for place, other in case.leaves if other is leaf)
            assert value is at(found, first)


def trees_of(case: Case, note: Note, x: fshard.Sharded, rank: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """The parameters, gradients and optimizer state as a rank has them, and the leaves of labels of the last: by name
    a tree, the rows that it has by the note, and its leaves."""
    trains = {path: leaf for path, leaf in case.whole_leaves.items() if note.kind[path].trainable}
    kinds = [kind for kind in note.kinds if kind.trainable]
    yield "params", x, note.rows(rank, case.params_over, note.kinds), case.whole_leaves
    yield "grads", trained(x, case.grads_over), note.rows(rank, case.grads_over, kinds), trains
    rows = note.rows(rank, case.state_over, kinds)
    yield "state", x.for_state, rows, trains
    labels = {path: "ab"[number * 7 % 5 % 2] for number, path in enumerate(trains)}
    for name, (part, paths) in of_labels(x.for_state, labels).items():
        leaves = {path: trains[path] for path in trains if labels[path] == name[0]}
        leaves = dict([*leaves.items()][1::2]) if name.endswith("fewer") else leaves
        assert [*paths] == [*leaves]
        numbers = {n for leaf in leaves.values() for n in numbers_of(leaf)}
        there = {note.kind[path] for path in leaves}
        packs = [[n for n in row if n in numbers] for row, kind in zip(rows, kinds, strict=True) if kind in there]
        yield name, part, packs, leaves


@pytest.mark.law
@pytest.mark.parametrize("seed", range(150))
def test_all_say_where_an_element_lies_as_the_note_does(seed: int) -> None:
    """Rows, their layouts, views, subtrees, labels and checkpoints would take one element for another: nothing fails
    then, and a model trains on the wrong numbers or a file has them twice and others not at all."""
    case = Case(seed)
    note, leaves, of_ranks = Note(case), dict[str, dict[str, Tensor]](), []
    for rank in range(case.ranks):
        x = fshard.shard_params(case.params, case.plan(case.mesh(rank)))
        state = {"plain": torch.arange(3)}
        leaves["plain"] = {"": state["plain"]}
        for name, part, rows, below in trees_of(case, note, x, rank):
            assert_lies(part, rows, below)
            state[name], leaves[name] = part, below
            if isinstance(part, fshard.Sharded):
                assert_views(case, part, rows, (), below)
        of_ranks.append(saved(state, case.mesh(rank)))
        for keys, _ in subtrees(case.params):
            paths = [case.first[id(leaf)] for place, leaf in case.leaves if place[: len(keys)] == keys]
            units = range(min(note.unit[path] for path in paths), max(note.unit[path] for path in paths) + 1)
            rows = note.rows(rank, case.params_over, note.kinds, units)
            assert_lies(at(x, keys), rows, {path: case.whole_leaves[path] for path in paths})
            assert_views(case, at(x, keys), rows, keys, note.kind)
    assert_saved(leaves, of_ranks)


@pytest.mark.law
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_elements_come_back_from_where_they_went(seed: int) -> None:
    """What is sent to owners, to all ranks or to those that keep gradients would arrive as another element."""
    case = Case(seed)
    note = Note(case)
    trains = {path: leaf for path, leaf in case.whole_leaves.items() if note.kind[path].trainable}

    def loss(params: Any) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for keys, leaf in case.leaves:
            assert at(params, keys).tolist() == leaf.tolist()
            if path_of(keys) in trains:
                total = total + (at(params, keys) * leaf).sum().double()
        return total

    def run(mesh: Any) -> dict[str, tuple[list[str], list[str]]]:
        rank = mesh.get_rank() if mesh else 0
        x, owners = fshard.shard_params(case.params, case.plan(mesh)), {}  # what this rank owns, and all leaves
        for keys in [keys for keys, _ in subtrees(case.params) if len(keys) < 3]:
            below = fshard.gather_params(at(x, keys))
            for place, leaf in case.leaves:
                if place[: len(keys)] == keys:
                    assert at(below, place[len(keys) :]).tolist() == leaf.tolist()
        for name, part, rows, leaves in trees_of(case, note, x, rank):
            if name.endswith("fewer"):
                continue
            owned, again, wholes = by_owners(part)
            assert_lies(again, rows, leaves)
            for whole in (*wholes, *([fshard.gather_params(part)] if isinstance(part, fshard.Sharded) else [])):
                assert_whole(case, whole, leaves)
            is_last, whole = on_last(part)
            assert_whole(case, whole, leaves if is_last else {})
            assert {path: leaf.tolist() for path, leaf in owned.items()} == {p: leaves[p].tolist() for p in owned}
            owners[name] = [*owned], [*leaves]
        assert_lies(x.with_trained(x.for_state), note.rows(rank, case.params_over, note.kinds), case.whole_leaves)
        other = case.plan(mesh, units=3, bucket=0, whole=None, block=2)  # and so cut at other elements
        expected = fshard.shard_params(case.params, other)
        assert [row.tolist() for row in moved(x, expected).tensors] == [row.tolist() for row in expected.tensors]
        trees = [trained(x, case.params_over), trained(x, case.grads_over), x.for_state]
        for one, like in permutations(trees, 2):  # cut over fewer axes, or over more
            assert [row.tolist() for row in moved(one, like).tensors] == [row.tolist() for row in like.tensors]
        if not case.policy:
            grads = fshard.value_and_grad(loss)(x)[1]
            kinds = [kind for kind in note.kinds if kind.trainable]
            assert_lies(tree.map(torch.round, grads), note.rows(rank, case.grads_over, kinds), trains)
        return owners

    of_ranks = World(axes=case.sizes).run(run) if case.sizes else [run(None)]
    for name, (_, leaves) in of_ranks[0].items():
        axes = {"params": case.params_over, "grads": case.grads_over}.get(name, case.state_over)
        others = case.ranks // math.prod(case.sizes[axis] for axis in axes)
        assert Counter(path for owners in of_ranks for path in owners[name][0]) == dict.fromkeys(leaves, others)


def test_ranks_share_the_writing_of_a_large_leaf() -> None:
    """Where several ranks write parts of one leaf, an element would be missing in the file, or in it twice."""
    params, sizes = {"w": torch.arange(1, (1 << 18) + 8, dtype=torch.int64), "b": torch.ones(3)}, {"replicate": 3}
    of_ranks = []
    for rank in range(3):
        mesh = fshard.AbstractMesh(**sizes, rank=rank)
        plan = fshard.make_plan(params, mesh, **dict.fromkeys(("params_over", "grads_over", "state_over"), ()))
        of_ranks.append(saved({"x": fshard.shard_params(params, plan)}, mesh))
    assert_saved({"x": params}, of_ranks)
    assert all("x.w" in [name for name, _, _ in written] for _, written in of_ranks)
