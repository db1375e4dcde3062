"""Safetensors files to shards and back, and what is no such file; models of transformers are in test_hf_files.py."""

import errno
import json
import math
import os
import re
import resource
from collections.abc import Callable
from contextlib import nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import strategies
from support.files import plain, saved
from support.models import STRATEGIES, counting, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import tree
from fshard.checkpoint import load_safetensors, save_safetensors
from fshard.checkpoint import params as params_of_files
from fshard.files import hugging_face, safetensors_file

# --- any tree ---

# the library's module for torch does not know float8_e8m0fnu
LACKING = torch.float8_e8m0fnu, torch.complex128  # by the library, or by the format
DTYPES = [dtype for dtype in safetensors_file.NAMES if dtype not in LACKING]
NAME = st.text('ab.c é☃"\\\n/', max_size=6)


def to_and_fro(mesh: Any, params: Any, plan: dict[str, Any], folder: Path, rename: Any, max_bytes: int) -> Any:
    """A file to shards, and those to other files, written by all ranks together."""
    with_axes = fshard.make_plan(tree.map(lambda x: x.to("meta"), params), mesh, **plan)
    loaded = load_safetensors(folder / "theirs.safetensors", with_axes, rename)
    save_safetensors(folder, loaded, max_bytes=max_bytes)
    return fshard.state_dict(loaded)


@pytest.mark.parametrize("number", range(4))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_tensors_are_read_and_written_as_by_the_library(tmp_path_factory, number, data):
    """A rank's bytes would be those of another tensor or element, or a file would not be readable for others."""
    folder = tmp_path_factory.mktemp("any")
    params = data.draw(strategies.trees(DTYPES, bits=True), "params")
    plan = data.draw(strategies.plans(params), "plan")
    expected = plain(params)
    first = {id(x): name for name, x in reversed(expected.items())}
    written = {name for name in expected if first[id(expected[name])] == name or data.draw(st.booleans(), name)}
    others = data.draw(st.lists(NAME, min_size=len(written), max_size=len(written), unique=True), "names")
    origin = dict(zip(written, others, strict=True))
    save_file({origin[name]: expected[name].clone() for name in written}, folder / "theirs.safetensors")
    rename = {there: name for name, there in origin.items()}
    mesh = data.draw(strategies.meshes(), "mesh")
    for loaded in simulated(to_and_fro, params, plan, folder, rename, data.draw(st.integers(1, 300)), **mesh):
        assert same_bits(loaded, expected)
    names = [name for name in expected if first[id(expected[name])] == name]
    assert same_bits(saved(folder), {name: expected[name] for name in sorted(names)})


def tree_of(dtype: torch.dtype = torch.float32) -> Any:
    """A tree with uneven shapes, a tied leaf, an integer and a truth value."""
    shared = counting(5, 3).to(dtype)
    return {
        "embed": shared,
        "blocks": [{"w": counting(7, 3, start=i).to(dtype), "b": counting(3, start=i).to(dtype)} for i in range(3)],
        "head": shared,
        "n": counting(2, dtype=torch.int64),
        "on": counting(9) > 0,
    }


def loaded_from(mesh: Any, path: Any, params: Any, plan: Any = None, rename: Any = None) -> dict[str, Tensor]:
    """What all ranks have together of a file."""
    plan = fshard.make_plan(params, mesh, **{"units": 20, **(plan or {})})
    return fshard.state_dict(load_safetensors(path, plan, rename))


