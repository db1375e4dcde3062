"""Processes that are killed at any moment of a save, losses of power, full disks, two savers: no checkpoint is lost."""

import errno
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import moments
from support.worlds import fates, simulated

import fshard
from fshard import checkpoint
from fshard.checkpoint import CheckpointError, saving
from fshard.checkpoint.writing import Writer
from fshard.files import directory
from fshard.files.folders import LocalFolder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, if there is such a file system: every save of hundreds waits for a disk several times."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as dir:
        yield Path(dir)


def state_of(mesh: Any, step: int, version: int) -> dict[str, Any]:
    """A state of which every part tells the step and the version."""
    whole = {"w": torch.arange(15.0).view(5, 3) + 100 * step + version, "b": torch.full((3,), step + 10.0 * version)}
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
    return {"params": params, "mu": torch.full((4,), 7 * version - step), "step": step, "version": version}


LIKE = {"params": fshard.shard_params(state := {"w": torch.zeros(5, 3), "b": torch.zeros(3)}, fshard.make_plan(state))}
LIKE |= {"mu": torch.zeros(4, dtype=torch.int64), "step": 0, "version": 0}


def test_files_that_another_job_deletes_are_an_error_at_once(tmp_path, monkeypatch):
    """A save in the background would wait for an hour, in silence, for a record that `keep_last` of a job deleted."""
    put, names, looked = Writer.put, LocalFolder.names, threading.Event()

    def prunes(self: Writer, record: Any) -> None:
        put(self, record) if self.contents.rank == 0 else looked.wait(60)
        if self.contents.rank:
            directory.remove(self.directory, self.step)

    def looks(self: LocalFolder, folders: bool = False) -> list[str]:
        there = names(self, folders)
        if any(name.endswith("rank-00000.json") and name[0] != "." for name in there):
            looked.set()
        return there

    def job(mesh: Any) -> None:
        running = checkpoint.save(tmp_path, state_of(mesh, 1, 1), 1, wait=False)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/step-000000000001/.*-rank-0000.*: deleted meanwhile"):
            running.wait()

    monkeypatch.setattr(saving, "_WRITTEN", 20.0)
    monkeypatch.setattr(Writer, "put", prunes)
    monkeypatch.setattr(LocalFolder, "names", looks)
    simulated(job, shard=2)


def versions(dir: Path, damaged: bool = False) -> dict[int, int]:
    """The versions of all checkpoints by step. AssertionError if one is not what was saved, unless it is `damaged`."""
    result = {}
    for step in checkpoint.steps(dir):
        try:
            restored = checkpoint.restore(dir, LIKE, step)
        except CheckpointError:
            assert damaged
            continue
        result[step] = restored["version"]
        expected = state_of(None, step, result[step])
        assert restored["step"] == step
        assert restored["mu"].tolist() == expected["mu"].tolist()
        whole, right = (fshard.gather_params(x["params"]) for x in (restored, expected))
        assert {name: x.tolist() for name, x in whole.items()} == {name: x.tolist() for name, x in right.items()}
    assert damaged or checkpoint.latest(dir) == max(result, default=None)
    return result


def save(mesh: Any, dir: Path, step: int, version: int, **options: Any) -> None:
    """Save a state."""
    checkpoint.save(dir, state_of(mesh, step, version), step, **options)


def pruned(steps: set[int], step: int, keep_last: int, keep_every: int = 0) -> set[int]:
    """The steps that stay when one is saved."""
    earlier = sorted(x for x in steps if x <= step)
    return {x for x in steps if x > step or x in earlier[-keep_last:] or (keep_every and x % keep_every == 0)}


# what is done to a directory that has the checkpoints of steps 1 to 4
DEEDS: dict[str, tuple[int, dict[str, Any]]] = {
    "a new step": (5, {}),
    "an old step again": (3, {}),
    "the last step again": (4, {}),
    "the last one stays": (5, {"keep_last": 1}),
    "some stay": (5, {"keep_last": 2, "keep_every": 2}),
    "a run that was taken up again": (2, {"keep_last": 1}),
}


def with_four(dir: Path) -> dict[int, int]:
    """Save steps 1 to 4."""
    for step in range(1, 5):
        save(None, dir, step, 1)
    return versions(dir)


