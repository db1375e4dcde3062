"""One eager forward and backward: gather on access, gather again in the backward, reduce unit by unit.

Note [Tensors of a step]
    A `Tape` lives for one forward and one backward over one value of the parameters; every gather under way belongs to
    it and ends with it. Touching a unit gathers it into a flat buffer; the leaves are views of it. During the forward
    the tape keeps the buffers of the root, of the unit touched last, and of a unit of `Plan.lasting` that was gathered
    a second time. Other buffers live as long as the user's function keeps a leaf of them. If autograd saves a view of a
    gathered buffer, the tape stores the place of the view instead (`SavedView`), so saving keeps no buffer alive. In
    the backward the first use of a place of a unit gathers the unit again, and the last use drops it. A unit that an
    activation checkpoint reads is gathered again when the checkpoint runs again. The backward begins with the unit that
    was saved, or read in a checkpoint, last: if its buffer is in memory when the forward ends, it stays. With another
    `regather=` more stays (Note [What stays of a unit] in `under_way.py`). The program alone decides which collectives
    run, not the time at which memory is freed.

Note [Reverse mode inside a loss]
    torch.func.grad, vjp, jacrev and hessian refuse to start while hooks on saved tensors are on. Nothing tells
    beforehand that a loss uses them, so the loss runs with hooks, and if torch.func refuses, once more without: a loss
    is a pure function. The second run draws the same random numbers, gathers nothing again that is still in memory, and
    keeps what it gathers for the backward, as `regather=False` does. The program alone decides whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from itertools import islice, repeat
from operator import is_not
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..comm.ranks import MismatchError, Pending
from ..core import func_levels, tree
from ..core.random import bookmark
from ..core.storage import address
from ..core.tracing import RERUN, is_tracing
from ..core.tree import Tree
from ..layout.pieces import device_of
from ..layout.rules import COPIES
from ..plan.plan import Slot
from ..plan.units import select_units
from ..sharding.access import Shown, lazy
from ..sharding.schedule import Runs, schedule
from ..sharding.sharded import Sharded
from . import autograd, travel
from .autograd import Owners, SavedTensor, SavedView, in_checkpoint
from .chain import Chain
from .travel import Gradients, settle
from .under_way import Arrivals, Buffers, Gathered, Leaves, Reductions, TapeUnit
from .writes import Writes

T = TypeVar("T")
# Who makes the tapes of eager gradients, in a block that sees what they compute (`fshard.testing.observed`).
OBSERVER: ContextVar[Observer | None] = ContextVar("fshard.grad.tape", default=None)
_BITS = (1 << 31) - 1  # of a number that ranks compare: its sums over ranks are exact in float64


class Tape:
    """The gathers and reductions of one forward and backward over one `Sharded`; without `into`, of a forward alone.

    `beside` are the other `Sharded` that the loss reads: without gradients, each with a tape that gathers for this one.
    With `gathered` all units stay there, for the next tape over these parameters.
    """

    def __init__(
        self,
        params: Sharded,
        into: Gradients | None = None,
        beside: Sequence[Sharded] = (),
        gathered: Gathered | None = None,
        chain: Chain | None = None,
    ):
        params, into, self._adds = travel.as_read(params, into)  # and whether gradients that come twice are added
        self._params, self.plan, self._into = params, params.plan, into
        self._schedule = schedule(params.view)
        self._units = {n: TapeUnit(entry, stays=n == self.plan.root) for n, entry in self._schedule.entries.items()}
        is_linked = bool(self.plan.linked)
        is_planned = is_linked and self._schedule.any_whole and not is_tracing()  # all ranks trace one program
        planned = map(self._units.__getitem__, self._schedule.likely) if is_planned else ()
        self.chain = chain or Chain(autograd.root(), is_linked, planned)
        self.index = self.chain.join()
        self.beside = [(x, Tape(x, chain=self.chain)) for x in beside]
        self._here: list[TapeUnit] = []  # whose buffers stay at least until another unit is read
        self.shown: Shown | None = Shown()  # until the forward ends
        self._owners = Owners()
        self._reductions = Reductions(self.plan, into)
        self._take = None if into is None else into.take
        copied = self._take is not None  # what is read is not what `take` writes to
        self._backward, self._writes = False, Writes()
        self._rows = {address(row): kind for kind, row in zip(params.view.kinds, params.tensors, strict=True)}
        self._gradless = self._reached = False  # whether a unit was touched where gradients are off, or given one
        self._late: list[TapeUnit] = []  # units that are reduced after the backward
        self._makes_buffers = any(travel.is_buffer(params.view, kind, copied) for kind in params.view.kinds)
        self._regather = self._makes_buffers and self._schedule.regathers and gathered is None  # until the forward ends
        may_send = self._schedule.sends if into is None else self._schedule.resends  # again, in the backward
        self._resends = self._makes_buffers and gathered is None and may_send
        self._notes = self._regather or (is_linked and self._schedule.sends)  # what checkpoints read; in the forward
        if gathered is not None:
            for unit in self._units.values():
                unit.keep_in(gathered)
        self._arrivals = Arrivals(params, self._units, copied)

    def view(self) -> Tree:
        """The parameters as the loss sees them."""
        return self.enter(self._params.view.spec, self._params.view.first)[0]

    def enter(self, spec: tree.Spec, first: int) -> tuple[Tree, Leaves | None]:
        """A leaf, or a subtree of one unit, gathered, and its leaves; of one of several units a lazy container."""
        runs = self._schedule.runs(first, spec.num_leaves)
        if runs is None:
            return lazy(self, spec, first), None
        if func_levels.inside():
            with func_levels.aside():  # Note [Gathers inside transforms] in `func_levels`
                return self.enter(spec, first)
        return tree.unflatten(spec, leaves := self._read(runs)), leaves

    def _read(self, runs: Runs) -> Leaves:
        if len(runs) == 1:
            ((unit, leaves),) = runs
            return self.touch(unit)[leaves]
        touched = {unit: self.touch(unit) for unit in dict.fromkeys(unit for unit, _ in runs)}
        return [leaf for unit, leaves in runs for leaf in touched[unit][leaves]]

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
        return torch.empty((), dtype=compute, device=device_of(self._params)).expand(self.plan.local_shape(slot))

    def touch(self, number: int) -> Leaves:
        """The leaves of a unit, gathered if they are not in memory; the gathers of the units after it are started."""
        if (reads := RERUN.get()) is not None:
            return reads.unit(self, number)
        leaves, is_new = (unit := self._units[number]).leaves, unit.leaves is None
        if leaves is None:
            leaves = self._gather(unit)
        if self._into is not None:
            if torch.is_grad_enabled():
                unit.is_used = True
            else:
                self._gradless = True
            if unit.bound is None:
                with torch.enable_grad():  # what is read under no_grad may be used outside of it
                    self._keep(unit)
                    unit.bound = self._bind(unit, leaves)
            leaves = unit.bound
        if self._notes and (block := in_checkpoint()):
            self.chain.rerun(unit, self, block, is_new)
        return leaves

    def _gather(self, unit: TapeUnit) -> Leaves:
        """The leaves of a unit that is not in memory; the others are let go of, but for those that stay."""
        if self._backward:
            self.chain.turn(unit)
        if unit.is_touched and unit.number in self.plan.lasting and not self._backward:
            unit.stays = True  # units between may read it, too: else it is gathered for each
        if self.shown:
            self.shown.let_go()
        # A unit for which nothing is sent changes nothing for the others: ranks may read different ones.
        kept = self._backward and unit.is_kept
        mixed, sent = self._schedule.mixed or kept, unit.entry.sent and not kept
        # dropped before the next buffer is waited for, so that both are not in memory at once
        here, self._here = self._here, [unit]
        for other in here:
            if other.stays or (mixed and other.entry.sent and not sent):
                self._here += [other] * (other is not unit)
            elif other is not unit:
                self._writes.leave(other)
                other.let_go()
        if sent:
            self.chain.gathered.append((self.index, unit.number))
        leaves = unit.leaves = self._leaves(unit, self._next(unit))
        if not unit.is_touched:
            unit.is_touched, unit.since = True, len(self.chain.outputs) - 1
        if self._into is None:
            self._keep(unit)
        if self._backward:
            unit.regathered = unit.regathered or unit.reruns.stays_until_anchor
        elif self._makes_buffers and (sent or not mixed):
            end, most = self._params.view.units[1], self._arrivals.most
            numbers = range(unit.number + 1, end if mixed else min(unit.number + 1 + most, end))
            following = [n for n in numbers if not self._units[n].is_touched]
            if mixed:
                following = [n for n in following if self._units[n].entry.sent][:most]
            self._arrivals.ahead(unit, following)
        return leaves

    def _keep(self, unit: TapeUnit) -> None:
        """Keep what the plan says of a unit that was just gathered, if there will be a backward."""
        if unit.keep_rule is None or unit.held is not None or self._backward or not torch.is_grad_enabled():
            return
        if unit.keep_rule.over or unit.gathered is not None or (self._into is not None and unit.entry.reduced):
            self._arrivals.keep(unit)
            # later gathers are over fewer axes; ranks that read it under no_grad alone keep none
            self.chain.gathered += [(self.index, ~unit.number)] * (self._into is None)

    def prefetch(self, patterns: Sequence[str]) -> None:
        """Start the gathers of the units whose names fit the patterns, except of those in memory."""
        names = [(*unit.joined, unit.name) for unit in self.plan.units]
        units = select_units(names, patterns, self.plan.spec, "prefetch")
        with func_levels.aside():
            # in a checkpoint that runs again, gathers are in the order of the backward
            for unit in () if self._backward else (self._units[n] for n in units):
                if unit.buffers is None:
                    unit.check("gather")
                    self.chain.gathered += [(self.index, -1 - unit.number)] * unit.entry.sent
                    self._arrivals.start(unit)

    def _before(self) -> Iterator[int]:
        """The units that the backward will gather again, the next one first."""
        return (unit.number for unit in self._due() if unit.buffers is None)

    def _due(self) -> Iterator[TapeUnit]:
        due = (unit for unit in reversed(self.chain.saved) if self.chain.saved[unit].tape is self)
        return (unit for unit in due if unit.entry.sent) if self._schedule.mixed else due

    def _leaves(self, unit: TapeUnit, buffers: Buffers) -> Leaves:
        """A unit's leaves, views of its buffers, without derivatives, and watched for writes in place."""
        leaves: list[Tensor] = []
        for row in unit.entry.rows:
            all_gather_output = buffers[row.kind]
            is_callers = address(all_gather_output) in self._rows  # nothing was gathered: memory of the parameters
            if not is_callers:
                self._owners.add(all_gather_output, unit.number, row.kind, unit.keep_rule != COPIES)
            if self.plan.kinds[row.kind].trainable:
                leaves += row.views(self._writes.watch(all_gather_output, row.leaves, is_callers))
            else:
                leaves += (still := self._writes.frozen(row.views(all_gather_output), row.leaves, is_callers))
                self._owners.know(row.kind, *still)
        return leaves

    def gathered_into(self) -> list[range]:
        """The memory of the gathered buffers that live."""
        return [place for tape in self.tapes for place in tape._owners.places()]

    def kind_of(self, x: Tensor) -> int | None:
        """The kind of the leaves in the memory of a tensor; None if this tape has read no leaf there."""
        return self._rows.get(address(x), self._owners.kind_of(x))

    def slot_of(self, x: Tensor) -> Slot | None:
        """The leaf that a tensor is of a unit that the program reads now."""
        leaves = (zip(unit.entry.slots, unit.bound or unit.leaves or (), strict=False) for unit in self._units.values())
        return next((slot for pairs in leaves for slot, leaf in pairs if leaf is x), None)

    def _bind(self, unit: TapeUnit, leaves: Leaves) -> Leaves:
        """A unit's leaves, the trainable ones bound to its anchor (Note [Anchors])."""
        entry = unit.entry
        if not entry.trained:
            return leaves
        self._writes.bound.append(entry)
        trained = leaves if len(entry.trained) == len(leaves) else [leaves[number] for number in entry.trained]
        late = self._backward and self.chain.is_linked
        bind, take = (self.chain.bind_late, self._add_late) if late else (self.chain.bind, self.reduce)
        bound = bind(unit, take, trained)
        if trained is leaves:
            return bound
        both = list(leaves)
        for number, leaf in zip(entry.trained, bound, strict=True):
            both[number] = leaf
        return both

    def forward(self, loss: Callable[[Tree], T]) -> T:
        """The loss of the parameters. After it call `end`."""
        if self._into is None or not any(tape._regather for tape in self.tapes):
            return self.forward_once(loss)
        rewind = bookmark(device_of(self._params))
        try:
            return self.forward_once(loss)
        except RuntimeError as failure:
            if not func_levels.refuses_hooks(failure):
                raise
        rewind()  # Note [Reverse mode inside a loss]
        self.chain.saved.clear()
        for tape in self.tapes:
            tape._regather = False
            for unit in tape._units.values():
                unit.keep_all()
        return self.forward_once(loss)

    @property
    def _followers(self) -> list[Tape]:
        """The tapes that gather beside this one."""
        return self.tapes[1:]

    @property
    def tapes(self) -> list[Tape]:
        """This tape, and those of the other `Sharded` that the loss reads."""
        return [self, *(tape for _, tape in self.beside)]

    def forward_once(self, loss: Callable[[Tree], T]) -> T:
        """Run the loss once."""
        with self._hooks(), self._writes.refusing():
            return loss(self.view())

    @property
    def is_compared(self) -> bool:
        """Whether the host waits, before the backward, to know whether ranks saved the same units to gather again."""
        return not (self._into is None or self.plan.has_streams) and any(x._resends for x in [self, *self._followers])

    @property
    def sends(self) -> bool:
        """Whether a read unit takes a collective."""
        return any(tape._schedule.sends for tape in [self, *self._followers])

    def reads(self) -> list[int]:
        """Two numbers that ranks compare: of the units gathered, in order, and hidden; and of those saved, in order."""
        due = [(e.tape.index, x.number, e.since) for x, e in self.chain.saved.items() if x.entry.sent and not x.is_kept]
        return [hash(x) & _BITS for x in ((*self.chain.gathered, *(unit.number for unit in self._hidden())), (*due,))]

    def _hidden(self) -> list[TapeUnit]:
        """The units of a linked chain that were only read where gradients are off."""
        units = self._units.values() if self._gradless and self.chain.is_linked else ()
        return [unit for unit in units if unit.is_bound and unit.is_touched and not unit.is_used]

    def keep_read(self) -> None:
        """Gather all units that were read, and keep them for the backward, which then sends nothing for them."""
        for tape in [self, *self._followers]:
            for unit in tape._units.values():
                # a frozen unit of which all stays is not held yet: a checkpoint that runs again would gather it
                if unit.is_touched and not unit.is_kept:
                    buffers, unit.keep_rule = tape._arrivals.take(unit), COPIES
                    unit.hold(buffers)

    def end(self) -> None:
        """End the forward: drop all buffers but those that the backward begins with, and start the next gather."""
        if self._into is not None:
            self.chain.link(None, self.reduce)
            self.chain.settle()
        for tape in self._followers:
            tape.end()
        if self.shown:
            self.shown.settle()
        self.shown = None
        first = next(self._due(), None)
        for unit in self._here:
            self._writes.leave(unit)
            unit.leaves = unit.bound = None
            if unit is not first:
                unit.let_go()
        self._writes.check()
        self._here = [unit for unit in self._here if unit is first]
        self._arrivals.drop()
        for unit in self._units.values():
            unit.expect(self.chain.is_linked)
            if self._into is None and not unit.saved and unit.reruns.hook is None:  # no gradients will come
                unit.drop_held()
        self._late, self._backward, self._regather, self._notes = self._hidden(), True, False, False
        # a buffer already here counts as one gather under way
        self._arrivals.ahead(first, islice(self._before(), self._arrivals.stages - len(self._here) or None))

    def _hooks(self) -> AbstractContextManager[None]:
        """The block in which what autograd saves of gathered buffers is replaced by places."""
        regathering = [tape for tape in reversed(self.tapes) if self._into is not None and tape._regather]
        if not regathering:
            return nullcontext()
        if len(self.tapes) == 1:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        # one pair of hooks for all tapes: of nested pairs torch calls the innermost alone; a view has its tape
        unpack = partial(autograd.unpacked, self)
        return torch.autograd.graph.saved_tensors_hooks(partial(autograd.saved_by, regathering), unpack)

    def pack(self, x: Tensor) -> object:
        """What autograd saves for a tensor: its place in a buffer of this tape, or the tensor and its version."""
        place = self._owners.place(x)
        if place is None:
            return SavedTensor.of(x)
        if self.shown and self.shown.lingers:
            self.shown.drop()
        unit = self._units[place[0]]
        self.chain.save(unit, self)
        unit.saved += 1
        return SavedView(self, *place)

    def unpack(self, saved: Any) -> Tensor:
        """Return the tensor that `pack` was given. Dual: `pack`."""
        if isinstance(saved, SavedTensor):
            return saved.unchanged()
        unit = self._units[saved.unit]
        all_gather_output = self.again(unit)[saved.kind]
        self._owners.know(saved.kind, all_gather_output)
        unit.use()
        if not (unit.saved or self._backward):
            self.chain.saved.pop(unit, None)
        return saved.view_of(all_gather_output)

    def again(self, unit: TapeUnit) -> Buffers:
        """A unit's buffers, which stay until the last saved place was used."""
        if not unit.regathered or unit.buffers is None:
            if self._backward:
                self.chain.turn(unit)
            self._next(unit)
            unit.regathered = True
        assert unit.buffers is not None
        return unit.buffers

    def _next(self, unit: TapeUnit) -> Buffers:
        """A unit's buffers; in the backward the gathers of those that follow are started."""
        buffers = self._arrivals.take(unit)
        if self._backward and not unit.is_kept and (unit.entry.sent or not self._schedule.mixed):
            self._arrivals.ahead(unit, self._before())
        return buffers

    def reduce(self, unit: TapeUnit, grads: Sequence[Tensor | None]) -> None:
        """Put a unit's gradients into flat buffers and start their reduction."""
        into = self._into
        assert into is not None
        if not (again := self._adds and unit.gradients == "summing"):
            unit.check("reduce")
        if self.chain.is_linked:
            self.chain.passes(unit)
        if unit in self._late:
            return unit.add(grads)
        grads = unit.total(grads)
        num = sum(map(is_not, grads, repeat(None)))
        unit.gradients, unit.is_complete, self._reached = "summing", num == len(grads), self._reached or num > 0
        if not unit.saved:
            unit.drop_held()
            unit.let_go()  # of a checkpoint that ran again
        self._reductions.make_room(unit.number)
        self._reductions.join()  # what the sums before have read is free for the next buffer
        for row, begin, end in unit.entry.reduced:
            reduce_scatter_input = into.filled(row, grads[begin:end], again)  # (n,)
            if pending := into.emit(unit.number, row.kind, reduce_scatter_input):
                self._add(pending, unit, row.kind)
        self._reductions.move_on(unit.number - 1)

    def _add(self, pending: Pending, unit: TapeUnit, kind: int) -> None:
        """Keep a reduction that was started, and hand its sum on if that is asked for."""
        if self._take is not None:
            pending = pending.then(partial(self._taken, unit, kind))
        self._reductions.add(unit.number, pending)

    def _taken(self, unit: TapeUnit, kind: int, total: Tensor) -> Tensor:
        assert self._take is not None
        unit.gradients = "taken"
        self._take(unit.number, kind, total)
        return total

    def _add_late(self, unit: TapeUnit, grads: Sequence[Tensor | None]) -> None:
        """Add gradients of a touch in the backward, of a function that runs a backward of its own."""
        unit.check("reduce")
        self._reached = True
        unit.add(grads)

    def check_reached(self, outs: Sequence[Tensor]) -> None:
        """ValueError if the backward of what a loss returned has not reached parameters it depends on."""
        complete = all(unit.is_complete for unit in self._units.values() if unit.is_bound)
        autograd.check_reached(outs, self._gradless or not complete, self._reached)

    def finish(self) -> None:
        """Reduce the units that no gradient reached in this backward, and wait for every reduction."""
        assert self._into is not None
        late, self._late = self._late, []
        for unit in late:
            self.reduce(unit, ())
        for unit in self._units.values():
            if unit.gradients == "due":
                for row, _, _ in unit.entry.reduced:
                    if pending := self._into.untouched(unit.number, row.kind):
                        self._add(pending, unit, row.kind)
        self._reductions.finish()
        settle(self.plan)

    def close(self) -> None:
        """Drop all tensors, and wait for all collectives under way; after an error too.

        No next stage of a collective starts: ranks that have not raised would take it for another collective.
        """
        for tape in self._followers:
            tape.close()
        with suppress(MismatchError):  # raised here only after another error, which says more
            self._reductions.drop()
            self._arrivals.drop()
        self._here.clear()
        for unit in self._units.values():
            unit.close()
        self.shown = None
        self.chain.close()


class Observer(Protocol):
    """Makes the tapes of a block, with the arguments of `Tape`, and is given the gradients of a step."""

    def __call__(self, *args: object) -> Tape: ...

    def add_sums(self, grads: Sharded, share: Tensor | None, scaler: Tree) -> None:
        """See gradients before they are unscaled, and multiplied by `share`."""
