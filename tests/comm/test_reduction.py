"""Reductions and gathers of the user's, hooks after them, fast and tree reductions, and sums of many float16 ranks."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, STRATEGIES, lm_batch, lm_params, mean_loss, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, optim
from fshard.comm import primitives
from fshard.comm.ranks import Pending
from fshard.comm.reduction import TREE, Sums
from fshard.testing import World


@dataclass(frozen=True)
class Gathered:
    """A reduction by all-gather, summed from the last rank to the first; `after` doubles the unit `only`."""

    only: str = ""

    def all_reduce(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        into = torch.empty_like(x) if out is None else out
        return primitives.all_gather(x, ranks, label).then(
            lambda full: into.copy_(full.view(ranks.size, -1).flip(0).sum(0))
        )

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        own = x.numel() // ranks.size * ranks.rank
        into = x.new_empty(x.numel() // ranks.size) if out is None else out
        return self.all_reduce(x, ranks, label, None).then(lambda s: into.copy_(s[own : own + into.numel()]))

    def after(self, grads: Tensor, unit: str) -> Tensor:
        return 2 * grads if unit == self.only else grads


def steps(mesh: Any, strategy: str, reduction: Any, **kw: Any) -> Any:
    """Parameters after three steps, and the kinds of collectives for gradients."""
    params = lm_params()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS, **STRATEGIES[strategy]))
    tx = optim.sgd(0.1)
    state, step = fshard.init_state(sharded, tx), fshard.train_step(mean_loss, tx, reduction=reduction, **kw)
    with fshard.collectives.tally() as records:
        for i in range(3):
            state, _ = step(state, lm_batch(i, mesh.get_rank()))
    return gather_params(state.params), {r.kind for r in records if r.label == "blocks.0" and r.nbytes}


@pytest.mark.parametrize("strategy", ["full", "ddp"])
@pytest.mark.parametrize("world", [simulated, gloo])
def test_an_object_may_add_up(world, strategy):
    """A reduction object of the user's sums all gradients: otherwise some unit would go past it, for example
    uncompressed."""
    for (found, kinds), (want, _) in zip(
        world(steps, strategy, Gathered(), shard=2), simulated(steps, strategy, "exact", shard=2), strict=True
    ):
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        assert kinds == {"all_gather"}


@pytest.mark.parametrize("kw", [{}, {"accumulate": 2}, {"accumulate": 2, "reduce_once": True}], ids=str)
def test_a_hook_after_it(kw):
    """The hook `after` sees each unit once: otherwise a user's gradient hook would be skipped, doubled or without
    effect."""

    def run(mesh: Any, unit: str) -> Any:
        return steps(mesh, "full", Gathered(unit), **kw)[0]

    plain, doubled = (simulated(run, unit, shard=3)[0] for unit in ("", "tail"))
    start = lm_params()
    way = [[end - begin for end, begin in zip(found["tail"], start["tail"], strict=True)] for found in (plain, doubled)]
    assert all((b.abs() > 1.5 * a.abs()).all() for a, b in zip(*way, strict=True))


def orders(mesh: Any, strategy: str, reduction: Any) -> set[tuple[str, bool]]:
    """The labels of sums, and whether the backend was free to choose their order."""
    ranks, seen = mesh.ranks("shard"), set()
    scatter, reduce = ranks.reduce_scatter, ranks.all_reduce

    def told(collective: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.add((args[-1].label, args[-2]))
            return collective(*args)

        return run

    ranks.reduce_scatter, ranks.all_reduce = told(scatter), told(reduce)
    steps(mesh, strategy, reduction, clip_norm=1.0)
    return seen


@pytest.mark.parametrize("strategy", ["full", "ddp", "zero1"])
def test_a_backend_may_choose_the_order_of_gradients_alone(strategy):
    """`reduction="fast"` frees the order of gradient sums alone: otherwise the loss or the norm could differ between
    ranks."""
    # ranks that have all parameters may differ in what they read: then all is reduced
    units = {"(root)", "blocks.0", "blocks.1", "tail"} | ({"unused"} if strategy != "full" else set())
    for free in (False, True):
        for reduction in ("fast",) if free else ("exact", Sums()):
            for seen in simulated(orders, strategy, reduction, shard=2):
                assert units <= {label for label, _ in seen}
                assert {(label, fast) for label, fast in seen if fast} == {(unit, True) for unit in units if free}


def in_a_tree(mesh: Any, *shape: int) -> list[tuple[str, int]]:
    """The collectives of one tree sum of ones, by kind and bytes."""
    with fshard.collectives.tally() as records:
        total = TREE.all_reduce(torch.ones(shape), primitives.along(mesh, "shard"), "x", None).wait()
    assert total.tolist() == torch.full(shape, float(mesh.size())).tolist()
    return [(r.kind, r.nbytes) for r in records]


@pytest.mark.parametrize(("shape", "sent"), [((4, 2), "parts"), ((3, 3), "whole"), ((), "whole"), ((0,), "parts")])
def test_a_sum_in_a_tree_travels_in_parts(shape, sent):
    """A tree sum sends parts where rows divide evenly: otherwise each rank would receive whole gradients of all
    ranks."""
    n = 4 * torch.Size(shape).numel()
    parts = [("reduce_scatter", n // 2), ("all_gather", n // 2)]
    for found in simulated(in_a_tree, *shape, shard=2):
        assert found == (parts if sent == "parts" else [("all_gather", n)])


def small_gradients(mesh: Any, policy: str, size: float) -> Tensor:
    """The mean over ranks of a gradient of one size."""
    w = torch.zeros(16)
    plan = fshard.make_plan(w, mesh, policy=policy)
    loss = fshard.value_and_grad(lambda p, x: fshard.Mean((p * x).sum(), 1))
    return gather_params(loss(fshard.shard_params(w, plan), torch.full((16,), size))[1])


@pytest.mark.parametrize("size", [1e-6, 6e4])
def test_float16_holds_the_sums_of_64_ranks(size):
    """Float16 sums of 64 ranks neither overflow nor vanish: otherwise a policy with reduce=f16 would lose gradients."""
    for found in simulated(small_gradients, "reduce=f16", size, shard=64):
        torch.testing.assert_close(found, torch.full((16,), size), rtol=0.1, atol=0)
    assert torch.tensor(1e-6 / 64).half() == 0


def whole_numbers(step: int, rank: int) -> dict[str, Tensor]:
    """One rank's batch of whole numbers, so that gradient sums are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randint(-8, 9, (4, 6), generator=generator).double()
    count = torch.tensor([4.0, 0, 0, 0]) if rank == 0 else torch.tensor([0.0, 0, 4.0 / 4, 0]) * (rank == 1) * 4
    return {"x": x, "count": count}


