"""What `remat` is for: less memory, as torch's checkpoint, in torch.func too, and as many gathers."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.memory import Live
from support.steps import QUIET
from torch import Tensor, func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import remat
from fshard.testing import World

pytestmark = pytest.mark.filterwarnings(QUIET)
WIDTH, LAYERS, ROWS = 32, 12, 512
Apply = Callable[..., Tensor]


def plain(fn: Apply, *args: Any) -> Tensor:
    """Call a function."""
    return fn(*args)


def torchs(fn: Apply, *args: Any) -> Tensor:
    """Call a function in torch's checkpoint."""
    return checkpoint(fn, *args, use_reentrant=False)


def ours(fn: Apply, *args: Any) -> Tensor:
    """Call a function in `remat`."""
    return remat(fn)(*args)


def params(device: str = "cpu", number: int = LAYERS) -> dict[str, Any]:
    """Equal layers, and a small root."""
    layers = [
        {name: torch.full((WIDTH, WIDTH), (1 + i) / 100, device=device) for name in ("up", "down")}
        for i in range(number)
    ]
    return {"layers": layers, "scale": torch.ones(WIDTH, device=device)}


def stack(call: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A loss of a stack of layers, each called by `call`."""

    def loss(p: Any, x: Tensor) -> Tensor:
        def layer(x: Tensor, number: int) -> Tensor:
            weights = p["layers"][number]
            return x + F.gelu(F.gelu(x @ weights["up"]).square() @ weights["down"])

        for number in range(len(p["layers"])):
            x = call(layer, x, number)
        return (x * p["scale"]).square().mean()

    return loss


def peak(fn: Callable[[], Any]) -> int:
    """The most bytes alive in a call."""
    with Live() as live:
        fn()
    return live.peak


X = torch.full((ROWS, WIDTH), 0.5)


def eager(loss: Any) -> int:
    """The peak of an eager gradient on one device."""
    sharded = fshard.shard_params(params(), fshard.make_plan(params(), units=["layers.*"]))
    return peak(lambda: fshard.value_and_grad(loss)(sharded, X))


def in_graph(loss: Any) -> int:
    """The peak of the graph of a step of two ranks."""
    mesh, tx = fshard.AbstractMesh(shard=2), fshard.optim.sgd(0.1)
    plan = fshard.make_plan(params("meta"), mesh, units=["layers.*"])
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params("meta"))
    return fshard.jit(fshard.train_step(loss, tx)).lower(state, X.to("meta")).memory().peak


@pytest.mark.parametrize("how", [eager, in_graph])
def test_the_peak_is_that_of_torchs_checkpoint(how: Callable[[Any], int]) -> None:
    """A loss with `remat` would keep activations, or buffers of units."""
    without, theirs, own = (how(stack(call)) for call in (plain, torchs, ours))
    assert own <= 1.15 * theirs, (own, theirs)
    assert own < 0.6 * without, (own, without)


PROGRAMS = {
    "grad": lambda f: func.grad(f)(params(), X),
    "per-sample gradients": lambda f: func.vmap(func.grad(f), (None, 0))(params(), X.view(4, -1, WIDTH)),
    "Hessian-vector product": lambda f: func.jvp(lambda p: func.grad(f)(p, X), (params(),), (params(),))[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_peak_falls_in_transforms(name: str) -> None:
    """torch.func keeps what a second derivative needs, so that running again once would keep all the same."""
    without, own = (peak(lambda call=call: PROGRAMS[name](stack(call))) for call in (plain, ours))
    assert own < 0.6 * without, (own, without)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_unit_is_gathered_as_often(jitted: bool) -> None:
    """A function that runs again would gather a unit a third time."""

    def gathers(call: Any) -> Counter[str]:
        world = World(shard=2)

        def job(mesh: Any) -> None:
            few = params(number=4)
            plan = fshard.make_plan(few, mesh, units=["layers.*"])
            fn = fshard.value_and_grad(stack(call))
            (fshard.jit(fn, backend="eager") if jitted else fn)(fshard.shard_params(few, plan), X[:8])

        world.run(job)
        return Counter(one.unit for one in world.log if one.kind == "all_gather" and one.unit.startswith("layers"))

    counts = gathers(ours)
    assert counts == gathers(torchs)
    assert set(counts.values()) <= {1, 2}  # the last unit stays from the forward to the backward
