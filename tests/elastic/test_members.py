"""A process of a run: the states that it may go on from, and the rounds that it enters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.survivors import new_state

from fshard import checkpoint, elastic
from fshard.elastic.meeting import Round
from fshard.testing import World


def enters(meeting: elastic.Meeting, number: int) -> None:
    """The word of a process in the store, that it enters a round."""
    place = meeting.store.add(f"entering/{number}", 1)
    meeting.store.set(f"entered/{number}/{place}", str(meeting.me))


def member_in(number: int, *held: elastic.Kept, store: dist.Store | None = None) -> elastic.RunMember:
    """A process that is alone in a round."""
    member = elastic.RunMember(elastic.Meeting(store or dist.HashStore()))
    member.round = Round(number, [member.meeting.me])
    member.held[:] = held
    return member


def test_a_rank_is_lost_before_all_hold_the_first_state() -> None:
    """A part of the first state would be taken for a state that is lost, and the run end before its first step."""
    kept = World(3).run(lambda mesh: elastic.keep(new_state(mesh, "zero3"), 0, round=1))
    like = new_state(None, "zero3")
    assert member_in(2, kept[0]).start(like) == (like, 0)
    member = member_in(2, kept[0])
    member.meeting.note_state(1)
    with pytest.raises(elastic.LostError, match=r"of step 0 \(round 1\), no rank has"):
        member.start(like)


def test_a_state_of_a_round_before_the_last(tmp_path: Path) -> None:
    """Steps would be made again from an old state, without a word and although there is a newer checkpoint."""
    like = {"w": torch.zeros(2)}
    for noted, step in ((1, 5), (2, None)):
        member = member_in(4, elastic.keep({"w": torch.ones(2)}, 5, round=1))
        for number in range(1, noted + 1):
            member.meeting.note_state(number)
        if step is not None:
            assert member.start(like)[1] == step
            continue
        with pytest.raises(elastic.LostError, match=r"are gone; the state of step 5 \(round 1\) is older"):
            member.start(like)
        checkpoint.save(tmp_path, {"w": torch.full((2,), 7.0)}, 9)
        with pytest.warns(UserWarning, match=r"is older\. The ranks go on from step 9"):
            state, step = member.start(like, tmp_path)
        assert (state["w"].tolist(), step) == ([7.0, 7.0], 9)


def test_a_process_outside_may_hold_what_is_gone(tmp_path: Path) -> None:
    """Ranks would go on from a checkpoint although a process that is late holds a later state, or wait for ever."""
    kept = World(3).run(lambda mesh: elastic.keep(new_state(mesh, "zero3"), 5, round=1))
    like = new_state(None, "zero3")
    checkpoint.save(tmp_path, like, 4)
    store = dist.HashStore()
    member, outside = member_in(2, kept[0], store=store), elastic.Meeting(store)
    member.meeting.note_state(1)
    for _ in range(2):
        with pytest.raises(elastic.LostError, match=r"of step 5 \(round 1\), no rank has"):
            member.start(like, tmp_path)
        assert member.awaits
    assert member.lost_at is not None
    member.lost_at -= member.timeout + member.meeting.patience + 1
    with pytest.warns(UserWarning, match="The ranks go on from step 4"):
        assert member.start(like, tmp_path)[1] == 4
    assert (member.awaits, member.lost_at) == (False, None)
    member.held[:] = [kept[0]]
    del outside
    with pytest.warns(UserWarning, match="The ranks go on from step 4"):
        member.start(like, tmp_path)


def test_steps_only_grow() -> None:
    """Two states of one step would be mixed, or a smaller step be made again from the larger one."""
    state = {"w": torch.ones(2)}
    member = member_in(1)
    with pytest.raises(ValueError, match=r"member\.keep: step=1: call member\.start first"):
        member.keep(state, 1)
    member.start(state)
    member.keep(state, 3)
    for step in (3, 2):
        with pytest.raises(ValueError, match=rf"member\.keep: step={step}: expected more than 3"):
            member.keep(state, step)
    member.round = Round(2, member.round.members)
    with pytest.raises(ValueError, match=r"call member\.start first"):
        member.keep(state, 4)


def test_an_error_after_the_end_is_raised() -> None:
    """A process with an error of its own would return None, as a spare does."""

    def train(mesh: Any, member: elastic.RunMember) -> None:
        member.meeting.end()
        raise RuntimeError("an error of the user's")

    with pytest.raises(RuntimeError, match="an error of the user's"):
        elastic.run(train, elastic.Meeting(dist.HashStore()), 1)


def test_a_process_dies_while_it_waits() -> None:
    """The others would wait for its rank until the timeout."""
    store = dist.HashStore()
    meeting, gone = elastic.Meeting(store), elastic.Meeting(store)
    enters(gone, 1)
    del gone  # closes its door
    assert meeting.enter(1) == Round(1, [1])


def test_all_of_the_first_round_are_gone() -> None:
    """A newcomer would wait for as many processes as a first round has."""
    store = dist.HashStore()
    assert elastic.Meeting(store).enter(1) == Round(1, [1])
    assert elastic.Meeting(store).enter(3) == Round(2, [2])


def test_a_newcomer_waits_for_members_that_train() -> None:
    """A newcomer would begin a round alone when the others only take long for a step, and end or change their run."""
    store = dist.HashStore()
    trains, newcomer = (elastic.Meeting(store, patience=1e-9) for _ in range(2))
    assert trains.enter(1) == Round(1, [1])
    looks = []

    def open_door() -> None:
        looks.append(trains.last_round().number)
        if len(looks) == 5:
            enters(trains, 2)

    newcomer._open_door = open_door  # type: ignore[method-assign]  # called once in each look
    assert newcomer.enter(1) == Round(2, [1, 2])
    assert looks == [1] * 5
