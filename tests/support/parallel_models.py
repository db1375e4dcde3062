"""Small modules with styles of parallel=, and training of them on a mesh or on one device."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fshard
from fshard import optim, tree
from fshard.comm.mesh import rank_and_size
from fshard.module import functionalize
from fshard.testing import World

WORDS, WIDTH = 7, 6  # a vocabulary of 7 words is 3, 3 and 1 on three ranks, and 2, 2, 2 and 1 on four
STEPS = 3


class MLP(nn.Module):
    """A column, dropout, a row, dropout."""

    def __init__(self, hidden: int = 5, rate: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(x)), self.rate, self.training)
        return F.dropout(self.down(hidden), self.rate, self.training)


class Gated(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self, hidden: int = 5):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)


class Packed(nn.Module):
    """Two blocks of features all the way, and matrices that are parameters."""

    def __init__(self, hidden: int = 5):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * hidden), nn.Linear(2 * hidden, WIDTH)
        self.shared = Shared(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate_up(x))) + self.shared(x)


class Shared(nn.Module):
    """An MLP without layers."""

    def __init__(self, hidden: int):
        super().__init__()
        self.into, self.out = nn.Parameter(torch.zeros(2, hidden, WIDTH)), nn.Parameter(torch.zeros(2, WIDTH, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return sum(torch.tanh(x @ into.mT) @ out.mT for into, out in zip(self.into, self.out, strict=True))


class Attention(nn.Module):
    """An attention with as many heads as its tensors have, and a number for each head; written as in transformers."""

    def __init__(self, heads: int, keys: int, head_dim: int = 2, rate: float = 0.0, groups: bool = True):
        super().__init__()
        self.head_dim, self.rate = head_dim, rate
        if groups:
            self.num_key_value_groups = heads // keys
        self.q, self.o = nn.Linear(WIDTH, heads * head_dim), nn.Linear(heads * head_dim, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, keys * head_dim) for _ in range(2))
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.q, self.k, self.v))
        groups = getattr(self, "num_key_value_groups", q.shape[1] // k.shape[1])
        k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        scores = q @ k.mT / self.head_dim**0.5 + self.sinks[:, None, None] * torch.ones(x.shape[1]).cumsum(0)
        weights = F.dropout(scores.softmax(-1), self.rate, self.training)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Experts in one tensor, top-2, as in transformers."""

    def __init__(self, num_experts: int = 5, hidden: int = 3):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.zeros(num_experts, 2 * hidden, WIDTH))
        self.down = nn.Parameter(torch.zeros(num_experts, WIDTH, hidden))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, which = (index == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[row], self.gate_up[expert]).chunk(2, -1)
            y = F.linear(torch.sigmoid(gate) * up, self.down[expert]) * weights[row, which, None]
            out = out.index_add(0, row, y)
        return out


class Passing(Experts):
    """Experts, and one that returns its input."""

    def __init__(self, num_experts: int):
        super().__init__(num_experts)
        self.passing = nn.Identity()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, index, weights) + self.passing(x) * weights[:, :1]


class Sparse(nn.Module):
    """A router and experts."""

    def __init__(self, num_experts: int = 5, kind: type[Experts] = Experts):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, num_experts), kind(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, index = self.router(flat).softmax(-1).topk(min(2, self.experts.num_experts), -1)
        return self.experts(flat, index, weights).view_as(x)


class Words(nn.Module):
    """A table, blocks with residuals and norms, and a head, which may be the table."""

    def __init__(self, *blocks: nn.Module, tied: bool = False):
        super().__init__()
        self.table, self.blocks = nn.Embedding(WORDS, WIDTH, padding_idx=3), nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in blocks)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


