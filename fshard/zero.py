"""ZeRO over whole parameters: an optimizer whose state is partitioned by rank, as a pure function.

Note [A step of ZeRO]
    Every rank has all parameters and a part of the optimizer's state. It updates its part of the parameters and gets
    the other parts from the other ranks. With partition="flat" the parts are equal intervals of flat buckets of leaves,
    laid out by a plan whose parameters are not sharded and whose state is; with "leaf" they are whole leaves.
    Local gradients are reduced straight into the part (ZeRO-2); reduced ones are only read there (ZeRO-1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from . import comm, host, tree
from .comm import Axes, Mesh
from .move import collect, on_rank, owned
from .parts import EVERYONE, Layout, Parts, Pieces, layout_of, pick
from .plan import Plan, Slot, make_plan
from .shard import Sharded, cut, intervals, local_numel, pack, whole_view
from .transform import Transform, as_transform

BUCKET = 1 << 22  # elements
_LARGE = 1 << 16  # elements of a leaf from which it is better read where it lies than copied next to others


@dataclass(frozen=True)
class ZeroState:
    """The state of the optimizer for this rank's part, and how parameters are parted: a `Plan`, or a `Layout`."""

    inner: Any
    parting: Any


tree.register_fields(ZeroState, ("inner",), ("parting",), names=("",))  # a whole state says nothing of partitions


def zero(
    tx: Any,
    mesh: Mesh = None,
    partition: str = "flat",
    grads: str = "reduced",
    *,
    over: str | Sequence[str] | None = None,
    bucket: int = BUCKET,
    block: int = 1,
) -> Transform:
    """`tx` over whole parameters, its state partitioned by rank: every rank updates a part, and gets the others'.

    `partition` is "flat" (equal intervals of buckets of about `bucket` elements, even to 16 bytes; for optimizers that
    act on elements, and for those of fshard.optim) or "leaf" (whole leaves, the largest first to the rank with least;
    for any optimizer). `grads` is "reduced" (the same on all ranks: ZeRO-1) or "local" (each rank's own, which are
    summed over the whole mesh straight into the part: ZeRO-2). `over` names the axes that ranks are counted along: by
    default "shard", or all where the mesh has none; `block` is `make_plan`'s. `step` gives new whole parameters, and
    starts to gather a bucket as soon as it is updated; `update` gives whole updates. Every rank must call `init` and
    each step.

    Over `Sharded` parameters the state is partitioned already: nothing to wrap.

    >>> tx = zero(adamw(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> tx.step({"w": torch.ones(2)}, tx.init(params), params)[0]
    {'w': tensor([0.8990, 0.8990])}

    Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020).
    """
    for name, value, known in (("partition", partition, ("flat", "leaf")), ("grads", grads, ("reduced", "local"))):
        if value not in known:
            raise ValueError(f"zero: {name}={value!r}: expected {known[0]!r} or {known[1]!r}")
    tx, axes, local = as_transform(tx), _axes(mesh, over), grads == "local"
    if partition == "flat":
        init = partial(_flat_init, tx, mesh, axes, bucket, block)
        return Transform(init, partial(_flat_update, tx, local), partial(_flat_step, tx, local))
    return Transform(
        partial(_leaf_init, tx, mesh, axes), partial(_leaf_update, tx, local), partial(_leaf_step, tx, local)
    )


def _axes(mesh: Mesh, over: str | Sequence[str] | None) -> Axes:
    names = tuple(comm.axis_sizes(mesh))
    if over is None:
        return ("shard",) if "shard" in names else names
    axes = (over,) if isinstance(over, str) else tuple(over)
    if unknown := [axis for axis in axes if axis not in names]:
        raise ValueError(
            f"zero: over={over!r}: the mesh has no axis {unknown[0]!r}, it has {', '.join(map(repr, names))}"
        )
    return axes


def _check_params(params: Any) -> None:
    if tree.nodes(params, Parts):
        raise TypeError("zero: expected whole parameters, got sharded ones, whose state is partitioned already: use tx")
    flat, spec = tree.flatten(params)
    if not flat:
        raise ValueError("zero: the tree of parameters is empty")
    seen: dict[int, str] = {}
    devices: dict[torch.device, str] = {}
    for path, leaf in zip(tree.paths(spec), flat, strict=True):
        if not isinstance(leaf, Tensor):
            raise ValueError(f"zero: leaf {path!r}: expected a tensor, got {type(leaf).__name__}")
        if id(leaf) in seen:
            raise ValueError(
                f"zero: leaves {seen[id(leaf)]!r} and {path!r} are the same tensor, which would be updated twice: "
                "keep it once in the tree, and tie it in the loss"
            )
        seen[id(leaf)] = path
        devices.setdefault(leaf.device, path)
    if len(devices) > 1:
        (a, at_a), (b, at_b), *_ = devices.items()
        raise ValueError(f"zero: leaves on several devices: {at_a!r} on {a}, {at_b!r} on {b}. Move them to one.")


