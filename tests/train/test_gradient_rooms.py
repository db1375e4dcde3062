"""Gradients in a tensor for each unit, allocated as they come: they train as gradients in one tensor do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.memory import Live
from support.models import LM_UNITS, NARROW, STRATEGIES, WIRED, WORLDS, lm_batch, lm_params, mean_loss, same_bits
from support.optimizers import KERNELS, TRANSFORMS
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.grad.grad import later_grads
from fshard.plan import plan as planned
from fshard.sharding.sharded import Sharded, whole_view
from fshard.testing import simulate
from fshard.train import step as stepping

Metrics = list[dict[str, Tensor]]


def train(
    mesh: Any, name: str, strategy: dict[str, Any], how: dict[str, Any], scaled: bool = False, policy: str | None = None
) -> tuple[Any, Metrics]:
    """Train on this rank's data: whole parameters and optimizer state, and metrics."""
    params, tx = lm_params(torch.float32 if policy else torch.float64), TRANSFORMS[name]()
    plan = fshard.make_plan(
        params, mesh, units=LM_UNITS, whole=["**.b", "tail.right"], **{"policy": policy} if policy else {}, **strategy
    )
    scaler = fshard.DynamicLossScale(4.0) if scaled else None
    state, metrics = fshard.init_state(fshard.shard_params(params, plan), tx, scaler), []
    step = fshard.train_step(mean_loss, tx, **how)
    for i in range(3):
        state, row = step(state, lm_batch(i, 0 if mesh is None else mesh.get_rank()))
        metrics.append(row)
    return fshard.gather_params((state.params, state.opt_state)), metrics


def rooms(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[Any, Any]:
    """What a run gives with one tensor for the gradients of a kind, and with tensors of few bytes."""
    one = run()
    monkeypatch.setattr(planned, "SMALL_GRADIENTS", 1)
    monkeypatch.setattr(stepping, "SMALL_GRADIENTS", 200)
    return one, run()


def check(one: Any, own: Any, exact: bool) -> None:
    """Parameters and state with the same bits, or nearly; a norm adds up in another order."""
    for (of_one, metrics), (of_own, others) in zip(one, own, strict=True):
        if exact:
            assert same_bits(of_one, of_own)
        torch.testing.assert_close(fshard.tree.leaves(of_own), fshard.tree.leaves(of_one), rtol=2e-5, atol=1e-6)
        torch.testing.assert_close(others, metrics, rtol=2e-5, atol=1e-6)


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "clipped": {"donate": True, "clip_norm": 0.5},
    "micro": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True, "donate": True},
}
CASES = [("none", "full", how) for how in HOW] + [("3", *pair) for pair in zip(NARROW, HOW, strict=True)]
CASES += [("3", "full", "clipped"), *(("2x2", s, "donated") for s in ("wide_state", "wide", "together", "half"))]


@pytest.mark.parametrize(("world", "strategy", "how"), CASES)
def test_units_apart_train_as_units_together(
    monkeypatch: pytest.MonkeyPatch, world: str, strategy: str, how: str
) -> None:
    """A unit would be updated with another one's gradient, with that of an earlier micro-batch, or not at all."""

    def run() -> Any:
        arguments = ("rmsprop-all", WIRED[strategy], HOW[how])
        if world == "none":
            return [train(None, *arguments)]
        replicate, shard = WORLDS[world]
        return simulated(train, *arguments, replicate=replicate, shard=shard)

    check(*rooms(monkeypatch, run), exact=how != "clipped")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_optimizer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An optimizer that reads whole leaves, labels or moments in blocks would read those of another unit."""
    strategy = {} if name != "adamw_8bit" else {"block": 4}
    one, own = rooms(monkeypatch, lambda: simulated(train, name, strategy, {"donate": True}, shard=2))
    check(one, own, exact=name not in KERNELS)


@pytest.mark.parametrize("policy", [None, "compute=bf16,reduce=f32", "reduce=f16", "grads=bf16"])
def test_scaled_and_in_other_dtypes(monkeypatch: pytest.MonkeyPatch, policy: str | None) -> None:
    """Gradients would be unscaled in one tensor alone, or keep the dtype of another kind."""
    arguments = ("rmsprop", STRATEGIES["full"], {"donate": True}, True, policy)
    check(*rooms(monkeypatch, lambda: simulated(train, *arguments, shard=2)), exact=True)


@pytest.mark.parametrize("room", [1, 100, 300, 1 << 20])
def test_a_tree_in_rooms_is_the_tree(room: int) -> None:
    """Leaves would overlap, or a norm would leave a tensor out or count padding."""

    def law(mesh: Any) -> None:
        plan = fshard.make_plan(lm_params(), mesh, units=LM_UNITS)
        whole = fshard.shard_params(lm_params(), plan)
        view = replace(whole_view(plan, plan.params_over, whole.view.kinds), room=room)
        tree = Sharded(view, [torch.full((numel,), torch.nan, dtype=torch.float64) for _, numel in view.tensors])
        for place in view.rows:
            tree.shard(*place).copy_(whole.shard(*place))
        assert not any(x.isnan().any() for x in tree.tensors)
        assert sum(x.numel() for x in tree.tensors) == sum(x.numel() for x in whole.tensors)
        numbers = [row.tensor for row in view.rows.values()]
        assert all(x.nbytes <= room or numbers.count(n) == 1 for n, x in enumerate(tree.tensors))
        assert same_bits(fshard.gather_params(tree), fshard.gather_params(whole))
        torch.testing.assert_close(optim.global_norm(tree), optim.global_norm(whole), rtol=1e-14, atol=0)
        assert repr(tree).count("float64[") == len(tree.tensors)

    simulated(law, shard=2)


def test_leaves_in_host_memory_share_a_tensor() -> None:
    """The host would wait for the norm of each unit, though no device memory is saved."""

    def law(mesh: Any) -> None:
        plan = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, offload="blocks.*")
        params = fshard.shard_params(lm_params(), plan)
        rooms = later_grads(params, plan.grads_over, room=1)
        assert len(rooms.whole().tensors) == len(params.trainable.tensors)

    simulated(law)


WIDTH, LAYERS = 2048, 6
UNIT = 4 * WIDTH**2  # bytes of a layer: as many as of its activation


def wide_loss(params: Any, x: Tensor) -> Tensor:
    """Layers of one row, each with a large activation."""
    for layer in params["layers"]:
        x = x @ layer
        x = x + (x.mean() + torch.zeros(layer.shape)).sin().mean()
    return x.square().mean()


@pytest.mark.parametrize(("ranks", "name"), [(1, "full"), (2, "ddp"), (2, "zero1")])
def test_gradients_come_as_activations_go(ranks: int, name: str) -> None:
    """All gradients would be allocated with the first one, beside all activations."""
    live, tx = Live(), optim.sgd(1e-3)

    def step(mesh: Any) -> Any:
        params = {"layers": [torch.full((WIDTH, WIDTH), 1e-3) for _ in range(LAYERS)]}
        plan = fshard.make_plan(params, mesh, units=["layers.*"], **STRATEGIES[name])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        live.leave_out(x for x in fshard.tree.leaves((params, state)) if isinstance(x, Tensor))
        with live:
            return fshard.train_step(wide_loss, tx, donate=True)(state, torch.ones(1, WIDTH))

    simulate(step, ranks)
    assert live.peak / ranks <= 1.05 * (LAYERS + 3) * UNIT, live.peak / ranks / UNIT
