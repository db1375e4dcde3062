"""Random numbers of Python and numpy that a function draws while it is traced: a graph would repeat them."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from ..core import tree
from ..core.tree import Tree
from .captures import captures, generators


class OfAnyThread(Exception):
    """Numbers were drawn, perhaps by another thread: the function has to be run again, with its calls watched."""


@contextmanager
def watched(
    fn: Callable[..., Tree], leaves: Sequence[object], spec: tree.Spec, of_this_thread: bool
) -> Iterator[list[str]]:
    """Yield a list that says, after the block, what it drew from: a generator that the function or an argument holds.

    An empty text stands for the generators of the modules `random` and `numpy.random`. `of_this_thread` leaves out what
    other threads drew from generators of Python (calls of numpy's cannot be watched), which is slower; without it the
    block raises OfAnyThread if there are other threads.
    """
    states = [(holder, x, _state(x)) for holder, x in _reached(fn, leaves, spec)]
    drawn: list[str] = []
    with _calls() if of_this_thread else nullcontext() as called:
        yield drawn
    changed = [(holder, x) for holder, x, before in states if _state(x) != before]
    if changed and called is None and threading.active_count() > 1:
        raise OfAnyThread
    drawn += [
        holder and f"a {type(x).__module__}.{type(x).__qualname__} that {holder} holds"
        for holder, x in changed
        if called is None or id(x) in called or not isinstance(x, random.Random)
    ]


def _reached(fn: Callable[..., Tree], leaves: Sequence[object], spec: tree.Spec) -> list[tuple[str, Any]]:
    """Return the generators of the modules, and those that a function and its arguments hold, with who holds them."""
    # of the functions of a module, which are methods of its generator
    np = sys.modules.get("numpy")
    shared: list[Any] = [random.random, *([] if np is None else [np.random.rand])]
    reached = [("", method.__self__) for method in shared]
    seen: dict[int, object] = {id(x): x for _, x in reached}
    # the innermost variable first, which tells most
    roots: list[tuple[str, object]] = [("the function", fn), *((c.name, c.read()) for c in captures(fn))][::-1]
    roots += [(repr(path), leaf) for path, leaf in zip(tree.paths(spec), leaves, strict=True)]
    return reached + [(holder, x) for holder, root in roots for x in generators(root, seen)]


@contextmanager
def _calls() -> Iterator[set[int]]:
    """Yield the objects, by id, whose methods this thread calls in the block: of generators of Python."""
    called, before = set[int](), sys.getprofile()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "c_call":
            called.add(id(getattr(arg, "__self__", None)))
        elif event == "call" and frame.f_code.co_filename == random.__file__:
            called.add(id(frame.f_locals.get("self")))

    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def _state(generator: Any) -> object:  # Any: numpy's classes have no common one
    if isinstance(generator, random.SystemRandom):
        return None  # it has none
    if isinstance(generator, random.Random):
        return generator.getstate()
    # as text, because == of its arrays has no truth value; their position is in it, too
    return str(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())
