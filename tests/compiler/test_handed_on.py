"""Objects that a function of a graph hands on to another one: a change of an attribute is noticed."""

import operator
from collections import ChainMap, OrderedDict, UserDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

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
    if not isinstance(config, type | ModuleType):
        type(config).shared = 5.0


class Slots:
    """An object without a dict."""

    __slots__ = ("inner", "rate")
    shared = 2.0
    inside = Plain.inside
    computed = Plain.computed

    def __init__(self, inner: Any):
        self.rate, self.inner = 2.0, inner


def class_of() -> Any:
    """A class that is a config itself, of classes."""
    return type("Config", (), {"rate": 2.0, "shared": 2.0, "inner": type("Inner", (), {"rate": 2.0})})


def module_of() -> Any:
    """A module that is a config."""
    config: Any = ModuleType("config")
    config.rate, config.inner = 2.0, class_of()
    return config


KINDS: dict[str, Callable[[], Any]] = {
    "object": lambda: Plain(Plain()),
    "dataclass": lambda: Fields(Plain()),
    "slots": lambda: Slots(Slots(None)),
    "namespace in an object": lambda: Plain(SimpleNamespace(rate=2.0)),
    "class": class_of,
    "module": module_of,
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
    **{
        f"in a {name}": lambda way, config, make=make: (lambda box: lambda x: WAYS[way](x, make[1](box)))(
            make[0](config)
        )
        for name, make in {
            "list": (lambda x: [0, x], lambda box: box[1]),
            "dict": (lambda x: {"a": x}, lambda box: box["a"]),
            "NamedTuple": (lambda x: Named(x), lambda box: box.config),
            "list of a class": (lambda x: Listed([x]), lambda box: box[0]),
            "dict of a class": (lambda x: Mapped(a=x), lambda box: box["a"]),
            "OrderedDict": (lambda x: OrderedDict(a=x), lambda box: box["a"]),
            "UserDict": (lambda x: UserDict(a=x), lambda box: box["a"]),
            "ChainMap": (lambda x: ChainMap({"a": x}), lambda box: box["a"]),
            "mappingproxy": (lambda x: MappingProxyType({"a": x}), lambda box: box["a"]),
            "ContextVar": (lambda x: variable_of(x), lambda box: box.get()),
        }.items()
    },
}


class Named(NamedTuple):
    """A tuple by names."""

    config: Any


class Listed(list[Any]):
    """A list of the user's."""


class Mapped(dict[str, Any]):
    """A dict of the user's."""


def variable_of(x: Any) -> ContextVar[Any]:
    """A variable of the context that has a value."""
    variable = ContextVar[Any]("variable")
    variable.set(x)
    return variable


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_a_changed_attribute_is_seen(monkeypatch: Any, way: str, kind: str, place: str) -> None:
    """A graph would keep the first value of a config that a loss gives to a helper, without a word."""
    config = KINDS[kind]()
    if isinstance(config, type | ModuleType):
        if not {"class", "method", "property"}.isdisjoint(way.replace("'", " ").split()):
            pytest.skip("a class of a class")
    else:
        monkeypatch.setattr(type(config), "shared", 2.0)
    jitted = fshard.jit(PLACES[place](way, config), backend="eager")
    assert torch.equal(jitted(X), 2 * X)
    assert torch.equal(jitted(X), 2 * X)
    change(config)
    assert torch.equal(jitted(X), 5 * X)
    assert jitted.explain().count("\n") == 1


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "module"])
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
