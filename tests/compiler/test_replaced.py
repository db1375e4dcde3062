"""Code and values that are replaced after the first call, wherever a function has them."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import same_bits
from torch import Tensor, nn

import fshard

eager = partial(fshard.jit, backend="eager")
X = torch.tensor([1.0, 2.0])
Change = Callable[[], None]


def double(x: Tensor) -> Tensor:
    """The code that is replaced."""
    return x * 2


def triple(x: Tensor) -> Tensor:
    """The code in its place."""
    return x * 3


def copy_of(fn: Any) -> Any:
    """A function of its own with this code."""
    return type(fn)(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


HELPER: Any = None


# --- where a function has another one: what runs it, and what puts a third in its place ---


def itself(helper: Any) -> tuple[Any, Any]:
    """The function that is jitted."""
    return helper, None


def in_a_closure(helper: Any) -> tuple[Any, Any]:
    """A variable of the function around."""

    def put(new: Any) -> None:
        nonlocal helper
        helper = new

    return lambda x: helper(x) + 1, put


def in_a_global(helper: Any) -> tuple[Any, Any]:
    """A variable of the module."""
    global HELPER
    HELPER = helper

    def put(new: Any) -> None:
        global HELPER
        HELPER = new

    return lambda x: HELPER(x) + 1, put


def in_a_default(helper: Any) -> tuple[Any, Any]:
    """A default argument."""

    def fn(x: Tensor, f: Any = helper) -> Tensor:
        return f(x) + 1

    return fn, lambda new: setattr(fn, "__defaults__", (new,))


def in_a_keyword_default(helper: Any) -> tuple[Any, Any]:
    """A default argument that is given by name."""

    def fn(x: Tensor, *, f: Any = helper) -> Tensor:
        return f(x) + 1

    return fn, lambda new: setattr(fn, "__kwdefaults__", {"f": new})


def in_a_partial(helper: Any) -> tuple[Any, Any]:
    """The function of a partial, with an argument of its own."""
    return partial(lambda f, x: f(x) + 1, helper), None


def partial_of_it(helper: Any) -> tuple[Any, Any]:
    """A partial of it."""
    return partial(helper), None


def in_a_dict(helper: Any) -> tuple[Any, Any]:
    """An item of a dict in a list."""
    held = [{"f": helper}]
    return lambda x: held[0]["f"](x) + 1, lambda new: held[0].update(f=new)


def in_a_module(helper: Any) -> tuple[Any, Any]:
    """An attribute of a module of the user's."""
    module: Any = ModuleType("of_the_user")
    module.f = helper
    return lambda x: module.f(x) + 1, lambda new: setattr(module, "f", new)


def in_a_namespace(helper: Any) -> tuple[Any, Any]:
    """An attribute of an attribute."""
    box = SimpleNamespace(inner=SimpleNamespace(f=helper))
    return lambda x: box.inner.f(x) + 1, lambda new: setattr(box.inner, "f", new)


def two_deep(helper: Any) -> tuple[Any, Any]:
    """A function of a function of the one that is jitted."""
    inner, put = in_a_closure(helper)

    def middle(x: Tensor) -> Tensor:
        return inner(x) - 1

    return lambda x: middle(x) * 2, put


def decorated(helper: Any) -> tuple[Any, Any]:
    """A function in another that replaced it."""

    def around(fn: Any) -> Any:
        return lambda x: fn(x) + 1

    return around(helper), None


def of_a_callable(helper: Any) -> tuple[Any, Any]:
    """A function that a callable object holds."""

    class Layer:
        def __init__(self) -> None:
            self.f = helper

        def __call__(self, x: Tensor) -> Tensor:
            return self.f(x) + 1

    layer = Layer()
    return layer, lambda new: setattr(layer, "f", new)


def of_a_callable_inside(helper: Any) -> tuple[Any, Any]:
    """The same in a variable of the function around."""
    layer, put = of_a_callable(helper)
    return lambda x: layer(x) * 2, put


