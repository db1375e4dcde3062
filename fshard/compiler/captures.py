"""The variables a function reads besides its arguments: closures, globals of its module, defaults."""

from __future__ import annotations

import dis
import inspect
import sysconfig
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch.autograd import Function

from ..core.callsite import NOT_THE_USER

_LIBRARIES = (*NOT_THE_USER, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class Capture(NamedTuple):
    """A variable that a function reads: its name in errors, and where its value is."""

    name: str
    place: Any  # a cell of a closure, the globals of a module, or a function, whose defaults are meant
    key: str

    def read(self) -> Any:
        """The value now; None if the variable has none yet."""
        if isinstance(self.place, dict):
            return self.place.get(self.key)
        if isinstance(self.place, FunctionType):
            named = self.place.__kwdefaults__ or {}
            return *(self.place.__defaults__ or ()), *named, *named.values()
        try:
            return self.place.cell_contents
        except ValueError:
            return None


def captures(fn: Any, seen: set[int] | None = None) -> Iterator[Capture]:
    """What a function reads, and what the functions read that it finds there; of libraries' functions the closures."""
    seen = set() if seen is None else seen
    for function in _functions(fn):
        if id(function) in seen:
            continue
        seen.add(id(function))
        for capture in _variables(function):
            yield capture
            yield from captures(capture.read(), seen)


def _functions(x: Any) -> Iterator[FunctionType]:
    """The functions that are run when `x` is called, and those in tuples."""
    while hasattr(x, "run") and not inspect.isclass(x):  # a step's own function, maybe checked
        x = x.run
    if isinstance(x, partial):
        for part in (x.func, *x.args, *x.keywords.values()):
            yield from _functions(part)
    elif isinstance(x, tuple):
        for part in x:
            yield from _functions(part)
    elif inspect.isclass(x) and issubclass(x, Function):
        for name in ("forward", "setup_context", "backward", "jvp", "vmap"):
            yield from _functions(getattr(x, name))
    elif inspect.ismethod(x):
        yield from _functions(x.__func__)
    elif inspect.isfunction(x):
        yield x
        if hasattr(x, "__wrapped__"):
            yield from _functions(x.__wrapped__)


def _variables(fn: FunctionType) -> Iterator[Capture]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield Capture(f"{name!r} of {fn.__qualname__}", cell, name)
    if not fn.__code__.co_filename.startswith(_LIBRARIES):
        yield Capture(f"a default of {fn.__qualname__}", fn, "")
        for name in dict.fromkeys(_globals_of(fn.__code__)):
            if name in fn.__globals__:
                yield Capture(f"{name!r} of {fn.__qualname__}", fn.__globals__, name)


def _globals_of(code: CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)
