"""Ranks of torch's process groups: messages between them, how long to wait for them, where the ranks met."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from .log import Call
from .ranks import MismatchError

# What every backend moves: NCCL has neither int16, unsigned integers of more than 8 bits nor float8 on all devices.
_SENT = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)


def first_of(module: Any, *names: str) -> Callable[..., Any]:
    """The function of the first of these names that a module has; StopIteration if it has none.

    >>> import math
    >>> first_of(math, "square_root", "sqrt")(4.0)
    2.0
    """
    return next(getattr(module, name) for name in names if hasattr(module, name))


# torch 2.13 warns of the old names, torch 2.11 has no others
all_gather_single = first_of(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def as_real(x: Tensor) -> Tensor:
    """A tensor as backends add it up: a view of complex ones as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x


def as_sent(x: Tensor, dtypes: Collection[torch.dtype] = _SENT) -> Tensor:
    """A contiguous tensor as backends move it: a view, in one of these dtypes, or as bytes.

    >>> as_sent(torch.ones(2, dtype=torch.int16))
    tensor([1, 0, 1, 0], dtype=torch.uint8)
    """
    real = as_real(x)
    return real if real.dtype in dtypes else real.view(-1).view(torch.uint8)


@dataclass
class Works:
    """An exchange made of works to wait for, and the places it fills."""

    works: Sequence[Any]
    parts: Sequence[Tensor]
    call: Call | str = ""
    timeout: timedelta | None = None  # None: the process group's own

    def wait(self) -> Sequence[Tensor]:
        """Wait for every work."""
        with _answering(self.call):
            for work in self.works:
                work.wait() if self.timeout is None else work.wait(self.timeout)
        return self.parts

    def done(self) -> None:
        """Nothing is shared with another rank."""


@contextmanager
def _answering(call: Call | str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as failure:
        said = "a peer has gone, or did not answer within the process group's timeout"
        raise MismatchError(f"{said}, in {call}: {failure}") from failure


def places(sends: Sequence[Tensor], recvs: Sequence[Tensor | None], rank: int) -> list[Tensor]:
    """A place for what each rank sends: the given one, a part of one new buffer, or for this rank its own tensor."""
    own, missing = sends[rank], sum(recv is None for peer, recv in enumerate(recvs) if peer != rank)
    made = iter(own.new_empty(missing, *own.shape)) if missing else iter(())  # (peers, ...)
    new = (own if peer == rank else next(made) if recv is None else recv for peer, recv in enumerate(recvs))
    return [place if recv is None else recv for recv, place in zip(recvs, new, strict=True)]


class GroupRanks:
    """Ranks of a torch process group."""

    whole = None

    def __init__(self, axis: str, group: dist.ProcessGroup, device: torch.device):
        self.axis, self.device, self._group = axis, device, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.built_in = None if device.type == "cpu" else group

    @cached_property
    def timeout(self) -> timedelta:
        """How long a message is waited for."""
        return timeout_of(self._group, self.device)

    def empty(self, numel: int, like: Tensor, lent: bool) -> Tensor:
        """A new tensor; one that is lent in memory that the group's backend made for it, where it makes any."""
        maker = self._maker if lent and numel and like.device == self.device else None
        return like.new_empty(numel) if maker is None else maker(numel, dtype=like.dtype, device=self.device)

    @cached_property
    def _maker(self) -> Callable[..., Tensor] | None:
        """What makes memory that is registered with the network: NCCL's collectives then take fewer of the GPU's units.

        It is let go of as any tensor's, to be used again.
        """
        backend: Any = None if self.built_in is None else _backend(self._group, self.device)
        supports = getattr(backend, "supports_tensor_alloc", None)
        return backend.allocate_tensor if supports is not None and supports(self.device) else None

    def idle(self, x: Tensor) -> bool:
        """True: a message has left when it was waited for."""
        return True

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor | None], call: Call) -> Works:
        """Messages from point to point, or one all-to-all of a group whose collectives are the fast ones.

        There it starts once for all peers, and what is sent and received may be used again as soon as the computation
        has waited: NCCL holds the memory of point-to-point messages until the device has passed them.
        """
        parts = places(sends, recvs, self.rank)
        with _answering(call):
            works = [] if self.size == 1 else self._start(sends, parts)
        # NCCL takes a timeout as a wish to block the host; its watchdog has the group's
        return Works(works, parts, call, self.timeout if self.built_in is None else None)

    def _start(self, sends: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Any]:
        sends, parts = [as_sent(x) for x in sends], [as_sent(x) for x in parts]
        if self.built_in is not None:
            nothing = sends[self.rank].new_empty(0)  # to this rank itself
            outs, ins = ([nothing if p == self.rank else xs[p] for p in range(self.size)] for xs in (parts, sends))
            return [dist.all_to_all(outs, ins, group=self._group, async_op=True)]
        # gloo's all-to-all lacks dtypes, and takes longer for messages of 32 MiB between two ranks
        ops = []
        for peer in (p for p in range(self.size) if p != self.rank):
            ops.append(dist.P2POp(dist.irecv, parts[peer], group=self._group, group_peer=peer))
            ops.append(dist.P2POp(dist.isend, sends[peer], group=self._group, group_peer=peer))
        return dist.batch_isend_irecv(ops)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long a wait in a group may last: what was said when it was made, or else when the default group was.

    The groups of a mesh of several axes have torch's 30 minutes, whatever `init_process_group(timeout=)` was told.
    """
    own = _timeout(group, device)
    unsaid = own in (default_pg_timeout, default_pg_nccl_timeout)
    return _timeout(dist.group.WORLD, device) if unsaid else own


def _timeout(group: Any, device: torch.device) -> timedelta:
    # private API: torch has no public way to read it
    try:
        return _backend(group, device).options._timeout
    except (AttributeError, RuntimeError):  # a backend without options, or none for the device
        return default_pg_timeout


def _backend(group: Any, device: torch.device) -> Any:
    """What sends a group's messages from a device, or None."""
    # private API, which torch's own FSDP2 asks as well (test_process_groups.py notices when it goes)
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):  # none for the device
        return None


def meeting_host() -> str:
    """The host that all ranks reached when they met, by the name this one was given; empty if they met otherwise."""
    store: Any = dist.group.WORLD.get_group_store() if dist.group.WORLD is not None else None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
