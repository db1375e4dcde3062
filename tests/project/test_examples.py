"""The examples with modules run: simulated and in processes alike, and with FSDP2 and fshard alike."""

import difflib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import warnings
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.worlds import gloo, simulated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "from_fsdp.md"


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torchrun(name: str, *args: str) -> str:
    """What an example prints that torchrun starts on two ranks."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"examples/{name}.py", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- fine-tuning ---

LOSS = r"(\w+): loss ([\d.]+) -> ([\d.]+), and it writes"


def fine_tune(mesh: Any, out: Path, model: Path | None) -> None:
    """The example on a rank, in few steps."""
    example("finetune_hf").run(mesh, Namespace(out=out, model=model, steps=4))


@pytest.mark.parametrize("start", ["gloo", "torchrun"])
def test_fine_tuning_is_the_same_simulated_and_in_processes(start, tmp_path, capsys):
    """The example would fail, not learn, or have other results in processes, or from a base it reads."""
    simulated(fine_tune, tmp_path / "simulated", None)
    printed = re.findall(LOSS, capsys.readouterr().out)
    losses = {name: (float(first), float(last)) for name, first, last in printed}
    assert all(last < 0.95 * first for first, last in losses.values())
    assert losses["tuned"][0] < 0.95 * losses["base"][0], "what the base has learned helps"

    if start == "gloo":
        gloo(fine_tune, tmp_path / "processes", tmp_path / "simulated" / "base")
    else:
        assert re.findall(LOSS, torchrun("finetune_hf", "--steps=4", f"--out={tmp_path / 'processes'}")) == printed
    files = [tmp_path / way / "tuned" / "model.safetensors" for way in ("simulated", "processes")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (tmp_path / "simulated" / "base" / "model.safetensors").read_bytes()


# --- an FSDP2 script and its port ---


# dtypes of parameters, computation and reduction, and how near the results are
DTYPES = {
    "double": (torch.float64, torch.float64, torch.float64, 1e-12),
    "mixed": (torch.float32, torch.bfloat16, torch.float32, 1e-3),
}


def both(mesh: Any) -> dict[str, Any]:
    """What the two scripts of the page compute on a rank, from which weights."""
    port, results = example("port_fsdp2"), dict[str, Any]()
    for name, (dtype, compute, reduce, _) in DTYPES.items():
        torch.set_default_dtype(dtype)
        torch.manual_seed(0)
        weights, data = port.Model().state_dict(), port.batches(mesh.get_rank(), dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that random numbers of DTensors on the CPU are incomplete
            old = port.with_fsdp2(mesh, dict(weights), data, compute, reduce)  # torch puts DTensors into the dict
        results[name] = old, port.with_fshard(mesh, weights, data, compute, reduce), weights
    return results


def _agree(losses: list[float], old_losses: list[float], tolerance: float) -> None:
    assert losses == pytest.approx(old_losses, rel=tolerance)
    assert losses[-2] < 0.9 * losses[0]


@pytest.mark.parametrize("start", ["gloo", "torchrun"])
def test_the_script_of_fsdp2_and_its_port_agree(start):
    """The script of FSDP2 and its port would have other losses, or other weights."""
    if start == "torchrun":
        old_losses, losses = (
            [float(x) for x in line.split()[1:]] for line in torchrun("port_fsdp2").splitlines() if "with_" in line
        )
        return _agree(losses, old_losses, DTYPES["mixed"][-1])
    ranks = gloo(both)
    for name, (*_, tolerance) in DTYPES.items():
        for (old_losses, _), (losses, _), _ in (results[name] for results in ranks):
            _agree(losses, old_losses, tolerance)
        (_, old), (_, new), weights = ranks[0][name]
        assert old.keys() == new.keys() == weights.keys()
        for path, x in old.items():
            assert torch.allclose(new[path], x, rtol=tolerance, atol=tolerance), path
        assert not ranks[1][name][0][1]
        assert not ranks[1][name][1][1], "the state dict is for rank 0"


def training(source: str, name: str) -> list[str]:
    """The lines of a function of the example from its first comment on, without annotations."""
    body = source.split(f"def {name}(")[1].split("\n    # ", 1)[1].split("\n    return losses")[0]
    return textwrap.dedent(re.sub(r": Any| -> Any", "", f"    # {body}")).splitlines()


def port() -> str:
    """The example as a diff: comments are in both functions, and begin its parts."""
    source = (ROOT / "examples" / "port_fsdp2.py").read_text()
    old, new = (training(source, name) for name in ("with_fsdp2", "with_fshard"))
    lines: list[str] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(lambda line: not line.startswith("#"), old, new).get_opcodes():
        lines += [f"  {x}" for x in old[a:b]] if tag == "equal" else [f"- {x}" for x in old[a:b]]
        lines += [] if tag == "equal" else [f"+ {x}" for x in new[c:d]]
    return "\n".join(line.rstrip() for line in lines if line.strip(" +-"))


BLOCK = r"(?ms)^```diff\n(  # a model without memory\n.*?)\n```$"


def test_the_page_shows_the_example():
    """The page would show other lines than those that were compared."""
    again = "run: PYTHONPATH=tests python tests/project/test_examples.py"
    assert re.findall(BLOCK, PAGE.read_text()) == [port()], again
    assert max(map(len, port().splitlines())) <= 88


if __name__ == "__main__":
    PAGE.write_text(re.sub(BLOCK, lambda _: f"```diff\n{port()}\n```", PAGE.read_text()))
