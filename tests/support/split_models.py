"""Models of split leaves, made of the functions that docs/split_leaves.md shows: a model's leaves, split and loss."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fshard.core.tree import Tree

PAGE = Path(__file__).parents[2] / "docs" / "split_leaves.md"
WORDS, WIDTH, LENGTH = 7, 6, 6  # of a vocabulary of words, 3, 3 and 1 on three ranks; the length is that of a row


@cache
def page() -> SimpleNamespace:
    """The imports, functions and splits of the page; its programs are not run."""
    scope: dict[str, Any] = {}
    text = PAGE.read_text()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]  # errors then name lines of the page
        body = [x for x in ast.parse(code).body if _defines(x)]
        exec(compile(ast.Module(body, []), str(PAGE), "exec"), scope)
    scope["VOCABULARY"] = WORDS
    return SimpleNamespace(**scope)


def _defines(statement: ast.stmt) -> bool:
    """Whether a statement is an import, a function, or one of the constants that models are made of."""
    constant = re.match(r"(EXPERTS|mlp_split|attention_split|flat_split) = ", ast.unparse(statement))
    return bool(constant) or isinstance(statement, ast.FunctionDef | ast.Import | ast.ImportFrom)


@dataclass(frozen=True)
class SplitModel:
    """A model: its whole leaves, how they are split over `axis`, and `loss(mesh, data)`, plain without a mesh.

    `data` are the axes along which batches differ, `batch(rows, seed)` draws rows for all ranks.
    """

    axis: str
    params: Callable[[], Tree]
    split: dict[str, tuple[Any, ...]]
    loss: Callable[[Any, tuple[str, ...]], Callable[[Tree, Tensor], Any]]
    batch: Callable[[int, int], Tensor]
    differ: bool = False  # whether batches differ along `axis`


def drawn(seed: int) -> Callable[..., Tensor]:
    """A function that draws leaves of the shapes it is given, float64."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) / 2


def _layer(draw: Callable[..., Tensor], heads: int, hidden: int, gated: bool) -> Tree:
    gate_up, up = {"gate_up": draw(WIDTH, 2 * hidden)}, {"up": draw(WIDTH, hidden), "up_bias": draw(hidden)}
    one_head = {"k": draw(WIDTH, 3), "v": draw(WIDTH, 3)}
    return {
        **{"norm1": 1 + draw(WIDTH), "q": draw(WIDTH, heads, 3), "o": draw(heads, 3, WIDTH), **one_head},
        **{"norm2": 1 + draw(WIDTH), **(gate_up if gated else up), "down": draw(hidden, WIDTH), "bias": draw(WIDTH)},
    }


