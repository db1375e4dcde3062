"""Part "primitives" of `make gpu`: every collective through NCCL, on a group of one rank, so that one GPU is enough."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from gpu_cases import CUDA, DEVICE
from gpu_rows import Rows
from torch import Tensor

from fshard.comm import primitives
from fshard.comm.process_groups import GroupRanks
from fshard.comm.reduction import TREE
from fshard.core.storage import as_bytes

Collective = Callable[[Tensor, GroupRanks], Tensor]
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.complex64)
DTYPES = (*SUMMED, torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float8_e4m3fn)
SHAPES = ((6,), (2, 3), (0, 3))


def messages(x: Tensor, ranks: GroupRanks) -> Tensor:
    """One message to each peer, of which there is none: that which lies there for the rank itself is sent."""
    for work in ranks._start([x], [torch.empty_like(x)], []):  # `exchange` sends nothing where there is one rank
        work.wait()
    return x


MOVED: dict[str, Collective] = {
    "all_gather": lambda x, ranks: primitives.all_gather(x, ranks).wait(),
    "all_gather, lent": lambda x, ranks: primitives.all_gather(x, ranks, lent=True).wait(),
    "all_to_all": lambda x, ranks: primitives.all_to_all(x, ranks).wait(),
    "broadcast": lambda x, ranks: primitives.broadcast(x, ranks).wait(),
    **({"messages": messages} if CUDA else {}),  # gloo has no all-to-all of a list
}
REDUCED: dict[str, Collective] = {
    "reduce_scatter, fast": lambda x, ranks: primitives.reduce_scatter(x, ranks, fast=True).wait(),
    "reduce_scatter, exact": lambda x, ranks: primitives.reduce_scatter(x, ranks).wait(),
    "reduce_scatter, tree": lambda x, ranks: TREE.reduce_scatter(x, ranks, "", None).wait().view(x.shape).to(x.dtype),
    "all_reduce, fast": lambda x, ranks: primitives.all_reduce(x, ranks, fast=True).wait(),
    "all_reduce, exact": lambda x, ranks: primitives.all_reduce(x, ranks).wait(),
}


def of_one_rank(rows: Rows, ranks: GroupRanks, calls: Callable[[], int]) -> None:
    """Check every collective for every dtype, and on a stream; `calls()` is how often the backend was called so far."""
    before = calls()
    for collectives, dtypes in ((MOVED, DTYPES), (REDUCED, SUMMED)):
        for name, collective in collectives.items():
            for dtype in dtypes:
                rows.check(f"{name} of {dtype}", partial(wrong, collective, ranks, dtype, calls))
            rows.check(f"{name}, on a stream", partial(_on_a_stream, collective, ranks, calls))
    lent = ranks.empty(1000, torch.empty(0, device=DEVICE), lent=True).fill_(3)
    rows.check("memory of the backend", lambda: same(primitives.reduce_scatter(lent, ranks, fast=True).wait(), lent))
    number = calls() - before
    rows.add("calls of the backend", "measured" if number else "failed", f"{number} calls")


def wrong(collective: Collective, ranks: GroupRanks, dtype: torch.dtype, calls: Callable[[], int]) -> str:
    """What is wrong with a collective of one rank, which changes nothing; empty if nothing is."""
    for shape in SHAPES:
        before, x = calls(), torch.arange(1, 1 + torch.Size(shape).numel(), device=DEVICE).view(shape).to(dtype)
        if words := same(collective(x.clone(), ranks), x):
            return f"{words} of {list(shape)}"
        if x.numel() and calls() == before:
            return f"no call of the backend for {list(shape)}"
    return ""


def same(got: Tensor, expected: Tensor) -> str:
    """Words for a difference in bits; empty if there is none."""
    return "" if torch.equal(as_bytes(got), as_bytes(expected)) else "other bits"


def _on_a_stream(collective: Collective, ranks: GroupRanks, calls: Callable[[], int]) -> str:
    module = torch.get_device_module(DEVICE)
    with module.stream(module.Stream()):
        return wrong(collective, ranks, torch.float32, calls)
