"""L-BFGS over trees: one small collective reduces all dot products of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_function, check_hyperparams, check_whole
from ..core.scalars import beside
from ..core.tree import Tree
from ..layout.norms import global_norm, gram
from ..update.base import Needs, Transform, apply_updates, at, checked, start_count
from ..update.elementwise import Rate
from ..update.kernels import where
from ..whole.copies import on_copies

_LEAST_CURVATURE = 1e-10  # pairs with less sᵀy are left out, as in torch.optim.LBFGS


class LbfgsState(NamedTuple):
    """Iterations made (float32, 0-d), last parameters and gradients; their latest differences, s and y."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    params: Tree
    grads: Tree
    s: tuple[Tree, ...]  # oldest first; all zeros in a new state
    y: tuple[Tree, ...]


def lbfgs(lr: Rate = 1.0, history_size: int = 10, max_iter: int = 1) -> Transform:
    """Step along -H g, with the inverse Hessian H estimated from recent differences of parameters and gradients.

    H comes from the two-loop recursion over the `history_size` latest pairs (s, y) with sᵀy > 1e-10. The step is
    -lr H g, in the first iteration -min(1, 1 / |g|₁) lr H g. An update is one iteration; `update(grads, state, params,
    grad_fn=fn)` makes `max_iter` iterations, with a call of `fn(params) -> grads` before each further iteration. As
    torch.optim.LBFGS with `fn` as closure, without a line search or tolerances.

    >>> tx, w = lbfgs(max_iter=3), torch.tensor([3.0, -1.0])
    >>> updates, _ = tx.update(4 * w, tx.init(w), w, grad_fn=lambda w: 4 * w)
    >>> apply_updates(w, updates).abs().max() < 1e-6
    tensor(True)

    Source: Liu and Nocedal, On the limited memory BFGS method (1989); the products in one collective: Chen et al.,
    Large-scale L-BFGS using MapReduce (2014).
    """
    check_hyperparams("lbfgs", lr)
    check_whole("optim.lbfgs: history_size", history_size, what="a number of pairs")
    check_whole("optim.lbfgs: max_iter", max_iter, what="a number of iterations")

    def init(params: Tree) -> LbfgsState:
        zeros = partial(tree.map, torch.zeros_like, params)
        s, y = (tuple(zeros() for _ in range(history_size)) for _ in range(2))
        return LbfgsState(start_count(params), zeros(), zeros(), s, y)

    def iterate(grads: Tree, state: LbfgsState, params: Tree, exact_norms: bool) -> tuple[Tree, LbfgsState]:
        moved = state.count > 0
        # m + 1 differences (m = history_size); below, the oldest or the newest is dropped
        s = (*state.s, _difference(params, state.params, moved))
        y = (*state.y, _difference(grads, state.grads, moved))
        products = gram([*s, *y, grads])  # (2 m + 3, 2 m + 3): dot products
        keeps = products[history_size, 2 * history_size + 1] > _LEAST_CURVATURE  # sᵀy of the newest pair
        s, y = (tuple(tree.map(partial(where, keeps), x, old) for old, x in pairwise(xs)) for xs in (s, y))
        first = (1 / global_norm(grads, 1, exact_norms)).clamp(max=1.0)
        rate = at(lr, state.count) * torch.where(moved, 1.0, first)
        weights = (_direction(_kept(products, keeps)) * rate).unbind()  # 2 m + 1 weights, 0-d
        updates = tree.map(lambda *xs: _weighted_sum(weights, xs), *s, *y, grads)
        here, slope = tree.map(torch.clone, (params, grads))  # the caller may write to its tensors
        return updates, LbfgsState(state.count + 1, here, slope, s, y)

    iteration = on_copies(iterate, "lbfgs", apart=False)

    def update(
        grads: Tree,
        state: LbfgsState,
        params: Tree = None,
        grad_fn: Callable[[Tree], Tree] | None = None,
        exact_norms: bool = False,
        **extra: object,
    ) -> tuple[Tree, LbfgsState]:
        if grad_fn is not None:
            check_function("optim.lbfgs: grad_fn", grad_fn, "grad_fn(params) -> grads")
        updates, state = iteration(grads, state, params, exact_norms=exact_norms)
        for _ in range(max_iter - 1):
            if grad_fn is None:
                break
            here = apply_updates(params, updates)
            further, state = iteration(grad_fn(here), state, here, exact_norms=exact_norms)
            updates = tree.map(torch.add, updates, further)
        return updates, state

    needs = Needs("lbfgs", LbfgsState, params=True, real=True)
    return checked(Transform(init, update, over="tree", draws=False), needs)


def _difference(new: Tree, old: Tree, moved: Tensor) -> Tree:
    return tree.map(lambda a, b: where(moved, a - b, torch.zeros_like(a)), new, old)


def _kept(products: Tensor, keeps: Tensor) -> Tensor:
    """`products` without the oldest pair if `keeps`, else without the newest."""
    m = len(products) // 2
    pairs = torch.arange(m - 1, device=products.device) + keeps.long()  # (m - 1,)
    index = torch.cat([pairs, pairs + m, torch.full_like(pairs[:1], 2 * m)])
    return products[index][:, index]  # (2 m - 1, 2 m - 1)


def _direction(products: Tensor) -> Tensor:
    """Return -H g as weights (2 m + 1,) of s, y and g, from dot products."""
    m = len(products) // 2
    curvature = products.diagonal(m)[:m]  # sᵀy
    used = curvature > _LEAST_CURVATURE  # False for the zeros of `init`
    rho = torch.where(used, 1 / torch.where(used, curvature, 1.0), 0.0)  # 1 / 0 would have a derivative of NaN
    zero, scale = torch.zeros_like(curvature[0]), torch.ones_like(curvature[0])
    alphas: dict[int, Tensor] = {}  # torch.compile cannot trace `dict[int, Tensor]()`
    weights = [*[zero] * 2 * m, zero - 1]  # a list: writing one element on a GPU copies from the host
    for i in reversed(range(m)):
        alphas[i] = rho[i] * (torch.stack(weights) @ products[i])
        weights[m + i] = weights[m + i] - alphas[i]
    for i in range(m):
        scale = torch.where(used[i], curvature[i] / torch.where(used[i], products[m + i, m + i], 1.0), scale)
    weights = [weight * scale for weight in weights]
    for i in range(m):
        weights[i] = weights[i] + (alphas[i] - rho[i] * (torch.stack(weights) @ products[m + i]))
    return torch.stack(weights)


def _weighted_sum(weights: Sequence[Tensor], rows: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(rows[0])
    for weight, row in zip(weights, rows, strict=True):
        total = total + (beside(weight, row) * row).to(row.dtype)
    return total
