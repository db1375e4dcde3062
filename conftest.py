"""Names the examples in docstrings may use; which cases of slow tests are run."""

import gc
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import is_hypothesis_test

import fshard

SEED = "FSHARD_SEED"  # which of the cases are drawn; workers of pytest-xdist inherit it
# By the name of its entry point: where that is installed as well, pytest sees that it has it.
pytest_plugins = ["pytester", "pytest_fshard", "costs"]


def shard_of(params: Any) -> fshard.Sharded:
    """A tree on one device, sharded."""
    return fshard.shard_params(params, fshard.make_plan(params))


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    for module in (fshard.collectives, fshard.optim, fshard):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(torch=torch, shard_of=shard_of)


def pytest_configure(config: pytest.Config) -> None:
    """The marks of slow tests; one thread in every test, whatever the machine has, as in simulated ranks and processes.

    The bits of an operator depend on the number, and tests compare bits.
    """
    torch.set_num_threads(1)
    os.environ.setdefault(SEED, "0")
    config.addinivalue_line("markers", "sample(n): a test of many cases, of which 1/n are drawn (CONTRIBUTING.md)")
    config.addinivalue_line("markers", "slow: a test that CI alone runs (CONTRIBUTING.md)")


SEEDS = 14  # one after the other, with which CI runs every case


def _numbers(cases: Sequence[pytest.Item]) -> tuple[int, int]:
    """How many cases of one test `make test` runs, and how many CI."""
    mark, number = cases[0].get_closest_marker("sample"), len(cases)
    of_test = 0 if cases[0].get_closest_marker("slow") else -(-number // mark.args[0]) if mark else number
    return of_test, min(number, max(of_test + 1, -(-number // SEEDS)))


def _drawn(name: str, cases: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """So many cases, in an order of the test's own: each seed begins where the one before has ended."""
    order, seed = random.Random(name).sample(cases, len(cases)), int(os.environ[SEED])
    return [order[(seed * number + i) % len(cases)] for i in range(min(number, len(cases)))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` without a GPU; draw the cases of tests marked `sample(n)` and `slow`.

    With FSHARD_CI=1 the choice is CI's. All cases if asked for by name, or with FSHARD_ALL=1. With FSHARD_MOST=n choose
    n cases of each test, marked or not, and cases that are asked for by name.
    """
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    most, asked = os.environ.get("FSHARD_MOST"), {arg for arg in config.args if "::" in arg}
    if os.environ.get("FSHARD_ALL") or config.option.keyword or (asked and not most):
        return
    tests = dict[tuple[str, bool], list[pytest.Item]]()
    for item in items:
        tests.setdefault((item.nodeid.split("[")[0], bool(item.get_closest_marker("slow"))), []).append(item)
    chosen = {item for item in items if item.nodeid in asked}
    for (name, _), cases in tests.items():
        of_test, of_ci = _numbers(cases)
        drawn = _drawn(name, cases, int(most) if most else of_ci)
        for item in drawn[:of_test]:
            draws_more = "FSHARD_CI" in os.environ and is_hypothesis_test(getattr(item, "obj", None))
            item.user_properties.append(("in make test", not (most or draws_more)))
        chosen |= {*(drawn if most or os.environ.get("FSHARD_CI") else drawn[:of_test])}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how the same cases are chosen again."""
    terminalreporter.write_line(f"{SEED}={os.environ[SEED]}")


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what was imported and collected: that takes most of its time."""
    gc.freeze()
