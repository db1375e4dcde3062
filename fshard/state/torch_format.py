"""torch.optim's format of an optimizer's state: its names, its parameter groups, and a whole state read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import expect, is_number, wrong
from ..core.scalars import double
from ..core.tree import Tree, joined
from ..layout.layout import Layout
from ..layout.pieces import Parts, layout_of
from ..update.transforms import LabelState
from .dtensors import is_sharded, sharding

BEGUN = "begun"  # in a TorchState: 1 after the first update; before, torch's class expects no state
# torch.optim's names for fields of fshard's states
_TORCH = {"count": "step", "mu": "exp_avg", "nu": "exp_avg_sq", "momentum": "momentum_buffer"}


class TorchState(NamedTuple):
    """The state of a torch.optim class, by torch's names: trees like the parameters, and 0-d tensors for all leaves."""

    tensors: dict[str, Tree]
    scalars: dict[str, Tensor]


class Field(NamedTuple):
    """A tensor of a state: its key in the whole state, its path without leaf and label, and its leaves."""

    key: str
    path: str
    leaves: list[str]
    lone: bool  # one tensor for all leaves, like `count`

    @property
    def place(self) -> str:
        """The key in a state without labels."""
        return self.path if self.lone else joined(self.path, *self.leaves)

    def counts(self, other: Field) -> bool:
        """True if `other` belongs to one of this count's leaves, below the same path."""
        *parents, _ = self.path.split(".")
        if parents[-1:] == ["scalars"]:  # a TorchState has counts in `scalars`, trees in `tensors`
            parents.pop()
        return not other.lone and other.path.split(".")[: len(parents)] == parents and other.leaves[0] in self.leaves

    @property
    def hyperparam(self) -> str | None:
        """The name of a hyper-parameter of `with_hyperparams`, else None."""
        *parents, name = self.path.split(".")
        return name if parents[-1:] == ["hyperparams"] else None


def _leaf_names(x: Tree, leaves: list[str], spec: tree.Spec | None) -> list[str] | None:
    """The paths of the leaves of `Parts`, a dict by leaf path, or a tree like the parameters; else None."""
    if isinstance(x, Parts):
        return _paths(x.layout)
    if isinstance(x, dict) and x and x.keys() <= set(leaves):
        return [*x]
    return tree.leaf_paths(spec) if spec is not None and tree.flatten(x)[1] == spec else None


def _fields(state: Tree, leaves: list[str], spec: tree.Spec | None, key: str = "", path: str = "") -> Iterator[Field]:
    nodes = tree.paths_to(state, lambda x: isinstance(x, LabelState) or _leaf_names(x, leaves, spec) is not None)
    for name, node in nodes:
        node_key, node_path = joined(key, name), joined(path, name)
        if isinstance(node, LabelState):
            for label, layout in node.layouts:
                label_key = joined(node_key, "inner", str(label))
                yield from _fields(node.inner[label], _paths(layout), None, label_key, node_path)
            continue
        names = _leaf_names(node, leaves, spec)
        if names is None:
            yield Field(node_key, node_path, leaves, lone=True)
        else:
            yield from (Field(joined(node_key, leaf), node_path, [leaf], lone=False) for leaf in names)


def _torch_names(fields: Sequence[Field], trained: Set[str]) -> dict[tuple[str, str], Field]:
    """Fields by (leaf, torch's name). If two fields have one name, the inner one gets it, the outer its path."""
    named: dict[tuple[str, str], Field] = {}
    with_own = {leaf for field in fields if not field.lone for leaf in field.leaves}
    for field in (field for field in fields if field.hyperparam is None):
        *parents, last = field.path.split(".")
        # a TorchState has torch's names already
        torchs = last if parents[-1:] in (["tensors"], ["scalars"]) else _TORCH.get(last, last)
        # a count belongs to the leaves with moments; without moments, to all trained leaves
        counted = [leaf for leaf in field.leaves if leaf in with_own] or [x for x in field.leaves if x in trained]
        for leaf in counted if field.lone else field.leaves:
            name = leaf, torchs
            if name in named:
                named[leaf, named[name].path] = named[name]
            named[name] = field
    return named


def _label_sets(state: Tree) -> Iterator[set[str]]:
    for node in tree.nodes(state, LabelState):
        for label, layout in node.layouts:
            yield set(_paths(layout))
            yield from _label_sets(node.inner[label])


def _without_tensors(state: Tree, leaves: Sequence[str]) -> set[str]:
    nodes = tree.tops(state, lambda x: isinstance(x, TorchState | LabelState))
    in_groups = {leaf for node in nodes if isinstance(node, TorchState) and node == ({}, {}) for leaf in leaves}
    labelled = [(node.inner[label], x) for node in nodes if isinstance(node, LabelState) for label, x in node.layouts]
    return in_groups.union(*(_without_tensors(inner, _paths(layout)) for inner, layout in labelled))


