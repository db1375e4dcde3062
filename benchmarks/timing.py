"""Time several systems in turn, in one process group; ratios of times, with their spread."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from random import Random

import torch.distributed as dist

EARLY = 3
CLOSE, FAR = 1e-4, 1e-1  # relative differences of losses in the first `EARLY` steps, and later: rounding grows


def in_turn(
    systems: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    between: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Call the systems in turn, `warmup + rounds` times. Returns the seconds of each system's calls, without warm-up.

    A barrier before and after each call synchronizes the ranks. Each round has another order, the same on all ranks, so
    that no system always runs after the same one. `between` is called after each round, and not timed. `clock` tells
    the time in seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    for i in range(warmup + rounds):
        for name in Random(i).sample(sorted(systems), len(systems)):
            dist.barrier()
            begin = clock()
            systems[name]()
            dist.barrier()
            if i >= warmup:
                times[name].append(clock() - begin)
        between()
    return times


def ratio(times: Mapping[str, list[float]], a: str, b: str) -> dict[str, float]:
    """The ratio of the median times of `a` and `b`, and the range of the middle 80% of the ratios of paired rounds."""
    pairs = sorted(x / y for x, y in zip(times[a], times[b], strict=True))
    low, high = pairs[len(pairs) // 10], pairs[-1 - len(pairs) // 10]
    return {"ratio": statistics.median(times[a]) / statistics.median(times[b]), "low": low, "high": high}


def check_alike(losses: Mapping[str, float], tolerance: float) -> None:
    """RuntimeError if a system's mean loss differs from the first one's by more than this part of it."""
    first, *others = losses.values()
    if not all(abs(loss - first) <= tolerance * abs(first) for loss in others):
        raise RuntimeError(f"the systems do not train alike: {dict(losses)}")


def on_two_ranks(file: str, *args: str, capture: bool = False) -> str:
    """Run a file on two processes of one thread each. Returns the printed text with `capture`, else an empty string."""
    return on_ranks(2, file, *args, capture=capture)


def on_ranks(number: int, file: str, *args: str, capture: bool = False) -> str:
    """Run a file on processes of one thread each. Returns the printed text with `capture`, else an empty string."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", file, *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=environment, text=True, stdout=subprocess.PIPE if capture else None)
    return done.stdout or ""


def leave() -> None:
    """End a rank at once: one in four processes that used FSDP2 over gloo aborts at its regular end (torch 2.13)."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
