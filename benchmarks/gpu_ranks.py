"""One rank of part "nccl" of `make gpu`; all ranks share a GPU.

python benchmarks/gpu_ranks.py FOLDER OUT NAME SIZE RANK      # ranks meet in FOLDER, rows begin with NAME
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import CUDA, DEVICE, KINDS, same, trained
from gpu_rows import Rows
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard.comm.mesh import Mesh
from fshard.core.tree import Tree
from fshard.testing import World


def main() -> None:
    """Run every kind of step on real ranks; rank 0 compares the results with simulated ranks on the same device."""
    folder, out, name, (size, rank) = *sys.argv[1:4], map(int, sys.argv[4:])
    if CUDA:
        torch.cuda.set_device(DEVICE)
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh(DEVICE.type, (size,), mesh_dim_names=("shard",))
    rows = Rows("nccl", Path(out))
    for case, kind in KINDS.items() if CUDA else ((case, KINDS[case]) for case in ("full", "donate", "int8")):
        got = trained(mesh, **kind)
        if rank == 0:  # the other ranks wait in the barrier

            def job(mesh: DeviceMesh | Mesh, kind: dict[str, Any] = kind) -> Any:
                return trained(mesh, **kind)

            def compared(got: Tree = got, job: Any = job, exact: bool = case != "fast") -> str:
                return same(got, World(size, device=str(DEVICE)).run(job)[0], exact)

            rows.check(f"{name}, {case}", compared)
        dist.barrier()
    rows.check(f"{name}, checked by rank {rank}", lambda: fshard.check(trained, mesh)(mesh) and None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
