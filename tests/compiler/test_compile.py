"""Compiled steps give the numbers of eager steps: by `fshard.jit` with every backend, and by torch.compile."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from support.models import STRATEGIES, rand
from support.optimizers import KERNELS, ROWS, TRANSFORMS, _decay
from support.steps import EXACT, QUIET, alike, apart, batch, loss, params, rank_of, same_shapes, start
from support.wires import WIRES
from support.worlds import gloo, simulated

import fshard
from fshard import DynamicLossScale, StaticLossScale, optim
from fshard.compiler.trace import TraceError

pytestmark = pytest.mark.filterwarnings(QUIET)

# Eager updates of these end in a fused or foreach kernel of torch, and traced ones do not: their bits differ.
OTHERWISE = {*KERNELS, "from_torch-SGD"}
# These classes of torch.optim read the number of steps on the host, which a graph cannot hold.
READ = {"from_torch-Adam", "from_torch-Adafactor"}
SCHEDULED = optim.adamw(optim.schedules.warmup_cosine(0.1, 2, 8))


@pytest.fixture(autouse=True)
def _fresh():
    """Clear what dynamo has compiled before."""
    torch._dynamo.reset()


def by(backend: str) -> Any:
    """`fshard.jit` with a backend."""
    return partial(fshard.jit, backend=backend)


# --- jit: every transformation, and every kind of step ---


# These run through functionalization (aot_eager), which takes twice the time; the others run as they were traced.
FUNCTIONALIZED = {"adamw", "muon", "by_label", "adafactor", "clip_by_global_norm"}
FUNCTIONALIZED |= {"plan-wide-2x2", "plan-keep", "int8, keep", "wires", "accumulate", "tied leaves", "bf16"}


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name not in READ])
def test_every_optimizer(name):
    """A jitted step with any optimizer that can be traced has the eager numbers: otherwise training would change."""
    plan = {"block": ROWS[name].block}
    kw = {"tx": TRANSFORMS[name](), "plan": plan, "scale": StaticLossScale(4.0) if len(name) % 2 else None}
    for bits, far, _ in run(by("aot_eager" if name in FUNCTIONALIZED else "eager"), **kw):
        assert bits or name in OTHERWISE
        assert far <= 1e-12


@pytest.mark.parametrize("name", sorted(READ))
def test_an_optimizer_that_reads_tensors_is_an_error(name):
    """An optimizer that reads a tensor on the host is a TraceError: otherwise the graph would keep the first value."""
    with pytest.raises(TraceError, match="asks for the value of a tensor"):
        run(by("eager"), tx=TRANSFORMS[name]())


def run(compiled: Any, shard: int = 2, replicate: int = 1, **kw: Any) -> list[Any]:
    """Run `alike` on simulated ranks."""
    return simulated(partial(alike, compiled=compiled, **kw), shard=shard, replicate=replicate)


def tied() -> Any:
    """Parameters whose two layers share one matrix."""
    p = params()
    return {**p, "c": {"w": p["a"]["w"]}}


def with_aux(p: Any, b: Any) -> Any:
    """The loss, and a tree computed from this rank's rows, with leaves that are no tensors."""
    return loss(p, b), {"rows": b["x"].sum(1), "n": len(b["x"]), "none": None}


