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
    """Ranks along one axis that call `announce(text)` before each collective."""

    def __init__(self, ranks: Any, announce: Callable[[str], None]):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self.built_in, self.whole, self.empty, self.idle = ranks.built_in, None, ranks.empty, ranks.idle
        self._ranks, self._exchange, self.announce = ranks, ranks.exchange, announce

    @property
    def timeout(self) -> Any:
        """How long a message is waited for: asked when a plan is made, and its mesh connected, inside such a block."""
        return self._ranks.timeout

    def exchange(self, sends: Sequence[Any], recvs: Sequence[Any], call: Call) -> Any:
        """Announce the collective, then start it."""
        self.announce(str(call))
        return self._exchange(sends, recvs, call)


@contextmanager
def announcing(around: Around) -> Iterator[None]:
    """Inside the block, `primitives.along` returns `around(ranks, mesh)`."""
    token = _around.set(around)
    try:
        yield
    finally:
        _around.reset(token)


def is_announcing() -> bool:
    """Whether this is called inside a block of `announcing`."""
    return _around.get() is not None


def announced(ranks: Any, mesh: Any) -> Any:
    """`around(ranks, mesh)` inside a block of `announcing`, else `ranks`."""
    around = _around.get()
    return ranks if around is None else around(ranks, mesh)


def kept() -> Callable[..., Any]:
    """A function `call(fn, *args)` that runs `fn` in the blocks of `tally` and `announcing` that are entered here.

    On a GPU autograd runs the backward on a thread of its own, which does not see the caller's context variables.
    """
    context, thread = copy_context(), get_ident()

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        known = get_ident() == thread or is_tallying() or is_announcing()
        return (
            fn(*args) if known else context.copy().run(fn, *args)
        )  # a copy, because a context cannot be entered twice at once

    return call
