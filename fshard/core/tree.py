"""Trees of tensors in the order of use: the only module that imports optree.

Note [Order of use]
    A plan needs parameters in the order of use, and takes insertion order for it. optree sorts a dict's keys as strings
    ('10' before '2'), except in torch's namespace. This namespace also has every node type of `torch.utils._pytree`.
"""

from __future__ import annotations

import builtins
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from inspect import get_annotations
from itertools import starmap
from types import MemberDescriptorType
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import optree

# Private: importing it turns insertion order on in the namespace "torch" (test_tree.py).
import torch.utils._cxx_pytree  # noqa: F401
import torch.utils._pytree as pytree
from torch import Tensor

from .differences import lacking

_NAMESPACE = "torch"
# any tree; an annotation `Any` means no tree
Tree: TypeAlias = Any
Spec = optree.PyTreeSpec
Metadata: TypeAlias = Hashable | None  # compared as part of the structure
T = TypeVar("T")
# files of the frames from `map_tops` to the function it is given
MAP_CODE = (__file__, os.path.dirname(optree.__file__))


def _mirror(kind: type) -> None:
    """Register with optree a type known to `torch.utils._pytree` alone."""
    node = pytree.SUPPORTED_NODES[kind]

    def flatten(value: Tree) -> tuple[list[Tree], Metadata, tuple[Hashable, ...]]:
        children, context = node.flatten_fn(value)
        if node.flatten_with_keys_fn is None:
            return children, context, tuple(range(len(children)))
        keys = [key for key, _ in node.flatten_with_keys_fn(value)[0]]
        # torch wraps names: GetAttrKey(name), MappingKey(key), SequenceKey(idx)
        return children, context, tuple(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k))) for k in keys)

    def unflatten(context: Metadata, children: Iterable[Tree]) -> Tree:
        return node.unflatten_fn(list(children), context)

    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)


def flatten(tree: Tree) -> tuple[list[Tree], Spec]:
    """Return the leaves of `tree` in the order of use, and the structure; None is an empty subtree.

    >>> leaves, spec = tree.flatten({"b": [1, 2], "a": None})
    >>> leaves, spec.num_leaves
    ([1, 2], 2)
    """
    return _flatten_until(tree, None)


def _flatten_until(tree: Tree, is_leaf: Callable[[Tree], bool] | None) -> tuple[list[Tree], Spec]:
    leaves, spec = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=_NAMESPACE)
    # nodes known only to torch.utils._pytree are leaves for optree: register their types, and flatten again
    maybe = [x for x in leaves if not isinstance(x, Tensor) and type(x) in pytree.SUPPORTED_NODES]
    unknown: set[type] = {type(x) for x in maybe if is_leaf is None or not is_leaf(x)}
    if not unknown:
        return leaves, spec
    for kind in unknown:
        _mirror(kind)
    return _flatten_until(tree, is_leaf)


def unflatten(spec: Spec, leaves: Sequence[Tree]) -> Tree:
    """Return the tree of structure `spec` with these leaves.

    >>> tree.unflatten(tree.flatten({"b": 1, "a": [2, 3]})[1], [4, 5, 6])
    {'b': 4, 'a': [5, 6]}
    """
    return spec.unflatten(leaves)


def leaves(tree: Tree) -> list[Tree]:
    """Return the leaves of `tree` in the order of use.

    >>> tree.leaves({"b": 1, "a": [2, 3]})
    [1, 2, 3]
    """
    return flatten(tree)[0]