def of_a_callable_in_a_list(helper: Any) -> tuple[Any, Any]:
    """The same in a list, which a loop reads."""
    layer, put = of_a_callable(helper)
    layers = [layer]

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return fn, put


def in_a_module_of_torch(helper: Any) -> tuple[Any, Any]:
    """A function that a torch module holds, in another one."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = helper

        def forward(self, x: Tensor) -> Tensor:
            return self.f(x) + 1

    net = nn.Sequential(Layer())
    return lambda x: net(x) * 2, lambda new: setattr(net[0], "f", new)


def in_a_method(helper: Any) -> tuple[Any, Any]:
    """A function that the object of a bound method holds."""

    class Trainer:
        def __init__(self) -> None:
            self.f = helper

        def loss(self, x: Tensor) -> Tensor:
            return self.part(x) + 1

        def part(self, x: Tensor) -> Tensor:
            return (lambda y: self.f(y))(x)

    trainer = Trainer()
    return trainer.loss, lambda new: setattr(trainer, "f", new)


def as_a_method(helper: Any) -> tuple[Any, Any]:
    """A static method of a class."""

    class Layer:
        f = staticmethod(helper)

    return lambda x: Layer.f(x) + 1, lambda new: setattr(Layer, "f", staticmethod(new))


def as_a_method_of_an_object(helper: Any) -> tuple[Any, Any]:
    """A static method of a base class, called on an object."""

    class Base:
        f = staticmethod(helper)

    class Layer(Base):
        pass

    layer = Layer()
    return lambda x: layer.f(x) + 1, lambda new: setattr(Base, "f", staticmethod(new))


def in_a_compiled_one(helper: Any) -> tuple[Any, Any]:
    """Another jitted function."""
    return (lambda inner: lambda x: inner(x) + 1)(eager(helper)), None


def in_a_transform(helper: Any) -> tuple[Any, Any]:
    """A function that is differentiated."""

    def put(new: Any) -> None:
        nonlocal helper
        helper = new

    return torch.func.grad(lambda x: helper(x).square().sum()), put


HOLDERS = (
    *(itself, in_a_closure, in_a_global, in_a_default, in_a_keyword_default, in_a_partial, partial_of_it, in_a_dict),
    *(in_a_module, in_a_namespace, two_deep, decorated, of_a_callable, of_a_callable_inside, of_a_callable_in_a_list),
    *(in_a_module_of_torch, in_a_method, as_a_method, as_a_method_of_an_object, in_a_compiled_one, in_a_transform),
)


@pytest.mark.parametrize("how", ["code", "function", "value"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_function_that_is_replaced(holder, how):
    """A jitted function would run the code, or read the value, of its first call: autoreload replaces `__code__`."""
    rate = [2.0]
    helper = (lambda x: x * rate[0]) if how == "value" else copy_of(double)
    fn, put = holder(helper)
    if how == "function" and put is None:
        pytest.skip("nothing there can be replaced")
    run = eager(fn)
    before = fn(X)
    for _ in range(2):
        assert same_bits(run(X), before)
    assert run.explain() == "traced for the first call"
    if how == "code":
        helper.__code__ = triple.__code__
    elif how == "function":
        put(triple)
    else:
        rate[0] = 3.0
    assert not same_bits(fn(X), before)
    for _ in range(2):
        assert same_bits(run(X), fn(X))
    assert run.explain().count("\n") == 1
    assert "changed" in run.explain()


# --- where an object of the user's has a value, and how it is read: what makes a function, and what changes it ---


class Base:
    """What a class inherits."""

    rate: Any
    _rate = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        """A method, which reads an attribute."""
        return x * self._rate


class Stored(Base):
    """An attribute of its own."""

    def __init__(self) -> None:
        self.rate = self._rate = 2.0


class Computed(Base):
    """A property."""

    @property
    def rate(self) -> float:  # type: ignore[override]
        """A number that is computed."""
        return self._rate + 1


class Twice(Base):
    """A property of a property, by way of a method."""

    @property
    def rate(self) -> float:  # type: ignore[override]
        """A number that is computed."""
        return self.half * 2

    @property
    def half(self) -> float:
        """Another one."""
        return self.more() / 4

    def more(self) -> float:
        """What is computed by a method."""
        return self._rate + 1


class Asked(Base):
    """Attributes that the object lacks."""

    def __init__(self) -> None:
        self._values = {"rate": 2.0}

    def __getattr__(self, name: str) -> Any:
        if name == "_values":
            raise AttributeError(name)
        return self._values[name]


class Delegate(Base):
    """An object that has all attributes of another one."""

    def __init__(self) -> None:
        self._inner = Stored()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class InDict(Base):
    """The same by its dict."""

    def __init__(self) -> None:
        self.__dict__["_inner"] = Stored()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class Rate:
    """A descriptor."""

    def __init__(self) -> None:
        self.more = 0.0

    def __get__(self, box: Any, kind: Any) -> Any:
        return self if box is None else vars(box)["_rate"] + self.more


class Described(Base):
    """An attribute with a descriptor of the user's."""

    rate = Rate()

    def __init__(self) -> None:
        self._rate = 2.0


