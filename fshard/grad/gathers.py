"""Gathers of units: what is sent, what stays in memory, and which are under way.

Note [What stays of a unit]
    `Unit.kept` says whether all of a unit's gathered buffers stay, or a copy of them that is cut over some axes, or
    nothing. A copy is made when the unit is gathered in the forward; every later gather of the unit is from the copy,
    over these axes alone: that for the backward, those of a checkpoint that runs again, and a second one in the
    forward. It has the dtype of computation, and values that a wire has decoded already.

    All of a unit stays where its leaves are trainable, until its gradients have come. Of frozen leaves, whose backward
    has no end that the tape could see, only what autograd saves stays. Copies stay until the unit's gradients have
    come and its last saved place was used. Leaves that are whole on every rank are not copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise

from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.reduction import gather_over
from ..comm.wire import Wire, pack, unpack
from ..core.flat import cleared_outside
from ..core.tracing import is_tracing, named
from ..plan.offload import HOST
from ..plan.plan import Plan
from ..sharding.schedule import Entry, Part
from ..sharding.sharded import Sharded, intervals
from .unit import Buffers, Unit


def is_buffer(params: Sharded, kind: int, copied: bool) -> bool:
    """Whether leaves of a kind come in buffers of their own; else they are views of the parameters themselves.

    With `copied` so do those that are cut over axes of one rank each, of which this rank has all.
    """
    row = params.plan.kinds[kind]
    is_cut = copied and bool(params.view.axes(kind))
    return is_cut or _travels(params, kind) or row.host or row.precision.compute != row.dtype


def _travels(params: Sharded, kind: int) -> bool:
    """Whether leaves of a kind are gathered; by a wire, or by an object of the user's, on one rank, too."""
    plan, axes = params.plan, params.view.axes(kind)
    return bool(several(plan, axes)) or bool(axes and (plan.gather or _wire(plan, kind)))


def stages(plan: Plan, axes: Axes) -> int:
    """The number of stages of a gather over some axes: one for each that has several ranks, at least one."""
    return max(1, sum(dict(plan.axes)[axis] > 1 for axis in axes))


class Gathers:
    """The gathers of one value of the parameters; what they have in common is worked out once.

    `copied` is as of `is_buffer`.
    """

    def __init__(self, params: Sharded, copied: bool):
        plan, axes = params.plan, several(params.plan, params.view.over)
        self._params, self._rows, self._copied = params, params.tensors, copied
        plain = not (plan.gather or plan.param_wire or plan.together or any(kind.host for kind in plan.kinds))
        # whether each kind of a unit is one collective, or none, after a cast at most
        self._is_plain = plain and len(axes) <= 1
        self._ranks = primitives.along(plan.live_mesh(), axes[0]) if self._is_plain and axes else None

    def start(self, entry: Entry, kept: Collection[int]) -> dict[int, Pending]:
        """Start the gather of a unit's flat buffers, except those of kinds in `kept`: on the device, in the dtype of
        computation, by kind."""
        if kept or not self._is_plain:
            kinds = [part.kind for part in entry.parts if part.kind not in kept]
            return _brought_up(self._params, entry.unit, kinds, self._copied)
        return {part.kind: self._start(entry, part) for part in entry.parts}

    def _start(self, entry: Entry, part: Part) -> Pending:
        shard, ranks = part.of(self._rows), self._ranks  # (n / W,)
        if ranks is None or not (part.axes and part.numel):
            needs_more = self._copied or part.cast is not None
            return _have_whole(self._params, entry.unit, part.kind, self._copied) if needs_more else arrived(shard)
        if part.cast is not None:
            like = shard.new_empty(0, dtype=part.cast)
            shard = ranks.empty(shard.numel(), like, lent=False).copy_(shard)
        return primitives.all_gather(shard, ranks, entry.name, lent=True)


def _brought_up(params: Sharded, unit: int, kinds: Sequence[int], copied: bool) -> dict[int, Pending]:
    """Start the gathers of some kinds of a unit; shards in host memory go up to the device beside the computation."""
    plan = params.plan
    if not any(plan.kinds[kind].host for kind in kinds):
        return _gathers(params, unit, kinds, copied)
    up = plan.crossings.up
    with up.ahead():
        started = _gathers(params, unit, kinds, copied)
    return {kind: up.joined(pending) for kind, pending in started.items()}


