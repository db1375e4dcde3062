"""Compare two trees bit by bit, or within a number of units in the last place, and report where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core import tree
from ..core.scalars import double
from ..layout.pieces import Parts, pieces

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class Place(NamedTuple):
    """A leaf of a tree, or this rank's piece of a leaf: path, unit with which it is gathered (or None), and value."""

    path: str
    unit: str | None
    value: Any


def places(x: Any) -> list[Place]:
    """Return the leaves of a tree, in order. For a node of `Parts`, this rank's pieces of leaves and the padding."""
    found = list[Place]()
    for path, node in tree.paths_to(x, Parts):
        found += _places_of(path, node) if isinstance(node, Parts) else [Place(path, None, node)]
    return found


def _places_of(path: str, x: Parts) -> Iterator[Place]:
    plan, layout = getattr(x, "plan", None), x.layout
    units = {} if plan is None else {slot.path: plan.units[slot.unit].name for slot in plan.slots}
    for number, piece in pieces(x, layout):
        leaf = layout.leaves[number].path
        yield Place(".".join(filter(None, (path, leaf))), units.get(leaf), piece)
    for number, row in enumerate(tree.leaves(x) if layout.flat else []):
        covered = torch.zeros(len(row), dtype=torch.bool, device=row.device)
        for span in (s for s in layout.mine if s.row == number):
            covered[span.start : span.start + span.numel] = True
        yield Place(".".join(filter(None, (path, f"(padding of row {number})"))), None, row[~covered])


class Gap(NamedTuple):
    """The difference of two leaves: index, values and distance of the worst element, and the number of wrong elements.

    `ulps` is the distance in units in the last place, infinite if it has no such distance; `numel` counts all elements.
    """

    path: str
    at: list[int]
    got: Any
    expected: Any
    ulps: float
    num_wrong: int
    numel: int

    def __str__(self) -> str:
        where = f"leaf {self.path!r}" + (f" at {self.at}" if self.at else "")
        return f"{where}: got {self.got!r}, expected {self.expected!r} ({self._far()})"

    def _far(self) -> str:
        if not math.isfinite(self.ulps):
            return "not comparable" if isinstance(self.got, float) else "different"
        relative = abs(self.got - self.expected) / abs(self.expected) if self.expected else math.inf
        return f"{self.ulps:.0f} units in the last place, relative {relative:.1e}"


def assert_trees_equal(got: Any, expected: Any, *, ulps: int = 0) -> None:
    """Raise AssertionError unless two trees have the same structure, dtypes, shapes, devices and values.

    Structure, shapes, dtypes and devices are compared first, then the bits of values: 0.0 and -0.0 differ, and NaNs are
    equal only if their bits are equal. With `ulps`, floating-point values may differ by that many units in the last
    place: 0.0 and -0.0 are one unit apart, two different NaNs as well, and infinities are not close to finite numbers.
    The error names the worst leaf and element, both values, their distance, and how many elements and leaves differ.
    Leaves may be of any type. For a `Sharded` this rank's pieces are compared, with padding, under the paths of leaves.

    >>> assert_trees_equal({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> assert_trees_equal({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])})
    Traceback (most recent call last):
    AssertionError: trees differ in 1 of 2 elements, 1 of 1 leaves (allowed: no bit). The worst is leaf 'w' at [1]: ...
    """
    __tracebackhide__ = True
    _check_structure(got, expected)
    pairs = list(zip(places(got), places(expected), strict=True))
    for mine, other in pairs:
        _check_kind(mine.path, mine.value, other.value)
    gaps = [gap(mine.path, mine.value, other.value, ulps) for mine, other in pairs]
    wrong = [g for g in gaps if g.num_wrong]
    if wrong:
        allowed = f"{ulps} units in the last place" if ulps else "no bit"
        raise AssertionError(
            f"trees differ in {sum(g.num_wrong for g in wrong)} of {sum(g.numel for g in gaps)} elements, "
            f"{len(wrong)} of {len(gaps)} leaves (allowed: {allowed}). The worst is {max(wrong, key=lambda g: g.ulps)}"
        )


