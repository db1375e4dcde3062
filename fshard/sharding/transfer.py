"""How a unit travels: its shards are cast or encoded and gathered; its gradients are cast or encoded and summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes, num_ranks
from ..comm.ranks import Pending, Ranks
from ..comm.reduction import Reduction, TreeSums, gather_over, only_reads, reduce_over
from ..comm.wire import Wire, pack, unpack
from ..core.arguments import shown
from ..core.flat import clear_outside_, cleared_outside
from . import offload
from .plan import Plan
from .schedule import Entry, Part, schedule
from .sharded import Sharded, intervals

Lost: TypeAlias = Sharded | tuple[()]  # what wires with feedback have not sent of gradients; () for other wires


def makes_buffers(params: Sharded) -> bool:
    """Whether units come in buffers of their own; else their leaves are views of the parameters themselves."""
    return any(is_buffer(params, kind) for kind in params.view.kinds)


def is_buffer(params: Sharded, kind: int) -> bool:
    """Whether leaves of a kind come in buffers of their own; else they are views of the parameters themselves."""
    row = params.plan.kinds[kind]
    return bool(params.view.axes(kind)) or row.host or row.precision.compute != row.dtype


def stages(plan: Plan, axes: Axes) -> int:
    """The number of stages of a gather over some axes: one for each that has several ranks, at least one."""
    return max(1, sum(dict(plan.axes)[axis] > 1 for axis in axes))


class Gathers:
    """The gathers of one value of the parameters; what they have in common is worked out once."""

    def __init__(self, params: Sharded):
        plan, axes = params.plan, params.view.over
        self._params, self._rows = params, params.tensors
        plain = not (plan.gather or plan.param_wire or plan.together or any(kind.host for kind in plan.kinds))
        # whether each kind of a unit is one collective, or none, after a cast at most
        self._is_plain = plain and len(axes) <= 1
        self._ranks = primitives.along(plan.live_mesh(), axes[0]) if self._is_plain and axes else None

    def start(self, entry: Entry, kept: Collection[int]) -> dict[int, Pending]:
        """Start the gather of a unit's flat buffers, except those of kinds in `kept`: on the device, in the dtype of
        computation, by kind."""
        if kept or not self._is_plain:
            return gather(self._params, entry.unit, [part.kind for part in entry.parts if part.kind not in kept])
        return {part.kind: self._start(entry, part) for part in entry.parts}

    def _start(self, entry: Entry, part: Part) -> Pending:
        shard, ranks = part.of(self._rows), self._ranks  # (n / W,)
        if ranks is None or not (part.axes and part.numel):
            return arrived(shard) if part.cast is None else _have_whole(self._params, entry.unit, part.kind)
        if part.cast is not None:
            like = shard.new_empty(0, dtype=part.cast)
            shard = ranks.empty(shard.numel(), like, lent=False).copy_(shard)
        return primitives.all_gather(shard, ranks, entry.name, lent=True)


def gather(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    """Start the gather of a unit's flat buffers: on the device, in the dtype of computation, by kind."""
    plan = params.plan
    if not any(plan.kinds[kind].host for kind in kinds):
        return _gathers(params, unit, kinds)
    up = plan.crossings.up
    with up.ahead():
        started = _gathers(params, unit, kinds)
    return {kind: up.joined(pending) for kind, pending in started.items()}


