"""`fshard.show`: the numbers of pictures are those of plans, states and graphs; nothing is cut off or overlaps."""

import itertools
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import AbstractMesh, optim
from fshard.comm.mesh import coordinate
from fshard.core import tree
from fshard.pictures.charts import figure

ROOT = Path(__file__).parents[2]

STRATEGIES: dict[str, dict[str, Any]] = {
    "everything": {},
    "zero 1": {"params_over": (), "grads_over": ()},
    "hybrid": {"state_over": ("shard", "replicate"), "regather": {"blocks.0": False}},
    "kinds": {"whole": "blocks.*.norm", "frozen": "head", "policy": "compute=bf16; blocks.*.norm: compute=f32"},
}


def params(num_blocks: int = 5, tied: bool = False) -> dict[str, Any]:
    """A small model of which the blocks are equal."""
    blocks = [{"w": torch.ones(6, 5), "norm": torch.ones(3)} for _ in range(num_blocks)]
    embed = torch.ones(7, 2)
    return {"embed": embed, "blocks": blocks, "head": embed if tied else torch.ones(2, 9)}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    """A loss that reads all units."""
    y = p["embed"].sum() + sum((block["w"].sum() + block["norm"].sum()) for block in p["blocks"])
    return (x * y * p["head"].sum()).mean()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_numbers_are_those_of_the_ranks(strategy, tied):
    """A picture would say that a rank holds other intervals, or other bytes, than it does."""
    arguments = {**STRATEGIES[strategy]} if strategy != "kinds" or not tied else {"frozen": "embed"}

    def run(mesh: Any) -> tuple[Any, ...]:
        plan = fshard.make_plan(params(tied=tied), mesh, units=["blocks.*"], **arguments)
        state = fshard.init_state(fshard.shard_params(params(tied=tied), plan), optim.adamw(0.1))
        moments = sum(x.nbytes for x in tree.leaves(state.opt_state) if x.dim())
        held = sum(x.nbytes for x in state.params.tensors), moments // 2
        overs = (), plan.params_over, plan.grads_over, plan.state_over
        index = {axes: coordinate(mesh, axes) for axes in overs}
        return plan, index, held, fshard.show(state).rows, fshard.show(state.params).rows

    results = simulated(run, replicate=2, shard=3)
    plan, _, (params_held, state_held), of_state, of_params = results[0]
    rows = fshard.show(plan).rows
    assert [row.shares for row in of_state] == [row.shares for row in rows]
    assert sum(row.num_units for row in rows if row.kind == rows[-1].kind) <= len(plan.units)
    assert sum(row.elements for row in rows) == sum(slot.numel for slot in plan.slots)
    assert sum(row.shares["parameters"].nbytes for row in rows) == params_held
    assert sum(row.shares["of a rank"].nbytes for row in of_params) == params_held
    assert sum(row.shares["state"].nbytes for row in rows if "state" in row.shares) == state_held
    for row in rows:
        assert ("gradients" in row.shares) == ("frozen" not in row.kind)
        for name, share in row.shares.items():
            over = {"parameters": plan.params_over, "gradients": plan.grads_over, "state": plan.state_over}[name]
            axes = () if "whole" in row.kind else over
            for rank, (_, index, *_) in enumerate(results):
                assert [number for number, ranks in enumerate(share.holders) if rank in ranks] == [index[axes]]
            assert sorted(itertools.chain(*share.holders)) == [*range(6)]


