"""Parts of `make gpu` that measure: what the device can do, then one system after the other, each built once."""

from __future__ import annotations

import gc
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_cases import CUDA, DEVICE, INDUCTOR
from gpu_rows import FAKE, Rows, read
from networks import in_turn, transformer
from tasks import LR, Part, Reference, Task
from torch import Tensor
from torch._dynamo.utils import compilation_time_metrics
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile

import fshard
from fshard import optim, tree
from fshard.compiler import lowered

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
    tokens = task.batch(torch.Generator().manual_seed(1 + int(os.environ.get("RANK", 0)))).to(DEVICE)
    with torch.device(DEVICE):
        return task, task.init(), tokens


def _scanned(part: Part, blocks: Sequence[Any], x: Tensor) -> Tensor:
    return fshard.scan(part, x, blocks)[0]


def _artifact() -> str:
    """A file next to the rows: a system writes its graph there, and a later one loads it."""
    return str(Path(sys.argv[2]) / "step.artifact")


def _fshard(
    mesh: DeviceMesh | None,
    size: Size,
    jit: bool = False,
    scan: bool = False,
    artifact: bool = False,
    reads: bool = False,
    **how: Any,
) -> Run:
    """A step of fshard; with `reads`, Inductor keeps torch's own limit of reads in a fused loop."""
    task, whole, tokens = _task(size, scan)
    if reads:  # this process measures no other system
        lowered._INDUCTOR.pop("realize_reads_threshold")
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
    forward = torch.compile(model, backend=BACKEND) if compiled and mesh is None else model
    return _stepped(lambda: forward(tokens), list(model.parameters()), autocast=mesh is None)


def _pure(size: Size) -> Run:
    """The floor in bfloat16: the pure loss of parameters that a function casts, compiled."""
    task, whole, tokens = _task(size)
    params = tree.map(lambda x: x.requires_grad_(), whole)
    loss = torch.compile(lambda p: task.loss(tree.map(torch.Tensor.bfloat16, p), tokens), backend=BACKEND)
    return _stepped(lambda: loss(params), tree.leaves(params))


def _stepped(forward: Callable[[], Tensor], params: list[Tensor], autocast: bool = False) -> Run:
    """A step of torch's AdamW."""
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


FLOOR, FLOOR_16 = "unsharded, compiled", "unsharded, compiled, all in bfloat16"
SYSTEMS: dict[str, Callable[[DeviceMesh, Size], Run]] = {
    FLOOR: lambda mesh, size: _torch(None, size, compiled=True),
    FLOOR_16: lambda mesh, size: _pure(size),
    "fshard": _fshard,
    "FSDP2": _torch,
    "fshard, jit": partial(_fshard, jit=True),
    "fshard, jit, torch's limit of reads": partial(_fshard, jit=True, reads=True),
    "unsharded": lambda mesh, size: _torch(None, size),
    "fshard, in backward": partial(_fshard, in_backward=True),
    "FSDP2, compiled": partial(_torch, compiled=True),
    "fshard, jit, scan": partial(_fshard, jit=True, scan=True, artifact=True),
    "fshard, artifact": partial(_fshard, jit=True, scan=True, artifact=True),
}
# by part, in this order; "fshard, artifact" loads what the system before it has written
OF_PART = {
    "speed": (FLOOR, FLOOR_16, "fshard", "FSDP2", "fshard, jit"),
    "graphs": ("fshard, jit, torch's limit of reads", "fshard, jit, scan", "fshard, artifact"),
    "systems": ("unsharded", "fshard, in backward", "FSDP2, compiled"),
}
EAGER = ("unsharded", "fshard", "fshard, in backward", "FSDP2")
WITH_TRACE = (FLOOR, FLOOR_16, "fshard", "fshard, jit", "fshard, in backward", "FSDP2")  # files of less than a MB


def _sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def _ms(run: Callable[[], object], steps: int) -> tuple[float, float]:
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
    if CUDA:  # without what the first step alone reserved
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
    figures["reserved_again_gib"] = torch.cuda.max_memory_reserved() / 2**30 if CUDA else 0
    return {**figures, "losses": [float(x) for x in losses]}, run


