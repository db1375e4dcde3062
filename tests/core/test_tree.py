"""Trees: the order of use, every kind of node, paths, and containers that read like what they stand for."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree
import torchopt
from support.models import TREES, WORLDS, Linear, Norm, Pair, counting, reads_alike, same_bits
from support.worlds import simulated

import fshard
from fshard.core import tree

PATHS = {
    "leaf": [""],
    "order": ["1", "2", "10", "3"],
    "integer_keys": ["1", "2", "10", "3"],
    "tuples": ["0", "1.0", "1.1.0", "1.1.1"],
    "named": ["left", "right.left", "right.right.x"],
    "classes": ["0.weight", "0.bias", "1.scale", "1.shift", "2.weight"],
    "ordered": ["z", "a.0", "a.1"],
    "nothing": ["b", "e.1"],
    "tied": ["embed", "blocks.0.w", "blocks.1.w", "head"],
}


@pytest.mark.parametrize("name", PATHS)
def test_leaves_come_in_the_order_of_use(name):
    """Leaves would be gathered in another order than the model uses them."""
    assert tree.paths(TREES[name]()) == PATHS[name]


def test_optree_keeps_the_order_of_insertion_in_the_namespace_of_torch():
    """A release of torch would silently sort the keys of dicts again."""
    unsorted = {"2": 0, "10": 1, "1": 2}
    assert optree.tree_leaves(unsorted, namespace="torch") == [0, 1, 2]
    assert optree.tree_leaves(unsorted) == [2, 1, 0]
    code = "import optree, sys; print(optree.tree_leaves({'2': 0, '10': 1, '1': 2}, namespace='torch'))"
    for before, expected in (("", "[2, 1, 0]"), ("import torch.utils._cxx_pytree;", "[0, 1, 2]")):
        got = subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, check=True)
        assert got.stdout.strip() == expected


@pytest.mark.parametrize("name", TREES)
def test_flatten_and_unflatten_are_inverse(name):
    """A tree would lose structure, or copy leaves, by being flattened and rebuilt."""
    whole = TREES[name]()
    leaves, spec = tree.flatten(whole)
    again, other = tree.flatten(tree.unflatten(spec, leaves))
    assert spec == other
    assert all(a is b for a, b in zip(leaves, again, strict=True))
    assert type(tree.unflatten(spec, leaves)) is type(whole)
    assert len(leaves) == len(tree.leaf_paths(spec)) == len(set(tree.leaf_paths(spec)))
    assert same_bits(tree.map(lambda x, y: x, whole, whole), whole)


def test_trees_of_other_structure_do_not_map():
    """`map` over unequal trees would drop leaves instead of raising."""
    for other in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}, [1, 2]):
        with pytest.raises((ValueError, TypeError)):
            tree.map(lambda x, y: x, {"a": 1, "b": 2}, other)


def test_nodes_finds_the_outermost():
    """`nodes` would miss a node, or return nodes inside one that it has found."""
    inner = Pair(1, 2)
    assert tree.nodes({"a": [Pair(inner, 3)], "b": (inner, None)}, Pair) == [Pair(inner, 3), inner]


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("units", [None, "**", 5], ids=str)
def test_sharded_and_lazy_trees_read_like_plain_ones(name, units):
    """Code written for a dict or a list would fail on a sharded or a lazy one."""

    def run(mesh: Any) -> None:
        whole = TREES[name]()
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=units))
        reads_alike(sharded, whole)
        for part in subtrees(sharded):
            assert isinstance(part, fshard.Sharded)

        def loss(view: Any) -> Any:
            reads_alike(view, whole)
            copies = [
                tree.map(torch.clone, view),
                pytree.tree_map(lambda x: x, view),
                optree.tree_map(lambda x: x, view),
            ]
            for copy in copies:
                reads_alike(copy, whole)
            return fshard.Sum(sum((x.real.double().sum() for x in tree.leaves(view)), torch.zeros(())))

        fshard.evaluate(loss)(sharded)
        fshard.value_and_grad(loss)(sharded)

    for shard in (1, 3):
        simulated(run, shard=shard)


LIBRARIES = {
    "fshard": tree.map,
    "optree": optree.tree_map,
    "torch": pytree.tree_map,
    "torchopt": torchopt.pytree.tree_map,
}


def two_inner_steps(tree_map: Any, params: Any, plain: Any = lambda x: x) -> tuple[torch.Tensor, Any]:
    """A loss after two steps by its own gradients, with torch.func and with autograd, and where they led."""

    def inner(p: Any) -> torch.Tensor:
        return sum((x.double() ** 3).sum() for x in tree.leaves(p))  # type: ignore[return-value]

    fast = tree_map(lambda p, g: p - 0.01 * g, params, plain(torch.func.grad(inner)(params)))
    leaves, spec = tree.flatten(fast)
    grads = tree.unflatten(spec, torch.autograd.grad(inner(fast), leaves, create_graph=True))
    fast = tree_map(lambda p, g: p - 0.01 * g, fast, grads)
    return inner(tree_map(torch.add, plain(params), fast) if plain is fshard.gather_params else fast), fast


KINDS: dict[str, Any] = {
    **{name: TREES[name] for name in ("order", "integer_keys", "nested", "tuples", "named", "ordered", "tied")},
    "classes": lambda: [Norm(counting(3, 4), [counting(3)]), {"n": Norm(counting(5), counting())}],
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", KINDS)
def test_an_inner_step_maps_parameters_with_their_gradients(name, library):
    """The step of MAML would need `gather_params`, a trap for programs written for one device."""
    if name == "classes" and library in ("optree", "torchopt"):
        pytest.skip("a dataclass that torch alone knows is a leaf to these")
    whole = tree.map(torch.Tensor.double, KINDS[name]())
    origins = {id(x): x.clone().requires_grad_() for x in tree.leaves(whole)}
    value, where = two_inner_steps(LIBRARIES[library], tree.map(lambda x: origins[id(x)], whole))
    expected = tree.map(lambda x: torch.autograd.grad(value, origins[id(x)], retain_graph=True)[0], whole)

    def run(mesh: Any) -> None:
        for units in ("**", 5):
            sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=units))
            make = fshard.value_and_grad(lambda p: two_inner_steps(LIBRARIES[library], p), has_aux=True)
            (loss, aux), grads = make(sharded)
            assert tree.flatten(aux)[1] == tree.flatten(whole)[1]
            assert optree.tree_structure(aux) == optree.tree_structure(whole)
            torch.testing.assert_close(tree.leaves([loss, aux]), tree.leaves([value, where]))
            torch.testing.assert_close(tree.leaves(fshard.gather_params(grads)), tree.leaves(expected))

    simulated(run, shard=2)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "tied"])
def test_lazy_and_plain_trees_map_together(name):
    """A velocity or a mask that is written down would not fit the parameters in a loss."""
    whole = tree.map(torch.Tensor.double, KINDS[name]())
    plain = tree.map(lambda x: x.clone().requires_grad_(), whole)
    value, _ = two_inner_steps(tree.map, plain, fshard.gather_params)
    expected = torch.autograd.grad(value, tree.leaves(plain))

    def loss(p: Any) -> torch.Tensor:
        assert isinstance(p, type(whole))
        with pytest.raises(ValueError):  # noqa: PT011
            tree.map(torch.add, p, [whole, whole])
        return two_inner_steps(tree.map, p, fshard.gather_params)[0]

    _, grads = fshard.value_and_grad(loss)(fshard.shard_params(whole, fshard.make_plan(whole, units="**")))
    torch.testing.assert_close(tree.leaves(fshard.gather_params(grads)), list(expected))


def test_a_module_is_called_with_parameters_of_a_loss():
    """`functional_call` asks for a dict: parameters in units, and what a transform makes of them, are none."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    whole = {name: x.detach() for name, x in module.named_parameters()}

    def loss(p: Any) -> torch.Tensor:
        def call(p: Any) -> torch.Tensor:
            return torch.func.functional_call(module, p, torch.ones(2).double()).square().sum()

        return call(tree.map(torch.sub, p, torch.func.grad(call)(p)))

    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units="**"))
    torch.testing.assert_close(fshard.evaluate(loss)(sharded), loss(whole).detach())


