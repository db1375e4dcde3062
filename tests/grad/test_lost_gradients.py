"""Losses whose gradients do not reach the parameters, or reach them twice: errors instead of wrong gradients."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import rand
from support.worlds import simulated
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.testing import oracle

STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
}


def parameters() -> dict[str, Any]:
    """An embedding, three blocks, a head and a scale."""
    generator = torch.Generator().manual_seed(0)
    blocks = [{"w": torch.randn(4, 4, generator=generator)} for _ in range(3)]
    return {
        "embed": torch.randn(6, 4, generator=generator),
        "blocks": blocks,
        "head": torch.randn(4, generator=generator),
        "scale": torch.randn(4, generator=generator),
    }


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    """One layer."""
    return torch.tanh(x @ p["w"])


class Again(torch.autograd.Function):
    """A reentrant checkpoint as users write it: its backward calls torch.autograd.backward."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.fn(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def reentrant(p: Any, i: int, x: torch.Tensor) -> torch.Tensor:
    """Block `i` in a reentrant checkpoint that reads the parameters inside the checkpointed function."""
    return checkpoint(lambda y: block(p["blocks"][i], y), x, use_reentrant=True)


def _behind_frozen(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x].detach().requires_grad_()
    for i in range(3):
        y = reentrant(p, i, y)
    return (y * p["head"]).sum()


def _all_hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
    return reentrant(p, 0, p["embed"][x].detach().requires_grad_()).sum()


def _one_hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x]
    for i in (0, 2):
        y = block(p["blocks"][i], y)
    return (y * p["head"]).sum() + reentrant(p, 1, y.detach().requires_grad_()).sum()


def _passed(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x].detach().requires_grad_()
    for b in p["blocks"]:
        y = checkpoint(block, b, y, use_reentrant=True)
    return (y * p["head"]).sum()


def _captured(p: Any, x: torch.Tensor) -> torch.Tensor:
    scale, y = p["scale"], p["embed"][x].detach().requires_grad_()
    return (checkpoint(lambda z: z * scale, y, use_reentrant=True) * p["head"]).sum()


HIDDEN = {
    "captured": _captured,
    "behind a frozen embedding": _behind_frozen,
    "all of them": _all_hidden,
    "one of them": _one_hidden,
    "passed as a container": _passed,
}


