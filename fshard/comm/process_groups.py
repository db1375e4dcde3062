"""Ranks of torch's process groups: their messages and timeouts, and the host of their store.

Note [One thread]
    Messages between two ranks have no names: two threads of a rank would receive each other's messages. So a process
    group and its connections belong to the first thread that communicates over the group, until this thread ends. Any
    other thread, and a forked process, gets an error at once. Threads not started by Python are autograd's, and
    allowed: autograd runs the backward while the calling thread waits.

Note [Hanging up]
    A rank that gives up closes its connections, so that ranks waiting for it hear at once and not at their timeout:
    when a peer has gone, and when the mesh is closed. An error's traceback may keep plans and groups, so freeing them
    is not enough. Gloo closes a group's connections with the last reference to the group (torch's `abort` and
    `shutdown` do not), or after a wait without its message: `_hang_up` waits a millisecond for a message that nobody
    sends. MPI, UCC and NCCL lack this; their ranks hear at the end of the process, or at their timeout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from ..core.tracing import memo
from .ranks import Call, MismatchError

# dtypes sent by every backend
_SENT = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)

# A message's tag is its size: gloo ends a process that receives more bytes than expected. MPI has tags up to 32767.
_TAGS = 32749  # a prime
_NOBODYS = (1 << 31) - 1  # a tag without messages


class Owner:
    """The thread that communicates over a process group (Note [One thread])."""

    def __init__(self, inherited: bool) -> None:
        self._thread: threading.Thread | None = None
        self._lock, self._inherited = threading.Lock(), inherited  # inherited: the parent process made the group
        self.closed = ""  # why the group is closed

    def inherit(self) -> None:
        self._thread, self._inherited = None, True

    def close(self, text: str) -> None:
        """Refuse all threads from now on, with `text`."""
        self._thread, self.closed = None, text

    def check(self, axis: str) -> None:
        if threading.current_thread() is not self._thread:
            self._admit(axis)

    def _admit(self, axis: str) -> None:
        if self.closed:
            raise RuntimeError(f"axis {axis!r} of a mesh: {self.closed}")
        if self._inherited:
            raise RuntimeError(
                f"axis {axis!r} of a mesh in a forked process: the mesh's connections are the parent's, which would "
                "lose messages. Start processes that communicate with 'spawn', and make their own meshes in them."
            )
        thread = threading.current_thread()
        # private: no public name for threads not started by `threading`
        if isinstance(thread, threading._DummyThread):
            return
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise RuntimeError(
                    f"axis {axis!r} of a mesh in thread {thread.name!r}: thread {self._thread.name!r} has communicated "
                    "over this process group, and has not ended: the messages of the two would be mixed. Make plans "
                    "and communicate in one thread, or give each thread a mesh of a process group of its own: "
                    "DeviceMesh.from_group(dist.new_group(), 'cpu', mesh_dim_names=('shard',))."
                )
            self._thread = thread


FEW = 8  # up to 8 CPU processes: messages are faster than gloo's collectives


def first_of(module: object, *names: str) -> Callable[..., Any]:
    """Return the first attribute that `module` has.

    >>> import math
    >>> first_of(math, "square_root", "sqrt")(4.0)
    2.0
    """
    return next(getattr(module, name) for name in names if hasattr(module, name))


# torch 2.13 deprecates the old names, torch 2.11 has only the old names
all_gather_single = first_of(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x  # backends cannot sum complex tensors


def as_sent(x: Tensor, dtypes: Collection[torch.dtype] = _SENT) -> Tensor:
    """Return a view for backends to send: flat bytes if `dtypes` lacks the dtype.

    >>> as_sent(torch.ones(2, dtype=torch.int16))
    tensor([1, 0, 1, 0], dtype=torch.uint8)
    """
    real = as_real(x)
    return real if real.dtype in dtypes else real.view(-1).view(torch.uint8)


class Connections(dict[str, dist.ProcessGroup]):
    """Connections over a mesh: process groups by axis, none after `close`, and links of one host."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]):
        super().__init__(groups)
        self.leave: Callable[[str], None] = lambda text: None  # closes the links, and tells their peers why
        self.ended = ""  # why groups were hung up

    def __missing__(self, axis: str) -> NoReturn:
        raise MismatchError(f"axis {axis!r} of a mesh: {self.ended}")

    def hang_up(self, text: str, axes: Collection[str]) -> None:
        """Close gloo's connections along these axes (Note [Hanging up])."""
        for axis in axes:
            self.ended = self.ended or text
            _hang_up(self[axis])

    def give_up(self, text: str) -> None:
        self.leave(text)
        self.hang_up(text, [*self])

    def close(self, text: str) -> None:
        self.hang_up(text, [*self])
        self.clear()
        self.ended = text


