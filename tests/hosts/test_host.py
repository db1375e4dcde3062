"""Messages through shared memory between the processes of one host."""

import gc
import os
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import same_bits
from support.worlds import gloo
from support.writers import WRITERS
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard.comm import mesh as mesh_module
from fshard.comm import primitives
from fshard.comm.mesh import MESHES, ProcessMesh, adapted
from fshard.comm.process_groups import GroupRanks
from fshard.hosts import one_host
from fshard.testing import simulate

SIZES = [0, 1, 7, 1000, 20_000, 300_000]  # elements: sent in the socket, copied to a segment, made in a segment
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]


def _value(rank, size, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return (torch.randn(size, generator=generator) * 4).to(dtype)


def _all_kinds(mesh):
    """Start every collective for every size and dtype, and wait for them in the opposite order."""
    ranks = one_host.connect(mesh).ranks("shard")
    size, started, wrong = ranks.size, [], []
    for numel in SIZES:
        for dtype in DTYPES:
            parts = [_value(r, numel, dtype) for r in range(size)]
            started.append((primitives.all_gather(parts[ranks.rank], ranks), torch.cat(parts), (numel, dtype)))
            whole = [_value(r, numel * size, dtype) for r in range(size)]
            swapped = torch.cat([w.tensor_split(size)[ranks.rank] for w in whole])
            started.append((primitives.all_to_all(whole[ranks.rank], ranks), swapped, (numel, dtype)))
            sent, received = ([numel * (p == (ranks.rank + by) % size) for p in range(size)] for by in (1, -1))
            dealt = primitives.deal(parts[ranks.rank], (sent, received), ranks)  # all to the next rank
            started.append((dealt, parts[ranks.rank - 1], (numel, dtype)))
            if dtype != torch.bool:
                total = whole[0].to(primitives.sum_dtype(dtype), copy=True)
                for w in whole[1:]:
                    total += w
                total = total.to(dtype)
                started.append((primitives.all_reduce(whole[ranks.rank], ranks), total, (numel, dtype)))
                mine = total.tensor_split(size)[ranks.rank]
                started.append((primitives.reduce_scatter(whole[ranks.rank], ranks), mine, (numel, dtype)))
    for pending, expected, case in reversed(started):
        if not torch.equal(pending.wait(), expected):
            wrong.append(case)
    return wrong


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_every_collective_is_right(shard):
    """Collectives through shared memory give right values: otherwise processes of one host would train wrongly."""
    assert gloo(_all_kinds, shard=shard) == [[]] * shard


def _many_before_any_wait(mesh):
    """Start more small messages than the sockets hold before waiting for any."""
    ranks = one_host.connect(mesh).ranks("shard")
    started = [primitives.all_gather(torch.full((5000,), i + ranks.rank), ranks) for i in range(300)]
    return all(p.wait()[::5000].tolist() == [i + r for r in range(ranks.size)] for i, p in enumerate(started))


def _memory_is_used_again(mesh):
    """Forty gathers need at most 6 segments, for a peer is at most one gather behind."""
    ranks = one_host.connect(mesh).ranks("shard")
    for i in range(40):
        full = primitives.all_gather(torch.full((400_000,), float(i)), ranks).wait()
        view = full[3:7]
        del full
        assert view.eq(i).all()
    return len(ranks._memory.segments) <= 6


def _senders_may_write_again(mesh):
    """A rank that has its result may write to what it sent, though its peer has not read it."""
    ranks = one_host.connect(mesh).ranks("shard")
    right = True
    for numel in (100, 20_000, 400_000):
        x = primitives.all_gather(torch.full((numel,), 1.0), ranks).wait()  # a large result lies in a segment
        pending = primitives.all_reduce(x, ranks)
        if ranks.rank == 0:
            right &= bool(pending.wait().eq(2.0).all())
            x.fill_(7.0)
        dist.barrier()
        if ranks.rank == 1:
            right &= bool(pending.wait().eq(2.0).all())
    return right


class _Copied(TorchDispatchMode):
    """Counts the bytes that are copied."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.nbytes += args[0].nbytes * (func is torch.ops.aten.copy_.default)
        return func(*args, **(kwargs or {}))


def _copies_of_a_sum_in_place(mesh):
    """How many parts a rank copies in a sum in place: what it sends, and its own and its peer's part of the sum."""
    ranks = one_host.connect(mesh).ranks("shard")
    x = ranks.empty(2 * 400_000, torch.ones(1), lent=False).fill_(ranks.rank + 1.0)
    with _Copied() as copied:
        assert primitives.all_reduce(x, ranks, out=x).wait().eq(3.0).all()
    return copied.nbytes / (4 * 400_000)


def _gone(mesh):
    """The error of a rank whose peer has dropped its connection."""
    ranks = one_host.connect(mesh).ranks("shard")
    if ranks.rank == 1:
        return None
    with pytest.raises(fshard.MismatchError) as error:
        primitives.all_gather(torch.ones(3), ranks, "blocks.0").wait()
    return str(error.value)


def _different_calls(mesh):
    """The error of this rank when the ranks call different collectives."""
    ranks = one_host.connect(mesh).ranks("shard")
    call = primitives.all_gather if ranks.rank == 0 else primitives.reduce_scatter
    with pytest.raises(fshard.MismatchError) as error:
        call(torch.ones(4), ranks, "blocks.0").wait()
    return str(error.value)


def _closes(mesh):
    """Whether connections that were dropped leave no descriptor open."""

    def use():
        ranks = one_host.connect(mesh).ranks("shard")
        primitives.all_gather(torch.ones(400_000), ranks).wait()
        primitives.all_reduce(torch.ones(1), ranks).wait()

    use()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        use()
    gc.collect()
    return len(os.listdir("/proc/self/fd")) <= before


def _all_of_it(mesh):
    return (
        _many_before_any_wait(mesh),
        _memory_is_used_again(mesh),
        _senders_may_write_again(mesh),
        _closes(mesh),
        _copies_of_a_sum_in_place(mesh) == 3,
        _different_calls(mesh),
        _gone(mesh),
    )


def test_messages_and_memory():
    """Memory is reused only after all ranks read it, and a lost peer is an error: otherwise data would be mixed up."""
    first, second = gloo(_all_of_it, shard=2)
    assert first[:5] == second[:5] == (True, True, True, True, True)
    for text in (first[5], second[5]):
        assert "all_gather(float32[4]" in text
        assert "reduce_scatter(float32[4]" in text
        assert "unit 'blocks.0'" in text
    assert "rank 1 of axis 'shard' has gone" in first[6]
    assert "all_gather(float32[3]" in first[6]


LARGE = 1 << 19  # elements of float32: 2 MiB, lent memory is 1 MiB or more

# The sum of a loss over ranks comes between the gather of the first of these and its write; the second writes twice.
_AT_ONCE = {name: job for name, job in WRITERS.items() if name not in ("returned_by_a_loss", "wire_of_two_dtypes")}


def _writes_before_its_peer_reads(mesh):
    """What rank 1 gets of each program, which reads every large message after rank 0 has written to everything."""
    found, wait = {}, one_host._Exchange.wait

    def wait_late(self):
        if mesh.get_rank() == 1 and self.like.numel() >= LARGE // 2:
            dist.barrier()  # rank 0 has received, and has written
        return wait(self)

    one_host._Exchange.wait = wait_late
    for name, job in _AT_ONCE.items():
        found[name] = job(mesh, LARGE, dist.barrier if mesh.get_rank() == 0 else int).sum().item()
    return found


def test_writes_do_not_reach_peers_that_read_later():
    """A rank that writes to results, or to what its reduction or wire is given, changes nothing on a peer that has not
    yet received: otherwise that peer would train with the written values, sometimes."""
    expected = simulate(lambda mesh: {n: job(mesh, LARGE, int).sum().item() for n, job in _AT_ONCE.items()}, shard=2)
    assert gloo(_writes_before_its_peer_reads, shard=2) == expected


def test_other_meshes_are_left_alone():
    """One device and simulated ranks get no connection: otherwise they would wait for processes that do not exist."""
    assert one_host.connect(None) is None
    assert simulate(lambda mesh: one_host.connect(mesh) is mesh, shard=2) == [True, True]


def _axes(mesh):
    plan = fshard.make_plan({"w": torch.ones(3)}, mesh)
    return (
        type(plan.mesh).__name__,
        [type(plan.mesh.ranks(a)).__name__ for a in mesh.mesh_dim_names],
        plan.mesh.get_rank(),
    )


def test_plans_are_connected_along_every_axis():
    """On a mesh of two axes both use shared memory: otherwise messages along one would be slow, by the network."""
    results = gloo(_axes, shard=2, replicate=2)
    assert results == [("HostMesh", ["_HostRanks"] * 2, rank) for rank in range(4)]


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def _twenty_plans(mesh):
    """Descriptors of this process before any plan, with one, with 21, and when all are dropped."""
    import torch._dynamo  # a checked loss imports it, and what fails in that keeps the loss's frames

    params = {"a": torch.ones(40), "b": torch.ones(5)}
    other = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("shard",))
    dist.barrier(other.get_group("shard"))  # gloo connects when it is first used
    elsewhere = fshard.make_plan(params, mesh).mesh  # a plan of an equal mesh that has another process group
    gc.collect()
    gc.disable()  # objects without reference cycles are still freed at once
    counts = [_descriptors()]
    plans = [fshard.make_plan(params, other)]
    tx = fshard.optim.adamw(0.1)
    state = fshard.init_state(fshard.shard_params(params, plans[0]), tx)
    step = fshard.check(fshard.train_step(lambda p, x: (p["a"].sum() + p["b"] * x).sum(), tx, clip_norm=1.0))
    state, _ = step(state, torch.ones(1))
    counts.append(_descriptors())
    plans += [fshard.make_plan(params, other) for _ in range(20)]
    for plan in plans[1:]:
        fshard.gather_params(fshard.shard_params(params, plan))
    counts.append(_descriptors())
    assert all(plan.mesh is plans[0].mesh for plan in plans)
    assert elsewhere is not plans[0].mesh
    ends = [weakref.ref(plans[0]), weakref.ref(plans[0].mesh)]
    del plans, plan, state
    alive = [end() is not None for end in ends]
    dist.barrier()
    del other
    dist.barrier()  # the other rank has closed its ends, too
    gc.enable()
    return counts, alive, [end() is not None for end in ends], _descriptors()


