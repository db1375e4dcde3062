"""Losses that use torch.func inside a step: in every strategy they train as with plain torch on one device."""

import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.func_cases import CASES, num_ranks, on_ranks, rank_of, sharded
from support.func_losses import FROZEN, LOSSES, batch, dropped, params
from support.models import rand, same_bits
from support.steps import QUIET, apart
from support.worlds import gloo, simulated
from torch import Tensor, func

import fshard
from fshard import tree
from fshard.core import func_levels

pytestmark = pytest.mark.filterwarnings(QUIET)
SGD = fshard.optim.sgd(0.1, momentum=0.9)


@cache
def expected(name: str, ranks: int, step: int = 0) -> tuple[Tensor, Any]:
    """The loss and its gradient by plain torch on one device with all ranks' data."""
    leaves, spec = tree.flatten({k: v for k, v in params().items() if k not in FROZEN})
    leaves = [leaf.requires_grad_() for leaf in leaves]
    whole = {**tree.unflatten(spec, leaves), "shift": params()["shift"]}
    found = [LOSSES[name](whole, batch(step, rank)) for rank in range(ranks)]
    value = torch.stack([x.total for x in found]).sum() / sum(x.count for x in found)
    return value.detach(), tree.unflatten(spec, torch.autograd.grad(value, leaves))


def gradient(mesh: Any, name: str, strategy: str) -> tuple[Tensor, Any]:
    """The loss and its gathered gradient, without the frozen leaf."""
    value, grads = fshard.value_and_grad(LOSSES[name])(sharded(mesh, strategy), batch(0, rank_of(mesh)))
    return value, {k: v for k, v in fshard.gather_params(grads).items() if k not in FROZEN}


def trained(mesh: Any, name: str, strategy: str, jitted: bool, **kw: Any) -> Any:
    """The gathered parameters and the metrics of two steps."""
    step = fshard.train_step(LOSSES[name], SGD, clip_norm=1.0, **kw)
    step = fshard.jit(step, backend="eager") if jitted else step
    state, rows = fshard.init_state(sharded(mesh, strategy), SGD, seed=7), []
    for i in range(2):
        state, metrics = step(state, batch(i, rank_of(mesh)))
        rows.append(metrics)
    return fshard.gather_params(state.params), rows


@pytest.mark.law
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_gradients_are_those_of_one_device(world: str, strategy: str, name: str) -> None:
    """Losses that use torch.func have the gradient of one device: otherwise meta-learning on shards would be wrong."""
    for found in on_ranks(world, partial(gradient, name=name, strategy=strategy)):
        assert apart(found, expected(name, num_ranks(world))) < 1e-12


def trained_plainly(name: str, ranks: int, num: int) -> Any:
    """The same two steps by torch.optim, on one device with all ranks' data."""
    shift = params()["shift"]
    leaves, spec = tree.flatten({k: v for k, v in params().items() if k not in FROZEN})
    leaves = [leaf.requires_grad_() for leaf in leaves]
    whole, tx, rows = {**tree.unflatten(spec, leaves), "shift": shift}, torch.optim.SGD(leaves, 0.1, momentum=0.9), []
    for i in range(2):
        cuts = [{k: x.tensor_split(num) for k, x in batch(i, rank).items()} for rank in range(ranks)]
        found = [LOSSES[name](whole, {k: x[part] for k, x in cut.items()}) for cut in cuts for part in range(num)]
        loss = torch.stack([x.total for x in found]).sum() / sum(x.count for x in found)
        grads = torch.autograd.grad(loss, leaves)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad * (1 / (norm + 1e-6)).clamp(max=1)
        rows.append({"loss": loss.detach(), "grad_norm": norm, "found_inf": torch.tensor(0.0)})
        tx.step()
    return {k: tree.map(Tensor.detach, whole[k]) for k in params()}, rows


