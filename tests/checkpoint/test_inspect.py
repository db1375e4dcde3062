"""`fshard inspect`: what checkpoints have, whether it is whole, and how two of them differ."""

import json
import math
import os
import random
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file, save_file
from support.stores import new_url
from support.worlds import simulated

import fshard
from fshard import checkpoint
from fshard.__main__ import main
from fshard.checkpoint.comparing import compare
from fshard.files.folders import folder_of
from fshard.files.index import sealed
from fshard.files.safetensors_file import CHUNK, DTYPES, NAMES


def leaves(seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole leaves by name, of sizes that no number of ranks divides."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"blocks.0.w": (7, 5), "blocks.0.b": (3,), "blocks.1.w": (7, 5), "blocks.1.b": (3,), "head": (11,)}
    x = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    x["blocks.0.w"][0, 0] = math.inf  # in both of two checkpoints: no difference
    return x


def save(dir: Any, step: int = 1, ranks: int = 2, change: Callable[[Any], None] | None = None, seed: int = 0) -> None:
    """Save sharded parameters, a whole leaf, a value, and what differs between ranks."""

    def on_rank(mesh: Any) -> None:
        x = leaves(seed)
        params = {"blocks": [{"w": x[f"blocks.{i}.w"], "b": x[f"blocks.{i}.b"]} for i in range(2)], "head": x["head"]}
        state = {"params": params, "scale": torch.tensor(0.5), "epoch": 3}
        if change is not None:
            change(state)
        state["params"] = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"]))
        if mesh.size("shard") > 1:
            state["at"] = torch.tensor(mesh.get_local_rank("shard"))
        checkpoint.save(dir, state, step)

    simulated(on_rank, shard=ranks)


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Run the command; its exit status and what it prints."""

    def run(*args: Any) -> tuple[int, list[str]]:
        capsys.readouterr()
        status = main(["inspect", *map(str, args)])
        said = capsys.readouterr()
        return status, [*said.out.splitlines(), *said.err.splitlines()]

    return run


def data_files(folder: Path) -> list[Path]:
    """The files of ranks of a step, in rank order."""
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.name.partition("rank")[2])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_step_is_shown(kind, ranks, tmp_path, inspect):
    """A leaf would be missing, or shown with another shape, size, checksum or rank than the files have."""
    url = new_url(kind, tmp_path)
    save(url, 7, ranks)
    status, lines = inspect(url, "--step", 7)
    assert status == 0
    assert lines[0] == f"{url}: step 7, saved by {ranks} rank(s)"
    cells = [line.split() for line in lines]
    numel = {"w": 35, "b": 3, "head": 11, "scale": 1}
    shapes = {"w": ["[7,", "5]"], "b": ["[3]"], "head": ["[11]"], "scale": ["[]"]}
    rows = [row for row in cells if "F32" in row]
    for name, row in zip([*leaves(), "scale"], rows, strict=True):
        last = name.rpartition(".")[2]
        assert row[: row.index("F32") + 2] == [last, *shapes[last], "F32", str(4 * numel[last])]
        assert re.fullmatch("[0-9a-f]{8}", row[row.index("F32") + 2])
        if kind == "local":
            files = data_files(Path(url) / "step-000000000007")
            keys = [load_file(file).keys() for file in files]
            has = [rank for rank, of_rank in enumerate(keys) if any(name in key for key in of_rank)]
            word = "rank" if len(has) == 1 else "ranks"
            assert row[row.index("F32") + 3 :] == [word, f"{has[0]}-{has[-1]}" if len(has) > 1 else str(has[0])]
    block = ["    0", "      w", "      b"]
    tree = ["params", "  blocks", *block, "    1", *block[1:], "  head", "scale"]
    assert [re.match(r" *\w+", line)[0] for line in lines[4 : 4 + len(tree)]] == tree
    assert ["params", str(4 * (2 * 38 + 11))] in cells
    assert ["blocks", str(4 * 2 * 38)] in cells
    assert cells.count(["0", str(4 * 38)]) == cells.count(["1", str(4 * 38)]) == 1
    assert ["epoch", "3"] in cells
    assert [row[0] for row in cells if row and row[0].startswith("at@")] == [f"at@{rank}" for rank in range(ranks)][
        : ranks if ranks > 1 else 0
    ]
    assert len([row for row in cells if row and "-rank-0000" in row[0]]) == ranks
    plan = fshard.make_plan({"blocks": [{"w": leaves()["blocks.0.w"]}]}).fingerprint
    assert [len(row[1]) for row in cells if row[:1] == ["plan"]] == [len(plan)]


def test_programs_read_what_people_read(tmp_path, inspect):
    """JSON would lack a step, a leaf, a file or a fault that the text has, or have other numbers."""
    for step in (1, 2):
        save(str(tmp_path), step, 2)
    damaged, _ = data_files(tmp_path / "step-000000000002")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    status, lines = inspect(tmp_path, "--json")
    steps = [json.loads(line) for line in lines]
    assert (status, [row["step"] for row in steps], [row["files"] for row in steps]) == (0, [1, 2], [2, 2])
    status, lines = inspect(tmp_path, "--step", 2, "--json")
    rows = [json.loads(line) for line in lines]
    assert rows[0] == {"step": 2, "ranks": 2}
    plan = fshard.make_plan({"blocks": [{"w": leaves()["blocks.0.w"]}]}).fingerprint
    assert [len(row["plan"]) for row in rows if "plan" in row] == [len(plan)]
    assert [row for row in rows if "value" in row] == [{"name": "epoch", "value": 3}]
    by_name = {row["name"]: row for row in rows if "shape" in row}
    (shown,) = [line.split() for line in inspect(tmp_path, "--step", 1)[1] if line.startswith("scale ")]
    assert by_name["scale"] == {
        **{"name": "scale", "shape": [], "dtype": "F32", "bytes": 4, "checksum": shown[4], "on": [int(shown[6])]},
    }
    assert {row["name"] for row in by_name.values() if row["on"] == [0, 1]} == {
        "params.blocks.0.w",
        "params.blocks.1.w",
        "params.head",
    }
    assert [row["note"][:7] for row in rows if "file" in row] == ["damaged", ""]
    assert status == 1
    status, lines = inspect(tmp_path, "--verify", "--json")
    said = [json.loads(line) for line in lines]
    size = sum(row["bytes"] for row in by_name.values())
    assert (status, said[0]) == (1, {"step": 1, "bytes": size, "leaves": 8, "unchecked": 0, "intact": True})
    assert [(row["step"], row["intact"], row["file"]) for row in said[1:]] == [(2, False, damaged.name)] * len(said[1:])
    assert said[1]["fault"].startswith("expected ")
    status, lines = inspect(tmp_path, "--against", tmp_path, "--step", 1, "--at", 1, "--json")
    assert (status, json.loads(lines[-1])) == (0, {"unequal": 0, "compared": 9})


def test_programs_read_how_two_differ(tmp_path, inspect):
    """JSON would name another number of elements, place or value than the text, or be no JSON for nan."""
    save(tmp_path, 1)
    save(tmp_path, 2, change=change)
    lines = inspect(tmp_path, "--step", 1, "--against", tmp_path, "--json")[1]
    a, b, *rows, end = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert a == {"checkpoint": "A", "dir": str(tmp_path), "step": 1, "ranks": 2}
    assert b == a | {"checkpoint": "B", "step": 2}
    assert end == {"unequal": len(rows), "compared": 11}
    said = {row.pop("name"): row for row in rows}
    w = said["params.blocks.0.w"]
    assert w.pop("largest_difference") == pytest.approx(2)
    assert w == {"a": "F32[7, 5]", "b": "F32[7, 5]", "elements": 35, "unequal": 2, "at": [6, 4]}
    assert said["params.blocks.0.b"] == {"a": "F32[3]", "b": "F64[3]", "elements": 3, "unequal": 0}
    assert (said["params.blocks.1.b"]["largest_difference"], said["params.blocks.1.b"]["at"]) == (None, [1])
    assert said["epoch"] == {"a": 3, "b": 4}
    assert said["name"] == {"a": None, "b": "run"}


def test_a_plan_is_shown_once(tmp_path, inspect):
    """The plan of parameters, and of what is cut like them, would be shown again and again."""
    plan = fshard.make_plan({"w": torch.ones(2)})
    average, params = (fshard.shard_params({"w": torch.ones(2)}, plan) for _ in range(2))
    checkpoint.save(tmp_path, {"params": params, "average": average}, 1)
    assert inspect(tmp_path, "--step", 1)[1][1:3] == [f"plan {plan.fingerprint}", ""]


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
@pytest.mark.parametrize("kind", ["torch.distributed.checkpoint", "safetensors"])
def test_checkpoints_of_other_libraries_are_shown(kind, tmp_path, inspect):
    """What is in a checkpoint that `restore` reads could not be seen, or the command would say that there is none."""
    params = {"a.w": torch.ones(4, 3), "a.b": torch.ones(3, dtype=torch.bfloat16)}
    if kind == "safetensors":
        save_file(params, tmp_path / "model.safetensors")
    else:
        torch.distributed.checkpoint.save({**params, "epoch": 3}, checkpoint_id=tmp_path, no_dist=True)
    status, lines = inspect(tmp_path)
    assert status == 0
    assert lines[0] == f"{tmp_path}: a checkpoint of {kind}"
    assert {"  w   [4, 3]  F32       48", "  b   [3]     BF16       6"} <= {line.rstrip() for line in lines}
    assert ("epoch  3" in lines) == (kind != "safetensors")
    sentence = f"{tmp_path}: a checkpoint of {kind}, which has neither steps nor checksums"
    for args in (["--verify"], ["--step", 1]):
        assert inspect(tmp_path, *args) == (2, [f"fshard inspect: {sentence}"])


def test_steps_are_shown_with_what_killed_saves_left(tmp_path, inspect):
    """What a killed save has left would fill a disk unseen, or be taken for a checkpoint; damage would not be seen."""
    for step in (1, 20):
        save(tmp_path, step, ranks=3)
    (tmp_path / "step-000000000020" / "abcd-rank-00000.safetensors").write_bytes(b"12345")
    (tmp_path / "step-000000000030").mkdir()
    (tmp_path / "step-000000000030" / "abcd-rank-00001.json").write_bytes(b"1" * 1234)
    (tmp_path / "notes").mkdir()
    size = 4 * (2 * 38 + 11) + 4 + 3 * 8
    status, lines = inspect(tmp_path)
    assert status == 0
    assert [line.split() for line in lines] == [
        ["step", "leaves", "bytes", "ranks", "files", "left", "over"],
        ["1", "9", str(size), "3", "3", "0"],
        ["20", "9", str(size), "3", "3", "5"],
        ["30", "1,234", "not", "whole:", "it", "has", "no", "index"],
    ]
    status, lines = inspect(tmp_path, "--step", 20)
    assert status == 0
    assert lines[-2:] == [
        "left over by saves that were killed, or are under way:",
        "abcd-rank-00000.safetensors  5",
    ]
    assert inspect(tmp_path, "--step", 30)[0] == 2
    (tmp_path / "step-000000000001" / "index.json").write_text('{"format": "other"}')
    status, lines = inspect(tmp_path)
    assert status == 1
    assert "damaged: " in lines[1]
    assert "not an index of a checkpoint" in lines[1]
    assert lines[2].split()[0] == "20"


def test_damaged_data_is_named(tmp_path, inspect):
    """`--verify` would say that damaged data is whole, or name another leaf or file."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert inspect(tmp_path, "--verify") == (
        0,
        [f"step {step}: 368 bytes of 8 leaves are as they were saved" for step in (1, 2)],
    )
    folder = tmp_path / "step-000000000002"
    index = json.loads((folder / "index.json").read_text())
    for name, entry in index["leaves"].items():
        for file, offset, _, numel, _ in entry["pieces"]:
            data = bytearray((folder / file).read_bytes())
            byte = offset + random.Random(name + file).randrange(numel * (8 if name.startswith("at") else 4))
            data[byte] ^= 1 << byte % 8
            (folder / file).write_bytes(data)
            status, lines = inspect(tmp_path, "--verify", "--step", 2)
            assert status == 1
            (line,) = lines
            assert line.startswith(f"step 2: {folder}/{file}: leaf {name!r}: the ")
            assert "are not those that were saved" in line
            data[byte] ^= 1 << byte % 8
            (folder / file).write_bytes(data)
    assert inspect(tmp_path, "--verify")[0] == 0
    first, second = data_files(folder)
    first.write_bytes(first.read_bytes()[:-4])
    second.unlink()
    status, lines = inspect(tmp_path, "--verify")
    assert status == 1
    assert lines[0] == "step 1: 368 bytes of 8 leaves are as they were saved"
    assert any(line.startswith(f"step 2: {first}: expected ") for line in lines)
    assert any(line.startswith(f"step 2: {second}: [Errno 2]") for line in lines)
    status, lines = inspect(tmp_path, "--step", 2)
    assert status == 1
    assert [line.partition("damaged: ")[2] for line in lines if "damaged: " in line] == [
        f"it has {first.stat().st_size} bytes",
        "it is not there",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"params.head", b"params.heaf", "leaf 'params.head': the file's header has another name"),
        (b'"dtype":"F32"', b'"dtype":"I32"', "the file's header has another name, dtype"),
        (b'"shape":', b'"shapf":', "expected its dtype, shape and data_offsets"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, inspect, old, new, message):
    """`--verify` would say that a file is whole in which other programs find other names."""
    save(tmp_path)
    file = next(file for file in data_files(tmp_path / "step-000000000001") if old in file.read_bytes())
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    status, (line,) = inspect(tmp_path, "--verify")
    assert status == 1
    assert line.startswith(f"step 1: {file}: ")
    assert message in line


