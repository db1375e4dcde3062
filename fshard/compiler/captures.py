"""The variables that a function reads besides its arguments, and the random generators that it can reach."""

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
LIBRARIES += tuple(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))  # of any prefix
_Path = tuple[str, ...]  # ("a", "b", "c") for `a.b.c`


class Capture(NamedTuple):
    """A variable read by a function: its name in errors, and where its value is stored."""

    name: str
    # The owner of the value: a closure cell, a dict of globals, or an object with the attribute `key`. Special keys
    # read the object itself (`_ITSELF`), the parts of a torch module (`_PARTS`), the code ("__code__") or defaults ("")
    # of a function, or the methods of a class (""). Typed `Any`: mypy takes a function in a field for a bound method.
    place: Any
    key: str
    is_input: bool = False  # its tensors are inputs of the graph
    of_tensors: bool = False  # compare only its tensors: tracing changed its other values
    by_name: bool = False  # code reads only attributes of the value; each attribute is another `Capture`
    is_part: bool = False  # reached through an object in another variable

    @property
    def identity(self) -> tuple[int, str]:
        return id(self.place), self.key

    @property
    def is_code(self) -> bool:
        return self.key in ("__code__", _PARTS) or (not self.key and isinstance(self.place, type))

    def tensors(self) -> list[Tensor]:
        """Return the value's tensors fit for inputs of a graph: dense, Tensor or Parameter, no gradient required."""
        value = self.read()
        try:
            if not isinstance(value, Tensor | dict | list | tuple) or tree.nodes(value, OnMesh):
                return []
        except RecursionError:  # a list that contains itself
            return []
        return [x for x in tree.leaves(value) if _fits_graph(x)]

    def read(self) -> object:
        """Return the current value; None if unassigned; for an attribute computed by a method, the uncalled method."""
        if type(self.place) is dict:
            return self.place.get(self.key)
        if isinstance(self.place, CellType):
            try:
                return self.place.cell_contents
            except ValueError:  # an empty cell, assigned later
                return None
        if self.key == "__code__":
            return self.place.__code__
        if self.key == _PARTS:
            return tuple((x, vars(x).get("forward"), *_module_settings(x)) for x in self.place.modules())
        if self.key:
            return self.place if self.key == _ITSELF else _by_name(self.place, self.key)
        if isinstance(self.place, type):
            return tuple(x for x in vars(self.place).values() if isinstance(x, _METHOD_KINDS))
        named = self.place.__kwdefaults__ or {}
        return *(self.place.__defaults__ or ()), *named, *named.values()


_ITSELF = " "  # key of a method's object, if the method uses the object other than by attribute
_PARTS = "  "  # key of a torch module's submodules, with their settings
_METHOD_KINDS = (FunctionType, property, staticmethod, classmethod, cached_property)


def _is_module(x: object) -> bool:
    return hasattr(type(x), "named_modules")


def _module_settings(module: Any) -> Iterator[object]:
    if not is_of_library(type(module)):
        return iter([module.training])
    return (repr(value) for value in vars(module).values() if isinstance(value, bool | int | float | str))


def _by_name(x: object, name: str) -> object:
    if isinstance(x, type | ModuleType | partial) or name in getattr(x, "__dict__", ()):
        return getattr(x, name, None)
    getter = _getter(x, name)
    return getattr(x, name, None) if getter is None else getter


def _getter(x: object, name: str) -> MethodType | None:
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
    if isinstance(method, property):
        return method.fget
    if isinstance(method, cached_property):
        return method.func
    return method.__func__ if isinstance(method, staticmethod | classmethod) else method


def is_users(fn: object) -> bool:
    return isinstance(fn, FunctionType) and not fn.__code__.co_filename.startswith(LIBRARIES)


def _is_ours(x: object) -> bool:
    return type(x).__module__.startswith("fshard.")


