"""The models that `make bench` measures, and the same models in sizes for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from networks import convolutional, deep, experts, gpt2, transformer
from tasks import Task

MODELS: dict[str, Callable[[], Task]] = {
    "S": partial(transformer, 256, 4, 4, 8, 128),
    "M": partial(transformer, 768, 8, 12, 2, 128),
    "T": partial(deep, 100, 64, 16),
    "wide": partial(transformer, 128, 2, 2, 8, 64, 65536),
    "conv": partial(convolutional, 128, 4, 8, 16, 8),
    "experts": partial(experts, 256, 4, 8, 4, 32),
    "gpt2": partial(gpt2, 256, 4, 4, 4, 64, 5000),
}
# widths that two ranks do not divide evenly
TINY: dict[str, Callable[[], Task]] = {
    "S": partial(transformer, 18, 2, 3, 4, 5),
    "M": partial(transformer, 22, 3, 1, 1, 7),
    "T": partial(deep, 5, 7, 4),
    "wide": partial(transformer, 6, 1, 2, 4, 5, 301),
    "conv": partial(convolutional, 6, 2, 3, 4, 5),
    "experts": partial(experts, 9, 2, 3, 4, 5),
    "gpt2": partial(gpt2, 18, 2, 3, 4, 7, 51),
}
DESCRIPTIONS = {
    "S": "a transformer of 256 words: width 256, 4 layers, 8 x 128 words for each rank",
    "M": "a larger one: width 768, 8 layers, 2 x 128 words",
    "T": "100 linear layers of 64 x 64 with bias, each a unit of its own, 16 rows",
    "wide": "a transformer whose embedding has 65,536 rows: width 128, 2 layers, 8 x 64 words",
    "conv": "a residual net of convolutions and group norms: 128 channels, 4 blocks, 16 images of 8 x 8 pixels",
    "experts": "4 layers of 8 experts each, the best of which counts: width 256, 4 x 32 words",
    "gpt2": "GPT-2 of transformers as a module: width 256, 4 layers, 5,000 words, 4 x 64 words",
}


def task_of(name: str, tiny: bool = False) -> Task:
    """The model of a name; with `tiny` in the size for tests."""
    return replace((TINY if tiny else MODELS)[name](), name=name, tiny=tiny)
