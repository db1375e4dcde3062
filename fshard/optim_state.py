"""Optimizer state in and out: whole, by leaf path, on all ranks or on one; torch's own formats; other partitions.

A whole state is a dict of tensors, by the path of the state's field and of the leaf: {"count": ..., "mu.head.w": ...}.
It says nothing of ranks, plans or partitions, so it is read into any other: `gather_state` and `shard_state` are each
other's inverse, and so are `state_dict` and `load_state_dict`, in torch.optim's format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import comm, tree
from .move import collect, on_rank
from .parts import EVERYONE, Layout, Parts, Span, layout_of, pick, pieces, typed

_CHUNK = 1 << 24  # elements on their way at a time

# What torch.optim calls the fields of our states; those not here have its names.
_TORCH = {
    "count": "step",
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "nu_max": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
}


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _world(state: Any) -> tuple[comm.Mesh, comm.Axes]:
    """The mesh a state is cut over, and all its axes."""
    mesh = next((x.layout.mesh for x in tree.nodes(state, Parts) if x.layout.mesh is not None), None)
    return mesh, tuple(comm.axis_sizes(mesh))


def _along(layout: Layout, rank: int) -> int:
    """The number along a layout's axes of a rank of the mesh."""
    sizes = comm.axis_sizes(layout.mesh)
    digits = dict[str, int]()
    for axis in reversed(sizes):
        rank, digits[axis] = divmod(rank, sizes[axis])
    number = 0
    for axis in layout.axes:
        number = number * sizes[axis] + digits[axis]
    return number


def _chunks(layout: Layout) -> Iterator[list[int]]:
    """The leaves, a few at a time."""
    chunk, numel = list[int](), 0
    for number in layout.numbers:
        chunk.append(number)
        numel += layout.leaves[number].numel
        if numel >= _CHUNK:
            yield chunk
            chunk, numel = [], 0
    if chunk:
        yield chunk


def gather_state(state: Any, rank: int | None = None) -> dict[str, Tensor]:
    """An optimizer's whole state, by field and leaf path: on every rank, or on one in host memory; the others get {}.

    To one rank the leaves travel a few at a time, and no device holds more than those. Every rank must call it. Dual:
    `shard_state`.

    >>> params = {"w": torch.ones(2)}
    >>> gather_state(sgd(0.1, momentum=0.9).init(params))
    {'count': tensor(0.), 'momentum.w': tensor([0., 0.])}
    """
    mesh, axes = _world(state)
    mine = rank is None or rank == comm.coordinate(mesh, axes)
    found: dict[str, Tensor] = {}
    for path, node in tree.paths_to(state, Parts):
        leaves = _whole_leaves(node, rank) if isinstance(node, Parts) else [("", node)]
        found.update((_joined(path, name), x if rank is None else x.cpu()) for name, x in leaves)
    return found if mine else {}


