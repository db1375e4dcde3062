"""A guard says nothing of what is right, and names step, rank and leaf of what is not, on all ranks."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import ROWS
from support.steps import GUARDED as PLANS
from support.steps import QUIET
from support.worlds import gloo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import MismatchError, optim
from fshard.testing import World

pytestmark = pytest.mark.filterwarnings(QUIET)

WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, ""),
    "donate": ({"donate": True}, ""),
    "in backward": ({"donate": True, "in_backward": True}, ""),
    "accumulate": ({"accumulate": 2, "clip_norm": 0.1}, ""),
    "tree": ({"reduction": "tree"}, ""),
    "extra": ({"with_extra": True}, ""),
    "jit": ({}, "jit"),
    "jit, donated": ({}, "jit donated"),
}
OPTIMIZERS = {"adamw": lambda: optim.adamw(1e-2), "muon": lambda: optim.muon(1e-2), "scaled": lambda: optim.sgd(0.1)}


def whole() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {"w": torch.randn(5, 3, generator=draw), "b": torch.randn(7, generator=draw), "n": torch.arange(3)}


def loss(p: Any, x: Tensor) -> fshard.Mean:
    y = torch.nn.functional.dropout(torch.tanh(x @ p["w"]), 0.3)
    return fshard.Mean(y.square().sum() + p["b"].square().sum() * len(x), len(x))


def with_extra(p: Any, extra: Tensor, x: Tensor) -> tuple[fshard.Mean, Tensor]:
    return loss(p, x), extra + x.detach().sum()


Fault = Callable[[Any, Any], None]  # changes a new state or metrics


def disturbed(step: Any, mesh: Any, rank: int, run: int, fault: Fault) -> Any:
    """A step whose results are changed on one rank, in one of its runs; it donates as the other does."""
    runs = 0

    def call(state: Any, batch: Any) -> Any:
        nonlocal runs
        runs += 1
        new, metrics = step(state, batch)
        if runs == run and mesh.get_rank() == rank:
            fault(new, metrics)
        return new, metrics

    return call


def steps(
    mesh: Any,
    plan: str,
    way: str = "plain",
    optimizer: str = "adamw",
    guard: Any = None,
    disturb: Any = None,
    num: int = 4,
) -> Any:
    """Some steps, with a guard or without: the metrics, and whole parameters."""
    options, how = WAYS[way]
    tx, given = OPTIMIZERS[optimizer](), PLANS[plan]
    params = fshard.shard_params(whole(), fshard.make_plan(whole(), mesh, **given))
    scale = (
        fshard.DynamicLossScale(8.0, growth_interval=2)
        if optimizer == "scaled" and "in_backward" not in options
        else None
    )
    extra = torch.zeros(()) if "with_extra" in options else None
    state = fshard.init_state(params, tx, scale, extra=extra)
    step: Any = fshard.train_step(with_extra if extra is not None else loss, tx, **options)
    step = fshard.jit(step, backend="eager", donate="donated" in how) if how else step
    step = disturb(step, mesh) if disturb else step
    step = step if guard is None else fshard.guard(step, **guard)
    results = []
    for i in range(num):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + mesh.get_rank()))
        state, metrics = step(state, x)
        results.append([metrics[name] for name in ("loss", "grad_norm", "found_inf")])
    return results, fshard.gather_params(state.params), state.extra


def may(way: str, optimizer: str) -> bool:
    return not (way == "in backward" and optimizer != "adamw") and not (way == "extra" and optimizer == "scaled")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS)
def test_what_is_right_raises_nothing_and_has_the_same_bits(plan: str, way: str, optimizer: str) -> None:
    """A guard that cries wolf, or changes a bit, is taken off."""
    if not may(way, optimizer):
        pytest.skip("not a step")
    for world in (World(1), World(2), World(axes={"replicate": 2, "shard": 2})):
        plain = world.run(steps, plan, way, optimizer)
        guarded = world.run(steps, plan, way, optimizer, {"every": 2, "at_rest": True})
        for a, b in zip(fshard.tree.leaves(guarded), fshard.tree.leaves(plain), strict=True):
            assert torch.equal(a, b)


def errors(world: World, fn: Callable[..., Any], *args: Any) -> list[str]:
    """What each rank raises."""

    def run(mesh: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            fn(mesh, *args)
        return str(caught.value)

    return world.run(run)


def weight(new: Any, metrics: Any) -> None:
    new.params.tensors[0].view(-1)[0] += 1


def moment(new: Any, metrics: Any) -> None:
    fshard.tree.leaves(new.opt_state)[-1].view(-1)[0] += 1


def metric(new: Any, metrics: Any) -> None:
    metrics["grad_norm"].add_(1)


FAULTS: dict[str, tuple[Fault, str]] = {"weight": (weight, "leaf 'params."), "metric": (metric, "metric 'grad_norm'")}
FAULTS |= {"moment": (moment, "leaf 'opt_state")}


@pytest.mark.parametrize("run", [2, 3])
@pytest.mark.parametrize("way", ["plain", "donate", "jit"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_that_differs_is_named_on_all_ranks(fault: str, way: str, run: int) -> None:
    """Of the second step, which runs twice, one run is wrong on one rank."""
    change, words = FAULTS[fault]
    disturb = lambda step, mesh: disturbed(step, mesh, 1, run, change)  # noqa: E731
    for text in errors(World(2), steps, "full", way, "adamw", {"every": 2}, disturb):
        assert "guard: step 1, rank 1, " + words in text, text


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("plan", "leaf"), [("ddp", "params.w"), ("some whole", "params.b")])
def test_copies_that_differ_are_named(plan: str, leaf: str, ranks: int) -> None:
    """A fault before the guarded step is in one copy of several."""

    def change(new: Any, metrics: Any) -> None:
        new.params.local_views()[leaf.removeprefix("params.")][0] += 1

    disturb = lambda step, mesh: disturbed(step, mesh, 1, 1, change)  # noqa: E731
    who = "rank 1 has another value than the other 2" if ranks == 3 else "ranks 0, 1 hold copies of it that differ"
    for text in errors(World(ranks), steps, plan, "plain", "adamw", {"every": 3}, disturb):
        assert f"guard: the state before step 2: leaf {leaf!r}: {who}" in text, text


def resting(mesh: Any, turn: bool, write: bool = False) -> None:
    """Two steps; between them a bit of a weight that no other rank holds turns on rank 1."""
    tx, x = optim.adamw(1e-2), torch.ones(4, 5, device=mesh.device_type)
    params = fshard.tree.map(lambda a: a.to(mesh.device_type), whole())
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    step = fshard.guard(fshard.train_step(loss, tx), every=100, at_rest=True)
    state, _ = step(state, x)
    if turn and mesh.get_rank() == 1:
        row = state.params.tensors[0]
        if write:
            row.view(-1)[0] += 1
        else:
            row.data[0] += 1  # which torch does not count
    step(state, x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_bit_that_turns_at_rest(device: str) -> None:
    """No other rank holds it, and both runs of a step would read it alike."""
    for text in errors(World(2, device=device), resting, True):
        assert "guard: the state before step 1, rank 1, leaf 'params." in text
        assert "nothing that torch counts has written to it" in text
    World(2, device=device).run(resting, False)
    World(2, device=device).run(resting, True, True)  # what the program wrote is meant


@pytest.mark.parametrize("leaf", ["a", "b", "c", "d"])
@pytest.mark.parametrize("of", ["params", "opt_state.mu"])
def test_the_leaf_of_a_bit_that_turns_at_rest(of: str, leaf: str) -> None:
    """The leaf before or after it, or one of another dtype, would be taken for it."""
    params = {"a": torch.ones(40), "b": torch.ones(40), "c": torch.ones(40).double(), "d": torch.ones(40).double()}
    tx = optim.adam(0.1)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    step = fshard.guard(fshard.train_step(lambda p, x: sum(p[k].sum() for k in p) * x.sum(), tx), at_rest=True)
    state, _ = step(state, torch.ones(1))
    held = state.params if of == "params" else state.opt_state.mu
    held.local_views()[leaf].data[20] += 1
    with pytest.raises(MismatchError, match=rf"rank 0, leaf '{of}\.{leaf}': its bits"):
        step(state, torch.ones(1))


class Reads(TorchDispatchMode):
    """Counts how often the host reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def test_at_rest_the_host_waits_once() -> None:
    """Each tensor of a state would be read by itself, and each read waits for the device."""
    params, tx, x = whole(), optim.adamw(1e-2), torch.ones(4, 5)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    counts = []
    for wrap in (lambda step: step, lambda step: fshard.guard(step, every=100, at_rest=True)):
        step = wrap(fshard.train_step(loss, tx))
        new, _ = step(state, x)
        with Reads() as reads:
            step(new, x)
        counts.append(reads.num)
    assert counts[1] - counts[0] == 2  # one for the comparison, one for the number of the step, which is on the host