def gradient(mesh: Any, loss: Any, strategy: dict[str, Any], frozen: Any = None) -> Any:
    """The loss and the whole gradients of `loss(params, token numbers)`."""
    whole = parameters()
    plan = fshard.make_plan(whole, mesh, units=["blocks.*"], frozen=frozen, **strategy)
    x = torch.randint(6, (5,), generator=torch.Generator().manual_seed(0 if mesh is None else mesh.get_rank()))
    value, grads = fshard.value_and_grad(lambda p: fshard.Sum(loss(p, x)))(fshard.shard_params(whole, plan))
    return value, fshard.gather_params(grads)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_reentrant_checkpoint_that_hides_parameters_is_an_error(name: str, strategy: str) -> None:
    """Parameters hidden in a reentrant checkpoint are an error: without it their gradients would be zero and they
    would not train."""
    words = r"use_reentrant=True\) hides the parameters .* Pass use_reentrant=False"
    for shard in (1, 2):
        with pytest.raises(ValueError, match=words):
            simulated(gradient, HIDDEN[name], STRATEGIES[strategy], ["embed"], shard=shard)
    with pytest.raises(ValueError, match=words):
        gradient(None, HIDDEN[name], {}, ["embed"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reentrant_checkpoint_that_is_reached_is_torchs_error(strategy: str) -> None:
    """A reentrant checkpoint that gradients reach raises torch's error: otherwise the gradients of the parameters
    inside would be lost."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return reentrant(p, 0, p["embed"][x]).sum()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        simulated(gradient, loss, STRATEGIES[strategy], shard=2)


def _own_backward(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x]
    for i in range(3):
        y = Again.apply(lambda z, i=i: block(p["blocks"][i], z), y)
    return (y * p["head"] * p["scale"]).sum()


def _plainly(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x]
    for i in range(3):
        y = block(p["blocks"][i], y)
    return (y * p["head"] * p["scale"]).sum()


def _twice(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x]
    for _ in range(2):
        y = Again.apply(lambda z: block(p["blocks"][0], z), y)
    return (y * p["head"]).sum()


def _twice_plainly(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = p["embed"][x]
    for _ in range(2):
        y = block(p["blocks"][0], y)
    return (y * p["head"]).sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_functions_that_run_a_backward_of_their_own(strategy: str) -> None:
    """Gradients of a unit used in one such function, or in two, would be lost, or counted twice. On one rank that casts
    the second is an error, because nothing tells when the last one has come; where nothing is cast they are added."""
    for (own, plain), size in itertools.product(((_own_backward, _plainly), (_twice, _twice_plainly)), (1, 2)):
        results = (simulated(gradient, f, STRATEGIES[strategy], shard=size) for f in (own, plain))
        for found, expected in zip(*results, strict=True):
            for a, b in zip(fshard.tree.leaves(found), fshard.tree.leaves(expected), strict=True):
                torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match=r"unit 'blocks.0' was given gradients twice .* use_reentrant=False"):
        simulated(gradient, _twice, STRATEGIES[strategy] | {"policy": "reduce=f64"}, shard=1)


class Straight(torch.autograd.Function):
    """The identity, whose backward is that of a function which the forward does not call."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.fn = fn
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return Again.backward(ctx, grad)


def _straight(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = block(p["blocks"][0], p["embed"][x])
    return (Straight.apply(lambda z: block(p["blocks"][1], z), y) * p["head"] * p["scale"]).sum()


@pytest.mark.parametrize("strategy", ["full", "keep"])  # of a whole unit it is an error: the anchor may have run
def test_a_unit_that_is_read_in_the_backward_alone(strategy: str) -> None:
    """Its gradient would be zero on several ranks, without a word."""
    for size in (1, 2, 3):
        for _, found in simulated(gradient, _straight, STRATEGIES[strategy], shard=size):
            expected = {}
            for rank in range(size):
                plain = fshard.tree.map(lambda x: x.clone().requires_grad_(), parameters())
                _straight(plain, torch.randint(6, (5,), generator=torch.Generator().manual_seed(rank))).backward()
                expected[rank] = [plain["blocks"][i]["w"].grad for i in (0, 1)]
            for i in (0, 1):
                torch.testing.assert_close(found["blocks"][i]["w"], sum(grads[i] for grads in expected.values()))


def test_all_gradients_of_a_unit_come_twice_on_one_device() -> None:
    """The second ones would be written over the first."""
    whole = {**parameters(), "blocks": parameters()["blocks"][:1]}
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=["blocks.*"]))
    found, expected = (fshard.value_and_grad(f)(sharded, torch.tensor([1, 2])) for f in (_twice, _twice_plainly))
    for a, b in zip(fshard.tree.leaves(found), fshard.tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_inside_a_loss_is_an_error(strategy: str) -> None:
    """A backward inside a loss is an error: without it gradients of a value not returned would be added to those of
    the loss."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        (p["blocks"][1]["w"].square().sum()).backward()
        return _plainly(p, x)

    with pytest.raises(ValueError, match=r"unit 'blocks.1' was given gradients before the loss was returned"):
        simulated(gradient, loss, STRATEGIES[strategy], shard=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_other_tensors_alone_is_an_error(strategy: str) -> None:
    """A loss that depends on other tensors alone is an error: otherwise all gradients would be zero and nothing
    would train."""
    other = torch.ones(3, requires_grad=True)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p["embed"].detach().sum() * other).sum()

    with pytest.raises(ValueError, match="depends on no trainable parameter, though on other tensors"):
        simulated(gradient, loss, STRATEGIES[strategy], shard=2)
    assert other.grad is None


def stale(mesh: Any, strategy: dict[str, Any]) -> tuple[str, bool]:
    """The error for parameters kept from an earlier call, and whether the call after the error gives the first
    call's bits."""
    whole = parameters()
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"], **strategy))
    x, kept = torch.tensor([1, 2]), []

    def loss(p: Any) -> fshard.Sum:
        kept.append(p)
        return fshard.Sum(_plainly(kept[0], x))

    call = fshard.value_and_grad(loss)
    first = call(sharded)
    with pytest.raises(ValueError, match="of an earlier call or micro-batch was used") as failure:
        call(sharded)
    kept.clear()
    pairs = zip(fshard.tree.leaves(first), fshard.tree.leaves(call(sharded)), strict=True)
    return str(failure.value), all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_of_an_earlier_call_are_not_taken(strategy: str) -> None:
    """Parameters kept from an earlier call are an error: without it a loss would use old values that get no
    gradients."""
    for said, same in simulated(stale, STRATEGIES[strategy], shard=2):
        assert "Use those it is given now" in said
        assert same


def old_leaves(mesh: Any, strategy: dict[str, Any]) -> bool:
    """Whether a detached leaf kept from an earlier call acts as a constant: no gradients change, old or new."""
    whole = parameters()
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"], **strategy))
    x, kept = torch.tensor([1, 2]), []

    def loss(p: Any) -> fshard.Sum:
        kept.append(p["blocks"][1]["w"])
        return fshard.Sum(_plainly(p, x) + kept[0].detach().sum() * len(kept))

    call = fshard.value_and_grad(loss)
    _, first = call(sharded)
    before = [t.clone() for t in first.tensors]
    _, second = call(sharded)
    return all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, first.tensors, second.tensors, strict=True)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_detached_leaves_of_an_earlier_call_are_constants(strategy: str) -> None:
    """Detached leaves of an earlier call are constants: otherwise the gradients that call returned would be
    overwritten."""
    assert simulated(old_leaves, STRATEGIES[strategy], shard=2) == [True, True]


EARLIER = " of the parameters of an earlier call or micro-batch was used"

# what a loss keeps of the parameters, and what it makes of that later on; torch's words where the graph is gone
KEPT: dict[str, tuple[Any, Any, str]] = {
    "a leaf": (lambda p: p["blocks"][1]["w"], lambda kept: kept, "'blocks.(1|0 to blocks.2)'" + EARLIER),
    "a leaf of the last unit": (lambda p: p["head"], lambda kept: kept, r"'\(last\)'" + EARLIER),
    "a view": (lambda p: p["blocks"][1]["w"][0], lambda kept: kept, "'blocks.(1|0 to blocks.2)'" + EARLIER),
    "a value": (lambda p: -p["blocks"][1]["w"], lambda kept: kept, "'blocks.(1|0 to blocks.2)'" + EARLIER),
    "a value whose graph is gone": (lambda p: p["blocks"][1]["w"].exp(), lambda kept: kept, "a second time"),
}


def keeping(mesh: Any, what: str, strategy: dict[str, Any], how: str) -> tuple[str, bool]:
    """The error for a value kept from an earlier call or micro-batch, and whether the calls after the error agree."""
    whole, (keep, use, _), kept = parameters(), KEPT[what], list[Any]()
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"], **strategy))
    rank = 0 if mesh is None else mesh.get_rank()
    x = torch.tensor([[1, 2], [2, 1], [0, 1], [1, 1]]) + rank % 2

    def loss(p: Any, x: torch.Tensor) -> fshard.Sum:
        kept.append(keep(p))
        first = kept[0] if len(kept) < 3 else kept[-1]
        return fshard.Sum(sum(_plainly(p, row) for row in x) + (use(first) * p["head"].sum()).sum())

    tx = fshard.optim.sgd(0.1)
    made = fshard.value_and_grad(loss) if how == "call" else fshard.train_step(loss, tx, accumulate=2)
    call = made if how == "call" else lambda params, x: made(fshard.init_state(params, tx), x)[0].params
    if how == "call":
        call(sharded, x)
    with pytest.raises((ValueError, RuntimeError)) as failure:
        call(sharded, x)
    again = call(sharded, x)
    kept.clear()
    kept.extend([None, None])
    pairs = zip(fshard.tree.leaves(again), fshard.tree.leaves(call(sharded, x)), strict=True)
    return str(failure.value), all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", ["call", "micro-batch"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", KEPT)
