"""Sums of gradients that are handed on, unit by unit, instead of being kept until all are there.

Note [Updates in a backward]
    With `Gradients.take` a backward hands each unit's sum over ranks to a function, which may write to the parameters
    of that unit: an optimizer that updates them. Then the memory of the sum is free, so gradients of two units are in
    memory, not of all.

    A unit must not be written to while the backward still reads it. Gathered buffers are memory of their own, so what
    counts is whether the unit will be gathered again. It will not: autograd runs the nodes that were made last first,
    and a unit's anchor is made when the unit is read first (Note [Anchors] in `anchors.py`), so every node that reads
    the unit, and every checkpoint that reads it again, comes before its gradients. If a program finds another way, the
    tape raises an error. Leaves that this rank has whole are read where they are, also by what autograd does not know
    of (attributes of a user's function), so their sums wait for the end of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
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
    """The sums of one backward: `take` gets each when it is there, those of the kinds `late` at the end."""

    def __init__(self, take: Take, late: Collection[int]):
        self._take, self._late = take, late
        self._waiting: list[tuple[int, int, Tensor]] = []
        self.taken: set[int] = set()  # units

    def after(self, pending: Pending, unit: int, kind: int) -> Pending:
        """A reduction whose result is handed on."""
        return pending.then(partial(self._arrived, unit, kind))

    def _arrived(self, unit: int, kind: int, total: Tensor) -> Tensor:
        if kind in self._late:
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
