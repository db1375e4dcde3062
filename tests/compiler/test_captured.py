"""Tensors in closures, globals and defaults: a graph reads them at each run, as the function does eagerly."""

import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.known import known
from support.models import STRATEGIES, rand, same_bits
from support.steps import EXACT, rank_of
from support.worlds import simulated
from torch import Tensor, func, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fshard
from fshard import tree
from fshard.compiler.trace import TraceError

eager = partial(fshard.jit, backend="eager")
aot = partial(fshard.jit, backend="aot_eager")
AVERAGE = [torch.ones(3)]


class Held(NamedTuple):
    """A function that reads a tensor, and what puts another one in its place."""

    fn: Callable[[Tensor], Tensor]
    put: Callable[[Tensor], None]


def formula(x: Tensor, t: Tensor) -> Tensor:
    """What is computed with the captured tensor."""
    return torch.sin(x * t) + t.sum() * x.square()


def in_a_cell(t: Tensor) -> Held:
    """A variable of the function around."""

    def put(new: Tensor) -> None:
        nonlocal t
        t = new

    return Held(lambda x: formula(x, t), put)


def in_a_dict(t: Tensor) -> Held:
    """Buffers, as of a module."""
    buffers: Any = {"norm": {"mean": t, "count": 3, "none": None}, "more": [rand(2, seed=1)]}
    return Held(lambda x: formula(x, buffers["norm"]["mean"]), lambda new: buffers["norm"].update(mean=new))


def in_a_list(t: Tensor) -> Held:
    """The last of a list, read by a function inside."""
    buffers = [(rand(3, seed=1),), t]

    def inner(x: Tensor) -> Tensor:
        return formula(x, buffers[-1])

    return Held(lambda x: inner(x), lambda new: buffers.__setitem__(-1, new))


def in_a_global(t: Tensor) -> Held:
    """A variable of the module."""
    AVERAGE[0] = t
    return Held(lambda x: formula(x, AVERAGE[0]), lambda new: AVERAGE.__setitem__(0, new))


def in_a_default(t: Tensor) -> Held:
    """A default argument."""

    def fn(x: Tensor, t: Tensor = t) -> Tensor:
        return formula(x, t)

    return Held(fn, lambda new: setattr(fn, "__defaults__", (new,)))


PLACES = (in_a_cell, in_a_dict, in_a_list, in_a_global, in_a_default)
TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "values": lambda fn: fn,
    "grad": lambda fn: func.grad(lambda x: fn(x).sum()),
    "jvp": lambda fn: lambda x: func.jvp(fn, (x,), (x.cos(),)),
    "vmap of grad": lambda fn: lambda x: func.vmap(func.grad(lambda y: fn(y).sum()))(x[:, None]),
    "vjp of grad": lambda fn: lambda x: func.vjp(func.grad(lambda x: fn(x).sum()), x)[1](x),
    "autograd": lambda fn: lambda x: torch.autograd.grad(fn(y := x.detach().requires_grad_()).sum(), y),
    "a jitted function": eager,
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("place", PLACES)
def test_a_captured_tensor_is_read_at_each_run(place, transform):
    """A graph would keep the captured tensor of its first call, refuse it, or compute another derivative of it."""
    t, x = rand(3, seed=1), rand(3, seed=2)
    held = place(t)
    fn = TRANSFORMED[transform](held.fn)
    run = eager(fn)
    for change in (
        lambda: None,
        lambda: t.mul_(2),
        lambda: held.put(rand(3, seed=3)),
        lambda: held.put(x),
        lambda: held.put(rand(6, seed=4)[::2]),
        lambda: held.put(rand(1, seed=5)),
        lambda: held.put(t),
    ):
        change()
        assert same_bits(tree.map(Tensor.detach, run(x)), tree.map(Tensor.detach, fn(x)))
    assert "traced for the first call" in run.explain()


