"""Lazy containers: each child is created when the program accesses it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from .tree import Spec, Tree, children, names


class Branch:
    """A container that creates its children on access, with the reading methods of the container that it represents."""

    @abstractmethod
    def _node(self) -> Spec:
        """Return the structure of the container that this object represents."""

    @abstractmethod
    def _child(self, spec: Spec, first: int) -> Tree:
        """Create the child of structure `spec`, whose first leaf is number `first` among this container's leaves."""

    @abstractmethod
    def gathered(self) -> Tree:
        """Return the plain tree that this container represents, with all children created."""

    def _pick(self, index: int) -> Tree:
        """Create the child at a position."""
        if "_children" not in vars(self):  # stored, so that iteration does not list all children for each child
            vars(self)["_children"] = list(children(self._node()))
        return self._child(*vars(self)["_children"][index])

    def _is_mapping(self) -> bool:
        kind = self._node().type
        return kind is not None and issubclass(kind, dict)

    def __getitem__(self, key: Any) -> Tree:  # a key of any dict, or an index or slice: no type has both
        entries = names(self._node())
        if self._is_mapping():
            if key not in entries:
                raise KeyError(f"{key!r}: there is {', '.join(map_repr(entries))}")
            return self._pick(entries.index(key))
        numbers = range(len(entries))[key]
        return self._pick(numbers) if isinstance(numbers, int) else [self._pick(i) for i in numbers]

    def __getattr__(self, name: str) -> Tree:
        # `_node` reads private attributes: to look for one that is not set yet with its help would never end
        entries = [] if name.startswith("_") or self._is_mapping() else names(self._node())
        if name not in entries:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._pick(entries.index(name))

    def __len__(self) -> int:
        return len(self._node().children())

    def __iter__(self) -> Iterator[Tree]:
        return iter(self.keys()) if self._is_mapping() else (self._pick(i) for i in range(len(self)))

    def __contains__(self, key: object) -> bool:
        return self._is_mapping() and key in self.keys()

    def keys(self) -> list[Hashable]:
        """Return the keys, in the order of use."""
        return names(self._node())

    def values(self) -> Iterator[Tree]:
        """Return an iterator over the children in the order of use, each created when reached."""
        return (self._pick(i) for i in range(len(self)))

    def items(self) -> Iterator[tuple[Hashable, Tree]]:
        """Return an iterator over pairs of a key and its child, each child created when reached."""
        return zip(self.keys(), self.values(), strict=True)

    def get(self, key: Hashable, default: Tree = None) -> Tree:
        """Return the child of a key, or `default` if there is none."""
        return self[key] if key in self else default  # noqa: SIM401


def map_repr(items: Sequence[object]) -> list[str]:
    """Return the repr of each item, for an error message."""
    return [repr(item) for item in items]
