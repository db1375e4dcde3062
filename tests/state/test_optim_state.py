"""Optimizer state in and out: whole, between partitions and numbers of ranks, and in torch.optim's format."""

import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.optim as to
from support.models import WORLDS, rand, same_bits
from support.optimizers import ROWS, TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import optim
from fshard.core import tree
from fshard.optim.state import extend, gather_state, load_state_dict, shard_state, state_dict
from fshard.state import optimizer

Make = Callable[..., Any]
over_all = pytest.mark.parametrize("name", TRANSFORMS)
HOWS = ("sharded", "units", "flat", "leaf")
SHAPES = {"w": (5, 3), "blocks": [{"a": (3, 4), "b": (5,)}, {"a": (2, 3, 2), "b": (1,)}], "s": (), "tail": (7,)}
TXS = {name: make() for name, make in TRANSFORMS.items()}


def tree_of(seed: int) -> Any:
    """Matrices, vectors, a scalar, in float64."""
    seeds = itertools.count(100 * seed)
    return tree.map_tops(lambda shape: rand(*shape, seed=next(seeds)), tuple, SHAPES)


START, *GRADS = (tree_of(i) for i in range(6))


def parted(tx: Any, how: str, mesh: Any, start: Any = START) -> tuple[Any, Make]:
    """A transformation over one of the partitions, and a function that places trees for it."""
    block = max((ROWS[name].block for name, made in TXS.items() if made is tx), default=1)
    if how in ("sharded", "units"):
        plan = fshard.make_plan(start, mesh, units=["blocks.*"] if how == "sharded" else 12, block=block)
        return tx, lambda x: fshard.shard_params(x, plan)
    return (tx if how == "plain" else fshard.zero(tx, mesh, how, bucket=8 * 20, block=block)), lambda x: x


def go(mesh: Any, tx: Any, how: str, steps: Any, start: Any = START, load: Make | None = None) -> tuple[Any, Any]:
    """State and parameters after some steps; `load(state, params)` may replace the state that `init` made."""
    tx, place = parted(tx, how, mesh, start)
    params = place(start)
    state = load(tx.init(params), params) if load else tx.init(params)
    for i in steps:
        params, state = tx.step(place(GRADS[i]), state, params)
    return state, params


def went(mesh: Any, *args: Any) -> tuple[Any, Any]:
    """What `go` returns, gathered: the whole state and the whole parameters."""
    state, params = go(mesh, *args)
    return gather_state(state), fshard.gather_params(params)


def alike(a: Any, b: Any, tolerance: float = 1e-11) -> None:
    """Two trees have the same structure and dtypes, and values within the tolerance."""
    (xs, one), (ys, other) = fshard.tree.flatten(a), fshard.tree.flatten(b)
    assert one == other
    torch.testing.assert_close(xs, ys, rtol=tolerance, atol=tolerance)


@over_all
def test_a_whole_state_says_nothing_of_ranks(name):
    """The gathered state is the same for every partition and world: otherwise a saved state would fit only the run
    that wrote it."""
    tx = TXS[name]
    plain = went(None, tx, "plain", range(3))
    for replicate, shard in ((1, 1), (1, 2), (1, 3), (2, 2)):
        for how in HOWS[:: 2 if shard == 1 else 1]:
            for found in simulated(went, tx, how, range(3), replicate=replicate, shard=shard):
                alike(found, plain)


@over_all
@pytest.mark.parametrize("how", ["flat", "leaf"])
def test_a_rank_that_holds_nothing_counts_updates(name, how):
    """A rank that owns no leaf still counts updates: otherwise its bias correction or schedule would be wrong after
    a reload."""
    tx, one, grad = TXS[name], {"w": START["w"]}, {"w": GRADS[0]["w"]}

    def stepped(tx: Any) -> Any:
        params, state = one, tx.init(one)
        for _ in range(3):
            params, state = tx.step(grad, state, params)
        return gather_state(state), params

    plain = stepped(tx)
    for found in simulated(lambda mesh: stepped(fshard.zero(tx, mesh, how, bucket=8 * 20, block=20)), shard=3):
        alike(found, plain)


def gathered_to_others(mesh: Any) -> None:
    """Each rank asks for the state on itself."""
    state, _ = go(mesh, TXS["adamw"], "sharded", [0])
    gather_state(state, rank=mesh.get_rank())


@pytest.mark.parametrize("world", [simulated, gloo])
def test_ranks_agree_on_which_has_a_state(world):
    """Ranks that ask for the state on different ranks get an error with both wishes; without it they would wait
    forever."""
    with pytest.raises(fshard.MismatchError, match=r"optimizer state for rank 0.*optimizer state for rank 1"):
        world(gathered_to_others, shard=2)


@over_all
def test_training_goes_on_elsewhere(name):
    """A state moves between partitions and numbers of ranks bit by bit: otherwise a run resumed on other hardware
    would differ."""
    tx, moved = TXS[name], ({}, START)

    def load(state: Any, params: Any) -> Any:
        loaded = shard_state(moved[0], state) if moved[0] else state
        assert same_bits(gather_state(loaded), moved[0] or gather_state(state))
        return loaded

    ways = [("3", "sharded"), ("2", "flat"), ("2x2", "leaf"), ("3", "units"), ("2x2", "flat")]
    for i, (world, how) in enumerate(ways):
        replicate, shard = WORLDS[world]
        found = simulated(went, tx, how, [i], moved[1], load, replicate=replicate, shard=shard)
        assert all(same_bits(other, found[0]) for other in found)
        moved = found[0]
        alike(moved, went(None, tx, "plain", range(i + 1)))
    alike(went(None, tx, "plain", [], moved[1], load), moved)


