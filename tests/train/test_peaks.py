"""The peak of a step: the state, gradients, two units and activations, no more; eager and jitted, donated or not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.memory import Live
from support.models import NARROW, STRATEGIES
from torch import Tensor

import fshard
from fshard import AbstractMesh, optim, tree
from fshard.testing import simulate

WIDTH, UNITS, ROWS = 256, 8, 8
OPTIMIZERS = {"adamw": optim.adamw(1e-3), "sgd": optim.sgd(1e-3, momentum=0.9), "plain": optim.sgd(1e-3)}


def params(device: str = "meta") -> dict[str, Any]:
    """Equal units of a few leaves, and a small root."""
    shapes = {"up": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "down": (2 * WIDTH, WIDTH)}
    layers = [{name: torch.full(shape, 0.01, device=device) for name, shape in shapes.items()} for _ in range(UNITS)]
    return {"layers": layers, "scale": torch.full((WIDTH,), 0.01, device=device)}


def loss(p: Any, x: Tensor) -> Tensor:
    """A stack of layers."""
    for layer in p["layers"]:
        x = x + F.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return (x * p["scale"]).square().mean()


def nbytes(x: Any) -> int:
    """The bytes of all tensors of a tree."""
    return sum(leaf.nbytes for leaf in tree.leaves(x) if isinstance(leaf, Tensor))


def activations() -> int:
    """The bytes of activations that a backward of the whole parameters needs."""
    alone = fshard.jit(torch.func.grad(loss)).lower(params(), torch.empty(ROWS, WIDTH, device="meta")).memory()
    return max(row.get("activations", 0) for row in alone.bytes)


def promised(name: str, ranks: int, donate: bool, state: Any, grads: int, units: int) -> float:
    """The bytes that a step may need: the state, a new one if the old one stays, gradients, units, activations."""
    whole = nbytes(params())
    # parameters are gathered on several ranks: of a unit, while gradients lie beside their buffer, or of all that stay
    gathered = {"full": 1, "keep": UNITS - 1}.get(name, 0) if ranks > 1 else 0
    return (2 - donate) * nbytes((state.params, state.opt_state)) + grads + (gathered + units) * whole / UNITS


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NARROW)
def test_a_jitted_step(name, ranks, donate, optimizer):
    """A compiled step would hold a second copy of parameters or moments, or gather all new parameters at once."""
    tx, x = OPTIMIZERS[optimizer], torch.empty(ROWS, WIDTH, device="meta")
    plan = fshard.make_plan(params(), AbstractMesh(shard=ranks), units=["layers.*"], **STRATEGIES[name])
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params())
    grads = fshard.eval_shape(fshard.value_and_grad(loss), state.params, x)[1]
    peak = fshard.jit(fshard.train_step(loss, tx), donate=donate).lower(state, x).memory().peak
    # gradients by leaf and assembled, and those of the unit before, which are reduced meanwhile if they are cut
    units = 2 if ranks == 1 or name == "ddp" else 3
    most = promised(name, ranks, donate, state, nbytes(grads), units) + activations()
    assert peak <= 1.05 * most, (peak / 1e6, most / 1e6)


@pytest.mark.parametrize(("ranks", "donate"), [(1, True), (1, False), (2, True)])
@pytest.mark.parametrize("name", NARROW)
def test_an_eager_step(name, ranks, donate):
    """A step would copy what this rank has whole, keep gradients while it gathers, or have a buffer beside a sum."""
    live = Live()

    def step(mesh: Any) -> float:
        plan = fshard.make_plan(params(), mesh, units=["layers.*"], **STRATEGIES[name])
        state = fshard.init_state(fshard.shard_params(params("cpu"), plan), OPTIMIZERS["adamw"])
        before, x = nbytes((state.params, state.opt_state)), torch.ones(ROWS, WIDTH)
        most = promised(name, ranks, donate, state, nbytes(params()) // plan.num_ranks(plan.grads_over), 2) - before
        live.leave_out(t for t in tree.leaves((state, x)) if isinstance(t, Tensor))
        with live:
            result = fshard.train_step(loss, OPTIMIZERS["adamw"], donate=donate)(state, x)
        return before, most, result

    before, most, _ = simulate(step, ranks)[0]
    used, most = before + live.peak / ranks, before + most + activations()
    assert used <= 1.05 * most, (used / 1e6, most / 1e6)


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_gradients_are_free_before_new_parameters_are_gathered(name):
    """A step that keeps its old state would have gradients, updated and gathered parameters in memory at once."""
    live = Live()

    def step(mesh: Any) -> Any:
        plan = fshard.make_plan(params(), mesh, units=["layers.*"], **STRATEGIES[name])
        state = fshard.init_state(fshard.shard_params(params("cpu"), plan), OPTIMIZERS["adamw"])
        with live:
            live.leave_out(t for t in tree.leaves(state) if isinstance(t, Tensor))
            result = fshard.train_step(loss, OPTIMIZERS["adamw"])(state, torch.ones(ROWS, WIDTH))
        return result, nbytes((state.params, state.opt_state))

    ranks = simulate(step, 2)
    # the new state, and this rank's part of the new parameters
    assert live.peak / 2 <= 1.05 * (ranks[0][1] + nbytes(params()) / 2)
