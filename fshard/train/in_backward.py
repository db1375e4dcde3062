"""A step that updates each unit in its backward, as soon as the unit's gradients are reduced.

Note [Steps that update in the backward]
    `Updates` gets the summed gradients of each unit (Note [Updates in a backward]), and runs the optimizer on the
    unit's flat parameters and the same shard of every tree in the optimizer's state. The optimizer is elementwise, so a
    unit's update does not depend on other units.

Note [Updates in a backward]
    The function `Gradients.take` gets each unit's gradients, summed over ranks, and may write to the unit's parameters.
    When the function returns, the sum's memory is free.

    A unit's parameters must not be written to while the backward still reads them. Gathered buffers share no memory
    with parameters, so only a later gather would read the parameters. No gather follows: autograd runs the nodes made
    last first, and a unit's anchor is made when the unit is first read (Note [Anchors] in `grad/autograd.py`), so the
    unit's gradients come after all nodes and checkpoints reading the unit; else the tape raises an error. Leaves that
    this rank holds whole are copied when read: else the loss's value, and attributes unknown to autograd, could be the
    parameters themselves.
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
from ..grad.grad import apart, later_grads
from ..grad.travel import Gradients, OnSum
from ..layout.layout import Layout
from ..layout.norms import square_sum
from ..layout.pieces import device_of
from ..layout.rules import reshard
from ..sharding.schedule import View
from ..sharding.sharded import Sharded, in_new_containers, refine, shards_of
from ..update.base import FoundInf, Label, Transform, clip_factor
from ..update.elementwise import update_part
from ..update.transforms import LabelState, flags_of
from .accumulate import Recipe, rank_of, run_each
from .loss_scale import NoLossScale

# by unit and kind: intervals as (start in the shard, length, number of the state's tensor, start in this tensor)
ShardRuns: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[int, int, int, int]]]


class Stepped(NamedTuple):
    """The results of one step."""

    state: Tree
    outcome: Outcome
    norm: Tensor
    found_inf: Tensor


def step_in_backward(recipe: Recipe, tx: Transform, state: Tree, batch: Tree, args: Sequence[Tree]) -> Stepped:
    """Update a donated state unit by unit. An error after an update gives the state away."""
    _check_can_begin(state)
    given, state = state, replace(state, extra=own_extra(state.extra, [state.params.trainable, state.opt_state]))
    factor = None
    if recipe.clip_norm is not None:
        first = Squares(state.params)
        _run_backward(recipe, state, batch, args, first.add)
        factor = clip_factor(first.norm(), recipe.clip_norm)
    squares, updates = Squares(state.params), Updates(tx, state, factor)

    def take(unit: int, kind: int, total: Tensor) -> None:
        squares.add(unit, kind, total)
        updates.make(unit, kind, total)

    try:
        outcome = _run_backward(recipe, state, batch, args, take)
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
    """Copy the leaves of `extra` that share memory with `overwritten`; each `Sharded` gets a new container."""

    def copied(x: Tree) -> Tree:
        if isinstance(x, Sharded):
            return Sharded(x.view, apart(list(x.tensors), overwritten))
        return apart(x, overwritten)

    return tree.map_tops(copied, Sharded, extra)


def check_in_backward(tx: Transform, by: Reduction, donate: bool, how: Mapping[str, object]) -> None:
    """Raise ValueError for arguments of `train_step` that do not go with `in_backward`."""
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
    """True if the update of an element reads no other elements."""
    return all(part.over == "elements" for part in (tx.parts or {None: tx}).values())


def _check_can_begin(state: Tree) -> None:
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


def _run_backward(recipe: Recipe, state: Tree, batch: Tree, args: Sequence[Tree], take: OnSum) -> Outcome:
    """`take` gets the summed gradients of each unit and kind, (n / W_grads,)."""
    into = Gradients(later_grads(state.params, state.params.plan.grads_over), by=recipe.by, take=take)
    rank = rank_of(state.params)
    ((outcome, _),) = run_each(recipe, state, [batch], args, [into], rank, lambda x: x.divisor, whole=True)
    return outcome


class Squares:
    """The sum of squares of a backward's gradients."""

    def __init__(self, params: Sharded):
        self._plan = params.plan
        self._dtype = max((wide(row.dtype) for row in params.trainable.tensors), key=lambda dtype: dtype.itemsize)
        # float64, 0-d, by the axes along which ranks hold different elements: copies count once. GPUs compute square
        # sums on the stream of reductions, and could overwrite a tensor freed too early: none is freed.
        none = torch.zeros((), dtype=torch.float64, device=device_of(params))
        kinds = params.trainable.view.kinds
        self._sums = {over: [none] for over in ((), *(self._plan.apart(k, self._plan.grads_over) for k in kinds))}

    def add(self, unit: int, kind: int, total: Tensor) -> None:
        self._sums[self._plan.apart(kind, self._plan.grads_over)].append(square_sum(total))

    def norm(self) -> Tensor:
        mesh, local = self._plan.live_mesh(), {over: torch.stack(squares).sum() for over, squares in self._sums.items()}
        totals = [primitives.total(x, mesh, over, label="norm") for over, x in local.items()]
        return torch.stack(totals).sum().sqrt().to(self._dtype)


