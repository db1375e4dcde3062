"""FSDP as a parametrization: a parameter is a sharded DTensor, and reading it gathers it. The idea of SimpleFSDP."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization


class Gathered(nn.Module):
    """A shard as the whole tensor; the backward sums the gradients of all ranks, and returns the shard's."""

    def forward(self, shard: DTensor) -> Tensor:
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class SimpleFSDP(nn.Module):
    """A module whose parameters are gathered one by one when they are read. Its forward returns the rank's loss.

    Each parameter is cut along its first dimension. What the backward needs stays gathered. Gradients are those of
    the mean of the ranks' losses.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh):
        super().__init__()
        shards = {p: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in module.parameters()}
        for part in list(module.modules()):
            for name, parameter in list(part.named_parameters(recurse=False)):
                setattr(part, name, shards[parameter])  # a tied parameter is one shard
                register_parametrization(part, name, Gathered(), unsafe=True)
        self.module = module

    def forward(self, batch: object) -> Tensor:
        return self.module(batch) / dist.get_world_size()
