"""Whether operators are being traced, and how fshard defines operators of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_tracing() -> bool:
    """Whether operators are being recorded (or run on fake tensors) instead of run."""
    if torch.compiler.is_dynamo_compiling():  # it records Python, and cannot ask
        return False
    # Private: there is no public way to ask (test_jit.py notices when it goes).
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_LIBRARY = torch.library.Library("fshard", "DEF")


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """An operator: what it runs, and what gives tensors of the right shapes without running it."""
    # two calls with the same arguments are not one: no compiler may join them, or run them beforehand. And none may
    # bring an argument into another layout: it would do so for each node, and `wait` would keep a copy of what is sent.
    _LIBRARY.define(schema, tags=[torch.Tag.nondeterministic_seeded, torch.Tag.flexible_layout])
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)
