"""The backend that takes the time of a link, and how much of that time fshard and FSDP2 leave exposed."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import gloo
from torch.distributed.device_mesh import DeviceMesh

import fshard

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
LATENCY, BANDWIDTH, NUMEL = 0.015625, 1024.0, 24  # float32 numbers


def delaying_group() -> Any:
    """A new group of all processes on the backend of the benchmarks, which counts time."""
    sys.path.insert(0, BENCHMARKS)
    from delaying import Counted, Link, delaying

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 has new names for some collectives
    warnings.filterwarnings("ignore", message=".*deprecated")
    dist.Backend.register_backend("delaying", delaying, devices=["cpu"])
    group = dist.new_group(backend="cpu:delaying")
    group.use(Link(LATENCY, BANDWIDTH), Counted())
    return group


def messages(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Send a tensor to every rank by single messages; the sum of what comes."""
    rank, places = dist.get_rank(group), [x.clone() for _ in range(dist.get_world_size(group))]
    peers = [p for p in range(len(places)) if p != rank]
    ops = [dist.P2POp(dist.irecv, places[p], group=group, group_peer=p) for p in peers]
    for work in dist.batch_isend_irecv(ops + [dist.P2POp(dist.isend, x, group=group, group_peer=p) for p in peers]):
        work.wait()
    return torch.stack(places).sum(0)


def _out(numel: int, start: Callable[[torch.Tensor], object]) -> torch.Tensor:
    out = torch.empty(numel)
    start(out)
    return out


def _in_place(x: torch.Tensor, start: Callable[[torch.Tensor], object]) -> torch.Tensor:
    start(copy := x.clone())
    return copy


# what each collective computes, and how many numbers a rank sends for a tensor of n numbers on w ranks
COLLECTIVES: dict[str, tuple[Callable[[Any, torch.Tensor, int], torch.Tensor], Callable[[int, int], float]]] = {
    "all_gather": (
        lambda g, x, w: _out(w * NUMEL, lambda out: dist.all_gather_into_tensor(out, x, group=g)),
        lambda n, w: (w - 1) * n,
    ),
    "reduce_scatter": (
        lambda g, x, w: _out(NUMEL // w, lambda out: dist.reduce_scatter_tensor(out, x.clone(), group=g)),
        lambda n, w: (w - 1) * n / w,
    ),
    "all_reduce": (
        lambda g, x, w: _in_place(x, lambda copy: dist.all_reduce(copy, group=g)),
        lambda n, w: 2 * (w - 1) * n / w,
    ),
    "all_to_all": (
        lambda g, x, w: _out(NUMEL, lambda out: dist.all_to_all_single(out, x, group=g)),
        lambda n, w: (w - 1) * n / w,
    ),
    "broadcast": (lambda g, x, w: _in_place(x, lambda copy: dist.broadcast(copy, 0, group=g)), lambda n, w: n),
    "messages": (lambda g, x, w: messages(g, x), lambda n, w: (w - 1) * n),
}


def times(mesh: Any) -> dict[str, tuple[float, bool]]:
    """Of each collective the seconds that it takes, and whether gloo has the same result."""
    group, results = delaying_group(), {}
    world, x = dist.get_world_size(), torch.arange(float(NUMEL)) * (dist.get_rank() + 1)
    for name, (run, _) in COLLECTIVES.items():
        group.use(group.link, type(group.clock)())
        result = run(group, x, world)
        results[name] = group.clock.now(), torch.equal(result, run(dist.group.WORLD, x, world))
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_a_collective_takes_the_time_of_the_bytes_that_a_rank_sends(world):
    """A system would be charged other bytes than another for the same result, or get other values."""
    results = gloo(times, shard=world)
    for name, (_, sent) in COLLECTIVES.items():
        late = [rank[name][0] - 4 * sent(NUMEL, world) / BANDWIDTH for rank in results]
        # some ranks receive before they have sent all
        assert max(late) == pytest.approx(LATENCY), name
        assert min(late) > -1e-9, name
        assert all(rank[name][1] for rank in results)


def shared_link(mesh: Any) -> list[float]:
    """When three gathers that start together have arrived, in the reverse order; then one beside a computation."""
    group, x = delaying_group(), torch.ones(NUMEL)
    works = [dist.all_gather_into_tensor(torch.empty(2 * NUMEL), x, group=group, async_op=True) for _ in range(3)]
    ends = []
    for work in works:
        work.wait()
        ends.append(group.clock.now())
    work = dist.all_gather_into_tensor(torch.empty(2 * NUMEL), x, group=group, async_op=True)
    group.pause(1)
    work.wait()
    return [*ends, group.clock.now()]


def test_messages_follow_each_other_on_a_link_and_pass_beside_a_computation():
    """Collectives would not share a link, or a computation would not hide them: nothing could be measured."""
    each = 4 * NUMEL / BANDWIDTH
    for ends in gloo(shared_link, shard=2):
        assert ends == pytest.approx([LATENCY + n * each for n in (1, 2, 3)] + [LATENCY + 3 * each + 1])


def on_both(mesh: Any) -> tuple[list[str], float, bool]:
    """How plans on both kinds of groups send, the time of a step on the delaying one, and whether bits are equal."""
    group = delaying_group()
    delayed = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    params, kinds, values = [torch.arange(12.0), torch.ones(5)], [], []
    for each in (mesh, delayed):
        plan = fshard.make_plan(params, each, units=["*"])
        before = group.clock.now()
        _, grads = fshard.value_and_grad(lambda p: fshard.Sum((p[0] ** 3).sum() * p[1].sum()))(
            fshard.shard_params(params, plan)
        )
        values.append(fshard.gather_params(grads))
        kinds.append(type(plan.mesh.ranks("shard")).__name__)
    return kinds, group.clock.now() - before, all(map(torch.equal, *values))


def test_a_backend_that_was_registered_is_used():
    """fshard would pass data by shared memory where a user, or a benchmark, asked for another backend."""
    for kinds, seconds, is_equal in gloo(on_both, shard=2):
        assert kinds == ["_HostRanks", "GroupRanks"]
        assert seconds > 5 * LATENCY
        assert is_equal


def shares(mesh: Any) -> list[dict[str, Any]]:
    """Exposed communication of the systems of `make bench-delayed`, counted, where it equals the computation."""
    group = delaying_group()
    import delayed

    args = SimpleNamespace(seconds=0.004, rounds=1)
    delayed.FACTORS = (1.0,)
    delayed_mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    return [
        row for name in ("equal", "unequal") for row in delayed.measure(name, type(group.clock)(), args, delayed_mesh)
    ]


def test_at_most_half_of_fsdp2s_communication_is_exposed():
    """Where communication takes as long as the computation, fshard would wait for more than half of what FSDP2 waits
    for, also if FSDP2 gathers ahead; or several small units would not travel beside one that computes."""
    for rows in gloo(shares, shard=2):
        exposed = {row["model"]: {system: xs[0] for system, xs in row["shares"].items()} for row in rows}
        for systems in exposed.values():
            assert 0 < systems["fshard"] <= 0.5 * systems["FSDP2"]
            assert systems["fshard"] <= 0.5 * systems["FSDP2, ahead"]
        assert exposed["equal"]["fshard"] == pytest.approx(exposed["equal"]["prefetch=1"])
        assert exposed["unequal"]["fshard"] <= 0.75 * exposed["unequal"]["prefetch=1"]
