"""Dicts with keys in another order are the same tree: values go by name, never by position."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import rand, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import checkpoint, gather_params, optim
from fshard.core import tree
from fshard.update.base import Transform

eager = partial(fshard.jit, backend="eager")


def turned(x: Any) -> Any:
    """The same tree, each dict's keys in the opposite order."""
    if type(x) is dict:
        return {key: turned(x[key]) for key in reversed(x)}
    return type(x)(map(turned, x)) if type(x) in (list, tuple) else x


TREES = st.recursive(
    st.integers(), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("abcd"), x), max_leaves=8
)


@given(TREES, TREES)
def test_a_tree_in_the_order_of_another(x: Any, other: Any) -> None:
    """Every value stays under its name; a tree of other names stays as it is, but for equal dicts inside."""
    same = tree.in_order_of(tree.flatten(x)[1], turned(x))
    assert same == x
    assert tree.paths(same) == tree.paths(x)
    assert tree.in_order_of(tree.flatten(other)[1], x) == x


def momentum(flips: bool) -> Transform:
    """Momentum, whose state comes back with keys in the other order."""

    def init(params: Any) -> Any:
        return {"up": tree.map(torch.zeros_like, params), "down": tree.map(torch.ones_like, params)}

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> Any:
        new = {
            "up": tree.map(lambda m, g: 0.9 * m + g, state["up"], grads),
            "down": tree.map(lambda m: 0.5 * m, state["down"]),
        }
        updates = tree.map(lambda a, b: -0.1 * (a - b), new["up"], new["down"])
        return updates, turned(new) if flips else new

    return optim.Transform(init, update)


def loss(w: Any, extra: Any, x: Tensor, flips: bool) -> Any:
    """A loss with running values of one shape, in a dict inside a dict."""
    inner = {"mean": 0.9 * extra["stats"]["mean"] + x.mean(), "square": extra["stats"]["square"] + x.square().mean()}
    new = {"count": extra["count"] + 1.0, "stats": inner}
    return (w["b"] * x + w["a"]).square().sum(), turned(new) if flips else new


def trained(mesh: Any, how: Any, flips: bool, donate: bool = False, accumulate: int = 1) -> Any:
    """The state after three steps."""
    params = {"b": rand(3, seed=1), "a": rand(3, seed=2)}
    tx, zero = momentum(flips), torch.zeros((), dtype=torch.float64)
    extra = {"count": zero, "stats": {"mean": zero + 5, "square": zero - 5}}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
    scale = fshard.DynamicLossScale(4.0)
    state = fshard.init_state(sharded, tx, loss_scale=scale, extra=extra)
    step = fshard.train_step(
        partial(loss, flips=flips), tx, with_extra=True, donate=donate, accumulate=accumulate, clip_norm=1.0
    )
    run, rank = how(step), 0 if mesh is None else mesh.get_rank()
    for number in range(3):
        x = rand(4, 3, seed=10 * number + rank)
        state, _ = run(state, x * torch.inf if number == 1 else x)  # the second update is skipped
    moments = {name: gather_params(state.opt_state[name]) for name in ("up", "down")}
    names = ("count", "stats")
    return gather_params(state.params), moments, {name: state.extra[name] for name in names}


def compiled(step: Any) -> Any:
    """The user's own torch.compile."""
    return torch.compile(lambda state, x: step(state, x), backend="aot_eager", fullgraph=True)


HOWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (lambda step: step, {}),
    "accumulate": (lambda step: step, {"accumulate": 2}),
    "donate": (lambda step: step, {"donate": True}),
    "jit": (eager, {}),
    "jit, donate": (partial(eager, donate=True), {"donate": True}),
    "compile": (compiled, {}),
}


def by_name(x: Any) -> Any:
    """Leaves by path."""
    return dict(zip(tree.paths(x), tree.leaves(x), strict=True))


# dynamo does not run on simulated ranks
CASES = [(name, shard) for name in HOWS for shard in (None, 2, 3) if name != "compile" or shard is None]


@pytest.mark.parametrize(("name", "shard"), CASES)
def test_a_state_that_comes_back_in_another_order(name: str, shard: int | None) -> None:
    """Values of one shape would change places in silence."""
    how, options = HOWS[name]
    results = []
    for flips in (False, True):
        job = partial(trained, how=how, flips=flips, **options)
        results.append([job(None)] if shard is None else simulated(job, shard=shard))
    for expected, found in zip(*results, strict=True):
        for a, b in zip(expected, found, strict=True):
            same = by_name(a)
            assert same.keys() == by_name(b).keys()
            for path, x in by_name(b).items():
                same_bits(same[path], x)


def test_a_checkpoint_is_restored_by_name(tmp_path: Any) -> None:
    """Into a state of another order, whose order stays."""
    params = {"b": rand(3, seed=1), "a": rand(3, seed=2)}
    extra = {"x": torch.ones(2), "y": torch.zeros(2)}
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), optim.sgd(0.1), extra=extra)
    checkpoint.save(tmp_path, state, 0)
    restored = checkpoint.restore(tmp_path, replace(state, extra=turned(extra)))
    restored = restored[0] if isinstance(restored, tuple) else restored
    assert [*restored.extra] == ["y", "x"]
    same_bits(by_name(restored.extra)["x"], extra["x"])
    same_bits(by_name(restored.extra)["y"], extra["y"])


def test_a_graph_takes_and_gives_back_dicts_of_another_order() -> None:
    """A compiled function reads arguments by name, and `donate` writes results by name."""

    def fn(x: Any) -> Any:
        return {"b": 2 * x["b"], "a": x["a"] + 1}, x["a"] - x["b"]

    first = {"a": torch.ones(2), "b": torch.zeros(2) + 3}
    graph = eager(fn).lower(first).compile()
    for x in (first, turned(first)):
        same_bits(by_name(graph(x)[0]), by_name(fn(first)[0]))
        same_bits(graph(x)[1], fn(first)[1])
    for alone in (True, False):
        given = {name: x.clone() for name, x in first.items()}
        new = eager((lambda x: fn(x)[0]) if alone else fn, donate=True)(given)
        new = new if alone else new[0]
        same_bits(by_name(new)["a"], first["a"] + 1)
        same_bits(by_name(new)["b"], 2 * first["b"])
        assert new["a"].data_ptr() == given["a"].data_ptr()
    with pytest.raises(ValueError, match="the structure of the arguments"):
        graph({"a": first["a"], "c": first["b"]})


def test_ranks_with_equal_batches_may_have_dicts_of_other_orders() -> None:
    """Along an axis without batches of its own."""

    def run(mesh: Any) -> Tensor:
        params = {"w": rand(4, seed=1)}
        plan = fshard.make_plan(params, mesh, data=())
        state = fshard.init_state(fshard.shard_params(params, plan), optim.sgd(0.1))
        batch = {"x": rand(4, seed=2), "y": rand(4, seed=3)}
        step = fshard.train_step(lambda p, x: (p["w"] * x["x"] - x["y"]).square().sum(), optim.sgd(0.1))
        return step(state, turned(batch) if mesh.get_rank() else batch)[1]["loss"]

    same_bits(*simulated(run, shard=2))
