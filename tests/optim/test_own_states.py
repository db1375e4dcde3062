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
    step = fshard.jit(step) if way == "jit" else step
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