def _leaves(x: Any, spec: tree.Spec, what: str) -> list[Any]:
    """The leaves of parameters or gradients; a gradient may be None where a parameter is not trained."""
    try:
        flat = tree.flatten_up_to(spec, x)
    except ValueError as error:
        raise ValueError(f"zero: the {what} are not of the tree the state was made for: {error}") from None
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise ValueError(f"zero: {what}: leaf {tree.paths(spec)[i]!r} is sparse: make it dense with .to_dense()")
    return flat


def _check_state(state: Any, kind: type) -> None:
    if not isinstance(state, ZeroState) or not isinstance(state.parting, kind):
        raise ValueError(
            f"zero: expected the state of its own init, of this partition, got {type(state).__name__}: "
            "make it with this transformation's init"
        )


# ---- flat: equal intervals of buckets


def _flat_init(tx: Transform, mesh: Mesh, axes: Axes, bucket: int, block: int, params: Any) -> ZeroState:
    _check_params(params)
    plan = make_plan(params, mesh, units=bucket, params_over=(), grads_over=(), state_over=axes, block=block)
    return ZeroState(tx.init(_part(plan, _by_slot(plan, params, "parameters"))), plan)


def _by_slot(plan: Plan, x: Any, what: str) -> dict[Slot, Tensor]:
    """Whole leaves by their slots, those of trainable kinds checked."""
    found = dict(zip(plan.slots, _leaves(x, plan.spec, what), strict=True))
    for slot, leaf in found.items():
        if plan.kinds[slot.kind].trainable and (not isinstance(leaf, Tensor) or tuple(leaf.shape) != slot.shape):
            got = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ValueError(f"zero: {what}: leaf {slot.path!r}: expected shape {list(slot.shape)}, got {got}")
    return found


def _kinds(plan: Plan) -> list[int]:
    return [k for k, kind in enumerate(plan.kinds) if kind.trainable]


def _places(plan: Plan) -> list[tuple[int, int]]:
    """Units and trainable kinds that have leaves, unit after unit."""
    return sorted((u, k) for u, k in plan.places if plan.kinds[k].trainable)


def _empty(plan: Plan, device: torch.device) -> Sharded:
    """Room for this rank's part."""
    view = whole_view(plan, plan.state_over, _kinds(plan))
    sizes = [(local_numel(plan, k, plan.state_over), plan.kinds[k].dtype) for k in view.kinds]
    return Sharded(view, [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in sizes])


def _part(plan: Plan, leaves: Mapping[Slot, Tensor]) -> Sharded:
    """This rank's part of whole leaves."""
    part = _empty(plan, next(iter(leaves.values())).device)
    for unit, kind in _places(plan):
        pack(leaves, plan, unit, kind, plan.state_over, part.piece(unit, kind))
    return part


def _grads_part(
    plan: Plan, leaves: Mapping[Slot, Tensor], local: bool, into: Sharded | None = None
) -> dict[tuple[int, int], comm.Pending]:
    """This rank's part of the gradients, by place: on its way where they are local, else read when it is waited for."""
    mesh, axes, started = plan.live_mesh(), plan.state_over, {}
    for unit, kind in _places(plan):
        like, out = leaves[plan.places[unit, kind][0]], None if into is None else into.piece(unit, kind)
        if local:
            whole = comm.buffer(mesh, plan.rest(()), plan.length(unit, kind, ()), like, lent=True)
            pack(leaves, plan, unit, kind, (), whole)
            pending = comm.reduce_over(whole, mesh, axes, plan.rest(axes), plan.units[unit].name, out)
        else:
            pending = comm.Pending(None, partial(_read, leaves, plan, unit, kind, out))
        started[unit, kind] = pending
    return started


