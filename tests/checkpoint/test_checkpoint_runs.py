"""Runs that are stopped and go on: with every optimizer, strategy, wire and scaler, on as many ranks or on others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import (
    LM_UNITS,
    STRATEGIES,
    WIRED,
    WORLDS,
    lm_batch,
    lm_params,
    mean_loss,
    rand,
    same_bits,
)
from support.optimizers import ROWS
from support.steps import batch, params, start
from support.worlds import simulated

import fshard
from fshard import checkpoint, tree
from fshard.optim.state import gather_state, shard_state

TXS = {name: row.make() for name, row in ROWS.items()}
# Each takes up what the one before has left: ranks, and a strategy of a plan, or a partition of zero.
WAYS = [("3", "full"), ("2", "flat"), ("2x2", "wide_state"), ("1", "ddp"), ("3", "leaf"), ("4", "keep"), ("2", "zero1"),
        ("2x2", "leaf"), ("2", "zero2"), ("2x2", "wide")]  # fmt: skip


def sizes(world: str) -> dict[str, int]:
    """The numbers of ranks along the axes of a world."""
    return dict(zip(("replicate", "shard"), WORLDS[world], strict=True))


class Run:
    """Training with an optimizer, over a plan or with `zero`: its first state, and a step."""

    def __init__(self, mesh: Any, name: str, how: str):
        self.rank, block = mesh.get_rank(), ROWS[name].block
        # a state of whole parameters may have plain tensors alone: one sharded leaf says which ranks have it
        ranks = fshard.shard_params(torch.zeros(2), fshard.make_plan(torch.zeros(2), mesh))
        if how in STRATEGIES:
            self.first, self.train = start(mesh, TXS[name], plan={**STRATEGIES[how], "block": block})
            self.state = {"params": self.first.params, "opt": self.first.opt_state, "ranks": ranks}
        else:
            self.tx = fshard.zero(TXS[name], mesh, how, bucket=8 * 20, block=block)
            self.state = {"params": params(), "opt": self.tx.init(params()), "ranks": ranks}

    def step(self, state: Any, number: int) -> Any:
        """The next state; data differ between ranks, gradients of whole parameters do not."""
        if hasattr(self, "first"):
            whole = replace(self.first, params=state["params"], opt_state=state["opt"])
            whole, _ = self.train(whole, batch(number, self.rank))
            return {**state, "params": whole.params, "opt": whole.opt_state}
        grads = tree.map(lambda x: rand(*x.shape, seed=number), params())
        new, opt = self.tx.step(grads, state["opt"], state["params"])
        return {**state, "params": new, "opt": opt}

    def placed(self, whole: Any) -> Any:
        """A state on this rank with the values of a whole state."""
        put = self.state["params"]
        plain = tree.map(torch.clone, whole["params"])
        sharded = fshard.shard_params(plain, put.plan) if isinstance(put, fshard.Sharded) else plain
        return {**self.state, "params": sharded, "opt": shard_state(whole["opt"], self.state["opt"])}


def whole_of(state: Any) -> Any:
    """A state with whole parameters, and the whole state of the optimizer by name."""
    return {"params": fshard.gather_params(state["params"]), "opt": gather_state(state["opt"])}


def goes_on(mesh: Any, name: str, how: str, dir: Path, number: int, left: Any) -> Any:
    """Take up what other ranks left, as one would without files; save, and go on from that; what is left now."""
    run = Run(mesh, name, how)
    state = run.state
    if left:
        state = checkpoint.restore(dir, run.state)
        assert same_bits(whole_of(state), left)
        assert same_bits(state, run.placed(left))
    state = run.step(state, number)
    checkpoint.save(dir, state, number, wait=number % 2 == 0).wait()
    again = checkpoint.restore(dir, Run(mesh, name, how).state)
    assert same_bits(again, state)
    assert same_bits(run.step(again, 50), run.step(state, 50))
    return whole_of(state)


@pytest.mark.parametrize("name", ROWS)
def test_every_optimizer_goes_on_elsewhere(tmp_path, name):
    """A moment, count or factor would be lost, or come to another leaf, when a run goes on with another strategy."""
    left, shift = None, 3 * [*ROWS].index(name)
    for number in range(3):  # over all optimizers, each way follows each
        world, how = WAYS[(shift + number) % len(WAYS)]
        results = simulated(goes_on, name, how, tmp_path, number, left, **sizes(world))
        assert all(same_bits(x, results[0]) for x in results)
        left = results[0]


def language_model(mesh: Any, plan: dict[str, Any], seed: int = 0, **kw: Any) -> tuple[Any, Any]:
    """A language model in float32 or as the plan says, with a scaler of which every field has another value."""
    whole = tree.map(lambda x: x.float() * (1 + seed), lm_params())
    scale = fshard.DynamicLossScale(2.0**10, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    tx = fshard.optim.adamw(0.05)
    laid = fshard.make_plan(whole, mesh, **{"units": LM_UNITS, **plan})
    extra = {"best": torch.tensor(3.0 + mesh.get_rank()), "epoch": 4 * (1 - seed), "who": f"rank {mesh.get_rank()}"}
    state = fshard.init_state(fshard.shard_params(whole, laid), tx, scale, seed=7 * (1 - seed), extra=extra)
    return state, fshard.train_step(mean_loss, tx, clip_norm=1.0, **kw)


def stopped(mesh: Any, dir: Path, plan: dict[str, Any]) -> None:
    """A run that is stopped after two steps, and that goes on, equals one that is not stopped."""
    state, step = language_model(mesh, plan)
    for number in range(4):
        if number == 2:
            checkpoint.save(dir, state, 2)
        state, metrics = step(state, lm_batch(number, mesh.get_rank()))
    again, step = language_model(mesh, plan, seed=1)
    again = checkpoint.restore(dir, again)
    for number in (2, 3):
        again, others = step(again, lm_batch(number, mesh.get_rank()))
    assert same_bits((again, others), (state, metrics))


@pytest.mark.parametrize("name", WIRED)
def test_a_run_that_was_stopped(tmp_path, name):
    """A checkpoint would lack something that a run goes on from: a moment, the scale, the seed, or what
    a rank has of its own."""
    simulated(stopped, tmp_path, WIRED[name], **sizes("2x2" if name.startswith("wide") else "3"))
