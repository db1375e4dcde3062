"""DLRM: embedding tables trained by Adagrad, products of embeddings, and dense layers trained by SGD with momentum."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import fshard

from .parts import ROWS, STEPS, descend, functional, integers, mean, normal, seeded, tensors, with_one_state

TABLES, WIDTH = [11, 30, 5], 4


class Ranking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, WIDTH))
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in TABLES)
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        upper = torch.triu_indices(len(TABLES) + 1, len(TABLES) + 1, 1)
        products = (vectors @ vectors.mT)[:, upper[0], upper[1]]
        return self.top(torch.cat([x, products], 1))[:, 0]


def modules() -> dict[str, nn.Module]:
    return {"model": Ranking()}


def batches() -> list[dict[str, Tensor]]:
    def sparse(step: int) -> Tensor:
        return torch.stack([integers(high, ROWS, seed=10 * step + high) for high in TABLES], 1)

    clicks = [integers(2, ROWS, seed=step).double() for step in range(STEPS)]
    dense = [normal(ROWS, 6, seed=step) for step in range(STEPS)]
    return [{"dense": dense[i], "sparse": sparse(i), "clicks": clicks[i]} for i in range(STEPS)]


def rows(networks: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(networks["model"](batch["dense"], batch["sparse"]), batch["clicks"], reduction="none")


NETWORKS, PARAMS = functional(seeded(modules))
RULES = {"tables": fshard.optim.adagrad(1e-1), "dense": fshard.optim.sgd(1e-1, momentum=0.9)}
TX = fshard.optim.by_label(RULES, {"model.tables.**": "tables", "**": "dense"})


def loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    return mean(rows(NETWORKS(params), batch))


start, step = with_one_state(PARAMS, TX, loss)


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    params = tensors(networks)
    tables = torch.optim.Adagrad([x for path, x in params.items() if ".tables." in path], 1e-1)
    dense = torch.optim.SGD([x for path, x in params.items() if ".tables." not in path], 1e-1, momentum=0.9)
    for batch in batches:
        tables.zero_grad()
        losses.append(descend(rows(networks, batch).mean(), dense))
        tables.step()
    return losses, {"state": params}
