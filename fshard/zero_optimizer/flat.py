"""ZeRO's flat partition: shards of flat buckets of leaves, laid out by a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, mesh_device
from ..comm.ranks import Pending
from ..core import tree
from ..core.differences import Form, form_difference
from ..core.func_levels import differentiates, refuse_derivative
from ..core.tree import Tree
from ..layout.pieces import copied
from ..layout.row import Row
from ..layout.rules import COPIES, reshard
from ..plan.leaves import is_differentiable
from ..plan.plan import Plan, Slot
from ..plan.planning import make_plan
from ..sharding.schedule import View
from ..sharding.sharded import Sharded, pack_shard, room, whole_view
from ..update.base import FoundInf, Transform
from ..update.elementwise import update_part
from .leaf import ZeroState, check_zero_state, detached_values, leaves_of, update_on_all

# attribute of a bucket's storage, since users have views of it: without it a user's tensor might pass for a bucket
_MARK = "fshard_bucket"
_LARGE_PIECES = 1 << 16  # elements: if a row's pieces are larger on average, they are not copied into one tensor


def flat_init(tx: Transform, mesh: AnyMesh, axes: Axes, bucket: int, block: int, params: Tree) -> ZeroState:
    trained = [x for x in tree.leaves(params) if is_differentiable(x)]
    # elements for `bucket` bytes, at the mean itemsize of trained leaves
    size = max(1, bucket * sum(x.numel() for x in trained) // max(1, sum(x.nbytes for x in trained)))
    plan = make_plan(params, mesh, units=size, params_over=(), grads_over=(), state_over=axes, block=block)
    return ZeroState(tx.init(_part_of_rank(plan, _by_slot(plan, params, "parameters"))), plan)


def _by_slot(plan: Plan, x: Tree, what: str) -> dict[Slot, Tensor]:
    """Return whole leaves by slot; ValueError if a trainable leaf is missing, or has another form."""
    by_slot = dict(zip(plan.slots, leaves_of(x, plan.spec, what), strict=True))
    for slot, leaf in by_slot.items():
        difference = form_difference(slot.path, Form(slot.shape, slot.dtype), leaf)
        if plan.kinds[slot.kind].trainable and difference:
            raise ValueError(f"zero: {what}: leaf {difference}")
    return by_slot


def _view(plan: Plan) -> View:
    return whole_view(plan, plan.state_over, [k for k, kind in enumerate(plan.kinds) if kind.trainable])


def _plan_rows(plan: Plan) -> list[Row[Slot]]:
    return [*_view(plan).rows.values()]


def _part_of_rank(plan: Plan, leaves: Mapping[Slot, Tensor], local: bool = False) -> Sharded:
    """Return this rank's shards; if `local`, of gradients summed over ranks."""
    view, device = _view(plan), _device_of_leaves(plan, leaves)
    likes = [torch.empty(0, dtype=plan.kinds[kind].dtype, device=device) for kind in view.kinds]
    part = Sharded(view, [room(view, kind, like) for kind, like in zip(view.kinds, likes, strict=True)])
    if local:
        for pending in _summing(plan, leaves, part).values():
            pending.wait()
    else:
        for row in _plan_rows(plan):
            pack_shard(leaves, plan, row, row.of(part.tensors))
    return part


def _summing(plan: Plan, leaves: Mapping[Slot, Tensor], into: Sharded | None = None) -> dict[Row[Slot], Pending]:
    """Start sums of gradients. The results are this rank's shards (n / W,), in `into` or new."""
    mesh, old, started = plan.live_mesh(), COPIES.dual(plan.axis_names), {}
    for row in _plan_rows(plan):  # the same order on every rank
        whole = primitives.buffer(mesh, plan.axis_names, row.numel, leaves[row.leaves[0]], lent=True)  # (n,)
        pack_shard(leaves, plan, plan.rows[row.unit, row.kind], whole)
        out = None if into is None else row.of(into.tensors)
        started[row] = reshard(whole, old, row.rule, mesh, plan.units[row.unit].name, out)
    return started


def _bucket_of(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot]) -> Tensor | None:
    """Return the bucket (n,) if a step of this plan made it; else None."""
    first = leaves[row.leaves[0]]
    storage = first.untyped_storage()
    is_bucket = getattr(storage, _MARK, None) == (plan.fingerprint, (row.unit, row.kind)) and all(
        leaves[slot].untyped_storage().data_ptr() == storage.data_ptr()
        and leaves[slot].storage_offset() == slot.start
        and leaves[slot].is_contiguous()
        for slot in row.leaves
    )
    return first.detach().as_strided((row.numel,), (1,), 0) if is_bucket else None  # from the storage's first element


