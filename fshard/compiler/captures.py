"""The variables that a function reads in addition to its arguments, and the random generators that it may draw from."""

from __future__ import annotations

import dis
import gc
import inspect
import random
import sys
import sysconfig
import types
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Private API: see `trace.py`.
from torch._subclasses.fake_tensor import FakeTensor

from ..comm.mesh import OnMesh
from ..core import func_levels, tree
from ..core.arguments import CODE
from ..core.tracing import Marked

LIBRARIES = (*CODE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
LIBRARIES += tuple(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))  # of other prefixes
_Path = tuple[str, ...]  # a variable, an attribute of its value, an attribute of that one ...


class Capture(NamedTuple):
    """A variable that a function reads: its name in error messages, and the place that stores its value."""

    name: str
    # A closure cell, the globals of a module (a dict), a module, class or object (for an attribute, or `_ITSELF`), a
    # function (for its code, and "" for its default values), or a class ("" for its methods). Any, because mypy takes a
    # function that is read from a field for a bound method.
    place: Any
    key: str
    is_input: bool = False  # whether a graph reads the tensors of its value at each run
    of_tensors: bool = False  # whether only its tensors are compared, because tracing itself changes the rest
    by_name: bool = False  # whether only attributes of its value are read, which are variables of their own
    is_part: bool = False  # whether it belongs to an object that is the value of another variable, or in it

    @property
    def identity(self) -> tuple[int, str]:
        """A key that is equal for two captures of one variable."""
        return id(self.place), self.key

    @property
    def is_code(self) -> bool:
        """True for the code of a function, the methods of a class, and the parts of a module of torch's."""
        return self.key in ("__code__", _PARTS) or (not self.key and isinstance(self.place, type))

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
        """Return the current value of the variable, or None if the variable is not assigned yet.

        The value of an attribute that a method computes is this method, which is not called.
        """
        if type(self.place) is dict:
            return self.place.get(self.key)
        if isinstance(self.place, CellType):
            try:
                return self.place.cell_contents
            except ValueError:  # the cell is empty: the variable is assigned later
                return None
        if self.key == "__code__":
            return self.place.__code__
        if self.key == _PARTS:
            return tuple((x, vars(x).get("forward"), *_settings(x)) for x in self.place.modules())
        if self.key:
            return self.place if self.key == _ITSELF else _by_name(self.place, self.key)
        if isinstance(self.place, type):
            return tuple(x for x in vars(self.place).values() if isinstance(x, _METHODS))
        named = self.place.__kwdefaults__ or {}
        return *(self.place.__defaults__ or ()), *named, *named.values()


_ITSELF = " "  # the key of an object that one of its methods reads otherwise than by names
_PARTS = "  "  # the key of a module of torch's, whose submodules are called
_METHODS = (FunctionType, property, staticmethod, classmethod, cached_property)


def _is_module(x: object) -> bool:
    """True for a module of torch's."""
    return hasattr(type(x), "named_modules")


def _settings(module: Any) -> Iterator[object]:
    """The flags and numbers of a layer of a library, by which it computes; of the user's the mode alone."""
    if not is_of_library(type(module)):
        return iter([module.training])
    return (repr(value) for value in vars(module).values() if isinstance(value, bool | int | float | str))


def _by_name(x: Any, name: str) -> object:  # Any: as in `_functions`
    """Return an attribute, None if there is none; of one that a method of the user's computes, this method."""
    if isinstance(x, type | ModuleType | partial) or name in getattr(x, "__dict__", ()):
        return getattr(x, name, None)
    getter = _getter(x, name)
    return getattr(x, name, None) if getter is None else getter


def _getter(x: object, name: str) -> MethodType | None:
    """Return the user's method that computes an attribute of a name which the object itself does not store."""
    kinds = [vars(kind) for kind in type(x).__mro__]
    attribute = next((kind[name] for kind in kinds if name in kind), None)
    if attribute is None:
        fn = next((kind["__getattr__"] for kind in kinds if "__getattr__" in kind), None)
    elif isinstance(attribute, property | cached_property):
        fn = _function_of(attribute)
    else:
        fn, x = inspect.getattr_static(type(attribute), "__get__", None), attribute
    return MethodType(fn, x) if fn is not None and is_users(fn) else None


def _function_of(method: object) -> object:
    """The function of what a class stores for a method."""
    if isinstance(method, property):
        return method.fget
    if isinstance(method, cached_property):
        return method.func
    return method.__func__ if isinstance(method, staticmethod | classmethod) else method


