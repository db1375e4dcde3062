"""nanoGPT's train.py with a sharded state: train a GPT on text, evaluate, save, go on from there, and let it write.

    python examples/nanogpt.py                              # two simulated ranks
    torchrun --nproc-per-node=2 examples/nanogpt.py         # two processes: NCCL if each has a GPU, otherwise gloo

Tokens are bytes. Without `--data` the text is the source of the Python standard library; training and validation text
come from different files. After ctrl-C or a kill the same command goes on from the last checkpoint, also on another
number of ranks. Delete the folder `--out` to start anew.
"""

import argparse
import gzip
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpt_model import GPT, GPTConfig
from matplotlib.figure import Figure
from nanogpt_text import Batch, all_windows, as_tensor, random_windows, read_text
from ranks import on_ranks

import fshard
from fshard import checkpoint, optim

LOG_EVERY = 10  # steps between logs; at a log the ranks also agree on whether to stop
Record = dict[str, Any]  # a line of the metrics

# what a run keeps when it goes on; what is not here may change
KEPT = ("steps", "width", "layers", "heads", "context", "batch", "lr", "reduction", "seed")


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a GPT on text, sharded over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--data", type=Path, help="a file, or a folder of files; without it the standard library's source")
    option("--out", type=Path, default=Path("runs/nanogpt"), help="folder for checkpoints, metrics and the picture")
    option("--steps", type=int, default=1650, help="updates to make")
    option("--minutes", type=float, default=3.5, help="end after this time; parts of a stopped run add up")
    option("--width", type=int, default=128, help="width of the model")
    option("--layers", type=int, default=4, help="number of blocks")
    option("--heads", type=int, default=4, help="attention heads of a block")
    option("--context", type=int, default=128, help="bytes that the model sees")
    option("--batch", type=int, default=16, help="windows in a step, divided among the ranks")
    option("--lr", type=float, default=2e-2, help="highest learning rate of the matrices in blocks")
    option("--eval-every", type=int, default=150, help="steps between validations")
    option("--eval-bytes", type=int, default=1 << 16, help="validation bytes to use, always the same")
    option("--guard", type=int, default=0, help="run every so many steps twice, and compare their bits; 0: none")
    option("--save-every", type=int, default=100, help="steps between checkpoints")
    option("--reduction", default="exact", choices=("exact", "fast", "tree"), help="tree: same bits on 1, 2, 4 ranks")
    option("--timeout", type=float, default=300, help="seconds to wait for a rank that does not answer")
    option("--sample", type=int, default=400, help="bytes of text to write at the end")
    option("--seed", type=int, default=0, help="decides the first parameters, the windows and the text written")
    s = parser.parse_args(argv)
    try:
        s.text, s.valid = read_text(s.data, s.context, s.eval_bytes)
        s.run = json.dumps({k: getattr(s, k) for k in KEPT} | {"text": hashlib.sha256(s.text).hexdigest()[:16]})
        check_same_run(s)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return s


def check_same_run(s: argparse.Namespace) -> None:
    """ValueError if the checkpoints in `out` are of a run with other settings."""
    if checkpoint.latest(s.out) is None:
        return
    only_run = {"run": "run"}.get
    there = json.loads(checkpoint.restore(s.out, {"run": ""}, rename=only_run, fall_back=True)["run"])
    here = json.loads(s.run)
    if differing := [f"{k} {there.get(k)}, not {here[k]}" for k in here if there.get(k) != here[k]]:
        raise ValueError(f"--out {s.out} has a run with {'; '.join(differing)}. Give another folder, or delete it")


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


