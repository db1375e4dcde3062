"""How a loss reads parameters: containers whose units are gathered on access, and single leaves by number."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh
from ..core import tree
from ..core.arguments import wrong
from ..core.lazy import Branch, Container
from ..core.tree import Tree
from .plan import Plan
from .precision import Policy

# The policy and the mesh of the loss that runs, for what a loss calls with parameters that it has gathered itself.
_LOSS: ContextVar[tuple[Policy, AnyMesh]] = ContextVar("fshard.sharding.access", default=(Policy(), None))


@contextmanager
def loss_of(policy: Policy, mesh: AnyMesh) -> Iterator[None]:
    """The block in which a loss runs, whose parameters are on this mesh and have this policy."""
    token = _LOSS.set((policy, mesh))
    try:
        yield
    finally:
        _LOSS.reset(token)


class Gathers(Protocol):
    """A tape, as what reads from it sees it."""

    @property
    def plan(self) -> Plan:
        """The plan of the parameters."""

    def enter(self, spec: tree.Spec, first: int) -> Tree:
        """Return the subtree of this structure whose first leaf has the number `first`."""

    def leaf(self, number: int) -> Tensor:
        """Return a leaf, gathered with its unit."""

    def like(self, number: int) -> Tensor:
        """Return a tensor with a leaf's shape, device and the dtype of computation, without gathering it."""

    def prefetch(self, patterns: Sequence[str]) -> None:
        """Start the gathers of the units whose names fit the patterns."""


class Lazy(Branch, tree.StandIn):
    """A container of a loss's parameters: touching a unit in it gathers the unit.

    What a function of trees makes of one is another, which holds its children (`held`) and has no tape. So both fit
    each other in every library of trees. `isinstance` takes it for what it stands for.
    """

    def __init__(self, tape: Gathers | None, spec: tree.Spec, first: int, held: Sequence[Tree] = ()):
        self._tape = tape
        self._spec = spec
        self._first = first
        self._held = held

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._spec.type or Lazy

    @staticmethod
    def of(container: Tree) -> Tree:
        """What stands for a container whose children are there; a leaf is returned as it is."""
        children, spec = tree.one_level(container)
        return container if spec.is_leaf() else Lazy(None, spec, 0, children)

    def _container(self) -> Container:
        return Container(self._spec) if self._tape is None else self._tape.plan.container(self._spec, self._first)

    def _child(self, spec: tree.Spec, first: int) -> Tree:
        return self._held[first] if self._tape is None else self._tape.enter(spec, self._first + first)

    def filled(self) -> Tree:
        """The container, with what reading each child gives."""
        return tree.unflatten(self._level, [self._pick(i) for i in range(len(self))])

    @property
    def _level(self) -> tree.Spec:
        level = self._spec.one_level()
        assert level is not None  # a leaf has none
        return level

    def copy(self) -> Tree:
        """As of a dict or a list: the container itself."""
        return self.filled()

    def update(self, children: Mapping[Hashable, Tree]) -> None:
        """As of a dict (torch.func.functional_call writes what it has replaced): from now on the children are held."""
        new_children = [children.get(name, child) for name, child in self.items()]
        self._tape, self._spec, self._first, self._held = None, self._level, 0, new_children

    def placed(self) -> Tree:
        """The subtree as a plain tree, with the places of the leaves for leaves; no unit is gathered."""
        if self._tape is None:
            return placed(self.filled())
        return tree.unflatten(self._spec, [_At(self._tape, self._first + i) for i in range(self._spec.num_leaves)])

    def prefetch(self, patterns: Sequence[str]) -> None:
        """Start the gathers of the units whose names fit the patterns, also of units outside of this subtree."""
        if self._tape is not None:
            self._tape.prefetch(patterns)

    def gathered(self) -> Tree:
        """The subtree as a plain tree, all its units gathered."""
        return tree.plain(self.filled())


