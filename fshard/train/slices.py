"""A step's gradients with `reduction="tree"`: the same bits on any number of ranks.

Note [Slices]
    With `reduction="tree"` the batch of all ranks is cut into slices; their number is the largest power of two dividing
    the number of rows, at most `TreeSums.slices`. Each slice has its own random numbers. So gradients of slices do not
    depend on the number of ranks, nor do the bits of the sum in a balanced tree over all slices (Note [The same bits on
    any number of ranks] in `comm/reduction.py`).

    A matrix product may round differently if an operand's address modulo 16 bytes differs (MKL on AMD processors). So
    the loss gets a copy of each slice, at a multiple of 64 bytes; leaves of parameters start at multiples of 16 bytes
    (Note [Flat buffers] in `plan/plan.py`). Outside the loss, an element's result must not depend on its offset in a
    row: a step does not use torch's fused optimizers, and sums norms without rounding (Note [Exact sums] in
    `layout/norms.py`).

    A rank sums its slices like a binary counter with trees of gradients as digits (`_add_to_counter`). Every total is
    divided by the first slice's count, because later counts are not known yet; the sum is rescaled at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import consensus, primitives
from ..comm.mesh import num_ranks
from ..comm.reduction import TREE, TreeSums, tree_sum
from ..core import tree
from ..core.losses import NO_GRADIENT, Outcome, loss_text
from ..core.scalars import on_device
from ..core.tracing import fresh_copy
from ..core.tree import Tree
from ..grad.grad import later_grads, reduce_all
from ..layout.rules import COPIES, reshard
from ..plan.plan import Plan
from ..sharding.sharded import Sharded
from .accumulate import Recipe, StepGradients, cut, joined_outcomes, num_rows, rank_of, run_each, summed_locally


def gradients_of_slices(recipe: Recipe, state: Tree, batch: Tree, args: Sequence[Tree]) -> StepGradients:
    params, plan = state.params, state.params.plan
    if plan.param_wire is not None or plan.grad_wire is not None:
        raise ValueError("reduction='tree' with a wire: what it rounds depends on the number of ranks. Use no wire.")
    slices, rows, rank = _cut_slices(batch, recipe, params), num_rows(batch), rank_of(params)
    num = len(slices) * len(slices[0]) * num_ranks(plan.live_mesh())  # over all ranks
    first: list[Outcome] = []  # this rank's first outcome, with rank 0's first count

    def divisor(outcome: Outcome) -> Tensor:
        if not first:
            first.append(replace(outcome, weight=_count_of_first_slice(outcome, recipe, rows, plan, rank)))
        return first[0].shared(num)

    grads, counter, outcomes = later_grads(params, plan.grads_over), list[Sharded](), list[Outcome]()
    for number, micro_batches in enumerate(slices):
        local = later_grads(params, (), local=True)  # of one slice, (n,) for each kind
        # a single slice is reduced in its backward; the sum of several slices, after the last
        reduced = grads if len(slices) == 1 else None
        destinations = summed_locally(reduced, local, len(micro_batches), TREE)
        stream = rank * len(slices) + number  # the slice's number among all ranks'
        micro_batches = tree.map_tops(lambda x: x if isinstance(x, Sharded) else fresh_copy(x), Sharded, micro_batches)
        # `alone`: `_over_ranks` sums the outcomes
        runs = run_each(recipe, state, micro_batches, args, destinations, stream, divisor, alone=True, whole=num == 1)
        outcomes.append(joined_outcomes([outcome for outcome, _ in runs]))
        _add_to_counter(counter, number, local.whole())
    if len(slices) > 1:
        reduce_all(counter[0], grads.whole(), TREE)
    outcome = _over_ranks(outcomes, plan)
    torch._assert_async(outcome.sums()[-1], f"{NO_GRADIENT}, in no slice")  # private: no public name
    return StepGradients(grads.whole(), outcome, first[0].shared(num) / outcome.divisor)


def _cut_slices(batch: Tree, recipe: Recipe, params: Sharded) -> list[list[Tree]]:
    assert isinstance(recipe.by, TreeSums)
    most, ranks = recipe.by.slices, params.plan.num_ranks(params.plan.data)
    rows = num_rows(batch) * ranks
    num = min(most, rows & -rows)  # the largest power of two that divides `rows`
    if not num or num % ranks:
        raise ValueError(
            f"reduction='tree': expected {ranks} rank(s), a power of two, to share {most} slices of a batch "
            f"whose {rows} rows (over all ranks) divide by their number: each needs one at least. Give every rank as "
            "many rows, a power of two times the same, or more slices: reduction=fshard.reduction.TreeSums(slices=)."
        )
    return [cut(part, min(recipe.accumulate, rows // num)) for part in cut(batch, num // ranks)]


def _count_of_first_slice(outcome: Outcome, recipe: Recipe, rows: int, plan: Plan, rank: int) -> Tensor:
    """Return the count of rank 0's first micro-batch; NaN if ranks differ in their number of rows.

    Ranks compare the text of one small collective, with the number of rows, and on CPUs of threads. Without texts: n
    ranks have equally many rows exactly if n times the sum of squares is the square of the sum.
    """
    count = outcome.shared(1) if rank == 0 else torch.zeros_like(outcome.count)
    text, checksum = loss_text(outcome.kind, outcome.dtype, outcome.aux, outcome.output)
    words = f"{text}{recipe.built}, rows={rows}"
    # a GPU's bits do not depend on the number of threads
    words += f", threads={torch.get_num_threads()}" * (outcome.count.device.type == "cpu")
    words += " (reduction='tree': as many on every rank)"
    numbers = [on_device(x, count.device) for x in (rows, rows**2, recipe.stamp + checksum)]
    sent, mesh = torch.stack([count, *numbers]), plan.live_mesh()
    sums = primitives.total(sent, mesh, label="loss", more=words)
    count, total, squares = consensus.without_place(sums, sent, mesh).unbind()
    return torch.where(squares * num_ranks(plan.live_mesh()) == total.square(), count, torch.nan)


def _add_to_counter(counter: list[Sharded], number: int, grads: Sharded) -> None:
    """Add a slice's gradients; sums of equally many slices are added up, as a counter carries digits."""
    while number % 2:
        grads, number = tree.map(lambda a, b: tree_sum([a, b]), counter.pop(), grads), number // 2
    counter.append(grads)


def _over_ranks(outcomes: Sequence[Outcome], plan: Plan) -> Outcome:
    """Sum outcomes of all slices and ranks in the tree's order; aux is this rank's."""
    local = tree_sum([torch.stack([*outcome.sums()]) for outcome in outcomes])
    old = COPIES.dual(plan.axis_names)
    sums = reshard(local, old, COPIES, plan.live_mesh(), "loss", by=TREE).wait().unbind()
    return replace(outcomes[0], sums=lambda: sums, weight=None, aux=[x for outcome in outcomes for x in outcome.aux])
