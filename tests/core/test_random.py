"""Random numbers in a graph are those of the same code run eagerly, and come from the state alone."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.draws import DRAWS
from support.models import rand, same_bits
from support.steps import QUIET, apart, batch, start
from support.worlds import simulated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.compiler.trace import TraceError
from fshard.core.random import draw

pytestmark = pytest.mark.filterwarnings(QUIET)

# Functions of random operators that draw nothing.
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of all": lambda h: F.dropout(h, 1.0) + h,
    "no dropout": lambda h: F.dropout(h, 0.0),
    "dropout in evaluation": lambda h: F.dropout(h, 0.5, False),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "nothing to draw": lambda h: h + torch.rand(0).sum(),
}
# Functions that a graph cannot draw for, and the operator that the error names.
UNKNOWN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "multinomial": (lambda h: h[torch.multinomial(torch.ones(4), 4)], "multinomial"),
    "poisson": (lambda h: h * torch.poisson(h.detach().abs()), "poisson"),
    "binomial": (lambda h: h * torch.binomial(h.detach().abs(), h.detach().abs()), "binomial"),
    "normal": (lambda h: h * torch.normal(0.0, 1.0, h.shape), "normal"),
    "normal, tensors": (lambda h: h * torch.normal(h.detach(), 1.0), "normal"),
    "rrelu": (lambda h: F.rrelu(h, training=True), "rrelu"),
    "a generator": (lambda h: h * torch.rand(4, generator=torch.Generator().manual_seed(1)), "rand"),
    "a generator, in place": (lambda h: h.clone().uniform_(generator=torch.Generator().manual_seed(1)), "uniform_"),
}


def noisy(draw: Callable[[Tensor], Tensor]) -> Callable[..., fshard.Mean]:
    """The loss of the model with random numbers between its layers."""

    def loss(p: Any, b: dict[str, Tensor]) -> fshard.Mean:
        h = draw(torch.tanh(b["x"] @ p["a"]["w"] + p["a"]["b"]))
        y = torch.tanh(h @ p["c"]["w"]).square().sum(1)
        return fshard.Mean((y * b["gain"]).sum(), len(y))

    return loss


def two_steps(mesh: Any, draw: Callable[[Tensor], Tensor], backend: str, **kw: Any) -> list[Any]:
    """Eager and compiled results of two steps, on data that is the same on all ranks."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    state, step = start(mesh, loss_fn=noisy(draw), **kw)
    other, fast, rows = state, fshard.jit(step, backend=backend), []
    for i in range(2):
        before = torch.get_rng_state()
        again, _ = fast(other, batch(i, 0))
        other, row2 = fast(other, batch(i, 0))
        assert torch.equal(torch.get_rng_state(), before)
        assert same_bits(again, other)
        state, row = step(state, batch(i, 0))
        rows.append(((state, row), (other, row2)))
    return rows


