"""The benchmarks run, and what they compare computes the same."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worlds import simulated

pytestmark = pytest.mark.usefixtures("one_thread")


def losses(mesh: Any, modules: Any) -> list[torch.Tensor]:
    """The loss of every system for the whole batch: the ranks have the same tokens."""
    systems = [make for name, make in modules.ALL.items() if name != "FSDP2"]  # it takes processes
    batch = modules.batch_of("tiny", 0)
    passes = [make("tiny", mesh, step) for make in systems for step in (False, True)]
    return [run(batch) for run in passes]


def test_modules(monkeypatch):
    """Systems of `make bench-modules` that compute different losses, or fail, would make its ratios meaningless."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    import modules

    try:
        for rank in simulated(losses, modules, shard=2):
            torch.testing.assert_close(torch.stack(rank), rank[0].expand(len(rank)))
    finally:
        for name in ("modules", "timing", "vs_torch", "models"):
            sys.modules.pop(name, None)
