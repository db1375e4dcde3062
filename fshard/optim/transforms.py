"""Transformations made of others: in sequence, every k-th time, with hyper-parameters in the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_whole, shown
from ..core.scalars import beside, double
from ..core.tree import Tree
from ..layout.pieces import packed
from .base import (
    FoundInf,
    Needs,
    Schedule,
    Transform,
    TransformLike,
    as_transform,
    at,
    checked,
    choose,
    identity,
    num_made,
    start_count,
)


def chain(*txs: TransformLike) -> Transform:
    """Apply transformations in sequence: each gets the updates of the one before it.

    ValueError for `zero(grads="local")` behind another, which would be given one rank's gradients.

    >>> chain(clip(1.0), scale(-0.5)).update(torch.tensor(4.0), ((), ()))[0]
    tensor(-0.5000)
    """
    parts = [as_transform(tx) for tx in txs]
    if not parts:
        return identity()
    if any(tx.mesh is not None for tx in parts[1:]):
        raise ValueError(
            "optim.chain: zero(grads='local') adds up what each rank has, so what stands before it would be given one "
            "rank's gradients, not their sum. Put it inside: zero(chain(...), mesh, grads='local')."
        )

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        grads, states = _all_but_last(grads, state, params, extra)
        grads, last = parts[-1].update(grads, state[-1], params, **(_not_own(extra) if parts[1:] else extra))
        return grads, (*states, last)

    def _all_but_last(grads: Tree, state: Tree, params: Tree, extra: Mapping[str, object]) -> tuple[Tree, list[Tree]]:
        """The updates of all transformations but the last, and their new states."""
        if not isinstance(state, tuple) or len(state) != len(parts):
            got = len(state) if isinstance(state, tuple) else type(state).__name__
            raise ValueError(f"optim.chain: expected the states of {len(parts)} transformations, got {got}")
        if len(parts) > 1:  # `update` maps over leaves, and `Views` have none
            grads, params = packed(grads), packed(params)
        new_states = []
        for tx, inner in zip(parts[:-1], state, strict=False):
            grads, new_inner = tx.update(grads, inner, params, **extra)
            new_states.append(new_inner)
            extra = _not_own(extra)
        return grads, new_states

    def fused(
        grads: Tree, state: Tree, params: Tree, found_inf: FoundInf | None, donate: bool, **extra: object
    ) -> tuple[Tree, Tree]:
        updates, states = _all_but_last(grads, state, params, extra)
        states = choose(found_inf, list(state[:-1]), states)
        to_last = _not_own(extra) if states else extra
        params, last = parts[-1].step(updates, state[-1], params, found_inf, donate, **to_last)
        return params, (*states, last)

    return parts[-1]._replace(
        init=lambda params: tuple(tx.init(params) for tx in parts),
        update=update,
        fused=fused,
        elementwise=all(tx.elementwise for tx in parts),
        labelled=parts[-1].labelled and all(map(_is_bare, parts[:-1])),
        mesh=parts[0].mesh,
        views=True,
    )


def _is_bare(tx: Transform) -> bool:
    """Whether a transformation is elementwise and has no state: then leaves of different labels do not interact."""
    return tx.elementwise and not tree.leaves(tx.init(torch.zeros(1, dtype=torch.float32, device="cpu")))


def _not_own(extra: Mapping[str, object]) -> Mapping[str, object]:
    """Arguments for a transformation whose gradients are another's updates, which that one may keep in its state."""
    return {**extra, "own_grads": False} if "own_grads" in extra else extra


