"""Lazy containers, which create children on access, and classes of stand-ins for containers."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from contextlib import suppress
from dataclasses import is_dataclass
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from . import tree
from .tree import Spec, Tree, children, names

STATE = ("_tape_", "_spec_", "_first_", "_inside_", "_listed_")  # attributes of a stand-in
_MAKERS = ("__new__", "__init__", "__setattr__")
_NOT_FORWARDED = {*_MAKERS, "__getattr__", "__getattribute__", "__delattr__", "__init_subclass__", "__class_getitem__"}
_NOT_FORWARDED |= {"__getnewargs__", "__reduce__", "__reduce_ex__", "__copy__"}


class Container:
    """Names, structures and first leaves of a container's children."""

    def __init__(self, spec: Spec):
        self.names: list[Hashable] = names(spec)
        self.positions: dict[Hashable, int] = {name: position for position, name in enumerate(self.names)}
        # (structure of a child, number of its first leaf in the container)
        self.children: list[tuple[Spec, int]] = list(children(spec))
        kind = spec.type or tuple
        self.is_mapping: bool = issubclass(kind, dict)
        self.sliced: Callable[[Iterable[Tree]], Sequence[Tree]] = tuple if issubclass(kind, tuple) else list


class Branch:
    """A container with children created on access. Attributes look like `_this_`: other names are for children."""

    __slots__ = ()

    @abstractmethod
    def _container_(self) -> Container: ...

    @abstractmethod
    def _pick_(self, index: int) -> Tree: ...


class Readable(Branch):
    """A branch with its container's reading methods."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Tree:  # a key, index or slice
        container = self._container_()
        if container.is_mapping:
            if key not in container.positions:
                raise KeyError(f"{key!r}: there is {', '.join(map(repr, container.names))}")
            return self._pick_(container.positions[key])
        numbers = range(len(container.names))[key]
        return self._pick_(numbers) if isinstance(numbers, int) else container.sliced(map(self._pick_, numbers))

    def __getattr__(self, name: str) -> Tree:
        # else a missing private attribute would recurse without end
        container = None if name.startswith("_") else self._container_()
        if container is None or container.is_mapping or name not in container.positions:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._pick_(container.positions[name])

    def __len__(self) -> int:
        return len(self._container_().children)

    def __iter__(self) -> Iterator[Tree]:
        container = self._container_()
        return iter(container.positions) if container.is_mapping else self._children_()

    def _children_(self) -> Iterator[Tree]:
        number = 0
        while number < len(self):  # the length may change between two children
            yield self._pick_(number)
            number += 1

    def __contains__(self, key: object) -> bool:
        container = self._container_()
        return key in (container.positions if container.is_mapping else list(self))

    def keys(self) -> KeysView[Hashable]:
        return KeysView(self)

    def values(self) -> ValuesView[Tree]:
        return _ChildValues(self)

    def items(self) -> ItemsView[Hashable, Tree]:
        return _ChildItems(self)

    def get(self, key: Hashable, default: Tree = None) -> Tree:
        return self[key] if key in self else default  # noqa: SIM401


class _ChildValues(ValuesView[Tree]):
    """Like a dict's values: can be read again, and then show later writes."""

    _mapping: Tree  # a Readable

    def __iter__(self) -> Iterator[Tree]:
        return (child for _, child in _ChildItems(self._mapping))


class _ChildItems(ItemsView[Hashable, Tree]):
    _mapping: Tree  # a Readable

    def __iter__(self) -> Iterator[tuple[Hashable, Tree]]:
        keys = [*self._mapping] if self._mapping._container_().is_mapping else range(len(self))
        return ((key, self._mapping[key]) for key in keys)


class Attributes:
    """Attributes of objects, copied without running code of their class."""

    def __init__(self, kind: type, children: tuple[str, ...]):
        pairs = [pair for base in kind.__mro__ for pair in vars(base).items()]
        dicts = [x for name, x in pairs if name == "__dict__" and isinstance(x, GetSetDescriptorType)]
        self.children, self._dict = children, dicts[0] if dicts else None
        self._slots = [x for _, x in pairs if isinstance(x, MemberDescriptorType)]

    def of(self, x: object) -> dict[str, Tree]:
        if self._dict is None:
            raise AttributeError("__dict__")
        return self._dict.__get__(x)

    def copy(self, x: object, into: object) -> None:
        for slot in self._slots:
            with suppress(AttributeError):  # the slot has no value
                slot.__set__(into, slot.__get__(x))
        if self._dict is not None:
            self.of(into).update(self.of(x))


