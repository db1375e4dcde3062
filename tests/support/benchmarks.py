"""A fixture for tests that import modules of `benchmarks/`."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of `benchmarks/` can be imported, and are forgotten afterwards: their names are plain words."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(BENCHMARKS)
    with warnings.catch_warnings(action="ignore"):  # torch.distributed.optim uses what torch deprecates
        import torch.distributed.optim  # noqa: F401
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(BENCHMARKS):
            del sys.modules[name]
