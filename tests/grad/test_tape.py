"""One forward and backward over a `Sharded`: which collectives run, what is alive when, and the gradients."""

import gc
import weakref
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from support.chains import (
    CASES,
    Probe,
    Watch,
    apply_block,
    assert_near,
    backwards,
    batch_of,
    by_path,
    chain,
    chain_params,
    checkpointed,
    held,
    input_first,
    make,
    mean,
    randn,
    sparse,
)
from support.refusals import check_words, refusals
from support.saved import all_differences
from support.worlds import gloo, simulated
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import tree
from fshard.sharding.sharded import whole_view

STRATEGIES = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero1": {"params_over": (), "grads_over": ()},
    "zero2": {"params_over": ()},
}
HYBRIDS = {
    **STRATEGIES,
    "state over all": {"state_over": ("shard", "replicate")},
    "grads over all": {"grads_over": ("shard", "replicate"), "state_over": ("shard", "replicate")},
    "all over all": dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard")),
}


# --- a zoo of losses: params, loss, plan arguments ---


def by_hand(loss: Any, params: Any, num_ranks: int) -> tuple[torch.Tensor, Any]:
    """The oracle: every rank's loss on one device, the sum of totals over the sum of counts, plain autograd."""
    own = {id(leaf): leaf.detach().clone() for leaf in tree.leaves(params)}
    trained = {i: x.requires_grad_() for i, x in own.items() if x.is_floating_point() or x.is_complex()}
    live = tree.map(lambda leaf: own[id(leaf)], params)
    outs = [loss(live, batch_of(rank)) for rank in range(num_ranks)]
    value = sum(out.total for out in outs) / sum(out.count for out in outs)
    grads = torch.autograd.grad(value, list(trained.values()), allow_unused=True, materialize_grads=True)
    found = dict(zip(trained, grads, strict=True))
    return value.detach(), tree.map(lambda leaf: found.get(id(leaf)), params)


def moved(params: Any) -> Any:
    """The parameters after a change."""
    new = {id(leaf): leaf + 0.25 if leaf.is_floating_point() else leaf for leaf in tree.leaves(params)}
    return tree.map(lambda leaf: new[id(leaf)], params)


# --- gradients ---


def two_rounds(mesh: Any, name: str, strategies: dict[str, Any]) -> dict[str, list[Any]]:
    """Losses and gradients under every strategy, at the start and after a change of the parameters."""
    found = {}
    for key, strategy in strategies.items():
        first = make(mesh, CASES[name], **strategy)
        rounds = []
        for sharded in (first, moved(first)):
            loss, grads = fshard.value_and_grad(CASES[name]["loss"])(sharded, batch_of(mesh.get_rank()))
            rounds.append((loss, by_path(fshard.gather_params(grads))))
        found[key] = rounds
    return found


FROZEN = {
    "frozen leaf": {"blocks.0.b", "blocks.1.b", "blocks.2.b", "blocks.1.w"},
    "frozen first, checkpointed": {"scale", "blocks.0.w", "blocks.0.b"},
}


def check_gradients(name: str, results: list[dict[str, list[Any]]]) -> None:
    """Every rank, strategy and round against the oracle."""
    params = CASES[name]["params"]()
    for turn, at in enumerate((params, moved(params))):
        loss, grads = by_hand(CASES[name]["loss"], at, len(results))
        expected = by_path(grads)
        for rank, found in enumerate(results):
            for key, rounds in found.items():
                assert_near(rounds[turn][0], loss.to(rounds[turn][0].dtype), (key, rank, turn))
                assert set(expected) - set(rounds[turn][1]) == FROZEN.get(name, set()), (key, rank)
                for path, grad in rounds[turn][1].items():
                    assert_near(grad, expected[path], (key, rank, turn, path))


def jobs() -> dict[Any, Any]:
    """What this file runs on ranks, by key."""
    found: dict[Any, Any] = {(name,): partial(two_rounds, name=name, strategies=STRATEGIES) for name in CASES}
    for name, strategy in STRATEGIES.items():
        found["tally", name] = partial(tally_of, strategy=strategy, what="value_and_grad")
        found["unreduced", name] = partial(unreduced, strategy=strategy)
        found["errors", name] = partial(after_errors, strategy=strategy)
    for loss, depth in product(LOSSES, (5, 9)):
        found["watched", loss, depth] = partial(watched, loss=loss, strategy={}, depth=depth)
    found["saved views",] = all_differences
    found["writes",] = partial(refusals, strategy="full")
    found["watched", chain, "keep"] = partial(watched, loss=chain, strategy={"regather": False}, depth=6)
    return found


def job(mesh: Any, *key: Any) -> Any:
    """The result of one job on a rank."""
    return jobs()[key](mesh)


@pytest.fixture(scope="module", params=["simulated", "gloo"])
def world(request: pytest.FixtureRequest) -> Any:
    """A function from the key of a job to the results of three ranks, simulated or in processes."""
    return cache(partial({"simulated": simulated, "gloo": gloo}[request.param], job, shard=3))


