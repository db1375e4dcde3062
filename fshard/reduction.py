"""Who adds gradients up, and their sum over several axes of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from . import comm
from .comm import Axes, Mesh, Pending, Ranks


class Reduction(Protocol):
    """Who adds gradients up. `out` may be of a wider dtype than `x`; the result is written there, or new without it."""

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(W n) on each rank -> (n): the sum over ranks of this rank's part."""

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """(n) on each rank -> (n) on all: the sum over ranks."""


@dataclass(frozen=True)
class Sums:
    """Sums in rank order; `fast` ones in the backend's."""

    fast: bool = False

    def reduce_scatter(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """`comm.reduce_scatter`."""
        return comm.reduce_scatter(x, ranks, label, out, fast=self.fast)

    def all_reduce(self, x: Tensor, ranks: Ranks, label: str, out: Tensor | None) -> Pending:
        """`comm.all_reduce`."""
        return comm.all_reduce(x, ranks, label, out, fast=self.fast)


EXACT, FAST = Sums(), Sums(fast=True)


def reduce_over(
    x: Tensor, mesh: Mesh, axes: Axes, rest: Axes, label: str = "", out: Tensor | None = None, by: Reduction = EXACT
) -> Pending:
    """Reduce-scatter over `axes`, then all-reduce over `rest`: the transpose of gathering over `axes` on all ranks.

    What was summed once travels on as wide as it was summed.
    """
    sizes = comm.axis_sizes(mesh)
    if axes:  # more axes of one rank would add nothing
        rest = tuple(axis for axis in rest if sizes[axis] > 1)
    if not axes and not rest:
        return Pending(None, lambda _: x if out is None or out is x else out.copy_(x))
    last, ranks = len(axes) + len(rest) == 1, comm.along(mesh, (*axes, *rest)[0])
    numel = x.numel() // ranks.size if axes else x.numel()
    into = out if last else x.new_empty(numel, dtype=comm.sum_dtype(x.dtype))
    pending = (by.reduce_scatter if axes else by.all_reduce)(x, ranks, label, into)
    axes, rest = (axes[1:], rest) if axes else ((), rest[1:])
    return pending if last else pending.then(lambda y: reduce_over(y, mesh, axes, rest, label, out, by))


def reduction_of(reduction: Any) -> Reduction:
    """Who adds up: by name, or the object itself.

    >>> reduction_of("fast")
    Sums(fast=True)
    """
    named = {"exact": EXACT, "fast": FAST}
    if isinstance(reduction, str) and reduction in named:
        return named[reduction]
    if not (hasattr(reduction, "reduce_scatter") and hasattr(reduction, "all_reduce")):
        raise ValueError(
            f"reduction={reduction!r}: expected 'exact' (sums in rank order), 'fast' (the backend's own), or an object "
            "with the methods reduce_scatter and all_reduce (fshard.reduction.Reduction)"
        )
    return reduction
