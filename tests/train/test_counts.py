"""Totals and counts: those that depend on parameters, those in an aux, negative ones, and the dtype of a mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.worlds import gloo, simulated
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import tree
from fshard.comm import primitives
from fshard.sharding.sharded import empty_params
from fshard.testing import oracle

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero2": {"params_over": ()},
}


def parameters() -> dict[str, torch.Tensor]:
    """Two units of odd sizes."""
    return {"w": torch.linspace(-1, 1, 5, dtype=torch.float64), "gate": torch.linspace(0, 2, 3, dtype=torch.float64)}


def batch_of(rank: int) -> torch.Tensor:
    """Different data, and a different number of rows, on every rank."""
    return torch.randn(2 + rank, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def weighted(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Rows weighted by a trained gate, over the sum of the weights."""
    weights = (x[:, :3] @ p["gate"]).sigmoid()
    return fshard.Mean((weights * (x @ p["w"]).square()).sum(), weights.sum())


def count_alone(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Only the count depends on parameters."""
    return fshard.Mean(x.square().sum(), (x[:, :3] @ p["gate"]).sigmoid().sum().float())


LOSSES = {"weighted": weighted, "count alone": count_alone}


def plainly(loss: Callable[..., fshard.Mean], num_ranks: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All ranks' totals over all ranks' counts, differentiated by autograd."""
    whole = {path: x.requires_grad_() for path, x in parameters().items()}
    outs = [loss(whole, batch_of(rank)) for rank in range(num_ranks)]
    value = sum(out.total for out in outs) / sum(out.count for out in outs)
    grads = torch.autograd.grad(value, list(whole.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(whole, grads, strict=True))


def gradients(mesh: Any, name: str) -> dict[str, Any]:
    """The value and gradients under every strategy, reduced at once and later."""
    found, rank = {}, 0 if mesh is None else mesh.get_rank()
    for key, strategy in STRATEGIES.items():
        plan = fshard.make_plan(parameters(), mesh, units=["gate"], **strategy)
        sharded = fshard.shard_params(parameters(), plan)
        value, grads = fshard.value_and_grad(LOSSES[name])(sharded, batch_of(rank))
        _, own = fshard.value_and_grad(LOSSES[name], reduce=False)(sharded, batch_of(rank))
        found[key] = (value, fshard.gather_params(grads))
        found[key, "later"] = (value, fshard.gather_params(fshard.reduce_grads(own)))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_count_is_differentiated(name: str) -> None:
    """A `Mean` whose count depends on parameters would have a wrong gradient."""
    tolerance = 1e-12 if name == "weighted" else 1e-6
    for shard in (0, 1, 2, 3):
        value, expected = plainly(LOSSES[name], max(shard, 1))
        for found in simulated(gradients, name, shard=shard) if shard else [gradients(None, name)]:
            for key, (loss, grads) in found.items():
                torch.testing.assert_close(loss, value, rtol=tolerance, atol=0, msg=str(key))
                assert grads.keys() == expected.keys(), key
                for path, grad in grads.items():
                    torch.testing.assert_close(grad, expected[path], rtol=tolerance, atol=tolerance, msg=str(key))


def steps(mesh: Any, jitted: bool, **more: Any) -> Any:
    """Parameters after two steps with a loss scale."""
    tx = fshard.optim.sgd(0.1)
    step: Any = fshard.train_step(weighted, tx, **more)
    step = fshard.jit(step, backend="eager") if jitted else step
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    state = fshard.init_state(sharded, tx, fshard.StaticLossScale(8.0))
    for _ in range(2):
        state, metrics = step(state, batch_of(0 if mesh is None else mesh.get_rank()))
    return metrics["loss"], fshard.gather_params(state.params)


@pytest.mark.law
@pytest.mark.parametrize("jitted", [False, True])
def test_steps_equal_the_oracle(jitted: bool) -> None:
    """A scaled or compiled step would lose that derivative."""
    init, step = oracle(weighted, fshard.optim.sgd(0.1))
    state = init(parameters(), fshard.StaticLossScale(8.0))
    for _ in range(2):
        state, metrics = step(state, [batch_of(rank) for rank in range(2)])
    for loss, params in simulated(steps, jitted, shard=2):
        torch.testing.assert_close(loss, metrics["loss"], rtol=1e-12, atol=0)
        for a, b in zip(tree.leaves(params), tree.leaves(state.params), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more", [{"accumulate": 2}, {"accumulate": 2, "reduce_once": True}, {"reduction": "tree"}])
def test_a_count_of_parts_is_an_error(more: dict[str, Any]) -> None:
    """With micro-batches the gradient of such a count would be silently wrong."""
    with pytest.raises(ValueError, match=r"count of its fshard.Mean depends on parameters.* Detach the count"):
        steps(None, jitted=False, **more)


HOWS: dict[str, dict[str, Any]] = {
    "eager": {},
    "jitted": {},
    "accumulated": {"accumulate": 2},
    "reduced once": {"accumulate": 2, "reduce_once": True},
    "tree": {"accumulate": 2, "reduction": "tree"},
    "in the backward": {"donate": True, "in_backward": True, "clip_norm": 1.0},
}


def rows_of(rank: int, rows: int) -> torch.Tensor:
    """Different data on every rank."""
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def with_averages(p: Any, x: torch.Tensor) -> Any:
    """A loss beside means of floats and of integers, sums, and what stays this rank's."""
    right = x > 0
    aux = {
        "right": fshard.Mean(right[:, 0].sum(), len(x)),
        "most": (fshard.Mean((x[:, 1] * right[:, 0]).sum(), right[:, 0].sum()), fshard.Sum(right.sum())),
        "half": fshard.Sum(x.sum().bfloat16()),
        "own": x.shape[0],
    }
    aux = dict(reversed(aux.items())) if len(x) % 2 else aux  # the same tree, on some ranks in another order
    return fshard.Mean((x @ p["w"]).square().sum() * p["gate"].sum(), len(x)), aux


def rows(how: str, rank: int) -> int:
    """As many on each rank only where they must be."""
    return 4 if how == "tree" else 4 + rank


def averaged(mesh: Any, how: str) -> Any:
    """The aux of two steps, and of the functions without a step."""
    tx, rank = fshard.optim.sgd(0.1), mesh.get_rank()
    step: Any = fshard.train_step(with_averages, tx, has_aux=True, **HOWS[how])
    step = fshard.jit(step, backend="eager") if how == "jitted" else step
    sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
    x = rows_of(rank, rows(how, rank))
    found = [fshard.value_and_grad(with_averages, has_aux=True)(sharded, x)[0][1]]
    found.append(fshard.evaluate(with_averages, has_aux=True)(sharded, x)[1])
    state = fshard.init_state(sharded, tx)
    for _ in range(2):
        state, metrics = step(state, x)
        aux = metrics["aux"]
        found += aux if isinstance(aux, list) else [aux]
    return found


def check_averaged(of_ranks: Any, how: str) -> None:
    """Each rank has what all data say, whatever rank and micro-batch they were on."""
    x = torch.cat([rows_of(rank, rows(how, rank)) for rank in range(len(of_ranks))])
    right = x > 0
    most = (x[:, 1] * right[:, 0]).sum() / right[:, 0].sum(), right.sum().double()
    parts = [rows_of(rank, rows(how, rank)) for rank in range(len(of_ranks))]
    for rank, found in enumerate(of_ranks):
        for aux in found:
            torch.testing.assert_close((aux["right"], aux["most"]), (right[:, 0].double().mean(), most))
            assert aux["half"].dtype == torch.float32
            torch.testing.assert_close(aux["half"].double(), x.sum(), rtol=0.05, atol=0.05)
        assert {aux["own"] for aux in found} <= {len(parts[rank]), *range(1, 4)}


@pytest.mark.parametrize("how", HOWS)
def test_means_and_sums_in_an_aux_are_over_all_ranks(how: str) -> None:
    """An accuracy would be one rank's, or a mean of means."""
    check_averaged(simulated(averaged, how, shard=2), how)


def test_means_in_an_aux_in_processes() -> None:
    """The same over gloo."""
    check_averaged(gloo(averaged, "accumulated", shard=2), "accumulated")


def kinds_of_calls(mesh: Any) -> list[str]:
    """The collectives of a step with averages in its aux, and without."""
    found = []
    for loss, has_aux in ((with_averages, True), (lambda p, x: with_averages(p, x)[0], False)):
        step = fshard.train_step(loss, fshard.optim.sgd(0.1), has_aux=has_aux)
        sharded = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh, units=["gate"]))
        state = fshard.init_state(sharded, fshard.optim.sgd(0.1))
        lowered = fshard.jit(step).lower(state, rows_of(mesh.get_rank(), 4))
        found.append([row.kind for row in lowered.collectives()])
    return found


def test_averages_take_no_collective_of_their_own() -> None:
    """Every average would cost a message more."""
    for with_them, without in simulated(kinds_of_calls, shard=2):
        assert with_them == without


@pytest.mark.parametrize(
    ("aux", "words"),
    [
        ({"a": fshard.Mean(torch.ones(2), 1)}, r"aux leaf 'a': the total of a Mean or Sum: expected a real 0-d"),
        ({"a": [fshard.Mean(torch.ones(()), -1)]}, r"aux leaf 'a.0': the count of a Mean: .* not negative, got -1"),
    ],
)
def test_what_is_no_average(aux: Any, words: str) -> None:
    """A wrong average would fail deep in a collective, or be summed silently."""
    with pytest.raises(ValueError, match=words):
        fshard.value_and_grad(lambda p: (p["w"].sum(), aux), has_aux=True)(fshard.shard_params(parameters(), PLAN))


@pytest.mark.parametrize(
    "given",
    [
        [[fshard.Sum(torch.ones(()))], [fshard.Sum(torch.ones(()))] * 2],
        [{"a": fshard.Sum(torch.ones(()))}, {"b": fshard.Sum(torch.ones(()))}],
        [{"a": fshard.Sum(torch.ones(()))}, {"a": fshard.Mean(torch.ones(()), 1)}],
    ],
)
def test_micro_batches_with_other_averages(given: Any) -> None:
    """The averages of one micro-batch would be added to others of the next."""
    calls: list[int] = []

    def loss(p: Any, x: torch.Tensor) -> Any:
        calls.append(len(x))
        return (x @ p["w"]).sum(), given[len(calls) - 1]

    step = fshard.train_step(loss, fshard.optim.sgd(0.1), has_aux=True, accumulate=2)
    with pytest.raises(ValueError, match="aux must have the same Means and Sums in every micro-batch, got"):
        step(fshard.init_state(fshard.shard_params(parameters(), PLAN), fshard.optim.sgd(0.1)), rows_of(0, 4))


PLAN = fshard.make_plan(parameters())


@pytest.mark.parametrize("how", ["eager", "jitted", "accumulated", "tree"])
def test_a_negative_count_does_not_train_uphill(how: str) -> None:
    """A count of the wrong sign, or one of several, would turn the gradient around."""

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        return fshard.Mean((x @ p["w"]).sum() + p["gate"].sum(), torch.where(x[0, 0] == x[0, 0], -1, 1) * len(x))

    def of_number(p: Any, x: torch.Tensor) -> fshard.Mean:
        return fshard.Mean((x @ p["w"]).sum(), -4)

    tx = fshard.optim.sgd(0.1)
    step: Any = fshard.train_step(loss, tx, **HOWS[how])
    step = fshard.jit(step, backend="eager") if how == "jitted" else step
    state = fshard.init_state(fshard.shard_params(parameters(), PLAN), tx, fshard.StaticLossScale(1.0))
    new, metrics = step(state, rows_of(0, 4))
    assert metrics["loss"].isnan()
    assert metrics["found_inf"] == 1
    torch.testing.assert_close(fshard.gather_params(new.params), parameters(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"expected a number that is not negative, got -4: training would go uphill"):
        fshard.evaluate(of_number)(state.params, rows_of(0, 4))


def half_loss(p: Any, x: torch.Tensor) -> fshard.Mean:
    """A total in the dtype of computation: 257 is none in bfloat16, and 1e5 none in float16."""
    return fshard.Mean(p["w"].float().sum() * (257 * 512) + 0 * x.sum(), torch.tensor(257.0))


@pytest.mark.parametrize("make", ["step", "value_and_grad", "evaluate"])
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("compute=bf16", torch.float32), ("compute=f16,output=f16", torch.float16), ("output=bf16", torch.bfloat16)],
)
def test_a_policy_rounds_no_total(make: str, policy: str, dtype: torch.dtype) -> None:
    """A loss would be rounded, or overflow, before it is divided, and be logged with three digits."""
    whole, x = {"w": torch.ones(1)}, torch.ones(1)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, policy=policy))
    tx = fshard.optim.sgd(0.0)
    loss = {
        "step": lambda: fshard.train_step(half_loss, tx)(fshard.init_state(sharded, tx), x)[1]["loss"],
        "value_and_grad": lambda: fshard.value_and_grad(half_loss)(sharded, x)[0],
        "evaluate": lambda: fshard.evaluate(half_loss)(sharded, x),
    }[make]()
    assert (loss.dtype, loss) == (dtype, 512)


