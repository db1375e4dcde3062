"""The training step: a pure function from state and batch to state and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..comm import consensus
from ..comm.mesh import present
from ..comm.ranks import MismatchError
from ..comm.reduction import Reduction, TreeSums, reduction_of
from ..core import tree
from ..core.arguments import check_flags, check_has, check_positive, check_whole, shown
from ..core.func_levels import refuse_derivative
from ..core.random import HOST, UPDATE, Seeds
from ..core.scalars import beside, wide
from ..core.storage import Life, MemoryRanges, address_range
from ..core.tracing import assigned, is_tracing
from ..core.tree import Tree
from ..grad.grad import OBSERVER, check_loss, check_outside, check_sharded
from ..hosts.check import Checked, is_wanted
from ..layout.norms import global_norm
from ..layout.pieces import Views, device_of, map_parts
from ..plan import ahead
from ..plan.owners import Picture, size
from ..plan.plan import SMALL_GRADIENTS
from ..sharding.sharded import Sharded, coarsen, in_new_containers, refine
from ..update.base import FoundInf, Transform, TransformLike, any_found, as_transform, clip_factor
from ..update.kernels import where
from ..update.transforms import Labels, check_labelled, check_labels
from . import dynamo
from .accumulate import Recipe, check_equal_batches, check_reduce_once, gradients_of_micro_batches
from .describe import describe, stamp_of
from .in_backward import Stepped, Updates, check_in_backward, is_by_elements, own_extra, step_in_backward
from .loss_scale import LossScale, NoLossScale
from .slices import gradients_of_slices


@dataclass(frozen=True)
class TrainState:
    """The input and output of a step, as one pytree.

    - `params`: a `Sharded`.
    - `opt_state`: the optimizer's state, cut over the plan's `state_over`.
    - `loss_scale`: a scaler.
    - `step`: the number of steps taken, skipped updates included (int64, on the host).
    - `rng`: the `seed` given to `init_state` (int64, on the host).
    - `extra`: any tree of yours; with `train_step(with_extra=True)`, the loss's last extra.
    """

    params: Sharded
    opt_state: Tree
    loss_scale: LossScale
    step: Tensor
    rng: Tensor
    extra: Tree

    def give_away(self) -> None:
        """Let every later use of this state raise DonatedError."""
        tree.give_away((self.params, self.opt_state))
        vars(self).clear()

    def picture(self) -> Picture:
        """The ranks and their parts of the parameters, and the size of each field, for `fshard.show`."""
        sizes = {name: sum(x.nbytes for x in tree.leaves(x) if isinstance(x, Tensor)) for name, x in vars(self).items()}
        line = "TrainState, on this rank: " + ", ".join(f"{name} {size(n)}" for name, n in sizes.items() if n)
        return self.params.plan.picture(line)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        if not vars(self):  # given away
            Life(given_away=True).check(type(self).__name__, "__reduce__")
        return super().__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> NoReturn:
        if not vars(self) and not name.startswith("__"):  # copy and pickle ask for dunder names
            Life(given_away=True).check(type(self).__name__, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


tree.register_fields(TrainState, ("params", "opt_state", "loss_scale", "step", "rng", "extra"))


def init_state(
    sharded: Sharded, tx: TransformLike, loss_scale: LossScale | None = None, seed: int = 0, extra: Tree = None
) -> TrainState:
    """Make the state before the first step. The optimizer's state is cut over the plan's `state_over`.

    - `sharded`: the parameters.
    - `tx`: the optimizer.
    - `loss_scale`, `extra`: copied, because a step with `donate` writes to its state. ValueError if `extra` has a
      tensor on meta.
    - `seed`: the seed of all random numbers of the steps.

    Tensors of the optimizer's state are copied if they share memory with others. Every rank of the plan's mesh must
    call this function: MismatchError if seeds, loss scales or copies of parameters differ between ranks.

    >>> from fshard.optim import sgd
    >>> init_state(shard_of(torch.ones(2)), sgd(0.1)).step
    tensor(0)
    """
    check_outside()
    check_sharded(sharded)
    check_whole("seed", seed, -(2**63), 2**63)
    if loss_scale is not None:
        names = ("value", "scale", "unscale", "adjust")
        check_has("loss_scale", loss_scale, names, "a scaler, as fshard.DynamicLossScale() is")
    transform = as_transform(tx)
    trained = sharded.for_state  # (n / W_state,) for each kind
    device = device_of(sharded)
    # a scaler on another device than parameters would make every step wait
    scaler = NoLossScale() if loss_scale is None else tree.map(lambda x: x.to(device, copy=True), loss_scale)
    empty = [path for path, x in tree.paths_to(extra, Sharded) if isinstance(x, Tensor) and x.is_meta]
    if empty and device.type != "meta" and not is_tracing():
        raise ValueError(
            f"init_state: extra leaf {empty[0]!r}: expected values, got a tensor on meta. Use apply.init_buffers()"
        )
    extra = tree.map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, extra)
    # one rank compares nothing, so the host need not read the scale
    if sharded.plan.linked and not is_tracing() and not present(sharded.plan.live_mesh()).abstract:
        _check_same_start(sharded, seed, scaler)
    # on the host, where a step seeds its random numbers
    step, rng = (torch.tensor(number, device="cpu") for number in (0, seed))
    if sharded.plan.state_crosses:  # the device may have no room for the whole state
        opt_state = map_parts(ahead.to_host, transform.init(tree.map(lambda x: x.to(HOST), trained)))
        sharded.plan.crossings.down.settle()
    else:
        opt_state = transform.init(trained)
    return TrainState(sharded, _of_its_own(opt_state, sharded.tensors), scaler, step, rng, extra)


def _of_its_own(opt_state: Tree, params: Sequence[Tensor]) -> Tree:
    """Copy tensors that share memory: a step with `donate` writes to the state."""
    memory = MemoryRanges(params)

    def own(x: object) -> object:
        if not isinstance(x, Tensor) or x.layout is not torch.strided:
            return x
        is_own = not memory.has(x)
        memory.add(address_range(x.untyped_storage()))
        return x if is_own else x.detach().clone()

    return tree.map(own, opt_state)


def _check_same_start(params: Sharded, seed: int, scaler: LossScale) -> None:
    plan, (leaves, spec) = params.plan, tree.flatten(scaler)
    values = [leaf.tolist() for leaf in leaves if isinstance(leaf, Tensor)]
    text = f"seed={seed}\nloss_scale={type(scaler).__name__} of {values}, {spec}"
    consensus.check_same(plan.mesh, text, "init_state: the first state", "Give init_state the same on all of them")
    rests = {k: plan.rest(params.view.axes(k), k) for k in params.view.kinds}  # axes of copies
    for axes in sorted(dict.fromkeys(rests.values()), key=len):  # a set's order differs between processes
        part = params.only(k for k in params.view.kinds if rests[k] == axes)
        if consensus.unlike_index(part.tensors, plan.mesh, axes) is None:
            continue
        # the rows differ: compare by leaf, to name one
        views = part.local_views()
        path = list(views)[consensus.unlike_index([*views.values()], plan.mesh, axes) or 0]
        raise MismatchError(
            f"init_state: leaf {path!r}: ranks along {', '.join(map(repr, axes))} hold copies of it that differ, and "
            "would train apart. Give one rank's to all with shard_params(params, plan, src=0), or make the same "
            "parameters on every rank (torch.manual_seed)."
        )


Result = tuple[TrainState, dict[str, Tree]]  # new state, metrics
METRICS = ("loss", "grad_norm", "found_inf")  # 0-d, and equal on all ranks


@tree.register_constant
class Step:
    """The result of `train_step`; torch.compile records it as one call (Note [torch.compile] in `dynamo.py`)."""

    def __init__(
        self,
        run: Callable[..., Result],
        loss_fn: Callable[..., Tree],
        accumulate: int,
        with_extra: bool,
        donate: bool,
    ):
        self.run: Callable[..., Result] = run
        self.loss_fn, self.accumulate, self.with_extra, self.donate = loss_fn, accumulate, with_extra, donate

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, state: TrainState, /, batch: Tree, *args: Tree, **kwargs: Tree) -> Result:
        """Return the new state and the metrics. TypeError if `state` is not a TrainState."""
        if not isinstance(state, TrainState):
            raise TypeError(f"step(state, batch): expected a TrainState (fshard.init_state) first, got {shown(state)}")
        if not torch.compiler.is_dynamo_compiling():
            return self.run(state, batch, *args, **kwargs)
        known = dynamo.without_none(state)
        leaves, metrics = dynamo.traced(self, known, dynamo.without_none(((batch, *args), kwargs)))
        return dynamo.like(known, leaves), dynamo.with_none(metrics)


def train_step(
    loss_fn: Callable[..., Tree],
    tx: TransformLike,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    reduction: str | Reduction | None = None,
    reduce_once: bool | str | tuple[str, ...] = False,
    skip_labels: Labels = None,
    has_aux: bool = False,
    with_extra: bool = False,
    donate: bool = False,
    in_backward: bool = False,
    keep_gathered: bool = False,
) -> Step:
    """Build `step(state, batch, *args, **kwargs) -> (state, metrics)`: forward, backward, reduction, clipping, update.

    The loss is `loss_fn(params, batch, *args, **kwargs)`. `batch` is this rank's batch, any tree; if the step cuts the
    batch (`accumulate`, `reduction="tree"`), a tree of tensors with rows in dim 0 (else ValueError). `args` and
    `kwargs` (class weights, a temperature) go uncut to the loss of every micro-batch, so put tensors with rows into
    `batch`; a `Sharded` among them (a teacher) gathers on access, and gets no gradient.

    Gradients:

    - `clip_norm`: the largest global 2-norm of gradients; larger gradients are scaled down to this norm. None: no clip.
    - `accumulate`: the number of micro-batches of a batch, cut along dim 0.
    - `reduction`: "exact" (sums in rank order), "fast" (the backend's order), None (exact on CPUs, fast on GPUs),
      "tree" (the same bits on 1, 2, 4, ... ranks with equally many threads: Note [Slices] in `train/slices.py`), or an
      object with the methods of `fshard.reduction.Reduction`; its method `after(grads, unit)`, if any, gets each unit's
      sum.
    - `reduce_once`: False: gradients are reduced with each micro-batch. True: every rank sums whole gradients,
      reduced with the last micro-batch. Names of axes over which gradients are not cut (`"replicate"`): gradients are
      reduce-scattered with each micro-batch, and all-reduced over these axes after the last.
    - `skip_labels`: labels as given to `optim.by_label`. If scaled gradients are not finite on any rank, all
      ranks skip the update; with `skip_labels`, only the updates of labels with such gradients.

    Arguments and results of the loss:

    - `has_aux`: the loss returns `(loss, aux)`; `metrics["aux"]` is this rank's aux (a list for several micro-batches).
      Each `Mean` and `Sum` in aux becomes its value over all ranks and micro-batches, summed in the loss's collective.
    - `with_extra`: the loss is `loss_fn(params, extra, batch, *args) -> (loss, extra)`, or `(loss, extra, aux)`.
      A returned extra goes, detached, to the next micro-batch, the last extra into the new state. The loss must keep
      structure, shapes and dtypes (else ValueError). Ranks have different extras, unless the loss makes them equal. A
      skipped update keeps the old extra.

    Memory:

    - `donate`: the step updates the state's tensors in place, and a later use of the old state raises DonatedError.
      ValueError if `batch`, `args` or `kwargs` share memory with the state. Tensors taken from the old state
      (`tree.leaves`, `local_views`) get the new values: clone them to keep the old values. Without `donate` no input
      changes.
    - `in_backward`: each unit is updated in the backward, as soon as its gradients are reduced, so gradients of two
      units are in memory. ValueError unless `donate`, `accumulate=1`, an elementwise `tx`, and a state without a loss
      scale. With `clip_norm` the forward and backward run twice, first for the norm. Leaves that a rank holds whole are
      copied when read. An error in the backward gives the state away. In a graph the passes of `jit` decide when units
      are updated.
    - `keep_gathered`: each unit is gathered once a step, and stays in memory until the last micro-batch: all units do.

    `metrics` has 0-d tensors, equal on all ranks: `loss`, `grad_norm` (before clipping) and `found_inf`. Random numbers
    drawn in the loss come from the state alone, differ by rank, step and micro-batch, and leave torch's generator as it
    was.

    >>> from fshard.optim import sgd
    >>> step = train_step(lambda w, x: (w * x).sum(), sgd(0.5))
    >>> state, metrics = step(init_state(shard_of(torch.ones(2)), sgd(0.5)), torch.tensor([1.0, 2.0]))
    >>> metrics["loss"], gather_params(state.params)
    (tensor(3.), tensor([0.5000, 0.0000]))
    """
    check_loss(loss_fn)
    flags = {"in_backward": in_backward, "keep_gathered": keep_gathered}
    check_flags(has_aux=has_aux, with_extra=with_extra, donate=donate, **flags)
    transform, by = as_transform(tx), reduction_of(reduction)
    check_reduce_once(reduce_once, by)
    _check_built(transform, accumulate, clip_norm, skip_labels, with_extra, by)
    how = {"accumulate": accumulate, "reduce_once": reduce_once, "with_extra": with_extra, "skip_labels": skip_labels}
    how |= {name: on for name, on in flags.items() if on}
    how |= {"slices": by.slices} if isinstance(by, TreeSums) else {}
    if in_backward:
        check_in_backward(transform, by, donate, how)
    named = reduction if isinstance(reduction, str | None) else type(reduction).__qualname__
    built = f", {describe(clip_norm=clip_norm, reduction=named, **how, tx=transform)}"
    # fused kernels round a tensor's last elements differently; a shard's last ones depend on the number of ranks
    if isinstance(by, TreeSums):
        transform = _unfused(transform)
    # others join all gradients
    room = SMALL_GRADIENTS if transform.views and is_by_elements(transform) else 0
    rooms = room, 0 if transform.parts or transform.draws else room  # eager, in a graph

    def run(state: TrainState, /, batch: Tree, *args: Tree, **kwargs: Tree) -> Result:
        params = check_sharded(state.params)
        _check_opt_state(state.opt_state, params)
        if params.plan.data != params.plan.axis_names:
            check_equal_batches(batch, params.plan)
        in_place = donate and not is_tracing()  # in a graph, `jit(donate=True)` reuses memory
        if in_place:
            _check_unshared((params.trainable, state.opt_state), batch, args, kwargs)
        # `compiler/captures.py` finds the loss function only if `run` reads it
        at, stamp = stamp_of(state.step, state.rng, device_of(params))
        given = loss_fn, accumulate, by, reduce_once, has_aux, with_extra, clip_norm, skip_labels, in_place
        recipe = Recipe(*given, rooms[is_tracing()], built + at, stamp, {} if keep_gathered else None, kwargs)
        make = step_in_backward if in_backward and in_place else _step_after_backward
        new_state, outcome, norm, found_inf = make(recipe, transform, state, batch, args)
        metrics: dict[str, Tree] = {"loss": outcome.value, "grad_norm": norm, "found_inf": found_inf}
        if has_aux:
            metrics["aux"] = outcome.metrics
        if in_place:
            state.give_away()
        return new_state, metrics

    return Step(Checked(run) if is_wanted() else run, loss_fn, accumulate, with_extra, donate)


def _step_after_backward(
    recipe: Recipe, tx: Transform, state: TrainState, batch: Tree, args: Sequence[Tree]
) -> Stepped:
    params, in_slices, tx = state.params, isinstance(recipe.by, TreeSums), _seeded(tx, state) if tx.draws else tx
    gradients = gradients_of_slices if in_slices else gradients_of_micro_batches
    grads, outcome, share = gradients(recipe, state, batch, args)
    if recipe.gathered is not None:
        recipe.gathered.clear()  # the update needs the memory of gathered units
    if observer := OBSERVER.get():
        observer.add_sums(grads, share, state.loss_scale)
    grads, found_inf = state.loss_scale.unscale(grads, own=True, labels=recipe.skip_labels)
    nothing_counted = outcome.divisor.isnan().float()  # 1 if the loss is 0 / 0
    found_inf = tree.map(lambda flag: torch.maximum(flag, nothing_counted), found_inf)
    norm = _rescale(grads, share, recipe.clip_norm, in_slices)

    skip = None if isinstance(state.loss_scale, NoLossScale) else found_inf  # 1: no update
    extra = _kept_extra(skip, state.extra, outcome.extra) if recipe.with_extra else state.extra
    if recipe.donate:  # the update may write to memory that `extra` shares
        extra = own_extra(extra, [params.trainable, state.opt_state])
    if params.plan.state_crosses:
        new_params, opt_state = _update_from_host(tx, grads, state, skip, recipe.donate, in_slices)
    else:
        updated, opt_state = _updated_shards(tx, grads, state, skip, recipe.donate, in_slices)
        del grads  # frees memory for the gathers of new parameters
        new_params = _gathered_params(updated, params, recipe.donate)
    new_state = TrainState(new_params, opt_state, state.loss_scale.adjust(found_inf), state.step + 1, state.rng, extra)
    found_inf = (~norm.isfinite()).float() if skip is None else any_found(skip)
    return Stepped(new_state, outcome, norm, found_inf)


def _seeded(tx: Transform, state: TrainState) -> Transform:
    seeds = Seeds(state.rng, state.step, device_of(state.params))

    def of(update: Callable[..., tuple[Tree, Tree]]) -> Callable[..., tuple[Tree, Tree]]:
        def run(*trees: Tree, **extra: object) -> tuple[Tree, Tree]:
            with assigned(UPDATE, seeds):
                return update(*trees, **extra)

        return run

    return tx.with_fields(update=of(tx.update), fused=None if tx.fused is None else of(tx.fused))


def _unfused(tx: Transform) -> Transform:
    parts = None if tx.parts is None else {label: _unfused(part) for label, part in tx.parts.items()}
    return tx.with_fields(fused=None, parts=parts)


def _check_built(
    tx: Transform, accumulate: int, clip_norm: object, skip_labels: Labels, with_extra: bool, by: Reduction
) -> None:
    check_whole("accumulate", accumulate, what="a number of micro-batches")
    if clip_norm is not None:
        check_positive("clip_norm", clip_norm)
        # the host reads a tensor `clip_norm` once, when the step is built
        if isinstance(clip_norm, Tensor) and not is_tracing() and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm.item()}: expected a number above 0 (or a 0-d tensor of one)")
    check_labels("skip_labels", skip_labels)
    if skip_labels is not None and clip_norm is not None:
        raise ValueError(
            "clip_norm with skip_labels: one label's overflow would clip the others to nothing: clip by label"
        )
    if skip_labels is not None:
        check_labelled(tx)
    if with_extra and isinstance(by, TreeSums):
        raise ValueError(
            "with_extra with reduction='tree': ranks work side by side, so what goes from one micro-batch to the next "
            "depends on how many ranks there are. Use another reduction."
        )


def _kept_extra(skip: FoundInf | None, old: Tree, new: Tree) -> Tree:
    if skip is None:
        return new
    skipped = any_found(skip)
    # unchanged leaves need no `where`
    return tree.map_tops(
        lambda a, b: where(skipped, a, b) if isinstance(b, Tensor) and a is not b else b, Sharded, old, new
    )


def _rescale(grads: Sharded, factor: Tensor | None, clip_norm: float | None, exact: bool) -> Tensor:
    """Multiply gradients by `factor` and clip, in place; return the norm before clipping."""
    norm = global_norm(grads, exact=exact)
    if factor is not None:
        norm = norm * factor.to(norm.dtype)  # saves a pass over gradients
    if clip_norm is not None:
        clip = clip_factor(norm, clip_norm)
        factor = clip if factor is None else factor * clip
    if factor is not None:
        for row in grads.tensors:  # (n / W_grads,)
            row.mul_(beside(factor.to(wide(row.dtype)), row))
    return norm


def _updated_shards(
    tx: Transform, grads: Sharded, state: TrainState, skip: FoundInf | None, donate: bool, exact: bool
) -> tuple[Sharded | Views, Tree]:
    """Update this rank's shards; with `donate`, in place."""
    plan, trained = state.params.plan, state.params.trainable
    # gradients have the policy's dtype `grads`, maybe not that of parameters
    grads = Sharded(grads.view, [g.to(plan.kinds[kind].dtype) for kind, g in grads.by_kind()])
    # views of the shards: (n / W_params,) -> (n / W_state,)
    fine, params = (refine(x, plan.state_over) for x in (grads, trained))
    updated, new_state = tx.step(fine, state.opt_state, params, skip, donate, own_grads=True, exact_norms=exact)
    return refuse_derivative(updated, "train_step"), in_new_containers(new_state)


def _update_from_host(
    tx: Transform, grads: Sharded, state: TrainState, skip: FoundInf | None, donate: bool, exact_norms: bool
) -> tuple[Sharded, Tree]:
    """Make new parameters, and new optimizer state in host memory; with `donate`, in the old tensors' memory.

    The device has one unit's state at a time if the step is eager, and `tx` elementwise without random numbers.
    """
    params, device = state.params, state.params.plan.device
    in_place = not is_tracing()
    if in_place and not donate:
        params = params.updated(tree.map(torch.clone, params.trainable))
    if is_by_elements(tx) and not tx.draws and in_place:
        opt_state = map_parts(lambda x: ahead.pinned(x, device) if donate else ahead.to_host(x), state.opt_state)
        updates = Updates(tx, replace(state, params=params, opt_state=opt_state), None, skip)
        for place in (place for place, shard in updates.shards.items() if shard.numel()):
            updates.make(*place, grads.shard(*place))
        return Sharded(params.view, params.tensors), updates.finish()
    old = state.opt_state
    there = map_parts(lambda x: x.to(device, non_blocking=True), old)
    if in_place and not donate:  # old 0-d tensors, and old tensors on the device, are in `there`
        there = tree.map(lambda x, before: x.clone() if x is before and isinstance(x, Tensor) else x, there, old)
    state = replace(state, params=params, opt_state=there)
    updated, new = _updated_shards(tx, grads, state, skip, in_place, exact_norms)
    is_kept = donate and tree.flatten(old)[1] == tree.flatten(new)[1]
    back = map_parts(_back_to, old, new) if is_kept else map_parts(ahead.to_host, new)
    params.plan.crossings.down.settle()
    return _gathered_params(updated, params, in_place), in_new_containers(back)


def _back_to(old: Tensor, new: Tensor) -> Tensor:
    """Copy to host memory: into the old tensor if it fits."""
    fits = (old.device, old.dtype, old.shape) == (HOST, new.dtype, new.shape)
    return old.copy_(new) if fits else ahead.to_host(new)


def _gathered_params(updated: Sharded | Views, params: Sharded, donate: bool) -> Sharded:
    """Gather updated shards: (n / W_state,) -> (n / W_params,); with `donate`, in place."""
    plan = params.plan
    new_trained = coarsen(updated, plan.params_over, params.trainable if donate else None)
    by_kind = zip(params.view.kinds, params.updated(new_trained).tensors, strict=True)
    rows = [ahead.pinned(row, plan.device) if plan.kinds[kind].host else row for kind, row in by_kind]
    return Sharded(params.view, rows)


def _check_unshared(donated: Tree, batch: Tree, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> None:
    written, given = MemoryRanges(donated), (batch, args, kwargs)
    if not written.has(given):
        return
    named = dict[str, Tree]()
    whole = {"batch": batch, **{f"args[{number}]": x for number, x in enumerate(args)}, **kwargs}
    for name, path, node in ((name, *pair) for name, x in whole.items() for pair in tree.paths_to(x, Sharded)):
        pieces = node.local_views() if isinstance(node, Sharded) else {}
        # leaves first: a rank may have only padding, without a path
        inner = {tree.joined(path, leaf): piece for leaf, piece in pieces.items()} | {path: node}
        named |= {f"{name}, leaf {path!r}" if path else name: x for path, x in inner.items()}
    name = next(name for name, x in named.items() if written.has(x))
    raise ValueError(
        f"train_step(donate=True): {name}: expected a tensor in memory of its own, "
        "got one in the memory of the state's parameters or optimizer state, which the step overwrites. Pass a clone "
        "(fshard.tree.map(torch.clone, ...)), or build the step with donate=False."
    )


def _check_opt_state(opt_state: Tree, params: Sharded) -> None:
    plan = params.plan
    for part in tree.nodes(opt_state, Sharded):
        if part.plan != plan or part.view.over != plan.state_over:
            raise ValueError(
                f"the optimizer state was made for other parameters: expected {plan.first_difference(part.plan)}"
                f", cut over {plan.state_over}, got it cut over {part.view.over}. "
                "Make it with fshard.init_state from these parameters."
            )
