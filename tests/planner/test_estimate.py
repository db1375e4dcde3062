"""What `estimate` says of a step: what its whole graph says, to the byte; state and traffic of ranks; room."""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import STRATEGIES, rand
from support.optimizers import ROWS
from support.worlds import gloo, simulated
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import AbstractMesh, optim, tree
from fshard.hosts import one_host
from fshard.planner import estimate as planner
from fshard.planner.depth import Stack, expanded, images, runs

DEPTH, WIDTH = 9, 64  # one unit more than the graphs of 4, 5 and 7 may need


def params(depth: int = DEPTH, vocab: int = 96, tied: bool = False, device: str = "cpu") -> dict[str, Any]:
    """An embedding, equal blocks, and a head."""

    def leaf(*shape: int) -> Tensor:
        return torch.full(shape, 0.01, device=device)

    def block() -> dict[str, Tensor]:
        return {"up": leaf(WIDTH, 2 * WIDTH), "down": leaf(2 * WIDTH, WIDTH)}

    embed = leaf(vocab, WIDTH)
    blocks = [block() for _ in range(depth)]
    return {"embed": embed, "blocks": blocks, "head": embed if tied else leaf(vocab, WIDTH)}


def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A block without attention: two products."""
    return x + F.gelu(x @ p["up"]) @ p["down"]


def plain(_: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each block alike."""
    return block(p, x)


