"""Leaves in host memory: steps keep their bits, every row lies on the right device, and copies on GPUs do not race."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.accelerator import DEVICE, on_accelerator
from support.models import LM_UNITS, STRATEGIES, WORLDS, lm_batch, lm_params, mean_loss, rand, same_bits
from support.offloaded import RIGHT, Doubling, loss, placed, state_of
from support.optimizers import TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import DynamicLossScale, gather_params, optim
from fshard.core import tree
from fshard.plan import ahead
from fshard.wire import Int8

AWAY = ["blocks.*", "tail.left"]  # of these units, one only in part
OPTIMIZERS = {"sgd": lambda: optim.sgd(0.1, momentum=0.9), "adamw": lambda: optim.adamw(0.05)}
# Without torch's fused kernels, which round the last few elements of a row in another way than the others
PLAIN = {
    "sgd": lambda: optim.sgd(0.1, momentum=torch.tensor(0.9)),
    "adamw": lambda: optim.adamw(0.05, b1=torch.tensor(0.9)),
}
PLANS: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "wires": {"param_wire": Int8(16), "grad_wire": Int8(16)},
    "together": {"together": True, "policy": "compute=bf16; blocks.*.scale: compute=f32"},
    "whole": {"whole": ["blocks.0", "tail.left"]},
    "frozen": {"frozen": "blocks.1"},
    "half": {"policy": "compute=f16"},
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
    "donate": {"donate": True},
}


def trained(
    mesh: Any, host: Any, plan: str, step: str, tx: Any, scale: float | None = None, **more: Any
) -> tuple[Any, ...]:
    """Losses, parameters, optimizer state and gradients of three steps, all whole, by path."""
    params = lm_params(torch.float32)
    made = fshard.make_plan(params, mesh, units=LM_UNITS, offload=host, **PLANS[plan])
    assert any(kind.host for kind in made.kinds) == (host is not None)
    transform = tx()
    scaler = None if scale is None else DynamicLossScale(scale, growth_interval=1)
    state, losses = fshard.init_state(fshard.shard_params(params, made), transform, scaler), []
    run = fshard.train_step(mean_loss, transform, **STEPS[step], **more)
    for i in range(3):
        state, metrics = run(state, lm_batch(i, mesh.get_rank()))
        losses.append((metrics["loss"], metrics["grad_norm"], metrics["found_inf"]))
    local = fshard.value_and_grad(mean_loss, reduce=False)(state.params, lm_batch(9, mesh.get_rank()))[1]
    grads = gather_params(fshard.reduce_grads(local))
    assert same_bits(
        grads, gather_params(fshard.value_and_grad(mean_loss)(state.params, lm_batch(9, mesh.get_rank()))[1])
    )
    return losses, gather_params(state.params), optim.state.gather_state(state.opt_state), grads


def alike(runs: list[Any], others: list[Any]) -> None:
    """Two lists of runs are equal to the bit, except for the gradient norm, which sums other rows."""
    for (losses, *rest), (expected, *wanted) in zip(runs, others, strict=True):
        for (value, norm, found), (value_, norm_, found_) in zip(losses, expected, strict=True):
            assert same_bits((value, found), (value_, found_))
            torch.testing.assert_close(norm, norm_, rtol=1e-6, atol=0)
        assert same_bits(rest, wanted)


@pytest.mark.parametrize("world", ["1", "3", "2x2"])
@pytest.mark.parametrize("plan", PLANS)
def test_where_leaves_lie_changes_no_bit(plan, world):
    """Leaves in host memory train with the same bits under all strategies and wires: otherwise offloading would
    change training."""
    replicate, shard = WORLDS[world]
    if "replicate" in str(PLANS[plan]) and replicate == 1:
        pytest.skip("it needs two axes")
    blockwise = plan == "wires"  # whose blocks other leaves come to lie in
    for step, tx in zip(STEPS, [*OPTIMIZERS] * 2, strict=True):
        for host, make in (("**", OPTIMIZERS[tx]), *([] if blockwise else [(AWAY, PLAIN[tx])])):
            runs = [
                simulated(trained, where, plan, step, make, shard=shard, replicate=replicate) for where in (host, None)
            ]
            alike(*runs)


@pytest.mark.parametrize("more", [{"clip_norm": 0.1}, {"scale": 2.0**20}, {"reduction": Doubling()}], ids=str)
@pytest.mark.parametrize(("step", "tx"), [("plain", "adamw"), ("micro", "sgd")])
def test_clipping_scaling_and_hooks(more, step, tx):
    """Clipping, loss scales and hooks work on leaves in host memory: otherwise offloaded leaves would escape them."""
    plan, args = "half" if "scale" in more else "full", (step, OPTIMIZERS[tx])

    def run(host: Any) -> list[Any]:
        return simulated(lambda mesh: trained(mesh, host, plan, *args, **more), shard=3)

    away, near, some = run("**"), run(None), run(AWAY)
    assert same_bits(away, near)
    for x, y in zip(some, near, strict=True):
        for one, other in zip(tree.leaves(x[:2]), tree.leaves(y[:2]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "scale" not in more or near[0][0][0][2] == 1


def plain_adamw() -> optim.Transform:
    """PLAIN["adamw"] as a function that processes can import."""
    return PLAIN["adamw"]()


def test_processes():
    """Processes with leaves in host memory have the bits of simulated ranks without: otherwise offloading would fail
    in real runs."""
    args = "full", "micro", plain_adamw
    alike(gloo(trained, AWAY, *args, shard=2), simulated(trained, None, *args, shard=2))


@pytest.mark.parametrize("plan", ["full", "zero1", "ddp", "wires", "keep"])
@pytest.mark.parametrize("step", STEPS)
def test_what_is_staged_arrives(plan, step, monkeypatch):
    """Gradients staged in device buffers are copied to host memory in full: otherwise an update would read garbage
    (here NaN)."""
    expected = simulated(trained, "**", plan, step, OPTIMIZERS["adamw"], shard=2)
    landed = list[Tensor]()

    def landing(row: Tensor, device: torch.device) -> Tensor:
        landed.append(torch.full_like(row, torch.nan))
        return landed[-1]

    monkeypatch.setattr(ahead, "landing", landing)
    alike(simulated(trained, "**", plan, step, OPTIMIZERS["adamw"], shard=2), expected)
    assert landed


def test_gathering_is_differentiable():
    """torch.func.grad through `gather_params` has the same bits with leaves in host memory: otherwise such gradients
    would be wrong."""

    def law(mesh: Any) -> Any:
        params, found = lm_params(), []
        for host in (None, AWAY):
            sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS, offload=host))

            def loss(x: Any) -> Tensor:
                return mean_loss(gather_params(x), lm_batch(0, mesh.get_rank())).total

            found.append(gather_params(torch.func.grad(loss)(sharded)))
        assert same_bits(*found)

    simulated(law, shard=2)


@pytest.mark.parametrize("plan", ["full", "ddp", "whole", "frozen"])
@pytest.mark.parametrize("host", [None, AWAY])
@pytest.mark.parametrize("shard", [1, 2])
def test_what_is_gathered_is_of_the_caller(shard, host, plan):
    """A donated step would write to the parameters that were gathered before it."""

    def law(mesh: Any) -> None:
        made = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, offload=host, **PLANS[plan])
        sharded = fshard.shard_params(lm_params(), made)
        whole = gather_params(sharded)
        for row in sharded.tensors:
            row.zero_()
        assert same_bits(whole, lm_params())

    simulated(law, shard=shard)


def test_a_plan_says_so():
    """Host leaves are part of a plan's text and fingerprint: otherwise ranks could disagree on them, or a typo pass
    unnoticed."""
    params = {"a": torch.ones(2), "b": torch.ones(2)}

    def law(mesh: Any) -> None:
        plans = [fshard.make_plan(params, mesh, offload=host) for host in (None, "a")]
        assert plans[0].fingerprint != plans[1].fingerprint
        assert "'a' float32 host[2]" in plans[1].describe()

    simulated(law, shard=1)
    with pytest.raises(ValueError, match=re.escape("offload='a': expected a mesh")):
        fshard.make_plan(params, offload="a")
    with pytest.raises(ValueError, match=re.escape("offload: the pattern 'c' matches nothing")):
        simulated(lambda mesh: fshard.make_plan(params, mesh, offload="c"), shard=1)


# On which device every row lies: the accelerator is the meta device, which torch does not mix with the CPU.


@pytest.fixture
def device() -> Iterator[None]:
    """The simulated accelerator (the meta device) as the device of a mesh."""
    with on_accelerator():
        yield


MORE = {**TRANSFORMS, "muon-schedule": lambda: optim.muon(optim.schedules.linear(0.1, 0.2, 3))}
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "donate": ({}, {"donate": True}),
    "micro": ({}, {"accumulate": 2, "clip_norm": 1.0}),
    "once": ({}, {"accumulate": 2, "reduce_once": True, "clip_norm": 1.0}),
    "ddp": (STRATEGIES["ddp"], {"clip_norm": 1.0}),
    "zero1": (STRATEGIES["zero1"], {}),
    "zero2": (STRATEGIES["zero2"], {"donate": True}),
    "wires": ({"param_wire": Int8(16), "grad_wire": Int8(16)}, {}),
    "together": ({"together": True}, {}),
    "half": ({"policy": "compute=f16"}, {"clip_norm": 1.0}),
    "whole": ({"whole": "blocks.0"}, {"accumulate": 2}),
    "hook": ({}, {"reduction": Doubling()}),
}


def check_step(tx: Any, how: dict[str, Any], step: dict[str, Any]) -> None:
    """Two steps on the simulated accelerator; every row must lie on the right device before and after."""
    state = state_of(tx, DynamicLossScale(8.0), **how)
    run = fshard.train_step(loss, tx, **step)
    for _ in range(2):
        state, metrics = run(state, torch.ones(4, 8, device=DEVICE))
        assert placed(state.params) == RIGHT
        held = placed(state.opt_state)
        assert held[True] <= RIGHT[True]
        assert held[False] <= RIGHT[False]
        assert all(x.device.type == "meta" for x in (*metrics.values(), *tree.leaves(state.loss_scale)))
    if "grad_wire" not in how:
        for reduce in (True, False):
            grads = fshard.value_and_grad(loss, reduce=reduce)(state.params, torch.ones(4, 8, device=DEVICE))[1]
            reduced = grads if reduce else fshard.reduce_grads(grads)
            assert placed(reduced) == RIGHT
            assert fshard.NoLossScale().unscale(reduced)[1].device == DEVICE
    fshard.evaluate(loss)(state.params, torch.ones(4, 8, device=DEVICE))
    assert {x.device.type for x in tree.leaves(gather_params(state.params))} == {"meta"}
    whole = optim.state.gather_state(state.opt_state)
    optim.state.shard_state({path: x.cpu() for path, x in whole.items()}, state.opt_state)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", MORE)
def test_every_optimizer_runs_where_its_state_is(name):
    """Moments of host leaves stay in host memory in every optimizer: otherwise an update would mix devices or fill
    the GPU."""
    check_step(MORE[name](), {}, {"clip_norm": 1.0, "accumulate": 2})


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", HOW)
def test_where_everything_lies(name):
    """Under every strategy and wire, rows stay on their device: otherwise a step would fail on a GPU or use more GPU
    memory."""
    check_step(optim.adamw(0.1), *HOW[name])


@pytest.mark.usefixtures("device")
def test_derivatives_end_in_host_memory():
    """Gradients outside a step lie where their parameters lie: otherwise the user's update would mix devices."""
    state = state_of(optim.sgd(0.1), None)
    rows = tree.map(lambda x: x.detach().requires_grad_(), state.params)
    total = loss(gather_params(rows), torch.ones(4, 8, device=DEVICE)).total
    total.backward()
    assert [row.grad.device for row in rows.tensors] == [row.device for row in rows.tensors]


