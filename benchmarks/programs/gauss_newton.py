"""Gauss-Newton: steps d with (JᵀJ + damping) d = -Jᵀr by conjugate gradients over sharded parameters, without J."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, jvp, vjp

import fshard
from fshard.tree import dot

from .parts import ROWS, STEPS, functional, normal, seeded

DAMPING, ITERATIONS = 3.0, 60


def modules() -> dict[str, torch.nn.Module]:
    return {"model": torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))}


def batches() -> list[dict[str, Tensor]]:
    x = [normal(ROWS, 3, seed=step) for step in range(STEPS)]
    return [{"x": x, "y": torch.stack([x.prod(1), x.sum(1).sin()], 1)} for x in x]


NETWORKS, PARAMS = functional(seeded(modules))


def residuals(params: Any, batch: dict[str, Tensor]) -> Tensor:
    return NETWORKS(params)["model"](batch["x"]) - batch["y"]


def loss(params: Any, batch: dict[str, Tensor]) -> fshard.Sum:
    return fshard.Sum(residuals(params, batch).square().sum() / 2)


def start(mesh: Any) -> dict[str, Any]:
    return {"params": fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh))}


def solved(product: Any, right: Any) -> Any:
    """The solution of product(x) = right for a symmetric positive product."""
    x, rest = fshard.tree.map(torch.zeros_like, right), right
    direction, size = rest, dot(rest, rest)
    for _ in range(ITERATIONS):
        if size < 1e-30:
            break
        image = product(direction)
        a = size / dot(direction, image)
        x = fshard.tree.map(lambda x, d, a=a: x + a * d, x, direction)
        rest = fshard.tree.map(lambda r, i, a=a: r - a * i, rest, image)
        before, size = size, dot(rest, rest)
        direction = fshard.tree.map(lambda r, d, b=size / before: r + b * d, rest, direction)
    return x


def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    params = state["params"]

    def here(params: Any) -> Tensor:
        return residuals(fshard.gather_params(params), batch)

    def product(v: Any) -> Any:
        image = jvp(here, (params,), (v,))[1]
        return fshard.tree.map(lambda x, v: x + DAMPING * v, vjp(here, params)[1](image)[0], v)

    value, slope = fshard.value_and_grad(loss)(params, batch)
    change = solved(product, slope)
    return {"params": fshard.tree.map(lambda x, d: x - d, params, change)}, value


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    model, losses = seeded(modules)["model"], []
    params = {path: x.detach() for path, x in model.named_parameters()}
    for batch in batches:

        def here(params: dict[str, Tensor], batch: dict[str, Tensor] = batch) -> Tensor:
            return (functional_call(model, params, (batch["x"],)) - batch["y"]).flatten()

        rest = here(params)
        losses.append(rest.square().sum() / 2)
        jacobian = torch.cat([x.flatten(1) for x in jacrev(here)(params).values()], 1)
        matrix = jacobian.T @ jacobian + DAMPING * torch.eye(jacobian.shape[1], dtype=torch.float64)
        change = torch.linalg.solve(matrix, jacobian.T @ rest).split([x.numel() for x in params.values()])
        params = {path: x - d.view_as(x) for (path, x), d in zip(params.items(), change, strict=True)}
    return losses, {"params": {f"model.{path}": x for path, x in params.items()}}
