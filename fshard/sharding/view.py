"""Views: which kinds and units of a plan a `Sharded` holds, over which axes they are cut, and the layout."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ..comm.mesh import Axes
from ..core import tree
from ..layout.cuts import Interval, Intervals
from ..layout.layout import Layout, Leaf
from .plan import Plan, Slot


@tree.constant
@dataclass(frozen=True)
class View:
    """The contents of a `Sharded`: some kinds and units of a plan, cut over some axes, for one subtree."""

    plan: Plan
    over: Axes
    kinds: tuple[int, ...]
    spec: tree.Spec
    first: int  # the number of the subtree's first leaf in the whole tree
    units: tuple[int, int]  # the first unit of the subtree, and one past the last

    def slots(self) -> list[Slot]:
        """Return the slot of every leaf of the subtree, in order; tied leaves share one slot."""
        numbers = self.plan.leaves[self.first : self.first + self.spec.num_leaves]
        return [self.plan.slots[n] for n in numbers]

    def names(self) -> dict[Slot, list[str]]:
        """Return the dotted names of each leaf that is held: more than one for a tied leaf."""
        names: dict[Slot, list[str]] = {}
        for name, slot in zip(self.plan.paths[self.first :][: self.spec.num_leaves], self.slots(), strict=True):
            if slot.kind in self.kinds:
                names.setdefault(slot, []).append(name)
        return names

    def axes(self, kind: int) -> Axes:
        """Return the axes over which a kind is cut in this view: none for kinds that are kept whole."""
        return self.plan.over(self.over, kind)

    @property
    def layout(self) -> Layout:
        """Which elements of the leaves lie where."""
        known, key = self.plan.derived.layouts, self._key
        if key not in known:
            known[key] = self._layout()
        return known[key]

    @property
    def _key(self) -> tuple[Hashable, ...]:
        """Everything that determines the layout. The plan itself is left out: the plan keeps the layout (no cycle)."""
        plan = self.plan
        return plan.fingerprint, plan.axes, self.over, self.kinds, self.spec, self.first, self.units

    def _layout(self) -> Layout:
        plan, numbers = self.plan, self.plan.leaves[self.first : self.first + self.spec.num_leaves]
        order = [n for n in dict.fromkeys(numbers) if plan.slots[n].kind in self.kinds]
        index = {n: i for i, n in enumerate(order)}
        return Layout(
            source=self._key,
            spec=self.spec,
            places=tuple(index.get(n) for n in numbers),
            leaves=tuple(Leaf(s.path, s.shape, plan.kinds[s.kind].dtype) for s in (plan.slots[n] for n in order)),
            cut=Intervals({i: self._interval(plan.slots[n]) for i, n in enumerate(order)}),
            flat=True,
            mesh=plan.live_mesh(),
            axes=self.over,
        )

    def _interval(self, slot: Slot) -> Interval:
        plan, kind, over = self.plan, slot.kind, self.over
        return Interval(
            row=self.kinds.index(kind),
            # the row of a subtree begins with the subtree's first unit
            base=plan.offset(slot.unit, kind, over) - plan.offset(self.units[0], kind, over),
            length=plan.length(slot.unit, kind, over),
            start=slot.start,
            numel=slot.numel,
            shared=plan.kinds[kind].whole,
        )
