"""A small training job for the scripts of this folder: any launcher starts it, and it goes on from its last checkpoint.

    torchrun --nproc-per-node=2 examples/clusters/train.py --out runs/cluster

Each rank trains on its own rows. Rank 0 prints which hosts take part, and the loss.
"""

import argparse
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fshard

WIDTH = 16


def init(_: str, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape) / like.shape[0] ** 0.5


def loss_fn(params: Any, batch: Any) -> fshard.Mean:
    x = batch["x"]
    for block in params["blocks"]:
        x = x + torch.tanh(x @ block["w"])
    errors = (x - batch["y"]).square()
    return fshard.Mean(errors.sum(), errors.numel())


def batch_of(step: int, rank: int, device: torch.device) -> Any:
    """The rows of a rank in a step: a job that goes on sees the rows that it would have seen."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1_000_003 * step + rank))
    return {"x": x.to(device), "y": x.flip(1).to(device)}


def train(out: str, steps: int) -> None:
    """Train up to a number of steps. `out` is a folder that all hosts share, or a URL as s3://bucket/run."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # Ray has made the process group
        dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=5))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))

    like = {"blocks": [{"w": torch.empty(WIDTH, WIDTH, device="meta")} for _ in range(3)]}
    plan, tx = fshard.make_plan(like, mesh), fshard.optim.adamw(1e-2)
    state = fshard.init_state(fshard.init_params(plan, init), tx)
    if fshard.checkpoint.latest(out, mesh) is not None:
        state = fshard.checkpoint.restore(out, state)
    step_fn = fshard.train_step(loss_fn, tx)

    hosts: list[Any] = [None] * mesh.size()
    dist.all_gather_object(hosts, socket.gethostname())
    first = int(state.step)
    for step in range(first, steps):
        state, metrics = step_fn(state, batch_of(step, mesh.get_rank(), device))
        if step % 10 == 9 or step == steps - 1:
            fshard.checkpoint.save(out, state, step + 1)
    if first < steps and mesh.get_rank() == 0:
        loss = float(metrics["loss"])
        print(f"{mesh.size()} ranks on {sorted(set(hosts))}: steps {first} to {steps}, loss {loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/cluster")  # no Path: it would take a slash from s3://
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    train(args.out, args.steps)
    dist.destroy_process_group()  # not after an error: other ranks may never reach this call, and torchrun stops them


if __name__ == "__main__":
    main()
