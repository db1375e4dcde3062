"""`make gpu` on a machine without a GPU: every part that can run does, and the other parts say why they do not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
# of the parts that are not right without a GPU
STATES = {"waits": "skipped", "tests": "skipped"}
STATES |= dict.fromkeys(["ceilings", "correct", "speed", "several", "graphs", "systems"], "measured")


def ran(*command: str) -> Any:
    """Run a Python command in the benchmarks' folder."""
    return subprocess.run(
        [sys.executable, *command], cwd=BENCHMARKS, env=environment(), capture_output=True, text=True, check=False
    )


def environment() -> dict[str, str]:
    """The environment in which a Python process finds the project."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def rows_of(folder: Path) -> list[Any]:
    """The rows of a run."""
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
@pytest.mark.parametrize("part", re.findall(r'"(\w+)": \d', (BENCHMARKS / "gpu.py").read_text()))
def test_dry_run(part, tmp_path):
    """Every part runs or is skipped with a reason, and is in the table: otherwise its first run on a GPU would fail."""
    done = ran("gpu.py", "--parts", part, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    calls = [row["what"] for row in rows if row["case"] == "calls of the backend" and row["state"] == "measured"]
    assert len(calls) == (part == "collectives")
    states = {(row["part"], row["state"]) for row in rows if row["what"] not in calls}
    assert states == {(part, STATES.get(part, "right"))}
    assert all(row["what"].startswith("no GPU") for row in rows if row["state"] == "skipped")
    assert f"| {part} |" in (tmp_path / "gpu.md").read_text()
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
@pytest.mark.parametrize("number", [1, 40, 90])
def test_a_command_that_is_killed_has_lost_no_row(number, tmp_path):
    """What was printed before a command is killed is in its files: a GPU is lent for minutes, and taken back."""
    command = [sys.executable, "gpu.py", "--parts", "collectives", "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=BENCHMARKS, env=environment(), text=True, **pipes) as run:
        printed = [run.stdout.readline() for _ in range(number)]
        run.kill()
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()[:number]]
    assert [row["state"] for row in rows] == ["right"] * number, printed
    line = (tmp_path / "gpu.md").read_text().splitlines()[2]
    assert int(line.removeprefix("| collectives | ").partition(" ")[0]) >= number


def test_a_part_without_time_is_left_out(tmp_path):
    """What no longer fits is said: else a table without failures would look complete."""
    assert ran("gpu.py", "--seconds", "1", "--parts", "correct,nccl", "--out", str(tmp_path)).returncode == 0
    assert [(row["part"], row["what"]) for row in rows_of(tmp_path)] == [
        ("correct", "left out: no time"),
        ("nccl", "left out: no time"),
    ]


def test_files_with_tests_for_gpus_are_named():
    """A test marked `cuda` in another file would never run: nothing else collects those on a machine with a GPU."""
    marked = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"pytest\.mark\.cuda\b", path.read_text())
    ]
    named = re.findall(r'"(tests/.*\.py)"', (BENCHMARKS / "gpu_parts.py").read_text())
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in marked if path != Path(__file__))


NOT_RIGHT = """
import sys
from pathlib import Path
import torch, gpu, gpu_speed
from gpu_cases import same
from gpu_rows import Rows
from gpu_steps import near

nan, zero = torch.tensor([0.0, float("nan")]), torch.zeros(2)
assert same({"a": zero, "b": nan}, {"a": zero, "b": zero}, exact=False)
assert near({"a": zero, "b": nan}, {"a": zero, "b": zero}, 1e9)

ranks = {"case": "nccl of 2 ranks", "state": "failed"}
assert gpu._refused(ranks["case"], [ranks])  # NCCL did
assert not gpu._refused(ranks["case"], [{"case": "nccl of 2 ranks, full", "state": "right"}, ranks])  # a rank died

figures = {**dict.fromkeys(["ms", "low", "high", "tokens_per_s", "tflops", "host_alone_ms", "host_in_a_row_ms"], 1.0)}
figures |= {"ready_s": 1.0, "peak_gib": 1.0, "reserved_gib": 1.0, "reserved_again_gib": 1.0, "retries": 0}
gpu_speed.kernels_of = lambda run, trace: ("none", {})
for name, loss in ((gpu_speed.FLOOR, 6.0), ("fshard", 6.1), ("fshard, jit", 6.2), ("FSDP2", float("nan"))):
    gpu_speed.measured = lambda build: ({**figures, "losses": [loss]}, None)
    gpu_speed.system(Rows("speed", Path(sys.argv[1])), None, name)