def started(mesh: Any, tx: Any, **plan: Any) -> Any:
    return fshard.init_state(fshard.shard_params(whole(), fshard.make_plan(whole(), mesh, **plan)), tx)


@pytest.mark.parametrize("name", ROWS)
def test_every_optimizer(name: str) -> None:
    """Some state that each rank has of its own would be taken for a copy, or a copy for no one's."""

    def run(mesh: Any) -> None:
        row = ROWS[name]
        tx = row.make()
        state = started(mesh, tx, block=row.block, frozen="n")
        step = fshard.guard(fshard.train_step(loss, tx), every=1, at_rest=True)
        for i in range(2):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * i + mesh.get_rank()))
            state, _ = step(state, x)

    World(axes={"replicate": 2, "shard": 2}).run(run)


def test_states_that_are_not_the_last_one() -> None:
    """A retry, a copy, two states by turns, and a state whose memory begins anywhere, would raise."""

    def run(mesh: Any) -> None:
        tx, x = optim.adamw(1e-2), torch.ones(4, 5)
        step = fshard.guard(fshard.train_step(loss, tx), every=2, at_rest=True)
        first, _ = step(started(mesh, tx), x)
        again = copy.deepcopy(first)
        odd = fshard.tree.map(lambda a: torch.cat([a[:1], a])[1:] if a.dim() else a, first)
        for state in (first, again, first, odd, started(mesh, tx)):
            step(state, x)

    World(2).run(run)