def _read(leaves: Mapping[Slot, Tensor], plan: Plan, unit: int, kind: int, out: Tensor | None, _: Any) -> Tensor:
    if out is None:
        like, length = leaves[plan.places[unit, kind][0]], plan.length(unit, kind, plan.state_over)
        out = comm.buffer(plan.live_mesh(), plan.state_over[-1:], length, like, lent=False)
    return pack(leaves, plan, unit, kind, plan.state_over, out)


def _bucket_of(leaves: Mapping[Slot, Tensor], plan: Plan, place: tuple[int, int]) -> Tensor | None:
    """The bucket that leaves are views of, if they came out of a step of this plan and no peer is still to read it."""
    slots, length = plan.places[place], plan.length(*place, ())
    first = leaves[slots[0]]
    storage = first.untyped_storage()
    ours = storage.nbytes() == length * first.itemsize and all(
        leaves[s].untyped_storage().data_ptr() == storage.data_ptr()
        and leaves[s].storage_offset() == s.start
        and leaves[s].is_contiguous()
        for s in slots
    )
    if not ours:
        return None
    whole = first.detach().as_strided((length,), (1,), 0)
    mesh = plan.live_mesh()
    return whole if all(comm.along(mesh, axis).idle(whole) for axis in plan.state_over) else None


def _whole_part(plan: Plan, leaves: Mapping[Slot, Tensor], local: bool) -> Sharded:
    """This rank's part of the gradients, all of it."""
    part = _empty(plan, _device(leaves))
    for pending in _grads_part(plan, leaves, local, part).values():
        pending.wait()
    return part


class _Buckets:
    """Whole flat buckets on their way to every rank."""

    def __init__(self, plan: Plan, device: torch.device, given_away: Mapping[Slot, Tensor] | None = None):
        self.plan, self.started = plan, list[comm.Pending]()
        self.whole, self.reused = dict[tuple[int, int], Tensor](), set[tuple[int, int]]()
        for unit, kind in _places(plan):
            like, length = torch.empty(0, dtype=plan.kinds[kind].dtype, device=device), plan.length(unit, kind, ())
            used = None if given_away is None else _bucket_of(given_away, plan, (unit, kind))
            new = comm.buffer(plan.live_mesh(), plan.state_over[-1:], length, like, lent=True) if used is None else used
            self.whole[unit, kind] = new
            self.reused |= {(unit, kind)} if used is not None else set()

    def own(self, place: tuple[int, int]) -> Tensor:
        """This rank's interval of a bucket."""
        length = self.plan.length(*place, self.plan.state_over)
        index = self.plan.index(self.plan.state_over)
        return self.whole[place][index * length : (index + 1) * length]

    def gather(self, parts: Mapping[tuple[int, int], Tensor]) -> None:
        """Start to bring everyone's intervals of some buckets together."""
        plan = self.plan
        for (unit, kind), own in parts.items():
            out, name = self.whole[unit, kind], plan.units[unit].name
            self.started.append(comm.gather_over(own, plan.live_mesh(), plan.state_over, name, out, lent=True))

    def leaves(self) -> dict[Slot, Tensor]:
        """The whole leaves, views of the buckets, when they are there."""
        for pending in self.started:
            pending.wait()
        plan, found = self.plan, dict[Slot, Tensor]()
        for place, whole in self.whole.items():
            found.update(zip(plan.places[place], cut(plan, whole, *place), strict=True))
        return found


def _flat_update(
    tx: Transform, local: bool, grads: Any, state: ZeroState, params: Any = None, **extra: Any
) -> tuple[Any, ZeroState]:
    _check_state(state, Plan)
    plan, given = state.parting, _by_slot(state.parting, grads, "gradients")
    part = _whole_part(plan, given, local)
    mine = None if params is None else _part(plan, _by_slot(plan, params, "parameters"))
    updates, inner = tx.update(part, state.inner, mine, **extra)
    buckets = _Buckets(plan, _device(given))
    buckets.gather({place: updates.piece(*place) for place in _places(plan)})
    found = buckets.leaves()
    return tree.unflatten(plan.spec, [found.get(slot) for slot in plan.slots]), ZeroState(inner, plan)