def test_a_loss_in_half_precision_is_averaged_in_float32() -> None:
    """The mean of ranks' losses would be rounded to bfloat16 once more."""

    def one_rank(mesh: Any) -> torch.Tensor:
        whole = {"w": torch.ones(1, dtype=torch.bfloat16)}
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
        return fshard.evaluate(lambda p, x: (p["w"] * x).sum())(sharded, x_of[mesh.get_rank()])

    x_of = [torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([258.0], dtype=torch.bfloat16)]
    for loss in fshard.testing.simulate(one_rank, shard=2):
        assert (loss.dtype, loss.item()) == (torch.float32, 257.0)


# What rank 1 returns where rank 0 returns a Mean of float64, and an aux of one.
UNLIKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "loss": lambda total: (fshard.Mean(total.float(), 3), fshard.Mean(total, 3)),
    "class": lambda total: (fshard.Sum(total), fshard.Mean(total, 3)),
    "scalar": lambda total: (total, fshard.Mean(total, 3)),
    "aux": lambda total: (fshard.Mean(total, 3), fshard.Mean(total.float(), 3)),
}
CALLS: dict[str, Any] = {
    "step": {},
    "accumulate": {"accumulate": 2},
    "tree": {"reduction": "tree"},
    "in_backward": {"donate": True, "in_backward": True},
    "value_and_grad": fshard.value_and_grad,
    "evaluate": fshard.evaluate,
}


