"""The state of an optimizer: whole, by leaf path, on all ranks or on one; in torch's formats; partitions; new leaves.

A whole state is a dict of tensors, by the path of the state's field and of the leaf: {"count": ..., "mu.head.w": ...}.
It says nothing of ranks, plans or partitions, so it is read into any other: `gather_state` and `shard_state` are each
other's inverse, and so are `state_dict` and `load_state_dict`, in torch.optim's format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.consensus import check_same, together
from ..comm.mesh import AnyMesh, axis_sizes, digits, mesh_device, num_ranks, number_of, rank_in
from ..core import tree
from ..core.arguments import check_flags, check_whole, check_word, wrong
from ..core.differences import Form, Wanted, differences, listed
from ..core.storage import as_bytes
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, device_of, layout_of, mesh_of, packed, pick, pieces, typed
from ..layout.row import Span
from ..update.base import TransformLike, as_transform
from ..update.transforms import LabelState
from ..whole.moves import collect, on_rank
from .dtensors import check_no_rank, device_mesh, dtensor_of, is_sharded, sharding, whole_tensor
from .torch_format import BEGUN, check_tensor, joined, known, read_saved

_CHUNK = 1 << 24  # elements on their way at a time
_LABEL = "optimizer state"
_ONE_FOR_EACH = (
    "A list or dict that a transformation makes of the leaves it is given has those of one rank: keep a tensor for "
    "each leaf in a tree (fshard.tree.map(torch.zeros_like, params)); what is of no leaf must be alike on all ranks"
)

_OTHERS = "it has other leaves of the state"  # of a rank that sees no wrong leaf


def _mesh(state: Tree, params: Tree = ()) -> AnyMesh:
    """The mesh of a state; if it has numbers alone, that of the labels' leaves or of the parameters; or None."""
    labels = (layout.mesh for node in tree.nodes(state, LabelState) for _, layout in node.layouts)
    return next((mesh for mesh in (mesh_of(state), *labels, mesh_of(params)) if mesh is not None), None)