class Slotted:
    """An object without a dict."""

    __slots__ = ("_rate",)

    def __init__(self) -> None:
        self._rate = 2.0

    @property
    def rate(self) -> float:
        """A number that is computed."""
        return self._rate

    scaled = Base.scaled


class Cached(Base):
    """A number that is computed once."""

    @cached_property
    def rate(self) -> float:  # type: ignore[override]
        """A number that is computed."""
        return self._rate


class Held(Base):
    """A property that hands on an object."""

    def __init__(self) -> None:
        self._box = Stored()

    @property
    def box(self) -> Any:
        """The object."""
        return self._box

    @property
    def rate(self) -> float:  # type: ignore[override]
        """Its number."""
        return self.box.rate


class Child(Stored):
    """A method that asks its base class."""

    def scaled(self, x: Tensor) -> Tensor:
        """A method, which reads an attribute in the base class."""
        return super().scaled(x) + 1


class Net(nn.Module):
    """A module of torch's with a number."""

    rate = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._rate = 2.0

    scaled = Base.scaled


def set_own(box: Any) -> None:
    """Set the attributes of the object, and of one in it."""
    for x in (box, *(y for y in getattr(box, "__dict__", {}).values() if isinstance(y, Stored))):
        x._rate = 3.0
        if "rate" in getattr(x, "__dict__", {}):
            x.rate = 3.0
    if "_values" in getattr(box, "__dict__", {}):
        box._values["rate"] = 3.0


KINDS = (Stored, Computed, Twice, Asked, Delegate, InDict, Described, Slotted, Cached, Held, Child, Net)


def by_name(box: Any) -> Any:
    """An attribute that a name leads to."""
    return lambda x: x * box.rate


def by_names(box: Any) -> Any:
    """The same two deep."""
    outer = SimpleNamespace(box=box)
    return lambda x: x * outer.box.rate


def by_a_method(box: Any) -> Any:
    """A bound method."""
    return box.scaled


def by_a_method_inside(box: Any) -> Any:
    """A method that a function calls."""
    return lambda x: box.scaled(x)


def by_a_callable(box: Any) -> Any:
    """An object that has the object."""

    class Layer:
        def __init__(self) -> None:
            self.box = box

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.box.rate + self.box.scaled(x)

    return Layer()


def by_a_class_method(box: Any) -> Any:
    """A class method of a class that has the object."""

    class Layer:
        held = box

        @classmethod
        def scaled(cls, x: Tensor) -> Tensor:
            return cls.held.scaled(x)

    return lambda x: Layer().scaled(x)


