"""Split leaves beside torch's tensor parallelism: the same transformer, in turn, on four gloo ranks of a mesh 2 x 2.

    make bench-tensor
    make bench-tensor ARGS="--model sequence --rounds 30"

Axis "shard" has FSDP, axis "tensor" columns and rows of matrices and words of the vocabulary. fshard takes functions
over trees, and leaves that are split; the peer is `parallelize_module`, `loss_parallel` and `fully_shard`. Ratios are
those of median step times, with the middle 80% of paired rounds. The systems start from the same numbers, and their
losses are compared in every step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import CLOSE, EARLY, FAR, check_alike, in_turn, leave, on_ranks, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import fshard

LR = 1e-3


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer: `rows` sequences of `length` words for each rank of "shard".

    With `sequence`, activations between the matrices are cut along the sequence, else they are equal along "tensor".
    `bucket` is that of fshard's plan, as on the narrow model of `make bench`.
    """

    width: int
    layers: int
    heads: int
    rows: int
    length: int
    words: int
    sequence: bool = False
    bucket: int = 0
    backend: str = "inductor"

    def init(self) -> Any:
        """The tree of parameters."""
        d = self.width

        def matrix(n: int, m: int) -> Tensor:
            return torch.randn(n, m) / n**0.5

        def block() -> Any:
            attention = {name: matrix(d, d) for name in ("wq", "wk", "wv", "wo")}
            mlp = {"w1": matrix(d, 4 * d), "w2": matrix(4 * d, d)}
            return {"norm1": torch.ones(d), "attention": attention, "norm2": torch.ones(d), "mlp": mlp}

        p = {"embed": torch.randn(self.words, d), "blocks": [block() for _ in range(self.layers)]}
        return p | {"norm": torch.ones(d), "head": matrix(d, self.words)}

    def batch(self, generator: torch.Generator) -> Tensor:
        """Words, (s + 1, b): the sequence first, so that a gather of activations along it needs no copy."""
        return torch.randint(0, self.words, (self.length + 1, self.rows), generator=generator)


MODELS = {
    "replicated": Model(256, 4, 4, 4, 64, 2048),
    "sequence": Model(256, 4, 4, 4, 64, 2048, sequence=True),
    "narrow": Model(128, 12, 4, 4, 32, 256, bucket=1 << 20),
}
TINY = Model(16, 2, 4, 3, 8, 32, backend="aot_eager")  # Inductor takes too long for tests


