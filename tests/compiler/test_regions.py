"""Equal regions of a graph are compiled once."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import batch, block, params
from support.memory import Live
from support.models import rand, same_bits
from support.steps import EXACT
from support.worlds import simulated
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.compiler.regions import Region, are_alike, driver, regions
from fshard.core.tree import tensors
from fshard.graph.inspect import operator


def by_block(step: Callable[..., Any]) -> Callable[[Any, Tensor], fshard.Mean]:
    """A loss of blocks, each of which is called by `step`."""

    def loss(p: Any, tokens: Tensor) -> fshard.Mean:
        x = p["embed"][tokens]
        for each in p["blocks"]:
            x = step(each, x)
        rows = (x @ p["head"]).square()
        return fshard.Mean(rows.sum(), rows.numel())

    return loss


def dropped(p: Any, x: Tensor) -> Tensor:
    """A block with dropout."""
    return block(p, torch.nn.functional.dropout(x, 0.2))


def again(p: Any, x: Tensor) -> Tensor:
    """A block that is computed again in the backward."""
    return checkpoint(dropped, p, x, use_reentrant=False)


def untrained(p: Any, x: Tensor) -> Tensor:
    """A block whose first matrix has no gradient."""
    return block({**p, "w": p["w"].detach()}, x)


PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero1": {"params_over": (), "grads_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "bf16": {"policy": "compute=bf16"},
    "frozen": {"frozen": ["blocks.*.b"]},
    "whole": {"whole": ["blocks.*.ln"]},
}
BLOCKS = {"plain": block, "dropout": dropped, "checkpoint": again, "detached": untrained}
OPTIMIZERS = {"rmsprop": EXACT, "adamw": optim.adamw(0.1), "muon": optim.muon(0.1)}
WAYS: dict[str, dict[str, Any]] = {
    "once": {},
    "accumulate": {"accumulate": 2},
    "scaled": {"clip_norm": 0.1},
}


def started(mesh: Any, layers: int, plan: str, called: str, tx: Any = EXACT, **kw: Any) -> tuple[Any, Any]:
    """A step of so many blocks, and its state."""
    whole = params(widths=(8,) * layers, dtype=torch.float32)
    laid = fshard.make_plan(whole, mesh, units=["blocks.*"], **PLANS[plan])
    state = fshard.init_state(fshard.shard_params(whole, laid), tx, seed=3)
    return fshard.train_step(by_block(BLOCKS[called]), tx, **kw), state


def given_batch(mesh: Any, number: int, kw: dict[str, Any]) -> Tensor:
    """A batch of this rank's; of micro-batches where steps accumulate."""
    tokens = (batch(mesh.get_rank()) + number) % 5
    return torch.stack([tokens, tokens.flip(0)]) if "accumulate" in kw else tokens


def names_in(text: str) -> list[str]:
    """The regions that a driver calls."""
    return re.findall(r"region_\d+(?=\()", text)


@pytest.mark.parametrize(("called", "how"), [*((called, {"bucket": 0}) for called in BLOCKS), ("plain", {})])
@pytest.mark.parametrize("plan", ["full", "keep", "bf16", "frozen", "whole"])  # which have a collective between layers
def test_compiling_does_not_grow_with_depth(plan: str, called: str, how: dict[str, int]) -> None:
    """Each layer would be compiled once more."""

    def job(mesh: Any, layers: int) -> list[str]:
        step, state = started(mesh, layers, plan, called)
        module = fshard.jit(step, **how).lower(state, batch(mesh.get_rank())).traced.module
        parts = regions(module)
        computed = [[operator(x) for x in part.graph.nodes] for part in parts if isinstance(part, Region)]
        assert all({*names} - {"output", "new_empty"} for names in computed), "a region that only allocates"
        return names_in(driver(module, parts, emptied).code)

    few, many = (simulated(job, layers)[0] for layers in (3, 5))
    assert len({*few}) == len({*many})
    assert len(many) > len(few)


def test_merged_units_are_compiled_once() -> None:
    """A region would have all units of a merged gather, and take longer to compile with each."""

    def job(mesh: Any, layers: int) -> int:
        step, state = started(mesh, layers, "full", "plain")
        parts = parts_of(step, state, batch(mesh.get_rank()))
        return sum(map(len, {part.key for part in parts if isinstance(part, Region)}))

    few, many = (simulated(job, layers)[0] for layers in (3, 5))
    assert few == many


