"""Modules of many kinds, as users write them, and the plain training that they are compared with."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 7, 6


class Block(nn.Module):
    """Two linear layers behind a norm, under activation checkpointing if `again`."""

    def __init__(self, again: bool = False, norm: type[nn.Module] = nn.LayerNorm):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.norm, self.drop, self.again = norm(WIDTH), nn.Dropout(0.0), again

    def inner(self, x: Tensor) -> Tensor:
        """The part that runs again in the backward."""
        return self.drop(self.down(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        y = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        return self.norm(x + y)


class Tied(nn.Module):
    """A language model with a tied head, a frozen leaf and uneven shapes."""

    def __init__(self, blocks: Callable[[], nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([blocks() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        for x in list(self.blocks[1].parameters())[:1]:
            x.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) of words -> (rows * length, WORDS)."""
        x = self.embed(tokens).flatten(0, 1).to(next(self.parameters()).dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH): the rows are one sequence."""
        return x + self.lstm(x[None])[0][0]


class Attention(nn.Module):
    """torch's own attention, which reads its projections by name."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        return x + self.attention(x, x, x)[0]


class Parametrized(nn.Module):
    """A weight that is computed from others when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        return self.linear(x)


class Twice(nn.Module):
    """A submodule in two places, of which the second is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.Sequential(self.first, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        return self.inside(self.inside(self.first(x)))


class Listed(nn.Module):
    """Parameters in torch's containers, and one that a closure holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(WIDTH) / 4 for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.ones(WIDTH)})
        bias = self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.shifts = [bias]

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) -> (rows, WIDTH)."""
        return torch.tanh(x * self.named["gain"] + sum(self.rows) + self.shifts[0])


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Block,
    "checkpointed": lambda: Block(again=True),
    "recurrent": Recurrent,
    "attention": Attention,
    "parametrized": Parametrized,
    "twice": Twice,
    "listed": Listed,
    "batch norm": lambda: Block(norm=nn.BatchNorm1d),
    "batch norm, checkpointed": lambda: Block(again=True, norm=nn.BatchNorm1d),
}


def tied(name: str) -> Tied:
    """A model of blocks of a kind, in float64, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Tied(BLOCKS[name]).double()


def words(step: int, rank: int) -> dict[str, Tensor]:
    """One rank's words and the next ones."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, WORDS, (3, 5), generator=generator)
    return {"tokens": tokens[:, :-1], "next": tokens[:, 1:]}


def error(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The sum of the cross-entropy over all words."""
    return cross_entropy(out, batch["next"].flatten(), reduction="sum")


def trained(
    module: nn.Module, optimizer: Callable[[Iterator[Tensor]], torch.optim.Optimizer], steps: int, world: int
) -> nn.Module:
    """A copy of a module, trained by torch alone on the data of all ranks."""
    model: Any = copy.deepcopy(module)
    opt = optimizer(x for x in model.parameters() if x.requires_grad)
    for step in range(steps):
        batches = [words(step, rank) for rank in range(world)]
        opt.zero_grad()
        count = sum(batch["next"].numel() for batch in batches)
        torch.stack([error(model(batch["tokens"]), batch) / count for batch in batches]).sum().backward()
        opt.step()
    return model
