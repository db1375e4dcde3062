"""In which order one forward and backward starts its collectives and waits for them: overlap, seen without a clock."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.logged import Event, Logged, Mark, at
from support.worlds import simulated
from torch.multiprocessing.reductions import StorageWeakRef

import fshard
from fshard.testing import World


def events(mesh: Any, strategy: dict[str, Any], depth: int = 4) -> list[Event]:
    """What one forward and backward through a stack of blocks starts, waits for and computes, in order."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(6, 6, generator=generator) for _ in range(depth)]
    logged = Logged(mesh)
    sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["*"], **strategy))
    log = logged.log

    def loss(p: Any, x: torch.Tensor) -> Any:
        for i in range(depth):
            x = Mark.apply(torch.tanh(x @ p[i]), log, str(i))
        return fshard.Sum(x.sum())

    log.clear()
    fshard.value_and_grad(loss)(sharded, torch.ones(2, 6, requires_grad=True) + mesh.get_rank())
    return log


FULL, KEEP = {}, {"regather": False}
REDUCED = {"full": FULL, "keep": KEEP, "ddp": {"params_over": (), "grads_over": (), "state_over": ()}}


@pytest.mark.parametrize("strategy", [FULL, KEEP])
def test_a_gather_starts_before_the_unit_ahead_of_it_is_computed_with(strategy: dict[str, Any]) -> None:
    """A gather would not overlap with the computation of the block before, or start too early and hold memory."""
    for log in simulated(events, strategy, shard=2):
        for i in range(1, 4):
            start, wait = at(log, "start", "all_gather", str(i))[0], at(log, "wait", "all_gather", str(i))[0]
            (before,) = at(log, "use", "forward", str(i - 1))
            assert at(log, "wait", "all_gather", str(i - 1))[0] < start < before < wait


def test_a_gather_for_the_backward_starts_a_unit_ahead() -> None:
    """In the backward a gather would not overlap with the block after."""
    for log in simulated(events, FULL, shard=2):
        again = {i: at(log, "start", "all_gather", str(i))[1] for i in range(3)}
        needed = {i: at(log, "wait", "all_gather", str(i))[1] for i in range(3)}
        needed[3] = at(log, "start", "all_reduce", "loss")[0]
        for i in (2, 1, 0):
            assert needed[i + 1] < again[i] < at(log, "start", "reduce_scatter", str(i + 1))[0]
            assert again[i] < at(log, "use", "backward", str(i))[0] < needed[i]
        assert [len(at(log, "start", "all_gather", str(i))) for i in range(4)] == [2, 2, 2, 1]


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduction_is_waited_for_once_the_next_has_started(name: str) -> None:
    """A reduction would be waited for at once, and not overlap, or too late, and hold memory."""
    kind = "all_reduce" if name == "ddp" else "reduce_scatter"
    for log in simulated(events, REDUCED[name], shard=2):
        start = {i: at(log, "start", kind, str(i))[0] for i in range(4)}
        wait = {i: at(log, "wait", kind, str(i))[0] for i in range(4)}
        assert start[3] < start[2] < start[1] < start[0]
        for i in (3, 2, 1):
            assert start[i] < at(log, "use", "backward", str(i - 1))[0] < start[i - 1] < wait[i]
        for i in (3, 2):
            assert wait[i] < start[i - 2]
        under_way = [sum(start[i] <= t < wait[i] for i in range(4)) for t in range(len(log))]
        assert max(under_way) == 2


