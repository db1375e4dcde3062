"""What processes that are no ranks do to those that are being connected, and ranks that end while they are."""

import gc
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import optim
from fshard.comm import primitives
from fshard.comm.mesh import Mesh
from fshard.hosts import compare_calls, one_host, rendezvous

from . import faults

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
    hold = rendezvous._Meeting.hold

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

    with mock.patch.object(rendezvous._Meeting, "hold", late if rank == 0 else hold):
        yield told


def among_strangers(mesh: Mesh, user: int, num: int) -> list[str]:
    """Connect while strangers call, and use the connection."""
    with strangers(mesh.get_rank(), user, num) as told:
        connected = one_host.connect(mesh)
    value = fshard.all_reduce(torch.ones(3), connected, "shard")
    assert value.tolist() == [2.0] * 3
    assert type(connected.ranks("shard")).__name__ == "_HostRanks"
    return told


FILES = tuple(str(Path(str(module.__file__))) for module in (one_host, rendezvous, compare_calls))


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
    # not where what a failure leaves behind is closed: that does not fail
    skipped = "__exit__"
    sys.settrace(lambda f, *_: local if f.f_code.co_filename in FILES and f.f_code.co_name != skipped else None)
    try:
        yield count
    finally:
        sys.settrace(before)


def _connect(mesh: Mesh, over: str) -> Any:
    """Connections for data, or those for words between hosts."""
    if over == "host":
        return one_host.connect(mesh)
    with mock.patch.object(rendezvous, "_host", return_value=f"host {mesh.get_rank()}"):
        return compare_calls.lines_of(mesh)


def end_while_connecting(mesh: Mesh, folder: str, kind: str, over: str, at: float, bad: int) -> Any:
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
        primitives.total(torch.ones(3), _connect(mesh, over) if over == "host" else _connected_mesh(mesh, over))
    except (fshard.MismatchError, ConnectionError) as failure:
        return time.monotonic(), f"{type(failure).__name__}: {failure}"
    return time.monotonic(), "no error"


def _connected_mesh(mesh: Mesh, over: str) -> Any:
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


def num_open() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def dropped_plans(mesh: Mesh) -> list[int]:
    """The descriptors open after each of twenty plans was made, used and dropped; the cyclic collector is off."""
    whole, counts = {"w": torch.ones(600_000)}, []
    gc.disable()
    for _ in range(20):
        plan = fshard.make_plan(whole, mesh)
        params = fshard.shard_params(whole, plan)
        value, _ = fshard.value_and_grad(lambda p: (p["w"] * 2).sum())(params)
        assert value.item() == 1_200_000 * mesh.size() / mesh.size()
        fshard.check(lambda p: fshard.gather_params(p))(params)
        del plan, params, value, _
        dist.barrier()  # nobody still reads
        counts.append(num_open())
    gc.enable()
    return counts


