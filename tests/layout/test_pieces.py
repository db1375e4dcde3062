"""Rows that are cut at other places, as views of equal sizes."""

import random

import torch

from fshard.layout import pieces


def test_rows_are_cut_alike() -> None:
    """Parameters would be updated with the gradients of other elements, or a rank without a part would fail."""
    draw = random.Random(0)
    for _ in range(300):
        numel = draw.randrange(8)
        rows, cut = [torch.arange(numel) + 100 * i for i in range(3)], list[list[torch.Tensor]]()
        for row in rows:
            ends = sorted(draw.choices(range(numel + 1), k=draw.randrange(4)))
            sizes = [end - begin for begin, end in zip([0, *ends], [*ends, numel], strict=True)]
            cut.append([*row.split(sizes)])
        alike = pieces._cut_alike(cut)
        assert len({tuple(map(len, views)) for views in alike}) == 1
        for row, views in zip(rows, alike, strict=True):
            assert torch.equal(torch.cat([row[:0], *views]), row)
