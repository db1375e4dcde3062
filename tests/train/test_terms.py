"""Losses that add: sums of `Mean` and `Sum` times scalars, each divided by its own count."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.models import same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import Mean, Sum, optim
from fshard.comm import primitives
from fshard.core import tree
from fshard.core.losses import is_loss
from fshard.testing import oracle, whole_state
from fshard.testing.replaying import _loss_gradients

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero2": {"params_over": ()},
    "zero1": {"params_over": (), "grads_over": ()},
}
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (optim.sgd(0.1, momentum=0.9), lambda leaves: torch.optim.SGD(leaves, 0.1, momentum=0.9)),
    "adamw": (
        optim.adamw(0.1, weight_decay=0.01, b1=0.9, b2=0.999, eps=1e-3),
        lambda leaves: torch.optim.AdamW(leaves, 0.1, weight_decay=0.01, eps=1e-3),
    ),
}

Spec = Sequence[tuple[str, str, str]]  # of each term the total, the count and the scalar, by name


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Two units of odd sizes."""
    return {"w": torch.linspace(-1, 1, 5, dtype=dtype), "gate": torch.linspace(0.1, 2, 3, dtype=dtype)}


def batch_of(rank: int, num_ranks: int, rows: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Different data, and a different number of rows, on every rank; all but the last rank's are padding."""
    rows = rows or 2 + rank
    x = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank), dtype=dtype)
    return {"x": x, "mask": torch.full((rows,), float(rank == num_ranks - 1), dtype=dtype)}


def gates(p: Any, batch: Any) -> Tensor:
    """The rows' weights, which are trained: (rows,)."""
    return (batch["x"][:, :3] @ p["gate"]).sigmoid()


TOTALS: dict[str, Callable[[Any, Any], Tensor]] = {
    "squares": lambda p, batch: (batch["x"] @ p["w"]).square().sum(),
    "masked": lambda p, batch: (batch["mask"] * (batch["x"] @ p["w"] - 1).square()).sum(),
    "gates": lambda p, batch: (gates(p, batch) * (batch["x"] @ p["w"])).sum(),
    "penalty": lambda p, batch: p["gate"].square().sum(),
    "constant": lambda p, batch: batch["x"].sum(),
}
COUNTS: dict[str, Callable[[Any, Any], Any]] = {
    "rows": lambda p, batch: len(batch["x"]),
    "mask": lambda p, batch: batch["mask"].sum(),  # 0 on all ranks but one
    "whole": lambda p, batch: batch["mask"].long().sum(),
    "one": lambda p, batch: 1,
    "gates": lambda p, batch: gates(p, batch).sum(),
}
SCALARS: dict[str, Callable[[Any, Any], Any]] = {  # of a loss, and of a plain total
    "1": lambda p, x: x,
    "left": lambda p, x: 0.1 * x,
    "right": lambda p, x: x * -2,
    "over": lambda p, x: x / 3,
    "minus": lambda p, x: -x,
    "tensor": lambda p, x: torch.tensor(0.5, dtype=torch.float64) * x,
    "trained": lambda p, x: x * p["gate"].square().sum(),
}


def loss_of(spec: Spec) -> Callable[[Any, Any], Any]:
    """The loss that adds these terms."""

    def term(p: Any, batch: Any, total: str, count: str, scalar: str) -> Any:
        x = TOTALS[total](p, batch)
        return SCALARS[scalar](p, Mean(x, COUNTS[count](p, batch)) if count else Sum(x))

    return lambda p, batch: sum(term(p, batch, *names) for names in spec)


def formula(spec: Spec, p: Any, batches: Sequence[Any]) -> Tensor:
    """The sum over terms of all ranks' totals over all ranks' counts."""
    value = torch.zeros((), dtype=torch.float64)
    for total, count, scalar in spec:
        totals = [SCALARS[scalar](p, TOTALS[total](p, batch)) for batch in batches]
        value = value + sum(totals) / (sum(COUNTS[count](p, batch) for batch in batches) if count else 1)
    return value