def _label_groups(state: Tree, fields: Sequence[Field], leaves: Sequence[str]) -> list[list[str]]:
    """Torch's parameter groups: the leaves with state, by their labels."""
    with_state, label_sets = {leaf for field in fields for leaf in field.leaves}, list(_label_sets(state))
    with_state |= _without_tensors(state, leaves)
    # False sorts first, so groups have the order of the labels
    labels = {leaf: tuple(leaf not in of_label for of_label in label_sets) for leaf in leaves if leaf in with_state}
    return [[leaf for leaf in labels if labels[leaf] == group] for group in sorted(set(labels.values()))]


def _paths(layout: Layout) -> list[str]:
    return [layout.leaves[n].path for n in layout.numbers]


class Known(NamedTuple):
    """A state's fields and groups, for torch's format."""

    fields: list[Field]
    named: dict[tuple[str, str], Field]  # by leaf and torch's name
    groups: list[list[str]]
    trained: list[list[str]]  # `groups` without frozen leaves
    leaves: list[str]  # paths of all parameters


def known(state: Tree, params: Tree) -> Known:
    leaves, spec = _paths(layout_of(params)), None if isinstance(params, Parts) else tree.flatten(params)[1]
    fields = list(_fields(state, leaves, spec))
    if strange := [leaf for field in fields for leaf in field.leaves if leaf not in leaves]:
        raise ValueError(f"the state has a leaf {strange[0]!r} which params have not: the order is (state, params)")
    groups, with_own = _label_groups(state, fields, leaves), {x for f in fields if not f.lone for x in f.leaves}
    trained = with_own or _trainable(params)
    by_group = [[leaf for leaf in group if leaf in trained] for group in groups]
    return Known(fields, _torch_names(fields, trained), groups, by_group, leaves)


def _trainable(params: Tree) -> set[str]:
    layout = layout_of(params.trainable if isinstance(params, Parts) else params)
    leaves = [layout.leaves[n] for n in layout.numbers]
    return {leaf.path for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex}


def read_saved(
    saved: Mapping[str, Tree], like: Tree, params: Tree, order: Sequence[str] | None, src: int | None, strict: bool
) -> tuple[dict[str, Tensor], set[str]]:
    """Return a whole state from torch's format, its tensors unchanged, and the keys that stay as in `like`."""
    _check_saved(saved)
    state = known(like, params)
    path_of = _path_of(saved, state, order)
    entries = _by_path(saved, path_of, state.leaves)
    whole = {path: node for path, node in tree.paths_to(like, Parts) if not isinstance(node, Parts)}
    untouched = set[str]()
    # numbers that leaves share: `lone` from `saved`, else `kept` from `like`
    lone, kept = dict[str, dict[str, Tensor]](), dict[str, dict[str, Tensor]]()
    for (leaf, name), field in state.named.items():
        entry = entries.get(leaf, {})
        if name == BEGUN and (entry or strict):  # torch makes an entry in the first step
            entry = {name: float(bool(entry)), **entry}
        if name in entry:
            value = _value(f"leaf {leaf!r}: {name}", entry[name])
            if src is not None and is_sharded(value):
                form = f"leaf {leaf!r}: {sharding(value)}"
                raise ValueError(f"load_state_dict: {form}, which rank {src} alone cannot make whole: leave src out")
            if field.lone:
                lone.setdefault(field.key, {})[leaf] = value
            else:
                whole[field.key] = value
        elif field.lone:
            kept.setdefault(field.key, {})[leaf] = whole[field.key]
        elif not entry and (not strict or (leaf, BEGUN) in state.named):
            untouched.add(field.key)
        else:
            names = ", ".join(map(repr, entry)) or "nothing"
            raise ValueError(
                f"load_state_dict: leaf {leaf!r}: expected {name!r} in its state, there is {names}. With strict=False "
                "leaves without any state keep the one they have"
            )
    if strict:
        _check_used(entries, state.named.keys())
    named = {field.key: name for (_, name), field in state.named.items()}
    hyperparams = {path_of(key): group for group in saved.get("param_groups", ()) for key in group["params"]}
    for field in (field for field in state.fields if field.hyperparam):
        named[field.key] = field.hyperparam or ""
        groups = {leaf: hyperparams.get(leaf, {}) for leaf in field.leaves}
        said = {leaf: group[field.hyperparam] for leaf, group in groups.items() if field.hyperparam in group}
        lone[field.key] = {
            leaf: _value(f"the group of leaf {leaf!r}: {field.hyperparam}", x) for leaf, x in said.items()
        }
    whole.update({key: _agreed(key, named[key], values, kept.get(key, {})) for key, values in lone.items() if values})
    return whole, untouched


def _check_saved(saved: Mapping[str, Tree]) -> None:
    order = "The order is load_state_dict(saved, like, params)"
    expect("load_state_dict: saved", saved, isinstance(saved, Mapping), "a dict in the format of torch.optim", order)
    if not isinstance(saved.get("state"), Mapping):
        names = ", ".join(map(repr, saved)) or "nothing"
        raise ValueError(f"load_state_dict: saved: expected a dict with 'state', there is {names}. {order}")


def check_tensor(name: str, x: object, expected: str) -> None:
    expect(name, x, isinstance(x, Tensor) or is_sharded(x), expected, "torch.from_numpy makes a tensor of an array")


