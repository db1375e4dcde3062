"""A continuous flow: densities along an integrated path, with Hutchinson's estimate of the Jacobian's trace."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp

import fshard

from .parts import ROWS, STEPS, descend, functional, mean, normal, seeded, tensors, with_one_state

DIMS, WIDTH, INTERVALS = 3, 8, 4
TX = fshard.optim.adam(1e-2)


class Velocity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(DIMS + 1, WIDTH), nn.Linear(WIDTH, DIMS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, t: float) -> Tensor:
        x = self.enter(torch.cat([x, torch.full_like(x[:, :1], t)], 1))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.leave(x)


def modules() -> dict[str, nn.Module]:
    return {"velocity": Velocity()}


def batches() -> list[dict[str, Tensor]]:
    return [
        {"x": normal(ROWS, DIMS, seed=step).exp(), "probe": normal(ROWS, DIMS, seed=100 + step).sign()}
        for step in range(STEPS)
    ]


def rows(derivative: Any, batch: dict[str, Tensor]) -> Tensor:
    """Negative log-densities; `derivative(x, t, probe)` is the velocity and the product of Jacobian and probe."""
    x, probe = batch["x"], batch["probe"]
    volume = torch.zeros_like(x[:, 0])
    for i in range(INTERVALS):
        velocity, slope = derivative(x, i / INTERVALS, probe)
        x, volume = x + velocity / INTERVALS, volume + (slope * probe).sum(1) / INTERVALS
    return x.square().sum(1) / 2 - volume


NETWORKS, PARAMS = functional(seeded(modules))


def loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    def derivative(x: Tensor, t: float, probe: Tensor) -> Any:
        return jvp(lambda x: NETWORKS(params)["velocity"](x, t), (x,), (probe,))

    return mean(rows(derivative, batch))


start, step = with_one_state(PARAMS, TX, loss)


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    """Training by double backward: the product of probe and Jacobian has the same trace."""
    networks, losses = seeded(modules), []
    optimizer = torch.optim.Adam(networks["velocity"].parameters(), 1e-2)

    def derivative(x: Tensor, t: float, probe: Tensor) -> tuple[Tensor, Tensor]:
        x = x if x.requires_grad else x.requires_grad_()
        velocity = networks["velocity"](x, t)
        return velocity, torch.autograd.grad(velocity, x, probe, create_graph=True)[0]

    for batch in batches:
        losses.append(descend(rows(derivative, batch).mean(), optimizer))
    return losses, {"state": tensors(networks)}
