"""The collectives a rank issues: what they are called, counted, announced, and where the user called them."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch

# how the names of files begin that no user wrote: ours, torch's, and code that was made
NOT_THE_USER = (
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(torch.__file__) + os.sep,
    "<eval_with_key>",
    "<frozen ",
    "<string>",
    os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_")),
)


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


def note(record: Record) -> None:
    """Tell the tally that is running, if one is."""
    records = _tally.get()
    if records is not None:
        records.append(record)


Around = Callable[[Any, Any], Any]  # of ranks and their mesh

_around: ContextVar[Around | None] = ContextVar("fshard_around", default=None)


class Announced:
    """The ranks along one axis, told of each collective before it starts."""

    def __init__(self, ranks: Any, announce: Callable[[str], None]):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self.built_in, self.whole, self.empty, self.idle = ranks.built_in, None, ranks.empty, ranks.idle
        self.record = Record("", ranks.axis, "", 0)  # of what is asked for next
        self._ranks, self._exchange, self.announce = ranks, ranks.exchange, announce

    @property
    def timeout(self) -> Any:
        """How long a message is waited for, where ranks say it: a plan made inside connects them."""
        return self._ranks.timeout

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any], call: str) -> Any:
        """The ranks' own, once they all know of it."""
        self.announce(call)
        return self._exchange(sends, recvs, call)


@contextmanager
def announcing(around: Around) -> Iterator[None]:
    """Inside the block collectives go through what `around` makes of the ranks along an axis, and of their mesh."""
    token = _around.set(around)
    try:
        yield
    finally:
        _around.reset(token)


def is_announcing() -> bool:
    """Whether this is inside such a block."""
    return _around.get() is not None


def announced(ranks: Any, mesh: Any) -> Any:
    """The ranks, or inside such a block what is made of them."""
    around = _around.get()
    return ranks if around is None else around(ranks, mesh)


def kept() -> Callable[..., Any]:
    """`call(fn, *args)`, by which what is called later is counted and announced as what is called here.

    Autograd runs the backward of what is on a GPU on a thread of its own, where no block of the caller's is known.
    """
    context, thread = copy_context(), get_ident()

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        known = get_ident() == thread or _tally.get() is not None or is_announcing()
        return fn(*args) if known else context.copy().run(fn, *args)  # a copy: one is not entered twice

    return call


def call_site(frame: FrameType | None = None) -> str:
    """The file and line of the user's that are running, or that a frame was called from."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def frame_of(failure: BaseException) -> traceback.FrameSummary:
    """The innermost line of the user's that an exception passed through, or of anybody's."""
    frames = traceback.extract_tb(failure.__traceback__)
    users = [f for f in frames if not f.filename.startswith(NOT_THE_USER) and "site-packages" not in f.filename]
    return (users or list(frames))[-1]
