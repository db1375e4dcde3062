"""What another process compares before it loads a compiled function: all that changes the result."""

import collections
import copy
import dataclasses
import enum
import functools
import re
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.graphs import batch, mean, sharded
from support.known import known
from support.worlds import simulated
from torch import Tensor, nn

import fshard
from fshard import optim
from fshard.optim import schedules

X = torch.tensor([1.0, 2.0])
RATES = (2.0, 3.0)  # a function and the other one


class Carrying:
    """A node of trees with a rate beside its child."""

    def __init__(self, x: Any, rate: float) -> None:
        self.x, self.rate = x, rate


fshard.tree.register(Carrying, lambda node: ([node.x], node.rate), lambda rate, children: Carrying(*children, rate))


class Checked:
    """A node of trees that takes no other children than tensors of two elements."""

    rate = 2.0

    def __init__(self, x: Tensor) -> None:
        assert x.shape == (2,)
        self.x = x


fshard.tree.register(Checked, lambda node: ([node.x], None), lambda _, children: Checked(*children))


def helper(k: int) -> Callable[[Tensor], Tensor]:
    """One of two functions of the same name with other code."""
    return (lambda x: x * 2) if k == 0 else (lambda x: x * 3)


class Rate:
    """An object with a method, and another object in it."""

    def __init__(self, value: Any, inner: Any = None) -> None:
        self.value, self.inner = value, inner

    def run(self, x: Tensor) -> Tensor:
        """Reads attributes that no name leads to."""
        return x * self.value if self.inner is None else self.inner.run(x)

    def at(self, count: Tensor) -> Tensor:
        """A schedule."""
        return count * 0 + self.value


class Node:
    """A node of trees, whose method a function calls."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def run(self) -> Tensor:
        """Calls a function of the module."""
        return HELPER(self.x)


fshard.tree.register(Node, lambda node: ([node.x], None), lambda _, children: Node(*children))
HELPER = helper(0)
MODULE = types.ModuleType("made_by_hand")


class Cached:
    """Methods behind wrappers."""

    @functools.lru_cache  # noqa: B019
    def gain(self, _: int) -> float:
        return float(HELPER(torch.tensor(1.0)))

    @functools.singledispatchmethod
    def kind(self, x: Any) -> Any:
        return HELPER(x)


@dataclass(frozen=True)
class Scale:
    """An argument whose method calls a function, with a value that is no field."""

    by: float = 1.0
    more: float = field(default=1.0, init=False, compare=False)

    def run(self, x: Tensor) -> Tensor:
        return HELPER(x) * self.by * self.more


class Choice(enum.Enum):
    """Another one."""

    ONE = 1

    def run(self, x: Tensor) -> Tensor:
        return HELPER(x)


class Pair(NamedTuple):
    """Another one."""

    a: float

    def run(self, x: Tensor) -> Tensor:
        return HELPER(x)


class Number(float):
    """A number with an attribute."""

    more = 1.0


def numbered(k: int) -> Number:
    """A number, and its attribute."""
    number = Number(1.0)
    number.more = RATES[k]
    return number


def scaled(k: int) -> Scale:
    """A dataclass, and a value that is no field."""
    scale = Scale()
    object.__setattr__(scale, "more", RATES[k])
    return scale


def decorated(k: int) -> Any:
    """A function with an attribute, which is read through another name."""

    def fn(x: Tensor) -> Tensor:
        return x

    fn.rate = RATES[k]  # type: ignore[attr-defined]
    return fn


def moduled(k: int) -> Any:
    """A module of the user's without a file, in an object."""
    module = types.ModuleType("made_by_hand")
    module.RATE = RATES[k]  # type: ignore[attr-defined]
    return module


class Dunder:
    """A rate by the name of a special attribute."""

    __rate__ = 2.0


def executed(k: int) -> Any:
    """A function that has no file."""
    scope: dict[str, Any] = {}
    exec(f"def fn(x): return x * {RATES[k]}", scope)
    return scope["fn"]


def functionalized(k: int) -> Any:
    """A module's function."""
    layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    layer.rate = RATES[k]
    layer.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, x) * self.rate, layer)
    apply, params, buffers = fshard.module.functionalize(layer)
    return lambda x: apply(params, buffers, x)[0]


def wholly(value: Any) -> Any:
    """A function that reaches a value by no name of an attribute."""
    return (lambda v: lambda x: (x, v)[0])(value), (X,)


def filed(k: int) -> Any:
    """A function of the user's module, which calls another function of it."""
    module = types.ModuleType("made_by_hand")
    exec(f"def inner(x): return x * {RATES[k]}\ndef outer(x): return inner(x)", vars(module))
    return module