def plainly(spec: Spec, batches: Sequence[Any], optimizer: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps of torch's optimizer, unsharded: the losses, and the parameters after them."""
    whole, losses = {path: x.requires_grad_() for path, x in parameters().items()}, []
    stepper = OPTIMIZERS[optimizer][1]([*whole.values()])
    for _ in range(2):
        value = formula(spec, whole, batches)
        grads = torch.autograd.grad(value, [*whole.values()], allow_unused=True, materialize_grads=True)
        for x, grad in zip(whole.values(), grads, strict=True):
            x.grad = grad
        stepper.step()
        losses.append(value.detach())
    return losses, {path: x.detach() for path, x in whole.items()}


def steps(mesh: Any, spec: Spec, optimizer: str, strategy: str, jitted: bool, rows: int = 0, how: Any = None) -> Any:
    """Two steps: the losses, the value without a gradient, and the parameters."""
    tx, loss, whole = OPTIMIZERS[optimizer][0], loss_of(spec), parameters()
    step: Any = fshard.train_step(loss, tx, **how or {})
    step = fshard.jit(step, backend="eager") if jitted else step
    plan = fshard.make_plan(whole, mesh, units=["gate"], **STRATEGIES[strategy] if mesh else {})
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    batch = batch_of(*(mesh.get_rank(), mesh.size()) if mesh else (0, 1), rows)
    losses = [fshard.evaluate(loss)(state.params, batch), fshard.value_and_grad(loss)(state.params, batch)[0]]
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return losses, dict(fshard.gather_params(state.params))


def check(spec: Spec, optimizer: str, strategy: str, jitted: bool, num_ranks: int, rows: int = 0, **how: Any) -> None:
    """The steps of all ranks are those of one process with all data."""
    (first, second), want = plainly(
        spec, [batch_of(rank, max(num_ranks, 1), rows) for rank in range(max(num_ranks, 1))], optimizer
    )
    args = (spec, optimizer, strategy, jitted, rows, how)
    for losses, params in simulated(steps, *args, shard=num_ranks) if num_ranks else [steps(None, *args)]:
        torch.testing.assert_close(losses, [first, first, first, second], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(params, want, rtol=1e-10, atol=1e-10)


def specs(most: int = 4) -> st.SearchStrategy[Spec]:
    """Sums of 1 to 4 terms, of which one at least depends on parameters."""
    trained = st.sampled_from([name for name in TOTALS if name != "constant"])
    rest = st.sampled_from(["", *COUNTS]), st.sampled_from([*SCALARS])
    more = st.lists(st.tuples(st.sampled_from([*TOTALS]), *rest), max_size=most - 1)
    return st.builds(lambda first, others: [first, *others], st.tuples(trained, *rest), more)


@examples(60)
@given(
    specs(),
    st.sampled_from([*OPTIMIZERS]),
    st.sampled_from([*STRATEGIES]),
    st.sampled_from([False, False, False, True]),
    st.integers(0, 4),
)
def test_a_sum_of_losses_is_that_of_one_process(
    spec: Spec, optimizer: str, strategy: str, jitted: bool, num_ranks: int
) -> None:
    """A term would be divided by another's count, or a rank or a factor be left out."""
    check(spec, optimizer, strategy, jitted, num_ranks)


BY_PARTS: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "reduce_once": {"accumulate": 2, "reduce_once": True},
    "tree": {"reduction": "tree"},
    "both": {"accumulate": 2, "reduction": "tree"},
}
ONE: dict[str, Spec] = {
    "a Mean": [("masked", "mask", "left")],
    "Sums": [("squares", "", "left"), ("gates", "", "trained"), ("masked", "", "minus")],
}
SEVERAL: dict[str, Spec] = {
    "Means": [("squares", "rows", "1"), ("masked", "mask", "left")],
    "Mean and Sum": [("squares", "", "1"), ("squares", "rows", "left")],
}


@pytest.mark.parametrize("how", BY_PARTS)
@pytest.mark.parametrize("name", ONE)
def test_one_term_is_right_with_micro_batches(name: str, how: str) -> None:
    """A scaled loss would be refused, or be scaled once more."""
    for num_ranks in (0, 2):
        check(ONE[name], "sgd", "full", False, num_ranks, 4, **BY_PARTS[how])


def test_several_terms_of_the_only_slice() -> None:
    """The one slice of a row would be refused, or be divided by the count of a slice."""
    for num_ranks in (0, 1):
        check(MOST, "adamw", "full", False, num_ranks, 1, reduction="tree")


@pytest.mark.parametrize("how", BY_PARTS)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_terms_of_parts_are_an_error(name: str, how: str) -> None:
    """Gradients would be divided by counts of the first part, silently."""
    for num_ranks in (1, 2):
        with pytest.raises(ValueError, match=r"a sum with an fshard.Mean.* micro-batches.*fshard.Sum.*accumulate=1"):
            simulated(steps, SEVERAL[name], "sgd", "full", False, 4, BY_PARTS[how], shard=num_ranks)


MOST: Spec = [
    ("squares", "rows", "1"),
    ("masked", "mask", "left"),
    ("gates", "gates", "trained"),
    ("penalty", "", "over"),
]
HOWS: dict[str, dict[str, Any]] = {
    "eager": {},
    "donated": {"donate": True},
    "in_backward": {"donate": True, "in_backward": True, "clip_norm": 0.1},
    "clipped": {"clip_norm": 0.1},
    "compiled": {},
}


def with_aux(p: Any, batch: Any) -> Any:
    """A sum of four losses, beside sums of which one is no loss of its own."""
    aux = {"again": loss_of(MOST)(p, batch), "rows": Mean(len(batch["x"]) * torch.ones((), dtype=torch.int64), 1) / 2}
    return loss_of(MOST)(p, batch), aux


def scaled_steps(mesh: Any, how: str) -> Any:
    """Three steps with a loss scale where there may be one, and what they log."""
    tx, (rank, num_ranks) = optim.adamw(0.1), (mesh.get_rank(), mesh.size())
    step: Any = fshard.train_step(with_aux, tx, has_aux=True, **HOWS[how])
    step = torch.compile(step, fullgraph=True, backend="aot_eager") if how == "compiled" else step
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    state = fshard.init_state(sharded, tx, None if how == "in_backward" else fshard.StaticLossScale(8.0))
    logged = []
    for _ in range(3):
        state, metrics = step(state, batch_of(rank, num_ranks))
        logged.append(
            (
                metrics["loss"],
                metrics["grad_norm"],
                metrics["found_inf"],
                metrics["aux"]["again"],
                metrics["aux"]["rows"],
            )
        )
    return logged, whole_state(state).params


def check_oracle(of_ranks: Any, how: str) -> None:
    """The states and what is logged are the oracle's."""
    clip = {k: v for k, v in HOWS[how].items() if k == "clip_norm"}
    init, step = oracle(with_aux, optim.adamw(0.1), has_aux=True, **clip)
    state, wanted = init(parameters(), None if how == "in_backward" else fshard.StaticLossScale(8.0)), []
    for _ in range(3):
        state, metrics = step(state, [batch_of(rank, len(of_ranks)) for rank in range(len(of_ranks))])
        (aux, *_) = metrics["aux"]
        torch.testing.assert_close(aux["again"], metrics["loss"], rtol=1e-12, atol=0)
        wanted.append((metrics["loss"], metrics["grad_norm"], metrics["found_inf"], aux["again"], aux["rows"]))
    for logged, params in of_ranks:
        torch.testing.assert_close(logged, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(params), dict(state.params), rtol=1e-10, atol=1e-10)


@pytest.mark.law
@pytest.mark.parametrize("how", [how for how in HOWS if how != "compiled"])
def test_steps_equal_the_oracle(how: str) -> None:
    """A way to make a step, or an aux, would read another loss."""
    check_oracle(simulated(scaled_steps, how, shard=3), how)


def test_real_processes_and_torch_compile() -> None:
    """Dynamo would not trace the operators, or gloo sum other numbers."""
    check_oracle(gloo(scaled_steps, "compiled"), "compiled")


def test_the_oracle_knows_the_formula() -> None:
    """The oracle would share an error with the step; it can add micro-batches of several terms."""
    batches = [batch_of(rank, 2, 4) for rank in range(2)]
    for accumulate in (1, 2):
        init, step = oracle(loss_of(MOST), optim.sgd(0.1, momentum=0.9), accumulate=accumulate)
        state, losses = init(parameters()), []
        spec = [x for x in MOST if x[2] != "over"] + [("penalty", "", "over")] * accumulate  # once for each part
        for _ in range(2):
            state, metrics = step(state, batches)
            losses.append(metrics["loss"])
        torch.testing.assert_close((losses, dict(state.params)), plainly(spec, batches, "sgd"), rtol=1e-10, atol=1e-10)


def bits(mesh: Any) -> Any:
    """The value and gradients of a Mean alone, and of sums that are the same number."""
    whole, batch = parameters(torch.float32), batch_of(mesh.get_rank(), mesh.size(), dtype=torch.float32)
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["gate"]))
    mean = loss_of([("gates", "rows", "1")])
    others: list[Callable[[Any, Any], Any]] = [
        mean,
        lambda p, b: sum([mean(p, b)]),
        lambda p, b: mean(p, b) - 0,
        lambda p, b: 1 * mean(p, b) / 1,
        lambda p, b: mean(p, b) + 0 * Mean(p["w"].square().sum(), 3),
        lambda p, b: mean(p, b) - 0 * Sum(p["gate"].square().sum()),
    ]
    returned = [fshard.value_and_grad(loss)(params, batch) for loss in others]
    return [(value, fshard.gather_params(grads)) for value, grads in returned]


