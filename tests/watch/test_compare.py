"""Whether two trees are equal, and which differences the error names."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Norm, Pair, rand
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard.testing import assert_trees_equal
from fshard.watch.compare import distance

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2)
WIDTHS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def error(got: Any, expected: Any, **kw: Any) -> str:
    """The message of the AssertionError for two trees that differ."""
    with pytest.raises(AssertionError) as caught:
        assert_trees_equal(got, expected, **kw)
    return str(caught.value)


@pytest.mark.parametrize("dtype", FLOATS)
def test_units_in_the_last_place_are_steps_from_number_to_number(dtype):
    """`ulps` counts the numbers between two values, in every dtype: otherwise a tolerance would mean something else."""
    bits = {1: torch.int8, 2: torch.int16}.get(dtype.itemsize)
    if bits is None:
        one = torch.tensor([1.0, -1.0, 0.0, torch.finfo(dtype).max], dtype=dtype)
        up = torch.nextafter(one, torch.tensor(math.inf, dtype=dtype))
        assert distance(one, up)[:3].tolist() == [1.0, 1.0, 1.0]
        assert distance(one[:2], one[:2].flip(0)).tolist() == [2.0 * one[:1].view(WIDTHS[dtype]).item() + 1] * 2
        return
    info = torch.iinfo(bits)
    every = torch.arange(info.min, info.max + 1).to(bits).view(dtype)
    numbers = every[every.double().isfinite()]
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i].item(), math.copysign(1, numbers[i].item())))
    numbers = numbers[order]
    expected = torch.arange(len(numbers), dtype=torch.float64)
    for at in (0, len(numbers) // 2, len(numbers) - 1):
        assert torch.equal(distance(numbers[at].expand(len(numbers)), numbers), (expected - at).abs())


@settings(max_examples=50, derandomize=True, database=None)
@given(st.floats(), st.floats())
def test_the_distance_of_any_two_numbers(a, b):
    """A distance is 0 for the same bits only, symmetric, and finite between numbers: else wrong values would pass."""
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (a, b))
    far = distance(x, y).item()
    assert far == distance(y, x).item()
    assert (far == 0) == bool(x.view(torch.int64) == y.view(torch.int64))
    assert math.isfinite(far) == (far <= 1 or (math.isfinite(a) and math.isfinite(b)))


def test_two_nans_are_one_apart():
    """NaNs with other bits are 1 apart, and infinitely far from numbers: otherwise a NaN would pass for a number."""
    nans = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000], dtype=torch.int32).view(torch.float32)
    assert distance(nans, nans[:1].expand(3)).tolist() == [0.0, 1.0, 1.0]
    assert distance(nans, torch.tensor([1.0, math.inf, 0.0])).tolist() == [math.inf] * 3
    assert_trees_equal(nans, nans[:1].expand(3), ulps=1)


def trees(mesh: Any) -> None:
    """A training state on a rank equals its clone, with leaves that are no tensors."""
    plan = fshard.make_plan({"w": torch.ones(5), "n": torch.arange(3)}, mesh)
    tx = fshard.optim.by_label({0: fshard.optim.adamw(0.1)}, lambda path, leaf: 0)
    sharded = fshard.shard_params({"w": torch.ones(5), "n": torch.arange(3)}, plan)
    state = fshard.init_state(sharded, tx, fshard.DynamicLossScale(), extra={"name": "x", "rate": math.nan})
    assert_trees_equal(state, fshard.tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state))


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_equal_trees_are_equal(shard):
    """Trees with the same bits are equal, whatever their nodes and leaves: otherwise right programs would fail."""
    simulated(trees, shard=shard)
    nan = torch.tensor([math.nan, -math.inf, -0.0])
    one = torch.ones(2, dtype=torch.complex64)
    for tree in (Norm(nan, Pair(None, torch.empty(0))), [one, one.conj()], torch.ones(2), torch.eye(2).to_sparse(), {}):
        assert_trees_equal(tree, fshard.tree.map(torch.clone, tree))
    assert_trees_equal(torch.empty(3, device="meta"), torch.empty(3, device="meta"))


def test_the_worst_element_is_named():
    """The error names leaf and index of the worst element, and both values: otherwise users would have to search."""
    x = {"a": rand(3, 4, seed=1), "b": [torch.ones(2), torch.zeros(2, 2)]}
    y = {"a": x["a"].clone(), "b": [x["b"][0], torch.tensor([[0.0, 0.0], [0.0, 1.0]])]}
    y["a"][1, 2] = torch.nextafter(y["a"][1, 2], torch.tensor(9.0, dtype=torch.float64))
    text = error(x, y)
    assert text.startswith("trees differ in 2 of 18 elements, 2 of 3 leaves (allowed: no bit). The worst is leaf 'b.1'")
    assert "at [1, 1]: got 0.0, expected 1.0 (1065353216 units in the last place, relative 1.0e+00)" in text
    y["b"][1][1, 1] = -0.0
    assert "got 0.0, expected -0.0 (1 units in the last place" in error(x["b"], y["b"])
    assert_trees_equal(x, y, ulps=1)
    y["a"][1, 2] += 1e-3
    assert "(allowed: 7 units in the last place). The worst is leaf 'a' at [1, 2]" in error(x, y, ulps=7)


def piece(mesh: Any) -> None:
    """Compare states that differ in this rank's shard, in the padding, and in the plan."""
    whole = {"u": torch.ones(8), "w": torch.ones(5)}
    plan = fshard.make_plan(whole, mesh, units=["w"])
    one, two = (fshard.shard_params(whole | {"w": w}, plan) for w in (torch.ones(5), torch.ones(5).cumsum(0)))
    rank = mesh.get_local_rank("shard")
    worst = ["leaf 'params.w' at [3]: got 1.0, expected 4.0 (", "leaf 'params.w' at [0]: got 1.0, expected 5.0 ("][rank]
    assert worst in error({"params": one}, {"params": two})
    same = fshard.tree.map(torch.clone, one)
    same.tensors[0][-1] = 3.0
    assert ("leaf '(padding of row 0)' at [2]: got" if rank else "leaf 'w' at [3]: got") in error(same, one)
    other = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
    assert "its plan is another: expected leaf 'u' float32[8] in unit '(root)'" in error(one, other)


