"""A reference implementation of a step: unsharded tensors, one process, the batches of all ranks, torch.autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_whole, expect, wrong
from ..core.losses import Mean, Sum, added, averages, is_loss, local_sums, loss_of, put_averages, terms_of, value_dtype
from ..core.random import seeded
from ..core.scalars import double
from ..core.storage import is_inexact
from ..core.tree import Spec, Tree, detached, flatten, map, map_tops, unflatten
from ..grad.grad import check_loss
from ..layout.layout import Leaf
from ..plan.leaves import first_places
from ..plan.precision import Policy, Precision, SomePolicy, policy_of, precisions
from ..plan.units import Where, claim_leaves, claim_policies
from ..sharding.sharded import gather_params
from ..state.optimizer import gather_state
from ..train.loss_scale import LossScale, NoLossScale
from ..train.step import Result, TrainState
from ..update.base import FoundInf, Label, Transform, any_found, as_transform, clip_factor
from ..update.transforms import Labels, labeller
from .rng import with_threads


class Oracle(NamedTuple):
    """`init(params, loss_scale=None, seed=0, extra=None) -> state`; `step(state, batches, *args, **kwargs) -> ...`.

    - `state`: a `TrainState` of plain trees: `params` are whole, and `opt_state` is that of a dict of the trainable
      leaves by path. With `with_extra`, `extra` is a list with one item for each rank.
    - `batches`: one batch for each rank, in rank order.
    - `args`, `kwargs`: the step's, with a whole tree in place of each `Sharded`.
    - `metrics`: the step's, but `aux` is a list with one item for each rank.
    """

    init: Callable[..., TrainState]
    step: Callable[..., Result]


@dataclass(frozen=True)
class _Whole:
    spec: Spec
    places: list[str]  # by leaf: its key in `values`, the path at which the leaf's tensor occurs first
    values: dict[str, Tensor]
    trained: list[str]
    precision: dict[str, Precision]

    def tree(self, values: Mapping[str, Tensor]) -> Tree:
        return unflatten(self.spec, [values[path] for path in self.places])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(self.values[path].shape) for path in self.places]


def _whole(params: Tree, frozen: Where, policy: Policy) -> _Whole:
    flat, spec = flatten(params)
    paths, first_path = tree.leaf_paths(spec), dict[int, str]()
    origins = first_places(flat, paths)
    is_frozen = dict(zip(paths, claim_leaves(params, spec, origins, frozen, "frozen"), strict=True))
    precision = precisions([leaf.dtype for leaf in flat], claim_policies(params, spec, origins, policy), policy)
    places = [first_path.setdefault(id(leaf), path) for leaf, path in zip(flat, paths, strict=True)]
    values = {path: leaf for leaf, path, place in zip(flat, paths, places, strict=True) if path == place}
    trained = [path for path, x in values.items() if is_inexact(x) and not is_frozen[path]]
    return _Whole(spec, places, values, trained, dict(zip(paths, precision, strict=True)))


class _Out(NamedTuple):
    terms: Sequence[Mean | Sum]  # a plain scalar is a Mean of count 1
    live: dict[str, Tensor]  # the loss's parameters by path
    extra: Tree
    aux: Tree


def oracle(
    loss_fn: Callable[..., Tree],
    tx: Transform,
    *,
    frozen: Where = None,
    policy: SomePolicy = None,
    clip_norm: float | None = None,
    accumulate: int = 1,
    skip_labels: Labels = None,
    has_aux: bool = False,
    with_extra: bool = False,
    threads: int = 1,
) -> Oracle:
    """Return a reference for `train_step`, valid for any plan and mesh, without shards and collectives.

    `loss_fn`, `tx`, `clip_norm`, `accumulate`, `skip_labels`, `has_aux` and `with_extra` are arguments of `train_step`,
    `frozen` and `policy` of `make_plan`, `threads` of `World`. Other arguments of `train_step` change no value. Compare
    the oracle's new state with `whole_state` of the sharded state.

    Sums are in rank order, as in a step, but over all ranks at once and of whole tensors. So sums over two mesh axes,
    over micro-batches or for a norm may differ from a step's in the last bits. In half precision, values that overflow
    in one micro-batch may also differ. Lossy wires are not modelled.

    >>> plain = oracle(lambda w, x: Mean((w * x).sum(), len(x)), sgd(0.5))
    >>> state, metrics = plain.step(plain.init(torch.ones(1)), [torch.tensor([1.0]), torch.tensor([2.0, 3.0])])
    >>> metrics["loss"], state.params
    (tensor(2.), tensor([0.]))
    """
    check_loss(loss_fn)
    check_whole("oracle: threads", threads, what="a number of threads")
    tx, policy = as_transform(tx), policy_of(policy)

    def init(params: Tree, loss_scale: LossScale | None = None, seed: int = 0, extra: Tree = None) -> TrainState:
        whole = _whole(params, frozen, policy)
        values = {path: x.detach().to(whole.precision[path].storage).clone() for path, x in whole.values.items()}
        opt_state = tx.init({path: values[path] for path in whole.trained})
        step, rng = (torch.tensor(number, device="cpu") for number in (0, seed))
        return TrainState(whole.tree(values), opt_state, loss_scale or NoLossScale(), step, rng, extra)

    def step(state: TrainState, batches: Sequence[Tree], *args: Tree, **kwargs: Tree) -> Result:
        _check_batches(batches)
        whole, named = _whole(state.params, frozen, policy), partial(loss_fn, **kwargs)
        device = next((x.device for x in whole.values.values()), torch.device("cpu"))

        def forwards(rank: int, batch: Tree) -> list[_Out]:
            row, extra = list[_Out](), state.extra[rank] if with_extra else None
            for i, part in enumerate(_micro_batches(batch, accumulate)):
                loss_args = [*[extra] * with_extra, part, *args]
                with seeded(state.rng, state.step, rank, i, device):
                    row.append(_rank_forward(named, whole, loss_args, policy, (has_aux, with_extra)))
                extra = row[-1].extra
            return row

        outs = [forwards(rank, batch) for rank, batch in enumerate(batches)]
        loss, divisor, seeds = _loss(outs, state.loss_scale.scale)
        grads = _gradients(outs, whole, seeds)
        found_inf = _nonfinite_grads(grads, whole, skip_labels)
        found_inf = map(lambda bad: torch.maximum(bad, divisor.isnan().float().to(bad.device)), found_inf)
        grads = {path: g * (1 / float(state.loss_scale.value)) for path, g in grads.items()}
        norm = _global_norm(grads, whole)
        if clip_norm is not None:
            grads = {path: g * clip_factor(norm, clip_norm).to(g.real.dtype) for path, g in grads.items()}
        grads = {path: g.to(whole.values[path].dtype) for path, g in grads.items()}
        skip = None if isinstance(state.loss_scale, NoLossScale) else found_inf
        new, opt_state = tx.step(grads, state.opt_state, {path: whole.values[path] for path in whole.trained}, skip)
        params, scaler = whole.tree({**whole.values, **new}), state.loss_scale.adjust(found_inf)
        any_inf = (~norm.isfinite()).float() if skip is None else any_found(skip)
        dtype = value_dtype(added(outs[0][0].terms).total, policy.output)
        metrics: dict[str, Tree] = {"loss": loss.to(dtype), "grad_norm": norm, "found_inf": any_inf}
        if has_aux:
            metrics["aux"] = _auxes(outs, policy)
        extra = [row[-1].extra for row in outs] if with_extra and (skip is None or not any_inf) else state.extra
        return TrainState(params, opt_state, scaler, state.step + 1, state.rng, extra), metrics

    return Oracle(init, with_threads(threads)(step))


def _check_batches(batches: object) -> None:
    if not isinstance(batches, list | tuple) or not batches:
        raise TypeError(f"oracle: {wrong('batches', batches, 'a list of the batches of all ranks, one for each')}")


def _micro_batches(batch: Tree, num: int) -> list[Tree]:
    flat, spec = flatten(batch)
    cuts = [x.tensor_split(num) if isinstance(x, Tensor) and x.dim() else [x] * num for x in flat]
    return [unflatten(spec, [cut[i] for cut in cuts]) for i in range(num)] if num > 1 else [batch]


def _rank_forward(
    loss_fn: Callable[..., Tree], whole: _Whole, loss_args: Sequence[Tree], policy: Policy, returns: tuple[bool, bool]
) -> _Out:
    live = {path: x.detach().to(whole.precision[path].compute).clone() for path, x in whole.values.items()}
    for path in whole.trained:
        live[path].requires_grad_()
    with torch.enable_grad(), loss_of(policy, None, whole):
        out, (has_aux, with_extra) = loss_fn(whole.tree(live), *loss_args), returns
    loss, *more = out if has_aux or with_extra else (out,)  # (loss, extra, aux)
    extra = detached(more.pop(0)) if with_extra else None
    aux = map_tops(lambda x: x if is_loss(x) else policy.cast(x, "output"), is_loss, more[0] if has_aux else None)
    return _Out(terms_of(loss) if is_loss(loss) else [Mean(loss, 1)], live, extra, aux)


def _auxes(outs: Sequence[Sequence[_Out]], policy: Policy) -> list[Tree]:
    """Return each rank's aux, or list of aux by micro-batch. A `Mean` or `Sum` becomes its value over all ranks."""
    rows = [local_sums(averages(out.aux).values(), torch.device("cpu")) for row in outs for out in row]
    sums = [torch.stack(column).sum() for column in zip(*rows, strict=True)]
    auxes = [[put_averages(out.aux, sums, policy.output) for out in row] for row in outs]
    return [of_rank if len(of_rank) > 1 else of_rank[0] for of_rank in auxes]


