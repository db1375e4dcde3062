"""Compare two trees bit by bit, or within units in the last place, and name the leaf that differs."""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import digits
from ..core import tree
from ..core.differences import lacking
from ..core.scalars import double
from ..core.storage import as_bytes
from ..core.tree import Tree
from ..layout.pieces import NamedLeaf, Parts, named_leaves

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class Gap(NamedTuple):
    """The largest difference between elements of two leaves."""

    path: str
    at: list[int]
    got: Any  # a number if `ulps` is finite
    expected: Any
    ulps: float  # in units in the last place, or infinite
    num_wrong: int  # unlike elements, of `numel`
    numel: int

    def __str__(self) -> str:
        return f"leaf {self.path!r}{' ' if self.at else ': '}{self.text}"

    @property
    def text(self) -> str:
        return f"at {self.at}: " * bool(self.at) + f"got {self.got!r}, expected {self.expected!r} ({self._far()})"

    def _far(self) -> str:
        if not math.isfinite(self.ulps):
            return "not comparable" if isinstance(self.got, float) else "different"
        relative = abs(self.got - self.expected) / abs(self.expected) if self.expected else math.inf
        return f"{self.ulps:.0f} units in the last place, relative {relative:.1e}"


def assert_trees_equal(got: Tree, expected: Tree, *, ulps: int = 0) -> None:
    """Raise AssertionError unless `got` has the structure, dtypes, shapes, devices and values of `expected`.

    Bits of values are compared: 0.0 and -0.0 differ, and NaNs are equal only with equal bits. Floating-point values may
    differ by `ulps` units in the last place: 0.0 and -0.0 are one unit apart, and so are two different NaNs; infinities
    are far from finite numbers. The error names the leaf and element with the largest difference. Leaves may be of any
    type. Of a `Sharded`, this rank's pieces and padding are compared, by path.

    >>> assert_trees_equal({"w": torch.ones(2)}, {"w": torch.ones(2)})
    >>> assert_trees_equal({"w": torch.tensor([1.0, 2.5])}, {"w": torch.tensor([1.0, 2.0])})
    Traceback (most recent call last):
    AssertionError: trees differ in 1 of 2 elements, 1 of 1 leaves (allowed: no bit). The worst is leaf 'w' at [1]: ...
    """
    __tracebackhide__ = True
    _check_structure(got, expected)
    pairs = list(zip(named_leaves(got), named_leaves(expected), strict=True))
    for place, wanted in pairs:
        if (kind := _leaf_kind(place.value)) != (expected_kind := _leaf_kind(wanted.value)):
            raise AssertionError(f"leaf {place.path!r}: expected {expected_kind}, got {kind}")
    gaps = [gap(place.path, place.value, wanted.value, ulps) for place, wanted in pairs]
    wrong = [g for g in gaps if g.num_wrong]
    if wrong:
        allowed = f"{ulps} units in the last place" if ulps else "no bit"
        raise AssertionError(
            f"trees differ in {sum(g.num_wrong for g in wrong)} of {sum(g.numel for g in gaps)} elements, "
            f"{len(wrong)} of {len(gaps)} leaves (allowed: {allowed}). The worst is {max(wrong, key=lambda g: g.ulps)}"
        )


def _check_structure(got: Tree, expected: Tree) -> None:
    got_spec, expected_spec = (tree.flatten(x)[1] for x in (got, expected))
    if got_spec == expected_spec:
        return
    paths, wanted = tree.leaf_paths(got_spec), tree.leaf_paths(expected_spec)
    text = lacking(wanted, paths)
    if not text:
        text = f"its nodes are others: expected {_short_spec(expected_spec)}, got {_short_spec(got_spec)}"
        for node, wanted_node in zip(tree.nodes(got, Parts), tree.nodes(expected, Parts), strict=False):
            if hasattr(node, "plan") and hasattr(wanted_node, "plan") and node.plan != wanted_node.plan:
                text = f"its plan is another: expected {wanted_node.plan.first_difference(node.plan)}"
    raise AssertionError(f"trees differ in structure: expected {len(wanted)} leaves, got {len(paths)}; {text}")


def _short_spec(spec: tree.Spec) -> str:
    text = str(spec)
    return text if len(text) < 300 else text[:300] + "..."


