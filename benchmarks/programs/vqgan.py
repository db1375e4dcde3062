"""VQGAN: an autoencoder with a codebook and a critic, two states of which each step reads the other's parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import fshard

from .parts import ROWS, STEPS, descend, functional, mean, normal, seeded, started

PIXELS, CODE, CODES = 8, 3, 5
TX = fshard.optim.adam(1e-2, b1=0.5)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(PIXELS, 8), nn.SiLU(), nn.Linear(8, CODE))
        self.codes = nn.Parameter(torch.randn(CODES, CODE))
        self.decode = nn.Sequential(nn.Linear(CODE, 8), nn.SiLU(), nn.Linear(8, PIXELS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, by a straight-through estimate, and each row's loss of codebook and commitment."""
        z = self.encode(x)
        code = self.codes[(z.detach()[:, None] - self.codes.detach()).square().sum(-1).argmin(1)]
        distance = (code - z.detach()).square().sum(1) + 0.25 * (z - code.detach()).square().sum(1)
        return self.decode(z + (code - z).detach()), distance


def modules() -> dict[str, nn.Module]:
    critic = nn.Sequential(nn.Linear(PIXELS, 8), nn.SiLU(), nn.Linear(8, 1))
    return {"generator": Quantized(), "critic": critic}


def batches() -> list[Tensor]:
    return [normal(ROWS, PIXELS, seed=step) for step in range(STEPS)]


def generator_rows(networks: Any, x: Tensor) -> Tensor:
    fake, distance = networks["generator"](x)
    return (fake - x).abs().sum(1) + distance + 0.2 * softplus(-networks["critic"](fake))[:, 0]


def critic_rows(networks: Any, x: Tensor) -> Tensor:
    fake, judge = networks["generator"](x)[0].detach(), networks["critic"]
    return (softplus(judge(fake)) + softplus(-judge(x)))[:, 0]


NETWORKS, PARAMS = functional(seeded(modules))


def generator_loss(generator: Any, x: Tensor, critic: Any) -> fshard.Mean:
    return mean(generator_rows(NETWORKS({"generator": generator, "critic": critic}), x))


def critic_loss(critic: Any, x: Tensor, generator: Any) -> fshard.Mean:
    return mean(critic_rows(NETWORKS({"generator": generator, "critic": critic}), x))


def start(mesh: Any) -> dict[str, Any]:
    return {name: started(params, mesh, TX) for name, params in PARAMS.items()}


def step(state: dict[str, Any], batch: Tensor) -> tuple[dict[str, Any], Tensor]:
    generator, first = fshard.train_step(generator_loss, TX)(state["generator"], batch, state["critic"].params)
    critic, second = fshard.train_step(critic_loss, TX)(state["critic"], batch, generator.params)
    return {"generator": generator, "critic": critic}, torch.stack([first["loss"], second["loss"]])


def plain(batches: list[Tensor]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    generator, critic = (torch.optim.Adam(x.parameters(), 1e-2, (0.5, 0.999)) for x in networks.values())
    for x in batches:
        first = descend(generator_rows(networks, x).mean(), generator)
        losses.append(torch.stack([first, descend(critic_rows(networks, x).mean(), critic)]))
    return losses, {name: dict(module.named_parameters()) for name, module in networks.items()}
