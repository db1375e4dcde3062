"""The ranks along one mesh axis, results of collectives that are under way, and the log of what a rank sends.

Note [Lent memory]
    What a collective sends may be written to once this rank has waited for it: it was copied. Lent memory is sent
    without a copy. Peers read it when they wait, which may be later than this rank's own wait, and nothing says when
    all of them have read it. So lent memory is written to once, before it is sent, and never again until it is freed.
    Only memory that no code but ours can write to is lent:
    - the buffers that gradients are reduced from, if the reduction is one of ours and no wire encodes them;
    - messages that `swap` packs;
    - the part that a rank sums aside in an all-reduce in place;
    - the buffers that units are gathered into for a loss, if no wire decodes them. A loss that writes to its parameters
      is an error, and what it returns of them is copied.
    Not lent is what users get as a result (`gather_params`, `zero`), and what their reductions, gathers and wires are
    given. In a graph nothing is lent: a compiler may use memory again after the memory's last reader. Where a backend's
    own collectives run, they have read by the wait, and only the allocator differs.
    A late world (`testing/late.py`) raises an error for a write to lent memory that was sent.
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
    """One collective of one rank: what it is, along which axis, for whom, and the bytes that this rank sends.

    `kind` is "all_gather", say, `label` the unit or what the caller named, `nbytes` what this rank sends. All ranks of
    a collective must agree on all but the bytes; `str` is how errors name it.
    """

    kind: str
    axis: str
    label: str
    nbytes: int
    dtype: torch.dtype | None = field(default=None, compare=False, repr=False)
    shape: Sequence[int] = field(default=(), compare=False, repr=False)
    op: str = field(default="sum", compare=False, repr=False)
    more: str = field(default="", compare=False, repr=False)  # further words that ranks compare
    text: str = field(default="", compare=False, repr=False)  # if not empty, the whole text of `str`

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
        # at once: the method that a frozen dataclass gets sets one field after the other, and takes three times as long
        vars(self).update(
            kind=kind, axis=axis, label=label, nbytes=nbytes, dtype=dtype, shape=shape, op=op, more=more, text=text
        )

    def of(self, x: Tensor) -> Call:
        """This call with the dtype and shape of `x`: of one of the tensors that it sends."""
        return replace(self, dtype=x.dtype, shape=x.shape)

    def agrees(self, other: Call) -> bool:
        """Whether two ranks call the same collective."""
        # a collective of a graph has nothing but the text; texts are made only where the fields differ
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
    """The collectives a rank issued, in order."""

    def select(self, kind: str, label: str | None = None) -> list[Call]:
        """The collectives of one kind, or of one kind and label."""
        return [call for call in self if call.kind == kind and label in (None, call.label)]

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes that this rank sent, in all or in collectives of one kind."""
        return sum(call.nbytes for call in self if kind in (None, call.kind))


_tally: ContextVar[Tally | None] = ContextVar("fshard_tally", default=None)


@contextmanager
def tally() -> Iterator[Tally]:
    """Record the collectives this rank issues inside the block.

    >>> with tally() as records:
    ...     pass
    >>> records.nbytes()
    0
    """
    records = Tally()
    with assigned(_tally, records):
        yield records


def is_tallying() -> bool:
    """Whether this is called inside a block of `tally`."""
    return _tally.get() is not None


def note(call: Call) -> None:
    """Add a collective to the tally, inside a block of `tally`."""
    records = _tally.get()
    if records is not None:
        records.append(call)


