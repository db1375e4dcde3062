"""Planning: check arguments, assign leaves to units, lay leaves out in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import AnyMesh, Axes, axis_sizes, num_ranks
from ..comm.reduction import Gather, Wire
from ..core import tree
from ..core.arguments import check_flags, check_has, check_whole
from ..core.tree import Tree
from ..hosts.one_host import connected
from ..layout.layout import Split
from .leaves import check_tensors, first_places, is_differentiable, read_frozen
from .partitions import Over, Regather, axes_of, keep_rules, overs_of, partitions
from .plan import Kind, Plan, Slot, Unit, check_plain
from .precision import Policy, Precision, SomePolicy, policy_of, precisions
from .units import Units, Where, claim_leaves, claim_policies, claim_splits, claim_units


def make_plan(
    params: Tree,
    mesh: AnyMesh = None,
    *,
    units: Units = None,
    strategy: str | None = None,
    params_over: Over = None,
    grads_over: Over = None,
    state_over: Over = None,
    regather: Regather | Mapping[str, Regather] = True,
    whole: Where = None,
    frozen: Where = None,
    offload: Where = None,
    split: Mapping[str, tuple[str, int] | tuple[str, int, int]] | None = None,
    data: str | Sequence[str] | None = None,
    block: int = 1,
    policy: SomePolicy = None,
    param_wire: Wire | None = None,
    grad_wire: Wire | None = None,
    together: bool = False,
    gather: Gather | None = None,
    prefetch: int | None = None,
    bucket: int = 0,
) -> Plan:
    """Lay `params`, a tree of tensors (real, meta or fake), out over the axes of a mesh.

    Without options each layer is a unit, and parameters, gradients and optimizer state are cut over all ranks (ZeRO-3).

    >>> params = {"embed": torch.zeros(4, 2), "blocks": [torch.zeros(2, 2), torch.zeros(2, 2)]}
    >>> [unit.name for unit in make_plan(params).units]
    ['(first)', 'blocks.0', 'blocks.1']

    Units and axes:

    - `units`: the subtrees to gather as one unit each. Left out: repeated siblings, the outermost first: their leaves
      have the same names, shapes and dtypes, one has two dims, and a list's leaves may be siblings. `[]`: one unit.
      Else dotted path patterns (`*` one component, `**` any number; an existing path means itself), a predicate
      `(path, subtree) -> bool`, or a number of elements at which a unit is full. A tuple of patterns in the list is one
      unit, adjacent or not (`[("embed", "head"), "blocks.*"]`), and stays from its second gather to the end of the
      forward. Leaves before the first selected one are the unit `(first)`, leaves after the last one `(last)`. Other
      leaves, and leaves tied between these two, are the unit `(root)`, gathered once for a forward. A leaf tied
      across other units belongs to the first.
    - `strategy`: a word for the next four arguments: "ddp", "zero1", "zero2", "zero3" (the default), "hsdp" (zero3 on a
      mesh with an axis `replicate`) or "hsdp-all" (hsdp, optimizer state cut over `replicate` as well).
    - `params_over`, `grads_over`, `state_over`: the axes over which parameters, gradients and optimizer state are
      partitioned. Each must include the axes of the argument before. Left out: the only axis of the mesh, else `shard`.
    - `regather`: True frees gathered parameters during the forward, and gathers them again in the backward; False keeps
      them. Names of the last axes of `params_over` (the axis inside a host, say) keep a copy cut over these axes, and
      the backward gathers over these alone. A dict has the values of units, by names or patterns (`"(last)"`, say) of
      units or of their subtrees; the first match counts, other units have True.

    Leaves by themselves. `whole`, `frozen` and `offload` each take a pattern, several patterns, or a predicate.
    Integer leaves are always frozen. If some leaves require a gradient, as in a module, each `nn.Parameter` without
    `requires_grad` is frozen. A tree of plain tensors trains; next to a module's parameters a plain tensor outside
    `frozen` is a ValueError. Leaves with the same elements of the same memory (one tensor, its `.detach()` or `.data`)
    are tied: they are stored once, and selected by any of their paths.

    - `whole`: these leaves stay whole on every rank.
    - `frozen`: these leaves get no gradient and no optimizer state. A tied leaf with a path outside is a warning.
    - `offload`: parameters, gradients and optimizer state of these leaves lie in host memory, where the optimizer
      updates them; the device of the mesh computes with them. The word "state" keeps only the optimizer state there:
      an update copies the state of one unit after the other to the device and back.
    - `split`: leaves with a different part on each rank along an axis. A dict maps patterns to (axis, dim), or to
      (axis, dim, blocks) for a dim of `blocks` blocks end to end, each split by itself. `shard_params` takes and
      `gather_params` gives the whole leaf. A loss sees this rank's part, cut as by `torch.chunk`. Gradients of split
      leaves are not summed over the axis; all other gradients are.
    - `policy`: the dtypes in which floating leaves are stored, computed with and reduced (a `Policy`, its text, or
      a dict of these by subtrees: `{"net": net.policy("compute=bf16"), "critic": "compute=f32"}`).

    For experts:

    - `data`: the axes along which batches differ. Default: all axes without split leaves.
    - `block`: leaves and shards start at multiples of `block` elements (for optimizer state in blocks).
    - `param_wire`, `grad_wire`: the encodings of sent shards and gradients (`fshard.wire`).
    - `together`: gather all dtypes of a unit in one message.
    - `gather`: an object that gathers the shards of parameters (`fshard.reduction.Gather`).
    - `prefetch`: the number of units gathered ahead of the unit in use, and of units reduced behind it. Default: one
      unit, or several small units if these and the unit in use take at most twice the memory of the largest unit
      (Note [Two units] in `plan/ahead.py`).
    - `bucket`: join neighbouring units up to so many bytes; 0 joins none. For units of some kilobytes, messages cost
      more than bytes: join these up to 1 MiB (`1 << 20`). Joined units need two to three times the bucket in memory.

    Raises TypeError (an argument of a wrong type), ValueError (wrong axes or patterns, leaves that are not plain dense
    tensors or share part of their memory, plain tensors next to parameters, `frozen` that contradicts `requires_grad`)
    and, on a mesh of processes, MismatchError (plans of ranks differ).

    Source: the flat parameter of Zhao et al., PyTorch FSDP (2023); the partitions of Rajbhandari et al., ZeRO (2020).
    """
    _check_arguments(offload, mesh, block, together, param_wire=param_wire, grad_wire=grad_wire)
    _check_travel(gather, prefetch, bucket)
    sizes, policy = axis_sizes(mesh), policy_of(policy)
    over = partitions(sizes, overs_of(sizes, strategy, regather, (params_over, grads_over, state_over)))
    check_plain("params", params)
    flat, spec = tree.flatten(params)
    paths = tree.leaf_paths(spec)
    check_tensors(flat, paths)
    origins = first_places(flat, paths)
    slot_of = {origin: number for number, origin in enumerate(dict.fromkeys(origins))}
    names, claims = claim_units(params, spec, flat, origins, units)
    splits = claim_splits(params, origins, split or {}, sizes)
    kind_of = _kinds(params, origins, {"whole": whole, "frozen": frozen, "offload": offload}, policy, splits)
    steps = {kind: math.lcm(kind.aligned, block) for kind in dict.fromkeys(kind_of.values())}
    slots, lengths = _place_units(flat, paths, kind_of, steps, claims, len(names), splits)
    plan = Plan(
        spec=spec,
        leaves=tuple(slot_of[i] for i in origins),
        claims=tuple(claims),
        slots=slots,
        units=tuple(map(Unit, names, lengths, keep_rules(names, regather, spec, sizes, over), names.values())),
        kinds=tuple(steps),
        axes=tuple(sizes.items()),
        **over,
        block=block,
        policy=policy.named(),
        param_wire=param_wire,
        grad_wire=grad_wire,
        together=together,
        gather=gather,
        prefetch=prefetch,
        data=_data_axes(data, sizes, splits.values(), over["state_over"]),
        mesh=connected(mesh),
    ).join(bucket)
    return _same_on_ranks(_padded(plan, [step * num_ranks(mesh) for step in steps.values()]))


def _data_axes(
    data: str | Sequence[str] | None, sizes: Mapping[str, int], splits: Iterable[Split], state_over: Axes
) -> Axes:
    """Return the axes along which batches differ. ValueError if splits and partitions leave them open."""
    if data is not None:
        named = axes_of("data", data, sizes) if sizes else ()  # on one device axes may have any names
        return tuple(axis for axis in sizes if axis in named)
    axes = {split.axis for split in splits}
    if both := [axis for axis in state_over if axis in axes]:
        raise ValueError(
            f"split: leaves are split over {both[0]!r}, and others partitioned over it (state_over={state_over}). Do "
            f"batches differ along {both[0]!r}? Say along which axes they do: data={tuple(sizes)!r} if they do there, "
            f"as for experts; data={tuple(axis for axis in sizes if axis != both[0])!r} if they are equal, as for "
            "columns and rows of a matrix"
        )
    return tuple(axis for axis in sizes if axis not in axes)


def _padded(plan: Plan, multiples: Sequence[int]) -> Plan:
    """Pad lengths to multiples: an all-reduce along any axes then has equal parts."""
    padded = (replace(unit, lengths=tuple(map(_rounded_up, unit.lengths, multiples))) for unit in plan.units)
    return replace(plan, units=tuple(padded))


def _same_on_ranks(plan: Plan) -> Plan:
    consensus.check_same(plan.mesh, plan.describe(), "the plan")
    return plan


def _check_arguments(offload: Where, mesh: AnyMesh, block: int, together: bool, **wires: Wire | None) -> None:
    if offload is not None and mesh is None:
        raise ValueError(
            f"offload={offload!r}: expected a mesh, which says where to compute, got None. Give a mesh of one rank: "
            "init_device_mesh('cuda', (1,), mesh_dim_names=('shard',))"
        )
    check_whole("block", block, what="a number of elements")
    check_flags(together=together)
    for name, wire in wires.items():
        if wire is not None:
            check_has(name, wire, ("encode", "decode"), "a wire, as fshard.wire.Int8() is")


def _kinds(
    params: Tree, origins: Sequence[int], wheres: Mapping[str, Where], policy: Policy, splits: Mapping[int, Split]
) -> dict[int, Kind]:
    """Return the kind of each leaf, by the number of its first occurrence."""
    flat, spec = tree.flatten(params)
    # the word "state", unless a subtree has this name
    if on_host := wheres["offload"] == "state" and "state" not in map(str, tree.names(spec)):
        wheres = {**wheres, "offload": None}
    is_whole, is_host = (claim_leaves(params, spec, origins, wheres[name], name) for name in ("whole", "offload"))
    picked = claim_leaves(params, spec, range(len(flat)), wheres["frozen"], "frozen")  # by path
    is_frozen = read_frozen(flat, origins, tree.leaf_paths(spec), picked)
    dtypes = precisions([leaf.dtype for leaf in flat], claim_policies(params, spec, origins, policy), policy)
    trains = [is_differentiable(leaf) and not still for leaf, still in zip(flat, is_frozen, strict=True)]
    axis_of = {i: split.axis for i, split in splits.items()}
    rows = zip(dtypes, trains, is_whole, is_host, map(axis_of.get, origins), strict=True)
    return {i: Kind(*row, on_host and trains[i]) for i, row in enumerate(rows) if origins[i] == i}


def _check_travel(gather: Gather | None, prefetch: int | None, bucket: int) -> None:
    if gather is not None:
        check_has("gather", gather, ("all_gather",), "an object that gathers, a fshard.reduction.Gather")
    if prefetch is not None:
        check_whole("prefetch", prefetch, 0, what="a number of units, or None")
    check_whole("bucket", bucket, 0, what="a number of bytes")


def _place_units(
    flat: Sequence[Tensor],
    paths: Sequence[str],
    kind_of: dict[int, Kind],
    steps: Mapping[Kind, int],
    claims: Sequence[int],
    num_units: int,
    splits: Mapping[int, Split],
) -> tuple[tuple[Slot, ...], list[tuple[int, ...]]]:
    """Return the slot of each leaf, and the length of every unit and kind."""
    lengths, slots = [[0] * len(steps) for _ in range(num_units)], []
    number_of = {kind: k for k, kind in enumerate(steps)}
    for i, kind in kind_of.items():
        unit, k = claims[i], number_of[kind]
        shape, split = tuple(flat[i].shape), splits.get(i)
        slots.append(Slot(paths[i], shape, kind.dtype, k, unit, lengths[unit][k], split=split))
        longest = shape if split is None else split.stored(shape, 0)
        lengths[unit][k] += _rounded_up(math.prod(longest), steps[kind])
    return tuple(slots), [tuple(row) for row in lengths]


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def with_policy(plan: Plan, policy: SomePolicy) -> Plan:
    """Return the plan of the same shards under another policy.

    ValueError if the policy changes a stored dtype, or has different dtypes for leaves of one flat buffer.
    """
    policy = policy_of(policy)
    slots, first = [plan.slots[n] for n in plan.leaves], dict[int, int]()
    origins = [first.setdefault(number, i) for i, number in enumerate(plan.leaves)]
    likes = [torch.empty(slot.shape, dtype=slot.dtype, device="meta") for slot in slots]
    chosen = claim_policies(tree.unflatten(plan.spec, likes), plan.spec, origins, policy)
    by_kind = dict[int, tuple[Precision, str]]()
    for slot, new in zip(slots, precisions([like.dtype for like in likes], chosen, policy), strict=True):
        before, path = by_kind.setdefault(slot.kind, (new, slot.path))
        if new.storage != slot.dtype or new != before:
            stored, beside = f"storage={slot.dtype}, as it is", f"the dtypes of {path!r}, with which it lies"
            raise ValueError(
                f"with_policy: leaf {slot.path!r}: expected {stored if new == before else beside}"
                f" in the shards, got {new}. Make a plan with this policy, and shard whole parameters with it."
            )
    kinds = tuple(replace(kind, precision=by_kind[number][0]) for number, kind in enumerate(plan.kinds))
    return replace(plan, kinds=kinds, policy=policy.named())
