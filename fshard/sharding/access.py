"""Lazy parameters of a loss: containers whose units are gathered on access, and single leaves by number."""

from __future__ import annotations

import copy
import inspect
import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MethodDescriptorType
from typing import Any, NamedTuple, Protocol, SupportsIndex

from torch import Tensor

from ..core import lazy as containers
from ..core import tree
from ..core.arguments import wrong
from ..core.lazy import Branch, Container, Readable
from ..core.tree import Tree
from ..plan.plan import Plan, Slot


class ReadsTape(Protocol):
    """The part of a `Tape` that lazy containers need."""

    @property
    def plan(self) -> Plan: ...

    def enter(self, spec: tree.Spec, first: int) -> tuple[Tree, Sequence[Tree] | None]:
        """Return a gathered subtree and its leaves; for several units, a lazy container and None."""

    @property
    def shown(self) -> Shown | None:
        """The plain containers read from units in memory; None in the backward."""

    def leaf(self, number: int) -> Tensor: ...

    def kind_of(self, x: Tensor) -> int | None:
        """Return the kind of the leaves in a tensor's memory; None if the loss read none there."""

    def slot_of(self, x: Tensor) -> Slot | None:
        """Return the slot of a leaf; None if its unit is not in use."""

    def slot_at(self, x: Tensor) -> Slot | None:
        """Return the slot of the leaf in whose memory `x` begins; None if that is unknown."""

    def like(self, number: int) -> Tensor:
        """Return a tensor with a leaf's shape and dtype."""

    def prefetch(self, patterns: Sequence[str]) -> None: ...


class _Read(NamedTuple):
    """A plain container read by a loss: its position, original structure and leaves."""

    inside: dict[int, Tree]  # children of its lazy parent, by position
    position: int
    spec: tree.Spec
    container: Tree
    leaves: Sequence[Tree]


class Shown:
    """The plain containers that a loss reads: a second read returns the same container, with the loss's changes.

    A changed container stays in its lazy parent. An unchanged container is forgotten when its unit is freed, unless the
    program still refers to it.
    """

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], _Read] = {}  # by id of `inside`, and position
        self.lingers = False  # True if containers of freed units may be left

    def at(self, new: _Read) -> Tree:
        return self._read.setdefault((id(new.inside), new.position), new).container

    def let_go(self) -> None:
        """Forget containers that the program no longer uses; put changed containers into their lazy parents."""
        for key, read in [*self._read.items()]:
            # False for a container of leaves alone
            nests = read.spec.num_nodes > read.spec.num_leaves + 1
            if sys.getrefcount(read.container) > _OUTSIDE or (nests and _has_inside(read.container)):
                continue
            if not tree.consists_of(read.container, read.spec, read.leaves):
                read.inside[read.position] = read.container
            del self._read[key]
        self.lingers = bool(self._read)

    def drop(self) -> None:
        """Forget containers dropped by the program since `let_go`: the next unit needs the memory."""
        self.let_go()
        self.lingers = False

    def settle(self) -> None:
        for read in self._read.values():
            if not tree.consists_of(read.container, read.spec, read.leaves):
                read.inside[read.position] = read.container


# Reference counts of an unused container: `_OUTSIDE` by a list and the call, `_INSIDE` also by its parent. If Python
# counted more, a unit would stay in memory longer; if fewer, a change after another unit's read would be lost.
_EXAMPLE: list[Tree] = [{}]
_OUTSIDE = sys.getrefcount(_EXAMPLE[0])
_INSIDE = _OUTSIDE + 1


def _has_inside(container: Tree) -> bool:
    children = tree.one_level(container)[0]
    # by index: a variable would be one more reference
    containers = [i for i, x in enumerate(children) if not (isinstance(x, Tensor) or x is None or x == ())]
    return any(sys.getrefcount(children[i]) > _INSIDE or _has_inside(children[i]) for i in containers)


