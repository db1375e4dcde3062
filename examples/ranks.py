"""Where an example runs: on the processes that torchrun started, or on simulated ranks in this process.

python examples/classifier.py                           # two simulated ranks
torchrun --nproc-per-node=2 examples/classifier.py      # two processes: NCCL if each has a GPU, otherwise gloo
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fshard


def on_ranks(main: Callable[[Any], object], shard: int = 2, timeout: float = 300, default_device: bool = False) -> None:
    """Run `main(mesh)` on every rank; without torchrun on so many simulated ranks.

    Processes wait so many seconds for one that does not answer. With `default_device` new tensors are on the GPU, if
    there is one.
    """
    torch.set_num_threads(1)  # of each rank, as torchrun does: the number changes the order of sums inside an operator
    if "WORLD_SIZE" not in os.environ:
        fshard.testing.simulate(main, shard=shard)
        return
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda" if default_device else None)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=timeout))
    main(init_device_mesh("cuda" if gpus else "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
    dist.destroy_process_group()
