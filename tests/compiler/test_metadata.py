"""What nodes of arguments carry beside their children: a jitted function keeps no result for what was in it before."""

import argparse
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from support.known import known
from support.models import same_bits
from support.worlds import simulated
from torch import Tensor, nn

import fshard
from fshard import optim, tree

eager = partial(fshard.jit, backend="eager")
X = torch.tensor([1.0, 2.0])


@dataclass
class Net:
    """A tensor, and what is no child."""

    w: Any
    note: Any


class Outer:
    """A node that is no dataclass, around others."""

    def __init__(self, inner: Any, note: Any):
        self.inner, self.note = inner, note


class Torches(Outer):
    """One that only torch knows."""


tree.register_fields(Net, ["w"], ["note"])
tree.register(Outer, lambda x: ([x.inner], x.note), lambda note, inner: Outer(*inner, note))
pytree.register_pytree_node(Torches, lambda x: ([x.inner], x.note), lambda inner, note: Torches(*inner, note))


@dataclass
class Rate:
    """A dataclass that may change."""

    value: Any = 2.0


@dataclass(frozen=True)
class Frozen:
    """One that may not, but for what is in it."""

    value: Any


class Plain:
    """An object with attributes."""

    def __init__(self, value: Any = 2.0) -> None:
        self.value = value


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Layer(nn.Module):
    """A module with an attribute, and modes."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 2.0


class Color(enum.Enum):
    """Names."""

    RED = 2
    BLUE = 3


class Kind(NamedTuple):
    """Metadata: how it is made, read as a number, and changed in place."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], Any]
    by_value: bool = True  # whether one that is made again is the same


def function() -> Any:
    """A function with an attribute, a default and a variable around."""
    around = [2.0]

    def fn(default: Any = around) -> Any:
        return around[0] + default[0] + getattr(fn, "value", 0.0)

    return fn


def get(x: Any) -> Any:
    """Read an attribute."""
    return x.value


def put(x: Any) -> None:
    """Change an attribute."""
    x.value = 3.0


def put_default(x: Any) -> None:
    """Change a default."""
    x.__defaults__ = ([4.0],)


def put_code(x: Any) -> None:
    """Change the code of a function."""
    x.__code__ = (lambda: 3.0).__code__


def add(x: list[float]) -> None:
    """Change a list of one number."""
    x[0] += 1


KINDS: dict[str, Kind] = {
    "list": Kind(lambda: [2.0], lambda x: x[0], lambda x: x.__setitem__(0, 3.0)),
    "length of a list": Kind(lambda: [2.0], sum, lambda x: x.append(3.0)),
    "nested list": Kind(lambda: [[1.0], [2.0]], lambda x: x[1][0], lambda x: x[1].__setitem__(0, 3.0)),
    "list in a tuple": Kind(lambda: (1, [2.0]), lambda x: x[1][0], lambda x: x[1].__setitem__(0, 3.0)),
    "1, 1.0": Kind(lambda: [1], lambda x: 3 if type(x[0]) is int else 4, lambda x: x.__setitem__(0, 1.0)),
    "0.0, -0.0": Kind(lambda: [0.0], lambda x: str(x[0]).count("-"), lambda x: x.__setitem__(0, -0.0)),
    "dict": Kind(lambda: {"k": 2.0}, lambda x: x["k"], lambda x: x.update(k=3.0)),
    "keys": Kind(lambda: {"k": 2.0, "n": 3.0}, lambda x: next(iter(x.values())), lambda x: x.update(k=x.pop("k"))),
    "set": Kind(lambda: {2.0}, sum, lambda x: x.add(3.0)),
    "deque": Kind(lambda: deque([2.0]), lambda x: x[0], lambda x: x.appendleft(3.0)),
    "numpy": Kind(lambda: np.full(2, 2.0), lambda x: float(x.sum()), lambda x: x.__setitem__(0, 3.0)),
    "numpy of one": Kind(lambda: np.full(1, 2.0), lambda x: float(x[0]), lambda x: x.__setitem__(0, 3.0)),
    "dataclass": Kind(Rate, get, put),
    "list in one": Kind(lambda: Frozen([2.0]), lambda x: x.value[0], lambda x: add(x.value)),
    "object": Kind(Plain, get, put),
    "object in an object": Kind(lambda: Plain([Plain()]), lambda x: x.value[0].value, lambda x: put(x.value[0])),
    "slots": Kind(Slotted, get, put),
    "SimpleNamespace": Kind(lambda: SimpleNamespace(value=2.0), get, put),
    "Namespace": Kind(lambda: argparse.Namespace(value=2.0), get, put),
    "module": Kind(Layer, get, put),
    "mode of a module": Kind(Layer, lambda x: 2 + x.training, lambda x: x.eval()),
    "a node of its own": Kind(lambda: [Net(1.0, [2.0])], lambda x: x[0].note[0], lambda x: add(x[0].note)),
    "a child of one": Kind(lambda: [Net(2.0, [2.0])], lambda x: x[0].w, lambda x: setattr(x[0], "w", 3.0)),
    "partial": Kind(lambda: partial(max, [2.0]), lambda x: x(), lambda x: x.args[0].append(3.0)),
    "attribute of a function": Kind(function, lambda x: x(), put, by_value=False),
    "variable of a function": Kind(
        function, lambda x: x(), lambda x: add(x.__closure__[0].cell_contents), by_value=False
    ),
    "default of a function": Kind(function, lambda x: x(), put_default, by_value=False),
    "code of a function": Kind(lambda: lambda: 2.0, lambda x: x(), put_code, by_value=False),
    "a method's object": Kind(
        lambda: Plain().__eq__, lambda x: x.__self__.value, lambda x: put(x.__self__), by_value=False
    ),
}


