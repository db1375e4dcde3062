"""Who adds gradients up, and their sum over several axes of a mesh; who gathers parameters.

Note [The same bits on any number of ranks]
    A sum of floating-point numbers depends on the order. In a balanced binary tree over 2^s slices of a batch, what 2^r
    ranks of 2^(s - r) slices each add up alone is a subtree, so the ranks' sums, added in a tree over ranks, give the
    bits of the whole tree, whatever r is. Ranks are numbered over all axes, the last of them the fastest, so sums are
    taken along that one first. They travel in the dtype they are taken in: what is rounded in between depends on r.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from . import primitives
from .mesh import AnyMesh, Axes, axis_sizes
from .ranks import Pending, Ranks


class Reduction(Protocol):
    """Who adds gradients up. `out` may be of a wider dtype than `x`; the result is written there, or new without it."""

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(W n) on each rank -> (n): the sum over ranks of this rank's part."""

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(n) on each rank -> (n) on all: the sum over ranks."""


class Gather(Protocol):
    """Who gathers parameters. Make it a frozen dataclass: plans are compared by its fields, and between ranks."""

    def all_gather(self, x: Tensor, ranks: Ranks, label: str) -> Pending:
        """(n) on each rank -> (W n) on all: the ranks' tensors end to end. Nobody writes to the result."""


@dataclass(frozen=True)
class Sums:
    """Sums in rank order; `fast` ones in the backend's."""

    fast: bool = False

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """`comm.reduce_scatter`."""
        return primitives.reduce_scatter(x, ranks, label, out, fast=self.fast)

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """`comm.all_reduce`."""
        return primitives.all_reduce(x, ranks, label, out, fast=self.fast)


def tree_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of tensors in pairs, pairs of pairs, and so on; of narrow dtypes in float32."""
    parts = [part.to(primitives.sum_dtype(part.dtype)) for part in parts]
    while len(parts) > 1:
        parts = [*(a + b for a, b in zip(parts[::2], parts[1::2], strict=False)), *parts[len(parts) & ~1 :]]
    return parts[0] if out is None else out.copy_(parts[0])


@dataclass(frozen=True)
class Tree:
    """Sums in a balanced binary tree over ranks (Note [The same bits on any number of ranks])."""

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """Every rank's part to the rank that it is for, and added there."""
        return primitives.scatter(x.chunk(ranks.size), ranks, lambda parts: tree_sum(parts, out), label)

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """The same, and gathered; of what does not divide, everything to everyone."""
        if x.numel() % ranks.size or not x.dim():
            whole = primitives.all_gather(x.reshape(1, -1), ranks, label)
            return whole.then(lambda rows: tree_sum([row.view(x.shape) for row in rows], out))
        part = self.reduce_scatter(x.contiguous().view(-1), ranks, label, None)
        whole = part.then(lambda part: primitives.all_gather(part, ranks, label))
        return whole.then(lambda full: full.view(x.shape) if out is None else out.copy_(full.view(x.shape)))


EXACT, FAST, TREE = Sums(), Sums(fast=True), Tree()


def reduce_over(
    x: Tensor, mesh: AnyMesh, axes: Axes, rest: Axes, label: str = "", out: Tensor | None = None, by: Reduction = EXACT
) -> Pending:
    """Reduce-scatter over `axes`, then all-reduce over `rest`: the transpose of gathering over `axes` on all ranks.

    What was summed once travels on as wide as it was summed.
    """
    sizes = axis_sizes(mesh)
    stages = _stages(sizes, axes, rest, innermost_first=isinstance(by, Tree))
    if not stages:
        return Pending(None, lambda _: x if out is None or out is x else out.copy_(x))

    def start(stage: _Stage, x: Tensor) -> Pending:
        ranks, reduce = primitives.along(mesh, stage.axis), by.reduce_scatter if stage.scatters else by.all_reduce
        into = out
        if stage is not stages[-1]:  # a tree's sums are as wide as need be
            numel = x.numel() // ranks.size if stage.scatters else x.numel()
            into = None if isinstance(by, Tree) else x.new_empty(numel, dtype=primitives.sum_dtype(x.dtype))
        return reduce(_in_order(x, stage, sizes), ranks, label, into).keeping(x)

    pending = start(stages[0], x)
    for stage in stages[1:]:
        pending = pending.then(partial(start, stage))
    return pending


