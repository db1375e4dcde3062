"""Random numbers that differ along an axis of the mesh, where a step draws the same on all of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from .comm.mesh import AnyMesh
from .comm.primitives import along
from .core.random import forked

__all__ = ["per"]


@contextmanager
def per(mesh: AnyMesh, axis: str) -> Iterator[None]:
    """A block in which random numbers differ between the ranks along `axis`: they depend on this rank's number there.

    A step draws the same numbers on ranks whose batches do not differ (`make_plan(data=)`), which is right for
    activations that are equal, and wrong for parts: of a sequence that is split, each rank must draw a mask of its own.
    What is drawn after the block is equal again, and depends on no number that was drawn in it. With mesh=None, or one
    rank along the axis, nothing changes. JAX folds `axis_index` into a key.

    Torch's generators of the host and of the mesh's device are meant, not those of Python, numpy, or your own. Raises
    ValueError for an axis that the mesh lacks.

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
    ranks = None if mesh is None else along(mesh, axis)
    with forked(ranks.rank, ranks.device) if ranks is not None and ranks.size > 1 else nullcontext():
        yield
