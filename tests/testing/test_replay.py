"""Steps are recorded and run again: same bits; a difference, inf or NaN is named by leaf, unit and rank."""

import contextlib
import functools
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import replayed
from support.models import rand, same_bits
from support.worlds import gloo, simulated

import fshard
from fshard.__main__ import main
from fshard.testing import assert_trees_equal, record
from fshard.testing.replaying import replay
from fshard.watch import recording


def train(mesh: Any, folder: str, num_steps: int = 5, donate: bool = False, **kw: Any) -> Any:
    """The state after some recorded steps."""
    step, state, _, _ = replayed.make(mesh, donate=donate)
    step = record(step, folder, **{"donate": donate, "steps": {replayed.CLEAN}, **kw})
    rank = 0 if mesh is None else mesh.get_rank()
    for i in range(num_steps):
        state, _ = step(state, replayed.batch(i, rank))
    return state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The records of three simulated ranks: a step that was chosen, and one that overflowed."""
    path = tmp_path_factory.mktemp("recorded")
    simulated(train, str(path), shard=3)
    return str(path)


def files(folder: Any) -> list[str]:
    """The folders of ranks inside `folder`, sorted."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/*"))


def test_chosen_steps_and_those_that_went_non_finite_are_kept(folder):
    """Chosen steps and those with inf or NaN are kept, of every rank: otherwise a failure could not be replayed, or
    disks fill."""
    assert files(folder) == [
        f"step-0000000{i}/rank-{rank}" for i in (replayed.CLEAN, replayed.BAD) for rank in range(3)
    ]


def test_a_step_runs_again_with_the_same_bits(folder):
    """A replayed step has the recorded bits, and names the first leaf not finite: otherwise a user would debug
    another step."""
    clean, bad = replay(folder, replayed.make)
    assert (clean.number, clean.different, clean.nonfinite) == (replayed.CLEAN, None, None)
    assert (bad.number, bad.num_ranks, bad.different) == (replayed.BAD, 3, None)
    found = bad.nonfinite
    assert (found.rank, found.what, found.path, found.unit) == (1, "gradients", "embed", "(root)")
    (found,) = [one.nonfinite for one in replay(folder, replayed.without_loss, at=replayed.BAD)]
    assert (found.rank, found.what, found.path) == (0, "metrics", "grad_norm")


def inner_products(mesh: Any) -> Any:
    """A step whose bits depend on where its batch starts: by the products on AMD processors, by the number on all."""
    w, tx = rand(13, 3, seed=0).float(), fshard.optim.sgd(0.1)

    def loss(p: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        products = (x @ p[:, 0]).tanh().sum() + (x @ p).square().sum() + torch.dot(y, p[:, 1].contiguous())
        return products * (1 + x.data_ptr() % 64 + 64 * (y.data_ptr() % 64))

    state = fshard.init_state(fshard.shard_params(w, fshard.make_plan(w, mesh)), tx)
    return fshard.train_step(loss, tx), state, torch.ones(8, 13), None, torch.ones(13)


@pytest.mark.parametrize("shift", range(4))
def test_a_batch_lies_where_it_lay(shift, tmp_path):
    """A replay would find other bits where the batch, or a further argument, was a view."""

    def run(mesh: Any) -> None:
        step, state, *_ = inner_products(mesh)
        x, y = (rand(start + 8 * 13, seed=start).float()[start:] for start in (shift, 3 - shift))
        record(step, tmp_path, steps={0})(state, x.view(8, 13), y[:13])

    simulated(run, shard=2)
    (found,) = replay(tmp_path, inner_products)
    assert found.different is None


def test_what_differs_is_found(folder):
    """One changed bit is found by leaf, unit and rank: otherwise a user would look for the wrong rank or leaf."""
    (one,) = replay(folder, replayed.otherwise, at=replayed.CLEAN)
    assert (one.different.rank, one.different.what, one.different.unit) == (0, "the new state", "(root)")
    (one,) = replay(folder, replayed.otherwise_on_rank_1, at=replayed.CLEAN)
    found = one.different
    assert (found.rank, found.what, found.path, found.unit) == (1, "the new state", "params.blocks.1.w", "blocks.1")
    assert "at [2]: got " in found.text
    assert "(1 units in the last place, relative 1" in found.text
    assert "; 1 of 7 differ" in found.text
    (one,) = replay(folder, replayed.other_metrics_on_rank_1, at=replayed.CLEAN)
    found = one.different
    assert (found.rank, found.what, found.path, found.unit) == (1, "metrics", "loss", None)


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (2, 2)])
def test_any_mesh_is_made_again(tmp_path, replicate, shard):
    """A record of one rank or of a mesh of two axes replays: otherwise hybrid runs could not be debugged on one
    machine."""
    simulated(train, str(tmp_path), 2, replicate=replicate, shard=shard)
    assert [str(one) for one in replay(tmp_path, replayed.make)] == [
        f"step 1 on {replicate * shard} rank(s): same bits"
    ]


