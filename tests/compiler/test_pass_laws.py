"""Each pass, alone and with the others, keeps what Note [What a pass must keep] says, whatever the function."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.graphs import DERIVATIVES, EVERYTHING, given_to, graph_of, state_of, targets
from support.models import rand, same_bits
from support.worlds import simulated
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fshard
from fshard.compiler.lowered import PASSES, Compiled, Lowered, Options, Pass, Setting
from fshard.compiler.regions import driver, regions
from fshard.graph.dataflow import VIEWS
from fshard.graph.inspect import arguments, operator, starts, values
from fshard.graph.memory import storages_of
from fshard.graph.passes import fix_places
from fshard.testing import World

# Options that let every pass do as much as it can.
BUSY = Options(in_flight=EVERYTHING, bucket=EVERYTHING)
SETTINGS = {"default": Options(), "in flight": Options(in_flight=EVERYTHING), "busy": BUSY}

# `fix_places` runs where Inductor makes CUDA graphs.
EVERY = (*PASSES, Pass("fix_places", lambda graph, _: fix_places(graph)))

Program = Sequence[tuple[str, int, int]]


def collectives_of(lowered: Lowered) -> list[tuple[Any, ...]]:
    """The collectives that a rank starts, in order: operator, unit, axis, bytes."""
    known = [(operator(node), arguments(node)) for node in starts(lowered.graph)]
    return [(name, given["label"], given["axis"], given["nbytes"]) for name, given in known]


def overlap(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes hold tensors with common elements."""
    if not set(storages_of(node)) & set(storages_of(other)):
        return False
    ends = [extent(x) for x in (values(node)[0], values(other)[0])]
    return max(first for first, _ in ends) < min(end for _, end in ends)


def extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and one past the last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.storage_offset() * x.itemsize, (x.storage_offset() + last + 1) * x.itemsize


def check_kept(lowered: Lowered, expected: Any, args: Sequence[Any]) -> None:
    """Every line of the Note that one rank can check."""
    graph = lowered.graph
    graph.lint()
    order = {node: i for i, node in enumerate(graph.nodes)}
    waits = [node for node in order if operator(node) == "fshard.wait"]
    assert len(waits) == len(starts(graph)), "each collective has one wait"
    for wait in waits:
        began = order[wait.args[1]]  # the ticket
        views = [node for node in order if overlap(node, wait.args[0])]
        readers = {user for node in views for user in node.users if operator(user) not in VIEWS} - set(views)
        early = [user for user in readers if began < order[user] < order[wait]]
        assert not early, "a reader comes before the wait"
    assert not [node for node in order if node.op == "call_function" and node.users and "val" not in node.meta]
    torch.manual_seed(0)
    assert same_bits(lowered.compile("eager")(*args), expected)
    if parts := regions(lowered.traced.module):
        calls = driver(lowered.traced.module, parts, lambda region: region.forward)
        assert same_bits(Compiled(lowered.interface, calls.forward, calls.code)(*args), expected)


def keeps(chosen: Sequence[Pass], options: Options, fn: Callable[..., Any], *args: Any) -> list[tuple[Any, ...]]:
    """Apply passes to the graph of a function; return the collectives that are left."""
    torch.manual_seed(0)
    expected, lowered = fn(*args), graph_of(fn, *args)
    asserts = targets(lowered.graph)["_assert_async"]
    plan = fshard.make_plan({"blocks": [torch.ones(1), torch.ones(1)]}, units=["blocks.*"])
    setting = Setting([plan], options)
    for each in chosen:
        each.apply(lowered.graph, setting)
    check_kept(lowered, expected, args)
    assert targets(lowered.graph)["_assert_async"] == asserts
    return collectives_of(lowered)


# --- each pass alone, over derivatives and a step ---

FUNCTIONS = [*DERIVATIVES, "step"]


