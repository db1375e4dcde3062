"""Train a byte-level language model whose parameters, gradients and optimizer state are sharded over all ranks.

    python examples/train_lm.py                                 # one process
    torchrun --nproc-per-node=2 examples/train_lm.py            # two ranks: NCCL if each has a GPU, otherwise gloo

The model and its loss are pure functions written for one device. Without `--data` the text is the source of the Python
standard library. Training and validation text come from different files. After ctrl-C or a kill the same command goes
on from the last checkpoint, also on another number of ranks. Delete the folder `--out` to start anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_report import Record, draw, logging, num_bytes, peak_memory, report, summary
from lm_text import Batch, all_windows, as_tensor, random_windows, read_text
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import checkpoint

VOCAB = 256
NEAR = 4  # the input at a position is the sum of embeddings of the last four bytes: the model learns words sooner
LOG_EVERY = 10  # steps between logs; at a log the ranks also agree on whether to stop

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
    batch: int = 16
    lr: float = 5e-3
    warmup: int = 100
    eval_every: int = 150
    eval_bytes: int = 1 << 16
    save_every: int = 100
    reduction: str = "exact"
    timeout: float = 300
    sample: int = 400
    prompt: str = "def "
    seed: int = 0


HELP = {
    "data": "a file, or a folder of files; without it the standard library's source",
    "out": "folder for checkpoints, the metrics and the picture of the loss",
    "steps": "updates to make",
    "minutes": "end training after this time, whatever the number of steps; of a run that was stopped, all parts count",
    "d_model": "width of the model",
    "layers": "number of blocks",
    "heads": "attention heads of a block",
    "context": "bytes the model sees",
    "batch": "windows in a step, divided among the ranks",
    "lr": "highest learning rate",
    "warmup": "steps in which the learning rate rises",
    "eval_every": "steps between validations",
    "eval_bytes": "validation bytes to use, always the same",
    "save_every": "steps between checkpoints",
    "reduction": "order of sums: exact, fast, or tree (the same bits on 1, 2, 4, ... ranks)",
    "timeout": "seconds to wait for a rank that does not answer",
    "sample": "bytes of text to write at the end",
    "prompt": "what that text begins with",
    "seed": "decides the first parameters, the windows and the text written",
}
ANY_TIME = {"data", "out", "minutes", "eval_every", "save_every", "timeout", "sample", "prompt"}  # may change in a run


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


# --- Training.


@contextmanager
def world(s: Settings) -> Iterator[tuple[DeviceMesh | None, torch.device]]:
    """The mesh of the processes that torchrun started (None without torchrun), and the device of this process."""
    cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield None, device
        return
    timeout = timedelta(seconds=s.timeout)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, device_id=device if cuda else None)
    yield init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)), device
    dist.destroy_process_group()  # not after an error: other ranks may never reach this call, and torchrun stops them


def rank_and_size(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (0, 1) if mesh is None else (mesh.get_rank(), mesh.size())


@contextmanager
def signals() -> Iterator[list[int]]:
    """A list of ctrl-C and SIGTERM received: the training then stops at the next log. A second one ends the process."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:  # after an error too: what torchrun sends then ends the process
        for number, handler in before.items():
            signal.signal(number, handler)


def highest(numbers: Sequence[float], mesh: DeviceMesh | None, device: torch.device) -> list[float]:
    """The highest value of each number on any rank."""
    if mesh is None:
        return [*numbers]
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    return fshard.all_reduce(local, mesh, "shard", op="max").tolist()


def schedule(s: Settings) -> Callable[[Tensor], Tensor]:
    """Learning rate by step count: linear warmup, then cosine decay to a twentieth of `lr`."""

    def lr(count: Tensor) -> Tensor:
        done = ((count - s.warmup) / max(1, s.steps - s.warmup)).clamp(0, 1)
        falling = 0.05 + 0.95 * (1 + torch.cos(math.pi * done)) / 2
        return s.lr * torch.minimum((count + 1) / s.warmup, falling)

    return lr


def optimizer(s: Settings) -> fshard.optim.Transform:
    return fshard.optim.adamw(schedule(s), b2=0.99, weight_decay=0.1)


