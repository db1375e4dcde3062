"""Sums of gradients across ranks and their order, gathers of parameters, and encodings of sent tensors.

Note [The same bits on any number of ranks]
    A floating-point sum depends on the order of its terms. So a batch is cut into 2^s slices, whose gradients are added
    in a balanced binary tree. With 2^r ranks, each rank adds the gradients of 2^(s - r) slices, a subtree, and a tree
    over ranks completes the sum. Ranks are numbered over all axes, the last axis the fastest, so sums are taken along
    the last axis first. Partial sums are sent unrounded: r decides which sums are sent, so rounding would depend on r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..core.arguments import check_whole
from . import primitives
from .ranks import Pending, Ranks


class Reduction(Protocol):
    """Sums of gradients along one axis.

    `x` is flat, `label` names the call in errors; `out`, if given, gets the result, perhaps in a wider dtype.
    """

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(W n) on each rank -> (n): the sum of this rank's part."""

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(n) on each rank -> (n) on all: the sum."""


Sizes = Sequence[int]


class Wire(Protocol):
    """An encoding of flat tensors. Make yours a frozen dataclass: ranks compare plans by its fields.

    `sizes` has the number of elements of each leaf in the tensor, in order, padding included.
    """

    def encode(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Encode `x` (n,) as a flat tensor, of a length set by n and the number of `sizes`."""

    def decode(self, data: Tensor, sizes: Sizes) -> Tensor:
        """Decode a result of `encode`: (n,), floating."""


class Gather(Protocol):
    """Gathers of parameters along one axis. Make yours a frozen dataclass: ranks compare plans by its fields."""

    def all_gather(self, x: Tensor, ranks: Ranks, label: str) -> Pending:
        """(n) on each rank -> (W n) on all, end to end. Callers do not write to the result."""


@dataclass(frozen=True)
class Sums:
    """Sums in rank order, or with `fast` in the backend's order; fast=None is fast on GPUs.

    A GPU backend's order, used by FSDP, gives the same bits in every run on the same ranks.

    >>> Sums().is_fast(torch.device("cpu")), Sums().is_fast(torch.device("cuda"))
    (False, True)
    """

    fast: bool | None = None

    def is_fast(self, device: torch.device) -> bool:
        """True if the backend chooses the order of sums on `device`."""
        return device.type != "cpu" if self.fast is None else self.fast

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """See `Reduction`."""
        return primitives.reduce_scatter(x, ranks, label, out, fast=self.is_fast(ranks.device))

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """See `Reduction`."""
        return primitives.all_reduce(x, ranks, label, out, fast=self.is_fast(ranks.device))


def tree_sum(parts: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    parts = [part.to(primitives.sum_dtype(part.dtype)) for part in parts]
    while len(parts) > 1:  # an odd last part goes up a level alone
        parts = [*(a + b for a, b in zip(parts[::2], parts[1::2], strict=False)), *parts[len(parts) & ~1 :]]
    return parts[0] if out is None else out.copy_(parts[0])


@dataclass(frozen=True)
class TreeSums:
    """Sums in a tree: a step has the same bits on 1, 2, 4, ... ranks.

    `slices`: a power of two, the most ranks of a run (Note [Slices] in `train/slices.py`).

    >>> import fshard
    >>> step = fshard.train_step(lambda w, x: (w * x).sum(), fshard.optim.sgd(0.1), reduction=TreeSums(slices=16))
    """

    slices: int = 8

    def __post_init__(self) -> None:
        check_whole("slices", self.slices, what="a power of two")
        if self.slices.bit_count() > 1:
            raise ValueError(f"slices={self.slices}: expected a power of two, the most ranks a run may ever have")

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """See `Reduction`."""
        if ranks.built_in is not None:  # one collective, and log2 W kernels
            numel, dtype = x.numel() // ranks.size, primitives.sum_dtype(x.dtype)
            into = x.new_empty(numel, dtype=dtype) if out is None else out
            sent = primitives.all_to_all(x, ranks, label, kind="reduce_scatter")
            return sent.then(lambda rows: primitives.fold_rows(rows.view(ranks.size, -1), "sum", into, group=2))
        # not `reduce_scatter`, which adds in rank order
        return primitives.scatter(x.chunk(ranks.size), ranks, lambda parts: tree_sum(parts, out), label)

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """See `Reduction`."""
        if x.numel() % ranks.size or not x.dim():
            whole = primitives.all_gather(x.reshape(1, -1), ranks, label)  # (W, numel)
            return whole.then(lambda rows: tree_sum([row.view(x.shape) for row in rows], out))
        part = self.reduce_scatter(x.contiguous().view(-1), ranks, label, None)  # (numel / W,)
        whole = part.then(lambda part: primitives.all_gather(part, ranks, label).keeping(part))
        return whole.then(lambda full: full.view(x.shape) if out is None else out.copy_(full.view(x.shape)))


DEFAULT, TREE = Sums(), TreeSums()


def only_reads(by: Reduction) -> bool:
    """True for reductions never writing to their input (Note [Lent memory] in `ranks.py`)."""
    return type(by) in (Sums, TreeSums)  # a user's subclass may write


def is_idle(by: Reduction, axes: Sequence[object]) -> bool:
    """True if a reduction changes nothing: no axes, and no method `after`."""
    return not axes and not hasattr(by, "after")


def reduction_of(reduction: str | Reduction | None) -> Reduction:
    """Return the `Reduction` of a name; return an object as it is.

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
