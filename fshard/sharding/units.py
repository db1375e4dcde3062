"""Which leaves patterns, a predicate or a size select: for units, for `frozen` and `whole`, and for policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..core import tree
from ..core.arguments import check_whole, wrong
from ..core.tree import Tree
from .precision import Policy

Where = str | Sequence[str] | Callable[[str, Tree], bool] | None
ROOT = "(root)"


def _selector(params: Tree, spec: tree.Spec, where: Where, name: str) -> list[tuple[str, int, int]]:
    """The subtrees that patterns or a predicate select, outer before inner: path, first leaf, number of leaves."""
    nodes = [(path, node, first) for path, node, first in tree.walk(spec) if node.num_leaves]
    _check_where(name, where)
    if callable(where):
        flat = tree.leaves(params)
        picked = [
            (path, node, first)
            for path, node, first in nodes
            if where(".".join(path), tree.unflatten(node, flat[first : first + node.num_leaves]))
        ]
    else:
        patterns = [where] if isinstance(where, str) else list(where or ())
        for pattern in patterns:
            if not any(
                tree.matches(path, pattern) for path, _, _ in tree.walk(spec)
            ):  # subtrees without leaves match, too
                top = ", ".join(repr(str(child)) for child in tree.names(spec)) if not spec.is_leaf() else "a leaf"
                raise ValueError(f"{name}: the pattern {pattern!r} matches nothing; the tree's top level is {top}")
        picked = [
            (path, node, first)
            for path, node, first in nodes
            if any(tree.matches(path, pattern) for pattern in patterns)
        ]
    return [(".".join(path), first, node.num_leaves) for path, node, first in picked]


def _check_where(name: str, where: object) -> None:
    sequence = isinstance(where, list | tuple | set | frozenset) and all(isinstance(p, str) for p in where)
    predicate = callable(where) and not isinstance(where, type)
    if not (where is None or isinstance(where, str) or sequence or predicate):
        expected = "path patterns such as 'blocks.*' (one, or a list), or a predicate (path, subtree) -> bool"
        expected += ", or a whole number of elements" * (name == "units")
        raise TypeError(wrong(name, where, expected))


def claim_leaves(params: Tree, spec: tree.Spec, where: Where, name: str) -> list[bool]:
    """Return for every leaf whether `where` selects it."""
    is_selected = [False] * spec.num_leaves
    for _, first, count in _selector(params, spec, where, name):
        is_selected[first : first + count] = [True] * count
    return is_selected


def claim_policies(params: Tree, spec: tree.Spec, policy: Policy) -> list[Policy | None]:
    """Return for every leaf the policy of the first override that selects it; None if none does."""
    chosen: list[Policy | None] = [None] * spec.num_leaves
    dtypes, paths = [leaf.dtype for leaf in tree.leaves(params)], tree.paths(spec)
    for where, override in reversed(policy.overrides):  # so that the first that selects a leaf is set last
        for path, first, count in _selector(params, spec, where, "policy"):
            # a leaf that is named by itself; in a subtree, leaves that cannot be cast are left as they are
            if path == paths[first] and not dtypes[first].is_floating_point:
                raise ValueError(
                    f"policy: leaf {path!r} is {dtypes[first]} and cannot be cast: leave it out of {where!r}"
                )
            chosen[first : first + count] = [override] * count
    return chosen


def claim_units(
    params: Tree, spec: tree.Spec, flat: Sequence[Tensor], origins: Sequence[int], units: Where | int
) -> tuple[list[str], list[int]]:
    """Return the names of the units in the order of use, the root first, and the number of every leaf's unit.

    A leaf belongs to the innermost subtree that `units` selects, else to the root; tied leaves count once in a size.
    """
    owner = [ROOT] * spec.num_leaves
    if isinstance(units, int):
        owner = _fill_units(flat, origins, units)
    else:
        for path, first, count in _selector(params, spec, units, "units"):
            owner[first : first + count] = [path or ROOT] * count  # inner subtrees come later, and win
    names = list(dict.fromkeys([ROOT, *owner] if ROOT in owner else owner))
    return names, [names.index(name) for name in owner]


def _fill_units(flat: Sequence[Tensor], origins: Sequence[int], size: int) -> list[str]:
    """For every leaf the name of its unit: leaves in order, a new unit whenever one has `size` elements or more."""
    check_whole("units", size, what="path patterns, a predicate, or the number of elements at which a unit is full")
    owner, number, filled = [], 0, 0
    for i, leaf in enumerate(flat):
        if filled >= size:
            number, filled = number + 1, 0
        filled += leaf.numel() if origins[i] == i else 0  # a tied leaf is stored with its first occurrence
        owner.append(f"part.{number}")
    return owner
