"""Ranks that announce each collective to their peers, or record each collective as nodes of a graph.

Note [Collectives in a graph]
    A collective is two operators. The first starts the collective, and returns the result's tensor, `place`, and a
    ticket with the `Pending` on its storage. The second, `wait`, takes `place`, the ticket and the sent tensors, so
    no compiler reuses sent memory before `wait`. Operators take a mesh by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, copy_context
from datetime import timedelta
from itertools import permutations
from threading import get_ident
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import tree
from ..core.tracing import Args, Kwargs, Operator, assigned
from .mesh import MESHES, Mesh
from .ranks import Arrived, Call, Exchange, MismatchError, Ranks, differing_sizes, is_tallying, message_timeout

P = ParamSpec("P")
R = TypeVar("R")
Around = Callable[[Ranks, Mesh], Ranks]
_AROUND: ContextVar[Around | None] = ContextVar("fshard_around", default=None)
_ROOM_BYTES = 1 << 20


class Announced:
    """Ranks that call `announce(text)` before each collective."""

    def __init__(self, ranks: Ranks, announce: Callable[[str], None]):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        # `whole` would not announce its collectives
        self.built_in, self.whole, self.empty = ranks.built_in, None, ranks.empty
        self._ranks, self._exchange, self.announce = ranks, ranks.exchange, announce
        self.connections = getattr(ranks, "connections", None)

    @property
    def timeout(self) -> timedelta:  # for a plan made in a checked call
        return message_timeout(self._ranks)

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        self.announce(str(call))
        if call.kind == "all_to_all":  # ranks' sizes differ: the text has none
            self._compare_sizes(sends, recvs, call)
        return self._exchange(sends, recvs, call)

    def _compare_sizes(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> None:
        places = [x if place is None else place for x, place in zip(sends, recvs, strict=True)]
        sizes = torch.tensor([[x.nbytes for x in sends], [x.nbytes for x in places]], device=self.device)  # (2, W)
        exchange = self._exchange([sizes] * self.size, [None] * self.size, call)
        told = [rows.tolist() for rows in exchange.wait()]
        exchange.done()
        for sender, receiver in permutations(range(self.size), 2):
            sent, expected = told[sender][0][receiver], told[receiver][1][sender]
            if sent != expected:
                pair = f"rank {sender} of axis {self.axis!r}, to rank {receiver},"
                raise MismatchError(differing_sizes(call, pair, sent, expected))


def announcing(around: Around) -> AbstractContextManager[None]:
    return assigned(_AROUND, around)


def is_announcing() -> bool:
    return _AROUND.get() is not None


class _RefusingRaw(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Operator, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        is_raw = func.namespace in ("c10d", "_c10d_functional") and torch.is_grad_enabled()
        if is_raw and any(isinstance(x, Tensor) and x.requires_grad for x in tree.leaves([args, kwargs])):
            raise RuntimeError(
                f"the loss function: expected a collective of fshard for a tensor that needs a gradient, got {func} of "
                "torch.distributed, whose derivative is not that of the sum over ranks. Use fshard.all_reduce, "
                "all_gather, reduce_scatter, all_to_all, shift or broadcast, or detach the tensor"
            )
        return func(*args, **(kwargs or {}))


def refusing_raw() -> AbstractContextManager[object]:
    return nullcontext() if _AROUND.get() is None else _RefusingRaw()


def announced(ranks: Ranks, mesh: Mesh) -> Ranks:
    around = _AROUND.get()
    return ranks if around is None else around(ranks, mesh)


class CallInBlocks(Protocol):
    """The result of `kept`."""

    def __call__(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R: ...


def kept() -> CallInBlocks:
    """Return `call(fn, *args)`, to run `fn` with the context variables of now: autograd's GPU threads lack them."""
    context, thread = copy_context(), get_ident()

    def call(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if get_ident() == thread or is_tallying() or is_announcing():
            return fn(*args, **kwargs)
        # a context cannot be entered twice at once
        return context.copy().run(fn, *args, **kwargs)

    return call


class StartedNode:
    """A collective started in a graph."""

    def __init__(self, node: tuple[Tensor, Tensor], sent: Sequence[Tensor]):
        (self._place, self._ticket), self._sent = node, sent

    def wait(self) -> Sequence[Tensor]:
        torch.ops.fshard.wait(self._place, self._ticket, self._sent)
        return [self._place]

    def done(self) -> None: ...


class NodeRanks:
    """Ranks in a trace: their collectives become nodes of the graph."""

    built_in = None

    def __init__(self, ranks: Ranks, mesh: Mesh):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self._mesh = MESHES.of(mesh)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """Return (numel,); if lent or large, in memory reused by all steps."""
        if not lent and numel * like.itemsize < _ROOM_BYTES:
            return like.new_empty(numel)
        return torch.ops.fshard.room(like, numel, self._mesh, self.axis, lent)

    @property
    def whole(self) -> NodeRanks:
        return self

    def _at(self, call: Call) -> tuple[str, str, str, int]:
        return self._mesh, self.axis, call.label, call.nbytes

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> StartedNode:
        if out is None:
            return StartedNode(torch.ops.fshard.all_gather(x, *self._at(call), lent), [x])
        return StartedNode((out, torch.ops.fshard.all_gather_into(out, x, *self._at(call))), [x])

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> StartedNode:
        place = x.new_empty(x.shape[0] // self.size, *x.shape[1:]) if out is None else out  # (n, ...)
        return StartedNode((place, torch.ops.fshard.reduce_scatter(place, x, *self._at(call), fast)), [x])

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        if self.size == 1:
            return Arrived([x if out is None else out.copy_(x)])
        place = torch.empty_like(x) if out is None else out
        return StartedNode(
            (place, torch.ops.fshard.all_reduce(place, x, *self._at(call), call.op, fast, call.more)), [x]
        )

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> _Received:
        local = sends[self.rank]
        numels = [local.numel() if recv is None else recv.numel() for recv in recvs]
        numels[self.rank] = 0  # `wait` returns this rank's own tensor
        node = torch.ops.fshard.exchange(sends, numels, *self._at(call), call.kind, str(call))
        return _Received(StartedNode(node, sends), numels, local, recvs, self.rank)


class _Received:
    def __init__(
        self, started: StartedNode, numels: Sequence[int], local: Tensor, recvs: Sequence[Tensor | None], rank: int
    ):
        self._started, self._numels, self._local, self._recvs, self._rank = started, numels, local, recvs, rank
        self.done = started.done

    def wait(self) -> Sequence[Tensor]:
        (place,) = self._started.wait()  # (sum of numels,)
        parts: list[Tensor] = []
        for rank, (part, recv) in enumerate(zip(place.split(list(self._numels)), self._recvs, strict=True)):
            if rank == self._rank:
                parts.append(self._local)
            else:
                parts.append(part.view(self._local.shape) if recv is None else recv.copy_(part.view(recv.shape)))
        return parts