def written_to(mesh: Any, folder: Path, params: Any, plan: Any = None, **kwargs: Any) -> None:
    """A tree to shards, and to files."""
    plan = fshard.make_plan(params, mesh, **{"units": 20, **(plan or {})})
    save_safetensors(folder, fshard.shard_params(params, plan), **kwargs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_writes_and_reads_on_another_number_of_ranks(strategy, tmp_path):
    """What three ranks saved could not be read by two, or a replica would hold something else."""
    replicate = 2 if strategy.startswith("wide") else 1
    args = (tmp_path, tree_of(), STRATEGIES[strategy])
    simulated(written_to, *args, shard=3, replicate=replicate)
    for loaded in simulated(loaded_from, *args, shard=2, replicate=2):
        assert same_bits(loaded, plain(tree_of()))


FLOATING = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("stored", FLOATING)
@pytest.mark.parametrize("there", FLOATING)
def test_values_are_cast_among_floating_dtypes(there, stored, tmp_path):
    """A file in bfloat16 would be refused, or its bytes be read as another dtype."""
    values = torch.linspace(-3, 3, 60).to(there)
    save_file({"w": values}, tmp_path / "x.safetensors")
    for loaded in simulated(loaded_from, tmp_path / "x.safetensors", {"w": torch.zeros(60, dtype=stored)}):
        assert same_bits(loaded, {"w": values.to(stored)})


def test_a_plan_that_stores_another_dtype_reads_and_writes_it(tmp_path):
    """Master weights would be written in the dtype of the model, or not be read in their own."""
    simulated(written_to, tmp_path, tree_of(torch.bfloat16), {"policy": "storage=f32"})
    assert saved(tmp_path)["embed"].dtype == torch.float32
    for loaded in simulated(loaded_from, tmp_path, tree_of(torch.bfloat16), {"policy": "storage=f32"}):
        assert same_bits(loaded, plain(tree_of()))


def test_gradients_and_trained_leaves_alone_are_written(tmp_path):
    """Adapters could not be written without the frozen base."""
    params = tree_of()
    sharded = fshard.shard_params(params, fshard.make_plan(params, frozen=["blocks.*.w", "embed"]))
    save_safetensors(tmp_path, sharded.trainable)
    assert list(saved(tmp_path)) == [f"blocks.{i}.b" for i in range(3)]


def test_views_are_buffers(tmp_path):
    """Views that are conjugated, negated, strided or expanded would be torch's errors, or other numbers."""
    x = torch.tensor([1 + 2j, 3j])
    views = {"conj": x.conj(), "neg": x.conj().imag, "part": x.imag, "expanded": x[:1].expand(4), "t": counting(3, 2).T}
    assert (views["conj"].is_conj(), views["neg"].is_neg(), views["part"].stride()) == (True, True, (2,))
    buffers = {**views, "of_a_graph": x.real.requires_grad_()}
    save_safetensors(tmp_path, fshard.shard_params({}, fshard.make_plan({})), buffers)
    assert same_bits(saved(tmp_path), {name: torch.tensor(buffers[name].tolist()) for name in sorted(buffers)})


def test_tensors_are_aligned(tmp_path):
    """A library that maps a file into memory would read tensors at odd addresses, slowly or not at all."""
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.float32, torch.uint8)
    params = {str(dtype): counting(3, dtype=dtype) for dtype in dtypes}
    written_to(None, tmp_path, params)
    entries = hugging_face.entries_at(tmp_path).values()
    assert {x.start % x.dtype.itemsize for x in entries} == {0}


def test_an_empty_tree_is_a_file(tmp_path):
    """A tree without leaves would leave no file, and not load again."""
    save_safetensors(tmp_path, fshard.shard_params({}, fshard.make_plan({})))
    assert saved(tmp_path) == {}
    assert loaded_from(None, tmp_path, {}) == {}


# --- bytes and memory ---

SIZES = {"blocks": [{"w": torch.empty(300, 1000, device="meta")} for _ in range(4)], "embed": torch.empty(1, 400_000)}
SMALL = {"w": torch.ones(4), "v": {"u": torch.ones(2)}}
SIZE = 4 * (4 * 300_000 + 400_000)


def bytes_read() -> int:
    """The number of bytes that this process has read from files so far."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


def in_processes(mesh: Any, folder: Path) -> Any:
    """How many bytes a rank reads, what it wrote, and what it hears of files and buffers that fail on another rank."""
    plan = fshard.make_plan(SIZES, mesh, units=["blocks.*"])
    before = bytes_read()
    load_safetensors(folder / "large.safetensors", plan)
    count = bytes_read() - before
    written_to(mesh, folder, tree_of())
    path = folder / ("model.safetensors" if mesh.get_rank() != 1 else "gone.safetensors")
    reads = raised(OSError, lambda: loaded_from(mesh, path, tree_of()))
    writes = raised(OSError, lambda: limited(lambda: written_to(mesh, folder, tree_of(torch.float64)), 200))
    params = fshard.shard_params(SMALL, fshard.make_plan(SMALL, mesh))
    chunks = [None, None, fshard.state_dict(params, dtensors=True)][mesh.get_rank()]
    beside = raised((ValueError, RuntimeError), lambda: save_safetensors(folder, params, {"b": chunks}))
    return count, loaded_from(mesh, folder, tree_of()), reads, writes, beside


def raised(kind: type[Exception] | tuple[type[Exception], ...], run: Callable[[], object]) -> str:
    """The sentence of an error."""
    with pytest.raises(kind) as failure:
        run()
    return f"{type(failure.value).__name__}: {failure.value}"


def limited(run: Callable[[], object], num_bytes: int) -> None:
    """Run something in a process whose files may have so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's counts of bytes")
