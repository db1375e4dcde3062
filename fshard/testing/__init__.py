"""Tools for tests: simulated ranks, fault injection, comparison of trees, a reference step, record and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..comm.ranks import MismatchError
from .compare import assert_trees_equal
from .late import InFlightError
from .oracle import oracle, whole_state
from .recording import record
from .replaying import replay
from .scheduler import Collective, Dies, Garbage, RankDied, Slow
from .world import SimulatedMesh, World

__all__ = [
    "Collective",
    "Dies",
    "Garbage",
    "InFlightError",
    "MismatchError",
    "RankDied",
    "SimulatedMesh",
    "Slow",
    "World",
    "assert_trees_equal",
    "oracle",
    "record",
    "replay",
    "simulate",
    "whole_state",
]


T = TypeVar("T")


def simulate(
    fn: Callable[[SimulatedMesh], T],
    shard: int = 4,
    replicate: int = 1,
    device: str = "cpu",
    **more: Any,
) -> list[T]:
    """Call `fn(mesh)` once per simulated rank, and return the results in rank order.

    The same as `World(shard, replicate, device=device, **more).run(fn)`.

    >>> simulate(lambda mesh: mesh.get_local_rank("shard"), shard=3)
    [0, 1, 2]
    """
    return World(shard, replicate, device=device, **more).run(fn)
