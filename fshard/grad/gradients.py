"""The gradients of a forward and backward: reduced unit by unit, added up, and handed on.

Note [Updates in a backward]
    With `Gradients.take` a backward hands each unit's sum over ranks to a function, which may write to the parameters
    of that unit: an optimizer that updates them. Then the memory of the sum is free, so gradients of two units are in
    memory, not of all.

    A unit must not be written to while the backward still reads it. Gathered buffers are memory of their own, so what
    counts is whether the unit will be gathered again. It will not: autograd runs the nodes that were made last first,
    and a unit's anchor is made when the unit is read first (Note [Anchors] in `autograd.py`), so every node that reads
    the unit, and every checkpoint that reads it again, comes before its gradients. If a program finds another way, the
    tape raises an error. Leaves that this rank has whole are copied when they are read, as if they were gathered: else
    the loss, and what autograd does not know of (attributes of a user's function), would read them where they are.

Note [Sums beside the computation]
    On an accelerator a reduction's waits for messages, its sums, and the stages and hooks that follow run on a stream
    of their own, `Plan.crossings.sums`. Work on that stream first waits for the computation so far. The computation
    waits for the stream once for each unit, before the buffer of the next unit's gradients is allocated (those sums
    were started one unit earlier), and after the last reduction: nothing reads the sums before. If nothing is left to
    add when the messages have arrived, it waits for those of the unit before, whose buffer is free then.

    The buffers that a reduction sends and receives belong to the computation's stream. When the host drops them, the
    allocator may give their memory to the computation again while the other stream still reads it. So each reduction
    (`Pending`) is kept, and with it these buffers, until the computation has waited. `Tensor.record_stream` would make
    the wait unnecessary, but memory would then come back when the device has passed an event, not at a point of the
    program, and the peak would depend on timing. Memory allocated on the other stream is used there in order.

    On a CPU, and while a graph is traced, there are no streams, and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import AnyMesh, Axes, num_ranks
from ..comm.ranks import Pending, Ranks
from ..comm.reduction import DEFAULT, Reduction, Sums, TreeSums, Wire, only_reads
from ..core.arguments import shown
from ..core.storage import clear_outside_
from ..core.tracing import is_tracing, memo
from ..layout.pieces import device_of
from ..layout.row import Row
from ..layout.rules import COPIES, Rule, arrived, reshard, route
from ..plan import ahead
from ..plan.plan import Plan, Slot
from ..plan.precision import Precision
from ..sharding.sharded import Sharded
from .gathers import decode, several

_LARGE = 1 << 20  # bytes of gradients that are summed in place: a second message is worth the memory


class Reducer:
    """The reductions of one backward into `reduced`; what they have in common is worked out once.

    The sum is not taken over the axes `later`: `rest` does that. A `reduced` without tensors gets a new one for each
    sum.
    """

    def __init__(self, reduced: Sharded, by: Reduction, later: Axes = (), device: torch.device | None = None):
        self._rows, self._tensors, self._plan = reduced.view.rows, reduced.tensors, reduced.plan
        self._by, self._later = by, later
        self._ways = {kind: RowReduction(reduced, kind, by, later, device) for kind in reduced.view.kinds}
        self._landed: dict[tuple[int, int], Tensor] = {}  # by unit and kind: buffers that are shards of `reduced`

    def _shard(self, row: Row[Slot]) -> Tensor:
        """This rank's shard (n / W,) of `reduced`, a view; of one without tensors, a new tensor."""
        if self._tensors:
            return row.of(self._tensors)
        plan, way = self._plan, self._ways[row.kind]
        like = way.like.new_empty(0, dtype=way.kept)
        return primitives.buffer(plan.live_mesh(), plan.axis_names, row.length, like, lent=False)

    def buffer(self, unit: int, kind: int) -> Tensor:
        """A flat buffer (n,) for a unit's gradients before they are reduced: their shard of `reduced` if it can."""
        way, row = self._ways[kind], self._rows[unit, kind]
        if way.least is not None and row.numel * way.like.itemsize >= way.least:
            self._landed[unit, kind] = self._shard(row)
            return self._landed[unit, kind]
        return way.like.new_empty(row.numel) if way.room is None else way.room(row.numel, way.like, way.lent)

    def start(self, unit: int, kind: int, flat: Tensor) -> Pending:
        """Start the sum over ranks of a filled buffer (n,), into this rank's shard of `reduced`, (n / W,)."""
        way, landed = self._ways[kind], self._landed.pop((unit, kind), None)
        if way.along is None and landed is flat:  # nobody to add to, and nothing to cast
            return arrived(flat)
        out = self._shard(self._rows[unit, kind]) if landed is None else landed
        if way.collective is None:
            return way.reduced(self._rows[unit, kind], flat, out)
        sent = flat if way.dtype is None else flat.to(way.dtype)
        return way.collective(sent, way.along, self._plan.units[unit].name, out).keeping(sent)

    def nothing(self, unit: int, kind: int) -> Pending:
        """Zeros for a unit that no rank gives a gradient: none has read it. `by.after` is still called."""
        way, row = self._ways[kind], self._rows[unit, kind]
        out = self._shard(row)
        landing = way.landing(out).zero_()
        return way.landed(arrived(landing), landing, out, row)

    def rest(self, sums: Sharded, later: Axes) -> None:
        """All-reduce `sums` over the axes `later` into `reduced`: one collective for each unit, all started at once."""
        plan, started = self._plan, list[Pending]()
        for row in (row for row in sums.view.rows.values() if row.numel):
            way, x, rule = self._ways[row.kind], row.of(sums.tensors).to(self._ways[row.kind].like.device), row.rule
            out = self._shard(row)
            landing, summed = way.landing(out), Rule(rule.over, plan.rest(plan.rest(later), row.kind))
            pending = reshard(x, summed, rule, plan.live_mesh(), plan.units[row.unit].name, landing, by=self._by)
            started.append(way.landed(pending, landing, out, row))
        for pending in started:
            pending.wait()