BF16 = {"whole": params(torch.float32), "dtype": torch.float32}
STEPS: dict[str, dict[str, Any]] = {
    **{f"plan-{name}": {"plan": STRATEGIES[name]} for name in ("ddp", "zero1", "zero2", "keep")},
    **{f"plan-{name}-2x2": {"plan": STRATEGIES[name], "replicate": 2} for name in ("full", "wide_state", "wide")},
    "one rank": {"shard": 1},
    "three ranks": {"shard": 3},
    "whole leaves": {"plan": {"whole": ["a.w"]}, "tx": optim.lamb(0.1)},
    "a frozen leaf": {"plan": {"frozen": ["a.b"]}},
    "tied leaves": {"whole": tied()},
    "one unit": {"plan": {"units": None}},
    "bf16": {**BF16, "plan": {"policy": "compute=bf16"}},
    "bf16, reduced so": {**BF16, "plan": {"policy": "compute=bf16,reduce=bf16"}},
    "dtypes together": {**BF16, "plan": {"policy": "compute=bf16; a.b: storage=f64,compute=bf16", "together": True}},
    **{f"params by {name}": {**BF16, "plan": {"param_wire": wire}} for name, wire in WIRES.items()},
    **{f"grads by {name}": {**BF16, "plan": {"grad_wire": wire}} for name, wire in WIRES.items()},
    "wires": {**BF16, "plan": {"grad_wire": WIRES["float8"]}, "scale": DynamicLossScale(4.0), "overflow": 1},
    "int8, keep": {
        **BF16,
        "plan": {"param_wire": WIRES["int8"], "grad_wire": WIRES["int8"], "regather": False},
        "shard": 3,
    },
    "static scale": {"scale": StaticLossScale(8.0), "overflow": 1},
    "dynamic scale": {"scale": DynamicLossScale(8.0, growth_interval=1), "overflow": 1},
    "no scale, overflow": {"overflow": 2},
    "clip": {"clip_norm": 0.1},
    "accumulate": {"accumulate": 2, "clip_norm": 0.1, "scale": DynamicLossScale(8.0), "overflow": 1},
    "reduce once": {"accumulate": 2, "reduce_once": True},
    "reduce once, ddp": {"accumulate": 2, "reduce_once": True, "plan": STRATEGIES["ddp"]},
    "fast": {"reduction": "fast"},
    "skip labels": {
        "tx": TRANSFORMS["by_label"](),
        "skip_labels": _decay,
        "scale": DynamicLossScale(8.0),
        "overflow": 1,
    },
    "schedule": {"tx": optim.scale_by_schedule(optim.schedules.linear(-0.1, -0.2, 3))},
    "extra": {"extra": {"n": torch.ones(2), "none": None}},
}


@pytest.mark.parametrize("name", STEPS)
def test_every_kind_of_step(name):
    """A jitted step of every kind has the eager numbers and skips the same updates: else training would change."""
    kw = STEPS[name]
    backend = "aot_eager" if name in FUNCTIONALIZED else "eager"
    for bits, far, (rows, state) in run(by(backend), **kw):
        assert bits or kw.get("tx", EXACT) is not EXACT
        assert far <= 1e-12
        bad = [i for i, row in enumerate(rows) if row["found_inf"]]
        assert bad == ([kw["overflow"]] if "overflow" in kw else [])
        if isinstance(kw.get("scale"), DynamicLossScale):
            grown = 4 if kw["scale"].growth_interval == 1 else 1
            assert state.loss_scale.value == kw["scale"].value * 0.5 * grown


def test_a_graph_as_it_is():
    """A graph that is run without functionalization keeps the eager bits: otherwise backend="eager" would be wrong."""
    for name in ("accumulate", "wires"):
        assert all(bits for bits, _, _ in run(by("eager"), **STEPS[name]))


def test_aux():
    """A jitted step returns the aux of the loss, tensors or not: otherwise users would lose what they log."""

    def law(mesh: Any) -> None:
        state, step = start(mesh, loss_fn=with_aux, has_aux=True, accumulate=2)
        for i in range(2):
            expected, row = step(state, batch(i, mesh.get_rank()))
            state, found = fshard.jit(step, backend="aot_eager")(state, batch(i, mesh.get_rank()))
            assert fshard.tree.flatten(found)[1] == fshard.tree.flatten(row)[1]
            assert apart([a["rows"] for a in found["aux"]], [a["rows"] for a in row["aux"]]) == 0
            assert [a["n"] for a in found["aux"]] == [2 + mesh.get_rank()] * 2
            assert apart(state.params.tensors, expected.params.tensors) == 0

    simulated(law)


# --- inductor ---


