"""What needs no copy: leaves that one rank has whole, and sums of gradients that every rank has whole."""

from typing import Any

import pytest
import torch
from support.models import LM_UNITS, NARROW, STRATEGIES, lm_batch, lm_params, mean_loss, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, optim, tree
from fshard.comm import primitives
from fshard.grad import travel
from fshard.hosts.one_host import connected
from fshard.testing import World

POLICIES = {"f32": None, "bf16": "compute=bf16, reduce=bf16", "f16": "compute=f16"}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True, "clip_norm": 0.1},
    "micro": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
    "in_backward": {"donate": True, "in_backward": True},
}


def steps(mesh: Any, policy: str, how: str, strategy: str = "full", tx: Any = None) -> tuple[Any, set[str], bool]:
    """The state's tensors after two steps, which collectives have run, and whether the loss has read views."""
    tx, params = tx or optim.adamw(0.1), lm_params(torch.float32)
    cuts = STRATEGIES[strategy] if mesh is not None else {}
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, policy=POLICIES[policy], **cuts)
    state, views = fshard.init_state(fshard.shard_params(params, plan), tx), set[bool]()
    rows: set[int] = set()

    def loss(p: Any, batch: Any) -> Any:
        views.add(p["blocks"][0]["w"].untyped_storage()._cdata in rows)
        return mean_loss(p, batch)

    step = fshard.train_step(loss, tx, **STEPS[how])
    with fshard.collectives.tally() as records:
        for i in range(2):
            rows = {row.untyped_storage()._cdata for row in state.params.tensors}
            state, metrics = step(state, lm_batch(i, 0))
    moments = [x for x in tree.leaves(gather_params(state.opt_state)) if isinstance(x, Tensor)]
    (is_view,) = views
    return (gather_params(state.params), moments, metrics), {r.kind for r in records}, is_view


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", NARROW)
def test_one_rank_reads_its_own_rows(strategy, policy, how):
    """A mesh of one rank would copy parameters, send itself something, or have other bits than without a mesh."""
    if how == "once" and policy != "f32":
        pytest.skip("on a mesh the sum of micro-batches is rounded, too")
    for tx in (optim.adamw(0.1), optim.sgd(0.1, momentum=0.9)):
        ((result, kinds, is_view),) = simulated(steps, policy, how, strategy, tx, shard=1)
        assert same_bits(result, steps(None, policy, how, tx=tx)[0])
        assert "all_gather" not in kinds
        # an update in the backward writes to the rows, so the loss reads a copy
        assert is_view == (policy == "f32" and how != "in_backward")


def in_place(mesh: Any) -> list[tuple[Tensor, Tensor]]:
    """Sums over ranks in the place of what is summed, and such sums in a place of their own."""
    ranks, pairs = primitives.along(mesh, "shard"), []
    generator = torch.Generator().manual_seed(mesh.get_rank())
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
        for numel in (12, 6000, 300_000):
            x = (100 * torch.randn(numel, generator=generator)).to(dtype)
            apart = primitives.all_reduce(x.clone(), ranks).wait().clone()
            again = x.clone()
            pairs.append((apart, primitives.all_reduce(x, ranks, out=x).wait()))
            # a compiled graph makes another tensor object of the same memory
            pairs.append((apart, primitives.all_reduce(again, ranks, out=again.view(-1)).wait()))
    return pairs


def check_in_place(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Both sums have the same bits."""
    for apart, summed in pairs:
        assert same_bits(apart, summed)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_sum_in_the_place_of_its_terms(ranks, late):
    """A rank would read what the sum has overwritten already, or two ranks would have different sums."""
    for pairs in World(shard=ranks, late=late).run(in_place):
        check_in_place(pairs)


def whole_gradients(mesh: Any, strategy: str, apart: bool, jitted: bool = False) -> Any:
    """Parameters and gradients after two steps whose gradients are summed whole, in units that are large and small."""
    params = {"layers": [torch.full((515, 513), 0.01), torch.full((7, 513), 0.02)], "scale": torch.ones(513)}
    plan = fshard.make_plan(params, mesh, units=["layers.*"], **STRATEGIES[strategy])

    def loss(p: Any, x: Tensor) -> Tensor:
        return ((x @ p["layers"][0]) * p["scale"] + x[:, :7] @ p["layers"][1]).square().mean()

    generator = torch.Generator().manual_seed(mesh.get_rank())
    state = fshard.init_state(fshard.shard_params(params, plan), optim.adamw(0.01))
    step: Any = fshard.train_step(loss, optim.adamw(0.01), donate=not jitted)
    step = fshard.jit(step, donate=True, backend="eager") if jitted else step
    before, travel._LARGE = travel._LARGE, 1 << 40 if apart else travel._LARGE
    try:
        for _ in range(2):
            batch = torch.randn(3, 515, generator=generator)
            grads = gather_params(fshard.value_and_grad(loss)(state.params, batch)[1])
            state, metrics = step(state, batch)
    finally:
        travel._LARGE = before
    return gather_params(state.params), grads, metrics


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_whole_gradients_are_summed_where_they_lie(strategy):
    """Gradients of large units would have other bits if their sum takes their place, simulated or between processes."""
    apart = simulated(whole_gradients, strategy, True, shard=3)
    for run in (simulated, gloo):
        for result, expected in zip(run(whole_gradients, strategy, False, shard=3), apart, strict=True):
            assert same_bits(result, expected)


def test_a_graph_sums_whole_gradients_where_they_lie():
    """A graph would read what the sum has overwritten, or compute other bits than a sum apart."""
    apart = simulated(whole_gradients, "ddp", True, True, shard=3)
    late = World(shard=3, late=True)  # whose sums consist of messages, as between processes
    for result, expected in zip(late.run(whole_gradients, "ddp", False, True), apart, strict=True):
        assert same_bits(result, expected)


def in_processes(mesh: Any) -> list[tuple[Tensor, Tensor]]:
    """`in_place` with messages through shared memory."""
    return in_place(connected(mesh))


def test_sums_in_place_on_processes():
    """A part would be overwritten while a peer reads it."""
    for pairs in gloo(in_processes, shard=2):
        check_in_place(pairs)
