"""Optimizer state in and out: whole, by leaf path, on all ranks or on one; torch's own formats; other partitions.

A whole state is a dict of tensors, by the path of the state's field and of the leaf: {"count": ..., "mu.head.w": ...}.
It says nothing of ranks, plans or partitions, so it is read into any other: `gather_state` and `shard_state` are each
other's inverse, and so are `state_dict` and `load_state_dict`, in torch.optim's format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.consensus import check_same, together
from ..comm.dtensors import device_mesh, dtensor_of, is_sharded, sharding, whole_tensor
from ..comm.mesh import AnyMesh, Axes, axis_sizes, coordinate, mesh_device, num_ranks
from ..core import tree
from ..core.arguments import check_flags, check_whole, check_word, wrong
from ..core.scalars import double
from ..core.tree import Tree
from ..layout.layout import EVERYONE, Layout, Span
from ..layout.pieces import Parts, layout_of, mesh_of, packed, pick, pieces, typed
from ..layout.reshard import collect, on_rank
from .labels import LabelState

_CHUNK = 1 << 24  # elements on their way at a time
_LABEL = "optimizer state"

# torch.optim's names for the fields of fshard's states, where they differ.
_TORCH = {
    "count": "step",
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "nu_max": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
}


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _world(state: Tree) -> tuple[AnyMesh, Axes]:
    """The mesh over which a state is sharded, and all its axes."""
    mesh = mesh_of(state)
    return mesh, tuple(axis_sizes(mesh))


def _along(layout: Layout, rank: int) -> int:
    """The number along a layout's axes of the rank that has number `rank` in the mesh."""
    sizes = axis_sizes(layout.mesh)
    digits = dict[str, int]()
    for axis in reversed(sizes):
        rank, digits[axis] = divmod(rank, sizes[axis])
    number = 0
    for axis in layout.axes:
        number = number * sizes[axis] + digits[axis]
    return number


def _chunks(layout: Layout) -> Iterator[list[int]]:
    """Yield the numbers of the leaves in chunks of about `_CHUNK` elements."""
    chunk, numel = list[int](), 0
    for number in layout.numbers:
        chunk.append(number)
        numel += layout.leaves[number].numel
        if numel >= _CHUNK:
            yield chunk
            chunk, numel = [], 0
    if chunk:
        yield chunk


def gather_state(state: Tree, rank: int | None = None) -> dict[str, Tensor]:
    """An optimizer's whole state, by field and leaf path: on every rank, or on one in host memory; the others get {}.

    To one rank the leaves travel a few at a time, and no device holds more than those. Every rank must call it. Dual:
    `shard_state`.

    >>> params = {"w": torch.ones(2)}
    >>> optim.state.gather_state(sgd(0.1, momentum=0.9).init(params))
    {'count': tensor(0.), 'momentum.w': tensor([0., 0.])}
    """
    _check_rank("gather_state: rank", state, rank)
    # copies, because the state they are taken from may be given away
    return _gathered(state, rank, lambda path, x: x.to(x.device if rank is None else "cpu", copy=True))