@pytest.mark.parametrize("name", [*DRAWS, *NOTHING])
def test_a_graph_draws_the_eager_numbers(name):
    """A graph draws the eager bits and leaves torch's generator alone: otherwise jit would change training or later
    draws."""
    for eager, compiled in two_steps(None, {**DRAWS, **NOTHING}[name], "eager"):
        assert same_bits(eager, compiled)


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_depends_on_the_state(name):
    """Another seed gives other results: otherwise every run would draw equal numbers, and the test above see
    nothing."""
    state, step = start(None, loss_fn=noisy(DRAWS[name]))
    fast = fshard.jit(step, backend="eager")
    one, two = fast(state, batch(0, 0)), fast(fshard.tree.map(lambda x: x + (x == 7), state), batch(0, 0))
    assert not same_bits(one[1], two[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_draws_them_too(backend):
    """Compiled steps with micro-batches draw the eager numbers, also of a tensor that is transposed: otherwise
    torch.compile's backends would change dropout."""

    def draw(h: Tensor) -> Tensor:
        return F.dropout(torch.tanh((h @ h.t() @ h).t() * 2), 0.5).t() + torch.randn_like(h)

    law = partial(two_steps, draw=draw, backend=backend, accumulate=2)
    for rows in simulated(law, shard=2 if backend == "aot_eager" else 1):
        assert max(apart(*row) for row in rows) <= 1e-12


def drawn(mesh: Any) -> list[Tensor]:
    """The dropout masks of ones in each micro-batch of two steps."""

    def loss(p: Any, b: dict[str, Tensor]) -> Any:
        return (p["a"]["w"].sum() * b["x"]).sum(), F.dropout(torch.ones(64), 0.5)

    state, step = start(mesh, loss_fn=loss, has_aux=True, accumulate=2)
    step, found = fshard.jit(step, backend="eager"), []
    for _ in range(2):
        state, row = step(state, batch(0, 0))
        found += row["aux"]
    return found


def test_numbers_differ():
    """Ranks, steps and micro-batches draw different numbers, runs equal ones: otherwise masks would repeat, or a run
    not be repeatable."""
    runs = simulated(drawn, shard=2)
    every = [x for run in runs for x in run]
    assert len({tuple(x.tolist()) for x in every}) == len(every) == 8
    assert same_bits(simulated(drawn, shard=2), runs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_block_computed_again_draws_the_same(backend):
    """torch.utils.checkpoint draws the same numbers again: otherwise gradients would belong to another dropout mask."""

    def block(h: Tensor) -> Tensor:
        return F.dropout(torch.sin(F.dropout(h, 0.3)) * torch.rand_like(h), 0.5)

    def again(h: Tensor) -> Tensor:
        return F.dropout(checkpoint(block, h, use_reentrant=False), 0.2)

    def plain(h: Tensor) -> Tensor:
        return F.dropout(block(h), 0.2)

    def law(mesh: Any) -> None:
        for one, other in zip(two_steps(mesh, again, backend), two_steps(mesh, plain, backend), strict=True):
            assert apart(one, other) <= 1e-14
            assert same_bits(one[0], one[1])

    simulated(law, shard=2)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_random_operator_is_an_error(name):
    """A random operator that graphs do not know is an error with its name; without it a graph would repeat one draw."""
    draw, operator = UNKNOWN[name]
    state, step = start(None, loss_fn=noisy(draw), tx=optim.sgd(0.1))
    with pytest.raises((NotImplementedError, TraceError), match=rf"aten\.{operator}.*\bno such random"):
        fshard.jit(step, backend="eager")(state, batch(0, 0))


def test_a_seed_set_in_a_loss_is_an_error():
    """A seed set inside a loss is an error; without it every step would draw the same numbers."""

    def draw(h: Tensor) -> Tensor:
        torch.manual_seed(3)
        return h * torch.rand(4)

    state, step = start(None, loss_fn=noisy(draw))
    with pytest.raises(TraceError, match="seed"):
        fshard.jit(step, backend="eager")(state, batch(0, 0))


# Programs without a step that draw from torch's own generator.
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: x * torch.rand(8),
    "two draws": lambda x: x * torch.rand(8) + torch.randn(8),
    "permutation": lambda x: x[torch.randperm(8)],
    "dropout": lambda x: F.dropout(x, 0.5),
    "gradient": torch.func.grad(lambda x: F.dropout(x.sin(), 0.5).sum()),
    "checkpoint": lambda x: torch.autograd.grad(
        checkpoint(torch.sin, y := x.clone().requires_grad_(), use_reentrant=False).sum(), y
    )[0],
    "checkpoint, then dropout": lambda x: F.dropout(checkpoint(torch.sin, x, use_reentrant=False), 0.5),
    "fork": lambda x: forked(x) * torch.rand(8),
}


def forked(x: Tensor) -> Tensor:
    """Computes inside a fork of the generator, and draws nothing there."""
    with torch.random.fork_rng([]):
        return 2 * x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PLAIN)
def test_without_a_step_torch_draws(name, backend):
    """Outside a step a graph draws from torch's generator, new numbers per call: otherwise jit would freeze a user's
    draws."""
    fn, x = PLAIN[name], rand(8, seed=1)
    fast = fshard.jit(fn, backend=backend)
    torch.manual_seed(1)
    found = [fast(x) for _ in range(3)]
    torch.manual_seed(1)
    assert same_bits(found, [fn(x) for _ in range(3)])
    assert name == "checkpoint" or not same_bits(found[0], found[1])


def test_a_graph_draws_masks_with_the_operator_of_an_eager_call(monkeypatch):
    """Masks come from torch.native_dropout, as in eager code, and the global generator stays: otherwise a GPU would
    draw other masks."""
    asked, native = [], torch.native_dropout

    def noted(x, p, train):
        asked.append((x.dtype, p))
        return native(x, p, train)

    monkeypatch.setattr(torch, "native_dropout", noted)
    state = torch.Generator().manual_seed(3).get_state()
    before = torch.get_rng_state()
    mask, after = draw(state, "native_dropout", [], [0.5], torch.ones(9, dtype=torch.bfloat16))
    assert asked == [(torch.bfloat16, 0.5)]
    assert mask.dtype == torch.bool
    assert not torch.equal(state, after)
    assert torch.equal(torch.get_rng_state(), before)


class Devices:
    """Two devices of an accelerator, as torch's module for them: the state of each is how often it drew."""

    def __init__(self, is_used: bool):
        self.is_initialized = self.is_available = lambda: is_used
        self.device_count = lambda: 2
        self.drawn = [3, 5]

    def get_rng_state(self, device: torch.device) -> int:
        return self.drawn[device.index]

    def set_rng_state(self, state: int, device: torch.device) -> None:
        self.drawn[device.index] = state


@pytest.mark.parametrize("is_used", [True, False], ids=["in use", "never used"])
@pytest.mark.parametrize("args", [(), (3,), (torch.ones(2),)], ids=["nothing", "a number", "a tensor"])
def test_remat_rewinds_all_devices(args: tuple[Any, ...], is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the function is given, and at no cost where the accelerator was never used: to ask would start it."""
    devices, w, seen = Devices(is_used), torch.ones(2, requires_grad=True), []
    # not "cuda": its autocast would ask for the driver
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)

    def fn(*_: Any) -> Tensor:
        seen.append(devices.drawn)
        devices.drawn = [number + 1 for number in devices.drawn]
        return w.square().sum()

    out = fshard.remat(fn)(*args)
    devices.drawn = [5, 6]  # what comes after it draws, too
    out.backward()
    assert seen == [[3, 5], [3, 5] if is_used else [5, 6]]
    assert devices.drawn == ([5, 6] if is_used else [6, 7])
