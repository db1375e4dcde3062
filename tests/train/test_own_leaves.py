"""Leaves that are neither cut nor reduced: each rank's own values, which a step threads as `extra`."""

from typing import Any

import pytest
import torch
from support.chains import CHAIN, apply_block, assert_near, batch_of, by_path, chain_params, make, randn
from support.worlds import simulated

import fshard

RATE, TURNS = 0.1, 2
STRATEGIES = [{}, {"regather": False}, {"params_over": ()}]


def total_of(p: Any, own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A sum over rows, of blocks with a rank's own shift between them."""
    x = x * p["scale"].sin()
    for i, block in enumerate(p["blocks"]):
        x = apply_block(block, x) + own[i]
    return (x * p["head"]).square().sum()


def loss_fn(p: Any, own: torch.Tensor, x: torch.Tensor) -> tuple[fshard.Mean, torch.Tensor]:
    """The loss, and this rank's leaves after a step of SGD by this rank's gradient alone."""
    own = own.detach().requires_grad_()
    total = total_of(p, own, x)
    (slope,) = torch.autograd.grad(total, own, retain_graph=True)
    return fshard.Mean(total, x.numel()), (own - RATE * slope).detach()


def trained(mesh: Any) -> list[tuple[torch.Tensor, Any]]:
    """This rank's leaves, and the parameters of all ranks, after steps under every strategy."""
    results, rank = [], mesh.get_rank()
    for strategy in STRATEGIES:
        tx = fshard.optim.sgd(RATE)
        state = fshard.init_state(make(mesh, CHAIN, **strategy), tx, extra=randn(3, 5, seed=50 + rank))
        step = fshard.train_step(loss_fn, tx, with_extra=True)
        for _ in range(TURNS):
            state, _ = step(state, batch_of(rank))
        results.append((state.extra, fshard.gather_params(state.params)))
    return results


def by_hand(num_ranks: int) -> tuple[list[torch.Tensor], Any]:
    """The same on one device: every rank's own leaves, and the parameters they share."""
    params, owns = chain_params(), [randn(3, 5, seed=50 + rank) for rank in range(num_ranks)]
    for _ in range(TURNS):
        live = fshard.tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
        leaves = [own.detach().requires_grad_() for own in owns]
        batches = [batch_of(rank) for rank in range(num_ranks)]
        totals = [total_of(live, own, x) for own, x in zip(leaves, batches, strict=True)]
        slopes = torch.autograd.grad(sum(totals), leaves, retain_graph=True)
        owns = [own - RATE * slope for own, slope in zip(owns, slopes, strict=True)]
        value = sum(totals) / sum(x.numel() for x in batches)
        grads = iter(torch.autograd.grad(value, fshard.tree.leaves(live)))
        params = fshard.tree.map(lambda leaf, g=grads: leaf.detach() - RATE * next(g), live)
    return owns, params


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_leaves_of_a_rank_keep_its_own_gradients(shard: int) -> None:
    """A rank's own leaves would get the gradients of other ranks, or the parameters would not be those of all ranks."""
    owns, params = by_hand(shard)
    for rank, results in enumerate(simulated(trained, shard=shard)):
        for own, shared in results:
            assert_near(own, owns[rank], rank)
            for path, leaf in by_path(shared).items():
                assert_near(leaf, by_path(params)[path], path)
