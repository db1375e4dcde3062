"""A step is an update and its application: every transformation, alone or in another, wherever the parameters lie.

Parameters that are cut less finely than the optimizer's state are updated as views of what they lie in.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import NARROW, STRATEGIES, padding, rand, same_bits
from support.optimizers import KERNELS, ROWS, TRANSFORMS
from support.worlds import simulated

import fshard
from fshard import DynamicLossScale, Sharded, optim
from fshard.core import tree
from fshard.layout.pieces import Parts, packed
from fshard.sharding.sharded import coarsen, refine
from fshard.train.step import _gathered_params, _updated_shards
from fshard.update.transforms import LabelState

# Compared to 1e-12, relative: torch's kernels round in another way than the reference, and from_torch computes an
# update as the difference of new and old parameters.
ROUNDED = KERNELS | {name for name in TRANSFORMS if name.startswith(("from_torch", "with_hyperparams"))}
# Their blocks must not lie in two leaves; among the leaves of a label they would.
UNLABELLED = {name for name, row in ROWS.items() if row.block > 1}


def _matrices(path: str, leaf: torch.Tensor) -> bool:
    return leaf.ndim > 1


def _labelled(make: Callable[[], Any]) -> Any:
    return optim.by_label({True: make(), False: optim.rmsprop(0.1)}, _matrices)


def _nested(make: Callable[[], Any]) -> Any:
    inner = optim.by_label({"a": make(), "b": optim.lion(0.1)}, lambda path, leaf: "ab"[path.endswith("b")])
    return optim.by_label({True: inner, False: make()}, lambda path, leaf: path.startswith("blocks"))


WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "alone": lambda make: make(),
    "labelled": _labelled,
    "nested": _nested,
    "chained": lambda make: optim.chain(optim.clip_by_leaf_norm(2.0), make()),
    "masked": lambda make: optim.chain(optim.masked(make(), _matrices), optim.scale(-0.5)),
    "masked last": lambda make: optim.masked(make(), _matrices),
    "in hyperparams": lambda make: optim.with_hyperparams(
        lambda factor: optim.chain(make(), optim.scale(factor)), factor=0.5
    ),
}

# (strategy, replicate, shard): one device; every strategy on two ranks, some on three; those of two axes on 2 x 2.
PLACES = [("full", None, 1), *((name, 1, 2) for name in NARROW), ("zero1", 1, 3), ("full", 1, 3)]
PLACES += [(name, 2, 2) for name in ("full", "zero1", "wide_state", "wide")]


def whole(seed: int) -> Any:
    """Matrices, vectors, a scalar, with uneven sizes; and a frozen leaf."""
    shapes = {"w": (5, 3), "blocks.w": (3, 5), "blocks.b": (5,), "s": (), "tail": (7,), "one": (1,)}
    made = {name: rand(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    blocks = [{"w": made.pop("blocks.w"), "b": made.pop("blocks.b")}, {"w": rand(2, 3, seed=seed + 9)}]
    return {**made, "blocks": blocks, "fixed": rand(3, seed=7)}


def by_update(tx: Any, grads: Sharded, state: Any, params: Sharded) -> tuple[Sharded, Any]:
    """One `update` of rows packed for the optimizer, and its application."""
    over = params.plan.state_over
    mine, given = (packed(refine(x, over)) for x in (params.trainable, grads))
    updates, state = tx.update(given, state, mine)
    return coarsen(optim.apply_updates(mine, updates), params.plan.params_over), state


def updated(tx: Any, grads: Sharded, state: Any, params: Sharded, skip: Any, donate: bool) -> tuple[Sharded, Any]:
    """The parameters and the state after the update of a step."""
    before = fshard.TrainState(params, state, None, None, None, None)
    new, state = _updated_shards(tx, grads, before, skip, donate, exact=False)
    return _gathered_params(new, params, donate), state


def by_step(tx: Any, grads: Sharded, state: Any, params: Sharded, donate: bool) -> tuple[Sharded, Any]:
    """The parameters and state that a training step computes from its gradients."""
    new, state = updated(tx, tree.map(torch.clone, grads), state, params, None, donate)
    return new.trainable, state


def trained(run: Callable[..., Any], tx: Any, mesh: Any, strategy: dict[str, Any]) -> tuple[Sharded, Any]:
    """Parameters and state after three updates."""
    plan = fshard.make_plan(whole(0), mesh, units=["blocks.*"], frozen=["fixed"], block=4, **strategy)
    params = fshard.shard_params(whole(0), plan)
    state = fshard.init_state(params, tx).opt_state
    params = params.trainable
    for i in (1, 2, 3):
        given = fshard.shard_params(whole(100 * i), plan).trainable
        grads = packed(refine(given, plan.grads_over))
        params, state = run(tx, grads, state, params)
    return params, state


def near(name: str, got: Any, expected: Any) -> None:
    """Check for the same bits, or nearly the same where torch's kernels round in another way."""
    if name in ROUNDED:
        torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=1e-12, atol=1e-14)
    else:
        assert same_bits(got, expected)


