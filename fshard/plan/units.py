"""Selection of leaves by patterns, a predicate or a size: for units, `frozen`, `whole` and policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from ..core import tree
from ..core.arguments import check_predicate, check_whole, wrong
from ..core.patterns import matches, names_in
from ..core.tree import Tree
from ..layout.layout import Leaf, Split
from .precision import Policy

Where = str | Sequence[str] | Callable[[str, Tree], bool] | None
Units = Where | int | Sequence[str | tuple[str, ...]]  # a tuple of patterns is one unit
ROOT = "(root)"
ENDS = FIRST, LAST = "(first)", "(last)"  # leaves before the first claimed leaf, and after the last
_WILD = set("*?[")
_SHOWN = 8  # names in an error
_STATE = "; the word 'state' means the optimizer state alone"


def _selector(params: Tree, spec: tree.Spec, where: Where, name: str) -> list[tuple[str, int, int]]:
    """Return (path, first leaf, number of leaves) of the selected subtrees, outer before inner."""
    _check_where(name, where)
    if where is None:
        return []
    nodes = list(tree.walk(spec))
    picked: Sequence[object]
    if callable(where):
        flat = tree.leaves(params)
        picked = [
            node.num_leaves and where(".".join(path), tree.unflatten(node, flat[first : first + node.num_leaves]))
            for path, node, first in nodes
        ]
    else:
        patterns = [where] if isinstance(where, str) else list(where)
        picked = fits = fitting([path for path, _, _ in nodes], patterns, spec)
        matched = set(chain.from_iterable(fits))
        for number, pattern in enumerate(patterns):
            if number not in matched:  # matching only subtrees without leaves is no error
                word = _STATE * (name == "offload" and isinstance(where, str))
                raise ValueError(f"{name}: the pattern {pattern!r} matches nothing; {_top(spec)}{word}")
    pairs = zip(nodes, picked, strict=True)
    return [
        (".".join(path), first, node.num_leaves) for (path, node, first), is_in in pairs if is_in and node.num_leaves
    ]


def fitting(paths: Sequence[Sequence[str]], patterns: Sequence[str], spec: tree.Spec) -> list[list[int]]:
    """Return the numbers of the patterns that each path matches, in order.

    >>> fitting([("a",), ("a", "b")], ["a.*", "a", "**"], tree.flatten({"a": {"b": 1}})[1])
    [[1, 2], [0, 2]]
    """
    texts, exact = [".".join(path) for path in paths], dict[str, list[int]]()
    for number, pattern in enumerate(patterns):
        exact.setdefault(pattern, []).append(number)
    wild = [pattern for pattern in exact if _WILD & set(pattern)]
    names = names_in([*tree.leaf_paths(spec), *texts]) if wild else set[str]()
    return [
        sorted(
            {
                *(exact.get(text, ()) if path else ()),
                *(n for x in wild if matches(path, x, names) for n in exact[x]),
            }
        )
        for path, text in zip(paths, texts, strict=True)
    ]


def _top(spec: tree.Spec) -> str:
    if spec.is_leaf():
        return "the tree's top level is a leaf"
    names = [str(name) for name in tree.names(spec)]
    top = ", ".join(map(repr, names[:_SHOWN])) + f", ... ({len(names)} in all)" * (len(names) > _SHOWN)
    dotted = any("." in name for name in names)
    return f"the tree's top level is {top}" + (
        ". It is flat: a pattern matches nested containers. fshard.module.functionalize(module) returns nested "
        "parameters; else write {'a': {'b': x}} for {'a.b': x}" * dotted
    )


def _check_where(name: str, where: object) -> None:
    sequence = isinstance(where, list | tuple | set | frozenset) and all(isinstance(p, str) for p in where)
    predicate = callable(where) and not isinstance(where, type)
    if not (where is None or isinstance(where, str) or sequence or predicate):
        expected = "path patterns such as 'blocks.*' (one, or a list), or a predicate (path, subtree) -> bool"
        expected += ", or a whole number of elements" * (name == "units") + _STATE * (name == "offload")
        raise TypeError(wrong(name, where, expected))
    if callable(where):
        check_predicate(name, where, "(path, subtree) -> bool")


def claim_leaves(params: Tree, spec: tree.Spec, origins: Sequence[int], where: Where, name: str) -> list[bool]:
    """True for every selected leaf; selecting one occurrence of a tied leaf selects all."""
    selected = {x for _, first, count in _selector(params, spec, where, name) for x in origins[first : first + count]}
    return [origin in selected for origin in origins]


def claim_splits(
    params: Tree, origins: Sequence[int], split: Mapping[str, Sequence[object]], sizes: Mapping[str, int]
) -> dict[int, Split]:
    """Return {leaf number: split}; a tied leaf has its first occurrence's number. An axis of one rank splits nothing.

    Raises TypeError for anything but (axis, dim) or (axis, dim, blocks); ValueError for an unknown axis, dim or number
    of blocks, a pattern without leaves, and two splits of a leaf.
    """
    chosen, (flat, spec) = dict[int, Split](), tree.flatten(params)
    paths = tree.leaf_paths(spec)
    for pattern, how in split.items():
        at = f"split[{pattern!r}]"
        if not isinstance(how, tuple | list) or [*map(type, how)] not in ([str, int], [str, int, int]):
            raise TypeError(wrong(at, how, "(axis, dim), or (axis, dim, blocks)", "As in ('tensor', 0)."))
        axis, dim, blocks = (*how, 1)[:3]
        if sizes and axis not in sizes:
            raise ValueError(f"{at}={how!r}: the mesh has no axis {axis!r}, it has {', '.join(map(repr, sizes))}")
        for _, first, count in _selector(params, spec, pattern, "split"):
            for i in range(first, first + count):
                shape, leaf = flat[i].shape, f"{at}={how!r}: leaf {paths[i]!r} of shape {list(flat[i].shape)}"
                if not -len(shape) <= dim < len(shape):
                    raise ValueError(f"{leaf} has no dim {dim}")
                if blocks < 1 or shape[dim] % blocks:
                    raise ValueError(f"{leaf}: dim {dim} is not {blocks} blocks of one size")
                new = Split(axis, sizes.get(axis, 1), dim % len(shape), blocks)
                if (old := chosen.setdefault(origins[i], new)) != new:
                    raise ValueError(f"{leaf} is {old}, as another pattern says: expected one way for each leaf")
    return {i: x for i, x in chosen.items() if x.parts > 1}


def claim_policies(params: Tree, spec: tree.Spec, origins: Sequence[int], policy: Policy) -> list[Policy | None]:
    """Return each leaf's first override, or None. Selecting one occurrence of a tied leaf selects all."""
    chosen: dict[int, Policy] = {}  # by number of a leaf's first occurrence
    dtypes, paths = [leaf.dtype for leaf in tree.leaves(params)], tree.leaf_paths(spec)
    for where, override in reversed(_grouped(policy)):  # the first override is set last
        for path, first, count in _selector(params, spec, where, "policy"):
            # integer leaves inside a selected subtree stay as they are; selected alone they are refused
            if path == paths[first] and not dtypes[first].is_floating_point:
                patterns = where if isinstance(where, list) else []
                named = [patterns[number] for number in fitting([path.split(".")], patterns, spec)[0]] or [where]
                raise ValueError(
                    f"policy: leaf {path!r} is {dtypes[first]} and cannot be cast: leave it out of {named[0]!r}"
                )
            chosen |= dict.fromkeys(origins[first : first + count], override)
    return [chosen.get(origin) for origin in origins]


