"""Ranks that call different collectives, fail or are killed: every other rank gets an error, and no process hangs."""

import _thread
import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import faults
from support.faults import ALIVE, PLACES, Fault
from support.heard import NUM, values
from support.worlds import by_process_groups, fates, gloo, simulated

import fshard
from fshard import optim
from fshard.comm.consensus import check_same
from fshard.train.describe import stamp_of


def names_both(text: str, fault: Fault) -> bool:
    """Whether an error names the rank at fault, another rank, what each of them did, and a user's line for both."""
    other = min({*range(fault.size)} - {fault.rank})
    said = [part for part in text.split("; ") if "faults.py:" in part]
    return len(said) == 2 and all(any(f"rank {r} " in part for part in said) for r in (fault.rank, other))


@pytest.mark.parametrize("over", ["host", "gloo"])
def test_a_fault_is_an_error_on_every_rank(over: str) -> None:
    """A fault of one rank is an error on both, and later calls still work: otherwise the ranks would hang."""
    ranks = fates(faults.in_a_row, over, ALIVE)
    assert [rank.error for rank in ranks] == [None, None]
    for number, rank in enumerate(ranks):
        texts, as_before = rank.value
        assert as_before
        for fault, text in zip(ALIVE, texts, strict=True):
            if fault.kind == "raise" and fault.rank == number:
                assert text == "ValueError: boom", fault
                continue
            assert text.startswith("MismatchError: "), (fault, text)
            assert names_both(text, fault), (fault, text)
            if fault.kind == "raise":
                assert text.startswith(f"MismatchError: rank {fault.rank} raised ValueError: boom at"), text
            elif fault.kind == "return":
                assert f"rank {fault.rank} has returned, having last called" in text, text
            else:
                assert "All ranks must call the same collectives in the same order." in text, text


def ended_well(fault: Fault) -> None:
    """Assert that every rank ends with an error that names a call, its own error, or the signal; no exit code is 0."""
    for number, rank in enumerate(fates(faults.fatal, fault, shard=fault.size)):
        if number == fault.rank and fault.kind == "kill":
            assert (rank.error, rank.exitcode) == (None, -9), fault
        elif number == fault.rank and fault.kind == "raise":
            assert (rank.error, rank.exitcode) == ("ValueError: boom", 1), fault
        else:
            assert rank.exitcode == 1, (fault, rank)
            assert (rank.error or "").startswith("MismatchError: "), (fault, rank)
            assert "axis='shard'" in rank.error, (fault, rank)
            told = any(words in rank.error for words in ("has gone", "raised MismatchError"))
            assert told or fault.kind != "kill", (fault, rank)


