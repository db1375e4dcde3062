"""Worlds: any axes, the record of collectives, faults, debuggers; whole collectives, bit for bit."""

import io
import pdb
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard.comm import primitives
from fshard.core.storage import as_bytes
from fshard.testing import Collective, Dies, Garbage, RankDied, Slow, World, simulate

# --- axes ---


def test_any_axes() -> None:
    """On a mesh of three axes ranks would have wrong coordinates, or a sum take in wrong ranks."""

    def job(mesh: Any) -> list[int]:
        x = torch.tensor(2 ** mesh.get_rank())
        return [*mesh.get_coordinate(), *(fshard.all_reduce(x, mesh, axis).item() for axis in "abc")]

    ranks = torch.arange(12).view(2, 3, 2)
    expected = [
        [a, b, c, *((2**line).sum().item() for line in (ranks[:, b, c], ranks[a, :, c], ranks[a, b, :]))]
        for a in range(2)
        for b in range(3)
        for c in range(2)
    ]
    assert World(axes={"a": 2, "b": 3, "c": 2}).run(job) == expected
    assert simulate(job, axes={"a": 2, "b": 3, "c": 2}) == expected


def test_a_step_on_axes_of_other_names() -> None:
    """A step would only run on axes called `shard` and `replicate`."""

    def job(mesh: Any, rate: float) -> list[float]:
        return trained(mesh, fshard.optim.sgd(rate))

    named, usual = World(axes={"data": 3}), World(3)
    assert named.run(job, 0.1) == usual.run(job, 0.1)
    assert {one.axis for one in named.log} == {"data"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shard": 0}, "shard=0: expected a number of ranks along this axis, at least 1"),
        ({"axes": {}}, "expected axes"),
        ({"axes": {"a": 2, "b": -1}}, "b=-1: expected a number of ranks along this axis, at least 1"),
        ({"shard": 2, "faults": [Dies(2)]}, r"Dies\(rank=2, at=0\): expected one of the 2 ranks"),
        ({"shard": 2, "faults": [Slow(-1)]}, "expected one of the 2 ranks"),
        ({"shard": 2, "faults": [Garbage(0, -1)]}, "a collective from 0 on"),
    ],
)
def test_worlds_there_cannot_be(given: Any, words: str) -> None:
    """A world without ranks, or a fault of a rank outside it, would be made."""
    with pytest.raises(ValueError, match=words):
        World(**given)


# --- the record ---


def parameters() -> Any:
    """Three units of uneven sizes."""
    generator = torch.Generator().manual_seed(3)
    return {"blocks": [{"w": torch.randn(5, 5, generator=generator)} for _ in range(3)], "head": torch.ones(5)}


def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
    """A mean through all blocks and the head."""
    for block in p["blocks"]:
        x = (x @ block["w"]).tanh()
    return fshard.Mean((x @ p["head"]).sum(), len(x))


def trained(mesh: Any, tx: Any, step_of: Any = lambda step: step) -> list[float]:
    """Two steps, with other data on every rank: the losses and the parameters, bit for bit."""
    over = mesh.mesh_dim_names[-1]
    plan = fshard.make_plan(parameters(), mesh, units=["blocks.*"], params_over=over, grads_over=over, state_over=over)
    state = fshard.init_state(fshard.shard_params(parameters(), plan), tx)
    step, losses = step_of(fshard.train_step(loss, tx, clip_norm=1.0)), []
    for turn in range(2):
        x = torch.randn(mesh.get_rank() + 1, 5, generator=torch.Generator().manual_seed(7 * mesh.get_rank() + turn))
        state, metrics = step(state, x)
        losses.append(metrics["loss"].item())
    whole = fshard.gather_params(state.params)
    return [*losses, *(x for leaf in [b["w"] for b in whole["blocks"]] for x in leaf.flatten().tolist())]


def test_the_log_has_each_collective_once() -> None:
    """`World.log` would miss a collective, or list it once for each rank."""

    def job(mesh: Any) -> list[tuple[Any, ...]]:
        plan = fshard.make_plan(parameters(), mesh, units=["blocks.*"])
        sharded = fshard.shard_params(parameters(), plan)
        with fshard.collectives.tally() as mine:
            fshard.value_and_grad(loss)(sharded, torch.ones(2, 5))
        return [(r.kind, r.label, r.axis, r.nbytes) for r in mine]

    world = World(shard=3)
    told = [[r for r in rank if r[2] == "shard"] for rank in world.run(job)]
    asked = [(r.kind, r.unit, r.axis, r.nbytes) for r in world.log]
    assert told == [asked[-len(told[0]) :]] * 3
    reduced = [r.unit for r in world.log if r.kind == "reduce_scatter"]
    assert [unit for unit in reduced if unit.startswith("blocks")] == ["blocks.2", "blocks.1", "blocks.0"]
    assert {r.ranks for r in world.log} == {(0, 1, 2)}


