"""Ranks along one mesh axis, results of collectives under way, and the tally of a rank's collectives.

Note [Lent memory]
    A collective copies sent tensors, so the sender may write to them after its own wait. Lent memory is sent without a
    copy: peers read it in their own waits, perhaps later, and no message tells when all have read. So
    lent memory is written once, before the send, and never again until freed. Only memory hidden from other code is
    lent:
    - buffers of gradients to be reduced, if the reduction is fshard's and no wire encodes gradients;
    - messages packed by `primitives.swap`;
    - in an all-reduce into its input, the buffer of this rank's part of the sum;
    - buffers of units gathered for a loss, if no wire decodes units: a loss writing to its parameters is an error,
      and parameters in its result are copied.
    Not lent are results for users; inputs of wires, and of reductions and gathers written by users; any memory in a
    graph, as a compiler may reuse memory after its last reader. Collectives of a backend need no lending: a backend's
    wait ends after sent memory was read. Ranks of `testing/late.py` raise if lent memory is written after sending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.tracing import assigned


@dataclass(frozen=True, init=False)
class Call:
    """One collective of one rank. Ranks must agree on all fields but `nbytes`; `str` is the text in errors.

    `kind`: the collective, such as "all_gather"; `label`: the unit or the caller's word; `nbytes`: the bytes sent.
    """

    kind: str
    axis: str
    label: str
    nbytes: int
    dtype: torch.dtype | None = field(default=None, compare=False, repr=False)
    shape: Sequence[int] = field(default=(), compare=False, repr=False)
    op: str = field(default="sum", compare=False, repr=False)
    more: str = field(default="", compare=False, repr=False)  # arguments as text, such as a broadcast's sender
    text: str = field(default="", compare=False, repr=False)  # if not empty, the result of `str`

    def __init__(
        self,
        kind: str,
        axis: str,
        label: str,
        nbytes: int,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] = (),
        op: str = "sum",
        more: str = "",
        text: str = "",
    ):
        # a frozen dataclass's `__init__` takes three times as long
        vars(self).update(
            kind=kind, axis=axis, label=label, nbytes=nbytes, dtype=dtype, shape=shape, op=op, more=more, text=text
        )

    def of(self, x: Tensor) -> Call:
        """Return this call with the dtype and shape of `x`."""
        return replace(self, dtype=x.dtype, shape=x.shape)

    def agrees(self, other: Call) -> bool:
        """True if two ranks call the same collective."""
        # a call from a graph has only its text
        return self._agreed == other._agreed or str(self) == str(other)

    @property
    def _agreed(self) -> tuple[object, ...]:
        return self.kind, self.dtype, self.shape, self.axis, self.label, self.op, self.more, self.text

    def __str__(self) -> str:
        if self.text:
            return self.text
        dtype, op = str(self.dtype).removeprefix("torch."), "" if self.op == "sum" else f", op={self.op!r}"
        unit = f" for unit {self.label!r}" if self.label else ""
        return f"{self.kind}({dtype}{list(self.shape)}, axis={self.axis!r}{op}{self.more}){unit}"


class Tally(list[Call]):
    """The collectives of a rank, in order."""

    def select(self, kind: str, label: str | None = None) -> list[Call]:
        """Return the collectives of one kind, and of one label if given."""
        return [call for call in self if call.kind == kind and label in (None, call.label)]

    def nbytes(self, kind: str | None = None) -> int:
        """Return the bytes sent, in all or in collectives of one kind."""
        return sum(call.nbytes for call in self if kind in (None, call.kind))


_tally: ContextVar[Tally | None] = ContextVar("fshard_tally", default=None)


@contextmanager
def tally() -> Iterator[Tally]:
    """Record this rank's collectives inside the block.

    >>> with tally() as records:
    ...     pass
    >>> records.nbytes()
    0
    """
    records = Tally()
    with assigned(_tally, records):
        yield records


def is_tallying() -> bool:
    return _tally.get() is not None


def note(call: Call) -> None:
    records = _tally.get()
    if records is not None:
        records.append(call)


class Pending:
    """The result of a collective under way, perhaps in stages."""

    def __init__(self, exchange: Exchange | None, finish: Callable[[Sequence[Tensor]], Tensor | Pending]):
        self._exchange, self._finish, self._error, self._taken = exchange, finish, "", False
        self._sent: Sequence[Tensor] = []

    def keeping(self, *sent: Tensor) -> Pending:
        """Keep references to sent tensors, except in host memory; return self.

        torch keeps its own references only until one stream has waited.
        """
        self._sent = [x for x in sent if x.device.type != "cpu"]
        return self

    def step(self) -> Tensor | Pending:
        """Wait for the current messages, and return the result, or the next stage."""
        if self._exchange is None:
            return self._finish([])
        if self._error:  # waiting again for received messages would never end
            raise MismatchError(self._error)
        self._taken = True  # before an interrupt can come: else `drop` would wait again, without end
        try:
            received = self._exchange.wait()
            result = self._finish(received)
        except MismatchError as failure:
            self._error = str(failure)
            raise
        self._exchange.done()
        return result

    def advance(self) -> Pending:
        """Wait for the current messages, if any, and return the next stage, started."""
        result = self if self._exchange is None else self.step()
        return result if isinstance(result, Pending) else Pending(None, lambda _: result)

    def drop(self) -> None:
        """Wait for the current messages, without starting the next stage."""
        if self._exchange is not None and not self._error and not self._taken:
            self._exchange.wait()
            self._exchange.done()
            self._taken = True

    def wait(self) -> Tensor:
        """Wait for all stages, and return the result."""
        result = self.step()
        return result.wait() if isinstance(result, Pending) else result

    def then(self, start: Callable[[Tensor], Tensor | Pending]) -> Pending:
        """Return a `Pending` that goes on with `start(result)`, a tensor or a further stage."""

        def finish(parts: Sequence[Tensor]) -> Tensor | Pending:
            result = self._finish(parts)
            return result.then(start) if isinstance(result, Pending) else start(result)

        return Pending(self._exchange, finish)


class Exchange(Protocol):
    """Messages under way between this rank and every peer."""

    def wait(self) -> Sequence[Tensor]:
        """Return all ranks' tensors in rank order.

        If `Ranks.exchange` got None in `recvs` for a tensor, the tensor is valid until `done`.
        """

    def done(self) -> None:
        """Tell the senders that their tensors have been read."""


class Arrived(NamedTuple):
    """An exchange that has ended."""

    parts: Sequence[Tensor]

    def wait(self) -> Sequence[Tensor]:
        return self.parts

    def done(self) -> None: ...


class OwnCollectives(Protocol):
    """Ranks with their own gathers and reductions; `wait` of a returned `Exchange` gives [result]."""

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Exchange: ...

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange: ...

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange: ...


class Ranks(Protocol):
    """The ranks along one axis of a mesh, as one rank sees them.

    `rank` is this rank's number along `axis`, `size` the number of ranks, `device` that of received tensors.
    """

    axis: str
    rank: int
    size: int
    device: torch.device

    @property
    def built_in(self) -> object:
        """The process group, if its own collectives are fast; else None."""

    @property
    def whole(self) -> OwnCollectives | None:
        """These ranks, if they have their own gathers and reductions; else None."""

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        """Send `sends[p]` to rank p, and receive from rank p, into `recvs[p]` if not None."""

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """Allocate a flat tensor; `lent`: sent without a copy (Note [Lent memory])."""


def message_timeout(ranks: Ranks) -> timedelta:
    return ranks.timeout  # type: ignore[attr-defined]  # other ranks (simulated, abstract) never connect


SAME_ORDER = (
    "All ranks must call the same collectives in the same order. If one has returned, it had fewer batches "
    "(collectives.join_batches), or left out a save or a state_dict. Else, units that are gathered are read on all "
    "ranks, with an empty batch where a rank has no use for one; or make a plan with one unit, or with params_over=()."
)


def differing_sizes(call: Call | str, sender: str, nbytes: int, expected: int) -> str:
    return f"{call}: {sender} sends {nbytes} bytes where {expected} are expected: both must give the same sizes"


class MismatchError(RuntimeError):
    """Ranks called different collectives, or have different values, where all must agree."""
