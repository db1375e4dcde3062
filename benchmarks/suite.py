"""Compare fshard with other systems, in turn, in one process group, on the same models, numbers and data.

    make bench
    make bench ARGS="--model M --system fshard --system fsdp2 --rounds 5 --json m.json"

prints ratios of median step times with their spread, peak memory, first steps and collectives (`results.py`). Without
arguments, or with `--docs`, it writes `docs/benchmarks.json`, and from it the tables and the picture of
`docs/benchmarks.md`; other models stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
from models import MODELS, task_of
from page import RESULTS, update
from rich.console import Console
from rich.table import Table
from systems import SYSTEMS
from timing import leave, on_two_ranks

MEASURES = {"times": "step times in turn, and collectives", "alone": "peak memory and first steps, in new processes"}


def systems_of(model: str, asked: Sequence[str] | None) -> list[str]:
    """The systems that are measured on a model: those asked for, or all but the extra ones."""
    names = asked or [name for name, system in SYSTEMS.items() if not system.extra]
    return [name for name in names if model not in SYSTEMS[name].without]


def machine() -> dict[str, Any]:
    """What a model is measured on and with."""
    model = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    name = model[0].partition(": ")[2] if model else platform.processor()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "jax", "transformers")}
    where = f"{len(os.sched_getaffinity(0))} cores, {name}, {platform.system()}"
    return {"date": datetime.date.today().isoformat(), "machine": where, "versions": versions}


def measured(args: argparse.Namespace, model: str) -> results.Entry:
    """The entry of one model, measured in processes of their own."""
    chosen, begin = systems_of(model, args.system), time.monotonic()
    command = " ".join(["make bench", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])])
    entry = {"command": command, "rounds": args.rounds, "load": os.getloadavg()[0], **machine()}
    if "times" in args.measure:
        every = [part for system in chosen for part in ("--system", system)]
        entry |= _on_ranks(args, model, "times", *every)
    if "alone" in args.measure:
        entry["alone"] = {system: _alone(args, model, system) for system in chosen}
    entry["minutes"] = round((time.monotonic() - begin) / 60, 1)
    return entry


def _on_ranks(args: argparse.Namespace, model: str, measure: str, *more: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as file:
        sizes = ["--rounds", str(args.rounds), "--warmup", str(args.warmup), *["--tiny"] * args.tiny]
        on_two_ranks(__file__, "--model", model, "--measure", measure, *more, *sizes, "--json", file.name)
        return json.load(file)


def _alone(args: argparse.Namespace, model: str, system: str) -> dict[str, Any]:
    """A system twice in new processes if it compiles, first with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch", "JAX_COMPILATION_CACHE_DIR": f"{cache}/jax"}
        caches |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
        os.environ |= caches
        try:
            runs = [_on_ranks(args, model, "alone", "--system", system) for _ in range(1 + SYSTEMS[system].compiled)]
        finally:
            for name in caches:
                del os.environ[name]
    return {"peak": runs[-1]["peak"], "first": [run["first"] for run in runs]}


def show(entries: dict[str, results.Entry], console: Console) -> None:
    """Print the tables of results."""
    for title, columns, rows in results.tables(entries):
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure one model; rank 0 writes the result."""
    import measure
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    task = task_of(args.model[0], args.tiny)
    result: dict[str, Any]
    if args.measure == ["alone"]:
        result = measure.alone(task, args.system[0], mesh)
    else:
        times = measure.step_times(task, args.system, mesh, args.rounds, args.warmup)
        times = {system: [float(f"{s:.4g}") for s in seconds] for system, seconds in times.items()}
        result = {"times": times, "traffic": measure.traffic(task, mesh)}
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(result))
    leave()


def arguments() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--system", choices=list(SYSTEMS), action="append", help="default: all that are not extra")
    parser.add_argument("--measure", choices=list(MEASURES), action="append", help="default: both")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3, help="rounds that are not counted")
    parser.add_argument("--tiny", action="store_true", help="models in the sizes of the tests")
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--docs", action="store_true", help="write the pages of docs/, as without any argument")
    args = parser.parse_args()
    args.measure = args.measure or list(MEASURES)
    return args


def main() -> None:
    """Measure the models that are asked for, in ranks on two cores; on a rank under torchrun, measure one."""
    args = arguments()
    if "RANK" in os.environ:
        on_a_rank(args)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all processes have the same two cores
    entries, failed = dict[str, results.Entry](), list[str]()
    for model in args.model or MODELS:
        try:
            entries[model] = measured(args, model)
        except subprocess.CalledProcessError as failure:  # its ranks have said why; the other models are measured still
            failed.append(f"{model}: {' '.join(map(str, failure.cmd[4:]))}")
            continue
        show({model: entries[model]}, Console(soft_wrap=True))
        if args.json:
            results.save(args.json, entries)
        if args.docs or len(sys.argv) == 1:
            kept = results.load(RESULTS) | entries
            results.save(RESULTS, {model: kept[model] for model in MODELS if model in kept})
            update()
    if failed:
        sys.exit("not measured:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
