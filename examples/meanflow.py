"""MeanFlow (Geng et al., 2025) on points of the plane: a forward derivative inside the loss, samples in one step.

    python examples/meanflow.py                           # two simulated ranks
    torchrun --nproc-per-node=2 examples/meanflow.py      # two processes

The path from data x to noise e is z = (1 - t) x + t e, its velocity v = e - x. The network u(z, r, t) learns the mean
velocity between the times r and t. Along the path u = v - (t - r) du/dt, and x = e - u(e, 0, 1) is a sample.
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import jvp

import fshard

STEPS, ROWS, WIDTH = 300, 256, 64  # the rows are those of one rank


def data(rows: int) -> Tensor:
    """Points near eight places on a circle: (rows, 2)."""
    angles = torch.randint(8, (rows,)) * (torch.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(rows, 2)


def new_params() -> list[Any]:
    sizes = [2 + 8, WIDTH, WIDTH, WIDTH, 2]  # a point, and eight features of two times
    return [{"w": torch.randn(n, m) * (2 / n) ** 0.5, "b": torch.zeros(m)} for n, m in pairwise(sizes)]


def u(params: Any, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
    """The mean velocity from r to t at z: (rows, 2); the times are (rows, 1)."""
    times = torch.pi * torch.cat([t, t - r], 1)
    x = torch.cat([z, times.cos(), times.sin(), (2 * times).cos(), (2 * times).sin()], 1)
    for layer in params[:-1]:
        x = torch.nn.functional.silu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params: Any, x: Tensor) -> fshard.Mean:
    e = torch.randn_like(x)  # inside a step random numbers come from the seed in the state, others on every rank
    t, r = torch.rand(2, len(x), 1).sort(0, descending=True).values
    r = torch.where(torch.rand_like(t) < 0.5, t, r)  # where r = t, u learns the velocity itself
    z, v = (1 - t) * x + t * e, e - x
    inputs, along = (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t))  # u and du/dt in one forward:
    mean, slope = jvp(lambda z, r, t: u(params, z, r, t), inputs, along)  # type: ignore[misc]
    errors = (mean - (v - (t - r) * slope).detach()).square().sum(1)
    return fshard.Mean((errors / (errors.detach() + 0.01)).sum(), len(x))  # the paper's adaptive weights


def distance(params: Any, r: float) -> Tensor:
    """The energy distance between data and samples e - u(e, r, 1)."""
    e, y = torch.randn(1000, 2), data(1000)
    x = e - u(params, e, torch.full((1000, 1), r), torch.ones(1000, 1))
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    tx = fshard.optim.adam(fshard.optim.schedules.cosine(1e-2, STEPS))
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    step, mean_distance = fshard.train_step(loss, tx), fshard.evaluate(distance)  # evaluate: the mean over all ranks
    torch.manual_seed(1 + mesh.get_rank())  # other data on every rank
    before = mean_distance(state.params, 0.0)
    for _ in range(STEPS):
        state, _ = step(state, data(ROWS))
    after, velocity = mean_distance(state.params, 0.0), mean_distance(state.params, 1.0)
    if mesh.get_rank() == 0:
        print(f"energy distance of one-step samples to the data: before {before:.3f}, after {after:.3f}")
        print(f"the same with the velocity at t = 1 in place of the mean velocity: {velocity:.3f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