def _check_structure(got: Any, expected: Any) -> None:
    mine, other = (tree.flatten(x)[1] for x in (got, expected))
    if mine == other:
        return
    paths, wanted = tree.paths(mine), tree.paths(other)
    lacks, more = [p for p in wanted if p not in paths], [p for p in paths if p not in wanted]
    text = f"it lacks {lacks[:3] or 'nothing'} and has {more[:3] or 'nothing'} besides"
    if not lacks and not more:
        text = f"its nodes are others: expected {_short(other)}, got {_short(mine)}"
        for one, two in zip(tree.nodes(got, Parts), tree.nodes(expected, Parts), strict=False):
            if hasattr(one, "plan") and hasattr(two, "plan") and one.plan != two.plan:
                text = f"its plan is another: expected {two.plan.first_difference(one.plan)}"
    raise AssertionError(f"trees differ in structure: expected {len(wanted)} leaves, got {len(paths)}; {text}")


def _short(spec: tree.Spec) -> str:
    text = str(spec)
    return text if len(text) < 300 else text[:300] + "..."


def _check_kind(path: str, got: Any, expected: Any) -> None:
    if (mine := _kind(got)) != (other := _kind(expected)):
        raise AssertionError(f"leaf {path!r}: expected {other}, got {mine}")


def _kind(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"a leaf of class {type(x).__name__}"
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"


def gap(path: str, got: Any, expected: Any, ulps: int = 0) -> Gap:
    """Return the difference of two leaves with the same dtype and shape; `ulps` is the allowed distance."""
    if isinstance(got, float):
        got, expected = (double(x) for x in (got, expected))
    if not isinstance(got, Tensor):
        same = bool(got == expected)
        return Gap(path, [], got, expected, 0 if same else math.inf, int(not same), 1)
    if got.numel() == 0 or got.is_meta:
        return Gap(path, [], None, None, 0, 0, got.numel())
    far = distance(got, expected)
    worst = int(far.argmax())
    mine, other = (x.detach().reshape(-1)[worst].item() for x in (got, expected))
    return Gap(path, _index(worst, got.shape), mine, other, float(far[worst]), int((far > ulps).sum()), far.numel())


def _index(flat: int, shape: Sequence[int]) -> list[int]:
    index = list[int]()
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.insert(0, at)
    return index


def distance(got: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of two tensors element by element, in units in the last place.

    The tensors have the same shape and dtype. The result is a flat float64 tensor on the CPU: 0 where the bits are the
    same, infinite where they differ and there is no such distance (integers, infinities, NaN and a number).

    >>> distance(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, torch.inf]))
    tensor([0., 1., inf], dtype=torch.float64)
    """
    one, two = (x.detach().cpu().contiguous().reshape(-1) for x in (got, expected))
    if one.is_complex():
        return distance(torch.view_as_real(one), torch.view_as_real(two)).reshape(-1, 2).amax(1)
    same = one.view(_INTEGERS[one.element_size()]) == two.view(_INTEGERS[two.element_size()])
    far = torch.full(one.shape, math.inf, dtype=torch.float64, device="cpu")
    if one.is_floating_point():
        places = torch.where(one.double().isfinite() & two.double().isfinite(), _steps(one, two), far)
        far = torch.where(one.double().isnan() & two.double().isnan(), 1.0, places)
    return torch.where(same, 0.0, far)


def _steps(one: Tensor, two: Tensor) -> Tensor:
    a, b = _ordered(one), _ordered(two)
    # Integers with the same sign: the difference is exact. With different signs int64 could overflow, so use float64.
    return torch.where((a < 0) == (b < 0), (a - b).double(), a.double() - b.double()).abs()


def _ordered(x: Tensor) -> Tensor:
    """Map floating-point numbers to consecutive int64 numbers in the same order; -0.0 is one below 0.0."""
    bits = x.view(_INTEGERS[x.element_size()])
    return torch.where(bits >= 0, bits, ~(bits & torch.iinfo(bits.dtype).max)).long()
