"""`make_plan(offload="state")`: the optimizer's state in host memory, parameters and gradients on the device."""

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from support.accelerator import DEVICE, Mesh, on_accelerator
from support.models import LM_UNITS, NARROW, STRATEGIES, WORLDS, lm_batch, lm_params, mean_loss, same_bits
from support.offloaded import loss, model
from support.optimizers import TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import DynamicLossScale, checkpoint, optim
from fshard.core import tree
from fshard.core.random import HOST
from fshard.layout.pieces import Parts
from fshard.plan import ahead
from fshard.plan.plan import Plan
from fshard.testing import oracle, whole_state
from fshard.train import in_backward
from fshard.update import elementwise


def _decay(path: str, leaf: Tensor) -> str:
    return "decay" if leaf.dim() > 1 else "rest"


# Tensors as betas and momenta keep torch's fused kernels out, which round the last few elements of a row in another way
OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1, momentum=torch.tensor(0.9)),
    "adam": lambda: optim.adam(0.05, b1=torch.tensor(0.9)),
    "label": lambda: optim.by_label(
        {"decay": optim.adamw(0.05, b1=torch.tensor(0.9)), "rest": optim.sgd(0.1, momentum=torch.tensor(0.9))}, _decay
    ),
    "muon": lambda: optim.muon(0.02),
    "chain": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.05, b1=torch.tensor(0.9))),
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donate": {"donate": True},
    "micro": {"accumulate": 2},
    "in_backward": {"donate": True, "in_backward": True},
}
MORE: dict[str, dict[str, Any]] = {**STEPS, "once": {"accumulate": 2, "reduce_once": True, "clip_norm": 1.0}}


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CPUs act as devices with host memory of their own: the numbers of elements that one copy took to the host."""
    numels = list[int]()

    def to_host(x: Tensor) -> Tensor:
        numels.append(x.numel())
        return x.clone()

    monkeypatch.setattr(Plan, "state_crosses", property(lambda plan: plan.state_on_host))
    monkeypatch.setattr(ahead, "to_host", to_host)
    monkeypatch.setattr(elementwise, "near", lambda x, like: x.clone())
    return numels


def begun(mesh: Any, host: Any, tx: Any, strategy: str, scale: float | None = None) -> fshard.TrainState:
    """The first state of a small language model with leaves of odd sizes."""
    params = lm_params()
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, offload=host, whole="tail.left", **STRATEGIES[strategy])
    scaler = None if scale is None else DynamicLossScale(scale, growth_interval=1)
    return fshard.init_state(fshard.shard_params(params, plan), tx, scaler)


def trained(
    mesh: Any, host: Any, name: str, strategy: str, how: dict[str, Any], scale: float | None = None, jit: bool = False
) -> Any:
    """The whole state and the metrics after three steps."""
    tx = OPTIMIZERS[name]()
    state, metrics = begun(mesh, host, tx, strategy, scale), []
    run: Any = fshard.train_step(mean_loss, tx, **how)
    run = fshard.jit(run, backend="eager", donate=bool(how.get("donate"))) if jit else run
    for i in range(3):
        state, row = run(state, lm_batch(i, mesh.get_rank()))
        metrics.append(row)
    whole = whole_state(state)
    return whole.params, whole.opt_state, whole.loss_scale, metrics


CASES = [
    (world, strategy, name, how)
    for world, strategy, name, how in product(WORLDS, STRATEGIES, OPTIMIZERS, STEPS)
    if (world == "2x2" or (strategy in NARROW and name in ("sgd", "adam")))
    and not (how == "in_backward" and name in ("muon", "chain"))
]


@pytest.mark.law
@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize(("world", "strategy", "name", "how"), CASES)
def test_where_the_state_lies_changes_no_bit(world, strategy, name, how):
    """A unit would be updated with the state of another one, twice, or not at all."""
    replicate, shard = WORLDS[world]
    args = name, strategy, STEPS[how]
    away, near = (simulated(trained, host, *args, shard=shard, replicate=replicate) for host in ("state", None))
    assert same_bits(away, near)


@pytest.mark.law
@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("how", ["plain", "donate"])
@pytest.mark.parametrize(("world", "name"), [*product(["1", "2", "3", "4"], ["sgd", "adam"])])
def test_it_trains_as_one_device(world, name, how):
    """The law above would hold for two plans that are wrong alike."""
    shard = WORLDS[world][1]
    plain = oracle(mean_loss, OPTIMIZERS[name]())
    state = plain.init(lm_params())
    for i in range(3):
        state, _ = plain.step(state, [lm_batch(i, rank) for rank in range(shard)])
    expected = whole_state(state)
    for params, opt_state, *_ in simulated(trained, "state", name, "full", STEPS[how], shard=shard):
        assert same_bits(params, expected.params)
        assert same_bits(opt_state, expected.opt_state)


WITH_SCALAR = {"w": torch.arange(12.0).view(4, 3), "t": torch.tensor(2.0), "a": torch.ones(37)}


def step_of_scalars(mesh: Any, host: Any, tx: Any, **how: Any) -> tuple[fshard.TrainState, Any]:
    """A first state of leaves without dims among others, and a step."""
    plan = fshard.make_plan(WITH_SCALAR, mesh, units=["w"], offload=host)
    scale = DynamicLossScale(4.0) if "skip_labels" in how else None
    state = fshard.init_state(fshard.shard_params(WITH_SCALAR, plan), tx, scale)
    loss = lambda p, x: fshard.Mean((p["w"] * p["t"]).sin().sum() + (p["a"] * x.mean()).sum(), len(x))  # noqa: E731
    return state, fshard.train_step(loss, tx, **how)


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("name", [*OPTIMIZERS, "whole"])
def test_a_step_changes_nothing_that_it_is_given(name):
    """The state in host memory would be written to without `donate`, or a part of it that is on the device."""

    def law(mesh: Any) -> None:
        tx = optim.whole_leaves(optim.adamw(0.1)) if name == "whole" else OPTIMIZERS[name]()
        state, step = step_of_scalars(mesh, "state", tx)
        state, _ = step(state, torch.ones(2))
        before = tree.map(torch.clone, (state.params, state.opt_state))
        first, second = (step(state, torch.ones(2))[0] for _ in range(2))
        assert same_bits((state.params, state.opt_state), before)
        assert same_bits(first.params, second.params)

    simulated(law, shard=2)


@pytest.mark.usefixtures("crossing")
def test_sums_in_a_tree_are_those_of_one_rank():
    """Parts of an optimizer by labels would run fused kernels, which round the last elements of a row otherwise."""

    def law(mesh: Any, host: Any) -> Any:
        tx = optim.by_label({"x": optim.adamw(1e-2), "y": optim.adamw(1e-3)}, {"a": "x", "**": "y"})
        state, step = step_of_scalars(mesh, host, tx, reduction="tree")
        for i in range(3):
            state, _ = step(state, torch.linspace(0, 1 + i, 8).chunk(mesh.size())[mesh.get_rank()])
        return fshard.gather_params(state.params)

    (expected,) = simulated(law, None, shard=1)
    for num in (1, 2, 4):
        assert same_bits(simulated(law, "state", shard=num), [expected] * num)


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(("form", "over"), [("later", "leaves"), ("bfloat16", "leaves"), ("bfloat16", "elements")])
def test_a_state_may_take_another_form(form, over, donate):
    """A state would be cast to the form of its first one, or refused without a word of it."""
    first = {"later": lambda p: {"m": None}, "bfloat16": lambda p: {"m": tree.map(torch.zeros_like, p)}}[form]
    to = {"later": lambda g: g.clone(), "bfloat16": lambda g: g.bfloat16()}[form]
    update = lambda g, s, p=None, **_: (tree.map(lambda x: -0.1 * x, g), {"m": tree.map(to, g)})  # noqa: E731

    def law(mesh: Any, host: Any) -> Any:
        state, step = step_of_scalars(mesh, host, optim.Transform(first, update, over=over), donate=donate)
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        return fshard.gather_params(state.params), tree.leaves(state.opt_state)

    away, near = (simulated(law, host, shard=2) for host in ("state", None))
    assert same_bits(away, near)


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("host", [None, "state"])
def test_labels_of_another_optimizer_change_nothing(host):
    """A step would update one label, and then raise: the donated state would be half a new one."""

    def law(mesh: Any) -> None:
        tx = optim.by_label({"x": optim.sgd(0.1), "y": optim.sgd(0.1)}, {"a": "x", "**": "y"})
        state, step = step_of_scalars(mesh, host, tx, donate=True, skip_labels={"a": "x", "**": "z"})
        with pytest.raises(ValueError, match=r"found_inf is for .*, not for 'y'"):
            step(state, torch.ones(2))
        assert same_bits(fshard.gather_params(state.params), WITH_SCALAR)

    simulated(law, shard=2)


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_skips_the_update(name):
    """State that came to the device would go back though its update was skipped."""
    args = name, "full", {}, 2.0**1020
    away, near = (simulated(trained, host, *args, shard=2) for host in ("state", None))
    assert same_bits(away, near)
    assert near[0][3][0]["found_inf"] == 1


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize("how", ["plain", "donate"])
@pytest.mark.parametrize("name", ["sgd", "adam", "label", "muon"])
def test_in_a_graph(name, how):
    """A graph would update another state than that of a plan without the word."""
    args = name, "full", STEPS[how], None, True
    away, near = (simulated(trained, host, *args, shard=2) for host in ("state", None))
    assert same_bits(away, near)


def test_in_processes():
    """Simulated ranks would prove nothing about real processes."""
    args = "adam", "full", STEPS["donate"]
    assert same_bits(gloo(trained, "state", *args, shard=2), simulated(trained, None, *args, shard=2))


@pytest.mark.usefixtures("crossing")
@pytest.mark.parametrize(("old", "new"), [("state", None), (None, "state")])
@pytest.mark.parametrize("name", ["sgd", "adam", "label"])
def test_a_checkpoint_fits_both_plans(name, old, new, tmp_path):
    """A run could not go on where there is more memory on the device, or less."""

    def save(mesh: Any) -> None:
        tx = OPTIMIZERS[name]()
        state, _ = fshard.train_step(mean_loss, tx)(begun(mesh, old, tx, "full"), lm_batch(0, mesh.get_rank()))
        checkpoint.save(tmp_path, state, step=1)

    def restored(mesh: Any) -> Any:
        tx = OPTIMIZERS[name]()
        state = checkpoint.restore(tmp_path, begun(mesh, new, tx, "zero1"))
        for i in (1, 2):
            state, _ = fshard.train_step(mean_loss, tx, donate=True)(state, lm_batch(i, mesh.get_rank()))
        whole = whole_state(state)
        return whole.params, whole.opt_state

    simulated(save, shard=2)
    away, near = simulated(restored, shard=2), simulated(trained, None, name, "full", {}, shard=2)
    assert same_bits(away, [row[:2] for row in near])


def test_the_device_has_the_state_of_one_unit(crossing, monkeypatch):
    """A device that has no room for all state would have no room for an update."""
    at_once = list[int]()
    update = in_backward.update_part

    def counted(tx: Any, state: Any, params: Any, *args: Any, **extra: Any) -> Any:
        at_once.append(sum(x.numel() for x in params))
        return update(tx, state, params, *args, **extra)

    monkeypatch.setattr(in_backward, "update_part", counted)

    def law(mesh: Any) -> None:
        tx = optim.adam(0.1)
        state = begun(mesh, "state", tx, "full")
        rows = [row.length for row in state.params.view.rows.values()]
        at_once.clear()
        fshard.train_step(mean_loss, tx, donate=True)(state, lm_batch(0, mesh.get_rank()))
        assert sum(at_once) == sum(rows)
        assert max(at_once) == max(rows) < sum(rows) / 2

    simulated(law, shard=1)
    assert crossing


# Where rows lie: the accelerator is the meta device, which torch does not mix with the CPU.


@pytest.fixture
def device() -> Iterator[None]:
    """The simulated accelerator as the device of a mesh."""
    with on_accelerator():
        yield


def check(state: fshard.TrainState) -> None:
    """Rows of the optimizer's state are in host memory, everything else is on the device."""
    rows = [x for part in tree.nodes(state.opt_state, Parts) for x in part.tensors if x.dim()]
    assert all(x.device == HOST for x in rows)
    assert all(x.device == DEVICE for x in state.params.tensors)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("how", MORE)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_optimizer_has_its_state_in_host_memory(name, how):
    """An optimizer's state would fill the device, or an update would mix devices."""
    tx = TRANSFORMS[name]()
    if how == "in_backward" and not in_backward.is_by_elements(tx):
        pytest.skip("it must see all gradients")
    params = tree.map(lambda x: x.to(DEVICE), model())
    plan = fshard.make_plan(params, Mesh(), units=["blocks.*"], offload="state", block=4)
    scale = None if how == "in_backward" else DynamicLossScale(8.0)
    state = fshard.init_state(fshard.shard_params(params, plan), tx, scale)
    check(state)
    run = fshard.train_step(loss, tx, **MORE[how])
    for _ in range(2):
        state, metrics = run(state, torch.ones(4, 8, device=DEVICE))
        check(state)
        assert all(x.device == DEVICE for x in metrics.values())
    grads = fshard.value_and_grad(loss)(state.params, torch.ones(4, 8, device=DEVICE))[1]
    assert all(x.device == DEVICE for x in grads.tensors)
    whole = optim.state.gather_state(state.opt_state)
    again = optim.state.shard_state({path: x.cpu() for path, x in whole.items()}, state.opt_state)
    check(fshard.TrainState(state.params, again, state.loss_scale, state.step, state.rng, None))


