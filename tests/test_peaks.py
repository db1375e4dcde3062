"""The peak of a jitted step whose state is given away: the state, gradients, a few units and activations, no more."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import NARROW, STRATEGIES
from torch import Tensor

import fshard
from fshard import AbstractMesh, optim, tree

WIDTH, UNITS, ROWS = 256, 5, 8
OPTIMIZERS = {"adamw": optim.adamw(1e-3), "sgd": optim.sgd(1e-3, momentum=0.9), "plain": optim.sgd(1e-3)}


def params() -> dict[str, Any]:
    """Equal units of a few leaves, and a small root."""
    shapes = {"up": (WIDTH, 2 * WIDTH), "bias": (2 * WIDTH,), "down": (2 * WIDTH, WIDTH)}
    layers = [{name: torch.empty(shape, device="meta") for name, shape in shapes.items()} for _ in range(UNITS)]
    return {"layers": layers, "scale": torch.empty(WIDTH, device="meta")}


def loss(p: Any, x: Tensor) -> Tensor:
    """A stack of layers."""
    for layer in p["layers"]:
        x = x + F.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return (x * p["scale"]).square().mean()


def nbytes(x: Any) -> int:
    """The bytes of all tensors of a tree."""
    return sum(leaf.nbytes for leaf in tree.leaves(x) if isinstance(leaf, Tensor))


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NARROW)
def test_a_donated_step_needs_its_state_its_gradients_and_a_few_units(name, optimizer):
    """A compiled step would hold a second copy of parameters or moments, or gather all new parameters at once."""
    tx, x = OPTIMIZERS[optimizer], torch.empty(ROWS, WIDTH, device="meta")
    plan = fshard.make_plan(params(), AbstractMesh(shard=2), units=["layers.*"], **STRATEGIES[name])
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params())
    grads = fshard.eval_shape(fshard.value_and_grad(loss), state.params, x)[1]
    peak = fshard.jit(fshard.train_step(loss, tx), donate=True).lower(state, x).memory().peak
    alone = fshard.jit(torch.func.grad(loss)).lower(params(), x).memory()
    activations = max(row.get("activations", 0) for row in alone.bytes)
    whole = nbytes(params())
    unit = whole / UNITS
    # gathered: none, two units, or all that stay; and the gradients of one unit, by leaf and assembled, while those of
    # the unit before are reduced
    gathered = {"full": unit, "keep": whole - unit}.get(name, 0)
    promised = nbytes((state.params, state.opt_state)) + nbytes(grads) + gathered + 3 * unit + activations
    assert peak <= 1.05 * promised, (peak / 1e6, promised / 1e6)
