"""Random numbers that differ along an axis of the mesh, where a step draws the same on all of its ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from .comm.mesh import AnyMesh
from .comm.primitives import along
from .core.random import forked

__all__ = ["per"]


def per(mesh: AnyMesh, axis: str) -> AbstractContextManager[None]:
    """A block in which random numbers differ between the ranks along `axis`: they depend on this rank's number there.

    A step draws the same numbers on ranks whose batches do not differ (`make_plan(data=)`), which is right for
    activations that are equal, and wrong for parts: of a sequence that is split, each rank must draw a mask of its own.
    What is drawn after the block is equal again, and depends on no number that was drawn in it. With mesh=None, or one
    rank along the axis, nothing changes. JAX folds `axis_index` into a key.

    Raises ValueError for an axis that the mesh lacks.

    >>> from fshard.testing import simulate
    >>> def drawn(mesh):
    ...     torch.manual_seed(0)
    ...     with per(mesh, "tensor"):
    ...         inside = torch.rand(())
    ...     return inside.item(), torch.rand(()).item()
    >>> (a, after), (b, after_too) = simulate(drawn, tensor=2)
    >>> a == b, after == after_too
    (False, True)
    """
    if mesh is None or (ranks := along(mesh, axis)).size == 1:
        return nullcontext()
    return forked(ranks.rank, ranks.device)
