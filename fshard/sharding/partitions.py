"""The mesh axes over which parameters, gradients and optimizer state are partitioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..comm.mesh import Axes
from ..core.arguments import wrong


def partitions(sizes: dict[str, int], *overs: str | Sequence[str]) -> tuple[Axes, Axes, Axes]:
    """Return the axes of the three partitions, each of which must contain the axes of the one before (ValueError)."""
    result: list[Axes] = []
    before: Axes = ()
    for name, over in zip(("params_over", "grads_over", "state_over"), overs, strict=True):
        wanted = axes_of(name, over, sizes)
        if len(set(wanted)) < len(wanted) or not set(before) <= set(wanted):
            raise ValueError(
                f"{name}={over!r} must name each axis once and contain the axes {before} of the partition before it: "
                "what is sharded stays sharded from parameters to gradients to optimizer state"
            )
        before = before + tuple(axis for axis in wanted if axis not in before)
        result.append(before)
    return result[0], result[1], result[2]


def axes_of(name: str, over: object, sizes: Mapping[str, int]) -> Axes:
    """Return the axes that an argument (one name or several) names; on one device "shard" and "replicate" give ().

    Raises TypeError if `over` is neither a name nor several, ValueError for an axis that the mesh does not have.
    """
    names = (over,) if isinstance(over, str) else over
    if not isinstance(names, list | tuple) or not all(isinstance(axis, str) for axis in names):
        raise TypeError(wrong(name, over, "the name of an axis of the mesh, a tuple of names, or ()"))
    known = list(sizes) or ["shard", "replicate"]
    if unknown := [axis for axis in names if axis not in known]:
        where = "the mesh has no axis" if sizes else "one device has no axis"
        raise ValueError(
            f"{name}={over!r}: {where} {unknown[0]!r}, it has {', '.join(map(repr, known))}. "
            "Name one of those, or give init_device_mesh other mesh_dim_names."
        )
    return tuple(names) if sizes else ()
