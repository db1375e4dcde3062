"""MAE to ViT: an encoder learns to fill in patches, then gets a new head and learns classes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fshard

from .parts import ROWS, STEPS, descend, functional, integers, mean, normal, seeded, started, tensors

PATCHES, PIXELS, WIDTH, CLASSES, KEPT = 6, 4, 8, 3, 3
TX = fshard.optim.adamw(1e-2)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True, bias=False)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.position = nn.Linear(PIXELS, WIDTH), nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, patches: Tensor, kept: Tensor) -> Tensor:
        """The encoded patches of which `kept` has the numbers."""
        x = self.enter(patches) + self.position
        x = x.gather(1, kept[..., None].expand(-1, -1, WIDTH))
        for block in self.layers:
            x = block(x)
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.position = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(PATCHES, WIDTH))
        self.layer, self.leave = layer(), nn.Linear(WIDTH, PIXELS)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        whole = self.hidden.expand(len(x), PATCHES, WIDTH).scatter(1, kept[..., None].expand(-1, -1, WIDTH), x)
        return self.leave(self.layer(whole + self.position))


def modules() -> dict[str, nn.Module]:
    return {"encoder": Encoder(), "decoder": Decoder(), "head": nn.Linear(WIDTH, CLASSES)}


def batches() -> list[dict[str, Tensor]]:
    """Batches of which the first half has no labels."""
    patches = [{"patches": normal(ROWS, PATCHES, PIXELS, seed=step)} for step in range(2 * STEPS)]
    kept = [{"kept": normal(ROWS, PATCHES, seed=50 + step).argsort(1)[:, :KEPT]} for step in range(STEPS)]
    labels = [{"labels": integers(CLASSES, ROWS, seed=step)} for step in range(STEPS)]
    return [a | b for a, b in zip(patches, kept + labels, strict=True)]


def filling_rows(networks: Any, batch: dict[str, Tensor]) -> Tensor:
    patches, kept = batch["patches"], batch["kept"]
    hidden = torch.ones(patches.shape[:2], dtype=patches.dtype).scatter(1, kept, 0.0)
    filled = networks["decoder"](networks["encoder"](patches, kept), kept)
    return ((filled - patches).square().sum(-1) * hidden).sum(1)


def class_rows(networks: Any, batch: dict[str, Tensor]) -> Tensor:
    kept = torch.arange(PATCHES).expand(len(batch["labels"]), -1)
    scores = networks["head"](networks["encoder"](batch["patches"], kept).mean(1))
    return cross_entropy(scores, batch["labels"], reduction="none")


NETWORKS, PARAMS = functional(seeded(modules))


def filling_loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    return mean(filling_rows(NETWORKS(params), batch))


def class_loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    return mean(class_rows(NETWORKS(params), batch))


def start(mesh: Any) -> dict[str, Any]:
    parts = {"mae": ("encoder", "decoder"), "vit": ("encoder", "head")}
    return {name: started({key: PARAMS[key] for key in keys}, mesh, TX) for name, keys in parts.items()}


def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    """A step of the MAE, whose encoder the ViT gets; with labels a step of the ViT."""
    if "labels" in batch:
        vit, metrics = fshard.train_step(class_loss, TX)(state["vit"], batch)
        return state | {"vit": vit}, metrics["loss"]
    mae, metrics = fshard.train_step(filling_loss, TX)(state["mae"], batch)
    params = state["vit"].params.replace({"encoder": mae.params["encoder"]})
    return {"mae": mae, "vit": fshard.init_state(params, TX)}, metrics["loss"]


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    encoder, decoder, head = networks.values()
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], 1e-2)
    for batch in batches[:STEPS]:
        losses.append(descend(filling_rows(networks, batch).mean(), optimizer))
    mae = {path: x.detach().clone() for path, x in tensors({"encoder": encoder, "decoder": decoder}).items()}
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], 1e-2)
    for batch in batches[STEPS:]:
        losses.append(descend(class_rows(networks, batch).mean(), optimizer))
    return losses, {"mae": mae, "vit": tensors({"encoder": encoder, "head": head})}
