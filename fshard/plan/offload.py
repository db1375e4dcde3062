"""Rows in host memory while a device computes: pinned memory, and streams for copies beside the computation.

Note [Crossing over]
    Each direction has a separate stream. Work on such a stream first waits for all earlier work of the computation, so
    memory that the computation has freed is never overwritten too early. Before the computation uses a result, the
    computation's stream waits for this stream. Copies read and write pinned memory, so the host is not blocked. The
    host waits for the device (`Crossing.settle`) once for each backward, before it reads gradients or updates
    parameters. If the device is the CPU, the streams are torch.cpu's, which do nothing, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..comm.ranks import Pending
from ..core.random import HOST
from ..core.tracing import is_tracing


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a (numel,) row in host memory; for a device other than the CPU pinned, so that copies do not block."""
    return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=device != HOST)


def pinned(row: Tensor, device: torch.device) -> Tensor:
    """Return a row in host memory that `device` can copy from: the row itself, or a pinned copy."""
    return row if device == HOST or row.is_pinned() else row.pin_memory()


def landing(row: Tensor, device: torch.device) -> Tensor:
    """Return the tensor into which the device writes the row's new values: the row if on the device, else a new one."""
    return row if row.device == device else torch.empty_like(row, device=device)


@dataclass(frozen=True)
class _Arrival:
    """An exchange backed by copies between the device and the host."""

    crossing: Crossing
    held: Sequence[Tensor]  # kept alive until the computation has waited: their memory may be reused afterwards

    def wait(self) -> Sequence[Tensor]:
        """Make the computation's stream wait for the copies, without blocking the host; returns the tensors kept."""
        self.crossing.join()
        return self.held

    def done(self) -> None:
        """Do nothing: no memory is shared with another rank."""


class Crossing:
    """A stream beside the computation: for one direction between host memory and a device, or for sums."""

    def __init__(self, device: torch.device):
        self.device: torch.device = device
        self._module = torch.get_device_module(device)
        # of a class of the device's own: torch.cuda's, torch.cpu's; -1 is high: the computation waits for its results
        self._stream = self._module.Stream(priority=-1)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Inside the block, work is put on this stream: it runs after the computation so far, and beside what follows.

        NotImplementedError while tracing for a device other than the CPU: a graph has no streams.
        """
        if is_tracing() and self.device != HOST:
            raise NotImplementedError(
                "a plan with offload= is for steps that run eagerly: a graph has no streams. Omit offload="
            )
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the computation's stream wait for this stream."""
        self._module.current_stream().wait_stream(self._stream)

    def joined(self, pending: Pending) -> Pending:
        """Return `pending` with one more step: the computation waits for this stream before it uses the result."""

        def arrived(x: Tensor) -> Tensor:
            self.join()
            return x

        return pending.then(arrived)

    def copied(self, x: Tensor, row: Tensor) -> Pending:
        """Copy `x` on the device to a row in host memory; the result is the row.

        The host may read the row after `settle`. `x` is kept alive until the result is waited for.
        """
        with self.ahead():
            row.copy_(x, non_blocking=True)
        return Pending(_Arrival(self, [x]), lambda _: row)

    def settle(self) -> None:
        """Make the host wait for the device; the host may then read and write rows."""
        self._module.synchronize()


class Crossings(NamedTuple):
    """The streams beside the computation, on the device of a mesh."""

    up: Crossing  # to the device
    down: Crossing  # to host memory
    sums: Crossing  # for sums of gradients (Note [Sums beside the computation] in `gradients`)
    stages: Crossing  # for gathers over several axes, which wait there for one stage before the next one starts


def crossings(mesh: Mesh) -> Crossings:
    """Return new streams on the device of a mesh."""
    return Crossings(*(Crossing(mesh.device) for _ in Crossings._fields))
