"""Where a backward writes its gradients, and their reductions, which run beside the computation.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..comm.mesh import Axes
from ..comm.ranks import Pending
from ..comm.reduction import DEFAULT, Reduction, Sums
from ..core.flat import put
from ..core.tracing import is_tracing
from . import reducing
from .handing import Take
from .offload import HOST
from .plan import Plan
from .schedule import Part, schedule
from .sharded import Sharded


@dataclass(frozen=True)
class Gradients:
    """Where a backward writes its gradients.

    Each unit's gradients are written to (with `add`, added to) a flat buffer: that of `local`, or a new one. If
    `reduced` is given, the buffer is then summed over ranks into `reduced`.

    `reduced` and `local` return the same value at every call, and allocate it at the first: there are no gradients in
    memory before the backward has one, while activations take the most.
    """

    reduced: Callable[[], Sharded] | None
    local: Callable[[], Sharded] | None = None
    add: bool = False
    by: Reduction = DEFAULT
    later: Axes = ()  # the axes that this backward does not reduce over
    take: Take | None = None  # is handed each sum in `reduced` (Note [Updates in a backward])

    @cached_property
    def _reducer(self) -> reducing.Reducer:
        assert self.reduced is not None
        return reducing.Reducer(self.reduced(), self.by, self.later)

    @cached_property
    def _local(self) -> tuple[Mapping[tuple[int, int], Part], Sequence[Tensor]] | None:
        local = None if self.local is None else self.local()
        return None if local is None else (schedule(local.view).parts, local.tensors)

    def buffer(self, unit: int, kind: int) -> Tensor:
        """The flat buffer (n,) that a unit's gradients are written to."""
        if self._local is None:
            return self._reducer.buffer(unit, kind)
        parts, rows = self._local
        return parts[unit, kind].of(rows)

    def filled(self, unit: int, part: Part, grads: Sequence[Tensor | None]) -> Tensor:
        """The flat buffer (n,) with the gradients of the leaves of a part; zeros for leaves that have none."""
        flat = self.buffer(unit, part.kind)
        # embedding(sparse=True) gives a sparse gradient
        dense = [g if g.layout is torch.strided else g.to_dense() for g in grads if g is not None]
        if len(dense) == len(grads):
            part.places.put(flat, dense, self.add)
        else:
            starts = [start for start, grad in zip(part.places.starts, grads, strict=True) if grad is not None]
            put(flat, dense, starts, self.add)
        return flat

    def emit(self, unit: int, kind: int, flat: Tensor) -> Pending | None:
        """Start the reduction of a filled buffer; None if gradients stay local."""
        return None if self.reduced is None else self._reducer.start(unit, kind, flat)


class Reductions:
    """The reductions of one backward into `into` that are under way, in the order in which they started."""

    def __init__(self, plan: Plan, into: Gradients | None = None):
        self._side = None if plan.device == HOST or is_tracing() else plan.crossings.sums
        by = None if into is None or plan.grad_wire is not None else into.by
        self._adds = not (type(by) is Sums and by.is_fast(plan.device))  # after the messages, beside the computation
        self._ahead, self._stages = plan.ahead, sum(size > 1 for _, size in plan.axes)
        self._under_way: list[tuple[int, Pending]] = []  # and the unit of each
        self._stepped: list[Pending] = []  # what the side stream may still be reading

    def add(self, unit: int, pending: Pending) -> None:
        """Keep a reduction of a unit that was started."""
        self._under_way.append((unit, pending))

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.ahead()

    def join(self) -> None:
        """Make the computation wait for the sums so far, and drop the buffers that they read."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()

    def move_on(self, following: int) -> None:
        """Take older reductions one stage further, so that the gradients of the unit `following` have room next.

        Those stay as they are that `Ahead.reductions` names.
        """
        number = self._ahead.number
        if number == 1:  # as where units are equal
            num = len(self._under_way)
            while num and self._under_way[num - 1][0] == self._under_way[-1][0]:
                num -= 1
            return self._step(num)
        self._leave(self._ahead.reductions(following, self._units(), self._stages))

    def _units(self) -> list[int]:
        return list(dict.fromkeys(unit for unit, _ in self._under_way))

    def _leave(self, number: int) -> None:
        """Take all reductions one stage further but those of so many units, the last ones."""
        units = self._units()
        older = units[: max(0, len(units) - number)]
        self._step(sum(unit in older for unit, _ in self._under_way))

    def make_room(self, unit: int) -> None:
        """Wait for reductions until the gradients of a unit that has come have room beside those under way.

        Sums that the backend takes have had a unit's time, and their buffers are free; others are still to be added.
        """
        if self._stages > 1:
            return
        if self._ahead.number is None:
            self.move_on(unit)
        if self._side is not None and not self._adds:  # as after this unit, so that its buffer takes their place
            self._leave(max(0, self._ahead.reductions(unit - 1, [*self._units(), unit], self._stages) - 1))

    def _step(self, num: int) -> None:
        """Take the first `num` reductions one stage further, and drop those that are done.

        The youngest goes first: its next stage is under way while the host waits for the others.
        """
        if not num:
            return
        units, older = zip(*self._under_way[:num], strict=True)
        if self._side is not None:  # kept before a step can raise: the device may be reading them even then
            self._stepped += older
        with self._beside():
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


def settle(plan: Plan) -> None:
    """Make the host wait for the device, if the plan has trainable leaves in host memory: the host updates them."""
    if any(kind.host and kind.trainable for kind in plan.kinds):
        plan.crossings.down.settle()
