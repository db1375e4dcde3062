"""A rank is lost, others come or return: those that are left go on with the bits of a run with their number."""

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.survivors import KINDS, Trail, axes_of, collectives, joined, new_state, one_round, segments

import fshard
from fshard import checkpoint, elastic
from fshard.elastic import Kept
from fshard.testing import World
from fshard.testing.scheduler import Dies, RankDied, Slow

STRIDE = 16
STEPS = 3


@pytest.mark.parametrize("first", range(STRIDE))
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_dies_at_any_collective(kind: str, first: int) -> None:
    """The others would go on with a state of no step, lose more than the step under way, or nothing would be left."""
    stride = STRIDE * 8 if KINDS[kind].jit else STRIDE
    for at in range(first, collectives(kind, 4, STEPS), stride):
        members, trail = [list[Kept]() for _ in range(4)], Trail()
        dead = at // 3 % 4
        lost = one_round(members, kind, 0, STEPS, trail, [Dies(dead, at)]) is None
        assert lost or at >= collectives(kind, 4, STEPS) - 1
        newest = [max((kept.key[1] for kept in held), default=0) for held in members]
        left = [held for number, held in enumerate(members) if number != dead]
        got = one_round(left, kind, 1, STEPS, trail)
        assert segments(trail)[-1][1] >= min(newest), (at, trail, newest)
        assert same_bits(got, joined(kind, segments(trail), STEPS)), (at, trail)


@pytest.mark.parametrize("dead", range(4))
@pytest.mark.parametrize("kind", ["two axes", "hsdp", "split"])
def test_a_rank_dies_when_the_next_round_begins(kind: str, dead: int) -> None:
    """Ranks that are ahead would drop the state from which the round began before all ranks have a new one."""
    for at in range(44, 56):  # from the first message of `keep` on
        members, trail = [list[Kept]() for _ in range(4)], Trail()
        one_round(members, kind, 0, 1, trail)
        assert one_round(members, kind, 1, 2, trail, [Slow(dead), Dies(dead, at)]) is None
        left = [held for number, held in enumerate(members) if number != dead]
        got = one_round(left, kind, 2, 2, trail)
        assert segments(trail)[-1][1] >= 1
        assert same_bits(got, joined(kind, segments(trail), 2)), (at, trail)


def covered(held: Sequence[Sequence[Kept]]) -> tuple[int, int] | None:
    """The last key of which every element is held, found element by element; None if there is none."""
    kept = [each for of_rank in held for each in of_rank if not each.life.given_away]
    for key in sorted({each.key for each in kept}, reverse=True):
        parts = [each for each in kept if each.key == key]
        there = {name: torch.zeros(form.numel, dtype=torch.bool) for name, form in parts[0].forms.items()}
        for name, begin, x in (part for each in parts for part in each.parts()):
            there[name][begin : begin + len(x)] = True
        if all(x.all() for x in there.values()):
            return key
    return None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not KINDS[kind].jit])
@pytest.mark.parametrize("seed", range(12))
def test_random_histories(kind: str, seed: int) -> None:
    """Parts of two histories would be mixed, a rank that comes or returns do harm, or a state be lost for nothing."""
    r = random.Random(f"{kind}{seed}")
    here, away, trail = [list[Kept]() for _ in range(r.randint(2, 6))], list[list[Kept]](), Trail()
    for number in range(7):
        last = number == 6
        faults = [] if last else [Dies(r.randrange(len(here)), r.randrange(80))]
        expected, begun = covered(here), trail.begun
        try:
            got = one_round(here, kind, number, 5, trail, faults)
        except elastic.LostError:
            assert begun
            assert expected is None
            trail.rounds.pop(number, None)
            here, away = [*here, *away][:6], [*here, *away][6:]  # who is elsewhere may hold what is missing
            if covered(here) is None:
                return
            continue
        if number in trail.rounds:
            assert trail.rounds[number][1] == expected
        if got is not None:
            assert same_bits(got, joined(kind, segments(trail), 5)), (number, trail)
        gone = {fault.rank for fault in faults if got is None} | (
            {r.randrange(len(here))} if r.random() < 0.4 else set()
        )
        left = [held for rank, held in enumerate(here) if rank not in gone]
        away += [here[rank] for rank in gone if r.random() < 0.5]  # taken for dead, and not dead
        r.shuffle(away)
        back = [away.pop() for _ in range(min(len(away), r.choice((0, 0, 1, 2))))]
        here = [*left, *back, *(list[Kept]() for _ in range(r.choice((0, 0, 1, 2))))][:6] or [[]]


