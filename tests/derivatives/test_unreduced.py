"""Gradients that a program computed by itself on each rank: DP-SGD, whose samples are clipped one by one."""

import re
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, NARROW, STRATEGIES, WORLDS, lm_batch, lm_params, lm_total, padding, rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor
from torch.func import grad, vmap

import fshard
from fshard import optim, tree
from fshard.reduction import unreduced

CLIP, NOISE, STEPS = 0.3, 0.05, 3
FROZEN = "tail"
OPTIMIZERS = {
    "sgd": (lambda: optim.sgd(0.5, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.5, momentum=0.9)),
    "adamw": (lambda: optim.adamw(1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2)),
}


def noise(step: int, rank: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """One rank's part of the noise, by the path of the leaf."""
    return {
        path: NOISE * rand(*x.shape, seed=97 * step + 31 * rank + number)
        for number, (path, x) in enumerate(sorted(like.items()))
    }


def by_path(x: Any) -> dict[str, Tensor]:
    """The leaves of a tree by path."""
    return dict(zip(tree.paths(x), tree.leaves(x), strict=True))


def of_sample(trained: Any, frozen: Any, sample: dict[str, Tensor]) -> Tensor:
    """The loss of one sequence of words."""
    return lm_total({**trained, FROZEN: frozen}, tree.map(lambda x: x[None], sample))[0]


def clipped_sum(params: Any, batch: dict[str, Tensor], step: int, rank: int) -> Any:
    """The sum of the clipped gradients of a rank's samples, with its noise; each place of a tied leaf has its part."""
    trained = {name: x for name, x in params.items() if name != FROZEN}
    rows = vmap(grad(of_sample), (None, None, 0))(trained, params[FROZEN], batch)  # (samples, ...)
    once = {**rows, "embed": rows["embed"] + rows["head"], "head": None}
    norms = torch.stack([x.reshape(len(x), -1).norm(dim=1) for x in tree.leaves(once)]).norm(dim=0)
    factors = (CLIP / norms).clamp(max=1.0)
    total = tree.map(lambda x: torch.tensordot(factors, x, 1), rows)
    drawn = noise(step, rank, {path: x for path, x in by_path(total).items() if path != "head"})
    leaves = [x + drawn[path] if path in drawn else x for path, x in by_path(total).items()]
    return tree.unflatten(tree.flatten(total)[1], leaves)


def train(mesh: Any, optimizer: str, strategy: dict[str, Any], jitted: bool = False) -> Any:
    """Train with DP-SGD by hand; returns whole parameters."""
    rank, ranks = mesh.get_rank(), mesh.size()
    plan = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, frozen=[f"{FROZEN}.**"], **strategy)
    tx, params = OPTIMIZERS[optimizer][0](), fshard.shard_params(lm_params(), plan)
    opt_state = fshard.init_state(params, tx).opt_state
    batches = [lm_batch(step, rank) for step in range(STEPS)]
    counts = [sum(len(lm_batch(step, r)["tokens"]) for r in range(ranks)) for step in range(STEPS)]

    def step(params: Any, opt_state: Any, own: Any) -> Any:
        grads = fshard.reduce_grads(unreduced(own, params))
        trained, opt_state = tx.step(grads.for_state, opt_state, params.for_state)
        return params.with_trained(trained), opt_state

    step = fshard.jit(step, backend="eager") if jitted else step
    for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        own = tree.map(lambda x, n=count: x / n, clipped_sum(fshard.gather_params(params), batch, number, rank))
        params, opt_state = step(params, opt_state, {**own, FROZEN: None})
    return fshard.gather_params(params)


def expected(optimizer: str, ranks: int) -> Any:
    """The same by torch on one device: one sample after the other, those of all ranks."""
    whole = lm_params()
    leaves = {
        path: x.requires_grad_() for path, x in by_path(whole).items() if path.split(".")[0] not in ("head", FROZEN)
    }
    opt = OPTIMIZERS[optimizer][1](list(leaves.values()))
    for step in range(STEPS):
        total, count = {path: torch.zeros_like(x) for path, x in leaves.items()}, 0
        for rank in range(ranks):
            batch = lm_batch(step, rank)
            for i in range(len(batch["tokens"])):
                loss = of_sample(whole, whole[FROZEN], tree.map(lambda x, i=i: x[i], batch))
                own = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                norm = torch.stack([x.norm() for x in own]).norm()
                for path, x in zip(leaves, own, strict=True):
                    total[path] += x * (CLIP / norm).clamp(max=1.0)
            for path, x in noise(step, rank, leaves).items():
                total[path] += x
            count += len(batch["tokens"])
        for path, x in leaves.items():
            x.grad = total[path] / count
        opt.step()
    return tree.detached(whole)


def is_near(got: Any, whole: Any) -> None:
    """The same to the rounding of float64."""
    for path, x in by_path(whole).items():
        assert torch.allclose(by_path(got)[path], x, rtol=1e-12, atol=1e-12), path


