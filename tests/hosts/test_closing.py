"""Meshes that are closed: ranks that wait for a rank hear that it has left, and nothing stays open behind it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import leaving
from support.heard import NUM, values
from support.leaving import BoomError
from support.worlds import fates, gloo, simulated

import fshard

SHAPES = [(1, 2), (1, 3), (2, 2)]  # ranks along "replicate" and "shard"
CASES = [(over, way) for over in leaving.OVER for way in leaving.WAYS]


def hear(path: Path, shape: tuple[int, int], over: str, way: str, bad: int, checked: bool) -> None:
    """Assert that all ranks but one get an error; those with a connection to this one are told who it is."""
    replicate, shard = shape
    ranks = fates(leaving.leaves, str(path), over, way, bad, checked, shard=shard, replicate=replicate)
    code = {"kill": -9, "term": -15}.get(way, 0)
    assert [rank.exitcode for rank in ranks] == [code * (number == bad) for number in range(len(ranks))]
    said = {number: str(rank.value) for number, rank in enumerate(ranks) if number != bad}
    assert all(text.startswith("MismatchError: ") for text in said.values()), said
    # with gloo a rank may hear first of another one that has heard
    assert any(f"rank {bad} " in text for text in said.values()) or (over != "host" and replicate > 1), said
    if way == "error":
        assert ranks[bad].value == "BoomError: boom"
        assert checked or over != "host" or any("it raised BoomError: boom at" in text for text in said.values()), said
    if way == "close":
        assert "this rank has closed the mesh at" in str(ranks[bad].value)


@pytest.mark.parametrize(("over", "way"), CASES)
def test_ranks_hear_of_a_rank_that_leaves(over: str, way: str, tmp_path: Path) -> None:
    """They would wait for half an hour, as the error that all keep has the plan and its process groups."""
    number = CASES.index((over, way))
    is_checked = (number + leaving.OVER.index(over)) % 2 == 1  # each way with and without a check
    hear(tmp_path / "store", SHAPES[number % 3], over, way, number % 2, is_checked)


@pytest.mark.parametrize("seed", range(NUM))
def test_ranks_hear_of_any_rank_that_leaves(seed: int, tmp_path: Path) -> None:
    """A rare order of events would let a rank wait."""
    r = random.Random(seed)
    shape = r.choice([*SHAPES, (1, 4)])
    bad = r.randrange(shape[0] * shape[1])
    hear(tmp_path / "store", shape, *r.choice(CASES), bad, checked=r.random() < 0.5)


def test_nothing_stays_open() -> None:
    """Each round of a run that loses ranks would leave descriptors and memory, while something keeps its plan."""
    for counts, are_equal in gloo(leaving.closed_again_and_again):
        assert len({*counts}) == 1, counts
        assert counts[0][1] == 0
        assert are_equal


def test_a_new_mesh_of_the_same_processes(tmp_path: Path) -> None:
    """A run could not go on without a rank that has left, nor a notebook after an error."""
    assert gloo(leaving.a_new_mesh, str(tmp_path / "world"), shard=3) == [[True] * 5] * 3


def test_calls_on_a_closed_mesh() -> None:
    """They would hang, or be sent over connections that other ranks believe closed."""
    for found in values(fates(leaving.what_is_closed)):
        assert "thread" in found.pop("thread"), found
        assert found.pop("another mesh") == "no error; no error"
        assert found.pop("under way").count("this rank has closed the mesh at") == 2
        assert all("this rank has closed the mesh at" in text for text in found.values()), found
        assert all(text.startswith("RuntimeError: axis 'shard' of a mesh") for text in [found["reduce"], found["plan"]])


def test_a_part_of_a_mesh(tmp_path: Path) -> None:
    """Ranks that wait for this one along another axis, or over another mesh of its groups, would wait for ever."""
    first, second, third, last = values(fates(leaving.of_two_axes, str(tmp_path / "store"), replicate=2))
    assert first == "no error"
    assert "rank 1 of axis 'replicate' has gone (it has closed the mesh at" in second
    assert "rank 1 of axis 'shard' has gone (it has closed the mesh at" in third
    assert last.count("this rank has closed the mesh at") == 2


def test_ranks_of_two_hosts(tmp_path: Path) -> None:
    """A rank whose link is closed would let those on other hosts wait for it."""
    first, second, third, _ = (
        str(rank.value) for rank in fates(leaving.of_two_hosts, str(tmp_path / "store"), replicate=2)
    )
    assert "rank 1 of axis 'replicate' has gone, or did not answer" in first
    assert "rank 1 of axis 'replicate' has gone, or did not answer" in second
    assert "rank 1 of axis 'shard' has gone (" in third


@pytest.mark.parametrize("run", [simulated, lambda *args: values(fates(*args))], ids=["simulated", "processes"])
def test_a_loss_that_closes_its_mesh(run: Callable[..., list[str]]) -> None:
    """It would go on with parameters from a mesh that other ranks take for closed."""
    for text in run(leaving.closed_in_a_loss):
        assert text.startswith("MismatchError: all_gather(float32[4], axis='shard')"), text
        assert "for unit 'c': this rank has closed the mesh at" in text or "for unit 'b'" in text, text


def test_groups_that_are_destroyed_already() -> None:
    """A `finally` that destroys and closes would raise, and hide the error before it."""
    for rank in fates(leaving.destroyed_before):
        assert "this rank has closed the mesh at" in str(rank.value), rank


@pytest.mark.parametrize("over", ["host", "gloo"])
def test_what_was_sent_arrives(over: str, tmp_path: Path) -> None:
    """The first rank to leave at the end of a run would take the last message from others."""
    assert values(fates(leaving.ends_while_others_read, str(tmp_path / "left"), over, shard=3)) == [True] * 3


def test_simulated_ranks() -> None:
    """A program that closes its mesh could not be tested in one process, or would hide the error of a rank."""
    with pytest.raises(BoomError, match="boom"):
        simulated(leaving.closes_in_between, True)
    with pytest.raises(fshard.MismatchError, match=r"rank 0 waits in all_reduce.*; rank 1 has closed the mesh at"):
        simulated(leaving.closes_in_between, False)
    closed = simulated(
        lambda mesh: [fshard.close(mesh), fshard.close(mesh), leaving._error(lambda: leaving._reduce(mesh))]
    )
    assert all(text.startswith("RuntimeError: axis 'shard' of a mesh: this rank has closed") for *_, text in closed)
    world = fshard.testing.World(2)

    def whole(mesh: fshard.testing.SimulatedMesh) -> fshard.Sharded:
        with fshard.closing(mesh):
            params = {"w": torch.arange(3.0)}
            return fshard.shard_params(params, fshard.make_plan(params, mesh))

    assert world.gather(world.run(whole))["w"].tolist() == [0, 1, 2]


def test_meshes_without_connections() -> None:
    """A program for any mesh would need a case for one device."""
    for mesh in (None, fshard.AbstractMesh(shard=2)):
        with fshard.closing(mesh) as same:
            assert same is mesh
        fshard.close(mesh)
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"):
        fshard.close("mesh")
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh"):
        fshard.closing(3)