def exact_loss(p: Any, batch: Any) -> fshard.Mean:
    """A loss that is linear in all parameters: three units, and one leaf that every rank holds whole."""
    x = batch["x"]
    total = (x @ p["a"]["w"]).sum() + (x[:, :3] * p["c"]["v"]).sum() + x.sum() * p["s"] + (x * p["w"]).sum()
    return fshard.Mean(total, batch["count"].sum())


def exact_params() -> Any:
    """The parameters of `exact_loss`, all ones."""
    return {
        "a": {"w": torch.ones(6, dtype=torch.float64)},
        "c": {"v": torch.ones(3, dtype=torch.float64)},
        "s": torch.tensor(1.0, dtype=torch.float64),
        "w": torch.ones(6, dtype=torch.float64),
    }


def partly(mesh: Any, strategy: str, reduce_once: Any, micro: int, how: str) -> Any:
    """Parameters after two steps, and the collectives of gradients by kind and axis, in the order of their start."""
    params = exact_params()
    plan = fshard.make_plan(params, mesh, units=["a", "c"], whole="s", **STRATEGIES[strategy])
    tx = optim.sgd(0.5, momentum=0.5)
    state = fshard.init_state(fshard.shard_params(params, plan), tx, fshard.DynamicLossScale(4.0))
    by = Doubled() if how == "hook" else "exact"
    step = fshard.train_step(exact_loss, tx, accumulate=micro, reduce_once=reduce_once, reduction=by)
    step = fshard.jit(step, backend="eager", bucket=0) if how == "jit" else step
    for i in range(2):
        with fshard.collectives.tally() as records:
            state, _ = step(state, whole_numbers(i, 0 if mesh is None else mesh.get_rank()))
    found = [(r.kind, r.axis, r.label) for r in records if r.label in ("a", "c", "(last)") and r.nbytes]
    return gather_params(state.params), [r for r in found if r[0] != "all_gather"]


@dataclass(frozen=True)
class Doubled:
    """Sums in rank order, and a hook that doubles those of one unit."""

    def all_reduce(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        return primitives.all_reduce(x, ranks, label, out)

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Tensor | None) -> Pending:
        return primitives.reduce_scatter(x, ranks, label, out)

    def after(self, grads: Tensor, unit: str) -> Tensor:
        return 2 * grads if unit == "c" else grads


PARTLY = {
    **{strategy: (2, 2, strategy, "eager") for strategy in ("full", "zero2", "wide_state", "ddp")},
    **{f"{how}-full": (2, 2, "full", how) for how in ("hook", "jit")},
    **{f"{replicate}x{shard}": (replicate, shard, "full", "eager") for replicate, shard in ((3, 1), (2, 1), (1, 2))},
}


