"""Compiled functions in a file, which later processes load."""

import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import batch, mean, net, sharded
from support.known import known
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor
from torch._inductor import config
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import align_inputs_from_check_idxs
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.compiler import identity
from fshard.compiler.artifact import find, save_program
from fshard.compiler.program import (
    Program,
    UnsavableError,
    _constant,
    _Parts,
    digest_of,
    load_program,
    with_kernels,
)
from fshard.compiler.signature import Signature


def dropped(p: Any, tokens: Tensor) -> fshard.Mean:
    """A loss with random numbers, which differ between ranks, and with a tensor that it makes."""
    rows = torch.nn.functional.dropout(net(p, tokens), 0.3) * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return fshard.Mean(rows.sum(), rows.numel())


def again(p: Any, tokens: Tensor) -> fshard.Mean:
    """A loss that is computed again in the backward."""
    rows = checkpoint(lambda: net(p, tokens), use_reentrant=False)
    return fshard.Mean(rows.sum(), rows.numel())


class Way(NamedTuple):
    """A step: its loss, optimizer, options, plan, and options of `jit`."""

    loss: Callable[..., Any]
    tx: Callable[[], Any]
    step: dict[str, Any]
    plan: dict[str, Any]
    jit: dict[str, Any]


WAYS = {
    "adamw": Way(mean, lambda: optim.adamw(0.1), {}, {}, {"donate": True}),
    "dropout": Way(dropped, lambda: optim.sgd(0.1, momentum=0.9), {}, {"regather": False}, {}),
    "checkpoint": Way(again, lambda: optim.lion(0.1), {"clip_norm": 1.0}, {"params_over": ()}, {"donate": True}),
    "bf16": Way(mean, lambda: optim.adamw(0.1), {}, {"policy": "compute=bf16"}, {"bucket": 0}),
    "muon": Way(mean, lambda: optim.muon(0.1), {}, {"frozen": ["blocks.*.b"]}, {"donate": True}),
    "accumulate": Way(mean, lambda: optim.sgd(0.1), {"accumulate": 2}, {}, {"donate": True}),
}


def steps(mesh: Any, way: str, path: str | None, count: int = 2) -> tuple[Any, str]:
    """The result of some steps, and what the jitted step says."""
    loss, tx, options, plan, by = WAYS[way]
    params = sharded(mesh, **plan)
    state = fshard.init_state(params, tx(), seed=3)
    run = fshard.jit(fshard.train_step(loss, tx(), **options), artifact=path, **by)
    data = [batch(2 * mesh.get_rank()), batch(2 * mesh.get_rank() + 1)]
    rows = torch.stack(data) if "accumulate" in options else data[0]
    results = []
    for _ in range(count):
        state, metrics = run(state, rows)
        results.append(metrics)
    return (fshard.gather_params(state.params), fshard.tree.leaves(state.opt_state), results), run.explain()


def both(mesh: Any, way: str, path: str) -> None:
    """A step that is written, one that is loaded, and one without a file give the same bits."""
    expected, _ = steps(mesh, way, None)
    for begin in ("traced, and written to", "loaded from"):
        got, said = steps(mesh, way, path)
        assert said.startswith(f"{begin} {path}"), said
        assert same_bits(got, expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_loaded_is_what_was_compiled(way, tmp_path):
    """A step would be another one in a second process."""
    simulated(both, way, str(tmp_path / "step"))
    (entry,) = json.loads(zipfile.ZipFile(tmp_path / "step").read("index.json"))["programs"]
    # muon's matrices have owners; leaves that are cut unevenly have other norms on each rank, and dropout other numbers
    assert len({*entry["keys"]}) == (2 if way == "muon" else 1)
    assert len({*entry["programs"]}) == (1 if way in ("adamw", "accumulate") else 2)


def in_a_process(mesh: Any, way: str, path: str, meshes: int) -> tuple[Any, str, bool]:
    """The same in a process of its own, which has used other meshes before, and whether it imported the compiler."""
    for _ in range(meshes):
        other = sharded(init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("shard",)))
        fshard.jit(lambda p: p["embed"], backend="eager")(other)
        del other
        gc.collect()  # graphs hold meshes in cycles
    got, said = steps(mesh, way, path)
    return got, said, "torch._inductor.compile_fx" in sys.modules


