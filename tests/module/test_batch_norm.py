"""Batch norms over all ranks: the values, gradients and running statistics of the module on the batch of all ranks."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim, tree
from fshard.module import functionalize


class Activated(nn.BatchNorm2d):
    """A batch norm with an activation, as timm's."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        return torch.tanh(super().forward(x))


class Net(nn.Module):
    """Two layers, each with a norm behind it, under a checkpoint if `again`."""

    def __init__(self, norm: Any, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(2)])
        self.norms, self.again = nn.ModuleList([norm() for _ in range(2)]), again

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 3, H, W)."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = (
                (checkpoint(self.part, layer, norm, x, use_reentrant=False))
                if self.again
                else self.part(layer, norm, x)
            )
        return x

    def part(self, layer: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        """What runs again."""
        return torch.tanh(norm(layer(x)) * 1.5)


NORMS = {
    "plain": lambda: nn.BatchNorm2d(3),
    "momentum None": lambda: nn.BatchNorm2d(3, momentum=None),
    "affine False": lambda: nn.BatchNorm2d(3, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "activated": lambda: Activated(3),
    "converted": lambda: nn.SyncBatchNorm(3),
}


def net(norm: str, again: bool = False) -> Any:
    """A net in float64, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net(NORMS[norm], again).double()


def images(step: int, rank: int) -> Tensor:
    """A rank's batch, far from zero; ranks have batches of different sizes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2 + rank, 3, 2, 2, generator=generator, dtype=torch.float64) * (1 + rank) + 3 * rank


def errors(out: Tensor) -> Tensor:
    """The sum of the losses of a batch."""
    return (out * out.detach().roll(1, 1).sin() + out.pow(3)).sum()


def run(
    mesh: Any, norm: str, again: bool = False, jitted: bool = False, sync: bool = True, training: bool = True
) -> Any:
    """Two steps of gradient descent on a rank: the value of the last, parameters and buffers; and the collectives."""
    apply, params, buffers = functionalize(net(norm, again), sync_batch_norm=sync)
    apply = apply if training else apply.eval
    tx = fshard.optim.sgd(0.1)

    def loss(p: Any, extra: Any, x: Tensor) -> Any:
        out, extra = apply(p, extra, x)
        return fshard.Mean(errors(out), len(x)), extra

    plan = fshard.make_plan(params, mesh, units=apply.units("layers.*"))
    state = fshard.init_state(fshard.shard_params(params, plan), tx, extra=buffers)
    step = fshard.train_step(loss, tx, with_extra=True)
    step = fshard.jit(step, backend="eager") if jitted else step
    for i in range(2):
        state, metrics = step(state, images(i, mesh.get_rank()))
    return metrics["loss"], fshard.state_dict(state.params), state.extra


def expected(norm: str, world: int, training: bool = True) -> tuple[Any, nn.Module]:
    """The same by torch alone, on the batch of all ranks."""
    module = net(norm).train(training)
    if norm == "converted":
        module.norms = nn.ModuleList([nn.BatchNorm2d(3).double() for _ in module.norms])
    opt = torch.optim.SGD(module.parameters(), 0.1)
    for i in range(2):
        x = torch.cat([images(i, rank) for rank in range(world)])
        loss = errors(module(x)) / len(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.detach(), module


def is_near(results: Any, norm: str, training: bool = True) -> None:
    """Every rank has the loss, the parameters and the buffers of the module on the batch of all ranks."""
    loss, module = expected(norm, len(results), training)
    for value, params, buffers in results:
        assert torch.allclose(value, loss, rtol=1e-10)
        for path, x in module.named_parameters():
            assert torch.allclose(params[path], x, rtol=1e-10, atol=1e-10), path
        paths, leaves = tree.paths(buffers), tree.leaves(buffers)
        assert {*paths} == {path for path, _ in module.named_buffers()}
        for path, x in zip(paths, leaves, strict=True):
            assert torch.allclose(x, module.get_buffer(path), rtol=1e-10, atol=1e-10), path


@pytest.mark.parametrize("world", [(1, 1), (1, 2), (1, 3), (2, 2)], ids=["1", "2", "3", "2x2"])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_take_the_batch_of_all_ranks(norm, world):
    """A synchronised norm would see a part of the batch, or its gradient would leave out other ranks."""
    is_near(simulated(run, norm, replicate=world[0], shard=world[1]), norm)


@pytest.mark.parametrize(("again", "jitted"), [(True, False), (False, True), (True, True)])
def test_norms_that_run_again_or_in_a_graph(again, jitted):
    """What runs again would have the statistics of its rank, or update running statistics twice."""
    is_near(simulated(run, "plain", again, jitted), "plain")


def test_norms_of_processes():
    """Statistics would be those of all ranks in simulation alone."""
    args = run, "plain", True
    is_near(gloo(*args), "plain")
    assert same_bits(gloo(*args), simulated(*args))


def test_in_evaluation_running_statistics_are_used():
    """A model in evaluation mode would wait for other ranks, or depend on the batch."""
    is_near(simulated(run, "plain", False, False, True, False), "plain", training=False)


def test_without_it_norms_are_those_of_a_rank():
    """A norm would be synchronised, at the price of a collective, without having been asked to be."""
    (_, _, first), (_, _, second) = simulated(run, "plain", False, False, False)
    assert not torch.equal(first["norms"]["0"]["running_mean"], second["norms"]["0"]["running_mean"])


@pytest.mark.parametrize("wanted", [[1], [0, 1], [0]])
@pytest.mark.parametrize("again", [False, True])
def test_running_statistics_that_a_graph_alone_computes(again, wanted):
    """A pass would remove a batch norm whose output nothing reads, and statistics would stay as they were."""
    apply, params, buffers = functionalize(net("plain", again))
    params = tree.detached(params)

    def fn(p: Any, extra: Any, x: Tensor) -> Any:
        results = apply(p, extra, x)
        return [results[i] for i in wanted]

    for x in (images(0, 0), images(1, 1)):
        assert same_bits(fshard.jit(fn, backend="eager")(params, buffers, x), tree.detached(fn(params, buffers, x)))


def lost(mesh: Any, loss: str, how: Any, module: nn.Module) -> list[str]:
    """What a step with that loss warns of."""
    apply, params, buffers = functionalize(module)
    forward = apply.eval if loss == "evaluation" else apply
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def with_extra(p: Any, extra: Any, x: Tensor) -> Any:
        out, extra = apply(p, extra, x)
        return out.square().mean(), extra

    def plain(p: Any, x: Tensor) -> Any:
        out, after = forward(p, buffers, x)
        return (out.square().mean(), after) if loss == "aux" else out.square().mean()

    options = {"with_extra": True} if loss == "extra" else {"has_aux": True} if loss == "aux" else {}
    state = fshard.init_state(sharded, optim.sgd(0.1), extra=buffers if loss == "extra" else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if loss == "evaluate":
            fshard.evaluate(plain)(sharded, x)
        else:
            how(fshard.train_step(with_extra if loss == "extra" else plain, optim.sgd(0.1), **options))(state, x)
    return [str(w.message) for w in caught if "running statistics" in str(w.message)]


@pytest.mark.parametrize("how", [lambda step: step, partial(fshard.jit, backend="eager")], ids=["eager", "jit"])
@pytest.mark.parametrize("loss", ["dropped", "extra", "aux", "evaluation", "evaluate"])
def test_a_loss_that_drops_running_statistics_is_warned(loss, how):
    """Evaluation would use the first statistics, without a word."""
    tracks = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    told = [lost(None, loss, how, tracks), *simulated(lost, loss, how, tracks, shard=1)]
    assert all(bool(words) == (loss == "dropped") for words in told), told
    assert all("with_extra=True" in word for words in told for word in words)
    assert lost(None, "dropped", how, nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False))) == []


def test_leaves_on_two_meshes() -> None:
    """The statistics were those over the mesh of the first leaf."""
    apply, params, buffers = functionalize(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)))

    def run(mesh: Any) -> None:
        first = fshard.shard_params(params, fshard.make_plan(params, mesh))
        second = fshard.shard_params({"1": params["1"]}, fshard.make_plan({"1": params["1"]}))
        loss = lambda p, q: apply({"0": p["0"], "1": q["1"]}, buffers, torch.ones(2, 3))[0].sum()  # noqa: E731
        fshard.evaluate(loss)(first, second)

    with pytest.raises(ValueError, match=r"batch norms: expected leaves of plans on one mesh, got meshes \[\(\), "):
        simulated(run, shard=2)
