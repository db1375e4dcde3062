"""Rules: the placement of a row on the ranks of a mesh, and the collectives from one rule to another.

Note [Rules]
    A row is a flat buffer (n,). Along each axis of the mesh a row is *cut* into equal intervals (`over`, first axis
    slowest), a *sum* not yet taken (`sums`: each rank has a summand), or *copies* (all other axes). With `at`, the row
    is whole on ranks of number `at` along `over`, the owners of a leaf. A loss computes with copies.

Note [Duals]
    A linear map from one rule to another has a transpose, from the dual of the second to the dual of the first rule:
    copies and sums change places, cut axes stay cut. So the transpose of a gather (cut -> copies) is a scatter (sums ->
    cut). Values of a rule and its dual are paired by the sum over all ranks of their dot products.

Note [Routes]
    A row takes one step along each axis where two rules differ: a `view` (copies -> cut), a `scatter` (sum -> cut), an
    `add` (sum -> copies) or a `gather` (cut -> copies). Intervals are nested, so a route exists if one rule's `over`
    begins with the other's. Sums precede gathers: a rank has fewer elements before a gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate
from ..comm.ranks import Pending, Ranks
from ..comm.reduction import DEFAULT, Gather, Reduction, TreeSums


class Rule(NamedTuple):
    """The placement of a row on the ranks."""

    over: Axes = ()
    sums: Axes = ()
    at: int | None = None  # number, along `over`, of the ranks with the whole row

    def dual(self, axes: Axes) -> Rule:
        """Return the rule of gradients in a backward, before any reduction along `axes`.

        >>> Rule(("shard",)).dual(("replicate", "shard"))
        Rule(over=('shard',), sums=('replicate',), at=None)
        """
        return Rule(self.over, tuple(axis for axis in axes if axis not in self.over + self.sums))

    def number(self, mesh: AnyMesh) -> int:
        return coordinate(mesh, self.over)


COPIES = Rule()


class RouteStep(NamedTuple):
    """One step of a route. `to_cut`: the axes still to be cut, from this step on."""

    kind: Literal["view", "scatter", "add", "gather"]
    axis: str
    to_cut: Axes = ()


def route(old: Rule, new: Rule, order: Sequence[str], innermost_first: bool = False) -> list[RouteStep]:
    """Return the steps from one rule to another along the axes in `order`; other axes have one rank (Note [Routes]).

    Sums run along the axes of `new.over`, then along other axes; with `innermost_first`, from the last axis in `order`.
    ValueError if there is no route.

    >>> route(Rule((), ("replicate", "shard")), Rule(("shard",)), ("replicate", "shard"))
    [RouteStep(kind='scatter', axis='shard', to_cut=('shard',)), RouteStep(kind='add', axis='replicate', to_cut=())]
    """
    common = min(len(old.over), len(new.over))
    if old.over[:common] != new.over[:common] or not set(new.sums) <= set(old.sums):
        raise ValueError(f"a row has no route from {old} to {new}")
    to_cut = tuple(axis for axis in new.over[common:] if axis in order)
    due = [axis for axis in old.sums if axis in order and axis not in to_cut + new.sums]
    narrowed = [*to_cut, *due]
    if innermost_first:
        narrowed.sort(key=order.index, reverse=True)
    steps = list[RouteStep]()
    for axis in narrowed:
        left = tuple(other for other in to_cut if other in narrowed[len(steps) :])
        steps.append(RouteStep("add" if axis in due else "scatter" if axis in old.sums else "view", axis, left))
    return steps + [RouteStep("gather", axis) for axis in reversed(old.over[common:]) if axis in order]


def reshard(
    x: Tensor,
    old: Rule,
    new: Rule,
    mesh: AnyMesh,
    label: str = "",
    out: Tensor | None = None,
    *,
    by: Reduction = DEFAULT,
    gather: Gather | None = None,
    along: Axes | None = None,
    lent: bool = False,
) -> Pending:
    """Start to move this rank's part of a row from one rule to another.

    The last step writes to `out`; for a sum `out` may have another dtype. Steps after a sum send in the sum's dtype.
    `along`: the axes with a step (None: axes of several ranks). `lent` is as in `primitives.all_gather`.
    """
    sizes, innermost_first = axis_sizes(mesh), isinstance(by, TreeSums)
    needed = [axis for axis, size in sizes.items() if (size > 1 if along is None else axis in along)]
    steps = route(old, new, needed, innermost_first)

    def start(number: int, x: Tensor) -> Pending:  # (n,) -> (n / W,), (n,) or (W n,)
        step, is_last = steps[number], number == len(steps) - 1
        ranks = primitives.along(mesh, step.axis)
        if step.kind == "view":
            part = interval(_parts_first(x, step, sizes), mesh, (step.axis,))
            return arrived(part, out if is_last else None)
        if step.kind == "gather":
            full = _gathered_by(x, ranks, label, out if is_last else None, gather, lent)
            return full if is_last else full.keeping(x)
        into = out
        if not is_last:  # `TreeSums` chooses the dtype of its sums
            numel = x.numel() // ranks.size if step.kind == "scatter" else x.numel()
            into = None if innermost_first else x.new_empty(numel, dtype=primitives.sum_dtype(x.dtype))
        act = by.reduce_scatter if step.kind == "scatter" else by.all_reduce
        return act(_parts_first(x, step, sizes), ranks, label, into).keeping(x)

    pending = start(0, x) if steps else arrived(x, out)
    for number in range(1, len(steps)):
        pending = pending.then(partial(start, number))
    return pending


def interval(x: Tensor, mesh: AnyMesh, axes: Axes) -> Tensor:
    sizes = axis_sizes(mesh)
    length = x.numel() // math.prod(sizes[axis] for axis in axes)
    begin = coordinate(mesh, axes) * length
    return x[begin : begin + length]


def arrived(x: Tensor, out: Tensor | None = None) -> Pending:
    """Return `x`, or `out` with its values, as a finished collective."""
    return Pending(None, lambda _: x if out is None or out is x else out.copy_(x))


def _parts_first(x: Tensor, step: RouteStep, sizes: Mapping[str, int]) -> Tensor:
    """Put the parts for the ranks along the axis of `step` end to end."""
    if not step.to_cut or step.axis == step.to_cut[0] or step.kind == "add":
        return x
    parts = x.view(*(sizes[axis] for axis in step.to_cut), -1)  # (ranks along each axis, numel of a part)
    return parts.movedim(step.to_cut.index(step.axis), 0).reshape(-1)


def _gathered_by(x: Tensor, ranks: Ranks, label: str, out: Tensor | None, by: Gather | None, lent: bool) -> Pending:
    if by is None:
        return primitives.all_gather(x, ranks, label, out, lent=lent)

    def checked(full: Tensor) -> Tensor:
        if full.shape != (ranks.size * x.numel(),) or full.dtype != x.dtype:
            raise ValueError(
                f"{by}: all_gather gave {full.dtype}{list(full.shape)}, expected {x.dtype}"
                f"[{ranks.size * x.numel()}]: the tensors of {ranks.size} ranks end to end"
            )
        return full

    return by.all_gather(x, ranks, label).keeping(x).then(checked)
