"""The registry of transformations: a law that holds for all is tested over it; a new one gets every law by one line."""

from collections.abc import Callable

import torch

from fshard import optim

Make = Callable[[], optim.Transform]


def _decay(path: str, leaf: torch.Tensor) -> str:
    return "matrix" if leaf.ndim > 1 else "rest"


TRANSFORMS: dict[str, Make] = {
    "sgd": lambda: optim.sgd(0.1),
    "sgd-all": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: optim.adam(0.1, b1=0.8, b2=0.95, weight_decay=0.1),
    "adamw": lambda: optim.adamw(0.1, weight_decay=0.1),
    "adamw-schedule": lambda: optim.adamw(optim.warmup_cosine(0.1, 2, 8)),
    "amsgrad": lambda: optim.amsgrad(0.1, weight_decay=0.1),
    "nadam": lambda: optim.nadam(0.1, weight_decay=0.1),
    "nadam-decoupled": lambda: optim.nadam(0.1, weight_decay=0.1, decoupled=True),
    "rmsprop": lambda: optim.rmsprop(0.1),
    "rmsprop-all": lambda: optim.rmsprop(0.1, weight_decay=0.1, momentum=0.9, centered=True),
    "adagrad": lambda: optim.adagrad(0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda: optim.adadelta(0.5, weight_decay=0.1),
    "lion": lambda: optim.lion(0.1),
    "schedule_free_adamw": lambda: optim.schedule_free_adamw(0.1, weight_decay=0.1),
    "adamw_8bit": lambda: optim.adamw_8bit(0.1, block=4),
    "lamb": lambda: optim.lamb(0.1, weight_decay=0.1),
    "adafactor": lambda: optim.adafactor(0.1, weight_decay=0.1),
    "muon": lambda: optim.muon(0.1, nesterov=True),
    "lbfgs": lambda: optim.lbfgs(0.1, history_size=2),
    "scale": lambda: optim.scale(-0.1),
    "scale_by_schedule": lambda: optim.scale_by_schedule(optim.linear(-0.1, -0.2, 3)),
    "add_decayed_weights": lambda: optim.chain(optim.add_decayed_weights(0.1), optim.scale(-0.1)),
    "clip": lambda: optim.chain(optim.clip(0.1), optim.sgd(0.1)),
    "clip_by_global_norm": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)),
    "clip_by_global_norm-inf": lambda: optim.chain(optim.clip_by_global_norm(0.5, p=float("inf")), optim.sgd(0.1)),
    "clip_by_leaf_norm": lambda: optim.chain(optim.clip_by_leaf_norm(0.5, p=3), optim.sgd(0.1, momentum=0.5)),
    "ema": lambda: optim.chain(optim.ema(0.9), optim.scale(-0.1)),
    "every_k": lambda: optim.every_k(optim.adamw(0.1), 2),
    "every_k-clip": lambda: optim.every_k(optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)), 2),
    "masked": lambda: optim.masked(optim.lamb(0.1), lambda path, leaf: leaf.ndim > 1),
    "by_label": lambda: optim.by_label({"matrix": optim.adamw(0.1), "rest": optim.sgd(0.1, momentum=0.9)}, _decay),
    "with_hyperparams": lambda: optim.with_hyperparams(optim.adamw, lr=0.1, b1=0.8),
    "with_hyperparams-schedule": lambda: optim.with_hyperparams(optim.sgd, lr=optim.cosine(0.1, 9), momentum=0.9),
    "whole_leaves": lambda: optim.whole_leaves(optim.lamb(0.1)),
    "from_torch-Adam": lambda: optim.from_torch(torch.optim.Adam, lr=0.1, amsgrad=True),
    "from_torch-SGD": lambda: optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "from_torch-Rprop": lambda: optim.from_torch(torch.optim.Rprop, lr=0.1),
    "from_torch-Adafactor": lambda: optim.from_torch(torch.optim.Adafactor, lr=0.1),
}
