"""Values that change in place, wherever a function has them: a jitted function does not keep the result of before."""

import argparse
import array
import ctypes
import datetime
import io
import pathlib
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from support.known import known
from support.models import same_bits
from torch import Tensor, nn

import fshard

eager = partial(fshard.jit, backend="eager")
X = torch.tensor([1.0, 2.0])


@dataclass
class Rate:
    """A dataclass of the user's."""

    value: float = 2.0


class Plain:
    """An object of the user's."""

    def __init__(self) -> None:
        self.value = 2.0


class Slotted:
    """An object without a dict."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 2.0


class Noted(dict):  # type: ignore[type-arg]
    """A dict of the user's with an attribute."""

    value = 2.0


class Layer(nn.Module):
    """A module with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 2.0


class Kind(NamedTuple):
    """A value: how it is made, read as a number, and changed in place."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], Any]


def at(key: Any) -> Callable[[Any], Any]:
    """Read an item."""
    return lambda box: box[key]


def put(key: Any, value: Any = 3) -> Callable[[Any], Any]:
    """Change an item."""
    return lambda box: box.__setitem__(key, value)


def get(x: Any) -> Any:
    """Read an attribute."""
    return x.value


def value(x: Any) -> None:
    """Change an attribute."""
    x.value = 3.0


def taken(dict_of: partial[Any]) -> Any:
    """What a partial was given by position."""
    return dict_of.args[0]["k"]


def put_in(x: ContextVar[list[int]]) -> None:
    """Change a list that a variable of a context has."""
    x.set([3])


