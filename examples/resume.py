"""Train on four ranks, save, go on with two ranks and then with one: the losses have the bits of a run without a stop.

    python examples/resume.py                           # four simulated ranks, then two, then one
    torchrun --nproc-per-node=4 examples/resume.py      # four processes; another number of them goes on

A checkpoint is read by any number of ranks. `reduction="tree"` adds gradients in an order that does not depend on the
number, and a row of the data depends on the step alone, so not even rounding differs. Delete runs/resume to start anew.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor, nn

import fshard
from fshard import checkpoint

STEPS, ROWS = 10, 16  # the rows are those of all ranks

torch.manual_seed(0)
LAYERS = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
apply, PARAMS, _ = fshard.module.functionalize(nn.Sequential(*LAYERS, nn.Linear(16, 1)))
TX = fshard.optim.adamw(1e-2)


def loss(params: Any, x: Tensor) -> fshard.Mean:
    predicted, _ = apply(params, {}, x)
    return fshard.Mean((predicted[:, 0] - x.mean(1)).square().sum(), len(x))


def started(mesh: Any) -> fshard.TrainState:
    params = fshard.tree.map(lambda x: x.to(mesh.device_type), PARAMS)
    plan = fshard.make_plan(params, mesh)
    return fshard.init_state(fshard.shard_params(params, plan), TX, seed=0)  # the seed is that of dropout


def train(mesh: Any, state: fshard.TrainState, steps: int) -> tuple[fshard.TrainState, list[float]]:
    step, losses = fshard.train_step(loss, TX, clip_norm=1.0, reduction="tree"), []
    for number in range(int(state.step), int(state.step) + steps):
        rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(number))
        state, metrics = step(state, rows.chunk(mesh.size())[mesh.get_rank()].to(mesh.device_type))
        losses.append(metrics["loss"].item())
    return state, losses


def main(mesh: Any, out: Path = Path("runs/resume")) -> None:
    state, losses = started(mesh), list[float]()
    if checkpoint.latest(out, mesh) is not None:
        saved = checkpoint.restore(out, {"state": state, "losses": ""})
        state, losses = saved["state"], json.loads(saved["losses"])
    state, new = train(mesh, state, STEPS)
    losses += new
    checkpoint.save(out, {"state": state, "losses": json.dumps(losses)}, step=len(losses))

    _, undisturbed = train(mesh, started(mesh), len(losses))
    same = sum(a == b for a, b in zip(losses, undisturbed, strict=True))
    if mesh.get_rank() == 0:
        print(f"steps {len(losses) - STEPS + 1} to {len(losses)}: ranks {mesh.size()}, loss {losses[-1]:.6f}, ", end="")
        print(f"{same} of {len(losses)} losses have the bits of a run without a stop")


if __name__ == "__main__":
    for number in [4, 2, 1] if "WORLD_SIZE" not in os.environ else [0]:  # torchrun has said the number
        on_ranks(main, number)
