"""Kept and moved between processes: the bits of simulated ranks, also where a part of the processes goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.models import same_bits
from support.survivors import NOTE, Trail, batch_of, joined, new_state, new_step, train, whole
from support.worlds import gloo
from torch.distributed.device_mesh import DeviceMesh

import fshard
from fshard import checkpoint, elastic
from fshard.core.tree import Tree

STEPS = 4


def three_go_on(mesh: Any, kind: str, dead: int) -> tuple[Tree, int] | None:
    """Two steps on four processes; then those that are left train on process groups of their own."""
    held: list[elastic.Kept] = []
    train(mesh, held, kind, 0, 2, Trail())
    left = [rank for rank in range(4) if rank != dead]
    group = dist.new_group(left)
    if mesh.get_rank() == dead:
        return None
    rest = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    trail = Trail(begun=True)
    state = train(rest, held, kind, 1, STEPS, trail)
    assert trail.rounds[1] == (3, (0, 2))
    return whole(state), held[-1].key[1]


@pytest.mark.parametrize(("kind", "dead"), [("zero3", 1), ("zero1", 0), ("donated", 3)])
def test_three_of_four_processes_go_on(kind: str, dead: int) -> None:
    """Messages between processes would bring other bytes, or memory that is lent be written to."""
    expected = joined(kind, ((4, 0), (3, 2)), STEPS)
    results = gloo(three_go_on, kind, dead, shard=4)
    assert results[dead] is None
    for result in results[:dead] + results[dead + 1 :]:
        assert result is not None
        assert same_bits(result, (expected, STEPS))


def to_other_plans(mesh: Any, folder: str) -> None:
    """A state on two axes, kept along each, moved to other plans, and restored from a checkpoint."""
    state = new_state(mesh, "two axes")
    state, _ = new_step(mesh, "two axes")(state, batch_of(0, *fshard.rank_and_size(mesh)))
    checkpoint.save(folder, state, 1)
    for axis in ("replicate", "shard"):
        kept = elastic.keep({"train": state, **NOTE}, 1, axis=axis)
        for kind in ("ddp", "hsdp", "zero3"):
            like = new_state(mesh, kind)
            got = elastic.move([kept], {"train": like, "tag": "", "n": 0})
            assert same_bits(got["train"], checkpoint.restore(folder, like))
            assert same_bits(whole(elastic.replan(state, like)), whole(state))
    with pytest.raises(fshard.MismatchError, match="'position' = 1"):
        elastic.keep({"train": state, "position": mesh.get_rank()}, 2)


def test_processes_on_two_axes(tmp_path: Path) -> None:
    """Elements would go through the wrong processes."""
    gloo(to_other_plans, str(tmp_path), shard=2, replicate=2)