def test_two_that_are_the_same(tmp_path, inspect):
    """The same state, saved by other ranks, would differ; or all data would be read though the checksums say enough."""
    save(tmp_path / "a", 1, ranks=1)
    save(tmp_path / "b", 1, ranks=3)
    lines = inspect(tmp_path / "a", "--against", tmp_path / "b")[1]
    assert [line for line in lines if not line.startswith("at@")][2:] == ["3 of 10 leaves and values differ"]
    save(tmp_path / "a", 2, ranks=2)
    save(tmp_path / "a", 3, ranks=2)
    for path in data_files(tmp_path / "a" / "step-000000000003"):
        path.unlink()
    assert inspect(tmp_path / "a", "--step", 2, "--against", tmp_path / "a") == (
        0,
        [
            f"A: {tmp_path}/a: step 2, saved by 2 rank(s)",
            f"B: {tmp_path}/a: step 3, saved by 2 rank(s)",
            "0 of 9 leaves and values differ",
        ],
    )


def change(state: dict[str, Any]) -> None:
    """What is different in the second of two checkpoints."""
    blocks = state["params"]["blocks"]
    blocks[0]["w"][3, 2] += 0.5
    blocks[0]["w"][6, 4] -= 2
    blocks[0]["b"] = blocks[0]["b"].double()
    blocks[1]["w"] = blocks[1]["w"].t().contiguous()
    blocks[1]["b"][1] = float("nan")
    state["params"]["tail"] = state["params"].pop("head")
    state["scale"] = -torch.tensor(0.5)
    state["epoch"] = 4
    state["name"] = "run"