# the order of the tree, and the leaves that are read before and after the layers
ENDS = {
    "an embedding after the layers": (("layers", "z"), "z", None),
    "both after the layers": (("layers", "a", "z"), "a", "z"),
    "ends": (("a", "layers", "z"), "a", "z"),
    "a head": (("layers", "z"), None, "z"),
    "a tied head": (("a", "layers"), "a", "a"),
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_layers_are_reduced_in_the_backward_whatever_is_read_before_and_after_them(name: str, ends: str) -> None:
    """All reductions would wait for the gradient of what is read first, the last one to come."""
    strategy = {"ddp": REDUCED["ddp"], "zero2": {"params_over": ()}}[name]
    order, first, last = ENDS[ends]

    def job(mesh: Any) -> list[Event]:
        params = {key: [torch.eye(6) for _ in range(3)] if key == "layers" else torch.eye(6) for key in order}
        logged = Logged(mesh)
        sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["layers.*"], **strategy))
        log = logged.log

        def loss(p: Any, x: torch.Tensor) -> Any:
            x = x @ p[first] if first else x
            for i in range(3):
                x = Mark.apply(torch.tanh(x @ p["layers"][i]), log, str(i))
            return fshard.Sum((x @ p[last] if last else x).sum())

        log.clear()
        fshard.value_and_grad(loss)(sharded, torch.ones(2, 6) + mesh.get_rank())
        return log

    for log in simulated(job, shard=2):
        for i in (2, 1):
            (start,) = at(log, "start", "all_reduce" if name == "ddp" else "reduce_scatter", f"layers.{i}")
            assert start < at(log, "use", "backward", str(i - 1))[0]


def test_the_whole_order_of_a_small_stack() -> None:
    """Some collective of a small model would start or end at another place than documented."""
    (log, *others) = simulated(events, FULL, 2, shard=3)
    assert all(other == log for other in others)
    assert log == [
        ("start", "all_gather", "0"),
        ("wait", "all_gather", "0"),
        ("start", "all_gather", "1"),
        ("use", "forward", "0"),
        ("wait", "all_gather", "1"),
        ("use", "forward", "1"),
        ("start", "all_reduce", "loss"),
        ("wait", "all_reduce", "loss"),
        ("start", "all_gather", "0"),
        ("use", "backward", "1"),
        ("start", "reduce_scatter", "1"),
        ("use", "backward", "0"),
        ("wait", "all_gather", "0"),
        ("start", "reduce_scatter", "0"),
        ("wait", "reduce_scatter", "1"),
        ("wait", "reduce_scatter", "0"),
    ]


LOSSES = {
    "mean": lambda x: fshard.Mean(x.sum(), x.numel()),
    "mean of a varying count": lambda x: fshard.Mean(x.sum(), x.square().sum()),
    "sum": lambda x: fshard.Sum(x.sum()),
    "scalar": lambda x: x.sum(),
}


def around_the_backward(
    mesh: Any, name: str, has_aux: bool, accumulate: int, strategy: dict[str, Any]
) -> list[list[Event]]:
    """What each micro-batch of a step starts, waits for and computes after its forward."""
    params, tx = [torch.full((6, 6), 0.1) for _ in range(3)], fshard.optim.sgd(0.1)
    logged = Logged(mesh)
    plan = fshard.make_plan(params, logged, units=["*"], **strategy)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    log = logged.log

    def loss_fn(p: Any, x: torch.Tensor) -> Any:
        for i in range(3):
            x = Mark.apply(torch.tanh(x @ p[i]), log, str(i))
        return (LOSSES[name](x), 0) if has_aux else LOSSES[name](x)

    log.clear()
    batch = torch.ones(2 * accumulate, 6, requires_grad=True) + mesh.get_rank()
    fshard.train_step(loss_fn, tx, has_aux=has_aux, accumulate=accumulate)(state, batch)
    # it is gathered once more in each backward, if it was not kept
    begins = [*at(log, "start", "all_gather", "0")[:: 1 if strategy else 2], len(log)]
    return [log[at(log, "use", "forward", "2")[i] : begins[i + 1]] for i in range(accumulate)]


def steps_of(log: list[Event]) -> dict[str, int]:
    """Where the loss is summed over ranks, and where the backward starts to gather, to compute and to reduce."""
    names = {("start", "all_reduce", "loss"): "sum", ("wait", "all_reduce", "loss"): "summed"}
    names |= {("start", "all_gather", "1"): "gather", ("use", "backward", "2"): "backward"}
    names |= {("start", "reduce_scatter", "0"): "last reduction"}
    return {names[event]: i for i, event in enumerate(log) if event in names}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 2, "replicate": 2}])
