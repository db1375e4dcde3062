"""Checkpoints of a part of the ranks, of several meshes, of none; and what a save that fails leaves behind."""

import errno
import os
import threading
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.worlds import gloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fshard
from fshard import checkpoint
from fshard.files.folders import LocalFolder
from fshard.testing import simulate


def stages(mesh: Any, directory: str) -> None:
    """Two groups of two ranks have parameters of their own: each group saves them in its directory."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage = whole.get_local_rank("stage")
    params = {"w": torch.arange(7.0) + 100 * stage}
    plan = fshard.make_plan(params, whole["shard"])
    state, place = {"params": fshard.shard_params(params, plan)}, f"{directory}/{stage}"
    for step, wait in enumerate((True, False)):
        checkpoint.save(place, state, step, wait=wait).wait()
    assert checkpoint.steps(place) == [0, 1]
    like = {"params": fshard.shard_params({"w": torch.zeros(7)}, plan)}
    assert same_bits(fshard.gather_params(checkpoint.restore(place, like)["params"]), params)
    # the first rank of the group, whatever its number in the job, has the state dict and writes the file
    got = fshard.state_dict(state["params"], rank=0)
    assert same_bits(got, params if whole.get_local_rank("shard") == 0 else {})
    checkpoint.save_safetensors(f"{place}/hf", state["params"])
    loaded = checkpoint.load_safetensors(f"{place}/hf", plan)
    assert same_bits(fshard.gather_params(loaded), params)
    turned = DeviceMesh("cpu", whole.mesh.flip(1), mesh_dim_names=("stage", "shard"))  # the same ranks in another order
    others = [fshard.shard_params(params, fshard.make_plan(params, other, params_over=())) for other in (whole, turned)]
    for other in (state["params"], others[1]):
        for call in (lambda x: checkpoint.save(place, x, 2), lambda x: checkpoint.restore(place, x)):
            with pytest.raises(
                ValueError, match=r"leaf 'params': expected all leaves on one mesh.*a directory of their own"
            ):
                call({"all": others[0], "params": other})


def test_groups_of_ranks_save_their_own(tmp_path):
    """A group without the first process of the job would save nothing, or two groups' values be mixed, in silence."""
    gloo(stages, str(tmp_path), shard=4)


@pytest.mark.parametrize("wait", [True, False])
def test_a_state_without_anything_sharded(wait, tmp_path):
    """Each rank would write over the others' values."""

    def on_a_rank(mesh):
        rank = mesh.get_rank()
        state = {"position": rank * 10, "same": torch.ones(2), "own": torch.arange(3) + rank}
        checkpoint.save(tmp_path, state, 1, wait=wait, mesh=mesh).wait()
        like = {"position": 0, "same": torch.zeros(2), "own": torch.zeros(3, dtype=torch.int64)}
        restored = checkpoint.restore(tmp_path, like, mesh=mesh)
        assert restored["position"] == rank * 10
        assert same_bits([restored["same"], restored["own"]], [state["same"], state["own"]])

    simulate(on_a_rank, shard=3)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    """A save in the background would go to another directory, over what is there."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    saving = checkpoint.save("run", {"w": torch.ones(300_000)}, 1, wait=False)
    monkeypatch.chdir(tmp_path / "other")
    saving.wait()
    assert checkpoint.steps(tmp_path / "run") == [1]
    assert not checkpoint.steps("run")


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_fails_leaves_no_files(wait, tmp_path, monkeypatch):
    """The files of the other ranks would fill the disk, or those of the earlier checkpoint be deleted."""
    params, folder = {"w": torch.arange(60_000.0)}, tmp_path / "step-000000000001"
    write = LocalFolder.write

    def sharded(mesh):
        return fshard.shard_params(params, fshard.make_plan(params, mesh))

    def full(self, name, chunks):
        if "rank-00001" in name:
            raise OSError(errno.ENOSPC, "no space left on device", name)
        write(self, name, chunks)

    def fails(mesh):
        with pytest.raises((OSError, checkpoint.CheckpointError), match=r"(?i)no space left on device"):
            checkpoint.save(tmp_path, sharded(mesh), 1, wait=wait).wait()

    simulate(lambda mesh: checkpoint.save(tmp_path, sharded(mesh), 1), shard=2)
    names = sorted(os.listdir(folder))
    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", full)
        simulate(fails, shard=2)
    assert sorted(os.listdir(folder)) == names
    restored = simulate(lambda mesh: fshard.gather_params(checkpoint.restore(tmp_path, sharded(mesh))), shard=2)
    assert same_bits(restored[0], params)


def test_an_interrupt_while_a_save_begins(tmp_path, monkeypatch):
    """A thread would wait for the record of a save that has not begun, and the process never end."""
    start, started = threading.Thread.start, []

    def interrupted(self):
        if started:
            raise KeyboardInterrupt
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {"w": torch.ones(3)}, 1, wait=False)
    monkeypatch.undo()
    started[0].join(60)
    assert not started[0].is_alive()
    checkpoint.save(tmp_path, {"w": torch.ones(3)}, 2, wait=False).wait()
    assert checkpoint.steps(tmp_path) == [2]


def test_a_fork_does_not_wait_for_a_save_of_its_parent(tmp_path, monkeypatch):
    """A forked process, which has no threads, would wait for ever."""
    saving = checkpoint.save(tmp_path, {"w": torch.ones(3)}, 1, wait=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        patch.setattr("concurrent.futures.Future.exception", lambda self: pytest.fail("the fork waits"))
        saving.wait()
    saving.wait()
    assert checkpoint.steps(tmp_path) == [1]


def test_donated_tensors_that_are_conjugated_or_of_inference(tmp_path):
    """A lazily conjugated tensor would not be read into, and be zero."""
    z = torch.tensor([1 + 2j, 3 + 4j])
    checkpoint.save(tmp_path, {"z": z, "x": z.imag.clone()}, 1)
    with torch.inference_mode():
        fresh = torch.zeros(2)
    like = {"z": torch.zeros(2, dtype=torch.complex64).conj(), "x": fresh}
    assert same_bits(checkpoint.restore(tmp_path, like, donate=True), {"z": z, "x": z.imag.clone()})
