"""MAML (Finn et al., 2017) on sinusoids: a gradient step inside the loss, and the loss is differentiated through it.

    python examples/maml.py                               # two simulated ranks
    torchrun --nproc-per-node=2 examples/maml.py          # two processes

A task is a sinusoid of some amplitude and phase, of which ten points are known. The loss of a task is that of other
points, after a gradient step on the known ones. Each rank has other tasks.
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import grad, vmap

import fshard

STEPS, TASKS, WIDTH, INNER_LR = 200, 32, 40, 0.05  # the tasks are those of one rank


def tasks(number: int) -> dict[str, Tensor]:
    """Points of sinusoids: x and y are (number, 20, 1), of which the first ten are known."""
    amplitude, phase = 1 + 2 * torch.rand(number, 1, 1), torch.pi * torch.rand(number, 1, 1)
    x = 10 * torch.rand(number, 20, 1) - 5
    return {"x": x, "y": amplitude * torch.sin(x + phase)}


def new_params() -> list[Any]:
    sizes = [1, WIDTH, WIDTH, 1]
    return [{"w": torch.randn(n, m) / n**0.5, "b": torch.randn(m)} for n, m in pairwise(sizes)]


def model(params: Any, x: Tensor) -> Tensor:
    x = x / 2
    for layer in params[:-1]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def squares(params: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(params, x) - y).square().mean()


def adapted(params: Any, x: Tensor, y: Tensor, steps: int) -> Any:
    """The parameters of a task, after gradient steps. They are computed from `params`, so the loss has a gradient."""
    for _ in range(steps):
        slopes = grad(squares)(params, x, y)
        params = fshard.tree.map(lambda p, slope: p - INNER_LR * slope, params, slopes)
    return params


def loss(params: Any, batch: dict[str, Tensor], steps: int = 1) -> fshard.Mean:
    def of_task(x: Tensor, y: Tensor) -> Tensor:
        return squares(adapted(params, x[:10], y[:10], steps), x[10:], y[10:])

    losses = vmap(of_task)(batch["x"], batch["y"])  # (tasks,)
    return fshard.Mean(losses.sum(), len(losses))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    plan = fshard.make_plan(params, mesh, regather=False)  # regather=True: the loss would start twice
    tx = fshard.optim.adam(1e-2)
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(loss, tx)
    torch.manual_seed(1 + mesh.get_rank())  # other tasks on every rank
    for _ in range(STEPS):
        state, _ = step(state, tasks(TASKS))
    new = tasks(200)
    losses = [fshard.evaluate(loss)(state.params, new, steps) for steps in (0, 1, 5)]  # means over all ranks
    if mesh.get_rank() == 0:
        print("loss on new tasks: without adaptation {:.3f}, after one step {:.3f}, after five {:.3f}".format(*losses))


if __name__ == "__main__":
    on_ranks(main, default_device=True)
