"""Shared by all programs: tensors and modules from seeds, modules as functions, a step of plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fshard

ROWS, STEPS = 13, 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(make: Callable[[], dict[str, nn.Module]]) -> dict[str, nn.Module]:
    """Modules in float64, each time the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {name: module.double() for name, module in make().items()}


def functional(modules: Mapping[str, nn.Module]) -> tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]:
    """A function `networks(params)` that returns modules without buffers as functions, and their parameters."""
    pairs = {name: fshard.module.functionalize(module)[:2] for name, module in modules.items()}

    def call(params: Any, name: str, *args: Any) -> Any:
        return pairs[name][0](params[name], {}, *args)[0]

    def networks(params: Any) -> dict[str, Any]:
        return {name: partial(call, params, name) for name in pairs}

    return networks, {name: params for name, (_, params) in pairs.items()}


def mean(rows: Tensor) -> fshard.Mean:
    """The mean over the rows of all ranks."""
    return fshard.Mean(rows.sum(), rows.numel())


def started(params: Any, mesh: Any, tx: fshard.optim.Transform) -> fshard.TrainState:
    return fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)


def with_one_state(
    params: Any, tx: fshard.optim.Transform, loss: Callable[..., fshard.Mean]
) -> tuple[Callable[[Any], dict[str, Any]], Callable[..., tuple[dict[str, Any], Tensor]]]:
    """`start` and `step` of a program whose step is one training step."""

    def start(mesh: Any) -> dict[str, Any]:
        return {"state": started(params, mesh, tx)}

    def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        new, metrics = fshard.train_step(loss, tx)(state["state"], batch)
        return {"state": new}, metrics["loss"]

    return start, step


def descend(loss: Tensor, optimizer: torch.optim.Optimizer, clip_norm: float = math.inf) -> Tensor:
    """Take a step of plain torch, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip_norm)
    optimizer.step()
    return loss.detach()


def tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{name}.{path}": x for name, module in modules.items() for path, x in module.named_parameters()}