def _fits_graph(x: object) -> bool:
    dense = isinstance(x, Tensor) and not isinstance(x, FakeTensor | Marked) and x.layout is torch.strided
    if not dense or type(x) not in (Tensor, nn.Parameter) or func_levels.is_dual(x):
        return False
    return not x.requires_grad and not x.is_nested  # type: ignore[attr-defined]  # `dense` implies Tensor


def captures(fn: object) -> Iterator[Capture]:
    """Yield the variables read by `fn` and, recursively, by functions in the values of these variables.

    A library's function (torch, the standard library, installed packages) counts only with its closure. If code passes
    the user's object, class or module to a function, as in `penalty(w, config)`, an attribute of the object counts if
    any function reads an attribute of that name.
    """
    seen, known, inside = dict[object, object](), dict[tuple[int, str], Capture](), dict[int, object]()
    names, objects = dict[str, None](), list[object]()  # names of read attributes; objects passed on
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


def _attributes_in(code: object) -> Iterator[str]:
    """Yield names of attributes read by code or an `attrgetter`, and all strings: `getattr` may take any string."""
    if isinstance(code, CodeType):
        yield from (x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_ATTR", "LOAD_METHOD"))
    for x in code.co_consts if isinstance(code, CodeType) else code.__reduce__()[1]:
        if isinstance(x, CodeType):
            yield from _attributes_in(x)
        elif isinstance(x, str):
            yield from x.split(".")


# compared item by item
_CONTAINERS: tuple[type, ...] = (dict, list, tuple, set, frozenset, deque, UserDict, UserList, ChainMap, ContextVar)
_CONTAINERS += (types.SimpleNamespace, types.MappingProxyType)


def _objects(value: object, seen: dict[int, object]) -> Iterator[object]:
    unseen = [value]
    while unseen:
        x = unseen.pop()
        kind = x if isinstance(x, type | ModuleType) else type(x)
        is_owner = not (is_of_library(kind) or _is_module(x) or _is_ours(x))
        if id(x) in seen or not (is_owner or isinstance(x, _CONTAINERS)):
            continue
        seen[id(x)] = x
        if is_owner:
            yield x
            unseen += [getattr(x, name, None) for name in _dataclass_fields(x)]
        if isinstance(x, _CONTAINERS):
            unseen += [x.get(None)] if isinstance(x, ContextVar) else gc.get_referents(x)


def _dataclass_fields(x: object) -> Collection[str]:
    return [field.name for field in fields(x)] if is_dataclass(x) and not isinstance(x, type) else ()


def _read_of(x: object, names: Collection[str]) -> Iterator[Capture]:
    """Yield an object's attributes with these names, except tensors: a trace refuses tensors in objects."""
    kinds = x.__mro__ if isinstance(x, type) else (x, *type(x).__mro__)
    stored = {name: None for y in kinds for name in getattr(y, "__dict__", ()) if name in names}
    owner = getattr(x, "__name__", "") if isinstance(x, type | ModuleType) else ""
    compared = {*_dataclass_fields(x)}
    for name in (name for name in stored if name not in compared):
        variable = Capture(f"{name!r} of {owner or f'a {type(x).__qualname__}'}", x, name)
        if not (owner or _has(x, name)):
            continue
        if not (isinstance(value := variable.read(), Tensor) or _is_ours(value) or variable.tensors()):
            yield variable


def _captures(fn: object, seen: dict[object, object], is_whole: bool = True) -> Iterator[Capture]:
    """Yield the variables of `captures`, without attributes of objects passed to functions.

    `seen` keeps visited objects alive, so no new object gets an id in `seen`. `is_whole`: False if code reads only
    attributes of `fn`, each with its own `Capture`.
    """
    for function in _functions(fn, seen, is_whole):
        key: object = id(function)
        if isinstance(function, MethodType):  # each read makes a new method object, with a new id
            key = id(function.__func__), id(function.__self__)
        if key in seen:
            continue
        seen[key] = function
        for capture in variables(function):
            yield capture
            yield from _captures(capture.read(), seen, not capture.by_name)


_Function = Any  # a user's function, bound method, partial or class, or a torch module


def _functions(x: Any, seen: dict[object, object], is_whole: bool = True) -> Iterator[_Function]:
    """Yield the functions, partials and classes in `x` and its items: code with access to `x` may call any of them."""
    while _is_ours(x) and hasattr(x, "run"):  # a train step, or a `Checked` around a step
        x = x.run
    if is_dataclass(x) and not isinstance(x, type) and (_is_ours(x) or not is_of_library(type(x))):
        values = [getattr(x, field.name, None) for field in fields(x)]
        for fn in (value for value in values if isinstance(value, partial | FunctionType | MethodType)):
            yield from _functions(fn, seen)
    if isinstance(x, partial | dict | list | tuple | set | frozenset | deque) and id(x) not in seen:
        if isinstance(x, partial):
            yield x  # before it is in `seen`: `_captures` skips those
        seen[id(x)] = x
        parts = (x.func, *x.args, *x.keywords.values()) if isinstance(x, partial) else x
        for part in x.values() if isinstance(x, dict) else parts:
            yield from _functions(part, seen)
    elif inspect.ismethod(x):
        yield from (*_functions(x.__func__, seen), *_methods(x.__self__), *([x] if is_users(x.__func__) else []))
    elif x is not None:
        yield from [x] if inspect.isfunction(x) else _methods(x, is_whole)
        # jitted functions, too, have `__wrapped__`; `hasattr` would run the user's `__getattr__`
        if not inspect.isclass(x) and inspect.getattr_static(x, "__wrapped__", None) is not None:
            # a module in `__wrapped__` may be a copy, with attributes that nobody sets
            yield from _functions(x.__wrapped__, seen, is_whole=not _is_module(x.__wrapped__))


def _methods(x: object, is_whole: bool = False) -> Iterator[_Function]:
    """Yield the user's classes of an object or of a module's submodules, and the functions of these classes."""
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
                # if `x` is a class, code may call any method of an instance
                is_called = inspect.isclass(x) or name == "forward" or name[:2] == name[-2:] == "__"
                if is_whole and is_called and name not in _SHOWS and is_users(fn):
                    yield from (MethodType(fn, part) for part in objects)


# methods to make, show, compare or save an object, or to look up an attribute: they compute nothing
_SHOWS = {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__eq__", "__hash__", "__del__"}
_SHOWS |= {"__getattr__", "__setattr__", "__getstate__", "__setstate__", "__reduce__", "__replace__"}


def variables(fn: _Function) -> Iterator[Capture]:
    """Yield the variables read directly by one function, method, class, partial or module."""
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
    if is_own or "<locals>" in fn.__qualname__:  # or a library's function made `fn` for the user
        yield Capture(f"a default of {fn.__qualname__}", fn, "")
    for path in paths:
        place = cells.get(path[0], fn.__globals__)
        if place is fn.__globals__ and path[0] in place:
            yield _variable(fn, place, path[:1], paths)
        yield from _attributes(fn, Capture("", place, path[0]).read(), path, paths)


def _of_owner(fn: Any, owner: object) -> Iterator[Capture]:
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


def _variable(fn: FunctionType, place: object, path: _Path, paths: Collection[_Path]) -> Capture:
    variable, k = Capture(f"{'.'.join(path)!r} of {fn.__qualname__}", place, path[-1]), len(path)
    names = {longer[k] for longer in paths if longer[:k] == path and len(longer) > k}
    return variable._replace(by_name=bool(names) and path not in paths)


def _attributes(
    fn: FunctionType, value: object, path: _Path, paths: Collection[_Path], start: int = 1, around: tuple[int, ...] = ()
) -> Iterator[Capture]:
    """Yield the attributes `a`, `b` and `c` read by `value.a.b.c`: their names are `path[start:]`.

    If a method computes an attribute, go on with every value that the method may return. `around`: ids of such methods'
    owners, so that recursion ends.
    """
    for k, name in enumerate(path[start:], start):
        if is_of_library(value) if isinstance(value, type | ModuleType) else not _has(value, name):
            return
        yield (variable := _variable(fn, value, path[: k + 1], paths))
        owner, value = value, variable.read()
        if isinstance(value, MethodType) and value == _getter(owner, name):
            if value.__self__ is not owner:  # a descriptor may read any attribute of `owner`
                yield Capture(f"an attribute of a {type(owner).__qualname__}", owner, "__dict__")
            k += value.__func__.__name__ != "__getattr__"
            for inner in _handed_on(value) if id(owner) not in around else ():
                yield from _attributes(fn, inner, path, paths, k, (*around, id(owner)))
            return


def _handed_on(method: MethodType) -> list[object]:
    """Return a method's possible results: values used other than by attribute, and values of dicts among them."""
    read = [x.read() for x in variables(method) if not x.by_name and x.key != _ITSELF]
    return [y for x in read for y in (x.values() if isinstance(x, dict) else [x])]


def _has(x: object, name: str) -> bool:
    """Return True if an attribute is stored or the user's code computes it: a library's code must not run."""
    value, of_class = (inspect.getattr_static(y, name, _has) for y in (x, type(x)))  # `_has` if absent
    if value is not of_class or isinstance(value, MemberDescriptorType) or not hasattr(type(value), "__get__"):
        return True
    if (value is not _has and is_users(_function_of(value))) or _getter(x, name) is not None:
        return True
    return name in ("__dict__", "__class__") and not is_of_library(type(x))


# LOAD_NAME is in bodies of classes.
_VARIABLE_KINDS = ("GLOBAL", "NAME", "DEREF", "CLASSDEREF", "FROM_DICT_OR_GLOBALS", "FROM_DICT_OR_DEREF")
_LOADS = {f"LOAD_{kind}" for kind in _VARIABLE_KINDS}


def _names_in(code: CodeType, first: str = "") -> Iterator[tuple[str, ...]]:
    """Yield `("module", "attribute")` for each `module.attribute` read by code, also for its argument `first`."""
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path += (instruction.argval,)
            continue
        if path:
            yield path
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        loads = instruction.opname in _LOADS or ("LOAD_FAST" in instruction.opname and first in names)
        path = (names[-1],) if loads else ()  # an instruction of Python 3.13 may load two variables
        if loads and len(names) == 2 and names[0] == first:
            yield names[:1]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _generators(root: object, seen: dict[int, object]) -> Iterator[object]:
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
            unseen += _functions(x, {})  # only functions: a step's mesh leads to a simulated world
        elif not issubclass(type(x), Tensor):
            unseen += gc.get_referents(x)


def generators(fn: object, leaves: Sequence[object]) -> list[tuple[str, Any]]:
    """Return (class name, generator). The name is "" for the global generators of `random` and `numpy.random`."""
    np = sys.modules.get("numpy")
    methods: list[Any] = [random.random, *([] if np is None else [np.random.rand])]
    shared = [method.__self__ for method in methods]
    seen: dict[int, object] = {id(x): x for x in shared}
    others = [x for root in (fn, *leaves) for x in _generators(root, seen)]
    return [*(("", x) for x in shared), *((f"{type(x).__module__}.{type(x).__qualname__}", x) for x in others)]


def state_of(generator: Any) -> object:  # Any: numpy's generators have no common class
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    # as text: == of states with arrays gives no bool
    return str(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def is_of_library(x: type | ModuleType) -> bool:
    """Return True for classes and modules of fshard, torch, the standard library and installed packages."""
    if isinstance(x, type) and x.__module__ == "types":  # `new_class` and `make_dataclass` set this module, too
        return hasattr(types, x.__name__)
    module = sys.modules.get(x.__module__) if isinstance(x, type) else x
    file = getattr(module, "__file__", None)
    if file is None:  # a module of C, `__main__` in a notebook, or not imported
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return module is not None and origin in ("built-in", "frozen")
    return file.startswith(LIBRARIES)
