"""A step is a function: it changes nothing that goes in, and repeats itself; a state that was donated says so."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support.models import LM_UNITS, NARROW, STRATEGIES, lm_batch, lm_params, mean_loss, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import DonatedError
from fshard.layout.pieces import packed
from fshard.sharding.sharded import refine

OPTIMIZERS = {
    "sgd": fshard.optim.sgd(0.1, momentum=0.9),
    "momentumless": fshard.optim.sgd(0.1),
    "adamw": fshard.optim.adamw(0.01),
}
OPTIMIZERS |= {f"{name}-plain": tx._replace(fused=None) for name, tx in OPTIMIZERS.items()}
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"clip_norm": 0.1},
    "micro": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
}
# every strategy with AdamW, fused or not; every optimizer with one strategy
PAIRS = [(s, tx) for s in STRATEGIES for tx in OPTIMIZERS if s == "full" or tx.startswith("adamw")]


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    return fshard.tree.leaves(tree)


def fresh(mesh: Any, strategy: str, tx: Any) -> Any:
    """A state before its first step."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, frozen="unused", whole="tail", **STRATEGIES[strategy])
    return fshard.init_state(fshard.shard_params(params, plan), tx, fshard.DynamicLossScale(64.0), extra=torch.ones(3))


def steps_twice(mesh: Any, strategy: str, tx_name: str) -> None:
    """Two calls from one state, for every setting, with all that goes in watched."""
    tx = OPTIMIZERS[tx_name]
    for kw in SETTINGS.values():
        step, state = fshard.train_step(mean_loss, tx, **kw), fresh(mesh, strategy, tx)
        batch = lm_batch(1, mesh.get_rank())
        inputs = leaves((state, batch))
        before = [(x.clone(), x._version, x.data_ptr()) for x in inputs]
        one, other = step(state, batch), step(state, batch)
        assert same_bits(one, other)
        assert not same_bits(one[0].params, state.params)
        for x, (copy, version, address) in zip(inputs, before, strict=True):
            assert same_bits(x, copy)
            assert (x._version, x.data_ptr()) == (version, address)
        own = {x.untyped_storage().data_ptr() for x in leaves(one[0].params) if x.numel()}
        frozen = {x.untyped_storage().data_ptr() for x in leaves(state.params)}
        again = {x.untyped_storage().data_ptr() for x in leaves(other[0].params) if x.numel()}
        assert own & again <= frozen  # what two results share is what neither changed


@pytest.mark.parametrize(("strategy", "tx"), PAIRS)
def test_a_step_changes_nothing_and_repeats_itself(strategy, tx):
    """A step would write to its inputs, or give other bits the second time."""
    simulated(steps_twice, strategy, tx, replicate=2 if strategy not in NARROW else 1)


def test_a_gradient_changes_nothing_and_repeats_itself():
    """`value_and_grad`, `reduce_grads`, `gather_params` or `evaluate` would write to its inputs."""

    def run(mesh: Any) -> None:
        state = fresh(mesh, "full", OPTIMIZERS["sgd"])
        batch = lm_batch(0, mesh.get_rank())
        inputs = leaves((state, batch))
        before = [(x.clone(), x._version) for x in inputs]
        grads = [fshard.value_and_grad(mean_loss)(state.params, batch) for _ in range(2)]
        _, own = fshard.value_and_grad(mean_loss, reduce=False)(state.params, batch)
        kept = [x.clone() for x in leaves(own)]
        reduced = [fshard.reduce_grads(own) for _ in range(2)]
        values = [fshard.evaluate(mean_loss)(state.params, batch) for _ in range(2)]
        assert same_bits(kept, leaves(own))
        assert same_bits(grads[0], grads[1])
        assert same_bits(reduced[0], reduced[1])
        assert same_bits(values, [grads[0][0], grads[0][0]])
        assert all(same_bits(x, copy) and x._version == v for x, (copy, v) in zip(inputs, before, strict=True))

    simulated(run)


def donated_like_undonated(mesh: Any, strategy: str, tx_name: str) -> None:
    """Three steps each way."""
    tx, results = OPTIMIZERS[tx_name], []
    for donate in (False, True):
        state, metrics = fresh(mesh, strategy, tx), []
        for i, kw in enumerate(SETTINGS.values()):
            step = fshard.train_step(mean_loss, tx, donate=donate, **kw)
            state, row = step(state, lm_batch(i, mesh.get_rank()))
            metrics.append(row)
        results.append((state, metrics))
    assert same_bits(*results)