def test_sharded_trees_are_compared_leaf_by_leaf():
    """A difference of shards is named by the path of the parameter: otherwise users would see an offset in a buffer."""
    simulated(piece, shard=2)


@pytest.mark.parametrize(
    ("got", "expected", "text"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "it lacks ['b'] and has ['a'] besides"),
        ({"a": torch.ones(1)}, {"a": None}, "expected 0 leaves, got 1; it lacks nothing and has ['a'] besides"),
        ([torch.ones(1)], (torch.ones(1),), "its nodes are others: expected PyTreeSpec((*,)"),
        (torch.ones(1), torch.ones(2), "leaf '': expected float32[2] on cpu, got float32[1] on cpu"),
        ({"x": torch.ones(1)}, {"x": torch.ones(1).double()}, "leaf 'x': expected float64[1] on cpu, got float32[1]"),
        ([torch.ones(1)], [torch.ones(1, device="meta")], "leaf '0': expected float32[1] on meta, got float32[1] on"),
        ([1], [1.0], "leaf '0': expected a leaf of class float, got a leaf of class int"),
        (["a"], ["b"], "leaf '0': got 'a', expected 'b' (different)"),
        ([1.0], [1.5], "leaf '0': got 1.0, expected 1.5 ("),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "leaf '' at [1]: got 2, expected 3 (different)"),
        (torch.tensor([True]), torch.tensor([False]), "got True, expected False (different)"),
        (torch.tensor(math.nan), torch.tensor(1.0), "got nan, expected 1.0 (not comparable)"),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), "leaf '' at [0]: got (1+2j), expected (1+3j) ("),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]), "leaf '' at [0]: got (1-2j), expected (1+2j) ("),
        (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), "leaf '' at [0, 0]: got 1.0, expected 0.0 ("),
    ],
)
def test_what_else_differs(got, expected, text):
    """A difference of structure, shape, dtype, device or class is named: otherwise it would pass, or be a puzzle."""
    assert text in error(got, expected)
    assert text in error(got, expected, ulps=5)
