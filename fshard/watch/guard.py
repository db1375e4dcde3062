"""A guard while training: some steps run twice, and results are compared, on a rank and between ranks.

Note [Two runs]
    A step is a function, so a second run has the same bits. If bits differ, a fault (of memory, a processor, a message)
    disturbed one run, or an operator is not deterministic. If a permanent fault makes both runs wrong alike, only
    another rank's copy of a value shows the fault.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Axes, digits, rank_in
from ..comm.ranks import MismatchError
from ..core import tree
from ..core.arguments import check_flags, check_function, check_whole, shown
from ..core.storage import words, writes
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, pieces
from ..plan.plan import Plan
from ..train.step import METRICS, Result, Step, TrainState
from .compare import bits, first_unlike

_WORDS_OF_SUM = 8  # words of 8 bytes in one sum, for `at_rest`
_FAULTY_RANK = "that rank's memory, processor or network may be faulty, or an operator not deterministic"


class Guarded:
    """The result of `guard`: a step with the arguments of the original step."""

    def __init__(self, step: Callable[..., Result], every: int, at_rest: bool):
        self.__wrapped__, self._every, self._at_rest = step, every, at_rest
        self.with_extra: bool = getattr(step, "with_extra", False)
        self._resting: list[_Rest] = []  # with `at_rest`: tensors of the last returned state

    def __call__(self, state: TrainState, batch: Tree, *args: Tree, **kwargs: Tree) -> Result:
        """Run the step; MismatchError on all ranks if bits differ."""
        if is_tracing() or torch.compiler.is_compiling():
            raise TypeError("guard: a graph runs its step once: guard the outermost function, as in guard(jit(step))")
        if not isinstance(state, TrainState):
            raise TypeError(f"guard: expected a TrainState (fshard.init_state) first, got {shown(state)}")
        number, mesh = int(state.step), state.params.plan.live_mesh()
        if self._at_rest:
            consensus.together(mesh, partial(self._check_rest, state, number), _FAULTY_RANK)
        result = (self._twice if (number + 1) % self._every == 0 else self._once)(state, batch, *args, **kwargs)
        if self._at_rest:
            self._resting = _resting(result[0])
        return result

    def _once(self, state: TrainState, batch: Tree, *args: Tree, **kwargs: Tree) -> Result:
        result = self.__wrapped__(state, batch, *args, **kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            new, metrics = result
            if isinstance(new, TrainState) and isinstance(metrics, dict):
                return new, metrics
        raise TypeError(f"guard: expected a step that returns a TrainState and a dict of metrics, got {shown(result)}")

    def _twice(self, state: TrainState, batch: Tree, *args: Tree, **kwargs: Tree) -> Result:
        number, mesh = int(state.step), state.params.plan.live_mesh()
        what = f"guard: step {number}, rank {rank_in(mesh)}"  # read before the step, which may donate the state
        _check_copies(state, {}, f"the state before step {number}")
        # a step that `train_step` did not build may donate
        donates = not isinstance(self.__wrapped__, Step) or self.__wrapped__.donate
        again = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state) if donates else state
        result, second = (self._once(x, batch, *args, **kwargs) for x in (state, again))
        consensus.together(mesh, partial(_check_equal, result, second, what), _FAULTY_RANK)
        _check_copies(*result, f"step {number}")
        return result

    def _check_rest(self, state: TrainState, number: int) -> None:
        pairs = zip(self._resting, _resting(state), strict=False)
        same = [(before, now) for before, now in pairs if before.is_same(now)]
        if _differ(same):
            leaves = next(leaves for before, now in same if (leaves := before.turned(now)))
            rank = rank_in(state.params.plan.live_mesh())
            raise MismatchError(
                f"guard: the state before step {number}, rank {rank}, leaf {leaves}: its bits have changed "
                "since the step before returned it, and nothing that torch counts has written to it"
            )


def guard(step: Callable[..., Result], every: int = 100, *, at_rest: bool = False) -> Guarded:
    """Return `step` with a guard: one step in `every` runs twice, and values that must be equal are compared.

    If `(state.step + 1) % every == 0`, the step runs twice from the same state and batch. On each rank, both new
    states, with `extra`, and the metrics must have the same bits. Before and after the step, copies on several ranks
    must have the same bits: leaves, along axes that neither cut nor split these leaves; numbers of the optimizer, loss
    scale, step, seed, loss, norm and `found_inf`. If bits differ, every rank raises MismatchError with the step, the
    leaf or metric, and the rank, if one rank differs from two or more.

    `at_rest`: every call also looks for bits that flipped in memory since the last step: digests of parameters and
    optimizer state must be as at that step's end, except for tensors written to since.

    If a step donates its state and runs twice, one more state is in memory. Guard the outermost function:
    `guard(jit(step))`, `guard(torch.compile(step))`; `check` goes around the guard. A loss that counts or prints does
    so twice. TypeError for anything but a step, and in a graph. ValueError for `every` below 1.

    >>> from fshard.optim import sgd
    >>> step = guard(train_step(lambda w, x: (w * x).sum(), sgd(0.5)), every=1)
    >>> state, metrics = step(init_state(shard_of(torch.ones(2)), sgd(0.5)), torch.tensor([1.0, 2.0]))
    >>> metrics["loss"]
    tensor(3.)
    """
    check_function("guard: step", step, "step(state, batch)")
    check_whole("guard: every", every, what="a number of steps")
    check_flags(**{"guard: at_rest": at_rest})
    return Guarded(step, every, at_rest)


def _guarded(state: TrainState) -> list[tuple[str, Parts | Tensor]]:
    names = ("params", "opt_state", "loss_scale", "step", "rng")
    nodes = tree.paths_to({name: getattr(state, name) for name in names}, Parts)
    return [(path, x) for path, x in nodes if isinstance(x, (Parts, Tensor))]


class _Rest(NamedTuple):
    """A tensor of a returned state: number `number` of a tree with `layout`, or (None) outside of trees."""

    path: str
    layout: Layout | None
    number: int
    tensor: weakref.ref[Tensor]
    num_writes: int | None
    sums: Tensor  # of the tensor's blocks

    def is_same(self, now: _Rest) -> bool:
        return self.tensor() is now.tensor() and self.num_writes == now.num_writes

    def turned(self, now: _Rest) -> str:
        if torch.equal(self.sums, now.sums):
            return ""
        tensor = now.tensor()
        assert tensor is not None
        if self.layout is None:
            return repr(self.path)
        block = int((self.sums != now.sums).int().argmax())
        begin, end = (at * 8 * _WORDS_OF_SUM // tensor.itemsize for at in (block, block + 1))
        spans = [x for x in self.layout.mine if x.tensor == self.number]
        if self.layout.flat:
            spans = [x for x in spans if x.start < end and x.start + x.numel > begin]
        leaves = [self.layout.leaves[x.leaf].path for x in spans] or ["(padding)"]
        return " or ".join(repr(tree.joined(self.path, leaf)) for leaf in leaves)


def _differ(pairs: Sequence[tuple[_Rest, _Rest]]) -> bool:
    """True if sums of a pair differ. The host waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for a, b in pairs:
        flags.setdefault(a.sums.device, []).append((a.sums != b.sums).any())
    return any(bool(torch.stack(on_device).any()) for on_device in flags.values())


