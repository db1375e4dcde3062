"""torch's own sharded tensors: DTensors and ShardedTensors made whole, and DTensors made of whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..comm import primitives
from ..comm.mesh import MESHES, AnyMesh, Axes, adapted, axis_sizes, mesh_device
from ..core.storage import as_bytes, from_bytes


def is_sharded(x: object) -> bool:
    """True for a DTensor, or FSDP1's ShardedTensor, without a DeviceMesh."""
    return _is_dtensor(x) or hasattr(x, "local_shards")


def _is_dtensor(x: object) -> bool:
    return hasattr(x, "full_tensor")


def sharding(x: Any) -> str:
    """Describe a DTensor or ShardedTensor by the same text on every rank."""
    if _is_dtensor(x):
        return f"a DTensor {x.dtype} {list(x.shape)} {x.placements} over {list(x.device_mesh.mesh.shape)} ranks"
    return f"a ShardedTensor {x.dtype} {list(x.size())}"


def whole_tensor(x: Any, mesh: AnyMesh, label: str) -> Tensor:
    """Return the whole tensor, detached; for a DTensor or ShardedTensor, every rank must call this."""
    if _is_dtensor(x):
        # to the mesh's device: the mesh's process group may not send host memory
        return x.detach().to(x.device_mesh.device_type).full_tensor()
    if not is_sharded(x):
        return x.detach()
    full, offsets = torch.zeros(tuple(x.size()), dtype=x.dtype, device=mesh_device(mesh)), list[list[int]]()
    for shard in x.local_shards():
        begins, sizes = [*shard.metadata.shard_offsets], shard.metadata.shard_sizes
        offsets.append(begins)
        box = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
        full[box] = shard.tensor.detach()
    is_here = [[*shard.shard_offsets] in offsets for shard in x.metadata().shards_metadata]
    flags = torch.tensor(is_here, dtype=torch.uint8, device=full.device)  # (number of shards,)
    count = int(primitives.total(flags, mesh, op="max", label=label).sum())
    if count < len(is_here):
        raise ValueError(
            f"{label}: {sharding(x)}: expected a plan on a mesh of all ranks that have a part of it, its mesh has "
            f"{count} of {len(is_here)} parts"
        )
    # `full` has zeros for other ranks' shards, and replicas are equal: a maximum of bytes joins all, and keeps NaN
    return from_bytes(primitives.total(as_bytes(full), mesh, op="max", label=label), x.dtype).view(full.shape)


def device_mesh(mesh: AnyMesh, name: str) -> DeviceMesh:
    grid = adapted(mesh)
    original = None if grid is None else MESHES.device_mesh(grid)
    if original is not None:
        return original
    kind = "no mesh" if grid is None else "an abstract mesh" if grid.abstract else f"a {type(grid).__name__}"
    raise ValueError(
        f"{name}: expected a plan on a DeviceMesh that is still there, because DTensors refer to it, got {kind}. "
        "Without dtensors=True the tensors are whole; this rank's pieces are x.local_views()"
    )


def check_no_rank(name: str, rank: int | None) -> None:
    if rank is not None:
        raise ValueError(f"{name}: rank={rank}: expected None with dtensors=True: every rank has its chunks")


def dtensor_of(x: Tensor, on: DeviceMesh, axes: Axes) -> Tensor:
    """Return a DTensor of a whole tensor: `Shard(0)` along `axes`, in chunks of `torch.chunk`, else `Replicate`.

    A 0-d tensor is replicated. This rank's chunk is a copy; nothing is sent.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard  # here: the import takes long

    placements, local, coordinates = list[Placement](), x, on.get_coordinate() or ()
    for (axis, size), coordinate in zip(axis_sizes(on).items(), coordinates, strict=True):
        is_cut = axis in axes and x.dim() > 0
        placements.append(Shard(0) if is_cut else Replicate())
        if is_cut:
            chunks = local.chunk(size)
            local = chunks[coordinate] if coordinate < len(chunks) else local[:0]
    shape, stride = x.shape, x.contiguous().stride()
    return DTensor.from_local(local.clone(), on, placements, run_check=False, shape=shape, stride=stride)
