"""The host's time for collectives on 8 to 8192 ranks: `make bench-scale`.

The ranks are those of torch's fake process group, which sends nothing, so one process is one of any number of ranks.
Times are processor time of one rank in microseconds, each call's best of several rounds. `x` has 65,536 numbers in
float32: reductions are given x, a gather this rank's part of x; "of 4" and "of x" are all-reduces of 4 of its numbers
and of all. "a step" are all collectives of one step of eight layers of 256 x 256, each a unit of its own, with
clipping, called again in the order of the step.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # private: there is no public group without peers

import fshard
from fshard import reduction
from fshard.comm import primitives
from fshard.comm.mesh import ProcessMesh
from fshard.comm.ranks import Call, Ranks
from fshard.comm.reduction import reduction_of

NUMEL = 1 << 16


class Silent(ProcessMesh):
    """A mesh whose ranks compare no plans: nobody would answer."""

    abstract = True


@contextmanager
def fake_mesh(size: int) -> Iterator[DeviceMesh]:
    """A mesh of so many ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def timed(call: Callable[[], object]) -> float:
    """The processor time of a call in microseconds."""
    begin = time.process_time_ns()
    call()
    return (time.process_time_ns() - begin) / 1e3


def best(calls: Sequence[Callable[[], object]], rounds: int) -> float:
    """The sum of each call's least time, the calls being made in this order in every round."""
    times = [[timed(call) for call in calls] for _ in range(rounds + 1)]
    return sum(min(of_one) for of_one in zip(*times, strict=True))


def calls_of_a_step(mesh: DeviceMesh) -> list[Call]:
    """The collectives of one step."""
    params = {"layers": [torch.zeros(256, 256) for _ in range(8)]}

    def loss(p: dict[str, list[Tensor]], x: Tensor) -> Tensor:
        for w in p["layers"]:
            x = (x @ w).tanh()
        return x.square().mean()

    plan, tx = fshard.make_plan(params, Silent(mesh), units=["layers.*"]), fshard.optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    with fshard.collectives.tally() as calls:
        fshard.train_step(loss, tx, clip_norm=1.0)(state, torch.zeros(2, 256))
    return calls


def again(call: Call, ranks: Ranks) -> Callable[[], Tensor]:
    """A function that calls a collective again, and waits for it."""
    assert call.dtype is not None
    x = torch.zeros(tuple(call.shape), dtype=call.dtype)
    if call.kind == "all_reduce":
        return lambda: reduction.start_all_reduce(x, ranks, op=call.op).wait()
    if call.kind == "reduce_scatter":
        return lambda: reduction.start_reduce_scatter(x, ranks).wait()
    assert call.kind == "all_gather", call
    return lambda: reduction.start_all_gather(x, ranks).wait()


def reduce_scatter(name: str, x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part of the sum of x, in one of the orders."""
    return reduction_of(name).reduce_scatter(x, ranks, "", None).wait()


def row(size: int, rounds: int) -> dict[str, float]:
    """Microseconds on so many ranks, by column of the table."""
    with fake_mesh(size) as mesh:
        ranks, x = primitives.along(mesh, "shard"), torch.zeros(NUMEL)
        part = torch.zeros(NUMEL // size)
        steps = [again(call, ranks) for call in calls_of_a_step(mesh)]
        columns: dict[str, Callable[[], object]] = {
            "gather": lambda: reduction.start_all_gather(part, ranks).wait(),
            **{name: partial(reduce_scatter, name, x, ranks) for name in ("exact", "fast", "tree")},
            "of 4": lambda: reduction.start_all_reduce(x[:4], ranks).wait(),
            "of x": lambda: reduction.start_all_reduce(x, ranks).wait(),
        }
        times = {name: best([call], rounds) for name, call in columns.items()}
        return times | {f"a step ({len(steps)})": best(steps, rounds)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64,512,8192", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's names of collectives change
    torch.set_num_threads(1)
    rows = {size: row(size, args.rounds) for size in map(int, args.ranks.split(","))}
    table = Table("ranks", *next(iter(rows.values())), title="processor time of the host in microseconds")
    for size, times in rows.items():
        table.add_row(str(size), *(f"{x:,.0f}" for x in times.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