def odd_states(mesh: Any) -> list[dict[str, Tensor]]:
    """Whole states of a tree with leaves of every kind, with moments in the leaves' dtypes and in float32."""
    w = rand(5, 3, seed=1)
    more = {
        "c": torch.complex(w, w),
        "e": rand(0, 2, seed=4),
        "n": torch.tensor([1]),
        "frozen": w[0].clone(),
        "whole": w[:2].clone(),
    }
    params, found = {"w": w, "h": rand(7, seed=5).bfloat16(), **more, "tied": w}, []
    for units, cast in itertools.product((None, 4), (Tensor.clone, lambda x: x.float() if len(x.shape) else x)):
        plan = fshard.make_plan(params, mesh, units=units, frozen="frozen", whole="whole")
        sharded = fshard.shard_params(params, plan)
        like = fshard.tree.map(
            lambda x, cast=cast: x if x.is_complex() else cast(x), optim.adam(0.1).init(sharded.trainable)
        )
        whole = {key: torch.full_like(x, x.numel() + 0.5) for key, x in gather_state(like).items()}
        state = shard_state(whole, like)
        assert same_bits(gather_state(state), whole)
        assert same_bits(gather_state(load_state_dict(state_dict(state, sharded), like, sharded)), whole)
        found.append(whole)
    return found


def test_leaves_of_every_kind():
    """Trainable leaves alone have a state, tied leaves one, each in its dtype: otherwise a saved state would not
    load back."""
    first = simulated(odd_states, shard=1)[0]
    assert list(first[0]) == ["count", *(f"{m}.{leaf}" for m in ("mu", "nu") for leaf in ["w", "h", "c", "e", "whole"])]
    assert [whole["mu.h"].dtype for whole in first] == [torch.bfloat16, torch.float32] * 2
    for replicate, shard in ((1, 3), (2, 2)):
        assert all(same_bits(found, first) for found in simulated(odd_states, replicate=replicate, shard=shard))


def on_one(mesh: Any, name: str) -> None:
    """Each rank in turn gathers the whole state alone, and shards it back to all ranks."""
    me, tx = mesh.get_rank(), TXS[name]
    for how in HOWS:
        (state, params), (before, _) = go(mesh, tx, how, [0]), go(mesh, tx, how, [])
        everywhere, saved = gather_state(state), state_dict(state, params, "index")
        for rank in range(mesh.size()):
            whole = gather_state(state, rank)
            assert same_bits(whole, everywhere if me == rank else {})
            assert all(x.device.type == "cpu" for x in whole.values())
            assert same_bits(shard_state(whole, before, src=rank), state)
            mine = state_dict(state, params, "index", rank)
            assert same_bits(mine, saved if me == rank else {})
            assert same_bits(load_state_dict(mine, before, params, src=rank), state)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "from_torch-Adafactor"])
def test_one_rank_alone_has_it(name):
    """With `rank=` one rank alone gets the whole state, and can shard it back: otherwise every host would need
    memory for all of it."""
    for replicate, shard in ((1, 3), (2, 2)):
        simulated(on_one, name, replicate=replicate, shard=shard)


def test_a_state_of_numbers_alone_is_not_lost():
    """A state of plain numbers reaches the rank that asks: otherwise the count of SGD's updates would be lost in a
    checkpoint."""
    for rank in range(2):
        found = simulated(lambda mesh, rank=rank: gather_state(go(mesh, optim.sgd(0.1), "sharded", [0])[0], rank))
        assert found[rank] == {"count": torch.tensor(1.0)}


def messages(mesh: Any, name: str, how: str, rank: int | None) -> tuple[Any, list[int]]:
    """The whole state, and the bytes of each message that gathers it."""
    state, _ = go(mesh, TXS[name], how, [0])
    with fshard.collectives.tally() as records:
        whole = gather_state(state, rank)
    label = "optimizer state" if rank is None else f"optimizer state for rank {rank}"
    return whole, [r.nbytes for r in records.select("all_to_all", label)]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rank", [None, 1])
def test_a_few_leaves_travel_at_a_time(monkeypatch, how, rank):
    """A state is gathered in chunks of a few leaves, with the same bits: otherwise a rank would need memory for all
    messages at once."""
    for name in ("adamw", "by_label"):
        expected = simulated(messages, name, how, rank, shard=3)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "_CHUNK", 6)
            found = simulated(messages, name, how, rank, shard=3)
        for (whole, sizes), (other, others) in zip(found, expected, strict=True):
            assert same_bits(whole, other)
            assert max(sizes) <= 8 * (5 + 15) * (2 if rank is None else 1)
            assert sum(sizes) == sum(others)
            assert len(sizes) > len(others)


def test_what_is_saved_is_a_copy():
    """A saved state shares no memory with a live one: otherwise a donated step or torch's optimizer would change the
    checkpoint."""

    def law(mesh: Any, how: str) -> None:
        tx, place = parted(optim.adamw(0.1), how, mesh)
        state, params = go(mesh, optim.adamw(0.1), how, [0])
        whole, saved = gather_state(state), state_dict(state, params, "index", groups=[{"lr": 0.1}])
        kept, optimizer = copy.deepcopy((whole, saved)), torchs(lambda xs: to.AdamW(xs, 0.1))
        given, again = shard_state(whole, state), load_state_dict(saved, state, params)
        for old in (state, given, again):
            tx.step(place(GRADS[0]), old, place(START), donate=True)
        assert same_bits((whole, saved), kept)
        optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
        torch_steps(optimizer, range(1))
        assert same_bits(whole, kept[0])

    for how in ("plain", *HOWS):
        simulated(law, how, shard=1)