def test_plans_share_what_belongs_to_their_mesh():
    """All plans of a mesh share its connections, which close with it: otherwise plans would use up descriptors."""
    for counts, alive, after, end in gloo(_twenty_plans, shard=2):
        before, one, many = counts
        assert one > before
        assert many == one
        assert alive == [False, True]
        assert after == [False, False]
        assert end <= before


def _again(mesh, store):
    """Make plans after a call that failed on one rank, and after the process groups were made again."""
    params, rank = {"w": torch.ones(5)}, mesh.get_rank()
    plan = fshard.make_plan(params, mesh)
    if rank == 0:  # sends a message that the other rank never receives
        primitives.all_gather(torch.ones(2), plan.mesh.ranks("shard"))
    anew = fshard.make_plan(params, mesh)
    assert anew.mesh is not plan.mesh
    assert fshard.make_plan(params, mesh).mesh is anew.mesh
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    last = fshard.make_plan(params, mesh)
    assert last.mesh is not anew.mesh
    assert fshard.gather_params(fshard.shard_params(params, last))["w"].tolist() == [1.0] * 5
    return True


def test_a_plan_does_not_meet_connections_that_are_out_of_step(tmp_path):
    """A new plan gets new connections after a failed call: otherwise it would receive messages of that call."""
    assert gloo(_again, str(tmp_path / "store"), shard=2) == [True, True]


