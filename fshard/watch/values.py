"""Values of observed runs by key, and how the values of ranks make one device's value.

Note [Kinds of values]
    Along a mesh axis the values of ranks make one device's value if they are copies or pieces ("apart"), summands
    ("sum"), or values to average ("mean"). Pieces may lie along any dim, in blocks, in any order (rows by class, heads
    among rows), so numbers are sorted before the comparison. Copies repeat each number equally often. `kinds_of` tells
    more: "equal", "parts of dim 1", "parts in another order", "summands", or "shares of 1/2" if two ranks have equal
    summands.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core.storage import is_inexact
from ..core.tracing import memo
from .compare import form
from .observed import COLLECTIVE, GRADIENT, LOSS, OLD, PARAMETER, SUM, Observed

Way: TypeAlias = tuple[str, ...]  # by axis: "apart", "sum" or "mean"
ORDER = "parts in another order"
ValueName: TypeAlias = tuple[str, str | int]  # kind and name of a value; for an operator, its number in the forward
SMALL_PART = 2.0**-6  # values below this part of the largest argument may be rounding errors
MOST_UPDATE = 2.0**-4  # agreeing gradients differ by at most this part; updates may differ four times as much
_HALF = 2.0**-20  # between eps of float32 and of 16 bits


class Difference(NamedTuple):
    """The first difference of two observed runs.

    - `kind`: "operator", "gradient on this rank of", "summed gradient of", "metric" or "new parameter".
    - `name`: the operator, metric or leaf.
    - `unit`: as in `print(plan)`.
    - `rank`: None if only the combined values of ranks are wrong.
    - `line`: user code that calls the operator, or first reads the leaf's unit.
    """

    kind: str
    name: str
    unit: str
    rank: int | None
    line: str
    text: str

    def __str__(self) -> str:
        of = "" if self.rank is None else f" on rank {self.rank}"
        unit = f", unit {self.unit!r}" if self.unit else ""
        at = ", at" if self.kind == "operator" else ", which is read at"
        return f"{self.kind} {self.name!r}{of}{unit}{f'{at} {self.line}' if self.line else ''}: {self.text}"


class ObservedValue(NamedTuple):
    """A value, and how it was computed."""

    kind: str
    name: str
    unit: str
    line: str
    inputs: list[int]  # by argument, the number of its operator, of a collective from -2 down, -1 for other tensors
    value: Tensor
    place: str  # numbers of operator and forward
    eps: float  # of the lowest precision used so far

    @property
    def rtol(self) -> float:
        """Allow 2**12 units in the last place, 2**4 for 16 bits and fewer, at most 1/8 of the value."""
        return min(self.eps * (2**12 if self.eps < _HALF else 2**4), max(self.eps, 2.0**-3))

    def differs(self, rank: int | None, text: str) -> Difference:
        return Difference(self.kind, self.name, self.unit, rank, self.line, text + self.place)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}" + f" at {self.line}" * bool(self.line)


class ObservedRun(dict[ValueName, list[ObservedValue]]):
    """Values by key: one for each forward, or one for the step."""

    def __init__(self, seen: Observed):
        super().__init__()
        self._largest = dict[int, float]()
        eps, coarsest, forward, count, collective = {-1: 0.0}, 0.0, 0, 0, -2
        for name, value in zip(seen["names"], seen["values"], strict=True):
            kind, called, unit, line, inputs = name.split("\t")
            numbers = [*{int(number): 0 for number in inputs.replace("?", "-1").split(",") if number}]
            comes_of = [eps[number] for number in numbers] if kind in ("operator", COLLECTIVE) else [coarsest]
            precision = max([torch.finfo(value.dtype).eps if is_inexact(value) else 0.0, *comes_of])
            key, place = called, ""
            if kind == "forward":
                key, forward, count, collective = "", forward + 1, 0, -2
            elif kind == COLLECTIVE:
                kind, key, eps[collective], collective = "operator", collective, precision, collective - 1
            elif kind == "operator" and not called.startswith(LOSS):
                key, eps[count], place = count, precision, f" (operator {count + 1}, forward {forward})"
                count, coarsest = count + 1, max(coarsest, precision)
            x = ObservedValue(
                kind, called, unit, line, numbers, value.detach().cpu().as_subclass(Tensor), place, precision
            )
            self.setdefault((kind, key), []).append(x)

    @memo
    def forwards(self) -> list[ObservedValue]:
        return self["forward", ""]

    @memo
    def sizes(self) -> list[int]:
        return [int(size) for size in self.forwards[0].name.split("x") if size]

    @property
    def axes(self) -> list[str]:
        return self.forwards[0].line.split(",")

    @property
    def end(self) -> str:
        return [x.line for (kind, _), values in self.items() if kind == "operator" for x in values][-1]

    @memo
    def largest_gradient(self) -> float:
        return largest(*(x.value for (kind, _), values in self.items() if kind == SUM for x in values))

    def largest_of(self, operator: int) -> float:
        if operator not in self._largest:
            self._largest[operator] = largest(*(x.value for x in self.get(("operator", operator), [])))
        return self._largest[operator]


def limit_of(key: ValueName, got: Sequence[ObservedValue], want: ObservedRun, rtol: float | None) -> float:
    (kind, path), first = key, want[key][0]
    given, values = first.rtol if rtol is None else rtol, [x.value for x in want[key]]
    if not given or not is_inexact(first.value):
        return 0.0
    if rtol is None and kind == PARAMETER and (OLD, path) in want:
        update = largest(flat(first.value) - flat(want[OLD, path][0].value))
        return 4 * min(2**5 * given, MOST_UPDATE) * update + 4 * torch.finfo(first.value.dtype).eps * largest(*values)
    behind = max(map(want.largest_of, first.inputs), default=0.0)
    behind = want.largest_gradient if kind in (GRADIENT, SUM) else behind
    return given * max(largest(*values, *(x.value for x in got)), SMALL_PART * behind)


def largest(*tensors: Tensor) -> float:
    return max((float(flat(x).nan_to_num(0.0, 0.0, 0.0).abs().max()) for x in tensors if x.numel()), default=0.0)


def flat(x: Tensor) -> Tensor:
    if not is_inexact(x):
        return x.long().reshape(-1)
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double().reshape(-1)


def far_text(x: Tensor, y: Tensor, limit: float, where: Tensor | None = None) -> str:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"expected {form(y)}, got {form(x)}"
    a, b = flat(x), flat(y)
    far = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).double().nan_to_num(nan=torch.inf)
    far = far if where is None else far * where
    if not (wrong := far > limit).any():
        return ""
    at = int(far.argmax())
    return f"expected {b[at]:.9g}, got {a[at]:.9g} at element {at}; {int(wrong.sum())} of {len(a)} differ"


def _ways(sizes: Sequence[int], words: Sequence[str]) -> Iterator[Way]:
    yield from product(*(words if size > 1 else ("apart",) for size in sizes))


def _combined(parts: Sequence[Tensor], sizes: Sequence[int], way: Way) -> list[Tensor] | None:
    """Combine values along summed and averaged axes; None if shapes or dtypes differ."""
    groups: dict[tuple[int, ...], list[Tensor]] = {}
    for at, x in zip(product(*map(range, sizes)), parts, strict=True):
        groups.setdefault(tuple(i for i, word in zip(at, way, strict=True) if word == "apart"), []).append(x)
    if any((x.shape, x.dtype) != (group[0].shape, parts[0].dtype) for group in groups.values() for x in group):
        return None
    if "sum" not in way and "mean" not in way:
        return [*parts]
    num = math.prod(size for size, word in zip(sizes, way, strict=True) if word == "mean")
    totals = [torch.stack([x if x.is_complex() else x.double() for x in group]).sum(0) for group in groups.values()]
    return [(x / num).to(parts[0].dtype) for x in totals]


def _values_alike(got: Sequence[Tensor], want: Sequence[Tensor], limit: float) -> bool:
    if any(x.dtype != want[0].dtype for x in got):
        return False
    same_shapes = all(x.shape == want[0].shape for x in (*got, *want))
    if same_shapes and not any(far_text(x, want[0], limit) for x in want[1:]):
        return not any(far_text(x, want[0], limit) for x in got)
    a, b = (torch.cat([*map(flat, each)]) for each in (got, want))
    copies, rest = divmod(len(a), len(b)) if len(b) else (1, len(a))
    return not rest and not far_text(a.sort()[0], b.sort()[0].repeat_interleave(copies), limit)


def pieces_of(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield, for each dim along which values concatenate to the expected shape, the expected pieces."""
    for dim in range(wanted[0].dim()):
        with suppress(RuntimeError):  # shapes do not fit
            x, y = torch.cat([*values], dim), torch.cat([*wanted], dim)
            if x.shape == y.shape:
                yield y.split([part.shape[dim] for part in values], dim)


