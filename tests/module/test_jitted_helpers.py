"""A module that a jitted helper calls in an eager loss casts as it does without `jit`."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from support.worlds import simulated
from torch import nn

import fshard

POLICIES = [None, "compute=bf16", "compute=bf16,cast_inputs=no", "compute=f64", "; 0: compute=bf16", "storage=bf16"]
X = torch.linspace(-1, 1, 12).view(4, 3)


def argument(helper: Any, jit: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    return jit(helper)(params, x)


def closure(helper: Any, jit: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    return jit(lambda x: helper(params, x))(x)


def without_grad(helper: Any, jit: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return jit(helper)(params, x)


PASSED = [argument, closure, without_grad]
ENTRIES: dict[str, Any] = {
    "predict": lambda loss, *args: fshard.predict(loss)(*args),
    "evaluate": lambda loss, *args: fshard.evaluate(loss, has_aux=True)(*args),
    "value_and_grad": lambda loss, *args: fshard.value_and_grad(loss, has_aux=True)(*args),
}


def laws(mesh: Any, passed: Any, entry: str) -> None:
    """Each pair of policies, with one helper for all: a graph of another policy would be taken again."""
    made = [fshard.module.functionalize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))) for _ in range(2)]
    (student, params, none), (teacher, others, _) = made
    helper = lambda p, x: teacher(p, none, x)[0]  # noqa: E731
    kept: dict[Any, Any] = {}
    jit = lambda fn: kept.setdefault(fn, fshard.jit(fn, backend="eager"))  # noqa: E731
    for mine, theirs in itertools.product(POLICIES, POLICIES):
        plan = partial(fshard.make_plan, mesh=mesh)
        trained = fshard.shard_params(params, plan(params, policy=mine))
        beside = fshard.shard_params(others, plan(others, policy=theirs))
        x = X.bfloat16() if theirs and "cast_inputs=no" in theirs else X

        def loss(p: Any, x: torch.Tensor, q: Any, jit: Any) -> Any:
            mine = student(p, none, x.to(next(iter(fshard.tree.leaves(p))).dtype))[0]
            out = passed(helper, jit, q, x)
            return mine.float().square().sum() + out.float().sum(), out

        found, expected = (ENTRIES[entry](partial(loss, jit=j), trained, x, beside) for j in (jit, lambda fn: fn))
        fshard.testing.assert_trees_equal(found, expected)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("passed", PASSED)
def test_a_module_in_a_jitted_helper_casts_by_its_own_policy(passed: Any, entry: str, ranks: int):
    """A graph has other tensors than the loss has gathered: a teacher would compute in the dtype of the student."""
    if ranks == 1:
        laws(None, passed, entry)
    else:
        simulated(partial(laws, passed=passed, entry=entry), shard=2)


def test_a_jitted_helper_in_a_loss_has_a_graph_for_each_mesh():
    """A graph of one device has no sums over ranks: statistics of synchronised batch norms would be of one rank."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    apply, params, buffers = fshard.module.functionalize(model, sync_batch_norm=True)

    def law(mesh: Any, jit: Any) -> Any:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        x = X * (1 + (mesh.get_rank() if mesh is not None else 0))
        return fshard.predict(lambda p, x: jit(p, x))(sharded, x)

    helper = lambda p, x: apply(p, buffers, x)  # noqa: E731
    jitted = fshard.jit(helper, backend="eager")
    fshard.testing.assert_trees_equal(law(None, jitted), law(None, helper))
    for found, expected in zip(simulated(partial(law, jit=jitted)), simulated(partial(law, jit=helper)), strict=True):
        fshard.testing.assert_trees_equal(found, expected)
