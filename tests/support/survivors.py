"""A small run of which ranks are lost, on simulated ranks, and the same segments joined by checkpoints."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import fshard
from fshard import checkpoint, elastic, optim
from fshard.core.tree import Tree
from fshard.elastic import Kept
from fshard.testing import World
from fshard.testing.scheduler import Fault, RankDied

ROWS = 12  # of a step, over all ranks
NOTE = {"tag": "run", "n": 3}  # plain leaves beside the state


class Kind(NamedTuple):
    """A plan and a step; `outer`: the number of ranks along the first axis, where it divides the ranks."""

    plan: Mapping[str, Any] = {}
    axes: tuple[str, ...] = ("shard",)
    tx: str = "adamw"
    step: Mapping[str, Any] = {}
    jit: bool = False


_BOTH = dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard"))
_TWO = ("replicate", "shard")
_SPLIT = {"split": {"blocks.*.w": ("tensor", 1, 2), "blocks.*.v": ("tensor", 0)}}
KINDS = {
    "ddp": Kind({"strategy": "ddp"}),
    "zero1": Kind({"strategy": "zero1"}, tx="sgd"),
    "zero2": Kind({"strategy": "zero2"}),
    "zero3": Kind(),
    "hsdp": Kind({"strategy": "hsdp"}, _TWO),
    "state over all": Kind({"state_over": _TWO}, _TWO, tx="sgd"),
    "two axes": Kind(_BOTH, _TWO),
    "donated": Kind(step={"donate": True}),
    "in the backward": Kind(step={"donate": True, "in_backward": True, "clip_norm": None}, tx="sgd"),
    "by leaf": Kind(tx="muon"),
    "split": Kind(_SPLIT, ("shard", "tensor")),
    "whole leaves": Kind({"whole": "**.b"}, tx="sgd"),
    "jit": Kind(jit=True),
}
TX = {"adamw": optim.adamw(1e-2), "sgd": optim.sgd(0.1, momentum=0.9), "muon": optim.muon(1e-2)}


def axes_of(kind: str, ranks: int) -> dict[str, int]:
    """The axes of a mesh of so many ranks: two axes if these divide by two."""
    first, *more = KINDS[kind].axes
    if not more:
        return {first: ranks}
    two = 2 - ranks % 2
    return {first: ranks // two, more[0]: two}


def params() -> Tree:
    """Leaves of odd sizes."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"w": (6, 8), "b": (8,), "v": (8, 6)}
    blocks = [{name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()} for _ in range(2)]
    return {"embed": torch.randn(7, 6, generator=draw), "blocks": blocks, "head": torch.randn(6, 5, generator=draw)}


