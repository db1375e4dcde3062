"""The recipes of docs/optimizer_recipes.md are what their formulas say, on any number of ranks, donated and jitted.

The other side is written down for one device, with torch's optimizers.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.models import STRATEGIES
from support.worlds import simulated
from torch import Tensor
from torch.optim import lr_scheduler, swa_utils

import fshard
from fshard import optim, tree
from fshard.testing import assert_trees_equal

PAGE = Path(__file__).parents[2] / "docs" / "optimizer_recipes.md"
CODE = "".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))

# An optimizer here and in torch. Functions of plain lists keep what they need in `memory`.
BASES: dict[str, tuple[Callable[[Any], optim.Transform], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (lambda lr: optim.sgd(lr, momentum=0.9), lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)),
    "adamw": (lambda lr: optim.adamw(lr), lambda params, lr: torch.optim.AdamW(params, lr)),
}
Base = Callable[[list[Tensor]], None]
Plain = Callable[[list[Tensor], Base, list[Tensor], dict[str, Any]], None]

LR, CALLS, SKIPPED = 0.05, 7, 2  # one of the calls has gradients that are not finite, on one rank
CASES = [("sgd", "full", 1, True), ("sgd", "zero1", 3, False), ("adamw", "full", 2, True)]


@cache
def page(mesh: Any = None) -> dict[str, Any]:
    """What the page defines."""
    scope: dict[str, Any] = {"given": mesh}
    exec(compile(CODE.replace("mesh = None", "mesh = given"), "optimizer_recipes.md", "exec"), scope)
    return scope


def test_the_page_runs_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks run on several ranks as they stand: otherwise they would be recipes for one device."""
    assert CODE.count("mesh = None") == 1
    assert len({scope["best"] for scope in simulated(page, shard=3)}) == 1
    assert capsys.readouterr().out


def start() -> dict[str, Any]:
    """Parameters of uneven sizes: 3 ranks cut most leaves in the middle of a row."""
    made = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(shape, generator=made, dtype=torch.float64)  # noqa: E731
    blocks = [{"w": rand(5, 5), "b": 0.1 * rand(5)} for _ in range(2)]
    return {"blocks": blocks, "out": rand(5, 3)}


def rows(call: int, rank: int, of: int = 3) -> dict[str, Tensor]:
    """A rank's rows of a call: as many on one rank as on `of` together. One value is NaN in the call to skip."""
    made = torch.Generator().manual_seed(call)
    x, y = torch.randn(6, 8, generator=made, dtype=torch.float64).split([5, 3], 1)
    x[0, 0] = math.nan if call == SKIPPED else x[0, 0]
    sizes = {1: [6], 2: [1, 5], 3: [1, 2, 3]}[of]
    return {"x": x.split(sizes)[rank], "y": y.split(sizes)[rank]}


def sharded(mesh: Any, strategy: str = "full") -> fshard.Sharded:
    return fshard.shard_params(start(), fshard.make_plan(start(), mesh, units=["blocks.*"], **STRATEGIES[strategy]))


def plain_loss(params: list[Tensor], call: int) -> Tensor:
    loss = page()["loss"](tree.unflatten(tree.flatten(start())[1], params), rows(call, 0, 1))
    return loss.total / loss.count


def plain_grads(params: list[Tensor], call: int) -> list[Tensor]:
    return [*torch.autograd.grad(plain_loss(params, call), params)]


def plain_params() -> list[Tensor]:
    return [x.requires_grad_() for x in tree.leaves(start())]


