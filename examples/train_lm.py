"""Train a byte-level language model whose parameters, gradients and optimizer state are sharded over all ranks.

    python examples/train_lm.py                                 # one process
    torchrun --nproc-per-node=2 examples/train_lm.py            # two ranks: NCCL if each has a GPU, otherwise gloo

The model and its loss are pure functions written for one device. Without `--data` the text is the source of the Python
standard library. Training and validation text come from different files.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import resource
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard

VOCAB = 256
NEAR = 4  # the input at a position is the sum of embeddings of the last four bytes: the model learns words sooner
LOG_EVERY = 10  # steps between logs; at a log the ranks also agree on whether the time is over
VALIDATION_SHARE = 20  # one byte in 20 is for validation
# Tables of character encodings and help texts are not code, and near copies would be in both parts of the split.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}

Batch = dict[str, Tensor]
Record = dict[str, Any]  # a line of the log, as JSON
Tree = Any  # dicts and lists of tensors, whole or gathered on access


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    data: Path | None = None
    out: Path = Path("runs/train_lm")
    steps: int = 1650
    minutes: float = 3.5
    d_model: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8
    lr: float = 5e-3
    warmup: int = 100
    eval_every: int = 150
    eval_bytes: int = 1 << 16
    sample: int = 400
    prompt: str = "def "
    seed: int = 0


HELP = {
    "data": "a file, or a folder of files; without it the standard library's source",
    "out": "folder for the metrics and the picture of the loss",
    "steps": "updates to make",
    "minutes": "end training after this time, whatever the number of steps",
    "d_model": "width of the model",
    "layers": "number of blocks",
    "heads": "attention heads of a block",
    "context": "bytes the model sees",
    "batch": "windows in a step of each rank",
    "lr": "highest learning rate",
    "warmup": "steps in which the learning rate rises",
    "eval_every": "steps between validations",
    "eval_bytes": "validation bytes to use, always the same",
    "sample": "bytes of text to write at the end",
    "prompt": "what that text begins with",
    "seed": "decides the first parameters, the windows and the text written",
}


# --- The model: pure functions of nested dicts of tensors.


def init_params(s: Settings) -> Tree:
    normal = partial(torch.normal, 0.0, generator=torch.Generator().manual_seed(s.seed))
    return {
        "embed": normal(NEAR**-0.5, (NEAR, VOCAB, s.d_model)),
        "pos": normal(0.1, (s.context, s.d_model)),
        "blocks": [init_block(s, normal) for _ in range(s.layers)],
        "norm": torch.ones(s.d_model),
        "head": torch.zeros(s.d_model, VOCAB),  # zeros: the first prediction is uniform
    }


def init_block(s: Settings, normal: Callable[..., Tensor]) -> dict[str, Tensor]:
    d, std = s.d_model, s.d_model**-0.5
    shrink = (2 * s.layers) ** -0.5  # so that all blocks together add as much as one unscaled block
    return {
        "attend_norm": torch.ones(d),
        "qkv": normal(std, (d, 3 * d)),
        "out": normal(std * shrink, (d, d)),
        "think_norm": torch.ones(d),
        "up": normal(std, (d, 4 * d)),
        "down": normal(std * shrink / 2, (4 * d, d)),
    }


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)


def attend(p: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    rows, length, d = x.shape
    q, k, v = (x @ p["qkv"]).view(rows, length, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(rows, length, d) @ p["out"]


def block(p: dict[str, Tensor], x: Tensor, heads: int) -> Tensor:
    x = x + attend(p, norm(x, p["attend_norm"]), heads)
    return x + F.relu(norm(x, p["think_norm"]) @ p["up"]).square() @ p["down"]


def model(params: Tree, tokens: Tensor, heads: int) -> Tensor:
    """Logits of the next byte at each position: (rows, length) -> (rows, length, 256)."""
    length = tokens.shape[1]
    x = params["pos"][:length]
    for n, table in enumerate(params["embed"]):
        x = x + F.embedding(F.pad(tokens, (n, 0))[:, :length], table)
    for p in params["blocks"]:
        x = block(p, x, heads)
    return norm(x, params["norm"]) @ params["head"]


def loss(params: Tree, batch: Batch, heads: int) -> fshard.Mean:
    """Cross-entropy in nats per byte: the mean over the bytes of all ranks."""
    scores = model(params, batch["tokens"], heads)
    total = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return fshard.Mean(total, batch["targets"].numel())


def generate(params: Tree, s: Settings, device: torch.device, temperature: float = 0.8) -> str:
    generator = torch.Generator(device).manual_seed(s.seed)
    text = list(s.prompt.encode() or b"\n")
    for _ in range(s.sample):
        scores = model(params, torch.tensor([text[-s.context :]], device=device), s.heads)[0, -1]
        text.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    shown = bytes(text).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)  # others may be terminal commands


# --- The text.


def find_files(data: Path | None) -> list[tuple[str, Path]]:
    """The files to read, each with its name relative to the folder. ValueError if `data` does not exist."""
    root = Path(sysconfig.get_paths()["stdlib"]) if data is None else data
    if not root.exists():
        raise ValueError(f"--data {root}: there is no such file or folder")
    if root.is_file():
        return [(root.name, root)]
    files = [(path.relative_to(root), path) for path in root.rglob("*" if data else "*.py") if path.is_file()]
    skipped = set() if data else SKIPPED
    visible = [(name, path) for name, path in files if not any(part.startswith(".") for part in name.parts)]
    return [(name.as_posix(), path) for name, path in visible if not skipped & set(name.parts)]


def split(files: Sequence[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Split into training and validation text: whole files, ordered by a hash of their names. A single file is cut."""
    texts = [text for _, text in sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest())]
    total = sum(map(len, texts))
    if len(texts) == 1:
        cut = total - total // VALIDATION_SHARE
        return texts[0][:cut], texts[0][cut:]
    num = 1 + sum(end * VALIDATION_SHARE < total for end in accumulate(map(len, texts)))
    num = min(num, len(texts) - 1)
    return b"".join(texts[num:]), b"".join(texts[:num])


