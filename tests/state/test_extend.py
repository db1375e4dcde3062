"""Optimizer state for leaves added to a training (`optim.state.extend`): old ones go on, new ones begin anew."""

import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.optim as to
from support.models import rand, same_bits
from support.optimizers import TRANSFORMS
from support.worlds import simulated

import fshard
from fshard import checkpoint, optim
from fshard.core import tree
from fshard.optim.state import extend, gather_state, load_state_dict, state_dict

SHAPES = {"w": (5, 3), "blocks": [{"a": (3, 4), "b": (5,)}, {"a": (2, 3, 2), "b": (1,)}], "s": ()}
MORE = [{"lora": {"down": (3, 2), "up": (2, 5)}}, {"head": (7,)}]
LR, LATER = 0.1, 0.03  # of the first leaves, and of those that are added
STEPS = 3  # before leaves are added, between, and after
TXS: dict[str, tuple[Any, Any]] = {
    "sgd": (partial(optim.sgd, momentum=0.9, weight_decay=0.1), partial(to.SGD, momentum=0.9, weight_decay=0.1)),
    "nesterov": (partial(optim.sgd, momentum=0.9, nesterov=True), partial(to.SGD, momentum=0.9, nesterov=True)),
    "adam": (optim.adam, to.Adam),
    "adamw": (partial(optim.adamw, weight_decay=0.1), partial(to.AdamW, weight_decay=0.1)),
    "hyperparams": (lambda lr: optim.with_hyperparams(optim.adam, lr=lr), to.Adam),
    "from_torch": (lambda lr: optim.from_torch(to.Adam, lr=lr), to.Adam),
}
HOWS = ("whole", "sharded", "units", "flat", "leaf")


def shapes(stage: int) -> Any:
    """The shapes of all leaves after leaves were added so often."""
    found: Any = SHAPES
    for more in MORE[:stage]:
        found = found | more
    return found


def tree_of(stage: int, seed: int) -> Any:
    """Leaves in float64, by their paths: the same ones for each stage that has them."""
    named = tree.paths_to(shapes(stage), tuple)
    made = [rand(*shape, seed=seed + sum(map(ord, path))) for path, shape in named]
    return tree.put_tops(shapes(stage), tuple, made)


def labelled(make: Any, stage: int) -> Any:
    """The optimizer of a stage: each addition has a label, and so a count, of its own."""
    if not stage:
        return make(LR)
    txs = {"first": make(LR), **{key: make(LATER) for more in MORE[:stage] for key in more}}
    return optim.by_label(txs, {**{key: key for key in txs if key != "first"}, "**": "first"})


def placed(how: str, mesh: Any, tx: Any, stage: int) -> tuple[Any, Any]:
    """The optimizer over a partition, and a function that places whole trees for it."""
    if how == "whole":
        return tx, lambda x: x
    if how in ("flat", "leaf"):
        return fshard.zero(tx, mesh, how, bucket=160), lambda x: x
    units = {"sharded": ["blocks.*"], "units": 8 + stage}[how]
    plan = fshard.make_plan(tree_of(stage, 0), mesh, units=units, frozen=None)
    return tx, lambda x: fshard.shard_params(x, plan)


def trained(mesh: Any, name: str, how: str, folder: Any = None) -> Any:
    """Whole parameters after three stages, and the whole state; through a checkpoint if there is a folder."""
    state, params = None, tree_of(0, 0)
    for stage in range(3):
        tx, place = placed(how, mesh, labelled(TXS[name][0], stage), stage)
        params = place(tree_of(stage, 0) | params)
        before = None if state is None else tree.map(torch.clone, state)
        old, state = state, tx.init(params) if state is None else extend(state, tx, params)
        assert same_bits(old, before), "an argument was written to"
        if folder is not None:
            checkpoint.save(folder / f"{stage}", {"p": params, "o": state}, 0)
            like = {"p": place(tree_of(stage, 5)), "o": tx.init(params)}
            params, state = checkpoint.restore(folder / f"{stage}", like).values()
        for i in range(STEPS):
            params, state = tx.step(place(tree_of(stage, 1 + i)), state, params)
        whole = fshard.gather_params(params)
        params = dict(whole)
    return params, gather_state(state)


