"""Compare FSDP2, DistributedDataParallel and fshard, in turn, in one process group, on the same model and data.

    make bench ARGS="--model M"

prints for each model: ratios of median step times with their spread, also of the floor (the same batch without
communication); collectives and bytes in a step; and the peak resident memory that each system adds to a rank, measured
in new processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import HEADS, TASKS, Reference, Task
from rich.console import Console
from rich.table import Table
from timing import in_turn, leave, on_two_ranks, ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fshard

Step = Callable[[Tensor], Tensor]
LR = 1e-3


def _reference(name: str) -> Reference:
    torch.manual_seed(0)
    return Reference(TASKS[name], TASKS[name].init(), HEADS[name])


def _module_step(model: torch.nn.Module, parameters: Any) -> Step:
    optimizer = torch.optim.AdamW(parameters, lr=LR, fused=True)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def local(name: str, mesh: DeviceMesh) -> Step:
    """A step without communication: each rank trains for itself. This is the floor."""
    model = _reference(name)
    return _module_step(model, model.parameters())


def fsdp2(name: str, mesh: DeviceMesh) -> Step:
    """A step of FSDP2 (`fully_shard`); each repeated part is a unit, and so is the root."""
    model = _reference(name)
    for part in model.parts:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _module_step(model, model.parameters())


def fsdp2_compiled(name: str, mesh: DeviceMesh) -> Step:
    """A step of FSDP2 with each repeated part compiled."""
    model = _reference(name)
    for part in model.parts:
        part.compile()
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _module_step(model, model.parameters())


def ddp(name: str, mesh: DeviceMesh) -> Step:
    """A step of torch's DistributedDataParallel."""
    model = DistributedDataParallel(_reference(name))
    return _module_step(model, model.parameters())


