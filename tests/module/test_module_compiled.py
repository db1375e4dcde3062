"""A step whose loss is a module's function, under the user's own torch.compile, has the eager numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from support.models import STRATEGIES
from support.modules import BLOCKS, error, tied, words
from support.steps import EXACT, QUIET, rank_of
from support.worlds import simulated
from torch import Tensor, nn

import fshard

pytestmark = pytest.mark.filterwarnings(QUIET)
IMAGE = (2, 3, 5, 5)


@pytest.fixture(autouse=True)
def _fresh():
    """Clear what dynamo has compiled before."""
    torch._dynamo.reset()


class Sliced(nn.Module):
    """Puts its parameters into other modules, in its forward, and asks what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) -> (rows, 3)."""
        rows = self.rows[1:]
        assert all(isinstance(row, nn.Parameter) and row.is_leaf and row.requires_grad for row in rows)
        return x * sum(rows) + self.rows[0].data


class Counting(nn.Module):
    """A buffer that its forward reads and writes, beside an attribute that is a tensor of the form of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 3) -> (rows, 3)."""
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x * self.weight * self.mean


class First(nn.Module):
    """The first result of a module that returns several."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Any:
        """What the module computes."""
        return self.inner(*[x] * self.times)[0]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(4, 3)),
    "convolution": (lambda: nn.Conv2d(3, 2, 3), lambda: torch.randn(IMAGE)),
    "embedding": (lambda: nn.Embedding(5, 3), lambda: torch.randint(0, 5, (4,))),
    "lstm": (lambda: First(nn.LSTM(3, 3), 1), lambda: torch.randn(4, 2, 3)),
    "attention": (lambda: First(nn.MultiheadAttention(4, 2), 3), lambda: torch.randn(3, 2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 5, 0.0), lambda: torch.randn(3, 2, 4)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(3), nn.BatchNorm1d(3).eval()), lambda: torch.randn(4, 3)),
    "batch norm": (lambda: nn.BatchNorm2d(3), lambda: torch.randn(IMAGE)),
    "parametrization": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: torch.randn(4, 3),
    ),
    "sliced": (Sliced, lambda: torch.randn(4, 3)),
    "buffer": (Counting, lambda: torch.randn(4, 3)),
}
BACKENDS = ["eager", "aot_eager", pytest.param("inductor")]


def compiles(
    module: nn.Module,
    batches: list[Any],
    score: Callable[[Any, Any], Tensor],
    mesh: Any = None,
    plan: Any = None,
    **kw: Any,
) -> None:
    """Assert that steps under torch.compile have the parameters, losses and buffers of eager steps."""
    apply, params, buffers = fshard.module.functionalize(module)

    def loss(p: Any, buffers: Any, batch: Any) -> Any:
        out, buffers = apply(p, buffers, batch["tokens"])
        return fshard.Mean(score(out, batch), out.numel()), buffers

    plan = fshard.make_plan(params, mesh, frozen=apply.frozen, **(plan or {}))
    step = fshard.train_step(loss, EXACT, with_extra=True)
    fast = torch.compile(step, fullgraph=True, **kw)
    state = other = fshard.init_state(fshard.shard_params(params, plan), EXACT, extra=buffers)
    for batch in batches:
        (state, row), (other, found) = step(state, batch), fast(other, batch)
        one, two = [(fshard.gather_params(s.params), s.extra, r["loss"]) for s, r in ((state, row), (other, found))]
        for a, b in zip(fshard.tree.leaves(one), fshard.tree.leaves(two), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_under_torch_compile(kind, backend, dynamic):
    """torch.compile would refuse the parameters that a module reads, or compute other numbers with them."""
    torch.manual_seed(0)
    make, data = KINDS[kind]
    inputs = [x.double() if x.is_floating_point() else x for x in (data(), data())]
    given = [{"tokens": x} for x in inputs]
    # without the second term gradients of a bias after a norm are 0 up to rounding, which Adam makes large
    compiles(make().double(), given, lambda out, _: (out.square() + out).sum(), backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("strategy", ["full", "keep", "zero1", "ddp"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_model_under_torch_compile(kind, strategy):
    """The same for models with tied and frozen leaves whose parameters are gathered when they are read."""

    def law(mesh: Any) -> None:
        torch._dynamo.reset()
        plan = {"units": ["blocks.*"], **STRATEGIES[strategy]}
        data = [words(i, rank_of(mesh)) for i in range(2)]
        compiles(tied(kind), data, error, mesh, plan, backend="aot_eager")

    simulated(law, shard=2)
