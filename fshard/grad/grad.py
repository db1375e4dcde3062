"""Losses of sharded parameters: their values, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm import consensus, primitives
from ..comm.mesh import AnyMesh, Axes, num_ranks
from ..comm.ranks import MismatchError, Pending
from ..comm.reduction import Reduction, is_idle, reduction_of
from ..core import func_levels, losses, tree
from ..core.arguments import check_flags, check_function
from ..core.losses import Mean, Outcome, Sum, Terms, averages, is_loss, loss_text, remarks, terms_of, value_dtype
from ..core.scalars import Number, on_device
from ..core.storage import MemoryRanges
from ..core.tracing import IN_PLACE, is_tracing
from ..core.tree import Tree
from ..layout.pieces import Unreduced, device_of
from ..plan import ahead
from ..plan.plan import Plan
from ..sharding.schedule import View
from ..sharding.sharded import Sharded, whole_view
from . import autograd
from .tape import Tape
from .travel import Gradients, Rooms, settle
from .under_way import Gathered

Given = tuple[Sequence[Tree], Mapping[str, Tree]]


class Observer(Protocol):
    """Makes the tapes in a `with` block."""

    def __call__(self, *args: object) -> Tape: ...

    def add_sums(self, grads: Sharded, share: Tensor | None, scaler: Tree) -> None:
        """Receive gradients before the step unscales them, and multiplies them by `share`."""


# set by `fshard.testing.observed`
OBSERVER: ContextVar[Observer | None] = ContextVar("fshard.grad.grad", default=None)
_OF_MODULE = "Of a module write lambda params, x: torch.func.functional_call(module, params, (x,))"


def _returned(out: Tree, has_aux: bool, with_extra: bool) -> tuple[Tree, Tree, Tree]:
    names = ["loss", *["extra"] * with_extra, *["aux"] * has_aux]
    if len(names) > 1 and not (isinstance(out, tuple) and len(out) == len(names)):
        asked = " and ".join(["with_extra=True"] * with_extra + ["has_aux=True"] * has_aux)
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else type(out).__name__
        raise ValueError(f"the loss function: expected ({', '.join(names)}), as {asked} says, got {got}")
    by_name = dict(zip(names, out if len(names) > 1 else [out], strict=True))
    return by_name["loss"], by_name.get("extra"), by_name.get("aux")


class _Returned(NamedTuple):
    """The result of a loss function. `kind`: the loss's class. `remarks`: more text for ranks to compare."""

    loss: Mean | Sum | Terms
    kind: type
    extra: Tree
    aux: Tree
    remarks: str


def _local(loss: Mean | Sum | Terms) -> list[Tensor]:
    """The tensors to differentiate: this rank's total, and its count if it requires a gradient.

    A sum of losses gives two tensors for each term; a constant stands in for a count without gradient.
    """
    if isinstance(loss, Terms):
        return [x for term in loss.terms for x in [*_local(term), term.total.detach()][:2]]
    count = loss.count if isinstance(loss, Mean) else None
    return [loss.total, count] if isinstance(count, Tensor) and count.requires_grad else [loss.total]


def _start_sums(tape: Tape, returned: _Returned, mesh: AnyMesh, built: str = "", place: Number = 0) -> Pending:
    """Start the small collective of `Outcome.sums`: totals, counts, and the number of ranks with a gradient.

    In this collective ranks also compare `place`, kinds of loss, and reads. With several axes, the call waits for the
    sums along all axes but the last.
    """
    loss, kind, _, aux, words = returned
    # not `requires_grad`: a constant may require a gradient, yet depends on no parameter
    device, output, trains = loss.total.device, tape.plan.policy.output, any(x.grad_fn for x in _local(loss))
    text, checksum = loss_text(kind, value_dtype(loss.total, output), [loss, aux] if kind is Terms else aux, output)
    numbers = [on_device(x, device) for x in (trains, *(_numbers(tape, place + checksum) if mesh is not None else ()))]
    local = torch.stack([*losses.local_sums([*terms_of(loss), *averages(aux).values()], device), *numbers])
    sums = primitives.start_total(local, mesh, label="loss", more=text + words + built)
    return sums.then(partial(_sums_compared, tape, local, mesh)) if mesh is not None else sums


def _numbers(tape: Tape, place: Number) -> list[Number]:
    gathered, saved = tape.reads()
    if tape.is_compared and not is_tracing():
        return [place + gathered, saved]
    return [place + gathered + saved] + [0] * tape.is_compared  # as many numbers as an eager step sends


