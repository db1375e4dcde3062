"""The ranks over which a submodule is split in a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import nn

from ..comm.mesh import AnyMesh, rank_and_size
from ..plan.plan import Plan, Slot


class Along(NamedTuple):
    """The axis over which a submodule is split, this rank's number there, and the whole size of the split dim."""

    mesh: AnyMesh
    axis: str
    rank: int
    ranks: int
    size: int
    differ: bool  # True if batches differ along the axis

    @staticmethod
    def of(plan: Plan, slot: Slot) -> Along:
        assert slot.split is not None
        axis = slot.split.axis
        return Along(plan.mesh, axis, *rank_and_size(plan.mesh, axis), slot.shape[slot.split.dim], axis in plan.data)

    @property
    def most(self) -> int:
        """The length of the first part; the last parts may be shorter, or empty."""
        return -(-self.size // self.ranks)

    @property
    def part(self) -> tuple[int, int]:
        """The bounds of this rank's part, as `torch.chunk` cuts."""
        return min(self.rank * self.most, self.size), min((self.rank + 1) * self.most, self.size)


# the split submodules of a call, by path
Alongs = Mapping[str, Along]


class CurrentCall(Protocol):
    """A call of the module; `returned`: True if a part of its forward runs again, for a checkpoint."""

    along: Alongs
    returned: bool


@contextmanager
def with_attributes(part: nn.Module, **values: object) -> Iterator[None]:
    """Set attributes of a copy's submodule in a block."""
    before = {name: getattr(part, name) for name in values}
    vars(part).update(values)
    try:
        yield
    finally:
        vars(part).update(before)