def test_captured_tensors_that_are_one_at_first():
    """A graph made while two variables are one tensor would read one of them for both."""
    a = b = rand(3, seed=1)
    buffers = [a, b]
    run = eager(fn := lambda x: (a * 10 + b + buffers[0] * 100 - buffers[1] + x, buffers, x))
    for change in (lambda: None, lambda: buffers.reverse(), lambda: buffers.__setitem__(0, rand(3, seed=2))):
        change()
        assert same_bits(run(a), fn(a))
    b = rand(3, seed=3)
    assert same_bits(run(b), fn(b))


def test_what_is_captured_and_lowered():
    """A compiled function would read other captured tensors than it was made for, or an input would have no name."""
    buffers = {"mean": rand(3, seed=1)}
    lowered = eager(lambda x: x * buffers["mean"]).lower(rand(3, seed=2))
    assert "'buffers' of" in lowered.as_text()
    assert lowered.memory().peak > 0
    run = lowered.compile("eager")
    buffers["mean"] = rand(3, seed=3)
    assert same_bits(run(rand(3, seed=2)), rand(3, seed=2) * rand(3, seed=3))
    buffers["mean"] = rand(1, seed=3)
    with pytest.raises(ValueError, match=r"compiled for other values: 'buffers' of .* changed"):
        run(rand(3, seed=2))


def rebinds() -> Any:
    """A function that assigns to a variable that it reads."""
    total = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        nonlocal total
        total = total + x
        return total

    return fn