def on(device: torch.device, whole: Tree) -> Tree:
    return optree.tree_map(lambda x: x.to(device), whole)


def start(s: Settings, mesh: DeviceMesh | None, device: torch.device) -> fshard.TrainState:
    whole = init_params(s)
    params = on(device, whole)
    plan = fshard.make_plan(params, mesh, units=["blocks.*"])
    return fshard.init_state(fshard.shard_params(params, plan), optimizer(s), seed=s.seed)


def validate(s: Settings, params: fshard.Sharded, windows: Batch, mesh: DeviceMesh | None) -> float:
    """Bits per byte over all windows, which are divided among ranks. Uneven parts are right: the loss counts bytes."""
    rank, size = rank_and_size(mesh)
    num, at_once, nats = len(windows["tokens"]), s.batch, 0.0
    value = fshard.evaluate(partial(loss, heads=s.heads))
    for first in range(0, num, at_once):
        local_rows = {name: rows[first : first + at_once][rank::size] for name, rows in windows.items()}
        nats += float(value(params, local_rows)) * min(at_once, num - first)
    return nats / num / math.log(2)


def share_done(s: Settings, number: int, seconds: float) -> float:
    return min(1.0, max(number / s.steps, seconds / (60 * s.minutes)))


def train(
    s: Settings,
    state: fshard.TrainState,
    seconds: float,
    text: Tensor,
    windows: Batch,
    mesh: DeviceMesh | None,
    received: Sequence[int],
    log: Callable[[Record], None],
    save: Callable[[fshard.TrainState, bool], None],
) -> tuple[fshard.TrainState, int]:
    """Train until all steps are made, the time is over or a signal is received; `seconds` is the time used before.

    Passes records of measurements to `log`. Returns the new state, and the number of the signal or 0.
    """
    (rank, size), device = rank_and_size(mesh), windows["tokens"].device
    rows = range(s.batch * rank // size, s.batch * (rank + 1) // size)  # of the batch of all ranks
    step = fshard.train_step(
        partial(loss, heads=s.heads), optimizer(s), clip_norm=1.0, donate=True, reduction=s.reduction
    )
    number, stop, losses = int(state.step), 0.0, list[Tensor]()
    since = time.perf_counter()
    began = since - seconds
    while share_done(s, number, seconds) < 1 and not stop:
        number += 1
        batch = random_windows(text, s.context, s.seed, number, rows)
        state, metrics = step(state, on(device, batch))
        losses.append(metrics["loss"])
        if number % LOG_EVERY and number < s.steps:
            continue
        bits = float(torch.stack(losses).mean()) / math.log(2)  # waits for the GPU: before the clock is read
        now = time.perf_counter()
        taken, seconds, stop = highest([now - since, now - began, max(received, default=0)], mesh, device)
        done, rate = share_done(s, number, seconds), len(losses) * s.batch * s.context / taken
        record = {"step": number, "done": done, "seconds": seconds, "ranks": size, "bytes_per_second": rate}
        record["train_bits_per_byte"] = bits
        if done == 1 or number % s.eval_every < LOG_EVERY:
            record["validation_bits_per_byte"] = validate(s, state.params, windows, mesh)
        log(record)
        is_last = done == 1 or stop > 0
        if is_last or number % s.save_every < LOG_EVERY:
            save(state, is_last)
        losses, since = [], time.perf_counter()
    return state, int(stop)


# --- Checkpoints.


def what_decides(s: Settings, text: bytes) -> Record:
    """The settings that a run keeps when it goes on, and a digest of its text."""
    kept = {f.name: getattr(s, f.name) for f in fields(s) if f.name not in ANY_TIME}
    return kept | {"text": hashlib.sha256(text).hexdigest()[:16]}


def check_same_run(s: Settings, text: bytes) -> None:
    """ValueError if the checkpoints in `out` are of a run with other settings."""
    folder = s.out / "checkpoints"
    if checkpoint.latest(folder) is None:
        return
    saved = checkpoint.restore(folder, {"run": ""}, rename=lambda name: name if name == "run" else None, fall_back=True)
    there, here = json.loads(saved["run"]), what_decides(s, text)
    if differing := [f"{name} {there.get(name)}, not {here[name]}" for name in here if there.get(name) != here[name]]:
        raise ValueError(
            f"--out {s.out} has a run with {'; '.join(differing)}. Give another folder, or delete this one"
        )


def resumed(
    s: Settings, state: fshard.TrainState, mesh: DeviceMesh | None, device: torch.device
) -> tuple[fshard.TrainState, list[Record]]:
    """The state and the records of the last checkpoint that is whole; without one, `state` and none."""
    folder = s.out / "checkpoints"
    (last,) = highest([-1 if (step := checkpoint.latest(folder)) is None else step], mesh, device)
    if last < 0:
        return state, []
    saved = checkpoint.restore(folder, {"state": state, "run": "", "history": ""}, int(last), fall_back=True)
    return saved["state"], json.loads(saved["history"])


# --- All of it.


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


def run(
    s: Settings, text: bytes, valid: bytes, mesh: DeviceMesh | None, device: torch.device, received: Sequence[int]
) -> int:
    """Train. Rank 0 writes metrics and a plot of the loss to the folder `out`, and prints the results.

    Returns the number of the signal that has stopped the training, or 0.
    """
    rank, _ = rank_and_size(mesh)
    console, metrics = Console(quiet=rank > 0), s.out / "metrics.jsonl" if rank == 0 else Path(os.devnull)
    before, windows, state = peak_memory(device), on(device, all_windows(valid, s.context)), start(s, mesh, device)
    console.print(str(state.params.plan), markup=False, highlight=False, soft_wrap=True)
    state, history = resumed(s, state, mesh, device)
    seconds = history[-1]["seconds"] if history else 0.0
    if history:
        verb = "Ended before, at" if share_done(s, int(state.step), seconds) == 1 else "Goes on from"
        console.print(f"{verb} step {int(state.step)}: delete {s.out} to start anew", soft_wrap=True)
    decides = json.dumps(what_decides(s, text))

    def save(state: fshard.TrainState, wait: bool) -> None:
        whole = {"state": state, "run": decides, "history": json.dumps(history)}
        checkpoint.save(s.out / "checkpoints", whole, int(state.step), wait=wait, keep_last=2)

    with logging(s.steps, console, metrics, history) as log:
        state, stop = train(s, state, seconds, as_tensor(text), windows, mesh, received, log, save)
    if stop:
        console.print(f"Stopped and saved at step {int(state.step)}: the same command goes on from there")
        return stop
    bytes_by_rank = memory_held(s, state, peak_memory(device) - before, mesh, device)
    params = fshard.gather_params(state.params)
    if rank == 0:
        result = summary(history, valid, bytes_by_rank)
        with metrics.open("a") as file:
            print(json.dumps(result), file=file)
        draw(history, result["gzip_bits_per_byte"], s.out / "loss.png")
        report(result, generate(params, s, device), s.out, console)
    return 0


# --- The command line.


def check(s: Settings) -> None:
    """Raise ValueError for settings that are out of range or contradict each other."""
    for f in fields(s):
        value, least = getattr(s, f.name), 0 if f.name in ("seed", "sample") else None
        if isinstance(value, int | float) and not (value > 0 or value == least):
            raise ValueError(f"--{f.name.replace('_', '-')} {value}: expected a number above 0")
    if s.d_model % s.heads:
        raise ValueError(f"--d-model {s.d_model}: expected a multiple of --heads, which is {s.heads}")
    if s.batch < (ranks := int(os.environ.get("WORLD_SIZE", 1))):
        raise ValueError(f"--batch {s.batch}: expected at least one window for each of {ranks} ranks")
    if s.reduction not in ("exact", "fast", "tree"):
        raise ValueError(f"--reduction {s.reduction}: expected exact, fast or tree")
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
        text, valid = read_text(s.data, s.context, s.eval_bytes)
        check_same_run(s, text)
        s.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return s, text, valid


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 128 and the number of the signal that has stopped the training, or 0."""
    s, text, valid = read_arguments(argv)
    with signals() as received, world(s) as (mesh, device):
        stop = run(s, text, valid, mesh, device, received)
    return stop and 128 + stop


if __name__ == "__main__":
    sys.exit(main())