def test_parts_of_one_unit_are_read_in_one_region() -> None:
    """A unit with frozen leaves has two merged gathers: a product and the sum after it would be compiled apart."""

    def job(mesh: Any, plan: str) -> int:
        step, state = started(mesh, 3, plan, "plain")
        return sum(isinstance(part, Region) for part in parts_of(step, state, batch(mesh.get_rank())))

    plain, frozen = (simulated(job, plan) for plan in ("full", "frozen"))
    assert plain == frozen


@settings(max_examples=2, deadline=None)
@given(
    *(st.sampled_from([*rows]) for rows in (PLANS, BLOCKS, OPTIMIZERS, WAYS)),
    st.booleans(),
    st.sampled_from([0, 10**9]),
)
def test_a_step_by_regions_has_the_bits_of_one_graph(plan, called, optimizer, way, donate, bucket) -> None:
    """A region would be called with the values of another layer, or write to a copy of what was donated."""

    def job(mesh: Any) -> None:
        step, first = started(mesh, 3, plan, called, OPTIMIZERS[optimizer], **WAYS[way])
        fast = fshard.jit(step, donate, backend="aot_eager", bucket=bucket)
        whole = fshard.jit(step, backend="eager", bucket=bucket)
        one, other = fshard.tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, first), first
        for number in range(2):
            one, row = fast(one, given_batch(mesh, number, WAYS[way]))
            other, expected = whole(other, given_batch(mesh, number, WAYS[way]))
            assert same_bits((one, row), (other, expected))

    simulated(job)


def emptied(module: fx.GraphModule) -> Callable[[list[Tensor]], Any]:
    """A region as it is, with nothing in memory that no node reads any more."""
    return lambda args: fx.Interpreter(module).boxed_run(args)


@pytest.mark.parametrize("called", BLOCKS)
@pytest.mark.parametrize("plan", PLANS)
def test_values_are_freed_where_one_graph_frees_them(plan: str, called: str) -> None:
    """A step would need more memory than as one graph: a value lives until its region returns, or its caller."""

    def job(mesh: Any) -> None:
        step, state = started(mesh, 3, plan, called)
        tokens = batch(mesh.get_rank())
        module = fshard.jit(step, donate=True, bucket=0).lower(state, tokens).traced.module
        calls = driver(module, regions(module), emptied)
        peaks = []
        for fn in (emptied(module), lambda args: calls.forward(*args)):
            with Live() as live, torch.no_grad():
                fn(tensors(fshard.tree.leaves((state, tokens))))
            peaks.append(live.peak)
        assert peaks[1] <= peaks[0]

    simulated(job)


def parts_of(fn: Callable[..., Any], *args: Any) -> list[fx.Node | Region]:
    """The regions of a function, and the nodes between."""
    return regions(fshard.jit(fn).lower(*args).traced.module)