READS = (by_name, by_names, by_a_method, by_a_method_inside, by_a_callable, by_a_class_method)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_that_is_set(kind, read):
    """A jitted function would keep a number that an object had in the first call, by whichever code it was read."""
    fn = read(box := kind())
    run = eager(fn)
    for _ in range(2):
        assert same_bits(run(X), fn(X))
    assert run.explain() == "traced for the first call"
    set_own(box)
    for _ in range(2):
        assert same_bits(run(X), fn(X))
    assert run.explain().count("\n") <= 1


def five(box: Any, name: str) -> float:
    """Another method for attributes that an object lacks."""
    if name != "rate":
        raise AttributeError(name)
    return 5.0


def others(kind: type) -> Iterator[tuple[str, Any]]:
    """What can be put in places of a class's methods, and of those that it inherits."""
    for name, new in {
        "scaled": lambda self, x: x * 5,
        "rate": property(lambda self: 5.0),
        "__getattr__": five,
    }.items():
        yield from ((name, new) for base in kind.__mro__[:-1] if name in vars(base))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_that_is_replaced(kind, read, monkeypatch):
    """A jitted function would keep the methods that a class, or its base, had in the first call."""
    for name, new in others(kind):
        for owner in (base for base in kind.__mro__ if base.__module__ == __name__):
            fn = read(kind())
            run = eager(fn)
            assert same_bits(run(X), fn(X))
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, new, raising=False)
                assert same_bits(run(X), fn(X)), (name, owner)
            assert same_bits(run(X), fn(X)), (name, owner)


MODULES: dict[str, Callable[[Any], Any]] = {
    "mode": lambda net: net.eval(),
    "mode of a layer": lambda net: net[1].eval(),
    "a number of a layer": lambda net: setattr(net[1], "p", 0.0),
    "a layer": lambda net: net.__setitem__(0, nn.Tanh()),
    "the forward of a layer": lambda net: setattr(net[0], "forward", triple),
    "one more": lambda net: net.append(nn.Tanh()),
}


@pytest.mark.parametrize("change", MODULES)
@pytest.mark.parametrize("place", ["itself", "closure", "list"])
def test_a_module_that_is_changed(place, change):
    """A jitted function would keep the mode, the layers or the numbers that a module had in the first call."""
    net = nn.Sequential(nn.Identity(), nn.Dropout(1.0))
    nets = [net]
    places: dict[str, Any] = {"itself": net, "closure": lambda x: net(x), "list": lambda x: nets[0](x)}
    run, x = eager(fn := places[place]), X
    for _ in range(2):
        assert same_bits(run(x), fn(x))
    MODULES[change](net)
    for _ in range(2):
        assert same_bits(run(x), fn(x))
    assert run.explain().count("\n") == 1


class Trainer:
    """A program as an object: it counts its steps beside the step."""

    def __init__(self) -> None:
        self.rate, self.step, self.losses = 2.0, 0, list[float]()
        self.jitted = eager(self.train)

    def train(self, x: Tensor) -> Tensor:
        """What is jitted."""
        return self.scaled(x) + 1

    def scaled(self, x: Tensor) -> Tensor:
        """A part of it."""
        return x * self.rate

    def run(self, x: Tensor) -> None:
        """The loop around."""
        for _ in range(3):
            assert same_bits(self.jitted(x), self.train(x))
            self.step += 1
            self.losses.append(self.step)

    def __repr__(self) -> str:
        return f"Trainer({self.step}, {self.losses})"

    @property
    def last(self) -> float:
        """What the program shows."""
        return self.losses[-1]


def test_what_the_function_does_not_read_may_change():
    """A counter beside a jitted method, which other methods read, would trace it again at each step."""
    trainer = Trainer()
    trainer.run(X)
    assert trainer.jitted.explain() == "traced for the first call"
    trainer.rate = 3.0
    trainer.run(X)
    assert trainer.jitted.explain().count("\n") == 1


def test_the_reason_names_the_code():
    """`explain` would not say what was replaced."""
    helper = copy_of(double)
    run = eager(lambda x: helper(x))
    run(X)
    helper.__code__ = triple.__code__
    run(X)
    assert run.explain().endswith("traced again: the code of double changed")
