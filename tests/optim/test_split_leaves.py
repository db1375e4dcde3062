"""Optimizers of leaves that are split along any dim, or by blocks: the updates of one device, and the same state."""

from typing import Any

import pytest
import torch
from support.models import rand
from support.optimizers import OWNERS, TRANSFORMS
from torch import Tensor

import fshard
from fshard import optim, tree
from fshard.optim.state import extend, gather_state, load_state_dict, shard_state, state_dict
from fshard.testing import World

PARAMS = {"up": rand(4, 8, seed=1), "bias": rand(8, seed=2), "down": rand(8, 4, seed=3)}
GRADS = [{name: rand(*x.shape, seed=10 * i + x.ndim) for name, x in PARAMS.items()} for i in range(2)]
SPLITS: dict[str, dict[str, Any]] = {
    "columns": {"up": ("tensor", 1), "down": ("tensor", 0)},
    "rows": {"up": ("tensor", 0), "down": ("tensor", 1)},
    "blocks": {"up": ("tensor", 1, 2), "down": ("tensor", 1, 2), "bias": ("tensor", 0, 2)},
}
# what needs matrices in one block, or blocks of elements: the splits that it refuses
REFUSED = {"adafactor": ("blocks",), "whole_leaves-adafactor": ("blocks",), "adamw_8bit": tuple(SPLITS)}
CASES = [(name, split) for name in [*TRANSFORMS, *OWNERS] for split in SPLITS if split not in REFUSED.get(name, ())]


def start(mesh: Any, split: str) -> Any:
    """Parameters, split if there is a mesh."""
    how = {} if mesh is None else {"split": SPLITS[split]}
    return fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh, block=4, **how))


def trained(mesh: Any, name: str, split: str) -> tuple[Any, Any, Any]:
    """The optimizer, parameters after an update and a step, and the state."""
    tx, params = (TRANSFORMS | OWNERS)[name](), start(mesh, split)
    first, second = (fshard.shard_params(grads, params.plan) for grads in GRADS)
    updates, state = tx.update(first, tx.init(params), params)
    return tx, *tx.step(second, state, optim.apply_updates(params, updates))


def went(mesh: Any, name: str, split: str) -> tuple[Any, dict[str, Tensor]]:
    """The whole parameters and the whole state."""
    _, params, state = trained(mesh, name, split)
    return fshard.gather_params(params), gather_state(state)


@pytest.mark.law
@pytest.mark.parametrize(("name", "split"), CASES)
def test_updates_are_those_of_one_device(name: str, split: str) -> None:
    """A whole leaf in another order than its parts would get zeros, or the updates of other elements."""
    expected = tree.leaves(went(None, name, split))
    for got in World(axes={"shard": 2, "tensor": 2}).run(went, name, split):
        torch.testing.assert_close(tree.leaves(got), expected, rtol=1e-9, atol=1e-9)


def passed(mesh: Any, name: str, split: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """A whole state, and what it is after it was cut again, by the way that it took."""
    tx, params, state = trained(mesh, name, split)
    whole, like = gather_state(state), tx.init(start(mesh, split))
    ways = {
        "shard_state": shard_state(whole, like),
        # a state of numbers alone names no mesh
        "from one rank": shard_state(whole, like, src=1 if any(x.dim() for x in whole.values()) else None),
        "extend": extend(state, tx, params),
    }
    if name in ("from_torch-Muon", "whole_leaves-adamw", "resting, whole"):  # that a class of torch's knows
        ways["torch's format"] = load_state_dict(state_dict(state, params), like, params)
    return {way: (gather_state(new), whole) for way, new in ways.items()}


@pytest.mark.parametrize(("name", "split"), CASES)
def test_a_state_is_cut_as_it_was_gathered(name: str, split: str) -> None:
    """A run that goes on from a gathered state would begin with moments of zero."""
    for ways in World(axes={"shard": 1, "tensor": 2}).run(passed, name, split):
        for way, (got, expected) in ways.items():
            assert got.keys() == expected.keys()
            for path, x in expected.items():
                assert torch.equal(got[path], x), (way, path)
