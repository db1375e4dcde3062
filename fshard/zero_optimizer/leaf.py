"""ZeRO's partition by whole leaves: the rank that owns a leaf updates it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..comm import consensus, one_host, primitives
from ..comm.mesh import AnyMesh, Axes, OnMesh, axis_sizes, coordinate
from ..comm.ranks import Ranks
from ..core import bits, tree
from ..core.flat import put
from ..layout.layout import EVERYONE, Layout
from ..layout.pieces import Pieces, layout_of, packed, pick
from ..layout.reshard import collect, on_rank, owned
from ..optim.base import FoundInf, Transform
from ..sharding.leaves import is_differentiable, read_frozen


@dataclass(frozen=True)
class ZeroState(OnMesh):
    """The optimizer's state for this rank's part, and the partition of the parameters: a `Plan` or a `Layout`."""

    inner: Any
    parting: Any

    @property
    def home(self) -> Any:
        """The partition, which names the mesh."""
        return self.parting


tree.register_fields(
    ZeroState, ("inner",), ("parting",), names=("",)
)  # paths in a whole state do not depend on the partition


def leaves_of(x: Any, spec: tree.Spec, what: str) -> list[Any]:
    """Return the leaves of parameters or gradients, detached; a gradient may be None where a parameter is frozen."""
    try:
        flat = tree.flatten_up_to(spec, x)
    except ValueError as error:
        raise ValueError(f"zero: the {what} are not of the tree the state was made for: {error}") from None
    for i, leaf in enumerate(flat):
        if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
            raise ValueError(f"zero: {what}: leaf {tree.paths(spec)[i]!r} is sparse: make it dense with .to_dense()")
    return [leaf if leaf is None else tree.detached(leaf) for leaf in flat]


def check_zero_state(state: Any, kind: type) -> None:
    """Raise ValueError for a state that was made by another optimizer or for another partition."""
    if not isinstance(state, ZeroState) or not isinstance(state.parting, kind):
        raise ValueError(
            f"zero: expected the state of its own init, of this partition, got {type(state).__name__}: "
            "make it with this transformation's init"
        )


def leaf_init(tx: Transform, mesh: AnyMesh, axes: Axes, params: Any) -> ZeroState:
    """Assign leaves to ranks, and make the optimizer's state for the leaves this rank owns."""
    layout, mesh = layout_of(params), one_host.connected(mesh)
    lines = zip(layout.leaves, tree.leaves(params), strict=True)
    text = "\n".join(f"leaf {leaf.path!r} {leaf.dtype}{list(leaf.shape)} {x.requires_grad}" for leaf, x in lines)
    consensus.check_same(mesh, hashlib.sha256(text.encode()).hexdigest(), text, "the tree of parameters")
    frozen = read_frozen(tree.leaves(params), layout.numbers)
    trained = layout.pick(n for n in layout.numbers if is_differentiable(layout.leaves[n]) and not frozen[n])
    parting = owned(trained, mesh, axes)
    return ZeroState(tx.init(collect(packed(pick(tree.detached(params), trained)), parting)), parting)


def leaf_update(
    tx: Transform, local: bool, grads: Any, state: ZeroState, params: Any = None, **extra: Any
) -> tuple[Any, ZeroState]:
    """Return whole updates: the owner of a leaf computes its update and sends it to all ranks."""
    check_zero_state(state, Layout)
    part = _owned_grads(state.parting, grads, local)
    mine = None if params is None else _own(state.parting, params, "parameters")
    updates, inner = tx.update(part, state.inner, mine, **extra)
    return _shared(updates, None), ZeroState(inner, state.parting)


def leaf_step(
    tx: Transform,
    local: bool,
    grads: Any,
    state: ZeroState,
    params: Any,
    found_inf: FoundInf | None = None,
    donate: bool = False,
    **extra: Any,
) -> tuple[Any, ZeroState]:
    """Return new whole parameters: the owner of a leaf updates it and sends it to all ranks."""
    check_zero_state(state, Layout)
    part = _owned_grads(state.parting, grads, local)
    mine = _own(state.parting, params, "parameters")
    if donate:  # of the state alone: no other rank writes to the parameters that this one owns
        mine = Pieces(mine.layout, [x.clone() for x in mine.tensors])
    new, inner = tx.step(part, state.inner, mine, found_inf, donate, **extra)
    return _shared(new, params), ZeroState(inner, state.parting)