def right_ways(
    got: Sequence[ObservedValue],
    want: Sequence[ObservedValue],
    sizes: Sequence[int],
    limit: float,
    words: Sequence[str] = (),
) -> Iterator[tuple[Way, Way]]:
    """Yield the ways to combine values of ranks, and of one device, to equal values (Note [Kinds of values]).

    `sizes`: of the mesh's axes; micro-batches are one axis more. `words`: "apart", "sum", "mean", or some of them.
    """
    parts, whole, sizes_of_one = [x.value for x in got], [x.value for x in want], list[int]()
    if len(parts) > (ranks := math.prod(sizes)) or len(want) > 1:
        sizes, sizes_of_one = [*sizes, len(parts) // ranks], [len(want)]
    words = words or ("apart", "sum", "mean")
    for of_ranks, of_one in product(_ways(sizes, words), _ways(sizes_of_one, words)):
        combined, wanted = _combined(parts, sizes, of_ranks), _combined(whole, sizes_of_one, of_one)
        if combined and wanted and _values_alike(combined, wanted, limit):
            yield of_ranks, of_one


def kinds_of(
    got: Sequence[ObservedValue], want: Sequence[ObservedValue], sizes: Sequence[int], limit: float
) -> tuple[str, ...]:
    """Say by axis how values of ranks make one device's value (Note [Kinds of values]); () if they do not."""
    parts, words = [x.value for x in got], ("apart",) if got[0].value.dtype == torch.bool else ()
    way, _ = next(right_ways(got, want, sizes, limit, words), ((), ()))
    if not way:
        return ()
    sizes = [*sizes, len(parts) // math.prod(sizes)][: len(way)]
    left = [size if word == "apart" else 1 for size, word in zip(sizes, way, strict=True)]
    none: tuple[int | None, ...] = (None,) * len(way)
    dims = none if len(want) > 1 else next(_dims(_combined(parts, sizes, way) or (), left, want[0].value, limit), none)
    shares = [word == "sum" and _are_equal(parts, sizes, axis, limit) for axis, word in enumerate(way)]
    return tuple(map(_word_for, way, sizes, dims, shares))


def _word_for(way: str, size: int, dim: int | None, is_share: bool) -> str:
    if way != "apart":
        return "values to average" if way == "mean" else f"shares of 1/{size}" if is_share else "summands"
    return ORDER if dim is None else f"parts of dim {dim}" if dim >= 0 else "equal"


def _are_equal(parts: Sequence[Tensor], sizes: Sequence[int], axis: int, limit: float) -> bool:
    stride = math.prod(sizes[axis + 1 :])
    firsts = (parts[n - n // stride % sizes[axis] * stride] for n in range(len(parts)))
    return not any(far_text(x, first, limit) for x, first in zip(parts, firsts, strict=True))


def _dims(parts: Sequence[Tensor], sizes: Sequence[int], want: Tensor, limit: float) -> Iterator[tuple[int, ...]]:
    """Yield by axis the dim along which parts concatenate to the expected value, -1 for equal parts."""
    for dims in product(*(range(-1, want.dim() if size > 1 else 0) for size in sizes)):
        joined: Sequence[Tensor] = parts
        with suppress(RuntimeError):  # shapes do not fit
            for axis, (size, dim) in reversed([*enumerate(zip(sizes, dims, strict=True))]):
                if dim < 0 and not _are_equal(joined, [*sizes[: axis + 1]], axis, limit):
                    break
                groups = [joined[i : i + size] for i in range(0, len(joined), size)]
                joined = [group[0] if dim < 0 else torch.cat([*group], dim) for group in groups]
            else:
                if not far_text(joined[0], want, limit):
                    yield dims