@pytest.fixture
def double() -> Iterator[None]:
    """float64 as the default dtype, in which torch's optimizers keep their scalars."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def in_two(leaves: list[Any], **rest: float) -> list[dict[str, Any]]:
    """Two parameter groups of torch's: the matrices, and the rest with options of their own."""
    return [{"params": [x for x in leaves if x.ndim > 1]}, {"params": [x for x in leaves if x.ndim < 2], **rest}]


def by_kind(matrix: Any, rest: Any) -> Any:
    """The same two groups as labels of by_label."""
    return optim.by_label({"matrix": matrix, "rest": rest}, lambda path, x: "matrix" if x.ndim > 1 else "rest")


# Ours, and what makes torch's optimizer of leaves.
CLASSES: dict[str, tuple[optim.Transform, Make]] = {
    "AdamW": (optim.adamw(0.1, weight_decay=0.1), lambda xs: to.AdamW(xs, 0.1, weight_decay=0.1)),
    "amsgrad": (optim.from_torch(to.Adam, lr=0.1, amsgrad=True), lambda xs: to.Adam(xs, 0.1, amsgrad=True)),
    "SGD": (optim.sgd(0.1, 0.9), lambda xs: to.SGD(xs, 0.1, 0.9)),
    "SGD-bare": (optim.sgd(0.1), lambda xs: to.SGD(xs, 0.1)),
    "NAdam": (optim.from_torch(to.NAdam, lr=0.1), lambda xs: to.NAdam(xs, 0.1)),
    "Adagrad": (optim.adagrad(0.1, lr_decay=0.1), lambda xs: to.Adagrad(xs, 0.1, 0.1)),
    "RMSprop": (
        optim.rmsprop(0.1, momentum=0.9, centered=True),
        lambda xs: to.RMSprop(xs, 0.1, 0.99, 1e-8, 0, 0.9, True),
    ),
    "Adafactor": (optim.adafactor(0.1), lambda xs: to.Adafactor(xs, 0.1)),
    "from_torch": (optim.from_torch(to.RAdam, lr=0.1), lambda xs: to.RAdam(xs, 0.1)),
    "ASGD": (optim.from_torch(to.ASGD, lr=0.1, t0=2), lambda xs: to.ASGD(xs, 0.1, t0=2)),
    "dampening": (
        optim.from_torch(to.SGD, lr=0.1, momentum=0.9, dampening=0.5),
        lambda xs: to.SGD(xs, 0.1, 0.9, dampening=0.5),
    ),
    "chain": (optim.chain(optim.clip(9.0), optim.adamw(0.1)), lambda xs: to.AdamW(xs, 0.1)),
    "groups": (by_kind(optim.adamw(0.1), optim.adamw(0.02)), lambda xs: to.AdamW(in_two(xs, lr=0.02), 0.1)),
    "groups-bare": (by_kind(optim.sgd(0.1, 0.9), optim.sgd(0.1)), lambda xs: to.SGD(in_two(xs, momentum=0), 0.1, 0.9)),
}
over_classes = pytest.mark.parametrize("name", CLASSES)


def torchs(make: Make, start: Any = START) -> Any:
    """A torch optimizer; its attribute `leaves` has the parameters."""
    leaves = [nn.Parameter(x.clone()) for x in fshard.tree.leaves(start)]
    optimizer = make(leaves)
    optimizer.leaves = leaves
    return optimizer


def torch_steps(optimizer: Any, steps: range) -> list[Tensor]:
    """The parameters after a torch optimizer's steps."""
    for i in steps:
        for leaf, g in zip(optimizer.leaves, fshard.tree.leaves(GRADS[i]), strict=True):
            leaf.grad = g.clone()
        optimizer.step()
    return [leaf.detach().clone() for leaf in optimizer.leaves]


def in_torchs_format(mesh: Any, tx: Any, how: str, groups: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Whole parameters after three steps, and the state in torch's format."""
    state, params = go(mesh, tx, how, range(3))
    return fshard.gather_params(params), state_dict(state, params, "index", groups=groups)


@over_classes
def test_torch_goes_on_with_ours(double, name):
    """torch.optim loads a state that fshard saved and trains on alike: otherwise users could not move a run back to
    plain torch."""
    tx, make = CLASSES[name]
    groups = [{key: x for key, x in group.items() if key != "params"} for group in torchs(make).param_groups]
    want = fshard.tree.leaves(went(None, tx, "plain", range(5))[1])
    for how in HOWS:
        params, saved = simulated(in_torchs_format, tx, how, groups, shard=3)[0]
        optimizer = torchs(make, params)
        optimizer.load_state_dict(saved)
        alike(torch_steps(optimizer, range(3, 5)), want, 1e-12)


@over_classes
def test_we_go_on_with_torchs(double, name):
    """fshard loads a state that torch.optim saved, in any order of leaves: otherwise users could not bring their
    runs to fshard."""
    tx, make = CLASSES[name]
    backward = None if "groups" in name else ["tail", "s", "blocks.1.b", "blocks.1.a", "blocks.0.b", "blocks.0.a", "w"]
    optimizer = torchs(lambda xs: make(xs[::-1] if backward else xs))
    start = fshard.tree.unflatten(fshard.tree.flatten(START)[1], torch_steps(optimizer, range(3)))
    saved = copy.deepcopy(optimizer.state_dict())
    want = torch_steps(optimizer, range(3, 5))
    for how in HOWS:
        load = functools.partial(load_state_dict, saved, order=backward)
        for _, params in simulated(went, tx, how, range(3, 5), start, load, shard=3):
            alike(fshard.tree.leaves(params), want, 1e-12)


@over_all
def test_torchs_format_keeps_a_state(name):
    """A state written in torch's format and read back has the same bits: otherwise such a checkpoint would lose part
    of it."""

    def law(mesh: Any, how: str, key: str) -> None:
        (state, params), (like, _) = go(mesh, TXS[name], how, range(5)), go(mesh, TXS[name], how, [])
        back = load_state_dict(state_dict(state, params, key), like, params)
        assert same_bits(gather_state(back), gather_state(state))

    for how, key in (("sharded", "path"), ("leaf", "index")):
        simulated(law, how, key)


@pytest.mark.parametrize("how", ["plain", *HOWS[1:]])
def test_leaves_may_have_any_name(how):
    """Leaves named like a field or a number keep a state each, in one group: otherwise two leaves would share one
    moment."""
    params = {"count": rand(2, seed=1), "mu": {"w": rand(3, seed=2)}, "w": rand(3, seed=3), "1": rand(2, seed=4)}

    def law(mesh: Any) -> None:
        tx, place = parted(optim.chain(optim.clip(1.0), optim.adamw(0.1)), how, mesh, params)
        placed = place(params)
        state = tx.init(placed)
        saved = state_dict(tx.step(placed, state, placed)[1], placed)
        assert [group["params"] for group in saved["param_groups"]] == [["count", "mu.w", "w", "1"]]
        assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in saved["state"].values())
        alike(
            [saved["state"][path]["exp_avg"] for path in ("mu.w", "w")],
            [0.1 * x for x in (params["mu"]["w"], params["w"])],
        )

    simulated(law)