HOWS = ("eager", "jitted", "micro-batches", "micro-batches, jitted")
# Every loss in every world and strategy would take an hour, so each loss runs in a fifth of them, in turns of `HOWS`.
TURNS = [
    (case, name, HOWS[(row + at // 5) % 4])
    for row, name in enumerate(LOSSES)
    for at, case in enumerate(CASES)
    if at % 5 == row % 5
]
TRAINED = [(*case, name, how) for case, name, how in TURNS]


@pytest.mark.parametrize(("world", "strategy", "name", "how"), TRAINED)
def test_training_is_that_of_one_device(world: str, strategy: str, name: str, how: str) -> None:
    """Two clipped steps, jitted or in micro-batches, train as one device: otherwise options would alter training."""
    kw = {"jitted": "jitted" in how, "accumulate": 2 if "micro" in how else 1}
    wanted = trained_plainly(name, num_ranks(world), kw["accumulate"])
    for found in on_ranks(world, partial(trained, name=name, strategy=strategy, **kw)):
        assert apart(found, wanted) < 1e-12


def several(mesh: Any) -> list[Any]:
    """Gradients of several losses, and the training by one loss as a graph."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    found = [gradient(mesh, name, "full") for name in ("meanflow", "physics", "maml", "nested")]
    return tree.map(Tensor.detach, [found, trained(mesh, "laplacian", "full", jitted=True)])


def test_processes_have_the_bits_of_the_simulation() -> None:
    """Gloo processes give the bits of simulated ranks: otherwise a simulation would say nothing about a real job."""
    assert same_bits(gloo(several, shard=2), simulated(several, shard=2))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_run_again_draws_the_same_numbers(jitted: bool, accumulate: int) -> None:
    """Masks do not depend on `regather`, and differ between ranks: otherwise `regather` would alter training."""

    def drawing(p: Any, b: dict[str, Tensor]) -> tuple[fshard.Mean, Tensor]:
        drawn = torch.rand(3)  # first: how much the loss draws depends on the number of rows
        return dropped(p, b), drawn

    def run(mesh: Any, strategy: str) -> Any:
        step = fshard.train_step(drawing, SGD, accumulate=accumulate, has_aux=True)
        step = fshard.jit(step, backend="eager") if jitted else step
        state = fshard.init_state(sharded(mesh, strategy), SGD, seed=7)
        state, metrics = step(state, batch(0, mesh.get_rank()))
        before = torch.get_rng_state()
        value, grads = fshard.value_and_grad(dropped)(state.params, batch(0, mesh.get_rank()))
        drawn = torch.rand(3)
        torch.set_rng_state(before)
        return fshard.gather_params(state.params), metrics, value, fshard.gather_params(grads), drawn

    torch.manual_seed(3)
    full = simulated(run, "full", shard=2)
    torch.manual_seed(3)
    assert same_bits(full, simulated(run, "keep", shard=2))
    assert not same_bits(*(metrics["aux"] for _, metrics, *_ in full))


def gathers(mesh: Any, loss: Any, strategy: str) -> tuple[int, list[str]]:
    """How often a loss is called for one gradient, and the units that are gathered."""
    calls = list[int]()

    def counted(p: Any, b: Any) -> Any:
        calls.append(1)
        return loss(p, b)

    params = sharded(mesh, strategy)
    with fshard.collectives.tally() as log:
        fshard.value_and_grad(counted)(params, batch(0, 0))
    return len(calls), [call.label for call in log if call.kind == "all_gather"]


def test_a_loss_is_run_again_for_reverse_mode_alone() -> None:
    """A loss is run twice only for reverse mode, and gathers nothing twice for it: otherwise steps would cost more."""

    def late(p: Any, b: Any) -> Any:
        h = torch.tanh(b["x"] @ p["embed"])
        return func.grad(lambda h: (h @ p["layers"][0]["w"]).square().sum())(h).square().sum()

    def job(mesh: Any) -> Any:
        return [gathers(mesh, f, s) for f in (LOSSES["meanflow"], LOSSES["physics"], late) for s in ("full", "keep")]

    for found in simulated(job, shard=2):
        (calls, full), (kept_calls, keep), physics, kept_physics, (twice, again), (_, once) = found
        assert (calls, kept_calls, twice) == (1, 1, 2)
        assert full[: len(keep)] == keep
        assert full.count("layers.0") == 2  # in the forward and in the backward
        assert physics == (2, kept_physics[1])
        assert again == once


def test_an_error_of_the_loss_is_not_taken_for_a_refusal() -> None:
    """A RuntimeError of the loss comes out after one call: otherwise the loss would be called again and hide it."""
    calls = list[int]()

    def failing(p: Any, b: Any) -> Any:
        calls.append(1)
        return (b["x"] @ p["embed"] @ p["embed"]).sum()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fshard.value_and_grad(failing)(sharded(None), batch(0, 0))
    assert len(calls) == 1


def test_torch_still_refuses_hooks_in_its_words() -> None:
    """torch's refusal of hooks is recognized by its words: otherwise a new torch would break losses with torch.func."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), pytest.raises(RuntimeError) as failure:
        func.grad(torch.sin)(torch.tensor(1.0))
    assert func_levels.refuses_hooks(failure.value)


def test_levels_are_left_and_entered_again() -> None:
    """The private calls that leave torch.func's levels still work: otherwise gathers would run inside a transform."""
    seen = list[bool]()

    def f(x: Tensor) -> Tensor:
        with func_levels.aside() as left:
            seen.append(func_levels.inside())
            plain = torch.ones(())
            with func_levels.again(left):
                seen.append(func_levels.inside())
                y = x.sin()
        return (y * plain).sum()

    x = torch.linspace(0, 1, 3)
    assert torch.equal(func.vmap(func.grad(f))(x), x.cos())
    assert seen == [False, True]
    assert not func_levels.inside()


def test_an_error_in_a_transform_spoils_no_later_one() -> None:
    """A trace that ends inside of transforms is an error alone: otherwise it would break torch.func for later calls."""

    def asks(x: Tensor) -> Tensor:
        return func.vmap(func.jacfwd(lambda y: y * y.sum().item()))(x)

    with pytest.raises(fshard.TraceError, match="item"):
        fshard.jit(asks, backend="eager")(torch.ones(2, 3))
    trained(None, "meanflow", "full", jitted=True)
    trained(None, "meanflow", "full", jitted=False)


DIRECTIONS: dict[str, Any] = {
    "jvp": lambda f, x: func.jvp(f, (x[0],), (x[1],))[1],
    "jvp of grad": lambda f, x: func.jvp(func.grad(f), (x[0],), (x[1],))[1],
    "jvp of jvp": lambda f, x: func.jvp(lambda y: func.jvp(f, (y,), (x[1],))[1], (x[0],), (x[1],))[1],
    "grad of jvp": lambda f, x: func.grad(lambda y: func.jvp(f, (y,), (x[1],))[1])(x[0]),
    "jacfwd of jacfwd": lambda f, x: func.jacfwd(func.jacfwd(f))(x[0]),
    "hessian": lambda f, x: func.hessian(f)(x[0]),
    "jacrev of jacfwd": lambda f, x: func.jacrev(func.jacfwd(f))(x[0]),
    "vmap of jacfwd": lambda f, x: func.vmap(func.jacfwd(f))(x),
    "vmap of jvp of grad": lambda f, x: func.vmap(lambda y: func.jvp(func.grad(f), (y,), (x[1],))[1])(x),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_forward_mode_of_views_and_its_gradients(name: str) -> None:
    """Forward mode at views of tensors is traced, alone and inside of gradients: otherwise the second operator of a
    kind in a program would decide whether it can be jitted."""

    def value(w: Tensor, x: Tensor) -> Tensor:
        return DIRECTIONS[name](lambda y: torch.tanh(torch.tanh(y @ w + w[0]) @ w).sum(), x)

    def total(w: Tensor, x: Tensor) -> Tensor:
        return value(w, x).square().sum()

    def taken(w: Tensor, x: Tensor) -> Tensor:
        leaf = w.detach().requires_grad_()
        return torch.autograd.grad(total(leaf, x), leaf)[0]

    args = rand(3, 3, seed=1), rand(2, 3, seed=2)
    for fn in (value, func.grad(total), taken):
        for _ in range(2):  # torch keeps what it worked out of an operator for the next trace
            assert apart(fshard.jit(fn, backend="eager")(*args), fn(*args)) < 1e-12