def _gathers(params: Sharded, unit: int, kinds: Sequence[int], copied: bool) -> dict[int, Pending]:
    plan = params.plan
    sent = [kind for kind in kinds if _travels(params, kind) and plan.units[unit].lengths[kind]]
    whole = {kind: _have_whole(params, unit, kind, copied) for kind in kinds if kind not in sent}
    if plan.together and len(sent) > 1:
        return whole | _together(params, unit, sent)
    return whole | {kind: _gather(params, unit, kind) for kind in sent}


def _have_whole(params: Sharded, unit: int, kind: int, copied: bool) -> Pending:
    """The flat buffer of leaves that this rank has whole: nothing is sent."""
    full = _cast(params, unit, kind)
    is_view = not is_buffer(params, kind, copied=False)
    return arrived(full.clone() if copied and is_view and params.view.axes(kind) else full)


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
    whole = _gathered_over(plan, _sent(params, unit, kind), axes, name, lent)
    if lent:
        return whole
    return whole.then(lambda full: _arrived(plan, axes, unit, kind, full.chunk(plan.num_parts(axes)), encoded=True))


def gather_copies(plan: Plan, unit: int, copies: Mapping[int, Tensor], axes: Axes) -> dict[int, Pending]:
    """Start the gather of a unit's flat buffers from copies that are cut over `axes`: (n / W,) on each rank -> (n,)."""
    if plan.together and len(copies) > 1:
        return _in_one_message(plan, unit, copies, axes, encoded=False)
    name = plan.units[unit].name
    return {kind: _gathered_over(plan, copy, axes, name, lent=True) for kind, copy in copies.items()}


def _gathered_over(plan: Plan, x: Tensor, axes: Axes, name: str, lent: bool) -> Pending:
    """Start a gather over axes: (n / W,) on each rank -> (n,). Along an axis of one rank only the user's own runs."""
    needed = axes if plan.gather else several(plan, axes)
    return gather_over(x, plan.live_mesh(), needed, name, plan.gather, lent=lent)


def _together(params: Sharded, unit: int, kinds: Sequence[int]) -> dict[int, Pending]:
    """One gather for all kinds of a unit, as bytes."""
    sent = {kind: _sent(params, unit, kind) for kind in kinds}
    return _in_one_message(params.plan, unit, sent, params.view.over, encoded=params.plan.param_wire is not None)


def _in_one_message(plan: Plan, unit: int, sent: Mapping[int, Tensor], axes: Axes, encoded: bool) -> dict[int, Pending]:
    """Start one gather of what this rank sends of several kinds; `encoded` says whether the plan's wire encoded it."""
    kinds, name = list(sent), plan.units[unit].name
    packed = pack(*sent.values())  # (bytes,), of the same length on every rank
    # not lent if there is a wire, which may decode in place
    whole = _gathered_over(plan, packed, axes, name, lent=not encoded)
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
    # the elements between leaves are zeros unless a user's function of elements made NaN of those, and a wire has one
    # scale for several elements
    return wire.encode(cleared_outside(_brought(params, unit, kind), filled(params, unit, kind)), lengths)


def _arrived(plan: Plan, axes: Axes, unit: int, kind: int, parts: Sequence[Tensor], encoded: bool) -> Tensor:
    """The flat buffer (n,) made of what every rank along `axes` sent."""
    wire = _wire(plan, kind) if encoded else None
    like = parts[0].new_empty(0, dtype=plan.kinds[kind].precision.compute)
    out = primitives.buffer(plan.live_mesh(), axes, plan.units[unit].lengths[kind], like, lent=False)
    for number, (part, data) in enumerate(zip(out.chunk(len(parts)), parts, strict=True)):  # (n / W,) each
        part.copy_(data if wire is None else decode(wire, data, sizes(plan, unit, kind, len(parts), number)))
    return out


def decode(wire: Wire, data: Tensor, lengths: Sequence[int]) -> Tensor:
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


def filled(x: Sharded, unit: int, kind: int) -> list[tuple[int, int]]:
    """The spans [start, end) of leaves in this rank's interval of one unit and kind, in order."""
    return [(start, start + last - first) for _, first, last, start in intervals(x.plan, unit, kind, x.view.over)]


def several(plan: Plan, axes: Sequence[str]) -> Axes:
    """The axes of more than one rank."""
    return tuple(axis for axis in axes if dict(plan.axes)[axis] > 1)


