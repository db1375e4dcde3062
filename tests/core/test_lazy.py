"""Containers of a loss's parameters, and what is made of them: programs do with both what they do with plain ones."""

import copy
import dataclasses
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as pytree
import torchopt
from support.models import Norm, Pair, counting, same_bits

import fshard
from fshard import tree
from fshard.core.tree import plain


def dicts() -> Any:
    """Leaves, and a container inside."""
    return {"w": counting(3), "b": counting(2), "inside": [counting(1), counting(4)]}


KINDS: dict[str, Callable[[], Any]] = {
    "dict": dicts,
    "list": lambda: [counting(2), dicts(), counting(3)],
    "tuple": lambda: (counting(2), counting(3), dicts()),
    "NamedTuple": lambda: Pair(counting(2), dicts()),
    "dataclass": lambda: Norm(counting(3), [counting(2), counting(1)]),
    "OrderedDict": lambda: OrderedDict(dicts()),
    "defaultdict": lambda: defaultdict(list, dicts()),
}
NEW = torch.tensor([7.0, 8.0])


def matched(p: Any) -> Any:
    """What a match statement takes out of it."""
    match p:
        case {"w": w, **rest}:
            return "mapping", w, sorted(rest)
        case Pair(left=left):
            return "Pair", left
        case Norm(scale):
            return "Norm", scale
        case [first, *rest]:
            return "sequence", first, len(rest)
    return "nothing"


def changed(*names: str) -> Callable[[Any], Any]:
    """The container after a change of it: of the child at the end of a path."""

    def change(p: Any) -> Any:
        at = p
        for name in names[:-1]:
            at = at[name]
        at[names[-1]] = NEW
        return p

    return change


