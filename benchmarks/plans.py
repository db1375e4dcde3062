"""A plan without options beside units chosen by hand, on the examples: ratios of a step's time and of its memory.

    make bench-plans ARGS="--rounds 200 pinn lora"

An example runs up to its first step twice: with the units that a user would name, and without `units=`. The two steps
then run in turn on two gloo ranks of one thread. Time is processor time. Memory is the peak of `fshard.estimate`, and
the counted peak of an eager step: the arguments, and the tensors of all operators. Messages are a step's collectives.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from timing import in_turn, leave, on_two_ranks, ratio
from torch.distributed.device_mesh import init_device_mesh

import fshard

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("examples", "examples/clusters", "tests")]

# the units chosen by hand
EXAMPLES = {
    "classifier": ["0", "2", "3"],
    "lora": ["h.*"],
    "nanogpt": ["h.*"],
    "resume": ["0", "3", "6", "9"],
    "pinn": ["*"],
    "maml": ["*"],
    "diffusion": ["*"],
    "meanflow": ["*"],
    "dpo": ["blocks.*"],
    "finetune_hf": ["transformer.h.*"],
    "port_fsdp2": ["blocks.*"],
    "fits": ["blocks.*"],
    "train": ["blocks.*"],
}


class Found(Exception):
    """A step, and the arguments of its first call."""


def run(example: Any, mesh: Any, out: Path) -> None:
    """Start an example, whatever it takes."""
    match example.__name__:
        case "resume":
            example.main(mesh, out)
        case "nanogpt":
            example.main(mesh, example.read_arguments(["--out", str(out)]), [])
        case "finetune_hf":
            example.run(mesh, Namespace(out=out, model=None, steps=1))
        case "port_fsdp2":
            weights, data = example.Model().state_dict(), example.batches(mesh.get_rank(), torch.float32)
            example.with_fshard(mesh, weights, data, torch.bfloat16, torch.float32)
        case "fits":
            example.traced("FULL_SHARD", 4)
        case "train":
            example.train(str(out), 1)
        case _:
            example.main(mesh)


def found(name: str, mesh: Any, units: list[str] | None) -> tuple[Callable[..., Any], Any]:
    """An example's step by a plan with these units, and the arguments of its first call."""
    make_plan, train_step = fshard.make_plan, fshard.train_step

    def stopped(*args: Any, **options: Any) -> Callable[..., Any]:
        def call(*first: Any) -> None:
            raise Found(train_step(*args, **options), first)

        return call

    planned = lambda *args, **options: make_plan(*args, **{**options, "units": units})  # noqa: E731
    with patch("fshard.make_plan", planned), patch("fshard.train_step", stopped), TemporaryDirectory() as out:
        try:
            run(importlib.import_module(name), mesh, Path(out))
        except (Found, fshard.TraceError) as error:
            step, first = (error.__cause__ or error).args
            return step, first
    raise RuntimeError(f"{name} makes no step")


def needs(name: str, mesh: Any, units: list[str] | None) -> list[int]:
    """Bytes at the peak of an example's step, estimated and counted, and the number of its collectives."""
    from support.memory import Live

    step, args = found(name, mesh, units)
    given = [x for x in fshard.tree.leaves(args) if isinstance(x, torch.Tensor)]
    estimated, before, live = fshard.estimate(step, *args).peak.bytes, sum(x.nbytes for x in given), Live()
    live.leave_out(given)
    with live, fshard.collectives.tally() as records:
        step(*args)
    return [estimated, before + live.peak, len(records)]


def steps(name: str, mesh: Any) -> dict[str, Callable[[], object]]:
    """Calls that take the next step of an example, without and with the units."""

    def call(way: str) -> None:
        step, args = ways[way]
        ways[way] = step, (step(*args)[0], *args[1:])

    ways = {"alone": found(name, mesh, None), "by hand": found(name, mesh, EXAMPLES[name])}
    return {way: partial(call, way) for way in ways}


def row(name: str, mesh: Any, rounds: int) -> str:
    """The ratios of one example, as text."""
    plans = [found(name, mesh, units)[1][0].params.plan for units in (None, EXAMPLES[name])]
    if plans[0] == plans[1]:
        return f"{name}: the same plan"
    alone, by_hand = (needs(name, mesh, units) for units in (None, EXAMPLES[name]))
    time_of = ratio(in_turn(steps(name, mesh), rounds, warmup=5, clock=time.process_time), "alone", "by hand")
    estimated, counted = (x / y for x, y in zip(alone[:2], by_hand[:2], strict=True))
    spread = f"time {time_of['ratio']:.3f} ({time_of['low']:.3f} to {time_of['high']:.3f})"
    messages = f"messages {alone[2]} / {by_hand[2]}"
    return f"{name}: {spread}, memory estimated {estimated:.3f}, counted {counted:.3f}, {messages}"


def main() -> None:
    """Start two ranks; on a rank (`--rank`) measure the examples, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("example", nargs="*", help=f"default: all of {', '.join(EXAMPLES)}")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rank", action="store_true")
    args = parser.parse_args()
    if not args.rank:
        on_two_ranks(__file__, "--rank", *sys.argv[1:])
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for name in args.example or EXAMPLES:
        text = row(name, mesh, args.rounds)
        if dist.get_rank() == 0:
            print(text, flush=True)
    leave()


if __name__ == "__main__":
    main()
