"""A process group with built-in collectives, as NCCL has: each exchange is one all-to-all, and may be done late."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import LM_UNITS, STRATEGIES, WORLDS, lm_batch, lm_params, mean_loss, rand
from support.worlds import between_hosts, by_process_groups, fates, gloo, simulated
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fshard
from fshard import optim, tree
from fshard.comm import mesh as mesh_module
from fshard.comm import primitives, process_groups
from fshard.comm.ranks import Pending
from fshard.wire import Int8

POISON = 0xA5


def bytes_of(x: Tensor) -> Tensor:
    """A view of a contiguous tensor's bytes."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1).view(torch.uint8)


@dataclass
class Late:
    """An all-to-all that reads the sent tensors and writes the received ones in `wait`, and not before."""

    outs: Sequence[Tensor]
    ins: Sequence[Tensor]
    group: Any
    spare: Tensor | None = None  # memory that several exchanges receive into
    before: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [bytes_of(x).clone() for x in self.ins]
        for x in self.outs:
            bytes_of(x).fill_(POISON)

    def wait(self, timeout: object = None) -> None:
        """Check that nobody wrote to the tensors since the start; then send and receive."""
        assert all(torch.equal(bytes_of(x), y) for x, y in zip(self.ins, self.before, strict=True))
        received = [x for x in self.outs if self.spare is None or x.data_ptr() != self.spare.data_ptr()]
        assert all(bool((bytes_of(x) == POISON).all()) for x in received)
        ops = []
        for peer in (p for p in range(dist.get_world_size(self.group)) if p != dist.get_rank(self.group)):
            ops.append(dist.P2POp(dist.irecv, self.outs[peer], group=self.group, group_peer=peer))
            ops.append(dist.P2POp(dist.isend, self.ins[peer], group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        rank = dist.get_rank(self.group)
        self.outs[rank].copy_(self.ins[rank])


class Distributed:
    """torch.distributed with a late all-to-all that is recorded, and without messages to single peers."""

    def __init__(self) -> None:
        self.calls = list[Late]()

    def __getattr__(self, name: str) -> Any:
        assert name not in ("batch_isend_irecv", "P2POp"), name
        return getattr(dist, name)

    def all_to_all(self, outs: list[Tensor], ins: list[Tensor], group: Any, async_op: bool) -> Late:
        """Like NCCL's: contiguous tensors of one dtype that have addresses, of any sizes that both sides agree on."""
        assert async_op
        assert len({x.dtype for x in (*outs, *ins)}) == 1
        assert all(x.is_contiguous() for x in (*outs, *ins))
        rank = dist.get_rank(group)
        assert outs[rank].numel() == ins[rank].numel() == 1
        assert all(x.data_ptr() for x in (*outs, *ins))
        self.calls.append(Late(outs, ins, group, outs[rank]))
        return self.calls[-1]

    def all_to_all_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Late:
        """Like NCCL's: contiguous tensors of one dtype, of equal parts for all ranks."""
        assert async_op
        assert out.dtype == x.dtype
        assert out.numel() == x.numel() > 0
        assert out.is_contiguous()
        assert x.is_contiguous()
        size = dist.get_world_size(group)
        self.calls.append(Late(out.view(size, -1).unbind(), x.view(size, -1).unbind(), group))
        return self.calls[-1]


class BuiltIn(process_groups.GroupRanks):
    """Ranks of gloo that say their backend has fast collectives of its own."""

    def __init__(self, axis: str, group: Any, device: torch.device, **kwargs: Any):
        super().__init__(axis, group, device, **kwargs)
        self.built_in, self._in_pairs = group, False


class Pool:
    """A backend that allocates memory; weak references to what it allocated."""

    def __init__(self) -> None:
        self.refs = list[StorageWeakRef]()

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """True, as for NCCL where the network has multicast."""
        return True

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of NaN, so that a read before a write shows."""
        made = torch.full((size,), torch.nan, device=device).to(dtype)
        self.refs.append(StorageWeakRef(made.untyped_storage()))
        return made


def as_nccl(mesh: Any, job: Any, *args: Any) -> tuple[Any, list[Late]]:
    """`job(mesh, *args)` on ranks with late built-in collectives, and the exchanges that the job made."""
    warnings.simplefilter("ignore", FutureWarning)
    with (
        mock.patch.object(process_groups, "dist", Distributed()) as stand_in,
        mock.patch.object(primitives, "dist", stand_in),
        mock.patch.multiple(mesh_module, GroupRanks=BuiltIn, MESHES=mesh_module.Meshes()),
    ):
        return job(mesh, *args), stand_in.calls


PLANS: dict[str, dict[str, Any]] = {
    **{name: STRATEGIES[name] for name in ("full", "ddp", "zero1")},
    "bf16": {"policy": "compute=bf16"},
    "wires": {"param_wire": Int8(16), "grad_wire": Int8(16)},
}
STEPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "exact": (lambda: optim.adamw(0.05), {"clip_norm": 0.1}),
    "sgd": (lambda: optim.sgd(0.1, momentum=0.9), {"accumulate": 2}),
    "tree": (lambda: optim.sgd(0.1), {"reduction": "tree"}),
    "moves": (lambda: optim.muon(0.1), {}),
}


def trained(mesh: Any, plan: str, step: str) -> list[Tensor]:
    """The parameters after two steps, and the losses."""
    params, (make, options) = lm_params(torch.float32), STEPS[step]
    made = by_process_groups(fshard.make_plan(params, mesh, units=LM_UNITS, **PLANS[plan]), mesh)
    state = fshard.init_state(fshard.shard_params(params, made), tx := make())
    losses = []
    for i in range(2):
        # a tree reduction needs the same number of rows on every rank
        batch = lm_batch(10 * i + mesh.get_rank(), 0) if step == "tree" else lm_batch(i, mesh.get_rank())
        state, metrics = fshard.train_step(mean_loss, tx, **options)(state, batch)
        losses.append(metrics["loss"])
    return [*tree.leaves(fshard.gather_params(state.params)), *losses]


def others(mesh: Any) -> list[Tensor]:
    """Every collective, with uneven sizes and without elements; broadcasts come from the last rank."""
    found = []
    for axis, size in ((axis, size) for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1):
        for numel in (0, size, 6 * size):
            x = rand(numel, seed=mesh.get_rank()).float()
            found += [fshard.reduce_scatter(x, mesh, axis), fshard.all_to_all(x, mesh, axis)]
            found += [fshard.all_reduce(x, mesh, axis), fshard.broadcast(x, mesh, axis, src=size - 1)]
            found += [fshard.shift(x, mesh, axis), fshard.shift(x, mesh, axis, -1, wrap=False)]
            rank = mesh.get_local_rank(axis)
            sent = [numel if peer == rank - 1 or rank == peer == 0 else 0 for peer in range(size)]  # one rank gets two
            received = [numel if peer == rank + 1 or rank == peer == 0 else 0 for peer in range(size)]
            found.append(fshard.all_to_all(x, mesh, axis, sizes=(sent, received)))
        long = rand(8192 * size, seed=mesh.get_rank()).bfloat16()
        found += [fshard.all_reduce(long, mesh, axis), fshard.reduce_scatter(long, mesh, axis)]
    return found


CASES = [("full", "exact"), ("full", "tree"), ("full", "moves"), ("ddp", "sgd"), ("zero1", "exact"), ("bf16", "sgd")]
CASES += [("wires", "exact"), ("wires", "sgd")]


def everything(mesh: Any) -> list[list[Tensor]]:
    """The results of all cases, and of every collective."""
    return [trained(mesh, *case) for case in CASES if case[1] != "tree" or mesh.size() != 3] + [others(mesh)]


def late(mesh: Any) -> tuple[list[list[Tensor]], list[Any]]:
    """The results of all jobs with late exchanges, and the exchanges of one reduction."""
    return as_nccl(mesh, everything)[0], one_reduction(mesh)


def from_a_pool(mesh: Any, plan: str) -> tuple[bool, list[int], int]:
    """Whether the backend's memory keeps the bits; how many buffers and collectives there were; buffers still alive."""
    params, tx = lm_params(torch.float32), optim.sgd(0.1)
    made = by_process_groups(fshard.make_plan(params, mesh, units=LM_UNITS, **PLANS[plan]), mesh)
    state = fshard.init_state(fshard.shard_params(params, made), tx)
    step, batch, pool = fshard.train_step(mean_loss, tx), lm_batch(0, mesh.get_rank()), Pool()
    expected = tree.leaves(step(state, batch)[0].params)
    with mock.patch.object(process_groups, "_backend", return_value=pool), fshard.collectives.tally() as records:
        after = as_nccl(mesh, lambda mesh: step(state, batch)[0])[0]  # the calls hold what was sent
    large = [r for r in records if r.kind in ("all_gather", "reduce_scatter")]
    left = sum(not ref.expired() for ref in pool.refs)
    return same(tree.leaves(after.params), expected), [len(pool.refs), len(large)], left


def test_what_is_sent_lies_in_memory_of_the_backend_where_it_makes_any() -> None:
    """Each gather and reduction uses one buffer of the backend and frees it: otherwise NCCL would occupy more of the
    GPU, or memory leak."""
    for bits, (buffers, collectives), left in gloo(from_a_pool, "full"):
        assert bits
        assert buffers == collectives > 0
        assert left == 0


def test_a_backend_without_memory_of_its_own() -> None:
    """Where the backend allocates nothing, buffers are torch's own: otherwise a step on such a backend would fail."""
    group = mock.Mock(spec=["_get_backend"])
    with (
        mock.patch.object(process_groups.dist, "get_rank", return_value=0),
        mock.patch.object(process_groups.dist, "get_world_size", return_value=2),
    ):
        ranks = process_groups.GroupRanks("shard", group, torch.device("meta"))
    backend = mock.Mock()
    backend.supports_tensor_alloc.return_value = False
    group._get_backend.return_value = backend
    like = torch.empty(0, device="meta")
    assert ranks.empty(3, like, lent=True).shape == (3,)
    assert ranks.empty(3, like, lent=False).shape == (3,)
    backend.allocate_tensor.assert_not_called()
    for name in ("supports_tensor_alloc", "allocate_tensor"):
        assert callable(getattr(torch._C._distributed_c10d.Backend, name))


def test_memory_is_registered_when_there_is_a_communicator() -> None:
    """NCCL refuses the memory before the first collective, and would never register it afterwards."""
    done = list[str]()
    backend = mock.Mock()
    backend.allocate_tensor.side_effect = lambda *args, **kwargs: done.append("memory")
    with (
        mock.patch.object(process_groups, "dist") as stand_in,
        mock.patch.object(process_groups, "_backend", return_value=backend),
    ):
        stand_in.get_rank.return_value, stand_in.get_world_size.return_value = 0, 9
        stand_in.all_reduce.side_effect = lambda *args, **kwargs: done.append("collective")
        ranks = process_groups.GroupRanks("shard", mock.Mock(), torch.device("cpu"))
        for _ in range(2):
            ranks.empty(3, torch.empty(0), lent=True)
    assert done == ["collective", "memory", "memory"]


@pytest.mark.parametrize("where", ["irecv", "isend", "wait for a receive", "wait for a send"])
@pytest.mark.parametrize("gone", [0, 1, 3])
def test_an_error_names_the_rank_that_is_gone(where: str, gone: int) -> None:
    """Of a hundred ranks nobody would know where to look for the first error."""

    def started(kind: str, peer: int) -> Any:
        if (where, gone) == (kind, peer):
            raise RuntimeError("Connection closed by peer")
        work = mock.Mock()
        if (where, gone) == ({"irecv": "wait for a receive", "isend": "wait for a send"}[kind], peer):
            work.wait.side_effect = RuntimeError("Connection closed by peer")
        return work

    x = torch.ones(2)
    with mock.patch.object(process_groups, "dist") as stand_in:
        stand_in.get_rank.return_value, stand_in.get_world_size.return_value = 2, 4
        stand_in.irecv.side_effect = lambda x, group, group_src, tag: started("irecv", group_src)
        stand_in.isend.side_effect = lambda x, group, group_dst, tag: started("isend", group_dst)
        ranks = process_groups.GroupRanks("shard", mock.Mock(), torch.device("cpu"))
        ranks.timeout = timedelta(seconds=1)
        with pytest.raises(fshard.MismatchError, match=f"rank {gone} of axis 'shard' has gone, or did not answer"):
            ranks.exchange([x] * 4, [None] * 4, "a call").wait()


def caught(params: Any, odd: bool) -> None:
    """The odd rank's loss raises, and the rank goes on with the next batch."""

    def loss(p: Any, fails: bool) -> Tensor:
        total = p["a"].sum()
        if fails and odd:
            raise ValueError("boom")
        return total + p["b"].sum()

    for fails in (True, False, False):
        with suppress(ValueError):
            fshard.value_and_grad(loss)(params, fails)


OTHER_SIZES: dict[str, Callable[[Any, bool], object]] = {
    "other units": lambda params, odd: fshard.value_and_grad(lambda p: p["a"].sum() + p["cb"[odd]].sum())(params),
    "another order": lambda params, odd: fshard.predict(lambda p: [p[name].sum() for name in ("ab", "ba")[odd]])(
        params
    ),
    "a caught error": caught,
}


def meets_other_sizes(mesh: Any, what: str) -> None:
    """The last rank sends messages of other sizes than the others expect."""
    params = {"a": torch.ones(40), "b": torch.ones(400), "c": torch.ones(16)}
    plan = fshard.make_plan(params, mesh, units=["a", "b", "c"], prefetch=0)
    shards = fshard.shard_params(params, plan)
    primitives.along(plan.mesh, "shard").timeout = timedelta(seconds=2)  # type: ignore[attr-defined]
    OTHER_SIZES[what](shards, mesh.get_rank() == mesh.size() - 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", OTHER_SIZES)
def test_messages_of_other_sizes_are_an_error_on_every_rank(what: str, size: int) -> None:
    """gloo would end a process, without a word of which call; or who did not answer would be one of several."""
    for rank, fate in enumerate(fates(between_hosts, meets_other_sizes, what, shard=size)):
        assert (fate.exitcode, (fate.error or "")[:14]) == (1, "MismatchError:"), fate
        missed = range(size - 1) if rank == size - 1 else [size - 1]
        assert all(f"rank {peer} of axis 'shard'" in (fate.error or "") for peer in missed), fate


def test_an_interrupted_wait_is_not_begun_again() -> None:
    """A message that was received would be waited for until the timeout, and so would this rank be by its peers."""
    exchange = mock.Mock()
    exchange.wait.side_effect = KeyboardInterrupt
    pending = Pending(exchange, lambda parts: parts[0])
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.drop()
    assert exchange.wait.call_count == 1


FAULTS = {
    "device": (torch.AcceleratorError, "device-side assert"),
    "memory": (torch.OutOfMemoryError, "out of memory"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_of_the_device_is_no_lost_peer(kind: str) -> None:
    """An index out of range in an embedding would be reported as a rank that has gone."""
    error, words = FAULTS[kind]
    work = mock.Mock()
    work.wait.side_effect = error(words)
    with pytest.raises(error, match=words):
        process_groups.Works([work], []).wait()


def same(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal to the bit."""
    return all(x.dtype == y.dtype and torch.equal(bytes_of(x), bytes_of(y)) for x, y in zip(xs, ys, strict=True))


def one_reduction(mesh: Any) -> list[tuple[int, list[int], bool]]:
    """For each exchange of one reduce-scatter: their number, its sizes, and whether one buffer receives all
    messages."""
    x = rand(12, seed=mesh.get_rank())
    _, calls = as_nccl(mesh, lambda mesh: fshard.reduce_scatter(x, mesh, "shard"))
    rows = []
    for call in calls:
        places = {out.untyped_storage().data_ptr() for out in call.outs if out.numel()}
        buffer = next(out for out in call.outs if out.numel()).untyped_storage().nbytes()
        one = (len(places), buffer) == (1, sum(out.nbytes for out in call.outs))
        rows.append((len(calls), [out.numel() for out in call.outs], one))
    return rows


@pytest.mark.parametrize("world", ["3", "2x2"])
def test_late_exchanges_have_the_bits_of_simulated_ranks(world: str) -> None:
    """Late exchanges give the bits of simulated ranks, one call for all peers: otherwise a step with NCCL would read
    garbage or send too many messages."""
    replicate, shard = WORLDS[world]
    expected = simulated(everything, shard=shard, replicate=replicate)
    for rank, (found, rows) in enumerate(gloo(late, shard=shard, replicate=replicate)):
        assert all(same(a, b) for a, b in zip(found, expected[rank], strict=True))
        assert rows == [(1, [12 // shard * 8] * shard, True)]
