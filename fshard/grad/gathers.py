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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise

from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.wire import Wire, pack, unpack
from ..core.flat import cleared_outside
from ..core.storage import address
from ..core.tracing import is_tracing, named
from ..layout.rows import COPIES, Rule, reshard
from ..plan.offload import HOST
from ..plan.plan import Plan
from ..sharding.schedule import Entry, Part
from ..sharding.sharded import Sharded, intervals
from .unit import Buffers, Unit


def is_buffer(params: Sharded, kind: int, copied: bool) -> bool:
    """Whether leaves of a kind come in buffers of their own; else they are views of the parameters themselves.

    With `copied` so do all that train: an optimizer writes to the parameters while the backward runs.
    """
    row = params.plan.kinds[kind]
    return (copied and row.trainable) or _travels(params, kind) or row.host or row.precision.compute != row.dtype


def _travels(params: Sharded, kind: int) -> bool:
    """Whether leaves of a kind are gathered; by a wire, or by an object of the user's, on one rank, too."""
    plan, axes = params.plan, params.view.axes(kind)
    return bool(several(plan, axes)) or bool(axes and (plan.gather or _wire(plan, kind)))


def stages(plan: Plan, axes: Axes) -> int:
    """The number of stages of a gather over some axes: one for each that has several ranks, at least one."""
    return max(1, sum(dict(plan.axes)[axis] > 1 for axis in axes))


class Gathers:
    """How the units of one value of the parameters are gathered. `copied` is as in `is_buffer`."""

    def __init__(self, params: Sharded, copied: bool):
        plan, axes = params.plan, several(params.plan, params.view.over)
        self._params, self._plan, self._rows, self._copied = params, plan, params.tensors, copied
        # whether each kind of a unit is one collective, or none, after a cast at most
        special = plan.gather or plan.param_wire or plan.together or any(kind.host for kind in plan.kinds)
        self._is_plain = not special and len(axes) <= 1
        self._ranks = primitives.along(plan.live_mesh(), axes[0]) if self._is_plain and axes else None

    def start(self, entry: Entry, parts: Sequence[Part]) -> dict[int, Pending]:
        """Start the gathers of some parts of a unit: on the device, in the dtype of computation, by kind."""
        if self._is_plain:
            return {part.kind: self._plain(entry.name, part) for part in parts}
        if not any(self._plan.kinds[part.kind].host for part in parts):
            return self._each(entry, parts)
        up = self._plan.crossings.up  # shards in host memory go to the device beside the computation
        with up.ahead():
            started = self._each(entry, parts)
        return {kind: up.joined(pending) for kind, pending in started.items()}

    def _plain(self, name: str, part: Part) -> Pending:
        if self._ranks is None or not (part.axes and part.numel):
            return self._whole(part)
        shard = part.of(self._rows)
        sent = shard if shard.dtype == part.compute else self._cast(part)
        return primitives.all_gather(sent, self._ranks, name, lent=True)

    def _each(self, entry: Entry, parts: Sequence[Part]) -> dict[int, Pending]:
        sent = {part.kind: part for part in parts if part.numel and _travels(self._params, part.kind)}
        whole = {part.kind: self._whole(part) for part in parts if part.kind not in sent}
        if not (self._plan.together and len(sent) > 1):
            return whole | {kind: self._gather(entry, part) for kind, part in sent.items()}
        encoded, messages = self._plan.param_wire is not None, {k: self._sent(entry, part) for k, part in sent.items()}
        return whole | self._in_one_message(entry, messages, self._params.view.over, encoded)

    def _whole(self, part: Part) -> Pending:
        """The flat buffer of leaves that this rank has whole: nothing is sent."""
        full = self._cast(part)
        is_view = self._copied and part.trainable and not is_buffer(self._params, part.kind, copied=False)
        return arrived(full.clone() if is_view else full)

    def _brought(self, part: Part) -> Tensor:
        """A shard (n / W,) on the device; from host memory it is copied without waiting."""
        shard = part.of(self._rows)
        return shard.to(self._plan.device, non_blocking=True) if self._plan.kinds[part.kind].host else shard

    def _cast(self, part: Part) -> Tensor:
        """A shard (n / W,) on the device, in the dtype of computation: the shard itself if it is both already."""
        shard = self._brought(part)
        if shard.dtype == part.compute:
            return shard
        axes, like = part.axes or self._plan.rest(()), shard.new_empty(0, dtype=part.compute)
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), like, lent=False).copy_(shard)

    def _sent(self, entry: Entry, part: Part) -> Tensor:
        """What this rank sends of its shard: cast, or encoded by the plan's `param_wire`."""
        plan, wire = self._plan, _wire(self._plan, part.kind)
        if wire is None:
            return self._cast(part)
        lengths = sizes(plan, entry.unit, part.kind, plan.num_parts(part.axes), plan.index(part.axes))
        # the elements between leaves are zeros unless a user's function of elements made NaN of those, and a wire has
        # one scale for several elements
        return wire.encode(cleared_outside(self._brought(part), filled(self._params, entry.unit, part.kind)), lengths)

    def _gather(self, entry: Entry, part: Part) -> Pending:
        """Start the gather of one flat buffer: (n / W,) on each rank -> (n,)."""
        lent = _wire(self._plan, part.kind) is None  # a wire may decode in place
        whole = self._over(self._sent(entry, part), part.axes, entry.name, lent)
        if self._copied or not lent:
            whole = whole.then(partial(self._apart, part))
        if lent:
            return whole
        num = self._plan.num_parts(part.axes)
        return whole.then(lambda full: self._arrived(entry, part.kind, part.axes, full.chunk(num), encoded=True))

    def _apart(self, part: Part, full: Tensor) -> Tensor:
        """A buffer beside the parameters: on one rank a gather, or the user's, may give the shard itself."""
        return full.clone() if address(full) == address(self._rows[part.row]) else full

    def from_copies(self, entry: Entry, copies: Mapping[int, Tensor], axes: Axes) -> dict[int, Pending]:
        """Start the gathers of a unit from copies that are cut over `axes`, by kind: (n / W,) on each rank -> (n,)."""
        if self._plan.together and len(copies) > 1:
            return self._in_one_message(entry, copies, axes, encoded=False)
        return {kind: self._over(copy, axes, entry.name, lent=True) for kind, copy in copies.items()}

    def _over(self, x: Tensor, axes: Axes, name: str, lent: bool) -> Pending:
        """Start a gather over axes: (n / W,) on each rank -> (n,). Along an axis of one rank only the user's runs."""
        plan, along = self._plan, axes if self._plan.gather else None
        return reshard(x, Rule(axes), COPIES, plan.live_mesh(), name, gather=plan.gather, along=along, lent=lent)

    def _in_one_message(
        self, entry: Entry, sent: Mapping[int, Tensor], axes: Axes, encoded: bool
    ) -> dict[int, Pending]:
        """Start one gather, as bytes, of what this rank sends of several kinds; `encoded`: by the plan's wire."""
        kinds, packed = list(sent), pack(*sent.values())  # (bytes,), of the same length on every rank
        # not lent if there is a wire, which may decode in place
        whole = self._over(packed, axes, entry.name, lent=not encoded)
        sizes_of_kinds = [(x.dtype, x.numel()) for x in sent.values()]
        buffers = dict[int, Tensor]()

        def split(full: Tensor) -> Tensor:
            rows = [unpack(data, *sizes_of_kinds) for data in full.chunk(self._plan.num_parts(axes))]  # of each rank
            for kind, parts in zip(kinds, zip(*rows, strict=True), strict=True):
                buffers[kind] = self._arrived(entry, kind, axes, parts, encoded)
            return buffers[kinds[0]]

        def after(kind: int) -> Pending:
            return Pending(None, lambda _: buffers[kind])

        # the message belongs to the first kind; the tape waits for that before it waits for the others
        return {kinds[0]: whole.then(split)} | {kind: after(kind) for kind in kinds[1:]}

    def _arrived(self, entry: Entry, kind: int, axes: Axes, parts: Sequence[Tensor], encoded: bool) -> Tensor:
        """The flat buffer (n,) made of what every rank along `axes` sent."""
        plan, wire = self._plan, _wire(self._plan, kind) if encoded else None
        like = parts[0].new_empty(0, dtype=plan.kinds[kind].precision.compute)
        out = primitives.buffer(plan.live_mesh(), axes, plan.units[entry.unit].lengths[kind], like, lent=False)
        for number, (part, data) in enumerate(zip(out.chunk(len(parts)), parts, strict=True)):  # (n / W,) each
            lengths = [] if wire is None else sizes(plan, entry.unit, kind, len(parts), number)
            part.copy_(data if wire is None else decode(wire, data, lengths))
        return out


