"""One function on many ranks, simulated or in gloo processes of its own: the same call for both."""

import multiprocessing
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fshard.testing import simulate

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "fshard", "fshard.testing", "torch.distributed.device_mesh"])


def _rank_main(fn: Any, rank: int, shape: tuple[int, int], args: tuple[Any, ...], store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        size = shape[0] * shape[1]
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        if shape[0] > 1:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", shape[1:], mesh_dim_names=("shard",))
        result = (True, fn(mesh, *args))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as failure:
        result = (False, (failure, traceback.format_exc()))
    try:
        pipe.send_bytes(pickle.dumps(result))
    except Exception:  # what went wrong cannot be pickled
        pipe.send_bytes(pickle.dumps((False, (RuntimeError(repr(result)), ""))))


def gloo(fn: Callable[..., Any], *args: Any, shard: int = 2, replicate: int = 1) -> list[Any]:
    """`fn(mesh, *args)` in `replicate * shard` processes, `fn` a function of a module. The first failure is raised."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(replicate * shard):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank_main, args=(fn, rank, (replicate, shard), args, store, theirs))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        results = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
        for process in processes:
            process.join()
    for good, value in results:
        if not good:
            failure, trace = value
            failure.add_note(trace)
            raise failure
    return [value for _, value in results]


def simulated(fn: Callable[..., Any], *args: Any, shard: int = 2, replicate: int = 1) -> list[Any]:
    """`fn(mesh, *args)` on simulated ranks, with one thread as in the processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return simulate(lambda mesh: fn(mesh, *args), shard=shard, replicate=replicate)
    finally:
        torch.set_num_threads(threads)
