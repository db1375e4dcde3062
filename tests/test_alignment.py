"""Where leaves start: at multiples of 16 bytes, in whatever dtype a flat buffer is held, and in every message."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import same_bits
from support.optimizers import TRANSFORMS
from support.worlds import simulated
from test_laws import examples
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import optim, tree
from fshard.comm import primitives, reduction
from fshard.core import bits
from fshard.layout import norms
from fshard.layout.pieces import pieces
from fshard.sharding import transfer
from fshard.testing import strategies
from fshard.wire import Cast, Float8, Identity, Int8, LowRank, TopK


def odd_params() -> Any:
    """A scalar, an odd bias and an odd matrix before what is multiplied."""
    blocks = [{"odd": torch.ones(10), "w": torch.ones(8, 8)}, {"odd": torch.ones(3, 5), "w": torch.ones(8, 4)}]
    return {"gate": torch.tensor(1.0), "blocks": blocks, "last": torch.ones(7)}


def held_in(plan: fshard.Plan, kind: int) -> set[torch.dtype]:
    """Every dtype that a flat buffer of a kind is ever held in."""
    dtypes = {transfer.buffer_dtype(plan, kind), *vars(plan.kinds[kind].precision).values()}
    return dtypes | {primitives.sum_dtype(dtype) for dtype in dtypes}


@examples(40)
@given(st.data())
def test_every_leaf_starts_at_16_bytes(data):
    """In every dtype, and at a whole block; padding is less than 16 bytes of the narrowest dtype, or a block."""
    params = data.draw(strategies.trees(strategies.DTYPES), "params")
    chosen = data.draw(strategies.plans(params, strategies.policies()), "plan")
    mesh = fshard.AbstractMesh(**data.draw(strategies.meshes(), "mesh"))
    plan = fshard.make_plan(params, mesh, **chosen)
    for slot in plan.slots:
        assert slot.start % plan.block == 0
        for dtype in held_in(plan, slot.kind):
            assert slot.start * dtype.itemsize % 16 == 0, (slot, dtype)
    for (unit, kind), slots in plan.places.items():
        step = math.lcm(-(-16 // plan.kinds[kind].precision.itemsize), plan.block)
        ends = [*(slot.start for slot in slots[1:]), -(-(slots[-1].start + slots[-1].numel) // step) * step]
        assert all(0 <= end - slot.start - slot.numel < step for slot, end in zip(slots, ends, strict=True))
        assert 0 <= plan.units[unit].lengths[kind] - ends[-1] < step * mesh.size()


def pointers(x: Any) -> set[int]:
    """How far from a multiple of 16 bytes the leaves of a tree lie."""
    return {leaf.data_ptr() % 16 for leaf in tree.leaves(x) if isinstance(leaf, torch.Tensor)}


def seen_by_a_loss(mesh: Any, plan: dict[str, Any]) -> set[int]:
    """Where the leaves that a loss sees lie, and those that are gathered after a step."""
    params, found = odd_params(), set[int]()

    def loss(p: Any, batch: torch.Tensor) -> fshard.Sum:
        whole = tree.map(lambda x: x, p)
        found.update(pointers(whole))
        return fshard.Sum(sum(x.double().square().sum() for x in tree.leaves(whole)) * batch.sum())

    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["blocks.*"], **plan))
    step = fshard.train_step(loss, optim.adamw(0.1), clip_norm=1.0)
    state, _ = step(fshard.init_state(sharded, optim.adamw(0.1)), torch.ones(2))
    return found | pointers(fshard.gather_params(state.params))


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "whole": {"whole": "**.odd"},
    "half": {"policy": "compute=bf16"},
    "double": {"policy": "compute=f64; **.odd: compute=bf16"},
    "together": {"policy": "compute=bf16; **.odd: compute=f32", "together": True},
    "wires": {"param_wire": fshard.wire.Int8(), "grad_wire": fshard.wire.Float8()},
    "cast": {"param_wire": fshard.wire.Cast(torch.bfloat16)},
    "blocks": {"block": 3},
    "host": {"host": "**.odd"},
}


def test_gathered_leaves_start_at_16_bytes():
    """In every plan, on one rank and on three: what a loss multiplies, and what is gathered of the result."""
    for name, plan in CASES.items():
        for num in (1, 3):
            assert simulated(seen_by_a_loss, plan, shard=num) == [{0}] * num, name


def norms_of_ones(mesh: Any, plan: dict[str, Any]) -> list[float]:
    """Norms of a tree of ones: what lies between its leaves is NaN."""
    sharded = fshard.shard_params(odd_params(), fshard.make_plan(odd_params(), mesh, units=["blocks.*"], **plan))
    ones = tree.map(lambda x: x / x, sharded)
    found = [fshard.optim.global_norm(ones, p, exact) for exact in (False, True) for p in (1, 2, math.inf)]
    return [x.item() for x in (*found, norms.gram([ones, ones])[0, 1])]


def test_what_lies_between_leaves_counts_in_no_norm():
    """A function of elements may make anything of the zeros there."""
    numel = sum(leaf.numel() for leaf in tree.leaves(odd_params()))
    expected = [numel, numel**0.5, 1.0] * 2 + [numel]
    for name in ("full", "ddp", "whole", "double", "blocks"):
        for num in (1, 2, 3):
            for found in simulated(norms_of_ones, CASES[name], shard=num):
                assert torch.allclose(torch.tensor(found), torch.tensor(expected)), (name, num, found)
    assert torch.allclose(torch.tensor(norms_of_ones(None, {})), torch.tensor(expected))


def poisoned(x: Any) -> Any:
    """A tree whose flat rows are NaN wherever they hold no leaf: what `g / |g|` makes of the zeros there."""
    made = tree.map(lambda row: torch.full_like(row, math.nan), x)
    for (_, piece), (_, kept) in zip(pieces(made), pieces(x), strict=True):
        piece.copy_(kept)
    return made


def gathered_beside_nan(mesh: Any, wire: Any) -> bool:
    """Whether leaves gathered by a wire, in a loss and outside, are the same bits whatever lies between them."""
    params = tree.map(lambda x: torch.linspace(0.1, 1.0, x.numel()).view(x.shape), odd_params())
    plan = fshard.make_plan(params, mesh, units=["blocks.*"], param_wire=wire)
    clean = fshard.shard_params(params, plan)
    results = []
    for sharded in (clean, poisoned(clean)):
        loss = fshard.value_and_grad(lambda p: fshard.Sum(sum((x**2).sum() for x in tree.leaves(tree.map(abs, p)))))
        results.append((fshard.gather_params(sharded), loss(sharded)[0]))
    return same_bits(*results)


@pytest.mark.parametrize("wire", [Int8(4), Float8(), TopK(0.5, False), LowRank(1, False), None])
def test_nan_between_leaves_reaches_no_leaf_by_a_wire(wire):
    """A wire's scales are of blocks, of a leaf with what follows it, or of all that is sent."""
    for num in (1, 2, 3):
        assert all(simulated(gathered_beside_nan, wire, shard=num)), num


