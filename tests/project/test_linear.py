"""What public calls cost the host grows no faster than the number of units, and of leaves in a unit."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from support.costs import cost

import fshard
from fshard import optim
from fshard.sharding.sharded import coarsen, refine

pytestmark = pytest.mark.law


@dataclass
class Case:
    """A tree of `units` units with `leaves` leaves each between two leaves of the root, its plan, and its parts."""

    units: int
    leaves: int

    @cached_property
    def params(self) -> dict[str, Any]:
        """The whole parameters."""
        blocks = [{f"w{j}": torch.zeros(2) for j in range(self.leaves)} for _ in range(self.units)]
        return {"embed": torch.zeros(3), "blocks": blocks, "head": torch.zeros(3)}

    def plan(self, **options: Any) -> fshard.Plan:
        """A new plan, which has derived nothing yet."""
        mesh = fshard.AbstractMesh(shard=4, rank=1)
        return fshard.make_plan(self.params, mesh, **{"units": ["blocks.*"], "bucket": 0, **options})

    @cached_property
    def one(self) -> fshard.Plan:
        """A plan on one device."""
        return fshard.make_plan(self.params, units=["blocks.*"])

    @cached_property
    def sharded(self) -> fshard.Sharded:
        """The parameters on one device."""
        return fshard.shard_params(self.params, self.one)

    @cached_property
    def grads(self) -> fshard.Sharded:
        """Gradients on one device."""
        return fshard.value_and_grad(loss)(self.sharded, X)[1]

    @cached_property
    def fresh(self) -> fshard.Sharded:
        """Parameters on one device whose plan has derived nothing yet."""
        return fshard.shard_params(self.params, fshard.make_plan(self.params, units=["blocks.*"]))

    @property
    def names(self) -> list[str]:
        """The names of the units."""
        return [f"blocks.{i}" for i in range(self.units)]

    def labels(self) -> optim.Transform:
        """An optimizer with one label for every second leaf."""
        kinds = {"a": optim.sgd(0.1), "b": optim.adamw(0.1)}
        return optim.by_label(kinds, lambda path, leaf: "a" if path.endswith(("0", "2", "embed")) else "b")


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss that reads every unit once, by its index."""
    for i in range(len(params["blocks"])):
        for leaf in params["blocks"][i].values():
            x = x + leaf.sum()
    return x


X = torch.ones(())
MOST = 0.01  # a search would be more; the order of a set, which is another in each process, is less
CALLS: dict[str, Callable[[Case], object]] = {
    "make_plan": lambda c: c.plan(),
    "make_plan, units by name": lambda c: c.plan(units=c.names),
    "make_plan, units by size": lambda c: c.plan(units=2 * c.leaves),
    "make_plan, patterns": lambda c: c.plan(frozen="blocks.*.w0", whole=["embed", "**.w1"]),
    "make_plan, frozen by name": lambda c: c.plan(frozen=[f"{name}.w0" for name in c.names]),
    "make_plan, regather by name": lambda c: c.plan(regather=dict.fromkeys(c.names, False)),
    "make_plan, policies": lambda c: c.plan(
        policy=fshard.Policy(overrides=tuple((n, "storage=bf16") for n in c.names))
    ),
    "print(plan)": lambda c: str(c.one),
    "plan.describe": lambda c: c.one.describe(),
    "shard_params": lambda c: fshard.shard_params(c.params, c.one),
    "gather_params": lambda c: fshard.gather_params(c.sharded),
    "local_views": lambda c: c.sharded.local_views(),
    "local_views of each unit": lambda c: [block.local_views() for block in c.sharded["blocks"]],
    "sharded[...]": lambda c: [c.fresh["blocks"][i] for i in range(c.units)],
    "sharded[...] of leaves": lambda c: [c.sharded["blocks"][0][f"w{j}"] for j in range(c.leaves)],
    "iteration": lambda c: [list(block.items()) for block in c.fresh["blocks"]],
    "state_dict": lambda c: fshard.state_dict(c.sharded),
    "load_state_dict": lambda c: fshard.load_state_dict(c.sharded, fshard.state_dict(c.sharded)),
    "init_params": lambda c: fshard.init_params(c.one, lambda path, like: torch.zeros(like.shape)),
    "init_state": lambda c: fshard.init_state(c.fresh, optim.adamw(0.1)),
    "update": lambda c: optim.adamw(0.1).update(c.sharded, optim.adamw(0.1).init(c.sharded), c.sharded),
    "update by label": lambda c: c.labels().update(c.sharded, c.labels().init(c.sharded), c.sharded),
    "update by leaf": lambda c: optim.lamb(0.1).update(c.sharded, optim.lamb(0.1).init(c.sharded), c.sharded),
    "global_norm": lambda c: optim.global_norm(c.fresh),
    "layout": lambda c: c.fresh.layout.mine,
    "refine and coarsen": lambda c: coarsen(refine(c.sharded.trainable, ()), ()),
    "value_and_grad": lambda c: fshard.value_and_grad(loss)(c.sharded, X),
    "evaluate": lambda c: fshard.evaluate(loss)(c.sharded, X),
}


def _excess(name: str, *sizes: tuple[int, int]) -> float:
    """By which part of itself a call on the largest size costs more than in proportion to the two smaller ones.

    The sizes are n, 2n and 4n units, or leaves. What the cases consist of is made before it is counted.
    """
    CALLS[name](Case(2, 2))  # what is done once in a process, as patterns are compiled
    cases = [case for case in (Case(*size) for size in sizes) if case.fresh.plan and case.grads.plan]
    one, two, four = (cost(partial(CALLS[name], case)) for case in cases)
    return (four - two - 2 * (two - one)) / four


@pytest.mark.parametrize("name", CALLS)
def test_a_call_costs_the_same_for_each_unit_and_leaf(name: str) -> None:
    """With more units, or more leaves in a unit, a call costs as much more as in proportion: a search of all units for
    each unit would be minutes of a plan of 10,000 units."""
    assert _excess(name, (8, 2), (16, 2), (32, 2)) <= MOST, "for each unit"
    assert _excess(name, (2, 8), (2, 16), (2, 32)) <= MOST, "for each leaf"


def test_the_law_can_fail() -> None:
    """Searches that bytecodes do not show are counted as well: otherwise the law would hold for `list.index`."""
    few, many = (cost(lambda n=n: [list(range(n)).index(i) for i in range(n)]) for n in (100, 400))
    assert many > 8 * few