def _gathered(state: Tree, rank: int | None, keep: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """`keep(path of the leaf, whole tensor)` of every tensor of a state, a few leaves at a time; "" for no leaf."""
    whole: dict[str, Tensor] = {}
    for path, node in tree.paths_to(state, Parts):
        if not isinstance(node, Parts | Tensor):
            expected = "the state of an optimizer, tensors alone"
            raise TypeError(f"gather_state: {f'leaf {path!r} of ' if path else ''}{wrong('state', node, expected)}")
        leaves = _whole_leaves(node, rank) if isinstance(node, Parts) else [("", node)]
        whole.update((_joined(path, name), keep(name, x)) for name, x in leaves)
    return whole if _holds(state, rank) else {}


def _check_rank(name: str, state: Tree, rank: int | None) -> None:
    """Raise unless `rank` is None or a rank of the state's mesh; without a mesh any number at least 0 is taken."""
    mesh = mesh_of(state)
    if rank is not None:
        check_whole(name, rank, 0, torch.inf if mesh is None else num_ranks(mesh), "a rank of the state's mesh")


def _holds(state: Tree, rank: int | None) -> bool:
    """Whether this rank passes or receives the whole state; every rank does if the state has no mesh."""
    mesh, axes = _world(state)
    return rank is None or mesh is None or rank == coordinate(mesh, axes)


def _whole_leaves(x: Parts, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    layout = x.layout
    for numbers in _chunks(layout):
        part = layout.pick(numbers)
        target = on_rank(part, layout.mesh, layout.axes, EVERYONE if rank is None else _along(layout, rank))
        label = _LABEL if rank is None else f"{_LABEL} for rank {rank}"  # ranks compare it
        whole = collect(packed(pick(x, part)), target, label)
        yield from ((layout.leaves[s.leaf].path, row) for s, row in zip(whole.layout.mine, whole.tensors, strict=True))


def shard_state(whole: Mapping[str, Tensor], like: Tree, src: int | None = None) -> Tree:
    """A whole state in the partition of `like`, a state of the same optimizer. Dual: `gather_state`.

    `like`, made by `init` say, may be of any plan, partition and number of ranks. Every rank passes the whole state, or
    with `src` that rank of the mesh alone, and all must call it. ValueError names what is missing or of another shape.

    >>> like = sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
    >>> optim.state.shard_state({"count": torch.tensor(3.0), "momentum.w": torch.ones(2)}, like)
    SgdState(count=tensor(3.), momentum={'w': tensor([1., 1.])})
    """
    return _sharded(whole, like, src, frozenset())


def _sharded(whole: Mapping[str, Tensor], like: Tree, src: int | None, kept: Set[str]) -> Tree:
    """`shard_state`, except that the leaves of `Parts` with the keys `kept` stay as they are in `like`."""
    _check_rank("shard_state: src", like, src)
    mesh, _ = _world(like)
    has_whole = _holds(like, src)
    together(mesh, lambda: _check(whole, like, kept) if has_whole else None)
    nodes: list[Tree] = []
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            nodes.append(_cut(whole, path, node, src, kept))
        else:
            # on the other ranks `node` gives the shape and dtype to receive
            value = (whole_tensor(whole[path], mesh, f"{_LABEL}: {path!r}").to(node) if has_whole else node).clone()
            nodes.append(value if src is None else primitives.from_rank(value, mesh, src, _LABEL))
    return tree.put_tops(like, Parts, nodes)


def _check(whole: Mapping[str, Tensor], like: Tree, kept: Set[str]) -> None:
    """Raise ValueError unless the whole state has every tensor of `like` that is not kept, each of its shape."""
    for key, shape in ((key, shape) for key, shape in _shapes(like) if key not in kept):
        if key not in whole:
            raise ValueError(f"shard_state: the state lacks {key!r}; it has {list(whole)[:6]} and so on")
        if tuple(whole[key].shape) != shape:
            raise ValueError(f"shard_state: {key!r}: expected shape {list(shape)}, got {list(whole[key].shape)}")


def _shapes(like: Tree) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The key and the shape of every tensor of a whole state."""
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            leaves = [node.layout.leaves[n] for n in node.layout.numbers]
            yield from ((_joined(path, leaf.path), leaf.shape) for leaf in leaves)
        else:
            yield path, tuple(node.shape)


def _cut(whole: Mapping[str, Tensor], path: str, like: Parts, src: int | None, kept: Set[str]) -> Parts:
    """This rank's part of one tree of a whole state, in the partition of `like`, which keeps the leaves `kept`."""
    out, layout = tree.map(torch.zeros_like, like), typed(like)
    mesh, _ = _world(like)
    by_leaf: dict[int, list[tuple[Span, Tensor]]] = {n: [] for n in layout.numbers}
    for span, (number, piece), (_, old) in zip(layout.mine, pieces(out), pieces(like), strict=True):
        by_leaf[number].append((span, piece))
        if _joined(path, layout.leaves[number].path) in kept:
            piece.copy_(old)
    for number in layout.numbers:
        leaf, key = layout.leaves[number], _joined(path, layout.leaves[number].path)
        if key in kept:
            continue
        if src is None:
            value = whole_tensor(whole[key], mesh, f"{_LABEL}: {key!r}")
        else:
            empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=mesh_device(mesh))
            value = primitives.from_rank(whole[key].to(empty) if key in whole else empty, mesh, src, _LABEL)
        for span, piece in by_leaf[number]:  # elements [begin, begin + numel) of the flattened leaf
            piece.copy_(value.reshape(-1)[span.begin : span.begin + span.numel].view(piece.shape))
    return out


class _Field(NamedTuple):
    """A tensor of a state: its key in the whole state, its path without leaf and label, and its leaves."""

    key: str
    path: str
    leaves: list[str]
    lone: bool  # one tensor for all these leaves, as `count` is

    @property
    def hyperparam(self) -> str | None:
        """The name of a hyper-parameter of `with_hyperparams`, or None for any other field."""
        *parents, name = self.path.split(".")
        return name if parents[-1:] == ["hyperparams"] else None


def _leaf_names(x: Tree, leaves: list[str], spec: tree.Spec | None) -> list[str] | None:
    """The paths of the leaves to which the tensors of a part of the state belong, or None for what is no such tree.

    Such trees are `Parts`, dicts by leaf path, and trees of the parameters' structure.
    """
    if isinstance(x, Parts):
        return _paths(x.layout)
    if isinstance(x, dict) and x and x.keys() <= set(leaves):
        return [*x]
    return tree.paths(spec) if spec is not None and tree.flatten(x)[1] == spec else None


def _fields(state: Tree, leaves: list[str], spec: tree.Spec | None, key: str = "", path: str = "") -> Iterator[_Field]:
    """Every tensor of a state, with the leaves it belongs to: all of `leaves`, or those of one label."""
    nodes = tree.paths_to(state, lambda x: isinstance(x, LabelState) or _leaf_names(x, leaves, spec) is not None)
    for name, node in nodes:
        node_key, node_path = _joined(key, name), _joined(path, name)
        if isinstance(node, LabelState):
            for label, layout in node.layouts:
                label_key = _joined(node_key, "inner", str(label))
                yield from _fields(node.inner[label], _paths(layout), None, label_key, node_path)
            continue
        names = _leaf_names(node, leaves, spec)
        if names is None:
            yield _Field(node_key, node_path, leaves, lone=True)
        else:
            yield from (_Field(_joined(node_key, leaf), node_path, [leaf], lone=False) for leaf in names)


def _torch_names(fields: Sequence[_Field]) -> dict[tuple[str, str], _Field]:
    """The field of every leaf and name in torch's format. Where two have one name, the innermost keeps it."""
    named: dict[tuple[str, str], _Field] = {}
    with_own = {leaf for field in fields if not field.lone for leaf in field.leaves}
    for field in (field for field in fields if field.hyperparam is None):
        last = field.path.rpartition(".")[2]
        # a count is that of the leaves that have moments, and not of frozen ones
        for leaf in [leaf for leaf in field.leaves if leaf in with_own] or field.leaves:
            name = leaf, _TORCH.get(last, last)
            if name in named:
                named[leaf, named[name].path] = named[name]
            named[name] = field
    return named


def _label_sets(state: Tree) -> Iterator[set[str]]:
    for node in tree.nodes(state, LabelState):
        for label, layout in node.layouts:
            yield set(_paths(layout))
            yield from _label_sets(node.inner[label])


def _groups(state: Tree, fields: Sequence[_Field], leaves: Sequence[str]) -> list[list[str]]:
    """The leaves that have state, grouped by their labels: torch's parameter groups."""
    with_state, label_sets = {leaf for field in fields for leaf in field.leaves}, list(_label_sets(state))
    # leaves in the same label sets make a group; False sorts first, so groups are in the order of the labels
    labels = {leaf: tuple(leaf not in of_label for of_label in label_sets) for leaf in leaves if leaf in with_state}
    return [[leaf for leaf in labels if labels[leaf] == group] for group in sorted(set(labels.values()))]


def _paths(layout: Layout) -> list[str]:
    return [layout.leaves[n].path for n in layout.numbers]


def _known(state: Tree, params: Tree) -> tuple[list[_Field], list[list[str]]]:
    """The fields of a state and its parameter groups; ValueError for a state of other leaves than `params`."""
    leaves, spec = _paths(layout_of(params)), None if isinstance(params, Parts) else tree.flatten(params)[1]
    fields = list(_fields(state, leaves, spec))
    if strange := [leaf for field in fields for leaf in field.leaves if leaf not in leaves]:
        raise ValueError(f"the state has a leaf {strange[0]!r} which params have not: the order is (state, params)")
    return fields, _groups(state, fields, leaves)


def state_dict(
    state: Tree,
    params: Tree,
    key: str = "path",
    rank: int | None = None,
    groups: Sequence[Mapping[str, object]] = (),
    dtensors: bool = False,
) -> dict[str, Tree]:
    """A state in torch.optim's format, leaves by path (as FSDP keys it) or by "index" (as DDP and ZeRO do).

    A parameter group for every label of `by_label`, in order; `groups` adds to each what torch is to find there (its
    hyper-parameters; those of `with_hyperparams` are there already). Frozen leaves of `params` have a number and no
    state, as in torch; `params.trainable` has none. On every rank, or on one. With `dtensors=True` tensors of a leaf's
    shape are DTensors, cut as the parameters are, as FSDP2's optimizers have them. Dual: `load_state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> optim.state.state_dict(adamw(0.1).init(params), params)["state"]
    {'w': {'step': tensor(0.), 'exp_avg': tensor([0.]), 'exp_avg_sq': tensor([0.])}}
    """
    check_word("state_dict: key", key, ("path", "index"))
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"state_dict: {wrong('groups', groups, 'a list of dicts, one for each parameter group')}")
    check_flags(dtensors=dtensors)
    if dtensors and rank is not None:
        raise ValueError(f"state_dict: rank={rank}: expected None with dtensors=True: every rank has its chunks")
    fields, by_label = _known(state, params)
    whole = _gathered(state, None, _chunked(state, params)) if dtensors else gather_state(state, rank)
    if not _holds(state, rank):
        return {}
    entries: dict[str, dict[str, Tensor]] = {leaf: {} for group in by_label for leaf in group}
    for (leaf, name), field in _torch_names(fields).items():
        # one copy for each leaf, because torch updates `step` in place
        entries[leaf][name] = whole[field.key].clone() if field.lone else whole[field.key]
    names: dict[str, str | int] = {leaf: leaf if key == "path" else i for i, leaf in enumerate(entries)}
    param_groups = []
    for group, settings in zip(by_label, [*groups, *[{}] * len(by_label)], strict=False):
        hyperparams = {f.hyperparam: whole[f.key].item() for f in fields if f.hyperparam and group[0] in f.leaves}
        param_groups.append({**hyperparams, **settings, "params": [names[leaf] for leaf in group]})
    return {"state": {names[leaf]: entry for leaf, entry in entries.items() if entry}, "param_groups": param_groups}


