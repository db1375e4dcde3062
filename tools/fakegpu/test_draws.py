"""`remat` draws on a device what it drew first, and casts as it did. `make fakegpu` runs this file, alone on the stub.

A function is asked before and after it runs: the seed and offset of each device's generator, and what autocast says.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fshard

FIRST, SECOND = (torch.device("cuda", number) for number in range(2))


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.ones(1, device=FIRST)
    torch.cuda.manual_seed_all(0)
    yield
    torch.cuda.synchronize()


def state() -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Seeds, offsets, and whether autocast is on."""
    generators = torch.cuda.default_generators[:2]
    seeds, offsets = zip(*((g.initial_seed(), g.get_offset()) for g in generators), strict=True)
    return seeds, offsets, torch.is_autocast_enabled("cuda")


def seen(fn: Callable[..., Tensor], times: list[Any]) -> Callable[..., Tensor]:
    """`fn`, of which each run leaves the state before and after it in `times`."""

    def run(*args: Any) -> Tensor:
        before = state()
        out = fn(*args)
        times.append((before, state()))
        return out

    return run


def on_second(w: Tensor) -> Tensor:
    """Draws on a device that is the current one for a while."""
    with torch.cuda.device(SECOND):
        return w * torch.rand(4, 4, device="cuda").to(FIRST)


DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "on the device": lambda w, _: F.dropout(w, 0.5),
    "by a factory": lambda w, _: w * torch.rand(4, 4, device="cuda"),
    "twice": lambda w, _: F.dropout(F.dropout(w, 0.5), 0.5) * torch.rand(4, 4).to(FIRST),
    "on another device": lambda w, other: w * F.dropout(other, 0.5).to(FIRST),
    "on both": lambda w, other: F.dropout(w, 0.5) * F.dropout(other, 0.5).to(FIRST),
    "by a factory there": lambda w, _: w * torch.rand(4, 4, device=SECOND).to(FIRST),
    "moved there": lambda w, _: F.dropout(w.to(SECOND), 0.5).to(FIRST),
    "where it is the current one": lambda w, _: on_second(w),
}
GIVEN: dict[str, Callable[[Any, Tensor, Tensor], tuple[Callable[..., Tensor], tuple[Any, ...]]]] = {
    "tensors": lambda fn, w, other: (fn, (w, other)),
    "nothing": lambda fn, w, other: (lambda: fn(w, other), ()),
    "a number": lambda fn, w, other: (lambda _: fn(w, other), (3,)),
    "a tensor of the host": lambda fn, w, other: (lambda x: fn(w, other), (torch.ones(2),)),
    "an int tensor": lambda fn, w, other: (lambda x: fn(w, other), (torch.zeros(1, dtype=torch.int64, device=FIRST),)),
}


@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("draw", DRAWS)
def test_again(draw: str, given: str, cast: bool) -> None:
    """What comes after the function in the forward draws, too, and the backward is outside of autocast."""
    w, other, times = torch.ones(4, 4, device=FIRST, requires_grad=True), torch.ones(4, 4, device=SECOND), list[Any]()
    fn, args = GIVEN[given](seen(DRAWS[draw], times), w, other)
    with torch.autocast("cuda", torch.bfloat16) if cast else nullcontext():
        out = fshard.remat(fn)(*args).float().sum()
        for device in (FIRST, SECOND):
            torch.rand(7, device=device)
    after = state()
    out.backward()
    first, again = times
    assert first == again
    assert first[0][1] != first[1][1], "nothing was drawn"
    assert first[0][2] == cast
    assert state() == (*after[:2], False)


@pytest.mark.parametrize("reads", ["the batch", "parameters"])
def test_in_a_step(reads: str) -> None:
    """A function of a step is given a number."""
    times = list[Any]()

    def loss(p: Any, batch: Tensor) -> Any:
        block = seen(lambda i: F.dropout(batch @ p["w"][i] if reads == "parameters" else batch, 0.5), times)
        x = fshard.remat(block)(0)
        return fshard.Mean((F.dropout(x, 0.5) @ p["w"][1]).sum(), len(batch))

    tx = fshard.optim.sgd(0.1)
    whole = {"w": torch.ones(2, 4, 4, device=FIRST)}
    begin = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole)), tx)
    fshard.train_step(loss, tx)(begin, torch.ones(2, 4, device=FIRST))
    assert len({*times}) == 1