def test_one_device_and_real_processes(tmp_path):
    """Records of processes replay on simulated ranks with the same bits: otherwise a failure on a cluster would need
    a cluster."""
    train(None, str(tmp_path / "alone"), 2)
    gloo(train, str(tmp_path / "gloo"), 2, shard=2)
    for name, ranks in (("alone", 1), ("gloo", 2)):
        assert [str(one) for one in replay(tmp_path / name, replayed.make)] == [f"step 1 on {ranks} rank(s): same bits"]


@pytest.mark.parametrize("shard", [1, 2])
def test_recording_changes_nothing(tmp_path, shard):
    """Recorded steps, donated or not, train with the bits of others: otherwise recording would change the run."""
    unrecorded = functools.partial(train, steps=None, nonfinite=False)
    expected = simulated(unrecorded, str(tmp_path), shard=shard)
    assert files(tmp_path) == []
    for donate in (False, True):
        runs = simulated(train, str(tmp_path / str(donate)), 5, donate, shard=shard)
        assert_trees_equal([vars(run) for run in runs], [vars(run) for run in expected])
        assert not any(one.different for one in replay(tmp_path / str(donate), replayed.make))


def test_a_state_that_is_gone_is_an_error(tmp_path):
    """A donated state that was not copied is an error that says what to write; without it the record would be
    useless."""
    step, state, like, _ = replayed.make(None, donate=True)
    with pytest.raises(fshard.DonatedError) as caught:
        record(step, tmp_path, steps={0})(state, like)
    assert "record(step, dir, donate=True)" in "".join(caught.value.__notes__)
    assert files(tmp_path) == []


def test_there_is_room_for_so_many(tmp_path):
    """At most `keep` failing steps are written, the first ones, and all chosen ones: otherwise a diverged run would
    fill the disk."""
    step, state, _, _ = replayed.make(None)
    step = record(step, tmp_path, steps=lambda number: number == 3, keep=2)
    bad = replayed.batch(replayed.BAD, 1)
    for _ in range(4):
        state, _ = step(state, bad)
    assert files(tmp_path) == [f"step-0000000{i}/rank-0" for i in (0, 1, 3)]


def limit_of(num_bytes: int) -> Callable[[pytest.MonkeyPatch], object]:
    """A disk on which a file may have so many bytes."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    return lambda patch: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, most))


FULL_DISK = OSError(28, "No space left on device")
FULL: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "at once": limit_of(0),
    "before the step": limit_of(5_000),
    "the results": lambda patch: patch.setattr(torch, "save", failing(torch.save, "after.pt", RuntimeError("?"))),
    "words": lambda patch: patch.setattr(Path, "write_text", failing(Path.write_text, "about.json", FULL_DISK)),
    "a folder": lambda patch: patch.setattr(Path, "mkdir", failing(Path.mkdir, "writing-0", FULL_DISK)),
}


def failing(fn: Callable[..., Any], name: str, error: Exception) -> Any:
    """A function that fails for a file of this name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Path) and x.name == name for x in args):
            raise type(error)(*error.args)
        return fn(*args, **kwargs)

    return run