def function(name: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function by name, and its arguments on this rank."""
    if name == "step":
        step, *args = state_of(mesh)
        return step, tuple(args)
    return DERIVATIVES[name], given_to(DERIVATIVES[name], mesh)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("number", range(len(EVERY)), ids=[each.name for each in EVERY])
def test_each_pass_alone_keeps_what_functions_compute(number, name):
    """A pass would need the passes before it to be right, or change a value, without an error."""

    def law(mesh: Any) -> list[Any]:
        fn, args = function(name, mesh)
        return keeps(EVERY[number : number + 1], BUSY, fn, *args)

    first, *others = simulated(law)
    assert others == [first] * len(others)


def test_the_page_lists_all_passes_in_order():
    """The table of docs/compile.md would leave out a pass, or tell another order."""
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    table = page[page.index("| pass | what it does |") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [each.name for each in PASSES]


def test_an_operator_of_another_library_is_not_one_of_torch():
    """A user's operator `mine::view` would be taken for a view, and its reader for no reader."""
    graph = make_fx(lambda x: torch.ops.fshard.materialize(x).view(-1))(torch.zeros(())).graph
    assert [operator(node) for node in graph.nodes if node.op == "call_function"] == ["fshard.materialize", "view"]
    with torch.library._scoped_library("mine", "FRAGMENT") as library:
        library.define("view(Tensor x) -> Tensor")
        library.impl("view", torch.clone, "CompositeExplicitAutograd")
        graph = make_fx(lambda x: torch.ops.mine.view(x))(torch.zeros(3)).graph
    assert [operator(node) for node in graph.nodes if node.op == "call_function"] == ["mine.view"]


# --- random programs: each operation reads what an operation before it returned ---

OPERATIONS = ("gather", "gather a", "reduce", "reduce a", "scatter", "scatter a", "swap", "add", "cut", "write")
OPERATIONS = (*OPERATIONS, "draw", "check", "shift", "deal")


def dealt(x: Tensor, mesh: Any, axis: str, label: str = "") -> Tensor:
    """An all-to-all of parts of different sizes: all but a row for each other rank goes to the next rank."""
    rank, size = mesh.get_local_rank(axis), mesh.size(axis)
    lengths = [[len(x) - size + 1 if peer == (one + 1) % size else 1 for peer in range(size)] for one in range(size)]
    return fshard.all_to_all(x, mesh, axis, label, sizes=(lengths[rank], [row[rank] for row in lengths]))


def run(mesh: Any, program: Program, x: Tensor) -> list[Tensor]:
    """Run a program on tensors of shape (4,)."""
    world = mesh.size("shard")
    made = [x, x * 2]
    for called, i, j in program:
        name, _, label = called.partition(" ")  # collectives with a label may be moved, merged and dropped
        a, b = made[-1 - i % len(made)], made[-1 - j % len(made)]
        row = torch.cat([a, b] * world)[: 4 * world]
        if name == "gather":
            made.append(fshard.all_gather(a, mesh, "shard", label=label)[4 * (j % world) :][:4] * 1.5)
        elif name == "reduce":
            made.append(fshard.all_reduce(a, mesh, "shard", label=label))
        elif name == "scatter":
            made.append(fshard.reduce_scatter(row, mesh, "shard", label=label))
        elif name == "swap":
            made.append(fshard.all_to_all(row, mesh, "shard")[:4])
        elif name == "shift":
            made.append(fshard.shift(a, mesh, "shard", j - 1))
        elif name == "deal":
            made.append(dealt(row, mesh, "shard")[:4])
        elif name == "write":
            made[-1 - i % (len(made) - 1)].add_(b)  # not to the argument
        elif name == "draw":
            made.append(a + torch.rand_like(b))
            torch.rand_like(b)  # read by nothing, and the numbers after it are others without it
        elif name == "check":
            torch._assert_async((a == a).all(), "a value is NaN")
        elif name == "cut":
            made.append(a[:2].repeat(2))
        else:
            made.append(torch.sigmoid(a) + b.sum())
    return made[1:]


recent = st.integers(0, 2)  # the value before is read most often: chains of collectives
programs = st.lists(st.tuples(st.sampled_from(OPERATIONS), recent, recent), min_size=3, max_size=10)


@given(programs)
@example([("gather", 0, 0), ("reduce", 1, 0), ("gather", 0, 0)])  # the second gather sends what was reduced
# gathers that are merged, one of which sends what was reduced, and then reductions that are merged
@example([("reduce a", 0, 0), ("gather a", 0, 0), ("gather a", 1, 0), ("reduce a", 0, 0)])
@example([("shift", 0, 0), ("deal", 0, 0), ("shift", 0, 1), ("deal", 1, 0), ("shift", 0, 2)])
@example([("draw", 0, 0), ("check", 0, 0), ("add", 0, 0), ("gather", 0, 0), ("draw", 0, 1)])
@settings(max_examples=8, deadline=None)
def test_passes_keep_what_random_programs_compute(program):
    """A pass would move a collective before the value that it sends, or past a write, without an error."""

    def law(mesh: Any) -> list[Any]:
        fn, x = partial(run, mesh, program), rand(4, seed=mesh.get_rank())
        every = [(PASSES, options) for options in SETTINGS.values()] + [(EVERY, BUSY)]
        return [keeps(chosen, options, fn, x) for chosen, options in every]

    first, *others = simulated(law)
    assert others == [first] * len(others)


# --- programs in which what a rank does with a result depends on the rank ---

COLLECTIVES: dict[str, Callable[..., Tensor]] = {
    "gather": fshard.all_gather,
    "reduce": fshard.all_reduce,
    "max": partial(fshard.all_reduce, op="max"),
    "scatter": fshard.reduce_scatter,
    "swap": fshard.all_to_all,
    "deal": dealt,
    "shift": partial(fshard.shift, wrap=False),
    "broadcast": partial(fshard.broadcast, src=1),
}
NEVER = 9

Reading = Sequence[tuple[str, int, int]]


def read_differently(mesh: Any, program: Reading, x: Tensor) -> Tensor:
    """Call the same collectives on all ranks. Each rank reads a result as many calls later as the program says."""
    results, total = list[Tensor](), x.sum()
    for number, (name, *_) in enumerate(program):
        results.append(COLLECTIVES[name](x * (number + 1) + total, mesh, "shard"))
        for read, (_, *later) in enumerate(program[: number + 1]):
            if read + later[mesh.get_rank() % len(later)] == number:
                total = total + results[read].mean() / (read + 2)
    return total


when = st.sampled_from([0, 1, 2, NEVER])
readings = st.lists(st.tuples(st.sampled_from([*COLLECTIVES]), when, when), min_size=2, max_size=5)


@given(readings)
@example([("gather", 1, 2), ("gather", 0, 0), ("swap", NEVER, NEVER)])  # two results are read in either order
@example([("gather", 1, NEVER), ("gather", NEVER, 0)])  # each rank reads one
@example([("reduce", 2, NEVER), ("reduce", 0, 1), ("gather", NEVER, 0)])  # one rank's sums can be merged
@example([("reduce", 2, 2), ("max", 1, 1), ("reduce", 0, 0)])  # a sum and a maximum cannot be merged
@settings(max_examples=6, deadline=None)
def test_ranks_may_read_results_in_any_order_or_not_at_all(program):
    """A graph would drop or reorder collectives by what its own rank reads, and exchange two results without an
    error."""

    def law(mesh: Any) -> list[str]:
        fn, x = partial(read_differently, mesh, program), rand(3 * 2048, seed=mesh.get_rank())  # two stages in a sum
        return [name for options in (Options(), BUSY) for name, *_ in keeps(PASSES, options, fn, x)]

    assert simulated(law, shard=3) == [[KINDS[name] for name, *_ in program] * 2] * 3


KINDS = {"gather": "fshard.all_gather", "reduce": "fshard.all_reduce", "scatter": "fshard.reduce_scatter"}
KINDS["max"] = KINDS["reduce"]
KINDS |= dict.fromkeys(["swap", "deal", "shift", "broadcast"], "fshard.exchange")


@pytest.mark.parametrize("ops", [("sum", "max"), ("max", "min"), ("min", "sum")])
def test_reductions_of_two_kinds_are_not_merged(ops):
    """Both would be sums, or both maxima."""

    def both(mesh: Any, x: Tensor) -> list[Tensor]:
        return [fshard.all_reduce(x * n, mesh, "shard", op, label=op) for n, op in enumerate(ops, start=2)]

    def law(mesh: Any) -> None:
        fn, x = partial(both, mesh), rand(3, seed=mesh.get_rank())
        lowered = fshard.jit(fn, backend="eager", bucket=EVERYTHING, in_flight=EVERYTHING).lower(x)
        assert [label for _, label, *_ in collectives_of(lowered)] == list(ops)
        assert same_bits(lowered.compile("eager")(x), fn(x))

    simulated(law)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_compiler_keeps_a_collective_that_one_rank_reads(name):
    """A compiler would remove the collective on the other rank: its peer would get the result of the next one."""

    def job(mesh: Any) -> tuple[Tensor, Tensor]:
        fn, x = partial(read_differently, mesh, [(name, 1, NEVER), (name, NEVER, 0)]), rand(4, seed=mesh.get_rank())
        return fshard.jit(fn, backend="aot_eager")(x), fn(x)

    for late in (False, True):
        for jitted, expected in World(shard=2, late=late).run(job):
            assert same_bits(jitted, expected)


def test_the_order_of_collectives_is_in_the_graph():
    """A compiler would order collectives by the nodes around them, which differ between ranks."""

    def law(mesh: Any) -> None:
        program = [(name, NEVER, 0) for name in COLLECTIVES]
        lowered = fshard.jit(partial(read_differently, mesh, program), backend="eager").lower(rand(6, seed=1))
        called = starts(lowered.graph)
        for start, after in pairwise(called):
            assert start in arguments(after)["after"].all_input_nodes or start is arguments(after)["after"]

    simulated(law)
