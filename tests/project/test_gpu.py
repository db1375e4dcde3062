"""`make gpu` on a machine without a GPU: every part that can run does, and the other parts say why they do not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
STATES = {"tests": "skipped", "reads": "skipped", "overlap": "skipped", "speed": "measured"}  # the other parts: right


def ran(*command: str) -> Any:
    """Run a Python command in the benchmarks' folder."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT / "benchmarks",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
@pytest.mark.parametrize(
    "part", ["reads", "tests", "overlap", "crashes", "bits", "late", "collectives", "nccl", "speed"]
)
@pytest.mark.slow
def test_dry_run(part, tmp_path):
    """Every part runs or is skipped with a reason, and is in the JSON: otherwise its first run on a GPU would fail."""
    done = ran("gpu.py", "--parts", part, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())
    calls = [row["what"] for row in rows if row["case"] == "calls of the backend" and row["state"] == "measured"]
    assert len(calls) == (part == "collectives")
    states = {(row["part"], row["state"]) for row in rows if row["what"] not in calls}
    assert states == {(part, STATES.get(part, "right"))}
    assert all(row["what"].startswith("no GPU") for row in rows if row["state"] == "skipped")
    assert f"| {part} |" in (tmp_path / "gpu.md").read_text()


SILENT = """
import gpu_parts, gpu_primitives, sys
one_rank, sys.argv = gpu_parts.of_one_rank, ["", "collectives", sys.argv[1]]

def silent(rows, ranks, calls):
    ranks.built_in = None
    one_rank(rows, ranks, calls)

gpu_parts.of_one_rank = silent
gpu_parts.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_a_run_without_a_collective_of_the_backend_fails(tmp_path):
    """If no collective of NCCL ran, nothing would say so: on one rank fshard sends nothing."""
    assert ran("-c", SILENT, str(tmp_path / "rows")).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    (last,) = (row for row in rows if row["case"] == "calls of the backend")
    assert (last["state"], last["what"]) == ("failed", "0 calls")
    assert {row["what"] for row in rows if row["state"] == "failed"} == {"0 calls", "no call of the backend for [6]"}


@pytest.mark.slow
def test_what_dies_is_a_row(tmp_path):
    """A part that dies is a row of the results, and the command fails: otherwise a crash would pass for success."""
    done = ran("-c", "import gpu; gpu.PARTS = {'nothing': 60}; gpu.main()", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "1 case(s) failed" in done.stderr
    (row,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (row["state"], row["what"]) == ("failed", "ended with 1: KeyError: 'nothing'")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu")
def test_a_folder_of_an_earlier_run(tmp_path):
    """Rows of an earlier run in the same folder are dropped: otherwise old failures would be reported as new."""
    earlier = {"part": "overlap", "case": "of another day", "state": "failed", "what": ""}
    (tmp_path / "overlap.json").write_text(json.dumps(earlier) + "\n")
    args = f"--parts overlap --out {tmp_path}"
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS={args}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "gpu.json").read_text())
    assert (row["part"], row["state"]) == ("overlap", "skipped")


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_cases_draw_on_the_cpu():
    """The case of `make gpu` with a default device would fail on GPUs, which take generators of their own alone."""
    done = ran("-c", DRAWS)
    assert done.returncode == 0, done.stderr
