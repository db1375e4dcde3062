"""The collectives a rank issues: their names, and the bytes they send."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Record:
    """One collective of one rank: what it was, along which axis, for whom, and the bytes this rank sent."""

    kind: str
    axis: str
    label: str
    nbytes: int
    more: str = field(default="", compare=False, repr=False)  # what ranks compare besides


class Call(NamedTuple):
    """What all ranks of a collective must agree on; its text is how errors name it."""

    kind: str
    dtype: torch.dtype
    shape: torch.Size
    axis: str
    label: str
    more: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        unit = f" for unit {self.label!r}" if self.label else ""
        return f"{self.kind}({dtype}{list(self.shape)}, axis={self.axis!r}{self.more}){unit}"


class Tally(list[Record]):
    """The collectives a rank issued, in order."""

    def select(self, kind: str, label: str | None = None) -> list[Record]:
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


def note(record: Record) -> None:
    """Tell the tally that is running, if one is."""
    records = _tally.get()
    if records is not None:
        records.append(record)