def _hang_up(group: dist.ProcessGroup) -> None:
    cpu = torch.device("cpu")
    backend = _backend(group, cpu)
    backend = getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
    if getattr(backend, "name", str)() != dist.Backend.GLOO:
        return
    nothing = torch.empty(1, dtype=torch.uint8, device=cpu)
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # the first wait fails, and closes all connections
                backend.recv([nothing], peer, _NOBODYS).wait(timedelta(milliseconds=1))


@dataclass
class Works:
    """An exchange of torch.distributed."""

    works: Sequence[dist.Work]
    parts: Sequence[Tensor]
    call: Call | str = ""
    timeout: timedelta | None = None  # None: that of the process group
    peers: Sequence[str] = ()  # by work, for errors
    connections: Connections | None = None

    def wait(self) -> Sequence[Tensor]:
        """MismatchError if a peer is gone or does not answer."""
        with _answering(self.call, self.connections, peers := [*self.peers], works := [*self.works]):
            while works:
                works[0].wait() if self.timeout is None else works[0].wait(self.timeout)
                del works[:1], peers[:1]
        return self.parts

    def done(self) -> None: ...


@contextmanager
def _answering(
    call: Call | str, connections: Connections | None, peers: Sequence[str], works: Sequence[dist.Work] = ()
) -> Iterator[None]:
    """Turn a RuntimeError, but a device's, into a MismatchError with the first peer, and the peers of late `works`."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError, MismatchError):
        raise
    except RuntimeError as failure:
        if connections is not None and connections.ended:
            raise MismatchError(f"{call}: {connections.ended}") from failure
        first, *others = peers or ["a peer"]
        late = {peer for peer, work in zip(others, works[1:], strict=False) if peer != first and _is_late(work)}
        more = ", nor did " * bool(late) + " or ".join(sorted(late))
        reason = f"has gone, or did not answer within the process group's timeout{more}"
        text = f"{first} {reason}, in {call}"
        if connections is not None:
            connections.give_up(text)
        raise MismatchError(f"{text}: {failure}") from failure


def _is_late(work: dist.Work) -> bool:  # the message has not arrived, or has not been sent
    with suppress(RuntimeError):
        work.wait(timedelta(milliseconds=1))
        return False
    return True


def outputs_of(sends: Sequence[Tensor], recvs: Sequence[Tensor | None], rank: int) -> list[Tensor]:
    local, missing = sends[rank], sum(recv is None for peer, recv in enumerate(recvs) if peer != rank)
    new_rows = iter(local.new_empty(missing, *local.shape)) if missing else iter(())  # (missing, ...)
    new = (local if peer == rank else next(new_rows) if recv is None else recv for peer, recv in enumerate(recvs))
    return [place if recv is None else recv for recv, place in zip(recvs, new, strict=True)]


class GroupRanks:
    """The ranks of a process group; up to `few` CPU processes send messages, others call torch's collectives."""

    whole = None

    def __init__(
        self,
        axis: str,
        group: dist.ProcessGroup,
        device: torch.device,
        few: int = FEW,
        connections: Connections | None = None,
    ):
        self.axis, self.device = axis, device
        self.connections = Connections({axis: group}) if connections is None else connections
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._in_pairs = device.type == "cpu"  # gloo has no all-to-all of different sizes
        others = [p for p in range(self.size if self._in_pairs else 0) if p != self.rank]
        self._peers = [f"rank {p} of axis {axis!r}" for p in others for _ in range(2)]  # by message
        self.built_in = None if self.size == 1 or (device.type == "cpu" and self.size <= few) else group

    @property
    def may_be_replaced(self) -> bool:
        """True for torch's CPU backends: shared memory replaces no backend registered by a user."""
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.connections[self.axis]).split(","))
        return backends.get(self.device.type) in (dist.Backend.GLOO, dist.Backend.MPI, dist.Backend.UCC)

    @memo
    def timeout(self) -> timedelta:
        return timeout_of(self.connections[self.axis], self.device)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        maker = self._maker if lent and numel and like.device == self.device else None
        return like.new_empty(numel) if maker is None else maker(numel, dtype=like.dtype, device=self.device)

    @memo
    def _maker(self) -> Callable[..., Tensor] | None:
        """Allocator of memory registered with NCCL, or None; NCCL then needs fewer multiprocessors."""
        if self.built_in is None:
            return None
        backend = _backend(self.connections[self.axis], self.device)
        supports = getattr(backend, "supports_tensor_alloc", None)
        if supports is None or not supports(self.device):
            return None
        # NCCL registers memory with a communicator, made by the first collective
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.connections[self.axis])
        return backend.allocate_tensor

    @memo
    def _spare(self) -> Tensor:
        """Bytes (2, n) in place of empty tensors, refused by NCCL_CHECK_POINTERS=1."""
        return torch.zeros(2, 16, dtype=torch.uint8, device=self.device)  # memoized: messages may be under way

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Works:
        """On CPUs send messages, on GPUs one all-to-all: NCCL would hold messages' memory until the device is done."""
        parts = outputs_of(sends, recvs, self.rank)
        with _answering(call, self.connections, peers := [*self._peers]):
            works = [] if self.size == 1 else self._start(sends, parts, peers)
        # with a timeout, NCCL's `wait` would block the host; NCCL's watchdog applies the group's timeout
        return Works(works, parts, call, self.timeout if self._in_pairs else None, self._peers, self.connections)

    def _start(self, sends: Sequence[Tensor], parts: Sequence[Tensor], peers: list[str]) -> list[dist.Work]:
        sends, parts, group = [as_sent(x) for x in sends], [as_sent(x) for x in parts], self.connections[self.axis]
        if not self._in_pairs:
            spare = self._spare.view(sends[0].dtype)
            outs, ins = (
                [x[:1] if p == self.rank or not xs[p].numel() else xs[p] for p in range(self.size)]
                for x, xs in zip(spare, (parts, sends), strict=True)
            )
            return [dist.all_to_all(outs, ins, group=group, async_op=True)]
        works = list[Any]()
        for peer in (p for p in range(self.size) if p != self.rank):
            works.append(dist.irecv(parts[peer], group=group, group_src=peer, tag=parts[peer].nbytes % _TAGS))
            works.append(dist.isend(sends[peer], group=group, group_dst=peer, tag=sends[peer].nbytes % _TAGS))
            del peers[:2]
        return works


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    timeout = _timeout(group, device)
    # groups of a mesh of several axes have torch's default, whatever `init_process_group` got
    unsaid = timeout in (default_pg_timeout, default_pg_nccl_timeout)
    return _timeout(dist.group.WORLD, device) if unsaid else timeout


def _timeout(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    # private: no public way to read a group's timeout
    with suppress(AttributeError, RuntimeError):  # no options, or no backend for the device
        return _backend(group, device).options._timeout
    return default_pg_timeout


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> Any:  # stubs lack `options`
    # private, used by FSDP2 as well (test_process_groups.py)
    with suppress(AttributeError, RuntimeError):  # no backend for the device
        return None if group is None else group._get_backend(device)
    return None


def meeting_host() -> str:
    """Return the host of the process group's store (MASTER_ADDR), or ""."""
    store: object = dist.group.WORLD.get_group_store() if dist.group.WORLD is not None else None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
