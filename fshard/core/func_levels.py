"""torch.func's interpreter stack, with one level for each running transform.

Note [Gathers inside transforms]
    A loss may read its parameters inside torch.func's transforms. For the transforms, a gathered parameter is a
    constant: only the step's gradient differentiates by it. So the gather runs with an empty stack, where tensors have
    memory and autograd records nodes for the step's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

# Private, here and below: torch has no public way to ask for a running transform, or to leave it
# (test_func_losses.py notices changes).
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack, temporarily_restore_interpreter_stack
from torch.autograd import forward_ad

from . import tree
from .tree import Tree

T = TypeVar("T")

_REFUSAL = "don't yet support saved tensor hooks"  # torch has no class for this error


def inside() -> bool:
    """True if torch.func transforms run.

    >>> inside(), torch.func.vmap(lambda x: x + inside())(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiates(x: Tree) -> bool:
    """True if a derivative may pass through `x`: in a transform, or if a leaf requires a gradient or has a tangent.

    >>> differentiates([torch.ones(1), 2.0]), differentiates([torch.ones(1, requires_grad=True)])
    (False, True)
    """
    if inside():
        return True
    return any((x.requires_grad and torch.is_grad_enabled()) or is_dual(x) for x in tree.tensors(tree.leaves(x)))


def needs_gradient(x: object) -> bool:
    """True if `x` is a tensor that requires a gradient at any level.

    >>> torch.func.grad(lambda x: x * needs_gradient(2 * x))(torch.ones(()))
    tensor(1.)
    """
    while isinstance(x, Tensor) and not x.requires_grad and is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return isinstance(x, Tensor) and x.requires_grad


def depending(x: Tensor, on: Tree) -> Tensor:
    """Return `x`, or, if a derivative may pass, a copy with the levels of `on`, for results from `on`.

    >>> torch.func.vmap(lambda y: depending(torch.zeros(2), [y]).copy_(y))(torch.ones(1, 2))
    tensor([[1., 1.]])
    """
    if differentiates(on):
        for leaf in tree.tensors(tree.leaves(on)):
            x = x + leaf.reshape(-1)[:0].abs().sum().to(x.dtype)  # adds 0, and the levels of `leaf`
    return x


def refuse_derivative(x: T, what: str) -> T:
    """Return `x`; TypeError if a derivative passes through `x`: `what` would lose the derivative."""
    if differentiates(x):
        raise TypeError(
            f"{what}: a derivative by a hyper-parameter alone (requires_grad) is seen too late here, and not on all "
            "ranks: expected torch.func.grad, jvp or vmap around the update, or values that need none (x.detach())"
        )
    return x


def is_wrapped(x: Tensor) -> bool:
    """True for a tensor of a running transform.

    >>> torch.func.vmap(lambda x: x + is_wrapped(x))(torch.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_dual(x: object) -> bool:
    """True for a tensor with a tangent.

    >>> is_dual(torch.zeros(2))
    False
    """
    # private: faster than unpacking (test_jit_derivatives.py)
    if forward_ad._current_level < 0 or not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False  # torch has no sparse tangents
    return forward_ad.unpack_dual(x).tangent is not None


def unwrapped(x: Tensor) -> Tensor:
    """Return the innermost tensor, with its batch dims.

    >>> shapes = []
    >>> _ = torch.func.vmap(lambda x: shapes.append(unwrapped(x).shape) or x)(torch.zeros(2, 3))
    >>> shapes
    [torch.Size([2, 3])]
    """
    while is_wrapped(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def aside() -> AbstractContextManager[Sequence[object]]:
    """Leave all transforms in the block; yield their levels, for `again`.

    >>> def f(x):
    ...     with aside():
    ...         is_inside = inside()
    ...     return x + is_inside
    >>> torch.func.vmap(f)(torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return temporarily_clear_interpreter_stack() if inside() else nullcontext(())


def again(levels: Sequence[object]) -> AbstractContextManager[None]:
    """Return to the `levels` left by `aside`."""
    return temporarily_restore_interpreter_stack(list(levels))


def refuses_hooks(failure: RuntimeError) -> bool:
    """True if torch.func refused saved-tensor hooks.

    >>> refuses_hooks(RuntimeError("something else"))
    False
    """
    return _REFUSAL in str(failure)