def base_of(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Base:
    def update(grads: list[Tensor]) -> None:
        for x, grad in zip(params, grads, strict=True):
            x.grad = grad
        optimizer.step()

    return update


def plain_multi_steps(k: Callable[[int], int]) -> Plain:
    def update(params: list[Tensor], base: Base, grads: list[Tensor], memory: dict[str, Any]) -> None:
        kept = memory.setdefault("kept", [])
        kept.append(grads)
        if len(kept) == k(memory.setdefault("made", 0)):
            base([torch.stack(of_leaf).mean(0) for of_leaf in zip(*kept, strict=True)])
            kept.clear()
            memory["made"] += 1

    return update


def plain_ema(debias: bool) -> Plain:
    def update(params: list[Tensor], base: Base, grads: list[Tensor], memory: dict[str, Any]) -> None:
        seen = memory.setdefault("seen", [])
        seen.append(grads)
        weights = [0.1 * 0.9 ** (len(seen) - 1 - i) for i in range(len(seen))]
        total = sum(weights) if debias else 1.0
        base([sum(w * g for w, g in zip(weights, of_leaf, strict=True)) / total for of_leaf in zip(*seen, strict=True)])

    return update


def plain_average(params: list[Tensor], base: Base, grads: list[Tensor], memory: dict[str, Any]) -> None:
    old = memory.get("result") or [x.detach().clone() for x in params]
    base(grads)
    memory["result"] = [0.8 * mean + 0.2 * x.detach() for mean, x in zip(old, params, strict=True)]


def plain_adaptive_clip(dim: int) -> Plain:
    def update(params: list[Tensor], base: Base, grads: list[Tensor], memory: dict[str, Any]) -> None:
        clipped = [g.clone() for g in grads]
        for p, g in zip(params, clipped, strict=True):
            # views of the units: columns, rows, or a vector as a whole
            units = zip(p.detach().unbind(dim), g.unbind(dim), strict=True) if p.dim() > 1 else [(p.detach(), g)]
            for p_unit, g_unit in units:
                most = 0.1 * max(p_unit.norm().item(), 1e-3)
                memory.setdefault("clipped", []).append(clips := g_unit.norm().item() > most)
                if clips:
                    g_unit.mul_(most / g_unit.norm())
        base(clipped)

    return update


def plain_norms(params: list[Tensor], base: Base, grads: list[Tensor], memory: dict[str, Any]) -> None:
    parts = {"out": grads[4:], "blocks.0": grads[:2], "blocks.1": grads[2:4]}
    memory["result"] = [torch.cat([g.flatten() for g in part]).norm() for part in parts.values()]
    base(grads)


class Row(NamedTuple):
    """A transformation around an optimizer, the same written down, and what its state has for readers."""

    make: Callable[[dict[str, Any], optim.Transform], optim.Transform]
    plain: Plain
    read: Callable[[Any], Any] = lambda state: ()
    elementwise: bool = True


def read_average(state: Any) -> list[Tensor]:
    return tree.leaves(fshard.gather_params(state.params.with_trained(state.opt_state[-1])))


def read_norms(state: Any) -> list[Tensor]:
    return [*state.opt_state[0].values()]


ROWS = {
    "multi_steps": Row(lambda page, tx: page["multi_steps"](tx, 3), plain_multi_steps(lambda made: 3)),
    "multi_steps-schedule": Row(
        lambda page, tx: page["multi_steps"](tx, lambda made: made + 1), plain_multi_steps(lambda made: made + 1)
    ),
    "ema": Row(lambda page, tx: optim.chain(page["ema"](0.9), tx), plain_ema(True)),
    "ema-biased": Row(lambda page, tx: optim.chain(page["ema"](0.9, debias=False), tx), plain_ema(False)),
    "average": Row(lambda page, tx: optim.chain(tx, page["average_of_params"](0.8)), plain_average, read_average),
    "adaptive_clip": Row(
        lambda page, tx: optim.chain(page["adaptive_clip"](0.1, unit=-1), tx), plain_adaptive_clip(1), elementwise=False
    ),
    "adaptive_clip-rows": Row(
        lambda page, tx: optim.chain(page["adaptive_clip"](0.1), tx), plain_adaptive_clip(0), elementwise=False
    ),
    "keep_norms": Row(
        lambda page, tx: optim.chain(page["keep_norms"](page["parts"]), tx), plain_norms, read_norms, elementwise=False
    ),
}


@cache
def expected(name: str, base: str) -> tuple[list[Tensor], Any]:
    """Parameters after all calls, and what the state has for readers, on one device."""
    params, memory = plain_params(), dict[str, Any]()
    update = base_of(BASES[base][1](params, LR), params)
    for call in range(CALLS):
        if call != SKIPPED:
            ROWS[name].plain(params, update, plain_grads(params, call), memory)
    if "clipped" in memory:
        assert {*memory["clipped"]} == {True, False}
    return [x.detach() for x in params], memory.get("result", ())


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("name", ROWS)
def test_a_transformation_is_its_formula(name: str, case: tuple[str, str, int, bool]) -> None:
    """Ranks would train otherwise than the formula, a skipped update would leave traces, or a file would lose state."""
    base, strategy, size, donate = case
    row, tx = ROWS[name], ROWS[name].make(page(), BASES[base][0](LR))
    step = fshard.train_step(page()["loss"], tx, donate=donate)

    def on_a_rank(mesh: Any) -> Any:
        state = fshard.init_state(sharded(mesh, strategy), tx, loss_scale=fshard.StaticLossScale(4.0))
        skips = []
        for call in range(CALLS):
            state, metrics = step(state, rows(call, mesh.get_rank(), size))
            skips.append(metrics["found_inf"].item())
        assert [*map(bool, skips)] == [call == SKIPPED for call in range(CALLS)]
        saved = optim.state.gather_state(state.opt_state)
        again = optim.state.shard_state(saved, tx.init(tree.map(torch.zeros_like, state.params.for_state)))
        assert_trees_equal(again, state.opt_state)
        return tree.leaves(fshard.gather_params(state.params)), row.read(state)

    for result in simulated(on_a_rank, shard=size):
        torch.testing.assert_close(result, expected(name, base))


def test_a_mean_of_one_gradient_is_the_gradient() -> None:
    """What was added before would leave its rounding in the next mean."""
    params, tx = torch.zeros(1), page()["multi_steps"](optim.sgd(1.0), 1)
    state = tx.init(params)
    for grad in (torch.tensor([1e8]), torch.tensor([1e-3])):
        updates, state = tx.update(grad, state, params)
        assert torch.equal(updates, -grad)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.elementwise])
