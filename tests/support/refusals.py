"""The words of errors about writes in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import tree


def parameters() -> dict[str, Any]:
    """A unit with buffers between two leaves of the root; equal on all ranks."""
    norm = {"weight": torch.ones(4), "mean": torch.zeros(4), "var": torch.ones(4), "count": torch.tensor(0)}
    return {"first": torch.linspace(0, 1, 12).view(3, 4), "norm": norm, "last": torch.linspace(1, 2, 4)}


FROZEN = ["norm.mean", "norm.var", "norm.count"]

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "together": {"together": True},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "computed in bfloat16": {"policy": fshard.Policy(compute=torch.bfloat16)},
}


def _batch_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    n = p["norm"]
    return F.batch_norm(x, n["mean"], n["var"], n["weight"], training=True)


def _torchs_batch_norm(p: Any, x: torch.Tensor) -> torch.Tensor:
    n = p["norm"]
    return torch.batch_norm(x, n["weight"], None, n["mean"], n["var"], True, 0.1, 1e-5, False)


def _variance(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, running_mean=x.new_zeros(4), running_var=p["norm"]["var"], training=True)


def _module(p: Any, x: torch.Tensor) -> torch.Tensor:
    n, module = p["norm"], torch.nn.BatchNorm1d(4, affine=False)
    held = {"running_mean": n["mean"], "running_var": n["var"], "num_batches_tracked": n["count"]}
    return torch.func.functional_call(module, held, (x,)) * n["weight"]


def _in_no_grad(p: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p["norm"]["mean"].mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x - p["norm"]["mean"]


def _with_gradients(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["mean"].lerp_(x.mean(0), 0.1)
    return x


def _through_a_view(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["mean"][1:].view(1, 3).zero_()
    return x


def _counts(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["count"].add_(1)
    return x


def _trainable(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * p["norm"]["weight"]
    with torch.no_grad():
        p["norm"]["weight"].clamp_(max=0.5)
    return y


def _as_a_result(p: Any, x: torch.Tensor) -> torch.Tensor:
    torch.mean(x.detach(), 0, out=p["norm"]["mean"])
    return x


def _torch_refuses(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x * p["norm"]["weight"].clamp_(max=0.5)


def _before_it_is_used(p: Any, x: torch.Tensor) -> torch.Tensor:
    weight = p["norm"]["weight"]
    with torch.no_grad():
        weight.clamp_(max=0.5)
    return x * weight


def _held(p: Any, x: torch.Tensor) -> torch.Tensor:
    mean, last = p["norm"]["mean"], p["last"]
    for i in range(2):  # other units are touched before it is written to
        x = x + p["first"][i] * last
    with torch.no_grad():
        mean.add_(1)
    return x


def _checkpointed(p: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: _batch_norm(p, y), x, use_reentrant=False)


def _through_data(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["mean"].data[1:] = 9.0
    return x


def _set_data(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["weight"].data = torch.full((4,), 9.0, dtype=x.dtype)
    return x * p["last"] * p["norm"]["weight"]


def _set_data_of_frozen(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["norm"]["mean"].data = x.detach().mean(0)
    return x * p["last"] - p["norm"]["mean"]


# a function that writes in place, and the leaf that the error names
WRITES: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "batch_norm": (_batch_norm, "norm.mean"),
    "torch.batch_norm": (_torchs_batch_norm, "norm.mean"),
    "batch_norm, of the variance alone": (_variance, "norm.var"),
    "BatchNorm1d": (_module, "norm.mean"),
    "under no_grad": (_in_no_grad, "norm.mean"),
    "with gradients": (_with_gradients, "norm.mean"),
    "through a view": (_through_a_view, "norm.mean"),
    "through .data": (_through_data, "norm.mean"),
    "data set": (_set_data, "norm.weight"),
    "data of a frozen leaf set": (_set_data_of_frozen, "norm.mean"),
    "an integer": (_counts, "norm.count"),
    "a trainable leaf": (_trainable, "norm.weight"),
    "a trainable leaf, by autograd": (_torch_refuses, "norm.weight"),
    "a trainable leaf, before it is used": (_before_it_is_used, "norm.weight"),
    "out=": (_as_a_result, "norm.mean"),
    "held for long": (_held, "norm.mean"),
    "in a checkpoint": (_checkpointed, "norm.mean"),
}

TRACED = (
    "batch_norm",
    "under no_grad",
    "through .data",
    *(name for name in WRITES if "trainable" in name),
    "in a checkpoint",
)


def loss_of(write: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    """A loss that calls `write` between uses of other leaves."""

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        x = x @ p["first"].to(x.dtype)
        y = write(p, x) * p["last"]
        return fshard.Mean(y.square().sum(), y.numel())

    return loss


def refusals(mesh: Any, strategy: str) -> dict[str, list[str]]:
    """The errors for every write, from a gradient, `evaluate`, a step and a trace (test_tape.py runs this in
    processes)."""
    whole = parameters()
    plan = fshard.make_plan(whole, mesh, units=["norm"], frozen=FROZEN, **STRATEGIES[strategy])
    x, tx = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank_of(mesh))), fshard.optim.sgd(0.1)
    x = plan.policy.cast(x, "compute")
    found: dict[str, list[str]] = {}
    for name, (write, _) in WRITES.items():
        loss, said = loss_of(write), []
        calls = [
            lambda s, loss=loss: fshard.value_and_grad(loss)(s, x),
            lambda s, loss=loss: fshard.evaluate(loss)(s, x),
            lambda s, loss=loss: fshard.train_step(loss, tx)(fshard.init_state(s, tx), x),
            lambda s, loss=loss: fshard.jit(fshard.value_and_grad(loss), backend="eager")(s, x),
        ]
        for call in calls[: 4 if name in TRACED and strategy in ("full", "ddp") else 3]:
            sharded = fshard.shard_params(whole, plan)
            with pytest.raises(ValueError, match="in place") as failure:
                call(sharded)
            said.append(str(failure.value))
            after = zip(tree.leaves(fshard.gather_params(sharded)), tree.leaves(whole), strict=True)
            assert ("are changed" in said[-1]) == any(not torch.equal(a, b) for a, b in after), name
        found[name] = said
    return found


def rank_of(mesh: Any) -> int:
    """This rank's number; 0 on one device."""
    return 0 if mesh is None else mesh.get_rank()


def check_words(found: dict[str, list[str]]) -> None:
    """Check that each error names the leaf and the remedy."""
    for name, said in found.items():
        for words in said:
            assert repr(WRITES[name][1]) in words, (name, words)
            assert "work on a clone" in words
            assert "with_extra=True" in words
