"""Worlds whose collectives deliver late: the same bits, and an error for every access that comes too early."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, WIRED, lm_batch, lm_params, mean_loss, rand, same_bits
from support.optimizers import ROWS, TRANSFORMS
from support.writers import WRITERS
from torch import Tensor

import fshard
from fshard import DynamicLossScale, gather_params, optim, tree
from fshard.comm import primitives
from fshard.comm.ranks import Call, Pending
from fshard.testing import InFlightError, World
from fshard.testing.late import poison

PLANS: dict[str, dict[str, Any]] = {
    **WIRED,
    "wide sums": {"policy": "compute=bf16, reduce=f32"},
    "host": {"offload": ["blocks.*", "tail.left"]},
    "frozen": {"frozen": "blocks.1"},
    "whole": {"whole": ["blocks.0", "tail.left"]},
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donate": {"donate": True, "clip_norm": 0.1},
    "micro": {"accumulate": 2, "donate": True},
    "once": {"accumulate": 2, "reduce_once": True},
    "later": {"accumulate": 2, "reduce_once": "replicate"},
    "fast": {"reduction": "fast", "clip_norm": 0.1},
    "tree": {"reduction": "tree", "clip_norm": 0.1},
}


def even_batch(step: int, rank: int) -> dict[str, Tensor]:
    """The same number of rows on every rank, with different values."""
    return tree.map(lambda x: x[:4], lm_batch(step, rank))


def trained(
    mesh: Any, plan: str = "full", step: str = "plain", tx: str = "adamw", jit: str | None = None
) -> tuple[Any, ...]:
    """Metrics, parameters and optimizer state after two steps, from the last rank's parameters."""
    params, transform, how = lm_params(torch.float32), TRANSFORMS[tx](), STEPS[step]
    block = ROWS[tx].block
    made = fshard.make_plan(params, mesh, units=LM_UNITS, block=block, **PLANS[plan])
    scale = DynamicLossScale(8.0) if plan == "half" else None
    state = fshard.init_state(fshard.shard_params(params, made, src=mesh.size() - 1), transform, scale)
    donate = how.get("donate", False)
    run: Any = fshard.train_step(mean_loss, transform, **{**how, "donate": donate and jit is None})
    if jit is not None:
        run = fshard.jit(run, backend=jit, donate=donate)
    seen = []
    for i in range(2):
        state, metrics = run(state, (even_batch if step == "tree" else lm_batch)(i, mesh.get_rank()))
        seen.append(metrics)
    return seen, gather_params(state.params), optim.state.gather_state(state.opt_state)


def same_when_late(job: Callable[[Any], Any], **axes: int) -> None:
    """Assert that a function returns the same bits on every rank of a late world and of a usual one."""
    runs = [World(axes=axes, late=late).run(job) for late in (False, True)]
    assert same_bits(*runs)


def axes_for(plan: str, step: str) -> dict[str, int]:
    """The axes of the mesh: three ranks, or two (a tree needs a power of two), or 2 x 2."""
    if step == "later" or "replicate" in str(PLANS[plan]):
        return {"replicate": 2, "shard": 2}
    return {"shard": 2 if step == "tree" else 3}


def pairs() -> list[tuple[str, str]]:
    """Every step with the plan "full", every plan with two steps, and some plans with the step "tree"."""
    found, names = [("full", step) for step in STEPS], [name for name in STEPS if name not in ("tree", "later")]
    for number, plan in enumerate(PLANS):
        found += [(plan, names[(number + ahead) % len(names)]) for ahead in (0, 2)]
    return [*dict.fromkeys([*found, ("zero1", "tree"), ("wide", "tree"), ("host", "tree")])]


@pytest.mark.parametrize(("plan", "step"), pairs())
def test_every_plan_and_step(plan, step):
    """Steps that receive everything late have the same bits: otherwise they would read unfinished data on a GPU."""
    same_when_late(lambda mesh: trained(mesh, plan, step), **axes_for(plan, step))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_optimizer(name):
    """An optimizer's collectives are waited for before their results are read: otherwise updates would be garbage."""
    same_when_late(lambda mesh: trained(mesh, "zero1", "micro", name), shard=3)


GRAPHS = [("full", "donate"), ("zero1", "micro"), ("int8", "fast"), ("wide", "once"), ("ddp", "tree")]


@pytest.mark.parametrize(("plan", "step"), GRAPHS)
def test_graphs(plan, step):
    """A graph waits for its collectives before it reads them: otherwise a compiled step would read unfinished data."""
    same_when_late(lambda mesh: trained(mesh, plan, step, jit="eager"), **axes_for(plan, step))


def test_graphs_without_dead_code():
    """Removing dead code keeps the waits, also of what is only sent: otherwise a buffer would be freed too early."""

    def job(mesh: Any) -> Any:
        x = rand(4, seed=mesh.get_rank())
        both = lambda x: (fshard.broadcast(x, mesh, "shard"), fshard.all_to_all(x[:2], mesh, "shard"))  # noqa: E731
        return fshard.jit(both, backend="aot_eager")(x)

    same_when_late(job, shard=2)


