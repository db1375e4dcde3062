"""The gathers of a tape that are under way: which unit's is started, how far it is, and what arrives."""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.ranks import Pending
from ..core.profiling import named
from . import transfer
from .kept import Buffers, Kept
from .schedule import schedule
from .sharded import Sharded


class Arrivals:
    """The gathers of one value of the parameters, of a unit from what `kept` has of it if there is anything.

    A gather has a stage for each axis. With several stages, one unit more is under way for each, one stage behind the
    unit before it. `copied` is as of `transfer.is_buffer`.
    """

    def __init__(self, params: Sharded, kept: Kept, copied: bool):
        self._kept, self._gathers = kept, transfer.Gathers(params, copied)
        self._entries, self._ahead = schedule(params.view).entries, params.plan.ahead
        self._coming: dict[int, dict[int, Pending]] = {}  # by unit, then by kind
        self._stage: dict[int, int] = {}  # by unit: how many stages of its gather have started
        self.stages = transfer.stages(params.plan, params.view.over)  # of a gather
        self.most = self._ahead.most(self.stages)  # units whose gathers are under way at once

    def start(self, unit: int) -> None:
        """Start the gather of a unit, unless it is under way."""
        if unit not in self._coming:
            kept = self._kept.gather(unit) if self._kept.keeps_any else {}
            started = self._gathers.start(self._entries[unit], kept)
            self._coming[unit] = started | kept if kept else started
            self._stage[unit] = 1

    def ahead(self, current: int | None, following: Iterable[int]) -> None:
        """Gather as many of the units that follow on the current one as the plan says.

        Gathers under way go on to their next stage, the others start.
        """
        units = self._ahead.gathers(current, following, self.stages)
        last = max(0, len(units) - self.stages)  # of those whose stages may all start; each after it is one behind
        for number, unit in enumerate(units):
            stages = self._kept.stages(unit, self.stages) if self._kept.keeps_any else self.stages
            if number > last:
                stages -= number - last
            if unit not in self._coming and stages > 0:
                self.start(unit)
            elif unit in self._coming and self._stage[unit] < stages:
                self._coming[unit] = {kind: pending.advance() for kind, pending in self._coming[unit].items()}
                self._stage[unit] += 1

    def take(self, unit: int) -> Buffers:
        """Wait for the gather of a unit, which starts now if it is not under way."""
        self.start(unit)
        with named("wait", self._entries[unit].name):
            return {kind: pending.wait() for kind, pending in self._coming.pop(unit).items()}

    def drop(self) -> None:
        """Wait for the gathers that were started and not used."""
        for pendings in self._coming.values():
            for pending in pendings.values():
                pending.drop()
        self._coming.clear()

    def clear(self) -> None:
        """Drop all gathers, without waiting."""
        self._coming.clear()
