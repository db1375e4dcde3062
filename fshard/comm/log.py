"""The collectives a rank issues: their names, and the bytes they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, init=False)
class Call:
    """One collective of one rank: what it is, along which axis, for whom, and the bytes that this rank sends.

    All ranks of a collective must agree on all but the bytes; `str` is how errors name it.
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
    token = _tally.set(records)
    try:
        yield records
    finally:
        _tally.reset(token)


def is_tallying() -> bool:
    """Whether this is called inside a block of `tally`."""
    return _tally.get() is not None


def note(call: Call) -> None:
    """Add a collective to the tally, inside a block of `tally`."""
    records = _tally.get()
    if records is not None:
        records.append(call)
