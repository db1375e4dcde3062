"""Functions given to commands by import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any


def function(option: str, name: str, what: str, num_args: int) -> Callable[..., Any]:
    """Return the function `module:function`. Raises ValueError unless it exists and takes `num_args` arguments."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # for a console script, sys.path has the script's folder, not the working folder
        sys.path.insert(0, os.getcwd())
    try:
        imported = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as failure:
        raise ValueError(f"{option} {name}: expected MODULE:FUNCTION that can be imported: {failure}") from failure
    try:
        inspect.signature(imported).bind(*[None] * num_args)
    except TypeError as failure:
        raise ValueError(f"{option} {name}: expected a function {what}: {failure}") from failure
    return imported
