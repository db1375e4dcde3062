"""`elastic.run`: processes that are killed or come, in any round and place, and the bits of those that go on."""

import pickle
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.models import same_bits
from support.rounds import PLACES, STEPS, Death, Run, process, save_step_two
from support.survivors import joined
from support.worlds import Fate, fates

from fshard import elastic
from fshard.testing import simulate


def ends(run: Run, processes: int) -> list[Fate]:
    """How the processes of a run end; the store is in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return fates(process, store.port, run, shard=processes)


def check(run: Run, processes: int, segments: tuple[tuple[int, int], ...], killed: int) -> None:
    """All that were not killed have the state of these segments, (ranks, first step)."""
    found = ends(run, processes)
    assert [fate.exitcode for fate in found].count(-9) == killed, found
    left = [fate for fate in found if fate.exitcode != -9]
    assert {(fate.error, fate.exitcode) for fate in left} == {(None, 0)}, found
    results = [pickle.loads(fate.value) for fate in left if isinstance(fate.value, bytes)]
    assert len(results) == segments[-1][0]
    expected = joined(run.kind, segments, STEPS)
    for whole, rounds, told in results:
        assert same_bits(whole, expected), rounds
        assert not told
        assert rounds[-1] == segments[-1]


@pytest.mark.parametrize(
    ("place", "segments"),
    [
        (PLACES[0], ((2, 0),)),
        (PLACES[1], ((3, 0), (2, 2))),
        (PLACES[2], ((3, 0), (2, 2))),
        (PLACES[3], ((3, 0), (2, 3))),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["zero3", "zero1", "donated"])
def test_a_killed_process(kind: str, rank: int, place: str, segments: Any) -> None:
    """Two of three go on from the last state that all have kept, with its bits; none waits for its timeout."""
    check(Run(kind, 3, [Death(1, rank, 0 if place == PLACES[0] else 2, place)]), 3, segments, 1)


@pytest.mark.parametrize(
    ("deaths", "segments"),
    [
        ([Death(1, 1, 1, PLACES[1]), Death(2, 0, 3, PLACES[2])], ((4, 0), (3, 1), (2, 3))),
        ([Death(1, 0, 2, PLACES[1]), Death(1, 2, 2, PLACES[1])], ((4, 0), (2, 2))),
        ([Death(1, 3, 2, PLACES[2]), Death(2, 1, 0, PLACES[0])], ((4, 0), (2, 2))),
        ([Death(1, 3, 0, PLACES[3]), Death(2, 1, 1, PLACES[1]), Death(3, 0, 1, PLACES[2])], ((4, 0), (1, 1))),
    ],
)
def test_several_are_killed(deaths: list[Death], segments: tuple[tuple[int, int], ...]) -> None:
    """One after the other, two that are no neighbours at once, and one while a round begins."""
    check(Run("zero3", 4, deaths), 4, segments, len(deaths))


def test_a_newcomer_is_let_in() -> None:
    """A process that comes later trains from the next step on, and all go on with its number of ranks."""
    check(Run("zero3", 2, comes_at=1), 3, ((2, 0), (3, 2)), 0)


def test_a_spare_takes_the_place() -> None:
    """A spare has nothing, and holds a part of the state in the round after a death."""
    check(Run("zero2", 3, [Death(1, 1, 2, PLACES[1])], spares=1), 3, ((2, 0), (1, 2)), 1)


def test_neighbours_are_lost(tmp_path: Path) -> None:
    """Without a checkpoint that is an error with the step and the leaf; with one the ranks go on from it."""
    deaths = [Death(1, 0, 3, PLACES[1]), Death(1, 1, 3, PLACES[1])]
    run = Run("zero3", 4, deaths)
    errors = [fate.error for fate in ends(run, 4) if fate.exitcode == 1]
    assert len(errors) == 2
    for error in errors:
        assert re.match(
            r"LostError: move: no state is whole: of step 3 \(round 1\), no rank has 'train\.params\.", error
        )
    saved = run._replace(folder=str(tmp_path))
    simulate(lambda mesh: save_step_two(mesh, saved), shard=2)
    found = ends(saved, 4)
    results = [pickle.loads(fate.value) for fate in found if isinstance(fate.value, bytes)]
    assert [rounds for _, rounds, _ in results] == [[(4, 2), (2, 2)]] * 2, found
    (told,) = (text for _, _, texts in results for text in texts)  # by one rank
    assert re.search(rf"no rank has 'train\.params.*\. The ranks go on from step 2 in {tmp_path}", told)
    assert same_bits(results[0][0], joined("zero3", ((2, 0), (2, 2)), STEPS))


def test_a_stopped_process(tmp_path: Path) -> None:
    """A process that is stopped is left behind after the timeout; when it wakes, the run is over, and its state old."""
    run = Run("zero3", 3, [Death(1, 1, 2, PLACES[1], signal.SIGSTOP)], wakes=True)
    check(run, 3, ((3, 0), (2, 2)), 0)


def test_an_error_that_comes_again_is_raised() -> None:
    """An error of the user's is no loss of ranks: the ranks try once more, and raise it."""
    errors = [fate.error for fate in ends(Run("zero3", 2, [Death(n, 1, 2, PLACES[1], 0) for n in (1, 2)]), 2)]
    assert "RuntimeError: an error of the user's" in errors
    assert None not in errors


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGKILL, 2), (0, 3)])
def test_a_rank_fails_when_the_others_are_done(number: int, ranks: int) -> None:
    """The others would end the run, and this rank return None with its error forgotten."""
    run = Run("zero3", 3, [Death(1, 1, STEPS, PLACES[4], number)])
    check(run, 3, ((3, 0), (ranks, STEPS)), 3 - ranks)


def test_what_a_run_refuses() -> None:
    """Numbers that are none, before anything is waited for."""
    meeting = elastic.Meeting(dist.HashStore())
    with pytest.raises(ValueError, match=r"elastic\.run: first=0"):
        elastic.run(lambda mesh, member: None, meeting, 0)
    with pytest.raises(ValueError, match=r"elastic\.run: timeout=0"):
        elastic.run(lambda mesh, member: None, meeting, 1, timeout=0)
    for used, text in ((2, "2"), (0, "0"), ({"replicate": 2, "shard": 0}, r"\{'replicate': 2, 'shard': 0\}")):
        with pytest.raises(ValueError, match=rf"use\(1\) returned {text}: expected 1 to 1 ranks"):
            elastic.run(lambda mesh, member: None, elastic.Meeting(dist.HashStore()), 1, use=lambda n, used=used: used)
    with pytest.raises(ValueError, match="Meeting: patience=-1"):
        elastic.Meeting(dist.HashStore(), patience=-1)
