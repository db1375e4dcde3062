"""Losses that write in place to the parameters they are given: an error that names the leaf, in every strategy."""

from typing import Any

import pytest
import torch
from support.accelerator import DEVICE, Mesh, on_accelerator
from support.refusals import FROZEN, STRATEGIES, check_words, parameters, rank_of, refusals
from support.worlds import simulated
from torch.nn import functional as F

import fshard
from fshard import tree


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_in_place_is_an_error(strategy: str) -> None:
    """Writes in place to parameters are errors in every strategy: otherwise running statistics would be lost or
    differ by rank."""
    for found in simulated(refusals, strategy, shard=2):
        check_words(found)


def test_a_write_in_place_on_one_device() -> None:
    """Without a mesh a write in place is an error too: otherwise it would change the parameters that the user
    passed."""
    check_words(refusals(None, "full"))
    check_words(simulated(refusals, "full", shard=1)[0])


def _restored(w: torch.Tensor, new: torch.Tensor) -> None:
    old = w.data
    w.data = new
    w.data = old


# what a program may do to a leaf, given new values for it
WAYS: dict[str, Any] = {
    "w.data = x": lambda w, new: setattr(w, "data", new),
    "set_": lambda w, new: w.set_(new),
    "copy_": lambda w, new: w.copy_(new),
    "w.detach()": lambda w, new: w.detach().mul_(2),
    "a slice": lambda w, new: w[0].zero_(),
    "transposed": lambda w, new: w.t_(),
    "swapped": lambda w, new: torch.utils.swap_tensors(w, new),
    "restored": _restored,
    "w.data.data = x": lambda w, new: setattr(w.data, "data", new),
    "w.data.set_": lambda w, new: w.data.set_(new),
}


def written_by(way: Any) -> Any:
    """A loss that does this to a leaf, and reads it twice, with other units between."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            way(p["a"], torch.arange(9.0).view(3, 3) / 10)
        for name in ("a", "b", "c", "a"):
            x = torch.tanh(x @ p[name])
        return x.square().sum()

    return loss


def outcome(mesh: Any, way: Any, options: dict[str, Any]) -> list[torch.Tensor] | None:
    """The loss and its gradients; None for an error that names the leaf."""
    whole = {name: torch.linspace(-1, i, 9).view(3, 3) for i, name in enumerate("abc")}
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, **options))
    try:
        value, grads = fshard.value_and_grad(written_by(way))(sharded, torch.ones(2, 3))
    except ValueError as failure:
        if "wrote in place to leaf" in str(failure) and "'a'" in str(failure):
            return None
        raise
    return [value, *tree.leaves(fshard.gather_params(grads))]


@pytest.mark.parametrize("units", [None, "*"])
@pytest.mark.parametrize("strategy", [name for name, plan in STRATEGIES.items() if "policy" not in plan])
@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_an_error_or_that_of_torch(way: str, strategy: str, units: Any) -> None:
    """A write to a leaf that is gathered again would be lost: in the next read, or in the backward."""
    whole = {name: torch.linspace(-1, i, 9).view(3, 3).requires_grad_() for i, name in enumerate("abc")}
    options = {**STRATEGIES[strategy], "units": units}
    for found in (outcome(None, WAYS[way], options), *simulated(outcome, WAYS[way], options, shard=2)):
        if found is None:
            assert way not in ("restored", "w.data.data = x", "w.data.set_")
            continue
        value = written_by(WAYS[way])(whole, torch.ones(2, 3))
        torch.testing.assert_close(found, [value.detach(), *torch.autograd.grad(value, [*whole.values()])])


def test_a_graph_takes_no_new_data() -> None:
    """torch records no `x.data = y`: the graph would compute with the old x, whether it is a leaf or not."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * p["w"]
        y.data = 2 * y.data
        return y.sum()

    whole = {"w": torch.ones(2)}
    sharded = fshard.shard_params(whole, fshard.make_plan(whole))
    assert fshard.evaluate(loss)(sharded, torch.ones(2)) == 4
    with pytest.raises(ValueError, match=r"a graph has no `x.data = y`"):
        fshard.jit(fshard.value_and_grad(loss), backend="eager")(sharded, torch.ones(2))