@pytest.mark.law
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right_under_every_strategy(name: str, world: Any) -> None:
    """Some strategy would give other gradients on three ranks with different data than one device does."""
    check_gradients(name, world(name))


@pytest.mark.parametrize("name", ["chain", "shared across depth", "tied across units", "whole leaf", "frozen leaf"])
def test_gradients_on_two_axes(name: str) -> None:
    """Some strategy would give other gradients on a mesh of two axes."""
    check_gradients(name, simulated(two_rounds, name, HYBRIDS, shard=2, replicate=2))


@pytest.mark.parametrize("name", ["chain", "input first", "checkpointed", "dtypes"])
def test_an_axis_of_size_one_is_an_axis(name: str) -> None:
    """One rank with an axis would take another path than several, and give other bits."""
    check_gradients(name, simulated(two_rounds, name, STRATEGIES, shard=1))
    check_gradients(name, simulated(two_rounds, name, HYBRIDS, shard=1, replicate=2))


def test_one_device_needs_no_mesh() -> None:
    """A run on one device would need a mesh."""
    for name, case in CASES.items():
        loss, grads = fshard.value_and_grad(case["loss"])(make(None, case), batch_of(0))
        expected_loss, expected = by_hand(case["loss"], case["params"](), 1)
        assert_near(loss, expected_loss.to(loss.dtype), name)
        for path, grad in by_path(fshard.gather_params(grads)).items():
            assert_near(grad, by_path(expected)[path], (name, path))


def test_the_gradient_of_a_unit_never_touched_is_zero() -> None:
    """A unit that a loss does not use would get garbage, or None, as its gradient."""
    for rank in simulated(two_rounds, "units not touched", STRATEGIES, shard=3):
        for rounds in rank.values():
            for path in ("scale", "head", "blocks.1.w", "blocks.1.b"):
                assert not rounds[0][1][path].any()


def test_saved_views_and_writes_in_place(world: Any) -> None:
    """With buffers that are used for other collectives as well, a saved view would read other data."""
    assert world("saved views") == [[], [], []]
    for found in world("writes"):
        check_words(found)


def calls_of_a_loss(mesh: Any) -> int:
    """How often a loss is called that uses torch.func.grad, which refuses hooks on saved tensors."""
    calls = []

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        calls.append(x)
        return mean(torch.func.grad(lambda y: apply_block(p["blocks"][0], y).sum())(x) * p["scale"])

    fshard.value_and_grad(loss)(make(mesh, CASES["chain"]), batch_of(0))
    return len(calls)


def test_hooks_are_on_only_where_units_have_buffers() -> None:
    """On one device leaves are views of the parameters: hooks would cost time there, and a second call of this loss."""
    assert calls_of_a_loss(None) == 1
    assert simulated(calls_of_a_loss, shard=2) == [2, 2]


def in_no_grad(mesh: Any) -> list[Any]:
    """Gradients asked for where gradients are off, and what mode is on afterwards."""
    sharded, x = make(mesh, CASES["chain"]), batch_of(mesh.get_rank())
    plain = fshard.value_and_grad(chain)(sharded, x)
    with torch.no_grad():
        inside = fshard.value_and_grad(chain)(sharded, x)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert all(not t.requires_grad for t in tree.leaves((plain, inside)))
    return [torch.equal(a, b) for a, b in zip(tree.leaves(plain), tree.leaves(inside), strict=True)]


def test_gradients_do_not_depend_on_the_mode_around() -> None:
    """Under `torch.no_grad` there would be no gradients, or a result would require one."""
    assert all(all(same) for same in simulated(in_no_grad, shard=2))


# --- which collectives run ---

WIDE: dict[str, Any] = {"params": lambda: chain_params(depth=4, dim=64), "units": ["blocks.*"]}
TREE = {"reduction": "tree"}
LAST = "(last)"  # what a chain's backward begins with stays gathered
COUNTS = {  # all_gather, reduce_scatter, all_reduce of every other unit, in one forward and backward
    "full": (2, 1, 0),
    "keep": (1, 1, 0),
    "ddp": (0, 0, 1),
    "zero1": (0, 0, 1),
    "zero2": (0, 1, 0),
}


def wide_batch(rank: int) -> torch.Tensor:
    """A batch as wide as `WIDE`."""
    return randn(2, 64, seed=rank)


def tally_of(mesh: Any, strategy: dict[str, Any], what: str) -> tuple[list[Any], dict[str, int]]:
    """The collectives of a call along axes of several ranks, and the bytes of every unit, padding included."""
    sharded, x = make(mesh, WIDE, **strategy), wide_batch(mesh.get_rank())
    units = {u.name: 8 * u.lengths[0] for u in sharded.plan.units}
    tx = fshard.optim.adamw(1e-3)
    state = fshard.init_state(sharded, tx)
    with fshard.collectives.tally() as records:
        if what == "step":
            fshard.train_step(chain, tx)(state, x)
        else:
            getattr(fshard, what)(chain)(sharded, x)
    assert records.nbytes() == sum(r.nbytes for r in records)
    sizes = {axis: mesh.size(i) for i, axis in enumerate(mesh.mesh_dim_names)}
    return [r for r in records if sizes[r.axis] > 1], units