class RowReduction:
    """How gradients of one kind travel: a row (n,) of each rank's own is summed into the shards (n / W,) of `reduced`.

    If that is one collective, `collective` starts it along the ranks `along`, on gradients in `dtype` (None: in their
    own); else `reduced` does.
    """

    collective: Callable[..., Pending] | None = None
    along: Ranks | None = None
    dtype: torch.dtype | None = None
    least: int | None = None  # buffers of at least this many bytes are summed in place; None: never

    def __init__(self, reduced: Sharded, kind: int, by: Reduction, later: Axes, device: torch.device | None):
        plan, mesh = reduced.plan, reduced.plan.live_mesh()
        self._plan, self._kind, self._by, self._later = plan, plan.kinds[kind], by, later
        self._rest = partial(plan.rest, kind=kind)  # axes along which ranks have copies
        precision, axes = self._kind.precision, reduced.view.axes(kind)
        self._is_split = _is_split(precision)
        self._old, self._new = COPIES.dual(self._rest(())), Rule(axes, self._rest(plan.rest(later)))
        summed = axes + self._rest(axes + later)
        # on one rank it has a step, too, which casts, and is the user's if the reduction is
        self._needed = several(plan, summed) or summed[:1]
        self.kept = precision.grads  # the dtype of sums
        # with the dtype and device of buffers
        self.like = torch.empty(0, dtype=buffer_dtype(plan, kind), device=device or device_of(reduced))
        # the first axis that the buffer is sent over: the mesh may allocate it where peers, if it is `lent`, can read
        self.room = next((primitives.along(mesh, axis).empty for axis in axes + self._rest(axes)), None)
        self.lent = plan.grad_wire is None and only_reads(by)
        special = plan.grad_wire or self._kind.host or self._is_split or hasattr(by, "after")
        if not special:
            self._find_collective(kind, mesh)

    def _find_collective(self, kind: int, mesh: AnyMesh) -> None:
        """Set what spares small units the general way: one collective, or none."""
        plan, by = self._plan, self._by
        is_last = self.like.dtype == self.kept and only_reads(by)  # what is put is what is kept
        if is_last and not several(plan, self._needed):
            self.least = 0
            return
        steps = route(self._old, self._new, self._needed)
        if len(steps) == 1:
            self.collective = by.reduce_scatter if steps[0].kind == "scatter" else by.all_reduce
            self.along = primitives.along(mesh, steps[0].axis)
            # sums travel in the dtype they are taken in
            self.dtype = None if isinstance(by, TreeSums) else self._kind.precision.reduce
            # whole gradients are replaced by their sum
            self.least = _LARGE if is_last and type(by) is Sums and not several(plan, self._new.over) else None

    def reduced(self, row: Row[Slot], flat: Tensor, out: Tensor) -> Pending:
        """Start the sum over ranks of a row's gradients (n,), into the shard `out`, (n / W,)."""
        landing = self.landing(out)
        if self._plan.grad_wire is not None and self._needed and flat.is_floating_point():
            pending = self._encoded(row, flat, landing)
            pending = pending.then(lambda total: self._unpadded(total, row))
        else:
            pending = self._cast(row, flat, landing)
        return self.landed(pending, landing, out, row)

    def landing(self, out: Tensor) -> Tensor:
        """Where a sum is written: the shard; if that is in host memory, a buffer on the device."""
        return ahead.landing(out, self.like.device) if self._kind.host else out

    def landed(self, pending: Pending, landing: Tensor, out: Tensor, row: Row[Slot]) -> Pending:
        """A sum after the reduction's hook `after`, in its shard, copied to host memory if that is there."""
        after = None if self._later else getattr(self._by, "after", None)
        if after is not None:

            def hooked(total: Tensor) -> Tensor:
                result = after(total, self._plan.units[row.unit].name)
                if not isinstance(result, Tensor) or result.shape != total.shape:
                    raise TypeError(
                        f"{self._by}: after: expected the sum to go on with, of shape {list(total.shape)}, "
                        f"got {shown(result)}"
                    )
                return self._unpadded(landing.copy_(result), row)

            pending = pending.then(hooked)
        if not self._kind.host:
            return pending
        return pending.then(lambda total: self._plan.crossings.down.copied(total, out))

    def _cast(self, row: Row[Slot], flat: Tensor, out: Tensor) -> Pending:
        """Start the sum of (n,) into `out`, (n / W,), sent in the dtype that the plan's policy says."""
        mesh, name = self._plan.live_mesh(), self._plan.units[row.unit].name
        # Each gradient was divided by the number of ranks W. Multiplied by about sqrt(W), neither small gradients nor
        # sums of large ones leave the range of float16. A power of two rounds nothing.
        adds_up = isinstance(self._by, TreeSums)  # whose sums travel in the dtype they are taken in
        factor = 2.0 ** round(math.log2(num_ranks(mesh)) / 2) if self._is_split and not adds_up else 1
        scaled = flat if factor == 1 else flat * factor
        sent = scaled if adds_up else scaled.to(self._kind.precision.reduce)
        pending = reshard(sent, self._old, self._new, mesh, name, out, by=self._by, along=self._needed)
        return pending if factor == 1 else pending.then(lambda total: total.mul_(1 / factor))

    def _encoded(self, row: Row[Slot], flat: Tensor, out: Tensor) -> Pending:
        """Start the sum of (n,) into `out`, (n / W,), encoded by the plan's `grad_wire` along one axis."""
        plan, axes, by = self._plan, self._new.over, self._by
        mesh, name, wire = plan.live_mesh(), plan.units[row.unit].name, plan.grad_wire
        assert wire is not None  # `reduced` has looked
        # encoded along one axis: the first that gradients are cut over, else the longest
        axis = _first(plan, axes) if axes else max(self._rest(self._later), key=dict(plan.axes).__getitem__)
        ranks = primitives.along(mesh, axis)
        lengths = [row.lengths(number, ranks.size) for number in range(ranks.size)]  # of what each rank sums
        sends = [wire.encode(x, of_leaves) for x, of_leaves in zip(flat.chunk(ranks.size), lengths, strict=True)]
        added = primitives.scatter(sends, ranks, lambda received: _added(wire, received, lengths[ranks.rank]), name)
        # a sum travels on in its own dtype, not encoded again, along the other axes of several ranks
        over = axes[: axes.index(axis) + 1] if axes else ()
        old = Rule(over, self._rest((axis, *over)))
        if not axes:  # every rank needs the whole sum: what `scatter` has cut is gathered again before the other axes
            added = added.then(lambda shard: reshard(shard, Rule((axis,)), COPIES, mesh, name))
        return added.then(lambda total: reshard(total, old, self._new, mesh, name, out, by=by))

    def _unpadded(self, total: Tensor, row: Row[Slot]) -> Tensor:
        """Set the padding of a rank's shard to zero, in place.

        A wire may decode anything there, and so may a hook return, which unscaling would take for an overflow.
        """
        return clear_outside_(total, row.filled(row.number(self._plan.live_mesh())))


