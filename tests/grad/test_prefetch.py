"""Gathers that a loss starts early."""

import re
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.chains import CHAIN, apply_block, batch_of, chain, chain_params, make, mean, randn
from support.logged import Logged, at
from support.worlds import gloo, simulated
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.collectives import prefetch
from fshard.grad.tape import Tape
from fshard.graph.inspect import arguments, operator, starts


def early(p: Any, x: torch.Tensor, start: Any = prefetch) -> fshard.Mean:
    """`chain`, whose last units are asked for first."""
    start(p, ["blocks.2", "blocks.1"])
    return chain(p, x)


def early_and_unused(p: Any, x: torch.Tensor, start: Any = prefetch) -> fshard.Mean:
    """A gather that nothing waits for."""
    start(p, "blocks.*")
    return mean(apply_block(p["blocks"][0], x))


def early_in_a_checkpoint(p: Any, x: torch.Tensor, start: Any = prefetch) -> fshard.Mean:
    """Asked for again when the checkpoint runs again in the backward."""

    def block(x: torch.Tensor, i: int) -> torch.Tensor:
        start(p["blocks"], f"blocks.{min(i + 1, 2)}")
        return apply_block(p["blocks"][i], x)

    for i in range(3):
        x = checkpoint(block, x, i, use_reentrant=False)
    return mean(x * p["head"])


def of_what_is_here(p: Any, x: torch.Tensor, start: Any = prefetch) -> fshard.Mean:
    """Asked for while the unit is in memory, and twice while it travels."""
    x = apply_block(p["blocks"][0], x)
    start(p, "blocks.0")
    x = apply_block(p["blocks"][0], x)
    start(p, "blocks.2")
    start(p, "blocks.2")
    return mean(apply_block(p["blocks"][2], x))


def fails(p: Any, x: torch.Tensor, start: Any = prefetch) -> fshard.Mean:
    """A loss that raises while gathers are under way."""
    start(p, "blocks.*")
    raise RuntimeError("the user's own error")


def results(mesh: Any) -> list[bool]:
    """Whether losses that start gathers early have the bits of those that do not, one after the other."""
    same, x = [], batch_of(mesh.get_rank())
    for strategy in ({}, {"regather": False}, {"params_over": ()}):
        sharded = make(mesh, CHAIN, **strategy)
        for loss in (early, early_and_unused, early_in_a_checkpoint, of_what_is_here):
            with pytest.raises(RuntimeError, match="the user's own error"):
                fshard.value_and_grad(fails)(sharded, x)
            value, grads = fshard.value_and_grad(loss)(sharded, x)
            late = partial(loss, start=lambda *args: None)
            expected, others = fshard.value_and_grad(late)(sharded, x)
            same.append(torch.equal(value, expected) and all(map(torch.equal, grads.tensors, others.tensors)))
    return same


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_gather_started_early_changes_no_bit(shard: int) -> None:
    """A gather that is not waited for would hang, or serve its data to the next step."""
    assert all(map(all, simulated(results, shard=shard)))
    assert all(map(all, simulated(results, shard=shard, replicate=2)))


def test_a_gather_started_early_in_processes() -> None:
    """Real ranks would hang on a gather that is dropped."""
    assert all(map(all, gloo(results, shard=2)))


def test_a_unit_is_gathered_when_the_loss_asks() -> None:
    """The gather would start one unit ahead, as without the call, or twice."""

    def job(mesh: Any, loss: Any) -> list[Any]:
        logged = Logged(mesh)
        params = chain_params()
        sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["blocks.*"]))
        logged.log.clear()
        fshard.evaluate(loss)(sharded, batch_of(0))
        return logged.log

    def starts_of(log: list[Any]) -> list[str]:
        return [label for what, kind, label in log if (what, kind) == ("start", "all_gather")]

    for log in simulated(job, of_what_is_here, shard=2):
        assert [starts_of(log).count(unit) for unit in ("blocks.0", "blocks.2")] == [1, 1]
    for log in simulated(job, early, shard=2):
        assert starts_of(log) == ["blocks.1", "blocks.2", "(first)", "blocks.0", "(last)"]
        assert at(log, "start", "all_gather", "blocks.2")[0] < at(log, "wait", "all_gather", "(first)")[0]


def test_graphs_plain_trees_and_products() -> None:
    """A loss that starts gathers early would not run on one device, in a graph or under `hvp`."""
    params, x = chain_params(), randn(3, 5)
    assert torch.equal(early(params, x).total, chain(params, x).total)

    def job(mesh: Any) -> bool:
        sharded, fn = make(mesh, CHAIN), fshard.value_and_grad(early)
        (value, grads), (expected, others) = fshard.jit(fn, backend="eager")(sharded, x), fn(sharded, x)
        products = [fshard.hvp(loss)(sharded, others, x).tensors for loss in (early, chain)]
        pairs = [*zip(grads.tensors, others.tensors, strict=True), *zip(*products, strict=True)]
        return torch.equal(value, expected) and all(torch.equal(a, b) for a, b in pairs)

    assert all(simulated(job, shard=2))


def test_what_cannot_be_started_early() -> None:
    """A pattern of no unit, or a call outside of a loss, would do nothing without a word."""

    def job(mesh: Any) -> None:
        sharded = make(mesh, CHAIN)
        with pytest.raises(TypeError, match="params=an object of type Sharded: expected the parameters that a loss"):
            prefetch(sharded, "blocks.*")
        words = "prefetch: the pattern 'experts' matches no unit; the units are '(first)', 'blocks.0', 'blocks.1'"
        with pytest.raises(ValueError, match=re.escape(words)):
            fshard.evaluate(lambda p, x: prefetch(p, "experts"))(sharded, batch_of(0))

    simulated(job, shard=2)


