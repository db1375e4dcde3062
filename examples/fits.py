"""Does a model of 7 billion parameters fit on 8 GPUs of 80 GB? Asked on a laptop: no GPU, no weights, no processes.

    python examples/fits.py

The step is traced on `meta` for a mesh of 8 ranks that do not exist (docs/compile.md). All blocks of the model are
equal, so each figure grows by the same amount with every block: the step is traced with few blocks, and the figures are
continued to 32. Not counted are the CUDA context, the buffers of NCCL, and what the allocator cannot use.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard

WIDTH, HEADS, HIDDEN, VOCAB, LAYERS = 4096, 32, 11008, 32000, 32  # of Llama 7B
RANKS, TOKENS, GPU = 8, 2048, 80e9  # tokens of a rank in a step; bytes of a GPU
STRATEGIES = {
    "DDP": {"params_over": (), "grads_over": (), "state_over": ()},
    "ZeRO-1": {"params_over": (), "grads_over": ()},
    "FULL_SHARD": {},
}


def new_params(layers: int) -> Any:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    def block() -> dict[str, Tensor]:
        attention = {"norm": empty(WIDTH), "qkv": empty(3 * WIDTH, WIDTH), "out": empty(WIDTH, WIDTH)}
        return attention | {"norm2": empty(WIDTH), "gate_up": empty(2 * HIDDEN, WIDTH), "down": empty(WIDTH, HIDDEN)}

    ends = {"embed": empty(VOCAB, WIDTH), "norm": empty(WIDTH), "head": empty(VOCAB, WIDTH)}
    return ends | {"blocks": [block() for _ in range(layers)]}


def block(p: Any, x: Tensor) -> Tensor:  # without rotary embeddings, which have no parameters
    h = F.rms_norm(x, (WIDTH,), p["norm"])
    q, k, v = F.linear(h, p["qkv"]).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(heads.transpose(1, 2).reshape(x.shape), p["out"])
    gate, up = F.linear(F.rms_norm(x, (WIDTH,), p["norm2"]), p["gate_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, p["down"])


def loss(params: Any, tokens: Tensor) -> Tensor:
    x = F.embedding(tokens, params["embed"])
    for p in params["blocks"]:
        x = checkpoint(block, p, x, use_reentrant=False)  # the backward computes each block again
    scores = F.linear(F.rms_norm(x, (WIDTH,), params["norm"]), params["head"])
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def traced(strategy: str, layers: int) -> Counter[str]:
    """The bytes on a rank at the peak of a step, by purpose, and those that it sends."""
    params = new_params(layers)
    over: Any = STRATEGIES[strategy]
    mesh, policy = fshard.AbstractMesh(shard=RANKS), "storage=f32,compute=bf16,reduce=f32"
    plan = fshard.make_plan(params, mesh, policy=policy, **over)
    tx = fshard.optim.adamw(1e-4)
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params)
    step = fshard.jit(fshard.train_step(loss, tx, clip_norm=1.0), donate=True)
    lowered = step.lower(state, torch.empty(1, TOKENS, dtype=torch.long, device="meta"))
    return Counter({**lowered.memory().by, "sent": sum(row.bytes for row in lowered.collectives())})


def continued(strategy: str, layers: int, few: int = 4, more: int = 5) -> Counter[str]:
    """`traced` for any number of layers, from two small numbers of them.

    Not from fewer than four: with one or two, the peak is at another place, where the head has its gradient.
    """
    first, second = traced(strategy, few), traced(strategy, more)
    return Counter({k: first[k] + (second[k] - first[k]) * (layers - few) // (more - few) for k in first | second})


def main() -> None:
    names = ("parameters", "gradients", "optimizer", "activations", "gathered")
    table = Table(
        "strategy",
        *names,
        "peak",
        "fits",
        "sent",
        title=f"GB on each of {RANKS} ranks at the peak of a step, and sent by each in a step",
    )
    for strategy in STRATEGIES:
        by = continued(strategy, LAYERS)
        sent, peak = by.pop("sent"), by.total()
        cells = [f"{x / 1e9:.1f}" for x in (*(by[name] for name in names), peak)]
        table.add_row(strategy, *cells, "yes" if peak < GPU else "no", f"{sent / 1e9:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
