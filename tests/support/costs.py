"""What a call costs the host: bytecodes, and the items that lists and structures of trees are searched for."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import optree

# Methods that go through the whole container in C, where no bytecode is seen.
_SCANS: dict[type, set[str]] = {list: {"index", "count", "remove", "copy"}, tuple: {"index", "count"}}
_SIMULATION = os.path.join("fshard", "testing")
_STRUCTURE = {"children", "entries", "paths", "accessors", "flatten_up_to", "unflatten"}


def _scanned(function: Any) -> int:
    """The number of items that a function written in C goes through, as far as that is known."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, optree.PyTreeSpec):
        size = owner.num_children if name in ("children", "entries") else owner.num_leaves
        return size * (name in _STRUCTURE)
    return len(owner) if owner is not None and name in _SCANS.get(type(owner), ()) else 0


def cost(fn: Callable[[], object]) -> int:
    """The number of bytecodes that a call runs in this thread, and of items that are scanned in C.

    The same for every run of a function that does the same. What simulates ranks (`fshard/testing`) is not counted.
    """
    total = 0

    def traced(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal total
        if _SIMULATION in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return traced

    def profiled(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal total
        if event == "c_call":
            total += _scanned(arg)

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(traced)
    sys.setprofile(profiled)
    try:
        fn()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return total
