"""Meshes: named axes of ranks, and this rank's place on them.

A mesh is a torch `DeviceMesh`, simulated ranks (`fshard.testing`), an `AbstractMesh` without processes, or None for one
device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..core.arguments import check_whole, shown, wrong


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
            f"{call}: an abstract mesh has no ranks. Use fshard.eval_shape, or jit(...).lower, to look at it"
        )


Mesh = Any  # a DeviceMesh, a simulated mesh, or None: one device
Axes = tuple[str, ...]


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """The axes of a mesh, outermost first; none for one device."""
    if mesh is None:
        return {}
    if not hasattr(mesh, "mesh_dim_names"):
        raise TypeError(
            f"mesh: expected a DeviceMesh with named axes, a simulated mesh, or None (one device), got {shown(mesh)}. "
            "Make one: init_device_mesh('cuda', (8,), mesh_dim_names=('shard',)); of a process group: "
            "DeviceMesh.from_group(group, 'cuda', mesh_dim_names=('shard',))"
        )
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank is none of its ranks: make plans and call collectives on those alone")
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            "the mesh has no axis names: give init_device_mesh mesh_dim_names=('shard',) or ('replicate', 'shard')"
        )
    return {name: mesh.size(i) for i, name in enumerate(names)}


def coordinate(mesh: Mesh, axes: Sequence[str]) -> int:
    """This rank's number along several axes, the first of them the slowest."""
    sizes, index = axis_sizes(mesh), 0
    for axis in axes:
        index = index * sizes[axis] + mesh.get_local_rank(axis)
    return index


def mesh_device(mesh: Mesh) -> torch.device:
    """The device this rank's tensors live on."""
    return mesh.device if hasattr(mesh, "device") else numbered("cpu" if mesh is None else mesh.device_type)


def numbered(name: str) -> torch.device:
    """A device by name, with its number where its kind has several: the current one's, unless the name says which.

    >>> numbered("cpu"), numbered("cuda:1")
    (device(type='cpu'), device(type='cuda', index=1))
    """
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if ":" in name:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def num_ranks(mesh: Mesh, axes: Sequence[str] | None = None) -> int:
    """The number of ranks along some axes (None: all of them)."""
    sizes = axis_sizes(mesh)
    return math.prod([sizes[axis] for axis in (sizes if axes is None else axes)])


class OnMesh(ABC):
    """A node of a tree that lies on a mesh."""

    @property
    @abstractmethod
    def home(self) -> Any:
        """The plan or layout it is laid out by, which has the mesh; None if there is none."""
