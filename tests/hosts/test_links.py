"""Links between processes: who may connect, what may be sent over a link, and what happens when a peer ends."""

import errno
import fcntl
import json
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import hostile
from support.heard import NUM, values
from support.namespaces import ADDRESSES, two_hosts
from support.worlds import fates, gloo

import fshard
from fshard.hosts import compare_calls, links, rendezvous

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


# --- strangers


@pytest.mark.parametrize(("user", "num"), [pytest.param(65534, 1, marks=ROOT), (os.geteuid(), 129)])
def test_strangers_are_told_nothing(user: int, num: int) -> None:
    """A process that is no rank learns nothing and blocks no rank: otherwise it could join a job, or stop it."""
    told, _ = values(fates(hostile.among_strangers, user, num, seconds=30.0))
    assert told == [""] * len(hostile.GREETINGS)


@pytest.mark.parametrize("seed", range(NUM))
def test_a_rank_that_ends_while_connecting(seed: int, tmp_path: Path) -> None:
    """Ranks get an error within 5 s if a rank ends while it connects: otherwise they would wait until the timeout."""
    kind, over, at, bad, size = case = hostile.drawn(seed)
    ranks = fates(hostile.end_while_connecting, str(tmp_path), kind, over, at, bad, shard=size)
    assert ranks[bad].exitcode == {"kill": -9, "raise": 1, "exit": 3}[kind], case
    ended = float((tmp_path / "ended").read_text())
    for rank in (r for r in range(size) if r != bad):
        when, text = ranks[rank].value
        assert text.startswith(("MismatchError: ", "ConnectionError: ")), (case, text)
        assert when - ended < 5.0, (case, text)


def test_a_rank_that_ends_when_it_has_answered() -> None:
    """A rank that ends between answering and dialling is noticed: otherwise its peer would wait until the timeout."""
    heard, ended = fates(hostile.answers_and_ends, seconds=20.0)
    assert (heard.value, ended.exitcode) == ("an error", 3)


# --- what comes over a link


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, links.Link, links.SegmentPool]]:
    """The socket of a peer that may send anything, and this rank's link to it."""
    theirs, ours = hostile.pair()
    with theirs, ours:
        yield theirs, links.Link(ours, "rank 7", 10.0, memory := links.SegmentPool()), memory


