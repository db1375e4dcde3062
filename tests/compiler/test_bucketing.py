"""Small collectives are combined into buckets: fewer are sent, results keep their bits, and the order is respected."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from support.graphs import (
    BLOCKS,
    UNITS,
    batch,
    given_to,
    gradient,
    is_right,
    labels,
    mean,
    params,
    state_of,
    targets,
)
from support.models import STRATEGIES, same_bits
from support.steps import EXACT
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import DynamicLossScale

EVERYTHING = 10**6
eager = partial(fshard.jit, backend="eager")


def test_a_step_of_small_units():
    """Collectives share buckets up to the given size, with the same bits: otherwise many small units would be slow."""

    def law(mesh: Any) -> None:
        step, *args = state_of(mesh)
        plain = eager(step, bucket=0).lower(*args)
        sent = next(n for kind, unit, _, n, _ in plain.collectives() if (kind, unit) == ("reduce_scatter", BLOCKS[0]))
        block = sent * mesh.size("shard") // (mesh.size("shard") - 1)
        for size, num in ((2 * block - 1, 4), (2 * block, 2), (EVERYTHING, 1)):
            lowered = eager(step, bucket=size).lower(*args)
            scattered = [label for label in labels(lowered.graph, "reduce_scatter") if "blocks" in label]
            assert len(scattered) == num, size
            assert Counter("+".join(scattered).replace("+(last)", "").split("+")) == Counter(BLOCKS)
            is_right(lowered, step, *args)
        gathered = [label.split("+") for label in labels(lowered.graph)]
        assert all(len({*units}) == len(units) for units in gathered), "a unit is not sent twice in one message"
        assert set().union(*gathered) == {*labels(plain.graph)}
        assert len(gathered) < len(labels(plain.graph)) / 2
        one, other = (sum(t[3] for t in x.collectives() if t[0] == "all_gather") for x in (plain, lowered))
        assert other < one

    simulated(law, shard=3)


@pytest.mark.law
@pytest.mark.parametrize("world", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy(name, world):
    """Steps with buckets have the bits of the eager step in every strategy: else `bucket=` would alter training."""

    def law(mesh: Any) -> None:
        whole = params()
        plan = fshard.make_plan(whole, mesh, units=UNITS, **STRATEGIES[name])
        step = fshard.train_step(mean, EXACT, clip_norm=0.1)
        jitted = eager(step, donate=True, bucket=EVERYTHING)
        states = [fshard.init_state(fshard.shard_params(whole, plan), EXACT, DynamicLossScale(8.0)) for _ in range(2)]
        for _ in range(2):
            states = [run(state, batch(mesh.get_rank()))[0] for run, state in zip((step, jitted), states, strict=True)]
        assert same_bits(*states)

    replicate, shard = world
    simulated(law, replicate=replicate, shard=shard)


@pytest.mark.parametrize("shard", [1, 2])
def test_what_is_gathered_together_lies_apart(shard):
    """Each gather of a bucket has a buffer that starts at offset 0: otherwise a view would read another unit."""

    def both(mesh: Any, x: Tensor, y: Tensor) -> list[Tensor]:
        rows = [fshard.all_gather(one, mesh, "shard", label="a") for one in (x, y)]
        return [row.as_strided((mesh.size("shard"),), (1,), 0) for row in rows]

    def law(mesh: Any) -> None:
        run = partial(both, mesh)
        args = torch.tensor([1.0 + mesh.get_rank()]), torch.tensor([5.0 + mesh.get_rank()])
        lowered = eager(run, bucket=EVERYTHING).lower(*args)
        assert len(labels(lowered.graph)) == 1
        is_right(lowered, run, *args)

    simulated(law, shard=shard)


def test_a_gradient():
    """A gradient outside of a step has fewer gathers and the same bits: otherwise only steps could use buckets."""

    def law(mesh: Any) -> None:
        args = given_to(gradient, mesh)
        few, many = (eager(gradient, bucket=size).lower(*args) for size in (EVERYTHING, 0))
        assert len(labels(few.graph)) < len(labels(many.graph))
        is_right(few, gradient, *args)

    simulated(law)


def test_what_may_not_wait_does_not():
    """A sum of an earlier sum, and a gather after a write, are sent alone: otherwise they would send old values."""

    def chained(mesh: Any, x: Tensor) -> list[Tensor]:
        first = fshard.all_reduce(x, mesh, "shard", label="a")
        other = fshard.all_reduce(3 * x, mesh, "shard", label="a")
        return [first, other, fshard.all_reduce(first + 1, mesh, "shard", label="a")]

    def rewritten(mesh: Any, x: Tensor) -> list[Tensor]:
        y = 2 * x
        part = y[:2]
        first = fshard.all_gather(y, mesh, "shard", label="a")
        y.add_(first.sum())
        return [first, fshard.all_gather(part, mesh, "shard", label="a"), y]

    def law(mesh: Any) -> None:
        x = torch.arange(4.0) + mesh.get_rank()
        for fn, kind, num in ((chained, "all_reduce", 2), (rewritten, "all_gather", 2)):
            run = partial(fn, mesh)
            lowered = eager(run, bucket=EVERYTHING).lower(x)
            assert len(labels(lowered.graph, kind)) == num
            is_right(lowered, run, x)

    simulated(law)


KINDS = {"all_gather": fshard.all_gather, "all_reduce": fshard.all_reduce, "reduce_scatter": fshard.reduce_scatter}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bucket_is_as_large_as_it_may_be(kind):
    """Collectives of every kind are merged up to the given bytes: else memory would be exceeded, or too many sent."""

    def several(mesh: Any, x: Tensor) -> list[Tensor]:
        return [KINDS[kind](i * x, mesh, "shard", label=f"a{i}") for i in range(6)]

    def law(mesh: Any) -> None:
        x = torch.arange(4.0) + mesh.get_rank()
        each = max(x.nbytes, several(mesh, x)[0].nbytes)  # what is sent, or what it becomes
        for size, num in ((0, 6), (2 * each - 1, 6), (2 * each, 3), (3 * each - 1, 3), (3 * each, 2), (6 * each, 1)):
            lowered = eager(several, bucket=size).lower(mesh, x)
            assert len(labels(lowered.graph, kind)) == num, size
            is_right(lowered, several, mesh, x)

    simulated(law)


@pytest.mark.parametrize("at", ["what is sent", "a view of it", "its base", "what is sent later", "the result"])
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_between_two_collectives(kind, reads, at):
    """What is sent has the values of its place in the program: else a merged collective would send what was written
    to its tensor before, or after."""

    def rewritten(mesh: Any, x: Tensor) -> list[Tensor]:
        base, other = torch.cat([2 * x, x]), 3 * x
        sent = base[: len(x)]
        first = KINDS[kind](sent, mesh, "shard", label="a")
        places = {"what is sent": sent, "a view of it": sent[1:], "its base": base, "what is sent later": other}
        (first if at == "the result" else places[at]).mul_(first.sum() if reads else 7)
        return [first, KINDS[kind](other, mesh, "shard", label="a"), base]

    def law(mesh: Any) -> None:
        x = torch.arange(1.0, 5.0) + mesh.get_rank()
        is_right(eager(rewritten, bucket=EVERYTHING).lower(mesh, x), rewritten, mesh, x)

    simulated(law)


def test_small_collectives_are_merged_without_being_asked():
    """Many small units would cost the start of a collective each, and a merged one would lose the bits."""

    def law(mesh: Any) -> None:
        step, *args = state_of(mesh)
        merged, plain = eager(step).lower(*args), eager(step, bucket=0).lower(*args)
        counts = [sum(traffic.count for traffic in lowered.collectives()) for lowered in (merged, plain)]
        assert counts[0] < counts[1] / 2
        rooms = [targets(lowered.graph)["fshard.room"] for lowered in (merged, plain)]
        assert rooms[0] < rooms[1] / 2, "no peer reads the memory of what is merged"
        is_right(merged, step, *args)

    simulated(law)


def gathered_twice(s: Any) -> tuple[Tensor, Tensor, Any]:
    """One tree gathered three times: the first is written to, the last is a result."""
    scaled, raw = fshard.gather_params(s), fshard.gather_params(s)
    scaled["a"].mul_(2)
    return scaled["a"].sum(), raw["a"].sum(), fshard.gather_params(s)


def read_before(s: Any) -> tuple[Tensor, Any, Any]:
    """A tree gathered, and gathered again: the second is read first."""
    whole = fshard.gather_params(s)
    value, _ = fshard.value_and_grad(lambda p: p["a"].square().sum() + p["b"].sum())(s)
    return value, torch.func.grad(lambda p: fshard.gather_params(p)["a"].square().sum())(s), whole


@pytest.mark.parametrize("fn", [gathered_twice, read_before])
def test_what_is_sent_once_is_a_value_for_each_gather(fn):
    """A write to one gathered tensor would change another, or it would be read before it is there."""

    def law(mesh: Any) -> None:
        whole = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
        s = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a", "b"]))
        assert same_bits(eager(fn, in_flight=EVERYTHING)(s), fn(s))
        assert all(len({*units}) == len(units) for units in gathers_of(fn, s))

    def gathers_of(fn: Any, s: Any) -> list[list[str]]:
        return [label.split("+") for label in labels(eager(fn, in_flight=EVERYTHING).lower(s).graph)]

    simulated(law, shard=2)
