"""L-BFGS with the gradient as a function: the results of torch's L-BFGS with a closure, on any mesh."""

from typing import Any

import pytest
import torch
from support.models import WORLDS, rand
from support.worlds import gloo, simulated

import fshard
from fshard import optim

ITERATIONS, UPDATES = 4, 3
START = {"w": rand(5, 3, seed=0), "b": rand(3, seed=1), "scale": rand(seed=2)}
ROWS = rand(12, 5, seed=3)


def loss(params: Any, rows: torch.Tensor) -> fshard.Mean:
    """A convex loss whose curvature differs in every direction."""
    out = rows @ params["w"] + params["b"]
    scaled = (out.square() * torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)).sum(1)
    return fshard.Mean((scaled + out.exp().sum(1) + (params["scale"] - out.sum(1)).square()).sum(), len(rows))


def by_torch() -> Any:
    """The parameters by torch's L-BFGS on all ranks' rows."""
    params = {name: x.clone().requires_grad_() for name, x in START.items()}
    how = {"lr": 0.5, "max_iter": ITERATIONS, "history_size": 3, "tolerance_grad": 0.0, "tolerance_change": 0.0}
    optimizer = torch.optim.LBFGS(params.values(), **how)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        mean = loss(params, ROWS)
        value = mean.total / mean.count
        value.backward()
        return value

    for _ in range(UPDATES):
        optimizer.step(closure)
    return {name: x.detach() for name, x in params.items()}


def by_ours(mesh: Any) -> Any:
    """The parameters by fshard's L-BFGS, every rank on its own rows."""
    size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
    tx, rows = optim.lbfgs(0.5, history_size=3, max_iter=ITERATIONS), ROWS[rank::size]
    params = fshard.shard_params(START, fshard.make_plan(START, mesh, units=["w"]))
    state = tx.init(params)

    def grad_fn(here: Any) -> Any:
        return fshard.value_and_grad(loss)(here, rows)[1]

    for i in range(UPDATES):
        if i % 2:
            params, state = tx.step(grad_fn(params), state, params, grad_fn=grad_fn)
        else:
            updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn)
            params = optim.apply_updates(params, updates)
    return fshard.gather_params(params)


def agrees(found: Any) -> None:
    """Assert that the parameters have moved, and are torch's to 1e-9."""
    for name, want in by_torch().items():
        assert (want - START[name]).abs().max() > 1e-2
        torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-9)


def test_one_device_is_torchs() -> None:
    """On one device L-BFGS takes torch's steps: otherwise users who change from torch would get other parameters."""
    agrees(by_ours(None))


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_change_nothing(world: str) -> None:
    """On simulated ranks L-BFGS takes torch's steps: otherwise its results would depend on the mesh."""
    replicate, shard = WORLDS[world]
    for found in simulated(by_ours, replicate=replicate, shard=shard):
        agrees(found)


def test_processes_change_nothing() -> None:
    """In two gloo processes L-BFGS takes torch's steps: otherwise only simulated ranks would be right."""
    for found in gloo(by_ours):
        agrees(found)


def test_numbers_that_are_refused() -> None:
    """No pairs, or no iterations, are errors that say what is expected: otherwise L-BFGS would be gradient descent."""
    with pytest.raises(ValueError, match="history_size=0: expected a number of pairs, at least 1"):
        optim.lbfgs(history_size=0)
    with pytest.raises(ValueError, match="max_iter=0: expected"):
        optim.lbfgs(max_iter=0)