def updated_beside_nan(mesh: Any, name: str) -> bool:
    """Whether updates and states of leaves are the same bits whatever lies between gradients and between parameters."""
    plan = fshard.make_plan(odd_params(), mesh, units=["blocks.*"], block=4)
    params = fshard.shard_params(tree.map(lambda x: x + 0.5, odd_params()), plan)
    grads = [fshard.shard_params(tree.map(lambda x, i=i: x * (1 + i), odd_params()), plan) for i in range(2)]
    results = []
    for dirt in (lambda x: x, poisoned):
        tx = TRANSFORMS[name]()
        p, state = dirt(params), tx.init(params)
        for g in grads:
            updates, state = tx.update(dirt(g), state, p)
            p = dirt(optim.apply_updates(p, updates))
        results.append(([piece for _, piece in pieces(p)], optim.gather_state(state)))
    return same_bits(*results)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nan_between_leaves_reaches_no_leaf_by_an_optimizer(name):
    """What a chain's earlier transformations, or a user's functions of elements, leave there."""
    for num in (1, 3):
        assert all(simulated(updated_beside_nan, name, shard=num)), num


class PlusOne(reduction.Sums):
    """A hook that makes ones of zeros."""

    def after(self, grads: torch.Tensor, unit: str) -> torch.Tensor:
        return grads + 1


