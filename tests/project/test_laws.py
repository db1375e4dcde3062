"""Laws of sharding, over trees, meshes, plans, transformations, policies and losses that Hypothesis draws.

The same few examples at every run; FSHARD_EXAMPLES=1000 draws so many others.
"""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from support.examples import examples
from support.models import padding, same_bits
from support.worlds import simulated

import fshard
from fshard.core import tree
from fshard.testing import assert_trees_equal, oracle, whole_state

ROLES = ("storage", "compute", "reduce", "grads")


def shard_and_gather(mesh: Any, params: Any, plan: dict[str, Any]) -> Any:
    """What comes back, and whether all padding is zero."""
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, **plan))
    return fshard.gather_params(sharded), all(not pad.any() for pad in padding(sharded))


def ties(x: Any) -> list[int]:
    """For every leaf the number of the first that is the same tensor."""
    ids = [id(leaf) for leaf in tree.leaves(x)]
    return [ids.index(i) for i in ids]


@examples(60)
@given(st.data())
def test_gathering_is_the_inverse_of_sharding(data):
    """For some tree and mesh a gathered leaf would have other bits, or padding would not be zero."""
    params = data.draw(strategies.trees(strategies.DTYPES, bits=True), "params")
    plan, sizes = data.draw(strategies.plans(params), "plan"), data.draw(strategies.meshes(), "mesh")
    for found, clean in simulated(shard_and_gather, params, plan, **sizes):
        assert_trees_equal(found, params)
        assert ties(found) == ties(params)
        assert clean


class Drawn:
    """A case: everything a training run needs."""

    def __init__(self, data: Any, dtypes: Any = (torch.float64,), policies: Any = None):
        self.params = data.draw(strategies.trees(dtypes), "params")
        self.sizes = data.draw(strategies.meshes(), "mesh")
        self.plan = data.draw(strategies.plans(self.params, policies), "plan")
        self.tx = data.draw(strategies.transforms(), "transform").make()
        self.loss = data.draw(strategies.losses(), "loss")
        self.accumulate = data.draw(st.sampled_from([1, 2, 3]), "accumulate")
        self.clip = data.draw(st.sampled_from([None, 0.1]), "clip_norm")
        self.once = data.draw(st.booleans(), "reduce_once")
        self.scale = data.draw(st.sampled_from([None, 64.0]), "loss scale")
        num_ranks = self.sizes["shard"] * self.sizes["replicate"]
        even = self.loss.kind == "plain"
        self.batches = data.draw(strategies.batches(num_ranks, 2, self.accumulate, even), "batches")

    def scaler(self) -> Any:
        """The loss scaler."""
        return None if self.scale is None else fshard.DynamicLossScale(self.scale, growth_interval=1)

    def sharded(self, mesh: Any) -> Any:
        """State and metrics of two steps on a rank, whole; and what the rank holds."""
        plan = fshard.make_plan(self.params, mesh, **self.plan)
        state = fshard.init_state(fshard.shard_params(self.params, plan), self.tx, self.scaler(), seed=3)
        step = fshard.train_step(
            self.loss, self.tx, clip_norm=self.clip, accumulate=self.accumulate, reduce_once=self.once
        )
        metrics = []
        for batches in self.batches:
            state, row = step(state, batches[mesh.get_rank()])
            metrics.append(row)
        return whole_state(state), metrics, state

    def plain(self) -> Any:
        """The same by the oracle."""
        kept = {name: self.plan.get(name) for name in ("frozen", "policy")}
        plain = oracle(self.loss, self.tx, clip_norm=self.clip, accumulate=self.accumulate, **kept)
        state, metrics = plain.init(self.params, self.scaler(), seed=3), []
        for batches in self.batches:
            state, row = plain.step(state, batches)
            metrics.append(row)
        return whole_state(state), metrics


def apart(got: Any, expected: Any) -> float:
    """The largest difference of two trees of tensors, relative to the leaf's largest element (to 1e-3 at least)."""
    assert tree.flatten(got)[1] == tree.flatten(expected)[1]
    worst = 0.0
    for x, y in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.numel():
            wide = torch.complex128 if x.is_complex() else torch.float64
            worst = max(worst, float((x.to(wide) - y.to(wide)).abs().max() / y.to(wide).abs().max().clamp(min=1e-3)))
    return worst


def holds(drawn: Drawn, tolerance: float) -> None:
    """Every rank has what the oracle has, and zeros in its padding."""
    expected = drawn.plain()
    runs = simulated(drawn.sharded, **drawn.sizes)
    for state, metrics, held in runs:
        assert apart((state, metrics), expected) <= tolerance
        assert same_bits((state, metrics), runs[0][:2])
        assert ties(state.params) == ties(drawn.params)
        assert all(not pad.any() for part in tree.nodes(held, fshard.Sharded) for pad in padding(part))


@examples(140)
@given(st.data())
def test_training_is_the_oracles(data):
    """For some tree, mesh and optimizer two steps would differ from unsharded training by more than 1e-10."""
    holds(Drawn(data, (torch.float64, torch.int64)), 1e-10)


def coarsest(drawn: Drawn) -> float:
    """The distance of 1 from the next number in the coarsest dtype of a case."""
    policy = drawn.plan.get("policy", fshard.Policy())
    said = [getattr(p, name) for p in (policy, *(own for _, own in policy.overrides)) for name in ROLES]
    kept = [leaf.dtype for leaf in tree.leaves(drawn.params) if leaf.is_floating_point()]
    return max(torch.finfo(dtype).eps for dtype in (*said, *kept) if dtype is not None)


@examples(56)
@given(st.data())
def test_training_in_any_precision_is_the_oracles(data):
    """For some policy training would err by more than the coarsest dtype in it allows."""
    drawn = Drawn(data, (torch.float64, torch.float32, torch.bfloat16), strategies.policies())
    holds(drawn, max(1e-10, 16 * coarsest(drawn)))