@pytest.mark.parametrize("strategy", [FULL, KEEP])
def test_the_sum_of_the_loss_is_not_behind_the_first_gather_of_the_backward(
    strategy: dict[str, Any], name: str, has_aux: bool, accumulate: int, axes: dict[str, int]
) -> None:
    """The loss's small collective would wait until a unit has been gathered. Or ranks would gather in the backward
    before they know that all will gather the same; or a backward that gathers nothing would wait for a sum that it
    does not need: those of scalars and sums, and of all micro-batches but the first."""
    if accumulate > 1 and "varying" in name:
        return  # an error: test_step.py
    for parts in simulated(around_the_backward, name, has_aux, accumulate, strategy, **axes):
        assert len(parts) == accumulate
        for number, log in enumerate(parts):
            step = steps_of(log)
            assert step["sum"] < step["backward"]
            if strategy == FULL:
                assert step["summed"] < step["gather"] < step["backward"]
            elif "mean" in name and number == 0:  # the seed of the backward is 1 / count
                assert step["summed"] < step["backward"]
            else:
                assert step["last reduction"] < step["summed"]


OVER_BOTH = dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard"))


def test_the_second_stage_of_a_gather_is_under_way_beside_the_unit_before() -> None:
    """Both stages of a gather run beside the two units before: otherwise the computation would wait for the network
    at every unit."""
    for log in simulated(events, OVER_BOTH, shard=2, replicate=2):
        uses = {(way, i): at(log, "use", way, str(i))[0] for way in ("forward", "backward") for i in range(4)}
        for i in (2, 3):
            (first, second, *_), (_, done, *_) = (at(log, what, "all_gather", str(i)) for what in ("start", "wait"))
            assert first < uses["forward", i - 2] < second < uses["forward", i - 1] < done < uses["forward", i]
        for i in (1, 0):
            (*_, first, second), (*_, done) = (at(log, what, "all_gather", str(i)) for what in ("start", "wait"))
            assert first < uses["backward", i + 1] < second < uses["backward", i] < done
            assert second < at(log, "start", "reduce_scatter", str(i + 1))[0]
        first, second = at(log, "start", "all_gather", "2")[2:]
        assert uses["forward", 3] < first < uses["backward", 3] < second < uses["backward", 2]
        assert [len(at(log, "start", "all_gather", str(i))) for i in range(4)] == [4, 4, 4, 2]


def test_the_third_stage_of_a_gather_is_under_way_beside_the_unit_before() -> None:
    """A stage that was taken for the next one would start when the unit is used, and not overlap."""
    over = dict.fromkeys(OVER_BOTH, ("a", "b", "c"))
    for log in World(axes=dict.fromkeys("abc", 2)).run(events, over, 6):
        uses = {i: at(log, "use", "forward", str(i))[0] for i in range(6)}
        for i in (4, 5):
            first, second, third, *_ = at(log, "start", "all_gather", str(i))
            assert first < uses[i - 3] < second < uses[i - 2] < third < uses[i - 1]


@pytest.mark.parametrize(("strategy", "kind"), [(FULL, "all_reduce"), (OVER_BOTH, "reduce_scatter")])
def test_the_second_stage_of_a_reduction_starts_with_the_next_unit(strategy: dict[str, Any], kind: str) -> None:
    """The second stage of a reduction would start late, and not overlap."""
    for log in simulated(events, strategy, shard=2, replicate=2):
        first = {i: at(log, "start", "reduce_scatter", str(i))[0] for i in range(4)}
        second = {i: at(log, "start", kind, str(i))[-1] for i in range(4)}
        done = {i: at(log, "wait", kind, str(i))[-1] for i in range(4)}
        for i in (3, 2):
            before = at(log, "use", "backward", str(i - 1))[0], at(log, "use", "backward", str(i - 2))[0]
            assert first[i] < before[0] < first[i - 1] < second[i] < before[1] < done[i]
        for i in (3, 2, 1):
            assert second[i - 1] < done[i]