@dataclass(frozen=True)
class _Stage:
    """A collective along `axis`, before which a reduction is still to be scattered over `to_scatter`."""

    axis: str
    to_scatter: Axes

    @property
    def scatters(self) -> bool:
        """Whether it is a reduce-scatter; else an all-reduce."""
        return self.axis in self.to_scatter


def _stages(sizes: dict[str, int], axes: Axes, rest: Axes, innermost_first: bool) -> list[_Stage]:
    """The collectives that `reduce_over` consists of, in order."""
    # axes of one rank beside others add nothing, and what follows them would travel as wide as a sum
    several = [axis for axis in axes + rest if sizes[axis] > 1] or (axes + rest)[:1]
    order = [axis for axis in reversed(sizes) if axis in several] if innermost_first else several
    scattered = [axis for axis in axes if axis in several]
    done = [order[:number] for number in range(len(order))]
    return [
        _Stage(axis, tuple(a for a in scattered if a not in before)) for axis, before in zip(order, done, strict=True)
    ]


def _in_order(x: Tensor, stage: _Stage, sizes: Mapping[str, int]) -> Tensor:
    """The parts for the ranks along a stage's axis end to end."""
    if not stage.scatters or stage.axis == stage.to_scatter[0]:
        return x
    parts = x.view(*(sizes[axis] for axis in stage.to_scatter), -1)  # (ranks along each axis, numel of a part)
    return parts.movedim(stage.to_scatter.index(stage.axis), 0).reshape(-1)


def gather_over(x: Tensor, mesh: AnyMesh, axes: Axes, label: str, by: Gather | None = None) -> Pending:
    """All-gather over `axes`, the first of them the slowest: by an object, or None for `comm`. Dual: `reduce_over`."""
    if by is None:
        return primitives.gather_over(x, mesh, axes, label, lent=True)
    *outer, last = axes
    ranks = primitives.along(mesh, last)

    def checked(full: Tensor) -> Tensor:
        if full.shape != (ranks.size * x.numel(),) or full.dtype != x.dtype:
            raise ValueError(
                f"{by}: all_gather gave {full.dtype}{list(full.shape)}, expected {x.dtype}"
                f"[{ranks.size * x.numel()}]: the tensors of {ranks.size} ranks end to end"
            )
        return full

    pending = by.all_gather(x, ranks, label).then(checked)
    return pending.then(lambda full: gather_over(full, mesh, tuple(outer), label, by)) if outer else pending


def is_idle(by: Reduction, axes: Sequence[Any]) -> bool:
    """Whether gradients stay as they are: on one device, unless there is a hook."""
    return not axes and not hasattr(by, "after")


def reduction_of(reduction: Any) -> Reduction:
    """Who adds up: by name, or the object itself.

    >>> reduction_of("fast")
    Sums(fast=True)
    """
    named: dict[str, Reduction] = {"exact": EXACT, "fast": FAST, "tree": TREE}
    if isinstance(reduction, str) and reduction in named:
        return named[reduction]
    if isinstance(reduction, type) or not (hasattr(reduction, "reduce_scatter") and hasattr(reduction, "all_reduce")):
        raise ValueError(
            f"reduction={reduction!r}: expected 'exact' (sums in rank order), 'fast' (the backend's own), 'tree' (the "
            "same bits on any number of ranks), or an object with the methods reduce_scatter and all_reduce "
            "(fshard.reduction.Reduction)"
        )
    return reduction