def test_processes_load_one_file(tmp_path):
    """A second process would trace and compile again, or import the compiler."""
    path = str(tmp_path / "step")
    written, loaded = (gloo(in_a_process, "dropout", path, meshes) for meshes in (0, 2))
    for (got, said, imported), (expected, before, _) in zip(loaded, written, strict=True):
        assert before == f"traced, and written to {path}: there is no such file"
        assert said == f"loaded from {path}"
        assert not imported
        assert same_bits(got, expected)


# ---- what must be the same


def product(x: Tensor, y: Tensor) -> Tensor:
    """A function that compilers leave to torch."""
    return x @ y


def times(x: Tensor, by: float = 2.0) -> Tensor:
    """A function without a loop that g++ compiles anew for each number."""
    return x * by


def options(**by: Any) -> Callable[[], Any]:
    """A jitted function with other options."""
    return lambda: fshard.jit(times, **by)


X = rand(4, 6, seed=1, dtype=torch.float32)
SAME = (lambda: fshard.jit(times), lambda: (X,))
# name: how the other function is made, its arguments, and what the reason says
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "donate": (options(donate=True), SAME[1], "jit's options was Options"),
    "bucket": (options(bucket=0), SAME[1], "jit's options was"),
    "a default": (lambda: fshard.jit(lambda x, by=3.0: x * by), SAME[1], "the code of .*lambda.* was not there"),
    "shape": (SAME[0], lambda: (X[:3],), r"argument '0.0' was float32\[4, 6\].*, is float32\[3, 6\]"),
    "strides": (SAME[0], lambda: (X.T.contiguous().T,), "argument '0.0' was .*strides"),
    "dtype": (SAME[0], lambda: (X.double(),), "argument '0.0' was float32.*, is float64"),
    "gradient": (SAME[0], lambda: (X.clone().requires_grad_(),), "that requires a gradient"),
    "a number": (SAME[0], lambda: (X, 3.0), "argument '0.1' was not there, is 3.0"),
    "structure": (SAME[0], lambda: ({"a": X},), "argument '0.0.a' was not there"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the program of `times`."""
    path = tmp_path_factory.mktemp("artifact") / "times"
    run = fshard.jit(times, artifact=path)
    assert same_bits(run(X), times(X))
    assert run.explain().endswith("there is no such file")
    return path


def reason(path: Path, jitted: Any, *args: Any) -> str:
    """Why a function is not loaded from a file; "" if it is."""
    there = find(path, known(jitted, *args), None)
    return there if isinstance(there, str) else ""


def test_the_same_function_is_loaded(written):
    """The reasons below would be others than they say."""
    assert not reason(written, fshard.jit(times), X)
    run = fshard.jit(times, artifact=written)
    assert same_bits(run(X), times(X))
    assert run.explain() == f"loaded from {written}"


@pytest.mark.parametrize("case", OTHERS)
def test_another_function_is_not_loaded(case, written):
    """What was compiled for other code or arguments would run."""
    make, args, words = OTHERS[case]
    with pytest.raises(AssertionError, match=words):
        assert not (said := reason(written, make(), *args())), said


PLACES: dict[str, tuple[str, str, Any]] = {
    "fshard": ("fshard.compiler.identity._digest_of_package", "fshard was", lambda: "9.9"),
    "torch": ("torch.__version__", "torch was", "9.9"),
    "Python": ("platform.python_version", "Python was", lambda: "9.9"),
    "the machine": ("platform.machine", "the machine was", lambda: "abacus"),
    "the processor": ("torch.backends.cpu.get_cpu_capability", "the processor was", lambda: "AVX9"),
    "the number of threads": ("torch.get_num_threads", "the number of threads was", lambda: 77),
}


@pytest.mark.parametrize("case", PLACES)
def test_another_machine_is_told(case, written, monkeypatch):
    """A library would be loaded that another torch, or another processor, cannot run."""
    place, words, value = PLACES[case]
    identity._processor.cache_clear()
    monkeypatch.setattr(place, value)
    assert reason(written, fshard.jit(times), X).startswith(words)
    monkeypatch.undo()
    identity._processor.cache_clear()


@pytest.mark.parametrize("case", ["the processor", "the number of threads"])
def test_a_program_without_loops_is_of_any_processor(case, tmp_path, monkeypatch):
    """What g++ has not compiled would be traced again on each kind of host, and its file written again."""
    path, (place, _, value) = tmp_path / "product", PLACES[case]
    fshard.jit(product, artifact=path)(X, X.T)
    before = path.read_bytes()
    identity._processor.cache_clear()
    monkeypatch.setattr(place, value)
    run = fshard.jit(product, artifact=path)
    assert same_bits(run(X, X.T), X @ X.T)
    assert run.explain() == f"loaded from {path}"
    assert path.read_bytes() == before
    fshard.jit(product, artifact=path).lower(X.T, X).compile().save(path)
    assert not reason(path, fshard.jit(product), X, X.T)  # which a new program beside it does not drop
    monkeypatch.undo()
    identity._processor.cache_clear()


def test_other_settings_are_told(written, monkeypatch):
    """What was compiled with other settings of torch, Inductor or g++ would run."""
    with config.patch(max_fusion_size=3):
        assert reason(written, fshard.jit(times), X).startswith("Inductor's settings was")
    monkeypatch.setenv("CXX", "another")
    assert reason(written, fshard.jit(times), X).startswith("the environment was")
    monkeypatch.undo()
    with torch.autocast("cpu"):
        assert reason(written, fshard.jit(times), X).startswith("torch's autocast was")
    with torch.no_grad():
        assert reason(written, fshard.jit(times), X).startswith("torch's grad mode was")


SCRIPT = """
import json, torch
from dataclasses import dataclass
from fshard import jit
from support.known import known

class Child(dict):
    NAMES = {"one", "two", "three", "four"}
    def run(self, x):
        return x * len(self) if x.ndim in {1, 2, "a", "b"} else x

@dataclass
class Options:
    words: frozenset = frozenset({"five", "six", "seven"})

child, options, table = Child(k=2), Options(), {"a": {"b", "c", "d"}, "f": lambda x: x}

def fn(x):
    return table["f"](child.run(x)) * len(options.words)

print(json.dumps([known(jit(f), torch.ones(2)).texts() for f in (fn, child.run)]))
"""


def test_texts_are_the_same_in_every_process():
    """Sets and strings have other orders and hashes there."""
    here = Path(__file__).parents[2]
    seen = []
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}:{here / 'tests'}"}
        out = subprocess.run([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, check=True)
        seen.append(json.loads(out.stdout.splitlines()[-1]))
    assert seen[0] == seen[1]


# ---- files


@settings(max_examples=40)
@given(st.data())
def test_a_file_that_is_damaged(written, tmp_path_factory, data):
    """Bytes that are not what was written would run."""
    whole = bytearray(written.read_bytes())
    if data.draw(st.booleans(), "cut off"):
        del whole[data.draw(st.integers(0, len(whole) - 1), "from") :]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1), "at")] ^= data.draw(st.integers(1, 255), "bits")
    path = tmp_path_factory.mktemp("damaged") / "times"
    path.write_bytes(whole)
    got = find(path, known(fshard.jit(times), X), None)
    # what a zip file has twice (dates, say) may be damaged in one place
    assert isinstance(got, str) or got == find(written, known(fshard.jit(times), X), None)


class Evil:
    """What runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


STRANGE: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "pickle": pickle.dumps(Evil()),
    "torch": b"",
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_file_of_another_kind(kind, tmp_path):
    """It would be run, or the error would not say which file it is."""
    path = tmp_path / "file"
    path.write_bytes(STRANGE[kind])
    if kind == "torch":
        torch.save({"a": X}, path)
    assert "it is damaged, or no artifact" in reason(path, fshard.jit(times), X)
    run = fshard.jit(times, artifact=path)
    assert same_bits(run(X), times(X))
    assert "damaged" in run.explain()
    assert not reason(path, fshard.jit(times), X), "it was written anew"


def test_another_format(written, tmp_path):
    """A later version's file would be misread."""
    path = tmp_path / "file"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("index.json", json.dumps({"format": 99, "programs": []}))
    assert reason(path, fshard.jit(times), X).endswith("its format was 99, is 2")


UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "all": (lambda path: path.chmod(0o646), "others may write to it: chmod go-w"),
    "a group": (lambda path: path.chmod(0o664), "others may write to it: chmod go-w"),
    "another user": (lambda path: os.chown(path, 12345, -1), "it belongs to another user, 12345"),
}


