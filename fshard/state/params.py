"""State dicts of sharded parameters: whole tensors or DTensors by dotted name, read and written unit by unit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.consensus import check_same, together
from ..comm.mesh import AnyMesh, num_ranks, rank_in
from ..core.arguments import check_flags, check_whole, expect
from ..core.differences import Form, Wanted, equal_values, name_differences, unfit
from ..layout.pieces import device_of, pieces
from ..layout.row import Row
from ..plan.plan import Slot
from ..sharding.sharded import Sharded, leaves_of_unit
from . import dtensors as torch_sharded
from .initial import filled
from .names import Rename, renamed


def state_dict(x: Sharded, rank: int | None = None, dtensors: bool = False) -> dict[str, Tensor]:
    """Return the whole leaves in host memory by their dotted names; one unit at a time is whole on the device.

    - `x`: parameters, or a subtree: names are paths in it
    - `rank`: only this rank of the mesh gets the leaves, other ranks an empty dict
    - `dtensors`: return DTensors on the plan's DeviceMesh, as FSDP2's `model.state_dict()`: `Shard(0)` along the axes
      over which the tree is cut, `Replicate` along the others. Chunks are copies on the shards' device

    Every rank must call this. Tied leaves are one tensor under each of their names. ValueError for one leaf, and for
    DTensors without a DeviceMesh. Dual: `load_state_dict`.

    >>> plan = make_plan({"a": {"w": torch.ones(2)}})
    >>> state_dict(shard_params({"a": {"w": torch.ones(2)}}, plan))
    {'a.w': tensor([1., 1.])}
    """
    expect_sharded("state_dict: x", x)
    check_named("state_dict", x)
    check_flags(dtensors=dtensors)
    mesh, names = x.plan.live_mesh(), x.view.by_name()
    wanted = {*names.values()}
    if rank is not None:
        check_whole("state_dict: rank", rank, least=0, below=num_ranks(mesh), what="a rank of the plan's mesh")
    if dtensors:
        torch_sharded.check_no_rank("state_dict", rank)
    on = torch_sharded.device_mesh(mesh, "state_dict: dtensors=True") if dtensors else None
    keeps = rank is None or rank_in(mesh) == rank
    result = dict[Slot, Tensor]()
    for row in rows_in_order(x):
        with torch.no_grad():
            leaves = leaves_of_unit(x, row.unit, row.kind)
        for slot in wanted.intersection(leaves) if keeps else ():
            if on is None:
                result[slot] = leaves[slot].to("cpu", copy=True)
            else:
                device = x.shard(row.unit, row.kind).device  # may be host memory
                result[slot] = torch_sharded.dtensor_of(leaves[slot].to(device), on, row.rule.over)
    return {name: result[slot] for name, slot in names.items() if slot in result}


def rows_in_order(x: Sharded) -> list[Row[Slot]]:
    """Return the rows that have leaves of `x`, in the order of use."""
    rows, slots = x.view.rows, {*x.view.by_name().values()}
    return [rows[place] for place in x.plan.rows if place in rows and not slots.isdisjoint(rows[place].leaves)]


def load_state_dict(
    x: Sharded, mapping: Mapping[str, Tensor], rename: Rename | None = None, src: int | None = None, strict: bool = True
) -> Sharded:
    """Return a `Sharded` like `x` with the values of `mapping`, tensors by dotted name; `x` is not changed.

    - `x`: the parameters of a whole plan
    - `mapping`: whole tensors, DTensors or ShardedTensors, moved to the device, and cast among floating or among
      complex dtypes. A mapping may read each tensor when asked for it. A tied leaf may have one of its names or all
    - `rename`: a function from a name to the plan's name, or a dict of the names that change; None leaves a name out
    - `src`: only this rank of the mesh passes (whole) tensors, other ranks an empty mapping
    - `strict=False`: leaves missing in the mapping keep the values of `x`, and unknown names are ignored; a mapping
      without known names is an error

    Every rank must call this. A rank reads all tensors, one unit at a time, and keeps its shards. ValueError lists
    every difference (missing or unknown names, shapes, dtypes, unequal tied leaves), on all ranks if one finds any.
    ValueError for a subtree. Dual: `state_dict`.

    >>> params = shard_params({"w": torch.ones(2)}, make_plan({"w": torch.ones(2)}))
    >>> gather_params(load_state_dict(params, {"module.w": torch.tensor([3.0, 4.0])}, {"module.w": "w"}))
    {'w': tensor([3., 4.])}
    """
    return load_with_buffers(x, {}, mapping, rename, src, strict)[0]


def load_with_buffers(
    x: Sharded,
    buffers: Mapping[str, Tensor],
    mapping: Mapping[str, Tensor],
    rename: Rename | None = None,
    src: int | None = None,
    strict: bool = True,
    paths: Mapping[str, str] | None = None,
) -> tuple[Sharded, dict[str, Tensor]]:
    """As `load_state_dict`, also for `buffers`, whole tensors by name; each stays on its buffer's device.

    `paths`: from names after `rename` to different names in the plan or in `buffers`.
    """
    expect_sharded("load_state_dict: x", x)
    mesh, device, slots = x.plan.live_mesh(), device_of(x), x.view.wanted()
    wanted = [*slots.values(), *(Wanted([name], Form(tuple(old.shape), old.dtype)) for name, old in buffers.items())]
    is_source = src is None or mesh is None or rank_in(mesh) == src

    def checked() -> _Source:
        check_whole_tree("load_state_dict", x)
        check_flags(strict=strict)
        if src is not None:
            check_whole("load_state_dict: src", src, least=0, below=num_ranks(mesh), what="a rank of the plan's mesh")
        return _checked_source(mapping, rename, wanted, src, strict, paths) if is_source else _Source({}, {}, "")

    source = together(mesh, checked)
    remedy = "Pass the same names, and whole tensors on all ranks or on none"
    check_same(mesh, source.described, "load_state_dict: mapping", remedy)
    is_there = torch.tensor([*map(source.has, wanted)], dtype=torch.uint8, device=x.plan.device)
    if src is not None and wanted:  # only rank `src` has the mapping
        is_there = primitives.from_rank(is_there, mesh, src, "load_state_dict")
    there = {leaf.names[0] for leaf, flag in zip(wanted, is_there.tolist(), strict=True) if flag}
    tied = [leaf for leaf in wanted if len(leaf.names) > 1]
    if tied:
        unequal = [text for leaf in tied for text in source.unequal(leaf, mesh)]
        together(mesh, partial(_raise_if_any, unequal))

    def read(leaf: Wanted) -> Tensor:
        like = torch.zeros((), dtype=leaf.form.dtype, device=device)
        if leaf.names[0] not in there:
            return like.expand(leaf.form.shape)
        value = source.read(leaf, mesh).to(like) if is_source else like.new_empty(leaf.form.shape)
        return value if src is None else primitives.from_rank(value, mesh, src, "load_state_dict")

    into = Sharded(x.view, [torch.zeros_like(row) for row in x.tensors])
    loaded = filled(into, lambda slot: read(slots[slot]))
    _keep([slot for slot, leaf in slots.items() if leaf.names[0] not in there], x, loaded)
    pairs = zip(wanted[len(slots) :], buffers.values(), strict=True)
    values = ((leaf.names[0], old, read(leaf) if leaf.names[0] in there else old) for leaf, old in pairs)
    return loaded, {name: x.to(old.device, copy=True) for name, old, x in values}


def _keep(absent: Collection[Slot], x: Sharded, into: Sharded) -> None:
    absent_paths, layout = {slot.path for slot in absent}, x.layout
    for (number, new), (_, old) in zip(pieces(into), pieces(x), strict=True):
        if layout.leaves[number].path in absent_paths:
            new.copy_(old.detach())


class _Source(NamedTuple):
    mapping: Mapping[str, Tensor]
    names: Mapping[str, str]
    described: str  # must be equal on all ranks

    def has(self, leaf: Wanted) -> bool:
        return any(name in self.names for name in leaf.names)

    def get(self, name: str) -> Tensor:
        return self.mapping[self.names[name]]

    def read(self, leaf: Wanted, mesh: AnyMesh) -> Tensor:
        name = next(filter(self.names.__contains__, leaf.names))
        return torch_sharded.whole_tensor(self.get(name), mesh, "state dict")

    def unequal(self, leaf: Wanted, mesh: AnyMesh) -> Iterator[str]:
        """Yield the unequal names of a tied leaf. Every rank must iterate to the end: this calls collectives."""
        first, *others = [name for name in leaf.names if name in self.names] or [""]
        for name in others:
            a, b = self.get(first), self.get(name)
            if a is b and not torch_sharded.is_sharded(a):
                continue
            label = f"load_state_dict: {name!r}"
            a, b = (torch_sharded.whole_tensor(x, mesh, label).to(leaf.form.dtype) for x in (a, b))
            if not equal_values(a, b):
                yield f"{name!r} and {first!r} are tied, but differ"


def _checked_source(
    mapping: Mapping[str, Tensor],
    rename: Rename | None,
    wanted: Sequence[Wanted],
    src: int | None,
    strict: bool,
    paths: Mapping[str, str] | None,
) -> _Source:
    expect("load_state_dict: mapping", mapping, isinstance(mapping, Mapping), "a dict of tensors by dotted name")
    new = renamed(mapping, rename)
    to_path = paths or {}
    names = {path: new[name] for path, name in renamed(new, lambda name: to_path.get(name, name)).items()}
    known, sharded = [(name, leaf.form) for leaf in wanted for name in leaf.names if name in names], list[str]()
    is_partial = not strict and (known or not names)
    errors = [] if is_partial else [*name_differences([leaf.names for leaf in wanted], names)]
    for name, form in known:
        value = mapping[names[name]]  # one tensor at a time: a mapping may read it from a file
        errors += filter(None, [unfit(name, form, value)])
        sharded += [f"{name!r}: {torch_sharded.sharding(value)}"] if torch_sharded.is_sharded(value) else []
    if sharded and src is not None:
        errors.append(f"{sharded[0]}, which rank {src} alone cannot make whole: leave src out")
    _raise_if_any(errors)
    source = _Source(mapping, names, "")
    absent = [f"{leaf.names[0]!r} is not there" for leaf in wanted if src is None and not source.has(leaf)]
    return source._replace(described="\n".join([*sharded, *absent]))


def _raise_if_any(errors: Sequence[str]) -> None:
    if errors:
        raise ValueError("load_state_dict: " + "; ".join(errors))


def expect_sharded(argument: str, x: object) -> None:
    expect(argument, x, isinstance(x, Sharded), "a Sharded", "fshard.shard_params and init_params make them")


def check_named(name: str, x: Sharded) -> None:
    if x.view.spec.is_leaf() and x.plan.spec != x.view.spec:
        raise ValueError(
            f"{name}: expected a tree, got one leaf, without a name: give {{name: leaf}}, or gather_params"
        )


def check_whole_tree(name: str, x: Sharded) -> None:
    if x.view.spec != x.plan.spec:
        raise ValueError(
            f"{name}: expected the parameters of a whole plan, got a subtree of {len(x.view.slots())} leaves: load the "
            "subtree's own plan (shard_params), and put the result into the whole with .replace"
        )
