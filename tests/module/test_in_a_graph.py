"""What modules and their helpers do that a graph could refuse: all is as in the eager call."""

from functools import partial
from typing import Any

import pytest
import torch
from support.worlds import simulated
from torch import Tensor, nn

import fshard

eager = partial(fshard.jit, backend="eager")
X = torch.linspace(-1, 1, 12).view(4, 3)


def close(found: Any, expected: Any) -> None:
    """The leaves are equal but for rounding, which may follow addresses."""
    torch.testing.assert_close(fshard.tree.leaves(found), fshard.tree.leaves(expected))


class Box:
    """An object of the user's."""

    def __init__(self, x: Tensor):
        self.x = x


KEPT: dict[str, Any] = {
    "a tensor": lambda x: x,
    "a list": lambda x: [x],
    "a dict": lambda x: {"a": (x,)},
    "an object": Box,
    "a parameter in a list": lambda x: [nn.Parameter(x, requires_grad=False)],
    "a view": lambda x: x.repeat(2)[::2],
    "of another dtype": lambda x: x.double(),
    "sparse": lambda x: x.to_sparse(),
    "conjugated": lambda x: torch.complex(x, x).conj(),
}


class Scaled(nn.Module):
    """A layer with a tensor that is no buffer, which it reads if it can."""

    def __init__(self, kept: str, reads: bool, writes: bool = False):
        super().__init__()
        self.layer, self.kept = nn.Linear(3, 3), KEPT[kept](torch.tensor([1.0, 2.0, 3.0]))
        self.reads, self.writes = reads, writes

    def forward(self, x: Tensor) -> Tensor:
        if not self.reads:
            return self.layer(x)
        kept = self.kept["a"] if isinstance(self.kept, dict) else self.kept
        kept = kept[0] if isinstance(kept, list | tuple) else getattr(kept, "x", kept)
        if self.writes:
            kept.mul_(2)
        return self.layer(x) * (kept.real if kept.is_complex() else kept).float()


def stepped(module: nn.Module, mesh: Any = None) -> tuple[Any, Any]:
    """A step of a module's function and a state for it."""
    apply, params, buffers = fshard.module.functionalize(module)
    tx = fshard.optim.sgd(0.1)
    loss = lambda p, x: apply(p, buffers, x)[0].square().mean()  # noqa: E731
    return fshard.train_step(loss, tx), fshard.init_state(
        fshard.shard_params(params, fshard.make_plan(params, mesh)), tx
    )


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kept", KEPT)
def test_tensors_that_are_no_buffers(kept: str, reads: bool) -> None:
    """A copy of the module would be refused in a trace, even for a tensor that nobody reads."""
    step, state = stepped(Scaled(kept, reads and kept != "sparse"))
    close(eager(step)(state, X), step(state, X))
    assert fshard.jit(step).lower(state, X).memory().peak == fshard.estimate(step, state, X).peak.bytes
    assert fshard.eval_shape(step, state, X)[1]["loss"].shape == ()


def test_a_write_to_such_a_tensor_stays_in_the_call() -> None:
    """A graph that writes to its constant would compute with another one in the next call."""
    apply, params, _ = fshard.module.functionalize(Scaled("a tensor", True, writes=True))
    run = eager(lambda p, x: apply(p, {}, x)[0])
    with torch.no_grad():
        close(run(params, X), run(params, X))
        close(run(params, X[:1]), run(params, X)[:1])


@torch.compile(backend="eager")
def decorated(x: Tensor) -> Tensor:
    """A helper."""
    return torch.tanh(x) * SCALE[0]


SCALE = [torch.tensor(2.0)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_torch_compile_decorated() -> None:
    """A loss with a compiled helper would have no graph; what the helper reads is read at each run."""
    params = {"w": torch.ones(3)}
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx)
    step = fshard.train_step(lambda p, x: decorated(x * p["w"]).sum(), tx)
    run = eager(step)
    for _ in range(2):
        close(run(state, X), step(state, X))
        SCALE[0].mul_(2)


def averaged(mesh: Any, jitted: bool, sync: bool) -> Any:
    """Buffers and outputs of two calls of a norm without momentum."""
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)).double()
    apply, params, buffers = fshard.module.functionalize(norm, sync_batch_norm=sync)
    params = fshard.shard_params(params, fshard.make_plan(params, mesh))
    run = fshard.predict(lambda p, b, x: apply(p, b, x))
    run, found = eager(run) if jitted else run, []
    for step in range(2):
        out, buffers = run(params, buffers, X.double() * (mesh.get_rank() + 1) + step)
        found += [out, buffers]
    return found


@pytest.mark.parametrize("sync", [False, True])
def test_batch_norms_without_momentum(sync: bool) -> None:
    """Torch's code asks for the number of batches, which a graph does not know."""
    found, expected = (simulated(partial(averaged, jitted=jitted, sync=sync)) for jitted in (True, False))
    close(found, expected)
