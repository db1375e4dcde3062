"""Checked calls: if ranks call different collectives, every rank raises (Note [Lines] in `compare_calls.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import Generic, ParamSpec, TypeVar

from ..comm.announce import is_announcing
from ..comm.mesh import AnyMesh, OnMesh, adapted
from ..core import tree
from ..core.arguments import wrong
from ..core.tracing import is_tracing
from ..core.tree import Tree
from .compare_calls import lines_of

P = ParamSpec("P")
R = TypeVar("R")


class Checked(Generic[P, R]):
    """A function returned by `check`, with the signature of `run`."""

    def __init__(self, run: Callable[P, R], mesh: AnyMesh | EllipsisType = ...):
        self.run: Callable[P, R] = run
        self._mesh = mesh

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        call = partial(self.run, *args, **kwargs)
        if is_tracing() or is_announcing():  # a graph announces its collectives when it runs
            return call()
        mesh = adapted(_mesh_of(args, kwargs) if self._mesh is ... else self._mesh)
        lines = None if mesh is None else mesh.once(lines_of)
        return call() if lines is None else lines.run(call)


def _mesh_of(*args: Tree) -> AnyMesh:
    for node in tree.nodes(args, OnMesh):
        if node.home is not None:
            return node.home.live_mesh()
    raise TypeError(
        "check: expected a Sharded (or a TrainState) among the arguments, whose plan has the mesh, got none. "
        "Say which one: fshard.check(fn, mesh)"
    )


def check(fn: Callable[P, R], mesh: AnyMesh | EllipsisType = ...) -> Checked[P, R]:
    """Return `fn` with every collective compared between ranks before the collective starts.

    If a rank calls another collective, returns early or raises, every rank raises a MismatchError with two ranks' calls
    and their lines in your code. So a call of `fn` returns on all ranks or on none. Each collective waits until all
    ranks of its axis begin the collective.

    - `fn`: a step or any function; `jit` goes inside: `check(jit(step))`.
    - `mesh`: the ranks; by default the mesh of the first `Sharded` among the arguments (TypeError without one).
      Collectives over other meshes are not compared.

    `check` adds nothing on one device, nor on simulated ranks: these always compare. With FSHARD_CHECK=1 in the
    environment, every function returned by `train_step` and `jit` is checked.

    >>> check(evaluate(lambda w, x: (w * x).sum()))(shard_of(torch.ones(2)), torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"check: {wrong('fn', fn, 'a step, or any function')}")
    if mesh is not ...:
        adapted(mesh)  # raises here, not at the first call
    return Checked(fn, mesh)


def is_wanted() -> bool:
    value = os.environ.get("FSHARD_CHECK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FSHARD_CHECK: expected 1 (check every step), 0 or nothing, got {value!r}")
    return value == "1"
