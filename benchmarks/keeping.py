"""The cost of `fshard.elastic.keep`: its processor time by that of a step, in turn, on two gloo ranks.

    make bench-keeping

Measured with two kinds of messages: through shared memory, as between processes of one host, and through gloo's own
sockets, as between hosts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from models import task_of
from timing import in_turn, leave, on_two_ranks, ratio
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import elastic
from fshard.comm.mesh import unconnected


def systems(name: str, shared: bool) -> dict[str, Callable[[], object]]:
    """A step of model `name`, and its state kept in new memory or in that of the state before the last."""
    task, mesh = task_of(name), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    plan = fshard.make_plan(task.init(), mesh, units=task.units, bucket=task.bucket)
    if not shared:
        plan = replace(plan, mesh=unconnected(mesh))
    tx = fshard.optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(task.init(), plan), tx)
    batch = task.batch(torch.Generator().manual_seed(dist.get_rank()))
    step, held = fshard.train_step(task.loss, tx), list[elastic.Kept]()

    def run() -> None:
        nonlocal state
        state, _ = step(state, batch)

    def keep_again() -> None:
        held.append(elastic.keep(state, 1, reuse=held.pop(0) if len(held) > 1 else None))

    return {"step": run, "keep": lambda: elastic.keep(state, 1), "keep, memory reused": keep_again}


def main() -> None:
    """Start two ranks; on a rank (`--rank`), measure models S and T with both kinds of messages, and print ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rank", action="store_true")
    args = parser.parse_args()
    if not args.rank:
        on_two_ranks(__file__, "--rank", f"--rounds={args.rounds}")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in ("S", "T"):
        for shared in (True, False):
            times = in_turn(systems(name, shared), args.rounds, clock=time.process_time)
            for way in [way for way in times if way != "step" and dist.get_rank() == 0]:
                measured, over = ratio(times, way, "step"), "shared memory" if shared else "gloo"
                spread = f"{measured['low']:.3f} to {measured['high']:.3f}"
                print(f"{name}, {over}, {way}: {measured['ratio']:.3f} ({spread})")
                sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