def tensors(leaves: Sequence[object]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def in_order_of(spec: Spec, tree: Tree) -> Tree:
    """Return `tree`, the keys of its dicts in the order of `spec`.

    >>> in_order_of(flatten({"a": 1, "b": 2})[1], {"b": 3, "a": 4})
    {'a': 4, 'b': 3}
    """
    if flatten(tree)[1] == spec:
        return tree
    children, form = one_level(tree)
    inner = dict(zip(spec.entries(), spec.children(), strict=True))
    if type(tree) is dict and inner.keys() == tree.keys():
        return {key: in_order_of(child, tree[key]) for key, child in inner.items()}
    if (form.type, form.num_children) != (spec.type, len(inner)):
        return tree
    return unflatten(form, [in_order_of(*pair) for pair in zip(inner.values(), children, strict=True)])


def flatten_up_to(spec: Spec, tree: Tree) -> list[Tree]:
    """Return the subtrees at the leaves of a structure. ValueError if `tree` does not fit."""
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        whole = unflatten(spec, range(spec.num_leaves))
        if not nodes([whole, tree], StandIn):
            raise ValueError(unlike(whole, tree) or str(error)) from None
    return structure_above(plain(whole), int).flatten_up_to(plain(tree))


def map(fn: Callable[..., Tree], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to the leaves of `tree`, and to the subtrees of `rest` at the same places.

    >>> tree.map(lambda x, y: x + y, {"a": 1, "b": [2]}, {"a": 10, "b": [20]})
    {'a': 11, 'b': [22]}
    """
    first, spec = flatten(tree)
    others = [flatten_up_to(spec, other) for other in rest]
    return unflatten(spec, [fn(*args) for args in zip(first, *others, strict=True)])


def consists_of(tree: Tree, spec: Spec, leaves: Sequence[Tree]) -> bool:
    """True if a tree has this structure, in the order of use, and these very leaves."""
    if (type(tree), spec.type) == (dict, dict) and spec.num_nodes == len(leaves) + 1:  # a dict of leaves
        return [*tree] == spec.entries() and all(builtins.map(operator.is_, tree.values(), leaves))
    now, form = optree.tree_flatten(tree, namespace=_NAMESPACE)
    return len(now) == len(leaves) and all(builtins.map(operator.is_, now, leaves)) and form == spec


# type or predicate of nodes to treat as leaves
Stop = type | Callable[[Tree], bool]


def _is(stop: Stop) -> Callable[[Tree], bool]:
    return (lambda x: isinstance(x, stop)) if isinstance(stop, type) else stop


def tops(tree: Tree, stop: Stop) -> list[Tree]:
    """Return the leaves, with every `stop` node as a leaf."""
    return _flatten_until(tree, _is(stop))[0]


def nodes(tree: Tree, kind: type) -> list[Tree]:
    return [x for x in tops(tree, kind) if isinstance(x, kind)]


def joined(*parts: str) -> str:
    """Join dotted paths; leave out empty ones.

    >>> joined("params", "blocks.0"), joined("params", ""), joined("", "w")
    ('params.blocks.0', 'params', 'w')
    """
    return ".".join(filter(None, parts))


def paths_to(tree: Tree, stop: Stop) -> list[tuple[str, Tree]]:
    """Return (path, leaf) pairs; every `stop` node is a leaf."""
    leaves, spec = _flatten_until(tree, _is(stop))
    return list(zip(leaf_paths(spec), leaves, strict=True))


def put_tops(tree: Tree, stop: Stop, tops: Sequence[Tree]) -> Tree:
    return unflatten(structure_above(tree, stop), tops)


def structure_above(tree: Tree, stop: Stop) -> Spec:
    return _flatten_until(tree, _is(stop))[1]


def map_tops(fn: Callable[..., Tree], stop: Stop, tree: Tree, *rest: Tree) -> Tree:
    """Map `tops(tree, stop)`, and the subtrees of `rest` at the same places."""
    leaves, spec = _flatten_until(tree, _is(stop))
    return spec.unflatten(builtins.map(fn, leaves, *builtins.map(spec.flatten_up_to, rest)))


def detached(tree: T, stop: Stop = lambda x: False) -> T:
    """Detach leaves of `tree` requiring a gradient; `stop` nodes stay as they are.

    >>> tree.detached({"w": torch.ones(1, requires_grad=True)})
    {'w': tensor([1.])}
    """
    return map_tops(lambda x: x.detach() if isinstance(x, Tensor) and x.requires_grad else x, stop, tree)


def register(cls: type, flatten: Callable[[Tree], tuple[Any, ...]], unflatten: Callable[..., Tree]) -> None:
    """Make `cls` a node for optree (every namespace) and for `torch.utils._pytree` (used by torch.func).

    `flatten(x) -> (children, metadata)` or `(children, metadata, names)`; `unflatten(metadata, children) -> x`.

    >>> class Pair:
    ...     def __init__(self, a, b):
    ...         self.a, self.b = a, b
    >>> tree.register(Pair, lambda pair: ([pair.a, pair.b], None), lambda _, children: Pair(*children))
    >>> tree.leaves({"x": Pair(1, 2)})
    [1, 2]
    """
    optree.register_pytree_node(cls, flatten, unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)
    pytree.register_pytree_node(
        cls, lambda x: (list((flat := flatten(x))[0]), flat[1]), lambda xs, metadata: unflatten(metadata, xs)
    )
    optree.unregister_pytree_node(cls, namespace=_NAMESPACE)  # torch has registered `cls` without children's names


class StandIn:
    """A node in place of a container, with children made when read."""

    __slots__ = ()

    @abstractmethod
    def _filled_(self) -> Tree: ...


def plain(tree: Tree) -> Tree:
    """Replace stand-ins by their containers, at every depth."""
    return map_tops(lambda x: plain(x._filled_()) if isinstance(x, StandIn) else x, StandIn, tree)


def one_level(tree: Tree, namespace: str = _NAMESPACE) -> tuple[list[Tree], Spec]:
    return optree.tree_flatten(tree, is_leaf=lambda x: x is not tree, namespace=namespace)


def opened(node: Tree) -> tuple[list[tuple[Hashable, Tree]] | None, Metadata]:
    """Return a node's (name, child) pairs and metadata; (None, None) for a leaf.

    >>> opened({"b": 1, "a": [2]})[0], opened(1)[0]
    ([('b', 1), ('a', [2])], None)
    """
    if optree.tree_is_leaf(node, namespace=_NAMESPACE):
        return None, None
    children, metadata, entries, _ = optree.tree_flatten_one_level(node, namespace=_NAMESPACE)
    return [*zip(entries, children, strict=True)], metadata


def register_stand_in(cls: type, of: Callable[[Tree], Tree]) -> None:
    """Register a class of stand-ins; `of(container)` wraps an existing container.

    Mapping over a stand-in returns another of its class. In optree's own namespace children are sorted.
    """

    def flatten_in(namespace: str) -> Callable[[Tree], tuple[list[Tree], Metadata, tuple[Hashable, ...] | None]]:
        def flatten(x: Tree) -> tuple[list[Tree], Metadata, tuple[Hashable, ...] | None]:
            leaves, spec = one_level(x._filled_(), namespace)
            return leaves, spec, None if spec.is_leaf() else tuple(names(spec))

        return flatten

    def unflatten_in(spec: Any, children: Iterable[Tree]) -> Tree:
        return of(optree.tree_unflatten(spec, children))

    def flatten_with_keys(x: Tree) -> tuple[list[tuple[pytree.KeyEntry, Tree]], Metadata]:
        children, spec, names = ordered(x)
        keys: Callable[..., pytree.KeyEntry] = pytree.MappingKey if isinstance(x, dict) else _key
        return [*zip(map(keys, names or ()), children, strict=True)], spec

    ordered = flatten_in(_NAMESPACE)
    pytree.register_pytree_node(
        cls,
        lambda x: ordered(x)[:2],
        lambda children, spec: unflatten_in(spec, children),
        flatten_with_keys_fn=flatten_with_keys,
    )
    optree.unregister_pytree_node(cls, namespace=_NAMESPACE)  # as in `register`
    optree.register_pytree_node(cls, ordered, unflatten_in, namespace=_NAMESPACE)
    everywhere = optree.registry.__GLOBAL_NAMESPACE
    optree.register_pytree_node(cls, flatten_in(""), unflatten_in, namespace=everywhere)


def _key(name: int | str) -> pytree.KeyEntry:
    return pytree.SequenceKey(name) if isinstance(name, int) else pytree.GetAttrKey(name)


def register_fields(
    cls: type, children: Sequence[str], metadata: Sequence[str] = (), names: Sequence[str] | None = None
) -> None:
    """Register a dataclass `cls` as a node: `children` are subtrees, `metadata` is part of the structure.

    `names`: the children's names in paths; an empty name is left out. ValueError for a field in neither `children` nor
    `metadata`, and for a name without a field. If `cls` is no dataclass, slots and annotated attributes are fields,
    except ClassVars.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Layer:
    ...     w: torch.Tensor
    ...     width: int
    >>> tree.register_fields(Layer, ["w"], ["width"])
    >>> tree.paths([Layer(torch.ones(2), 2)])
    ['0.w']
    """
    children, metadata = tuple(children), tuple(metadata)
    _check_fields(cls, children, metadata)
    checked = [x.name for x in dataclass_fields(cls) if _STATIC in x.metadata] if is_dataclass(cls) else []

    def flatten(x: Tree) -> tuple[tuple[Tree, ...], tuple[Metadata, ...]]:
        for name in checked:
            _check_static(cls, name, getattr(x, name))
        return tuple(getattr(x, name) for name in children), tuple(getattr(x, name) for name in metadata)

    def unflatten(static: Sequence[Metadata], dynamic: Sequence[Tree]) -> Tree:
        # mapped leaves may be anything: __post_init__ must not see them
        x: object = object.__new__(cls)
        for name, value in zip((*children, *metadata), (*dynamic, *static), strict=True):
            # a frozen dataclass refuses setattr; dynamo of torch 2.11 cannot trace `vars(x).update`
            object.__setattr__(x, name, value)
        return x

    register(cls, flatten, unflatten)
    # for `names` and `child_fields`: `flatten` returns no names
    cls.__children__ = cls, children, tuple(children if names is None else names)  # type: ignore[attr-defined]


def _check_fields(cls: type, children: Sequence[str], metadata: Sequence[str]) -> None:
    known, named = _field_names(cls), [*children, *metadata]
    here = f"register_fields({cls.__name__})"
    if twice := [name for name in dict.fromkeys(named) if named.count(name) > 1]:
        raise ValueError(f"{here}: expected each name once, as a child or as metadata, got {twice[0]!r} twice")
    if absent := [name for name in known if name not in named]:
        raise ValueError(
            f"{here}: the field {absent[0]!r} is neither a child nor metadata, so `tree.map` would lose its value. If "
            f"it holds tensors, name it with the children {list(children)}; else: metadata={[*metadata, *absent]}."
        )
    if is_dataclass(cls) and (unknown := [name for name in named if name not in known]):
        raise ValueError(f"{here}: expected names of fields, {known}, got {unknown[0]!r}")


def _field_names(cls: type) -> list[str]:
    if is_dataclass(cls):
        return [field.name for field in dataclass_fields(cls)]
    bases = cls.__mro__[::-1]
    slots = [name for base in bases for name, x in vars(base).items() if isinstance(x, MemberDescriptorType)]
    hints = [hint for base in bases for hint in get_annotations(base).items()]
    return [*dict.fromkeys(slots + [name for name, hint in hints if "ClassVar" not in str(hint)])]


_STATIC = "fshard.tree.static"  # marks a field by its metadata


def static(default: Tree = MISSING) -> Tree:
    """Return a field of a `node` for metadata, such as a width, with a `default`.

    >>> @tree.node
    ... class Scale:
    ...     by: float = tree.static(2.0)
    >>> tree.leaves(Scale()), Scale(3.0)
    ([], Scale(by=3.0))
    """
    return field(default=default, metadata={_STATIC: True})


@dataclass_transform(eq_default=False, field_specifiers=(static, field))
def node(cls: type[T]) -> type[T]:
    """Make a dataclass a node: each field is a child, or `static`.

    If `cls` is no dataclass, it becomes one (`eq=False`). Subclasses need the decorator, too. Static values are
    compared by `==`: TypeError for tensors and arrays.

    >>> @tree.node
    ... class Linear:
    ...     w: torch.Tensor
    ...     act: object = tree.static(torch.tanh)
    ...     def __call__(self, x):
    ...         return self.act(x @ self.w)
    >>> params = shard_of({"out": Linear(torch.zeros(2, 1))})
    >>> value_and_grad(lambda p, x: p["out"](x).sum())(params, torch.ones(3, 2))[0]
    tensor(0.)

    Source: Equinox (Kidger and Garcia, 2021).
    """
    made: Tree = cls if "__dataclass_fields__" in vars(cls) else dataclass(eq=False)(cls)
    known = {x.name: _STATIC in x.metadata for x in dataclass_fields(made)}
    register_fields(made, [name for name in known if not known[name]], [name for name in known if known[name]])
    return made


def _check_static(cls: type, name: str, value: Metadata) -> None:
    for x in leaves(value):
        if isinstance(x, Tensor) or (hasattr(x, "__array__") and x.shape):
            raise TypeError(
                f"{cls.__name__}.{name}: a static field holds a {type(x).__name__}, which == cannot compare: make the "
                "field a child (without tree.static), or keep numbers in a tuple"
            )


def give_away(tree: Tree) -> None:
    """Call `give_away` of every outermost node with this method: its later uses raise DonatedError."""
    for node in tops(tree, lambda x: hasattr(x, "give_away")):
        if hasattr(node, "give_away"):
            node.give_away()


def register_constant(cls: type[T]) -> type[T]:
    """Register immutable values as constants for torch.compile."""
    # Private: with this attribute dynamo would rebuild a frozen dataclass from its fields, and fail
    if "__dataclass_params__" in vars(cls):
        del cls.__dataclass_params__  # type: ignore[attr-defined]
    pytree.register_constant(cls)
    return cls


def names(spec: Spec) -> list[Hashable]:
    kind: Any = spec.type
    if getattr(kind, "__children__", (None,))[0] is kind is not None:  # a base class may have other names
        return list(kind.__children__[2])
    return list(
        kind._fields if kind is not None and issubclass(kind, tuple) and hasattr(kind, "_fields") else spec.entries()
    )


def child_fields(kind: type) -> tuple[str, ...] | None:
    known: Any = getattr(kind, "__children__", (None,))
    return known[1] if known[0] is kind else None


def walk(spec: Spec, path: tuple[str, ...] = (), first: int = 0) -> Iterator[tuple[tuple[str, ...], Spec, int]]:
    """Yield (path, structure, number of the first leaf) of every subtree, outer before inner."""
    yield path, spec, first
    for name, child in zip(names(spec), spec.children(), strict=True):
        yield from walk(child, (*path, str(name)), first)
        first += child.num_leaves


def children(spec: Spec) -> Iterator[tuple[Spec, int]]:
    first = 0
    for child in spec.children():
        yield child, first
        first += child.num_leaves


def paths(tree: Tree) -> list[str]:
    """Return the dotted path of every leaf, in the order of use.

    >>> tree.paths({"b": 1, "a": [2, 3]})
    ['b', 'a.0', 'a.1']
    """
    if isinstance(tree, Spec):
        raise TypeError("tree.paths: expected a tree, got the structure of one: write tree.paths(x), without flatten")
    return leaf_paths(flatten(tree)[1])


def leaf_paths(spec: Spec) -> list[str]:
    return [".".join(name for name in path if name) for path, node, _ in walk(spec) if node.is_leaf()]


def pairs(what: str, expected: Tree, got: Tree) -> tuple[list[tuple[Tree, Tree]], Spec]:
    """Return pairs of leaves, and the structure of `expected`. ValueError, beginning with `what`, if structures differ.

    >>> pairs("b is not like a", {"w": 1}, {"w": 2})[0]
    [(1, 2)]
    """
    leaves, spec = flatten(expected)
    try:
        return [*zip(leaves, flatten_up_to(spec, got), strict=True)], spec
    except ValueError:
        raise ValueError(f"{what}: {difference(expected, got)}") from None


def difference(expected: Tree, got: Tree) -> str:
    """Say how two trees' structures differ.

    >>> difference({"a": 1, "b": 2}, {"a": 1}), difference({"a": 1}, (1,))
    ("it lacks ['b'] and has nothing besides", 'expected a dict, got a tuple')
    """
    if type(expected) is not type(got):
        return f"expected a {type(expected).__name__}, got a {type(got).__name__}"
    same = "the leaves have the same paths, in other containers"
    return lacking(*builtins.map(paths, (expected, got))) or unlike(*builtins.map(plain, (expected, got))) or same


def unlike(expected: Tree, got: Tree, path: str = "") -> str:
    """Say how the first nodes with different metadata differ, and the remedy; "" if there are none."""
    (named, known), (others, given) = opened(expected), opened(got)
    known, given = (getattr(x, "static", x) for x in (known, given))  # of a `Source`
    are_fields = not any(isinstance(x, dict | list | tuple) for x in (expected, got))
    if known != given and are_fields and None not in (named, others):
        words = f"expected the static fields {known!s:.200}, got {given!s:.200} (a lambda equals only itself)"
        return f"{path!r}: " * bool(path) + (known.unlike(given) if hasattr(known, "unlike") else words)
    inner = dict(others or ())
    pairs = ((child, inner[name], joined(path, str(name))) for name, child in named or () if name in inner)
    return next(filter(None, starmap(unlike, pairs)), "")