@pytest.mark.parametrize("donate", [False, True])
def test_the_state_crosses_once_in_each_direction(donate):
    """More would cross than the state, or the host would wait for something else."""
    with on_accelerator() as apart:
        tx, params = optim.adamw(0.1), tree.map(lambda x: x.to(DEVICE), model())
        plan = fshard.make_plan(params, Mesh(), units=["blocks.*"], offload="state")
        state, run = (
            fshard.init_state(fshard.shard_params(params, plan), tx),
            fshard.train_step(loss, tx, donate=donate),
        )
        number = 2 * len(state.params.view.rows)  # of two moments
        apart.crossed.clear()
        run(state, torch.ones(4, 8, device=DEVICE))
    of_updates = {(to, place): count for (to, place), count in apart.crossed.items() if "elementwise" in place}
    assert of_updates == {("to the device", "elementwise.near"): number, ("to the host", "elementwise._put"): number}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("strategy", NARROW)
def test_under_every_strategy(strategy):
    """New parameters that are gathered would stay in host memory."""
    tx, params = optim.adamw(0.1), tree.map(lambda x: x.to(DEVICE), model())
    for how in MORE.values():
        plan = fshard.make_plan(params, Mesh(), units=["blocks.*"], offload="state", **STRATEGIES[strategy])
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        state, _ = fshard.train_step(loss, tx, **how)(state, torch.ones(4, 8, device=DEVICE))
        check(state)


