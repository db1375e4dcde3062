"""The collectives a rank issues: their names, and the bytes they send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
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
    more: str = field(default="", compare=False, repr=False)  # what ranks compare besides
    text: str = field(default="", compare=False, repr=False)  # in place of all these words

    def of(self, x: Tensor) -> Call:
        """The same for a tensor that it is carried out with, in one of several messages."""
        return replace(self, dtype=x.dtype, shape=x.shape)

    def agrees(self, other: Call) -> bool:
        """Whether two ranks call the same."""
        return self._agreed == other._agreed or str(self) == str(other)  # a graph's node has the text alone

    @property
    def _agreed(self) -> tuple[Any, ...]:
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
        """Those of one kind (and for one unit)."""
        return [r for r in self if r.kind == kind and label in (None, r.label)]

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes this rank sent, in all or by one kind."""
        return sum(r.nbytes for r in self if kind in (None, r.kind))


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
    """Whether this is inside such a block."""
    return _tally.get() is not None


def note(call: Call) -> None:
    """Tell the tally that is running, if one is."""
    records = _tally.get()
    if records is not None:
        records.append(call)
