"""The arithmetic of elementwise updates: plain reference functions, and what runs them in place in one pass.

A reference takes a parameter, a gradient, the moments and constants, and gives the change of the parameter and the new
moments. Constants are worked out once for a whole update, in float64. The fused kernels of torch.optim, behind its
functional interface, take lists of tensors; for what torch has no kernel of, `in_blocks` runs the reference itself
on blocks, so that no temporary is as large as a shard: on a CPU of what stays in its cache, elsewhere of 2^24 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as _torch_adam
from torch.optim.sgd import sgd as _torch_sgd

from ..core.flat import CACHED, MOST, block_size
from ..core.scalars import Number, beside, is_zero, wide
from ..core.tracing import is_tracing

Moments = tuple[Tensor, ...]
Change = Callable[[Tensor, Tensor, Moments], tuple[Tensor, Moments]]


class Sgd(NamedTuple):
    """Constants of SGD."""

    lr: Number
    momentum: Number
    nesterov: bool
    weight_decay: Number


class Adam(NamedTuple):
    """Constants of Adam; c1 and c2 are 1 - b1^t and 1 - b2^t."""

    lr: Number
    b1: Number
    b2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool
    c1: Number
    c2: Number


class Nadam(NamedTuple):
    """Constants of NAdam; `g` and `m` multiply gradient and moment in the step."""

    lr: Number
    b1: Number
    b2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool
    g: Number
    m: Number
    c2: Number


class Rmsprop(NamedTuple):
    """Constants of RMSprop."""

    lr: Number
    alpha: Number
    eps: Number
    weight_decay: Number
    momentum: Number
    centered: bool


class Adagrad(NamedTuple):
    """Constants of Adagrad, its decay already in lr."""

    lr: Number
    eps: Number
    weight_decay: Number


class Adadelta(NamedTuple):
    """Constants of Adadelta."""

    lr: Number
    rho: Number
    eps: Number
    weight_decay: Number


class Lion(NamedTuple):
    """Constants of Lion."""

    lr: Number
    b1: Number
    b2: Number
    weight_decay: Number


class ScheduleFree(NamedTuple):
    """Constants of schedule-free AdamW; `c` is the newest point's share in the average, c2 is 1 - b2^t."""

    lr: Number
    b1: Number
    b2: Number
    eps: Number
    weight_decay: Number
    c: Number
    c2: Number


_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


def constants_beside(c: Any, x: Tensor) -> Any:
    """The constants of an update, as they are used with a tensor."""
    return type(c)(*(beside(number, x) for number in c))


def _decayed(p: Tensor, g: Tensor, weight_decay: Number) -> Tensor:
    return g if is_zero(weight_decay) else g + weight_decay * p


def sgd(p: Tensor, g: Tensor, moments: Moments, c: Sgd) -> tuple[Tensor, Moments]:
    """g <- g + weight_decay p; m <- momentum m + g; the change is -lr m (nesterov: -lr (g + momentum m))."""
    g = _decayed(p, g, c.weight_decay)
    if not moments:
        return -c.lr * g, ()
    m = c.momentum * moments[0] + g
    return -c.lr * (g + c.momentum * m if c.nesterov else m), (m,)


def adam(p: Tensor, g: Tensor, moments: Moments, c: Adam) -> tuple[Tensor, Moments]:
    """mu <- b1 mu + (1 - b1) g; nu <- b2 nu + (1 - b2) g²; the change is -lr mu / c1 / (sqrt(nu / c2) + eps).

    Weight decay is added to g, or if `decoupled` to the step. With a third moment, the largest nu so far is nu's place.
    """
    if not c.decoupled:
        g = _decayed(p, g, c.weight_decay)
    mu = c.b1 * moments[0] + (1 - c.b1) * g
    nu = c.b2 * moments[1] + (1 - c.b2) * g * g
    rest = tuple(torch.maximum(top, nu) for top in moments[2:])
    step = mu / c.c1 / (((rest or (nu,))[0] / c.c2).sqrt() + c.eps)
    return -c.lr * (_decayed(p, step, c.weight_decay) if c.decoupled else step), (mu, nu, *rest)


def nadam(p: Tensor, g: Tensor, moments: Moments, c: Nadam) -> tuple[Tensor, Moments]:
    """The moments of Adam; the change is -lr (`g` g + `m` mu) / (sqrt(nu / c2) + eps)."""
    decay = -c.lr * c.weight_decay * p if c.decoupled and not is_zero(c.weight_decay) else 0
    if not c.decoupled:
        g = _decayed(p, g, c.weight_decay)
    mu = c.b1 * moments[0] + (1 - c.b1) * g
    nu = c.b2 * moments[1] + (1 - c.b2) * g * g
    return decay - c.lr * (c.g * g + c.m * mu) / ((nu / c.c2).sqrt() + c.eps), (mu, nu)


