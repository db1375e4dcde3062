"""Races in a log of GPUs that are not there: two streams use the same bytes, one writes, and nothing orders them.

Every stream, and the host, has a clock of what it has done and of what it knows to be done by the others (a vector
clock). An event hands the clock of the stream that recorded it to the stream, or host, that waits for it. Bytes are
addresses, so memory that torch's allocator gives out again while another stream still uses it is a race, too. Whether
it gives out just this memory is chance; so memory that it gets back while another stream uses it, unless it was told of
that stream, is a race by the time that its own stream, which may then have it, has allocated and goes on to write.

    python tools/fakegpu/races.py LOG
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

Clock = dict[str, int]
Place = tuple[int, int]  # an address, and a number of bytes
HOST, COMPUTATION = "host", "0x0"  # the default stream
PAGE = 14  # bits of an address inside a page: accesses are looked up by page


class Line(NamedTuple):
    """A line of a log: its first word, and what it says by name."""

    word: str
    says: dict[str, str]

    def number(self, name: str) -> int:
        """A number or address."""
        return int(self.says[name].replace("(nil)", "0"), 0)

    def stream(self) -> str:
        """The name of the stream."""
        return self.says["stream"].replace("(nil)", "0x0")


def lines(path: str | Path) -> Iterator[Line]:
    """The lines of a log; the last one, which may be cut off, only if it is whole."""
    with open(path, errors="replace") as file:
        for text in file:
            if text.endswith("\n"):
                word, _, rest = text.rstrip("\n").partition(" ")
                yield Line(word, dict(part.partition("=")[::2] for part in rest.split(" ") if "=" in part))


class Access(NamedTuple):
    """A read or write of some bytes by a stream at its time."""

    stream: str
    time: int
    name: str
    begin: int
    end: int
    writes: bool

    def meets(self, other: Access) -> bool:
        """Whether two accesses, without an order, are a race."""
        return (self.writes or other.writes) and self.begin < other.end and other.begin < self.end

    def pages(self) -> range:
        """The pages in which the bytes lie."""
        return range(self.begin >> PAGE, ((self.end - 1) >> PAGE) + 1)


class Block(NamedTuple):
    """Memory that torch's allocator has given out: its size, the stream it is for, and others the allocator knows."""

    size: int
    stream: str
    told: set[str]