def torchs(name: str) -> Any:
    """The same by torch's optimizer and its `add_param_group`, and the steps of all leaves."""
    leaves = dict[str, torch.nn.Parameter]()
    torch.set_default_dtype(torch.float64)  # in which torch's NAdam keeps the product of its momenta
    for stage in range(3):
        named = dict(tree.paths_to(tree_of(stage, 0), torch.Tensor))
        new = {path: torch.nn.Parameter(x.clone()) for path, x in named.items() if path not in leaves}
        leaves |= new
        if not stage:
            optimizer = TXS[name][1](new.values(), lr=LR)
        else:
            optimizer.add_param_group({"params": [*new.values()], "lr": LATER})
        for i in range(STEPS):
            for path, grad in tree.paths_to(tree_of(stage, 1 + i), torch.Tensor):
                leaves[path].grad = grad
            optimizer.step()
    torch.set_default_dtype(torch.float32)
    steps = {path: int(optimizer.state[x]["step"]) for path, x in leaves.items() if "step" in optimizer.state[x]}
    return {path: x.detach() for path, x in leaves.items()}, steps


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", TXS)
def test_leaves_are_added_as_by_torch(name, how):
    """Training with leaves added twice is torch's with `add_param_group`: otherwise moments would be lost, or the bias
    correction of new leaves would be that of old ones."""
    want, steps = torchs(name)
    for shard in (1, 2, 3, 4):
        for params, whole in simulated(trained, name, how, shard=shard):
            got = dict(tree.paths_to(params, torch.Tensor))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
            counts = sorted(int(x) for key, x in whole.items() if key.endswith(("count", "step")))
            if name not in ("from_torch", "hyperparams"):
                assert counts == [STEPS, 2 * STEPS, 3 * STEPS]
    assert not steps or {*steps.values()} == {STEPS, 2 * STEPS, 3 * STEPS}


@pytest.mark.parametrize("how", ["sharded", "flat"])
def test_it_is_saved_and_restored(how, tmp_path):
    """A run that was extended goes on from its checkpoint with the same bits: otherwise it could not be stopped."""
    plain = simulated(trained, "adamw", how, shard=2)
    assert same_bits(simulated(trained, "adamw", how, tmp_path, shard=2), plain)


def in_steps(mesh: Any) -> Any:
    """A training step before and after a leaf was added, beside one that had the leaf frozen; and torch's format."""
    tx = optim.adamw(0.1)
    later = optim.by_label({"first": optim.adamw(0.1), "added": optim.adamw(0.1)}, {"lora": "added", "**": "first"})
    small, large = {"w": rand(3, seed=1)}, {"w": rand(3, seed=1), "lora": rand(2, seed=2)}

    def loss(p: Any, x: Any) -> Any:
        total = ((p["w"] - x.mean()) ** 2).sum()
        return total + (p["lora"] ** 3).sum() if "lora" in p else total

    batch = rand(4, seed=mesh.get_rank())
    state = fshard.init_state(fshard.shard_params(small, fshard.make_plan(small, mesh)), tx)
    state, _ = fshard.train_step(loss, tx)(state, batch)
    grown = fshard.shard_params(large | fshard.gather_params(state.params), fshard.make_plan(large, mesh))
    state = replace(state, params=grown, opt_state=extend(state.opt_state, later, grown))
    state, _ = fshard.train_step(loss, later)(state, batch)
    saved = state_dict(state.opt_state, state.params)["state"]
    return [int(saved[path]["step"]) for path in ("w", "lora")], int(state.step)


def test_a_step_goes_on_with_it():
    """A step takes the new state, and torch's format has a count for each leaf: otherwise it could not be handed on."""
    assert simulated(in_steps, shard=2) == [([2, 1], 2)] * 2