@pytest.mark.parametrize("ranks", [2, 3])
def test_how_two_differ(ranks, tmp_path, inspect):
    """A difference would be missed, or named wrongly: a leaf, its form, its elements, or a value."""
    save(tmp_path / "a", 1, ranks=2)
    save(tmp_path / "b", 5, ranks, change)
    status, lines = inspect(tmp_path / "a", "--against", tmp_path / "b", "--at", 5)
    assert status == 1
    assert [line for line in lines[2:-1] if not line.startswith("at@")] == [
        "params.blocks.0.w: F32[7, 5]: 2 of 35 elements have other bits; largest difference 2, at [6, 4]",
        "params.blocks.0.b: F32[3] in A, F64[3] in B: the same values",
        "params.blocks.1.w: F32[7, 5] in A, F32[5, 7] in B",
        "params.blocks.1.b: F32[3]: 1 of 3 elements have other bits; largest difference not finite, at [1]",
        "params.head: F32[11] in A, nothing in B",
        "scale: F32[]: 1 of 1 elements have other bits; largest difference 1, at []",
        "epoch: 3 in A, 4 in B",
        "params.tail: nothing in A, F32[11] in B",
        "name: nothing in A, 'run' in B",
    ]
    assert lines[-1] == f"{7 + ranks} of {9 + ranks} leaves and values differ"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=NAMES.get)