def _chunked(state: Tree, params: Tree) -> Callable[[str, Tensor], Tensor]:
    """What makes DTensors of tensors of a leaf's shape, cut as that leaf is; other tensors are copied."""
    layout = layout_of(params)
    on = device_mesh(layout.mesh if layout.axes else _world(state)[0], "state_dict: dtensors=True")
    axes = {(leaf.path, leaf.shape): () if n in layout.shared else layout.axes for n, leaf in enumerate(layout.leaves)}

    def keep(path: str, x: Tensor) -> Tensor:
        over = axes.get((path, tuple(x.shape)))
        return x.clone() if over is None else dtensor_of(x, on, over)

    return keep


def load_state_dict(
    saved: Mapping[str, Tree],
    like: Tree,
    params: Tree,
    order: Sequence[str] | None = None,
    src: int | None = None,
    strict: bool = True,
) -> Tree:
    """torch.optim's format (of an optimizer, DDP, ZeroRedundancyOptimizer or FSDP) in the partition of `like`.

    Leaves by path, or by index: `order` has the paths in the order the torch optimizer was given its parameters in, by
    default group after group in the order of use. What torch does not keep stays as in `like`; with `strict=False` so
    does a leaf without a state, such as torch keeps none of before its first gradient. DTensors and ShardedTensors are
    made whole, one at a time: then every rank passes its own `saved`. `src` as for `shard_state`. ValueError names a
    leaf, or what a leaf lacks. Dual: `state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> state = adamw(0.1).init(params)
    >>> optim.state.load_state_dict(optim.state.state_dict(state, params), state, params)
    AdamState(count=tensor(0.), mu={'w': tensor([0.])}, nu={'w': tensor([0.])})
    """
    mesh, _ = _world(like)
    read = partial(_read, saved, like, params, order, src, strict)
    whole, untouched = together(mesh, read if _holds(like, src) else lambda: ({}, set()))
    if src is None:  # these determine which collectives follow
        lines = [f"{key!r}: {sharding(x)}" for key, x in whole.items() if is_sharded(x)]
        text = "\n".join([*lines, *(f"{key!r} keeps its state" for key in sorted(untouched))])
        digest = hashlib.sha256(text.encode()).hexdigest()
        check_same(mesh, digest, text, "load_state_dict: saved", "Pass the state of the same optimizer on all ranks")
    return _sharded(whole, like, src, _agreed_keys(untouched, like, src, strict))