VALUES: dict[str, Kind] = {
    "list": Kind(lambda: [2], at(0), put(0)),
    "dict": Kind(lambda: {"k": 2}, at("k"), put("k")),
    "set": Kind(lambda: {2}, sum, lambda x: x.add(3)),
    "list in a tuple": Kind(lambda: ([2],), lambda x: x[0][0], lambda x: x[0].append(x[0].pop() + 1)),
    "deque": Kind(lambda: deque([2]), at(0), put(0)),
    "bytearray": Kind(lambda: bytearray(b"ab"), at(0), put(0)),
    "memoryview": Kind(lambda: memoryview(bytearray(b"ab")), at(0), put(0)),
    "a view that only reads": Kind(
        lambda: memoryview(bytearray(b"ab")).toreadonly(), at(0), lambda x: x.obj.__setitem__(0, 3)
    ),
    "array.array": Kind(lambda: array.array("d", [2.0]), at(0), put(0)),
    "ctypes": Kind(lambda: (ctypes.c_int * 2)(2, 2), at(0), put(0)),
    "numpy": Kind(lambda: np.full(2, 2.0), at(0), put(0)),
    "numpy, strided": Kind(lambda: np.full((4, 2), 2.0)[::2, 1:], lambda x: x.sum(), put((1, 0))),
    "numpy, objects": Kind(lambda: np.array([[2]], object), lambda x: x[0, 0], put((0, 0))),
    "numpy, records": Kind(lambda: np.zeros(1, "f4,i8"), lambda x: x["f1"][0], lambda x: x["f1"].__setitem__(0, 3)),
    "numpy, dates": Kind(
        lambda: np.array(["2020-01-01"], "M8[D]"), lambda x: int(x.astype(int)[0]), put(0, np.datetime64("2020-01-02"))
    ),
    "numpy, masked": Kind(lambda: np.ma.array([2.0, 1.0]), lambda x: float(x.sum()), put(0, np.ma.masked)),
    "OrderedDict": Kind(lambda: OrderedDict(k=2), at("k"), put("k")),
    "order of an OrderedDict": Kind(
        lambda: OrderedDict(k=2, n=3), lambda x: next(iter(x.values())), lambda x: x.move_to_end("k")
    ),
    "order of one in a list": Kind(
        lambda: [OrderedDict(k=2, n=3)], lambda x: next(iter(x[0].values())), lambda x: x[0].move_to_end("k")
    ),
    "order of one in another": Kind(
        lambda: OrderedDict(n=0, k=OrderedDict(k=2, n=3)),
        lambda x: [*x, *x["k"].values()][2],
        lambda x: (x["k"].move_to_end("k"), x.move_to_end("n")),
    ),
    "Counter": Kind(lambda: Counter(k=2), at("k"), lambda x: x.update("k")),
    "defaultdict": Kind(lambda: defaultdict(int, k=2), at("k"), put("k")),
    "ChainMap": Kind(lambda: ChainMap({"k": 2}), at("k"), put("k")),
    "UserDict": Kind(lambda: UserDict(k=2), at("k"), put("k")),
    "UserList": Kind(lambda: UserList([2]), at(0), put(0)),
    "a proxy": Kind(
        lambda: (lambda d: (types.MappingProxyType(d), d))({"k": 2}), lambda x: x[0]["k"], lambda x: x[1].update(k=3)
    ),
    "only a proxy": Kind(lambda: types.MappingProxyType(CHANGING), at("k"), lambda _: CHANGING.update(k=3)),
    "keys": Kind(lambda: CHANGING.keys(), len, lambda _: CHANGING.update(more=1)),
    "values": Kind(lambda: CHANGING.values(), sum, lambda _: CHANGING.update(k=3)),
    "items": Kind(lambda: CHANGING.items(), lambda x: dict(x)["k"], lambda _: CHANGING.update(k=3)),
    "SimpleNamespace": Kind(lambda: types.SimpleNamespace(value=2.0), get, value),
    "BytesIO": Kind(lambda: io.BytesIO(b"ab"), lambda x: x.getvalue()[0], lambda x: x.write(b"c")),
    "StringIO": Kind(lambda: io.StringIO("ab"), lambda x: len(x.getvalue()), lambda x: x.write("abc")),
    "dataclass": Kind(Rate, get, value),
    "dict of a class": Kind(lambda: Noted(k=2), at("k"), put("k")),
    "attribute of a dict": Kind(Noted, get, value),
    "partial": Kind(lambda: partial(max, {"k": 2}), taken, lambda x: x.args[0].update(k=3)),
    "a partial's keyword": Kind(
        lambda: partial(max, key=[2]),
        lambda x: x.keywords["key"][0],
        lambda x: x.keywords["key"].append(x.keywords["key"].pop(0) + 1),
    ),
    "a partial of a partial": Kind(
        lambda: partial(max, partial(min, [2])),
        lambda x: x.args[0].args[0][0],
        lambda x: x.args[0].args[0].__setitem__(0, 3),
    ),
    "ContextVar": Kind(lambda: ContextVar("rate", default=2), lambda x: x.get(), lambda x: x.set(3)),
    "ContextVar of a list": Kind(lambda: ContextVar("rate", default=[2]), lambda x: x.get()[0], put_in),  # noqa: B039
    "a method's object": Kind(lambda: [2].copy, lambda x: x()[0], lambda x: x.__self__.__setitem__(0, 3)),
}
# what has no hash, and is no tree
NO_ARGUMENTS = {
    *("bytearray", "memoryview", "a view that only reads", "array.array", "ctypes", "SimpleNamespace", "keys", "items"),
    *(name for name in VALUES if name.startswith("numpy")),
    *("Counter", "ChainMap", "UserDict", "UserList", "a proxy", "only a proxy"),
    *("dict of a class", "attribute of a dict"),
}
# what is compared only where a name leads to it
BY_NAME: dict[str, Kind] = {
    "object": Kind(Plain, get, value),
    "slots": Kind(Slotted, get, value),
    "module": Kind(Layer, get, value),
    "Namespace": Kind(lambda: argparse.Namespace(value=2.0), get, value),
}
CHANGING: Any = {}
BOX: Any = None


def in_a_closure(box: Any, read: Any) -> Any:
    """A function, and the arguments that it takes after the first one."""
    return lambda x: x * read(box), ()


def in_a_global(box: Any, read: Any) -> Any:
    """The same with a variable of the module."""
    global BOX
    BOX = box
    return lambda x: x * read(BOX), ()


def in_a_default(box: Any, read: Any) -> Any:
    """The same with a default."""

    def fn(x: Tensor, box: Any = box, *, named: Any = [box]) -> Tensor:  # noqa: B006
        return x * read(box) + read(named[0])

    return fn, ()


