"""Meshes: named axes of ranks, this rank's coordinates, and objects made once for a mesh.

Users give a torch `DeviceMesh`, simulated ranks (`fshard.testing`), an `AbstractMesh`, or None for one device.
`adapted` makes a `ProcessMesh` of a DeviceMesh, so every mesh in this package is a `Grid`.

Note [One handle for each mesh]
    All plans on a mesh share objects made once: process groups, the twin (the mesh with shared memory on one host),
    connections of checked calls, streams, and the name in graphs. `MESHES` finds the `ProcessMesh` of a
    DeviceMesh by identity: equal meshes may have different process groups. A `ProcessMesh` does not refer to the
    DeviceMesh, nor shared objects to the `ProcessMesh`: without a cycle, connections close once the DeviceMesh and its
    last plan are deleted, or at once if the mesh is closed (`close`).
"""

from __future__ import annotations

import math
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from itertools import count
from typing import Any, NoReturn, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..core.arguments import check_whole, shown, wrong
from .process_groups import Connections, GroupRanks, Owner
from .ranks import Call, Ranks

T = TypeVar("T")
_ANOTHER = (
    "Make another one of new process groups: DeviceMesh.from_group(dist.new_group(), 'cpu', "
    "mesh_dim_names=('shard',)); or dist.destroy_process_group(), dist.init_process_group and init_device_mesh"
)


def digits(number: int, sizes: Sequence[int]) -> list[int]:
    """Return a rank's coordinates; the first varies slowest. Dual: `number_of`.

    >>> digits(5, [2, 3])
    [1, 2]
    """
    coordinates: list[int] = []
    for size in reversed(sizes):
        number, coordinate = divmod(number, size)
        coordinates.insert(0, coordinate)
    return coordinates


