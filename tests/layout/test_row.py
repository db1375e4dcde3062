"""Rows: the spans of one rank, and what moves between two layouts, without a list of all ranks."""

import sys
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from support.costs import cost

import fshard
from fshard.comm.mesh import axis_sizes, digits
from fshard.layout.layout import Layout
from fshard.layout.row import Row
from fshard.sharding.sharded import whole_view
from fshard.whole import moves

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
    some, axes = layout.pick(layout.numbers[::2]), layout.axes
    return {
        "all": layout,
        "some": some,
        "fewer": some.pick(some.numbers[1:]),
        "owned": moves.owned(layout, layout.mesh, axes),
        "owned some": moves.owned(some, layout.mesh, axes),
        "last rank": moves.on_rank(layout, _ranks(layout) - 1),
        "everyone": moves.on_rank(layout),
    }


def _check_row(row: Row[int], sizes: dict[str, int], packed: bool) -> None:
    """The spans of all shards are each leaf, end to end, and do not overlap; `shards_of` and `step` say the same."""
    shards = [*product(*(range(sizes[axis]) for axis in row.rule.over))]
    spans = [[*row.spans(number)] for number in range(len(shards))]
    for of_shard in spans:
        assert all(a.start + a.numel <= b.start for a, b in pairwise(of_shard))
        assert all(span.start + span.numel <= row.length for span in of_shard)
    for leaf, numel in zip(row.leaves, row.numels, strict=True):
        of_leaf = [(at, x) for at, of_shard in zip(shards, spans, strict=True) for x in of_shard if x.leaf == leaf]
        assert sum(span.numel for _, span in of_leaf) == numel
        assert [b.begin for _, b in of_leaf[1:]] == [a.begin + a.numel for _, a in of_leaf[:-1]]
        for fixed in ({}, *({axis: n} for axis in row.rule.over for n in range(sizes[axis]))):
            expected = [
                (at, x) for at, x in of_leaf if fixed.items() <= dict(zip(row.rule.over, at, strict=True)).items()
            ]
            assert [*row.shards_of(leaf, sizes, fixed)] == expected
        step = max(row.step(leaf, packed), 1)
        starts = [] if packed else [row.start + span.start for _, span in of_leaf]
        assert not any(n % step for n in [*(span.begin for _, span in of_leaf), *starts])


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_every_element_is_of_one_shard(name: str, sizes: dict[str, int]) -> None:
    """The shards of a row are every leaf, end to end, and the spans of a rank do not overlap in its tensors: otherwise
    elements would be lost, counted twice, or sent to a wrong rank."""
    for rank in range(torch.Size(sizes.values()).numel()):
        for which, layout in _derived(_layout(sizes, rank, **PLANS[name])).items():
            assert sorted(layout.row_of) == sorted(layout.numbers), which
            assert [*layout.mine] == sorted(layout.mine, key=lambda span: (span.tensor, span.start)), which
            for a, b in pairwise(layout.mine):
                assert a.tensor < b.tensor or a.start + a.numel <= b.start, which
            for row in layout.rows if rank == 0 else ():
                _check_row(row, sizes, layout.packed)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_is_sent_is_what_is_received(sizes: dict[str, int]) -> None:
    """At every stage of a move, what a rank sends is what the other receives, in the same order, and each element
    arrives where the new layout has it: each rank looks at its own part alone, so they could disagree, and hang."""
    num_ranks = torch.Size(sizes.values()).numel()
    of_rank = [_derived(_layout(sizes, rank, units=["blocks.*"], whole="norm")) for rank in range(num_ranks)]
    names = [pair for pair in product(of_rank[0], repeat=2) if ("some" in pair[0]) == ("some" in pair[1])]
    for old, new in [pair for pair in names if "fewer" not in pair]:
        routes = [moves._find_moves(layouts[old], layouts[new]) for layouts in of_rank]
        held = [{item for item in route.items if item.source == route.here} for route in routes]
        for number in range(len(routes[0].stages)):
            peers = _peers(sizes, list(sizes)[::-1][number])
            for rank, route in enumerate(routes):
                _, sends, _ = route.stages[number]
                for place, peer in enumerate(peers[rank]):
                    _, _, received = routes[peer].stages[number]
                    assert sends[place] == received[peers[peer].index(rank)], (old, new)
                assert held[rank] == {item for items in sends for item in items}, (old, new)
            held = [{item for items in route.stages[number][2] for item in items} for route in routes]
        for rank, layouts in enumerate(of_rank):
            arrived = sorted((i.leaf, i.begin, i.numel) for i in held[rank])
            here = dict(zip(sizes, routes[rank].here, strict=True))
            assert [*here.values()] == digits(rank, [*sizes.values()])
            assert all(item.target == routes[rank].here for item in held[rank])
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


def test_rows_in_blocks() -> None:
    """A row in blocks has the spans of the other row, in blocks: otherwise scales would be those of other blocks."""
    layout = _layout({"shard": 3}, 1, block=8)
    for row in layout.rows:
        in_blocks, sizes = replace(row, block=8), {"shard": 3}
        for number, numel in zip(row.leaves, row.numels, strict=True):
            assert row.step(number, packed=False) % 8 == 0
            assert sum(span.numel for _, span in in_blocks.shards_of(number, sizes, {})) == -(-numel // 8)
        for shard in range(row.shards):
            for span, inside in zip(row.spans(shard), in_blocks.spans(shard), strict=True):
                assert (8 * inside.start, 8 * inside.begin, inside.leaf) == (span.start, span.begin, span.leaf)
                assert inside.numel == -(-span.numel // 8)


def _of_many(num_ranks: int) -> list[int]:
    """What a rank in the middle pays for what a step needs of a layout, and for a route to owners without its lists."""
    layout = _layout({"shard": num_ranks}, num_ranks // 2, units=["blocks.*"])
    owned = moves.owned(layout, layout.mesh, layout.axes)
    return [
        cost(lambda: _layout({"shard": num_ranks}, num_ranks // 2, units=["blocks.*"]).filled),
        cost(lambda: (layout.counted, layout.cut_axes, layout.pick(layout.numbers[1:]).runs)),
        cost(lambda: moves._find_moves(layout, owned).items) - 11 * num_ranks,  # a list for each rank
        cost(lambda: moves._find_moves(owned, layout).items) - 11 * num_ranks,
    ]


def test_a_rank_does_not_list_all_ranks() -> None:
    """What a rank must know of a layout costs the same on 8192 ranks as on 64: a list of all ranks' spans is 3 s and
    155 MB of a model of 70B parameters, to take a norm."""
    for few, many in zip(_of_many(64), _of_many(8192), strict=True):
        assert many <= 1.1 * few + 200


def test_a_graph_lays_out_its_leaves_once() -> None:
    """A step of many small units would spend its time on the places of their leaves."""

    def rows() -> int:
        made = list[object]()
        sys.setprofile(lambda frame, event, _: made.append(frame.f_code) if event == "call" else None)
        try:
            torch.ops.fshard.put(place, [torch.ones(2)], [1], False)
        finally:
            sys.setprofile(None)
        return made.count(Row.__init__.__code__)

    place = torch.empty(4)
    rows()
    assert (rows(), place.tolist()) == (0, [0.0, 1.0, 1.0, 0.0])
