"""The oracle: what plain torch makes by hand, and what sharded steps make."""

import functools
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, STRATEGIES, lm_batch, lm_params, mean_loss, plain_loss, same_bits, sum_loss
from support.worlds import simulated

import fshard
from fshard import optim, tree
from fshard.testing import assert_trees_equal, oracle, whole_state

LOSSES = {"mean": mean_loss, "sum": sum_loss, "plain": plain_loss}


def by_hand(loss: str, num_ranks: int) -> tuple[Any, Any, Any]:
    """Loss, gradients and norm of torch.autograd for everybody's data."""
    params = lm_params()
    unique = {id(x): x.requires_grad_() for x in tree.leaves(params)}
    outs = [LOSSES[loss](params, lm_batch(0, rank)) for rank in range(num_ranks)]
    if loss == "mean":
        value = sum(out.total for out in outs) / sum(out.count for out in outs)
    else:
        value = sum(out.total for out in outs) if loss == "sum" else sum(outs) / num_ranks
    found = torch.autograd.grad(value, [*unique.values()], allow_unused=True, materialize_grads=True)
    grads = dict(zip(unique, found, strict=True))
    norm = torch.nn.utils.get_total_norm(found)
    return value.detach(), tree.map(lambda x: grads[id(x)], params), norm


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_step_is_one_of_plain_autograd(loss, num_ranks):
    """The oracle itself would be wrong."""
    params, (value, grads, norm) = lm_params(), by_hand(loss, num_ranks)
    batches = [lm_batch(0, rank) for rank in range(num_ranks)]
    for clip in (None, 0.1):
        plain = oracle(LOSSES[loss], optim.sgd(1.0), clip_norm=clip)
        state, metrics = plain.step(plain.init(params), batches)
        share = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        went = tree.map(lambda p, q: p - q, params, state.params)
        torch.testing.assert_close(tree.leaves(went), [share * g for g in tree.leaves(grads)], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close([metrics["loss"], metrics["grad_norm"]], [value, norm], rtol=1e-13, atol=0)
        assert (state.step.item(), metrics["found_inf"].item()) == (1, 0.0)


def noisy(params: Any, batch: Any) -> Any:
    """Dropout; the mask is handed out."""
    kept = torch.nn.functional.dropout(torch.ones(8, dtype=torch.float64), 0.5)
    out = mean_loss(params, batch)
    return fshard.Mean(out.total * kept.mean(), out.count), [kept, fshard.Mean(kept.sum(), 8), fshard.Sum(out.count)]


LABELS = {"blocks": "b", "**": "r"}


def train(mesh: Any, case: str, strategy: str) -> Any:
    """Three steps, the second of which may overflow in a label or in all; what the oracle must give as well."""
    state, step, data = made(mesh, case, strategy)
    found = []
    for i in range(3):
        state, metrics = step(state, data(i, mesh.get_rank()))
        found.append(metrics)
    return whole_state(state), found


# torch's kernels (of sgd and adam) round otherwise in a vector than in what is left over of a row
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "exact": (mean_loss, optim.rmsprop(0.1, momentum=0.9), {}),
    "dropout": (noisy, optim.adamw(0.01), {"has_aux": True, "accumulate": 2}),
    "skipped": (sum_loss, optim.adamw(0.01), {"clip_norm": 0.5}),
    "labels": (
        sum_loss,
        optim.by_label({"b": optim.adamw(0.01), "r": optim.sgd(0.1)}, LABELS),
        {"skip_labels": LABELS},
    ),
}


def data_of(case: str) -> Any:
    """Batches of a case: the second step's of rank 0 overflow where that is looked for."""

    def data(step: int, rank: int) -> Any:
        large = case in ("skipped", "labels") and (step, rank) == (1, 0)
        found = lm_batch(step, rank)
        return found | {"mask": found["mask"] * (1e300 if large else 1.0)}

    return data


def made(mesh: Any, case: str, strategy: str) -> Any:
    """State, step and data of a case, sharded."""
    params, (loss, tx, how) = lm_params(), CASES[case]
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, frozen=["tail.right"], **STRATEGIES[strategy])
    scale = fshard.DynamicLossScale(2.0**40) if case in ("skipped", "labels") else None
    state = fshard.init_state(fshard.shard_params(params, plan), tx, scale, seed=3, extra=torch.ones(2))
    return state, fshard.train_step(loss, tx, **how), data_of(case)


@functools.cache
def planned(case: str, num_ranks: int) -> Any:
    """The same by the oracle."""
    loss, tx, how = CASES[case]
    plain, data = oracle(loss, tx, frozen=["tail.right"], **how), data_of(case)
    scale = fshard.DynamicLossScale(2.0**40) if case in ("skipped", "labels") else None
    state, found = plain.init(lm_params(), scale, seed=3, extra=torch.ones(2)), []
    for i in range(3):
        state, metrics = plain.step(state, [data(i, rank) for rank in range(num_ranks)])
        found.append(metrics)
    return whole_state(state), found


@pytest.mark.law
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "full"])
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_run_is_the_oracles(case, strategy):
    """A sharded run would differ from the oracle on some rank."""
    expected, metrics = planned(case, 3)
    for rank, (state, found) in enumerate(simulated(train, case, strategy, shard=3)):
        own = [{**row, **({"aux": row["aux"][rank]} if "aux" in row else {})} for row in metrics]
        if case == "exact":
            for one, other in zip(found, own, strict=True):
                assert same_bits(one["loss"], other["loss"])
            assert_trees_equal(state, expected)
        for one, other in zip(tree.leaves((state, found)), tree.leaves((expected, own)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, equal_nan=True)
    if case in ("skipped", "labels"):
        assert [row["found_inf"].item() for row in metrics] == [0.0, 1.0, 0.0]


def test_the_oracle_changes_nothing():
    """The oracle would write to its arguments, or give other bits the second time."""
    params, (loss, tx, how) = lm_params(), CASES["dropout"]
    plain = oracle(loss, tx, **how)
    state, before = plain.init(params), lm_params()
    first, second = (plain.step(state, [lm_batch(0, 0), lm_batch(0, 1)]) for _ in range(2))
    assert_trees_equal(first, second)
    assert same_bits(params, before)
    assert same_bits(state.params, before)
    assert state.step.item() == 0