@pytest.mark.parametrize("over", ["host", "gloo"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_is_killed(place: str, over: str) -> None:
    """Ranks whose peer is killed end with an error that names their call: otherwise the job would hang."""
    ended_well(Fault("kill", place, 2, over, 3, checked=False))


@pytest.mark.parametrize("seed", range(NUM))
def test_a_random_fault(seed: int) -> None:
    """A random fault at a random place ends all ranks with an error: otherwise a rare failure would hang the job."""
    ended_well(faults.drawn(seed))


def test_a_rank_that_keeps_its_error(tmp_path: Path) -> None:
    """Who waits for a rank that waits for nobody any more, but holds the plan, would wait until the timeout."""
    first, second, *_ = values(fates(faults.keeps_its_error, str(tmp_path / "store"), shard=2, replicate=2))
    assert first.startswith("rank 1 of axis 'replicate' has gone (its process ended, or it let go of its plan) before")
    assert second.startswith(f"rank 0 of axis 'shard' has gone ({first}) before it took part in")


def uneven(mesh: Any, with_plan: bool, checked: bool, sent: int, expected: int) -> None:
    """Rank 0 sends so many rows to rank 1, which expects another number."""
    if with_plan:  # its connections carry the collectives of the mesh, too
        fshard.make_plan({"w": torch.ones(4)}, mesh)
    sizes = [([0, sent], [0, 1]), ([1, 0], [expected, 0])][mesh.get_local_rank("shard")]
    x = torch.ones(sum(sizes[0]), 2)
    call: Any = partial(fshard.all_to_all, x, mesh, "shard", sizes=sizes)
    if checked and mesh.get_local_rank("shard") == 0:
        call = fshard.jit(call, backend="eager")  # a graph sends as much
    (fshard.check(call, mesh) if checked else call)()


@pytest.mark.parametrize(("sent", "expected"), [(3, 2), (2, 3), (0, 2), (2, 0)])
def test_ranks_that_do_not_agree_on_sizes(sent: int, expected: int) -> None:
    """Rows that nobody sent would be random memory, or a part of the rows would be lost."""
    words = rf"sends {8 * sent} bytes where {8 * expected} are expected: both must give the same sizes"
    with pytest.raises(fshard.MismatchError, match=words):
        simulated(uneven, False, False, sent, expected)
    for with_plan in (False, True):
        for rank in fates(uneven, with_plan, True, sent, expected):
            assert re.search(f"MismatchError: .*rank 0 of axis 'shard', to rank 1, {words}", rank.error or ""), rank
    *_, receiver = fates(uneven, True, False, sent, expected)
    assert re.search(f"MismatchError: .*rank 0 of axis 'shard' {words}", receiver.error or "")


def test_who_waits_for_several_ranks_hears_whoever_comes_first(tmp_path: Path) -> None:
    """A rank that waits for two others gets the first error of either: otherwise a slow rank would delay it."""
    first, second, third = values(fates(faults.one_is_slow, str(tmp_path / "store"), shard=3))
    for text in (first, second):
        assert "rank 2 raised ValueError: boom at" in text
    assert third == "boom"


def test_errors_pass_on_along_the_axes_of_a_mesh() -> None:
    """On 2 x 2 ranks an error reaches those that share no axis with its rank: otherwise these would hang."""
    *all_heard, healthy = zip(*values(fates(faults.along_two_axes, shard=2, replicate=2)), strict=True)
    assert healthy == ("2.0",) * 4
    for heard in all_heard:
        assert heard[3] == "boom"
        for rank in (1, 2):
            assert "rank 3 raised ValueError: boom at" in heard[rank]
        assert "raised MismatchError: rank 3 raised ValueError: boom at" in heard[0]


def test_between_hosts() -> None:
    """Ranks on different hosts compare their calls over TCP: otherwise a mismatch between hosts would be a hang."""
    for texts in values(fates(faults.between_hosts, ["shape", "skip", "dtype"], shard=3)):
        shape, skip, dtype = texts
        assert "rank 0 all_reduce(float32[3], axis='shard') at" in shape
        assert "rank 1 all_reduce(float32[4], axis='shard') at" in shape
        assert "rank 1 has returned, having last called no collective at" in skip
        assert "rank 1 all_reduce(float64[3]" in dtype


def test_a_jitted_step() -> None:
    """The collectives of a compiled step are compared as well: otherwise a mismatch in a graph would be a hang."""
    fault = Fault("shape", "forward", 1)
    for by_hand, by_environment in values(fates(faults.jitted, fault)):
        for text in (by_hand, by_environment):
            assert "rank 0 all_reduce(float32[3], axis='shard') at" in text
            assert "rank 1 all_reduce(float32[4], axis='shard') at" in text
            assert names_both(text, fault)


def test_a_rank_that_listens_when_the_other_has_ended() -> None:
    """It would hear that the other has gone, and not which collective the other called, as the message says that is
    still to be read."""
    for text in values(fates(faults.listens_last)):
        assert "ranks called different collectives: rank 0 all_reduce" in text


def test_every_step_of_a_job() -> None:
    """FSHARD_CHECK=1 checks every step, and 0 opens no connection: otherwise users would edit code, or pay for it."""
    fault = Fault("label", "backward", 1)
    for off, on in values(fates(faults.by_environment, fault)):
        assert off == "no error"
        assert names_both(on, fault)


def test_a_word_that_the_environment_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value of FSHARD_CHECK is an error that lists the right ones: otherwise nothing would be checked."""
    monkeypatch.setenv("FSHARD_CHECK", "yes")
    with pytest.raises(ValueError, match=r"FSHARD_CHECK: expected 1 .* got 'yes'"):
        fshard.train_step(lambda p, x: p.sum(), optim.sgd(0.1))


def test_where_there_are_no_processes() -> None:
    """`check` changes nothing on one device and on simulated ranks: otherwise programs would need a case for each."""
    state, inner = faults.start(None, "host", optim.sgd(0.1)), optim.sgd(0.1)
    step = faults.step_of(inner, lambda place: None)
    x = faults.batch(0)
    assert torch.equal(fshard.check(step)(state, x)[1]["loss"], step(state, x)[1]["loss"])
    assert fshard.check(torch.neg, None)(torch.ones(())) == -1
    (texts, other) = simulated(lambda mesh: fshard.check(lambda: mesh.get_rank(), mesh)())
    assert (texts, other) == (0, 1)
    with pytest.raises(fshard.MismatchError, match=r"different collectives: rank 0 .*float32\[3\].*float32\[4\]"):
        simulated(lambda mesh: fshard.check(faults.DEEDS["shape"], mesh)(mesh, mesh.get_rank() == 1))


def test_a_call_that_says_no_mesh() -> None:
    """A checked call that gets no mesh is an error that says how to pass one: otherwise nothing would be compared."""
    with pytest.raises(TypeError, match=r"check: expected a Sharded .* got none.*fshard.check\(fn, mesh\)"):
        fshard.check(torch.neg)(torch.ones(()))


def plan_inside(mesh: Any) -> Any:
    """A checked function that makes a plan, which connects the ranks of a host."""

    def job(x: torch.Tensor) -> Any:
        whole = {"w": x}
        return fshard.gather_params(fshard.shard_params(whole, fshard.make_plan(whole, mesh)))

    return fshard.check(job, mesh)(torch.arange(5.0))


def test_a_plan_may_be_made_inside() -> None:
    """A checked function may make a plan: otherwise connecting its ranks would be taken for a mismatch, or hang."""
    for found in (*gloo(plan_inside), *simulated(plan_inside)):
        assert torch.equal(found["w"], torch.arange(5.0))


def heard_in(run: Callable[[Callable[[], None]], object], job: Callable[[], object]) -> str:
    """The error of a job that `run` runs, in a thread or a process of its own."""
    reader, writer = os.pipe()

    def told() -> None:
        try:
            job()
            os.write(writer, b"no error")
        except RuntimeError as failure:
            os.write(writer, str(failure).encode())

    run(told)
    text = os.read(reader, 1 << 16).decode()
    os.close(reader)
    os.close(writer)
    return text


def in_thread(job: Callable[[], None]) -> None:
    """Run in a second thread, beside which the first one does nothing."""
    thread = threading.Thread(target=job, name="second")
    thread.start()
    thread.join()


def in_child(job: Callable[[], None]) -> None:
    """Run in a forked process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads; of JAX, where another test has imported it
        child = os.fork()
    if not child:
        job()
        os._exit(0)
    os.waitpid(child, 0)


def intruded(mesh: Any, *more: Any) -> list[str]:
    """What is heard in a second thread and a forked process, over links and process groups; the first goes on."""
    whole, texts = {"w": torch.arange(5.0)}, list[str]()
    plan = fshard.make_plan(whole, mesh)
    shards = fshard.shard_params(whole, plan)

    def gather(over: Any) -> torch.Tensor:
        return fshard.all_gather(torch.tensor([mesh.get_rank()]), over, "shard")

    calls: list[Callable[[], object]] = [
        lambda: gather(plan.mesh),
        lambda: gather(mesh),
        lambda: fshard.gather_params(shards),
        lambda: fshard.make_plan(whole, mesh),
        lambda: fshard.check(lambda: None, mesh)(),
    ]
    fshard.check(lambda: None, mesh)()
    for call in calls[: -1 if isinstance(mesh, fshard.testing.SimulatedMesh) else None]:
        for run in (in_thread, in_child):
            texts.append(heard_in(run, call))
            assert gather(plan.mesh).tolist() == gather(mesh).tolist() == [0, 1]
            assert torch.equal(fshard.gather_params(shards)["w"], whole["w"])
    return texts


def test_a_second_thread_and_a_forked_process() -> None:
    """Both raise at once, and the first thread goes on: otherwise they would receive each other's messages."""
    for texts in (*gloo(intruded), *simulated(intruded)):
        assert all("'shard'" in text and ("second" in text or "forked process" in text) for text in texts), texts
        assert len(texts) in (8, 10)


def handed_on(mesh: Any) -> list[str]:
    """Collectives of a thread that then ends, of the first thread after it, and of one that Python did not start."""

    def gather() -> None:
        fshard.all_gather(torch.ones(1), mesh, "shard")

    def in_autograds(job: Callable[[], None]) -> None:
        _thread.start_new_thread(job, ())

    return [heard_in(run, gather) for run in (in_thread, lambda job: job(), in_autograds)]


def test_threads_one_after_another() -> None:
    """A mesh may be used after its thread has ended, and by autograd's threads: a GPU's backward would fail."""
    assert gloo(handed_on) == [["no error"] * 3] * 2


def plans_alone(mesh: Any) -> str:
    """One rank makes a plan while the other gathers; then both make it."""
    whole = {"w": torch.arange(5.0)}
    plan = fshard.make_plan(whole, mesh)
    shards, rank = fshard.shard_params(whole, plan), mesh.get_rank()
    with pytest.raises(fshard.MismatchError) as caught:
        fshard.gather_params(shards) if rank else fshard.make_plan(whole, mesh)
    again = fshard.make_plan(whole, mesh)
    assert torch.equal(fshard.gather_params(fshard.shard_params(whole, again))["w"], whole["w"])
    return str(caught.value)


def test_a_plan_on_one_rank() -> None:
    """Ranks of which one makes a plan and the other trains both raise at once: they would wait for half an hour."""
    for number, text in enumerate(gloo(plans_alone)):
        gathers, peer = "all_gather(float32[4], axis='shard') for unit '(root)'", f"rank {1 - number} of axis 'shard'"
        calls = ("make_plan", f"{peer} {gathers}") if number == 0 else (gathers, f"{peer} make_plan")
        assert text.startswith(f"ranks called different collectives: this rank {calls[0]}, {calls[1]}. All"), text


def plans_after_an_error(mesh: Any) -> torch.Tensor:
    """One rank's loss raises, and it makes a plan while the others sum theirs; then all go on."""
    whole = {"w": torch.arange(5.0)}
    shards, rank = fshard.shard_params(whole, fshard.make_plan(whole, mesh)), mesh.get_rank()

    def loss(p: Any) -> torch.Tensor:
        total = p["w"].sum()
        return total if rank else total + {}["no such key"]

    with pytest.raises(fshard.MismatchError if rank else KeyError):
        fshard.value_and_grad(loss)(shards)
    if not rank:
        with pytest.raises(fshard.MismatchError, match=r"this rank make_plan, rank [12] of axis 'shard' all_reduce"):
            fshard.make_plan(whole, mesh)
    return fshard.gather_params(fshard.shard_params(whole, fshard.make_plan(whole, mesh)))["w"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plan_after_an_error(ranks: int) -> None:
    """The others would wait for half an hour for what the rank has left out; and an answer that stayed unread would
    be taken for one to the next plan."""
    for w in gloo(plans_after_an_error, shard=ranks):
        assert torch.equal(w, torch.arange(5.0))


WAYS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"reduction": "tree"}, {"donate": True, "in_backward": True}]
APART = [(way, "eager", "step") for way in WAYS] + [(WAYS[2], "jitted", "step")]
APART += [(WAYS[0], how, what) for how, what in (("eager", "seed"), ("jitted", "step"), ("jitted", "seed"))]


def apart(mesh: Any, over: str, way: dict[str, Any], how: str, what: str) -> str:
    """What a rank hears of a step if one has an older state, or another seed."""
    inner, rank = optim.sgd(0.1), mesh.get_rank()
    step: Any = fshard.train_step(lambda p, x: (x @ p["w"]).square().sum(), inner, **way)
    step = fshard.jit(step, backend="eager") if how == "jitted" else step
    x = torch.ones(2, 5, dtype=torch.float64) + rank

    def first() -> fshard.TrainState:
        plan = fshard.make_plan(whole := {"w": x[0] - rank}, mesh)
        plan = plan if over == "host" else by_process_groups(plan, mesh)
        return fshard.init_state(fshard.shard_params(whole, plan), inner)

    older, newer = first(), step(first(), x)[0]
    state = replace(newer, rng=newer.rng + rank) if what == "seed" else (newer, older)[rank]
    try:
        step(state, x)
    except RuntimeError as failure:
        if isinstance(mesh, fshard.testing.SimulatedMesh) and isinstance(failure, fshard.MismatchError):
            raise
        return str(failure)
    return "no error"


def all_apart(mesh: Any) -> list[list[str]]:
    """What a process hears, case by case, over links and over process groups."""
    return [[apart(mesh, over, *case) for case in APART] for over in ("host", "gloo")]


def apart_in_a_world(case: tuple[dict[str, Any], str, str]) -> list[str]:
    """What simulated ranks hear: the first error ends all of them."""
    try:
        return simulated(apart, "host", *case)
    except fshard.MismatchError as failure:
        return [str(failure)]


def test_states_of_different_steps() -> None:
    """Ranks with states of different steps or seeds get an error: parameters would be half of each, silently."""
    worlds = [[apart_in_a_world(case) for case in APART]]
    worlds += [list(zip(*texts, strict=True)) for texts in zip(*gloo(all_apart), strict=True)]
    for over, cases in zip(("simulated", "host", "gloo"), worlds, strict=True):
        for (way, how, what), texts in zip(APART, cases, strict=True):
            for text in texts:
                if how == "jitted" or over == "gloo":
                    assert "ranks have states of different steps or seeds: restore the same" in text, (over, way, text)
                else:
                    assert all(f"{what}={n}" in text for n in (0, 1)), (over, way, text)


def between_others(mesh: Any, what: str) -> str:
    """What a rank hears in a graph if its step, or seed, is the mean of its neighbours'."""
    inner, whole = optim.sgd(0.1), {"w": torch.ones(5)}
    step = fshard.jit(fshard.train_step(lambda p, x: (x * p["w"]).sum(), inner), backend="eager")
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), inner)
    try:
        step(replace(state, **{what: getattr(state, what) + 1 + mesh.get_rank()}), torch.ones(5))
    except fshard.MismatchError:
        raise
    except RuntimeError as failure:
        return str(failure)
    return "no error"


