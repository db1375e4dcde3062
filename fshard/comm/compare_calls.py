"""What ranks tell each other while a call is checked: what each is about to start, and how its call ended.

Note [Lines]
    Each rank has a connection of its own to every peer along every axis. Ahead of a collective it says what it is about
    to call, and where, to the ranks of that axis, and reads what they say: data move only if all say the same. At the
    end of the call it says to all its peers that it has returned or what it has raised, and reads how they ended; on
    meshes of several axes once more, axis by axis, so that a checked call returns on all ranks or on none. Who waits
    for a rank hears of its end whatever it waits for, and raises in turn, which those who wait for it hear.

    These are sockets because a socket wakes who waits for any of several ranks, and closes when a process dies: a
    store would be polled, and has nobody's death, and messages through a process group of their own cannot be waited
    for from whoever comes first, nor left unread. All that is said carries the number of the checked call, so what was
    left unread by a call that failed is passed over by the next.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.callsite import call_site, frame_of
from .announce import Announced, announcing
from .consensus import rows_of_bytes
from .links import Link, listen
from .log import tally
from .mesh import AnyMesh, Mesh, ProcessMesh, adapted
from .primitives import along
from .ranks import MismatchError, Ranks
from .rendezvous import links_to

_LONGEST = 2000  # characters of an exception's text, or a call's
_WAITS, _RETURNED, _RAISED = "waits in", "has returned, having last called", "raised"


class _Said(NamedTuple):
    """What a rank says: the number of the checked call, what it does, of what, and where."""

    number: int
    verb: str
    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.verb} {self.what} at {self.site}"


class Lines:
    """A rank's connections to its peers along every axis of a mesh, made by all ranks together."""

    def __init__(self, mesh: ProcessMesh):
        # not the mesh itself: it keeps these lines
        self._likeness, self._me = mesh.likeness, mesh.get_rank()
        self._links: dict[str, dict[int, Link]] = {}
        self._data: dict[str, dict[int, Link]] = {}  # what collectives themselves send by, where this can be seen
        for axis in mesh.mesh_dim_names:
            self._link(along(mesh, axis))
        self._last = _Said(0, _WAITS, "", "")
        self._ends: dict[int, _Said] = {}  # of this call, by peer

    def _link(self, ranks: Ranks) -> None:
        numbers = [int(row) for row in rows_of_bytes(str(self._me).encode(), ranks)]
        links = links_to(ranks, anywhere=True) or {}
        for peer, link in links.items():
            link.peer = f"rank {numbers[peer]}"
            weakref.finalize(self, link.socket.close)
        self._links[ranks.axis] = {numbers[peer]: link for peer, link in links.items()}
        self._data[ranks.axis] = {numbers[peer]: link for peer, link in getattr(ranks, "links", {}).items()}

    def run(self, call: Callable[[], Any]) -> Any:
        """`call()`, its collectives announced. MismatchError on every rank if any does something else."""
        self._last, self._ends = _Said(self._last.number + 1, _WAITS, "no collective", call_site()), {}
        try:
            with announcing(self._around):
                result = call()
        except BaseException as failure:
            self._end(_raised(self._last.number, failure))
            raise
        self._return(self._last._replace(verb=_RETURNED))
        return result

    def _return(self, mine: _Said) -> None:
        """Say that the call has returned, and hear the same from everybody, or raise MismatchError."""
        self._end(mine)
        try:
            for links in self._links.values():
                self._compare(links, mine)
            if sum(map(bool, self._links.values())) > 1:
                # once more axis by axis: peers say what they heard of theirs, so that it gets to all corners of a mesh
                self._ends = {}
                for links in self._links.values():
                    _say(links, mine)
                    self._compare(links, mine)
        except MismatchError as failure:
            self._end(_raised(mine.number, failure))
            raise

    def _around(self, ranks: Any, mesh: Mesh) -> Any:
        if mesh.likeness != self._likeness:
            return ranks
        return Announced(ranks, partial(self._announce, ranks.axis))

    def _announce(self, axis: str, call: str) -> None:
        self._last = self._last._replace(what=call[:_LONGEST], site=call_site())
        _say(self._links[axis], self._last)
        self._compare(self._links[axis], self._last, self._data[axis])

    def _end(self, said: _Said) -> None:
        for links in self._links.values():
            _say(links, said)

    def _compare(self, links: Mapping[int, Link], mine: _Said, data: Mapping[int, Link] = MappingProxyType({})) -> None:
        """Read what the peers say; raise MismatchError unless it is the same."""
        heard, waiting = {self._me: mine}, dict(links)
        while True:
            # looked at before what peers say: who says what it calls says so before it sends any data
            ahead = [peer for peer in waiting if peer in data and data[peer].is_ahead()]
            for peer in ahead:
                waiting[peer].drain()
            for peer, link in links.items():
                if peer in waiting and (said := self._next(peer, link)):
                    heard[peer] = said
                    del waiting[peer]
            # nobody who waits for others need come any more where one has ended; and who has sent data unannounced,
            # outside a checked call, announces nothing: the messages of this call will name both
            if not waiting or waiting.keys() & ahead or any(said.verb != mine.verb for said in heard.values()):
                break
            listen([*waiting.values(), *data.values()], f"{mine.what} at {mine.site}")
        if found := _difference(dict(sorted(heard.items()))):
            raise MismatchError(f"{found}. All ranks must call the same collectives in the same order.")

    def _next(self, peer: int, link: Link) -> _Said | None:
        """What a peer says next in this call, if it has arrived; once it has ended, how."""
        while peer not in self._ends and (text := link.hear()) is not None:
            said = _read(text, peer)
            if said.number < self._last.number:
                continue  # left unread by a call that failed
            if said.verb == _WAITS:
                return said
            self._ends[peer] = said
        return self._ends.get(peer)