OVERS = ("params_over", "grads_over", "state_over")
PLANS = {
    "one device": lambda: fshard.make_plan(params(), units=["blocks.*"]),
    "one unit": lambda: fshard.make_plan({"w": torch.ones(10)}, AbstractMesh(shard=2)),
    "many units": lambda: fshard.make_plan(
        [torch.ones(16 * n + 1) for n in range(99)], AbstractMesh(shard=3), units="*"
    ),
    "200 equal units": lambda: fshard.make_plan(params(200), AbstractMesh(shard=8), units=["blocks.*"]),
    "64 ranks": lambda: fshard.make_plan(params(), AbstractMesh(replicate=8, shard=8), units=["blocks.*"]),
    "4096 ranks": lambda: fshard.make_plan(params(), AbstractMesh(replicate=8, shard=512), units=["blocks.*"]),
    "a long kind": lambda: fshard.make_plan(params(), units=["blocks.*"], policy="compute=bf16,reduce=f32,grads=f64"),
    "two axes": lambda: fshard.make_plan(
        params(40),
        AbstractMesh(replicate=2, shard=4),
        units=["blocks.*"],
        **dict.fromkeys(OVERS, ("replicate", "shard")),
    ),
    "a state": lambda: fshard.init_state(fshard.shard_params(params(), PLANS["one device"]()), optim.adamw(0.1)),
    "sharded parameters": lambda: fshard.shard_params(params(), PLANS["one device"]()),
    "long names": lambda: fshard.make_plan(
        {"a_transformer": {"a_name_that_is_long": [{"w": torch.ones(8)} for _ in range(3)]}},
        AbstractMesh(replicate=2, shard=4),
        units=["a_transformer.**.w"],
        state_over=("shard", "replicate"),
        regather={"**.0.w": False},
    ),
    **{
        name: lambda arguments=arguments: fshard.make_plan(
            params(), AbstractMesh(replicate=2, shard=4), units=["blocks.*"], **arguments
        )
        for name, arguments in STRATEGIES.items()
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_cut_off(name):
    """A table would not fit a screen of 80 x 24, or text of a picture would run over its edge or into other text."""
    shown = fshard.show(PLANS[name]())
    lines = str(shown).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    svg = ET.fromstring(shown.svg())
    width, height = float(svg.get("width")), float(svg.get("height"))
    boxes = []
    for text in svg.iter("{http://www.w3.org/2000/svg}text"):
        size, left, bottom = (float(text.get(key)) for key in ("font-size", "x", "y"))
        long = 0.61 * size * len(text.text)  # of a monospaced font
        left -= long / 2 if text.get("text-anchor") == "middle" else 0
        boxes.append((left, bottom - size + 1, left + long, bottom))
        assert left >= 0, text.text
        assert left + long <= width, text.text
        assert bottom <= height, text.text
    for (x, y, right, bottom), (x2, y2, right2, bottom2) in itertools.combinations(boxes, 2):
        assert x >= right2 or x2 >= right or y >= bottom2 or y2 >= bottom
    for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x", 0)) + float(rect.get("width")) <= width


def drawn(x: Any) -> list[str]:
    """The texts of the picture of a plan or a state."""
    return [text for text in ET.fromstring(fshard.show(x).svg()).itertext() if text.strip()]


def test_what_a_bar_has_no_room_for_is_said():
    """Two axes would be cut off, or nobody would know how many ranks hold a buffer whose bars have no numbers."""
    mesh, w = AbstractMesh(replicate=2, shard=4), torch.empty(1 << 22, device="meta")
    texts = drawn(fshard.make_plan({"w": w}, mesh, state_over=("shard", "replicate")))
    assert "over shard,replicate: 2.00 MiB a rank" in texts
    assert not [text for text in texts if text.endswith("ranks")]
    assert "128 B a rank, 1/8, 64 ranks" in drawn(PLANS["64 ranks"]())


def test_the_total_of_a_long_table_is_that_of_all_units():
    """Units that do not fit the screen would be missing from the total, or from the line that stands for them."""
    plan = PLANS["many units"]()
    *_, more, total = str(plan).splitlines()
    whole = sum(unit.lengths[0] * 4 for unit in plan.units)
    assert more.split()[:2] == ["85", "more"]
    assert total.split()[1:] == [f"{whole / 2**10:.0f}", "KiB", *[f"{whole / 3 / 2**10:.0f}", "KiB"] * 3]


@pytest.mark.parametrize(
    "mesh",
    [None, AbstractMesh(shard=4), AbstractMesh(replicate=2, shard=2)],
    ids=["one device", "shard", "replicate x shard"],
)
def test_a_chart_has_the_numbers_of_the_graph(mesh):
    """A chart would show other memory than `lowered.memory()`, or collectives that start or end elsewhere."""
    plan, tx = fshard.make_plan(params(), mesh, units=["blocks.*"]), optim.adamw(0.1)
    state = fshard.eval_shape(lambda x: fshard.init_state(fshard.shard_params(x, plan), tx), params())
    lowered = fshard.jit(fshard.train_step(loss_fn, tx), bucket=0).lower(state, torch.ones(4))
    memory, shown = lowered.memory(), fshard.show(lowered)
    nodes = [node.name for node in lowered.graph.nodes]
    traffic = {(kind, unit, axis): (nbytes, count) for kind, unit, axis, nbytes, count in lowered.collectives()}
    for key, (nbytes, count) in traffic.items():
        flights = [flight for flight in shown.rows if flight[:3] == key]
        assert (sum(flight.bytes for flight in flights), len(flights)) == (nbytes, count)
    for flight in shown.rows:
        assert nodes[flight.wait].startswith("wait")
        assert flight.start < flight.wait
    above, *below = figure(memory, shown.rows).axes
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in above.collections]
    assert max(tops) * 1024 == pytest.approx(memory.peak)
    (point,) = above.lines
    assert (point.get_xdata()[0], point.get_ydata()[0] * 1024) == (nodes.index(memory.at), memory.peak)
    assert bool(below) == bool(mesh)
    if below:
        bars = [(bar.get_x(), bar.get_width()) for bar in below[0].patches]
        assert sorted(bars) == sorted((flight.start, flight.wait - flight.start) for flight in shown.rows)
        units = {label.get_text() for label in below[0].get_yticklabels()}
        assert units == {flight.unit for flight in shown.rows}
    assert f"the peak of memory is {memory.peak / 1024:.3g}"[:27] in str(shown)
    assert max(map(len, str(shown).splitlines())) <= 80


def test_a_chart_names_units_that_are_gathered_together():
    """A name of many units would be cut in its middle, and nobody would know how many they are."""
    plan, tx = fshard.make_plan(params(), AbstractMesh(shard=2), units=["blocks.*"]), optim.sgd(0.1)
    state = fshard.eval_shape(lambda x: fshard.init_state(fshard.shard_params(x, plan), tx), params())
    lowered = fshard.jit(fshard.train_step(loss_fn, tx)).lower(state, torch.ones(4))
    shown = fshard.show(lowered)
    assert shown.rows[0].unit == "+".join(["(first)", *(f"blocks.{n}" for n in range(5)), "(last)"])
    assert "all_gather      (first) and 6 more  shard" in str(shown)
    names = [label.get_text() for label in figure(lowered.memory(), shown.rows).axes[1].get_yticklabels()]
    assert names[0] == "(first) and 6 more"


def test_the_page_has_the_picture_of_its_plan():
    """docs/cli.md would show another plan than that of its table: draw it anew with python tools/pictures.py."""
    drawn = runpy.run_path(str(ROOT / "tools" / "pictures.py"))["plan_picture"]()
    assert (ROOT / "docs" / "plan.svg").read_text() == drawn


def test_a_notebook_shows_text_and_picture():
    """A notebook would show a line of names of classes for a plan, sharded parameters, or a state."""
    plan = fshard.make_plan(params(), AbstractMesh(shard=2), units=["blocks.*"])
    state = fshard.eval_shape(lambda x: fshard.init_state(fshard.shard_params(x, plan), optim.sgd(0.1)), params())
    for x in (plan, state, state.params, fshard.show(plan)):
        assert x._repr_html_().startswith("<pre>")
        assert x._repr_html_().endswith("</svg>")
    assert fshard.show(plan)._repr_svg_() == fshard.show(plan).svg()
    assert repr(fshard.show(plan)) == str(plan)
    assert (
        str(fshard.show(state)).splitlines()[0]
        == "TrainState, on this rank: params 480 B, opt_state 4 B, step 8 B, rng 8 B"
    )
    assert drawn(state)[:4] == str(fshard.show(state)).splitlines()[:4]
    with pytest.raises(TypeError, match=r"expected a Plan, a Sharded, a TrainState, or what fshard\.jit"):
        fshard.show(3)
