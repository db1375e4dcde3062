"""Parameters and optimizer state go from torch's sharding libraries into fshard and back, over processes."""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.optim as to
from support.models import rand, same_bits
from support.worlds import gloo
from torch import Tensor, nn

import fshard
from fshard import optim
from fshard.module import functionalize

LR = 0.1


class Net(nn.Module):
    """Tied embeddings and blocks with buffers; no size divides by the number of ranks, and some are smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, words: Tensor) -> Tensor:
        """(rows,) -> (rows, 7)."""
        x = self.embed(words)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)) * self.scale


def net() -> Net:
    """In float64, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Net().double()
        for x in model.parameters():
            nn.init.normal_(x, std=0.5)
    return model


def words(step: int, rank: int) -> Tensor:
    """A batch of a rank."""
    return torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


def target(step: int, rank: int) -> Tensor:
    """What a batch is compared with."""
    return rand(6, 7, seed=1000 + 10 * step + rank)


def mean_loss(loss: Tensor, world: int) -> float:
    """The mean over ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / world


def torch_steps(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """torch's own steps: the losses, and the model is changed."""
    losses, rank = [], dist.get_rank()
    for i in steps:
        optimizer.zero_grad()
        loss = (model(words(i, rank)) - target(i, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(mean_loss(loss, dist.get_world_size()))
    return losses


class Ours:
    """The model in fshard, with AdamW: `params`, `buffers` and `state` change with each call of `steps`."""

    def __init__(self, mesh: Any, **plan: Any):
        self.apply, params, self.buffers = functionalize(net())
        self.plan = fshard.make_plan(params, mesh, units=self.apply.units(nn.Linear), **plan)
        self.tx = optim.adamw(LR)
        self.params = fshard.init_params(self.plan, lambda path, like: torch.zeros(like.shape))
        self.state = fshard.init_state(self.params, self.tx).opt_state

    def steps(self, steps: range) -> list[float]:
        """Our own steps: the losses."""
        rank = dist.get_rank()

        def loss(params: Any, extra: Any, batch: Any) -> Any:
            out, extra = self.apply(params, extra, batch["words"])
            return (out - batch["target"]).square().mean(), extra

        step, losses = fshard.train_step(loss, self.tx, with_extra=True), []
        state = fshard.init_state(self.params, self.tx, extra=self.buffers)
        state = dataclasses.replace(state, opt_state=self.state)
        for i in steps:
            state, metrics = step(state, {"words": words(i, rank), "target": target(i, rank)})
            losses.append(metrics["loss"].item())
        self.params, self.state, self.buffers = state.params, state.opt_state, state.extra
        return losses


GROUPS = [{k: x for k, x in to.AdamW([torch.ones(1)], LR).param_groups[0].items() if k != "params"}]


def fsdp2(model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
    """A model and AdamW in FSDP2, blocks wrapped."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, to.AdamW(model.parameters(), LR, weight_decay=0.01)


def pieces(state: dict[str, Any]) -> dict[str, tuple[Tensor, Any]]:
    """This rank's chunks of DTensors, their placements and shapes; other tensors as they are."""
    return {
        name: (x.to_local(), (x.placements, x.shape, x.stride(), x.device_mesh)) if hasattr(x, "to_local") else (x, ())
        for name, x in state.items()
    }


def same_dtensors(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two state dicts have the same names, chunks to the bit, and placements."""
    a, b = pieces(a), pieces(b)
    assert a.keys() == b.keys()
    for name, (x, how) in a.items():
        assert how == b[name][1], name
        assert same_bits(x, b[name][0]), name


def fsdp2_both_ways(mesh: Any, plan: dict[str, Any]) -> None:
    """FSDP2 trains, fshard goes on, FSDP2 goes on from there, each beside the one that stayed."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    model, optimizer = fsdp2(net(), mesh)
    torch_steps(model, optimizer, range(3))
    saved, saved_state = model.state_dict(), optimizer.state_dict()

    ours = Ours(mesh, **plan)
    ours.params, ours.buffers = ours.apply.load_state_dict(ours.params, ours.buffers, saved)
    ours.state = optim.state.load_state_dict(saved_state, ours.state, ours.params)
    # in and out again: the very chunks
    same_dtensors(ours.apply.state_dict(ours.params, ours.buffers, dtensors=True), saved)
    again = optim.state.state_dict(ours.state, ours.params, "index", groups=GROUPS, dtensors=True)
    assert again["param_groups"] == saved_state["param_groups"]
    for number, entry in saved_state["state"].items():
        assert again["state"][number].pop("step") == entry["step"]
        same_dtensors(again["state"][number], {name: x for name, x in entry.items() if name != "step"})

    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))

    there, optimizer_there = fsdp2(net(), mesh)
    there.load_state_dict(ours.apply.state_dict(ours.params, ours.buffers, dtensors=True))
    optimizer_there.load_state_dict(
        optim.state.state_dict(ours.state, ours.params, "index", groups=GROUPS, dtensors=True)
    )
    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


def alike(a: list[float], b: list[float]) -> None:
    """Losses are equal in float64 up to rounding."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


WIDE = {"state_over": ("replicate", "shard")}


def test_fsdp2_both_ways():
    """What FSDP2 trained would be other values in fshard, or the other way round, or training would go on otherwise."""
    gloo(fsdp2_both_ways, {})


@pytest.mark.sample(3)
@pytest.mark.parametrize(("plan", "replicate"), [({}, 1), ({}, 2), (WIDE, 2)], ids=["4", "2x2", "2x2 wide state"])
def test_fsdp2_both_ways_on_four_ranks(plan, replicate):
    """Chunks of DTensors would be others where ranks have none, or along two axes."""
    gloo(fsdp2_both_ways, plan, shard=4 // replicate, replicate=replicate)
