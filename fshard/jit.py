"""`jit`: a pure function of trees as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from . import tree
from .check import Checked, is_wanted
from .lowered import Compiled, Lowered, Options, lower
from .passes import is_cheap
from .shard import Sharded
from .trace import difference, signature


class Jitted:
    """What `jit` gives: call it like the function."""

    def __init__(self, fn: Callable[..., Any], backend: str, options: Options):
        self._fn, self._backend, self._options = fn, backend, options
        self._compiled: dict[Any, Compiled] = {}
        self._checked = is_wanted()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The graph for such arguments (meta and fake tensors will do), to look at or to compile."""
        leaves, spec = tree.flatten((args, kwargs))
        return lower(self._fn, leaves, spec, self._options)

    def explain(self) -> str:
        """What it was traced for, and why again."""
        known = list(self._compiled)
        reasons = [f"traced again: {difference(known[0], key)}" for key in known[1:]]
        return "\n".join(["traced for the first call" if known else "not traced yet", *reasons])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fn(*args, **kwargs)`."""
        checked = self._checked and tree.nodes((args, kwargs), Sharded)
        return (Checked(self._run) if checked else self._run)(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree.flatten((args, kwargs))
        key = signature(leaves, spec)
        if key not in self._compiled:
            self._compiled[key] = lower(self._fn, leaves, spec, self._options).compile(self._backend)
        return self._compiled[key].run(leaves, args)


def jit(
    fn: Callable[..., Any],
    donate: bool = False,
    *,
    backend: str = "inductor",
    in_flight: int = 0,
    budget: int | None = None,
    recompute: Callable[[fx.Node], bool] = is_cheap,
    bucket: int = 0,
) -> Jitted:
    """`fn` (a step, a loss, a gradient, anything pure) traced into one graph, compiled, and run.

    It is traced again for arguments of another structure, shape, stride, dtype, device, or with another value that is
    no tensor; `.explain()` says why. `donate` hands the first argument over: what comes out first, of the same
    structure, is written to its memory. `backend` is one of torch.compile's. Gathers start one unit ahead, or as many
    as `in_flight` bytes allow. With a `budget` (bytes) cheap values are computed again instead of kept, until the peak
    is no more than that, if that can be; `recompute` says of a node (of torch.fx) whether it is cheap, by default what
    is a pass over memory is. Collectives of one kind that follow each other travel together up to `bucket` bytes.
    Not differentiable from outside.

    Raises TraceError for what depends on the value of a tensor, uses one that is no argument, or changes its arguments.

    >>> jit(lambda x: {"y": 2 * x}, backend="eager")(torch.tensor(1.0))
    {'y': tensor(2.)}

    Source: jax.jit; SimpleFSDP (Zhang et al., 2024) for the whole step as one graph.
    """
    return Jitted(fn, backend, Options(donate, in_flight, budget, recompute, bucket))
