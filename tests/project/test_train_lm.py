"""The example trains: in a process of its own, and sharded over two that torchrun starts."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import lm_text
import pytest
import torch
from support.models import same_bits
from support.worlds import simulated

import fshard
from fshard import checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm.py"
TINY = "--steps=25 --d-model=16 --layers=2 --heads=2 --context=16 --batch=4 --warmup=5 --eval-every=10 --sample=20"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # where dataclasses look up the names of types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in "abc":
        (folder / name).write_text(f"the {name} of a tree is a tree; " * 100)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["process", "ranks"])
def trained(
    request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, subprocess.CompletedProcess[str], Path]:
    """Number of ranks, how the example ended, and the folder it wrote. 5 windows: one rank lacks one at the end."""
    out = tmp_path_factory.mktemp("out") / "new"
    start = [sys.executable, *(TORCHRUN if request.param == 2 else [])]
    command = [*start, str(EXAMPLE), *TINY.split(), "--eval-bytes=144", f"--data={text}", f"--out={out}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    return request.param, subprocess.run(command, capture_output=True, text=True, env=env, check=False), out


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_it_ends_well_and_says_what_came_of_it(trained: Any) -> None:
    """The example would fail, warn, or not print its comparison."""
    ranks, done, _ = trained
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr
    for words in ("this model", "gzip -9", "Written by the model", "unsharded", f"rank {ranks - 1}"):
        assert done.stdout.count(words) == 1, done.stdout


@pytest.mark.slow
def test_the_loss_falls_and_every_measurement_is_finite(trained: Any) -> None:
    """The example would not learn, or report other figures than it measured."""
    *steps, result = records(trained[2])
    assert [record["step"] for record in steps] == [10, 20, 25]
    assert steps[-1]["train_bits_per_byte"] < steps[0]["train_bits_per_byte"] < 8
    assert steps[-1]["validation_bits_per_byte"] < steps[0]["validation_bits_per_byte"] < 8
    assert result["validation_bits_per_byte"] == steps[-1]["validation_bits_per_byte"]
    assert all(math.isfinite(value) for record in steps for value in record.values())
    assert math.isfinite(result["gzip_bits_per_byte"])


@pytest.mark.slow
def test_a_rank_holds_its_share_of_everything(trained: Any) -> None:
    """The example would claim sharding while a rank holds more than its share."""
    ranks, _, out = trained
    held = records(out)[-1]["memory_bytes"]
    assert len(held) == ranks + 1
    for rank in range(ranks):
        for mine, whole in zip(held[f"rank {rank}"], held["unsharded"], strict=False):
            assert whole <= mine * ranks <= whole * 1.01 + 16  # padding, and the optimizer's count on every rank


@pytest.mark.slow
def test_the_curve_is_a_picture(trained: Any) -> None:
    """The example would write no picture of the loss."""
    assert (trained[2] / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_time_that_is_up_ends_training(example: ModuleType, text: Path, tmp_path: Path) -> None:
    """`--minutes` would not end the training."""
    example.main([*TINY.split(), f"--data={text}", f"--out={tmp_path}", "--steps=1000", "--minutes=1e-9"])
    assert [record.get("step") for record in records(tmp_path)] == [10, None]


def whole_run(example: ModuleType, text: Path, out: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The last checkpoint of a run, whole, and the records in it without what depends on the time."""
    s = example.read_arguments([*TINY.split(), f"--data={text}", f"--out={out}", "--reduction=tree"])[0]
    like = {"state": example.start(s, None, torch.device("cpu")), "run": "", "history": ""}
    saved = checkpoint.restore(out / "checkpoints", like)
    timed = ("done", "seconds", "bytes_per_second")
    history = json.loads(saved.pop("history"))
    return saved, [{name: x for name, x in record.items() if name not in timed} for record in history]


