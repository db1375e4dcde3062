"""`jit`: a pure function of trees as one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..comm.check import Checked, is_wanted
from ..comm.mesh import OnMesh
from ..core import func_levels, tree
from ..core.arguments import check_flags, check_whole, wrong
from ..core.tracing import is_tracing
from ..sharding.sharded import Sharded
from .captures import Capture, captures
from .lowered import Compiled, Lowered, Options, lower
from .passes import is_cheap
from .signature import Signature, changed, difference, flatten, held, on_meshes, signature


class Jitted:
    """A function made by `jit`: call it like the original."""

    def __init__(self, fn: Callable[..., Any], backend: str, options: Options):
        self._fn, self._backend, self._options = fn, backend, options
        self._alone: dict[Any, Compiled] = {}  # for arguments that lie on no mesh
        self._captures: list[Capture] = []
        self._reasons: list[str] = []
        self._checked = is_wanted()

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The graph for these arguments, to inspect or compile. Meta and fake tensors may stand for tensors."""
        return lower(self._fn, *flatten(args, kwargs), self._options)

    def explain(self) -> str:
        """What it was traced for, and why again."""
        return "\n".join(self._reasons) or "not traced yet"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function: traced and compiled the first time, for each signature of its arguments."""
        if is_tracing() or torch.compiler.is_compiling():  # part of a larger graph
            return self._fn(*args, **kwargs)
        checked = self._checked and tree.nodes((args, kwargs), Sharded)
        return (Checked(self._run) if checked else self._run)(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        _check_outermost()
        (leaves, spec), nodes = flatten(args, kwargs), on_meshes((args, kwargs))
        known = self._known(nodes)
        what = signature(leaves, spec, nodes)
        compiled = known.get((what, held(self._captures)))
        if compiled is None:
            compiled, key = self._compiled(leaves, spec, what)
            self._reasons.append(self._reason(known, key))
            known[key] = compiled
        return compiled.run(leaves, args)

    def _known(self, nodes: list[OnMesh]) -> dict[Any, Compiled]:
        """The graphs there are: those that name a mesh are kept by what is laid out on it, and go when it goes."""
        homes = [node.home for node in nodes if node.home is not None]
        return homes[0].derived.graphs.setdefault(self, {}) if homes else self._alone

    def _compiled(self, leaves: list[Any], spec: tree.Spec, what: Signature) -> tuple[Compiled, Any]:
        """A graph for these arguments, and its key."""
        found = list(captures(self._fn))
        before = held(found)
        compiled = lower(self._fn, leaves, spec, self._options).compile(self._backend)
        # a function that counts its own traces would be traced each time
        pairs = zip(found, before, held(found), strict=True)
        self._captures = [capture for capture, old, new in pairs if old == new]
        return compiled, (what, held(self._captures))

    def _reason(self, known: dict[Any, Compiled], key: tuple[Signature, Any]) -> str:
        if not self._reasons:
            return "traced for the first call"
        if not known:
            return "traced again: for another plan, or on another mesh"
        first = next(iter(known))
        words = changed(first[1], key[1]) if first[0] == key[0] else difference(first[0], key[0])
        return f"traced again: {words}"


def _check_outermost() -> None:
    if func_levels.inside():
        raise TypeError(
            "jit: a jitted function cannot run inside torch.func.grad, jvp or vmap, which would not see through its "
            "graph: jit the outermost function, as in jit(torch.func.grad(fn))"
        )


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

    It is traced again for arguments of another structure, shape, stride, dtype, device, mesh or rank, or with another
    value that is no tensor; for another state of torch (autocast, default dtype and device, grad mode, deterministic
    algorithms, precision of products, kernels of attention); and when a number, string or function changes that it
    reads from a closure, a global or a default; `.explain()` says why. `donate` hands the first argument over: what
    comes out first, of the same structure, is written to its memory. `backend` is one of torch.compile's. Gathers start
    one unit ahead, or as many as `in_flight` bytes allow. With a `budget` (bytes) cheap values are computed again
    instead of kept, until the peak is no more than that, if that can be; `recompute` says of a node (of torch.fx)
    whether it is cheap, by default what is a pass over memory is. Collectives of one kind that follow each other travel
    together up to `bucket` bytes.
    Not differentiable from outside.

    Raises TraceError for what depends on the value of a tensor, uses one that is no argument, changes its arguments,
    seeds or draws from a generator of its own, makes sparse tensors, or gives back what is no tensor, number, string or
    None; TypeError inside torch.func's transforms, and for arguments that cannot be compared with the next call's.

    >>> jit(lambda x: {"y": 2 * x}, backend="eager")(torch.tensor(1.0))
    {'y': tensor(2.)}

    Source: jax.jit; SimpleFSDP (Zhang et al., 2024) for the whole step as one graph.
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"jit: {wrong('fn', fn, 'a function of trees: a step, a loss, a gradient')}")
    check_flags(**{"jit: donate": donate})
    if not isinstance(backend, str):
        raise TypeError(f"jit: {wrong('backend', backend, 'the name of a backend of torch.compile')}")
    check_whole("jit: in_flight", in_flight, least=0, what="a number of bytes")
    check_whole("jit: bucket", bucket, least=0, what="a number of bytes")
    if budget is not None:
        check_whole("jit: budget", budget, 0, what="None or a number of bytes")
    if not callable(recompute):
        raise TypeError(f"jit: {wrong('recompute', recompute, 'a function of a node')}")
    return Jitted(fn, backend, Options(donate, in_flight, budget, recompute, bucket))
