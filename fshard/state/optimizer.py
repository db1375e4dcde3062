"""The state of an optimizer: whole, by leaf path, on all ranks or on one; in torch's formats; partitions; new leaves.

A whole state is a dict of tensors, by the paths of the state's field and of the leaf: {"count": ..., "mu.head.w": ...}.
It does not depend on ranks, plans or partitions, so any run can read it.
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
from ..core.tree import Tree, joined
from ..layout.layout import Layout
from ..layout.pieces import Parts, device_of, layout_of, mesh_of, packed, pick, pieces, typed
from ..layout.row import Span
from ..update.base import TransformLike, as_transform
from ..update.transforms import LabelState
from ..whole.moves import collect, on_rank
from .dtensors import check_no_rank, device_mesh, dtensor_of, is_sharded, sharding, whole_tensor
from .torch_format import BEGUN, check_tensor, known, read_saved

_CHUNK = 1 << 24  # elements gathered at a time
_LABEL = "optimizer state"
_ONE_FOR_EACH = (
    "A list or dict that a transformation makes of the leaves it is given has those of one rank: keep a tensor for "
    "each leaf in a tree (fshard.tree.map(torch.zeros_like, params)); what is of no leaf must be alike on all ranks"
)

_OTHERS = "it has other leaves of the state"


def _mesh(state: Tree, params: Tree = ()) -> AnyMesh:
    """The mesh of the state, else of a `LabelState`'s leaves, else of the parameters, else None."""
    labels = (layout.mesh for node in tree.nodes(state, LabelState) for _, layout in node.layouts)
    return next((mesh for mesh in (mesh_of(state), *labels, mesh_of(params)) if mesh is not None), None)


def _number_along(layout: Layout, rank: int) -> int:
    """The number of a rank of the mesh along a layout's axes, as one coordinate."""
    sizes = axis_sizes(layout.mesh)
    at = dict(zip(sizes, digits(rank, [*sizes.values()]), strict=True))
    return number_of([at[axis] for axis in layout.axes], [sizes[axis] for axis in layout.axes])


def _leaf_chunks(layout: Layout) -> Iterator[list[int]]:
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
    """Return an optimizer's whole state by field and leaf path, on every rank, or on one in host memory.

    With `rank`, only this rank of the mesh gets the state, other ranks {}; leaves are sent a few at a time, and no
    device has more of them whole. Every rank must call this. A state of numbers alone (of `sgd` without momentum) has
    no mesh: every rank gets the state. Dual: `shard_state`.

    >>> params = {"w": torch.ones(2)}
    >>> optim.state.gather_state(sgd(0.1, momentum=0.9).init(params))
    {'count': tensor(0.), 'momentum.w': tensor([0., 0.])}
    """
    _check_rank("gather_state: rank", _mesh(state), rank)
    # copies, because a step may donate the state
    return _gathered(state, _mesh(state), rank, partial(_copy, rank))


def _copy(rank: int | None, path: str, x: Tensor) -> Tensor:
    return x.to(x.device if rank is None else "cpu", copy=True)


