"""ZeRO's flat partition: equal intervals of flat buckets of leaves, laid out by a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, mesh_device
from ..comm.ranks import Pending
from ..core import tree
from ..core.differences import Form, form_difference
from ..core.tree import Tree
from ..layout.row import Row
from ..layout.rules import COPIES, Rule, reshard
from ..optim.base import FoundInf, Transform, update_part
from ..plan.leaves import is_differentiable
from ..plan.plan import Plan, Slot
from ..plan.planning import make_plan
from ..sharding.schedule import View
from ..sharding.sharded import Sharded, pack, room, whole_view
from .leaf import ZeroState, check_zero_state, leaves_of

# On the storage of a bucket, because users hold views of it: the plan, unit and kind. A tensor of the user's that fills
# a bucket alone would look like one.
_MARK = "fshard_bucket"
_LARGE = 1 << 16  # mean elements of pieces from which reading them in place beats copying them into one row


def flat_init(tx: Transform, mesh: AnyMesh, axes: Axes, bucket: int, block: int, params: Tree) -> ZeroState:
    """Make the plan of buckets, and the optimizer's state for this rank's intervals of them."""
    trained = [x for x in tree.leaves(params) if is_differentiable(x)]
    # a plan counts elements: a bucket has as many as `bucket` bytes have in the mean of the trained leaves' dtypes
    size = max(1, bucket * sum(x.numel() for x in trained) // max(1, sum(x.nbytes for x in trained)))
    plan = make_plan(params, mesh, units=size, params_over=(), grads_over=(), state_over=axes, block=block)
    return ZeroState(tx.init(_part(plan, _by_slot(plan, params, "parameters"))), plan)


def _by_slot(plan: Plan, x: Tree, what: str) -> dict[Slot, Tensor]:
    """Return whole leaves by slot; ValueError for a trainable one that is missing or has another shape.

    A frozen leaf, of gradients, may be None: nothing reads it.
    """
    by_slot = dict(zip(plan.slots, leaves_of(x, plan.spec, what), strict=True))
    for slot, leaf in by_slot.items():
        kind = plan.kinds[slot.kind]
        difference = form_difference(slot.path, Form(slot.shape, kind.dtype), leaf)
        if kind.trainable and difference:
            raise ValueError(f"zero: {what}: leaf {difference}")
    return by_slot


def _kinds(plan: Plan) -> list[int]:
    return [k for k, kind in enumerate(plan.kinds) if kind.trainable]


def _rows(plan: Plan) -> list[Row[Slot]]:
    """The trainable rows, cut over `state_over`, in the order of units."""
    return [*_view(plan).rows.values()]


def _view(plan: Plan) -> View:
    return whole_view(plan, plan.state_over, _kinds(plan))


def _empty(plan: Plan, device: torch.device) -> Sharded:
    """An uninitialised `Sharded` for this rank's part."""
    view = _view(plan)
    likes = [torch.empty(0, dtype=plan.kinds[kind].dtype, device=device) for kind in view.kinds]
    return Sharded(view, [room(view, kind, like) for kind, like in zip(view.kinds, likes, strict=True)])


def _part(plan: Plan, leaves: Mapping[Slot, Tensor]) -> Sharded:
    """Copy this rank's part out of whole leaves."""
    part = _empty(plan, next(iter(leaves.values())).device)
    for row in _rows(plan):
        pack(leaves, plan, row, row.of(part.tensors))
    return part


def _grads_part(
    plan: Plan, leaves: Mapping[Slot, Tensor], local: bool, into: Sharded | None = None
) -> dict[tuple[int, int], Pending]:
    """This rank's part of the gradients, by unit and kind: local ones are being reduced, wait() copies others."""
    mesh, axes, started = plan.live_mesh(), plan.state_over, {}
    for row in _rows(plan):  # every rank starts the same reductions in the same order
        like, out = leaves[row.leaves[0]], None if into is None else row.of(into.tensors)
        if local:
            whole = primitives.buffer(mesh, plan.axis_names, row.numel, like, lent=True)  # (n,)
            pack(leaves, plan, plan.rows[row.unit, row.kind], whole)
            old = COPIES.dual(plan.axis_names)
            pending = reshard(whole, old, Rule(axes), mesh, plan.units[row.unit].name, out)
        else:
            pending = Pending(None, partial(_read, leaves, plan, row, out))
        started[row.unit, row.kind] = pending
    return started


