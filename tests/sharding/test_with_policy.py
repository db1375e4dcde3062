"""Another policy over the same shards (`Sharded.with_policy`)."""

from typing import Any

import pytest
import torch
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor
from torch.nn import functional as F

import fshard
from fshard import optim

POLICIES = [None, "compute=bf16", "compute=f16, reduce=f32", "compute=bf16, output=f32, cast_inputs=no", "grads=f64"]
PLANS: dict[str, dict[str, Any]] = {
    "full": {"units": ["layers.*"]},
    "keep": {"units": ["layers.*"], "regather": False},
    "zero": {"params_over": ()},
    "whole and frozen": {"units": ["layers.*"], "whole": "layers.0", "frozen": "layers.1"},
    "wire": {"units": [], "param_wire": fshard.wire.Int8()},  # Int8 rounds by the intervals of ranks
}


def loss(p: Any, x: Tensor) -> Tensor:
    """Layers one after the other, in the dtype of the parameters."""
    for layer in p["layers"]:
        x = F.linear(x.to(layer["w"].dtype), layer["w"], layer["b"]).tanh()
    return x.float().square().mean()


def whole_params() -> dict[str, Any]:
    """Float32 layers of uneven sizes."""
    return {"layers": [{"w": rand(5, 5, seed=i).float(), "b": rand(5, seed=9 + i).float()} for i in range(2)]}


def computed(mesh: Any, options: Any, before: Any, policy: Any) -> None:
    """A loss, a gradient and a step under another policy are those of parameters that were sharded with it."""
    whole, x = whole_params(), rand(4, 5, seed=mesh.get_rank()).float()
    params, expected = (
        fshard.shard_params(whole, fshard.make_plan(whole, mesh, policy=each, **options)) for each in (before, policy)
    )
    got = params.with_policy(policy)
    assert all(a is b for a, b in zip(got.tensors, params.tensors, strict=True))
    assert (got.plan.policy, got.plan.kinds) == (expected.plan.policy, expected.plan.kinds)
    assert same_bits(*(fshard.evaluate(loss)(each, x) for each in (got, expected)))
    gradients = [fshard.value_and_grad(loss)(each, x) for each in (got, expected)]
    assert same_bits(*map(fshard.gather_params, gradients))
    tx = optim.adamw(lr=0.1)
    states = [fshard.train_step(loss, tx)(fshard.init_state(each, tx), x)[0] for each in (got, expected)]
    assert same_bits(*(fshard.gather_params(state.params) for state in states))
    assert same_bits(*map(fshard.gather_params, (got, params)))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("before", POLICIES[:2], ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_it_computes_as_parameters_that_were_sharded_with_it(plan: str, before: Any, policy: Any) -> None:
    """A dtype of the old policy that stays somewhere would round what the new one does not."""
    simulated(computed, PLANS[plan], before, policy)


def test_on_processes() -> None:
    """The same over gloo."""
    gloo(computed, PLANS["full"], "compute=bf16", None, shard=2)


def test_values_that_were_given_away_stay_so() -> None:
    """The tensors are the same: a donated step that takes them over writes to them."""
    params = fshard.shard_params(whole_params(), fshard.make_plan(whole_params()))
    other, tx = params.with_policy("compute=bf16"), optim.sgd(0.1)
    fshard.train_step(loss, tx, donate=True)(fshard.init_state(params, tx), torch.ones(2, 5))
    with pytest.raises(fshard.DonatedError):
        fshard.gather_params(other)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("storage=bf16", "leaf 'layers.0.w': expected storage=torch.float32, as it is in the shards, got bfloat16"),
        ("; layers.0.w: compute=bf16", "expected the dtypes of 'layers.0.w', with which it lies in the shards, got"),
        ("; layers.9: compute=bf16", "the pattern 'layers.9' matches nothing"),
    ],
)
def test_what_the_shards_cannot_be(policy: str, words: str) -> None:
    """Elements of another dtype, or of two dtypes in one buffer, need other shards."""
    params = fshard.shard_params(whole_params(), fshard.make_plan(whole_params()))
    with pytest.raises(ValueError, match=words):
        params.with_policy(policy)
    parts = fshard.make_plan(whole_params(), policy="; layers.0.w: compute=bf16")
    apart = fshard.shard_params(whole_params(), parts).with_policy("; layers.0.w: compute=f16")
    assert {kind.precision.compute for kind in apart.plan.kinds} == {torch.float32, torch.float16}
