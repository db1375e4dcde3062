"""Optimizers as pairs of pure functions over trees, in optax's shape; they know no ranks.

`init(params) -> state`; `update(grads, state, params, **extra) -> (updates, state)`; `apply_updates(params, updates)`.
An elementwise optimizer over `Sharded` parameters sees the few flat tensors of this rank: its state is partitioned
because they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels, tree

Schedule = Callable[[Tensor], Any]
LearningRate = float | Tensor | Schedule


class Transform(NamedTuple):
    """A gradient transformation: `init`, `update`, and if it has one its fused twin.

    `fused(grads, state, params, found_inf) -> (params, state)` updates params and state in place, in one kernel, and
    leaves them as they are where `found_inf` is 1; None where the leaves are not of a kind it takes.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    fused: Callable[..., tuple[Any, Any] | None] | None = None


class SgdState(NamedTuple):
    """Number of updates made (float32, 0-d) and the momenta, None without momentum."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    momentum: Any


class AdamState(NamedTuple):
    """Number of updates made (float32, 0-d, as torch's fused kernel wants it) and the two moments."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    mu: Any
    nu: Any


def _zero_count(params: Any) -> Tensor:
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.float32, device=leaves[0].device if leaves else None)


def _at(lr: LearningRate, count: Tensor) -> Any:
    return lr(count) if callable(lr) else lr


def _check_state(state: Any, expected: type, name: str) -> None:
    if not isinstance(state, expected):
        raise ValueError(
            f"optim.{name}: expected the state of its own init ({expected.__name__}), got {type(state).__name__}: "
            "this state was made by another optimizer"
        )


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, leaf by leaf, in the dtype of params.

    >>> apply_updates({"w": torch.tensor(1.0)}, {"w": torch.tensor(-0.5)})
    {'w': tensor(0.5000)}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def sgd(lr: LearningRate, momentum: float = 0, nesterov: bool = False, weight_decay: float = 0) -> Transform:
    """m <- momentum m + g + weight_decay p; p <- p - lr m (nesterov: p - lr (g + weight_decay p + momentum m)).

    `lr` is a number, a tensor, or a schedule of the number of updates made. As torch.optim.SGD with dampening 0.

    >>> tx = sgd(0.5)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-1.)

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013).
    """
    if nesterov and not momentum:
        raise ValueError("sgd: nesterov=True needs a momentum above 0")
    hyper = kernels.Sgd(momentum, nesterov, weight_decay)

    def init(params: Any) -> SgdState:
        return SgdState(_zero_count(params), tree.map(torch.zeros_like, params) if momentum else None)

    def check(state: SgdState) -> None:
        _check_state(state, SgdState, "sgd")
        if (state.momentum is None) != (not momentum):
            raise ValueError(
                f"optim.sgd: momentum={momentum}, but the state was made {'without' if momentum else 'with'} one: make "
                "it with this optimizer's own init"
            )

    def update(grads: Any, state: SgdState, params: Any = None, **extra: Any) -> tuple[Any, SgdState]:
        check(state)
        one = partial(kernels.sgd, lr=_at(lr, state.count), hyper=hyper)
        leaves, spec = tree.flatten(params)
        moments = tree.leaves(state.momentum) if momentum else [None] * len(leaves)
        rows = [one(*row) for row in zip(leaves, tree.leaves(grads), moments, strict=True)]
        return tree.unflatten(spec, [row[0] for row in rows]), SgdState(
            state.count + 1, tree.unflatten(spec, [row[1] for row in rows]) if momentum else None
        )

    def fused(grads: Any, state: SgdState, params: Any, found_inf: Tensor | None = None) -> Any:
        check(state)
        leaves = tree.leaves(params)
        if not kernels.can_fuse(leaves):
            return None
        momenta = tree.leaves(state.momentum) if momentum else None
        kernels.sgd_(leaves, tree.leaves(grads), momenta, found_inf, lr=_at(lr, state.count), hyper=hyper)
        return params, state._replace(count=state.count + (1 if found_inf is None else 1 - found_inf))

    return Transform(init, update, fused)


def adamw(
    lr: LearningRate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Transform:
    """Adam with decoupled weight decay: p <- p - lr (mû / (sqrt(nû) + eps) + weight_decay p).

    mû and nû are the bias-corrected running means of g and g². `lr` is a number, a tensor, or a schedule of the number
    of updates made. As torch.optim.AdamW.

    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019).
    """
    hyper = kernels.Adam(b1, b2, eps, weight_decay)

    def init(params: Any) -> AdamState:
        return AdamState(_zero_count(params), tree.map(torch.zeros_like, params), tree.map(torch.zeros_like, params))

    def update(grads: Any, state: AdamState, params: Any = None, **extra: Any) -> tuple[Any, AdamState]:
        _check_state(state, AdamState, "adamw")
        leaves, spec = tree.flatten(params)
        one = partial(kernels.adamw, count=state.count + 1, lr=_at(lr, state.count), hyper=hyper)
        columns = (leaves, tree.leaves(grads), tree.leaves(state.mu), tree.leaves(state.nu))
        rows = [one(*row) for row in zip(*columns, strict=True)]
        delta, mu, nu = (tree.unflatten(spec, [row[i] for row in rows]) for i in range(3))
        return delta, AdamState(state.count + 1, mu, nu)

    def fused(grads: Any, state: AdamState, params: Any, found_inf: Tensor | None = None) -> Any:
        _check_state(state, AdamState, "adamw")
        leaves = tree.leaves(params)
        if not kernels.can_fuse(leaves):
            return None
        lists = (leaves, tree.leaves(grads), tree.leaves(state.mu), tree.leaves(state.nu))
        count = kernels.adamw_(*lists, state.count, found_inf, lr=_at(lr, state.count), hyper=hyper)
        return params, state._replace(count=count)

    return Transform(init, update, fused)