def _sums_compared(tape: Tape, local: Tensor, mesh: AnyMesh, sums: Tensor) -> Tensor:
    if not tape.is_compared:
        return consensus.without_place(sums, local, mesh)
    others = consensus.without_place(sums[:-1], local[:-1], mesh)
    if not is_tracing() and sums[-1] != local[-1] * num_ranks(mesh):
        tape.keep_read()
    return others


def _compare_alone(tape: Tape, mesh: AnyMesh, device: torch.device, label: str = "loss") -> None:
    if mesh is not None and tape.sends:
        local = torch.stack([on_device(number, device) for number in _numbers(tape, 0)])
        _sums_compared(tape, local, mesh, primitives.total(local, mesh, label=label))


def _outcome(returned: _Returned, sums: Pending, plan: Plan, mesh: AnyMesh) -> Outcome:
    loss, kind, extra, aux, _ = returned
    # every rank's loss counts 1, unless the loss has its own counts
    weight = None if kind in (Mean, Terms) else loss.total.new_full((), num_ranks(mesh), dtype=torch.float64)
    dtype = value_dtype(loss.total, plan.policy.output)
    outcome = Outcome(cache(lambda: sums.wait().unbind()), weight, kind, dtype, extra, aux, plan.policy.output)
    return losses.outcome_of_terms(outcome, [type(x) for x in loss.terms]) if isinstance(loss, Terms) else outcome


def _called(
    tape: Tape, params: Sharded, loss_fn: Callable[..., Tree], given: Given, has_aux: bool, with_extra: bool
) -> _Returned:

    def call(view: Tree) -> _Returned:
        (args, kwargs), sharded_of = _viewed(tape, given)
        loss, extra, aux = _returned(loss_fn(view, *args, **kwargs), has_aux, with_extra)
        if not (has_aux or with_extra):
            losses.warn_of_lost()
            return _Returned(*losses.read_loss(loss), None, None, remarks())
        losses.check_averages(aux)
        # replace each view by its `Sharded`: views end with the tape
        extra = tree.map_tops(lambda x: sharded_of.get(id(x), x), lambda x: id(x) in sharded_of, extra)
        return _Returned(*losses.read_loss(loss), _leaving(tape, params, extra), _output(tape, params, aux), remarks())

    return tape.forward(call)


def _viewed(tape: Tape, given: Given) -> tuple[Given, dict[int, Sharded]]:
    """Return the arguments with views in place of each `Sharded`, and each `Sharded` by its view's `id`."""
    others = [(sharded, other.view()) for sharded, other in tape.beside]
    views = (view for _, view in others)  # in the order of `given`
    arguments = [next(views) if isinstance(x, Sharded) else x for x in tree.tops(given, Sharded)]
    return tree.put_tops(given, Sharded, arguments), {id(view): sharded for sharded, view in others}


def _leaving(tape: Tape, params: Sharded, x: Tree) -> Tree:
    """Copy all views of parameters and gathered buffers in a function's result.

    A donated step overwrites the parameters; gathered buffers are lent (Note [Lent memory] in `comm/ranks.py`).
    """
    inputs_read = [params, *(sharded for sharded, _ in tape.beside)]
    return apart(_plain(tree.detached(x, Sharded)), inputs_read, tape.gathered_into())


def _output(tape: Tape, params: Sharded, x: Tree) -> Tree:
    cast = params.plan.policy.cast
    return _leaving(tape, params, tree.map_tops(lambda x: x if is_loss(x) else cast(x, "output"), is_loss, x))


def _plain(x: Tree) -> Tree:
    either = (tree.StandIn, Sharded)
    return tree.map_tops(
        lambda n: tree.plain(n) if isinstance(n, tree.StandIn) else n, lambda n: isinstance(n, either), x
    )


def apart(x: Tree, held: Sequence[Tree], places: Iterable[range] = ()) -> Tree:
    """Copy leaves in the memory of `held` or in `places`: a step may write there. `Sharded` nodes are not copied."""
    memory = MemoryRanges(held)
    for place in places:
        memory.add(place)

    def copied(leaf: Tree) -> Tree:
        if isinstance(leaf, Tensor):
            # sparse and jagged tensors, and tensors of tensors, have no storage
            is_dense = leaf.layout is torch.strided and not hasattr(leaf, "__tensor_flatten__")
            return leaf if is_dense and not memory.has(leaf) else leaf.detach().clone()
        if isinstance(leaf, memoryview):
            return memoryview(bytearray(leaf.tobytes())).cast(leaf.format, leaf.shape)  # type: ignore[call-overload]
        if hasattr(leaf, "__array_interface__"):
            return leaf.copy()
        return leaf.clone() if isinstance(leaf, torch.UntypedStorage | torch.TypedStorage) else leaf

    return tree.map_tops(copied, Sharded, x)


