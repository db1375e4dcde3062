"""A training script of FSDP2, and the same script with fshard: docs/from_fsdp.md shows both.

    torchrun --nproc-per-node=2 examples/port_fsdp2.py

Both train the same module on the same batches, and print the same losses.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import fshard


class Block(nn.Sequential):
    """A block of the model."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Model(nn.Module):
    """A model with activation checkpointing and with buffers, the same for both scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def with_fsdp2(
    mesh: Any, weights: Any, data: list[Any], compute: torch.dtype, reduce: torch.dtype
) -> tuple[list[float], Any]:
    """Losses, the last one in evaluation mode, and the trained state dict, on rank 0."""
    losses = []
    # a model without memory
    with torch.device("meta"):
        model: Any = Model()
    # sharding by block, mixed precision
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # initial values
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    # values from a state dict
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, weights, options=options)
    # optimizer
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    # loss
    def loss_of(batch: Any) -> Any:
        return mse_loss(model(batch["x"]), batch["y"])

    # steps: two micro-batches, clipping, update
    for batch in data:
        mean = torch.zeros(())
        for i in range(2):
            part = {k: x.chunk(2)[i] for k, x in batch.items()}
            model.set_requires_gradient_sync(i == 1)
            loss = loss_of(part) / 2
            loss.backward()
            mean = mean + loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        losses.append(mean.item() / mesh.size())
    # evaluation
    model.eval()
    with torch.no_grad():
        mean = loss_of(data[0])
    dist.all_reduce(mean)
    losses.append(mean.item() / mesh.size())
    # the state dict, on rank 0
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    return losses, whole


def with_fshard(
    mesh: Any, weights: Any, data: list[Any], compute: torch.dtype, reduce: torch.dtype
) -> tuple[list[float], Any]:
    """The same with fshard."""
    losses = []
    # a model without memory
    with torch.device("meta"):
        model = Model()
    apply, shapes, _ = fshard.module.functionalize(model)
    # sharding by block, mixed precision
    policy = fshard.Policy(compute=compute, reduce=reduce)
    plan = fshard.make_plan(shapes, mesh, policy=policy)
    # initial values
    params = apply.init(plan, seed=0)
    buffers = apply.init_buffers("cpu")
    # values from a state dict
    params, buffers = apply.load_state_dict(params, buffers, weights)
    # optimizer
    tx = fshard.optim.adamw(1e-2)
    state = fshard.init_state(params, tx, extra=buffers)

    # loss
    def loss_of(params: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(params, buffers, batch["x"])
        return mse_loss(out, batch["y"]), buffers

    # steps: two micro-batches, clipping, update
    step = fshard.train_step(loss_of, tx, accumulate=2, clip_norm=1.0, with_extra=True)
    for batch in data:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())

    # evaluation
    def valid_loss(params: Any, buffers: Any, batch: Any) -> Any:
        out, _ = apply.eval(params, buffers, batch["x"])
        return mse_loss(out, batch["y"])

    mean = fshard.evaluate(valid_loss)(state.params, state.extra, data[0])
    losses.append(mean.item())
    # the state dict, on rank 0
    whole = apply.state_dict(state.params, state.extra, rank=0)
    return losses, whole


def batches(rank: int, dtype: torch.dtype) -> list[Any]:
    """The batches of one rank."""
    generator = torch.Generator().manual_seed(rank)
    xs = [torch.randn(8, 8, generator=generator, dtype=dtype) for _ in range(5)]
    return [{"x": x, "y": x.roll(1, 1)} for x in xs]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    weights, data = Model().state_dict(), batches(mesh.get_rank(), torch.float32)
    for train in (with_fsdp2, with_fshard):
        losses, _ = train(mesh, dict(weights), data, torch.bfloat16, torch.float32)
        if mesh.get_rank() == 0:
            print(f"{train.__name__:11s}", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()
