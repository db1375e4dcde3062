"""Names the examples in docstrings may use."""

from typing import Any

import pytest
import torch

import fshard


def shard_of(params: Any) -> fshard.Sharded:
    """A tree on one device, sharded."""
    return fshard.shard_params(params, fshard.make_plan(params))


@pytest.fixture(autouse=True)
def _names_in_docstrings(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update({name: getattr(fshard, name) for name in fshard.__all__}, torch=torch, shard_of=shard_of)