HEADER = struct.Struct("<BHIQQ")
HUGE = (1 << 63) - 1
BAD = {
    "a message of 2**63 bytes": (HEADER.pack(0, 0, 0, 0, HUGE), "a message of 9,223,372,036,854,775,807 bytes"),
    "a message that is not small": (HEADER.pack(0, 0, 0, 0, links.SMALL + 1), "a message of 32,769 bytes"),
    "a kind that is not": (HEADER.pack(4, 0, 0, 0, 0), "a message of kind 4"),
    "a segment not shown": (HEADER.pack(1, 0, 3, 0, 8), "segment 3 without having shown it"),
    "a segment without memory": (HEADER.pack(2, 0, 3, 0, 8), "segment 3 without its descriptor"),
    "an acknowledgement of nothing": (HEADER.pack(3, 0, 0, 0, 0), "an acknowledgement of segment 0"),
    "an acknowledgement too far": (HEADER.pack(3, 0, 1 << 31, 0, 0), "an acknowledgement of segment 2147483648"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_no_rank_sends(name: str, ends: Any) -> None:
    """A forged header closes the link with an error: otherwise a rank would allocate as much memory as it says."""
    theirs, link, _ = ends
    sent, words = BAD[name]
    theirs.sendall(sent)
    with pytest.raises(fshard.MismatchError, match=r"^rank 7 sent ") as caught:
        link.take(0, "a call")
    assert words in str(caught.value)
    assert len(link.stream) == 0
    with pytest.raises(fshard.MismatchError, match=r"^rank 7 has gone"):
        link.take(0, "a call")
    assert theirs.recv(1) == b""


def test_nothing_but_words_where_there_is_no_memory() -> None:
    """A link without shared memory refuses descriptors and segments: otherwise a peer could make it map memory."""
    for kind in (1, 2, 3):
        theirs, ours = hostile.pair()
        with theirs, ours:
            theirs.sendall(HEADER.pack(kind, 0, 0, 0, 0))
            with pytest.raises(fshard.MismatchError, match=f"rank 7 sent a message of kind {kind}"):
                links.Link(ours, "rank 7", 10.0).take(0, "a call")


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes(seed: int) -> None:
    """Random bytes are an error that names the peer: otherwise they would crash a rank, or pass for a message."""
    r, errors = random.Random(seed), list[str]()
    for _ in range(50):
        theirs, ours = hostile.pair()
        with theirs, ours:
            link = links.Link(ours, "rank 7", 10.0, links.SegmentPool())
            for _ in range(4):
                fields = r.randrange(5), r.choice([0, 3]), r.randrange(2), r.choice([0, HUGE]), r.choice([0, 5])
                theirs.send(r.choice([HEADER.pack(*fields), b"abc", r.randbytes(r.randrange(1, 60)), b"\xff" * 8]))
                try:
                    link.drain()
                except fshard.MismatchError as failure:
                    errors.append(str(failure))
                    break
    assert len(errors) > 10
    assert all(text.startswith("rank 7 sent ") for text in errors)


def _memfd(size: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("make", "part", "words"),
    [
        (lambda: _memfd(4096, fcntl.F_SEAL_GROW), (0, 8), "memory that may change its size under its readers"),
        (lambda: _memfd(4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK), (0, 8), "memory that may change its size"),
        (lambda: _memfd(0, SEALS), (0, 8), "memory that may change its size under its readers (seals 7, 0 bytes)"),
        (lambda: os.open(os.devnull, os.O_RDWR), (0, 8), "a descriptor that cannot be mapped ([Errno 22]"),
        (lambda: _memfd(4096, SEALS), (4090, 8), "bytes 4,090 to 4,098 of segment 0, of 4,096"),
        (lambda: _memfd(4096, SEALS), (HUGE, HUGE), "bytes 9,223,372,036,854,775,807 to"),
    ],
)
def test_memory_that_no_rank_sends(make: Any, part: tuple[int, int], words: str, ends: Any) -> None:
    """Memory that is not sealed or too short is an error and is closed: otherwise reading it could crash the rank."""
    theirs, link, _ = ends
    before, fd = hostile.num_open(), make()
    socket.send_fds(theirs, [HEADER.pack(2, 0, 0, *part)], [fd])
    os.close(fd)
    text = ""
    try:
        link.take(0, "a call")
    except fshard.MismatchError as failure:
        text = str(failure)  # only the text: the exception would keep the mapped memory alive
    assert text.startswith("rank 7 sent ")
    assert words in text
    link.mapped.clear()
    assert hostile.num_open() == before


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_memory_that_this_rank_has_no_room_for(number: int, ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without memory would say that its peer sent what no rank sends."""
    theirs, link, _ = ends
    before, fd = hostile.num_open(), _memfd(4096, SEALS)
    socket.send_fds(theirs, [HEADER.pack(2, 0, 0, 0, 8)], [fd])
    os.close(fd)
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match="this rank lacks room for memory of rank 7") as failure:
        link.take(0, "a call")
    assert failure.value.errno == number
    monkeypatch.undo()
    with pytest.raises(fshard.MismatchError, match="rank 7 has gone"):  # the link is closed, for both
        link.take(0, "a call")
    assert theirs.recv(1) == b""
    assert hostile.num_open() == before


@pytest.mark.parametrize("with_memory", [False, True])
def test_descriptors_that_nobody_asked_for(with_memory: bool) -> None:
    """Descriptors that come without a segment are closed: otherwise a peer could use up those of a rank."""
    before = hostile.num_open()
    theirs, ours = hostile.pair()
    with theirs, ours:
        link = links.Link(ours, "rank 7", 10.0, links.SegmentPool() if with_memory else None)
        socket.send_fds(theirs, [HEADER.pack(0, 0, 0, 0, 0)], [0, 1, 2])
        with pytest.raises(fshard.MismatchError, match="rank 7 sent 3 descriptors of no segment"):
            link.take(0, "a call")
        link.fds.append(os.dup(0))
        del link
    assert hostile.num_open() == before


def test_memory_cannot_be_cut() -> None:
    """A shared segment cannot be truncated or enlarged: otherwise a peer could crash the ranks that read it."""
    segment = links.SegmentPool().new(8192)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)


@pytest.mark.parametrize("text", ["", "[", "3", "[]", '["1", "", "", ""]', "[1, 2, 3, 4]", '[1, "", ""]', "[" * 60000])
def test_words_that_no_rank_says(text: str) -> None:
    """Malformed text about a checked call is an error that names the peer: otherwise it would raise inside json."""
    with pytest.raises(fshard.MismatchError, match="rank 7 sent what no rank says of its calls"):
        compare_calls._read_status(text, 7)
    assert compare_calls._read_status(json.dumps([1, "a", "b", "c"]), 7) == (1, "a", "b", "c")


def test_a_call_of_any_length(ends: Any) -> None:
    """A call whose text is longer than a header is cut, and still matches: otherwise long labels would be an error."""
    theirs, link, _ = ends
    peer = links.Link(theirs, "rank 3", 10.0)
    for call in ("x" * (1 << 16), "é" * (1 << 16)):
        peer.send(call, torch.ones(3, dtype=torch.uint8), None)
        number, link.num_expected = link.num_expected, link.num_expected + 1
        assert link.take(number, call).data.tolist() == [1, 1, 1]


# --- descriptors, memory, hosts, time


def test_what_a_machine_lacks() -> None:
    """Without memory or descriptors ranks use sockets, or say what is lacking: otherwise they would crash or hang."""
    for number, (counts, refused, few, elsewhere) in enumerate(gloo(hostile.one_process_at_a_time)):
        # a segment more if a peer reads late: two descriptors; a plan that stays costs one at least
        assert max(counts) - counts[0] < len(counts) - 1, counts
        name, warned = refused
        assert name == "GroupRanks"
        text = "no shared memory, so that all messages go through sockets: rank 1 of axis 'shard': memfd_create: "
        assert warned == [text + "[Errno 1] Operation not permitted"] * (number == 0)
        *connecting, made = few
        assert [text for text in connecting if "rank 1 of axis 'shard': " in text and "ulimit -n" in text] == connecting
        assert ("ulimit -n" in made and "no shared memory of 4,194,304 bytes" in made) == (number == 1), made
        assert elsewhere == ("GroupRanks", {"AF_INET"})


def test_data_that_end_early_on_one_rank(tmp_path: Path) -> None:
    """A rank that gathers while others make a checked step gets an error: otherwise data that end early would hang."""
    texts = values(fates(hostile.data_end_early, str(tmp_path), shard=3, seconds=30.0))
    for text in texts:
        assert "ranks called different collectives" in text, texts


def test_the_users_timeout(tmp_path: Path) -> None:
    """The timeout of `init_process_group` holds for every wait: otherwise ranks would give up too early or too late."""
    (found, texts), *others = values(fates(hostile.timeouts, str(tmp_path), shard=2, replicate=2))
    assert found == [2.0, 2.0, 2.0, 2.0, 7.0, 2.0, 2.0]
    assert [one[0] for one in others] == [found] * 3
    assert len(texts) == 3
    assert "did not answer within 2 s in all_reduce(float32[3], axis='shard')" in texts[0]
    assert "did not answer within the process group's timeout, in all_reduce(float32[3]" in texts[1]
    assert "did not answer within 2 s in all_reduce(float32[3], axis='shard')" in texts[2]


@pytest.mark.parametrize("kind", ADDRESSES)
def test_two_hosts(kind: str) -> None:
    """Two hosts connect by a named interface, by the route, or as copies of one machine: otherwise jobs would hang."""
    script = [sys.executable, str(Path(__file__).parents[1] / "support" / "two_hosts.py")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    addresses = ADDRESSES[kind]
    with two_hosts(kind) as names:
        runs = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *script, str(rank), addresses[0]],
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment},
            )
            for rank, name in enumerate(names)
        ]
        for rank, run in enumerate(runs):
            out, errors = run.communicate(timeout=60)
            ways = [f"{way} GroupRanks {addresses[1 - rank]}\nTrue\n2.0\n" for way in ("named", "route", "copies")]
            assert out == "".join(ways), errors


def test_the_address_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address comes from the named interface or from the route: otherwise ranks would dial a wrong address."""
    assert rendezvous.address_of("lo") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing")
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME=nothing: expected an interface with an address"):
        rendezvous._interface()
    assert rendezvous._way_to("") == rendezvous._way_to("no-such-name.invalid") == ""
    assert rendezvous._from_outside("10.1.2.3", ["10.1.2.3", ""]) == "10.1.2.3"
    monkeypatch.setattr(rendezvous, "_way_to", lambda target: f"to {target}" if target else "")
    assert rendezvous._from_outside("127.0.1.1", ["127.0.1.1", "10.1.2.4"]) == "to 10.1.2.4"
    assert rendezvous._from_outside("", ["", "::1"]) == f"to {rendezvous._SOMEWHERE}"
    assert rendezvous._from_outside("127.0.1.1", ["127.0.1.1", "::1", ""]) == "127.0.1.1"