@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("what", ["step", "rng"])
def test_a_rank_between_others_hears_of_them(what: str, ranks: int) -> None:
    """The mean of the ranks' steps may be one rank's own: it would go on, with an update that the others lack."""
    for text in simulated(between_others, what, shard=ranks):
        assert "ranks have states of different steps or seeds" in text


@pytest.mark.parametrize("far", [1, 1000, 2**16, 2**31 // 3])
@pytest.mark.parametrize("what", ["step", "seed"])
def test_the_place_of_no_rank_is_the_mean_of_others(what: str, far: int) -> None:
    """As above, for all threes of 200 steps or seeds that are equally far apart."""
    places = [places_of(what, number * far) for number in range(200)]
    for gap in range(1, 100):
        for before, place, after in zip(places, places[gap:], places[2 * gap :], strict=False):
            assert before + after != 2 * place


def places_of(what: str, number: int) -> int:
    x, zero = torch.tensor(number), torch.tensor(0)
    return int(stamp_of(*((x, zero) if what == "step" else (zero, x)), torch.device("cpu"))[1])


class Net(torch.nn.Module):
    """Two layers, and a dropout between them, which draws nothing in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        return self.last(self.drop(self.first(x)))


def part_of(apply: Any) -> Any:
    """The function of a module of which one submodule is in evaluation mode."""
    net = Net()
    net.drop.eval()
    return fshard.module.functionalize(net)[0]


MODES: dict[str, Callable[[Any], Any]] = {
    "training": lambda apply: apply,
    "evaluation": lambda apply: apply.eval,
    "training in part": part_of,
}
CALLS: dict[str, Callable[[Any, fshard.Sharded, torch.Tensor], Any]] = {
    "gradient": lambda loss, params, x: fshard.value_and_grad(loss)(params, x),
    "loss": lambda loss, params, x: fshard.evaluate(loss)(params, x),
    "step": lambda loss, params, x: fshard.train_step(loss, optim.sgd(0.1))(
        fshard.init_state(params, optim.sgd(0.1)), x
    ),
    "jitted": lambda loss, params, x: fshard.jit(fshard.value_and_grad(loss), backend="eager")(params, x),
    "beside": lambda loss, params, x: fshard.value_and_grad(
        lambda p, other, x: sum(w.sum() for w in p["last"].values()) + loss(other, x)
    )(params, params, x),
}


def in_modes(mesh: Any, call: str, modes: list[list[str]], over: str = "shard") -> None:
    """A loss that calls its module in this rank's modes, one after the other."""
    apply, params, buffers = fshard.module.functionalize(Net())
    functions = [MODES[mode](apply) for mode in modes[mesh.get_rank()]]
    params = fshard.tree.map(torch.ones_like, params)
    plan = fshard.make_plan(params, mesh, units=["first", "last"], params_over=over, grads_over=over)

    def loss(p: Any, x: torch.Tensor) -> Any:
        return sum(function(p, buffers, x)[0].sum() for function in functions)

    CALLS[call](loss, fshard.shard_params(params, plan), torch.ones(2, 3))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("other", ["evaluation", "training in part"])
def test_a_module_in_another_mode(other: str, call: str) -> None:
    """A module that one rank alone evaluates would train on otherwise there, without a word."""
    for run in (simulated, gloo) if call == "gradient" else (simulated,):
        with pytest.raises(
            fshard.MismatchError, match=rf"Net in training(?! in).*Net in {other}|Net in {other}.*Net in"
        ):
            run(in_modes, call, [["training"], [other]])


@pytest.mark.parametrize("call", CALLS)
def test_modes_that_ranks_share(call: str) -> None:
    """Modules in several modes, in any order, are no error; nor is what a rank does with whole parameters."""
    simulated(in_modes, call, [["training", "evaluation"], ["evaluation", "training"]])
    simulated(in_modes, call, [["training"], ["evaluation"]], ())


@pytest.mark.parametrize("after", [0, 10, 10**6])
@pytest.mark.parametrize("before", [0, 10, 10**6])
def test_a_long_description_is_quoted_where_it_differs(before: int, after: int) -> None:
    """An error that quotes a line of megabytes would hide what differs, and fill the log of every rank."""

    def compare(mesh: Any) -> None:
        check_same(mesh, "same\n" + before * "a" + f"rank={mesh.get_rank()}" + after * "b", "the text")

    with pytest.raises(fshard.MismatchError) as failure:
        simulated(compare)
    assert all(f"rank={rank}" in str(failure.value) for rank in (0, 1))
    assert len(str(failure.value)) < 2000