def _say(links: Mapping[int, Link], said: _Said) -> None:
    for link in links.values():
        with suppress(MismatchError):  # a peer that has gone may have said why, which is read next
            link.say(json.dumps(said))


def _read(text: str, peer: int) -> _Said:
    with suppress(ValueError, TypeError, RecursionError):
        number, *words = json.loads(text)
        if isinstance(number, int) and [type(word) for word in words] == [str] * 3:
            return _Said(number, *words)
    raise MismatchError(f"rank {peer} sent what no rank says of its calls: {text[:100]!r}")


def _raised(number: int, failure: BaseException) -> _Said:
    frame, text = frame_of(failure), f"{type(failure).__name__}: {failure}"
    return _Said(number, _RAISED, text[:_LONGEST], f"{frame.filename}:{frame.lineno}")


def _difference(heard: Mapping[int, _Said]) -> str | None:
    """What ranks do that is not the same, in words."""
    ended = [rank for rank, said in heard.items() if said.verb != _WAITS]
    if ended:
        blame = min(ended, key=lambda rank: heard[rank].verb != _RAISED)
        others = [rank for rank, said in heard.items() if said.verb != heard[blame].verb]
        return f"rank {blame} {heard[blame]}; rank {others[0]} {heard[others[0]]}" if others else None
    usual = Counter(said.what for said in heard.values()).most_common(1)[0][0]
    odd = [rank for rank, said in heard.items() if said.what != usual]
    if not odd:
        return None
    pair = sorted([odd[0], next(rank for rank, said in heard.items() if said.what == usual)])
    return "ranks called different collectives: " + "; ".join(f"rank {r} {_call(heard[r])}" for r in pair)


def _call(said: _Said) -> str:
    return f"{said.what} at {said.site}"


def lines_of(mesh: AnyMesh) -> Lines | None:
    """Lines along a mesh of processes; None for one device, simulated ranks and meshes that are not there."""
    grid = adapted(mesh)
    if not isinstance(grid, ProcessMesh):
        return None
    with tally():  # making connections is not what the user counts
        return Lines(grid)
