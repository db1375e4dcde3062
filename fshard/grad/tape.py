"""One eager forward and backward: gather on access, gather again in the backward, reduce unit by unit.

Note [Tensors of a step]
    1. A `Tape` lives for one forward and one backward over one value of the parameters. Gathers end with their tape.
    2. Touching a unit gathers the unit into flat buffers; the leaves are views of the buffers.
    3. In the forward the tape keeps the buffers of the root, of the unit touched last, and of a unit of `Plan.lasting`
       after its second gather. Other buffers live as long as the user's function keeps one of their leaves.
    4. For a view of a gathered buffer autograd saves a `SavedView`, so saving keeps no buffer alive. In the backward
       the first use of a unit's saved views gathers the unit again, and the last use frees it.
    5. If the unit that the backward needs first is in memory when the forward ends, its buffers stay. `regather=` may
       keep more (Note [What stays of a unit] in `under_way.py`).
    6. Collectives depend on the program alone, not on when Python frees memory.

Note [Reverse mode inside a loss]
    torch.func.grad, vjp, jacrev and hessian refuse to start under saved-tensor hooks. If a loss calls one of these, the
    tape runs the loss, a pure function, again without hooks. The second run draws the same random numbers, gathers only
    units not in memory, and keeps all units for the backward, as `regather=False` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import islice, repeat
from operator import is_not
from typing import Any, TypeVar

import torch
from torch import Tensor, is_grad_enabled

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
from ..sharding.schedule import LeafRuns, schedule
from ..sharding.sharded import Sharded
from . import autograd, travel
from .autograd import Owners, SavedTensor, SavedView, in_checkpoint
from .chain import Chain
from .travel import Gradients, settle
from .under_way import Buffers, Gathered, GathersUnderWay, Reductions, TapeUnit, UnitLeaves
from .writes import Writes

T = TypeVar("T")
_BITS = (1 << 31) - 1  # masks hashes: their sums over ranks are exact in float64


class Tape:
    """The gathers and reductions of one forward and backward over one `Sharded`; without `into`, of a forward alone.

    `beside`: other `Sharded` read by the loss, without gradients; each gets a tape. `gathered` keeps all units for the
    next tape over these parameters.
    """

    def __init__(
        self,
        params: Sharded,
        into: Gradients | None = None,
        beside: Sequence[Sharded] = (),
        gathered: Gathered | None = None,
        chain: Chain | None = None,
        index: int = 1,
    ):
        # `_adds`: True if joined units' gradients may come twice
        params, into, self._adds = travel.as_read(params, into)
        self._params, self.plan, self._into = params, params.plan, into
        self._schedule = schedule(params.view)
        self._units = {n: TapeUnit(entry, stays=n == self.plan.root) for n, entry in self._schedule.entries.items()}
        is_planned = self.plan.linked and self._schedule.any_whole and not is_tracing()  # traced ranks read alike
        planned = map(self._units.__getitem__, self._schedule.likely) if is_planned else ()
        self.chain = chain or Chain(autograd.root(), bool(self.plan.linked), planned)
        self.index = index  # among the chain's tapes
        self.beside = [(x, Tape(x, chain=self.chain, index=n)) for n, x in enumerate(beside, 2)]
        self._here: list[TapeUnit] = []  # units that stay at least until the next gather
        self.shown: Shown | None = Shown()  # None after the forward
        self._owners, self._writes = Owners(), Writes()
        self._reductions = Reductions(self.plan, into)
        copied = into is not None and into.take is not None  # `take` overwrites the parameters
        self._backward = self._gradless = False  # True after the forward; True if gradients were off at a read
        self._rows = {address(row): kind for kind, row in zip(params.view.kinds, params.tensors, strict=True)}
        self._touched: dict[int, bool] = {}  # by number of a read unit: True if gradients were on at a read
        self._reached: dict[int, bool] = {}  # by number of a unit with gradients: True if all trainable leaves got one
        self._makes_buffers = any(travel.is_buffer(params.view, kind, copied) for kind in params.view.kinds)
        self._regather = self._makes_buffers and self._schedule.regathers and gathered is None  # False after `end`
        may_send = self._schedule.sends if into is None else self._schedule.resends
        self._resends = self._makes_buffers and gathered is None and may_send
        # True if the forward records reads by checkpoints
        self._notes = self._regather or bool(self.plan.linked and (self._schedule.sends or beside))
        self._gathers = GathersUnderWay(params, self._units, copied, gathered)

    def view(self) -> Tree:
        return self.enter(self._params.view.spec, self._params.view.first)[0]

    def enter(self, spec: tree.Spec, first: int) -> tuple[Tree, UnitLeaves | None]:
        """Gather a subtree, and return it with its leaves; of several units, return a lazy container and None."""
        runs = self._schedule.runs(first, spec.num_leaves)
        if runs is None:
            return lazy(self, spec, first), None
        if func_levels.inside():
            with func_levels.aside():  # Note [Gathers inside transforms] in `func_levels`
                return self.enter(spec, first)
        return tree.unflatten(spec, leaves := self._read(runs)), leaves

    def _read(self, runs: LeafRuns) -> UnitLeaves:
        if len(runs) == 1:
            ((unit, leaves),) = runs
            return self.touch(unit)[leaves]
        touched = {unit: self.touch(unit) for unit in dict.fromkeys(unit for unit, _ in runs)}
        return [leaf for unit, leaves in runs for leaf in touched[unit][leaves]]

    def leaf(self, number: int) -> Tensor:
        unit, place = self._schedule.leaf(number)
        with func_levels.aside() if func_levels.inside() else nullcontext():
            return self.touch(unit)[place]

    def like(self, number: int) -> Tensor:
        slot = self.plan.slots[self.plan.leaves[number]]
        compute = self.plan.kinds[slot.kind].precision.compute
        return torch.empty((), dtype=compute, device=device_of(self._params)).expand(self.plan.local_shape(slot))

    def touch(self, number: int) -> UnitLeaves:
        if (reads := RERUN.get()) is not None:
            return reads.unit(self, number)
        is_new = (leaves := (unit := self._units[number]).leaves) is None
        if leaves is None:
            leaves = self._gather(unit)
        if self._into is not None:
            if is_grad_enabled():
                self._touched[number] = True
            else:
                self._gradless = True
            if unit.bound is None:
                with torch.enable_grad():  # leaves read under no_grad may be used after the block
                    self._keep(unit)
                    unit.bound = self._bind(unit, leaves)
            leaves = unit.bound
        if self._notes and (block := in_checkpoint()):
            self.chain.rerun(unit, self, block, is_new)
        return leaves

    def _gather(self, unit: TapeUnit) -> UnitLeaves:
        number = unit.entry.unit
        if self._backward:
            self.chain.reach(unit)
        elif number in self._touched and number in self.plan.lasting:
            unit.stays = True  # else each further read would gather the unit
        if self.shown:
            self.shown.let_go()
        # without `leads`, ranks may read in different orders: such a read frees no sent unit
        leads = unit.leads if self._backward else unit.entry.leads
        # free other units before waiting for this unit: else all would be in memory
        here, self._here = self._here, [unit]
        for other in here:
            if other.stays or (other.entry.sent and not leads):
                self._here += [other] * (other is not unit)
            elif other is not unit:
                self._writes.leave(other)
                other.let_go()
        if leads and unit.entry.sent:
            self.chain.gathered.append((self.index, number))
        leaves = unit.leaves = self._leaves(unit, self._next(unit))
        if number not in self._touched:
            self._touched[number], self.chain.numbers[unit] = False, len(self.chain.outputs) - 1
        if self._into is None:
            self._keep(unit)
        if leads and self._makes_buffers and not self._backward:
            self._gathers.ahead(unit, self._gathers.following(self._schedule, number, self._touched))
        return leaves

    def _keep(self, unit: TapeUnit) -> None:
        if unit.keep_rule is None or unit.held is not None or self._backward or not is_grad_enabled():
            return
        if unit.keep_rule.over or self._gathers.gathered is not None or (self._into is not None and unit.entry.reduced):
            self._gathers.keep(unit)
            # ranks compare kept units: a rank that read a unit only under no_grad does not keep it
            self.chain.gathered += [(self.index, ~unit.entry.unit)] * (self._into is None)

    def prefetch(self, patterns: Sequence[str]) -> None:
        names = [(*unit.joined, unit.name) for unit in self.plan.units]
        units = select_units(names, patterns, self.plan.spec, "prefetch")
        with func_levels.aside():
            # a checkpoint that runs again prefetches nothing
            for unit in () if self._backward else (self._units[n] for n in units):
                if unit.buffers is None:
                    unit.check("gather")
                    self.chain.gathered += [(self.index, -1 - unit.entry.unit)] * unit.entry.sent
                    self._gathers.start(unit)

    def _before(self) -> Iterator[int]:
        return (unit.entry.unit for unit in self._due() if unit.buffers is None)

    def _due(self) -> Iterator[TapeUnit]:
        return (unit for unit, row in reversed(self.chain.table.due.items()) if row.tape is self and unit.entry.leads)

    def _leaves(self, unit: TapeUnit, buffers: Buffers) -> UnitLeaves:
        leaves: list[Tensor] = []
        for row in unit.entry.rows:
            all_gather_output = buffers[row.kind]
            is_callers = address(all_gather_output) in self._rows  # True if the buffer is the caller's shard
            if not is_callers:
                self._owners.add(all_gather_output, unit.entry.unit, row.kind, unit.keep_rule != COPIES)
            if self.plan.kinds[row.kind].trainable:
                leaves += row.views(self._writes.watch(all_gather_output, row.leaves, is_callers))
            else:
                leaves += (still := self._writes.frozen(row.views(all_gather_output), row.leaves, is_callers))
                self._owners.know(row.kind, *still)
        return leaves

    def gathered_into(self) -> list[range]:
        return [place for tape in self.tapes for place in tape._owners.places()]

    def kind_of(self, x: Tensor) -> int | None:
        return self._rows.get(address(x), self._owners.kind_of(x))

    def slot_of(self, x: Tensor) -> Slot | None:
        leaves = (zip(unit.entry.slots, unit.bound or unit.leaves or (), strict=False) for unit in self._units.values())
        return next((slot for pairs in leaves for slot, leaf in pairs if leaf is x), None)

    def slot_at(self, x: Tensor) -> Slot | None:
        unit, kind, at = self._owners.position(x)
        entries = [self._units[unit].entry] if unit is not None else [unit.entry for unit in self._units.values()]
        if unit is None:
            kind, at = self._rows.get(address(x), -1), int(x.storage_offset())
        for row in (row for entry in entries for row in entry.rows if row.kind == kind):
            begin = at - (row.start if unit is None else 0)
            for slot, start, numel in zip(row.leaves, row.starts, row.numels, strict=True):
                if start <= begin < start + numel:
                    return slot
        return None

    def _bind(self, unit: TapeUnit, leaves: UnitLeaves) -> UnitLeaves:
        entry = unit.entry
        if not entry.trained:
            return leaves
        self._writes.bound.append(entry)
        trained = leaves if len(entry.trained) == len(leaves) else [leaves[number] for number in entry.trained]
        if self._backward and self.chain.is_linked:
            bound = self.chain.bind_late(unit, self._add_late, trained)
        else:
            bound = self.chain.bind(unit, self.reduce, trained)
        if trained is leaves:
            return bound
        bound_leaf = dict(zip(entry.trained, bound, strict=True))
        return [bound_leaf.get(number, leaf) for number, leaf in enumerate(leaves)]

    def forward(self, loss: Callable[[Tree], T]) -> T:
        if self._into is None or not any(tape._regather for tape in self.tapes):
            return self.forward_once(loss)
        rewind = bookmark(device_of(self._params))
        try:
            return self.forward_once(self._alike(loss) if is_tracing() else loss)
        except RuntimeError as failure:
            if not func_levels.refuses_hooks(failure):
                raise
        rewind()  # Note [Reverse mode inside a loss]
        self.chain.restart()
        for tape in self.tapes:
            tape._regather = False
            tape._touched.clear()
            for unit in tape._units.values():
                unit.keep_all()
        return self.forward_once(loss)

    def _alike(self, loss: Callable[[Tree], T]) -> Callable[[Tree], T]:
        def traced(view: Tree) -> T:
            with autograd.CopiedExpands(lambda x: any(tape._owners.place(x) is not None for tape in self.tapes)):
                return loss(view)

        return traced

    @property
    def _followers(self) -> list[Tape]:
        return self.tapes[1:]

    @property
    def tapes(self) -> list[Tape]:
        return [self, *(tape for _, tape in self.beside)]

    def forward_once(self, loss: Callable[[Tree], T]) -> T:
        with self._hooks(), self._writes.refusing():
            return loss(self.view())

    @property
    def is_compared(self) -> bool:
        """True if the host waits before the backward, while ranks compare the units to gather again."""
        return not (self._into is None or self.plan.has_streams) and any(x._resends for x in [self, *self._followers])

    @property
    def sends(self) -> bool:
        return any(tape._schedule.sends for tape in [self, *self._followers])

    def reads(self) -> list[int]:
        """Return two hashes for ranks to compare: of the forward's gathers, and of the backward's."""
        rows = self.chain.end_record().due.items()
        due = [(row.tape.index, x.entry.unit, row.before) for x, row in rows if x.entry.sent and x.leads]
        gathered = *self.chain.gathered, *(unit.entry.unit for unit in self._hidden())
        return [hash(x) & _BITS for x in (gathered, (*due,))]

    def _hidden(self) -> list[TapeUnit]:
        units = self._units.values() if self._gradless and self.chain.is_linked else ()
        return [unit for unit in units if unit.anchor is not None and not self._touched.get(unit.entry.unit, True)]

    def keep_read(self) -> None:
        """Gather and keep all units read in the forward: the backward then sends no parameters."""
        for tape in [self, *self._followers]:
            for number, unit in tape._units.items():
                # frozen units are not held yet, and a checkpoint's second run would gather them
                if number in tape._touched and not unit.is_kept:
                    buffers, unit.keep_rule = tape._gathers.take(unit), COPIES
                    tape._gathers.hold(unit, buffers)

    def end(self) -> None:
        """End the forward: keep only the buffers that the backward needs first, and start its next gathers."""
        if self._into is not None:
            self.chain.link(None, self.reduce)
        self.chain.settle()
        for tape in self._followers:
            tape.end()
        if self.shown:
            self.shown.settle()
        self.shown, first = None, next(self._due(), None)
        for unit in self._here:
            self._writes.leave(unit)
            unit.leaves = unit.bound = None
            if unit is not first:
                unit.let_go()
        self._writes.check()
        self._here = [unit for unit in self._here if unit is first]
        self._gathers.drop()
        for unit in self._units.values():
            unit.gradients = "due"
            if self._into is None and not (unit.saved or unit in self.chain.table.reread):  # not used again
                self._gathers.drop_held(unit)
        for unit in self._hidden():
            unit.gradients = "late"
        # after all units' `let_go`: it spares marked units. Units with all views used are not in `due`
        for unit in self.chain.table.tied if self._into is not None else ():
            if unit.stays_for or unit not in self.chain.table.due:
                unit.stays_for = "anchor"
        self._backward, self._regather, self._notes = True, False, False
        # a buffer already in memory counts as one gather under way
        self._gathers.ahead(first, islice(self._before(), self._gathers.stages - len(self._here) or None))

    def _hooks(self) -> AbstractContextManager[None]:
        regathering = [tape for tape in reversed(self.tapes) if self._into is not None and tape._regather]
        if not regathering:
            return nullcontext()
        if len(self.tapes) == 1:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        # torch calls only the innermost pair of hooks, so all tapes share one pair
        unpack = partial(autograd.unpacked, self)
        return torch.autograd.graph.saved_tensors_hooks(partial(autograd.saved_by, regathering), unpack)

    def pack(self, x: Tensor) -> object:
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
        if isinstance(saved, SavedTensor):
            return saved.unchanged()
        unit = self._units[saved.unit]
        all_gather_output = self.again(unit)[saved.kind]
        self._owners.know(saved.kind, all_gather_output)
        if unit.saved > 1:
            unit.saved -= 1
        else:
            self._use_up(unit)
        return saved.view_of(all_gather_output)

    def _use_up(self, unit: TapeUnit) -> None:
        unit.saved = 0
        if not self._backward:
            self.chain.use_up(unit)
        if unit.stays_for != "anchor":
            unit.stays_for = ""
            if unit.leaves is None:
                unit.buffers = None
            if not (unit.anchor is not None and unit.gradients in ("forward", "due", "late")):
                self._gathers.drop_held(unit)

    def again(self, unit: TapeUnit) -> Buffers:
        """Return a unit's buffers; the buffers stay until the last saved view was used."""
        if not unit.stays_for or unit.buffers is None:
            if self._backward:
                self.chain.reach(unit)
            self._next(unit)
            unit.stays_for = unit.stays_for or "places"
        assert unit.buffers is not None
        return unit.buffers

    def _next(self, unit: TapeUnit) -> Buffers:
        buffers = self._gathers.take(unit)
        if self._backward and unit.leads:
            self._gathers.ahead(unit, self._before())
        return buffers

    def reduce(self, unit: TapeUnit, grads: Sequence[Tensor | None]) -> None:
        into = self._into
        assert into is not None
        if not (again := self._adds and unit.gradients == "summing"):
            unit.check("reduce")
        if self.chain.is_linked:
            self.chain.anchor_ran(unit)
            if unit.gradients == "late":
                return unit.add(grads)
        grads = unit.total(grads)
        num = sum(map(is_not, grads, repeat(None)))
        unit.gradients, number = "summing", unit.entry.unit
        if num or number in self._reached:
            self._reached[number] = num == len(grads)
        if not unit.saved:
            if unit.held is not None:
                self._gathers.drop_held(unit)
            unit.let_go()  # frees leaves of a checkpoint's second run
        self._reductions.make_room(number)
        self._reductions.join()  # frees buffers of earlier sums for this sum
        for row, begin, end in unit.entry.reduced:
            reduce_scatter_input = into.filled(row, grads[begin:end], again)  # (n,)
            if pending := into.emit(number, row.kind, reduce_scatter_input):
                self._add(into, pending, unit, row.kind)
        self._reductions.move_on(number - 1)

    def _add(self, into: Gradients, pending: Pending, unit: TapeUnit, kind: int) -> None:
        if into.take is not None:
            pending = pending.then(partial(self._taken, unit, kind))
        self._reductions.add(unit.entry.unit, pending)

    def _taken(self, unit: TapeUnit, kind: int, total: Tensor) -> Tensor:
        assert self._into is not None
        assert self._into.take is not None
        unit.gradients = "taken"
        self._into.take(unit.entry.unit, kind, total)
        return total

    def _add_late(self, unit: TapeUnit, grads: Sequence[Tensor | None]) -> None:
        unit.check("reduce")
        if unit.anchor is None:  # the program reads the unit only in the backward
            unit.gradients = "late"
        self._reached.setdefault(unit.entry.unit, False)
        unit.add(grads)

    def check_reached(self, outs: Sequence[Tensor]) -> None:
        complete = all(self._reached.get(number) for number, unit in self._units.items() if unit.anchor is not None)
        autograd.check_reached(outs, self._gradless or not complete, bool(self._reached))

    def finish(self) -> None:
        assert self._into is not None
        for unit in self._units.values():
            if unit.gradients == "late":
                unit.gradients = "due"
                self.reduce(unit, ())
        for unit in self._units.values():
            if unit.gradients == "due":
                for row, _, _ in unit.entry.reduced:
                    if pending := self._into.untouched(unit.entry.unit, row.kind):
                        self._add(self._into, pending, unit, row.kind)
        self._reductions.finish()
        settle(self.plan)

    def close(self) -> None:
        """Drop all tensors, and wait for all collectives under way, also after an error.

        No collective starts its next stage: a rank without the error would take the stage for another collective.
        """
        for tape in self._followers:
            tape.close()
        with suppress(MismatchError):  # raised only after another error, which says more
            self._reductions.drop()
            self._gathers.drop()
        self._here.clear()
        for unit in self._units.values():
            unit.close()
        self.shown = None
        self.chain.close()