UNEVEN = [([1, 3], [1, 0]), ([0, 4], [3, 4])]  # rank 1 sends nothing to rank 0
UNREAD: dict[str, Any] = {
    "all_gather": fshard.all_gather,
    "reduce_scatter": fshard.reduce_scatter,
    "all_reduce": fshard.all_reduce,
    "all_to_all": fshard.all_to_all,
    "shift": fshard.shift,
    "uneven": lambda x, mesh, axis: fshard.all_to_all(x, mesh, axis, sizes=UNEVEN[mesh.get_rank()]),
    "broadcast": lambda x, mesh, axis: fshard.broadcast(x, mesh, axis, src=1),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", UNREAD)
def test_graphs_that_read_nothing_of_a_collective(name, backend):
    """A collective whose result is not read is waited for, or not sent: otherwise it would write to freed memory."""

    def job(mesh: Any) -> Any:
        def fn(x: Any) -> Any:
            unread = UNREAD[name](2 * x, mesh, "shard")
            return x.sin().cos(), UNREAD[name](3 * x, mesh, "shard")[:1], len(unread)

        return fshard.jit(fn, backend=backend)(rand(4, seed=mesh.get_rank()))

    same_when_late(job, shard=2)


@pytest.mark.parametrize("grads", ["reduced", "local"])
@pytest.mark.parametrize("partition", ["flat", "leaf"])
def test_zero(partition, grads):
    """ZeRO waits for a bucket's gather before it reads the bucket: otherwise ranks would get unfinished parameters."""

    def job(mesh: Any) -> Any:
        tx = fshard.zero(TRANSFORMS["adamw"](), mesh, partition, grads, bucket=4 * 30)
        params = tree.map(torch.clone, lm_params(torch.float32))  # clones: no leaves are tied
        state = tx.init(params)
        for i in range(3):
            seed = i + (10 * mesh.get_rank() if grads == "local" else 0)
            given = tree.map(lambda x, seed=seed: rand(*x.shape, seed=seed, dtype=x.dtype), params)
            params, state = tx.step(given, state, params, donate=i == 2)
        return params

    same_when_late(job, shard=3)
    same_when_late(job, replicate=2, shard=2)


def everything(mesh: Any) -> Any:
    """All differentiable collectives, gradients outside of a step, and optimizer state gathered and sharded."""
    x, seen = torch.arange(6.0) + mesh.get_rank(), list[Any]()
    for axis in mesh.mesh_dim_names:
        seen += [fshard.all_gather(x, mesh, axis), fshard.broadcast(x, mesh, axis, src=1)]
        seen += [fshard.all_reduce(x, mesh, axis), fshard.all_reduce(x, mesh, axis, op="max")]
        seen += [fshard.all_reduce(torch.arange(6000.0), mesh, axis)]
        seen += [fshard.reduce_scatter(x, mesh, axis), fshard.all_to_all(x, mesh, axis)]
        seen += [fshard.shift(x, mesh, axis), fshard.shift(x, mesh, axis, -1, wrap=False)]
        seen.append(fshard.all_to_all(x[:, None], mesh, axis, join=1))
    params, batch = lm_params(), lm_batch(0, mesh.get_rank())
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS))
    value, grads = fshard.value_and_grad(mean_loss)(sharded, batch)
    own = fshard.value_and_grad(mean_loss, reduce=False)(sharded, batch)[1]
    state = optim.adamw(0.1).init(sharded)
    back = optim.state.shard_state(optim.state.gather_state(state), state)
    norm = fshard.optim.global_norm(grads)
    return (
        seen,
        value,
        norm,
        gather_params(grads),
        gather_params(fshard.reduce_grads(own)),
        optim.state.gather_state(back),
    )


def test_everything_else():
    """Collectives and functions outside of steps wait for what they read: otherwise they would return garbage."""
    same_when_late(everything, shard=2)
    same_when_late(everything, replicate=2, shard=3)


@pytest.mark.parametrize("name", WRITERS)
def test_what_users_may_write_to_is_not_lent(name):
    """A program that writes to results, or to what its reduction or wire is given, has the same bits when everything
    is late: otherwise, between processes, peers would receive what it wrote instead of what it sent."""
    same_when_late(lambda mesh: WRITERS[name](mesh, 10, lambda: None), shard=2)


# --- what a late world finds: mistakes in programs that would be right on a CPU ---


def in_flight(job: Callable[[Any], Any]) -> str:
    """The InFlightError of a function in a late world of two ranks; in a usual world it runs."""
    World(2).run(job)
    with pytest.raises(InFlightError) as error:
        World(2, late=True).run(job)
    return str(error.value)


def ranks_of(mesh: Any) -> Any:
    """The ranks along the axis."""
    return primitives.along(mesh, "shard")


def test_a_result_read_too_early_is_poison():
    """A result that is read before the wait is NaN, or bytes 0xA5: otherwise a missing wait would pass tests."""

    def job(mesh: Any) -> Any:
        outs = [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)]
        under_way = [primitives.all_gather(torch.ones(1).to(out.dtype), ranks_of(mesh), "u", out) for out in outs]
        early = [out.clone() for out in outs]
        return early, [pending.wait() for pending in under_way]

    for early, late in World(2, late=True).run(job):  # this rank's own part too: a backend may write it
        assert early[0].isnan().all()
        assert early[1].tolist() == [-0x5A5A5A5B] * 2
        assert all((x == 1).all() for x in late)
    assert poison(torch.zeros(2, 3).T).isnan().all()
    assert poison(torch.zeros(2, dtype=torch.complex64)).isnan().all()


