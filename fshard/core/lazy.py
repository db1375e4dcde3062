"""Lazy containers: each child is created when the program accesses it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from .tree import Spec, Tree, children, names


class Container:
    """The children of a container, listed once: their names, structures and first leaves."""

    def __init__(self, spec: Spec):
        self.names: list[Hashable] = names(spec)
        self.positions: dict[Hashable, int] = {name: position for position, name in enumerate(self.names)}
        # the structure, and the number of the first leaf in this container
        self.children: list[tuple[Spec, int]] = list(children(spec))
        kind = spec.type or tuple
        self.is_mapping: bool = issubclass(kind, dict)
        self.sliced: Callable[[Iterable[Any]], Any] = tuple if issubclass(kind, tuple) else list


class Branch:
    """A container that creates its children on access. Names of its own begin and end with `_`: users have others."""

    __slots__ = ()

    @abstractmethod
    def _container_(self) -> Container:
        """Return the children of the container that this object represents."""

    @abstractmethod
    def _pick_(self, index: int) -> Tree:
        """Create the child at a position."""


class Readable(Branch):
    """One with the reading methods of the dict, list or tuple that it represents."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> Tree:  # a key of any dict, or an index or slice: no type has both
        container = self._container_()
        if container.is_mapping:
            if key not in container.positions:
                raise KeyError(f"{key!r}: there is {', '.join(map(repr, container.names))}")
            return self._pick_(container.positions[key])
        numbers = range(len(container.names))[key]
        return self._pick_(numbers) if isinstance(numbers, int) else container.sliced(map(self._pick_, numbers))

    def __getattr__(self, name: str) -> Tree:
        # Do not call `_container_` for private names: it reads private attributes itself, and would recurse without end
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
        while number < len(self):  # which may change meanwhile, as a list's
            yield self._pick_(number)
            number += 1

    def __contains__(self, key: object) -> bool:
        container = self._container_()
        return key in (container.positions if container.is_mapping else list(self))

    def keys(self) -> KeysView[Hashable]:
        """Return the keys, in the order of use."""
        return KeysView(self)

    def values(self) -> ValuesView[Tree]:
        """Return the children in the order of use, each created when reached."""
        return _Values(self)

    def items(self) -> ItemsView[Hashable, Tree]:
        """Return pairs of a key and its child, each child created when reached."""
        return _Items(self)

    def get(self, key: Hashable, default: Tree = None) -> Tree:
        """Return the child of a key, or `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401


class _Values(ValuesView[Tree]):
    """Values that, like a dict's, can be iterated again, and show what a program puts there meanwhile."""

    _mapping: Any  # a Branch

    def __iter__(self) -> Iterator[Tree]:
        return (child for _, child in _Items(self._mapping))


class _Items(ItemsView[Hashable, Tree]):
    """Items that, like a dict's, can be iterated again, and show what a program puts there meanwhile."""

    _mapping: Any  # a Branch

    def __iter__(self) -> Iterator[tuple[Hashable, Tree]]:
        keys = [*self._mapping] if self._mapping._container_().is_mapping else range(len(self))
        return ((key, self._mapping[key]) for key in keys)
