"""Part "several" of `make gpu`: systems on all GPUs and on two, each by torchrun; without a GPU on two gloo ranks.

python benchmarks/gpu_several.py OUT SYSTEM SECONDS      # a rank that torchrun has started
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_cases import CUDA, DEVICE
from gpu_rows import FAKE, FIRST, Rows
from gpu_speed import LARGE, TRACED, Run, Size, _fshard, _torch, add_kernels, add_system, measured, without_kernels
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

HSDP = "HSDP, two copies"
SYSTEMS: dict[str, Callable[[DeviceMesh, Size], Run]] = {
    "fshard": partial(_fshard, reduction="fast"),
    "FSDP2": _torch,
    "fshard, exact": partial(_fshard, reduction="exact"),
    HSDP: partial(_fshard, reduction="fast"),
    "fshard, jit": partial(_fshard, reduction="fast", jit=True),
}
LONGEST = 120  # seconds of a system
WITH_TRACE = ("fshard", HSDP)


def several(rows: Rows, mesh: DeviceMesh) -> None:
    """Measure each system on all GPUs and on two. Ranks have data of their own."""
    count = torch.cuda.device_count() if CUDA and not FAKE else 2
    if count < 2:
        return rows.add("several GPUs", "skipped", "there is one GPU")
    for name in (name for name in SYSTEMS if not (FAKE and name == "FSDP2")):  # operators of DTensors have no values
        for size in dict.fromkeys((count - count % 2, 2)):
            seconds = int(min(LONGEST, rows.left() - 5))
            if seconds < 20:
                rows.add(f"{name} on {size}", "skipped", "left out: no time")
                continue
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            done = subprocess.run([*command, *FIRST, __file__, str(rows.out), name, str(seconds)], check=False)
            if done.returncode:
                rows.add(f"{name} on {size}", "failed", f"torchrun ended with {done.returncode}: gpu.log says why")


def main() -> None:
    """Measure a system on this rank; rank 0 adds the rows."""
    out, name, seconds = sys.argv[1:]
    signal.alarm(int(seconds))  # ends this process also if torchrun is killed, or NCCL hangs
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if FAKE:
        without_kernels()
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (2, size // 2) if name == HSDP else (size,)
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    figures, run = measured(lambda: SYSTEMS[name](mesh, LARGE))
    losses = torch.tensor(figures["losses"], device=DEVICE, dtype=torch.float64)
    dist.all_reduce(losses)  # FSDP2's are a rank's own
    figures["losses"] = (losses / size).tolist()
    if rank == 0:
        rows = Rows("several", Path(out))
        add_system(rows, f"{name} on {size}", figures, [f"fshard on {size}"])
        add_kernels(rows, f"{name} on {size}", run, name in WITH_TRACE)
    else:  # the steps that rank 0 traces
        _ = [run() for _ in range(TRACED)]
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a process that used FSDP2 may abort at its regular end (torch 2.13)


if __name__ == "__main__":
    main()