def test_processes(tmp_path):
    """A rank would read whole files or rows, files be right in simulation alone, or ranks wait for one that failed."""
    save_file({name: torch.zeros(x.shape) for name, x in plain(SIZES).items()}, tmp_path / "large.safetensors")
    for rank, (count, loaded, reads, writes, beside) in enumerate(gloo(in_processes, tmp_path, shard=3)):
        assert SIZE / 3 - 20_000 < count < SIZE / 3 + 20_000
        assert same_bits(loaded, plain(tree_of()))
        of_0, of_1, of_2 = (f"rank {failed}: " * (rank != failed) for failed in range(3))
        assert f"{of_2}ValueError: save_safetensors: buffers: 'b.w': expected a whole tensor, got a DTensor" in beside
        assert reads == f"FileNotFoundError: [Errno 2] {of_1}No such file or directory: '{tmp_path}/gone.safetensors'"
        assert writes == f"OSError: [Errno 27] {of_0}File too large: '{tmp_path}/model.safetensors.partial'"
    assert {path.name for path in tmp_path.iterdir()} == {"large.safetensors", "model.safetensors"}
    for loaded in simulated(loaded_from, tmp_path, tree_of()):
        assert same_bits(loaded, plain(tree_of()))


class Short(FileIO):
    """A file of which one read returns few bytes, as those of large files may."""

    def readinto(self, buffer: Any) -> int:
        """Read at most 7 bytes."""
        return super().readinto(memoryview(buffer)[:7])


def test_memory_is_bounded(tmp_path, monkeypatch):
    """A whole tensor, or file, would be in memory beside the shards; or a part of it be read wrongly."""
    monkeypatch.setattr(params_of_files, "open_file", Short)
    sizes = set()

    def buffer(size: int) -> bytearray:
        sizes.add(size)
        return bytearray(size)

    monkeypatch.setattr(safetensors_file, "CHUNK", 64)
    monkeypatch.setattr(safetensors_file, "bytearray", buffer, raising=False)
    params = {"w": torch.randn(7, 33), "h": torch.randn(50).bfloat16(), "c": torch.randn(20, dtype=torch.complex64)}
    written_to(None, tmp_path, params)
    assert same_bits(saved(tmp_path), dict(sorted(params.items())))
    for loaded in simulated(loaded_from, tmp_path, params, shard=3):
        assert same_bits(loaded, params)
    assert max(sizes) == 64


