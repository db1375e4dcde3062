"""Hessian-vector products of losses of sharded parameters, compared with double backward on one device."""

import warnings
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.func_cases import CASES, num_ranks, on_ranks, rank_of, sharded
from support.func_losses import FROZEN, LOSSES, batch, net, params
from support.models import rand, same_bits
from support.steps import QUIET, apart
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import tree

pytestmark = pytest.mark.filterwarnings(QUIET)


def regression(p: Any, b: Any) -> fshard.Mean:
    """A loss that does not use torch.func."""
    return fshard.Mean((net(p, b["x"]) - b["y"]).square().sum(), len(b["x"]))


def total(p: Any, b: Any) -> fshard.Sum:
    """The same loss as a sum over ranks."""
    return fshard.Sum(regression(p, b).total)


def mean(p: Any, b: Any) -> Tensor:
    """A plain scalar: the mean of equally weighted ranks."""
    return net(p, b["x"]).square().mean()


ALL = {"regression": regression, "total": total, "mean": mean, **LOSSES}


def tangent() -> Any:
    """A direction with the structure of the parameters."""
    leaves, spec = tree.flatten(params())
    return tree.unflatten(spec, [rand(*x.shape, seed=50 + i) for i, x in enumerate(leaves)])


@cache
def expected(name: str, ranks: int) -> Any:
    """The gradient of <gradient, v> by plain torch, on one device with all ranks' data."""
    leaves, spec = tree.flatten({k: v for k, v in params().items() if k not in FROZEN})
    v = tree.leaves({k: v for k, v in tangent().items() if k not in FROZEN})
    leaves = [leaf.requires_grad_() for leaf in leaves]
    whole = {**tree.unflatten(spec, leaves), "shift": params()["shift"]}
    found = [ALL[name](whole, batch(0, rank)) for rank in range(ranks)]
    if name == "total":
        value = torch.stack([x.total for x in found]).sum()
    elif name == "mean":
        value = torch.stack(found).mean()
    else:
        value = torch.stack([x.total for x in found]).sum() / sum(x.count for x in found)
    grads = torch.autograd.grad(value, leaves, create_graph=True)
    along = torch.stack([(g * t).sum() for g, t in zip(grads, v, strict=True)]).sum()
    return tree.unflatten(spec, torch.autograd.grad(along, leaves))


def product(mesh: Any, name: str, strategy: str, jitted: bool = False, again: bool = False) -> Any:
    """The gathered product without the frozen leaf; with `again`, the product with that product."""
    p = sharded(mesh, strategy)
    fn = fshard.hvp(ALL[name])
    fn = fshard.jit(fn, backend="eager") if jitted else fn
    out = fn(p, fshard.shard_params(tangent(), p.plan), batch(0, rank_of(mesh)))
    assert out.view == fshard.value_and_grad(regression)(p, batch(0, rank_of(mesh)))[1].view
    out = fn(p, out, batch(0, rank_of(mesh))) if again else out
    return {k: v for k, v in fshard.gather_params(out).items() if k not in FROZEN}


@pytest.mark.law
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_products_are_those_of_one_device(world: str, strategy: str, name: str) -> None:
    """`hvp` gives the product of one device in every strategy: otherwise second-order methods would go wrong."""
    wanted = expected(name, num_ranks(world))
    largest = max(1.0, *(float(x.abs().max()) for x in tree.leaves(wanted)))
    for found in on_ranks(world, partial(product, name=name, strategy=strategy)):
        assert apart(found, wanted) < 1e-12 * largest


@pytest.mark.parametrize("strategy", ["full", "zero2"])
@pytest.mark.parametrize("name", ["regression", "laplacian"])
def test_as_a_graph(name: str, strategy: str) -> None:
    """A jitted product is the product of one device: otherwise compiling would alter second-order methods."""
    wanted = expected(name, 2)
    for found in simulated(product, name, strategy, True, shard=2):
        assert apart(found, wanted) < 1e-9


def test_a_product_is_a_tangent() -> None:
    """A product may be the tangent of the next one, also in ZeRO-2: otherwise power iteration would fail on shards."""
    jobs = [partial(product, name="regression", strategy=name, again=True) for name in ("ddp", "full", "zero2")]
    whole, *others = (simulated(job, shard=2)[0] for job in jobs)
    assert all(apart(whole, other) < 1e-10 for other in others)
    assert apart(whole, expected("regression", 2)) > 1


