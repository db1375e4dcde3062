"""Names of units and collectives in the traces of torch.profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from .tracing import is_tracing

_NOTHING = nullcontext()


def named(what: str, label: str) -> AbstractContextManager[object]:
    """A block that a running profiler shows as `fshard.<what> <label>`; nothing is recorded in graphs.

    >>> with named("all_gather", "blocks.0"):
    ...     pass
    """
    # `_is_profiler_enabled` is private: a `record_function` takes 2 us where no profiler runs, and there is no public
    # way to ask (test_profiling.py notices when it goes)
    if not profiler._is_profiler_enabled or is_tracing():
        return _NOTHING
    return profiler.record_function(f"fshard.{what} {label}".rstrip())