def number_of(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Return a rank's number from coordinates.

    >>> number_of([1, 2], [2, 3])
    5
    """
    number = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        number = number * size + coordinate
    return number


class Mesh(Protocol):
    """A mesh as one of its ranks sees it."""

    mesh_dim_names: tuple[str, ...]
    shape: tuple[int, ...]
    device: torch.device
    device_type: str
    abstract: bool  # no processes

    @property
    def likeness(self) -> tuple[object, ...]:
        """A value equal for a mesh and its twin (`adapted`)."""

    def size(self, axis: str | None = None) -> int:
        """Number of ranks along an axis (None: of the mesh)."""

    def get_rank(self) -> int: ...

    def get_local_rank(self, axis: str | None = None) -> int: ...

    def ranks(self, axis: str) -> Ranks: ...

    def once(self, make: Callable[[Self], T]) -> T: ...


AnyMesh = DeviceMesh | Mesh | None


class Grid:
    """A mesh; `place`: this rank's coordinates."""

    abstract = False
    members: tuple[int, ...] = ()

    def __init__(self, axes: Mapping[str, int], rank: int, place: Sequence[int], device: torch.device):
        self.mesh_dim_names: tuple[str, ...] = tuple(axes)
        self.shape: tuple[int, ...] = tuple(axes.values())
        self.ndim: int = len(axes)
        self.device: torch.device = device
        self.device_type: str = device.type
        self._rank, self._coordinates = rank, tuple(place)
        self._kept: dict[Callable[..., object], Any] = {}

    @property
    def likeness(self) -> tuple[object, ...]:
        return self.device_type, self.mesh_dim_names, self.shape, self.members

    def size(self, axis: str | int | None = None) -> int:
        return math.prod(self.shape) if axis is None else self.shape[self._number(axis)]

    def get_rank(self) -> int:
        return self._rank

    def get_coordinate(self) -> list[int]:
        return [*self._coordinates]

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """Return this rank's number along an axis (None: the only axis, else a ValueError)."""
        if axis is None and self.ndim > 1:
            raise ValueError(f"get_local_rank: name one of the axes {self.mesh_dim_names}")
        return self._coordinates[self._number(axis or 0)]

    def _number(self, axis: str | int) -> int:
        if isinstance(axis, str) and axis not in self.mesh_dim_names:
            raise ValueError(f"the mesh has no axis {axis!r}: it has {', '.join(map(repr, self.mesh_dim_names))}")
        return self.mesh_dim_names.index(axis) if isinstance(axis, str) else axis

    def ranks(self, axis: str) -> Ranks:
        raise NotImplementedError

    def once(self, make: Callable[[Self], T]) -> T:
        """Return `make(self)`, made once; it must not refer to this mesh."""
        if make not in self._kept:
            self._kept[make] = make(self)
        return self._kept[make]

    def close(self, why: str) -> None:
        """End this rank's communication; `why` is what this rank has done."""


class Connected(ABC):
    """An object made once for a mesh, with connections of its own."""

    @abstractmethod
    def close(self, why: str) -> None: ...


class AbstractMesh(Grid):
    """A mesh of any size without processes, to plan and to lower functions, not to run them.

    `axes` are sizes by name, the first axis varies slowest; `rank` is this rank's number, `device` a kind of device.
    ValueError for "cuda" if torch is built for CPUs only.

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
        kind = torch.device(device)
        if kind.type == "cuda" and not torch.backends.cuda.is_built():
            raise ValueError(
                f"AbstractMesh: device={device!r}: expected a kind of device that this torch is built for, got CUDA "
                "and a build for CPUs alone. Use a CUDA build, which needs no GPU for this, or leave `device` out"
            )
        of_rank = torch.device("cpu") if kind.type == "cpu" else torch.device(kind.type, kind.index or 0)
        super().__init__(axes, rank, digits(rank, [*axes.values()]), of_rank)

    def ranks(self, axis: str) -> Ranks:
        """Return ranks whose collectives raise RuntimeError."""
        return _AbstractRanks(axis, self.get_local_rank(axis), self.size(axis), self.device)


class _AbstractRanks:
    built_in = None
    whole = None

    def __init__(self, axis: str, rank: int, size: int, device: torch.device):
        self.axis, self.rank, self.size, self.device = axis, rank, size, device

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        return like.new_empty(numel)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> NoReturn:
        raise RuntimeError(
            f"{call}: an abstract mesh has no ranks. Use fshard.eval_shape, or jit(...).lower, to look at it"
        )


class ProcessMesh(Grid):
    """A mesh over the process groups of a DeviceMesh (Note [One handle for each mesh])."""

    def __init__(self, mesh: DeviceMesh):
        names, device = mesh.mesh_dim_names or (), numbered(mesh.device_type)
        axes = {name: mesh.size(i) for i, name in enumerate(names)}
        super().__init__(axes, mesh.get_rank(), mesh.get_coordinate() or (), device)
        self.members: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self._groups = [weakref.ref(mesh.get_group(axis)) for axis in names]
        self.connections = Connections({axis: mesh.get_group(axis) for axis in names})
        self._ranks: dict[str, Ranks] = {
            axis: GroupRanks(axis, group, device, connections=self.connections)
            for axis, group in self.connections.items()
        }
        self.twin: ProcessMesh | None = None  # with shared memory, once a plan has connected the ranks
        self.owners: dict[str, Owner] = {axis: MESHES.owner(mesh.get_group(axis)) for axis in names}
        MESHES.connected.add(self)

    def is_of(self, mesh: DeviceMesh) -> bool:
        return all(
            group() is mesh.get_group(axis) for group, axis in zip(self._groups, self.mesh_dim_names, strict=True)
        )

    def ranks(self, axis: str) -> Ranks:
        """RuntimeError in a second thread (Note [One thread] in `process_groups.py`)."""
        self.owners[axis].check(axis)
        return self._ranks[axis]

    def close(self, why: str) -> None:
        """Hang up (Note [Hanging up]), also meshes with the same groups. RuntimeError in a second thread or a fork."""
        for axis, owner in self.owners.items():
            if not owner.closed:
                owner.check(axis)
        for mesh in MESHES.sharing(self):
            mesh._end(why)

    def _end(self, why: str) -> None:
        text = f"this rank {why}. {_ANOTHER}"
        for owner in self.owners.values():
            owner.close(text)
        for kept in self._kept.values():
            if isinstance(kept, Connected):
                kept.close(why)
        self.connections.close(text)
        self._ranks.clear()


class Meshes:
    """Live meshes by identity of the DeviceMesh (ranks of a world may have equal ones), and by name in graphs."""

    def __init__(self) -> None:
        self._handles: MutableMapping[DeviceMesh, ProcessMesh] = WeakIdKeyDictionary()
        self._owners: MutableMapping[dist.ProcessGroup, Owner] = WeakIdKeyDictionary()
        self._parents: dist.ProcessGroup | None = None  # in a forked process, the parent's world group
        self._names: MutableMapping[Mesh, str] = WeakIdKeyDictionary()
        self._meshes: weakref.WeakValueDictionary[str, Mesh] = weakref.WeakValueDictionary()
        self.connected: weakref.WeakSet[ProcessMesh] = weakref.WeakSet()
        self._numbers = count()  # never reused: a deleted mesh's graph finds no other mesh

    def handle(self, mesh: DeviceMesh) -> ProcessMesh:
        handle = self._handles.get(mesh)
        if handle is None or not handle.is_of(mesh):
            self._handles[mesh] = handle = ProcessMesh(mesh)
        return handle

    def last_handle(self, mesh: DeviceMesh) -> ProcessMesh | None:
        """Return the last handle, even of destroyed groups."""
        return self._handles.get(mesh)

    def sharing(self, mesh: ProcessMesh) -> list[ProcessMesh]:
        """Return `mesh`, and the meshes with a process group of `mesh`, or of one of the others."""
        alike, others = [mesh], [*self.connected]
        for each in alike:  # grows
            alike += [x for x in others if x not in alike and {*x.owners.values()} & {*each.owners.values()}]
        return alike

    def owner(self, group: dist.ProcessGroup) -> Owner:
        if group not in self._owners:
            self._owners[group] = Owner(self._parents is not None and dist.group.WORLD is self._parents)
        return self._owners[group]

    def inherit(self) -> None:
        """Refuse all meshes of the parent process."""
        self._parents = dist.group.WORLD if dist.is_initialized() else None
        for owner in self._owners.values():
            owner.inherit()

    def device_mesh(self, grid: Mesh) -> DeviceMesh | None:
        """Return a DeviceMesh of the same process groups, or None."""
        if not isinstance(grid, ProcessMesh):
            return None
        alike = [mesh for mesh, handle in self._handles.items() if handle.likeness == grid.likeness]
        return next((mesh for mesh in alike if grid.is_of(mesh)), None)

    def of(self, mesh: DeviceMesh | Mesh) -> str:
        grid = present(mesh)
        if grid not in self._names:
            self._names[grid] = name = f"mesh{next(self._numbers)}"
            self._meshes[name] = grid
        return self._names[grid]

    def find(self, name: str) -> Mesh:
        mesh = self._meshes.get(name)
        if mesh is None:
            raise RuntimeError(f"a compiled function was called after its mesh {name!r} was deleted: keep the plan")
        return mesh


MESHES = Meshes()
if hasattr(os, "register_at_fork"):  # cheaper than `os.getpid` at each collective
    os.register_at_fork(after_in_child=MESHES.inherit)
Axes = tuple[str, ...]


def is_mesh(x: object) -> bool:
    if isinstance(x, DeviceMesh | Grid):
        return True
    try:  # an object's `__getattr__` may answer every name, or raise anything
        answers = [getattr(x, name) for name in ("mesh_dim_names", "ranks", "once")]
    except Exception:
        return False
    return isinstance(answers[0], tuple) and all(map(callable, answers[1:]))


def adapted(mesh: AnyMesh) -> Mesh | None:
    """Return a DeviceMesh as `ProcessMesh`, other meshes and None as they are.

    If a plan has connected a DeviceMesh's ranks by shared memory, return the connected mesh, its twin.
    TypeError if `mesh` is no mesh; ValueError for a DeviceMesh without axis names, or without this rank.
    """
    grid = unconnected(mesh)
    return grid if grid is mesh else getattr(grid, "twin", None) or grid


def unconnected(mesh: AnyMesh) -> Mesh | None:
    """Return the mesh over process groups, not its twin."""
    if not isinstance(mesh, DeviceMesh):
        if mesh is None or is_mesh(mesh):
            return mesh
        raise TypeError(
            f"mesh: expected a DeviceMesh with named axes, a simulated mesh, or None (one device), got {shown(mesh)}. "
            "Make one: init_device_mesh('cuda', (8,), mesh_dim_names=('shard',)); of a process group: "
            "DeviceMesh.from_group(group, 'cuda', mesh_dim_names=('shard',))"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank is none of its ranks: make plans and call collectives on those alone")
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "the mesh has no axis names: give init_device_mesh mesh_dim_names=('shard',) or ('replicate', 'shard')"
        )
    return MESHES.handle(mesh)


def to_close(mesh: AnyMesh) -> Mesh | None:
    try:
        return unconnected(mesh)
    except (RuntimeError, ValueError) as failure:
        if not isinstance(mesh, DeviceMesh) or (isinstance(failure, ValueError) and dist.is_initialized()):
            raise
        return MESHES.last_handle(mesh)  # torch finds no group once groups are destroyed


def present(mesh: AnyMesh) -> Mesh:
    grid = adapted(mesh)
    if grid is None:
        raise ValueError("expected a mesh, got None (one device)")
    return grid


def axis_sizes(mesh: AnyMesh) -> dict[str, int]:
    """Return the number of ranks by axis, outermost first; {} for None."""
    grid = adapted(mesh)
    return {} if grid is None else {name: grid.size(name) for name in grid.mesh_dim_names}


def coordinate(mesh: AnyMesh, axes: Sequence[str]) -> int:
    """Return this rank's number along axes, the first varying slowest."""
    if not axes:
        return 0
    grid = present(mesh)
    return number_of([grid.get_local_rank(axis) for axis in axes], [grid.size(axis) for axis in axes])


def rank_in(mesh: AnyMesh) -> int:
    """Return this rank's number in a mesh (0 for None), not its global rank.

    >>> rank_in(AbstractMesh(shard=4, rank=3))
    3
    """
    return coordinate(mesh, tuple(axis_sizes(mesh)))


def rank_and_size(mesh: AnyMesh = None, axis: str | Sequence[str] | None = None) -> tuple[int, int]:
    """Return this rank's number and the number of ranks, in `mesh` or along `axis`; (0, 1) for one device.

    `axis` is a name, or a list or tuple of names, the first varying slowest. ValueError for an axis that the mesh
    lacks; TypeError for a set.

    >>> rank_and_size(None), rank_and_size(AbstractMesh(replicate=2, shard=4, rank=5))
    ((0, 1), (5, 8))
    >>> rank_and_size(AbstractMesh(replicate=2, shard=4, rank=5), "shard")
    (1, 4)
    """
    axes = tuple(axis_sizes(mesh)) if axis is None else (axis,) if isinstance(axis, str) else axis
    is_names = isinstance(axes, list | tuple) and all(isinstance(name, str) for name in axes)
    if not is_names or len({*axes}) < len(axes):
        raise TypeError(f"rank_and_size: {wrong('axis', axis, 'the name of an axis, or a tuple of different ones')}")
    if adapted(mesh) is None:
        return 0, 1
    return coordinate(mesh, axes), num_ranks(mesh, axes)


def process_rank() -> str:
    """Return "rank of size"; "" without a process group."""
    return f"{dist.get_rank()} of {dist.get_world_size()}" if dist.is_available() and dist.is_initialized() else ""


def mesh_device(mesh: AnyMesh) -> torch.device:
    """Return the mesh's device; without a mesh, torch's default device (for meta, the CPU)."""
    if (grid := adapted(mesh)) is not None:
        return grid.device
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def numbered(name: str) -> torch.device:
    """Return the device of a name; "cuda" gets the current index.

    >>> numbered("cpu"), numbered("cuda:1")
    (device(type='cpu'), device(type='cuda', index=1))
    """
    device = torch.device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if ":" in name:
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def num_ranks(mesh: AnyMesh, axes: Sequence[str] | None = None) -> int:
    sizes = axis_sizes(mesh)
    return math.prod([sizes[axis] for axis in (sizes if axes is None else axes)])


class OnMesh(ABC):
    """A tree node with tensors on a mesh."""

    @property
    @abstractmethod
    def home(self) -> Any:  # a Plan or a Layout: their modules import this folder
        ...
