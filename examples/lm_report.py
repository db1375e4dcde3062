"""What `train_lm.py` shows: the log and its progress bar, memory, the picture of the loss, the results."""

from __future__ import annotations

import gzip
import json
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optree
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Record = dict[str, Any]  # a line of the log, as JSON
Tree = Any  # dicts and lists of tensors


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on its GPU, or resident in the memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def num_bytes(*trees: Tree) -> list[int]:
    return [sum(x.nbytes for x in optree.tree_leaves(tree)) for tree in trees]


def memory_table(bytes_by_rank: dict[str, list[int]]) -> Table:
    table = Table(title="Memory held, in MB")
    for name in ("", "parameters", "gradients", "optimizer state", "together", "growth of the peak"):
        table.add_column(name, justify="right")
    for name, row in bytes_by_rank.items():
        table.add_row(name, *(f"{cell / 1e6:.2f}" for cell in [*row[:3], sum(row[:3]), *row[3:]]))
    return table


def draw(history: Sequence[Record], gzip_bits: float, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train", "-"), ("validation", "o-")):
        points = [(r["step"], r[f"{name}_bits_per_byte"]) for r in history if f"{name}_bits_per_byte" in r]
        axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    axes.axhline(gzip_bits, color="gray", linestyle=":", label="gzip -9 of the validation bytes")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)


@contextmanager
def logging(steps: int, console: Console, path: Path, history: list[Record]) -> Iterator[Callable[[Record], None]]:
    """A function that appends a record to `history`, writes it as a line of JSON and updates the progress bar."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with path.open("w") as file, Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task("", total=1.0)
        file.writelines(json.dumps(record) + "\n" for record in history)  # of the run that goes on

        def log(record: Record) -> None:
            history.append(record)
            print(json.dumps(record), file=file, flush=True)
            bits, rate = record["train_bits_per_byte"], record["bytes_per_second"]
            text = f"step {record['step']}/{steps}  {bits:.3f} bits/byte  {rate:,.0f} bytes/s"
            bar.update(task, completed=record["done"], description=text)

        yield log


def summary(history: Sequence[Record], valid: bytes, bytes_by_rank: dict[str, list[int]]) -> Record:
    return {
        "validation_bits_per_byte": history[-1]["validation_bits_per_byte"],
        "gzip_bits_per_byte": 8 * len(gzip.compress(valid, 9)) / len(valid),
        "validation_bytes": len(valid),
        "memory_bytes": bytes_by_rank,
    }


def report(result: Record, sample: str, out: Path, console: Console) -> None:
    console.print(memory_table(result["memory_bytes"]))
    console.print(Panel(Text(sample), title="Written by the model"))
    console.print(f"Bits per byte on {result['validation_bytes']:,} validation bytes:")
    console.print(f"  this model  {result['validation_bits_per_byte']:.3f}")
    console.print(f"  gzip -9     {result['gzip_bits_per_byte']:.3f}")
    console.print(f"Metrics and a picture of the loss are in {out}", soft_wrap=True)
