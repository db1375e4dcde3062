"""What `jit(step).lower(...).memory()` says, and the peak resident memory of the compiled step.

    make bench-footprint

One simulated rank for each model, in a process of its own. Measured is what a compiled step adds to what is resident
before it, and the state that it was given.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from models import TASKS
from vs_torch import resident

import fshard
from fshard.testing import simulate


def on_a_rank(name: str, mesh: Any) -> str:
    """Both figures for one model."""
    task = TASKS[name]
    torch.manual_seed(0)
    plan, tx = fshard.make_plan(task.init(), mesh, units=[f"{task.repeated}.*"]), fshard.optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(task.init(), plan), tx)
    batch, step = task.batch(torch.Generator()), fshard.jit(fshard.train_step(task.loss, tx), donate=True)
    said = step.lower(state, batch).memory()
    state, _ = step(state, batch)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    step(state, batch)
    measured = resident("VmHWM") - before + said.by["parameters"] + said.by["optimizer"]
    return f"{name}: said {said.peak / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB, ratio {said.peak / measured:.3f}"


def main() -> None:
    """Every model in a process of its own."""
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        print(simulate(lambda mesh: on_a_rank(sys.argv[1], mesh), shard=1)[0])
        return
    for name in TASKS:
        # freed blocks are given back at once, and new ones written to: what is resident is what is allocated
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_PERTURB_": "1"}
        subprocess.run([sys.executable, __file__, name], check=True, env=environment)


if __name__ == "__main__":
    main()
