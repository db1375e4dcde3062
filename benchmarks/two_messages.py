"""Systems beside a step on two gloo ranks, with two kinds of messages.

Messages go through shared memory, as between processes of one host, and through gloo's own sockets, as between hosts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from models import task_of
from timing import in_turn, leave, on_two_ranks, ratio
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard.comm.mesh import unconnected


def started(name: str, shared: bool) -> tuple[Callable[..., tuple[Any, Any]], fshard.TrainState, Any]:
    """A step of model `name`, a state and a batch; with `shared`, ranks use shared memory."""
    task, mesh = task_of(name), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    plan = fshard.make_plan(task.init(), mesh, units=task.units, bucket=task.bucket)
    if not shared:
        plan = replace(plan, mesh=unconnected(mesh))
    tx = fshard.optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(task.init(), plan), tx)
    return fshard.train_step(task.loss, tx), state, task.batch(torch.Generator().manual_seed(dist.get_rank()))


def compare(
    file: str,
    systems: Callable[[str, bool], Mapping[str, Callable[[], object]]],
    base: str,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Start two ranks of `file`; on a rank (`--rank`), print ratios to `base` for models S and T, and both messages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", action="store_true")
    args = parser.parse_args()
    if not args.rank:
        on_two_ranks(file, "--rank", f"--rounds={args.rounds}")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("S", "T"):
        for shared in (True, False):
            times = in_turn(systems(name, shared), args.rounds, clock=clock)
            for way in [way for way in times if way != base and dist.get_rank() == 0]:
                measured, over = ratio(times, way, base), "shared memory" if shared else "gloo"
                spread = f"{measured['low']:.3f} to {measured['high']:.3f}"
                print(f"{name}, {over}, {way}: {measured['ratio']:.3f} ({spread})")
                sys.stdout.flush()
    leave()