CASES = [(world, name) for world in ("1", "2", "3", "2x2") for name in (STRATEGIES if world == "2x2" else NARROW)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_dp_sgd_is_that_of_one_device(world, strategy, optimizer):
    """Samples would be clipped together, counted once for each rank, averaged, or a tied leaf would lose a part."""
    replicate, shard = WORLDS[world]
    whole = expected(optimizer, replicate * shard)
    for got in simulated(train, optimizer, STRATEGIES[strategy], shard=shard, replicate=replicate):
        is_near(got, whole)
    assert not torch.allclose(whole["embed"], lm_params()["embed"]), "nothing was trained"


@pytest.mark.parametrize("how", ["processes", "graphs"])
def test_processes_and_graphs_do_the_same(how):
    """DP-SGD would be right in eager simulation alone."""
    whole = expected("adamw", 2)
    for got in gloo(train, "adamw", {}) if how == "processes" else simulated(train, "adamw", {}, True):
        is_near(got, whole)


def prepared(mesh: Any = None, **options: Any) -> fshard.Sharded:
    """Parameters with ties, a frozen leaf and uneven shapes."""
    shared = rand(5, 3, seed=1)
    params = {"a": shared, "b": rand(7, seed=2), "c": shared, "n": torch.tensor(3), "f": rand(2, seed=3)}
    plan = fshard.make_plan(params, mesh, units=["a", "b"], frozen=["f"], **options)
    return fshard.shard_params(params, plan)


def test_what_is_given_is_what_is_reduced():
    """Values would be changed by a round trip, lie in padding, or share memory with the tree that was given."""

    def on_a_rank(mesh: Any) -> Any:
        params, rank = prepared(mesh, whole=["b"]), mesh.get_rank()
        given = {"a": rand(5, 3, seed=rank), "b": rand(7, seed=10 + rank), "c": None, "n": None}
        own = unreduced(given, params)
        tree.map(torch.Tensor.zero_, given)
        assert all(not row.any() for row in padding(own.local))
        twice = tree.map(torch.add, own, own)  # as accumulation does
        return tree.map(lambda x: x / 2, fshard.gather_params(fshard.reduce_grads(twice)))

    for got in simulated(on_a_rank, shard=3):
        a, b = (sum(rand(*shape, seed=first + rank) for rank in range(3)) for shape, first in (((5, 3), 0), ((7,), 10)))
        assert same_bits(got, {"a": a, "b": b, "c": a, "n": None, "f": None})


def test_gradients_of_a_tied_leaf_are_added():
    """A tied leaf would have the gradient of one of its places."""
    params, ones = prepared(), torch.ones(5, 3, dtype=torch.float64)
    grads = fshard.gather_params(
        fshard.reduce_grads(unreduced({"a": ones, "b": torch.zeros(7), "c": 2 * ones}, params))
    )
    assert torch.equal(grads["a"], 3 * ones)
    assert grads["b"].dtype == torch.float64  # cast from float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": None}, "unreduced: 1 leaves have no gradient: 'b'. One that is 0 is zeros"),
        ({"z": torch.ones(1)}, "1 gradients are of no parameter: 'z'"),
        ({"f": torch.ones(2)}, "1 gradients are of frozen leaves: 'f'. Pass None, or nothing"),
        ({"b": torch.ones(4, 7)}, "'b': expected a tensor [7], got one [4, 7]. Sum over the samples first"),
        ({"b": torch.ones(8)}, "'b': expected a tensor [7], got one [8]"),
        ({"b": torch.ones(7, dtype=torch.int64)}, "'b': expected torch.float64, got torch.int64"),
        ({"b": torch.ones(7) * 1j}, "'b': expected torch.float64, got torch.complex64"),
        ({"b": 1.0}, "'b': expected a tensor [7], got 1.0"),
        ({"b": torch.ones(7, device="meta")}, "'b': expected a tensor with values, got one on meta"),
        (
            {"b": torch.ones(7).to_sparse()},
            "'b': expected a dense tensor, got torch.sparse_coo: call to_dense() on it",
        ),
    ],
)
def test_gradients_of_other_leaves_are_errors(change, words):
    """Gradients of other leaves, or of single samples, would be cut into shards as if they were right."""
    grads = {"a": torch.ones(5, 3), "b": torch.ones(7)}
    with pytest.raises(ValueError, match=re.escape(words)):
        unreduced({**grads, **change}, prepared())


def test_gradients_that_are_sharded_are_errors():
    """Gradients would be summed over ranks twice."""
    params = prepared()
    with pytest.raises(TypeError, match=r"grads=.*: expected a tree of whole tensors"):
        unreduced(params, params)
    with pytest.raises(TypeError, match="params: expected a Sharded, got dict"):
        unreduced({}, {})
