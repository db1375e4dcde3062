"""Policies: their words, the dtypes that a loss sees and that travel, and the distance of gradients from float64."""

import itertools
import pickle
import re
from functools import partial
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, STRATEGIES, WORLDS, lm_batch, lm_params, mean_loss, rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import DynamicLossScale, Policy, optim
from fshard.comm import primitives
from fshard.core import tree

MIXED = "storage=f32,compute=bf16; blocks.*.scale: compute=f32; unused: compute=f64,reduce=f32"
POLICIES = {
    "bf16": "compute=bf16",
    "bf16-f32": "compute=bf16,reduce=f32,grads=bf16",
    "f16": "storage=f32,compute=f16,output=f32",
    "mixed": MIXED,
}


@pytest.mark.parametrize("text", ["", *POLICIES.values(), "compute=f16,buffers=f64,cast_inputs=no"])
def test_words_are_the_policy(text):
    """A printed policy parses to an equal one: otherwise a policy copied from a log or a file would be another
    policy."""
    policy = Policy.parse(text)
    assert Policy.parse(str(policy)) == policy
    assert hash(Policy.parse(str(policy))) == hash(policy)
    assert eval(repr(policy).replace("Policy(", "Policy.parse(")) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_names_of_dtypes():
    """Short names, torch's names and dtypes mean the same policy: otherwise equal policies would give different
    plans."""
    names = Policy(compute="bf16"), Policy(compute="bfloat16"), Policy(compute=torch.bfloat16)
    assert len({*names, Policy.parse("compute = bf16")}) == 1
    by_dict = Policy(compute="bf16", overrides={"a.*": "compute=f32"})
    assert by_dict == Policy.parse("compute=bf16;a.*:compute=float32")


