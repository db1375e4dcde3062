"""What all elementwise optimizers share: over flat shards they update a few flat tensors with one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.scalars import Number, beside, is_zero
from ..layout.pieces import Parts, aligned, copied, pieces
from . import kernels
from .base import Needs, Schedule, Transform, apply_updates, at, checked, choose, start_count
from .kernels import constants_beside

Rate = Number | Schedule


class SgdState(NamedTuple):
    """Number of updates made (float32, 0-d) and the momenta, None without momentum."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    momentum: Any


class AdamState(NamedTuple):
    """Number of updates made (float32, 0-d) and the two moments."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Any
    nu: Any


class AmsgradState(NamedTuple):
    """Adam's state and the largest nu so far."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Any
    nu: Any
    nu_max: Any


class NadamState(NamedTuple):
    """Number of updates made (float32, 0-d), the product of the momenta so far (float64, 0-d) and the two moments."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu_product: Tensor
    mu: Any
    nu: Any


class RmspropState(NamedTuple):
    """Number of updates made (float32, 0-d), mean of squares; if centered of gradients; with momentum the momenta."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    square_avg: Any
    grad_avg: Any
    momentum_buffer: Any


class AdagradState(NamedTuple):
    """Number of updates made (float32, 0-d) and the sum of squares."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    sum: Any


class AdadeltaState(NamedTuple):
    """Number of updates made (float32, 0-d) and running means of squared gradients and squared steps."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    square_avg: Any
    acc_delta: Any


class LionState(NamedTuple):
    """Number of updates made (float32, 0-d) and the momenta."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Any


class ScheduleFreeState(NamedTuple):
    """Number of updates made (float32), largest rate and sum of weights so far (float64); 0-d; the points z, and nu."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    lr_max: Tensor
    weight_sum: Tensor
    z: Any
    nu: Any


PARAMS = "params"  # the initial value of a moment that starts as a copy of the parameters


@dataclass(frozen=True)
class Rule:
    """An elementwise optimizer: a reference function of `kernels`, and `prepare`, which computes its constants.

    `prepare(state)` returns the constants by name and the new scalars of the state. `moments` and `scalars` give the
    initial value of each field of the state. `kernel` is torch's fused twin of the reference; it takes no tensors as
    hyper-parameters, except as the rate.
    """

    name: str
    state: Any  # its NamedTuple
    reference: Callable[..., kernels.Change]
    prepare: Callable[[Any], tuple[kernels.Constants, dict[str, Tensor]]]
    moments: Mapping[str, float | str]
    scalars: dict[str, float] = field(default_factory=dict)
    kernel: Callable[..., None] | None = None
    reads_params: bool = True
    takes_sparse: bool = False


def transform(rule: Rule) -> Transform:
    """Return the transformation of a rule."""
    tx = Transform(partial(_init, rule), partial(_update, rule), partial(_fused, rule), elementwise=True, views=True)
    return checked(tx, Needs(rule.name, rule.state, rule.reads_params, rule.takes_sparse))


def _init(rule: Rule, params: Any) -> Any:
    count = start_count(params)
    scalars = {k: torch.full((), v, dtype=torch.float64, device=count.device) for k, v in rule.scalars.items()}
    fields = dict.fromkeys(rule.state._fields) | {"count": count} | scalars
    return rule.state(**fields | {name: _begun(params, value) for name, value in rule.moments.items()})


def _begun(params: Any, value: float | str) -> Any:
    if isinstance(value, str):
        return tree.map(torch.clone, params)
    begun = tree.map(torch.zeros_like, params)
    if value:
        for _, piece in pieces(begun):  # not the padding of flat rows
            piece.fill_(value)
    return begun


def _check(rule: Rule, state: Any) -> None:
    for name in rule.state._fields:
        if name not in ("count", *rule.scalars) and (getattr(state, name) is None) != (name not in rule.moments):
            raise ValueError(
                f"optim.{rule.name}: the state was made {'without' if name in rule.moments else 'with'} {name!r}: "
                "make it with this optimizer's own init"
            )


def _is_sparse(grads: Any) -> bool:
    return any(isinstance(g, Tensor) and g.layout is not torch.strided for g in tree.tops(grads, Parts))


def _columns(rule: Rule, state: Any) -> list[Any]:
    return [getattr(state, name) for name in rule.moments]


