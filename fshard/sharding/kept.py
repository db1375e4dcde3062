"""What stays of gathered units from the forward to the backward, besides what autograd saves.

Note [What stays of a unit]
    `Unit.kept` says whether all of a unit's gathered buffers stay, or a copy of them that is cut over some axes, or
    nothing. A copy is made when the unit is gathered in the forward; every later gather of the unit is from the copy,
    over these axes alone: that for the backward, those of a checkpoint that runs again, and a second one in the
    forward. It has the dtype of computation, and values that a wire has decoded already.

    All of a unit stays where its leaves are trainable, until its gradients have come. Of frozen leaves, whose backward
    has no end that the tape could see, only what autograd saves stays. Copies stay until the unit's gradients have
    come and its last saved place was used. Leaves that are whole on every rank are not copied.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes
from ..comm.ranks import Pending
from . import transfer
from .schedule import schedule
from .sharded import Sharded

Buffers = dict[int, Tensor]  # a unit's gathered flat buffers (n,), or copies (n / W,) that are cut, by kind


class Kept:
    """The buffers, or the copies of buffers, that one forward keeps for its backward.

    `differentiates` says whether the backward gives gradients of these parameters.
    """

    def __init__(self, params: Sharded, differentiates: bool):
        self._params, self._plan, self._differentiates = params, params.plan, differentiates
        self._parts: dict[int, Buffers] = {}  # by unit
        self._keeps_all = False
        self.keeps_any = schedule(params.view).keeps  # whether there is anything to ask this object for

    def keep_all(self) -> None:
        """From now on keep all of each unit, whatever the plan says; copies that were cut are dropped."""
        self._keeps_all = self.keeps_any = True
        self._parts = {unit: parts for unit, parts in self._parts.items() if self._plan.units[unit].kept == ()}

    def _axes(self, unit: int) -> Axes | None:
        return () if self._keeps_all else self._plan.units[unit].kept

    def keep(self, unit: int, buffers: Buffers) -> None:
        """Keep of a unit's buffers what the plan says; what is kept already stays."""
        axes = self._axes(unit)
        if axes is None or unit in self._parts or not (axes or self._trains(unit)):
            return
        cut = [kind for kind, full in buffers.items() if self._params.view.axes(kind) and full.numel()]
        self._parts[unit] = {kind: self._copy(buffers[kind], axes) for kind in cut} if axes else buffers

    def _copy(self, full: Tensor, axes: Axes) -> Tensor:
        """This rank's part (n / W,) of a buffer (n,)."""
        part = full.chunk(self._plan.num_parts(axes))[self._plan.index(axes)]
        return primitives.buffer(self._plan.live_mesh(), axes, part.numel(), part, lent=False).copy_(part)

    def gather(self, unit: int) -> dict[int, Pending]:
        """Start the gathers of a unit's buffers from what was kept, by kind; none if nothing was."""
        axes = self._axes(unit)
        if unit not in self._parts or axes is None:
            return {}
        if axes:
            return transfer.gather_copies(self._plan, unit, self._parts[unit], axes)
        return {kind: transfer.arrived(full) for kind, full in self._parts[unit].items()}

    def stages(self, unit: int, default: int) -> int:
        """Return the number of stages of a gather from what was kept, one for each axis; `default` if nothing was."""
        if unit not in self._parts:
            return default
        axes = self._axes(unit)
        return transfer.stages(self._plan, axes) if axes else 0

    def _trains(self, unit: int) -> bool:
        """Whether gradients of leaves of the unit will come to the tape."""
        kinds = ((k, self._plan.units[unit].lengths[k]) for k in self._params.view.kinds)
        return self._differentiates and any(length and self._plan.kinds[k].trainable for k, length in kinds)

    def drop(self, unit: int) -> None:
        """Drop what was kept of a unit."""
        self._parts.pop(unit, None)

    def end(self, saved: Collection[int]) -> None:
        """End the forward: if there are no gradients to come, only units with saved places stay."""
        if not self._differentiates:
            self._parts = {unit: parts for unit, parts in self._parts.items() if unit in saved}

    def clear(self) -> None:
        """Drop what was kept of all units."""
        self._parts.clear()