def words(f: dict[str, Any], beside: Mapping[str, float]) -> str:
    """The figures of one system as text; `beside` are the milliseconds of a step of others."""
    parts = [
        *(f"{f['ms'] / ms:.3f} of {name}" for name, ms in beside.items()),
        f"{f['ms']:.2f} ms a step ({f['low']:.2f} to {f['high']:.2f})",
        f"{f['tokens_per_s']:.0f} tokens/s, {f['tflops']:.0f} TFLOP/s",
        f"host {f['host_alone_ms']:.1f} ms alone, {f['host_in_a_row_ms']:.1f} in a row",
        f"ready in {f['ready_s']:.1f} s",
        f"peak {f['peak_gib']:.2f} GiB, {f['reserved_gib']:.2f} reserved ({f['reserved_again_gib']:.2f} after "
        f"empty_cache), {f['retries']} retries",
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


def busy(kernels: Sequence[Kernel]) -> float:
    """The microseconds in which a kernel runs on any stream; `kernels` are in order of begin."""
    lost = sum(gap for gap, _ in idle(kernels)) if kernels else 0
    return max(one.end for one in kernels) - kernels[0].begin - lost if kernels else 0.0


def beside(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """The microseconds in which NCCL's kernels run, and those of them in which others do; in order of begin.

    >>> beside([Kernel(0, 4, "ncclDevKernel_AllGather"), Kernel(1, 2, "gemm"), Kernel(3, 9, "gemm")])
    (4, 2)
    """
    sent = [one for one in kernels if one.name.startswith("nccl")]
    return busy(sent), busy(sent) + busy([one for one in kernels if one not in sent]) - busy(kernels)


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
    share = busy(kernels) / (busy(kernels) + lost * 1e3 * TRACED)
    sent, hidden = beside(kernels)
    host = {name: sum(e.name == name for e in events) for name in WAITS}
    said = [f"{number} kernels a step, {share:.1%} busy, idle {lost:.2f} ms a step"]
    if sent:
        said.append(f"NCCL {sent / 1e3 / TRACED:.2f} ms a step, {hidden / sent:.1%} of it beside the computation")
    said += [f"{gap:.0f} us idle before {name[:40]}" for gap, name in gaps[:5]]
    for name, ms in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:8]:
        said.append(f"{len(ms) // TRACED} {name} {sum(ms) / TRACED:.2f} ms")
    said += [f"{n} {name} in {TRACED} steps and a wait" for name, n in host.items() if n]
    return "; ".join(said), {
        "kernels": number,
        "busy": share,
        "idle_ms": lost,
        "nccl_ms": sent / 1e3 / TRACED,
        "nccl_beside": hidden / sent if sent else 0,
    }


def _ceilings() -> str:
    """What the device does at most: products of matrices of bfloat16, and copies."""
    n = 8192 if INDUCTOR else 64
    a, b = (torch.randn(n, n, device=DEVICE).bfloat16() for _ in range(2))
    x = torch.randn(4 * n * n, device=DEVICE)
    product, _ = min(_ms(lambda: a @ b, 10) for _ in range(3))
    copy, _ = min(_ms(x.clone, 10) for _ in range(3))
    return f"{2 * n**3 / product / 1e9:.0f} TFLOP/s of bfloat16, {2 * x.nbytes / copy / 1e6:.0f} GB/s of copies"


def _float8() -> str:
    """What float8 gives for the four products of a block: products alone, and with the activations cast each time."""
    width, _, _, sequences, length = LARGE
    one, shapes = torch.ones((), device=DEVICE), ((1, 3), (1, 1), (1, 4), (4, 1))
    x = {n: torch.randn(sequences * length, n * width, device=DEVICE).bfloat16() for n in (1, 4)}
    w = [torch.randn(m * width, n * width, device=DEVICE).bfloat16() for n, m in shapes]
    cast = lambda y: (y * (448 / y.abs().amax())).to(torch.float8_e4m3fn)  # noqa: E731
    x8, w8 = tree.map(cast, (x, w))
    product = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    pairs = [(n, m.t(), m8.t()) for (n, _), m, m8 in zip(shapes, w, w8, strict=True)]
    kinds: dict[str, Callable[[], object]] = {
        "in bfloat16": lambda: [x[n] @ m for n, m, _ in pairs],
        "in float8": lambda: [product(x8[n], m8) for n, _, m8 in pairs],
        "with casts": lambda: [product(cast(x[n]), m8) for n, _, m8 in pairs],
    }
    return ", ".join(f"{min(_ms(run, 10)[0] for _ in range(3)):.3f} ms {kind}" for kind, run in kinds.items())


def ceilings(rows: Rows, mesh: DeviceMesh) -> None:
    """Measure what the device does at most."""
    rows.measure("ceilings", _ceilings)
    rows.measure("float8, the products of a block", _float8)


# of torch's clocks; the rest of a first step is the trace, most of all
CLOCKS = {"Inductor": ("GraphLowering.run", "GraphLowering.codegen"), "Triton": ("async_compile.wait",)}
CLOCKS["autotuning"] = ("CachingAutotuner.benchmark_all_configs",)


def first_step(ready: float, times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The seconds of a first step, by what took them.

    >>> first_step(9.0, {"GraphLowering.run": [1.0, 2.0], "async_compile.wait": [2.5]})
    {'Inductor': 3.0, 'Triton': 2.5, 'autotuning': 0, 'the trace and the rest': 3.5}
    """
    known = {name: sum(sum(times.get(clock, ())) for clock in clocks) for name, clocks in CLOCKS.items()}
    return {**known, "the trace and the rest": ready - sum(known.values())}


def system(rows: Rows, mesh: DeviceMesh, name: str) -> None:
    """Measure one system, in a process that has run no other: after a large graph the host of others is slower."""
    begin, seconds = time.time(), {"import": time.time() - float(os.environ.get("BEGUN", "nan"))}
    if name not in EAGER:  # start the compiler
        torch.compile(lambda x: x.sin().sum(), backend=BACKEND)(torch.ones(8, device=DEVICE))
        compilation_time_metrics.clear()
        seconds["the compiler's start"] = time.time() - begin
    figures, run = measured(partial(SYSTEMS[name], mesh, LARGE))
    add_system(rows, name, figures, (FLOOR, FLOOR_16))
    if name not in EAGER:
        seconds |= first_step(figures["ready_s"], compilation_time_metrics)
        said = ", ".join(f"{took:.1f} s {what}" for what, took in seconds.items())
        rows.add(f"first step of {name}", "measured", said, **seconds)
    add_kernels(rows, name, run, name in WITH_TRACE)


def add_system(rows: Rows, name: str, figures: dict[str, Any], bases: Sequence[str]) -> None:
    """Add the row of a system beside `bases`, of which the first known has the losses that it must have."""
    known = {row["case"]: row for row in read(rows.out) if row["case"] in bases and "ms" in row} or {name: figures}
    pairs = zip(figures["losses"], next(iter(known.values()))["losses"], strict=True)
    is_right = all(abs(loss - expected) <= FAR * expected for loss, expected in pairs)  # a NaN is not
    said = words(figures, {base: row["ms"] for base, row in known.items()})
    rows.add(name, "measured" if is_right else "failed", said, **figures)


def add_kernels(rows: Rows, name: str, run: Run, is_kept: bool) -> None:
    """Add the row of the kernels of a system; its trace is a file if it is to be kept."""
    trace = rows.out / f"trace_{'_'.join(re.findall('[a-zA-Z0-9]+', name))}.json.gz"
    said, more = kernels_of(run, str(trace) if is_kept else None)
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
    """Measure each system of a part in a process of its own; before "systems" the host's time of a small model."""
    for name in EAGER if rows.part == "systems" else ():
        if not _is_left_out(rows, name):
            rows.measure(f"{name}, small model", lambda name=name: _hosts_time(SYSTEMS[name](mesh, SMALL)))  # type: ignore[misc]
    _each_alone(rows, [name for name in OF_PART[rows.part] if not _is_left_out(rows, name)])


def _is_left_out(rows: Rows, name: str) -> bool:
    if is_left_out := FAKE and name.startswith("FSDP2"):
        rows.add(name, "skipped", "a stub: operators of DTensors have no values")
    return is_left_out


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
        own["BEGUN"] = str(time.time())
        subprocess.run(command, env={**os.environ, **own}, check=True)