def test_every_group_is_in_the_log() -> None:
    """The log has each line of the mesh once, starts anew with each run, and omits axes of one rank: otherwise
    traffic would be miscounted."""

    def job(mesh: Any) -> None:
        for axis in mesh.mesh_dim_names:
            fshard.all_reduce(torch.ones(3), mesh, axis, label=axis)
        fshard.broadcast(torch.ones(2), mesh, mesh.mesh_dim_names[-1], src=1)

    world = World(shard=2, replicate=2)
    for _ in range(2):
        world.run(job)
        assert sorted((r.unit, r.ranks, r.nbytes) for r in world.log if r.kind == "all_reduce") == [
            ("replicate", (0, 2), 12),
            ("replicate", (1, 3), 12),
            ("shard", (0, 1), 12),
            ("shard", (2, 3), 12),
        ]
        assert [r.nbytes for r in world.log if r.kind == "broadcast"] == [8, 8]
    flat = World(shard=2)
    flat.run(job)
    assert flat.log[0] == Collective("all_reduce", "shard", "shard", 12, (0, 1))


def test_a_jitted_step_is_in_the_log_as_an_eager_one() -> None:
    """A jitted step logs the eager step's collectives and gives its values: otherwise a user would compare unlike
    traffic."""
    eager, graph, tx = World(shard=2), World(shard=2), fshard.optim.sgd(0.1)
    expected = eager.run(trained, tx)
    found = graph.run(trained, tx, lambda step: fshard.jit(step, backend="eager", bucket=0))
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert Counter(graph.log) == Counter(eager.log)


# --- faults ---


def three_sums(mesh: Any) -> list[float]:
    """The results of three collectives."""
    return [fshard.all_reduce(torch.tensor(float(i)), mesh, "shard", label=str(i)).item() for i in range(3)]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 2])
def test_a_rank_that_dies(rank: int, at: int) -> None:
    """A rank's death would come at another collective, or not name it and the user's line."""
    world, before = World(3, faults=[Dies(rank, at)]), threading.active_count()
    with pytest.raises(
        RankDied, match=rf"rank {rank} died at its collective {at}, all_reduce.*test_worlds.py"
    ) as caught:
        world.run(three_sums)
    assert f"(raised in simulated rank {rank} of 3)" in caught.value.__notes__
    assert [one.unit for one in world.log] == [str(i) for i in range(at)]
    assert threading.active_count() == before


CALLS = {
    "all_gather": lambda x, mesh: fshard.all_gather(x, mesh, "shard"),
    "reduce_scatter": lambda x, mesh: fshard.reduce_scatter(x, mesh, "shard"),
    "all_reduce": lambda x, mesh: fshard.all_reduce(x, mesh, "shard"),
    "all_to_all": lambda x, mesh: fshard.all_to_all(x, mesh, "shard"),
    "broadcast": lambda x, mesh: fshard.broadcast(x, mesh, "shard", src=1),
}


@pytest.mark.parametrize("kind", CALLS)
def test_garbage(kind: str) -> None:
    """`Garbage` would change the sender's own memory, or send something else at each run."""

    def job(mesh: Any) -> list[list[int]]:
        x = torch.arange(6) + 10 * mesh.get_rank()
        results = [CALLS[kind](x, mesh).tolist() for _ in range(3)]
        assert torch.equal(x, torch.arange(6) + 10 * mesh.get_rank())
        return results

    good, bad = World(3).run(job), World(3, faults=[Garbage(1, at=1)]).run(job)
    assert bad == World(3, faults=[Garbage(1, at=1)]).run(job)
    for rank in range(3):
        assert bad[rank][0] == good[rank][0]
        assert bad[rank][2] == good[rank][2]
        assert (bad[rank][1] == good[rank][1]) == (rank == 1)
    if kind == "all_gather":
        assert all(bad[rank][1][:6] + bad[rank][1][12:] == good[rank][1][:6] + good[rank][1][12:] for rank in range(3))
        assert not set(bad[0][1][6:12]) & set(good[0][1][6:12])


