"""Where a backward puts its gradients, and their reductions: started unit by unit, summed beside the computation.

Note [Sums beside the computation]
    On an accelerator the waits for a reduction's messages, its sums, and the stages and hooks that follow run on a
    stream of their own, `Plan.crossings.sums`. What is given to it first waits for the computation so far. The
    computation waits for it once for each unit, before the buffer of the next unit's gradients is made (the sums were
    started a unit earlier), and when all reductions are done: until then nobody reads the sums.

    What a reduction sends and receives is memory of the computation's. When the host lets go of it the allocator may
    give it to the computation again, while the other stream still reads it. So each reduction (`Pending`) is kept, and
    with it what it sends and receives, until the computation has waited. `Tensor.record_stream` would spare the wait,
    but then memory would come back when the device has passed an event, not at a point of the program: the peak
    would depend on timing. What is made on the other stream is used on it in order, and needs no such care.

    Where the device is the CPU, and in a graph that is traced, there are no streams, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.reduction import EXACT, Reduction
from ..core.tracing import is_tracing
from . import transfer
from .offload import HOST
from .plan import Plan
from .sharded import Sharded


@dataclass(frozen=True)
class Gradients:
    """Where a backward puts its gradients: each unit's are written to (or, with `add`, added to) its flat buffer of
    `local`, or a buffer of their own without it, and from there reduced into `reduced`, if that is given.

    Both give the same whenever they are called, and are not before the first gradient is there: while activations are
    at their most, there are no gradients in memory."""

    reduced: Callable[[], Sharded] | None
    local: Callable[[], Sharded] | None = None
    add: bool = False
    by: Reduction = EXACT
    lost: Any = ()  # a Sharded, with a wire that has feedback
    later: Axes = ()  # the axes that are not reduced over yet

    def buffer(self, plan: Plan, unit: int, kind: int) -> Tensor:
        """The flat buffer a unit's gradients go to."""
        if self.local is not None:
            return self.local().piece(unit, kind)
        assert self.reduced is not None
        axes = self.reduced().view.axes(kind)
        like = torch.empty(0, dtype=transfer.buffer_dtype(plan, kind), device=plan.device)
        return primitives.buffer(
            plan.live_mesh(), axes + plan.rest(axes), plan.units[unit].lengths[kind], like, lent=True
        )

    def emit(self, unit: int, kind: int, flat: Tensor) -> Pending | None:
        """Start the reduction of a filled buffer."""
        if self.reduced is None:
            return None
        return transfer.reduce(flat, self.reduced(), unit, kind, self.by, self.lost, self.later)


class Reductions:
    """The reductions of one backward, in the order in which they were started."""

    def __init__(self, plan: Plan):
        self._side = None if plan.device == HOST or is_tracing() else plan.crossings.sums
        self._under_way: list[Pending] = []
        self._stepped: list[Pending] = []  # what the side stream may still be reading

    def add(self, pending: Pending) -> None:
        """One that was started."""
        self._under_way.append(pending)

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.ahead()

    def join(self) -> None:
        """The computation waits for the sums that were started: what they read may be used again."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()

    def move_on(self, ahead: int) -> None:
        """Take all but the last few reductions one stage further; those that are done drop out.

        The youngest first: its next stage is under way while the others are waited for.
        """
        cut_off = max(0, len(self._under_way) - ahead)
        if not cut_off:
            return
        if self._side is not None:  # before any of it can fail
            self._stepped += self._under_way[:cut_off]
        with self._beside():
            stepped = [pending.step() for pending in reversed(self._under_way[:cut_off])]
        self._under_way[:cut_off] = [p for p in reversed(stepped) if isinstance(p, Pending)]

    def finish(self) -> None:
        """Wait for every reduction."""
        while self._under_way:
            self.move_on(0)
        self.join()

    def drop(self) -> None:
        """Wait for the messages under way, and let go of everything; no next stage starts."""
        try:
            for pending in self._under_way:
                pending.drop()
        finally:
            self.join()
            self._under_way.clear()


def settle(plan: Plan) -> None:
    """Have the host wait for the device, if it is the host that updates something."""
    if any(kind.host and kind.trainable for kind in plan.kinds):
        plan.crossings.down.settle()
