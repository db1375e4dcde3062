"""The state of a transformation of one's own: numbers in it, and what an update may not do to it."""

from typing import Any

import pytest
import torch
from support.worlds import simulated

import fshard
from fshard import optim, tree


def _params() -> Any:
    return {"w": torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2), "b": torch.ones(2, dtype=torch.float64)}


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((p["w"] * x).square().sum() + (p["b"] * x).square().sum()) / 3


def _init(p: Any) -> Any:
    return {"times": 0, "decay": 1.0, "started": False, "name": "mean", "sum": tree.map(torch.zeros_like, p)}


def _numbered(g: Any, s: Any, p: Any = None, **_: object) -> tuple[Any, Any]:
    """A mean of all gradients, whose count and decay are numbers."""
    sums = tree.map(torch.add, s["sum"], g)
    new = {"times": s["times"] + 1, "decay": s["decay"] * 0.7, "started": True, "name": "mean", "sum": sums}
    return tree.map(lambda m: -0.1 * new["decay"] * m / new["times"], sums), new


BATCHES = [torch.tensor(x, dtype=torch.float64) for x in (1.0, torch.inf, 2.0, 3.0)]


def _trained(mesh: Any, way: str) -> Any:
    tx = optim.Transform(_init, _numbered)
    params = fshard.shard_params(_params(), fshard.make_plan(_params(), mesh))
    state = fshard.init_state(params, tx, loss_scale=fshard.DynamicLossScale(4.0))
    step: Any = fshard.train_step(_loss, tx, donate=way == "donated")
    step = fshard.jit(step, backend="eager") if way == "jit" else step
    for x in BATCHES:
        state, _ = step(state, x)
    assert int(state.opt_state["times"]) == 3
    return fshard.gather_params(state.params)


@pytest.mark.parametrize("way", ["step", "donated", "jit"])
def test_numbers_in_a_state_are_skipped_with_it(way: str) -> None:
    """A number that counts skipped updates would make later ones too small; no host reads whether one is skipped."""
    want = _params()
    state = _init(want)
    for x in BATCHES:
        if x.isfinite():
            updates, state = _numbered(torch.func.grad(_loss)(want, x), state)
            want = optim.apply_updates(want, updates)
    for got in (_trained(None, way), *simulated(_trained, way)):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-12, atol=0)


def _in_place(what: str) -> Any:
    """A running sum that is right with copies, and writes to an argument of its update; or to the state's dict."""

    def update(g: Any, s: Any, p: Any = None, **_: object) -> tuple[Any, Any]:
        given = {"gradients": g, "state": s["sum"], "params": p}
        if what == "containers":
            s["sum"] = tree.map(torch.add, s["sum"], g)
            return tree.map(torch.neg, s["sum"]), s
        if what != "copies":
            tree.map(lambda x: x.mul_(2), given[what])
        sums = tree.map(lambda m, g: m.clone().add_(g), s["sum"], g)
        return tree.map(torch.neg, sums), {"sum": sums}

    return lambda over: optim.Transform(lambda p: {"sum": tree.map(torch.zeros_like, p)}, update, over=over)


def _repeated(mesh: Any, tx: Any, how: str) -> Any:
    """The same step of one state twice, unless it is donated."""
    plan = fshard.make_plan(_params(), mesh, params_over=(), grads_over=())
    state = fshard.init_state(fshard.shard_params(_params(), plan), tx)
    step: Any = fshard.train_step(_loss, tx, donate=how == "donated")
    step = fshard.jit(step, backend="eager") if how == "jit" else step
    results = [step(state, BATCHES[0])[0].params for _ in range(1 if how == "donated" else 2)]
    return [fshard.gather_params(x) for x in results]


HOW = ["step", "donated", "jit"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("over", ["leaves", "elements", "tree"])
@pytest.mark.parametrize("what", ["state", "params", "gradients", "containers", "copies"])
def test_an_update_that_writes_to_its_input_is_an_error(what: str, over: str, how: str) -> None:
    """A step would change its state, of which a second one makes something else, and a skipped update would be made."""
    tx = _in_place(what)(over)
    if what in ("containers", "copies") or (what == "gradients" and over != "leaves"):
        scale = 2.0 if what == "gradients" else 1.0  # which a step gives away
        grads = torch.func.grad(lambda p: scale * _loss(p, BATCHES[0]))(_params())
        for got in (*_repeated(None, tx, how), *[x for each in simulated(_repeated, tx, how) for x in each]):
            torch.testing.assert_close(got, tree.map(torch.sub, _params(), grads))
        return
    for run in (lambda: _repeated(None, tx, how), lambda: simulated(_repeated, tx, how)):
        with pytest.raises(ValueError, match=rf"_in_place.update: wrote in place to '{what}.*in place of m.mul_"):
            run()


def test_an_update_may_write_to_gradients_of_its_own() -> None:
    """They are nobody else's, as a step says; and a tensor of inference mode counts no writes."""
    tx = _in_place("gradients")("tree")
    grads = {"w": torch.ones(2)}
    assert tx.update(grads, tx.init(grads), own_grads=True)[0]["w"].tolist() == [-2.0, -2.0]
    with torch.inference_mode():
        made = tree.map(torch.ones_like, grads)
        assert tx.update(made, tx.init(made))[0]["w"].tolist() == [-2.0, -2.0]


def test_a_transform_sees_writes_to_what_it_wraps() -> None:
    """A batched tensor counts no writes of its own."""
    tx = _in_place("state")("tree")
    with pytest.raises(ValueError, match=r"wrote in place to 'state\.sum\.w'"):
        torch.func.vmap(lambda x: tx.update({"w": x}, tx.init({"w": x}))[0]["w"])(torch.ones(2, 3))