def kept_on(kind: str, ranks: int, **options: Any) -> list[Kept]:
    """What each rank holds of a state."""
    return World(axes=axes_of(kind, ranks)).run(lambda mesh: elastic.keep(new_state(mesh, kind), 5, **options))


def moved(held: Sequence[Sequence[Kept]], kind: str, **options: Any) -> None:
    """A move of what ranks hold to a state of theirs."""
    world = World(axes=axes_of(kind, len(held)))
    world.run(lambda mesh: elastic.move(held[mesh.get_rank()], new_state(mesh, kind), **options))


@pytest.mark.parametrize("ranks", range(2, 7))
@pytest.mark.parametrize("distance", [1, 2])
def test_a_state_is_lost_if_both_holders_are(ranks: int, distance: int, tmp_path: Any) -> None:
    """A copy would lie at another rank than a user thinks, or ranks go on without some elements."""
    if distance % ranks == 0:
        return
    kept = kept_on("zero3", ranks, distance=distance)
    World(1).run(lambda mesh: checkpoint.save(tmp_path, new_state(mesh, "zero3"), 4))
    for dead in (gone for number in range(1, ranks) for gone in combinations(range(ranks), number)):
        left = [[kept[rank]] for rank in range(ranks) if rank not in dead]
        if any((rank + distance) % ranks in dead for rank in dead):
            with pytest.raises(
                elastic.LostError, match=r"of step 5 \(round 0\), no rank has '[\w.]+'\[\d+:\d+\].*Restore step 4 of"
            ):
                moved(left, "zero3", dir=tmp_path)
        else:
            moved(left, "zero3")


def test_a_state_of_replicas_is_lost_with_all_of_them() -> None:
    """Replicas would be sent for nothing, or a replica be missed."""
    kept = kept_on("hsdp", 4)
    for dead in (gone for number in range(1, 4) for gone in combinations(range(4), number)):
        left = [[kept[rank]] for rank in range(4) if rank not in dead]
        if {0, 2} <= {*dead} or {1, 3} <= {*dead}:
            with pytest.raises(elastic.LostError):
                moved(left, "hsdp")
        else:
            moved(left, "hsdp")


def test_the_state_before_the_last_stays_until_all_have_the_last() -> None:
    """Ranks that are ahead would overwrite the only state that all have."""

    def on_rank(mesh: Any, held: Sequence[list[Kept]], steps: int) -> None:
        state, mine = new_state(mesh, "two axes"), held[mesh.get_rank()]
        for step in range(steps):
            mine.append(elastic.keep(state, step, reuse=mine[-2] if step == 2 else None))

    def collectives_of(steps: int) -> int:
        world, held = World(axes=axes_of("two axes", 4)), [list[Kept]() for _ in range(4)]
        world.run(on_rank, held, steps)
        assert [of_rank[0].life.given_away for of_rank in held] == [steps == 3] * 4
        return sum(3 in one.ranks for one in world.log)

    assert collectives_of(3) > collectives_of(2)
    held = [list[Kept]() for _ in range(4)]
    with pytest.raises(RankDied):  # in the second exchange, along the axis of ranks 1 and 3
        World(axes=axes_of("two axes", 4), faults=[Slow(3), Dies(3, collectives_of(2) - 1)]).run(on_rank, held, 3)
    assert [len(of_rank) for of_rank in held] == [2, 1, 2, 1]
    assert covered(held[:3]) == (0, 0)
    moved(held[:3], "two axes")


def test_memory_is_reused() -> None:
    """A rank would have new memory for each step, which is slow at the first touch."""

    def on_rank(mesh: Any) -> None:
        state = new_state(mesh, "zero3")
        first = elastic.keep(state, 1)
        places = [block.data_ptr() for block in first.memory]
        again = elastic.keep(state, 2, reuse=first)
        assert [block.data_ptr() for block in again.memory] == places
        with pytest.raises(fshard.DonatedError, match=r"this Kept was given away"):
            elastic.keep(state, 3, reuse=first)
        assert elastic.last_whole([first], mesh) is None
        assert elastic.last_whole([first, again], mesh) == (0, 2)
        with pytest.raises(elastic.LostError, match="no rank holds a state"):
            elastic.move([first], state)

    World(3).run(on_rank)
