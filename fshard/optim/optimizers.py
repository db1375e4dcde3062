"""Elementwise optimizers: SGD, the Adam family, RMSprop, Adagrad, Adadelta, Lion, schedule-free AdamW."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments import check_flags, check_hyperparams, is_number, shown
from ..core.scalars import Number, is_zero, on_device
from ..core.tree import Tree
from ..layout.layout import Layout
from ..layout.pieces import Parameters, Parts, copied, packed, pick, write
from ..layout.reshard import gathered
from . import kernels
from .base import Transform, at
from .elementwise import (
    PARAMS,
    AdadeltaState,
    AdagradState,
    LionState,
    NadamState,
    Rate,
    RmspropState,
    Rule,
    ScheduleFreeState,
    SgdState,
    adam_transform,
    all_numbers,
    bias_correction,
    from_rule,
)


def sgd(lr: Rate, momentum: Number = 0, nesterov: bool = False, weight_decay: Number = 0) -> Transform:
    """Stochastic gradient descent, with optional momentum. As torch.optim.SGD with dampening 0.

    m <- momentum m + g + weight_decay p; p <- p - lr m (nesterov: p - lr (g + weight_decay p + momentum m)).
    Accepts sparse gradients if momentum and weight decay are 0.

    >>> tx = sgd(0.5)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-1.)

    Source: Sutskever et al., On the importance of initialization and momentum in deep learning (2013).
    """
    check_hyperparams("sgd", lr, momentum=momentum, weight_decay=weight_decay)
    check_flags(nesterov=nesterov)
    if nesterov and is_zero(momentum):
        raise ValueError("sgd: nesterov=True needs a momentum above 0")

    def prepare(state: SgdState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        constants = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        return {"lr": at(lr, state.count), **constants}, {}

    takes_sparse = is_zero(momentum) and is_zero(weight_decay)  # else every element changes
    return from_rule(
        Rule(
            "sgd",
            SgdState,
            kernels.sgd,
            prepare,
            {} if is_zero(momentum) else {"momentum": 0.0},
            fused_kernel=kernels.sgd_ if all_numbers(momentum, weight_decay) else None,
            reads_params=not is_zero(weight_decay),
            takes_sparse=takes_sparse,
        )
    )


def adam(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0) -> Transform:
    """Adam: p <- p - lr mû / (sqrt(nû) + eps), mû and nû the bias-corrected running means of g and g².

    Adds weight_decay p to g; for decoupled weight decay use `adamw`. As torch.optim.Adam.

    >>> tx = adam(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Kingma and Ba, Adam: a method for stochastic optimization (2015).
    """
    check_hyperparams("adam", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return adam_transform("adam", lr, b1, b2, eps, weight_decay, decoupled=False)


def adamw(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0.01) -> Transform:
    """Adam with decoupled weight decay: p <- p - lr (mû / (sqrt(nû) + eps) + weight_decay p).

    As torch.optim.AdamW.

    >>> tx = adamw(0.1, weight_decay=0.0)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019).
    """
    check_hyperparams("adamw", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return adam_transform("adamw", lr, b1, b2, eps, weight_decay, decoupled=True)


def amsgrad(lr: Rate, b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, weight_decay: Number = 0) -> Transform:
    """Adam that divides by the elementwise maximum of all nu so far. As torch.optim.Adam(amsgrad=True).

    >>> tx = amsgrad(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Reddi et al., On the convergence of Adam and beyond (2018).
    """
    check_hyperparams("amsgrad", lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return adam_transform("amsgrad", lr, b1, b2, eps, weight_decay, decoupled=False, amsgrad=True)


def nadam(
    lr: Rate = 2e-3,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0,
    momentum_decay: Number = 4e-3,
    decoupled: bool = False,
) -> Transform:
    """Adam with Nesterov momentum, which is b1 (1 - 0.96^(t momentum_decay) / 2) at update t.

    As torch.optim.NAdam; `decoupled` is torch's argument decoupled_weight_decay.

    >>> tx = nadam(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1056)

    Source: Dozat, Incorporating Nesterov momentum into Adam (2016).
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
    check_hyperparams("nadam", lr, **numbers)
    check_flags(decoupled=decoupled)

    def prepare(state: NadamState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        t = state.count.double() + 1
        # The momentum of this update and of the next update, and the product of the momenta up to this update.
        momentum, following = (b1 * (1 - 0.5 * 0.96 ** (i * momentum_decay)) for i in (t, t + 1))
        product = state.mu_product * momentum
        constants = {
            "lr": at(lr, state.count),
            **{"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled},
            "g_factor": (1 - momentum) / (1 - product),
            "mu_factor": following / (1 - product * following),
            "correction2": bias_correction(b2, t),
        }
        return constants, {"mu_product": product}

    return from_rule(
        Rule(
            "nadam",
            NadamState,
            kernels.nadam,
            prepare,
            {"mu": 0.0, "nu": 0.0},
            {"mu_product": 1.0},
            reads_params=not is_zero(weight_decay),
        )
    )


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
    b <- momentum b + g / (sqrt(nu) + eps); p <- p - lr b.

    >>> tx = rmsprop(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-1.0000)

    Source: Tieleman and Hinton, Lecture 6.5 (2012); Graves, Generating sequences with recurrent neural networks (2013).
    """
    check_hyperparams("rmsprop", lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_flags(centered=centered)

    def prepare(state: RmspropState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        numbers = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        return {"lr": at(lr, state.count), "centered": centered, **numbers}, {}

    moments = ["square_avg", *["grad_avg"] * centered, *["momentum_buffer"] * (not is_zero(momentum))]
    first_values = dict.fromkeys(moments, 0.0)
    return from_rule(
        Rule("rmsprop", RmspropState, kernels.rmsprop, prepare, first_values, reads_params=not is_zero(weight_decay))
    )


def adagrad(
    lr: Rate = 1e-2,
    lr_decay: Number = 0,
    weight_decay: Number = 0,
    initial_accumulator_value: float = 0.0,
    eps: Number = 1e-10,
) -> Transform:
    """Adagrad: sum <- sum + g²; p <- p - lr / (1 + (t - 1) lr_decay) g / (sqrt(sum) + eps). As torch.optim.Adagrad.

    >>> tx = adagrad(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Duchi et al., Adaptive subgradient methods for online learning and stochastic optimization (2011).
    """
    start = {"initial_accumulator_value": initial_accumulator_value}
    check_hyperparams("adagrad", lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, **start)

    def prepare(state: AdagradState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        rate = at(lr, state.count) / (1 + state.count.double() * lr_decay)
        return {"lr": rate, "eps": eps, "weight_decay": weight_decay}, {}

    first_values = {"sum": initial_accumulator_value}
    return from_rule(
        Rule("adagrad", AdagradState, kernels.adagrad, prepare, first_values, reads_params=not is_zero(weight_decay))
    )


def adadelta(lr: Rate = 1.0, rho: Number = 0.9, eps: Number = 1e-6, weight_decay: Number = 0) -> Transform:
    """Adadelta, as torch.optim.Adadelta.

    nu <- rho nu + (1 - rho) g²; s = g sqrt(delta + eps) / sqrt(nu + eps); p <- p - lr s;
    delta <- rho delta + (1 - rho) s².

    >>> tx = adadelta()
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.0032)

    Source: Zeiler, ADADELTA: an adaptive learning rate method (2012).
    """
    check_hyperparams("adadelta", lr, rho=rho, eps=eps, weight_decay=weight_decay)

    def prepare(state: AdadeltaState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        return {"lr": at(lr, state.count), "rho": rho, "eps": eps, "weight_decay": weight_decay}, {}

    return from_rule(
        Rule(
            "adadelta",
            AdadeltaState,
            kernels.adadelta,
            prepare,
            {"square_avg": 0.0, "acc_delta": 0.0},
            reads_params=not is_zero(weight_decay),
        )
    )


def lion(lr: Rate, b1: Number = 0.9, b2: Number = 0.99, weight_decay: Number = 1e-3) -> Transform:
    """Lion: p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p); m <- b2 m + (1 - b2) g.

    >>> tx = lion(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(0.0)), torch.tensor(0.0))[0]
    tensor(-0.1000)

    Source: Chen et al., Symbolic discovery of optimization algorithms (2023); defaults as optax.lion.
    """
    check_hyperparams("lion", lr, b1=b1, b2=b2, weight_decay=weight_decay)

    def prepare(state: LionState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        return {"lr": at(lr, state.count), "b1": b1, "b2": b2, "weight_decay": weight_decay}, {}

    return from_rule(
        Rule("lion", LionState, kernels.lion, prepare, {"mu": 0.0}, reads_params=not is_zero(weight_decay))
    )


def schedule_free_adamw(
    lr: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    weight_power: float = 2.0,
) -> Transform:
    """AdamW without a learning-rate schedule, with averaged parameters.

    Gradients are taken at y = (1 - b1) z + b1 x, where z follows the steps of AdamW and x is a weighted average of z:
    z <- z - lr (g / (sqrt(nû) + eps) + weight_decay y); x <- (1 - c) x + c z, with c = lr_max^weight_power divided by
    the sum of lr_max^weight_power over all updates so far. The trained parameters are y. For evaluation use x, which
    `schedule_free_params(state, params)` returns. `lr` may be a schedule, for a warm-up.

    >>> tx = schedule_free_adamw(0.1)
    >>> tx.update(torch.tensor(2.0), tx.init(torch.tensor(1.0)), torch.tensor(1.0))[0]
    tensor(-0.1000)

    Source: Defazio et al., The road less scheduled (2024); as optax.contrib.schedule_free_adamw.
    """
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay, "weight_power": weight_power}
    check_hyperparams("schedule_free_adamw", lr, **numbers)

    def prepare(state: ScheduleFreeState) -> tuple[kernels.Constants, dict[str, Tensor]]:
        rate = at(lr, state.count)
        lr_max = torch.maximum(state.lr_max, on_device(rate, state.lr_max.device))
        weight = lr_max**weight_power
        total = state.weight_sum + weight
        constants = {
            "lr": rate,
            **{"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay},
            "weight_of_z": torch.where(total > 0, weight / total, 0.0),
            "correction2": bias_correction(b2, state.count.double() + 1),
        }
        return constants, {"lr_max": lr_max, "weight_sum": total}

    return from_rule(
        Rule(
            "schedule_free_adamw",
            ScheduleFreeState,
            kernels.schedule_free,
            prepare,
            {"z": PARAMS, "nu": 0.0},
            {"lr_max": 0.0, "weight_sum": 0.0},
        )
    )


def schedule_free_params(state: Tree, params: Tree, b1: Number = 0.9) -> Tree:
    """Return the averaged parameters x = (y - (1 - b1) z) / b1 of `schedule_free_adamw`, for evaluation.

    `state` is the state of `schedule_free_adamw`, or of a transformation that contains it: `by_label`, `chain`, `zero`.
    Parameters that `schedule_free_adamw` did not train are returned unchanged. For a `TrainState` call
    `schedule_free_params(state.opt_state, state.params)` on every rank; any plan will do. Raises TypeError if `state`
    contains no state of `schedule_free_adamw`.

    >>> params = torch.tensor(1.0)
    >>> schedule_free_params(schedule_free_adamw(0.1).init(params), params)
    tensor(1.)
    """
    points = [inner.z for inner in tree.nodes(state, ScheduleFreeState)]
    if not points:
        raise TypeError(
            f"schedule_free_params: expected the state of schedule_free_adamw, or one it is part of, got {shown(state)}"
        )
    if not is_number(b1) or not 0 < b1 <= 1:
        raise ValueError(f"schedule_free_params: b1={b1!r}: expected a number above 0, at most 1")

    def averaged(y: Tensor, z: Tensor | None) -> Tensor:
        return y if z is None else ((y - (1 - b1) * z) / b1).to(y.dtype)

    if not isinstance(params, Parameters):
        for z in points:
            params = tree.map(averaged, params, gathered(z) if isinstance(z, Parts) else z)
        return params
    fine = copied(params.for_state)  # (n / W_state,) for each kind, partitioned as `z` is
    for z in points:
        picked = _picked_as(fine, z.layout)
        write(picked, tree.map(averaged, packed(picked), z))  # into `fine`, of which `picked` has views
    return params.with_trained(fine)


def _picked_as(x: Tree, layout: Layout) -> Tree:
    """Return the leaves of `x` that `layout` has.

    `layout` is the layout of `x`, or was made from it by one or more selections of leaves (`pick`).
    """
    return x if layout.origin is None else pick(_picked_as(x, layout.origin), layout)
