"""Connect ranks to each other: both sides authenticate, and either all ranks get links or all raise an error.

Note [Who may connect]
    A link carries parameters, so only ranks may connect. Each rank of an axis draws a secret and sends the secret to
    the others over the process group. The key joins all secrets, is never sent over a connection, and is used once.
    Addresses lack the key: everybody on the machine can read addresses of Unix sockets (/proc/net/unix). The dialling
    rank sends its number and a digest of the key and both numbers; the answering rank sends another digest. So each
    side knows that the other has the key, and an intercepted digest is useless on another connection. On Unix sockets,
    ranks reject other users' processes, too.

    Each rank dials every other rank: the socket breaks if the other rank ends or gives up. Each pair keeps one of its
    two connections. A rank waits for all connections at once, strangers' included, with one deadline. Then ranks
    exchange results over the process group: all have links, or all raise.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..comm.consensus import rows_of_bytes
from ..comm.process_groups import meeting_host
from ..comm.ranks import Ranks, message_timeout
from .links import Link, reason

_GREETING = struct.Struct("<I32s")  # number and digest of the dialling rank
_ANSWER = 32  # bytes
_MOST_SILENT = 256  # connections kept without a greeting, in addition to one for each peer
_RETRY = 0.01  # seconds until a peer with a full queue is dialled again
_SOMEWHERE = "192.0.2.1"  # an address that no host has (RFC 5737)

Address: TypeAlias = str | tuple[str, int]  # a Unix socket's address; host and port
Door: TypeAlias = tuple[socket.socket, Sequence[Address], bytes]  # listening socket, all addresses, key


class UnreachableError(ConnectionError):
    """A rank could not be reached at its address, or another process answered."""


class _LeftError(ConnectionError):
    """A rank ended or gave up; the rank's own error, if reported, is raised instead."""


def links_to(ranks: Ranks, anywhere: bool = False) -> dict[int, Link] | None:
    """Return links to all peers: Unix sockets on one host; between hosts None, or with `anywhere` TCP.

    ConnectionError on all ranks if any fails to connect.
    """
    try:
        sockets = _met(ranks, _on_one_host)
    except UnreachableError:
        if not anywhere:
            return None
        sockets = _met(ranks, _between_hosts)
    seconds = message_timeout(ranks).total_seconds()
    return {p: Link(s, f"rank {p} of axis {ranks.axis!r}", seconds) for p, s in sorted(sockets.items())}


def _met(ranks: Ranks, listening: Callable[[Ranks], AbstractContextManager[Door]]) -> dict[int, socket.socket]:
    with listening(ranks) as (listener, addresses, key):
        sockets: dict[int, socket.socket] = {}

        def meet() -> str:
            # if this rank gives up, the listener closes, which breaks peers' connections
            with listener, _Meeting(ranks, listener, addresses, key) as meeting:
                sockets.update(meeting.hold(message_timeout(ranks).total_seconds()))
            return ""

        try:
            _on_all_ranks(ranks, meet)
        except BaseException:
            for connection in sockets.values():
                connection.close()
            raise
    return sockets


def _on_all_ranks(ranks: Ranks, step: Callable[[], str]) -> list[str]:
    """Return all ranks' results. ConnectionError on all ranks if any fails."""
    error: Exception | None = None
    try:
        row = ["", step()]  # the error's type (or ""), and its text or the result
    except Exception as failure:  # the other ranks wait for this row
        traceback.clear_frames(failure.__traceback__)  # closes connections held by these frames alone
        error, row = failure, [type(failure).__name__, reason(failure)]
    rows = [json.loads(text) for text in rows_of_bytes(json.dumps(row).encode(), ranks)]
    failed = [(kind, f"rank {p} of axis {ranks.axis!r}: {text}") for p, (kind, text) in enumerate(rows) if kind]
    # prefer the failed rank's own error to its consequences on peers
    follow = [UnreachableError.__name__, _LeftError.__name__]
    if error is not None and not isinstance(error, OSError):
        raise error
    if failed:
        kind, text = min(failed, key=lambda row: follow.index(row[0]) if row[0] in follow else -1)
        kind_of_error = UnreachableError if kind in follow[:1] else ConnectionError
        raise kind_of_error(f"the ranks could not be connected: {text}") from error
    return [text for _, text in rows]


