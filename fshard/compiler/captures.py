"""The variables that a function reads in addition to its arguments, and the random generators that it may draw from."""

from __future__ import annotations

import dis
import gc
import inspect
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Private API: see `trace.py`.
from torch._subclasses.fake_tensor import FakeTensor

from ..comm.mesh import OnMesh
from ..core import tree
from ..core.arguments import CODE
from ..core.tracing import Marked

LIBRARIES = (*CODE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_Path = tuple[str, ...]  # a variable, an attribute of its value, an attribute of that one ...


class Capture(NamedTuple):
    """A variable that a function reads: its name in error messages, and the place that stores its value."""

    name: str
    # A closure cell, the globals of a module (a dict), a module, class or object (for an attribute), or a function
    # (for its default values). Any, because mypy takes a function that is read from a field for a bound method.
    place: Any
    key: str
    is_input: bool = False  # whether a graph reads the tensors of its value at each run
    of_tensors: bool = False  # whether only its tensors are compared, because tracing itself changes the rest
    by_name: bool = False  # whether only attributes of its value are read, which are variables of their own

    @property
    def identity(self) -> tuple[int, str]:
        """A key that is equal for two captures of one variable."""
        return id(self.place), self.key

    def tensors(self) -> list[Tensor]:
        """Return the tensors in the value that can be inputs of a graph: dense plain ones without a gradient.

        The value is a tensor, or a tree of dicts, lists, tuples and other plain nodes.
        """
        value = self.read()
        try:
            if not isinstance(value, Tensor | dict | list | tuple) or tree.nodes(value, OnMesh):
                return []
        except RecursionError:  # a list that contains itself
            return []
        return [x for x in tree.leaves(value) if _is_plain(x)]

    def read(self) -> object:
        """Return the current value of the variable, or None if the variable is not assigned yet."""
        if type(self.place) is dict:
            return self.place.get(self.key)
        if isinstance(self.place, CellType):
            try:
                return self.place.cell_contents
            except ValueError:  # the cell is empty: the variable is assigned later
                return None
        if self.key:
            return getattr(self.place, self.key, None)
        named = self.place.__kwdefaults__ or {}
        return *(self.place.__defaults__ or ()), *named, *named.values()


def _is_plain(x: object) -> bool:
    dense = isinstance(x, Tensor) and not isinstance(x, FakeTensor | Marked) and x.layout is torch.strided
    return dense and not x.requires_grad  # type: ignore[attr-defined]  # mypy does not see what `dense` implies


def captures(fn: object, seen: dict[int, object] | None = None) -> Iterator[Capture]:
    """Yield the variables that `fn` reads, and recursively the variables that functions among their values read.

    Of functions that belong to a library (torch, the standard library, installed packages) only closures are yielded.
    `seen` are the functions and containers looked at, by id: stored, so that no other object gets the id of one.
    """
    seen = {} if seen is None else seen
    for function in _functions(fn, seen):
        if id(function) in seen:
            continue
        seen[id(function)] = function
        for capture in variables(function):
            yield capture
            yield from captures(capture.read(), seen)


# Any: attributes of an unknown object are read
def _functions(x: Any, seen: dict[int, object]) -> Iterator[FunctionType | partial[Any]]:
    """Yield Python's functions and partials that a program with `x` may run; of a container, those of each item."""
    while type(x).__module__.startswith("fshard.") and hasattr(x, "run"):  # a train step, possibly wrapped by a check
        x = x.run
    if is_dataclass(x) and not isinstance(x, type) and not is_of_library(type(x)):
        values = [getattr(x, field.name, None) for field in fields(x)]
        for fn in (value for value in values if isinstance(value, partial | FunctionType | MethodType)):
            yield from _functions(fn, seen)
    if isinstance(x, partial | dict | list | tuple | set | frozenset | deque) and id(x) not in seen:
        if isinstance(x, partial):
            yield x  # which `captures` adds to `seen`
        seen[id(x)] = x
        parts = (x.func, *x.args, *x.keywords.values()) if isinstance(x, partial) else x
        for part in x.values() if isinstance(x, dict) else parts:
            yield from _functions(part, seen)
    elif inspect.ismethod(x):
        yield from (*_functions(x.__func__, seen), *_methods(x.__self__))
    elif x is not None:
        yield from [x] if inspect.isfunction(x) else _methods(x)
        # a jitted function has it, too; not `hasattr`, which runs an object's `__getattr__`
        if not inspect.isclass(x) and inspect.getattr_static(x, "__wrapped__", None) is not None:
            yield from _functions(x.__wrapped__, seen)


def _methods(x: object) -> Iterator[FunctionType | partial[Any]]:
    """Yield the functions in the user's classes among an object's: its own if it is one, a module's and its parts'."""
    parts: Any = x.modules() if hasattr(type(x), "named_modules") else [x]  # type: ignore[attr-defined]
    kinds = dict.fromkeys(base for part in parts for base in (part if isinstance(part, type) else type(part)).__mro__)
    for kind in kinds:
        for method in () if is_of_library(kind) else vars(kind).values():
            fn = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            if inspect.isfunction(fn):
                yield from _functions(fn, {})


def variables(fn: FunctionType | partial[Any]) -> Iterator[Capture]:
    """Yield the variables that one function reads itself; of one of a library those of its closure."""
    if isinstance(fn, partial):
        yield from (Capture(f"{key!r} of a partial", fn, key) for key in ("args", "keywords"))
        return
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    is_users = not fn.__code__.co_filename.startswith(LIBRARIES)
    paths = dict.fromkeys(_names_in(fn.__code__) if is_users else ())
    for name, cell in cells.items():
        yield _variable(fn, cell, (name,), paths)
    if is_users or "<locals>" in fn.__qualname__:  # what a library makes for the user
        yield Capture(f"a default of {fn.__qualname__}", fn, "")
    for path in paths:
        place = cells.get(path[0], fn.__globals__)
        if place is fn.__globals__ and path[0] in place:
            yield _variable(fn, place, path[:1], paths)
        yield from _attributes(fn, place, path, paths)


def _variable(fn: FunctionType, place: Any, path: _Path, paths: Collection[_Path]) -> Capture:
    """The variable that a path of names leads to. `paths` are all those of the function."""
    variable = Capture(f"{'.'.join(path)!r} of {fn.__qualname__}", place, path[-1])
    value, k = variable.read(), len(path)
    names = {longer[k] for longer in paths if longer[:k] == path and len(longer) > k}
    computed = any(isinstance(inspect.getattr_static(value, name, None), property) for name in names)
    return variable._replace(by_name=bool(names) and path not in paths and not computed)


def _attributes(fn: FunctionType, place: Any, path: _Path, paths: Collection[_Path]) -> Iterator[Capture]:
    """Yield the attributes that a path of names reads, of the user's modules, classes and objects."""
    variable = Capture("", place, path[0])
    for k, name in enumerate(path[1:], 2):
        value = variable.read()
        if is_of_library(value) if isinstance(value, type | ModuleType) else not _has(value, name):
            return
        yield (variable := _variable(fn, value, path[:k], paths))


def _has(x: object, name: str) -> bool:
    """Whether an object or its class stores an attribute as a value: reading any other attribute may run code."""
    value, of_class = (inspect.getattr_static(y, name, _has) for y in (x, type(x)))  # a function, where there is none
    return value is not of_class or isinstance(value, MemberDescriptorType) or not hasattr(type(value), "__get__")


# Instructions that load a variable which outlives the call, and an attribute. LOAD_NAME is in bodies of classes.
_KINDS = ("GLOBAL", "NAME", "DEREF", "CLASSDEREF", "FROM_DICT_OR_GLOBALS", "FROM_DICT_OR_DEREF")
_LOADS = {f"LOAD_{kind}" for kind in _KINDS}


def _names_in(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the paths of names that code reads, as `("module", "attribute")`."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path += (instruction.argval,)
            continue
        if path:
            yield path
        path = (instruction.argval,) if instruction.opname in _LOADS else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _generators(root: object, seen: dict[int, object]) -> Iterator[Any]:  # Any: classes of numpy, if it is there
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
            unseen += [variable.read() for variable in variables(x)]
        elif isinstance(x, type | ModuleType):
            unseen += [] if is_of_library(x) else vars(x).values()
        elif type(x).__module__.startswith("fshard."):
            unseen += _functions(x, {})  # a step, an optimizer: not through meshes into the world
        elif not issubclass(type(x), Tensor):
            unseen += gc.get_referents(x)


def generators(fn: object, leaves: Sequence[object]) -> list[tuple[str, Any]]:
    """The random generators of Python and numpy, with their classes; "" for those of `random` and `numpy.random`.

    They are those of the modules, and those that a function or its arguments hold.
    """
    np = sys.modules.get("numpy")
    methods: list[Any] = [random.random, *([] if np is None else [np.random.rand])]
    shared = [method.__self__ for method in methods]
    seen: dict[int, object] = {id(x): x for x in shared}
    others = [x for root in (fn, *leaves) for x in _generators(root, seen)]
    return [*(("", x) for x in shared), *((f"{type(x).__module__}.{type(x).__qualname__}", x) for x in others)]


def state_of(generator: Any) -> object:  # Any: numpy's classes have no common one
    """The state of a generator, to compare by `==`: each draw changes it. None for a generator without one."""
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    # as text, because == of its arrays has no truth value; their position is in it, too
    return str(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def is_of_library(x: type | ModuleType) -> bool:
    """Whether a class or a module belongs to fshard, torch, the standard library or an installed package."""
    if isinstance(x, type) and x.__module__ == "types":  # or one that `new_class` or `make_dataclass` made
        return hasattr(types, x.__name__)
    module = sys.modules.get(x.__module__) if isinstance(x, type) else x
    file = getattr(module, "__file__", None)
    if file is None:  # such as a module of C, `__main__` in a notebook, or a module that is not imported
        return module is not None and getattr(getattr(module, "__spec__", None), "origin", None) in (
            "built-in",
            "frozen",
        )
    return file.startswith(LIBRARIES)
