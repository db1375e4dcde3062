"""The cost of `fshard.elastic.keep`: its processor time by that of a step, in turn, on two gloo ranks.

make bench-keeping
"""

from __future__ import annotations

import time
from collections.abc import Callable

from two_messages import compare, started

from fshard import elastic


def systems(name: str, shared: bool) -> dict[str, Callable[[], object]]:
    """A step of model `name`, and its state kept in new memory or in that of the state before the last."""
    step, state, batch = started(name, shared)
    held = list[elastic.Kept]()

    def run() -> None:
        nonlocal state
        state, _ = step(state, batch)

    def keep_again() -> None:
        held.append(elastic.keep(state, 1, reuse=held.pop(0) if len(held) > 1 else None))

    return {"step": run, "keep": lambda: elastic.keep(state, 1), "keep, memory reused": keep_again}


if __name__ == "__main__":
    compare(__file__, systems, "step", clock=time.process_time)