def _shard_runs(layout: Layout, view: View) -> ShardRuns:
    known, key = layout.derived.runs, (view.plan.fingerprint, view.over, view.kinds)
    if key not in known:
        runs = dict[tuple[int, int], list[tuple[int, int, int, int]]]()
        for span in layout.mine:
            row = view.layout.row_of[span.leaf]
            start = view.layout.span_of[span.leaf].start - row.start
            runs.setdefault((row.unit, row.kind), []).append((start, span.numel, span.tensor, span.start))
        known[key] = runs
    made: ShardRuns = known[key]
    return made


class Updates:
    """A step's updates, in place in a state's tensors, from gradients times `factor`."""

    def __init__(self, tx: Transform, state: Tree, factor: Tensor | None, skip: FoundInf | None = None):
        self._params, self._tx, self._old, self._factor, self._skip = state.params, tx, state.opt_state, factor, skip
        fine = refine(state.params.trainable, state.params.plan.state_over)
        self._view, self.shards = fine.key, shards_of(fine)  # (n / W_state,): this rank updates them
        self._seeds = Seeds(state.rng, state.step, device_of(state.params)) if tx.draws else None
        self._new: dict[Label, Tree] = {}  # the newest state by label (None: of all leaves)
        self._gathers: list[Pending] = []
        self.begun = False

    def make(self, unit: int, kind: int, total: Tensor) -> None:
        """Update one unit and kind; `total` is the sum of its gradients, (n / W_grads,)."""
        self.begun = True
        if self._seeds is None:
            return self._made(unit, kind, total)
        plan = self._params.plan
        shard = coordinate(plan.live_mesh(), plan.rule(kind, plan.state_over).over)
        with assigned(UPDATE, self._seeds.at(unit, kind, shard)):
            return self._made(unit, kind, total)

    def _made(self, unit: int, kind: int, total: Tensor) -> None:
        params, grads = self.shards[unit, kind], self._own(total, kind)  # (n / W_state,)

        # `layout`: of the leaves with one label (None: of all)
        def update(tx: Transform, state: Tree, skip: FoundInf | None, layout: Layout | None = None) -> Tree:
            if layout is None:  # the state is cut as parameters are
                return update_part(tx, state, [params], [grads], lambda x: [x.shard(unit, kind)], skip, own_grads=True)
            runs = _shard_runs(layout, self._view).get((unit, kind), ())
            of_params, of_grads = ([x[start : start + numel] for start, numel, _, _ in runs] for x in (params, grads))
            cut = lambda x: [x.tensors[tensor][at : at + numel] for _, numel, tensor, at in runs]  # noqa: E731
            return update_part(tx, state, of_params, of_grads, cut, skip, own_grads=True)

        if self._tx.parts is None:
            self._new = {None: update(self._tx, self._old, self._skip)}
        else:
            parts, inner, pairs = self._tx.parts, self._old.inner, self._old.layouts
            skip = flags_of(self._skip, dict(pairs))
            self._new = {label: update(parts[label], inner[label], skip[label], at) for label, at in pairs}
        plan = self._params.plan
        further = plan.rule(kind, plan.state_over[len(plan.params_over) :]).over
        if further:  # the optimizer's state is cut further than parameters are
            fine, coarse = plan.rule(kind, plan.state_over), plan.rule(kind, plan.params_over)
            out, name = self._params.shard(unit, kind), plan.units[unit].name
            self._gathers.append(reshard(params, fine, coarse, plan.live_mesh(), name, out))

    def _own(self, total: Tensor, kind: int) -> Tensor:
        """Return gradients, (n / W_state,), in the parameters' dtype."""
        plan = self._params.plan
        grads = plan.shard_of(total, kind, plan.state_over[len(plan.grads_over) :])
        if self._factor is not None:
            grads.mul_(beside(self._factor.to(wide(grads.dtype)), grads))
        return grads.to(plan.kinds[kind].dtype)

    def finish(self) -> Tree:
        if not self.begun:  # all parameters are empty: update the optimizer's counts alone
            place, shard = next(iter(self.shards.items()))
            self.make(*place, shard)
        for pending in self._gathers:
            pending.wait()
        if self._params.plan.state_crosses:
            self._params.plan.crossings.down.settle()
        new = self._new[None] if self._tx.parts is None else LabelState(self._new, self._old.layouts)
        return in_new_containers(new)