def run_loss(
    loss_fn: Callable[..., Tree],
    params: Sharded,
    given: Given,
    into: Gradients,
    *,
    has_aux: bool = False,
    with_extra: bool = False,
    built: str = "",
    place: Number = 0,
    divisor: Callable[[Outcome], Tensor] = lambda outcome: outcome.divisor,
    alone: bool = False,
    whole: bool = True,
    scale: Callable[[Tensor], Tensor] = lambda seed: seed,
    tape: Tape | None = None,
    gathered: Gathered | None = None,
) -> Outcome:
    """Run forward and backward: write the gradients of `scale(total / divisor)` to `into`.

    `divisor` takes the outcome of all ranks, or, with `alone`, of this rank. `whole`: True if the step has one
    micro-batch. `place`: a whole number for ranks to compare.
    """
    _check_eager()
    tape = tape or (OBSERVER.get() or Tape)(params, into, tree.nodes(given, Sharded), gathered)
    # the new root is for losses inside this loss (Note [One root] in `autograd`)
    with (
        autograd.another_root(),
        closing(tape),
        losses.loss_of(tape.plan.policy, tape.plan.mesh, tape.plan, tape.tapes),
    ):
        with torch.enable_grad():
            returned = _called(tape, params, loss_fn, given, has_aux, with_extra)
        mesh = None if alone else params.plan.live_mesh()
        # before `tape.end` starts a gather: this small collective would queue behind it
        sums = _start_sums(tape, returned, mesh, built, place)
        with _dropped_on_error(sums):
            outs, outcome = _local(returned.loss), _outcome(returned, sums, params.plan, mesh)
            if alone:
                _compare_alone(tape, params.plan.live_mesh(), outs[0].device)
            elif tape.is_compared and not is_tracing():
                outcome.sums()
            tape.end()
            del returned
            _check_differentiable(outs, whole, outcome, alone, len(tape.chain.outputs) > 1)
            seed = scale(divisor(outcome).reciprocal())  # 0-d, the scaled loss's derivative with respect to its total
            _backward(tape, outs, outcome.seeds(seed) if len(outs) > 1 else [seed])
            outcome.sums()  # waits for the forward's last collective
    return outcome


@contextmanager
def _dropped_on_error(pending: Pending) -> Iterator[None]:
    """After an error, wait for a collective's messages, and drop them."""
    try:
        yield
    except BaseException:
        with suppress(MismatchError):  # the earlier error says more
            pending.drop()
        raise


