"""The autograd nodes by which gradients of gathered leaves come back to the tape that gathered them.

Note [Anchors]
    A unit has one autograd node in each tape, the anchor. Its outputs have the shapes of the unit's leaves and no
    memory (strides of zero). Each touch of the unit binds the gathered views to these outputs. So autograd sums the
    gradients of all touches and runs the anchor once, which starts the one reduction of the unit. The tape waits for
    the reductions at the end of the backward.

Note [One root]
    A backward runs only the nodes on the way to the tensor that it differentiates with respect to. Here that is the
    root, a constant that all anchors take as input. So a backward also reaches leaves of an earlier call or
    micro-batch that a loss has kept, and their tape, which is closed, raises; otherwise the gradient would silently
    lack a part. Only a loss inside another loss has a root of its own: to it the outer loss's parameters are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Ctx = Any  # torch's context of a function, on which forward sets any attributes for backward


def _new_root() -> Tensor:
    # dtype and device are given: a user may have set other defaults
    return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


_OUTERMOST = _new_root()
_root: ContextVar[Tensor] = ContextVar("fshard_root", default=_OUTERMOST)


def root() -> Tensor:
    """The 0-d tensor that backwards differentiate with respect to (Note [One root])."""
    return _root.get()


@contextmanager
def another_root() -> Iterator[None]:
    """A block in which the root is another tensor: for a loss inside a loss."""
    token = _root.set(_new_root())
    try:
        yield
    finally:
        _root.reset(token)


class Anchor(torch.autograd.Function):
    """The node of a unit: its backward gets the gradients of all leaves and calls `take(unit, gradients)`."""

    @staticmethod
    def forward(
        ctx: Ctx,
        root: Tensor,
        take: Callable[[int, Sequence[Tensor | None]], None],
        unit: int,
        leaves: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """Return tensors with the leaves' shapes and dtypes, and one element of memory each."""
        ctx.take, ctx.unit = take, unit
        # None, not zeros, for a leaf that the loss does not use: the tape zeroes its place in the flat buffer
        ctx.set_materialize_grads(False)
        return tuple(leaf.new_empty(()).expand(leaf.shape) for leaf in leaves)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[None, ...]:
        """Hand the gradients on; the root gets none."""
        ctx.take(ctx.unit, grads)
        return None, None, None, None  # for root, take, unit and leaves


class Bind(torch.autograd.Function):
    """Connect gathered leaves to the outputs of their unit's anchor."""

    @staticmethod
    def forward(ctx: Ctx, leaves: Sequence[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        """Return views of the leaves, which autograd takes for functions of the anchor's outputs."""
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return each leaf's gradient as that of its anchor output."""
        return None, *grads


def has_reentrant(outs: Sequence[Tensor]) -> bool:
    """Whether a reentrant checkpoint is anywhere in the graph of these tensors."""
    seen, waiting = set[object](), [x.grad_fn for x in outs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [earlier for earlier, _ in node.next_functions]
    return False
