"""Collectives as nodes of a graph: operators that torch's tracers record, and its compilers leave alone.

Note [Collectives in a graph]
    Traced, a collective is two operators: one that starts it and gives the place where its result will be, and a
    ticket, and `wait`, which takes both. What runs between them overlaps. `wait` names what was sent, so that no
    compiler uses its memory again before; what is under way belongs to the ticket, and dies with it. Operators take no
    objects: a mesh is known to them by a name, as process groups are to torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .log import Call
from .mesh import MESHES

_LARGE = 1 << 20  # bytes

# Below this an all-reduce sends everything to everyone: one message instead of two, and the same bits.
_SMALL = 1 << 14  # bytes


def is_direct(x: Tensor, size: int, op: str) -> bool:
    """Whether an all-reduce sends all of a tensor to each of `size` ranks, rather than scatters and gathers."""
    # between two ranks, sending everything is no more than sending both halves of the way
    return op != "sum" or x.numel() % size != 0 or x.nbytes <= _SMALL or size <= 2


class Started:
    """A collective in a graph, under way: the place where its result will be, and a ticket to wait for it with."""

    def __init__(self, node: tuple[Tensor, Tensor], sent: Sequence[Tensor], out: Tensor | None = None):
        (self._place, self._ticket), self._sent, self._out = node, sent, out

    def wait(self) -> Sequence[Tensor]:
        """The result."""
        torch.ops.fshard.wait(self._place, self._ticket, self._sent)
        return [self._place if self._out is None else self._out.copy_(self._place)]

    def done(self) -> None:
        """What was received belongs to the graph."""


class _Alone:
    """What a collective of one rank gives."""

    def __init__(self, x: Tensor):
        self._x = x

    def wait(self) -> Sequence[Tensor]:
        """It."""
        return [self._x]

    def done(self) -> None:
        """Nothing was sent."""


class NodeRanks:
    """The ranks along one axis while a graph is traced: what they are asked for becomes nodes of it."""

    built_in = None

    def __init__(self, ranks: Any, mesh: Any):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self._mesh = MESHES.of(mesh)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A flat tensor: where ranks send from, or if it is large of memory used in every step; or the compiler's."""
        if not lent and numel * like.itemsize < _LARGE:
            return like.new_empty(numel)
        return torch.ops.fshard.room(like, numel, self._mesh, self.axis, lent)

    def idle(self, x: Tensor) -> bool:
        """A graph keeps what was sent until it was waited for."""
        return True

    @property
    def whole(self) -> NodeRanks:
        """A collective is a node."""
        return self

    def _at(self, call: Call) -> tuple[str, str, str, int]:
        return self._mesh, self.axis, call.label, call.nbytes

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Started:
        """(n, ...) -> (W n, ...)."""
        return Started(torch.ops.fshard.all_gather(x, *self._at(call)), [x], out)

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Started:
        """(W n, ...) -> (n, ...), in a dtype as wide or wider."""
        place = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out
        return Started((place, torch.ops.fshard.reduce_scatter(place, x, *self._at(call), fast)), [x])

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Started | _Alone:
        """(...) -> (...), in a dtype as wide or wider."""
        if self.size == 1:
            return _Alone(x if out is None else out.copy_(x))
        place = torch.empty_like(x) if out is None else out
        return Started((place, torch.ops.fshard.all_reduce(place, x, *self._at(call), call.op, fast, call.more)), [x])

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> _Received:
        """What every peer sends."""
        own = sends[self.rank]
        numels = [own.numel() if recv is None else recv.numel() for recv in recvs]
        numels[self.rank] = 0
        node = torch.ops.fshard.exchange(sends, numels, *self._at(call), call.kind, str(call))
        return _Received(Started(node, sends), numels, own, recvs, self.rank)


class _Received:
    """Parts of a received tensor, copied to the places that were given for them."""

    def __init__(self, started: Started, numels: Sequence[int], own: Tensor, recvs: Sequence[Tensor | None], rank: int):
        self._started, self._numels, self._own, self._recvs, self._rank = started, numels, own, recvs, rank
        self.done = started.done

    def wait(self) -> Sequence[Tensor]:
        """What each rank sent."""
        (place,) = self._started.wait()
        parts: list[Tensor] = []
        for rank, (part, recv) in enumerate(zip(place.split(list(self._numels)), self._recvs, strict=True)):
            if rank == self._rank:
                parts.append(self._own)
            else:
                parts.append(part.view(self._own.shape) if recv is None else recv.copy_(part.view(recv.shape)))
        return parts
