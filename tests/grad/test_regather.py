"""What of a unit stays between forward and backward: by unit, whole or cut over fewer axes; bits, traffic, memory."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.chains import (
    CASES,
    CHAIN,
    Probe,
    Watch,
    apply_block,
    batch_of,
    chain,
    chain_params,
    checkpointed,
    mean,
    randn,
)
from support.models import rand
from support.worlds import gloo, simulated

import fshard
from fshard.comm import primitives
from fshard.core.patterns import matches
from fshard.testing import simulate

ALL = ("replicate", "shard")
STRATEGIES: dict[str, dict[str, Any]] = {
    "all over all": dict.fromkeys(("params_over", "grads_over", "state_over"), ALL),
    "state over all": {"params_over": "shard", "grads_over": "shard", "state_over": ("shard", "replicate")},
    "zero2": {"params_over": ()},
}
CHOICES: dict[str, Any] = {
    "kept": False,
    "cut": "shard",
    "by unit": {"**.0": False, "(first)": ("shard",), "(root)": ("shard",)},
    "but one": {"**.0": True, "**": "shard"},
}
WORLDS = [(1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (4, 1)]  # shard, replicate
LOSSES = [
    *("chain", "shared across depth", "held by the user", "units not touched", "checkpointed", "checkpointed twice"),
    *("frozen first, checkpointed", "no gradients first", "no gradients again", "frozen leaf", "whole leaf"),
    *("gradient inside", "tied to the root", "dtypes"),
]
SLOW = {"params_over": ALL, "grads_over": ALL, "state_over": ALL}


def planned(mesh: Any, name: str, regather: Any, **options: Any) -> fshard.Sharded:
    """The parameters of a case of `test_tape`, sharded; patterns that no unit of the case fits are left out."""
    case = CASES[name]
    chosen = {key: case[key] for key in ("units", "frozen", "whole") if key in case} | options
    if isinstance(regather, dict):
        names = [unit.name.split(".") for unit in fshard.make_plan(case["params"](), units=chosen.get("units")).units]
        regather = {p: x for p, x in regather.items() if any(matches(path, p, ()) for path in names)}
    params = case["params"]()
    return fshard.shard_params(params, fshard.make_plan(params, mesh, regather=regather, **chosen))


def two_steps(mesh: Any, name: str, regather: Any, tx: fshard.optim.Transform, **options: Any) -> list[torch.Tensor]:
    """The bits after two steps: losses, and this rank's rows of parameters."""
    state = fshard.init_state(planned(mesh, name, regather, **options), tx)
    step, losses = fshard.train_step(CASES[name]["loss"], tx, clip_norm=1.0), []
    for turn in range(2):
        state, metrics = step(state, batch_of(mesh.get_rank() + turn))
        losses.append(metrics["loss"])
    return [*losses, *state.params.tensors]


def check_bits(runs: dict[str, list[torch.Tensor]]) -> None:
    """Every run has the bits of the first."""
    first, *others = runs.values()
    for name, run in zip(list(runs)[1:], others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, run, strict=True)), name


@pytest.mark.law
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", LOSSES)
def test_what_stays_changes_no_bit(name: str, strategy: str, world: tuple[int, int]) -> None:
    """A unit would be read from a buffer that another unit or step has filled, or gathered from another rank's part."""
    choices = {"again": True, **CHOICES} if strategy == "all over all" else {"again": True, "kept": False}
    if strategy == "state over all":
        choices["by unit"] = {"**.0": False}
    for tx in (fshard.optim.sgd(0.1, momentum=0.9), fshard.optim.adamw(1e-2)):

        def job(mesh: Any, tx: fshard.optim.Transform = tx) -> dict[str, list[torch.Tensor]]:
            options = STRATEGIES[strategy]
            return {key: two_steps(mesh, name, choice, tx, **options) for key, choice in choices.items()}

        for runs in simulated(job, shard=world[0], replicate=world[1]):
            check_bits(runs)


@dataclass(frozen=True)
class ByBroadcasts:
    """A user's gather: a broadcast from every rank."""

    def all_gather(self, x: torch.Tensor, ranks: Any, label: str) -> Any:
        """(n,) on each rank -> (W n,)."""
        parts = [primitives.broadcast(x, ranks, src, label) for src in range(ranks.size)]
        return parts[0].then(lambda first: torch.cat([first, *(part.wait() for part in parts[1:])]))


