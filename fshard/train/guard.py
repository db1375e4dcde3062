"""A guard while training: some steps run twice, and what must be equal, on a rank or between ranks, is compared.

Note [Two runs]
    A step is a function, so a second run from the same state and batch has the same bits. If it has not, one of the two
    was disturbed: memory, a processor, a message; or an operator is not deterministic. What comes out of both runs
    alike, and wrong, is noticed where another rank holds a copy of it. So a fault that stays, on one rank, in what no
    other rank holds, is not found.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import Axes, digits, rank_in
from ..comm.ranks import MismatchError
from ..core import tree
from ..core.arguments import check_flags, check_function, check_whole, shown
from ..core.storage import as_bytes, writes
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..grad.gathers import several
from ..layout.layout import Layout
from ..layout.pieces import Parts, pieces
from ..plan.plan import Plan
from .step import TrainState

Result = tuple[TrainState, dict[str, Tree]]
_METRICS = ("loss", "grad_norm", "found_inf")  # which all ranks have alike
_BLOCK = 64  # bytes of which `at_rest` keeps one sum of 8
_REMEDY = "its memory, processor or network may be faulty, or an operator not deterministic"


class Guarded:
    """What `guard` returns: a step. Its calls take the arguments of the original step."""

    def __init__(self, step: Callable[..., Result], every: int, at_rest: bool):
        self.__wrapped__, self._every, self._at_rest = step, every, at_rest
        self.with_extra: bool = getattr(step, "with_extra", False)
        self._resting: dict[str, _Rest] = {}  # with `at_rest`: what the step returned last

    def __call__(self, state: TrainState, batch: Tree, *args: Tree) -> Result:
        """Call the step. MismatchError on all ranks if what must be equal is not."""
        if is_tracing() or torch.compiler.is_compiling():
            raise TypeError("guard: a graph runs its step once: guard the outermost function, as in guard(jit(step))")
        if not isinstance(state, TrainState):
            raise TypeError(f"guard: expected a TrainState (fshard.init_state) first, got {shown(state)}")
        number, mesh = int(state.step), state.params.plan.live_mesh()
        if self._at_rest:
            consensus.together(mesh, partial(self._check_rest, state, number), _REMEDY)
        due = (number + 1) % self._every == 0
        new, metrics = (self._twice if due else self.__wrapped__)(state, batch, *args)
        if self._at_rest:
            self._resting = _resting(new)
        return new, metrics

    def _twice(self, state: TrainState, batch: Tree, *args: Tree) -> Result:
        """The step's result, if a second run has the same, and ranks have the same copies before and after it."""
        number, mesh = int(state.step), state.params.plan.live_mesh()
        what = f"guard: step {number}, rank {_rank(state)}"  # before the state is given away
        _check_copies(state, {}, f"the state before step {number}")
        again = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state) if self._donates else state
        result = self.__wrapped__(state, batch, *args)
        second = self.__wrapped__(again, batch, *args)
        consensus.together(mesh, partial(_check_equal, result, second, what), _REMEDY)
        _check_copies(*result, f"step {number}")
        return result

    @property
    def _donates(self) -> bool:
        """Whether the step may give its state away; what is not known may."""
        step = self.__wrapped__
        return bool(getattr(getattr(step, "options", step), "donate", True))

    def _check_rest(self, state: TrainState, number: int) -> None:
        """Raise MismatchError if bits have changed of what nobody has written to since the step before returned it."""
        now = _resting(state)
        for path, before in self._resting.items():
            if path in now and before.at == now[path].at and (leaves := before.turned(now[path])):
                names = " or ".join(repr(_joined(path, leaf)) for leaf in leaves)
                raise MismatchError(
                    f"guard: the state before step {number}, rank {_rank(state)}, leaf {names}: its bits have changed "
                    "since the step before returned it, and nothing has written to it"
                )


