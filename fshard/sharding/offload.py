"""Rows in host memory while a device computes: their memory, what crosses over beside the computation, the streams.

Note [Crossing over]
    Each direction has a stream of its own. What is started there first waits for the computation so far, so memory
    that the computation has let go of is never written to too early; and whoever uses what arrived has the computation
    wait for the stream. Copies read and write pinned memory, so the host goes on meanwhile: before it reads gradients
    or updates parameters itself, it waits for the device (`Crossing.settle`), once for each backward. Where the device
    is the CPU the streams are torch.cpu's, which do nothing, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..comm.ranks import Pending
from ..core.tracing import is_tracing

HOST = torch.device("cpu")


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A row in host memory, where it is for a device pinned: copies then need not wait."""
    return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=device != HOST)


def pinned(row: Tensor, device: torch.device) -> Tensor:
    """A row in host memory for a device: itself, or a pinned copy."""
    return row if device == HOST or row.is_pinned() else row.pin_memory()


def landing(row: Tensor, device: torch.device) -> Tensor:
    """Where the device writes what a row is to hold: the row, if it lies there."""
    return row if row.device == device else torch.empty_like(row, device=device)


@dataclass(frozen=True)
class _Arrival:
    """An exchange between the device and the host."""

    crossing: Crossing
    held: Sequence[Tensor]  # until the computation has waited: then their memory may be used again

    def wait(self) -> Sequence[Tensor]:
        """The computation waits; the host does not."""
        self.crossing.join()
        return self.held

    def done(self) -> None:
        """Nothing is shared with another rank."""


class Crossing:
    """A stream beside the computation: for one direction between host memory and a device, or for sums."""

    def __init__(self, device: torch.device):
        self.device, self._module = device, torch.get_device_module(device)
        self._stream: Any = self._module.Stream()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is started in this block runs beside the computation, after all that was started there before."""
        if is_tracing() and self.device != HOST:
            raise NotImplementedError(
                "a plan with host= is for steps that run eagerly: a graph has no streams. Omit host="
            )
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """The computation waits for what was started beside it."""
        self._module.current_stream().wait_stream(self._stream)

    def joined(self, pending: Pending) -> Pending:
        """A result that was started beside the computation, for the computation to use."""

        def arrived(x: Tensor) -> Tensor:
            self.join()
            return x

        return pending.then(arrived)

    def copied(self, x: Tensor, row: Tensor) -> Pending:
        """The row in host memory, when the host has settled; what is on the device lives until it is waited for."""
        with self.ahead():
            row.copy_(x, non_blocking=True)
        return Pending(_Arrival(self, [x]), lambda _: row)

    def settle(self) -> None:
        """The host waits for the device: it may then read and write rows."""
        self._module.synchronize()


class Crossings(NamedTuple):
    """The streams of a mesh."""

    up: Crossing  # to the device
    down: Crossing  # to host memory
    sums: Crossing  # of gradients (Note [Sums beside the computation] in `gradients`)


def crossings(mesh: Mesh) -> Crossings:
    """New streams on a mesh's device."""
    return Crossings(*(Crossing(mesh.device) for _ in Crossings._fields))