def _read(
    saved: Mapping[str, Tree], like: Tree, params: Tree, order: Sequence[str] | None, src: int | None, strict: bool
) -> tuple[dict[str, Tensor], set[str]]:
    """A state in torch's format by the keys of a whole state, its tensors as they are; and the keys it lacks."""
    _check_saved(saved)
    fields, by_label = _known(like, params)
    order = order or [leaf for group in by_label for leaf in group]
    entries = _by_path(saved, order)
    hyperparams = {_path(key, order): group for group in saved.get("param_groups", ()) for key in group["params"]}
    whole = {path: node for path, node in tree.paths_to(like, Parts) if not isinstance(node, Parts)}
    untouched = set[str]()
    for (leaf, name), field in _torch_names(fields).items():
        entry = entries.get(leaf, {})
        if name in entry:
            whole[field.key] = entry[name] if isinstance(entry[name], Tensor) else double(entry[name])
            if src is not None and is_sharded(entry[name]):
                form = f"leaf {leaf!r}: {sharding(entry[name])}"
                raise ValueError(f"load_state_dict: {form}, which rank {src} alone cannot make whole: leave src out")
        elif not entry and not strict and not field.lone:
            untouched.add(field.key)
        elif not field.lone:
            names = ", ".join(map(repr, entry)) or "nothing"
            raise ValueError(
                f"load_state_dict: leaf {leaf!r}: expected {name!r} in its state, there is {names}. With strict=False "
                "leaves without any state keep the one they have"
            )
    for field in fields:
        group = hyperparams.get(field.leaves[0], {}) if field.leaves else {}
        if field.hyperparam in group:
            whole[field.key] = double(group[field.hyperparam])
    return whole, untouched


