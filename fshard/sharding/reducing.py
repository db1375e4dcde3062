"""How the gradients of a unit travel: a flat buffer is cast or encoded, and summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes, num_ranks
from ..comm.ranks import Pending, Ranks
from ..comm.reduction import Reduction, Sums, TreeSums, only_reads, reduce_over
from ..comm.wire import Wire
from ..core.arguments import shown
from ..core.flat import clear_outside_
from . import offload
from .plan import Plan
from .schedule import schedule
from .sharded import Sharded
from .transfer import arrived, decode, filled, several, sizes

_LARGE = 1 << 20  # bytes of gradients that are summed in place: a second message is worth the memory


class Reducer:
    """The reductions of one backward into `reduced`; what they have in common is worked out once.

    The sum is not taken over the axes `later`: `reduce_rest` does that.
    """

    def __init__(self, reduced: Sharded, by: Reduction, later: Axes):
        self._reduced, self._by, self._later = reduced, by, later
        self._parts, self._rows, self._units = schedule(reduced.view).parts, reduced.tensors, reduced.plan.units
        self._routes = {kind: _route(reduced, kind, by, later) for kind in reduced.view.kinds}
        self._landed: dict[tuple[int, int], Tensor] = {}  # by unit and kind: buffers that are intervals of `reduced`

    def _interval(self, unit: int, kind: int) -> Tensor:
        """This rank's interval (n / W,) of `reduced`, a view."""
        # `Sums` has no rows, but makes pieces
        return self._parts[unit, kind].of(self._rows) if self._rows else self._reduced.piece(unit, kind)

    def buffer(self, unit: int, kind: int) -> Tensor:
        """A flat buffer (n,) for a unit's gradients before they are reduced: their interval of `reduced` if it can."""
        route, numel = self._routes[kind], self._parts[unit, kind].numel
        if route.least is not None and numel * route.like.itemsize >= route.least:
            self._landed[unit, kind] = self._interval(unit, kind)
            return self._landed[unit, kind]
        return route.like.new_empty(numel) if route.room is None else route.room(numel, route.like, route.lent)

    def start(self, unit: int, kind: int, flat: Tensor) -> Pending:
        """Start the sum over ranks of a filled buffer (n,), into this rank's interval of `reduced`, (n / W,)."""
        route, landed = self._routes[kind], self._landed.pop((unit, kind), None)
        if route.along is None and landed is flat:  # nobody to add to, and nothing to cast
            return arrived(flat)
        if route.collective is None:
            return reduce(flat, self._reduced, unit, kind, self._by, self._later)
        out = self._interval(unit, kind) if landed is None else landed
        sent = flat if route.dtype is None else flat.to(route.dtype)
        return route.collective(sent, route.along, self._units[unit].name, out).keeping(sent)


class _Route(NamedTuple):
    """How the gradients of one kind travel."""

    like: Tensor  # (0,), with the device and dtype of their buffers
    room: Callable[[int, Tensor, bool], Tensor] | None  # allocates the buffers, which peers may read if `lent`
    lent: bool
    collective: Callable[..., Pending] | None  # if one collective is all that a reduction consists of, over these ranks
    along: Ranks | None
    dtype: torch.dtype | None  # in which gradients are sent; None for their own
    least: int | None  # bytes of a buffer from which on it is the interval of the sum itself; None: none is


