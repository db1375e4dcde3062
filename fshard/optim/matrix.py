"""Optimizers over leaves, not only elements: norms of leaves, rows and columns, whole matrices.

One small collective adds up the parts of norms and sums. Whole matrices go to ranks, balanced by cost, and results
back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import primitives
from ..core import tree
from ..core.arguments import check_flags, check_hyperparams, check_whole, is_number, wrong
from ..core.func_levels import depending, differentiates
from ..core.scalars import Number, beside, is_zero, on_device
from ..core.tracing import is_tracing
from ..core.tree import Tree
from ..layout.layout import Layout, Leaf
from ..layout.norms import leaf_norms, scale_leaves_
from ..layout.pieces import Parts, copied, device_of, elements, layout_of, packed, pick, pieces, put_part
from ..layout.row import Span
from ..update.base import Needs, Transform, TransformLike, as_transform, at, checked, clip_by, clip_factor, start_count
from ..update.elementwise import AdamState, Rate, adam_transform
from ..update.transforms import by_label
from ..whole.copies import on_copies
from ..whole.moves import collect, on_rank, owned, spread
from ..whole.updates import back, bring, to_owners


def lamb(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-6, weight_decay: Number = 0.0) -> Transform:
    """Scale AdamW's step u of each leaf to the leaf's norm: p <- p - lr (|p| / |u|) u, or p - lr u if a norm is 0.

    u = mû / (sqrt(nû) + eps) + weight_decay p, with `b1` and `b2` as in `adam`.

    >>> tx = lamb(0.1)
    >>> tx.update(torch.tensor([2.0]), tx.init(torch.tensor([3.0])), torch.tensor([3.0]))[0]
    tensor([-0.3000])

    Source: You et al., Large batch optimization for deep learning: training BERT in 76 minutes (2020); as optax.lamb.
    """
    check_hyperparams("lamb", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    inner = adam_transform("lamb", -1.0, b1, b2, eps, weight_decay, decoupled=True)

    def update(
        grads: Tree, state: AdamState, params: Tree = None, exact_norms: bool = False, **extra: object
    ) -> tuple[Tree, AdamState]:
        rate = at(lr, state.count)
        steps, state = inner.update(grads, state, params)
        layout = layout_of(steps)
        # (leaves,) float64 each
        param_norms, step_norms = (leaf_norms(x, layout=layout, exact=exact_norms) for x in (params, steps))
        # a division by 0 would have a derivative of NaN, even if `where` chooses 1.0
        safe = torch.where(step_norms > 0, step_norms, 1.0)
        ratios = torch.where((param_norms > 0) & (step_norms > 0), param_norms / safe, 1.0)
        return scale_leaves_(steps, -rate * ratios, layout), state

    tx = Transform(inner.init, on_copies(update, "lamb"), over="tree", draws=False)
    return checked(tx, Needs("lamb", AdamState, params=True))


@dataclass(frozen=True)
class AdafactorState:
    """Number of updates made (float32, 0-d); mean squares of rows and columns, by path; nu of other leaves."""

    count: Tensor
    row_var: dict[str, Tensor]  # (..., n, 1)
    col_var: dict[str, Tensor]  # (..., 1, m)
    variance: Tree
    vectors: Layout | None  # leaves with fewer than two dims


tree.register_fields(AdafactorState, ("count", "row_var", "col_var", "variance"), ("vectors",))


class Factors(NamedTuple):
    """A leaf of two or more dims as a stack of matrices (n, m); rows are numbered through the stack."""

    leaf: Leaf
    n: int
    m: int
    turned: bool = False  # True for a split along dim 1: elements lie by columns

    def fold(self, elements: Tensor, begin: int) -> tuple[Tensor, int, Tensor]:
        """Return zero-padded rows (rows, m) of elements from `begin` on, number of the first, matrix of each row."""
        first, last = begin // self.m, -(-(begin + elements.numel()) // self.m)
        rows = elements.new_zeros((last - first) * self.m)
        rows[begin - first * self.m :][: elements.numel()] = elements
        return rows.view(-1, self.m), first, torch.arange(first, last, device=elements.device) // self.n

    def add_by_matrix(self, sums: Tensor, rows: Tensor, first: int) -> None:
        """Add each matrix's rows to `sums` (matrices, m), in fixed order, unlike index_add_ on a GPU."""
        last = first + len(rows)
        begin, end = min(-(-first // self.n) * self.n, last), max(last // self.n * self.n, first)
        if begin < end:
            whole = rows[begin - first : end - first].view(-1, self.n, self.m)
            sums[begin // self.n : end // self.n] += whole.sum(1)
        for start, stop in ((first, begin), (max(begin, end), last)):
            if start < stop:
                sums[start // self.n] += rows[start - first : stop - first].sum(0)


def _factors(leaf: Leaf) -> Factors | None:
    if len(leaf.shape) < 2 or not leaf.numel:
        return None
    if leaf.split is None or not leaf.split.order:
        return Factors(leaf, leaf.shape[-2], leaf.shape[-1])
    if leaf.split.order == (1,) and len(leaf.shape) == 2:
        return Factors(leaf, leaf.shape[1], leaf.shape[0], turned=True)
    raise ValueError(
        f"optim.adafactor: leaf {leaf.path!r} of shape {list(leaf.shape)}, {leaf.split}: expected a matrix in one "
        "block, or a leaf split along dim 0. Give each block a leaf of its own, or use another optimizer "
        "(optim.by_label)"
    )


def adafactor(
    lr: Rate = 1e-2,
    beta2_decay: Number = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: Number = 1.0,
    weight_decay: Number = 0.0,
) -> Transform:
    """Divide gradients by root second moments, kept for matrices as row and column means: nu = row col / mean(row).

    nu is a running mean of g², with decay 1 - t^beta2_decay at step t; eps = (eps1, eps2). u = g / sqrt(max(nu,
    eps1²)), of RMS at most d; p <- p - lr weight_decay p - max(eps2, RMS(p)) min(lr, t^-½) u. Leaves of fewer than two
    dims keep nu whole. As torch.optim.Adafactor.

    >>> tx = adafactor(0.1)
    >>> tx.update(torch.tensor([2.0]), tx.init(torch.tensor([3.0])), torch.tensor([3.0]))[0]
    tensor([-0.3000])

    Source: Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory cost (2018).
    """
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(f"optim.adafactor: {wrong('eps', eps, 'two numbers, the first may be None')}")
    check_hyperparams("adafactor", lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)
    check_hyperparams("adafactor", **{"eps[0]": 0.0 if eps[0] is None else eps[0], "eps[1]": eps[1]})

    def init(params: Tree) -> AdafactorState:
        layout, count = layout_of(params), start_count(params)
        row, col = dict[str, Tensor](), dict[str, Tensor]()
        for leaf in (layout.leaves[n] for n in layout.numbers):
            if _factors(leaf):
                *batch, n, m = leaf.shape
                row[leaf.path] = torch.zeros(*batch, n, 1, dtype=leaf.dtype, device=count.device)
                col[leaf.path] = torch.zeros(*batch, 1, m, dtype=leaf.dtype, device=count.device)
        others = [n for n in layout.numbers if not _factors(layout.leaves[n])]
        vectors = layout.pick(others) if others else None
        nu = tree.map(torch.zeros_like, packed(pick(params, vectors))) if vectors else None
        return AdafactorState(count, row, col, nu, vectors)

    def update(
        grads: Tree, state: AdafactorState, params: Tree = None, exact_norms: bool = False, **extra: object
    ) -> tuple[Tree, AdafactorState]:
        layout, t = layout_of(grads), state.count.double() + 1
        rate = on_device(at(lr, state.count), t.device)
        state = _averaged(state, grads, layout, t**beta2_decay)
        steps = _divided(grads, state, layout, eps[0])
        sizes = _root_sizes([leaf.numel for leaf in layout.leaves], t.device)
        # root mean squares, (leaves,) float64
        rms_of_step, rms_of_params = (leaf_norms(x, layout=layout, exact=exact_norms) / sizes for x in (steps, params))
        alpha = rms_of_params.clamp(min=eps[1]) * torch.minimum(rate, t.rsqrt())
        steps = scale_leaves_(steps, -alpha / (rms_of_step / d).clamp(min=1.0), layout)
        return _decayed_updates(steps, params, rate, weight_decay), state

    def on_vectors(
        grads: Tree, state: AdafactorState, params: Tree = None, exact_norms: bool = False, **extra: object
    ) -> tuple[Tree, AdafactorState]:
        """Update; if gradients are whole copies, use their layout in place of the sharded layout `state.vectors`."""
        cut, whole = state.vectors, layout_of(grads)
        if cut is None or whole.flat or not cut.flat:
            return update(grads, state, params, exact_norms)
        vectors = whole.pick(cut.numbers)
        here = replace(state, variance=Parts(vectors, tree.leaves(state.variance)), vectors=vectors)
        steps, new = update(grads, here, params, exact_norms)
        return steps, replace(new, variance=Parts(on_rank(cut), tree.leaves(new.variance)), vectors=cut)

    tx = Transform(init, on_copies(on_vectors, "adafactor"), over="tree", draws=False)
    return checked(tx, Needs("adafactor", AdafactorState, params=True, real=True))


def _averaged(state: AdafactorState, grads: Tree, layout: Layout, weight: Tensor) -> AdafactorState:
    means = _row_and_column_means(grads, layout)
    row, col = (
        {path: old[path].lerp(new.to(old[path].dtype), weight.to(old[path].dtype)) for path, new in now.items()}
        for old, now in zip((state.row_var, state.col_var), means, strict=True)
    )
    variance = state.variance
    if state.vectors is not None:
        squares = tree.map(torch.square, packed(pick(grads, state.vectors)))
        variance = tree.map(lambda old, g2: old.lerp(g2, beside(weight.to(old.dtype), old)), variance, squares)
    return AdafactorState(state.count + 1, row, col, variance, state.vectors)


def _divided(grads: Tree, state: AdafactorState, layout: Layout, eps: float | None) -> Tree:
    """Divide gradients by the roots of their second moments, in new tensors."""
    steps = tree.map(lambda g: depending(torch.zeros_like(g), (grads, state)), grads)
    for (span, g), (number, out) in zip(elements(grads, layout), pieces(steps, layout), strict=True):
        leaf = layout.leaves[number]
        if factors := _factors(leaf):
            step = _factored(g, span, factors, state.row_var[leaf.path], state.col_var[leaf.path], _floor(eps, g))
            out.copy_(step if layout.flat else leaf.shaped(step))
    if state.vectors is None:
        return steps
    vectors = packed(pick(grads, state.vectors))
    roots = tree.map(lambda g, v: g * v.clamp(min=_floor(eps, g) ** 2).rsqrt(), vectors, state.variance)
    return put_part(steps, roots, state.vectors)


def _root_sizes(numels: Sequence[int], device: torch.device) -> Tensor:
    """Return square roots of `numels`, (leaves,) float64, cached because a copy from the host would synchronize."""
    # a graph must not capture a cached tensor
    make = _made_roots if is_tracing() or torch.compiler.is_dynamo_compiling() else _kept_roots
    return make(tuple(numels), device)


def _made_roots(numels: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # no backward may save an inference tensor
        return torch.tensor([math.sqrt(max(n, 1)) for n in numels], dtype=torch.float64, device=device)


_kept_roots = lru_cache(maxsize=64)(_made_roots)


def _decayed_updates(updates: Tree, params: Tree, rate: Number, weight_decay: Number) -> Tree:
    if is_zero(weight_decay):
        return updates
    decay = rate * weight_decay
    return tree.map(lambda u, p: (u - beside(decay, p) * p).to(u.dtype), updates, params)


def _floor(eps: float | None, g: Tensor) -> float:
    return torch.finfo(g.dtype).eps if eps is None else eps


def _row_and_column_means(grads: Tree, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return mean squares by path, from one collective."""
    shapes = {n: _factors(layout.leaves[n]) for n in layout.numbers}
    factored = {n: shape for n, shape in shapes.items() if shape}
    if not factored:
        return {}, {}
    if differentiates(grads) and not layout.flat:  # sums in place have no derivative
        squares = {layout.leaves[n].path: g.double().square() for n, g in pieces(grads, layout) if n in factored}
        row = {path: x.mean(-1, keepdim=True) for path, x in squares.items()}
        return row, {path: x.mean(-2, keepdim=True) for path, x in squares.items()}
    sizes = [size for f in factored.values() for size in (f.leaf.numel // f.m, f.leaf.numel // f.n)]
    sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device_of(grads))
    views = dict(zip(((n, k) for n in factored for k in (0, 1)), sums.split(sizes), strict=True))
    for (number, _, _, begin, _), g in elements(grads, layout):
        if number in factored and number in layout.counted:
            factors = factored[number]
            g2, first, _ = factors.fold(g.square().to(sums.device), begin)
            views[number, 0][first : first + len(g2)] += g2.sum(1, dtype=torch.float64)
            factors.add_by_matrix(views[number, 1].view(-1, factors.m), g2.double(), first)
    whole = primitives.total(sums, layout.mesh, layout.axes, label="rows and columns").split(sizes)
    row, col = dict[str, Tensor](), dict[str, Tensor]()
    for f, row_sums, col_sums in zip(factored.values(), whole[::2], whole[1::2], strict=True):
        *batch, n, m = f.leaf.shape
        row_sums, col_sums = (col_sums, row_sums) if f.turned else (row_sums, col_sums)
        row[f.leaf.path] = (row_sums / m).view(*batch, n, 1)
        col[f.leaf.path] = (col_sums / n).view(*batch, 1, m)
    return row, col


def _factored(g: Tensor, span: Span, factors: Factors, row: Tensor, col: Tensor, eps: float) -> Tensor:
    rows, first, matrix = factors.fold(g, span.begin)  # (rows, m), matrix: (rows,)
    row, col = row.to(g.device), col.to(g.device)
    if factors.turned:
        row, col = col.mT, row.mT
    mean = row.mean(-2).clamp(min=eps).view(-1, 1)[matrix]  # (rows, 1)
    nu = row.view(-1, 1)[first : first + len(rows)] * col.view(-1, factors.m)[matrix] / mean  # (rows, m)
    start = span.begin - first * factors.m  # without the zeros that `fold` put before g
    return (rows * nu.clamp(min=eps * eps).rsqrt()).view(-1)[start : start + span.numel]


def whole_leaves(tx: TransformLike) -> Transform:
    """Run `tx` on whole leaves: each sharded leaf is sent to one rank, balanced by size, and its update back.

    A `Transform` without `over` runs on whole leaves anyway; use `whole_leaves` for optimizers of `fshard.optim`.
    The state lies with the whole leaves.

    >>> tx = whole_leaves(sgd(1.0))
    >>> tx.update(torch.ones(2), tx.init(torch.ones(2)))[0]
    tensor([-1., -1.])
    """
    inner = as_transform(tx)

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(bring(grads), state, None if params is None else bring(params), **extra)
        return back(updates, grads), state

    def fused(
        grads: Tree, state: Tree, params: Tree, found_inf: Tensor | None, donate: bool, **extra: object
    ) -> tuple[Tree, Tree]:
        if not layout_of(params).flat:
            return inner.step(grads, state, params, found_inf, donate, **extra)
        state = state if donate else copied(state)
        # `bring` does not copy a leaf already whole on this rank
        whole_params = bring(params) if donate else tree.map(torch.clone, bring(params))
        new, state = inner.step(bring(grads), state, whole_params, found_inf, True, **extra)
        return back(new, params), state

    on_all = on_copies(update, "whole_leaves", to_owners, apart=False)
    made = Transform(lambda params: inner.init(bring(params)), on_all, fused, "tree", draws=False)
    return checked(made, Needs("whole_leaves")).with_fields(draws=inner.draws)


class MuonState(NamedTuple):
    """Number of updates made (float32, 0-d) and momenta."""

    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    momentum: Tree


def muon(
    lr: Rate = 1e-3,
    weight_decay: Number = 0.1,
    momentum: Number = 0.95,
    nesterov: bool = True,
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    steps: int = 5,
    adjust_lr: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rest: TransformLike | None = None,
) -> Transform:
    """Make momentum orthogonal: p <- p - lr weight_decay p - lr a O, with O near U Vᵀ of m = U S Vᵀ.

    m <- momentum m + (1 - momentum) g; with `nesterov`, O is made from momentum m + (1 - momentum) g.
    As torch.optim.Muon.

    - O: by `steps` Newton-Schulz iterations with `coefficients`, in `dtype`, on m divided by its norm (at least `eps`)
    - a: for a matrix (A, B), sqrt(max(1, A / B)), or 0.2 sqrt(max(A, B)) with `adjust_lr`="match_rms_adamw"; ValueError
      for another `adjust_lr`
    - `rest`: updates leaves that are not matrices (default adamw(lr)); to give it embeddings too, use `by_label`

    Each matrix cut over ranks is sent to one rank, balanced by cost: two all-to-alls for all matrices.

    >>> tx = muon(0.1, weight_decay=0.0)
    >>> params = {"w": torch.eye(2), "b": torch.ones(2)}
    >>> tx.update(params, tx.init(params), params)[0]["b"]
    tensor([-0.1010, -0.1010])

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024).
    """
    if adjust_lr not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"muon: adjust_lr={adjust_lr!r}: expected None, 'original' or 'match_rms_adamw'")
    check_hyperparams("muon", lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
    check_flags(**{"optim.muon: nesterov": nesterov})
    check_whole("optim.muon: steps", steps, what="a number of iterations")
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3 or not all(map(is_number, coefficients)):
        raise TypeError(f"optim.muon: {wrong('coefficients', coefficients, 'three numbers')}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"optim.muon: {wrong('dtype', dtype, 'a floating dtype of torch')}")

    def init(params: Tree) -> MuonState:
        return MuonState(start_count(params), tree.map(torch.zeros_like, params))

    def update(grads: Tree, state: MuonState, params: Tree = None, **extra: object) -> tuple[Tree, MuonState]:
        mixed = partial(tree.map, lambda m, g: (momentum * m + (1 - momentum) * g).to(m.dtype))
        new_momentum = mixed(state.momentum, grads)
        directions = mixed(new_momentum, grads) if nesterov else new_momentum
        rate = at(lr, state.count)
        layout = layout_of(directions)
        on_all = differentiates(directions) and not layout.flat and not any(row.over for row in layout.rows)
        # matrices (A, B), each on one rank
        whole = directions if on_all else _to_owners(directions, layout)
        ways = (orthogonal(x, coefficients, eps, steps, dtype).to(x.dtype) for x in whole.tensors)
        scaled = [way * -_shape_factor(way, adjust_lr) for way in ways]
        updates = tree.unflatten(tree.flatten(whole)[1], scaled)
        updates = updates if on_all else spread(updates, directions, "muon")
        updates = tree.map(lambda u: (beside(rate, u) * u).to(u.dtype), updates)
        updates = _decayed_updates(updates, params, rate, weight_decay)
        return updates, MuonState(state.count + 1, new_momentum)

    fallback = adam_transform("adamw", lr, 0.9, 0.999, 1e-8, 0.01, decoupled=True) if rest is None else rest
    needs = Needs("muon", MuonState, params=not is_zero(weight_decay), real=True)
    matrices = checked(Transform(init, on_copies(update, "muon"), over="tree", draws=False), needs)
    by_kind: dict[str, TransformLike] = {"matrix": matrices, "rest": fallback}
    return by_label(by_kind, lambda path, leaf: "matrix" if leaf.ndim == 2 else "rest")


def _to_owners(x: Tree, layout: Layout) -> Parts:
    # cost: one product with the small side's Gram matrix
    return collect(x, owned(layout, layout.mesh, layout.axes, lambda leaf: leaf.numel * min(leaf.shape)), "muon")


def _shape_factor(x: Tensor, adjust_lr: str | None) -> float:
    rows, cols = x.shape
    by_rms = adjust_lr == "match_rms_adamw"
    return 0.2 * math.sqrt(max(rows, cols)) if by_rms else math.sqrt(max(1, rows / max(cols, 1)))


def orthogonal(
    x: Tensor, coefficients: tuple[float, float, float], eps: float, steps: int, dtype: torch.dtype
) -> Tensor:
    """Newton-Schulz: x <- a x + (b (x xᵀ) + c (x xᵀ)²) x, `steps` times, on x / |x|."""
    a, b, c = coefficients
    wide = x.to(dtype)
    tall = x.shape[0] > x.shape[1]
    wide = wide.T if tall else wide  # (small, large), for a Gram matrix (small, small)
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


def clip_by_leaf_norm(max_norm: Number, p: float = 2) -> Transform:
    """Multiply each leaf by min(1, max_norm / (its p-norm + 1e-6)): one small collective for all leaves.

    >>> clip_by_leaf_norm(1.0).update({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor(0.5)}, ())[0]
    {'a': tensor([0.6000, 0.8000]), 'b': tensor(0.5000)}
    """

    def clipped(grads: Tree, own_grads: bool, exact_norms: bool) -> Tree:
        factors = clip_factor(leaf_norms(grads, p, exact=exact_norms), max_norm)  # (leaves,)
        return scale_leaves_(grads if own_grads else tree.map(torch.clone, grads), factors)

    tx = clip_by("clip_by_leaf_norm", max_norm, p, clipped)
    return tx.with_fields(update=on_copies(tx.update, "clip_by_leaf_norm"))
