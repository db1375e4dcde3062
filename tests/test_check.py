"""Ranks that call different collectives, fail or are killed: every other rank gets an error, and no process hangs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support import faults
from support.faults import ALIVE, PLACES, Fault
from support.worlds import Fate, fates, gloo, simulated

import fshard
from fshard import optim

# The number of random faults; `FSHARD_FAULTS=50` tries more of them, which takes too long for every day.
NUM = int(os.environ.get("FSHARD_FAULTS", "3"))


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


def values(ranks: list[Fate]) -> list[Any]:
    """What ranks returned; none of them may have failed."""
    assert [rank.error for rank in ranks] == [None] * len(ranks)
    return [rank.value for rank in ranks]


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
