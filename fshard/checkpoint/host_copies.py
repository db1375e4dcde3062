"""Tensors of a device in host memory, to be written from there: the host waits for many copies at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..core.storage import aligned, as_bytes, from_bytes
from ..files.safetensors_file import CHUNK
from ..plan.offload import HOST, empty


def copied(tensors: Sequence[Tensor], memory: Tensor) -> list[Tensor]:
    """Copy tensors to host memory (bytes,), one behind the other; returns the copies, flat.

    All copies from a device are under way at once, and the host waits for the device when the last has started.
    """
    copies, end = list[Tensor](), 0
    for x in tensors:
        start, end = aligned(end), aligned(end) + x.nbytes
        copies.append(from_bytes(memory[start:end], x.dtype).copy_(x.reshape(-1), non_blocking=True))
    for device in dict.fromkeys(x.device for x in tensors if x.device != HOST):
        torch.get_device_module(device).synchronize(device)
    return copies


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """The device from which some of the tensors are copied to host memory: the CPU if all are there."""
    return next((x.device for x in tensors if x.device != HOST), HOST)


def in_host_memory(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors as bytes (n,) in host memory, at most `CHUNK` at a time, each of them until the next one.

    From a device they come through as many bytes of pinned memory: several small ones at once.
    """
    memory: Tensor | None = None
    for batch in _batches((name, part) for name, x in tensors for part in as_bytes(x).split(CHUNK)):
        if (device := device_of([x for _, x in batch])) == HOST:
            yield from batch
            continue
        memory = empty(CHUNK, torch.uint8, device) if memory is None else memory
        yield from zip([name for name, _ in batch], copied([x for _, x in batch], memory), strict=True)


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut a sequence of named tensors of at most `CHUNK` bytes into lists that fit into as many."""
    batch, end = list[tuple[str, Tensor]](), 0
    for name, x in tensors:
        if batch and aligned(end) + x.nbytes > CHUNK:
            yield batch
            batch, end = [], 0
        batch.append((name, x))
        end = aligned(end) + x.nbytes
    if batch:
        yield batch
