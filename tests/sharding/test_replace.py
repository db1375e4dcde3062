"""`Sharded.replace`: subtrees with other values, whole or sharded by any plan."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import rand, same_bits
from support.worlds import gloo, simulated

import fshard
from fshard import optim, tree

PLANS: dict[str, dict[str, Any]] = {
    "layers": {},
    "one unit": {"units": []},
    "ddp": {"strategy": "ddp"},
    "whole and frozen": {"whole": "head", "frozen": "blocks.1"},
    "bf16": {"policy": "compute=bf16"},
    "split": {"split": {"blocks.*.w": ("shard", 1)}, "data": (), "params_over": (), "grads_over": (), "state_over": ()},
}
PATHS = ["blocks", "blocks.0", "blocks.2.b", "head", "empty", "last"]


def params(seed: int) -> dict[str, Any]:
    """Blocks, a head, a leaf without elements and an integer, all of uneven shapes."""
    blocks = [{"w": rand(3, 5, seed=seed + i), "b": rand(5, seed=seed + 9 + i)} for i in range(3)]
    ends = {"head": rand(7, 1, seed=seed + 20), "empty": torch.zeros(0, 3, dtype=torch.float64)}
    return {"blocks": blocks, **ends, "last": torch.arange(seed, seed + 3)}


def at(x: Any, path: str) -> Any:
    """A subtree, of a tree or a `Sharded`."""
    for name in path.split("."):
        x = x[int(name) if name.isdecimal() else name]
    return x


def expected(chosen: list[str]) -> Any:
    """`params(0)` with the subtrees of `params(50)`."""
    old, new = params(0), params(50)
    flat, spec = tree.flatten(old)
    picked = [any(f"{name}.".startswith(f"{path}.") for path in chosen) for name in tree.paths(old)]
    return tree.unflatten(
        spec, [b if is_new else a for a, b, is_new in zip(flat, tree.leaves(new), picked, strict=True)]
    )


def replaced(mesh: Any, chosen: list[str], into: str, source: str | None) -> None:
    """The replaced leaves are new, all others as they were, and the tree itself has not changed."""
    before = fshard.shard_params(params(0), fshard.make_plan(params(0), mesh, **PLANS[into]))
    new = params(50)
    if source is not None:
        new = fshard.shard_params(new, fshard.make_plan(new, mesh, **PLANS[source]))
    after = before.replace({path: at(new, path) for path in chosen})
    assert same_bits(fshard.gather_params(after), expected(chosen))
    assert same_bits(fshard.gather_params(before), params(0))
    assert after.view == before.view


@examples(60)
@given(
    st.sampled_from([["blocks"], ["head", "last"], ["blocks.0", "blocks.2.b"], ["empty", "blocks.1"], PATHS[1:], []]),
    st.sampled_from([*PLANS]),
    st.none() | st.sampled_from([*PLANS]),
    st.integers(1, 4),
)
def test_replaced_leaves_are_new_and_no_others(chosen: list[str], into: str, source: str | None, ranks: int) -> None:
    """A leaf at the place of another, or one that a rank forgets, would train from wrong values."""
    simulated(replaced, chosen, into, source, shard=ranks)


def test_on_processes() -> None:
    """The gathers of a subtree are those of all ranks."""
    gloo(replaced, ["blocks", "last"], "layers", "one unit", shard=3)


def test_a_step_goes_on_from_replaced_parameters() -> None:
    """New parameters share no memory with the old ones: a donated step would write to both."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ p["blocks"][0]["w"]) ** 2).sum()

    def run(mesh: Any) -> None:
        whole = {"blocks": params(0)["blocks"]}
        old = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
        tx = optim.sgd(0.1)
        state = fshard.init_state(old.replace({"blocks.1": whole["blocks"][2]}), tx)
        fshard.train_step(loss, tx, donate=True)(state, rand(2, 3, seed=mesh.get_rank()))
        assert same_bits(fshard.gather_params(old), whole)

    simulated(run, shard=2)