def subtrees(part: Any) -> list[Any]:
    """Every node inside a tree that has leaves, by access."""
    if not isinstance(part, fshard.Sharded) or part.view.spec.is_leaf():
        return [part]
    return [part, *(x for child in part.values() if child not in (None, {}, []) for x in subtrees(child))]


def test_what_is_not_there_is_an_error():
    """A wrong key would give an error that does not say which keys there are."""

    def run(mesh: Any) -> None:
        whole = {"a": [counting(2)], "p": Pair(counting(1), counting(2)), "n": Norm(counting(1), counting(1))}
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units="**"))

        def loss(view: Any) -> Any:
            for params in (view, sharded):
                with pytest.raises(KeyError, match="'z': there is 'a', 'p', 'n'"):
                    params["z"]
                with pytest.raises(IndexError):
                    params["a"][1]
                with pytest.raises(AttributeError, match="middle"):
                    params["p"].middle  # noqa: B018
                with pytest.raises(AttributeError, match="a"):
                    params.a  # noqa: B018
            return view["n"].scale.sum()

        fshard.evaluate(loss)(sharded)

    simulated(run, shard=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tree_map", [optree.tree_map, pytree.tree_map, tree.map], ids=["optree", "torch", "fshard"])
def test_an_average_of_sharded_trees_is_the_average(tree_map, world):
    """An elementwise function over shards would differ from the same function over whole trees."""
    replicate, shard = WORLDS[world]

    def ema(a: Any, b: Any) -> Any:
        return 0.75 * a + 0.25 * b

    def run(mesh: Any) -> None:
        for name in ("nested", "classes", "named", "tied", "nothing", "empty_leaves"):
            one = TREES[name]()
            other = tree.map(lambda x: x * x - 1, one)
            if name == "tied":
                other["head"] = other["blocks"][1]["w"] = other["embed"]
            plan = fshard.make_plan(one, mesh, units=3)
            got = tree_map(ema, fshard.shard_params(one, plan), fshard.shard_params(other, plan))
            assert same_bits(fshard.gather_params(got), tree.map(ema, one, other))
            assert len(optree.tree_leaves(got)) == len(pytree.tree_leaves(got)) == len(plan.kinds) == 1

    simulated(run, replicate=replicate, shard=shard)


def test_sharded_trees_of_other_plans_do_not_mix():
    """Shards cut by two plans could be added elementwise."""
    one, other = (fshard.shard_params(w, fshard.make_plan(w)) for w in ({"a": counting(4)}, {"b": counting(4)}))
    for tree_map in (optree.tree_map, pytree.tree_map, tree.map):
        with pytest.raises(ValueError):  # noqa: PT011
            tree_map(torch.add, one, other)


@tree.node
class Activated:
    """A matrix and a function."""

    w: torch.Tensor
    act: Any = tree.static(torch.tanh)


def sharded(whole: Any, **options: Any) -> fshard.Sharded:
    """A tree by a plan of its own."""
    return fshard.shard_params(whole, fshard.make_plan(whole, **options))


def test_two_trees_with_other_static_fields_say_which():
    """The error would print two equal texts, and a reader would look for the difference in vain."""
    one, other = ({"l": [Activated(counting(2), lambda x: x)]} for _ in range(2))
    for make in (lambda x: x, sharded, lambda x: {"p": sharded(x)["l"]}):
        with pytest.raises(ValueError, match=r"'(p': ')?(l\.)?0': expected the static fields .*lambda.*, got .*lambda"):
            tree.map(torch.add, make(one), make(other))
    with pytest.raises(ValueError, match=r"plan=(\w+), .*fshard.tree.map says how two differ.*plan=\1"):
        optree.tree_map(torch.add, sharded(one), sharded(other))
    with pytest.raises(ValueError, match="dictionary key mismatch"):  # optree's own error says enough
        tree.map(torch.add, {"a": sharded(one)}, {"b": sharded(one)})


def test_two_trees_of_two_plans_say_how_to_make_them_alike():
    """A target beside a part of a joint tree would be an error without a remedy, or the remedy would not work."""
    joint = sharded({"encoder": {"w": counting(2), "b": counting(3)}, "head": counting(1)}, units="*")
    encoder, own = joint["encoder"], sharded({"w": counting(2) + 1, "b": counting(3)})
    for a, b, what in (
        (encoder, own, "plans"),
        (own, encoder, "plans"),
        (own.with_policy("compute=bf16"), own, "plans"),
        (encoder["w"], sharded(torch.ones(2)).replace({"": encoder["w"]}), "plans"),
    ):
        with pytest.raises(ValueError, match=rf"of two {what}: .*tree.map\(torch.clone.* a.replace\(\{{'': b\}}\)"):
            tree.map(torch.sub, {"x": a}, {"x": b})
        for like in (a.replace({"": b}), tree.map(torch.clone, a)):
            assert tree.paths(tree.map(torch.sub, a, like)) == tree.paths(a)
    moved = fshard.gather_params(tree.map(torch.sub, encoder, encoder.replace({"": own})))
    assert same_bits(moved, {"w": -torch.ones_like(counting(2)), "b": torch.zeros_like(counting(3))})


def test_two_trees_of_other_leaves_name_them():
    """Parameters beside gradients without the frozen leaves would be an error without a remedy."""
    params = sharded({"a": counting(2), "b": counting(2)}, frozen="a")
    grads = fshard.value_and_grad(lambda p: (p["a"] * p["b"]).sum())(params)[1]
    with pytest.raises(ValueError, match=r"it lacks \['a'\] and has nothing besides\. params\.trainable"):
        tree.map(torch.add, params, grads)
    assert tree.map(torch.add, params.trainable, grads).tensors[0].shape == grads.tensors[0].shape
    with pytest.raises(ValueError, match=r"'x': it lacks \['a', 'b'\] and has \['c'\] besides$"):
        tree.map(torch.add, {"x": params}, {"x": sharded({"c": counting(2)})})


def test_trees_in_two_places_say_so():
    """Trees of one plan, cut over other axes or from other places, would get an error of many pages."""

    def run(mesh: Any) -> None:
        whole = {"a": torch.ones(2, 2), "b": [torch.ones(2), torch.ones(2)]}
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, strategy="zero2"))
        grads = fshard.value_and_grad(lambda p: p["a"].sum() + sum(x.sum() for x in p["b"]))(params)[1]
        for one, other in ((params, grads), (params["b"][0], params["b"][1])):
            with pytest.raises(ValueError, match=r"of two cuts or places in one plan: .*a\.replace"):
                tree.map(torch.add, one, other)
            tree.map(torch.add, one, one.replace({"": other}))
        states = [
            fshard.optim.muon(0.1).init(fshard.shard_params(x, fshard.make_plan(x, mesh)))
            for x in (whole, [whole["a"]])
        ]
        with pytest.raises(ValueError, match=r"^expected the static fields .{,200}, got .{,200} \(a lambda"):
            tree.map(torch.add, *states)

    simulated(run, shard=2)