def rmsprop(p: Tensor, g: Tensor, moments: Moments, c: Rmsprop) -> tuple[Tensor, Moments]:
    """nu <- alpha nu + (1 - alpha) g²; step = g / (sqrt(nu) + eps), of nu - mean² if centered; then momentum."""
    g = _decayed(p, g, c.weight_decay)
    nu, *rest = moments
    nu = c.alpha * nu + (1 - c.alpha) * g * g
    new, spread = [nu], nu
    if c.centered:
        mean = c.alpha * rest.pop(0) + (1 - c.alpha) * g
        new, spread = [nu, mean], nu - mean * mean
    step = g / (spread.sqrt() + c.eps)
    if rest:
        step = c.momentum * rest[0] + step
        new.append(step)
    return -c.lr * step, tuple(new)


def adagrad(p: Tensor, g: Tensor, moments: Moments, c: Adagrad) -> tuple[Tensor, Moments]:
    """sum <- sum + g²; the change is -lr g / (sqrt(sum) + eps)."""
    g = _decayed(p, g, c.weight_decay)
    total = moments[0] + g * g
    return -c.lr * g / (total.sqrt() + c.eps), (total,)


def adadelta(p: Tensor, g: Tensor, moments: Moments, c: Adadelta) -> tuple[Tensor, Moments]:
    """nu <- rho nu + (1 - rho) g²; s = g sqrt(delta + eps) / sqrt(nu + eps); delta <- rho delta + (1 - rho) s²."""
    g = _decayed(p, g, c.weight_decay)
    nu = c.rho * moments[0] + (1 - c.rho) * g * g
    step = (moments[1] + c.eps).sqrt() / (nu + c.eps).sqrt() * g
    return -c.lr * step, (nu, c.rho * moments[1] + (1 - c.rho) * step * step)


def lion(p: Tensor, g: Tensor, moments: Moments, c: Lion) -> tuple[Tensor, Moments]:
    """The change is -lr (sign(b1 m + (1 - b1) g) + weight_decay p); m <- b2 m + (1 - b2) g."""
    step = (c.b1 * moments[0] + (1 - c.b1) * g).sign()
    return -c.lr * _decayed(p, step, c.weight_decay), (c.b2 * moments[0] + (1 - c.b2) * g,)


def schedule_free(p: Tensor, g: Tensor, moments: Moments, c: ScheduleFree) -> tuple[Tensor, Moments]:
    """p is (1 - b1) z + b1 x; z takes AdamW's step without mu, x moves its share c to z, and p follows both."""
    z, nu = moments
    nu = c.b2 * nu + (1 - c.b2) * g * g
    step = g / ((nu / c.c2).sqrt() + c.eps)
    x = (p - (1 - c.b1) * z) / c.b1
    z = z - c.lr * _decayed(p, step, c.weight_decay)
    x = (1 - c.c) * x + c.c * z
    return c.b1 * x + (1 - c.b1) * z - p, (z, nu)


def apply(change: Change, p: Tensor, g: Tensor, moments: Moments) -> tuple[Tensor, Moments]:
    """A reference on one tensor, its dtypes kept; complex ones real and imaginary part each by itself."""
    if p.is_complex():
        # a lazily conjugated tensor (z.conj(), and so a gradient through one) has no real view
        rp, rg, *rows = (torch.view_as_real(x.resolve_conj()) for x in (p, g, *moments))
        delta, new = apply(change, rp, rg, tuple(rows))
        return torch.view_as_complex(delta), tuple(torch.view_as_complex(m) for m in new)
    shape = p.shape
    if not shape:  # constants are 0-d tensors too, and would decide the dtype with it
        p, g, moments = p.reshape(1), g.reshape(1), tuple(m.reshape(1) for m in moments)
    delta, new = change(p, g, moments)
    kept = tuple(n.to(old.dtype) for n, old in zip(new, moments, strict=True))
    delta = delta.to(p.dtype)
    # a sparse change has a shape, and cannot be reshaped
    return (delta, kept) if shape else (delta.reshape(shape), tuple(n.reshape(shape) for n in kept))


def in_blocks(
    change: Change, params: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[Moments], skip: Tensor | None
) -> None:
    """A reference on lists of tensors, in place, block by block; nothing changes where `skip` is 1."""
    for p, g, ms in zip(params, grads, moments, strict=True):
        # in a graph a compiler joins the operations on an accelerator, and leaves no temporary
        cut = (p.device.type == "cpu" or not is_tracing()) and all(x.is_contiguous() for x in (p, g, *ms))
        columns = [x.view(-1).split(block_size(x, CACHED)) if cut else [x] for x in (p, g, *ms)]
        for p_block, g_block, *m_blocks in zip(*columns, strict=True):
            delta, new = apply(change, p_block, g_block, tuple(m_blocks))
            for old, value in zip((p_block, *m_blocks), (p_block + delta, *new), strict=True):
                old.copy_(value if skip is None else where(skip, old, value))


def can_fuse(kernel: Callable[..., None], tensors: Sequence[Tensor]) -> bool:
    """Whether a fused kernel of torch's takes these: dense real floating tensors of one device that has it."""
    devices = {x.device.type for x in tensors}
    dense = all(x.is_floating_point() and x.is_contiguous() for x in tensors)
    # torch 2.13's fused SGD leaves half precision on CPUs as it is, but for what does not fill a vector
    lost = kernel is sgd_ and devices == {"cpu"} and any(x.itemsize < 4 for x in tensors)
    return dense and not lost and len(devices) == 1 and devices <= {"cpu", "cuda"}