def _route(reduced: Sharded, kind: int, by: Reduction, later: Axes) -> _Route:
    plan, axes, mesh = reduced.plan, reduced.view.axes(kind), reduced.plan.live_mesh()
    like = torch.empty(0, dtype=buffer_dtype(plan, kind), device=plan.device)
    lent = plan.grad_wire is None and only_reads(by)
    # the first axis that the buffer is sent over: the mesh may allocate it where peers can read
    room = next((primitives.along(mesh, axis).empty for axis in axes + plan.rest(axes)), None)
    summed = axes + plan.rest(axes + later)
    needed = several(plan, summed)
    is_last = like.dtype == plan.kinds[kind].precision.grads and only_reads(by)  # what is put is what is kept
    special = plan.grad_wire or plan.kinds[kind].host or _is_split(plan, kind) or hasattr(by, "after")
    if not special and not needed and is_last:
        return _Route(like, room, lent, None, None, None, least=0)
    if special or len(needed or summed[:1]) != 1:
        return _Route(like, room, lent, None, None, None, least=None)
    (axis,) = needed or summed[:1]
    collective = by.reduce_scatter if axis in axes else by.all_reduce
    sent = None if isinstance(by, TreeSums) else plan.kinds[kind].precision.reduce  # sums travel in their own dtype
    # whole gradients are replaced by their sum
    in_place = is_last and type(by) is Sums and not several(plan, axes)
    least = _LARGE if in_place else None
    return _Route(like, room, lent, collective, primitives.along(mesh, axis), sent, least)


def reduce(flat: Tensor, reduced: Sharded, unit: int, kind: int, by: Reduction, later: Axes) -> Pending:
    """Start the sum over ranks of a flat buffer of gradients (n,), into this rank's interval of `reduced`, (n / W,).

    `by` and `later` are as of `Reducer`.
    """
    plan, out = reduced.plan, _landing(reduced, unit, kind)
    if plan.grad_wire is not None and plan.axes and flat.is_floating_point():
        pending = _reduce_encoded(flat, reduced, unit, kind, out, by, later)
        pending = pending.then(lambda total: _unpadded(total, reduced, unit, kind))
    else:
        pending = _reduce_cast(flat, reduced, unit, kind, out, by, later)
    return _landed(pending, out, reduced, unit, kind, None if later else by)


def nothing(reduced: Sharded, unit: int, kind: int, by: Reduction, later: Axes) -> Pending:
    """The sum of a unit that got no gradient on any rank: zeros, which `by.after` is given like any sum."""
    out = _landing(reduced, unit, kind).zero_()
    return _landed(Pending(None, lambda _: out), out, reduced, unit, kind, None if later else by)


def reduce_rest(sums: Sharded, reduced: Sharded, later: Axes, by: Reduction) -> None:
    """All-reduce `sums` over the axes `later` into `reduced`: one collective for each unit, all started at once."""
    plan, started = reduced.plan, list[Pending]()
    for unit, kind in ((u, k) for u in range(len(plan.units)) for k in sums.view.kinds if plan.units[u].lengths[k]):
        x, out = sums.piece(unit, kind).to(plan.device), _landing(reduced, unit, kind)
        pending = reduce_over(x, plan.live_mesh(), (), later, plan.units[unit].name, out, by)
        started.append(_landed(pending, out, reduced, unit, kind, by))
    for pending in started:
        pending.wait()


def _landing(reduced: Sharded, unit: int, kind: int) -> Tensor:
    """Where a sum is written: this rank's interval; if that is in host memory, a buffer on the device."""
    row = reduced.piece(unit, kind)
    return offload.landing(row, reduced.plan.device) if reduced.plan.kinds[kind].host else row


def _landed(pending: Pending, out: Tensor, reduced: Sharded, unit: int, kind: int, by: Reduction | None) -> Pending:
    """A sum after the reduction's hook `after`, in this rank's interval, copied to host memory if that is there."""
    plan, row, name = reduced.plan, reduced.piece(unit, kind), reduced.plan.units[unit].name
    after = getattr(by, "after", None)
    if after is not None:

        def hooked(total: Tensor) -> Tensor:
            result = after(total, name)
            if not isinstance(result, Tensor) or result.shape != total.shape:
                raise TypeError(
                    f"{by}: after: expected the sum to go on with, of shape {list(total.shape)}, got {shown(result)}"
                )
            return _unpadded(out.copy_(result), reduced, unit, kind)

        pending = pending.then(hooked)
    return pending.then(lambda total: plan.crossings.down.copied(total, row)) if plan.kinds[kind].host else pending


def buffer_dtype(plan: Plan, kind: int) -> torch.dtype:
    """The dtype of the flat buffer that a unit's gradients are written to before they are reduced."""
    precision = plan.kinds[kind].precision
    return torch.float32 if _is_split(plan, kind) else precision.reduce