def allowed(p: Any, x: torch.Tensor) -> Any:
    """What looks like a write and is none: clones, evaluation, batch statistics, trained affine parameters."""
    n = p["norm"]
    mean, var = n["mean"].clone(), n["var"].clone()
    x = F.batch_norm(x @ p["first"], mean, var, n["weight"], training=True)
    x = F.batch_norm(x, n["mean"], n["var"], n["mean"], n["var"]) + F.batch_norm(x, None, None, n["var"], training=True)
    return fshard.Mean((x * p["last"]).square().sum(), x.numel()), {"mean": mean, "var": var, "count": n["count"] + 1}


def carried(mesh: Any, strategy: str) -> tuple[Any, Any]:
    """Gradients and new statistics of a loss that works on clones, and those of plain torch on this rank alone."""
    whole, x = parameters(), torch.randn(5, 3, generator=torch.Generator().manual_seed(rank_of(mesh)))
    plan = fshard.make_plan(whole, mesh, units=["norm"], frozen=FROZEN, **STRATEGIES[strategy])
    sharded = fshard.shard_params(whole, plan)
    (_, aux), grads = fshard.value_and_grad(allowed, has_aux=True, reduce=False)(sharded, x)
    trained = [
        whole["first"].requires_grad_(),
        whole["norm"]["weight"].requires_grad_(),
        whole["last"].requires_grad_(),
    ]
    out, expected = allowed(whole, x)
    num = 1 if mesh is None else mesh.size()
    plain = torch.autograd.grad(out.total / (out.count * num), trained)
    return [*tree.leaves(fshard.gather_params(grads.local)), *tree.leaves(aux)], [*plain, *tree.leaves(expected)]


@pytest.mark.parametrize("strategy", ["full", "keep", "ddp"])
def test_statistics_are_carried_as_values(strategy: str) -> None:
    """Statistics updated on clones come out as plain torch's: otherwise the remedy in the error would not work."""
    results = [*simulated(carried, strategy, shard=2), carried(None, strategy)]
    for found, expected in results:
        assert [type(x) for x in found] == [torch.Tensor] * len(found)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("names", [["w"], ["a" * 300], ["ä" * 150], [f"layers.{n}.norm.weight" for n in range(9)]])
def test_a_device_is_given_few_words(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of an assertion on a device have fewer than 255 bytes, whatever the leaves are called: CUDA takes no
    more, and a loss beside frozen leaves would stop."""
    said = list[str]()
    monkeypatch.setattr(torch, "_assert_async", lambda _, words: said.append(words))
    with on_accelerator():
        whole = {"trained": torch.ones(8, device=DEVICE), **{name: torch.ones(8, device=DEVICE) for name in names}}
        plan = fshard.make_plan(whole, Mesh(), frozen=lambda path, _: path in names)
        tx = fshard.optim.sgd(0.1)
        step = fshard.train_step(lambda p, x: (x * p["trained"] * p[names[0]]).sum(), tx)
        step(fshard.init_state(fshard.shard_params(whole, plan), tx), torch.ones(8, device=DEVICE))
    assert any("work on a clone" in words and names[0][:50] in words for words in said)
    assert all(len(words.encode()) < 255 for words in said)


OTHERS: dict[str, Any] = {"weight": None, "bias": None, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": False}
STATISTICS: dict[str, Any] = {
    "batch_norm": lambda p, x: F.batch_norm(x, x[0], p["var"], training=True),
    "by name": lambda p, x: torch.batch_norm(x, running_mean=x[0], running_var=p["var"], training=True, **OTHERS),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_a_graph_names_the_statistics_that_a_norm_writes_to(name: str) -> None:
    """A graph's own error has a number for the leaf: users could not find it."""
    whole = {"var": torch.ones(4), "w": torch.ones(4)}
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, frozen=["var"]))
    loss = lambda p, x: (STATISTICS[name](p, x) * p["w"]).square().sum()  # noqa: E731
    with pytest.raises(ValueError, match="batch_norm would write to leaf 'var' in place"):
        fshard.jit(fshard.value_and_grad(loss), backend="eager")(sharded, torch.randn(5, 4))