def test_errors():
    """A state that does not fit is an error that names the leaf and what is missing; without it training would go on
    with wrong moments."""
    tx = optim.adamw(0.1)
    state = tx.init(START)
    whole, saved = gather_state(state), state_dict(state, START)
    entries, w = saved["state"], {"step": torch.tensor(1.0)}
    for call, words in (
        (
            lambda: shard_state({"count": whole["count"]}, state),
            "'mu.tail', 'nu.w', and so on. The state has 'count'",
        ),
        (
            lambda: shard_state({**whole, "nu.s": whole["nu.w"]}, state),
            "shard_state: 'nu.s': expected a tensor [], got one [5, 3]",
        ),
        (
            lambda: load_state_dict({"state": {**entries, "x": w}}, state, START),
            "the state has 'x', which is no leaf of the tree: ['w', ",
        ),
        (
            lambda: load_state_dict({"state": {7: w}}, state, START),
            "the state has a parameter number 7, the tree 7 leaves",
        ),
        (
            lambda: load_state_dict({"state": {**entries, "w": w}}, state, START),
            "leaf 'w': expected 'exp_avg' in its state, there is 'step'",
        ),
        (
            lambda: load_state_dict({"state": {"w": entries["w"]}}, state, START),
            "leaf 'blocks.0.a': expected 'exp_avg' in its state, there is nothing",
        ),
        (lambda: state_dict(state, START, "name"), "state_dict: key='name': expected 'path' or 'index'"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def frozen_between(mesh: Any) -> None:
    """A torch optimizer that was given a frozen parameter, too: its state to shards and back."""
    start = {"a": rand(5, seed=0), "frozen": rand(2, seed=1), "b": rand(3, seed=2)}

    def theirs(start: dict[str, Tensor], saved: Any, grads: list[int]) -> Any:
        leaves = {name: nn.Parameter(x.clone(), requires_grad=name != "frozen") for name, x in start.items()}
        optimizer = to.AdamW(leaves.values(), 0.1)
        if saved:
            optimizer.load_state_dict(copy.deepcopy(saved))  # torch writes to what it loads
        for seed in grads:
            leaves["a"].grad, leaves["b"].grad = rand(5, seed=seed), rand(3, seed=seed + 1)
            optimizer.step()
        return {name: x.detach() for name, x in leaves.items()}, copy.deepcopy(optimizer.state_dict())

    middle, saved = theirs(start, None, [10, 20])
    end, saved_at_end = theirs(middle, saved, [30])
    params = fshard.shard_params(middle, fshard.make_plan(middle, mesh, frozen="frozen"))
    state = optim.adamw(0.1).init(params.trainable)
    state = load_state_dict(saved, state, params)
    settings = [{key: x for key, x in saved["param_groups"][0].items() if key != "params"}]
    ours = state_dict(state, params, "index", groups=settings)
    assert same_bits(theirs(middle, ours, [30]), (end, saved_at_end))


def test_a_frozen_parameter_in_torchs_optimizer():
    """Moments would be those of another parameter, or torch refuse the groups: models with frozen parts, as for LoRA,
    give all parameters to the optimizer."""
    simulated(frozen_between, shard=3)


def unfrozen_late(mesh: Any) -> Any:
    """A state read from a torch optimizer that never saw a gradient of one leaf, and torch's own entry of the other."""
    params = {"a": rand(5, seed=0), "late": rand(3, seed=1)}
    theirs = {name: x.clone().requires_grad_() for name, x in params.items()}
    reference = to.AdamW(theirs.values(), 0.1)
    theirs["a"].grad = rand(5, seed=2)
    reference.step()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
    like = optim.adamw(0.1).init(fshard.tree.map(torch.ones_like, sharded))
    like = like._replace(mu=fshard.tree.map(torch.ones_like, like.mu), count=torch.ones(()))
    with pytest.raises(ValueError, match="leaf 'late': expected 'exp_avg' in its state, there is nothing"):
        load_state_dict(reference.state_dict(), like, params)
    state = load_state_dict(reference.state_dict(), like, sharded, strict=False)
    return optim.state.gather_state(state), reference.state[theirs["a"]]


def test_a_leaf_without_a_state_keeps_its_own():
    """With `strict=False` alone a leaf without a saved state keeps the initial one: otherwise lost moments would go
    unnoticed."""
    for whole, want in simulated(unfrozen_late, shard=2):
        torch.testing.assert_close(whole["mu.a"], want["exp_avg"])
        assert whole["mu.late"].tolist() == [1.0, 1.0, 1.0]
        assert whole["count"] == want["step"] == 1


def partly_saved(mesh: Any, name: str, how: str) -> None:
    """Each rank in turn alone has a state in which some leaves have none; the others keep what they had."""
    me, tx = mesh.get_rank(), TXS[name]
    (state, params), (before, _) = go(mesh, tx, how, [0, 1]), go(mesh, tx, how, [2, 3])
    for lost in (["w"], ["blocks.0.a", "tail"], []):
        saved = state_dict(state, params)
        saved["state"] = {path: entry for path, entry in saved["state"].items() if path not in lost}
        want = gather_state(load_state_dict(saved, before, params, strict=False))
        was, new = gather_state(before), gather_state(state)
        assert same_bits(want, {k: (was if k.partition(".")[2] in lost else new)[k] for k in new})
        for rank in range(mesh.size()):
            mine = saved if rank == me else {}
            with fshard.collectives.tally() as calls:
                found = load_state_dict(mine, before, params, src=rank, strict=False)
            assert not calls.select("all_to_all")  # what a rank keeps is not sent
            assert same_bits(gather_state(found), want)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_one_rank_alone_knows_which_leaves_have_a_state(name, how):
    """With `strict=False` a rank that loads alone need not have a state for every leaf: otherwise it would wait for the
    other ranks, which do not know which leaves are left out."""
    for replicate, shard in ((1, 3), (2, 2)):
        simulated(partly_saved, name, how, replicate=replicate, shard=shard)


def late_saved(make: Make, late: set[int]) -> Any:
    """The state of a torch optimizer after three steps; leaves with the numbers `late` take part in the first."""
    optimizer = torchs(make)
    for i in range(3):
        for number, (leaf, g) in enumerate(zip(optimizer.leaves, fshard.tree.leaves(GRADS[i]), strict=True)):
            leaf.grad = None if i and number in late else g.clone()
        optimizer.step()
    return optimizer.state_dict()


@over_classes
@pytest.mark.parametrize("strict", [True, False])
def test_leaves_with_other_numbers_of_steps(double, name, strict):
    """Where torch counts each parameter's steps and we count once, other counts are an error: otherwise the bias
    correction of some leaves would be that of others."""
    tx, make = CLASSES[name]
    tail = len(fshard.tree.leaves(START)) - 1
    saved = late_saved(make, {tail})
    if "step" not in saved["state"].get(tail, {}):
        load_state_dict(saved, tx.init(START), START, strict=strict)
        return
    with pytest.raises(
        ValueError, match=r"expected one value for all leaves of .* for leaf '.*' and .* for leaf 'tail'"
    ):
        load_state_dict(saved, tx.init(START), START, strict=strict)


def test_a_count_for_each_label(double):
    """Each label's count is that of its leaves in torch's format; and a leaf without a state keeps that of `like`."""
    tx, make = CLASSES["groups"]
    vectors = {n for n, x in enumerate(fshard.tree.leaves(START)) if x.ndim < 2}
    whole = gather_state(load_state_dict(late_saved(make, vectors), tx.init(START), START))
    assert (whole["inner.matrix.count"], whole["inner.rest.count"]) == (3, 1)
    plain, make = CLASSES["AdamW"]
    saved = late_saved(make, {1})
    del saved["state"][1]
    words = "saved has 3.0 for leaf 'w' and none for leaf 'blocks.0.a', which would keep the 0.0 of `like`"
    with pytest.raises(ValueError, match=re.escape(words)):
        load_state_dict(saved, plain.init(START), START, strict=False)
    like = plain.init(START)._replace(count=torch.tensor(3.0))
    assert gather_state(load_state_dict(saved, like, START, strict=False))["count"] == 3


MATRIX = {"w": rand(4, 3, seed=7)}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "Rprop", "SGD")},
    **{"Adafactor": {}, "Muon": {}, "SGD momentum": {"momentum": 0.9}, "AdamW": {"amsgrad": True}},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


