"""One order of collectives on all ranks: the anchors of a forward, and the table of its backward.

Note [One order on all ranks]
    Ranks may compute different things, as in a branch on the batch, yet must start the same collectives in one order.
    Two rules ensure this:

    1. On several ranks each anchor takes an output of the previous anchor as input, and the backward starts from the
       loss and the last anchor. So every rank runs all anchors, the last made first. A unit gets its anchor at its
       first read, so ranks must read gathered units in one order. Units whole on every rank may be read in any order:
       for these an eager step makes anchors in the order `Schedule.likely`, without leaves for units not read yet.
    2. The backward first gathers the unit last saved, or last read by a checkpoint. Autograd nodes made after an anchor
       run before the anchor, and gather the units of their saved views. If the loss does not use a node on this rank,
       the node never runs, and the anchor gathers the node's units.

    Ranks compare their saved units in the collective that sums the loss. If ranks saved different units, every
    rank gathers all read units before the backward. An accelerator's host does not wait: if units differ, the device
    stops.

    A unit read only while gradients are off, as inside a torch.autograd.Function, is reduced after the backward. A unit
    read during the backward gets an anchor outside the chain: `torch.autograd.grad` inside a backward must not run the
    anchors of the chain.

Note [The table of a backward]
    The forward only records events: autograd saves a view of a unit (`Due`), a checkpoint reads a unit (`Reread`), or a
    backward inside the loss uses a unit's last saved view (None). Then `backward_of` makes a `Due` for each unit:

    1. Units are in the order of their last events, and gathered from the end. A checkpoint runs again from its
       beginning, so its units are in reverse order.
    2. A unit stays until its last saved view was used. But inside a checkpoint autograd saves no views, so a unit read
       by a checkpoint stays until an anchor runs:

       - If the program reads the unit in the backward, the checkpoint is running again: `until` is the unit's anchor.
       - If `Chain` gathers the unit in advance, the checkpoint may run later: `early` is the unit's anchor or the last
         anchor before the checkpoint, whichever was made first.
       - If the unit was gathered twice, by several checkpoints or by one inside another, or saved after its last
         checkpoint, `until` is `early`.

       A frozen unit has no anchor. It stays until another unit's anchor only if gathered twice or by several
       checkpoints, or if saved views are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from sys import maxsize
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .autograd import Anchor, Block, OnGrads, Saves
from .under_way import TapeUnit, UnitLeaves

U = TypeVar("U")  # a `TapeUnit`, or anything hashable


class Due(NamedTuple):
    """A unit in the table of a backward. As an event: autograd saved a view of the unit."""

    tape: Saves
    before: int  # number of the next anchor at the event: the unit is gathered before lower anchors run
    until: int | None  # the unit stays until this anchor runs; None: until its last saved view was used
    early: int  # replaces `until` if the chain gathers the unit before the program reads it


class Reread(NamedTuple):
    """An event: a checkpoint reads a unit."""

    tape: Saves
    before: int  # as in `Due`
    checkpoint: tuple[int, int]  # number of the checkpoint, and of the last anchor made before this checkpoint
    is_nested: bool  # True if a checkpoint inside this one reads the unit
    is_new: bool  # True if this read gathered the unit


Event: TypeAlias = tuple[U, Due | Reread | None]  # None: no saved view is left to use


class Backward(NamedTuple, Generic[U]):
    """The table of a backward."""

    due: dict[U, Due]  # the last unit is gathered first
    reread: set[U]  # units that checkpoints read
    tied: set[U]  # units that stay until an anchor runs


def backward_of(
    record: Iterable[Event[U]], numbers: Mapping[U, int], ends: Callable[[U], bool], is_linked: bool
) -> Backward[U]:
    """Return the table of a record of events.

    `numbers`: by unit, the number of its anchor; of a frozen unit, the number of the last anchor made before the first
    read. `ends(unit)`: True if the unit has trainable leaves, or saved views left. `is_linked`: as in `Chain`.
    """
    # `reads[unit]`: (last checkpoint, True if gathered twice or by several checkpoints, last anchor before all of them)
    due, reads = dict[U, Any](), dict[U, tuple[tuple[int, int], bool, int]]()
    for unit, event in record:
        if type(event) is Reread:
            last, is_shared, anchor = reads.get(unit, (event.checkpoint, False, maxsize))
            is_known = getattr(due.get(unit), "checkpoint", None) == event.checkpoint
            is_shared = is_shared or event.is_nested or last != event.checkpoint or (is_known and event.is_new)
            reads[unit] = event.checkpoint, is_shared, min(anchor, event.checkpoint[1])
            if not is_known:
                _put_reread(due, unit, event)
        else:
            due.pop(unit, None)
            if event is not None:
                due[unit] = event
    if not reads:
        return Backward(due, set(), set())
    tied = {unit for unit in reads if is_linked and (ends(unit) or reads[unit][1])}
    for unit in reads.keys() & due.keys():
        (tape, before, *_), number, (_, is_shared, anchor) = due[unit], numbers[unit], reads[unit]
        until = number if type(due[unit]) is Reread and not is_shared else min(number, anchor)
        due[unit] = Due(tape, before, until if unit in tied else None, min(number, anchor))
    return Backward(due, set(reads), tied)


def _put_reread(due: dict[U, Due | Reread], unit: U, event: Reread) -> None:
    due.pop(unit, None)
    others = [*takewhile(lambda x: getattr(due[x], "checkpoint", None) == event.checkpoint, reversed(due))]
    due[unit] = event
    for other in reversed(others):
        due[other] = due.pop(other)._replace(before=event.before)


class Chain:
    """The anchors and the record of one forward, and the table of its backward.

    `is_linked`: True on several ranks. `outputs`: the root (Note [One root] in `autograd.py`), then, if linked, one
    output of each anchor. Units of `planned` get anchors in the order of `planned`, other units when read.
    """

    def __init__(self, root: Tensor, is_linked: bool, planned: Iterable[TapeUnit]):
        self.is_linked, self.outputs = is_linked, [root]
        self.gathered: list[tuple[int, int]] = []  # (tape, unit) of each gather; ~unit if prefetched or kept
        self.numbers: dict[TapeUnit, int] = {}  # as in `backward_of`
        self._record: list[Event[TapeUnit]] = []
        self.table: Backward[TapeUnit] = Backward({}, set(), set())
        self._waiting: list[tuple[int, TapeUnit]] = []  # (number, unit): stays until this or a lower anchor runs
        self._checkpoint: tuple[object, tuple[int, int]] = None, (0, 0)  # the last: (`Block.hook`, `Reread.checkpoint`)
        self._planned = iter(planned)

    def bind(self, unit: TapeUnit, take: OnGrads, leaves: UnitLeaves) -> list[Tensor]:
        """Return the leaves as outputs of an anchor. The backward calls `take` once, after later touches' nodes."""
        if unit.anchor is not None:
            *bound, _ = Anchor.apply(unit.anchor, (TapeUnit.add, unit, leaves))
            return bound
        self.link(unit, take)
        return self._linked(unit, take, leaves)

    def _linked(self, unit: TapeUnit, take: OnGrads, leaves: UnitLeaves) -> list[Tensor]:
        *bound, unit.anchor = Anchor.apply(self.outputs[-1], (take, unit, leaves))
        if self.is_linked:
            self.numbers[unit] = len(self.outputs)
            self.outputs.append(unit.anchor)
        return bound

    def bind_late(self, unit: TapeUnit, take: OnGrads, leaves: UnitLeaves) -> list[Tensor]:
        """Bind a unit read in the backward, outside the chain: `take` receives the gradients of this touch alone."""
        *bound, _ = Anchor.apply(self.outputs[0], (take, unit, leaves))
        return bound

    def link(self, stop: TapeUnit | None, take: OnGrads) -> None:
        """Make anchors without leaves for planned trainable units before `stop` that lack an anchor."""
        for unit in self._planned:
            if unit is stop:
                return
            if unit.anchor is None and unit.entry.trained:
                self._linked(unit, take, [])

    def save(self, unit: TapeUnit, tape: Saves) -> None:
        self._record.append((unit, Due(tape, len(self.outputs), None, self.numbers[unit])))

    def rerun(self, unit: TapeUnit, tape: Saves, block: Block, is_new: bool) -> None:
        hook, (number, _) = self._checkpoint
        if block.hook is not hook:  # not - 1: this read may have made the last anchor
            self._checkpoint = block.hook, (number + 1, len(self.outputs) - 2)
        read = Reread(tape, len(self.outputs), self._checkpoint[1], block.is_nested, is_new)
        self._record.append((unit, read))

    def use_up(self, unit: TapeUnit) -> None:
        self._record.append((unit, None))
        if self._checkpoint[0] and unit in self._made().tied:
            unit.stays_for = "anchor"

    def restart(self) -> None:
        self._record += [(unit, None) for unit in self.numbers]

    def end_record(self) -> Backward[TapeUnit]:
        if self._record:
            self.table, self._record = self._made(), []
        return self.table

    def _made(self) -> Backward[TapeUnit]:
        return backward_of(self._record, self.numbers, lambda x: bool(x.entry.trained or x.saved), self.is_linked)

    def reach(self, unit: TapeUnit) -> None:
        """Gather all units that come before this unit in the backward's order."""
        if unit in (rows := self.table.due):
            # ranks may read a kept unit at different times, so reading it gathers no others
            if self.is_linked and next(reversed(rows)) is not unit and not unit.is_kept:
                self._catch_up(-1, unit)
            if (until := rows.pop(unit).until) is not None:
                unit.stays_for = "anchor"
                self._waiting.append((until, unit))

    def anchor_ran(self, unit: TapeUnit) -> None:
        """Gather units of nodes that never ran, and free waiting units.

        Nodes made after this anchor can no longer run.
        """
        rows, number = self.table.due, self.numbers[unit]
        if rows and rows[next(reversed(rows))].before > number:
            self._catch_up(number)
        if self._waiting:
            for until, other in self._waiting:
                if until >= number:
                    other.forget()
            self._waiting = [(until, other) for until, other in self._waiting if until < number]

    def settle(self) -> None:
        """End the forward. Remove units saved before the first anchor: the backward runs no node made before it."""
        rows = self.end_record().due
        while self.is_linked and rows and rows[first := next(iter(rows))].before == 1:
            del rows[first]

    def _catch_up(self, number: int, stop: TapeUnit | None = None) -> None:
        rows = self.table.due
        while rows:
            last = next(reversed(rows))
            row = rows[last]
            if last is stop or row.before <= number:
                return
            del rows[last]
            row.tape.again(last)
            if row.until is not None:
                last.stays_for = "anchor"
            self._waiting.append((row.early, last))

    def close(self) -> None:
        """Drop all autograd nodes: nodes and tapes form cycles that Python's garbage collector cannot see."""
        for part in (self.outputs, self._record, self.numbers, self._waiting):
            part.clear()
        self._checkpoint, self.table = (None, (0, 0)), Backward({}, set(), set())