def law(mesh: Any, name: str, way: str, strategy: dict[str, Any]) -> None:
    """Check that a step is an update, donated or not, that every leaf moved but the frozen one, and that padding is
    zero."""
    tx = WAYS[way](TRANSFORMS[name])
    expected = trained(by_update, tx, mesh, strategy)
    kept, given = (trained(functools.partial(by_step, donate=d), tx, mesh, strategy) for d in (False, True))
    near(name, kept, expected)
    assert same_bits(given, kept)
    for part in tree.nodes(given, Sharded):
        assert all(not pad.any() for pad in padding(part))
    old, spec = tree.flatten(whole(0))
    new = tree.flatten_up_to(spec, fshard.gather_params(given[0]))
    still = [path for path, x, y in zip(tree.leaf_paths(spec), old, new, strict=True) if y is None or torch.equal(x, y)]
    assert still == ["fixed"]


CASES = [(name, way) for name in TRANSFORMS for way in WAYS if name not in UNLABELLED or way in ("alone", "chained")]


@pytest.mark.law
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_step_is_an_update_and_its_application(name, way):
    """A step gives the bits of `update` and its application in every strategy: otherwise sharding would change an
    optimizer."""
    for strategy, replicate, shard in PLACES:
        if replicate is None:
            law(None, name, way, STRATEGIES[strategy])
        else:
            simulated(law, name, way, STRATEGIES[strategy], replicate=replicate, shard=shard)


def by_hand(mesh: Any, name: str, strategy: dict[str, Any]) -> None:
    """Check that a loop over `for_state`, as one over plain trees, is a step's; with a running mean by `tree.map`."""
    tx = WAYS["alone"](TRANSFORMS[name])
    plan = fshard.make_plan(whole(0), mesh, units=["blocks.*"], frozen=["fixed"], block=4, **strategy)
    params = fshard.shard_params(whole(0), plan)
    state, mean, want = tx.init(params.for_state), params.for_state, fshard.gather_params(params)
    for i in (1, 2, 3):
        given = fshard.shard_params(whole(100 * i), plan).trainable
        grads = packed(refine(given, plan.grads_over))
        updates, state = tx.update(grads.for_state, state, params.for_state)
        params = params.with_trained(optim.apply_updates(params.for_state, updates))
        mean = tree.map(lambda x, y: torch.lerp(x, y, 0.5), mean, params.for_state)
        want = tree.map(lambda x, y: torch.lerp(x, y, 0.5), want, fshard.gather_params(params))
    assert all(isinstance(x, torch.Tensor) for x in tree.leaves(mean))
    assert same_bits((params.trainable, state), trained(by_update, tx, mesh, strategy))
    torch.testing.assert_close(fshard.gather_params(params.with_trained(mean)), want)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_tree_for_state_is_a_tree(name):
    """A loop by hand would be right under some strategies alone."""
    for strategy, replicate, shard in [*((each, 1, 2) for each in NARROW), ("wide_state", 2, 2)]:
        simulated(by_hand, name, STRATEGIES[strategy], replicate=replicate, shard=shard)


def _first(path: str, leaf: torch.Tensor) -> str:
    return path[0]


