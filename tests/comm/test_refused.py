"""What has another derivative than the sum over ranks is refused in a loss: `vary`, `total`, and torch's own calls.

A collective without the loss's mesh is a warning.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.steps import QUIET
from support.worlds import gloo
from torch import Tensor

import fshard
from fshard import optim
from fshard.comm.collectives import total, vary
from fshard.testing import World

pytestmark = pytest.mark.filterwarnings(QUIET)
WHOLE = {"w": torch.linspace(0.1, 0.4, 4), "u": torch.ones(3)}
SGD = optim.sgd(0.1)


def start(mesh: Any) -> Any:
    return fshard.init_state(fshard.shard_params(WHOLE, fshard.make_plan(WHOLE, mesh)), SGD)


# by name: calls a loss
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda loss, state: fshard.train_step(loss, SGD)(state, torch.ones(2)),
    "in backward": lambda loss, state: fshard.train_step(loss, SGD, donate=True, in_backward=True)(
        state, torch.ones(2)
    ),
    "jit": lambda loss, state: fshard.jit(fshard.train_step(loss, SGD), backend="eager")(state, torch.ones(2)),
    "value_and_grad": lambda loss, state: fshard.value_and_grad(loss)(state.params, torch.ones(2)),
    "hvp": lambda loss, state: fshard.hvp(loss)(state.params, state.params, torch.ones(2)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("collective", [vary, total])
def test_a_value_that_exists_once_is_refused_in_a_loss(collective: Callable[..., Tensor], call: str) -> None:
    """Whole leaves would get W times their gradient, split ones a part, and the forward would be right."""

    def run(mesh: Any) -> None:
        with pytest.raises(RuntimeError, match=f"{collective.__name__}: expected no call inside a loss"):
            CALLS[call](lambda p, x: collective(p["w"] * 2, mesh, "shard").sum(), start(mesh))

    World(2).run(run)


def test_it_is_right_outside_of_a_loss() -> None:
    """Under torch.func a value that all ranks have is one; so are the parameters that a loss gathers by itself."""

    def run(mesh: Any) -> tuple[list[float], list[float], float]:
        state = start(mesh)
        grads = [
            torch.func.grad(lambda w, f=f: f(w, mesh, "shard").sum())(torch.ones(2)).tolist() for f in (vary, total)
        ]
        loss = fshard.evaluate(lambda p, x: (p["w"] * fshard.gather_params(state.params["w"])).sum())
        return *grads, loss(state.params, torch.ones(2)).item()

    (square,) = {round(x, 6) for *_, x in World(1, 2).run(run)}
    assert square == round(float(WHOLE["w"].square().sum()), 6)
    assert [x[:2] for x in World(2).run(run)] == [([2.0, 2.0], [1.0, 1.0])] * 2


# by name: calls a collective of a mesh
OF_A_MESH: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, mesh: fshard.all_reduce(x, mesh, "shard"),
    "all_gather": lambda x, mesh: fshard.all_gather(x, mesh, "shard"),
    "reduce_scatter": lambda x, mesh: fshard.reduce_scatter(x, mesh, "shard"),
    "all_to_all": lambda x, mesh: fshard.all_to_all(x, mesh, "shard"),
    "shift": lambda x, mesh: fshard.shift(x, mesh, "shard"),
    "broadcast": lambda x, mesh: fshard.broadcast(x, mesh, "shard"),
}


def told(call: str, name: str, axes: dict[str, int], mesh_of: Callable[[Any], Any]) -> list[str]:
    """The warnings of two calls, each at the line of the collective: once for each line, as Python has it."""

    def run(mesh: Any) -> None:
        for _ in range(2):
            CALLS[call](lambda p, x: OF_A_MESH[name](p["w"], mesh_of(mesh)).square().sum(), start(mesh))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", ".*torch.jit.script")
        World(axes=axes).run(run)
    assert {(x.filename, x.lineno) for x in caught} <= {(__file__, OF_A_MESH[name].__code__.co_firstlineno)}
    return [str(x.message) for x in caught]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OF_A_MESH)
def test_a_loss_that_leaves_its_mesh_out_is_warned(name: str, call: str) -> None:
    """A loss that closes over `mesh = None` would train on each rank's own statistics, without a word."""
    words = f"{name}: expected the loss's mesh of 2 ranks, got None: each rank takes its own value. Give the mesh"
    messages = told(call, name, {"shard": 2}, lambda mesh: None)
    assert {x.partition(" as an")[0] for x in messages} == {words}
    assert len(messages) == 1 or call == "jit"  # a trace begins Python's count again
    assert told(call, name, {"shard": 1}, lambda mesh: None) == []


@pytest.mark.parametrize("name", OF_A_MESH)
def test_a_mesh_of_one_rank_is_no_mesh_left_out(name: str) -> None:
    """Who sums along an axis of one rank, or outside of a loss, would be warned of what is meant."""
    assert told("step", name, {"replicate": 2, "shard": 1}, lambda mesh: mesh["shard"]) == []
    with warnings.catch_warnings(action="error"):
        World(2).run(lambda mesh: OF_A_MESH[name](torch.ones(2), None))


def every(x: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of torch.distributed that send `x`, by name."""
    room = torch.zeros(2 * len(x), dtype=x.dtype)
    return {
        "all_reduce": lambda: dist.all_reduce(x.clone()),
        "all_gather": lambda: dist.all_gather([*room.chunk(2)], x),
        "broadcast": lambda: dist.broadcast(x.clone(), 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.zeros_like(x), x),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(len(x) // 2), [*x.chunk(2)]),
    }


def in_processes(mesh: Any, name: str) -> list[str]:
    """What a loss with a call of torch.distributed says: checked, checked and detached, and not checked."""
    said = []
    for is_checked, detached in ((True, False), (True, True), (False, False)):

        def loss(p: Any, x: Tensor, detached: bool = detached) -> Tensor:
            every(p["w"].detach() if detached else p["w"] * 2)[name]()
            with torch.no_grad():
                every(p["w"])[name]()
            return p["w"].sum()

        fn = fshard.value_and_grad(loss)
        try:
            (fshard.check(fn) if is_checked else fn)(start(mesh).params, torch.ones(2))
            said.append("")
        except RuntimeError as failure:
            said.append(str(failure))
    return said


@pytest.mark.parametrize("name", every(torch.ones(4)))
def test_a_raw_collective_is_an_error_in_a_checked_call(name: str) -> None:
    """Its result has no gradient, or another, and nothing else would tell."""
    for checked, detached, plain in gloo(in_processes, name):
        assert "of torch.distributed, whose derivative is not that of the sum over ranks" in checked
        assert detached == plain == ""
