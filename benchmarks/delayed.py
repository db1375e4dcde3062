"""Exposed communication of fshard and FSDP2 on slow links: `make bench-delayed`.

Both systems run in turn in one process group, whose backend takes the time of a link (`delaying.py`). Exposed time is
the time of a step on that link less the time of the same system's step on a link without delay. The links are chosen
such that the bytes of a step, sent one after the other, take half, once and twice the time of a step's computation.

The computation of a unit is one small matrix product and a pause: for a fixed time in the forward, and for twice that
in the backward, the processor is free, as while an accelerator computes. Time is first counted, then measured
(`delaying.py`). Counted, a step takes what the order of its collectives makes it take; the number is exact, and does
not depend on the machine. Measured, the differences are of paired rounds, and the median is shown.

In `equal` all units are alike. In `unequal` the first unit has six times the parameters of the others and takes no
time, as an embedding, and the last has six times the parameters and takes six times the time, as a head. In `in turn`
every second unit has six times the parameters and takes twice the time.

"FSDP2, ahead" is FSDP2 with asynchronous gathers that are started a unit ahead. On CPUs `fully_shard` waits for each
collective otherwise, and for reduce-scatters in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from delaying import Clock, Counted, DelayingGroup, Link, delaying
from rich.console import Console
from rich.table import Table
from timing import in_turn, leave, on_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fshard

WIDTH = 128
FACTORS = (0.5, 1.0, 2.0)  # communication over computation
LATENCY = 1e-4
# of each unit: its parameters and its time, as multiples of a usual unit's
MODELS = {"equal": [(1, 1)] * 10, "unequal": [(6, 0), *[(1, 1)] * 10, (6, 6)], "in turn": [(1, 1), (6, 2)] * 5}
Step = Callable[[Tensor], Tensor]
Pause = Callable[[float], None]  # lets seconds pass


class _Pause(torch.autograd.Function):
    """The identity, which takes time in the forward, and twice that in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pause: Pause, seconds: float) -> Tensor:
        ctx.pause, ctx.seconds = pause, seconds
        pause(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.pause(2 * ctx.seconds)
        return grad, None, None


def unit(w: Tensor, x: Tensor, pause: Pause, seconds: float) -> Tensor:
    """One unit: (rows, WIDTH) -> (rows, WIDTH); `w` is (n, WIDTH), of which the product takes the first rows."""
    x = _Pause.apply(x, pause, seconds)
    return x + torch.tanh(F.linear(x, w[:WIDTH])) + 1e-3 * w.mean()


def weights(name: str) -> list[Tensor]:
    """The parameters of a model: a matrix for each unit."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH * size, WIDTH, generator=generator) / WIDTH for size, _ in MODELS[name]]


def again(fn: Callable[..., Tensor], *args: object) -> Tensor:
    """Call `fn` in an activation checkpoint: the backward computes it once more."""
    out: Tensor = checkpoint(fn, *args, use_reentrant=False)
    return out


class _Unit(nn.Module):
    def __init__(self, w: Tensor, pause: Pause, seconds: float, checkpoints: bool):
        super().__init__()
        self.w, self.pause, self.seconds, self.checkpoints = nn.Parameter(w), pause, seconds, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        args = self.w, x, self.pause, self.seconds
        return again(unit, *args) if self.checkpoints else unit(*args)


def fsdp2(
    name: str, mesh: DeviceMesh, pause: Pause, seconds: float, ahead: bool = False, checkpoints: bool = False
) -> Step:
    """A step of FSDP2, each unit by itself; with `ahead` gathers are asynchronous and start one unit ahead."""
    pairs = zip(weights(name), MODELS[name], strict=True)
    model = nn.Sequential(*(_Unit(w, pause, seconds * t, checkpoints) for w, (_, t) in pairs))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if ahead:
        # private: FSDP2's only switch for gathers that a CPU does not wait for at once
        module: Any = model  # whose methods `fully_shard` has added
        module._set_unshard_async_op(True)
        for part, following in pairwise(module):
            part.set_modules_to_forward_prefetch([following])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def fshard_step(
    name: str, mesh: DeviceMesh, pause: Pause, seconds: float, checkpoints: bool = False, **how: Any
) -> Step:
    """A step of fshard, each unit by itself; `how` are arguments of `make_plan`."""
    params, times = weights(name), [t for _, t in MODELS[name]]

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        def part(x: Tensor, i: int) -> Tensor:  # the unit is gathered inside
            return unit(p[i], x, pause, seconds * times[i])

        for i in range(len(times)):
            x = again(part, x, i) if checkpoints else part(x, i)
        return x.square().mean()

    plan = fshard.make_plan(params, mesh, units=["*"], **how)
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(loss_fn, tx, donate=True)

    def next_step(x: Tensor) -> Tensor:
        nonlocal state
        state, metrics = step(state, x)
        return metrics["loss"]

    return next_step


SYSTEMS: dict[str, Callable[..., Step]] = {
    "fshard": fshard_step,
    "FSDP2": fsdp2,
    "FSDP2, ahead": partial(fsdp2, ahead=True),
}
# fshard with this number of units ahead
DEPTHS: dict[str, Callable[..., Step]] = {f"prefetch={n}": partial(fshard_step, prefetch=n) for n in range(4)}
CHECKPOINTS: dict[str, Callable[..., Step]] = {
    "checkpoints": partial(fshard_step, checkpoints=True),
    "prefetch=0, checkpoints": partial(fshard_step, checkpoints=True, prefetch=0),
    "FSDP2, ahead, checkpoints": partial(fsdp2, ahead=True, checkpoints=True),
}


def sent(name: str) -> int:
    """The bytes that a rank sends in the gathers and sums of a step: all units are gathered twice, the last once."""
    numbers = [size * WIDTH * WIDTH * 4 for size, _ in MODELS[name]]
    size = dist.get_world_size()
    return (3 * sum(numbers) - numbers[-1]) * (size - 1) // size


def exposed(
    steps: dict[str, Step], group: DelayingGroup, link: Link, clock: Clock, batch: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each round's step on a link, less those of the same system's step without delay."""

    def call(system: str, link: Link) -> None:
        group.use(link, clock)
        steps[system](batch)

    calls = {f"{system}{on}": partial(call, system, on) for system in steps for on in (Link(), link)}
    times = in_turn(calls, rounds, warmup=2, clock=clock.now)
    pairs = {s: zip(times[f"{s}{link}"], times[f"{s}{Link()}"], strict=True) for s in steps}
    return {system: sorted(slow - fast for slow, fast in pair) for system, pair in pairs.items()}


def measure(name: str, clock: Clock, args: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Exposed time of each system on each link, as a share of the computation: sorted by size."""
    group, rows, rounds = mesh.get_group(), [], 1 if isinstance(clock, Counted) else args.rounds
    assert isinstance(group, DelayingGroup)
    computing = 3 * args.seconds * sum(t for _, t in MODELS[name])
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    systems = SYSTEMS | DEPTHS | CHECKPOINTS if isinstance(clock, Counted) else SYSTEMS
    steps = {system: make(name, mesh, group.pause, args.seconds) for system, make in systems.items()}
    for factor in FACTORS:
        link = Link(LATENCY, sent(name) / (factor * computing))
        times = exposed(steps, group, link, clock, batch, rounds)
        shares = {system: [x / computing for x in xs] for system, xs in times.items()}
        rows.append({"model": name, "clock": type(clock).__name__, "factor": factor, "shares": shares})
    return rows


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure all models; rank 0 prints a table for each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.Backend.register_backend("delaying", delaying, devices=["cpu"])
    mesh = DeviceMesh.from_group(dist.new_group(backend="cpu:delaying"), "cpu", mesh_dim_names=("shard",))
    for name in args.model or MODELS:
        for clock in (Counted(), Clock()):
            rows = measure(name, clock, args, mesh)
            if dist.get_rank() == 0:
                show(rows, args)
    leave()


def show(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """Print the medians of a model, with the middle 80% of rounds."""
    systems = list(rows[0]["shares"])
    table = Table("communication", *systems, "fshard / FSDP2", title=f"{rows[0]['model']}, {rows[0]['clock']}")
    for row in rows:
        shares, middle = row["shares"], {s: statistics.median(xs) for s, xs in row["shares"].items()}
        cells = [f"{middle[s]:.3f}" if len(xs) == 1 else _spread(middle[s], xs) for s, xs in shares.items()]
        table.add_row(f"{row['factor']:g}", *cells, f"{middle['fshard'] / middle['FSDP2']:.2f}")
    Console(width=200).print(table)
    if args.json:
        with args.json.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)


def _spread(middle: float, shares: Sequence[float]) -> str:
    return f"{middle:.3f} ({shares[len(shares) // 10]:.3f} to {shares[-1 - len(shares) // 10]:.3f})"


def main() -> None:
    """Start two ranks; on a rank under torchrun, measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.004, help="of a usual unit's forward")
    parser.add_argument("--json", type=Path, help="append a line of JSON for each link")
    on_a_rank(parser.parse_args()) if "RANK" in os.environ else on_two_ranks(__file__, *sys.argv[1:])


if __name__ == "__main__":
    main()
