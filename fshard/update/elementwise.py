"""Elementwise optimizers: one kernel updates the few flat tensors of a sharded tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..core import tree
from ..core.func_levels import differentiates
from ..core.scalars import Number, beside, is_zero
from ..core.storage import copied_aside
from ..core.tree import Tree
from ..layout.pieces import Parts, aligned_views, copied, packed, pieces
from . import kernels
from .base import FoundInf, Needs, Schedule, Transform, apply_updates, at, checked, choose, num_made, start_count
from .kernels import constants_beside

Rate = Number | Schedule
_DENSE = torch.strided


class State(Protocol):
    """A NamedTuple of a count and moments; a moment that the optimizer does not use is None."""

    @property
    def _fields(self) -> tuple[str, ...]: ...

    @property
    def _replace(self) -> Callable[..., Self]: ...

    @property
    def count(self) -> Tensor: ...


class SgdState(NamedTuple):
    """Number of updates made (float32, 0-d) and momenta (None without momentum)."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    momentum: Tree = None


class AdamState(NamedTuple):
    """Number of updates made (float32, 0-d) and two moments."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Tree
    nu: Tree


class RmspropState(NamedTuple):
    """Number of updates made (float32, 0-d); means of squares, and of gradients if centered; momenta, if any."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    square_avg: Tree
    grad_avg: Tree = None
    momentum_buffer: Tree = None


class AdagradState(NamedTuple):
    """Number of updates made (float32, 0-d) and the sum of squares."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    sum: Tree


class LionState(NamedTuple):
    """Number of updates made (float32, 0-d) and momenta."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Tree


@dataclass(frozen=True)
class UpdateRule:
    """An elementwise optimizer.

    - `state_type`: a NamedTuple of a `count` of updates, and of moments (trees like `params`)
    - `reference(param, grad, moments, **constants) -> (update, new moments)`, for one tensor of each
    - `constants(count)`: the next update's constants by name
    - `initial_moments`: for each moment, the initial value of its elements
    - `corrections(count)`: more constants of `reference`; the fused kernel computes these itself
    - `fused_kernel`: torch's fused version of `reference`; only its rate may be a tensor
    """

    name: str
    state_type: type[State]
    reference: Callable[..., kernels.Change]
    constants: Callable[[Tensor], kernels.Constants]
    initial_moments: Mapping[str, float]
    corrections: Callable[[Tensor], kernels.Constants] = lambda count: {}
    fused_kernel: Callable[..., None] | None = None
    reads_params: bool = True
    takes_sparse: bool = False


def from_rule(rule: UpdateRule) -> Transform:
    init, update, fused = partial(_init, rule), partial(_update, rule), partial(_fused, rule)
    tx = Transform(init, update, fused, over="elements", views=True, draws=False)
    return checked(tx, Needs(rule.name, rule.state_type, rule.reads_params, rule.takes_sparse))


def _init(rule: UpdateRule, params: Tree) -> State:
    make: Callable[..., State] = rule.state_type
    moments = {name: _filled(params, value) for name, value in rule.initial_moments.items()}
    return make(start_count(params), **moments)


def _filled(params: Tree, value: float) -> Tree:
    moment = tree.map(torch.zeros_like, params)
    if value:
        for _, piece in pieces(moment):  # the padding of flat rows must stay zero
            piece.fill_(value)
    return moment


def _check_moments(rule: UpdateRule, state: State) -> None:
    for name in state._fields[1:]:
        expected = name in rule.initial_moments
        if expected != (getattr(state, name) is not None):
            raise ValueError(
                f"optim.{rule.name}: the state was made {'without' if expected else 'with'} {name!r}: "
                "make it with this optimizer's own init"
            )


def _moments_of(rule: UpdateRule, state: State) -> list[Tree]:
    return [getattr(state, name) for name in rule.initial_moments]


def _next_state(rule: UpdateRule, state: State, count: Tensor, moments: Sequence[Tree]) -> State:
    return state._replace(count=count, **dict(zip(rule.initial_moments, moments, strict=True)))


def _update(rule: UpdateRule, grads: Tree, state: State, params: Tree = None, **extra: object) -> tuple[Tree, State]:
    _check_moments(rule, state)
    constants = {**rule.constants(state.count), **rule.corrections(state.count)}
    flat, spec = tree.flatten(grads)
    # without parameters, a rule gets gradients in place of parameters
    columns = [flat if params is None else tree.leaves(params), flat, *map(tree.leaves, _moments_of(rule, state))]
    changes: list[kernels.Change] = []
    for p, g, *moments_of_row in zip(*columns, strict=True):
        reference = partial(rule.reference, **constants_beside(constants, p))
        changes.append(kernels.apply(reference, p, g, tuple(moments_of_row)))
    specs = [tree.flatten(old)[1] for old in _moments_of(rule, state)]
    moments = [tree.unflatten(of, [new[i] for _, new in changes]) for i, of in enumerate(specs)]
    updates = tree.unflatten(spec, [delta for delta, _ in changes])
    return updates, _next_state(rule, state, state.count + 1, moments)