def ours(note: Any, read: Any) -> Any:
    """A registered dataclass as argument: a function, and how the arguments are made."""
    return lambda net, x: net.w * x * read(net.note), lambda note: (Net(X, note), X)


def inside(note: Any, read: Any) -> Any:
    """One in containers."""
    return lambda x, nets: nets["a"][0].w * x * read(nets["a"][0].note), lambda note: (X, {"a": [Net(X, note)]})


def nested(note: Any, read: Any) -> Any:
    """One in another."""
    fn = lambda x: x.inner.w * read(x.note) * read(x.inner.note)  # noqa: E731
    return fn, lambda note: (Outer(Net(X, note), note),)


def torches(note: Any, read: Any) -> Any:
    """One that was registered with torch."""
    return lambda x: x.inner * read(x.note), lambda note: (Torches(X, note),)


def captured(note: Any, read: Any) -> Any:
    """One in a list of the function's closure."""
    nets = [Net(X, note)]

    def make(note: Any) -> Any:
        nets[0] = Net(X, note)
        return (X,)

    return lambda x: x * nets[0].w * read(nets[0].note), make


def on_a_mesh(mesh: Any, run: str, note: Any, read: Any) -> Any:
    """Parameters on a mesh, whose plan has the structure."""

    def loss(p: Any, x: Tensor) -> Tensor:
        return (p["net"].w * read(p["net"].note)).sum() * x + p["b"].sum()

    def make(note: Any) -> Any:
        params = {"net": Net(torch.ones(4), note), "b": torch.ones(3)}
        params = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["net"]))
        return (fshard.init_state(params, optim.sgd(0.5)) if run == "train_step" else params), torch.tensor(2.0)

    step = fshard.train_step(loss, optim.sgd(0.5))
    return {"train_step": step, "predict": fshard.predict(loss), "evaluate": fshard.evaluate(loss)}[run], make


PLACES: dict[str, Callable[..., Any]] = {x.__name__: x for x in (ours, inside, nested, torches, captured)}
RUNS = ("train_step", "predict", "evaluate")