def _read(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot], out: Tensor | None, _: Sequence[Tensor]) -> Tensor:
    """Copy this rank's shard (n / W,) of a bucket out of whole gradients, into `out` or a new tensor."""
    if out is None:
        like = leaves[row.leaves[0]]
        out = primitives.buffer(plan.live_mesh(), plan.state_over[-1:], row.length, like, lent=False)
    return pack(leaves, plan, row, out)


def _bucket_of(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot]) -> Tensor | None:
    """The bucket (n,) that leaves are views of, if a step of this plan made it; else None."""
    first = leaves[row.leaves[0]]
    storage = first.untyped_storage()
    is_bucket = getattr(storage, _MARK, None) == (plan.fingerprint, (row.unit, row.kind)) and all(
        leaves[slot].untyped_storage().data_ptr() == storage.data_ptr()
        and leaves[slot].storage_offset() == slot.start
        and leaves[slot].is_contiguous()
        for slot in row.leaves
    )
    return first.detach().as_strided((row.numel,), (1,), 0) if is_bucket else None  # from the storage's first element


def _whole_part(plan: Plan, leaves: Mapping[Slot, Tensor], local: bool) -> Sharded:
    """Wait for this rank's part of all gradients."""
    part = _empty(plan, _device(plan, leaves))
    for pending in _grads_part(plan, leaves, local, part).values():
        pending.wait()
    return part


class _Buckets:
    """Whole flat buckets: each rank updates its interval and gathers the others."""

    def __init__(self, plan: Plan, device: torch.device, given_away: Mapping[Slot, Tensor] | None = None):
        self.plan, self.started = plan, list[Pending]()
        self.whole = dict[tuple[int, int], Tensor]()  # (n,) for each unit and kind
        self.reused = set[tuple[int, int]]()  # the buckets that are those of the parameters given away
        for row in _rows(plan):
            place, like = (row.unit, row.kind), torch.empty(0, dtype=plan.kinds[row.kind].dtype, device=device)
            bucket = None if given_away is None else _bucket_of(given_away, plan, row)
            if bucket is None:
                bucket = primitives.buffer(plan.live_mesh(), plan.state_over[-1:], row.numel, like, lent=False)
                setattr(bucket.untyped_storage(), _MARK, (plan.fingerprint, place))
            else:
                self.reused.add(place)
            self.whole[place] = bucket

    def interval(self, place: tuple[int, int]) -> Tensor:
        """This rank's interval (n / W,) of a bucket, a view."""
        return self.plan.within(self.whole[place], place[1], self.plan.state_over)

    def gather(self, parts: Mapping[tuple[int, int], Tensor]) -> None:
        """Start the all-gather of some buckets."""
        plan = self.plan
        for (unit, kind), interval in parts.items():
            out, name = self.whole[unit, kind], plan.units[unit].name
            # not lent: the user gets the bucket, and may write to it (Note [Lent memory])
            self.started.append(reshard(interval, Rule(plan.state_over), COPIES, plan.live_mesh(), name, out))

    def leaves(self) -> dict[Slot, Tensor]:
        """Wait for all gathers; return the whole leaves, views of the buckets."""
        for pending in self.started:
            pending.wait()
        plan, leaves = self.plan, dict[Slot, Tensor]()
        for place, whole in self.whole.items():
            row = plan.rows[place]
            leaves.update(zip(row.leaves, row.places.views(whole), strict=True))
        return leaves


