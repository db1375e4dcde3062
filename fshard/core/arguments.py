"""Checks of arguments: TypeError for a type, ValueError for a value. Texts of errors, with the user's line."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeGuard

import torch
from torch import Tensor


def shown(value: object) -> str:
    """Return a value as text: short values in full, tensors by dtype and shape.

    >>> shown("a"), shown(torch.ones(2)), shown({})
    ("'a'", 'a torch.float32 tensor of shape (2,)', 'an object of type dict')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor) and type(value).__name__ in ("Tensor", "Parameter"):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple) and len(repr(value)) < 60:
        return repr(value)
    return f"an object of type {type(value).__name__}"


def wrong(name: str, value: object, expected: str, remedy: str = "") -> str:
    """Return the error sentence for an argument.

    >>> wrong("accumulate", 1.5, "a whole number, at least 1")
    'accumulate=1.5: expected a whole number, at least 1'
    """
    return f"{name}={shown(value)}: expected {expected}" + f". {remedy}" * bool(remedy)


def expect(name: str, value: object, is_right: object, expected: str, remedy: str = "") -> None:
    if not is_right:
        raise TypeError(wrong(name, value, expected, remedy))


def check_path(name: str, value: object, what: str = "the path of a folder") -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(wrong(name, value, what))
    if not os.fspath(value):
        raise ValueError(wrong(name, value, what, "The working directory is '.'"))
    return Path(value)


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        expect(name, value, isinstance(value, bool), "True or False")


def check_whole(
    name: str, value: object, least: int = 1, below: float = torch.inf, what: str = "a whole number"
) -> None:
    bound = f"at least {least}" if below == torch.inf else f"from {least} to {below - 1}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(wrong(name, value, f"{what}, {bound}"))
    if not least <= value < below:
        raise ValueError(wrong(name, value, f"{what}, {bound}"))


def is_number(value: object) -> TypeGuard[float]:
    """False for a bool; True for symbolic sizes of torch.compile."""
    return isinstance(value, int | float | torch.SymInt | torch.SymFloat) and not isinstance(value, bool)


def check_positive(name: str, value: object, tensors: bool = True) -> None:
    expected = "a number above 0" + " (or a 0-d tensor of one)" * tensors
    if tensors and isinstance(value, Tensor) and not value.dim():
        return
    if not is_number(value):
        raise TypeError(wrong(name, value, expected))
    if not value > 0:  # or NaN
        raise ValueError(wrong(name, value, expected))


def check_word(name: str, value: object, words: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in words:
        raise ValueError(wrong(name, value, f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}"))


def check_function(name: str, value: object, what: str, remedy: str = "") -> None:
    if hasattr(value, "named_parameters") or isinstance(value, type) or not callable(value):
        raise TypeError(wrong(name, value, f"{what}, a function", remedy))


def check_predicate(name: str, fn: Callable[..., object], expected: str) -> None:
    """TypeError unless `fn` takes two arguments, the first a path."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind("", None)
    except TypeError:
        raise TypeError(f"{name}: expected a function {expected}, got one of the arguments {signature}") from None


def check_has(name: str, value: object, methods: Sequence[str], what: str) -> None:
    if isinstance(value, type) or not all(hasattr(value, method) for method in methods):
        raise TypeError(wrong(name, value, f"{what} (with {', '.join(methods)})"))


# range [least, below) of each hyper-parameter, as in torch.optim
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["lr", "lr_decay", "weight_decay", "momentum", "alpha"], (0, torch.inf)),
    **dict.fromkeys(["eps", "eps[0]", "eps[1]", "initial_accumulator_value"], (0, torch.inf)),
    **dict.fromkeys(["b1", "b2"], (0, 1)),
    "factor": (-torch.inf, torch.inf),
    "beta2_decay": (-torch.inf, 1e-15),
    "d": (1, torch.inf),
}


def check_hyperparams(optimizer: str, rate: object = 0.0, **numbers: object) -> None:
    """Check numbers by `RANGES`. 0-d tensors, and a schedule as `rate`, pass unread."""
    for name, value in {"lr": rate, **numbers}.items():
        if name not in RANGES:
            raise TypeError(
                f"optim.{optimizer}: {name}={shown(value)}: no range is known for a hyper-parameter {name}: "
                "give it one in RANGES, core/arguments.py"
            )
        least, below = RANGES[name]
        scheduled = name == "lr" and callable(value) and not isinstance(value, type)
        if scheduled or (isinstance(value, Tensor) and not value.dim()):
            continue
        expected = "a number" + f", at least {least:g}" * (least > -torch.inf)
        expected += f", below {below:g}" * (below == 1) + f", at most {below:g}" * (below not in (1, torch.inf))
        expected += " (or a 0-d tensor, or a schedule)" if name == "lr" else " (or a 0-d tensor)"
        if not is_number(value):
            raise TypeError(f"optim.{optimizer}: {wrong(name, value, expected)}")
        if not least <= value < below:  # or NaN
            raise ValueError(f"optim.{optimizer}: {wrong(name, value, expected)}")


def check_rate(value: object) -> None:
    if not is_number(value) and not (isinstance(value, Tensor) and not value.dim()):
        raise TypeError(f"a schedule gave {shown(value)}: expected a number or a 0-d tensor")


# beginnings of file names without user code: fshard, torch, generated code
CODE = (os.path.dirname(os.path.dirname(__file__)) + os.sep, os.path.dirname(torch.__file__) + os.sep, "<frozen ")
NOT_THE_USER = (
    *CODE,
    "<eval_with_key>",
    "<string>",
    os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_")),
)


def call_site(frame: FrameType | None = None) -> str:
    """Return "file:line" of the innermost user frame."""
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_USER):
        frame = frame.f_back
    return line_of(frame.f_code.co_filename, frame.f_lineno)


def line_of(file: str, number: int | None) -> str:
    """Return "file:line"; in a notebook "Cell In[5]:line"."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell and shell.compile.format_code_name(file)
    return f"{' '.join(cell) if cell else file}:{number}"


def frame_of(failure: BaseException) -> traceback.FrameSummary:
    frames = traceback.extract_tb(failure.__traceback__)
    users = [f for f in frames if not f.filename.startswith(NOT_THE_USER) and "site-packages" not in f.filename]
    return (users or list(frames))[-1]