def test_what_is_sent_may_not_change():
    """Writing to a buffer that is being sent is an error with its line: otherwise it would fail on GPUs only."""

    def job(mesh: Any) -> Any:
        x = torch.ones(4)
        pending = primitives.reduce_scatter(x, ranks_of(mesh), "blocks.3")
        x.zero_()
        return pending.wait()

    words = in_flight(job)
    assert words.startswith("reduce_scatter(float32[4], axis='shard') for unit 'blocks.3', started at ")
    assert words.endswith("was under way when what it sends was written to: wait for it first")
    assert f"{__file__}:" in words


def test_a_place_may_not_be_written_to():
    """Writing to, sending or receiving into a pending result is an error: otherwise it would fail on GPUs only."""
    out = [torch.empty(4), torch.empty(4)]

    def writes(mesh: Any) -> Any:
        pending = primitives.all_gather(torch.ones(2), ranks_of(mesh), "a", out[mesh.get_rank()])
        out[mesh.get_rank()].chunk(2)[1 - mesh.get_rank()].zero_()
        return pending.wait()

    def sends(mesh: Any) -> Any:
        pending = primitives.all_gather(torch.ones(2), ranks_of(mesh), "a", out[mesh.get_rank()])
        return primitives.reduce_scatter(out[mesh.get_rank()], ranks_of(mesh), "b").wait(), pending.wait()

    def lands(mesh: Any) -> Any:
        pending = primitives.all_gather(torch.ones(2), ranks_of(mesh), "a", out[mesh.get_rank()])
        return primitives.all_gather(torch.ones(2), ranks_of(mesh), "b", out[mesh.get_rank()]).wait(), pending.wait()

    assert "the place of its result was written to" in in_flight(writes)
    assert "would send what is still to arrive by all_gather(float32[2], axis='shard') for unit 'a'" in in_flight(sends)
    assert "would write to memory of all_gather(float32[2], axis='shard') for unit 'a'" in in_flight(lands)


@pytest.mark.parametrize("freed", [True, False])
def test_lent_memory_may_not_change_after_the_wait(freed):
    """Writing to memory that is sent without a copy is an error with the collective's line, though this rank has
    waited, and though the memory is freed: otherwise peers would read what was written, between processes only."""

    def job(mesh: Any) -> Any:
        full = primitives.all_gather(torch.ones(2), ranks_of(mesh), "blocks.3", lent=True).wait()
        full[2 * mesh.get_rank()] = 7
        return None if freed else full

    words = in_flight(job)
    assert words.startswith("all_gather(float32[2], axis='shard') for unit 'blocks.3', started at ")
    assert words.endswith("was written to after the wait, when a peer may still read it: write to a clone")
    assert f"{__file__}:" in words


def test_parameters_that_a_loss_keeps_may_not_change():
    """A write to parameters that a loss has stored elsewhere is an error: otherwise a peer would compute with it."""

    def job(mesh: Any) -> Any:
        kept, params = list[Tensor](), {"w": torch.ones(8)}
        loss = lambda p: (kept.append(p["w"].detach()), p["w"].sum())[1]  # noqa: E731
        grads = fshard.value_and_grad(loss)(fshard.shard_params(params, fshard.make_plan(params, mesh)))
        kept[0].zero_()
        return grads

    assert "written to after the wait" in in_flight(job)


def test_every_collective_is_waited_for():
    """A collective that nobody waits for is an error that names it: otherwise memory would be freed under it."""

    def job(mesh: Any) -> None:
        primitives.all_gather(torch.ones(2), ranks_of(mesh), "lost")
        primitives.all_gather(torch.ones(2), ranks_of(mesh), "kept").wait()

    words, call = in_flight(job), "all_gather(float32[2], axis='shard') for unit 'lost'"
    assert words.startswith(f"nobody has waited for 1 collective(s): {call}, started at {__file__}:")


def test_memory_is_received_into_or_sent():
    """An exchange that sends from what it receives into is an error: otherwise results would depend on timing."""

    def job(mesh: Any) -> Any:
        x, ranks = torch.ones(2), ranks_of(mesh)
        places = [x if rank == mesh.get_rank() else x[:1] for rank in range(2)]
        return Pending(
            ranks.exchange([x[:1], x[:1]], places, Call("an exchange", "shard", "", 0, text="a call")), lambda _: x
        ).wait()

    with pytest.raises(InFlightError, match=r"a call at .*test_late.py:\d+ would send from memory that it receives"):
        World(2, late=True).run(job)


def test_late_is_true_or_false():
    """`late=1` is a TypeError that says what is right: otherwise a user might take the number for a delay."""
    with pytest.raises(TypeError, match="a simulated world: late=1: expected True or False"):
        World(2, late=1)
