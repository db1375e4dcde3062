"""A step that updates each unit in its backward, as soon as the unit's gradients are reduced.

Note [Steps that update in the backward]
    `Updates` gets the sum of each unit (Note [Updates in a backward]), and runs the optimizer on this unit alone: on
    its flat parameters, and on the same shard of every tree in the optimizer's state. The optimizer is elementwise, so
    the update is the same. Every unit reads the state's 0-d tensors (counts) from before the step. Clipping needs the
    norm of all gradients first, so the forward and backward run twice.

Note [Updates in a backward]
    With `Gradients.take` a backward hands each unit's sum over ranks to a function, which may write to the parameters
    of that unit: an optimizer that updates them. Then the memory of the sum is free, so gradients of two units are in
    memory, not of all.

    A unit must not be written to while the backward still reads it. Gathered buffers are memory of their own, so what
    counts is whether the unit will be gathered again. It will not: autograd runs the nodes that were made last first,
    and a unit's anchor is made when the unit is read first (Note [Anchors] in `autograd.py`), so every node that reads
    the unit, and every checkpoint that reads it again, comes before its gradients. If a program finds another way, the
    tape raises an error. Leaves that this rank has whole are copied when they are read, as if they were gathered: else
    the loss, and what autograd does not know of (attributes of a user's function), would read them where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..comm import primitives
from ..comm.mesh import coordinate
from ..comm.ranks import Pending
from ..comm.reduction import Reduction, TreeSums
from ..core import tree
from ..core.losses import Outcome
from ..core.random import UPDATE, Seeds
from ..core.scalars import beside, wide
from ..core.tracing import assigned
from ..core.tree import Tree
from ..grad.grad import apart
from ..grad.travel import Gradients, OnSum
from ..layout.layout import Layout
from ..layout.norms import square_sum
from ..layout.pieces import device_of
from ..layout.rules import reshard
from ..sharding.schedule import View
from ..sharding.sharded import Sharded, in_new_containers, refine, shards_of, whole_view
from ..update.base import FoundInf, Label, Transform, clip_factor
from ..update.elementwise import update_part
from ..update.transforms import LabelState
from .accumulate import Recipe, rank_of, run_each
from .loss_scale import NoLossScale

# by unit and kind: start and length of an interval in the unit's shard, and the tensor and start of it in a state
Runs: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[int, int, int, int]]]

# `state` is a `TrainState` throughout, whose module imports this one.


class Stepped(NamedTuple):
    """The results of one step: new state, loss, norm of all gradients, and skipped updates."""

    state: Tree
    outcome: Outcome
    norm: Tensor
    found_inf: Tensor


def step_in_backward(recipe: Recipe, tx: Transform, state: Tree, batch: Tree, args: Sequence[Tree]) -> Stepped:
    """Update parameters and optimizer state of a donated state in place, unit by unit.

    An error after an update gives the state away.
    """
    _check_state(state)
    given, state = state, replace(state, extra=own_extra(state.extra, [state.params.trainable, state.opt_state]))
    factor = None
    if recipe.clip_norm is not None:
        first = Squares(state.params)
        _run(recipe, state, batch, args, first.add)
        factor = clip_factor(first.norm(), recipe.clip_norm)
    squares, updates = Squares(state.params), Updates(tx, state, factor)

    def take(unit: int, kind: int, total: Tensor) -> None:
        squares.add(unit, kind, total)
        updates.make(unit, kind, total)

    try:
        outcome = _run(recipe, state, batch, args, take)
        opt_state, norm = updates.finish(), squares.norm()
    except BaseException as failure:
        if updates.begun:
            given.give_away()
            failure.add_note(
                "train_step(in_backward=True): units were updated before this error, so the state is lost. Go on from "
                "a saved one."
            )
        raise
    new = {"params": Sharded(state.params.view, state.params.tensors), "opt_state": opt_state, "step": state.step + 1}
    new["extra"] = outcome.extra if recipe.with_extra else state.extra
    return Stepped(replace(state, **new), outcome, norm, (~norm.isfinite()).float())


def own_extra(extra: Tree, overwritten: Sequence[Tree]) -> Tree:
    """Copy the leaves of extra in the memory of `overwritten`, and make a new container for each `Sharded`."""

    def copied(x: Tree) -> Tree:
        if isinstance(x, Sharded):  # its container would be given away with the state
            return Sharded(x.view, apart(list(x.tensors), overwritten))
        return apart(x, overwritten)

    return tree.map_tops(copied, Sharded, extra)


def check_in_backward(tx: Transform, by: Reduction, donate: bool, how: Mapping[str, object]) -> None:
    """Raise ValueError for arguments of `train_step` that need all gradients before an update.

    `how` are others of its arguments, by name.
    """
    accumulate, reduce_once = how["accumulate"], how["reduce_once"]
    reasons = {
        "donate=False: the state is updated in place. Use donate=True": not donate,
        f"accumulate={accumulate}: gradients of micro-batches are added up first. Use accumulate=1": accumulate != 1,
        f"reduce_once={reduce_once!r}: there is one micro-batch. Leave reduce_once out": reduce_once is not False,
        "keep_gathered=True: there is one micro-batch. Leave keep_gathered out": "keep_gathered" in how,
        "reduction='tree': gradients of slices are added up first. Use another reduction": isinstance(by, TreeSums),
        "skip_labels: whether a label is skipped is known last. Leave skip_labels out": how["skip_labels"] is not None,
        "tx: expected a transformation with over='elements' (adamw, sgd, lion, a chain of such), or optim.by_label of "
        "such alone, got another one, which may look at whole leaves or at norms. Use in_backward=False": not (
            is_by_elements(tx)
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"train_step(in_backward=True) with {reason}.")


def is_by_elements(tx: Transform) -> bool:
    """True if an update of some elements reads no others."""
    return all(part.over == "elements" for part in (tx.parts or {None: tx}).values())


def _check_state(state: Tree) -> None:
    """Raise ValueError for a state that needs all gradients before the first update."""
    plan = state.params.plan
    if not isinstance(state.loss_scale, NoLossScale):
        raise ValueError(
            "train_step(in_backward=True): expected a state without a loss scale, got one with "
            f"{type(state.loss_scale).__name__}, which skips the whole update if any gradient overflows. Use "
            "in_backward=False, or bfloat16 without a loss scale."
        )
    if any(kind.host and kind.trainable for kind in plan.kinds):
        raise ValueError(
            "train_step(in_backward=True): the plan has trainable leaves in host memory, whose updates wait for the "
            "device. Use in_backward=False, or a plan without them."
        )


def _run(recipe: Recipe, state: Tree, batch: Tree, args: Sequence[Tree], take: OnSum) -> Outcome:
    """Run forward and backward of the batch; `take` gets the sum of each unit and kind, (n / W_grads,)."""
    plan = state.params.plan
    sums = Sharded(whole_view(plan, plan.grads_over, state.params.trainable.view.kinds), [])
    into = Gradients(lambda: sums, by=recipe.by, take=take, device=device_of(state.params))
    rank = rank_of(state.params)
    ((outcome, _),) = run_each(recipe, state, [batch], args, [into], rank, lambda x: x.divisor, whole=True)
    return outcome


class Squares:
    """The sum of squares of a backward's gradients, unit by unit."""

    def __init__(self, params: Sharded):
        self._plan = params.plan
        self._dtype = max((wide(row.dtype) for row in params.trainable.tensors), key=lambda dtype: dtype.itemsize)
        # float64, 0-d, by the axes along which ranks hold other elements: copies count once. All square sums are kept:
        # GPUs make them on the stream of sums, and one dropped there would be overwritten while it is read.
        none = torch.zeros((), dtype=torch.float64, device=device_of(params))
        kinds = params.trainable.view.kinds
        self._sums = {over: [none] for over in ((), *(self._plan.apart(k, self._plan.grads_over) for k in kinds))}

    def add(self, unit: int, kind: int, total: Tensor) -> None:
        """Add the squares of the gradients of one unit and kind."""
        self._sums[self._plan.apart(kind, self._plan.grads_over)].append(square_sum(total))

    def norm(self) -> Tensor:
        """Return the 2-norm over all ranks: 0-d, from one collective."""
        mesh, local = self._plan.live_mesh(), {over: torch.stack(squares).sum() for over, squares in self._sums.items()}
        totals = [primitives.total(x, mesh, over, label="norm") for over, x in local.items()]
        return torch.stack(totals).sum().sqrt().to(self._dtype)