def test_elementwise_transformations_run_in_the_backward(name: str) -> None:
    """What is declared elementwise would update units otherwise than the tree."""
    row, tx = ROWS[name], ROWS[name].make(page(), BASES["adamw"][0](LR))
    step = fshard.train_step(page()["loss"], tx, donate=True, in_backward=True)

    def on_a_rank(mesh: Any) -> Any:
        state = fshard.init_state(sharded(mesh), tx)
        for call in range(CALLS):
            if call != SKIPPED:  # there is no loss scale in the backward
                state, _ = step(state, rows(call, mesh.get_rank(), 2))
        return tree.leaves(fshard.gather_params(state.params)), row.read(state)

    for result in simulated(on_a_rank, shard=2):
        torch.testing.assert_close(result, expected(name, "adamw"))


def in_float32(x: Any) -> Any:
    return tree.map(lambda x: x.float(), x)


def test_all_in_one_jitted_step() -> None:
    """A graph of a step that is donated would train otherwise than the calls one after the other."""
    parts = page()

    def make(lr: Any) -> optim.Transform:
        inner = parts["multi_steps"](parts["narrow"](optim.adamw(lr), "mu", "nu", rounded=parts["stochastic"]), 2)
        clips = parts["adaptive_clip"](0.1, unit=-1)
        return optim.chain(parts["keep_norms"](parts["parts"]), clips, parts["ema"](0.9), inner)

    tx = optim.chain(optim.with_hyperparams(make, lr=LR), parts["average_of_params"](0.8))
    plain = fshard.train_step(parts["loss"], tx)
    jitted = fshard.jit(plain, donate=True, backend="eager")

    def on_a_rank(mesh: Any) -> Any:
        whole = in_float32(start())
        plan = fshard.make_plan(whole, mesh, units=["blocks.*"], **STRATEGIES["zero1"])
        scale, states = fshard.StaticLossScale(4.0), list[Any]()
        for step in (plain, jitted):
            state = fshard.init_state(fshard.shard_params(whole, plan), tx, loss_scale=scale)
            for call in range(5):
                state, _ = step(state, in_float32(rows(call, mesh.get_rank(), 2)))
            states.append(state)
        assert not torch.allclose(fshard.gather_params(states[0].params)["out"], whole["out"], atol=LR / 2)
        torch.testing.assert_close(tree.leaves(states[1]), tree.leaves(states[0]))

    simulated(on_a_rank, shard=2)


def given_grads(call: int) -> Any:
    made = torch.Generator().manual_seed(100 + call)
    return tree.map(lambda x: torch.randn(x.shape, generator=made), start())


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def plain_narrow_sgd(param: Tensor, grads: list[Tensor]) -> Tensor:
    m = torch.zeros_like(param)
    for g in grads:
        m = 0.9 * m + g
        param = param - LR * m
        m = bf16(m)
    return param


def plain_narrow_adam(param: Tensor, grads: list[Tensor]) -> Tensor:
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        param = param - LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        m = bf16(m)
    return param


