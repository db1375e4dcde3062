"""Losses with `remat` in steps of every kind: they train as without it, gather as often, and need less memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import func_losses
from support.func_cases import on_ranks, rank_of, sharded
from support.func_losses import LOSSES, batch, params
from support.steps import QUIET
from torch import Tensor

import fshard
from fshard import remat, tree

pytestmark = pytest.mark.filterwarnings(QUIET)
SGD = fshard.optim.sgd(0.1, momentum=0.9)
Net = Callable[[Any, Tensor], Tensor]


def by_arguments(p: Any, x: Tensor) -> Tensor:
    """Layers are read outside and given to the function; what lies in the root comes from outside."""
    h = remat(lambda x: torch.tanh(x @ p["embed"] + p["shift"]))(x)
    for layer in p["layers"]:
        h = remat(lambda h, layer: h + p["gain"] * torch.tanh(h @ layer["w"] + layer["b"]))(h, layer)
    return remat(lambda h, head: h @ head)(h, p["head"])


def by_number(p: Any, x: Tensor) -> Tensor:
    """Layers are read inside of the function."""

    def layer(h: Tensor, number: int) -> Tensor:
        layer = p["layers"][number]
        return h + p["gain"] * torch.tanh(h @ layer["w"] + layer["b"])

    h = torch.tanh(x @ p["embed"] + p["shift"])
    for number in range(2):
        h = remat(layer)(h, number)
    return h @ p["head"]


def at_once(p: Any, x: Tensor) -> Tensor:
    """One function reads all units, which come as an argument."""
    return remat(plain)(p, x)


def around(p: Any, x: Tensor) -> Tensor:
    """Units are read inside and outside, before and after, and one function runs in another."""
    first = p["layers"][0]

    def layer(h: Tensor, number: int) -> Tensor:
        shift = first["b"] if number == 0 else p["layers"][number]["b"]
        return h + p["gain"] * remat(lambda h: torch.tanh(h @ p["layers"][number]["w"] + shift))(h)

    h = remat(lambda: torch.tanh(x @ p["embed"] + p["shift"]))()
    for number in range(2):
        h = remat(layer)(h, number)
    return (h + 0 * p["layers"][0]["w"].sum()) @ p["head"]


plain = func_losses.net
NETS: dict[str, Net] = {f.__name__: f for f in (by_arguments, by_number, at_once, around)}


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees."""
    return max(float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def trained(mesh: Any, loss: Any, strategy: str, jitted: bool, **options: Any) -> Any:
    """The gathered parameters and the metrics of two steps."""
    step = fshard.train_step(loss, SGD, clip_norm=None if "in_backward" in options else 1.0, **options)
    step = fshard.jit(step, backend="eager", donate=options.get("donate", False)) if jitted else step
    state, rows = fshard.init_state(sharded(mesh, strategy), SGD, seed=7), []
    for number in range(2):
        state, metrics = step(state, batch(number, rank_of(mesh), even="accumulate" in options))
        rows.append([metrics["loss"], metrics["grad_norm"]])
    return fshard.gather_params(state.params), rows


def check_trains(monkeypatch: Any, world: str, strategy: str, loss: Any, net: str, **options: Any) -> None:
    """Compare a step with `remat` to the same without."""
    results = []
    for function in (plain, NETS[net]):
        monkeypatch.setattr(func_losses, "net", function)
        results.append(on_ranks(world, partial(trained, loss=loss, strategy=strategy, **options)))
    assert apart(*results) < 1e-10
    assert apart(results[0][0][0], params()) > 1e-3  # it has trained


@pytest.mark.law
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("world", "strategy"), [("None", "full"), ("2", "full"), ("3", "keep"), ("2x2", "wide")])
def test_losses_train_as_without(
    monkeypatch: Any, world: str, strategy: str, name: str, net: str, jitted: bool
) -> None:
    """A gradient of a loss with transforms inside, on any ranks, would lack what `remat` has hidden."""
    if jitted and world == "2x2":
        pytest.skip("it takes long")
    check_trains(monkeypatch, world, strategy, LOSSES[name], net, jitted=jitted)


def simple(p: Any, b: dict[str, Tensor]) -> fshard.Mean:
    """A loss without transforms."""
    return fshard.Mean((func_losses.net(p, b["x"]) - b["y"]).square().sum(), len(b["x"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "donate": {"donate": True},
    "in_backward": {"in_backward": True, "donate": True},
    "accumulate": {"accumulate": 2},
    "keep_gathered": {"accumulate": 2, "keep_gathered": True},
    "tree": {"reduction": "tree", "accumulate": 2},
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("world", "strategy"), [("None", "full"), ("2", "full"), ("2", "keep"), ("2", "ddp"), ("3", "zero2")]
)
def test_steps_of_every_kind(monkeypatch: Any, world: str, strategy: str, option: str, net: str, jitted: bool) -> None:
    """What a step does beside its loss would not fit with units that a function reads."""
    if world == "3" and (option == "tree" or jitted):
        pytest.skip("no power of two, or it takes long")
    check_trains(monkeypatch, world, strategy, simple, net, jitted=jitted, **OPTIONS[option])