class Lazy(Branch, tree.StandIn):
    """A container of a loss's parameters: touching a unit in it gathers the unit.

    A map over a stand-in returns a stand-in without a tape, around a plain container (`held`). Each container class has
    its stand-in class: Python looks up special methods on the class.
    """

    __slots__ = ()
    _tape_: Any  # a ReadsTape, or None once the children are held
    _spec_: tree.Spec
    _first_: int
    _inside_: dict[int, Tree]  # by position: lazy children once read, and changed children
    _listed_: Container | None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._spec_.type or Lazy

    @staticmethod
    def _of_(container: Tree) -> Tree:
        spec = tree.one_level(container)[1]
        return container if spec.is_leaf() else lazy(None, spec, 0, container)

    def _container_(self) -> Container:
        assert self._listed_  # None only if the children are held
        return self._listed_

    def _pick_(self, index: int) -> Tree:
        if index in self._inside_:
            return self._inside_[index]
        tape, (spec, first) = self._tape_, self._container_().children[index]
        child, leaves = tape.enter(spec, self._first_ + first)
        if index in self._inside_:  # `enter` freed a unit, and put its changed container there
            return self._inside_[index]
        if leaves is None:  # a lazy child: changing it changes this container
            self._inside_[index] = child
        elif (shown := tape.shown) and not isinstance(child, Tensor):
            if type(child) is not dict or spec.num_nodes > len(leaves) + 1:  # a node's class may return new tensors
                leaves = spec.flatten_up_to(child)
            child = shown.at(_Read(self._inside_, index, spec, child, leaves))
        return child

    def _of_children_(self, children: Sequence[Tree]) -> Tree:
        return tree.unflatten(_one_level(self._spec_), children)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self._filled_().__reduce_ex__(protocol)

    def __copy__(self) -> Tree:
        return copy.copy(self._filled_())

    def _placed_(self) -> Tree:
        tape, first = self._tape_, self._first_
        if tape is None:
            return placed(self._filled_())

        def at(child: tree.Spec, start: int) -> Tree:
            return tree.unflatten(child, [At(tape, first + start + i) for i in range(child.num_leaves)])

        if tape.shown:
            tape.shown.settle()  # puts changed children in `_inside_`
        children = enumerate(self._container_().children)
        parts = [placed(self._inside_[i]) if i in self._inside_ else at(*child) for i, child in children]
        return self._of_children_(parts)


def _one_level(spec: tree.Spec) -> tree.Spec:
    level = spec.one_level()
    assert level is not None
    return level


def _reading(name: str) -> Callable[..., Any]:
    lazily = getattr(Readable, name)
    return lambda self, *args: getattr(self._held_, name)(*args) if self._tape_ is None else lazily(self, *args)


