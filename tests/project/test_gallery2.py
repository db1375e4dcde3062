"""Each example of docs/examples.md prints what it is to show: on simulated ranks, and the same text in processes."""

import importlib.util
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
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


def main(mesh: Any, name: str, steps: int | None = None) -> None:
    """An example on a rank, with fewer steps than its own if so many are given."""
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # torch's first use of jvp warns
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)  # a copy: its STEPS may be set
    spec.loader.exec_module(example)
    example.STEPS = steps or example.STEPS
    example.main(mesh)


def printed(name: str, steps: int | None = None) -> str:
    """What an example prints on two simulated ranks."""
    with redirect_stdout(StringIO()) as text:
        simulated(main, name, steps)
    return text.getvalue()


def printed_by_a_process(mesh: Any, name: str, steps: int) -> str:
    """What an example prints in this process, a rank."""
    with redirect_stdout(StringIO()) as text:
        main(mesh, name, steps)
    return text.getvalue()


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in EXAMPLES])
def test_an_example_on_simulated_ranks(name):
    """The example would fail, or not show what its page says."""
    text = printed(name)
    assert EXAMPLES[name](text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_in_processes(name):
    """The example would have other results under torchrun, or each rank would print them. Ten steps show it."""
    first, *others = gloo(printed_by_a_process, name, 10)
    assert first == printed(name, 10)
    assert not any(others)
