"""A hypergradient: weights of rows and a learning rate, learnt through ten steps of an optimizer inside the loss.

    python examples/hypergradient.py                      # two simulated ranks
    torchrun --nproc-per-node=2 examples/hypergradient.py # two processes

A third of the training rows has wrong targets. The loss trains a linear model on all rows by SGD with momentum, and is
the error on clean rows, of which each rank has others. Its gradient goes through the ten steps to the weight of every
training row, and to the learning rate (Maclaurin et al., 2015; Ren et al., 2018).
"""

from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import grad
from torch.nn.functional import softplus

import fshard

STEPS, ROWS, FEATURES, TRAINING, INNER_STEPS = 100, 64, 5, 96, 10  # ROWS: clean rows of one rank in each step


def rows(number: int, target: Tensor) -> dict[str, Tensor]:
    x = torch.randn(number, FEATURES)
    return {"x": x, "y": x @ target + 0.1 * torch.randn(number)}


def trained(params: Any, training: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model after ten steps on weighted rows. It is computed from `params`, so the loss has a gradient."""

    def inner_loss(model: dict[str, Tensor]) -> Tensor:
        errors = (training["x"] @ model["w"] - training["y"]).square()
        return (softplus(params["weights"]) * errors).mean()

    model = {"w": torch.zeros_like(training["x"][0])}
    tx = fshard.optim.sgd(params["log_lr"].exp(), momentum=0.5)
    state = tx.init(model)
    for _ in range(INNER_STEPS):
        model, state = tx.step(grad(inner_loss)(model), state, model)
    return model


def loss(params: Any, clean: dict[str, Tensor], training: dict[str, Tensor]) -> fshard.Mean:
    errors = (clean["x"] @ trained(params, training)["w"] - clean["y"]).square()
    return fshard.Mean(errors.sum(), len(errors))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same training rows on every rank
    target = torch.randn(FEATURES)
    training, wrong = rows(TRAINING, target), torch.arange(TRAINING) % 3 == 0
    training["y"] = torch.where(wrong, -2 * training["y"], training["y"])
    params = {"weights": torch.zeros(TRAINING), "log_lr": torch.tensor(-3.0)}
    tx = fshard.optim.adam(5e-2)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    step = fshard.train_step(loss, tx)
    torch.manual_seed(1 + mesh.get_rank())  # other clean rows on every rank
    before = fshard.evaluate(loss)(state.params, rows(1000, target), training)
    for _ in range(STEPS):
        state, _ = step(state, rows(ROWS, target), training)
    after = fshard.evaluate(loss)(state.params, rows(1000, target), training)
    learnt = fshard.gather_params(state.params)
    weights = softplus(learnt["weights"])
    if mesh.get_rank() == 0:
        print(f"error on clean rows: before {before:.4f}, after {after:.4f}")
        print(f"weights: of right rows {weights[~wrong].mean():.3f}, of wrong rows {weights[wrong].mean():.3f}")
        print(f"learning rate: from 0.050 to {learnt['log_lr'].exp():.3f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
