"""Each example of docs/examples.md prints what it is to show: on simulated ranks, and the same text in processes."""

import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import elastic
import fits
import hypergradient
import pytest
import torch
from support.worlds import gloo, simulated

import fshard


def number(printed: str, words: str) -> float:
    """The number that follows some words in what was printed."""
    return float(re.findall(rf"{words} (-?[\d.]+(?:e[-+]\d+)?)", printed)[0].rstrip("."))


# what must hold of what an example prints
EXAMPLES: dict[str, Callable[[str], bool]] = {
    "classifier": lambda text: number(text, "of the average") > 0.95,
    "lora": lambda text: number(text, "->") < 0.1 < number(text, "of the parameters") < 0.2 and "036925814703" in text,
    "resume": lambda text: "10 of 10 losses have the bits" in text,
    "meanflow": lambda text: number(text, "after") < 0.1 < number(text, "velocity:") < number(text, "before"),
    "pinn": lambda text: number(text, "after") < 0.02 < 1 < number(text, "before"),
    "maml": lambda text: number(text, "five") < number(text, "one step") < number(text, "adaptation") / 2,
    "dpo": lambda text: number(text, "before") < 0.6 < 0.95 < number(text, "after") and number(text, "change:") < 1e-4,
    "gan": lambda text: number(text, "after") < 0.5 < 2 < number(text, "before"),
    "nodes": lambda text: number(text, "before") < 0.6 < 0.98 < number(text, "after") and "blocks.2" in text,
    "ensemble": lambda text: (
        number(text, "of all") < number(text, "a member") < 0.03
        and number(text, "far from it") > 5 * number(text, "data")
    ),
    "hypergradient": lambda text: (
        number(text, "after") < number(text, "before") / 50
        and number(text, "wrong rows") < number(text, "right rows") / 4
    ),
    "diffusion": lambda text: number(text, "average") < 0.01 and number(text, "average") < number(text, "parameters"),
}
FEW = 10  # steps, in which processes show that they print the same


def main(mesh: Any, name: str, folder: Path) -> None:
    """An example on a rank; one that writes files takes the folder as `out`."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's first use of jvp warns
    example = importlib.import_module(name)
    options = {"out": folder} if "out" in inspect.signature(example.main).parameters else {}
    example.main(mesh, **options)


def printed(name: str, folder: Path) -> str:
    """What an example prints on two simulated ranks."""
    with redirect_stdout(StringIO()) as text:
        simulated(main, name, folder)
    return text.getvalue()


def printed_by_a_process(mesh: Any, name: str, folder: Path) -> str:
    """What an example prints in this process, a rank, after few steps."""
    vars(importlib.import_module(name))["STEPS"] = FEW
    with redirect_stdout(StringIO()) as text:
        main(mesh, name, folder)
    return text.getvalue()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_on_simulated_ranks(name, tmp_path):
    """The example would fail, or not show what its page says."""
    text = printed(name, tmp_path)
    assert EXAMPLES[name](text), text


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "resume"])  # which has a test of its own
def test_an_example_in_processes(name, tmp_path, monkeypatch):
    """The example would have other results under torchrun, or each rank would print them."""
    first, *others = gloo(printed_by_a_process, name, tmp_path / "processes")
    monkeypatch.setattr(importlib.import_module(name), "STEPS", FEW, raising=False)  # an example may have other names
    assert first == printed(name, tmp_path / "simulated")
    assert not any(others)


def test_a_run_goes_on_with_other_ranks_and_in_processes(tmp_path):
    """A run would have other losses after it was stopped, on fewer ranks, or in processes."""
    simulated_ranks = partial(simulated, main, "resume", tmp_path)
    with redirect_stdout(StringIO()) as text:
        simulated_ranks(shard=4)
        simulated_ranks(shard=1)
    assert "20 of 20 losses have the bits" in text.getvalue()
    first, _ = gloo(printed_by_a_process, "resume", tmp_path)
    assert "steps 21 to 30: ranks 2" in first
    assert "30 of 30 losses have the bits" in first


def test_a_run_of_many_rounds():
    """The two processes that are left would not go on, or would not let the third in."""
    command = [sys.executable, str(Path(elastic.__file__))]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    rounds = ["round 1: 3 ranks from step 0", "round 2: 2 ranks from step 8", "round 3: 3 ranks from step 15"]
    assert text.splitlines()[:3] == rounds, text
    assert number(text, "loss") < 4
    assert "exit codes: [-9, 0, 0, 0]" in text


def test_figures_of_many_layers_follow_from_those_of_few():
    """`fits.py` would print other bytes than a step of the whole model has."""
    assert fits.continued("FULL_SHARD", 6) == fits.traced("FULL_SHARD", 6)


def test_whether_a_model_fits():
    """`fits.py` would fail, or not print its table."""
    with redirect_stdout(StringIO()) as text:
        fits.main()
    answers = {row.split()[1]: row.split()[-4] for row in text.getvalue().splitlines() if "yes" in row or "no" in row}
    assert answers == {"DDP": "no", "ZeRO-1": "yes", "FULL_SHARD": "yes"}, text.getvalue()


def test_a_hypergradient_is_that_of_plain_torch():
    """The gradient through ten steps of an optimizer would lack a term."""
    torch.manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64)
    training, clean = ({"x": draw(rows, 5), "y": draw(rows)} for rows in (96, 13))
    params = {"weights": draw(96), "log_lr": draw(()) - 3}

    def on_a_rank(mesh: Any) -> Any:
        rows = {name: x.tensor_split([4])[mesh.get_rank()] for name, x in clean.items()}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        return fshard.gather_params(fshard.value_and_grad(hypergradient.loss)(sharded, rows, training)[1])

    weights, log_lr = leaves = [x.requires_grad_() for x in params.values()]
    model, momentum = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for _ in range(10):  # the gradient of the weighted squares, by hand
        errors = training["x"] @ model - training["y"]
        slope = 2 * training["x"].T @ (torch.nn.functional.softplus(weights) * errors) / 96
        momentum = 0.5 * momentum + slope
        model = model - log_lr.exp() * momentum
    expected = torch.autograd.grad((clean["x"] @ model - clean["y"]).square().mean(), leaves)
    for found in simulated(on_a_rank):
        for x, y in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)
