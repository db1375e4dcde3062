"""Compare optimizers with torch's: ZeRO updates, whole ZeRO-1 steps, clipping; and the balance of partitions.

    make bench-optimizers ARGS="--model M"

Two gloo ranks with one thread each run three comparisons, the systems of each in turn:

- `ZeroRedundancyOptimizer(AdamW, fused=True).step()`, and `fshard.zero(adamw).step` of the same reduced gradients;
- a step of DistributedDataParallel with ZeroRedundancyOptimizer, and fshard's step with `state_over="shard"` alone;
- `clip_grad_norm_` of FSDP2's gradients, and `clip_by_global_norm` of `Sharded` gradients.

The table of balance comes from states of meta tensors on simulated ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import task_of
from networks import deep
from rich.console import Console
from rich.table import Table
from tasks import Reference, Task
from timing import in_turn, leave, on_two_ranks, ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fshard
from fshard import tree
from fshard.comm.mesh import AnyMesh
from fshard.core.tree import Tree

Call = Callable[[], object]
LR = 1e-3
MODELS: dict[str, Task] = {name: task_of(name) for name in ("S", "M", "T")} | {"1000 leaves": deep(500, 64, 16)}


def _params(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name].init()


def _like(params: Tree) -> Any:
    generator = torch.Generator().manual_seed(1)
    return tree.map(lambda x: torch.randn(x.shape, generator=generator), params)


def reference_zero(name: str) -> Call:
    """A step of ZeroRedundancyOptimizer; its gradients are already reduced."""
    params = _params(name)
    leaves = [torch.nn.Parameter(x) for x in tree.leaves(params)]
    for leaf, grad in zip(leaves, tree.leaves(_like(params)), strict=True):
        leaf.grad = grad
    return ZeroRedundancyOptimizer(leaves, torch.optim.AdamW, lr=LR, fused=True).step


def fshard_zero(name: str, mesh: DeviceMesh, partition: str) -> Call:
    """A step of `fshard.zero` with the same gradients; the state is donated."""
    params, tx = _params(name), fshard.zero(fshard.optim.adamw(LR), mesh, partition)
    state, grads = tx.init(params), _like(params)

    def step() -> None:
        nonlocal params, state
        params, state = tx.step(grads, state, params, donate=True)

    return step


def optimizer_part(name: str, mesh: DeviceMesh) -> dict[str, Call]:
    """The systems of comparison one: update this rank's part, then send the new parameters to all ranks."""
    ours = {f"zero, {p}": fshard_zero(name, mesh, p) for p in ("flat", "leaf")}
    return {"ZeroRedundancyOptimizer": reference_zero(name), **ours}


def whole_step(name: str, mesh: DeviceMesh) -> dict[str, Call]:
    """The systems of comparison two: forward, backward, reduction of gradients and a ZeRO-1 update."""
    task = MODELS[name]
    torch.manual_seed(0)
    model = DistributedDataParallel(task.module())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    batch = task.batch(torch.Generator().manual_seed(1 + dist.get_rank()))
    params = _params(name)
    plan = fshard.make_plan(params, mesh, units=1 << 21, params_over=(), grads_over=())  # 8 MB: like DDP's buckets
    tx = fshard.optim.adamw(LR)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    train = fshard.train_step(task.loss, tx, donate=True)

    def reference() -> None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        nonlocal state
        state, _ = train(state, batch)

    return {"DDP with ZeroRedundancyOptimizer": reference, "train_step, state_over": step}


def clipping(name: str, mesh: DeviceMesh) -> dict[str, Call]:
    """The systems of comparison three: compute the global norm of the gradients, and scale them down."""
    task, params = MODELS[name], _params(name)
    model = Reference(task, params)
    for part in task.parts(model):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(task.batch(torch.Generator().manual_seed(1))).backward()
    plan = fshard.make_plan(params, mesh, units=task.units, bucket=task.bucket)
    grads, tx = fshard.shard_params(_like(params), plan), fshard.optim.clip_by_global_norm(1.0)

    def clip() -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return {"clip_grad_norm_ over FSDP2": clip, "clip_by_global_norm": lambda: tx.update(grads, (), own_grads=True)}


PARTS = {"the optimizer's part": optimizer_part, "a whole ZeRO-1 step": whole_step, "clipping": clipping}