def batch_of(step: int, rank: int, ranks: int) -> Tensor:
    """This rank's rows: a row depends on step and number alone."""
    rows = torch.randint(0, 7, (ROWS, 4), generator=torch.Generator().manual_seed(1000 + step))
    return rows[rank * ROWS // ranks : (rank + 1) * ROWS // ranks]


def loss_of(mesh: Any, kind: str) -> Any:
    """A loss with dropout; split leaves are made whole."""
    splits = KINDS[kind].plan.get("split", {})

    def whole(block: Tree, name: str) -> Tensor:
        split = splits.get(f"blocks.*.{name}")
        return fshard.all_gather(block[name], mesh, "tensor", dim=split[1]) if split else block[name]

    def loss(p: Tree, batch: Tensor) -> fshard.Mean:
        x = p["embed"][batch[:, :-1]]
        for block in p["blocks"]:
            h = F.dropout(torch.tanh(x @ whole(block, "w") + block["b"]), 0.2)
            x = x + h @ whole(block, "v")
        total = F.cross_entropy((x @ p["head"]).flatten(0, 1), batch[:, 1:].flatten() % 5, reduction="sum")
        return fshard.Mean(total, batch[:, 1:].numel())

    return loss


def new_state(mesh: Any, kind: str) -> fshard.TrainState:
    """A state before the first step."""
    plan = fshard.make_plan(params(), mesh, units=["blocks.*"], **KINDS[kind].plan)
    return fshard.init_state(fshard.shard_params(params(), plan), TX[KINDS[kind].tx], seed=7)


def new_step(mesh: Any, kind: str) -> Any:
    """The step of a kind."""
    it = KINDS[kind]
    step = fshard.train_step(loss_of(mesh, kind), TX[it.tx], **{"clip_norm": 1.0, **it.step})
    return fshard.jit(step, backend="eager") if it.jit else step


@dataclass
class Trail:
    """By round its ranks, and the key of the state it began from; whether all ranks ever held a state."""

    rounds: dict[int, tuple[int, tuple[int, int] | None]] = field(default_factory=dict)
    begun: bool = False


def last_key(mesh: Any, held: list[Kept], begun: bool) -> tuple[int, int] | None:
    """The key of the last whole state; None if there never was one."""
    try:
        return elastic.last_whole(held, mesh)
    except elastic.LostError:
        if begun:
            raise
        return None


def start(mesh: Any, held: list[Kept], like: Tree, round: int, trail: Trail) -> tuple[Tree, int]:
    """The state with which a round begins, kept beside the one from which it was made until all ranks have it."""
    key = last_key(mesh, held, trail.begun)
    trail.rounds[round] = mesh.size(), key
    state, first = (like, 0) if key is None else (elastic.move(held, like, mesh=mesh), key[1])
    held[:] = [*(kept for kept in held if kept.key == key), elastic.keep(state, first, round=round)]
    for axis in mesh.mesh_dim_names:
        fshard.all_reduce(torch.ones(1), mesh, axis)
    trail.begun = True
    return state, first


def train(
    mesh: Any, held: list[Kept], kind: str, round: int, steps: int, trail: Trail, reuse: bool = True
) -> fshard.TrainState:
    """A run that goes on from what all ranks hold."""
    begun, first = start(mesh, held, {"train": new_state(mesh, kind), **NOTE}, round, trail)
    state, step = begun["train"], new_step(mesh, kind)
    data, number = data_rank(mesh, kind)
    for k in range(first, steps):
        state, _ = step(state, batch_of(k, data, number))
        old = held[-2] if len(held) > 1 and reuse else None
        kept = elastic.keep({"train": state, **NOTE}, k + 1, round=round, reuse=old)
        held[:] = [held[-1], kept]
    return state


def data_rank(mesh: Any, kind: str) -> tuple[int, int]:
    """This rank's number of those with batches of their own, and how many these are."""
    axes = tuple(axis for axis in KINDS[kind].axes if axis != "tensor")
    return fshard.rank_and_size(mesh, axes)


def one_round(
    members: Sequence[list[Kept]], kind: str, round: int, steps: int, trail: Trail, faults: Sequence[Fault] = ()
) -> Tree | None:
    """The state after `steps`, made whole; None if a rank has died. `members`: what each rank holds."""
    world = World(axes=axes_of(kind, len(members)), faults=faults)

    def on_rank(mesh: Any) -> Tree:
        return whole(train(mesh, members[mesh.get_rank()], kind, round, steps, trail))

    try:
        return world.run(on_rank)[0]
    except RankDied:
        return None


def whole(state: fshard.TrainState) -> Tree:
    """The whole leaves of a state."""
    return fshard.tree.leaves(fshard.testing.whole_state(state))


def segments(trail: Trail) -> tuple[tuple[int, int], ...]:
    """(ranks, first step) of the rounds that led to the last one's states, back to a new state."""
    found = list[tuple[int, int]]()
    at: tuple[int, int] | None = (max(trail.rounds), 0)
    while at is not None:
        ranks, at = trail.rounds[at[0]]
        found.append((ranks, at[1] if at else 0))
    return (*reversed(found),)


@cache
def joined(kind: str, trail: tuple[tuple[int, int], ...], steps: int) -> Tree:
    """The same segments, (ranks, first step), joined by checkpoints in a folder."""
    result, lasts = None, [first for _, first in trail[1:]] + [steps]
    with tempfile.TemporaryDirectory() as folder:

        def segment(mesh: Any, first: int, last: int) -> Tree:
            state, step = new_state(mesh, kind), new_step(mesh, kind)
            state = checkpoint.restore(folder, state, step=first) if first else state
            data, number = data_rank(mesh, kind)
            for k in range(first, last):
                state, _ = step(state, batch_of(k, data, number))
            checkpoint.save(folder, state, last)
            return whole(state)

        for (ranks, first), last in zip(trail, lasts, strict=True):
            if first < last:
                result = World(axes=axes_of(kind, ranks)).run(segment, first, last)[0]
    return result


def collectives(kind: str, ranks: int, steps: int) -> int:
    """How many collectives rank 0 makes in a run without deaths."""
    world = World(axes=axes_of(kind, ranks))
    world.run(lambda mesh: train(mesh, [], kind, 0, steps, Trail()))
    return sum(0 in one.ranks for one in world.log)