def is_between(now: dict[int, int], before: dict[int, int], after: dict[int, int], step: int) -> bool:
    """Whether checkpoints are those before a save, or the new one is there, and all that stay."""
    return now == before or after.items() <= now.items() <= {**before, step: after[step]}.items()


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_is_killed_anywhere_loses_nothing(ranks, deed, tmp_path):
    """A rank that is killed during a save would leave no checkpoint, or one that is a mixture or not whole."""
    dir, again, (step, options) = tmp_path / "run", tmp_path / "again", DEEDS[deed]
    before = with_four(dir)
    steps = pruned({*before, step}, step, **options) if options else {*before, step}
    after = {x: 2 if x == step else before[x] for x in steps}
    all_seen = []

    def look() -> None:
        now = versions(dir)
        assert is_between(now, before, after, step)
        all_seen.append(now)
        shutil.copytree(dir, again)  # as the run that goes on finds it
        save(None, again, step, 3, **options)
        assert versions(again) == {**(after if options else {**before}), step: 3}
        shutil.rmtree(again)

    def on_a_rank(mesh: Any) -> None:
        with moments.each_moment(dir, look):
            save(mesh, dir, step, 2, **options)

    simulated(on_a_rank, shard=2) if ranks == 2 else on_a_rank(None)
    assert all_seen[0] == before
    assert all_seen[-1] == versions(dir) == after
    assert len(all_seen) > 10
    files = {path.name.partition("-")[2] for path in (dir / f"step-{step:012}").iterdir()}
    assert files == {"", *(f"rank-{rank:05}.safetensors" for rank in range(ranks))}  # nothing is left behind


def test_a_deletion_that_is_killed_anywhere_leaves_the_others(tmp_path):
    """A checkpoint of which a part is deleted would be listed, or another one be gone."""
    before, all_seen = with_four(tmp_path), []
    with moments.each_moment(tmp_path, lambda: all_seen.append(versions(tmp_path))):
        checkpoint.delete(tmp_path, 2)
    assert all_seen == [{step: 1 for step in before if step != 2}] * 3  # the index, the data, the folder
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:012}" for step in (1, 3, 4)]


@pytest.mark.parametrize("deed", DEEDS)
def test_a_loss_of_power_anywhere_loses_nothing(deed, tmp_path):
    """A name would reach the disk before the bytes of its file, or a save return before its checkpoint is there."""
    dir, on_disk, (step, options) = tmp_path / "runs" / "a" / "b", tmp_path / "disk", DEEDS[deed]
    (tmp_path / "runs").mkdir()
    with moments.Disk(tmp_path / "runs") as disk:
        before = with_four(dir)
        steps = pruned({*before, step}, step, **options) if options else {*before, step}
        after, states = {x: 2 if x == step else before[x] for x in steps}, [object()]

        def versions_on_disk() -> list[dict[int, int]]:
            result = []
            for names_reached_it in (False, True):
                disk.after_loss_of_power(on_disk, names_reached_it)
                result.append(versions(on_disk / "a" / "b"))
            return result

        def look() -> None:
            now = (moments.seen(dir), disk.flushes)
            if now != states[-1]:
                states.append(now)
                assert all(is_between(x, before, after, step) for x in versions_on_disk())

        look()
        with moments.traced(look):
            save(None, dir, step, 2, **options)
        assert versions_on_disk() == [after, after]
        assert len(states) > 15


