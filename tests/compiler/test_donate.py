"""`fshard.jit(donate=True)`: the first argument is written to, and gone; what comes out is as without it."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.models import STRATEGIES, rand, same_bits
from support.optimizers import TRANSFORMS
from support.steps import QUIET, apart, batch, loss, params, rank_of, start
from support.worlds import simulated

import fshard
from fshard import DonatedError, DynamicLossScale, gather_params, optim, tree

pytestmark = pytest.mark.filterwarnings(QUIET)
eager = partial(fshard.jit, backend="eager")
aot = partial(fshard.jit, backend="aot_eager")


@pytest.mark.parametrize("jitted", [False, True])
def test_what_was_given_away_is_not_copied(jitted):
    """A copy or a file of a donated state would hold the values of another state."""
    state, _ = start(None, optim.adamw(0.1))
    step = fshard.train_step(loss, optim.adamw(0.1), donate=not jitted)
    step, kept = eager(step, donate=True) if jitted else step, [state, state.params, state.opt_state, [state.params]]
    assert same_bits(*(pickle.loads(pickle.dumps(x)).params.tensors for x in (state, copy.deepcopy(state))))
    step(state, batch(0, 0))
    for old in kept:
        for copied in (copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
            with pytest.raises(DonatedError, match="was given away"):
                copied(old)


@pytest.mark.parametrize("make", [eager, aot, fshard.jit])
def test_a_donated_state(make):
    """Donation would copy, leave the old state usable, or change results over ten steps."""

    def law(mesh: Any) -> None:
        warnings.filterwarnings("ignore", ".*torch.jit.script")
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


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_donates_by_itself(strategy, in_backward, donate):
    """A jitted step with `donate=True` of its own would be refused, or its graph would write to the caller's state."""

    def law(mesh: Any) -> None:
        kw = {"plan": STRATEGIES[strategy], "donate": True, "in_backward": in_backward, "clip_norm": 0.1}
        given, own = start(mesh, extra=rand(3, seed=1), **kw)
        # in a graph all updates come after the backward, and the sum of squares has the bits of that
        state, step = start(mesh, extra=rand(3, seed=1), **{**kw, "in_backward": False})
        fast = eager(own, donate=donate)
        for i in range(3):
            data = batch(i, rank_of(mesh))
            old, kept = given, tree.map(torch.clone, given)
            state, row = step(state, data)
            given, row2 = fast(given, data)
            assert same_bits((state, row), (given, row2))
            assert donate or same_bits(old, kept)

    simulated(law, replicate=2, shard=2)


def test_donated_parameters_are_gone():
    """Using donated parameters would read memory of a later step."""
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
    """A result that views a donated input would be overwritten before it is read."""
    one, two = rand(4, seed=1), rand(4, seed=2)
    expected = tree.map(torch.clone, tuple(SHIFTS[name]((one, two))))
    given = one.clone(), two.clone()
    places = [x.data_ptr() for x in given]
    found = make(lambda t: tuple(SHIFTS[name](t)), donate=True)(given)
    assert same_bits(found, expected)
    first = found[0] if isinstance(found[0], tuple) else found
    assert [x.data_ptr() for x in first] == places


def test_what_cannot_be_donated_is_an_error():
    """Two arguments in one memory would be written through each other."""
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
    with pytest.raises(ValueError, match="by position"):
        eager(lambda *, t: t, donate=True)(t=rand(3, seed=1))
    with pytest.raises(ValueError, match=r"leaf 'w\.0' of the first argument.*same memory.*contiguous"):
        eager(lambda t: {"w": [2 * t["w"][0]]}, donate=True)({"w": [rand(3, seed=1).expand(2, 3)]})
    with pytest.raises(ValueError, match="by position"):
        eager(lambda: 3, donate=True)()
    for fn in (lambda t: (t[0].float(), t[1]), lambda t: (t[0][:1] * 2, t[1]), lambda t: (t[0].view(1, 3) * 2, t[1])):
        with pytest.raises(ValueError, match=r"'0'.*float"):
            eager(fn, donate=True)((rand(3, seed=1), rand(3, seed=2)))


