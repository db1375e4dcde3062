"""The arithmetic of elementwise updates: plain reference functions, and kernels that update in place in one pass.

A reference takes a parameter, a gradient, the moments, and constants by name; it returns the change of the parameter
and the new moments. Constants are computed once for all rows, in float64. If torch has no fused kernel for an
optimizer, `in_blocks` runs the reference block by block: temporaries stay small. Blocks fit a CPU's cache, or
have 2^24 elements on an accelerator.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.adam import adam as _torch_adam
from torch.optim.sgd import sgd as _torch_sgd

from ..core import tree
from ..core.arguments import shown
from ..core.func_levels import differentiates
from ..core.scalars import Number, beside, is_zero, wide
from ..core.storage import CACHED, MOST, block_size
from ..core.tracing import is_tracing
from ..core.tree import Tree

Moments = tuple[Tensor, ...]
Change = tuple[Tensor, Moments]  # the change of a parameter, and new moments
Reference = Callable[[Tensor, Tensor, Moments], Change]
Columns = Sequence[Sequence[Tensor]]  # parameters, gradients and each moment: one tensor for each row


# numbers, 0-d tensors or flags by name
Constants: TypeAlias = Mapping[str, Any]

_NUMBERS = (numbers.Number, torch.SymInt, torch.SymFloat)
_KEEPS_STRUCTURE = (
    "a step that may be skipped keeps the structure of a state, and the shape of each tensor in it. Start with its "
    "final form (fshard.tree.map(torch.zeros_like, params))"
)
_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


def constants_beside(constants: Constants, x: Tensor) -> Constants:
    return {name: beside(number, x) for name, number in constants.items()}


def _decayed(p: Tensor, g: Tensor, weight_decay: Number) -> Tensor:
    return g if is_zero(weight_decay) else g + weight_decay * p


def mean_root(x: Tensor) -> Tensor:
    """The square root, with derivative 0 at 0: with sqrt, g / (sqrt(g²) + eps) has a derivative of NaN there."""
    if not differentiates([x]):
        return x.sqrt()
    is_zero = x == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, x).sqrt())


def by_sgd(
    p: Tensor, g: Tensor, moments: Moments, *, lr: Number, momentum: Number, nesterov: bool, weight_decay: Number
) -> Change:
    g = _decayed(p, g, weight_decay)
    if not moments:
        return -lr * g, ()
    m = momentum * moments[0] + g
    return -lr * (g + momentum * m if nesterov else m), (m,)


def by_adam(
    p: Tensor,
    g: Tensor,
    moments: Moments,
    *,
    lr: Number,
    b1: Number,
    b2: Number,
    eps: Number,
    weight_decay: Number,
    decoupled: bool,
    correction1: Number,
    correction2: Number,
) -> Change:
    """The change is -lr mû / (sqrt(nû) + eps), with mû = mu / correction1 and nû = nu / correction2.

    Corrections of update t are 1 - b1^t and 1 - b2^t. Weight decay is added to g, or if `decoupled` to the step.
    """
    if not decoupled:
        g = _decayed(p, g, weight_decay)
    mu = b1 * moments[0] + (1 - b1) * g
    nu = b2 * moments[1] + (1 - b2) * g * g
    step = mu / correction1 / (mean_root(nu / correction2) + eps)
    return -lr * (_decayed(p, step, weight_decay) if decoupled else step), (mu, nu)


def by_rmsprop(
    p: Tensor,
    g: Tensor,
    moments: Moments,
    *,
    lr: Number,
    alpha: Number,
    eps: Number,
    weight_decay: Number,
    momentum: Number,
    centered: bool,
) -> Change:
    g = _decayed(p, g, weight_decay)
    nu, *others = moments  # others: the mean of gradients if centered, the buffer if momentum
    nu = alpha * nu + (1 - alpha) * g * g
    new, variance = [nu], nu
    if centered:
        mean = alpha * others.pop(0) + (1 - alpha) * g
        new, variance = [nu, mean], nu - mean * mean
    step = g / (mean_root(variance) + eps)
    if others:
        step = momentum * others[0] + step
        new.append(step)
    return -lr * step, tuple(new)


def by_adagrad(p: Tensor, g: Tensor, moments: Moments, *, lr: Number, eps: Number, weight_decay: Number) -> Change:
    """`lr` is the rate after its decay."""
    g = _decayed(p, g, weight_decay)
    total = moments[0] + g * g
    return -lr * g / (mean_root(total) + eps), (total,)


def by_lion(
    p: Tensor, g: Tensor, moments: Moments, *, lr: Number, b1: Number, b2: Number, weight_decay: Number
) -> Change:
    step = (b1 * moments[0] + (1 - b1) * g).sign()
    return -lr * _decayed(p, step, weight_decay), (b2 * moments[0] + (1 - b2) * g,)


def apply(reference: Reference, p: Tensor, g: Tensor, moments: Moments) -> Change:
    """Run a reference; for complex tensors, on real and imaginary parts."""
    if p.is_complex():
        # a lazily conjugated tensor (z.conj(), or a gradient through one) has no real view
        rp, rg, *rows = (torch.view_as_real(x.resolve_conj()) for x in (p, g, *moments))
        delta, new = apply(reference, rp, rg, tuple(rows))
        return torch.view_as_complex(delta), tuple(torch.view_as_complex(m) for m in new)
    shape = p.shape
    if not shape:  # float64 constants would promote a 0-d tensor
        p, g, moments = p.reshape(1), g.reshape(1), tuple(m.reshape(1) for m in moments)
    delta, new = reference(p, g, moments)
    new_moments = tuple(n.to(old.dtype) for n, old in zip(new, moments, strict=True))
    delta = delta.to(p.dtype)
    # sparse tensors cannot be reshaped
    return (delta, new_moments) if shape else (delta.reshape(shape), tuple(n.reshape(shape) for n in new_moments))


def in_blocks(reference: Reference, columns: Columns, skip: Tensor | None) -> None:
    """Run a reference in place, block by block; nothing changes if `skip` is 1."""
    for row in zip(*columns, strict=True):
        # in a graph for an accelerator, the compiler fuses these operators: no temporary is left
        cut = (row[0].device.type == "cpu" or not is_tracing()) and all(x.is_contiguous() for x in row)
        blocks = [x.view(-1).split(block_size(x, CACHED)) if cut else [x] for x in row]
        for p_block, g_block, *m_blocks in zip(*blocks, strict=True):
            delta, new = apply(reference, p_block, g_block, tuple(m_blocks))
            for old, value in zip((p_block, *m_blocks), (p_block + delta, *new), strict=True):
                old.copy_(value if skip is None else where(skip, old, value))


def can_fuse(kernel: Callable[..., None], tensors: Sequence[Tensor], lr: Number = 0.0) -> bool:
    """True if torch's fused kernel takes these tensors."""
    if _rate(lr) is not lr and any(x.dtype == torch.float64 for x in tensors):
        return False  # the kernel would take the rate in float32
    devices = {x.device.type for x in tensors}
    dense = all(x.is_floating_point() and x.is_contiguous() for x in tensors)
    # torch 2.13's fused SGD on CPUs updates only the last half-precision elements, too few for a vector register
    is_broken = kernel is sgd_ and devices == {"cpu"} and any(x.itemsize < 4 for x in tensors)
    return dense and not is_broken and len(devices) == 1 and devices <= {"cpu", "cuda"}


