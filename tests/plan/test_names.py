"""Names that are patterns: a path is what it names and nothing else, wherever patterns are taken."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import fshard
from fshard import optim
from fshard.core import tree
from fshard.plan.units import select_units
from fshard.testing import simulate

# each is a pattern of others, of itself, or of nothing
KEYS = ["a*", "a", "ab", "[ab]", "b", "[!a]", "x[0]", "x0", "?", "*", "**", "[]", "[a", "!", "a]", "a?"]
Params = dict[str, Any]


def drawn(seed: int) -> Params:
    """A tree of tensors with such keys, of up to three levels, in another tree."""
    rng = Random(seed)

    def node(depth: int) -> Params:
        keys = rng.sample(KEYS, 4 - depth)
        return {key: node(depth + 1) if rng.random() < 0.5 - 0.2 * depth else torch.ones(2) for key in keys}

    return {"a*": node(0), "net": node(0), **node(1)}


def below(params: Params, above: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every path in a tree, with the paths of the leaves there."""
    for key, x in params.items():
        path = f"{above}{key}"
        inside = [*below(x, f"{path}.")] if isinstance(x, dict) else []
        yield path, {leaf for _, leaves in inside for leaf in leaves} if inside else {path}
        yield from inside


def leaves_where(plan: fshard.Plan, holds: Callable[[Any, Any], bool]) -> set[str]:
    """The paths of the leaves for whose slot and kind something holds."""
    return {slot.path for slot in plan.slots if holds(slot, plan.kinds[slot.kind])}


def frozen(params: Params, path: str) -> set[str]:
    """`frozen`."""
    return leaves_where(fshard.make_plan(params, frozen=[path]), lambda _, kind: not kind.trainable)


def whole(params: Params, path: str) -> set[str]:
    """`whole`."""
    return leaves_where(fshard.make_plan(params, whole=path), lambda _, kind: kind.whole)


def offload(params: Params, path: str) -> set[str]:
    """`offload`, which asks for a mesh."""
    plan = simulate(lambda mesh: fshard.make_plan(params, mesh, offload=[path]), shard=1)[0]
    return leaves_where(plan, lambda _, kind: kind.host)


def policy(params: Params, path: str) -> set[str]:
    """An override."""
    plan = fshard.make_plan(params, policy=fshard.Policy(overrides={path: "compute=bf16"}))
    return leaves_where(plan, lambda _, kind: kind.precision.compute == torch.bfloat16)


def split(params: Params, path: str) -> set[str]:
    """A key of `split`."""
    how = {path: ("replicate", 0)}
    plan = simulate(lambda mesh: fshard.make_plan(params, mesh, split=how), shard=1, replicate=2)[0]
    return leaves_where(plan, lambda slot, _: slot.split is not None)


def units(params: Params, path: str) -> set[str]:
    """A unit."""
    plan = fshard.make_plan(params, units=[path])
    return leaves_where(plan, lambda slot, _: plan.units[slot.unit].name == path)


def labelled(params: Params, path: str) -> dict[str, str]:
    """A label of a path, and another of all the rest."""
    paths = [name for name, _ in below(params)]
    rest = paths if "**" in paths else ["**"]  # as a name it is no pattern
    return {path: "on"} | {name: "off" for name in rest if name != path}


def labels(params: Params, path: str) -> set[str]:
    """A label of an optimizer: the leaves that an update moves."""
    tx = optim.by_label({"on": optim.sgd(1.0), "off": optim.sgd(0.0)}, labelled(params, path))
    flat, spec = tree.flatten(tx.update(params, tx.init(params), params)[0])
    return {name for name, x in zip(tree.leaf_paths(spec), flat, strict=True) if x.any()}


def skip_labels(params: Params, path: str) -> set[str]:
    """A label of `unscale`: the leaves whose gradients count."""
    flat, spec = tree.flatten(params)
    names, inside = tree.leaf_paths(spec), dict(below(params))[path]

    def counts(bad: set[str]) -> bool:
        grads = [x * torch.inf if name in bad else x for name, x in zip(names, flat, strict=True)]
        scale = fshard.StaticLossScale(2.0)
        return bool(scale.unscale(tree.unflatten(spec, grads), labels=labelled(params, path))[1]["on"])

    return {name for name in inside if counts({name})} | ({"others"} if counts({*names} - inside) else set())


