"""What a GPU asks of the code, as far as a CPU can show it: names, dtypes and kernels that another backend has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import same_bits
from torch import Tensor
from worlds import gloo, simulated

from fshard import comm
from fshard.bits import as_bytes
from fshard.process_groups import as_sent, first_of

ODD = [*(torch.int16, torch.uint16, torch.uint32, torch.uint64), *(torch.float8_e4m3fn, torch.float8_e5m2)]
COMPLEX = [torch.complex64, torch.complex128]
PLAIN = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*PLAIN, *FLOATS, *ODD, *COMPLEX]


def bits_of(dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
    """Any bits, of booleans those they may have."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def test_names_of_collectives() -> None:
    """The new name where there is one, the old one in a torch that has no other."""
    old, new = SimpleNamespace(old=lambda: "old"), SimpleNamespace(old=lambda: "old", new=lambda: "new")
    assert first_of(old, "new", "old")() == "old"
    assert first_of(new, "new", "old")() == "new"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_is_the_same_memory(dtype: torch.dtype) -> None:
    """In a dtype that every backend moves, or as bytes: what arrives is written to the tensor itself."""
    for shape in ((), (6,), (2, 3), (0, 3)):
        x = bits_of(dtype, torch.Size(shape).numel()).view(shape)
        for dtypes in ([*PLAIN, *FLOATS], [torch.uint8]):
            sent = as_sent(x, dtypes)
            assert sent.dtype in dtypes
            assert sent.nbytes == x.nbytes
            assert sent.data_ptr() == x.data_ptr()
            assert torch.equal(as_bytes(sent), as_bytes(x))


def moved(mesh: Any) -> list[Tensor]:
    """What arrives, of every dtype, from one rank and from each."""
    ranks, found = comm.along(mesh, "shard"), []
    for number, dtype in enumerate(DTYPES):
        x = bits_of(dtype, 2 * ranks.size, seed=100 * number + ranks.rank)
        found.append(as_bytes(comm.broadcast(x.view(2, -1), ranks, 1).wait()))
        found.append(as_bytes(comm.all_to_all(x, ranks).wait()))
    return found


def gathered(mesh: Any, built_in: bool) -> list[Tensor]:
    """Tensors of every dtype, end to end: by messages, or by a backend's own gather."""
    ranks, found = comm.along(mesh, "shard"), []
    if built_in:
        ranks.built_in = mesh.get_group("shard")
    for number, dtype in enumerate(DTYPES):
        x = bits_of(dtype, 4, seed=100 * number + ranks.rank)
        found.append(as_bytes(comm.all_gather(x.view(2, 2), ranks).wait()))
    return found


def summed(mesh: Any, fast: bool) -> list[Tensor]:
    """Sums of whole numbers, exact in any order: scattered, and on all ranks."""
    ranks, found = comm.along(mesh, "shard"), []
    if fast:
        ranks.built_in = mesh.get_group("shard")
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        x = (torch.arange(2 * ranks.size) + ranks.rank).to(dtype) * (1j if dtype.is_complex else 1)
        found.append(comm.reduce_scatter(x, ranks, fast=fast).wait())
        found.append(comm.all_reduce(x, ranks, fast=fast).wait())
    return found


def on_processes(mesh: Any) -> list[Any]:
    """By messages and by the backend's own collectives; a warning is an error."""
    by_messages = [moved(mesh), gathered(mesh, False), summed(mesh, False)]
    return [by_messages, [by_messages[0], gathered(mesh, True), summed(mesh, True)]]


def on_threads(mesh: Any) -> list[Any]:
    """The same between simulated ranks."""
    return [[moved(mesh), gathered(mesh, False), summed(mesh, False)]] * 2


def test_every_dtype_travels() -> None:
    """Between processes, whichever way, as between simulated ranks."""
    assert same_bits(gloo(on_processes), simulated(on_threads))
