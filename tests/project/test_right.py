"""Every strategy trains what plain torch trains on one device with everybody's data, on any number of ranks."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from support.models import (
    LM_UNITS,
    NARROW,
    STRATEGIES,
    WORLDS,
    lm_batch,
    lm_params,
    lm_total,
    mean_loss,
    plain_loss,
    same_bits,
    sum_loss,
)
from support.worlds import gloo, simulated

import fshard
from fshard.grad.travel import Gradients

STEPS = 20
LOSSES = {"mean": mean_loss, "sum": sum_loss, "plain": plain_loss}
OPTIMIZERS = {
    "sgd": (fshard.optim.sgd(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "adamw": (fshard.optim.adamw(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
}


class Case(NamedTuple):
    """One training run."""

    strategy: str = "full"
    tx: str = "sgd"
    loss: str = "mean"
    micro: int = 1
    once: bool = False
    clip: float | None = None
    scale: float | None = None


VARIANTS = [
    Case(),
    Case(micro=3),
    Case(micro=3, once=True, clip=0.5),
    Case(loss="sum", clip=0.5),
    Case(loss="sum", micro=3, once=True),
    Case(loss="plain", scale=64.0),
    Case(loss="plain", micro=3, clip=0.5),
]


TURNS = {"1": [0], "2": [1, 2], "3": [3], "4": [4], "2x2": [5, 6]}


def cases(world: str) -> list[Case]:
    """For every strategy one or two variants, others in every world: together each strategy meets each variant."""
    rows = [(i, strategy, turn) for i, strategy in enumerate(STRATEGIES) for turn in TURNS[world]]
    return [VARIANTS[(i + turn) % 7]._replace(strategy=s, tx=["sgd", "adamw"][(i + turn) % 2]) for i, s, turn in rows]


class Run(NamedTuple):
    """What a rank has after training: whole parameters, whole first moments, metrics, its own part of the state."""

    params: Any
    moments: Any
    metrics: list[Any]
    own: list[Any]


def train(mesh: Any, case: Case) -> Run:
    """Train on this rank's data."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, whole=["**.b", "tail.right"], **STRATEGIES[case.strategy])
    tx, loss_fn = OPTIMIZERS[case.tx][0], LOSSES[case.loss]
    scaler = fshard.StaticLossScale(case.scale) if case.scale else None
    state = fshard.init_state(fshard.shard_params(params, plan), tx, scaler)
    step = fshard.train_step(loss_fn, tx, clip_norm=case.clip, accumulate=case.micro, reduce_once=case.once)
    metrics, rank = [], mesh.get_rank()
    for i in range(STEPS):
        state, row = step(state, lm_batch(i, rank))
        metrics.append(row)
    moments = state.opt_state.momentum if case.tx == "sgd" else state.opt_state.mu
    whole = [fshard.gather_params(x) for x in (state.params, moments)]
    return Run(*whole, metrics, pytree.tree_leaves(state))