# One for each number of ranks: compiling takes most of the time.
LONG = {
    2: {"tx": optim.sgd(0.1, momentum=0.9), "plan": {"regather": True}},
    1: {"tx": optim.adamw(0.02), "plan": {"regather": False}},
}


def long_run(mesh: Any, shard: int) -> float:
    """How far eager and compiled steps are apart after twenty steps."""
    kw = {**LONG[shard], "num_steps": 20, "clip_norm": 1.0}
    return alike(mesh, by("inductor"), scale=DynamicLossScale(4.0), overflow=3, **kw)[1]


@pytest.mark.parametrize("shard", LONG)
def test_twenty_steps_in_processes(shard):
    """Twenty steps compiled by inductor stay within 1e-10 of eager ones: otherwise small errors would add up."""
    assert max(gloo(long_run, shard, shard=shard)) <= 1e-10


class Late:
    """A mesh on which an exchange sends and receives only when it is waited for."""

    def __init__(self, mesh: Any):
        self._mesh = mesh

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)

    def ranks(self, axis: str) -> Any:
        """The ranks along an axis of the mesh."""
        return LateRanks(self._mesh.ranks(axis))


class LateRanks:
    """The ranks along one axis, whose exchanges begin late."""

    def __init__(self, ranks: Any):
        self._ranks = ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def exchange(self, *args: Any) -> Any:
        """Record the exchange, to be run later."""
        return LateWork(self._ranks, args)


class LateWork:
    """An exchange that has not begun."""

    def __init__(self, ranks: Any, args: Any):
        self._ranks, self._args = ranks, args

    def wait(self) -> Any:
        """Run the exchange and wait for it."""
        return self._ranks.exchange(*self._args).wait()

    def done(self) -> None:
        """Do nothing: no memory is shared."""


LATE = {
    "adamw": {"tx": optim.adamw(0.1, weight_decay=0.1)},
    "int8": {"plan": {"grad_wire": WIRES["int8"], "param_wire": WIRES["int8"]}, **BF16},
}


@pytest.mark.parametrize(("name", "shard"), [("adamw", 1), ("adamw", 2), ("int8", 2)])
def test_nothing_is_used_again_while_it_is_sent(name, shard):
    """Inductor does not reuse a buffer that is being sent: otherwise another rank would receive other data."""
    kw = dict(LATE[name])
    far = [1e-10, 1e-4][name == "int8"]
    for _, gap, _ in simulated(lambda mesh: alike(Late(mesh), by("inductor"), **kw), shard=shard):
        assert gap <= far


# --- torch.compile ---


def compiled_with(backend: str, counters: list[Any], step: Any) -> Any:
    """A step under torch.compile, whose graphs are counted."""
    counters.append(torch._dynamo.testing.CompileCounterWithBackend(backend))
    return torch.compile(step, fullgraph=True, backend=counters[-1])


def compiles(mesh: Any, backend: str = "aot_eager", **kw: Any) -> None:
    """Assert that three steps under torch.compile give the eager numbers and need one graph."""
    torch._dynamo.reset()
    counters: list[Any] = []
    _, far, _ = alike(mesh, partial(compiled_with, backend, counters), **kw)
    assert far <= 1e-10
    assert [counter.frame_count for counter in counters] == [1]


OWN: dict[str, dict[str, Any]] = {
    "sgd": {"tx": optim.sgd(0.1)},
    "momentum": {"tx": optim.sgd(0.1, momentum=0.9)},
    "adamw": {"tx": optim.adamw(0.1)},
    "by_label": {"tx": TRANSFORMS["by_label"]()},
    "muon": {"tx": TRANSFORMS["muon"]()},
    "lamb": {"tx": TRANSFORMS["lamb"]()},
    "adamw_8bit": {"tx": TRANSFORMS["adamw_8bit"](), "plan": {"block": 4}},
    "schedule": {"tx": SCHEDULED, "extra": None},
    "extra": {"extra": {"n": torch.ones(2), "none": None}},
    "scale": {"scale": DynamicLossScale(8.0, growth_interval=1), "overflow": 1, "clip_norm": 0.1, "accumulate": 2},
    "skip labels": STEPS["skip labels"],
    "wires": STEPS["wires"],
    "ddp": {"plan": STRATEGIES["ddp"]},
}


