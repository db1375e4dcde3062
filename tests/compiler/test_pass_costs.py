"""What lowering costs: each pass is linear in the number of units, for a model of many small ones."""

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from support.graphs import EVERYTHING, graph_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard.compiler.donate import donated
from fshard.compiler.lowered import PASSES, Lowered, Options, Setting
from fshard.graph.dataflow import index, written_inputs
from fshard.graph.memory import footprint

FEW = 6  # units; the other model has four times as many
BUSY = Options(in_flight=EVERYTHING, bucket=2048)


def bytecodes(fn: Callable[[], object]) -> int:
    """How many bytecodes of fshard's files a call runs."""
    count = 0

    def local(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def call(frame: FrameType, *_: object) -> Any:
        if "fshard" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(call)
    try:
        fn()
    finally:
        sys.settrace(before)
    return count


def loss(params: Any, x: Tensor) -> Tensor:
    """A product for each unit."""
    for p in params["layers"]:
        x = torch.nn.functional.linear(x, p["w"], p["b"])
    return x.square().mean()


def traced(units: int) -> tuple[Lowered, Any]:
    """The graph of a step before any pass, of a model with this many units, and the state."""
    params = {"layers": [{"w": torch.empty(4, 4), "b": torch.empty(4)} for _ in range(units)]}
    plan = fshard.make_plan(params, fshard.AbstractMesh(shard=2), units=["layers.*"])
    tx = fshard.optim.adamw(1e-3)
    state = fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), tx), params)
    return graph_of(fshard.train_step(loss, tx), state, torch.empty(3, 4)), state


def costs(units: int) -> dict[str, int]:
    """The bytecodes of each part of lowering; the passes change a copy of the graph."""
    lowered, state = traced(units)
    counts = {"written_inputs": bytecodes(lambda: written_inputs(lowered.graph))}
    leaves = fshard.tree.leaves(((state, torch.empty(3, 4)), {}))
    traces = []
    counts["donated"] = bytecodes(lambda: traces.append(donated(lowered.traced, leaves)))
    graph, setting = traces[0].module.graph, Setting([state.params.plan], BUSY)
    for each in PASSES:
        counts[each.name] = bytecodes(lambda each=each: each.apply(graph, setting))  # type: ignore[misc]
    counts["footprint"] = bytecodes(lambda: footprint(graph, lowered.holds()))
    return counts


def calls(fn: Callable[[], object], of: Callable[..., object]) -> int:
    """How often a call of `fn` calls the function `of`."""
    codes = list[object]()
    sys.setprofile(lambda frame, event, _: codes.append(frame.f_code) if event == "call" else None)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return codes.count(of.__code__)  # type: ignore[attr-defined]


def test_a_pass_looks_at_all_nodes_once_for_what_it_moves_or_merges():
    """A pass would build an index for each list of gathers, or copy the graph, which took most of the time of all."""
    lowered, state = traced(FEW)
    leaves, graph = fshard.tree.leaves(((state, torch.empty(3, 4)), {})), lowered.graph
    setting = Setting([state.params.plan], BUSY)
    counts = {"donated": calls(lambda: donated(lowered.traced, leaves), index)}
    for each in PASSES:
        counts[each.name] = calls(lambda each=each: each.apply(graph, setting), index)  # type: ignore[misc]
    once = {"drop_dead": 1, "shorten": 1, "regather": 1}
    twice = {"donated": 2, "sink": 2, "bucket": 2}  # it is another graph then
    assert {name: count for name, count in counts.items() if count} == once | twice
    assert any(node.target is torch.ops.aten.copy_.default for node in graph.nodes), "`donated` changed a copy"


def test_four_times_the_units_cost_four_times_as_much():
    """A pass would look at all nodes for each collective: 400 units took minutes."""
    few, many = (costs(units) for units in (FEW, 4 * FEW))
    ratios = {part: many[part] / few[part] for part in few}
    assert max(ratios.values()) < 4, ratios


class Asked(TorchDispatchMode):
    """Counts questions for a tensor's device, under the modes of a trace."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.count += func is torch.ops.prim.device.default
        return func(*args, **kwargs or {})


def test_a_trace_spends_little_on_what_changes_nothing():
    """Operators asked for devices through all modes and listed their arguments."""
    _, state = traced(FEW)
    lower = partial(graph_of, fshard.train_step(loss, fshard.optim.adamw(1e-3)), state, torch.empty(3, 4))
    with Asked() as asked:
        lower()
    assert asked.count == 0
    assert calls(lower, fshard.tree.leaves) <= 3 * FEW