def _grouped(policy: Policy) -> list[tuple[Where, Policy]]:
    """Join the patterns of adjacent, equal overrides."""
    groups = list[tuple[Where, Policy]]()
    for where, override in policy.overrides:
        patterns = groups[-1][0] if groups and groups[-1][1] == override else None
        if isinstance(where, str) and isinstance(patterns, list):
            patterns.append(where)
        else:
            groups.append(([where] if isinstance(where, str) else where, override))
    return groups


def claim_units(
    params: Tree, spec: tree.Spec, flat: Sequence[Tensor], origins: Sequence[int], units: Units
) -> tuple[dict[str, tuple[str, ...]], list[int]]:
    """Return {name of a unit: names of its subtrees if several, else ()}, and the number of every leaf's unit.

    Units come in the order of use, the root first. A leaf belongs to the innermost selected subtree, else to `(first)`,
    `(last)` or the root. If `units` is a number of elements, tied leaves count once.
    """
    owner, parts = [ROOT] * spec.num_leaves, dict[str, tuple[str, ...]]()
    if isinstance(units, int):
        owner = _fill_units(flat, origins, units)
    else:
        where, tuples = _without_tuples(units)
        selected = repeated_siblings(spec, flat) if where is None else _selector(params, spec, where, "units")
        for path, first, count in selected:
            owner[first : first + count] = [path or ROOT] * count  # inner subtrees come later, and win
        owner = _with_ends(owner, origins)
        parts = _together(list(dict.fromkeys(owner)), tuples, spec)
    name_of = {part: name for name, names in parts.items() for part in names}
    owner = [name_of.get(name, name) for name in owner]
    names = list(dict.fromkeys([ROOT, *owner] if ROOT in owner else owner))
    numbers = {name: number for number, name in enumerate(names)}
    return {name: parts.get(name, ()) for name in names}, [numbers[name] for name in owner]


