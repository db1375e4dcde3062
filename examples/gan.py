"""A GAN (Goodfellow et al., 2014) on points of the plane: two states, each step takes the other's parameters.

    python examples/gan.py                                # two simulated ranks
    torchrun --nproc-per-node=2 examples/gan.py           # two processes

Generator and critic are torch modules. A step is a pure function, so the order of the calls is that of the updates. The
critic has the penalty R1 (Mescheder et al., 2018), which is a gradient inside its loss.
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.func import grad
from torch.nn.functional import softplus

import fshard

STEPS, ROWS, WIDTH = 200, 128, 64  # the rows are those of one rank


def perceptron(*sizes: int) -> nn.Module:
    layers = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


with torch.device("meta"):  # shapes alone: `apply.init` makes the parameters
    generate, GENERATOR, _ = fshard.module.functionalize(perceptron(2, WIDTH, WIDTH, 2))
    judge, CRITIC, _ = fshard.module.functionalize(perceptron(2, WIDTH, WIDTH, 1))


def data(rows: int) -> Tensor:
    """A curved cloud of points: (rows, 2)."""
    x = torch.randn(rows)
    return torch.stack([2 + x, 0.5 * x.square() + 0.3 * torch.randn(rows)], 1)


def fake(generator: Any, rows: int) -> Tensor:
    return generate(generator, {}, torch.randn(rows, 2))[0]


def score(critic: Any, x: Tensor) -> Tensor:
    return judge(critic, {}, x)[0]


def critic_loss(critic: Any, real: Tensor, generator: Any) -> Tensor:
    slope = grad(lambda x: score(critic, x).sum())(real)
    penalty = 0.1 * slope.square().sum(1).mean()
    return softplus(score(critic, fake(generator, len(real)))).mean() + softplus(-score(critic, real)).mean() + penalty


def generator_loss(generator: Any, real: Tensor, critic: Any) -> Tensor:
    return softplus(-score(critic, fake(generator, len(real)))).mean()


def moments(x: Tensor) -> Tensor:
    return torch.cat([x.mean(0), x.T.cov().flatten()])


def distance(generator: Any, real: Tensor) -> Tensor:
    """The distance of means and covariances of fake and real points."""
    return (moments(fake(generator, len(real))) - moments(real)).norm()


def main(mesh: Any) -> None:
    tx = fshard.optim.adam(fshard.optim.schedules.cosine(5e-3, STEPS), b1=0.0, b2=0.9)

    def start(params: Any, apply: Any, seed: int) -> fshard.TrainState:
        plan = fshard.make_plan(params, mesh, regather=False)  # so small a network is one unit
        return fshard.init_state(apply.init(plan, seed=seed), tx, seed=seed)

    generator, critic = start(GENERATOR, generate, 0), start(CRITIC, judge, 1)
    train_generator, train_critic = fshard.train_step(generator_loss, tx), fshard.train_step(critic_loss, tx)
    torch.manual_seed(1 + mesh.get_rank())  # other data on every rank
    before = fshard.evaluate(distance)(generator.params, data(2000))
    for _ in range(STEPS):
        real = data(ROWS)
        critic, _ = train_critic(critic, real, generator.params)
        generator, _ = train_generator(generator, real, critic.params)
    after = fshard.evaluate(distance)(generator.params, data(2000))
    if mesh.get_rank() == 0:
        print(f"distance of mean and covariance to those of the data: before {before:.3f}, after {after:.3f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
