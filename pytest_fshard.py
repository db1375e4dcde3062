"""A plugin of pytest that runs tests on simulated ranks.

A module of its own because pytest imports it whenever it starts: importing anything of fshard would import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fshard.testing import World

_MARK = (
    "world(shard=[2], replicate=[1], device='cpu'): run the test once for each mesh of simulated ranks; "
    "the fixture `world` is one"
)


@dataclass(frozen=True)
class _Mesh:
    """The sizes and the device of the mesh that a test runs on."""

    shard: int = 2
    replicate: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.shard}" if self.replicate == 1 else f"{self.replicate}x{self.shard}"


def _sizes(name: str, value: int | Sequence[int]) -> list[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"mark world: {name}={value!r}: expected numbers of ranks: {name}=[1, 2, 3]")
    return sizes


def _meshes(shard: int | Sequence[int] = 2, replicate: int | Sequence[int] = 1, device: str = "cpu") -> list[_Mesh]:
    pairs = itertools.product(_sizes("replicate", replicate), _sizes("shard", shard))
    return [_Mesh(num_shard, num_replicate, device) for num_replicate, num_shard in pairs]


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark `world`."""
    config.addinivalue_line("markers", _MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the mark `world` once for each mesh of the mark."""
    mark = metafunc.definition.get_closest_marker("world")
    if mark is None:
        return
    if "world" not in metafunc.fixturenames:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mark world: expected an argument `world` of the test")
    try:
        meshes = _meshes(*mark.args, **mark.kwargs)
    except TypeError as wrong:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: mark world: {wrong}; write {_MARK}") from None
    metafunc.parametrize("world", meshes, indirect=True, ids=map(str, meshes))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    """Return the simulated ranks of this test (a `fshard.testing.World`); two without a mark `world`."""
    from fshard.testing import World  # not at the top: this module is imported whenever pytest starts

    mesh = getattr(request, "param", _Mesh())
    return World(mesh.shard, mesh.replicate, device=mesh.device)