@contextmanager
def _on_one_host(ranks: Ranks) -> Iterator[Door]:
    """UnreachableError if hosts differ."""
    with ExitStack() as stack:
        # an abstract address leaves no file; everybody can read it, so it is not the secret
        address, listeners = f"\0fshard-{secrets.token_hex(16)}", list[socket.socket]()

        def offer() -> str:
            listeners.append(_listening(stack, socket.AF_UNIX, address))
            return json.dumps([_host(), address, secrets.token_hex()])

        hosts, addresses, drawn = zip(*map(json.loads, _on_all_ranks(ranks, offer)), strict=True)
        if len(set(hosts)) > 1:
            raise UnreachableError("the ranks are on several hosts")
        yield listeners[0], addresses, "".join(drawn).encode()


@contextmanager
def _between_hosts(ranks: Ranks) -> Iterator[Door]:
    interfaces = _on_all_ranks(ranks, _interface)
    with ExitStack() as stack:
        listeners = list[socket.socket]()

        def offer() -> str:
            host = _from_outside(interfaces[ranks.rank], interfaces)
            # port 0: any free port
            listeners.append(_listening(stack, socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0)))
            return json.dumps([*listeners[0].getsockname()[:2], secrets.token_hex()])

        rows = [json.loads(row) for row in _on_all_ranks(ranks, offer)]
        yield listeners[0], [(host, port) for host, port, _ in rows], "".join(row[2] for row in rows).encode()


def _host() -> str:
    # Abstract addresses are visible in one network namespace of one kernel. Copies of a running machine have the same
    # boot_id, so only connecting proves that ranks share a host.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() + str(os.stat("/proc/self/ns/net").st_ino) if boot.exists() else secrets.token_hex(16)


def _listening(stack: ExitStack, family: int, address: Address) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.setblocking(False)
    listener.bind(address)
    listener.listen(4096)
    return listener


def _interface() -> str:
    """Return the address of gloo's interface if named, else the source address of packets to the meeting host."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return address_of(name)
    return _way_to(meeting_host())


def address_of(interface: str) -> str:
    """Return an interface's address; OSError without an IPv4 or IPv6 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, request)[20:24])  # SIOCGIFADDR
    rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    wide = [row[0] for row in rows if row[5] == interface and row[3] == "00"]  # of global scope
    if not wide:
        raise OSError(errno.ENODEV, f"GLOO_SOCKET_IFNAME={interface}: expected an interface with an address")
    return str(ipaddress.IPv6Address(int(wide[0], 16)))