def attended(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Causal attention of heads of `size` numbers: (s, b, n size) -> (s, b, n size)."""
    q, k, v = (x.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def loss_of(model: Model, mesh: DeviceMesh) -> Callable[[Any, Tensor], fshard.Mean]:
    """The loss over trees with split leaves, whose columns and rows of matrices are this rank's."""
    d, size = model.width, model.width // model.heads
    words = model.words // mesh["tensor"].size()
    first = words * mesh.get_local_rank("tensor")

    def entered(x: Tensor, weight: Tensor) -> Tensor:  # what all columns of matrices read
        x = F.layer_norm(x, (d,), weight)
        return fshard.all_gather(x, mesh, "tensor") if model.sequence else x

    def added(x: Tensor) -> Tensor:  # the sum over ranks, of which a rank keeps its part of the sequence, or all
        return (fshard.reduce_scatter if model.sequence else fshard.all_reduce)(x, mesh, "tensor")

    def block(p: Any, x: Tensor) -> Tensor:
        a, y = p["attention"], entered(x, p["norm1"])
        x = x + added(attended(y @ a["wq"], y @ a["wk"], y @ a["wv"], size) @ a["wo"])
        return x + added(F.gelu(entered(x, p["norm2"]) @ p["mlp"]["w1"]) @ p["mlp"]["w2"])

    def mine(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of words among this rank's, and whether they are this rank's."""
        ids = ids - first
        return ids.clamp(0, words - 1), (ids >= 0) & (ids < words)

    def loss(p: Any, tokens: Tensor) -> fshard.Mean:
        ids, known = mine(tokens[:-1])
        x = added(F.embedding(ids, p["embed"]) * known[..., None])
        for one in p["blocks"]:
            x = block(one, x)
        logits = entered(x, p["norm"]) @ p["head"]  # (s, b, words of this rank)
        ids, known = mine(tokens[1:])
        parts = torch.stack([logits.logsumexp(-1), logits.gather(-1, ids[..., None])[..., 0] * known])
        parts = fshard.all_gather(parts[None], mesh, "tensor")  # (t, 2, s, b)
        each = parts[:, 0].logsumexp(0) - parts[:, 1].sum(0)
        return fshard.Mean(each.sum(), each.numel())

    return loss


SPLIT = dict.fromkeys(["**.wq", "**.wk", "**.wv", "**.w1", "head"], ("tensor", 1))
SPLIT |= dict.fromkeys(["**.wo", "**.w2", "embed"], ("tensor", 0))


class Ours:
    """fshard: a step of AdamW on split leaves, FSDP over "shard"."""

    def __init__(self, model: Model, mesh: DeviceMesh, compiled: bool = False):
        params, tx = model.init(), fshard.optim.adamw(LR)
        plan = fshard.make_plan(params, mesh, units=["blocks.*"], bucket=model.bucket, split=SPLIT)
        self.state = fshard.init_state(fshard.shard_params(params, plan), tx)
        step: Any = fshard.train_step(loss_of(model, mesh), tx, donate=not compiled)
        self.train = fshard.jit(step, donate=True, backend=model.backend) if compiled else step

    def __call__(self, batch: Tensor) -> Tensor:
        """One step."""
        self.state, metrics = self.train(self.state, batch)
        return metrics["loss"]

    def params(self) -> dict[str, Tensor]:
        """Whole parameters by path."""
        return fshard.state_dict(self.state.params)


class Attention(nn.Module):
    """Attention with heads in columns of `wq`, `wk` and `wv`."""

    def __init__(self, model: Model):
        super().__init__()
        self.size = model.width // model.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(model.width, model.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(attended(self.wq(x), self.wk(x), self.wv(x), self.size))


class MLP(nn.Module):
    """Two matrices."""

    def __init__(self, model: Model):
        super().__init__()
        self.w1 = nn.Linear(model.width, 4 * model.width, bias=False)
        self.w2 = nn.Linear(4 * model.width, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    """A layer."""

    def __init__(self, model: Model):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(model.width, bias=False), Attention(model)
        self.norm2, self.mlp = nn.LayerNorm(model.width, bias=False), MLP(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """The same model as modules; its forward computes logits."""

    def __init__(self, model: Model):
        super().__init__()
        self.embed = nn.Embedding(model.words, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm, self.head = nn.LayerNorm(model.width, bias=False), nn.Linear(model.width, model.words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def turned(path: str, x: Tensor) -> Tensor:
    """A leaf of the tree as the module has it, and back: `nn.Linear` has its matrix turned."""
    return x if x.dim() == 1 or path == "embed" else x.T


def parallelize(module: Transformer, mesh: DeviceMesh, sequence: bool) -> None:
    """Split the matrices of a module over a mesh; with `sequence`, activations between them are cut along dim 0."""
    cut: Any = Shard(0) if sequence else Replicate()
    columns, rows = ColwiseParallel, partial(RowwiseParallel, output_layouts=cut)
    # one gather, or one sum in the backward, for all matrices that read an input
    inputs = PrepareModuleInput(input_layouts=cut, desired_input_layouts=Replicate())
    block: dict[str, Any] = {"attention": inputs, "attention.wo": rows()}
    block |= {f"attention.{name}": columns() for name in ("wq", "wk", "wv")}
    block |= {"mlp": inputs, "mlp.w1": columns(), "mlp.w2": rows()}
    ends: dict[str, Any] = {"embed": rows(input_layouts=Replicate())}
    ends["head"] = columns(input_layouts=cut, use_local_output=False)
    if sequence:
        norm = SequenceParallel(sequence_dim=0)
        block, ends = {**block, "norm1": norm, "norm2": norm}, {**ends, "norm": norm}
    parallelize_module(module, mesh, ends)
    for one in module.blocks:
        parallelize_module(one, mesh, block)


class Theirs:
    """The peer: tensor parallelism of every block, the embedding and the head, then FSDP2, and torch's AdamW."""

    def __init__(self, model: Model, mesh: DeviceMesh, compiled: bool = False):
        params = model.init()
        whole = fshard.state_dict(fshard.shard_params(params, fshard.make_plan(params)))
        self.module = Transformer(model)
        self.module.load_state_dict({f"{path}.weight": turned(path, x) for path, x in whole.items()})
        parallelize(self.module, mesh["tensor"], model.sequence)
        for block in self.module.blocks:
            if compiled:
                block.compile(backend=model.backend)
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(self.module, mesh=mesh["shard"])
        # the fused kernel takes DTensors of one mesh: split leaves have two dims of it, others one
        groups = [[p for p in self._leaves().values() if p.device_mesh.ndim == n] for n in (1, 2)]
        self.optimizer = torch.optim.AdamW([{"params": x} for x in groups if x], lr=LR, fused=True)

    def _leaves(self) -> dict[str, Any]:
        return {name.removesuffix(".weight"): p for name, p in self.module.named_parameters()}

    def __call__(self, batch: Tensor) -> Tensor:
        """One step."""
        with loss_parallel():
            loss = F.cross_entropy(self.module(batch[:-1]).flatten(0, 1), batch[1:].flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def params(self) -> dict[str, Tensor]:
        """Whole parameters by path of the tree."""
        return {path: turned(path, p.full_tensor().detach()) for path, p in self._leaves().items()}


SYSTEMS: dict[str, Callable[[Model, DeviceMesh], Any]] = {
    "fshard": Ours,
    "torch": Theirs,
    "fshard-jit": partial(Ours, compiled=True),
    "torch-compiled": partial(Theirs, compiled=True),
}
PAIRS = [("fshard", "torch"), ("fshard-jit", "torch-compiled"), ("fshard-jit", "fshard"), ("torch-compiled", "torch")]


def steps_of(model: Model, mesh: DeviceMesh, systems: Iterable[str]) -> dict[str, Any]:
    """A step of each system; the parameters are the same for all systems and ranks."""
    steps = {}
    for system in systems:
        torch.manual_seed(0)
        steps[system] = SYSTEMS[system](model, mesh)
    return steps


def step_times(
    model: Model, steps: dict[str, Any], rank: int, rounds: int, warmup: int = 3, close: float = CLOSE
) -> dict[str, list[float]]:
    """Seconds of each round's step, the systems in turn; `rank` draws the batches. RuntimeError if losses differ."""
    draws, losses, done = torch.Generator().manual_seed(1 + rank), dict[str, Tensor](), count(1)
    batch = model.batch(draws)

    def call(system: str) -> None:
        losses[system] = steps[system](batch)

    def next_round() -> None:
        nonlocal batch
        check_alike({system: mean(loss) for system, loss in losses.items()}, close if next(done) <= EARLY else FAR)
        batch = model.batch(draws)

    return in_turn({system: partial(call, system) for system in steps}, rounds, warmup, between=next_round)


def mean(loss: Tensor) -> float:
    """The mean of a loss over all ranks."""
    x = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
    dist.all_reduce(x)
    return float(x) / dist.get_world_size()


def on_a_rank(args: argparse.Namespace) -> None:
    """Measure the models of the arguments; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    for name in args.model or MODELS:
        steps, load = steps_of(MODELS[name], mesh, args.system or SYSTEMS), os.getloadavg()[0]
        times = step_times(MODELS[name], steps, mesh.get_local_rank("shard"), args.rounds)
        if dist.get_rank() == 0:
            print(f"{name}: {MODELS[name]}; {args.rounds} rounds, a load of {load:.1f} before")
            print(f"  ms: {', '.join(f'{s} {1e3 * statistics.median(t):.1f}' for s, t in times.items())}")
            for a, b in PAIRS:
                if {a, b} <= times.keys():
                    r = ratio(times, a, b)
                    print(f"  {a} / {b}: {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})", flush=True)
    leave()


def main() -> None:
    """Start four ranks on two cores; on a rank under torchrun, measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: all")
    parser.add_argument("--system", choices=list(SYSTEMS), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if "RANK" in os.environ:
        on_a_rank(args)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all processes have the same two cores
    on_ranks(4, __file__, *sys.argv[1:])


if __name__ == "__main__":
    main()