def is_users(fn: object) -> bool:
    """Return True for a function of the user's."""
    return isinstance(fn, FunctionType) and not fn.__code__.co_filename.startswith(LIBRARIES)


def _is_ours(x: object) -> bool:
    return type(x).__module__.startswith("fshard.")


def _is_plain(x: object) -> bool:
    dense = isinstance(x, Tensor) and not isinstance(x, FakeTensor | Marked) and x.layout is torch.strided
    if not dense or type(x) not in (Tensor, nn.Parameter) or func_levels.is_dual(x):
        return False
    return not x.requires_grad and not x.is_nested  # type: ignore[attr-defined]  # mypy does not see what `dense` implies


def captures(fn: object) -> Iterator[Capture]:
    """Yield the variables that `fn` reads, and recursively the variables that functions among their values read.

    Of functions that belong to a library (torch, the standard library, installed packages) only closures are yielded.
    Of an object, class or module of the user's that is handed on (`penalty(w, config)`), attributes are yielded if any
    of the functions reads their name.
    """
    seen, known, inside = dict[object, object](), dict[tuple[int, str], Capture](), dict[int, object]()
    names, objects = dict[str, None](), list[object]()  # what code reads of any object; objects that are handed on
    unseen: Iterator[Capture] = _captures(fn, seen)
    while new := [*unseen]:
        yield from new
        known |= {capture.identity: capture for capture in new}
        read = [(x, x.read()) for x in new]
        readers = [y for x, y in read if x.key == "__code__" or isinstance(y, attrgetter)]
        more = {name: None for reader in readers for name in _attributes_in(reader) if name not in names}
        names |= more
        whole = (y for x, y in read if not (x.is_code or (x.by_name and not isinstance(y, _CONTAINERS))))
        others = [x for value in whole for x in _objects(value, inside)]
        more_read = [y for these, of in ((objects, more), (others, names)) for x in these for y in _read_of(x, of)]
        objects += others
        unseen = (y for x in more_read if x.identity not in known for y in (x, *_captures(x.read(), seen)))
        unseen = (x._replace(is_part=True) for x in unseen)


def _attributes_in(code: Any) -> Iterator[str]:
    """Yield the names of attributes that code, or an `attrgetter`, reads of any object, also by `getattr`."""
    if isinstance(code, CodeType):
        yield from (x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for x in code.co_consts if isinstance(code, CodeType) else code.__reduce__()[1]:
        if isinstance(x, CodeType):
            yield from _attributes_in(x)
        elif isinstance(x, str):
            yield from x.split(".")


# compared with what is in them
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque, UserDict, UserList, ChainMap, ContextVar)
_CONTAINERS += (types.SimpleNamespace, types.MappingProxyType)


def _objects(value: object, seen: dict[int, object]) -> Iterator[object]:
    """Yield the user's objects, classes and modules in a value, except modules of torch's; `seen` are known, by id."""
    unseen = [value]
    while unseen:
        x: Any = unseen.pop()
        kind = x if isinstance(x, type | ModuleType) else type(x)
        is_owner = not (is_of_library(kind) or _is_module(x) or _is_ours(x))
        if id(x) in seen or not (is_owner or isinstance(x, _CONTAINERS)):
            continue
        seen[id(x)] = x
        if is_owner:
            yield x
            unseen += [getattr(x, name, None) for name in _fields(x)]
        if isinstance(x, _CONTAINERS):
            unseen += [x.get(None)] if isinstance(x, ContextVar) else gc.get_referents(x)


def _fields(x: Any) -> Collection[str]:
    """The names of what is compared of an object where it is compared as a whole."""
    return [field.name for field in fields(x)] if is_dataclass(x) and not isinstance(x, type) else ()


def _read_of(x: object, names: Collection[str]) -> Iterator[Capture]:
    """Yield the attributes of an object that have one of these names, but for tensors, which are a TraceError."""
    kinds = x.__mro__ if isinstance(x, type) else (x, *type(x).__mro__)
    stored = {name: None for y in kinds for name in getattr(y, "__dict__", ()) if name in names}
    owner = getattr(x, "__name__", "") if isinstance(x, type | ModuleType) else ""
    compared = {*_fields(x)}
    for name in (name for name in stored if name not in compared):
        variable = Capture(f"{name!r} of {owner or f'a {type(x).__qualname__}'}", x, name)
        if not (owner or _has(x, name)):
            continue
        if not (isinstance(value := variable.read(), Tensor) or _is_ours(value) or variable.tensors()):
            yield variable


