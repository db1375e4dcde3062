"""A fixed-point layer: its derivative solves a linear equation in the backward. Plain torch unrolls the iteration."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fshard

from .parts import ROWS, STEPS, descend, functional, integers, mean, normal, seeded, tensors, with_one_state

WIDTH, CLASSES, ITERATIONS = 6, 3, 80
TX = fshard.optim.adam(1e-2)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(4, WIDTH)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.inner(z) + self.outer(x))


def modules() -> dict[str, nn.Module]:
    return {"cell": Cell(), "head": nn.Linear(WIDTH, CLASSES)}


def batches() -> list[dict[str, Tensor]]:
    return [{"x": normal(ROWS, 4, seed=step), "y": integers(CLASSES, ROWS, seed=step)} for step in range(STEPS)]


def iterated(f: Any, z: Tensor) -> Tensor:
    for _ in range(ITERATIONS):
        z = f(z)
    return z


def fixed_point(f: Any, z: Tensor) -> Tensor:
    """The z with z = f(z); the backward iterates the transposed Jacobian at z."""
    with torch.no_grad():
        z = iterated(f, z)
    if not torch.is_grad_enabled():
        return z
    inner = z.detach().requires_grad_()
    value, result = f(inner), f(z)

    def solved(slope: Tensor) -> Tensor:
        def product(y: Tensor) -> Tensor:
            return torch.autograd.grad(value, inner, y, retain_graph=True)[0] + slope

        return iterated(product, slope)

    result.register_hook(solved)
    return result


def rows(solve: Any, networks: Any, batch: dict[str, Tensor]) -> Tensor:
    z = solve(lambda z: networks["cell"](z, batch["x"]), torch.zeros(len(batch["x"]), WIDTH, dtype=torch.float64))
    return cross_entropy(networks["head"](z), batch["y"], reduction="none")


NETWORKS, PARAMS = functional(seeded(modules))


def loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    return mean(rows(fixed_point, NETWORKS(params), batch))


start, step = with_one_state(PARAMS, TX, loss)


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    params = tensors(networks)
    optimizer = torch.optim.Adam(params.values(), 1e-2)
    for batch in batches:
        losses.append(descend(rows(iterated, networks, batch).mean(), optimizer))
    return losses, {"state": params}
