"""Optimizers: the reference, its fused twin and torch's own agree; laws that hold for all of them."""

from typing import Any

import optree
import pytest
import torch
from models import LM_UNITS, STRATEGIES, TREES, WORLDS, lm_batch, lm_params, mean_loss, padding, rand, same_bits
from worlds import simulated

import fshard
from fshard.optim import adamw, apply_updates, sgd

SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.8, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.7, "nesterov": True, "weight_decay": 0.03},
]
ADAMW = [{}, {"b1": 0.5, "b2": 0.7}, {"eps": 1e-2}, {"weight_decay": 0.0}, {"b1": 0.0, "weight_decay": 0.2}]
OPTIMIZERS = {
    f"{make.__name__}-{i}": (make, kw) for make, all in ((sgd, SGD), (adamw, ADAMW)) for i, kw in enumerate(all)
}
RATES: dict[str, Any] = {
    "number": 0.1,
    "tensor": torch.tensor(0.1, dtype=torch.float64),
    "schedule": lambda count: 0.1 / (1 + 0.5 * count.double()),
    "numbers": lambda count: 0.1 if count < 2 else 0.01,
}
STEPS = 5


def tree_of(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A small tree: a matrix, a scalar, a leaf without elements."""
    shapes = {"w": (3, 5), "s": (), "e": (0, 2)}
    return {name: rand(*shape, seed=seed + i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}


def run_plain(tx: Any, params: Any, grads: list[Any]) -> tuple[Any, Any]:
    """Updates by the reference."""
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params)
        params = apply_updates(params, updates)
    return params, state


def run_fused(tx: Any, params: Any, grads: list[Any], found_inf: Any = None) -> tuple[Any, Any]:
    """Updates in place, on a copy of the parameters."""
    params, state = optree.tree_map(torch.clone, params), tx.init(params)
    for grad in grads:
        params, state = tx.fused(grad, state, params, found_inf)
    return params, state


def close(a: Any, b: Any) -> None:
    """Two trees are equal to 1e-12, relative."""
    torch.testing.assert_close(optree.tree_leaves(a), optree.tree_leaves(b), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_fused_twin_equals_the_reference(name, rate):
    """And with found_inf 0 nothing else, with found_inf 1 nothing at all."""
    make, kw = OPTIMIZERS[name]
    tx, params, grads = make(RATES[rate], **kw), tree_of(0), [tree_of(10 * i) for i in range(1, STEPS + 1)]
    expected, state = run_plain(tx, params, grads)
    for found_inf in (None, torch.zeros(())):
        got, fused_state = run_fused(tx, params, grads, found_inf)
        close((got, fused_state), (expected, state))
        assert state.count == fused_state.count == STEPS
    skipped, kept = run_fused(tx, params, grads, torch.ones(()))
    assert same_bits((skipped, kept), (params, tx.init(params)))


@pytest.mark.parametrize("rate", ["number", "tensor", "schedule"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_equals_torch(name, rate):
    """torch.optim.SGD and AdamW, the rate set before every step."""
    make, kw = OPTIMIZERS[name]
    tx, grads = make(RATES[rate], **kw), [tree_of(10 * i) for i in range(1, STEPS + 1)]
    theirs = list(optree.tree_map(torch.clone, tree_of(0)).values())
    if make is sgd:
        optimizer: Any = torch.optim.SGD(theirs, 0.1, **kw)
    else:
        betas = {"betas": (kw.get("b1", 0.9), kw.get("b2", 0.999))}
        optimizer = torch.optim.AdamW(theirs, 0.1, **betas, **{k: v for k, v in kw.items() if k not in ("b1", "b2")})
    for i, grad in enumerate(grads):
        lr = RATES[rate]
        optimizer.param_groups[0]["lr"] = float(lr(torch.tensor(float(i))) if callable(lr) else lr)
        for leaf, g in zip(theirs, grad.values(), strict=True):
            leaf.grad = g
        optimizer.step()
    close(list(run_plain(tx, tree_of(0), grads)[0].values()), theirs)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(sgd(0.1, momentum=0.9), torch.optim.SGD), (adamw(0.1), torch.optim.AdamW)]
)
def test_complex_leaves_are_updated_as_torch_does(ours, theirs):
    """Real and imaginary part each by themselves."""
    start, grads = (
        torch.complex(rand(4, seed=1), rand(4, seed=2)),
        [torch.complex(rand(4, seed=i), rand(4, seed=-i)) for i in (3, 4)],
    )
    leaf = start.clone()
    optimizer = theirs([leaf], 0.1, **({"momentum": 0.9} if theirs is torch.optim.SGD else {}))
    for grad in grads:
        leaf.grad = grad
        optimizer.step()
    close(run_plain(ours, start, grads)[0], leaf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dtypes_and_structure_are_kept(name, dtype):
    """Of parameters and state, by the reference and by the fused twin; one leaf is a tree too."""
    make, kw = OPTIMIZERS[name]
    tx = make(0.1, **kw)
    for params, grads in (
        (tree_of(0, dtype), tree_of(5, dtype)),
        (rand(3, seed=1, dtype=dtype), rand(3, seed=2, dtype=dtype)),
    ):
        state = tx.init(params)
        for run in (run_plain, run_fused):
            after = run(tx, params, [grads, grads])
            assert optree.tree_structure(after, namespace="torch") == optree.tree_structure(
                (params, state), namespace="torch"
            )
            pairs = zip(optree.tree_leaves(after), optree.tree_leaves((params, state)), strict=True)
            assert all((a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("tree", ["nested", "classes", "nothing", "order"])
def test_an_update_reads_and_changes_nothing_but_its_result(name, tree):
    """The reference leaves what it is given as it is."""
    make, kw = OPTIMIZERS[name]
    params = TREES[tree]()
    grads, state = fshard.tree.map(torch.ones_like, params), make(0.1, **kw).init(params)
    before = fshard.tree.map(torch.clone, (params, grads, state))
    updates, after = make(0.1, **kw).update(grads, state, params)
    assert same_bits((params, grads, state), before)
    assert fshard.tree.flatten((updates, after))[1] == fshard.tree.flatten((params, state))[1]


def train_and_look_at_padding(mesh: Any, strategy: str, kw: dict[str, Any], make: Any, fused: bool) -> list[Any]:
    """The padding of parameters and of optimizer state after three steps."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, **STRATEGIES[strategy])
    tx = make(0.1, **kw) if fused else make(0.1, **kw)._replace(fused=None)
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(mean_loss, tx)
    for i in range(3):
        state, _ = step(state, lm_batch(i, mesh.get_rank()))
    parts = fshard.tree.nodes((state.params, state.opt_state), fshard.Sharded)
    return [x for part in parts for x in padding(part)]


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero(name, fused):
    """What belongs to no leaf is zero after training, in parameters and in state."""
    make, kw = OPTIMIZERS[name]
    for strategy, world in (("full", "3"), ("wide_state", "2x2")):
        replicate, shard = WORLDS[world]
        args = (train_and_look_at_padding, strategy, kw, make, fused)
        parts = [x for rank in simulated(*args, replicate=replicate, shard=shard) for x in rank]
        assert sum(len(x) for x in parts) > 0
        assert not any(x.count_nonzero() for x in parts)


def test_the_state_of_another_optimizer_is_refused():
    """By reference and fused twin, in a sentence that names both."""
    params = tree_of(0)
    for tx, other, words in (
        (sgd(0.1), adamw(0.1), "optim.sgd: expected .*SgdState.*got AdamState.*another optimizer"),
        (adamw(0.1), sgd(0.1), "optim.adamw: expected .*AdamState.*got SgdState.*another optimizer"),
    ):
        for update in (tx.update, tx.fused):
            with pytest.raises(ValueError, match=words):
                update(params, other.init(params), params)


def test_nesterov_needs_momentum():
    """As in torch."""
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        sgd(0.1, nesterov=True)