@pytest.mark.parametrize("who", UNSAFE)
def test_a_file_that_others_may_write_is_not_loaded(who, written, tmp_path):
    """Another user of the host would put a program there, which the job runs as its own."""
    if who == "another user" and os.geteuid():
        pytest.skip("needs root")
    path, (change, words) = tmp_path / "file", UNSAFE[who]
    path.write_bytes(written.read_bytes())
    path.chmod(0o644)
    assert not reason(path, fshard.jit(times), X)
    change(path)
    before = os.umask(0)
    try:
        run = fshard.jit(times, artifact=path)
        assert same_bits(run(X), times(X))
    finally:
        os.umask(before)
    assert run.explain() == f"traced, and written to {path}: {words}"
    assert not reason(path, fshard.jit(times), X), "it was written anew, and nobody else may write"


def test_what_killed_writes_left_is_deleted_after_a_day(written, tmp_path):
    """Each job that is killed while it writes would leave a file of megabytes, which nobody sees."""
    path = tmp_path / "step"
    old, new, other = (tmp_path / f"{name}.0123456789abcdef" for name in (".step", ".step", ".another"))
    new = new.with_suffix(".fedcba9876543210")  # of a process that may still write it
    for file in (old, new, other):
        file.write_bytes(b"half")
    for file in (old, other):
        os.utime(file, (0, 0))
    fshard.jit(times, artifact=path)(X)
    assert {*tmp_path.iterdir()} == {path, new, other}


