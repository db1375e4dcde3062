"""`scan` without units: a loop over rows of `xs`, with the bits of the loop."""

from functools import partial
from typing import Any

import pytest
import torch
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, optim

Scan = Any


def loop(body: Any, carry: Any, xs: Any) -> Any:
    """The loop, written by hand."""
    rows, ys = [dict(zip(xs, row, strict=True)) for row in zip(*(x.unbind() for x in xs.values()), strict=True)], []
    for row in rows:
        carry, y = body(carry, row)
        ys.append(y)
    return carry, fshard.tree.map(lambda *y: torch.stack(y), *ys) if ys else None


def scanned(body: Any, carry: Any, xs: Any) -> Any:
    """The scan."""
    return fshard.scan(body, carry, xs=xs)


def rematerialized(scan: Scan, body: Any, carry: Any, xs: Any) -> Any:
    """Each step runs again in the backward."""
    return scan(fshard.remat(body), carry, xs)


def whole() -> dict[str, Any]:
    """A recurrent network of two units."""
    return {"cell": {"u": rand(5, 5, seed=1) / 3, "v": rand(3, 5, seed=2)}, "out": {"w": rand(5, 1, seed=3)}}


def loss(params: Any, batch: Any, *, scan: Scan) -> fshard.Mean:
    """A recurrence over time, whose error at each step counts; `keep` masks steps."""

    def body(carry: Any, x: Any) -> Any:
        h, count = carry["h"], carry["count"]
        new = torch.tanh(h @ params["cell"]["u"] + x["x"] @ params["cell"]["v"])
        h = torch.where(x["keep"], new, h)
        return {"h": h, "count": count + 1}, {"error": (h @ params["out"]["w"] - x["y"]).square().sum()}

    start = {"h": batch["x"].new_zeros(batch["x"].shape[1], 5), "count": batch["x"].new_zeros(())}
    carry, ys = scan(body, start, batch)
    return fshard.Mean(ys["error"].sum(), carry["count"])


def data(rank: int, steps: int) -> dict[str, Tensor]:
    """Sequences of one rank, (time, rows, features)."""
    keep = torch.arange(steps)[:, None, None] % 3 != rank % 3
    return {"x": rand(steps, 2, 3, seed=rank), "y": rand(steps, 2, 1, seed=50 + rank), "keep": keep}


def trained(mesh: Any, scan: Scan, steps: int, jits: bool) -> Any:
    """Losses and parameters of two steps."""
    params, tx = whole(), optim.adam(0.01)
    plan = fshard.make_plan(params, mesh, units=["cell", "out"])
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(partial(loss, scan=scan), tx)
    run, losses = fshard.jit(step, backend="eager") if jits else step, []
    for number in range(2):
        state, metrics = run(state, data(10 * number + (0 if mesh is None else mesh.get_rank()), steps))
        losses.append(metrics["loss"])
    return losses, gather_params(state.params)


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("shard", [None, 1, 2, 3])
def test_a_scan_over_time_has_the_bits_of_the_loop(shard: int | None, steps: int, jits: bool) -> None:
    """Few rows and many, of which a graph copies the body."""
    jobs = [partial(trained, scan=scan, steps=steps, jits=jits) for scan in (loop, scanned)]
    same_bits(*([job(None)] if shard is None else simulated(job, shard=shard) for job in jobs))


def test_a_scan_in_processes() -> None:
    """As on simulated ranks."""
    same_bits(gloo(trained, scanned, 4, False), simulated(trained, scanned, 4, False))


@pytest.mark.parametrize("jits", [False, True], ids=["eager", "jit"])
def test_a_scan_of_a_rematerialized_body(jits: bool) -> None:
    """The loop of such a body has the same bits."""
    jobs = [partial(trained, scan=partial(rematerialized, s), steps=5, jits=jits) for s in (loop, scanned)]
    same_bits(*(simulated(job, shard=2) for job in jobs))


def test_derivatives_of_a_scan() -> None:
    """torch.func around a scan over steps."""
    params, batch = whole(), data(0, 5)
    values = [torch.func.grad(lambda p, s=scan: loss(p, batch, scan=s).total)(params) for scan in (loop, scanned)]
    same_bits(*values)


def test_wrong_rows_are_errors() -> None:
    """What is missing is said, with the leaf's path."""
    zero, body = torch.zeros(()), lambda carry, x: carry
    with pytest.raises(TypeError, match="scan: xs=None: expected a tree of tensors with rows, as units is None"):
        fshard.scan(body, zero)
    with pytest.raises(ValueError, match=r"scan: xs 'b': shape \[3\]: expected 2 rows, one for each call"):
        fshard.scan(body, zero, xs={"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(TypeError, match="scan: xs 'b'=1: expected a tensor with a row for each call"):
        fshard.scan(body, zero, xs={"a": torch.ones(2), "b": 1})
    with pytest.raises(TypeError, match="scan: body: expected carry"):
        fshard.scan(lambda carry, x: [carry], zero, xs=torch.ones(2))
    assert fshard.scan(body, zero, xs=torch.ones(0, 2)) == (zero, None)
