"""Checkpoints of processes: a run on 3, then 2, then 4 ranks; and the memory that saving and restoring take."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import resident
from support.models import rand, same_bits
from support.steps import loss, start
from support.worlds import gloo, simulated

import fshard
from fshard import checkpoint, optim, tree
from fshard.files.safetensors_file import CHUNK

ROWS = 24  # of all ranks
KINDS = {
    "sgd": (optim.sgd(0.1, momentum=0.9), {}),
    "adamw": (optim.adamw(0.01), {"units": None}),
    "jit": (optim.rmsprop(0.1, momentum=0.9), {}),
}


def rows_of(number: int, mesh: Any) -> dict[str, torch.Tensor]:
    """This rank's rows of a batch that is the same for all numbers of ranks."""
    num, rank = mesh.size(), mesh.get_rank()
    part = slice(rank * ROWS // num, (rank + 1) * ROWS // num)
    return {"x": rand(ROWS, 4, seed=number)[part], "gain": torch.ones(ROWS, dtype=torch.float64)[part]}


def segment(mesh: Any, dir: str, kind: str, reduction: str, first: int, last: int) -> Any:
    """Steps [first, last) of a run, which goes on from a checkpoint: the losses, and the whole parameters."""
    tx, plan = KINDS[kind]
    state, step = start(mesh, tx, fshard.DynamicLossScale(8.0), plan, loss, reduction=reduction)
    losses = []
    if first:
        state = checkpoint.restore(dir, tree.map(lambda x: x.to("meta"), state), step=first)
    step = fshard.jit(step, donate=True, backend="eager") if kind == "jit" else step
    for number in range(first, last):
        state, metrics = step(state, rows_of(number, mesh))
        losses.append(metrics["loss"])
    checkpoint.save(dir, state, last, wait=kind == "sgd").wait()
    return torch.stack(losses), fshard.gather_params(state.params)


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_then_two_then_four(tmp_path, kind):
    """A run that goes on with other numbers of processes would have other losses than the run that was not stopped."""
    losses, params = simulated(segment, str(tmp_path / "whole"), kind, "exact", 0, 6, shard=3)[0]
    for first, shard in ((0, 3), (2, 2), (4, 4)):
        ranks = gloo(segment, str(tmp_path / "parts"), kind, "exact", first, first + 2, shard=shard)
        assert all(same_bits(other, ranks[0]) for other in ranks)
        torch.testing.assert_close(ranks[0][0], losses[first : first + 2], rtol=1e-10, atol=0)
        assert first or same_bits(ranks[0][0], losses[:2])
    torch.testing.assert_close(tree.leaves(ranks[0][1]), tree.leaves(params), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "jit"])
def test_with_reduction_by_trees_to_the_bit(tmp_path, kind):
    """With reduction="tree" a run that goes on with another number of ranks would differ in a bit."""
    losses, params = simulated(segment, str(tmp_path / "whole"), kind, "tree", 0, 8, shard=1)[0]
    for first, world, shard in ((0, simulated, 4), (2, gloo, 2), (4, simulated, 1), (6, gloo, 4)):
        part = world(segment, str(tmp_path / "parts"), kind, "tree", first, first + 2, shard=shard)[0]
        assert same_bits(part[0], losses[first : first + 2])
    assert same_bits(part[1], params)


def growth(work: Any) -> int:
    """The most bytes by which this process is larger while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current resident memory
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def memory(mesh: Any, dir: str) -> tuple[int, int, int]:
    """What saving and restoring take, and the bytes of a rank's part, for a state of 200 MB on all ranks together."""
    whole = {f"w{n}": torch.empty(1_000_003, device="meta") for n in range(49)}
    plan = fshard.make_plan(whole, mesh)
    state = fshard.init_params(plan, lambda path, like: torch.full(like.shape, len(path) + 1.0))
    extra = {"x": torch.arange(10)}
    checkpoint.save(dir, {"params": tree.map(lambda x: x[:0], torch.ones(1)), **extra}, 1)  # loads what is loaded once
    most = growth(lambda: checkpoint.save(dir, {"params": state, **extra}, 2))
    share = sum(x.nbytes for x in state.tensors)
    like = {"params": tree.map(lambda x: x.to("meta"), state), **extra}
    results: list[Any] = []
    restoring = growth(lambda: results.append(checkpoint.restore(dir, like, 2)))
    assert same_bits(results[0]["params"], state)
    donating = growth(lambda: checkpoint.restore(dir, results[0], 2, donate=True))
    return most, restoring - share, donating


def test_memory_is_a_ranks_part_and_little_more(tmp_path):
    """A rank would hold more than its own part of a state while it is saved or restored."""
    for saving, restoring, donating in gloo(memory, str(tmp_path)):
        assert saving <= 5 * CHUNK
        assert restoring <= 64 << 20
        assert donating <= 64 << 20