def test_a_dataclass_of_optree_alone_is_a_node():
    """A dataclass known to one of the two registries would be a leaf."""
    spec = tree.flatten([Linear(1, 2), Norm(3, None), {"n": Norm(4, [5])}])[1]
    assert tree.leaf_paths(spec) == ["0.weight", "0.bias", "1.scale", "2.n.scale", "2.n.shift.0"]


def test_a_subtree_holds_its_own_units_only():
    """A subtree of a `Sharded` would copy, or hold the shards of other units."""

    def run(mesh: Any) -> None:
        whole = TREES["nested"]()
        plan = fshard.make_plan(whole, mesh, units="blocks.*")
        sharded = fshard.shard_params(whole, plan)
        for unit, i in ((unit, int(u.name[-1])) for unit, u in enumerate(plan.units) if u.name.startswith("blocks")):
            (tensor,) = sharded["blocks"][i].tensors
            assert len(tensor) == sharded.view.rows[unit, 0].length
            assert tensor.untyped_storage().data_ptr() == sharded.tensors[0].untyped_storage().data_ptr()

    simulated(run, shard=2)


def test_a_structure_keeps_no_value_alive() -> None:
    """Caches keyed by structure would keep tensors alive."""
    sharded = fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan({"w": torch.ones(2)}))
    ref, (leaves, spec) = weakref.ref(sharded), tree.flatten(sharded)
    again = tree.unflatten(spec, leaves)
    del sharded
    gc.collect()
    assert ref() is None
    assert tree.leaves(again)[0] is leaves[0]


WAYS: dict[str, Callable[[Any], Any]] = {
    "tops": lambda x: tree.tops(x, int),
    "nodes": lambda x: tree.nodes(x, torch.Tensor),
    "paths_to": lambda x: [leaf for _, leaf in tree.paths_to(x, int)],
    "structure_above": lambda x: tree.unflatten(tree.structure_above(x, int), [x[0].w])[0].w[None],
    "map_tops": lambda x: [tree.map_tops(lambda leaf: leaf.cos(), int, x)[0].w],
    "detached": lambda x: [tree.detached([type(x[0])(x[0].w.requires_grad_())])[0].w],
}


@pytest.mark.parametrize("name", WAYS)
def test_a_class_is_a_node_at_its_first_use(name: str) -> None:
    """optree does not know a dataclass that torch has registered: what asks first would take it for a leaf."""

    @dataclass
    class Output:
        w: torch.Tensor

    pytree.register_dataclass(Output)
    (leaf,) = WAYS[name]([Output(torch.ones(2))])
    assert isinstance(leaf, torch.Tensor)
    assert not leaf.requires_grad
