"""How many units travel beside the one that is computed with: `make_plan(prefetch=)`, and what is chosen without it."""

import random
from typing import Any

import pytest
import torch
from support.logged import Event, Logged, Mark, at
from support.worlds import gloo, simulated
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.plan.ahead import Ahead

DEPTHS = (None, 0, 1, 2, 3)
EQUAL, UNEQUAL = (6,) * 6, (48, 6, 6, 6, 6, 6, 48, 6)


def events(mesh: Any, widths: tuple[int, ...], prefetch: int | None) -> list[Event]:
    """What one forward and backward through blocks of these widths starts, waits for and computes, in order."""
    params = [torch.full((6, width), 0.1) for width in widths]
    logged = Logged(mesh)
    sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["*"], prefetch=prefetch))

    def loss(p: Any, x: torch.Tensor) -> Any:
        for i in range(len(widths)):
            x = Mark.apply(torch.tanh(x @ p[i][:, :6] + p[i].mean()), logged.log, str(i))
        return fshard.Sum(x.sum())

    logged.log.clear()
    fshard.value_and_grad(loss)(sharded, torch.ones(2, 6, requires_grad=True) + mesh.get_rank())
    return logged.log


def under_way(log: list[Event], kind: str, sizes: tuple[int, ...]) -> list[int]:
    """After each event, the sizes together of the units with a collective of this kind under way."""
    totals, total = list[int](), 0
    for what, name, unit in log:
        total += (name == kind) * (sizes[int(unit)] if what == "start" else -sizes[int(unit)])
        totals.append(total)
    return totals


@pytest.mark.parametrize("prefetch", DEPTHS[1:])
def test_a_number_of_units_travels(prefetch):
    """Another number of units than asked for would be gathered ahead or reduced behind, and hold memory."""
    ones = (1,) * len(EQUAL)
    for log in simulated(events, EQUAL, prefetch, shard=2):
        log = [event for event in log if event[2] != "loss"]
        for kind, most in (("all_gather", max(prefetch, 1)), ("reduce_scatter", prefetch + 1)):
            assert max(under_way(log, kind, ones)) == most
        turn = at(log, "use", "forward", "5")[0]
        for i in range(6 - prefetch):  # while a unit is computed with, the next are on their way
            now = at(log, "use", "forward", str(i))[0]
            assert under_way(log, "all_gather", ones)[now] == min(prefetch, 5 - i)
        for i in range(prefetch, 5):
            now = at(log, "use", "backward", str(i))[0]
            assert now > turn
            # the unit of the mark itself is waited for after it
            assert under_way(log, "all_gather", ones)[now] == min(prefetch, i + 1)
            assert under_way(log, "reduce_scatter", ones)[now] == min(prefetch, 5 - i)


def test_by_default_two_of_the_largest_units_are_in_memory():
    """Units of unequal sizes would hold more memory than two of the largest, or travel one by one."""
    sizes, room = UNEQUAL, 2 * max(UNEQUAL)
    for log in simulated(events, UNEQUAL, None, shard=2):
        log = [event for event in log if event[2] != "loss"]
        gathers, sums = (under_way(log, kind, sizes) for kind in ("all_gather", "reduce_scatter"))
        for way, i in ((way, i) for way in ("forward", "backward") for i in range(len(sizes))):
            now = at(log, "use", way, str(i))[0]
            assert gathers[now] + sizes[i] * (way == "forward") <= room
            assert sums[now] + sizes[i] <= room
        assert max(sums) <= room
        ones = (1,) * len(sizes)
        assert max(under_way(log, "all_gather", ones)) == 4
        assert max(under_way(log, "reduce_scatter", ones)) == 5  # as one starts, four others are under way
    (equal, one) = (simulated(events, EQUAL, prefetch, shard=2) for prefetch in (None, 1))
    assert equal == one