def guard(step: Callable[..., Result], every: int = 100, *, at_rest: bool = False) -> Guarded:
    """Return `step` with a guard: every so many steps one runs twice, and what must be equal is compared.

    A step with `(state.step + 1) % every == 0` runs twice from the same state and batch: on each rank the new state,
    `extra` too, and the metrics must have the same bits. What several ranks hold copies of must have the same bits on
    them, before the step and after it: leaves, along the axes that they are not cut or split over, numbers of the
    optimizer, the loss scale, the step, the seed, loss, norm and `found_inf`. If not, every rank raises a
    MismatchError, which names the step, the leaf or metric, and the rank, where it is one against two or more.

    With `at_rest` every call also compares parameters and optimizer state with digests of what the step before
    returned, if they are the same tensors, to which nothing was written: a bit that turned in memory.

    A step that donates is given a copy: one state more in memory, at these steps alone. Guard the outermost function:
    `guard(jit(step))`, `guard(torch.compile(step))`; `check` goes around the guard. A loss that counts or prints does
    it twice. Raises TypeError for what is no step and in a graph, ValueError for `every` below 1.

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


def _rank(state: TrainState) -> int:
    return rank_in(state.params.plan.live_mesh())


def _joined(path: str, leaf: str) -> str:
    return ".".join(filter(None, (path, leaf)))


def _nodes(state: TrainState, *more: str) -> dict[str, Tree]:
    """The parts of a state that lie on ranks, and what else it has, by path."""
    names = ("params", "opt_state", "loss_scale", "step", "rng", *more)
    return dict(tree.paths_to({name: getattr(state, name) for name in names}, Parts))


def _bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, (n,)."""
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    return as_bytes(x.resolve_conj().resolve_neg().contiguous())