def in_an_argument(box: Any, read: Any) -> Any:
    """The same with an argument."""
    return lambda x, box: x * read(box), (box,)


def in_a_partial(box: Any, read: Any) -> Any:
    """The same where the function is a partial."""
    return partial(lambda box, x, more: x * read(box) + read(more["box"]), box, more={"box": box}), ()


def in_an_inner_partial(box: Any, read: Any) -> Any:
    """The same where the function calls one."""
    inner = partial(lambda x, box: x * read(box), box=box)
    return lambda x: inner(x), ()


PLACES = (in_a_closure, in_a_global, in_a_default, in_an_argument, in_a_partial, in_an_inner_partial)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_changes_in_place(kind, place):
    """A jitted function would keep the result of its first call: it is the eager one, or an error."""
    CHANGING.clear()
    CHANGING["k"] = 2
    make, read, change = VALUES[kind]
    fn, more = place(box := make(), read)
    run = eager(fn)
    before = fn(X, *more)
    if place is in_an_argument and kind in NO_ARGUMENTS:
        with pytest.raises(TypeError, match="which cannot be compared with the next call's"):
            run(X, *more)
        return
    for _ in range(2):
        assert same_bits(run(X, *more), before)
    assert run.explain().count("\n") == 0, "traced again for what did not change"
    change(box)
    assert not same_bits(fn(X, *more), before)
    if place is in_an_argument and kind.startswith("order"):
        with pytest.raises(TypeError, match=r"argument '0.1.*' is an OrderedDict whose order"):
            run(X, *more)
        return
    assert same_bits(run(X, *more), fn(X, *more))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", VALUES)
def test_what_another_process_compares(kind, place):
    """It would load what was compiled for another value, or never load anything."""
    make, read, change = VALUES[kind]
    if place is in_an_argument and (kind in NO_ARGUMENTS or kind.startswith("order")):
        pytest.skip("an error in any process")
    texts = []
    for _ in range(2):
        CHANGING.clear()
        CHANGING["k"] = 2
        fn, more = place(box := make(), read)
        texts.append(known(eager(fn), X, *more))
    assert texts[0] == texts[1]
    assert not texts[0].unknown
    change(box)
    # made again, as another process does: a default or a partial is what it was given
    fn, more = place(box, read)
    changed = known(eager(fn), X, *more)
    assert texts[0].differences(changed.texts())


@pytest.mark.parametrize("where", ["closure", "global"])
@pytest.mark.parametrize("kind", BY_NAME)
def test_an_attribute_that_changes(kind, where):
    """A jitted function would keep the value that an attribute had, which it reads by its name."""
    global BOX
    BOX = Plain()
    box, BOX.inner = (BY_NAME[kind].make() for _ in range(2))
    run = eager(fn := (lambda x: x * box.value) if where == "closure" else (lambda x: x * BOX.inner.value))
    for new in (2.0, 2.0, 3.0, torch.tensor(2.0), torch.tensor(4.0)):
        box.value = BOX.inner.value = new
        assert same_bits(run(X), fn(X))
    assert run.explain().count("\n") == 2


@dataclass
class Run:
    """A run of the user's, with a field that changes at each step."""

    rate: float = 2.0
    step: int = 0
    losses: list[float] = field(default_factory=list)
    note: Any = None

    def scaled(self, x: Tensor) -> Tensor:
        """A method, which reads the field of its own."""
        return x * self.rate

    @property
    def half(self) -> float:
        """A number that is computed."""
        return self.rate / 2


@dataclass(frozen=True)
class Frozen:
    """A dataclass that can only be made again."""

    rate: float = 2.0


