"""Ranks with 0, 1, 2 and 3 rows: what copies a leaf on one rank is a view on another."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import rand
from support.worlds import gloo, simulated
from torch import Tensor
from torch.nn import functional as F

import fshard
from fshard import optim
from fshard.testing import oracle

PARAMS = {
    "a": rand(4, 4, seed=1),
    "q": rand(4, seed=2),
    "m": rand(3, 4, seed=3),
    "one": rand(1, 4, seed=4),
    "b": rand(4, 4, seed=5),
}
# a reader of leaves for n rows `x`, (n, 4): its result is (n, 4)
READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "expanded": lambda p, x: p["q"].expand(len(x), 4),
    "expanded and multiplied": lambda p, x: x * p["one"].expand_as(x),
    "contiguous": lambda p, x: x * p["q"].expand(len(x), 4).contiguous(),
    "reshaped": lambda p, x: p["one"].expand(len(x), 4).reshape(-1).view(len(x), 4),
    "flattened": lambda p, x: p["m"].expand(len(x), 3, 4).flatten(0, 1).sin().view(len(x), 3, 4).sum(1),
    "as queries": lambda p, x: F.linear(p["m"].expand(len(x), 3, 4), p["b"].tanh()).sum(1),
    "in a product": lambda p, x: (p["one"].expand(len(x), 1, 4) @ p["b"])[:, 0] * x,
    "in attention": lambda p, x: F.scaled_dot_product_attention(
        *(y.expand(len(x), -1, 4) for y in (p["m"], p["one"], p["one"]))
    ).sum(1),
    "broadcast": lambda p, x: torch.broadcast_to(p["q"], (len(x), 4)).ravel().view(-1, 4),
    "sliced": lambda p, x: p["m"][: len(x)] * x,
    "sliced and turned": lambda p, x: p["m"].T[:, : len(x)].contiguous().T,
    "narrowed": lambda p, x: p["m"].narrow(0, 0, len(x)).T.reshape(-1).view(4, len(x)).T,
    "a chunk": lambda p, x: torch.cat(p["q"].expand(len(x), 4).contiguous().chunk(max(len(x), 1))),
    "indexed": lambda p, x: p["m"][torch.arange(len(x))],
    "repeated": lambda p, x: p["one"].repeat(len(x), 1),
    "repeated and multiplied": lambda p, x: p["one"].repeat(len(x), 1) * p["q"],
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "kept": {"regather": False},
    "zero2": {"params_over": ()},
    "two ahead": {"prefetch": 2},
    "none ahead": {"prefetch": 0},
}
OPTIMIZERS = {"sgd": partial(optim.sgd, 0.1), "adam": partial(optim.adam, 0.01)}


def loss(p: Any, x: Tensor, read: str, late: bool) -> fshard.Mean:
    """The leaves that `read` reads are used after another unit, with `late` after two."""
    added = READS[read](p, x)
    h = torch.tanh(x @ p["a"])
    h = torch.tanh(h @ p["b"] + added) if late else torch.tanh(h + added) @ p["b"]
    return fshard.Mean(h.square().sum(), len(x))


def trained(mesh: Any, read: str, strategy: str, rows: list[int], backend: str = "eager") -> None:
    """Two jitted steps are those of the unsharded oracle."""
    batches = [rand(n, 4, seed=10 + rank) for rank, n in enumerate(rows)]
    plan = fshard.make_plan(PARAMS, mesh, units=[*PARAMS], bucket=0, **STRATEGIES[strategy])
    for late, (name, tx) in zip((False, True), OPTIMIZERS.items(), strict=True):
        fn = partial(loss, read=read, late=late)
        init, reference = oracle(fn, tx())
        expected, state = init(PARAMS), fshard.init_state(fshard.shard_params(PARAMS, plan), tx())
        step = fshard.jit(fshard.train_step(fn, tx()), backend=backend, bucket=[0, 1 << 20][late])
        for _ in range(2):
            expected, wanted = reference(expected, batches)
            state, metrics = step(state, batches[mesh.get_rank()])
            torch.testing.assert_close(metrics["loss"], wanted["loss"])
        torch.testing.assert_close(fshard.gather_params(state.params), expected.params, msg=name)


@pytest.mark.law
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("read", READS)
def test_ranks_of_any_number_of_rows(read: str, strategy: str) -> None:
    """Ranks would gather in the order of their own first readers, or gather again what they alone saved."""
    simulated(trained, read, strategy, [1, 0, 3, 2], shard=4)
    simulated(trained, read, strategy, [1, 3])


@pytest.mark.parametrize("read", ["as queries", "reshaped"])
def test_processes_of_one_row_and_of_several(read: str) -> None:
    """Processes would wait for each other, or take one unit for another."""
    gloo(trained, read, "full", [1, 2], "aot_eager")


def test_what_an_expand_cannot_repeat_is_not_copied() -> None:
    """A graph would keep a copy of each expert's matrix until the backward."""

    def of_experts(p: Any, x: Tensor) -> Tensor:
        return torch.matmul(x.expand(3, *x.shape), p["experts"]).sum()

    def copies(mesh: Any) -> list[str]:
        params = {"experts": rand(3, 4, 5, seed=1), "other": rand(2, seed=2)}
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), optim.sgd(0.1))
        lowered = fshard.jit(fshard.train_step(of_experts, optim.sgd(0.1)), backend="eager").lower(
            state, rand(2, 4, seed=3)
        )
        return [line for line in lowered.as_text().splitlines() if "clone" in line]

    assert simulated(copies) == [[], []]
