"""A unit's shards to all ranks, and its gradients back: cast, encoded, gathered; encoded, exchanged, summed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes, num_ranks
from ..comm.ranks import Pending
from ..comm.reduction import Reduction, Tree, gather_over, reduce_over
from ..comm.wire import Wire, pack, unpack
from ..core.flat import clear_outside_, cleared_outside
from . import offload
from .plan import Plan
from .sharded import Sharded, intervals


def gather(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    """A unit's flat buffers, by kind, in the dtypes they are computed with: on the device, beside the computation."""
    plan = params.plan
    if not any(plan.kinds[kind].host for kind in kinds):
        return _gathers(params, unit, kinds)
    up = plan.crossings.up
    with up.ahead():
        found = _gathers(params, unit, kinds)
    return {kind: up.joined(pending) for kind, pending in found.items()}


def _gathers(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    plan = params.plan
    far = [kind for kind in kinds if params.view.axes(kind) and plan.units[unit].lengths[kind]]
    if plan.together and len(far) > 1:
        return {kind: _near(params, unit, kind) for kind in kinds if kind not in far} | _together(params, unit, far)
    return {kind: _gather(params, unit, kind) if kind in far else _near(params, unit, kind) for kind in kinds}


def _near(params: Sharded, unit: int, kind: int) -> Pending:
    """Of what every rank has whole."""
    shard = _cast(params, unit, kind)
    return Pending(None, lambda _: shard)


def _brought(params: Sharded, unit: int, kind: int) -> Tensor:
    """A shard where it is computed with."""
    plan, shard = params.plan, params.piece(unit, kind)
    return shard.to(plan.device, non_blocking=True) if plan.kinds[kind].host else shard


def _cast(params: Sharded, unit: int, kind: int) -> Tensor:
    plan, shard = params.plan, _brought(params, unit, kind)
    dtype = plan.kinds[kind].precision.compute
    if dtype == shard.dtype:
        return shard
    ways, like = params.view.axes(kind) or plan.rest(()), shard.new_empty(0, dtype=dtype)
    return primitives.buffer(plan.live_mesh(), ways, shard.numel(), like, lent=False).copy_(shard)


def _gather(params: Sharded, unit: int, kind: int) -> Pending:
    plan, axes, name = params.plan, params.view.axes(kind), params.plan.units[unit].name
    whole = gather_over(_sent(params, unit, kind), plan.live_mesh(), axes, name, plan.gather)
    if _wire(plan, kind) is None:
        return whole
    return whole.then(lambda full: _arrived(params, unit, kind, full.chunk(plan.num_parts(axes))))


def _together(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    """All kinds in one message, as bytes."""
    plan, axes, name = params.plan, params.view.over, params.plan.units[unit].name
    sent = {kind: _sent(params, unit, kind) for kind in kinds}
    whole = gather_over(pack(*sent.values()), plan.live_mesh(), axes, name, plan.gather)
    held = [(x.dtype, x.numel()) for x in sent.values()]
    found = dict[int, Tensor]()

    def arrived(full: Tensor) -> Tensor:
        rows = [unpack(data, *held) for data in full.chunk(plan.num_parts(axes))]
        for number, parts in zip(kinds, zip(*rows, strict=True), strict=True):
            found[number] = _arrived(params, unit, number, parts)
        return found[kinds[0]]

    def after(kind: int) -> Pending:
        return Pending(None, lambda _: found[kind])

    # the message belongs to the first of them, which is waited for before the others are
    return {kinds[0]: whole.then(arrived)} | {kind: after(kind) for kind in kinds[1:]}


def _wire(plan: Plan, kind: int) -> Wire | None:
    return plan.param_wire if plan.kinds[kind].dtype.is_floating_point else None


def _sent(params: Sharded, unit: int, kind: int) -> Tensor:
    """What a rank sends of its shard."""
    plan, axes, wire = params.plan, params.view.axes(kind), _wire(params.plan, kind)
    if wire is None:
        return _cast(params, unit, kind)
    own = sizes(plan, unit, kind, plan.num_parts(axes), plan.index(axes))
    # what lies between leaves may be anything, and a wire's scales are of several elements
    return wire.encode(cleared_outside(_brought(params, unit, kind), _filled(params, unit, kind)), own)


def _arrived(params: Sharded, unit: int, kind: int, parts: Sequence[Tensor]) -> Tensor:
    """The flat buffer of what all ranks have sent."""
    plan, wire = params.plan, _wire(params.plan, kind)
    like = parts[0].new_empty(0, dtype=plan.kinds[kind].precision.compute)
    out = primitives.buffer(plan.live_mesh(), params.view.axes(kind), plan.units[unit].lengths[kind], like, lent=False)
    for part, (to, data) in enumerate(zip(out.chunk(len(parts)), parts, strict=True)):
        to.copy_(data if wire is None else _decode(wire, data, sizes(plan, unit, kind, len(parts), part)))
    return out


def _decode(wire: Wire, data: Tensor, own: Sequence[int]) -> Tensor:
    found = wire.decode(data, own)
    if found.shape != (sum(own),):
        raise ValueError(f"{wire}: decode gave {list(found.shape)}, expected the {sum(own)} elements that were encoded")
    return found


def sizes(plan: Plan, unit: int, kind: int, num_parts: int, part: int) -> list[int]:
    """The elements of each leaf in one of several equal parts of a flat buffer, what follows it included."""
    numel = plan.units[unit].lengths[kind] // num_parts
    begin, end = part * numel, (part + 1) * numel
    starts = [slot.start for slot in plan.places[unit, kind]]
    edges = [min(max(edge, begin), end) for edge in (0, *starts[1:], plan.units[unit].lengths[kind])]
    return [high - low for low, high in pairwise(edges)]


def reduce(flat: Tensor, reduced: Sharded, unit: int, kind: int, by: Reduction, lost: Any, later: Axes) -> Pending:
    """The sum over all ranks of a flat buffer of gradients, in this rank's interval of `reduced`.

    `lost` is what a wire with feedback has lost so far of this rank's gradients: it is added, and written anew. Nothing
    is reduced over the axes `later` yet (`reduce_rest`).
    """
    plan, out = reduced.plan, _landing(reduced, unit, kind)
    if plan.grad_wire is not None and plan.axes and flat.is_floating_point():
        pending = _reduce_encoded(flat, reduced, unit, kind, out, by, lost, later)
        pending = pending.then(lambda total: _unpadded(total, reduced, unit, kind))
    else:
        pending = _reduce_cast(flat, reduced, unit, kind, out, by, later)
    return _landed(pending, out, reduced, unit, kind, None if later else by)


def nothing(reduced: Sharded, unit: int, kind: int, by: Reduction, later: Axes) -> Pending:
    """The sum of what no rank has a gradient of: zeros, which a hook is given as well."""
    out = _landing(reduced, unit, kind).zero_()
    return _landed(Pending(None, lambda _: out), out, reduced, unit, kind, None if later else by)


def reduce_rest(sums: Sharded, reduced: Sharded, later: Axes, by: Reduction) -> None:
    """What was not reduced over some axes is, into `reduced`: an all-reduce for each unit, all of them at once."""
    plan, started = reduced.plan, list[Pending]()
    for unit, kind in ((u, k) for u in range(len(plan.units)) for k in sums.view.kinds if plan.units[u].lengths[k]):
        x, out = sums.piece(unit, kind).to(plan.device), _landing(reduced, unit, kind)
        pending = reduce_over(x, plan.live_mesh(), (), later, plan.units[unit].name, out, by)
        started.append(_landed(pending, out, reduced, unit, kind, by))
    for pending in started:
        pending.wait()


def _landing(reduced: Sharded, unit: int, kind: int) -> Tensor:
    """Where a sum is written to: this rank's interval, or if that is in host memory a place on the device."""
    row = reduced.piece(unit, kind)
    return offload.landing(row, reduced.plan.device) if reduced.plan.kinds[kind].host else row


def _landed(pending: Pending, out: Tensor, reduced: Sharded, unit: int, kind: int, by: Reduction | None) -> Pending:
    """A sum after the hook of who added it up, in this rank's interval."""
    plan, row, name = reduced.plan, reduced.piece(unit, kind), reduced.plan.units[unit].name
    after = getattr(by, "after", None)
    if after is not None:
        pending = pending.then(lambda total: _unpadded(out.copy_(after(total, name)), reduced, unit, kind))
    return pending.then(lambda total: plan.crossings.down.copied(total, row)) if plan.kinds[kind].host else pending


def buffer_dtype(plan: Plan, kind: int) -> torch.dtype:
    """What gradients that are to be reduced are put together in."""
    precision = plan.kinds[kind].precision
    return torch.float32 if _is_split(plan, kind) else precision.reduce


def _is_split(plan: Plan, kind: int) -> bool:
    """Whether gradients are cast to float16 to be sent, and not before."""
    precision = plan.kinds[kind].precision
    return precision.reduce == torch.float16 and precision.compute != torch.float16


def _reduce_cast(
    flat: Tensor, reduced: Sharded, unit: int, kind: int, out: Tensor, by: Reduction, later: Axes
) -> Pending:
    plan, axes = reduced.plan, reduced.view.axes(kind)
    mesh, rest, name = plan.live_mesh(), plan.rest(axes + later), plan.units[unit].name
    if isinstance(by, Tree):  # nothing is rounded on the way
        return reduce_over(flat, mesh, axes, rest, name, out, by)
    # each rank's gradient was divided by the number of ranks already; times about its root, float16 holds small ones,
    # and sums of large ones, too (a power of two changes no digit)
    factor = 2.0 ** round(math.log2(num_ranks(mesh)) / 2) if _is_split(plan, kind) else 1
    sent = (flat if factor == 1 else flat * factor).to(plan.kinds[kind].precision.reduce)
    pending = reduce_over(sent, mesh, axes, rest, name, out, by)
    return pending if factor == 1 else pending.then(lambda total: total.mul_(1 / factor))


def _reduce_encoded(
    flat: Tensor, reduced: Sharded, unit: int, kind: int, out: Tensor, by: Reduction, lost: Any, later: Axes
) -> Pending:
    plan, axes = reduced.plan, reduced.view.axes(kind)
    mesh, rest, name, wire = plan.live_mesh(), plan.rest(axes + later), plan.units[unit].name, plan.grad_wire
    if wire.feedback and not isinstance(lost, Sharded):
        raise ValueError(f"{wire} keeps what it loses in the state of a step: use it with train_step")
    axis = _first(plan, axes) if axes else max(rest, key=dict(plan.axes).__getitem__)
    ranks = primitives.along(mesh, axis)
    held = [sizes(plan, unit, kind, ranks.size, part) for part in range(ranks.size)]
    sends = _encoded(wire, flat, held, lost.piece(unit, kind) if isinstance(lost, Sharded) else None)
    added = primitives.scatter(sends, ranks, lambda got: _added(wire, got, held[ranks.rank]), name)
    # what was summed travels on as wide as it is, along axes of several ranks: it has been along one
    if axes:
        onward, rest = (_several(plan, names) for names in (axes[axes.index(axis) + 1 :], rest))
        return added.then(lambda part: reduce_over(part, mesh, onward, rest, name, out, by))
    others = _several(plan, [other for other in rest if other != axis])
    whole = added.then(lambda part: primitives.gather_over(part, mesh, (axis,), name))
    return whole.then(lambda full: reduce_over(full, mesh, (), others, name, out, by))


def _unpadded(total: Tensor, reduced: Sharded, unit: int, kind: int) -> Tensor:
    """A rank's interval, in place, with zeros for padding: what a wire decodes there, or a hook makes of it, may be
    anything, and would be unscaled, looked at for overflows, and kept."""
    return clear_outside_(total, _filled(reduced, unit, kind))


def _filled(x: Sharded, unit: int, kind: int) -> list[tuple[int, int]]:
    """Where a rank's interval of one unit and kind holds leaves: from one element up to another, in order."""
    return [(start, start + last - first) for _, first, last, start in intervals(x.plan, unit, kind, x.view.over)]


def _first(plan: Plan, axes: Axes) -> str:
    """The first axis along which anything travels."""
    return next((axis for axis in axes if dict(plan.axes)[axis] > 1), axes[0])


def _several(plan: Plan, axes: Sequence[str]) -> Axes:
    """Those of several ranks."""
    return tuple(axis for axis in axes if dict(plan.axes)[axis] > 1)


def _encoded(wire: Wire, flat: Tensor, held: Sequence[Sequence[int]], lost: Tensor | None) -> list[Tensor]:
    """What is sent to each rank; with `lost`, also of what was lost before, and `lost` is what is not sent now."""
    due = flat if lost is None else lost + flat  # memory of its own: a wire may send views of what it is given
    parts = due.chunk(len(held))
    sends = [wire.encode(x, own) for x, own in zip(parts, held, strict=True)]
    if lost is not None:
        for kept, x, data, own in zip(lost.chunk(len(held)), parts, sends, held, strict=True):
            kept.copy_(x - _decode(wire, data, own))
    return sends


def _added(wire: Wire, received: Sequence[Tensor], own: Sequence[int]) -> Tensor:
    first, *others = (_decode(wire, data, own) for data in received)
    total = first.to(primitives.sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total