def portions(columns: Sequence[Sequence[Tensor]], most: int = MOST) -> list[list[Tensor]]:
    """Lists of tensors of the same sizes; those of more than `most` elements, contiguous, as views of at most so many.

    >>> [[len(part) for part in column] for column in portions([[torch.ones(5)], [torch.ones(5)]], most=2)]
    [[2, 2, 1], [2, 2, 1]]
    """
    if all(x.numel() <= most for x in columns[0]):
        return [list(column) for column in columns]
    return [[y for x in column for y in (x.view(-1).split(most) if x.numel() > most else [x])] for column in columns]


def _rate(lr: Number) -> Number:
    """A rate as fused kernels read it: float32 if it is on an accelerator, where they take any tensor for that."""
    return lr.float() if isinstance(lr, Tensor) and lr.device.type != "cpu" else lr


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    count: Tensor,
    skip: Tensor | None,
    c: Sgd,
    most: int = MOST,
) -> None:
    """`sgd` on lists, in place; nothing changes where `skip` is 1. No tensor of the kernel's has more than `most`."""
    params, grads, *moments = portions([params, grads, *moments], most)
    _torch_sgd(
        params,
        grads,
        list(moments[0]) if moments else [None] * len(params),
        fused=True,
        found_inf=skip,
        lr=_rate(c.lr),  # type: ignore[arg-type]  # the kernel takes a tensor too
        momentum=c.momentum,  # type: ignore[arg-type]
        nesterov=c.nesterov,
        weight_decay=c.weight_decay,  # type: ignore[arg-type]
        dampening=0.0,
        maximize=False,
    )


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    count: Tensor,
    skip: Tensor | None,
    c: Adam,
    most: int = MOST,
) -> None:
    """`adam` on lists, in place; nothing changes where `skip` is 1. No tensor of the kernel's has more than `most`."""
    params, grads, *moments = portions([params, grads, *moments], most)
    _torch_adam(
        params,
        grads,
        moments[0],
        moments[1],
        moments[2] if len(moments) > 2 else [],
        list(count.repeat(len(params)).unbind()),
        fused=True,
        found_inf=skip,
        lr=_rate(c.lr),
        beta1=c.b1,
        beta2=c.b2,
        eps=c.eps,  # type: ignore[arg-type]
        weight_decay=c.weight_decay,  # type: ignore[arg-type]
        decoupled_weight_decay=c.decoupled,
        amsgrad=len(moments) > 2,
        maximize=False,
    )


def unscaled(g: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient times a 0-d factor (float64), and whether it is not finite (float32, 0-d, 1 or 0)."""
    return g * inverse.to(wide(g.dtype)), (~torch.isfinite(g).all()).float()


def _knows(kernel_device: str, dtype: torch.dtype) -> bool:
    """Whether the kernel that divides and checks takes a dtype: for bfloat16 only CPUs have it."""
    return dtype in _HALF_OR_SINGLE and (dtype != torch.bfloat16 or kernel_device == "cpu")


def unscale_by_parts_(row: Tensor, inverse: Tensor) -> Tensor:
    """What that kernel does, to the bit, of a tensor of half precision: in float32, by parts."""
    bad = []
    for part in row.view(-1).split(block_size(row, CACHED)) if row.is_contiguous() else [row]:
        low, high = torch.aminmax(part)  # NaN if any is
        bad.append(~(low.isfinite() & high.isfinite()))
        part.copy_(part.float() * inverse.float())
    return torch.stack(bad).any().float()


def unscale_(rows: Sequence[Tensor], inverse: Tensor, most: int = MOST) -> Tensor:
    """`unscaled` on a list, in place and in one pass; returns whether any is not finite."""
    found = torch.zeros(1, dtype=torch.float32, device=inverse.device)
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for row in (row for row in rows if row.numel()):
        if row.dtype not in _HALF_OR_SINGLE or row.layout is not torch.strided or is_tracing():
            new, bad = unscaled(row, inverse.to(row.device))
            row.copy_(new)
        elif _knows(row.device.type, row.dtype) and (row.numel() <= most or row.is_contiguous()):
            lists.setdefault((row.device, row.dtype), []).append(row)
            continue
        else:
            bad = unscale_by_parts_(row, inverse.to(row.device))
        found = torch.maximum(found, bad.to(found.device))
    for (device, _), some in lists.items():
        one = torch.zeros(1, dtype=torch.float32, device=device)
        (parts,) = portions([some], most)
        # Private: what torch.amp.GradScaler calls; nothing public reads and writes in one pass (test_loss_scale.py
        # notices when it goes)
        torch._amp_foreach_non_finite_check_and_unscale_(parts, one, inverse.to(device, torch.float32))
        found = torch.maximum(found, one.to(found.device))
    return found.squeeze(0)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where a 0-d condition is not zero, else `b`."""
    return torch.where(beside(condition.to(torch.bool), a), a, b)
