"""The autograd nodes by which gradients of gathered leaves come back to the tape that gathered them.

Note [Anchors]
    A unit's leaves get their gradients through one autograd node per tape, the anchor. Its outputs stand for the
    leaves without their memory (strides of zero). Each touch binds the gathered views to them, so that however often
    a unit is touched, autograd adds its gradients up and runs the anchor once: one reduction per unit. It starts
    there and is waited for when the backward is over.

Note [One root]
    A backward runs the nodes on the way to what it differentiates with respect to, and no others: that is the root,
    a constant that all anchors hang on. So what a loss uses of the parameters of an earlier call or micro-batch is
    reached as well, and its tape, which is closed, says so, instead of a gradient that lacks a part. Only a loss
    inside another has a root of its own: to it the outer loss's parameters are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor


def _new_root() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


_OUTERMOST = _new_root()
_root: ContextVar[Tensor] = ContextVar("fshard_root", default=_OUTERMOST)


def root() -> Tensor:
    """What backwards differentiate with respect to: a 0-d tensor."""
    return _root.get()


@contextmanager
def another_root() -> Iterator[None]:
    """Inside the block the root is another."""
    token = _root.set(_new_root())
    try:
        yield
    finally:
        _root.reset(token)


class Anchor(torch.autograd.Function):
    """Stands for a unit's leaves; its backward has all their gradients, and hands them on: `take(unit, gradients)`."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, take: Callable[..., None], unit: int, leaves: Sequence[Tensor]) -> Any:
        """Results of the leaves' shapes and dtypes."""
        ctx.take, ctx.unit = take, unit
        ctx.set_materialize_grads(False)
        return tuple(leaf.new_empty(()).expand(leaf.shape) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """None for the root."""
        ctx.take(ctx.unit, grads)
        return None, None, None, None


class Bind(torch.autograd.Function):
    """Gives the anchor's outputs the values of gathered leaves."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], *anchors: Tensor) -> Any:
        """Views of the leaves."""
        ctx.set_materialize_grads(False)
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients go to the anchors."""
        return None, *grads


def has_reentrant(outs: Sequence[Tensor]) -> bool:
    """Whether a reentrant checkpoint is anywhere in the graph of some tensors."""
    found, waiting = set[Any](), [x.grad_fn for x in outs]
    while waiting:
        node = waiting.pop()
        if node is None or node in found:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        found.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
