"""A backend of torch.distributed for benchmarks: gloo, on which messages take as long as on a slower link.

Each rank has one full-duplex link. What a rank sends leaves it byte by byte, in the order in which collectives start,
at `bandwidth`, and arrives `latency` later. A collective has ended for a rank when everything that is sent to this rank
has arrived. So the bytes that a rank sends decide the time, whichever collective sends them:

    all-gather, reduce-scatter, all-to-all   the parts of all other ranks
    all-reduce                               2 (W - 1) / W of the tensor, as of a reduce-scatter and an all-gather
    broadcast, send                          the tensor

gloo moves the data, in threads of its own, beside the computation. `wait` waits for gloo, then until the data would
have arrived. Ranks are processes of one host: each writes when its messages arrive to memory that all share.

There are two clocks. With `Clock` `wait` sleeps, which takes no processor time and holds no lock; gloo must be faster
than the link that is imitated. With `Counted` time is a number of each rank, which `wait` and pauses move on: a step
takes the time that the order of its collectives gives it on a machine whose host takes no time, whatever else runs.

    dist.Backend.register_backend("delaying", delaying, devices=["cpu"])
    group = dist.new_group(backend="cpu:delaying")
    group.use(Link(latency=1e-4, bandwidth=1e9), Clock())
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
"""

# torch calls these methods by other names and with other arguments in other releases, and its stubs know one of them
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ROOM = 1 << 14  # times kept for each pair of ranks: more than messages that are under way at once
_FOREVER = timedelta(days=1)


@dataclass(frozen=True)
class Link:
    """The time that a link takes: seconds until the first byte arrives, and bytes in a second."""

    latency: float = 0.0
    bandwidth: float = float("inf")


class Clock:
    """The time of the machine, in seconds: the same for all processes of a host."""

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def until(self, then: float) -> None:
        """Wait."""
        if (left := then - time.monotonic()) > 0:
            time.sleep(left)


class Counted(Clock):
    """A time that passes only where somebody waits."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The time."""
        return self._now

    def until(self, then: float) -> None:
        """Move the time on."""
        self._now = max(self._now, then)


