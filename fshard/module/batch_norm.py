"""Batch norms with mean and variance over the batches of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..comm.collectives import all_gather
from ..comm.mesh import AnyMesh, axis_sizes, num_ranks
from ..core.tracing import Args, Kwargs, Operator
from .current import Calls

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def synchronise(part: nn.Module, path: str, calls: Calls) -> None:
    """Let a copy's batch norm take statistics over all ranks of the call's mesh."""
    # SyncBatchNorm.forward would call torch.distributed's process groups
    forward = super(nn.SyncBatchNorm, part).forward if isinstance(part, nn.SyncBatchNorm) else part.forward

    @functools.wraps(forward)
    def over_ranks(*args: Any, **kwargs: Any) -> object:
        mesh = calls.current().params.mesh
        if num_ranks(mesh) == 1:
            return forward(*args, **kwargs)
        with _Replaced(mesh, f"statistics of {path}"):
            return forward(*args, **kwargs)

    vars(part)["forward"] = over_ranks


def average(part: Any) -> None:
    """In a graph, average statistics without momentum: torch's code would read a tensor's value."""
    forward = part.forward

    @functools.wraps(forward)
    def averaged(*args: object, **kwargs: object) -> object:
        old = [part.running_mean.clone(), part.running_var.clone()]
        out = forward(*args, **kwargs)
        share = 1 / part.num_batches_tracked
        for running, before in zip((part.running_mean, part.running_var), old, strict=True):
            running.mul_(share).add_(before * (1 - share))
        return out

    if part.momentum is None and part.training and part.track_running_stats:
        part.momentum, part.forward = 1.0, averaged  # 1.0: this batch's statistics


class _Replaced(TorchFunctionMode):
    def __init__(self, mesh: AnyMesh, label: str):
        super().__init__()
        self._mesh, self._label = mesh, label

    def __torch_function__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return _batch_norm(self._mesh, self._label, *args, **(kwargs or {}))


def _batch_norm(
    mesh: AnyMesh,
    label: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm`, (N, C, ...) -> (N, C, ...), over all ranks."""
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    count, mean, squares = _channel_statistics(x, mesh, label)
    with torch.no_grad():
        unbiased = squares / (count - 1).clamp(min=1)
        for running, value in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)
    shape = (1, -1, *[1] * (x.dim() - 2))
    scale = (squares / count + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    out = (x - mean.view(shape)) * scale.view(shape)
    return (out if bias is None else out + bias.view(shape)).to(input.dtype)


def _channel_statistics(x: Tensor, mesh: AnyMesh, label: str) -> tuple[Tensor, Tensor, Tensor]:
    """Count per channel (1,), mean (C,), and sum of squares around the mean (C,), over ranks' batches of any sizes.

    Ranks gather means, too: a sum of squares loses the variance if a mean is large (Chan, Golub and LeVeque, 1979).
    """
    dims = [0, *range(2, x.dim())]
    local_count = x.numel() // max(1, x.shape[1])
    local_mean = x.sum(dims) / max(1, local_count)
    around = x - local_mean.view(1, -1, *[1] * (x.dim() - 2))
    row = torch.cat([x.new_full((1,), local_count), local_mean, around.square().sum(dims)])[None]  # (1, 1 + 2 C)
    for axis in axis_sizes(mesh):
        row = all_gather(row, mesh, axis, label)  # (W, 1 + 2 C)
    counts, means, squares = row[:, :1], *row[:, 1:].chunk(2, 1)  # (W, 1), (W, C), (W, C)
    count = counts.sum(0)  # (1,)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return count, mean, (squares + counts * (means - mean).square()).sum(0)
