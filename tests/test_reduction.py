"""Who adds gradients up may be replaced; hooks after it; float16 holds sums of many ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import LM_UNITS, STRATEGIES, lm_batch, lm_params, mean_loss
from torch import Tensor
from worlds import gloo, simulated

import fshard
from fshard import comm, gather_params, optim
from fshard.comm import Pending


@dataclass(frozen=True)
class Gathered:
    """Everything to everyone, added up from the last rank to the first; `after` doubles what `only` is the unit of."""

    only: str = ""

    def all_reduce(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        into = torch.empty_like(x) if out is None else out
        return comm.all_gather(x, ranks, label).then(lambda full: into.copy_(full.view(ranks.size, -1).flip(0).sum(0)))

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        own = x.numel() // ranks.size * ranks.rank
        into = x.new_empty(x.numel() // ranks.size) if out is None else out
        return self.all_reduce(x, ranks, label, None).then(lambda s: into.copy_(s[own : own + into.numel()]))

    def after(self, grads: Tensor, unit: str) -> Tensor:
        return 2 * grads if unit == self.only else grads


def steps(mesh: Any, strategy: str, reduction: Any, **kw: Any) -> Any:
    """Parameters after three steps, and the kinds of collectives for gradients."""
    params = lm_params()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS, **STRATEGIES[strategy]))
    tx = optim.sgd(0.1)
    state, step = fshard.init_state(sharded, tx), fshard.train_step(mean_loss, tx, reduction=reduction, **kw)
    with fshard.tally() as records:
        for i in range(3):
            state, _ = step(state, lm_batch(i, mesh.get_rank()))
    return gather_params(state.params), {r.kind for r in records if r.label == "blocks.0" and r.nbytes}


@pytest.mark.parametrize("strategy", ["full", "ddp"])
@pytest.mark.parametrize("world", [simulated, gloo])
def test_an_object_may_add_up(world, strategy):
    """It is asked for every sum of gradients, and nothing else is: the same parameters, up to the order of sums."""
    for (found, kinds), (want, _) in zip(
        world(steps, strategy, Gathered(), shard=2), simulated(steps, strategy, "exact", shard=2), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        assert kinds == {"all_gather"}


@pytest.mark.parametrize("kw", [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": True}], ids=str)
def test_a_hook_after_it(kw):
    """It is given every unit's sum with the unit's name, once for each reduction, and what it gives is used."""

    def run(mesh: Any, unit: str) -> Any:
        return steps(mesh, "full", Gathered(unit), **kw)[0]

    plain, doubled = (simulated(run, unit, shard=3)[0] for unit in ("", "tail"))
    start = lm_params()
    way = [[end - begin for end, begin in zip(found["tail"], start["tail"], strict=True)] for found in (plain, doubled)]
    assert all((b.abs() > 1.5 * a.abs()).all() for a, b in zip(*way, strict=True))


def small_gradients(mesh: Any, policy: str, size: float) -> Tensor:
    """The mean over ranks of a gradient of one size."""
    w = torch.zeros(16)
    plan = fshard.make_plan(w, mesh, policy=policy)
    loss = fshard.value_and_grad(lambda p, x: fshard.Mean((p * x).sum(), 1))
    return gather_params(loss(fshard.shard_params(w, plan), torch.full((16,), size))[1])


@pytest.mark.parametrize("size", [1e-6, 6e4])
def test_float16_holds_the_sums_of_64_ranks(size):
    """About the root of their number is divided by after sending: small gradients arrive, sums of large ones fit."""
    for found in simulated(small_gradients, "reduce=f16", size, shard=64):
        torch.testing.assert_close(found, torch.full((16,), size), rtol=0.1, atol=0)
    assert torch.tensor(1e-6 / 64).half() == 0