def test_a_file_that_cannot_be_written(tmp_path):
    """One rank would go on alone, and the others wait for it."""
    (tmp_path / "file").write_text("no folder")

    def job(mesh: Any) -> str:
        params = sharded(mesh)
        with pytest.raises(OSError, match="file"):
            fshard.jit(fshard.value_and_grad(mean), artifact=tmp_path / "file" / "step")(params, batch(0))
        return "raised"

    assert simulated(job) == ["raised", "raised"]
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_a_write_that_is_cut_off_leaves_the_file(written, tmp_path, monkeypatch):
    """A disk that is full would take the programs of before with it."""
    path = tmp_path / "step"
    path.write_bytes(written.read_bytes())
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        fshard.jit(times, artifact=path)(X[:2])
    monkeypatch.undo()
    assert path.read_bytes() == written.read_bytes()
    assert [*tmp_path.iterdir()] == [path]


# ---- several programs in one file


def test_programs_for_other_arguments_stay(written, tmp_path):
    """A job of two shapes would compile one of them in each process."""
    path = tmp_path / "step"
    path.write_bytes(written.read_bytes())
    fshard.jit(times).lower(X[:2]).compile().save(path)
    run = fshard.jit(times, artifact=path)
    for x in (X, X[:2], X[:3]):
        assert same_bits(run(x), times(x))
    assert run.explain().splitlines() == [
        f"loaded from {path}",
        f"loaded from {path}",
        "traced again, and not written: argument '0.0' was float32[2, 6] strides [6, 1] on cpu, is float32[3, 6] "
        "strides [6, 1] on cpu",
    ]
    with config.patch(max_fusion_size=3):
        fshard.jit(times, artifact=path)(X)
    assert reason(path, fshard.jit(times), X).startswith("Inductor's settings was"), "those of other settings do not"