def _leaf_kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a leaf of class {form(x)}"
    return f"{form(x).removeprefix('torch.')} on {x.device}"


def form(x: object) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def first_unlike(got: Tree, expected: Tree) -> tuple[NamedLeaf, str] | None:
    """Return the first leaf of `got` with path, dtype, shape or bits unlike `expected`, and the difference; or None.

    A leaf of `Parts` is this rank's piece, or padding.

    >>> first_unlike({"w": torch.ones(2)}, {"w": torch.ones(3)})[1]
    'got torch.float32[2], expected torch.float32[3]'
    """
    a, b = tree.leaves(got), tree.leaves(expected)
    if len(a) == len(b) and all(map(_same, a, b)):  # fast for large tensors
        return None
    nothing = NamedLeaf("(nothing)", None, None)
    for x, y in zip_longest(named_leaves(got), named_leaves(expected), fillvalue=nothing):
        if (x.path, form(x.value)) != (y.path, form(y.value)):
            forms = (f"{place.path!r} " * (x.path != y.path) + form(place.value) for place in (x, y))
            return (y if x is nothing else x), "got {}, expected {}".format(*forms)
        if (apart := gap(x.path, x.value, y.value)).num_wrong:
            return x, f"{apart.text}; {apart.num_wrong} of {apart.numel} differ"
    return None


def _same(x: object, y: object) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))
    return type(x) is type(y) and not gap("", x, y).num_wrong


def bits(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, a sparse one made dense: uint8, (n,)."""
    return as_bytes(_dense(x))


def _dense(x: Tensor) -> Tensor:
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()
    return x.resolve_conj().resolve_neg().contiguous()


def gap(path: str, got: object, expected: object, ulps: int = 0) -> Gap:
    if isinstance(got, float) and isinstance(expected, float):
        got, expected = double(got), double(expected)
    if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
        same = bool(got == expected)
        return Gap(path, [], got, expected, 0 if same else math.inf, int(not same), 1)
    if got.numel() == 0 or got.is_meta:
        return Gap(path, [], None, None, 0, 0, got.numel())
    far = distance(got, expected)  # (numel,)
    worst = int(far.argmax())
    a, b = (_dense(x).reshape(-1)[worst].item() for x in (got, expected))
    return Gap(path, digits(worst, got.shape), a, b, float(far[worst]), int((far > ulps).sum()), far.numel())


def distance(got: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of two tensors of one shape and dtype, in units in the last place.

    The result is flat, float64, on the CPU: 0 for equal bits; infinite for unequal integers, for an infinity, and for
    NaN and a number.

    >>> distance(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, torch.inf]))
    tensor([0., 1., inf], dtype=torch.float64)
    """
    x, y = (_dense(leaf).cpu().reshape(-1) for leaf in (got, expected))  # (n,)
    if x.is_complex():  # (n, 2) -> (2n,) -> (n,): the larger of two distances, real and imaginary
        return distance(torch.view_as_real(x), torch.view_as_real(y)).reshape(-1, 2).amax(1)
    same = x.view(_INTEGERS[x.element_size()]) == y.view(_INTEGERS[y.element_size()])
    far = torch.full(x.shape, math.inf, dtype=torch.float64, device="cpu")
    if x.is_floating_point():
        a, b = _ordered(x), _ordered(y)
        # steps over adjacent floating-point numbers; for unlike signs in float64: int64 could overflow
        steps = torch.where((a < 0) == (b < 0), (a - b).double(), a.double() - b.double()).abs()
        # `double`: torch has no isfinite for float8_e4m3fn
        far = torch.where(x.double().isfinite() & y.double().isfinite(), steps, far)
        far = torch.where(x.double().isnan() & y.double().isnan(), 1.0, far)
    return torch.where(same, 0.0, far)


def _ordered(x: Tensor) -> Tensor:
    """Map floating-point numbers to consecutive int64 numbers in the same order; -0.0 is one below 0.0."""
    bits = x.view(_INTEGERS[x.element_size()])  # negative numbers (first bit 1) are in reverse order
    return torch.where(bits >= 0, bits, ~(bits & torch.iinfo(bits.dtype).max)).long()
