"""What a step costs the host for each unit, counted in bytecodes and operators."""

from typing import Any

import pytest
import torch
from support.costs import cost
from support.worlds import simulated
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fshard

pytestmark = pytest.mark.law


def loss(p: Any, x: Tensor) -> Tensor:
    """A stack of small linear layers."""
    for layer in p["layers"]:
        x = F.linear(x, layer["w"], layer["b"])
    return x.square().mean()


class Operators(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a call."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def costs(mesh: Any, units: int, strategy: dict[str, Any]) -> tuple[int, int]:
    """The bytecodes and the operators of the third value and gradient of so many units."""
    params = {"layers": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(units)]}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["layers.*"], **strategy))
    fn, x = fshard.value_and_grad(loss), torch.ones(2, 4)
    fn(sharded, x)
    fn(sharded, x)
    with Operators() as operators:
        fn(sharded, x)
    return cost(lambda: fn(sharded, x)), operators.count


STRATEGIES: dict[str, tuple[bool, dict[str, Any], tuple[int, int]]] = {
    # whether there are two ranks, the strategy, and the most bytecodes and operators of a unit: 2 to 5% above them
    "one device": (False, {}, (440, 12)),
    "full": (True, {}, (4820, 35)),
    "keep": (True, {"regather": False}, (3520, 28)),
    "ddp": (True, {"params_over": (), "grads_over": (), "state_over": ()}, (3060, 24)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_unit_costs_the_host_the_same_in_a_stack_of_any_depth(name: str) -> None:
    """Small units would spend their time in Python, and deep stacks more than in proportion."""
    on_mesh, strategy, most = STRATEGIES[name]
    few, more, many = (
        simulated(costs, units, strategy, shard=2)[0] if on_mesh else costs(None, units, strategy)
        for units in (50, 100, 800)
    )
    per_unit = [(b - a) / 50 for a, b in zip(few, more, strict=True)]
    deep = [(b - a) / 700 for a, b in zip(more, many, strict=True)]
    assert all(a <= b for a, b in zip(per_unit, most, strict=True)), per_unit
    assert all(b <= 1.02 * a for a, b in zip(per_unit, deep, strict=True)), (per_unit, deep)