NARROW = {
    "sgd": (lambda: optim.sgd(LR, momentum=0.9), "momentum", plain_narrow_sgd),
    "adam": (lambda: optim.adam(LR), "mu", plain_narrow_adam),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NARROW)
def test_moments_are_rounded_between_updates(name: str, size: int) -> None:
    """A moment would stay wide, be rounded elsewhere than in its formula, or be changed by a skipped update."""
    make, field, plain = NARROW[name]
    tx, calls = page()["narrow"](make(), field), range(6)

    def on_a_rank(mesh: Any) -> Any:
        whole = in_float32(start())
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"]))
        state = tx.init(params)
        for call in calls:
            grads = fshard.shard_params(given_grads(call), params.plan)
            skipped = tx.step(tree.map(lambda g: g * math.nan, grads), state, params, torch.tensor(1.0))
            assert_trees_equal(skipped, (params, state))
            params, state = tx.step(grads, state, params, torch.tensor(0.0), donate=call % 2 == 1)
            assert {x.dtype for x in tree.leaves(getattr(state, field))} == {torch.bfloat16}
        saved = optim.state.gather_state(state)
        assert_trees_equal(optim.state.shard_state(saved, tx.init(params)), state)
        return tree.leaves(fshard.gather_params(params))

    grads = [tree.leaves(given_grads(call)) for call in calls]
    expected = [plain(x, [*g]) for x, *g in zip(tree.leaves(in_float32(start())), *grads, strict=True)]
    for result in simulated(on_a_rank, shard=size):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_moments_are_rounded_in_the_backward() -> None:
    """An update of one unit would keep wide moments, or train otherwise."""
    tx = page()["narrow"](optim.adamw(LR), "mu", "nu", rounded=page()["stochastic"])
    whole = in_float32(start())

    def on_a_rank(mesh: Any) -> None:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"]))
        states = list[Any]()
        for options in ({}, {"donate": True, "in_backward": True}):
            step = fshard.train_step(page()["loss"], tx, **options)
            state = fshard.init_state(tree.map(torch.clone, params), tx)
            for call in range(SKIPPED):
                state, _ = step(state, in_float32(rows(call, mesh.get_rank(), 2)))
            states.append(state)
            assert {x.dtype for x in tree.leaves(state.opt_state.nu)} == {torch.bfloat16}
        torch.testing.assert_close(tree.leaves(states[1].params), tree.leaves(states[0].params))

    simulated(on_a_rank, shard=2)


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    """A value would go farther than to a neighbour, be rounded with a bias, or change where it is one of bfloat16."""
    stochastic = page()["stochastic"]
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) ** 3
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1.0, torch.inf, -torch.inf])])
    counts = torch.arange(2000.0)
    rounded = torch.stack([stochastic(x, count).float() for count in counts])
    assert torch.equal(stochastic(x.bfloat16(), counts[3]), x.bfloat16())
    x, rounded = x[:-2], rounded[:, :-2]
    gap = 2.0 ** (x.abs().clamp(min=1e-30).log2().floor() - 7)  # between neighbours in bfloat16
    error = (rounded - x) / gap
    assert error.abs().max() < 1
    assert rounded.unique(dim=0).shape[0] > 1
    # the standard deviation of the mean is at most 1 / (2 sqrt(2000)) = 0.011
    assert error.mean(0).abs().max() < 0.05
    assert stochastic(torch.tensor(torch.nan), counts[1]).isnan()


