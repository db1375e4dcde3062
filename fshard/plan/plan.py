"""Plans: the owner of each shard of each flat buffer, computed once, from shapes alone.

Note [Flat buffers]
    Leaves are grouped in *units* (gathered together) and, inside a unit, by *kind* (dtype, trainable or frozen, sharded
    or whole, on the device or in host memory). The leaves of one unit and kind lie in one flat buffer, in the order of
    the tree. Every leaf starts at a multiple of 16 bytes in each dtype of the buffer: kernels load 16 bytes at once.
    Zeros pad the end, so that even a rank's smallest shard is a multiple of 16 bytes.

    A buffer is cut into equal intervals; rank r along the axes of a partition owns interval r, its shard. A rank holds
    one tensor for each kind: its shards of all units, end to end. Each of the three partitions (params, grads, state)
    has the axes of the partition before and possibly more, and the first axis varies slowest. So a shard of a
    finer partition lies inside one shard of a coarser partition.
"""

from __future__ import annotations

import hashlib
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import add, mul

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate, digits, mesh_device, present
from ..comm.reduction import Gather, Wire
from ..core import tree
from ..core.arguments import wrong
from ..core.lazy import Branch, Container
from ..core.random import HOST
from ..core.tracing import memo
from ..core.tree import Tree
from ..hosts.one_host import connected
from ..layout.layout import Derived, Leaf, Split
from ..layout.pieces import Parts
from ..layout.row import Row, RowSplit
from ..layout.rules import COPIES, Rule, interval
from .ahead import Ahead, Crossings, crossings
from .owners import Holders, Picture, Share, TableLine, picture, size, span
from .precision import Policy, Precision
from .units import ENDS, ROOT, repeated_siblings

_ALIGN_SHARDS = 16  # bytes
_BUCKET = 1 << 20  # bytes; smaller units cost time for messages, not for bytes
SMALL_GRADIENTS = 16 << 20  # bytes of neighbouring units, whose gradients may be in memory at once
_MANY = 8  # saved messages worth advice

Shares = Mapping[str, tuple[Axes, Sequence[int]]]


