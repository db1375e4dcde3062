"""The models of the benchmarks: pure functions, and modules for the reference systems that call the same functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tree = dict[str, Any]
VOCAB = 256


@dataclass(frozen=True)
class Task:
    """A model: functions that make parameters, compute the loss and draw a batch; the name of its repeated part."""

    init: Callable[[], Tree]
    loss: Callable[[Any, Tensor], Tensor]
    batch: Callable[[torch.Generator], Tensor]
    repeated: str


def _block(p: Any, x: Tensor, heads: int) -> Tensor:
    b, t, d = x.shape
    h = F.layer_norm(x, (d,), p["norm1"], p["norm1_bias"])
    q, k, v = (h @ p["qkv"] + p["qkv_bias"]).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + h @ p["proj"] + p["proj_bias"]
    h = F.layer_norm(x, (d,), p["norm2"], p["norm2_bias"])
    return x + F.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def transformer(d: int, layers: int, heads: int, rows: int, length: int) -> Task:
    """A byte-level transformer with the usual leaves: `rows` sequences of `length` bytes in a batch."""

    def matrix(n: int, m: int) -> Tensor:
        return torch.randn(n, m) / n**0.5

    def block() -> Tree:
        p: Tree = {"norm1": torch.ones(d), "norm1_bias": torch.zeros(d)}
        p |= {
            "qkv": matrix(d, 3 * d),
            "qkv_bias": torch.zeros(3 * d),
            "proj": matrix(d, d),
            "proj_bias": torch.zeros(d),
        }
        p |= {
            "norm2": torch.ones(d),
            "norm2_bias": torch.zeros(d),
            "up": matrix(d, 4 * d),
            "up_bias": torch.zeros(4 * d),
        }
        return p | {"down": matrix(4 * d, d), "down_bias": torch.zeros(d)}

    def init() -> Tree:
        p: Tree = {"embed": torch.randn(VOCAB, d) * 0.1, "pos": torch.randn(length, d) * 0.1}
        p["blocks"] = [block() for _ in range(layers)]
        return p | {"norm": torch.ones(d), "norm_bias": torch.zeros(d), "head": matrix(d, VOCAB)}

    def loss(p: Any, tokens: Tensor) -> Tensor:
        x = p["embed"][tokens[:, :-1]] + p["pos"]
        for one in p["blocks"]:
            x = one(x) if isinstance(one, nn.Module) else _block(one, x, heads)
        x = F.layer_norm(x, (d,), p["norm"], p["norm_bias"])
        return F.cross_entropy((x @ p["head"]).flatten(0, 1), tokens[:, 1:].flatten())

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randint(0, VOCAB, (rows, length + 1), generator=generator)

    return Task(init, loss, batch, "blocks")


def deep(layers: int, d: int, rows: int) -> Task:
    """A stack of small linear layers, whose time is mostly overhead: `rows` rows of `d` numbers in a batch."""

    def init() -> Tree:
        return {"layers": [{"w": torch.randn(d, d) / d**0.5, "b": torch.zeros(d)} for _ in range(layers)]}

    def loss(p: Any, x: Tensor) -> Tensor:
        for one in p["layers"]:
            x = one(x) if isinstance(one, nn.Module) else F.linear(x, one["w"], one["b"])
        return x.square().mean()

    return Task(init, loss, lambda generator: torch.randn(rows, d, generator=generator), "layers")


TASKS = {
    "S": transformer(256, 4, 4, 8, 128),
    "M": transformer(768, 8, 12, 2, 128),
    "T": deep(100, 64, 16),
}


class _Part(nn.Module):
    """One repeated part as a module that calls the same function."""

    def __init__(self, p: Tree, heads: int):
        super().__init__()
        self.heads = heads
        for name, value in p.items():
            self.register_parameter(name, nn.Parameter(value))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self["w"], self["b"]) if hasattr(self, "w") else _block(self, x, self.heads)


class Reference(nn.Module):
    """A task as a module, which FSDP2 and DistributedDataParallel can wrap: its forward computes the task's loss."""

    def __init__(self, task: Task, params: Tree, heads: int):
        super().__init__()
        self.task = task
        self.parts = nn.ModuleList(_Part(p, heads) for p in params[task.repeated])
        for name, value in params.items():
            if name != task.repeated:
                self.register_parameter(name, nn.Parameter(value))

    def __getitem__(self, name: str) -> Any:
        return self.parts if name == self.task.repeated else getattr(self, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.task.loss(self, x)


HEADS = {"S": 4, "M": 12, "T": 1}