def weak(value: Any, kind: Any) -> Any:
    """What refers to a value weakly; the value lives as long as this function."""
    STRONG.append(value)
    return kind(value)


STRONG: list[Any] = []


def meta(k: int) -> Any:
    """An object whose class has a class with a rate."""
    return type("Meta", (type,), {"rate": RATES[k], "__module__": __name__})("Made", (), {"__module__": __name__})()


def noted(k: int) -> Any:
    """A dataclass with a note at a field."""
    return dataclasses.make_dataclass("Noted", [("x", float, field(default=1.0, metadata={"rate": RATES[k]}))])()


def shared(k: int) -> Any:
    """Two nodes; the inner one of the second belongs to the first, or to the second."""
    nodes = [Rate(rate, Rate(1.0)) for rate in RATES]
    nodes[1].inner = nodes[1].inner if k else nodes[0].inner
    for node in reversed(nodes):
        node.inner.value = node
    return nodes


def of_a_library(k: int) -> Any:
    """A function made by a library's, with a default."""

    def fn(x: Tensor, rate: float = RATES[k]) -> Tensor:
        return x * rate

    fn.__code__ = fn.__code__.replace(co_filename=torch.__file__)
    return fn


def conjugated(k: int) -> Tensor:
    """A tensor that is read at each run, with strides that are gone when it is resolved."""
    x = torch.complex(X, X)
    return (x.conj() if k else x).imag


def trained(tx: Any) -> Any:
    """A step of one parameter."""
    return fshard.train_step(lambda p, x: (p["w"] * x).sum(), tx), (state(tx), X)


def state(tx: Any) -> Any:
    """Its state."""
    params = {"w": torch.ones(2)}
    return fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)


Made = tuple[Any, tuple[Any, ...]]
REACHED: dict[str, Callable[[int], Made]] = {
    "an object's object": lambda k: (Rate(1.0, Rate(RATES[k])).run, (X,)),
    "a schedule": lambda k: trained(optim.sgd((lambda c: c * 0 + 0.1) if k else (lambda c: c * 0 + 0.3))),
    "a schedule's closure": lambda k: trained(optim.adamw((lambda r: lambda c: c * 0 + r)(RATES[k]))),
    "a schedule's object": lambda k: trained(optim.adamw(Rate(RATES[k]).at)),
    "a schedule of schedules": lambda k: trained(
        optim.sgd(schedules.join([schedules.constant(0.1), (lambda r: lambda c: c * 0 + r)(RATES[k])], [1]))
    ),
    "an optimizer in an object": lambda k: (Rate(1.0, Rate(optim.sgd(RATES[k]))).run, (X,)),
    "an optimizer in a closure": lambda k: ((lambda tx: lambda x: (x, tx)[0])(optim.adamw(RATES[k])), (X,)),
    "a function as an argument": lambda k: (lambda x, fn: fn(x), (X, helper(k))),
    "a partial as an argument": lambda k: (lambda x, fn: fn(x), (X, functools.partial(torch.mul, RATES[k]))),
    "a method as an argument": lambda k: (lambda x, fn: fn(x), (X, Rate(RATES[k]).run)),
    "what is no field": lambda k: (lambda x, scale: scale.run(x), (X, scaled(k))),
    "an attribute of a number": lambda k: ((lambda n: lambda x: x * n.more)(numbered(k)), (X,)),
    "an attribute of a function": lambda k: ((lambda f: lambda x: f(x) * vars(f)["rate"])(decorated(k)), (X,)),
    "a module in an object": lambda k: (Rate(1.0, moduled(k)).run, (X,)),
    "a module by another name": lambda k: ((lambda m: lambda x: x * vars(m)["RATE"])(moduled(k)), (X,)),
    "code without a file": lambda k: (executed(k), (X,)),
    "a function of a module": lambda k: (functionalized(k), (X,)),
    "paths that are one": lambda k: (lambda t: t["x"] * t["a"]["b"], ({"x": X, "a": {"b": RATES[k]}, "a.b": 1.0},)),
    "keys that are one": lambda k: (lambda t: t[0] * t[1], ({0: X, 1: RATES[k], "1": 7.0},)),
    "a module's helper": lambda k: wholly(filed(k)),
    "a module in a dict": lambda k: wholly({"a": filed(k)}),
    "a weak reference": lambda k: wholly(weak(Rate(RATES[k]), weakref.ref)),
    "a weak proxy": lambda k: wholly(weak(Rate(RATES[k]), weakref.proxy)),
    "a weak method": lambda k: wholly(weak(Rate(RATES[k]), lambda rate: weakref.WeakMethod(rate.run))),
    "a weak value": lambda k: wholly(weak(Rate(RATES[k]), lambda rate: weakref.WeakValueDictionary(a=rate))),
    "a value of a weak key": lambda k: wholly(weak(Rate(1), lambda key: weakref.WeakKeyDictionary({key: RATES[k]}))),
    "a weak set": lambda k: wholly(weak(Rate(RATES[k]), lambda rate: weakref.WeakSet([rate]))),
    "a class's class": lambda k: wholly(meta(k)),
    "a note at a field": lambda k: wholly(noted(k)),
    "a class without a module": lambda k: wholly(types.new_class("A", (), {}, lambda d: d.update(rate=RATES[k]))()),
    "a dataclass made at once": lambda k: wholly(dataclasses.make_dataclass("A", [], namespace={"rate": RATES[k]})()),
    "whose parent": lambda k: wholly(shared(k)),
    "a default in a library": lambda k: wholly(of_a_library(k)),
    "a negative bit": lambda k: wholly(conjugated(k)),
    "a pattern": lambda k: wholly(re.compile("ab"[k])),
    "what a node carries": lambda k: (lambda x: x.x * x.rate, (Carrying(X, RATES[k]),)),
    "a kind of number": lambda k: (lambda x, n: x * len(type(n).__name__), (X, (3.0, Number(3.0))[k])),
}