def test_padding_of_a_copy_and_vectors_of_an_optimizer() -> None:
    """What no leaf has, and what lies in no shard, would be compared by nobody."""

    def run(mesh: Any, where: str) -> None:
        tx = optim.adafactor(1e-2)
        state = started(mesh, tx, whole="b")
        if mesh.get_rank() == 1:
            x = state.opt_state.row_var["w"] if where else state.params.tensors[1]
            x.view(-1)[-1] += 1
        fshard.guard(fshard.train_step(loss, tx), every=1)(state, torch.ones(4, 5))

    for where, name in {"": "params (padding)", "row": "opt_state.row_var.w"}.items():
        for text in errors(World(3), run, where):
            assert f"the state before step 0: leaf '{name}': rank 1 has another value than the other 2 ranks" in text


def test_what_is_wrapped() -> None:
    """A function with the fields of the step that it wraps would be taken for it; what is no step found late."""
    tx, x = optim.sgd(0.1), torch.ones(4, 5)
    plain, donating = fshard.train_step(loss, tx), fshard.train_step(loss, tx, donate=True)

    @functools.wraps(plain)
    def timed(state: Any, batch: Any) -> Any:
        new, metrics = donating(state, batch)
        return new, {name: value.item() for name, value in metrics.items()}

    fshard.guard(timed, every=1)(started(None, tx), x)
    for wrong in (lambda s, b: s, lambda s, b: (s, b), lambda s, b: (s, {}, 1)):
        with pytest.raises(TypeError, match="guard: expected a step that returns a TrainState and a dict of metrics"):
            fshard.guard(wrong, every=100)(started(None, tx), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("aux", ["number", "sparse", "more"])
def test_an_aux_that_differs(aux: str) -> None:
    """Numbers of python would not be compared, and what is not dense would be an error of another kind."""
    runs = 0

    def counts(p: Any, x: Tensor) -> Any:
        nonlocal runs
        runs += 1
        number = torch.eye(2) * runs
        return loss(p, x), {"number": runs, "sparse": number.to_sparse(), "more": [number] * runs}[aux]

    tx = optim.sgd(0.1)
    step = fshard.guard(fshard.train_step(counts, tx, has_aux=True), every=1)
    with pytest.raises(MismatchError, match=r"guard: step 0, rank 0.*metric 'aux"):
        step(started(None, tx), torch.ones(4, 5))


def test_an_aux_that_is_no_number() -> None:
    """Words and objects, such as the time of a run, would be a false alarm."""

    def timed(p: Any, x: Tensor) -> Any:
        return loss(p, x), {"object": object(), "words": f"{object()}", "number": 1}

    step = fshard.guard(fshard.train_step(timed, optim.sgd(0.1), has_aux=True), every=1)
    assert "at 0x" in step(started(None, optim.sgd(0.1)), torch.ones(4, 5))[1]["aux"]["words"]


def test_wrong_calls() -> None:
    """What is no step, or a graph, would be guarded by nothing."""
    with pytest.raises(TypeError, match="guard: step"):
        fshard.guard(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="guard: every"):
        fshard.guard(lambda s, b: (s, {}), every=0)
    with pytest.raises(TypeError, match="guard: at_rest"):
        fshard.guard(lambda s, b: (s, {}), at_rest=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a TrainState"):
        fshard.guard(lambda s, b: (s, {}))(3, 4)  # type: ignore[arg-type]

    def traced(mesh: Any) -> None:
        state = fshard.init_state(fshard.shard_params(whole(), fshard.make_plan(whole(), mesh)), OPTIMIZERS["adamw"]())
        step = fshard.guard(fshard.train_step(loss, OPTIMIZERS["adamw"]()))
        with pytest.raises(TypeError, match=r"guard: a graph runs its step once.*guard\(jit\(step\)\)"):
            fshard.jit(step, backend="eager")(state, torch.ones(4, 5))

    World(1).run(traced)


def checked(mesh: Any) -> Any:
    """A guard inside of a check, and one of a step that torch.compile has."""
    tx, x = optim.adamw(1e-2), torch.ones(4, 5)
    state = fshard.init_state(fshard.shard_params(whole(), fshard.make_plan(whole(), mesh)), tx)
    step = fshard.check(fshard.guard(fshard.train_step(loss, tx), every=1))
    state, metrics = step(state, x)
    compiled = fshard.guard(torch.compile(fshard.train_step(loss, tx), backend="eager"), every=1)
    return metrics["loss"], compiled(state, x)[1]["loss"], steps(mesh, "full", guard={"every": 2, "at_rest": True})


def test_in_processes() -> None:
    """What is guarded in simulated ranks would hang or cry wolf where it runs."""
    for a, b in zip(fshard.tree.leaves(gloo(checked)), fshard.tree.leaves(World(2).run(checked)), strict=True):
        assert torch.equal(a, b)


def a_thousand(mesh: Any, way: str) -> Any:
    """A thousand steps, of which a hundred run twice."""
    return steps(mesh, "ddp", way, guard={"every": 10, "at_rest": True}, num=1000)[1]


@pytest.mark.parametrize("way", ["donate", "jit"])
@pytest.mark.parametrize("run", [gloo, World(2).run], ids=["gloo", "simulated"])
def test_a_thousand_steps(run: Any, way: str) -> None:
    """A false alarm in a thousand steps stops each long run."""
    run(a_thousand, way)


def test_a_leaf_is_named_before_what_follows_from_it() -> None:
    """A norm differs because a leaf does, and does not say which."""
    params, tx = whole(), optim.adamw(1e-2)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    step, runs = fshard.train_step(loss, tx), iter((1.0, 2.0))

    def differs(state: Any, batch: Any) -> Any:
        new, metrics = step(state, batch)
        factor = next(runs)
        return dataclasses.replace(new, params=fshard.tree.map(lambda x: x * factor, new.params)), {
            **metrics,
            "grad_norm": metrics["grad_norm"] * factor,
        }

    with pytest.raises(MismatchError, match=r"leaf '.*params.*two runs differ"):
        fshard.guard(differs, every=1)(state, torch.ones(4, 5))
