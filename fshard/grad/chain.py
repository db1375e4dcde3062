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
from sys import maxsize
from typing import NamedTuple, Protocol

from torch import Tensor

from .autograd import Anchor, Block, OnGrads
from .under_way import Buffers, Leaves, TapeUnit


class Gathering(Protocol):
    """What gathers a unit in the backward: a `Tape`."""

    index: int

    def again(self, unit: TapeUnit) -> Buffers:
        """Return a unit's buffers, which are gathered if they are not in memory."""


class Saved(NamedTuple):
    """When a unit was saved, or read in a checkpoint, last: how many outputs the chain had."""

    tape: Gathering
    since: int
    hook: object = None  # of the checkpoint


class Chain:
    """The anchors of a forward, and what it saved (Note [One order on all ranks]): linked if there are several ranks.

    `outputs` is the root, and the last output of each anchor that is linked. The units of `planned` come in that order,
    others as they are read.
    """

    def __init__(self, root: Tensor, is_linked: bool, planned: Iterable[TapeUnit]):
        self.is_linked, self.outputs = is_linked, [root]
        self.gathered: list[tuple[int, int]] = []  # the tape and the number of each unit that ranks gathered, in order
        # the units that the backward will gather again, the first one last
        self.saved: dict[TapeUnit, Saved] = {}
        # units that stay until an anchor runs that was made no later than the one with this number
        self._waiting: list[tuple[int, TapeUnit]] = []
        # the hook of the checkpoint that read last, and the number of an anchor that was made before that began
        self._reading: tuple[object, int] = None, 0
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
        self.link(unit.number, take)
        return self._linked(unit, take, leaves)

    def _linked(self, unit: TapeUnit, take: OnGrads, leaves: Leaves) -> list[Tensor]:
        *bound, unit.anchor = Anchor.apply(self.outputs[-1], (take, unit, leaves))
        if self.is_linked:
            unit.since = len(self.outputs)
            self.outputs.append(unit.anchor)
        return bound

    def bind_late(self, unit: TapeUnit, take: OnGrads, leaves: Leaves) -> list[Tensor]:
        """The leaves of a touch in the backward, which is no part of the chain: `take` gets their gradients."""
        *bound, _ = Anchor.apply(self.outputs[0], (take, unit, leaves))
        return bound

    def link(self, stop: int | None, take: OnGrads) -> None:
        """Give an anchor to each planned unit up to `stop` that has none, in a chain; with None, to all of them."""
        for unit in self._planned:
            if unit.number == stop:
                return
            if unit.anchor is None and unit.entry.trained:
                self._linked(unit, take, [])

    def save(self, unit: TapeUnit, tape: Gathering) -> None:
        """Put a unit first in the order in which the backward gathers."""
        self.saved.pop(unit, None)
        self.saved[unit] = Saved(tape, len(self.outputs))

    def rerun(self, unit: TapeUnit, tape: Gathering, block: Block, is_new: bool) -> None:
        """Note that a checkpoint reads a unit: it gathers its units in the same order when it runs again.

        `is_new` says that the unit was gathered for this.
        """
        is_known = unit in self.saved and self.saved[unit].hook is block.hook
        if not is_known and block.hook is not self._reading[0]:
            self._reading = block.hook, len(self.outputs) - 2  # the last may be of this read
        unit.rerun_by(block, self.is_linked, is_known and is_new, maxsize if is_known else self._reading[1])
        if is_known:
            return
        self.saved.pop(unit, None)
        units = [(unit, tape)]
        while self.saved:
            last, entry = self.saved.popitem()
            if entry.hook is not block.hook:
                self.saved[last] = entry
                break
            units.append((last, entry.tape))
        units[1:] = units[:0:-1]
        self.saved.update((x, Saved(by, len(self.outputs), block.hook)) for x, by in units)

    def turn(self, unit: TapeUnit) -> None:
        """Gather again what comes before a unit, and note that this is gathered now."""
        if unit in self.saved:
            # the place of a kept unit may differ between ranks
            if self.is_linked and next(reversed(self.saved)) is not unit and not unit.is_kept:
                self._catch_up(-1, unit)
            entry = self.saved.pop(unit)
            if (reruns := unit.reruns).stays_until_anchor:
                is_last = entry.hook is not None and not reruns.is_shared  # of the checkpoint that runs again now
                self._waiting.append((unit.since if is_last else min(unit.since, reruns.anchor_before), unit))

    def passes(self, unit: TapeUnit) -> None:
        """The anchor of a unit runs: no node of autograd that was made after it will run any more."""
        if self.saved and self.saved[next(reversed(self.saved))].since > unit.since:
            self._catch_up(unit.since)
        if self._waiting:
            for since, other in self._waiting:
                if since >= unit.since:
                    other.forget()
            self._waiting = [(since, other) for since, other in self._waiting if since < unit.since]

    def settle(self) -> None:
        """End the forward: what was saved before the first anchor will not be used."""
        while self.is_linked and self.saved and self.saved[first := next(iter(self.saved))].since == 1:
            del self.saved[first]

    def _catch_up(self, since: int, until: TapeUnit | None = None) -> None:
        """Gather again what was saved when there were more outputs, as far as the unit `until`."""
        while self.saved:
            last = next(reversed(self.saved))
            entry = self.saved[last]
            if last is until or entry.since <= since:
                return
            del self.saved[last]
            entry.tape.again(last)
            self._waiting.append((min(last.since, last.reruns.anchor_before), last))

    def close(self) -> None:
        """Drop all nodes: they hold tapes, in a cycle that Python's garbage collector cannot see."""
        self.outputs.clear()
        self.saved.clear()
        self._waiting.clear()
        self._reading = None, 0
