"""Means whose count depends on the parameters: the derivative of the sum of totals over the sum of counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.worlds import simulated

import fshard
from fshard import tree
from fshard.testing import oracle

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero2": {"params_over": ()},
}


def parameters() -> dict[str, torch.Tensor]:
    """Two units of odd sizes."""
    return {"w": torch.linspace(-1, 1, 5, dtype=torch.float64), "gate": torch.linspace(0, 2, 3, dtype=torch.float64)}


def batch_of(rank: int) -> torch.Tensor:
    """Different data, and a different number of rows, on every rank."""
    return torch.randn(2 + rank, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weighted(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Rows weighted by a trained gate, over the sum of the weights."""
    weights = (x[:, :3] @ p["gate"]).sigmoid()
    return fshard.Mean((weights * (x @ p["w"]).square()).sum(), weights.sum())


def count_alone(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Only the count depends on parameters."""
    return fshard.Mean(x.square().sum(), (x[:, :3] @ p["gate"]).sigmoid().sum().float())


LOSSES = {"weighted": weighted, "count alone": count_alone}


def plainly(loss: Callable[..., fshard.Mean], num_ranks: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All ranks' totals over all ranks' counts, differentiated by autograd."""
    whole = {path: x.requires_grad_() for path, x in parameters().items()}
    outs = [loss(whole, batch_of(rank)) for rank in range(num_ranks)]
    value = sum(out.total for out in outs) / sum(out.count for out in outs)
    grads = torch.autograd.grad(value, list(whole.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(whole, grads, strict=True))


def gradients(mesh: Any, name: str) -> dict[str, Any]:
    """The value and gradients under every strategy, reduced at once and later."""
    found, rank = {}, 0 if mesh is None else mesh.get_rank()
    for key, strategy in STRATEGIES.items():
        plan = fshard.make_plan(parameters(), mesh, units=["gate"], **strategy)
        sharded = fshard.shard_params(parameters(), plan)
        value, grads = fshard.value_and_grad(LOSSES[name])(sharded, batch_of(rank))
        _, own = fshard.value_and_grad(LOSSES[name], reduce=False)(sharded, batch_of(rank))
        found[key] = (value, fshard.gather_params(grads))
        found[key, "later"] = (value, fshard.gather_params(fshard.reduce_grads(own)))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_count_is_differentiated(name: str) -> None:
    """A `Mean` whose count depends on parameters would have a wrong gradient."""
    tolerance = 1e-12 if name == "weighted" else 1e-6
    for shard in (0, 1, 2, 3):
        value, expected = plainly(LOSSES[name], max(shard, 1))
        for found in simulated(gradients, name, shard=shard) if shard else [gradients(None, name)]:
            for key, (loss, grads) in found.items():
                torch.testing.assert_close(loss, value, rtol=tolerance, atol=0, msg=str(key))
                assert grads.keys() == expected.keys(), key
                for path, grad in grads.items():
                    torch.testing.assert_close(grad, expected[path], rtol=tolerance, atol=tolerance, msg=str(key))


def steps(mesh: Any, jitted: bool, **more: Any) -> Any:
    """Parameters after two steps with a loss scale."""
    tx = fshard.optim.sgd(0.1)
    step: Any = fshard.train_step(weighted, tx, **more)
    step = fshard.jit(step, backend="eager") if jitted else step
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    state = fshard.init_state(sharded, tx, fshard.StaticLossScale(8.0))
    for _ in range(2):
        state, metrics = step(state, batch_of(0 if mesh is None else mesh.get_rank()))
    return metrics["loss"], fshard.gather_params(state.params)


@pytest.mark.parametrize("jitted", [False, True])
def test_steps_equal_the_oracle(jitted: bool) -> None:
    """A scaled or compiled step would lose that derivative."""
    init, step = oracle(weighted, fshard.optim.sgd(0.1))
    state = init(parameters(), fshard.StaticLossScale(8.0))
    for _ in range(2):
        state, metrics = step(state, [batch_of(rank) for rank in range(2)])
    for loss, params in simulated(steps, jitted, shard=2):
        torch.testing.assert_close(loss, metrics["loss"], rtol=1e-12, atol=0)
        for a, b in zip(tree.leaves(params), tree.leaves(state.params), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more", [{"accumulate": 2}, {"accumulate": 2, "reduce_once": True}, {"reduction": "tree"}])
def test_a_count_of_parts_is_an_error(more: dict[str, Any]) -> None:
    """With micro-batches the gradient of such a count would be silently wrong."""
    with pytest.raises(ValueError, match=r"count of its fshard.Mean depends on parameters.* Detach the count"):
        steps(None, jitted=False, **more)
