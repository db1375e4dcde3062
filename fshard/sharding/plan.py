"""Plans: which rank owns which interval of which flat buffer, computed once, from shapes alone.

Note [Layout]
    The leaves of a tree are grouped in *units* (leaves that are gathered together) and, inside a unit, by *kind*
    (dtype, trainable or frozen, sharded or whole, on the device or in host memory). The leaves of one unit and kind lie
    in one flat buffer, in the order of the tree. Every leaf starts at a multiple of 16 bytes in each dtype of the
    buffer, because kernels load 16 bytes at once, and multiply a matrix that starts elsewhere more slowly. The end of
    the buffer is padded with zeros so that the length of the smallest interval of a rank is such a multiple, too.
    Rank r along the axes of a partition owns the r-th of equal intervals. A rank holds one tensor per kind: its
    intervals of all units, one after the other.
    Each of the three partitions (params, grads, state) has the axes of the one before and possibly more, and the first
    axis varies slowest. So an interval of a finer partition lies inside one interval of a coarser partition.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate, mesh_device, num_ranks, present
from ..comm.one_host import connected
from ..comm.reduction import Gather
from ..comm.wire import Wire
from ..core import tree
from ..core.arguments import check_flags, check_has, check_whole, wrong
from ..core.lazy import Branch
from ..core.tree import Tree
from ..layout.layout import Derived
from ..layout.pieces import Parts
from .leaves import check_tensors, first_places, is_differentiable, join_frozen
from .offload import Crossings, crossings
from .partitions import Regather, kept_over, partitions
from .precision import Policy, Precision, policy_of, precisions
from .units import ROOT, Where, claim_leaves, claim_policies, claim_units

_ALIGN = 16  # bytes


@dataclass(frozen=True)
class Kind:
    """The properties that all leaves of one flat buffer have in common."""

    precision: Precision
    trainable: bool
    whole: bool
    host: bool  # stored in host memory

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the leaves are stored."""
        return self.precision.storage

    @property
    def aligned(self) -> int:
        """The alignment in elements: a multiple of 16 bytes in each dtype in which the flat buffer is held."""
        return max(1, _ALIGN // self.precision.itemsize)

    def __str__(self) -> str:
        words = ["frozen"] * (not self.trainable) + ["whole"] * self.whole + ["host"] * self.host
        return " ".join([str(self.precision), *words])


@dataclass(frozen=True)
class Slot:
    """The position of a leaf: elements [start, start + numel) of the flat buffer of its unit and kind."""

    path: str
    shape: tuple[int, ...]
    kind: int
    unit: int
    start: int

    def __hash__(self) -> int:
        return hash((self.unit, self.kind, self.start))  # slots are keys in a step: that of all fields takes longer

    @property
    def numel(self) -> int:
        """The number of elements of the leaf."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Unit:
    """Leaves that are gathered together: `lengths[k]` elements, padding included, in the flat buffer of kind k.

    `kept` says what stays of the gathered buffers from the forward to the backward: nothing (None), all of them (()),
    or copies that are cut over these axes, the last of `params_over`.
    """

    name: str
    lengths: tuple[int, ...]
    kept: Axes | None = None

    @property
    def regather(self) -> str:
        """The argument of `make_plan`, as text."""
        return ", ".join(self.kept) if self.kept else str(self.kept is None)


@tree.constant
@dataclass(frozen=True)
class Plan:
    """A layout of a tree over the axes of a mesh: immutable, hashable, picklable, the same on every rank.

    `slots[leaves[i]]` is the position of leaf i, and `claims[i]` the unit that claimed it. A tied leaf has the slot of
    its first occurrence, which may be in another unit. Pickling drops the mesh: `plan.on(mesh)` sets it again.
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
    slices: int = 8
    gather: Gather | None = None
    mesh: AnyMesh = field(default=None, compare=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        # the fields alone: a cached index is this rank's, and the mesh has process groups
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "mesh": None}

    def __deepcopy__(self, memo: dict[int, object]) -> Plan:
        return self  # immutable; a copied state keeps its mesh

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @property
    def root(self) -> int | None:
        """The number of the root unit, which holds all leaves that no other unit claims; None if there are none."""
        return 0 if self.units and self.units[0].name == ROOT else None

    def on(self, mesh: AnyMesh) -> Plan:
        """Return this plan on another mesh with the same axes (ValueError if the axes differ)."""
        sizes = axis_sizes(mesh)
        if tuple(sizes.items()) != self.axes:
            raise ValueError(
                f"the plan was made for a mesh with axes {dict(self.axes)}, this one has {sizes}: "
                "make the plan again for this mesh, and shard whole parameters with it"
            )
        return replace(self, mesh=connected(mesh))

    def live_mesh(self) -> AnyMesh:
        """Return the mesh. ValueError for an unpickled plan, which has none."""
        if self.mesh is None and self.axes:
            raise ValueError(f"this plan has no mesh (it was unpickled): call plan.on(mesh), axes {dict(self.axes)}")
        return self.mesh

    def over(self, axes: Axes, kind: int) -> Axes:
        """Return the axes over which a kind is partitioned: `axes`, or none for leaves kept whole."""
        return () if self.kinds[kind].whole else axes

    def rest(self, axes: Axes) -> Axes:
        """Return the axes of the mesh that are not in `axes`."""
        return tuple(name for name, _ in self.axes if name not in axes)

    def num_parts(self, axes: Axes) -> int:
        """Return the number of intervals of a partition over these axes."""
        sizes = dict(self.axes)
        return math.prod(sizes[axis] for axis in axes)

    def length(self, unit: int, kind: int, axes: Axes) -> int:
        """Return the number of elements of a unit and kind in one interval over these axes."""
        return self.units[unit].lengths[kind] // self.num_parts(self.over(axes, kind))

    def offset(self, unit: int, kind: int, axes: Axes) -> int:
        """Return where a unit begins in a rank's tensor of one kind; one past the last unit: where the tensor ends."""
        return self._offsets[self.over(axes, kind)][kind][unit]

    def index(self, axes: Axes) -> int:
        """Return the number of this rank's interval; `axes` are those of a partition, or of copies that stay."""
        return self._indices[axes]

    @cached_property
    def _indices(self) -> dict[Axes, int]:
        mesh = self.live_mesh()
        partitions = {(), self.params_over, self.grads_over, self.state_over}
        return {axes: coordinate(mesh, axes) for axes in partitions | {unit.kept or () for unit in self.units}}

    @cached_property
    def places(self) -> dict[tuple[int, int], list[Slot]]:
        """The slots by (unit, kind), in the order in which they lie in the flat buffer."""
        by_place: dict[tuple[int, int], list[Slot]] = {}
        for slot in self.slots:
            by_place.setdefault((slot.unit, slot.kind), []).append(slot)
        return by_place

    @cached_property
    def derived(self) -> Derived:
        """Memoized results computed from this plan, which are freed with the plan."""
        return Derived()

    @cached_property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return mesh_device(self.live_mesh())

    @property
    def crossings(self) -> Crossings:
        """The streams beside the computation (Note [Crossing over] in `offload`), made once for the mesh."""
        return present(self.live_mesh()).once(crossings)

    @cached_property
    def _offsets(self) -> dict[Axes, list[list[int]]]:
        def ends(axes: Axes, kind: int) -> list[int]:
            lengths = (unit.lengths[kind] // self.num_parts(axes) for unit in self.units)
            return list(accumulate(lengths, initial=0))  # one more than there are units

        # () is the partition of leaves kept whole, and of gathered buffers
        partitions = {(), self.params_over, self.grads_over, self.state_over}
        return {axes: [ends(axes, kind) for kind in range(len(self.kinds))] for axes in partitions}

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 digest of everything that must be equal on all ranks."""
        return hashlib.sha256(self.describe().encode()).hexdigest()

    def first_difference(self, other: Plan) -> str:
        """Describe the first difference between this plan and another one."""
        return consensus.first_difference(self.describe(), other.describe(), "{}, there is {}")

    def describe(self) -> str:
        """Return everything that must be equal on all ranks, as lines of text."""
        lines = [f"leaf {p}" for p in self._leaf_lines()]
        lines += [f"unit {u.name!r} of {u.lengths} elements, regather={u.regather}" for u in self.units]
        lines.append(f"params_over={self.params_over} grads_over={self.grads_over} state_over={self.state_over}")
        lines.append(f"block={self.block} policy={self.policy}")
        lines.append(f"param_wire={self.param_wire} grad_wire={self.grad_wire} together={self.together}")
        lines.append(f"slices={self.slices} gather={self.gather}")
        return "\n".join([*lines, f"tree {self.spec}"])

    def _leaf_lines(self) -> list[str]:
        lines = []
        for path, number in zip(tree.paths(self.spec), self.leaves, strict=True):
            slot = self.slots[number]
            tied = f" (the tensor of {slot.path!r})" if path != slot.path else ""
            lines.append(
                f"{path!r} {self.kinds[slot.kind]}{list(slot.shape)} in unit {self.units[slot.unit].name!r}{tied}"
            )
        return lines

    def __str__(self) -> str:
        over = {name: ", ".join(axes) or "-" for name, axes in _strategy(self).items()}
        head = " ".join(f"{name}={axes}" for name, axes in over.items())
        width = max([len(u.name) for u in self.units] + [4])
        choices = list(dict.fromkeys(unit.regather for unit in self.units))
        head += f" regather={' '.join(choices)}" * (len(choices) == 1)
        lines = [f"Plan on {dict(self.axes) or 'one device'}: {head}"]
        lines.append(f"{'unit':<{width}}  {'leaves':>6}  {'elements':>12}  {'bytes':>14}  {'bytes per rank':>14}")
        lines[1] += "  regather" * (len(choices) > 1)
        for number, unit in enumerate(self.units):
            slots = [s for s in self.slots if s.unit == number]
            sizes = [k.dtype.itemsize for k in self.kinds]
            total = sum(length * size for length, size in zip(unit.lengths, sizes, strict=True))
            on_rank = sum(self.length(number, k, self.params_over) * size for k, size in enumerate(sizes))
            numel = sum(s.numel for s in slots)
            lines.append(f"{unit.name:<{width}}  {len(slots):>6}  {numel:>12,}  {total:>14,}  {on_rank:>14,}")
            lines[-1] += f"  {unit.regather}" * (len(choices) > 1)
        return "\n".join(lines)


def _strategy(plan: Plan) -> dict[str, Axes]:
    return {"params_over": plan.params_over, "grads_over": plan.grads_over, "state_over": plan.state_over}


def make_plan(
    params: Tree,
    mesh: AnyMesh = None,
    *,
    units: Where | int = None,
    params_over: str | Sequence[str] = "shard",
    grads_over: str | Sequence[str] = "shard",
    state_over: str | Sequence[str] = "shard",
    regather: Regather | Mapping[str, Regather] = True,
    whole: Where = None,
    frozen: Where = None,
    host: Where = None,
    block: int = 1,
    policy: Policy | str | None = None,
    param_wire: Wire | None = None,
    grad_wire: Wire | None = None,
    together: bool = False,
    slices: int = 8,
    gather: Gather | None = None,
) -> Plan:
    """Lay a tree of tensors (real, meta or fake) out over the axes of a mesh.

    Which leaves are gathered together, and over which axes:

    - `units`: the subtrees that are gathered together: dotted path patterns (`*` one component, `**` any number), a
      predicate `(path, subtree) -> bool`, or a number of elements at which a unit is full. All other leaves are the
      root unit.
    - `params_over`, `grads_over`, `state_over`: the names of the axes over which parameters, gradients and optimizer
      state are partitioned, each extending the one before.
    - `regather`: gathered parameters are freed after the forward and gathered again in the backward (True), or stay
      (False). With the last axis of `params_over` (or several), a copy stays that is cut over this axis alone, and the
      backward gathers it over this axis: inside a host, say. A dict gives one of these to each unit: its keys are
      names or patterns of units (`"(root)"` is the root), the first that matches counts; other units have True.

    Leaves with another treatment; `whole`, `frozen` and `host` are each a pattern, several patterns, or a predicate.
    Integer leaves are always frozen. If some leaves of a tree require a gradient, as in a module, leaves that do not
    are frozen. Leaves that are the same elements of the same memory (one tensor, its `.detach()` or `.data`) are tied:
    they are stored once, and what selects one of their places selects the leaf.

    - `whole`: these leaves stay whole on every rank.
    - `frozen`: these leaves get no gradient and no optimizer state.
    - `host`: parameters, gradients and optimizer state of these leaves lie in host memory, where the optimizer updates
      them; the device of the mesh computes with them.
    - `block`: leaves start at multiples of `block` elements, and shard boundaries fall on them (for state in blocks).

    Dtypes, and what is sent:

    - `policy`: the dtypes in which floating leaves are stored, computed with and reduced (a `Policy`, or its text).
    - `param_wire`, `grad_wire`: how shards and gradients are encoded to be sent (`fshard.wire`).
    - `together`: all dtypes of a unit are gathered in one message.
    - `gather`: an object whose `all_gather` gathers the shards of parameters (`fshard.reduction.Gather`).
    - `slices`: a step with `reduction="tree"` cuts the batch of all ranks into this number of slices, a power
      of two.

    On a mesh of processes the plans of all ranks are compared.

    Raises TypeError (an argument of a wrong type), ValueError (wrong axes or patterns, leaves that are not plain dense
    tensors or share part of their memory, `frozen` that contradicts `requires_grad`) and MismatchError (plans of ranks
    differ).

    >>> plan = make_plan({"embed": torch.zeros(4, 2), "blocks": [torch.zeros(3), torch.zeros(3)]}, units=["blocks.*"])
    >>> [unit.name for unit in plan.units]
    ['(root)', 'blocks.0', 'blocks.1']

    Source: the flat parameter of Zhao et al., PyTorch FSDP (2023); the partitions of Rajbhandari et al., ZeRO (2020).
    """
    _check_arguments(block, slices, together, gather, param_wire=param_wire, grad_wire=grad_wire)
    _check_host(host, mesh)
    sizes, policy = axis_sizes(mesh), policy_of(policy)
    over = partitions(sizes, params_over, grads_over, state_over)
    check_plain("params", params)
    flat, spec = tree.flatten(params)
    check_tensors(flat, tree.paths(spec))
    origins = first_places(flat, tree.paths(spec))
    slot_of = {origin: number for number, origin in enumerate(dict.fromkeys(origins))}
    names, claims = claim_units(params, spec, flat, origins, units)
    kept = kept_over(names, regather, sizes, over[0])
    chosen = {"whole": whole, "frozen": frozen, "host": host}
    is_whole, is_frozen, is_host = (claim_leaves(params, spec, origins, where, name) for name, where in chosen.items())
    is_frozen = join_frozen(is_frozen, flat, origins, tree.paths(spec))
    dtypes = precisions([leaf.dtype for leaf in flat], claim_policies(params, spec, origins, policy), policy)
    trains = [is_differentiable(leaf) and not still for leaf, still in zip(flat, is_frozen, strict=True)]
    # only first occurrences: tied leaves have the kind of the first
    kind_of = {i: Kind(dtypes[i], trains[i], is_whole[i], is_host[i]) for i in slot_of}
    kinds = tuple(dict.fromkeys(kind_of.values()))
    slots, lengths = _place(flat, tree.paths(spec), kind_of, kinds, claims, len(names), num_ranks(mesh), block)
    plan = Plan(
        spec,
        tuple(slot_of[i] for i in origins),
        tuple(claims),
        slots,
        tuple(Unit(name, tuple(row), axes) for name, row, axes in zip(names, lengths, kept, strict=True)),
        kinds,
        tuple(sizes.items()),
        *over,
        block,
        policy.named(),
        param_wire,
        grad_wire,
        together,
        slices,
        gather,
        connected(mesh),
    )
    consensus.check_same(plan.mesh, plan.describe(), "the plan")
    return plan


def _check_arguments(block: int, slices: int, together: bool, gather: Gather | None, **wires: Wire | None) -> None:
    check_whole("block", block, what="a number of elements")
    check_whole("slices", slices, what="a power of two")
    if slices.bit_count() > 1:
        raise ValueError(f"slices={slices}: expected a power of two, the most ranks a run may ever have")
    check_flags(together=together)
    if gather is not None:
        check_has("gather", gather, ("all_gather",), "an object that gathers, a fshard.reduction.Gather")
    for name, wire in wires.items():
        if wire is not None:
            check_has(name, wire, ("encode", "decode", "feedback"), "a wire, as fshard.wire.Int8() is")
            if wire.feedback and name == "param_wire":
                raise ValueError(
                    f"param_wire={wire}: expected a wire without feedback, got one that has much of what it is given "
                    "sent later: parameters are sent anew each time, so that never arrives. Use it as grad_wire."
                )


def check_plain(name: str, params: Tree) -> None:
    """Raise TypeError if `params` contains sharded tensors or a plan instead of whole tensors."""
    for node in tree.tops(params, lambda x: isinstance(x, Parts | Branch | Plan)):
        if isinstance(node, Parts | Branch):
            raise TypeError(wrong(name, node, "a tree of whole tensors", "fshard.gather_params gives them"))
        if isinstance(node, Plan):
            raise TypeError(wrong(name, node, "a tree of whole tensors", "Are the arguments in the call's order?"))


def _check_host(host: Where, mesh: AnyMesh) -> None:
    if host is not None and mesh is None:
        raise ValueError(
            f"host={host!r}: expected a mesh, which says where to compute, got None. Give a mesh of one rank: "
            "init_device_mesh('cuda', (1,), mesh_dim_names=('shard',))"
        )


def _place(
    flat: Sequence[Tensor],
    paths: Sequence[str],
    kind_of: dict[int, Kind],
    kinds: Sequence[Kind],
    claims: Sequence[int],
    num_units: int,
    mesh_size: int,
    block: int,
) -> tuple[tuple[Slot, ...], list[list[int]]]:
    """Return the slot of each leaf, and the padded length of every unit and kind.

    Leaves start at multiples of `block` and of 16 bytes; lengths are multiples of that times the number of ranks of the
    whole mesh, so that an all-reduce over any axis divides evenly, too.
    """
    lengths = [[0] * len(kinds) for _ in range(num_units)]
    slots, steps = [], [math.lcm(kind.aligned, block) for kind in kinds]
    for i, kind in kind_of.items():
        unit, k = claims[i], kinds.index(kind)
        slots.append(Slot(paths[i], tuple(flat[i].shape), k, unit, lengths[unit][k]))
        lengths[unit][k] += -(-flat[i].numel() // steps[k]) * steps[k]  # rounded up
    multiples = [step * mesh_size for step in steps]
    padded = [[-(-n // multiple) * multiple for n, multiple in zip(row, multiples, strict=True)] for row in lengths]
    return tuple(slots), padded