def train(mesh: Any, given: Any, how: str, donate: bool, num_steps: int = 3) -> Any:
    """Some steps on a state made from objects of the caller's."""
    rate = given["rate"]
    tx = optim.with_hyperparams(optim.sgd, lr=rate) if isinstance(rate, torch.Tensor) else optim.sgd(0.1)
    plan = fshard.make_plan(given["params"], mesh, units=["a", "c"])
    sharded = fshard.shard_params(given["params"], plan)
    state = fshard.init_state(sharded, tx, given["scaler"], seed=7, extra=given["extra"])

    def doubled(state: Any, data: Any) -> Any:
        state, row = step(state, data)
        return replace(state, extra=tree.map(lambda x: 2 * x, state.extra)), row

    step = fshard.train_step(loss, tx, clip_norm=0.1, donate=donate and how == "eager")
    run = eager(doubled, donate=donate) if how == "jit" else doubled
    for i in range(num_steps):
        state, _ = run(state, batch(i, rank_of(mesh)))
    return tree.map(torch.clone, (state.loss_scale, state.extra, gather_params(state.params)))


@pytest.mark.parametrize("shard", [None, 1, 2])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_what_a_state_is_made_from_is_left_as_it_is(how, donate, shard):
    """Donating a state would write to the scaler, `extra` or rates that the caller made it from."""
    given = {
        "params": params(),
        "scaler": DynamicLossScale(8.0, growth_interval=1),
        "extra": {"average": rand(3, seed=1), "views": list(rand(2, 2, seed=2)), "none": None},
        "rate": torch.tensor(0.1, dtype=torch.float64),
    }
    before = tree.map(torch.clone, given)
    job = partial(train, given=given, how=how, donate=donate)
    found = [job(None)] if shard is None else simulated(job, shard=shard)
    assert same_bits(given, before)
    scaler, extra, _ = found[-1]
    assert scaler.value == 64
    assert same_bits(extra, tree.map(lambda x: 8 * x, given["extra"]))
    if shard is None:
        assert same_bits(found, [train(None, before, how, donate=False)])
        # a graph has the formula of an update, and eager steps run torch's fused kernel, which rounds once less
        torch.testing.assert_close(found[0][2], train(None, before, "eager", donate=False)[2])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_leaves_of_a_state_lie_apart(name):
    """An update in place would change two leaves of a state at once."""
    given = {"w": rand(4, 4, seed=1, dtype=torch.float32), "b": rand(4, seed=2, dtype=torch.float32)}
    scaler = DynamicLossScale()
    state = start(None, TRANSFORMS[name](), scaler, {"units": None}, whole=given, extra=given)[0]
    leaves = [x for x in tree.leaves((state, given, scaler)) if isinstance(x, torch.Tensor) and x.numel()]
    assert len({x.untyped_storage().data_ptr() for x in leaves}) == len(leaves)


ONE: dict[str, Callable[[Any], Any]] = {
    "in two places": lambda x: ({"a": x, "b": x}, rand(4, seed=3)),
    "views": lambda x: ({"a": x, "b": x.view(2, 2).view(4)}, rand(4, seed=3)),
    "parts": lambda x: ({"a": (y := x.repeat(2))[:4], "b": y[4:]}, rand(4, seed=3)),
    "parts of a larger one": lambda x: ({"a": (y := x.repeat(2))[1:5], "b": y[2:6]}, rand(4, seed=3)),
    "given twice": lambda x: ({"a": x, "b": rand(4, seed=2)}, x),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("one", ONE)
def test_a_graph_of_arguments_that_were_one(one, backend):
    """A graph made for arguments in one memory, which is an error, would leave results unwritten in later calls."""

    def fn(state: Any, x: Any) -> Any:
        return tree.map(lambda y: 2 * y, state), x + 1

    def apart() -> Any:
        return {"a": rand(4, seed=4), "b": rand(4, seed=5)}, rand(4, seed=6)

    run = fshard.jit(fn, donate=True, backend=backend)
    if one == "parts":
        assert same_bits(run(*ONE[one](rand(4, seed=1))), fn(*ONE[one](rand(4, seed=1))))
    else:
        with pytest.raises(ValueError, match="lie in the same memory"):
            run(*ONE[one](rand(4, seed=1)))
    for _ in range(2):
        assert same_bits(run(*apart()), fn(*apart()))
