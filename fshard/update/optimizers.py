"""Elementwise optimizers: SGD, Adam, AdamW, RMSprop, Adagrad, Lion."""

from __future__ import annotations

from torch import Tensor

from ..core.arguments import check_flags, check_hyperparams
from ..core.scalars import Number, is_zero
from . import kernels
from .base import Transform, at
from .elementwise import (
    AdagradState,
    LionState,
    Rate,
    RmspropState,
    SgdState,
    UpdateRule,
    adam_transform,
    all_numbers,
    from_rule,
    with_rate,
)


def sgd(lr: Rate, momentum: Number = 0, nesterov: bool = False, weight_decay: Number = 0) -> Transform:
    """Stochastic gradient descent, with optional momentum. As torch.optim.SGD with dampening 0.

    m <- momentum m + g + weight_decay p; p <- p - lr m (nesterov: p - lr (g + weight_decay p + momentum m)).
    Accepts sparse gradients if momentum and weight decay are 0. ValueError for nesterov without momentum.

    >>> tx = sgd(0.5)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-1.)

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013).
    """
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    check_hyperparams("sgd", lr, **numbers)
    check_flags(nesterov=nesterov)
    if nesterov and is_zero(momentum):
        raise ValueError("sgd: nesterov=True needs a momentum above 0")
    sparse = is_zero(momentum) and is_zero(weight_decay)  # else every element changes
    constants, reads = with_rate(lr, **numbers, nesterov=nesterov), not is_zero(weight_decay)
    first = {} if is_zero(momentum) else {"momentum": 0.0}
    fused = kernels.sgd_ if all_numbers(momentum, weight_decay) else None
    rule = UpdateRule(
        "sgd", SgdState, kernels.by_sgd, constants, first, fused_kernel=fused, reads_params=reads, takes_sparse=sparse
    )
    return from_rule(rule)


def adam(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0) -> Transform:
    """Adam: p <- p - lr mû / (sqrt(nû) + eps), mû and nû the bias-corrected running means of g and g².

    m <- b1 m + (1 - b1) g; nu <- b2 nu + (1 - b2) g². Adds weight_decay p to g; for decoupled weight decay use `adamw`.
    As torch.optim.Adam.

    >>> tx = adam(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Kingma and Ba, Adam: a method for stochastic optimization (2015).
    """
    check_hyperparams("adam", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return adam_transform("adam", lr, b1, b2, eps, weight_decay, decoupled=False)


def adamw(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.01) -> Transform:
    """Adam with decoupled weight decay: p <- p - lr (mû / (sqrt(nû) + eps) + weight_decay p).

    mû and nû with `b1` and `b2` as in `adam`. As torch.optim.AdamW.

    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019).
    """
    check_hyperparams("adamw", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return adam_transform("adamw", lr, b1, b2, eps, weight_decay, decoupled=True)


def rmsprop(
    lr: Rate = 1e-2,
    alpha: Number = 0.99,
    eps: Number = 1e-8,
    weight_decay: Number = 0,
    momentum: Number = 0,
    centered: bool = False,
) -> Transform:
    """RMSprop: nu <- alpha nu + (1 - alpha) g²; p <- p - lr g / (sqrt(nu) + eps). As torch.optim.RMSprop.

    With `centered`, the square of the running mean of g is subtracted from nu under the root. With momentum,
    b <- momentum b + g / (sqrt(nu) + eps); p <- p - lr b. Adds weight_decay p to g.

    >>> tx = rmsprop(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-1.0000)

    Source: Tieleman and Hinton, Lecture 6.5 (2012); Graves, Generating sequences with recurrent neural networks (2013).
    """
    numbers = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    check_hyperparams("rmsprop", lr, **numbers)
    check_flags(centered=centered)
    constants = with_rate(lr, **numbers, centered=centered)
    moments = ["square_avg", *["grad_avg"] * centered, *["momentum_buffer"] * (not is_zero(momentum))]
    first, reads = dict.fromkeys(moments, 0.0), not is_zero(weight_decay)
    return from_rule(UpdateRule("rmsprop", RmspropState, kernels.by_rmsprop, constants, first, reads_params=reads))


def adagrad(
    lr: Rate = 1e-2,
    lr_decay: Number = 0,
    weight_decay: Number = 0,
    initial_accumulator_value: float = 0.0,
    eps: Number = 1e-10,
) -> Transform:
    """Adagrad: sum <- sum + g²; p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps). As torch.optim.Adagrad.

    The sum begins at `initial_accumulator_value`. Adds weight_decay p to g.

    >>> tx = adagrad(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Duchi et al., Adaptive subgradient methods for online learning and stochastic optimization (2011).
    """
    start = {"initial_accumulator_value": initial_accumulator_value}
    check_hyperparams("adagrad", lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, **start)

    def constants(count: Tensor) -> kernels.Constants:
        rate = at(lr, count) / (1 + count.double() * lr_decay)
        return {"lr": rate, "eps": eps, "weight_decay": weight_decay}

    first, reads = {"sum": initial_accumulator_value}, not is_zero(weight_decay)
    return from_rule(UpdateRule("adagrad", AdagradState, kernels.by_adagrad, constants, first, reads_params=reads))


def lion(lr: Rate, b1: Number = 0.9, b2: Number = 0.99, weight_decay: Number = 1e-3) -> Transform:
    """Lion: p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p); m <- b2 m + (1 - b2) g.

    >>> tx = lion(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(0.0)), torch.tensor(0.0))[0]
    tensor(-0.1000)

    Source: Chen et al., Symbolic discovery of optimization algorithms (2023); defaults as optax.lion.
    """
    numbers = {"b1": b1, "b2": b2, "weight_decay": weight_decay}
    check_hyperparams("lion", lr, **numbers)
    constants, reads_params = with_rate(lr, **numbers), not is_zero(weight_decay)
    return from_rule(UpdateRule("lion", LionState, kernels.by_lion, constants, {"mu": 0.0}, reads_params=reads_params))
