"""What a loss reads of a sharded tree: leaves and units by number, where they lie, and in which order.

Note [Computed once]
    Gathering, splitting and reducing a unit always need the same facts: its kinds, where its leaves and this rank's
    interval lie, which of them a subtree of the tree reads. For
    small units the answers would cost more than the work on tensors. So they are computed once for each `View` of a
    plan, and kept in `plan.derived`. A schedule has integers, names and slots; it refers to no plan, mesh or tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Axes
from ..core import tree
from ..core.differences import Form, Wanted
from ..core.flat import Places
from ..layout.cuts import Interval, Intervals
from ..layout.layout import Layout, Leaf
from ..plan.plan import Plan, Slot
from ..plan.units import ENDS, LAST


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

    def wanted(self) -> dict[Slot, Wanted]:
        """Return what is read into each leaf that is held: a tensor of one of its names, of its shape and dtype."""
        kinds = self.plan.kinds
        return {x: Wanted(names, Form(x.shape, kinds[x.kind].dtype)) for x, names in self.names().items()}

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


class Part(NamedTuple):
    """The leaves of one kind in a unit."""

    kind: int
    slots: tuple[Slot, ...]
    numel: int  # of the flat buffer (n,)
    places: Places  # of the leaves in the flat buffer
    trainable: bool
    axes: Axes  # that this rank's interval is cut over
    row: int  # the number of the tensor in which the interval lies, and where
    start: int
    stop: int
    compute: torch.dtype  # in which the leaves are computed with

    def of(self, rows: Sequence[Tensor]) -> Tensor:
        """This rank's interval (n / W,), a view."""
        return rows[self.row][self.start : self.stop]


class Entry(NamedTuple):
    """One unit in a schedule."""

    unit: int
    name: str
    kept: Axes | None  # as in `Unit`
    parts: tuple[Part, ...]
    slots: tuple[Slot, ...]  # of all leaves, part by part
    trained: tuple[int, ...]  # the numbers of the trainable leaves among them
    # the trainable parts with elements, each with the numbers [begin, end) of its leaves among the trainable ones
    reduced: tuple[tuple[Part, int, int], ...]
    sent: bool  # whether ranks have parts of it


class Reads(NamedTuple):
    """What a subtree of the tree reads: its leaves, each by its unit and its number there."""

    is_shared: bool  # units claim parts of the subtree
    leaves: tuple[tuple[int, int], ...]
    run: tuple[int, slice] | None  # if the leaves follow on each other in one unit: the unit, and which they are there


class Schedule:
    """The entries of the units that a view holds, and what each subtree of the tree reads."""

    def __init__(self, view: View):
        plan = view.plan
        self.entries = {unit: _entry(view, unit) for unit in range(*view.units)}
        self.parts = {(e.unit, part.kind): part for e in self.entries.values() for part in e.parts}
        self.regathers = any(unit.kept != () for unit in plan.units)
        self.sends = any(e.sent for e in self.entries.values())
        self.mixed = self.sends and not all(e.sent for e in self.entries.values())
        self.any_whole = any(e.trained and not e.sent for e in self.entries.values())  # on every rank
        place_of = {slot: (e.unit, number) for e in self.entries.values() for number, slot in enumerate(e.slots)}
        # by the number of the leaf in the whole tree: the unit that claimed it, the unit that it lies in, its number
        # there; leaves of kinds that the view lacks are not there
        self._slots = [place_of.get(plan.slots[number]) for number in plan.leaves]
        self._claims = _claims(plan)
        self._reads: dict[tuple[int, int], Reads] = {}

    @cached_property
    def likely(self) -> list[int]:
        """The units in the order in which a loss is likely to read them first.

        What follows the layers may be an embedding, unless something is before them.
        """
        ends = [e.name for e in self.entries.values() if e.name in ENDS]
        return sorted(self.entries, key=lambda unit: ends != [LAST] or self.entries[unit].name != LAST)

    def leaf(self, number: int) -> tuple[int, int]:
        """The unit of a leaf of the whole tree, and the leaf's number there. KeyError if the view has not its kind."""
        place = self._slots[number]
        if place is None:
            raise KeyError(number)
        return place

    def reads(self, first: int, num: int) -> Reads:
        """What the subtree of `num` leaves reads whose first leaf is number `first` of the whole tree."""
        known = self._reads.get((first, num))
        if known is None:
            is_shared = len(set(self._claims[first : first + num])) > 1
            leaves = () if is_shared else tuple(map(self.leaf, range(first, first + num)))
            unit, begin = leaves[0] if leaves else (None, 0)
            follow = leaves == tuple((unit, begin + n) for n in range(num))
            run = (unit, slice(begin, begin + num)) if unit is not None and follow else None
            known = self._reads[first, num] = Reads(is_shared, leaves, run)
        return known


def _claims(plan: Plan) -> list[tuple[int, str]]:
    """For each leaf the unit in which it travels, and if that one was joined the unit that claimed the leaf.

    Which containers of a loss are lazy depends on the units that were asked for, and not on which are joined.
    """
    joined = [set(unit.joined) for unit in plan.units]

    def part(path: str, unit: int) -> str:
        names = accumulate(path.split("."), lambda above, name: f"{above}.{name}") if joined[unit] else ()
        return next((name for name in names if name in joined[unit]), "")

    return [(unit, part(path, unit)) for path, unit in zip(plan.paths, plan.claims, strict=True)]


def schedule(view: View) -> Schedule:
    """The schedule of a view, made once."""
    known, key = view.plan.derived.schedules, (view.over, view.kinds, view.units)
    if key not in known:
        known[key] = Schedule(view)
    return known[key]


def _entry(view: View, unit: int) -> Entry:
    plan = view.plan
    parts = tuple(_part(view, unit, kind) for kind in view.kinds if (unit, kind) in plan.places)
    slots = tuple(slot for part in parts for slot in part.slots)
    trained = tuple(number for number, slot in enumerate(slots) if plan.kinds[slot.kind].trainable)
    trainable = [part for part in parts if part.trainable]
    ends = list(accumulate((len(part.slots) for part in trainable), initial=0))
    reduced = tuple(
        (part, begin, end) for part, (begin, end) in zip(trainable, pairwise(ends), strict=True) if part.numel
    )
    sent = any(size > 1 and axis in part.axes for part in parts for axis, size in plan.axes)
    return Entry(unit, plan.units[unit].name, plan.units[unit].kept, parts, slots, trained, reduced, sent)


def _part(view: View, unit: int, kind: int) -> Part:
    plan, over = view.plan, view.over
    slots, numel = tuple(plan.places[unit, kind]), plan.units[unit].lengths[kind]
    # the row of a subtree begins with the subtree's first unit
    start = plan.offset(unit, kind, over) - plan.offset(view.units[0], kind, over)
    return Part(
        kind,
        slots,
        numel,
        Places(numel, [slot.start for slot in slots], [slot.shape for slot in slots]),
        plan.kinds[kind].trainable,
        view.axes(kind),
        view.kinds.index(kind),
        start,
        start + plan.length(unit, kind, over),
        plan.kinds[kind].precision.compute,
    )
