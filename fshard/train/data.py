"""Batches for ranks that do not have equally many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Mesh, axis_sizes, mesh_device
from ..core.arguments import wrong


def join_batches(data: Iterable[Any], mesh: Mesh = None, like: Any = None) -> Iterator[tuple[Any, Tensor]]:
    """`(batch, weight)` until every rank's data are used up: one that has run out gets its last batch, with weight 0.

    Multiply total and count of a `Mean` by the weight (0-d, 1 or 0), a further argument of the step: the mean stays
    that of the batches there are, and every rank takes part in every collective. One small collective a batch. `like`
    is a batch for ranks without any (ValueError if one is needed).

    >>> [(batch, weight.item()) for batch, weight in join_batches([1, 2])]
    [(1, 1.0), (2, 1.0)]
    """
    if not isinstance(data, Iterable):
        raise TypeError(f"join_batches: {wrong('data', data, 'batches to go through')}")
    axis_sizes(mesh)
    batches, batch, end = iter(data), like, object()
    while True:
        following = next(batches, end)
        weight = torch.tensor(float(following is not end), dtype=torch.float32, device=mesh_device(mesh))
        batch = batch if following is end else following
        if not bool(primitives.total(weight, mesh, op="max", label="batches")):
            return
        if batch is None:
            raise ValueError("join_batches: this rank has no batch at all: give one as `like`, whose weight will be 0")
        yield batch, weight
