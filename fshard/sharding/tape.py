"""Gather on access, re-gather in backward, reduce when a unit's gradients are there: one forward and backward, eagerly.

Note [Tensors of a step]
    A `Tape` lives for one forward and one backward over one value of the parameters; every gather in flight belongs to
    it and dies with it. Touching a unit gathers it into a flat buffer of which the leaves are views. The tape holds
    the root's buffer and that of the unit touched last, until the forward ends; others live as long as the user's
    function holds their leaves. What autograd saves of a gathered buffer is replaced by its place in the buffer
    (`_Saved`), so saving keeps no buffer alive; the first use of such a place in the backward gathers the unit again,
    and the last one drops it. The unit that was saved last is what the backward begins with: if the tape has it when
    the forward ends, it stays. Which collectives run depends on the program alone, never on when memory is freed:
    ranks that run the same function issue the same ones.

Note [Reverse mode inside a loss]
    torch.func.grad, vjp, jacrev and hessian do not start while hooks on saved tensors are on. Nothing says beforehand
    that a loss uses them, so it is run with hooks, and if one of them refuses, once more without: a loss is a pure
    function. Random numbers are drawn again from where they were, what is gathered and still held is not gathered
    again, and what was saved dies with the first run. The second run keeps what it gathers for the backward, as
    `regather=False` does. Whether there is one depends on the program alone, so all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.ranks import MismatchError, Pending
from ..core import func_levels, tree
from ..core.flat import put
from ..core.lazy import Branch
from ..core.random import bookmark
from ..layout.pieces import device_of
from . import anchors, transfer
from .anchors import has_reentrant
from .gradients import Gradients, Reductions, settle
from .plan import Plan, Slot
from .sharded import Sharded, cut, gather_params
from .writes import Writes

Buffers = dict[int, Tensor]  # a unit's gathered flat buffers, by kind


class _Saved(NamedTuple):
    tape: Tape
    unit: int
    kind: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the buffer's first element, in elements of `dtype`
    dtype: torch.dtype  # a view may have another than its buffer, and these bits, which say what reading it does
    conj: bool
    neg: bool

    def of(self, full: Tensor) -> Tensor:
        """The same view of the buffer gathered again."""
        whole = full if full.dtype == self.dtype else full.view(self.dtype)
        x = whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)
        x = x.conj() if self.conj else x
        return x.neg() if self.neg else x  # not a view, but the values that reading the negative bit gives


class Tape:
    """The gathers and reductions of one forward and backward over one `Sharded`; without `into`, of a forward alone.
    `beside` is what else the loss reads: no gradient goes to it, and it is gathered again for this one's backward."""

    def __init__(self, params: Sharded, into: Gradients | None = None, beside: Sequence[Sharded] = ()):
        self.beside = [(x, Tape(x)) for x in beside]
        self._params = params
        self._plan: Plan = params.plan
        self._into = into
        self.root = anchors.root()
        self._held: dict[int, dict[Slot, Tensor]] = {}
        self._full: dict[int, Buffers] = {}  # what they are views of; after the forward, of the unit saved last
        self._bound: dict[int, dict[Slot, Tensor]] = {}  # the same, bound to their anchors
        self._coming: dict[int, dict[int, Pending]] = {}
        self._stage: dict[int, int] = {}  # of what is coming: how many of its stages have started
        self._anchors: dict[int, tuple[Tensor, ...]] = {}
        self._touched: set[int] = set()
        self._owners: dict[int, tuple[StorageWeakRef, int, int, int]] = {}
        self._saved: dict[int, int] = {}  # places saved of each unit, the unit saved last at the end
        self._again: dict[int, Buffers] = {}  # gathered again for the backward
        self._reductions = Reductions(self._plan)
        self._filled: set[tuple[int, int]] = set()
        self._backward = self._closed = False
        self._writes = Writes()
        self._rows = {row.untyped_storage()._cdata for row in params.tensors}
        self._gradless = False  # whether a unit was touched where gradients are off
        self._reached: dict[int, bool] = {}  # units whose gradients have come, and whether all of them
        self._regather = self._plan.regather
        self._stages = max(1, sum(dict(self._plan.axes)[axis] > 1 for axis in params.view.over))  # of a gather

    def view(self) -> Any:
        """The parameters as the loss sees them."""
        return self._enter(self._params.view.spec, self._params.view.first)

    def _enter(self, spec: tree.Spec, first: int) -> Any:
        """Leaves, and subtrees of one unit, are gathered; what spans several is a container to go into."""
        if len(set(self._plan.claims[first : first + spec.num_leaves])) > 1:
            return _Lazy(self, spec, first)
        slots = [self._plan.slots[n] for n in self._plan.leaves[first : first + spec.num_leaves]]
        found: dict[Slot, Tensor] = {}
        with func_levels.aside():  # Note [Gathers inside transforms] in `func_levels`
            for unit in dict.fromkeys(slot.unit for slot in slots):
                found.update(self._touch(unit))
        return tree.unflatten(spec, [found[slot] for slot in slots])

    def _touch(self, unit: int) -> dict[Slot, Tensor]:
        if unit not in self._held:
            root = self._plan.root
            self._held, self._bound = ({u: x[u] for u in x if u == root} for x in (self._held, self._bound))
            self._full = {u: x for u, x in self._full.items() if u in (root, unit)}  # before another is waited for
            self._full[unit] = self._buffers(unit)
            self._held[unit] = self._leaves(unit, self._full[unit])
            self._touched.add(unit)
            if not self._backward:
                following = range(unit + 1, min(unit + 1 + self._stages, self._params.view.units[1]))
                self._ahead([u for u in following if u not in self._touched])
        leaves = self._held[unit]
        if self._into is None:
            return leaves
        if not torch.is_grad_enabled():
            self._gradless = True
            return leaves
        if unit not in self._bound:  # not before: the first touch may be under no_grad
            self._bound[unit] = leaves | self._bind(unit, leaves)
        return self._bound[unit]

    def _kinds(self, unit: int) -> list[int]:
        return [k for k in self._params.view.kinds if (unit, k) in self._plan.places]

    def _start(self, unit: int) -> None:
        self._check_open(unit)
        if unit not in self._coming:
            self._coming[unit] = transfer.gather(self._params, unit, self._kinds(unit))
            self._stage[unit] = 1

    def _ahead(self, units: Sequence[int]) -> None:
        """Gather the units that come next: what is under way goes on to its next stage, the others start.

        Of gathers in several stages as many units are under way, each a stage behind the one before it.
        """
        for behind, unit in enumerate(units):
            if unit not in self._coming:
                self._start(unit)
            elif self._stage[unit] < self._stages - behind:
                self._coming[unit] = {kind: pending.advance() for kind, pending in self._coming[unit].items()}
                self._stage[unit] += 1

    def _before(self) -> list[int]:
        """The units that the backward will gather again, the next one first."""
        return [unit for unit in reversed(self._saved) if unit not in self._again and unit not in self._full]

    def _buffers(self, unit: int) -> Buffers:
        """Those in memory, or gathered."""
        return self._full.get(unit) or self._again.get(unit) or self._take(unit)

    def _take(self, unit: int) -> Buffers:
        self._start(unit)
        return {kind: pending.wait() for kind, pending in self._coming.pop(unit).items()}

    def _leaves(self, unit: int, buffers: Buffers) -> dict[Slot, Tensor]:
        """A unit's leaves, views of its buffers, without derivatives."""
        plan, leaves = self._plan, dict[Slot, Tensor]()
        for kind in self._kinds(unit):  # the order in which `reduce` takes their gradients: buffers may have another
            full, slots = buffers[kind], plan.places[unit, kind]
            storage = full.untyped_storage()
            # `_cdata` is private: the address of the storage, never given to another while a weak reference to it
            # is held, as the address of its data would be (test_tape.py notices when it goes)
            own = storage._cdata in self._rows
            if not own:
                begin = int(full.storage_offset()) * full.itemsize
                self._owners[storage._cdata] = StorageWeakRef(storage), unit, kind, begin
            if plan.kinds[kind].trainable:
                full = self._writes.watch(full, slots, own)
            pieces = cut(plan, full, unit, kind)
            if not plan.kinds[kind].trainable:
                pieces = self._writes.frozen(pieces, slots, own)
            leaves.update(zip(slots, pieces, strict=True))
        return leaves

    def _bind(self, unit: int, leaves: dict[Slot, Tensor]) -> dict[Slot, Tensor]:
        """Its trainable leaves, bound to its anchor."""
        trainable = [slot for slot in leaves if self._plan.kinds[slot.kind].trainable]
        if not trainable:
            return {}
        self._writes.bound.append(trainable)
        values = [leaves[slot] for slot in trainable]
        if unit not in self._anchors:
            self._anchors[unit] = anchors.Anchor.apply(self.root, self.reduce, unit, values)
        return dict(zip(trainable, anchors.Bind.apply(values, *self._anchors[unit]), strict=True))

    def forward(self, loss: Callable[[Any], Any]) -> Any:
        """What the loss gives of the parameters; afterwards each tape has one unit's buffers at most."""
        if self._into is None or not any(tape._regather for tape in self._tapes):
            return self._forward(loss)
        rewind = bookmark(device_of(self._params))
        try:
            return self._forward(loss)
        except RuntimeError as failure:
            if not func_levels.refuses_hooks(failure):
                raise
        rewind()  # Note [Reverse mode inside a loss]
        for tape in self._tapes:
            tape._regather = False
            tape._saved.clear()
            tape._touched.clear()
        return self._forward(loss)

    @property
    def _tapes(self) -> list[Tape]:
        return [self, *(tape for _, tape in self.beside)]

    def _forward(self, loss: Callable[[Any], Any]) -> Any:
        with self._hooks(), self._writes.refusing():
            out = loss(self.view())
        for tape in self._tapes:
            tape.end()
        return out

    def end(self) -> None:
        """The end of the forward: nothing gathered is held any longer but what the backward begins with."""
        self._writes.check()
        self._held.clear()
        self._bound.clear()
        self._drop_gathers()
        self._backward = True
        first = next(reversed(self._saved), None)
        self._full = {unit: x for unit, x in self._full.items() if unit == first}
        # a stage of what is there already is not under way
        self._ahead(self._before()[: self._stages - len(self._full)])

    def _hooks(self) -> AbstractContextManager[Any]:
        on = torch.autograd.graph.saved_tensors_hooks
        again = [tape for tape in reversed(self._tapes) if self._into is not None and tape._regather]
        # one pair of hooks: of nested ones torch calls the innermost alone
        own = lambda saved: (saved.tape if isinstance(saved, _Saved) else self)._unpack(saved)  # noqa: E731
        return on(partial(_pack, again), own) if again else nullcontext()

    def _pack(self, x: Tensor) -> tuple[Tensor, int] | _Saved:
        owner = self._owners.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
        if owner is None:
            # a result that its own node saves holds that node: a cycle that only a backward through it would break
            return (x.detach() if x.requires_grad else x), x._version
        _, unit, kind, begin = owner
        self._saved[unit] = self._saved.pop(unit, 0) + 1
        offset = int(x.storage_offset()) - begin // x.itemsize
        return _Saved(self, unit, kind, x.size(), x.stride(), offset, x.dtype, x.is_conj(), x.is_neg())

    def _unpack(self, saved: tuple[Tensor, int] | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            x, version = saved
            if x._version != version:  # torch does not look where there are hooks
                raise RuntimeError(
                    f"the loss function: a {x.dtype} tensor of shape {list(x.shape)}, needed for the gradient, was "
                    "written to in place after it was used. Make a new tensor instead, or a clone first."
                )
            return x
        unit = saved.unit
        if unit not in self._again:
            self._again[unit] = self._buffers(unit)
            if unit not in self._held:
                self._full.pop(unit, None)
            self._ahead(self._before()[: self._stages])
        full = self._again[unit][saved.kind]
        self._saved[unit] = self._saved.get(unit, 1) - 1
        if not self._saved[unit]:
            del self._saved[unit], self._again[unit]
        return saved.of(full)

    def reduce(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """Put a unit's gradients into flat buffers and start their reduction."""
        into, plan = self._into, self._plan
        assert into is not None
        self._check_once(unit)
        self._reached[unit] = all(grad is not None for grad in grads)
        self._reductions.join()  # before memory is asked for
        kinds = [k for k in self._kinds(unit) if plan.kinds[k].trainable]
        found, started = dict(zip((slot for k in kinds for slot in plan.places[unit, k]), grads, strict=True)), 0
        for kind in (k for k in kinds if plan.units[unit].lengths[k]):
            flat = into.buffer(plan, unit, kind)
            given = [(slot.start, grad) for slot in plan.places[unit, kind] if (grad := found[slot]) is not None]
            # embedding(sparse=True) gives a sparse one
            here = [(at, grad if grad.layout is torch.strided else grad.to_dense()) for at, grad in given]
            put(flat, [grad for _, grad in here], [start for start, _ in here], into.add)
            self._filled.add((unit, kind))
            if pending := into.emit(unit, kind, flat):
                self._reductions.add(pending)
                started += 1
        self._reductions.move_on(max(started, 1))

    def _check_open(self, unit: int) -> None:
        if self._closed:
            raise ValueError(
                f"the loss function: unit {self._plan.units[unit].name!r} of the parameters of an earlier call or "
                "micro-batch was used: parameters given to a loss are good until it returns. Use those it is given now."
            )

    def _check_once(self, unit: int) -> None:
        self._check_open(unit)
        name = f"the loss function: unit {self._plan.units[unit].name!r}"
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
        complete = not self._gradless and self._reached.keys() == self._anchors.keys() and all(self._reached.values())
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
        """See to the units that no gradient reached in this backward, and wait for every reduction."""
        into, plan = self._into, self._plan
        assert into is not None
        trained = self._params.trainable.view.kinds
        for unit in range(*self._params.view.units):
            for kind in (k for k in trained if plan.units[unit].lengths[k]):
                if (unit, kind) not in self._filled:
                    self._finish_untouched(into, unit, kind)
        self._reductions.finish()
        settle(plan)

    def _finish_untouched(self, into: Gradients, unit: int, kind: int) -> None:
        if not into.add:
            if into.local is not None:
                into.local().piece(unit, kind).zero_()
            if into.reduced is not None:
                self._reductions.add(transfer.nothing(into.reduced(), unit, kind, into.by, into.later))
        elif into.local is not None and (pending := into.emit(unit, kind, into.local().piece(unit, kind))):
            self._reductions.add(pending)  # what earlier micro-batches have put there

    def close(self) -> None:
        """Let go of everything, after an error too: nothing stays under way.

        What is under way is waited for, and no next stage of it starts: other ranks, which go on where this one has
        raised, would take that for a collective of theirs.
        """
        for _, tape in self.beside:
            tape.close()
        with suppress(MismatchError):  # there is one only after an error, which says more
            self._reductions.drop()
            self._drop_gathers()
        self._coming.clear()
        self._again.clear()
        # these hold autograd nodes that hold this tape, a cycle that Python's collector cannot see
        self._held.clear()
        self._full.clear()
        self._bound.clear()
        self._anchors.clear()
        self._closed = True

    def _drop_gathers(self) -> None:
        """Wait for what was gathered ahead and not asked for."""
        for pendings in self._coming.values():
            for pending in pendings.values():
                pending.drop()
        self._coming.clear()


def _pack(tapes: Sequence[Tape], x: Tensor) -> tuple[Tensor, int] | _Saved:
    *others, last = tapes
    saved = next((s for tape in others if isinstance(s := tape._pack(x), _Saved)), None)
    return last._pack(x) if saved is None else saved


class _Lazy(Branch):
    """A container of a loss's parameters: touching a unit in it gathers the unit."""

    def __init__(self, tape: Tape, spec: tree.Spec, first: int):
        self._tape = tape
        self._spec = spec
        self._first = first

    def _node(self) -> tree.Spec:
        return self._spec

    def _child(self, spec: tree.Spec, first: int) -> Any:
        return self._tape._enter(spec, self._first + first)

    def gathered(self) -> Any:
        """The plain subtree, all its units gathered."""
        parts = [self._child(child, at) for child, at in tree.children(self._spec)]
        return tree.unflatten(self._spec, tree.leaves([gather_params(part) for part in parts]))


tree.register(_Lazy, lambda x: ((x.gathered(),), None), lambda _, children: children[0])