def _along(layout: Layout, rank: int) -> int:
    """The number along a layout's axes of the rank that has number `rank` in the mesh."""
    sizes = axis_sizes(layout.mesh)
    at = dict(zip(sizes, digits(rank, [*sizes.values()]), strict=True))
    return number_of([at[axis] for axis in layout.axes], [sizes[axis] for axis in layout.axes])


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

    With `rank` that rank of the mesh alone receives it: leaves travel a few at a time, and no device holds more than
    those. Every rank must call it. A state of numbers alone (of `sgd` without momentum) names no mesh: every rank gets
    it. Dual: `shard_state`.

    >>> params = {"w": torch.ones(2)}
    >>> optim.state.gather_state(sgd(0.1, momentum=0.9).init(params))
    {'count': tensor(0.), 'momentum.w': tensor([0., 0.])}
    """
    _check_rank("gather_state: rank", _mesh(state), rank)
    # copies, because the state they are taken from may be given away
    return _gathered(state, _mesh(state), rank, partial(_copy, rank))


def _copy(rank: int | None, path: str, x: Tensor) -> Tensor:
    return x.to(x.device if rank is None else "cpu", copy=True)


def _gathered(state: Tree, mesh: AnyMesh, rank: int | None, keep: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """`keep(path of the leaf, whole tensor)` of every tensor of a state, a few leaves at a time; "" for no leaf."""
    whole: dict[str, Tensor] = {}
    nodes = tree.paths_to(state, Parts)
    together(mesh, lambda: _check_tensors(nodes), _OTHERS, TypeError)
    _check_plain(mesh, dict(nodes), "gather_state: state", _ONE_FOR_EACH)
    for path, node in nodes:
        leaves = _whole_leaves(node, rank) if isinstance(node, Parts) else [("", node)]
        whole.update((joined(path, name), keep(name, x)) for name, x in leaves)
    return whole if _holds(mesh, rank) else {}


def _check_tensors(nodes: Sequence[tuple[str, Tree]]) -> None:
    """Raise TypeError for a state that is not of tensors alone."""
    for path, node in nodes:
        if isinstance(node, Parts):
            pieces(node)
        elif not isinstance(node, Tensor):
            expected = "the state of an optimizer, tensors alone"
            raise TypeError(f"gather_state: {f'leaf {path!r} of ' if path else ''}{wrong('state', node, expected)}")


def _check_rank(name: str, mesh: AnyMesh, rank: int | None) -> None:
    """Raise unless `rank` is None or a rank of the mesh; without a mesh any number at least 0 is taken."""
    if rank is not None:
        check_whole(name, rank, 0, torch.inf if mesh is None else num_ranks(mesh), "a rank of the state's mesh")


def _holds(mesh: AnyMesh, rank: int | None) -> bool:
    """Whether this rank passes or receives the whole state; every rank does if there is no mesh."""
    return rank is None or mesh is None or rank == rank_in(mesh)


def _whole_leaves(x: Parts, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    layout = x.layout
    for numbers in _chunks(layout):
        part = layout.pick(numbers)
        target = on_rank(part, None if rank is None else _along(layout, rank))
        label = _LABEL if rank is None else f"{_LABEL} for rank {rank}"  # ranks compare it
        whole = collect(packed(pick(x, part)), target, label)
        yield from ((layout.leaves[number].path, leaf) for number, leaf in pieces(whole))


def shard_state(whole: Mapping[str, Tensor], like: Tree, src: int | None = None) -> Tree:
    """A whole state in the partition of `like`, a state of the same optimizer. Dual: `gather_state`.

    `like`, made by `init` say, may be of any plan, partition and number of ranks. Every rank passes the whole state, or
    with `src` that rank of the mesh alone (the others None), and all must call it; a state of numbers alone names no
    mesh, and takes no `src`. ValueError names what is missing or of another shape, MismatchError a count that differs.

    >>> like = sgd(0.1, momentum=0.9).init({"w": torch.zeros(2)})
    >>> optim.state.shard_state({"count": torch.tensor(3.0), "momentum.w": torch.ones(2)}, like)
    SgdState(count=tensor(3.), momentum={'w': tensor([1., 1.])})
    """
    mesh = _mesh(like)
    _agree_on_source("shard_state", mesh, src)
    numbers = tree.leaves(like)
    if src is not None and mesh is None and numbers and not any(x.dim() for x in numbers):
        raise ValueError(
            f"shard_state: src={src}: expected None, because this state has numbers alone and names no mesh on which "
            "to send them. Pass the whole state on every rank"
        )
    return _sharded(whole, like, mesh, src, frozenset())


def _agree_on_source(name: str, mesh: AnyMesh, src: int | None, strict: bool = True) -> None:
    """Raise on every rank if `src` is no rank of the mesh, or if ranks differ in what determines the collectives."""
    together(mesh, partial(_check_rank, f"{name}: src", mesh, src))
    text = f"src={src}" + ", strict=False" * (not strict)
    check_same(mesh, text, f"{name}: src", "Pass the same src on all ranks")


def _sharded(whole: Mapping[str, Tensor] | None, like: Tree, mesh: AnyMesh, src: int | None, kept: Set[str]) -> Tree:
    """`shard_state`, except that the leaves of `Parts` with the keys `kept` stay as they are in `like`."""
    has_whole = _holds(mesh, src)
    together(mesh, lambda: _check(whole, like, kept) if has_whole else None)
    whole = whole if has_whole and whole is not None else {}
    nodes: list[Tree] = []
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            nodes.append(_cut(whole, path, node, mesh, src, kept))
        else:
            # on the other ranks `node` gives the shape and dtype to receive
            value = (whole_tensor(whole[path], mesh, f"{_LABEL}: {path!r}").to(node) if has_whole else node).clone()
            nodes.append(value if src is None else primitives.from_rank(value, mesh, src, _LABEL))
    if src is None:
        known = {path: x for (path, _), x in zip(tree.paths_to(like, Parts), nodes, strict=True)}
        _check_plain(mesh, known, "the whole state", "Pass the same state on all ranks, or with src on one alone")
    return tree.put_tops(like, Parts, nodes)


def _check_plain(mesh: AnyMesh, nodes: Mapping[str, Tree], what: str, remedy: str) -> None:
    """Raise MismatchError on every rank if a tensor that each has whole, such as a count, differs between ranks."""
    if mesh is None or num_ranks(mesh) == 1:
        return
    plain = {path: x for path, x in nodes.items() if isinstance(x, Tensor)}
    forms = "\n".join(f"{path!r} of shape {list(x.shape)} and {x.dtype}" for path, x in plain.items())
    check_same(mesh, forms, what, remedy)
    check_same(mesh, "\n".join(f"{path!r}: {_exactly(x)}" for path, x in plain.items()), what, remedy)


def _exactly(x: Tensor) -> str:
    """The number, or what stands for all the bits of a tensor."""
    return str(x.item()) if not x.dim() else hashlib.sha256(bytes(as_bytes(x).cpu().tolist())).hexdigest()


def _check(whole: Mapping[str, Tensor] | None, like: Tree, kept: Set[str]) -> None:
    """Raise ValueError unless the whole state has every tensor of `like` that is not kept, of its shape and kind."""
    if not isinstance(whole, Mapping):
        order = "The order is shard_state(whole, like)"
        raise TypeError(f"shard_state: {wrong('whole', whole, 'a dict of tensors, as gather_state returns', order)}")
    forms = {key: form for key, form in _forms(like) if key not in kept}
    given = {key: whole[key] for key in forms if key in whole}
    for key, x in given.items():
        check_tensor(f"shard_state: {key!r}", x, "a tensor")
        # a count may be an integer in one and a float in the other: it is the same number
        if not forms[key].shape and not x.is_complex() and x.dtype != torch.bool:
            forms[key] = Form((), x.dtype)
    if errors := [*differences((Wanted([key], form) for key, form in forms.items()), given)]:
        there = f". The state has {listed([*whole]) or 'nothing'}" * (len(given) < len(forms))
        raise ValueError(f"shard_state: {'; '.join(errors)}{there}")


def _forms(like: Tree) -> Iterator[tuple[str, Form]]:
    """The key of every tensor of a whole state, and its form."""
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            layout = typed(node)
            leaves = [layout.leaves[n] for n in layout.numbers]
            yield from ((joined(path, leaf.path), Form(leaf.shape, leaf.dtype)) for leaf in leaves)
        else:
            yield path, Form(tuple(node.shape), node.dtype)


def _cut(whole: Mapping[str, Tensor], path: str, like: Parts, mesh: AnyMesh, src: int | None, kept: Set[str]) -> Parts:
    """This rank's part of one tree of a whole state, in the partition of `like`, which keeps the leaves `kept`."""
    out, layout = tree.map(torch.zeros_like, like), typed(like)
    of_leaf: dict[int, tuple[Span, Tensor]] = {}
    for span, (_, x), (_, old) in zip(layout.mine, pieces(out), pieces(like), strict=True):
        of_leaf[span.leaf] = span, x
        if joined(path, layout.leaves[span.leaf].path) in kept:
            x.copy_(old)
    for number in layout.numbers:
        leaf, key = layout.leaves[number], joined(path, layout.leaves[number].path)
        if key in kept:
            continue
        if src is None:
            value = whole_tensor(whole[key], mesh, f"{_LABEL}: {key!r}")
        else:
            empty = torch.empty(leaf.shape, dtype=leaf.dtype, device=device_of(like))
            value = primitives.from_rank(whole[key].to(empty) if key in whole else empty, mesh, src, _LABEL)
        if number in of_leaf:
            span, x = of_leaf[number]
            x.copy_(leaf.flat(value)[span.begin : span.begin + span.numel] if layout.flat else value)
    return out


