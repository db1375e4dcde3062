"""Keyword arguments of a loss: the same values as by position, wherever a loss is called."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import STRATEGIES, rand, same_bits
from support.steps import QUIET, rank_of
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, optim
from fshard.testing import observed, oracle

pytestmark = pytest.mark.filterwarnings(QUIET)
WEIGHTS = rand(3, seed=99).abs()
TXS = {"sgd": optim.sgd(0.1, momentum=0.9), "adam": optim.adam(0.01)}
Step = Callable[..., Any]


def model(seed: int = 0) -> dict[str, Any]:
    """Parameters of two units, of uneven shapes."""
    return {"a": {"w": rand(4, 5, seed=seed)}, "c": {"w": rand(5, 3, seed=seed + 1), "b": rand(3, seed=seed + 2)}}


def sharded(mesh: Any, seed: int = 0, **plan: Any) -> fshard.Sharded:
    """The parameters of `model` on a mesh."""
    whole = model(seed)
    return fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a", "c"], **plan))


def out(params: Any, x: Tensor) -> Tensor:
    """Scores, (n, 4) to (n, 3)."""
    return torch.tanh(x @ params["a"]["w"]) @ params["c"]["w"] + params["c"]["b"]


def by_position(params: Any, x: Tensor, weights: Tensor, teacher: Any, scale: float) -> fshard.Mean:
    """The distance to a teacher, weighted."""
    far = ((out(params, x) - out(teacher, x)) * weights).square().sum() * scale
    return fshard.Mean(far, len(x))


def by_name(params: Any, x: Tensor, *, weights: Tensor, teacher: Any, scale: float = 3.0) -> fshard.Mean:
    """The same loss, with keywords alone."""
    return by_position(params, x, weights, teacher, scale)


def data(number: int, rank: int) -> Tensor:
    """The rows of one rank, other ones on each."""
    return rand(6, 4, seed=100 * number + rank)


def train(mesh: Any, tx: str, named: bool, how: Callable[[Step], Step], step: Any, plan: Any) -> Any:
    """Losses and parameters of two steps, with keywords or by position."""
    state, teacher = fshard.init_state(sharded(mesh, **plan), TXS[tx]), sharded(mesh, seed=50, **plan)
    run, losses = how(fshard.train_step(by_name if named else by_position, TXS[tx], **step)), []
    for number in range(2):
        x = data(number, rank_of(mesh))
        if named:
            state, metrics = run(state, x, scale=2.0, weights=WEIGHTS, teacher=teacher)
        else:
            state, metrics = run(state, x, WEIGHTS, teacher, 2.0)
        losses.append(metrics["loss"])
    return losses, gather_params(state.params)


def seen(step: Step) -> Step:
    """An observed step, without what was observed."""
    return lambda *args, **kwargs: observed(step)(*args, **kwargs)[0]


HOWS: dict[str, tuple[Callable[[Step], Step], dict[str, Any]]] = {
    "plain": (lambda step: step, {}),
    "accumulate": (lambda step: step, {"accumulate": 2}),
    "slices": (lambda step: step, {"reduction": "tree"}),
    "donate": (lambda step: step, {"donate": True}),
    "in_backward": (lambda step: step, {"donate": True, "in_backward": True, "clip_norm": 0.1}),
    "jit": (partial(fshard.jit, backend="eager"), {}),
    "jit, donate": (partial(fshard.jit, backend="eager", donate=True), {"donate": True}),
    "guard": (partial(fshard.guard, every=1), {}),
    "observed": (seen, {}),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shard", [None, 1, 2, 4])
def test_keywords_have_the_bits_of_positions(how: str, shard: int | None) -> None:
    """A keyword that were lost, cut like rows or not gathered would change the loss."""
    change, step = HOWS[how]
    for tx in TXS:
        jobs = [partial(train, tx=tx, named=named, how=change, step=step, plan={}) for named in (True, False)]
        same_bits(*([job(None)] if shard is None else simulated(job, shard=shard) for job in jobs))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not name.startswith("wide")])
def test_keywords_against_the_oracle(strategy: str) -> None:
    """Three ranks, and the plain program with the same keywords."""
    for name, tx in TXS.items():
        plain, losses = oracle(by_name, tx, accumulate=2), []
        state = plain.init(model())
        for number in range(2):
            batches = [data(number, rank) for rank in range(3)]
            state, metrics = plain.step(state, batches, weights=WEIGHTS, teacher=model(50), scale=2.0)
            losses.append(metrics["loss"])
        job = partial(train, tx=name, named=True, how=lambda step: step, step={"accumulate": 2})
        for found in simulated(partial(job, plan=STRATEGIES[strategy]), shard=3):
            for x, y in zip(fshard.tree.leaves(found), fshard.tree.leaves((losses, state.params)), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def plain_step(step: Step) -> Step:
    """The step itself."""
    return step


def test_keywords_in_processes() -> None:
    """Processes have the bits of simulated ranks."""
    args = ("adam", True, plain_step, {"accumulate": 2}, {})
    same_bits(gloo(train, *args), simulated(train, *args))


def functions(mesh: Any, named: bool) -> Any:
    """Values, gradients and products of the functions that call a loss."""
    params, teacher, x = sharded(mesh), sharded(mesh, seed=50), data(0, rank_of(mesh))
    loss = by_name if named else by_position
    args: Any = () if named else (WEIGHTS, teacher, 2.0)
    kwargs: Any = {"weights": WEIGHTS, "teacher": teacher, "scale": 2.0} if named else {}
    value, grads = fshard.value_and_grad(loss)(params, x, *args, **kwargs)
    product = fshard.hvp(loss)(params, grads, x, *args, **kwargs)
    inner = fshard.predict(lambda *given, **names: fshard.remat(loss)(*given, **names).total)
    return [
        *(value, gather_params(grads), gather_params(product)),
        fshard.evaluate(loss)(params, x, *args, **kwargs),
        inner(params, x, *args, **kwargs),
    ]


@pytest.mark.parametrize("shard", [None, 1, 2, 3])
def test_functions_of_a_loss_take_keywords(shard: int | None) -> None:
    """value_and_grad, hvp, evaluate, predict, with remat inside."""
    jobs = [partial(functions, named=named) for named in (True, False)]
    same_bits(*([job(None)] if shard is None else simulated(job, shard=shard) for job in jobs))


def test_keywords_inside_torch_compile() -> None:
    """The user's own torch.compile hands keywords on, None among them."""

    def loss(params: Any, x: Tensor, *, weights: Tensor, bias: Tensor | None) -> Tensor:
        return ((out(params, x) if bias is None else bias) * weights).square().mean()

    step = fshard.train_step(loss, TXS["adam"])
    state = fshard.init_state(sharded(None), TXS["adam"])
    compiled = torch.compile(lambda *args, **names: step(*args, **names), backend="aot_eager", fullgraph=True)
    for run in (compiled, compiled):
        found, expected = (f(state, data(0, 0), weights=WEIGHTS, bias=None) for f in (run, step))
        same_bits(gather_params(found[0].params), gather_params(expected[0].params))


