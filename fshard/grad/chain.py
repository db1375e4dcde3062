"""One order on all ranks: the anchors of a forward, and the table that says when its backward gathers which unit.

Note [One order on all ranks]
    Ranks may compute different things: a branch, an expert or a head may depend on the batch. Their collectives must
    still match. Two rules see to it:

    1. Anchors run in one order. With several ranks, each anchor takes an output of the previous anchor as input, and
       the backward starts from the last anchor as well as from the loss. So every anchor runs on every rank, last
       made first; leaves that the loss does not use get None. Anchors are made in the order in which units are first
       read, so ranks must read gathered units in the same order. Units that every rank holds whole may be read in any
       order: an eager step then makes anchors in the order `Schedule.likely`, and a skipped unit gets an empty anchor.
    2. Gathers run in one order: the reverse of the order in which units were last saved or read by a checkpoint. When
       an anchor runs, autograd has finished all nodes made after it. So by then each unit saved after that anchor was
       made has been gathered again, if the loss depends on it; if not, the anchor gathers the unit.

    Ranks may save different units. They compare their saved units in the collective that sums the loss. If these
    differ, all ranks gather all read units before the backward; on an accelerator the device stops with an error.

    Two exceptions. A function with a backward of its own reads units where gradients are off, and once more in the
    outer backward: such units are reduced after the backward. Units read during a backward are not in the chain,
    because their own backward must not run earlier anchors.

Note [The table of a backward]
    The forward only records: autograd saves a view of a unit (`Due`), a checkpoint reads a unit (`Reread`), or a
    backward inside the loss uses the last saved view of a unit (None). After the forward, `table` turns the record
    into one `Due` for each unit, the first unit of the backward last:

    1. Units come in the order in which the forward saved them last. A checkpoint's second run reads as the first, so
       its units come in reverse.
    2. A unit read by a checkpoint stays until an anchor runs. If the program asks for the unit, its checkpoint runs
       again: the unit stays until its own anchor (`until`). If an anchor comes first (`early`), the checkpoint may run
       later: the unit stays until the last anchor made before the checkpoint began. So it does if several checkpoints
       read the unit, or one gathers it twice. A frozen unit has no anchor, and stays only in this case, or if it was
       also saved.
    3. All other units stay until their last saved view was used.

    The backward follows the table. It keeps count of three facts that no forward knows: the units done, the saved views
    left (`TapeUnit.saved`; the loss need not depend on all), and why buffers stay (`TapeUnit.stays_for`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from sys import maxsize
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from .autograd import Anchor, Block, OnGrads, Saves
from .under_way import Leaves, TapeUnit

U = TypeVar("U")  # a unit: a `TapeUnit`, or anything hashable


class Due(NamedTuple):
    """One unit of a backward; in a record: autograd saves a view of the unit."""

    tape: Saves
    before: int  # the unit is gathered before an anchor with a lower number runs
    until: int | None  # the number of the last anchor to run while the unit stays; None: until its last view was used
    early: int  # the same if an anchor asks for the unit, not the program


class Reread(NamedTuple):
    """In a record: a checkpoint reads a unit."""

    tape: Saves
    before: int  # as in `Due`
    checkpoint: tuple[int, int]  # its own number, and the number of the last anchor made before it
    is_nested: bool  # True if a checkpoint inside it reads the unit
    is_new: bool  # True if the unit was gathered for this read


Event: TypeAlias = tuple[U, Due | Reread | None]  # of a record; None: the last saved view of a unit was used


class Backward(NamedTuple, Generic[U]):
    """The table of a backward."""

    due: dict[U, Due]  # the first unit to be gathered last
    reread: set[U]  # units that checkpoints read
    tied: set[U]  # those of them that stay until an anchor runs


def table(
    record: Iterable[Event[U]], numbers: Mapping[U, int], ends: Callable[[U], bool], is_linked: bool
) -> Backward[U]:
    """Return the table of a record.

    `numbers`: of the units' anchors; for a frozen unit, of the anchor before. `ends(unit)` is True if the unit has
    trainable leaves, or saved views left. `is_linked`: anchors are in one chain.
    """
    # `reads`: the last checkpoint that reads a unit, True if it is shared, the anchor before all its checkpoints
    due, reads = dict[U, Any](), dict[U, tuple[tuple[int, int], bool, int]]()
    for unit, event in record:
        if type(event) is Reread:
            last, is_shared, anchor = reads.get(unit, (event.checkpoint, False, maxsize))
            is_known = getattr(due.get(unit), "checkpoint", None) == event.checkpoint
            is_shared = is_shared or event.is_nested or last != event.checkpoint or (is_known and event.is_new)
            reads[unit] = event.checkpoint, is_shared, min(anchor, event.checkpoint[1])
            if not is_known:
                _put(due, unit, event)
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


def _put(due: dict[U, Any], unit: U, event: Reread) -> None:
    """Put a unit before the others of its checkpoint, which come last."""
    due.pop(unit, None)
    others = [*takewhile(lambda x: getattr(due[x], "checkpoint", None) == event.checkpoint, reversed(due))]
    due[unit] = event
    for other in reversed(others):
        due[other] = due.pop(other)._replace(before=event.before)


class Chain:
    """The anchors of a forward, its record, and the table of its backward (Note [The table of a backward]).

    `outputs` is the root, and the last output of each anchor that is linked: anchors are if there are several ranks.
    The units of `planned` come in that order, others as they are read.
    """

    def __init__(self, root: Tensor, is_linked: bool, planned: Iterable[TapeUnit]):
        self.is_linked, self.outputs = is_linked, [root]
        self.gathered: list[tuple[int, int]] = []  # the tape and the number of each unit that ranks gathered, in order
        # the number of a unit's anchor; of a frozen unit, or one first read after its anchor, of the anchor before
        self.numbers: dict[TapeUnit, int] = {}
        self._record: list[Event[TapeUnit]] = []
        self.table: Backward[TapeUnit] = Backward({}, set(), set())  # of the record, once the forward has ended
        # units that stay until an anchor runs that was made no later than the one with this number
        self._waiting: list[tuple[int, TapeUnit]] = []
        self._checkpoint: tuple[object, tuple[int, int]] = None, (0, 0)  # the last one's hook, `Reread.checkpoint`
        self._planned = iter(planned)

    def bind(self, unit: TapeUnit, take: OnGrads, leaves: Leaves) -> list[Tensor]:
        """The leaves of a touch, whose gradients, summed with those of other touches, `take` gets once."""
        if unit.anchor is not None:
            *bound, _ = Anchor.apply(unit.anchor, (TapeUnit.add, unit, leaves))
            return bound
        self.link(unit, take)
        return self._linked(unit, take, leaves)

    def _linked(self, unit: TapeUnit, take: OnGrads, leaves: Leaves) -> list[Tensor]:
        *bound, unit.anchor = Anchor.apply(self.outputs[-1], (take, unit, leaves))
        if self.is_linked:
            self.numbers[unit] = len(self.outputs)
            self.outputs.append(unit.anchor)
        return bound

    def bind_late(self, unit: TapeUnit, take: OnGrads, leaves: Leaves) -> list[Tensor]:
        """The leaves of a touch in the backward, which is no part of the chain: `take` gets their gradients."""
        *bound, _ = Anchor.apply(self.outputs[0], (take, unit, leaves))
        return bound

    def link(self, stop: TapeUnit | None, take: OnGrads) -> None:
        """Give an anchor to each planned unit up to `stop` that has none, in a chain; with None, to all of them."""
        for unit in self._planned:
            if unit is stop:
                return
            if unit.anchor is None and unit.entry.trained:
                self._linked(unit, take, [])

    def save(self, unit: TapeUnit, tape: Saves) -> None:
        """Note that autograd saves a place of a unit."""
        self._record.append((unit, Due(tape, len(self.outputs), None, self.numbers[unit])))

    def rerun(self, unit: TapeUnit, tape: Saves, block: Block, is_new: bool) -> None:
        """Note that a checkpoint reads a unit; `is_new` says that the unit was gathered for this."""
        hook, (number, _) = self._checkpoint
        if block.hook is not hook:  # outermost checkpoints run one after another; the last output may be of this read
            self._checkpoint = block.hook, (number + 1, len(self.outputs) - 2)
        read = Reread(tape, len(self.outputs), self._checkpoint[1], block.is_nested, is_new)
        self._record.append((unit, read))

    def use_up(self, unit: TapeUnit) -> None:
        """Note that a backward inside the loss has used the last saved place of a unit."""
        self._record.append((unit, None))
        if self._checkpoint[0] and unit in self._made().tied:
            unit.stays_for = "anchor"

    def restart(self) -> None:
        """Note that the forward begins anew: nothing is saved."""
        self._record += [(unit, None) for unit in self.numbers]

    def end_record(self) -> Backward[TapeUnit]:
        """Return the table of the backward, made of the record at the first call after the forward."""
        if self._record:
            self.table, self._record = self._made(), []
        return self.table

    def _made(self) -> Backward[TapeUnit]:
        return table(self._record, self.numbers, lambda x: bool(x.entry.trained or x.saved), self.is_linked)

    def reach(self, unit: TapeUnit) -> None:
        """Gather again what comes before a unit, and note that this is gathered now."""
        if unit in (rows := self.table.due):
            # the place of a kept unit may differ between ranks
            if self.is_linked and next(reversed(rows)) is not unit and not unit.is_kept:
                self._catch_up(-1, unit)
            if (until := rows.pop(unit).until) is not None:
                unit.stays_for = "anchor"
                self._waiting.append((until, unit))

    def anchor_ran(self, unit: TapeUnit) -> None:
        """The anchor of a unit runs: no node of autograd that was made after it will run any more."""
        rows, number = self.table.due, self.numbers[unit]
        if rows and rows[next(reversed(rows))].before > number:
            self._catch_up(number)
        if self._waiting:
            for until, other in self._waiting:
                if until >= number:
                    other.forget()
            self._waiting = [(until, other) for until, other in self._waiting if until < number]

    def settle(self) -> None:
        """End the forward: what was saved before the first anchor will not be used."""
        rows = self.end_record().due
        while self.is_linked and rows and rows[first := next(iter(rows))].before == 1:
            del rows[first]

    def _catch_up(self, number: int, stop: TapeUnit | None = None) -> None:
        """Gather again what comes before an anchor runs, as far as the unit `stop`."""
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
        """Drop all nodes: they hold tapes, in a cycle that Python's garbage collector cannot see."""
        for part in (self.outputs, self._record, self.numbers, self._waiting):
            part.clear()
        self._checkpoint, self.table = (None, (0, 0)), Backward({}, set(), set())
