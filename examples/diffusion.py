"""DDPM (Ho et al., 2020) on points of the plane, and a moving average of its sharded parameters.

    python examples/diffusion.py                          # two simulated ranks
    torchrun --nproc-per-node=2 examples/diffusion.py     # two processes

The network predicts the noise in a noisy point. The average (EMA) is a `Sharded`, as the parameters are: `tree.map`
computes it on each rank's shards, without communication. Samples by the average are nearer to the data.
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor

import fshard
from fshard import tree

STEPS, ROWS, WIDTH, TIMES = 300, 128, 64, 50  # the rows are those of one rank


def data(rows: int) -> Tensor:
    """Points on a spiral: (rows, 2)."""
    angle = 1.5 * torch.pi * (1 + 2 * torch.rand(rows).sqrt())
    return torch.stack([angle.cos(), angle.sin()], 1) * angle[:, None] / 10 + 0.03 * torch.randn(rows, 2)


def new_params() -> list[Any]:
    sizes = [2 + 8, WIDTH, WIDTH, WIDTH, 2]  # a point, and eight features of the time
    return [{"w": torch.randn(n, m) * (2 / n) ** 0.5, "b": torch.zeros(m)} for n, m in pairwise(sizes)]


def noise_in(params: Any, x: Tensor, time: Tensor) -> Tensor:
    """The noise that the network sees in points: (rows, 2); the times are (rows,)."""
    waves = time[:, None] / TIMES * torch.pi * torch.tensor([0.5, 1, 2, 4])
    h = torch.cat([x, waves.cos(), waves.sin()], 1)
    for layer in params[:-1]:
        h = torch.nn.functional.silu(h @ layer["w"] + layer["b"])
    return h @ params[-1]["w"] + params[-1]["b"]


def kept(time: Tensor) -> Tensor:
    """The share of the data in a noisy point, as a variance: from 1 at time 0 to nearly 0 at the last."""
    return torch.exp(-5 * (time / TIMES).square())


def loss(params: Any, x: Tensor) -> fshard.Mean:
    time, noise = torch.randint(1, TIMES + 1, (len(x),)), torch.randn_like(x)  # drawn under the seed of the step
    a = kept(time)[:, None]
    errors = (noise_in(params, a.sqrt() * x + (1 - a).sqrt() * noise, time) - noise).square().sum(1)
    return fshard.Mean(errors.sum(), len(x))


def samples(params: Any, rows: int) -> Tensor:
    x = torch.randn(rows, 2)
    for time in torch.arange(TIMES, 0, -1):
        a = kept(time)
        beta = 1 - a / kept(time - 1)
        x = (x - beta / (1 - a).sqrt() * noise_in(params, x, time.expand(rows))) / (1 - beta).sqrt()
        x = x + (beta.sqrt() if time > 1 else 0) * torch.randn(rows, 2)
    return x


def distance(params: Any, rows: int) -> Tensor:
    """The energy distance between samples and data."""
    x, y = samples(fshard.gather_params(params), rows), data(rows)  # gathered once, not at each of the times
    return 2 * torch.cdist(x, y).mean() - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    tx = fshard.optim.adam(3e-2)  # a high rate: the average takes its noise away
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    step, ema = fshard.train_step(loss, tx), state.params
    torch.manual_seed(1 + mesh.get_rank())  # other data on every rank
    for _ in range(STEPS):
        state, _ = step(state, data(ROWS))
        ema = tree.map(lambda mean, x: torch.lerp(mean, x, 0.02), ema, state.params)
    raw, average = fshard.evaluate(distance)(state.params, 2000), fshard.evaluate(distance)(ema, 2000)
    if mesh.get_rank() == 0:
        print(f"energy distance of samples to the data: by the parameters {raw:.4f}, by their average {average:.4f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
