"""How many examples Hypothesis draws: so many fixed ones, or FSHARD_EXAMPLES others at each run."""

import os
from typing import Any

from hypothesis import HealthCheck, settings

FEWER = 6  # times fewer in `make test`
EXAMPLES = int(os.environ.get("FSHARD_EXAMPLES", "0"))
IN_FULL = any(name in os.environ for name in ("FSHARD_CI", "FSHARD_ALL"))


def examples(number: int) -> Any:
    """So many fixed examples in CI and a sixth in `make test`, or as many as asked for, others at each run."""
    return settings(
        max_examples=EXAMPLES or (number if IN_FULL else -(-number // FEWER)),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