def _flat_step(
    tx: Transform,
    local: bool,
    grads: Any,
    state: ZeroState,
    params: Any,
    found_inf: Tensor | None = None,
    donate: bool = False,
    **extra: Any,
) -> tuple[Any, ZeroState]:
    _check_state(state, Plan)
    plan, inner = state.parting, state.inner if donate else tree.map(torch.clone, state.inner)
    old, given = _by_slot(plan, params, "parameters"), _by_slot(plan, grads, "gradients")
    buckets = _Buckets(plan, _device(old), old if donate else None)
    if tx.elementwise:
        inner = _step_by_bucket(tx, plan, given, local, inner, old, buckets, found_inf, extra)
    else:
        new, inner = tx.step(_whole_part(plan, given, local), inner, _part(plan, old), found_inf, True, **extra)
        buckets.gather({place: new.piece(*place) for place in _places(plan)})
    found = old | buckets.leaves()
    return tree.unflatten(plan.spec, [found[slot] for slot in plan.slots]), ZeroState(inner, plan)


def _device(leaves: Mapping[Slot, Any]) -> torch.device:
    return next(leaf.device for leaf in leaves.values() if isinstance(leaf, Tensor))


def _step_by_bucket(
    tx: Transform,
    plan: Plan,
    given: Mapping[Slot, Tensor],
    local: bool,
    inner: Any,
    old: Mapping[Slot, Tensor],
    buckets: _Buckets,
    found_inf: Tensor | None,
    extra: Mapping[str, Any],
) -> Any:
    """Update a bucket, start to gather it, update the next; the state's trees are updated in place."""
    arriving, after = _grads_part(plan, given, local), inner
    for place, pending in arriving.items():
        own = buckets.own(place)
        if place not in buckets.reused:  # else the parameters lie there already
            pack(old, plan, *place, plan.state_over, own)
        views = [] if local else _large_views(given, plan, place)
        grads = views or [pending.wait()]
        sizes = [g.numel() for g in grads]
        mine, held = _split(own, sizes), _of_place(inner, place, sizes)
        new, after = tx.step(tuple(grads), held, mine, found_inf, True, **extra)
        tree.map(_write, mine, new)
        tree.map_tops(lambda kept, x, place=place, sizes=sizes: _keep(kept, x, place, sizes), Sharded, inner, after)
        buckets.gather({place: own})
    return tree.map_tops(lambda kept, last: kept if isinstance(kept, Sharded) else last, Sharded, inner, after)


def _large_views(leaves: Mapping[Slot, Tensor], plan: Plan, place: tuple[int, int]) -> list[Tensor]:
    """What lies in this rank's interval, if that is few large pieces end to end: nothing is copied then."""
    found = intervals(plan, *place, plan.state_over)
    views = [leaves[slot].detach().reshape(-1)[begin:end] for slot, begin, end, _ in found]
    numel = sum(view.numel() for view in views)
    end_to_end = bool(found) and found[0][3] == 0 and found[-1][3] + views[-1].numel() == numel
    return views if end_to_end and numel >= _LARGE * len(views) else []


def _split(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Pieces of these sizes, without the padding after them."""
    return x.split_with_sizes([*sizes, x.numel() - sum(sizes)])[:-1]


def _of_place(state: Any, place: tuple[int, int], sizes: Sequence[int]) -> Any:
    """A state of sharded trees as the state of one bucket's pieces."""
    return tree.map_tops(lambda x: _split(x.piece(*place), sizes) if isinstance(x, Sharded) else x, Sharded, state)


def _keep(kept: Any, new: Any, place: tuple[int, int], sizes: Sequence[int]) -> None:
    if isinstance(kept, Sharded):
        tree.map(_write, _split(kept.piece(*place), sizes), new)


def _write(old: Tensor, new: Tensor) -> None:
    if old.data_ptr() != new.data_ptr():
        old.copy_(new)


# ---- leaf: whole leaves


def _leaf_init(tx: Transform, mesh: Mesh, axes: Axes, params: Any) -> ZeroState:
    _check_params(params)
    layout, mesh = layout_of(params), host.connect(mesh)
    text = "\n".join(f"leaf {leaf.path!r} {leaf.dtype}{list(leaf.shape)}" for leaf in layout.leaves)
    comm.check_same(mesh, hashlib.sha256(text.encode()).hexdigest(), text, "the tree of parameters")
    trained = layout.pick(
        n for n in layout.numbers if layout.leaves[n].dtype.is_floating_point or layout.leaves[n].dtype.is_complex
    )
    parting = owned(trained, mesh, axes)
    return ZeroState(tx.init(collect(pick(params, trained), parting)), parting)


def _leaf_update(
    tx: Transform, local: bool, grads: Any, state: ZeroState, params: Any = None, **extra: Any
) -> tuple[Any, ZeroState]:
    _check_state(state, Layout)
    part = _owned_grads(state.parting, grads, local)
    mine = None if params is None else _own(state.parting, params, "parameters")
    updates, inner = tx.update(part, state.inner, mine, **extra)
    return _shared(updates, None), ZeroState(inner, state.parting)


def _leaf_step(
    tx: Transform,
    local: bool,
    grads: Any,
    state: ZeroState,
    params: Any,
    found_inf: Tensor | None = None,
    donate: bool = False,
    **extra: Any,
) -> tuple[Any, ZeroState]:
    _check_state(state, Layout)
    part = _owned_grads(state.parting, grads, local)
    mine = _own(state.parting, params, "parameters")
    new, inner = tx.step(part, state.inner, mine, found_inf, donate, **extra)
    return _shared(new, params), ZeroState(inner, state.parting)


def _own(parting: Layout, x: Any, what: str) -> Pieces:
    """The leaves of a whole tree that this rank owns, as they are."""
    flat = _leaves(x, parting.spec, what)
    for number in parting.numbers:
        leaf, got = parting.leaves[number], flat[number]
        if not isinstance(got, Tensor) or tuple(got.shape) != leaf.shape:
            found = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"zero: {what}: leaf {leaf.path!r}: expected shape {list(leaf.shape)}, got {found}")
    return Pieces(parting, [flat[span.leaf] for span in parting.mine])


