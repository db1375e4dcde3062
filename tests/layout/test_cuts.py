"""Cuts of leaves: one rank's spans, and what moves between two layouts, without a list of all ranks."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from support.costs import cost

import fshard
from fshard.comm.mesh import axis_sizes
from fshard.layout import reshard
from fshard.layout.cuts import EVERYONE, InBlocks, Packed
from fshard.layout.layout import Layout
from fshard.sharding.sharded import whole_view

MESHES = [{"shard": 1}, {"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"replicate": 3, "shard": 2}]
PLANS: dict[str, dict[str, Any]] = {
    "root": {},
    "units": {"units": ["blocks.*"]},
    "kinds": {"units": ["blocks.*"], "whole": "norm", "frozen": "blocks.1.**"},
    "sizes": {"units": 20, "block": 8},
}


def _params(device: str = "cpu") -> dict[str, Any]:
    """Leaves of odd sizes, an empty one, one of another dtype, and a tied one."""
    head = torch.zeros(7, 3, device=device)
    blocks = [{"w": torch.zeros(5, 5, device=device), "b": torch.zeros(i, device=device)} for i in range(3)]
    half = torch.zeros(9, dtype=torch.bfloat16, device=device)
    return {"embed": head, "blocks": blocks, "norm": torch.zeros(11, device=device), "half": half, "head": head}


def _layout(sizes: dict[str, int], rank: int, **options: Any) -> Layout:
    mesh = fshard.AbstractMesh(**sizes, rank=rank)
    over = dict.fromkeys(("params_over", "grads_over", "state_over"), tuple(sizes))
    plan = fshard.make_plan(_params("meta"), mesh, **over, **options)
    return whole_view(plan, plan.params_over, range(len(plan.kinds))).layout


def _ranks(layout: Layout) -> int:
    sizes = axis_sizes(layout.mesh)
    return torch.Size(sizes[axis] for axis in layout.axes).numel()


def _derived(layout: Layout) -> dict[str, Layout]:
    """The layouts that are made of one: of some leaves, of owners, of one rank, of all."""
    some = layout.pick(layout.numbers[::2])
    axes = layout.axes
    return {
        "all": layout,
        "some": some,
        "fewer": some.pick(some.numbers[1:]),
        "owned": reshard.owned(layout, layout.mesh, axes),
        "owned some": reshard.owned(some, layout.mesh, axes),
        "last rank": reshard.on_rank(layout, layout.mesh, axes, _ranks(layout) - 1),
        "everyone": reshard.on_rank(layout, layout.mesh, axes, EVERYONE),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_every_element_is_of_one_rank_or_of_all(name: str, sizes: dict[str, int]) -> None:
    """The spans of all ranks are every leaf, end to end, and do not overlap in rows; `holders` says the same of ranks,
    and `row` and `step` of rows: otherwise elements would be lost, counted twice, or sent to a wrong rank."""
    for which, layout in _derived(_layout(sizes, 0, **PLANS[name])).items():
        cut, ranks = layout.cut, range(_ranks(layout))
        spans = [span for rank in (EVERYONE, *ranks) for span in cut.of(rank)]
        for rank in (EVERYONE, *ranks):
            of = cut.of(rank)
            assert [(s.row, s.start) for s in of] == sorted((s.row, s.start) for s in of), which
            for a, b in pairwise(of):
                assert a.row < b.row or a.start + a.numel <= b.start, which
        for number in layout.numbers:
            of_leaf = [s for s in spans if s.leaf == number]
            assert sum(s.numel for s in of_leaf) == layout.leaves[number].numel, which
            assert [s.begin for s in of_leaf[1:]] == [s.begin + s.numel for s in of_leaf[:-1]], which
            expected = [(s.rank, s.begin, s.numel) for s in of_leaf]
            assert list(cut.holders(number, ranks)) == expected, which
            for few in (ranks[1:], ranks[::2], ranks[1::2]):
                assert list(cut.holders(number, few)) == [h for h in expected if h[0] in (EVERYONE, *few)], which
            if layout.flat:
                assert {s.row for s in of_leaf} <= {cut.row(number)}, which
                step = max(cut.step(number), 1)
                starts = [] if isinstance(cut, Packed) else [s.start for s in of_leaf]
                assert not any(n % step for n in [*(s.begin for s in of_leaf), *starts]), which


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_is_sent_is_what_is_received(sizes: dict[str, int]) -> None:
    """At every stage of a move, what a rank sends is what the other receives, in the same order, and each element
    arrives where the new layout has it: each rank looks at its own part alone, so they could disagree, and hang."""
    num_ranks = torch.Size(sizes.values()).numel()
    of_rank = [_derived(_layout(sizes, rank, units=["blocks.*"], whole="norm")) for rank in range(num_ranks)]
    names = [pair for pair in product(of_rank[0], repeat=2) if ("some" in pair[0]) == ("some" in pair[1])]
    for old, new in [pair for pair in names if "fewer" not in pair]:
        routes = [reshard._make_route(layouts[old], layouts[new]) for layouts in of_rank]
        held = [{item for item in route.items if item.source == route.rank} for route in routes]
        for number in range(len(routes[0].stages)):
            peers = _peers(sizes, list(sizes)[::-1][number])
            for rank, route in enumerate(routes):
                stage = route.stages[number]
                for place, peer in enumerate(peers[rank]):
                    other = routes[peer].stages[number]
                    assert stage.sends[place] == other.recvs[peers[peer].index(rank)], (old, new)
                assert held[rank] == {item for items in stage.sends for item in items}, (old, new)
            held = [{item for items in route.stages[number].recvs for item in items} for route in routes]
        for rank, layouts in enumerate(of_rank):
            arrived = sorted((i.leaf, i.begin, i.numel) for i in held[rank])
            assert all(item.target == rank for item in held[rank])
            spans = sorted((s.leaf, s.begin, s.numel) for s in layouts[new].mine if s.numel)
            assert sum(numel for _, _, numel in arrived) == sum(numel for _, _, numel in spans), (old, new)
            for leaf, begin, numel in arrived:
                span = layouts[new].span_of[leaf]
                assert span.begin <= begin < begin + numel <= span.begin + span.numel


def _peers(sizes: dict[str, int], axis: str) -> list[list[int]]:
    """For each rank the ranks along an axis, in order."""
    numbers = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
    dim = list(sizes).index(axis)
    lines = numbers.movedim(dim, -1).reshape(-1, sizes[axis]).tolist()
    return [next(line for line in lines if rank in line) for rank in range(numbers.numel())]


def test_blocks_of_other_cuts() -> None:
    """A cut in blocks has the spans of the other cut, in blocks: otherwise scales would be those of other blocks."""
    layout = _layout({"shard": 3}, 1, block=8)
    cut = layout.cut.in_blocks(8)
    assert isinstance(cut, InBlocks)
    for number in layout.numbers:
        assert layout.cut.step(number) % 8 == 0
        blocks = sum(holder.numel for holder in cut.holders(number, range(3)))
        assert blocks == -(-layout.leaves[number].numel // 8)
    for rank in range(3):
        for span, inside in zip(layout.cut.of(rank), cut.of(rank), strict=True):
            assert (8 * inside.start, 8 * inside.begin, inside.leaf) == (span.start, span.begin, span.leaf)
            assert inside.numel == -(-span.numel // 8)
    with pytest.raises(TypeError, match="the row of a whole leaf differs from rank to rank"):
        reshard.owned(layout, layout.mesh, layout.axes).cut.row(0)


def _of_many(num_ranks: int) -> list[int]:
    """What a rank in the middle pays for what a step needs of a layout, and for a route to owners without its lists."""
    layout = _layout({"shard": num_ranks}, num_ranks // 2, units=["blocks.*"])
    owned = reshard.owned(layout, layout.mesh, layout.axes)
    return [
        cost(lambda: _layout({"shard": num_ranks}, num_ranks // 2, units=["blocks.*"]).filled),
        cost(lambda: (layout.is_cut, layout.shared_rows, layout.pick(layout.numbers[1:]).runs)),
        cost(lambda: reshard._make_route(layout, owned).items) - 11 * num_ranks,  # a list for each rank
        cost(lambda: reshard._make_route(owned, layout).items) - 11 * num_ranks,
    ]


def test_a_rank_does_not_list_all_ranks() -> None:
    """What a rank must know of a layout costs the same on 8192 ranks as on 64: a list of all ranks' spans is 3 s and
    155 MB of a model of 70B parameters, to take a norm."""
    for few, many in zip(_of_many(64), _of_many(8192), strict=True):
        assert many <= 1.1 * few + 200
