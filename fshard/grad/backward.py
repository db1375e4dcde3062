"""The record of a forward, and the table that its backward follows.

Note [The table of a backward]
    The forward records events: autograd saves a place of a unit (`SavedView`), a checkpoint reads a unit, a backward
    inside the loss uses the last saved place of a unit. When the forward has ended, `table` makes the table of the
    record. A row says of one unit:

    - its place in the order of gathers: the last row is gathered first. Units are in the order in which the forward
      saved them last. A checkpoint runs again as it ran before, so its units are in the reverse order;
    - `before`: the unit is gathered before any anchor with a lower number runs, whether the program asks for it or not;
    - `until`, `early`: the anchor after which nobody needs the unit.

    A checkpoint reads a unit once. So if the program asks for the unit, it is the checkpoint that runs again, and the
    unit stays until its own anchor runs. If an anchor came first, the checkpoint may still run later: the unit stays
    until the last anchor made before the checkpoint began. The same holds if several checkpoints read the unit, or one
    gathers it twice.

    Only the backward can tell three things, so they are counted there and stand in no table: which rows are done, how
    many saved places of a unit are left (`TapeUnit.saved`; a loss need not depend on all), and whether a program reads
    a unit for which there is no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import maxsize
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

U = TypeVar("U")  # a unit: a `TapeUnit`, or anything that can be hashed


class Gathering(Protocol):
    """Gathers a unit in the backward: a `Tape`."""

    index: int

    def again(self, unit: Any) -> object:
        """Return a unit's buffers, which are gathered if they are not in memory."""


class Row(NamedTuple):
    """How a backward treats one unit; in a record: autograd saves a place of the unit."""

    tape: Gathering
    before: int  # the unit is gathered before an anchor with a lower number runs
    until: int | None  # if the program asks for it, it stays until an anchor with this number, or a lower one, runs;
    # None: until its last saved place was used
    early: int  # the same if the unit is gathered because an anchor runs


class Read(NamedTuple):
    """In a record: a checkpoint reads a unit."""

    tape: Gathering
    before: int  # as in `Row`
    checkpoint: int  # a number of its own, counted from 1
    is_nested: bool  # True if a checkpoint inside that one reads it
    is_new: bool  # True if the unit was gathered for this read


UsedUp = Literal["used up"]  # in a record: in the forward the last saved place was used, or the forward begins anew


class Table(NamedTuple, Generic[U]):
    """The rows of a backward, the first one to be gathered last."""

    rows: dict[U, Row]
    rerun: set[U]  # units that checkpoints read
    tied: set[U]  # those among them that stay until an anchor runs, with a row or without


def table(
    record: Sequence[tuple[U, Row | Read | UsedUp]],
    numbers: Mapping[U, int],
    trains: Callable[[U], bool],
    is_linked: bool,
) -> Table[U]:
    """The table of a record.

    `numbers` are the numbers of the units' anchors; of a frozen unit, that of the anchor before. `trains` says whether
    a unit has trainable leaves, and `is_linked` whether anchors are in one chain.
    """
    order = dict[U, Row | Read]()
    reads = dict[U, tuple[int, bool, int]]()  # the last checkpoint, whether it is shared, the anchor before all of them
    began = dict[int, int]()  # the number of the last anchor made before each checkpoint
    for unit, event in record:
        if type(event) is Row:
            order.pop(unit, None)
            order[unit] = event
        elif type(event) is Read:
            last = order.get(unit)
            is_known = type(last) is Read and last.checkpoint == event.checkpoint
            reads[unit] = _read(reads.get(unit), event, is_known, began)
            if not is_known:
                _put(order, unit, event)
        else:
            order.pop(unit, None)
    saved = _saved(record) if reads else set[U]()
    tied = {x for x, (_, is_shared, _) in reads.items() if is_linked and (trains(x) or is_shared or x in saved)}
    for unit in set(reads).intersection(order):
        order[unit] = _row(order[unit], numbers[unit], reads[unit], unit in tied)
    return Table(cast(dict[U, Row], order), set(reads), tied)


def _saved(record: Sequence[tuple[U, Row | Read | UsedUp]]) -> set[U]:
    """The units of which saved places are left at the end."""
    saved = set[U]()
    for unit, event in record:
        if type(event) is Row:
            saved.add(unit)
        elif type(event) is not Read:
            saved.discard(unit)
    return saved


def _read(
    before: tuple[int, bool, int] | None, event: Read, is_known: bool, began: dict[int, int]
) -> tuple[int, bool, int]:
    last, is_shared, anchor = before or (event.checkpoint, False, maxsize)
    begin = began.setdefault(event.checkpoint, event.before - 2)  # the last output may be of this read
    is_shared = is_shared or event.is_nested or last != event.checkpoint or (is_known and event.is_new)
    return event.checkpoint, is_shared, anchor if is_known else min(anchor, begin)


def _put(order: dict[U, Row | Read], unit: U, event: Read) -> None:
    """Put a unit before the others of its checkpoint, which come last."""
    order.pop(unit, None)
    others = list[tuple[U, Read]]()
    while order:
        other, last = order.popitem()
        if type(last) is not Read or last.checkpoint != event.checkpoint:
            order[other] = last
            break
        others.append((other, last._replace(before=event.before)))
    order[unit] = event
    order.update(reversed(others))


def _row(event: Row | Read, number: int, read: tuple[int, bool, int], is_tied: bool) -> Row:
    _, is_shared, anchor = read
    early = min(number, anchor)
    until = number if type(event) is Read and not is_shared else early
    return Row(event.tape, event.before, until if is_tied else None, early)
