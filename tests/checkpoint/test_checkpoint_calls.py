"""What `save`, `restore`, `steps`, `latest` and `delete` promise: whole or not there, and alike on all ranks."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import state_of
from support.models import same_bits
from support.steps import batch, rank_of, start
from support.worlds import gloo, simulated

import fshard
from fshard import checkpoint, tree
from fshard.checkpoint import CheckpointError
from fshard.checkpoint.writing import Writer
from fshard.files.folders import LocalFolder
from fshard.files.index import sealed
from fshard.testing import World


def save(mesh: Any, dir: Path, step: int, factor: float | None = None, **kw: Any) -> Any:
    """Save the state with a factor, which is the step if none is given."""
    return checkpoint.save(dir, state_of(mesh, step if factor is None else factor), step, **kw)


def restored(mesh: Any, dir: Path, step: int | None = None, **kw: Any) -> float:
    """The factor of a checkpoint, after a comparison of all of it with what has this factor."""
    state = checkpoint.restore(dir, state_of(mesh, 0.0), step, **kw)
    factor: float = state["factor"]
    assert same_bits(state, state_of(mesh, factor))
    return factor


def files(dir: Path, step: int) -> list[str]:
    """The names in the folder of a step, with the random part of each left out."""
    return sorted(re.sub(r"^[0-9a-f]{8}-", "", path.name) for path in (dir / f"step-{step:012}").iterdir())


WHOLE = ["index.json", "rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.parametrize("first", [[], [3, 7], None], ids=["none", "two", "an error"])
def test_ranks_that_see_other_folders(tmp_path, first):
    """A rank that sees a checkpoint would restore while the others train, and one whose look fails would leave the
    others waiting: the answer is that of rank 0, or its error."""
    checkpoint.save(tmp_path, {"n": 1}, 9)
    seen = tmp_path / "first"
    for step in first or []:
        checkpoint.save(seen, {"n": 1}, step)
    no_folder = tmp_path / "file"
    for path in [no_folder, seen] if first is None else [no_folder]:
        path.write_text("no folder")

    def law(mesh: Any) -> Any:
        folder = [seen, tmp_path, tmp_path / "nothing", no_folder][mesh.get_rank()]
        for look in (checkpoint.steps, checkpoint.latest):
            with nullcontext() if first is not None else pytest.raises(OSError, match=r"Not a directory.*first"):
                assert look(folder, mesh) == (first if look is checkpoint.steps else max(first, default=None))
        assert checkpoint.latest(tmp_path) == 9

    simulated(law, replicate=2, shard=2)


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_replaces_the_one_of_its_step(tmp_path, wait):
    """A checkpoint would not be there when `save` or `wait` returns, or files of an earlier one would stay."""

    def law(mesh: Any) -> None:
        for factor, step in enumerate((7, 3, 7), 1):
            save(mesh, tmp_path, step, factor, wait=wait).wait()
            assert checkpoint.latest(tmp_path) == 7
            assert (restored(mesh, tmp_path, step), files(tmp_path, step)) == (factor, WHOLE)
        assert checkpoint.steps(tmp_path) == [3, 7]
        assert (restored(mesh, tmp_path), restored(mesh, tmp_path, 3)) == (3, 2)

    simulated(law)


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_is_told(tmp_path, threads):
    """A run that goes on with another number of threads would differ in the last bits, and nobody would know why."""
    World(2).run(save, tmp_path, 7)
    told = pytest.warns(UserWarning, match=r"saved with 1 thread\(s\), and torch uses 2 now.*set_num_threads\(1\)")
    with told if threads > 1 else nullcontext() as found:
        assert World(2, threads=threads).run(restored, tmp_path) == [7, 7]
    assert found is None or len(found) == 1  # of one rank

    def part(mesh: Any) -> Any:  # with which no run goes on
        return checkpoint.restore(tmp_path, {"factor": 0.0}, rename=lambda x: x if x == "factor" else None, mesh=mesh)

    assert World(2, threads=threads).run(part) == [{"factor": 7}] * 2


def test_a_checkpoint_that_does_not_say_its_threads(tmp_path):
    """Checkpoints of older versions could not be restored, or would give a wrong warning."""
    World(2).run(save, tmp_path, 7)
    (index,) = tmp_path.glob("*/index.json")
    raw = json.loads(index.read_bytes())
    assert raw.pop("threads") == 1
    index.write_bytes(sealed({key: x for key, x in raw.items() if key != "checksum"}))
    assert World(2, threads=2).run(restored, tmp_path) == [7, 7]


def test_the_state_of_one_device(tmp_path):
    """Without a mesh, a state of plain tensors could not be saved, or would not come back."""
    for factor, wait in ((1.0, True), (2.0, False), (3.0, False)):
        save(None, tmp_path, 5, factor, wait=wait).wait()
        assert restored(None, tmp_path) == factor
    for plain in (torch.arange(3), 7, "text", {"": torch.ones(2)}, {}, [None, []]):
        checkpoint.save(tmp_path, plain, 6)
        assert same_bits(checkpoint.restore(tmp_path, plain), plain)


def test_which_are_kept(tmp_path):
    """A checkpoint that was to be kept, the one just saved, or one of another run's later steps would be deleted; or
    what a save that did not end has left would stay for ever."""

    def law(mesh: Any) -> None:
        for step in (90, 95):  # of a run that went on from a step before
            save(mesh, tmp_path, step)
        for step in range(0, 60, 5):
            save(mesh, tmp_path, step, keep_last=2, keep_every=20, wait=step % 2 == 0)
        save(mesh, tmp_path, 60).wait()
        assert checkpoint.steps(tmp_path) == [0, 20, 40, 50, 55, 60, 90, 95]
        (tmp_path / "step-000000000045").mkdir(exist_ok=True)
        (tmp_path / "step-000000000045" / "left.safetensors").touch()
        fshard.collectives.all_reduce(torch.ones(1), mesh, "shard")
        save(mesh, tmp_path, 52, keep_last=1)
        assert checkpoint.steps(tmp_path) == [52, 55, 60, 90, 95]
        assert sorted(path.name[-2:] for path in tmp_path.iterdir()) == ["52", "55", "60", "90", "95"]
        save(mesh, tmp_path, 96, keep_last=1)

    simulated(law)
    assert checkpoint.steps(tmp_path) == [96]


def test_deletion(tmp_path):
    """A deleted checkpoint would be listed still, or a step without one would be deleted without a word."""
    for step in (10, 9, 100):
        save(None, tmp_path, step)
    assert checkpoint.steps(tmp_path) == [9, 10, 100]
    checkpoint.delete(tmp_path, 100)
    assert (checkpoint.steps(tmp_path), checkpoint.latest(tmp_path)) == ([9, 10], 10)
    assert not (tmp_path / "step-000000000100").exists()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 100; the last ones are: 9, 10"):
        checkpoint.delete(tmp_path, 100)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 100; the last ones are: 9, 10"):
        restored(None, tmp_path, 100)
    with pytest.raises(CheckpointError, match="no checkpoint; the last ones are: none"):
        restored(None, tmp_path / "empty")


def trained(mesh: Any, dir: Path, how: str, is_changed: threading.Event) -> None:
    """Save in the background, and change the state at once."""
    state, step = start(mesh, donate=how == "donate")
    step = fshard.jit(step, donate=True, backend="eager") if how == "jit" else step
    for number in (1, 2, 3):
        expected = tree.map(torch.clone, state)
        saving = checkpoint.save(dir, state, number, wait=False)
        if how == "in place":
            tree.map(torch.Tensor.zero_, state)
        state, _ = step(state, batch(number, rank_of(mesh)))
        fshard.collectives.all_reduce(torch.ones(1), mesh, "shard")
        is_changed.set()
        saving.wait()
        assert same_bits(checkpoint.restore(dir, expected, number), expected)
        is_changed.clear()


@pytest.mark.parametrize("how", ["in place", "donate", "jit"])
@pytest.mark.parametrize("shard", [1, 2])
def test_a_state_may_be_changed_at_once(tmp_path, monkeypatch, how, shard):
    """A checkpoint would have values of a later step, if training goes on while threads write."""
    write, is_changed = LocalFolder.write, threading.Event()

    def late(place: LocalFolder, name: str, chunks: Any) -> None:
        is_changed.wait(60)
        write(place, name, chunks)

    monkeypatch.setattr(LocalFolder, "write", late)
    simulated(trained, tmp_path, how, is_changed, shard=shard)


def fails_on(rank: int, monkeypatch: Any) -> Callable[[bool], None]:
    """A switch: files of a rank cannot be written."""
    write, is_on = LocalFolder.write, [False]

    def fails(place: LocalFolder, name: str, chunks: Any) -> None:
        if is_on[0] and f"rank-{rank:05}" in name:
            raise OSError(28, "No space left on device", name)
        write(place, name, chunks)

    monkeypatch.setattr(LocalFolder, "write", fails)
    return lambda on: is_on.__setitem__(0, on)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_in_the_background_is_raised_once_on_all_ranks(tmp_path, monkeypatch, rank):
    """A save that failed on one rank would be taken for good on others, hang them, or be told twice or never; or the
    next one would not work."""
    turn = fails_on(rank, monkeypatch)

    def law(mesh: Any, by_wait: bool) -> list[str]:
        save(mesh, tmp_path, 1)
        turn(True)
        saving = save(mesh, tmp_path, 2, wait=False)
        with pytest.raises(CheckpointError, match=r"the save of step 2 in .*No space left on device") as error:
            saving.wait() if by_wait else save(mesh, tmp_path, 3)
        saving.wait()
        turn(False)
        assert (checkpoint.steps(tmp_path), restored(mesh, tmp_path)) == ([1], 1)
        save(mesh, tmp_path, 4, wait=False).wait()
        assert (checkpoint.steps(tmp_path), restored(mesh, tmp_path)) == ([1, 4], 4)
        checkpoint.delete(tmp_path, 4) if mesh.get_rank() == 0 else None
        return str(error.value)

    for by_wait in (True, False):
        texts = simulated(law, by_wait, shard=3)
        assert all((f"rank {rank}: " in text) == (number != rank) for number, text in enumerate(texts))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_the_spot_is_raised_on_all_ranks(tmp_path, monkeypatch, rank):
    """A disk that is full for one rank would be no error on the others, or the earlier checkpoint would be lost."""
    turn = fails_on(rank, monkeypatch)

    def law(mesh: Any) -> None:
        save(mesh, tmp_path, 1, 1)
        turn(True)
        with pytest.raises(OSError, match="No space left on device") as error:
            save(mesh, tmp_path, 1, 2)
        assert error.value.errno == 28
        turn(False)
        assert (checkpoint.steps(tmp_path), restored(mesh, tmp_path)) == ([1], 1)
        save(mesh, tmp_path, 1, 3, wait=False).wait()
        assert restored(mesh, tmp_path) == 3

    simulated(law)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("error", [CheckpointError("it is not whole"), ValueError("a bug"), OSError(28, "it is full")])
@pytest.mark.parametrize(("stage", "rank"), [("write", 0), ("write", 1), ("put", 1), ("finish", 0)])
def test_all_ranks_hear_which_rank_failed_and_why(tmp_path, monkeypatch, stage, rank, error, wait):
    """On the other ranks a failed save would be arguments that differ, with the advice to make them the same."""
    good = getattr(Writer, stage)

    def fails(self: Writer, *args: Any) -> Any:
        if self.contents.rank == rank:
            raise error
        return good(self, *args)

    monkeypatch.setattr(Writer, stage, fails)

    def law(mesh: Any) -> None:
        is_own = mesh.get_rank() == rank
        kinds = type(error) if wait and (is_own or isinstance(error, OSError)) else CheckpointError
        with pytest.raises(kinds, match=r"it is not whole|a bug|it is full") as failure:
            save(mesh, tmp_path, 1, wait=wait).wait()
        assert is_own or str(failure.value).startswith((f"rank {rank}: ", f"[Errno 28] rank {rank}: "))
        assert "same arguments" not in str(failure.value)

    simulated(law)


def test_a_state_that_was_given_away(tmp_path):
    """A state whose tensors a donated step has overwritten would be saved as if it were whole."""

    def law(mesh: Any) -> None:
        state, step = start(mesh, donate=True)
        step(state, batch(0, rank_of(mesh)))
        with pytest.raises(fshard.DonatedError):
            checkpoint.save(tmp_path, state, 1)
        with pytest.raises(ValueError, match=r"save: leaf 'w': expected a tensor with values, got one on meta"):
            checkpoint.save(tmp_path, {"w": torch.empty(2, device="meta")}, 1)

    simulated(law)
    assert checkpoint.steps(tmp_path) == []


def test_falling_back(tmp_path):
    """A damaged file of one rank would be restored, or only some ranks would go back to an earlier checkpoint."""

    def law(mesh: Any) -> None:
        for step in (1, 2, 3, 4):
            save(mesh, tmp_path, step)
        if mesh.get_rank() == 0:
            (file,) = (tmp_path / "step-000000000004").glob("*rank-00001*")
            file.write_bytes(file.read_bytes()[:-1] + b"\x00")
            (tmp_path / "step-000000000003" / "index.json").write_text("{")
        fshard.collectives.all_reduce(torch.ones(1), mesh, "shard")
        with pytest.raises(
            CheckpointError, match=r"rank-00001.safetensors: leaf 'other': the 4 bytes from byte .* are not"
        ):
            restored(mesh, tmp_path)
        with pytest.raises(CheckpointError, match=r"step-000000000003/index.json: not an index"):
            restored(mesh, tmp_path, 3)
        assert restored(mesh, tmp_path, fall_back=True) == 2
        assert restored(mesh, tmp_path, 3, fall_back=True) == 2
        assert restored(mesh, tmp_path, 1, fall_back=True) == 1
        with pytest.raises(ValueError, match=r"step 4 .*differs from `like`"):  # this is no damage
            checkpoint.restore(tmp_path, {"params": state_of(mesh)["params"]}, fall_back=True)
        if mesh.get_rank() == 0:
            for step in (1, 2):
                checkpoint.delete(tmp_path, step)
        fshard.collectives.all_reduce(torch.ones(1), mesh, "shard")
        with pytest.raises(CheckpointError, match=r"step-000000000003/index.json: not an index"):
            restored(mesh, tmp_path, fall_back=True)

    simulated(law)


ALIKE: dict[str, dict[str, Any]] = {"save": {"state": state_of, "step": 1}, "restore": {"like": state_of}}
OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    ("save", {"step": 2}, "save: the call differs between ranks: rank 0 has step=1; rank 1 has step=2. Give all ranks"),
    ("save", {"dir": "b"}, "/a; rank 1 has dir="),
    ("save", {"wait": False}, "rank 0 has wait=True; rank 1 has wait=False"),
    ("save", {"keep_last": 3}, "rank 0 has keep_last=None; rank 1 has keep_last=3"),
    ("save", {"keep_last": 0}, "save: keep_last=0: expected a number of checkpoints, at least 1"),
    ("save", {"step": -1}, "step=-1: expected the number of a step"),
    ("save", {"dir": None}, "dir=None: expected the path of a directory"),
    ("save", {"state": lambda mesh: state_of(mesh, more=1)}, "rank 0 has nothing more; rank 1 has 'more' int"),
    ("save", {"state": lambda mesh: state_of(mesh, more=set())}, "save: leaf 'more': expected a tensor, a number or a"),
    ("save", {"state": lambda mesh: state_of(mesh, count=1)}, "rank 0 has 'count' torch.float32 [1]; rank 1 has 'one'"),
    ("restore", {"step": 1}, "restore: the call differs between ranks: rank 0 has step=None; rank 1 has step=1"),
    ("restore", {"dir": "b"}, "/a; rank 1 has dir="),
    ("restore", {"fall_back": True}, "rank 0 has fall_back=False; rank 1 has fall_back=True"),
    ("restore", {"donate": True}, "rank 0 has donate=False; rank 1 has donate=True"),
    ("restore", {"rename": {"count": None}}, "it lacks 1 names: 'count'"),
    (
        "restore",
        {"rename": {"one": "other", "other": "one"}},
        "restore: rename differs between ranks: rank 0 has ['one'] as",
    ),
    ("restore", {"like": lambda mesh: state_of(mesh, more=1)}, "rank 0 has nothing more; rank 1 has 'more' int"),
]


@pytest.mark.parametrize(("function", "otherwise", "line"), OTHERWISE, ids=range(len(OTHERWISE)))
def test_ranks_that_call_otherwise(tmp_path, monkeypatch, function, otherwise, line):
    """Ranks that save or restore something else would wait for each other for ever, or go on with other states."""
    monkeypatch.chdir(tmp_path)

    def law(mesh: Any) -> None:
        checkpoint.save("a", state_of(mesh), 1)
        given = {"dir": "a", **ALIKE[function], **(otherwise if mesh.get_rank() == 1 else {})}
        given = {name: value(mesh) if callable(value) else value for name, value in given.items()}
        with pytest.raises((fshard.MismatchError, TypeError, ValueError), match=re.escape(line)):
            getattr(checkpoint, function)(**given)
        assert checkpoint.steps("a") == [1]
        assert checkpoint.steps("b") == []

    simulated(law)


def waits_for_rank_1(mesh: Any, dir: str) -> str:
    """A save in the background that fails on rank 1 alone, and one that works."""
    write, calls = LocalFolder.write, [0]

    def fails(place: LocalFolder, name: str, chunks: Any) -> None:
        calls[0] += 1
        if mesh.get_rank() == 1 and calls[0] == 1:
            raise OSError(28, "No space left on device", name)
        write(place, name, chunks)

    LocalFolder.write = fails  # type: ignore[method-assign]
    saving = save(mesh, Path(dir), 1, wait=False)
    try:
        saving.wait()
    except CheckpointError as error:
        assert checkpoint.steps(dir) == []
        save(mesh, Path(dir), 2, wait=False).wait()
        assert (checkpoint.steps(dir), restored(mesh, Path(dir))) == ([2], 2)
        return str(error)
    return "no error"


def test_processes_hear_of_an_error(tmp_path):
    """A process whose peer could not write would wait for the peer's record for an hour."""
    texts = gloo(waits_for_rank_1, str(tmp_path))
    assert "rank 1: CheckpointError: the save of step 1" in texts[0]
    assert texts[1].startswith("the save of step 1")