class Arrivals:
    """The gathers of one value of the parameters, of a unit from what was kept of it if there is anything.

    A gather has a stage for each axis. With several stages, one unit more is under way for each, one stage behind the
    unit before it. On an accelerator a stream beside the computation waits for a stage, and starts the next one. What
    was sent is kept until the computation has waited for that stream. `copied` is as of `is_buffer`.
    """

    def __init__(self, params: Sharded, units: Mapping[int, Unit], copied: bool):
        self._plan, self._units, self._gathers = params.plan, units, Gathers(params, copied)
        self._ahead = params.plan.ahead
        self._stepped: list[Pending] = []  # what may still be sent of earlier stages
        self.stages = stages(params.plan, params.view.over)  # of a gather
        self.most = self._ahead.most(self.stages)  # units whose gathers are under way at once
        has_streams = self.stages > 1 and params.plan.device != HOST and not is_tracing()
        self._side = params.plan.crossings.stages if has_streams else None

    def keep(self, unit: Unit) -> None:
        """Keep of a unit's buffers what `unit.keeps` says; what is kept already stays."""
        assert unit.buffers is not None
        if unit.keeps:
            cut = [part.kind for part in unit.entry.parts if part.axes and part.numel]
            unit.kept = {kind: self._copy(unit.buffers[kind], unit.keeps) for kind in cut}
        else:
            unit.kept = unit.buffers

    def _copy(self, full: Tensor, axes: Axes) -> Tensor:
        """This rank's part (n / W,) of a buffer (n,)."""
        part = full.chunk(self._plan.num_parts(axes))[self._plan.index(axes)]
        return primitives.buffer(self._plan.live_mesh(), axes, part.numel(), part, lent=False).copy_(part)

    def _from_kept(self, unit: Unit) -> dict[int, Pending]:
        """Start the gathers of a unit's buffers from what was kept, by kind; none if nothing was."""
        if unit.kept is None:
            return {}
        if unit.keeps:
            return gather_copies(self._plan, unit.number, unit.kept, unit.keeps)
        return {kind: arrived(full) for kind, full in unit.kept.items()}

    def _stages(self, unit: Unit) -> int:
        """The number of stages of a unit's gather, one for each axis; none if all of it was kept."""
        if unit.kept is None:
            return self.stages
        return stages(self._plan, unit.keeps) if unit.keeps else 0

    def start(self, unit: Unit) -> None:
        """Start the gather of a unit, unless it is under way."""
        if unit.coming is None:
            kept = self._from_kept(unit)
            started = self._gathers.start(unit.entry, kept)
            unit.coming = started | kept if kept else started
            unit.stages = 1

    def ahead(self, current: Unit | None, following: Iterable[int]) -> None:
        """Gather as many of the units that follow on the current one as the plan says.

        Gathers under way go on to their next stage, the others start.
        """
        units = self._ahead.gathers(None if current is None else current.number, following, self.stages)
        last = max(0, len(units) - self.stages)  # of those whose stages may all start; each after it is one behind
        for number, unit in enumerate(self._units[n] for n in units):
            stages = self._stages(unit)
            if number > last:
                stages -= number - last
            if unit.coming is None and stages > 0:
                self.start(unit)
            elif unit.coming is not None and unit.stages < stages:
                self._advance(unit)

    def _advance(self, unit: Unit) -> None:
        """Start the next stage of the gather of a unit."""
        older = unit.coming
        assert older is not None
        unit.stages += 1
        if self._side is not None:
            self._stepped += older.values()
        with nullcontext() if self._side is None else self._side.ahead():
            unit.coming = {kind: pending.advance() for kind, pending in older.items()}

    def _join(self) -> None:
        """Make the computation wait for the stages that have ended, and drop what they sent."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()

    def take(self, unit: Unit) -> Buffers:
        """Wait for the gather of a unit, which starts now if it is not under way."""
        unit.check("gather")
        self.start(unit)
        coming, unit.coming = unit.coming, None
        assert coming is not None
        with named("wait", unit.entry.name):
            self._join()
            return {kind: pending.wait() for kind, pending in coming.items()}

    def drop(self) -> None:
        """Wait for the gathers that were started and not used."""
        under_way = [unit for unit in self._units.values() if unit.coming is not None]
        try:
            for unit in under_way:
                for pending in (unit.coming or {}).values():
                    pending.drop()
            self._join()
        finally:
            self._stepped.clear()
            for unit in under_way:
                unit.coming = None
