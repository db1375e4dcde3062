"""What `make bench` measures on a rank: step times of systems in turn, what a step sends, and one system alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import memory
import torch
import torch.distributed as dist
from jax_peer import JaxPeer
from systems import SYSTEMS, Step
from tasks import Task
from timing import CLOSE, EARLY, FAR, check_alike, in_turn
from torch.distributed.device_mesh import DeviceMesh

import fshard


def generator() -> torch.Generator:
    """What draws this rank's batches."""
    return torch.Generator().manual_seed(1 + dist.get_rank())


def make(task: Task, system: str, mesh: DeviceMesh) -> Step:
    """A step of a system; the parameters are the same for all systems and ranks."""
    torch.manual_seed(0)
    return SYSTEMS[system].make(task, mesh)


def close(step: Step) -> None:
    """End the process of a peer."""
    if isinstance(step, JaxPeer):
        step.close()


def step_times(task: Task, systems: Sequence[str], mesh: DeviceMesh, rounds: int, warmup: int) -> dict[str, Any]:
    """Seconds of each round's step, with the systems in turn. RuntimeError if their losses differ at a step."""
    steps, draws = {s: make(task, s, mesh) for s in systems}, generator()
    batch, losses, done = task.batch(draws), dict[str, float](), count(1)

    def call(system: str) -> None:
        losses[system] = float(steps[system](batch))

    def next_round() -> None:
        nonlocal batch
        check_losses(losses, CLOSE if next(done) <= EARLY else FAR)
        batch = task.batch(draws)
        for step in steps.values():
            if isinstance(step, JaxPeer):
                step.draw()

    times = in_turn({system: partial(call, system) for system in systems}, rounds, warmup, between=next_round)
    for step in steps.values():
        close(step)
    return times


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """RuntimeError if the mean losses of all ranks differ between the systems that train together.

    In the first steps a wrong gradient or a rate of 0.9 changes a loss by less than a thousandth.
    """
    together = [system for system in losses if system != "local"]
    values = torch.tensor([losses[system] for system in together], dtype=torch.float64)
    means = values.clone()
    dist.all_reduce(means)
    means = torch.where(torch.tensor([SYSTEMS[s].mean for s in together]), values, means / dist.get_world_size())
    dist.broadcast(means, 0)
    check_alike(dict(zip(together, means.tolist(), strict=True)), tolerance)


def alone(task: Task, system: str, mesh: DeviceMesh, steps: int = 3) -> dict[str, float]:
    """Of a system in a process of its own: seconds of the first step, and resident bytes that it adds at its peak.

    The bytes are those of the fuller rank, over what is resident before the model is built. Of compiled systems the
    peak is that of the steps after the first, whose memory for compiling is not counted.
    """
    compiled, draws = SYSTEMS[system].compiled, generator()
    if compiled:
        torch.compile(torch.square)(torch.ones(2))  # loads the compiler, which is not counted
    before = memory.resident()
    step, batch = make(task, system, mesh), task.batch(draws)
    dist.barrier()
    begin = time.perf_counter()
    step(batch)
    dist.barrier()
    first = time.perf_counter() - begin
    if compiled:
        memory.reset_peak()
    for _ in range(steps):
        step(task.batch(draws))
    peak = torch.tensor(step.peak() if isinstance(step, JaxPeer) else memory.peak() - before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    close(step)
    return {"first": first, "peak": int(peak)}


def traffic(task: Task, mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """Collectives that a rank starts in a step of fshard and of FSDP2: kind to count, and for fshard the bytes sent."""
    from torch.distributed.tensor.debug import CommDebugMode

    step, reference = make(task, "fshard", mesh), make(task, "fsdp2", mesh)
    batch = task.batch(generator())
    with fshard.collectives.tally() as records:
        step(batch)
    with CommDebugMode() as mode:
        reference(batch)
    kinds = {r.kind: {"count": len(records.select(r.kind)), "bytes": records.nbytes(r.kind)} for r in records}
    counts = {str(op).rpartition(".")[2]: {"count": count} for op, count in mode.get_comm_counts().items()}
    return {"fshard": kinds, "fsdp2": counts}
