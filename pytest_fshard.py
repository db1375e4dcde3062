"""pytest's plugin of fshard: tests on simulated ranks.

A module of its own because pytest imports it whenever it starts: importing anything of fshard would import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

_MARK = (
    "world(shard=[2], replicate=[1], device='cpu'): run the test once for each mesh of simulated ranks; "
    "the fixture `world` is one"
)


@dataclass(frozen=True)
class World:
    """A set of simulated ranks: `world(fn, *args)` runs `fn(mesh, *args)` on each, and gives their results."""

    shard: int = 2
    replicate: int = 1
    device: str = "cpu"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.shard * self.replicate

    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """The results of `fn(mesh, *args)` in rank order."""
        from fshard.testing import simulate

        return simulate(lambda mesh: fn(mesh, *args), self.shard, self.replicate, self.device)


def _sizes(name: str, given: int | Sequence[int]) -> list[int]:
    sizes = [given] if isinstance(given, int) else list(given)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"mark world: {name}={given!r}: expected numbers of ranks: {name}=[1, 2, 3]")
    return sizes


def _worlds(shard: Any = 2, replicate: Any = 1, device: str = "cpu") -> list[World]:
    pairs = itertools.product(_sizes("replicate", replicate), _sizes("shard", shard))
    return [World(shard, replicate, device) for replicate, shard in pairs]


def _name(world: World) -> str:
    return f"{world.shard}" if world.replicate == 1 else f"{world.replicate}x{world.shard}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each mesh of the mark."""
    mark = metafunc.definition.get_closest_marker("world")
    if mark is None:
        return
    if "world" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mark world: expected an argument `world` of the test")
    try:
        worlds = _worlds(*mark.args, **mark.kwargs)
    except TypeError as wrong:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mark world: {wrong}; write {_MARK}") from None
    metafunc.parametrize("world", worlds, indirect=True, ids=[_name(world) for world in worlds])


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """The simulated ranks of this test: `world(fn, *args) -> [result of each rank]`; two without a mark `world`."""
    return getattr(request, "param", World())
