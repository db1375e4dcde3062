"""A step on the ranks of torchrun, and the same step on one device. `fshard doctor` runs it on two processes."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard


def stepped(mesh: DeviceMesh | None, rows: torch.Tensor) -> torch.Tensor:
    """Return whole parameters after a step on a rank's rows."""
    params = {"blocks": [{"w": torch.linspace(-1, 1, 64, device="cpu").view(8, 8) * n} for n in (1, 2)]}
    tx = fshard.optim.adamw(0.1)

    def loss_fn(params: Any, x: torch.Tensor) -> fshard.Mean:
        for block in params["blocks"]:
            x = torch.tanh(x @ block["w"])
        return fshard.Mean(x.square().sum(), x.numel())

    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"])), tx)
    state, _ = fshard.train_step(loss_fn, tx, reduction="tree")(state, rows)
    whole: Any = fshard.gather_params(state.params)
    return torch.stack([block["w"] for block in whole["blocks"]])


def main() -> None:
    """Exit with an error's text if ranks and one device compute different bits."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    rows = torch.linspace(0, 1, 8 * 8 * size, device="cpu").view(-1, 8)
    sharded, whole = stepped(mesh, rows[8 * rank : 8 * rank + 8]), stepped(None, rows)
    dist.destroy_process_group()
    if not torch.equal(sharded, whole):
        sys.exit(f"rank {rank} of {size} differs from one device by up to {float((sharded - whole).abs().max())}")


if __name__ == "__main__":
    main()