class LazyContainer(Readable, Lazy):
    """A stand-in for a dict, a list, a tuple or a NamedTuple.

    Changing the container, or calling a method not written in Python, reads and holds all children.
    """

    __slots__ = ("_first_", "_held_", "_inside_", "_listed_", "_spec_", "_tape_")  # no `__dict__`: a property below

    @classmethod
    def _made_(cls, tape: ReadsTape | None, spec: tree.Spec, first: int, held: Tree) -> LazyContainer:
        self = object.__new__(cls)
        self._tape_, self._held_, self._spec_, self._first_, self._inside_ = tape, held, spec, first, {}
        self._listed_ = None if tape is None else tape.plan.container(spec, first)
        return self

    @property
    def __dict__(self) -> dict[str, Tree]:  # type: ignore[override]
        return self._settled_().__dict__

    def _pick_(self, index: int) -> Tree:
        if self._tape_ is None or self._listed_ is None:  # a loop began before the children were held
            return self._held_[index]
        return super()._pick_(index)

    def _filled_(self) -> Tree:
        children = range(len(self._container_().children)) if self._tape_ is not None else ()
        return self._held_ if self._tape_ is None else self._of_children_([*map(self._pick_, children)])

    def _settled_(self) -> Tree:
        if self._tape_ is not None:
            self._held_, self._tape_ = self._filled_(), None
        return self._held_

    def __getattr__(self, name: str) -> Tree:
        if name in LazyContainer.__slots__:  # `copy` looks for methods before a slot is set
            raise AttributeError(name)
        kind: Any = self._spec_.type
        of_class = inspect.getattr_static(kind, name, None)
        if isinstance(of_class, MethodDescriptorType):
            method = getattr(self._settled_(), name)
            # a list extended by its own stand-in would grow for ever
            return lambda *args, **more: method(*(self._held_ if x is self else x for x in args), **more)
        if self._tape_ is None:
            return getattr(self._held_, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            if of_class is None and hasattr(kind, "__getattr__"):
                return kind.__getattr__(self, name)
            if of_class is None:
                raise
        return of_class.__get__(self, kind) if hasattr(of_class, "__get__") else of_class

    def __setattr__(self, name: str, value: object) -> None:
        if name in LazyContainer.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._settled_(), name, value)

    def __setitem__(self, key: object, value: Tree) -> None:
        self._settled_()[key] = value

    def __delitem__(self, key: object) -> None:
        del self._settled_()[key]

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return repr(self._filled_())

    def copy(self) -> Tree:
        return copy.copy(self._filled_())

    def __len__(self) -> int:  # a loop over a list calls `len` for each child
        return len(self._listed_.children if self._tape_ is not None and self._listed_ is not None else self._held_)

    __getitem__, __iter__, __contains__ = map(_reading, ("__getitem__", "__iter__", "__contains__"))
    keys, values, items, get = map(_reading, ("keys", "values", "items", "get"))
    __eq__, __or__, __add__, __mul__ = map(containers.filling, (operator.eq, operator.or_, operator.add, operator.mul))
    __ne__, __lt__, __le__ = map(containers.filling, (operator.ne, operator.lt, operator.le))
    __gt__, __ge__ = map(containers.filling, (operator.gt, operator.ge))
    __ior__, __iadd__, __imul__ = map(containers.in_place, (operator.ior, operator.iadd, operator.imul))
    __ror__, __radd__, __rmul__ = map(containers.filling, (lambda x, y: y | x, lambda x, y: y + x, lambda x, y: y * x))

    def __reversed__(self) -> Iterator[Tree]:
        return reversed([*self])


@Mapping.register
class _LazyMapping(LazyContainer):
    """A stand-in for a dict: `match` asks for a `Mapping`."""

    __slots__ = ()


@Sequence.register
class _LazySequence(LazyContainer):
    """A stand-in for a list or a tuple; a NamedTuple's fields may be called `keys`."""

    __slots__ = ()
    keys, values, items, get, copy = (
        property(operator.methodcaller("__getattr__", name)) for name in ("keys", "values", "items", "get", "copy")
    )


class LazyObject(Lazy):
    """A stand-in for an object: its class is derived from the object's, with properties that read the children.

    Held children are attributes of the stand-in.
    """

    __slots__ = ()
    _attributes_: containers.Attributes

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Do not call `__init_subclass__` of the object's class."""

    @classmethod
    def _made_(cls, tape: ReadsTape | None, spec: tree.Spec, first: int, held: Tree) -> LazyObject:
        self = object.__new__(cls)
        listed = None if tape is None else tape.plan.container(spec, first)
        like = held if listed is None else tree.unflatten(_one_level(spec), [None] * len(listed.children))
        cls._attributes_.copy(like, self)
        state: tuple[object, ...] = (tape, spec, first, {}, listed)
        for name, value in zip(containers.STATE, state, strict=True):
            object.__setattr__(self, name, value)  # also if a dataclass is frozen
        return self

    @property
    def __dict__(self) -> dict[str, Tree]:  # type: ignore[override]
        return self._attributes_.of(self._settled_())

    def _filled_(self) -> Tree:
        children = range(0 if self._tape_ is None else len(self._container_().children))
        return self._of_children_([*map(self._pick_, children)])

    def _of_children_(self, children: Sequence[Tree]) -> Tree:
        node: Tree = object.__new__(self.__class__)
        self._attributes_.copy(self, node)
        # `children` is empty if the stand-in holds its children
        for name, child in zip(self._attributes_.children, children, strict=False):
            object.__setattr__(node, name, child)
        return node

    def _settled_(self) -> LazyObject:
        if self._tape_ is not None:
            node = self._filled_()
            object.__setattr__(self, "_tape_", None)
            self._attributes_.copy(node, self)
        return self