# --- files that are none ---


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with a header that is bytes or an object, which says that it has a length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    """What a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


NOT_IN_FORM = "'w': expected its dtype, shape and data_offsets, got {"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file, or cut off: a header of 0 bytes in a file of 0"),
    "short": (b"1234567", "not a safetensors file, or cut off"),
    "header beyond the file": (file_of(b"{}", length=3), "cut off: a header of 3 bytes in a file of 10"),
    "absurd header": (b"\xff" * 64, "a header of 18,446,744,073,709,551,615 bytes in a file of 64"),
    "not JSON": (file_of(b"{'w'"), "its header is not JSON: Expecting property name"),
    "not text": (file_of(b'{"\xff": 1}'), "its header is not JSON: 'utf-8' codec"),
    "too deep": (file_of(b"[" * 100_000), "its header is not JSON: maximum recursion depth"),
    "no object": (file_of([1]), "its header is not a JSON object, but a list"),
    "a name twice": (file_of(b'{"w": 1, "w": 2}'), "its header is not JSON: a name comes twice"),
    "a long number": (file_of(b'{"w": ' + b"9" * 5000 + b"}"), "its header is not JSON: Exceeds the limit"),
    "no form": (file_of({"w": 1}), "'w': expected its dtype, shape and data_offsets, got 1"),
    "no dtype": (file_of({"w": entry(None)}, b"0" * 8), NOT_IN_FORM),
    "a negative size": (file_of({"w": entry(shape=[-2])}, b"0" * 8), NOT_IN_FORM),
    "a size that is true": (file_of({"w": entry(shape=[2, True])}, b"0" * 8), NOT_IN_FORM),
    "a fraction": (file_of({"w": entry(end=8.0)}, b"0" * 8), NOT_IN_FORM),
    "three offsets": (file_of({"w": {**entry(), "data_offsets": [0, 4, 8]}}, b"0" * 8), NOT_IN_FORM),
    "other size": (file_of({"w": entry(shape=[3])}, b"0" * 8), "'w': F32[3] has 12 bytes, and its offsets say 8"),
    "backwards": (file_of({"w": entry(begin=8, end=0)}, b"0" * 8), "'w': F32[2] has 8 bytes, and its offsets say -8"),
    "absurd size": (file_of({"w": entry(shape=[2**62, 2**62])}, b"0" * 8), "'w': F32[4611686018427387904, 46116860184"),
    "overlap": (
        file_of({"w": entry(), "v": entry(begin=4, end=12)}, b"0" * 12),
        "'v' begins at byte 4, and the tensor before it ends at 8",
    ),
    "gap": (file_of({"w": entry(begin=4, end=12)}, b"0" * 12), "'w' begins at byte 4, and the tensor before it ends"),
    "cut off": (file_of({"w": entry()}, b"0" * 7), "its tensors need 8 bytes, and it has 7: it is cut off"),
    "too long": (file_of({"w": entry()}, b"0" * 9), "need 8 bytes, and it has 9: something was written behind them"),
}  # fmt: skip


def two(mesh: Any, path: Path, rename: Any = None) -> Any:
    """Load a tree of one leaf."""
    return loaded_from(mesh, path, {"w": torch.zeros(2)}, rename=rename)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_none_is_an_error(what, tmp_path):
    """A file that is cut off or was made to do harm would be read as numbers, fill the memory, or end the process."""
    content, words = HOSTILE[what]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    sentence = raised(ValueError, lambda: two(None, path))
    assert sentence.startswith(f"ValueError: {path}: ")
    assert words in sentence
    with pytest.raises(ValueError, match=re.escape(words)):
        simulated(two, path)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 200), st.booleans())
def test_no_bytes_do_harm(tmp_path_factory, data, at, inserted):
    """A changed byte would end the process, or be an error that the package did not mean."""
    path = tmp_path_factory.mktemp("bytes") / "x.safetensors"
    good = file_of({"w": entry(), "v": entry("I64", [], 8, 16)}, b"12345678" * 2)
    at %= len(good)
    path.write_bytes(good[:at] + data + good[at + (0 if inserted else len(data)) :])
    with suppress(ValueError) if data else nullcontext():
        assert two(None, path, {"v": None})["w"].shape == (2,)


def test_shards_of_torch_are_an_error_that_says_what_reads_them(tmp_path):
    """Their folder would seem to have no tensors."""
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"HuggingFaceStorageWriter are read by fshard\.checkpoint\.restore"):
        two(None, tmp_path)


def test_pickles_are_refused(tmp_path):
    """A file from the network would run code."""
    for name, new in (("pytorch_model.bin", True), ("x.safetensors", True), ("old.safetensors", False)):
        torch.save({"w": torch.zeros(2)}, tmp_path / name, _use_new_zipfile_serialization=new)
        sentence = f"{tmp_path / name}: expected a .safetensors file, got a pickle, which may run any code when it is"
        with pytest.raises(ValueError, match=re.escape(sentence)):
            two(None, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"it has 'pytorch_model.bin', a pickle, which may run any code"):
        two(None, tmp_path)


def test_paths_that_are_no_files(tmp_path):
    """A missing file would fail without its name, and a pipe wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    expected = "expected model.safetensors or model.safetensors.index.json in it, or the path of one .safetensors file"
    assert expected in raised(FileNotFoundError, lambda: two(None, tmp_path))
    assert f"No such file or directory: '{tmp_path}/x'" in raised(FileNotFoundError, lambda: two(None, tmp_path / "x"))
    assert "expected a regular file" in raised(OSError, lambda: two(None, tmp_path / "pipe"))
    assert "load_safetensors: path=3: expected the path" in raised(TypeError, lambda: two(None, 3))


