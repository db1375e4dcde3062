"""ZeRO over whole parameters: an optimizer whose state is partitioned by rank, as a pure function.

Note [A step of ZeRO]
    Every rank has all parameters and a part of the optimizer's state. It updates its part of the parameters and gets
    the other parts from the other ranks. With partition="flat" the parts are equal intervals of flat buckets of leaves,
    laid out by a plan whose parameters are not sharded and whose state is; with "leaf" they are whole leaves.
    Local gradients are reduced straight into the part (ZeRO-2); reduced ones are only read there (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..comm.mesh import AnyMesh, Axes, axis_sizes
from ..core import tree
from ..core.arguments import check_whole, check_word
from ..layout.pieces import Parts
from ..optim.base import Transform, as_transform
from ..sharding.leaves import check_tensors, first_places
from ..sharding.partitions import axes_of
from .flat import flat_init, flat_step, flat_update
from .leaf import leaf_init, leaf_step, leaf_update

BUCKET = 1 << 22  # elements


def zero(
    tx: Any,
    mesh: AnyMesh = None,
    partition: str = "flat",
    grads: str = "reduced",
    *,
    over: str | Sequence[str] | None = None,
    bucket: int = BUCKET,
    block: int = 1,
) -> Transform:
    """`tx` over whole parameters, its state partitioned by rank: every rank updates a part, and gets the others'.

    `partition` is "flat" (equal intervals of buckets of about `bucket` elements, even to 16 bytes; for optimizers that
    act on elements, and for those of fshard.optim) or "leaf" (whole leaves, the largest first to the rank with least;
    for any optimizer). `grads` is "reduced" (the same on all ranks: ZeRO-1) or "local" (each rank's own, which are
    summed over the whole mesh straight into the part: ZeRO-2; an update is then skipped if `found_inf` is 1 on any
    rank). `over` names the axes that ranks are counted along: by
    default "shard", or all where the mesh has none; `block` is `make_plan`'s. `step` gives new whole parameters, and
    starts to gather a bucket as soon as it is updated; `update` gives whole updates. Every rank must call `init` and
    each step.

    Over `Sharded` parameters the state is partitioned already: nothing to wrap.

    >>> tx = zero(adamw(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> tx.step({"w": torch.ones(2)}, tx.init(params), params)[0]
    {'w': tensor([0.8990, 0.8990])}

    Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020).
    """
    check_word("zero: partition", partition, ("flat", "leaf"))
    check_word("zero: grads", grads, ("reduced", "local"))
    check_whole("zero: bucket", bucket, what="a number of elements")
    check_whole("zero: block", block, what="a number of elements")
    tx, axes, local = as_transform(tx), _axes(mesh, over), grads == "local"
    if partition == "flat":
        make, update, step = partial(flat_init, tx, mesh, axes, bucket, block), flat_update, flat_step
    else:
        make, update, step = partial(leaf_init, tx, mesh, axes), leaf_update, leaf_step
    fused = partial(step, tx, local)
    init, agreeing = partial(_checked_init, make), mesh if local else None
    return Transform(init, partial(update, tx, local), fused, labelled=tx.labelled, mesh=agreeing)


def _checked_init(make: Callable[[Any], Any], params: Any) -> Any:
    _check_params(params)
    return make(params)


def _axes(mesh: AnyMesh, over: str | Sequence[str] | None) -> Axes:
    sizes = axis_sizes(mesh)
    if over is None:
        return ("shard",) if "shard" in sizes else tuple(sizes)
    axes = axes_of("zero: over", over, sizes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"zero: over={over!r} must name each axis once")
    return axes


def _check_params(params: Any) -> None:
    if tree.nodes(params, Parts):
        raise TypeError(
            "zero: expected whole parameters, got sharded ones, whose state is partitioned already: use tx. Or got the "
            "leaves of one label: zero goes around by_label, masked and whole_leaves, as in zero(by_label(...), mesh)."
        )
    flat, spec = tree.flatten(params)
    if not flat:
        raise ValueError("zero: the tree of parameters is empty")
    devices: dict[torch.device, str] = {}
    paths = tree.paths(spec)
    check_tensors(flat, paths)
    for i, first in enumerate(first_places(flat, paths)):
        if i != first:
            raise ValueError(
                f"zero: leaves {paths[first]!r} and {paths[i]!r} are the same tensor, which would be updated twice: "
                "keep it once in the tree, and tie it in the loss"
            )
    for path, leaf in zip(paths, flat, strict=True):
        devices.setdefault(leaf.device, path)
    if len(devices) > 1:
        (a, at_a), (b, at_b), *_ = devices.items()
        raise ValueError(f"zero: leaves on several devices: {at_a!r} on {a}, {at_b!r} on {b}. Move them to one.")
