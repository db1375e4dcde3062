"""`fshard.jit(donate=True)`: the first argument is written to, and gone; what comes out is as without it."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import rand, same_bits
from steps import QUIET, apart, batch, rank_of, start
from worlds import simulated

import fshard
from fshard import DonatedError, DynamicLossScale, gather_params, optim, tree

pytestmark = pytest.mark.filterwarnings(QUIET)
eager = partial(fshard.jit, backend="eager")
aot = partial(fshard.jit, backend="aot_eager")


@pytest.mark.parametrize("make", [eager, aot, fshard.jit])
def test_a_donated_state(make):
    """It is written to, and gone; ten steps are right."""

    def law(mesh: Any) -> None:
        warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
        state, step = start(mesh, optim.adamw(0.1), DynamicLossScale(4.0, growth_interval=2))
        given, fast = tree.map(torch.clone, state), make(step, donate=True)
        places = [x.data_ptr() for x in tree.leaves(given)]
        for i in range(10):
            data = batch(i, rank_of(mesh), torch.inf if i == 4 else 1.0)
            state, row = step(state, data)
            old = given
            given, row2 = fast(given, data)
            assert apart((state, row), (given, row2)) <= 1e-10
            with pytest.raises(DonatedError):
                _ = old.params
        assert [x.data_ptr() for x in tree.leaves(given)] == places
        assert fast.explain() == "traced for the first call"

    law(None) if make is fshard.jit else simulated(law)


def test_donated_parameters_are_gone():
    """A Sharded given away says so."""
    state, _ = start(None)
    kept = state.params.tensors[0].clone()
    new = eager(lambda p: tree.map(lambda x: 2 * x, p), donate=True)(state.params)
    with pytest.raises(DonatedError):
        gather_params(state.params)
    assert same_bits(new.tensors[0], 2 * kept)


SHIFTS: dict[str, Callable[[Any], Any]] = {
    "a swap": lambda t: (t[1], t[0]),
    "a swap of views": lambda t: (t[1].view(-1), t[0].view(-1)),
    "one twice": lambda t: (t[1], t[1]),
    "a new one twice": lambda t: (lambda y: (y, y))(t[0] + t[1]),
    "a view of the other": lambda t: (t[0] + 1, t[0].flip(0).flip(0)[:]),
    "a view of what is written": lambda t: (t[0] + 1, t[0].view(1, 4)[0]),
    "parts of a new one": lambda t: torch.cat([t[0] + 1, t[1]]).chunk(2),
    "itself": lambda t: (t[0], t[0] + t[1]),
    "and more": lambda t: ((t[1], t[0] + 1), (t[0], t[0].view(2, 2), 2 * t[1])),
    "and the loss": lambda t: ((t[0] - t[1], t[1]), t[0].sum()),
}


@pytest.mark.parametrize("name", SHIFTS)
@pytest.mark.parametrize("make", [eager, aot])
def test_what_is_written_was_read_before(name, make):
    """Results that are donated inputs, or views of them, are what they were without donation."""
    one, two = rand(4, seed=1), rand(4, seed=2)
    expected = tree.map(torch.clone, tuple(SHIFTS[name]((one, two))))
    given = one.clone(), two.clone()
    places = [x.data_ptr() for x in given]
    found = make(lambda t: tuple(SHIFTS[name](t)), donate=True)(given)
    assert same_bits(found, expected)
    first = found[0] if isinstance(found[0], tuple) else found
    assert [x.data_ptr() for x in first] == places


def test_what_cannot_be_donated_is_an_error():
    """Memory that two arguments share, also in part; results that do not fit."""
    x = rand(6, seed=1)
    for pair in ((x, x), (x, x.view(2, 3)), (x[:4], x[2:])):
        with pytest.raises(ValueError, match="two tensors of the arguments lie in the same memory"):
            eager(lambda t: (t[0] + 1, t[1] + 1), donate=True)(pair)
    with pytest.raises(ValueError, match="lie in the same memory"):
        eager(lambda t, y: t + y, donate=True)(x, x)
    assert same_bits(eager(lambda t: (t[0] + 1, t[1] + 1), donate=True)((x[:3], x[3:])), (x[:3], x[3:]))
    for fn in (lambda t: t[0], lambda t: [t[0], t[1]], lambda t: (1, t)):
        with pytest.raises(ValueError, match="must give back, first of all, a tree of the structure of its first"):
            eager(fn, donate=True)((rand(3, seed=1), rand(3, seed=2)))
    with pytest.raises(ValueError, match="first of all"):
        eager(lambda: 3, donate=True)()
    for fn in (lambda t: (t[0].float(), t[1]), lambda t: (t[0][:1] * 2, t[1]), lambda t: (t[0].view(1, 3) * 2, t[1])):
        with pytest.raises(ValueError, match=r"'0'.*float"):
            eager(fn, donate=True)((rand(3, seed=1), rand(3, seed=2)))
