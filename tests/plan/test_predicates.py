"""Predicates: a function of a path and what lies there, wherever leaves are selected."""

from typing import Any

import pytest
import torch
from torch import nn

import fshard
from fshard import Policy, optim
from fshard.module import functionalize

PARAMS = {"a": {"w": torch.ones(2, 2)}, "b": {"w": torch.ones(3)}}


def planned(**options: Any) -> Any:
    """A plan."""
    return fshard.make_plan(PARAMS, fshard.AbstractMesh(shard=1), **options)


CALLS: dict[str, tuple[Any, str]] = {
    **{
        name: (lambda fn, name=name: planned(**{name: fn}), rf"{name}: expected a function \(path, subtree\) -> bool")
        for name in ("units", "frozen", "whole", "offload")
    },
    "policy": (
        lambda fn: planned(policy=Policy(overrides=[(fn, "compute=bf16")])),
        r"policy: expected a function \(path, subtree\) -> bool",
    ),
    "apply.units": (
        lambda fn: functionalize(nn.Sequential(nn.Linear(2, 2)))[0].units(fn),
        r"units: expected a function \(path, submodule\) -> bool",
    ),
    "by_label": (
        lambda fn: optim.by_label({True: optim.sgd(0.1), False: optim.sgd(0.2)}, fn).init(PARAMS),
        r"expected a function \(path, tensor\) -> label",
    ),
    "masked": (lambda fn: optim.masked(optim.sgd(0.1), fn).init(PARAMS), r"expected a function \(path, tensor\)"),
    "skip_labels": (
        lambda fn: fshard.train_step(
            lambda p, x: x, optim.by_label({True: optim.sgd(0.1), False: optim.sgd(0.2)}, accepts), skip_labels=fn
        ),
        r"skip_labels: expected a function \(path, tensor\) -> label",
    ),
    "init_params": (
        lambda fn: fshard.init_params(fshard.make_plan(PARAMS), fn),
        r"init_params: fn: expected a function \(path, like\) -> tensor",
    ),
}


def accepts(path: str, x: Any) -> bool:
    """Selects one subtree or leaf of both kinds of tree."""
    return path in ("a", "a.w", "0")


@pytest.mark.parametrize("name", CALLS)
def test_predicates_take_a_path_and_what_lies_there(name: str) -> None:
    """Others are refused by the signature that is expected, before one is called."""
    call, words = CALLS[name]
    call(accepts if name != "init_params" else lambda path, like, more=None: torch.zeros(like.shape))
    wrong: list[Any] = [lambda path: path == "a", lambda: True, lambda path, x, y: True, lambda *, path, x: True]
    for fn in wrong:
        with pytest.raises(TypeError, match=words):
            call(fn)
