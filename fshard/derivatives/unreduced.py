"""Whole gradients, computed by a user's program on each rank, as the unreduced gradients of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

import torch

from ..core import tree
from ..core.differences import listed, unfit
from ..core.tree import Tree
from ..grad.grad import check_sharded, empty_grads
from ..layout.pieces import Unreduced
from ..plan.plan import check_plain
from ..sharding.sharded import Sharded, pack_shard


def unreduced(grads: Tree, params: Sharded) -> Unreduced:
    """Return this rank's own gradients of the whole `params`, for `reduce_grads` to sum over ranks.

    `grads` is a tree of whole tensors with the paths of the parameters, such as sums over this rank's samples.
    `reduce_grads` divides by no count. A frozen leaf is None or left out. Gradients of a tied leaf are summed over its
    paths; some paths may be None or left out. Values are copied unit by unit, and cast to the dtype of gradients.

    ValueError lists each missing, unknown or frozen leaf, and each wrong shape or dtype. ValueError if the plan splits
    leaves.

    >>> import fshard
    >>> params, x = shard_of({"w": torch.ones(2)}), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> per_sample = torch.func.vmap(torch.func.grad(lambda p, x: (p["w"] * x).sum()), (None, 0))
    >>> rows = per_sample(gather_params(params), x)["w"]
    >>> clipped = rows / rows.norm(dim=1, keepdim=True).clamp(min=1.0)
    >>> own = fshard.reduction.unreduced({"w": clipped.sum(0)}, params)
    >>> gather_params(reduce_grads(own))
    {'w': tensor([0.9000, 1.2000])}

    Source of the example: Abadi et al., Deep learning with differential privacy, 2016.
    """
    plan, names = check_sharded(params).plan, params.trainable.view.names()
    check_plain("grads", grads)
    if axes := plan.splits(range(len(plan.kinds))):
        raise ValueError(
            f"unreduced: params: leaves are split over {axes[0]!r}: whether its ranks have equal gradients of the "
            "other leaves, or summands, cannot be told. Take them with value_and_grad(loss, reduce=False)"
        )
    by_name = dict(tree.paths_to(grads, torch.Tensor))
    if errors := [*_leaf_differences(params, by_name)]:
        raise ValueError("unreduced: " + "; ".join(errors))
    local = empty_grads(params, (), local=True)  # (n,) for each trainable kind
    for place, row in local.view.rows.items():
        out = local.shard(*place)
        given = {slot: [by_name[name] for name in names[slot] if name in by_name] for slot in row.leaves}
        sums = {slot: reduce(torch.add, [x.to(out.dtype) for x in of_leaf]) for slot, of_leaf in given.items()}
        pack_shard(sums, plan, row, out)
    return Unreduced(local)


def _leaf_differences(params: Sharded, grads: Mapping[str, object]) -> Iterator[str]:
    wanted = params.trainable.view.wanted().values()
    known, trained = ({name for tied in x.view.names().values() for name in tied} for x in (params, params.trainable))
    if missing := [leaf.names[0] for leaf in wanted if not any(name in grads for name in leaf.names)]:
        yield f"{len(missing)} leaves have no gradient: {listed(missing)}. One that is 0 is zeros"
    if unknown := [name for name in grads if name not in known]:
        yield f"{len(unknown)} gradients are of no parameter: {listed(unknown)}"
    if frozen := [name for name in grads if name in known - trained]:
        yield f"{len(frozen)} gradients are of frozen leaves: {listed(frozen)}. Pass None, or nothing"
    for name, form in ((name, leaf.form) for leaf in wanted for name in leaf.names if name in grads):
        if difference := unfit(name, form, grads[name]):
            yield difference + ". Sum over the samples first" * (getattr(grads[name], "shape", ())[1:] == form.shape)