def _loss(outs: Sequence[Sequence[_Out]], scale: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return (loss over all ranks and micro-batches, 1 (NaN if a term's counts sum to 0), seeds).

    Seeds: for each term, the scaled loss's gradients with respect to total and count.
    """
    parts = [_mean(terms) for terms in zip(*(row[i].terms for i in range(len(outs[0])) for row in outs), strict=True)]
    loss, divisor = (torch.stack(each).sum() for each in zip(*parts, strict=True))
    factors = [(scale(divisor / divisor / each), value) for value, each in parts]
    seeds = [x for seed, value in factors for x in (seed, -seed * value)]  # d(T / C) = dT / C - (T / C) dC / C
    return loss, divisor / divisor, seeds


def _mean(terms: Sequence[Mean | Sum]) -> tuple[Tensor, Tensor]:
    total = torch.stack([x.total.detach().double() for x in terms]).sum()  # (micro-batches * W,) -> ()
    count = torch.tensor(sum(float(_loss_count(x).detach()) for x in terms), dtype=torch.float64, device=total.device)
    divisor = torch.ones_like(count) if isinstance(terms[0], Sum) else torch.where(count == 0, torch.nan, count)
    return total / divisor, divisor


def _loss_count(x: Mean | Sum) -> Tensor:
    return double(x.count if isinstance(x, Mean) else 1)


def _gradients(outs: Sequence[Sequence[_Out]], whole: _Whole, seeds: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return gradients by path, summed over ranks, then over micro-batches.

    Each rank's gradient is rounded to `precision.reduce`; sums over ranks are at least in float32.
    """
    sums = dict[str, Tensor]()
    for part in range(len(outs[0])):
        by_rank = [_rank_backward(row[part], whole, seeds) for row in outs]
        for path in whole.trained:
            precision = whole.precision[path]
            rows = [grads[path].to(precision.reduce) for grads in by_rank]
            total = rows[0].to(torch.promote_types(precision.reduce, torch.float32))
            for row in rows[1:]:  # not a sum of a stack, which torch may add in another order
                total = total + row
            sums[path] = total.to(precision.grads) + sums[path] if part else total.to(precision.grads)
    return sums


def _rank_backward(out: _Out, whole: _Whole, seeds: Sequence[Tensor]) -> dict[str, Tensor]:
    leaves = [out.live[path] for path in whole.trained]
    both = [x for term in out.terms for x in (term.total, _loss_count(term))]
    pairs = [(x, seed.to(x.dtype)) for x, seed in zip(both, seeds, strict=True) if x.requires_grad]
    outs, grad_outputs = [x for x, _ in pairs], [seed for _, seed in pairs]
    grads = torch.autograd.grad(outs, leaves, grad_outputs, allow_unused=True, materialize_grads=True)
    return dict(zip(whole.trained, grads, strict=True))


def _nonfinite_grads(grads: Mapping[str, Tensor], whole: _Whole, labels: Labels) -> FoundInf:
    label_of = None if labels is None else labeller(labels, whole.values)
    leaves = dict[Label | None, list[Tensor]]()  # by label, a 0-d flag for each leaf
    for path, g in grads.items():
        leaf = Leaf(path, tuple(g.shape), whole.values[path].dtype)
        label = None if label_of is None else label_of(leaf)
        leaves.setdefault(label, []).append((~g.isfinite()).any().float())
    by_label = {label: torch.stack(bad).amax() for label, bad in leaves.items()}
    return by_label.get(None, torch.zeros((), dtype=torch.float32, device="cpu")) if labels is None else by_label


def _global_norm(grads: Mapping[str, Tensor], whole: _Whole) -> Tensor:
    squares = [g.abs().double().square().sum() for g in grads.values()]
    wide = any(g.real.dtype == torch.float64 for g in grads.values())
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device="cpu")
    return total.sqrt().to(torch.float64 if wide else torch.float32)


def whole_state(state: TrainState) -> TrainState:
    """Gather a sharded state: return whole parameters and whole optimizer state (by field and leaf path).

    Every rank must call this function. A state of an oracle gets the same names, so the two states can be compared.

    >>> tx = sgd(0.1, momentum=0.9)
    >>> whole_state(init_state(shard_of({"w": torch.ones(2)}), tx)).opt_state
    {'count': tensor(0.), 'momentum.w': tensor([0., 0.])}
    """
    expect("whole_state: state", state, isinstance(state, TrainState), "a TrainState, as a step gives")
    params, opt_state = gather_params(state.params), gather_state(state.opt_state)
    return TrainState(params, opt_state, state.loss_scale, state.step, state.rng, state.extra)
