"""One eager forward and backward: gather on access, gather again in the backward, reduce unit by unit.

Note [Tensors of a step]
    A `Tape` lives for one forward and one backward over one value of the parameters; every gather under way belongs to
    it and ends with it. Touching a unit gathers it into a flat buffer, of which the leaves are views. During the
    forward the tape keeps the buffers of the root, of the unit touched last, and of a unit of `Plan.lasting` that was
    gathered a second time: what all units read may be declared before them. Other buffers live as long as the
    user's function keeps a leaf of them. When autograd saves a view of a gathered buffer, the tape stores the place of
    the view instead (`SavedView`), so saving keeps no buffer alive. In the backward the first use of a place of a unit
    gathers the unit again, and the last use drops it. A unit that is read in an activation checkpoint is gathered again
    when that runs again. The backward begins with the unit that was saved, or read in a checkpoint, last: if its buffer
    is in memory when the forward ends, it stays. Of units with another `Unit.kept` more stays (Note [What stays of a
    unit] in `gathers.py`). Which collectives run depends on the program alone, never on when memory is freed, so ranks
    that run the same function issue the same collectives.

Note [Reverse mode inside a loss]
    torch.func.grad, vjp, jacrev and hessian refuse to start while hooks on saved tensors are on. Nothing tells
    beforehand that a loss uses them, so the loss runs with hooks, and if torch.func refuses, once more without: a loss
    is a pure function. The second run draws the same random numbers, gathers nothing again that is still in memory, and
    keeps what it gathers for the backward, as `regather=False` does; what the first run saved is dropped. Whether there
    is a second run depends on the program alone, so all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..comm.ranks import MismatchError, Pending
from ..core import func_levels, tree
from ..core.random import bookmark
from ..core.storage import address
from ..core.tree import Tree
from ..plan.units import select_units
from ..sharding.access import Shown, lazy, loss_of
from ..sharding.schedule import Reads, schedule
from ..sharding.sharded import Sharded
from . import autograd, gathers, gradients
from .autograd import Owners, SavedTensor, SavedView, has_reentrant, in_checkpoint
from .gathers import Arrivals, Buffers, Kept
from .gradients import Gradients, Handing, Reductions, settle
from .writes import Writes

T = TypeVar("T")
Leaves: TypeAlias = Sequence[Tensor]  # of a unit, in the order of its `Entry.slots`


class Tape:
    """The gathers and reductions of one forward and backward over one `Sharded`; without `into`, of a forward alone.

    A subclass may extend `view`, `touch`, `pack`, `unpack`, `end` and `close`.

    `beside` are the other `Sharded` that the loss reads: without gradients, each with a tape that gathers for this one.
    """

    def __init__(self, params: Sharded, into: Gradients | None = None, beside: Sequence[Sharded] = ()):
        self.beside = [(x, Tape(x)) for x in beside]
        self._params = params
        self.plan = params.plan
        self._into = into
        self.root = autograd.root()
        self._schedule = schedule(params.view)
        # by unit: the gathered leaves, the flat buffers that they are views of, and the leaves bound to their anchors
        self._gathered: dict[int, Leaves] = {}
        self._full: dict[int, Buffers] = {}  # after the forward: of the unit saved last
        self._bound: dict[int, Leaves] = {}
        self._anchors = autograd.Anchors()
        self.shown: Shown | None = Shown()  # until the forward ends
        self._touched: set[int] = set()
        self._staying = {self.plan.root}  # units whose buffers stay until the forward ends
        self._owners = Owners()
        # the number of saved places of each unit, 0 of one that only checkpoints read; the unit saved last is the last
        self._saved: dict[int, int] = {}
        self._again: dict[int, Buffers] = {}  # gathered again for the backward
        self._to_come: dict[int, None] = {}  # the units that the backward will gather again, the next one last
        self._reductions = Reductions(self.plan, into)
        take = None if into is None else into.take
        copied = take is not None  # what is read is not what `take` writes to
        views = [k for k in params.view.kinds if not gathers.is_buffer(params, k, copied)]
        self._handing = None if take is None else Handing(take, views)
        self._filled: set[tuple[int, int]] = set()  # units and kinds whose gradients have come
        self._backward = self._closed = False
        self._writes = Writes()
        self._rows = {address(row) for row in params.tensors}
        self._gradless = False  # whether a unit was touched where gradients are off
        self._reached: dict[int, bool] = {}  # units whose gradients have come, and whether those of all their leaves
        self._kept = Kept(params, into is not None)
        self._makes_buffers = len(views) < len(params.view.kinds)
        self._regather = self._makes_buffers and self._schedule.regathers  # in the forward: places are saved
        self._arrivals = Arrivals(params, self._kept, copied)

    def view(self) -> Tree:
        """The parameters as the loss sees them."""
        return self.enter(self._params.view.spec, self._params.view.first)

    def enter(self, spec: tree.Spec, first: int) -> Tree:
        """A leaf, or a subtree of one unit, gathered; of a subtree of several units a lazy container."""
        reads = self._schedule.reads(first, spec.num_leaves)
        if reads.is_shared:
            return lazy(self, spec, first)
        if not func_levels.inside():
            return tree.unflatten(spec, self._read(reads))
        with func_levels.aside():  # Note [Gathers inside transforms] in `func_levels`
            leaves = self._read(reads)
        return tree.unflatten(spec, leaves)

    def _read(self, reads: Reads) -> Leaves:
        if reads.unit is not None:
            return self.touch(reads.unit)
        touched = {unit: self.touch(unit) for unit in dict.fromkeys(unit for unit, _ in reads.leaves)}
        return [touched[unit][number] for unit, number in reads.leaves]

    def leaf(self, number: int) -> Tensor:
        """A leaf by its number in the whole tree, gathered with its unit."""
        unit, place = self._schedule.leaf(number)
        if not func_levels.inside():
            return self.touch(unit)[place]
        with func_levels.aside():
            return self.touch(unit)[place]

    def like(self, number: int) -> Tensor:
        """A tensor with a leaf's shape, device and the dtype of computation, of one element in memory."""
        slot = self.plan.slots[self.plan.leaves[number]]
        compute = self.plan.kinds[slot.kind].precision.compute
        return torch.empty((), dtype=compute, device=self._device).expand(slot.shape)

    @property
    def _device(self) -> torch.device:
        rows = self._params.tensors
        return self.plan.device if self.plan.axes or not rows else rows[0].device

    def touch(self, unit: int) -> Leaves:
        """The leaves of a unit, gathered if they are not in memory; the gathers of the units after it are started."""
        leaves = self._gathered.get(unit)
        if leaves is None:
            leaves = self._gather(unit)
        # without a unit that trains, this or an earlier one, a checkpoint has nothing to run again for
        if self._regather and in_checkpoint() and (self._anchors.units() or self._schedule.entries[unit].trained):
            self._saved[unit] = self._saved.pop(unit, 0)  # moved to the end, as by `pack`
        if self._into is None:
            return leaves
        self._gradless |= not torch.is_grad_enabled()
        bound = self._bound.get(unit)
        if bound is None:
            with torch.enable_grad():  # what is read under no_grad may be used outside of it
                self._keep(unit)
                bound = self._bound[unit] = self._bind(unit, leaves)
        return bound

    def _gather(self, unit: int) -> Leaves:
        """The leaves of a unit that is not in memory; the others are let go of, but for those that stay."""
        staying = self._staying
        if unit in self._touched and unit in self.plan.lasting and not self._backward:
            staying.add(unit)  # units between may read it, too: else it is gathered for each
        if self.shown:
            self.shown.let_go()
        self._gathered, self._bound = ({u: x[u] for u in x if u in staying} for x in (self._gathered, self._bound))
        # dropped before the next buffer is waited for, so that both are not in memory at once
        self._full = {u: x for u, x in self._full.items() if u in staying or u == unit}
        self._full[unit] = self._buffers(unit)
        leaves = self._gathered[unit] = self._leaves(unit, self._full[unit])
        self._touched.add(unit)
        if self._into is None:
            self._keep(unit)
        if self._backward and unit == next(reversed(self._to_come), None):  # a checkpoint runs again, in order
            del self._to_come[unit]
            self._arrivals.ahead(unit, self._before())
        if self._makes_buffers and not self._backward:
            following = range(unit + 1, min(unit + 1 + self._arrivals.most, self._params.view.units[1]))
            self._arrivals.ahead(unit, [u for u in following if u not in self._touched])
        return leaves

    def _keep(self, unit: int) -> None:
        """Keep what the plan says of a unit that was just gathered, if there will be a backward."""
        if self._kept.keeps_any and not self._backward and torch.is_grad_enabled():
            self._kept.keep(unit, self._full[unit])

    def prefetch(self, patterns: Sequence[str]) -> None:
        """Start the gathers of the units whose names fit the patterns, except of those in memory."""
        units = select_units([(*unit.joined, unit.name) for unit in self.plan.units], patterns, "prefetch")
        with func_levels.aside():
            for unit in (u for u in units if u not in self._full and u not in self._again):
                self._check_open(unit)
                self._arrivals.start(unit)

    def _before(self) -> Iterator[int]:
        """The units that the backward will gather again, the next one first."""
        return (unit for unit in reversed(self._to_come) if unit not in self._full)

    def _buffers(self, unit: int) -> Buffers:
        """A unit's flat buffers: those in memory, or gathered now."""
        buffers = self._full.get(unit) or self._again.get(unit)
        if buffers:
            return buffers
        self._check_open(unit)
        return self._arrivals.take(unit)

    def _leaves(self, unit: int, buffers: Buffers) -> Leaves:
        """A unit's leaves, views of its buffers, without derivatives, and watched for writes in place."""
        leaves = list[Tensor]()
        for part in self._schedule.entries[unit].parts:
            full = buffers[part.kind]
            is_callers = address(full) in self._rows  # nothing was gathered: memory of the parameters
            if not is_callers:
                self._owners.add(full, unit, part.kind, self.plan.units[unit].kept != ())
            if part.trainable:
                leaves += part.places.views(self._writes.watch(full, part.slots, is_callers))
            else:
                leaves += self._writes.frozen(part.places.views(full), part.slots, is_callers)
        return leaves

    def gathered_into(self) -> set[int]:
        """The addresses of the storages of gathered buffers."""
        return {x for tape in self._tapes for x in tape._owners.addresses()}

    def _bind(self, unit: int, leaves: Leaves) -> Leaves:
        """A unit's leaves, the trainable ones bound to its anchor (Note [Anchors])."""
        entry = self._schedule.entries[unit]
        if not entry.trained:
            return leaves
        self._writes.bound.append(entry)
        trainable = leaves if len(entry.trained) == len(leaves) else [leaves[number] for number in entry.trained]
        bound = self._anchors.bind(self.root, self.reduce, unit, trainable)
        if trainable is leaves:
            return bound
        both = list(leaves)
        for number, leaf in zip(entry.trained, bound, strict=True):
            both[number] = leaf
        return both

    def forward(self, loss: Callable[[Tree], T]) -> T:
        """The loss of the parameters. After it call `end`."""
        if self._into is None or not any(tape._regather for tape in self._tapes):
            return self.forward_once(loss)
        rewind = bookmark(self._device)
        try:
            return self.forward_once(loss)
        except RuntimeError as failure:
            if not func_levels.refuses_hooks(failure):
                raise
        rewind()  # Note [Reverse mode inside a loss]
        for tape in self._tapes:
            tape._regather = False
            tape._kept.keep_all()
            tape._saved.clear()
            tape._touched.clear()
        return self.forward_once(loss)

    @property
    def _tapes(self) -> list[Tape]:
        return [self, *(tape for _, tape in self.beside)]

    def forward_once(self, loss: Callable[[Tree], T]) -> T:
        """Run the loss once."""
        with self._hooks(), self._writes.refusing(), loss_of(self.plan.policy, self.plan.mesh):
            return loss(self.view())

    def end(self) -> None:
        """End the forward: drop all buffers but those that the backward begins with, and start the next gather."""
        for _, tape in self.beside:
            tape.end()
        self._writes.check()
        if self.shown:
            self.shown.settle()
        self.shown = None
        self._gathered.clear()
        self._bound.clear()
        self._arrivals.drop()
        self._to_come = dict.fromkeys(self._saved)
        self._saved = {unit: count for unit, count in self._saved.items() if count}
        self._kept.end(self._saved)
        self._backward, self._regather = True, False
        first = next(reversed(self._to_come), None)
        self._full = {unit: x for unit, x in self._full.items() if unit == first}
        # a unit that is in memory takes the place of one of several stages
        self._arrivals.ahead(first, islice(self._before(), self._arrivals.stages - len(self._full) or None))

    def _hooks(self) -> AbstractContextManager[None]:
        """The block in which what autograd saves of gathered buffers is replaced by places."""
        regathering = [tape for tape in reversed(self._tapes) if self._into is not None and tape._regather]
        if not regathering:
            return nullcontext()
        if len(self._tapes) == 1:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        # one pair of hooks for all tapes: of nested pairs torch calls the innermost alone
        return torch.autograd.graph.saved_tensors_hooks(partial(_saved_by, regathering), self._unpack_any)

    def _unpack_any(self, saved: object) -> Tensor:
        # of all tapes' saved tensors: a view belongs to the tape that gathers its unit
        return (saved.tape if isinstance(saved, SavedView) else self).unpack(saved)

    def pack(self, x: Tensor) -> object:
        """What autograd saves for a tensor: its place in a buffer of this tape, or the tensor and its version."""
        place = self._owners.place(x)
        if place is None:
            return SavedTensor.of(x)
        if self.shown and self.shown.lingers:
            self.shown.drop()
        unit = place[0]
        self._saved[unit] = self._saved.pop(unit, 0) + 1  # moved to the end: the unit saved last
        return SavedView(self, *place)

    def unpack(self, saved: object) -> Tensor:
        """Return the tensor that `pack` was given. Dual: `pack`."""
        if isinstance(saved, SavedTensor):
            return saved.unchanged()
        assert isinstance(saved, SavedView)
        full = self._regathered(saved.unit)[saved.kind]
        self._count_use(saved.unit)
        return saved.view_of(full)

    def _regathered(self, unit: int) -> Buffers:
        """A unit's buffers in the backward: the first use gathers them, and starts the units that follow."""
        if unit not in self._again:
            self._again[unit] = self._buffers(unit)
            self._to_come.pop(unit, None)
            if unit not in self._gathered:  # a checkpoint that runs its function again may hold the unit
                self._full.pop(unit, None)
            self._arrivals.ahead(unit, self._before())
        return self._again[unit]

    def _count_use(self, unit: int) -> None:
        """Count one saved place of a unit as used; after the last one the tape drops the unit's buffers."""
        self._saved[unit] = self._saved.get(unit, 1) - 1
        if not self._saved[unit]:
            del self._saved[unit], self._again[unit]
            if unit in self._reached or unit not in self._anchors.units():
                self._kept.drop(unit)

    def reduce(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """Put a unit's gradients into flat buffers and start their reduction."""
        into = self._into
        assert into is not None
        self._check_once(unit)
        grads = self._anchors.total(unit, grads)
        self._reached[unit] = all(grad is not None for grad in grads)
        if unit not in self._saved:
            self._kept.drop(unit)
            for by_unit in (self._gathered, self._bound, self._full):  # of a checkpoint that ran again
                by_unit.pop(unit, None)
        self._reductions.make_room(unit)
        self._reductions.join()  # what the sums before have read is free for the next buffer
        for part, begin, end in self._schedule.entries[unit].reduced:
            flat = into.filled(unit, part, grads[begin:end])  # (n,)
            self._filled.add((unit, part.kind))
            if pending := into.emit(unit, part.kind, flat):
                self._add(pending, unit, part.kind)
        self._reductions.move_on(unit - 1)

    def _add(self, pending: Pending, unit: int, kind: int) -> None:
        """Keep a reduction that was started, and hand its sum on if that is asked for."""
        self._reductions.add(unit, self._handing.after(pending, unit, kind) if self._handing else pending)

    def _check_open(self, unit: int) -> None:
        if self._handing and unit in self._handing.taken:
            raise ValueError(
                f"train_step(in_backward=True): unit {self.plan.units[unit].name!r} was read again after it was "
                "updated. Use in_backward=False."
            )
        if self._closed:
            raise ValueError(
                f"the loss function: unit {self.plan.units[unit].name!r} of the parameters of an earlier call or "
                "micro-batch was used: parameters given to a loss are good until it returns. Use those it is given now."
            )

    def _check_once(self, unit: int) -> None:
        self._check_open(unit)
        if self._backward and unit not in self._reached:
            return
        name = f"the loss function: unit {self.plan.units[unit].name!r}"
        if not self._backward:
            raise ValueError(
                f"{name} was given gradients before the loss was returned, by a backward() inside it. Use "
                "torch.autograd.grad(y, x, create_graph=True), or return what is to be differentiated."
            )
        raise ValueError(
            f"{name} was given gradients twice in one backward, by an autograd function that runs a backward of its "
            "own, as checkpoints do that are reentrant. Use torch.utils.checkpoint with use_reentrant=False."
        )

    def check_reached(self, outs: Sequence[Tensor]) -> None:
        """ValueError if the backward of what a loss returned has not reached parameters it depends on."""
        complete = not self._gradless and self._reached.keys() == self._anchors.units() and all(self._reached.values())
        if not complete and has_reentrant(outs):
            raise ValueError(
                "the loss function: torch.utils.checkpoint(use_reentrant=True) hides the parameters it uses from the "
                "gradient of the loss. Pass use_reentrant=False."
            )
        if not self._reached:
            raise ValueError(
                "the loss function: the loss depends on no trainable parameter, though on other tensors that require "
                "a gradient (were the parameters touched under no_grad, or detached?)"
            )

    def finish(self) -> None:
        """Reduce the units that no gradient reached in this backward, and wait for every reduction."""
        assert self._into is not None
        for entry in self._schedule.entries.values():
            for part, _, _ in entry.reduced:
                if (entry.unit, part.kind) not in self._filled:
                    self._finish_untouched(self._into, entry.unit, part.kind)
        self._reductions.finish()
        if self._handing:
            self._handing.finish()
        settle(self.plan)

    def _finish_untouched(self, into: Gradients, unit: int, kind: int) -> None:
        """Zeros for a unit and kind that got no gradient; the sum so far, if gradients are added up."""
        if not into.add:
            if into.local is not None:
                into.local().piece(unit, kind).zero_()
            if into.reduced is not None:
                self._add(gradients.nothing(into.reduced(), unit, kind, into.by, into.later), unit, kind)
        elif into.local is not None and (pending := into.emit(unit, kind, into.local().piece(unit, kind))):
            self._add(pending, unit, kind)  # the sum of earlier micro-batches

    def close(self) -> None:
        """Drop all tensors, and wait for all collectives under way; after an error too.

        No next stage of a collective starts: other ranks, which may not have raised, would take it for another
        collective.
        """
        for _, tape in self.beside:
            tape.close()
        with suppress(MismatchError):  # raised here only after another error, which says more
            self._reductions.drop()
            self._arrivals.drop()
        self._arrivals.clear()
        self._again.clear()
        self._kept.clear()
        # these hold autograd nodes that hold this tape: a cycle that Python's garbage collector cannot see
        self._gathered.clear()
        self._full.clear()
        self._bound.clear()
        self._anchors.clear()
        self.shown = None
        self._closed = True


def _saved_by(tapes: Sequence[Tape], x: Tensor) -> object:
    """What autograd saves for a tensor: its place in a buffer of one of the tapes, or the tensor and its version."""
    *others, last = tapes
    place = next((saved for tape in others if isinstance(saved := tape.pack(x), SavedView)), None)
    # what is in no buffer is packed by the last: the tape of `hvp`, which comes last, asks its tape of tangents
    return last.pack(x) if place is None else place
