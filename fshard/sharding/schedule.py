"""The schedule of a loss's reads: units and leaves by number, their positions, and their likely order.

Note [Computed once]
    For small units, working out gathers, splits and reductions would take longer than the work on tensors. So a
    schedule is computed once for each `View` of a plan, and stored in `plan.derived`. The schedule refers to no plan,
    mesh or tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple, TypeAlias

from ..comm.mesh import Axes
from ..core import tree
from ..core.differences import Form, Wanted, differences, lacking
from ..core.tracing import memo
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts
from ..layout.row import Row
from ..layout.rules import COPIES, Rule
from ..plan.plan import Plan, Slot
from ..plan.units import ENDS, LAST

# rows by unit and kind; by tensor, its kind and number of elements
Placed: TypeAlias = tuple[dict[tuple[int, int], Row[Slot]], list[tuple[int, int]]]


@tree.register_constant
@dataclass(frozen=True)
class View:
    """The contents of a `Sharded`: some kinds and units of a plan, cut over some axes, for one subtree."""

    plan: Plan
    over: Axes
    kinds: tuple[int, ...]
    spec: tree.Spec
    first: int  # number of the subtree's first leaf in the whole tree
    units: tuple[int, int]  # the subtree's first unit, and one past its last
    room: int = 0  # bytes of gradients for which units share a tensor; 0: all units of a kind share one

    def __repr__(self) -> str:  # in optree's errors of trees that differ
        plan = f"{self.plan.policy!r}, leaves={self.spec.num_leaves}, plan={self.plan.fingerprint[:8]}"
        return f"View({plan}, over={self.over}; fshard.tree.map says how two differ)"

    def unlike(self, other: View) -> str:
        """Say how `other` differs, and the remedy."""
        trees = (tree.unflatten(x.spec, [0] * x.spec.num_leaves) for x in (self, other))
        if text := lacking([*self.by_name()], [*other.by_name()]) or tree.unlike(*trees):
            return text + ". params.trainable leaves frozen leaves out" * (self.spec == other.spec)
        what = "plans" if self.plan != other.plan else "cuts or places in one plan"
        how = "make one from the other, as tree.map(torch.clone, params['encoder']), or lay b out as a"
        return f"the trees are of two {what}: {how}: a.replace({{'': b}})"

    def slots(self) -> list[Slot]:
        """The slot of every leaf; tied leaves share one."""
        numbers = self.plan.leaves[self.first : self.first + self.spec.num_leaves]
        return [self.plan.slots[n] for n in numbers]

    def names(self) -> dict[Slot, list[str]]:
        """The dotted names of each leaf whose kind the view has."""
        names: dict[Slot, list[str]] = {}
        for name, slot in zip(self.plan.paths[self.first :][: self.spec.num_leaves], self.slots(), strict=True):
            if slot.kind in self.kinds:
                names.setdefault(slot, []).append(name)
        return names

    def wanted(self) -> dict[Slot, Wanted]:
        return {slot: Wanted(names, _slot_form(slot)) for slot, names in self.names().items()}

    def by_name(self, above: str = "") -> dict[str, Slot]:
        """The slots of leaves whose kind the view has, by name; `above` begins each name."""
        pairs = zip(tree.leaf_paths(self.spec), self.slots(), strict=True)
        return {tree.joined(above, name): slot for name, slot in pairs if slot.kind in self.kinds}

    def axes(self, kind: int) -> Axes:
        return self.plan.rule(kind, self.over).over

    @property
    def rows(self) -> dict[tuple[int, int], Row[Slot]]:
        """The rows by unit and kind, with their positions in this view's tensors."""
        return self._places[0]

    @property
    def tensors(self) -> list[tuple[int, int]]:
        """The kind and the number of elements of each tensor."""
        return self._places[1]

    @property
    def _places(self) -> Placed:
        known: dict[Hashable, Placed] = self.plan.derived.rows
        if (key := (self.over, self.kinds, self.units, self.room)) not in known:
            known[key] = self._placed()
        return known[key]

    def _placed(self) -> Placed:
        plan, sizes, rows = self.plan, dict(self.plan.axes), dict[tuple[int, int], Row[Slot]]()
        last = {kind: number for number, kind in enumerate(self.kinds)}  # the tensor of a kind's last row
        tensors = {number: (kind, 0) for kind, number in last.items()}
        for unit, kind in product(range(*self.units), self.kinds):
            if row := plan.rows.get((unit, kind)):
                row = row.at(plan.rule(kind, self.over), sizes, last[kind], tensors[last[kind]][1])
                if self.room and row.start and row.stop * plan.kinds[kind].precision.grads.itemsize > self.room:
                    last[kind], row = len(tensors), replace(row, tensor=len(tensors), start=0)
                rows[unit, kind], tensors[row.tensor] = row, (kind, row.stop)
        return rows, [*tensors.values()]

    def numel(self, kind: int) -> int:
        return sum(numel for of, numel in self.tensors if of == kind)

    def of_kind(self, kind: int) -> list[Row[Slot]]:
        return [row for row in self.rows.values() if row.kind == kind]

    @property
    def layout(self) -> Layout:
        known, key = self.plan.derived.layouts, self._key
        if key not in known:
            known[key] = self._layout()
        return known[key]

    @property
    def _key(self) -> tuple[Hashable, ...]:
        """Everything the layout depends on, but no plan: plan and layout would form a cycle."""
        plan = self.plan
        return plan.fingerprint, plan.axes, self.over, self.kinds, self.spec, self.first, self.units, self.room

    def _layout(self) -> Layout:
        plan, numbers = self.plan, self.plan.leaves[self.first : self.first + self.spec.num_leaves]
        order = [n for n in dict.fromkeys(numbers) if plan.slots[n].kind in self.kinds]
        index = {n: i for i, n in enumerate(order)}
        by_slot = {plan.slots[n]: i for n, i in index.items()}
        rows = (row.renamed(by_slot) for row in self.rows.values())
        return Layout(
            source=self._key,
            spec=self.spec,
            leaf_at=tuple(index.get(n) for n in numbers),
            leaves=tuple(plan.slots[n] for n in order),
            rows=tuple(row for row in rows if row.leaves),
            flat=True,
            mesh=plan.live_mesh(),
            axes=tuple(dict.fromkeys((*plan.splits(self.kinds), *self.over))),
            frozen=tuple(path for path, n in zip(tree.leaf_paths(self.spec), numbers, strict=True) if n not in index),
        )


