"""Graphs of donated steps on one rank update each unit when its gradients are there, and train as graphs of one row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.memory import Live
from support.models import LM_UNITS, lm_batch, lm_params, mean_loss, same_bits
from support.optimizers import TRANSFORMS
from support.steps import QUIET
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.compiler import lowered as lowering
from fshard.compiler.regions import Region, are_alike, one_region, regions
from fshard.graph.inspect import operator as name_of
from fshard.train import step as stepping

pytestmark = pytest.mark.filterwarnings(QUIET)
aot = partial(fshard.jit, backend="aot_eager", donate=True)
Metrics = list[dict[str, Tensor]]


def begun(tx: Any, mesh: Any = None, scaled: bool = False, **how: Any) -> Any:
    """A state of the language model; `how`: of its plan."""
    params = lm_params(torch.float32 if "policy" in how else torch.float64)
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, whole=["**.b", "tail.right"], **how)
    return fshard.init_state(fshard.shard_params(params, plan), tx, fshard.DynamicLossScale(4.0) if scaled else None)


def both(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[int], Any], room: int = 200, shard: int = 1
) -> tuple[list[Any], list[Any]]:
    """What a run gives with one row of gradients, and with tensors of `room` bytes; without a mesh if `shard` is 0."""

    def ran(number: int) -> list[Any]:
        monkeypatch.setattr(stepping, "SMALL_GRADIENTS", number)
        return simulated(run, shard=shard) if shard else [run(None)]  # type: ignore[arg-type]

    return ran(0), ran(room)


def check(one: Any, own: Any) -> None:
    """States with the same bits; a norm adds up in another order."""
    for (of_one, metrics), (of_own, others) in zip(one, own, strict=True):
        assert same_bits(of_one, of_own)
        torch.testing.assert_close(others, metrics, rtol=2e-5, atol=1e-6)


def check_beside_eager(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """`run(mesh, make)` with and without updates by unit on one device, and without a graph."""
    eager = run(None, lambda fn: fn)
    one, own = both(monkeypatch, run, shard=0)
    check(one, own)
    torch.testing.assert_close(*map(fshard.tree.leaves, (own[0], eager)), rtol=1e-6, atol=1e-8)


def train(make: Any, tx: Any, how: dict[str, Any], *of: Any, **state: Any) -> tuple[Any, Metrics]:
    """Whole parameters and optimizer state after three steps, and the metrics."""
    given, metrics, step = begun(tx, *of, **state), [], make(fshard.train_step(mean_loss, tx, **how))
    places = [x.data_ptr() for x in fshard.tree.leaves((given.params, given.opt_state))]
    for i in range(3):
        given, row = step(given, lm_batch(i, 0))
        metrics.append(row)
    assert [x.data_ptr() for x in fshard.tree.leaves((given.params, given.opt_state))] == places
    return fshard.gather_params((given.params, given.opt_state)), metrics


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if not name.startswith("from_torch")])
def test_every_optimizer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A unit would be updated with another unit's gradients or moments, or twice."""
    block = {"block": 4} if name == "adamw_8bit" else {}
    check(*both(monkeypatch, lambda mesh: train(aot, TRANSFORMS[name](), {}, mesh, **block)))


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "micro": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
    "in backward": {"donate": True, "in_backward": True},
}


@pytest.mark.parametrize("room", [1, 200, 700])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("how", HOW)
def test_kinds_of_steps(monkeypatch: pytest.MonkeyPatch, how: str, shard: int, room: int) -> None:
    """An update would come before the last micro-batch's gradients, or before the factor that clips them."""
    check(*both(monkeypatch, lambda mesh: train(aot, optim.adamw(0.1), HOW[how], mesh), room, shard))