def placed(params: Tree) -> Tree:
    """Parameters as a plain tree, with their places for those leaves that are not gathered."""
    return tree.map_tops(lambda x: x.placed() if isinstance(x, Lazy) else x, Lazy, params)


def prefetch(params: Tree, units: str | Sequence[str]) -> None:
    """Start the gathers of units now: inside a loss, for units that it will read later, while it computes with others.

    `params` are those that the loss was given, `units` names of units, or patterns of names. A read of such a unit
    waits for its gather; a gather that nothing waits for is dropped when the loss returns. A unit that is gathered
    takes memory until it is read and let go, so the loss decides how many are under way. On plain tensors, and on
    parameters of one unit, this does nothing. In a graph of `jit` the passes place gathers: use `in_flight` there.

    Raises TypeError for a `Sharded` (outside of a loss nothing reads it), ValueError for a pattern that no unit fits.

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
    if isinstance(params, Lazy):
        params.prefetch(patterns)


tree.register_stand_in(Lazy, Lazy.of)


class _At:
    """The place of a leaf: a tape, and the leaf's number there."""

    __slots__ = ("number", "tape")

    def __init__(self, tape: Gathers, number: int):
        self.tape, self.number = tape, number


def _dtypes(place: _At) -> tuple[torch.dtype, torch.dtype]:
    plan = place.tape.plan
    precision = plan.kinds[plan.slots[plan.leaves[place.number]].kind].precision
    return precision.storage, precision.compute


class Leaves:
    """The leaves of a loss's parameters by number: a read gathers the unit of that leaf, and no other unit.

    Of tensors that a caller gave it returns views of its own, which may get another class.

    `policy` and `mesh` are those of the leaves that are not gathered yet, else those of the loss that runs.
    ValueError, which begins with `what` and says how they differ, for a tree that has not the structure `spec`.
    """

    def __init__(self, params: Tree, spec: tree.Spec, what: str):
        without = placed(params)
        try:
            given: list[_At | Tensor] = tree.flatten_up_to(spec, without)
        except ValueError:
            expected = tree.unflatten(spec, [0] * spec.num_leaves)
            raise ValueError(f"{what}: {tree.difference(expected, without)}") from None
        with torch.enable_grad():  # what is read under no_grad may be used outside of it
            self._sources = [x if isinstance(x, _At) else x.view_as(x) for x in given]
        plan = next((x.tape.plan for x in self._sources if isinstance(x, _At)), None)
        self.policy, self.mesh = _LOSS.get() if plan is None else (plan.policy, plan.mesh)

    def read(self, number: int) -> Tensor:
        """Return a leaf, gathered with its unit."""
        source = self._sources[number]
        return source.tape.leaf(source.number) if isinstance(source, _At) else source

    def is_gathered(self, number: int) -> bool:
        """Whether a read gathers: the tensor is then one that others read, too."""
        return isinstance(self._sources[number], _At)

    def like(self, number: int) -> Tensor:
        """Return a tensor with a leaf's shape, dtype and device, whose values mean nothing; no unit is gathered."""
        source = self._sources[number]
        return source.tape.like(source.number) if isinstance(source, _At) else source

    def dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """For each leaf the dtypes in which it is stored and computed: one dtype if it is gathered."""
        return [_dtypes(x) if isinstance(x, _At) else (x.dtype, x.dtype) for x in self._sources]

    def versions(self) -> list[int | None]:
        """For each leaf that is a tensor, the number of writes to it; None where torch does not count them."""
        # `_version` is private: a tensor's number of writes has no public name (test_tape.py notices when it goes)
        return [None if isinstance(x, _At) or x.is_inference() else x._version for x in self._sources]

    def key(self, number: int) -> tuple[int, int]:
        """Return a value that is equal for two reads of the same leaf, while both are alive."""
        source = self._sources[number]
        return (id(source.tape), source.number) if isinstance(source, _At) else (id(source), 0)