def unlike(mesh: Any, what: str, call: str) -> None:
    """A call whose loss returns something else on rank 1."""
    odd = mesh.get_rank() == 1
    tx = fshard.optim.sgd(0.0)

    def loss(p: Any, x: torch.Tensor) -> Any:
        total = (x @ p["w"]).square().sum() / 3
        return UNLIKE[what](total) if odd else (fshard.Mean(total, 3), fshard.Mean(total, 3))

    params = fshard.shard_params(parameters(), fshard.make_plan(parameters(), mesh))
    if isinstance(CALLS[call], dict):
        state = fshard.init_state(params, tx)
        fshard.train_step(loss, tx, has_aux=True, **CALLS[call])(state, batch_of(0))
    else:
        CALLS[call](loss, has_aux=True)(params, batch_of(0))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_whose_losses_have_another_dtype_or_class(what: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would log values that differ, or divide by another count: an error, also where they compare no texts."""
    with pytest.raises(fshard.MismatchError, match=r"float64.*(float32|Sum|a scalar)"):
        simulated(unlike, what, call, shard=2)
    for name in ("total", "start_total"):
        start = getattr(primitives, name)
        monkeypatch.setattr(primitives, name, lambda *args, more="", start=start, **how: start(*args, **how))
    with pytest.raises(RuntimeError, match="or losses of other classes or dtypes"):
        simulated(unlike, what, call, shard=2)


FEW_ROWS: dict[str, dict[str, Any]] = {
    "one": {},
    "accumulate": {"accumulate": 3},
    "reduce_once": {"accumulate": 2, "reduce_once": True},
    "in_backward": {"donate": True, "in_backward": True},
}


def with_few_rows(mesh: Any, kind: str, how: str) -> dict[str, Any]:
    """Parameters after a step in which rank 1 has no row, and rank 0 fewer than micro-batches."""
    loss: Any = {"Mean": row_mean, "Sum": lambda p, x: fshard.Sum(row_mean(p, x).total)}[kind]
    found, tx = {}, fshard.optim.sgd(0.1)
    for name, strategy in STRATEGIES.items():
        plan = fshard.make_plan(parameters(), mesh, units=["gate"], **strategy)
        state = fshard.init_state(fshard.shard_params(parameters(), plan), tx)
        state, metrics = fshard.train_step(loss, tx, **FEW_ROWS[how])(state, batch_of(0)[: 0 if mesh.get_rank() else 2])
        found[name] = metrics["loss"], fshard.gather_params(state.params)
    return found


def row_mean(p: Any, x: torch.Tensor) -> fshard.Mean:
    return fshard.Mean(((x[:, :3] @ p["gate"]).sigmoid() * (x @ p["w"]).square()).sum(), len(x))


@pytest.mark.parametrize("how", FEW_ROWS)
@pytest.mark.parametrize("kind", ["Mean", "Sum"])
def test_a_rank_may_have_no_rows(kind: str, how: str) -> None:
    """The step would refuse what DDP computes, or an empty batch would count."""
    whole = {path: x.requires_grad_() for path, x in parameters().items()}
    out = row_mean(whole, batch_of(0)[:2])
    value = out.total / (2 if kind == "Mean" else 1)
    grads = torch.autograd.grad(value, [*whole.values()])
    want = {path: (x - 0.1 * g).detach() for (path, x), g in zip(whole.items(), grads, strict=True)}
    for found in simulated(with_few_rows, kind, how, shard=2):
        for loss, params in found.values():
            torch.testing.assert_close((loss, dict(params)), (value.detach(), want))


class Copies(TorchDispatchMode):
    """Collects copies from the host to a device, and whether the host waits for each."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_cpu and not out.is_cpu:
            self.waits.append(not (kwargs or {}).get("non_blocking"))
        return out


def test_the_host_does_not_wait_for_a_count_that_it_has() -> None:
    """A GPU would begin each step with an empty queue. The meta device stands for it."""
    plan, tx = fshard.make_plan({"w": torch.ones(4)}), fshard.optim.sgd(0.1)
    state = fshard.init_state(empty_params(plan, torch.device("meta")), tx)
    step = fshard.train_step(lambda p, x: fshard.Mean((p["w"] * x).sum(), torch.tensor(4, device="cpu")), tx)
    with Copies() as copies:
        step(state, torch.ones(4, device="meta"))
    assert copies.waits == [False]