def portions(columns: Columns, most: int = MOST) -> list[list[Tensor]]:
    """Split contiguous tensors of more than `most` elements into views, at the same positions in each column.

    >>> [[len(part) for part in column] for column in portions([[torch.ones(5)], [torch.ones(5)]], most=2)]
    [[2, 2, 1], [2, 2, 1]]
    """
    if all(x.numel() <= most for x in columns[0]):
        return [list(column) for column in columns]
    return [[y for x in column for y in (x.view(-1).split(most) if x.numel() > most else [x])] for column in columns]


def _rate(lr: Number) -> Number:
    """The rate, as float32 if it is a tensor on an accelerator: fused kernels read its bytes as float32."""
    return lr.float() if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr


def sgd_(columns: Columns, count: Tensor, skip: Tensor | None, constants: Constants, most: int = MOST) -> None:
    """Run torch's fused `sgd` in place unless `skip` is 1; tensors of more than `most` elements are split."""
    params, grads, *moments = portions(columns, most)
    _torch_sgd(
        params,
        grads,
        list(moments[0]) if moments else [None] * len(params),
        fused=True,
        found_inf=skip,
        lr=_rate(constants["lr"]),  # type: ignore[arg-type]  # the kernel also takes a tensor
        momentum=constants["momentum"],
        nesterov=constants["nesterov"],
        weight_decay=constants["weight_decay"],
        dampening=0.0,
        maximize=False,
    )


