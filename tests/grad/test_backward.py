"""The table of a backward: a pure function of what a forward records, with letters for units."""

from itertools import takewhile
from sys import maxsize
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.grad.chain import Backward, Due, Event, Reread, backward_of

Checkpoint = tuple[int, int]  # its number, and that of the anchor before it
ONE, TWO, FIRST, SECOND = (1, 1), (2, 2), (1, 0), (2, 0)
TAPE: Any = None  # no row asks what gathers its unit
NUMBERS = {"a": 1, "b": 2, "c": 3, "f": 1}  # of anchors; the unit "f" is frozen, and was read after the anchor of "a"


def save(unit: str, outputs: int) -> Event[str]:
    """Autograd saves a place of a unit, when the chain has so many outputs."""
    return unit, Due(TAPE, outputs, None, NUMBERS[unit])


def read(unit: str, outputs: int, checkpoint: Checkpoint, nested: bool = False, new: bool = True) -> Event[str]:
    """A checkpoint reads a unit."""
    return unit, Reread(TAPE, outputs, checkpoint, nested, new)


def made(record: list[Event[str]], is_linked: bool = True) -> Backward[str]:
    """The table of a record."""
    saved = {unit: event is not None for unit, event in record if not isinstance(event, Reread)}  # by unit, at the end
    return backward_of(record, NUMBERS, lambda unit: unit != "f" or saved.get(unit, False), is_linked)


def row(before: int, until: int | None, early: int) -> Due:
    """A row of a table."""
    return Due(TAPE, before, until, early)


PLAIN = [save("a", 2), save("b", 3)]
CASES: dict[
    str, tuple[list[Event[str]], list[tuple[str, Due]]]
] = {  # a record, and the rows in order, the first one last
    "saved": (PLAIN, [("a", row(2, None, 1)), ("b", row(3, None, 2))]),
    "saved again": ([*PLAIN, save("a", 3)], [("b", row(3, None, 2)), ("a", row(3, None, 1))]),
    "used up in the forward": ([*PLAIN, ("b", None)], [("a", row(2, None, 1))]),
    "saved after it was used up": (
        [*PLAIN, ("a", None), save("a", 3)],
        [("b", row(3, None, 2)), ("a", row(3, None, 1))],
    ),
    # the checkpoint runs again as it ran before: its last unit is gathered last, before any anchor made in it runs
    "a checkpoint of two": (
        [save("a", 2), read("b", 3, ONE), read("c", 4, ONE)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 2, 1))],
    ),
    "a checkpoint inside a checkpoint": (
        [save("a", 2), read("b", 3, ONE, nested=True), read("c", 4, ONE)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 1, 1))],
    ),
    "read twice by a checkpoint": (
        [save("a", 2), read("b", 3, ONE), read("b", 3, ONE, new=False)],
        [("a", row(2, None, 1)), ("b", row(3, 2, 1))],
    ),
    "gathered twice by a checkpoint": (
        [save("a", 2), read("b", 3, ONE), read("b", 3, ONE)],
        [("a", row(2, None, 1)), ("b", row(3, 1, 1))],
    ),
    "two checkpoints of one unit": (
        [save("a", 2), read("b", 3, ONE), read("c", 4, ONE), read("b", 4, TWO)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 1, 1))],
    ),
    "saved after a checkpoint": (
        [save("a", 2), read("b", 3, ONE), save("b", 3)],
        [("a", row(2, None, 1)), ("b", row(3, 1, 1))],
    ),
    "a frozen unit in a checkpoint": (
        [save("a", 2), read("f", 2, FIRST)],
        [("a", row(2, None, 1)), ("f", row(2, None, 0))],
    ),
    "a frozen unit in two": ([read("f", 2, FIRST), read("f", 2, SECOND)], [("f", row(2, 0, 0))]),
    "a frozen unit, saved, too": ([save("f", 2), read("f", 2, FIRST)], [("f", row(2, 1, 0))]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_when_units_are_gathered_and_how_long_they_stay(name: str) -> None:
    """A rank would gather at another time than others, or drop a unit before a checkpoint that still reads it."""
    record, rows = CASES[name]
    assert [*made(record).due.items()] == rows
    assert {x: y.until for x, y in made(record, is_linked=False).due.items()} == dict.fromkeys(dict(rows))


def test_a_unit_without_a_row_may_still_be_tied() -> None:
    """A unit that a backward inside the loss used up would be gathered by each checkpoint that reads it, again."""
    found = made([save("b", 3), read("b", 3, ONE), ("b", None)])
    assert (found.due, found.reread, found.tied) == ({}, {"b"}, {"b"})


class Flags:
    """The same, kept up to date while the forward runs: the reference."""

    def __init__(self) -> None:
        self.order = dict[str, tuple[int, Checkpoint | None]]()  # outputs of the chain, and the checkpoint that read
        self.last, self.shared, self.saved = dict[str, Checkpoint](), set[str](), set[str]()
        self.anchor = dict[str, int]()

    def note(self, unit: str, event: Due | Reread | None) -> None:
        """Take one event."""
        known = self.order.get(unit)
        if isinstance(event, Due):
            self.saved.add(unit)
            self.order.pop(unit, None)
            self.order[unit] = event.before, None
        elif not isinstance(event, Reread):
            self.saved.discard(unit)
            self.order.pop(unit, None)
        else:
            is_known = known is not None and known[1] == event.checkpoint
            if (
                event.is_nested
                or (is_known and event.is_new)
                or self.last.get(unit, event.checkpoint) != event.checkpoint
            ):
                self.shared.add(unit)
            self.last[unit] = event.checkpoint
            if not is_known:
                self.anchor[unit] = min(self.anchor.get(unit, maxsize), event.checkpoint[1])
            if not is_known:
                others = [x for x in reversed(self.order) if x != unit]
                mine = [*takewhile(lambda x: self.order[x][1] == event.checkpoint, others)][::-1]
                for x in [unit, *mine]:
                    self.order.pop(x, None)
                self.order |= dict.fromkeys([unit, *mine], (event.before, event.checkpoint))

    def rows(self) -> list[tuple[str, Due]]:
        """The rows at the end."""
        return [(x, self.row(x, *self.order[x])) for x in self.order]

    def row(self, unit: str, before: int, checkpoint: Checkpoint | None) -> Due:
        """One of them."""
        early = min(NUMBERS[unit], self.anchor.get(unit, maxsize))
        tied = unit in self.last and (unit != "f" or unit in self.shared | self.saved)
        until = NUMBERS[unit] if checkpoint and unit not in self.shared else early
        return Due(TAPE, before, until if tied else None, early)


STEPS = st.tuples(st.sampled_from("abcf"), st.sampled_from(["save", "use up", *["read"] * 3]), st.integers(0, 7))


@pytest.mark.law
@given(st.lists(STEPS, max_size=14))
def test_the_table_is_what_flags_would_say(steps: list[tuple[str, str, int]]) -> None:
    """A backward would follow another order than the forward had."""
    flags, record, outputs, checkpoint = Flags(), list[Event[str]](), 4, (1, 2)
    for unit, what, number in steps:
        outputs += number % 2
        if number > 5:
            checkpoint = checkpoint[0] + 1, outputs - 2
        more = read(unit, outputs, checkpoint, number in (2, 3), number % 2 == 0)
        event = {"save": save(unit, outputs), "use up": (unit, None), "read": more}[what]
        record.append(event)
        flags.note(*event)
    assert [*made(record).due.items()] == flags.rows()