def _by_first(make: Callable[[], Any]) -> Any:
    return optim.by_label({"a": make(), "b": make()}, _first)


# Ways to build an optimizer with the labels "a" and "b", which have the same transformation.
APART: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "alone": _by_first,
    "chained": lambda make: optim.chain(optim.clip(0.5), optim.add_decayed_weights(0.1), _by_first(make)),
    "in hyperparams": lambda make: optim.with_hyperparams(
        lambda factor: optim.chain(optim.scale(factor), _by_first(make)), factor=0.5
    ),
    "nested": lambda make: optim.by_label(
        {"a": optim.by_label({True: make(), False: optim.sgd(0.1)}, _matrices), "b": make()}, _first
    ),
    "twice": lambda make: optim.chain(optim.identity(), optim.with_hyperparams(lambda f: _by_first(make), f=1.0)),
}


def two_labels(seed: int) -> Any:
    """Two leaves for each of two labels."""
    shapes = {"a": {"w": (3, 4), "v": (5,)}, "b": {"w": (4, 2), "v": (3,)}}
    return {k: {n: rand(*x, seed=seed + i) for i, (n, x) in enumerate(v.items())} for k, v in shapes.items()}


def of_label(params: Any, state: Any, label: str) -> Any:
    """The whole parameters and state of one label."""
    held, *_ = tree.nodes(state, LabelState)
    return fshard.gather_params(params)[label], tree.map_tops(fshard.gather_params, Parts, held.inner[label])


def skipping(mesh: Any, tx: Any, strategy: dict[str, Any], bad: str, donate: bool) -> None:
    """Check that an overflow in one label leaves that label as it is, and that the other moves as usual."""
    plan = fshard.make_plan(two_labels(1), mesh, units=["a", "b"], **strategy)
    results = []
    for gain in (1.0, torch.inf, torch.nan):
        given = {
            k: tree.map(lambda g, k=k, gain=gain: g * gain if k == bad else g, v) for k, v in two_labels(2).items()
        }
        grads = packed(refine(fshard.shard_params(given, plan).trainable, plan.grads_over))
        params = fshard.shard_params(two_labels(1), plan)
        state = fshard.init_state(params, tx).opt_state
        found = {label: torch.tensor(float(label == bad and gain != 1)) for label in "ab"}
        before = tree.map(torch.clone, (params, state))
        results.append(updated(tx, grads, state, params, found, donate))
    other = "b" if bad == "a" else "a"
    clean = of_label(*results[0], other)
    assert not same_bits(clean, of_label(*before, other))
    for result in results[1:]:
        assert same_bits(of_label(*result, bad), of_label(*before, bad))
        assert same_bits(of_label(*result, other), clean)


SKIPPED = ["sgd-all", "adamw", "rmsprop", "lamb", "muon", "clip_by_global_norm", "from_torch-Adam", "masked"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", APART)
@pytest.mark.parametrize("name", SKIPPED)
def test_a_label_is_skipped_alone(name, way, fused):
    """Only the label that overflowed is skipped, in fused code and formulas: otherwise one overflow would stop all
    labels."""
    tx = APART[way](TRANSFORMS[name])
    tx = tx if fused else tx._replace(fused=None)
    for strategy, shard in (("full", None), ("zero1", 2), ("full", 3)):
        for bad, donate in (("a", True), ("b", False)):
            if shard is None:
                skipping(None, tx, STRATEGIES[strategy], bad, donate)
            else:
                simulated(skipping, tx, STRATEGIES[strategy], bad, donate, shard=shard)


def overflowing(mesh: Any, reduction: str, jitted: bool) -> None:
    """Two steps; in the second the last rank's loss overflows in label "a", which alone must stay."""
    tx = optim.chain(
        optim.clip(9.0), optim.by_label({"a": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.9)}, _first)
    )

    def loss(p: Any, batch: Any) -> fshard.Sum:
        gains = {"a": batch["gain"].sum(), "b": batch["x"].sum()}
        return fshard.Sum(sum(gains[k] * leaf.square().sum() for k in p for leaf in p[k].values()))

    state = fshard.init_state(
        fshard.shard_params(two_labels(1), fshard.make_plan(two_labels(1), mesh)), tx, DynamicLossScale(4.0)
    )
    step = fshard.train_step(loss, tx, skip_labels=_first, reduction=reduction)
    step = fshard.jit(step, backend="eager") if jitted else step
    last = mesh is None or mesh.get_rank() == mesh.size() - 1
    states = [state]
    for gain in (1.0, torch.inf if last else 1.0):
        batch = {"x": torch.ones(4, dtype=torch.float64), "gain": torch.full((4,), gain, dtype=torch.float64)}
        states.append(step(states[-1], batch)[0])
    (one, two) = ((s.params, s.opt_state) for s in states[1:])
    assert same_bits(of_label(*two, "a"), of_label(*one, "a"))
    counts = [of_label(*x, "b")[1].count.item() for x in (one, two)]
    assert counts == [1, 2]
    moved = tree.map(torch.not_equal, of_label(*two, "b")[0], of_label(*one, "b")[0])
    assert all(x.all() for x in tree.leaves(moved))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reduction", ["exact", "tree"])