def _fused(
    rule: UpdateRule, grads: Tree, state: State, params: Tree, found_inf: Tensor | None, donate: bool, **extra: object
) -> tuple[Tree, State]:
    """Update parameters and state in place if `donate`, else copies; no change if `found_inf` is 1.

    All rows are cut at the bounds of all `Views`: parameters, gradients and moments then have tensors of equal sizes.
    """
    _check_moments(rule, state)
    constants = rule.constants(state.count)
    # no kernel has a derivative, or takes sparse gradients
    if differentiates(constants) or any(getattr(g, "layout", _DENSE) is not _DENSE for g in tree.leaves(grads)):
        params = packed(params)
        updates, new_state = _update(rule, packed(grads), state, params)
        return choose(found_inf, (params, state), (apply_updates(params, updates), new_state))
    if not donate:
        params, state = copied(params), tree.map(torch.clone, state)
    columns = aligned_views(params, grads, *_moments_of(rule, state))
    # a kernel call takes tensors of one device
    for device in dict.fromkeys(p.device for p in columns[0]):
        on_device = [n for n, p in enumerate(columns[0]) if p.device == device]
        _run(rule, [[column[n] for n in on_device] for column in columns], state.count, found_inf, constants)
    return params, _next_state(rule, state, state.count + num_made(found_inf), _moments_of(rule, state))


def _run(
    rule: UpdateRule, columns: kernels.Columns, count: Tensor, found_inf: Tensor | None, constants: kernels.Constants
) -> None:
    params, grads, *moments = columns
    # a fused kernel takes tensors of one dtype
    grads = [g.to(p.dtype) for g, p in zip(grads, params, strict=True)]
    columns = [params, grads, *moments]
    skip, constants = beside(found_inf, params[0]), constants_beside(constants, params[0])
    if rule.fused_kernel and kernels.can_fuse(rule.fused_kernel, [*params, *grads], constants["lr"]):
        rule.fused_kernel(columns, beside(count, params[0]), skip, constants)
    else:
        constants = {**constants, **constants_beside(rule.corrections(count), params[0])}
        kernels.in_blocks(partial(rule.reference, **constants), columns, skip)


def update_part(
    tx: Transform,
    state: Tree,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    cut: Callable[[Tree], Sequence[Tensor]],  # this folder cannot import `Sharded`
    found_inf: FoundInf | None = None,
    **extra: object,
) -> Tree:
    """Update `params`, a part of all elements, in place by an elementwise `tx`, while other gradients are reduced.

    `cut` returns the same part of each moment, as views; views in host memory are copied to the device and back. In the
    returned state, only the 0-d tensors are new. Every part gets the counts from before the step, so all parts return
    the same new counts.
    """

    views = [list(cut(x)) for x in tree.nodes(state, Parts)]
    given, into = ([near(x, p) for x, p in zip(of, params, strict=True)] for of in views), iter(views)

    def begun(x: Tree) -> Tree:
        return next(given) if isinstance(x, Parts) else x.clone() if isinstance(x, Tensor) else x

    part = tree.map_tops(begun, Parts, state)
    new_params, new_state = tx.step([*grads], part, [*params], found_inf, donate=True, **extra)
    pairs = [*zip(params, new_params, strict=True)]

    def kept(old: Tree, new: Tree) -> Tree:
        if isinstance(old, Parts):
            pairs.extend(zip(next(into), new, strict=True))
        return old if isinstance(old, Parts) else new

    after = tree.map_tops(kept, Parts, state, new_state)
    _put([(old, x) for old, x in pairs if old is not x])
    return after


def near(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.device, non_blocking=True)


def _put(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    into, new = [old for old, _ in pairs], [x for _, x in pairs]
    # a field of the new state may be the old parameters, or the old values of another field
    for old, x in zip(into, copied_aside(new, into), strict=True):
        old.copy_(x, non_blocking=True)


def all_numbers(*hyperparams: object) -> bool:
    return not any(isinstance(h, Tensor) for h in hyperparams)


def with_rate(lr: Rate, **constants: object) -> Callable[[Tensor], kernels.Constants]:
    """A function from the count to `constants` and the rate."""
    return lambda count: {"lr": at(lr, count), **constants}


def adam_corrections(count: Tensor, b1: Number, b2: Number) -> kernels.Constants:
    t = count.double() + 1  # in float32, 1 - b2^t would lose digits for b2 near 1
    return {"correction1": 1 - b1**t, "correction2": 1 - b2**t}


def adam_transform(
    name: str, lr: Rate, b1: Number, b2: Number, eps: Number, weight_decay: Number, decoupled: bool
) -> Transform:
    constants = with_rate(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, decoupled=decoupled)
    corrections, moments = partial(adam_corrections, b1=b1, b2=b2), {"mu": 0.0, "nu": 0.0}
    fused = kernels.adam_ if all_numbers(b1, b2, eps, weight_decay) else None
    reads_params = not is_zero(weight_decay)
    return from_rule(UpdateRule(name, AdamState, kernels.by_adam, constants, moments, corrections, fused, reads_params))
