"""Checkpoints that were made to do harm, or damaged: refused in bounded time and memory; nothing else happens."""

import errno
import gzip
import json
import os
import pickle
import random
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.worlds import simulated

import fshard
from fshard import checkpoint
from fshard.checkpoint import CheckpointError
from fshard.files import foreign
from fshard.files.folders import flush
from fshard.files.index import sealed

STEP = "step-000000000007"


def state_of(mesh: Any, scale: float = 1.0) -> dict[str, Any]:
    """A state with sharded leaves, whole ones, values, and a value and a leaf that differ between ranks."""
    rank = 0 if mesh is None else mesh.get_rank()
    whole = {"w": torch.arange(15.0).view(5, 3), "b": torch.arange(4.0) - 2}
    params = fshard.shard_params({name: x * scale for name, x in whole.items()}, fshard.make_plan(whole, mesh))
    tokens = torch.arange(3) * round(scale)
    return {"params": params, "tokens": tokens, "epoch": round(3 * scale), "pos": rank, "queue": torch.tensor([rank])}


def bits_of(state: dict[str, Any]) -> list[Any]:
    """All of a state, to compare."""
    whole = fshard.gather_params(state["params"])
    return [
        *(x.tolist() for x in whole.values()),
        *(torch.as_tensor(state[name]).tolist() for name in state if name != "params"),
    ]


def saved(mesh: Any, dir: Path, step: int = 7, scale: float = 1.0) -> None:
    """Save a state."""
    checkpoint.save(dir, state_of(mesh, scale), step)


def restored(mesh: Any, dir: Path, step: int | None = 7, fall_back: bool = False) -> list[Any]:
    """What is restored, into a state that has other values."""
    return bits_of(checkpoint.restore(dir, state_of(mesh, -1.0), step, fall_back=fall_back))


def wanted(mesh: Any, scale: float = 1.0) -> list[Any]:
    """What is to be restored."""
    return bits_of(state_of(mesh, scale))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which two ranks have saved two checkpoints."""
    dir = tmp_path_factory.mktemp("run")
    simulated(saved, dir, 6, 2.0)
    simulated(saved, dir, 7, 1.0)
    return dir


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    """A copy of the folder of the second checkpoint, beside one of the first."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run" / STEP


def files_of(folder: Path) -> list[Path]:
    """The data files of both ranks."""
    first, second = sorted(folder.glob("*.safetensors"))
    return [first, second]