def test_what_travels_fits():
    """More than fits would travel, nothing would, or a unit would wait behind one that does not fit."""
    generator = random.Random(0)
    for _ in range(300):
        sizes = tuple(generator.choice((1, 2, 3, 7, 20)) for _ in range(generator.randrange(1, 9)))
        unit, room = generator.randrange(len(sizes)), 2 * max(sizes)
        others = [other for other in range(len(sizes)) if other != unit]
        for chosen in (
            Ahead(sizes, None).gathers(unit, others, 1),
            others[-num:] if (num := Ahead(sizes, None).reductions(unit, others, 1)) else [],
        ):
            assert len(chosen) >= min(1, len(others))
            assert sizes[unit] + sum(sizes[other] for other in chosen) <= room
        chosen = Ahead(sizes, None).gathers(unit, others, 1)
        assert chosen == others[: len(chosen)]
        following = others[len(chosen) : len(chosen) + 1]
        if following and len(chosen) < 4:
            assert sizes[unit] + sum(sizes[other] for other in chosen + following) > room


def params_of_unequal_sizes() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(8, 8, generator=generator) / 3, "b": torch.ones(n)} for n in (8, 40, 8, 8, 100)]
    return {"embed": torch.randn(40, 8, generator=generator), "blocks": blocks, "head": torch.ones(8, 30)}


def loss(p: Any, rows: torch.Tensor, checkpointed: bool) -> Any:
    """A loss that reads unequal units, with checkpoints if wanted."""

    def block(b: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ b["w"] + b["b"][:8])

    x = p["embed"][rows]
    for i in range(5):
        if checkpointed:
            x = checkpoint(lambda x, i=i: block(p["blocks"][i], x), x, use_reentrant=False)
        else:
            x = block(p["blocks"][i], x)
    out = x @ p["head"]
    return fshard.Mean(out.square().sum(), out.numel())


PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "one stays": {"regather": {"blocks.1": False}},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "a frozen unit": {"frozen": ["blocks.2.*"]},
    "over both axes": dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard")),
}


def trained(mesh: Any, plan: str, checkpointed: bool, accumulate: int, jit: bool) -> list[list[torch.Tensor]]:
    """Loss, parameters and a Hessian-vector product after two steps, at every depth."""
    results, tx = [], fshard.optim.adamw(0.1)
    rows = torch.arange(6 * accumulate).view(-1, 2) % 40 + mesh.get_rank()
    for prefetch in DEPTHS if plan != "over both axes" else (None, 1, 2):
        params = params_of_unequal_sizes()
        layout = fshard.make_plan(params, mesh, units=["embed", "blocks.*", "head"], prefetch=prefetch, **PLANS[plan])
        sharded = fshard.shard_params(params, layout)
        state = fshard.init_state(sharded, tx)
        step: Any = fshard.train_step(lambda p, x: loss(p, x, checkpointed), tx, accumulate=accumulate)
        step = fshard.jit(step, backend="eager") if jit else step
        for _ in range(2):
            state, metrics = step(state, rows)
        product = [] if jit or checkpointed else [fshard.hvp(lambda p, x: loss(p, x, False))(sharded, sharded, rows)]
        gathered = [fshard.gather_params(x) for x in (state.params, *product)]
        results.append([metrics["loss"], metrics["grad_norm"], *fshard.tree.leaves(gathered)])
    return results


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("checkpointed", "accumulate"), [(False, 3), (True, 1)])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("axes", [{"shard": 3}, {"shard": 2, "replicate": 2}])
def test_the_depth_changes_no_bit(plan, checkpointed, accumulate, jit, axes):
    """A unit that was gathered early would have old values, or a reduction that waits longer would lose some."""
    for first, *others in simulated(trained, plan, checkpointed, accumulate, jit, **axes):
        for other in others:
            assert all(map(torch.equal, first, other))


def test_the_depth_changes_no_bit_in_processes():
    """Buffers in shared memory would be used again before a peer has read them."""
    for first, *others in gloo(trained, "full", True, 1, False, shard=2):
        for other in others:
            assert all(map(torch.equal, first, other))


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, ValueError), (1.5, TypeError), (True, TypeError)],
)
def test_what_is_no_number_of_units(value, error):
    """A wrong depth would be found in the first step, or never."""
    with pytest.raises(error, match=f"prefetch={value}: expected a number of units, or None, at least 0"):
        fshard.make_plan([torch.ones(2)], prefetch=value)


def test_ranks_with_other_depths():
    """Ranks would gather in different orders, and hang."""

    def job(mesh: Any) -> None:
        fshard.make_plan([torch.ones(4)], mesh, prefetch=mesh.get_rank())

    with pytest.raises(fshard.MismatchError, match="prefetch=1"):
        simulated(job, shard=2)
