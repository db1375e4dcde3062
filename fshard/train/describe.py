"""Describe the arguments of a step as text, for ranks to compare.

Note [Built alike]
    Ranks with steps built from different arguments may call the same collectives and train different models. So the
    label of the loss's collective, compared between ranks, has the arguments as text. An optimizer's text is the plain
    values in its closures (numbers, strings, dtypes), by name; closures of users' functions are left out, because their
    values may rightly differ by rank (a path), and so are values of tensors.

    Ranks with states of different steps or seeds would mix two states, so the text has step and seed. But process
    groups compare texts only in checked calls, and a graph is made once for all steps. So the loss's collective also
    sums a number made of step and seed, the stamp, and each rank compares the sum with its stamp times the number of
    ranks. A stamp is a fifth power modulo a prime: plain steps 1, 2, 3 sum to 3 times 2, and the rank at step 2 would
    raise no error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import Tensor

from ..core.scalars import Number
from ..core.tracing import is_tracing

_PACKAGE = __name__.partition(".")[0]
_LONG_LIST = 16  # elements; longer lists of numbers are tables of this package, and left out of the text
_PRIME = 2**31 - 1  # different numbers have different fifth powers modulo it
_SPREAD = 0x9E3779B1  # any 32 bits: adjacent seeds get distant stamps
_LONGEST = 300  # characters; longer text gets a checksum of the whole


def describe(**arguments: object) -> str:
    """Return the plain values in arguments, as one line of text.

    >>> describe(clip_norm=1.0, accumulate=2)
    'clip_norm=1.0, accumulate=2'
    """
    words = [word for name, value in arguments.items() for word in _words(name, value, set())]
    text, shown = ", ".join(words), ", ".join(dict.fromkeys(words))  # each word once
    if len(text) == len(shown) <= _LONGEST:
        return text
    return f"{shown[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _words(name: str, value: object, seen: set[int]) -> Iterator[str]:
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        yield f"{name}={value!r}"
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    parts = _inner_values(value)
    for key, inner in parts:
        yield from _words(key or name, inner, seen)
    if callable(value) and not isinstance(value, partial | tuple):
        qualname: str = getattr(value, "__qualname__", type(value).__qualname__)
        # a user's function gives its name; one of this package only if public and without plain values inside
        if not _is_of_fshard(value) or not (
            parts or isinstance(value, type) or qualname.startswith("_") or "<" in qualname
        ):
            yield f"{name}={qualname}"


def _is_of_fshard(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] == _PACKAGE


def _inner_values(value: object) -> list[tuple[str, object]]:
    if isinstance(value, partial):
        return [("", value.func), *(("", x) for x in value.args), *value.keywords.items()]
    if isinstance(value, Mapping):
        return [(str(key), x) for key, x in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(key, x) for key, x in zip(value._fields, value, strict=True) if not isinstance(x, bool | None)]
    if isinstance(value, list | tuple):
        is_table = len(value) > _LONG_LIST and all(isinstance(x, int | float) for x in value)
        return [] if is_table else [("", x) for x in value]
    if is_dataclass(value) and not isinstance(value, type) and _is_of_fshard(type(value)):
        parts = [(f.name, getattr(value, f.name)) for f in fields(value)]
        return [(key, x) for key, x in parts if not isinstance(x, bool | None)]
    if not _is_of_fshard(value) or not hasattr(value, "__closure__") or not hasattr(value, "__code__"):
        return []
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return list(zip(value.__code__.co_freevars, cells, strict=True))


def stamp_of(step: Tensor, seed: Tensor, device: torch.device) -> tuple[str, Number]:
    """Return step and seed as text (empty in a graph), and as a stamp below 2**31, so that sums over ranks are exact.

    In a graph for an accelerator the stamp is 0: for another, every run would copy step and seed to the device.

    >>> stamp_of(torch.tensor(3), torch.tensor(0), torch.device("cpu"))
    (', step=3, seed=0', 665346162)
    """
    if is_tracing() and device.type != "cpu":
        return "", 0
    first, second = (step, seed) if is_tracing() else (int(step), int(seed))
    text = "" if is_tracing() else f", step={first}, seed={second}"
    number = (first + (second % _PRIME + 1) * _SPREAD) % _PRIME  # not 0 at step 0: 0 is the mean of -x and x
    square = number * number % _PRIME
    return text, square * square % _PRIME * number % _PRIME