def index_of(folder: Path, file_of: Any) -> None:
    """Write an index of a directory."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


OUTSIDE = ["../a.safetensors", "/etc/passwd", "", "..", "a/../a.safetensors", "a\\b", "C:x", "a\0"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_does_not_lead_elsewhere(name, tmp_path):
    """A directory from the network would have other files read."""
    index_of(tmp_path, {"w": name})
    words = f"'w': expected the name of a file beside the index, got {name!r}"
    with pytest.raises(ValueError, match=re.escape(words)):
        two(None, tmp_path)


def test_an_index_that_is_not_of_its_files(tmp_path):
    """Tensors would be taken from files that the index does not mean, or be left out."""
    save_file({"w": torch.zeros(2), "v": torch.zeros(2)}, tmp_path / "a.safetensors")
    for listed, words in (
        ({"w": "a.safetensors"}, r"a.safetensors has other tensors: it lacks nothing and has \['v'\] besides"),
        (
            dict.fromkeys("wvu", "a.safetensors"),
            r"has other tensors: it lacks \['u'\] and has nothing besides",
        ),
        ({"w": "b.safetensors"}, "No such file or directory: .*b.safetensors"),
        ({"w": 1}, "expected weight_map, a name of a file for every tensor"),
        ([], "expected weight_map"),
    ):
        index_of(tmp_path, listed)
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            two(None, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ValueError, match=r"index.json: it is not JSON"):
        two(None, tmp_path)


# --- what differs from the plan ---


def test_all_differences_are_listed_at_once(tmp_path):
    """Names would be found wrong one at a time, or a leaf be left at zero without a word."""
    content = {"a.w": torch.zeros(2), "n": torch.zeros(2), "z": torch.zeros(1)}
    header = {"half": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    params = {"a": {"w": torch.zeros(3, 5), "b": torch.zeros(5)}, "n": torch.arange(2), "half": torch.zeros(2)}
    save_file(content, tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(file_of(header, b"0"))
    index_of(tmp_path, {**dict.fromkeys(content, "a.safetensors"), "half": "b.safetensors"})
    for run in (lambda: loaded_from(None, tmp_path, params), lambda: simulated(loaded_from, tmp_path, params)):
        sentence = raised(ValueError, run)
        for words in (
            f"load_safetensors: {tmp_path}: it lacks 1 names: 'a.b'",
            "it has 1 names that the plan has not: 'z'",
            "'a.w': expected a tensor [3, 5], got one [2]",
            "'n': expected torch.int64, got torch.float32",
            "'half': expected a tensor [2], got 'F4, no dtype of torch'",
        ):
            assert words in sentence


def test_tied_names_that_differ_are_an_error_on_every_rank(tmp_path):
    """One of two values of a tied leaf would be lost; or the ranks without the difference would go on."""
    path, values = tmp_path / "x.safetensors", counting(5, 3)
    other = values.clone()
    other[0, 0] += 1  # in the interval of rank 0 alone
    shared = torch.zeros(5, 3)
    params = {"embed": shared, "head": shared}
    for both, good in ((values.clone(), True), (values.double(), True), (other, False)):
        save_file({"embed": values, "head": both}, path)
        if good:
            assert same_bits(simulated(loaded_from, path, params)[1], {"embed": values, "head": values})
        else:
            sentences = simulated(
                lambda mesh: raised((ValueError, RuntimeError), lambda: loaded_from(mesh, path, params))
            )
            assert sentences[0] == f"ValueError: {path}: 'head' and 'embed' are tied, but differ"
            assert sentences[1].startswith(f"MismatchError: rank 0: {sentences[0]}. This rank has no such error: give")


def test_ranks_with_other_files_are_told(tmp_path):
    """Ranks whose disks have another version of a model would train a mixture of both."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        save_file({"w": torch.zeros(2), "v": torch.zeros(1 + rank)}, tmp_path / str(rank) / "model.safetensors")
    with pytest.raises(fshard.MismatchError, match=r"rank 0 has 'v' F32\[1\] at .*; rank 1 has 'v' F32\[2\]"):
        simulated(lambda mesh: two(mesh, tmp_path / str(mesh.get_rank()), {"v": None}))
    (tmp_path / "1" / "model.safetensors").write_bytes(b"")
    sentences = simulated(
        lambda mesh: raised((ValueError, RuntimeError), lambda: two(mesh, tmp_path / str(mesh.get_rank()), {"v": None}))
    )
    assert sentences[1].startswith(f"ValueError: {tmp_path}/1/model.safetensors: not a safetensors file")
    assert (
        sentences[0]
        == f"MismatchError: rank 1: {sentences[1]}. This rank has no such error: give all ranks the same files"
    )


