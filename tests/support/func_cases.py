"""Cases of losses that use torch.func, on ranks."""

from typing import Any

import fshard
from support.func_losses import FROZEN, UNITS, params
from support.models import NARROW, STRATEGIES
from support.worlds import simulated

WORLDS = {"None": None, "2": (1, 2), "3": (1, 3), "2x2": (2, 2)}

CASES = [(w, s) for w in WORLDS for s in (STRATEGIES if w == "2x2" else NARROW)]


def sharded(mesh: Any, strategy: str = "full", **kw: Any) -> fshard.Sharded:
    """The network's parameters, sharded by a strategy."""
    plan = fshard.make_plan(params(), mesh, units=UNITS, frozen=FROZEN, **STRATEGIES[strategy], **kw)
    return fshard.shard_params(params(), plan)


def num_ranks(world: str) -> int:
    """The number of ranks of a world."""
    shape = WORLDS[world]
    return 1 if shape is None else shape[0] * shape[1]


def on_ranks(world: str, job: Any) -> list[Any]:
    """The results of `job(mesh)` on each rank of a world."""
    shape = WORLDS[world]
    return [job(None)] if shape is None else simulated(job, replicate=shape[0], shard=shape[1])


def rank_of(mesh: Any) -> int:
    """This rank's number; 0 without a mesh."""
    return 0 if mesh is None else mesh.get_rank()