def test_a_compiled_step_takes_keywords_in_any_order() -> None:
    """The signature has names; other shapes, and names that are missing, are errors."""
    step = fshard.jit(fshard.train_step(by_name, TXS["sgd"]), backend="eager")
    state, teacher, x = fshard.init_state(sharded(None), TXS["sgd"]), sharded(None, seed=50), data(0, 0)
    compiled = step.lower(state, x, weights=WEIGHTS, teacher=teacher, scale=2.0).compile()
    expected = step(state, x, weights=WEIGHTS, teacher=teacher, scale=2.0)[0]
    found = compiled(state, x, scale=2.0, teacher=teacher, weights=WEIGHTS)[0]
    same_bits(gather_params(found.params), gather_params(expected.params))
    with pytest.raises(ValueError, match=r"argument '1\.scale' was 2\.0, is 3\.0"):
        compiled(state, x, weights=WEIGHTS, teacher=teacher, scale=3.0)
    with pytest.raises(ValueError, match="the structure of the arguments"):
        compiled(state, x, weights=WEIGHTS, teacher=teacher)


def test_an_estimate_counts_a_keyword() -> None:
    """A teacher by name takes the memory of a teacher by position."""
    step, named = (fshard.train_step(loss, TXS["sgd"]) for loss in (by_position, by_name))
    state, teacher = fshard.init_state(sharded(None), TXS["sgd"]), sharded(None, seed=50)
    peaks = [
        fshard.estimate(step, state, data(0, 0), WEIGHTS, teacher, 2.0).peak.bytes,
        fshard.estimate(named, state, data(0, 0), weights=WEIGHTS, teacher=teacher, scale=2.0).peak.bytes,
    ]
    assert peaks[0] == peaks[1]


def test_a_keyword_in_memory_of_the_state_is_refused_by_name() -> None:
    """A donated step would overwrite it."""
    state, teacher = fshard.init_state(sharded(None), TXS["sgd"]), sharded(None, seed=50)
    step = fshard.train_step(by_name, TXS["sgd"], donate=True)
    weights = state.params.local_views()["c.b"]
    with pytest.raises(ValueError, match=r"donate=True\): weights: expected a tensor in memory of its own"):
        step(state, data(0, 0), weights=weights, teacher=teacher)
    with pytest.raises(ValueError, match=r"donate=True\): teacher, leaf 'x\.0': expected"):
        step(state, data(0, 0), weights=WEIGHTS, teacher={"x": [weights]})
    with pytest.raises(ValueError, match=r"donate=True\): args\[0\], leaf 'w': expected"):
        step(state, data(0, 0), {"w": weights}, teacher=teacher)
    with pytest.raises(ValueError, match=r"donate=True\): batch: expected"):
        step(state, weights, weights=WEIGHTS, teacher=teacher)


def test_a_keyword_may_have_the_name_of_a_steps_first_argument() -> None:
    """A recurrent net's loss has a `state`, and a loss of parameters may be given others as `params`."""
    whole = {"w": torch.ones(2)}
    given = fshard.shard_params(whole, fshard.make_plan(whole))
    tx = fshard.optim.sgd(0.1)
    step = fshard.train_step(lambda p, x, *, state: (p["w"] * x * state).sum(), tx)
    _, metrics = step(fshard.init_state(given, tx), torch.ones(2), state=3.0)
    assert metrics["loss"] == 6
    value, _ = fshard.value_and_grad(lambda p, x, *, params: (p["w"] * x * params).sum())(
        given, torch.ones(2), params=2.0
    )
    assert value == 4
