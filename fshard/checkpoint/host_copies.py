"""Copy tensors from a device to host memory for writing: the host waits once for many copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..core.random import HOST
from ..core.storage import aligned, as_bytes
from ..files.safetensors_file import CHUNK
from ..plan.ahead import host_row

T = TypeVar("T")
_BLOCK = 1 << 30  # bytes of an allocation: torch rounds pinned memory up to a power of two, and caches it


def snapshot(tensors: Sequence[Tensor], blocks: list[Tensor]) -> list[list[Tensor]]:
    """Copy tensors to `blocks` of host memory, pinned for a device; return each tensor's bytes, in parts of `CHUNK`.

    Blocks, (bytes,), that are missing or too small are made anew. The host waits once for all copies.
    """
    copies: list[list[Tensor]] = [[] for _ in tensors]
    for number, batch in enumerate(_batches(enumerate(tensors), _BLOCK)):
        size = sum(aligned(part.nbytes) for _, part in batch)
        if number == len(blocks) or len(blocks[number]) < size:
            blocks[number : number + 1] = [host_row(size, torch.uint8, _device_of(tensors))]
        for n, copy in _started_copies(batch, blocks[number]):
            copies[n].append(copy)
    _wait_for(tensors)
    return copies


def in_host_memory(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors as bytes in host memory, (n,), in parts of at most `CHUNK`, each valid until the next part.

    While the caller uses one part, later parts are copied.
    """
    memory, arrived = list[Tensor](), list[tuple[str, Tensor]]()
    for number, batch in enumerate(_batches(tensors, CHUNK)):
        parts = [part for _, part in batch]
        if (device := _device_of(parts)) != HOST:
            memory = memory or [host_row(CHUNK, torch.uint8, device) for _ in range(2)]
            batch = _started_copies(batch, memory[number % 2])
        yield from arrived
        _wait_for(parts)
        arrived = batch
    yield from arrived


def _started_copies(batch: Sequence[tuple[T, Tensor]], memory: Tensor) -> list[tuple[T, Tensor]]:
    """Start to copy tensors, end to end, into `memory`, (bytes,), on the host."""
    sizes = [aligned(x.nbytes) for _, x in batch]
    places = memory[: sum(sizes)].split(sizes)
    return [(name, to[: x.nbytes].copy_(x, non_blocking=True)) for (name, x), to in zip(batch, places, strict=True)]


def _wait_for(tensors: Iterable[Tensor]) -> None:
    for device in dict.fromkeys(x.device for x in tensors if x.device != HOST):
        torch.get_device_module(device).synchronize(device)


def _device_of(tensors: Iterable[Tensor]) -> torch.device:
    return next((x.device for x in tensors if x.device != HOST), HOST)


def _batches(tensors: Iterable[tuple[T, Tensor]], size: int) -> Iterator[list[tuple[T, Tensor]]]:
    """Cut tensors into parts of at most `CHUNK` bytes; yield lists of parts, at most `size` bytes a list."""
    batch, end = list[tuple[T, Tensor]](), 0
    for name, part in ((name, part) for name, x in tensors for part in as_bytes(x).split(CHUNK)):
        if batch and end + part.nbytes > size:
            yield batch
            batch, end = [], 0
        batch.append((name, part))
        end = aligned(end + part.nbytes)
    if batch:
        yield batch