def extend(state: Tree, tx: TransformLike, params: Tree) -> Tree:
    """The state of `tx` over `params`, in which leaves of `state` go on and those that are new begin.

    As torch's `add_param_group`. `tx` gives new leaves a label of their own, and so a count: then their bias correction
    begins at 1, while that of the others goes on. Leaves have the paths that they had; plan, partition and labels may
    be others. In `resting`, and in `from_torch` of Adafactor and Muon, no leaves share a count, and no label is needed.
    Every rank must call it; the state passes through the host of rank 0. ValueError for new leaves that would share a
    count with others.

    >>> state = adamw(0.1).init({"w": torch.ones(1)})
    >>> tx = by_label({"old": adamw(0.1), "new": adamw(0.1)}, {"lora": "new", "**": "old"})
    >>> [*optim.state.gather_state(optim.state.extend(state, tx, {"w": torch.ones(1), "lora": torch.ones(1)}))][:2]
    ['inner.old.count', 'inner.old.mu.w']
    """
    begun = as_transform(tx).init(params.for_state if isinstance(params, Parts) else params)
    mesh, origins = _mesh(begun, params), _origins(state, begun, params)
    src = None if mesh is None else 0
    old = gather_state(state, src)
    plain = {path: x for path, x in tree.paths_to(begun, Parts) if isinstance(x, Tensor)}
    whole = plain | {key: old[origin] for key, origin in origins.items() if origin in old}
    return _sharded(whole, begun, mesh, src, {key for key, *_ in _forms(begun)} - origins.keys())