def test_nothing_added_is_the_same_bits() -> None:
    """A sum would be rounded otherwise than its only term."""
    for first, *others in simulated(bits, shard=3):
        assert all(same_bits(first, other) for other in others)


def test_a_term_that_nothing_counts() -> None:
    """Parameters would be NaN, or the term be left out: its value is 0 / 0, and a loss scaler skips the update."""

    def loss(p: Any, batch: Any) -> Any:
        return Mean(p["w"].square().sum(), 2) + Mean(0 * batch["x"].sum(), torch.tensor(0))

    tx = optim.sgd(0.1)
    params = fshard.shard_params(parameters(), fshard.make_plan(parameters()))
    state, metrics = fshard.train_step(loss, tx)(
        fshard.init_state(params, tx, fshard.StaticLossScale(1.0)), batch_of(0, 1)
    )
    assert metrics["loss"].isnan()
    assert metrics["found_inf"] == 1
    assert same_bits(dict(fshard.gather_params(state.params)), parameters())


def product(mesh: Any) -> Any:
    """The Hessian of three terms times the parameters."""
    params = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    loss = loss_of([*MOST[:2], ("gates", "", "trained"), ("constant", "whole", "1")])
    return dict(fshard.gather_params(fshard.hvp(loss)(params, params, batch_of(mesh.get_rank(), mesh.size()))))


