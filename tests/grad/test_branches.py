"""Batches that choose what a rank computes: all ranks call the same collectives, with the gradients of one device."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from support.steps import apart
from support.worlds import gloo, simulated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.core import tree
from fshard.hosts import rendezvous

UNITS = ["a", "b", "c", "d"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ahead": {"prefetch": 2},
    "zero2": {"params_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "a unit is whole": {"whole": ["b.*"]},
}
WAYS: dict[str, tuple[dict[str, Any], int]] = {  # how a step is built, and the losses of a rank that it averages
    "step": ({}, 1),
    "tree": ({"reduction": "tree"}, 2),
    "accumulate": ({"accumulate": 2}, 2),
    "reduced once": ({"accumulate": 2, "reduce_once": True}, 2),
    "in backward": ({"in_backward": True, "donate": True}, 1),
}


class Op:
    """One line of a program: what it does with a unit, and on whose batches it is computed and counted."""

    def __init__(self, draw: random.Random):
        self.what = draw.choice(["layer", "layer", "shift", "product", "side", "checkpoint", "frozen input"])
        self.unit = draw.choice(UNITS)
        self.computed, self.counted = (draw.choice([True, True, None]) for _ in range(2))

    def run(self, p: Any, h: Tensor, total: Tensor, chosen: bool) -> tuple[Tensor, Tensor]:
        """The hidden values and the loss after this line; `chosen` is what the batch says."""
        w, b = p["w"], p["b"]
        if not (self.computed or chosen):
            return h, total
        if self.what == "product":  # autograd saves no place of the unit
            return h, total + (h.detach() * b).sum() * (self.counted or chosen)
        if self.what in ("side", "frozen input"):  # computed by all ranks, perhaps counted by some
            side = torch.sin((h.detach() if "frozen" in self.what else h) @ w).sum()
            return h, total + side if self.counted or chosen else total
        if self.what == "checkpoint":
            return checkpoint(lambda h: torch.tanh(h @ w + b), h, use_reentrant=False), total
        return (h + b if self.what == "shift" else torch.tanh(h @ w + b)), total


def program(seed: int, early: bool, lazy: bool) -> Callable[[Any, Any], Tensor]:
    """A loss that reads all units at its beginning, or each where it is used; with `lazy` only if it is used."""
    draw = random.Random(seed)
    ops = [Op(draw) for _ in range(7)]

    def loss(p: Any, batch: Any) -> Tensor:
        chosen = bool(batch["chosen"].any())
        h, total = torch.tanh(batch["x"] @ p["first"]), torch.zeros((), dtype=torch.float64)
        read = {name: dict(p[name]) for name in UNITS} if early else {}
        for op in ops:
            if not lazy or op.computed or chosen:
                h, total = op.run(read.get(op.unit) or p[op.unit], h, total, chosen)
        return total + h.sum()

    return loss


def params_of(seed: int) -> Any:
    """A first leaf, and units of two leaves, whose sizes no number of ranks divides."""
    generator = torch.Generator().manual_seed(seed)
    new = partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"first": new(3, 3), **{name: {"w": new(3, 3), "b": new(3)} for name in UNITS}}


def batches(seed: int, ranks: int) -> list[Any]:
    """Two rows for each rank, of which each chooses for itself."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed + 1)
    xs = torch.randn(ranks, 2, 3, generator=generator, dtype=torch.float64)
    return [{"x": x, "chosen": torch.tensor([draw.random() < 0.5] * 2)} for x in xs]


def trained(mesh: Any, seeds: list[int], strategy: str, way: str) -> None:
    """Two steps of every program are those of plain torch on all batches."""
    how, num = WAYS[way]
    ranks, rank = 1 if mesh is None else mesh.size(), 0 if mesh is None else mesh.get_rank()
    is_whole = STRATEGIES[strategy].get("params_over") == ()
    for seed in seeds:
        loss = program(seed, early=seed % 2 == 0, lazy=is_whole and seed % 3 == 0)
        params, plain = params_of(seed), tree.map(lambda x: x.clone().requires_grad_(), params_of(seed))
        plan = fshard.make_plan(params, mesh, units=UNITS, **STRATEGIES[strategy])
        state = fshard.init_state(fshard.shard_params(params, plan), optim.sgd(0.1, momentum=0.9))
        step = fshard.train_step(loss, optim.sgd(0.1, momentum=0.9), **how)
        reference = torch.optim.SGD(tree.leaves(plain), 0.1, momentum=0.9)
        for number in range(2):
            given = batches(seed + number, ranks)
            state, _ = step(state, given[rank])
            parts = [tree.map(lambda x, i=i: x.chunk(num)[i], batch) for batch in given for i in range(num)]
            reference.zero_grad()
            (sum(loss(plain, part) for part in parts) / len(parts)).backward()
            for x in tree.leaves(plain):
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            reference.step()
        wrong = apart(fshard.gather_params(state.params), tree.map(torch.detach, plain))
        assert wrong < 1e-12, (seed, strategy, way, wrong)


@pytest.mark.sample(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 2, "replicate": 2}])
def test_programs_that_batches_choose(axes: dict[str, int], strategy: str, way: str) -> None:
    """Ranks would start different collectives: an error, and between hosts wrong gradients without a word."""
    simulated(trained, [0, 1], strategy, way, **axes)


def between_hosts(mesh: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(mesh, *args)` in processes that compare no calls, as those of different hosts."""
    with mock.patch.object(rendezvous, "_host", return_value=f"host {mesh.get_rank()}"):
        assert rendezvous.links_to(fshard.comm.mesh.adapted(mesh).ranks("shard")) is None
        return fn(mesh, *args)


def all_trained(mesh: Any) -> None:
    """Two programs with every strategy and way of stepping."""
    for number, (strategy, way) in enumerate(product(STRATEGIES, WAYS)):
        trained(mesh, [2 * number, 2 * number + 1], strategy, way)


def test_programs_that_batches_choose_between_hosts() -> None:
    """Messages would be paired with others, and gradients be wrong without a word."""
    gloo(between_hosts, all_trained, shard=2)


LOSSES: dict[str, Callable[..., Any]] = {
    "gradients": lambda loss, params, x: fshard.value_and_grad(loss)(params, x),
    "value": lambda loss, params, x: fshard.evaluate(loss)(params, x),
    "step": lambda loss, params, x: fshard.train_step(loss, optim.sgd(0.1))(
        fshard.init_state(params, optim.sgd(0.1)), x
    ),
}


def read_apart(mesh: Any, name: str) -> None:
    """A loss that reads another unit on each rank; the units have one size."""
    params = {"a": torch.ones(8, 8), "b": torch.ones(8, 8)}
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["a", "b"], prefetch=0))
    chosen = "ab"[mesh.get_rank()]
    LOSSES[name](lambda p, x: (x @ p[chosen]).sum(), sharded, torch.ones(2, 8))


def error_of(mesh: Any, name: str) -> str:
    """The error of `read_apart` on this rank."""
    with pytest.raises(RuntimeError) as failure:
        read_apart(mesh, name)
    return str(failure.value)


@pytest.mark.parametrize("name", LOSSES)
def test_units_that_not_all_ranks_gather_are_an_error(name: str) -> None:
    """Ranks would take one unit for another of the same size, and train on it; or not be told what to do."""
    with pytest.raises(fshard.MismatchError) as failure:
        simulated(read_apart, name, shard=2)
    for text in (str(failure.value), *gloo(between_hosts, error_of, name, shard=2)):
        assert "an empty batch" in text
        assert "params_over=()" in text