def _origins(state: Tree, begun: Tree, params: Tree) -> dict[str, str]:
    """The keys of the tensors of `begun` that go on from `state`, with the keys that they have there."""
    before, fields = known(state, params).fields, known(begun, params).fields
    keys = {field.place: field.key for field in before}
    origins = {field.key: keys[field.place] for field in fields if not field.lone and field.place in keys}
    old = {leaf for field in fields if field.key in origins for leaf in field.leaves}
    new = {leaf for field in fields if not field.lone for leaf in field.leaves} - old
    for field in (field for field in fields if field.lone):
        leaves = set(field.leaves)
        beside = {x.leaves[0] for x in fields if field.counts(x)}
        if beside & new and beside & old:
            raise ValueError(
                f"extend: {min(beside & new)!r} is new, and would share {field.key!r} with {min(beside & old)!r}: give "
                "new leaves a label of their own (by_label)"
            )
        sources = [x.key for x in before if x.lone and x.path == field.path and leaves & set(x.leaves)]
        if len(sources) > 1:
            raise ValueError(
                f"extend: {field.key!r} would go on from {' and '.join(map(repr, sources))}: keep the labels"
            )
        if sources and (leaves & old or not leaves & new):
            origins[field.key] = sources[0]
    if keys and not origins:
        have, want = (", ".join(map(repr, [x.key for x in row][:3])) for row in (before, fields))
        raise ValueError(f"extend: nothing of the state goes on: it has {have}, and tx over params has {want}")
    return origins


