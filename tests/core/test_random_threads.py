"""An eager step has the same random numbers beside threads that draw from torch's generator."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.draws import DRAWS
from support.models import rand, same_bits
from support.steps import QUIET
from support.worlds import simulated
from torch import Tensor, func
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fshard
from fshard import optim
from fshard.core import random

pytestmark = pytest.mark.filterwarnings(QUIET, "ignore:The .grad attribute of a Tensor")
TX = optim.sgd(0.1)
Fn = Callable[[Tensor], Tensor]


def elsewhere(draw: Callable[[], object]) -> None:
    """Draw in another thread, to the end."""
    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()


def much() -> None:
    torch.rand(3), torch.randn(5), torch.randperm(7), F.dropout(torch.ones(4))


class Noisy(torch.autograd.Function):
    """The identity, whose gradient has noise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Callable[[], None]) -> Tensor:
        ctx.beside = beside
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.beside()
        return grad * torch.rand_like(grad), None


def seeds(fn: Fn, h: Tensor, beside: Callable[[], None]) -> Tensor:
    """A fixed noise, as `fork_rng` makes it, between others."""
    x = fn(h)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        x = x * torch.rand(4)
        beside()
    return fn(x)


def with_generator(fn: Fn, h: Tensor, beside: Callable[[], None]) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return fn(h * torch.rand(4, generator=generator)) * torch.rand(4, generator=generator)


def compiled(fn: Fn, h: Tensor, beside: Callable[[], None]) -> Tensor:
    """A part that torch.compile traces, in the step."""
    run = torch.compile(lambda x: F.dropout(x.sin(), 0.5), backend="aot_eager", fullgraph=True)
    x = run(fn(h))
    beside()
    return run(x)


def counted(fn: Fn, h: Tensor, beside: Callable[[], None]) -> Tensor:
    """In a dispatch mode."""
    with FlopCounterMode(display=False):
        return fn(fn(h))


# how a loss calls a function that draws, and what else it does
PLACES: dict[str, Callable[[Fn, Tensor, Callable[[], None]], Tensor]] = {
    "called": lambda fn, h, _: fn(fn(h)),
    "checkpoint": lambda fn, h, _: checkpoint(lambda x: fn(fn(x)), fn(h), use_reentrant=False),
    "two checkpoints": lambda fn, h, _: checkpoint(fn, fn(checkpoint(fn, h, use_reentrant=False)), use_reentrant=False),
    "remat": lambda fn, h, _: fshard.remat(lambda x: fn(fn(x)))(fn(h)),
    "remat of no argument": lambda fn, h, _: fn(fshard.remat(lambda: fn(h))()),
    "in the backward": lambda fn, h, beside: fn(Noisy.apply(fn(h), beside)),
    "seeds": seeds,
    "own generator": with_generator,
    "compiled": compiled,
    "counted": counted,
}
MAPPED: dict[str, Callable[[Fn, Tensor, Callable[[], None]], Tensor]] = {
    "vmap": lambda fn, h, _: func.vmap(fn, randomness="different")(torch.stack([h, h.cos()])),
    "vmap, same": lambda fn, h, _: func.vmap(fn, randomness="same")(torch.stack([h, h.cos()])),
    "grad": lambda fn, h, _: func.grad(lambda x: fn(x.sin()).sum())(h),
    "jvp": lambda fn, h, _: func.jvp(lambda x: fn(x.sin()), (h,), (h.cos(),))[1],
}


def trained(mesh: Any, fn: Fn, place: Any, beside: Callable[[], None], **how: Any) -> list[Any]:
    """Two steps of a loss in which another thread draws before, between and after what it draws itself."""

    def drawing(h: Tensor) -> Tensor:
        beside()
        out = fn(h)
        beside()
        return out

    def loss(p: Any, x: Tensor) -> Any:
        return fshard.Mean(place(drawing, x @ p["w"].tanh(), beside).square().sum(), len(x))

    whole = {"w": rand(4, 4, seed=2)}
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), TX, seed=1)
    step, losses = fshard.train_step(loss, TX, **how), []
    for number in range(2):
        state, metrics = step(state, rand(4, 4, seed=number + (0 if mesh is None else mesh.get_rank())))
        losses.append(metrics["loss"])
    return [losses, fshard.gather_params(state.params)]


def law(draw: str, place: str, mesh: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Bits alone, as with no other thread, and beside one."""
    run = lambda mesh, beside: trained(mesh, DRAWS[draw], {**PLACES, **MAPPED}[place], beside, **how)  # noqa: E731
    every = simulated if mesh else lambda fn: fn(None)
    with monkeypatch.context() as patch:
        patch.setattr(random, "active_count", lambda: 1)
        torch.manual_seed(5)
        alone = every(lambda mesh: run(mesh, lambda: None))
        after = torch.rand(3)
    torch.manual_seed(5)
    with monkeypatch.context() as patch:
        patch.setattr(random, "active_count", lambda: 2)
        assert same_bits(every(lambda mesh: run(mesh, lambda: None)), alone)
        assert same_bits(torch.rand(3), after)  # what the program draws next
        assert same_bits(every(lambda mesh: run(mesh, lambda: elsewhere(much))), alone)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_step_beside_a_thread_that_draws(draw: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of an eager step would depend on what a logger, a loader or another model draws meanwhile."""
    law(draw, place, False, monkeypatch)


# in-place methods are refused there, or mix samples
OF_SAMPLES = ["dropout", "rand", "randn_like", "randint", "randperm", "gumbel_softmax"]


@pytest.mark.parametrize("place", MAPPED)
@pytest.mark.parametrize("draw", OF_SAMPLES)
def test_in_transforms(draw: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators reach the step's generator below or above a transform, and samples would differ."""
    law(draw, place, False, monkeypatch)


@pytest.mark.parametrize("place", ["called", "checkpoint", "remat"])
@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"donate": True}], ids=["", "micro-batches", "donated"])
def test_on_ranks(how: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a stream, and each micro-batch: they would be mixed."""
    law("dropout twice", place, True, monkeypatch, **how)


def test_two_steps_at_once() -> None:
    """Each would seed the generator of the other."""
    whole, found = {"w": rand(4, seed=2)}, []
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole)), TX)
    other = fshard.train_step(lambda p, x: F.dropout(p["w"] * x).sum(), TX)

    def second() -> None:
        with pytest.raises(RuntimeError, match="another thread runs a step, and torch has one generator for all"):
            other(state, torch.ones(4))
        found.append("refused")

    def loss(p: Any, x: Tensor) -> Tensor:
        elsewhere(second)
        return p["w"].sum() + F.dropout(x).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "active_count", lambda: 2)
        fshard.train_step(loss, TX)(state, torch.ones(4))
    assert found == ["refused"]