def _after(rule: Rule, state: Any, count: Tensor, scalars: dict[str, Tensor], moments: Sequence[Any]) -> Any:
    return state._replace(count=count, **scalars, **dict(zip(rule.moments, moments, strict=True)))


def _update(rule: Rule, grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    _check(rule, state)
    constants, scalars = rule.prepare(state)
    flat, spec = tree.flatten(grads)
    columns = [flat if params is None else tree.leaves(params), flat, *map(tree.leaves, _columns(rule, state))]
    rows = [
        kernels.apply(partial(rule.reference, **constants_beside(constants, p)), p, g, tuple(ms))
        for p, g, *ms in zip(*columns, strict=True)
    ]
    moments = [
        tree.unflatten(tree.flatten(old)[1], [new[i] for _, new in rows]) for i, old in enumerate(_columns(rule, state))
    ]
    return tree.unflatten(spec, [delta for delta, _ in rows]), _after(rule, state, state.count + 1, scalars, moments)


def _fused(
    rule: Rule, grads: Any, state: Any, params: Any, found_inf: Tensor | None, donate: bool, **extra: Any
) -> tuple[Any, Any]:
    _check(rule, state)
    if _is_sparse(grads):
        updates, after = _update(rule, grads, state, params)
        return choose(found_inf, (params, state), (apply_updates(params, updates), after))
    if not donate:
        params, state = copied(params), tree.map(torch.clone, state)
    constants, scalars = rule.prepare(state)
    held = _columns(rule, state)
    columns = aligned(params, grads, *held)
    for device in dict.fromkeys(p.device for p in columns[0]):
        here = [n for n, p in enumerate(columns[0]) if p.device == device]
        _run(rule, [[column[n] for n in here] for column in columns], state.count, found_inf, constants)
    count = state.count + (1 if found_inf is None else 1 - found_inf)
    scalars = choose(found_inf, {name: getattr(state, name) for name in scalars}, scalars)
    return params, _after(rule, state, count, scalars, held)


def _run(
    rule: Rule, columns: list[list[Tensor]], count: Tensor, found_inf: Tensor | None, constants: kernels.Constants
) -> None:
    """Update the rows on one device, in place."""
    own, given, *moments = columns
    given = [g.to(p.dtype) for g, p in zip(given, own, strict=True)]
    count, skip, constants = beside(count, own[0]), beside(found_inf, own[0]), constants_beside(constants, own[0])
    if rule.kernel and kernels.can_fuse(rule.kernel, [*own, *given]):
        rule.kernel(own, given, moments, count, skip, constants)
    else:
        rows = [*zip(*moments, strict=True)] or [()] * len(own)
        kernels.in_blocks(partial(rule.reference, **constants), own, given, rows, skip)


def all_numbers(*hyperparams: Any) -> bool:
    """Whether hyper-parameters are numbers, as torch's fused kernels want them, and not tensors."""
    return not any(isinstance(h, Tensor) for h in hyperparams)


def bias_correction(beta: Number, t: Tensor) -> Tensor:
    """The sum of the weights of the first t terms of a running mean: 1 - beta^t."""
    return 1 - beta**t


def adam_constants(
    state: Any, lr: Rate, b1: Number, b2: Number, eps: Number, weight_decay: Number, decoupled: bool
) -> kernels.Constants:
    """The constants of `kernels.adam` for the next update of a state with a `count`."""
    t = state.count.double() + 1
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
    corrections = {"correction1": bias_correction(b1, t), "correction2": bias_correction(b2, t)}
    return {"lr": at(lr, state.count), **numbers, **corrections}


def adam_rule(
    name: str,
    lr: Rate,
    b1: Number,
    b2: Number,
    eps: Number,
    weight_decay: Number,
    decoupled: bool,
    amsgrad: bool = False,
) -> Transform:
    """Adam, AdamW or AMSGrad, under the name that errors give."""

    def prepare(state: AdamState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        return adam_constants(state, lr, b1, b2, eps, weight_decay, decoupled), {}

    return transform(
        Rule(
            name,
            AmsgradState if amsgrad else AdamState,
            kernels.adam,
            prepare,
            {"mu": 0.0, "nu": 0.0} | ({"nu_max": 0.0} if amsgrad else {}),
            kernel=kernels.adam_ if all_numbers(b1, b2, eps, weight_decay) else None,
            reads_params=not is_zero(weight_decay),
        )
    )