def without_memory(mesh: Mesh) -> tuple[str, list[str]]:
    """One rank may make no memory: all go through sockets, and the first of them says so, once."""
    refused = mock.Mock(side_effect=PermissionError(1, "Operation not permitted"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with mock.patch.object(os, "memfd_create", refused if mesh.get_rank() == 1 else os.memfd_create):
            connected = one_host.connect(mesh)
    assert fshard.all_reduce(torch.ones(3), connected, "shard").tolist() == [2.0] * 3
    return type(connected.ranks("shard")).__name__, [str(one.message) for one in found]


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """So many more descriptors may be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(highest)]  # fill the gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, before[1]))
    for fd in held[len(held) - left :]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held[: len(held) - left]:
            os.close(fd)


def too_few_descriptors(mesh: Mesh) -> list[str]:
    """What this rank hears when rank 1 has few descriptors left: while connecting, and when memory is made."""
    texts = []
    for left in range(4):
        with few_descriptors(left) if mesh.get_rank() == 1 else nullcontext():
            try:
                one_host.connect(mesh)
                texts.append("no error")
            except ConnectionError as failure:
                texts.append(str(failure))
    ranks = one_host.connect(mesh).ranks("shard")
    with few_descriptors(0) if mesh.get_rank() == 1 else nullcontext():
        try:
            ranks.empty(1 << 20, torch.ones(1), lent=True)
            texts.append("no error")
        except OSError as failure:
            texts.append(str(failure))
    return texts


def elsewhere(mesh: Mesh) -> tuple[str, set[str]]:
    """Two copies of one machine, which seem to be one host, but where no rank reaches another's address."""
    listening = rendezvous._listening

    def other(stack: Any, family: int, address: Any) -> Any:
        return listening(stack, family, address + "-here" if isinstance(address, str) else address)

    with mock.patch.object(rendezvous, "_listening", other):
        connected = one_host.connect(mesh)
        words = compare_calls.lines_of(mesh)
    assert fshard.all_reduce(torch.ones(3), connected, "shard").tolist() == [2.0] * 3
    assert words is not None
    families = {link.socket.family.name for link in words._links["shard"].values()}
    return type(connected.ranks("shard")).__name__, families


def one_process_at_a_time(mesh: Mesh) -> tuple[Any, ...]:
    """All of it, in one world."""
    return dropped_plans(mesh), without_memory(mesh), too_few_descriptors(mesh), elsewhere(mesh)


def data_end_early(mesh: Mesh, folder: str) -> str:
    """One rank has no more data, and gathers; the others take one more step, which is checked."""
    inner = optim.adamw(0.1)
    state = faults.start(mesh, "host", inner)
    step = fshard.check(faults.step_of(inner, lambda place: None))
    state, _ = step(state, faults.batch(mesh.get_rank()))
    fshard.gather_params(state.params)  # by all, outside of a check
    state, _ = step(state, faults.batch(mesh.get_rank()))
    heard = dist.FileStore(f"{folder}/heard", mesh.size())
    try:
        if mesh.get_rank() == 1:  # another unit than the one with which the others begin
            fshard.gather_params(state.params["head"])
        else:
            step(state, faults.batch(mesh.get_rank()))
    except fshard.MismatchError as failure:
        heard.set(str(mesh.get_rank()), "")
        heard.wait([str(rank) for rank in range(mesh.size())])  # nobody's end tells the others
        return str(failure)
    return "no error"


def _timeout(mesh: DeviceMesh | Mesh, axis: str) -> float:
    ranks: Any = primitives.along(mesh, axis)
    return ranks.timeout.total_seconds()


def timeouts(mesh: Mesh, folder: str) -> tuple[list[float], list[str]]:
    """The timeouts of a 2 x 2 mesh of one that was said, and a group that has its own; what comes of a late rank."""
    rank, size = mesh.get_rank(), 4
    again(rank, size, f"{folder}/world", timeout=timedelta(seconds=2))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    whole = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=7)), "cpu", mesh_dim_names=("all",))
    connected = one_host.connect(grid)
    seconds = [_timeout(each, axis) for each in (grid, connected) for axis in ("replicate", "shard")]
    seconds.append(_timeout(whole, "all"))
    words = compare_calls.lines_of(connected)
    assert words is not None
    seconds += [link.timeout for links in words._links.values() for link in links.values()]
    heard, texts = dist.FileStore(f"{folder}/heard", size), list[str]()
    if rank == 1:
        heard.wait(["done"])
        return seconds, texts
    if rank == 0:
        for late in (
            lambda: fshard.all_reduce(torch.ones(3), connected, "shard"),
            lambda: fshard.all_reduce(torch.ones(3), grid, "shard"),
            lambda: words.run(lambda: fshard.all_reduce(torch.ones(3), connected, "shard")),
        ):
            try:
                late()
            except fshard.MismatchError as failure:
                texts.append(str(failure))
        heard.set("done", "")
    return seconds, texts


def answers_and_ends(mesh: Mesh) -> str:
    """Rank 1 dials nobody, and ends when it has answered: that connection has told rank 0 all it was to tell."""
    greeted = rendezvous._Meeting._greeted

    def then_end(self: Any, call: Any) -> None:
        greeted(self, call)
        if self._answered:
            os._exit(3)

    if mesh.get_rank() == 1:
        with mock.patch.multiple(rendezvous._Meeting, _dial=lambda self, peer: None, _greeted=then_end):
            one_host.connect(mesh)
    try:
        one_host.connect(mesh)
    except (fshard.MismatchError, ConnectionError):
        return "an error"
    return "no error"
