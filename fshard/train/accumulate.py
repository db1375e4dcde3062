"""A step's gradients: those of its micro-batches added up, or of its slices in one tree.

Note [Slices]
    With `reduction="tree"` the batch of all ranks is cut into slices, as many as the plan says, or if its rows do not
    divide by that, the most that they do. Their number does not depend on how many ranks there are, nor what is drawn
    or computed for each; so each has the same gradient everywhere, and their sum the same bits (Note [The same bits on
    any number of ranks]). A rank adds its own up like a binary counter, of which every digit is a tree of gradients.
    All totals are divided by what the first slice counts, and the sum rescaled once all have been counted. What runs
    otherwise on rows of any length must give an element the same bits wherever in a row it lies, which torch's fused
    optimizer kernels do not, and norms are summed exactly (Note [Exact sums] in `norms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import ne
from typing import Any

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import Axes, coordinate, num_ranks
from ..comm.reduction import TREE, Reduction, Tree, is_idle, reduce_over, tree_sum
from ..core import tree
from ..core.arguments import wrong
from ..core.random import seeded
from ..layout.pieces import device_of
from ..sharding import transfer
from ..sharding.grad import Outcome, described, inputs, later_grads, reduce_all, run
from ..sharding.gradients import Gradients, settle
from ..sharding.plan import Plan, axes_of
from ..sharding.sharded import Sharded
from .loss_scale import NoLossScale

Later = Callable[[], Sharded]  # gradients that are made when they are first asked for


@dataclass(frozen=True)
class Recipe:
    """How a step makes gradients: `train_step`'s arguments of these names; `built` describes all of them."""

    loss_fn: Callable[..., Any]
    accumulate: int
    by: Reduction
    reduce_once: Any
    has_aux: bool
    with_extra: bool
    built: str


def gradients(
    recipe: Recipe, state: Any, batch: Any, args: Sequence[Any], lost: Any
) -> tuple[Sharded, Outcome, Tensor | None]:
    """The gradients times the loss scale, the outcome, and what to multiply those gradients by, if anything.

    Until then they are divided as if all micro-batches counted as much as the first.
    """
    if isinstance(recipe.by, Tree):
        return _in_slices(recipe, state, batch, args)
    params, accumulate = state.params, recipe.accumulate
    parts = _cut(batch, accumulate, _rank(params))
    grads = later_grads(params, params.plan.grads_over)
    outcomes: list[Outcome] = []

    # what was lost before enters with the last micro-batch: only then is it known what `share` its gradients will have
    put_back = transfer.set_aside(lost) if accumulate > 1 and isinstance(lost, Sharded) else None

    def divisor(outcome: Outcome) -> Tensor:
        if accumulate == 1:
            return outcome.divisor
        seen = [*outcomes, outcome]
        shared = seen[0].shared(accumulate)
        if put_back is not None and len(seen) == accumulate:
            put_back(_joined(seen).divisor / shared)
        return shared

    later = _later(recipe.reduce_once, params.plan)
    sums = later_grads(params, params.plan.grads_over) if later else grads
    places = _places(sums, params, recipe, lost, later)
    how = {"divisor": divisor, "whole": accumulate == 1}
    for outcome, into in _runs(recipe, state, parts, args, places, _rank(params), **how):
        outcomes.append(outcome)
        if into.reduced is not None and into.reduced is not sums:
            tree.map(lambda whole, more: whole.add_(more), sums(), into.reduced())
    if later:
        transfer.reduce_rest(sums(), grads(), later, recipe.by)
        settle(params.plan)
    outcome = _joined(outcomes)
    share = outcomes[0].shared(accumulate) / outcome.divisor if accumulate > 1 else None
    return grads(), outcome if accumulate > 1 else replace(outcome, aux=outcome.aux[0]), share


