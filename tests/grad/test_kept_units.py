"""Units that stay, frozen or not, in checkpoints that run again on some ranks: the gradients of one device."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.models import rand
from support.steps import apart
from support.worlds import between_hosts, gloo, simulated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.core import tree

PARAMS = {name: rand(3, 3, seed=number) for number, name in enumerate("abcd")}
UNITS = [*PARAMS]
OVER = dict.fromkeys(("params_over", "grads_over", "state_over"), ("replicate", "shard"))
PLANS: dict[str, dict[str, Any]] = {
    "gathered again": {},
    "frozen": {"frozen": "a"},
    "kept": {"regather": {"a": False}},
    "frozen and kept": {"frozen": "a", "regather": {"a": False}},
    "two frozen and kept": {"frozen": ["a", "c"], "regather": {"a": False, "c": False}},
    "frozen and kept, one whole": {"frozen": "a", "regather": {"a": False}, "whole": "c"},
    "frozen and kept, far ahead": {"frozen": "a", "regather": {"a": False}, "prefetch": 2},
    "frozen and kept, on no axis": {"frozen": "a", "regather": {"a": False, "b": ()}},
    "a frozen one is whole": {"frozen": "a", "whole": "a"},
    "all kept": {"regather": False},
    "all kept, frozen": {"frozen": "a", "regather": False},
    "all kept, two frozen": {"frozen": ["a", "c"], "regather": False},
    "whole": {"params_over": ()},
    "whole, frozen": {"frozen": "a", "params_over": ()},
}
Read = Callable[[], Tensor]  # of the unit "a", of the parameters or of a teacher


def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A checkpoint."""
    return checkpoint(function, x, use_reentrant=False)


def in_vain(a: Read, x: Tensor) -> Tensor:
    """A checkpoint that reads the unit and does not use it."""
    return again(lambda x: (a(), torch.tanh(x))[1], x)


def given(a: Read, x: Tensor) -> Tensor:
    """A checkpoint of a leaf that was read before it."""
    w = a()
    return again(lambda x: torch.tanh(x @ w), x)


def twice(a: Read, x: Tensor) -> Tensor:
    """Two checkpoints of one unit."""
    return again(lambda x: torch.tanh(x @ a()), again(lambda x: torch.sin(x @ a()), x))


FORMS: dict[str, Callable[[Read, Tensor], Tensor]] = {
    "no checkpoint": lambda a, x: torch.tanh(x @ a()),
    "checkpoint": lambda a, x: again(lambda x: torch.tanh(x @ a()), x),
    "in vain": in_vain,
    "given": given,
    "twice": twice,
    "nested": lambda a, x: again(lambda x: torch.tanh(again(lambda x: torch.tanh(x @ a()), x)), x),
    "nested, in vain": lambda a, x: again(lambda x: torch.tanh(in_vain(a, x)), x),
    "saved, too": lambda a, x: again(lambda x: torch.tanh(x @ a()), torch.sin(x @ a())),
}
USED: dict[str, Callable[[int], bool]] = {  # which ranks use the result
    "used": lambda rank: True,
    "dropped": lambda rank: False,
    "by some": lambda rank: rank == 1,
    "by others": lambda rank: rank == 0,
}


def loss_of(form: str, used: str, late: int, sums: bool, teacher: bool, tail: bool) -> Callable[..., Any]:
    """A loss of units that all ranks read in one order; rank `late` saves one of them again later.

    With `tail` another unit is read last: the one in question is not in memory when the forward ends.
    """

    def loss(p: Any, x: Tensor, rank: int, t: Any) -> Any:
        b = (t if teacher else p)["b"]
        x = torch.tanh(torch.sin(x @ p["b"]) @ b)
        z = again(lambda x: torch.tanh(x @ p["c"]), x)
        y = FORMS[form](lambda: (t if teacher else p)["a"], x)
        x = y if USED[used](rank) else x
        x = torch.tanh(x @ b) if rank == late else x
        x = x @ p["d"] if tail else x
        first = fshard.Mean(x.square().sum(), len(x))
        return first + fshard.Mean(z.sin().sum(), 2 + rank) if sums else first

    return loss


CASES = [*product(USED, [-1, 0, 1], *[[False, True]] * 3)]


def expected(loss: Callable[..., Any], teacher: Any, xs: list[Tensor]) -> dict[str, Tensor]:
    """The gradients by plain torch, of the batches of all ranks."""
    params = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    losses = [loss(params, x, rank, teacher) for rank, x in enumerate(xs)]
    terms = [[loss] if isinstance(loss, fshard.Mean) else loss.terms for loss in losses]
    value = sum(
        sum(mean.total for mean in means) / sum(mean.count for mean in means) for means in zip(*terms, strict=True)
    )
    grads = torch.autograd.grad(value, [*params.values()], allow_unused=True)
    return {name: torch.zeros(3, 3).double() if g is None else g for name, g in zip(params, grads, strict=True)}


