"""A step is an update and its application: every transformation, alone or in another, wherever the parameters lie.

Parameters that are cut less finely than the optimizer's state are updated as views of what they lie in.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import NARROW, STRATEGIES, padding, rand, same_bits
from optimizers import TRANSFORMS
from worlds import simulated

import fshard
from fshard import Sharded, optim, tree
from fshard.parts import packed
from fshard.shard import coarsen, refine
from fshard.train import _update

pytestmark = pytest.mark.usefixtures("one_thread")

# A step ends in a kernel of torch's, which rounds otherwise than the reference, or in a class of torch.optim, whose
# update is the difference of new and old parameters: to 1e-12, relative.
ROUNDED = {"sgd", "sgd-all", "adam", "adamw", "adamw-schedule", "amsgrad", "clip", "clip_by_global_norm"}
ROUNDED |= {"clip_by_global_norm-inf", "clip_by_leaf_norm", "by_label", "muon", "with_hyperparams"}
ROUNDED |= {"with_hyperparams-schedule", *(name for name in TRANSFORMS if name.startswith("from_torch"))}
# Its blocks must not lie in two leaves, which the leaves of a label do.
UNLABELLED = {"adamw_8bit"}


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

# Every strategy on two ranks, some on three, those of two axes on 2 x 2; one device.
PLACES = [("full", None, 1), *((name, 1, 2) for name in NARROW), ("zero1", 1, 3), ("full", 1, 3)]
PLACES += [(name, 2, 2) for name in ("full", "zero1", "wide_state", "wide")]


def whole(seed: int) -> Any:
    """Matrices, vectors, a scalar; sizes that nothing divides; a frozen leaf."""
    shapes = {"w": (5, 3), "blocks.w": (3, 5), "blocks.b": (5,), "s": (), "tail": (7,), "one": (1,)}
    made = {name: rand(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
    blocks = [{"w": made.pop("blocks.w"), "b": made.pop("blocks.b")}, {"w": rand(2, 3, seed=seed + 9)}]
    return {**made, "blocks": blocks, "fixed": rand(3, seed=7)}


def by_update(tx: Any, grads: Sharded, state: Any, params: Sharded) -> tuple[Sharded, Any]:
    """One update of intervals of their own, applied."""
    over = params.plan.state_over
    mine, given = (packed(refine(x, over)) for x in (params.trainable, grads))
    updates, state = tx.update(given, state, mine)
    return coarsen(optim.apply_updates(mine, updates), params.plan.params_over), state


def by_step(tx: Any, grads: Sharded, state: Any, params: Sharded, donate: bool) -> tuple[Sharded, Any]:
    """What a training step makes of its gradients."""
    new, state = _update(tx, tree.map(torch.clone, grads), state, params, None, donate)
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
    """The same bits, or what torch's kernels round otherwise."""
    if name in ROUNDED:
        torch.testing.assert_close(tree.leaves(got), tree.leaves(expected), rtol=1e-12, atol=1e-14)
    else:
        assert same_bits(got, expected)


def law(mesh: Any, name: str, way: str, strategy: dict[str, Any]) -> None:
    """A step is an update, donated or not; every leaf has moved; padding is zero."""
    tx = WAYS[way](TRANSFORMS[name])
    expected = trained(by_update, tx, mesh, strategy)
    kept, given = (trained(functools.partial(by_step, donate=d), tx, mesh, strategy) for d in (False, True))
    near(name, kept, expected)
    assert same_bits(given, kept)
    for part in tree.nodes(given, Sharded):
        assert all(not pad.any() for pad in padding(part))
    old, spec = tree.flatten(whole(0))
    new = tree.flatten_up_to(spec, fshard.gather_params(given[0]))
    still = [path for path, x, y in zip(tree.paths(spec), old, new, strict=True) if y is None or torch.equal(x, y)]
    assert still == ["fixed"]


CASES = [(name, way) for name in TRANSFORMS for way in WAYS if name not in UNLABELLED or way in ("alone", "chained")]


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_step_is_an_update_and_its_application(name, way):
    """The same bits, donated or not, in every strategy; every leaf that has a gradient moves."""
    for strategy, replicate, shard in PLACES:
        if replicate is None:
            law(None, name, way, STRATEGIES[strategy])
        else:
            simulated(law, name, way, STRATEGIES[strategy], replicate=replicate, shard=shard)
