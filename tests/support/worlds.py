"""One function on many ranks, simulated or in gloo processes of its own: the same call for both."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard.comm.mesh import unconnected
from fshard.hosts import rendezvous
from fshard.testing import simulate

T = TypeVar("T")

_CONTEXT = multiprocessing.get_context("forkserver")
# once, not in each rank: what files of tests import, and what torch imports at a first derivative or compilation
_CONTEXT.set_forkserver_preload(["torch._dynamo", "fshard.testing", "pytest", "hypothesis"])


def _mesh(rank: int, shape: tuple[int, int], store: str) -> DeviceMesh:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    size = shape[0] * shape[1]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    if shape[0] > 1:
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", shape[1:], mesh_dim_names=("shard",))


def _rank_main(
    fn: Callable[..., object], rank: int, shape: tuple[int, int], args: tuple[object, ...], store: str, pipe: Connection
) -> None:
    try:
        result = (True, fn(_mesh(rank, shape, store), *args))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as failure:
        result = (False, (failure, traceback.format_exc()))
    try:
        pipe.send_bytes(pickle.dumps(result))
    except Exception:  # what went wrong cannot be pickled
        pipe.send_bytes(pickle.dumps((False, (RuntimeError(repr(result)), ""))))


def _fate_main(
    fn: Callable[..., object], rank: int, shape: tuple[int, int], args: tuple[object, ...], store: str, pipe: Connection
) -> None:
    # a process that fails is left to end by itself, as a user's
    try:
        pipe.send((fn(_mesh(rank, shape, store), *args), None))
    except Exception as failure:
        pipe.send((None, f"{type(failure).__name__}: {failure}"))
        raise


def _start(
    main: Callable[..., None], fn: Callable[..., object], shape: tuple[int, int], args: tuple[object, ...], store: str
) -> tuple[list[Connection], list[ForkServerProcess]]:
    """The pipes and processes of all ranks."""
    pipes, processes = [], []
    for rank in range(shape[0] * shape[1]):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=main, args=(fn, rank, shape, args, store, sender))
        process.start()
        sender.close()  # only the process has it then, so its end is the end of the pipe
        pipes.append(receiver)
        processes.append(process)
    return pipes, processes


def gloo(fn: Callable[..., T], *args: object, shard: int = 2, replicate: int = 1) -> list[T]:
    """`fn(mesh, *args)` in `replicate * shard` processes, `fn` a function of a module. The first failure is raised."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(_rank_main, fn, (replicate, shard), args, str(Path(folder) / "store"))
        results = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
        for process in processes:
            process.join()
    for good, value in results:
        if not good:
            failure, trace = value
            failure.add_note(trace)
            raise failure
    return [value for _, value in results]


@dataclass(frozen=True)
class Fate:
    """How a rank ended: what its function returned, or the error, and the exit code of its process (-9: killed)."""

    value: object
    error: str | None
    exitcode: int | None


def fates(
    fn: Callable[..., object], *args: object, shard: int = 2, replicate: int = 1, seconds: float = 60.0
) -> list[Fate]:
    """How `fn(mesh, *args)` ends on ranks that may fail or be killed. AssertionError if one does not end in time."""
    until = time.monotonic() + seconds

    def left() -> float:
        return max(0.0, until - time.monotonic())

    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = _start(_fate_main, fn, (replicate, shard), args, str(Path(folder) / "store"))
        ends = [_received(pipe, left()) for pipe in pipes]
        for process in processes:
            process.join(left())
    behind = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in behind:
        processes[rank].kill()
        processes[rank].join()
    assert not behind, f"ranks {behind} had to be killed after {seconds} s"
    return [Fate(value, error, process.exitcode) for (value, error), process in zip(ends, processes, strict=True)]


def _received(pipe: Connection, seconds: float) -> tuple[object, str | None]:
    try:
        return pipe.recv() if pipe.poll(seconds) else (None, None)
    except EOFError:  # killed
        return None, None


def by_process_groups(plan: fshard.Plan, mesh: Any) -> fshard.Plan:
    """The plan on its DeviceMesh, whose messages then go through its process groups again, not by shared memory."""
    vars(unconnected(mesh)).update(twin=None)
    return replace(plan, mesh=mesh)


def simulated(fn: Callable[..., T], *args: object, shard: int = 2, replicate: int = 1) -> list[T]:
    """`fn(mesh, *args)` on simulated ranks."""
    return simulate(lambda mesh: fn(mesh, *args), shard=shard, replicate=replicate)


def between_hosts(mesh: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(mesh, *args)` in processes that compare no calls, as those of different hosts."""
    with mock.patch.object(rendezvous, "_host", return_value=f"host {mesh.get_rank()}"):
        grid = fshard.comm.mesh.adapted(mesh)
        assert grid is not None
        assert rendezvous.links_to(grid.ranks("shard")) is None
        return fn(mesh, *args)
