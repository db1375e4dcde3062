"""`jit`: a pure function of trees as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import tree
from .lowered import Compiled, Lowered, lower
from .trace import difference, signature


class Jitted:
    """What `jit` gives: call it like the function."""

    def __init__(self, fn: Callable[..., Any], donate: bool, backend: str):
        self._fn, self._donate, self._backend = fn, donate, backend
        self._compiled: dict[Any, Compiled] = {}

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The graph for such arguments (meta and fake tensors will do), to look at or to compile."""
        leaves, spec = tree.flatten((args, kwargs))
        return lower(self._fn, leaves, spec, self._donate)

    def explain(self) -> str:
        """What it was traced for, and why again."""
        known = list(self._compiled)
        reasons = [f"traced again: {difference(known[0], key)}" for key in known[1:]]
        return "\n".join(["traced for the first call" if known else "not traced yet", *reasons])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`."""
        leaves, spec = tree.flatten((args, kwargs))
        key = signature(leaves, spec)
        if key not in self._compiled:
            self._compiled[key] = lower(self._fn, leaves, spec, self._donate).compile(self._backend)
        return self._compiled[key].run(leaves, args)


def jit(fn: Callable[..., Any], donate: bool = False, *, backend: str = "inductor") -> Jitted:
    """`fn` (a step, a loss, a gradient, anything pure) traced into one graph, compiled, and run.

    >>> jit(lambda x: {"y": 2 * x}, backend="eager")(torch.tensor(1.0))
    {'y': tensor(2.)}
    """
    return Jitted(fn, donate, backend)