@cache
def unsharded(num_ranks: int, tx: str, loss: str, micro: int, clip: float | None, scale: float = 1.0) -> Run:
    """Plain torch on one device: everybody's data in one batch, torch's own optimizer and clipping."""
    params = lm_params()
    leaves = list({id(p): p.requires_grad_() for p in pytree.tree_leaves(params)}.values())
    optimizer = OPTIMIZERS[tx][1](leaves)
    metrics = []
    for i in range(STEPS):
        batches = [lm_batch(i, rank) for rank in range(num_ranks)]
        everything = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        total, count = lm_total(params, everything)
        if loss == "plain":
            parts = [
                dict(zip(batch, rows, strict=True))
                for batch in batches
                for rows in zip(*(x.chunk(micro) for x in batch.values()), strict=True)
            ]
            value = torch.stack([plain_loss(params, part) for part in parts]).mean()
        else:
            value = total / count if loss == "mean" else 0.02 * total
        (scale * value).backward()
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        norm = torch.nn.utils.clip_grad_norm_(leaves, clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        metrics.append({"loss": value.detach(), "grad_norm": norm, "found_inf": torch.zeros(())})
    key = "momentum_buffer" if tx == "sgd" else "exp_avg"
    moments = pytree.tree_map(lambda p: optimizer.state[p][key], params)
    return Run(pytree.tree_map(torch.detach, params), moments, metrics, [])


def apart(run: Run, oracle: Run) -> float:
    """The largest difference: of parameters relative to how far they went, of all else relative to itself."""

    def relative(got: Any, expected: Any, scale: Any) -> Any:
        top = scale.abs().max().double()
        return (got - expected).abs().max() / torch.where(top > 0, top, 1)

    began = pytree.tree_leaves(lm_params())
    leaves = [pytree.tree_leaves(x) for x in (run.params, oracle.params)]
    worst = [relative(p, q, q - start) for p, q, start in zip(*leaves, began, strict=True)]
    rest = [pytree.tree_leaves(x) for x in ((run.moments, run.metrics), (oracle.moments, oracle.metrics))]
    return float(torch.stack(worst + [relative(a, b, b) for a, b in zip(*rest, strict=True)]).max())


def oracle_of(case: Case, num_ranks: int) -> Run:
    """What plain torch makes of a case."""
    return unsharded(num_ranks, case.tx, case.loss, case.micro if case.loss == "plain" else 1, case.clip)


@cache
def simulated_runs(world: str, case: Case) -> list[Run]:
    """The case on simulated ranks."""
    replicate, shard = WORLDS[world]
    return simulated(train, case, replicate=replicate, shard=shard)


@pytest.mark.law
@pytest.mark.parametrize(("world", "case"), [(w, c) for w in WORLDS for c in cases(w)], ids=str)
def test_training_equals_the_unsharded_oracle(world, case):
    """Some strategy would train otherwise than one device: parameters, moments, losses or norms."""
    runs = simulated_runs(world, case)
    assert all(apart(run, oracle_of(case, len(runs))) < 1e-10 for run in runs)
    assert all(same_bits(run[:3], runs[0][:3]) for run in runs)


def train_all(mesh: Any, some: list[Case]) -> list[Run]:
    """Several runs on one mesh."""
    return [train(mesh, case) for case in some]


@pytest.mark.parametrize("world", ["2x2", "3", "4"])
def test_processes_and_simulated_ranks_agree_to_the_bit(world):
    """Simulated ranks would prove nothing about real processes."""
    replicate, shard = WORLDS[world]
    some = [c for c in cases(world)[:: len(TURNS[world])] if replicate > 1 or c.strategy in NARROW]
    ranks = gloo(train_all, some, replicate=replicate, shard=shard)
    for i, case in enumerate(some):
        runs = [rank[i] for rank in ranks]
        assert all(apart(run, oracle_of(case, len(runs))) < 1e-10 for run in runs), case
        assert same_bits(runs, simulated_runs(world, case)), case


@pytest.mark.parametrize("case", VARIANTS, ids=str)
def test_a_wrong_run_is_far_from_the_oracle(case):
    """The tests of parity would pass with gradients of one rank, or summed instead of averaged."""
    for tx in OPTIMIZERS:
        right = oracle_of(case._replace(tx=tx), 4)
        assert not apart(oracle_of(case._replace(tx=tx), 1), right) < 1e-2
    micro = case.micro if case.loss == "plain" else 1
    summed = unsharded(4, "sgd", case.loss, micro, None, scale=4.0)
    assert not apart(summed, unsharded(4, "sgd", case.loss, micro, None)) < 1e-2


MUTANTS = {
    "lost": (lambda rank, size: float(rank == 0), ["sgd", "adamw"]),  # the other ranks' gradients
    "summed": (lambda rank, size: float(size), ["sgd"]),  # instead of averaged; Adam does not see it
}


@pytest.mark.parametrize("strategy", ["ddp", "full"])
@pytest.mark.parametrize(("mutant", "tx"), [(m, tx) for m, (_, some) in MUTANTS.items() for tx in some])
def test_the_parity_test_notices_a_wrong_reduction(strategy, mutant, tx, monkeypatch):
    """The tests of parity would pass with a wrong reduction."""
    emit = Gradients.emit

    def wrong(self, unit, kind, flat):
        mesh = self.reduced.view.plan.live_mesh()
        return emit(self, unit, kind, flat * MUTANTS[mutant][0](mesh.get_rank(), mesh.size()))

    monkeypatch.setattr(Gradients, "emit", wrong)
    case = Case(strategy, tx)
    assert not any(apart(run, oracle_of(case, 2)) < 1e-2 for run in simulated(train, case, shard=2))


def noisy_loss(params: Any, batch: Any) -> Any:
    """Dropout on the hidden layer; the mask is kept."""
    kept = torch.nn.functional.dropout(torch.ones(64, dtype=torch.float64), 0.5)
    total, count = lm_total({**params, "tail": (params["tail"].left * kept.mean(), params["tail"].right)}, batch)
    return fshard.Mean(total, count), kept


def train_with_dropout(mesh: Any, seed: int, own: int) -> tuple[list[Any], list[Any], bool]:
    """Two steps of two micro-batches: the state, every mask, and whether torch's generator was left alone."""
    params = lm_params()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS))
    tx = OPTIMIZERS["sgd"][0]
    state = fshard.init_state(sharded, tx, seed=seed)
    step = fshard.train_step(noisy_loss, tx, accumulate=2, has_aux=True)
    torch.manual_seed(own)
    before, masks = torch.get_rng_state(), []
    for i in range(2):
        state, metrics = step(state, lm_batch(i, mesh.get_rank()))
        masks += metrics["aux"]
    return pytree.tree_leaves(state), masks, torch.equal(torch.get_rng_state(), before)


