"""What is left of checkpoints when ranks are killed, disks are full and files are damaged: `make bench-crashes`.

Two ranks save checkpoint after checkpoint of a state that tells its step and version, until one rank or both are killed
with SIGKILL, at a random moment of a save. The next run saves into the same directory, with what the killed one left.
After each kill another process, which is one rank, restores all that is listed. A checkpoint is wrong if a bit of it is
not what was saved, and lost if `save` had returned and it is not listed. The full disk is a tmpfs: root can mount one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import checkpoint

CONTEXT = multiprocessing.get_context("forkserver")
NUMEL = 1 << 18

# how a run saves version n: the step, and the options of `save`
WAYS: dict[str, Callable[[int], tuple[int, dict[str, Any]]]] = {
    "step after step": lambda version: (version, {}),
    "one step again and again": lambda version: (7, {}),
    "`wait=False`": lambda version: (version, {"wait": False}),
    "`keep_last=2`": lambda version: (version, {"keep_last": 2}),
}


@dataclass
class Row:
    """What came of the tries of one kind."""

    tries: int = 0
    unfinished: int = 0  # kills that left files of a save that was not finished
    restored: int = 0  # checkpoints that were listed, and restored to the right bits
    wrong: int = 0
    lost: int = 0
    errors: Counter[str] = field(default_factory=Counter)


def state_of(mesh: Any, step: int, version: int) -> dict[str, Any]:
    """A state of which every element tells the step and the version."""
    whole = {"w": torch.arange(float(NUMEL)) + step, "b": torch.full((3, 5), float(version))}
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
    return {"params": params, "mu": torch.full((1000,), 7 * version - step), "step": step, "version": version}


def is_right(state: dict[str, Any], step: int) -> bool:
    """Whether a state that was restored is, bit for bit, the one that was saved."""
    expected = state_of(None, step, state["version"])
    pairs = [(fshard.gather_params(x["params"]) | {"mu": x["mu"]}) for x in (state, expected)]
    return state["step"] == step and all(torch.equal(x, pairs[1][name]) for name, x in pairs[0].items())


def versions(dir: Path, row: Row) -> dict[int, int]:
    """The versions of all checkpoints by step, restored on one rank."""
    result = {}
    for step in checkpoint.steps(dir):
        try:
            state = checkpoint.restore(dir, state_of(None, 0, 0), step)
        except (checkpoint.CheckpointError, OSError):
            continue  # listed and not whole: it counts as lost
        row.restored += is_right(state, step)
        row.wrong += not is_right(state, step)
        result[step] = state["version"]
    return result


def save_on(rank: int, store: str, dir: str, way: str, first: int, pipe: Connection) -> None:
    """Save version after version; tell which one begins, which one is there, and how it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for version in range(first, first + 1000):
        step, options = WAYS[way](version)
        try:
            state = state_of(mesh, step, version)
            pipe.send(("begins", version))
            checkpoint.save(dir, state, step, **options).wait()
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
            raise SystemExit(1) from None
        pipe.send(("is there", version))