def state_dict(
    state: Tree,
    params: Tree,
    key: str = "path",
    rank: int | None = None,
    groups: Sequence[Mapping[str, object]] = (),
    dtensors: bool = False,
) -> dict[str, Tree]:
    """A state in torch.optim's format, with `key` "path" (leaves as FSDP keys them) or "index" (as DDP and ZeRO do).

    A parameter group for every label of `by_label`, in order; `groups` adds to each what torch is to find there (its
    hyper-parameters; those of `with_hyperparams` are there already). Frozen leaves of `params` have a number and no
    state, as in torch; with `params.trainable`, and with `by_label`, which labels trained leaves alone, they have none:
    then give torch's optimizer the trained leaves. `rank` as for `gather_state`. With `dtensors=True` tensors of a
    leaf's shape are DTensors, cut as the parameters are, as FSDP2's optimizers have them. Dual: `load_state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> optim.state.state_dict(adamw(0.1).init(params), params)["state"]
    {'w': {'step': tensor(0.), 'exp_avg': tensor([0.]), 'exp_avg_sq': tensor([0.])}}
    """
    check_word("state_dict: key", key, ("path", "index"))
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"state_dict: {wrong('groups', groups, 'a list of dicts, one for each parameter group')}")
    check_flags(dtensors=dtensors)
    if dtensors:
        check_no_rank("state_dict", rank)
    torchs, mesh = known(state, params), _mesh(state, params)
    _check_rank("state_dict: rank", mesh, rank)
    whole = _gathered(state, mesh, rank, _chunked(state, params) if dtensors else partial(_copy, rank))
    if not _holds(mesh, rank):
        return {}
    entries: dict[str, dict[str, Tensor]] = {leaf: {} for group in torchs.groups for leaf in group}
    for (leaf, name), field in torchs.named.items():
        # one copy for each leaf, because torch updates `step` in place
        entries[leaf][name] = whole[field.key].clone() if field.lone else whole[field.key]
    # as torch, which has no entry before the first step, and no name for whether there was one
    entries = {leaf: entry if entry.pop(BEGUN, True) else {} for leaf, entry in entries.items()}
    names: dict[str, str | int] = {leaf: leaf if key == "path" else i for i, leaf in enumerate(entries)}
    param_groups = []
    for group, settings in zip(torchs.groups, [*groups, *[{}] * len(torchs.groups)], strict=False):
        of_group = [field for field in torchs.fields if field.hyperparam and group[0] in field.leaves]
        hyperparams = {field.hyperparam: whole[field.key].item() for field in of_group}
        param_groups.append({**hyperparams, **settings, "params": [names[leaf] for leaf in group]})
    return {"state": {names[leaf]: entry for leaf, entry in entries.items() if entry}, "param_groups": param_groups}