def check(place: Callable[..., Any], kind: str, is_replaced: bool) -> None:
    """Metadata that is changed in place, or replaced, gives what Python gives; an equal one is not traced again."""
    make, read, change, by_value = KINDS[kind]
    fn, args_of = place(note := make(), read)
    args, run = args_of(note), eager(fn)
    before = tree.leaves(fn(*args))
    for _ in range(2):
        assert same_bits(tree.leaves(run(*args)), before)
    assert run.explain().count("\n") == 0, run.explain()
    if is_replaced and by_value:
        args = args_of(make())
        assert same_bits(tree.leaves(run(*args)), before)
        assert run.explain().splitlines()[1:] in ([], ["traced again: for another plan, or on another mesh"])
    other = make() if is_replaced else note
    change(other)
    args = args_of(other) if is_replaced else args
    after = tree.leaves(fn(*args))
    assert not same_bits(after, before)
    for _ in range(2):
        assert same_bits(tree.leaves(run(*args)), after)
    assert run.explain().count("\n") in (1, 2)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_metadata_that_changes(kind: str, place: str, is_replaced: bool) -> None:
    """A graph has the numbers that a node carried at the first call."""
    check(PLACES[place], kind, is_replaced)


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_parameters_that_changes(kind: str, run: str, size: int, is_replaced: bool) -> None:
    """Of parameters that are sharded, nodes carry it in the plan, which is the same one after it changed."""

    def law(mesh: Any) -> None:
        check(partial(on_a_mesh, mesh, run), kind, is_replaced)

    simulated(law, shard=size) if size else law(None)


FIXED: dict[str, tuple[Any, ...]] = {
    "numbers": (1, 1.0, True, 2, -0.0, 0.0),
    "texts": ("a", b"a", None),
    "tuples": ((1, "a"), (True, "a"), ()),
    "frozen": (Frozen(1), Frozen(1.0)),
    "names": (Color.RED, Color.BLUE),
    "torch's": (torch.float32, torch.float64, torch.device("cpu"), torch.Size([1])),
    "functions": (torch.relu, torch.sin, nn.functional.gelu, len, [1].copy),
    "classes": (int, float, Plain),
}


@pytest.mark.parametrize("kind", FIXED)
def test_each_value_has_a_graph_of_its_own(kind: str) -> None:
    """A graph for 1 would be run for True, which a function tells apart."""
    run = eager(lambda net: net.w * len(repr(net.note)))
    for _ in range(2):
        for note in FIXED[kind]:
            assert same_bits(run(Net(X, note)), X * len(repr(note)))
    assert run.explain().count("\n") + 1 == len(FIXED[kind])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.by_value])
def test_what_another_process_compares_of_metadata(kind: str, place: str) -> None:
    """It would load what was compiled for other metadata, or never load anything."""
    make, read, change, _ = KINDS[kind]
    fn, args_of = PLACES[place](note := make(), read)
    one, same = (known(eager(fn), *args_of(x)) for x in (note, make()))
    assert not one.unknown
    assert one.texts() == same.texts()
    change(note)
    assert one.differences(known(eager(fn), *args_of(note)).texts())


@pytest.mark.parametrize("place", PLACES)
def test_a_compiled_function_refuses_other_metadata(place: str) -> None:
    """It would return what it computed for the old metadata."""
    make, read, change, _ = KINDS["list"]
    fn, args_of = PLACES[place](note := make(), read)
    args = args_of(note)
    run = eager(fn).lower(*args).compile("eager")
    assert same_bits(run(*args), fn(*args))
    change(note)
    with pytest.raises(ValueError, match=r"compiled for other (arguments: the structure of the arguments|values)"):
        run(*args)


def test_metadata_that_contains_itself() -> None:
    """A list in itself has no contents that end, and is compared by identity."""
    note: list[Any] = [2.0]
    note.append(note)
    run = eager(lambda net: net.w * net.note[0])
    for _ in range(3):
        assert same_bits(run(Net(X, note)), X * 2)
    assert run.explain() == "traced for the first call"


def test_tensors_in_metadata() -> None:
    """A tensor that is no child is no input of a graph."""
    run = eager(lambda net: net.w * net.note[0])
    with pytest.raises(fshard.compiler.trace.TraceError, match="a tensor that is not among its arguments"):
        run(Net(X, [torch.ones(2)]))
