"""The cost of `fshard.check` and `fshard.guard`: the same step without and with them, in turn, on two gloo ranks.

    make bench-checking

Measured with two kinds of messages: through shared memory, as between processes of one host, and through gloo's own
sockets, as between hosts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import task_of
from timing import in_turn, leave, on_two_ranks, ratio
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard.comm.mesh import unconnected


def systems(name: str, shared: bool) -> dict[str, Callable[[], object]]:
    """A step of model `name`, also checked, and guarded each time or never; with `shared`, ranks use shared memory."""
    task, mesh = task_of(name), init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    plan = fshard.make_plan(task.init(), mesh, units=task.units, bucket=task.bucket)
    if not shared:
        plan = replace(plan, mesh=unconnected(mesh))
    tx = fshard.optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(task.init(), plan), tx)
    batch = task.batch(torch.Generator().manual_seed(dist.get_rank()))
    step = fshard.train_step(task.loss, tx)
    ways: dict[str, Callable[..., tuple[fshard.TrainState, dict[str, Any]]]] = {
        "plain": step,
        "checked": fshard.check(step),
        "guard, all steps": fshard.guard(step, every=1),
        "guard, no step": fshard.guard(step, every=1 << 40),
        "guard, at rest": fshard.guard(step, every=1 << 40, at_rest=True),
    }
    states = dict.fromkeys(ways, state)

    def run(way: str) -> None:
        states[way], _ = ways[way](states[way], batch)

    return {way: partial(run, way) for way in ways}


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
            times = in_turn(systems(name, shared), args.rounds)
            for way in [way for way in times if way != "plain" and dist.get_rank() == 0]:
                measured, over = ratio(times, way, "plain"), "shared memory" if shared else "gloo"
                print(
                    f"{name}, {over}, {way}: {measured['ratio']:.3f} ({measured['low']:.3f} to {measured['high']:.3f})"
                )
                sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
