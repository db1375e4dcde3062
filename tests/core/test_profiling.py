"""Names in traces of torch.profiler."""

from collections import Counter
from typing import Any

import pytest
import torch
from support.chains import chain, chain_params, randn
from support.worlds import simulated
from torch.profiler import ProfilerActivity, profile

import fshard
from fshard.core.tracing import profiled

# torch 2.11 warns at the first profile of a process
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events")
UNITS = ["(first)", "blocks.0", "blocks.1", "blocks.2", "(last)"]


def recorded(mesh: Any, how: str, strategy: dict[str, Any]) -> tuple[Counter[str], str]:
    """How often each name of ours is in the first rank's trace of a gradient; and the text of its graph, if any."""
    params = chain_params()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"], **strategy))
    fn, x, text = fshard.value_and_grad(chain), randn(3, 5, seed=mesh.get_rank()), ""
    if mesh.get_rank():
        (fshard.jit(fn, backend="eager", bucket=0) if how == "graph" else fn)(sharded, x)
        return Counter(), text
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        if how == "graph":
            lowered = fshard.jit(fn, bucket=0).lower(sharded, x)
            text = lowered.as_text()
            lowered.compile("eager")(sharded, x)
        else:
            fn(sharded, x)
    return Counter(event.name for event in trace.events() if event.name.startswith("fshard.")), text


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_trace_names_collectives_and_units(how: str) -> None:
    """A trace would show messages, and not of which unit, in the forward, the backward or the reductions."""
    names, text = simulated(recorded, how, {}, shard=2)[0]
    for unit in UNITS:
        gathers = 1 if unit == "(last)" else 2  # what the backward begins with stays
        assert names[f"fshard.all_gather {unit}"] == gathers
        assert names[f"fshard.reduce_scatter {unit}"] == 1
        assert names[f"fshard.wait {unit}"] == (gathers if how == "eager" else 0)
    assert names["fshard.all_reduce loss"] >= 1
    assert "record_function" not in text


def test_a_trace_of_reductions_over_all_ranks() -> None:
    """A trace of DDP, or of two axes, would lack names."""
    names, _ = simulated(recorded, "eager", dict.fromkeys(("params_over", "grads_over", "state_over"), ()), shard=2)[0]
    assert [names[f"fshard.all_reduce {unit}"] for unit in UNITS] == [1] * 5


def test_no_name_is_made_where_no_profiler_runs() -> None:
    """Every collective would cost a `record_function` in all runs."""
    assert profiled("all_gather", "a") is profiled("wait", "b")
    with profile(activities=[ProfilerActivity.CPU]):
        assert isinstance(profiled("all_gather", "a"), torch.autograd.profiler.record_function)