def _runs(layout: Layout, view: View) -> Runs:
    """Return the intervals of a view's shards with the leaves of one label, of this layout; made once."""
    known, key = layout.derived.runs, (view.plan.fingerprint, view.over, view.kinds)
    if key not in known:
        runs = dict[tuple[int, int], list[tuple[int, int, int, int]]]()
        for span in layout.mine:
            row = view.layout.row_of[span.leaf]
            start = view.layout.span_of[span.leaf].start - row.start
            runs.setdefault((row.unit, row.kind), []).append((start, span.numel, span.tensor, span.start))
        known[key] = runs
    made: Runs = known[key]
    return made


class Updates:
    """The updates of one step, unit by unit, in the memory of a state; gradients are multiplied by `factor`."""

    def __init__(self, tx: Transform, state: Tree, factor: Tensor | None, skip: FoundInf | None = None):
        self._params, self._tx, self._old, self._factor, self._skip = state.params, tx, state.opt_state, factor, skip
        fine = refine(state.params.trainable, state.params.plan.state_over)
        self._view, self.shards = fine.key, shards_of(fine)  # (n / W_state,): this rank updates them
        self._seeds = Seeds(state.rng, state.step, device_of(state.params)) if tx.draws else None
        self._new: dict[Label, Tree] = {}  # the newest state by label; None: of an optimizer without labels
        self._gathers: list[Pending] = []
        self.begun = False

    def make(self, unit: int, kind: int, total: Tensor) -> None:
        """Update one unit and kind by the sum of its gradients, (n / W_grads,)."""
        self.begun = True
        if self._seeds is None:
            return self._made(unit, kind, total)
        plan = self._params.plan
        shard = coordinate(plan.live_mesh(), plan.rule(kind, plan.state_over).over)
        with assigned(UPDATE, self._seeds.at(unit, kind, shard)):
            return self._made(unit, kind, total)

    def _made(self, unit: int, kind: int, total: Tensor) -> None:
        params, grads = self.shards[unit, kind], self._own(total, kind)  # (n / W_state,)

        # layout: of a label's leaves
        def update(tx: Transform, state: Tree, skip: FoundInf | None, layout: Layout | None = None) -> Tree:
            if layout is None:  # the state is cut as parameters are
                return update_part(tx, state, [params], [grads], lambda x: [x.shard(unit, kind)], skip, own_grads=True)
            runs = _runs(layout, self._view).get((unit, kind), ())
            of_params, of_grads = ([x[start : start + numel] for start, numel, _, _ in runs] for x in (params, grads))
            cut = lambda x: [x.tensors[tensor][at : at + numel] for _, numel, tensor, at in runs]  # noqa: E731
            return update_part(tx, state, of_params, of_grads, cut, skip, own_grads=True)

        if self._tx.parts is None:
            self._new = {None: update(self._tx, self._old, self._skip)}
        else:
            parts, inner, pairs = self._tx.parts, self._old.inner, self._old.layouts
            skip = self._skip if isinstance(self._skip, Mapping) else dict.fromkeys(parts, self._skip)
            self._new = {label: update(parts[label], inner[label], skip[label], at) for label, at in pairs}
        plan = self._params.plan
        further = plan.rule(kind, plan.state_over[len(plan.params_over) :]).over
        if further:  # the optimizer's state is cut further than parameters are
            fine, coarse = plan.rule(kind, plan.state_over), plan.rule(kind, plan.params_over)
            out, name = self._params.shard(unit, kind), plan.units[unit].name
            self._gathers.append(reshard(params, fine, coarse, plan.live_mesh(), name, out))

    def _own(self, total: Tensor, kind: int) -> Tensor:
        """Return this rank's gradients for its update, (n / W_state,), in the dtype of the parameters."""
        plan = self._params.plan
        grads = plan.within(total, kind, plan.state_over[len(plan.grads_over) :])
        if self._factor is not None:
            grads.mul_(beside(self._factor.to(wide(grads.dtype)), grads))
        return grads.to(plan.kinds[kind].dtype)

    def finish(self) -> Tree:
        """Wait for all new parameters, and return the new optimizer state."""
        if not self.begun:  # no parameter has an element: the counts alone go on
            place, shard = next(iter(self.shards.items()))
            self.make(*place, shard)
        for pending in self._gathers:
            pending.wait()
        if self._params.plan.state_crosses:
            self._params.plan.crossings.down.settle()
        new = self._new[None] if self._tx.parts is None else LabelState(self._new, self._old.layouts)
        return in_new_containers(new)
