"""One tensor in several places of a call, or views of one: a jitted function is right for every other call, too."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from support.models import STRATEGIES, rand, same_bits
from support.steps import EXACT, batch, loss, params, rank_of, start
from support.worlds import simulated
from torch import Tensor, func

import fshard
from fshard import tree

eager = partial(fshard.jit, backend="eager")

# How the second and third of three places are made of tensors: apart, one and the same, views and aliases of another.
PLACES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "apart": lambda x, y, z: (x, y, z),
    "the first twice": lambda x, y, z: (x, x, z),
    "the last twice": lambda x, y, z: (x, y, y),
    "the outer ones": lambda x, y, z: (x, y, x),
    "all": lambda x, y, z: (x, x, x),
    "aliases": lambda x, y, z: (x, *(alias.requires_grad_(x.requires_grad) for alias in (x.detach(), x.data))),
    "views": lambda x, y, z: (x, x.view(4)[:], x.view(2, 2).view(4)),
    "parts": lambda x, y, z: torch.cat([x, y, z]).split(4),
    "overlapping": lambda x, y, z: torch.cat([x, y]).unfold(0, 4, 2).unbind(),
}


def weighted(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Another number for each place, and products of places."""
    return a + 10 * b + 100 * c.square() + a * b * c


def results(a: Tensor, b: Tensor, c: Tensor) -> Any:
    """Values, and the arguments themselves."""
    return {"value": weighted(a, b, c), "same": [c, a], "view": b.view(2, 2)}


def slopes(*x: Tensor) -> Any:
    """The gradient by place."""
    return func.grad(lambda *x: weighted(*x).sum(), (0, 1, 2))(*x)


def gradients(*x: Tensor) -> Any:
    """The gradient by tensor, for which each place is a leaf of its own."""
    leaves = [leaf.detach().requires_grad_() for leaf in x]
    return torch.autograd.grad(weighted(*leaves).sum(), leaves)


def trained(*x: Tensor) -> Any:
    """The gradient by tensor, of tensors that require one."""
    return torch.autograd.grad(weighted(*x).sum(), x, retain_graph=True)


def leaf(numel: int, seed: int) -> Tensor:
    """A tensor that requires a gradient."""
    return rand(numel, seed=seed).requires_grad_()


# A tensor, and what has its elements, or another tensor's.
VIEWED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "view": lambda x, y: (x, x.view(2, 4)),
    "view of another": lambda x, y: (x, y.view(2, 4)),
    "the same": lambda x, y: (x, x),
    "another": lambda x, y: (x, y),
    "first half": lambda x, y: (x, x[:4]),
    "second half": lambda x, y: (x, x[4:]),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it, unless warnings are errors