def test_garbage_makes_a_step_that_differs() -> None:
    """Nobody would notice a step on corrupted data."""
    tx = fshard.optim.adamw(0.1)
    assert World(2, faults=[Garbage(1, at=6)]).run(trained, tx) != World(2).run(trained, tx)


@pytest.mark.parametrize("faults", [[Slow(0)], [Slow(3)], [Slow(1), Slow(2)], [Slow(r) for r in range(4)]])
def test_slow_ranks_change_nothing_but_the_order(faults: list[Slow]) -> None:
    """Timing would change bits or collectives."""

    def job(mesh: Any) -> list[float]:
        turns.append(mesh.get_rank())
        drawn = [torch.rand(()).item(), random.random()]
        return trained(mesh, fshard.optim.adamw(0.1)) + drawn

    turns: list[int] = []
    usual, slow = World(2, 2), World(2, 2, faults=faults)
    assert usual.run(job) == slow.run(job)
    assert Counter(usual.log) == Counter(slow.log)
    late = {fault.rank for fault in faults}
    assert turns == [0, 1, 2, 3, *sorted(range(4), key=lambda r: (r in late, r))]


# --- errors and debuggers ---


def test_assertions_show_values() -> None:
    """A failed assertion inside a rank would not show its values or the user's line."""

    def job(mesh: Any) -> None:
        total = fshard.all_reduce(torch.ones(1), mesh, "shard").tolist()
        assert mesh.get_rank() == 0 or total == [2.0]

    with pytest.raises(AssertionError, match=r"\[3\.0\] == \[2\.0\]") as caught:
        World(3).run(job)
    assert caught.value.__notes__ == ["(raised in simulated rank 2 of 3)"]
    assert "assert mesh.get_rank() == 0 or total" in str(caught.traceback[-1].statement)


def test_a_debugger_inside_a_rank() -> None:
    """pdb stops in the user's line and steps over a collective that other ranks take part in: otherwise debugging a
    rank would hang."""
    out = io.StringIO()
    script = io.StringIO("p mine\nnext\np total\ncontinue\n")

    def job(mesh: Any) -> float:
        mine = 10.0 + mesh.get_rank()
        if mesh.get_rank() == 1:
            pdb.Pdb(stdin=script, stdout=out, readrc=False, nosigint=True).set_trace()
        total = fshard.all_reduce(torch.tensor(mine), mesh, "shard").item()
        return total

    assert World(3).run(job) == [33.0] * 3
    told = out.getvalue()
    assert "(Pdb) 11.0" in told
    assert "(Pdb) 33.0" in told
    assert "total = fshard.all_reduce" in told


@pytest.mark.parametrize("what", ["a mismatch", "an error of the user's"])
def test_ranks_that_clean_up(what: str) -> None:
    """A collective in a `finally` would hide the error that came before it, or hang."""
    ended = []

    def job(mesh: Any) -> None:
        try:
            if mesh.get_rank() == 1 and what != "a mismatch":
                raise ZeroDivisionError("here")
            fshard.all_reduce(torch.ones(1 + (mesh.get_rank() == 1)), mesh, "shard")
        finally:
            fshard.all_gather(torch.ones(2), mesh, "shard")
            ended.append(mesh.get_rank())

    world, words = World(3), "different collectives: rank 0 all_reduce" if what == "a mismatch" else "rank 1 all_gather"
    with pytest.raises(fshard.MismatchError, match=words) as caught:
        world.run(job)
    if what != "a mismatch":
        assert "(simulated rank 1 was handling ZeroDivisionError('here'))" in caught.value.__notes__
    assert world.log == ended == []


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a job that a shell runs in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_stops_the_ranks() -> None:
    """Ctrl-C would leave threads behind."""
    main, before, went_on = threading.main_thread().ident, threading.active_count(), list[int]()

    def job(mesh: Any) -> None:
        if mesh.get_rank() == 0:
            signal.pthread_kill(main, signal.SIGINT)
        for _ in range(100_000):
            fshard.all_reduce(torch.ones(1), mesh, "shard")
        went_on.append(mesh.get_rank())

    with pytest.raises(KeyboardInterrupt):
        World(2).run(job)
    assert went_on == []
    assert threading.active_count() == before


