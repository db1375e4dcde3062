"""Compare collectives between ranks in a checked call: each rank announces its next collective, and its end.

Note [Lines]
    A line is a connection for announcements alone. Each rank has a line to every peer along every axis. Before a
    collective, a rank announces the collective and its source line to the axis, and reads the peers' announcements:
    data are sent only if all agree. At the end of the checked call, a rank tells all peers of the return or error, and
    reads theirs. With several axes, ranks repeat this axis by axis, so a checked call returns on all ranks or on none.
    A rank blocked on a peer hears of the peer's end, raises, and so unblocks other ranks.

    Lines are sockets: a socket wakes a rank that waits for any of several peers, and closes when a process dies. A
    torch `Store` does neither; messages of a process group cannot be received in order of arrival, nor left unread.
    Every message has the number of its checked call, so a call skips messages of an earlier, failed call.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ..comm.announce import Announced, announcing
from ..comm.consensus import rows_of_bytes
from ..comm.mesh import AnyMesh, Connected, Mesh, ProcessMesh, adapted
from ..comm.primitives import along
from ..comm.ranks import SAME_ORDER, MismatchError, Ranks, tally
from ..core.arguments import call_site, frame_of, line_of
from .links import Link, listen
from .rendezvous import links_to

T = TypeVar("T")
_LONGEST_WORD = 2000  # characters
_WAITS, _RETURNED, _RAISED = "waits in", "has returned, having last called", "raised"


class _Status(NamedTuple):
    number: int
    verb: str
    what: str
    site: str

    def __str__(self) -> str:
        return f"{self.verb} {self.what} at {self.site}"


class Lines(Connected):
    """Connections to peers along every axis of a mesh. All ranks must construct `Lines`."""

    def __init__(self, mesh: ProcessMesh):
        # no reference to the mesh, which keeps these lines
        self._likeness, self._me, self._owners = mesh.likeness, mesh.get_rank(), mesh.owners
        self._links: dict[str, dict[int, Link]] = {}
        self._data: dict[str, dict[int, Link]] = {}
        for axis in mesh.mesh_dim_names:
            self._link(along(mesh, axis))
        self._last = _Status(0, _WAITS, "", "")
        self._ends: dict[int, _Status] = {}  # by peer: the end of its call

    def _link(self, ranks: Ranks) -> None:
        # `links_to` counts along this axis; errors and `_ends` name ranks of the mesh
        numbers = [int(row) for row in rows_of_bytes(str(self._me).encode(), ranks)]
        links = links_to(ranks, anywhere=True) or {}
        for peer, link in links.items():
            link.peer = f"rank {numbers[peer]}"
            weakref.finalize(self, link.socket.close)
        self._links[ranks.axis] = {numbers[peer]: link for peer, link in links.items()}
        self._data[ranks.axis] = {numbers[peer]: link for peer, link in getattr(ranks, "links", {}).items()}

    def close(self, why: str) -> None:
        for links in self._links.values():
            for link in links.values():
                link.close(why)

    def run(self, call: Callable[[], T]) -> T:
        """Run `call`, and announce its collectives to peers. MismatchError if ranks differ, or if a peer raises."""
        for axis, owner in self._owners.items():
            owner.check(axis)
        # unread messages of failed calls have smaller numbers
        self._last, self._ends = _Status(self._last.number + 1, _WAITS, "no collective", call_site()), {}
        try:
            with announcing(self._around):
                result = call()
        except BaseException as failure:
            self._end(_raised(self._last.number, failure))
            raise
        self._return(self._last._replace(verb=_RETURNED))
        return result

    def _return(self, status: _Status) -> None:
        """Tell the peers of the return. MismatchError unless the call has returned on all ranks."""
        self._end(status)
        try:
            for links in self._links.values():
                self._compare(links, status)
            if sum(map(bool, self._links.values())) > 1:
                # second round, axis by axis: an error reaches ranks without a common axis
                self._ends = {}
                for links in self._links.values():
                    _say(links, status)
                    self._compare(links, status)
        except MismatchError as failure:
            self._end(_raised(status.number, failure))
            raise

    def _around(self, ranks: Ranks, mesh: Mesh) -> Ranks:
        # lines connect one mesh: collectives of other meshes are not compared
        if mesh.likeness != self._likeness:
            return ranks
        return Announced(ranks, partial(self._announce, ranks.axis))

    def _announce(self, axis: str, call: str) -> None:
        """Announce a collective; wait until all ranks announce the same."""
        self._last = self._last._replace(what=call[:_LONGEST_WORD], site=call_site())
        _say(self._links[axis], self._last)
        self._compare(self._links[axis], self._last, self._data[axis])

    def _end(self, status: _Status) -> None:
        for links in self._links.values():
            _say(links, status)

    def _compare(
        self, links: Mapping[int, Link], local: _Status, data: Mapping[int, Link] = MappingProxyType({})
    ) -> None:
        """Read a message of every peer; MismatchError unless all agree."""
        statuses, awaited = {self._me: local}, dict(links)
        while True:
            # data links first: a peer announces a collective before sending data
            ahead = [peer for peer in awaited if peer in data and data[peer].is_ahead()]
            for peer in ahead:
                awaited[peer].drain()
            for peer, link in links.items():
                if peer in awaited and (status := self._next(peer, link)):
                    statuses[peer] = status
                    del awaited[peer]
            # Stop if a call has ended: other peers may never announce anything. Stop if a peer sent data unannounced:
            # `Link.take` then compares the calls.
            if not awaited or awaited.keys() & ahead or any(status.verb != local.verb for status in statuses.values()):
                break
            # an ended peer closes its data links after telling its end
            listen(awaited.values(), f"{local.what} at {local.site}", beside=data.values())
        if difference := _unlike_calls(dict(sorted(statuses.items()))):
            raise MismatchError(f"{difference}. {SAME_ORDER}")

    def _next(self, peer: int, link: Link) -> _Status | None:
        """Return a peer's next message, None before it arrives; after the peer's call has ended, its last."""
        while peer not in self._ends and (text := link.hear()) is not None:
            status = _read_status(text, peer)
            if status.number < self._last.number:
                continue  # of an earlier, failed call
            if status.verb == _WAITS:
                return status
            self._ends[peer] = status
        return self._ends.get(peer)


def _say(links: Mapping[int, Link], status: _Status) -> None:
    for link in links.values():
        with suppress(MismatchError):  # `_compare` reads why a peer closed
            link.say(json.dumps(status))


def _read_status(text: str, peer: int) -> _Status:
    """Parse a message; MismatchError unless a rank's."""
    with suppress(ValueError, TypeError, RecursionError):
        number, *words = json.loads(text)
        if isinstance(number, int) and [type(word) for word in words] == [str] * 3:
            return _Status(number, *words)
    raise MismatchError(f"rank {peer} sent what no rank says of its calls: {text[:100]!r}")


