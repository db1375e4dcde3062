"""Micro-batches: cut a batch, add up their gradients; and `join_batches`, for ranks with fewer batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter, ne
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm import consensus, primitives
from ..comm.announce import is_announcing
from ..comm.mesh import AnyMesh, Axes, ProcessMesh, adapted, axis_sizes, coordinate, mesh_device
from ..comm.ranks import MismatchError
from ..comm.reduction import Reduction, TreeSums, is_idle
from ..core import tree
from ..core.arguments import expect, wrong
from ..core.losses import Outcome, averaged
from ..core.random import seeded
from ..core.scalars import Number
from ..core.storage import value_bytes, writes
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..grad.grad import later_grads, run_loss
from ..grad.travel import Gradients, Rooms, settle
from ..grad.under_way import Gathered
from ..layout.pieces import device_of
from ..plan.partitions import axes_of
from ..plan.plan import Plan
from ..sharding.sharded import Sharded
from ..update.transforms import Labels
from .loss_scale import NoLossScale

T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """The arguments of `train_step`, and values of one step.

    - `built`: the arguments as text, with the state's step and seed.
    - `stamp`: a number made of step and seed (Note [Built alike] in `describe.py`).
    - `gathered`: with `keep_gathered`, gathered units until the last micro-batch ends; else None.
    - `kwargs`: the loss's keyword arguments.
    """

    loss_fn: Callable[..., Tree]
    accumulate: int
    by: Reduction
    reduce_once: bool | str | tuple[str, ...]
    has_aux: bool
    with_extra: bool
    clip_norm: float | None
    skip_labels: Labels
    donate: bool
    room: int
    built: str
    stamp: Number
    gathered: Gathered | None
    kwargs: Mapping[str, Tree]


class StepGradients(NamedTuple):
    """The results of a step's forwards and backwards.

    - `grads`: gradients of the scaled loss, divided as if every micro-batch had the first micro-batch's count.
    - `share`: a factor for `grads`, to correct this divisor (0-d; None: 1).
    """

    grads: Sharded
    outcome: Outcome
    share: Tensor | None


def gradients_of_micro_batches(recipe: Recipe, state: Tree, batch: Tree, args: Sequence[Tree]) -> StepGradients:
    params, num = state.params, recipe.accumulate
    plan, rank = params.plan, rank_of(params)
    micro_batches = cut(batch, num)
    outcomes: list[Outcome] = []

    def divisor(outcome: Outcome) -> Tensor:
        # the first micro-batch's divisor for all: later counts are not known yet
        return outcome.divisor if num == 1 else (outcomes or [outcome])[0].shared(num)

    grads = later_grads(params, plan.grads_over, room=recipe.room)
    reduced_last = _reduced_last(recipe.reduce_once, plan)
    sums = later_grads(params, plan.grads_over, room=recipe.room) if reduced_last else grads
    destinations = _destinations(sums, params, recipe, reduced_last)
    runs = run_each(recipe, state, micro_batches, args, destinations, rank, divisor, whole=num == 1)
    for outcome, into in runs:
        outcomes.append(outcome)
        if into.reduced is not None and into.reduced is not sums:
            tree.map(lambda total, more: total.add_(more), sums.whole(), into.reduced.whole())
    if reduced_last:
        Gradients(grads, by=recipe.by).all_reduce_later(sums.whole(), reduced_last)
        settle(plan)
    outcome = joined_outcomes(outcomes)
    if num == 1:
        return StepGradients(grads.whole(), replace(outcome, aux=outcome.aux[0], several=False), None)
    return StepGradients(grads.whole(), outcome, outcomes[0].shared(num) / outcome.divisor)


def run_each(
    recipe: Recipe,
    state: Tree,
    micro_batches: Sequence[Tree],
    args: Sequence[Tree],
    destinations: Iterable[Gradients],
    stream: int,
    divisor: Callable[[Outcome], Tensor],
    *,
    alone: bool = False,
    whole: bool,
) -> Iterator[tuple[Outcome, Gradients]]:
    scaler = state.loss_scale
    scale = (lambda seed: seed) if isinstance(scaler, NoLossScale) else scaler.scale
    extra = state.extra

    def checked_divisor(outcome: Outcome) -> Tensor:
        # before the backward: if one rank raised an error later, only other ranks would update
        _check_equal_parts(outcome, micro_batches, state.params)
        return divisor(outcome)

    for number, (micro_batch, into) in enumerate(zip(micro_batches, destinations, strict=True)):
        arguments = [*[extra] * recipe.with_extra, micro_batch, *args]
        versions = _versions(extra) if recipe.with_extra else []
        with seeded(state.rng, state.step, stream, number, device_of(state.params)):
            outcome = run_loss(
                recipe.loss_fn,
                state.params,
                (arguments, recipe.kwargs),
                into,
                has_aux=recipe.has_aux,
                with_extra=recipe.with_extra,
                built=recipe.built,
                place=recipe.stamp,
                divisor=checked_divisor,
                alone=alone,
                whole=whole,
                scale=scale,
                gathered=recipe.gathered,
            )
        if recipe.with_extra:
            extra = _checked_extra(extra, outcome.extra, versions)
            outcome = replace(outcome, extra=extra)
        yield outcome, into


def _versions(extra: Tree) -> list[int | None]:
    return [writes(x) if isinstance(x, Tensor) else None for x in tree.leaves(extra)]


def _checked_extra(old: Tree, new: Tree, versions: Sequence[int | None]) -> Tree:
    """ValueError if a loss wrote to its extra, or changed its structure, a shape or a dtype."""
    for path, written in zip(tree.paths(old), map(ne, versions, _versions(old)), strict=True):
        if written:
            raise ValueError(f"with_extra: extra leaf {path!r} was changed in place: write to a clone, and return that")
    try:
        new = tree.map_tops(lambda before, after: after, Sharded, old, new)
    except ValueError:
        must = "the loss must return an extra of the structure that it was given"
        raise ValueError(f"with_extra: {must}: {tree.difference(old, new)}") from None
    expected, got = (dict(tree.paths_to(x, Sharded)) for x in (old, new))
    for path, before in expected.items():
        if (form := _argument_form(before)) != _argument_form(got[path]):
            raise ValueError(
                f"with_extra: extra leaf {path!r}: expected {form}, as in the state, got {_argument_form(got[path])}. "
                "Tensors keep shape and dtype, and all else its value: what changes must be a tensor."
            )
    return new


def _argument_form(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{list(leaf.shape)} on {leaf.device}"
    return f"the Sharded at {id(leaf):#x}" if isinstance(leaf, Sharded) else repr(leaf)


def joined_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    first, last = outcomes[0], outcomes[-1]
    if len(names := list(dict.fromkeys(averaged(outcome.aux) for outcome in outcomes))) > 1:
        raise ValueError(
            f"the loss function: aux must have the same Means and Sums in every micro-batch, got {names[0] or 'none'} "
            f"and {names[1] or 'none'}"
        )
    sums = [torch.stack(each).sum() for each in zip(*(outcome.sums() for outcome in outcomes), strict=True)]
    return replace(first, sums=lambda: sums, weight=None, extra=last.extra, aux=[x.aux for x in outcomes], several=True)


def check_reduce_once(reduce_once: object, by: Reduction) -> None:
    if isinstance(reduce_once, bool):
        return
    names = (reduce_once,) if isinstance(reduce_once, str) else reduce_once
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(wrong("reduce_once", reduce_once, "True or False, or the names of axes of the mesh"))
    if isinstance(by, TreeSums):
        raise ValueError(
            f"reduce_once={reduce_once!r} with reduction='tree': a rank adds all its slices up, and gradients are "
            "reduced once over all axes: leave reduce_once out"
        )


def _reduced_last(reduce_once: bool | str | tuple[str, ...], plan: Plan) -> Axes:
    """Return the axes over which gradients are all-reduced after the last micro-batch."""
    if isinstance(reduce_once, bool):
        return ()
    axes = (reduce_once,) if isinstance(reduce_once, str) else reduce_once
    # on one device `axes_of` raises for names other than "shard" and "replicate"
    for axis in axes if plan.axes else axes_of("reduce_once", reduce_once, {}):
        if axis in plan.grads_over or axis not in dict(plan.axes):
            others = ", ".join(map(repr, plan.rest(plan.grads_over))) or "none"
            raise ValueError(
                f"reduce_once={reduce_once!r}: expected axes of the mesh that gradients are not cut over ({others}), "
                f"got {axis!r}. With reduce_once=True every rank keeps whole gradients, reduced once over all axes."
            )
    return tuple(axes) if plan.axes else ()


def _destinations(sums: Rooms, params: Sharded, recipe: Recipe, reduced_last: Axes) -> Iterator[Gradients]:
    over, num, by = params.plan.grads_over, recipe.accumulate, recipe.by
    if is_idle(by, params.plan.axes):  # one device: every backward adds to one buffer
        yield from (Gradients(None, sums, add=number > 0) for number in range(num))
    elif recipe.reduce_once and not reduced_last:
        yield from summed_locally(sums, later_grads(params, (), local=True, room=recipe.room), num, by)
    else:
        buffers = (sums if number == 0 else later_grads(params, over, room=recipe.room) for number in range(num))
        yield from (Gradients(reduced, by=by, later=reduced_last) for reduced in buffers)


def summed_locally(reduced: Rooms | None, local: Rooms, num: int, by: Reduction) -> Iterator[Gradients]:
    """Add whole gradients to `local`; reduce them with the last micro-batch."""
    return (Gradients(reduced if number == num - 1 else None, local, number > 0, by) for number in range(num))


def _check_equal_parts(outcome: Outcome, micro_batches: Sequence[Tree], params: Sharded) -> None:
    if outcome.kind is not Tensor:
        return
    rows = [[len(x) for x in tree.tops(batch, Sharded) if isinstance(x, Tensor) and x.dim()] for batch in micro_batches]
    sizes = {max(each) for each in rows if each}
    if len(sizes) > 1 or 0 in sizes:
        raise ValueError(
            f"the loss function: a plain scalar is the mean of equally weighted micro-batches, but these have "
            f"{sorted(sizes)} rows on rank {rank_of(params)}. Return fshard.Mean(total, count), which may be (0, 0), "
            f"or give every rank a batch of rows that divides by {len(micro_batches)}."
        )


def rank_of(params: Sharded) -> int:
    """Return this rank's number among ranks with different batches."""
    return coordinate(params.plan.live_mesh(), params.plan.data)