def _gathered(state: Tree, mesh: AnyMesh, rank: int | None, keep: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Call `keep(path, whole tensor)` on each tensor of a state, a few leaves at a time."""
    whole: dict[str, Tensor] = {}
    nodes = tree.paths_to(state, Parts)
    together(mesh, lambda: _check_tensors(nodes), _OTHERS, TypeError)
    _check_plain(mesh, dict(nodes), "gather_state: state", _ONE_FOR_EACH)
    for path, node in nodes:
        leaves = _whole_leaves(node, rank) if isinstance(node, Parts) else [("", node)]
        whole.update((joined(path, name), keep(name, x)) for name, x in leaves)
    return whole if _holds(mesh, rank) else {}


def _check_tensors(nodes: Sequence[tuple[str, Tree]]) -> None:
    for path, node in nodes:
        if isinstance(node, Parts):
            pieces(node)
        elif not isinstance(node, Tensor):
            expected = "the state of an optimizer, tensors alone"
            raise TypeError(f"gather_state: {f'leaf {path!r} of ' if path else ''}{wrong('state', node, expected)}")


def _check_rank(name: str, mesh: AnyMesh, rank: int | None) -> None:
    if rank is not None:
        check_whole(name, rank, 0, torch.inf if mesh is None else num_ranks(mesh), "a rank of the state's mesh")


def _holds(mesh: AnyMesh, rank: int | None) -> bool:
    return rank is None or mesh is None or rank == rank_in(mesh)


def _whole_leaves(x: Parts, rank: int | None) -> Iterator[tuple[str, Tensor]]:
    layout = x.layout
    for numbers in _leaf_chunks(layout):
        part = layout.pick(numbers)
        target = on_rank(part, None if rank is None else _number_along(layout, rank))
        label = _LABEL if rank is None else f"{_LABEL} for rank {rank}"
        whole = collect(packed(pick(x, part)), target, label)
        yield from ((layout.leaves[number].path, leaf) for number, leaf in pieces(whole))


def shard_state(whole: Mapping[str, Tensor], like: Tree, src: int | None = None) -> Tree:
    """Return a whole state in the partition of `like`, a state of the same optimizer. Dual: `gather_state`.

    - `whole`: the whole state on every rank, or, with `src`, on this rank of the mesh alone (None on others)
    - `like`: a state of any plan, partition and number of ranks, as `init` makes it

    Every rank must call this. For a state of numbers alone, which has no mesh, `src` must be None. ValueError names
    missing tensors and wrong shapes; MismatchError names a count that differs between ranks.

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
    together(mesh, partial(_check_rank, f"{name}: src", mesh, src))
    text = f"src={src}" + ", strict=False" * (not strict)
    check_same(mesh, text, f"{name}: src", "Pass the same src on all ranks")


def _sharded(whole: Mapping[str, Tensor] | None, like: Tree, mesh: AnyMesh, src: int | None, kept: Set[str]) -> Tree:
    """As `shard_state`, but leaves of `Parts` with keys in `kept` stay as in `like`."""
    has_whole = _holds(mesh, src)
    together(mesh, lambda: _check(whole, like, kept) if has_whole else None)
    whole = whole if has_whole and whole is not None else {}
    nodes: list[Tree] = []
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            nodes.append(_cut(whole, path, node, mesh, src, kept))
        else:
            # on other ranks `node` gives the shape and dtype to receive
            value = (whole_tensor(whole[path], mesh, f"{_LABEL}: {path!r}").to(node) if has_whole else node).clone()
            nodes.append(value if src is None else primitives.from_rank(value, mesh, src, _LABEL))
    if src is None:
        known = {path: x for (path, _), x in zip(tree.paths_to(like, Parts), nodes, strict=True)}
        _check_plain(mesh, known, "the whole state", "Pass the same state on all ranks, or with src on one alone")
    return tree.put_tops(like, Parts, nodes)


def _check_plain(mesh: AnyMesh, nodes: Mapping[str, Tree], what: str, remedy: str) -> None:
    """MismatchError on every rank if a tensor outside of `Parts`, such as a count, differs between ranks."""
    if mesh is None or num_ranks(mesh) == 1:
        return
    plain = {path: x for path, x in nodes.items() if isinstance(x, Tensor)}
    forms = "\n".join(f"{path!r} of shape {list(x.shape)} and {x.dtype}" for path, x in plain.items())
    check_same(mesh, forms, what, remedy)
    check_same(mesh, "\n".join(f"{path!r}: {_exactly(x)}" for path, x in plain.items()), what, remedy)


def _exactly(x: Tensor) -> str:
    return str(x.item()) if not x.dim() else hashlib.sha256(bytes(as_bytes(x).cpu().tolist())).hexdigest()


def _check(whole: Mapping[str, Tensor] | None, like: Tree, kept: Set[str]) -> None:
    if not isinstance(whole, Mapping):
        order = "The order is shard_state(whole, like)"
        raise TypeError(f"shard_state: {wrong('whole', whole, 'a dict of tensors, as gather_state returns', order)}")
    forms = {key: form for key, form in _forms(like) if key not in kept}
    given = {key: whole[key] for key in forms if key in whole}
    for key, x in given.items():
        check_tensor(f"shard_state: {key!r}", x, "a tensor")
        # counts may be integers in one state and floats in the other
        if not forms[key].shape and not x.is_complex() and x.dtype != torch.bool:
            forms[key] = Form((), x.dtype)
    if errors := [*differences((Wanted([key], form) for key, form in forms.items()), given)]:
        there = f". The state has {listed([*whole]) or 'nothing'}" * (len(given) < len(forms))
        raise ValueError(f"shard_state: {'; '.join(errors)}{there}")


def _forms(like: Tree) -> Iterator[tuple[str, Form]]:
    for path, node in tree.paths_to(like, Parts):
        if isinstance(node, Parts):
            layout = typed(node)
            leaves = [layout.leaves[n] for n in layout.numbers]
            yield from ((joined(path, leaf.path), Form(leaf.shape, leaf.dtype)) for leaf in leaves)
        else:
            yield path, Form(tuple(node.shape), node.dtype)


def _cut(whole: Mapping[str, Tensor], path: str, like: Parts, mesh: AnyMesh, src: int | None, kept: Set[str]) -> Parts:
    """This rank's part of one tree of a whole state; leaves in `kept` come from `like`."""
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
    """Return the state of `tx` over `params`: leaves in `state` keep their state, new leaves begin a new one.

    Compare torch's `add_param_group`. `tx` must give new leaves a label (`by_label`), and with the label a count: bias
    correction of new leaves begins at step 1, and old leaves go on. In `resting`, and in `from_torch` of Adafactor and
    Muon, no leaves share a count, and new leaves need no label. Old leaves keep their paths; plan, partition and labels
    may change. Every rank must call this; the state passes through the host of rank 0. ValueError if new leaves would
    share a count with old ones.

    >>> state = adamw(0.1).init({"w": torch.ones(1)})
    >>> tx = by_label({"old": adamw(0.1), "new": adamw(0.1)}, {"lora": "new", "**": "old"})
    >>> [*optim.state.gather_state(optim.state.extend(state, tx, {"w": torch.ones(1), "lora": torch.ones(1)}))][:2]
    ['inner.old.count', 'inner.old.mu.w']
    """
    begun = as_transform(tx).init(params.for_state if isinstance(params, Parts) else params)
    mesh, origins = _mesh(begun, params), _old_keys(state, begun, params)
    if mesh is None and (ranks := num_ranks(_mesh(state))) > 1:
        raise ValueError(f"extend: params lie on one device, and the state on {ranks} ranks: make_plan(params, mesh)")
    src = None if mesh is None else 0
    old = gather_state(state, src)
    plain = {path: x for path, x in tree.paths_to(begun, Parts) if isinstance(x, Tensor)}
    whole = plain | {key: old[origin] for key, origin in origins.items() if origin in old}
    return _sharded(whole, begun, mesh, src, {key for key, *_ in _forms(begun)} - origins.keys())


def _old_keys(state: Tree, begun: Tree, params: Tree) -> dict[str, str]:
    """Map keys of `begun` to the keys of their values in `state`."""
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
    """Return a state in torch.optim's format.

    - `key`: "path" (leaves as FSDP names them) or "index" (as DDP and ZeRO do)
    - `rank`: as for `gather_state`
    - `groups`: more entries for each parameter group, such as hyper-parameters beyond those of `with_hyperparams`
    - `dtensors`: tensors of a leaf's shape become DTensors, cut like the parameters, as in FSDP2's optimizers

    Each label of `by_label` has a parameter group, in the order of labels. Frozen leaves of `params` have a number and
    no state, as in torch. With `params.trainable`, or with `by_label`, frozen leaves have no number: then give torch's
    optimizer only the trained leaves. Dual: `load_state_dict`.

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
        # a copy for each leaf, because torch updates `step` in place
        entries[leaf][name] = whole[field.key].clone() if field.lone else whole[field.key]
    # torch has no entry before the first step, and no field BEGUN
    entries = {leaf: entry if entry.pop(BEGUN, True) else {} for leaf, entry in entries.items()}
    names: dict[str, str | int] = {leaf: leaf if key == "path" else i for i, leaf in enumerate(entries)}
    param_groups = []
    for group, settings in zip(torchs.groups, [*groups, *[{}] * len(torchs.groups)], strict=False):
        of_group = [field for field in torchs.fields if field.hyperparam and group[0] in field.leaves]
        hyperparams = {field.hyperparam: whole[field.key].item() for field in of_group}
        param_groups.append({**hyperparams, **settings, "params": [names[leaf] for leaf in group]})
    return {"state": {names[leaf]: entry for leaf, entry in entries.items() if entry}, "param_groups": param_groups}


def _chunked(state: Tree, params: Tree) -> Callable[[str, Tensor], Tensor]:
    """Tensors of a leaf's shape become DTensors, cut like the leaf; other tensors are copied."""
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
    """Read a state in torch.optim's format, `saved`, into the partition of `like`.

    - `saved`: from a torch optimizer, DDP, ZeroRedundancyOptimizer or FSDP, with leaves by path or by index. Every
      rank passes its own DTensors and ShardedTensors; one at a time is made whole
    - `params`: the parameters of `like`
    - `order`: for leaves by index, their paths in the order of torch's groups. By default the groups are those of
      `state_dict`, with or without frozen leaves; ValueError for groups of other sizes
    - `src`: as for `shard_state`, also for states of numbers alone
    - `strict=False`: a leaf without a state (torch has none before its first gradient) stays as in `like`; entries
      missing in `like` (the state of a frozen leaf, AMSGrad's maximum in `adamw`) are left out

    Fields of `like` unknown to torch stay as they are. Leaves with one count must have equal steps (a leaf without a
    state has the step of `like`); if steps differ, give labels (`by_label`). Settings of groups are left out, except
    hyper-parameters of `with_hyperparams`. ValueError names a leaf, or the entry it lacks. Dual: `state_dict`.

    >>> params = {"w": torch.ones(1)}
    >>> state = adamw(0.1).init(params)
    >>> optim.state.load_state_dict(optim.state.state_dict(state, params), state, params)
    AdamState(count=tensor(0.), mu={'w': tensor([0.])}, nu={'w': tensor([0.])})
    """
    mesh = _mesh(like, params)
    _agree_on_source("load_state_dict", mesh, src, strict)
    read = partial(read_saved, saved, like, params, order, src, strict)
    whole, untouched = together(mesh, read if _holds(mesh, src) else lambda: ({}, set()))
    if src is None:  # the text determines this rank's next collectives
        lines = [f"{key!r}: {sharding(x)}" for key, x in whole.items() if is_sharded(x)]
        text = "\n".join([*lines, *(f"{key!r} keeps its state" for key in sorted(untouched))])
        check_same(mesh, text, "load_state_dict: saved", "Pass the state of the same optimizer on all ranks")
    return _sharded(whole, like, mesh, src, _agreed_keys(untouched, like, mesh, src))


def _agreed_keys(keys: Set[str], like: Tree, mesh: AnyMesh, src: int | None) -> Set[str]:
    if src is None or mesh is None:
        return keys
    forms = list(_forms(like))
    flags = torch.tensor([key in keys for key, *_ in forms], dtype=torch.uint8, device=mesh_device(mesh))
    on_src = primitives.from_rank(flags, mesh, src, _LABEL).tolist()
    return {key for (key, *_), flag in zip(forms, on_src, strict=True) if flag}


def _misnumbered(numbers: Mapping[str, str], leaves: Set[str]) -> str | None:
    return next((leaf for leaf, number in numbers.items() if number in leaves and number != leaf), None)


def torch_names(
    state: Tree,
    params: Tree,
    buffers: Tree = (),
    model: str = "model",
    optim: str = "optim",
    order: Sequence[str] | None = None,
) -> Callable[[str], str | None]:
    """Return the `rename` for `checkpoint.restore` of a torch program's checkpoint: from torch's names to fshard's.

    The program saved `{model: model_state, optim: optimizer_state}` with torch.distributed.checkpoint, with leaves by
    path (FSDP2, get_state_dict) or by number (DDP, `optimizer.state_dict()`; `order` as for `load_state_dict`).
    ValueError if a leaf's name may be another leaf's number: then give `order`, or () if leaves are by path. Restore
    the tree `{"params": params, "opt_state": state, "extra": buffers}`, with `buffers` as `functionalize` gives them.
    Settings of torch's parameter groups are left out, except hyper-parameters of `with_hyperparams`.

    torch's SGD does not count its steps: restore `{"opt_state": {"momentum": state.momentum}}`, and set the count
    yourself.

    >>> params = {"w": torch.ones(1)}
    >>> rename = optim.state.torch_names(adamw(0.1).init(params), params)
    >>> rename("model.w"), rename("optim.state.w.exp_avg"), rename("optim.param_groups.0.eps")
    ('params.w', 'opt_state.mu.w', None)
    """
    torchs, of_buffers = known(state, params), {*tree.paths(buffers)}
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
