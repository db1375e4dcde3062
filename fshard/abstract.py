"""Meshes that are not there: to plan for, and to look at the graph of a step on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import check_whole, wrong


class AbstractMesh:
    """A mesh of any size, seen by one of its ranks: plans are made for it, and functions lowered, but not run.

    Axes by name, the first the slowest; `rank` is this rank's number among all. ValueError for "cuda" where torch is
    built for CPUs alone.

    >>> mesh = AbstractMesh(replicate=2, shard=64)
    >>> mesh.size(), mesh.get_local_rank("shard")
    (128, 0)

    Source: jax.sharding.AbstractMesh.
    """

    abstract = True

    def __init__(self, device: str = "cpu", rank: int = 0, **axes: int):
        if not isinstance(device, str):
            raise TypeError(f"AbstractMesh: {wrong('device', device, 'a kind of device')}. Name axes: shard=64.")
        if not axes:
            raise ValueError("AbstractMesh: expected axes by name, as in AbstractMesh(shard=64), got none")
        for axis, number in axes.items():
            check_whole(f"AbstractMesh: {axis}", number, what="a number of ranks along this axis")
        check_whole("AbstractMesh: rank", rank, 0, math.prod(axes.values()), "one of its ranks")
        given = torch.device(device)
        if given.type == "cuda" and not torch.backends.cuda.is_built():
            raise ValueError(
                f"AbstractMesh: device={device!r}: expected a kind of device that this torch is built for, got CUDA "
                "and a build for CPUs alone. Use a CUDA build, which needs no GPU for this, or leave `device` out"
            )
        self.mesh_dim_names, self.shape, self.device_type = tuple(axes), tuple(axes.values()), given.type
        self.device = torch.device("cpu") if given.type == "cpu" else torch.device(given.type, given.index or 0)
        self._rank = rank

    def size(self, axis: int | None = None) -> int:
        """The number of ranks along a dimension (None: in all)."""
        return math.prod(self.shape) if axis is None else self.shape[axis]

    def get_rank(self) -> int:
        """This rank's number among all."""
        return self._rank

    def get_local_rank(self, axis: str) -> int:
        """This rank's number along an axis."""
        number = self.mesh_dim_names.index(axis)
        return self._rank // math.prod(self.shape[number + 1 :]) % self.shape[number]

    def ranks(self, axis: str) -> _AbstractRanks:
        """The ranks along one axis (what `fshard.comm` asks of a mesh)."""
        return _AbstractRanks(axis, self.get_local_rank(axis), self.shape[self.mesh_dim_names.index(axis)], self.device)


class _AbstractRanks:
    built_in = None
    whole = None

    def __init__(self, axis: str, rank: int, size: int, device: torch.device):
        self.axis, self.rank, self.size, self.device = axis, rank, size, device

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        return like.new_empty(numel)

    def idle(self, x: Tensor) -> bool:
        return True

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: str) -> Any:
        raise RuntimeError(
            f"{call}: an abstract mesh has no ranks. Use fshard.abstract, or jit(...).lower, to look at it"
        )