def test_a_second_moment_that_is_rounded_stochastically_moves() -> None:
    """`nu` would stay where it is if each change is too small for bfloat16, as it does with the nearest value."""
    params, grads = torch.zeros(512), torch.linspace(1.05, 1.15, 512)
    means = {}
    for name in ("nearest", "stochastic"):
        tx = page()["narrow"](optim.adam(0.1), "nu", rounded=page()[name])
        state = tx.init(params)
        state = state._replace(nu=torch.ones(512, dtype=torch.bfloat16))
        for _ in range(300):
            params, state = tx.step(grads, state, params)
        means[name] = state.nu.float().mean().item()
    square = grads.square().mean().item()
    assert means["nearest"] == 1
    assert means["stochastic"] == pytest.approx(square - (square - 1) * 0.999**300, abs=2e-3)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "piecewise": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [30], 0.1),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.95**0.1),
    "staircase": lambda optimizer: lr_scheduler.StepLR(optimizer, 10, 0.5),
    "inverse_root": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: math.sqrt(100 / max(i, 100))),
    "warm": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LambdaLR(optimizer, lambda i: i / 5),
            lr_scheduler.ExponentialLR(optimizer, 0.95**0.1),
        ],
        [5],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_torch(name: str) -> None:
    """A schedule would give another rate than torch's scheduler of the name on the page."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    scheduler, rates = SCHEDULES[name](optimizer), list[float]()
    calls = range(150)
    for _ in calls:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = [float(page()[name](torch.tensor(float(i), dtype=torch.float64))) for i in calls]
    assert ours == pytest.approx(rates)


@pytest.mark.parametrize(("patience", "threshold", "smallest"), [(0, 1e-4, 0.0), (2, 0.05, 0.0), (1, 1e-4, 0.3)])
def test_a_plateau_is_that_of_torch(patience: int, threshold: float, smallest: float) -> None:
    """The rate would fall at another call than with ReduceLROnPlateau."""
    losses = torch.rand(60, generator=torch.Generator().manual_seed(0)) + torch.linspace(2, 0, 60)
    losses[7] = math.nan
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.8, patience=patience, threshold=threshold, min_lr=smallest
    )
    state, falls = page()["Plateau"](), 0
    for loss in losses:
        state = page()["plateau"](state, loss, 0.8, patience, threshold, smallest)
        before = optimizer.param_groups[0]["lr"]
        scheduler.step(loss.item())
        falls += optimizer.param_groups[0]["lr"] < before
        assert state.scale.item() == pytest.approx(optimizer.param_groups[0]["lr"])
    assert falls > 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training_on_a_plateau_is_that_of_torch(case: tuple[str, str, int, bool]) -> None:
    """The rate in the state would not be that of the update, or differ between ranks."""
    base, strategy, size, donate = case
    params = plain_params()
    optimizer = BASES[base][1](params, LR)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.2)
    for call in range(10):
        loss = plain_loss(params, call % 2)
        base_of(optimizer, params)([*torch.autograd.grad(loss, params)])
        scheduler.step(loss.item())
    assert optimizer.param_groups[0]["lr"] <= LR / 2
    tx = optim.with_hyperparams(lambda lr: optim.chain(optim.identity(), BASES[base][0](lr)), lr=LR)
    step = fshard.train_step(page()["loss"], tx, donate=donate)

    def on_a_rank(mesh: Any) -> Any:
        state, on_plateau = fshard.init_state(sharded(mesh, strategy), tx), page()["Plateau"]()
        for call in range(10):
            state = page()["with_rate"](state, LR * on_plateau.scale)
            state, metrics = step(state, rows(call % 2, mesh.get_rank(), size))
            on_plateau = page()["plateau"](on_plateau, metrics["loss"], 0.5, 1, 0.2)
        return tree.leaves(fshard.gather_params(state.params))

    for result in simulated(on_a_rank, shard=size):
        torch.testing.assert_close(result, [x.detach() for x in params])


def plain_sam(base: str) -> list[Tensor]:
    params = plain_params()
    update = base_of(BASES[base][1](params, LR), params)
    for call in range(CALLS):
        if call != SKIPPED:
            grads = plain_grads(params, call)
            norm = math.sqrt(sum(g.square().sum().item() for g in grads))
            there = [(x + 0.3 * g / norm).detach().requires_grad_() for x, g in zip(params, grads, strict=True)]
            update(plain_grads(there, call))
    return [x.detach() for x in params]


@pytest.mark.parametrize("case", [*CASES, ("sgd", "zero1", 2, "jitted")], ids=lambda case: "-".join(map(str, case)))
def test_sam_is_its_formula(case: tuple[str, str, int, bool | str]) -> None:
    """The second gradient would be that of another point, or one that is not finite would reach the parameters."""
    base, strategy, size, way = case
    tx = BASES[base][0](LR)
    step = page()["sam_step"](page()["loss"], tx, rho=0.3)
    step = fshard.jit(step, donate=True, backend="eager") if way == "jitted" else step
    expected = plain_sam(base)

    def on_a_rank(mesh: Any) -> Any:
        state = fshard.init_state(sharded(mesh, strategy), tx, loss_scale=fshard.DynamicLossScale(8.0))
        for call in range(CALLS):
            state, value = step(state, rows(call, mesh.get_rank(), size))
            assert value.isfinite() == (call != SKIPPED)
        assert state.loss_scale.value.item() == 4.0
        assert state.step.item() == CALLS
        return tree.leaves(fshard.gather_params(state.params))

    for result in simulated(on_a_rank, shard=size):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_averages_in_a_loop_are_those_of_torch(case: tuple[str, str, int, bool]) -> None:
    """An average would weigh the steps otherwise, or a donated step would write to it."""
    base, strategy, size, donate = case
    params = plain_params()
    module = torch.nn.ParameterList(params)
    update = base_of(BASES[base][1]([*module.parameters()], LR), [*module.parameters()])
    average, slow = swa_utils.AveragedModel(module), [x.detach().clone() for x in module.parameters()]
    average.update_parameters(module)
    for call in range(CALLS):
        update(plain_grads([*module.parameters()], 0))
        average.update_parameters(module)
        if call % 3 == 2:
            slow = [old + 0.3 * (x.detach() - old) for old, x in zip(slow, module.parameters(), strict=True)]
            with torch.no_grad():
                for x, value in zip(module.parameters(), slow, strict=True):
                    x.copy_(value)
    expected = [[x.detach() for x in model.parameters()] for model in (module, average.module)]
    tx = BASES[base][0](LR)
    step = fshard.train_step(page()["loss"], tx, donate=donate)

    def on_a_rank(mesh: Any) -> Any:
        state = fshard.init_state(sharded(mesh, strategy), tx)
        average = slow = tree.map(torch.clone, state.params)
        for call in range(CALLS):
            state, _ = step(state, rows(0, mesh.get_rank(), size))
            average = page()["swa"](average, state.params, call + 1)
            if call % 3 == 2:
                slow, state = page()["lookahead"](slow, state, 0.3)
        return [tree.leaves(fshard.gather_params(x)) for x in (state.params, average)]

    for result in simulated(on_a_rank, shard=size):
        torch.testing.assert_close(result, expected)


def loss_times_factor(params: Any, batch: Any) -> Any:
    return batch["factor"][0] * page()["loss"](params, batch)


@pytest.mark.parametrize(("base", "size"), [("sgd", 1), ("sgd", 3), ("adamw", 2)])
def test_a_rate_is_found_where_the_loss_falls_fastest(base: str, size: int) -> None:
    """The losses would be those of other rates, or another would be the best, or the parameters would change."""
    low, high, number = 1e-4, 1e3, 14
    rates = [low * (high / low) ** (i / (number - 1)) for i in range(number)]
    params, losses = plain_params(), list[float]()
    optimizer = BASES[base][1](params, low)
    factors = [1.0] * (number - 1) + [0.0]
    for rate, factor in zip(rates, factors, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        loss = factor * plain_loss(params, 0)
        losses.append(loss.item())
        base_of(optimizer, params)([*torch.autograd.grad(loss, params)])
    until = next(i for i, loss in enumerate(losses) if not loss < 4 * losses[0])
    assert losses[-1] - losses[-2] < -losses[0], "the loss falls most after it has diverged"
    best = min(range(until - 1), key=lambda i: losses[i + 1] - losses[i])  # by the update with rate i

    def on_a_rank(mesh: Any) -> Any:
        params = sharded(mesh)
        mine = rows(0, mesh.get_rank(), size)
        batches = [mine | {"factor": torch.full((len(mine["x"]),), factor)} for factor in factors]
        result = page()["find_rate"](loss_times_factor, BASES[base][0], params, batches, low, high)
        assert_trees_equal(fshard.gather_params(params), start())
        return result

    for found_rates, found_losses, found_best in simulated(on_a_rank, shard=size):
        assert found_rates.tolist() == pytest.approx(rates, rel=1e-4)
        assert found_losses[:until].tolist() == pytest.approx(losses[:until], rel=1e-5)
        assert found_best == pytest.approx(rates[best], rel=1e-4)


def test_norms_of_layers_are_those_of_one_device() -> None:
    """A norm of a subtree would be that of one rank."""
    expected = [torch.cat([g.flatten() for g in part]).norm() for part in map(plain_grads_of_block, range(2))]

    def on_a_rank(mesh: Any) -> list[Tensor]:
        _, grads = fshard.value_and_grad(page()["loss"])(sharded(mesh), rows(0, mesh.get_rank()))
        return [optim.global_norm(block) for block in grads["blocks"]]

    for result in simulated(on_a_rank, shard=3):
        torch.testing.assert_close(result, expected)


def plain_grads_of_block(number: int) -> list[Tensor]:
    return plain_grads(plain_params(), 0)[2 * number : 2 * number + 2]