def _backward(tape: Tape, outs: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    pairs = [(out, seed.to(out.dtype)) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad]
    if len(tape.chain.outputs) > 1 or not pairs:  # no anchor reads this seed's value
        pairs.append((tape.chain.outputs[-1], tape.chain.outputs[-1].detach()))
    # run the backward on this thread: the tally and simulated ranks belong to the thread
    with torch.autograd.set_multithreading_enabled(False):
        # returns None for the root: anchors give the gradients of leaves to the tape
        outputs, seeds = zip(*pairs, strict=True)
        torch.autograd.grad(outputs, [tape.chain.outputs[0]], seeds, allow_unused=True)
    tape.check_reached([out for out in outs if out.grad_fn])
    tape.finish()


def _check_differentiable(outs: Sequence[Tensor], whole: bool, outcome: Outcome, alone: bool, may_wait: bool) -> None:
    if not any(x.grad_fn for x in outs):  # zero on this rank if other ranks have a gradient
        if not (may_wait and outs[0].device.type == "cpu" if is_tracing() else alone or outcome.sums()[-1]):
            raise ValueError(losses.NO_GRADIENT)
        torch._assert_async(outcome.sums()[-1] + alone, losses.NO_GRADIENT)  # private, as in `consensus`
    if len(outs) > 1 and not whole:
        what, remedy = "the count of its fshard.Mean depends on parameters", "Detach the count"
        if outcome.kind is Terms:
            what, remedy = "a sum with an fshard.Mean", "Return fshard.Sum(t / n + u / m) with numbers n, m from args"
        raise ValueError(
            f"the loss function: {what}. Its derivative takes the totals and counts of all micro-batches (or slices, "
            f"with reduction='tree'), which are not known yet. {remedy}, or use accumulate=1 and another reduction."
        )


def check_outside() -> None:
    if func_levels.inside():
        raise TypeError(
            "init_state, value_and_grad and train_step are eager: they cannot run inside torch.func.grad, jvp or vmap. "
            "Transform a function that calls fshard.gather_params, and for a derivative through steps tx.init and "
            "tx.step."
        )


def _check_eager() -> None:
    if func_levels.inside() or torch.is_inference_mode_enabled():
        check_outside()
        raise TypeError(
            "value_and_grad and train_step: torch.inference_mode is on, in which nothing has a gradient. Leave the "
            "block, or call fshard.evaluate for the loss alone."
        )


def check_loss(loss_fn: object) -> None:
    check_function("loss_fn", loss_fn, "loss_fn(params, *args, **kwargs)", f"{_OF_MODULE}, and a loss of that.")


def later_grads(params: Sharded, over: Axes, local: bool = False, room: int = 0) -> Rooms:
    """The gradients of a whole tree, cut over `over`; if `local`, on the device. `room` as in `View`."""
    plan, view, device = params.plan, whole_view(params.plan, over, params.trainable.view.kinds), device_of(params)
    view = replace(view, room=0 if (is_tracing() and _uncut(view, room)) or any(k.host for k in plan.kinds) else room)

    def empty(kind: int, numel: int) -> Tensor:
        like = torch.empty(0, dtype=plan.kinds[kind].precision.grads, device=device)
        if plan.kinds[kind].host and not local:
            return ahead.host_row(numel, like.dtype, device)
        # the mesh may allocate in shared memory
        return primitives.buffer(plan.live_mesh(), plan.axis_names, numel, like, lent=False)

    return Rooms(view, device, empty, cache(lambda number: empty(*view.tensors[number])))


def _uncut(view: View, room: int) -> bool:
    """Return True if a graph has one row of gradients: a small one, or if it does not update in place on one rank."""
    plan, is_small = view.plan, len(replace(view, room=room).tensors) == len(view.kinds)
    return is_small or not IN_PLACE.get() or plan.num_ranks(plan.axis_names) > 1 or plan.state_crosses


def empty_grads(params: Sharded, over: Axes, local: bool = False) -> Sharded:
    return later_grads(params, over, local).whole()


def check_sharded(params: object) -> Sharded:
    if not isinstance(params, Sharded):
        raise TypeError(
            f"params: expected a Sharded, got {type(params).__name__}: call fshard.shard_params(params, plan) first "
            "(with fshard.make_plan(params) on one device); inside a loss call the function itself, which needs no more"
        )
    if params.view.spec != params.plan.spec:
        raise TypeError("expected the whole Sharded, got a subtree of one: pass the whole and index it inside the loss")
    return params


def value_and_grad(
    loss_fn: Callable[..., Tree],
    has_aux: bool = False,
    *,
    reduce: bool = True,
    reduction: str | Reduction | None = None,
) -> Callable[..., tuple[Tree, Tree]]:
    """`fn(sharded, *args, **kwargs) -> (value, grads)`: the loss over all ranks, and its gradient.

    `loss_fn(params, *args, **kwargs)` is written for one device. Touching a unit of `params` gathers the unit; so does
    touching a unit of a `Sharded` among other arguments (a teacher's), without a gradient. The loss is
    `Mean(total, count)`, `Sum(total)`, a sum of these, or a plain 0-d tensor, averaged over ranks. Gradients are cut
    over `grads_over`; with `reduce=False` they are this rank's own, as `Unreduced`. Unused leaves get zeros. With
    `has_aux` the loss returns `(loss, aux)`, and `fn` returns `((value, aux), grads)`; `reduction` as for `train_step`.
    Inside torch.func's transforms call `gather_params` in the differentiated function instead.

    >>> value, grads = value_and_grad(lambda w: (w * w).sum())(shard_of(torch.tensor([1.0, 2.0])))
    >>> value, gather_params(grads)
    (tensor(5.), tensor([2., 4.]))
    """
    check_loss(loss_fn)
    check_flags(has_aux=has_aux, reduce=reduce)
    by = reduction_of(reduction)

    def fn(params: Sharded, /, *args: Tree, **kwargs: Tree) -> tuple[Tree, Tree]:
        plan = check_sharded(params).plan
        grads = later_grads(params, plan.grads_over if reduce else (), local=not reduce)
        alone = is_idle(by, plan.axes) or not reduce
        into = Gradients(None, grads) if alone else Gradients(grads, by=by)
        outcome = run_loss(loss_fn, params, (args, kwargs), into, has_aux=has_aux)
        gradients = grads.whole() if reduce else Unreduced(grads.whole())
        return ((outcome.value, outcome.metrics) if has_aux else outcome.value), gradients

    return fn


def evaluate(loss_fn: Callable[..., Tree], has_aux: bool = False) -> Callable[..., Tree]:
    """`fn(sharded, *args, **kwargs) -> value`, or `(value, aux)`: the loss over all ranks, without a gradient.

    `loss_fn` and `has_aux` as for `value_and_grad`. Dropout and other random operators use torch's generator.

    >>> evaluate(lambda w: (w * w).sum())(shard_of(torch.tensor([1.0, 2.0])))
    tensor(5.)
    """
    check_loss(loss_fn)
    check_flags(has_aux=has_aux)

    def fn(params: Sharded, /, *args: Tree, **kwargs: Tree) -> Tree:
        plan = check_sharded(params).plan
        with _forward(params, (args, kwargs)) as tape:
            returned = _called(tape, params, loss_fn, (args, kwargs), has_aux, with_extra=False)
        outcome = _outcome(returned, _start_sums(tape, returned, plan.live_mesh()), plan, plan.live_mesh())
        return (outcome.value, outcome.metrics) if has_aux else outcome.value

    return fn


def predict(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """`predicted(sharded, *args, **kwargs)`: this rank's result of any function of the parameters, without a gradient.

    `fn(params, *args, **kwargs)` is written for one device, as a loss: touching a unit of `params`, or of a `Sharded`
    among the other arguments, gathers the unit. `fn` returns a tree, its floating tensors cast to the policy's
    `output`. Nothing is summed or averaged: ranks may give different numbers of rows. A dataclass that is no tree node
    comes back as is, and may share memory with parameters. If parameters are cut, all ranks must make the call, and
    read the same units (else RuntimeError). For a module: `predict(lambda p, x: apply.eval(p, buffers, x)[0])`.

    >>> predict(lambda w, x: x @ w)(shard_of(torch.tensor([1.0, 2.0])), torch.tensor([[3.0, 4.0]]))
    tensor([11.])
    """
    check_function("fn", fn, "fn(params, *args, **kwargs)", _OF_MODULE)

    def predicted(params: Sharded, /, *args: Tree, **kwargs: Tree) -> Tree:
        plan = check_sharded(params).plan

        def call(view: Tree) -> Tree:
            (others, keywords), _ = _viewed(tape, (args, kwargs))
            return _output(tape, params, fn(view, *others, **keywords))

        with _forward(params, (args, kwargs)) as tape:
            result = tape.forward(call)
        _compare_alone(tape, plan.live_mesh(), plan.device, "predict")
        return result

    return predicted


@contextmanager
def _forward(params: Sharded, given: Given) -> Iterator[Tape]:
    tape = Tape(params, beside=tree.nodes(given, Sharded))
    with closing(tape), losses.loss_of(tape.plan.policy, tape.plan.mesh, tape.plan, tape.tapes):
        with torch.no_grad():
            yield tape
        tape.end()


def reduce_grads(grads: Unreduced, reduction: str | Reduction | None = None) -> Sharded:
    """Sum every rank's own gradients; the result is cut over the plan's `grads_over`. TypeError for reduced gradients.

    `grads` are from `value_and_grad(reduce=False)`; `reduction` as for `train_step`.

    >>> _, own = value_and_grad(lambda w: (w * w).sum(), reduce=False)(shard_of(torch.tensor([1.0, 2.0])))
    >>> gather_params(reduce_grads(own))
    tensor([2., 4.])
    """
    if not isinstance(grads, Unreduced):
        raise TypeError(
            f"reduce_grads: expected Unreduced gradients (value_and_grad(..., reduce=False)), got "
            f"{type(grads).__name__}: gradients are reduced once"
        )
    local: Sharded = grads.local
    plan = local.plan
    reduced = empty_grads(local, plan.grads_over)
    reduce_all(local, reduced, reduction_of(reduction))
    return reduced


def reduce_all(local: Sharded, reduced: Sharded, by: Reduction) -> None:
    plan, into = local.plan, Gradients(_rooms_of(reduced), _rooms_of(local), by=by)
    # every rank must start the same collectives in the same order
    rows = (row for row in local.view.rows.values() if row.numel)
    started = [into.emit(row.unit, row.kind, row.of(local.tensors)) for row in rows]  # (n,) each
    for pending in started:
        if pending is not None:
            pending.wait()
    settle(plan)


def _rooms_of(x: Sharded) -> Rooms:
    return later_grads(x, x.view.over)._replace(view=x.view, tensor=x.tensors.__getitem__)
