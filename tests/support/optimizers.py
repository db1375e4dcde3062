"""The registry of transformations: tests of optimizers run over its rows; a new one gets all of them by one row."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fshard import optim

Make = Callable[[], optim.Transform]


def _decay(path: str, leaf: torch.Tensor) -> str:
    return "matrix" if leaf.ndim > 1 else "rest"


def _whole(make: Make) -> optim.Transform:
    return optim.whole_leaves(make())


def _of_whole() -> optim.Transform:
    return optim.whole_leaves(optim.adam(0.1))


class Row(NamedTuple):
    """A transformation, and what tests cannot find out of it. Most need no field but the first.

    - `block`: the plan must keep blocks of so many elements on one rank, in one leaf (`make_plan(block=)`)
    - `real`: takes real leaves alone, because it clamps or computes in a real dtype
    - `kernel`: a step ends in a kernel of torch's, which rounds an element by where it lies
    - `asks`: the part that asks for the parameters, where it does not have the row's name
    - `any_state`: its state does not say who made it, or is not looked at
    """

    make: Make
    block: int = 1
    real: bool = False
    kernel: bool = False
    asks: str = ""
    any_state: bool = False


# A new transformation is one row here: the function's name, and after a dash what is special.
ROWS: dict[str, Row] = {
    "sgd": Row(lambda: optim.sgd(0.1), kernel=True),
    "sgd-all": Row(lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1), kernel=True),
    "adam": Row(lambda: optim.adam(0.1, b1=0.8, b2=0.95, weight_decay=0.1), kernel=True),
    "adamw": Row(lambda: optim.adamw(0.1, weight_decay=0.1), kernel=True),
    "adamw-schedule": Row(lambda: optim.adamw(optim.schedules.warmup_cosine(0.1, 2, 8)), kernel=True),
    "rmsprop": Row(lambda: optim.rmsprop(0.1)),
    "rmsprop-all": Row(lambda: optim.rmsprop(0.1, weight_decay=0.1, momentum=0.9, centered=True)),
    "adagrad": Row(lambda: optim.adagrad(0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3)),
    "lion": Row(lambda: optim.lion(0.1)),
    "adamw_8bit": Row(lambda: optim.adamw_8bit(0.1, block=4), block=4, real=True),
    "lamb": Row(lambda: optim.lamb(0.1, weight_decay=0.1)),
    "adafactor": Row(lambda: optim.adafactor(0.1, weight_decay=0.1), real=True),
    "muon": Row(lambda: optim.muon(0.1, nesterov=True), real=True, kernel=True),
    "lbfgs": Row(lambda: optim.lbfgs(0.1, history_size=2), real=True),
    "scale": Row(lambda: optim.scale(-0.1), any_state=True),
    "scale_by_schedule": Row(lambda: optim.scale_by_schedule(optim.schedules.linear(-0.1, -0.2, 3)), any_state=True),
    "add_decayed_weights": Row(lambda: optim.chain(optim.add_decayed_weights(0.1), optim.scale(-0.1))),
    "clip": Row(lambda: optim.chain(optim.clip(0.1), optim.sgd(0.1)), real=True, kernel=True),
    "clip_by_global_norm": Row(
        lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.1)), kernel=True, asks="adamw"
    ),
    "clip_by_global_norm-inf": Row(
        lambda: optim.chain(optim.clip_by_global_norm(0.5, p=float("inf")), optim.sgd(0.1)), kernel=True
    ),
    "clip_by_leaf_norm": Row(
        lambda: optim.chain(optim.clip_by_leaf_norm(0.5, p=3), optim.sgd(0.1, momentum=0.5)), kernel=True
    ),
    "masked": Row(lambda: optim.masked(optim.lamb(0.1), lambda path, leaf: leaf.ndim > 1), asks="lamb"),
    "by_label": Row(
        lambda: optim.by_label({"matrix": optim.adamw(0.1), "rest": optim.sgd(0.1, momentum=0.9)}, _decay),
        kernel=True,
        asks="adamw",
    ),
    "resting": Row(lambda: optim.resting(optim.adamw(0.1, weight_decay=0.1)), kernel=True, asks="adamw"),
    "with_hyperparams": Row(lambda: optim.with_hyperparams(optim.adamw, lr=0.1, b1=0.8), asks="adamw", any_state=True),
    "with_hyperparams-schedule": Row(
        lambda: optim.with_hyperparams(optim.sgd, lr=optim.schedules.cosine(0.1, 9), momentum=0.9), any_state=True
    ),
    "whole_leaves": Row(lambda: optim.whole_leaves(optim.lamb(0.1)), asks="lamb"),
    "from_torch-Adam": Row(lambda: optim.from_torch(torch.optim.Adam, lr=0.1, amsgrad=True), any_state=True),
    "from_torch-SGD": Row(
        lambda: optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), any_state=True
    ),
    "from_torch-Rprop": Row(lambda: optim.from_torch(torch.optim.Rprop, lr=0.1), any_state=True),
    "from_torch-Adafactor": Row(lambda: optim.from_torch(torch.optim.Adafactor, lr=0.1), real=True, any_state=True),
}
TRANSFORMS: dict[str, Make] = {name: row.make for name, row in ROWS.items()}
# States of owners of whole leaves, deep in others, beside the rows: whole leaves of a split have an order of their own.
OWNERS: dict[str, Make] = {
    **{f"whole_leaves-{name}": partial(_whole, row.make) for name, row in ROWS.items()},
    "from_torch-Muon": lambda: optim.by_label(
        {"matrix": optim.from_torch(torch.optim.Muon, lr=0.1), "rest": optim.sgd(0.1, momentum=0.9)}, _decay
    ),
    "in a chain": lambda: optim.chain(optim.clip_by_global_norm(1.0), _of_whole(), optim.add_decayed_weights(0.1)),
    "by label, whole": lambda: optim.by_label({"matrix": _of_whole(), "rest": optim.lamb(0.1)}, _decay),
    "masked, whole": lambda: optim.masked(_of_whole(), lambda path, leaf: path.endswith("up")),
    "resting, whole": lambda: optim.resting(_of_whole()),
}
KERNELS = {name for name, row in ROWS.items() if row.kernel}

# The value that a hyper-parameter of a name has in tests that compare numbers with tensors.
VALUES: dict[str, float] = {
    **{"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "b1": 0.8, "b2": 0.95, "eps": 1e-3},
    **{"alpha": 0.9, "lr_decay": 0.1, "beta2_decay": -0.7, "d": 1.5},
    **{"factor": -0.1, "max_magnitude": 0.3, "max_norm": 0.5},
}


def makers() -> dict[str, Callable[..., optim.Transform]]:
    """The functions of `fshard.optim` that return a transformation, by name."""
    exported = {name: getattr(optim, name) for name in optim.__all__}
    return {name: make for name, make in exported.items() if returns_transform(make)}


def returns_transform(value: object) -> bool:
    """Whether a value is a function that says it returns a Transform."""
    return inspect.isfunction(value) and inspect.signature(value).return_annotation == "Transform"


def hyperparams(make: Callable[..., optim.Transform]) -> list[str]:
    """The parameters of such a function that say they take a 0-d tensor as well as a number."""
    parameters = inspect.signature(make).parameters.values()
    return [x.name for x in parameters if x.annotation in ("Number", "Rate")]