def right(mesh: Any, form: str, plan: str, num: int) -> None:
    """Compare the gradients of some cases with those of plain torch."""
    made = fshard.make_plan(PARAMS, mesh, units=UNITS, **PLANS[plan])
    params, whole = fshard.shard_params(PARAMS, made), tree.map(torch.cos, PARAMS)
    xs = [torch.full((2, 3), 1.0 + rank, dtype=torch.float64) for rank in range(mesh.size())]
    rank, frozen = mesh.get_rank(), [*PLANS[plan].get("frozen", ())]
    for case in random.Random(form + plan).sample(CASES, num):
        loss = loss_of(form, *case)
        _, grads = fshard.value_and_grad(loss)(params, xs[rank], rank, fshard.shard_params(whole, made))
        found, wanted = fshard.gather_params(grads), expected(loss, whole, xs)
        for name in set(wanted) - set(frozen):
            assert apart(found[name], wanted[name]) < 1e-12, (plan, form, case, name)


@pytest.mark.law
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_use_and_run_again_what_they_like(plan: str, form: str) -> None:
    """A gather of one rank would meet a reduction of another: an error, and between hosts a wrong gradient."""
    simulated(right, form, plan, 24, shard=2)


def read_apart(mesh: Any) -> None:
    """One rank alone reads a teacher under no_grad: it keeps no copy, from which the others gather again."""
    made = fshard.make_plan(PARAMS, mesh, units=UNITS, regather="shard", **OVER)
    params = fshard.shard_params(PARAMS, made)

    def loss(p: Any, t: Any) -> Tensor:
        with torch.set_grad_enabled(mesh.get_rank() != 1):
            w = t["a"]
        return (p["b"] @ w @ p["c"]).sum()

    fshard.value_and_grad(loss)(params, params)


def test_a_copy_that_not_all_ranks_keep_is_an_error() -> None:
    """Ranks would gather over other axes in the backward."""
    with pytest.raises(RuntimeError, match=r"an empty batch.*params_over=\(\)"):
        simulated(read_apart, replicate=2, shard=2)


def all_right(mesh: Any) -> None:
    """A few cases of each plan and form."""
    for plan, form in product(PLANS, FORMS):
        right(mesh, form, plan, 3)


def test_ranks_use_and_run_again_what_they_like_on_a_host_and_between_hosts() -> None:
    """Messages of one size would be taken for each other."""
    gloo(all_right, shard=2)
    gloo(between_hosts, all_right, shard=2)


CUTS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero2": {"params_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "kept": {"regather": False},
}


@pytest.mark.parametrize("order", [(1, 2), (1, 0)])
@pytest.mark.parametrize("teacher", ["zero3", "kept"])
@pytest.mark.parametrize("strategy", CUTS)
def test_a_teacher_in_a_checkpoint_that_a_rank_drops(strategy: str, teacher: str, order: tuple[int, int]) -> None:
    """Parameters that nothing gathers would be reduced before a teacher is gathered that other ranks read again."""
    whole, other = ([{"w": rand(3, 3, seed=seed + i)} for i in range(3)] for seed in (0, 5))

    def loss(p: Any, x: Tensor, t: Any, rank: int) -> fshard.Sum:
        inside = lambda y: torch.tanh(torch.tanh(y @ t[1]["w"]) @ p[order[0]]["w"])  # noqa: E731
        dropped = checkpoint(inside, x, use_reentrant=False)
        y = x @ p[order[1]]["w"]
        return fshard.Sum((y + dropped if rank else y).square().sum())

    def run(mesh: Any) -> Any:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["*"], **CUTS[strategy]))
        beside = fshard.shard_params(other, fshard.make_plan(other, mesh, units=["*"], **CUTS[teacher]))
        rank = mesh.get_rank()
        return fshard.gather_params(fshard.value_and_grad(loss)(params, rand(4, 3, seed=rank + 20), beside, rank)[1])

    leaves = fshard.tree.map(lambda x: x.clone().requires_grad_(), whole)
    for rank in range(2):
        loss(leaves, rand(4, 3, seed=rank + 20), other, rank).total.backward()
    expected = [leaf["w"].grad if leaf["w"].grad is not None else torch.zeros_like(leaf["w"]) for leaf in leaves]
    for got in simulated(run, shard=2):
        torch.testing.assert_close([x["w"] for x in got], expected)
