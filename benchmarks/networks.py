"""The networks of the benchmarks as tasks of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tasks import Part, Task, Tree, call
from torch import Tensor, nn

VOCAB = 256
Through = Callable[[Part, Sequence[Tree], Tensor], Tensor]


def _matrix(n: int, m: int) -> Tensor:
    return torch.randn(n, m) / n**0.5


def _block(p: Any, x: Tensor, heads: int) -> Tensor:
    b, t, d = x.shape
    h = F.layer_norm(x, (d,), p["norm1"], p["norm1_bias"])
    q, k, v = (h @ p["qkv"] + p["qkv_bias"]).view(b, t, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
    x = x + h @ p["proj"] + p["proj_bias"]
    h = F.layer_norm(x, (d,), p["norm2"], p["norm2_bias"])
    return x + F.gelu(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]


def in_turn(part: Part, blocks: Sequence[Tree], x: Tensor) -> Tensor:
    """Call the part for each block in turn."""
    for one in blocks:
        x = call(part, one, x)
    return x


def transformer(
    d: int, layers: int, heads: int, rows: int, length: int, words: int = VOCAB, through: Through = in_turn
) -> Task:
    """A transformer with the usual leaves: `rows` sequences of `length` words in a batch.

    It predicts the next word modulo 256: with more words the embedding grows, and the head does not. `through` calls
    the part for each block in turn.
    """
    part = partial(_block, heads=heads)

    def block() -> Tree:
        p: Tree = {"norm1": torch.ones(d), "norm1_bias": torch.zeros(d)}
        p |= {"qkv": _matrix(d, 3 * d), "qkv_bias": torch.zeros(3 * d)}
        p |= {"proj": _matrix(d, d), "proj_bias": torch.zeros(d)}
        p |= {"norm2": torch.ones(d), "norm2_bias": torch.zeros(d)}
        p |= {"up": _matrix(d, 4 * d), "up_bias": torch.zeros(4 * d)}
        return p | {"down": _matrix(4 * d, d), "down_bias": torch.zeros(d)}

    def init() -> Tree:
        p: Tree = {"embed": torch.randn(words, d) * 0.1, "pos": torch.randn(length, d) * 0.1}
        p["blocks"] = [block() for _ in range(layers)]
        return p | {"norm": torch.ones(d), "norm_bias": torch.zeros(d), "head": _matrix(d, VOCAB)}

    def loss(p: Any, tokens: Tensor) -> Tensor:
        x = through(part, p["blocks"], p["embed"][tokens[:, :-1]] + p["pos"])
        x = F.layer_norm(x, (d,), p["norm"], p["norm_bias"])
        return F.cross_entropy((x @ p["head"]).flatten(0, 1), tokens[:, 1:].flatten() % VOCAB)

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randint(0, words, (rows, length + 1), generator=generator)

    return Task(init, loss, batch, "blocks", part, peer=("transformer", {"heads": heads}))


def deep(layers: int, d: int, rows: int) -> Task:
    """A stack of small linear layers, whose time is mostly overhead: `rows` rows of `d` numbers in a batch."""

    def part(p: Any, x: Tensor) -> Tensor:
        return F.linear(x, p["w"], p["b"])

    def init() -> Tree:
        return {"layers": [{"w": torch.randn(d, d) / d**0.5, "b": torch.zeros(d)} for _ in range(layers)]}

    def loss(p: Any, x: Tensor) -> Tensor:
        for one in p["layers"]:
            x = call(part, one, x)
        return x.square().mean()

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(rows, d, generator=generator)

    return Task(init, loss, batch, "layers", part, peer=("deep", {}))


def convolutional(width: int, layers: int, groups: int, rows: int, size: int, classes: int = 10) -> Task:
    """A residual net of 3 x 3 convolutions and group norms: `rows` images of `size` x `size` pixels in a batch."""

    def kernel(n: int) -> Tensor:
        return torch.randn(width, n, 3, 3) / (9 * n) ** 0.5

    def norm(p: Any, name: str, x: Tensor) -> Tensor:
        return F.group_norm(x, groups, p[name], p[f"{name}_bias"])

    def part(p: Any, x: Tensor) -> Tensor:
        h = F.conv2d(F.relu(norm(p, "norm1", x)), p["conv1"], padding=1)
        return x + F.conv2d(F.relu(norm(p, "norm2", h)), p["conv2"], padding=1)

    def block() -> Tree:
        p: Tree = {"norm1": torch.ones(width), "norm1_bias": torch.zeros(width), "conv1": kernel(width)}
        return p | {"norm2": torch.ones(width), "norm2_bias": torch.zeros(width), "conv2": kernel(width)}

    def init() -> Tree:
        p: Tree = {"stem": kernel(3), "blocks": [block() for _ in range(layers)], "norm": torch.ones(width)}
        return p | {"norm_bias": torch.zeros(width), "head": _matrix(width, classes), "bias": torch.zeros(classes)}

    def loss(p: Any, batch: dict[str, Tensor]) -> Tensor:
        x = F.conv2d(batch["images"], p["stem"], padding=1)
        for one in p["blocks"]:
            x = call(part, one, x)
        x = F.relu(norm(p, "norm", x)).mean((2, 3))
        return F.cross_entropy(x @ p["head"] + p["bias"], batch["labels"])

    def batch(generator: torch.Generator) -> dict[str, Tensor]:
        labels = torch.randint(0, classes, (rows,), generator=generator)
        return {"images": torch.randn(rows, 3, size, size, generator=generator), "labels": labels}

    return Task(init, loss, batch, "blocks", part, peer=("convolutional", {"groups": groups}))


def experts(d: int, layers: int, count: int, rows: int, length: int) -> Task:
    """A mixture of `count` experts in each layer, the leaves of each its own: `rows` x `length` words in a batch.

    The best expert of a word is weighted by its probability, the others by zero. All experts compute all words, so that
    all ranks run the same program.
    """

    def part(p: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (d,), p["norm"], p["norm_bias"])
        probabilities = (h @ p["router"]).softmax(-1)
        weights = probabilities * F.one_hot(probabilities.argmax(-1), count)
        for i, expert in enumerate(p["experts"]):
            x = x + weights[..., i : i + 1] * (F.gelu(h @ expert["up"]) @ expert["down"])
        return x

    def layer() -> Tree:
        each = [{"up": _matrix(d, 2 * d), "down": _matrix(2 * d, d)} for _ in range(count)]
        return {"norm": torch.ones(d), "norm_bias": torch.zeros(d), "router": _matrix(d, count), "experts": each}

    def init() -> Tree:
        p: Tree = {"embed": torch.randn(VOCAB, d), "layers": [layer() for _ in range(layers)]}
        return p | {"head": _matrix(d, VOCAB)}

    def loss(p: Any, tokens: Tensor) -> Tensor:
        x = p["embed"][tokens[:, :-1]]
        for one in p["layers"]:
            x = call(part, one, x)
        return F.cross_entropy((x @ p["head"]).flatten(0, 1), tokens[:, 1:].flatten())

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randint(0, VOCAB, (rows, length + 1), generator=generator)

    return Task(init, loss, batch, "layers", part, peer=("experts", {"count": count}))


def gpt2(d: int, layers: int, heads: int, rows: int, length: int, words: int) -> Task:
    """GPT-2 of transformers without dropout, its embeddings tied; fshard has it through `functionalize`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from fshard.module import functionalize

    class Loss(GPT2LMHeadModel):
        """The model; its forward computes the loss of a batch."""

        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens, labels=tokens).loss

    def build() -> nn.Module:
        sizes = {"n_embd": d, "n_layer": layers, "n_head": heads, "n_positions": length, "vocab_size": words}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        return Loss(GPT2Config(**sizes, **none, bos_token_id=0, eos_token_id=0))

    apply, _, buffers = functionalize(build())

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return apply(p, buffers, tokens)[0]

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randint(0, words, (rows, length), generator=generator)

    return Task(lambda: functionalize(build())[1], loss, batch, "transformer.h", build=build)