def _gathers(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    plan = params.plan
    cut_kinds = [kind for kind in kinds if params.view.axes(kind) and plan.units[unit].lengths[kind]]
    if plan.together and len(cut_kinds) > 1:
        whole = {kind: _have_whole(params, unit, kind) for kind in kinds if kind not in cut_kinds}
        return whole | _together(params, unit, cut_kinds)
    return {
        kind: _gather(params, unit, kind) if kind in cut_kinds else _have_whole(params, unit, kind) for kind in kinds
    }


def _have_whole(params: Sharded, unit: int, kind: int) -> Pending:
    """The flat buffer of leaves that this rank has whole: nothing is sent."""
    return arrived(_cast(params, unit, kind))


def arrived(full: Tensor) -> Pending:
    """A buffer that this rank has, as a gather that has ended."""
    return Pending(None, lambda _: full)


def _brought(params: Sharded, unit: int, kind: int) -> Tensor:
    """A shard (n / W,) on the device; from host memory it is copied without waiting."""
    plan, shard = params.plan, params.piece(unit, kind)
    return shard.to(plan.device, non_blocking=True) if plan.kinds[kind].host else shard


def _cast(params: Sharded, unit: int, kind: int) -> Tensor:
    """A shard (n / W,) on the device, in the dtype of computation: the shard itself if it is both already."""
    plan, shard = params.plan, _brought(params, unit, kind)
    dtype = plan.kinds[kind].precision.compute
    if dtype == shard.dtype:
        return shard
    axes, like = params.view.axes(kind) or plan.rest(()), shard.new_empty(0, dtype=dtype)
    return primitives.buffer(plan.live_mesh(), axes, shard.numel(), like, lent=False).copy_(shard)


def _gather(params: Sharded, unit: int, kind: int) -> Pending:
    """Start the gather of one flat buffer: (n / W,) on each rank -> (n,)."""
    plan, axes, name = params.plan, params.view.axes(kind), params.plan.units[unit].name
    lent = _wire(plan, kind) is None  # a wire may decode in place
    whole = gather_over(_sent(params, unit, kind), plan.live_mesh(), axes, name, plan.gather, lent=lent)
    if lent:
        return whole
    return whole.then(lambda full: _arrived(plan, axes, unit, kind, full.chunk(plan.num_parts(axes)), encoded=True))


def gather_copies(plan: Plan, unit: int, copies: Mapping[int, Tensor], axes: Axes) -> dict[int, Pending]:
    """Start the gather of a unit's flat buffers from copies that are cut over `axes`: (n / W,) on each rank -> (n,)."""
    if plan.together and len(copies) > 1:
        return _in_one_message(plan, unit, copies, axes, encoded=False)
    mesh, name = plan.live_mesh(), plan.units[unit].name
    return {kind: gather_over(copy, mesh, axes, name, plan.gather, lent=True) for kind, copy in copies.items()}


def _together(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    """One gather for all kinds of a unit, as bytes."""
    sent = {kind: _sent(params, unit, kind) for kind in kinds}
    return _in_one_message(params.plan, unit, sent, params.view.over, encoded=params.plan.param_wire is not None)


def _in_one_message(plan: Plan, unit: int, sent: Mapping[int, Tensor], axes: Axes, encoded: bool) -> dict[int, Pending]:
    """Start one gather of what this rank sends of several kinds; `encoded` says whether the plan's wire encoded it."""
    kinds, name = list(sent), plan.units[unit].name
    packed = pack(*sent.values())  # (bytes,), of the same length on every rank
    # not lent if there is a wire, which may decode in place
    whole = gather_over(packed, plan.live_mesh(), axes, name, plan.gather, lent=not encoded)
    sizes_of_kinds = [(x.dtype, x.numel()) for x in sent.values()]
    buffers = dict[int, Tensor]()

    def split(full: Tensor) -> Tensor:
        rows = [unpack(data, *sizes_of_kinds) for data in full.chunk(plan.num_parts(axes))]  # one for each rank
        for kind, parts in zip(kinds, zip(*rows, strict=True), strict=True):
            buffers[kind] = _arrived(plan, axes, unit, kind, parts, encoded)
        return buffers[kinds[0]]

    def after(kind: int) -> Pending:
        return Pending(None, lambda _: buffers[kind])

    # the message belongs to the first kind; the tape waits for that before it waits for the others
    return {kinds[0]: whole.then(split)} | {kind: after(kind) for kind in kinds[1:]}


def _wire(plan: Plan, kind: int) -> Wire | None:
    return plan.param_wire if plan.kinds[kind].dtype.is_floating_point else None


def _sent(params: Sharded, unit: int, kind: int) -> Tensor:
    """What this rank sends of its shard: cast, or encoded by the plan's `param_wire`."""
    plan, axes, wire = params.plan, params.view.axes(kind), _wire(params.plan, kind)
    if wire is None:
        return _cast(params, unit, kind)
    lengths = sizes(plan, unit, kind, plan.num_parts(axes), plan.index(axes))
    # the elements between leaves may be anything, NaN too, and a wire has one scale for several elements
    return wire.encode(cleared_outside(_brought(params, unit, kind), _filled(params, unit, kind)), lengths)


def _arrived(plan: Plan, axes: Axes, unit: int, kind: int, parts: Sequence[Tensor], encoded: bool) -> Tensor:
    """The flat buffer (n,) made of what every rank along `axes` sent."""
    wire = _wire(plan, kind) if encoded else None
    like = parts[0].new_empty(0, dtype=plan.kinds[kind].precision.compute)
    out = primitives.buffer(plan.live_mesh(), axes, plan.units[unit].lengths[kind], like, lent=False)
    for number, (part, data) in enumerate(zip(out.chunk(len(parts)), parts, strict=True)):  # (n / W,) each
        part.copy_(data if wire is None else _decode(wire, data, sizes(plan, unit, kind, len(parts), number)))
    return out


def _decode(wire: Wire, data: Tensor, lengths: Sequence[int]) -> Tensor:
    """The elements of leaves with these lengths. ValueError if the wire gives another number of them."""
    out, numel = wire.decode(data, lengths), sum(lengths)
    if out.shape != (numel,):
        raise ValueError(f"{wire}: decode gave {list(out.shape)}, expected the {numel} elements that were encoded")
    return out


def sizes(plan: Plan, unit: int, kind: int, num_parts: int, part: int) -> list[int]:
    """The length of each leaf, with the padding after it, inside one of `num_parts` equal parts of a flat buffer."""
    numel = plan.units[unit].lengths[kind] // num_parts
    begin, end = part * numel, (part + 1) * numel
    starts = [slot.start for slot in plan.places[unit, kind]]
    # a leaf and the padding after it end where the next leaf starts; a leaf outside the part has length 0
    edges = [min(max(edge, begin), end) for edge in (0, *starts[1:], plan.units[unit].lengths[kind])]
    return [high - low for low, high in pairwise(edges)]


class Reducer:
    """The reductions of one backward into `reduced`; what they have in common is worked out once.

    A wire with feedback adds `lost` to the gradients, and writes to it, in place, what it does not send. The sum is not
    taken over the axes `later`: `reduce_rest` does that.
    """

    def __init__(self, reduced: Sharded, by: Reduction, lost: Lost, later: Axes):
        self._reduced, self._by, self._lost, self._later = reduced, by, lost, later
        self._parts, self._rows, self._units = schedule(reduced.view).parts, reduced.tensors, reduced.plan.units
        self._routes = {kind: _route(reduced, kind, by, later) for kind in reduced.view.kinds}

    def buffer(self, unit: int, kind: int) -> Tensor:
        """A flat buffer (n,) for a unit's gradients before they are reduced."""
        route, numel = self._routes[kind], self._parts[unit, kind].numel
        return route.like.new_empty(numel) if route.room is None else route.room(numel, route.like, route.lent)

    def start(self, unit: int, kind: int, flat: Tensor) -> Pending:
        """Start the sum over ranks of a filled buffer (n,), into this rank's interval of `reduced`, (n / W,)."""
        route = self._routes[kind]
        if route.collective is None:
            return reduce(flat, self._reduced, unit, kind, self._by, self._lost, self._later)
        # `Sums` has no rows, but makes pieces
        out = self._parts[unit, kind].of(self._rows) if self._rows else self._reduced.piece(unit, kind)
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


def _route(reduced: Sharded, kind: int, by: Reduction, later: Axes) -> _Route:
    plan, axes, mesh = reduced.plan, reduced.view.axes(kind), reduced.plan.live_mesh()
    like = torch.empty(0, dtype=buffer_dtype(plan, kind), device=plan.device)
    lent = plan.grad_wire is None and only_reads(by)
    # the first axis that the buffer is sent over: the mesh may allocate it where peers can read
    room = next((primitives.along(mesh, axis).empty for axis in axes + plan.rest(axes)), None)
    summed = axes + plan.rest(axes + later)
    several = _several(plan, summed) or summed[:1]
    special = plan.grad_wire or plan.kinds[kind].host or _is_split(plan, kind) or hasattr(by, "after")
    if special or len(several) != 1:
        return _Route(like, room, lent, None, None, None)
    collective = by.reduce_scatter if several[0] in axes else by.all_reduce
    sent = None if isinstance(by, TreeSums) else plan.kinds[kind].precision.reduce  # sums travel in their own dtype
    return _Route(like, room, lent, collective, primitives.along(mesh, several[0]), sent)


def reduce(flat: Tensor, reduced: Sharded, unit: int, kind: int, by: Reduction, lost: Lost, later: Axes) -> Pending:
    """Start the sum over ranks of a flat buffer of gradients (n,), into this rank's interval of `reduced`, (n / W,).

    `by`, `lost` and `later` are as of `Reducer`.
    """
    plan, out = reduced.plan, _landing(reduced, unit, kind)
    if plan.grad_wire is not None and plan.axes and flat.is_floating_point():
        pending = _reduce_encoded(flat, reduced, unit, kind, out, by, lost, later)
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
    flat: Tensor, reduced: Sharded, unit: int, kind: int, out: Tensor, by: Reduction, lost: Lost, later: Axes
) -> Pending:
    """Start the sum of (n,) into `out`, (n / W,), encoded by the plan's `grad_wire` along one axis."""
    plan, axes = reduced.plan, reduced.view.axes(kind)
    mesh, name, wire = plan.live_mesh(), plan.units[unit].name, plan.grad_wire
    other_axes = plan.rest(axes + later)
    assert wire is not None  # `reduce` has looked
    if wire.feedback and not isinstance(lost, Sharded):
        raise ValueError(f"{wire} keeps what it loses in the state of a step: use it with train_step")
    # encoded along one axis: the first that gradients are cut over, else the longest
    axis = _first(plan, axes) if axes else max(other_axes, key=dict(plan.axes).__getitem__)
    ranks = primitives.along(mesh, axis)
    lengths = [sizes(plan, unit, kind, ranks.size, part) for part in range(ranks.size)]  # of each rank's part
    sends = _encoded(wire, flat, lengths, lost.piece(unit, kind) if isinstance(lost, Sharded) else None)
    added = primitives.scatter(sends, ranks, lambda received: _added(wire, received, lengths[ranks.rank]), name)
    # a sum travels on in its own dtype, not encoded again, along the other axes of several ranks
    if axes:
        further, other_axes = (_several(plan, names) for names in (axes[axes.index(axis) + 1 :], other_axes))
        return added.then(lambda part: reduce_over(part, mesh, further, other_axes, name, out, by))
    # every rank needs the whole sum: what `scatter` has cut is gathered again before the other axes
    remaining = _several(plan, [other for other in other_axes if other != axis])
    whole = added.then(lambda part: primitives.gather_over(part, mesh, (axis,), name))
    return whole.then(lambda full: reduce_over(full, mesh, (), remaining, name, out, by))


def _unpadded(total: Tensor, reduced: Sharded, unit: int, kind: int) -> Tensor:
    """Set the padding of a rank's interval to zero, in place.

    A wire may decode anything there, and so may a hook return, which unscaling would take for an overflow.
    """
    return clear_outside_(total, _filled(reduced, unit, kind))


def _filled(x: Sharded, unit: int, kind: int) -> list[tuple[int, int]]:
    """The spans [start, end) of leaves in this rank's interval of one unit and kind, in order."""
    return [(start, start + last - first) for _, first, last, start in intervals(x.plan, unit, kind, x.view.over)]


def _first(plan: Plan, axes: Axes) -> str:
    """The first axis of several ranks; the first axis if none has."""
    return next((axis for axis in axes if dict(plan.axes)[axis] > 1), axes[0])


def _several(plan: Plan, axes: Sequence[str]) -> Axes:
    """The axes of more than one rank."""
    return tuple(axis for axis in axes if dict(plan.axes)[axis] > 1)


def _encoded(wire: Wire, flat: Tensor, lengths: Sequence[Sequence[int]], lost: Tensor | None) -> list[Tensor]:
    """What is sent to each rank. With `lost`, that is added first, and what is not sent is written to it."""
    to_send = flat if lost is None else lost + flat  # (n,), a new tensor: a wire may send views of what it is given
    parts = to_send.chunk(len(lengths))  # (n / W,) for each rank
    sends = [wire.encode(part, part_lengths) for part, part_lengths in zip(parts, lengths, strict=True)]
    if lost is not None:
        for lost_part, part, data, part_lengths in zip(lost.chunk(len(lengths)), parts, sends, lengths, strict=True):
            lost_part.copy_(part - _decode(wire, data, part_lengths))
    return sends


def _added(wire: Wire, received: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The sum of what all ranks sent, decoded, in rank order, in float32 at least."""
    first, *others = (_decode(wire, data, lengths) for data in received)  # (n / W,) each
    total = first.to(primitives.sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total
