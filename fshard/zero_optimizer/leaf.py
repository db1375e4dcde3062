"""ZeRO's partition by whole leaves: the rank that owns a leaf updates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..comm import collectives, consensus, primitives
from ..comm.mesh import AnyMesh, Axes, OnMesh, axis_sizes, coordinate
from ..comm.ranks import Ranks
from ..comm.reduction import DEFAULT
from ..core import storage, tree
from ..core.differences import Form, form_difference
from ..core.func_levels import differentiates
from ..core.tree import Tree
from ..hosts import one_host
from ..layout.layout import Layout
from ..layout.pieces import Parts, layout_of, packed, pick, pieces
from ..layout.row import put
from ..plan.leaves import is_differentiable, read_frozen
from ..plan.plan import Plan
from ..update.base import FoundInf, Transform
from ..whole.copies import check_apart, copied_whole, own_part
from ..whole.moves import collect, on_rank, owned

P = TypeVar("P", Plan, Layout)


@dataclass(frozen=True)
class ZeroState(OnMesh):
    """The optimizer's state for this rank's part, and the partition."""

    inner: Tree
    parting: Plan | Layout

    @property
    def home(self) -> Plan | Layout:
        return self.parting


# paths in a whole state do not depend on the partition
tree.register_fields(ZeroState, ("inner",), ("parting",), names=("",))


def leaves_of(x: Tree, spec: tree.Spec, what: str) -> list[Tree]:
    """Return the leaves of parameters or gradients, detached; gradients of frozen leaves may be None.

    If `x` has a subtree in place of a leaf, the subtree is returned.
    """
    try:
        flat = tree.flatten_up_to(spec, x)
    except ValueError as error:
        raise ValueError(f"zero: the {what} are not of the tree the state was made for: {error}") from None
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            path = tree.leaf_paths(spec)[i]
            raise ValueError(f"zero: {what}: leaf {path!r} is sparse: make it dense with .to_dense()")
    return [leaf if leaf is None else tree.detached(leaf) for leaf in flat]


def detached_values(x: Tree) -> Tree:
    """Return a tree with each nn.Parameter detached."""
    return tree.map(lambda leaf: leaf.detach() if isinstance(leaf, nn.Parameter) else leaf, x)


def check_zero_state(state: object, kind: type[P]) -> P:
    """Return the partition; ValueError for a state of another optimizer or partition."""
    if not isinstance(state, ZeroState) or not isinstance(state.parting, kind):
        raise ValueError(
            f"zero: expected the state of its own init, of this partition, got {type(state).__name__}: "
            "make it with this transformation's init"
        )
    return state.parting


def leaf_init(tx: Transform, mesh: AnyMesh, axes: Axes, params: Tree) -> ZeroState:
    layout, mesh = layout_of(params), one_host.connected(mesh)
    pairs = zip(layout.leaves, tree.leaves(params), strict=True)
    text = "\n".join(f"leaf {leaf.path!r} {leaf.dtype}{list(leaf.shape)} {x.requires_grad}" for leaf, x in pairs)
    # with different trees, ranks would wait for leaves never sent
    consensus.check_same(mesh, text, "the tree of parameters")
    leaves, paths = tree.leaves(params), [leaf.path for leaf in layout.leaves]
    frozen = read_frozen(leaves, layout.numbers, paths, [False] * len(leaves))
    trained = layout.pick(n for n in layout.numbers if is_differentiable(layout.leaves[n]) and not frozen[n])
    still = tuple(layout.leaves[n].path for n in layout.numbers if n not in trained.numbers)
    parting = owned(replace(trained, frozen=still), mesh, axes)
    return ZeroState(tx.init(collect(packed(pick(tree.detached(params), trained)), parting)), parting)


def leaf_update(
    tx: Transform, local: bool, grads: Tree, state: ZeroState, params: Tree = None, **extra: object
) -> tuple[Tree, ZeroState]:
    """Return whole updates: the owner of a leaf computes its update and sends it to all ranks."""
    parting = check_zero_state(state, Layout)
    if differentiates((grads, state, detached_values(params), extra)):
        return update_on_all(tx, parting, local, grads, state, params, extra)
    owned_grads = _owned_grads(parting, grads, local)
    owned_params = None if params is None else _owned_leaves(parting, params, "parameters")
    updates, inner = tx.update(owned_grads, state.inner, owned_params, **extra)
    return _given_to_all(updates, None), ZeroState(inner, parting)


def leaf_step(
    tx: Transform,
    local: bool,
    grads: Tree,
    state: ZeroState,
    params: Tree,
    found_inf: FoundInf | None = None,
    donate: bool = False,
    **extra: object,
) -> tuple[Tree, ZeroState]:
    """Return new whole parameters: the owner of a leaf updates it and sends it to all ranks."""
    parting = check_zero_state(state, Layout)
    owned_grads = _owned_grads(parting, grads, local)
    owned_params = _owned_leaves(parting, params, "parameters")
    if donate:  # donates the state alone: parameters are copied
        owned_params = Parts(parting, [x.clone() for x in owned_params.tensors])
    new, inner = tx.step(owned_grads, state.inner, owned_params, found_inf, donate, **extra)
    return _given_to_all(new, params), ZeroState(inner, parting)


def update_on_all(
    tx: Transform, layout: Layout, local: bool, grads: Tree, state: ZeroState, params: Tree, extra: Mapping[str, object]
) -> tuple[Tree, ZeroState]:
    """Under a derivative, update all leaves with the whole state; keep this rank's part."""
    check_apart("zero", state.inner)
    given = (grads, state, params)

    def whole(x: Tree) -> Parts:
        leaf_of = dict(zip(layout.leaf_at, tree.flatten_up_to(layout.spec, x), strict=True))
        return Parts(on_rank(layout), [leaf_of[number] for number in layout.numbers])

    def own(old: Tree, new: Tree) -> Tree:
        return own_part(new, old, given) if isinstance(old, Parts) else new

    gradients, mesh = whole(grads), layout.live_mesh()
    for axis in axis_sizes(mesh) if local else ():
        gradients = collectives.all_reduce(gradients, mesh, axis, label="gradients")
    inner = tree.map_tops(lambda x: copied_whole(x, given) if isinstance(x, Parts) else x, Parts, state.inner)
    updates, new = tx.update(gradients, inner, None if params is None else whole(params), **extra)
    leaf_of = dict(zip(layout.numbers, tree.leaves(updates), strict=True))
    new_state = ZeroState(tree.map_tops(own, Parts, state.inner, new), state.parting)
    return tree.unflatten(layout.spec, [None if n is None else leaf_of.get(n) for n in layout.leaf_at]), new_state


