"""Objects that a function of a graph hands on to another one: a change of an attribute is noticed."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard
from fshard import optim

X = torch.ones(2, dtype=torch.float64)


RATE = operator.attrgetter("rate")


class Plain:
    """An object of a user's class."""

    shared = 2.0

    def __init__(self, inner: Any = None):
        self.rate, self.inner = 2.0, inner

    def inside(self) -> Any:
        """An object by a method."""
        return self.inner

    @property
    def computed(self) -> float:
        """A value by a property."""
        return self.rate


@dataclass
class Fields(Plain):
    """The same, as a dataclass."""

    inner: Any = None
    rate: float = 2.0
    items: list[Any] = field(default_factory=list)


def scaled(x: Tensor, config: Any) -> Tensor:
    """A helper."""
    return x * config.rate


def alias(x: Tensor, config: Any) -> Tensor:
    """A local variable has the object."""
    inner = config.inner
    return x * inner.rate


WAYS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "helper": scaled,
    "helper of an attribute": lambda x, config: scaled(x, config.inner),
    "attribute of an attribute": lambda x, config: x * config.inner.rate,
    "alias": alias,
    "partial": lambda x, config: partial(scaled, config=config)(x),
    "list": lambda x, config: scaled(x, [config.inner][0]),
    "method's result": lambda x, config: x * config.inside().rate,
    "property": lambda x, config: x * config.computed,
    "class": lambda x, config: x * type(config).shared,
    "class by name": lambda x, config: x * config.__class__.shared,
    "getattr": lambda x, config: x * getattr(config, "rate"),  # noqa: B009
    "attrgetter": lambda x, config: x * operator.attrgetter("inner.rate")(config),
    "global attrgetter": lambda x, config: x * RATE(config),
    "dict": lambda x, config: scaled(x, {"a": config}["a"]),
    "unpacked": lambda x, config: x * [y.rate for y in (config, config.inner)][1],
    "vmap": lambda x, config: torch.func.vmap(lambda y: y * config.rate)(x),
    "remat": lambda x, config: fshard.remat(lambda y: y * config.rate)(x),
}


def change(config: Any) -> None:
    """Another value of everything that a way reads."""
    config.rate = config.inner.rate = 5.0
    type(config).shared = 5.0


class Slots:
    """An object without a dict."""

    __slots__ = ("inner", "rate")
    shared = 2.0
    inside = Plain.inside
    computed = Plain.computed

    def __init__(self, inner: Any):
        self.rate, self.inner = 2.0, inner


KINDS: dict[str, Callable[[], Any]] = {
    "object": lambda: Plain(Plain()),
    "dataclass": lambda: Fields(Plain()),
    "slots": lambda: Slots(Slots(None)),
    "namespace in an object": lambda: Plain(SimpleNamespace(rate=2.0)),
    "object in a namespace in a list": lambda: Plain([SimpleNamespace(rate=2.0, inner=Plain())][0].inner),
}


class Owner:
    """An object whose method is jitted."""

    def __init__(self, way: str, config: Any):
        self.way, self.config = way, config

    def run(self, x: Tensor) -> Tensor:
        """The object itself is handed on."""
        me = self
        return WAYS[me.way](x, me.config)


PLACES: dict[str, Callable[[str, Any], Callable[[Tensor], Tensor]]] = {
    "closure": lambda way, config: lambda x: WAYS[way](x, config),
    "default": lambda way, config: lambda x, given=config: WAYS[way](x, given),
    "partial": lambda way, config: partial(WAYS[way], config=config),
    "self": lambda way, config: Owner(way, config).run,
    "list": lambda way, config: (lambda them: lambda x: WAYS[way](x, them[1]))([0, config]),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_changed_attribute_is_seen(monkeypatch: Any, way: str, kind: str, place: str) -> None:
    """A graph would keep the first value of a config that a loss gives to a helper, without a word."""
    config = KINDS[kind]()
    monkeypatch.setattr(type(config), "shared", 2.0)
    jitted = fshard.jit(PLACES[place](way, config), backend="eager")
    assert torch.equal(jitted(X), 2 * X)
    assert torch.equal(jitted(X), 2 * X)
    change(config)
    assert torch.equal(jitted(X), 5 * X)
    assert jitted.explain().count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_argument_is_seen(monkeypatch: Any, kind: str) -> None:
    """The object is the same one, and a graph would be run that has its first value."""
    config, inner = KINDS[kind](), KINDS[kind]()
    config.inner = inner
    jitted = fshard.jit(lambda x, config: x * config.inner.rate, backend="eager")
    for inner.rate in (2.0, 5.0, 5.0):
        assert torch.equal(jitted(X, config), inner.rate * X)
    assert jitted.explain().count("\n") == 1


def test_of_a_step() -> None:
    """A schedule of a penalty's weight would stay at its first value."""
    config = Plain()

    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["w"] * x).sum() + scaled(p["w"].square().sum(), config)

    tx, params = optim.sgd(0.1), {"w": X}
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    step = fshard.train_step(loss, tx)
    jitted = fshard.jit(step, backend="eager")
    for config.rate in (2.0, 3.0, 3.0):
        assert jitted(state, X)[1]["loss"].item() == step(state, X)[1]["loss"].item() == 2 + 2 * config.rate


def test_what_is_not_read_may_change() -> None:
    """A counter beside the values that are read would make a graph anew at each call."""
    config, calls = Plain(Plain()), []

    def fn(x: Tensor) -> Tensor:
        calls.append(1)
        return scaled(x, config)

    jitted = fshard.jit(fn, backend="eager")
    for config.seen in range(3):
        jitted(X)
    assert len(calls) == 1
