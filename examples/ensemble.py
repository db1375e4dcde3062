"""An ensemble: `vmap` over members, each of which weighs the rows in its own way; they disagree far from the data.

    python examples/ensemble.py                           # two simulated ranks
    torchrun --nproc-per-node=2 examples/ensemble.py      # two processes

A leaf has the parameters of all members in dim 0, and each rank a part of every leaf. Random weights of rows are a
Bayesian bootstrap (Rubin, 1981).
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import vmap

import fshard

STEPS, ROWS, WIDTH, MEMBERS = 300, 64, 32, 8  # the rows are those of one rank


def data(rows: int, low: float = -1, high: float = 1) -> dict[str, Tensor]:
    """Noisy points of a sine between two places: x and y are (rows, 1)."""
    x = low + (high - low) * torch.rand(rows, 1)
    return {"x": x, "y": torch.sin(3 * x) + 0.1 * torch.randn(rows, 1), "weights": exponential(rows)}


def exponential(rows: int) -> Tensor:
    """Weights of rows for each member, of mean 1: (members, rows)."""
    return -torch.rand(MEMBERS, rows).clamp_min(1e-6).log()


def new_params() -> list[Any]:
    sizes = [1, WIDTH, WIDTH, 1]
    return [{"w": torch.randn(MEMBERS, n, m) / n**0.5, "b": torch.randn(MEMBERS, m)} for n, m in pairwise(sizes)]


def member(params: Any, x: Tensor) -> Tensor:
    for layer in params[:-1]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def outputs(params: Any, x: Tensor) -> Tensor:
    """What all members say: (members, rows, 1)."""
    return vmap(member, (0, None))(fshard.gather_params(params), x)


def loss(params: Any, batch: dict[str, Tensor]) -> tuple[fshard.Mean, list[fshard.Mean]]:
    """The sum of all members' losses, and each member's error without weights."""
    errors = (outputs(params, batch["x"]) - batch["y"]).square()[..., 0]
    rows = errors.shape[1]
    total = (batch["weights"] * errors).sum()
    return fshard.Mean(total, rows), [fshard.Mean(each, rows) for each in errors.detach().sum(1)]


def error(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    """The error of the members' mean."""
    return fshard.Mean((outputs(params, batch["x"]).mean(0) - batch["y"]).square().sum(), len(batch["x"]))


def spread(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    """The standard deviation over members."""
    return fshard.Mean(outputs(params, batch["x"]).std(0).sum(), len(batch["x"]))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    tx = fshard.optim.adam(fshard.optim.schedules.cosine(1e-2, STEPS))
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    step = fshard.train_step(loss, tx, has_aux=True)
    torch.manual_seed(1 + mesh.get_rank())  # other rows on every rank
    for _ in range(STEPS):
        state, _ = step(state, data(ROWS))
    new = data(1000)
    _, of_members = fshard.evaluate(loss, has_aux=True)(state.params, new)
    of_mean = fshard.evaluate(error)(state.params, new)
    near, far = (fshard.evaluate(spread)(state.params, data(1000, *place)) for place in ((-1, 1), (2, 3)))
    if mesh.get_rank() == 0:
        print(f"error: of a member {sum(of_members) / MEMBERS:.4f}, of the mean of all {of_mean:.4f}")
        print(f"members differ by: near the data {near:.3f}, far from it {far:.3f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