@pytest.mark.parametrize(("strategy", "tx"), PAIRS)
def test_donating_changes_no_bit_of_the_result(strategy, tx):
    """A donated step would compute something else than a step that copies."""
    simulated(donated_like_undonated, strategy, tx, replicate=2 if strategy not in NARROW else 1)


def moments(state: Any) -> Any:
    """The moments of SGD or AdamW."""
    return state.opt_state.momentum if hasattr(state.opt_state, "momentum") else state.opt_state.mu


# what is kept aside before the step, and how it is touched afterwards
REUSES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "the state, in a step": (lambda old: old, lambda step, old: step(old, lm_batch(1, 0))),
    "its parameters": (lambda old: old, lambda step, old: old.params),
    "its optimizer state": (lambda old: old, lambda step, old: old.opt_state),
    "the parameters": (lambda old: old.params, lambda step, params: params["head"]),
    "the parameters, gathered": (lambda old: old.params, lambda step, params: fshard.gather_params(params)),
    "the parameters, mapped": (lambda old: old.params, lambda step, params: pytree.tree_map(lambda x: 2 * x, params)),
    "the parameters, in a gradient": (
        lambda old: old.params,
        lambda step, params: fshard.value_and_grad(mean_loss)(params, lm_batch(1, 0)),
    ),
    "the parameters, looked at": (lambda old: old.params, lambda step, params: params.local_views()),
    "the parameters, printed": (lambda old: old.params, lambda step, params: repr(params)),
    "a subtree": (lambda old: old.params["embed"], lambda step, part: fshard.gather_params(part)),
    "a deeper subtree": (lambda old: old.params["blocks"][1], lambda step, part: part["w"]),
    "the trainable part": (lambda old: old.params.trainable, lambda step, part: fshard.gather_params(part)),
    "the moments": (moments, lambda step, part: part["embed"]),
    "the moments, gathered": (moments, lambda step, part: fshard.gather_params(part)),
    "a subtree of the moments": (lambda old: moments(old)["head"], lambda step, part: fshard.gather_params(part)),
}


@pytest.mark.parametrize("reuse", REUSES)
@pytest.mark.parametrize("tx", ["sgd", "adamw-plain"])
def test_what_was_given_away_says_so(tx, reuse):
    """A donated state would be read silently, or the error would not say what to do."""
    keep, touch = REUSES[reuse]

    def run(mesh: Any) -> str:
        state, step = fresh(mesh, "full", OPTIMIZERS[tx]), fshard.train_step(mean_loss, OPTIMIZERS[tx], donate=True)
        kept = keep(state)
        state, _ = step(state, lm_batch(0, 0))
        with pytest.raises(DonatedError, match=r"was given away.*donate=True.*Use the state"):
            touch(step, kept)
        step(state, lm_batch(1, 0))  # the new one is good

    simulated(run, shard=1)


def test_a_state_that_was_not_donated_stays():
    """A step without donation would take the old state away."""

    def run(mesh: Any) -> None:
        for name in ("sgd", "adamw"):
            state, step = fresh(mesh, "full", OPTIMIZERS[name]), fshard.train_step(mean_loss, OPTIMIZERS[name])
            before = fshard.tree.map(torch.clone, state)
            step(state, lm_batch(0, 0))
            for keep, touch in REUSES.values():
                touch(step, keep(state))
            assert same_bits(leaves(state), leaves(before))

    simulated(run, shard=1)


def test_a_deep_copy_is_a_state_like_any_other():
    """A copy of a state would share tensors with it, or lack its mesh."""

    def run(mesh: Any) -> bool:
        tx = OPTIMIZERS["sgd"]
        state, step = fresh(mesh, "full", tx), fshard.train_step(mean_loss, tx, donate=True)
        copied = deepcopy(state)
        first, _ = step(state, lm_batch(0, 0))
        second, _ = step(copied, lm_batch(0, 0))
        return all(
            torch.equal(a, b) for a, b in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True)
        )

    assert all(simulated(run, shard=2))


def updated_views(mesh: Any) -> None:
    """One donated update of the intervals of parameters that are not cut."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, params_over=(), grads_over=())
    whole, tx = fshard.shard_params(params, plan), fshard.optim.adamw(0.1)
    mine = refine(whole, plan.state_over)
    own = packed(mine)
    new, _ = tx.step(fshard.tree.map(torch.ones_like, own), tx.init(own), mine, donate=True)
    assert new is mine
    assert not same_bits(fshard.gather_params(whole), params)


def test_views_are_updated_where_they_lie():
    """State cut finer than parameters would cost a copy of the parameters."""
    simulated(updated_views, shard=2)
