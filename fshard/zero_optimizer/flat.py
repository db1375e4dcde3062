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
from ..layout.rows import COPIES, Rule, reshard
from ..optim.base import FoundInf, Transform, update_part
from ..plan.leaves import is_differentiable
from ..plan.plan import Plan, Slot
from ..plan.planning import make_plan
from ..sharding.sharded import Sharded, cut, intervals, local_numel, pack, whole_view
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


def _places(plan: Plan) -> list[tuple[int, int]]:
    """Pairs of a unit and a trainable kind that have leaves, in the order of units."""
    return sorted((u, k) for u, k in plan.places if plan.kinds[k].trainable)


def _empty(plan: Plan, device: torch.device) -> Sharded:
    """An uninitialised `Sharded` for this rank's part."""
    view = whole_view(plan, plan.state_over, _kinds(plan))
    sizes = [(local_numel(plan, k, plan.state_over), plan.kinds[k].dtype) for k in view.kinds]
    return Sharded(view, [torch.empty(numel, dtype=dtype, device=device) for numel, dtype in sizes])


def _part(plan: Plan, leaves: Mapping[Slot, Tensor]) -> Sharded:
    """Copy this rank's part out of whole leaves."""
    part = _empty(plan, next(iter(leaves.values())).device)
    for unit, kind in _places(plan):
        pack(leaves, plan, unit, kind, plan.state_over, part.piece(unit, kind))
    return part


def _grads_part(
    plan: Plan, leaves: Mapping[Slot, Tensor], local: bool, into: Sharded | None = None
) -> dict[tuple[int, int], Pending]:
    """This rank's part of the gradients, by unit and kind: local ones are being reduced, wait() copies others."""
    mesh, axes, started = plan.live_mesh(), plan.state_over, {}
    for unit, kind in _places(plan):  # every rank starts the same reductions in the same order
        like, out = leaves[plan.places[unit, kind][0]], None if into is None else into.piece(unit, kind)
        if local:
            whole = primitives.buffer(mesh, plan.rest(()), plan.length(unit, kind, ()), like, lent=True)  # (n,)
            pack(leaves, plan, unit, kind, (), whole)
            old = COPIES.dual(plan.rest(()))
            pending = reshard(whole, old, Rule(axes), mesh, plan.units[unit].name, out)
        else:
            pending = Pending(None, partial(_read, leaves, plan, unit, kind, out))
        started[unit, kind] = pending
    return started


def _read(
    leaves: Mapping[Slot, Tensor], plan: Plan, unit: int, kind: int, out: Tensor | None, _: Sequence[Tensor]
) -> Tensor:
    """Copy this rank's interval (n / W,) of a bucket out of whole gradients, into `out` or a new tensor."""
    if out is None:
        like, length = leaves[plan.places[unit, kind][0]], plan.length(unit, kind, plan.state_over)
        out = primitives.buffer(plan.live_mesh(), plan.state_over[-1:], length, like, lent=False)
    return pack(leaves, plan, unit, kind, plan.state_over, out)


def _bucket_of(leaves: Mapping[Slot, Tensor], plan: Plan, place: tuple[int, int]) -> Tensor | None:
    """The bucket that leaves are views of, if a step of this plan made it; else None."""
    slots, length = plan.places[place], plan.length(*place, ())
    first = leaves[slots[0]]
    storage = first.untyped_storage()
    is_bucket = getattr(storage, _MARK, None) == (plan.fingerprint, place) and all(
        leaves[slot].untyped_storage().data_ptr() == storage.data_ptr()
        and leaves[slot].storage_offset() == slot.start
        and leaves[slot].is_contiguous()
        for slot in slots
    )
    return (
        first.detach().as_strided((length,), (1,), 0) if is_bucket else None
    )  # (n,), from the storage's first element


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
        for unit, kind in _places(plan):
            like, length = torch.empty(0, dtype=plan.kinds[kind].dtype, device=device), plan.length(unit, kind, ())
            bucket = None if given_away is None else _bucket_of(given_away, plan, (unit, kind))
            if bucket is None:
                bucket = primitives.buffer(plan.live_mesh(), plan.state_over[-1:], length, like, lent=False)
                setattr(bucket.untyped_storage(), _MARK, (plan.fingerprint, (unit, kind)))
            else:
                self.reused.add((unit, kind))
            self.whole[unit, kind] = bucket

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
            leaves.update(zip(plan.places[place], cut(plan, whole, *place), strict=True))
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
    buckets.gather({place: updates.piece(*place) for place in _places(plan)})
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
        buckets.gather({place: new.piece(*place) for place in _places(plan)})
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
    for place, pending in arriving.items():
        interval = buckets.interval(place)  # (n / W,)
        if place not in buckets.reused:  # a reused bucket holds the parameters already
            pack(old, plan, *place, plan.state_over, interval)
        sources = ([] if local else _large_views(gradients, plan, place)) or [(0, pending.wait())]
        grads, spans = [grad for _, grad in sources], [(start, grad.numel()) for start, grad in sources]

        def cut(x: Sharded, place: tuple[int, int] = place, spans: Sequence[tuple[int, int]] = spans) -> list[Tensor]:
            return _views(x.piece(*place), spans)

        after = update_part(tx, inner, _views(interval, spans), grads, cut, found_inf, **extra)
        buckets.gather({place: interval})
    return after


def _large_views(leaves: Mapping[Slot, Tensor], plan: Plan, place: tuple[int, int]) -> list[tuple[int, Tensor]]:
    """The pieces of leaves in this rank's interval and their offsets, if they are large; else []."""
    overlaps = intervals(plan, *place, plan.state_over)
    views = [(start, leaves[slot].detach().reshape(-1)[begin:end]) for slot, begin, end, start in overlaps]
    return views if sum(view.numel() for _, view in views) >= _LARGE * len(views) else []


def _views(x: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Views of a row at spans (start, numel): the pieces of leaves without the padding between them."""
    return [x[start : start + numel] for start, numel in spans]