def after_a_hook(mesh: Any) -> tuple[float, float]:
    """The norm in a step's metrics, and the sum of this rank's gradients, with what lies between them."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return p["gate"] * 0 * x.sum()

    sharded = fshard.shard_params(odd_params(), fshard.make_plan(odd_params(), mesh, units=["blocks.*"]))
    step = fshard.train_step(loss, optim.sgd(0.1), reduction=PlusOne())
    _, metrics = step(fshard.init_state(sharded, optim.sgd(0.1)), torch.ones(2))
    _, grads = fshard.value_and_grad(loss, reduction=PlusOne())(sharded, torch.ones(2))
    return metrics["grad_norm"].item(), sum(row.sum().item() for row in grads.tensors)


def test_what_a_hook_makes_lies_in_leaves_alone():
    """On one device too, which adds nothing up."""
    numel = sum(leaf.numel() for leaf in tree.leaves(odd_params()))
    assert after_a_hook(None) == (pytest.approx(numel**0.5), numel)
    for num in (1, 2, 3):
        found = simulated(after_a_hook, shard=num)
        assert [norm for norm, _ in found] == [pytest.approx(numel**0.5)] * num
        assert sum(total for _, total in found) == numel


def of_an_optimizer(mesh: Any) -> set[int]:
    """Where whole leaves lie that an optimizer sees on the rank that owns them, and those that come out of ZeRO."""
    params, found = odd_params(), set[int]()

    def update(grads: Any, state: Any, params: Any = None, **_: Any) -> Any:
        found.update(pointers([grads, params]))
        return grads, state

    watching = SimpleNamespace(init=lambda params: (), update=update)
    whole = optim.whole_leaves(watching)
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
    whole.update(sharded, whole.init(sharded), sharded)
    for partition, grads in product(("flat", "leaf"), ("reduced", "local")):
        for inner in (optim.adamw(0.1), watching):
            tx = fshard.zero(inner, mesh, partition, grads)
            found.update(pointers(tx.step(params, tx.init(params), params)[0]))
    return found


def test_whole_leaves_of_optimizers_start_at_16_bytes():
    """In messages to owners, in sums over other axes, in ZeRO's buckets and in its messages from owners."""
    for num in (1, 2, 3):
        assert simulated(of_an_optimizer, shard=num) == [{0}] * num
        assert simulated(of_an_optimizer, shard=num, replicate=2) == [{0}] * 2 * num


WIRES = [
    *(Int8(16), Int8(), Float8(), TopK(0.3), TopK(0.9)),
    *(LowRank(1), LowRank(3), Cast(torch.bfloat16), Identity()),
]


class Starts(TorchDispatchMode):
    """How far from a multiple of 16 bytes what operators compute with starts."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Noted of all but views."""
        if not func.is_view:
            self.found |= pointers([x for x in tree.leaves([args, kwargs]) if isinstance(x, torch.Tensor) and x.dim()])
        return func(*args, **(kwargs or {}))


@examples(30)
@given(st.sampled_from(WIRES), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3))
def test_what_wires_decode_starts_at_16_bytes(wire, sizes, num_ranks):
    """In each rank's part of what is received, where leaves start at 16 bytes of codes of one byte."""
    sizes = [16 * size for size in sizes]
    encoded = wire.encode(torch.arange(1.0, sum(sizes) + 1), sizes)
    received = encoded.new_empty(num_ranks, len(encoded)).copy_(encoded)
    with Starts() as starts:
        for part in received:
            wire.decode(part, sizes)
    assert starts.found <= {0}


@examples(50)
@given(st.lists(st.tuples(st.sampled_from(strategies.DTYPES), st.integers(0, 9)), max_size=6))
def test_packed_tensors_start_at_16_bytes(held):
    """Any dtypes, in any order, come back to the bit, in as many bytes as are said."""
    tensors = [torch.arange(numel).to(dtype) for dtype, numel in held]
    data = bits.pack(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
    assert data.nbytes == bits.packed_size(held)
    found = bits.unpack(data, held)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, tensors, strict=True))
    assert pointers([x for x in found if len(x)]) <= {0}