def killed(dir: Path, way: str, first: int, victims: list[int], draw: random.Random, row: Row) -> tuple[int, int]:
    """Kill ranks while they save; return the last version that was there, and the last one that was begun."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(2):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            processes.append(
                CONTEXT.Process(target=save_on, args=(rank, f"{folder}/store", str(dir), way, first, sender))
            )
            processes[-1].start()
            sender.close()
            pipes.append(receiver)
        until, begin, seconds, told = first + draw.randrange(1, 4), 0.0, 0.0, ("", 0)
        while told != ("begins", until):
            told = pipes[0].recv()
            assert told[0] != "error", told
            begin, seconds = (time.monotonic(), seconds) if told[0] == "begins" else (begin, time.monotonic() - begin)
        time.sleep(draw.uniform(0, 1.2 * seconds))
        for rank in victims:
            processes[rank].kill()
        ends = [rest(pipe) for pipe in pipes]
        for process in processes:
            process.join(90)
        for rank in {0, 1} - {*victims}:
            error = next((x for what, x in ends[rank] if what == "error"), "none")
            row.errors[error.partition(":")[0] if not processes[rank].is_alive() else "still waiting"] += 1
            processes[rank].kill()
    there = max((x for what, x in ends[0] if what == "is there"), default=until - 1)
    return there, max((x for what, x in ends[0] if what == "begins"), default=until)


def left_over(dir: Path) -> set[Path]:
    """The files that no index names."""
    texts = {path.parent: path.read_text() for path in dir.rglob("index.json")}
    return {path for path in dir.rglob("*-rank-*") if path.name not in texts.get(path.parent, "")}


def rest(pipe: Connection) -> list[tuple[str, Any]]:
    """What a rank tells until it ends."""
    told = []
    try:
        while pipe.poll(90):
            told.append(pipe.recv())
    except EOFError:
        pass
    return told


def kills(way: str, who: str, tries: int, seed: int) -> Row:
    """Kill ranks of run after run in one directory, so that each run finds what the killed ones have left."""
    draw, row, first, expected = random.Random(f"{way} {who} {seed}"), Row(), 1, dict[int, int]()
    with tempfile.TemporaryDirectory() as folder:
        dir = Path(folder) / "run"
        for _ in range(tries):
            left = left_over(dir)
            victims = [0, 1] if who == "both ranks" else [draw.randrange(2)]
            there, begun = killed(dir, way, first, victims, draw, row)
            row.tries += 1
            row.unfinished += not left_over(dir) <= left
            before, now = {**expected}, versions(dir, row)
            expected |= {WAYS[way](version)[0]: version for version in range(first, there + 1)}
            allowed = {WAYS[way](version)[0]: version for version in range(first, begun + 1)}
            row.wrong += sum(now[x] not in (before.get(x), expected.get(x), allowed.get(x)) for x in now)
            kept = sorted(expected)[-1:] if "keep_last" in way else expected
            row.lost += sum(now.get(x, 0) < expected[x] for x in kept)
            row.lost += checkpoint.latest(dir) != max(now, default=None)
            first, expected = begun + 1, {x: max(now[x], expected.get(x, 0)) for x in now}
    return row


def refused(row: Row, dir: Path, step: int, words: str) -> None:
    """Restore a damaged checkpoint: an error that has the words; and the one before it, as is asked for."""
    row.tries += 1
    try:
        state = checkpoint.restore(dir, state_of(None, 0, 0), step)
        row.wrong += 1
    except checkpoint.CheckpointError as error:
        row.errors["CheckpointError" if words in str(error) else str(error)] += 1
    state = checkpoint.restore(dir, state_of(None, 0, 0), fall_back=True)
    row.restored += is_right(state, step - 1)
    row.lost += not is_right(state, step - 1)


DAMAGE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "a torn file": lambda data, draw: data[: draw.randrange(len(data))],
    "blocks of zeros at the end of a file": lambda data, draw: data[: (at := draw.randrange(len(data)))].ljust(
        len(data), b"\1" if data[at:].count(0) == len(data) - at else b"\0"
    ),
    "a flipped bit": lambda data, draw: (
        data[: (at := draw.randrange(len(data)))] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    ),
    "a missing file": lambda data, draw: None,
}


def damaged(what: str, tries: int, seed: int) -> Row:
    """Damage a random file of the last of two checkpoints."""
    draw, row = random.Random(f"{what} {seed}"), Row()
    with tempfile.TemporaryDirectory() as folder:
        dir = Path(folder)
        for step in (1, 2):
            checkpoint.save(dir, state_of(None, step, step), step)
        files = sorted((dir / "step-000000000002").iterdir())
        for number in range(tries):
            path = files[number % len(files)]
            data = path.read_bytes()
            changed = DAMAGE[what](data, draw)
            path.unlink() if changed is None else path.write_bytes(changed)
            refused(row, dir, 2, "of step 2" if changed is None and path.suffix == ".json" else str(path))
            path.write_bytes(data)
    return row


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path | None]:
    """A file system of a few megabytes; None where this process may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def full(tries: int, seed: int) -> Row:
    """Save on a disk that becomes full; delete the first checkpoint, and save again."""
    draw, row, step = random.Random(f"full {seed}"), Row(), 0
    with small_disk(8) as disk:
        if disk is None:
            print("A full disk: left out, because this process may not mount a tmpfs")
            return row
        saved, begin = dict[int, int](), time.monotonic()
        while row.tries < tries and time.monotonic() < begin + 120:
            step += 1
            try:
                checkpoint.save(disk, state_of(None, step, step), step, wait=draw.random() < 0.5).wait()
                saved[step] = step
            except (OSError, checkpoint.CheckpointError) as error:
                row.tries += 1
                is_clear = "No space left on device" in str(error) and str(disk) in str(error)
                row.errors[type(error).__name__ if is_clear else str(error)] += 1
                now = versions(disk, row)
                row.lost += now != saved
                for old in sorted(saved)[: draw.randrange(1, 3)]:
                    checkpoint.delete(disk, old)
                    del saved[old]
    return row