@over_all
def test_nothing_of_a_state_is_dropped(name):
    """All that torch kept is in the state that was read, or is an error that names it; `strict=False` alone drops it:
    otherwise an AMSGrad run would go on as AdamW, without a word."""
    like = TXS[name].init(MATRIX)
    names = state_dict(like, MATRIX)["state"].get("w", {}).keys()
    for cls, settings in SETTINGS.items():
        optimizer = torchs(functools.partial(getattr(to, cls.split()[0]), lr=0.1, **settings), MATRIX)
        optimizer.leaves[0].grad = MATRIX["w"].clone()
        optimizer.step()
        entry = dict(optimizer.state[optimizer.leaves[0]])
        saved = {"state": {"w": entry}}
        try:
            loaded = load_state_dict(saved, like, MATRIX)
        except ValueError as error:
            if missing := re.search("leaf 'w': expected '(.*)' in its state", str(error)):
                assert missing[1] in names - entry.keys()
                continue
            listed = set(re.findall(r"'(\w+)'", str(error).split("there is ")[1]))
            loaded = load_state_dict(saved, like, MATRIX, strict=False)
            assert listed == entry.keys() - names
            entry = {key: x for key, x in entry.items() if key not in listed}
        back = state_dict(loaded, MATRIX)["state"].get("w", {})
        torch.testing.assert_close({key: back[key].double() for key in entry}, tree.map(Tensor.double, entry))


