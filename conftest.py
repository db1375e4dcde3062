"""Names the examples in docstrings may use."""

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
    for module in (fshard.optim, fshard):
        doctest_namespace.update({name: getattr(module, name) for name in module.__all__})
    doctest_namespace.update(torch=torch, shard_of=shard_of)