class Entry(NamedTuple):
    """One unit in a schedule."""

    unit: int
    name: str
    keep_rule: Rule | None  # as in `Unit`
    rows: tuple[Row[Slot], ...]
    slots: tuple[Slot, ...]  # of all leaves, row by row
    trained: tuple[int, ...]  # numbers of trainable leaves in `slots`
    # trainable rows with elements, and the numbers [begin, end) of their leaves in `trained`
    reduced: tuple[tuple[Row[Slot], int, int], ...]
    sent: bool  # ranks have shards of the unit
    leads: bool  # its gather starts the next gathers: the unit is sent, or no unit of the view is


# The reads of a subtree: runs of adjacent leaves in a unit, as (unit, slice of its leaves)
LeafRuns: TypeAlias = Sequence[tuple[int, slice]]


class Schedule:
    """The entries of a view's units, and the reads of subtrees."""

    def __init__(self, view: View):
        plan = view.plan
        entries = {unit: _unit_entry(view, unit) for unit in range(*view.units)}
        self.sends = any(e.sent for e in entries.values())
        self.entries = {unit: e._replace(leads=e.sent or not self.sends) for unit, e in entries.items()}
        self.last = view.units[1] - 1  # the last unit
        self.regathers = any(unit.keep_rule != COPIES for unit in plan.units)
        # a checkpoint's second run gathers units of frozen leaves again, even if kept
        self.resends = any(e.sent and (e.keep_rule != COPIES or not e.reduced) for e in self.entries.values())
        self.mixed = self.sends and not all(e.sent for e in self.entries.values())
        self.any_whole = any(e.trained and not e.sent for e in self.entries.values())  # whole on every rank
        folder_of = {slot: (e.unit, number) for e in self.entries.values() for number, slot in enumerate(e.slots)}
        # both by leaf number in the whole tree; `_slots`: (unit, number in the unit), or None for other kinds
        self._slots = [folder_of.get(plan.slots[number]) for number in plan.leaves]
        self._claims = _claims(plan)
        self._runs: dict[tuple[int, int], LeafRuns | None] = {}

    @memo
    def likely(self) -> list[int]:
        """The units in the likely order of their first reads.

        `(last)` without `(first)` comes first: it may be an embedding.
        """
        ends = [e.name for e in self.entries.values() if e.name in ENDS]
        return sorted(self.entries, key=lambda unit: ends != [LAST] or self.entries[unit].name != LAST)

    def leaf(self, number: int) -> tuple[int, int]:
        """Return (unit, number in the unit). KeyError if the view lacks the leaf's kind."""
        place = self._slots[number]
        if place is None:
            raise KeyError(number)
        return place

    def runs(self, first: int, num: int) -> LeafRuns | None:
        """Return the reads of `num` leaves from leaf `first` on; None if several units claim the leaves."""
        try:
            return self._runs[first, num]
        except KeyError:
            is_shared = len(set(self._claims[first : first + num])) > 1
        runs = None if is_shared else _runs_of_places([*map(self.leaf, range(first, first + num))])
        self._runs[first, num] = runs
        return runs


