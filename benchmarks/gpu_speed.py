"""Part "speed" of `make gpu`: one system after the other on one GPU, each built once; its time, memory and kernels."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cases import CUDA, DEVICE, INDUCTOR
from gpu_rows import FAKE, Rows, read
from networks import in_turn, transformer
from tasks import LR, Part, Reference, Task
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import fshard
from fshard import optim

Run = Callable[[], Tensor]  # a step; returns its loss
Size = tuple[int, int, int, int, int]
# width, layers, heads, rows, length; a dry run has very few parameters, and compiles nothing
LARGE = (2048, 12, 16, 8, 1024) if INDUCTOR else (32, 2, 2, 2, 16)
SMALL = (64, 12, 2, 2, 16)  # so little to compute that the host's time is a step's
BACKEND = "inductor" if INDUCTOR else "eager"
STEPS, TIMES = (12, 3) if INDUCTOR else (2, 2)  # without a wait between them, and how often
TRACED = 2  # steps
FAR = 0.02  # relative differences of losses: systems round to bfloat16 in other places
SECONDS = 30  # that a system needs at least
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree")


def _task(size: Size, scan: bool = False) -> tuple[Task, Any, Tensor]:
    torch.manual_seed(0)
    task = transformer(*size, through=_scanned if scan else in_turn)
    tokens = task.batch(torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.device(DEVICE):
        return task, task.init(), tokens


def _scanned(part: Part, blocks: Sequence[Any], x: Tensor) -> Tensor:
    return fshard.scan(part, x, blocks)[0]


def _artifact() -> str:
    """A file next to the rows: a system writes its graph there, and a later one loads it."""
    return str(Path(sys.argv[2]) / "step.artifact")


def _fshard(
    mesh: DeviceMesh | None, size: Size, jit: bool = False, scan: bool = False, artifact: bool = False, **how: Any
) -> Run:
    task, whole, tokens = _task(size, scan)
    tx = optim.adamw(LR)
    plan = fshard.make_plan(whole, mesh, units=task.units, policy="compute=bf16, reduce=f32")
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    del whole
    step: Any = fshard.train_step(task.loss, tx, donate=not jit, **how)
    if jit:
        saved = _artifact() if artifact and INDUCTOR else None
        step = fshard.jit(step, donate=True, backend=BACKEND, artifact=saved)

    def run() -> Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics["loss"]

    return run


def _torch(mesh: DeviceMesh | None, size: Size, compiled: bool = False) -> Run:
    """FSDP2 over a mesh; without one a step on one device, with bfloat16 by autocast: the floor if it is compiled."""
    task, whole, tokens = _task(size)
    model = Reference(task, whole)
    del whole
    for part in task.parts(model) if mesh is not None else []:
        if compiled:
            part.compile(backend=BACKEND)
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    if mesh is not None:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    forward = torch.compile(model, backend=BACKEND) if compiled and mesh is None else model

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=mesh is None):
            loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


FLOOR = "unsharded, compiled"
SYSTEMS: dict[str, Callable[[DeviceMesh, Size], Run]] = {
    FLOOR: lambda mesh, size: _torch(None, size, compiled=True),
    "fshard": _fshard,
    "fshard, jit": partial(_fshard, jit=True),
    "unsharded": lambda mesh, size: _torch(None, size),
    "FSDP2": _torch,
    "fshard, in backward": partial(_fshard, in_backward=True),
    "FSDP2, compiled": partial(_torch, compiled=True),
    "fshard, jit, scan": partial(_fshard, jit=True, scan=True, artifact=True),
    "fshard, artifact": partial(_fshard, jit=True, scan=True, artifact=True),
}
IN_FILE = ("fshard, jit, scan", "fshard, artifact")  # the second loads what the first has written
EAGER = ("unsharded", "fshard", "fshard, in backward", "FSDP2")
WITH_TRACE = (FLOOR, "fshard", "fshard, jit", "fshard, in backward", "FSDP2")  # files of less than a MB


def _sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _ms(run: Run, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, of `steps` steps without a wait between; and those of the host until its calls return."""
    _sync()
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    host = time.perf_counter() - begin
    _sync()
    return (time.perf_counter() - begin) / steps * 1e3, host / steps * 1e3


