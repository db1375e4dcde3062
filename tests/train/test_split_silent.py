"""What is silent in a split loss: no error, and another loss than the plain one, which is how it is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.split_models import drawn, page
from torch import Tensor

import fshard
from fshard.testing import World

Step = Callable[[Any, Tensor, Any, Callable[[Tensor], Tensor]], tuple[Tensor, int]]


def _right(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    return (add(page().mlp(p, x)) + p["bias"] - x).square().sum(), len(x)


def _part_of_a_total(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    rank, ranks = fshard.rank_and_size(mesh, "tensor")
    each = (add(page().mlp(p, x)) + p["bias"] - x).square()
    return each.chunk(ranks, -1)[rank].sum(), len(x)


def _bias_before_the_sum(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    return (add(page().mlp(p, x) + p["bias"]) - x).square().sum(), len(x)


def _no_sum(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    return (page().mlp(p, x) + p["bias"] - x).square().sum(), len(x)


def _two_sums(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    return (add(add(page().mlp(p, x))) + p["bias"] - x).square().sum(), len(x)


def _other_masks(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    generator = torch.Generator().manual_seed(fshard.rank_and_size(mesh, "tensor")[0])
    mask = (torch.rand(x.shape, generator=generator) < 0.5).double()
    return (add(page().mlp(p, mask * x)) + p["bias"] - x).square().sum(), len(x)


def _sum_for_a_mean(p: Any, x: Tensor, mesh: Any, add: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
    return _right(p, x, mesh, add)[0], 0  # a `Sum`


LOSSES: dict[str, Step] = {
    "a part of a total": _part_of_a_total,
    "a bias before the sum": _bias_before_the_sum,
    "no sum": _no_sum,
    "two sums": _two_sums,
    "other masks": _other_masks,
    "a Sum": _sum_for_a_mean,
}
WHOLE = {"up": (8, 10), "up_bias": (10,), "down": (10, 8), "bias": (8,)}
SPLIT = {"up": ("tensor", 1), "up_bias": ("tensor", 0), "down": ("tensor", 0)}


def trained(mesh: Any, name: str) -> Any:
    """Loss and parameters of a clipped step."""
    draw = drawn(0)
    whole, x = {name: draw(*shape) for name, shape in WHOLE.items()}, draw(4, 8)
    plan = fshard.make_plan(whole, mesh, split=SPLIT if mesh else None)
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)

    def loss(p: Any, x: Tensor) -> Any:
        total, count = LOSSES.get(name, _right)(p, x, mesh, lambda y: fshard.all_reduce(y, mesh, "tensor"))
        return fshard.Mean(total, count) if count else fshard.Sum(total)

    state, metrics = fshard.train_step(loss, tx, clip_norm=1.0)(
        state, x if mesh is None else x.chunk(2)[mesh.get_local_rank("shard")]
    )
    return metrics["loss"], fshard.gather_params(state.params)


@pytest.mark.parametrize("name", ["right", *LOSSES])
def test_what_is_silent_changes_the_loss(name: str) -> None:
    """The page says that the losses differ; if they did not, nothing would tell."""
    plain = trained(None, name)
    results = World(axes={"shard": 2, "tensor": 2}).run(trained, name)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)  # and on all ranks it is the same
    assert torch.allclose(results[0][0], plain[0], rtol=1e-3) == (name == "right")
