"""Whether operators are being traced, and how fshard defines operators of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Operator: TypeAlias = Any  # an operator as dispatch modes and graphs see it: its class is private to torch


def is_tracing() -> bool:
    """Whether operators are being traced with fake tensors instead of being run."""
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace the question below
        return False
    # Private: there is no public way to ask (test_jit.py notices when it goes).
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_LIBRARY = torch.library.Library("fshard", "DEF")


def define(schema: str, run: Callable[..., object], shapes: Callable[..., object]) -> None:
    """Define the operator `torch.ops.fshard.<name>`: `run` implements it, `shapes` returns fake results.

    The tags tell compilers not to merge two calls with equal arguments, not to run a call while compiling, and not to
    change the layout of an argument: they would copy it for each node, and `wait` would keep a copy of what is sent.
    """
    _LIBRARY.define(schema, tags=[torch.Tag.nondeterministic_seeded, torch.Tag.flexible_layout])
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fshard::{name}", shapes, lib=_LIBRARY)
