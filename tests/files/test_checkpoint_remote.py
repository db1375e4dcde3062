"""Checkpoints by URL: the same laws on a local disk, in object stores, and on file systems behind a URL."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from support.models import same_bits
from support.stores import BUCKET, DEAD, Disk, dies, fails, files, new_url, other_store, s3_server
from support.worlds import gloo, simulated

import fshard
from fshard import checkpoint
from fshard.files.folders import LocalFolder, folder_of
from fshard.files.remote import OBJECT_STORES

REMOTE = ["memory", "s3", "disk"]
KINDS = ["local", *REMOTE]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The variables by which clients find the server."""
    with s3_server() as variables:
        yield variables


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new folder of the kind that the test is given."""
    kind = request.getfixturevalue("kind")
    if kind == "s3":
        request.getfixturevalue("s3")
    return new_url(kind, tmp_path)


def state_of(mesh: Any, seed: int) -> dict[str, Any]:
    """Leaves that are sharded, whole, and different on every rank; sizes that no number of ranks divides."""
    torch.manual_seed(seed)
    params = {"blocks": [{"w": torch.randn(7, 5), "b": torch.randn(3)} for _ in range(2)], "head": torch.randn(11)}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"]))
    rank = mesh.get_local_rank("shard") if mesh is not None else 0
    return {"params": sharded, "step": seed, "scale": torch.randn(()), "position": torch.tensor([seed, rank])}


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """What must be the same after a restore on any number of ranks."""
    return {**fshard.state_dict(state["params"]), "scale": state["scale"], "step": torch.tensor(state["step"])}


def without_position(name: str) -> str | None:
    """A `rename` that leaves out what belongs to a rank."""
    return None if name == "position" else name


def saves(mesh: Any, url: str, *seeds: int, wait: bool = True, **options: Any) -> None:
    """Save the states of these seeds as steps of these numbers."""
    for seed in seeds:
        saving = checkpoint.save(url, state_of(mesh, seed), seed, wait=wait, **options)
    saving.wait()


def restored(mesh: Any, url: str, step: int | None = None, **options: Any) -> dict[str, Any]:
    """A state restored without positions."""
    like = state_of(mesh, 0)
    del like["position"]
    return whole(checkpoint.restore(url, like, step, rename=without_position, **options))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_restore_what_was_saved(kind, url, wait):
    """A store would give other bits back, or fewer, or show a step that is not whole; or a listing would be old."""
    assert checkpoint.steps(url) == []
    assert checkpoint.latest(url) is None
    simulated(lambda mesh: saves(mesh, url, 1, 2, wait=wait), shard=3)
    assert checkpoint.steps(url) == [1, 2]
    assert checkpoint.latest(url) == 2
    for ranks in (1, 2, 3):
        for step in (1, 2, None):
            for state in simulated(restored, url, step, shard=ranks):
                assert same_bits(state, whole(state_of(None, step or 2)))
    assert len(files(url)) == 2 * 4  # three ranks' and an index: no records, nothing unfinished


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_gets_its_own_values_back(kind, url):
    """The position of a rank in its data would be another rank's."""

    def back(mesh: Any) -> Any:
        checkpoint.save(url, state_of(mesh, 5), 5)
        return checkpoint.restore(url, state_of(mesh, 0))["position"].tolist()

    assert simulated(back, shard=2) == [[5, 0], [5, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_replaced_deleted_and_pruned(kind, url):
    """A step saved again would keep old values or old files; deletions would leave files, or take others."""
    simulated(saves, url, 1, 2, 3, 4, shard=2)
    simulated(lambda mesh: checkpoint.save(url, state_of(mesh, 9), 2), shard=2)
    assert same_bits(simulated(restored, url, 2)[0], whole(state_of(None, 9)))
    assert len(files(url)) == 4 * 3
    checkpoint.delete(url, 2)
    assert checkpoint.steps(url) == [1, 3, 4]
    assert not [name for name in files(url) if "step-000000000002" in name]
    with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of step 2; the last ones are: 1, 3, 4"):
        checkpoint.delete(url, 2)
    simulated(lambda mesh: saves(mesh, url, 5, 6, keep_last=1, keep_every=3), shard=2)
    assert checkpoint.steps(url) == [3, 6]
    assert len(files(url)) == 2 * 3


@pytest.mark.parametrize("kind", REMOTE)
def test_checkpoints_of_other_processes_are_seen(kind, url):
    """A listing that fsspec keeps would hide what another process saves, or show what it deleted."""
    saves(None, url, 1)
    assert checkpoint.steps(url) == [1]
    fs = other_store(url)
    root = fs._strip_protocol(url)
    for path in fs.find(root):
        copy = path.replace("step-000000000001", "step-000000000002")  # nothing else: names of folders are random
        fs.makedirs(os.path.dirname(copy), exist_ok=True) if kind != "s3" else None
        fs.copy(path, copy)
    assert checkpoint.steps(url) == [1, 2]
    for path in fs.find(f"{root}/step-000000000001"):
        fs.rm_file(path)
    assert checkpoint.steps(url) == [2]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("part", ["rank-00001.safetensors", "rank-00001.json", "index.json"])
@pytest.mark.parametrize("kind", REMOTE)
def test_a_failing_write_is_an_error_on_all_ranks(kind, url, part, wait, monkeypatch):
    """A rank would go on as if the checkpoint were there; or the one before it, of this step or another, were lost."""
    simulated(saves, url, 1, 2, shard=2)
    if kind == "disk" and part == "index.json":
        part = ".index.json."
    part = part if wait or "safetensors" not in part else "rank-00001"
    fails(monkeypatch, kind, "write", part)

    def save(mesh: Any) -> str:
        with pytest.raises((OSError, checkpoint.CheckpointError)) as caught:
            checkpoint.save(url, state_of(mesh, 9), 2, wait=wait).wait()
        return str(caught.value)

    for text in simulated(save, shard=2):
        assert "StoreIsDown: the store does not answer" in text
        assert url in text
    monkeypatch.undo()
    assert checkpoint.steps(url) == [1, 2]
    assert same_bits(simulated(restored, url, shard=2)[0], whole(state_of(None, 2)))
    simulated(saves, url, 2, shard=2)  # in the folder with what is left
    assert same_bits(simulated(restored, url, shard=2)[0], whole(state_of(None, 2)))


@pytest.mark.parametrize("kind", REMOTE)
def test_a_file_that_was_not_written_to_its_end_is_deleted(kind, url):
    """A part of a file, which closing it puts into the store, would stay and cost its size."""

    def chunks() -> Iterator[memoryview]:
        yield memoryview(b"0123456789")
        raise KeyboardInterrupt

    place = folder_of(url).inside("step")
    with pytest.raises(KeyboardInterrupt):
        place.write("data", chunks())
    assert files(url) == []


@pytest.mark.parametrize("kind", REMOTE)
@pytest.mark.parametrize("what", ["read", "info"])
def test_a_failing_read_is_an_error_on_all_ranks(kind, url, what, monkeypatch):
    """A rank would wait for another one for ever, or restore zeros where the store did not answer."""
    simulated(saves, url, 1, shard=2)
    fails(monkeypatch, kind, what, "rank-00001")

    def restore(mesh: Any) -> str:
        with pytest.raises(checkpoint.CheckpointError, match=r"rank-00001.*StoreIsDown.*It has leaf") as caught:
            restored(mesh, url)
        return str(caught.value)

    assert all(url in text for text in simulated(restore, shard=3))


@pytest.mark.parametrize("kind", REMOTE)
def test_a_store_that_does_not_answer_is_not_an_empty_one(kind, url, monkeypatch):
    """A look that failed would read as "no checkpoint": a run would begin anew, and a prune delete a whole one."""
    simulated(saves, url, 1, 2, 3)
    fails(monkeypatch, kind, "info", "step-000000000002/index.json")
    with pytest.raises(OSError, match=r"StoreIsDown: the store does not answer: '.*step-000000000002/index.json'"):
        checkpoint.steps(url)
    with pytest.raises(OSError, match="StoreIsDown"):
        saves(None, url, 4, keep_last=2)
    monkeypatch.undo()
    assert checkpoint.steps(url) == [1, 2, 3, 4]


def test_no_bucket_and_no_credentials(s3, monkeypatch):
    """The errors of a store would not say which URL they are about, or be made at some ranks only."""

    def save(mesh: Any) -> str:
        with pytest.raises(FileNotFoundError, match="bucket does not exist") as caught:
            saves(mesh, "s3://missing/run", 1)
        return str(caught.value)

    for text in simulated(save, shard=2):
        assert "s3://missing/run/step-000000000001/" in text
    assert "missing" not in other_store("s3://").ls("")  # a bucket is not made by mistake
    with pytest.raises(FileNotFoundError, match="bucket does not exist: 's3://missing/run'"):
        checkpoint.latest("s3://missing/run")  # a run whose bucket has a typing error would begin anew
    assert checkpoint.latest(f"s3://{BUCKET}/nothing/here") is None
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/no/such/file")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/no/such/file")

    def restore(mesh: Any) -> str:
        with pytest.raises((OSError, checkpoint.CheckpointError), match="Unable to locate credentials") as caught:
            restored(mesh, f"s3://{BUCKET}/run")
        return str(caught.value)

    assert all(f"s3://{BUCKET}/run" in text for text in simulated(restore, shard=2))
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_rank_downloads_what_it_needs(kind, url, monkeypatch):
    """Each rank would download the files of all ranks: with many ranks, the whole model as many times."""
    fs, name = (MemoryFileSystem, "cat_file") if kind == "memory" else (fsspec.get_filesystem_class("s3"), "_cat_file")
    cat_file, sizes = getattr(fs, name), list[int]()

    def sync(self: Any, path: str, start: int, end: int) -> bytes:
        if path.endswith(".safetensors"):
            sizes.append(end - start)
        return cat_file(self, path, start=start, end=end)

    async def asynchronous(self: Any, path: str, start: int, end: int) -> bytes:
        if path.endswith(".safetensors"):
            sizes.append(end - start)
        return await cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(fs, name, sync if kind == "memory" else asynchronous)
    fs.clear_instance_cache()  # an instance binds its methods when it is made
    x = torch.arange(6 << 20, dtype=torch.int32)  # 24 MiB, in blocks of 4 MiB
    simulated(lambda mesh: checkpoint.save(url, {"x": sharded(mesh, x)}, 1) and None, shard=2)

    def restore(mesh: Any) -> tuple[int, int]:
        before = sum(sizes)
        result = checkpoint.restore(url, {"x": sharded(mesh, torch.zeros_like(x))})["x"]
        rank, size = mesh.get_local_rank("shard"), x.numel() // mesh.size("shard")
        assert torch.equal(result.local_views()["w"].view(-1), x[rank * size : (rank + 1) * size])
        return before, sum(sizes)

    simulated(restore, shard=6)  # each rank has a block
    fs.clear_instance_cache()
    assert len(sizes) == 6
    assert sum(sizes) <= x.nbytes + 6  # the byte after the end of a file shows that it is the same file


def sharded(mesh: Any, x: torch.Tensor) -> fshard.Sharded:
    """A tree of one leaf."""
    return fshard.shard_params({"w": x}, fshard.make_plan({"w": x}, mesh))


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_an_index_that_is_replaced_while_it_is_read(kind, url):
    """A part of a new index would be read as the old one."""
    place = folder_of(url)
    place.put("index.json", b"short")
    with place.open("index.json") as file:
        other_store(url).pipe_file(f"{url}/index.json", b"something longer")
        with pytest.raises(OSError, match="another file took its place while it was read") as caught:
            file.read_into(0, memoryview(bytearray(5)))
    assert caught.value.errno == errno.ESTALE


def test_a_file_system_shows_a_file_when_it_is_whole(tmp_path, monkeypatch):
    """An index would be read while it grows, where a store shows files that are being written."""
    place, moves = folder_of(f"disk://{tmp_path}/run"), list[tuple[str, str]]()
    move = Disk.mv

    def mv(self: Any, source: str, target: str, **options: Any) -> None:
        assert not os.path.exists(target)
        moves.append((source, target))
        move(self, source, target, **options)

    monkeypatch.setattr(Disk, "mv", mv)
    place.put("index.json", b"text")
    assert [(os.path.dirname(source), target) for source, target in moves] == [
        (f"{tmp_path}/run", f"{tmp_path}/run/index.json")
    ]
    assert os.listdir(tmp_path / "run") == ["index.json"]
    assert "disk" not in OBJECT_STORES


def in_process(mesh: Any, url: str, broken: str, variables: dict[str, str]) -> str:
    """Save in a process, with the environment that finds the server; return the error of a save that fails."""
    os.environ.update(variables)
    saves(mesh, url, 1, 2, wait=False)
    assert same_bits(restored(mesh, url), whole(state_of(None, 2)))
    with pytest.raises(checkpoint.CheckpointError) as caught:
        saves(mesh, broken, 1, wait=False)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_real_processes(kind, url):
    """Ranks that are processes would hang, see each other's files too late, or miss an error in the background."""
    broken = {"disk": f"{url}/step-000000000001/index.json", "s3": "s3://missing/run"}[kind]
    assert all(broken in error for error in gloo(in_process, url, broken, {**os.environ}, shard=2))
    assert checkpoint.steps(url) == [1, 2]
    assert same_bits(simulated(restored, url, shard=3)[0], whole(state_of(None, 2)))


@pytest.mark.filterwarnings("ignore:.*fork")  # Python's own, and that of JAX, which other tests import
@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_process_that_is_forked_after_a_save(kind, url):
    """A loop or a connection of the parent would be used in the child, which hangs or mixes up answers."""
    saves(None, url, 1)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that hangs
        try:
            saves(None, url, 2)
            os._exit(0 if same_bits(restored(None, url), whole(state_of(None, 2))) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert checkpoint.steps(url) == ([1, 2] if kind == "s3" else [1])  # memory is a process's own


@pytest.mark.filterwarnings("ignore:.*fork")  # Python's own, and that of JAX, which other tests import
@pytest.mark.parametrize(
    ("kind", "number"), [*(("disk", number) for number in range(13)), *(("s3", number) for number in range(10))]
)
def test_a_process_that_dies_at_any_request(kind, url, number, monkeypatch):
    """Between two requests there would be no checkpoint of the step, or a mixture of two; or the next save failed."""
    simulated(saves, url, 1, 2, shard=2)
    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that hangs
        dies(monkeypatch, kind, number)
        try:
            simulated(lambda mesh: checkpoint.save(url, state_of(mesh, 9), 2), shard=2)
            os._exit(0)
        finally:
            os._exit(1)
    # two files, two records and the index (each is written and moved, or put), and four files are deleted
    num_requests = 12 if kind == "disk" else 9
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (DEAD if number < num_requests else 0)
    assert checkpoint.steps(url) == [1, 2]
    is_new = number >= num_requests - 4
    assert same_bits(simulated(restored, url, 2)[0], whole(state_of(None, 9 if is_new else 2)))
    assert same_bits(simulated(restored, url, 1)[0], whole(state_of(None, 1)))
    simulated(saves, url, 2, 3, shard=2)
    assert same_bits(simulated(restored, url, 2)[0], whole(state_of(None, 2)))
    checkpoint.delete(url, 2)
    assert not [name for name in files(url) if "step-000000000002" in name]


@pytest.mark.parametrize(
    ("dir", "kind", "sentence"),
    [
        ("s3://", ValueError, r"dir='s3://': expected a folder in the store, as in 's3://bucket/run'"),
        ("nosuch://a/b", ValueError, r"dir='nosuch://a/b': expected a path, or a URL that fsspec opens: Protocol not"),
        ("simplecache::s3://a/b", ValueError, r"expected one URL, got a chain"),
        (Path("s3://a/b"), ValueError, r"expected a URL as a string: a path has lost a slash of it"),
    ],
)
def test_wrong_urls(dir, kind, sentence):
    """A URL that is not one would be made a folder of the disk, or raise an error of fsspec without the URL."""
    for function in (checkpoint.steps, checkpoint.latest, lambda dir: checkpoint.save(dir, {"n": 1}, 1)):
        with pytest.raises(kind, match=sentence):
            function(dir)


def test_the_wrong_url_of_one_rank(tmp_path):
    """The other ranks would wait for ever for the rank whose URL is wrong."""
    saves(None, str(tmp_path), 1)

    def on_rank(mesh: Any) -> tuple[str, str]:
        dir = "nosuch://a/b" if mesh.get_local_rank("shard") == 1 else str(tmp_path)
        with pytest.raises((ValueError, fshard.MismatchError), match="expected a path, or a URL") as saving:
            saves(mesh, dir, 2)
        with pytest.raises((ValueError, fshard.MismatchError), match="expected a path, or a URL") as restoring:
            restored(mesh, dir)
        return str(saving.value), str(restoring.value)

    results = simulated(on_rank, shard=3)
    assert all(text.startswith("rank 1: ValueError: dir='nosuch://a/b'") for text in (*results[0], *results[2]))


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_files_of_hugging_face(kind, url, tmp_path):
    """A URL would be looked for on the disk; or `file://` not be read as its path."""
    checkpoint.save_safetensors(tmp_path, sharded(None, torch.arange(5.0)))
    other_store(url).pipe_file(f"{url}/model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    for dir in (f"file://{tmp_path}", f"file://{tmp_path}/model.safetensors", url):
        restored = checkpoint.restore(dir, sharded(None, torch.zeros(5)))
        assert torch.equal(restored.local_views()["w"], torch.arange(5.0))


def test_packages_that_are_not_installed(monkeypatch):
    """An ImportError from inside would not say what to install."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "fsspec.core", None)
        with pytest.raises(ImportError, match=r"dir='s3://a/b': URLs need fsspec: pip install fsspec"):
            checkpoint.latest("s3://a/b")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ImportError, match=r"dir='s3://a/b': Install s3fs"):
        checkpoint.latest("s3://a/b")


def test_names_of_places(tmp_path):
    """A password would be in an error; or `file://` would go through fsspec, which flushes nothing."""
    assert isinstance(folder_of(f"file://{tmp_path}"), LocalFolder)
    assert str(folder_of("memory://user:secret@runs/1/")) == "memory://user@runs/1"
