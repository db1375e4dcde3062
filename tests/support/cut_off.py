"""A rank on one of two hosts that trains and saves until it loses its peer. Run by `test_elastic.py`."""

import itertools
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fshard
from fshard import checkpoint


def main(rank: int, address: str, folder: str) -> None:
    """Print "training" after the first save, and the beginning of the error."""
    where, seconds = f"tcp://{address}:29512", timedelta(seconds=3)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=seconds)
    ranks = torch.arange(2).view(2, 1)  # init_device_mesh would make groups that wait for half an hour
    by_axis = ranks.T.tolist(), ranks.tolist()
    groups = [dist.new_subgroups_by_enumeration(rows, timeout=seconds)[0] for rows in by_axis]
    mesh = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard"))
    params, tx = {"w": torch.ones(4, 2)}, fshard.optim.adamw(1e-2)
    plan = fshard.make_plan(params, mesh, params_over="shard", grads_over="shard", state_over="shard")
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(lambda p, x: fshard.Mean((x @ p["w"]).square().sum(), len(x)), tx)
    try:
        for number in itertools.count(1):
            state, _ = step(state, torch.ones(3, 4))
            checkpoint.save(folder, state, number, wait=False, keep_last=1)
            if number == 3:
                print("training", flush=True)
    except fshard.MismatchError as failure:
        print(str(failure).partition(", in ")[0])
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