def check_equal_batches(batch: Tree, plan: Plan) -> None:
    """In checked calls and simulated worlds, raise MismatchError if batches differ along an axis not in `plan.data`."""
    axes, grid = plan.rest(plan.data), adapted(plan.live_mesh())
    if not axes or grid is None or grid.abstract or is_tracing():
        return
    if isinstance(grid, ProcessMesh) and not is_announcing():
        return
    comparable = Tensor | str | int | float  # and numpy's arrays; no Sharded: its shards differ by rank
    leaves = sorted(tree.paths_to(batch, Sharded), key=itemgetter(0))
    named = [(path, x) for path, x in leaves if isinstance(x, comparable) or hasattr(x, "__array__")]
    number = consensus.unlike_index([_numbered(x) for _, x in named], grid, axes)
    if number is not None:
        raise MismatchError(
            f"batch: leaf {named[number][0]!r}: expected the same on all ranks along {', '.join(map(repr, axes))}, "
            f"along which no batches differ (data={plan.data}), got others. Give these ranks the same rows, or name "
            "the axis in make_plan(data=)"
        )


def _numbered(x: Tree) -> Tensor:
    """Return integers whose sum shows a change of elements, their order, shape or dtype."""
    text = f"{x.dtype}{[*x.shape]}" if isinstance(x, Tensor) else repr(getattr(x, "tolist", lambda: x)())
    words = torch.tensor([*text.encode()], device="cpu")
    words = torch.cat([words.to(x.device), value_bytes(x).long()]) if isinstance(x, Tensor) else words
    return words * torch.arange(1, 2 * len(words), 2, device=words.device)