def repeated_siblings(
    node: tree.Spec, flat: Sequence[Tensor | Leaf], above: tuple[str, ...] = (), first: int = 0
) -> Iterator[tuple[str, int, int]]:
    """Yield (path, first leaf, number of leaves) of repeated siblings, outermost first."""
    names, children = [str(name) for name in tree.names(node)], [*tree.children(node)]
    is_list = all(map(str.isdecimal, names))
    forms = [
        _likeness(child, flat[first + at : first + at + child.num_leaves]) if is_list or not child.is_leaf() else None
        for child, at in children
    ]
    count = Counter(forms)
    for name, (child, at), form in zip(names, children, forms, strict=True):
        path = (*above, name)
        if form is not None and count[form] > 1:
            yield ".".join(path), first + at, child.num_leaves
        elif not child.is_leaf():
            yield from repeated_siblings(child, flat, path, first + at)


def _likeness(node: tree.Spec, leaves: Sequence[Tensor | Leaf]) -> Hashable:
    """Return what repeated siblings have in common; None if no leaf has two dims."""
    forms = [(leaf.shape, leaf.dtype) for leaf in leaves]
    return (*tree.leaf_paths(node), *forms) if any(len(shape) > 1 for shape, _ in forms) else None


def _without_tuples(units: Any) -> tuple[Where, list[tuple[str, ...]]]:
    if not isinstance(units, list | tuple):
        return units, []
    tuples = [patterns for patterns in units if isinstance(patterns, tuple)]
    return [p for patterns in units for p in (patterns if isinstance(patterns, tuple) else [patterns])], tuples


def _together(names: Sequence[str], tuples: Sequence[tuple[str, ...]], spec: tree.Spec) -> dict[str, tuple[str, ...]]:
    """Return {name of a joined unit: names joined}. ValueError if a name fits two tuples of patterns."""
    parts, paths = list[tuple[str, ...]](), [name.split(".") for name in names]
    for patterns in tuples:
        fits = fitting(paths, patterns, spec)
        parts.append(tuple(name for name, numbers in zip(names, fits, strict=True) if numbers))
    for name in chain.from_iterable(parts):
        if sum(name in names for names in parts) > 1:
            raise ValueError(f"units: {name!r} fits two tuples of patterns: expected it in one unit. Name it in one")
    return {" and ".join(names): names for names in parts if len(names) > 1}


def _with_ends(owner: Sequence[str], origins: Sequence[int]) -> list[str]:
    """Move leaves before the first and after the last claimed leaf out of the root, which stays in memory all along.

    A tied leaf with occurrences at both ends, or between claimed leaves, stays in the root, gathered once.
    """
    claimed = [i for i, name in enumerate(owner) if name != ROOT]
    last_place = {origin: i for i, origin in enumerate(origins)}

    def part(i: int) -> str:
        if owner[i] != ROOT or not claimed:
            return owner[i]
        before, after = last_place[origins[i]] < claimed[0], origins[i] > claimed[-1]
        return FIRST if before else LAST if after else ROOT

    return [part(i) for i in range(len(owner))]


def _fill_units(flat: Sequence[Tensor], origins: Sequence[int], size: int) -> list[str]:
    check_whole("units", size, what="path patterns, a predicate, or the number of elements at which a unit is full")
    owner, number, filled = [], 0, 0
    for i, leaf in enumerate(flat):
        if filled >= size:
            number, filled = number + 1, 0
        filled += leaf.numel() if origins[i] == i else 0  # a tied leaf is stored with its first occurrence
        owner.append(f"part.{number}")
    return owner


def select_units(units: Sequence[Sequence[str]], patterns: Sequence[str], spec: tree.Spec, what: str) -> list[int]:
    """Return the units selected by `patterns`. ValueError for a pattern that matches no unit."""
    owners, names = zip(*((unit, name) for unit, names in enumerate(units) for name in names), strict=True)
    fits = fitting([name.split(".") for name in names], patterns, spec)
    matched = set(chain.from_iterable(fits))
    for number, pattern in enumerate(patterns):
        if number not in matched:
            raise ValueError(f"{what}: {no_unit(pattern, names)}")
    return list(dict.fromkeys(unit for unit, numbers in zip(owners, fits, strict=True) if numbers))


def no_unit(pattern: str, names: Sequence[str]) -> str:
    shown = [*map(repr, names[:4]), *["..."] * (len(names) > 5), *map(repr, names[4:][-1:])]
    return f"the pattern {pattern!r} matches no unit; the units are {', '.join(shown) or 'none'}"