def _whole_leaves(x: Parts, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    layout = x.layout
    for numbers in _chunks(layout):
        part = layout.pick(numbers)
        target = on_rank(part, layout.mesh, layout.axes, EVERYONE if rank is None else _along(layout, rank))
        whole = collect(pick(x, part), target, "optimizer state")
        yield from ((layout.leaves[s.leaf].path, row) for s, row in zip(whole.layout.mine, whole.tensors, strict=True))


def shard_state(whole: Mapping[str, Tensor], like: Any, src: int | None = None) -> Any:
    """A whole state in the partition of `like`, a state of the same optimizer. Dual: `gather_state`.

    `like`, made by `init` say, may be of any plan, partition and number of ranks. Every rank passes the whole state, or
    with `src` that rank of the mesh alone, and all must call it. ValueError names what is missing or of another shape.

    >>> tx = sgd(0.1, momentum=0.9)
    >>> shard_state({"count": torch.tensor(3.0), "momentum.w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}))
    SgdState(count=tensor(3.), momentum={'w': tensor([1., 1.])})
    """
    mesh, axes = _world(like)
    held = src is None or src == comm.coordinate(mesh, axes)
    if held:
        _check(whole, like)
    made = []
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            made.append(_cut(whole, path, node, src))
        else:
            value = whole[path].to(node) if held else node
            made.append(value.clone() if src is None else _broadcast(value, mesh, src))
    return tree.put_tops(like, Parts, made)


def _check(whole: Mapping[str, Tensor], like: Any) -> None:
    for key, shape in _shapes(like):
        if key not in whole:
            raise ValueError(f"shard_state: the state lacks {key!r}; it has {list(whole)[:6]} and so on")
        if tuple(whole[key].shape) != shape:
            raise ValueError(f"shard_state: {key!r}: expected shape {list(shape)}, got {list(whole[key].shape)}")


def _shapes(like: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            leaves = [node.layout.leaves[n] for n in node.layout.numbers]
            yield from ((_joined(path, leaf.path), leaf.shape) for leaf in leaves)
        else:
            yield path, tuple(node.shape)


def _cut(whole: Mapping[str, Tensor], path: str, like: Parts, src: int | None) -> Any:
    """A tree of the state, leaf by leaf."""
    out, layout = tree.map(torch.zeros_like, like), typed(like)
    mesh, _ = _world(like)
    by_leaf: dict[int, list[tuple[Span, Tensor]]] = {n: [] for n in layout.numbers}
    for span, (number, piece) in zip(layout.mine, pieces(out), strict=True):
        by_leaf[number].append((span, piece))
    for number in layout.numbers:
        leaf, key = layout.leaves[number], _joined(path, layout.leaves[number].path)
        if src is None:
            value = whole[key]
        else:
            device = comm.mesh_device(mesh)
            empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            value = _broadcast(whole[key].to(empty) if key in whole else empty, mesh, src)
        for span, piece in by_leaf[number]:
            piece.copy_(value.reshape(-1)[span.begin : span.begin + span.numel].view(piece.shape))
    return out


def _broadcast(x: Tensor, mesh: comm.Mesh, src: int) -> Tensor:
    sizes = comm.axis_sizes(mesh)
    for axis in reversed(sizes):
        src, coordinate = divmod(src, sizes[axis])
        x = comm.broadcast(x, comm.along(mesh, axis), coordinate, "optimizer state").wait()
    return x


class _Field(NamedTuple):
    """A tensor of a state: its key, the state it belongs to, its name there, and its leaf, None for a scalar."""

    key: str
    parent: str
    name: str
    leaf: str | None


def _fields(like: Any, leaves: Sequence[str]) -> list[_Field]:
    known, found = set(leaves), []
    for key, _ in _shapes(like):
        names = key.split(".")
        end = next((i for i in range(1, len(names) + 1) if ".".join(names[i:]) in known), None)
        leaf = None if end is None else ".".join(names[end:])
        *parent, name = names[:end]
        found.append(_Field(key, ".".join(p for p in parent if p not in ("tensors", "scalars")), name, leaf))
    return found


def _groups(fields: Sequence[_Field], leaves: Sequence[str]) -> dict[str, list[str]]:
    """The leaves of every state that has any, each in the order of use: torch's parameter groups."""
    held: dict[str, set[str]] = {}
    for field in fields:
        if field.leaf is not None:
            held.setdefault(field.parent, set()).add(field.leaf)
    return {parent: [leaf for leaf in leaves if leaf in some] for parent, some in held.items()}


def _paths(params: Any) -> list[str]:
    layout = layout_of(params)
    return [layout.leaves[n].path for n in layout.numbers]


def state_dict(
    state: Any, params: Any, key: str = "path", rank: int | None = None, groups: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A state in torch.optim's format, leaves by path (as FSDP keys it) or by "index" (as DDP and ZeRO do).

    A parameter group for every label of `by_label`, in order; `groups` adds to each what torch is to find there (its
    hyper-parameters). On every rank, or on one. What is no tensor of a leaf or of a group is left out. Dual:
    `load_state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> state_dict(adamw(0.1).init(params), params)["state"]
    {'w': {'step': tensor(0.), 'exp_avg': tensor([0.]), 'exp_avg_sq': tensor([0.])}}
    """
    if key not in ("path", "index"):
        raise ValueError(f"state_dict: key={key!r}: expected 'path' or 'index'")
    whole, leaves = gather_state(state, rank), _paths(params)
    if not whole:
        return {}
    fields = _fields(state, leaves)
    entries: dict[str, dict[str, Tensor]] = {}
    by_parent = _groups(fields, leaves)
    for field in fields:
        for leaf in by_parent.get(field.parent, []) if field.leaf is None else [field.leaf]:
            entries.setdefault(leaf, {})[_TORCH.get(field.name, field.name)] = whole[field.key]
    order = [leaf for some in by_parent.values() for leaf in some]
    names: dict[str, Any] = {leaf: leaf if key == "path" else i for i, leaf in enumerate(order)}
    more = [*groups, *[{}] * len(by_parent)]
    pairs = zip(more, by_parent.values(), strict=False)
    return {
        "state": {names[leaf]: entries[leaf] for leaf in order},
        "param_groups": [{**settings, "params": [names[leaf] for leaf in some]} for settings, some in pairs],
    }


def load_state_dict(
    saved: Mapping[str, Any], like: Any, params: Any, order: Sequence[str] | None = None, src: int | None = None
) -> Any:
    """torch.optim's format (of an optimizer, DDP, ZeroRedundancyOptimizer or FSDP) in the partition of `like`.

    Leaves by path, or by index: `order` has the paths in the order the torch optimizer was given its parameters in, by
    default group after group in the order of use. What torch does not keep stays as in `like`. `src` as for
    `shard_state`. ValueError names a leaf, or what a leaf lacks. Dual: `state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> state = adamw(0.1).init(params)
    >>> load_state_dict(state_dict(state, params), state, params)
    AdamState(count=tensor(0.), mu={'w': tensor([0.])}, nu={'w': tensor([0.])})
    """
    if not saved and src is not None:
        return shard_state({}, like, src)
    leaves = _paths(params)
    fields = _fields(like, leaves)
    by_parent = _groups(fields, leaves)
    entries = _by_path(saved, order or [leaf for some in by_parent.values() for leaf in some])
    kept = {path: node for path, node in tree.paths_to(like, Parts) if not isinstance(node, Parts)}
    whole: dict[str, Tensor] = {}
    for field in fields:
        holder = field.leaf or next(iter(by_parent.get(field.parent, [])), None)
        if holder is None:
            whole[field.key] = kept[field.key]
            continue
        name = _TORCH.get(field.name, field.name)
        if name not in entries.get(holder, {}):
            raise ValueError(
                f"load_state_dict: leaf {holder!r}: expected {name!r} in its state, there is "
                f"{', '.join(map(repr, entries.get(holder, {}))) or 'nothing'}"
            )
        whole[field.key] = torch.as_tensor(entries[holder][name])
    return shard_state(whole, like, src)


def _by_path(saved: Mapping[str, Any], order: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for key, entry in saved["state"].items():
        if isinstance(key, int) and key >= len(order):
            raise ValueError(f"load_state_dict: the state has a parameter number {key}, the tree {len(order)} leaves")
        found[order[key] if isinstance(key, int) else key] = entry
    if unknown := [path for path in found if path not in order]:
        raise ValueError(f"load_state_dict: the state has {unknown[0]!r}, which is no leaf of the tree: {order[:6]}")
    return found
