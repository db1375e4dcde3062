"""What the tests' Hypothesis strategies draw: all that they promise, and nothing that a plan or a step refuses."""

from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from support import strategies
from support.optimizers import makers

import fshard
from fshard import tree
from fshard.update import optimizers

PARAMS = {"w": torch.ones(4, 3), "blocks": [{"b": torch.ones(2)}, {"b": torch.ones(2, dtype=torch.int64)}]}
ONCE = settings(
    max_examples=2000, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
)  # no shrinking


def tied(x: Any) -> bool:
    """Whether one tensor is at two places of a tree."""
    return len({id(leaf) for leaf in tree.leaves(x)}) < len(tree.leaves(x))


REACHED = {
    "tied": (strategies.trees(), tied),
    "a leaf alone": (strategies.trees(), lambda x: isinstance(x, torch.Tensor)),
    "a list": (strategies.trees(), lambda x: isinstance(x, list) and len(x) == 3),
    "a tuple": (strategies.trees(), lambda x: isinstance(x, tuple)),
    "an empty subtree": (strategies.trees(), lambda x: isinstance(x, dict) and {} in x.values()),
    "an empty leaf": (strategies.trees(), lambda x: any(leaf.numel() == 0 for leaf in tree.leaves(x))),
    "dtypes": (strategies.trees(strategies.DTYPES), lambda x: len({leaf.dtype for leaf in tree.leaves(x)}) > 2),
    "a NaN": (strategies.tensors(bits=True), lambda x: x.isnan().any()),
    "four ranks": (strategies.meshes(), lambda x: x == {"shard": 2, "replicate": 2}),
    "three ranks": (strategies.meshes(3), lambda x: x == {"shard": 3, "replicate": 1}),
    **{f"plan {name}": (strategies.plans(PARAMS, strategies.policies()), lambda x, name=name: name in x)
       for name in ("units", "whole", "offload", "frozen", "together", "block", "policy", "regather", "state_over")},
    "patterns": (strategies.plans(PARAMS), lambda x: "blocks.1" in str(x.get("units"))),
    "an override": (strategies.policies(), lambda x: x.overrides and x.storage),
    "uneven batches": (strategies.batches(2), lambda x: len(x[0][0]["x"]) != len(x[0][1]["x"])),
    **{f"loss {kind}": (strategies.losses(), lambda x, kind=kind: x.kind == kind and x.sparing and x.dropout)
       for kind in ("mean", "sum", "plain")},
}  # fmt: skip


@pytest.mark.parametrize("name", REACHED)
def test_what_is_promised_is_drawn(name):
    """Each promised case is drawn within 2,000 examples: otherwise users' property tests would never try it."""
    strategy, wanted = REACHED[name]
    assert wanted(find(strategy, lambda x: bool(wanted(x)), settings=ONCE))


@settings(ONCE, max_examples=40)
@given(st.data())
def test_what_is_drawn_is_taken(data):
    """Every drawn tree, plan, batch and loss is accepted: otherwise users' property tests would fail for no fault of
    theirs."""
    params = data.draw(strategies.trees(strategies.DTYPES))
    plan = fshard.make_plan(
        params, fshard.AbstractMesh(replicate=2, shard=2), **data.draw(strategies.plans(params, strategies.policies()))
    )
    first = next(i for i, leaf in enumerate(tree.leaves(params)) if leaf.is_floating_point())
    assert plan.kinds[plan.slots[plan.leaves[first]].kind].trainable
    accumulate, even = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    batches = data.draw(strategies.batches(3, 2, accumulate, even))
    assert [len(step) for step in batches] == [3, 3]
    rows = [len(batch["x"]) for step in batches for batch in step]
    assert all(n >= accumulate and (n % accumulate == 0 or not even) for n in rows)
    live = tree.map(lambda x: x.detach().requires_grad_(x.is_floating_point()), params)
    out = data.draw(strategies.losses())(live, batches[0][0])
    assert getattr(out, "total", out).requires_grad


def test_transforms_say_how_they_were_made():
    """Drawn transforms have names of their own and are made anew: otherwise a failure's report would not tell which
    one failed. Every elementwise optimizer but lion is among them."""
    drawn = dict[str, Any]()
    for _ in strategies._TRANSFORMS:
        one = find(strategies.transforms(), lambda x: str(x) not in drawn, settings=ONCE)
        drawn[str(one)] = one.make()
    assert all(isinstance(tx, fshard.optim.Transform) for tx in drawn.values())
    elementwise = [name for name in makers() if vars(optimizers).get(name) is not None]
    assert {name for name in elementwise if f" {name}(" not in " ".join(["", *drawn])} == {"lion"}
