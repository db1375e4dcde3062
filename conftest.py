"""Names the examples in docstrings may use; which cases of slow tests are run."""

import gc
import os
from collections import Counter
from typing import Any

import pytest
import torch

import fshard

# By the name of its entry point: where that is installed as well, pytest sees that it has it.
pytest_plugins = ["pytester", "pytest_fshard"]


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
    config.addinivalue_line("markers", "sample(n): a slow test, of which one case in n is run (CONTRIBUTING.md)")
    config.addinivalue_line("markers", "slow: a test that CI alone runs (CONTRIBUTING.md)")


MOST_OF_REST = 1  # case of a test: some have hundreds, and CI has half an hour


def _evenly(items: list[pytest.Item], limit: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """At most `limit` cases of each test, evenly chosen, and the other cases."""
    totals, seen = Counter(item.nodeid.split("[")[0] for item in items), Counter[str]()
    chosen, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        name = item.nodeid.split("[")[0]
        number, most, total = seen[name], min(limit, totals[name]), totals[name]
        seen[name] += 1
        (chosen if (number + 1) * most // total > number * most // total else others).append(item)
    return chosen, others


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` without a GPU; of tests marked `sample(n)` keep one case in n, and none marked `slow`.

    With FSHARD_CI=1 keep others, too, at most `MOST_OF_REST` of one test, evenly chosen, and with FSHARD_REST=1 those
    alone; all if asked for by name, or with FSHARD_ALL=1. With FSHARD_MOST=n keep n cases of each test, marked or not,
    and cases that are asked for by name.
    """
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if most := os.environ.get("FSHARD_MOST"):
        asked = {arg for arg in config.args if arg.endswith("]")}
        _keep(config, items, _evenly([item for item in items if item.nodeid not in asked], int(most))[1])
        return
    if os.environ.get("FSHARD_ALL") or any("::" in arg for arg in config.args) or config.option.keyword:
        return
    counts = Counter[str]()
    sampled, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        mark = item.get_closest_marker("sample")
        name = item.nodeid.split("[")[0]
        in_sample = not item.get_closest_marker("slow") and (mark is None or counts[name] % mark.args[0] == 0)
        counts[name] += 1
        (sampled if in_sample else others).append(item)
    rest, left_out = _evenly(others, MOST_OF_REST)
    if os.environ.get("FSHARD_REST"):
        left_out += sampled
    elif not os.environ.get("FSHARD_CI"):
        left_out += rest
    _keep(config, items, left_out)


def _keep(config: pytest.Config, items: list[pytest.Item], left_out: list[pytest.Item]) -> None:
    """Take what is left out from the items."""
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        left = set(left_out)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what was imported and collected: that takes most of its time."""
    gc.freeze()