@pytest.mark.parametrize(("name", "shard"), [*((n, 2) for n in OWN), *((n, 1) for n in ("sgd", "by_label", "scale"))])
def test_a_step_under_torch_compile(name, shard):
    """Three steps under torch.compile are one graph with the eager numbers: otherwise each would be compiled anew."""
    if shard == 1:
        compiles(None, **OWN[name])
    else:
        simulated(partial(compiles, **OWN[name]), shard=2)


def test_a_step_under_torch_compile_by_inductor():
    """torch.compile with inductor gives the eager numbers: otherwise users who compile would train another model."""
    simulated(partial(compiles, backend="inductor", tx=SCHEDULED, clip_norm=1.0), shard=2)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="dynamo of torch 2.11 does not follow optree")
def test_gathering_is_all_that_is_compiled():
    """Nothing else would have computed what a plan computes when it is asked first."""
    whole = {"w": torch.ones(3)}
    params = fshard.shard_params(whole, fshard.make_plan(whole))
    assert torch.equal(torch.compile(fshard.gather_params, backend="eager")(params)["w"], whole["w"])


def test_a_step_in_a_function_under_torch_compile():
    """A user's function around a step is one graph: otherwise an average of parameters would need a second one."""

    def law(mesh: Any) -> None:
        torch._dynamo.reset()
        state, step = start(mesh, optim.adamw(0.1), loss_fn=lambda p, b: (loss(p, b), b["x"].sum(1)), has_aux=True)

        def user(state: Any, data: Any, weight: float) -> Any:
            new, row = step(state, {"x": data["x"] * weight, "gain": data["gain"]})
            ema = fshard.tree.map(lambda a, b: 0.9 * a + 0.1 * b, state.params, new.params)
            return new, ema, {**row, "twice": 2 * row["loss"]}

        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast, other = torch.compile(user, fullgraph=True, backend=counter), state
        for i in range(3):
            data = batch(i, rank_of(mesh))
            state, ema, row = user(state, data, 0.5)
            other, ema2, row2 = fast(other, data, 0.5)
            assert same_shapes((state, ema, row), (other, ema2, row2))
            assert apart((state.params, ema, row["twice"]), (other.params, ema2, row2["twice"])) <= 1e-10
        assert counter.frame_count == 1

    law(None)
    simulated(law)


@pytest.mark.parametrize("partition", ["flat", "leaf"])
def test_zero_over_whole_parameters(partition):
    """A jitted update by `zero` gives the eager numbers: otherwise compiling would alter training with ZeRO."""

    def law(mesh: Any) -> None:
        tx = fshard.zero(optim.adamw(0.1), mesh, partition=partition)
        p, grads = params(), [params(), fshard.tree.map(torch.neg, params())]

        def update(g: Any, state: Any, p: Any) -> Any:
            updates, state = tx.update(g, state, p)
            return optim.apply_updates(p, updates), state

        fast = fshard.jit(update, backend="aot_eager")
        (one, state), (two, other) = (p, tx.init(p)), (p, tx.init(p))
        for g in grads:
            one, state = update(g, state, one)
            two, other = fast(g, other, two)
            assert apart((one, state), (two, other)) <= 1e-12

    simulated(law)


def test_the_comparison_can_fail():
    """A difference of 1e-9, or of a shape, is noticed: otherwise the tests of compiled steps would always pass."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    bits, far, _ = alike(None, lambda step: lambda s, b: step(s, {**b, "x": b["x"] * (1 + 1e-9)}))
    assert not bits
    assert 1e-10 < far < 1e-6
    assert not same_shapes(rand(3, seed=1), rand(4, seed=1))