def optimizer(s: argparse.Namespace) -> optim.Transform:
    """Muon for the matrices of blocks, AdamW for all else; both rates rise, and fall as a cosine."""

    def rate(peak: float) -> optim.schedules.Schedule:
        return optim.schedules.warmup_cosine(peak, max(1, s.steps // 20), s.steps, end=peak / 20)

    hidden = optim.muon(rate(s.lr), weight_decay=0.0, dtype=torch.float32)
    rest = optim.adamw(rate(s.lr / 5), b2=0.99, weight_decay=0.1)
    return optim.by_label({"hidden": hidden, "rest": rest}, {"h.*.*.*.weight": "hidden", "**": "rest"})


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


@torch.no_grad()
def write(model: GPT, s: argparse.Namespace, temperature: float = 0.8) -> str:
    """Text that the model writes after "def "."""
    device = model.wte.weight.device
    generator, text = torch.Generator(device).manual_seed(s.seed), list(b"def ")
    for _ in range(s.sample):
        scores = model(torch.tensor([text[-s.context :]], device=device))
        text.append(int(torch.multinomial((scores[0, -1] / temperature).softmax(0), 1, generator=generator)))
    shown = bytes(text).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)  # others may be terminal commands


def loss_of(apply: Any) -> Any:
    def loss(params: Any, batch: Batch) -> fshard.Mean:
        """Nats per byte: the mean over the bytes of all ranks."""
        scores, _ = apply(params, {}, batch["tokens"])
        total = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return fshard.Mean(total, batch["targets"].numel())

    return loss


def highest(mesh: Any, *numbers: float) -> list[float]:
    """The highest value of each number on any rank."""
    local = torch.tensor(numbers, dtype=torch.float64, device=mesh.device_type)
    return fshard.all_reduce(local, mesh, "shard", op="max").tolist()


def resumed(s: argparse.Namespace, mesh: Any, state: fshard.TrainState) -> tuple[fshard.TrainState, list[Record]]:
    """The state and the records of the last checkpoint that is whole; without one, `state` and none."""
    if checkpoint.latest(s.out, mesh) is None:
        return state, []
    saved = checkpoint.restore(s.out, {"state": state, "run": "", "history": ""}, fall_back=True)
    return saved["state"], json.loads(saved["history"])


def is_over(s: argparse.Namespace, number: int, history: Sequence[Record]) -> bool:
    return number >= s.steps or (bool(history) and history[-1]["seconds"] >= 60 * s.minutes)


def validate(s: argparse.Namespace, mesh: Any, loss: Any, params: fshard.Sharded) -> float:
    """Bits per byte over all validation windows. Uneven parts of ranks are right: the loss counts bytes."""
    windows, value, nats = all_windows(s.valid, s.context), fshard.evaluate(loss), 0.0
    num = len(windows["tokens"])
    for first in range(0, num, s.batch):
        own = slice(first + mesh.get_rank(), min(first + s.batch, num), mesh.size())
        batch = {name: x[own].to(mesh.device_type) for name, x in windows.items()}
        nats += float(value(params, batch)) * (min(first + s.batch, num) - first)
    return nats / num / math.log(2)


def train(
    s: argparse.Namespace, mesh: Any, loss: Any, state: fshard.TrainState, history: list[Record], received: list[int]
) -> tuple[fshard.TrainState, int]:
    """Train until all steps are made, the time is over or a rank has received a signal; adds records to `history`.

    Returns the new state, and the number of the signal or 0: the same on all ranks.
    """
    rank, ranks, number, losses = mesh.get_rank(), mesh.size(), int(state.step), list[torch.Tensor]()
    began, text = time.perf_counter() - (history[-1]["seconds"] if history else 0.0), as_tensor(s.text)
    own = range(s.batch * rank // ranks, s.batch * (rank + 1) // ranks)  # rows of the batch of all ranks
    plain = fshard.train_step(loss, optimizer(s), clip_norm=1.0, donate=True, reduction=s.reduction)
    step = fshard.guard(plain, s.guard) if s.guard else plain
    stop = 0.0
    while not is_over(s, number, history) and not stop:
        number += 1
        batch = random_windows(text, s.context, s.seed, number, own)
        state, metrics = step(state, {name: x.to(mesh.device_type) for name, x in batch.items()})
        losses.append(metrics["loss"])
        if number % LOG_EVERY and number < s.steps:
            continue
        bits = float(torch.stack(losses).mean()) / math.log(2)  # waits for the GPU: before the clock is read
        seconds, stop = highest(mesh, time.perf_counter() - began, max(received, default=0))
        history.append({"step": number, "seconds": seconds, "ranks": ranks, "train_bits_per_byte": bits})
        losses.clear()
        is_last = is_over(s, number, history) or stop > 0
        if is_over(s, number, history) or number % s.eval_every < LOG_EVERY:
            history[-1]["validation_bits_per_byte"] = validate(s, mesh, loss, state.params)
        if rank == 0:
            print(f"step {number}/{s.steps}, {seconds:.0f} s: {bits:.3f} bits a byte", flush=True)
            with (s.out / "metrics.jsonl").open("a") as file:
                print(json.dumps(history[-1]), file=file)
        if is_last or number % s.save_every < LOG_EVERY:
            whole = {"state": state, "run": s.run, "history": json.dumps(history)}
            checkpoint.save(s.out, whole, number, wait=is_last, keep_last=2)
    return state, int(stop)


def started(s: argparse.Namespace, mesh: Any) -> tuple[GPT, Any, fshard.TrainState]:
    """The module, the function that it is, and the first state."""
    torch.manual_seed(s.seed)  # all ranks make the same model, and each keeps its shards
    model = GPT(GPTConfig(s.context, 256, s.layers, s.heads, s.width)).to(mesh.device_type)
    apply, params, _ = fshard.module.functionalize(model)
    plan = fshard.make_plan(params, mesh)
    return model, apply, fshard.init_state(fshard.shard_params(params, plan), optimizer(s), seed=s.seed)


def main(mesh: Any, s: argparse.Namespace, received: list[int]) -> None:
    """Train; rank 0 writes metrics and a picture of the loss, and prints what came of it."""
    model, apply, state = started(s, mesh)
    state, history = resumed(s, mesh, state)
    say = print if mesh.get_rank() == 0 else lambda *_, **__: None
    if history:
        verb = "Ended before, at" if is_over(s, int(state.step), history) else "Goes on from"
        say(f"{verb} step {int(state.step)}: delete {s.out} to start anew", flush=True)
    if mesh.get_rank() == 0:
        s.out.mkdir(parents=True, exist_ok=True)
        (s.out / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history))
    state, stop = train(s, mesh, loss_of(apply), state, history, received)
    if stop:
        received.append(stop)  # also of ranks that have received none
        return say(f"Stopped and saved at step {int(state.step)}: the same command goes on from there")

    weights = fshard.state_dict(state.params, rank=0)  # the module's own state dict, on rank 0 alone
    if mesh.get_rank() == 0:
        model.load_state_dict(weights)
        gzip_bits = 8 * len(gzip.compress(s.valid, 9)) / len(s.valid)
        draw(history, gzip_bits, s.out / "loss.png")
        print(f"The model writes: {write(model.eval(), s)}")
        bits = history[-1]["validation_bits_per_byte"]
        print(f"Bits a byte of {len(s.valid):,} bytes of validation text: {bits:.3f}, with gzip -9 {gzip_bits:.3f}")
        print(f"Metrics and a picture of the loss are in {s.out}")


def run(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 128 and the number of the signal that has stopped the training, or 0."""
    s = read_arguments(argv)
    with signals() as received:
        on_ranks(partial(main, s=s, received=received), timeout=s.timeout)
    return 128 + max(received) if received else 0


if __name__ == "__main__":
    sys.exit(run())
