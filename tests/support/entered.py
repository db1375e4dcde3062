"""Which lines of the house a call runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fshard

HOUSE = Path(fshard.__file__).parent

Line = tuple[str, int]  # of a file


def entered(fn: Callable[[], object], within: str = "") -> list[set[Line]]:
    """The lines of the house that a call runs; with `within`, those of each call in it of a function of that name."""
    calls, depth = list[set[Line]](), 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal depth
        path = Path(frame.f_code.co_filename)
        if HOUSE not in path.parents:
            return None
        if frame.f_code.co_qualname.startswith(within) and event in ("call", "return"):
            depth += 1 if event == "call" else -1
            if event == "call" and depth == 1:
                calls.append(set())
        if event == "line" and depth:
            calls[-1].add((str(path.relative_to(HOUSE)), frame.f_lineno))
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        fn()
    finally:
        sys.settrace(before)
    return calls
