"""The variables that a function reads besides its arguments: closures, globals of its module, defaults."""

from __future__ import annotations

import dis
import gc
import inspect
import random
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Private API: see `trace.py`.
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

from ..comm.mesh import OnMesh
from ..core import tree
from ..core.callsite import NOT_THE_USER
from ..core.tracing import Marked

_LIBRARIES = (*NOT_THE_USER, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


class Capture(NamedTuple):
    """A variable that a function reads: its name in error messages, and the place that stores its value."""

    name: str
    # A closure cell, the globals of a module (a dict), or a function (for its default values). Any, because mypy takes
    # a function that is read from a field for a bound method.
    place: Any
    key: str
    is_input: bool = False  # whether a graph reads the tensors of its value at each run

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the value that can be inputs of a graph: dense plain ones without a gradient.

        The value is a tensor, or a tree of dicts, lists, tuples and other plain nodes.
        """
        value = self.read()
        if not isinstance(value, Tensor | dict | list | tuple) or tree.nodes(value, OnMesh):
            return []
        return [x for x in tree.leaves(value) if _is_plain(x)]

    def read(self) -> object:
        """Return the current value of the variable, or None if the variable is not assigned yet."""
        if isinstance(self.place, dict):
            return self.place.get(self.key)
        if isinstance(self.place, CellType):
            try:
                return self.place.cell_contents
            except ValueError:  # the cell is empty: the variable is assigned later
                return None
        named = self.place.__kwdefaults__ or {}
        return *(self.place.__defaults__ or ()), *named, *named.values()


def _is_plain(x: object) -> bool:
    dense = isinstance(x, Tensor) and not isinstance(x, FakeTensor | Marked) and x.layout is torch.strided
    return dense and not x.requires_grad  # type: ignore[attr-defined]  # mypy: `dense` is no proof


def captures(fn: object, seen: set[int] | None = None) -> Iterator[Capture]:
    """Yield the variables that `fn` reads, and recursively the variables that functions among their values read.

    Of functions that belong to a library (torch, the standard library, installed packages) only closures are yielded.
    """
    seen = set() if seen is None else seen
    for function in _functions(fn):
        if id(function) in seen:
            continue
        seen.add(id(function))
        for capture in _variables(function):
            yield capture
            yield from captures(capture.read(), seen)


def _functions(x: Any) -> Iterator[FunctionType]:  # Any: attributes of an unknown object are read
    """Yield the Python functions that a call of `x` runs; of a tuple, the functions of each item."""
    while hasattr(x, "run") and not inspect.isclass(x):  # a train step, possibly wrapped by a check, wraps a function
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
    elif callable(x):
        if inspect.isfunction(x):
            yield x
        if not inspect.isclass(x) and hasattr(x, "__wrapped__"):  # a jitted function has it, too
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
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def generators(root: object, seen: dict[int, object]) -> Iterator[Any]:  # Any: classes of numpy, if it is there
    """Yield the random generators of Python and numpy that an object refers to, itself or through others.

    `seen` are the objects looked at, by id: kept, so that no other object gets the id of one. Functions are followed as
    by `captures`, and classes and modules if they are the user's.
    """
    np = sys.modules.get("numpy")
    kinds = (random.Random, *(() if np is None else (np.random.Generator, np.random.RandomState)))
    unseen = [root]
    while unseen:
        x = unseen.pop()
        if id(x) in seen or not (isinstance(x, CellType) or gc.is_tracked(x)):
            continue
        seen[id(x)] = x
        if issubclass(type(x), kinds):
            yield x
        elif isinstance(x, FunctionType):
            unseen += [variable.read() for variable in _variables(x)]
        elif isinstance(x, type | ModuleType):
            unseen += [] if _is_of_library(x) else vars(x).values()
        elif type(x).__module__.startswith("fshard."):
            unseen += _functions(x)  # a step, an optimizer: not through meshes into the world
        elif not issubclass(type(x), Tensor):
            unseen += gc.get_referents(x)


def _is_of_library(x: type | ModuleType) -> bool:
    module = sys.modules.get(x.__module__) if isinstance(x, type) else x
    file = getattr(module, "__file__", None)
    return file is None or file.startswith(_LIBRARIES)