def arrived(full: Tensor) -> Pending:
    """A buffer that this rank has, as a gather that has ended."""
    return Pending(None, lambda _: full)


def _wire(plan: Plan, kind: int) -> Wire | None:
    return plan.param_wire if plan.kinds[kind].dtype.is_floating_point else None


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
    """Gathers of one `Sharded` in flight; a unit that a copy was kept of is gathered from the copy.

    A gather has a stage for each axis. With several stages, one unit more is under way for each, one stage behind the
    unit before it. On an accelerator a stream beside the computation waits for a stage, and starts the next one. What
    was sent is kept until the computation has waited for that stream. `copied` is as in `is_buffer`.
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
            unit.keep({kind: self._copy(unit.buffers[kind], kind, unit.keeps) for kind in cut})
        else:
            unit.keep(unit.buffers)

    def _copy(self, full: Tensor, kind: int, axes: Axes) -> Tensor:
        """This rank's part (n / W,) of a buffer (n,)."""
        part = self._plan.within(full, kind, axes)
        return primitives.buffer(self._plan.live_mesh(), axes, part.numel(), part, lent=False).copy_(part)

    def _stages(self, unit: Unit) -> int:
        """The number of stages of a unit's gather, one for each axis; none if all of it was kept."""
        if unit.kept is None:
            return self.stages
        return stages(self._plan, unit.keeps) if unit.keeps else 0

    def start(self, unit: Unit) -> None:
        """Start the gather of a unit, from what was kept of it if anything was, unless it is under way."""
        if unit.coming is not None:
            return
        entry, kept, parts = unit.entry, unit.kept, unit.entry.parts
        if kept is None:
            unit.coming = self._gathers.start(entry, parts)
        elif unit.keeps:
            copied = self._gathers.from_copies(entry, kept, unit.keeps)
            unit.coming = self._gathers.start(entry, [part for part in parts if part.kind not in kept]) | copied
        else:
            unit.coming = {kind: arrived(full) for kind, full in kept.items()}
        unit.stages = 1

    def ahead(self, current: Unit | None, following: Iterable[int]) -> None:
        """Gather as many of the units that follow on the current one as the plan says.

        Gathers under way go on to their next stage, the others start.
        """
        if self.most == 1:  # as where units are equal
            for number in islice(following, 1):
                if self._stages(unit := self._units[number]):
                    self.start(unit)
            return
        units = self._ahead.gathers(None if current is None else current.number, following, self.stages)
        last = max(0, len(units) - self.stages)  # of those whose stages may all start; each after it is one behind
        for place, number in enumerate(units):
            unit = self._units[number]
            stages = self._stages(unit) - max(0, place - last)
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