PLACES = [frozen, whole, offload, policy, split, units, labels, skip_labels]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(3))
def test_a_path_selects_what_is_there_and_nothing_else(place: Callable[[Params, str], set[str]], seed: int) -> None:
    """A layer whose name is a pattern would take others along: they would be frozen, cast or split without a word."""
    params = drawn(seed)
    for path, leaves in below(params):
        assert place(params, path) == leaves, path


@pytest.mark.parametrize("seed", range(8))
def test_a_path_in_a_longer_pattern_is_that_path(seed: int) -> None:
    """`f"{path}.*"` would select what is in other layers."""
    params = drawn(seed)
    paths = dict(below(params))
    for path, leaves in paths.items():
        if leaves != {path} and f"{path}.**" not in paths:  # there it is the name of one child
            assert frozen(params, f"{path}.**") == leaves
    with pytest.raises(ValueError, match="matches nothing"):
        fshard.make_plan({"x[0]": {"w": torch.ones(1)}, "x0": {"v": torch.ones(1)}}, frozen="x[0].v")


@pytest.mark.parametrize("seed", range(8))
def test_a_path_that_is_no_unit_is_no_pattern_of_units(seed: int) -> None:
    """`regather` and `prefetch` would take another unit than the one that is named, in silence."""
    params = drawn(seed)
    paths = [path for path, _ in below(params)]
    some = paths[seed % 2 :: 2]
    plan = fshard.make_plan(params, units=[*some, (some[0], some[1])])
    names = [(*unit.joined, unit.name) for unit in plan.units]
    for path in paths:
        number = next((n for n, all_names in enumerate(names) if path in all_names), None)
        if number is None:
            with pytest.raises(ValueError, match="matches no unit"):
                select_units(names, [path], plan.spec, "prefetch")
            with pytest.raises(ValueError, match="matches no unit"):
                fshard.make_plan(params, units=[*some, (some[0], some[1])], regather={path: False})
            continue
        assert select_units(names, [path], plan.spec, "prefetch") == [number]
        kept = fshard.make_plan(params, units=[*some, (some[0], some[1])], regather={path: False})
        assert [n for n, unit in enumerate(kept.units) if unit.keep_rule is not None] == [number]


def module_of(params: Params) -> nn.Module:
    """Such a tree of modules."""
    return nn.ModuleDict({k: module_of(x) if isinstance(x, dict) else nn.BatchNorm1d(1) for k, x in params.items()})


@pytest.mark.parametrize("seed", range(6))
def test_what_a_module_returns_is_exact(seed: int) -> None:
    """`apply.units`, `apply.frozen` and `apply.policy` name layers: others would be units, frozen, or cast."""
    module = nn.ModuleDict({"net": module_of(drawn(seed))})
    leaves = [path for path, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)]
    chosen = leaves[seed % 2 :: 2]
    for path in chosen:
        module.get_submodule(path).requires_grad_(False)
    for path in set(leaves) - {*chosen}:
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent)[name] = nn.LayerNorm(1)
    apply, params, _ = fshard.module.functionalize(module)
    plan = fshard.make_plan(
        params, units=apply.units(nn.BatchNorm1d), frozen=apply.frozen, policy=apply.policy("compute=bf16")
    )
    inside = {slot.path for slot in plan.slots if slot.path.rpartition(".")[0] in chosen}
    assert leaves_where(plan, lambda _, kind: not kind.trainable) == inside
    assert leaves_where(plan, lambda _, kind: kind.precision.compute == torch.float32) == inside
    assert {unit.name for unit in plan.units} - {"(root)", "(first)", "(last)"} == {*chosen}
    for path in apply.units(lambda path, _: True):
        assert apply.units(path) == [path]
        assert apply.policy(cast=path).cast_at == (path,)


def test_the_path_of_a_flat_tree_is_exact() -> None:
    """A key with a dot could not be named at all, though the plan prints its path."""
    params = {"x[0].w": torch.ones(2), "x0.w": torch.ones(2), "net": {"a.b": torch.ones(2), "a?b": torch.ones(2)}}
    for place in PLACES:
        for path in tree.paths(params):
            assert place(params, path) == {path}, (place.__name__, path)
