"""Compare the peak that `jit(step).lower(...).memory()` predicts with the resident memory of the compiled step.

    make bench-footprint

Each model runs on one simulated rank, in a process of its own. The measured value is the growth of the peak during a
compiled step, plus the predicted bytes of parameters and optimizer state, which are resident before the step.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import torch
from memory import reset_peak, resident
from models import task_of

import fshard
from fshard.comm.mesh import AnyMesh
from fshard.testing import simulate


def on_a_rank(name: str, mesh: AnyMesh) -> str:
    """Predicted and measured bytes of one model, and their ratio, as text."""
    task = task_of(name)
    torch.manual_seed(0)
    plan, tx = fshard.make_plan(task.init(), mesh, units=task.units, bucket=task.bucket), fshard.optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(task.init(), plan), tx)
    batch, step = task.batch(torch.Generator()), fshard.jit(fshard.train_step(task.loss, tx), donate=True)
    said = step.lower(state, batch).memory()
    state, _ = step(state, batch)
    gc.collect()
    before = resident("VmRSS")
    reset_peak()
    step(state, batch)
    measured = resident("VmHWM") - before + said.by["parameters"] + said.by["optimizer"]
    return f"{name}: said {said.peak / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB, ratio {said.peak / measured:.3f}"


def main() -> None:
    """Start a process for each model; with a model's name as argument, measure this model."""
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(simulate(lambda mesh: on_a_rank(sys.argv[1], mesh), shard=1)[0])
        return
    for name in ("S", "M", "T"):
        # malloc returns freed blocks at once and writes to new ones, so resident memory equals allocated memory
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_PERTURB_": "1"}
        subprocess.run([sys.executable, __file__, name], check=True, env=environment)


if __name__ == "__main__":
    main()
