"""ZeRO over whole parameters: an optimizer whose state is partitioned across ranks, as a pure function.

Note [A step of ZeRO]
    Every rank has all parameters and a part of the optimizer's state. A rank updates its part of the parameters and
    gathers the other parts. With partition="flat" parts are shards of flat buckets of leaves, laid out by a plan with
    sharded state and whole parameters; with "leaf" parts are whole leaves. Local gradients are reduce-scattered, so
    each rank gets the sum for its part (ZeRO-2). If gradients are reduced already, each rank reads its part (ZeRO-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..comm.mesh import AnyMesh, Axes, axis_sizes, num_ranks
from ..core import func_levels, tree
from ..core.arguments import check_whole, check_word
from ..core.random import position
from ..core.tree import Tree
from ..layout.pieces import Parts, device_of
from ..plan.leaves import check_tensors, first_places
from ..plan.partitions import axes_of
from ..update.base import Transform, TransformLike, as_transform
from .flat import flat_init, flat_step, flat_update
from .leaf import ZeroState, detached_values, leaf_init, leaf_step, leaf_update

BUCKET = 1 << 24  # bytes: 4 Mi elements of float32


def zero(
    tx: TransformLike,
    mesh: AnyMesh = None,
    partition: str = "flat",
    grads: str = "reduced",
    *,
    over: str | Sequence[str] | None = None,
    bucket: int = BUCKET,
    block: int = 1,
) -> Transform:
    """Return `tx` as a transformation over whole parameters, with its state partitioned across the ranks of `mesh`.

    `step` returns new whole parameters, and starts the gather of a bucket as soon as the bucket is updated; `update`
    returns whole updates. Every rank must call `init` and each step or update.

    Arguments:

    - `partition`: "flat" cuts buckets of about `bucket` bytes into intervals, equal within 16 bytes; if an optimizer
      needs whole leaves, ranks send leaves back and forth. "leaf" assigns whole leaves, the largest first, to the rank
      with the fewest elements so far.
    - `grads`: "reduced" for gradients that are equal on all ranks (ZeRO-1). "local" for each rank's own gradients,
      summed over the whole mesh into each rank's part (ZeRO-2); if `found_inf` is 1 on a rank, all ranks skip the
      update.
    - `over`: the mesh axes to partition along; by default "shard", or all axes if the mesh has no such axis.
    - `bucket`: a number of bytes (a mean, if leaves have several dtypes), by default 16 MiB. A bucket ends with the
      leaf that fills it.
    - `block`: a number of elements, as in `make_plan`.

    Do not wrap an optimizer of `Sharded` parameters: its state is partitioned already, and `init` raises TypeError.

    >>> tx = zero(adamw(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> tx.step({"w": torch.ones(2)}, tx.init(params), params)[0]
    {'w': tensor([0.8990, 0.8990])}

    Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020).
    """
    check_word("zero: partition", partition, ("flat", "leaf"))
    check_word("zero: grads", grads, ("reduced", "local"))
    check_whole("zero: bucket", bucket, what="a number of bytes")
    check_whole("zero: block", block, what="a number of elements")
    inner, axes, local = _refusing_draws(as_transform(tx), mesh), _axes(mesh, over), grads == "local"
    make_state: Callable[[Tree], ZeroState]
    if partition == "flat":
        make_state, update, step = partial(flat_init, inner, mesh, axes, bucket, block), flat_update, flat_step
    else:
        make_state, update, step = partial(leaf_init, inner, mesh, axes), leaf_update, leaf_step
    return _OfModules(
        partial(_checked_init, make_state),
        partial(update, inner, local),
        fused=partial(step, inner, local),
        over="tree",
        labelled=inner.labelled,
        mesh=mesh if local else None,  # local gradients differ between ranks: ranks agree on skipping
        draws=False,
    )


def _refusing_draws(tx: Transform, mesh: AnyMesh) -> Transform:
    """Raise ValueError if updates on several ranks draw random numbers: ranks' copies would differ."""
    if not tx.draws or num_ranks(mesh) == 1:
        return tx

    def checked(update: Callable[..., tuple[Tree, Tree]]) -> Callable[..., tuple[Tree, Tree]]:
        def run(grads: Tree, *more: object, **extra: object) -> tuple[Tree, Tree]:
            device = device_of(grads)
            before = position(device)
            result = update(grads, *more, **extra)
            if position(device) != before:
                raise ValueError(
                    "zero: this transformation draws random numbers, which are torch's own on each rank: copies would "
                    "differ. Use fshard.train_step, whose random numbers come from its state (strategy='zero1')"
                )
            return result

        return run

    return tx.with_fields(update=checked(tx.update), fused=None if tx.fused is None else checked(tx.fused))


class _OfModules(Transform):
    """A transformation that accepts a module's nn.Parameters: `step` detaches them."""

    def step(self, grads: Tree, state: Tree, params: Tree, *how: Tree, **extra: Tree) -> tuple[Tree, Tree]:
        return super().step(grads, state, detached_values(params), *how, **extra)


def _checked_init(make: Callable[[Tree], ZeroState], params: Tree) -> ZeroState:
    if func_levels.inside():
        raise TypeError(
            "zero: init: expected a call outside of torch.func's transforms, as ranks compare parameters: make the "
            "state before, and give it to the function that is transformed"
        )
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


def _check_params(params: Tree) -> None:
    if tree.nodes(params, Parts):
        raise TypeError(
            "zero: expected whole parameters, got sharded ones, whose state is partitioned already: use tx. Or got the "
            "leaves of one label: zero goes around by_label, masked and whole_leaves, as in zero(by_label(...), mesh)."
        )
    flat, spec = tree.flatten(params)
    if not flat:
        raise ValueError("zero: the tree of parameters is empty")
    devices: dict[torch.device, str] = {}
    paths = tree.leaf_paths(spec)
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
        (device, path), (other, other_path), *_ = devices.items()
        raise ValueError(
            f"zero: leaves on several devices: {path!r} on {device}, {other_path!r} on {other}. Move them to one."
        )
