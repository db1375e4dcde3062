"""Save and restore 1 GB of state on two gloo ranks, in turn with torch.distributed.checkpoint (DCP) of FSDP2.

    make bench-checkpoints ARGS="--rounds 10 --directory /a/disk"

The state is a transformer in float32 with the moments of AdamW. Times are those until both ranks are done:

- save: until the checkpoint is whole and flushed to the disk.
- stall: until a save in the background returns. "with steps" adds 4 steps that follow, less 4 steps without a save:
  what the background takes from the training as well.
- restore: into the tensors that are there, from the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from networks import transformer
from timing import in_turn, leave, on_two_ranks, ratio
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fshard
from fshard import checkpoint

LAYERS, WIDTH, HEADS = 7, 1024, 16
STEPS = 4  # that follow a save in the background
TASK = transformer(WIDTH, LAYERS, HEADS, 1, 64)


class Ours:
    """fshard: a TrainState, saved and restored."""

    def __init__(self, mesh: DeviceMesh, directory: Path):
        params = TASK.init()
        tx = fshard.optim.adamw(1e-3)
        plan = fshard.make_plan(params, mesh, units=["blocks.*"])
        self.train = fshard.train_step(TASK.loss, tx, donate=True)
        self.state = fshard.init_state(fshard.shard_params(params, plan), tx)
        self.directory, self.numbers = directory / "ours", count()
        self.saving: checkpoint.Saving | None = None

    def step(self, batch: torch.Tensor) -> None:
        """One step of training."""
        self.state, _ = self.train(self.state, batch)

    def save(self) -> None:
        """Save."""
        checkpoint.save(self.directory, self.state, next(self.numbers))

    def save_beside(self) -> None:
        """Begin a save in the background."""
        self.saving = checkpoint.save(self.directory, self.state, next(self.numbers), wait=False)

    def wait(self) -> None:
        """Wait for the save in the background."""
        if self.saving is not None:
            self.saving.wait()

    def clear(self) -> None:
        """Delete all checkpoints but the last."""
        for step in checkpoint.steps(self.directory)[:-1]:
            checkpoint.delete(self.directory, step)

    def restore(self) -> None:
        """Restore the last checkpoint into the memory of the state."""
        self.state = checkpoint.restore(self.directory, self.state, donate=True)


class Theirs:
    """FSDP2 and DCP: the state dicts of the model and the optimizer, saved and loaded."""

    def __init__(self, mesh: DeviceMesh, directory: Path):
        self.model = TASK.module()
        for part in TASK.parts(self.model):
            fully_shard(part, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.directory, self.numbers = directory / "theirs", count()
        self.beside = dist.new_group(backend="gloo")  # its collectives must not mix with those of the training
        self.saving: Any = None

    def step(self, batch: torch.Tensor) -> None:
        """One step of training."""
        self.model(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def save(self) -> None:
        """Save."""
        self.last = self.directory / str(next(self.numbers))
        dcp.save(self._state(), checkpoint_id=self.last)

    def save_beside(self) -> None:
        """Begin a save in the background."""
        self.last = self.directory / str(next(self.numbers))
        self.saving = dcp.async_save(self._state(), checkpoint_id=self.last, process_group=self.beside)

    def wait(self) -> None:
        """Wait for the save in the background."""
        if self.saving is not None:
            self.saving.result()

    def clear(self) -> None:
        """Delete all checkpoints but the last."""
        for path in self.directory.iterdir():
            if path != self.last:
                shutil.rmtree(path)

    def restore(self) -> None:
        """Load the last checkpoint into the tensors of the model and the optimizer."""
        dcp.load(self._state(), checkpoint_id=self.last)


def measure(directory: Path, rounds: int) -> dict[str, dict[str, float]]:
    """The ratios of fshard's times to DCP's, and their spreads."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    both: dict[str, Any] = {"ours": Ours(mesh, directory), "theirs": Theirs(mesh, directory)}
    batch = TASK.batch(torch.Generator().manual_seed(dist.get_rank()))
    for system in both.values():
        system.step(batch)

    def each(name: str) -> dict[str, Callable[[], object]]:
        return {key: getattr(system, name) for key, system in both.items()}

    def clear() -> None:
        if dist.get_rank() == 0:
            for system in both.values():
                system.clear()
        dist.barrier()

    def steps(system: Any) -> None:
        for _ in range(STEPS):
            system.step(batch)

    results: dict[str, dict[str, float]] = {}
    times = in_turn(each("save"), rounds, warmup=1, between=clear)
    results["save"] = ratio(times, "ours", "theirs")
    results["restore"] = ratio(in_turn(each("restore"), rounds, warmup=1), "ours", "theirs")
    plain = in_turn({key: partial(steps, system) for key, system in both.items()}, rounds, warmup=1)
    stalls: dict[str, list[float]] = {key: [] for key in both}
    slower: dict[str, list[float]] = {key: [] for key in both}
    for _ in range(rounds + 1):
        for key, system in both.items():
            dist.barrier()
            begin = time.perf_counter()
            system.save_beside()
            dist.barrier()
            stalls[key].append(time.perf_counter() - begin)
            steps(system)
            dist.barrier()
            slower[key].append(time.perf_counter() - begin - statistics.median(plain[key]))
            system.wait()
        clear()
    results["stall"] = ratio({key: x[1:] for key, x in stalls.items()}, "ours", "theirs")
    results["stall with steps"] = ratio({key: x[1:] for key, x in slower.items()}, "ours", "theirs")
    if dist.get_rank() == 0:
        seconds = {"save": times, "stall": stalls, "stall with steps": slower}
        print({name: {key: round(statistics.median(x), 3) for key, x in of.items()} for name, of in seconds.items()})
    return results


def main() -> None:
    """Start two ranks; on a rank (`--rank`), measure and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None, help="a folder of the disk to measure")
    parser.add_argument("--rank", action="store_true")
    args = parser.parse_args()
    if not args.rank:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            on_two_ranks(__file__, "--rank", f"--rounds={args.rounds}", f"--directory={directory}")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, x in measure(args.directory, args.rounds).items():
        if dist.get_rank() == 0:
            print(f"{name}: {x['ratio']:.3f} ({x['low']:.3f} to {x['high']:.3f})")
            sys.stdout.flush()
    leave()


if __name__ == "__main__":
    main()
