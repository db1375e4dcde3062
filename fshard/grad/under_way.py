"""What of each unit is in memory and under way in one forward and backward: its gathers, its gradients, their sums.

Note [A unit's life]
    In memory a unit is absent, coming, or here. It is here while the program reads its leaves, and in the backward
    until its last saved place was used. `held` is what stays of it even then (Note [What stays of a unit]):
    from that it comes back with fewer messages, or with none.

    Its gradients come once, after the forward, and are then given to a reduction. The sum is there about one unit
    later (`Reductions.move_on`). With `Gradients.take` an optimizer takes the sum, and writes to the parameters. What a
    program may do to break this order is an error:

    | gradients | are reduced      | the unit is gathered |
    |-----------|------------------|----------------------|
    | forward   | error            | allowed              |
    | due       | become summing   | allowed              |
    | late      | are added up     | allowed              |
    | summing   | error            | allowed              |
    | taken     | error            | error                |
    | closed    | error            | error                |

Note [What stays of a unit]
    `Unit.keep_rule`, which `regather=` sets, says whether all of a unit's gathered buffers stay, or a copy of them that
    is cut over some axes, or nothing. A copy is made when the unit is gathered in the forward; every later gather of
    the unit is from the copy, over these axes alone: that for the backward, those of a checkpoint that runs again, and
    a second one in the forward. It has the dtype of computation, and values that a wire has decoded already.

    All of a unit stays where its leaves are trainable, until its gradients have come. Of frozen leaves, whose backward
    has no end that the tape could see, only what autograd saves stays, unless ranks saved different units (Note [One
    order on all ranks] in `chain.py`). Copies stay until the unit's gradients have come and its last saved place was
    used. Leaves that are whole on every rank are not copied.

Note [Sums beside the computation]
    On an accelerator a reduction's waits for messages, its sums, and the stages and hooks that follow run on a stream
    of their own, `Plan.crossings.sums`. Work on that stream first waits for the computation so far. The computation
    waits for the stream once for each unit, before the buffer of the next unit's gradients is allocated (those sums
    were started one unit earlier), and after the last reduction: nothing reads the sums before. If nothing is left to
    add when the messages have arrived, it waits for those of the unit before, whose buffer is free then.

    The buffers that a reduction sends and receives belong to the computation's stream. When the host drops them, the
    allocator may give their memory to the computation again while the other stream still reads it. So each reduction
    (`Pending`) is kept, and with it these buffers, until the computation has waited. `Tensor.record_stream` would make
    the wait unnecessary, but memory would then come back when the device has passed an event, not at a point of the
    program, and the peak would depend on timing. Memory allocated on the other stream is used there in order.

    On a CPU, and while a graph is traced, there are no streams, and nothing is kept.
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
from ..core.tracing import is_tracing, named
from ..layout.rules import COPIES, arrived
from ..plan.ahead import Crossing, Crossings
from ..plan.plan import Plan
from ..sharding.schedule import Entry, Schedule
from ..sharding.sharded import Sharded
from .travel import Gathers, Gradients, several

Leaves: TypeAlias = Sequence[Tensor]  # of a unit, in the order of its `Entry.slots`
Buffers: TypeAlias = dict[int, Tensor]  # gathered flat buffers (n,), or copies (n / W,) that are cut, by kind
Gathered: TypeAlias = dict[int, Buffers]  # of units that stay gathered from one micro-batch of a step to the next

_UPDATED = "train_step(in_backward=True): unit {!r} was read again after it was updated. Use in_backward=False."
_CLOSED = (
    "the loss function: unit {!r} of the parameters of an earlier call or micro-batch was used: parameters given to a "
    "loss are good until it returns. Use those it is given now."
)
_REFUSED = {
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

    buffers: Buffers | None = None  # while it is here
    leaves: Leaves | None = None  # views of them, while the program reads these
    bound: Leaves | None = None  # the leaves, those that train as outputs of an anchor
    coming: tuple[int, dict[int, Pending]] | None = None  # how many stages of its gathers have started; they, by kind
    held: Buffers | None = None  # what stays of it by `keep_rule`
    stays_for: Literal["", "places", "anchor"] = ""  # gathered again, buffers stay until these were used, or this ran
    saved = 0  # the number of saved places that were not used yet
    gradients: Literal["forward", "due", "late", "summing", "taken", "closed"] = "forward"
    anchor: Tensor | None = None  # the last output of its anchor (Note [Anchors] in `autograd.py`)
    _added: Sequence[Tensor | None] | None = None  # the gradients of later touches until the anchor runs

    def __init__(self, entry: Entry, stays: bool):
        self.entry = entry
        self.keep_rule = entry.keep_rule  # of `regather=`
        self.stays = stays  # until the forward ends

    def keep_from(self, gathered: Gathered) -> None:
        """Keep all of the unit; what another tape has gathered is not gathered again."""
        self.keep_rule, self.held = COPIES, gathered.get(self.entry.unit)
        if is_tracing():  # another label than that of units which a graph may gather again
            self.entry = self.entry._replace(name=f"{self.entry.name} (kept)")

    def check(self, event: Literal["reduce", "gather"]) -> None:
        """ValueError if the unit may not be gathered, or given gradients, any more, or not yet."""
        if (self.gradients, event) in _REFUSED:
            raise ValueError(_REFUSED[self.gradients, event].format(self.entry.name))

    def let_go(self) -> None:
        """Drop the leaves, and the buffers unless saved places are still to be used."""
        self.leaves = self.bound = None
        if not self.stays_for:
            self.buffers = None

    def forget(self) -> None:
        """Drop the buffers: its saved places will not be used."""
        self.stays_for, self.saved = "", 0
        self.let_go()

    def keep_all(self) -> None:
        """Before a second forward: from now on keep all of the unit; nothing is saved yet."""
        if self.keep_rule != COPIES:
            self.held = None
        self.keep_rule, self.saved = COPIES, 0

    @property
    def is_kept(self) -> bool:
        """Whether all of it stays in memory, so that the backward sends nothing for it."""
        return self.held is not None and self.keep_rule == COPIES

    @property
    def leads(self) -> bool:
        """True if its gather in the backward starts the next ones; ranks may read units that do not at any time."""
        return self.entry.leads and (self.held is None or self.keep_rule != COPIES)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a touch, added to those of others, until the anchor runs."""
        self._added = self.total(grads)

    def total(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The sum of these gradients and those of later touches, which are dropped; by leaf, None for none.

        An anchor without leaves gives none.
        """
        grads = grads or [None] * len(self.entry.trained)
        added, self._added = self._added, None
        return grads if added is None else [_sum(x, y) for x, y in zip(added, grads, strict=True)]

    def close(self) -> None:
        """Drop all tensors: nodes of autograd hold this unit, in a cycle that Python's garbage collector cannot see."""
        self.let_go()
        self.buffers = self.held = self.coming = self.anchor = self._added = None
        self.gradients = "closed"


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    # a dense tensor plus a sparse one is dense; torch does not add them the other way round
    return x + y if x.layout is torch.strided else y + x


class _UnderWay:
    """Collectives of units under way: as many units at once as Note [Two units] in `ahead.py` says.

    A collective has a stage for each axis. On an accelerator a stream beside the computation, `side`, waits for the
    messages of a stage, and starts the next one. What stages sent and received is kept until the computation has waited
    for that stream.
    """

    def __init__(self, plan: Plan, stages: int, side: Callable[[Crossings], Crossing]):
        self._plan, self.stages = plan, stages
        self._side = side(plan.crossings) if plan.has_streams and not is_tracing() else None
        self._stepped: list[Pending] = []  # what the side stream may still be reading

    def _beside(self, older: Iterable[Pending]) -> AbstractContextManager[None]:
        """The block in which a stage of each of these is waited for, and the next one starts."""
        if self._side is None:
            return nullcontext()
        self._stepped += older  # before a stage can raise: the device may be reading them even then
        return self._side.ahead()

    def join(self) -> None:
        """Make the computation wait for the stages that have ended, and drop the memory that they read."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()


class Arrivals(_UnderWay):
    """Gathers of one `Sharded` under way; a unit of which a copy is held is gathered from the copy.

    With several stages, one unit more is under way for each, one stage behind the unit before it. `copied` is as in
    `is_buffer`, `gathered` as in `Tape`.
    """

    def __init__(self, params: Sharded, units: Mapping[int, TapeUnit], copied: bool, gathered: Gathered | None):
        super().__init__(params.plan, _stages(params.plan, params.view.over), lambda streams: streams.stages)
        self._units, self._gathers, self.gathered = units, Gathers(params, copied), gathered
        if gathered is not None:
            for unit in units.values():
                unit.keep_from(gathered)
        self.most = self._plan.ahead.most(self.stages)  # units whose gathers are under way at once

    def keep(self, unit: TapeUnit) -> None:
        """Hold what `regather=` keeps of a unit: all buffers, or copies of them that are cut."""
        assert unit.buffers is not None
        assert unit.keep_rule is not None
        if over := unit.keep_rule.over:
            cut = [row.kind for row in unit.entry.rows if row.rule.over and row.numel]
            self.hold(unit, {kind: self._copy(unit.buffers[kind], kind, over) for kind in cut})
        else:
            self.hold(unit, unit.buffers)

    def hold(self, unit: TapeUnit, held: Buffers) -> None:
        """Keep these buffers of a unit, or copies of them."""
        unit.held = held
        if self.gathered is not None:
            self.gathered[unit.entry.unit] = held

    def drop_held(self, unit: TapeUnit) -> None:
        if self.gathered is None:
            unit.held = None

    def _copy(self, all_gather_output: Tensor, kind: int, axes: Axes) -> Tensor:
        """A copy of what this rank has of a buffer (n,) that is cut over some axes: (n / W,)."""
        shard = self._plan.within(all_gather_output, kind, axes)
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), shard, lent=False).copy_(shard)

    def following(self, schedule: Schedule, unit: int, read: Container[int]) -> Iterable[int]:
        """The units to gather after a unit: not read yet, and with shards, unless no unit has shards."""
        if not schedule.mixed:
            return filterfalse(read.__contains__, range(unit + 1, min(unit + self.most, schedule.last) + 1))
        sent = (n for n in range(unit + 1, schedule.last + 1) if schedule.entries[n].sent and n not in read)
        return islice(sent, self.most)

    def _stages_of(self, unit: TapeUnit) -> int:
        """The number of stages of a unit's gather, one for each axis; none if all of it is held."""
        if unit.held is None or unit.keep_rule is None:
            return self.stages
        return _stages(self._plan, unit.keep_rule.over) if unit.keep_rule.over else 0

    def start(self, unit: TapeUnit) -> None:
        """Start the gather of a unit, from what is held of it if anything is, unless it is under way."""
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
        """Gather as many of the units that follow on the current one as the plan says.

        Gathers under way go on to their next stage, the others start.
        """
        if self.most == 1:  # as where units are equal
            for number in islice(following, 1):
                if self._stages_of(unit := self._units[number]):
                    self.start(unit)
            return
        units = self._plan.ahead.gathers(None if current is None else current.entry.unit, following, self.stages)
        last = max(0, len(units) - self.stages)  # of those whose stages may all start; each after it is one behind
        for place, number in enumerate(units):
            unit = self._units[number]
            stages, (started, gathers) = self._stages_of(unit) - max(0, place - last), unit.coming or (0, {})
            if not started and stages > 0:
                self.start(unit)
            elif started < stages:
                with self._beside(gathers.values()):
                    unit.coming = started + 1, {kind: gather.advance() for kind, gather in gathers.items()}

    def take(self, unit: TapeUnit) -> Buffers:
        """A unit's buffers: those in memory, or those of its gather, which starts now if it is not under way."""
        if unit.buffers is None:
            unit.check("gather")
            self.start(unit)
            assert unit.coming is not None
            _, gathers = unit.coming
            unit.coming = None
            with named("wait", unit.entry.name):
                self.join()
                unit.buffers = {kind: gather.wait() for kind, gather in gathers.items()}
        return unit.buffers

    def drop(self) -> None:
        """Wait for the gathers that were started and not used."""
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
    """The number of stages of a gather over some axes: one for each that has several ranks, at least one."""
    return max(1, len(several(plan, axes)))


class Reductions(_UnderWay):
    """The reductions of one backward into `into` that are under way, in the order in which they started."""

    def __init__(self, plan: Plan, into: Gradients | None = None):
        super().__init__(plan, len(several(plan, plan.axis_names)), lambda streams: streams.sums)
        by = None if into is None or plan.grad_wire is not None else into.by
        # else what arrives is added beside the computation
        self._is_fast = self._side is not None and type(by) is Sums and by.is_fast(plan.device)
        self._under_way: list[tuple[int, Pending]] = []  # and the unit of each

    def add(self, unit: int, pending: Pending) -> None:
        """Keep a reduction of a unit that was started."""
        self._under_way.append((unit, pending))

    def move_on(self, following: int) -> None:
        """Take older reductions one stage further, so that the gradients of the unit `following` have room next.

        The reductions that `Ahead.reductions` counts are not advanced.
        """
        if self._plan.ahead.number == 1:  # as where units are equal
            num = len(self._under_way)
            while num and self._under_way[num - 1][0] == self._under_way[-1][0]:
                num -= 1
            return self._step(num)
        self._leave(self._plan.ahead.reductions(following, self._units(), self.stages))

    def _units(self) -> list[int]:
        return list(dict.fromkeys(unit for unit, _ in self._under_way))

    def _leave(self, number: int) -> None:
        """Take all reductions one stage further but those of so many units, the last ones."""
        units = self._units()
        older = units[: max(0, len(units) - number)]
        self._step(sum(unit in older for unit, _ in self._under_way))

    def make_room(self, unit: int) -> None:
        """Wait for reductions until the gradients of a unit that has come have room beside those under way.

        The backend's own sums are done by now, so their buffers are free; sums in rank order still need theirs.
        """
        if self.stages > 1:
            return
        if self._plan.ahead.number is None:
            self.move_on(unit)
        if self._is_fast:  # as after this unit, so that its buffer takes their place
            self._leave(max(0, self._plan.ahead.reductions(unit - 1, [*self._units(), unit], self.stages) - 1))

    def _step(self, num: int) -> None:
        """Take the first `num` reductions one stage further, and drop those that are done.

        The youngest goes first: its next stage is under way while the host waits for the others.
        """
        if not num:
            return
        units, older = zip(*self._under_way[:num], strict=True)
        with self._beside(older):
            stepped = [pending.step() for pending in reversed(older)]
        pairs = zip(units, reversed(stepped), strict=True)
        self._under_way[:num] = [(unit, pending) for unit, pending in pairs if isinstance(pending, Pending)]

    def finish(self) -> None:
        """Wait for every reduction."""
        while self._under_way:
            self._step(len(self._under_way))
        self.join()

    def drop(self) -> None:
        """Wait for the messages under way, and drop all reductions; no next stage starts."""
        try:
            for _, pending in self._under_way:
                pending.drop()
        finally:
            self.join()
            self._under_way.clear()