def save_alone(dir: str, number: int, rounds: int, pipe: Connection) -> None:
    """Save as one of two jobs."""
    torch.set_num_threads(1)
    for step in range(2, rounds + 2):
        try:
            checkpoint.save(dir, state_of(None, step, 2 * step + number), step)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    pipe.close()


def two_savers(tries: int) -> Row:
    """Two jobs save the same steps into one directory."""
    row = Row(tries)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, state_of(None, 1, 1), 1)
        receiver, sender = CONTEXT.Pipe(duplex=False)
        jobs = [CONTEXT.Process(target=save_alone, args=(folder, number, tries, sender)) for number in range(2)]
        for job in jobs:
            job.start()
        sender.close()
        while any(job.is_alive() for job in jobs):
            versions(Path(folder), Row())  # while they save
        row.errors.update(error.partition(":")[0] for error in drained(receiver))
        now = versions(Path(folder), row)
        row.lost += now.get(1) != 1
        row.lost += sum(now.get(step, 0) // 2 != step for step in range(2, tries + 2))
    return row


def drained(pipe: Connection) -> Iterator[str]:
    """What was sent to a pipe that nobody can write to any more."""
    try:
        while True:
            yield pipe.recv()
    except EOFError:
        return


def printed(what: str, row: Row) -> None:
    """Print a row of the table."""
    errors = ", ".join(f"{number} {name}" for name, number in sorted(row.errors.items())) or "none"
    print(
        f"| {what} | {row.tries} | {row.unfinished or ''} | {row.restored:,} | {row.wrong} | {row.lost} | {errors} |",
        flush=True,
    )


def main() -> None:
    """Print the table; fail if a checkpoint was wrong or lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--damages", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    CONTEXT.set_forkserver_preload(["torch", "fshard", "torch.distributed.device_mesh"])
    torch.set_num_threads(1)
    print("| | tries | unfinished | restored | wrong | lost | errors |\n|---|---|---|---|---|---|---|", flush=True)
    rows = list[Row]()

    def add(what: str, row: Row) -> None:
        rows.append(row)
        printed(what, row)

    for who in ("one of two ranks", "both ranks"):
        for way in WAYS:
            add(f"{who} killed, {way}", kills(way, who, args.kills // (2 * len(WAYS)), args.seed))
    for what in DAMAGE:
        add(what, damaged(what, args.damages, args.seed))
    add("a full disk", full(args.damages, args.seed))
    add("two jobs that save the same steps at once", two_savers(args.damages))
    if any(row.wrong or row.lost for row in rows):
        sys.exit("a checkpoint was wrong or lost")


if __name__ == "__main__":
    main()