def _captures(fn: object, seen: dict[object, object], is_whole: bool = True) -> Iterator[Capture]:
    """Yield what `captures` does, without the attributes of objects that are handed on.

    `seen` are the functions, methods and containers looked at, by id: stored, so that no other object gets the id of
    one. Of an object that is not `whole`, attributes are read by their names alone, each a variable of its own.
    """
    for function in _functions(fn, seen, is_whole):
        key: object = id(function)
        if isinstance(function, MethodType):  # which is made anew where it is read
            key = id(function.__func__), id(function.__self__)
        if key in seen:
            continue
        seen[key] = function
        for capture in variables(function):
            yield capture
            yield from _captures(capture.read(), seen, not capture.by_name)


_Function = Any  # a function, bound method, partial or class of the user's, or a module of torch's


# Any: attributes of an unknown object are read
def _functions(x: Any, seen: dict[Any, object], is_whole: bool = True) -> Iterator[_Function]:
    """Yield Python's functions, partials and classes that a program with `x` may run; of a container, of each item.

    A method is yielded with its object if the program calls it: then it is known whose attributes it reads.
    """
    while _is_ours(x) and hasattr(x, "run"):  # a train step, possibly wrapped by a check
        x = x.run
    if is_dataclass(x) and not isinstance(x, type) and (_is_ours(x) or not is_of_library(type(x))):
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
        yield from (*_functions(x.__func__, seen), *_methods(x.__self__), *([x] if is_users(x.__func__) else []))
    elif x is not None:
        yield from [x] if inspect.isfunction(x) else _methods(x, is_whole)
        # a jitted function has it, too; not `hasattr`, which runs an object's `__getattr__`
        if not inspect.isclass(x) and inspect.getattr_static(x, "__wrapped__", None) is not None:
            # a module there is a copy, whose attributes nobody sets
            yield from _functions(x.__wrapped__, seen, is_whole=not _is_module(x.__wrapped__))


def _methods(x: object, is_whole: bool = False) -> Iterator[_Function]:
    """Yield the user's classes of an object, and their functions: its own if it is one, a module's and its parts'.

    What Python and torch call by themselves is yielded with an object that a program has as a whole.
    """
    parts: Any = x.modules() if _is_module(x) else [x]  # type: ignore[attr-defined]
    if is_whole and _is_module(x):
        yield x
    kinds: dict[type, list[object]] = {}
    for part in parts:
        for base in (part if isinstance(part, type) else type(part)).__mro__:
            kinds.setdefault(base, []).append(part)
    for kind, objects in kinds.items():
        if is_of_library(kind):
            continue
        yield kind
        for name, method in vars(kind).items():
            fn = _function_of(method)
            if inspect.isfunction(fn):
                yield from _functions(fn, {})
                # an object that the program makes of a class may be asked for any
                is_called = inspect.isclass(x) or name == "forward" or name[:2] == name[-2:] == "__"
                if is_whole and is_called and name not in _SHOWS and is_users(fn):
                    yield from (MethodType(fn, part) for part in objects)


