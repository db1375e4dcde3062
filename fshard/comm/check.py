"""Ranks that do different things inside a call: an error on every one of them (Note [Lines] in `compare_calls.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import Generic, ParamSpec, TypeVar

from ..core import tree
from ..core.arguments import wrong
from ..core.tracing import is_tracing
from ..core.tree import Tree
from .announce import is_announcing
from .compare_calls import lines_of
from .mesh import AnyMesh, OnMesh, adapted

P = ParamSpec("P")
R = TypeVar("R")


class Checked(Generic[P, R]):
    """What `check` gives: call it like the function, `run`."""

    def __init__(self, run: Callable[P, R], mesh: AnyMesh | EllipsisType = ...):
        self.run, self._mesh = run, mesh

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `run(*args, **kwargs)`, with every collective compared between ranks."""
        call = partial(self.run, *args, **kwargs)
        if is_tracing() or is_announcing():  # a graph's collectives are announced when it runs
            return call()
        mesh = adapted(_mesh_of(args, kwargs) if self._mesh is ... else self._mesh)
        lines = None if mesh is None else mesh.once(lines_of)
        return call() if lines is None else lines.run(call)


def _mesh_of(*args: Tree) -> AnyMesh:
    """The mesh of the first argument that has one."""
    for node in tree.nodes(args, OnMesh):
        if node.home is not None:
            return node.home.live_mesh()
    raise TypeError(
        "check: expected a Sharded (or a TrainState) among the arguments, whose plan has the mesh, got none. "
        "Say which one: fshard.check(fn, mesh)"
    )


def check(fn: Callable[P, R], mesh: AnyMesh | EllipsisType = ...) -> Checked[P, R]:
    """Return `fn`, a step or any function, with every collective compared between ranks before it starts.

    A rank that calls something else, returns early or raises makes the call a MismatchError on every rank, which names
    it, what both ranks did and where in your code; so the call returns on all ranks or on none. The ranks are those of
    `mesh`, by default that of the first `Sharded` among the arguments; collectives over other meshes are not compared,
    and each one waits for all ranks of its axis to begin it. Check the outermost: `check(jit(step))`. On one device and
    on simulated ranks, which are always compared, nothing is added. With FSHARD_CHECK=1 in the environment every
    `train_step` and `jit` that is made is checked.

    Raises TypeError if there is no mesh and no `Sharded`.

    >>> check(evaluate(lambda w, x: (w * x).sum()))(shard_of(torch.ones(2)), torch.tensor([1.0, 2.0]))
    tensor(3.)
    """
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"check: {wrong('fn', fn, 'a step, or any function')}")
    if mesh is not ...:
        adapted(mesh)  # raises for what is no mesh here, and not at the first call
    return Checked(fn, mesh)


def is_wanted() -> bool:
    """Whether the environment asks for every step to be checked."""
    wanted = os.environ.get("FSHARD_CHECK", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"FSHARD_CHECK: expected 1 (check every step), 0 or nothing, got {wanted!r}")
    return wanted == "1"
