"""The differences of two checkpoints: in names, shapes, dtypes, numbers, strings, and elements of leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.storage import as_bytes, from_bytes
from ..files.directory import folder, index_at
from ..files.folders import Folder
from ..files.foreign import printable
from ..files.index import CheckpointError, IndexEntry
from ..files.safetensors_file import NAMES
from ..layout.layout import numbers_in
from .inspecting import TextLine, number

_WINDOW = 1 << 18  # elements read and compared at a time


def compare(place: Folder, step: int, other_place: Folder, other_step: int) -> Iterator[TextLine]:
    """Yield the differences of two checkpoints. CheckpointError if one of them is damaged.

    Leaves with equal pieces and checksums count as equal; other leaves are read and compared.
    """
    index, other = index_at(place, step)[0], index_at(other_place, other_step)[0]
    for label, where, x in (("A", place, index), ("B", other_place, other)):
        text = f"{label}: {where}: step {x.step:,}, saved by {x.ranks:,} rank(s)"
        yield TextLine(text, False, {"checkpoint": label, "dir": str(where), "step": x.step, "ranks": x.ranks})
    here, there, num_different = folder(place, step), folder(other_place, other_step), 0
    names = dict.fromkeys([*index.leaves, *index.values, *other.leaves, *other.values])
    for name in names:
        a, b = (x.leaves.get(name, x.values.get(name)) for x in (index, other))
        if isinstance(a, IndexEntry) and isinstance(b, IndexEntry):
            text, gap = _of_leaf(here, a, there, b, name)
        else:  # compared by repr, nan equals nan, and 1 differs from 1.0
            text, gap = "" if repr(a) == repr(b) else f"{_shown_entry(a)} in A, {_shown_entry(b)} in B", {}
        if text:
            num_different += 1
            a, b = (_shown_entry(x) if isinstance(x, IndexEntry) else number(x) for x in (a, b))
            yield TextLine(f"{printable(name)}: {text}", True, {"name": name, "a": a, "b": b} | gap)
    text = f"{num_different:,} of {len(names):,} leaves and values differ"
    yield TextLine(text, False, {"unequal": num_different, "compared": len(names)})


def _shown_entry(x: object) -> str:
    if isinstance(x, IndexEntry):
        return f"{NAMES[x.dtype]}{[*x.shape]}"
    return "nothing" if x is None else printable(repr(x))


def _of_leaf(
    place: Folder, a: IndexEntry, other_place: Folder, b: IndexEntry, name: str
) -> tuple[str, dict[str, object]]:
    """Return the difference as text, and as data for `--json`; both are empty if the leaves are equal."""
    if a.shape != b.shape:
        return f"{_shown_entry(a)} in A, {_shown_entry(b)} in B", {}
    if a.dtype == b.dtype and (a.numel == 0 or _same_checksums(a, b)):
        return "", {}
    total = _Gap()
    for begin in range(0, a.numel, _WINDOW):
        end = min(begin + _WINDOW, a.numel)
        gap = _gap(*(_read_row_major(*where, begin, end, name) for where in ((place, a), (other_place, b))))
        total = _Gap(total.num + gap.num, *max(total[1:], (gap.largest, begin + gap.place)))
    if a.dtype == b.dtype and not total.num:
        return "", {}
    forms = _shown_entry(a) if a.dtype == b.dtype else f"{_shown_entry(a)} in A, {_shown_entry(b)} in B"
    if not total.num:
        return f"{forms}: the same values", {"elements": a.numel, "unequal": 0}
    what = "other bits" if a.dtype == b.dtype else "other values"
    at = [*map(int, torch.unravel_index(torch.tensor(total.place, device="cpu"), a.shape))]
    largest = total.largest if math.isfinite(total.largest) else None
    far = "not finite" if largest is None else f"{largest:.3g}"
    text = f"{forms}: {total.num:,} of {a.numel:,} elements have {what}; largest difference {far}, at {at}"
    return text, {"elements": a.numel, "unequal": total.num, "largest_difference": largest, "at": at}


def _same_checksums(a: IndexEntry, b: IndexEntry) -> bool:
    first, second = ([(piece.begin, piece.checksums) for piece in entry.pieces] for entry in (a, b))
    return first == second and a.order == b.order and all(checksums for _, checksums in first)


class _Gap(NamedTuple):
    """The number of differing elements, the largest absolute difference, and its element's index, flattened."""

    num: int = 0
    largest: float = 0.0
    place: int = 0


def _gap(x: Tensor, y: Tensor) -> _Gap:
    if x.dtype == y.dtype:
        differs = (as_bytes(x) != as_bytes(y)).view(-1, x.itemsize).any(1)
    else:
        differs = _double(x) != _double(y)
    far = (_double(x) - _double(y)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    far = torch.where(differs, far, 0.0)  # 0 for equal elements: inf - inf is nan, now inf
    place = int(far.argmax())
    return _Gap(int(differs.sum()), float(far[place]), place)


def _double(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return (x.float() if x.itemsize == 1 else x).double()  # torch cannot cast float8 to float64


def _read_row_major(place: Folder, entry: IndexEntry, begin: int, end: int, name: str) -> Tensor:
    """Read elements [begin, end), counted row-major. In another stored order, read elements between as well."""
    if not entry.order:
        return stored_elements(place, entry, begin, end, name)
    numbers = numbers_in(entry.order, entry.shape, (), begin, end - begin)
    low, high = int(numbers.min()), int(numbers.max()) + 1
    return stored_elements(place, entry, low, high, name)[numbers - low]


def stored_elements(place: Folder, entry: IndexEntry, begin: int, end: int, name: str) -> Tensor:
    """Read elements [begin, end), counted in the stored order, into host memory."""
    size = entry.dtype.itemsize
    data = bytearray((end - begin) * size)
    for piece in entry.pieces:
        low, high = max(begin, piece.begin), min(end, piece.end)
        if low >= high:
            continue
        view = memoryview(data)[(low - begin) * size : (high - begin) * size]
        try:
            with place.open(piece.file) as file:
                is_whole = file.read_into(piece.offset + (low - piece.begin) * size, view) == len(view)
        except OSError as error:
            raise CheckpointError(f"{place}/{piece.file}: {error}. It has leaf {printable(name)!r}") from error
        if not is_whole:
            raise CheckpointError(f"{place}/{piece.file}: leaf {printable(name)!r}: the file ends before it")
    return from_bytes(torch.frombuffer(data, dtype=torch.uint8), entry.dtype)