def buffer_dtype(plan: Plan, kind: int) -> torch.dtype:
    """The dtype of the flat buffer that a unit's gradients are written to before they are reduced."""
    precision = plan.kinds[kind].precision
    return torch.float32 if _is_split(precision) else precision.reduce


def _is_split(precision: Precision) -> bool:
    """Whether gradients are computed in a wider dtype and sent as float16."""
    return precision.reduce == torch.float16 and precision.compute != torch.float16


def _first(plan: Plan, axes: Axes) -> str:
    """The first axis of several ranks; the first axis if none has."""
    return next((axis for axis in axes if dict(plan.axes)[axis] > 1), axes[0])


def _added(wire: Wire, received: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """The sum of what all ranks sent, decoded, in rank order, in float32 at least."""
    first, *others = (decode(wire, data, lengths) for data in received)  # (n / W,) each
    total = first.to(primitives.sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total


OnSum = Callable[[int, int, Tensor], None]  # of a unit's and kind's sum over ranks, (n / W,)


@dataclass(frozen=True)
class Gradients:
    """Where a backward writes its gradients.

    Each unit's gradients are written to (with `add`, added to) a flat buffer: that of `local`, or a new one. If
    `reduced` is given, the buffer is then summed over ranks into `reduced`.

    `reduced` and `local` return the same value at every call, and allocate it at the first: there are no gradients in
    memory before the backward has one, while activations take the most. With `take` their `reduced` has no tensors.
    """

    reduced: Callable[[], Sharded] | None
    local: Callable[[], Sharded] | None = None
    add: bool = False
    by: Reduction = DEFAULT
    later: Axes = ()  # the axes that this backward does not reduce over
    take: OnSum | None = None  # is handed each sum in `reduced` (Note [Updates in a backward])
    device: torch.device | None = None  # of sums, where `reduced` has no tensors to tell it

    def by_plan(self, plan: Plan) -> Gradients:
        """The same rows, by a plan with other units."""
        later = [x and (lambda x=x: x().by_plan(plan)) for x in (self.reduced, self.local)]
        return replace(self, reduced=later[0], local=later[1])

    @memo
    def _reducer(self) -> Reducer:
        assert self.reduced is not None
        return Reducer(self.reduced(), self.by, self.later, self.device)

    @memo
    def _local(self) -> tuple[Mapping[tuple[int, int], Row[Slot]], Sequence[Tensor]] | None:
        local = None if self.local is None else self.local()
        return None if local is None else (local.view.rows, local.tensors)

    def buffer(self, unit: int, kind: int) -> Tensor:
        """The flat buffer (n,) that a unit's gradients are written to."""
        if self._local is None:
            return self._reducer.buffer(unit, kind)
        rows, tensors = self._local
        return rows[unit, kind].of(tensors)

    def untouched(self, unit: int, kind: int) -> Pending | None:
        """Zeros for a unit and kind that got no gradient; the sum so far, if gradients are added up. As `emit`."""
        if self.add:
            return self.emit(unit, kind, self.buffer(unit, kind)) if self.local else None
        if self.local is not None:
            self.buffer(unit, kind).zero_()
        return None if self.reduced is None else self._reducer.nothing(unit, kind)

    def filled(self, row: Row[Slot], grads: Sequence[Tensor | None], again: bool) -> Tensor:
        """The flat buffer (n,) with the gradients of the leaves of a row; zeros for leaves that have none.

        `again` says that it has some already, to which these are added.
        """
        flat = self.buffer(row.unit, row.kind)
        # embedding(sparse=True) gives a sparse gradient
        dense = [g if g.layout is torch.strided else g.to_dense() for g in grads if g is not None]
        if len(dense) < len(grads):
            row = row.renamed({slot: slot for slot, grad in zip(row.leaves, grads, strict=True) if grad is not None})
        row.put(flat, dense, self.add or again)
        return flat

    def emit(self, unit: int, kind: int, flat: Tensor) -> Pending | None:
        """Start the reduction of a filled buffer; None if gradients stay local."""
        return None if self.reduced is None else self._reducer.start(unit, kind, flat)


def as_read(params: Sharded, into: Gradients | None) -> tuple[Sharded, Gradients | None, bool]:
    """The same rows by `Plan.as_read`, and whether there is one, and nobody is handed what becomes of each unit."""
    plan, whole = params.plan.as_read, params.view.units == (0, len(params.plan.units))
    if plan is None or not whole or is_tracing() or (into and (into.take or not only_reads(into.by))):
        return params, into, False
    return params.by_plan(plan), into and into.by_plan(plan), True


class Reductions:
    """The reductions of one backward into `into` that are under way, in the order in which they started."""

    def __init__(self, plan: Plan, into: Gradients | None = None):
        self._side = plan.crossings.sums if plan.has_streams and not is_tracing() else None
        by = None if into is None or plan.grad_wire is not None else into.by
        # else what arrives is added beside the computation
        self._is_fast = self._side is not None and type(by) is Sums and by.is_fast(plan.device)
        self._ahead, self._stages = plan.ahead, sum(size > 1 for _, size in plan.axes)
        self._under_way: list[tuple[int, Pending]] = []  # and the unit of each
        self._stepped: list[Pending] = []  # what the side stream may still be reading

    def add(self, unit: int, pending: Pending) -> None:
        """Keep a reduction of a unit that was started."""
        self._under_way.append((unit, pending))

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.ahead()

    def join(self) -> None:
        """Make the computation wait for the sums so far, and drop the buffers that they read."""
        if self._side is not None and self._stepped:
            self._side.join()
            self._stepped.clear()

    def move_on(self, following: int) -> None:
        """Take older reductions one stage further, so that the gradients of the unit `following` have room next.

        The reductions that `Ahead.reductions` counts are not advanced.
        """
        number = self._ahead.number
        if number == 1:  # as where units are equal
            num = len(self._under_way)
            while num and self._under_way[num - 1][0] == self._under_way[-1][0]:
                num -= 1
            return self._step(num)
        self._leave(self._ahead.reductions(following, self._units(), self._stages))

    def _units(self) -> list[int]:
        return list(dict.fromkeys(unit for unit, _ in self._under_way))

    def _leave(self, number: int) -> None:
        """Take all reductions one stage further but those of so many units, the last ones."""
        units = self._units()
        older = units[: max(0, len(units) - number)]
        self._step(sum(unit in older for unit, _ in self._under_way))

    def make_room(self, unit: int) -> None:
        """Wait for reductions until the gradients of a unit that has come have room beside those under way.

        Sums that the backend takes have had a unit's time, and their buffers are free; others are still to be added.
        """
        if self._stages > 1:
            return
        if self._ahead.number is None:
            self.move_on(unit)
        if self._is_fast:  # as after this unit, so that its buffer takes their place
            self._leave(max(0, self._ahead.reductions(unit - 1, [*self._units(), unit], self._stages) - 1))

    def _step(self, num: int) -> None:
        """Take the first `num` reductions one stage further, and drop those that are done.

        The youngest goes first: its next stage is under way while the host waits for the others.
        """
        if not num:
            return
        units, older = zip(*self._under_way[:num], strict=True)
        if self._side is not None:  # kept before a step can raise: the device may be reading them even then
            self._stepped += older
        with self._beside():
            stepped = [pending.step() for pending in reversed(older)]
        pairs = zip(units, reversed(stepped), strict=True)
        self._under_way[:num] = [(unit, pending) for unit, pending in pairs if isinstance(pending, Pending)]

    def finish(self) -> None:
        """Wait for every reduction."""
        while self._under_way:
            self._step(len(self._under_way))
        self.join()

    def drop(self) -> None:
        """Wait for the messages under way, and drop all reductions; no next stage starts."""
        try:
            for _, pending in self._under_way:
                pending.drop()
        finally:
            self.join()
            self._under_way.clear()


def settle(plan: Plan) -> None:
    """Make the host wait for the device, if the plan has trainable leaves in host memory: the host updates them."""
    if any(kind.host and kind.trainable for kind in plan.kinds):
        plan.crossings.down.settle()