# On a GPU.


def big(dtype: torch.dtype = torch.float32) -> Any:
    """Six wide blocks, so that copies of units take long enough to race with computation."""
    blocks = [
        {"w": 0.03 * rand(1024, 1024, seed=i, dtype=dtype), "b": rand(1024, seed=50 + i, dtype=dtype)} for i in range(6)
    ]
    return {
        "blocks": blocks,
        "norm": rand(1024, seed=90, dtype=dtype),
        "head": 0.1 * rand(1024, 16, seed=91, dtype=dtype),
    }


def twenty(mesh: Any, host: Any, **kw: Any) -> tuple[Any, fshard.TrainState]:
    """Losses and the state after twenty steps with a fused AdamW on a GPU."""
    params, tx = tree.map(lambda x: x.cuda(), big()), optim.adamw(optim.schedules.linear(1e-4, 1e-3, 9))
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], offload=host)
    state, losses = fshard.init_state(fshard.shard_params(params, plan), tx, DynamicLossScale(64.0)), []
    step = fshard.train_step(loss, tx, **kw)
    for i in range(20):
        state, metrics = step(state, rand(64, 1024, seed=7 * i + mesh.get_rank(), dtype=torch.float32).cuda())
        losses.append(metrics["loss"])
    return torch.stack(losses).cpu(), state


@pytest.mark.cuda
@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("kw", [{}, {"donate": True}, {"accumulate": 2, "donate": True, "clip_norm": 0.1}], ids=str)
def test_nothing_is_overtaken(shard, kw):
    """Twenty steps with copies beside the computation equal those without, and host rows stay pinned: otherwise
    copies would race."""

    def law(mesh: Any) -> None:
        (near, at), (away, state) = (twenty(mesh, host, **kw) for host in (None, ["blocks.*", "norm"]))
        torch.testing.assert_close(away, near, rtol=1e-4, atol=1e-5)
        whole, expected = gather_params(state.params), gather_params(at.params)
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
        assert placed(state.params) == placed(state.opt_state) == {True: {"cpu"}, False: {"cuda"}}
        assert all(row.is_pinned() for row in state.params.tensors if row.device.type == "cpu")
        grads = fshard.value_and_grad(loss)(state.params, torch.ones(4, 1024, device="cuda"))[1]
        assert all(row.is_pinned() for row in grads.tensors if row.device.type == "cpu")

    fshard.testing.simulate(law, shard=shard, device="cuda")
