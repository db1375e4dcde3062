"""The levels of torch.func: each transform that is running has put one on a stack, and operators go through it.

Note [Gathers inside transforms]
    A loss may use torch.func's transforms, and touch its parameters inside them. What is gathered there belongs to no
    transform: it is a constant for all of them, which the gradient outside is taken of. So it is gathered with the
    stack put aside, where tensors have memory and autograd records the nodes of the outer gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Private, here and below: torch has no public way to ask whether a transform is running, nor to leave it for a while
# (test_transforms.py notices when these go).
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack, temporarily_restore_interpreter_stack

_REFUSAL = "don't yet support saved tensor hooks"


def inside() -> bool:
    """Whether a transform of torch.func is running.

    >>> inside(), torch.func.vmap(lambda x: x + inside())(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def aside() -> AbstractContextManager[Sequence[Any]]:
    """The block runs outside all transforms, and is given the levels that were left, innermost first. Dual: `again`.

    >>> def f(x):
    ...     with aside():
    ...         found = inside()
    ...     return x + found
    >>> torch.func.vmap(f)(torch.zeros(2)).tolist()
    [0.0, 0.0]
    """
    return temporarily_clear_interpreter_stack() if inside() else nullcontext(())


def again(levels: Sequence[Any]) -> AbstractContextManager[None]:
    """The block runs in these levels."""
    return temporarily_restore_interpreter_stack(list(levels))


def wrapped(x: torch.Tensor) -> bool:
    """Whether a tensor belongs to a level.

    >>> wrapped(torch.ones(()))
    False
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def refuses_hooks(failure: RuntimeError) -> bool:
    """Whether torch.func.grad, vjp, jacrev or hessian would not start because hooks on saved tensors are on.

    >>> refuses_hooks(RuntimeError("something else"))
    False
    """
    return _REFUSAL in str(failure)
