"""The arithmetic of optimizer updates: plain reference functions, and their fused twins that work in place.

A reference takes one leaf and gives the change of its parameter and its new moments; it is what a fused kernel is
tested against. The fused kernels are torch.optim's own, behind its functional interface, and take lists of leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _torch_adamw
from torch.optim.sgd import sgd as _torch_sgd

Number = float | Tensor


class Sgd(NamedTuple):
    """Hyper-parameters of SGD."""

    momentum: float
    nesterov: bool
    weight_decay: float


class Adam(NamedTuple):
    """Hyper-parameters of AdamW."""

    b1: float
    b2: float
    eps: float
    weight_decay: float


def sgd(p: Tensor, g: Tensor, m: Tensor | None, lr: Number, hyper: Sgd) -> tuple[Tensor, Tensor | None]:
    """g <- g + weight_decay p; m <- momentum m + g; the change is -lr m (nesterov: -lr (g + momentum m))."""
    g = g + hyper.weight_decay * p if hyper.weight_decay else g
    if m is None:
        return -lr * g, None
    m = hyper.momentum * m + g
    return -lr * (g + hyper.momentum * m if hyper.nesterov else m), m


def adamw(
    p: Tensor, g: Tensor, mu: Tensor, nu: Tensor, count: Tensor, lr: Number, hyper: Adam
) -> tuple[Tensor, Tensor, Tensor]:
    """mu <- b1 mu + (1 - b1) g; nu <- b2 nu + (1 - b2) g²; the change is
    -lr (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay p), t counting from 1."""
    if p.is_complex():  # real and imaginary part each by themselves, as torch.optim does it
        p, g, mu, nu = (torch.view_as_real(x) for x in (p, g, mu, nu))
        delta, mu, nu = adamw(p, g, mu, nu, count, lr, hyper)
        return torch.view_as_complex(delta), torch.view_as_complex(mu), torch.view_as_complex(nu)
    mu = hyper.b1 * mu + (1 - hyper.b1) * g
    nu = hyper.b2 * nu + (1 - hyper.b2) * g * g
    c1, c2 = ((1 - b ** count.double()).to(p.dtype) for b in (hyper.b1, hyper.b2))
    step = mu / c1 / ((nu / c2).sqrt() + hyper.eps)
    return -lr * (step + hyper.weight_decay * p), mu, nu


def can_fuse(leaves: Sequence[Tensor]) -> bool:
    """Whether the fused kernels take these: dense real floating tensors on a device that has them."""
    return all(x.is_floating_point() and x.is_contiguous() and x.device.type in ("cpu", "cuda") for x in leaves)


def sgd_(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor] | None,
    found_inf: Tensor | None,
    lr: Number,
    hyper: Sgd,
) -> None:
    """`sgd` on lists, in place; nothing changes where `found_inf` is 1."""
    _torch_sgd(
        params,
        grads,
        [None] * len(params) if momenta is None else [*momenta],
        fused=True,
        found_inf=found_inf,
        lr=lr,  # type: ignore[arg-type]  # the kernel takes a tensor too
        dampening=0.0,
        maximize=False,
        **hyper._asdict(),
    )


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    mus: list[Tensor],
    nus: list[Tensor],
    count: Tensor,
    found_inf: Tensor | None,
    lr: Number,
    hyper: Adam,
) -> Tensor:
    """`adamw` on lists, in place; nothing changes where `found_inf` is 1. Returns the new count, `count` is kept."""
    counts = [count.clone() for _ in params]
    _torch_adamw(
        params,
        grads,
        mus,
        nus,
        [],
        counts,
        fused=True,
        found_inf=found_inf,
        lr=lr,
        beta1=hyper.b1,
        beta2=hyper.b2,
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
        amsgrad=False,
        maximize=False,
    )
    return counts[0] if counts else count + 1


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where a 0-d condition is not zero, else `b`."""
    return torch.where(condition.to(torch.bool), a, b)