class _Sent(GroupRanks):
    """Counts the messages through process groups."""

    count = 0

    def exchange(self, *args):
        _Sent.count += 1
        return super().exchange(*args)


def _loss(mesh):
    """A loss with collectives, which names the DeviceMesh, and its gradient; a leaf of each rank's own values."""

    def f(w):
        whole = fshard.all_gather(w.sin(), mesh, "shard", dim=1)
        return (
            fshard.shift(whole, mesh, "shard", label="turned").cos().sum() + fshard.all_reduce(w, mesh, "shard").sum()
        )

    w = torch.arange(6.0).view(2, 3) + 10 * mesh.get_rank()
    return f(w), torch.func.grad(f)(w), fshard.jit(f, backend="eager")(w)


def _by_the_twin(mesh, store):
    """Results before there is a plan, after it, in checked calls, and after connections were made anew."""
    patched = mock.patch.object(mesh_module, "GroupRanks", _Sent)
    with patched:
        adapted(mesh)  # makes the process groups' ranks
    results, counts, params = [_loss(mesh)], [_Sent.count > 0], {"w": torch.ones(5)}
    before = fshard.jit(lambda x: fshard.all_reduce(x, mesh, "shard"), backend="eager")
    before(torch.ones(3))  # this graph goes on by the process groups
    plan = fshard.make_plan(params, mesh)
    assert adapted(mesh) is plan.mesh
    for call in (_loss, fshard.check(_loss, mesh)):
        call(mesh)  # a checked call connects its lines
        sent = _Sent.count
        with fshard.collectives.tally() as records:
            results.append(call(mesh))
        counts += [_Sent.count == sent, [r.nbytes for r in records if r.label == "turned"] == [48] * 4]
    assert before(torch.full((3,), mesh.get_rank() + 1.0)).tolist() == [3.0] * 3
    if mesh.get_rank() == 0:
        primitives.all_gather(torch.ones(2), plan.mesh.ranks("shard"))  # which the other rank leaves out
    anew = fshard.make_plan(params, mesh)
    assert adapted(mesh) is anew.mesh is not plan.mesh
    results.append(_loss(mesh))
    assert MESHES.find(MESHES.of(mesh)) is anew.mesh
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=plan.mesh.get_rank(), world_size=2)
    results.append(_loss(mesh))
    assert type(adapted(mesh)) is ProcessMesh
    return results, counts