def test_hessians_of_sums() -> None:
    """A term's derivative would be divided by another's count."""
    spec, batches = (
        [*MOST[:2], ("gates", "", "trained"), ("constant", "whole", "1")],
        [batch_of(r, 3) for r in range(3)],
    )
    grad = torch.func.grad(lambda p: formula(spec, p, batches))
    _, want = torch.func.jvp(grad, (parameters(),), (parameters(),))
    for product_of_rank in simulated(product, shard=3):
        torch.testing.assert_close(product_of_rank, want, rtol=1e-12, atol=1e-12)
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters()))
    with pytest.raises(ValueError, match=r"hvp: the count of the loss's fshard.Mean depends on parameters"):
        fshard.hvp(loss_of(MOST))(sharded, sharded, batch_of(0, 1))


def inner(p: Any, batch: Any) -> Any:
    """Terms with derivatives of torch.func inside."""
    slope = torch.func.grad(lambda x: (x @ p["w"]).sin().sum())(batch["x"])
    return Mean(slope.square().sum(), len(slope)) + 0.5 * Mean(slope[:, 0].sum(), batch["mask"].sum())


def slopes(mesh: Any) -> Any:
    """The value and gradient of such a loss."""
    params = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    value, grads = fshard.value_and_grad(inner)(params, batch_of(mesh.get_rank(), mesh.size()))
    return value, dict(fshard.gather_params(grads))


