"""A step inside the user's own torch.compile.

Note [torch.compile]
    Dynamo cannot trace all of a step. With `nonstrict_trace` dynamo records the step as one call, without a graph
    break, and AOTAutograd traces this call into the same operators as `jit`. Such a call may not take or return None,
    nor return a pytree unknown to dynamo. So a constant replaces None, and the call returns the new state's leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch.utils._pytree as pytree
from torch import Tensor

from ..core.tree import Tree

Traced = Callable[["_Step", Tree, Tree], tuple[list[Tensor], Tree]]


class _Step(Protocol):
    run: Callable[..., tuple[Tree, Tree]]


class _Nothing:
    """A constant in place of None."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0


pytree.register_constant(_Nothing)
_NOTHING = _Nothing()


def without_none(x: Tree) -> Tree:
    return pytree.tree_map(lambda leaf: _NOTHING if leaf is None else leaf, x)


def with_none(x: Tree) -> Tree:
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, _Nothing) else leaf, x, is_leaf=lambda leaf: isinstance(leaf, _Nothing)
    )


def like(x: Tree, leaves: list[Tensor]) -> Tree:
    return with_none(pytree.tree_unflatten(leaves, pytree.tree_structure(x)))


def _run_step(step: _Step, state: Tree, given: Tree) -> tuple[list[Tensor], Tree]:
    args, kwargs = with_none(given)
    state, metrics = step.run(with_none(state), *args, **kwargs)
    return pytree.tree_leaves(without_none(state)), without_none(metrics)


@cache
def _opaque() -> Traced:
    import torch._dynamo  # takes seconds, unless torch.compile has imported it

    return torch._dynamo.nonstrict_trace(_run_step)


def __getattr__(name: str) -> Traced:
    # the attribute `traced` is made when dynamo first reads it, while it compiles
    if name == "traced":
        return _opaque()
    raise AttributeError(name)