@dataclass(frozen=True)
class Kind:
    """The common properties of all leaves in one flat buffer."""

    precision: Precision
    trainable: bool
    whole: bool
    host: bool  # parameters, gradients and optimizer state are in host memory
    split: str | None = None  # the axis along which ranks have different parts of the leaves
    state_on_host: bool = False  # the optimizer state alone is in host memory

    @property
    def dtype(self) -> torch.dtype:
        return self.precision.storage

    @property
    def aligned(self) -> int:
        """Elements in 16 bytes of the narrowest dtype."""
        return max(1, _ALIGN_SHARDS // self.precision.itemsize)

    def __str__(self) -> str:
        return " ".join([str(self.precision), *self.words, *["state-on-host"] * self.state_on_host])

    @property
    def words(self) -> list[str]:
        words = ["frozen"] * (not self.trainable) + ["whole"] * self.whole + ["host"] * self.host
        return words + [f"split over {self.split}"] * bool(self.split)


@dataclass(frozen=True)
class Slot(Leaf):
    """A leaf at elements [start, start + numel) of the flat buffer of its unit and kind."""

    kind: int
    unit: int
    start: int

    def __hash__(self) -> int:
        return hash((self.unit, self.kind, self.start))  # faster than a hash of all fields


@dataclass(frozen=True)
class Unit:
    """Leaves gathered together: `lengths[k]` elements, with padding, in the flat buffer of kind k.

    `keep_rule`: the buffers that `regather=` keeps from forward to backward: none (None), whole buffers, or shards over
    the last axes of `params_over`. `joined`: the names of the units joined in this unit.
    """

    name: str
    lengths: tuple[int, ...]
    keep_rule: Rule | None = None
    joined: tuple[str, ...] = ()

    @property
    def regather(self) -> str:
        """The unit's `regather` of `make_plan`, as text."""
        over = () if self.keep_rule is None else self.keep_rule.over
        return ", ".join(over) if over else str(self.keep_rule is None)

    @property
    def is_single(self) -> bool:
        return self.name not in (ROOT, *ENDS) and not self.joined


def _joined_unit(units: Sequence[Unit]) -> Unit:
    names, lengths = tuple(unit.name for unit in units), tuple(map(sum, zip(*(x.lengths for x in units), strict=True)))
    return Unit(f"{names[0]} to {names[-1]}", lengths, units[0].keep_rule, names) if len(units) > 1 else units[0]


@tree.register_constant
@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layout of a tree over the axes of a mesh: immutable, hashable, picklable, the same on every rank.

    `slots[leaves[i]]` is the position of leaf i. `claims[i]` is the unit selected for leaf i (after `join`, the
    joined unit). A tied leaf has the slot of its first occurrence, perhaps in another unit. Pickling drops the mesh:
    `plan.on(mesh)` sets it again.
    """

    spec: tree.Spec
    leaves: tuple[int, ...]
    claims: tuple[int, ...]
    slots: tuple[Slot, ...]
    units: tuple[Unit, ...]
    kinds: tuple[Kind, ...]
    axes: tuple[tuple[str, int], ...]
    params_over: Axes
    grads_over: Axes
    state_over: Axes
    block: int = 1
    policy: Policy = field(default_factory=Policy)
    param_wire: Wire | None = None
    grad_wire: Wire | None = None
    together: bool = False
    gather: Gather | None = None
    prefetch: int | None = None
    data: Axes = ()  # batches differ along these axes
    mesh: AnyMesh = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        # without memos and mesh
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "mesh": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Plan:
        return self  # immutable; a copied state keeps its mesh

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def root(self) -> int | None:
        """The number of the unit `(root)`, or None."""
        return 0 if self.units and self.units[0].name == ROOT else None

    @memo
    def lasting(self) -> frozenset[int]:
        """The units that stay from their second gather in a forward to the forward's end.

        A loss may read these again: `(first)` and `(last)` between other units, joined units part by part.
        """
        return frozenset(number for number, unit in enumerate(self.units) if unit.name in ENDS or unit.joined)

    def on(self, mesh: AnyMesh) -> Plan:
        """Return this plan on another mesh with the same axes (ValueError if the axes differ)."""
        sizes = axis_sizes(mesh)
        if tuple(sizes.items()) != self.axes:
            raise ValueError(
                f"the plan was made for a mesh with axes {dict(self.axes)}, this one has {sizes}: "
                "make the plan again for this mesh, and shard whole parameters with it"
            )
        return replace(self, mesh=connected(mesh))

    def join(self, bucket: int) -> Plan:
        """Return this plan with neighbouring units joined, up to `bucket` bytes.

        The root, `(first)`, `(last)`, units of several subtrees, and units of different `keep_rule` stay alone.
        """
        groups, begins, filled = list[list[Unit]](), list[tuple[int, Sequence[int]]](), 0
        for unit, nbytes in zip(self.units, self.ahead.sizes, strict=True):
            before = groups[-1][-1] if groups else unit
            fits = (
                before.is_single and unit.is_single and before.keep_rule == unit.keep_rule and filled + nbytes <= bucket
            )
            if not (groups and fits):
                groups.append([])
                filled, lengths = 0, [0] * len(self.kinds)
            begins.append((len(groups) - 1, lengths))
            groups[-1].append(unit)
            filled, lengths = filled + nbytes, [*map(add, lengths, unit.lengths)]
        places = ((slot, *begins[slot.unit]) for slot in self.slots)
        slots = tuple(replace(slot, unit=unit, start=slot.start + begin[slot.kind]) for slot, unit, begin in places)
        claims = tuple(begins[unit][0] for unit in self.claims)
        return replace(self, units=tuple(map(_joined_unit, groups)), slots=slots, claims=claims)

    @memo
    def as_read(self) -> Plan | None:
        """Joined units over the same tensors, for an eager loss.

        None if leaves are sent or cast, or the tree is large.
        """
        if self.gather or self.param_wire or self.grad_wire or self.num_ranks(self.axis_names) > 1:
            return None
        if sum(self.ahead.sizes) > SMALL_GRADIENTS:
            return None
        casts = any(kind.host or len({*vars(kind.precision).values()}) > 1 for kind in self.kinds)
        return None if casts else self.join(_BUCKET)

    def live_mesh(self) -> AnyMesh:
        """Return the mesh; ValueError for an unpickled plan."""
        if self.mesh is None and self.axes:
            raise ValueError(f"this plan has no mesh (it was unpickled): call plan.on(mesh), axes {dict(self.axes)}")
        return self.mesh

    @memo
    def axis_names(self) -> Axes:
        return tuple(name for name, _ in self.axes)

    @memo
    def linked(self) -> Axes:
        """The axes with more than one rank. Rows are cut over these alone, unless the user gives a gather or a wire."""
        return tuple(axis for axis, size in self.axes if size > 1)

    def rule(self, kind: int, over: Axes) -> Rule:
        """Return the rule of a kind in a tree cut over `over`.

        Whole leaves are never cut. Parts of split leaves are cut over ranks with the same part.
        """
        if self.kinds[kind].whole:
            return COPIES
        cuts = self.axis_names if self.gather or self.param_wire or self.grad_wire else self.linked
        return Rule(tuple(axis for axis in over if axis in cuts and axis != self.kinds[kind].split))

    def apart(self, kind: int, over: Axes) -> Axes:
        """Return the axes along which ranks hold different elements, in a tree cut over `over`."""
        return (*self.splits([kind]), *self.rule(kind, over).over)

    def rest(self, axes: Axes, kind: int | None = None) -> Axes:
        """Return the axes with more than one rank, without `axes` and the split axis of a kind."""
        split = None if kind is None else self.kinds[kind].split
        return tuple(axis for axis in self.linked if axis not in axes and axis != split)

    def splits(self, kinds: Iterable[int]) -> Axes:
        """Return the axes that leaves of these kinds are split over."""
        return tuple(dict.fromkeys(split for kind in kinds if (split := self.kinds[kind].split) is not None))

    def num_ranks(self, axes: Axes) -> int:
        """Return the product of these axes' sizes."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes)

    def shard_of(self, x: Tensor, kind: int, axes: Axes) -> Tensor:
        """Return this rank's shard (n / W,) of a tensor (n,) of one kind: a view."""
        return interval(x, self.live_mesh(), self.rule(kind, axes).over)

    @memo
    def paths(self) -> tuple[str, ...]:
        """The dotted path of every leaf, in the order of use; tied leaves have several."""
        return tuple(tree.leaf_paths(self.spec))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every whole leaf."""
        return [self.slots[n].shape for n in self.leaves]

    def container(self, spec: tree.Spec, first: int) -> Container:
        """Return the children of a container of structure `spec`; `first`: the number of its first leaf."""
        # a container and one inside may have the same first leaf
        known, key = self._known.containers, (first, spec.num_nodes)
        if key not in known:
            known[key] = Container(spec)
        return known[key]

    def units_of(self, first: int, num_leaves: int) -> tuple[int, int]:
        """Return the first unit of consecutive leaves, and one past their last unit."""
        known, key = self._known.units, (first, num_leaves)
        if key not in known:  # a tied leaf may be in a distant unit
            units = [self.slots[n].unit for n in self.leaves[first : first + num_leaves]]
            known[key] = min(units), max(units) + 1
        return known[key]

    @memo
    def rows(self) -> dict[tuple[int, int], Row[Slot]]:
        """The whole flat buffers by (unit, kind)."""
        by_place: dict[tuple[int, int], list[Slot]] = {}
        for slot in self.slots:
            by_place.setdefault((slot.unit, slot.kind), []).append(slot)
        # an empty leaf and the next leaf have the same start
        ordered = ((place, sorted(x, key=lambda slot: (slot.start, slot.numel))) for place, x in by_place.items())
        return {place: self._row(*place, slots) for place, slots in ordered}

    def _row(self, unit: int, kind: int, slots: Sequence[Slot]) -> Row[Slot]:
        starts = tuple(slot.start for slot in slots)
        shapes = tuple(x.split.stored(x.shape, self._part(x.split)) if x.split is not None else x.shape for x in slots)
        row = Row(tuple(slots), starts, shapes, self.units[unit].lengths[kind], unit, kind)
        splits = [(slot.split.bounds(slot.shape), slot.split.dim) for slot in slots if slot.split is not None]
        axis = self.kinds[kind].split
        return row if axis is None else replace(row, split=RowSplit(axis, *zip(*splits, strict=True)))

    def _part(self, split: Split) -> int:
        return coordinate(self.live_mesh(), (split.axis,))

    def local_shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of a leaf in this rank's loss."""
        return slot.shape if slot.split is None else slot.split.shape(slot.shape, self._part(slot.split))

    @memo
    def derived(self) -> Derived:
        return Derived()

    @property
    def _known(self) -> Derived:
        # graphs must not change a plan's memos
        return Derived() if torch.compiler.is_compiling() else self.derived

    @memo
    def ahead(self) -> Ahead:
        by_kind = [kind.precision.compute.itemsize for kind in self.kinds]
        return Ahead(tuple(sum(map(mul, unit.lengths, by_kind)) for unit in self.units), self.prefetch)

    @property
    def device(self) -> torch.device:
        """The mesh's device, else torch's default device."""
        return mesh_device(self.live_mesh())

    @memo
    def state_on_host(self) -> bool:
        """True if the optimizer state alone is in host memory: `make_plan(offload="state")`."""
        return any(kind.state_on_host for kind in self.kinds)

    @memo
    def state_crosses(self) -> bool:
        """True if the optimizer state is copied to the device for an update, and back."""
        return self.state_on_host and self.has_streams

    @memo
    def has_streams(self) -> bool:
        return bool(self.axes) and self.device != HOST

    @property
    def crossings(self) -> Crossings:
        """The streams of Note [Crossing over] in `ahead.py`."""
        return present(self.live_mesh()).once(crossings)

    @memo
    def fingerprint(self) -> str:
        """A SHA-256 digest of `describe`."""
        return hashlib.sha256(self.describe().encode()).hexdigest()

    def first_difference(self, other: Plan) -> str:
        """Describe the first difference from another plan."""
        return consensus.first_unlike_line(self.describe(), other.describe(), "{}, there is {}")

    def describe(self) -> str:
        """Return everything that ranks must agree on, as lines of text."""
        lines = [f"leaf {p}" for p in self._leaf_lines()]
        lines += [f"unit {u.name!r} of {u.lengths} elements, regather={u.regather}" for u in self.units]
        lines.append(f"params_over={self.params_over} grads_over={self.grads_over} state_over={self.state_over}")
        lines.append(f"block={self.block} policy={self.policy}")
        lines.append(f"param_wire={self.param_wire} grad_wire={self.grad_wire} together={self.together}")
        lines.append(f"gather={self.gather} prefetch={self.prefetch} data={self.data}")
        return re.sub(r" at 0x[0-9a-f]+", "", "\n".join([*lines, f"tree {self.spec}"]))  # addresses differ by process

    def _leaf_lines(self) -> list[str]:
        lines = []
        for path, number in zip(self.paths, self.leaves, strict=True):
            slot = self.slots[number]
            tied = f" (the tensor of {slot.path!r})" if path != slot.path else ""
            split = f" {slot.split}" if slot.split is not None else ""
            unit = self.units[slot.unit].name
            lines.append(f"{path!r} {self.kinds[slot.kind]}{list(slot.shape)}{split} in unit {unit!r}{tied}")
        return lines

    def holders(self, axes: Axes) -> Holders:
        """Return the ranks that hold each shard of a partition over these axes."""
        sizes = dict(self.axes)
        by_shard = dict[tuple[int, ...], list[int]]()
        for rank in range(math.prod(sizes.values())):
            at = dict(zip(sizes, digits(rank, [*sizes.values()]), strict=True))
            by_shard.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
        return tuple(tuple(by_shard[at]) for at in sorted(by_shard))

    def lines(self, shares: Shares, units: Iterable[int]) -> list[TableLine]:
        """Return lines of units' contents and holders. Equal units share lines: names may differ in numbers.

        `shares`: by column, the axes of a partition, and the bytes of an element of each kind.
        """
        equal = dict[object, list[int]]()
        for number in units:
            unit = self.units[number]
            rows = (self.rows.get((number, kind)) for kind in range(len(self.kinds)))
            leaves = [len(row.leaves) if row else 0 for row in rows]
            key = (re.sub(r"\d+", "0", unit.name), unit.lengths, unit.keep_rule, tuple(leaves))
            equal.setdefault(key, []).append(number)
        pairs = [(numbers, kind) for numbers in equal.values() for kind in range(len(self.kinds))]
        overs = [axes for axes, _ in shares.values()]
        aparts = {self.apart(kind, over) for kind in range(len(self.kinds)) for over in overs}
        holders = {axes: self.holders(axes) for axes in aparts}
        return [self._line(shares, holders, *pair) for pair in pairs if (pair[0][0], pair[1]) in self.rows]

    def _line(self, shares: Shares, holders: Mapping[Axes, Holders], units: Sequence[int], number: int) -> TableLine:
        kind, first, last = self.kinds[number], self.units[units[0]], self.units[units[-1]]
        slots = [slot for unit in units for slot in self.rows[unit, number].leaves]
        numel = first.lengths[number] * len(units)
        shards = {name: numel // self.num_ranks(self.rule(number, axes).over) for name, (axes, _) in shares.items()}
        return TableLine(
            unit=span(first.name, last.name),
            num_units=len(units),
            kind=str(kind),
            brief=" ".join([kind.precision.brief] * (len({k.precision for k in self.kinds}) > 1) + kind.words),
            regather=first.regather,
            leaves=len(slots),
            elements=sum(slot.numel for slot in slots),
            nbytes=numel * kind.dtype.itemsize * self.num_ranks(self.splits([number])),  # of all parts
            shares={
                name: Share(holders[self.apart(number, axes)], shards[name] * sizes[number])
                for name, (axes, sizes) in shares.items()
                if sizes[number]
            },
        )

    def _advice(self) -> list[str]:
        named = [x for unit in self.units for x in unit.joined or (unit.name,) if x not in (ROOT, *ENDS)]
        siblings = [path for path, *_ in repeated_siblings(self.spec, [self.slots[n] for n in self.leaves])]
        said = ["Units are repeated siblings, as found without units=."] * (named == siblings != [])
        return said + self._largest(self.ahead.sizes) + self._smallest(self.ahead.sizes)

    def _largest(self, sizes: Sequence[int]) -> list[str]:
        largest = max(sizes, default=0)
        if self.num_ranks(self.params_over) == 1 or 2 * largest <= sum(sizes):
            return []
        name = self.units[sizes.index(largest)].name
        return [f"Unit {name} is {largest / sum(sizes):.0%} of the parameters, gathered at once: units= can cut it."]

    def _smallest(self, sizes: Sequence[int]) -> list[str]:
        joined = [unit for unit in self.join(_BUCKET).units if unit not in self.units]
        names = {name for unit in joined for name in unit.joined}
        small = [nbytes for unit, nbytes in zip(self.units, sizes, strict=True) if unit.name in names]
        is_sent = any(kind.trainable or (self.params_over and not kind.whole) for kind in self.kinds)
        if self.num_ranks(self.axis_names) == 1 or not is_sent or len(small) - len(joined) < _MANY:
            return []
        units = f"{len(small)} units of {size(sum(small) // len(small))}"
        return [f"{units}: bucket=1 << 20 would send {len(joined)} in place of {len(small)} messages."]

    def picture(self, *above: str) -> Picture:
        """Return a picture of the holders of each unit, below the lines `above`."""
        trained = [kind.dtype.itemsize * kind.trainable for kind in self.kinds]
        shares = {
            "parameters": (self.params_over, [kind.dtype.itemsize for kind in self.kinds]),
            "gradients": (self.grads_over, [kind.precision.grads.itemsize * kind.trainable for kind in self.kinds]),
            "state": (self.state_over, trained),
        }
        over = {name: ",".join(axes) for name, (axes, _) in shares.items()}
        regather = {unit.regather for unit in self.units}
        names = ("params_over", "grads_over", "state_over")
        words = [f"{name}={axes or '-'}" for name, axes in zip(names, over.values(), strict=True)]
        words += [f"regather={text}" for text in regather if len(regather) == 1]
        words += ["offload=state"] * self.state_on_host
        numel = sum(slot.numel for slot in self.slots)
        head = f"Plan on {dict(self.axes) or 'one device'}: leaves {len(self.slots):,}, elements {numel:,}"
        said = {name: f"over {axes}" if axes else "whole on every rank" for name, axes in over.items()}
        note = "Bytes of a line's units, and of a rank; state: of one tensor (AdamW has two)."
        title = [*above, head, *textwrap.wrap(" ".join(words), 80), *self._advice(), note]
        return picture(title, said, self.lines(shares, range(len(self.units))))

    def __str__(self) -> str:
        return self.picture().text

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def check_plain(name: str, params: Tree) -> None:
    """Raise TypeError if `params` contains sharded tensors or a plan."""
    for node in tree.tops(params, lambda x: isinstance(x, Parts | Branch | Plan)):
        if isinstance(node, Parts | Branch):
            raise TypeError(wrong(name, node, "a tree of whole tensors", "fshard.gather_params gives them"))
        if isinstance(node, Plan):
            raise TypeError(wrong(name, node, "a tree of whole tensors", "Are the arguments in the call's order?"))
