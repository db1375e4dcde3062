"""Rows between rules: what every move gives, and that its transpose is the move between the duals."""

import math
from itertools import permutations, product
from typing import Any

import pytest
import torch
from support.worlds import simulated
from torch import Tensor

from fshard.comm.reduction import DEFAULT, TREE, Reduction
from fshard.layout.rules import Rule, reshard, route

SIZES = {"replicate": 2, "shard": 3}
AXES = tuple(SIZES)
N = 12  # elements of a row


def rules() -> list[Rule]:
    """All rules on a mesh of two axes."""
    found = []
    for over in ((), *permutations(AXES, 1), *permutations(AXES, 2)):
        left = [axis for axis in AXES if axis not in over]
        found += [Rule(over, tuple(sums)) for sums in ((), *permutations(left, 1), *permutations(left, 2))]
    return found


def routes(old: Rule, new: Rule) -> bool:
    """Whether a row can go from one rule to another by collectives."""
    try:
        route(old, new, AXES)
    except ValueError:
        return False
    return True


PAIRS = [(old, new) for old, new in product(rules(), rules()) if routes(old, new)]


def whole(x: Tensor, rule: Rule) -> Tensor:
    """The row that `x` is a part of, by arithmetic alone, from the parts of all ranks, (ranks, n)."""
    parts = x.view(*SIZES.values(), -1)
    names = list(AXES)
    for axis in AXES:
        if axis in rule.sums:
            parts = parts.sum(names.index(axis), keepdim=True)
        elif axis not in rule.over:  # every rank has the same
            parts = parts.narrow(names.index(axis), 0, 1)
    order = [*(names.index(axis) for axis in rule.over), *(names.index(a) for a in AXES if a not in rule.over), 2]
    return parts.permute(order).reshape(-1)


def own(rule: Rule, mesh: Any, seed: int) -> Tensor:
    """This rank's part of a row by a rule; ranks with copies have the same."""
    different = [axis for axis in AXES if axis in rule.over + rule.sums]
    number = sum(mesh.get_local_rank(axis) * 7**i for i, axis in enumerate(different))
    generator = torch.Generator().manual_seed(100 * seed + number)
    length = N // math.prod(SIZES[axis] for axis in rule.over)
    return torch.randint(-8, 9, (length,), generator=generator).double()  # sums of integers have no order


@pytest.mark.parametrize("by", [DEFAULT, TREE], ids=["rank order", "tree"])
def test_every_move_gives_the_row_it_was_given(by: Reduction) -> None:
    """A strategy whose rules meet in a way that no other has would train on other values."""
    assert len(PAIRS) == 63

    def moved(mesh: Any) -> list[tuple[Tensor, Tensor]]:
        parts = [own(old, mesh, i) for i, (old, _) in enumerate(PAIRS)]
        lengths = [N // math.prod(SIZES[axis] for axis in new.over) for _, new in PAIRS]
        places = [torch.empty(length, dtype=torch.float64) for length in lengths]
        for (old, new), x, out in zip(PAIRS, parts, places, strict=True):
            assert torch.equal(reshard(x, old, new, mesh, out=out, by=by).wait(), out)
            assert torch.equal(reshard(x, old, new, mesh, by=by).wait(), out)
        return list(zip(parts, places, strict=True))

    results = simulated(moved, **SIZES)
    for (old, new), pairs in zip(PAIRS, zip(*results, strict=True), strict=True):
        before, after = (torch.stack(x) for x in zip(*pairs, strict=True))
        assert torch.equal(whole(before, old), whole(after, new)), (old, new)


def test_the_transpose_of_a_move_goes_between_the_duals() -> None:
    """A gradient would belong to another function than the one that was computed."""

    def dots(mesh: Any) -> list[tuple[Tensor, Tensor]]:
        products = []
        for i, (old, new) in enumerate(PAIRS):
            back = new.dual(AXES), old.dual(AXES)
            if routes(*back):
                x, y = own(old, mesh, i), own(back[0], mesh, i + 1000)
                forth, transposed = reshard(x, old, new, mesh).wait(), reshard(y, *back, mesh).wait()
                products.append((forth @ y, x @ transposed))
        return products

    results = simulated(dots, **SIZES)
    assert len(results[0]) == 49
    for pairs in zip(*results, strict=True):
        assert sum(a for a, _ in pairs) == sum(b for _, b in pairs)


def test_what_has_no_route_is_an_error() -> None:
    """An interval of another order of axes would be taken for this rank's."""
    for old, new in ((Rule(("shard",)), Rule(("replicate",))), (Rule(), Rule((), ("shard",)))):
        with pytest.raises(ValueError, match="a row has no route from Rule"):
            route(old, new, AXES)