def _fshard(
    name: str, mesh: DeviceMesh, jit: dict[str, Any] | None = None, how: dict[str, Any] | None = None, **over: Any
) -> Step:
    torch.manual_seed(0)
    task: Task = TASKS[name]
    params = task.init()
    plan = fshard.make_plan(params, mesh, units=[f"{task.repeated}.*"], **over)
    tx = fshard.optim.adamw(LR)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step: Any = fshard.train_step(task.loss, tx, donate=jit is None, **(how or {}))
    step = step if jit is None else fshard.jit(step, donate=True, **jit)

    def next_step(batch: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return next_step


def fshard_full(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard with sharded parameters, which are gathered again in the backward."""
    return _fshard(name, mesh)


def fshard_whole(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard with whole parameters (`params_over=()`) and all-reduced gradients."""
    return _fshard(name, mesh, params_over=(), grads_over=(), state_over=())


def fshard_jit(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard as one compiled graph."""
    return _fshard(name, mesh, jit={})


def fshard_buckets(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard as one compiled graph; collectives are merged up to a mebibyte."""
    return _fshard(name, mesh, jit={"bucket": 1 << 20})


def fshard_tree(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard with the same bits on any number of ranks, in eight slices."""
    return _fshard(name, mesh, how={"reduction": "tree"})


def fshard_parts(name: str, mesh: DeviceMesh) -> Step:
    """A step of fshard with as many micro-batches as a rank has slices, reduced once."""
    return _fshard(name, mesh, how={"accumulate": 8 // mesh.size(), "reduce_once": True})


SYSTEMS = {"local": local, "fsdp2": fsdp2, "fshard": fshard_full, "ddp": ddp, "fshard ()": fshard_whole}
COMPILED = {"fsdp2 compiled": fsdp2_compiled, "fshard jit": fshard_jit, "fshard buckets": fshard_buckets}
SLICED = {"fshard tree": fshard_tree, "fshard in parts": fshard_parts}
ALL = {**SYSTEMS, **COMPILED, **SLICED}
PAIRS = [("fshard", "fsdp2"), ("fshard ()", "ddp"), ("local", "fsdp2")]
PAIRS += [("fshard tree", "fshard"), ("fshard tree", "fshard in parts")]
PAIRS += [("fshard buckets", other) for other in ("fsdp2", "fshard")]
PAIRS += [("fshard jit", other) for other in ("fsdp2", "fsdp2 compiled", "fshard")]


def resident(key: str) -> int:
    """Bytes of an entry of /proc/self/status, such as "VmRSS"."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def peak_memory(name: str, system: str, mesh: DeviceMesh, steps: int = 3) -> int:
    """Peak resident bytes that building a system and a few steps add to this process (Linux)."""
    if system in COMPILED:
        torch.compile(torch.square)(torch.ones(2))  # loads the compiler, which is not counted
    before = resident("VmRSS")
    step, generator = ALL[system](name, mesh), _generator()
    if system in COMPILED:  # temporary memory of compiling is not counted either
        step(TASKS[name].batch(generator))
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
    for _ in range(steps):
        step(TASKS[name].batch(generator))
    return resident("VmHWM") - before


def first_step(name: str, system: str, mesh: DeviceMesh) -> float:
    """Seconds of the first step, with compilation."""
    step, batch = ALL[system](name, mesh), TASKS[name].batch(_generator())
    begin = time.perf_counter()
    step(batch)
    return time.perf_counter() - begin


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1 + dist.get_rank())


def step_times(name: str, systems: list[str], mesh: DeviceMesh, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's step, with the systems in turn. RuntimeError if their losses differ."""
    steps, generator = {s: ALL[s](name, mesh) for s in systems}, _generator()
    batch, losses = TASKS[name].batch(generator), dict[str, float]()

    def call(system: str) -> None:
        losses[system] = float(steps[system](batch))

    def check() -> None:
        nonlocal batch
        _check_losses(losses)
        batch = TASKS[name].batch(generator)

    return in_turn({system: partial(call, system) for system in systems}, rounds, between=check)


def _check_losses(losses: dict[str, float]) -> None:
    means = torch.tensor([losses[s] for s in losses if s != "local"])
    own = torch.tensor([s.startswith("fshard") for s in losses if s != "local"])
    averaged = means.clone()
    dist.all_reduce(averaged)
    averaged = torch.where(own, means, averaged / dist.get_world_size())
    if (averaged - averaged[0]).abs().max() > 1e-3 * averaged[0].abs():
        raise RuntimeError(f"the systems do not train alike: {dict(zip(losses, averaged.tolist(), strict=False))}")


def traffic(name: str, mesh: DeviceMesh) -> str:
    """Collectives and bytes that a rank sends in one step of fshard, as text."""
    step = fshard_full(name, mesh)
    with fshard.collectives.tally() as records:
        step(TASKS[name].batch(_generator()))
    kinds = sorted({r.kind for r in records})
    return ", ".join(f"{len(records.select(k))} {k} ({records.nbytes(k) / 1e6:.1f} MB)" for k in kinds)


def reference_traffic(name: str, mesh: DeviceMesh) -> str:
    """Collectives of one step of FSDP2, as text."""
    from torch.distributed.tensor.debug import CommDebugMode

    step = fsdp2(name, mesh)
    with CommDebugMode() as mode:
        step(TASKS[name].batch(_generator()))
    return ", ".join(f"{count} {op}" for op, count in mode.get_comm_counts().items())


def systems_for(name: str, args: argparse.Namespace) -> list[str]:
    """The names of the systems that are measured on a model."""
    if args.tree:
        return ["fshard", *SLICED]
    known = ["local", "fsdp2", "fshard", *COMPILED] if args.jit else SYSTEMS
    left_out = {"fsdp2 compiled", "ddp", "fshard ()"} if name == "T" else {"fshard buckets"}  # units fill a bucket
    return [s for s in known if s not in left_out]


def measure(name: str, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Measure times and collectives of one model."""
    result: dict[str, Any] = {"model": name, "threads": torch.get_num_threads(), "rounds": args.rounds}
    times = step_times(name, systems_for(name, args), mesh, args.rounds)
    result["median_ms"] = {s: round(1e3 * statistics.median(t), 2) for s, t in times.items()}
    result["ratios"] = {f"{a} / {b}": ratio(times, a, b) for a, b in PAIRS if a in times and b in times}
    result["fshard"], result["fsdp2"] = traffic(name, mesh), reference_traffic(name, mesh)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """Print the table of one model, and its ratios."""
    table = Table(title=f"model {result['model']}, {dist.get_world_size()} ranks, {result['rounds']} rounds")
    for column in ("system", "median ms"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, ms in result["median_ms"].items():
        table.add_row(system, f"{ms:.1f}")
    console.print(table)
    for pair, r in result["ratios"].items():
        console.print(f"  {pair}: {r['ratio']:.3f}  (10% to 90% of paired rounds: {r['low']:.3f} to {r['high']:.3f})")
    console.print(f"  per step, fshard: {result['fshard']}\n  per step, fsdp2: {result['fsdp2']}")


def launch(args: argparse.Namespace) -> None:
    """Start two ranks for the times of each model, and two new ranks for the memory of each of its systems."""
    for name in args.model or TASKS:
        extra = (["--json", str(args.json)] if args.json else []) + ["--jit"] * args.jit
        extra += ["--tree"] * args.tree
        on_two_ranks(__file__, "--model", name, "--rounds", str(args.rounds), *extra)
        if not args.no_memory:
            peak = partial(on_two_ranks, __file__, "--model", name, capture=True)
            peaks = {s: int(peak("--peak", s)) / 1e6 for s in systems_for(name, args)}
            print("  peak resident MB over imports, the fuller rank:", {s: round(p) for s, p in peaks.items()})
            if "fsdp2" in peaks:
                print(f"  memory, fshard / fsdp2: {peaks['fshard'] / peaks['fsdp2']:.3f}", flush=True)
        if args.jit:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                first = [float(on_two_ranks(__file__, "--model", name, "--first", capture=True)) for _ in range(2)]
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            print(f"  first step of fshard jit: {first[0]:.1f} s, in a second process {first[1]:.1f} s", flush=True)


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure the models of the arguments; rank 0 prints the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh, first = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), dist.get_rank() == 0
    for name in args.model:
        if args.first:
            seconds = first_step(name, "fshard jit", mesh)
            print(seconds, file=sys.stdout if first else sys.stderr)
            continue
        if args.peak:
            peak = torch.tensor(peak_memory(name, args.peak, mesh))
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            print(int(peak), file=sys.stdout if first else sys.stderr)
            continue
        result = measure(name, args, mesh)
        if first:
            show(result, Console(soft_wrap=True))
        if args.json and first:
            with args.json.open("a") as out:
                out.write(json.dumps(result) + "\n")
    leave()


def main() -> None:
    """Start the measurements; on a rank under torchrun, run one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(TASKS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", type=Path, help="append a line of JSON for each model")
    parser.add_argument("--peak", choices=list(ALL), help="only one system's memory, on a rank under torchrun")
    parser.add_argument("--jit", action="store_true", help="the compiled systems, and what compiling takes")
    parser.add_argument("--tree", action="store_true", help="what the same bits on any number of ranks cost")
    parser.add_argument("--first", action="store_true", help="only the first jitted step, on a rank under torchrun")
    args = parser.parse_args()
    on_a_rank(args) if "RANK" in os.environ else launch(args)


if __name__ == "__main__":
    main()
