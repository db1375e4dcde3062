"""How gradients are summed across ranks, and in which order; how parameters are gathered.

Note [The same bits on any number of ranks]
    A sum of floating-point numbers depends on the order of its terms. A batch is cut into 2^s slices, whose gradients
    are added in a balanced binary tree. With 2^r ranks, each rank adds the gradients of 2^(s - r) slices, a subtree.
    The ranks' sums, added in a tree over ranks, complete the tree, so the bits are the same for every r. Ranks are
    numbered over all axes, the last axis the fastest, so sums are taken along the last axis first. Partial sums are
    sent in the dtype they are taken in: which of them are sent depends on r, so rounding them would show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from . import primitives
from .mesh import AnyMesh, Axes, axis_sizes
from .ranks import Pending, Ranks


class Reduction(Protocol):
    """How gradients are summed along one axis.

    The result is written to `out`, which may have a wider dtype than `x`; without `out` it is a new tensor.
    """

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(W n) on each rank -> (n): the sum over ranks of this rank's part."""

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(n) on each rank -> (n) on all: the sum over ranks."""


class Gather(Protocol):
    """How parameters are gathered along one axis. Make it a frozen dataclass: plans that have it are compared."""

    def all_gather(self, x: Tensor, ranks: Ranks, label: str) -> Pending:
        """(n) on each rank -> (W n) on all: the ranks' tensors end to end. The result is only read."""


@dataclass(frozen=True)
class Sums:
    """Sums in rank order, or with `fast` in the order that the backend chooses; None: in rank order on CPUs alone.

    The order of a GPU's backend is the one that FSDP has: the same bits in every run on the same ranks.

    >>> Sums().is_fast(torch.device("cpu")), Sums().is_fast(torch.device("cuda"))
    (False, True)
    """

    fast: bool | None = None

    def is_fast(self, device: torch.device) -> bool:
        """Whether the backend chooses the order between ranks on such devices."""
        return device.type != "cpu" if self.fast is None else self.fast

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(W n) on each rank -> (n): the sum over ranks of this rank's part."""
        return primitives.reduce_scatter(x, ranks, label, out, fast=self.is_fast(ranks.device))

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(n) on each rank -> (n) on all: the sum over ranks."""
        return primitives.all_reduce(x, ranks, label, out, fast=self.is_fast(ranks.device))


def tree_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of tensors in a balanced binary tree: pairs, then pairs of pairs; narrow dtypes in float32."""
    parts = [part.to(primitives.sum_dtype(part.dtype)) for part in parts]
    while len(parts) > 1:  # the last of an odd number goes on alone
        parts = [*(a + b for a, b in zip(parts[::2], parts[1::2], strict=False)), *parts[len(parts) & ~1 :]]
    return parts[0] if out is None else out.copy_(parts[0])


@dataclass(frozen=True)
class TreeSums:
    """Sums in a balanced binary tree over ranks (Note [The same bits on any number of ranks])."""

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """Send each part to the rank that it is for, which adds what it receives in a tree."""
        if ranks.built_in is not None:  # one call, and log2 W kernels
            numel, dtype = x.numel() // ranks.size, primitives.sum_dtype(x.dtype)
            into = x.new_empty(numel, dtype=dtype) if out is None else out
            sent = primitives.all_to_all(x, ranks, label, kind="reduce_scatter")
            return sent.then(lambda rows: primitives.fold_rows(rows.view(ranks.size, -1), "sum", into, group=2))
        # W parts (n,); not `reduce_scatter`, which adds in rank order
        return primitives.scatter(x.chunk(ranks.size), ranks, lambda parts: tree_sum(parts, out), label)

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """Reduce-scatter, then all-gather; a tensor that does not divide by the ranks is gathered whole and summed."""
        if x.numel() % ranks.size or not x.dim():
            whole = primitives.all_gather(x.reshape(1, -1), ranks, label)  # (W, numel)
            return whole.then(lambda rows: tree_sum([row.view(x.shape) for row in rows], out))
        part = self.reduce_scatter(x.contiguous().view(-1), ranks, label, None)  # (numel / W,)
        whole = part.then(lambda part: primitives.all_gather(part, ranks, label))
        return whole.then(lambda full: full.view(x.shape) if out is None else out.copy_(full.view(x.shape)))


DEFAULT, TREE = Sums(), TreeSums()


