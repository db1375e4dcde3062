"""Programs of several processes, each with GPUs that are not there: `test_processes.py` starts them.

    python tools/fakegpu/run.py tools/fakegpu/processes.py PROGRAM FOLDER RANK SIZE

A program is one of the functions below that takes a `Job`. It prints what the test reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import DEVICE, KINDS, batch, loss, same, start, trained
from recorder import Recorder
from steps import HYBRID, MORE
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import checkpoint, optim
from fshard.testing import World


@dataclass
class Job:
    """One process of a program: a folder that all share, its number, and how many there are."""

    folder: Path
    rank: int
    size: int

    def join(self, device_id: torch.device | None = None) -> None:
        """Make the process group."""
        torch.cuda.set_device(0)
        store = f"file://{self.folder}/store{self.size}"
        dist.init_process_group("nccl", init_method=store, rank=self.rank, world_size=self.size, device_id=device_id)

    def mesh(self, *sizes: int, **how: Any) -> DeviceMesh:
        """A mesh of all processes: of one axis, or `sizes` of replicas and shards."""
        self.join(**how)
        sizes = sizes or (self.size,)
        return init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def ones(number: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(number, device="cuda", dtype=dtype)


def numbers(job: Job) -> None:
    """Every collective, with values, and every dtype."""
    job.join()
    w, r = job.size, job.rank
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8):
        x = torch.arange(w, device="cuda").to(dtype) + r  # x[i] = i + r
        total, most = x.clone(), x.clone()
        dist.all_reduce(total)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        part, whole = x[:1].clone(), torch.empty(w * w, device="cuda", dtype=dtype)
        dist.reduce_scatter_single(part, x)
        dist.all_gather_single(whole, x)
        sums = [i * w + w * (w - 1) // 2 for i in range(w)]
        assert total.tolist() == sums, (dtype, total.tolist())
        assert most.tolist() == [i + w - 1 for i in range(w)]
        assert part.tolist() == [sums[r]]
        assert whole.tolist() == [i + p for p in range(w) for i in range(w)]
    outs = [ones(p + 1) for p in range(w)]
    dist.all_to_all(outs, [ones(r + 1) * (10 * r + p) for p in range(w)])
    assert [x.tolist() for x in outs] == [[10.0 * p + r] * (p + 1) for p in range(w)]
    y = ones(3) * r
    dist.broadcast(y, src=w - 1)
    assert y.tolist() == [w - 1.0] * 3
    ops = [dist.P2POp(dist.isend, ones() * r, (r + 1) % w), dist.P2POp(dist.irecv, y := ones(), (r - 1) % w)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y.tolist() == [float((r - 1) % w)] * 8


def groups(job: Job) -> None:
    """Smaller groups, split from the first one, and of all pairs of ranks."""
    mesh = job.mesh(2, job.size // 2, device_id=torch.device("cuda", 0))
    x, y = ones(1) * job.rank, ones(1) * job.rank
    dist.all_reduce(x, group=mesh.get_group("replicate"))
    dist.all_reduce(y, group=mesh.get_group("shard"))
    half, (row, column) = job.size // 2, divmod(job.rank, job.size // 2)
    assert x.tolist() == [float(2 * column + half)]
    assert y.tolist() == [float(sum(row * half + i for i in range(half)))]


# ---- what NCCL would hang on, or worse ----


def other_order(job: Job) -> None:
    """Two collectives on one communicator, in another order on rank 1."""
    job.join()
    dist.all_reduce(ones())
    calls = [lambda: dist.all_reduce(ones()), lambda: dist.all_gather_single(ones(8 * job.size), ones())]
    for call in calls[:: -1 if job.rank == 1 else 1]:
        call()


def two_communicators(job: Job) -> None:
    """Two collectives on two communicators, in another order on rank 1."""
    job.join()
    ranks = [*range(job.size)]
    both = [dist.new_group(ranks), dist.new_group(ranks)]
    for group in both:
        dist.all_reduce(ones(), group=group)
    for group in both[:: -1 if job.rank == 1 else 1]:
        dist.all_reduce(ones(), group=group)


def other_count(job: Job) -> None:
    """Rank 1 sends fewer elements."""
    job.join()
    dist.all_reduce(ones(8 - job.rank))


def other_dtype(job: Job) -> None:
    """Rank 1 sends another dtype, of the same number of bytes."""
    job.join()
    dist.all_reduce(ones(8, torch.int32 if job.rank else torch.float32))


def other_message(job: Job) -> None:
    """Rank 1 receives more than rank 0 sends."""
    job.join()
    dist.send(ones(4), 1) if job.rank == 0 else dist.recv(ones(8), 0)


def death(job: Job) -> None:
    """Rank 1 ends before the second collective."""
    job.join()
    dist.all_reduce(ones())
    if job.rank == 1:
        os._exit(7)
    dist.all_reduce(ones())


# ---- fshard, unchanged ----


def beside_cpus(mesh: DeviceMesh, every: dict[str, dict[str, Any]], world: Callable[[], World]) -> None:
    """Every kind of step; rank 0 compares with simulated ranks of CPUs, and prints a line for each."""
    for name, kind in every.items():
        got, losses = trained(mesh, **kind)
        if mesh.get_rank() == 0:
            got, losses = fshard.tree.map(lambda x: x.cpu(), (got, losses))
            expected = world().run(partial(trained, **kind))[0]
            wrong = same((got, losses), expected, exact=False)
            exactly = same((got, losses), expected)
            print(name, wrong or "right", exactly or "to the bit", sep="; ", flush=True)
        dist.all_reduce(ones(1))  # wait for rank 0; a barrier of torch sends what nobody wrote


def kinds(job: Job) -> None:
    """Steps on one axis."""
    beside_cpus(job.mesh(), KINDS, partial(World, job.size))


def two_axes(job: Job) -> None:
    """Steps on two axes, of more kinds, without those that concern no axis; CPUs draw other numbers for dropout."""
    more = {**MORE, **HYBRID, "jit": {"jit": "eager", "donate": True}}
    without = {"dropout", "lion", "8 bits", "sums f16", "micro bf16"}
    every = {name: kind for name, kind in {**KINDS, **more}.items() if name not in without}
    beside_cpus(job.mesh(2, job.size // 2), every, partial(World, replicate=2, shard=job.size // 2))


def plans(job: Job) -> None:
    """Rank 1 has a parameter of another shape."""
    fshard.make_plan({"w": ones(8 + job.rank)}, job.mesh())


def checked(job: Job) -> None:
    """Rank 1 calls another collective inside `check`."""
    mesh = job.mesh()

    def run() -> None:
        fshard.all_reduce(ones(), mesh, "shard", op="max" if job.rank else "sum")

    fshard.check(run, mesh)()


def checked_death(job: Job) -> None:
    """Rank 1 dies in the second step of a training that is checked."""
    tx = optim.adamw(1e-3)
    state = start(job.mesh(), tx)
    step = fshard.check(fshard.train_step(loss, tx))
    for i in range(3):
        if job.rank == 1 and i == 1:
            os._exit(7)
        state, _ = step(state, batch(i, job.rank))


def _run(job: Job, state: Any, step: Any, first: int, last: int) -> Any:
    """Steps whose batches are the same on any number of ranks; the losses are printed by rank 0."""
    for i in range(first, last):
        tokens = batch(i, rows=8).chunk(job.size)[job.rank]
        state, metrics = step(state, tokens)
        value = metrics["loss"].item()
        if job.rank == 0:
            print(i, value.hex(), flush=True)
    return state


def saves(job: Job) -> None:
    """Train three steps, save the state in the background after two."""
    tx = optim.adamw(1e-3)
    state, step = start(job.mesh(), tx), fshard.train_step(loss, tx, reduction="tree")
    state = _run(job, state, step, 0, 2)
    under_way = checkpoint.save(job.folder / "checkpoint", state, step=2, wait=False)
    _run(job, state, step, 2, 3)
    under_way.wait()


def restores(job: Job) -> None:
    """Restore on another number of ranks, and train the third step."""
    tx = optim.adamw(1e-3)
    like, step = start(job.mesh(), tx), fshard.train_step(loss, tx, reduction="tree")
    state = checkpoint.restore(job.folder / "checkpoint", like=like)
    _run(job, state, step, 2, 3)


def elastic(job: Job) -> None:
    """Train four steps, saving after each; rank 1 dies in the third, once. torchrun starts all ranks again."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (job.size,), mesh_dim_names=("shard",))
    tx, folder = optim.adamw(1e-3), job.folder / "checkpoint"
    state, step = start(mesh, tx), fshard.train_step(loss, tx, reduction="tree")
    state = checkpoint.restore(folder, like=state) if checkpoint.steps(folder, mesh) else state
    for i in range(int(state.step), 4):
        state = _run(job, state, fshard.check(step), i, i + 1)
        if job.rank == 1 and i == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(7)
        checkpoint.save(folder, state, step=i + 1)


def main() -> None:
    """Run the program that the arguments name."""
    name, folder, *place = sys.argv[1:]
    rank, size = map(int, place or (os.environ["RANK"], os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    with Recorder():
        globals()[name](Job(Path(folder), rank, size))
    print("done", flush=True)
    os._exit(0)  # without a word about process groups that were not destroyed


if __name__ == "__main__":
    main()
