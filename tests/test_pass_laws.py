"""Each pass, alone and with the others, keeps what Note [What a pass must keep] says, whatever the function."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.graphs import DERIVATIVES, EVERYTHING, given_to, graph_of, state_of
from support.models import rand, same_bits
from support.worlds import simulated
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import fshard
from fshard.compiler.dataflow import VIEWS
from fshard.compiler.inspect import arguments, operator, starts, values
from fshard.compiler.lowered import PASSES, Lowered, Options, Pass, Setting
from fshard.compiler.memory import storages_of

# Options that let every pass do as much as it can.
BUSY = Options(in_flight=EVERYTHING, budget=1, bucket=EVERYTHING)
SETTINGS = {"default": Options(), "in flight": Options(in_flight=EVERYTHING), "busy": BUSY}

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
    assert same_bits(lowered.compile("eager")(*args), expected)


def keeps(chosen: Sequence[Pass], options: Options, fn: Callable[..., Any], *args: Any) -> list[tuple[Any, ...]]:
    """Apply passes to the graph of a function; return the collectives that are left."""
    expected, lowered = fn(*args), graph_of(fn, *args)
    setting = Setting(["blocks.0", "blocks.1"], lowered.holds(), options)
    for each in chosen:
        each.apply(lowered.graph, setting)
    check_kept(lowered, expected, args)
    return collectives_of(lowered)


# --- each pass alone, over derivatives and a step ---

FUNCTIONS = [*DERIVATIVES, "step"]


def function(name: str, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function by name, and its arguments on this rank."""
    if name == "step":
        step, *args = state_of(mesh)
        return step, tuple(args)
    return DERIVATIVES[name], given_to(DERIVATIVES[name], mesh)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("number", range(len(PASSES)), ids=[each.name for each in PASSES])
def test_each_pass_alone_keeps_what_functions_compute(number, name):
    """A pass would need the passes before it to be right, or change a value, without an error."""

    def law(mesh: Any) -> list[Any]:
        fn, args = function(name, mesh)
        return keeps(PASSES[number : number + 1], BUSY, fn, *args)

    first, *others = simulated(law)
    assert others == [first] * len(others)


def test_the_page_lists_all_passes_in_order():
    """The table of docs/compile.md would leave out a pass, or tell another order."""
    page = (Path(__file__).parent.parent / "docs" / "compile.md").read_text()
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

OPERATIONS = ("gather", "gather", "reduce", "scatter", "swap", "add", "cut", "write")


def run(mesh: Any, program: Program, x: Tensor) -> list[Tensor]:
    """Run a program on tensors of shape (4,)."""
    world = mesh.size("shard")
    made = [x, x * 2]
    for name, i, j in program:
        a, b = made[-1 - i % len(made)], made[-1 - j % len(made)]
        row = torch.cat([a, b] * world)[: 4 * world]
        if name == "gather":
            made.append(fshard.all_gather(a, mesh, "shard")[4 * (j % world) :][:4] * 1.5)
        elif name == "reduce":
            made.append(fshard.all_reduce(a, mesh, "shard"))
        elif name == "scatter":
            made.append(fshard.reduce_scatter(row, mesh, "shard"))
        elif name == "swap":
            made.append(fshard.all_to_all(row, mesh, "shard")[:4])
        elif name == "write":
            made[-1 - i % (len(made) - 1)].add_(b)  # not to the argument
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
@example([("reduce", 0, 0), ("gather", 0, 0), ("gather", 1, 0), ("reduce", 0, 0)])
@settings(max_examples=25, deadline=None)
def test_passes_keep_what_random_programs_compute(program):
    """A pass would move a collective before the value that it sends, or past a write, without an error."""

    def law(mesh: Any) -> list[Any]:
        fn, x = partial(run, mesh, program), rand(4, seed=mesh.get_rank())
        return [keeps(PASSES, options, fn, x) for options in SETTINGS.values()]

    first, *others = simulated(law)
    assert others == [first] * len(others)