def in_processes(mesh: Any) -> Any:
    """Two products."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    return [product(mesh, name, "full") for name in ("regression", "meanflow")]


@pytest.mark.parametrize("shard", [1, 2])
def test_a_unit_that_is_read_without_gradients_first(shard: int) -> None:
    """The product of the unit would be zero: its leaves would have no tangents for the second read."""

    def loss(p: Any, x: Tensor) -> fshard.Sum:
        with torch.no_grad():
            torch.tanh(x @ p["a"]["w"])  # as for a figure
        return fshard.Sum(torch.tanh(torch.tanh(x @ p["a"]["w"]) @ p["b"]["w"]).square().sum())

    values, x = {"a": {"w": rand(3, 3, seed=1)}, "b": {"w": rand(3, 3, seed=2)}}, rand(2, 3, seed=3)

    def job(mesh: Any) -> Any:
        sharded = fshard.shard_params(values, fshard.make_plan(values, mesh, units=["*"]))
        return fshard.gather_params(fshard.hvp(loss)(sharded, sharded, x))

    leaves, spec = tree.flatten(tree.map(lambda v: v.clone().requires_grad_(), values))
    grads = torch.autograd.grad(loss(tree.unflatten(spec, leaves), x).total, leaves, create_graph=True)
    dot = sum((g * v.detach()).sum() for g, v in zip(grads, leaves, strict=True))
    wanted = [shard * g for g in torch.autograd.grad(dot, leaves)]  # every rank has the same batch
    for got in simulated(job, shard=shard):
        assert apart(tree.leaves(got), wanted) < 1e-5


def test_processes_have_the_bits_of_the_simulation() -> None:
    """Gloo processes give the bits of simulated ranks: otherwise a simulation would say nothing about a real job."""
    assert same_bits(gloo(in_processes, shard=2), simulated(in_processes, shard=2))


def test_the_collectives_of_a_product() -> None:
    """A product gathers each unit and its tangent twice and reduces once: otherwise it would send more than needed."""

    def job(mesh: Any) -> Any:
        p = sharded(mesh)
        v = fshard.shard_params(tangent(), p.plan)
        with fshard.collectives.tally() as log:
            fshard.hvp(regression)(p, v, batch(0, rank_of(mesh)))
        return [(call.kind, call.label) for call in log]

    for log in simulated(job, shard=2):
        assert log.count(("all_gather", "layers.0")) == 4
        assert log.count(("reduce_scatter", "layers.0")) == 1


LINEAR: dict[str, Any] = {  # the derivative of the first ones reads no parameter
    "sum": lambda p, x: p["embed"].sum(),
    "times data": lambda p, x: (p["embed"] * x.mean()).sum(),
    "of data": lambda p, x: (x @ p["embed"]).sum(),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_loss_has_no_curvature(name: str) -> None:
    """The product of a linear loss is zero, not an error: otherwise a model with a linear part would fail."""

    def job(mesh: Any) -> None:
        p = sharded(mesh)
        x = torch.ones(2 + rank_of(mesh), 3, dtype=torch.float64)
        for kind in (torch.Tensor.clone, fshard.Sum, lambda total: fshard.Mean(total, 6)):
            out = fshard.hvp(lambda p, x, kind=kind: kind(LINEAR[name](p, x)))(p, p, x)
            assert all((x == 0).all() for x in out.tensors)

    job(None)
    simulated(job, shard=2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("plan", "v was made for other parameters"),
        ("plain", "expected a Sharded, got dict"),
        ("count", "count of the loss's fshard.Mean depends on parameters"),
        ("wire", "would round the tangent"),
    ],
)
def test_what_is_refused(fault: str, said: str) -> None:
    """Wrong tangents, counts and wires are errors that say why: otherwise a product would be silently wrong."""
    wire = {"param_wire": fshard.wire.Identity()} if fault == "wire" else {}
    p = sharded(None, **wire)
    v = {"plan": fshard.shard_params(params(), fshard.make_plan(params())), "plain": params()}.get(fault, p)
    loss = regression
    if fault == "count":
        loss = lambda p, b: fshard.Mean(net(p, b["x"]).sum(), p["gain"].square() + 1)  # noqa: E731
    with pytest.raises((TypeError, ValueError), match=said):
        fshard.hvp(loss)(p, v, batch(0, 0))


@pytest.mark.parametrize("count", [torch.tensor(6), torch.tensor(6.0), torch.ones(6).count_nonzero()], ids=str)
def test_a_count_may_be_a_tensor(count):
    """A count that is a tensor without a derivative would be refused, though value_and_grad takes it."""
    weights, v = (rand(3, 3, seed=n) for n in (1, 2))
    x = rand(2, 3, seed=3)

    def times(count: Any) -> Any:
        p, tangent = (fshard.shard_params(t, fshard.make_plan(weights)) for t in (weights, v))
        loss = fshard.hvp(lambda p, x: fshard.Mean((x @ p).tanh().square().sum(), count))
        return fshard.gather_params(loss(p, tangent, x))

    torch.testing.assert_close(times(count), times(6))
