"""`elastic.run`: processes that are killed or come, in any round and place, and the bits of those that go on."""

from typing import Any

import pytest
import torch.distributed as dist
from support.models import same_bits
from support.rounds import PLACES, STEPS, Death, Run, process
from support.survivors import joined
from support.worlds import Fate, fates


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
    results = [fate.value for fate in left if fate.value is not None]
    assert len(results) == segments[-1][0]
    expected = joined(run.kind, segments, STEPS)
    for whole, rounds in results:
        assert same_bits(whole, expected), rounds
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
