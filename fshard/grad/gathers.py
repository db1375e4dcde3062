"""Gathers of units: what is sent, what stays in memory, and which are under way.

Note [What stays of a unit]
    `Unit.keep_rule`, which `regather=` sets, says whether all of a unit's gathered buffers stay, or a copy of them that
    is cut over some axes, or nothing. A copy is made when the unit is gathered in the forward; every later gather of
    the unit is from the copy, over these axes alone: that for the backward, those of a checkpoint that runs again, and
    a second one in the forward. It has the dtype of computation, and values that a wire has decoded already.

    All of a unit stays where its leaves are trainable, until its gradients have come. Of frozen leaves, whose backward
    has no end that the tape could see, only what autograd saves stays, unless ranks saved different units (Note [One
    order on all ranks] in `chain.py`). Copies stay until the unit's gradients have come and its last saved place was
    used. Leaves that are whole on every rank are not copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice

from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.reduction import Wire
from ..core.storage import address, cleared_outside, pack, unpack
from ..core.tracing import is_tracing, named
from ..layout.row import Row
from ..layout.rules import COPIES, Rule, arrived, reshard
from ..plan.plan import Plan, Slot
from ..sharding.schedule import Entry
from ..sharding.sharded import Sharded
from .unit import Buffers, TapeUnit


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
    return max(1, len(several(plan, axes)))


class Gathers:
    """How the units of one value of the parameters are gathered. `copied` is as in `is_buffer`."""

    def __init__(self, params: Sharded, copied: bool):
        plan, axes = params.plan, several(params.plan, params.view.over)
        self._params, self._plan, self._tensors, self._copied = params, plan, params.tensors, copied
        self._compute = [kind.precision.compute for kind in plan.kinds]
        stored = zip(params.view.kinds, params.tensors, strict=True)
        self._casts = {kind for kind, x in stored if x.dtype != self._compute[kind]}
        # whether each kind of a unit is one collective, or none, after a cast at most
        special = plan.gather or plan.param_wire or plan.together or any(kind.host for kind in plan.kinds)
        self._is_plain = not special and len(axes) <= 1
        self._ranks = primitives.along(plan.live_mesh(), axes[0]) if self._is_plain and axes else None

    def start(self, entry: Entry, rows: Sequence[Row[Slot]]) -> dict[int, Pending]:
        """Start the gathers of some rows of a unit: on the device, in the dtype of computation, by kind."""
        if self._is_plain:
            return {row.kind: self._plain(entry.name, row) for row in rows}
        if not any(self._plan.kinds[row.kind].host for row in rows):
            return self._each(entry, rows)
        up = self._plan.crossings.up  # shards in host memory go to the device beside the computation
        with up.ahead():
            started = self._each(entry, rows)
        return {kind: up.joined(pending) for kind, pending in started.items()}

    def _plain(self, name: str, row: Row[Slot]) -> Pending:
        if self._ranks is None or row.shards == 1 or not row.numel:
            return self._whole(row)
        shard = row.of(self._tensors)
        sent = self._cast(row) if row.kind in self._casts else shard
        return primitives.all_gather(sent, self._ranks, name, lent=True)

    def _each(self, entry: Entry, rows: Sequence[Row[Slot]]) -> dict[int, Pending]:
        sent = {row.kind: row for row in rows if row.numel and _travels(self._params, row.kind)}
        whole = {row.kind: self._whole(row) for row in rows if row.kind not in sent}
        encoded, started = self._plan.param_wire is not None, dict[int, Pending]()
        for over, kinds in _together(self._plan, sent, self._params.view.over):
            if len(kinds) > 1:
                started |= self._in_one_message(entry, {kind: self._sent(sent[kind]) for kind in kinds}, over, encoded)
            else:
                started |= {kind: self._gather(entry, sent[kind]) for kind in kinds}
        return whole | started

    def _whole(self, row: Row[Slot]) -> Pending:
        """The flat buffer of leaves that this rank has whole: nothing is sent."""
        full, kind = self._cast(row), row.kind
        is_view = self._copied and self._plan.kinds[kind].trainable and not is_buffer(self._params, kind, copied=False)
        return arrived(full.clone() if is_view else full)

    def _brought(self, row: Row[Slot]) -> Tensor:
        """A shard (n / W,) on the device; from host memory it is copied without waiting."""
        shard = row.of(self._tensors)
        return shard.to(self._plan.device, non_blocking=True) if self._plan.kinds[row.kind].host else shard

    def _cast(self, row: Row[Slot]) -> Tensor:
        """A shard (n / W,) on the device, in the dtype of computation: the shard itself if it is both already."""
        shard = self._brought(row)
        if row.kind not in self._casts:
            return shard
        axes, like = row.rule.over or self._plan.axis_names, shard.new_empty(0, dtype=self._compute[row.kind])
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), like, lent=False).copy_(shard)

    def _sent(self, row: Row[Slot]) -> Tensor:
        """What this rank sends of its shard: cast, or encoded by the plan's `param_wire`."""
        plan, wire = self._plan, _wire(self._plan, row.kind)
        if wire is None:
            return self._cast(row)
        number = row.rule.number(plan.live_mesh())
        # the elements between leaves are zeros unless a user's function of elements made NaN of those, and a wire has
        # one scale for several elements
        shard = cleared_outside(self._brought(row), row.filled(row.number(plan.live_mesh())))
        return wire.encode(shard, row.lengths(number, row.shards))

    def _gather(self, entry: Entry, row: Row[Slot]) -> Pending:
        """Start the gather of one flat buffer: (n / W,) on each rank -> (n,)."""
        lent = _wire(self._plan, row.kind) is None  # a wire may decode in place
        whole = self._over(self._sent(row), row.rule.over, entry.name, lent)
        if self._copied or not lent:
            whole = whole.then(partial(self._apart, row))
        if lent:
            return whole
        return whole.then(lambda full: self._arrived(row, row.rule.over, full.chunk(row.shards), encoded=True))

    def _apart(self, row: Row[Slot], full: Tensor) -> Tensor:
        """A buffer beside the parameters: on one rank a gather, or the user's, may give the shard itself."""
        return full.clone() if address(full) == address(self._tensors[row.tensor]) else full

    def from_copies(self, entry: Entry, copies: Mapping[int, Tensor], axes: Axes) -> dict[int, Pending]:
        """Start the gathers of a unit from copies that are cut over `axes`, by kind: (n / W,) on each rank -> (n,)."""
        started = dict[int, Pending]()
        for over, kinds in _together(self._plan, copies, axes):
            if len(kinds) > 1:
                started |= self._in_one_message(entry, {kind: copies[kind] for kind in kinds}, over, encoded=False)
            else:
                started |= {kind: self._over(copies[kind], over, entry.name, lent=True) for kind in kinds}
        return started

    def _over(self, x: Tensor, axes: Axes, name: str, lent: bool) -> Pending:
        """Start a gather over axes: (n / W,) on each rank -> (n,). Along an axis of one rank only the user's runs."""
        plan, along = self._plan, axes if self._plan.gather else None
        return reshard(x, Rule(axes), COPIES, plan.live_mesh(), name, gather=plan.gather, along=along, lent=lent)

    def _in_one_message(
        self, entry: Entry, sent: Mapping[int, Tensor], axes: Axes, encoded: bool
    ) -> dict[int, Pending]:
        """Start one gather, as bytes, of what this rank sends of several kinds; `encoded`: by the plan's wire."""
        rows, packed = (
            [row for row in entry.rows if row.kind in sent],
            pack([*sent.values()]),
        )  # (bytes,), on every rank
        # not lent if there is a wire, which may decode in place
        whole = self._over(packed, axes, entry.name, lent=not encoded)
        sizes_of_kinds = [(x.dtype, x.numel()) for x in sent.values()]
        buffers = dict[int, Tensor]()

        def split(full: Tensor) -> Tensor:
            shards = [unpack(data, sizes_of_kinds) for data in full.chunk(self._plan.num_ranks(axes))]  # of each rank
            for row, of_row in zip(rows, zip(*shards, strict=True), strict=True):
                buffers[row.kind] = self._arrived(row, axes, of_row, encoded)
            return buffers[rows[0].kind]

        def after(kind: int) -> Pending:
            return Pending(None, lambda _: buffers[kind])

        # only the first kind waits for the message; the others read what it split
        return {rows[0].kind: whole.then(split)} | {row.kind: after(row.kind) for row in rows[1:]}

    def _arrived(self, row: Row[Slot], axes: Axes, sent: Sequence[Tensor], encoded: bool) -> Tensor:
        """The flat buffer (n,) made of what every rank along `axes` sent."""
        plan, wire = self._plan, _wire(self._plan, row.kind) if encoded else None
        like = sent[0].new_empty(0, dtype=self._compute[row.kind])
        out = primitives.buffer(plan.live_mesh(), axes, row.numel, like, lent=False)
        for number, (shard, data) in enumerate(zip(out.chunk(len(sent)), sent, strict=True)):  # (n / W,) each
            shard.copy_(data if wire is None else decode(wire, data, row.lengths(number, len(sent))))
        return out


