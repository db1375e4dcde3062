"""Steps that are recorded and run again: what `fshard replay` is given to import."""

from typing import Any

import torch

import fshard
from fshard.comm.mesh import Mesh
from fshard.core.tree import Tree

from .models import LM_UNITS, lm_batch, lm_params, mean_loss, rand

CLEAN, BAD = 1, 3  # numbers of steps


def loss(params: Tree, batch: Tree, *args: Tree) -> fshard.Mean:
    """With dropout; a batch may have a gain. Other arguments are not read."""
    out = mean_loss(params, batch)
    kept = torch.nn.functional.dropout(batch["gain"], 0.25).mean()
    return fshard.Mean(out.total * kept, out.count)


def batch(step: int, rank: int) -> dict[str, Tree]:
    """Rank 1's of step `BAD` is too large."""
    rows = lm_batch(step, rank)
    large = 1e300 if (step, rank) == (BAD, 1) else 1.0
    gain = large * rand(5 + len(rows["mask"]), seed=rank).abs()  # of which a view is used
    return rows | {"gain": gain[5:], "none": None}


def make(mesh: Mesh, scale: float = 2.0**100, **kw: Any) -> tuple[Tree, ...]:
    """Two units and the rest, Adam in two labels, a loss scale in which a large gain overflows."""
    params = lm_params()
    tx = fshard.optim.by_label(
        {"m": fshard.optim.adamw(0.01), "v": fshard.optim.sgd(0.1, momentum=0.9)},
        lambda path, leaf: "m" if leaf.ndim > 1 else "v",
    )
    plan = fshard.make_plan(params, mesh, units=LM_UNITS)
    state = fshard.init_state(
        fshard.shard_params(params, plan), tx, fshard.DynamicLossScale(scale), seed=5, extra={"note": "kept"}
    )
    return fshard.train_step(loss, tx, **{"accumulate": 2, "clip_norm": 1.0, **kw}), state, batch(0, 0), loss


def without_loss(mesh: Mesh) -> tuple[Tree, ...]:
    """The same, of which the gradients are not looked at."""
    return make(mesh)[:3]


def otherwise(mesh: Mesh) -> tuple[Tree, ...]:
    """A step that clips otherwise."""
    return make(mesh, clip_norm=0.5)


def otherwise_on_rank_1(mesh: Mesh) -> tuple[Tree, ...]:
    """A step after which rank 1 has another bit in a leaf of the second block."""
    step, *rest = make(mesh)

    def wrong(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        after, metrics = step(state, batch)
        if mesh.get_rank() == 1:
            after.params.local_views()["blocks.1.w"].view(torch.int64)[2] ^= 1
        return after, metrics

    return wrong, *rest


def other_metrics_on_rank_1(mesh: Mesh) -> tuple[Tree, ...]:
    """A step after which rank 1 has another bit in the loss too."""
    step, *rest = otherwise_on_rank_1(mesh)

    def wrong(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        after, metrics = step(state, batch)
        if mesh.get_rank() == 1:
            metrics["loss"].view(torch.int64).bitwise_xor_(1)
        return after, metrics

    return wrong, *rest


def other_plan(mesh: Mesh) -> tuple[Tree, ...]:
    """Everything in one unit."""
    step, _, like, _ = make(mesh)
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(lm_params(), fshard.make_plan(lm_params(), mesh, units=[])), tx)
    return step, state, like


def other_state(mesh: Mesh) -> tuple[Tree, ...]:
    """Another optimizer."""
    step, state, like, _ = make(mesh)
    return step, fshard.init_state(state.params, fshard.optim.sgd(0.1)), like


def other_batch(mesh: Mesh) -> tuple[Tree, ...]:
    """A batch that lacks something."""
    step, state, _, _ = make(mesh)
    return step, state, lm_batch(0, 0)