def _resting(state: TrainState) -> list[_Rest]:
    result = list[_Rest]()
    for path, node in _guarded(state):
        layout, tensors = (node.layout, node.tensors) if isinstance(node, Parts) else (None, (node,))
        for number, x in enumerate(tensors):
            result.append(_Rest(path, layout, number, weakref.ref(x), writes(x), _block_sums(x)))
    return result


def _block_sums(x: Tensor) -> Tensor:
    """Return the sum of each block of a tensor's words, and of the remainder: int64, (n,)."""
    whole, rest = words(bits(x))
    end = len(whole) // _WORDS_OF_SUM * _WORDS_OF_SUM
    last = whole[end:].sum() + rest.sum(dtype=torch.int64)
    return torch.cat([whole[:end].view(-1, _WORDS_OF_SUM).sum(1), last[None]])


class _Copy(NamedTuple):
    path: str
    tensors: Sequence[Tensor]
    leaves: Callable[[], list[tuple[str, Tensor]]]  # equal names on all ranks; empty on ranks without the leaf


def _bit_sums(tensors: Sequence[Tensor], mesh: AnyMesh) -> Tensor:
    """Return the sum of each tensor's words: int64, (number of tensors,)."""
    return consensus.digests([*map(bits, tensors)] or [torch.empty(0, device="cpu")], mesh)