def _runs(
    recipe: Recipe,
    state: Any,
    parts: Sequence[Any],
    args: Sequence[Any],
    places: Iterable[Gradients],
    stream: int,
    **how: Any,
) -> Iterator[tuple[Outcome, Gradients]]:
    """Forward and backward of one micro-batch after another, with random numbers of that stream."""
    how |= {"has_aux": recipe.has_aux, "with_extra": recipe.with_extra, "built": recipe.built}
    if not isinstance(state.loss_scale, NoLossScale):
        how["scale"] = state.loss_scale.scale
    extra = state.extra
    for i, (part, into) in enumerate(zip(parts, places, strict=True)):
        given = [*[extra] * recipe.with_extra, inputs(state.params.plan, part), *args]
        versions = _versions(extra) if recipe.with_extra else []
        with seeded(state.rng, state.step, stream, i, device_of(state.params)):
            outcome = run(recipe.loss_fn, state.params, given, into, **how)
        _check_equal_parts(outcome, parts)
        if recipe.with_extra:
            _check_extra(extra, outcome.extra, versions)
            extra = outcome.extra
        yield outcome, into


def _versions(extra: Any) -> list[int | None]:
    """How often each leaf was written to; None for what does not know."""
    return [x._version if isinstance(x, Tensor) and not x.is_inference() else None for x in tree.leaves(extra)]


def _check_extra(old: Any, new: Any, versions: Sequence[int | None]) -> None:
    """Raise ValueError for an extra that a loss has written to, or that is not of the old one's form."""
    expected, got = (dict(tree.paths_to(x, Sharded)) for x in (old, new))
    for path, written in zip(tree.paths(tree.flatten(old)[1]), map(ne, versions, _versions(old)), strict=True):
        if written:
            raise ValueError(f"with_extra: extra leaf {path!r} was changed in place: write to a clone, and return that")
    if tree.structure_above(old, Sharded) != tree.structure_above(new, Sharded):
        lacks, more = [p for p in expected if p not in got], [p for p in got if p not in expected]
        raise ValueError(
            f"with_extra: the loss must return an extra of the structure that it was given: it lacks "
            f"{lacks[:3] or 'nothing'} and has {more[:3] or 'nothing'} besides"
            + ("" if lacks or more else f" (a {type(new).__name__} for a {type(old).__name__}, at some depth)")
        )
    for path, before in expected.items():
        if (form := _form(before)) != _form(got[path]):
            raise ValueError(
                f"with_extra: extra leaf {path!r}: expected {form}, as in the state, got {_form(got[path])}. "
                "Tensors keep shape and dtype, and all else its value: what changes must be a tensor."
            )