def measured(build: Callable[[], Run]) -> tuple[dict[str, Any], Run]:
    """The figures of one system that is alone on the device, and its step."""
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run = build()
    losses = [run()]
    _sync()
    ready = time.perf_counter() - begin
    losses += [run() for _ in range(3)]
    rows = [_ms(run, STEPS) for _ in range(TIMES)]  # the host may be ahead of the device
    alone = [_ms(run, 1) for _ in range(TIMES)]
    width, layers, _, sequences, length = LARGE
    ms, tokens = statistics.median(ms for ms, _ in rows), sequences * length
    # six for each number of a matrix and token, and causal attention
    flops = tokens * layers * (72 * width**2 + 6 * length * width)
    stats = torch.cuda.memory_stats() if CUDA else {}
    peak, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) / 2**30 for kind in ("allocated", "reserved"))
    figures = {"ms": ms, "low": min(rows)[0], "high": max(rows)[0], "tokens_per_s": 1e3 * tokens / ms}
    figures |= {"tflops": flops / ms / 1e9, "host_alone_ms": min(host for _, host in alone)}
    figures |= {"host_in_a_row_ms": min(host for _, host in rows), "ready_s": ready, "peak_gib": peak}
    figures |= {"reserved_gib": reserved, "retries": stats.get("num_alloc_retries", 0)}
    return {**figures, "losses": [float(x) for x in losses]}, run


def words(f: dict[str, Any], floor: float) -> str:
    """The figures of one system as text; `floor` are the milliseconds of a step of the floor."""
    parts = [
        f"{f['ms'] / floor:.3f} of the floor, {f['ms']:.2f} ms a step ({f['low']:.2f} to {f['high']:.2f})",
        f"{f['tokens_per_s']:.0f} tokens/s, {f['tflops']:.0f} TFLOP/s",
        f"host {f['host_alone_ms']:.1f} ms alone, {f['host_in_a_row_ms']:.1f} in a row",
        f"ready in {f['ready_s']:.1f} s",
        f"peak {f['peak_gib']:.2f} GiB, {f['reserved_gib']:.2f} reserved, {f['retries']} retries",
        f"losses {[round(x, 4) for x in f['losses']]}",
    ]
    return "; ".join(parts)


class Kernel(NamedTuple):
    """A kernel, copy or fill in a trace, with its times in microseconds."""

    begin: float
    end: float
    name: str


def idle(kernels: Sequence[Kernel]) -> list[tuple[float, str]]:
    """Where no kernel runs on any stream: for how long, and the kernel after it; `kernels` are in order of begin.

    >>> idle([Kernel(0, 4, "a"), Kernel(1, 2, "b"), Kernel(7, 8, "c")])
    [(3, 'c')]
    """
    gaps, end = list[tuple[float, str]](), kernels[0].end
    for kernel in kernels[1:]:
        if kernel.begin > end:
            gaps.append((kernel.begin - end, kernel.name))
        end = max(end, kernel.end)
    return gaps


def kernels_of(run: Run, trace: str | None) -> tuple[str, dict[str, Any]]:
    """How busy the GPU is in a step, the longest gaps, the largest kernels, waits of the host; as text and figures."""
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * CUDA]) as profiled:
        for _ in range(TRACED):
            run()
        _sync()
    events = profiled.events() or []
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    kernels = sorted(Kernel(e.time_range.start, e.time_range.end, e.name) for e in on_gpu)
    if trace:
        profiled.export_chrome_trace(trace)
    if not kernels:
        return "no kernel in the trace", {}
    gaps, by_name = sorted(idle(kernels), reverse=True), dict[str, list[float]]()
    for one in kernels:
        by_name.setdefault(one.name[:50], []).append((one.end - one.begin) / 1e3)
    number, lost = len(kernels) // TRACED, sum(gap for gap, _ in gaps) / 1e3 / TRACED
    busy = 1 - lost * 1e3 * TRACED / (max(one.end for one in kernels) - kernels[0].begin)
    host = {name: sum(e.name == name for e in events) for name in WAITS}
    said = [f"{number} kernels a step, {busy:.1%} busy, idle {lost:.2f} ms a step"]
    said += [f"{gap:.0f} us idle before {name[:40]}" for gap, name in gaps[:5]]
    for name, ms in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:8]:
        said.append(f"{len(ms) // TRACED} {name} {sum(ms) / TRACED:.2f} ms")
    said += [f"{n} {name} in {TRACED} steps and a wait" for name, n in host.items() if n]
    return "; ".join(said), {"kernels": number, "busy": busy, "idle_ms": lost}


