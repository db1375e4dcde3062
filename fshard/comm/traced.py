"""Collectives as nodes of a graph: operators that torch's tracers record, and its compilers leave alone.

Note [Collectives in a graph]
    In a graph a collective is two operators. The first starts it and returns a place, the tensor the result will be in,
    and a ticket; the second, `wait`, takes both. Operators between them run while the collective is under way. `wait`
    also takes the tensors that were sent, so that no compiler uses their memory again before. The ticket owns the
    collective that is under way, which ends when the ticket is freed. Operators take no objects, so a mesh is passed by
    its name, as torch passes the names of process groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .mesh import MESHES, Mesh
from .ranks import Arrived, Call, Exchange, Ranks

_LARGE = 1 << 20  # bytes


class Started:
    """A collective under way in a graph: the place of its result, and the ticket that `wait` takes."""

    def __init__(self, node: tuple[Tensor, Tensor], sent: Sequence[Tensor]):
        (self._place, self._ticket), self._sent = node, sent

    def wait(self) -> Sequence[Tensor]:
        """Wait, and return a list of the result alone."""
        torch.ops.fshard.wait(self._place, self._ticket, self._sent)
        return [self._place]

    def done(self) -> None:
        """Do nothing: the graph owns what was received."""


class NodeRanks:
    """The ranks along one axis while a graph is traced: each collective becomes nodes of the graph."""

    built_in = None

    def __init__(self, ranks: Ranks, mesh: Mesh):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self._mesh = MESHES.of(mesh)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A flat tensor: with `lent`, or if it is large, in memory of the ranks that every step uses; else new."""
        if not lent and numel * like.itemsize < _LARGE:
            return like.new_empty(numel)
        return torch.ops.fshard.room(like, numel, self._mesh, self.axis, lent)

    @property
    def whole(self) -> NodeRanks:
        """These ranks: each collective is one node."""
        return self

    def _at(self, call: Call) -> tuple[str, str, str, int]:
        return self._mesh, self.axis, call.label, call.nbytes

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Started:
        """(n, ...) on each rank -> (W n, ...) on all."""
        if out is None:
            return Started(torch.ops.fshard.all_gather(x, *self._at(call), lent), [x])
        return Started((out, torch.ops.fshard.all_gather_into(out, x, *self._at(call))), [x])

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Started:
        """(W n, ...) on each rank -> (n, ...), in the dtype of `out`, which may be wider."""
        place = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out  # (n, ...)
        return Started((place, torch.ops.fshard.reduce_scatter(place, x, *self._at(call), fast)), [x])

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        """(...) on each rank -> (...) on all, in the dtype of `out`, which may be wider."""
        if self.size == 1:
            return Arrived([x if out is None else out.copy_(x)])
        place = torch.empty_like(x) if out is None else out
        return Started((place, torch.ops.fshard.all_reduce(place, x, *self._at(call), call.op, fast, call.more)), [x])

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> _Received:
        """Send `sends[p]` to rank p, and receive what rank p sends."""
        local = sends[self.rank]
        numels = [local.numel() if recv is None else recv.numel() for recv in recvs]
        numels[self.rank] = 0  # what a rank sends itself is not sent: `wait` returns the tensor
        node = torch.ops.fshard.exchange(sends, numels, *self._at(call), call.kind, str(call))
        return _Received(Started(node, sends), numels, local, recvs, self.rank)


class _Received:
    """An exchange in a graph: all messages are received into one tensor, and copied from it to the given places."""

    def __init__(
        self, started: Started, numels: Sequence[int], local: Tensor, recvs: Sequence[Tensor | None], rank: int
    ):
        self._started, self._numels, self._local, self._recvs, self._rank = started, numels, local, recvs, rank
        self.done = started.done

    def wait(self) -> Sequence[Tensor]:
        """Wait, and return what each rank sent, in rank order."""
        (place,) = self._started.wait()  # (sum of numels,)
        parts: list[Tensor] = []
        for rank, (part, recv) in enumerate(zip(place.split(list(self._numels)), self._recvs, strict=True)):
            if rank == self._rank:
                parts.append(self._local)
            else:
                parts.append(part.view(self._local.shape) if recv is None else recv.copy_(part.view(recv.shape)))
        return parts
