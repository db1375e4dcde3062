"""Gathered parameters that stay from one micro-batch to the next (`train_step(keep_gathered=True)`)."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.comm.ranks import tally

UNITS = 3


def layer(p: Any, x: Tensor) -> Tensor:
    """One layer."""
    return F.linear(x.to(p["w"].dtype), p["w"], p["b"]).tanh()


def stack(p: Any, x: Tensor) -> Tensor:
    """Layers one after the other."""
    for each in p["layers"]:
        x = layer(each, x)
    return x.square().mean()


def checkpointed(p: Any, x: Tensor) -> Tensor:
    """Layers that run again in the backward."""
    for each in p["layers"]:
        x = checkpoint(layer, each, x, use_reentrant=False)
    return x.square().mean()


def penalised(p: Any, x: Tensor) -> Tensor:
    """Reverse mode inside a loss: the loss runs twice."""
    return stack(p, x) + torch.func.grad(lambda x: stack(p, x))(x).square().sum()


def repeated(p: Any, x: Tensor) -> Tensor:
    """A layer that is read before others and after them."""
    for number in (0, 1, 0, 2):
        x = layer(p["layers"][number], x)
    return x.square().mean()


def other_each_time(p: Any, x: Tensor) -> Tensor:
    """Which layers are read depends on the micro-batch: one may be gathered first in a later one."""
    first = int(x[0, 0].abs() * 10) % UNITS
    return layer(p["layers"][first], x).square().mean() + layer(p["layers"][0], x).mean()


OVER = ("params_over", "grads_over", "state_over")
LOSSES = [stack, checkpointed, penalised, repeated]
# the strategy, and how many gathers of a unit a step has with `keep_gathered`: one for each axis
STRATEGIES: dict[str, tuple[dict[str, Any], int]] = {
    "full": ({}, 1),
    "keep": ({"regather": False}, 1),
    "ddp": ({"params_over": (), "grads_over": (), "state_over": ()}, 0),
    "zero": ({"params_over": ()}, 1),  # new parameters, of the optimizer's state
    "half": ({"policy": "compute=bf16"}, 1),
    "wire": ({"param_wire": fshard.wire.Int8()}, 1),
    "together": ({"together": True, "policy": "; layers.*.b: reduce=f32"}, 1),
    "whole and frozen": ({"whole": "layers.0.w", "frozen": "layers.1"}, 1),
    "copies": (dict.fromkeys(OVER, ("replicate", "shard")) | {"regather": "shard"}, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tree": {"reduction": "tree"},
    "once": {"reduce_once": True},
    "donated": {"donate": True, "clip_norm": 0.1},
}
PAIRS = [pair for pair in itertools.product(STRATEGIES, OPTIONS) if pair != ("wire", "tree")]  # slices take no wire


def train(mesh: Any, loss: Any, plan: Any, options: Any, jitted: bool, keep: bool) -> tuple[Any, list[str]]:
    """Parameters and loss after two steps of four micro-batches, and the labels of all gathers."""
    params = {"layers": [{"w": rand(5, 5, seed=i), "b": rand(5, seed=9 + i)} for i in range(UNITS)]}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["layers.*"], **plan))
    tx = optim.adamw(lr=0.01)
    state = fshard.init_state(sharded, tx)
    step: Any = fshard.train_step(loss, tx, accumulate=4, keep_gathered=keep, **options)
    step = fshard.jit(step, backend="eager", bucket=0) if jitted else step
    with tally() as calls:
        for number in range(2):
            state, metrics = step(state, rand(8, 5, seed=100 * number + sum(mesh.get_coordinate())))
    return (fshard.gather_params(state.params), metrics["loss"]), [call.label for call in calls.select("all_gather")]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(("strategy", "options"), PAIRS)
def test_each_unit_is_gathered_once_a_step(loss: Any, strategy: str, options: str) -> None:
    """Of the same step, with the same bits. A unit that was dropped too early is gathered again; one that was kept too
    long has the values of the step before."""
    plan, gathers = STRATEGIES[strategy]
    replicate = 1 + (strategy == "copies")
    several, once = (
        simulated(train, loss, plan, OPTIONS[options], False, keep, replicate=replicate)[0] for keep in (False, True)
    )
    assert same_bits(several[0], once[0])
    before, after = (Counter(labels) for _, labels in (several, once))
    for name in (f"layers.{number}" for number in range(UNITS)):
        # sums in a tree may gather, too, where ranks hold whole gradients
        assert after[name] == 2 * gathers or (options == "tree" and (not gathers or "whole" in plan))
        assert before[name] > after[name] or not plan.get("params_over", "shard")


@pytest.mark.parametrize("strategy", ["full", "half", "wire"])
@pytest.mark.parametrize("loss", [stack, repeated], ids=lambda loss: loss.__name__)
def test_a_graph_gathers_each_unit_once(loss: Any, strategy: str) -> None:
    """The passes would gather the unit again for each backward, as the plan says of units that do not stay."""
    several, once = (simulated(train, loss, STRATEGIES[strategy][0], {}, True, keep)[0] for keep in (False, True))
    assert same_bits(several[0], once[0])
    assert len(once[1]) == 2 * UNITS < len(several[1])


def test_which_units_are_read_may_differ_by_micro_batch() -> None:
    """A unit that the first micro-batch does not read is gathered by the first that does, and stays."""
    several, once = (simulated(train, other_each_time, {}, {}, False, keep, shard=1)[0] for keep in (False, True))
    assert same_bits(several[0], once[0])


def test_on_processes() -> None:
    """Buffers that peers lend stay good for the whole step."""
    for plan in ({}, {"policy": "compute=bf16"}):
        several, once = (gloo(train, stack, plan, {}, False, keep, shard=2) for keep in (False, True))
        assert all(same_bits(a[0], b[0]) and len(b[1]) == 2 * UNITS for a, b in zip(several, once, strict=True))


def test_it_is_said_to_other_ranks_and_refused_where_it_has_no_meaning() -> None:
    """A rank that keeps nothing would wait for gathers of the others; an update in the backward has one micro-batch."""

    def differs(mesh: Any) -> None:
        train(mesh, stack, {}, {}, False, keep=mesh.get_local_rank("shard") == 0)

    with pytest.raises(fshard.MismatchError, match="keep_gathered=True"):
        simulated(differs)
    with pytest.raises(ValueError, match=r"in_backward=True\) with keep_gathered=True: there is one micro-batch"):
        fshard.train_step(stack, optim.adamw(lr=0.1), in_backward=True, donate=True, keep_gathered=True)
    with pytest.raises(TypeError, match="keep_gathered=1"):
        fshard.train_step(stack, optim.adamw(lr=0.1), keep_gathered=1)  # type: ignore[arg-type]
