"""The ranks along one mesh axis, as protocols, and results of collectives that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .log import Call


class Pending:
    """A result under way. `step` waits for what was sent and starts what follows; `wait` goes on to the result."""

    def __init__(self, exchange: Exchange | None, finish: Callable[[Sequence[Tensor]], Tensor | Pending]):
        self._exchange, self._finish, self._error, self._taken = exchange, finish, "", False
        self._sent: Sequence[Tensor] = []

    def keeping(self, *sent: Tensor) -> Pending:
        """This, which keeps what it sends, unless that is in host memory: torch lets go of what NCCL sends when any
        stream has waited, and another may have to wait still."""
        self._sent = [x for x in sent if x.device.type != "cpu"]
        return self

    def step(self) -> Tensor | Pending:
        """Wait for the messages under way; give the result or its next stage."""
        if self._exchange is None:
            return self._finish([])
        if self._error:  # some of it has been taken, and would be waited for without end
            raise MismatchError(self._error)
        try:
            result = self._finish(self._exchange.wait())
        except MismatchError as failure:
            self._error = str(failure)
            raise
        self._exchange.done()
        self._taken = True
        return result

    def advance(self) -> Pending:
        """This, its next stage started if messages are under way; those are waited for."""
        result = self if self._exchange is None else self.step()
        return result if isinstance(result, Pending) else Pending(None, lambda _: result)

    def drop(self) -> None:
        """Wait for the messages under way, and start nothing that would follow."""
        if self._exchange is not None and not self._error and not self._taken:
            self._exchange.wait()
            self._exchange.done()
            self._taken = True

    def wait(self) -> Tensor:
        """Wait for the result."""
        result = self.step()
        return result.wait() if isinstance(result, Pending) else result

    def then(self, start: Callable[[Tensor], Tensor | Pending]) -> Pending:
        """This, then `start` of its result."""

        def finish(parts: Sequence[Tensor]) -> Tensor | Pending:
            result = self._finish(parts)
            return result.then(start) if isinstance(result, Pending) else start(result)

        return Pending(self._exchange, finish)


class Exchange(Protocol):
    """Messages under way from every peer."""

    def wait(self) -> Sequence[Tensor]:
        """What each rank sent, this one's own included; where no place was given for it, good until `done`."""

    def done(self) -> None:
        """What was received has been read."""


class Whole(Protocol):
    """Ranks that are given gathers and reductions whole; what is waited for has their result alone."""

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Exchange:
        """(n, ...) -> (W n, ...)."""

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        """(W n, ...) -> (n, ...)."""

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        """(...) -> (...)."""


class Ranks(Protocol):
    """The ranks along one axis of a mesh, seen from one of them."""

    axis: str
    rank: int
    size: int
    device: torch.device  # where tensors that nobody else places go
    built_in: Any  # a process group whose own collectives are the fast ones, or None

    @property
    def whole(self) -> Whole | None:
        """These ranks, if they are given collectives whole."""

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        """Send `sends[p]` to peer p and receive what it sends, into `recvs[p]` where that is given."""

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A flat tensor; one that is `lent` is sent without a copy, and must not be written to until it is `idle`."""

    def idle(self, x: Tensor) -> bool:
        """Whether no peer is still to read what was sent of a tensor."""


class MismatchError(RuntimeError):
    """Ranks that should do the same thing do not."""
