"""Units of several subtrees, neighbours or not (`make_plan(units=[("embed", "head"), ...])`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import rand
from support.worlds import gloo, simulated
from torch import Tensor
from torch.nn import functional as F

import fshard
from fshard import optim
from fshard.comm.ranks import tally

UNITS: dict[str, Any] = {
    "ends": [("embed", "head"), "layers.*"],
    "not neighbours": ["embed", ("layers.1", "layers.3"), "layers.*", "head"],
    "crossed": [("layers.0", "head"), ("layers.1", "embed")],
    "all layers": [("layers.*",)],
    "parts of layers": [("layers.*.w",), ("layers.*.b", "head")],
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero": {"params_over": ()},
    "tied": {"state_over": ("replicate", "shard")},
}


def params_of(dtype: torch.dtype = torch.float64, tied: bool = False) -> dict[str, Any]:
    """An embedding, four layers, and a head."""
    embed = rand(7, 5, seed=1).to(dtype)
    layers = [{"w": rand(5, 5, seed=2 + i).to(dtype), "b": rand(5, seed=20 + i).to(dtype)} for i in range(4)]
    return {"embed": embed, "layers": layers, "head": embed if tied else rand(7, 5, seed=9).to(dtype)}


def loss(p: Any, x: Tensor) -> Tensor:
    """A model of them."""
    hidden = p["embed"][x]
    for layer in p["layers"]:
        hidden = F.linear(hidden, layer["w"], layer["b"]).tanh()
    return F.linear(hidden, p["head"]).square().mean()


def train(mesh: Any, units: Any, options: Any, tied: bool, jitted: bool) -> tuple[Any, list[str]]:
    """Parameters and loss after three steps, and the labels of the gathers."""
    params = params_of(tied=tied)
    tx = optim.adamw(lr=0.01)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, units=units, **options)), tx)
    step: Any = fshard.train_step(loss, tx)
    step = fshard.jit(step, backend="eager") if jitted else step
    with tally() as calls:
        for number in range(3):
            state, metrics = step(state, torch.arange(6).add(number + 2 * sum(mesh.get_coordinate())) % 7)
    return (fshard.gather_params(state.params), metrics["loss"]), [call.label for call in calls.select("all_gather")]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("units", UNITS)
def test_training_is_that_of_other_units(units: str, strategy: str, jitted: bool) -> None:
    """Which leaves travel together changes no value."""
    world, arguments = {"replicate": 1 + (strategy == "tied")}, (STRATEGIES[strategy], strategy == "tied", jitted)
    (expected, _), (got, _) = (simulated(train, x, *arguments, **world)[0] for x in (None, UNITS[units]))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_subtrees_of_one_unit_travel_in_one_message() -> None:
    """Of two, an embedding and a head would be two messages; gathered for the head, both stay for the backward."""
    for run in (simulated, gloo):
        _, labels = run(train, UNITS["ends"], {}, False, False)[0]
        middle = [f"layers.{i}" for i in range(4)]
        assert labels[: 2 + 2 * 4] == ["embed and head", *middle, "embed and head", *reversed(middle)]


def names_of(units: Any, **options: Any) -> dict[str, tuple[str, ...]]:
    """The units of a plan, and the subtrees of which each consists."""
    return {unit.name: unit.joined for unit in fshard.make_plan(params_of(), units=units, **options).units}


def test_names() -> None:
    """A unit is called by its subtrees, for `regather`, `prefetch` and errors; an inner subtree may be its own unit."""
    layers = tuple(f"layers.{i}" for i in range(4))
    assert names_of([("layers.*",)]) == {"(first)": (), " and ".join(layers): layers, "(last)": ()}
    assert names_of([("embed", "head"), "layers.*"], bucket=1 << 20) == {
        "embed and head": ("embed", "head"),
        "layers.0 to layers.3": layers,
    }
    assert names_of([("head",), "**.w"]).keys() == {"(first)", "(root)", *(f"{x}.w" for x in layers), "head"}
    plan = fshard.make_plan(params_of(), units=UNITS["ends"], regather={"embed and head": False})
    assert [unit.regather for unit in plan.units] == ["False", "True", "True", "True", "True"]


@pytest.mark.parametrize("units", UNITS)
def test_a_unit_stays_by_each_of_its_names(units: str) -> None:
    """`regather` would take the name of a subtree for one that no unit has, where `prefetch` takes it."""
    for name, subtrees in names_of(UNITS[units]).items():
        for called in (name, *subtrees):
            plan = fshard.make_plan(params_of(), units=UNITS[units], regather={called: False})
            assert {unit.name for unit in plan.units if unit.regather == "False"} == {name}, called


def test_two_choices_for_one_unit() -> None:
    """The second would be lost without a word."""
    with pytest.raises(ValueError, match="the pattern 'head' chooses no unit: the patterns before it match all"):
        fshard.make_plan(params_of(), units=UNITS["ends"], regather={"embed": False, "head": True})


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([("embed", "layers.0"), ("layers.*",)], ValueError, "'layers.0' fits two tuples of patterns"),
    ([("embed", "nothing")], ValueError, "the pattern 'nothing' matches nothing"),
    ([("embed", 3)], TypeError, "units"),
    ([["embed", "head"]], TypeError, "units"),
]


@pytest.mark.parametrize(("units", "error", "words"), WRONG, ids=str)
def test_what_is_no_unit(units: Any, error: type[Exception], words: str) -> None:
    """A subtree that would be in two units, and patterns that are none."""
    make: Callable[..., Any] = fshard.make_plan
    with pytest.raises(error, match=words):
        make(params_of(), units=units)
