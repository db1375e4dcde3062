"""The process of the system `jax`: one command a line on its input, one line of JSON for each on its output.

One process has all ranks, as virtual devices of the CPU over which GSPMD partitions the step. Parameters and moments
are cut along their first dimension where the devices divide it, the batch along its rows; the whole step is one jitted
function, and its state is donated. XLA's own threads are as many as the process has cores.

- `draw`: draw the next batch of all ranks, and put it on the devices;
- `step`: run a step; returns its loss;
- `peak`: returns the bytes at the peak since the first step ended, minus those resident before the model was made.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_networks
import numpy as np
import optax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory import reset_peak, resident
from models import task_of
from tasks import LR, Task
from torch import Tensor


class Trainer:
    """A state that is trained, and the data of all ranks."""

    def __init__(self, task: Task):
        assert task.peer
        name, settings = task.peer
        loss: jax_networks.Loss = getattr(jax_networks, name)(**settings)
        self.mesh = Mesh(np.array(jax.devices()), ("shard",))
        self.task = task
        self.generators = [torch.Generator().manual_seed(1 + rank) for rank in range(self.mesh.size)]
        tx = optax.adamw(LR, weight_decay=0.01)

        def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, moments = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        torch.manual_seed(0)
        params = jax.tree.map(self.placed, task.init())
        self.state = (params, jax.tree.map(self.placed, tx.init(params)))
        placements = jax.tree.map(lambda x: x.sharding, self.state)
        self.step: Callable[[Any, Any], Any] = jax.jit(step, donate_argnums=0, out_shardings=(placements, None))

    def placed(self, x: Any) -> jax.Array:
        """An array on the devices, cut along its first dimension if they divide it."""
        cut = x.ndim > 0 and x.shape[0] % self.mesh.size == 0
        value = jnp.array(x.numpy()) if isinstance(x, Tensor) else x
        return jax.device_put(value, NamedSharding(self.mesh, PartitionSpec("shard") if cut else PartitionSpec()))

    def draw(self) -> Any:
        """The next batch of all ranks."""
        batches = [self.task.batch(generator) for generator in self.generators]
        rows = jax.tree.map(lambda *xs: self.placed(torch.cat(xs)), *batches)
        return jax.block_until_ready(rows)

    def run(self, batch: Any) -> float:
        """The loss of a step, when all of the step is done."""
        self.state, loss = jax.block_until_ready(self.step(self.state, batch))
        return float(loss)


def main() -> None:
    """Answer the commands on the standard input until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    task = task_of(args.model, args.tiny)
    jax.block_until_ready(jax.jit(jnp.square)(jnp.ones(2)))  # loads the compiler, which is not counted
    before = resident()
    trainer = Trainer(task)
    batch, first = None, True
    for line in sys.stdin:
        if line.strip() == "draw":
            batch = trainer.draw()
            answer: object = None
        elif line.strip() == "step":
            answer = trainer.run(batch)
            if first:  # temporary memory of compiling is not counted either
                reset_peak()
                first = False
        else:
            answer = resident("VmHWM") - before
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