class Named(to.Optimizer):
    """A class of a user's, whose names of state are those of fshard's own fields."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for x in self.param_groups[0]["params"]:
            for name in ("mu", "nu", "momentum", "count"):
                self.state[x][name] = self.state[x].get(name, torch.zeros_like(x)) + x.grad
            x.data.sub_(self.state[x]["mu"])


@pytest.mark.parametrize("how", ["plain", "by label", "resting"])
def test_a_class_keeps_its_own_names(how):
    """torch's next step would not find what the class keeps under another name."""
    tx = optim.from_torch(Named)
    tx = {"plain": tx, "by label": optim.by_label({"a": tx}, {"**": "a"}), "resting": optim.resting(tx)}[how]
    optimizer = torchs(Named, MATRIX)
    optimizer.leaves[0].grad = MATRIX["w"].clone()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    back = state_dict(load_state_dict(saved, tx.init(MATRIX), MATRIX), MATRIX, "index")
    assert {name: back["state"][0][name].tolist() for name in saved["state"][0]} == tree.map(
        lambda x: x.tolist(), saved["state"][0]
    )


DAMPED = {"momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("how", ["strict", "lax", "src", "extend"])
def test_a_dampened_momentum_goes_on(how, num_steps):
    """torch's first step takes the gradient undampened: a port would lose momentum, or dampen that gradient."""
    tx, later = optim.from_torch(to.SGD, lr=0.1, **DAMPED), {"late": MATRIX["w"].clone()}
    optimizer = torchs(lambda xs: to.SGD(xs, 0.1, **DAMPED), MATRIX)
    params, state = MATRIX, tx.init(MATRIX)
    for _ in range(num_steps):
        optimizer.leaves[0].grad = MATRIX["w"].clone()
        optimizer.step()
        params, state = tx.step(MATRIX, state, params)

    def loaded(mesh: Any) -> Any:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        rest = {"src": 1} if how == "src" else {"strict": how == "strict"}
        saved = copy.deepcopy(optimizer.state_dict()) if how != "src" or mesh.get_rank() == 1 else None
        back = load_state_dict(saved, tx.init(sharded), sharded, **rest)
        again = load_state_dict(state_dict(back, sharded), back, sharded)
        assert same_bits(gather_state(again), gather_state(back))
        new, _ = tx.step(fshard.shard_params(MATRIX, sharded.plan), back, sharded)
        return fshard.gather_params(new)["w"]

    if how == "extend":
        both = optim.by_label({"old": tx, "new": tx}, {"late": "new", "**": "old"})
        got = both.step(MATRIX | later, extend(state, both, params | later), params | later)[0]["w"]
    else:
        got = simulated(loaded, shard=2)[0]
    theirs = torchs(lambda xs: to.SGD(xs, 0.1, **DAMPED), params)
    theirs.load_state_dict(state_dict(state, params, "index", groups=theirs.state_dict()["param_groups"]))
    for each in (optimizer, theirs):
        each.leaves[0].grad = MATRIX["w"].clone()
        each.step()
        torch.testing.assert_close(each.leaves[0].detach(), got)


SIX = {name: torch.full((2,), float(i)) for i, name in enumerate("abcdef")}
MOMENTS = {name: 10 + x[0].item() for name, x in SIX.items()}
LABELLED = optim.by_label(
    {"x": optim.sgd(0.1, momentum=0.9), "y": optim.sgd(0.1, momentum=0.9)}, {"a": "x", "c": "x", "e": "x", "**": "y"}
)


def saved_in(groups: list[str]) -> Any:
    """The state of torch's SGD, whose parameters are in these groups: a moment of its own for each leaf but `b`."""
    leaves = {name: x.clone().requires_grad_() for name, x in SIX.items()}
    optimizer = to.SGD([{"params": [leaves[name] for name in group]} for group in groups], 0.1, momentum=0.9)
    for name in set("".join(groups)) - {"b"}:
        leaves[name].grad = torch.full((2,), MOMENTS[name])
    optimizer.step()
    return optimizer.state_dict()


def renumbered(saved: Any) -> Any:
    """The same state with other numbers of the parameters: torch matches them by their places in the groups."""
    new = {n: 7 * number + 2 for number, n in enumerate(reversed(range(len(SIX))))}
    groups = [{**group, "params": [new[n] for n in group["params"]]} for group in saved["param_groups"]]
    return {"state": {new[n]: entry for n, entry in saved["state"].items()}, "param_groups": groups}


def read_groups(mesh: Any, labelled: bool, frozen: str, groups: list[str], order: str, strict: bool) -> None:
    """Moments read from torch's groups are those of their leaves, or the groups are refused."""
    params = fshard.shard_params(SIX, fshard.make_plan(SIX, mesh, frozen=list(frozen)))
    like = (LABELLED if labelled else optim.sgd(0.1, momentum=0.9)).init(params.trainable)
    own = ["ace", "bdf"] if labelled else ["abcdef"]
    trained = [group.replace(frozen or "-", "") for group in own]
    fits = [trained, *([] if labelled else [own])]  # labels of frozen leaves are not known
    misses = strict and not frozen  # no gradient of b

    def load(numbered: Any = renumbered) -> dict[str, float]:
        saved = numbered(saved_in(groups))
        state = load_state_dict(saved, like, params, order=list(order) or None, strict=strict)
        return {key.rpartition(".")[2]: x[0].item() for key, x in gather_state(state).items() if "momentum" in key}

    if not order and groups not in fits:
        words = r"expected groups of .* parameters.*got \[.*pass `order`"
        with pytest.raises(ValueError, match=words):
            load()
    elif misses:
        with pytest.raises(ValueError, match="leaf 'b': expected 'momentum_buffer'"):
            load()
    else:
        want = {name: 0.0 if name == "b" else x for name, x in MOMENTS.items() if name not in frozen}
        assert load() == want
        assert load(dict) == want


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("frozen", ["", "b"])
@pytest.mark.parametrize(
    "groups", [["abcdef"], ["ace", "bdf"], ["ac", "bd", "ef"], ["acdef"], ["ace", "df"], ["fab", "dce"]]
)
def test_numbers_of_torchs_groups(labelled, frozen, groups):
    """Parameters by number are those of groups of the same sizes, or of `order`: otherwise leaves of one shape would
    get each other's moments."""
    alike = labelled and groups == ["fab", "dce"]  # sizes that fit in an order that does not: nothing tells
    for order, strict, shard in itertools.product(["", "".join(groups)], [True, False], [1, 2]):
        if (alike and not frozen and not order) or (order and strict and "b" not in order and not frozen):
            continue
        simulated(read_groups, labelled, frozen, groups, order, strict, shard=shard)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("frozen", ["", "b"])
def test_groups_of_an_optimizer_that_keeps_nothing(labelled, frozen):
    """torch would refuse the state of SGD without momentum, whose groups had no parameters, and fshard torch's."""

    def run(mesh):
        plain, adam = (optim.from_torch(cls, lr=0.1) for cls in (torch.optim.SGD, torch.optim.Adam))
        tx = optim.by_label({"0": adam, "1": plain}, lambda path, leaf: str(int(path in "ace")))
        params = fshard.shard_params(SIX, fshard.make_plan(SIX, mesh, frozen=list(frozen)))
        state = (tx if labelled else plain).init(params.trainable)
        saved = optim.state.state_dict(state, params, "index", groups=[{}, {}])
        own = ["bdf".replace(frozen or "-", ""), "ace"] if labelled else ["abcdef"]
        assert [len(group["params"]) for group in saved["param_groups"]] == [len(group) for group in own]
        theirs = torch.optim.SGD([{"params": [torch.zeros(1) for _ in group]} for group in own], lr=0.1)
        theirs.load_state_dict({**saved, "param_groups": [{**g, **theirs.defaults} for g in saved["param_groups"]]})
        got = load_state_dict(saved, state, params)
        assert tree.flatten(got)[1] == tree.flatten(state)[1]

    simulated(run, shard=2)


def test_an_order_that_does_not_fit():
    """An order with unknown, repeated or missing paths is an error that names them; without it leaves would be
    shifted."""
    like, saved = optim.sgd(0.1, momentum=0.9).init(SIX), saved_in(["abcdef"])
    for order, error, words in (
        ("abcdef", TypeError, "order='abcdef': expected a list of the paths of leaves"),
        (list("abcdex"), ValueError, "order has 'x', which is no leaf of the tree: ['a', "),
        (list("abcdea"), ValueError, "order has the leaf 'a' twice"),
        (list("abcde"), ValueError, "order: expected 6 paths, one for each parameter of saved['param_groups'], got 5"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            load_state_dict(saved, like, SIX, order=order, strict=False)


def test_hyperparameters_of_groups_that_differ():
    """A hyper-parameter that torch's groups have with two values and we with one is an error: otherwise one of them
    would be lost."""
    tx = optim.with_hyperparams(optim.sgd, lr=0.1, momentum=0.9)
    saved = saved_in(["ace", "bdf"])
    saved["param_groups"][1]["lr"] = 0.5
    with pytest.raises(ValueError, match=r"'lr': expected one value .* 0\.1 for leaf 'a' and 0\.5 for leaf 'b'"):
        load_state_dict(saved, tx.init(SIX), SIX, order=list("acebdf"), strict=False)
    saved["param_groups"][1]["lr"] = 0.1
    load_state_dict(saved, tx.init(SIX), SIX, order=list("acebdf"), strict=False)


@pytest.mark.parametrize("key", ["path", "index"])
def test_a_state_of_a_frozen_leaf(key):
    """Moments saved for a leaf that is frozen now are an error, or left out with strict=False: otherwise they would be
    lost unnoticed."""
    tx, plan = optim.adamw(0.1), fshard.make_plan(SIX, frozen="c")
    params = fshard.shard_params(SIX, plan)
    saved, like = state_dict(tx.init(SIX), SIX, key), tx.init(params.trainable)
    with pytest.raises(ValueError, match=r"leaf 'c': expected no state, .* there is 'step', 'exp_avg'"):
        load_state_dict(saved, like, params)
    assert same_bits(load_state_dict(saved, like, params, strict=False), like)


def test_leaves_that_are_not_trained_have_no_count():
    """Frozen and integer leaves have no entry, also of an optimizer without moments: torch has none."""
    tree = {**SIX, "n": torch.tensor([1])}
    params = fshard.shard_params(tree, fshard.make_plan(tree, frozen="c"))
    for given in (params, params.trainable):
        assert [*state_dict(optim.sgd(0.1).init(params.trainable), given)["state"]] == list("abdef")
    assert [*state_dict(optim.sgd(0.1).init(tree), tree)["state"]] == list("abcdef")


# Transformations whose states have no tensor of a leaf.
NUMBERS = {
    "sgd": optim.sgd(0.1),
    "schedule": optim.chain(optim.clip(1.0), optim.sgd(lambda n: 0.1 / (1 + n))),
    "hyperparams": optim.with_hyperparams(optim.sgd, lr=0.1),
    "by_label": optim.by_label({"x": optim.sgd(0.1), "y": optim.sgd(0.2)}, {"a": "x", "**": "y"}),
}


def numbers_on_one(mesh: Any, name: str) -> None:
    """Each rank in turn has the numbers; it alone gets them, and all get them back."""
    me, params = mesh.get_rank(), fshard.shard_params(SIX, fshard.make_plan(SIX, mesh))
    like = NUMBERS[name].init(params)
    state = fshard.tree.map(lambda x: x + 7, like)
    everywhere = state_dict(state, params)
    for rank in range(mesh.size()):
        saved = state_dict(state, params, rank=rank)
        assert same_bits(saved, everywhere if rank == me else {})
        assert same_bits(load_state_dict(saved or None, like, params, src=rank), state)
        if name == "by_label":
            whole = gather_state(state, rank)
            assert bool(whole) == (rank == me)
            assert same_bits(shard_state(whole or None, like, src=rank), state)
        else:
            with pytest.raises(ValueError, match=f"shard_state: src={rank}: expected None, .* names no mesh"):
                shard_state(gather_state(state), like, src=rank)


@pytest.mark.parametrize("name", NUMBERS)
def test_one_rank_alone_has_the_numbers(name):
    """A state without tensors of leaves goes to one rank and from it, over the mesh of the parameters: otherwise counts
    would differ between ranks."""
    for replicate, shard in ((1, 1), (1, 3), (2, 2)):
        simulated(numbers_on_one, name, replicate=replicate, shard=shard)


def unlike_ranks(mesh: Any, how: str) -> None:
    """Ranks that load what differs between them all get one error."""
    me, tx = mesh.get_rank(), optim.adamw(0.1)
    state, params = go(mesh, tx, "sharded", [0])
    whole, saved = gather_state(state), state_dict(state, params)
    whole["count"] += me
    for entry in saved["state"].values():
        entry["step"] += me
    src = None if me == 0 else 0
    load = {
        "shard_state": lambda: shard_state(whole, state),
        "load_state_dict": lambda: load_state_dict(saved, state, params),
        "src of shard_state": lambda: shard_state(whole, state, src=src),
        "src of load_state_dict": lambda: load_state_dict(saved, state, params, src=src),
    }[how]
    words = r"has src=None; .* has src=0" if "src" in how else r"'count': 1\.0; rank 1 has 'count': 2\.0"
    with pytest.raises(fshard.MismatchError, match=words):
        load()


@pytest.mark.parametrize("how", ["shard_state", "load_state_dict", "src of shard_state", "src of load_state_dict"])
def test_ranks_that_load_what_differs(how):
    """Counts that differ between ranks, and `src` on one alone, are errors on all ranks: otherwise replicas would part
    ways, or ranks wait forever."""
    for replicate, shard in ((1, 2), (2, 2)):
        simulated(unlike_ranks, how, replicate=replicate, shard=shard)


def test_processes_that_load_what_differs():
    """Processes raise on both sides, and none waits."""
    gloo(unlike_ranks, "src of load_state_dict")


def others_pass_none(mesh: Any) -> None:
    """Rank 0 alone passes a whole state, the others None."""
    state, _ = go(mesh, optim.adamw(0.1), "sharded", [0])
    whole = gather_state(state, rank=0)
    assert same_bits(shard_state(whole or None, state, src=0), state)


def test_ranks_without_the_state_pass_none():
    """With `src` the other ranks may pass None: otherwise they would fail while that rank sends."""
    simulated(others_pass_none, shard=2)


def test_values_that_are_no_tensors():
    """Arrays of NumPy, and moments that are whole numbers, are errors that name the leaf."""
    tx, start = optim.adamw(0.1), {"w": torch.ones(2)}
    state = tx.init(start)
    whole, saved = gather_state(state), state_dict(state, start)
    entry = saved["state"]["w"]
    array, whole_numbers = torch.ones(2).numpy(), torch.ones(2, dtype=torch.int64)
    for load, error, words in (
        (
            lambda: shard_state({**whole, "mu.w": array}, state),
            TypeError,
            "'mu.w'=an object of type ndarray: expected a",
        ),
        (lambda: shard_state(None, state), TypeError, "shard_state: whole=None: expected a dict of tensors"),
        (
            lambda: load_state_dict({"state": {"w": {**entry, "exp_avg": array}}}, state, start),
            TypeError,
            "leaf 'w': exp_avg=an object of type ndarray: expected a tensor or a number",
        ),
        (
            lambda: shard_state({**whole, "mu.w": whole_numbers}, state),
            ValueError,
            "'mu.w': expected torch.float32, got torch.int64",
        ),
    ):
        with pytest.raises(error, match=re.escape(words)):
            load()
    for step in (3, torch.tensor(3), 3.0):  # a count may be a whole number
        loaded = load_state_dict({"state": {"w": {**entry, "step": step}}}, state, start)
        assert loaded.count == 3


@pytest.mark.parametrize("value", [torch.tensor(3 + 4j), torch.tensor(True)])
def test_a_scalar_moment_is_a_real_number(value):
    """The imaginary part of a moment of a scalar leaf would be lost, or a flag taken for a number."""
    params = fshard.shard_params({"z": torch.tensor(1.0)}, fshard.make_plan({"z": torch.tensor(1.0)}))
    state = optim.adamw(0.1).init(params)
    whole = gather_state(state)
    assert gather_state(shard_state({**whole, "mu.z": torch.tensor(3)}, state))["mu.z"].item() == 3.0
    with pytest.raises(ValueError, match=r"'mu\.z': expected torch\.float32, got torch\."):
        shard_state({**whole, "mu.z": value}, state)
