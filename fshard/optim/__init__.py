"""Optimizers as pairs of pure functions over trees, with the signatures of optax.

`init(params) -> state`; `update(grads, state, params, **extra) -> (updates, state)`; `apply_updates(params, updates)`.
`tx.step(grads, state, params) -> (params, state)` is `update` and `apply_updates` in one. The state of `Sharded`
parameters is partitioned like the parameters; `fshard.zero` partitions the state of unsharded parameters. Defaults are
torch.optim's if torch.optim has the optimizer. `lr` is a number, a 0-d tensor, or a schedule: a function of the number
of updates made.
"""

from ..layout.norms import global_norm
from ..update.base import (
    Transform,
    add_decayed_weights,
    apply_updates,
    clip,
    clip_by_global_norm,
    identity,
    scale,
    scale_by_schedule,
)
from ..update.optimizers import adagrad, adam, adamw, lion, rmsprop, sgd
from ..update.transforms import by_label, chain, masked, resting, with_hyperparams
from . import schedules, state
from .adam_8bit import adamw_8bit
from .matrix import adafactor, clip_by_leaf_norm, lamb, muon, whole_leaves
from .quasi_newton import lbfgs
from .torch_optim import from_torch

__all__ = [
    "Transform",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "adamw_8bit",
    "add_decayed_weights",
    "apply_updates",
    "by_label",
    "chain",
    "clip",
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "from_torch",
    "global_norm",
    "identity",
    "lamb",
    "lbfgs",
    "lion",
    "masked",
    "muon",
    "resting",
    "rmsprop",
    "scale",
    "scale_by_schedule",
    "schedules",
    "sgd",
    "state",
    "whole_leaves",
    "with_hyperparams",
]