def reduce_over(
    x: Tensor,
    mesh: AnyMesh,
    axes: Axes,
    rest: Axes,
    label: str = "",
    out: Tensor | None = None,
    by: Reduction = DEFAULT,
) -> Pending:
    """Reduce-scatter over `axes`, then all-reduce over `rest`: the transpose of gathering over `axes` on all ranks.

    A sum along one axis is sent along the next in the dtype it was taken in.
    """
    sizes = axis_sizes(mesh)  # of all axes, in the order of the mesh
    stages = _stages(sizes, axes, rest, innermost_first=isinstance(by, TreeSums))
    if not stages:
        return Pending(None, lambda _: x if out is None or out is x else out.copy_(x))

    def start(stage: _Stage, x: Tensor) -> Pending:  # (n,) -> (n / W,) if the stage scatters, else (n,)
        ranks, reduce = primitives.along(mesh, stage.axis), by.reduce_scatter if stage.scatters else by.all_reduce
        into = out
        if stage is not stages[-1]:  # `TreeSums` chooses the dtype of its sums
            numel = x.numel() // ranks.size if stage.scatters else x.numel()
            into = None if isinstance(by, TreeSums) else x.new_empty(numel, dtype=primitives.sum_dtype(x.dtype))
        return reduce(_in_order(x, stage, sizes), ranks, label, into).keeping(x)

    pending = start(stages[0], x)
    for stage in stages[1:]:
        pending = pending.then(partial(start, stage))
    return pending


@dataclass(frozen=True)
class _Stage:
    """A collective along `axis`; when it starts, the tensor is still to be scattered over `to_scatter`."""

    axis: str
    to_scatter: Axes

    @property
    def scatters(self) -> bool:
        """Whether it is a reduce-scatter; else an all-reduce."""
        return self.axis in self.to_scatter


def _stages(sizes: dict[str, int], axes: Axes, rest: Axes, innermost_first: bool) -> list[_Stage]:
    """The collectives that `reduce_over` consists of, in order."""
    # an axis of one rank adds nothing, but a stage along it would have the next stage send a sum in a wider dtype
    needed = [axis for axis in axes + rest if sizes[axis] > 1] or (axes + rest)[:1]
    order = [axis for axis in reversed(sizes) if axis in needed] if innermost_first else needed
    scattered = [axis for axis in axes if axis in needed]
    done = [order[:number] for number in range(len(order))]
    return [
        _Stage(axis, tuple(a for a in scattered if a not in before)) for axis, before in zip(order, done, strict=True)
    ]


def _in_order(x: Tensor, stage: _Stage, sizes: Mapping[str, int]) -> Tensor:
    """`x` with the parts for the ranks along the axis of a stage end to end."""
    if not stage.scatters or stage.axis == stage.to_scatter[0]:
        return x
    parts = x.view(*(sizes[axis] for axis in stage.to_scatter), -1)  # (ranks along each axis, numel of a part)
    return parts.movedim(stage.to_scatter.index(stage.axis), 0).reshape(-1)


def gather_over(x: Tensor, mesh: AnyMesh, axes: Axes, label: str, by: Gather | None = None, *, lent: bool) -> Pending:
    """All-gather over `axes`, the first the slowest, by an object or (None) by `all_gather`. Dual: `reduce_over`."""
    if by is None:
        return primitives.gather_over(x, mesh, axes, label, lent=lent)
    *outer, last = axes
    ranks = primitives.along(mesh, last)

    def checked(full: Tensor) -> Tensor:
        if full.shape != (ranks.size * x.numel(),) or full.dtype != x.dtype:
            raise ValueError(
                f"{by}: all_gather gave {full.dtype}{list(full.shape)}, expected {x.dtype}"
                f"[{ranks.size * x.numel()}]: the tensors of {ranks.size} ranks end to end"
            )
        return full

    pending = by.all_gather(x, ranks, label).keeping(x).then(checked)
    return pending.then(lambda full: gather_over(full, mesh, tuple(outer), label, by, lent=lent)) if outer else pending


def only_reads(by: Reduction) -> bool:
    """Whether a reduction surely does not write to what it is given: it is one of ours (Note [Lent memory])."""
    return type(by) in (Sums, TreeSums)  # the user's subclasses may write to it


def is_idle(by: Reduction, axes: Sequence[object]) -> bool:
    """Whether a reduction changes nothing: there is one device, and no hook `after`."""
    return not axes and not hasattr(by, "after")


def reduction_of(reduction: str | Reduction | None) -> Reduction:
    """The `Reduction` of a name, or of None; an object that is one is returned as it is.

    >>> reduction_of("fast")
    Sums(fast=True)
    """
    named: dict[str | None, Reduction] = {None: DEFAULT, "exact": Sums(False), "fast": Sums(True), "tree": TREE}
    if reduction is None or (isinstance(reduction, str) and reduction in named):
        return named[reduction]
    if isinstance(reduction, str | type) or not (
        hasattr(reduction, "reduce_scatter") and hasattr(reduction, "all_reduce")
    ):
        raise ValueError(
            f"reduction={reduction!r}: expected 'exact' (sums in rank order), 'fast' (the backend's own), None (exact "
            "on CPUs, fast on GPUs), 'tree' (the same bits on any number of ranks), or an object with the methods "
            "reduce_scatter and all_reduce (fshard.reduction.Reduction)"
        )
    return reduction