def _runs_of_places(places: Iterable[tuple[int, int]]) -> LeafRuns:
    runs = list[tuple[int, slice]]()
    for unit, number in places:
        last, leaves = runs[-1] if runs else (None, slice(0))
        if last == unit and leaves.stop == number:
            runs[-1] = unit, slice(leaves.start, number + 1)
        else:
            runs.append((unit, slice(number, number + 1)))
    return runs


def _claims(plan: Plan) -> list[tuple[int, str]]:
    """Return each leaf's unit, and in a joined unit the name of the unit that claimed it.

    A subtree is lazy if the user named several units in it, even if these are joined.
    """
    joined = [set(unit.joined) for unit in plan.units]

    def part(path: str, unit: int) -> str:
        names = accumulate(path.split("."), lambda above, name: f"{above}.{name}") if joined[unit] else ()
        return next((name for name in names if name in joined[unit]), "")

    return [(unit, part(path, unit)) for path, unit in zip(plan.paths, plan.claims, strict=True)]


def check_static(spec: tree.Spec, x: Tree, at: str = "") -> None:
    """ValueError if a node of `x` has other static fields than in the tree `spec`."""
    if text := tree.unlike(tree.unflatten(spec, [0] * spec.num_leaves), x, at):
        raise ValueError(f"{text}. The plan has these fields: make a plan of this tree")


def _with_zeros(x: Tree) -> Tree:
    return tree.unflatten(x.view.spec, [0] * x.view.spec.num_leaves) if isinstance(x, Parts) else x


def check_replaced(view: View, subtrees: Mapping[str, Tree], given: Mapping[str, object]) -> str:
    """Return the replaced leaves as text. `given`: tensors, or views of subtrees, by path. ValueError if any lacks."""
    slots, new = view.by_name(), dict[str, object]()
    for path, node, _ in tree.walk(view.spec):
        if (at := ".".join(path)) in subtrees:
            check_static(node, tree.map_tops(_with_zeros, Parts, subtrees[at]), at)
    for at, top in given.items():
        new |= (
            {name: _slot_form(slot) for name, slot in top.by_name(at).items()} if isinstance(top, View) else {at: top}
        )
    inside = [x for x in slots if any(_below(x, at) for at in subtrees)]
    errors = [f"{x!r} is no path of the tree" for x in new if x not in slots]
    known = {x: form for x, form in new.items() if x in slots}
    errors += differences([Wanted([x], _slot_form(slots[x])) for x in inside], known)
    replaced = {slots[x] for x in known}
    still = (x for x, slot in slots.items() if x not in new and slot in replaced)
    errors += [f"{x!r} is tied with a leaf that is replaced: replace both" for x in still]
    if errors := errors + [
        f"{x!r} lies in {y!r}: give one of them" for x in subtrees for y in subtrees if x != y and _below(x, y)
    ]:
        raise ValueError(f"replace: {'; '.join(errors)}")
    return "\n".join(sorted(new))


def _below(path: str, above: str) -> bool:
    return not above or f"{path}.".startswith(f"{above}.")


def _slot_form(slot: Slot) -> Form:
    return Form(slot.shape, slot.dtype)


def schedule(view: View) -> Schedule:
    known, key = view.plan.derived.schedules, (view.over, view.kinds, view.units)
    if key not in known:
        known[key] = Schedule(view)
    return known[key]


def _unit_entry(view: View, unit: int) -> Entry:
    plan = view.plan
    rows = tuple(view.rows[unit, kind] for kind in view.kinds if (unit, kind) in view.rows)
    slots = tuple(slot for row in rows for slot in row.leaves)
    trained = tuple(number for number, slot in enumerate(slots) if plan.kinds[slot.kind].trainable)
    trainable = [row for row in rows if plan.kinds[row.kind].trainable]
    ends = list(accumulate((len(row.leaves) for row in trainable), initial=0))
    reduced = tuple((row, *edge) for row, edge in zip(trainable, pairwise(ends), strict=True) if row.numel)
    sent = any(row.shards > 1 for row in rows)
    return Entry(unit, plan.units[unit].name, plan.units[unit].keep_rule, rows, slots, trained, reduced, sent, sent)
