"""Boxes of a tensor, as other libraries write them, and their runs: consecutive elements of the flattened tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from operator import le

from .foreign import require

MOST_RUNS = 1 << 20  # runs of all boxes of a checkpoint


def check_box(name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """ValueError, beginning with the tensor's name, unless the box is inside the tensor."""
    ends = [begin + size for begin, size in zip(offsets, sizes, strict=False)]
    is_inside = len(shape) == len(offsets) == len(sizes) and all(map(le, ends, shape))
    require(is_inside, f"{name!r}: a chunk {[*sizes]} at {[*offsets]} is not inside the tensor {[*shape]}")


def num_runs(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the number of runs of a box in a flattened tensor.

    >>> num_runs((4, 6), (2, 6)), num_runs((4, 6), (4, 3))
    (1, 4)
    """
    return math.prod(sizes[: _first_whole(shape, sizes)])


def _first_whole(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the last dim in which the box is smaller than the tensor, or 0."""
    cut = [dim for dim, (whole, size) in enumerate(zip(shape, sizes, strict=True)) if whole != size]
    return max(cut, default=0)


def runs_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of a box: first element in the flattened box, in the flattened tensor, and number of elements.

    >>> [*runs_of((4, 6), (0, 3), (2, 3))]
    [(0, 3, 3), (3, 9, 3)]
    """
    dim = _first_whole(shape, sizes)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    numel = math.prod(sizes[dim:])
    base = sum(begin * stride for begin, stride in zip(offsets, strides, strict=True))
    for number, places in enumerate(itertools.product(*map(range, sizes[:dim]))):
        begin = base + sum(place * stride for place, stride in zip(places, strides, strict=False))
        yield number * numel, begin, numel