@pytest.mark.parametrize("first", VIEWED)
def test_a_gradient_goes_through_views_of_the_call(first):
    """A view of another tensor would be taken for one of this: its gradient would be added."""

    def slope(x: Tensor, y: Tensor) -> Tensor:
        return torch.autograd.grad(x.square().sum() + (3 * y * y).sum(), x)[0]

    jitted = eager(slope)
    for name in (first, *VIEWED):
        args = VIEWED[name](leaf(8, 1), leaf(8, 2))
        torch.testing.assert_close(jitted(*args), slope(*args), msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own access
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("fn", [results, slopes, gradients, trained])
def test_places_of_a_call(fn, name):
    """A graph made for one tensor in two places would run for two tensors, or the other way round."""
    run, made = eager(fn), [rand(4, seed=i).requires_grad_(fn is trained) for i in range(3)]
    for other in (name, *PLACES):
        args = PLACES[other](*made)
        assert same_bits(tree.map(Tensor.detach, run(*args)), tree.map(Tensor.detach, fn(*args))), other
    assert fn is trained or run.explain() == "traced for the first call"


@pytest.mark.parametrize("name", PLACES)
def test_places_of_what_is_donated(name):
    """A donated tensor would be overwritten while another place still means it."""

    def shifted(t: Any) -> Any:
        return t[1] + 1, t[2] + 1, t[0] + 1

    for order in (["apart", name], [name, "apart"]):
        run = eager(shifted, donate=True)
        for other in order:
            given = PLACES[other](*(rand(4, seed=i) for i in range(3)))
            expected = shifted(given)
            if other in ("apart", "parts"):
                assert same_bits(run(given), expected)
                continue
            with pytest.raises(ValueError, match="lie in the same memory"):
                run(given)


# --- training with two sets of parameters that are one at first ---


def preferred(p: Any, ref: Any, b: dict[str, Tensor]) -> fshard.Mean:
    """As in DPO: how far the policy is from where it began."""
    total, before = loss(p, b).total, loss(ref, b).total
    return fshard.Mean(torch.nn.functional.softplus(before - total) + total.square(), len(b["x"]))


def averaged(p: Any, average: Any, b: dict[str, Tensor]) -> Any:
    """As in EMA teachers and BYOL: the average is threaded through the step."""
    value = preferred(p, average, b)
    return value, average


def dpo(mesh: Any, jit: Any, **plan: Any) -> Any:
    """Steps with the first parameters as an argument."""
    state, step = start(mesh, loss_fn=lambda p, b, ref: preferred(p, ref, b), plan=plan)
    step, ref, rows = jit(step), state.params, []
    for i in range(3):
        state, metrics = step(state, batch(i, rank_of(mesh)), ref)
        rows.append(metrics["loss"])
    return rows, fshard.gather_params(state.params)


def ema(mesh: Any, jit: Any, **plan: Any) -> Any:
    """Steps with an average in `extra` that is the parameters at first."""
    state, step = start(mesh, loss_fn=averaged, plan=plan, with_extra=True)

    def both(state: Any, b: Any) -> Any:
        state, metrics = step(state, b)
        average = tree.map(lambda old, new: 0.5 * old + 0.5 * new, state.extra, state.params)
        return replace(state, extra=average), metrics

    run, state, rows = jit(both), replace(state, extra=state.params), []
    for i in range(3):
        state, metrics = run(state, batch(i, rank_of(mesh)))
        rows.append(metrics["loss"])
    return rows, [fshard.gather_params(x) for x in (state.params, state.extra)]


def autoencoder(mesh: Any, jit: Any, **plan: Any) -> Any:
    """Steps whose batch has one tensor as input and target at first."""
    whole = params()
    laid = fshard.make_plan(whole, mesh, units=["a", "c"], **plan)

    def distance(p: Any, b: Any) -> fshard.Mean:
        y = torch.tanh(b["x"] @ p["a"]["w"]) @ p["c"]["w"]
        return fshard.Mean((y - b["target"]).square().sum(), len(y))

    state, step = fshard.init_state(fshard.shard_params(whole, laid), EXACT), jit(fshard.train_step(distance, EXACT))
    for i in range(3):
        x = batch(i, rank_of(mesh))["x"]
        state, _ = step(state, {"x": x, "target": x if i == 0 else x.tanh()})
    return fshard.gather_params(state.params)


@pytest.mark.parametrize("strategy", ["full", "zero1"])
@pytest.mark.parametrize("train", [dpo, ema, autoencoder])
def test_training_with_parameters_that_are_one_at_first(train, strategy):
    """The reference, or the average, would be the parameters of every step: a DPO loss of 0.6931 for ever."""
    for mesh_of in (lambda job: [job(None)], simulated):
        jitted, expected = (mesh_of(partial(train, jit=jit, **STRATEGIES[strategy])) for jit in (eager, lambda fn: fn))
        assert same_bits(jitted, expected)


def test_what_is_lowered_without_values():
    """Fake and meta tensors in two places would be one place, too."""
    x, y = rand(4, seed=1), rand(4, seed=2)
    for first in (fshard.eval_shape(lambda x: x, x), x.to("meta")):
        lowered = eager(weighted).lower(first, first, first)
        for args in product((x, y), repeat=3):
            assert same_bits(lowered.compile("eager")(*args), weighted(*args))
