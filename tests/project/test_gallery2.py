"""Each example of docs/examples.md prints what it is to show: on simulated ranks, and the same text in processes."""

import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from support.worlds import gloo, simulated


def number(printed: str, words: str) -> float:
    """The number that follows some words in what was printed."""
    return float(re.findall(rf"{words} (-?[\d.]+(?:e[-+]\d+)?)", printed)[0].rstrip("."))


# what must hold of what an example prints
EXAMPLES: dict[str, Callable[[str], bool]] = {
    "meanflow": lambda text: number(text, "after") < 0.1 < number(text, "velocity:") < number(text, "before"),
    "pinn": lambda text: number(text, "after") < 0.02 < 1 < number(text, "before"),
    "maml": lambda text: number(text, "five") < number(text, "one step") < number(text, "adaptation") / 2,
    "dpo": lambda text: number(text, "before") < 0.6 < 0.95 < number(text, "after") and number(text, "change:") < 1e-4,
    "gan": lambda text: number(text, "after") < 0.5 < 2 < number(text, "before"),
    "diffusion": lambda text: number(text, "average") < 0.01 and number(text, "average") < number(text, "parameters"),
}
SLOW: set[str] = {"meanflow", "dpo", "gan"}  # over four seconds


def main(mesh: Any, name: str, folder: Path) -> None:
    """An example on a rank; one that writes files takes the folder as `out`."""
    example = importlib.import_module(name)
    options = {"out": folder} if "out" in inspect.signature(example.main).parameters else {}
    example.main(mesh, **options)


def printed(name: str, folder: Path) -> str:
    """What an example prints on two simulated ranks."""
    with redirect_stdout(StringIO()) as text:
        simulated(main, name, folder)
    return text.getvalue()


def printed_by_a_process(mesh: Any, name: str, folder: Path) -> str:
    """What an example prints in this process, a rank."""
    with redirect_stdout(StringIO()) as text:
        main(mesh, name, folder)
    return text.getvalue()


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in EXAMPLES])
def test_an_example_on_simulated_ranks(name, tmp_path):
    """The example would fail, or not show what its page says."""
    text = printed(name, tmp_path)
    assert EXAMPLES[name](text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_processes(name, tmp_path):
    """The example would have other results under torchrun, or each rank would print them."""
    first, *others = gloo(printed_by_a_process, name, tmp_path / "processes")
    assert first == printed(name, tmp_path / "simulated")
    assert not any(others)
