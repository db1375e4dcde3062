"""DPO (Rafailov et al., 2023) of a small language model: the sharded reference model is an argument of the step.

    python examples/dpo.py                                # two simulated ranks
    torchrun --nproc-per-node=2 examples/dpo.py           # two processes

The model first learns to count, up or down as often. Pairs then prefer counting up. Every rank has other prompts. The
step is also run as one graph (`fshard.jit`), which must give the same parameters.
"""

from typing import Any

import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

import fshard
from fshard import optim, tree

FIRST_STEPS, STEPS, ROWS = 60, 20, 32  # the rows are those of one rank
VOCAB, LENGTH, WIDTH, HEADS = 16, 8, 32, 4
BETA = 0.1  # how much a distance to the reference costs


def pairs(rows: int) -> dict[str, Tensor]:
    """Two answers to each prompt of one token: counting up from it, and counting down. Both are (rows, LENGTH)."""
    prompts, steps = torch.randint(VOCAB, (rows, 1)), torch.arange(LENGTH)
    return {"chosen": (prompts + steps) % VOCAB, "rejected": (prompts - steps) % VOCAB}


def new_params() -> Any:
    def weights(*shape: int) -> Tensor:
        return torch.randn(shape) / shape[0] ** 0.5

    blocks = [
        {"qkv": weights(WIDTH, 3 * WIDTH), "up": weights(WIDTH, 4 * WIDTH), "down": weights(4 * WIDTH, WIDTH)}
        for _ in range(2)
    ]
    embed = torch.randn(VOCAB + LENGTH, WIDTH) / WIDTH**0.5
    return {"embed": embed[:VOCAB], "place": embed[VOCAB:], "blocks": blocks}


def log_probability(params: Any, tokens: Tensor) -> Tensor:
    """The logarithm of the probability of a row after its first token: (rows, LENGTH) -> (rows,)."""
    x = params["embed"][tokens] + params["place"]
    for block in params["blocks"]:
        q, k, v = (F.layer_norm(x, (WIDTH,)) @ block["qkv"]).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.gelu(F.layer_norm(x, (WIDTH,)) @ block["up"]) @ block["down"]
    scores = F.layer_norm(x, (WIDTH,)) @ params["embed"].T
    return -F.cross_entropy(scores[:, :-1].mT, tokens[:, 1:], reduction="none").sum(1)


def first_loss(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    return fshard.Mean(-log_probability(params, tokens).sum(), len(tokens))


def dpo_loss(params: Any, batch: dict[str, Tensor], reference: Any) -> fshard.Mean:
    def reward(tokens: Tensor) -> Tensor:
        return BETA * (log_probability(params, tokens) - log_probability(reference, tokens))

    margin = reward(batch["chosen"]) - reward(batch["rejected"])
    return fshard.Mean(-F.logsigmoid(margin).sum(), len(margin))


def accuracy(params: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    """The share of pairs in which the chosen answer has the higher probability."""
    right = log_probability(params, batch["chosen"]) > log_probability(params, batch["rejected"])
    return fshard.Mean(right.float().sum(), len(right))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    plan, tx = fshard.make_plan(params, mesh), optim.adamw(3e-3)
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(first_loss, tx)
    torch.manual_seed(1 + mesh.get_rank())  # other data on every rank
    for _ in range(FIRST_STEPS):
        state, _ = step(state, pairs(ROWS))

    reference = state.params  # a value, which no step changes: with donate=True it would have to be a copy
    step = fshard.train_step(dpo_loss, tx)
    graph = fshard.jit(step, backend="eager")  # without `backend` Inductor compiles the graph
    state = other = fshard.init_state(reference, tx)
    for _ in range(STEPS):
        batch = pairs(ROWS)
        state, _ = step(state, batch, reference)
        other, _ = graph(other, batch, reference)
    new = pairs(500)
    before, after = (fshard.evaluate(accuracy)(params, new) for params in (reference, state.params))
    change, difference = (
        optim.global_norm(tree.map(torch.sub, state.params, params)) for params in (reference, other.params)
    )
    if mesh.get_rank() == 0:
        print(f"accuracy of preferences: before {before:.3f}, after {after:.3f}")
        print(f"difference of a jitted step relative to the change: {difference / change:.0e}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
