"""The systems that `make bench` compares: each makes a step of AdamW on a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jax_peer import JaxPeer
from simple_fsdp import SimpleFSDP
from tasks import LR, Task
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fshard

Step = Callable[[Any], Tensor]  # from this rank's batch to the loss


@dataclass(frozen=True)
class System:
    """What makes a step, and what is known of the step.

    `mean` says that its loss is the mean of all ranks, not a rank's own. The first step of a `compiled` system takes
    longer. A system that is not in `make bench` without arguments has `extra`. `without` maps models that it is not
    measured on to the reason.
    """

    make: Callable[[Task, DeviceMesh], Step]
    what: str
    mean: bool = False
    compiled: bool = False
    extra: bool = False
    without: Mapping[str, str] = field(default_factory=dict)


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int = 1) -> Step:
    """A step of a module whose forward returns its loss divided by `ranks`."""

    def step(batch: Any) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * ranks

    return step


def _module_step(model: nn.Module, ranks: int = 1) -> Step:
    return _stepped(model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True), ranks)


def local(task: Task, mesh: DeviceMesh) -> Step:
    """Each rank trains for itself, without communication. This is the floor."""
    return _module_step(task.module())


def fsdp2(task: Task, mesh: DeviceMesh, compiled: bool = False) -> Step:
    """FSDP2 (`fully_shard`); each repeated part is a unit, and so is the root."""
    model = task.module()
    for part in task.parts(model):
        if compiled:
            part.compile(backend=task.backend)
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _module_step(model)


def fsdp1(task: Task, mesh: DeviceMesh) -> Step:
    """FullyShardedDataParallel, with the units of `fsdp2`."""
    model = task.module()
    parts = model.get_submodule(task.repeated)
    wrapped = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    for i, part in enumerate(task.parts(model)):
        parts.register_module(str(i), wrapped(part))
    return _module_step(wrapped(model))


def simple(task: Task, mesh: DeviceMesh, compiled: bool = False) -> Step:
    """FSDP as a parametrization (`simple_fsdp.py`)."""
    model: nn.Module = SimpleFSDP(task.module(), mesh)
    if compiled:
        model.compile(backend=task.backend)
    return _module_step(model, mesh.size())


def ddp(task: Task, mesh: DeviceMesh) -> Step:
    """DistributedDataParallel."""
    return _module_step(DistributedDataParallel(task.module()))


def ddp_zero(task: Task, mesh: DeviceMesh) -> Step:
    """DistributedDataParallel with ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(task.module())
    return _stepped(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True))


def ours(
    task: Task,
    mesh: DeviceMesh,
    over: Mapping[str, Any] | None = None,
    how: Mapping[str, Any] | None = None,
    jit: Mapping[str, Any] | None = None,
) -> Step:
    """A donated step of fshard; `over` goes to the plan, `how` to `train_step`, `jit`, if given, to `fshard.jit`."""
    params = task.init()
    plan = fshard.make_plan(params, mesh, **{"units": task.units, "bucket": task.bucket, **(over or {})})
    tx = fshard.optim.adamw(LR)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step: Any = fshard.train_step(task.loss, tx, donate=jit is None, **(how or {}))
    step = step if jit is None else fshard.jit(step, donate=True, backend=task.backend, **jit)

    def next_step(batch: Any) -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return next_step


def from_artifact(task: Task, mesh: DeviceMesh) -> Step:
    """A jitted step of fshard that the next process loads."""
    path = f"{os.environ.get('TORCHINDUCTOR_CACHE_DIR', tempfile.gettempdir())}/step.artifact"
    return ours(task, mesh, jit={"artifact": path} if task.backend == "inductor" else {})


def in_parts(task: Task, mesh: DeviceMesh) -> Step:
    """A step of fshard with as many micro-batches as a rank has slices in a tree of eight, reduced once."""
    return ours(task, mesh, how={"accumulate": 8 // mesh.size(), "reduce_once": True})


WHOLE = {"params_over": (), "grads_over": (), "state_over": ()}
ZERO1 = {"params_over": (), "grads_over": ()}
RECOMPILES = {"T": "100 modules of one code are more than torch.compile compiles for it"}
ROWS = {"M": "a batch of two rows has not the rows of four slices"}

SYSTEMS = {
    "local": System(local, "the same batch on each rank without communication: the floor"),
    "fsdp2": System(fsdp2, "FSDP2, `fully_shard` of each repeated part and the root"),
    "fsdp2-compiled": System(
        partial(fsdp2, compiled=True), "the same, each part compiled", compiled=True, without=RECOMPILES
    ),
    "fsdp1": System(fsdp1, "FullyShardedDataParallel, the same units, `use_orig_params=True`"),
    "simple": System(simple, "FSDP as a parametrization with DTensor (the idea of SimpleFSDP)"),
    "simple-compiled": System(partial(simple, compiled=True), "the same, the model compiled", compiled=True),
    "ddp": System(ddp, "DistributedDataParallel"),
    "ddp-zero": System(ddp_zero, "DistributedDataParallel with ZeroRedundancyOptimizer"),
    "fshard": System(ours, "fshard, everything sharded", mean=True),
    "fshard-whole": System(partial(ours, over=WHOLE), '`strategy="ddp"`', mean=True),
    "fshard-zero1": System(partial(ours, over=ZERO1), '`strategy="zero1"`', mean=True),
    "fshard-jit": System(partial(ours, jit={}), "`fshard.jit(step, donate=True)`", mean=True, compiled=True),
    "fshard-artifact": System(
        from_artifact, "the same with `artifact=`, which the second process loads", mean=True, compiled=True, extra=True
    ),
    "fshard-buckets": System(
        partial(ours, jit={"bucket": 1 << 20}), "the same with `bucket=1 << 20`", mean=True, compiled=True, extra=True
    ),
    "fshard-tree": System(
        partial(ours, how={"reduction": "tree"}), '`reduction="tree"`', mean=True, extra=True, without=ROWS
    ),
    "fshard-parts": System(in_parts, "`accumulate=4, reduce_once=True`", mean=True, extra=True, without=ROWS),
    "jax": System(
        lambda task, mesh: JaxPeer(task.name, task.tiny),
        "JAX: GSPMD over two virtual CPU devices in a process of its own, optax, the whole step jitted and donated",
        mean=True,
        compiled=True,
        without={"gpt2": "it is a module of torch"},
    ),
}
