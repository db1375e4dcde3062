"""Sharded parameters made unit by unit, so that no rank ever holds the whole: from a function, or from a state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..comm.mesh import num_ranks
from ..core import tree
from ..core.arguments import check_function, check_whole, shown, wrong
from ..core.random import seeded_by
from .names import Form, form_difference, name_differences
from .plan import Plan, Slot
from .sharded import Sharded, cut, empty_params, gather_unit, pack

Initialize = Callable[[str, Tensor], Tensor]


def init_params(plan: Plan, fn: Initialize, seed: int = 0) -> Sharded:
    """Make sharded parameters: `fn(path, like)` returns the whole tensor of a leaf, of which each rank keeps its part.

    `like` is a meta tensor with the shape of the leaf and the dtype in which it is stored. `fn` is called for the
    leaves in the order of the plan, once for tied ones, under torch's generators seeded by (seed, path), so that it
    draws the same numbers on any number of ranks. What `fn` returns is moved to the device of the plan and cast. The
    leaves of one unit are in memory at the same time. ValueError for a tensor of another shape: it names the leaf.

    >>> plan = make_plan({"w": torch.empty(2, 2, device="meta"), "b": torch.empty(2, device="meta")})
    >>> params = init_params(plan, lambda path, like: torch.full(like.shape, len(path)))
    >>> gather_params(params)["b"]
    tensor([1., 1.])
    """
    if not isinstance(plan, Plan):
        raise TypeError(wrong("plan", plan, "what fshard.make_plan gives", "The order is init_params(plan, fn)."))
    check_function("init_params: fn", fn, "fn(path, like) -> tensor")
    check_whole("init_params: seed", seed, least=0)

    def made(slot: Slot) -> Tensor:
        like = torch.empty(slot.shape, dtype=plan.kinds[slot.kind].dtype, device="meta")
        with seeded_by(seed, slot.path, plan.device), torch.no_grad():
            value = fn(slot.path, like)
        if not isinstance(value, Tensor) or value.shape != like.shape or value.is_meta:
            raise ValueError(
                f"init_params: leaf {slot.path!r}: expected a tensor {list(slot.shape)} with values, fn returned "
                + (f"{value.device.type} {list(value.shape)}" if isinstance(value, Tensor) else shown(value))
            )
        return value

    return _filled(empty_params(plan, plan.device), made)


def _filled(into: Sharded, read: Callable[[Slot], Tensor]) -> Sharded:
    """Fill the rows of a whole tree, one unit and kind at a time."""
    for (unit, kind), slots in into.plan.places.items():
        if kind in into.view.kinds:
            leaves = {slot: read(slot) for slot in slots}
            pack(leaves, into.plan, unit, kind, into.view.over, into.piece(unit, kind))
    return into


def state_dict(x: Sharded, rank: int | None = None) -> dict[str, Tensor]:
    """Return the whole leaves in host memory by their dotted names; one unit at a time is whole on the device.

    With `rank` only that rank of the mesh receives them, and the others an empty dict; every rank must call it. Tied
    leaves are one tensor under each of their names. Dual: `load_state_dict`.

    >>> plan = make_plan({"a": {"w": torch.ones(2)}})
    >>> state_dict(shard_params({"a": {"w": torch.ones(2)}}, plan))
    {'a.w': tensor([1., 1.])}
    """
    _check_whole_tree("state_dict", x)
    plan, mesh = x.plan, x.plan.live_mesh()
    if rank is not None:
        check_whole("state_dict: rank", rank, least=0, below=num_ranks(mesh), what="a rank of the plan's mesh")
    keeps = rank is None or mesh is None or mesh.get_rank() == rank
    whole = dict[Slot, Tensor]()
    for (unit, kind), slots in plan.places.items():
        if kind in x.view.kinds:
            with torch.no_grad():
                leaves = cut(plan, gather_unit(x, unit, kind), unit, kind)
            if keeps:
                whole.update((slot, leaf.to("cpu", copy=True)) for slot, leaf in zip(slots, leaves, strict=True))
    names = zip(tree.paths(plan.spec), x.view.slots(), strict=True)
    return {name: whole[slot] for name, slot in names if slot in whole}


def load_state_dict(x: Sharded, mapping: Mapping[str, Tensor]) -> Sharded:
    """Return a `Sharded` like `x` with the values of `mapping`, whole tensors by dotted name; `x` is not changed.

    Each rank reads all names, one unit at a time, and keeps its part; a mapping may read a tensor when it is asked for
    it. Values are moved to the device and cast among floating dtypes. A tied leaf may be under one of its names or
    under all. ValueError lists every difference: names that are missing or unknown, shapes, dtypes, tied leaves that
    differ. Dual: `state_dict`.

    >>> params = shard_params({"w": torch.ones(2)}, make_plan({"w": torch.ones(2)}))
    >>> gather_params(load_state_dict(params, {"w": torch.tensor([3.0, 4.0])}))
    {'w': tensor([3., 4.])}
    """
    _check_whole_tree("load_state_dict", x)
    if not isinstance(mapping, Mapping):
        raise TypeError(f"load_state_dict: {wrong('mapping', mapping, 'a dict of tensors by dotted name')}")
    names = x.view.names()
    if differences := [*_differences(x.plan, names, mapping)]:
        raise ValueError("load_state_dict: " + "; ".join(differences))
    rows = [torch.zeros_like(row) for row in x.tensors]

    def read(slot: Slot) -> Tensor:
        return plain(mapping[next(name for name in names[slot] if name in mapping)])

    return _filled(Sharded(x.view, rows), read)


def _differences(plan: Plan, names: Mapping[Slot, Sequence[str]], mapping: Mapping[str, Tensor]) -> Iterator[str]:
    """Say how a mapping differs from what the leaves of a plan need."""
    yield from name_differences(names.values(), mapping)
    for slot, tied in names.items():
        form = Form(slot.shape, plan.kinds[slot.kind].dtype)
        given = [(name, mapping[name]) for name in tied if name in mapping]
        for name, value in given:
            if difference := form_difference(name, form, value):
                yield difference
            elif name != given[0][0] and not torch.equal(plain(value), plain(given[0][1])):
                yield f"{name!r} and {given[0][0]!r} are tied, but differ"


def plain(x: Tensor) -> Tensor:
    """Return a tensor without a graph; a DTensor whole, which is a collective that every rank must call."""
    return x.full_tensor().detach() if hasattr(x, "full_tensor") else x.detach()


def _check_whole_tree(name: str, x: object) -> None:
    if not isinstance(x, Sharded):
        raise TypeError(f"{name}: {wrong('x', x, 'a Sharded', 'fshard.shard_params and init_params make them')}")
    if x.view.spec != x.plan.spec:
        raise ValueError(
            f"{name}: expected the parameters of a whole plan, got a subtree of {len(x.view.slots())} leaves"
        )
