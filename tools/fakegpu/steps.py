"""One rank of many trains on a GPU that is not there: every kind of step, for the log. `table.py` starts it.

python tools/fakegpu/run.py FAKEGPU_ALONE=1 FAKEGPU_LOG=log tools/fakegpu/steps.py 2x4-exact-last [KIND,...]

A run is named by the shape of its mesh, its reduction, and words: `graph` for steps of `fshard.jit`, `last` for the
last rank, which may have padding alone, else it is the first; `registered` is for table.py.
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
from gpu_cases import IN_BACKWARD, KINDS, OPTIMIZERS, alternatives, batch, loss, start
from recorder import Recorder, mark
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import optim, tree

AXES = {1: ("shard",), 2: ("replicate", "shard")}
BOTH = ("replicate", "shard")
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
WIDE, FURTHER = {"params_over": BOTH, "grads_over": BOTH, "state_over": BOTH}, ("shard", "replicate")
HYBRID: dict[str, dict[str, Any]] = {
    "later": {"accumulate": 2, "reduce_once": "replicate"},
    "wide": {"plan": WIDE},
    "wide grads": {"plan": {"grads_over": FURTHER, "state_over": FURTHER}},
    "wide state": {"plan": {"state_over": FURTHER}},
    "wide in backward": {**IN_BACKWARD, "plan": {"state_over": FURTHER}},
    "wide bf16": {"plan": {**WIDE, "policy": "compute=bf16"}},
    "wide together": {"plan": {**WIDE, "together": True, "policy": "compute=bf16; **.norm: compute=f32"}},
}
# on one mesh of each shape: they differ in what they do with gradients, not in how these travel
ONCE = {name.replace(",", ""): kind for name, kind in alternatives() if not name.startswith(("step ", "jit"))}
WAITS = {"host"}  # the host updates these rows itself, so it waits for their gradients


def kinds(shape: tuple[int, ...], reduction: str, graph: bool) -> dict[str, dict[str, Any]]:
    """The kinds of steps of a mesh; a kind that names its reduction runs with "fast" alone, to run once."""
    every = {**KINDS, **MORE, **(HYBRID if len(shape) == 2 else {}), **ONCE}
    if reduction != "fast":
        every = {name: kind for name, kind in every.items() if name not in ONCE and "reduction" not in kind}
    eager_only = {"host", *(name for name, kind in every.items() if "in_backward" in kind)}
    return {name: kind for name, kind in every.items() if not graph or name not in eager_only}


class Store(dist.Store):
    """A store in which the other ranks have said what this one asks for: names of communicators, which nobody reads."""

    def set(self, key: str, value: object) -> None:
        """Do nothing."""

    def get(self, key: str) -> bytes:
        """As many zeros as NCCL's names have."""
        return bytes(128)


STORE = Store()  # torch forgets the methods of an object that Python frees


def mesh_of(shape: tuple[int, ...], last: bool = False) -> DeviceMesh:
    """A mesh in which this process is rank 0, or the last one, and the only one there is."""
    torch.cuda.set_device(0)
    size = math.prod(shape)
    dist.init_process_group("nccl", store=STORE, rank=size - 1 if last else 0, world_size=size)
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

    def __init__(self, mesh: DeviceMesh, graph: bool):
        self.mesh, self.graph, self._model = mesh, graph, Model()

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
        step: Any = fshard.train_step(fn, transform, donate=donate and not self.graph, **how)
        step = fshard.jit(step, backend="eager", donate=donate) if self.graph else step
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
    """Run the kinds that the arguments name, and print a line for each: that it ran, or how it failed."""
    words = sys.argv[1].split("-")
    shape, reduction = tuple(int(n) for n in words[0].split("x")), words[1]
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    torch.cuda.set_sync_debug_mode("error")  # says once that it is a prototype
    torch.cuda.set_sync_debug_mode("default")
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    with Recorder():
        runs = Runs(mesh_of(shape, "last" in words), "graph" in words)
        for name, kind in kinds(shape, reduction, "graph" in words).items():
            if chosen and name not in chosen:
                continue
            try:
                runs.run(name, **{"reduction": reduction, **kind})
                print(f"ran {name}", flush=True)
            except Exception as failure:
                print(f"{name}: {described(failure)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the threads of ProcessGroupNCCL, which wait for ranks that are not there


def described(failure: Exception) -> str:
    """An error on one line, with the place in fshard where it was raised."""
    place = [f for f in traceback.extract_tb(failure.__traceback__) if "/fshard/" in f.filename][-1:]
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in place]
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[-400:]} {where}"


if __name__ == "__main__":
    main()