def _ceilings() -> str:
    """What the device does at most: products of matrices of bfloat16, and copies."""
    n = 8192 if INDUCTOR else 64
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    x = torch.randn(4 * n * n, device=DEVICE)
    product, _ = min(_ms(lambda: a @ b, 10) for _ in range(3))
    copy, _ = min(_ms(x.clone, 10) for _ in range(3))
    return f"{2 * n**3 / product / 1e9:.0f} TFLOP/s of bfloat16, {2 * x.nbytes / copy / 1e6:.0f} GB/s of copies"


def system(rows: Rows, mesh: DeviceMesh, name: str) -> None:
    """Measure one system, in a process that has run no other: after a large graph the host of others is slower."""
    if name not in EAGER:  # start the compiler
        torch.compile(lambda x: x.sin().sum(), backend=BACKEND)(torch.ones(8, device=DEVICE))
    figures, run = measured(partial(SYSTEMS[name], mesh, LARGE))
    floor = next((row for row in read(rows.out) if row["case"] == FLOOR and "ms" in row), figures)
    pairs = zip(figures["losses"], floor["losses"], strict=True)
    is_right = all(abs(loss - expected) <= FAR * expected for loss, expected in pairs)  # a NaN is not
    rows.add(name, "measured" if is_right else "failed", words(figures, floor["ms"]), **figures)
    trace = rows.out / f"trace_{'_'.join(re.findall('[a-zA-Z0-9]+', name))}.json.gz"
    said, more = kernels_of(run, str(trace) if name in WITH_TRACE else None)
    rows.add(f"kernels of {name}", "measured" if more or not INDUCTOR else "failed", said, **more)


def _hosts_time(run: Run) -> str:
    for _ in range(5):
        run()
    times = sorted(_ms(run, 5 * STEPS)[0] for _ in range(TIMES))
    return f"{statistics.median(times):.2f} ms a step ({times[0]:.2f} to {times[-1]:.2f}), which is the host's time"


def without_kernels() -> None:
    """On the stub: take the attention that is not one kernel, as the CPU has none of these names."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def speed(rows: Rows, mesh: DeviceMesh) -> None:
    """Measure the host's time of a small model, then each system in a process of its own, the floor first."""
    rows.measure("ceilings", _ceilings)
    systems = [name for name in SYSTEMS if not (FAKE and name.startswith("FSDP2")) and name not in IN_FILE]
    for name in SYSTEMS:
        if name not in (*systems, *IN_FILE):
            rows.add(name, "skipped", "a stub: operators of DTensors have no values")
    for name in (name for name in EAGER if name in systems):
        rows.measure(f"{name}, small model", lambda name=name: _hosts_time(SYSTEMS[name](mesh, SMALL)))  # type: ignore[misc]
    _each_alone(rows, systems)


def artifact(rows: Rows, mesh: DeviceMesh) -> None:
    """Measure a graph by `scan` that is written to a file, and then loaded from it."""
    _each_alone(rows, IN_FILE)


def _each_alone(rows: Rows, systems: Sequence[str]) -> None:
    """Measure each system in a process of its own."""
    for name in systems:
        if rows.left() < SECONDS:
            rows.add(name, "skipped", "left out: no time")
        else:
            # the same command (on the stub it begins with the recorder), for the system
            command = [sys.executable, *sys.orig_argv[1:]]
            place = command.index(rows.part)
            command[place] = name
            rows.attempt(name, partial(_alone, command))


def _alone(command: Sequence[str]) -> None:
    """Run a command with compilers' caches of its own, which are empty."""
    with tempfile.TemporaryDirectory() as caches:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        subprocess.run(command, env={**os.environ, **own}, check=True)