RUN = Run()
UNREAD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dataclass": (Run, lambda run: lambda x: x * run.rate),
    "a method of one": (Run, lambda run: lambda x: run.scaled(x)),
    "one in an object": (
        lambda: types.SimpleNamespace(run=Run(), step=0, losses=[]),
        lambda box: lambda x: x * box.run.rate,
    ),
    "inside a function": (Run, lambda run: lambda x: (lambda y: y * run.rate)(x)),
    "SimpleNamespace": (
        lambda: types.SimpleNamespace(rate=2.0, step=0, losses=[]),
        lambda box: lambda x: x * box.rate,
    ),
    "a global": (lambda: RUN, lambda _: lambda x: x * RUN.rate),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_attribute_that_no_name_reads(case):
    """A counter beside what a function reads would make it trace again at every step."""
    make, fn_of = UNREAD[case]
    fn = fn_of(box := make())
    run = eager(fn)
    for step in range(3):
        box.step = step
        box.losses.append(0.1)
        assert same_bits(run(X), fn(X))
    assert run.explain() == "traced for the first call"


WHOLE: dict[str, Callable[[Any], Any]] = {
    "handed on": lambda run: lambda x: x * asdict(run)["rate"] + run.step,
    "handed on inside": lambda run: lambda x: (lambda y: y * vars(run)["rate"] + run.step)(x),
    "in a list": lambda run: (lambda runs: lambda x: x * runs[0].rate)([run]),
    "by a property": lambda run: lambda x: x * run.half,
    "in a class": lambda run: lambda x: type("", (), {"rate": vars(run)["rate"]}).rate * x + run.step,
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_dataclass_that_is_read_otherwise(case):
    """A graph would keep a field that is not read by its name."""
    fn = WHOLE[case](box := Run())
    run = eager(fn)
    for rate in (2.0, 2.0, 3.0):
        box.rate = rate
        assert same_bits(run(X), fn(X))
    assert run.explain().count("\n") == 1


def test_what_is_made_again_and_equal():
    """A function would be traced again where a value is replaced by an equal one, and not by another."""
    box = Plain()
    run = eager(fn := lambda x: x * len(repr(box.value)))
    utc, other = (datetime.timezone(datetime.timedelta(hours=h)) for h in (0, 1))
    for make, another in (
        (lambda: torch.device("cpu"), torch.device("meta")),
        (lambda: pathlib.Path("ab"), pathlib.Path("abc")),
        (lambda: datetime.datetime(2020, 1, 2, 3), datetime.datetime(2020, 10, 2, 3)),
        (lambda: datetime.datetime(2020, 1, 2, 3, tzinfo=utc), datetime.datetime(2020, 1, 2, 4, tzinfo=other)),
        (lambda: Frozen(2), Frozen(2.0)),
    ):
        traces = run.explain().count("\n")
        box.value = make()
        assert same_bits(run(X), fn(X))
        box.value = make()
        assert same_bits(run(X), fn(X))
        assert run.explain().count("\n") <= traces + 1
        box.value = another
        assert same_bits(run(X), fn(X))


def nodes() -> Any:
    """Two objects, each of which refers to the other."""
    root = Run()
    root.note = [Run(note=root)]
    return root


def own_method() -> Any:
    """An object with a method of its own."""
    root = Run()
    root.note = root.scaled
    return root


def in_itself(x: Any) -> Any:
    """A container or namespace that contains itself."""
    if isinstance(x, list | deque):
        x.append(x)
    elif isinstance(x, dict | UserDict):
        x["x"] = x
    else:
        x.x = x
    return x


def chain(length: int) -> Any:
    """Objects inside of objects."""
    x: Any = None
    for _ in range(length):
        x = Run(note=x)
    return x


def shared(depth: int) -> Any:
    """Objects with the same object twice."""
    x: Any = 1.0
    for _ in range(depth):
        x = types.SimpleNamespace(a=x, b=x)
    return x


CIRCLES: dict[str, Callable[[], Any]] = {
    "nodes": nodes,
    "a method": own_method,
    "list": lambda: in_itself([1.0]),
    "dict": lambda: in_itself({"k": 1.0}),
    "deque": lambda: in_itself(deque([1.0])),
    "namespace": lambda: in_itself(types.SimpleNamespace()),
    "UserDict": lambda: in_itself(UserDict()),
    "a long chain": lambda: chain(2000),
    "shared": lambda: shared(40),
}


@pytest.mark.parametrize("case", CIRCLES)
def test_objects_that_refer_to_themselves(case):
    """A call would not end, or raise a RecursionError, because the content of a variable has no end."""
    box = CIRCLES[case]()
    run = eager(lambda x: x * 2 if box is not None else x)
    for _ in range(2):
        assert same_bits(run(X), X * 2)
    assert run.explain() == "traced for the first call"


class Base:
    """A class with defaults."""

    rate = 2.0
    table: ClassVar = {"rate": 2.0}


class Child(Base):
    """Another that inherits them."""


class Words(Child, dict):  # type: ignore[type-arg]
    """A dict that inherits them."""


class Net(nn.Module):
    """A module with a default."""

    rate = 2.0
    table: ClassVar = {"rate": 2.0}


@pytest.mark.parametrize("kind", [Base, Child, Words, Net])
def test_a_default_of_a_class(kind, monkeypatch):
    """A graph would keep the default of a class, when an object, or a class, gets another value."""
    box = kind()
    run = eager(fn := lambda x: x * box.rate + box.table["rate"])

    def check() -> None:
        for _ in range(2):
            assert same_bits(run(X), fn(X))

    check()
    monkeypatch.setattr(kind, "rate", 3.0, raising=False)
    check()
    monkeypatch.setitem(kind.table, "rate", 4.0)
    check()
    box.rate = 5.0
    check()
    del box.rate
    check()
    assert run.explain().count("\n") == 3


def test_a_function_in_a_deque():
    """A graph would keep what a function in a container has read."""
    box = [2.0]
    functions = deque([lambda x: x * box[0]])
    run = eager(fn := lambda x: functions[0](x))
    for box[0] in (2.0, 3.0):
        assert same_bits(run(X), fn(X))


@dataclass
class Holder:
    """A field with a function."""

    fn: Any


def test_functions_in_a_dataclass_in_a_list():
    """What a function in a field reads would have its first value in all later calls."""
    box = [2.0]
    holders = [Holder(lambda x: x * box[0])]
    run = eager(fn := lambda x: holders[0].fn(x))
    for box[0] in (2.0, 3.0):
        assert same_bits(run(X), fn(X))


class Dotted(dict):  # type: ignore[type-arg]
    """A dict whose items are attributes, with another error for those that are not there."""

    __getattr__ = dict.__getitem__


class Asked:
    """An object that has another error for attributes that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize("make", [mock.Mock, mock.MagicMock, lambda: Dotted(rate=2.0), Asked])
def test_an_object_with_any_attribute(make):
    """A search for functions would not end, or raise what an object says of an attribute that it lacks."""
    box = make()
    run = eager(lambda x: x * 2 if box is not None else x)
    assert same_bits(run(X), X * 2)


def test_a_property_is_not_read_for_a_key():
    """A call of a jitted function would run the user's code, once for each graph that it looks up."""
    calls = []

    class Counts:
        @property
        def value(self) -> float:
            calls.append(1)
            return 2.0

    box = Counts()
    run = eager(lambda x: x * box.value)
    for _ in range(3):
        run(X)
    assert len(calls) == 1


KEYS = (1, 1.0, True, np.int64(1), (1,), (True,), 0.0, -0.0)


@pytest.mark.parametrize("place", PLACES)
def test_keys_that_are_equal_are_not_one(place):
    """A graph would be used for a dict with other keys, which are equal and not the same."""
    box: Any = {}
    fn, more = place(box, lambda d: len(repr([*d])) + len(str([*d[next(iter(d))]])))
    run = eager(fn)
    for inside in KEYS:
        for key in KEYS:
            box.clear()
            box[key] = {inside: 5}
            assert same_bits(run(X, *more), fn(X, *more))


def test_where_a_view_begins():
    """A graph would keep the offset that its first argument had in its storage."""
    base = torch.arange(6.0)
    run = eager(lambda x: x * x.storage_offset())
    with pytest.raises(fshard.TraceError, match=r"storage_offset\(\) of an argument at .*test_mutable"):
        run(base[1:3])
    inner = eager(lambda x: x * (2 * x)[1:].storage_offset())
    assert same_bits(inner(base[2:4]), base[2:4])