class Pending:
    """The result of a collective that is under way, possibly in several stages.

    `step` waits for the messages of the current stage and starts the next stage; `wait` goes on to the result.
    """

    def __init__(self, exchange: Exchange | None, finish: Callable[[Sequence[Tensor]], Tensor | Pending]):
        self._exchange, self._finish, self._error, self._taken = exchange, finish, "", False
        self._sent: Sequence[Tensor] = []

    def keeping(self, *sent: Tensor) -> Pending:
        """Keep references to the tensors that are sent, except those in host memory; returns self.

        torch drops its own references to what NCCL sends as soon as any stream has waited, while another stream may
        still have to wait.
        """
        self._sent = [x for x in sent if x.device.type != "cpu"]
        return self

    def step(self) -> Tensor | Pending:
        """Wait for the messages under way, and return the result, or the next stage."""
        if self._exchange is None:
            return self._finish([])
        if self._error:  # some messages were received already: waiting for them again would never end
            raise MismatchError(self._error)
        self._taken = True  # before an interrupt, after which a message that was received would be waited for again
        try:
            received = self._exchange.wait()
            result = self._finish(received)
        except MismatchError as failure:
            self._error = str(failure)
            raise
        self._exchange.done()
        return result

    def advance(self) -> Pending:
        """Wait for the messages under way, if any, and start the next stage; returns what is then pending."""
        result = self if self._exchange is None else self.step()
        return result if isinstance(result, Pending) else Pending(None, lambda _: result)

    def drop(self) -> None:
        """Wait for the messages under way, and do not start the next stage."""
        if self._exchange is not None and not self._error and not self._taken:
            self._exchange.wait()
            self._exchange.done()
            self._taken = True

    def wait(self) -> Tensor:
        """Wait for all stages, and return the result."""
        result = self.step()
        return result.wait() if isinstance(result, Pending) else result

    def then(self, start: Callable[[Tensor], Tensor | Pending]) -> Pending:
        """A `Pending` that goes on with `start(result)`, which gives a tensor or a further stage."""

        def finish(parts: Sequence[Tensor]) -> Tensor | Pending:
            result = self._finish(parts)
            return result.then(start) if isinstance(result, Pending) else start(result)

        return Pending(self._exchange, finish)


class Exchange(Protocol):
    """Messages under way between this rank and every peer."""

    def wait(self) -> Sequence[Tensor]:
        """Wait, and return what each rank sent, in rank order, this rank's own included.

        Where no place was given to receive into, the tensors may be read until `done`.
        """

    def done(self) -> None:
        """Say that what was received has been read, so that its memory may be used again."""


class Arrived(NamedTuple):
    """An exchange that has ended, or in which nothing is sent."""

    parts: Sequence[Tensor]

    def wait(self) -> Sequence[Tensor]:
        """Return what was received."""
        return self.parts

    def done(self) -> None:
        """Do nothing: no memory is shared with another rank."""


class OwnCollectives(Protocol):
    """Ranks that carry out a gather or a reduction themselves; waiting for it gives a list of its result alone."""

    def all_gather(self, x: Tensor, out: Tensor | None, lent: bool, call: Call) -> Exchange:
        """(n, ...) on each rank -> (W n, ...) on all: the tensors end to end."""

    def reduce_scatter(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        """(W n, ...) on each rank -> (n, ...): the sum over ranks of this rank's part."""

    def all_reduce(self, x: Tensor, out: Tensor | None, fast: bool, call: Call) -> Exchange:
        """(...) on each rank -> (...) on all: the sum, maximum or minimum over ranks, as `call.op` says."""


class Ranks(Protocol):
    """The ranks along one axis of a mesh, as one of them sees them.

    `axis` is its name, `rank` the number of this rank along it, `size` the number of ranks, `device` where received
    tensors are made if no place is given.
    """

    axis: str
    rank: int
    size: int
    device: torch.device

    @property
    def built_in(self) -> object:
        """A process group whose own collectives are the fast ones, or None."""

    @property
    def whole(self) -> OwnCollectives | None:
        """These ranks, if they carry out gathers and reductions themselves; else None."""

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Exchange:
        """Send `sends[p]` to rank p, and receive what rank p sends, into `recvs[p]` if that is not None."""

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A flat tensor. With `lent` it is sent without a copy (Note [Lent memory])."""


def message_timeout(ranks: Ranks) -> timedelta:
    """How long ranks that are processes wait for a message."""
    return ranks.timeout  # type: ignore[attr-defined]  # simulated and abstract ranks have none, and connect to nobody


# what to do where ranks call different collectives
SAME_ORDER = (
    "All ranks must call the same collectives in the same order. If one has returned, it had fewer batches "
    "(collectives.join_batches), or left out a save or a state_dict. Else, units that are gathered are read on all "
    "ranks, with an empty batch where a rank has no use for one; or make a plan with one unit, or with params_over=()."
)


def differing_sizes(call: Call | str, sender: str, nbytes: int, expected: int) -> str:
    """Say that a rank sends a message of another size than the receiver expects."""
    return f"{call}: {sender} sends {nbytes} bytes where {expected} are expected: both must give the same sizes"


class MismatchError(RuntimeError):
    """Ranks that must call the same collectives, or have the same values, do not."""
