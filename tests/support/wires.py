"""The registry of wires: tests of wires run over its rows; a new wire gets all of them by one row."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import wire
from fshard.wire import Cast, Float8, Identity, Int8

Sizes = Sequence[int]


class Row(NamedTuple):
    """A wire, and what tests must know of it.

    `nbytes(sizes)` is what it sends of float32 elements, `bound(x, sizes)` how far each element may be off on arrival,
    besides a float32 rounding.
    """

    wire: Any
    nbytes: Callable[[Sizes], int]
    bound: Callable[[Tensor, Sizes], Tensor]


def _padded(nbytes: int) -> int:
    """Bytes up to the next multiple of 16, where `pack` puts the next tensor."""
    return -(-nbytes // 16) * 16


def _tops(parts: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of an element's part, for every element: (n,)."""
    return torch.cat([part.abs().amax().expand(len(part)) if len(part) else part for part in parts])


def _int8(block: int = 256) -> Row:
    def nbytes(sizes: Sizes) -> int:
        return _padded(4 * math.ceil(sum(sizes) / block)) + _padded(sum(sizes))

    return Row(Int8(block), nbytes, lambda x, sizes: _tops(x.split(block)) / 254)  # half of the scale, max / 127


def _float8(dtype: torch.dtype) -> Row:
    info = torch.finfo(dtype)

    def bound(x: Tensor, sizes: Sizes) -> Tensor:  # half a unit in the last place, or half of the smallest number
        scales = _tops(x.split(list(sizes))) / info.max
        return torch.maximum(x.abs() * info.eps / 2, scales * info.smallest_normal * info.eps / 2)

    return Row(Float8(dtype), lambda sizes: _padded(4 * len(sizes)) + _padded(sum(sizes)), bound)


# A new wire is one row here; a further row of the same class is another setting of it.
ROWS: dict[str, Row] = {
    "identity": Row(Identity(), lambda sizes: 4 * sum(sizes), lambda x, sizes: 0 * x),
    "cast": Row(Cast(torch.bfloat16), lambda sizes: 2 * sum(sizes), lambda x, sizes: x.abs() * 2**-8),
    "int8": _int8(16),
    "int8-small": _int8(4),
    "int8-usual": _int8(),
    "float8": _float8(torch.float8_e4m3fn),
    "float8-range": _float8(torch.float8_e5m2),
}
WIRES: dict[str, Any] = {name: row.wire for name, row in ROWS.items()}
# The first row of each class, for tests that take longer.
FIRST: dict[str, Any] = {}
for _name, _wire in WIRES.items():
    if type(_wire) not in map(type, FIRST.values()):
        FIRST[_name] = _wire


def codecs() -> dict[str, type]:
    """The classes of wires that `fshard.wire` exports."""
    exported = {name: getattr(wire, name) for name in wire.__all__}
    return {name: x for name, x in exported.items() if isinstance(x, type) and x is not wire.Wire}