class EveryState(NamedTuple):
    """Gradients since the last update (float32, 0-d), their mean, and the state of the inner transformation."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mean: Tree
    inner: Tree


def every_k(tx: TransformLike, k: int) -> Transform:
    """Apply `tx` to the mean of k gradients, every k-th time; the updates between are zero. No host read.

    >>> tx = every_k(scale(-1.0), 2)
    >>> first, state = tx.update(torch.tensor(2.0), tx.init(torch.tensor(0.0)))
    >>> first, tx.update(torch.tensor(4.0), state)[0]
    (tensor(0.), tensor(-3.))
    """
    inner = as_transform(tx)
    check_whole("optim.every_k: k", k, what="a number of gradients")

    def init(params: Tree) -> EveryState:
        return EveryState(start_count(params), tree.map(torch.zeros_like, params), inner.init(params))

    def update(grads: Tree, state: EveryState, params: Tree = None, **extra: object) -> tuple[Tree, EveryState]:
        count = state.count + 1
        mean = tree.map(lambda m, g: (m + (g - m) / beside(count, m)).to(m.dtype), state.mean, grads)
        due = (count == k).float()
        # every call runs `inner`, because the host does not know `due`; unless it is due, the result is thrown away.
        # `mean` is needed below, so `inner` must not overwrite it
        updates, new_inner = inner.update(mean, state.inner, params, **_not_own(extra))
        zero = tree.map(torch.zeros_like, updates)
        updates = choose(due, updates, zero)
        new_inner = choose(due, new_inner, state.inner)
        mean = choose(due, tree.map(torch.zeros_like, mean), mean)
        return updates, EveryState(count * (1 - due), mean, new_inner)

    return checked(
        Transform(init, update, elementwise=inner.elementwise, mesh=inner.mesh), Needs("every_k", EveryState)
    )


class HyperState(NamedTuple):
    """Hyper-parameters (0-d float64 tensors by name), number of updates made, and the state of the optimizer."""

    hyperparams: dict[str, Tensor]
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    inner: Tree


def _is_schedule(value: object) -> TypeGuard[Schedule]:
    return callable(value)  # `at` checks what it returns


def with_hyperparams(make: Callable[..., TransformLike], **hyperparams: object) -> Transform:
    """`make(**hyperparams)` with its hyper-parameters as tensors in the state, which may be changed between steps.

    Floats and tensors become 0-d tensors of the state. A schedule is evaluated at each update, and its value is kept in
    the state for you to read. Any other value is passed to `make` as it is. Changing a tensor does not make a compiled
    step compile again.

    >>> tx = with_hyperparams(scale, factor=-1.0)
    >>> state = tx.init(torch.tensor(0.0))
    >>> state = state._replace(hyperparams={"factor": torch.tensor(-3.0)})
    >>> tx.update(torch.tensor(2.0), state)[0]
    tensor(-6.)
    """
    if not callable(make):
        raise TypeError(f"optim.with_hyperparams: make: expected a function that makes an optimizer, got {shown(make)}")
    schedules = {name: value for name, value in hyperparams.items() if _is_schedule(value)}
    values = {name: value for name, value in hyperparams.items() if isinstance(value, float | Tensor)}
    static = {name: value for name, value in hyperparams.items() if name not in schedules and name not in values}

    def built(current: Mapping[str, Tensor]) -> Transform:
        return as_transform(make(**current, **static))

    def begun(count: Tensor) -> dict[str, Tensor]:
        numbers = values | {name: at(schedule, count) for name, schedule in schedules.items()}
        # copies, because a donated state is written to
        return {name: double(number).to(count.device, copy=True) for name, number in numbers.items()}

    def init(params: Tree) -> HyperState:
        count = start_count(params)
        start = begun(count)
        return HyperState(start, count, built(start).init(params))

    def current(state: HyperState) -> dict[str, Tensor]:
        old = state.hyperparams
        scheduled = {name: double(at(schedule, state.count)) for name, schedule in schedules.items()}
        return {**old, **{name: value.to(old[name].device) for name, value in scheduled.items()}}

    # `Any`, because `found_inf` among the arguments by name is read here
    def update(grads: Tree, state: HyperState, params: Tree = None, **extra: Any) -> tuple[Tree, HyperState]:
        now = current(state)
        updates, inner = built(now).update(grads, state.inner, params, **extra)
        return updates, HyperState(now, state.count + num_made(extra.get("found_inf")), inner)

    def fused(
        grads: Tree, state: HyperState, params: Tree, found_inf: FoundInf | None, donate: bool, **extra: object
    ) -> tuple[Tree, HyperState]:
        now = current(state)
        params, inner = built(now).step(grads, state.inner, params, found_inf, donate, **extra)
        count = state.count + num_made(found_inf)
        return params, HyperState(choose(found_inf, state.hyperparams, now), count, inner)

    sample = built(begun(torch.zeros((), dtype=torch.float32, device="cpu")))  # its flags are those of every update
    # a schedule counts the updates of all labels as one
    tx = Transform(init, update, fused, sample.elementwise, sample.labelled and not schedules, sample.mesh, views=True)
    return checked(tx, Needs("with_hyperparams", HyperState, sparse=True))
