"""Make sharded parameters unit by unit with a function of leaves: no rank ever has the whole tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.arguments import check_function, check_predicate, check_whole, expect, shown
from ..core.random import seeded_by
from ..plan.plan import Plan, Slot
from ..sharding.sharded import Sharded, empty_params, pack_shard

Initialize = Callable[[str, Tensor], Tensor]


def init_params(plan: Plan, fn: Initialize, seed: int = 0) -> Sharded:
    """Make sharded parameters: `fn(path, like)` returns the whole tensor of a leaf; each rank keeps its part.

    - `fn`: called unit by unit, once for a tied leaf. `like` is a meta tensor with the leaf's shape, and its dtype in
      storage
    - `seed`: torch's generators are seeded by (seed, path), so `fn` draws the same numbers on any number of ranks

    Results of `fn` are moved to `plan.device` and cast. One unit's leaves are whole in memory at a time.
    ValueError names a leaf to which `fn` gives another shape.

    >>> plan = make_plan({"w": torch.empty(2, 2, device="meta"), "b": torch.empty(2, device="meta")})
    >>> params = init_params(plan, lambda path, like: torch.full(like.shape, len(path)))
    >>> gather_params(params)["b"]
    tensor([1., 1.])
    """
    expect("plan", plan, isinstance(plan, Plan), "what fshard.make_plan gives", "The order is init_params(plan, fn).")
    check_function("init_params: fn", fn, "fn(path, like) -> tensor")
    check_predicate("init_params: fn", fn, "(path, like) -> tensor")
    check_whole("init_params: seed", seed, least=0)

    def made(slot: Slot) -> Tensor:
        like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        with seeded_by(seed, slot.path, plan.device), torch.no_grad():
            value = fn(slot.path, like)
        if not isinstance(value, Tensor) or value.shape != like.shape or value.is_meta:
            raise ValueError(
                f"init_params: leaf {slot.path!r}: expected a tensor {list(slot.shape)} with values, fn returned "
                + (f"{value.device.type} {list(value.shape)}" if isinstance(value, Tensor) else shown(value))
            )
        if not torch.can_cast(value.dtype, like.dtype):
            raise ValueError(f"init_params: leaf {slot.path!r}: expected {like.dtype}, fn returned {value.dtype}")
        return value

    return filled(empty_params(plan, plan.device), made)


def filled(into: Sharded, read: Callable[[Slot], Tensor]) -> Sharded:
    for place in into.plan.rows:
        if row := into.view.rows.get(place):
            # no variable keeps the leaves in memory while the next unit's are made
            pack_shard({slot: read(slot) for slot in row.leaves}, into.plan, row, into.shard(*place))
    return into
