"""Values that change in place, wherever a function has them: a jitted function does not keep the result of before."""

import argparse
import array
import ctypes
import io
import types
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
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


@pytest.mark.sample(5)
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
    assert same_bits(run(X, *more), fn(X, *more))


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


KEYS = (1, 1.0, True, np.int64(1))


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