BUFFERS = {"n": torch.ones(3)}
REFUSED: dict[str, tuple[Any, str]] = {
    "a write": (lambda x: x + BUFFERS["n"].add_(1), "changes 'BUFFERS' of <lambda> in place"),
    "a write to a view": (lambda x: x + BUFFERS["n"][:1].zero_(), "changes 'BUFFERS' of <lambda> in place"),
    "assigned data": (lambda x: setattr(BUFFERS["n"], "data", x) or x, r"assigns to \.data of"),
    "a value": (lambda x: x * BUFFERS["n"][0].item(), "asks for the value of a tensor"),
    "a condition": (lambda x: x if BUFFERS["n"].sum() > 0 else -x, "asks for the value of a tensor"),
    "values": (lambda x: x * BUFFERS["n"].tolist()[0], "tracing failed at|asks for the value"),
    "an array": (lambda x: x * torch.from_numpy(BUFFERS["n"].numpy()), "tracing failed at|asks for the value"),
    "batch norm": (
        lambda x: F.batch_norm(x[:, None].float(), BUFFERS["n"][:1], BUFFERS["n"][1:2], training=True),
        "changes 'BUFFERS' of <lambda> in place",
    ),
    "assigned": (rebinds(), r"assigns to 'total' of .*fn: return the new value instead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_do_with_a_captured_tensor(name):
    """A change of a captured tensor would be lost, or its value be fixed in the graph."""
    fn, words = REFUSED[name]
    with pytest.raises(TraceError, match=words):
        eager(fn)(rand(3, seed=1))
    assert same_bits(BUFFERS, {"n": torch.ones(3)})


class Holder:
    """An object with a tensor."""

    def __init__(self, x: Any) -> None:
        self.x = x


ASKED: dict[str, Any] = {
    "item": lambda x: x.item(),
    "list": lambda x: x.tolist(),
    "array": lambda x: x.numpy().item(),
    "number": float,
    "whole number": int,
    "complex number": complex,
    "place": lambda x: [2.0, 3.0, 4.0][x],
    "condition": lambda x: 2.0 if x else 3.0,
    "operator": lambda x: x * 2,
    "list of tensors": lambda x: torch.tensor([x, 1.0]),
}


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("ask", ASKED)
def test_values_of_tensors_of_objects(ask, kind):
    """A graph would keep the first value of a tensor that an object has."""
    x = torch.tensor(2 if ask == "place" else 2.0)
    holder = Holder(x if kind is Tensor else nn.Parameter(x, requires_grad=False))
    with pytest.raises(TraceError, match="a tensor that is not among its arguments"):
        eager(lambda x: (lambda h: x * ASKED[ask](h.x))(holder))(rand(2, seed=1))


def test_donation_and_a_captured_tensor():
    """A donated argument would be overwritten while the function reads it by another name."""
    x = rand(3, seed=1)
    with pytest.raises(ValueError, match="lie in the same memory"):
        eager(lambda y: y + x, donate=True)(x)
    assert same_bits(eager(lambda y: y + x, donate=True)(rand(3, seed=2)), rand(3, seed=2) + x)
    # what is not donated may be in several places
    also = lambda y: y + x  # noqa: E731
    added = eager(lambda y, given: also(y) + x * given["a"] + given["b"], donate=True)
    found = added(rand(3, seed=2), {"a": x, "b": x})
    assert same_bits(found, rand(3, seed=2) + x + x * x + x)


@pytest.mark.filterwarnings("ignore:.*drops the running statistics")
@pytest.mark.parametrize(("backend", "strategy"), [("eager", "full"), ("aot_eager", "zero1")])
def test_a_module_whose_buffers_are_in_a_closure(backend, strategy):
    """A loss of `apply(params, buffers, x)`, as the pages write it, could not be jitted."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    apply, params, buffers = fshard.module.functionalize(module)

    def train(mesh: Any, jitted: bool) -> Any:
        mine = tree.map(torch.clone, buffers)

        def loss(p: Any, x: Tensor) -> Any:
            return apply(p, mine, x)[0].square().mean() + apply.eval(p, mine, x)[0].mean()

        plan = fshard.make_plan(params, mesh, units=["0", "2"], **STRATEGIES[strategy])
        state, step = fshard.init_state(fshard.shard_params(params, plan), EXACT), fshard.train_step(loss, EXACT)
        step = fshard.jit(step, backend=backend, donate=True) if jitted else step
        for i in range(3):
            state, metrics = step(state, rand(5, 3, seed=10 * i + rank_of(mesh)))
            mine["1"] = tree.map(lambda x: x + 1, mine["1"])
        return fshard.gather_params(state.params), metrics

    assert same_bits(simulated(partial(train, jitted=True)), simulated(partial(train, jitted=False)))


Z = torch.tensor([[1 + 2j, 3 - 1j], [2 - 1j, 1j]])
BITS = (Z, Z.conj(), Z.imag, Z.conj().imag, Z.mH, Z.mH[:, :1], Z.conj()[::2], Z.conj()[::2].imag, Z[::2])


@pytest.mark.parametrize("first", range(len(BITS)))
def test_captured_tensors_with_a_conjugate_or_negative_bit(first):
    """Values of captured tensors would have wrong signs, or a compiler be told of strides that they have not."""
    for second in range(len(BITS)):
        held = [BITS[first]]
        run = aot(fn := lambda x: (x * held[0], held[0] + 1, held[0].resolve_conj().resolve_neg().clone()))  # noqa: B023
        for number in (first, second, first):
            held[0] = BITS[number]
            (*_, place) = (x.meta["val"] for x in run.lower(torch.tensor(2.0)).graph.nodes if x.op == "placeholder")
            assert place.stride() == held[0].resolve_conj().resolve_neg().stride()
            assert same_bits(run(torch.tensor(2.0)), fn(torch.tensor(2.0)))


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("place", PLACES)
def test_shapes_with_captured_tensors(place, transform):
    """`eval_shape` would refuse a function that `jit` takes, or return tensors with values."""
    held, x = place(rand(3, seed=1)), rand(3, seed=2)
    fn = TRANSFORMED[transform](held.fn)
    for given in (x, fshard.eval_shape(torch.sin, x)):
        out = fshard.eval_shape(lambda x: (fn(x), held.fn.__closure__ and x, AVERAGE[0]), given)
        for fake, real in zip(
            tree.leaves(out), tree.leaves((fn(x), held.fn.__closure__ and x, AVERAGE[0])), strict=True
        ):
            assert isinstance(fake, FakeTensor)
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
    before = AVERAGE[0].clone()
    fshard.eval_shape(lambda x: AVERAGE[0].add_(x), x)
    assert same_bits(AVERAGE[0], before)


# --- what is in containers, and what is not read as a tensor ---


def fill(box: Any, *values: Any) -> None:
    """Put values into a container, after all others."""
    for value in values:
        box.append(value) if isinstance(box, list) else box.update({f"k{len(box)}": value})


def values_of(box: Any) -> list[Any]:
    """What a container holds."""
    return list(box.values()) if isinstance(box, dict) else list(box)


class Settings(dict):  # type: ignore[type-arg]
    """A dict of the user's, that no library of trees knows."""


BOXES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "list": list,
    "OrderedDict": OrderedDict,
    "user's dict": Settings,
}
READ: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "length": lambda x, box: x * len(box),
    "keys": lambda x, box: x * ("k1" in box if isinstance(box, dict) else len(box)),
    "numbers": lambda x, box: x * sum([v for v in values_of(box) if isinstance(v, float | int)], 1),
    "shapes": lambda x, box: x * sum([v.shape[0] for v in values_of(box) if isinstance(v, Tensor)], 1),
    "strides": lambda x, box: x * sum([v.stride(0) for v in values_of(box) if isinstance(v, Tensor)], 1),
    "dtypes": lambda x, box: x * [str(v.dtype) for v in values_of(box) if isinstance(v, Tensor)].count("torch.float64"),
    "functions": lambda x, box: [v for v in values_of(box) if callable(v)][-1](x) if len(box) > 4 else x,
}


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("read", READ)
def test_what_is_in_a_captured_container(read, box):
    """A graph would have been made for what a container held at its first call: nothing, or other shapes or numbers."""
    held, x = BOXES[box](), rand(3, seed=1)
    run = eager(fn := lambda x: READ[read](x, held))
    for new in (None, 2.0, True, rand(3, seed=2), rand(8, seed=2)[::2], torch.sin, torch.cos, rand(1, seed=3).int()):
        if new is not None:
            fill(held, new)
        for _ in range(2):
            assert same_bits(run(x), fn(x))


