"""Which cases of tests a run draws, by what a case takes and by a seed: a pytest plugin (CONTRIBUTING.md)."""

import json
import math
import os
import random
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import is_hypothesis_test
from support.examples import FEWER

T = TypeVar("T")

SEED = "FSHARD_SEED"  # workers of pytest-xdist inherit it
SEEDS = 14  # one after the other, with which CI runs every case
BUDGET, CI_BUDGET = 0.15, 1.0  # processor seconds of a function, all its cases together, on average of all seeds
LAW = 10  # times as many seconds for a law
LONGEST = 2.0  # seconds of a case that `make test` may draw
IN_TEST, CASES = "in make test", "cases"  # properties of a case: whether `make test` runs it; of how many it is one
TABLE = Path(__file__).parents[1] / "tests" / "costs.json"


def read(table: Path) -> dict[str, float]:
    """Processor seconds of a case of each function from which `make test` draws."""
    costs: dict[str, float] = json.loads(table.read_text())
    return costs


COSTS = read(TABLE)


def function(name: str) -> str:
    """The test without its case."""
    return name.split("[")[0]


def draws_examples(item: pytest.Item) -> bool:
    """True if Hypothesis draws the examples of a test."""
    return is_hypothesis_test(getattr(item, "obj", None))


def is_law(item: pytest.Item) -> bool:
    """True if a test bears the mark, or draws its own examples."""
    return bool(item.get_closest_marker("law")) or draws_examples(item)


def rates(item: pytest.Item, number: int) -> tuple[float, float]:
    """How many of the cases of a test `make test` draws on average, and CI beside them."""
    more, seconds = LAW if is_law(item) else 1, COSTS.get(function(item.nodeid), 0.0)
    in_test = seconds / FEWER if draws_examples(item) else seconds
    of_test = 0.0 if in_test > LONGEST else more * BUDGET / in_test if in_test else number
    return of_test, max(number / SEEDS, more * CI_BUDGET / seconds if seconds else number)


def drawn(name: str, cases: Sequence[T], rate: float) -> list[T]:
    """So many cases on average, in an order of the test's own: each seed begins where the one before has ended."""
    draw, seed = random.Random(name), int(os.environ[SEED])
    order, begin = draw.sample(cases, len(cases)), draw.random()
    first, last = (math.floor(begin + x * min(rate, len(cases))) for x in (seed, seed + 1))
    return [order[i % len(cases)] for i in range(first, last)]


def ordered(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Laws first in each worker of pytest-xdist, which begins with as many neighbours as the others."""
    laws, others = [x for x in items if is_law(x)], [x for x in items if not is_law(x)]
    ends = [len(others) * i // workers for i in range(workers + 1)]
    return [x for i in range(workers) for x in (*laws[i::workers], *others[ends[i] : ends[i + 1]])]


def pytest_configure() -> None:
    """The seed of the day."""
    os.environ.setdefault(SEED, str(date.today().toordinal()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose `make test`'s cases, or with FSHARD_CI=1 CI's; all if asked for by name, or with FSHARD_ALL=1.

    With FSHARD_MOST=n choose n cases of each test, and cases that are asked for by name.
    """
    most, asked = os.environ.get("FSHARD_MOST"), {arg for arg in config.args if "::" in arg}
    if os.environ.get("FSHARD_ALL") or config.option.keyword or (asked and not most):
        return
    tests = dict[str, list[pytest.Item]]()
    for item in items:
        tests.setdefault(function(item.nodeid), []).append(item)
    chosen = {item for item in items if item.nodeid in asked}
    for name, cases in tests.items():
        of_test, of_ci = rates(cases[0], len(cases))
        of_seed = {*drawn(name, cases, int(most) if most else of_test)}
        chosen |= of_seed
        if os.environ.get("FSHARD_CI") and not most:
            chosen |= {*drawn(name, cases, of_ci)}
        for item in cases:
            item.user_properties += [(CASES, len(cases)), (IN_TEST, not most and item in of_seed)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = ordered([item for item in items if item in chosen], workers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how the same cases are chosen again."""
    terminalreporter.write_line(f"{SEED}={os.environ[SEED]}")