def _copies(state: TrainState, metrics: Mapping[str, Tree]) -> dict[Axes, list[_Copy]]:
    """Return this rank's tensors by the axes along which other ranks have copies."""
    plan, result = state.params.plan, dict[Axes, list[_Copy]]()

    def add(over: Axes, copy: _Copy) -> None:
        axes = plan.rest(over)
        if axes:
            result.setdefault(axes, []).append(copy)

    for path, node in [*_guarded(state), *((f"metrics.{name}", metrics[name]) for name in METRICS if name in metrics)]:
        if isinstance(node, Parts):
            for over in dict.fromkeys(row.over for row in node.layout.rows):
                tensors = [x for number, x in enumerate(node.tensors) if node.layout.cut_over[number] == over]
                add(over, _Copy(path, tensors, partial(_leaves_over, path, node, over)))
        elif isinstance(node, Tensor):
            add((), _Copy(path, [node], partial(list, [(path, node)])))
    return result


def _leaves_over(path: str, node: Parts, over: Axes) -> list[tuple[str, Tensor]]:
    layout, here, nothing = node.layout, dict(pieces(node, node.layout)), torch.empty(0, device="cpu")
    numbers = [number for number in layout.numbers if layout.row_of[number].over == over]
    return [(tree.joined(path, layout.leaves[number].path), here.get(number, nothing)) for number in numbers]


def _check_copies(state: TrainState, metrics: Mapping[str, Tree], what: str) -> None:
    plan = state.params.plan
    mesh = plan.live_mesh()
    for axes, copies in sorted(_copies(state, metrics).items()):
        first = consensus.unlike_index([_bit_sums(copy.tensors, mesh) for copy in copies], mesh, axes, f"guard: {what}")
        if first is not None:
            leaves = copies[first].leaves()
            number = consensus.unlike_index([bits(x) for _, x in leaves], mesh, axes)
            name, tensors = (f"{copies[first].path} (padding)", copies[first].tensors)
            if number is not None:
                name, tensors = leaves[number][0], [leaves[number][1]]
            digests = str(_bit_sums(tensors, mesh).tolist())
            raise MismatchError(f"guard: {what}: leaf {name!r}: {_told(digests, axes, plan)}")


def _told(digests: str, axes: Axes, plan: Plan) -> str:
    mesh, groups = plan.live_mesh(), dict[tuple[int, ...], dict[int, str]]()
    # groups of ranks with copies, by coordinates along the other axes
    for rank, text in enumerate(consensus.of_all(digests, mesh)):
        places = zip(plan.axes, digits(rank, [size for _, size in plan.axes]), strict=True)
        groups.setdefault(tuple(at for (axis, _), at in places if axis not in axes), {})[rank] = text
    ranks = next((group for group in groups.values() if len({*group.values()}) > 1), None)
    if ranks is None:
        return "copies differed when they were compared, and not when they were compared again: a message was wrong"
    (usual, most), (_, second), *_ = Counter(ranks.values()).most_common()
    if most > second:
        apart = [str(rank) for rank, text in ranks.items() if text != usual]
        who = f"rank {apart[0]} has another value" if len(apart) == 1 else f"ranks {', '.join(apart)} have other values"
        return f"{who} than the other {most} ranks with a copy"
    return f"ranks {', '.join(map(str, ranks))} hold copies of it that differ"


def _check_equal(first: Result, second: Result, what: str) -> None:
    # leaves before metrics: a wrong leaf may make a metric wrong
    for kind, *runs in zip(("leaf", "metric"), second, first, strict=True):
        if unlike := first_unlike(*map(_numbers_only, runs)):
            place, text = unlike
            where = f"{what}, {kind} {place.path!r}"
            raise MismatchError(f"{where}: two runs differ, from the same state and batch: the second {text}")


def _numbers_only(x: Tree) -> Tree:
    """Replace a user's strings and objects by 0: only numbers are compared."""
    return tree.map(lambda leaf: leaf if isinstance(leaf, (Tensor, int, float)) else 0, x)