@pytest.fixture(scope="module")
def undisturbed(example: ModuleType, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run leaves that is never stopped."""
    out = tmp_path_factory.mktemp("undisturbed")
    assert example.main([*TINY.split(), f"--data={text}", f"--out={out}", "--reduction=tree"]) == 0
    return whole_run(example, text, out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_goes_on(
    example: ModuleType, text: Path, undisturbed: Any, tmp_path: Path, number: int, monkeypatch: Any, capsys: Any
) -> None:
    """After ctrl-C the same command would start anew, lose steps or records, or compute other numbers."""
    arguments = [*TINY.split(), f"--data={text}", f"--out={tmp_path}", "--reduction=tree"]
    handler, draw = signal.getsignal(number), example.random_windows

    def stopping(text: Any, context: int, seed: int, step: int, rows: range) -> Any:
        if step == 13:
            signal.raise_signal(number)
        return draw(text, context, seed, step, rows)

    with monkeypatch.context() as patched:
        patched.setattr(example, "random_windows", stopping)
        assert example.main(arguments) == 128 + number
    assert signal.getsignal(number) is handler
    assert "Stopped and saved at step 20: the same command goes on from there" in capsys.readouterr().out
    assert [record["step"] for record in records(tmp_path)] == [10, 20]
    assert example.main(arguments) == 0
    assert f"Goes on from step 20: delete {tmp_path} to start anew" in capsys.readouterr().out
    assert [record.get("step") for record in records(tmp_path)] == [10, 20, 25, None]
    assert same_bits(whole_run(example, text, tmp_path), undisturbed)
    assert example.main(arguments) == 0
    assert f"Ended before, at step 25: delete {tmp_path} to start anew" in capsys.readouterr().out
    assert [record.get("step") for record in records(tmp_path)] == [10, 20, 25, None]


def test_after_an_error_signals_end_the_process(example: ModuleType) -> None:
    """A rank that has lost its peer would not end when torchrun tells it to, and could be started anew only later."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), example.signals():
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_number_of_ranks_goes_on_with_the_same_bits(
    example: ModuleType, text: Path, undisturbed: Any, tmp_path: Path
) -> None:
    """With `--reduction=tree` a run that lost or gained ranks would go on with other windows or other sums."""
    arguments = [*TINY.split(), f"--data={text}", f"--out={tmp_path}", "--reduction=tree"]
    assert example.main([*arguments, "--minutes=1e-9"]) == 0  # until step 10, on one rank
    s, train, valid = example.read_arguments(arguments)

    def on_ranks(mesh: Any) -> int:
        return example.run(s, train, valid, mesh, torch.device("cpu"), [])

    assert simulated(on_ranks, shard=2) == [0, 0]
    assert [record.get("step") for record in records(tmp_path)] == [10, 20, 25, None]
    state, history = whole_run(example, text, tmp_path)
    assert same_bits(state, undisturbed[0])
    names = ("step", "train_bits_per_byte")  # a validation adds up in another order
    assert [[r[n] for n in names] for r in history] == [[r[n] for n in names] for r in undisturbed[1]]


def test_another_run_in_the_folder_is_an_error(
    example: ModuleType, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with other settings would go on from the checkpoint of another one, without a word."""
    arguments = [*TINY.split(), f"--data={text}", f"--out={tmp_path}", "--minutes=1e-9"]
    assert example.main(arguments) == 0
    for other, sentence in (("--lr=1", "lr 0.005, not 1.0"), (f"--data={text / 'a'}", "text ")):
        with pytest.raises(SystemExit):
            example.main([*arguments, other])
        expected = f"--out {tmp_path} has a run with {sentence}"
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data={}/missing"], "there is no such file or folder"),
        (["--data={}"], "there is no text in it"),
        (["--data={}/small"], "too little text"),
        (["--heads=5"], "--d-model 16: expected a multiple of --heads, which is 5"),
        (["--steps=0"], "--steps 0: expected a number above 0"),
        (["--batch=0"], "--batch 0: expected a number above 0"),
        (["--reduction=sum"], "--reduction sum: expected exact, fast or tree"),
        (["--eval-bytes=15"], "--eval-bytes 15: expected at least the 16 of --context"),
    ],
)
def test_what_makes_no_sense_is_an_error_in_a_sentence(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    """A wrong argument of the example would end in a traceback."""
    (tmp_path / "small").write_text("" if arguments == ["--data={}"] else "a few words")
    with pytest.raises(SystemExit) as stopped:
        example.main([*TINY.split(), *(argument.format(tmp_path) for argument in arguments)])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_split_is_by_file_and_the_same_in_any_order() -> None:
    """Ranks would train on validation data, or validate on different files."""
    files = [(f"{n}.py", bytes([n]) * 100) for n in range(100)]
    train, valid = lm_text.split(files)
    assert (len(train), len(valid)) == (9500, 500)
    assert not set(train) & set(valid)
    assert lm_text.split(files[::-1]) == (train, valid)
    assert lm_text.split([("one", bytes(range(100)))]) == (bytes(range(95)), bytes(range(95, 100)))


def test_every_validation_byte_is_a_target_once() -> None:
    """The loss in bits for each byte would count a byte twice, or not at all."""
    windows = lm_text.all_windows(b"abcdef", 3)
    assert [bytes(row) for row in windows["targets"].tolist()] == [b"abc", b"def"]
    assert [bytes(row) for row in windows["tokens"].tolist()] == [b"\nab", b"cde"]


def test_scores_depend_on_no_later_byte(example: ModuleType) -> None:
    """The model would see the bytes it is to predict."""
    params = example.init_params(example.Settings(d_model=16, heads=2, context=8))
    params["head"] = torch.randn(params["head"].shape, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(16).view(2, 8)
    tokens[1, :5] = tokens[0, :5]
    scores = example.model(params, tokens, heads=2)
    torch.testing.assert_close(scores[0, :5], scores[1, :5])
    assert not torch.allclose(scores[0, 5], scores[1, 5])


def ends_at(mesh: Any, example: ModuleType, wire: Any) -> float:
    """The summed losses of the last 10 of 80 steps of a small transformer on Python source, with shards sent by
    `wire`."""
    s = example.Settings(d_model=32, layers=2, heads=2, context=32)
    text = torch.tensor(list(Path(json.__file__).read_bytes()))
    params, tx = example.init_params(s), fshard.optim.adamw(3e-3)
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], param_wire=wire)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(lambda p, batch: example.loss(p, batch, s.heads), tx)
    generator, losses = torch.Generator().manual_seed(mesh.get_rank()), []
    for _ in range(80):
        starts = torch.randint(len(text) - 33, (4,), generator=generator)
        windows = torch.stack([text[i : i + 33] for i in starts])
        state, metrics = step(state, {"tokens": windows[:, :-1], "targets": windows[:, 1:]})
        losses.append(metrics["loss"].item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    return sum(losses[-10:])


def test_it_trains_as_well_with_shards_in_8_bits(example):
    """Training with shards sent in 8 bits ends within 1 % of the float32 loss: otherwise Int8 would cost users
    accuracy."""
    whole, eighths = (simulated(ends_at, example, wire, shard=2)[0] for wire in (None, fshard.wire.Int8()))
    assert abs(eighths / whole - 1) < 0.01