# methods that are no part of computing: they make, show or compare an object, or are called for a name
_SHOWS = {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__eq__", "__hash__", "__del__"}
_SHOWS |= {"__getattr__", "__setattr__", "__getstate__", "__setstate__", "__reduce__", "__replace__"}


def variables(fn: _Function) -> Iterator[Capture]:
    """Yield the variables that one function reads itself; of one of a library those of its closure.

    Of a method these are attributes of its object, of a class its methods, of a module its layers and modes.
    """
    if isinstance(fn, MethodType):
        yield from _of_owner(fn.__func__, fn.__self__)
        return
    if isinstance(fn, type) or _is_module(fn):
        is_class = isinstance(fn, type)
        what = f"a method of {fn.__qualname__}" if is_class else f"a layer or the mode of a {type(fn).__qualname__}"
        yield Capture(what, fn, "" if is_class else _PARTS)
        return
    if isinstance(fn, partial):
        yield from (Capture(f"{key!r} of a partial", fn, key) for key in ("args", "keywords"))
        return
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    is_own = is_users(fn)
    paths = dict.fromkeys(_names_in(fn.__code__) if is_own else ())
    for name, cell in cells.items():
        yield _variable(fn, cell, (name,), paths)
    if is_own:
        yield Capture(f"the code of {fn.__qualname__}", fn, "__code__")
    if is_own or "<locals>" in fn.__qualname__:  # what a library makes for the user
        yield Capture(f"a default of {fn.__qualname__}", fn, "")
    for path in paths:
        place = cells.get(path[0], fn.__globals__)
        if place is fn.__globals__ and path[0] in place:
            yield _variable(fn, place, path[:1], paths)
        yield from _attributes(fn, Capture("", place, path[0]).read(), path, paths)


def _of_owner(fn: Any, owner: object) -> Iterator[Capture]:
    """Yield the variables that a method reads of the object, or class, to which it is bound."""
    code = fn.__code__
    first = code.co_varnames[0] if code.co_argcount else ""
    paths = dict.fromkeys(path for path in _names_in(code, first) if path[0] == first)
    if (first,) in paths:
        yield Capture(f"{first!r} of {fn.__qualname__}", owner, _ITSELF)
    for path in paths:
        yield from _attributes(fn, owner, path, paths)
    if "super" in code.co_names and not isinstance(owner, type):
        bases = [vars(kind).get(name) for name in code.co_names for kind in type(owner).__mro__[1:]]
        for base in bases:
            if isinstance(base, FunctionType) and base is not fn and is_users(base):
                yield from _of_owner(base, owner)


def _variable(fn: FunctionType, place: Any, path: _Path, paths: Collection[_Path]) -> Capture:
    """The variable that a path of names leads to. `paths` are all those of the function."""
    variable, k = Capture(f"{'.'.join(path)!r} of {fn.__qualname__}", place, path[-1]), len(path)
    names = {longer[k] for longer in paths if longer[:k] == path and len(longer) > k}
    return variable._replace(by_name=bool(names) and path not in paths)


def _attributes(
    fn: FunctionType, value: Any, path: _Path, paths: Collection[_Path], start: int = 1, around: tuple[int, ...] = ()
) -> Iterator[Capture]:
    """Yield the attributes that a path of names, from `start` on, reads of a value of the user's.

    Behind an attribute that a method computes, the path goes on from what the method reads of its object, which it may
    hand on; `around` are the objects of such methods, by id.
    """
    for k, name in enumerate(path[start:], start):
        if is_of_library(value) if isinstance(value, type | ModuleType) else not _has(value, name):
            return
        yield (variable := _variable(fn, value, path[: k + 1], paths))
        owner, value = value, variable.read()
        if isinstance(value, MethodType) and value == _getter(owner, name):
            if value.__self__ is not owner:  # a descriptor, which may read anything of the object
                yield Capture(f"an attribute of a {type(owner).__qualname__}", owner, "__dict__")
            k += value.__func__.__name__ != "__getattr__"
            for inner in _handed_on(value) if id(owner) not in around else ():
                yield from _attributes(fn, inner, path, paths, k, (*around, id(owner)))
            return


def _handed_on(method: MethodType) -> list[object]:
    """The values that a method reads as wholes of its object, and those in dicts of them."""
    read = [x.read() for x in variables(method) if not x.by_name and x.key != _ITSELF]
    return [y for x in read for y in (x.values() if isinstance(x, dict) else [x])]


def _has(x: object, name: str) -> bool:
    """True if an attribute is stored as a value or made by the user's code: reading any other may run a library's."""
    value, of_class = (inspect.getattr_static(y, name, _has) for y in (x, type(x)))  # a function, where there is none
    if value is not of_class or isinstance(value, MemberDescriptorType) or not hasattr(type(value), "__get__"):
        return True
    if (value is not _has and is_users(_function_of(value))) or _getter(x, name) is not None:
        return True
    return name in ("__dict__", "__class__") and not is_of_library(type(x))


# Instructions that load a variable which outlives the call, and an attribute. LOAD_NAME is in bodies of classes.
_KINDS = ("GLOBAL", "NAME", "DEREF", "CLASSDEREF", "FROM_DICT_OR_GLOBALS", "FROM_DICT_OR_DEREF")
_LOADS = {f"LOAD_{kind}" for kind in _KINDS}


def _names_in(code: CodeType, first: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the paths of names that code reads, as `("module", "attribute")`; also those of its argument `first`."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path += (instruction.argval,)
            continue
        if path:
            yield path
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        loads = instruction.opname in _LOADS or ("LOAD_FAST" in instruction.opname and first in names)
        path = (names[-1],) if loads else ()  # since Python 3.13 one instruction may load two variables
        if loads and len(names) == 2 and names[0] == first:
            yield names[:1]
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
        elif _is_ours(x):
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
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return module is not None and origin in ("built-in", "frozen")
    return file.startswith(LIBRARIES)