WHICH = {"all": range(5), "none": (), "every other": (0, 2, 4), "the last": (4,), "the first": (0,)}


def under_checkpoints(which: str) -> Any:
    """The loss of a chain of which some blocks run again in the backward."""

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        x = x * p["scale"].sin()
        for i in range(5):
            block = partial(lambda x, i: apply_block(p["blocks"][i], x), i=i)
            x = checkpoint(block, x, use_reentrant=False) if i in WHICH[which] else block(x)
        return mean(x * p["head"])

    return loss


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("which", WHICH)
def test_the_backward_gathers_ahead_also_under_checkpoints(which: str, prefetch: int | None) -> None:
    """Each gather of the backward would begin when the computation needs it."""

    def job(mesh: Any) -> list[Any]:
        logged, params = Logged(mesh), chain_params(5)
        plan = fshard.make_plan(params, logged, units=["blocks.*"], prefetch=prefetch)
        sharded = fshard.shard_params(params, plan)
        logged.log.clear()
        fshard.value_and_grad(under_checkpoints(which))(sharded, batch_of(0))
        return logged.log[at(logged.log, "start", "all_reduce", "loss")[0] :]

    for log in simulated(job, shard=2):
        held = 0  # gathers that were started, and whose unit has no gradients yet
        for what, kind, label in log:
            held += (what == "start") * ("blocks" in label) * ((kind == "all_gather") - (kind == "reduce_scatter"))
            assert held <= 1 + (prefetch or 1)
        check_ahead([(kind, label) for what, kind, label in log if what == "start"])


@pytest.mark.parametrize("which", WHICH)
def test_a_graph_gathers_ahead_also_under_checkpoints(which: str) -> None:
    """As in the eager step."""

    def job(mesh: Any) -> None:
        plan = fshard.make_plan(chain_params(5), mesh, units=["blocks.*"])
        args = fshard.shard_params(chain_params(5), plan), batch_of(0)
        step = fshard.jit(fshard.value_and_grad(under_checkpoints(which)), backend="eager", bucket=0)
        nodes = starts(step.lower(*args).graph)
        started = [(operator(node).removeprefix("fshard."), arguments(node)["label"]) for node in nodes]
        check_ahead(started[started.index(("all_gather", "(last)")) :])

    simulated(job, shard=2)


def in_groups(p: Any, x: torch.Tensor, nested: bool) -> fshard.Mean:
    """The loss of a chain of which two and three blocks run again together, and with `nested` each once more."""

    def block(x: torch.Tensor, i: int) -> torch.Tensor:
        return apply_block(p["blocks"][i], x)

    again = partial(checkpoint, use_reentrant=False)
    for group in ([0, 1], [2, 3, 4]):
        x = again(lambda x, group=group: reduce(partial(again, block) if nested else block, group, x), x)
    return mean(x * p["head"])


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_of_several_units_gather_ahead(nested: bool) -> None:
    """A checkpoint reads its units in the order of the forward: gathers for another order would keep all in memory."""

    def job(mesh: Any) -> list[Any]:
        logged, params = Logged(mesh), chain_params(5)
        sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["blocks.*"]))
        logged.log.clear()
        fshard.value_and_grad(partial(in_groups, nested=nested))(sharded, batch_of(0))
        return logged.log[at(logged.log, "start", "all_reduce", "loss")[0] :]

    for log in simulated(job, shard=2):
        gathered = [label for what, kind, label in log if (what, kind) == ("start", "all_gather") and "blocks" in label]
        assert gathered == [f"blocks.{i}" for i in (2, 3, 4, 0, 1)]


def tower(p: Any, x: torch.Tensor, rank: int, one_by_one: bool) -> fshard.Mean:
    """The loss of a chain of checkpoints that rank 1 computes, and does not use."""
    x = y = x * p["scale"].sin()  # both have gradients, so ranks save the same
    for i in range(5):
        block = partial(lambda y, i: apply_block(p["blocks"][i], y), i=i)
        y = checkpoint(block, y, use_reentrant=False) if one_by_one else block(y)
    return mean((x if rank else y) * p["head"])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_what_ran_again_leaves_memory(one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would hold the gathered units of a whole tower until its backward ends, used or not."""
    before, counts = Tape.reduce, list[int]()

    def counted(tape: Tape, unit: Any, grads: Any) -> None:
        counts.append(sum(other.buffers is not None for other in tape._units.values()))
        before(tape, unit, grads)

    def job(mesh: Any) -> None:
        params = chain_params(5)
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"]))
        fshard.value_and_grad(tower)(sharded, batch_of(0), mesh.get_rank(), one_by_one)

    monkeypatch.setattr(Tape, "reduce", counted)
    simulated(job, shard=2)
    assert max(counts) <= 1, counts


def check_ahead(backward: list[tuple[str, str]]) -> None:
    """Each block is gathered once, before the gradients of the one after it are sent."""
    blocks = [f"blocks.{i}" for i in range(5)]
    assert [label for kind, label in backward if kind == "all_gather" and label in blocks] == blocks[::-1]
    for block, after in pairwise(blocks):
        assert backward.index(("all_gather", block)) < backward.index(("reduce_scatter", after))
