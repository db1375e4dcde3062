"""Memory that a graph lends to peers: which buffers, and that a compiler uses it again only after peers have read."""

from typing import Any

import pytest
import torch
from support.graphs import state_of
from support.models import rand
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.comm import primitives
from fshard.compiler.dataflow import gathers, is_call
from fshard.compiler.inspect import arguments, starts

WIDE = 600  # a block's buffer has 2.9 MB, so it lies in shared memory


def lent_starts(graph: Any) -> list[str]:
    """The labels of the collectives whose buffers are lent.

    Each is settled once, after all that reads it, and the graph returns this: a compiler uses the memory after that.
    """
    rooms = [node for node in graph.nodes if node.kwargs.get("settled")]
    order = {node: i for i, node in enumerate(graph.nodes)}
    read = {x: gather.readers for gather in gathers(graph) for x in gather.views}
    for room in rooms:
        buffer = room if is_call(room, "fshard.room") else next(n for n in room.users if n.args == (room, 0))
        (settled,) = (user for user in buffer.users if is_call(user, "fshard.settle"))
        assert settled in graph.output_node().all_input_nodes
        assert all(order[x] <= order[settled] for x in (*buffer.users, *read.get(buffer, ())))
    return [
        arguments(start)["label"]
        for start in starts(graph)
        if start in rooms or (not is_call(start, "fshard.all_gather") and arguments(start)["x"] in rooms)
    ]


def test_a_step_lends_the_buffers_of_its_units():
    """A compiled step would copy what it sends once more than the eager step: M took 1.04 of its processor time."""

    def law(mesh: Any) -> None:
        step, state, tokens = state_of(mesh, optim.adamw(0.1))
        graph = fshard.jit(step, donate=True, backend="eager", bucket=0).lower(state, tokens).graph
        units = [arguments(start)["label"] for start in starts(graph) if not is_call(start, "fshard.all_reduce")]
        assert lent_starts(graph) == units

    simulated(law)


def test_a_graph_with_a_collective_without_a_label_lends_nothing():
    """Two ranks that read its result at different places would wait for each other."""

    def law(mesh: Any) -> None:
        step, state, tokens = state_of(mesh, optim.adamw(0.1))

        def both(state: Any, tokens: Tensor) -> Any:
            return step(state, tokens), fshard.all_gather(tokens, mesh, "shard")

        assert lent_starts(fshard.jit(both, backend="eager").lower(state, tokens).graph) == []

    simulated(law)


def loss(p: Any, x: Tensor) -> Tensor:
    """Two blocks of one size."""
    for block in p["blocks"]:
        x = torch.tanh(x @ block["w"])
    return x.square().mean()


def steps(mesh: Any) -> list[int]:
    """The sizes of the shared memory of this rank, after compiled steps that are checked against the eager steps."""
    params = {"blocks": [{"w": rand(WIDE, WIDE, seed=i) / 25} for i in range(3)]}
    plan, tx = fshard.make_plan(params, mesh, units=["blocks.*"]), optim.sgd(1e-2)
    step = fshard.train_step(loss, tx)
    jitted = fshard.jit(step, donate=True)  # of the other backends aot_eager copies what operators write to
    states = [fshard.init_state(fshard.shard_params(params, plan), tx) for _ in range(2)]
    for i in range(4):
        x = rand(5, WIDE, seed=10 * i + mesh.get_rank())
        states = [run(state, x)[0] for run, state in zip((step, jitted), states, strict=True)]
        torch.testing.assert_close(*(state.params.tensors for state in states), rtol=0, atol=1e-15)
    return [s.data.numel() for s in primitives.along(plan.live_mesh(), "shard")._memory.segments]


@pytest.mark.slow
def test_compiled_steps_between_processes():
    """A peer would read memory that the graph uses for other values already, or get copies of each part."""
    for sizes in gloo(steps):
        assert min(sizes) >= 8 * WIDE * WIDE  # whole buffers: what one rank sends of one has half of that
