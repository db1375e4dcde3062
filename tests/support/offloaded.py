"""Steps of a small model with leaves in host memory."""

from typing import Any

import torch
from torch import Tensor

import fshard
from fshard.comm.reduction import Sums
from fshard.core import tree
from support.accelerator import DEVICE, Mesh


class Doubling(Sums):
    """A reduction with a hook after it."""

    def after(self, grads: Tensor, unit: str) -> Tensor:
        """Twice the sum."""
        return 2 * grads


def model() -> Any:
    """Two blocks of a matrix and a vector, a float64 norm and a head; the rest is float32."""
    block = {"w": torch.ones(8, 8), "b": torch.ones(8)}
    return {
        "blocks": [dict(block), tree.map(torch.clone, block)],
        "norm": torch.ones(8).double(),
        "head": torch.ones(8, 4),
    }


def loss(params: Any, batch: Tensor) -> fshard.Mean:
    """The mean of the outputs of a small network."""
    x = batch
    for block in params["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    losses = (x * params["norm"].to(x.dtype)) @ params["head"]
    return fshard.Mean(losses.sum(), losses.numel())


def placed(x: Any) -> dict[bool, set[str]]:
    """The device types of rows, by whether the plan keeps their leaves in host memory."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for part in tree.nodes(x, fshard.Sharded):
        for kind, row in zip(part.view.kinds, part.tensors, strict=True):
            found[part.plan.kinds[kind].host].add(row.device.type)
    return found


RIGHT = {True: {"cpu"}, False: {"meta"}}


def state_of(tx: Any, scale: Any, **how: Any) -> fshard.TrainState:
    """A train state on the simulated accelerator, made of leaves on both devices."""
    params, host = model(), ["blocks.*", "norm"]
    plan = fshard.make_plan(params, Mesh(), units=["blocks.*"], offload=host, block=4, **how)
    given = tree.map(lambda x: x.to(DEVICE), params) | {"norm": params["norm"]}
    state = fshard.init_state(fshard.shard_params(given, plan), tx, scale)
    assert placed(state.params) == RIGHT
    return state
