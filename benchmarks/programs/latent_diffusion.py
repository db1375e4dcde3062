"""Latent diffusion: a frozen encoder makes latents; a text encoder and a denoiser train; an average follows both."""

from typing import Any

import torch
from torch import Tensor, lerp, nn

import fshard

from .parts import ROWS, STEPS, descend, functional, integers, mean, normal, seeded, started, tensors

LATENT, WIDTH, DECAY = 3, 8, 0.9


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(LATENT + 1, WIDTH), nn.Linear(WIDTH, LATENT)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, t: Tensor, words: Tensor) -> Tensor:
        x = self.enter(torch.cat([x, t], 1))
        for block in self.blocks:
            x = x + torch.tanh(block(x + words))
        return self.leave(x)


def modules() -> dict[str, nn.Module]:
    encoder = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, LATENT)).requires_grad_(False)
    return {"encoder": encoder, "text": nn.EmbeddingBag(7, WIDTH), "denoiser": Denoiser()}


def batches() -> list[dict[str, Tensor]]:
    return [
        {
            "images": normal(ROWS, 6, seed=step),
            "words": integers(7, ROWS, 4, seed=step),
            "t": integers(10, ROWS, 1, seed=100 + step) / 10.0 + torch.zeros(1, dtype=torch.float64),
            "noise": normal(ROWS, LATENT, seed=200 + step),
        }
        for step in range(STEPS)
    ]


def rows(networks: Any, batch: dict[str, Tensor]) -> Tensor:
    latents, noise, angle = networks["encoder"](batch["images"]), batch["noise"], batch["t"] * torch.pi / 2
    noisy = angle.cos() * latents + angle.sin() * noise
    found = networks["denoiser"](noisy, batch["t"], networks["text"](batch["words"]))
    return (found - noise).square().sum(1)


NETWORKS, PARAMS = functional(seeded(modules))
TX = fshard.optim.adamw(1e-2)


def loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    return mean(rows(NETWORKS(params), batch))


def start(mesh: Any) -> dict[str, Any]:
    state = started(PARAMS, mesh, TX)
    return {"state": state, "average": state.params}


def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    new, metrics = fshard.train_step(loss, TX)(state["state"], batch)
    average = fshard.tree.map(lambda old, x: lerp(x, old, DECAY), state["average"], new.params)
    return {"state": new, "average": average}, metrics["loss"]


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks = seeded(modules)
    params, losses = tensors(networks), []
    optimizer = torch.optim.AdamW([x for x in params.values() if x.requires_grad], 1e-2)
    average = {path: x.detach().clone() for path, x in params.items()}
    for batch in batches:
        losses.append(descend(rows(networks, batch).mean(), optimizer))
        average = {path: lerp(params[path].detach(), old, DECAY) for path, old in average.items()}
    return losses, {"state": params, "average": average}
