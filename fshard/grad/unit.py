"""One unit in one forward and backward: what of it is in memory, and how far its gradients have come.

Note [A unit's life]
    In memory a unit is absent, coming, or here. It is here while the program reads its leaves, and in the backward
    until its last saved place was used. `held` is what stays of it even then (Note [What stays of a unit] in
    `gathers.py`): from that it comes back with fewer messages, or with none.

    Its gradients come once, after the forward, and are then given to a reduction. The sum is there about one unit
    later (`Reductions.move_on`). With `Gradients.take` an optimizer takes the sum, and writes to the parameters. What a
    program may do to break this order is an error:

    | gradients | are reduced      | the unit is gathered |
    |-----------|------------------|----------------------|
    | forward   | error            | allowed              |
    | due       | become summing   | allowed              |
    | summing   | error            | allowed              |
    | taken     | error            | error                |
    | closed    | error            | error                |
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..comm.ranks import Pending
from ..core.tracing import is_tracing
from ..layout.rules import COPIES
from ..sharding.schedule import Entry
from .autograd import Block

Leaves: TypeAlias = Sequence[Tensor]  # of a unit, in the order of its `Entry.slots`
Buffers: TypeAlias = dict[int, Tensor]  # gathered flat buffers (n,), or copies (n / W,) that are cut, by kind
Gathered: TypeAlias = dict[int, Buffers]  # of units that stay gathered from one micro-batch of a step to the next

_UPDATED = "train_step(in_backward=True): unit {!r} was read again after it was updated. Use in_backward=False."
_CLOSED = (
    "the loss function: unit {!r} of the parameters of an earlier call or micro-batch was used: parameters given to a "
    "loss are good until it returns. Use those it is given now."
)
_REFUSED = {
    ("forward", "reduce"): "the loss function: unit {!r} was given gradients before the loss was returned, by a "
    "backward() inside it. Use torch.autograd.grad(y, x, create_graph=True), or return what is to be differentiated.",
    ("summing", "reduce"): "the loss function: unit {!r} was given gradients twice in one backward, by an autograd "
    "function that runs a backward of its own, as checkpoints do that are reentrant. Use torch.utils.checkpoint with "
    "use_reentrant=False.",
    **{("taken", event): _UPDATED for event in ("reduce", "gather")},
    **{("closed", event): _CLOSED for event in ("reduce", "gather")},
}


class TapeUnit:
    """One unit of a tape (Note [A unit's life])."""

    buffers: Buffers | None = None  # while it is here
    leaves: Leaves | None = None  # views of them, while the program reads these
    bound: Leaves | None = None  # the leaves, those that train as outputs of an anchor
    coming: dict[int, Pending] | None = None  # its gathers, by kind
    stages = 0  # how many stages of them have started
    held: Buffers | None = None  # what stays of it by `keep_rule`
    is_touched = False
    hook: object = None  # of the checkpoint that read it last
    is_shared = False  # whether several checkpoints gather it, or one does twice
    before = maxsize  # the number of an anchor that was made before all of them
    is_tied = False  # whether it stays, once gathered again, until its anchor runs
    is_used = False  # whether it was read where gradients are on
    is_again = False  # whether the buffers stay until the last saved place was used
    saved = 0  # the number of saved places that were not used yet
    gradients: Literal["forward", "due", "summing", "taken", "closed"] = "forward"
    is_complete = False  # whether gradients of all leaves that train have come
    anchor: Tensor | None = None  # the last output of its anchor (Note [Anchors] in `autograd.py`)
    since = 0  # the number of its anchor in the chain; of a frozen unit, that of the anchor before
    _added: Sequence[Tensor | None] | None = None  # the gradients of later touches until the anchor runs

    def __init__(self, entry: Entry, stays: bool):
        self.entry = entry
        self.number = entry.unit
        self.keep_rule = entry.keep_rule  # of `regather=`
        self.stays = stays  # until the forward ends
        self._gathered: Gathered | None = None

    def keep_in(self, gathered: Gathered) -> None:
        """Keep all of the unit in `gathered`, beyond this tape; what is there already is not gathered again."""
        self._gathered, self.keep_rule, self.held = gathered, COPIES, gathered.get(self.number)
        if is_tracing():  # another label than that of units which a graph may gather again
            self.entry = self.entry._replace(name=f"{self.entry.name} (kept)")

    def check(self, event: Literal["reduce", "gather"]) -> None:
        """ValueError if the unit may not be gathered, or given gradients, any more, or not yet."""
        if (self.gradients, event) in _REFUSED:
            raise ValueError(_REFUSED[self.gradients, event].format(self.entry.name))

    def let_go(self) -> None:
        """Drop the leaves, and the buffers unless saved places are still to be used."""
        self.leaves = self.bound = None
        if not self.is_again:
            self.buffers = None

    def rerun_by(self, block: Block, is_linked: bool, is_twice: bool) -> None:
        """Note a checkpoint that reads it: the unit stays, once gathered again, if its anchor will say until when.

        A frozen unit has none, and stays if other checkpoints read it, too, or this one gathers it twice. So all ranks
        gather it once.
        """
        self.is_shared = self.is_shared or is_twice or block.is_nested or self.hook not in (None, block.hook)
        if is_linked and (self.entry.trained or self.is_shared):
            self.is_tied = True
        self.hook = block.hook

    def expect(self, is_linked: bool) -> None:
        """End the forward: gradients may come, of a checkpoint and of other places."""
        self.gradients = "due"
        if self.hook is not None and self.saved:
            self.is_tied = is_linked

    def forget(self) -> None:
        """Drop the buffers: its saved places will not be used."""
        self.is_tied, self.is_again, self.saved = False, False, 0
        self.let_go()

    def use(self) -> None:
        """Count one saved place as used; after the last one drop what the backward needed."""
        self.saved = max(self.saved - 1, 0)
        if not (self.saved or self.is_tied):
            self.is_again = False
            if self.leaves is None:
                self.buffers = None
            if not (self.is_bound and self.gradients in ("forward", "due")):
                self.drop_held()

    def hold(self, held: Buffers) -> None:
        """Keep these of its buffers, or copies of them."""
        self.held = held
        if self._gathered is not None:
            self._gathered[self.number] = held

    def drop_held(self) -> None:
        """Drop what is held, unless it outlives the tape."""
        if self._gathered is None:
            self.held = None

    def keep_all(self) -> None:
        """Before a second forward: from now on keep all of the unit; nothing is saved yet."""
        if self.keep_rule != COPIES:
            self.held = None
        self.keep_rule, self.saved, self.is_touched = COPIES, 0, False

    @property
    def is_kept(self) -> bool:
        """Whether all of it stays in memory, so that the backward sends nothing for it."""
        return self.keep_rule == COPIES and self.held is not None

    @property
    def is_bound(self) -> bool:
        """Whether gradients may come to it."""
        return self.anchor is not None

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a touch, added to those of others, until the anchor runs."""
        self._added = self.total(grads)

    def total(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The sum of these gradients and those of later touches, which are dropped; by leaf, None for none.

        An anchor without leaves gives none.
        """
        grads = grads or [None] * len(self.entry.trained)
        added, self._added = self._added, None
        return grads if added is None else [_sum(x, y) for x, y in zip(added, grads, strict=True)]

    def close(self) -> None:
        """Drop all tensors: nodes of autograd hold this unit, in a cycle that Python's garbage collector cannot see."""
        self.let_go()
        self.buffers = self.held = self.coming = self.anchor = self._added = self.hook = None
        self.gradients = "closed"


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    if x is None or y is None:
        return y if x is None else x
    # a dense tensor plus a sparse one is dense; torch does not add them the other way round
    return x + y if x.layout is torch.strided else y + x