def _agreed_keys(keys: Set[str], like: Tree, src: int | None, strict: bool) -> Set[str]:
    """The keys of rank `src`, which alone knows them, on every rank; with `strict` there are none."""
    mesh, _ = _world(like)
    if src is None or mesh is None or strict:
        return keys
    flags = torch.tensor([key in keys for key, _ in _shapes(like)], dtype=torch.uint8, device=mesh_device(mesh))
    on_src = primitives.from_rank(flags, mesh, src, _LABEL).tolist()
    return {key for (key, _), flag in zip(_shapes(like), on_src, strict=True) if flag}


def _check_saved(saved: object) -> None:
    order = "The order is load_state_dict(saved, like, params)"
    if not isinstance(saved, Mapping):
        raise TypeError(f"load_state_dict: {wrong('saved', saved, 'a dict in the format of torch.optim', order)}")
    if not isinstance(saved.get("state"), Mapping):
        names = ", ".join(map(repr, saved)) or "nothing"
        raise ValueError(f"load_state_dict: saved: expected a dict with 'state', there is {names}. {order}")


def _path(key: str | int, order: Sequence[str]) -> str:
    """The path of a leaf from torch's key for it: the path itself, or the number of the parameter."""
    if isinstance(key, int) and key >= len(order):
        raise ValueError(f"load_state_dict: the state has a parameter number {key}, the tree {len(order)} leaves")
    return order[key] if isinstance(key, int) else key


def _by_path(saved: Mapping[str, Tree], order: Sequence[str]) -> dict[str, Mapping[str, Tree]]:
    """The entry of each parameter in torch's state dict, by leaf path. ValueError for a path not in `order`."""
    entries = {_path(key, order): entry for key, entry in saved["state"].items()}
    if unknown := [path for path in entries if path not in order]:
        raise ValueError(f"load_state_dict: the state has {unknown[0]!r}, which is no leaf of the tree: {order[:6]}")
    return entries
