"""How much of the house one has to read: the files that a unit and a step enter, the lines that a step runs, and all
lines. Two processes of one host are measured: the messages between ranks are part of a step.

A change that is no feature raises none of these numbers; a feature says in its commit which it raises, and by what it
is paid for.
"""

from typing import Any

import pytest
import torch
from sizes import code_lines
from support.entered import HOUSE, Line, entered
from support.worlds import gloo
from torch import Tensor
from torch.nn import functional as F

import fshard
from fshard import optim

pytestmark = pytest.mark.law


def loss(p: Any, x: Tensor) -> Tensor:
    """A stack of small linear layers."""
    for layer in p["layers"]:
        x = F.linear(x, layer["w"], layer["b"])
    return x.square().mean()


def walks(mesh: Any) -> dict[str, set[Line]]:
    """A unit touched and a unit's gradients reduced, in the middle of five, and a step."""
    params = {"layers": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(5)]}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["layers.*"]))
    fn, tx, x = fshard.value_and_grad(loss), optim.adamw(lr=0.1), torch.ones(2, 4)
    step, state = fshard.train_step(loss, tx), fshard.init_state(sharded, tx)
    for _ in range(2):
        fn(sharded, x)
        state, _ = step(state, x)
    touched, reduced = (entered(lambda: fn(sharded, x), f"Tape.{name}") for name in ("touch", "reduce"))
    assert len(touched) == len(reduced) == 5
    return {"touched": touched[2], "reduced": reduced[2], "step": set().union(*entered(lambda: step(state, x)))}


def test_the_house_is_no_larger_than_it_was() -> None:
    """Each feature fits, and one after the other they grow over the heads of those who keep them."""
    first, second = gloo(walks)
    lines = {name: first[name] | second[name] for name in first}  # a rank that has to wait runs ten lines more
    rooms = {name: len({file for file, _ in entered}) for name, entered in lines.items()}
    assert rooms == {"touched": 14, "reduced": 12, "step": 41}, {
        n: " ".join(sorted({f for f, _ in x})) for n, x in lines.items()
    }
    assert len(lines["step"]) <= 1_290, len(lines["step"])
    assert sum(len(code_lines(path.read_text())) for path in HOUSE.rglob("*.py")) <= 27_100
