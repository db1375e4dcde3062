"""The parameters of a module's call, by number, and facts of their plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.mesh import AnyMesh
from ..core import tree
from ..core.func_levels import unwrapped
from ..core.losses import Home, Running, running
from ..core.patterns import names_in
from ..core.storage import writes
from ..core.tree import Tree
from ..plan.plan import Plan, Slot
from ..plan.precision import Policy, Precision
from ..sharding.access import At, ReadsTape, placed

T = TypeVar("T")


def _homes(x: At | Tensor, tapes: Sequence[ReadsTape]) -> list[tuple[Plan, Precision]]:
    """(plan, dtypes) of a leaf: several pairs if plans share its memory, none for a tensor of no plan.

    The memory identifies a gathered leaf, also through a view or a transform.
    """
    if isinstance(x, At):
        plan = x.tape.plan
        return [(plan, plan.kinds[plan.slots[plan.leaves[x.number]].kind].precision)]
    x = unwrapped(x)
    asked = tapes if x.layout is torch.strided else ()  # sparse tensors have no storage
    homes = [(tape, kind) for tape in asked if (kind := tape.kind_of(x)) is not None]
    read = [home for home in homes if len(homes) > 1 and home[0].slot_of(x)]  # trees of `with_policy` share memory
    return [(tape.plan, tape.plan.kinds[kind].precision) for tape, kind in read[:1] or homes]


def _one_policy(plans: Iterable[Plan], what: str) -> None:
    policies = {(p.compute, p.storage, p.stores, p.cast_inputs, p.cast_at): p for p in (plan.policy for plan in plans)}
    if len(policies) > 1:
        raise ValueError(
            f"{what}: leaves of plans with different policies: {' and '.join(map(repr, policies.values()))}. Give the "
            "parameters of one module the same policy (params.with_policy); its overrides are for single leaves"
        )


def leaves_like(what: str, spec: tree.Spec, x: Tree) -> list[Tree]:
    try:
        return tree.flatten_up_to(spec, x)
    except ValueError:
        expected = tree.unflatten(spec, [0] * spec.num_leaves)
        raise ValueError(f"{what}: {tree.difference(expected, x)}") from None


@cache
def _policies_by_place(
    policy: Policy, spec: tree.Spec, names: frozenset[str]
) -> dict[tuple[str, ...], tuple[Policy, bool]]:
    """Return the policy of each subtree with these leaves, by path."""
    known, num_leaves = names_in(tree.leaf_paths(spec)), len(names)
    nodes = ((at, node) for at, node, _ in tree.walk(spec) if node.num_leaves == num_leaves)
    return {at: policy.of(at, known) for at, node in nodes if {*tree.leaf_paths(node)} == names}


class Leaves:
    """The leaves of a loss's parameters by number: a read gathers only the leaf's unit.

    A read returns the caller's tensors as views, which may get another class. `policy` and `mesh` are the plan's;
    without a plan, the running loss's.
    """

    def __init__(self, params: Tree, spec: tree.Spec, what: str):
        given: list[At | Tensor] = leaves_like(what, spec, placed(params))
        with torch.enable_grad():  # a view made under no_grad would pass no gradient later
            self._sources = [x if isinstance(x, At) else x[...] for x in given]
        self._given = given
        loss = running() or Running(Policy(), None, None, set(), [], ())
        self._remarks = loss.remarks
        self._homes = [_homes(x, loss.tapes) for x in given]
        plans = {id(plan): plan for homes in self._homes for plan, _ in homes}
        _one_policy(plans.values(), what)
        plan = next(iter(plans.values()), None)
        self._mesh, self._meshes = loss.mesh if plan is None else plan.mesh, {plan.axes for plan in plans.values()}
        self._is_cut = plan is not None and plan.num_ranks(plan.params_over) > 1
        self._plan, self._spec, self._tapes = plan, spec, loss.tapes
        self.policy, self._is_own = self._policy_of(loss.home if plan is None else plan, loss.policy, what)

    @property
    def mesh(self) -> AnyMesh:
        """The mesh of batch norms. ValueError if it depends on the leaf."""
        if len(self._meshes) > 1:
            raise ValueError(f"batch norms: expected leaves of plans on one mesh, got meshes {sorted(self._meshes)}")
        return self._mesh

    def read(self, number: int) -> Tensor:
        source = self._sources[number]
        return source.tape.leaf(source.number) if isinstance(source, At) else source

    def is_gathered(self, number: int) -> bool:
        return isinstance(self._sources[number], At)

    def like(self, number: int) -> Tensor:
        """A tensor with a leaf's shape, dtype and device, without a gather or meaningful values."""
        source = self._sources[number]
        return source.tape.like(source.number) if isinstance(source, At) else source

    def dtypes(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """Dtypes (storage, computation) of each leaf, equal without a plan."""
        pairs = zip(self._homes, self._sources, strict=True)
        computed = [homes[0][1].compute if isinstance(x, At) else x.dtype for homes, x in pairs]
        return [(homes[0][1].storage if homes else x, x) for homes, x in zip(self._homes, computed, strict=True)]

    def place(self) -> tuple[str, list[str]]:
        """The module's path in its plan, with a dot, and the paths of the plan's leaves outside the module.

        Both are empty if paths of the policy are in the module.
        """
        if self._is_own or self._plan is None or len(self._sources) == self._plan.spec.num_leaves:
            return "", []
        at = self._place_read()
        return at, [path for path in self._plan.paths if not path.startswith(at)] if at else []

    def _policy_of(self, home: Home | None, policy: Policy, what: str) -> tuple[Policy, bool]:
        """Return the module's policy, and True if the paths in it are the module's."""
        policy = home.policy if isinstance(home, Plan) else policy
        if home is None or not policy.overrides:
            return policy, False
        alike = _policies_by_place(policy, home.spec, frozenset(tree.leaf_paths(self._spec)))
        if len({*alike.values()}) > 1:
            alike = self._told_apart(home, alike)
        policies = {known: ".".join(at) for at, known in alike.items()}
        if len(policies) > 1:
            raise ValueError(
                f"{what}: modules of equal leaves have different policies ({' and '.join(map(repr, policies.values()))}"
                "), and these tensors do not tell which one is called. Read parameters where it is called: "
                "apply(params['net'], ...)"
            )
        if policies:
            return next(iter(policies))
        if at := self._place_read()[:-1]:
            return policy.of(tuple(at.split(".")), names_in(tree.leaf_paths(home.spec)))
        return replace(policy, cast_at=policy.casts_beside(("",), ())), False

    def _told_apart(self, home: Home, alike: dict[tuple[str, ...], T]) -> dict[tuple[str, ...], T]:
        """Return the places with these leaves' shapes, if any, and of these the ones of tensors read, if known."""
        shape_of = dict(zip(tree.leaf_paths(home.spec), home.shapes, strict=True))
        shapes = [(name, tuple(self.like(number).shape)) for number, name in enumerate(tree.leaf_paths(self._spec))]
        read = [(name, paths) for name, paths in self._paths_read() if paths]
        of_shapes = {at: x for at, x in alike.items() if all(shape_of[tree.joined(*at, n)] == y for n, y in shapes)}
        alike = of_shapes or alike
        return {at: x for at, x in alike.items() if all(tree.joined(*at, n) in paths for n, paths in read)} or alike

    def _paths_read(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each leaf's name in the module, and its paths in the plan, if they are known."""
        plan = self._plan
        for name, x in zip(tree.leaf_paths(self._spec), self._given, strict=True):
            if plan is None or (isinstance(x, At) and x.tape.plan is not plan):
                yield name, []
            elif isinstance(x, At):
                yield name, [plan.paths[x.number]]
            else:
                slots = [slot for home, slot in self._slots_of(x) if home is plan]
                yield name, [path for path, n in zip(plan.paths, plan.leaves, strict=True) if plan.slots[n] in slots]

    def _slots_of(self, x: Tensor) -> Iterator[tuple[Plan, Slot]]:
        """Yield plan and slot of a leaf read before the call."""
        y = unwrapped(x)
        for tape in self._tapes if y.layout is torch.strided else ():  # sparse tensors have no storage
            if slot := tape.slot_of(y) or tape.slot_at(y):
                yield tape.plan, slot

    def homes(self) -> list[tuple[Plan, Slot] | None]:
        """Return plan and slot of each leaf; None for a tensor of no plan."""
        homes, plan = [self._home(x) for x in self._given], self._plan
        pairs = enumerate(zip(homes, self._sources, strict=True))
        lost = [i for i, (home, x) in pairs if home is None and isinstance(x, Tensor) and not x.numel()]
        at = self._place_read() if lost else ""  # empty leaves lie nowhere
        if lost and plan is not None and (at or len(homes) == plan.spec.num_leaves):
            slot_of = {path: plan.slots[n] for path, n in zip(plan.paths, plan.leaves, strict=True)}
            for i, name in ((i, at + tree.leaf_paths(self._spec)[i]) for i in lost):
                homes[i] = (plan, slot_of[name]) if name in slot_of else None
        return homes

    def _home(self, x: At | Tensor) -> tuple[Plan, Slot] | None:
        if isinstance(x, At):
            return x.tape.plan, x.tape.plan.slots[x.tape.plan.leaves[x.number]]
        return next(self._slots_of(x), None)

    def shape(self, number: int) -> tuple[int, ...]:
        return tuple(self.like(number).shape)

    def _place_read(self) -> str:
        """The place of most leaves, with a dot; "" if no path ends with a leaf's name."""
        votes = Counter[str]()
        for name, paths in self._paths_read():
            votes.update(path.removesuffix(name) for path in paths if path.endswith(f".{name}"))
        return max(votes, key=votes.__getitem__, default="")

    def versions(self) -> list[int | None]:
        """Numbers of writes; None for gathered leaves, or if torch counts no writes."""
        return [None if isinstance(x, At) else writes(x) for x in self._sources]

    def remark(self, words: str) -> None:
        """If the plan cuts parameters over ranks, let ranks compare `words`; else ranks may differ."""
        if self._is_cut:
            self._remarks.add(words)
