"""One order on all ranks: the anchors of a forward, and the table of its backward.

Note [One order on all ranks]
    Ranks may compute different things, for example in a branch on the batch. Two rules keep collectives equal:

    1. Anchors run in one order. With several ranks each anchor takes an output of the previous anchor, and the backward
       starts from the loss and the last anchor. So every anchor runs on every rank, last made first, with None for
       unused leaves. Units get anchors at their first reads: ranks must read gathered units in one order. If units are
       whole on every rank, an eager step makes anchors in the order `Schedule.likely`; an unread unit gets an empty
       anchor.
    2. The backward gathers units in the reverse order of their last saves, or reads by a checkpoint. Nodes made after
       an anchor run before the anchor, and gather the units of their saved views. If the loss does not use a node on
       this rank, the node never runs, and the anchor gathers the node's units.

    Ranks compare their saved units in the collective that sums the loss. If ranks saved different units, every
    rank gathers all read units before the backward. On an accelerator the host does not wait for the comparison:
    different units are an error there, and the device stops.

    A unit read only while gradients are off, as inside a torch.autograd.Function, is reduced after the backward. A unit
    read during the backward gets an anchor outside the chain: an inner backward through this anchor must not run the
    anchors of the chain.

Note [The table of a backward]
    The forward only records events: a saved view of a unit (`Due`), a read by a checkpoint (`Reread`), the use of the
    last saved view by a backward inside the loss (None). Then `backward_of` makes a `Due` for each unit:

    1. Units are in the order of their last saves. A checkpoint runs again forwards, so its units are reversed.
    2. A unit read by a checkpoint stays until an anchor runs. There are two cases. If the program reads the unit in the
       backward, the checkpoint is running again: the unit stays until its own anchor (`until`). If an anchor gathers
       the unit, the checkpoint may run again later: the unit stays until the anchor made before the checkpoint
       (`early`). In both cases a unit gathered twice, or by several checkpoints, stays until the earlier anchor. A
       frozen unit waits for an anchor only if gathered twice or by several checkpoints, or if views of the unit were
       also saved.
    3. All other units stay until their last saved view was used.
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
    """One unit in the table of a backward; in a record: a view was saved."""

    tape: Saves
    before: int  # the unit is gathered before an anchor with a lower number runs
    until: int | None  # the last anchor to run while the unit stays; None: until its last view was used
    early: int  # `until`, if an anchor gathers the unit


class Reread(NamedTuple):
    """In a record: a checkpoint reads a unit."""

    tape: Saves
    before: int  # as in `Due`
    checkpoint: tuple[int, int]  # the checkpoint's number, and the number of the last anchor before it
    is_nested: bool  # read by a checkpoint inside this one
    is_new: bool  # gathered for this read


Event: TypeAlias = tuple[U, Due | Reread | None]  # None: the last saved view was used


class Backward(NamedTuple, Generic[U]):
    """The table of a backward."""

    due: dict[U, Due]  # the unit to be gathered first comes last
    reread: set[U]  # units that checkpoints read
    tied: set[U]  # units that stay until an anchor runs


def backward_of(
    record: Iterable[Event[U]], numbers: Mapping[U, int], ends: Callable[[U], bool], is_linked: bool
) -> Backward[U]:
    """Return the table of a record.

    `numbers`: the number of each unit's anchor; for a frozen unit, of the last anchor before its first read.
    `ends(unit)`: True if the unit has trainable leaves, or saved views left.
    """
    # `reads` by unit: its last checkpoint; True if gathered twice, or by several checkpoints (`is_shared`); the last
    # anchor made before all its checkpoints
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

    `outputs`: the root (Note [One root] in `autograd.py`), then one output of each anchor if there are several ranks.
    Units of `planned` get anchors in its order, other units when read.
    """

    def __init__(self, root: Tensor, is_linked: bool, planned: Iterable[TapeUnit]):
        self.is_linked, self.outputs = is_linked, [root]
        self.gathered: list[tuple[int, int]] = []  # (tape, unit) of each gather, in order
        self.numbers: dict[TapeUnit, int] = {}  # of the unit's anchor, or of the last anchor before its first read
        self._record: list[Event[TapeUnit]] = []
        self.table: Backward[TapeUnit] = Backward({}, set(), set())
        self._waiting: list[tuple[int, TapeUnit]] = []  # (anchor, unit): kept until that anchor, or a lower one, runs
        self._checkpoint: tuple[object, tuple[int, int]] = None, (0, 0)  # the last checkpoint's hook, and numbers
        self._planned = iter(planned)

    def bind(self, unit: TapeUnit, take: OnGrads, leaves: UnitLeaves) -> list[Tensor]:
        """Return the leaves as outputs of an anchor. `take` gets the sum of their gradients over all touches."""
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
        """As `bind`, in the backward but outside the chain: `take` gets the gradients of this touch."""
        *bound, _ = Anchor.apply(self.outputs[0], (take, unit, leaves))
        return bound

    def link(self, stop: TapeUnit | None, take: OnGrads) -> None:
        """Before `stop` in the planned order, give an empty anchor to each unit lacking an anchor."""
        for unit in self._planned:
            if unit is stop:
                return
            if unit.anchor is None and unit.entry.trained:
                self._linked(unit, take, [])

    def save(self, unit: TapeUnit, tape: Saves) -> None:
        self._record.append((unit, Due(tape, len(self.outputs), None, self.numbers[unit])))

    def rerun(self, unit: TapeUnit, tape: Saves, block: Block, is_new: bool) -> None:
        hook, (number, _) = self._checkpoint
        if block.hook is not hook:  # - 2: the last anchor may be this unit's, made by this read
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
        """Gather all units due before this one."""
        if unit in (rows := self.table.due):
            # a kept unit starts no gathers: other ranks may read it at another time
            if self.is_linked and next(reversed(rows)) is not unit and not unit.is_kept:
                self._catch_up(-1, unit)
            if (until := rows.pop(unit).until) is not None:
                unit.stays_for = "anchor"
                self._waiting.append((until, unit))

    def anchor_ran(self, unit: TapeUnit) -> None:
        """Called by the unit's anchor: no node made after the anchor runs any more."""
        rows, number = self.table.due, self.numbers[unit]
        if rows and rows[next(reversed(rows))].before > number:
            self._catch_up(number)
        if self._waiting:
            for until, other in self._waiting:
                if until >= number:
                    other.forget()
            self._waiting = [(until, other) for until, other in self._waiting if until < number]

    def settle(self) -> None:
        """End the forward. Views saved before the first anchor will not be used."""
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
        """Drop all nodes: nodes and tapes form a cycle unseen by Python's garbage collector."""
        for part in (self.outputs, self._record, self.numbers, self._waiting):
            part.clear()
        self._checkpoint, self.table = (None, (0, 0)), Backward({}, set(), set())