# --- collectives worked out once for all ranks ---


class InParts:
    """Ranks that only exchange messages, as processes do."""

    whole = None

    def __init__(self, ranks: Any):
        self.axis, self.rank, self.size, self.device = ranks.axis, ranks.rank, ranks.size, ranks.device
        self.built_in, self.empty, self._ranks = None, ranks.empty, ranks

    def exchange(self, sends: Any, recvs: Any, call: Any) -> Any:
        """Pass the exchange on."""
        return self._ranks.exchange(sends, recvs, call)


def values(dtype: torch.dtype, numel: int, rank: int) -> torch.Tensor:
    """Values of many magnitudes, so that the order of a sum shows; with inf and NaN."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(numel, 2, generator=generator) * torch.logspace(-3, 3, numel)[:, None]
    if dtype.is_floating_point and numel > 2:
        x[2, 0] = [1.0, float("inf"), float("nan")][rank % 3]
    return x.to(dtype) if dtype.is_floating_point else (x * 100).nan_to_num(0, 7, -7).to(dtype)


def reduced(x: torch.Tensor, ranks: Any, wide: Any) -> list[torch.Tensor]:
    """The results of a gather, of sums into a dtype, and of extremes."""
    n, places = len(x), [None, None]
    if wide is not None:
        places = [torch.empty(n // ranks.size, 2, dtype=wide), torch.empty(n, 2, dtype=wide)]
    started = [primitives.all_gather(x, ranks), primitives.reduce_scatter(x, ranks, out=places[0])]
    started += [primitives.all_reduce(x, ranks, out=places[1])]
    started += [primitives.all_reduce(x[: n - 1], ranks, op=op) for op in ("max", "min")]
    return [pending.wait() for pending in started]


class Heard(InParts):
    """Ranks that record the text of each exchange."""

    def __init__(self, ranks: Any):
        super().__init__(ranks)
        self.calls = list[str]()

    def exchange(self, sends: Any, recvs: Any, call: Any) -> Any:
        """Record the call's text and pass the exchange on."""
        self.calls.append(str(call))
        return super().exchange(sends, recvs, call)


def called(ranks: Any) -> tuple[list[str], list[Any]]:
    """The texts of the messages of every collective, and the records of the tally."""
    x, w = torch.ones(2 * ranks.size, 2), ranks.size
    large = torch.ones(w * 4096)  # a reduction in two stages
    with fshard.collectives.tally() as records:
        primitives.all_gather(x, ranks, "gather").wait()
        primitives.reduce_scatter(x, ranks, "scatter").wait()
        primitives.all_reduce(x, ranks, "sum", more=", more").wait()
        primitives.all_reduce(x, ranks, "max", op="max", more=", more").wait()
        primitives.all_reduce(large.bfloat16(), ranks, "large", out=torch.ones(w * 4096)).wait()
        primitives.all_to_all(x, ranks, "all").wait()
        primitives.broadcast(x, ranks, 1, "cast").wait()
        primitives.scatter([x] * w, ranks, lambda parts: parts[0], "each").wait()
        others = [peer != ranks.rank for peer in range(w)]
        primitives.swap(
            [[x.view(-1)] * on for on in others], [[(x.dtype, x.numel())] * on for on in others], ranks, "swap"
        )
    return getattr(ranks, "calls", []), [(r.kind, r.axis, r.label, r.nbytes, r.more) for r in records]