def join_batches(data: Iterable[T], mesh: AnyMesh = None, like: T | None = None) -> Iterator[tuple[T, Tensor]]:
    """Yield `(batch, weight)` until all ranks' `data` end; a rank out of batches repeats its last one with weight 0.

    Give the weight (0-d, 1 or 0) to the step as one of `args`, and multiply total and count of the loss's `Mean` by the
    weight: repeated batches do not count, and every rank takes part in every collective. Each batch, and the end,
    costs a small collective over the ranks of `mesh`. A rank without any batch repeats `like` (ValueError if None).

    >>> [(batch, weight.item()) for batch, weight in join_batches([1, 2])]
    [(1, 1.0), (2, 1.0)]
    """
    expect("join_batches: data", data, isinstance(data, Iterable), "batches to go through")
    axis_sizes(mesh)
    batches, batch = iter(data), like
    while True:
        following = [*islice(batches, 1)]  # empty when `data` has ended
        weight = torch.full((), float(len(following)), dtype=torch.float32, device=mesh_device(mesh))
        has_any = primitives.total(weight, mesh, op="max", label="batches")
        # all ranks stop at the same step; a rank with a batch does not read `has_any`: the host would wait
        if not following and not has_any:
            return
        batch = following[0] if following else batch
        if batch is None:
            raise ValueError("join_batches: this rank has no batch at all: give one as `like`, whose weight will be 0")
        yield batch, weight


