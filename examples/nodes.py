"""A model of dataclasses, as in Equinox (Kidger and Garcia, 2021): the model is the tree of its parameters.

    python examples/nodes.py                              # two simulated ranks
    torchrun --nproc-per-node=2 examples/nodes.py         # two processes

The network tells two spirals apart. Its fields are parameters or nodes; a static field is a part of the structure.
"""

from collections.abc import Callable
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.functional import silu

import fshard

STEPS, ROWS, WIDTH = 300, 128, 32  # the rows are those of one rank


@fshard.tree.node
class Linear:
    w: Tensor
    b: Tensor

    @classmethod
    def new(cls, inputs: int, outputs: int) -> "Linear":
        return cls(torch.randn(inputs, outputs) / inputs**0.5, torch.zeros(outputs))

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


@fshard.tree.node
class Block:
    inner: Linear
    outer: Linear
    activation: Callable[[Tensor], Tensor] = fshard.tree.static(default=silu)

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.outer(self.activation(self.inner(x)))


@fshard.tree.node
class Network:
    enter: Linear
    blocks: list[Block]
    leave: Linear

    @classmethod
    def new(cls, depth: int) -> "Network":
        blocks = [Block(Linear.new(WIDTH, WIDTH), Linear.new(WIDTH, WIDTH)) for _ in range(depth)]
        return cls(Linear.new(2, WIDTH), blocks, Linear.new(WIDTH, 1))

    def __call__(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:  # reading a block gathers it
            x = block(x)
        return self.leave(x)[:, 0]


def data(rows: int) -> dict[str, Tensor]:
    """Points of two spirals: x is (rows, 2), y is 0 or 1."""
    y, angle = torch.randint(2, (rows,)), 0.5 + 5 * torch.rand(rows)
    turned = angle + torch.pi * y
    x = torch.stack([turned.cos(), turned.sin()], 1) * angle[:, None] / 3
    return {"x": x + 0.03 * torch.randn(rows, 2), "y": y.float()}


def loss(network: Network, batch: dict[str, Tensor]) -> fshard.Mean:
    return fshard.Mean(cross_entropy(network(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


def accuracy(network: Network, batch: dict[str, Tensor]) -> fshard.Mean:
    right = (network(batch["x"]) > 0) == batch["y"].bool()
    return fshard.Mean(right.sum().float(), len(right))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    network = Network.new(depth=3)
    plan = fshard.make_plan(network, mesh)
    tx = fshard.optim.adam(fshard.optim.schedules.cosine(1e-2, STEPS))
    state, step = fshard.init_state(fshard.shard_params(network, plan), tx), fshard.train_step(loss, tx)
    torch.manual_seed(1 + mesh.get_rank())  # other points on every rank
    before = fshard.evaluate(accuracy)(state.params, data(1000))
    for _ in range(STEPS):
        state, _ = step(state, data(ROWS))
    after = fshard.evaluate(accuracy)(state.params, data(1000))
    if mesh.get_rank() == 0:
        print("units:", ", ".join(unit.name for unit in plan.units))
        print(f"accuracy: before {before:.3f}, after {after:.3f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
