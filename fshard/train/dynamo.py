"""A step inside the user's own torch.compile.

Note [torch.compile]
    Dynamo follows Python, and would lose itself in a step. It is told to take the step as one call, which its second
    stage traces into operators as `jit` does: no graph break, and the same nodes. It wants arguments without None, and
    structures that it has seen, so a state is flattened on the way out, and built again like the one that came in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.utils._pytree as pytree


class _Nothing:
    """Stands for None."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0


pytree.register_constant(_Nothing)
_NOTHING = _Nothing()


def without_none(x: Any) -> Any:
    """A tree with something else in the place of None. Dual: `with_none`."""
    return pytree.tree_map(lambda leaf: _NOTHING if leaf is None else leaf, x)


def with_none(x: Any) -> Any:
    """The tree that `without_none` was given."""
    return pytree.tree_map(
        lambda leaf: None if isinstance(leaf, _Nothing) else leaf, x, is_leaf=lambda leaf: isinstance(leaf, _Nothing)
    )


def like(x: Any, leaves: Any) -> Any:
    """A tree of the structure of one without None, with None again."""
    return with_none(pytree.tree_unflatten(leaves, pytree.tree_structure(x)))


def _run(step: Any, state: Any, given: Any) -> Any:
    state, metrics = step.run(with_none(state), *with_none(given))
    return pytree.tree_leaves(without_none(state)), without_none(metrics)


@cache
def _opaque() -> Any:
    import torch._dynamo  # takes seconds, and is there when dynamo asks for this

    return torch._dynamo.nonstrict_trace(_run)


def __getattr__(name: str) -> Any:
    # dynamo reads a module's attribute once, while it compiles
    if name == "traced":
        return _opaque()
    raise AttributeError(name)