TWO = {
    "the last one stays": [(5, {"keep_last": 1}), (6, {"keep_last": 1})],
    "one step": [(5, {}), (5, {})],
    "an old step": [(3, {}), (3, {})],
    "two steps": [(5, {}), (6, {})],
    "one step, the last one stays": [(5, {"keep_last": 1}), (5, {"keep_last": 1})],
    "three": [(4, {}), (5, {"keep_last": 2}), (5, {})],
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save whose records another one deletes gives up at once; there is one rank."""
    monkeypatch.setattr(saving, "_SEEN", 0.05)


def ends(error: BaseException | None) -> bool:
    """Whether a save has ended as it may beside another one: well, or with an error that names a file."""
    return error is None or (isinstance(error, CheckpointError | OSError) and "step-00000000000" in str(error))


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("deeds", [deeds for deeds in TWO if len(TWO[deeds]) == 2])
@pytest.mark.parametrize("first", [0, 1])
def test_a_save_in_the_middle_of_another_one_loses_nothing(first, deeds, offset, tmp_path, impatient):
    """Of two jobs that save into one directory one would delete the other's files, and leave an index without files."""
    (step, options), (other, other_options) = TWO[deeds][first], TWO[deeds][1 - first]
    before, lines, moment = with_four(tmp_path / "four"), [0], offset

    def at_line() -> None:
        lines[0] += 1
        if lines[0] == moment + 1:
            save(None, dir, other, 3, **other_options)

    while True:
        lines[0], dir = 0, tmp_path / "run"
        error: Exception | None = None
        shutil.copytree(tmp_path / "four", dir)
        try:
            with moments.traced(at_line):
                save(None, dir, step, 2, **options)
        except (CheckpointError, OSError) as failure:
            error = failure
        if lines[0] <= moment and error is None:  # an error ends a save early
            break
        now = versions(dir)
        assert ends(error)
        assert error is None or (options | other_options and step < other)
        assert now[max(step, other)] in (2, 3)
        assert options | other_options or now.keys() == {*before, step, other}
        shutil.rmtree(dir)
        moment += 8
    assert moment > 100


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("deeds", TWO)
def test_savers_at_once_lose_nothing(deeds, seed, tmp_path, impatient):
    """Two jobs that save into one directory would mix their files, or one would delete the other's."""
    before, states = with_four(tmp_path), [object()]

    def look() -> None:
        now = moments.seen(tmp_path)
        if now != states[-1]:
            states.append(now)
            assert alone <= versions(tmp_path, damaged=not alone).keys()  # never a wrong one

    # those that no saver replaces or deletes
    deletes = any(options for _, options in TWO[deeds])
    alone = set() if deletes else {*before} - {step for step, _ in TWO[deeds]}
    calls = [
        partial(save, None, tmp_path, step, 2 + number, **options) for number, (step, options) in enumerate(TWO[deeds])
    ]
    errors = moments.interleaved(seed, calls, look)
    assert all(map(ends, errors))
    assert deletes or errors == [None] * len(calls)
    now, last = versions(tmp_path), max(step for step, _ in TWO[deeds])
    assert alone <= now.keys()
    assert now[last] - 2 in [number for number, (step, _) in enumerate(TWO[deeds]) if step == last]
    assert len(states) > 20


def killed_in_the_background(mesh: Any, dir: str) -> None:
    """Save in the background; rank 1 is killed when its file is written."""
    kill = mock.patch.object(Writer, "put", side_effect=lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with kill if mesh.get_rank() == 1 else nullcontext():
        checkpoint.save(dir, state_of(mesh, 2, 1), 2, wait=False).wait()


def test_a_rank_that_is_killed_in_the_background_is_an_error(tmp_path):
    """The first rank would wait an hour for the record of a rank that is gone."""
    save(None, tmp_path, 1, 1)
    first, second = fates(killed_in_the_background, str(tmp_path), seconds=60)
    assert second.exitcode == -signal.SIGKILL
    assert first.exitcode == 1
    assert re.match("MismatchError: .* has gone", str(first.error))
    assert versions(tmp_path) == {1: 1}


def test_a_rank_without_space_leaves_none_of_the_others_files(tmp_path):
    """A disk that one rank finds full would stay full of what the other ranks have written, save after save."""
    save(None, tmp_path, 1, 1)
    before = moments.seen(tmp_path)

    def without_space(self: Writer, record: Any) -> None:
        if self.contents.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        put(self, record)

    def on_a_rank(mesh: Any, step: int) -> str:
        with pytest.raises(OSError, match="No space left on device") as failure:
            save(mesh, tmp_path, step, 2)
        return str(failure.value)

    put = Writer.put
    with mock.patch.object(Writer, "put", without_space):
        for step in (1, 2):
            first, second = simulated(on_a_rank, step)
            assert first == "[Errno 28] rank 1: No space left on device: 'x'"
            assert second == "[Errno 28] No space left on device: 'x'"
            assert moments.seen(tmp_path) == before
    assert versions(tmp_path) == {1: 1}