def _own(parting: Layout, x: Any, what: str) -> Pieces:
    """The leaves of a whole tree that this rank owns, not copied."""
    flat = leaves_of(x, parting.spec, what)
    for number in parting.numbers:
        leaf, got = parting.leaves[number], flat[number]
        if not isinstance(got, Tensor) or tuple(got.shape) != leaf.shape:
            actual = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"zero: {what}: leaf {leaf.path!r}: expected shape {list(leaf.shape)}, got {actual}")
    return Pieces(parting, [flat[span.leaf] for span in parting.mine])


def _owned_grads(parting: Layout, grads: Any, local: bool) -> Pieces:
    """The gradients of the leaves this rank owns; local ones are summed over the mesh, by axis in rank order."""
    own, mesh = _own(parting, grads, "gradients"), parting.mesh
    if not local:
        return own
    outer, last = parting.axes[:-1], parting.axes[-1:]
    flat = leaves_of(grads, parting.spec, "gradients")
    held = {n: flat[n].reshape(-1) for n in parting.numbers}
    for axis in (*outer, *(a for a in axis_sizes(mesh) if a not in parting.axes)):
        held = _all_reduced(held, primitives.along(mesh, axis))
    for axis in last:
        held = _reduced_to_owners(held, parting, primitives.along(mesh, axis), coordinate(mesh, outer))
    return Pieces(parting, [held[s.leaf].view(parting.leaves[s.leaf].shape) for s in parting.mine])


def _all_reduced(held: dict[int, Tensor], ranks: Ranks) -> dict[int, Tensor]:
    """All-reduce leaves, with one collective for each dtype; each leaf starts at a multiple of 16 bytes."""
    result = dict[int, Tensor]()
    for dtype in {x.dtype for x in held.values()}:
        some, step = {n: x for n, x in held.items() if x.dtype == dtype}, -(-bits.STEP // dtype.itemsize)
        *starts, end = accumulate((-(-x.numel() // step) * step for x in some.values()), initial=0)
        flat = next(iter(some.values())).new_empty(end)
        put(flat, [*some.values()], starts)
        whole = primitives.all_reduce(flat, ranks, "gradients").wait()
        result.update((n, whole[start:][: x.numel()]) for (n, x), start in zip(some.items(), starts, strict=True))
    return {n: result[n] for n in held}


def _reduced_to_owners(held: dict[int, Tensor], parting: Layout, ranks: Ranks, row: int) -> dict[int, Tensor]:
    """Reduce each leaf to the rank that owns it, with one message to each other rank."""
    owner = {span.leaf: span.rank - row * ranks.size for span in parting.spans}
    to = [[n for n in held if owner[n] == peer] for peer in range(ranks.size)]
    mine = to[ranks.rank]
    others = [peer for peer in range(ranks.size) if peer != ranks.rank]
    sends = [[held[n] for n in to[peer]] if peer in others else [] for peer in range(ranks.size)]
    sizes = [[(held[n].dtype, held[n].numel()) for n in mine] if peer in others else [] for peer in range(ranks.size)]
    arrived = primitives.swap(sends, sizes, ranks, "gradients")
    arrived[ranks.rank] = [held[n] for n in mine]
    return {n: reduce(torch.add, parts) for n, parts in zip(mine, zip(*arrived, strict=True), strict=True)}


def _shared(part: Pieces, params: Any) -> Any:
    """All-gather the leaves that ranks own into a whole tree; a leaf that no rank owns is taken from `params`."""
    layout = part.layout
    whole = collect(part, on_rank(layout, layout.mesh, layout.axes, EVERYONE), "parameters")
    leaves: list[Any] = (
        [None] * layout.spec.num_leaves if params is None else leaves_of(params, layout.spec, "parameters")
    )
    for span, row in zip(whole.layout.mine, whole.tensors, strict=True):
        leaves[span.leaf] = row
    return tree.unflatten(layout.spec, leaves)