def test_the_largest_difference_of_every_dtype(dtype, tmp_path):
    """A dtype would be compared as another one, or not at all."""
    values = (torch.tensor([1, 0, 2, 1, 1]), torch.tensor([1, 0, 1, 1, 1]))
    x, y = (value.to(torch.float32).to(dtype) for value in values)
    checkpoint.save(tmp_path, {"x": x}, 1)
    checkpoint.save(tmp_path, {"x": y}, 2)
    place = folder_of(tmp_path)
    lines = [line.text for line in compare(place, 1, place, 2)][2:]
    if dtype == torch.bool:
        assert lines == ["0 of 1 leaves and values differ"]
        return
    form = f"{NAMES[dtype]}[5]"
    assert lines[0] == f"x: {form}: 1 of 5 elements have other bits; largest difference 1, at [2]"
    checkpoint.save(tmp_path, {"x": torch.where(torch.arange(5) == 4, -1.5, y.to(torch.complex64).real)}, 3)
    assert [line.text for line in compare(place, 2, place, 3)][2].partition(": ")[2].endswith("2.5, at [4]")


def test_memory_is_bounded(tmp_path, inspect):
    """A checkpoint that is larger than the memory could not be verified or compared."""
    x = torch.arange(8 << 20, dtype=torch.int32)  # 32 MiB
    checkpoint.save(tmp_path, {"x": x}, 1)
    checkpoint.save(tmp_path, {"x": -x}, 2)
    tracemalloc.start()  # tensors lie in buffers of Python's
    assert inspect(tmp_path, "--verify")[0] == 0
    status, lines = inspect(tmp_path, "--step", 1, "--against", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert status == 1
    largest = f"{2.0 * (len(x) - 1):.3g}"
    other = f"{len(x) - 1:,} of {len(x):,} elements have other bits"
    assert lines[2] == f"x: I32[{len(x)}]: {other}; largest difference {largest}, at [{len(x) - 1}]"
    assert peak < 2 * CHUNK


def write(folder: Path, index: Any) -> None:
    """Write an index as somebody would who knows its checksum."""
    (folder / "index.json").write_bytes(sealed({key: x for key, x in index.items() if key != "checksum"}))


def test_hostile_directories(tmp_path, inspect):
    """A name in an index would send codes to the terminal; links would be followed; wrong files end the command."""
    save(tmp_path, 1)
    folder = tmp_path / "step-000000000001"
    index = json.loads((folder / "index.json").read_text())
    index["leaves"]["\x1b[2J\ud800"] = index["leaves"].pop("scale")
    index["leaves"][".".join("a" * 5000)] = index["leaves"].pop("params.head")
    index["values"]["epoch\r"] = "\x1b]0;title\x07" * 9999
    write(folder, index)
    (folder / "left\x1b[31m").write_bytes(b"")
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    for args in (("--step", 1), ("--verify",), ("--against", tmp_path), ()):
        status, lines = inspect(tmp_path, *args)
        assert status == int(args == ("--verify",))  # the file has the old names
        text = "\n".join(lines)
        assert text.replace("\n", "").isprintable()
        assert len(text) < 10_000
    status, lines = inspect(tmp_path, "--step", 1)
    assert {"link  no file", "pipe  no file"} <= {" ".join(line.split()).replace(" no", "  no") for line in lines}
    (tmp_path / "step-000000000002").symlink_to(folder)
    status, lines = inspect(tmp_path)
    assert status == 1
    assert "damaged: [Errno 40] expected a folder, got a symbolic link" in lines[2]
    assert inspect(tmp_path, "--step", 2)[0] == 2
    name = next(iter(index["files"]))
    write(folder, json.loads(json.dumps(index).replace(name, f"x-rank-{'9' * 90}.safetensors")))
    status, lines = inspect(tmp_path, "--step", 1)
    assert status == 1
    assert any(line.endswith("2 files") for line in lines)
    assert len("\n".join(lines)) < 10_000


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["DIR/none"], "DIR/none: there is no checkpoint, nor a part of one"),
        (["DIR/none", "--verify"], "DIR/none: no checkpoint; the last ones are: none"),
        (["DIR", "--step", "2"], "DIR: no checkpoint of step 2; the last ones are: 1"),
        (["DIR", "--step", "-1"], "step=-1: expected the number of a step"),
        (["DIR", "--at", "1"], "--at 1: expected --against DIR besides"),
        (["DIR", "--against", "DIR/none"], "DIR/none: no checkpoint; the last ones are: none"),
        (["DIR/file"], "Not a directory"),
        (["nosuch://a/b"], "dir='nosuch://a/b': expected a path, or a URL that fsspec opens"),
    ],
)
def test_wrong_arguments(args, sentence, tmp_path, inspect, monkeypatch):
    """A mistake would be a traceback, or look like an empty checkpoint; also where rich is not installed."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    checkpoint.save(tmp_path, {"n": 1}, 1)
    (tmp_path / "file").write_bytes(b"")
    status, lines = inspect(*(arg.replace("DIR", str(tmp_path)) for arg in args))
    assert status == 2
    assert sentence.replace("DIR", str(tmp_path), 1 if "besides" not in sentence else 0) in lines[0]


def test_a_reader_who_has_seen_enough(tmp_path, monkeypatch):
    """`inspect DIR | head` would end with a traceback."""
    checkpoint.save(tmp_path, {"n": 1}, 1)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["inspect", str(tmp_path)]) == 2