@pytest.mark.parametrize("case", REACHED)
def test_what_is_reached(case):
    """Another process would load what was compiled for another value, or load nothing."""
    make = REACHED[case]
    (fn, args), (same, again), (other, others) = make(0), make(0), make(1)
    texts = known(fshard.jit(fn), *args)
    assert not texts.unknown
    assert known(fshard.jit(same), *again) == texts
    assert texts.differences(known(fshard.jit(other), *others).texts())


CODE: dict[str, Callable[[], Made]] = {
    "a node's method": lambda: (lambda node: node.run(), (Node(X),)),
    "a dataclass's method": lambda: (lambda x, scale: scale.run(x), (X, Scale())),
    "an enum's method": lambda: (lambda x, choice: choice.run(x), (X, Choice.ONE)),
    "a named tuple's method": lambda: (lambda x, pair: pair.run(x), (X, Pair(1.0))),
    "a method that is cached": lambda: ((lambda c: lambda x: x * c.gain(1))(Cached()), (X,)),
    "a method for kinds": lambda: ((lambda c: lambda x: c.kind(x))(Cached()), (X,)),
}


@pytest.mark.parametrize("case", CODE)
def test_code_that_is_reached(case, monkeypatch):
    """Another process would load what was compiled for other code of a helper."""
    (fn, args) = CODE[case]()
    texts = known(fshard.jit(fn), *args)
    assert not texts.unknown
    assert known(fshard.jit(fn), *args) == texts
    monkeypatch.setattr(f"{__name__}.HELPER", helper(1))
    assert texts.differences(known(fshard.jit(fn), *args).texts())


class Way:
    """An object that is saved as Python does it."""


class LeavesOut(Way):
    """One that `pickle` saves without its rate."""

    def __getstate__(self) -> Any:
        return {}


class Anew(Way):
    """One that `pickle` makes anew."""

    def __reduce_ex__(self, _: Any) -> Any:
        return type(self), ()


class InSlot:
    """One whose rate is in a slot."""

    __slots__ = ()

    def __getstate__(self) -> Any:
        return {}


BASES = (object, dict, list, set, frozenset, tuple, int, float, str, bytes, bytearray, complex, Exception, nn.Module)
BASES += (collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter, functools.partial)
BASES += (np.ndarray, np.float64, property, types.SimpleNamespace, classmethod, weakref.ref)
ARGUMENTS = {functools.partial: (len,), np.ndarray: (1,), classmethod: (len,), weakref.ref: (Way,)}


def owner(way: type, base: type, rate: float) -> Any:
    """An object of a class of the user's that has a rate."""
    slots = {"__slots__": ("rate",)} if way is InSlot else {}
    inside = {"__module__": __name__, "__eq__": object.__eq__, "__hash__": object.__hash__, **slots}
    made = type("Made", (way, base), inside)(*ARGUMENTS.get(base, ()))
    object.__setattr__(made, "rate", rate)
    return made


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("way", [Way, LeavesOut, Anew, InSlot])
def test_what_an_object_has(base, way):
    """Another process would load what was compiled for another attribute, which `pickle` does not save."""
    if way is InSlot and base in (tuple, int, bytes, weakref.ref):
        pytest.skip("has no slots")

    def texts(rate: float) -> Any:
        made = owner(way, base, rate)
        return known(fshard.jit((lambda o: lambda x: x * o.rate)(Rate(made))), X)

    assert not texts(2.0).unknown
    assert texts(2.0) == texts(2.0)
    assert texts(2.0).differences(texts(3.0).texts())