@pytest.mark.parametrize("full", FULL)
def test_a_step_that_cannot_be_recorded_is_an_error_and_leaves_nothing(full, tmp_path, monkeypatch):
    """An error would not say where there is no room, and half records count as steps: later ones were not kept."""
    tx, folder = fshard.optim.sgd(0.1), tmp_path / "runs"
    state = fshard.init_state(fshard.shard_params(torch.ones(5000), fshard.make_plan(torch.ones(5000))), tx)
    step = record(fshard.train_step(lambda w, x: (w * x).sum(), tx), folder, keep=1)
    (folder / "step-00000007" / "writing-0").mkdir(parents=True)  # left by a process that was killed
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    FULL[full](monkeypatch)
    try:
        place = f"{folder}/step-00000000/writing-0"
        with pytest.raises(OSError, match=f"(full disk|No space).*{place}|{place}.*full disk"):
            step(state, torch.tensor(float("nan")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        monkeypatch.undo()
    assert files(folder) == ["step-00000007/writing-0"]
    step(state, torch.tensor(float("nan")))
    assert files(folder) == ["step-00000000/rank-0", "step-00000007/writing-0"]


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    """Step 100,000,000, which has a digit more, would come before step 99,999,999."""
    for number in (99_999_999, 100_000_000):
        recording.step_folder(tmp_path, number).mkdir()
    assert [*recording.recorded_steps(tmp_path, None)] == [99_999_999, 100_000_000]


def test_files_hold_tensors_and_words_alone(folder):
    """Files hold tensors and text, without pickled code or unused memory: otherwise a record could run code, or be
    too large."""
    rank = Path(folder) / "step-00000001" / "rank-0"
    assert sorted(path.name for path in rank.iterdir()) == ["about.json", "after.pt", "before.pt"]
    found = torch.load(rank / "before.pt", weights_only=True)
    assert all(type(x) is torch.Tensor and x.untyped_storage().nbytes() == x.nbytes for x in found.values())


def test_a_leaf_that_cannot_be_written_is_an_error(tmp_path):
    """An argument that cannot be written is an error and leaves no rank's folder: otherwise a half record would look
    whole."""
    step, state, like, _ = replayed.make(None)
    with pytest.raises(TypeError, match=r"record: args leaf '0\.f': expected a tensor, a number or a string, got type"):
        record(step, tmp_path, steps={0})(state, like, {"f": int})
    assert [name for name in files(tmp_path) if "rank" in name] == []


DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
EIGHT = torch.tensor([1.0, -2.0, 0.5])
LEAVES: dict[str, Callable[[], torch.Tensor]] = {
    **{str(x): functools.partial(torch.zeros, 3, dtype=x) for x in DTYPES},
    **{f"{x} ones": functools.partial(EIGHT.to, x) for x in DTYPES if x.is_floating_point and x.itemsize == 1},
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(EIGHT, 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized, complex32 and sparse tensors
@pytest.mark.parametrize("name", LEAVES)
def test_what_is_recorded_can_be_replayed(name, tmp_path):
    """Any tensor is an error before the step, or is read again: a record of a failure would be found unreadable when
    it is needed."""
    try:
        leaf = LEAVES[name]()
    except (RuntimeError, NotImplementedError, TypeError):
        pytest.skip("torch makes no such tensor")
    step, state, like, _ = replayed.make(None)
    calls = list[Any]()

    def step_with(state: Any, batch: Any, given: Any) -> Any:
        calls.append(given)
        return step(state, batch)

    try:
        record(step_with, tmp_path, steps={0})(state, like, {"given": leaf})
    except TypeError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert refused.startswith("record: args leaf '0.given': expected a ")
        assert (calls, files(tmp_path)) == ([], [])
        return
    (found,) = replay(tmp_path, lambda mesh: (step_with, state, like, None, {"given": leaf}))
    assert found.different is None
    assert same_bits(calls[0], calls[1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (replayed.other_plan, ": recorded with another plan: expected leaf 'blocks.0.w'"),
        (replayed.other_state, "the state is not the one that was recorded: it lacks ['opt_state.inner.m.count'"),
        (replayed.other_batch, "the batch is not the one that was recorded: it lacks ['gain']"),
    ],
)
def test_other_code_is_an_error(folder, make, text):
    """Another plan, optimizer or batch than recorded is an error; without it the replay would compare unlike things."""
    with pytest.raises(ValueError, match="recorded") as caught:
        replay(folder, make)
    assert text in str(caught.value)


def run(*args: str) -> int:
    """The exit status of `python -m fshard replay`."""
    return main(["replay", *args])


def test_the_exit_status_says_what_was_found(folder, capsys, tmp_path):
    """The status is 0 for same bits, 1 for others, 3 for inf or NaN, 2 for an error: otherwise scripts could not
    rely on it."""
    make, clean = ["--step", "support.replayed:make"], ["--at", str(replayed.CLEAN)]
    assert run(folder, *make, *clean) == 0
    assert capsys.readouterr().out == "step 1 on 3 rank(s): same bits\n"
    assert run(folder, *make) == 3
    assert "not finite first: gradients: leaf 'embed' (unit '(root)') on rank 1: element" in capsys.readouterr().out
    assert run(folder, "--step", "support.replayed:otherwise_on_rank_1", *clean) == 1
    assert "differs first: the new state: leaf 'params.blocks.1.w' (unit 'blocks.1') on rank 1: at [2]: got" in (
        capsys.readouterr().out
    )
    for args, text in [
        ((folder, "--step", "support.replayed:nothing"), "--step support.replayed:nothing: expected MODULE:FUNCTION"),
        ((folder, "--step", "no_such_module:make"), "No module named 'no_such_module'"),
        ((str(tmp_path), *make), "expected recorded steps (step-00000000, ...), found none"),
        ((folder, *make, "--at", "7"), "expected a recorded step (rank-0, ...), found none"),
    ]:
        assert run(*args) == 2
        said = capsys.readouterr()
        assert (said.out, text in said.err, said.err.count("\n")) == ("", True, 1)
    assert run(folder, *make, *clean, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"step": 1, "ranks": 3, "different": None, "nonfinite": None}
    assert run(folder, *make, "--at", str(replayed.BAD), "--json") == 3
    said = json.loads(capsys.readouterr().out)["nonfinite"]
    assert said.pop("text").startswith("element ")
    assert said == {"kind": "gradients", "name": "embed", "unit": "(root)", "rank": 1}
    with pytest.raises(SystemExit) as caught:
        main(["replay", folder])
    assert caught.value.code == 2


def test_ranks_that_are_missing_are_named(tmp_path):
    """A record without some rank is an error that says which ranks there are; without it the replay would wait or
    mislead."""
    simulated(train, str(tmp_path), 2, shard=2)
    (tmp_path / "step-00000001" / "rank-0").rename(tmp_path / "step-00000001" / "writing-0")
    with pytest.raises(ValueError, match=r"expected what 2 ranks wrote, got that of ranks \[1\]"):
        replay(tmp_path, replayed.make)


BARE = """
import runpy, sys
sys.modules["rich"] = sys.modules["rich.console"] = None
runpy.run_module("fshard", run_name="__main__")
"""


def test_the_command_line(folder):
    """The command line works in a process without the package rich: otherwise users without it could not replay."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    args = [sys.executable, "-c", BARE, "replay", folder, "--step", "support.replayed:make", "--at", "1"]
    done = subprocess.run(args, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (0, "step 1 on 3 rank(s): same bits\n"), done.stderr


class Runs:
    """An object whose pickle makes a directory when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["FSHARD_TEST_RAN"],)


def about(**changes: Any) -> Any:
    """An edit of about.json; a value of `...` removes the key."""

    def edit(rank: Path) -> None:
        found = json.loads((rank / "about.json").read_text()) | changes
        (rank / "about.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return edit


def text_of(data: Any) -> Any:
    """An edit that replaces about.json."""
    return lambda rank: (rank / "about.json").write_bytes(data)


def tensors(change: Any) -> Any:
    """An edit of the tensors from before the step."""
    return lambda rank: torch.save(change(torch.load(rank / "before.pt", weights_only=True)), rank / "before.pt")


def bytes_of(change: Any) -> Any:
    """An edit of the bytes in the file of tensors."""

    def edit(rank: Path) -> None:
        data = (rank / "before.pt").read_bytes()
        (rank / "before.pt").write_bytes(change(data))

    return edit


def bomb(rank: Path) -> None:
    """An edit that compresses the file of tensors, which then unpacks to megabytes of zeros."""
    with zipfile.ZipFile(rank / "before.pt") as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(rank / "before.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in parts.items():
            new.writestr(name, data + bytes(1 << 20))


# name: the edit of a rank's folder, and what its one error says besides the name of the file
EDITS = {
    "no words": (lambda rank: (rank / "about.json").unlink(), "No such file"),
    "cut words": (text_of(b'{"format": 1, "thr'), "expected what is known of a recorded step"),
    "no text": (text_of(b"\xff\xfe\x00"), "expected what is known of a recorded step"),
    "deep words": (text_of(b"[" * 100_000), "expected what is known of a recorded step"),
    "a list": (text_of(b"[]"), "not a JSON object, but a list"),
    "another format": (about(format=1), "'format': expected format 3, got 1"),
    "no format": (about(format=...), "'format': expected format 3, got nothing"),
    "threads of a word": (about(threads="1"), "'threads': expected a number from 1 to 1024, got '1'"),
    "a million threads": (about(threads=10**6), "'threads': expected a number from 1 to 1024, got 1000000"),
    "starts of a list": (about(starts=[4]), "'starts': expected numbers below 64 by tensor, got [4]"),
    "a far start": (
        about(starts={"batch 0": 64}),
        "'starts': expected numbers below 64 by tensor, got {'batch 0': 64}",
    ),
    "no rank": (about(rank=None), "'rank': expected the number of a rank, got None"),
    "a rank of true": (about(rank=True), "'rank': expected the number of a rank, got True"),
    "axes of a list": (about(axes=[2]), "'axes': expected the sizes of at most 16 axes, by name, got [2]"),
    "an axis of nothing": (
        about(axes={"shard": 0}),
        "'axes': expected the sizes of at most 16 axes, by name, got {'shard': 0}",
    ),
    "many ranks": (about(axes={"shard": 10**5}), "expected what 100000 ranks wrote, got that of ranks [0]"),
    "a plan of a number": (about(plan=3), "'plan': expected a text, got 3"),
    "no state": (about(**{"before state": ...}), "'before state': expected the paths of a tree"),
    "a state of numbers": (
        about(**{"before state": {"paths": [1], "plain": {}}}),
        "'before state': expected the paths",
    ),
    "values of others": (
        about(**{"after state": {"paths": [], "plain": {"7": 1}}}),
        "'after state': expected the paths",
    ),
    "a value of a list": (about(**{"after state": {"paths": ["a"], "plain": {"0": []}}}), "'after state': expected"),
    "no tensors": (lambda rank: (rank / "before.pt").unlink(), "before.pt: expected the tensors of a recorded step"),
    "empty tensors": (bytes_of(lambda data: b""), "before.pt: expected the tensors of a recorded step"),
    "cut tensors": (
        bytes_of(lambda data: data[: len(data) // 2]),
        "before.pt: expected the tensors of a recorded step",
    ),
    "a pickle": (bytes_of(lambda data: pickle.dumps(Runs())), "before.pt: expected the tensors of a recorded step"),
    "code among tensors": (tensors(lambda x: x | {"state 0": Runs()}), "before.pt: expected the tensors of a recorded"),
    "tensors of a list": (
        tensors(lambda x: list(x.values())),
        "before.pt: expected the tensors of a recorded step: a list",
    ),
    "words among tensors": (tensors(lambda x: x | {"state 0": "w"}), "expected a tensor, got 'w'"),
    "a view without memory": (
        tensors(lambda x: x | {"state 0": torch.ones(1).expand(1 << 40)}),
        "'state 0' is no whole",
    ),
    "packed tensors": (bomb, "is compressed: expected plain bytes, as torch.save writes them"),
    "a tensor that is missing": (
        tensors(lambda x: {k: v for k, v in x.items() if k != "state 0"}),
        "expected 'state 0' (",
    ),
    "another dtype": (tensors(lambda x: x | {"state 0": x["state 0"].float()}), "'state 0', leaf 'params"),
    "another dtype of a moment": (
        tensors(lambda x: x | {"state 2": x["state 2"].float()}),
        "leaf 'opt_state.inner.m.mu.0': expected torch.float64[195], got torch.float32[195]",
    ),
    "another shape": (tensors(lambda x: x | {"state 0": torch.ones(3).double()}), "expected torch.float64["),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of one device."""
    path = tmp_path_factory.mktemp("alone")
    train(None, str(path), 2)
    return path


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_one_error(name, alone, tmp_path, monkeypatch):
    """An edited record is one error that names the folder, and runs no code: otherwise a file from elsewhere could
    attack a user."""
    monkeypatch.setenv("FSHARD_TEST_RAN", str(tmp_path / "ran"))
    edit, words = EDITS[name]
    rank = Path(shutil.copytree(alone, tmp_path / "copy")) / "step-00000001" / "rank-0"
    edit(rank)
    with pytest.raises(ValueError, match="expected") as caught:
        replay(tmp_path / "copy", replayed.make)
    assert str(rank.parent) in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "ran").exists()


def contents(rank: Path) -> Any:
    """What the files of a rank hold, without the number of threads and addresses: any give these results the same
    bits."""
    about = json.loads((rank / "about.json").read_bytes()) | {"threads": None, "starts": None}
    return about, [recording._recorded_tensors(rank / name) for name in ("before.pt", "after.pt")]


@pytest.mark.parametrize("seed", range(16))
def test_any_edited_byte(seed, alone, tmp_path):
    """A changed byte gives a ValueError or other bits, or files that hold the same: otherwise a damaged file would
    crash the replay, or be taken for a whole one."""
    r = random.Random(seed)
    rank = Path(shutil.copytree(alone, tmp_path / "copy")) / "step-00000001" / "rank-0"
    whole = contents(rank)
    for _ in range(6):
        file = rank / r.choice(["about.json", "before.pt", "after.pt"])
        good = file.read_bytes()
        bad = bytearray(good)
        bad[r.randrange(len(bad))] ^= 1 << r.randrange(8)
        file.write_bytes(bad)
        with contextlib.suppress(ValueError):
            (found,) = replay(tmp_path / "copy", replayed.make)
            # a zip has bytes that hold nothing: dates, permissions, padding
            assert found.different or same_bits(contents(rank), whole)
        file.write_bytes(good)


def test_folders_that_are_no_steps(alone, tmp_path):
    """A folder with a wrong name is an error that shows the right form; without it the folder would be skipped
    silently."""
    shutil.copytree(alone / "step-00000001", tmp_path / "step-one")
    with pytest.raises(ValueError, match="step-one: expected the number of a step, as in step-00000012"):
        replay(tmp_path, replayed.make)