def test_every_kind_of_a_unit_is_under_way_beside_the_next_unit() -> None:
    """Of a unit with two dtypes one reduction would be waited for at once."""

    def job(mesh: Any) -> list[Event]:
        params = [{"w": torch.ones(6, 6), "half": torch.ones(6, dtype=torch.bfloat16)} for _ in range(3)]
        logged = Logged(mesh)
        sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["*"]))

        def loss(p: Any) -> Any:
            x = torch.ones(2, 6, requires_grad=True)
            for i in range(3):
                x = Mark.apply(torch.tanh(x @ p[i]["w"]) * p[i]["half"].float(), logged.log, str(i))
            return fshard.Sum(x.sum())

        logged.log.clear()
        fshard.value_and_grad(loss)(sharded)
        return logged.log

    for log in simulated(job, shard=2):
        for i in (2, 1):
            starts, waits = (at(log, what, "reduce_scatter", str(i)) for what in ("start", "wait"))
            assert len(starts) == len(waits) == 2
            assert max(starts) < at(log, "use", "backward", str(i - 1))[0] < min(waits)


class Broken(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: Callable[[], None]) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.fail()


def broken(mesh: Any, where: str) -> tuple[list[Event], list[Event]]:
    """What is under way when a loss or its backward fails, and what happens afterwards."""
    params = [torch.ones(6, 6) for _ in range(4)]
    logged = Logged(mesh)
    sharded = fshard.shard_params(params, fshard.make_plan(params, logged, units=["*"], **OVER_BOTH))
    log, before = logged.log, list[Event]()

    def fail() -> None:
        before[:] = log
        raise ArithmeticError("stop here")

    def loss(p: Any) -> Any:
        x = torch.ones(2, 6, requires_grad=True)
        for i in range(4):
            x = Broken.apply(x, fail) if (where, i) == ("backward", 1) else x
            x = torch.tanh(x @ p[i])
            if (where, i) == ("forward", 1):
                fail()
        return fshard.Sum(x.sum())

    log.clear()
    with pytest.raises(ArithmeticError, match="stop here"):
        fshard.value_and_grad(loss)(sharded)
    return before, log[len(before) :]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_nothing_starts(where: str) -> None:
    """After an error a rank would start a collective that pairs with another one of ranks that go on."""
    for before, after in simulated(broken, where, shard=2, replicate=2):
        assert {event[0] for event in after} == {"wait"}
        started, waited = ([event[1:] for event in before + after if event[0] == what] for what in ("start", "wait"))
        assert sorted(started) == sorted(waited)


def kept_alive(mesh: Any, fails: bool) -> list[bool]:
    """Whether parameters and gradients are gone once nobody refers to them."""
    params = [{"a": torch.ones(300), "b": torch.ones(300)} for _ in range(2)]  # two leaves: a node of two outputs
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["*"]))

    def loss(p: Any) -> Any:
        total = sum((block["a"] * block["b"]).sum() for block in p)
        if fails:
            raise ArithmeticError("stop here")
        return fshard.Sum(total)

    refs = [StorageWeakRef(x.untyped_storage()) for x in sharded.tensors]
    try:
        _, grads = fshard.value_and_grad(loss)(sharded)
        refs += [StorageWeakRef(x.untyped_storage()) for x in grads.tensors]
        del grads
    except ArithmeticError:
        pass
    del sharded
    gc.collect()
    return [ref.expired() for ref in refs]


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_and_backward_keeps_nothing_alive(fails: bool) -> None:
    """A step would leave a reference cycle that holds the parameters."""
    for gone in simulated(kept_alive, fails, shard=2):
        assert gone
        assert all(gone)