def _owned_leaves(parting: Layout, x: Tree, what: str) -> Parts:
    flat = leaves_of(x, parting.spec, what)
    # check leaves of other owners, so that every rank raises
    for number in parting.numbers:
        leaf = parting.leaves[number]
        if difference := form_difference(leaf.path, Form(leaf.shape, leaf.dtype), flat[number]):
            raise ValueError(f"zero: {what}: leaf {difference}")
    return Parts(parting, [flat[span.leaf] for span in parting.mine])


def _owned_grads(parting: Layout, grads: Tree, local: bool) -> Parts:
    """Return gradients of this rank's leaves; if `local`, summed along one axis after the other, in rank order."""
    owned_grads, mesh = _owned_leaves(parting, grads, "gradients"), parting.mesh
    if not local:
        return owned_grads
    outer, last = parting.axes[:-1], parting.axes[-1:]
    flat = leaves_of(grads, parting.spec, "gradients")
    sums = {n: parting.leaves[n].flat(flat[n]) for n in parting.numbers}  # by leaf, (numel,)
    # along all axes but the last of the partition, all ranks get the sums; along the last, only owners
    for axis in (*outer, *(name for name in axis_sizes(mesh) if name not in parting.axes)):
        sums = _all_reduced(sums, primitives.along(mesh, axis))
    for axis in last:
        sums = _reduced_to_owners(sums, parting, primitives.along(mesh, axis))
    return Parts(parting, [parting.leaves[span.leaf].shaped(sums[span.leaf]) for span in parting.mine])


def _all_reduced(leaves: dict[int, Tensor], ranks: Ranks) -> dict[int, Tensor]:
    sums = dict[int, Tensor]()
    # not a set, whose order depends on the process
    for dtype in dict.fromkeys(x.dtype for x in leaves.values()):
        of_dtype, step = {n: x for n, x in leaves.items() if x.dtype == dtype}, -(-storage.STEP // dtype.itemsize)
        *starts, end = accumulate((-(-x.numel() // step) * step for x in of_dtype.values()), initial=0)
        flat = next(iter(of_dtype.values())).new_empty(end)
        put(flat, [*of_dtype.values()], starts)
        total = DEFAULT.all_reduce(flat, ranks, "gradients", None).wait()  # (end,)
        sums.update((n, total[start:][: x.numel()]) for (n, x), start in zip(of_dtype.items(), starts, strict=True))
    return {n: sums[n] for n in leaves}


def _reduced_to_owners(leaves: dict[int, Tensor], parting: Layout, ranks: Ranks) -> dict[int, Tensor]:
    """Reduce each flat leaf to its owner along the last axis; one message to each rank."""
    outer, owned_by = coordinate(parting.mesh, parting.axes[:-1]), list[list[int]]([] for _ in range(ranks.size))
    for number in leaves:
        along_others, owner = divmod(parting.row_of[number].rule.at or 0, ranks.size)
        if along_others == outer:
            owned_by[owner].append(number)
    own_numbers = owned_by[ranks.rank]
    others = [peer for peer in range(ranks.size) if peer != ranks.rank]
    sends = [[leaves[n] for n in owned_by[peer]] if peer in others else [] for peer in range(ranks.size)]
    own_sizes = [(leaves[n].dtype, leaves[n].numel()) for n in own_numbers]
    sizes = [own_sizes if peer in others else [] for peer in range(ranks.size)]
    received = primitives.swap(sends, sizes, ranks, "gradients")
    received[ranks.rank] = [leaves[n] for n in own_numbers]
    # (numel,) of each rank, added in rank order
    return {n: reduce(torch.add, parts) for n, parts in zip(own_numbers, zip(*received, strict=True), strict=True)}


def _given_to_all(part: Parts, params: Tree) -> Tree:
    """Gather owned leaves; leaves without an owner come from `params`."""
    layout = part.layout
    whole = collect(part, on_rank(layout), "parameters")
    leaves = [None] * layout.spec.num_leaves if params is None else leaves_of(params, layout.spec, "parameters")
    for number, leaf in pieces(whole):
        leaves[number] = leaf
    return tree.unflatten(layout.spec, leaves)