def test_every_dtype_has_a_name():
    """Policies with dtypes that have no short name would be one text, of which no policy can be made."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64):
        policy = Policy(storage=dtype, compute=dtype)
        assert Policy.parse(str(policy)) == policy


def test_one_override_for_several_patterns():
    """A list of paths, as `apply.units` returns it, would select nothing, or in another order."""
    several = Policy(compute="bf16", overrides=[(["a", "b.1"], "compute=f32"), ("b.*", "compute=f16")])
    assert several == Policy.parse("compute=bf16; a: compute=f32; b.1: compute=f32; b.*: compute=f16")
    assert several == Policy(compute="bf16", overrides={("a", "b.1"): "compute=f32", "b.*": "compute=f16"})
    assert Policy(overrides=[([], "compute=f32")]) == Policy()
    params = {"a": torch.ones(1), "b": [torch.ones(1), torch.ones(1)], "c": torch.ones(1)}
    dtypes = [torch.float32, torch.float16, torch.float32, torch.bfloat16]

    def run(mesh: Any) -> None:
        plan = fshard.make_plan(params, mesh, policy=several)
        assert [plan.kinds[slot.kind].precision.compute for slot in plan.slots] == dtypes
        seen = []

        def loss(p: Any) -> Tensor:
            seen.extend(leaf.dtype for leaf in tree.leaves(fshard.gather_params(p)))
            return p["c"].sum()

        fshard.evaluate(loss)(fshard.shard_params(params, plan))
        assert seen == dtypes

    run(None)
    simulated(run, shard=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Policy.parse("compute=f31"),
            "policy: compute='f31' is not a floating dtype: expected f64, f32, bf16, f16",
        ),
        (lambda: Policy(storage="int8"), "policy: storage='int8' is not a floating dtype"),
        (lambda: Policy.parse("dtype=f32"), "policy: 'dtype=f32': expected one of storage, compute, reduce"),
        (lambda: Policy.parse("compute"), "policy: 'compute': expected one of"),
        (lambda: Policy.parse("compute=f32; norm"), "policy: 'norm': expected 'pattern: name=dtype, ...'"),
        (lambda: fshard.make_plan(torch.ones(1), policy=32), "policy: expected a Policy, words such as"),
        (
            lambda: fshard.make_plan({"n": torch.tensor([1]), "w": torch.ones(1)}, policy="; n: compute=f32"),
            "policy: leaf 'n' is torch.int64 and cannot be cast: leave it out of 'n'",
        ),
        (
            lambda: fshard.make_plan({"w": torch.ones(1)}, policy=Policy(overrides=[(["w", "v"], "compute=f32")])),
            "policy: the pattern 'v' matches nothing",
        ),
        (
            lambda: fshard.make_plan({"w": torch.ones(1)}, policy=Policy(overrides=[(nn.Linear, "compute=f32")])),
            "policy=the class Linear: expected path patterns",
        ),
        (
            lambda: fshard.make_plan({"w": torch.ones(1)}, policy="; v: compute=f32"),
            "policy: the pattern 'v' matches nothing",
        ),
    ],
)
def test_what_is_no_policy(make, words):
    """A wrong policy is an error that says what was expected; without it a leaf would compute in an unintended
    dtype."""
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        make()


def seen(mesh: Any) -> tuple[Any, ...]:
    """The dtypes that a loss sees and a step keeps; those of the inputs and outputs."""
    params = {"w": rand(3, 2, seed=1), "norm": [rand(2, seed=2)], "n": torch.arange(3), "c": rand(4, seed=3) * 1j}
    policy = Policy.parse("storage=f32,compute=bf16,output=f16; norm: compute=f32")
    plan = fshard.make_plan(params, mesh, policy=policy, frozen="c")
    found: dict[str, Any] = {}

    def loss(p: Any, batch: Any) -> Any:
        found["params"] = tree.map(lambda x: x.dtype, fshard.gather_params(p))
        found["batch"] = tree.map(lambda x: x.dtype, batch)
        return p["w"].square().sum() + p["norm"][0].sum().to(torch.bfloat16), batch["x"] + p["c"].abs().sum()

    batch = {"x": torch.ones(2), "i": torch.arange(2)}
    (value, aux), grads = fshard.value_and_grad(loss, has_aux=True)(fshard.shard_params(params, plan), batch)
    kept = tree.map(lambda x: None if x is None else x.dtype, fshard.gather_params(grads))
    whole = fshard.gather_params(fshard.shard_params(params, plan))
    return found, value.dtype, aux.dtype, kept, tree.map(lambda x: x.dtype, whole)


@pytest.mark.parametrize("shard", [1, 2])
def test_every_tensor_has_its_dtype(shard):
    """Parameters, outputs and gradients have the policy's dtypes, inputs their own: otherwise training would lose
    precision unnoticed."""
    f32, bf16, i64, c128 = torch.float32, torch.bfloat16, torch.int64, torch.complex128
    for found, value, aux, grads, whole in simulated(seen, shard=shard):
        assert found["params"] == {"w": bf16, "norm": [f32], "n": i64, "c": c128}
        assert found["batch"] == {"x": f32, "i": i64}
        assert (value, aux) == (torch.float16, torch.float16)
        assert grads == {"w": f32, "norm": [f32], "n": None, "c": None}
        assert whole == {"w": f32, "norm": [f32], "n": i64, "c": c128}


def given(mesh: Any) -> list[list[tuple[torch.dtype, bool]]]:
    """What a loss gets of a batch and of other arguments, by each way to call it: dtypes, and whether values stayed."""
    plan = fshard.make_plan(rand(3, seed=1), mesh, policy="storage=f32,compute=bf16")
    sharded, tx = fshard.shard_params(rand(3, seed=1), plan), optim.sgd(0.1)
    batch = {"x": rand(2, 3, seed=2), "target": rand(2, seed=3), "class": torch.tensor([4, 1])}
    weights, found = rand(3, seed=4), list[Any]()

    def loss(p: Any, batch: Any, weights: Tensor) -> Any:
        found.append([(a.dtype, torch.equal(a, b)) for a, b in zip(tree.leaves([batch, weights]), want, strict=True)])
        return (p.float() * batch["x"] * weights).square().sum() - batch["target"].sum()

    want = tree.leaves([batch, weights])
    fshard.value_and_grad(loss)(sharded, batch, weights)
    fshard.evaluate(loss)(sharded, batch, weights)
    fshard.hvp(loss)(sharded, sharded, batch, weights)
    fshard.train_step(loss, tx)(fshard.init_state(sharded, tx), batch, weights)
    return found


@pytest.mark.parametrize("shard", [1, 2])
def test_a_policy_casts_parameters_alone(shard):
    """A policy leaves a loss's batch and arguments as they are: targets and weights of a regression would be rounded,
    which neither FSDP2 nor a function of JAX does, and a step and `value_and_grad` would do it to different ones."""
    f64, i64 = (torch.float64, True), (torch.int64, True)
    assert simulated(given, shard=shard) == [[[f64, f64, i64, f64]] * 4] * shard


@pytest.mark.parametrize("output", ["", ",output=f16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_loss_has_the_dtype_of_its_sum(dtype, output):
    """A loss that was summed in float32 or float64 is reported so: a curve in bfloat16 would have steps of 1/256."""
    total = torch.tensor(1 + 2.0**-7 + 2.0**-20 + 2.0**-40, dtype=torch.float64).to(dtype)
    reported = torch.float16 if output else max(dtype, torch.float32, key=lambda d: d.itemsize)
    for loss_of in (lambda x: fshard.Mean(x, 1), lambda x: fshard.Sum(x), lambda x: x):
        fn = lambda p, x, loss_of=loss_of: loss_of(total * x + (p * 0).sum().to(dtype))  # noqa: E731
        plan = fshard.make_plan(torch.ones(2), policy=f"compute=bf16{output}")
        sharded, tx, one = fshard.shard_params(torch.ones(2), plan), optim.sgd(0.1), torch.ones(1, dtype=dtype)
        scalar = lambda p, x, fn=fn: fn(p, x[0])  # noqa: E731
        values = [fshard.value_and_grad(scalar)(sharded, one)[0], fshard.evaluate(scalar)(sharded, one)]
        values.append(fshard.train_step(scalar, tx)(fshard.init_state(sharded, tx), one)[1]["loss"])
        assert same_bits(values, [total.to(reported)] * 3)


def gradients(mesh: Any, policy: str, strategy: str, how: str = "grad") -> Any:
    """The gradients of the language model in float32, and the collectives that were sent."""
    params = lm_params(torch.float32)
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, policy=policy, **STRATEGIES[strategy])
    sharded = fshard.shard_params(params, plan)
    with fshard.collectives.tally() as records:
        grads = fshard.value_and_grad(mean_loss)(sharded, lm_batch(0, mesh.get_rank()))[1]
    return fshard.gather_params(grads), [(r.kind, r.label, r.nbytes) for r in records if r.nbytes]


def by_hand(policy: str, replicate: int, shard: int) -> Any:
    """Gradients in plain torch: leaves cast one by one, ranks differentiated one by one, summed over shards, then
    replicas."""
    params, resolved = lm_params(torch.float32), fshard.make_plan(lm_params(torch.float32), policy=policy)
    dtypes = {slot.path: resolved.kinds[slot.kind].precision for slot in resolved.slots}
    names = [*dict.fromkeys(slot.path for slot in resolved.slots)]
    flat, spec = tree.flatten(params)
    paths = tree.leaf_paths(spec)
    totals, counts, leaves = [], [], []
    for rank in range(replicate * shard):
        mine = {n: flat[paths.index(n)].to(dtypes[n].compute).requires_grad_() for n in names}
        held = [mine[resolved.slots[number].path] for number in resolved.leaves]
        out = resolved.policy.cast(mean_loss(tree.unflatten(spec, held), lm_batch(0, rank)), "output")
        totals.append(out.total)
        counts.append(out.count.double())
        leaves.append(mine)
    seed = torch.stack(counts).sum().reciprocal().to(totals[0].dtype)
    each = [
        [torch.zeros_like(p) if g is None else g for p, g in zip(mine.values(), found, strict=True)]
        for total, mine in zip(totals, leaves, strict=True)
        for found in [torch.autograd.grad(total, [*mine.values()], seed, allow_unused=True)]
    ]
    summed = []
    for i, name in enumerate(names):
        sent = [grads[i].to(dtypes[name].reduce).float() for grads in each]
        rows = [sum(sent[row * shard + 1 : (row + 1) * shard], sent[row * shard]) for row in range(replicate)]
        summed.append(sum(rows[1:], rows[0]).to(dtypes[name].grads))
    by_name = dict(zip(names, summed, strict=True))
    return tree.unflatten(spec, [by_name[resolved.slots[number].path] for number in resolved.leaves])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_made_by_hand(world, policy):
    """Mixed precision has the bits of casts written by hand: otherwise a policy would round where plain code does
    not."""
    replicate, shard = WORLDS[world]
    want = by_hand(POLICIES[policy], replicate, shard)
    for strategy in ("full", "zero2", "ddp") if world != "2x2" else ("full",):
        for found, _ in simulated(gradients, POLICIES[policy], strategy, replicate=replicate, shard=shard):
            assert same_bits(found, want), strategy


def test_processes_give_the_same_bits():
    """In low precision processes have the bits and messages of simulated ranks: otherwise simulated tests would not
    hold on a cluster."""
    for policy in ("bf16", "mixed"):
        args = POLICIES[policy], "full"
        assert same_bits(gloo(gradients, *args, shard=2), simulated(gradients, *args, shard=2))


def test_low_precision_travels():
    """Parameters and gradients are cast before they are sent: otherwise bfloat16 would send as many bytes as
    float32."""
    plain, half = (simulated(gradients, policy, "full", shard=2)[0][1] for policy in ("", "compute=bf16"))
    assert [row[:2] for row in half] == [row[:2] for row in plain]
    large = [row for row in zip(plain, half, strict=True) if row[0][0] in ("all_gather", "reduce_scatter")]
    assert {kind for (kind, _, _), _ in large} == {"all_gather", "reduce_scatter"}
    for (kind, label, full), (_, _, low) in large:
        assert low * 2 <= full + 32, (kind, label)  # intervals of 16 bytes have twice the elements


def distance(grads: Any, exact: Any) -> float:
    """The relative error of a tree against an exact one, in the 2-norm."""
    pairs = zip(tree.leaves(grads), tree.leaves(exact), strict=True)
    error, size = zip(*(((g.double() - e).square().sum(), e.square().sum()) for g, e in pairs), strict=True)
    return float((sum(error) / sum(size)).sqrt())


@pytest.mark.parametrize("shard", [2, 4])
def test_gradients_are_near_those_of_float64(shard):
    """Sharded bfloat16 gradients err less than twice plain bfloat16 ones: otherwise sharding would harm convergence."""

    def one(p: Any, dtype: torch.dtype) -> Any:
        flat, spec = tree.flatten(p)
        unique = {id(x): x.to(dtype).requires_grad_() for x in flat}
        model = tree.unflatten(spec, [unique[id(x)] for x in flat])
        batches = [lm_batch(0, rank) for rank in range(shard)]
        batch = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
        out = mean_loss(model, tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, batch))
        grads = torch.autograd.grad(out.total / out.count, [*unique.values()], allow_unused=True)
        found = dict(zip(unique, grads, strict=True))
        return tree.unflatten(spec, [torch.zeros_like(x) if found[id(x)] is None else found[id(x)] for x in flat])

    params = lm_params(torch.float32)
    exact = one(params, torch.float64)
    ours = simulated(gradients, "compute=bf16,reduce=f32", "full", shard=shard)[0][0]
    assert distance(ours, exact) < 2 * distance(one(params, torch.bfloat16), exact)


@pytest.mark.parametrize("size", [2, 3, 8, 33, 64])
def test_a_sum_in_bfloat16_errs_by_one_rounding_an_addend(size):
    """A bfloat16 reduction rounds each addend once: otherwise the error would grow with the number of ranks."""
    values = torch.stack([rand(64 * size, seed=rank, dtype=torch.float32) for rank in range(size)]) + 1

    def summed(mesh: Any) -> Tensor:
        out = torch.empty(64)
        ranks = primitives.along(mesh, "shard")
        return primitives.reduce_scatter(values[ranks.rank].bfloat16(), ranks, out=out).wait()

    exact, bound = values.double().sum(0), values.double().abs().sum(0) * 2**-8
    error = (torch.cat(simulated(summed, shard=size)) - exact).abs()
    assert (error <= bound + 1e-4).all()
    running = values[0].bfloat16()
    for row in values[1:]:
        running = running + row.bfloat16()
    if size > 8:
        assert (running.double() - exact).abs().mean() > 4 * error.mean()


class Reads(TorchDispatchMode):
    """Lists every operator by which the host reads a tensor, except for counters that live on the host."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known, self.found = {x.data_ptr() for x in known}, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and args[0].data_ptr() not in self.known:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