def did(method: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """What a method returns, and the container after it."""
    return lambda p: (getattr(p, method)(*args, **kwargs), p)


def deleted(p: Any) -> Any:
    """Without one of its children."""
    del p["w"]
    return p


def joined(p: Any) -> Any:
    """The container joined in place."""
    other = p
    p |= {"new": NEW}
    return p, other


def extended(p: Any) -> Any:
    """The container added to in place."""
    other = p
    p += p[:1]
    return p, other


def assigned(p: Any) -> Any:
    """With another attribute."""
    p.scale = NEW
    return p


DONE: dict[str, Callable[[Any], Any]] = {
    "assigned": changed("w"),
    "assigned new": changed("new"),
    "assigned inside": changed("inside", 1),
    "assigned in a list": changed(1, "w"),
    "assigned an attribute": assigned,
    "deleted": deleted,
    "update": did("update", w=NEW),
    "update new": did("update", {"new": NEW, "b": 2 * NEW}),
    "setdefault": did("setdefault", "new", NEW),
    "pop": did("pop", "w"),
    "append": did("append", NEW),
    "insert": did("insert", 0, NEW),
    "clear": did("clear"),
    "copy": lambda p: (p.copy(), copy.copy(p), p),
    "a changed copy": lambda p: (changed("w")(p.copy()), changed("w")(copy.copy(p)), p),
    "keys": lambda p: (p.keys() == dicts().keys(), dicts().keys() == p.keys(), p.keys() - {"w"}, list(p.keys())),
    "values twice": lambda p: [[list(v), list(v), len(v)] for v in [p.values()]],
    "items twice": lambda p: [[list(v), list(v), len(v)] for v in [p.items()]],
    "joined": lambda p: (p | {"new": NEW}, {"new": NEW} | p, {**p, "w": NEW}),
    "joined in place": joined,
    "added in place": extended,
    "added": lambda p: (p + p[:1], p[:1] + p),
    "slices": lambda p: (p[1:], p[::-1], type(p[1:]).__name__, type(p[:0]).__name__),
    "equal": lambda p: (p == [], p == {}, p != (), p != {**p, "more": 0} if isinstance(p, dict) else 0),
    "match": matched,
    "_fields": lambda p: p._fields,
    "_replace": lambda p: p._replace(left=NEW),
    "_asdict": lambda p: p._asdict(),
    "_make": lambda p: p._make([NEW, NEW]),
    "fields": lambda p: [f.name for f in dataclasses.fields(p)],
    "vars": lambda p: vars(p),
    "replaced": lambda p: (dataclasses.replace(p, scale=NEW), p),
    "is_dataclass": lambda p: (dataclasses.is_dataclass(p), hasattr(p, "_fields")),
    "pickled": lambda p: pickle.loads(pickle.dumps(p)),
    "by name": lambda p: (lambda **more: more)(**p),
    "by position": lambda p: (lambda *more: more)(*p) if isinstance(p, Sequence) else 0,
    "another": lambda p: (p | p, dict(p, new=NEW), OrderedDict(p), {} | p, [*p.items()]),
    "reversed": lambda p: list(reversed(p)),
    "multiplied": lambda p: 2 * p,
    "truth": lambda p: (bool(p), not p),
    "kind": lambda p: (isinstance(p, Mapping), isinstance(p, Sequence), p.__class__.__name__),
    "contains": lambda p: "w" in p,
    "paths": lambda p: [str(path) for path, _ in pytree.tree_flatten_with_path(p)[0]],
    "mapped with paths": lambda p: pytree.tree_map_with_path(lambda path, x: len(path) * x, p),
    "what is not there": lambda p: p.no_such_name,
}
MADE: dict[str, Callable[[Any], Any]] = {
    "a tape": lambda p: p,
    "fshard": lambda p: tree.map(torch.clone, p),
    "optree": lambda p: optree.tree_map(torch.clone, p),
    "torch": lambda p: pytree.tree_map(torch.clone, p),
    "torchopt": lambda p: torchopt.pytree.tree_map(torch.clone, p),
    "torch.func": lambda p: torch.func.vjp(lambda p: p, p)[0],
}


def outcome(do: Callable[[Any], Any], p: Any) -> Any:
    """What an operation returns, as a plain tree, or its error."""
    try:
        return tree.map(lambda x: x, plain(do(p)))
    except (TypeError, AttributeError, LookupError, RuntimeError) as failure:
        return failure


@pytest.mark.law
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", DONE)
def test_a_container_of_a_loss_does_what_a_plain_one_does(done, kind):
    """A change would be lost without a word, or a program that runs on plain trees would fail in a loss."""
    whole = tree.map(torch.Tensor.double, KINDS[kind]())
    expected = outcome(DONE[done], tree.map(torch.clone, whole))
    if isinstance(expected, Exception):
        pytest.skip("a plain one does not")
    for library, make in MADE.items():
        if kind == "dataclass" and library in ("optree", "torchopt"):
            continue  # it is a leaf to these

        def loss(p: Any, make: Any = make, library: str = library) -> Any:
            found = outcome(DONE[done], make(p))
            assert type(found) is type(expected), (library, found)
            assert tree.flatten(found)[1] == tree.flatten(expected)[1], library
            assert same_bits(found, expected), library
            return sum((x.sum() for x in tree.leaves(p)), torch.zeros(()))

        fshard.evaluate(loss)(fshard.shard_params(whole, fshard.make_plan(whole, units="**")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", DONE)
def test_a_change_of_a_container_that_is_a_unit_is_read_again(done: str, kind: str) -> None:
    """A change would be lost: at once, or as soon as another unit is read."""
    whole = {"first": KINDS[kind](), "second": KINDS[kind]()}
    plain_one = tree.map(torch.clone, KINDS[kind]())
    if isinstance(outcome(DONE[done], plain_one), Exception):
        pytest.skip("a plain one does not")

    def loss(p: Any) -> Any:
        DONE[done](p["first"])
        for _ in range(2):
            again = p["first"]
            assert tree.flatten(again)[1] == tree.flatten(plain_one)[1]
            assert same_bits(again, plain_one)
            assert type(again) is type(plain_one)
            assert same_bits(p["second"], whole["second"])
        return sum((x.sum() for x in tree.leaves(again)), torch.zeros(()))

    fshard.evaluate(loss)(fshard.shard_params(whole, fshard.make_plan(whole, units=["first", "second"])))


def test_a_changed_container_is_what_a_module_function_reads() -> None:
    """`apply` would compute with the parameters that were there before the change, given the containers around it."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    apply, params, buffers = fshard.module.functionalize(module)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        p["0"]["weight"] = 3 * p["0"]["weight"]
        return apply(p, buffers, x)[0].square().sum()

    def change() -> None:
        with torch.no_grad():
            module[0].weight.mul_(3)

    sharded = fshard.shard_params(params, fshard.make_plan(params, units=["0", "1"]))
    value = fshard.evaluate(loss)(sharded, torch.ones(2))
    change()
    assert value == module(torch.ones(2)).square().sum()


def sums(x: Any) -> torch.Tensor:
    """The sum of all elements of a tree."""
    return sum((leaf.sum() for leaf in tree.leaves(x)), torch.zeros(()))


def twice(p: Any) -> None:
    """Each child, in a loop over pairs."""
    for key, x in p.items():
        p[key] = tree.map(lambda leaf: 2 * leaf, x)


def by_another(p: Any) -> None:
    """Each block, after another unit was read."""
    for block in p["blocks"]:
        block["w"] = block["w"] * p["emb"].sum()


def all_at_once(p: Any) -> None:
    """Blocks that were all read before the first is changed."""
    for block in [*p["blocks"], *p["blocks"][:2]]:
        block["w"] = 2 * block["w"]


def in_another(p: Any) -> None:
    """Through another dict of the same containers."""
    other = dict(p)
    other["norm"]["w"] = 9 * other["norm"]["w"]
    p["again"] = p["norm"]
    sums(p["emb"])
    p["again"]["b"] = 5 * p["again"]["b"]


def tied(p: Any) -> None:
    """Two containers that were kept in variables."""
    first, last = p["blocks"][0], p["blocks"][2]
    first["w"] = last["w"]


def filled(p: Any) -> None:
    """A container that was empty."""
    empty = p["empty"]
    for block in p["blocks"]:
        empty.append(block["w"])
    p["empty"].append(p["emb"])


def in_the_loop(p: Any) -> None:
    """A list in a loop over it."""
    for number, _ in enumerate(p["blocks"]):
        if number == 0:
            p["blocks"][1] = {"w": torch.full((2,), 50.0)}
            p["blocks"].append(p["blocks"][0])
    p["blocks"].extend(p["blocks"])
    p["blocks"].extend(2 * p["blocks"])


def last_first(p: Any) -> None:
    """The order of keys."""
    p["norm"]["w"] = p["norm"].pop("w")


def deeper(p: Any) -> None:
    """A container inside of a unit, and an argument that reads another unit."""
    p["norm"]["inside"][0] = p["emb"]
    p["norm"].update(b=7 * p["emb"])
    inside = p["norm"]["inside"]
    sums(p["blocks"])
    inside.append(p["emb"])


def alone(p: Any) -> None:
    """Containers inside of units that only the program has when other units are read."""
    inside, inmost = p["norm"]["inside"], p["blocks"][0]["more"]["in"]
    sums(p["emb"])
    inside.append(p["emb"])
    inmost["x"] = 3 * inmost["x"]


CHANGES = [twice, by_another, all_at_once, in_another, tied, filled, in_the_loop, last_first, deeper, alone]
UNITS = [["emb", "norm", "blocks.*"], ["emb", "norm.*", "blocks.*.*"], ["emb", "blocks"], ["**"], None]


@pytest.mark.parametrize("units", UNITS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("regather", [True, False])
def test_a_program_reads_what_it_changed(change: Callable[[Any], None], units: Any, regather: bool) -> None:
    """A change would be lost, depending on what a program read before it, or on which subtrees are units."""
    whole: dict[str, Any] = {"emb": torch.full((2,), 0.3), "norm": {"w": torch.ones(2), "b": torch.full((2,), 2.0)}}
    whole |= {"blocks": [{"w": torch.full((2,), i / 7)} for i in range(1, 4)], "empty": []}
    whole["norm"]["inside"] = [torch.full((2,), 0.9), torch.full((2,), 1.1)]
    whole["blocks"][0]["more"] = {"in": {"x": torch.full((2,), 0.7)}}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        change(p)
        run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        for number, leaf in enumerate(tree.leaves(plain(p))):
            x = run(lambda x, leaf: (x + leaf / 9).sin(), x, leaf) if number % 2 else x * leaf.cos()
        return x.sum() + run(lambda: sums(plain(p["norm"])).sin())

    leaves = tree.map(lambda x: x.clone().requires_grad_(), whole)
    out = loss(tree.map(lambda x: x, leaves), torch.ones(2))
    slopes = torch.autograd.grad(out, tree.leaves(leaves), materialize_grads=True)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=units, regather=regather))
    value, grads = fshard.value_and_grad(loss)(sharded, torch.ones(2))
    torch.testing.assert_close(value, out.detach())
    torch.testing.assert_close(tree.leaves(fshard.gather_params(grads)), list(slopes))


def swap(p: Any) -> None:
    """One block in the place of another."""
    p[0] = p[-1]


def multiply(p: Any) -> None:
    """All blocks twice, in place."""
    p *= 2


OF_BLOCKS: dict[str, Callable[[Any], object]] = {
    "reverse": lambda p: p.reverse(),
    "append": lambda p: p.append(p[1]),
    "pop": lambda p: p.pop(0),
    "insert": lambda p: p.insert(0, p[2]),
    "swap": swap,
    "slice": lambda p: p.__setitem__(slice(0, 2), [p[2]]),
    "delete": lambda p: p.__delitem__(0),
    "multiply": multiply,
    "update": lambda p: p[0].update(w=p[1]["w"]) or p.__setitem__(0, {**p[0], "w": p[1]["w"]}),
}


@pytest.mark.parametrize("bucket", [0, 10**6])
@pytest.mark.parametrize("depth", [4, 40])
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_what_a_loss_changes_does_not_depend_on_which_units_travel_together(name: str, depth: int, bucket: Any) -> None:
    """A change would be lost where units are joined, and kept where they are not."""
    whole = {"emb": torch.ones(2), "blocks": [{"w": torch.full((2,), 1 + i / 100)} for i in range(depth)]}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        OF_BLOCKS[name](p["blocks"])
        for block in p["blocks"]:
            x = (x * block["w"]).sin() + p["emb"]
        return x.sum()

    leaves = tree.map(lambda x: x.clone().requires_grad_(), whole)
    out = loss(tree.map(lambda x: x, leaves), torch.ones(2))
    slopes = torch.autograd.grad(out, tree.leaves(leaves), allow_unused=True, materialize_grads=True)
    expected = tree.map(lambda x: slopes[[x is leaf for leaf in tree.leaves(leaves)].index(True)], leaves)
    plan = fshard.make_plan(whole, units=["blocks.*"], bucket=bucket)
    value, grads = fshard.value_and_grad(loss)(fshard.shard_params(whole, plan), torch.ones(2))
    torch.testing.assert_close((fshard.gather_params(grads), value), (expected, out.detach()))