def layers_of(each: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Three equal layers, with a collective after each."""

    def fn(mesh: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = fshard.all_reduce(each(x), mesh, "shard")
        return x

    return fn


def test_which_graphs_stay_whole() -> None:
    """Regions would draw other numbers than the graph, or read memory in which a bit is not applied."""

    def job(mesh: Any) -> None:
        x = rand(4, seed=mesh.get_rank())
        assert are_alike(parts_of(partial(layers_of(torch.tanh), mesh), x))
        assert parts_of(partial(layers_of(lambda x: x + torch.rand_like(x)), mesh), x) == []
        assert parts_of(partial(layers_of(lambda x: torch.complex(x, x).conj().imag.clone()), mesh), x) == []
        assert not are_alike(parts_of(lambda x: x.exp() @ x, x))

    simulated(job)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_lies_between_collectives(backend: str) -> None:
    """A view that is made before a collective and read after it, memory that is filled in two regions, results of one
    operator that are read in several, writes in place, and regions without inputs or results, would be lost."""

    def fn(mesh: Any, x: Tensor) -> list[Tensor]:
        made = []
        for n in range(3):
            values, where = x.sort(0)
            half, room = values.view(2, 2).t(), torch.empty(4)
            room[:2].copy_(half[0])
            x = fshard.all_reduce(values * 2, mesh, "shard")
            room[2:].copy_(half[1] + n)
            x = fshard.all_gather(x + where, mesh, "shard")[:4] + torch.ones(4)
            torch._assert_async((x == x).all())
            made += [room, x[1:], half.sum(0)]
            x = fshard.all_reduce(x.add_(1), mesh, "shard")
        return made

    def job(mesh: Any) -> None:
        x = rand(4, seed=mesh.get_rank())
        compiled = fshard.jit(lambda x: fn(mesh, x)).lower(x).compile(backend)
        assert names_in(compiled.as_text())
        assert same_bits(compiled(x), fn(mesh, x))

    simulated(job)


# what a compiler may take for `x` itself, though it is a tensor of its own
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + torch.zeros_like(x),
    "sub": lambda x: x - torch.zeros_like(x),
    "mul": lambda x: x * torch.ones_like(x),
    "div": lambda x: x / torch.ones_like(x),
    "numbers": lambda x: (x + 0) * 1,
    "power": lambda x: x**1,
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x])[0],
    "repeat": lambda x: x.repeat(1),
    "pad": lambda x: torch.constant_pad_nd(x, [0, 0]),
    "slice": lambda x: x[0:4].clone(),
    "view": lambda x: x.view(2, 2).view(4).clone(),
    "flip": lambda x: x.flip(0).flip(0),
    "roll": lambda x: torch.roll(x, 0),
    "cast": lambda x: x.to(torch.float64).to(torch.float32),
    "copy": lambda x: x.to(torch.float32, copy=True),
    "where": lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, torch.zeros_like(x)),
    "index": lambda x: x.index_select(0, torch.arange(4)),
    "negative": lambda x: x.neg().neg(),
}


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor")])
def test_copies_lie_apart(backend: str, is_result: bool) -> None:
    """A result would change with the donated argument, or with another result, that it is equal to."""

    def fn(mesh: Any, state: list[Tensor]) -> Any:
        a, b = state
        x = b * 3 if is_result else b
        made = [copy(x) for copy in COPIES.values()]
        y = fshard.all_reduce(x * 2, mesh, "shard")
        z = fshard.all_reduce(y * 2, mesh, "shard")
        last = fshard.all_reduce(z * 2, mesh, "shard")
        for each in made[::2]:
            each.mul_(last)
        return [z, y], x, made, last * a

    def job(mesh: Any) -> None:
        given = [rand(4, seed=mesh.get_rank() + n, dtype=torch.float32) for n in range(2)]
        expected = fn(mesh, [x.clone() for x in given])
        run = fshard.jit(partial(fn, mesh), True, backend=backend, bucket=0)
        new, x, made, last = run([x.clone() for x in given])
        assert same_bits((new, x, last), (expected[0], expected[1], expected[3]))
        assert [name for name, a, b in zip(COPIES, made, expected[2], strict=True) if not same_bits(a, b)] == []

    simulated(job)


def test_what_is_written_in_another_dtype() -> None:
    """A region would be given a value and a view of another dtype of the same memory, to which it writes."""

    def fn(mesh: Any, x: Tensor) -> list[Tensor]:
        made = []
        for _ in range(2):
            y = x * 2
            bits = y.view(torch.int32).add_(1)
            total = fshard.all_reduce(x, mesh, "shard")
            bits.add_(5)
            x = fshard.all_reduce(y + total, mesh, "shard")
            made += [y, bits]
        return made

    def job(mesh: Any) -> None:
        x = rand(4, seed=mesh.get_rank(), dtype=torch.float32)
        assert same_bits(fshard.jit(partial(fn, mesh), backend="aot_eager")(x), fn(mesh, x))

    simulated(job)


def test_the_text_of_a_driver() -> None:
    """A reader would not see what runs."""

    def job(mesh: Any) -> None:
        x = rand(4, seed=mesh.get_rank())
        lowered = fshard.jit(partial(layers_of(torch.tanh), mesh)).lower(x)
        text = lowered.compile("aot_eager").as_text()
        assert names_in(text) == ["region_0"] * 3
        assert text.count("torch.ops.fshard.wait") == 3
        assert "= None" in text
        assert lowered.compile("eager").as_text() == lowered.as_text()

    simulated(job)