def _chunked(state: Tree, params: Tree) -> Callable[[str, Tensor], Tensor]:
    """What makes DTensors of tensors of a leaf's shape, cut as that leaf is; other tensors are copied."""
    layout = layout_of(params)
    on = device_mesh(layout.mesh if layout.axes else _mesh(state, params), "state_dict: dtensors=True")
    leaves = ((n, layout.leaves[n]) for n in layout.numbers)
    axes = {(leaf.path, leaf.shape): layout.row_of[n].rule.over for n, leaf in leaves}

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

    Leaves by path, or by index: `order` has the paths in the order torch's groups have the parameters in. Without it
    the groups are `state_dict`'s, with frozen leaves or without; ValueError for groups of other sizes. What torch does
    not keep stays as in `like`; with `strict=False` so does a leaf without a state, such as torch keeps none of before
    its first gradient, and what `like` has no place for (the state of a frozen leaf, AMSGrad's maximum in `adamw`) is
    left out. Leaves that share a count must have equal steps, those without a state the steps of `like`: else give them
    labels of their own (`by_label`). Settings of groups are left out, but those of `with_hyperparams`.
    DTensors and ShardedTensors are made whole, one at a time: then every rank passes its own `saved`. `src` as for
    `shard_state`, also for numbers alone. ValueError names a leaf, or what a leaf lacks. Dual: `state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> state = adamw(0.1).init(params)
    >>> optim.state.load_state_dict(optim.state.state_dict(state, params), state, params)
    AdamState(count=tensor(0.), mu={'w': tensor([0.])}, nu={'w': tensor([0.])})
    """
    mesh = _mesh(like, params)
    _agree_on_source("load_state_dict", mesh, src, strict)
    read = partial(read_saved, saved, like, params, order, src, strict)
    whole, untouched = together(mesh, read if _holds(mesh, src) else lambda: ({}, set()))
    if src is None:  # these determine which collectives follow
        lines = [f"{key!r}: {sharding(x)}" for key, x in whole.items() if is_sharded(x)]
        text = "\n".join([*lines, *(f"{key!r} keeps its state" for key in sorted(untouched))])
        check_same(mesh, text, "load_state_dict: saved", "Pass the state of the same optimizer on all ranks")
    return _sharded(whole, like, mesh, src, _agreed_keys(untouched, like, mesh, src))


def _agreed_keys(keys: Set[str], like: Tree, mesh: AnyMesh, src: int | None) -> Set[str]:
    """The keys of rank `src`, which alone knows them, on every rank."""
    if src is None or mesh is None:
        return keys
    forms = list(_forms(like))
    flags = torch.tensor([key in keys for key, *_ in forms], dtype=torch.uint8, device=mesh_device(mesh))
    on_src = primitives.from_rank(flags, mesh, src, _LABEL).tolist()
    return {key for (key, *_), flag in zip(forms, on_src, strict=True) if flag}


def _misnumbered(numbers: Mapping[str, str], leaves: Set[str]) -> str | None:
    """A leaf whose number is the name of another one, which a name of torch may mean as well."""
    return next((leaf for leaf, number in numbers.items() if number in leaves and number != leaf), None)


def torch_names(
    state: Tree,
    params: Tree,
    buffers: Tree = (),
    model: str = "model",
    optim: str = "optim",
    order: Sequence[str] | None = None,
) -> Callable[[str], str | None]:
    """Return the `rename` by which `checkpoint.restore` reads what a torch program wrote into fshard's names.

    The program saved `{model: model_state, optim: optimizer_state}` with torch.distributed.checkpoint, in which leaves
    are by path (FSDP2, get_state_dict) or by number (DDP, `optimizer.state_dict()`; `order` as for `load_state_dict`).
    ValueError if leaves have numbers as names, and these may be the numbers of others: give `order`, () for by path.
    The tree to restore is `{"params": params, "opt_state": state, "extra": buffers}`: `buffers` are what `model` has
    besides parameters, as `functionalize` gives them. Settings of torch's parameter groups are left out, except those
    that are hyper-parameters of `with_hyperparams`. Other names stay as they are.

    torch's SGD does not count its steps: restore `{"opt_state": {"momentum": state.momentum}}`, and set the count.

    >>> params = {"w": torch.ones(1)}
    >>> rename = optim.state.torch_names(adamw(0.1).init(params), params)
    >>> rename("model.w"), rename("optim.state.w.exp_avg"), rename("optim.param_groups.0.eps")
    ('params.w', 'opt_state.mu.w', None)
    """
    torchs, of_buffers = known(state, params), {*tree.paths(tree.flatten(buffers)[1])}
    names = {joined(optim, "state", leaf, name): field.key for (leaf, name), field in torchs.named.items()}
    is_plain = order is None and torchs.groups == torchs.trained
    in_order = [*chain.from_iterable(torchs.groups)] if is_plain else order
    numbers = {leaf: str(number) for number, leaf in enumerate(in_order or ())}
    if order is None and (leaf := _misnumbered(numbers, {leaf for leaf, _ in torchs.named})):
        raise ValueError(
            f"torch_names: the number of leaf {leaf!r} is {numbers[leaf]!r}, and another leaf has this name: pass the "
            "names of torch's parameters as `order` if its state is by number, or order=() if it is by path"
        )
    numbered = {(leaf, name): field for (leaf, name), field in torchs.named.items() if leaf in numbers}
    names |= {joined(optim, "state", numbers[leaf], name): field.key for (leaf, name), field in numbered.items()}
    groups = joined(optim, "param_groups")
    for field in (field for field in torchs.fields if field.hyperparam):
        keys = [*field.leaves, *(str(n) for n, group in enumerate(torchs.groups) if len(torchs.groups) == 1)]
        names |= {joined(groups, key, field.hyperparam or ""): field.key for key in keys}

    def rename(name: str) -> str | None:
        if name in names:
            return joined("opt_state", names[name])
        if name.startswith(f"{groups}."):
            return None
        if name.startswith(f"{model}."):
            path = name.removeprefix(f"{model}.")
            return joined("extra" if path in of_buffers else "params", path)
        return name

    return rename