def _gpt(d: int = 1024, layers: int = 24, vocab: int = 50257) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, d), "pos": (1024, d)}
    for i in range(layers):
        block = {
            "qkv": (d, 3 * d),
            "proj": (d, d),
            "up": (d, 4 * d),
            "down": (4 * d, d),
            "norm": (d,),
            "bias": (4 * d,),
        }
        shapes |= {f"{i}.{key}": shape for key, shape in block.items()}
    return shapes


def _experts(d: int = 512, layers: int = 12, experts: int = 64) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (32000, d)}
    for i in range(layers):
        shapes |= {f"{i}.qkv": (d, 3 * d), f"{i}.router": (d, experts), f"{i}.norm": (d,)}
        shapes |= {f"{i}.{e}.{key}": (d, 2 * d) for e in range(experts) for key in ("up", "down")}
    return shapes


TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "GPT-like": _gpt(),
    "embedding-dominated": {"embed": (500_000, 64), **{f"mlp.{i}": (256, 256) for i in range(8)}},
    "mixture of experts": _experts(),
}


def _state_bytes(shapes: dict[str, tuple[int, ...]], partition: str, num: int) -> list[int]:
    """Bytes of AdamW's moments on each of `num` ranks; they are meta tensors, which take no memory."""
    params = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}

    def held(mesh: AnyMesh) -> int:
        state = fshard.zero(fshard.optim.adamw(LR), mesh, partition).init(params)
        return sum(x.nbytes for x in tree.leaves(state) if x.dim())

    return fshard.testing.simulate(held, shard=num)


def balance(shapes: dict[str, tuple[int, ...]], num: int) -> dict[str, float]:
    """Bytes of optimizer state on the fullest rank, divided by the mean of all ranks without padding."""
    sizes = [8 * math.prod(shape) for shape in shapes.values()]
    load = [0] * num
    for size in sorted(sizes, reverse=True):  # the greedy rule of ZeroRedundancyOptimizer
        load[load.index(min(load))] += size
    fullest = {p: max(_state_bytes(shapes, p, num)) for p in ("flat", "leaf")}
    return {name: x * num / sum(sizes) for name, x in {**fullest, "ZeroRedundancyOptimizer": max(load)}.items()}


def show_balance(console: Console) -> None:
    """Print a table of balance, with a row for each tree and number of ranks."""
    table = Table(title="fullest rank over the mean, bytes of AdamW's moments")
    columns = ["flat", "leaf", "ZeroRedundancyOptimizer"]
    for column in ("tree", "ranks", *columns):
        table.add_column(column, justify="left" if column == "tree" else "right")
    for name, shapes in TREES.items():
        for num in (2, 4, 8, 16, 32, 64):
            row = balance(shapes, num)
            table.add_row(name, str(num), *(f"{row[column]:.5f}" for column in columns))
    console.print(table)


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure the models of the arguments; rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, first = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), dist.get_rank() == 0
    console = Console(soft_wrap=True)
    for name in args.model:
        for what, make in PARTS.items():
            if what != "the optimizer's part" and name == "1000 leaves":
                continue
            times = in_turn(make(name, mesh), args.rounds)
            reference, *ours = times
            medians = {system: round(1e3 * statistics.median(t), 2) for system, t in times.items()}
            ratios = {system: ratio(times, system, reference) for system in ours}
            if first:
                console.print(f"{name}, {what}: {medians} ms")
                for system, r in ratios.items():
                    spread = f"(10% to 90% of paired rounds: {r['low']:.3f} to {r['high']:.3f})"
                    console.print(f"  {system} / {reference}: {r['ratio']:.3f}  {spread}")
            if first and args.json:
                with args.json.open("a") as out:
                    out.write(json.dumps({"model": name, "what": what, "ms": medians, "ratios": ratios}) + "\n")
    leave()


def main() -> None:
    """Print the table of balance, then start two ranks for each model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="append a line of JSON for each measurement")
    args = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(args)
        return
    show_balance(Console())
    for name in args.model or MODELS:
        extra = ["--json", str(args.json)] if args.json else []
        on_two_ranks(__file__, "--model", name, "--rounds", str(args.rounds), *extra)


if __name__ == "__main__":
    main()
