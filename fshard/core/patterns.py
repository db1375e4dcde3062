"""Patterns of paths."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate


def names_in(paths: Iterable[str]) -> set[str]:
    """Return the paths, and the paths of all subtrees around them.

    >>> sorted(names_in(["a.b.c", "d"]))
    ['a', 'a.b', 'a.b.c', 'd']
    """
    return {name for path in paths for name in accumulate(path.split("."), "{}.{}".format)}


def matches(path: Sequence[str], pattern: str, names: Container[str]) -> bool:
    """True if a path matches a dotted pattern: `*` is (part of) one component, `**` any number of them.

    A name in the tree (`names`, by `names_in`) means itself, even with `*` or `[`.

    >>> [matches(path, "x[0].*", {"x0", "x[0]"}) for path in (["x0", "w"], ["x[0]", "w"])]
    [False, True]
    """
    return pattern == ".".join(path) if pattern in names else _matches(path, 0, pattern.split("."), names)


def _matches(path: Sequence[str], at: int, pattern: Sequence[str], names: Container[str]) -> bool:
    if not pattern:
        return at == len(path)
    first, *rest = pattern
    is_name = ".".join((*path[:at], first)) in names
    if first == "**" and not is_name:
        return any(_matches(path, i, rest, names) for i in range(at, len(path) + 1))
    fits = at < len(path) and (path[at] == first if is_name else fnmatchcase(path[at], first))
    return fits and _matches(path, at + 1, rest, names)
