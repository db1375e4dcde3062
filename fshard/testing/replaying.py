"""Replay recorded steps on simulated ranks: compare the results bit by bit, and find the first non-finite value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..comm.mesh import AnyMesh
from ..core.arguments import check_path
from ..core.losses import is_loss
from ..core.random import seeded
from ..core.scalars import double
from ..core.tree import Tree
from ..grad.grad import value_and_grad
from ..layout.pieces import device_of, named_leaves
from ..sharding.sharded import Sharded
from ..train.accumulate import rank_of
from ..train.step import TrainState
from ..watch.compare import first_unlike
from ..watch.recording import RecordedStep, origin_of, read, recorded_steps
from .rng import with_threads
from .world import World

# `make(mesh)` returns (step, state, batch[, loss_fn or None[, further arguments of the step...]])
Make = Callable[[AnyMesh], tuple[Tree, ...]]


@dataclass(frozen=True)
class Finding:
    """A problem of one leaf on one rank.

    - `what`: the tree of the leaf ("batch", "metrics", ...).
    - `unit`: the unit of the leaf, or None.
    """

    rank: int
    what: str
    path: str
    unit: str | None
    text: str

    def __str__(self) -> str:
        unit = f" (unit {self.unit!r})" if self.unit is not None else ""
        return f"{self.what}: leaf {self.path!r}{unit} on rank {self.rank}: {self.text}"


@dataclass(frozen=True)
class Replayed:
    """The result of a replayed step: the first leaf with other bits, and the first that is not finite, or None."""

    number: int
    num_ranks: int
    different: Finding | None
    nonfinite: Finding | None

    def __str__(self) -> str:
        bits = "other bits" if self.different else "same bits"
        lines = [f"step {self.number} on {self.num_ranks} rank(s): {bits}"]
        lines += [f"  differs first: {self.different}"] * (self.different is not None)
        lines += [f"  not finite first: {self.nonfinite}"] * (self.nonfinite is not None)
        return "\n".join(lines)


def replay(dir: str | Path, make: Make, at: int | None = None) -> list[Replayed]:
    """Run again all steps written to `dir` by `fshard.testing.record`, or only step `at`, and compare every bit.

    Every simulated rank calls `make(mesh)`, with a mesh of the recorded sizes (None for plain parameters). `make`
    returns `(step, state, batch)`, `(step, state, batch, loss_fn)` or, for a step with further arguments, `(step,
    state, batch, loss_fn, *args)`. Recorded values replace all leaves of these. With a `loss_fn`, each rank's
    gradients, before the reduction and times the loss scale, are also searched for non-finite values; the loss of a
    step `with_extra` gets the recorded extra.

    Different bits are searched rank by rank, in the metrics, then in the new state. Non-finite values are searched on
    all ranks, in batch, then old state, gradients, metrics and new state. ValueError if a step cannot be replayed:
    `make` gives other leaves or another plan, ranks are missing, or `record` did not write the files.

    >>> import tempfile
    >>> from fshard.testing import record
    >>> def make(mesh):
    ...     tx = sgd(0.5)
    ...     state = init_state(shard_params(torch.ones(2), make_plan(torch.ones(2), mesh)), tx)
    ...     return train_step(lambda w, x: (w * x).sum(), tx), state, torch.ones(2)
    >>> step, state, batch = make(None)
    >>> state, _ = record(step, folder := tempfile.mkdtemp(), steps={0})(state, batch)
    >>> print(*replay(folder, make))
    step 0 on 1 rank(s): same bits
    """
    folder = check_path("replay: dir", dir)
    return [_replayed(number, read(path), make) for number, path in recorded_steps(folder, at).items()]


def _replayed(number: int, recorded: Sequence[RecordedStep], make: Make) -> Replayed:
    axes, threads = (recorded[0].about[key] for key in ("axes", "threads"))
    if axes:
        world = World(axes=axes, threads=threads)
        by_rank = world.run(lambda mesh: _again(mesh, make, recorded[mesh.get_rank()]))
    else:
        by_rank = [with_threads(threads)(_again)(None, make, recorded[0])]
    different = [finding for findings, _ in by_rank for finding in findings]
    nonfinite = [pair for _, pairs in by_rank for pair in pairs]
    _, first = min(nonfinite, key=lambda pair: pair[0], default=(0, None))  # earliest stage, then lowest rank
    return Replayed(number, len(recorded), next(iter(different), None), first)


def _again(mesh: AnyMesh, make: Make, recorded: RecordedStep) -> tuple[list[Finding], list[tuple[int, Finding]]]:
    step, like, batch_like, *more = make(mesh)
    loss_fn, args_like = (more[0], tuple(more[1:])) if more else (None, ())
    rank = recorded.about["rank"]
    recorded.check_plan(origin_of(like)["plan"])
    likes = {"state": like, "batch": batch_like, "args": args_like}
    state, batch, args = (recorded.tree("before", what, tree) for what, tree in likes.items())
    stages = [("batch", (batch, *args) if args else batch), ("the state before", state)]
    if loss_fn is not None:
        loss_args = [*[state.extra] * getattr(step, "with_extra", False), batch, *args]
        stages.append(("gradients", _loss_gradients(loss_fn, state, loss_args)))
    # before the step, which may update its state in place
    nonfinite = [(i, finding) for i, (what, x) in enumerate(stages) for finding in _nonfinite(rank, what, x)]
    after, metrics = step(state, batch, *args)
    different = list[Finding]()
    for i, (what, x, name) in enumerate([("metrics", metrics, "metrics"), ("the new state", after, "state")], start=3):
        nonfinite += [(i, finding) for finding in _nonfinite(rank, what, x)]
        if unlike := first_unlike(x, recorded.tree("after", name, x)):
            place, text = unlike
            different.append(Finding(rank, what, place.path, place.unit, text))
    return different, nonfinite


def _loss_gradients(loss_fn: Callable[..., Tree], state: TrainState, args: Sequence[Tree]) -> Tree:
    if not isinstance(state.params, Sharded):
        raise ValueError("replay: a loss function was given: expected a state of sharded parameters, got plain ones")

    def scaled(params: Sharded, *args: Tree) -> Tree:
        out = loss_fn(params, *args)
        loss, scale = out[0] if isinstance(out, tuple) else out, state.loss_scale.scale
        return loss.on_totals(scale) if is_loss(loss) else scale(loss)

    with seeded(state.rng, state.step, rank_of(state.params), 0, device_of(state.params)):
        return value_and_grad(scaled, reduce=False)(state.params, *args)[1].local


def _nonfinite(rank: int, what: str, x: Tree) -> Iterator[Finding]:
    for place in named_leaves(x):
        value = double(place.value) if isinstance(place.value, float) else place.value
        if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1:
            value = value.float()  # torch has no isfinite of float8
        if isinstance(value, Tensor) and (bad := ~value.detach().isfinite()).any():
            first = int(bad.reshape(-1).int().argmax())
            text = f"element {first} is {value.detach().reshape(-1)[first].item()}, {int(bad.sum())} of {bad.numel()}"
            yield Finding(rank, what, place.path, place.unit, f"{text} are not finite")
