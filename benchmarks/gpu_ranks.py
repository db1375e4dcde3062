"""One rank of part "nccl" of `make gpu`; all ranks share a GPU. `python benchmarks/gpu_ranks.py FOLDER SIZE RANK`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import CUDA, DEVICE, KINDS, same, trained
from gpu_parts import Rows
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard.comm.mesh import Mesh
from fshard.core.tree import Tree
from fshard.testing import World


def main() -> None:
    """Run every kind of step on real ranks; rank 0 compares the results with simulated ranks on the same device."""
    folder, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if CUDA:
        torch.cuda.set_device(DEVICE)
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh(DEVICE.type, (size,), mesh_dim_names=("shard",))
    rows = Rows("nccl", f"{folder}/rows")
    kinds = KINDS if CUDA else {name: KINDS[name] for name in ("full", "donate", "int8")}
    for name, kind in kinds.items():
        got = trained(mesh, **kind)
        if rank == 0:  # the other ranks wait in the barrier

            def job(mesh: DeviceMesh | Mesh, kind: dict[str, Any] = kind) -> Any:
                return trained(mesh, **kind)

            def compared(got: Tree = got, job: Any = job, exact: bool = name != "fast") -> str:
                return same(got, World(size, device=str(DEVICE)).run(job)[0], exact)

            rows.check(name, compared)
        dist.barrier()
    rows.check("check", lambda: fshard.check(trained, mesh)(mesh) and None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