def transformer(
    by_sequence: bool = False, tied: bool = False, gated: bool = False, again: bool = False, rate: float = 0.0
) -> SplitModel:
    """Two layers of other sizes: with 4 heads, 7 words or a hidden layer of 4, three ranks have parts of 2, 2 and 0."""
    it = page()
    layer = partial(it.sequence_block if by_sequence else it.block, mlp=it.gated_mlp if gated else it.mlp)
    layer = partial(layer, rate=rate) if rate else layer
    layer = partial(checkpoint, layer, use_reentrant=False) if again else layer
    split = {**it.mlp_split, **it.attention_split, "embed": ("tensor", 0), "head": ("tensor", 0)}
    for name in ("up", "up_bias") if gated else ("gate_up",):
        del split[f"**.{name}"]

    def params() -> Tree:
        draw = drawn(0)
        embed = draw(WORDS, WIDTH)
        ends = {"embed": embed, "head": embed if tied else draw(WORDS, WIDTH), "norm": 1 + draw(WIDTH)}
        layers = [_layer(draw, 4, 5, gated), _layer(draw, 3, 4, gated)]
        return {**ends, "positions": draw(LENGTH, WIDTH), "layers": layers}

    def batch(rows: int, seed: int) -> Tensor:  # -1 is no word, and not counted
        return torch.randint(-1, WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    return SplitModel("tensor", params, split, lambda mesh, _: it.model(mesh, layer, by_sequence), batch)


def sparse(lean: float = 0.0, top: int = 1) -> SplitModel:
    """Two layers of four experts, of which the last two get no tokens if `lean` is large."""
    it = page()

    def layer(draw: Callable[..., Tensor], hidden: int) -> Tree:
        two = {"up": draw(it.EXPERTS, WIDTH, hidden), "down": draw(it.EXPERTS, hidden, WIDTH)}
        far = torch.tensor([0.0, 0.0, lean, lean], dtype=torch.float64)
        return {"norm": 1 + draw(WIDTH), "router": draw(WIDTH, it.EXPERTS), "lean": draw(it.EXPERTS) - far, **two}

    def params() -> Tree:
        draw = drawn(1)
        return {"embed": draw(WORDS, WIDTH), "layers": [layer(draw, 5), layer(draw, 3)]}

    def batch(rows: int, seed: int) -> Tensor:
        return torch.randint(WORDS, (rows, 2), generator=torch.Generator().manual_seed(seed))

    split = {"**.up": ("expert", 0), "**.down": ("expert", 0)}
    return SplitModel("expert", params, split, partial(it.sparse_model, top=top), batch, differ=True)


def slope() -> SplitModel:
    """A loss of the gradient of an MLP in its input, by torch.func inside of the loss."""
    it = page()

    def params() -> Tree:
        draw = drawn(2)
        up, down = {"up": draw(WIDTH, 5), "up_bias": draw(5)}, {"down": draw(5, WIDTH), "bias": draw(WIDTH)}
        return {"layers": [{**up, **down}]}

    def loss(mesh: Any, _: tuple[str, ...]) -> Callable[[Tree, Tensor], Any]:
        return lambda p, x: it.matching(mesh)(p["layers"][0], x)

    split = {f"**.{name}": how for name, how in it.flat_split.items()}
    return SplitModel("tensor", params, split, loss, lambda rows, seed: drawn(seed)(rows, WIDTH))


def long(way: str) -> SplitModel:
    """Attention over the words of all ranks of "context", of which each has some; no leaf is split."""
    it = page()

    def params() -> Tree:
        draw = drawn(3)
        layer = {"o": draw(6, 3, WIDTH)} | {name: draw(WIDTH, 6, 3) for name in "qkv"}
        return {"embed": draw(WORDS, WIDTH), "layers": [layer]}

    def loss(mesh: Any, _: tuple[str, ...]) -> Callable[[Tree, Tensor], Any]:
        rank, ranks = it.rank_and_size(mesh, "context")
        plain = it.long_model(mesh, it.plainly if mesh is None else getattr(it, way))

        def of_part(p: Tree, words: Tensor) -> Any:
            parts = {"words": words[:, :-1], "targets": words[:, 1:]}
            leaves = {"embed": p["embed"]} | {name: p["layers"][0][name] for name in "qkvo"}
            return plain(leaves, {name: x.chunk(ranks, 1)[rank] for name, x in parts.items()})

        return of_part

    def batch(rows: int, seed: int) -> Tensor:
        return torch.randint(WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    return SplitModel("context", params, {}, loss, batch)


def stages() -> SplitModel:
    """A pipeline of five layers, which has one micro-batch, because ranks have any number of rows."""
    it = page()

    def params() -> Tree:
        draw = drawn(4)
        layers = {"up": draw(5, WIDTH, 5), "down": draw(5, 5, WIDTH)}
        return {"embed": draw(WORDS, WIDTH), "head": draw(WORDS, WIDTH), "layers": layers}

    split = {"layers.**": ("stage", 0)}
    return SplitModel("stage", params, split, lambda mesh, _: it.pipeline(mesh, 1), sparse().batch)


MODELS = {
    "replicated": transformer(),
    "sequence": transformer(by_sequence=True),
    "tied": transformer(tied=True),
    "gated, again": transformer(gated=True, again=True),
    "sequence, tied, again": transformer(by_sequence=True, tied=True, again=True),
    "dropout, again": transformer(rate=0.2, again=True),
    "slope": slope(),
    "gathered": long("gathered"),
    "by heads": long("by_heads"),
    "ring": long("ring"),
    "ring, again": long("ring_again"),
    "stages": stages(),
    "experts": sparse(),
    "two experts": sparse(top=2),
    "experts without rows": sparse(lean=60.0),
}