def test_a_container_of_tensors_that_was_empty_at_first():
    """A graph would know no tensors, and go on without those that came later."""
    extra: list[Tensor] = []
    run, x = eager(fn := lambda x: sum(extra, x)), rand(3, seed=1)
    for size in (0, 3, 1, 3):
        extra += [rand(size, seed=2)] * bool(size)
        assert same_bits(run(x), fn(x))
    extra.clear()
    assert same_bits(run(x), x)
    kinds = {1.0, 2.0}
    run = eager(fn := lambda x: x * sum(kinds))
    for more in (3.0, 4.0):
        kinds.add(more)
        assert same_bits(run(x), fn(x))


def test_a_container_that_a_trace_changes():
    """A function that counts its traces beside tensors would be traced in each call, or read tensors of other sizes."""
    state: Any = {"traces": 0, "mean": rand(3, seed=1)}

    def fn(x: Tensor) -> Tensor:
        state["traces"] += 1
        return x + state["mean"].sum()

    run, x = eager(fn), rand(3, seed=2)
    for size, traces in ((3, 1), (3, 1), (5, 2), (5, 2)):
        state["mean"] = rand(size, seed=size)
        assert same_bits(run(x), x + state["mean"].sum())
        assert state["traces"] == traces


# --- what is reached by other ways than a name ---

GAIN = 2.0
SOURCE = """
GAIN = 2.0
MEAN = None
TABLE = {"gain": 1.0}
def scale(x): return x * GAIN * TABLE["gain"]
"""
HELPERS: Any = ModuleType("helpers")
HELPERS.__file__ = "helpers.py"
exec(compile(SOURCE, "helpers.py", "exec"), vars(HELPERS))


class Helper:
    """Reads a global in every kind of method, and has one of its own."""

    OWN = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        """By a method."""
        return self.method(x)

    def method(self, x: Tensor) -> Tensor:
        """By the object."""
        return x * GAIN

    @property
    def gain(self) -> float:
        """By a property."""
        return GAIN

    @staticmethod
    def static(x: Tensor) -> Tensor:
        """By nothing."""
        return x * GAIN

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        """By the class."""
        return cls.static(x)