def edited(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Change the index, and its checksum with it."""
    index = json.loads((folder / "index.json").read_text())
    del index["checksum"]
    result = edit(index)
    result = index if result is None else result
    text = sealed(result) if isinstance(result, dict) else json.dumps(result).encode()
    (folder / "index.json").write_bytes(text)


def put(*keys: Any) -> Callable[[Any], None]:
    """Put the last of `keys` at the place in a JSON value that the others lead to."""

    def edit(value: Any) -> None:
        *path, last, new = keys
        for key in path:
            value = value[key]
        value[last] = new

    return edit


def rename_file(name: str) -> Callable[[Any], Any]:
    """Call the first file otherwise, everywhere."""
    return lambda index: json.loads(json.dumps(index).replace(min(index["files"]), json.dumps(name)[1:-1]))


def double(index: Any) -> None:
    """The second leaf lies where the first one does."""
    leaves = index["leaves"]
    leaves["params.w"]["pieces"][0][1] = leaves["params.b"]["pieces"][0][1]


W, PIECE = ("leaves", "params.w"), ("leaves", "params.w", "pieces", 0)
NOT_A_FILE = "expected the name of a safetensors file beside the index, got "
INDICES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda index: [index], "it is not a JSON object, but a list"),
    "a string": (lambda index: "index", "it is not a JSON object, but a str"),
    "null": (lambda index: "null", "it is not a JSON object, but a str"),
    "another format": (put("format", "torch"), "expected format 'fshard' and version 1, 2 or 3, got ('torch', 1)"),
    "a later version": (put("version", 4), "got ('fshard', 4)"),
    "a version that is true": (put("version", True), "version: expected a whole number, got True"),
    "a version that is a fraction": (put("version", 1.0), "version: expected a whole number, got 1.0"),
    "another step": (put("step", 8), "expected the index of step 7, got that of step 8"),
    "a negative step": (put("step", -7), "expected a number of at least 0, got -7"),
    "no step": (lambda index: index.pop("step") and None, "step: expected a whole number, got None"),
    "no ranks": (put("ranks", 0), "ranks: expected at least 1"),
    "many ranks": (put("ranks", 2**62), "'pos': expected an entry for each of 4611686018427387904 ranks"),
    "more ranks": (put("ranks", 3), "'pos': expected an entry for each of 3 ranks"),
    "threads of a word": (put("threads", "1"), "expected a number of at least 0, got '1'"),
    "ranks without an entry": (put("by_rank", ["tokens"]), "'tokens' comes twice"),
    "ranks of what is not there": (put("by_rank", ["x"]), "'x': expected an entry for each of 2 ranks"),
    "ranks in a string": (put("by_rank", "pos"), "by_rank: expected a list, got 'pos'"),
    "ranks of numbers": (put("by_rank", [1]), "by_rank: expected strings"),
    "a name twice": (put("by_rank", ["pos", "pos"]), "'pos' comes twice"),
    "plans that are none": (put("plans", [["x"]]), "plans: expected strings"),
    "plans in a string": (put("plans", "x"), "plans: expected a list, got 'x'"),
    "leaves in a list": (put("leaves", []), "leaves: expected an object, got []"),
    "files in a list": (put("files", ["a"]), "files: expected an object, got ['a']"),
    "values in a list": (put("values", []), "values: expected an object, got []"),
    "a list as value": (put("values", "epoch", [3]), "'epoch': expected a tensor, a number or a string"),
    "no value": (put("values", "epoch", None), "'epoch': expected a tensor, a number or a string"),
    "a number as leaf": (put(*W, 1), "'params.w': dtype: expected a string, got None"),
    "an unknown dtype": (put(*W, "dtype", "F128"), "'params.w': expected one of the dtypes of safetensors, got 'F128'"),
    "a dtype that is a list": (put(*W, "dtype", ["F32"]), "'params.w': dtype: expected a string, got ['F32']"),
    "a pickle as dtype": (put(*W, "dtype", "cos\nsystem\n"), "'params.w': expected one of the dtypes of safetensors"),
    "a shape that is a string": (put(*W, "shape", "53"), "'params.w': shape: expected a list, got '53'"),
    "a negative size": (put(*W, "shape", [-5, -3]), "'params.w': expected a number of at least 0, got -5"),
    "a size that is true": (put(*W, "shape", [15, True]), "'params.w': expected a number of at least 0, got True"),
    "a fraction": (put(*W, "shape", [5.0, 3]), "'params.w': expected a number of at least 0, got 5.0"),
    "NaN": (put(*W, "shape", [float("nan")]), "'params.w': expected a number of at least 0, got nan"),
    "endless": (put(*W, "shape", [float("inf")]), "'params.w': expected a number of at least 0, got inf"),
    "a huge number": (put(*W, "shape", [10**4000]), "'params.w': expected a number of at least 0, got 1000000000000"),
    "an overflow": (put(*W, "shape", [2**32, 2**32]), "'params.w': no tensor has the shape (4294967296, 4294967296)"),
    "a billion sizes": (put(*W, "shape", [2**40] * 10_000), "'params.w': no tensor has the shape (1099511627776, "),
    "a larger shape": (put(*W, "shape", [2**30, 3]), "'params.w': its pieces: expected 3221225472 elements, got 15"),
    "a smaller shape": (put(*W, "shape", [5, 2]), "'params.w': its pieces: expected 10 elements, got 15"),
    "an order in a string": (put(*W, "order", "1"), "'params.w': order: expected [dim] or [dim, blocks, parts]"),
    "an order of two": (put(*W, "order", [1, 1]), "for shape (5, 3), got [1, 1]"),
    "an order along no dim": (put(*W, "order", [2]), "for shape (5, 3), got [2]"),
    "an order of fractions": (put(*W, "order", [0.5]), "'params.w': expected a number of at least 0, got 0.5"),
    "an order of no blocks": (put(*W, "order", [1, 0, 2]), "for shape (5, 3), got [1, 0, 2]"),
    "an order of uneven blocks": (put(*W, "order", [1, 2, 2]), "for shape (5, 3), got [1, 2, 2]"),
    "an order of endless parts": (put(*W, "order", [1, 3, 2**60]), "got [1, 3, 1152921504606846976]"),
    "no pieces": (put(*W, "pieces", []), "'params.w': its pieces: expected 15 elements, got 0"),
    "pieces in an object": (put(*W, "pieces", {}), "'params.w': pieces: expected a list, got {}"),
    "a piece that is a string": (put(*PIECE, "abcde"), "expected [file, offset, begin, number of elements, checksums]"),
    "a piece of four": (put(*PIECE, ["x", 0, 0, 15]), "'params.w': expected [file, offset,"),
    "a hole": (put(*PIECE, 2, 1), "'params.w': its pieces: expected elements from 0 on, got "),
    "an overlap of elements": (put("leaves", "params.w", "pieces", 1, 2, 0), "'params.w': its pieces: expected"),
    "an empty piece": (put(*PIECE, 3, 0), "'params.w': its pieces: expected elements from 0 on, got 0 from 0 on"),
    "a negative offset": (put(*PIECE, 1, -8), "'params.w': expected a number of at least 0, got -8"),
    "an offset that is true": (put(*PIECE, 1, True), "'params.w': expected a number of at least 0, got True"),
    "an offset beyond": (put(*PIECE, 1, 10**6), "bytes from byte 1000000 on are beyond the end of "),
    "an absurd offset": (put(*PIECE, 1, 2**63 - 1), "bytes from byte 9223372036854775807 on are beyond the end of "),
    "the bytes of another leaf": (double, "'params.w' begins at byte "),
    "a file that is not listed": (put(*PIECE, 0, "x.safetensors"), "expected one of the files of the index, got 'x."),
    "a file that is a list": (put(*PIECE, 0, ["x"]), "'params.w': expected [file, offset, begin, number of elements, "),
    "no checksums": (put(*PIECE, 4, []), "'params.w': expected a checksum of each 4194304 bytes, got 0 for "),
    "two checksums": (put(*PIECE, 4, [1, 2]), "'params.w': expected a checksum of each 4194304 bytes, got 2 for "),
    "a checksum that is a string": (put(*PIECE, 4, ["1"]), "'params.w': expected a number of at least 0, got '1'"),
    "checksums in an object": (put(*PIECE, 4, {"1": 1}), "'params.w': expected [file, offset, begin, "),
    "a wrong checksum": (put(*PIECE, 4, [1]), "leaf 'params.w': the "),
    "a size that lies": (put("files", "x.safetensors", -1), "expected a number of at least 0, got -1"),
    "a value that is a leaf": (put("values", "tokens", 3), "'tokens' comes twice"),
    "a value that is a leaf of ranks": (put("values", "queue", 3), "'queue' comes twice"),
    "the folder above": (rename_file("../x.safetensors"), NOT_A_FILE + "'../x.safetensors'"),
    "the root": (rename_file("/etc/passwd"), NOT_A_FILE + "'/etc/passwd'"),
    "a drive": (rename_file("c:x.safetensors"), NOT_A_FILE),
    "another separator": (rename_file("..\\x.safetensors"), NOT_A_FILE),
    "an URL": (rename_file("http://x.org/x.safetensors"), NOT_A_FILE),
    "no name": (rename_file(""), NOT_A_FILE + "''"),
    "NUL": (rename_file("x\0.safetensors"), NOT_A_FILE + r"'x\x00.safetensors'"),
    "a surrogate": (rename_file("x\ud800.safetensors"), NOT_A_FILE + r"'x\ud800.safetensors'"),
    "a line": (rename_file("x.safetensors\n"), NOT_A_FILE),
    "the index itself": (rename_file("index.json"), NOT_A_FILE + "'index.json'"),
    "a pickle": (rename_file("x.pt"), NOT_A_FILE + "'x.pt'"),
    "a long name": (rename_file("x" * 300 + ".safetensors"), NOT_A_FILE),
}  # fmt: skip


@pytest.mark.parametrize("what", INDICES)
def test_an_index_that_is_none_is_an_error(what, folder, tmp_path):
    """An index that was made to do harm would be read as numbers, lead out of the folder, or end the process."""
    edit, words = INDICES[what]
    edited(folder, edit)
    before = all_files(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(words)) as failure:
        simulated(restored, tmp_path / "run")
    assert str(folder) in str(failure.value)
    assert len(str(failure.value)) < 2000
    assert all_files(tmp_path) == before


def all_files(path: Path) -> dict[Path, object]:
    """All there is under a path."""
    return {x: os.readlink(x) if x.is_symlink() else x.read_bytes() if x.is_file() else None for x in path.rglob("*")}


class Harm:
    """What makes a folder when a pickle of it is read."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def a_pickle(path: Path) -> None:
    """Put a pickle in the place of a file."""
    path.write_bytes(pickle.dumps(Harm(path.parent / "harm")))


def a_zip(path: Path) -> None:
    """Put a zip file in its place, of 8 MiB of zeros in 8 KiB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data", bytes(1 << 23))


def compressed(path: Path) -> None:
    """Compress a file, as some do by themselves."""
    path.write_bytes(gzip.compress(path.read_bytes()))


def a_link(path: Path) -> None:
    """Let the name lead to the same bytes elsewhere."""
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def a_pipe(path: Path) -> None:
    """A pipe, which nobody writes to."""
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    """A folder of the name, with a file in it."""
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"x")


def a_device(path: Path) -> None:
    """A link to a device that never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def torn(path: Path) -> None:
    """The second half was never written."""
    os.truncate(path, path.stat().st_size // 2)


def zeros_at_the_end(path: Path) -> None:
    """The second half was never written, and its blocks are there: what a loss of power may leave."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


def longer(path: Path) -> None:
    """A byte more."""
    path.write_bytes(path.read_bytes() + b"x")


def flipped(path: Path) -> None:
    """One bit of the last number is another one."""
    data = bytearray(path.read_bytes())
    data[max(data.rfind(digit) for digit in b"0123456789") if path.suffix == ".json" else -1] ^= 1
    path.write_bytes(data)


def of_another_step(path: Path) -> None:
    """The file of the same rank, leaves and size of another checkpoint."""
    other = sorted(
        path.parent.with_name("step-000000000006").glob(f"*{path.name[8:]}" if "rank" in path.name else path.name)
    )
    path.write_bytes(other[0].read_bytes())


DAMAGE: dict[Callable[[Path], None], tuple[str, str]] = {
    Path.unlink: ("no checkpoint of step 7; the last ones are: 6", "No such file or directory"),
    a_pickle: ("it is not JSON", "it is cut off, or another file. It has leaf '"),
    a_zip: ("it is not JSON", "it is too long, or another file"),
    compressed: ("it is not JSON", "it is cut off, or another file"),
    a_link: ("Too many levels of symbolic links", "Too many levels of symbolic links"),
    a_device: ("Too many levels of symbolic links", "Too many levels of symbolic links"),
    a_pipe: ("expected a regular file", "expected a regular file"),
    a_folder: ("expected a regular file", "expected a regular file"),
    torn: ("it is not JSON", "it is cut off, or another file"),
    zeros_at_the_end: ("it is not JSON", "are not those that were saved. Restore an earlier step, or pass fall_back"),
    longer: ("it is not JSON", "it is too long, or another file"),
    flipped: ("it was changed or damaged: its checksum is that of another text", "are not those that were saved"),
    of_another_step: ("expected the index of step 7, got that of step 6", "are not those that were saved"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("which", ["index", "data"])
def test_a_damaged_checkpoint_is_an_error(which, damage, folder, tmp_path):
    """A torn file, a flipped bit or a link would be numbers; a pickle would run code. The step before is restored."""
    path = folder / "index.json" if which == "index" else min(folder.glob("*.safetensors"))
    damage(path)
    before = all_files(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(DAMAGE[damage][which == "data"])) as failure:
        simulated(restored, tmp_path / "run")
    assert str(path if damage != Path.unlink or which == "data" else tmp_path) in str(failure.value)
    assert simulated(restored, tmp_path / "run", None, True) == simulated(wanted, 2.0)
    assert all_files(tmp_path) == before


def test_a_link_in_the_place_of_a_folder_leads_nowhere(folder, tmp_path):
    """A link would let a save or deletion change files elsewhere, or a checkpoint be read that is not there."""
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    before, dir = all_files(tmp_path), tmp_path / "run"
    with pytest.warns(UserWarning, match=f"passed over, because they are symbolic links: {folder.name}"):
        assert checkpoint.latest(dir) == 6
    for call in (
        lambda: checkpoint.delete(dir, 7),
        lambda: restored(None, dir),
        lambda: saved(None, dir),
    ):
        with pytest.raises(OSError, match=rf"expected a folder, got a symbolic link: '{folder}'"):
            call()
    assert all_files(tmp_path) == before


# what may have the name of a step and is no checkpoint
ODD: dict[str, Callable[[Path], None]] = {
    "a link to a checkpoint": lambda path: path.symlink_to(path.with_name(STEP)),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a file": lambda path: path.symlink_to("/dev/zero"),
    "a file": lambda path: path.touch(),
    "a pipe": os.mkfifo,
    "an empty folder": Path.mkdir,
}


def test_a_run_whose_folders_are_links_does_not_begin_anew_without_a_word(folder, tmp_path):
    """A job whose checkpoints were moved to another disk, with links in their place, would start from the beginning."""
    dir = tmp_path / "run"
    for name in ("step-000000000006", STEP):
        (dir / name).rename(tmp_path / name)
        (dir / name).symlink_to(tmp_path / name)
    words = f"{dir}: passed over, .* links: step-000000000006, {STEP}"
    with pytest.warns(UserWarning, match=words):
        assert checkpoint.steps(dir) == []
    with pytest.warns(UserWarning, match=words):
        assert checkpoint.latest(dir) is None
    none = "no checkpoint; the last ones are: none"
    with pytest.warns(UserWarning, match=words), pytest.raises(CheckpointError, match=none):
        restored(None, dir, None)


@pytest.mark.filterwarnings("ignore:.* passed over, because they are symbolic links:UserWarning")
@pytest.mark.parametrize("what", ODD)
def test_what_has_the_name_of_a_step_is_passed_over(what, folder, tmp_path):
    """One odd name in the directory of a run would make every look at its checkpoints, and every save, fail."""
    dir, first, last = tmp_path / "run", folder.with_name("step-000000000001"), folder.with_name("step-000000000008")
    for path in (first, last):
        ODD[what](path)
    assert (checkpoint.steps(dir), checkpoint.latest(dir)) == ([6, 7], 7)
    assert simulated(restored, dir, None) == simulated(wanted)
    torn(folder / "index.json")
    before = all_files(dir)
    assert simulated(restored, dir, None, True) == simulated(wanted, 2.0)
    assert all_files(dir) == before
    checkpoint.save(dir, state_of(None), 9, keep_last=1)
    assert checkpoint.steps(dir) == [9]
    left = {x.name for x in dir.iterdir()} - {"step-000000000009"}
    assert left == (set() if what == "an empty folder" else {first.name, last.name})


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_folder_that_cannot_be_flushed(number, tmp_path, monkeypatch):
    """On some network file systems nothing could be saved, because they cannot flush a folder."""
    flush, asked = os.fsync, list[bool]()

    def fsync(fd: int) -> None:
        asked.append(is_folder := stat.S_ISDIR(os.fstat(fd).st_mode))
        if is_folder:
            raise OSError(number, os.strerror(number))
        flush(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    saved(None, tmp_path / "run")
    assert restored(None, tmp_path / "run") == wanted(None)
    assert set(asked) == {False, True}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("of_folder", [False, True])
def test_what_is_not_flushed_is_an_error_that_names_it(of_folder, number, tmp_path, monkeypatch):
    """A checkpoint that is not on the disk would count as saved; or the error would not say where that is."""

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) == of_folder:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if of_folder and number == errno.EINVAL:
        return saved(None, tmp_path / "run")  # the test above
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as failure:
        saved(None, tmp_path / "run")
    assert failure.value.errno == number
    return None


def test_a_file_that_cannot_be_flushed_is_an_error(tmp_path, monkeypatch):
    """Weights that are not on the disk would count as saved, as if they were a folder."""
    (tmp_path / "x").touch()
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EINVAL, "no")))
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "x"))):
        flush(tmp_path / "x")


def test_links_in_a_folder_are_deleted_and_not_followed(folder, tmp_path):
    """A link in the folder of a checkpoint would let its deletion, or a save, delete or write files elsewhere."""
    for number, name in enumerate(["index.json", *(path.name for path in files_of(folder)), ".index.json.12", "x"]):
        (tmp_path / f"elsewhere {number}").write_text("here")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / f"elsewhere {number}")
    saved(None, tmp_path / "run")
    assert restored(None, tmp_path / "run") == wanted(None)
    checkpoint.delete(tmp_path / "run", 7)
    assert checkpoint.steps(tmp_path / "run") == [6]
    assert not folder.exists()
    assert {path.read_text() for path in tmp_path.glob("elsewhere *")} == {"here"}


@pytest.mark.parametrize("name", ["index.json", "../elsewhere", "../../elsewhere", "sub/../../../elsewhere"])
def test_an_index_that_is_replaced_deletes_no_other_file(name, folder, tmp_path):
    """A save in the place of an index that names the index, or files elsewhere, would delete them with the old ones."""
    (tmp_path / "elsewhere").write_text("here")
    (tmp_path / "run" / "elsewhere").write_text("here")
    edited(folder, lambda index: index["files"].update({name: 4}))
    saved(None, tmp_path / "run")
    assert restored(None, tmp_path / "run") == wanted(None)
    assert (tmp_path / "elsewhere").exists()
    assert (tmp_path / "run" / "elsewhere").exists()


def test_a_folder_named_like_the_index_is_an_error(folder, tmp_path):
    """A save that cannot put its index in place would leave the text of the index behind each time."""
    (folder / "index.json").unlink()
    (folder / "index.json").mkdir()
    with pytest.raises(OSError, match=str(folder / "index.json")):
        saved(None, tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == [6]
    assert list(folder.glob(".*")) == []


def test_steps_are_numbered_in_digits_of_json(folder, tmp_path):
    """A folder whose number has digits of another script would list the step of the same number twice."""
    shutil.copytree(folder, folder.with_name("step-00000000000\N{ARABIC-INDIC DIGIT SEVEN}"))
    shutil.copytree(folder, folder.with_name("step-7"))
    assert checkpoint.steps(tmp_path / "run") == [6, 7]


def test_a_directory_that_cannot_be_listed(tmp_path):
    """A directory that is a file, and whose name is not text, would be no error, or let ranks wait for each other."""
    other = tmp_path / "\udcff"
    other.write_bytes(b"a file")

    def on_a_rank(mesh: Any) -> str:
        with pytest.raises(OSError, match="Not a directory") as failure:
            restored(mesh, other, None)
        return str(failure.value)

    assert all(repr(str(other)) in text for text in simulated(on_a_rank))


@pytest.mark.parametrize(
    "name",
    [
        "../../elsewhere",
        "/etc/x",
        "",
        "a\n\0b",
        "x[0:1]",
        "w@0",
        "w@1",
        "__metadata__x",
        "\U0001f600",
        "__proto__",
        "index.json",
    ],
)
def test_names_of_leaves_are_no_names_of_files(name, tmp_path):
    """A leaf with a name such as "../x" would be written elsewhere, or not be read back."""
    state = {name: torch.arange(3), f"{name}/": 2.5}
    checkpoint.save(tmp_path / "run", state, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    back = checkpoint.restore(tmp_path / "run", {name: torch.zeros(3, dtype=torch.int64), f"{name}/": 0.0})
    assert back[name].tolist() == [0, 1, 2]
    assert back[f"{name}/"] == 2.5


@pytest.mark.parametrize("shard", [1, 2])
def test_a_name_that_is_no_text_is_an_error(shard, tmp_path):
    """A lone surrogate would be an error of an encoding, without the leaf; in the background, too."""

    def job(mesh: Any) -> None:
        params = fshard.shard_params(state := {"w\ud800": torch.ones(3)}, fshard.make_plan(state, mesh))
        for save in (
            lambda: checkpoint.save(tmp_path / "run", params, 1, wait=False),
            lambda: checkpoint.save_safetensors(tmp_path / "files", params),
        ):
            with pytest.raises(ValueError, match=r"save.*: names that are no text: '.*w\\ud800'\. Rename the leaves"):
                save()

    simulated(job, shard=shard)


def test_an_index_that_would_be_refused_is_not_put_in_place(folder, tmp_path, monkeypatch):
    """An index that is too long to be read would take the place of one that can be read."""
    monkeypatch.setattr(foreign, "MOST_BYTES", 500)
    with pytest.raises(
        CheckpointError, match=rf"{folder}/index.json: not an index .*: expected at most 500 bytes, got"
    ):
        saved(None, tmp_path / "run")
    monkeypatch.undo()
    assert simulated(restored, tmp_path / "run") == simulated(wanted)


LIMITED = """
import json, os, resource, sys, time
from pathlib import Path
import torch
from fshard import checkpoint
from fshard.files.index import sealed

folder = Path(sys.argv[1]) / "step-000000000001"
checkpoint.save(sys.argv[1], {"w": torch.ones(2)}, 1)
good = json.loads((folder / "index.json").read_text())
del good["checksum"]
w, values = good["leaves"]["w"], {f"x@{rank}": 1 for rank in range(50_000)}
texts = {
    "tiny lists": lambda: b"[" + b"[]," * 10_000_000 + b"1]",
    "zeros": lambda: bytes(1 << 24),
    "deep": lambda: b'{"abcdefgh":' * 50_000,
    "sizes": lambda: sealed(good | {"leaves": {"w": w | {"shape": [2**62] * 200_000}}}),
    "pieces": lambda: sealed(good | {"leaves": {"w": w | {"pieces": w["pieces"] * 30_000}}}),
    "a long name": lambda: sealed(good | {"values": {"x" * 5_000_000: []}}),
    "many ranks": lambda: sealed(good | {"ranks": 50_000, "values": values, "by_rank": [*"xyz"]}),
    "many names": lambda: sealed(good | {"values": {f"{number}@0": 1 for number in range(50_000)}}),
    "a terabyte": lambda: b"",
}
for what, make in texts.items():
    (folder / "index.json").write_bytes(make())
    if what == "a terabyte":
        os.truncate(folder / "index.json", 1 << 40)
    # so much more than the process has now; what torch maps does not count
    kilobytes = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (kilobytes * 1024 + (200 << 20), resource.RLIM_INFINITY))
    begin = time.process_time()
    try:
        checkpoint.restore(sys.argv[1], {"w": torch.zeros(2)}, 1)
    except ValueError as error:
        assert len(str(error)) < 2000
        assert time.process_time() - begin < 60  # hours if something is quadratic
        print(what, "|", error)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
REFUSED = {
    "tiny lists": "the text: it may take 1,690,000,105 bytes of memory: expected at most 1,073,741,824",
    "zeros": "it is not JSON: Expecting value",
    "deep": "it is not JSON: maximum recursion depth exceeded",
    "sizes": "'w': no tensor has the shape (4611686018427387904, ",
    "pieces": "'w': its pieces: expected elements from 2 on, got 2 from 0 on",
    "a long name": "xxx",
    "many ranks": "'y': expected an entry for each of 50000 ranks",
    "many names": "it has 50000 names that `like` has not: '0@0', '1@0', ",
    "a terabyte": "expected at most 134,217,728 bytes, got 1,099,511,627,776",
}


def test_an_absurd_index_takes_bounded_time_and_memory(tmp_path):
    """An index of a billion entries would fill the memory, or keep a rank busy for hours."""
    run = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = dict(line.split(" | ") for line in run.stdout.splitlines())
    assert lines.keys() == REFUSED.keys()
    assert [what for what, words in REFUSED.items() if words not in lines[what]] == []


def random_json(draw: random.Random) -> Any:
    """Something that JSON has."""
    kinds = [None, True, 0, 1, -1, 7, 0.5, 2**63, float("nan"), "", "w", "params.w", "index.json", [], {}, [0], ["w"]]
    return draw.choice([*kinds, draw.randrange(600), [draw.randrange(9) for _ in range(draw.randrange(6))]])


def mutated(index: Any, draw: random.Random) -> None:
    """Change, delete, copy or rename something in an index, once or a few times."""
    for _ in range(draw.choice([1, 1, 2, 5])):
        if index:
            mutated_once(index, draw)


def mutated_once(index: Any, draw: random.Random) -> None:
    """Change, delete, copy or rename something in an index."""
    parents = [index]
    for parent in parents:
        parents += [
            x for x in (parent.values() if isinstance(parent, dict) else parent) if isinstance(x, dict | list) and x
        ]
    parent, other = draw.choice(parents), draw.choice(parents)
    keys, others = ([*(x if isinstance(x, dict) else range(len(x)))] for x in (parent, other))
    key, another = draw.choice(keys), draw.choice(others)
    kind = draw.randrange(4)
    if kind == 0:
        parent[key] = random_json(draw)
    elif kind == 1:
        del parent[key]
    elif kind == 2:
        parent[key] = json.loads(json.dumps(other[another]))
    elif isinstance(parent, dict):
        parent[draw.choice(["w", "step", "params.w", "params.b@0", "pos@1", "pos@2", "queue"])] = parent.pop(key)
    else:
        parent.insert(draw.randrange(len(parent) + 1), parent[key])


@pytest.fixture(scope="module")
def right() -> list[Any]:
    """What is to be restored on each of two ranks."""
    return simulated(wanted)


def right_or_error(folder: Path, right: list[Any], is_forged: bool) -> str:
    """Restore on two ranks; what error there was. A state that is restored is the one that was saved.

    A forged index may say that other bytes are a value, but not that they are the elements of a tensor.
    """
    try:
        results = simulated(restored, folder.parent)
    except (ValueError, fshard.MismatchError) as error:  # a leaf of one rank may differ from what it wants
        return type(error).__name__
    for result, expected in zip(results, right, strict=True):
        assert result == expected or (is_forged and result[:3] == expected[:3])
    return "right"


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.filterwarnings("ignore:restore.*was saved with")  # a changed number of threads
def test_a_changed_index_is_right_or_an_error(seed, folder, right):
    """A change of an index would end with an error that nobody meant, or with other numbers."""
    draw = random.Random(seed)
    for _ in range(10):
        text = (folder / "index.json").read_bytes()
        edited(folder, lambda index: mutated(index, draw))
        right_or_error(folder, right, is_forged=True)
        (folder / "index.json").write_bytes(text)


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Flip a bit, cut off, insert, delete, or exchange two parts."""
    a, b, c = sorted(draw.randrange(len(data) + 1) for _ in range(3))
    kind = draw.randrange(5)
    if kind == 0 and a < len(data):
        return data[:a] + bytes([data[a] ^ 1 << draw.randrange(8)]) + data[a + 1 :]
    return [
        data[:a],
        data[:a] + draw.randbytes(b - a) + data[b:],
        data[:a] + data[b:],
        data[:a] + data[b:c] + data[a:b] + data[c:],
    ][max(kind - 1, 0)]


@pytest.mark.parametrize("seed", range(80))
def test_changed_bytes_are_right_or_an_error(seed, folder, right):
    """A flipped bit in any file would be restored: in a number of the index, too."""
    draw = random.Random(seed)
    for _ in range(10):
        path = draw.choice(sorted(folder.iterdir()))
        data = path.read_bytes()
        path.write_bytes(changed_bytes(data, draw))
        result = right_or_error(folder, right, is_forged=False)
        if path.name == "index.json":
            assert (result == "right") == (path.read_bytes() == data)
        path.write_bytes(data)