class _Rest(NamedTuple):
    """Tensors of one tree as a step returned them."""

    layout: Layout
    at: list[tuple[weakref.ref[Tensor], int | None]]  # the tensors, and how often each was written to
    sums: list[Tensor]  # for each tensor the sums of its blocks

    def turned(self, now: _Rest) -> list[str]:
        """The leaves in the first block whose bits have changed."""
        for number, (a, b) in enumerate(zip(self.sums, now.sums, strict=True)):
            if not torch.equal(a, b):
                tensor = now.at[number][0]()
                assert tensor is not None
                # elements [begin, end) of the tensor
                begin, end = (int((a != b).int().argmax() + i) * _BLOCK // tensor.itemsize for i in (0, 1))
                spans = [x for x in self.layout.mine if x.tensor == number]
                if self.layout.flat:
                    spans = [x for x in spans if x.start < end and x.start + x.numel > begin]
                return [self.layout.leaves[x.leaf].path for x in spans] or ["(padding)"]
        return []


def _resting(state: TrainState) -> dict[str, _Rest]:
    """The parts of a state that lie on ranks: what `at_rest` compares."""
    parts = {path: node for path, node in _nodes(state).items() if isinstance(node, Parts)}
    return {
        path: _Rest(x.layout, [(weakref.ref(t), writes(t)) for t in x.tensors], [*map(_sums, x.tensors)])
        for path, x in parts.items()
    }


def _sums(x: Tensor) -> Tensor:
    """The sums of the bits of blocks: int64, (n,), the last for what is no whole block."""
    bits = _bits(x)
    end = len(bits) // _BLOCK * _BLOCK
    return torch.cat([bits[:end].view(torch.int64).view(-1, _BLOCK // 8).sum(1), consensus.digests([bits[end:]], None)])


class _Copy(NamedTuple):
    """Tensors of this rank of which other ranks may hold copies, together a leaf or a tree, of which `leaves` tells."""

    tensors: list[Tensor]
    leaves: Callable[[], dict[str, Tensor]]  # by name, the same on all ranks, empty where other ranks have it

    def digests(self) -> Tensor:
        """The sums of the bits of the tensors: int64, (number of tensors,)."""
        return torch.cat([consensus.digests([_bits(x)], None) for x in self.tensors] or [torch.empty(0, device="cpu")])


def _copies(state: TrainState, metrics: Mapping[str, Tree]) -> dict[Axes, list[_Copy]]:
    """What this rank holds copies of, by the axes along which ranks must have the same."""
    plan, result = state.params.plan, dict[Axes, list[_Copy]]()

    def add(over: Axes, copy: _Copy) -> None:
        axes = several(plan, [axis for axis in plan.axis_names if axis not in over])
        if axes:
            result.setdefault(axes, []).append(copy)

    for path, node in _nodes(state).items():
        if isinstance(node, Parts):
            for over in dict.fromkeys(row.over for row in node.layout.rows):
                tensors = [x for number, x in enumerate(node.tensors) if node.layout.cut_over[number] == over]
                add(over, _Copy(tensors, partial(_leaves, path, node, over)))
        elif isinstance(node, Tensor) and node.dim() == 0:  # each rank may have its own tensor on no mesh
            add((), _Copy([node], partial(dict, {path: node})))
    for name in _METRICS:
        if name in metrics:
            add((), _Copy([metrics[name]], partial(dict, {f"metrics.{name}": metrics[name]})))
    return result


def _leaves(path: str, node: Parts, over: Axes | None = None) -> dict[str, Tensor]:
    """This rank's pieces of all leaves of a tree, or of those that are cut over these axes, by path."""
    layout, here, nothing = node.layout, dict(pieces(node, node.layout)), torch.empty(0, device="cpu")
    numbers = [number for number in layout.numbers if over in (None, layout.row_of[number].over)]
    return {_joined(path, layout.leaves[number].path): here.get(number, nothing) for number in numbers}


def _check_copies(state: TrainState, metrics: Mapping[str, Tree], what: str) -> None:
    """Raise MismatchError on all ranks if copies differ between them."""
    plan = state.params.plan
    mesh = plan.live_mesh()
    for axes, copies in sorted(_copies(state, metrics).items()):
        first = consensus.first_unlike([copy.digests() for copy in copies], mesh, axes)
        if first is not None:
            bits = {name: _bits(x) for name, x in copies[first].leaves().items()}
            number = consensus.first_unlike([*bits.values()], mesh, axes)  # None: padding differs
            name = [*bits][number or 0]
            raise MismatchError(f"guard: {what}: leaf {name!r}: {_told(bits[name], axes, plan)}")


def _told(bits: Tensor, axes: Axes, plan: Plan) -> str:
    """Which ranks have which copies: the one that is alone, where most agree."""
    mesh, groups = plan.live_mesh(), dict[tuple[int, ...], dict[int, str]]()
    # by coordinates along the other axes: the digest of each rank
    for rank, text in enumerate(consensus.of_all(str(int(consensus.digests([bits], mesh))), mesh)):
        places = zip(plan.axes, digits(rank, [size for _, size in plan.axes]), strict=True)
        groups.setdefault(tuple(at for (axis, _), at in places if axis not in axes), {})[rank] = text
    ranks = next(group for group in groups.values() if len({*group.values()}) > 1)
    (usual, most), (_, second), *_ = Counter(ranks.values()).most_common()
    if most > second:
        apart = ", ".join(str(rank) for rank, text in ranks.items() if text != usual)
        return f"rank {apart} has another value than the other {most} ranks with a copy"
    return f"ranks {', '.join(map(str, ranks))} hold copies of it that differ"


def _check_equal(first: Result, second: Result, what: str) -> None:
    """Raise MismatchError if the bits of two results differ, which names the first leaf."""
    a, b = ([x for x in tree.leaves(result) if isinstance(x, Tensor)] for result in (first, second))
    if len(a) == len(b) and all(map(_same, a, b)):
        return
    for (name, x), (other, y) in zip_longest(_all(first), _all(second), fillvalue=("nothing", torch.empty(0))):
        if (name, x.shape, x.dtype) != (other, y.shape, y.dtype):
            raise MismatchError(f"{what}: two runs differ: {name}, {shown(x)}, and {other}, {shown(y)}")
        if not _same(x, y):
            at = int((_bits(x) != _bits(y)).view(x.numel(), -1).any(1).int().argmax())
            values = " and ".join(str(z.reshape(-1)[at].item()) for z in (x, y))
            raise MismatchError(
                f"{what}, {name}: two runs differ, from the same state and batch: {values} at element {at}"
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _all(result: Result) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a result: metrics and leaves by name, then what leaves lie in, for its padding."""
    state, metrics = result
    yield from ((f"metric {path!r}", x) for path, x in tree.paths_to(metrics, Parts) if isinstance(x, Tensor))
    for path, node in _nodes(state, "extra").items():
        named = _leaves(path, node) if isinstance(node, Parts) else {path: node}
        yield from ((f"leaf {name!r}", x) for name, x in named.items() if isinstance(x, Tensor))
    yield from (("padding", x) for x in tree.leaves(result) if isinstance(x, Tensor))