def test_what_depends_on_parameters_of_an_earlier_call_is_an_error(what: str, strategy: str, how: str) -> None:
    """Use of a value kept from an earlier call is an error that names the unit: otherwise gradients would be lost or
    mixed."""
    results = [*simulated(keeping, what, STRATEGIES[strategy], how, shard=2), keeping(None, what, {}, how)]
    for said, same in results:
        assert re.search(KEPT[what][2], said)
        assert same


def inner_losses(mesh: Any, strategy: dict[str, Any]) -> bool:
    """Whether an inner loss treats the outer loss's parameters as constants, in the forward and when recomputed."""
    whole, x = parameters(), torch.tensor([1, 2])
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"], **strategy))

    def inner(w: torch.Tensor) -> torch.Tensor:
        call = fshard.value_and_grad(lambda q: fshard.Sum((q["blocks"][0]["w"] * w).square().sum()))
        return fshard.optim.global_norm(call(sharded)[1])

    def loss(p: Any, again: bool) -> fshard.Sum:
        norm = checkpoint(inner, p["blocks"][1]["w"], use_reentrant=False) if again else inner(p["blocks"][1]["w"])
        return fshard.Sum(_plainly(p, x) * norm)

    norm = inner(whole["blocks"][1]["w"])
    _, expected = fshard.value_and_grad(lambda p: fshard.Sum(_plainly(p, x) * norm))(sharded)
    found = [fshard.value_and_grad(loss)(sharded, again)[1] for again in (False, True)]
    return all(torch.equal(a, b) for g in found for a, b in zip(g.tensors, expected.tensors, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_of_the_loss_around_are_constants_inside(strategy: str) -> None:
    """An inner loss adds no gradients to the outer parameters: otherwise the outer gradients would be wrong."""
    assert simulated(inner_losses, STRATEGIES[strategy], shard=2) == [True, True]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_activations_that_are_written_to_after_they_were_saved(strategy: str) -> None:
    """An in-place write to a saved activation is torch's error, and harmless writes work: otherwise gradients would
    be wrong."""

    def needed(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(p["embed"][x] @ p["blocks"][0]["w"])
        y.mul_(2)
        return (y * p["head"]).sum()

    def harmless(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = (p["embed"][x] @ p["blocks"][0]["w"]).add_(1).relu_()
        return (y * p["head"]).mul_(2).sum()

    def plainly(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(p["embed"][x] @ p["blocks"][0]["w"] + 1) * p["head"] * 2).sum()

    with pytest.raises(RuntimeError, match=r"in place|inplace operation"):
        simulated(gradient, needed, STRATEGIES[strategy], shard=2)
    runs = [simulated(gradient, loss, STRATEGIES[strategy], shard=2) for loss in (harmless, plainly)]
    for (_, found), (_, expected) in zip(*runs, strict=True):
        for a, b in zip(fshard.tree.leaves(found), fshard.tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", [{}, {"params_over": ()}, {"regather": False}], ids=str)
def test_what_is_read_without_gradients_may_be_used_with_them(how):
    """A unit that is read under no_grad, and used outside of it, would get a gradient of zero."""
    params = {"blocks": [{"w": rand(3, 3, seed=n)} for n in range(3)]}

    def loss(params: Any, x: Any) -> Any:
        with torch.no_grad():
            first = params["blocks"][0]
            scale = first["w"].norm()
        return (x @ (first["w"] / scale) @ params["blocks"][1]["w"] @ params["blocks"][2]["w"]).tanh().sum()

    def gradients(mesh: Any) -> Any:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units="blocks.*", **how))
        return fshard.gather_params(fshard.value_and_grad(loss)(sharded, torch.ones(2, 3, dtype=torch.float64))[1])

    leaves = fshard.tree.map(lambda x: x.clone().requires_grad_(), params)
    loss(leaves, torch.ones(2, 3, dtype=torch.float64)).backward()
    expected = fshard.tree.map(lambda x: x.grad, leaves)
    for grads in [gradients(None), *simulated(gradients, shard=2)]:
        torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-14)


HOWS: dict[str, dict[str, Any]] = {
    "each": {},
    "once": {"reduce_once": True},
    "over replicas once": {"reduce_once": "replicate"},
    "tree": {"reduction": "tree"},
}


def of_some(p: Any, x: torch.Tensor) -> fshard.Mean:
    """Reads those leaves of the unit whose bits are set in a number of the batch, which differs by micro-batch."""
    bits = int(x[0, 0])
    read = [w for i, w in enumerate(p["u"]) if bits >> i & 1]
    return fshard.Mean(sum((w.square().sum() * x[:, 1].sum() for w in read), p["root"].sum()), len(x))


def some_grads(mesh: Any, how: str, bits: tuple[int, int]) -> Any:
    """The change of each leaf by a step of two micro-batches."""
    whole = {"u": [rand(3, seed=1), rand(2, 2, seed=2), rand(5, seed=3)], "root": rand(seed=4)}
    tx, rank = fshard.optim.sgd(1.0), 0 if mesh is None else mesh.get_rank()
    x = torch.tensor([[b, 1.0 + 4 * rank + i] for i, b in enumerate(bits)], dtype=torch.float64)
    if mesh is None:  # the oracle, of two ranks
        plain = oracle(of_some, tx, accumulate=2)
        state = plain.init(whole)
        return plain.step(state, [x, x + torch.tensor([0.0, 4.0])])[0].params
    step = fshard.train_step(of_some, tx, accumulate=2, **HOWS[how])
    plan = fshard.make_plan(whole, mesh, units=["u"])
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    return fshard.gather_params(step(state, x)[0].params)


@pytest.mark.parametrize("how", HOWS)
def test_micro_batches_that_use_different_leaves_of_a_unit(how: str) -> None:
    """What one micro-batch gave to a unit would be lost if the next leaves one of its leaves unused."""
    for bits in itertools.product((7, 5, 0), repeat=2):
        shape = {"replicate": 2, "shard": 1} if how == "over replicas once" else {"shard": 2}
        for params in simulated(some_grads, how, bits, **shape):
            torch.testing.assert_close(params, some_grads(None, how, bits), msg=str(bits))


def test_micro_batches_of_one_device_that_use_different_leaves_of_a_unit() -> None:
    """The same without ranks, where every backward adds to one buffer."""
    whole = {"u": [rand(3, seed=1), rand(2, 2, seed=2), rand(5, seed=3)], "root": rand(seed=4)}
    tx = fshard.optim.sgd(1.0)
    for bits in itertools.product((7, 5, 0), repeat=2):
        x = torch.tensor([[b, 1.0 + i] for i, b in enumerate(bits)], dtype=torch.float64)
        plain = oracle(of_some, tx, accumulate=2)
        expected = plain.step(plain.init(whole), [x])[0].params
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, units=["u"])), tx)
        step = fshard.train_step(of_some, tx, accumulate=2)
        torch.testing.assert_close(fshard.gather_params(step(state, x)[0].params), expected, msg=str(bits))