def test_a_step_skips_a_label_alone(reduction, jitted):
    """A training step skips the overflowed label alone, with each reduction, also jitted: otherwise all labels would
    lose the step."""
    for shard in (1, 2):
        simulated(overflowing, reduction, jitted, shard=shard)


SHARED: dict[str, Callable[[], Any]] = {
    "a norm": lambda: optim.chain(optim.clip_by_global_norm(1.0), TRANSFORMS["by_label"]()),
    "norms": lambda: optim.chain(optim.clip_by_leaf_norm(1.0), TRANSFORMS["by_label"]()),
    "a schedule": lambda: optim.with_hyperparams(
        lambda f: optim.chain(optim.scale(f), TRANSFORMS["by_label"]()), f=optim.schedules.cosine(0.1, 9)
    ),
    "everything": lambda: optim.adamw(0.1),
}


@pytest.mark.parametrize("name", SHARED)
def test_labels_that_share_something_cannot_be_skipped_alone(name):
    """Labels that share a norm or a count are refused with `skip_labels`: otherwise a skipped label would change the
    others."""
    with pytest.raises(ValueError, match=r"skip_labels: .*share a norm, a mean or a count.*Clip by norm, count and"):
        fshard.train_step(lambda p, x: x, SHARED[name](), skip_labels=lambda path, leaf: "matrix")