class Child(Helper):
    """Inherits it all."""


class Quiet:
    """Cannot be called itself."""

    def method(self, x: Tensor) -> Tensor:
        """By the object."""
        return x * GAIN


class Layer(nn.Module):
    """A module whose forward reads a global, inside of another."""

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return x * GAIN


def in_a_class_body(x: Tensor) -> Tensor:
    """Reads a global where a class is made."""

    class Here:
        gain = GAIN

    return x * Here.gain


def with_layer(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A module as a function."""
    apply, params, buffers = fshard.module.functionalize(module)
    return lambda x: apply(params, buffers, x)[0]


REACHED: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "an object": Child,
    "an object in a closure": lambda: (lambda h: lambda x: h(x))(Helper()),
    "a method": lambda: Child().method,
    "a method that calls another": lambda: Helper().__call__,
    "a static method": lambda: Child.static,
    "a class method": lambda: Child.of_class,
    "a method of a class": lambda: lambda x: Child.of_class(x) + Helper.static(x),
    "a new object": lambda: lambda x: Helper()(x),
    "a property": lambda: lambda x: x * Child().gain,
    "a class's attribute": lambda: lambda x: x * Child.OWN,
    "a module's function": lambda: lambda x: HELPERS.scale(x),
    "a module's number": lambda: lambda x: x * HELPERS.GAIN,
    "a module's tensor": lambda: lambda x: x if HELPERS.MEAN is None else x * HELPERS.MEAN,
    "a class's body": lambda: in_a_class_body,
    "functions in a dict": lambda: (lambda table: lambda x: table["a"][0](x))({"a": [Helper().method]}),
    "a method of an object": lambda: (lambda h: lambda x: h.method(x))(Quiet()),
    "a layer": lambda: nn.Sequential(Layer()),
    "a functionalized layer": lambda: with_layer(nn.Sequential(Layer(), nn.Identity())),
    "a jitted object": lambda: eager(Helper()),
    "a partial of an object": lambda: partial(Helper()),
}


@pytest.mark.parametrize("way", REACHED)
def test_variables_that_are_reached_in_another_way(way):
    """A graph would keep the value that a global, or an attribute of a class or module, had at its first call."""
    global GAIN
    fn, x = REACHED[way](), rand(3, seed=1)
    run = eager(fn)
    try:
        for gain in (2.0, 5.0, 2.0, 0.0):
            GAIN = Helper.OWN = HELPERS.GAIN = HELPERS.TABLE["gain"] = gain
            HELPERS.MEAN = rand(3, seed=int(gain)) if gain else None
            for _ in range(2):
                assert same_bits(run(x), fn(x))
    finally:
        GAIN, Helper.OWN = 2.0, 1.0


@pytest.mark.parametrize("way", REACHED)
def test_what_another_process_compares_of_what_is_reached(way, monkeypatch):
    """It would load what was compiled for another value of a global, or of an attribute of a class or module."""
    fn, x = REACHED[way](), rand(3, seed=1)
    before = known(eager(fn), x)
    assert known(eager(REACHED[way]()), x) == before
    assert not before.unknown
    expected = fn(x)
    for place, name in ((sys.modules[__name__], "GAIN"), (Helper, "OWN"), (HELPERS, "GAIN")):
        monkeypatch.setattr(place, name, 7.0)
    monkeypatch.setitem(HELPERS.TABLE, "gain", 7.0)
    now = known(eager(fn), x)
    assert same_bits(fn(x), expected) or before.differences(now.texts())


def test_a_mode_of_the_callers():
    """A trace would leave a caller's fake mode without its cache."""
    with FakeTensorMode() as mode:
        x = torch.ones(3)
    assert mode.cache_enabled
    eager(lambda x: 2 * x).lower(x)
    fshard.eval_shape(torch.sin, x)
    assert mode.cache_enabled
