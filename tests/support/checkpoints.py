"""A state to save: a pure function of a factor, so that what is restored can be compared with it."""

from typing import Any

import torch

import fshard
from fshard import tree

from .models import rand

PARAMS = {"a": {"w": rand(5, 3, seed=1), "b": rand(4, seed=2)}, "c": rand(7, seed=3)}


def state_of(mesh: Any, factor: float = 1.0, **extra: Any) -> Any:
    """A sharded tree, a leaf that every rank has, and a number."""
    params = fshard.shard_params(tree.map(lambda x: factor * x, PARAMS), fshard.make_plan(PARAMS, mesh))
    numbers = {"one": torch.tensor(factor + 1.0), "other": torch.tensor(factor + 2.0)}
    return {"params": params, "count": torch.tensor([float(factor)]), "factor": float(factor), **numbers, **extra}
