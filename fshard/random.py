"""Random numbers that differ along a mesh axis, although a step draws equal numbers on all ranks of the axis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from .comm.mesh import AnyMesh
from .comm.primitives import along
from .core.random import forked

__all__ = ["per"]


@contextmanager
def per(mesh: AnyMesh, axis: str) -> Iterator[None]:
    """In a block, draw different random numbers on each rank along `axis`, by the rank's number on the axis.

    A step draws equal numbers on ranks with equal batches (`make_plan(data=)`). Equal numbers are right for equal
    activations, and wrong for parts of an activation: if a sequence is split, each rank must draw its own mask. Draws
    after the block are equal again, and do not depend on draws inside it. If `mesh` is None, or the axis has one rank,
    the block changes nothing. In JAX, one folds `axis_index` into a key.

    The block affects torch's generators of the host and of the mesh's device, not generators of Python, numpy or your
    own. Raises ValueError if the mesh lacks the axis.

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