def _raised(number: int, failure: BaseException) -> _Status:
    frame, text = frame_of(failure), f"{type(failure).__name__}: {failure}"
    return _Status(number, _RAISED, text[:_LONGEST_WORD], line_of(frame.filename, frame.lineno))


def _unlike_calls(statuses: Mapping[int, _Status]) -> str | None:
    ended = [rank for rank, status in statuses.items() if status.verb != _WAITS]
    if ended:
        blame = min(ended, key=lambda rank: statuses[rank].verb != _RAISED)
        others = [rank for rank, status in statuses.items() if status.verb != statuses[blame].verb]
        return f"rank {blame} {statuses[blame]}; rank {others[0]} {statuses[others[0]]}" if others else None
    usual = Counter(status.what for status in statuses.values()).most_common(1)[0][0]
    odd = [rank for rank, status in statuses.items() if status.what != usual]
    if not odd:
        return None
    pair = sorted([odd[0], next(rank for rank, status in statuses.items() if status.what == usual)])
    calls = [f"rank {rank} {statuses[rank].what} at {statuses[rank].site}" for rank in pair]
    return f"ranks called different collectives: {'; '.join(calls)}"


def lines_of(mesh: AnyMesh) -> Lines | None:
    """Return None for meshes without processes."""
    grid = adapted(mesh)
    if not isinstance(grid, ProcessMesh):
        return None
    with tally():  # the user's tally does not count these messages
        return Lines(grid)