def sent(kind: str, nbytes: int, size: int) -> int:
    """What one rank of `size` sends for `nbytes` of whole tensor."""
    small = kind == "all_reduce" and nbytes <= 1 << 14
    if small:
        return (size - 1) * nbytes
    return (2 if kind == "all_reduce" else 1) * (size - 1) * -(-nbytes // (16 * size)) * 16  # each part whole blocks


def of(records: list[Any], kind: str, label: str, axis: str = "shard") -> list[int]:
    """The bytes of a unit's collectives of one kind."""
    return [r.nbytes for r in records if (r.kind, r.label, r.axis) == (kind, label, axis)]


@pytest.mark.parametrize("name", COUNTS)
def test_every_unit_is_gathered_and_reduced_as_its_strategy_says(name: str, world: Any) -> None:
    """A strategy would gather or reduce a unit more often, send more bytes, or take another order on some rank."""
    results = world("tally", name)
    for records, units in results:
        assert records == results[0][0]
        for unit, nbytes in units.items():
            for kind, count in zip(("all_gather", "reduce_scatter", "all_reduce"), COUNTS[name], strict=True):
                kept = name == "full" and (kind, unit) == ("all_gather", LAST)
                assert of(records, kind, unit) == [sent(kind, nbytes, 3)] * (count - kept), (unit, kind)
        rest = [r for r in records if r.label != "loss"]
        assert len(rest) == len(units) * sum(COUNTS[name]) - (name == "full")
        numbers = {"full": 5}.get(name, 4)  # total, count, whether there is a gradient, and what ranks compare
        assert of(records, "all_reduce", "loss") == [2 * 8 * numbers]


@pytest.mark.parametrize("name", COUNTS)
def test_the_leaves_of_a_unit_are_views_of_one_buffer(name: str) -> None:
    """A leaf would be copied out of what was gathered: the memory of a second unit, and the time of the copy."""

    def job(mesh: Any) -> None:
        sharded, storages = make(mesh, WIDE, **STRATEGIES[name]), dict[str, set[int]]()
        plan = sharded.plan

        def loss(p: Any, x: torch.Tensor) -> Any:
            for slot, leaf in zip(plan.slots, tree.leaves(fshard.gather_params(p)), strict=True):
                storages.setdefault(plan.units[slot.unit].name, set()).add(leaf.untyped_storage().data_ptr())
            return chain(p, x)

        fshard.evaluate(loss)(sharded, wide_batch(mesh.get_rank()))
        assert {unit: len(found) for unit, found in storages.items()} == dict.fromkeys(storages, 1)
        assert len(storages) == len(plan.units)

    simulated(job, shard=2)


def test_hybrid_reduces_over_the_replicas_what_it_has_scattered() -> None:
    """Hybrid sharding would all-reduce whole gradients over the replicas, not this rank's part."""
    for records, units in simulated(tally_of, {}, "value_and_grad", shard=2, replicate=2):
        for unit, nbytes in units.items():
            assert of(records, "all_gather", unit) == [nbytes // 2] * (1 if unit == LAST else 2)
            assert of(records, "reduce_scatter", unit) == [nbytes // 2]
            assert of(records, "all_reduce", unit, "replicate") == [sent("all_reduce", nbytes // 2, 2)]
        assert len(records) == 4 * len(units) - 1 + 2


@pytest.mark.parametrize(
    ("strategy", "extra"),
    [
        ("full", []),
        ("ddp", []),
        ("zero1", [("all_gather", "shard", 2)]),
        ("zero2", [("all_gather", "shard", 2)]),
        ("state over all", [("all_gather", "replicate", 4)]),
    ],
)
def test_a_step_gathers_parameters_where_only_state_is_cut(strategy: str, extra: list[Any]) -> None:
    """After an update a rank would lack the parameters that other ranks updated."""
    gradients = simulated(tally_of, HYBRIDS[strategy], "value_and_grad", shard=2, replicate=2)
    steps = simulated(tally_of, HYBRIDS[strategy], "step", shard=2, replicate=2)
    for (before, units), (records, _) in zip(gradients, steps, strict=True):
        rest = [r for r in records if r.label not in ("norm", "loss")]  # a step's loss has its place in the training
        for record in (r for r in before if r.label != "loss"):
            rest.remove(record)
        expected = [(kind, axis, unit, n // parts) for unit, n in units.items() for kind, axis, parts in extra]
        assert sorted((r.kind, r.axis, r.label, r.nbytes) for r in rest) == sorted(expected)


@pytest.mark.parametrize("name", ["full", "keep", "ddp"])
def test_a_value_gathers_every_unit_once(name: str) -> None:
    """`evaluate` would gather a unit twice, or reduce something beside the loss."""
    for records, units in simulated(tally_of, STRATEGIES[name], "evaluate", shard=3):
        for unit in units:
            assert len(of(records, "all_gather", unit)) == (name != "ddp")
        assert len(records) == len(units) * (name != "ddp") + 1


def reductions(mesh: Any, name: str) -> list[tuple[str, str]]:
    """The units a case reduced, in order."""
    case, x = CASES[name], batch_of(mesh.get_rank())
    sharded = make(mesh, case)
    with fshard.collectives.tally() as records:
        fshard.value_and_grad(case["loss"])(sharded, x)
    return [r.label for r in records.select("reduce_scatter")]


@pytest.mark.parametrize("name", ["tied across units", "tied to the root", "shared across depth", "checkpointed"])
def test_a_unit_is_reduced_once_however_often_it_is_used(name: str) -> None:
    """A unit used twice, tied or recomputed would be reduced twice."""
    params = CASES[name]["params"]()
    plan = fshard.make_plan(params, units=CASES[name]["units"])
    for units in simulated(reductions, name, shard=2):
        assert sorted(units) == sorted(u.name for u in plan.units if sum(u.lengths))


# --- what is alive when ---


def watched(mesh: Any, loss: Any, strategy: dict[str, Any], depth: int) -> dict[str, int]:
    """How many buffers of a block's size are alive: at most in the forward, between, at most, and afterwards."""
    case = {"params": lambda: chain_params(depth, dim=20), "units": ["blocks.*"]}
    sharded = make(mesh, case, **strategy)
    watch = Watch(8 * sharded.plan.units[1].lengths[0])
    marks: dict[str, int] = {}

    def observed(p: Any, x: torch.Tensor) -> fshard.Mean:
        out = loss(p, x)
        marks["forward"] = watch.peak
        return fshard.Mean(Probe.apply(out.total, lambda: marks.update(between=watch.alive())), out.count)

    with watch:
        result = fshard.value_and_grad(observed)(sharded, randn(3, 20, seed=mesh.get_rank()))
    return {**marks, "peak": watch.peak, "after": watch.alive(), "results": len(result)}


LOSSES = (chain, input_first, checkpointed, sparse, backwards)


@pytest.mark.parametrize("loss", LOSSES)
def test_with_regather_a_few_units_are_alive_however_deep_the_stack(loss: Any, world: Any) -> None:
    """Memory would grow with the number of layers."""
    shallow, deep = (world("watched", loss, depth) for depth in (5, 9))
    for marks in deep:
        assert 1 <= marks["forward"] <= 3
        assert marks["between"] <= 1
        assert marks["after"] == 0
    assert [m["peak"] for m in deep] == [m["peak"] for m in shallow]


def block_chain(p: Any, x: torch.Tensor) -> fshard.Mean:
    """The last block is what the backward begins with."""
    for block in p["blocks"]:
        x = apply_block(block, x)
    return mean(x)


def touches_once_more(p: Any, x: torch.Tensor) -> fshard.Mean:
    """What the backward begins with is not the unit that was touched last."""
    out = block_chain(p, x)
    assert p["blocks"][0]["b"].shape == (20,)
    return out


def gathered(mesh: Any, loss: Any, num: int) -> tuple[list[str], int, int]:
    """The units gathered in some micro-batches, and how many buffers of a block are alive at most and afterwards."""
    case = {"params": lambda: chain_params(4, dim=20), "units": ["blocks.*"]}
    sharded = make(mesh, case)
    state = fshard.init_state(sharded, fshard.optim.sgd(0.1))
    step = fshard.train_step(loss, fshard.optim.sgd(0.1), accumulate=num)
    with fshard.collectives.tally() as records, Watch(8 * sharded.plan.units[1].lengths[0]) as watch:
        step(state, randn(2 * num, 20, seed=mesh.get_rank()).requires_grad_())
    return [r.label for r in records.select("all_gather")], watch.peak, watch.alive()


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize(
    ("loss", "counts", "most"),
    [
        (chain, (1, 2, 2, 2, 2), 3),
        (block_chain, (1, 2, 2, 2, 1), 3),  # the head is one ahead
        (touches_once_more, (1, 3, 2, 2, 2), 3),
        (checkpointed, (1, 2, 2, 2, 2), 3),
        (backwards, (1, 2, 2, 2, 2), 3),
        (lambda p, x: mean(x * p["head"]), (1, 0, 0, 0, 0), 0),
    ],
    ids=["head last", "block last", "another touched last", "checkpointed", "backwards", "the head alone"],
)
def test_what_the_backward_begins_with_stays_gathered(loss: Any, counts: tuple[int, ...], most: int, num: int) -> None:
    """The unit that the backward begins with would be freed and gathered at once, or others would stay."""
    names, ranks = [LAST, *(f"blocks.{i}" for i in range(4))], simulated(gathered, loss, num, shard=2)
    for units, _, after in ranks:
        assert tuple(units.count(name) / num for name in names) == counts
        assert after == 0
    assert max(peak for _, peak, _ in ranks) == most  # of the rank that adds up for all


class Factories(TorchDispatchMode):
    """How many tensors of a number of elements operators make anew, in order, among marks of a loss."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.log = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = isinstance(out, torch.Tensor) and not func.is_view and out.numel() == self.numel
        if new and func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.zeros):
            self.log.append("row")
        return out


def rows_made(mesh: Any, strategy: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """When a step makes rows of gradients, and when its micro-batches run forward and backward."""
    params = {"blocks": [randn(20, 20, seed=i) for i in range(4)], "head": randn(20, seed=9)}
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], **strategy)
    sharded = fshard.shard_params(params, plan)
    over = () if options.get("reduce_once") or options.get("reduction") == "tree" else plan.grads_over
    factories = Factories(whole_view(plan, over, [0]).numel(0))

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        factories.log.append("forward")
        for block in p["blocks"]:
            x = torch.tanh(x @ block)
        total = Probe.apply((x * p["head"]).sum(), lambda: factories.log.append("backward"))
        factories.log.append("end")
        return fshard.Mean(total, x.numel())

    tx = fshard.optim.sgd(0.1)
    state, x = fshard.init_state(sharded, tx), randn(4, 20, seed=1)
    with factories:
        fshard.train_step(loss, tx, **options)(state, x)
    return factories.log[: len(factories.log) - factories.log[::-1].index("backward") + 1]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": True}, TREE], ids=str)
def test_rows_of_gradients_are_made_when_the_first_gradient_comes(name: str, options: dict[str, Any]) -> None:
    """Memory for gradients would be taken while activations are at their peak."""
    worlds = [*simulated(rows_made, STRATEGIES[name], options, shard=2), rows_made(None, {}, options)]
    for log in worlds:
        (first, *others) = (i for i, what in enumerate(log) if what == "forward")
        assert first == 0
        assert log[: log.index("backward") + 2] == ["forward", "end", "backward", "row"]
        for i in others:
            assert log[i : i + 3] == ["forward", "end", "backward"]


def product_watched(mesh: Any, depth: int) -> int:
    """How many buffers of a block's size, of parameters and of their tangents, are alive at most in `hvp`."""
    case = {"params": lambda: chain_params(depth, dim=20), "units": ["blocks.*"]}
    params = make(mesh, case)
    with Watch(8 * params.plan.units[1].lengths[0]) as watch:
        fshard.hvp(chain)(params, params, randn(3, 20, seed=mesh.get_rank()))
    return watch.peak


def test_a_hessian_vector_product_holds_a_few_units_however_deep_the_stack() -> None:
    """The memory of a Hessian-vector product would grow with the number of layers."""
    step, shallow, deep = (
        max(simulated(job, shard=2))
        for job in (
            lambda mesh: watched(mesh, chain, {}, 9)["peak"],
            *(partial(product_watched, depth=d) for d in (5, 9)),
        )
    )
    assert shallow == deep <= 2 * step


def test_without_regather_all_units_stay_until_their_backward(world: Any) -> None:
    """SHARD_GRAD_OP would gather units again."""
    for marks in world("watched", chain, "keep"):
        assert (marks["forward"], marks["between"], marks["after"]) == (6, 6, 0)


def test_a_user_who_holds_all_units_keeps_them_for_the_forward_only() -> None:
    """Leaves that a loss holds would be freed under it, or stay after the forward."""
    for marks in simulated(partial(watched, loss=held, strategy={}, depth=6), shard=2):
        assert marks["forward"] >= 6
        assert marks["between"] <= 1


def leaf_lives(mesh: Any, regather: bool) -> tuple[list[bool], list[bool]]:
    """For every leaf a loss touched: is its storage gone after the forward, and after the backward?"""
    refs: list[StorageWeakRef] = []
    gone: list[bool] = []

    def observed(p: Any, x: torch.Tensor) -> fshard.Mean:
        x = x * p["scale"].sin()
        for block in p["blocks"]:
            refs.extend(StorageWeakRef(leaf.untyped_storage()) for leaf in tree.leaves(block))
            x = apply_block(block, x)
        return mean(Probe.apply(x * p["head"], lambda: gone.extend(ref.expired() for ref in refs)))

    fshard.value_and_grad(observed)(make(mesh, CASES["chain"], regather=regather), batch_of(mesh.get_rank()))
    return gone, [ref.expired() for ref in refs]


@pytest.mark.parametrize("regather", [True, False])
def test_gathered_leaves_die_with_the_forward_if_they_are_gathered_again(regather: bool) -> None:
    """The storages that a loss has seen would stay in memory beside those gathered again."""
    for gone, after in simulated(leaf_lives, regather, shard=2):
        assert gone == [regather] * 6
        assert all(after)


def test_the_address_of_a_storage_is_not_used_again_while_it_is_watched() -> None:
    """torch's private `_cdata` and `StorageWeakRef` would no longer tell gathered buffers apart."""
    storage = torch.zeros(64).untyped_storage()
    address, ref = storage._cdata, StorageWeakRef(storage)
    assert not ref.expired()
    assert torch.zeros(64).untyped_storage()._cdata != address
    assert torch.zeros(0).set_(storage).view(8, 8).t().untyped_storage()._cdata == address
    assert torch.UntypedStorage._new_with_weak_ptr(ref.cdata).data_ptr() == storage.data_ptr()
    del storage
    assert ref.expired()
    assert torch.UntypedStorage._new_with_weak_ptr(ref.cdata) is None
    others = [torch.zeros(64) for _ in range(1000)]
    assert address not in {x.untyped_storage()._cdata for x in others}


# --- sizes ---


def held_bytes(mesh: Any, name: str, strategy: dict[str, Any]) -> dict[str, int]:
    """The bytes this rank holds of parameters, gradients and each moment of Adam."""
    sharded = make(mesh, CASES[name], **strategy)
    _, grads = fshard.value_and_grad(CASES[name]["loss"])(sharded, batch_of(mesh.get_rank()))
    state = fshard.init_state(sharded, fshard.optim.adamw(1e-3)).opt_state
    parts = {"params": sharded, "grads": grads, "mu": state.mu, "nu": state.nu}
    return {key: sum(t.nbytes for t in tree.leaves(part)) for key, part in parts.items()}


@pytest.mark.parametrize("shard", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["chain", "a unit per leaf", "tied across units"])
def test_a_rank_holds_its_part_and_little_padding(name: str, shard: int) -> None:
    """A rank would hold more than 1 / W of parameters, gradients and state, or too much padding."""
    params = CASES[name]["params"]()
    whole = sum({id(x): -(-x.nbytes // 16) * 16 for x in tree.leaves(params)}.values())
    num_units = len(fshard.make_plan(params, units=CASES[name]["units"]).units)
    for by_tree in simulated(held_bytes, name, {}, shard=shard):
        for nbytes in by_tree.values():
            assert whole <= nbytes * shard < whole + 16 * shard * num_units


def test_each_partition_has_the_size_its_axes_say() -> None:
    """On a mesh of two axes a partition would be cut over the wrong ones."""
    whole = sum(x.nbytes for x in tree.leaves(chain_params()))
    expected = {
        "ddp": (1, 1, 1),
        "zero1": (1, 1, 2),
        "zero2": (1, 2, 2),
        "full": (2, 2, 2),
        "state over all": (2, 2, 4),
        "grads over all": (2, 4, 4),
        "all over all": (4, 4, 4),
    }
    for name, parts in expected.items():
        for by_tree in simulated(held_bytes, "chain", HYBRIDS[name], shard=2, replicate=2):
            for key, part in zip(("params", "grads", "mu"), parts, strict=True):
                assert whole <= by_tree[key] * part < whole + 16 * 4 * 4, (name, key)


# --- gradients of this rank, reduced later ---


def unreduced(mesh: Any, strategy: dict[str, Any]) -> dict[str, Any]:
    """Gradients reduced at once and later, of one batch and of two."""
    sharded, x = make(mesh, CASES["chain"], **strategy), batch_of(mesh.get_rank())
    loss, direct = fshard.value_and_grad(chain)(sharded, x)
    with fshard.collectives.tally() as records:
        same_loss, own = fshard.value_and_grad(chain, reduce=False)(sharded, x)
    _, more = fshard.value_and_grad(chain, reduce=False)(sharded, x.flip(0) + 1)
    _, direct_more = fshard.value_and_grad(chain)(sharded, x.flip(0) + 1)
    both = fshard.reduce_grads(tree.map(torch.add, own, more))
    assert type(own) is fshard.reduction.Unreduced
    assert not records.select("reduce_scatter")
    assert {r.label for r in records.select("all_reduce")} == {"loss"}
    later = fshard.reduce_grads(own)
    with pytest.raises(TypeError, match=r"expected Unreduced .* got Sharded: gradients are reduced once"):
        fshard.reduce_grads(later)
    return {
        "direct": (loss, direct.tensors),
        "later": (same_loss, later.tensors),
        "sum of both": tree.map(torch.add, direct, direct_more).tensors,
        "both": both.tensors,
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_reduced_later_are_those_reduced_at_once(name: str, world: Any) -> None:
    """`reduce=False` and `reduce_grads` would give other bits than one call, or reduce twice."""
    for found in world("unreduced", name):
        for a, b in zip(tree.leaves(found["direct"]), tree.leaves(found["later"]), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(found["both"], found["sum of both"], strict=True):
            assert_near(a, b, name)


def values(mesh: Any, name: str) -> list[torch.Tensor]:
    """The loss of a case, without and with its gradient."""
    case, x = CASES[name], batch_of(mesh.get_rank())
    sharded = make(mesh, case)
    with_aux = fshard.evaluate(lambda p, x: (case["loss"](p, x), "aux"), has_aux=True)(sharded, x)
    assert with_aux[1] == "aux"
    return [fshard.evaluate(case["loss"])(sharded, x), with_aux[0], fshard.value_and_grad(case["loss"])(sharded, x)[0]]


@pytest.mark.parametrize("name", sorted(set(CASES) - {"gradient inside"}))
def test_a_value_is_that_of_value_and_grad(name: str) -> None:
    """`evaluate` would give another loss than `value_and_grad`."""
    for without, with_aux, with_gradient in simulated(values, name, shard=3):
        assert torch.equal(without, with_gradient)
        assert torch.equal(without, with_aux)


# --- errors leave nothing behind ---


def after_errors(mesh: Any, strategy: dict[str, Any]) -> list[bool]:
    """Whether calls that fail in the forward, at the loss, and in the backward leave the next call as it was."""
    sharded, x = make(mesh, CASES["chain"], **strategy), batch_of(mesh.get_rank())
    other = tree.map(lambda t: t + 1, sharded)

    def stop() -> None:
        raise ArithmeticError("stop here")

    def in_forward(p: Any, x: torch.Tensor) -> fshard.Mean:
        apply_block(p["blocks"][0], x)
        raise ArithmeticError("stop here")

    def at_the_loss(p: Any, x: torch.Tensor) -> Any:
        chain(p, x)
        return "stop here"

    def in_backward(p: Any, x: torch.Tensor) -> fshard.Mean:
        first = Probe.apply(apply_block(p["blocks"][0], x), stop)
        return mean(apply_block(p["blocks"][2], apply_block(p["blocks"][1], first)))

    expected = tree.leaves(fshard.value_and_grad(chain)(sharded, x))
    same = []
    for bad in (in_forward, at_the_loss, in_backward):
        for sign in (other, sharded):
            with pytest.raises((ArithmeticError, ValueError), match="stop here"):
                fshard.value_and_grad(bad)(sign, x)
        after = tree.leaves(fshard.value_and_grad(chain)(sharded, x))
        same.append(all(torch.equal(a, b) for a, b in zip(expected, after, strict=True)))
    return same


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_error_leaves_no_gather_in_flight(name: str, world: Any) -> None:
    """After an error the next call would receive a gather of the one before."""
    assert world("errors", name) == [[True] * 3] * 3


def alive_after_errors(mesh: Any) -> list[int]:
    """How many gathered blocks are alive after each of three losses that fail once they have touched every unit."""

    def bad(p: Any, x: torch.Tensor) -> Any:
        chain(p, x)
        raise ArithmeticError("stop here")

    sharded = make(mesh, {"params": lambda: chain_params(dim=20), "units": ["blocks.*"]})
    watch, counts = Watch(8 * sharded.plan.units[1].lengths[0]), []
    for _ in range(3):
        with watch, pytest.raises(ArithmeticError, match="stop here"):
            fshard.value_and_grad(bad)(sharded, randn(2, 20))
        gc.collect()  # the traceback held the loss's frame
        counts.append(watch.alive())
    return counts


def test_an_error_leaves_nothing_alive() -> None:
    """After an error gathered buffers would stay in memory, by a reference cycle for example."""
    assert simulated(alive_after_errors, shard=2) == [[0, 0, 0]] * 2


def test_a_subtree_may_be_gathered_inside_a_loss() -> None:
    """`gather_params` inside a loss would give no plain tree, or lose its gradient."""

    def job(mesh: Any) -> Any:
        whole = {"a": [torch.arange(3.0), torch.ones(2)], "b": torch.ones(2)}
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a.*"]))

        def loss(p: Any) -> Any:
            plain = fshard.gather_params(p["a"])
            assert type(plain) is list
            return fshard.Sum((plain[0] ** 2).sum() + (fshard.gather_params(p)["b"] * plain[1]).sum())

        return fshard.gather_params(fshard.value_and_grad(loss)(params)[1])

    for grads in simulated(job, shard=3):
        assert [g.tolist() for g in (*grads["a"], grads["b"])] == [[0.0, 6.0, 12.0], [3.0, 3.0], [3.0, 3.0]]


def test_what_no_backward_goes_through_is_freed() -> None:
    """Buffers of a branch that the loss does not depend on would stay in memory."""
    seen = list[weakref.ref[torch.Tensor]]()

    def unused(params: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        h = x @ params["w"]
        seen.append(weakref.ref(h.exp()))
        if fail:
            raise ValueError("a loss that fails")
        return h.square().sum()

    plan = fshard.make_plan({"w": torch.ones(4, 4)})
    sharded = fshard.shard_params({"w": torch.ones(4, 4)}, plan)
    fshard.value_and_grad(unused)(sharded, torch.ones(2, 4), False)
    with pytest.raises(ValueError, match="a loss that fails"):
        fshard.value_and_grad(unused)(sharded, torch.ones(2, 4), True)
    gc.collect()
    assert [ref() for ref in seen] == [None, None]


@pytest.mark.parametrize("plan", [{}, {"regather": False}, {"policy": "compute=bf16"}, {"units": ["b"]}], ids=str)
@pytest.mark.parametrize("step", [{}, {"accumulate": 2, "clip_norm": 1.0}, {"reduction": "tree"}], ids=str)
def test_one_device_is_that_of_the_leaves(plan: Any, step: Any) -> None:
    """Without a mesh something would be made on another device than the leaves', or read from them."""
    params = {"w": torch.empty(4, 3, device="meta"), "b": [torch.empty(3, device="meta")]}
    sharded = fshard.shard_params(params, fshard.make_plan(params, **plan))
    x = torch.empty(4, 4, device="meta", dtype=torch.bfloat16 if "policy" in plan else torch.float32)

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        return fshard.Mean((x @ p["w"] + p["b"][0]).float().square().sum(), len(x))

    found = [fshard.value_and_grad(loss)(sharded, x), fshard.gather_params(sharded)]
    for scale in (None, fshard.DynamicLossScale(8.0)):
        tx = fshard.optim.adamw(0.1)
        state, metrics = fshard.train_step(loss, tx, **step)(fshard.init_state(sharded, tx, scale), x)
        found += [state.params, state.opt_state.mu, metrics]
    assert {leaf.device.type for leaf in tree.leaves(found)} == {"meta"}


# --- inference mode ---


def evaluated(mesh: Any, name: str) -> bool:
    """Whether losses and parameters inside inference_mode are those outside, and training goes on as before."""
    params = {
        "a": {"w": randn(4, 4)},
        "b": {"w": randn(4, 4, seed=1), "gain": randn(3, seed=2)},
        "root": randn(4, seed=3),
    }
    params["b"]["again"] = params["a"]["w"]  # tied
    x = randn(5, 4, seed=9 + (0 if mesh is None else mesh.get_rank()))

    def loss(p: Any, x: torch.Tensor) -> Any:
        y = torch.tanh(x @ p["a"]["w"] + p["root"]) @ p["b"]["w"] @ p["b"]["again"]  # gain is not used
        return fshard.Mean(y.square().sum(), len(x))

    plan = fshard.make_plan(params, mesh, units=["a", "b"], frozen=["root"], **HYBRIDS[name])
    tx = fshard.optim.sgd(0.1)
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(loss, tx)
    value, before = fshard.evaluate(loss), step(state, x)
    for fn in (value, fshard.jit(value)):
        expected = fn(state.params, x)
        with torch.inference_mode():
            seen = [fn(state.params, x.clone()), *tree.leaves(fshard.gather_params(state.params))]
        assert torch.equal(seen[0], expected)
    whole = tree.leaves(fshard.gather_params(state.params))
    assert all(torch.equal(a, b) for a, b in zip(seen[1:], whole, strict=True))
    return all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(step(state, x)), strict=True))


@pytest.mark.parametrize("world", ["simulated", "gloo"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_loss_is_evaluated_in_inference_mode(name, world):
    """Evaluating in inference mode would change the bits, or the training after it."""
    run = gloo if world == "gloo" else simulated
    assert all(run(evaluated, name, shard=2, replicate=2 if name not in STRATEGIES else 1))


@pytest.mark.parametrize(("units", "kept"), [(["*"], []), (["a", "c"], ["b"]), (None, ["a", "b", "c"])], ids=str)
def test_a_forward_holds_the_root_and_the_unit_touched_last(units: Any, kept: list[str]) -> None:
    """A forward would gather the root again and again, or keep units that nobody refers to."""

    def job(mesh: Any) -> None:
        params = {name: torch.ones(3) for name in "abc"}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=units))

        def loss(p: Any) -> fshard.Sum:
            refs = {name: StorageWeakRef(p[name].untyped_storage()) for name in "abc"}
            assert [name for name, ref in refs.items() if not ref.expired()] == sorted({*kept, "c"})
            return fshard.Sum(p["a"].sum())

        fshard.value_and_grad(loss)(sharded)
        fshard.evaluate(loss)(sharded)

    simulated(job, shard=2)


def test_what_is_saved_may_be_read_often() -> None:
    """A backward that reads its saved tensors twice would fail."""

    class Often(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return w.square()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return sum(ctx.saved_tensors[0] for _ in range(4)) * grad / 2

    def job(mesh: Any) -> tuple[Any, int]:
        params = {"a": torch.arange(3.0)}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        with fshard.collectives.tally() as records:
            _, grads = fshard.value_and_grad(lambda p: fshard.Sum(Often.apply(p["a"]).sum()))(sharded)
        return fshard.gather_params(grads)["a"].tolist(), len(records.select("all_gather"))

    # what the backward begins with is there already, for the first of the four
    assert simulated(job, shard=2) == [([0.0, 4.0, 8.0], 1 + 3)] * 2
