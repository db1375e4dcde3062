"""Tools for tests: simulated ranks, fault injection, comparison of trees and steps, a reference, record and replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..comm.ranks import MismatchError
from ..watch.compare import assert_trees_equal
from ..watch.first_difference import Difference, first_difference
from ..watch.observed import observed
from ..watch.recording import record
from .late import InFlightError
from .oracle import oracle, whole_state
from .replaying import replay
from .scheduler import Collective, Dies, Garbage, RankDied, Slow
from .split_losses import same_loss
from .world import SimulatedMesh, World

__all__ = [
    "Collective",
    "Dies",
    "Difference",
    "Garbage",
    "InFlightError",
    "MismatchError",
    "RankDied",
    "SimulatedMesh",
    "Slow",
    "World",
    "assert_trees_equal",
    "first_difference",
    "observed",
    "oracle",
    "record",
    "replay",
    "same_loss",
    "simulate",
    "whole_state",
]


T = TypeVar("T")


def simulate(fn: Callable[[SimulatedMesh], T], *sizes: int, **more: object) -> list[T]:
    """Call `fn(mesh)` once per simulated rank, and return the results in rank order.

    Name axes as you like, slowest-varying first: `simulate(fn, shard=2, tensor=2)`. `sizes`, without names, are those
    of the axes `shard` and `replicate`, in this order. `more` may have `World`'s other arguments.

    >>> simulate(lambda mesh: mesh.get_local_rank("shard"), shard=3)
    [0, 1, 2]
    >>> simulate(lambda mesh: mesh.get_coordinate(), tensor=2, shard=2)
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    names = ("axes", "device", "faults", "late", "threads")
    options: dict[str, Any] = {name: more.pop(name) for name in names if name in more}
    options |= more if {*more} <= {"shard", "replicate"} else {"axes": more}
    return World(*sizes, **options).run(fn)