def _value(name: str, x: object) -> Tensor:
    x = double(x) if is_number(x) else x
    check_tensor(f"load_state_dict: {name}", x, "a tensor or a number")
    return cast("Tensor", x)


def _agreed(key: str, name: str, values: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Tensor:
    (leaf, value), *others = {**values, **kept}.items()
    for other, its in others:
        # no single rank knows a DTensor's value
        if not is_sharded(value) and not is_sharded(its) and not torch.equal(value.cpu().double(), its.cpu().double()):
            none = f"none for leaf {other!r}, which would keep the {its.tolist()} of `like`"
            there = none if other in kept else f"{its.tolist()} for leaf {other!r}"
            raise ValueError(
                f"load_state_dict: {name!r}: expected one value for all leaves of {key!r}, because the state has one "
                f"for all of them; saved has {value.tolist()} for leaf {leaf!r} and {there}. "
                "optim.by_label keeps one for each label: give leaves that differ different labels"
            )
    return value


def _check_used(entries: Mapping[str, Mapping[str, Tree]], named: Set[tuple[str, str]]) -> None:
    for leaf, entry in entries.items():
        if unused := [name for name, x in entry.items() if x is not None and (leaf, name) not in named]:
            wanted = ", ".join(repr(name) for of, name in named if of == leaf)
            why = "like the optimizer of `like`" if wanted else "because it is frozen, or not given to the optimizer"
            raise ValueError(
                f"load_state_dict: leaf {leaf!r}: expected {wanted or 'no state'}, {why}, there is "
                f"{', '.join(map(repr, unused))}. Make `like` by an optimizer that keeps it (from_torch runs torch's), "
                "or leave it out with strict=False"
            )


def _path_of(saved: Mapping[str, Tree], state: Known, order: Sequence[str] | None) -> Callable[[str | int], str]:
    """Map torch's key of a leaf (its path or number) to the path."""
    groups = [list(group["params"]) for group in saved["param_groups"]] if "param_groups" in saved else None
    keys = [*saved["state"], *chain.from_iterable(groups or ())]
    is_numbered = any(isinstance(key, int) for key in keys)
    if order is not None:
        _check_order(order, state.leaves, groups if is_numbered else None)
    elif is_numbered:
        order = _in_groups(groups, state)
    paths = order or ()
    # torch matches parameters by their position in the groups, not by number
    numbers = range(len(paths)) if groups is None else chain.from_iterable(groups)
    path_at = dict(zip(numbers, paths, strict=False)) if is_numbered else {}

    def path_of(key: str | int) -> str:
        if isinstance(key, int) and key not in path_at:
            raise ValueError(f"load_state_dict: the state has a parameter number {key}, the tree {len(paths)} leaves")
        return path_at[key] if isinstance(key, int) else key

    return path_of


def _in_groups(groups: Sequence[Sequence[object]] | None, state: Known) -> list[str]:
    sizes = None if groups is None else [len(group) for group in groups]
    for candidate in (state.groups, state.trained):
        if sizes == [len(group) for group in candidate] or (sizes is None and len(candidate) == 1):
            return [*chain.from_iterable(candidate)]
    expected, trained = ([len(group) for group in x] for x in (state.groups, state.trained))
    raise ValueError(
        f"load_state_dict: saved['param_groups']: expected groups of {expected} parameters"
        + f", or of {trained} without frozen leaves" * (trained != expected)
        + f", as `like` has them, got {sizes}. Numbers alone do not tell which leaf is which: pass `order`, the paths "
        "of the leaves in the order torch's groups have them, or a state with leaves by path"
    )


def _check_order(order: Sequence[str], leaves: Sequence[str], groups: Sequence[Sequence[object]] | None) -> None:
    if isinstance(order, str) or not isinstance(order, Sequence):
        raise TypeError(f"load_state_dict: {wrong('order', order, 'a list of the paths of leaves')}")
    if unknown := [path for path in order if path not in leaves]:
        raise ValueError(f"load_state_dict: order has {unknown[0]!r}, which is no leaf of the tree: {list(leaves)[:6]}")
    if len(set(order)) < len(order):
        twice = next(path for n, path in enumerate(order) if path in order[:n])
        raise ValueError(f"load_state_dict: order has the leaf {twice!r} twice: expected each leaf once")
    number = len(order) if groups is None else sum(map(len, groups))
    if number != len(order):
        raise ValueError(
            f"load_state_dict: order: expected {number} paths, one for each parameter of saved['param_groups'], got "
            f"{len(order)}"
        )


def _by_path(
    saved: Mapping[str, Tree], path_of: Callable[[str | int], str], leaves: Sequence[str]
) -> dict[str, Mapping[str, Tree]]:
    entries = {path_of(key): entry for key, entry in saved["state"].items()}
    if unknown := [path for path in entries if path not in leaves]:
        raise ValueError(f"load_state_dict: the state has {unknown[0]!r}, which is no leaf of the tree: {leaves[:6]}")
    return entries