def reads(mesh: Any, **strategy: Any) -> list[str]:
    """What the host reads in a step with clipping, micro-batches, a schedule and a loss scale."""
    params = lm_params(torch.float32)
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, policy="compute=f16,output=f32", **strategy)
    tx = optim.adamw(optim.schedules.warmup_cosine(0.1, 2, 8))
    state = fshard.init_state(fshard.shard_params(params, plan), tx, DynamicLossScale())
    step = fshard.train_step(mean_loss, tx, clip_norm=1.0, accumulate=2)
    state, _ = step(state, lm_batch(0, 0))
    with Reads(state.step, state.rng) as mode:
        step(state, lm_batch(1, 0))
    return mode.found


def test_a_step_reads_nothing():
    """A step reads no tensor on the host: otherwise each step would wait for the GPU, and the GPU for Python.

    On a CPU it reads, for each micro-batch that gathers again, whether ranks saved the same units.
    """
    assert simulated(partial(reads, regather=False), shard=2) == [[], []]
    assert simulated(reads, shard=2) == [["aten._local_scalar_dense.default"] * 2] * 2
    with Reads() as mode:
        torch.ones(1).item()
    assert mode.found  # it can fail


def overflowing(p: Any, batch: Any) -> Any:
    """A small network in float16; `bad` in the batch makes the gradient of one leaf inf or NaN."""
    x, y, bad = (batch[key].to(p["w"].dtype) for key in ("x", "y", "bad"))
    hidden = torch.tanh(x @ p["w"] + p["b"])
    loss = (hidden @ p["out"] - y).float().square()
    loss = loss + (p["b"].float() * bad.float()).sum() * (bad[0] != 0)
    return fshard.Mean(loss.sum(), loss.numel())


