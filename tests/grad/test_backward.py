"""The table of a backward: a pure function of what a forward records, with letters for units."""

from itertools import takewhile
from sys import maxsize
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.grad.backward import Read, Row, Table, UsedUp, table

TAPE: Any = None  # no row asks what gathers its unit
NUMBERS = {"a": 1, "b": 2, "c": 3, "f": 1}  # of anchors; the unit "f" is frozen, and was read after the anchor of "a"
Event = tuple[str, Row | Read | UsedUp]


def save(unit: str, outputs: int) -> Event:
    """Autograd saves a place of a unit, when the chain has so many outputs."""
    return unit, Row(TAPE, outputs, None, NUMBERS[unit])


def read(unit: str, outputs: int, checkpoint: int, nested: bool = False, new: bool = True) -> Event:
    """A checkpoint reads a unit."""
    return unit, Read(TAPE, outputs, checkpoint, nested, new)


def made(record: list[Event], is_linked: bool = True) -> Table[str]:
    """The table of a record."""
    return table(record, NUMBERS, lambda unit: unit != "f", is_linked)


def row(before: int, until: int | None, early: int) -> Row:
    """A row of a table."""
    return Row(TAPE, before, until, early)


PLAIN = [save("a", 2), save("b", 3)]
CASES: dict[str, tuple[list[Event], list[tuple[str, Row]]]] = {  # a record, and the rows in order, the first one last
    "saved": (PLAIN, [("a", row(2, None, 1)), ("b", row(3, None, 2))]),
    "saved again": ([*PLAIN, save("a", 3)], [("b", row(3, None, 2)), ("a", row(3, None, 1))]),
    "used up in the forward": ([*PLAIN, ("b", "used up")], [("a", row(2, None, 1))]),
    "saved after it was used up": (
        [*PLAIN, ("a", "used up"), save("a", 3)],
        [("b", row(3, None, 2)), ("a", row(3, None, 1))],
    ),
    # the checkpoint runs again as it ran before: its last unit is gathered last, before any anchor made in it runs
    "a checkpoint of two": (
        [save("a", 2), read("b", 3, 1), read("c", 4, 1)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 2, 1))],
    ),
    "a checkpoint inside a checkpoint": (
        [save("a", 2), read("b", 3, 1, nested=True), read("c", 4, 1)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 1, 1))],
    ),
    "read twice by a checkpoint": (
        [save("a", 2), read("b", 3, 1), read("b", 3, 1, new=False)],
        [("a", row(2, None, 1)), ("b", row(3, 2, 1))],
    ),
    "gathered twice by a checkpoint": (
        [save("a", 2), read("b", 3, 1), read("b", 3, 1)],
        [("a", row(2, None, 1)), ("b", row(3, 1, 1))],
    ),
    "two checkpoints of one unit": (
        [save("a", 2), read("b", 3, 1), read("c", 4, 1), read("b", 4, 2)],
        [("a", row(2, None, 1)), ("c", row(4, 3, 1)), ("b", row(4, 1, 1))],
    ),
    "saved after a checkpoint": (
        [save("a", 2), read("b", 3, 1), save("b", 3)],
        [("a", row(2, None, 1)), ("b", row(3, 1, 1))],
    ),
    "a frozen unit in a checkpoint": (
        [save("a", 2), read("f", 2, 1)],
        [("a", row(2, None, 1)), ("f", row(2, None, 0))],
    ),
    "a frozen unit in two": ([read("f", 2, 1), read("f", 2, 2)], [("f", row(2, 0, 0))]),
    "a frozen unit, saved, too": ([save("f", 2), read("f", 2, 1)], [("f", row(2, 1, 0))]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_record_says_when_units_are_gathered_and_how_long_they_stay(name: str) -> None:
    """A rank would gather at another time than others, or drop a unit before a checkpoint that still reads it."""
    record, rows = CASES[name]
    assert [*made(record).rows.items()] == rows
    assert {x: y.until for x, y in made(record, is_linked=False).rows.items()} == dict.fromkeys(dict(rows))


def test_a_unit_without_a_row_may_still_be_tied() -> None:
    """A unit that a backward inside the loss used up would be gathered by each checkpoint that reads it, again."""
    found = made([save("b", 3), read("b", 3, 1), ("b", "used up")])
    assert (found.rows, found.rerun, found.tied) == ({}, {"b"}, {"b"})


class Flags:
    """The same, kept up to date while the forward runs: the reference."""

    def __init__(self) -> None:
        self.order = dict[str, tuple[int, int]]()  # outputs of the chain, and the checkpoint or 0
        self.last, self.shared, self.saved = dict[str, int](), set[str](), set[str]()
        self.anchor, self.begin = dict[str, int](), dict[int, int]()

    def note(self, unit: str, event: Row | Read | UsedUp) -> None:
        """Take one event."""
        known = self.order.get(unit)
        if isinstance(event, Row):
            self.saved.add(unit)
            self.order.pop(unit, None)
            self.order[unit] = event.before, 0
        elif not isinstance(event, Read):
            self.saved.discard(unit)
            self.order.pop(unit, None)
        else:
            is_known = known is not None and known[1] == event.checkpoint
            self.begin.setdefault(event.checkpoint, event.before - 2)
            if (
                event.is_nested
                or (is_known and event.is_new)
                or self.last.get(unit, event.checkpoint) != event.checkpoint
            ):
                self.shared.add(unit)
            self.last[unit] = event.checkpoint
            begin = maxsize if is_known else self.begin[event.checkpoint]
            self.anchor[unit] = min(self.anchor.get(unit, maxsize), begin)
            if not is_known:
                others = [x for x in reversed(self.order) if x != unit]
                mine = [*takewhile(lambda x: self.order[x][1] == event.checkpoint, others)][::-1]
                for x in [unit, *mine]:
                    self.order.pop(x, None)
                self.order |= dict.fromkeys([unit, *mine], (event.before, event.checkpoint))

    def rows(self) -> list[tuple[str, Row]]:
        """The rows at the end."""
        return [(x, self.row(x, *self.order[x])) for x in self.order]

    def row(self, unit: str, before: int, checkpoint: int) -> Row:
        """One of them."""
        early = min(NUMBERS[unit], self.anchor.get(unit, maxsize))
        tied = unit in self.last and (unit != "f" or unit in self.shared | self.saved)
        until = NUMBERS[unit] if checkpoint and unit not in self.shared else early
        return Row(TAPE, before, until if tied else None, early)


STEPS = st.tuples(st.sampled_from("abcf"), st.sampled_from(["save", "use up", *["read"] * 3]), st.integers(0, 7))


@pytest.mark.law
@given(st.lists(STEPS, max_size=14))
def test_the_table_is_what_flags_would_say(steps: list[tuple[str, str, int]]) -> None:
    """A backward would follow another order than the forward had."""
    flags, record, outputs, checkpoint = Flags(), list[Event](), 4, 1
    for unit, what, number in steps:
        outputs, checkpoint = outputs + number % 2, checkpoint + (number > 5)
        more = read(unit, outputs, checkpoint, number in (2, 3), number % 2 == 0)
        event = {"save": save(unit, outputs), "use up": (unit, "used up"), "read": more}[what]
        record.append(event)
        flags.note(*event)
    assert [*made(record).rows.items()] == flags.rows()
