"""One eager forward and backward: gather on access, gather again in the backward, reduce unit by unit.

Note [Tensors of a step]
    A `Tape` lives for one forward and one backward over one value of the parameters; every gather under way belongs to
    it and ends with it. Touching a unit gathers it into a flat buffer, of which the leaves are views. During the
    forward the tape keeps the buffers of the root and of the unit touched last; other buffers live as long as the
    user's function keeps a leaf of them. When autograd saves a view of a gathered buffer, the tape stores the place of
    the view instead (`SavedView`), so saving keeps no buffer alive. In the backward the first use of a place of a unit
    gathers the unit again, and the last use drops it. The backward begins with the unit that was saved last: if its
    buffer is in memory when the forward ends, it stays. Of units with another `Unit.kept` more stays (Note [What stays
    of a unit] in `kept.py`). Which collectives run depends on the program alone, never on when memory is freed, so
    ranks that run the same function issue the same collectives.

Note [Reverse mode inside a loss]
    torch.func.grad, vjp, jacrev and hessian refuse to start while hooks on saved tensors are on. Nothing tells
    beforehand that a loss uses them, so the loss runs with hooks, and if torch.func refuses, once more without: a loss
    is a pure function. The second run draws the same random numbers, gathers nothing again that is still in memory, and
    keeps what it gathers for the backward, as `regather=False` does; what the first run saved is dropped. Whether there
    is a second run depends on the program alone, so all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.ranks import MismatchError, Pending
from ..core import func_levels, tree
from ..core.flat import put
from ..core.profiling import named
from ..core.random import bookmark
from ..core.tree import Tree
from . import anchors, transfer
from .access import Lazy, loss_of
from .anchors import has_reentrant
from .gradients import Gradients, Reductions, settle
from .kept import Buffers, Kept
from .plan import Slot
from .saved import SavedTensor, SavedView
from .sharded import Sharded, cut
from .units import select_units
from .writes import Writes

T = TypeVar("T")


class Tape:
    """The gathers and reductions of one forward and backward over one `Sharded`; without `into`, of a forward alone.

    A subclass may extend `view`, `touch`, `pack`, `unpack`, `end` and `close`.

    `beside` are the other `Sharded` that the loss reads: they get no gradient, and each has a tape of its own, which
    gathers again for the backward of this one.
    """

    def __init__(self, params: Sharded, into: Gradients | None = None, beside: Sequence[Sharded] = ()):
        self.beside = [(x, Tape(x)) for x in beside]
        self._params = params
        self.plan = params.plan
        self._into = into
        self.root = anchors.root()
        # by unit: the gathered leaves, the flat buffers that they are views of, and the leaves bound to their anchors
        self._gathered: dict[int, dict[Slot, Tensor]] = {}
        self._full: dict[int, Buffers] = {}  # after the forward: of the unit saved last
        self._bound: dict[int, dict[Slot, Tensor]] = {}
        # by unit: the gathers under way, and how many of their stages have started
        self._coming: dict[int, dict[int, Pending]] = {}
        self._stage: dict[int, int] = {}
        self._anchors = anchors.Anchors()
        self._touched: set[int] = set()
        # by the address of a storage: a reference that keeps the address taken, unit, kind, the buffer's first byte
        self._owners: dict[int, tuple[StorageWeakRef, int, int, int]] = {}
        self._saved: dict[int, int] = {}  # the number of saved places of each unit, the unit saved last at the end
        self._again: dict[int, Buffers] = {}  # gathered again for the backward
        self._reductions = Reductions(self.plan)
        self._filled: set[tuple[int, int]] = set()  # units and kinds whose gradients have come
        self._backward = self._closed = False
        self._writes = Writes()
        self._rows = {row.untyped_storage()._cdata for row in params.tensors}
        self._gradless = False  # whether a unit was touched where gradients are off
        self._reached: dict[int, bool] = {}  # units whose gradients have come, and whether those of all their leaves
        self._kept = Kept(params, into is not None)
        self._regather = any(unit.kept != () for unit in self.plan.units) and transfer.makes_buffers(params)
        self._stages = transfer.stages(self.plan, params.view.over)  # of a gather

    def view(self) -> Tree:
        """The parameters as the loss sees them."""
        return self.enter(self._params.view.spec, self._params.view.first)

    def enter(self, spec: tree.Spec, first: int) -> Tree:
        """A leaf, or a subtree of one unit, gathered; of a subtree of several units a lazy container."""
        if len(set(self.plan.claims[first : first + spec.num_leaves])) > 1:
            return Lazy(self, spec, first)
        slots = [self.plan.slots[n] for n in self.plan.leaves[first : first + spec.num_leaves]]
        leaves: dict[Slot, Tensor] = {}
        with func_levels.aside():  # Note [Gathers inside transforms] in `func_levels`
            for unit in dict.fromkeys(slot.unit for slot in slots):
                leaves.update(self.touch(unit))
        return tree.unflatten(spec, [leaves[slot] for slot in slots])

    def leaf(self, number: int) -> Tensor:
        """A leaf by its number in the whole tree, gathered with its unit."""
        slot = self.plan.slots[self.plan.leaves[number]]
        if not func_levels.inside():
            return self.touch(slot.unit)[slot]
        with func_levels.aside():
            return self.touch(slot.unit)[slot]

    def like(self, number: int) -> Tensor:
        """A tensor with a leaf's shape, device and the dtype of computation, of one element in memory."""
        slot = self.plan.slots[self.plan.leaves[number]]
        compute = self.plan.kinds[slot.kind].precision.compute
        return torch.empty((), dtype=compute, device=self._device).expand(slot.shape)

    @property
    def _device(self) -> torch.device:
        rows = self._params.tensors
        return self.plan.device if self.plan.axes or not rows else rows[0].device

    def touch(self, unit: int) -> dict[Slot, Tensor]:
        """The leaves of a unit, gathered if they are not in memory; the gathers of the units after it are started."""
        if unit not in self._gathered:
            root = self.plan.root
            self._gathered, self._bound = ({u: x[u] for u in x if u == root} for x in (self._gathered, self._bound))
            # dropped before the next buffer is waited for, so that both are not in memory at once
            self._full = {u: x for u, x in self._full.items() if u in (root, unit)}
            self._full[unit] = self._buffers(unit)
            self._gathered[unit] = self._leaves(unit, self._full[unit])
            self._touched.add(unit)
            if self._into is None:
                self._keep(unit)
            if not self._backward:
                following = range(unit + 1, min(unit + 1 + self._stages, self._params.view.units[1]))
                self._ahead([u for u in following if u not in self._touched])
        leaves = self._gathered[unit]
        if self._into is None:
            return leaves
        if not torch.is_grad_enabled():
            self._gradless = True
            return leaves
        if unit not in self._bound:  # not at the first touch, which may be under no_grad
            self._keep(unit)
            self._bound[unit] = leaves | self._bind(unit, leaves)
        return self._bound[unit]

    def _keep(self, unit: int) -> None:
        """Keep what the plan says of a unit that was just gathered, if there will be a backward."""
        if not self._backward and torch.is_grad_enabled():
            self._kept.keep(unit, self._full[unit])

    def prefetch(self, patterns: Sequence[str]) -> None:
        """Start the gathers of the units whose names fit the patterns, except of those in memory."""
        units = select_units([unit.name for unit in self.plan.units], patterns, "prefetch")
        with func_levels.aside():
            for unit in (u for u in units if u not in self._full and u not in self._again):
                self._start(unit)

    def _kinds(self, unit: int) -> list[int]:
        return [k for k in self._params.view.kinds if (unit, k) in self.plan.places]

    def _start(self, unit: int) -> None:
        """Start the gather of a unit, unless it is under way."""
        self._check_open(unit)
        if unit not in self._coming:
            kept = self._kept.gather(unit)
            self._coming[unit] = transfer.gather(self._params, unit, [k for k in self._kinds(unit) if k not in kept])
            self._coming[unit] |= kept
            self._stage[unit] = 1

    def _ahead(self, units: Sequence[int]) -> None:
        """Gather the units that come next: gathers under way go on to their next stage, the others start.

        A gather has a stage for each axis. With several stages, as many units are under way, each one stage behind the
        unit before it.
        """
        for behind, unit in enumerate(units):
            stages = self._kept.stages(unit, self._stages)
            if unit not in self._coming and behind < stages:
                self._start(unit)
            elif unit in self._coming and self._stage[unit] < stages - behind:
                self._coming[unit] = {kind: pending.advance() for kind, pending in self._coming[unit].items()}
                self._stage[unit] += 1

    def _before(self) -> list[int]:
        """The units that the backward will gather again, the next one first."""
        return [unit for unit in reversed(self._saved) if unit not in self._again and unit not in self._full]

    def _buffers(self, unit: int) -> Buffers:
        """A unit's flat buffers: those in memory, or gathered now."""
        return self._full.get(unit) or self._again.get(unit) or self._take(unit)

    def _take(self, unit: int) -> Buffers:
        """Wait for the gather of a unit, and start it if it is not under way."""
        self._start(unit)
        with named("wait", self.plan.units[unit].name):
            return {kind: pending.wait() for kind, pending in self._coming.pop(unit).items()}

    def _leaves(self, unit: int, buffers: Buffers) -> dict[Slot, Tensor]:
        """A unit's leaves, views of its buffers, without derivatives, and watched for writes in place."""
        leaves = dict[Slot, Tensor]()
        for kind in self._kinds(unit):  # `reduce` takes gradients in this order; that of `buffers` may differ
            leaves.update(zip(self.plan.places[unit, kind], self._cut(unit, kind, buffers[kind]), strict=True))
        return leaves

    def _cut(self, unit: int, kind: int, full: Tensor) -> list[Tensor]:
        """The leaves of one unit and kind: views of its flat buffer `full`, (n,)."""
        plan, slots = self.plan, self.plan.places[unit, kind]
        is_callers = full.untyped_storage()._cdata in self._rows  # nothing was gathered: memory of the parameters
        if not is_callers:
            self._register(unit, kind, full)
        if plan.kinds[kind].trainable:
            return cut(plan, self._writes.watch(full, slots, is_callers), unit, kind)
        return self._writes.frozen(cut(plan, full, unit, kind), slots, is_callers)

    def _register(self, unit: int, kind: int, full: Tensor) -> None:
        """Note whose buffer this is, so that `pack` knows its views."""
        storage = full.untyped_storage()
        # `_cdata` is private: the address of the storage. No other storage gets this address while a weak reference to
        # it is held, as might happen with the address of its data (test_tape.py notices when it goes)
        first_byte = int(full.storage_offset()) * full.itemsize
        self._owners[storage._cdata] = StorageWeakRef(storage), unit, kind, first_byte

    def gathered_into(self) -> set[int]:
        """The addresses of the storages of gathered buffers, as `_cdata` gives them."""
        return {address for tape in self._tapes for address in tape._owners}

    def _bind(self, unit: int, leaves: dict[Slot, Tensor]) -> dict[Slot, Tensor]:
        """A unit's trainable leaves, bound to its anchor (Note [Anchors])."""
        trainable = {slot: x for slot, x in leaves.items() if self.plan.kinds[slot.kind].trainable}
        if not trainable:
            return {}
        self._writes.bound.append(list(trainable))
        bound = self._anchors.bind(self.root, self.reduce, unit, list(trainable.values()))
        return dict(zip(trainable, bound, strict=True))

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
        self._gathered.clear()
        self._bound.clear()
        self._drop_gathers()
        self._kept.end(self._saved)
        self._backward = True
        first = next(reversed(self._saved), None)
        self._full = {unit: x for unit, x in self._full.items() if unit == first}
        # a unit that is in memory takes the place of one of several stages
        self._ahead(self._before()[: max(1, self._stages - len(self._full))])

    def _hooks(self) -> AbstractContextManager[None]:
        """The block in which what autograd saves of gathered buffers is replaced by places."""
        regathering = [tape for tape in reversed(self._tapes) if self._into is not None and tape._regather]
        if not regathering:
            return nullcontext()
        # one pair of hooks for all tapes: of nested pairs torch calls the innermost alone
        return torch.autograd.graph.saved_tensors_hooks(partial(_saved_by, regathering), self._unpack_any)

    def _unpack_any(self, saved: object) -> Tensor:
        # of all tapes' saved tensors: a view belongs to the tape that gathers its unit
        return (saved.tape if isinstance(saved, SavedView) else self).unpack(saved)

    def pack(self, x: Tensor) -> object:
        """What autograd saves for a tensor: its place in a buffer of this tape, or the tensor and its version."""
        owner = self._owners.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
        if owner is None or self.plan.units[owner[1]].kept == ():
            return SavedTensor.of(x)
        _, unit, kind, first_byte = owner
        self._saved[unit] = self._saved.pop(unit, 0) + 1  # moved to the end: the unit saved last
        offset = int(x.storage_offset()) - first_byte // x.itemsize
        return SavedView(self, unit, kind, x.size(), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg())

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
            if unit not in self._gathered:  # a checkpoint that runs its function again may hold the unit
                self._full.pop(unit, None)
            self._ahead(self._before()[: self._stages])
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
        into, plan = self._into, self.plan
        assert into is not None
        self._check_once(unit)
        grads = self._anchors.total(unit, grads)
        self._reached[unit] = all(grad is not None for grad in grads)
        if unit not in self._saved:
            self._kept.drop(unit)
        self._reductions.join()  # what the sums before have read is free for the next buffer
        kinds = [k for k in self._kinds(unit) if plan.kinds[k].trainable]
        by_slot = dict(zip((slot for k in kinds for slot in plan.places[unit, k]), grads, strict=True))
        started = 0
        for kind in (k for k in kinds if plan.units[unit].lengths[k]):
            flat = into.buffer(plan, unit, kind)  # (n,)
            reached = [(slot.start, grad) for slot in plan.places[unit, kind] if (grad := by_slot[slot]) is not None]
            # embedding(sparse=True) gives a sparse gradient
            dense = [grad if grad.layout is torch.strided else grad.to_dense() for _, grad in reached]
            put(flat, dense, [start for start, _ in reached], into.add)  # zeros for leaves without a gradient
            self._filled.add((unit, kind))
            if pending := into.emit(unit, kind, flat):
                self._reductions.add(pending)
                started += 1
        self._reductions.move_on(max(started, 1))

    def _check_open(self, unit: int) -> None:
        if self._closed:
            raise ValueError(
                f"the loss function: unit {self.plan.units[unit].name!r} of the parameters of an earlier call or "
                "micro-batch was used: parameters given to a loss are good until it returns. Use those it is given now."
            )

    def _check_once(self, unit: int) -> None:
        self._check_open(unit)
        name = f"the loss function: unit {self.plan.units[unit].name!r}"
        if not self._backward:
            raise ValueError(
                f"{name} was given gradients before the loss was returned, by a backward() inside it. Use "
                "torch.autograd.grad(y, x, create_graph=True), or return what is to be differentiated."
            )
        if unit in self._reached:
            raise ValueError(
                f"{name} was given gradients twice in one backward, by an autograd function that runs a backward of "
                "its own, as checkpoints do that are reentrant. Use torch.utils.checkpoint with use_reentrant=False."
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
        into, plan = self._into, self.plan
        assert into is not None
        trained = self._params.trainable.view.kinds
        for unit in range(*self._params.view.units):
            for kind in (k for k in trained if plan.units[unit].lengths[k]):
                if (unit, kind) not in self._filled:
                    self._finish_untouched(into, unit, kind)
        self._reductions.finish()
        settle(plan)

    def _finish_untouched(self, into: Gradients, unit: int, kind: int) -> None:
        """Zeros for a unit and kind that got no gradient; the sum so far, if gradients are added up."""
        if not into.add:
            if into.local is not None:
                into.local().piece(unit, kind).zero_()
            if into.reduced is not None:
                self._reductions.add(transfer.nothing(into.reduced(), unit, kind, into.by, into.later))
        elif into.local is not None and (pending := into.emit(unit, kind, into.local().piece(unit, kind))):
            self._reductions.add(pending)  # the sum of earlier micro-batches

    def close(self) -> None:
        """Drop all tensors, and wait for all collectives under way; after an error too.

        No next stage of a collective starts: other ranks, which may not have raised, would take it for another
        collective.
        """
        for _, tape in self.beside:
            tape.close()
        with suppress(MismatchError):  # raised here only after another error, which says more
            self._reductions.drop()
            self._drop_gathers()
        self._coming.clear()
        self._again.clear()
        self._kept.clear()
        # these hold autograd nodes that hold this tape: a cycle that Python's garbage collector cannot see
        self._gathered.clear()
        self._full.clear()
        self._bound.clear()
        self._anchors.clear()
        self._closed = True

    def _drop_gathers(self) -> None:
        """Wait for the gathers that were started ahead and not used."""
        for pendings in self._coming.values():
            for pending in pendings.values():
                pending.drop()
        self._coming.clear()


def _saved_by(tapes: Sequence[Tape], x: Tensor) -> object:
    """What autograd saves for a tensor: its place in a buffer of one of the tapes, or the tensor and its version."""
    *others, last = tapes
    place = next((saved for tape in others if isinstance(saved := tape.pack(x), SavedView)), None)
    # what is in no buffer is packed by the last: the tape of `hvp`, which comes last, asks its tape of tangents
    return last.pack(x) if place is None else place