def test_two_functions_in_one_file(tmp_path):
    """They would throw each other out, and both be compiled in each process."""
    path = tmp_path / "steps"
    for begin in ("traced", "loaded"):
        for fn in (times, eval("lambda x: x + 1")):
            run = fshard.jit(fn, artifact=path)
            assert same_bits(run(X), fn(X))
            assert run.explain().startswith(begin)
    changed = fshard.jit(eval("lambda x: x + 2"), artifact=path)
    assert same_bits(changed(X), X + 2)
    programs = json.loads(zipfile.ZipFile(path).read("index.json"))["programs"]
    assert len(programs) == 2, "the code of before is not kept"


def test_keys_that_are_equal_are_not_one(tmp_path):
    """A result would have the key of an argument."""
    for key in (True, 1.0, 1):
        fn = eval(f"lambda d: {{{key!r}: d[1] * 2}}")
        for _ in range(2):
            if type(key) is not int:
                with pytest.raises(UnsavableError, match="whose structure no argument has"):
                    fshard.jit(fn, artifact=tmp_path / "step")({1: X})
            else:
                assert [*map(type, fshard.jit(fn, artifact=tmp_path / "step")({1: X}))] == [int]


def test_a_rank_with_other_arguments_waits_for_no_other(tmp_path):
    """A rank that traces after the first call would wait for ranks that do not come."""

    def fn(params: Any, x: Tensor) -> Tensor:
        return fshard.gather_params(params)["head"].sum() * x

    def job(mesh: Any) -> str:
        params, run = sharded(mesh), fshard.jit(fn, artifact=tmp_path / "step")
        for rows in (2, 2 + mesh.get_rank()):
            x = torch.ones(rows, dtype=torch.float64)
            torch.testing.assert_close(run(params, x), fn(params, x))
        return run.explain()

    first, other = simulated(job)
    assert "again" not in first
    assert "traced again, and not written" in other


# ---- what cannot be saved


class Own:
    """A class of the user's that is a node of trees."""

    def __init__(self, x: Any) -> None:
        self.x = x


fshard.tree.register(Own, lambda own: ([own.x], None), lambda _, children: Own(*children))


def locked() -> Any:
    """A function that reads an object which no other process can compare."""
    lock = threading.Lock()
    return lambda x: x * (1 if lock else 2)


def drawn(x: Tensor) -> Tensor:
    """Draws from torch's generator."""
    return x * torch.rand(())