def test_collectives_on_a_device_mesh_go_where_the_plans_go(tmp_path):
    """A loss that names the DeviceMesh sends through shared memory once a plan is made, the same bits: otherwise
    gloo's threads would take half of the ranks' time."""
    expected = simulate(_loss, shard=2)
    for (results, counts), right in zip(gloo(_by_the_twin, str(tmp_path / "store"), shard=2), expected, strict=True):
        assert counts == [True] * 5
        assert all(same_bits(result, right) for result in results)


def _answers(mesh):
    """What a mesh says of its axes, sizes, ranks and device."""
    names = mesh.mesh_dim_names
    sizes = [mesh.size(), *(mesh.size(axis) for axis in names)]
    places = [mesh.get_rank(), *(mesh.get_local_rank(axis) for axis in names)]
    ranks = [(r.axis, r.rank, r.size, r.device) for r in (mesh.ranks(axis) for axis in names)]
    return names, mesh.shape, sizes, places, ranks, mesh.device, mesh.device_type


def _answers_of_processes(mesh):
    return _answers(adapted(mesh)), _answers(one_host.connected(mesh))


def test_all_meshes_answer_the_same_questions():
    """Real, simulated and abstract meshes have the same methods: otherwise code would work on one kind only."""
    real = gloo(_answers_of_processes, shard=2, replicate=2)
    simulated = simulate(_answers, shard=2, replicate=2)
    for rank in range(4):
        abstract = _answers(fshard.AbstractMesh(replicate=2, shard=2, rank=rank))
        assert [*real[rank], simulated[rank]] == [abstract] * 3
    assert fshard.AbstractMesh(shard=4).size("shard") == 4