def adam_(columns: Columns, count: Tensor, skip: Tensor | None, constants: Constants, most: int = MOST) -> None:
    """Run torch's fused `adam`, as `sgd_` runs `sgd`."""
    params, grads, mu, nu = portions(columns, most)
    _torch_adam(
        params,
        grads,
        mu,
        nu,
        [],
        list(count.repeat(len(params)).unbind()),
        fused=True,
        found_inf=skip,
        lr=_rate(constants["lr"]),
        beta1=constants["b1"],
        beta2=constants["b2"],
        eps=constants["eps"],
        weight_decay=constants["weight_decay"],
        decoupled_weight_decay=constants["decoupled"],
        amsgrad=False,
        maximize=False,
    )


def unscaled(g: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return g times `inverse`, and a flag: 1 if any element of g is not finite, else 0."""
    return g * inverse.to(wide(g.dtype)), (~torch.isfinite(g).all()).float()


def unscale_by_parts_(row: Tensor, inverse: Tensor) -> Tensor:
    """Unscale a half-precision row in place, by blocks in float32, with the bits of torch's kernel; return the flag."""
    bad = []
    for part in row.view(-1).split(block_size(row, CACHED)) if row.is_contiguous() else [row]:
        low, high = torch.aminmax(part)  # both are NaN if any element is
        bad.append(~(low.isfinite() & high.isfinite()))
        part.copy_(part.float() * inverse.float())
    return torch.stack(bad).any().float()


def unscale_(rows: Sequence[Tensor], inverse: Tensor, most: int = MOST) -> Tensor:
    """Apply `unscaled` in place, in one pass; return 1 if any element is not finite, else 0."""
    any_bad = torch.zeros(1, dtype=torch.float32, device=inverse.device)
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for row in (row for row in rows if row.numel()):
        if row.dtype not in _HALF_OR_SINGLE or row.layout is not torch.strided or is_tracing():
            new, bad = unscaled(row, inverse.to(row.device))
            row.copy_(new)
        elif (row.dtype != torch.bfloat16 or row.is_cpu) and (row.numel() <= most or row.is_contiguous()):
            # torch's kernel takes bfloat16 only on CPUs
            lists.setdefault((row.device, row.dtype), []).append(row)
            continue
        else:
            bad = unscale_by_parts_(row, inverse.to(row.device))
        any_bad = torch.maximum(any_bad, bad.to(any_bad.device))
    # one kernel call for each device and dtype, with a flag (1,)
    for (device, _), rows_alike in lists.items():
        flag = torch.zeros(1, dtype=torch.float32, device=device)
        (parts,) = portions([rows_alike], most)
        # Private: torch.amp.GradScaler calls it; nothing public does it in one pass (test_loss_scale.py)
        torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inverse.to(device, torch.float32))
        any_bad = torch.maximum(any_bad, flag.to(any_bad.device))
    return any_bad.squeeze(0)


def each_where(condition: Tensor, old: Tree, new: Tree) -> Tree:
    """Apply `where` to each leaf; ValueError names a leaf whose two shapes differ."""
    pairs, spec = tree.pairs(f"{_KEEPS_STRUCTURE}. After an update", old, new)
    result: list[Tree] = []
    for a, b in pairs:
        try:
            result.append(where(condition, a, b))
        except ValueError as error:
            raise ValueError(f"{tree.leaf_paths(spec)[len(result)]!r} after an update: {error}") from None
    return tree.unflatten(spec, result)


def where(condition: Tensor, a: Any, b: Any) -> object:
    """`a` if a condition is not zero, else `b`, without a host read; two unequal numbers become a tensor.

    ValueError for different shapes, and for unequal objects that are neither tensors nor numbers.
    """
    if not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b:
        return b
    shapes = [x.shape if isinstance(x, Tensor) else () if isinstance(x, _NUMBERS) else None for x in (a, b)]
    if shapes[0] != shapes[1] or shapes[0] is None:
        raise ValueError(f"expected {shown(a)}, as before, got {shown(b)}: {_KEEPS_STRUCTURE}")
    if not isinstance(a, Tensor):
        # integers (counts) become float64: for an integer tensor n, torch would compute 0.9 ** n in float32
        dtype = torch.bool if isinstance(a, bool) and isinstance(b, bool) else torch.float64
        a = torch.full((), a, dtype=getattr(b, "dtype", dtype), device=condition.device)
    return torch.where(beside(condition.to(torch.bool), a), a, b)
