"""Ranks that announce each collective to their peers before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from threading import get_ident
from typing import Any

from .log import Call, is_tallying

Around = Callable[[Any, Any], Any]  # of ranks and their mesh
_around: ContextVar[Around | None] = ContextVar("fshard_around", default=None)


class Announced:
    """The ranks along one axis, told of each collective before it starts."""

    def __init__(self, ranks: Any, announce: Callable[[str], None]):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self.built_in, self.whole, self.empty, self.idle = ranks.built_in, None, ranks.empty, ranks.idle
        self._ranks, self._exchange, self.announce = ranks, ranks.exchange, announce

    @property
    def timeout(self) -> Any:
        """How long a message is waited for, where ranks say it: a plan made inside connects them."""
        return self._ranks.timeout

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any], call: Call) -> Any:
        """The ranks' own, once they all know of it."""
        self.announce(str(call))
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
        known = get_ident() == thread or is_tallying() or is_announcing()
        return fn(*args) if known else context.copy().run(fn, *args)  # a copy: one is not entered twice

    return call