def local() -> Any:
    """A result whose class no name leads to."""

    class Local(NamedTuple):
        x: Any

    return lambda x: Local(x * 2)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a lock": (locked, r"'lock' of locked.<locals>.<lambda> has a _thread.lock, which another process cannot compare"),
    "torch's generator": (lambda: drawn, "draws from torch's generator"),
    "a class": (lambda: lambda x: {"a": Own(x * 2)}, r"the result has at 'a' a Own, whose structure no argument has"),
    "a named tuple of a function": (
        local,
        r"the result has at '' a local.<locals>.Local, whose structure no argument has",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved(case, tmp_path):
    """It would be saved and be wrong, or be traced in each process without a word."""
    make, words = REFUSED[case]
    for run in (
        lambda: fshard.jit(make(), artifact=tmp_path / "step")(X),
        lambda: fshard.jit(make()).lower(X).compile().save(tmp_path / "step"),
    ):
        with pytest.raises(UnsavableError, match=words):
            run()
    assert not [*tmp_path.iterdir()]


def test_arguments_of_jit(tmp_path):
    """A mistake would be told where the file is written."""
    wrong: Any = 3
    with pytest.raises(TypeError, match="artifact=3: expected the path of a file"):
        fshard.jit(times, artifact=wrong)
    with pytest.raises(TypeError, match=r"backend=.*inductor"):
        fshard.jit(times, artifact=tmp_path / "step", backend="eager")


class Pair(NamedTuple):
    """A result of the user's."""

    x: Any
    note: Any


def everything(x: Tensor, own: Own, note: Any) -> Any:
    """A result with all that a result may have."""
    more = [None, (1, 2.5, float("inf"), "a", True, 1 - 2j), torch.float16, torch.device("cpu"), torch.strided]
    return Pair({"b": x + 1, "a": [x.sum(), own]}, (note, more, MEAN * 2, {1: x, "k": Own}.get(1), x.topk(1)))


MEAN = torch.tensor([3.0, 4.0])


def test_results_of_every_kind(tmp_path):
    """A leaf would be lost on the way through the file, or be of another type."""
    global MEAN
    for begin in ("traced", "loaded"):
        run = fshard.jit(everything, artifact=tmp_path / "all")
        for now in (MEAN, MEAN + 1):  # read at each run
            MEAN = now
            got, expected = (fn(X, Own(X[0]), "note") for fn in (run, everything))
            assert same_bits(fshard.tree.leaves(got.x), fshard.tree.leaves(expected.x))
            assert type(got) is Pair
            assert str(got.note) == str(expected.note)
        assert run.explain().startswith(begin)
        assert "\n" not in run.explain()


def test_private_names_of_torch():
    """Loading would fail at the first step of a job, if torch renamed one of them."""
    assert torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    names = {field.name for field in fields(CompiledFxGraph)}
    assert {"source_code", "constants", "inputs_to_check", "mutated_input_idxs"} <= names
    twice = align_inputs_from_check_idxs(lambda xs: [xs[0].mul_(2)], [0], {0})  # type: ignore[arg-type]
    x = torch.ones(2)
    assert torch.equal(twice([x])[0], torch.full((2,), 2.0))
    assert torch.equal(x, torch.full((2,), 2.0))


def test_a_constant_is_written_without_a_list_of_its_bytes() -> None:
    """A mask of a gigabyte would take tens of them while it is written."""
    x, parts = torch.randn(100, 100), _Parts()
    tracemalloc.start()
    _constant(x, parts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(parts.values()) == [x.numpy().tobytes()]
    assert peak < 3 * x.nbytes


def transposed(x: Tensor, mesh: Any) -> Any:
    b = x * 1.0
    s = fshard.all_reduce(b.sum(), mesh, "shard")
    b.t_()
    b.mul_(s)
    b[0] = fshard.all_reduce(b.sum(), mesh, "shard")
    return b, b.t() + s


def viewed(x: Tensor, mesh: Any) -> Any:
    b = x * 1.0
    s = fshard.all_reduce(b.sum(), mesh, "shard")
    b = b.t()
    b.mul_(s)
    b[0] = fshard.all_reduce(b.sum(), mesh, "shard")
    return b, b.t() + s


def reshaped(x: Tensor, mesh: Any) -> Any:
    b = x * 1.0
    s = fshard.all_reduce(b.sum(), mesh, "shard")
    b.unsqueeze_(0)
    t = fshard.all_reduce(b.sum(), mesh, "shard")
    b.squeeze_(0).add_(t * s)
    return b


@pytest.mark.parametrize("fn", [transposed, viewed, reshaped])
def test_writes_and_new_forms_between_collectives(fn: Any, tmp_path: Path) -> None:
    """What a region gives back would miss the writes of later ones, or a compiler would take a form for another."""
    made = list[Any]()

    def run(mesh: Any) -> None:
        params = {"w": torch.ones(4)}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        if not made:
            made.append(fshard.jit(lambda p, x: fn(x, p.plan.mesh), artifact=tmp_path / "file"))
        x = rand(3, 3, seed=mesh.get_rank())
        torch.testing.assert_close(made[0](sharded, x), fn(x, mesh))

    simulated(run, shard=2)


# ---- kernels of GPUs


class Compiler:
    """A region's compiler that tells when kernels are submitted and awaited."""

    said: ClassVar[list[str]] = []

    def wait(self, scope: dict[str, Any]) -> None:
        self.said.append(f"awaits {scope['number']}")


REGION = """
import sys
Compiler = sys.modules["test_artifact"].Compiler
async_compile, number = Compiler(), {}
Compiler.said.append("submits {}")
def call(args): return [args[0] + number]
"""


def program_of_texts(*texts: str, kernels: dict[str, bytes] | None = None) -> Program:
    """A program whose driver calls each region with the result of the one before."""
    calls = "\n".join(f"    x, = region_{number}([x])" for number in range(len(texts)))
    data = [f"def forward(self, x):\n{calls}\n    return x".encode(), *(text.encode() for text in texts)]
    driver, *regions = map(digest_of, data)
    files = {name: digest_of(file) for name, file in (kernels or {}).items()}
    head = {"driver": driver, "libraries": [], "constants": {}, "kernels": files} | {
        "regions": [{"text": text, "loops": {}, "aligned": [], "written": []} for text in regions]
    }
    return Program(head, {digest_of(file): file for file in (*data, *(kernels or {}).values())})


def test_all_kernels_are_submitted_before_one_is_awaited():
    """Compile workers would have the kernels of one region at a time."""
    Compiler.said.clear()
    fn, *_ = load_program(program_of_texts(*map(REGION.format, "12", "12")), [])
    assert fn(3) == 6
    assert Compiler.said == ["submits 1", "submits 2", "awaits 1", "awaits 2"]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A function that gives this process other caches, as another machine has."""

    def of(name: str) -> Path:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name / "inductor"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name / "triton"))
        return tmp_path / name

    return of


def compiled_kernel(caches: Path, launchers: int = 1) -> CachingAutotuner:
    """A kernel as it is after its first call, with its files."""
    chosen, folder = caches / "inductor" / "27" / "abc.best_config", caches / "triton" / "HASH"
    texts = {"k.cubin": "binary", "k.json": "{}", "k.ptx": "text"}
    files = {folder / name: text for name, text in texts.items()} | {chosen: '{"XBLOCK": 8}'}
    files[folder / "__grp__k.json"] = json.dumps({"child_paths": {name: str(folder / name) for name in texts}})
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    kernel.launchers = [SimpleNamespace(cache_hash="HASH")] * launchers
    kernel.triton_meta = {"device": 1}
    kernel.save_cache_hook = AutotuneCache("", (None, str(chosen))).save
    return kernel


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def carried(caches: Callable[[str], Path]) -> Program:
    """A program with the files of one kernel."""
    scopes = [{"async_compile": None, "k": compiled_kernel(caches("here")), "torch": torch}]
    return with_kernels(program_of_texts(REGION.format(1, 1)), scopes)


def test_kernels_go_into_the_caches_of_another_process(caches):
    """Triton would compile each configuration of each kernel in each process, and Inductor measure them."""
    program, there = carried(caches), caches("there")
    load_program(program, [])
    folder = there / "triton" / "HASH"
    listed = {name: str(folder / name) for name in ("k.cubin", "k.json", "k.ptx")}
    assert files_in(there) == {
        "inductor/27/abc.best_config": b'{"XBLOCK": 8}',
        "triton/HASH/k.cubin": b"binary",
        "triton/HASH/k.json": b"{}",
        "triton/HASH/__grp__k.json": json.dumps({"child_paths": listed}).encode(),
    }
    (folder / "k.cubin").write_bytes(b"own")
    load_program(program, [])
    assert (folder / "k.cubin").read_bytes() == b"own", "what is there stays"


def test_a_kernel_without_a_choice_is_not_carried(caches):
    """Another process would take the configuration that was compiled first for the best."""
    kernel = compiled_kernel(caches("here"), launchers=2)
    assert with_kernels(program_of_texts(), [{"async_compile": None, "k": kernel}]).head["kernels"] == {}


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("how", ["full", "killed"])
def test_a_kernel_is_whole_or_not_there(how, number, caches, monkeypatch):
    """Triton takes a kernel for whole if its list of files is there, and would launch half a binary."""
    program, there, rename = carried(caches), caches("there"), Path.rename
    left = iter(range(number))

    def renamed(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise OSError(28, "No space left on device") if how == "full" else KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises((OSError, KeyboardInterrupt)):
        load_program(program, [])
    whole = {**files_in(there)}
    monkeypatch.undo()
    caches("there")
    assert len([name for name in whole if not name.endswith(".tmp")]) == number
    assert not any("__grp__" in name for name in whole)
    load_program(program, [])
    assert len([name for name in files_in(there) if not name.endswith(".tmp")]) == 4


def test_foreign_bytes_of_a_kernel_are_not_loaded(written, tmp_path):
    """A GPU would run what nobody compiled."""
    program = find(written, known(fshard.jit(times), X), None)
    assert isinstance(program, Program)
    path, data = tmp_path / "step", b"binary"
    with_one = Program(
        {**program.head, "kernels": {"0/HASH/k.cubin": digest_of(data)}}, {**program.parts, digest_of(data): data}
    )
    save_program(path, known(fshard.jit(times), X), with_one, None)
    assert find(path, known(fshard.jit(times), X), None) == with_one
    path.write_bytes(path.read_bytes().replace(data, b"BINARY"))
    assert "damaged" in reason(path, fshard.jit(times), X)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs are told that they lie on an accelerator; the calls of its allocator."""
    calls = list[str]()
    monkeypatch.setattr(Signature, "is_on_accelerator", True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("emptied"))
    return calls


@pytest.mark.parametrize("artifact", [False, True])
def test_what_autotuning_took_is_given_back_once(artifact, tmp_path, as_on_a_gpu):
    """Segments for clones of what kernels write to would stay reserved, and nothing else fits into them."""
    run = fshard.jit(times, artifact=tmp_path / "step" if artifact else None)
    for x in (X, X, X[:2], X):
        assert same_bits(run(x), times(x))
    assert as_on_a_gpu == ["emptied"] * 2
    compiled = fshard.jit(times).lower(X).compile()
    assert same_bits([compiled(X), compiled(X)], [times(X)] * 2)
    assert as_on_a_gpu == ["emptied"] * 3


def with_a_choice(program: Program, scopes: Any) -> Program:
    """A program as it is after kernels were chosen."""
    data = b"chosen" if scopes else b""
    kernels = {"27/a.best_config": digest_of(data)} if scopes else {}
    return Program({**program.head, "kernels": kernels}, {**program.parts, digest_of(data): data})


def test_kernels_are_saved_after_the_first_call(tmp_path, caches, monkeypatch, as_on_a_gpu):
    """Before it nothing is chosen, and the file would have no kernels."""
    monkeypatch.setattr("fshard.compiler.artifact.with_kernels", with_a_choice)
    there, path = caches("there"), tmp_path / "step"
    for name in ("step", "saved"):
        run = fshard.jit(times, artifact=tmp_path / name)
        if name == "step":
            run(X)
        else:
            run.lower(X).compile().save(tmp_path / name)
        assert find(tmp_path / name, known(run, X), None).head["kernels"], name
    run = fshard.jit(times, artifact=path)
    assert same_bits(run(X), times(X))
    assert run.explain() == f"loaded from {path}"
    assert (there / "inductor/27/a.best_config").read_bytes() == b"chosen"


def test_ranks_save_kernels_together(tmp_path, as_on_a_gpu):
    """A rank would save alone, and wait for others, or take one collective for another."""
    simulated(both, "adamw", str(tmp_path / "step"))
    assert len(as_on_a_gpu) == 6


def test_kernels_that_cannot_be_saved_cost_no_result(tmp_path, monkeypatch, as_on_a_gpu):
    """The state of a donated step would be lost, because a disk is full."""

    def full(program: Program, scopes: Any) -> Program:
        if scopes:
            raise OSError(28, "No space left on device")
        return program

    monkeypatch.setattr("fshard.compiler.artifact.with_kernels", full)
    run = fshard.jit(times, artifact=tmp_path / "step")
    assert same_bits(run(X), times(X))
    assert run.explain().splitlines()[1:] == [f"{tmp_path / 'step'} has no kernels: [Errno 28] No space left on device"]
    assert not reason(tmp_path / "step", fshard.jit(times), X)
