"""Leaves that no unit claims: those before the first claimed leaf, those after the last, and the root between them."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.worlds import simulated

import fshard

CASES: dict[str, tuple[list[str], list[str]]] = {  # the leaves in their order, and the units
    "both ends": (["embed", "0", "1", "norm", "head"], ["(first)", "0", "1", "(last)"]),
    "between": (["embed", "0", "mid", "1", "head"], ["(root)", "(first)", "0", "1", "(last)"]),
    "nothing before": (["0", "1", "head"], ["0", "1", "(last)"]),
    "nothing after": (["embed", "0", "1"], ["(first)", "0", "1"]),
    "tied": (["tied", "0", "1", "norm", "tied again"], ["(root)", "0", "1", "(last)"]),
    "tied to a unit": (["tied", "embed", "0", "1 tied", "head"], ["(root)", "(first)", "0", "1 tied", "(last)"]),
    "nothing claimed": (["embed", "head"], ["(root)"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_root_is_cut_at_the_first_and_last_unit(name: str) -> None:
    """What is used first and what is used last are units, a leaf used on both sides is in the root: else the head would
    live all along, or a tied leaf be gathered twice."""
    names, expected = CASES[name]
    tied = torch.zeros(5)
    params = {leaf: tied if "tied" in leaf else torch.zeros(3) for leaf in names}
    claimed = [leaf for leaf in names if leaf[0] in "01"]
    assert [unit.name for unit in fshard.make_plan(params, units=claimed or None).units] == expected


def _gathers(mesh: Any, how: str) -> Counter[str]:
    params = {"shared": torch.ones(4), "blocks": [torch.full((4,), i + 1.0) for i in range(5)], "head": torch.ones(4)}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units="blocks.*"))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"]:
            x = x * block * p["shared"]
        return (x * p["head"]).sum()

    whole = torch.func.grad(lambda p, x: loss(fshard.gather_params(p), x))
    fn = whole if how == "torch.func" else fshard.value_and_grad(loss)
    if how != "eager":
        found = fshard.jit(fn, bucket=0).lower(sharded, torch.ones(4)).collectives()
        return Counter({traffic.unit: traffic.count for traffic in found if traffic.kind == "all_gather"})
    with fshard.collectives.tally() as calls:
        fn(sharded, torch.ones(4))
    return Counter(call.label for call in calls if call.kind == "all_gather")


@pytest.mark.parametrize("how", ["eager", "graph", "torch.func"])
def test_what_every_unit_reads_is_not_gathered_for_each(how: str) -> None:
    """A leaf declared before the units and read in each stays gathered from its second read on: otherwise it would be
    gathered once for each unit."""
    for counts in simulated(_gathers, how, shard=2):
        assert counts["(first)"] <= 3  # twice in the forward, once in the backward


def test_an_embedding_and_a_head_are_not_in_memory_together() -> None:
    """The buffers of both, or the gradients of both, would be in memory at once: four times the bytes of one of them
    beside the shards, and not two."""
    words, dim = 512, 8
    params = {"embed": torch.zeros(words, dim), "blocks": [torch.eye(dim) for _ in range(4)]}
    params |= {"head": torch.zeros(dim, words)}
    plan, tx = fshard.make_plan(params, fshard.AbstractMesh(shard=64), units="blocks.*"), fshard.optim.sgd(0.1)

    def loss(p: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = p["embed"][tokens]
        for block in p["blocks"]:
            x = torch.tanh(x @ block)
        return (x @ p["head"]).square().mean()

    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params)
    lowered = fshard.jit(fshard.train_step(loss, tx), bucket=0).lower(state, torch.zeros(2, dtype=torch.long))
    assert lowered.memory().peak < 3 * 4 * words * dim