def test_each_leaf_may_count_by_itself():
    """`resting` counts by leaf, so it needs no labels; and a state by labels, of which one is new."""
    old, new = {"w": rand(3, seed=1)}, {"w": rand(3, seed=1), "lora": rand(2, seed=2)}
    tx = optim.adam(0.1)
    _, state = tx.step(old, tx.init(old), old)
    whole = gather_state(extend(state, optim.resting(tx), new))
    assert [int(whole[f"inner.{path}.count"]) for path in ("w", "lora")] == [1, 0]
    plain = optim.sgd(0.1)  # its state is a count alone
    _, state = plain.step(old, plain.init(old), old)
    one, two = (optim.by_label({"a": plain, "b": plain}, labels) for labels in ({"**": "a"}, {"lora": "b", "**": "a"}))
    state = extend(state, one, old)
    assert [int(x) for x in gather_state(extend(state, two, new)).values()] == [1, 0]


def test_what_cannot_be_extended_is_an_error():
    """A count that old and new leaves would share is an error, and so is a state of which nothing goes on: otherwise
    new leaves would get no bias correction, or all moments would be lost."""
    old, new = {"w": torch.ones(3)}, {"w": torch.ones(3), "lora": torch.ones(2)}
    tx = optim.adam(0.1)
    state = tx.init(old)
    words = "extend: 'lora' is new, and would share 'count' with 'w': give new leaves a label of their own (by_label)"
    with pytest.raises(ValueError, match=re.escape(words)):
        extend(state, tx, new)
    with pytest.raises(ValueError, match=re.escape("extend: nothing of the state goes on: it has 'count', 'mu.w'")):
        extend(state, tx, {"base": old})
    apart = optim.by_label({"a": tx, "b": tx}, {"lora": "b", "**": "a"})
    with pytest.raises(ValueError, match=re.escape("extend: 'count' would go on from 'inner.a.count' and 'inner.b.co")):
        extend(apart.init(new), tx, new)
    with pytest.raises(ValueError, match=r"'inner\.a\.mu\.w': expected a tensor \[4\], got one \[3\]"):
        extend(state, apart, {"w": torch.ones(4), "lora": torch.ones(2)})


class Counting(to.Optimizer):
    """A class of a user's, which counts the steps of each parameter."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    entry = self.state[x]
                    entry["step"] = entry.get("step", 0) + 1
                    x.data -= group["lr"] / entry["step"] * x.grad


SMALL = {"w": (3, 2), "late": (2, 4)}
OWN = {"adam": to.Adam, "adamw": to.AdamW, "adagrad": to.Adagrad, "rmsprop": to.RMSprop, "adafactor": to.Adafactor}
IN_TORCH = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
CLASSES: dict[str, tuple[Any, Any]] = {
    **{name: (getattr(optim, name)(0.1, weight_decay=0), partial(cls, weight_decay=0)) for name, cls in OWN.items()},
    **{x: (optim.from_torch(getattr(to, x), lr=0.1), getattr(to, x)) for x in (*IN_TORCH, "Adafactor", "Muon")},
    "momentum": (optim.sgd(0.1, momentum=0.9), partial(to.SGD, momentum=0.9)),
    "amsgrad": (optim.from_torch(to.AdamW, lr=0.1, amsgrad=True), partial(to.AdamW, amsgrad=True)),
    "users": (optim.from_torch(Counting, lr=0.1), Counting),
}


def small(seed: int) -> Any:
    return {path: rand(*shape, seed=seed + shape[0]) for path, shape in SMALL.items()}


def apart(tx: Any) -> Any:
    return optim.by_label({"first": tx, "added": tx}, {"late": "added", "**": "first"})


def stepped(tx: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    """Parameters and state after steps on those leaves."""
    for i in steps:
        params, state = tx.step({path: small(1 + i)[path] for path in params}, state, params)
    return params, state


def joins_late(make: Any, function: str) -> tuple[Any, Any, Any]:
    """torch's state and leaves after steps of the first leaf alone, and the leaves after steps of both."""
    leaves = {path: torch.nn.Parameter(x) for path, x in small(0).items()}
    optimizer = make([leaves["w"]] if function == "extend" else [*leaves.values()], lr=0.1)
    for i in range(2 * STEPS):
        if i == STEPS:
            saved, start = copy.deepcopy(optimizer.state_dict()), {k: x.detach().clone() for k, x in leaves.items()}
            if function == "extend":
                optimizer.add_param_group({"params": [leaves["late"]]})
        for path in SMALL if i >= STEPS else ("w",):
            leaves[path].grad = small(1 + i)[path]
        optimizer.step()
    return saved, start, {path: x.detach() for path, x in leaves.items()}


