"""`reduction="tree"`: the same bits on any number of ranks."""

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.models import NARROW, STRATEGIES, rand, same_bits
from support.optimizers import TRANSFORMS
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.core import tree
from fshard.layout.norms import leaf_norms
from fshard.testing import MismatchError

STEPS = 100 if os.environ.get("FSHARD_ALL") else 24
ROWS = 16  # of all ranks


def params() -> Any:
    """Parameters of a small language model with one block of attention."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    block = {
        "norm": torch.ones(6),
        "qkv": normal(6, 18),
        "out": normal(6, 6),
        "up": normal(6, 24),
        "down": normal(24, 6),
    }
    ends = {"embed": normal(2, 256, 6), "pos": normal(5, 6), "norm": torch.ones(6), "head": torch.zeros(6, 256)}
    return ends | {"blocks": [block]}


def attended(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """One block with two heads: (rows, length, 6) -> (rows, length, 6)."""
    rows, length, width = x.shape
    qkv = (F.layer_norm(x, (width,), p["norm"]) @ p["qkv"]).view(rows, length, 3, 2, width // 2)
    heads = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
    x = x + heads.transpose(1, 2).reshape(x.shape) @ p["out"]
    return x + F.gelu(x @ p["up"]) @ p["down"]


def loss(p: Any, batch: dict[str, Tensor]) -> fshard.Mean:
    """Cross-entropy with dropout and different weights per token."""
    x = F.embedding(batch["tokens"], p["embed"][0]) + p["pos"]
    for block in p["blocks"]:
        x = F.dropout(attended(block, x), 0.1)
    scores = F.layer_norm(x, (6,), p["norm"]) @ (p["head"] + 0.01 * p["embed"][1].T)
    losses = F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return fshard.Mean((100 * losses * batch["weight"].flatten()).sum(), batch["weight"].sum())


def rows_of(step: int, mesh: Any) -> dict[str, Tensor]:
    """One rank's rows of a batch that is the same for all numbers of ranks."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (ROWS, 6), generator=generator)
    weight = (torch.rand(ROWS, 5, generator=generator) > 0.3).float()
    num, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
    mine = slice(rank * ROWS // num, (rank + 1) * ROWS // num)
    return {"tokens": tokens[mine, :-1], "targets": tokens[mine, 1:], "weight": weight[mine]}


def started(mesh: Any, tx: Any, left: Any = None, **plan: Any) -> fshard.TrainState:
    """The first state, or the state that a run on another number of ranks left."""
    first = params()
    laid = fshard.make_plan(first, mesh, **{"units": ["blocks.*"], **plan})
    sharded = fshard.shard_params(left["params"] if left else first, laid)
    state = fshard.init_state(sharded, tx, fshard.DynamicLossScale(2.0**124, growth_interval=7), seed=3)
    if not left:
        return state
    held = optim.state.shard_state(left["opt"], state.opt_state)
    return fshard.TrainState(sharded, held, left["scale"], left["step"], left["rng"], None)


def all_of(state: fshard.TrainState) -> dict[str, Any]:
    """The whole state, gathered."""
    return {
        "params": fshard.gather_params(state.params),
        "opt": optim.state.gather_state(state.opt_state),
        "scale": state.loss_scale,
        "step": state.step,
        "rng": state.rng,
    }


ADAMW = optim.adamw(1e-2)
CLIPPED = {"clip_norm": 0.5, "accumulate": 2, "reduction": "tree"}


def train(mesh: Any, begin: int, end: int, left: Any = None) -> Any:
    """Steps of AdamW with dropout, clipping, loss scaling and micro-batches; the whole state and the last metrics."""
    state, step = started(mesh, ADAMW, left), fshard.train_step(loss, ADAMW, **CLIPPED)
    metrics: dict[str, Tensor] = {}
    for number in range(begin, end):
        state, metrics = step(state, rows_of(number, mesh))
    return all_of(state), metrics


def test_many_steps():
    """Many steps on 1 to 8 ranks, simulated or in processes, give the same bits: otherwise a run would depend on the
    number of GPUs."""
    half = STEPS // 2
    (expected,) = simulated(train, 0, STEPS, shard=1)
    assert 0 < expected[0]["opt"]["count"] < STEPS  # some were skipped
    (before,) = simulated(train, 0, half, shard=1)
    runs = {f"{num} simulated": simulated(train, 0, STEPS, shard=num) for num in (2, 4, 8)}
    runs["2 processes"] = gloo(train, 0, STEPS, shard=2)
    runs["1, then 4 processes"] = gloo(train, half, STEPS, before[0], shard=4)
    for name, run in runs.items():
        assert all(same_bits(rank, expected) for rank in run), name


def plain(p: Any, batch: dict[str, Tensor]) -> Tensor:
    """A scalar loss, for which every slice counts the same."""
    return loss(p, batch).total


def summed(p: Any, batch: dict[str, Tensor]) -> fshard.Sum:
    """The loss as a Sum."""
    return fshard.Sum(loss(p, batch).total)


def aided(p: Any, batch: dict[str, Tensor]) -> tuple[fshard.Mean, Tensor]:
    """The loss with an aux."""
    return loss(p, batch), batch["weight"].sum()


def few(mesh: Any, loss_fn: Any = loss, tx: Any = ADAMW, jit: bool = False, steps: int = 2, **kw: Any) -> Any:
    """The whole state, metrics and aux after some steps with `reduction="tree"`."""
    plan = kw.pop("plan", {})
    step: Any = fshard.train_step(loss_fn, tx, **{"reduction": "tree", **kw})
    state = started(mesh, tx, **plan)
    step = fshard.jit(step, backend="eager") if jit else step
    for number in range(steps):
        state, metrics = step(state, rows_of(number, mesh))
    aux = metrics.pop("aux", ())
    return all_of(state), metrics, torch.stack(aux) if isinstance(aux, list) else None


CASES: dict[str, dict[str, Any]] = {
    **{f"plan {name}": {"plan": plan} for name, plan in STRATEGIES.items()},
    "turned": {"plan": dict.fromkeys(("params_over", "grads_over", "state_over"), ("shard", "replicate"))},
    "outer": {"plan": dict.fromkeys(("params_over", "grads_over", "state_over"), "replicate")},
    **{name: {"tx": make(), "plan": {"block": 4}} for name, make in TRANSFORMS.items()},
    "sgd and nesterov": {"tx": optim.sgd(0.1, momentum=0.9, nesterov=True)},
    "a scalar": {"loss_fn": plain, "clip_norm": 0.1},
    "a sum": {"loss_fn": summed},
    "whole leaves": {"plan": {"whole": ["norm", "blocks.*.norm"]}},
    "frozen leaves": {"plan": {"frozen": ["pos"]}},
    "bf16": {"plan": {"policy": "compute=bf16,output=f32"}},
    "sixteen slices": {"reduction": fshard.reduction.TreeSums(slices=16)},
    "jit": {"jit": True, "clip_norm": 0.5, "reduction": fshard.reduction.TreeSums(slices=2)},
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    """Every strategy, mesh, optimizer, loss and policy gives one rank's bits: otherwise such a run would depend on
    the number of GPUs."""
    case = dict(CASES[name])
    strategy = {k: v for k, v in case.get("plan", {}).items() if not k.endswith("_over")}
    (expected,) = simulated(partial(few, **{**case, "plan": strategy, "jit": False}), shard=1)
    narrow = name.removeprefix("plan ") in NARROW or not name.startswith(("plan", "turned", "outer"))
    num = 2 if "jit" in case else 8 if name == "plan full" else 4
    for state, metrics, _ in simulated(
        partial(few, **case), **({"shard": num} if narrow else {"shard": 2, "replicate": 2})
    ):
        assert same_bits((state, metrics), expected[:2])


def test_aux_is_of_every_micro_batch():
    """The aux has one entry per slice, and all ranks' entries are one rank's: otherwise users would miss part of the
    batch."""
    (expected,) = simulated(partial(few, loss_fn=aided, has_aux=True, accumulate=2), shard=1)
    found = simulated(partial(few, loss_fn=aided, has_aux=True, accumulate=2), shard=4)
    assert same_bits(torch.cat([aux for *_, aux in found]), expected[2])
    assert len(expected[2]) == 16


class WithNorms(NamedTuple):
    """A state with the argument and the norm that a user's transformation saw."""

    asked: Tensor
    norm: Tensor


def keeping_norms() -> optim.Transform:
    """A user's transformation that keeps `exact_norms` and the norm it computed."""

    def update(grads: Any, state: WithNorms, params: Any = None, exact_norms: bool = False, **extra: Any) -> Any:
        norm = fshard.optim.global_norm(grads, exact=exact_norms)
        return tree.map(lambda g: -0.01 * g / norm, grads), WithNorms(torch.tensor(float(exact_norms)), norm)

    return optim.Transform(lambda params: WithNorms(torch.zeros(()), torch.zeros(())), update)


WRAPPED: dict[str, Callable[[], optim.Transform]] = {
    "alone": keeping_norms,
    "first in a chain": lambda: optim.chain(keeping_norms(), optim.scale(1.0)),
    "last in a chain": lambda: optim.chain(optim.scale(1.0), keeping_norms()),
    "with_hyperparams": lambda: optim.with_hyperparams(
        lambda rate: optim.chain(keeping_norms(), optim.scale(rate)), rate=1.0
    ),
    "masked": lambda: optim.masked(keeping_norms(), lambda path, leaf: True),
    "whole_leaves": lambda: optim.whole_leaves(keeping_norms()),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_step_asks_for_exact_norms_by_name(name):
    """`exact_norms` reaches nested transformations: otherwise clipping would give other bits on another number of
    ranks."""

    def run(mesh: Any, reduction: str) -> Any:
        state = started(mesh, WRAPPED[name]())
        state, _ = fshard.train_step(loss, WRAPPED[name](), reduction=reduction)(state, rows_of(0, mesh))
        (seen,) = tree.nodes(state.opt_state, WithNorms)
        return seen.asked.item(), seen.norm

    for reduction in ("tree", "exact"):
        found = [seen for num in (1, 4) for seen in simulated(run, reduction, shard=num)]
        assert {asked for asked, _ in found} == {float(reduction == "tree")}
    (_, alone), *others = [seen for num in (1, 4) for seen in simulated(run, "tree", shard=num)]
    if name != "whole_leaves":  # whose norm is of the leaves that one rank owns
        assert all(same_bits(norm, alone) for _, norm in others)


def test_another_order_gives_other_bits():
    """Sums in another order give other bits in this model: otherwise the tests of this file could not fail."""

    def run(mesh: Any) -> Any:
        tx = optim.sgd(0.1)
        state, step = started(mesh, tx), fshard.train_step(loss, tx, accumulate=8 // mesh.size("shard"))
        for number in range(2):
            state, _ = step(state, rows_of(number, mesh))
        return all_of(state)["params"]

    assert not same_bits(simulated(run, shard=1)[0], simulated(run, shard=4)[0])


def test_one_device_is_one_rank():
    """One device without a mesh has the bits of one rank: otherwise a run on a laptop would differ from one on a
    cluster."""
    alone, one = (simulated(lambda mesh, own=own: few(own and mesh, clip_norm=0.5), shard=1) for own in (None, True))
    assert same_bits(alone, one)


def test_it_is_right():
    """Gradients summed in a tree equal plain torch's on the whole batch: otherwise the reproducible result would be
    wrong."""

    def whole(p: Any, batch: dict[str, Tensor]) -> Any:
        return without_dropout(p, batch)

    def without_dropout(p: Any, batch: dict[str, Tensor]) -> fshard.Mean:
        out = torch.tanh(p["head"].T @ p["embed"][0].T[:, batch["tokens"].flatten()]).square().mean(0)
        return fshard.Mean((out * batch["weight"].flatten()).sum(), batch["weight"].sum())

    def run(mesh: Any) -> Any:
        step = fshard.train_step(whole, optim.sgd(0.5), reduction="tree")
        state, metrics = step(started(mesh, optim.sgd(0.5)), rows_of(0, mesh))
        return fshard.gather_params(state.params), metrics

    start, batch = params(), rows_of(0, None)
    wanted = tree.map(lambda x: x.clone().requires_grad_(), start)
    mean = without_dropout(wanted, batch)
    value = mean.total / mean.count
    value.backward()
    for after, metrics in simulated(run, shard=4):
        torch.testing.assert_close(metrics["loss"], value.detach())
        for new, old in zip(tree.leaves(after), tree.leaves(wanted), strict=True):
            gradient = torch.zeros_like(old) if old.grad is None else old.grad
            torch.testing.assert_close(new, old.detach() - 0.5 * gradient)
        grads = [x.grad for x in tree.leaves(wanted) if x.grad is not None]
        torch.testing.assert_close(metrics["grad_norm"], fshard.optim.global_norm(grads))


def test_gradients_alone():
    """`value_and_grad(reduction="tree")` has the exact reduction's gradients on 3 ranks: otherwise gradients would
    be wrong."""

    def run(mesh: Any) -> Any:
        sharded = started(mesh, ADAMW).params
        batch = {k: v[mesh.get_rank() :] for k, v in rows_of(0, None).items()}
        grads = [fshard.value_and_grad(undropped, reduction=by)(sharded, batch)[1] for by in ("tree", "exact")]
        return [tree.leaves(fshard.gather_params(x)) for x in grads]

    def undropped(p: Any, batch: dict[str, Tensor]) -> Tensor:
        return (p["embed"][0][batch["tokens"]].tanh() * p["pos"]).sum()

    for ones, others in simulated(run, shard=3):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other)


def test_what_cannot_be():
    """Ranks, rows, wires or slices that a tree cannot have are errors; without them results would depend on the
    number of ranks."""
    for size, slices, rows in ((3, 8, 12), (4, 2, 16), (2, 8, 9)):

        def run(mesh: Any, slices: int = slices, rows: int = rows) -> None:
            batch = {k: v[: rows // mesh.size()] for k, v in rows_of(0, None).items()}
            by = fshard.reduction.TreeSums(slices)
            fshard.train_step(loss, ADAMW, reduction=by)(started(mesh, ADAMW), batch)

        if (size, rows) == (2, 9):  # four rows each: four slices
            simulated(run, shard=size)
            continue
        with pytest.raises(ValueError, match=rf"expected {size} rank\(s\), a power of two, to share"):
            simulated(run, shard=size)
    for wire in ({"grad_wire": fshard.wire.Cast(torch.bfloat16)}, {"param_wire": fshard.wire.Cast(torch.bfloat16)}):
        with pytest.raises(ValueError, match="with a wire"):
            simulated(partial(few, plan=wire), shard=2)

    def differ(mesh: Any) -> None:
        by = fshard.reduction.TreeSums(8 << mesh.get_rank())
        fshard.train_step(loss, ADAMW, reduction=by)(started(mesh, ADAMW), rows_of(0, mesh))

    with pytest.raises(fshard.MismatchError, match=r"slices=8.*slices=16"):
        simulated(differ, shard=2)
    with pytest.raises(ValueError, match="slices=6: expected a power of two"):
        fshard.reduction.TreeSums(slices=6)


# --- where rows lie ---

LENGTHS = range(1, 18)  # elements in a row


def lying(x: Tensor, offset: int, turned: bool = False) -> Tensor:
    """A tensor with these values that starts `offset` elements after a multiple of 64 bytes, its columns in a row."""
    memory = x.new_empty(x.numel() + 64)
    start = -memory.data_ptr() % 64 // x.itemsize + offset
    place = memory[start : start + x.numel()]
    return (place.view(x.T.shape).T if turned else place.view(x.shape)).copy_(x)


def products(p: Any, batch: Any) -> fshard.Mean:
    """Sums, inner products, and products of a matrix with a vector and with a matrix."""
    rows, total = len(batch["rows"][0]), torch.zeros((), dtype=p[0].dtype)
    for w, *given in zip(p, batch["rows"], batch["turned"], strict=True):  # (n, 3), two of (rows, n)
        for x in given:
            total = total + x.sum() * w[0, 0] + torch.dot(x[0], w[:, 1].contiguous())
            total = total + (x @ w[:, 0]).tanh().sum() + (x @ w).square().sum()
    return fshard.Mean(total, rows)


def from_anywhere(
    mesh: Any, tx: optim.Transform, dtype: torch.dtype, shift: int, lengths: Sequence[int] = LENGTHS, jit: bool = False
) -> Any:
    """The state and the metrics after a step; every rank's rows lie at another address."""
    weights = [rand(n, 3, seed=n).to(dtype) for n in lengths]
    state = fshard.init_state(fshard.shard_params(weights, fshard.make_plan(weights, mesh)), tx)
    step: Any = fshard.train_step(products, tx, reduction="tree")
    step = fshard.jit(step, backend="eager") if jit else step
    parts = [rand(64, n, seed=n).to(dtype).chunk(mesh.size())[mesh.get_rank()] for n in lengths]
    offset = (mesh.get_rank() + shift) % 4
    batch = {"rows": [lying(x, offset) for x in parts], "turned": [lying(x, offset, shift % 2 == 0) for x in parts]}
    state, metrics = step(state, batch)
    return all_of(state), metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_bits_depend_on_no_address(name, dtype):
    """Matrix products round otherwise where an operand starts at another address, and sums where it has other strides:
    a run on ranks that load their own rows would have other bits than one that cuts them out of a batch of all."""
    tx = {"sgd": optim.sgd(0.1), "adam": optim.adam(0.1)}[name]
    (expected,) = simulated(from_anywhere, tx, dtype, 0, shard=1)
    for num, shift in itertools.product((1, 2, 4, 8), (1, 2)):
        assert all(same_bits(rank, expected) for rank in simulated(from_anywhere, tx, dtype, shift, shard=num))


def test_ranks_have_as_many_threads(monkeypatch):
    """A rank with another number of threads would have other bits in the same slices."""
    ranks = threading.local()  # torch keeps one number for all simulated ranks
    monkeypatch.setattr(torch, "get_num_threads", lambda: getattr(ranks, "number", 0) + 1)

    def run(mesh: Any) -> Any:
        ranks.number = mesh.get_rank()
        return few(mesh, steps=1)

    with pytest.raises(MismatchError, match=r"threads=1 \(reduction='tree': as many .*threads=2 \("):
        simulated(run, shard=2)


def test_bits_of_a_graph_depend_on_no_address():
    """A graph would read the rows where they lie, as a step would that is not jitted."""
    (expected,) = simulated(from_anywhere, optim.sgd(0.1), torch.float32, 0, (13,), shard=1)
    found = simulated(from_anywhere, optim.sgd(0.1), torch.float32, 1, (13,), True, shard=2)
    assert all(same_bits(rank, expected) for rank in found)


# --- norms ---


def exact_norm(x: Any, p: float = 2) -> Tensor:
    """The norm whose bits depend on no order of elements."""
    return fshard.optim.global_norm(x, p, exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
def test_an_exact_norm(dtype, scale):
    """An exact norm depends on no order or cut and is near torch's: otherwise clipping would differ with the number
    of ranks."""
    x = (rand(70001, seed=1) ** 5 * scale).to(dtype)
    norm = exact_norm(x)
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64)
    torch.testing.assert_close(norm.double(), torch.linalg.vector_norm(wide).double(), rtol=1e-6, atol=0)
    if dtype is torch.float64:
        torch.testing.assert_close(norm, torch.linalg.vector_norm(x), rtol=1e-11, atol=0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    for cuts in (1, 2, 7, 64):
        assert same_bits(exact_norm({str(i): part for i, part in enumerate(x[order].chunk(cuts))}), norm)
    assert same_bits(leaf_norms({"a": x, "b": x[order]}, exact=True).to(norm.dtype), norm.repeat(2))


def test_an_ordinary_norm_depends_on_the_order():
    """An ordinary norm depends on the order of elements: otherwise the test of exact norms could not fail."""
    x = torch.linspace(0, 1, 70001)
    assert not same_bits(leaf_norms([x]), leaf_norms([x.flip(0)]))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3.5, math.inf])
@pytest.mark.parametrize("value", [4.0, math.inf, -math.inf, math.nan])
def test_norms_are_torchs(value: float, p: float, exact: bool) -> None:
    """A norm of any power, of finite and other elements, cut over ranks or not, would not be that of torch."""
    x = torch.tensor([1.0, -2.0, value, 0.5, -3.0])
    expected = torch.linalg.vector_norm(x, p)

    def norms(mesh: Any) -> list[torch.Tensor]:
        shards = fshard.shard_params({"x": x}, fshard.make_plan({"x": x}, mesh))
        return [fshard.optim.global_norm(shards, p, exact=exact), leaf_norms(shards, p, exact=exact)[0].float()]

    for norm in (*norms(None), *(norm for found in simulated(norms, shard=2) for norm in found)):
        torch.testing.assert_close(norm, expected, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(value):
    """An exact norm of inf or NaN is not finite: otherwise an overflow would be clipped into a wrong update."""
    x = torch.ones(5)
    x[3] = value
    assert not exact_norm(x).isfinite()
    assert exact_norm([]) == 0
    assert 0 <= exact_norm(torch.tensor(5e-324, dtype=torch.float64)) <= 5e-324  # its power may underflow
