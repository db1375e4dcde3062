"""Rows that are cut at other places, as views of equal sizes, and leaves of owners."""

import pickle
import random
from typing import Any

import torch
from support.worlds import simulated

import fshard
from fshard.layout import pieces
from fshard.whole import moves


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


def test_leaves_of_owners_are_gathered() -> None:
    """What an owner computed would not reach the others; or a state could not be pickled, or take ranks with it."""
    params = {"w": torch.arange(6.0), "b": torch.ones(3)}

    def run(mesh: Any) -> None:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        layout = pieces.layout_of(sharded)
        again = pickle.loads(pickle.dumps(layout))
        assert again == layout
        assert again.mesh is None
        owned = moves.collect(sharded, moves.owned(layout, mesh, layout.axes))
        whole = fshard.gather_params(owned)
        assert all(torch.equal(whole[name], params[name]) for name in params)

    simulated(run, shard=2)