def test_what_rename_may_be(tmp_path):
    """A file with other names could not be read, or a name that means nothing be taken for a leaf."""
    save_file({"model.w": torch.ones(2), "step": torch.ones(1)}, tmp_path / "x.safetensors")
    for rename in ({"model.w": "w", "step": None}, lambda name: {"model.w": "w"}.get(name)):
        assert two(None, tmp_path / "x.safetensors", rename)["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"'model.w' and 'step' are both called 'w'"):
        two(None, tmp_path / "x.safetensors", lambda name: "w")
    with pytest.raises(TypeError, match="rename=3"):
        two(None, tmp_path / "x.safetensors", 3)


# --- an earlier save ---

ONE, SEVERAL = 10**9, 150  # bytes in a file: for one file, and for several


class KilledError(BaseException):
    """The process ended."""


def killed_after(num_steps: int, monkeypatch: Any, run: Callable[[], None]) -> bool:
    """Whether a run has more steps that change a directory than so many; then it ends as if it were killed."""
    steps = 0

    def counting_steps(fn: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > num_steps:
                raise KilledError
            return fn(*args, **kwargs)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counting_steps(os.replace))
        patch.setattr(Path, "unlink", counting_steps(Path.unlink))
        patch.setattr(hugging_face, "write_tensor", counting_steps(hugging_face.write_tensor))
        try:
            run()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("sizes", [(old, new) for old in (SEVERAL, ONE) for new in (SEVERAL, ONE)])
def test_a_save_that_is_killed_leaves_the_earlier_one_or_the_new_one(sizes, tmp_path, monkeypatch):
    """A model would be lost, or be half old and half new, when the process is killed while it saves it again."""
    # of the same number of files, and so of the same names
    old, new = (tree.map(lambda x: x if x.dtype == torch.bool else x + n, tree_of()) for n in (0, 1))  # noqa: B023
    news = []
    for num_steps in range(100):
        folder = tmp_path / str(num_steps)
        written_to(None, folder, old, max_bytes=sizes[0])
        if not killed_after(num_steps, monkeypatch, lambda: written_to(None, folder, new, max_bytes=sizes[1])):  # noqa: B023
            break
        loaded = loaded_from(None, folder, old)
        news.append(same_bits(loaded, plain(new)))
        assert news[-1] or same_bits(loaded, plain(old))
        assert news == sorted(news), "once the new one is there, it stays"
        written_to(None, folder, new, max_bytes=ONE)
        assert same_bits(loaded_from(None, folder, old), plain(new))
        assert {path.name for path in folder.iterdir()} == {"model.safetensors"}
    else:
        raise AssertionError("it never ends")
    assert len(news) > 5
    assert not news[0]
    assert same_bits(saved(folder), dict(sorted(plain(new).items())))
    assert same_bits(loaded_from(None, folder, old), plain(new))


def test_a_full_disk_is_an_error_on_every_rank(tmp_path):
    """Ranks would wait for the one that writes; a file that is cut off would take the place of a whole one."""
    written_to(None, tmp_path, tree_of())
    before = (tmp_path / "model.safetensors").read_bytes()

    def run(mesh: Any) -> str:
        return raised(OSError, lambda: written_to(mesh, tmp_path, tree_of(torch.float64)))

    for num_bytes in (4, len(before)):  # in the header, and in the data
        sentences = []
        limited(lambda: sentences.extend(simulated(run, shard=3)), num_bytes)  # noqa: B023
        sentence = f"File too large: '{tmp_path}/model.safetensors.partial'"
        assert sentences == [f"OSError: [Errno {errno.EFBIG}] {of_0}{sentence}" for of_0 in ("", *["rank 0: "] * 2)]
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [([4, 4, 4], [[4, 4], [4]]), ([6, 4, 8, 2, 12, 2], [[6, 4], [8, 2], [12], [2]]), ([11], [[11]]), ([], [[]])],
)
def test_files_have_at_most_so_many_bytes(sizes, groups):
    """A file would be larger than a file system or a reader allows."""
    leaves = [("w", (size // 2, 2), torch.int8) if not size % 2 else ("w", (size,), torch.int8) for size in sizes]
    files = params_of_files._groups(leaves, max_bytes=10)
    assert [[math.prod(shape) for _, shape, _ in file] for file in files] == groups


GIVEN = {"w": torch.ones(4), "v.u": torch.ones(2)}
CALLS: dict[str, Callable[[fshard.Sharded, Path, bool], object]] = {
    "dir=None: expected the path": lambda x, path, bad: save_safetensors(None if bad else path, x),
    "max_bytes=0: expected": lambda x, path, bad: save_safetensors(path, x, max_bytes=0 if bad else 9),
    "mean something else: 'w'": lambda x, path, bad: save_safetensors(path, x, {"w" if bad else "b": torch.ones(1)}),
    "buffers: 'b': expected a tensor, got 3": lambda x, path, bad: save_safetensors(path, x, {"b": 3} if bad else None),
    "save_safetensors: expected": lambda x, path, bad: save_safetensors(path, x["w"] if bad else x),
    "path=None: expected the path": lambda x, path, bad: load_safetensors(None if bad else path.parent, x.plan),
    "src=9: expected a rank": lambda x, _, bad: fshard.load_state_dict(x, GIVEN, src=9 if bad else None),
    "load_state_dict: expected": lambda x, _, bad: fshard.load_state_dict(x["v"] if bad else x, GIVEN),
}


def of_one_rank(mesh: Any, folder: Path, words: str, faulty: int) -> str:
    """What a rank hears of a call that is wrong on one of them."""
    params = fshard.shard_params(SMALL, fshard.make_plan(SMALL, mesh))
    errors = (ValueError, TypeError, RuntimeError)
    return raised(errors, lambda: CALLS[words](params, folder, mesh.get_rank() == faulty))


@pytest.mark.parametrize("words", CALLS)
def test_a_wrong_argument_of_one_rank_is_an_error_on_all(words, tmp_path):
    """The other ranks would wait for the one that has raised, or a file be written."""
    save_file(GIVEN, tmp_path / "model.safetensors")
    for faulty in range(3):
        sentences = simulated(of_one_rank, tmp_path / "new", words, faulty, shard=3)
        wrong = sentences.pop(faulty)
        assert words in wrong
        for sentence in sentences:
            assert sentence.startswith(f"MismatchError: rank {faulty}: {wrong}. This rank has no such error: give all")
        assert not (tmp_path / "new").exists()


def test_what_cannot_be_saved(tmp_path):
    """A tensor would be written under the name of another one, or in a dtype that nobody reads."""

    def save(params: Any, buffers: Any = None, **kwargs: Any) -> None:
        save_safetensors(tmp_path / "x", fshard.shard_params(params, fshard.make_plan(params)), buffers, **kwargs)

    for buffers, words in (
        ({"w": torch.ones(1)}, "names that come twice"),
        ({"x": {"y": torch.ones(1)}, "x.y": torch.zeros(1)}, "names that come twice, or mean something else: 'x.y'"),
        ({1: torch.ones(1), "1": torch.zeros(1)}, "names that come twice, or mean something else: '1'"),
        ({"n": 3}, "'n': expected a tensor, got 3"),
        ({"n": torch.ones(1, device="meta")}, "buffers: 'n': expected a tensor with values, got one on meta"),
        ({"n": torch.ones(1).to_sparse()}, "buffers: 'n': expected a dense tensor, got torch.sparse_coo: call to_d"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            save({"w": torch.ones(2)}, buffers)
    params = {"a": {"w": torch.ones(2)}}
    with pytest.raises(ValueError, match="save_safetensors: expected a tree, got one leaf, without a name"):
        save_safetensors(tmp_path / "x", fshard.shard_params(params, fshard.make_plan(params))["a"]["w"])
    with pytest.raises(ValueError, match=r"do not have: 'w' is torch.complex128. Cast them, or save torch\.view_as"):
        save({"w": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(ValueError, match=r"'__metadata__'"):
        save({"__metadata__": torch.ones(2)})
    with pytest.raises(ValueError, match="max_bytes=0: expected a number of bytes, at least 1"):
        save({"w": torch.ones(2)}, max_bytes=0)
    with pytest.raises(TypeError, match=r"save_safetensors: .*expected a Sharded"):
        save_safetensors(tmp_path, {"w": torch.ones(2)})
    with pytest.raises(TypeError, match=r"save_safetensors: dir=.*expected the path"):
        save_safetensors(*(fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan({"w": torch.ones(2)})),) * 2)
    with pytest.raises(TypeError, match="load_safetensors: plan"):
        load_safetensors(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        save_safetensors(
            tmp_path / "file", fshard.shard_params({"w": torch.ones(2)}, fshard.make_plan({"w": torch.ones(2)}))
        )
    assert not (tmp_path / "x").exists()