def _form(leaf: Any) -> str:
    """What a step keeps of a leaf of extra, in words."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}"
    return f"the Sharded at {id(leaf):#x}" if isinstance(leaf, Sharded) else repr(leaf)


def _in_slices(recipe: Recipe, state: Any, batch: Any, args: Sequence[Any]) -> tuple[Sharded, Outcome, Tensor]:
    params, plan, rank = state.params, state.params.plan, _rank(state.params)
    if plan.param_wire is not None or plan.grad_wire is not None:
        raise ValueError(
            "reduction='tree' with a wire: what it rounds depends on how many ranks there are. Use no wire."
        )
    slices, rows = _slices(batch, recipe.accumulate, params), _rows(batch)
    ranks = num_ranks(plan.live_mesh())
    grads, first = later_grads(params, plan.grads_over), list[Outcome]()
    sums, outcomes = list[Any](), list[Outcome]()

    def divisor(outcome: Outcome) -> Tensor:
        if not first:
            own = outcome.shared(1) if rank == 0 else torch.zeros_like(outcome.count)
            words = f"{described(outcome.kind, recipe.built)}, rows={rows} (reduction='tree': as many on every rank)"
            # where no call is compared, unequal rows make gradients nan: their squares then add up to more
            sent = torch.stack([own, own.new_full((), rows), own.new_full((), rows**2)])
            count, total, squares = primitives.total(sent, plan.live_mesh(), label="loss", more=words).unbind()
            first.append(replace(outcome, count=torch.where(squares * ranks == total.square(), count, torch.nan)))
        return first[0].shared(num)

    num = len(slices) * len(slices[0]) * ranks
    for at, parts in enumerate(slices):
        local = later_grads(params, (), local=True)
        places = _added_up(grads if len(slices) == 1 else None, local, len(parts), TREE)
        how = {"divisor": divisor, "alone": True, "whole": num == 1}
        runs = _runs(recipe, state, parts, args, places, rank * len(slices) + at, **how)
        outcomes.append(_joined([outcome for outcome, _ in runs]))
        _count_up(sums, at, local())
    if len(slices) > 1:
        reduce_all(sums[0], grads(), TREE)
    outcome = _everywhere(outcomes, plan)
    return grads(), outcome, first[0].shared(num) / outcome.divisor


def _count_up(sums: list[Any], at: int, more: Any) -> None:
    """Add the gradients of the slice of that number: complete subtrees of one size become one of twice the size."""
    while at % 2:
        more, at = tree.map(lambda a, b: tree_sum([a, b]), sums.pop(), more), at // 2
    sums.append(more)


def _everywhere(outcomes: Sequence[Outcome], plan: Plan) -> Outcome:
    pair = tree_sum([torch.stack([outcome.total, outcome.count]) for outcome in outcomes])
    axes = plan.rest(())
    total, count = reduce_over(pair, plan.live_mesh(), (), axes, "loss", None, TREE).wait().unbind()
    return replace(outcomes[0], total=total, count=count, aux=[aux for outcome in outcomes for aux in outcome.aux])


def _slices(batch: Any, accumulate: int, params: Sharded) -> list[list[Any]]:
    """This rank's slices, each as micro-batches."""
    plan, rank = params.plan, _rank(params)
    ranks = num_ranks(plan.live_mesh())
    rows = _rows(batch) * ranks
    num = min(plan.slices, rows & -rows)  # the largest power of two that divides it
    if not num or num % ranks:
        raise ValueError(
            f"reduction='tree': expected {ranks} rank(s), a power of two, to share {plan.slices} slices of a batch "
            f"whose {rows} rows (over all ranks) divide by their number: each needs one at least. Give every rank as "
            "many rows, a power of two times the same, or make_plan(..., slices=) more."
        )
    return [_cut(part, min(accumulate, rows // num), rank) for part in _cut(batch, num // ranks, rank)]


def _rows(batch: Any, num: int = 1) -> int:
    """The rows of a batch, which every leaf has in dim 0; 0 without leaves. ValueError names a leaf that has not.

    A batch of 0-d tensors alone, which is not to be cut, counts as one row.
    """
    leaves = tree.tops(batch, Sharded)
    if leaves and num == 1 and all(isinstance(x, Tensor) and not x.dim() for x in leaves):
        return 1
    rows = [len(x) if isinstance(x, Tensor) and x.dim() else None for x in leaves]
    if rows and (None in rows or len(set(rows)) > 1):
        raise ValueError(_wrong_leaf([path for path, _ in tree.paths_to(batch, Sharded)], leaves, rows))
    return rows[0] or 0 if rows else 0


def _wrong_leaf(paths: Sequence[str], leaves: Sequence[Any], rows: Sequence[int | None]) -> str:
    """What is wrong with the first leaf that does not have the rows of the first one that has any."""
    first = next((i for i, n in enumerate(rows) if n is not None), None)
    wrong = next(i for i, n in enumerate(rows) if n is None or n != rows[first or 0])
    leaf = leaves[wrong]
    expected = "the batch's rows along dim 0" if first is None else f"{rows[first]} rows along dim 0"
    like = "" if first in (None, wrong) else f", as leaf {paths[first or 0]!r} has"
    got = f"{rows[wrong]}" if rows[wrong] is not None else "a 0-d tensor"
    got = got if isinstance(leaf, Tensor) else f"{type(leaf).__name__}, which is no tensor"
    return (
        f"batch leaf {paths[wrong]!r}: expected {expected}{like}, got {got}. Data are tensors (torch.as_tensor) with "
        "all of the batch's rows; what has none goes to the loss uncut, as one of the args: step(state, batch, *args)."
    )


def _cut(batch: Any, num: int, rank: int) -> list[Any]:
    """The micro-batches. ValueError for a batch that cannot give each of them a row."""
    rows = _rows(batch, num)
    leaves, spec = tree.flatten(batch)
    if rows < num and (leaves or num > 1):
        raise ValueError(
            f"batch leaf {next(iter(tree.paths(spec)), '')!r}: expected at least {num} row(s) along dim 0, one a "
            f"micro-batch, got {rows} on rank {rank}. Every rank needs data: give this one a row whose weight in "
            "fshard.Mean's count is 0."
        )
    if num == 1:
        return [batch]
    cuts = [x.tensor_split(num) for x in leaves]
    return [tree.unflatten(spec, [cut[i] for cut in cuts]) for i in range(num)]


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    total = torch.stack([o.total for o in outcomes]).sum()
    count = torch.stack([o.count for o in outcomes]).sum()
    last = outcomes[-1]
    return Outcome(total, count, outcomes[0].kind, outcomes[0].dtype, last.extra, [o.aux for o in outcomes])


def check_reduce_once(reduce_once: Any, by: Reduction) -> None:
    """Raise TypeError for what is neither a truth value nor names, ValueError for names where slices are added up."""
    if isinstance(reduce_once, bool):
        return
    names = (reduce_once,) if isinstance(reduce_once, str) else reduce_once
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(wrong("reduce_once", reduce_once, "True or False, or the names of axes of the mesh"))
    if isinstance(by, Tree):
        raise ValueError(
            f"reduce_once={reduce_once!r} with reduction='tree': a rank adds all its slices up, and gradients are "
            "reduced once over all axes: leave reduce_once out"
        )


def _later(reduce_once: Any, plan: Plan) -> Axes:
    """The axes over which gradients are reduced after the last micro-batch alone, those before it being scattered."""
    if isinstance(reduce_once, bool):
        return ()
    axes = (reduce_once,) if isinstance(reduce_once, str) else reduce_once
    for axis in axes if plan.axes else axes_of("reduce_once", reduce_once, {}):
        if axis in plan.grads_over or axis not in dict(plan.axes):
            others = ", ".join(map(repr, plan.rest(plan.grads_over))) or "none"
            raise ValueError(
                f"reduce_once={reduce_once!r}: expected axes of the mesh that gradients are not cut over ({others}), "
                f"got {axis!r}. With reduce_once=True every rank keeps whole gradients, reduced once over all axes."
            )
    return tuple(axes) if plan.axes else ()


def _places(grads: Later, params: Sharded, recipe: Recipe, lost: Any, later: Axes) -> Iterator[Gradients]:
    """Where the gradients of each micro-batch go; what does not go to `grads` itself is to be added to it."""
    over, num, by = params.plan.grads_over, recipe.accumulate, recipe.by
    if is_idle(by, params.plan.axes):
        yield from (Gradients(None, grads, add=i > 0) for i in range(num))
    elif recipe.reduce_once and not later:
        yield from _added_up(grads, later_grads(params, (), local=True), num, by, lost)
    else:
        made = (grads if i == 0 else later_grads(params, over) for i in range(num))
        yield from (Gradients(into, by=by, lost=lost, later=later) for into in made)


def _added_up(reduced: Later | None, local: Later, num: int, by: Reduction, lost: Any = ()) -> Iterator[Gradients]:
    """Added up whole in `local`, and with the last reduced."""
    return (Gradients(reduced if i == num - 1 else None, local, i > 0, by, lost) for i in range(num))


def _check_equal_parts(outcome: Outcome, parts: Sequence[Any]) -> None:
    if outcome.kind is not Tensor or len(parts) == 1:
        return
    sizes = {len(tree.leaves(part)[0]) for part in parts}
    if len(sizes) > 1:
        raise ValueError(
            f"the loss function: a plain scalar is the mean of equally weighted micro-batches, but these have "
            f"{sorted(sizes)} rows. Return fshard.Mean(total, count), or a batch that divides by {len(parts)}."
        )


def _rank(params: Sharded) -> int:
    return coordinate(params.plan.live_mesh(), params.plan.rest(()))