def loss(p: Any, batch: Tensor, each: Callable[..., Tensor] = plain) -> fshard.Mean:
    """A language model; `each(number, block, x)` is what it computes with a block."""
    x = F.embedding(batch[:, :-1], p["embed"])
    for number, parameters in enumerate(p["blocks"]):
        x = each(number, parameters, x)
    losses = F.cross_entropy((x @ p["head"].T).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return fshard.Mean(losses.sum(), losses.numel())


def two_losses(p: Any, batch: Tensor) -> Any:
    """A language model's loss, and a penalty on its head."""
    return loss(p, batch) + 0.1 * fshard.Mean(p["head"].square().sum(), 1)


def checkpointed(_: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each block is computed again in the backward."""
    result: Tensor = checkpoint(block, p, x, use_reentrant=False)
    return result


def start(
    whole: Any, loss_fn: Any = loss, mesh: Any = None, tx: Any = None, plan: Any = None, **kw: Any
) -> tuple[Any, Any, Tensor]:
    """A step, a state, and a batch on no device."""
    tx = tx or optim.adamw(1e-3)
    laid = fshard.make_plan(whole, mesh or AbstractMesh(shard=4), units=["blocks.*"], **(plan or {}))
    state = fshard.init_state(fshard.shard_params(whole, laid), tx)
    batch = torch.empty(4, 9, dtype=torch.int64, device="meta")
    return fshard.train_step(loss_fn, tx, **kw), state, batch


WEIGHTS = torch.ones(WIDTH)


def weighted(_: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Each block reads a tensor that is no argument."""
    return block(p, x * WEIGHTS)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # how parameters are made, how the step is, how it is jitted
    "transformer": ({}, {"clip_norm": 1.0}, {"donate": True}),
    "tied head": ({"tied": True}, {}, {"donate": True}),
    "head of 2.4 blocks": ({"vocab": 614, "depth": 11}, {}, {"donate": True}),
    "checkpointed": ({}, {"loss_fn": partial(loss, each=checkpointed)}, {"donate": True}),
    "a captured tensor": ({}, {"loss_fn": partial(loss, each=weighted)}, {"donate": True}),
    "two losses": ({}, {"loss_fn": two_losses}, {"donate": True}),
    "frozen": ({}, {"plan": {"frozen": ["embed", "blocks.*.up"]}}, {"donate": True}),
    "accumulated": ({}, {"accumulate": 2}, {"donate": True}),
    "in half": ({}, {"plan": {"policy": "compute=bf16"}}, {}),
    "in flight": ({}, {}, {"donate": True, "in_flight": 140_000}),
    **{name: ({}, {"plan": STRATEGIES[name]}, {"donate": True}) for name in ("ddp", "zero1", "zero2", "keep")},
}


def both(make: dict[str, Any], how: dict[str, Any], jitted: dict[str, Any]) -> tuple[Any, Any]:
    """What is said of a step, and of the same step in a partial, whose whole graph is lowered."""
    step, state, batch = start(params(**make), **how)
    options = {"bucket": 0, **jitted}
    return tuple(fshard.estimate(fshard.jit(fn, **options), state, batch) for fn in (step, partial(step)))


@pytest.mark.parametrize("name", CASES)
def test_a_few_units_say_what_all_say(name):
    """Figures that are computed from graphs of a few units would not be those of the whole graph, to the byte."""
    few, whole = both(*CASES[name])
    assert re.match(r"the graphs of (4, 5, 7 of 9|6, 7, 9 of 11) equal units blocks\.\*", few.graph), few.graph
    assert whole.graph.startswith("the whole graph"), whole.graph
    assert few.peak == whole.peak
    assert (few.memory, few.traffic) == (whole.memory, whole.traffic)


def last_differs(number: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """A block that the graphs of a few do not reach has one more product."""
    return block(p, x @ p["up"] @ p["down"] if number == DEPTH - 1 else x)


def some_checkpointed(number: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Blocks that the graphs of a few do not reach are computed again in the backward."""
    return checkpointed(number, p, x) if number >= 7 else block(p, x)


def hourglass(p: Any, batch: Tensor) -> Tensor:
    """The second half of the blocks reads what the first half made."""
    x, kept = F.embedding(batch[:, :-1], p["embed"]), list[Tensor]()
    for number, parameters in enumerate(p["blocks"]):
        if number < len(p["blocks"]) // 2:
            kept.append(x)
        x = block(parameters, x + kept.pop() if kept and number > len(p["blocks"]) // 2 else x)
    return (x @ p["head"].T).square().mean()


def grouped(number: int, p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every third block has one more product."""
    return block(p, x @ p["up"] @ p["down"] if number % 3 == 0 else x)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "the last differs": ({}, {"loss_fn": partial(loss, each=last_differs)}, {}),
    "some are checkpointed": ({}, {"loss_fn": partial(loss, each=some_checkpointed)}, {}),
    "hourglass": ({}, {"loss_fn": hourglass}, {}),
    "groups of three": ({}, {"loss_fn": partial(loss, each=grouped)}, {}),
    "merged collectives": ({}, {}, {"bucket": 1 << 20}),
    "joined units": ({}, {"plan": {"bucket": 200_000}}, {}),
    "few": ({"depth": 8}, {}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_units_that_differ_are_lowered_whole(name):
    """A loss that does something else with a unit that is not looked at would get the figures of another loss."""
    few, whole = both(*REFUSED[name])
    assert few.graph.startswith("the whole graph"), few.graph
    assert (few.peak, few.memory, few.traffic) == (whole.peak, whole.memory, whole.traffic)


def distilled(p: Any, batch: Tensor, teacher: Any) -> Tensor:
    """The loss of a model, weighted by that of another one, which has blocks of the same names."""
    return loss(p, batch).total * loss(teacher, batch).total


@pytest.mark.parametrize("depth", range(DEPTH + 3))
def test_what_two_trees_of_equal_names_send(depth):
    """The bytes that a shallower tree sends for its units would be said of all units of a deeper one."""

    def sent(*trees: int) -> Any:
        keys = Counter[Any]()
        for number in trees:
            keys.update(f"blocks.{unit}" for unit in range(number))
        return {("all_gather", name, "shard"): (8 * count, count) for name, count in keys.items()}

    stack = Stack("blocks", 0, DEPTH, tuple((f"blocks.{unit}",) for unit in range(DEPTH)))
    readings: Any = [SimpleNamespace(sent=sent(few, depth)) for few in (4, 5, 7)]
    try:
        said = planner._sent_by_all(readings, planner._Growth((4, 5, 7), DEPTH), stack)
    except planner._Uneven:
        assert 0 < depth < DEPTH
    else:
        assert said == sent(DEPTH, depth)
        assert not 4 < depth < DEPTH


@pytest.mark.parametrize("depth", [DEPTH - 1, DEPTH])
def test_another_tree_with_units_of_these_names(depth):
    """What ranks send for the blocks of a shallower teacher would be said of all blocks."""
    step, state, batch = start(params(), distilled)
    whole = params(depth)
    plan = fshard.make_plan(whole, AbstractMesh(shard=4), units=["blocks.*"], frozen="**")
    given = state, batch, fshard.shard_params(whole, plan)
    few, all_of = (fshard.estimate(fshard.jit(fn, True, bucket=0), *given) for fn in (step, partial(step)))
    assert few.graph.startswith("the graphs of" if depth >= DEPTH else "the whole graph"), few.graph
    assert (few.peak, few.memory, few.traffic) == (all_of.peak, all_of.memory, all_of.traffic)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_an_optimizer_with_state_of_its_own_shapes(name, capfd):
    """A graph of a few units would be asked for with the state of all, and torch would print an error of its own."""
    step, state, batch = start(params(), tx=ROWS[name].make())
    said = fshard.estimate(fshard.jit(step, True, bucket=0), state, batch)
    assert "the optimizer has state of its own shapes" in said.graph, said.graph
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", ["abcXYZ", "aabXcddY", "aXbXcX", "abab"])
def test_runs_of_equal_periods(text):
    """A place where lists have a period more would be missed, or taken to be elsewhere."""
    # lower-case letters are repeated once for each unit
    short, long, longer = ("".join(x * n if x.islower() else x for x in text) for n in (2, 3, 6))
    places = runs(short, long)
    assert places is not None
    assert "".join(map(str, expanded(short, places, 4))) == longer
    assert runs(short, long + "-") is None


@pytest.mark.parametrize("slope", [-3, 0, 2])
@pytest.mark.parametrize("uneven", [None, 0, 3, 6])
def test_the_most_is_at_a_node_that_has_an_image(slope, uneven):
    """The most of a graph of 30 would be at a node that none of the graphs of a few shows."""

    def row(depth: int, at: int) -> int:
        return 100 + 5 * depth + slope * at + 50 * (at == uneven)

    times = (0, 1, 3)
    graphs = [[{"x": row(4 + more, at)} for at in range(4 + more)] for more in times]
    places = images(graphs, "aaaa", [(4, 1)], times)
    if uneven in (3, 6):  # not at the same distance from an end in each of the graphs
        assert places is None or max(row(7, at) for at in range(7)) == max(row(7, x[-1]) for x in places)
        return
    assert places is not None
    growth = planner._Growth((4, 5, 7), 30)
    said = [growth.exact([graph[i]["x"] for graph, i in zip(graphs, image, strict=True)], "") for image in places]
    assert max(said) == max(row(30, at) for at in range(30))


def test_a_bump_between_the_ends_is_noticed():
    """Bytes that are larger in the middle of a graph, far from both ends, would be taken to lie on a line."""
    graphs = [[{"x": 100 + at + 50 * (len(graph) == 7 and at == 3)} for at in graph] for graph in map(range, (4, 5, 7))]
    assert images(graphs, "aaaa", [(4, 1)], (0, 1, 3)) is None


def test_what_does_not_grow_evenly_is_bounded():
    """A number that grows unevenly would be taken for exact, or for less than it may be."""
    growth = planner._Growth((4, 5, 7), 9)
    assert growth.bounded([10, 12, 16]) == (20, True)
    for numbers in ([10, 12, 17], [10, 13, 16], [10, 10, 11]):
        bound, is_exact = growth.bounded(numbers)
        assert not is_exact
        assert bound > numbers[-1] + 2 * (numbers[-1] - numbers[1]) / 2
    assert planner._Growth((0,), 0).bounded([7]) == (7, True)


def measured(mesh: Any, name: str = "full") -> tuple[Any, dict[str, int], Any]:
    """What is said of a step on a mesh, the bytes of its state, and what the step then sends."""
    whole, tx = params(3), optim.adamw(1e-3)
    plan = fshard.make_plan(whole, mesh, units=["blocks.*"], **STRATEGIES[name])
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    batch = torch.arange(36).view(4, 9) % 90
    step = fshard.train_step(loss, tx, clip_norm=1.0)
    said = fshard.estimate(fshard.jit(step, bucket=0), state, batch)
    nbytes = {"parameters": state.params, "optimizer": state.opt_state}
    held = {key: sum(x.nbytes for x in tree.leaves(value)) for key, value in nbytes.items()}
    with fshard.collectives.tally() as records:
        step(state, batch)
    sent: Counter[Any] = Counter()
    for record in (r for r in records if r.nbytes):
        sent[record.kind, record.label, record.axis] += record.nbytes
    assert {(row.kind, row.unit, row.axis): row.bytes for row in said.traffic} == sent
    assert {row.purpose: row.resident for row in said.memory if row.purpose in held} == held
    return said.to_dict()


@pytest.mark.parametrize("name", ["full", "zero1", "ddp"])
def test_state_and_traffic_are_those_of_ranks(name):
    """The bytes of state, or those that a rank sends, would be others than a rank has and sends."""
    simulated(partial(measured, name=name), shard=3)


def test_state_and_traffic_are_those_of_processes():
    """The same, with ranks that are processes."""
    gloo(measured, shard=2)


def allocated(fn: Callable[[], None]) -> int:
    """The most bytes that torch's CPU allocator has given out since a call began."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        fn()
    now = most = 0
    # private: the public events have no order of single allocations
    events = [x for x in profiler.profiler.kineto_results.events() if x.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measured_peak(mesh: Any, each: Callable[..., Tensor]) -> float:
    """The peak that is said of a jitted step, divided by what the allocator gives out."""
    one_host._LARGE = 1 << 60  # buffers in segments for messages are not the allocator's
    whole, tx = tree.map(lambda x: x.repeat(*[4] * x.dim()), params(6, vocab=200)), optim.adamw(1e-3)
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"])), tx)
    batch, step = (
        torch.arange(8 * 65).view(8, 65) % 800,
        fshard.jit(fshard.train_step(partial(loss, each=each), tx), True),
    )
    said = fshard.estimate(step, state, batch).peak.bytes
    state, _ = step(state, batch)
    before = sum(x.nbytes for x in tree.leaves((state, batch)))
    return said / (before + allocated(lambda: step(state, batch)))


@pytest.mark.parametrize("each", [plain, checkpointed])
def test_the_peak_is_that_of_processes(each):
    """A jitted step would take more memory than is said, or much less."""
    assert all(abs(ratio - 1) < 0.03 for ratio in gloo(measured_peak, each, shard=2))


def test_the_peak_and_what_is_there_then():
    """The peak would not be the sum of its rows, or name no unit, phase, line and tensors."""
    step, state, batch = start(params(3, vocab=9), loss_fn=partial(loss, each=checkpointed), tx=optim.sgd(0.1))
    said = fshard.estimate(fshard.jit(step, donate=True, bucket=0), state, batch)
    assert said.peak.bytes == sum(row.at_peak for row in said.memory)
    assert all(row.at_peak <= row.own_peak for row in said.memory)
    assert said.peak.phase == "backward"
    assert said.peak.unit.startswith("blocks.")
    (line,) = {t.line for t in said.peak.largest if t.operator == "add" and t.unit == "blocks.*" and t.line}
    source = re.fullmatch(r"(.*test_estimate\.py):(\d+)", line)
    assert source
    with open(source[1]) as file:
        assert "return x + F.gelu" in file.readlines()[int(source[2]) - 1]
    assert len(said.peak.largest) == 10
    sizes = [t.bytes for t in said.peak.largest]
    assert sizes == sorted(sizes, reverse=True)
    by_purpose = Counter[str]()
    for t in said.peak.largest:
        by_purpose[t.purpose] += t.bytes
    at_peak = {row.purpose: row.at_peak for row in said.memory}
    assert all(nbytes <= at_peak[purpose] for purpose, nbytes in by_purpose.items())


def test_it_prints_and_is_json():
    """A table would lack a row, or a program could not read the figures."""
    step, state, batch = start(params(2))
    said = fshard.estimate(step, state, batch)
    data = json.loads(json.dumps(said.to_dict()))
    assert set(data) == {"peak", "memory", "traffic", "device", "graph", "notes"}
    assert data["peak"]["bytes"] == said.peak.bytes
    assert data["traffic"][0] == said.traffic[0]._asdict()
    text = str(said)
    assert all(row.purpose in text for row in said.memory)
    assert all(word in text for word in ("all_gather", "reserved", "the CUDA context", "not jitted"))


def test_room():
    """A step would be said to fit where its lower bound does not, or not to fit where its upper bound does."""
    step, state, batch = start(params(2))
    device = fshard.estimate(fshard.jit(step), state, batch).device
    assert device.allocated.low < device.reserved.low < device.total.low < device.total.high
    at = {device.total.low - 1: "no", device.total.low: "likely", device.total.high: "yes"}
    assert {capacity: device.fits(capacity) for capacity in at} == at
    assert fshard.estimate(fshard.jit(step), *start(params(2), mesh=AbstractMesh(shard=1))[1:]).device.communicators[
        :2
    ] == (0, 0)


def test_any_function():
    """A function without sharded trees, or without a list of units, would not be estimated."""
    said = fshard.estimate(lambda x, y: (x @ y).sum(), rand(8, 4, seed=1), rand(4, 8, seed=2))
    assert said.peak.bytes == (32 + 32 + 64 + 1) * 8
    assert said.traffic == ()
    assert said.graph == "the whole graph: no list of equal units"


def test_arguments_are_real_or_fake_in_any_mixture():
    """What `eval_shape` returned in another call could not be an argument beside a state."""
    kinds = [lambda x: x, lambda x: x.to("meta"), partial(fshard.eval_shape, lambda x: x)]
    x, y = rand(8, 4, seed=1), rand(4, 8, seed=2)
    assert len({fshard.estimate(lambda x, y: (x @ y).sum(), a(x), b(y)).peak.bytes for a in kinds for b in kinds}) == 1


@pytest.mark.parametrize("name", ["params", "opt_state"])
def test_a_purpose_is_that_of_a_part_of_the_state(name):
    """A batch whose names are those of parts of a state would be counted as parameters."""
    step, state, batch = start(params(1), lambda p, batch: loss(p, batch[name]))
    said = fshard.estimate(fshard.jit(step), state, {name: batch})
    resident = {row.purpose: row.resident for row in said.memory}
    assert resident["arguments"] == batch.nbytes + 2 * 8  # the number of steps and the seed, too


ELEMENTWISE = [name for name, row in ROWS.items() if row.make().elementwise]


def updated(name: str) -> tuple[Any, Any, Tensor, int]:
    """A step that keeps its old state, jitted, its arguments, and the bytes of both states and all gradients."""
    whole, tx = [rand(64, 32, seed=seed, dtype=torch.float32) for seed in range(4)], ROWS[name].make()
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, None, block=ROWS[name].block)), tx)
    step = fshard.jit(fshard.train_step(lambda p, x: sum((x @ w).square().mean() for w in p), tx))
    changed = sum(x.nbytes for x in tree.leaves((state.params, state.opt_state)))
    batch = rand(1, 64, seed=2, dtype=torch.float32)
    return step, state, batch, 2 * changed + sum(w.nbytes for w in whole) + batch.nbytes


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_update_reads_all_gradients_until_it_has_written_all(name):
    """The loop of an update would be said to free its gradients before its last result is there."""
    step, state, batch, nbytes = updated(name)
    said = fshard.estimate(step, state, batch).peak
    assert (said.phase, nbytes <= said.bytes < nbytes + 200) == ("update", True), (said, nbytes)


@pytest.mark.parametrize("name", ["sgd-all", "adamw", "with_hyperparams-schedule"])
def test_the_peak_of_an_update_is_that_of_the_allocator(name):
    """A step that is compiled would take more for its update than is said, or much less."""
    step, state, batch, _ = updated(name)
    said = fshard.estimate(step, state, batch).peak.bytes
    state, _ = step(state, batch)
    before = sum(x.nbytes for x in tree.leaves((state, batch)))
    assert abs(said / (before + allocated(lambda: step(state, batch))) - 1) < 0.03


def test_a_step_that_is_not_jitted_says_so():
    """The figures of a graph would be taken for those of an eager step."""
    step, state, batch = start(params(2), donate=True)
    said, jitted = fshard.estimate(step, state, batch), fshard.estimate(fshard.jit(step, donate=True), state, batch)
    assert said.peak == jitted.peak
    assert [*set(said.notes) - set(jitted.notes)] == [planner.EAGER]
