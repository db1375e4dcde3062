"""The anchors of one forward in one order, and the gathers of its backward in one order, on all ranks.

Note [One order on all ranks]
    Ranks may differ in what they compute: a branch, an expert or a head that the batch chooses. Their collectives must
    not. Between several ranks each anchor takes an output of the anchor before it, and the backward starts from the
    last one, beside the loss. So every anchor runs on every rank, in the reverse of the order in which they were made,
    and gets None for what the loss does not use. That is the order in which units were first read: ranks that gather
    units must read the same ones. Where a unit is whole on every rank, ranks may read different units. Then an eager
    step has an order of its own (`Schedule.likely`): units that come before another one there, and were not read, get
    an anchor without leaves with that one.

    The gathers of a backward are in one order, too: the reverse of that in which units were last saved, or read in a
    checkpoint. A checkpoint that runs again reads its units as it did before, and each of them stays until its anchor
    runs. Autograd runs the nodes made last first. So when an anchor runs, every unit that was saved after that anchor
    was made has been gathered again, if the loss depends on what saved it. If it does not, the tape gathers the unit
    then; and it gathers no unit before those that were saved later. What was saved may differ: ranks compare it in the
    collective that sums the loss. If it differs, all ranks gather all units that were read, before the backward begins.
    On an accelerator the host does not wait for that sum: the device stops with an error.

    A function that runs a backward of its own reads its units where gradients are off, and once more in the backward.
    Nobody knows when their gradients come. Units that were only read where gradients are off are reduced after the
    backward, and what is read in a backward is no part of the chain: its own backward must not run earlier anchors.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from .autograd import Anchor, Block, OnGrads
from .backward import Gathering, Read, Row, Table, UsedUp, table
from .under_way import Leaves, TapeUnit


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
        self._record: list[tuple[TapeUnit, Row | Read | UsedUp]] = []
        self.table: Table[TapeUnit] = Table({}, set(), set())  # of the record, once the forward has ended
        # units that stay until an anchor runs that was made no later than the one with this number
        self._waiting: list[tuple[int, TapeUnit]] = []
        self._checkpoint: tuple[object, int] = None, 0  # the hook of the checkpoint that read last, and its number
        self._planned, self._tapes = iter(planned), 0

    def join(self) -> int:
        """Count a tape that gathers for this forward; returns its number."""
        self._tapes += 1
        return self._tapes

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

    def save(self, unit: TapeUnit, tape: Gathering) -> None:
        """Note that autograd saves a place of a unit."""
        self._record.append((unit, Row(tape, len(self.outputs), None, self.numbers[unit])))

    def rerun(self, unit: TapeUnit, tape: Gathering, block: Block, is_new: bool) -> None:
        """Note that a checkpoint reads a unit; `is_new` says that the unit was gathered for this."""
        hook, number = self._checkpoint
        if block.hook is not hook:  # outermost checkpoints run one after another
            self._checkpoint = block.hook, number + 1
        read = Read(tape, len(self.outputs), self._checkpoint[1], block.is_nested, is_new)
        self._record.append((unit, read))

    def use_up(self, unit: TapeUnit) -> None:
        """Note that a backward inside the loss has used the last saved place of a unit."""
        self._record.append((unit, "used up"))
        if self._checkpoint[1] and unit in self._made().tied:
            unit.stays_for = "anchor"

    def restart(self) -> None:
        """Note that the forward begins anew: nothing is saved."""
        self._record += [(unit, "used up") for unit in self.numbers]

    def end_record(self) -> Table[TapeUnit]:
        """Return the table of the backward, made of the record at the first call after the forward."""
        if self._record:
            self.table = self._made()
            self._record.clear()
        return self.table

    def _made(self) -> Table[TapeUnit]:
        return table(self._record, self.numbers, lambda unit: bool(unit.entry.trained), self.is_linked)

    def tie(self) -> None:
        """Keep until the backward ends what no row will end: it was used up in the forward, and checkpoints read it."""
        for unit in self.table.tied:
            if unit.stays_for or unit not in self.table.rows:
                unit.stays_for = "anchor"

    def reach(self, unit: TapeUnit) -> None:
        """Gather again what comes before a unit, and note that this is gathered now."""
        if unit in (rows := self.table.rows):
            # the place of a kept unit may differ between ranks
            if self.is_linked and next(reversed(rows)) is not unit and not unit.is_kept:
                self._catch_up(-1, unit)
            if (until := rows.pop(unit).until) is not None:
                self._wait(unit, until, True)

    def anchor_ran(self, unit: TapeUnit) -> None:
        """The anchor of a unit runs: no node of autograd that was made after it will run any more."""
        rows, number = self.table.rows, self.numbers[unit]
        if rows and rows[next(reversed(rows))].before > number:
            self._catch_up(number)
        if self._waiting:
            for until, other in self._waiting:
                if until >= number:
                    other.forget()
            self._waiting = [(until, other) for until, other in self._waiting if until < number]

    def settle(self) -> None:
        """End the forward: what was saved before the first anchor will not be used."""
        rows = self.end_record().rows
        while self.is_linked and rows and rows[first := next(iter(rows))].before == 1:
            del rows[first]

    def _catch_up(self, number: int, stop: TapeUnit | None = None) -> None:
        """Gather again what comes before an anchor runs, as far as the unit `stop`."""
        rows = self.table.rows
        while rows:
            last = next(reversed(rows))
            row = rows[last]
            if last is stop or row.before <= number:
                return
            del rows[last]
            row.tape.again(last)
            self._wait(last, row.early, row.until is not None)

    def _wait(self, unit: TapeUnit, until: int, is_tied: bool) -> None:
        if is_tied:
            unit.stays_for = "anchor"
        self._waiting.append((until, unit))

    def close(self) -> None:
        """Drop all nodes: they hold tapes, in a cycle that Python's garbage collector cannot see."""
        self.outputs.clear()
        self._record.clear()
        self.numbers.clear()
        self._waiting.clear()
        self._checkpoint, self.table = (None, 0), Table({}, set(), set())