def child_names(spec: tree.Spec) -> tuple[str, ...] | None:
    """Return the names of attributes that store a node's children; None if its class may compute children."""
    kind: Any = spec.type
    names, above = tree.child_fields(kind), kind.__mro__[:-1]
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        above = above[: next((i for i, base in enumerate(above) if "_fields" in vars(base)), 0)]
        is_changed = any(name in vars(base) for base in above for name in (*_MAKERS, *(names or ())))
        return None if is_changed else names
    if names is None and is_dataclass(kind) and _only_sets(above):
        names = tuple(str(name) for name in spec.entries())
    is_read = names is not None and all(_is_stored(inspect.getattr_static(kind, name, None)) for name in names)
    return names if is_read else None


def _only_sets(classes: Iterable[type]) -> bool:
    """True if only code generated by `dataclasses` creates objects."""
    made = [vars(base)[name] for base in classes for name in ("__post_init__", *_MAKERS) if name in vars(base)]
    return all(isinstance(x, FunctionType) and x.__code__.co_qualname.startswith("__create_fn__.") for x in made)


def _is_stored(of_class: object) -> bool:
    return isinstance(of_class, MemberDescriptorType) or not hasattr(type(of_class), "__set__")


def special_names(kind: type) -> frozenset[str]:
    if not issubclass(kind, tuple):
        return frozenset()
    pairs = [pair for base in kind.__mro__ if base not in (tuple, object) for pair in vars(base).items()]
    return frozenset(name for name, x in pairs if name[:2] == name[-2:] == "__" and callable(x)) - _NOT_FORWARDED


def forwarded(kind: type, name: str) -> property:
    if name == "__call__":  # calls stay lazy; other methods may need the filled tuple
        return property(lambda x: inspect.getattr_static(kind, name).__get__(x, kind))
    return property(lambda x: getattr(x._filled_(), name))


class OfTuple(type):
    """Metaclass of a tuple's stand-ins."""

    _kind_: type

    def __getattr__(cls, name: str) -> object:
        return getattr(cls._kind_, name)


def stand_in_class(meta: type, kind: type, bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    """Make a class of stand-ins; calling the class makes a real `kind`."""
    named: dict[str, object] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    named |= {"__slots__": (), "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs)}
    # type.__new__ skips the metaclass's own code, which may register each new class
    return type.__new__(meta, kind.__name__, bases, named | attributes)


def object_class(base: type, kind: type, names: tuple[str, ...]) -> type:
    """Make the class of an object's stand-ins. TypeError if `kind` forbids subclasses."""
    children = {name: _child(index, name, inspect.getattr_static(kind, name, None)) for index, name in enumerate(names)}
    # `__dict__` of `base`: a class of two bases would get a second one
    more = {"__slots__": STATE, "__dict__": vars(base)["__dict__"], "_attributes_": Attributes(kind, names), **children}
    # a frozen dataclass refuses writes to objects of its exact class
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        more["__setattr__"] = lambda x, *args: kind.__setattr__(object.__new__(x.__class__), *args)
    made = stand_in_class(type(kind), kind, (base, kind), more)
    object.__new__(made)
    return made


def _child(index: int, name: str, of_class: object) -> property:
    slot = of_class if isinstance(of_class, MemberDescriptorType) else None

    def read(x: Tree) -> Tree:
        if x._tape_ is not None:
            return x._pick_(index)
        if slot is not None:
            return slot.__get__(x)
        attributes = x._attributes_.of(x)
        if name not in attributes:
            raise AttributeError(name)
        return attributes[name]

    def write(x: Tree, child: Tree) -> None:
        if x._tape_ is not None:
            x._inside_[index] = child
        elif slot is not None:
            slot.__set__(x, child)
        else:
            x._attributes_.of(x)[name] = child

    return property(read, write)


def filling(run: Callable[..., Tree]) -> Callable[..., Tree]:
    return lambda *args: run(*(x._filled_() if isinstance(x, tree.StandIn) else x for x in args))


def in_place(run: Callable[..., Tree]) -> Callable[..., Tree]:
    def changed(x: Tree, other: Tree) -> Tree:
        result = run(x._settled_(), other)
        return x if result is x._held_ else result

    return changed
