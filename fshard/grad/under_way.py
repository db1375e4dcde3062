"""The units of one forward and backward: their memory, gathers and gradients.

Note [A unit's life]
    A unit is in memory while the program reads its leaves, and in the backward while `stays_for` is set. `held`
    buffers stay longer: a gather from these sends less, or nothing.

    A unit's gradients arrive once, after the forward, and start a reduction, which ends about one unit later
    (`Reductions.move_on`). With `Gradients.take` an optimizer then takes the sum, and writes to the parameters.
    `TapeUnit.gradients` decides:

    | gradients | a gradient arrives   | the unit is gathered |
    |-----------|----------------------|----------------------|
    | forward   | error                | allowed              |
    | due       | now `summing`        | allowed              |
    | late      | is added up          | allowed              |
    | summing   | error                | allowed              |
    | taken     | error                | error                |
    | closed    | error                | error                |

Note [What stays of a unit]
    `Unit.keep_rule`, set by `regather=`, keeps all gathered buffers of a unit, a copy cut over some axes, or nothing.
    The copy is made at a gather in the forward, in the dtype of computation; later gathers are from the copy, over its
    axes alone. Leaves whole on every rank are not copied.

    A unit kept whole stays until its gradients have arrived. Frozen leaves have no gradients: they stay only in tensors
    saved by autograd, unless ranks saved different units (`Tape.keep_read`). A copy stays until the gradients have
    arrived and the last saved view was used.

Note [Sums beside the computation]
    On an accelerator a second stream, `Plan.crossings.sums`, waits for a reduction's messages, adds, and runs later
    stages and hooks. The computation waits for this stream once a unit, before it allocates the next unit's gradients,
    and after the last reduction. If the backend adds, the next unit's gradients reuse the memory of older sums.

    Buffers sent and received belong to the computation's stream: if the host freed a buffer, torch might reuse its
    memory while the second stream reads it. So each reduction (`Pending`) is kept until the computation has waited.
    With `Tensor.record_stream` peak memory would depend on the device's timing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import filterfalse, islice
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.reduction import Sums
from ..core.tracing import is_tracing, profiled
from ..layout.rules import COPIES, arrived
from ..plan.ahead import Crossing, Crossings
from ..plan.plan import Plan
from ..sharding.schedule import Entry, Schedule
from ..sharding.sharded import Sharded
from .travel import Gathers, Gradients

UnitLeaves: TypeAlias = Sequence[Tensor]  # in the order of `Entry.slots`
Buffers: TypeAlias = dict[int, Tensor]  # by kind: gathered (n,), or cut copies (n / W,)
Gathered: TypeAlias = dict[int, Buffers]  # by unit; for a step's next micro-batch

_UPDATED = "train_step(in_backward=True): unit {!r} was read again after it was updated. Use in_backward=False."
_CLOSED = (
    "the loss function: unit {!r} of the parameters of an earlier call or micro-batch was used: parameters given to a "
    "loss are good until it returns. Use those it is given now."
)
_REFUSED_EVENTS = {
    ("forward", "reduce"): "the loss function: unit {!r} was given gradients before the loss was returned, by a "
    "backward() inside it. Use torch.autograd.grad(y, x, create_graph=True), or return what is to be differentiated.",
    ("summing", "reduce"): "the loss function: unit {!r} was given gradients twice in one backward, by an autograd "
    "function that runs a backward of its own, as checkpoints do that are reentrant. Use torch.utils.checkpoint with "
    "use_reentrant=False.",
    **{("taken", event): _UPDATED for event in ("reduce", "gather")},
    **{("closed", event): _CLOSED for event in ("reduce", "gather")},
}


class TapeUnit:
    """One unit of a tape (Note [A unit's life])."""

    buffers: Buffers | None = None  # while in memory
    leaves: UnitLeaves | None = None  # views, while the program reads them
    bound: UnitLeaves | None = None  # leaves, trainable ones as outputs of an anchor
    coming: tuple[int, dict[int, Pending]] | None = None  # (stages started, gathers by kind)
    held: Buffers | None = None  # kept by `keep_rule`
    stays_for: Literal["", "places", "anchor"] = ""  # "places": until all saved views were used
    saved = 0  # number of saved views not used yet
    gradients: Literal["forward", "due", "late", "summing", "taken", "closed"] = "forward"
    anchor: Tensor | None = None  # the last output of its anchor (Note [Anchors] in `autograd.py`)
    _added: Sequence[Tensor | None] | None = None  # gradients of later touches, until the anchor runs

    def __init__(self, entry: Entry, stays: bool):
        self.entry = entry
        self.keep_rule = entry.keep_rule  # set by `regather=`
        self.stays = stays  # in memory until the forward ends

    def keep_from(self, gathered: Gathered) -> None:
        self.keep_rule, self.held = COPIES, gathered.get(self.entry.unit)
        if is_tracing():  # in a graph, kept units have a label of their own
            self.entry = self.entry._replace(name=f"{self.entry.name} (kept)")

    def check(self, event: Literal["reduce", "gather"]) -> None:
        if (self.gradients, event) in _REFUSED_EVENTS:
            raise ValueError(_REFUSED_EVENTS[self.gradients, event].format(self.entry.name))

    def let_go(self) -> None:
        self.leaves = self.bound = None
        if not self.stays_for:
            self.buffers = None

    def forget(self) -> None:
        self.stays_for, self.saved = "", 0
        self.let_go()

    def keep_all(self) -> None:
        if self.keep_rule != COPIES:
            self.held = None
        self.keep_rule, self.saved = COPIES, 0

    @property
    def is_kept(self) -> bool:
        return self.held is not None and self.keep_rule == COPIES

    @property
    def leads(self) -> bool:
        """True if the unit's gather in the backward starts the next gathers.

        Ranks may read non-leading units at different times.
        """
        return self.entry.leads and (self.held is None or self.keep_rule != COPIES)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        self._added = self.total(grads)

    def total(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return each leaf's gradient, summed over all touches. An anchor without leaves passes no `grads`."""
        grads = grads or [None] * len(self.entry.trained)
        added, self._added = self._added, None
        return grads if added is None else [_sum(x, y) for x, y in zip(added, grads, strict=True)]

    def close(self) -> None:
        self.let_go()
        self.buffers = self.held = self.coming = self.anchor = self._added = None
        self.gradients = "closed"


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    # torch adds a sparse tensor to a dense one, not the other way round
    return x + y if x.layout is torch.strided else y + x


class _UnderWay:
    """Collectives under way, as many as Note [Two units] in `plan/ahead.py` allows.

    A collective has a stage for each axis. On an accelerator the stream `side` waits for a stage and starts the next.
    """

    def __init__(self, plan: Plan, stages: int, side: Callable[[Crossings], Crossing]):
        self._plan, self.stages = plan, stages
        self._side = side(plan.crossings) if plan.has_streams and not is_tracing() else None
        self._stepped: list[Pending] = []  # the side stream may still read their buffers

    def _beside(self, older: Iterable[Pending]) -> AbstractContextManager[None]:
        if self._side is None:
            return nullcontext()
        self._stepped += older  # before any stage: if a stage raises, the device may still read buffers
        return self._side.ahead()

    def join(self) -> None:
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()


class GathersUnderWay(_UnderWay):
    """Gathers of one `Sharded` under way. `copied`: as in `is_buffer`. `gathered`: as in `Tape`.

    Each stage after the first puts one more unit under way, one stage behind the unit before.
    """

    def __init__(self, params: Sharded, units: Mapping[int, TapeUnit], copied: bool, gathered: Gathered | None):
        super().__init__(params.plan, _stages(params.plan, params.view.over), lambda streams: streams.stages)
        self._units, self._gathers, self.gathered = units, Gathers(params, copied), gathered
        if gathered is not None:
            for unit in units.values():
                unit.keep_from(gathered)
        self.most = self._plan.ahead.most(self.stages)  # units under way at once

    def keep(self, unit: TapeUnit) -> None:
        assert unit.buffers is not None
        assert unit.keep_rule is not None
        if over := unit.keep_rule.over:
            cut = [row.kind for row in unit.entry.rows if row.rule.over and row.numel]
            self.hold(unit, {kind: self._copy(unit.buffers[kind], kind, over) for kind in cut})
        else:
            self.hold(unit, unit.buffers)

    def hold(self, unit: TapeUnit, held: Buffers) -> None:
        unit.held = held
        if self.gathered is not None:
            self.gathered[unit.entry.unit] = held

    def drop_held(self, unit: TapeUnit) -> None:
        if self.gathered is None:
            unit.held = None

    def _copy(self, all_gather_output: Tensor, kind: int, axes: Axes) -> Tensor:
        shard = self._plan.shard_of(all_gather_output, kind, axes)
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), shard, lent=False).copy_(shard)

    def following(self, schedule: Schedule, unit: int, read: Container[int]) -> Iterable[int]:
        """Return the next units to gather: not those whole on every rank, unless all units are."""
        if not schedule.mixed:
            return filterfalse(read.__contains__, range(unit + 1, min(unit + self.most, schedule.last) + 1))
        sent = (n for n in range(unit + 1, schedule.last + 1) if schedule.entries[n].sent and n not in read)
        return islice(sent, self.most)

    def _stages_of(self, unit: TapeUnit) -> int:
        if unit.held is None or unit.keep_rule is None:
            return self.stages
        return _stages(self._plan, unit.keep_rule.over) if unit.keep_rule.over else 0

    def start(self, unit: TapeUnit) -> None:
        if unit.coming is not None:
            return
        entry, kept, rule = unit.entry, unit.held, unit.keep_rule
        if kept is None or rule is None:
            gathers = self._gathers.start(entry, entry.rows)
        elif rule.over:
            copied = self._gathers.from_copies(entry, kept, rule.over)
            gathers = self._gathers.start(entry, [row for row in entry.rows if row.kind not in kept]) | copied
        else:
            gathers = {kind: arrived(all_gather_output) for kind, all_gather_output in kept.items()}
        unit.coming = 1, gathers

    def ahead(self, current: TapeUnit | None, following: Iterable[int]) -> None:
        """Start the gathers of the next units, or take gathers under way one stage further."""
        if self.most == 1:  # one unit, of any size
            for number in islice(following, 1):
                if self._stages_of(unit := self._units[number]):
                    self.start(unit)
            return
        units = self._plan.ahead.gathers(None if current is None else current.entry.unit, following, self.stages)
        last = max(0, len(units) - self.stages)  # each unit after `last` lags by one stage more
        for place, number in enumerate(units):
            unit = self._units[number]
            stages, (started, gathers) = self._stages_of(unit) - max(0, place - last), unit.coming or (0, {})
            if not started and stages > 0:
                self.start(unit)
            elif started < stages:
                with self._beside(gathers.values()):
                    unit.coming = started + 1, {kind: gather.advance() for kind, gather in gathers.items()}

    def take(self, unit: TapeUnit) -> Buffers:
        if unit.buffers is None:
            unit.check("gather")
            self.start(unit)
            assert unit.coming is not None
            _, gathers = unit.coming
            unit.coming = None
            with profiled("wait", unit.entry.name):
                self.join()
                unit.buffers = {kind: gather.wait() for kind, gather in gathers.items()}
        return unit.buffers

    def drop(self) -> None:
        coming = [(unit, unit.coming[1]) for unit in self._units.values() if unit.coming is not None]
        try:
            for _, gathers in coming:
                for gather in gathers.values():
                    gather.drop()
            self.join()
        finally:
            self._stepped.clear()
            for unit, _ in coming:
                unit.coming = None


def _stages(plan: Plan, axes: Axes) -> int:
    return max(1, len({*axes}.intersection(plan.linked)))


class Reductions(_UnderWay):
    """The reductions of one backward under way, oldest first."""

    def __init__(self, plan: Plan, into: Gradients | None = None):
        super().__init__(plan, len(plan.linked), lambda streams: streams.sums)
        by = None if into is None or plan.grad_wire is not None else into.by
        # True if the backend adds, not fshard
        self._is_fast = self._side is not None and type(by) is Sums and by.is_fast(plan.device)
        self._under_way: list[tuple[int, Pending]] = []  # (unit, reduction)

    def add(self, unit: int, pending: Pending) -> None:
        self._under_way.append((unit, pending))

    def move_on(self, following: int) -> None:
        """Take older reductions one stage further: the gradients of unit `following` need room."""
        if self._plan.ahead.number == 1:  # one unit, of any size
            num = len(self._under_way)
            while num and self._under_way[num - 1][0] == self._under_way[-1][0]:
                num -= 1
            return self._step(num)
        self._leave(self._plan.ahead.reductions(following, self._units(), self.stages))

    def _units(self) -> list[int]:
        return list(dict.fromkeys(unit for unit, _ in self._under_way))

    def _leave(self, number: int) -> None:
        """Take reductions one stage further, except the last `number` units'."""
        units = self._units()
        older = units[: max(0, len(units) - number)]
        self._step(sum(unit in older for unit, _ in self._under_way))

    def make_room(self, unit: int) -> None:
        """Wait for reductions until a unit's gradients have room.

        Sums added by the backend are done by now, so their buffers are free. Sums in rank order still need buffers.
        """
        if self.stages > 1:
            return
        if self._plan.ahead.number is None:
            self.move_on(unit)
        if self._is_fast:  # this unit's buffer reuses the memory of older buffers
            self._leave(max(0, self._plan.ahead.reductions(unit - 1, [*self._units(), unit], self.stages) - 1))

    def _step(self, num: int) -> None:
        """Take reductions one stage further, the youngest first: it travels while the host waits for the others."""
        if not num:
            return
        units, older = zip(*self._under_way[:num], strict=True)
        with self._beside(older):
            stepped = [pending.step() for pending in reversed(older)]
        pairs = zip(units, reversed(stepped), strict=True)
        self._under_way[:num] = [(unit, pending) for unit, pending in pairs if isinstance(pending, Pending)]

    def finish(self) -> None:
        while self._under_way:
            self._step(len(self._under_way))
        self.join()

    def drop(self) -> None:
        try:
            for _, pending in self._under_way:
                pending.drop()
        finally:
            self.join()
            self._under_way.clear()