def _owned_grads(parting: Layout, grads: Any, local: bool) -> Pieces:
    """The gradients of the leaves this rank owns, local ones summed over the mesh, in rank order along each axis."""
    own, mesh = _own(parting, grads, "gradients"), parting.mesh
    if not local:
        return own
    outer, last = parting.axes[:-1], parting.axes[-1:]
    numbers = sorted(parting.numbers, key=lambda n: -parting.leaves[n].dtype.itemsize)
    flat = _leaves(grads, parting.spec, "gradients")
    held = {n: flat[n].reshape(-1) for n in numbers}
    for axis in (*outer, *(a for a in comm.axis_sizes(mesh) if a not in parting.axes)):
        held = _all_reduced(held, comm.along(mesh, axis))
    for axis in last:
        held = _reduced_to_owners(held, parting, comm.along(mesh, axis), comm.coordinate(mesh, outer))
    return Pieces(parting, [held[s.leaf].view(parting.leaves[s.leaf].shape) for s in parting.mine])


def _all_reduced(held: dict[int, Tensor], ranks: comm.Ranks) -> dict[int, Tensor]:
    """Sums over the ranks, one collective for each dtype."""
    result = dict[int, Tensor]()
    for dtype in {x.dtype for x in held.values()}:
        some = {n: x for n, x in held.items() if x.dtype == dtype}
        whole = comm.all_reduce(torch.cat([*some.values()]), ranks, "gradients").wait()
        result.update(zip(some, whole.split([x.numel() for x in some.values()]), strict=True))
    return {n: result[n] for n in held}


def _reduced_to_owners(held: dict[int, Tensor], parting: Layout, ranks: comm.Ranks, row: int) -> dict[int, Tensor]:
    """Sums over the ranks, each at the rank that owns the leaf: one message to each other rank."""
    owner = {span.leaf: span.rank - row * ranks.size for span in parting.spans}
    to = [[n for n in held if owner[n] == peer] for peer in range(ranks.size)]
    mine = to[ranks.rank]
    others = [peer for peer in range(ranks.size) if peer != ranks.rank]
    sends = [[held[n] for n in to[peer]] if peer in others else [] for peer in range(ranks.size)]
    sizes = [[(held[n].dtype, held[n].numel()) for n in mine] if peer in others else [] for peer in range(ranks.size)]
    arrived = comm.swap(sends, sizes, ranks, "gradients")
    arrived[ranks.rank] = [held[n] for n in mine]
    return {n: reduce(torch.add, parts) for n, parts in zip(mine, zip(*arrived, strict=True), strict=True)}


def _shared(part: Pieces, params: Any) -> Any:
    """The whole tree of what each rank has whole leaves of; leaves that nobody owns are those of `params`."""
    layout = part.layout
    whole = collect(part, on_rank(layout, layout.mesh, layout.axes, EVERYONE), "parameters")
    found: list[Any] = [None] * layout.spec.num_leaves if params is None else _leaves(params, layout.spec, "parameters")
    for span, row in zip(whole.layout.mine, whole.tensors, strict=True):
        found[span.leaf] = row
    return tree.unflatten(layout.spec, found)