def test_dropout_comes_from_the_state_alone():
    """A resumed run would draw other masks, or ranks and micro-batches the same ones."""
    first = simulated(train_with_dropout, 7, 1)
    for again in (simulated(train_with_dropout, 7, 2), gloo(train_with_dropout, 7, 3)):
        for (*one, alone), (*other, also) in zip(first, again, strict=True):
            assert same_bits(one, other)
            assert alone
            assert also
    other = simulated(train_with_dropout, 8, 1)
    masks = [mask for ranks in (first, other) for _, masks, _ in ranks for mask in masks]
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks) == 16


def overflowing_loss(params: Any, batch: Any, boost: float) -> Any:
    """A mean whose total may be made infinite."""
    total, count = lm_total(params, batch)
    return fshard.Mean(total * boost, count)


def train_over_an_overflow(mesh: Any, strategy: str, tx_name: str, fused: bool) -> list[Any]:
    """Three steps; in the second the last rank's loss overflows. The states, and the metrics."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, **STRATEGIES[strategy])
    tx = OPTIMIZERS[tx_name][0]
    tx = tx if fused else tx._replace(fused=None)
    states = [fshard.init_state(fshard.shard_params(params, plan), tx, fshard.DynamicLossScale(2.0**10))]
    step = fshard.train_step(overflowing_loss, tx)
    rows = []
    for i in range(3):
        bad = i == 1 and mesh.get_rank() == mesh.size() - 1
        state, row = step(states[-1], lm_batch(i, mesh.get_rank()), torch.inf if bad else 1.0)
        states.append(state)
        rows.append(row)
    return [[(s.params, s.opt_state, s.loss_scale, s.step) for s in states], rows]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("tx", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "full", "wide_state"])
def test_an_overflow_on_one_rank_skips_the_update_on_all(strategy, tx, fused):
    """After an overflow ranks would hold different parameters."""
    for states, rows in simulated(train_over_an_overflow, strategy, tx, fused, shard=2, replicate=2):
        (_, first, second, third) = states
        assert [row["found_inf"].item() for row in rows] == [0, 1, 0]
        assert same_bits(first[:2], second[:2])
        assert first[1].count == second[1].count == 1
        assert third[1].count == 2
        assert not same_bits(second[0], third[0])
        assert [state[2].value.item() for state in states] == [1024, 1024, 512, 512]
        assert [state[3].item() for state in states] == [0, 1, 2, 3]


@pytest.mark.parametrize("tx", OPTIMIZERS)
def test_a_static_scale_changes_no_bit(tx):
    """A power of two as loss scale would change results in float64."""
    plain, scaled = (simulated(train, Case(tx=tx, micro=3, scale=scale), shard=3) for scale in (None, 2.0**8))
    for one, other in zip(plain, scaled, strict=True):
        assert same_bits(one[:3], other[:3])


def mean_with_an_empty_part(mesh: Any, micro: int, empty: int) -> tuple[Any, Any]:
    """One step in which the `empty`-th of three parts of the batch counts nothing on any rank."""
    params, batch = lm_params(), lm_batch(0, 0)
    batch["mask"][2 * empty : 2 * empty + 2] = 0
    tx = OPTIMIZERS["sgd"][0]
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS)), tx)
    state, metrics = fshard.train_step(mean_loss, tx, accumulate=micro)(state, batch)
    return fshard.gather_params(state.params), metrics["grad_norm"]


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_that_counts_nothing_anywhere(empty):
    """An empty micro-batch would change the mean, or make it NaN."""
    for parts, whole in zip(*(simulated(mean_with_an_empty_part, micro, empty) for micro in (3, 1)), strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reduce_once", [False, True])
def test_micro_batches_that_use_different_units(reduce_once):
    """A unit used by one micro-batch only would lose its gradient."""
    whole = {"blocks": [torch.full((3,), float(i + 1), dtype=torch.float64) for i in range(3)]}
    tx = fshard.optim.sgd(1.0)

    def loss(p, x):
        return fshard.Sum((p["blocks"][int(x[0])] * x[0].add(1)).sum())

    def run(mesh):
        plan = fshard.make_plan(whole, mesh, units=["blocks.*"])
        state = fshard.init_state(fshard.shard_params(whole, plan), tx)
        step = fshard.train_step(loss, tx, accumulate=2, reduce_once=reduce_once)
        return fshard.gather_params(step(state, torch.tensor([0.0, 1.0]))[0].params)

    def run_leaf(mesh):
        leaf = torch.ones(3, dtype=torch.float64)
        state = fshard.init_state(fshard.shard_params(leaf, fshard.make_plan(leaf, mesh)), tx)
        step = fshard.train_step(lambda w, x: fshard.Sum((w * x).sum()), tx, accumulate=2, reduce_once=reduce_once)
        return fshard.gather_params(step(state, torch.tensor([[1.0], [2.0]]))[0].params)

    for ranks, found in [(1, run(None)), *((2, found) for found in simulated(run, shard=2))]:
        assert [block.tolist() for block in found["blocks"]] == [[1.0 - ranks] * 3, [2.0 - 2 * ranks] * 3, [3.0] * 3]
    for ranks, found in [(1, run_leaf(None)), *((2, found) for found in simulated(run_leaf, shard=2))]:
        assert found.tolist() == [1.0 - 3 * ranks] * 3


def fast_and_exact(mesh):
    """The parameters after a step of each reduction."""
    whole, tx = lm_params(), OPTIMIZERS["sgd"][0]
    plan = fshard.make_plan(whole, mesh, units=LM_UNITS)
    found = []
    for reduction in ("exact", "fast"):
        state = fshard.init_state(fshard.shard_params(whole, plan), tx)
        state, _ = fshard.train_step(mean_loss, tx, reduction=reduction)(state, lm_batch(0, mesh.get_rank()))
        found.append(fshard.gather_params(state.params))
    return found


@pytest.mark.parametrize("world", [simulated, gloo])
def test_a_fast_reduction_is_the_exact_one_up_to_its_order(world):
    """`reduction="fast"` would compute something else than "exact"."""
    for exact, fast in world(fast_and_exact, shard=2):
        assert same_bits(exact, fast)