def lazy(tape: ReadsTape | None, spec: tree.Spec, first: int, held: Tree = None) -> Tree:
    """Return a stand-in for a container: with a tape, or around `held`.

    If the container's class may compute with its children, return a real container, with stand-ins as children.
    """
    if spec.type in _PLAIN:
        return _stand_in(spec.type)._made_(tape, spec, first, held)
    kind, names = spec.type, containers.child_names(spec)
    if kind and names is not None and (made := _stand_in(kind, names, containers.special_names(kind))) is not None:
        return made._made_(tape, spec, first, held)
    if tape is None:
        return held
    children = tape.plan.container(spec, first).children
    return tree.unflatten(_one_level(spec), [tape.enter(child, first + start)[0] for child, start in children])


_PLAIN = (dict, list, tuple, OrderedDict, defaultdict, deque)


@cache
def _stand_in(kind: type, names: tuple[str, ...] = (), special: frozenset[str] = frozenset()) -> Any:
    """Return the stand-in class of a class; None if Python allows none."""
    if kind in _PLAIN or issubclass(kind, tuple):
        base = _LazyMapping if issubclass(kind, Mapping) else _LazySequence
        methods = {name: containers.forwarded(kind, name) for name in special}
        made = containers.stand_in_class(containers.OfTuple, kind, (base,), {"_kind_": kind} | methods)
    else:
        try:
            made = containers.object_class(LazyObject, kind, names)
        except TypeError:  # no subclass is possible
            return None
    tree.register_stand_in(made, Lazy._of_)
    return made


def placed(params: Tree) -> Tree:
    return tree.map_tops(lambda x: x._placed_() if isinstance(x, Lazy) else x, Lazy, params)


def prefetch(params: Tree, units: str | Sequence[str]) -> None:
    """Start the gathers of units that a loss reads later; the loss computes with other units meanwhile.

    `params` are the loss's parameters, `units` names of units, or patterns of names. Reading a unit waits for its
    gather; a gather without a read is dropped when the loss returns. A gathered unit takes memory until read and freed,
    so the loss decides how many gathers are under way. On plain tensors, and on parameters of one unit, the
    call does nothing. In a graph of `jit` the passes place gathers: use `in_flight` there.

    TypeError for a `Sharded` (nothing reads it outside a loss), ValueError for a pattern without a unit.

    >>> def loss(params, x):
    ...     prefetch(params, "experts.*")
    ...     return sum((expert * x).sum() for expert in params["experts"])
    >>> params = {"experts": [torch.ones(2), torch.ones(2)]}
    >>> evaluate(loss)(shard_params(params, make_plan(params, units="experts.*")), torch.ones(2))
    tensor(4.)
    """
    patterns = [units] if isinstance(units, str) else list(units)
    if isinstance(params, Branch) and not isinstance(params, Lazy):
        raise TypeError(
            wrong("params", params, "the parameters that a loss was given", "Call this inside of the loss.")
        )
    for tape in dict.fromkeys(x._tape_ for x in tree.nodes(params, Lazy)):
        if tape is not None:
            tape.prefetch(patterns)


class At:
    """A leaf's tape and number."""

    __slots__ = ("number", "tape")

    def __init__(self, tape: ReadsTape, number: int):
        self.tape, self.number = tape, number