@dataclass(frozen=True)
class Model:
    """A module and its styles; `experts`: True if tokens may differ along the axis of the experts."""

    make: Callable[[], nn.Module]
    styles: Mapping[str, str]
    experts: bool = False

    def module(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module with drawn parameters."""
        module, generator = self.make().to(dtype), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for x in module.parameters():
                x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64) / 2)
        return module


COLUMN_ROW = {"**.up": "colwise", "**.down": "rowwise"}
HEADS = {"**.q": "colwise", "**.k": "colwise", "**.v": "colwise", "**.sinks": "colwise", "**.o": "rowwise"}
PACKED = {"**.gate_up": "packed_colwise", "**.down": "rowwise"}
WHOLE_EXPERTS = {
    "**.experts.gate_up": "grouped_gemm",
    "**.experts.down": "grouped_gemm",
    "**.experts": "ep_dispatch_experts",
}
MODELS = {
    "column, row": Model(lambda: Words(MLP(), MLP(1)), COLUMN_ROW),
    "packed": Model(lambda: Words(Gated()), PACKED),
    "heads": Model(lambda: Words(Attention(12, 12), MLP()), HEADS | COLUMN_ROW),
    "few heads": Model(lambda: Words(Attention(12, 2)), HEADS),
    "one head": Model(lambda: Words(Attention(12, 1), tied=True), HEADS | {"head": "colwise_gather_output"}),
    "heads that do not divide": Model(lambda: Words(Attention(5, 5), MLP()), HEADS | COLUMN_ROW),
    "no groups": Model(lambda: Words(Attention(12, 2, groups=False)), HEADS),
    "gathered": Model(
        lambda: Words(Gated(), MLP()),
        {"**.gate_up": "colwise_gather_output", "**.up": "colwise_rep", "**.down": "rowwise_split_input"},
    ),
    "vocabulary": Model(lambda: Words(MLP()), {"table": "embedding_rowwise", "head": "colwise_gather_output"}),
    "features": Model(lambda: Words(MLP()), {"table": "embedding_colwise", "**.norms.*": "replicate"}),
    "tied table": Model(lambda: Words(MLP(), tied=True), {"head": "colwise_rep", "table": "replicate"} | COLUMN_ROW),
    "tied head": Model(lambda: Words(MLP(), tied=True), {"table": "embedding_rowwise"}),
    "parts of experts": Model(
        lambda: Words(Sparse()),
        {"**.gate_up": "packed_colwise", "**.experts.down": "rowwise", "**.experts": "moe_tp_experts"},
    ),
    "an expert without parts": Model(
        lambda: Words(Sparse(kind=Passing)),
        {"**.gate_up": "packed_colwise", "**.experts.down": "rowwise", "**.experts": "moe_tp_experts"}
        | {"**.passing": "moe_identity_expert"},
    ),
    "packed rows, parameters": Model(
        lambda: Words(Packed()),
        {"**.gate_up": "packed_colwise", "**.down": "packed_rowwise", "**.shared": "all_reduce"}
        | {"**.into": "colwise", "**.out": "rowwise"},
    ),
    "experts": Model(lambda: Words(Sparse()), WHOLE_EXPERTS, experts=True),
    "experts, fewer than ranks": Model(lambda: Words(Sparse(2)), WHOLE_EXPERTS, experts=True),
}


def words(rows: int, seed: int = 0) -> Tensor:
    """Rows of 5 words: the first 4 are inputs, the last 4 are targets."""
    return torch.randint(WORDS, (rows, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(apply: Any, buffers: Any) -> Callable[[Any, Tensor], fshard.Mean]:
    """The mean over words: written for one device."""

    def loss(params: Any, batch: Tensor) -> fshard.Mean:
        out, _ = apply(params, buffers, batch[:, :-1])
        each = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return fshard.Mean(each.sum(), each.numel())

    return loss


def rows_of(batch: Tensor, mesh: Any, axes: tuple[str, ...]) -> Tensor:
    """This rank's rows: other ones, and other numbers of them, along `axes`."""
    rank, ranks = (0, 1) if mesh is None or not axes else rank_and_size(mesh, axes)
    return batch[rank::ranks]


def trained(
    mesh: Any, model: Model, optimizer: str = "adamw", way: str = "eager", differ: bool = False, **plan: Any
) -> list[Tensor]:
    """Loss, gradients, and parameters after some clipped steps, on a mesh with an axis "tensor" or on one device."""
    apply, params, buffers = functionalize(model.module(), parallel=model.styles)
    data = ("shard", "tensor") if differ else ("shard",)
    plan |= {} if mesh is None else {"split": apply.split(mesh, "tensor"), "data": data}
    plan.setdefault("units", apply.units("blocks.*"))
    sharded, loss = fshard.shard_params(params, fshard.make_plan(params, mesh, **plan)), loss_of(apply, buffers)
    value, grads = fshard.value_and_grad(loss)(sharded, rows_of(words(7), mesh, data))
    tx = {"sgd": optim.sgd(0.1, momentum=0.9), "adamw": optim.adamw(1e-2)}[optimizer]
    state = fshard.init_state(sharded, tx)
    step: Any = fshard.train_step(loss, tx, clip_norm=0.1)
    step = fshard.jit(step, backend="eager") if way == "jit" else step
    for i in range(STEPS):
        state, _ = step(state, rows_of(words(7, i), mesh, data))
    return [value, *tree.leaves(fshard.gather_params(grads)), *tree.leaves(fshard.gather_params(state.params))]


@functools.cache
def plainly(name: str, optimizer: str) -> list[Tensor]:
    """The module with all rows, and without a mesh."""
    return trained(None, MODELS[name], optimizer)


def is_the_plain_one(name: str, sizes: tuple[int, int], optimizer: str = "adamw", **how: Any) -> None:
    """On each rank loss, gradients and parameters are those of the plain module, to the rounding of float64."""
    world = World(axes={"shard": sizes[0], "tensor": sizes[1]})
    for got in world.run(functools.partial(trained, **how), MODELS[name], optimizer):
        for x, y in zip(got, plainly(name, optimizer), strict=True):
            assert (x - y).abs().max() <= 1e-10 * y.abs().max().clamp(min=1e-3), name
