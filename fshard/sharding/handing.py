"""Sums of gradients that are handed on, unit by unit, instead of being kept until all are there.

Note [Updates in a backward]
    With `Gradients.take` a backward hands each unit's sum over ranks to a function, which may write to the parameters
    of that unit: an optimizer that updates them. Then the memory of the sum is free, so gradients of two units are in
    memory, not of all.

    A unit must not be written to while the backward still reads it. Gathered buffers are memory of their own, so what
    counts is whether the unit will be gathered again: it may, as long as it has saved places. A node of the backward
    may come after the unit's gradients and use a place, where the loss read a leaf through `detach`. So the sum of such
    a unit waits for the end of the backward. So do the sums of leaves that this rank has whole, which a loss reads
    where they are. If a unit is gathered again after it was written to, by a checkpoint that runs its function again,
    this is an error: no place said that it would be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.ranks import Pending
from .sharded import Sharded, whole_view

Take = Callable[[int, int, Tensor], None]  # of a unit's and kind's sum over ranks, (n / W,)


class Sums(Sharded):
    """Gradients of parameters as a backward writes them, of which only the pieces exist that are asked for."""

    def __init__(self, params: Sharded):
        plan, trained = params.plan, params.trainable.view.kinds
        super().__init__(whole_view(plan, plan.grads_over, trained), [])
        self._pieces: dict[tuple[int, int], Tensor] = {}  # by unit and kind

    def piece(self, unit: int, kind: int) -> Tensor:
        """This rank's interval (n / W,) of one unit and kind: the same tensor at every call, until it is dropped."""
        if (unit, kind) not in self._pieces:
            plan, over = self.plan, self.view.over
            like = torch.empty(0, dtype=plan.kinds[kind].precision.grads, device=plan.device)
            numel = plan.length(unit, kind, over)
            self._pieces[unit, kind] = primitives.buffer(plan.live_mesh(), plan.rest(()), numel, like, lent=False)
        return self._pieces[unit, kind]

    def drop(self, unit: int, kind: int) -> None:
        """Drop one piece: whoever holds the tensor has it alone."""
        del self._pieces[unit, kind]


class Handing:
    """The sums of one backward: `take` gets each when it is there, or at the end where `is_read` says so by then."""

    def __init__(self, take: Take, is_read: Callable[[int, int], bool]):
        self._take, self._is_read = take, is_read
        self._waiting: list[tuple[int, int, Tensor]] = []
        self.taken: set[int] = set()  # units

    def after(self, pending: Pending, unit: int, kind: int) -> Pending:
        """A reduction whose result is handed on."""
        return pending.then(partial(self._arrived, unit, kind))

    def _arrived(self, unit: int, kind: int, total: Tensor) -> Tensor:
        if self._is_read(unit, kind):
            self._waiting.append((unit, kind, total))
        else:
            self.taken.add(unit)
            self._take(unit, kind, total)
        return total

    def finish(self) -> None:
        """Hand on the sums that waited for the end of the backward."""
        for unit, kind, total in self._waiting:
            self._take(unit, kind, total)
        self._waiting.clear()
