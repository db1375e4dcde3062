"""What a gradient wire with feedback has lost: into a step and out of it.

Note [What a wire loses]
    A wire with feedback adds what it could not send of earlier gradients to the next ones. A state keeps this, as
    `state.lost`, in units of the gradient itself, so that a change of the loss scale does not touch it. In a step it
    takes four stages:

    1. `scaled`: a copy times the loss scale, as gradients are in the backward.
    2. With several micro-batches, `set_aside` empties the copy, and the last micro-batch gets the old values back.
    3. The reduction of each unit (`reducing.reduce`) adds the copy to the gradient, encodes and sends the sum, and
       writes to the copy, in place, what was not sent.
    4. `after_update`: the copy divided by the loss scale again, or the old values where the update was skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm import primitives
from ..core import tree
from ..core.tree import Tree
from ..layout.pieces import clear_padding_, pieces
from ..optim.base import FoundInf, choose
from ..optim.labels import Labels, label_of
from ..sharding.sharded import Sharded, whole_view


def nothing_lost(params: Sharded) -> Tree:
    """The value before the first step: zeros of the whole gradients, on the device; () without such a wire."""
    plan = params.plan
    if plan.grad_wire is None or not plan.grad_wire.feedback or not plan.axes:
        return ()
    kinds = params.trainable.view.kinds
    rows = params.trainable.tensors
    numels = [plan.offset(len(plan.units), kind, ()) for kind in kinds]  # of whole gradients, cut over no axes
    dtypes = [primitives.sum_dtype(row.dtype) for row in rows]
    tensors = [torch.zeros(n, dtype=dtype, device=plan.device) for n, dtype in zip(numels, dtypes, strict=True)]
    return Sharded(whole_view(plan, (), kinds), tensors)


def scaled(state: Tree) -> Tree:
    """A copy of a TrainState's `lost` times its loss scale, which the step's reductions write to.

    Dual: `after_update`.
    """
    return tree.map(lambda x: x * state.loss_scale.value, state.lost)


def set_aside(lost: Tree) -> Callable[[Tensor], None]:
    """Set `lost` to zero in place; the function returned adds the old values, times a factor, to it."""
    before = tree.map(torch.clone, lost)
    tree.map(Tensor.zero_, lost)

    def put_back(factor: Tensor) -> None:
        tree.map(lambda into, x: into.add_(x * factor), lost, before)

    return put_back


def after_update(state: Tree, lost: Tree, share: Tensor | None, skip: FoundInf | None, labels: Labels) -> Tree:
    """`lost` in units of the gradient itself; where the update of a leaf was skipped, `state.lost`."""
    # gradients are multiplied by `share` after they were sent, and so is what was not sent
    share = torch.ones((), dtype=torch.float32, device="cpu") if share is None else share.float()
    factor = torch.div(share, state.loss_scale.value)
    # a wire that mixes elements loses something of the padding as well, which belongs to no leaf
    new = clear_padding_(tree.map(lambda x: x * factor, lost)) if isinstance(lost, Sharded) else lost
    if not isinstance(skip, Mapping) or not isinstance(new, Sharded):
        return choose(skip, state.lost, new)
    leaves = new.layout.leaves
    for (number, old_piece), (_, new_piece) in zip(pieces(state.lost), pieces(new), strict=True):
        # what is not finite was not sent, or the update of its leaf would be skipped
        unsent = skip[label_of(leaves[number], labels)].bool() | ~new_piece.isfinite()
        new_piece.copy_(torch.where(unsent, old_piece, new_piece))
    return new
