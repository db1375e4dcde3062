"""Transfers during the computation: units gathered ahead, reductions under way, rows in host memory.

Note [Two units]
    By default the unit in use and the units gathered ahead take at most twice the bytes of the largest unit; so do the
    unit with arriving gradients and the units being reduced. While a small unit computes, several small units travel,
    so the link has work. At least one unit travels, and at most `_MOST_AHEAD`: more units gained nothing
    (benchmarks/RESULTS.md). If collectives have several stages, only one unit is in the first stage.

Note [Crossing over]
    Copies to host memory and copies from host memory each have a stream. A stream's work waits for all earlier work of
    the computation: memory freed by the computation must not be overwritten early. The computation waits for the stream
    before it uses a result. Host memory is pinned, so copies do not block the host. The host waits for the device
    (`Crossing.settle`) once for each backward or update, before it reads rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Mesh
from ..comm.ranks import Pending
from ..core.random import HOST
from ..core.tracing import is_tracing, memo

_MOST_AHEAD = 4


@dataclass(frozen=True)
class Ahead:
    """The number of units that travel at once: `prefetch`, or by Note [Two units]."""

    sizes: tuple[int, ...]  # bytes of each unit's gathered buffers
    prefetch: int | None

    @memo
    def _room(self) -> int:
        return 2 * max(self.sizes, default=0)

    @memo
    def number(self) -> int | None:
        """The number of units that travel at once; None if it depends on the unit in use."""
        if self.prefetch is not None:
            return self.prefetch
        smallest = sorted(size for size in self.sizes if size)[:3]
        return 1 if len(smallest) < 3 or sum(smallest) > self._room else None

    def most(self, stages: int) -> int:
        """Return the most units gathered at once: each stage after the first adds one unit.

        >>> [Ahead((6, 1, 1, 6), None).most(1), Ahead((6, 1, 1, 6), None).most(2), Ahead((6,), 0).most(2)]
        [4, 2, 0]
        """
        number = 1 if self.number is None and stages > 1 else self.number
        return _MOST_AHEAD if number is None else number + stages - 1 if number else 0

    def gathers(self, unit: int | None, following: Iterable[int], stages: int) -> list[int]:
        """Return the first units of `following`, to gather while `unit` computes.

        >>> Ahead((6, 1, 1, 6), None).gathers(1, [2, 3], 1), Ahead((6, 1, 1, 6), 1).gathers(1, [2, 3], 1)
        ([2, 3], [2])
        """
        fits = self.number is None and stages == 1
        return list(self._fitting(unit, following) if fits else islice(following, self.most(stages)))

    def reductions(self, unit: int, under_way: Sequence[int], stages: int) -> int:
        """Return how many of the last units `under_way` may stay in their first stage when `unit`'s gradients arrive.

        >>> Ahead((6, 1, 1, 6), None).reductions(1, [3, 2], 1), Ahead((6, 1, 1, 6), 1).reductions(1, [3, 2], 1)
        (2, 1)
        """
        if self.number is not None:
            return self.number
        return len(list(self._fitting(unit, reversed(under_way)))) if stages <= 1 else 1

    def _fitting(self, unit: int | None, others: Iterable[int]) -> Iterator[int]:
        room = self._room - (0 if unit is None else self.sizes[unit])
        for number, other in enumerate(islice(others, _MOST_AHEAD)):
            room -= self.sizes[other]
            if number and room < 0:
                return
            yield other


def host_row(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=device != HOST)


def pinned(row: Tensor, device: torch.device) -> Tensor:
    """Return the row in pinned host memory, for copies that do not block the host."""
    if row.device != HOST:
        return to_host(row)
    return row if device == HOST or row.is_pinned() else row.pin_memory()


def to_host(x: Tensor) -> Tensor:
    """Copy to pinned memory: the host may read it after `Crossing.settle`."""
    if is_tracing():  # a graph chooses its memory
        return x.to(HOST)
    return torch.empty_like(x, device=HOST, pin_memory=True).copy_(x, non_blocking=True)


def landing(row: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device` for the row's new values."""
    return row if row.device == device else torch.empty_like(row, device=device)


@dataclass(frozen=True)
class _Arrival:
    """Copies under way."""

    crossing: Crossing
    held: Sequence[Tensor]  # kept until the computation has waited

    def wait(self) -> Sequence[Tensor]:
        """Make the computation's stream wait, not the host."""
        self.crossing.join()
        return self.held

    def done(self) -> None: ...


class Crossing:
    """A stream parallel to the computation's."""

    def __init__(self, device: torch.device):
        self.device: torch.device = device
        self._module = torch.get_device_module(device)
        # -1 is high priority: the computation waits for results
        self._stream = self._module.Stream(priority=-1)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Run the block's work on this stream: after the computation so far, parallel to later work.

        NotImplementedError while tracing for a device other than the CPU.
        """
        if is_tracing() and self.device != HOST:
            raise NotImplementedError(
                "a plan with offload= is for steps that run eagerly: a graph has no streams. Omit offload="
            )
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        self._module.current_stream().wait_stream(self._stream)

    def joined(self, pending: Pending) -> Pending:
        """Return `pending` with a last step: the computation waits for this stream."""

        def arrived(x: Tensor) -> Tensor:
            self.join()
            return x

        return pending.then(arrived)

    def copied(self, x: Tensor, row: Tensor) -> Pending:
        """Copy `x` to a row in host memory, readable after `settle`."""
        with self.ahead():
            row.copy_(x, non_blocking=True)
        return Pending(_Arrival(self, [x]), lambda _: row)

    def settle(self) -> None:
        """Make the host wait for the device."""
        if not is_tracing():
            self._module.synchronize()


class Crossings(NamedTuple):
    """The streams parallel to the computation's, on the device of a mesh."""

    up: Crossing  # to the device
    down: Crossing  # to host memory
    sums: Crossing  # Note [Sums beside the computation] in `grad/under_way.py`
    stages: Crossing  # between stages of a gather


def crossings(mesh: Mesh) -> Crossings:
    return Crossings(*(Crossing(mesh.device) for _ in Crossings._fields))