@pytest.mark.parametrize(
    "policy", ["compute=bf16,reduce=f32", "reduce=f16", "grads=bf16", "compute=bf16; blocks.*.scale: compute=f32"]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_scaled_and_in_other_dtypes(monkeypatch: pytest.MonkeyPatch, policy: str, scaled: bool) -> None:
    """A unit would be updated although another unit's gradients overflowed, or cast to another kind's dtype."""
    check(*both(monkeypatch, lambda mesh: train(aot, optim.sgd(0.1, momentum=0.9), {}, mesh, scaled, policy=policy)))


def test_several_ranks_have_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over ranks end in rows: their graphs would change with a limit that is for one rank."""
    tx = optim.adamw(0.1)

    def nodes(mesh: Any) -> list[str]:
        graph = aot(fshard.train_step(mean_loss, tx)).lower(begun(tx, mesh), lm_batch(0, 0)).graph
        return [node.name for node in graph.nodes]

    one, own = both(monkeypatch, nodes, shard=2)
    assert one == own


@pytest.mark.parametrize("donate", [False, True])
def test_small_models_and_kept_states_have_one_row(monkeypatch: pytest.MonkeyPatch, donate: bool) -> None:
    """A small model would get a kernel for each unit, and a state that is kept would be joined from parts."""
    tx = optim.adamw(0.1)

    def text(mesh: Any) -> str:
        return fshard.jit(fshard.train_step(mean_loss, tx), donate=donate).lower(begun(tx), lm_batch(0, 0)).as_text()

    one, own = both(monkeypatch, text, room=1 << 24 if donate else 1, shard=0)
    assert one == own


@pytest.mark.parametrize("num", [1, 2])
def test_reads_of_the_old_state_come_before_its_updates(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """A function reads what its steps replace: it would read new values."""
    tx = optim.adamw(0.1)

    def fn(state: Any, x: Any) -> Any:
        states, step = [state], fshard.train_step(mean_loss, tx)  # built here, with the limit of this run
        for _ in range(num):
            states.append(step(states[-1], x)[0])
        read = [optim.global_norm(of) for each in states for of in (each.params.trainable, each.opt_state.mu)]
        return states[-1], {"read": torch.stack(read)}

    def run(mesh: Any) -> Any:
        state, row = aot(fn)(begun(tx), lm_batch(0, 0))
        return fshard.gather_params((state.params, state.opt_state)), [row]

    state, row = fn(begun(tx), lm_batch(0, 0))
    one, own = both(monkeypatch, run, shard=0)
    check(one, own)
    whole = fshard.gather_params((state.params, state.opt_state))
    torch.testing.assert_close(*map(fshard.tree.leaves, (own[0], (whole, [row]))), rtol=1e-6, atol=1e-8)


def test_writes_to_new_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function clips its new weights in place, leaf by leaf: the parts of a row would be kept as they were before."""
    tx = optim.adamw(0.1)

    def run(mesh: Any, make: Any = aot) -> Any:
        step = fshard.train_step(mean_loss, tx)

        def fn(state: Any, x: Any) -> Any:
            state, metrics = step(state, x)
            for view in state.params.local_views().values():
                view.clamp_(-0.2, 0.2)
            state.opt_state.mu.tensors[0][3:40].zero_()
            return state, metrics

        state, row = make(fn)(begun(tx), lm_batch(0, 0))
        return fshard.gather_params((state.params, state.opt_state)), [row]

    check_beside_eager(monkeypatch, run)


def test_an_update_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update would draw other numbers than in an eager step: for each tensor of gradients, not for each row."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return fshard.tree.map(lambda g: g + torch.randn_like(g), grads), state

    tx = optim.chain(optim.Transform(lambda params: (), update, over="elements"), optim.sgd(0.1))

    def run(mesh: Any, make: Any = aot) -> Any:
        state, row = make(fshard.train_step(mean_loss, tx))(begun(tx), lm_batch(0, 0))
        return fshard.gather_params((state.params, state.opt_state)), [row]

    check_beside_eager(monkeypatch, run)


def test_units_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit that the loss does not read has a gradient of zero, and no operator that puts gradients into it."""
    tx = optim.adamw(0.1)

    def run(mesh: Any) -> Any:
        params = {"layers": [torch.ones(4, 4) for _ in range(4)], "unread": [torch.ones(5, 5) for _ in range(3)]}
        plan = fshard.make_plan(params, None, units=["layers.*", "unread.*"])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        return _steps(fshard.train_step(lambda p, x: _network(p, x), tx), state)

    check(*both(monkeypatch, run, room=1, shard=0))


def _network(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = (x @ layer).sin()
    return x.square().mean()


def _steps(step: Any, state: Any) -> tuple[Any, Metrics]:
    fast, rows = aot(step), []
    for i in range(3):
        state, row = fast(state, torch.arange(8.0).view(2, 4) + i)
        rows.append(row)
    return fshard.gather_params((state.params, state.opt_state)), rows


WIDTH, LAYERS = 1024, 6
UNIT = 4 * WIDTH**2  # bytes of a layer: as many as of its activation
TX = optim.adamw(1e-3)


def wide_loss(params: Any, x: Tensor) -> Tensor:
    """Layers of one row, each with a large activation."""
    for layer in params["layers"]:
        x = x @ layer
        x = x + (x.mean() + torch.zeros(layer.shape)).sin().mean()
    return x.square().mean()


def wide_state() -> Any:
    """A state of wide layers, each a unit."""
    params = {"layers": [torch.full((WIDTH, WIDTH), 1e-3) for _ in range(LAYERS)]}
    return fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, None, units=["layers.*"])), TX)


def lowered(monkeypatch: pytest.MonkeyPatch, room: int = UNIT) -> Any:
    """The graph of a step of wide layers, with the gradients of each in a tensor of its own."""
    monkeypatch.setattr(stepping, "SMALL_GRADIENTS", room)
    return aot(fshard.train_step(wide_loss, TX)).lower(wide_state(), torch.ones(1, WIDTH))


def test_gradients_go_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of all units would be in memory at the end of the backward, beside whole new rows."""
    graph = lowered(monkeypatch)
    gradients = [now.get("gradients", 0) for now in graph.memory().bytes]
    assert UNIT <= max(gradients) <= 2 * UNIT
    assert graph.memory().peak <= (3 * LAYERS + LAYERS + 4) * UNIT, "state, activations, and a few units"


def test_memory_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions would copy rows to write to parts of them."""

    def peak(room: int) -> float:
        run, state, live = lowered(monkeypatch, room).compile("aot_eager"), wide_state(), Live()
        live.leave_out(x for x in fshard.tree.leaves(state) if isinstance(x, Tensor))
        with live:
            run(state, torch.ones(1, WIDTH))
        return live.peak / UNIT

    assert peak(UNIT) <= peak(0) - 1.5 * LAYERS


def test_regions_get_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that gets a whole row makes whole rows of what it writes, and no two are equal."""
    parts = [part for part in regions(lowered(monkeypatch).traced.module) if isinstance(part, Region)]
    assert are_alike(parts)
    sizes = [x.meta["val"].nbytes for part in parts for x in part.inputs]
    assert max(sizes) == UNIT
    writes = [sum(name_of(node) == "copy_" for node in part.graph.nodes) for part in parts]
    assert max(writes) <= 5, "parameters, two moments, and in the last region two counts"
    assert sum(writes) == 3 * LAYERS + 2


def test_graphs_that_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler copies a whole row to write to a part of it: CUDA graphs and draws of torch would take more memory."""
    monkeypatch.setattr(lowering, "regions", lambda module: [])
    check(*both(monkeypatch, lambda mesh: train(aot, optim.adamw(0.1), {}, mesh)))
    (region,) = (part for part in one_region(lowered(monkeypatch).traced.module) if isinstance(part, Region))
    assert max(x.meta["val"].nbytes for x in region.inputs) == UNIT


@pytest.mark.parametrize("room", [0, 200])
def test_inductor(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Compiled loops would write to other parts of the state than operators do."""
    monkeypatch.setattr(stepping, "SMALL_GRADIENTS", room)
    fast = train(partial(fshard.jit, donate=True), optim.adamw(0.1), {}, None)
    slow = train(aot, optim.adamw(0.1), {}, None)
    torch.testing.assert_close(fshard.tree.leaves(fast), fshard.tree.leaves(slow), rtol=1e-9, atol=1e-9)