def _way_to(target: str) -> str:
    """Return the source address to `target`, "" without a route."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM) if target else []:
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return probe.getsockname()[0]
    return ""


def _from_outside(local: str, seen: list[str]) -> str:
    """Return this host's address for other hosts; `seen` are all ranks' addresses.

    `local` may be a loopback address: on the meeting host, the host's name may resolve to 127.0.0.1.
    """

    def inside(address: str) -> bool:
        return not address or ipaddress.ip_address(address).is_loopback

    if not inside(local):
        return local
    others = [address for address in seen if not inside(address)]
    return _way_to(others[0] if others else "" if local else _SOMEWHERE) or local or "127.0.0.1"


@dataclass(eq=False)
class _Call:
    socket: socket.socket
    peer: int | None = None
    heard: bytes = b""

    def hear(self, size: int) -> bool:
        """True if `size` bytes have arrived. ConnectionError for a closed connection."""
        with suppress(BlockingIOError):
            while len(self.heard) < size:
                data = self.socket.recv(size - len(self.heard))  # not more: later bytes are for the link
                if not data:
                    raise ConnectionResetError("the connection was closed")
                self.heard += data
        return len(self.heard) == size


class _Meeting:
    def __init__(self, ranks: Ranks, listener: socket.socket, addresses: Sequence[Address], key: bytes):
        self._me, self._listener, self._addresses, self._key = ranks.rank, listener, addresses, key
        self._peers = {*range(ranks.size)} - {ranks.rank}
        self._to_dial = set(self._peers)
        self._calls: dict[_Call, None] = {}
        self._dialled: dict[int, _Call] = {}  # by peer, after its answer
        self._answered: dict[int, _Call] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Meeting:
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *failure: object) -> None:
        for call in (*self._calls, *self._dialled.values(), *self._answered.values()):
            call.socket.close()
        self._listener.close()  # callers stop waiting
        self._selector.close()

    def hold(self, seconds: float) -> dict[int, socket.socket]:
        """Return all connections. ConnectionError if a peer fails; TimeoutError after `seconds`."""
        until = time.monotonic() + seconds
        while missing := self._peers - (self._dialled.keys() & self._answered.keys()):
            for peer in sorted(self._to_dial):
                self._dial(peer)
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"ranks {sorted(missing)} did not connect within {seconds:.0f} s")
            for key, events in self._selector.select(_RETRY if self._to_dial else min(left, 60.0)):
                self._serve(key.data, events)
        # both ends keep the connection dialled by the higher rank
        calls = {p: (self._answered if p > self._me else self._dialled).pop(p) for p in self._peers}
        return {p: _quick(call.socket) for p, call in calls.items()}

    def _serve(self, call: _Call | None, events: int) -> None:
        """Serve a connection; the listener if `call` is None."""
        if call is None:
            self._accept()
        elif call not in self._calls:
            pass  # removed by an earlier event
        elif call.peer is None:
            self._greeted(call)
        elif events & selectors.EVENT_WRITE:
            self._greet(call, call.peer)
        else:
            self._heard(call, call.peer)

    def _dial(self, peer: int) -> None:
        connection = socket.socket(self._listener.family)
        try:
            connection.setblocking(False)
            connection.connect(self._addresses[peer])
        except BlockingIOError as busy:
            if busy.errno != errno.EINPROGRESS:  # EAGAIN: the peer's queue is full; `hold` dials again
                return connection.close()
        except OSError as failure:
            connection.close()
            raise self._unreachable(peer, failure) from failure
        self._to_dial.discard(peer)
        self._hold(_Call(connection, peer), selectors.EVENT_WRITE)

    def _unreachable(self, peer: int, failure: OSError) -> UnreachableError:
        where = "" if self._near else f" at {self._addresses[peer][0]}"
        return UnreachableError(
            f"rank {peer}{where} cannot be reached: {reason(failure)}. Between hosts, name a network interface that "
            "the others reach in GLOO_SOCKET_IFNAME"
        )

    @property
    def _near(self) -> bool:
        return self._listener.family == socket.AF_UNIX

    def _greet(self, call: _Call, peer: int) -> None:
        if code := call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise self._unreachable(peer, OSError(code, os.strerror(code)))
        if self._near and not _is_same_user(call.socket):
            raise self._unreachable(peer, PermissionError(errno.EPERM, "its address is another user's"))
        self._say(call.socket, peer, _GREETING.pack(self._me, self._digest("dials", self._me, peer)))
        self._selector.modify(call.socket, selectors.EVENT_READ, call)

    def _heard(self, call: _Call, peer: int) -> None:
        try:
            if peer in self._dialled:
                raise ConnectionResetError("the connection was closed")
            if not call.hear(_ANSWER):
                return
        except OSError as failure:
            raise _LeftError(f"rank {peer} ended, or gave up connecting: {reason(failure)}") from failure
        if not hmac.compare_digest(call.heard, self._digest("answers", self._me, peer)):
            raise self._unreachable(peer, PermissionError(errno.EPERM, "somebody else answers at its address"))
        self._dialled[peer] = call
        self._settle(peer)

    def _settle(self, peer: int) -> None:
        """Stop watching a peer with both connections: later bytes are for the link."""
        if peer in self._answered and peer in self._dialled:
            self._let_go(self._dialled[peer])

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if self._near and not _is_same_user(connection):
                return connection.close()
            self._hold(call := _Call(connection), selectors.EVENT_READ)
            self._greeted(call)
            silent = [call for call in self._calls if call.peer is None]
            if len(silent) > _MOST_SILENT + len(self._peers):
                self._let_go(silent[0]).close()

    def _greeted(self, call: _Call) -> None:
        try:
            if not call.hear(_GREETING.size):
                return
        except OSError:
            self._let_go(call).close()
            return
        self._let_go(call)
        peer, digest = _GREETING.unpack(call.heard)
        new = peer in self._peers and peer not in self._answered
        if not new or not hmac.compare_digest(digest, self._digest("dials", peer, self._me)):
            return call.socket.close()
        self._answered[peer] = call
        self._say(call.socket, peer, self._digest("answers", peer, self._me))
        self._settle(peer)

    def _say(self, connection: socket.socket, peer: int, text: bytes) -> None:
        try:
            connection.sendall(text)  # the first bytes: the socket has room
        except OSError as failure:
            raise _LeftError(f"rank {peer} ended, or gave up connecting: {reason(failure)}") from failure

    def _digest(self, what: str, caller: int, answerer: int) -> bytes:
        return hmac.digest(self._key, f"{what} {caller} {answerer}".encode(), "sha256")

    def _hold(self, call: _Call, events: int) -> None:
        self._calls[call] = None
        self._selector.register(call.socket, events, call)

    def _let_go(self, call: _Call) -> socket.socket:
        del self._calls[call]
        self._selector.unregister(call.socket)
        return call.socket


def _is_same_user(peer: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return user == os.geteuid()


def _quick(peer: socket.socket) -> socket.socket:
    if peer.family != socket.AF_UNIX:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
