"""Whole copies of leaves on all ranks, and the parts on this rank, with derivatives (`moves.py` has none).

Each rank may use its copy differently, so gradients of all copies are summed, as in `collectives.all_reduce`. Every
rank takes part in this sum: results depend on the arguments even on a rank without elements (`func_levels.depending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import accumulate

import torch
from torch import Tensor

from ..comm import collectives
from ..comm.mesh import Axes
from ..core import tree
from ..core.func_levels import depending, differentiates
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parts, device_of, elements, typed
from .moves import on_rank

Update = Callable[..., tuple[Tree, Tree]]


def copied_whole(x: Parts, given: Tree, layout: Layout | None = None) -> Parts:
    """Return the whole leaves of `x` on every rank, in the order of `layout` (default: of `x`).

    All leaves are then in memory. Cut leaves of one dtype and axes need an all-reduce. `given` has tensors on every
    rank: through these the derivative passes even on a rank without elements of `x`.
    """
    old, device, whole = typed(x), device_of(x), dict[int, Tensor]()
    groups: dict[tuple[object, ...], list[int]] = {}
    for number in old.numbers:
        groups.setdefault((old.row_of[number].over, old.leaves[number].dtype), []).append(number)
    for numbers in groups.values():
        leaves = [old.leaves[number] for number in numbers]
        *starts, end = accumulate((leaf.numel for leaf in leaves), initial=0)
        flat = depending(torch.zeros(end, dtype=leaves[0].dtype, device=device), (x, given))
        for span, part in elements(x, old):
            if span.leaf in numbers:
                flat[starts[numbers.index(span.leaf)] + span.begin :][: span.numel] = part.to(device)
        for axis in old.row_of[numbers[0]].over:
            flat = collectives.all_reduce(flat, old.mesh, axis, label="whole leaves")
        parts = zip(numbers, leaves, flat.split([leaf.numel for leaf in leaves]), strict=True)
        whole |= {number: leaf.shaped(part) for number, leaf, part in parts}
    return Parts(on_rank(layout or x.layout), [whole[number] for number in old.numbers])


def own_part(whole: Parts, like: Parts, given: Sequence[Tree] = ()) -> Parts:
    """Return this rank's part of `whole`, laid out as `like`, with zero padding. Dual: `copied_whole`."""
    leaf_of = dict(zip(whole.layout.numbers, whole.tensors, strict=True))
    if not like.layout.flat:
        return Parts(like.layout, [leaf_of[span.leaf] for span in like.layout.mine])
    out = tree.map(lambda row: depending(torch.zeros_like(row), (whole, given)), like)
    for span, piece in elements(out):
        leaf = whole.layout.leaves[span.leaf]
        piece.copy_(leaf.flat(leaf_of[span.leaf])[span.begin :][: span.numel])
    return out


def on_copies(
    update: Update, name: str, through: Callable[[Layout], Layout] | None = None, apart: bool = True
) -> Update:
    """Return an update that runs `update` on whole copies of leaves if a derivative passes.

    `through`: returns the layout of whole leaves on owners, if the state has this layout. `apart`: True if the update
    of a leaf depends on no other leaf.
    """

    @wraps(update)
    def run(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        given = (grads, state, params)
        cut = [x.layout for x in tree.nodes(grads, Parts) if x.layout.flat]
        if not cut or not differentiates(given):
            return update(grads, state, params, **extra)
        if through is not None:
            check_apart(name, state)
        overs = _overs(cut)
        if not _overs(x.layout for x in tree.nodes(given, Parts) if x.layout.flat) <= overs:
            raise ValueError(
                f"optim.{name}: expected gradients, state and parameters that are cut alike, got some cut over other "
                "axes: give grads.for_state and params.for_state"
            )
        if not apart:
            check_cut_alike(f"optim.{name}", cut)

        def whole(x: Tree) -> Tree:
            if not isinstance(x, Parts):
                return x
            return copied_whole(x, given, through(x.layout) if through and x.layout.flat else None)

        def part(old: Tree, new: Tree) -> Tree:
            return own_part(new, old, copies) if isinstance(old, Parts) else new

        copies = tree.map_tops(whole, Parts, given)
        return tree.map_tops(part, Parts, (grads, state), update(*copies, **extra))

    return run


def check_cut_alike(name: str, layouts: Iterable[Layout]) -> None:
    """TypeError for whole and cut leaves together: an update of all would count whole leaves once per rank."""
    if len(_overs(layouts)) > 1:
        raise TypeError(
            f"{name}: where a derivative passes, expected leaves that are all cut alike, got whole ones, too: make the "
            "plan without whole=, or detach what needs no derivative"
        )


def _overs(layouts: Iterable[Layout]) -> set[Axes]:
    return {row.over for layout in layouts for row in layout.rows if row.has_elements}


def check_apart(name: str, state: Tree) -> None:
    """TypeError if the state contains layouts of leaves: an update of whole copies cannot use such a state."""

    def knows_leaves(x: object) -> bool:
        return hasattr(x, "layouts") or hasattr(x, "vectors")

    if any(map(knows_leaves, tree.tops(state, knows_leaves))):
        raise TypeError(
            f"optim.{name}: where a derivative passes, expected a transformation whose state does not know where "
            "leaves lie: put by_label, masked, resting, muon and adafactor around it, or use them alone"
        )
