"""Batches: cut into micro-batches along dim 0, and made as many on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, axis_sizes, mesh_device
from ..core import tree
from ..core.arguments import wrong
from ..core.tree import Tree
from ..sharding.sharded import Sharded

T = TypeVar("T")


def join_batches(data: Iterable[T], mesh: AnyMesh = None, like: T | None = None) -> Iterator[tuple[T, Tensor]]:
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
    batches, batch = iter(data), like
    while True:
        has_more = True
        try:
            batch = next(batches)
        except StopIteration:
            has_more = False
        weight = torch.tensor(float(has_more), dtype=torch.float32, device=mesh_device(mesh))
        # every rank stops at the same step: a rank that went on alone would wait for the others forever
        if not bool(primitives.total(weight, mesh, op="max", label="batches")):
            return
        if batch is None:
            raise ValueError("join_batches: this rank has no batch at all: give one as `like`, whose weight will be 0")
        yield batch, weight


def cut(batch: Tree, num: int, rank: int) -> list[Tree]:
    """The batch as `num` micro-batches, views along dim 0. ValueError if it has fewer rows than that."""
    rows = num_rows(batch, num)
    leaves, spec = tree.flatten(batch)
    if rows < num and (leaves or num > 1):
        raise ValueError(
            f"batch leaf {next(iter(tree.paths(spec)), '')!r}: expected at least {num} row(s) along dim 0, one a "
            f"micro-batch, got {rows} on rank {rank}. Every rank needs data: give this one a row whose weight in "
            "fshard.Mean's count is 0."
        )
    if num == 1:
        return [batch]
    parts = [leaf.tensor_split(num) for leaf in leaves]
    return [tree.unflatten(spec, [part[number] for part in parts]) for number in range(num)]


def num_rows(batch: Tree, num: int = 1) -> int:
    """The number of rows that every leaf of a batch has in dim 0; 0 without leaves. ValueError names another leaf.

    A batch of 0-d tensors alone counts as one row if it is to be cut into one (`num`) micro-batch.
    """
    leaves = tree.tops(batch, Sharded)
    if leaves and num == 1 and all(isinstance(x, Tensor) and not x.dim() for x in leaves):
        return 1
    rows = [len(x) if isinstance(x, Tensor) and x.dim() else None for x in leaves]
    if rows and (None in rows or len(set(rows)) > 1):
        raise ValueError(_wrong_leaf([path for path, _ in tree.paths_to(batch, Sharded)], leaves, rows))
    return rows[0] or 0 if rows else 0


def _wrong_leaf(paths: Sequence[str], leaves: Sequence[object], rows: Sequence[int | None]) -> str:
    """The error for the first leaf whose rows are not those of the first leaf that has any."""
    first = next((i for i, n in enumerate(rows) if n is not None), None)
    wrong = next(i for i, n in enumerate(rows) if n is None or n != rows[first or 0])
    leaf = leaves[wrong]
    expected = "the batch's rows along dim 0" if first is None else f"{rows[first]} rows along dim 0"
    like = "" if first in (None, wrong) else f", as leaf {paths[first or 0]!r} has"
    got = f"{rows[wrong]}" if rows[wrong] is not None else "a 0-d tensor"
    got = got if isinstance(leaf, Tensor) else f"{type(leaf).__name__}, which is no tensor"
    return (
        f"batch leaf {paths[wrong]!r}: expected {expected}{like}, got {got}. Data are tensors (torch.as_tensor) with "
        "all of the batch's rows; what has none goes to the loss uncut, as one of the args: step(state, batch, *args)."
    )