OPTIONS: dict[str, dict[str, Any]] = {
    "wire": {"param_wire": fshard.wire.Int8()},
    "wire for all dtypes together": {
        "param_wire": fshard.wire.Int8(),
        "together": True,
        "frozen": ["blocks.*.b", "head"],
    },
    "bfloat16": {"policy": "compute=bf16,reduce=f32"},
    "together": {"policy": "compute=bf16; head: compute=f32", "together": True},
    "a user's gather": {"gather": ByBroadcasts()},
    "host": {"offload": "blocks.*.w"},
    "whole, cast": {"whole": "blocks.*.b", "policy": "compute=bf16"},
    "frozen": {"frozen": ["blocks.0.*", "blocks.1.w"]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_what_stays_changes_no_bit_with_options_of_plans(option: str) -> None:
    """A copy would be decoded twice, lose a dtype, or be taken from host memory or of a leaf that is whole anyway."""

    def job(mesh: Any) -> dict[str, list[torch.Tensor]]:
        loss, x = CASES["checkpointed" if option == "frozen" else "chain"]["loss"], batch_of(mesh.get_rank())
        runs = {}
        for key, choice in {"again": True, **CHOICES}.items():
            sharded = planned(mesh, "chain", choice, **SLOW, **OPTIONS[option])
            wide = next(kind.precision.compute for kind in sharded.plan.kinds)
            value, grads = fshard.value_and_grad(loss)(sharded, x.to(wide))
            runs[key] = [value, *grads.tensors]
        return runs

    for runs in simulated(job, shard=2, replicate=2):
        check_bits(runs)


def test_hessian_vector_products_and_teachers() -> None:
    """Tangents, or a teacher's parameters, would be gathered from copies of other values."""

    def distil(p: Any, x: torch.Tensor, teacher: Any) -> fshard.Mean:
        for block, other in zip(p["blocks"], teacher["blocks"], strict=True):
            x = apply_block(block, x) + apply_block(other, x)
        return mean(x * p["head"] + teacher["scale"])

    def job(mesh: Any) -> dict[str, list[torch.Tensor]]:
        runs, x = {}, batch_of(mesh.get_rank())
        for key, choice in {"again": True, **CHOICES}.items():
            sharded = planned(mesh, "chain", choice, **SLOW)
            teacher = fshard.tree.map(lambda row: row * 0.5 + 0.1, planned(mesh, "chain", choice, **SLOW))
            value, grads = fshard.value_and_grad(distil)(sharded, x, teacher)
            product = fshard.hvp(chain)(sharded, grads, x)
            runs[key] = [value, *grads.tensors, *product.tensors]
        return runs

    for runs in simulated(job, shard=2, replicate=2):
        check_bits(runs)


def test_a_forward_that_begins_again_drops_copies_that_are_cut() -> None:
    """A part of a unit would be taken for the whole, after a transform inside the loss began the forward again."""
    whole = {"a": rand(5, 5, seed=1), "b": rand(5, seed=2), "c": rand(5, seed=3)}

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        h = torch.tanh(x @ p["a"])
        slope = torch.func.grad(lambda h: torch.sin(h * p["b"] * p["a"].sum()).sum())(h)
        return fshard.Mean((slope * p["c"]).square().sum(), len(x))

    def job(mesh: Any) -> dict[str, list[torch.Tensor]]:
        runs: dict[str, list[torch.Tensor]] = {}
        for key, choice in {"again": True, "cut": "shard", "mixed": {"a": "shard", "b": False, "c": True}}.items():
            plan = fshard.make_plan(whole, mesh, units=["a", "b", "c"], regather=choice, **SLOW)
            value, grads = fshard.value_and_grad(loss)(
                fshard.shard_params(whole, plan), rand(2, 5, seed=mesh.get_rank())
            )
            runs[key] = [value, *grads.tensors]
        return runs

    for runs in simulated(job, shard=2, replicate=2):
        check_bits(runs)


# --- traffic ---


def gathered_over(mesh: Any, name: str, regather: Any, **options: Any) -> dict[str, list[str]]:
    """Of each unit the axes it was gathered over, in order, in one forward and backward."""
    sharded = planned(mesh, name, regather, **SLOW, **options)
    with fshard.collectives.tally() as records:
        fshard.value_and_grad(CASES[name]["loss"])(sharded, batch_of(mesh.get_rank()))
    calls = records.select("all_gather")
    return {unit.name: [call.axis for call in calls if call.label == unit.name] for unit in sharded.plan.units}


FORWARD = ["shard", "replicate"]
GATHERED = {  # what is gathered of a block for the backward, after the forward
    "again": (True, FORWARD),
    "cut": ("shard", ["shard"]),
    "kept": (False, []),
    "by name": ({"blocks.1": "shard", "blocks.*": True}, {1: ["shard"], 0: FORWARD, 2: FORWARD}),
    "by patterns": ({"blocks.0": False, "blocks.*": "shard"}, {0: [], 1: ["shard"], 2: ["shard"]}),
}


@pytest.mark.parametrize("name", ["chain", "checkpointed", "frozen first, checkpointed"])
@pytest.mark.parametrize("choice", GATHERED)
def test_the_backward_gathers_over_the_axes_of_the_copy_alone(choice: str, name: str) -> None:
    """A backward would send over the slow axis what is on this host already, or gather what is here."""
    regather, backward = GATHERED[choice]
    for units in simulated(gathered_over, name, regather, shard=2, replicate=2):
        for i in range(3):
            expected = FORWARD + (backward[i] if isinstance(backward, dict) else backward)
            if name.startswith("frozen") and i == 0:  # no backward reads it
                expected = FORWARD
            assert units[f"blocks.{i}"] == expected, i


def test_a_second_use_in_the_forward_is_gathered_from_the_copy() -> None:
    """A unit used twice would be gathered over the slow axis twice."""
    for units in simulated(gathered_over, "shared across depth", "shard", shard=2, replicate=2):
        for i in range(3):
            assert units[f"blocks.{i}"].count("replicate") == 1
            assert units[f"blocks.{i}"].count("shard") >= 2


@pytest.mark.parametrize(("regather", "backward"), [(True, FORWARD), ("shard", ["shard"]), (False, [])], ids=str)
def test_frozen_units_stay_as_the_plan_says(regather: Any, backward: list[str]) -> None:
    """A frozen unit, of which no gradient says when its backward ends, would be gathered again over all axes."""
    for units in simulated(frozen_unit, regather, shard=2, replicate=2):
        assert units["blocks.1"] == FORWARD + backward


def frozen_unit(mesh: Any, regather: Any) -> dict[str, list[str]]:
    """What `gathered_over` gives for a stack whose second block is frozen."""
    return gathered_over(mesh, "chain", {"blocks.1": regather}, frozen="blocks.1")


def test_a_loss_without_a_backward_keeps_no_copy() -> None:
    """`evaluate` would take memory for a backward that does not come."""

    def job(mesh: Any) -> int:
        sharded = planned(mesh, "chain", "shard", **SLOW)
        watch = Watch(8 * sharded.plan.units[1].lengths[0] // 2)  # the bytes of a copy, and of nothing else
        with watch:
            fshard.evaluate(lambda p, x: mean(p["blocks"][0]["w"] * watch.alive()))(sharded, batch_of(0))
        return watch.peak

    # a gather over two axes has a first stage of this size
    assert max(simulated(job, shard=2, replicate=2)) <= 2


def graph_of(mesh: Any, name: str, regather: Any) -> tuple[dict[str, dict[str, int]], bool]:
    """How often a graph gathers each unit over each axis, and whether it has the bits of the eager run."""
    sharded, x = planned(mesh, name, regather, **SLOW), randn(3, 5, seed=mesh.get_rank())
    fn = fshard.value_and_grad(CASES[name]["loss"])
    lowered = fshard.jit(fn, bucket=0).lower(sharded, x)
    (value, grads), (expected, others) = lowered.compile("eager")(sharded, x), fn(sharded, x)
    same = torch.equal(value, expected) and all(map(torch.equal, grads.tensors, others.tensors))
    counts: dict[str, dict[str, int]] = {unit.name: {} for unit in sharded.plan.units}
    for traffic in lowered.collectives():
        if traffic.kind == "all_gather":
            counts[traffic.unit][traffic.axis] = traffic.count
    return counts, same


@pytest.mark.parametrize("name", ["chain", "checkpointed"])
@pytest.mark.parametrize("choice", GATHERED)
def test_a_graph_gathers_over_the_axes_of_the_copy_alone(choice: str, name: str) -> None:
    """A pass would gather units again over all axes, or the graph would have other bits."""
    regather, backward = GATHERED[choice]
    for counts, same in simulated(graph_of, name, regather, shard=2, replicate=2):
        assert same
        for i in range(3):
            axes = FORWARD + (backward[i] if isinstance(backward, dict) else backward)
            assert counts[f"blocks.{i}"] == {axis: axes.count(axis) for axis in FORWARD}, i


def test_a_function_that_gathers_by_itself_is_not_gathered_again_over_the_slow_axis() -> None:
    """The pass would repeat the last stage of a gather, which is the one over the slow axis."""

    def job(mesh: Any) -> list[int]:
        sharded = planned(mesh, "chain", "shard", **SLOW)

        def gradient(s: fshard.Sharded, x: torch.Tensor) -> fshard.Sharded:
            return torch.func.grad(lambda s: chain(fshard.gather_params(s), x).total)(s)

        lowered = fshard.jit(gradient, bucket=0).lower(sharded, randn(3, 5))
        return [t.count for t in lowered.collectives() if t.kind == "all_gather"]

    for counts in simulated(job, shard=2, replicate=2):
        assert counts == [1] * 10


def traffic_and_bits(mesh: Any) -> tuple[dict[str, Any], dict[str, list[torch.Tensor]]]:
    """What real processes gather, and the bits of every choice."""
    axes = {key: gathered_over(mesh, "checkpointed", regather) for key, (regather, _) in GATHERED.items()}
    tx = fshard.optim.adamw(1e-2)
    return axes, {key: two_steps(mesh, "chain", choice, tx, **SLOW) for key, choice in CHOICES.items()}


def test_processes_gather_and_compute_what_simulated_ranks_do() -> None:
    """In processes, whose buffers peers may read late, a copy would have other values."""
    ranks = [job(traffic_and_bits, shard=2, replicate=2) for job in (gloo, simulated)]
    for (axes, runs), (others, expected) in zip(*ranks, strict=True):
        assert axes == others
        check_bits(runs)
        assert all(map(torch.equal, runs["cut"], expected["cut"]))


# --- memory ---


def bytes_between(mesh: Any, regather: Any, loss: Any, depth: int = 4) -> tuple[int, int, int]:
    """Gathered buffers and copies of a block's size alive between forward and backward, and buffers afterwards."""
    params = chain_params(depth, dim=20)
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], regather=regather, **SLOW)
    sharded, length = fshard.shard_params(params, plan), sum(plan.units[1].lengths)
    full, part = Watch(8 * length), Watch(8 * length // 2)
    between: list[int] = []

    def observed(p: Any, x: torch.Tensor) -> fshard.Mean:
        out = loss(p, x)
        return fshard.Mean(Probe.apply(out.total, lambda: between.extend((full.alive(), part.alive()))), out.count)

    with full, part:
        fshard.value_and_grad(observed)(sharded, randn(3, 20, seed=mesh.get_rank()))
    return between[0], between[1], full.alive() + part.alive()


@pytest.mark.parametrize("loss", [chain, checkpointed])
def test_after_the_forward_that_is_alive_which_the_plan_says(loss: Any) -> None:
    """A unit's buffers would stay that the plan frees, or a copy would be as large as the unit."""
    expected = {
        "again": (True, (0, 0)),
        "kept": (False, (4, 0)),
        "cut": ("shard", (0, 4)),
        "one of each": ({"blocks.0": False, "blocks.1": "shard"}, (1, 1)),
    }
    for regather, (full, part) in expected.values():
        for counts in simulated(bytes_between, regather, loss, shard=2, replicate=2):
            # one gather for the backward is under way: a block's first stage, or its whole, has begun
            assert counts[0] - full in (0, 1), (regather, counts)
            assert counts[1] - part in (0, 1), (regather, counts)
            assert counts[2] == 0


def alive_in_backward(mesh: Any, regather: Any, frozen: Any) -> list[tuple[int, int]]:
    """How many buffers and copies of blocks are alive before the backward of each block, the last block first."""
    params, counts = chain_params(5, dim=20), list[tuple[int, int]]()
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], regather=regather, frozen=frozen, **SLOW)
    sharded, length = fshard.shard_params(params, plan), sum(plan.units[1].lengths)
    full, part = Watch(8 * length), Watch(8 * length // 2)

    def observed(p: Any, x: torch.Tensor) -> fshard.Mean:
        x = x * p["scale"]
        for block in p["blocks"]:
            x = Probe.apply(apply_block(block, x), lambda: counts.append((full.alive(), part.alive())))
        return mean(x * p["head"])

    with full, part:
        fshard.value_and_grad(observed)(sharded, randn(3, 20, seed=mesh.get_rank()))
    return counts


@pytest.mark.parametrize("frozen", [None, ["blocks.*"]], ids=str)
def test_what_stays_of_a_unit_ends_with_its_backward(frozen: Any) -> None:
    """All units, or all copies, would be alive until the whole backward has ended."""
    for counts in simulated(alive_in_backward, False, frozen, shard=2, replicate=2):
        assert counts[0][0] == 5
        assert counts[-1][0] <= 2  # also a buffer of gradients that is being reduced
    for counts in simulated(alive_in_backward, "shard", frozen, shard=2, replicate=2):
        parts = [part for _, part in counts]
        assert parts[0] - parts[-1] >= 3


# --- plans ---


def test_a_plan_says_what_stays() -> None:
    """Ranks with other choices would hang, or a plan would not show what it does."""

    def job(mesh: Any) -> tuple[list[Any], str, str]:
        regather = {"blocks.0": False, "blocks.*": "shard"}
        plan = fshard.make_plan(chain_params(), mesh, units=CHAIN["units"], regather=regather, **SLOW)
        same = fshard.make_plan(chain_params(), mesh, units=CHAIN["units"], regather=ALL, **SLOW)
        return [unit.regather for unit in plan.units], str(plan), same.describe() + str(same)

    for kept, table, same in simulate(job, shard=2, replicate=2):
        assert kept == ["True", "False", "shard", "shard", "True"]
        *head, _, columns, first, whole, two, last, _ = table.splitlines()
        assert "regather" not in "".join(head)
        assert columns.split()[-1] == "regather"
        assert [row.split()[-1] for row in (first, whole, two, last)] == ["True", "False", "shard", "True"]
        assert "regather=True" in same
        assert "regather=shard" not in same

    def other(mesh: Any) -> None:
        regather = {"blocks.1": mesh.get_rank() == 0}
        fshard.make_plan(chain_params(), mesh, units=CHAIN["units"], regather=regather)

    with pytest.raises(fshard.MismatchError, match=re.escape("regather=")):
        simulate(other, shard=2)


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "no such axis": ("gpu", ValueError, "regather='gpu': the mesh has no axis 'gpu', it has 'replicate', 'shard'"),
    "not the last": (
        {"blocks.*": "replicate"},
        ValueError,
        "regather['blocks.*']='replicate': expected the last axes of params_over=('replicate', 'shard'), in this order",
    ),
    "another order": (("shard", "replicate"), ValueError, "expected the last axes of params_over="),
    "no such unit": (
        {"blocks.9": False},
        ValueError,
        "regather: the pattern 'blocks.9' matches no unit; the units are '(first)', 'blocks.0', 'blocks.1', "
        "'blocks.2', '(last)'",
    ),
    "no root": (
        {"(root)": False},
        ValueError,
        "the pattern '(root)' matches no unit; the units are '(first)', 'blocks.0', 'blocks.1', 'blocks.2', '(last)'",
    ),
    "a leaf": ({"blocks.0.w": False}, ValueError, "the pattern 'blocks.0.w' matches no unit"),
    "too late": (
        {"blocks.*": True, "blocks.0": False},
        ValueError,
        "regather: the pattern 'blocks.0' chooses no unit: the patterns before it match all of its units, and the "
        "first that matches counts. Put it before them.",
    ),
    "a number": (4, TypeError, "regather=4: expected True, False, or names of the last axes of params_over"),
    "a number of a unit": ({"blocks.0": 1}, TypeError, "regather['blocks.0']=1: expected True, False, or names"),
    "a key": ({0: True}, TypeError, "regather: a key=0: expected the name of a unit, or a pattern such as 'blocks.*'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_choices_are_errors(name: str) -> None:
    """A choice that means nothing would be taken for another, or for none."""
    regather, kind, words = ERRORS[name]

    def job(mesh: Any) -> None:
        fshard.make_plan(chain_params(), mesh, units=CHAIN["units"], regather=regather, **SLOW)

    with pytest.raises(kind, match=re.escape(words)):
        simulate(job, shard=2, replicate=2)


def test_an_axis_that_parameters_are_not_cut_over_is_an_error() -> None:
    """A copy would be cut over ranks that hold the whole unit anyway."""
    with pytest.raises(ValueError, match=re.escape("expected the last axes of params_over=('shard',), in this order")):
        simulate(lambda mesh: fshard.make_plan(chain_params(), mesh, regather="replicate"), shard=2, replicate=2)


def test_one_device_takes_the_plan_of_a_mesh() -> None:
    """A script that names axes would not run on one device."""
    plan = fshard.make_plan(chain_params(), units=[], regather={"(root)": "shard"}, params_over=ALL)
    assert [unit.regather for unit in plan.units] == ["True"]