@pytest.mark.parametrize(("replicate", "shard", "strategy", "how"), PARTLY.values(), ids=PARTLY)
def test_micro_batches_are_scattered_each_and_reduced_over_replicas_once(replicate, shard, strategy, how):
    """`reduce_once="replicate"` keeps the bits with one all-reduce per step: otherwise users would get wrong
    gradients or more traffic."""
    how_many, world = 2 if how == "jit" else 4, replicate * shard
    runs = {
        once: simulated(partly, strategy, once, how_many, how, replicate=replicate, shard=shard)
        for once in (False, "replicate")
    }
    plain = fshard.testing.oracle(exact_loss, optim.sgd(0.5, momentum=0.5), accumulate=how_many)
    state = plain.init(exact_params(), fshard.DynamicLossScale(4.0))
    for i in range(2):
        state, _ = plain.step(state, [whole_numbers(i, rank) for rank in range(world)])
    for params, _ in runs["replicate"]:
        assert same_bits(params, runs[False][0][0])
        assert how == "hook" or same_bits(params, state.params)
    over = "all_reduce" if strategy == "ddp" else "reduce_scatter"
    for unit in ("a", "c", "(last)"):
        kinds = 2 if unit == "(last)" else 1  # the leaf that every rank has travels by itself
        num = {key: runs[key][0][1].count((over, "shard", unit)) for key in runs}
        assert set(num.values()) == {how_many * (kinds if strategy == "ddp" else 1) * (shard > 1)}
        num = {key: runs[key][0][1].count(("all_reduce", "replicate", unit)) for key in runs}
        assert num == {False: how_many * kinds * (replicate > 1), "replicate": kinds * (replicate > 1)}


@pytest.mark.parametrize("strategy", ["full", "ddp"])
def test_several_axes_are_reduced_over_once(strategy: str) -> None:
    """Gradients would be summed over the first of several axes of `reduce_once` alone."""

    def run(once: Any) -> list[Any]:
        return World(axes={"pod": 2, "replicate": 2, "shard": 2}).run(partly, strategy, once, 2, "eager")

    (expected, plain), *_ = run(False)
    wanted = [
        ("pod",),
        ("pod", "replicate"),
        ("replicate", "pod"),
        *[("pod", "replicate", "shard")] * (strategy == "ddp"),
    ]
    for once in wanted:
        for params, records in run(once):
            assert same_bits(params, expected)
            for axis in ("pod", "replicate"):
                num, each = (len([r for r in found if r[1] == axis]) for found in (records, plain))
                assert num == (each // 2 if axis in once else each), (once, axis)


def test_processes_scatter_each_micro_batch():
    """Processes give the bits and collectives of simulated ranks: otherwise `reduce_once` would hold in simulation
    alone."""
    args = "full", "replicate", 2, "eager"
    assert same_bits(gloo(partly, *args, shard=2, replicate=2), simulated(partly, *args, shard=2, replicate=2))


def test_what_waits_is_a_shard():
    """Between micro-batches a rank keeps a shard of each gradient: otherwise memory would hold whole gradients."""

    def peak(once: Any) -> int:
        params = {f"w{i}": torch.ones(64, 64) for i in range(4)}
        mesh = fshard.AbstractMesh(replicate=2, shard=8)
        plan = fshard.make_plan(params, mesh, units=["w*"])
        tx = optim.sgd(0.1)

        def loss(p: Any, x: Tensor) -> Tensor:
            for w in p.values():
                x = torch.tanh(x @ w)
            return x.sum()

        state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params)
        step = fshard.train_step(loss, tx, accumulate=2, reduce_once=once)
        return fshard.jit(step, donate=True, bucket=0).lower(state, torch.ones(8, 64)).memory().peak

    full = 4 * 64 * 64 * 4
    whole, partial, each = (peak(once) for once in (True, "replicate", False))
    assert partial <= each + full // 8 + 4096
    assert whole > partial + full // 2


def test_what_was_added_locally_is_sent_in_the_dtype_of_the_policy():
    """Twice the bytes would be sent, and a step with `reduce_once` would round otherwise than one without."""

    def run(mesh: Any) -> Tensor:
        params, tx = {"w": torch.ones(4)}, optim.sgd(1.0)
        plan = fshard.make_plan(params, mesh, policy="reduce=bf16")
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        loss = lambda p, x: fshard.Sum((p["w"] * x).sum())  # noqa: E731
        state, _ = fshard.train_step(loss, tx, accumulate=2, reduce_once=True)(state, torch.tensor([[1.0], [2**-10]]))
        return fshard.gather_params(state.params)["w"]

    for w in simulated(run, shard=2):
        assert torch.equal(w, torch.full((4,), -1.0))  # 1 + 2^-10 is 1 in bfloat16