"""


def test_what_is_not_right_is_not_called_right(tmp_path):
    """NaN, another loss than that of the floor, or a rank that died would be in a table without failures."""
    done = ran("-c", NOT_RIGHT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    named = ("kernels", "first step")
    states = {row["case"]: row["state"] for row in rows_of(tmp_path) if not row["case"].startswith(named)}
    assert list(states.values()) == ["measured", "measured", "failed", "failed"], states


def test_a_word_that_is_no_part_is_an_error():
    """A part that is misspelled would be left out after the others have run."""
    done = ran("gpu.py", "--parts", "waits,sped")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no such part: sped; expected some of ceilings, correct" in done.stderr


def test_several_gpus_are_measured_first():
    """A GPU is lent for minutes: what nobody has seen would be left out for time."""
    done = ran("-c", "import gpu; print(gpu.in_order(8)[:2], gpu.in_order(1) == gpu.in_order(0) == [*gpu.PARTS])")
    assert done.stdout == "['several', 'ceilings'] True\n", done.stderr


NO_SYSTEM = """
import gpu_several, sys
from pathlib import Path
from gpu_rows import Rows
gpu_several.SYSTEMS = {"nothing": None}
gpu_several.several(Rows("several", Path(sys.argv[1]), 100), None)
gpu_several.several(Rows("several", Path(sys.argv[1]), 20), None)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_ranks_that_fail_are_a_row(tmp_path):
    """The ranks are processes of torchrun: their error, or a lack of time, would leave no trace in the table."""
    assert (done := ran("-c", NO_SYSTEM, str(tmp_path))).returncode == 0
    assert "KeyError: 'nothing'" in done.stderr
    first, second = rows_of(tmp_path)
    assert (first["state"], first["what"]) == ("failed", "torchrun ended with 1: gpu.log says why")
    assert (second["state"], second["what"]) == ("skipped", "left out: no time")


CLOCKS = """
import gpu_speed, torch._inductor.async_compile, torch._inductor.graph, torch._inductor.runtime.triton_heuristics
from pathlib import Path
inductor = torch._inductor
text = "".join(Path(x.__file__).read_text() for x in (
    inductor.async_compile, inductor.graph, inductor.runtime.triton_heuristics))
print([clock for clocks in gpu_speed.CLOCKS.values() for clock in clocks if f'"{clock}"' not in text])
"""


def test_torch_has_the_clocks_of_a_first_step():
    """A clock with another name would be 0, and its time part of the trace."""
    done = ran("-c", CLOCKS)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_gaps_between_kernels():
    """A kernel on another stream that outlasts others would leave a gap where the GPU is busy."""
    done = ran("-c", "import doctest, gpu_speed; print(doctest.testmod(gpu_speed))")
    assert done.stdout == "TestResults(failed=0, attempted=3)\n", done.stdout + done.stderr


SILENT = """
import gpu_parts, gpu_primitives, sys
one_rank, sys.argv = gpu_parts.of_one_rank, ["", "collectives", sys.argv[1], "60"]

def silent(rows, ranks, calls):
    ranks.built_in = None
    one_rank(rows, ranks, calls)

gpu_parts.of_one_rank = silent
gpu_parts.main()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_a_run_without_a_collective_of_the_backend_fails(tmp_path):
    """If no collective of NCCL ran, nothing would say so: on one rank fshard sends nothing."""
    assert ran("-c", SILENT, str(tmp_path)).returncode == 0
    rows = rows_of(tmp_path)
    (last,) = (row for row in rows if row["case"] == "calls of the backend")
    assert (last["state"], last["what"]) == ("failed", "0 calls")
    assert {row["what"] for row in rows if row["state"] == "failed"} == {"0 calls", "no call of the backend for [6]"}


WRONG = """
import gpu_steps, sys
from fshard import optim
adamw, gpu_steps.adamw = gpu_steps.adamw, lambda: optim.adamw(1.001e-2, weight_decay=0.01)
gpu_steps.CASES = {"eager": gpu_steps.CASES["eager"]}
from gpu_parts import main
sys.argv = ["", "correct", sys.argv[1], "60"]
main()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_a_step_that_is_not_plain_torchs_fails(tmp_path):
    """A rate that is off by a thousandth would pass: the part compares values, and does not only run."""
    assert ran("-c", WRONG, str(tmp_path)).returncode == 0
    row, other = rows_of(tmp_path)
    assert [row["state"], other["state"]] == ["failed", "measured"]
    assert "from plain torch in float64" in row["what"]


