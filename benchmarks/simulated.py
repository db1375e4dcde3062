"""Time of a step on simulated ranks, for 1 to 64 ranks: `make bench-simulated`.

Model T (100 linear layers of 64 x 64, each a unit of its own, 16 rows for each rank), AdamW, fully sharded,
`donate=True`, one thread. A round is one step on all ranks, and ends with a collective, so all ranks have finished the
step. One rank runs at a time, so processor time is the time of a step on an idle machine. The first row of the table is
one plain step of the model on one device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from models import task_of
from rich.console import Console
from rich.table import Table

import fshard
from fshard.comm.mesh import Mesh
from fshard.testing import World

SIZES = (1, 2, 4, 8, 16, 32, 64)


def timed(call: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Call `rounds + 2` times. Returns median milliseconds of clock and processor time, without the first two calls."""
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter(), time.process_time()
        call()
        times.append((1e3 * (time.perf_counter() - begin[0]), 1e3 * (time.process_time() - begin[1])))
    clock, processor = zip(*times[2:], strict=True)
    return statistics.median(clock), statistics.median(processor)


def on_a_rank(mesh: Mesh, rounds: int) -> tuple[float, float]:
    """Median milliseconds of clock and processor time of a step on all ranks."""
    task, tx = task_of("T"), fshard.optim.adamw(1e-3)
    torch.manual_seed(0)
    params = task.init()
    plan = fshard.make_plan(params, mesh, units=task.units, bucket=task.bucket)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(task.loss, tx, donate=True)
    batch = task.batch(torch.Generator().manual_seed(mesh.get_rank()))

    def once() -> None:
        nonlocal state
        state, _ = step(state, batch)
        fshard.all_reduce(torch.ones(1), mesh, "shard")

    return timed(once, rounds)


def plain(rounds: int) -> tuple[float, float]:
    """Median milliseconds of clock and processor time of torch's own step on one device."""
    task = task_of("T")
    params, batch = task.init(), task.batch(torch.Generator())
    leaves = [x.requires_grad_() for layer in params[task.repeated] for x in layer.values()]
    optimizer = torch.optim.AdamW(leaves, fused=True)

    def once() -> None:
        optimizer.zero_grad()
        task.loss(params, batch).backward()
        optimizer.step()

    return timed(once, rounds)


def main() -> None:
    """Print a table with a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("ranks", "ms a step", "of the processor", "of the processor, a rank")
    table.add_row("plain", *(f"{ms:.1f}" for ms in plain(20 * args.rounds)), "")
    for size in SIZES:
        clock, processor = World(size).run(on_a_rank, args.rounds)[0]
        table.add_row(str(size), f"{clock:.0f}", f"{processor:.0f}", f"{processor / size:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