class _Buckets:
    """Whole flat buckets: each rank updates its shard and gathers the others."""

    def __init__(self, plan: Plan, device: torch.device, given_away: Mapping[Slot, Tensor] | None = None):
        self.plan, self.started = plan, list[Pending]()
        self.whole = dict[Row[Slot], Tensor]()  # (n,) for each row
        self.reused = set[Row[Slot]]()  # buckets of the parameters given away
        for row in _plan_rows(plan):
            like = torch.empty(0, dtype=plan.kinds[row.kind].dtype, device=device)
            bucket = None if given_away is None else _bucket_of(given_away, plan, row)
            if bucket is None:
                bucket = primitives.buffer(plan.live_mesh(), plan.state_over[-1:], row.numel, like, lent=False)
                setattr(bucket.untyped_storage(), _MARK, (plan.fingerprint, (row.unit, row.kind)))
            else:
                self.reused.add(row)
            self.whole[row] = bucket

    def gather(self, row: Row[Slot], shard: Tensor) -> None:
        refuse_derivative(shard, "optim.zero")
        mesh, name = self.plan.live_mesh(), self.plan.units[row.unit].name
        # not lent: the user gets the bucket, and may write to it (Note [Lent memory])
        self.started.append(reshard(shard, row.rule, COPIES, mesh, name, self.whole[row]))

    def gather_all(self, x: Sharded) -> dict[Slot, Tensor]:
        for row in _plan_rows(self.plan):
            self.gather(row, row.of(x.tensors))
        return self.leaves()

    def leaves(self) -> dict[Slot, Tensor]:
        """Wait for all gathers; return views of the buckets."""
        for pending in self.started:
            pending.wait()
        views = (zip(row.leaves, row.views(whole), strict=True) for row, whole in self.whole.items())
        return dict(chain.from_iterable(views))


def flat_update(
    tx: Transform, local: bool, grads: Tree, state: ZeroState, params: Tree = None, **extra: object
) -> tuple[Tree, ZeroState]:
    """Return whole updates: each rank computes its shards, and gathers the others."""
    plan = check_zero_state(state, Plan)
    if differentiates((grads, state, detached_values(params), extra)):
        return update_on_all(tx, _view(plan).layout, local, grads, state, params, extra)
    gradients = _by_slot(plan, grads, "gradients")
    grads_part = _part_of_rank(plan, gradients, local)
    params_part = None if params is None else _part_of_rank(plan, _by_slot(plan, params, "parameters"))
    updates, inner = tx.update(grads_part, state.inner, params_part, **extra)
    updated = _Buckets(plan, _device_of_leaves(plan, gradients)).gather_all(updates)
    return tree.unflatten(plan.spec, [updated.get(slot) for slot in plan.slots]), ZeroState(inner, plan)


def flat_step(
    tx: Transform,
    local: bool,
    grads: Tree,
    state: ZeroState,
    params: Tree,
    found_inf: FoundInf | None,
    donate: bool,
    **extra: object,
) -> tuple[Tree, ZeroState]:
    """Return new parameters, views of buckets; if `tx` is elementwise, each bucket is gathered when updated."""
    plan = check_zero_state(state, Plan)
    inner = state.inner if donate else copied(state.inner)
    old, gradients = _by_slot(plan, params, "parameters"), _by_slot(plan, grads, "gradients")
    buckets = _Buckets(plan, _device_of_leaves(plan, old), old if donate else None)
    if tx.over == "elements":
        inner = _step_by_bucket(tx, gradients, local, inner, old, buckets, found_inf, extra)
        new_leaves = buckets.leaves()
    else:
        # copies: the optimizer may overwrite both
        grads_part, params_part = _part_of_rank(plan, gradients, local), _part_of_rank(plan, old)
        new, inner = tx.step(grads_part, inner, params_part, found_inf, True, **extra | {"own_grads": True})
        new_leaves = buckets.gather_all(new)
    updated = old | new_leaves
    return tree.unflatten(plan.spec, [updated[slot] for slot in plan.slots]), ZeroState(inner, plan)


def _device_of_leaves(plan: Plan, leaves: Mapping[Slot, Tensor]) -> torch.device:
    # the gradient of a frozen leaf is None
    devices = (leaf.device for leaf in leaves.values() if isinstance(leaf, Tensor))
    return next(devices, mesh_device(plan.live_mesh()))


def _step_by_bucket(
    tx: Transform,
    gradients: Mapping[Slot, Tensor],
    local: bool,
    inner: Tree,
    old: Mapping[Slot, Tensor],
    buckets: _Buckets,
    found_inf: FoundInf | None,
    extra: Mapping[str, object],
) -> Tree:
    """Update buckets in place, and start the gather of each before the next update."""
    plan = buckets.plan
    arriving, after = _summing(plan, gradients) if local else {}, inner
    for row, bucket in buckets.whole.items():
        shard = plan.shard_of(bucket, row.kind, plan.state_over)  # (n / W,)
        if row not in buckets.reused:  # reused buckets hold the parameters already
            pack_shard(old, plan, row, shard)
        sources = [(0, arriving[row].wait())] if local else _sources(gradients, plan, row)
        grads, spans = [grad for _, grad in sources], [(start, grad.numel()) for start, grad in sources]

        def cut(x: Sharded, row: Row[Slot] = row, spans: Sequence[tuple[int, int]] = spans) -> list[Tensor]:
            return _views(row.of(x.tensors), spans)

        after = update_part(tx, inner, _views(shard, spans), grads, cut, found_inf, **extra)
        buckets.gather(row, shard)
    return after


def _sources(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot]) -> list[tuple[int, Tensor]]:
    """Return (offset, gradient) pairs for this rank's shard: views if these are large, else one copy."""
    spans = (span for span in row.spans(row.number(plan.live_mesh())) if span.numel)
    views = [(x.start, x.leaf.flat(leaves[x.leaf].detach())[x.begin : x.begin + x.numel]) for x in spans]
    if views and sum(view.numel() for _, view in views) >= _LARGE_PIECES * len(views):
        return views
    mesh, like = plan.live_mesh(), leaves[row.leaves[0]]
    out = primitives.buffer(mesh, plan.state_over[-1:], row.length, like, lent=False)
    return [(0, pack_shard(leaves, plan, row, out))]


def _views(x: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [x[start : start + numel] for start, numel in spans]
