"""Speed and memory on one GPU compared with FSDP2 and a compiled step without shards; overlap of collectives."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CUDA, DEVICE
from gpu_parts import NO_GPU, Rows, one_rank
from networks import transformer
from tasks import Reference, Task
from timing import in_turn, ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fshard
from fshard import optim, tree

Run = Callable[[], object]
# about a billion parameters on a GPU, very few in a dry run
WIDTH, LAYERS, HEADS, ROWS, LENGTH = (2048, 20, 16, 4, 1024) if CUDA else (32, 2, 2, 2, 16)
LR = 1e-3
BACKEND = "inductor" if CUDA else "eager"  # a dry run compiles nothing


def _task() -> tuple[Task, Any, Tensor]:
    torch.manual_seed(0)
    task = transformer(WIDTH, LAYERS, HEADS, ROWS, LENGTH)
    whole = tree.map(lambda x: x.to(DEVICE), task.init())
    return task, whole, task.batch(torch.Generator().manual_seed(1)).to(DEVICE)


def _fshard(mesh: DeviceMesh, jit: bool = False, reduction: str | None = None) -> Run:
    task, whole, tokens = _task()
    tx = optim.adamw(LR)
    plan = fshard.make_plan(whole, mesh, units=["blocks.*"], policy="compute=bf16, reduce=f32")
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    del whole
    step: Any = fshard.train_step(task.loss, tx, donate=not jit, reduction=reduction)
    step = fshard.jit(step, donate=True, backend=BACKEND) if jit else step

    def run() -> None:
        nonlocal state
        state, _ = step(state, tokens)

    return run


def _fsdp2(mesh: DeviceMesh, compiled: bool = False) -> Run:
    task, whole, tokens = _task()
    model = Reference(task, whole)
    del whole
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in task.parts(model):
        if compiled:
            part.compile(backend=BACKEND)
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def run() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _unsharded(mesh: DeviceMesh) -> Run:
    """A compiled step on one device, with bfloat16 by autocast: the lower bound, without collectives."""
    task, whole, tokens = _task()
    model = Reference(task, whole)
    del whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    forward = torch.compile(model, backend=BACKEND)

    def run() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


SYSTEMS: dict[str, Callable[[DeviceMesh], Run]] = {
    "fshard": _fshard,
    "fshard exact": lambda mesh: _fshard(mesh, reduction="exact"),
    "fshard jit": lambda mesh: _fshard(mesh, jit=True),
    "FSDP2": _fsdp2,
    "FSDP2 compiled": lambda mesh: _fsdp2(mesh, compiled=True),
    "unsharded compiled": _unsharded,
}
PAIRS = [("fshard", "FSDP2"), ("fshard exact", "FSDP2"), ("fshard jit", "FSDP2 compiled")]
PAIRS += [(name, "unsharded compiled") for name in ("fshard", "fshard jit", "FSDP2", "FSDP2 compiled")]


def _peak(build: Callable[[DeviceMesh], Run], mesh: DeviceMesh) -> dict[str, float]:
    """Peak GiB of a system that is alone on the device, allocated and reserved, and retries of the allocator."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    run = build(mesh)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"] / 2**30,
        "reserved": stats["reserved_bytes.all.peak"] / 2**30,
        "retries": stats.get("num_alloc_retries", 0) - before,
    }


def speed(rows: Rows) -> None:
    """Measure the peak of each system alone, then ratios of pairs of systems that run in turn."""
    mesh = one_rank()
    for name, build in SYSTEMS.items() if CUDA else ():
        try:
            got = _peak(build, mesh)
        except Exception as failure:
            rows.add(f"peak of {name}", "failed", f"{type(failure).__name__}: {failure}")
            continue
        text = f"{got['allocated']:.2f} GiB, {got['reserved']:.2f} reserved, {got['retries']:.0f} retries"
        rows.add(f"peak of {name}", "measured", text, **got)
    for a, b in PAIRS:
        try:
            runs = {name: _until_done(SYSTEMS[name](mesh)) for name in (a, b)}
            got = ratio(in_turn(runs, 10 if CUDA else 2, warmup=3 if CUDA else 1), a, b)
        except Exception as failure:
            rows.add(f"{a} / {b}", "failed", f"{type(failure).__name__}: {failure}")
            continue
        rows.add(f"{a} / {b}", "measured", f"{got['ratio']:.3f} ({got['low']:.3f} to {got['high']:.3f})", **got)
        del runs
        if CUDA:
            torch.cuda.empty_cache()


def _until_done(run: Run) -> Run:
    def whole() -> None:
        run()
        if CUDA:
            torch.cuda.synchronize()

    return whole


def overlap(rows: Rows) -> None:
    """Measure which share of the time on other streams (collectives) overlaps with kernels of the computation."""
    if not CUDA:
        return rows.add("a trace of a step", "skipped", f"{NO_GPU}: no streams")
    run = _fshard(one_rank())
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        profile.export_chrome_trace(path)
        events = json.loads(Path(path).read_text())["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy") and "dur" in event:
            begin = float(event["ts"])
            streams.setdefault(event["args"]["stream"], []).append((begin, begin + float(event["dur"])))
    main = max(streams, key=lambda stream: sum(end - begin for begin, end in streams[stream]))
    others = [span for stream, spans in streams.items() if stream != main for span in spans]
    total = sum(end - begin for begin, end in others)
    beside = sum(max(0.0, min(end, to) - max(begin, at)) for begin, end in others for at, to in streams[main])
    share = beside / max(total, 1e-9)
    text = f"{len(others)} operations, {total / 1e3:.2f} ms on other streams, {share:.0%} beside the computation"
    rows.add("a trace of a step", "measured" if others else "failed", text, total=total, beside=beside)


__all__ = ["overlap", "speed"]