def flat_update(
    tx: Transform, local: bool, grads: Tree, state: ZeroState, params: Tree = None, **extra: object
) -> tuple[Tree, ZeroState]:
    """Return whole updates: each rank computes its intervals, and they are all-gathered."""
    plan = check_zero_state(state, Plan)
    gradients = _by_slot(plan, grads, "gradients")
    grads_part = _whole_part(plan, gradients, local)
    params_part = None if params is None else _part(plan, _by_slot(plan, params, "parameters"))
    updates, inner = tx.update(grads_part, state.inner, params_part, **extra)
    buckets = _Buckets(plan, _device(plan, gradients))
    buckets.gather({(row.unit, row.kind): row.of(updates.tensors) for row in _rows(plan)})
    updated = buckets.leaves()
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
    """Return new whole parameters, views of buckets; for an elementwise `tx` each is gathered once it is updated."""
    plan = check_zero_state(state, Plan)
    inner = state.inner if donate else tree.map(torch.clone, state.inner)
    old, gradients = _by_slot(plan, params, "parameters"), _by_slot(plan, grads, "gradients")
    buckets = _Buckets(plan, _device(plan, old), old if donate else None)
    if tx.elementwise:
        inner = _step_by_bucket(tx, plan, gradients, local, inner, old, buckets, found_inf, extra)
    else:
        # the parts of gradients and parameters are copies, which the optimizer may overwrite
        grads_part, params_part = _whole_part(plan, gradients, local), _part(plan, old)
        new, inner = tx.step(grads_part, inner, params_part, found_inf, True, **extra | {"own_grads": True})
        buckets.gather({(row.unit, row.kind): row.of(new.tensors) for row in _rows(plan)})
    updated = old | buckets.leaves()
    return tree.unflatten(plan.spec, [updated[slot] for slot in plan.slots]), ZeroState(inner, plan)


def _device(plan: Plan, leaves: Mapping[Slot, Tensor]) -> torch.device:
    # among gradients a frozen leaf is None
    devices = (leaf.device for leaf in leaves.values() if isinstance(leaf, Tensor))
    return next(devices, mesh_device(plan.live_mesh()))


def _step_by_bucket(
    tx: Transform,
    plan: Plan,
    gradients: Mapping[Slot, Tensor],
    local: bool,
    inner: Tree,
    old: Mapping[Slot, Tensor],
    buckets: _Buckets,
    found_inf: FoundInf | None,
    extra: Mapping[str, object],
) -> Tree:
    """Update bucket after bucket, and start the gather of each before the next; state is updated in place."""
    arriving, after = _grads_part(plan, gradients, local), inner
    for row in _rows(plan):
        place = row.unit, row.kind
        interval = buckets.interval(place)  # (n / W,)
        if place not in buckets.reused:  # a reused bucket holds the parameters already
            pack(old, plan, row, interval)
        sources = ([] if local else _large_views(gradients, plan, row)) or [(0, arriving[place].wait())]
        grads, spans = [grad for _, grad in sources], [(start, grad.numel()) for start, grad in sources]

        def cut(x: Sharded, place: tuple[int, int] = place, spans: Sequence[tuple[int, int]] = spans) -> list[Tensor]:
            return _views(x.shard(*place), spans)

        after = update_part(tx, inner, _views(interval, spans), grads, cut, found_inf, **extra)
        buckets.gather({place: interval})
    return after


def _large_views(leaves: Mapping[Slot, Tensor], plan: Plan, row: Row[Slot]) -> list[tuple[int, Tensor]]:
    """The pieces of leaves in this rank's shard and their offsets, if they are large; else []."""
    spans = (span for span in row.mine(row.rule.number(plan.live_mesh())) if span.numel)
    views = [(x.start, x.leaf.flat(leaves[x.leaf].detach())[x.begin : x.begin + x.numel]) for x in spans]
    return views if sum(view.numel() for _, view in views) >= _LARGE * len(views) else []


def _views(x: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views of a row at spans (start, numel): the pieces of leaves without the padding between them."""
    return [x[start : start + numel] for start, numel in spans]