def overflow_batch(step: int, rank: int) -> dict[str, Tensor]:
    """Whole numbers, whose sums have the same bits in any order; inf or NaN on rank 0 at some steps."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randint(-2, 3, (4, 3), generator=generator).float()
    bad = torch.zeros(4, 1)
    if rank == 0 and step % 17 in (3, 4):
        bad[:] = torch.inf if step % 2 else torch.nan
    return {"x": x, "y": x.sum(1, keepdim=True), "bad": bad}


def scaled_run(mesh: Any, num_steps: int, micro: int, clip: float | None) -> list[tuple[float, int, float]]:
    """Scale, tracker and found_inf of every step, and the parameters after the last step."""
    params = {"w": rand(3, 5, seed=1), "b": rand(5, seed=2), "out": rand(5, 1, seed=3)}
    plan = fshard.make_plan(params, mesh, policy="storage=f32,compute=f16,reduce=f32")
    tx, rows = optim.sgd(0.01), []
    state = fshard.init_state(fshard.shard_params(params, plan), tx, DynamicLossScale(2.0**17, growth_interval=6))
    step = fshard.train_step(overflowing, tx, clip_norm=clip, accumulate=micro)
    for i in range(num_steps):
        state, metrics = step(state, overflow_batch(i, mesh.get_rank()))
        saved = state.loss_scale.state_dict()
        rows.append((saved["scale"], saved["_growth_tracker"], metrics["found_inf"].item()))
    return [rows, fshard.gather_params(state.params)]


def torch_run(num_ranks: int, num_steps: int, micro: int, clip: float | None) -> Any:
    """The same from torch.amp.GradScaler, which drives one model on all ranks' data, rank by rank."""
    start = {"w": rand(3, 5, seed=1), "b": rand(5, seed=2), "out": rand(5, 1, seed=3)}
    leaves = {name: torch.nn.Parameter(x.float()) for name, x in start.items()}
    optimizer = torch.optim.SGD(leaves.values(), 0.01)
    scaler, rows = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=6), []
    for i in range(num_steps):
        optimizer.zero_grad()
        batches = [overflow_batch(i, rank) for rank in range(num_ranks)]
        parts = [{k: x.chunk(micro)[m] for k, x in b.items()} for m in range(micro) for b in batches]
        for part in parts:
            half = {name: x.to(torch.float16) for name, x in leaves.items()}
            out = overflowing(half, part)
            scaler.scale(out.total / (4 * num_ranks)).backward()
        scaler.unscale_(optimizer)
        found_inf = float(sum(scaler._found_inf_per_device(optimizer).values()) > 0)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        scaler.step(optimizer)
        scaler.update()
        rows.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"], found_inf))
    return [rows, {name: x.detach() for name, x in leaves.items()}]


@pytest.mark.parametrize(("replicate", "shard"), [(1, 1), (1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize(("micro", "clip"), [(1, None), (1, 1.0), (2, 1.0)])
def test_200_steps_follow_grad_scaler(replicate, shard, micro, clip):
    """200 steps with overflows follow torch.amp.GradScaler: otherwise a float16 run would skip other steps than in
    torch."""
    rows, params = torch_run(replicate * shard, 200, micro, clip)
    assert {found for _, _, found in rows} == {0, 1}
    assert len({scale for scale, _, _ in rows}) > 3
    runs = simulated(scaled_run, 200, micro, clip, replicate=replicate, shard=shard)
    for found, ours in runs:
        assert found == rows
        # torch adds up the norms of leaves, in float32
        torch.testing.assert_close(ours, params, rtol=0, atol=0 if clip is None else 5e-7)
    assert all(same_bits(a[1], b[1]) for a, b in itertools.pairwise(runs))
