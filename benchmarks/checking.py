"""The cost of `fshard.check` and `fshard.guard`: the same step without and with them, in turn, on two gloo ranks.

make bench-checking
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from two_messages import compare, started

import fshard


def systems(name: str, shared: bool) -> dict[str, Callable[[], object]]:
    """A step of model `name`, also checked, and guarded each time or never."""
    step, state, batch = started(name, shared)
    ways: dict[str, Callable[..., tuple[fshard.TrainState, dict[str, Any]]]] = {
        "plain": step,
        "checked": fshard.check(step),
        "guard, all steps": fshard.guard(step, every=1),
        "guard, no step": fshard.guard(step, every=1 << 40),
        "guard, at rest": fshard.guard(step, every=1 << 40, at_rest=True),
    }
    states = dict.fromkeys(ways, state)

    def run(way: str) -> None:
        states[way], _ = ways[way](states[way], batch)

    return {way: partial(run, way) for way in ways}


if __name__ == "__main__":
    compare(__file__, systems, "plain")