def test_derivatives_inside_of_terms() -> None:
    """Terms would not come out of a transform."""
    whole = {path: x.requires_grad_() for path, x in parameters().items()}
    rows = [[x.total for x in inner(whole, batch_of(rank, 2)).terms] for rank in range(2)]
    value = sum(row[0] for row in rows) / 5 + sum(row[1] for row in rows) / 3
    grads = torch.autograd.grad(value, [*whole.values()], allow_unused=True, materialize_grads=True)
    for got in simulated(slopes, shard=2):
        torch.testing.assert_close(got, (value.detach(), dict(zip(whole, grads, strict=True))), rtol=1e-12, atol=1e-12)


def unlike(mesh: Any, more: bool) -> None:
    """Another class of the second term, or a third term, on rank 1."""
    params, odd = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh)), mesh.get_rank() == 1

    def loss(p: Any) -> Any:
        total = p["w"].square().sum()
        first = Mean(total, 2) + Mean(total, 3)
        return (first + Sum(total) if more else Mean(total, 2) + Sum(total)) if odd else first

    fshard.value_and_grad(loss)(params)


@pytest.mark.parametrize("more", [False, True])
def test_ranks_with_other_terms(more: bool) -> None:
    """Totals would be added to counts."""
    with pytest.raises(fshard.MismatchError, match=r"loss=Terms of .*Mean.*Sum"):
        simulated(unlike, more, shard=2)


def test_ranks_with_other_terms_that_compare_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between processes that do not check, a Sum would be divided by counts."""
    start = primitives.start_total
    monkeypatch.setattr(primitives, "start_total", lambda *args, more="", **how: start(*args, **how))
    with pytest.raises(RuntimeError, match="or losses of other classes or dtypes"):
        simulated(unlike, False, shard=2)


def test_a_replay_takes_the_gradients_of_all_terms() -> None:
    """The first value that is not finite would be looked for in one term's gradients."""
    tx = optim.sgd(0.1)
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters()))
    state = fshard.init_state(sharded, tx, fshard.StaticLossScale(8.0))
    got = _loss_gradients(loss_of(MOST), state, [batch_of(0, 1)])
    _, want = fshard.value_and_grad(loss_of(MOST))(sharded, batch_of(0, 1))
    tree.map(lambda a, b: torch.testing.assert_close(a, 8 * b), got, want)


def test_losses_are_values() -> None:
    """Equal losses would differ, or a tree lose a term."""
    a, b, c = Mean(torch.tensor(3.0), 2), Mean(torch.tensor(1.0), torch.tensor(4)), Sum(torch.tensor(2.0))
    assert a + b + c == a + (b + c) == sum([a, b, c])
    assert hash(a + b) == hash(a + b)
    assert a + b != b + a
    assert c + c == 2 * c == Sum(torch.tensor(4.0))
    assert repr(a + c) == f"Terms(terms=({a!r}, {c!r}))"
    flat, spec = tree.flatten({"loss": a + b})
    assert tree.leaf_paths(spec) == ["loss.0.total", "loss.0.count", "loss.1.total", "loss.1.count"]
    assert tree.unflatten(spec, flat)["loss"] == a + b
    assert is_loss(tree.map(lambda x: x, a + b))


@pytest.mark.parametrize("add", [1.0, torch.tensor(1.0), None, "a"])
def test_what_does_not_say_how_it_counts_is_no_term(add: Any) -> None:
    """A number would be added once for each rank, or not at all."""
    mean = Mean(torch.tensor(3.0), 2)
    for wrong in (lambda: mean + add, lambda: add + mean, lambda: mean + mean + add):
        with pytest.raises(TypeError, match=r"unsupported operand|can only concatenate"):
            wrong()


@pytest.mark.parametrize("factor", [torch.ones(2), Mean(torch.tensor(3.0), 2)])
def test_factors_are_scalars(factor: Any) -> None:
    """A product would be summed over the elements, silently."""
    params = fshard.shard_params(parameters(), fshard.make_plan(parameters()))
    with pytest.raises(ValueError, match=r"the loss function: expected a 0-d floating tensor .*, got"):
        fshard.value_and_grad(lambda p: factor * Mean(p["w"].sum(), 2) + Sum(p["w"].sum()))(params)
