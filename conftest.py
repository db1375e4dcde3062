"""Names the examples in docstrings may use; threads, GPUs and garbage of tests."""

import gc
from typing import Any

import pytest
import torch

import fshard

# By the name of its entry point: where that is installed as well, pytest sees that it has it.
pytest_plugins = ["pytester", "pytest_fshard", "drawn", "costs"]


def shard_of(params: Any) -> fshard.Sharded:
    """A tree on one device, sharded."""
    return fshard.shard_params(params, fshard.make_plan(params))


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    for module in (fshard.collectives, fshard.optim, fshard):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(torch=torch, shard_of=shard_of)


def pytest_configure() -> None:
    """One thread in every test, whatever the machine has, as in simulated ranks and processes.

    The bits of an operator depend on the number, and tests compare bits.
    """
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` without a GPU."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Let no later collection of garbage look at what was imported and collected: that takes most of its time."""
    gc.freeze()
