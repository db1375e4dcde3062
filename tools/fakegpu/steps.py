"""One rank of many trains on a GPU that is not there: every kind of step, for the log. `table.py` starts it.

python tools/fakegpu/run.py FAKEGPU_ALONE=1 FAKEGPU_LOG=log tools/fakegpu/steps.py 2x4 fast eager [KIND,...]
"""

from __future__ import annotations

import gc
import math
import os
import sys
import traceback
import warnings
from typing import Any

import gpu_cases
import torch
import torch.distributed as dist
from gpu_cases import KINDS, OPTIMIZERS, batch, loss, start
from recorder import Recorder, mark
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import optim, tree

AXES = {1: ("shard",), 2: ("replicate", "shard")}
BOTH = ("replicate", "shard")
IN_BACKWARD: dict[str, Any] = {"donate": True, "in_backward": True}
MORE: dict[str, dict[str, Any]] = {
    "scaled": {"scale": lambda: fshard.DynamicLossScale(8.0)},
    "in_backward": IN_BACKWARD,
    "in_backward clip": {**IN_BACKWARD, "clip_norm": 1.0},
    "in_backward mixed": {**IN_BACKWARD, "plan": {"policy": "compute=bf16", "whole": "**.b"}},
    "prefetch": {"plan": {"prefetch": 2}},
    "bucket": {"plan": {"bucket": 1 << 20}},
    "grads bf16": {"plan": {"policy": "compute=bf16, reduce=bf16, grads=bf16"}},
    "sums f16": {"plan": {"policy": "compute=f32, reduce=f16"}},
    "regather": {"plan": {"regather": "shard"}},
    "8 bits": {"tx": lambda: optim.adamw_8bit(1e-3), "plan": {"block": 256}},
    "dropout": {"fn": lambda p, x: loss(p, x, 0.1)},
    "lion": {"tx": OPTIMIZERS["lion"]},
    "micro bf16": {"accumulate": 3, "plan": {"policy": "compute=bf16, reduce=bf16"}},
}
HYBRID: dict[str, dict[str, Any]] = {
    "later": {"accumulate": 2, "reduce_once": "replicate"},
    "wide": {"plan": {"params_over": BOTH, "grads_over": BOTH, "state_over": BOTH}},
}
WAITS = {"host"}  # the host updates these rows itself, so it waits for their gradients


def kinds(shape: tuple[int, ...], reduction: str, backend: str) -> dict[str, dict[str, Any]]:
    """The kinds of steps of a mesh; a kind that names its reduction runs with "fast" alone, to run once."""
    every = {**KINDS, **MORE, **(HYBRID if len(shape) == 2 else {})}
    if reduction != "fast":
        every = {name: kind for name, kind in every.items() if "reduction" not in kind}
    eager_only = {"host", *(name for name, kind in every.items() if "in_backward" in kind)}
    return {name: kind for name, kind in every.items() if backend == "off" or name not in eager_only}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh in which this process is rank 0, and the only one there is."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=math.prod(shape))
    return init_device_mesh("cuda", shape, mesh_dim_names=AXES[len(shape)])


def size(x: Any) -> int:
    """The bytes of all tensors of the device in a tree."""
    return sum(leaf.nbytes for leaf in tree.leaves(x) if isinstance(leaf, Tensor) and leaf.is_cuda)


def requested(when: str) -> int:
    """The bytes that tensors asked for, now ("current") or at most ("peak").

    The allocator gives a block that is up to 1 MiB larger, where one is free: so its own count depends on what ran
    before.
    """
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])


class Model:
    """The sizes in bytes of the model of `gpu_cases`: all parameters, the largest unit, and activations of a backward.

    Activations are what a backward over whole parameters needs beside them; some gradients are among them.
    """

    def __init__(self) -> None:
        whole = tree.map(lambda x: x.requires_grad_(), gpu_cases.params())
        self.whole, self.unit = size(whole), max(size(x) for x in (whole["embed"], whole["head"], *whole["blocks"]))
        for _ in range(2):  # the first one makes cuBLAS's workspace as well
            tokens = batch(0)
            before = requested("current")
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(loss(whole, tokens).total, tree.leaves(whole))
        self.activations = requested("peak") - before

    def estimate(self, state: fshard.TrainState, donate: bool, regather: bool) -> int:
        """The bytes that a step needs, about: the state, a new one if the old one stays, gradients, units, activations.

        Two units are gathered, and three have gradients (docs/gpus.md); all are gathered if they stay.
        """
        stays = size(state.params) < self.whole and not regather
        units = 5 * self.unit + (self.whole if stays else 0)
        return (2 - donate) * size(state) + size(state.params) + units + self.activations


class Runs:
    """Runs of kinds of steps on one mesh; every run is a case of the log."""

    def __init__(self, mesh: DeviceMesh, backend: str):
        self.mesh, self.backend, self._model = mesh, backend, Model()

    def run(
        self,
        name: str,
        tx: Any = lambda: optim.adamw(1e-3),
        scale: Any = lambda: None,
        plan: Any = None,
        fn: Any = loss,
        **how: Any,
    ) -> None:
        """Three steps, the last two in the log and with host waits as errors; the last one is counted."""
        gc.collect()
        torch.cuda.empty_cache()  # cudaMallocs do not depend on the case before
        transform, donate = tx(), how.pop("donate", False)
        graph = self.backend != "off"
        step: Any = fshard.train_step(fn, transform, donate=donate and not graph, **how)
        step = fshard.jit(step, backend=self.backend, donate=donate) if graph else step
        state, tokens = start(self.mesh, transform, scale(), plan), batch(0)
        state, metrics = step(state, tokens)
        torch.cuda.synchronize()
        mark(f"case name={name.replace(' ', '_')}")
        torch.cuda.set_sync_debug_mode("default" if name in WAITS else "error")
        try:
            state, metrics = step(state, tokens)
            gc.collect()  # else what steps before left, and Python frees in this one, would be missing from its peak
            before = requested("current")
            torch.cuda.reset_peak_memory_stats()
            mark("step")
            state, metrics = step(state, tokens)
            peak = requested("peak") - before + size(state)  # without what the case before left
            about = self._model.estimate(state, donate, (plan or {}).get("regather", True))
            mark(f"peak bytes={peak} estimate={about}")
            fshard.gather_params(state.params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            mark("end")
        assert bool(torch.isfinite(metrics["loss"])), "the loss is not finite"


def main() -> None:
    """Run the kinds that the arguments name, and print a line for each that fails."""
    shape = tuple(int(n) for n in sys.argv[1].split("x"))
    reduction, backend = sys.argv[2], sys.argv[3]
    chosen = sys.argv[4].split(",") if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    torch.cuda.set_sync_debug_mode("error")  # says once that it is a prototype
    torch.cuda.set_sync_debug_mode("default")
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
    with Recorder():
        runs = Runs(mesh_of(shape), backend)
        for name, kind in kinds(shape, reduction, backend).items():
            if chosen and name not in chosen:
                continue
            try:
                runs.run(name, **{"reduction": reduction, **kind})
            except Exception as failure:
                place = [f for f in traceback.extract_tb(failure.__traceback__) if "/fshard/" in f.filename][-1:]
                where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in place]
                print(f"{name}: {type(failure).__name__}: {str(failure)[:300]} {where}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the threads of ProcessGroupNCCL, which wait for ranks that are not there


if __name__ == "__main__":
    main()