class Races:
    """The clocks of all streams, the accesses that still matter, and the races among them."""

    def __init__(self, blocks: dict[int, Block] | None = None) -> None:
        self.clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self.events: dict[str, Clock] = {}
        self.races: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()  # collectives of the counted step during which the computation went on
        self.counted = dict[str, int]()  # `beside` at the end of the step
        self._blocks = {} if blocks is None else blocks  # of torch's allocator, by address
        self._freed: dict[str, set[Access]] = defaultdict(set)  # by the block's stream: of memory that it got back
        self._reused: dict[str, set[Access]] = defaultdict(set)  # and may have given out again
        self._under_way: list[Access] = []  # collectives that the computation has not waited for
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by page
        self._names = {COMPUTATION: "the computation", HOST: "the host"}

    def _knows(self, who: str, old: Access) -> bool:
        """Whether a stream comes after an access, or will if the host gives it something now."""
        return max(self.clocks[who][old.stream], self.clocks[HOST][old.stream]) >= old.time

    def _see(self, who: str, clock: Clock) -> None:
        for other, time in clock.items():
            self.clocks[who][other] = max(self.clocks[who][other], time)

    def _name(self, stream: str) -> str:
        return self._names.get(stream, "a side stream")

    def access(
        self, stream: str, name: str, reads: Iterable[tuple[int, int]], writes: Iterable[tuple[int, int]]
    ) -> None:
        """Note an operator of a stream by the places that it reads and writes."""
        self._see(stream, self.clocks[HOST])  # the host has launched it
        self.clocks[stream][stream] += 1
        time = self.clocks[stream][stream]
        new = [Access(stream, time, name, at, at + size, False) for at, size in reads if size]
        new += [Access(stream, time, name, at, at + size, True) for at, size in writes if size]
        for one in new:
            self._compare(one)
        if any(one.writes for one in new):
            self._compare_freed(stream)
        for one in new:
            for page in one.pages():
                self._accesses[page].append(one)

    def _compare_freed(self, stream: str) -> None:
        """A stream writes: it may be to memory that others still use, and that was given out to it."""
        for old in self._reused.pop(stream, ()):
            if not self._knows(stream, old):
                does = "writes" if old.writes else "reads"
                self.races[f"freed while {old.name} on {self._name(old.stream)} still {does} it"] += 1

    def _compare(self, new: Access) -> None:
        known, raced = self.clocks[new.stream], set[Access]()
        for page in new.pages():
            kept = []
            for old in self._accesses[page]:
                if new.meets(old) and known[old.stream] < old.time:
                    raced.add(old)
                # what is overwritten in order needs no more comparison: who comes later is compared with the write
                elif new.writes and new.begin <= old.begin and old.end <= new.end:
                    continue
                kept.append(old)
            self._accesses[page] = kept
        for old in raced:
            self.races[self._sentence(new, old)] += 1

    def _sentence(self, new: Access, old: Access) -> str:
        does, did = ("writes" if one.writes else "reads" for one in (new, old))
        return f"{new.name} on {self._name(new.stream)} {does} what {old.name} on {self._name(old.stream)} still {did}"

    def add(self, line: Line) -> None:
        """Note a line of the log."""
        kind = getattr(self, f"_{line.word}", None)
        if kind is not None:
            kind(line)

    def _record(self, line: Line) -> None:
        self.events[line.says["event"]] = dict(self.clocks[line.stream()])

    def _wait(self, line: Line) -> None:
        self._see(line.stream(), self.events.get(line.says["event"], {}))

    def _sync(self, line: Line) -> None:
        """The host waits for a stream, an event, or all; or learns that they are done (`query`)."""
        if "event" in line.says:
            self._see(HOST, self.events.get(line.says["event"], {}))
        elif "stream" in line.says:
            self._see(HOST, dict(self.clocks[line.stream()]))
        else:
            for clock in [*self.clocks.values()]:
                self._see(HOST, dict(clock))

    _query = _sync

    def _op(self, line: Line) -> None:
        reads, writes = (_places(line.says[name]) for name in ("reads", "writes"))
        stream = line.says["stream"]
        self.access(stream, line.says["name"], reads, writes)
        if stream == COMPUTATION:
            self.beside.update(one.name for one in self._under_way if not self._knows(stream, one))
            self._under_way.clear()
        if line.says["waited"] == "1":
            self._see(HOST, dict(self.clocks[stream]))

    def _given(self, line: Line) -> None:
        """Torch's allocator gives out a block, for use by the current stream."""
        stream = line.stream()
        self._blocks[line.number("at")] = Block(line.number("n"), stream, set())
        self._reused[stream] |= self._freed.pop(stream, set())

    def _recorded(self, line: Line) -> None:
        """The allocator is told of a further stream: it asks that stream before it gives the block out again."""
        if line.number("at") in self._blocks:
            self._blocks[line.number("at")].told.add(line.stream())

    def _back(self, line: Line) -> None:
        """The allocator gets a block back, and gives it to its stream again whatever other streams do."""
        begin = line.number("at")
        block = self._blocks.pop(begin, None)
        if block is None:
            return
        uses = Access(block.stream, 0, "", begin, begin + block.size, True)
        for old in (old for page in uses.pages() for old in self._accesses.get(page, ())):
            if old.meets(uses) and old.stream not in block.told and not self._knows(block.stream, old):
                self._freed[block.stream].add(old)

    def _step(self, line: Line) -> None:
        self.beside.clear()
        self._under_way.clear()

    def _peak(self, line: Line) -> None:
        self.counted = dict(self.beside)

    def _nccl(self, line: Line) -> None:
        kind, stream = line.says["kind"], line.stream()
        self._names[stream] = f"communicator {line.says['comm']}"
        size, ranks = line.number("n") * line.number("size"), line.number("ranks")
        sent = size * ranks if kind in ("reduce_scatter", "all_to_all") else size
        received = size * ranks if kind in ("all_gather", "all_to_all") else size
        reads = [(line.number("send"), sent)] if "send" in line.says else []
        writes = [(line.number("receive"), received)] if "receive" in line.says else []
        self.access(stream, kind, [] if reads == writes else reads, writes)  # one in place only writes
        self._under_way.append(Access(stream, self.clocks[stream][stream], kind, 0, 0, True))


def _places(text: str) -> list[Place]:
    return [(int(begin), int(size)) for begin, _, size in (part.partition("+") for part in text.split(",") if part)]


def judged(path: str | Path) -> dict[str, Races]:
    """What happened in each case of a log, from its line `case name=...` to its line `end`."""
    result, blocks = dict[str, Races](), dict[int, Block]()
    current = Races(blocks)
    for line in lines(path):
        if line.word in ("case", "end"):
            current = Races(blocks)  # what follows an end belongs to no case
        if line.word == "case":
            result[line.says["name"]] = current
        current.add(line)
    return result


def races_of(path: str | Path) -> dict[str, Counter[str]]:
    """The races of each case of a log, with how often each was seen."""
    return {name: case.races for name, case in judged(path).items()}


if __name__ == "__main__":
    for case, races in races_of(sys.argv[1]).items():
        print(case, *(f"\n    {number} times: {words}" for words, number in races.most_common()))