def test_the_words_of_collectives() -> None:
    """Every message names kind, dtype, shape, axis and label, and bytes are counted: otherwise errors would mislead.

    Of n bytes each of W ranks sends (W - 1) * n in a gather or a small all-reduce, and (W - 1) * n / W in a
    reduce-scatter or an all-to-all; a large all-reduce is a reduce-scatter, then a gather of the parts.
    """
    n = 3 * 2 * 2 * 4  # bytes of x
    for rank, (calls, records) in enumerate(World(shard=3).run(lambda mesh: called(Heard(mesh.ranks("shard"))))):
        assert calls == [
            "all_gather(float32[6, 2], axis='shard') for unit 'gather'",
            "reduce_scatter(float32[6, 2], axis='shard') for unit 'scatter'",
            "all_reduce(float32[6, 2], axis='shard', more) for unit 'sum'",
            "all_reduce(float32[6, 2], axis='shard', op='max', more) for unit 'max'",
            "all_reduce(bfloat16[12288], axis='shard') for unit 'large'",
            "all_reduce(float32[4096], axis='shard') for unit 'large'",
            "all_to_all(float32[6, 2], axis='shard') for unit 'all'",
            "broadcast(float32[6, 2], axis='shard', src=1) for unit 'cast'",
            "reduce_scatter(float32[6, 2], axis='shard') for unit 'each'",
            "all_to_all(bytes, axis='shard') for 'swap'",
        ]
        assert records == [
            ("all_gather", "shard", "gather", 2 * n, ""),
            ("reduce_scatter", "shard", "scatter", 2 * n // 3, ""),
            ("all_reduce", "shard", "sum", 2 * n, ", more"),
            ("all_reduce", "shard", "max", 2 * n, ", more"),
            ("all_reduce", "shard", "large", 2 * (2 + 4) * 4096, ""),
            ("all_to_all", "shard", "all", 2 * n // 3, ""),
            ("broadcast", "shard", "cast", 2 * n * (rank == 1), ", src=1"),
            ("reduce_scatter", "shard", "each", 2 * n, ""),
            ("all_to_all", "shard", "swap", 2 * n, ""),
        ]
    whole = World(shard=3).run(lambda mesh: called(mesh.ranks("shard")))
    parts = World(shard=3).run(lambda mesh: called(InParts(mesh.ranks("shard"))))
    assert [row for _, row in whole] == [row for _, row in parts]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_whole_collectives_have_the_bits_of_messages(size: int) -> None:
    """Collectives computed once for all simulated ranks would have other bits than messages."""
    narrow = [(dtype, out) for dtype in (torch.bfloat16, torch.float16) for out in (None, torch.float32, torch.float64)]
    wide = [(torch.float32, None), (torch.float32, torch.float64), (torch.float64, None), (torch.int64, None)]

    def job(mesh: Any) -> None:
        whole = primitives.along(mesh, "shard")
        for dtype, out in narrow + wide:
            for numel in (0, size, 5 * size, 1000 * size):
                x = values(dtype, numel, mesh.get_rank())
                found, expected = reduced(x, whole, out), reduced(x, InParts(whole), out)
                for a, b in zip(found, expected, strict=True):
                    assert (a.dtype, a.shape) == (b.dtype, b.shape)
                    # which of the bits that mean NaN differs between instructions
                    assert torch.equal(as_bytes(a.nan_to_num(0.5)), as_bytes(b.nan_to_num(0.5)))

    simulate(job, shard=size)


def test_no_rank_sees_what_another_writes_later() -> None:
    """A simulated rank would read memory that another one writes after the collective."""

    def job(mesh: Any) -> list[Any]:
        ranks, rank = primitives.along(mesh, "shard"), mesh.get_rank()
        x = torch.full((2,), float(rank))
        full = primitives.all_gather(x, ranks, lent=True).wait()
        place = torch.empty(6)
        place[2 * rank : 2 * rank + 2] = rank
        inside = primitives.all_gather(place[2 * rank : 2 * rank + 2], ranks, out=place, lent=True).wait()
        y = torch.arange(3.0) + rank
        total = primitives.all_reduce(y, ranks, out=y).wait()
        part = primitives.reduce_scatter(torch.arange(3.0), ranks).wait()
        before = [t.clone() for t in (full, inside, total, part)]
        if rank == 1:
            for t in (x, full, inside, total, part):
                t.zero_()
        fshard.all_reduce(torch.ones(1), mesh, "shard")
        return before if rank == 1 else [full, inside, total, part]

    for rank, found in enumerate(World(3).run(job)):
        assert [t.tolist() for t in found] == [[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], [3, 6, 9], [3 * rank]]


class Calls(TorchDispatchMode):
    """A count of the operators that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_work_is_linear_in_the_number_of_ranks() -> None:
    """Simulating many ranks would take time quadratic in their number."""

    def job(mesh: Any) -> int:
        x, ranks = torch.ones(32, 2), primitives.along(mesh, "shard")
        with Calls() as calls:
            for _ in range(3):
                primitives.all_gather(x, ranks, lent=True).wait()
                primitives.reduce_scatter(x, ranks).wait()
                primitives.all_reduce(x, ranks).wait()
        return calls.count

    few, many = sum(World(4).run(job)) / 4, sum(World(16).run(job)) / 16
    assert many <= few + 8