def test_axes_that_cannot_wait():
    """A `reduce_once` that cannot be done is an error that says what was expected; without it gradients would be
    wrong."""

    def run(mesh: Any, once: Any) -> None:
        partly(mesh, "full", once, 2, "eager")

    for bad in ("shard", ("replicate", "shard"), "typo"):
        with pytest.raises(
            ValueError, match=r"reduce_once=.*expected axes of the mesh that gradients are not cut over"
        ):
            simulated(run, bad, shard=2, replicate=2)
    with pytest.raises(ValueError, match="reduce_once='replicate' with reduction='tree'"):
        fshard.train_step(exact_loss, optim.sgd(0.1), reduction="tree", reduce_once="replicate")
    # one device has no axes: nothing waits, and nothing is sent
    (params, sent), (usual, _) = (partly(None, "full", once, 2, "eager") for once in ("replicate", False))
    assert same_bits(params, usual)
    assert sent == []


@dataclass(frozen=True)
class Broadcasts:
    """A gather made of one broadcast from each rank; `wrong` leaves out the last rank."""

    wrong: bool = False

    def all_gather(self, x: Tensor, ranks: Any, label: str) -> Pending:
        parts = [primitives.broadcast(x, ranks, src, label) for src in range(ranks.size - self.wrong)]
        return parts[0].then(lambda first: torch.cat([first, *(part.wait() for part in parts[1:])]))


def gathered_by(mesh: Any, gather: Any, strategy: str, how: str, **kw: Any) -> Any:
    """Losses and parameters of two steps, and the collectives of parameters."""
    params = lm_params(torch.float32)
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, gather=gather, **STRATEGIES[strategy], **kw)
    tx = optim.sgd(0.1)
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(mean_loss, tx)
    step, losses = fshard.jit(step, backend="eager", bucket=0) if how == "jit" else step, []
    batches = [lm_batch(0, mesh.get_rank()), lm_batch(0, mesh.get_rank())]
    for batch in batches:
        with fshard.collectives.tally() as records:
            state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    kinds = [r.kind for r in records if r.label == "blocks.0" and r.kind in ("all_gather", "broadcast")]
    return losses, gather_params(state.params), kinds


@pytest.mark.parametrize(
    ("replicate", "shard", "strategy", "how"),
    [(1, 3, "full", "eager"), (1, 2, "keep", "eager"), (2, 2, "wide", "eager"), (1, 2, "full", "jit")],
)
def test_an_object_may_gather(replicate, shard, strategy, how):
    """A gather object of the user's does every gather of parameters: otherwise some unit would go past it."""
    plain, ours = (
        simulated(gathered_by, gather, strategy, how, replicate=replicate, shard=shard)
        for gather in (None, Broadcasts())
    )
    for (losses, params, kinds), (want_losses, want, others) in zip(ours, plain, strict=True):
        assert losses == want_losses
        assert same_bits(params, want)
        assert set(kinds) == {"broadcast"}
        assert others == ["all_gather"] * ((2 if strategy != "keep" else 1) * (2 if strategy == "wide" else 1))
        assert len(kinds) == len(others) * shard


@pytest.mark.parametrize("kw", [{"together": True}, {"param_wire": fshard.wire.Int8(16)}], ids=str)
def test_what_it_gathers_may_be_bytes(kw):
    """A user's gather works on mixed dtypes and encoded parameters: otherwise `together` and wires would break it."""
    policy = {"policy": "compute=bf16; blocks.*.scale: compute=f32"}
    plain, ours = (
        simulated(lambda mesh, g: gathered_by(mesh, g, "full", "eager", **policy, **kw)[:2], gather, shard=3)
        for gather in (None, Broadcasts())
    )
    assert same_bits(plain, ours)


def test_processes_gather_by_an_object():
    """A user's gather gives the bits of simulated ranks in processes: otherwise it would hold in simulation alone."""
    args = Broadcasts(), "full", "eager"
    assert same_bits(gloo(gathered_by, *args, shard=2), simulated(gathered_by, *args, shard=2))


def test_gathers_that_are_none():
    """A gather object that is wrong, or differs between ranks, is an error; without it parameters would be garbage."""
    with pytest.raises(TypeError, match=r"gather=3: expected an object that gathers.*all_gather"):
        fshard.make_plan(torch.ones(3), gather=3)
    with pytest.raises(ValueError, match=r"Broadcasts\(wrong=True\): all_gather gave torch.float32\[\d+\], expected"):
        simulated(gathered_by, Broadcasts(wrong=True), "full", "eager", shard=2)
    with pytest.raises(fshard.MismatchError, match="gather=Broadcasts"):
        gloo(planned_otherwise)


def planned_otherwise(mesh: Any) -> None:
    """Rank 0 plans without a gather object, the other rank with one."""
    fshard.make_plan(torch.ones(3), mesh, gather=Broadcasts() if mesh.get_rank() else None)