OTHER_DRAWS = """
import fshard, gpu_steps, sys, torch
gpu_steps.CASES, again = {}, fshard.remat
numbers = iter([0, 1] * 9)
fshard.remat = lambda fn: again(lambda: (torch.rand(next(numbers)), fn())[1])
from gpu_parts import main
sys.argv = ["", "correct", sys.argv[1], "60"]
main()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_other_masks_in_the_backward_fail(tmp_path):
    """Dropout that is computed again with other numbers gives gradients of another function, and no error."""
    assert ran("-c", OTHER_DRAWS, str(tmp_path)).returncode == 0
    (row,) = rows_of(tmp_path)
    assert (row["case"], row["state"]) == ("remat without arguments", "failed")
    assert "from the step without remat" in row["what"]


PEAKS = """
import json, sys
sys.path.insert(0, "../tools/fakegpu")
import gpu_speed, peaks
from pathlib import Path
from types import SimpleNamespace
assert {*json.loads(peaks.EXPECTED.read_text())} == {*peaks.SYSTEMS} <= {*gpu_speed.SYSTEMS}
peaks.EXPECTED, peaks.subprocess.run = Path(sys.argv[1]), lambda *_, **__: SimpleNamespace(stdout="[1.5, 2.5]")
for words in (["fshard"], ["fshard", "FSDP2"], ["FSDP2", "--update"]):
    sys.argv[1:] = words
    try:
        peaks.main()
    except SystemExit as end:
        print(end)
"""


def test_another_peak_is_an_error(tmp_path):
    """A step that needs more memory would pass for as long as nobody reads the numbers."""
    path = tmp_path / "peaks.json"
    path.write_text('{"fshard": [1.5, 2.5], "FSDP2": [1.4, 2.5]}')
    done = ran("-c", PEAKS, str(path))
    said, other = "[1.5, 2.5] GiB allocated and reserved", "expected [1.4, 2.5]"
    end = "1 other peaks: write them with --update"
    first = [f"fshard: {said}"]
    assert done.stdout.splitlines() == [*first, *first, f"FSDP2: {said}, {other}", end, f"FSDP2: {said}, {other}"]
    assert json.loads(path.read_text()) == {"fshard": [1.5, 2.5], "FSDP2": [1.5, 2.5]}


def test_what_dies_is_a_row(tmp_path):
    """A part that dies is a row of the results, and the command fails: otherwise a crash would pass for success."""
    done = ran("-c", "import gpu; gpu.PARTS = {'nothing': 60}; gpu.main()", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "1 case(s) failed" in done.stderr
    (row,) = rows_of(tmp_path)
    assert (row["state"], row["what"]) == ("failed", "ended with 1: KeyError: 'nothing'")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_a_folder_of_an_earlier_run(tmp_path):
    """Rows of an earlier run in the same folder are dropped: otherwise old failures would be reported as new."""
    earlier = {"part": "waits", "case": "of another day", "state": "failed", "what": ""}
    (tmp_path / "gpu.jsonl").write_text(json.dumps(earlier) + "\n")
    for name in ("trace_fshard.json.gz", "gpu.py"):
        (tmp_path / name).touch()
    args = f"--parts waits --out {tmp_path}"
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS={args}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(tmp_path)
    assert (row["part"], row["state"]) == ("waits", "skipped")
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.jsonl", "gpu.md", "gpu.log", "gpu.py"}  # files of others


LIKE_CUDA = """
import torch, torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from gpu_cases import alternatives, trained
from fshard.testing import simulate

class Norms(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.layer_norm:
            x, weight = args[0], kwargs["weight"]
            assert x.dtype == weight.dtype, f"expected scalar type {x.dtype} but found {weight.dtype}"
            seen.append(x.dtype)
        return func(*args, **(kwargs or {}))

def job(mesh, kind):
    with Norms():
        trained(mesh, steps=1, **kind)

for name, kind in alternatives():
    if name.startswith("step"):
        seen = []
        simulate(lambda mesh: job(mesh, kind), shard=1)
        assert seen, name
        print(name, *{str(dtype) for dtype in seen})
"""


def test_cases_have_no_norm_of_two_dtypes():
    """A case of `make gpu` would fail on GPUs, where layer_norm refuses activations and weights of two dtypes."""
    done = ran("-c", LIKE_CUDA)
    assert done.returncode == 0, done.stderr
    assert "step bf16 torch.bfloat16" in done.stdout
    assert "step together torch.float32" in done.stdout


DRAWS = """
import torch, gpu_cases
from torch.utils._python_dispatch import TorchDispatchMode

class Draws(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if kwargs and kwargs.get("generator") is not None:
            assert kwargs["device"].type == kwargs["generator"].device.type, f"a {kwargs['device']} generator"
        return func(*args, **(kwargs or {}))

gpu_cases.DEVICE = torch.device("meta")
torch.set_default_device(gpu_cases.DEVICE)
with Draws():
    gpu_cases.params(), gpu_cases.batch(0)
"""


def test_cases_draw_on_the_cpu():
    """The case of `make gpu` with a default device would fail on GPUs, which take generators of their own alone."""
    done = ran("-c", DRAWS)
    assert done.returncode == 0, done.stderr


def test_faults_for_the_checks_without_a_gpu_can_be_made():
    """A fault whose text is gone would be no fault, and what finds it would not be checked."""
    texts = {fault.name: (ROOT / "fshard" / fault.file).read_text().count(fault.old) for fault in faults.FAULTS}
    assert {name: number for name, number in texts.items() if number != 1} == {}
