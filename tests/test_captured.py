"""Tensors in closures, globals and defaults: a graph reads them at each run, as the function does eagerly."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.models import STRATEGIES, rand, same_bits
from support.steps import EXACT, rank_of
from support.worlds import simulated
from torch import Tensor, func, nn

import fshard
from fshard import tree
from fshard.compiler.trace import TraceError

eager = partial(fshard.jit, backend="eager")
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
    "assigned": (rebinds(), r"assigns to 'total' of .*fn: return the new value instead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_do_with_a_captured_tensor(name):
    """A change of a captured tensor would be lost, or its value be fixed in the graph."""
    fn, words = REFUSED[name]
    with pytest.raises(TraceError, match=words):
        eager(fn)(rand(3, seed=1))
    assert same_bits(BUFFERS, {"n": torch.ones(3)})


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


@pytest.mark.sample(2)
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