def test_a_set_has_no_order():
    """A program would be compiled in each process: items that refer to others lie in another order there."""

    class Item(Rate):
        def __hash__(self) -> int:
            return 1

    def texts(order: int) -> Any:
        items = [Item(rate) for rate in RATES]
        for item in items:
            item.inner = items
        return known(fshard.jit(wholly([{*items[::order]}, items])[0]), X)

    assert texts(1) == texts(-1)
    assert not texts(1).unknown


LOOKED_AT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "attributes of a partial": (lambda: functools.partial(torch.mul, 2.0), vars),
    "a copy": (lambda: meta(0), copy.copy),
    "a call of a function for kinds": (lambda: functools.singledispatch(lambda x: x), lambda fn: fn(X)),
}


@pytest.mark.parametrize("case", LOOKED_AT)
def test_what_is_only_looked_at(case):
    """A program would be compiled anew: Python remembers what a process has done with a value."""
    make, look = LOOKED_AT[case]
    value = make()
    texts = known(fshard.jit(wholly(value)[0]), X)
    look(value)
    assert known(fshard.jit(wholly(value)[0]), X) == texts


def test_numbers_of_a_process():
    """A program would be compiled in each process: attrs writes a number of the process into `__hash__`."""

    def texts(k: int) -> Any:
        kind = type("Made", (), {"__module__": __name__, "__hash__": executed(k)})
        return known(fshard.jit(wholly(kind())[0]), X)

    assert texts(0) == texts(1)


def test_a_function_of_numpy_without_a_name():
    """Another process would load what was compiled for another function, which numpy saves by one name."""
    fn = np.frompyfunc(lambda x: x * 2, 1, 1)
    assert "has a numpy.ufunc" in known(fshard.jit(wholly(fn)[0]), X).unknown
    assert not known(fshard.jit(wholly(np.add)[0]), X).unknown


def test_a_node_that_checks_its_children():
    """A step could not be saved for the class of a node."""
    texts = known(fshard.jit(lambda node: node.x * node.rate), Checked(X))
    assert not texts.unknown
    other = type("Checked", (Checked,), {"__module__": __name__, "rate": 3.0})
    fshard.tree.register(other, lambda node: ([node.x], None), lambda _, children: other(*children))
    assert texts.differences(known(fshard.jit(lambda node: node.x * node.rate), other(X)).texts())


def test_attributes_with_the_names_of_special_ones(monkeypatch):
    """Another process would load what was compiled for another value of one."""
    fn = (lambda d: lambda x: x * vars(type(d))["__rate__"])(Dunder())
    texts = known(fshard.jit(fn), X)
    monkeypatch.setattr(Dunder, "__rate__", 3.0)
    assert texts.differences(known(fshard.jit(fn), X).texts())


def test_a_set_of_functions():
    """In another process they are in another order, and so are the tensors that they read."""
    fns = {lambda x: x + torch.ones(1), lambda x: x * 2}
    assert "has a set" in known(fshard.jit(lambda x: [fn(x) for fn in fns]), X).unknown


def test_ranks_without_a_mesh_among_the_arguments():
    """A rank would load the program of another one."""

    def job(mesh: Any) -> Any:
        return known(fshard.jit(lambda x: x * (1 + mesh.get_rank())), X)

    one, other = simulated(job)
    assert one.differences(other.texts())


def test_plans_and_meshes_are_compared():
    """A rank would run the program of another plan or mesh."""

    def texts(mesh: Any, **plan: Any) -> Any:
        return known(fshard.jit(fshard.value_and_grad(mean)), sharded(mesh, **plan), batch(0))

    ones = simulated(texts)
    assert ones[0] == ones[1]
    others = [
        simulated(lambda mesh: texts(mesh, regather=False)),
        simulated(lambda mesh: texts(mesh, units=["blocks.0"])),
        simulated(lambda mesh: texts(mesh, prefetch=2)),
        simulated(texts, shard=3),
        simulated(texts, replicate=2),
    ]
    assert all(one != ones[0] for (one, *_) in others)