def cut(batch: Tree, num: int) -> list[Tree]:
    """Cut a batch into `num` views along dim 0; with fewer rows than `num` the last views are empty."""
    if num == 1:  # leaves of an uncut batch may have different numbers of rows
        return [batch]
    num_rows(batch, num)
    leaves, spec = tree.flatten(batch)
    if not leaves:
        raise ValueError(f"batch: expected rows to cut into {num} micro-batches, got a tree without tensors")
    parts = [leaf.tensor_split(num) for leaf in leaves]
    return [tree.unflatten(spec, [part[number] for part in parts]) for number in range(num)]


def num_rows(batch: Tree, num: int = 1) -> int:
    """Return the number of rows that all leaves have: 0 without leaves, 1 if `num` is 1 and all leaves are 0-d.

    ValueError for a leaf with another number of rows.
    """
    leaves = tree.tops(batch, Sharded)
    if leaves and num == 1 and all(isinstance(x, Tensor) and not x.dim() for x in leaves):
        return 1
    rows = [len(x) if isinstance(x, Tensor) and x.dim() else None for x in leaves]
    if rows and (None in rows or len(set(rows)) > 1):
        raise ValueError(_wrong_leaf([path for path, _ in tree.paths_to(batch, Sharded)], leaves, rows))
    return rows[0] or 0 if rows else 0


def _wrong_leaf(paths: Sequence[str], leaves: Sequence[object], rows: Sequence[int | None]) -> str:
    first = next((i for i, n in enumerate(rows) if n is not None), None)
    wrong = next(i for i, n in enumerate(rows) if n is None or n != rows[first or 0])
    leaf = leaves[wrong]
    expected = "the batch's rows along dim 0" if first is None else f"{rows[first]} rows along dim 0"
    like = "" if first in (None, wrong) else f", as leaf {paths[first or 0]!r} has"
    got = f"{rows[wrong]}" if rows[wrong] is not None else "a 0-d tensor"
    got = got if isinstance(leaf, Tensor) else f"{type(leaf).__name__}, which is no tensor"
    return (
        f"batch leaf {paths[wrong]!r}: expected {expected}{like}, got {got}. A batch that is cut has tensors "
        "(torch.as_tensor) with all of its rows; what has none goes to the loss uncut, as one of the args: "
        "step(state, batch, *args)."
    )