def _is_split(plan: Plan, kind: int) -> bool:
    """Whether gradients are computed in a wider dtype and sent as float16."""
    precision = plan.kinds[kind].precision
    return precision.reduce == torch.float16 and precision.compute != torch.float16


def _reduce_cast(
    flat: Tensor, reduced: Sharded, unit: int, kind: int, out: Tensor, by: Reduction, later: Axes
) -> Pending:
    """Start the sum of (n,) into `out`, (n / W,), sent in the dtype that the plan's policy says."""
    plan, axes = reduced.plan, reduced.view.axes(kind)
    mesh, other_axes, name = plan.live_mesh(), plan.rest(axes + later), plan.units[unit].name
    if isinstance(by, TreeSums):  # sums travel in the dtype they are taken in
        return reduce_over(flat, mesh, axes, other_axes, name, out, by)
    # Each gradient was divided by the number of ranks W. Multiplied by about sqrt(W), neither small gradients nor sums
    # of large ones leave the range of float16. A power of two rounds nothing.
    factor = 2.0 ** round(math.log2(num_ranks(mesh)) / 2) if _is_split(plan, kind) else 1
    scaled = (flat if factor == 1 else flat * factor).to(plan.kinds[kind].precision.reduce)
    pending = reduce_over(scaled, mesh, axes, other_axes, name, out, by)
    return pending if factor == 1 else pending.then(lambda total: total.mul_(1 / factor))


def _reduce_encoded(
    flat: Tensor, reduced: Sharded, unit: int, kind: int, out: Tensor, by: Reduction, later: Axes
) -> Pending:
    """Start the sum of (n,) into `out`, (n / W,), encoded by the plan's `grad_wire` along one axis."""
    plan, axes = reduced.plan, reduced.view.axes(kind)
    mesh, name, wire = plan.live_mesh(), plan.units[unit].name, plan.grad_wire
    other_axes = plan.rest(axes + later)
    assert wire is not None  # `reduce` has looked
    # encoded along one axis: the first that gradients are cut over, else the longest
    axis = _first(plan, axes) if axes else max(other_axes, key=dict(plan.axes).__getitem__)
    ranks = primitives.along(mesh, axis)
    lengths = [sizes(plan, unit, kind, ranks.size, part) for part in range(ranks.size)]  # of each rank's part
    parts = flat.chunk(len(lengths))  # (n / W,) for each rank
    sends = [wire.encode(part, part_lengths) for part, part_lengths in zip(parts, lengths, strict=True)]
    added = primitives.scatter(sends, ranks, lambda received: _added(wire, received, lengths[ranks.rank]), name)
    # a sum travels on in its own dtype, not encoded again, along the other axes of several ranks
    if axes:
        further, other_axes = (several(plan, names) for names in (axes[axes.index(axis) + 1 :], other_axes))
        return added.then(lambda part: reduce_over(part, mesh, further, other_axes, name, out, by))
    # every rank needs the whole sum: what `scatter` has cut is gathered again before the other axes
    remaining = several(plan, [other for other in other_axes if other != axis])
    whole = added.then(lambda part: primitives.gather_over(part, mesh, (axis,), name))
    return whole.then(lambda full: reduce_over(full, mesh, (), remaining, name, out, by))


def _unpadded(total: Tensor, reduced: Sharded, unit: int, kind: int) -> Tensor:
    """Set the padding of a rank's interval to zero, in place.

    A wire may decode anything there, and so may a hook return, which unscaling would take for an overflow.
    """
    return clear_outside_(total, filled(reduced, unit, kind))


def _first(plan: Plan, axes: Axes) -> str:
    """The first axis of several ranks; the first axis if none has."""
    return next((axis for axis in axes if dict(plan.axes)[axis] > 1), axes[0])


def _added(wire: Wire, received: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The sum of what all ranks sent, decoded, in rank order, in float32 at least."""
    first, *others = (decode(wire, data, lengths) for data in received)  # (n / W,) each
    total = first.to(primitives.sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total