WRONG: dict[str, tuple[Any, str]] = {
    "no such path": ({"encoder": torch.ones(2)}, "'encoder' is no path of the tree"),
    "a part of a subtree": ({"blocks.0": {"w": rand(3, 5, seed=0)}}, "it lacks 1 names: 'blocks.0.b'"),
    "too much": ({"head": {"a": rand(7, 1, seed=0)}}, "'head.a' is no path of the tree; it lacks 1 names: 'head'"),
    "another shape": ({"head": rand(7, 2, seed=0)}, "'head': expected a tensor [7, 1], got one [7, 2]"),
    "another dtype": ({"last": rand(3, seed=0)}, "'last': expected torch.int64, got torch.float64"),
    "no tensor": ({"head": 3}, "'head': expected a tensor [7, 1], got 3"),
    "twice": (
        {"blocks.0": params(0)["blocks"][0], "blocks": params(0)["blocks"]},
        "'blocks.0' lies in 'blocks': give one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_subtrees_are_errors(name: str) -> None:
    """They name the leaf, what was expected and what came, on all ranks if one rank is wrong."""
    subtrees, words = WRONG[name]

    def run(mesh: Any) -> None:
        before = fshard.shard_params(params(0), fshard.make_plan(params(0), mesh))
        with pytest.raises(ValueError, match=re.escape(f"replace: {words}")):
            before.replace(subtrees)
        with pytest.raises(ValueError if mesh.get_rank() == 1 else fshard.MismatchError, match=re.escape(words)):
            before.replace(subtrees if mesh.get_rank() == 1 else {})

    simulated(run, shard=2)


def test_tied_leaves_are_replaced_alike() -> None:
    """One of two tied leaves would change the other, in silence."""
    shared = rand(3, 3, seed=0)
    before = fshard.shard_params({"a": shared, "b": shared}, fshard.make_plan({"a": shared, "b": shared}))
    with pytest.raises(ValueError, match="'b' is tied with a leaf that is replaced: replace both"):
        before.replace({"a": torch.ones(3, 3)})
    with pytest.raises(ValueError, match="'b' is tied with a leaf that has other values"):
        before.replace({"a": torch.ones(3, 3), "b": torch.zeros(3, 3)})
    after = fshard.gather_params(before.replace({"a": torch.ones(3, 3), "b": torch.ones(3, 3)}))
    assert torch.equal(after["b"], torch.ones(3, 3, dtype=torch.float64))


def test_a_subtree_and_gradients_have_paths_of_their_own() -> None:
    """Paths begin at the tree that is changed; gradients have no frozen leaves."""
    plan = fshard.make_plan(params(0), units=["blocks.*"], frozen="head")
    x = fshard.shard_params(params(0), plan)
    new = fshard.gather_params(x["blocks"].replace({"1.b": rand(5, seed=70)}))
    assert same_bits(
        new, [*params(0)["blocks"][:1], {**params(0)["blocks"][1], "b": rand(5, seed=70)}, *params(0)["blocks"][2:]]
    )
    with pytest.raises(ValueError, match="'head' is no path of the tree"):
        x.trainable.replace({"head": rand(7, 1, seed=0)})


def test_ranks_replace_the_same_paths() -> None:
    """Ranks that replace different subtrees would train halves of two models, in silence."""

    def run(mesh: Any) -> None:
        before = fshard.shard_params(params(0), fshard.make_plan(params(0), mesh))
        with pytest.raises(fshard.MismatchError, match="replace: the paths differs between ranks"):
            before.replace({"head": params(50)["head"]} if mesh.get_rank() else {"blocks": params(50)["blocks"]})

    simulated(run, shard=2)


@tree.node
class Scaled:
    """A matrix and a number that is no leaf."""

    w: torch.Tensor
    scale: float = tree.static(default=1.0)


def test_static_fields_are_those_of_the_plan() -> None:
    """A tree with other static fields than the plan would compute with the plan's, in silence."""
    one = {"l": Scaled(torch.ones(2, 2)), "b": torch.ones(2)}
    other = {"l": Scaled(torch.ones(2, 2), 4.0), "b": torch.ones(2)}
    plan = fshard.make_plan(one)
    with pytest.raises(ValueError, match=r"'l': expected the static fields .*1\.0.*, got .*4\.0"):
        fshard.shard_params(other, plan)
    before, with_other = fshard.shard_params(one, plan), fshard.shard_params(other, fshard.make_plan(other))
    for subtrees in ({"l": other["l"]}, {"l": with_other["l"]}, {"": other}, {"": with_other}):
        with pytest.raises(ValueError, match=r"'l': expected the static fields .*1\.0.*, got .*4\.0"):
            before.replace(subtrees)
    fshard.shard_params({"b": torch.ones(2), "l": one["l"]}, plan)  # keys in another order
    before.replace({"l": one["l"], "b": torch.zeros(2)})


def test_in_a_graph() -> None:
    """A jitted update with a clamp of one leaf sent text between ranks, and failed on several."""

    def run(mesh: Any) -> Any:
        before = fshard.shard_params(params(0), fshard.make_plan(params(0), mesh, units=["blocks.*"]))
        clamped = lambda p: p.replace({"head": tree.map(lambda x: x.clamp(max=0.1), p["head"])})  # noqa: E731
        return [fshard.gather_params(how(before)) for how in (clamped, fshard.jit(clamped, backend="eager"))]

    for eager, traced in simulated(run, shard=2):
        assert same_bits(eager, traced)
        assert eager["head"].max() <= 0.1


def test_ranks_that_trace_other_paths() -> None:
    """A graph has no messages that compare the paths."""

    def run(mesh: Any) -> None:
        before = fshard.shard_params(params(0), fshard.make_plan(params(0), mesh))
        path = ("head", "blocks")[mesh.get_rank()]
        fshard.jit(lambda p: p.replace({path: tree.map(torch.neg, p[path])}), backend="eager")(before)

    with pytest.raises(fshard.MismatchError):
        simulated(run, shard=2)
