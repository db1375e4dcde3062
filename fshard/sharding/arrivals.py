"""The gathers of a tape that are under way: which unit's is started, how far it is, and what arrives."""

from __future__ import annotations

from collections.abc import Iterable

from ..comm.ranks import Pending
from ..core.profiling import named
from ..core.tracing import is_tracing
from . import transfer
from .kept import Buffers, Kept
from .offload import HOST
from .schedule import schedule
from .sharded import Sharded


class Arrivals:
    """The gathers of one value of the parameters, of a unit from what `kept` has of it if there is anything.

    A gather has a stage for each axis. With several stages, one unit more is under way for each, one stage behind the
    unit before it. On an accelerator a stream beside the computation waits for a stage, and starts the next one. What
    was sent is kept until the computation has waited for that stream. `copied` is as of `transfer.is_buffer`.
    """

    def __init__(self, params: Sharded, kept: Kept, copied: bool):
        self._kept, self._gathers = kept, transfer.Gathers(params, copied)
        self._entries, self._ahead = schedule(params.view).entries, params.plan.ahead
        self._coming: dict[int, dict[int, Pending]] = {}  # by unit, then by kind
        self._stage: dict[int, int] = {}  # by unit: how many stages of its gather have started
        self._stepped: list[Pending] = []  # what may still be sent of earlier stages
        self.stages = transfer.stages(params.plan, params.view.over)  # of a gather
        self.most = self._ahead.most(self.stages)  # units whose gathers are under way at once
        has_streams = self.stages > 1 and params.plan.device != HOST and not is_tracing()
        self._side = params.plan.crossings.stages if has_streams else None

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
                self._advance(unit)

    def _advance(self, unit: int) -> None:
        """Start the next stage of the gather of a unit."""
        older = self._coming[unit]
        self._stage[unit] += 1
        if self._side is None:
            self._coming[unit] = {kind: pending.advance() for kind, pending in older.items()}
            return
        self._stepped += older.values()
        with self._side.ahead():
            self._coming[unit] = {kind: pending.advance() for kind, pending in older.items()}

    def _join(self) -> None:
        """Make the computation wait for the stages that have ended, and drop what they sent."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()

    def take(self, unit: int) -> Buffers:
        """Wait for the gather of a unit, which starts now if it is not under way."""
        self.start(unit)
        with named("wait", self._entries[unit].name):
            self._join()
            return {kind: pending.wait() for kind, pending in self._coming.pop(unit).items()}

    def drop(self) -> None:
        """Wait for the gathers that were started and not used."""
        for pendings in self._coming.values():
            for pending in pendings.values():
                pending.drop()
        self._join()
        self._coming.clear()

    def clear(self) -> None:
        """Drop all gathers, without waiting."""
        self._coming.clear()
        self._stepped.clear()
