"""Forwards of split submodules: each takes the submodule, its own forward, its ranks, and its path, then arguments.

Gradients need no code: gradients of whole leaves are summed over the axis (docs/split_leaves.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.collectives import all_gather, all_reduce, all_to_all
from .along import Along, assigned

Forward = Callable[..., Any]


def summed(part: nn.Module, forward: Forward, along: Along, path: str, *args: object, **kwargs: object) -> Tensor:
    """Sum the outputs of all ranks."""
    return all_reduce(forward(*args, **kwargs), along.mesh, along.axis, label=path)


def row(part: nn.Linear, forward: Forward, along: Along, path: str, x: Tensor) -> Tensor:
    """Sum the products of this rank's columns (..., in / W) -> (..., out), then add the bias once."""
    bias: Tensor | None = part.bias
    if bias is None:
        return summed(part, forward, along, path, x)
    if type(part).forward is not nn.Linear.forward:
        raise TypeError(f"{path}: rowwise: expected torch.nn.Linear or no bias, got a {type(part).__name__} with one")
    return all_reduce(F.linear(x, part.weight), along.mesh, along.axis, label=path) + bias


def row_of_whole(part: nn.Linear, forward: Forward, along: Along, path: str, x: Tensor) -> Tensor:
    """Take this rank's part of the features (..., in), then as `row`."""
    begin, end = along.part
    return row(part, forward, along, path, x[..., begin:end])


def gathered(part: nn.Module, forward: Forward, along: Along, path: str, *args: object) -> Tensor:
    """Join the parts of the output's features: (..., out / W) -> (..., out)."""
    out = forward(*args)
    padded = F.pad(out, (0, along.most - out.shape[-1]))
    return all_gather(padded, along.mesh, along.axis, path, dim=-1)[..., : along.size]


def looked_up(part: nn.Embedding, forward: Forward, along: Along, path: str, ids: Tensor) -> Tensor:
    """Look ids of this rank's rows up, and sum over ranks: (...) -> (..., h)."""
    begin, end = along.part
    here = (ids >= begin) & (ids < end)
    if begin == end:  # no rows; the sum of none puts the table into the graph, as on other ranks
        rows = part.weight.new_zeros(*ids.shape, part.weight.shape[1]) + part.weight.sum()
    else:
        padding = None if part.padding_idx is None else part.padding_idx - begin
        with assigned(part, padding_idx=padding if padding in range(end - begin) else None):
            rows = forward(torch.where(here, ids - begin, 0))
    return all_reduce(rows * here[..., None], along.mesh, along.axis, label=path)


def once(part: nn.Module, forward: Forward, along: Along, path: str, x: Tensor) -> Tensor:
    """In a sum over ranks, let an input that all ranks have count once: on other ranks it becomes zeros."""
    return forward(torch.where(torch.full((), along.rank == 0, device=x.device), x, 0))


def experts(
    part: nn.Module, forward: Forward, along: Along, path: str, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Experts of which each rank has some: x (n, h), index and weights (n, k) -> (n, h).

    `forward` gets one row for each pair of a token and an expert of this rank. If tokens differ along the axis, pairs
    travel to the ranks of their experts and back.
    """
    run = _sent if along.differ else _own
    return run(part, forward, along, path, x, index, weights)


def _own(
    part: nn.Module, forward: Forward, along: Along, path: str, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    (begin, end), pairs = along.part, index.reshape(-1)
    mine = ((pairs >= begin) & (pairs < end)).nonzero()[:, 0]
    token = mine // index.shape[1]
    done = _run(part, forward, along, x[token], pairs[mine] - begin, weights.reshape(-1)[mine])
    total = torch.zeros_like(x).index_add(0, token, done.to(x.dtype))
    return all_reduce(total, along.mesh, along.axis, label=path)


def _sent(
    part: nn.Module, forward: Forward, along: Along, path: str, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    pairs, (mesh, axis) = index.reshape(-1), along[:2]
    order, counts = pairs.argsort(stable=True), pairs.bincount(minlength=along.ranks * along.most)
    token = order // index.shape[1]
    taken = all_to_all(counts, mesh, axis, f"{path} counts")
    given, got = (x.view(along.ranks, -1).sum(1).tolist() for x in (counts, taken))
    rows = all_to_all(x[token], mesh, axis, path, sizes=(given, got))
    which = torch.arange(along.most, device=x.device).repeat(along.ranks).repeat_interleave(taken)
    done = _run(part, forward, along, rows, which, torch.ones_like(rows[:, 0]))
    back = all_to_all(done, mesh, axis, path, sizes=(got, given))
    weighted = back * weights.reshape(-1)[order, None]
    return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def _run(part: nn.Module, forward: Forward, along: Along, rows: Tensor, which: Tensor, weights: Tensor) -> Tensor:
    """Run this rank's experts, each row by one: rows (m, h), which and weights (m,) -> (m, h)."""
    if len(rows) == 0:  # sums of no rows put all leaves into the graph, as on other ranks
        return rows + sum(x.sum() for x in part.parameters())
    begin, end = along.part
    with assigned(part, **{"num_experts": end - begin} if hasattr(part, "num_experts") else {}):
        return forward(rows, which[:, None], weights[:, None])