class _Work(dist._Work):
    """What gloo does, which ends for this rank when its data have arrived."""

    def __init__(self, inner: dist.Work, arrived: Callable[[], float], clock: Clock):
        super().__init__()
        self._inner, self._arrived, self._clock = inner, arrived, clock

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for gloo, then until the data would have arrived."""
        self._inner.wait(timeout)
        # after gloo's wait: only then have the senders surely written the times
        self._clock.until(self._arrived())
        return True

    def is_completed(self) -> bool:
        """Whether the data would have arrived."""
        return self._inner.is_completed() and self._arrived() <= self._clock.now()


class DelayingGroup(dist.ProcessGroup):
    """A process group of gloo whose collectives take the time of a link on a clock (`use`)."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # the other of two constructors
        self.link, self.clock = Link(), Clock()
        self._free, self._peers = 0.0, [p for p in range(size) if p != rank]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size = rank, size
        self._num_sent, self._num_received = dict.fromkeys(self._peers, 0), dict.fromkeys(self._peers, 0)
        self._times = self._shared(store)  # (from, to, number of the message % _ROOM): when the message arrives

    def use(self, link: Link, clock: Clock) -> None:
        """Take the time of `link` from now on, on `clock`. No collective may be under way."""
        self.link, self.clock, self._free = link, clock, clock.now()

    def pause(self, seconds: float) -> None:
        """Let time pass, as a computation does that needs no processor."""
        self.clock.until(self.clock.now() + seconds)

    def _shared(self, store: dist.Store) -> Tensor:
        """Float64 numbers that all ranks read and write."""
        if self._rank == 0:
            store.set("times", tempfile.mkstemp(prefix="delaying-", dir="/dev/shm")[1])
        path, numel = store.get("times").decode(), self._size**2 * _ROOM
        times = torch.from_file(path, shared=True, size=numel, dtype=torch.float64)
        self._gloo.barrier().wait()
        if self._rank == 0:
            os.unlink(path)
        return times.view(self._size, self._size, _ROOM)

    def _send(self, nbytes: float, to: Sequence[int]) -> float:
        """Put messages of `nbytes` together on this rank's link, and write when they arrive. Returns when they left."""
        self._free = max(self._free, self.clock.now()) + nbytes / self.link.bandwidth
        for peer in to:
            self._times[self._rank, peer, self._num_sent[peer] % _ROOM] = self._free + self.link.latency
            self._num_sent[peer] += 1
        return self._free

    def _receive(self, of: Sequence[int]) -> Callable[[], float]:
        """Return a function that says when the next messages of some ranks arrive."""
        places = [(peer, self._rank, self._num_received[peer] % _ROOM) for peer in of]
        for peer in of:
            self._num_received[peer] += 1
        return lambda: max((float(self._times[place]) for place in places), default=0.0)

    def _collective(self, nbytes: float, start: Callable[[], dist.Work]) -> dist.Work:
        """Start a collective in which every rank sends `nbytes`, and hears of every other one."""
        left, arrived = self._send(nbytes, self._peers), self._receive(self._peers)
        return _Work(start(), lambda: max(left, arrived()), self.clock)

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Gather: every rank sends its tensor to every other."""
        opts = opts or dist.distributed_c10d.AllgatherOptions()
        nbytes = len(self._peers) * sum(x.nbytes for x in inputs)
        return self._collective(nbytes, lambda: self._gloo.allgather(outputs, inputs, opts))

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Gather into one tensor."""
        return self.allgather([[*output.chunk(self._size)]], [x], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several gathers, as one message."""
        works = [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return _All(works)

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Sum the parts of all ranks."""
        opts = opts or dist.ReduceScatterOptions()
        return self._collective(
            len(self._peers) * output.nbytes, lambda: _started(self._gloo, "reduce_scatter", output, x, opts)
        )

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> dist.Work:
        """Sum the parts of all ranks, given as lists."""
        opts = opts or dist.ReduceScatterOptions()
        nbytes = len(self._peers) * sum(x.nbytes for x in outputs)
        return self._collective(nbytes, lambda: self._gloo.reduce_scatter(outputs, inputs, opts))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Several sums, one after the other on the link."""
        return _All([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Sum whole tensors: a reduce-scatter and an all-gather."""
        opts = opts or dist.AllreduceOptions()
        nbytes = 2 * len(self._peers) / self._size * sum(x.nbytes for x in tensors)
        return self._collective(nbytes, lambda: self._gloo.allreduce(tensors, opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Sum several tensors, one after the other on the link."""
        opts = opts or dist.AllreduceOptions()
        return _All([self.allreduce([x], opts) for x in tensors])

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: Any = (), input_sizes: Any = (), opts: Any = None
    ) -> dist.Work:
        """Send a part to each rank."""
        opts, sizes = opts or dist.AllToAllOptions(), list(input_sizes or [])
        own = sizes[self._rank] / max(1, sum(sizes)) if sizes else 1 / self._size
        return self._collective(
            x.nbytes * (1 - own),
            lambda: self._gloo.alltoall_base(output, x, list(output_sizes or []), sizes, opts),
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Send one rank's tensor to all."""
        opts = opts or dist.BroadcastOptions()
        nbytes = sum(x.nbytes for x in tensors) * (opts.rootRank == self._rank)
        return self._collective(nbytes, lambda: self._gloo.broadcast(tensors, opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for all ranks."""
        opts = opts or dist.BarrierOptions()
        return self._collective(0, lambda: self._gloo.barrier(opts))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to one rank."""
        left = self._send(sum(x.nbytes for x in tensors), [peer])
        return _Work(self._gloo.send(tensors, peer, tag), lambda: left, self.clock)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive from one rank."""
        return _Work(self._gloo.recv(tensors, peer, tag), self._receive([peer]), self.clock)

    # names of torch before 2.13
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _set_group_name(self, name: str) -> None:
        # torch keeps the name in a group's backends, of which a group written in Python has none
        self._name = name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def getBackendName(self) -> str:  # torch's name of the method
        """The name by which the backend is registered."""
        return "delaying"


class _All(dist._Work):
    """Several collectives as one."""

    def __init__(self, works: Sequence[dist.Work]):
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)


def _started(gloo: Any, name: str, *args: Any) -> dist.Work:
    return getattr(gloo, f"{name}_single" if hasattr(gloo, f"{name}_single") else f"_{name}_base")(*args)


def delaying(store: dist.Store, rank: int, size: int, timeout: timedelta) -> DelayingGroup:
    """Make a group: the function that `dist.Backend.register_backend` is given."""
    return DelayingGroup(store, rank, size, timeout)