def taken(tx: Any, of_all: Any, function: str, saved: Any, start: Any) -> Any:
    """The state of `of_all` over both leaves, of which one has none yet."""
    if function == "load":
        return load_state_dict(saved, of_all.init(start), start, order=[*SMALL], strict=False)
    first = {"w": small(0)["w"]}
    return extend(stepped(tx, first, tx.init(first), range(STEPS))[1], of_all, start)


@pytest.mark.parametrize("function", ["extend", "load"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_leaf_that_joins_late_has_a_count_of_its_own(name, function):
    """A leaf without a state beside one with it trains as in torch, or is an error that says how it would: otherwise
    its bias correction would be that of an older leaf."""
    tx, make = CLASSES[name]
    torch.set_default_dtype(torch.float64)  # in which torch's NAdam keeps the product of its momenta
    try:
        saved, start, want = joins_late(make, function)
        refused = []
        for of_all in (tx, apart(tx), optim.resting(tx)):
            try:
                state = taken(tx, of_all, function, saved, start)
            except ValueError as error:
                refused.append((of_all, str(error)))
                continue
            got, _ = stepped(of_all, start, state, range(STEPS, 2 * STEPS))
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
        assert [of_all for of_all, _ in refused] in ([], [tx])
        assert all(word in text for _, text in refused for word in ("'late'", "'w'", "by_label"))
    finally:
        torch.set_default_dtype(torch.float32)


# One number for all leaves is meant: the count of a schedule, or a norm.
SHARED = {"scale_by_schedule", "clip_by_global_norm", "clip_by_global_norm-inf"}


@pytest.mark.parametrize("name", sorted(TRANSFORMS.keys() - SHARED))
def test_added_leaves_share_no_count(name):
    """An added leaf is an error, or trains as it would alone: otherwise it would go on from another leaf's count."""
    tx = TRANSFORMS[name]()
    first, late = ({path: small(0)[path]} for path in SMALL)
    ready, state = stepped(tx, first, tx.init(first), range(STEPS))
    try:
        both = extend(state, tx, ready | late)
    except ValueError as refused:
        error = str(refused)
        both = None
    if both is None:
        assert "'late' is new, and would share" in error
        return
    later = range(STEPS, 2 * STEPS)
    old, new = stepped(tx, ready, state, later)[0], stepped(tx, late, tx.init(late), later)[0]
    torch.testing.assert_close(stepped(tx, ready | late, both, later)[0], old | new, rtol=1e-9, atol=1e-9)


def test_a_plan_without_the_mesh() -> None:
    """Each rank would go on alone, on its own data, in silence."""
    params = {"w": rand(4, 3, seed=0)}

    def run(mesh: Any) -> None:
        state = optim.adam(0.1).init(fshard.shard_params(params, fshard.make_plan(params, mesh)))
        alone = fshard.shard_params(params, fshard.make_plan(params))
        with pytest.raises(ValueError, match=r"extend: params lie on one device, and the state on 2 ranks: make_plan"):
            extend(state, optim.adam(0.1), alone)

    simulated(run, shard=2)
