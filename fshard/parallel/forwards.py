"""Forwards of split submodules: each takes the submodule as `Styled`, then the arguments of its own forward.

Gradients need no code: gradients of whole leaves are summed over the axis (docs/split_leaves.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.collectives import all_gather, all_reduce, all_to_all
from .along import Along, with_attributes


class Styled(NamedTuple):
    """A split submodule, its own forward, its ranks, and its path."""

    part: Any
    forward: Callable[..., Tensor]
    along: Along
    path: str

    def summed(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.along.mesh, self.along.axis, label=self.path)


Forward = Callable[..., Tensor]


def replace_forward(part: nn.Module, around: Callable[..., object]) -> None:
    """Replace a submodule's forward by `around(forward, *args, **kwargs)`."""
    forward = part.forward
    vars(part)["forward"] = functools.wraps(forward)(functools.partial(around, forward))


def without_fast_path(part: nn.Module, where: Callable[[], Along | None]) -> None:
    """Let a split encoder of torch call its layers: in evaluation it would take their weights itself."""
    flag = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}
    for kind, name in flag.items():
        if isinstance(part, kind) and hasattr(part, name):
            replace_forward(part, functools.partial(_with_flag_off, part, name, where))


def _with_flag_off(
    part: nn.Module,
    name: str,
    where: Callable[[], Along | None],
    forward: Callable[..., object],
    *args: object,
    **kwargs: object,
) -> object:
    with with_attributes(part, **{name: False}) if where() else nullcontext():
        return forward(*args, **kwargs)


def summed(at: Styled, *args: object, **kwargs: object) -> Tensor:
    """Sum the outputs of all ranks."""
    return at.summed(at.forward(*args, **kwargs))


def row(at: Styled, x: Tensor) -> Tensor:
    """Sum the products of this rank's columns (..., in / W) -> (..., out), then add the bias once."""
    if at.part.bias is None:
        return at.summed(at.forward(x))
    if type(at.part).forward is not nn.Linear.forward:
        got = type(at.part).__name__
        raise TypeError(f"parallel: {at.path!r} is rowwise: expected torch.nn.Linear or no bias, got {got} with a bias")
    return at.summed(F.linear(x, at.part.weight)) + at.part.bias


def row_of_whole(at: Styled, x: Tensor) -> Tensor:
    """Take this rank's part of the features (..., in), then as `row`."""
    begin, end = at.along.part
    return row(at, x[..., begin:end])


def gathered_features(at: Styled, *args: object) -> Tensor:
    """Join the parts of the output's features: (..., out / W) -> (..., out)."""
    out: Tensor = at.forward(*args)
    padded = F.pad(out, (0, at.along.most - out.shape[-1]))
    return all_gather(padded, at.along.mesh, at.along.axis, at.path, dim=-1)[..., : at.along.size]


def looked_up(at: Styled, ids: Tensor) -> Tensor:
    """Look ids of this rank's rows up, and sum over ranks: (...) -> (..., h)."""
    (begin, end), table = at.along.part, at.part.weight
    if getattr(at.part, "scale_grad_by_freq", False):
        raise TypeError(f"parallel: {at.path!r}: expected scale_grad_by_freq=False: a rank sees no ids of other ranks")
    here = (ids >= begin) & (ids < end)
    if begin == end:  # no rows; a sum of none puts the table into the graph, as on other ranks
        return at.summed(table.new_zeros(*ids.shape, table.shape[1]) + table.sum())
    padding = None if at.part.padding_idx is None else at.part.padding_idx - begin
    with with_attributes(at.part, padding_idx=padding if padding in range(end - begin) else None):
        rows = at.forward(torch.where(here, ids - begin, 0))
    return at.summed(rows * here[..., None])


def once(at: Styled, x: Tensor) -> Tensor:
    """Count an equal input once in a sum over ranks: all ranks but the first take zeros."""
    return at.forward(torch.where(torch.full((), at.along.rank == 0, device=x.device), x, 0))


def experts(at: Styled, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run experts split over ranks: x (n, h), index and weights (n, k) -> (n, h).

    The forward of the experts gets a row for each pair of a token and an expert of this rank. If tokens differ along
    the axis, pairs travel to the ranks of their experts and back.
    """
    pairs, k, weights = index.reshape(-1), index.shape[1], weights.reshape(-1)
    if at.along.differ:
        order = pairs.argsort(stable=True)
        done = _sent_to_experts(at, x[order // k], pairs.bincount(minlength=at.along.ranks * at.along.most))
        done = done * weights[order, None]
        return torch.zeros_like(x).index_add(0, order // k, done.to(x.dtype))
    begin, end = at.along.part
    order = ((pairs >= begin) & (pairs < end)).nonzero()[:, 0]
    done = _run_experts(at, x[order // k], pairs[order] - begin, weights[order])
    return at.summed(torch.zeros_like(x).index_add(0, order // k, done.to(x.dtype)))


def _sent_to_experts(at: Styled, x: Tensor, counts: Tensor) -> Tensor:
    """Send rows to their experts and back: x (m, h) in the order of experts, `counts` rows for each -> (m, h)."""
    mesh, axis, _, ranks, *_ = at.along
    taken = all_to_all(counts, mesh, axis, f"{at.path} counts")
    given, got = (numbers.view(ranks, -1).sum(1).tolist() for numbers in (counts, taken))
    rows = all_to_all(x, mesh, axis, at.path, sizes=(given, got))
    which = torch.arange(at.along.most, device=x.device).repeat(ranks).repeat_interleave(taken)
    return all_to_all(
        _run_experts(at, rows, which, torch.ones_like(rows[:, 0])), mesh, axis, at.path, sizes=(got, given)
    )


def _run_experts(at: Styled, rows: Tensor, which: Tensor, weights: Tensor) -> Tensor:
    """Run this rank's experts, one for each row: rows (m, h), which and weights (m,) -> (m, h)."""
    if len(rows) == 0:  # sums of no rows put all leaves into the graph, as on other ranks
        return rows + sum(x.sum() for x in at.part.parameters())
    begin, end = at.along.part
    with with_attributes(at.part, **{"num_experts": end - begin} if hasattr(at.part, "num_experts") else {}):
        return at.forward(rows, which[:, None], weights[:, None])
