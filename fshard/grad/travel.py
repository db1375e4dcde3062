"""A row's two ways: a shard is gathered for the loss, and gradients are summed back into a shard.

Note [A row's ways]
    A row is the flat buffer (n,) of the leaves of one unit and kind; each of W ranks has a shard (n / W,). Each step of
    `Gathers` is the dual of a step of `Gradients` (Note [Duals] in `rules.py`). Read the left column down, then the
    right column up:

    | out: `Gathers.start`                               | back: `Gradients.emit`                                |
    |----------------------------------------------------|-------------------------------------------------------|
    | the shard (n / W,) of the parameters               | `grad_shard` (n / W,) of the gradients                |
    | `_on_device`: copied from host memory              | `_landed`: the hook `after`; copied to host memory    |
    | `all_gather_input` (n / W,): cast, or encoded      | `reduce_scatter_output` (n / W,): decoded, added      |
    | sent: `reshard` from cut to copies, an all-gather  | sent: `reshard` from sum to cut, a reduce-scatter     |
    | `all_gather_output` (n,): what arrived, or decoded | `reduce_scatter_input` (n,): cast, or encoded         |
    | `Row.views`: the leaves that the loss reads        | `filled` (`Row.put`): the gradients of the leaves     |

    Dtypes are those of `Kind.precision`: `all_gather_*` in `compute`, `reduce_scatter_input` in `reduce`
    (`buffer_dtype`), `grad_shard` in `grads`. If gradients are cut over no axis, the sum is an all-reduce with the same
    names. A way of at most one collective skips the general code (`Gathers._plain`, `_PlainSum`): for small units this
    code would take longer than the message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import maxsize
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes, num_ranks
from ..comm.ranks import Pending, Ranks
from ..comm.reduction import DEFAULT, Reduction, Sums, TreeSums, Wire, only_reads
from ..core.arguments import shown
from ..core.storage import address, clear_outside_, cleared_outside, pack_bytes, unpack_bytes
from ..core.tracing import is_tracing, memo
from ..layout.row import Row
from ..layout.rules import COPIES, Rule, arrived, reshard, route
from ..plan import ahead
from ..plan.plan import Plan, Slot
from ..plan.precision import Precision
from ..sharding.schedule import Entry, View
from ..sharding.sharded import Sharded

_LARGE = 1 << 20  # bytes: larger gradients are summed in place, with less memory but one message more
OnSum: TypeAlias = Callable[[int, int, Tensor], None]  # unit, kind, sum over ranks (n / W,)


def is_buffer(view: View, kind: int, copied: bool) -> bool:
    """True if a kind's leaves have buffers of their own; else they are views of the parameters.

    `copied`: trainable leaves always have buffers, as an optimizer writes to the parameters during the backward.
    """
    row, axes = view.plan.kinds[kind], view.axes(kind)
    return (copied and row.trainable) or bool(axes) or row.host or row.precision.compute != row.dtype


def _param_wire(plan: Plan, kind: int) -> Wire | None:
    return plan.param_wire if plan.kinds[kind].dtype.is_floating_point else None


class Gathers:
    """The way out: gathers units. `copied`: as in `is_buffer`."""

    def __init__(self, params: Sharded, copied: bool):
        plan, axes = params.plan, [axis for axis in params.view.over if axis in params.plan.linked]
        self._plan, self._tensors, self._copied = plan, params.tensors, copied
        # plain: the gather of a kind takes at most one cast and one collective
        special = plan.gather or plan.param_wire or plan.together or any(kind.host for kind in plan.kinds)
        self._is_plain = not special and len(axes) <= 1
        self._ranks = primitives.along(plan.live_mesh(), axes[0]) if self._is_plain and axes else None

    def start(self, entry: Entry, rows: Sequence[Row[Slot]]) -> dict[int, Pending]:
        """Start the gathers of some rows. Results by kind: `all_gather_output` (n,)."""
        if self._is_plain:
            return {row.kind: self._plain(entry.name, row) for row in rows}
        if not any(self._plan.kinds[row.kind].host for row in rows):
            return self._general(entry.name, rows)
        up = self._plan.crossings.up  # shards in host memory go to the device while the computation runs
        with up.ahead():
            gathers = self._general(entry.name, rows)
        return {kind: up.joined(gather) for kind, gather in gathers.items()}

    def from_copies(self, entry: Entry, copies: Mapping[int, Tensor], axes: Axes) -> dict[int, Pending]:
        """Gather copies cut over `axes`, by kind: (n / W,) on each rank -> (n,)."""
        cut = [(self._plan.rule(row.kind, axes).over, row) for row in entry.rows if row.kind in copies]
        return self._gather(entry.name, cut, lambda row: copies[row.kind], encoded=False)

    def _plain(self, name: str, row: Row[Slot]) -> Pending:
        if self._ranks is None or row.shards == 1 or not row.numel:
            return self._unsent(row)
        all_gather_input = row.of(self._tensors)
        if all_gather_input.dtype != self._plan.kinds[row.kind].precision.compute:
            all_gather_input = self._cast(row)
        return primitives.all_gather(all_gather_input, self._ranks, name, lent=True)

    def _general(self, name: str, rows: Sequence[Row[Slot]]) -> dict[int, Pending]:
        cut = [(row.rule.over, row) for row in rows if row.numel and row.rule.over]
        travelling, encoded = [row for _, row in cut], self._plan.param_wire is not None
        unsent = {row.kind: self._unsent(row) for row in rows if row not in travelling}
        return unsent | self._gather(name, cut, self._all_gather_input, encoded)

    def _unsent(self, row: Row[Slot]) -> Pending:
        all_gather_output = self._cast(row)
        if self._copied and self._plan.kinds[row.kind].trainable:
            return arrived(self._own_memory(row, all_gather_output))
        return arrived(all_gather_output)

    def _own_memory(self, row: Row[Slot], x: Tensor) -> Tensor:
        """Copy `x` if it is the shard itself, as a gather over one rank may return."""
        return x.clone() if address(x) == address(self._tensors[row.tensor]) else x

    def _on_device(self, row: Row[Slot]) -> Tensor:
        """The shard (n / W,); the host does not wait."""
        shard = row.of(self._tensors)
        return shard.to(self._plan.device, non_blocking=True) if self._plan.kinds[row.kind].host else shard

    def _cast(self, row: Row[Slot]) -> Tensor:
        """The shard (n / W,) on the device, in the dtype of computation."""
        shard, compute = self._on_device(row), self._plan.kinds[row.kind].precision.compute
        if shard.dtype == compute:
            return shard
        axes, like = row.rule.over or self._plan.axis_names, shard.new_empty(0, dtype=compute)
        return primitives.buffer(self._plan.live_mesh(), axes, shard.numel(), like, lent=False).copy_(shard)

    def _all_gather_input(self, row: Row[Slot]) -> Tensor:
        wire, mesh = _param_wire(self._plan, row.kind), self._plan.live_mesh()
        if wire is None:
            return self._cast(row)
        # zero the padding: a NaN there would spoil the scale that a wire computes over several elements
        shard = cleared_outside(self._on_device(row), row.filled(row.number(mesh)))
        return wire.encode(shard, row.lengths(row.rule.number(mesh), row.shards))

    def _gather(
        self, name: str, cut: Iterable[tuple[Axes, Row[Slot]]], make: Callable[[Row[Slot]], Tensor], encoded: bool
    ) -> dict[int, Pending]:
        """Start gathers of rows cut over axes. `make(row)`: the `all_gather_input`, `encoded` by a wire or not.

        With `Plan.together` rows cut over the same axes travel in one message.
        """
        groups, gathers = dict[object, tuple[Axes, list[Row[Slot]]]](), dict[int, Pending]()
        for axes, row in cut:
            groups.setdefault(axes if self._plan.together else row.kind, (axes, []))[1].append(row)
        for axes, group in groups.values():
            if len(group) > 1:
                gathers |= self._in_one_message(name, axes, group, [*map(make, group)], encoded)
                continue
            (row,) = group
            lent = not encoded or _param_wire(self._plan, row.kind) is None  # a wire may overwrite what arrived
            gather = self._over(axes, make(row), name, lent)
            if self._copied or not lent:
                gather = gather.then(partial(self._own_memory, row))
            gathers[row.kind] = gather if lent else gather.then(partial(self._decoded, row, axes, encoded))
        return gathers

    def _over(self, axes: Axes, all_gather_input: Tensor, name: str, lent: bool) -> Pending:
        """(n / W,) on each rank -> (n,). On one rank only a user's gather runs."""
        mesh, gather = self._plan.live_mesh(), self._plan.gather
        along = axes if gather else None
        return reshard(all_gather_input, Rule(axes), COPIES, mesh, name, gather=gather, along=along, lent=lent)

    def _in_one_message(
        self, name: str, axes: Axes, rows: Sequence[Row[Slot]], all_gather_inputs: Sequence[Tensor], encoded: bool
    ) -> dict[int, Pending]:
        forms = [(x.dtype, x.numel()) for x in all_gather_inputs]
        # not lent with a wire: decoding may overwrite what arrived
        gather = self._over(axes, pack_bytes(all_gather_inputs), name, lent=not encoded)
        outputs = dict[int, Tensor]()

        def split(message: Tensor) -> Tensor:
            by_rank = [unpack_bytes(data, forms) for data in message.chunk(self._plan.num_ranks(axes))]
            for row, parts in zip(rows, zip(*by_rank, strict=True), strict=True):
                outputs[row.kind] = self._decoded(row, axes, encoded, parts)
            return outputs[rows[0].kind]

        def after(kind: int) -> Pending:
            return Pending(None, lambda _: outputs[kind])

        # only the first kind waits for the message, and splits it for all kinds
        return {rows[0].kind: gather.then(split)} | {row.kind: after(row.kind) for row in rows[1:]}

    def _decoded(self, row: Row[Slot], axes: Axes, encoded: bool, received: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the `all_gather_output` (n,). `received`: one tensor from each rank, or all joined in one."""
        received = received.chunk(row.shards) if isinstance(received, Tensor) else received
        plan, wire = self._plan, _param_wire(self._plan, row.kind) if encoded else None
        like = received[0].new_empty(0, dtype=plan.kinds[row.kind].precision.compute)
        all_gather_output = primitives.buffer(plan.live_mesh(), axes, row.numel, like, lent=False)
        shards = all_gather_output.chunk(len(received))  # (n / W,) each
        for number, (shard, data) in enumerate(zip(shards, received, strict=True)):
            shard.copy_(data if wire is None else _decode(wire, data, row.lengths(number, len(received))))
        return all_gather_output


def _decode(wire: Wire, data: Tensor, lengths: Sequence[int]) -> Tensor:
    out, numel = wire.decode(data, lengths), sum(lengths)
    if out.shape != (numel,):
        raise ValueError(f"{wire}: decode gave {list(out.shape)}, expected the {numel} elements that were encoded")
    return out


def _unshared(numel: int, like: Tensor, lent: bool) -> Tensor:
    return like.new_empty(numel)


class _PlainSum(NamedTuple):
    """The sum of one kind's gradients: one collective along `ranks`, or none."""

    empty: Callable[[int, Tensor, bool], Tensor]  # as `Ranks.empty`
    like: Tensor
    lent: bool
    in_place: int = maxsize  # from this number of elements on, the `grad_shard` is also the input
    ranks: Ranks | None = None
    collective: Callable[..., Pending] | None = None  # a method of the reduction
    dtype: torch.dtype | None = None  # for sending; None: unchanged


class Rooms(NamedTuple):
    """A tree's memory, allocated at its first use: by then the backward frees activations."""

    view: View
    device: torch.device
    empty: Callable[[int, int], Tensor]  # by kind and number of elements
    tensor: Callable[[int], Tensor]  # the same tensor for the same number

    def of(self, row: Row[Slot]) -> Tensor:
        return self.tensor(row.tensor)[row.start : row.stop]

    def whole(self) -> Sharded:
        return Sharded(self.view, [self.tensor(number) for number in range(len(self.view.tensors))])

    def by_plan(self, plan: Plan) -> Rooms:
        return self._replace(view=replace(self.view, plan=plan, units=(0, len(plan.units))))


@dataclass(frozen=True)
class Gradients:
    """The way back: sums a backward's gradients over ranks, into shards.

    Each unit's gradients are written to (`add`: added to) a `reduce_scatter_input`: a row of `local`, or a new tensor.
    With `reduced` the rows are then summed over ranks into shards of `reduced`, or with `take` into new tensors.
    """

    reduced: Rooms | None
    local: Rooms | None = None
    add: bool = False
    by: Reduction = DEFAULT
    later: Axes = ()  # `all_reduce_later` sums along these axes
    take: OnSum | None = None  # gets each sum (Note [Updates in a backward] in `in_backward.py`)

    def by_plan(self, plan: Plan) -> Gradients:
        others = [x and x.by_plan(plan) for x in (self.reduced, self.local)]
        return replace(self, reduced=others[0], local=others[1])

    @memo
    def _sums(self) -> Rooms:
        assert self.reduced is not None
        return self.reduced

    @memo
    def _rows(self) -> Mapping[tuple[int, int], Row[Slot]]:
        return self._sums.view.rows

    @memo
    def _in_place(self) -> dict[tuple[int, int], Tensor]:
        """By unit and kind: inputs in a shard of `reduced`, until `emit`."""
        return {}

    @memo
    def _plain(self) -> dict[int, _PlainSum]:
        return {kind: self._plain_sum(kind) for kind in self._sums.view.kinds}

    def _plain_sum(self, number: int) -> _PlainSum:
        plan, axes, by = self._sums.view.plan, self._sums.view.axes(number), self.by
        kind, mesh = plan.kinds[number], plan.live_mesh()
        like = torch.empty(0, dtype=buffer_dtype(plan, number), device=self._sums.device)
        # the mesh allocates: peers along the first axis of the sum may read a lent buffer
        empty = next((primitives.along(mesh, axis).empty for axis in axes + plan.rest(axes, number)), _unshared)
        general = _PlainSum(empty, like, lent=plan.grad_wire is None and only_reads(by))
        if plan.grad_wire or kind.host or _is_split(kind.precision) or hasattr(by, "after"):
            return general
        old, new, along = self._route(number, axes)
        is_last = like.dtype == kind.precision.grads and only_reads(by)  # the sum needs no cast
        if is_last and plan.num_ranks(along) == 1:
            return general._replace(in_place=0)
        steps = route(old, new, along)
        if len(steps) > 1 or not steps:
            return general
        # an all-reduce can write its sum over the gradients
        is_replaced = is_last and type(by) is Sums and steps[0].kind == "add"
        collective = by.reduce_scatter if steps[0].kind == "scatter" else by.all_reduce
        in_place = _LARGE // like.itemsize if is_replaced else maxsize
        # `TreeSums` travel in their own dtype
        dtype = None if isinstance(by, TreeSums) else kind.precision.reduce
        ranks = primitives.along(mesh, steps[0].axis)
        return general._replace(in_place=in_place, ranks=ranks, collective=collective, dtype=dtype)

    def _route(self, kind: int, axes: Axes) -> tuple[Rule, Rule, Axes]:
        """Return (rule before the sum, rule after the sum: cut over `axes`, axes of the steps between).

        On one rank a step remains, for a cast or the user's reduction.
        """
        # copies(axes): others along which ranks have copies
        plan, copies = self._sums.view.plan, partial(self._sums.view.plan.rest, kind=kind)
        alone = [axis for axis in plan.axis_names if axis not in (*self.later, plan.kinds[kind].split)]
        along = (*(axis for axis in axes if axis in plan.linked), *copies(axes + self.later)) or tuple(alone[:1])
        new = Rule(axes, copies(plan.rest(self.later)))
        return COPIES.dual(along + new.sums), new, along

    def buffer(self, unit: int, kind: int) -> Tensor:
        """Allocate a unit's `reduce_scatter_input` (n,), in the memory of its `grad_shard` if possible."""
        if self.local is not None:
            return self.local.of(self.local.view.rows[unit, kind])
        row, plain = self._rows[unit, kind], self._plain[kind]
        if row.numel < plain.in_place:
            return plain.empty(row.numel, plain.like, plain.lent)
        self._in_place[unit, kind] = grad_shard = self._grad_shard(row)
        return grad_shard

    def filled(self, row: Row[Slot], grads: Sequence[Tensor | None], again: bool) -> Tensor:
        """The `reduce_scatter_input` (n,); zeros for None. `again`: add to the earlier gradients."""
        reduce_scatter_input = self.buffer(row.unit, row.kind)
        # embedding(sparse=True) gives a sparse gradient
        dense = [g if g.layout is torch.strided else g.to_dense() for g in grads if g is not None]
        if len(dense) < len(grads):
            row = row.renamed({slot: slot for slot, grad in zip(row.leaves, grads, strict=True) if grad is not None})
        row.put(reduce_scatter_input, dense, self.add or again)
        return reduce_scatter_input

    def emit(self, unit: int, kind: int, reduce_scatter_input: Tensor) -> Pending | None:
        """Start the sum of a `filled` buffer (n,) into its `grad_shard` (n / W,); None if gradients stay local."""
        if self.reduced is None:
            return None
        plain, grad_shard = self._plain[kind], self._in_place.pop((unit, kind), None)
        if plain.ranks is None and grad_shard is reduce_scatter_input:  # nothing to add or cast
            return arrived(reduce_scatter_input)
        row = self._rows[unit, kind]
        if grad_shard is None:
            grad_shard = self._grad_shard(row)
        if plain.collective is None:
            return self._landed(row, grad_shard, partial(self._general, row, reduce_scatter_input))
        sent = reduce_scatter_input if plain.dtype is None else reduce_scatter_input.to(plain.dtype)
        return plain.collective(sent, plain.ranks, self._sums.view.plan.units[unit].name, grad_shard).keeping(sent)

    def untouched(self, unit: int, kind: int) -> Pending | None:
        """As `emit`, for a unit and kind without gradients: zeros or, with `add`, the sum so far."""
        if self.add:
            return self.emit(unit, kind, self.buffer(unit, kind)) if self.local else None
        if self.local is not None:
            self.buffer(unit, kind).zero_()
        if self.reduced is None:
            return None
        row = self._rows[unit, kind]  # no rank read the unit
        return self._landed(
            row, self._grad_shard(row), lambda reduce_scatter_output: arrived(reduce_scatter_output.zero_())
        )

    def all_reduce_later(self, sums: Sharded, later: Axes) -> None:
        plan, by, device, started = sums.plan, self.by, self._sums.device, list[Pending]()
        for row in (row for row in sums.view.rows.values() if row.numel):
            x, old = row.of(sums.tensors).to(device), Rule(row.rule.over, plan.rest(plan.rest(later), row.kind))
            start = partial(reshard, x, old, row.rule, plan.live_mesh(), plan.units[row.unit].name, by=by)
            started.append(self._landed(row, self._grad_shard(row), start))
        for pending in started:
            pending.wait()

    def _landed(self, row: Row[Slot], grad_shard: Tensor, start: Callable[[Tensor], Pending]) -> Pending:
        """Start a sum on the device; then call the hook `after`, then copy to host memory."""
        plan, is_host = self._sums.view.plan, self._sums.view.plan.kinds[row.kind].host
        reduce_scatter_output = ahead.landing(grad_shard, self._sums.device) if is_host else grad_shard
        pending = start(reduce_scatter_output)
        if not self.later and (after := getattr(self.by, "after", None)) is not None:
            pending = pending.then(partial(self._hooked, after, row, reduce_scatter_output))
        return pending.then(lambda total: plan.crossings.down.copied(total, grad_shard)) if is_host else pending

    def _hooked(
        self, after: Callable[..., object], row: Row[Slot], reduce_scatter_output: Tensor, total: Tensor
    ) -> Tensor:
        result = after(total, self._sums.view.plan.units[row.unit].name)
        if not isinstance(result, Tensor) or result.shape != total.shape:
            raise TypeError(
                f"{self.by}: after: expected the sum to go on with, of shape {list(total.shape)}, got {shown(result)}"
            )
        return self._unpadded(row, reduce_scatter_output.copy_(result))

    def _general(self, row: Row[Slot], reduce_scatter_input: Tensor, reduce_scatter_output: Tensor) -> Pending:
        plan, (old, new, along) = self._sums.view.plan, self._route(row.kind, row.rule.over)
        if plan.grad_wire is not None and along and reduce_scatter_input.is_floating_point():
            pending = self._sum_encoded(plan.grad_wire, row, reduce_scatter_input, new, along, reduce_scatter_output)
            return pending.then(partial(self._unpadded, row))
        mesh, precision, name = plan.live_mesh(), plan.kinds[row.kind].precision, plan.units[row.unit].name
        # Each gradient was divided by W, the number of ranks. Multiplied by about sqrt(W), small gradients and sums
        # stay in the range of float16. The factor is a power of two: it rounds nothing.
        adds_up = isinstance(self.by, TreeSums)
        factor = 2.0 ** round(math.log2(num_ranks(mesh)) / 2) if _is_split(precision) and not adds_up else 1
        scaled = reduce_scatter_input if factor == 1 else reduce_scatter_input * factor
        sent = scaled if adds_up else scaled.to(precision.reduce)
        pending = reshard(sent, old, new, mesh, name, reduce_scatter_output, by=self.by, along=along)
        return pending if factor == 1 else pending.then(lambda total: total.mul_(1 / factor))

    def _sum_encoded(
        self, wire: Wire, row: Row[Slot], reduce_scatter_input: Tensor, new: Rule, along: Axes, out: Tensor
    ) -> Pending:
        plan, axes = self._sums.view.plan, new.over
        mesh, name, copies = plan.live_mesh(), plan.units[row.unit].name, partial(plan.rest, kind=row.kind)
        # encode along the first cut axis with several ranks, else along the longest axis
        longest = max(axes or along, key=dict(plan.axes).__getitem__)
        axis = next((axis for axis in axes if axis in plan.linked), longest)
        ranks = primitives.along(mesh, axis)
        lengths = [row.lengths(number, ranks.size) for number in range(ranks.size)]  # by rank
        parts = zip(reduce_scatter_input.chunk(ranks.size), lengths, strict=True)
        sends = [wire.encode(part, of_leaves) for part, of_leaves in parts]
        added = primitives.scatter(sends, ranks, lambda received: _added(wire, received, lengths[ranks.rank]), name)
        # along other axes the sum is not encoded again
        over = axes[: axes.index(axis) + 1] if axes else ()
        old = Rule(over, copies((axis, *over)))
        if not axes:  # every rank needs the whole sum
            added = added.then(lambda shard: reshard(shard, Rule((axis,)), COPIES, mesh, name))
        return added.then(lambda total: reshard(total, old, new, mesh, name, out, by=self.by))

    def _grad_shard(self, row: Row[Slot]) -> Tensor:
        return self._sums.of(row) if self.take is None else self._sums.empty(row.kind, row.length)

    def _unpadded(self, row: Row[Slot], total: Tensor) -> Tensor:
        """Zero a shard's padding: unscaling would take a NaN from a wire or hook for overflow."""
        return clear_outside_(total, row.filled(row.number(self._sums.view.plan.live_mesh())))


def buffer_dtype(plan: Plan, kind: int) -> torch.dtype:
    precision = plan.kinds[kind].precision
    return torch.float32 if _is_split(precision) else precision.reduce


def _is_split(precision: Precision) -> bool:
    return precision.reduce == torch.float16 and precision.compute != torch.float16


def _added(wire: Wire, received: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    first, *others = (_decode(wire, data, lengths) for data in received)  # (n / W,) each
    total = first.to(primitives.sum_dtype(first.dtype), copy=True)
    for part in others:
        total += part
    return total


def as_read(params: Sharded, into: Gradients | None) -> tuple[Sharded, Gradients | None, bool]:
    """Return both by the joined units of `Plan.as_read`, and True; unchanged, and False, if it does not apply."""
    plan, whole = params.plan.as_read, params.view.units == (0, len(params.plan.units))
    if plan is None or not whole or is_tracing() or (into and (into.take or not only_reads(into.by))):
        return params, into, False
    return params.by_plan(plan), into and into.by_plan(plan), True


def settle(plan: Plan) -> None:
    if any(kind.host and kind.trainable for kind in plan.kinds):
        plan.crossings.down.settle()