def trace(decay: float) -> Any:
    """Momentum as optax writes it: one tensor is both the update and the new state."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        moved = tree.map(lambda m, g: decay * m + g, state, grads)
        return moved, moved

    return optim.Transform(lambda params: tree.map(torch.zeros_like, params), update)


@pytest.mark.parametrize("clip", [optim.clip_by_global_norm, optim.clip_by_leaf_norm])
def test_an_update_that_is_a_state_is_not_overwritten(clip):
    """An update that is also the state is not written to by later transformations: otherwise momentum would be
    clipped too."""
    for txs in ((trace(0.9), clip(0.1), optim.scale(-1.0)), (trace(0.9), optim.chain(clip(0.1), optim.sgd(1.0)))):
        for strategy in ("zero1", "full"):
            simulated(_kept_alike, optim.chain(*txs), STRATEGIES[strategy])


def _kept_alike(mesh: Any, tx: Any, strategy: dict[str, Any]) -> None:
    runs = [trained(run, tx, mesh, strategy) for run in (by_update, functools.partial(by_step, donate=True))]
    near("sgd", *runs)


def zero_stepped(mesh: Any, tx: Any, partition: str, donate: bool) -> Any:
    """Parameters after three steps of ZeRO."""
    params, zeroed = tree.map(torch.clone, whole(0)), fshard.zero(tx, mesh, partition)
    state = zeroed.init(params)
    for i in (1, 2, 3):
        params, state = zeroed.step(whole(100 * i), state, params, donate=donate)
    return params


ZEROED = ["adamw", "rmsprop", "lamb", "muon", "from_torch-Adam", "by_label", "whole_leaves"]


@pytest.mark.parametrize("partition", ["flat", "leaf"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "alone"])
@pytest.mark.parametrize("name", ZEROED)
def test_zero_trains_what_is_in_another(name, way, partition):
    """ZeRO around nested transformations trains like one device: otherwise ranks would train leaves wrongly or not
    at all."""
    tx = WAYS[way](TRANSFORMS[name])
    params, state = whole(0), tx.init(whole(0))
    for i in (1, 2, 3):
        params, state = tx.step(whole(100 * i), state, params)
    for donate in (False, True):
        for got in simulated(zero_stepped, tx, partition, donate, shard=3):
            torch.testing.assert_close(got, params, rtol=1e-10, atol=1e-12)
            assert not any(map(torch.equal, tree.leaves(got), tree.leaves(whole(0))))


def rated(mesh: Any, strategy: dict[str, Any], jitted: bool) -> Any:
    """Parameters after each of three steps, with another rate before each, and gradients that differ by rank."""
    labelled = {True: lambda lr: optim.muon(lr), False: lambda lr: optim.sgd(lr, momentum=0.5)}
    tx = optim.with_hyperparams(
        lambda lr: optim.by_label({key: make(lr) for key, make in labelled.items()}, _matrices), lr=0.1
    )

    def loss(p: Any, x: Any) -> fshard.Sum:
        return fshard.Sum(sum(((i + 1) * x.sum() * leaf).sin().sum() for i, leaf in enumerate(tree.leaves(p))))

    plan = fshard.make_plan(two_labels(1), mesh, units=["a", "b"], **strategy)
    state, found = fshard.init_state(fshard.shard_params(two_labels(1), plan), tx), []
    step = fshard.train_step(lambda p, x: loss({k: dict(v.items()) for k, v in p.items()}, x), tx)
    step = fshard.jit(step, backend="eager") if jitted else step
    ranks = [mesh.get_rank()] if mesh is not None and mesh.size() > 1 else [0, 1]
    for rate in (0.1, 0.3, 0.0):
        hyperparams = {"lr": torch.tensor(rate, dtype=torch.float64)}
        state = replace(state, opt_state=state.opt_state._replace(hyperparams=hyperparams))
        x = torch.tensor([[0.5 + rank] for rank in ranks], dtype=torch.float64)
        state, _ = step(state, x)
        found.append(fshard.gather_params(state.params))
    return found


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_hyperparameters_change_between_steps_on_ranks(name, jitted):
    """A hyperparameter changed between steps takes effect in every strategy, also jitted: otherwise a graph would
    keep the old rate."""
    expected = simulated(rated, STRATEGIES["full"], False, shard=2)[0]
    for got in simulated(rated, STRATEGIES[name], jitted, shard=2):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
        assert same_bits(got[2], got[1]), "a rate of 0"
        assert not any(map(torch.equal, tree.leaves(got[0]), tree.leaves(got[1])))


def eight_bits(mesh: Any, numel: int) -> Any:
    """Parameters after a step of a label in 8 bits whose first leaf has `numel` elements."""
    tx = optim.by_label({True: optim.adamw_8bit(0.1, block=4), False: optim.sgd(0.1)}, _matrices)
    params = {"a": rand(numel, 1, seed=1), "b": rand(4, 2, seed=2), "c": rand(3, seed=3)}
    plan = fshard.make_plan(params, mesh, block=4)
    sharded = fshard.shard_params(params, plan)
    return fshard.gather_params(tx.step(sharded, tx.init(sharded), sharded)[0])


def outcome(mesh: Any, sizes: tuple[int, ...], labelled: bool) -> str:
    """Return "taken" or the error for AdamW in 8 bits on leaves of these sizes, in a label or as the whole tree."""
    tx = optim.adamw_8bit(0.1, block=4)
    tx = optim.by_label({True: tx, False: optim.sgd(0.1)}, _matrices) if labelled else tx
    params = {f"l{i}": torch.ones(numel, 1) for i, numel in enumerate(sizes)} | {"last": torch.ones(3)}
    try:
        tx.init(fshard.shard_params(params, fshard.make_plan(params, mesh, block=4)))
    except ValueError as refused:
        return str(refused)
    return "taken"


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("sizes", [(4,), (5,), (0, 5), (8, 4), (5, 8), (8, 5), (7, 7), (4, 5, 4), (20, 3, 40, 4)])
def test_the_answer_to_blocks_is_that_of_any_number_of_ranks(sizes, labelled):
    """Sizes refused on one rank are refused on all numbers of ranks: otherwise a script would fail only on more
    GPUs."""
    one = outcome(None, sizes, labelled)
    assert (one == "taken") == (not labelled or len([n for n in sizes if n]) == 1 or not any(n % 4 for n in sizes))
    for shard in (1, 2, 3, 4, 5):
        assert set(simulated(outcome, sizes, labelled, shard=shard)) == {one}


def test_blocks_of_a_label_need_leaves_of_whole_blocks():
    """Leaves of whole blocks train like on one device, others get useful advice: otherwise a user would repeat what
    failed."""
    for got in simulated(eight_bits, 12, shard=3):
        assert same_bits(got, eight_bits(None, 12))
    with pytest.raises(ValueError, match=r"leaf 'a': .*block=4, and label for it only leaves whose number of elements"):
        eight_bits(None, 7)


def norms_of_few_leaves(mesh: Any, make: Any, how: str) -> Any:
    """Two updates of two leaves, on ranks some of which own no leaf."""
    tx, start = make(), {"a": rand(4, seed=1), "b": rand(3, seed=2)}
    grads = {"a": 30 * rand(4, seed=3), "b": 3 * rand(3, seed=4)}
    place = lambda x: x  # noqa: E731
    if how == "leaf":
        tx = fshard.zero(tx, mesh, "leaf")
    elif mesh is not None:
        plan = fshard.make_plan(start, mesh)
        tx, place = optim.whole_leaves(tx), functools.partial(fshard.shard_params, plan=plan)
    params, given = place(start), place(grads)
    state = tx.init(params)
    for _ in range(2):
        params, state = tx.step(given, state, params)
    return fshard.gather_params(params)


def clipped() -> optim.Transform:
    """SGD after clipping by the global norm."""
    return optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1))


OF_ALL = {
    "clip": clipped,
    "clip by label": lambda: optim.by_label({"x": clipped(), "y": clipped()}, {"a": "x", "b": "y"}),
    "masked": lambda: optim.masked(clipped(), {"a": True, "b": False}),
    "lbfgs by label": lambda: optim.by_label({"x": optim.lbfgs(0.1), "y": optim.lbfgs(0.1)}, {"a": "x", "b": "y"}),
}


@pytest.mark.parametrize("how", ["leaf", "whole leaves"])
@pytest.mark.parametrize("name", OF_ALL)
def test_a_norm_is_that_of_its_own_leaves_on_every_rank(name: str, how: str) -> None:
    """Each label's norm is of that label's leaves, though some ranks own none: otherwise ranks would wait forever or
    clip wrongly."""
    want = norms_of_few_leaves(None, OF_ALL[name], "")
    for shard in (2, 3):
        for found in simulated(norms_of_few_leaves, OF_ALL[name], how, shard=shard):
            torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_a_pattern_of_labels_that_fits_nothing_is_an_error() -> None:
    """A label pattern that matches no leaf is an error; without it a typo would leave leaves to another optimizer."""
    params = {"blocks": [{"w": rand(2, seed=0), "b": rand(2, seed=1)}], "head": rand(2, seed=2)}
    two = {"one": optim.sgd(0.1), "two": optim.sgd(0.2)}
    with pytest.raises(
        ValueError, match=r"the pattern 'blocks.\*.bias' of the labels matches no leaf; the tree has 'bl"
    ):
        optim.by_label(two, {"blocks.*.bias": "one", "**": "two"}).init(params)
    labels = {"head": "one", "blocks.*.b": "one", "**": "two"}
    inner = optim.by_label(two, labels)
    optim.by_label({"in": inner, "out": optim.sgd(0.1)}, {"head": "out", "**": "in"}).init(params)
    inner.init(fshard.shard_params(params, fshard.make_plan(params, frozen="head")).trainable)


@pytest.mark.parametrize("labelled", [optim.by_label, optim.masked])
def test_labels_in_a_node_with_a_call_are_a_tree(labelled: Any) -> None:
    """A layer of labels is no predicate: otherwise it would be called with a path."""

    @fshard.tree.node
    class Layer:
        w: Any
        b: Any

        def __call__(self, x: Any, scale: Any = 1) -> Any:
            raise AssertionError("called")

    tx = optim.sgd(1.0)
    given = {True: tx, False: optim.scale(0.0)} if labelled is optim.by_label else tx
    params = Layer(torch.ones(2), torch.ones(1))
    made = labelled(given, Layer(True, False))
    updates, _ = made.update(params, made.init(params), params)
    assert updates.w.tolist() == [-1, -1]
    assert updates.b.item() == (0 if labelled is optim.by_label else 1)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.real])
def test_lazily_conjugated_gradients_are_taken(name: str) -> None:
    """Conjugated views as parameters or gradients give the updates of their values: otherwise imaginary parts would
    change sign."""
    tx, w = TRANSFORMS[name](), torch.complex(rand(3, 3, seed=1), rand(3, 3, seed=2))
    plain, lazy = {"w": w.conj().resolve_conj()}, {"w": w.conj()}
    expected = [run({"w": w}, tx.init(plain), plain)[0]["w"] for run in (tx.update, tx.step)]
    assert lazy["w"].is_conj()
    for params, grads in ((plain, {"w": w.conj().resolve_conj().conj()}), (lazy, {"w": w})):
        found = [run(grads, tx.init(params), params)[0]["w"] for run in (tx.update, tx.step)]
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got.resolve_conj(), right, rtol=1e-12, atol=1e-14)


def test_a_pair_of_any_signature_is_taken() -> None:
    """`update` may take parameters by name, by position or not at all, and further arguments: otherwise users' own
    pairs would fail, or decay nothing."""
    for update in (
        lambda grads, state: (-grads - 3, state),
        lambda grads, state, p: (-grads - p, state),
        lambda grads, state, p=None: (-grads - (0 if p is None else p), state),
        lambda grads, state, p=None, **more: (-grads - (0 if p is None else p), state),
        lambda grads, state, params=None: (-grads - params, state),
        lambda grads, state, params=None, **more: (-grads - params, state),
        lambda grads, state, *, params: (-grads - params, state),
        lambda grads, state, **more: (-grads - more["params"], state),
        lambda grads, state, p=None, *, value=1: (-grads - p * value, state),
        lambda grads, state, p=None, **more: (-grads - p * more.get("value", 1), state),
    ):
        pair, says = SimpleNamespace(init=lambda params: (), update=update), inspect.signature(update).parameters
        tx, grads, params = optim.chain(pair), torch.tensor(2.0), torch.tensor(3.0)
        assert tx.step(grads, ((),), params)[0] == -2
        for further in (1, 2):
            found = tx.update(grads, ((),), params, value=further)[0]
            assert found == (-2 - 3 * further if "value" in (*says, *update.__code__.co_consts) else -5)


REACHED = [("a", "b", "c"), ("b", "c"), ("a", "b"), ("b",), ("a", "b", "c")]  # by update


def reaching(mesh: Any, name: str) -> Any:
    """Parameters after updates that do not reach every leaf, and whether those of no update changed."""
    whole = {"a": rand(4, 3, seed=1), "b": rand(8, seed=2), "c": rand(4, seed=3)}
    plan = fshard.make_plan(whole, mesh, units=["a", "b"], block=ROWS[name].block)
    tx, params = optim.resting(TRANSFORMS[name]()), fshard.shard_params(whole, plan)
    state, found = tx.init(params), []
    for number, paths in enumerate(REACHED):
        grads = {
            path: rand(*x.shape, seed=10 * number + i) * (path in paths) for i, (path, x) in enumerate(whole.items())
        }
        params, state = tx.step(fshard.shard_params(grads, plan), state, params)
        found.append(fshard.gather_params(params))
    return found


def reached_alone(name: str) -> Any:
    """The same, each leaf by an optimizer of its own that is called when it is reached."""
    whole = {"a": rand(4, 3, seed=1), "b": rand(8, seed=2), "c": rand(4, seed=3)}
    tx = TRANSFORMS[name]()
    states, found = {path: tx.init({path: x}) for path, x in whole.items()}, []
    for number, paths in enumerate(REACHED):
        for i, path in enumerate(["a", "b", "c"]):
            if path in paths:
                grads = {path: rand(*whole[path].shape, seed=10 * number + i)}
                new, states[path] = tx.step(grads, states[path], {path: whole[path]})
                whole = whole | new
        found.append(whole)
    return found


@pytest.mark.parametrize("name", [name for name in ROWS if name != "resting"])
def test_what_no_update_reaches_rests(name: str) -> None:
    """Decay and momentum would move a leaf that the loss did not use, or an update would be counted for it."""
    for found in [*simulated(reaching, name, shard=2), reaching(None, name)]:
        for number, (got, want) in enumerate(zip(found, reached_alone(name), strict=True)):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=f"update {number}")
            for path in {"a", "b", "c"} - {*REACHED[number]}:
                assert same_bits(got[path], found[number - 1][path])


def experts(p: Any, x: torch.Tensor) -> fshard.Mean:
    """The expert that the first number of a batch says."""
    return fshard.Mean((x[:, 1:] @ p["experts"][int(x[0, 0])]).square().sum() + p["scale"].sum(), len(x))


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"clip_norm": 0.5}], ids=str)
def test_experts_that_were_not_chosen_rest_as_with_torch(options: dict[str, Any]) -> None:
    """A step's leaves without a gradient would decay, which torch's do not."""
    whole = {"experts": [rand(3, seed=1), rand(3, seed=2)], "scale": rand(2, seed=3)}
    chosen = [(0, 0), (0, 1), (1, 1), (0, 0)]  # by step, of both ranks

    def data(step: int, rank: int) -> torch.Tensor:
        x = rand(2 + rank, 4, seed=10 * step + rank)
        x[:, 0] = chosen[step][rank]
        return x

    def run(mesh: Any) -> Any:
        tx = optim.resting(optim.adamw(0.1, weight_decay=0.5))
        plan = fshard.make_plan(whole, mesh, units=["experts"])
        state = fshard.init_state(fshard.shard_params(whole, plan), tx, fshard.StaticLossScale(1.0))
        step = fshard.train_step(experts, tx, **options)
        for number in range(4):
            state, _ = step(state, data(number, mesh.get_rank()))
        return fshard.gather_params(state.params)

    plain = fshard.tree.map(lambda x: torch.nn.Parameter(x.clone()), whole)
    leaves = fshard.tree.leaves(plain)
    reference = torch.optim.AdamW(leaves, 0.1, weight_decay=0.5)
    for number in range(4):
        reference.zero_grad()
        outs = [experts(plain, data(number, rank)) for rank in range(2)]
        (sum(out.total for out in outs) / sum(out.count for out in outs)).backward()  # type: ignore[union-attr]
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(leaves, options["clip_norm"])
        reference.step()
    for params in simulated(run, shard=2):
        torch.testing.assert_close(fshard.tree.leaves(params), [x.detach() for x in leaves])


@pytest.mark.parametrize("num", [1, 2])
def test_tied_leaves_rest_together(num):
    """`resting` would refuse a tied leaf by labels that the user never gave."""

    def law(mesh: Any) -> Any:
        whole = {"embed": (w := torch.ones(3)), "tied": w, "still": torch.ones(2)}
        tx = optim.resting(optim.adamw(0.1))
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), tx)
        state, _ = fshard.train_step(lambda p, x: (p["embed"] * p["tied"]).sum(), tx)(state, torch.ones(1))
        return fshard.gather_params(state.params)

    for got in simulated(law, shard=num):
        assert torch.equal(got["embed"], got["tied"])
        assert got["still"].tolist() == [1, 1]
        assert (got["embed"] < 0.95).all()