def _together(plan: Plan, kinds: Iterable[int], axes: Axes) -> list[tuple[Axes, list[int]]]:
    """The kinds of each gather of a unit over `axes`, and the axes of these that the kinds are cut over."""
    groups = dict[object, tuple[Axes, list[int]]]()
    for kind in kinds:
        over = plan.kinds[kind].rule(axes).over
        groups.setdefault(over if plan.together else kind, (over, []))[1].append(kind)
    return [*groups.values()]


def _wire(plan: Plan, kind: int) -> Wire | None:
    return plan.param_wire if plan.kinds[kind].dtype.is_floating_point else None


def decode(wire: Wire, data: Tensor, lengths: Sequence[int]) -> Tensor:
    """The elements of leaves with these lengths. ValueError if the wire gives another number of them."""
    out, numel = wire.decode(data, lengths), sum(lengths)
    if out.shape != (numel,):
        raise ValueError(f"{wire}: decode gave {list(out.shape)}, expected the {numel} elements that were encoded")
    return out


def several(plan: Plan, axes: Sequence[str]) -> Axes:
    """The axes of more than one rank."""
    return tuple(axis for axis in axes if dict(plan.axes)[axis] > 1)


class Arrivals:
    """Gathers of one `Sharded` in flight; a unit of which a copy is held is gathered from the copy.

    A gather has a stage for each axis. With several stages, one unit more is under way for each, one stage behind the
    unit before it. On an accelerator a stream beside the computation waits for a stage, and starts the next one. What
    was sent is kept until the computation has waited for that stream. `copied` is as in `is_buffer`.
    """

    def __init__(self, params: Sharded, units: Mapping[int, TapeUnit], copied: bool):
        self._plan, self._units, self._gathers = params.plan, units, Gathers(params, copied)
        self._ahead = params.plan.ahead
        self._stepped: list[Pending] = []  # what may still be sent of earlier stages
        self.stages = stages(params.plan, params.view.over)  # of a gather
        self.most = self._ahead.most(self.stages)  # units whose gathers are under way at once
        has_streams = self.stages > 1 and params.plan.has_streams and not is_tracing()
        self._side = params.plan.crossings.stages if has_streams else None

    def keep(self, unit: TapeUnit) -> None:
        """Hold what `regather=` keeps of a unit: all buffers, or copies of them that are cut."""
        assert unit.buffers is not None
        assert unit.keep_rule is not None
        if over := unit.keep_rule.over:
            cut = [row.kind for row in unit.entry.rows if row.rule.over and row.numel]
            unit.hold({kind: self._copy(unit.buffers[kind], kind, over) for kind in cut})
        else:
            unit.hold(unit.buffers)

    def _copy(self, full: Tensor, kind: int, axes: Axes) -> Tensor:
        """A copy of what this rank has of a buffer (n,) that is cut over some axes: (n / W,)."""
        shard = self._plan.within(full, kind, axes)
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), shard, lent=False).copy_(shard)

    def _stages(self, unit: TapeUnit) -> int:
        """The number of stages of a unit's gather, one for each axis; none if all of it is held."""
        if unit.held is None or unit.keep_rule is None:
            return self.stages
        return stages(self._plan, unit.keep_rule.over) if unit.keep_rule.over else 0

    def start(self, unit: TapeUnit) -> None:
        """Start the gather of a unit, from what is held of it if anything is, unless it is under way."""
        if unit.coming is not None:
            return
        entry, held_buffers, rows, rule = unit.entry, unit.held, unit.entry.rows, unit.keep_rule
        if held_buffers is None or rule is None:
            unit.coming = self._gathers.start(entry, rows)
        elif rule.over:
            copied = self._gathers.from_copies(entry, held_buffers, rule.over)
            unit.coming = self._gathers.start(entry, [row for row in rows if row.kind not in held_buffers]) | copied
        else:
            unit.coming = {kind: arrived(full) for kind, full in held_buffers.items()}
        unit.stages = 1

    def ahead(self, current: TapeUnit | None, following: Iterable[int]) -> None:
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

    def _advance(self, unit: TapeUnit) -> None:
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

    def take(self, unit: TapeUnit) -> Buffers:
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
