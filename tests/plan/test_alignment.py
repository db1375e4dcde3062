"""Where leaves start: at multiples of 16 bytes, in whatever dtype a flat buffer is held, and in every message."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from support.examples import examples
from support.models import same_bits
from support.optimizers import TRANSFORMS
from support.wires import FIRST, WIRES
from support.worlds import simulated
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import optim, tree
from fshard.comm import primitives, reduction
from fshard.core import storage
from fshard.grad import travel
from fshard.layout import norms
from fshard.layout.pieces import pieces


def odd_params() -> Any:
    """A scalar, an odd bias and an odd matrix before what is multiplied."""
    blocks = [{"odd": torch.ones(10), "w": torch.ones(8, 8)}, {"odd": torch.ones(3, 5), "w": torch.ones(8, 4)}]
    return {"gate": torch.tensor(1.0), "blocks": blocks, "last": torch.ones(7)}


def held_in(plan: fshard.Plan, kind: int) -> set[torch.dtype]:
    """Every dtype that a flat buffer of a kind is ever held in."""
    dtypes = {travel.buffer_dtype(plan, kind), *vars(plan.kinds[kind].precision).values()}
    return dtypes | {primitives.sum_dtype(dtype) for dtype in dtypes}


@examples(24)
@given(st.data())
def test_every_leaf_starts_at_16_bytes(data):
    """Kernels would load a leaf from an odd address, a block lie in two leaves, or padding waste memory."""
    params = data.draw(strategies.trees(strategies.DTYPES), "params")
    chosen = data.draw(strategies.plans(params, strategies.policies()), "plan")
    mesh = fshard.AbstractMesh(**data.draw(strategies.meshes(), "mesh"))
    plan = fshard.make_plan(params, mesh, **chosen)
    for slot in plan.slots:
        assert slot.start % plan.block == 0
        for dtype in held_in(plan, slot.kind):
            assert slot.start * dtype.itemsize % 16 == 0, (slot, dtype)
    for (unit, kind), row in plan.rows.items():
        slots = row.leaves
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
    **{f"by {name}": {"param_wire": wire} for name, wire in FIRST.items()},
    "blocks": {"block": 3},
    "host": {"offload": "**.odd"},
}


def test_gathered_leaves_start_at_16_bytes():
    """Matrix products of a user's loss would read leaves from odd addresses, and be slower, in some plan."""
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
    """A gradient norm would be NaN, and every gradient be clipped to it, by what lies between leaves."""
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


@pytest.mark.parametrize("name", [*WIRES, "none"])
def test_nan_between_leaves_reaches_no_leaf_by_a_wire(name):
    """A leaf would become NaN by what lies beside it: scales are of blocks, of a leaf and its padding, or of all."""
    for num in (1, 2, 3):
        assert all(simulated(gathered_beside_nan, WIRES.get(name), shard=num)), num


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
        results.append(([piece for _, piece in pieces(p)], optim.state.gather_state(state)))
    return same_bits(*results)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nan_between_leaves_reaches_no_leaf_by_an_optimizer(name):
    """NaN that a user's function of elements leaves between leaves would come into an update or a state."""
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
    """A hook's numbers between leaves would count in the norm by which gradients are clipped."""
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
    """An optimizer of whole leaves, or ZeRO's, would compute with leaves at odd addresses."""
    for num in (1, 2, 3):
        assert simulated(of_an_optimizer, shard=num) == [{0}] * num
        assert simulated(of_an_optimizer, shard=num, replicate=2) == [{0}] * 2 * num


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


@pytest.mark.parametrize("name", WIRES)
@examples(10)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), num_ranks=st.integers(1, 3))
def test_what_wires_decode_starts_at_16_bytes(name, sizes, num_ranks):
    """A compiled kernel that decodes a rank's part would load from addresses that are no multiples of 16 bytes."""
    wire, sizes = WIRES[name], [16 * size for size in sizes]
    encoded = wire.encode(torch.arange(1.0, sum(sizes) + 1), sizes)
    received = encoded.new_empty(num_ranks, len(encoded)).copy_(encoded)
    with Starts() as starts:
        for part in received:
            wire.decode(part, sizes)
    assert starts.found <= {0}  # nothing is found where decoding is a view


def test_the_watch_over_starts_can_fail():
    """An odd address that an operator reads is found: otherwise the test above would pass for any decoding."""
    with Starts() as starts:
        torch.ones(9)[1:].add(1)
    assert 4 in starts.found


@examples(50)
@given(st.lists(st.tuples(st.sampled_from(strategies.DTYPES), st.integers(0, 9)), max_size=6))
def test_packed_tensors_start_at_16_bytes(held):
    """A message of several dtypes would lose bits, have a wrong size, or be decoded from odd addresses."""
    tensors = [torch.arange(numel).to(dtype) for dtype, numel in held]
    data = storage.pack_bytes(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
    assert data.nbytes == storage.packed_size(held)
    found = storage.unpack_bytes(data, held)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, tensors, strict=True))
    assert pointers([x for x in found if len(x)]) <= {0}