def read_text(s: Settings) -> tuple[bytes, bytes]:
    """Training text, and validation text cut to whole windows. ValueError if there is too little text."""
    source = f"--data {s.data}" if s.data else "the standard library's source"
    files = [(name, text) for name, path in find_files(s.data) if (text := path.read_bytes())]
    if not files:
        raise ValueError(f"{source}: there is no text in it")
    text, valid = split(files)
    if min(len(text), len(valid)) <= s.context:
        raise ValueError(
            f"{source}: too little text. It splits into {len(text)} bytes for training and {len(valid)} for "
            f"validation, and each part needs more than the {s.context} of --context."
        )
    return text, valid[: min(s.eval_bytes, len(valid)) // s.context * s.context]


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_windows(text: Tensor, s: Settings, generator: torch.Generator, device: torch.device) -> Batch:
    starts = torch.randint(len(text) - s.context, (s.batch, 1), generator=generator)
    rows = text[starts + torch.arange(s.context + 1)].long().to(device)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def all_windows(text: bytes, s: Settings, device: torch.device) -> Batch:
    """All windows of a text: every byte is a target once. The input before the first byte is a newline."""
    tokens, targets = (as_tensor(t).long().view(-1, s.context).to(device) for t in (b"\n" + text[:-1], text))
    return {"tokens": tokens, "targets": targets}


# --- Training.


@contextmanager
def world() -> Iterator[tuple[DeviceMesh | None, torch.device]]:
    """The mesh of the processes that torchrun started (None without torchrun), and the device of this process."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield None, device
        return
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    yield init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)), device
    dist.destroy_process_group()  # not after an error: other ranks may never reach this call, and torchrun stops them


def rank_and_size(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())


def on_any_rank(flag: bool, mesh: DeviceMesh | None, device: torch.device) -> bool:
    if mesh is None:
        return flag
    return bool(fshard.all_reduce(torch.tensor(float(flag), device=device), mesh, "shard", op="max"))


def schedule(s: Settings) -> Callable[[Tensor], Tensor]:
    """Learning rate by step count: linear warmup, then cosine decay to a twentieth of `lr`."""

    def lr(count: Tensor) -> Tensor:
        done = ((count - s.warmup) / max(1, s.steps - s.warmup)).clamp(0, 1)
        falling = 0.05 + 0.95 * (1 + torch.cos(math.pi * done)) / 2
        return s.lr * torch.minimum((count + 1) / s.warmup, falling)

    return lr


def optimizer(s: Settings) -> fshard.optim.Transform:
    return fshard.optim.adamw(schedule(s), b2=0.99, weight_decay=0.1)


def start(s: Settings, mesh: DeviceMesh | None, device: torch.device) -> fshard.TrainState:
    whole = init_params(s)
    params = optree.tree_map(lambda x: x.to(device), whole)
    plan = fshard.make_plan(params, mesh, units=["blocks.*"])
    return fshard.init_state(fshard.shard_params(params, plan), optimizer(s), seed=s.seed)


def validate(s: Settings, params: fshard.Sharded, windows: Batch, mesh: DeviceMesh | None) -> float:
    """Bits per byte over all windows, which are divided among ranks. Uneven parts are right: the loss counts bytes."""
    rank, size = rank_and_size(mesh)
    num, at_once, nats = len(windows["tokens"]), s.batch * size, 0.0
    value = fshard.evaluate(partial(loss, heads=s.heads))
    for first in range(0, num, at_once):
        local_rows = {name: rows[first : first + at_once][rank::size] for name, rows in windows.items()}
        nats += float(value(params, local_rows)) * min(at_once, num - first)
    return nats / num / math.log(2)


def train(
    s: Settings,
    state: fshard.TrainState,
    text: Tensor,
    windows: Batch,
    mesh: DeviceMesh | None,
    log: Callable[[Record], None],
) -> fshard.TrainState:
    """Train for all steps, or until the time is over; pass records of measurements to `log`. Returns the new state."""
    (rank, size), device = rank_and_size(mesh), windows["tokens"].device
    generator = torch.Generator().manual_seed(1000 * s.seed + rank)  # each rank draws its own windows
    step = fshard.train_step(partial(loss, heads=s.heads), optimizer(s), clip_norm=1.0, donate=True)
    losses: list[Tensor] = []
    began = since = time.perf_counter()
    for number in range(1, s.steps + 1):
        state, metrics = step(state, random_windows(text, s, generator, device))
        losses.append(metrics["loss"])
        if number % LOG_EVERY and number < s.steps:
            continue
        bits = float(torch.stack(losses).mean()) / math.log(2)  # waits for the GPU: before the clock is read
        now = time.perf_counter()
        rate = len(losses) * s.batch * s.context * size / (now - since)
        done = min(1.0, max(number / s.steps, (now - began) / (60 * s.minutes)))
        record = {"step": number, "done": done, "seconds": now - began, "bytes_per_second": rate}
        record["train_bits_per_byte"] = bits
        last = on_any_rank(done == 1, mesh, device)
        if last or number % s.eval_every < LOG_EVERY:
            record["validation_bits_per_byte"] = validate(s, state.params, windows, mesh)
        log(record)
        if last:
            break
        losses, since = [], time.perf_counter()
    return state


# --- Measurements and output.


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated on its GPU, or resident in the memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def num_bytes(*trees: Tree) -> list[int]:
    return [sum(x.nbytes for x in optree.tree_leaves(tree)) for tree in trees]


def memory_held(
    s: Settings, state: fshard.TrainState, growth: int, mesh: DeviceMesh | None, device: torch.device
) -> dict[str, list[int]]:
    """Bytes of parameters, gradients and optimizer state, and growth of the peak: of every rank, and unsharded."""
    byte = torch.zeros((1, 1), dtype=torch.long, device=device)
    _, grads = fshard.value_and_grad(partial(loss, heads=s.heads))(state.params, {"tokens": byte, "targets": byte})
    local_bytes = torch.tensor([[*num_bytes(state.params, grads, state.opt_state), growth]], device=device)
    rows = local_bytes if mesh is None else fshard.all_gather(local_bytes, mesh, "shard")
    bytes_by_rank = {f"rank {rank}": row for rank, row in enumerate(rows.tolist())}
    params = init_params(s)
    return bytes_by_rank | {"unsharded": num_bytes(params, params, optimizer(s).init(params))}


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
def logging(s: Settings, console: Console, path: Path, history: list[Record]) -> Iterator[Callable[[Record], None]]:
    """A function that appends a record to `history`, writes it as a line of JSON and updates the progress bar."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with path.open("w") as file, Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task("", total=1.0)

        def log(record: Record) -> None:
            history.append(record)
            print(json.dumps(record), file=file, flush=True)
            bits, rate = record["train_bits_per_byte"], record["bytes_per_second"]
            text = f"step {record['step']}/{s.steps}  {bits:.3f} bits/byte  {rate:,.0f} bytes/s"
            bar.update(task, completed=record["done"], description=text)

        yield log


def run(s: Settings, text: bytes, valid: bytes, mesh: DeviceMesh | None, device: torch.device) -> None:
    """Train. Rank 0 writes metrics and a plot of the loss to the folder `out`, and prints the results."""
    rank, _ = rank_and_size(mesh)
    console, metrics = Console(quiet=rank > 0), s.out / "metrics.jsonl" if rank == 0 else Path(os.devnull)
    before, windows, state = peak_memory(device), all_windows(valid, s, device), start(s, mesh, device)
    console.print(str(state.params.plan), markup=False, highlight=False, soft_wrap=True)
    history: list[Record] = []
    with logging(s, console, metrics, history) as log:
        state = train(s, state, as_tensor(text), windows, mesh, log)
    bytes_by_rank = memory_held(s, state, peak_memory(device) - before, mesh, device)
    params = fshard.gather_params(state.params)
    if rank == 0:
        result = summary(history, valid, bytes_by_rank)
        with metrics.open("a") as file:
            print(json.dumps(result), file=file)
        draw(history, result["gzip_bits_per_byte"], s.out / "loss.png")
        report(result, generate(params, s, device), s, console)


def summary(history: Sequence[Record], valid: bytes, bytes_by_rank: dict[str, list[int]]) -> Record:
    return {
        "validation_bits_per_byte": history[-1]["validation_bits_per_byte"],
        "gzip_bits_per_byte": 8 * len(gzip.compress(valid, 9)) / len(valid),
        "validation_bytes": len(valid),
        "memory_bytes": bytes_by_rank,
    }


def report(result: Record, sample: str, s: Settings, console: Console) -> None:
    console.print(memory_table(result["memory_bytes"]))
    console.print(Panel(Text(sample), title="Written by the model"))
    console.print(f"Bits per byte on {result['validation_bytes']:,} validation bytes:")
    console.print(f"  this model  {result['validation_bits_per_byte']:.3f}")
    console.print(f"  gzip -9     {result['gzip_bits_per_byte']:.3f}")
    console.print(f"Metrics and a picture of the loss are in {s.out}", soft_wrap=True)


# --- The command line.


def check(s: Settings) -> None:
    """Raise ValueError for settings that are out of range or contradict each other."""
    for f in fields(s):
        value, least = getattr(s, f.name), 0 if f.name in ("seed", "sample") else None
        if isinstance(value, int | float) and not (value > 0 or value == least):
            raise ValueError(f"--{f.name.replace('_', '-')} {value}: expected a number above 0")
    if s.d_model % s.heads:
        raise ValueError(f"--d-model {s.d_model}: expected a multiple of --heads, which is {s.heads}")
    if s.eval_bytes < s.context:
        raise ValueError(f"--eval-bytes {s.eval_bytes}: expected at least the {s.context} of --context")


def read_arguments(argv: Sequence[str] | None) -> tuple[Settings, bytes, bytes]:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model, sharded over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for f in fields(Settings):
        kind = Path if f.name == "data" else type(f.default)
        parser.add_argument(f"--{f.name.replace('_', '-')}", type=kind, default=f.default, help=HELP[f.name])
    s = Settings(**vars(parser.parse_args(argv)))
    try:
        check(s)
        text, valid = read_text(s)
        s.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return s, text, valid


def main(argv: Sequence[str] | None = None) -> None:
    s, text, valid = read_arguments(argv)
    with world() as (mesh, device):
        run(s, text, valid, mesh, device)


if __name__ == "__main__":
    main()