def test_a_plan_says_so():
    """Ranks could disagree, and who reads a plan would look for the state on the device."""
    params = {"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}

    def law(mesh: Any) -> None:
        plans = [fshard.make_plan(params, mesh, offload=host) for host in (None, "state")]
        assert plans[0].fingerprint != plans[1].fingerprint
        assert "'a' float32 state-on-host[2]" in plans[1].describe()
        assert "'n' int64 frozen[2]" in plans[1].describe()
        assert "offload=state" in str(plans[1])
        assert not plans[1].state_crosses  # a CPU's memory is the host's

    simulated(law, shard=1)


def test_a_subtree_named_state_is_meant_itself():
    """A plan of old would keep other leaves in host memory than it did."""

    def law(mesh: Any) -> None:
        params = {"state": torch.ones(2), "a": torch.ones(2)}
        plan = fshard.make_plan(params, mesh, offload="state")
        assert [kind.host for kind in plan.kinds] == [False, True] or [kind.host for kind in plan.kinds] == [
            True,
            False,
        ]
        assert not plan.state_on_host

    simulated(law, shard=1)


@pytest.mark.parametrize(
    ("host", "error", "words"),
    [
        (1, TypeError, "offload=1: expected path patterns such as 'blocks.*' (one, or a list), or a predicate"),
        (1, TypeError, "; the word 'state' means the optimizer state alone"),
        (
            "stat",
            ValueError,
            "offload: the pattern 'stat' matches nothing; the tree's top level is 'a'; the word 'state'",
        ),
        (["state"], ValueError, "offload: the pattern 'state' matches nothing"),
    ],
)
def test_other_words_are_errors(host, error, words):
    """A typo would keep the state on the device."""
    with pytest.raises(error, match=re.escape(words)):
        fshard.make_plan({"a": torch.ones(2)}, fshard.AbstractMesh(shard=2), offload=host)
    with pytest.raises(ValueError, match=re.escape("offload='state': expected a mesh")):
        fshard.make_plan({"a": torch.ones(2)}, offload="state")


def test_an_estimate_does_not_count_it():
    """A step that fits would be said not to."""
    params = {"w": torch.empty(64, 64, device="meta")}
    tx, found = optim.adamw(0.1), {}
    for host in (None, "state"):
        plan = fshard.make_plan(params, fshard.AbstractMesh(shard=2), offload=host)
        state = fshard.eval_shape(lambda p, plan=plan: fshard.init_state(fshard.shard_params(p, plan), tx), params)
        run = fshard.train_step(lambda p, x: (x @ p["w"]).square().mean(), tx, donate=True)
        needed = fshard.estimate(run, state, torch.empty(8, 64))
        found[host] = {row.purpose: row.resident for row in needed.memory}, needed.peak.bytes, " ".join(needed.notes)
    (near, most, _), (away, least, said) = found[None], found["state"]
    assert away == {purpose: nbytes for purpose, nbytes in near.items() if purpose != "optimizer"}
    assert least < most
    assert "the optimizer's state is in host memory and not counted" in said


def test_the_rows_are_pinned_where_there_is_a_device(monkeypatch):
    """Copies beside the computation would block the host."""
    made = list[dict[str, Any]]()
    empty_like = torch.empty_like

    def recorded(x: Tensor, **how: Any) -> Tensor:
        made.append(how)
        return empty_like(x)

    monkeypatch.setattr(torch, "empty_like", recorded)
    ahead.to_host(torch.ones(2))
    assert made == [{"device": HOST, "pin_memory": True}]
