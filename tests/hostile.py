"""What processes that are no ranks do to those that are being connected, and ranks that end while they are."""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fshard
from fshard import comm, host, lines, meeting

# Reads a listener's name where anybody can, calls it, and prints what it is told until the connection is closed.
STRANGER = """
import os, socket, sys
name, user, greeting, num = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
os.setgid(user), os.setuid(user)
assert any(line.endswith(f" @{name}\\n") for line in open("/proc/net/unix"))
calls = []
for _ in range(num):
    call = socket.socket(socket.AF_UNIX)
    call.connect(f"\\0{name}")
    try:
        call.sendall(greeting)
    except OSError:
        pass  # closed already
    calls.append(call)
print("called", flush=True)
told = b""
for call in calls:
    try:
        while more := call.recv(1 << 16):
            told += more
    except OSError:
        pass
print(told.hex(), flush=True)
"""

# what a stranger says; in words of an earlier version, too, of which the address was the secret
GREETINGS = {
    "nothing": b"",
    "a guess": struct.pack("<I32s", 1, b"x" * 32),
    "rank 999": struct.pack("<I32s", 999, b"x" * 32),
    "the address": b"{name}" + struct.pack("<I", 1),
    "nonsense": bytes(range(256)) * 16,
}


@contextmanager
def strangers(rank: int, user: int, num: int) -> Iterator[list[str]]:
    """One of every kind has called the listeners of this rank before anybody else is heard; what they were told."""
    told = list[str]()
    hold = meeting._Meeting.hold

    def late(self: Any, seconds: float) -> Any:
        name = self._listener.getsockname()[1:]  # after a byte of 0
        secret = name.removeprefix(b"fshard-")
        said = [greeting.replace(b"{name}", secret).hex() for greeting in GREETINGS.values()]
        args = [[sys.executable, "-S", "-c", STRANGER, name.decode(), str(user), one, str(num)] for one in said]
        runs = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in args]
        assert [run.stdout and run.stdout.readline() for run in runs] == ["called\n"] * len(runs)
        found = hold(self, seconds)
        # those that this rank did not close yet are closed with its listener
        self.__exit__(None)
        told.extend(run.communicate()[0].strip() for run in runs)
        return found

    with mock.patch.object(meeting._Meeting, "hold", late if rank == 0 else hold):
        yield told


def among_strangers(mesh: Any, user: int, num: int) -> list[str]:
    """Connect while strangers call, and use the connection."""
    with strangers(mesh.get_rank(), user, num) as told:
        connected = host.connect(mesh)
    value = fshard.all_reduce(torch.ones(3), connected, "shard")
    assert value.tolist() == [2.0] * 3
    assert type(connected.ranks("shard")).__name__ == "_HostRanks"
    return told


FILES = tuple(str(Path(module.__file__)) for module in (host, meeting, lines))


@contextmanager
def at_line(number: int, deed: Callable[[], None]) -> Iterator[list[int]]:
    """Do something when so many lines of the files that connect ranks have run; how many have, in the end."""
    count = [0]

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == number:
                deed()
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in FILES else None)
    try:
        yield count
    finally:
        sys.settrace(before)


def _connect(mesh: Any, over: str) -> Any:
    """Connections for data, or those for words between hosts."""
    if over == "host":
        return host.connect(mesh)
    with mock.patch.object(meeting, "_host", return_value=f"host {mesh.get_rank()}"):
        return lines.lines_of(mesh)


def end_while_connecting(mesh: Any, folder: str, kind: str, over: str, at: float, bad: int) -> Any:
    """Connect twice; the second time one rank ends at a line. When each other one's error came, and what it says."""
    with at_line(0, lambda: None) as lines_run:
        _connect(mesh, over)
    deed = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "raise": _fail, "exit": lambda: os._exit(3)}[kind]

    def ends() -> None:
        (Path(folder) / "ended").write_text(str(time.monotonic()))
        deed()

    if mesh.get_rank() == bad:
        with at_line(max(1, round(at * lines_run[0])), ends):
            _connect(mesh, over)
        ends()  # after the last line
    try:
        comm.total(torch.ones(3), _connect(mesh, over) if over == "host" else _connected_mesh(mesh, over))
    except (fshard.MismatchError, ConnectionError) as failure:
        return time.monotonic(), f"{type(failure).__name__}: {failure}"
    return time.monotonic(), "no error"


def _connected_mesh(mesh: Any, over: str) -> Any:
    _connect(mesh, over)
    return mesh


def _fail() -> None:
    raise ValueError("boom")


def drawn(seed: int) -> tuple[Any, ...]:
    """How, over what, where in between, and which rank of how many."""
    r = random.Random(seed)
    size = r.choice([2, 3])
    return r.choice(["kill", "raise", "exit"]), r.choice(["host", "tcp"]), r.random(), r.randrange(size), size


def again(rank: int, size: int, path: str, **kwargs: Any) -> None:
    """The default process group made anew."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size, **kwargs)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that do not block."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends
