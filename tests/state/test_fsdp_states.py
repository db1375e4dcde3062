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
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

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
    by_name = optim.state.state_dict(ours.state, ours.params, groups=GROUPS, dtensors=True)
    other, optimizer_by_name = fsdp2(net(), mesh)
    set_optimizer_state_dict(other, optimizer_by_name, by_name)
    for number, entry in optimizer_there.state_dict()["state"].items():
        same_dtensors(optimizer_by_name.state_dict()["state"][number], entry)

    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


def alike(a: list[float], b: list[float]) -> None:
    """Losses are equal in float64 up to rounding."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


WIDE = {"state_over": ("replicate", "shard")}


FOUR = [pytest.param({}, 4, 1, id="4"), pytest.param({}, 2, 2, id="2x2"), pytest.param(WIDE, 2, 2, id="2x2 wide state")]


@pytest.mark.parametrize(("plan", "shard", "replicate"), [pytest.param({}, 2, 1, id="2"), *FOUR])
def test_fsdp2_both_ways(plan, shard, replicate):
    """What FSDP2 trained would be other values in fshard, or the other way round, or training would go on otherwise.

    On four ranks chunks of DTensors would be others where ranks have none, or along two axes.
    """
    gloo(fsdp2_both_ways, plan, shard=shard, replicate=replicate)


def fsdp1(model: nn.Module, mesh: Any = None) -> tuple[nn.Module, Any]:
    """A model and AdamW in FSDP1, blocks wrapped; on a mesh its sharded states are DTensors, else ShardedTensors."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: Any = {"use_orig_params": True, "device_id": torch.device("cpu"), "device_mesh": mesh}
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], **options)
    model.blocks[1] = checkpoint_wrapper(FullyShardedDataParallel(model.blocks[1], **options))
    model = FullyShardedDataParallel(model, **options)
    return model, to.AdamW(model.parameters(), LR, weight_decay=0.01)


def fsdp1_types(kind: str) -> Any:
    """The settings of a type of FSDP1's state dicts."""
    from torch.distributed import fsdp

    # with offload_to_cpu torch 2.13 gives on CPUs one buffer for all: exp_avg has exp_avg_sq's values
    return {
        "full": (
            fsdp.StateDictType.FULL_STATE_DICT,
            fsdp.FullStateDictConfig(),
            fsdp.FullOptimStateDictConfig(offload_to_cpu=False),
        ),
        "sharded": (
            fsdp.StateDictType.SHARDED_STATE_DICT,
            fsdp.ShardedStateDictConfig(),
            fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
        ),
        "local": (fsdp.StateDictType.LOCAL_STATE_DICT, fsdp.LocalStateDictConfig(), fsdp.LocalOptimStateDictConfig()),
    }[kind]


def in_order(x: Any) -> Any:
    """Nested dicts with sorted keys."""
    return {key: in_order(x[key]) for key in sorted(x)} if isinstance(x, dict) else x


def fsdp1_both_ways(mesh: Any, on_mesh: bool) -> None:
    """FSDP1 trains, fshard reads its states of every type and goes on, FSDP1 goes on from there."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    warnings.simplefilter("ignore")  # what torch says of its own libraries
    kind_of = "DTensor" if on_mesh else "ShardedTensor"
    model, optimizer = fsdp1(net(), mesh if on_mesh else None)
    torch_steps(model, optimizer, range(3))
    read = {}
    for kind in ("full", "sharded"):
        with FSDP.state_dict_type(model, *fsdp1_types(kind)):
            saved, saved_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        assert {type(saved["scale"]).__name__} == {kind_of if kind == "sharded" else "Tensor"}
        ours = read[kind] = Ours(mesh)
        ours.params, ours.buffers = ours.apply.load_state_dict(ours.params, ours.buffers, saved)
        ours.state = optim.state.load_state_dict(saved_state, ours.state, ours.params)
    if not on_mesh:
        alone, parts = (
            Ours(None),
            "expected a plan on a mesh of all ranks that have a part of it, its mesh has [01] of ",
        )
        with pytest.raises(ValueError, match=rf"load_state_dict: '[a-z.0]+': a ShardedTensor .*: {parts}"):
            alone.apply.load_state_dict(alone.params, alone.buffers, saved)
        with pytest.raises(ValueError, match=rf"optimizer state: 'mu.[a-z.0]+': a ShardedTensor .*: {parts}"):
            optim.state.load_state_dict(saved_state, alone.state, alone.params)
        # on a mesh torch refuses to write LOCAL_STATE_DICT
        with (
            FSDP.state_dict_type(model, *fsdp1_types("local")),
            pytest.raises(ValueError, match="let FSDP1 write FULL"),
        ):
            fshard.load_state_dict(ours.params, model.state_dict())
    assert same_bits(*(fshard.state_dict(ours.params) for ours in read.values()))
    assert same_bits(*(optim.state.gather_state(ours.state) for ours in read.values()))
    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))

    there, optimizer_there = fsdp1(net(), mesh if on_mesh else None)
    for kind in ("full", "sharded") if on_mesh else ("full",):  # we write no ShardedTensors
        cut = kind == "sharded"
        with FSDP.state_dict_type(there, *fsdp1_types(kind)):
            there.load_state_dict(ours.apply.state_dict(ours.params, ours.buffers, dtensors=cut))
            written = optim.state.state_dict(ours.state, ours.params, groups=GROUPS, dtensors=cut)
            optimizer_there.load_state_dict(FSDP.optim_state_dict_to_load(there, optimizer_there, written))
        with FSDP.state_dict_type(there, *fsdp1_types("full")):
            arrived = in_order(FSDP.optim_state_dict(there, optimizer_there)["state"])
        assert same_bits(arrived, in_order(optim.state.state_dict(ours.state, ours.params)["state"]))
    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["ShardedTensor", "DTensor"])
def test_fsdp1_both_ways(on_mesh):
    """Full or sharded states of FSDP1 would be other values in fshard, or ours in FSDP1."""
    gloo(fsdp1_both_ways, on_mesh)


def zero_both_ways(mesh: Any) -> None:
    """DDP and ZeroRedundancyOptimizer train, fshard goes on, they go on from there."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def started() -> tuple[nn.Module, Any]:
        model = nn.parallel.DistributedDataParallel(net())
        return model, ZeroRedundancyOptimizer(model.parameters(), to.AdamW, lr=LR, weight_decay=0.01)

    model, optimizer = started()
    torch_steps(model, optimizer, range(3))
    optimizer.consolidate_state_dict(to=1)
    saved, saved_state = (model.state_dict(), optimizer.state_dict()) if mesh.get_rank() else ({}, {})
    ours = Ours(mesh, params_over=())
    ours.params, ours.buffers = ours.apply.load_state_dict(
        ours.params, ours.buffers, saved, lambda name: name.removeprefix("module."), src=1
    )
    ours.state = optim.state.load_state_dict(saved_state, ours.state, ours.params, src=1)
    assert same_bits(
        ours.apply.state_dict(ours.params, ours.buffers, rank=1),
        {n.removeprefix("module."): x for n, x in saved.items()},
    )
    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))

    there, optimizer_there = started()
    there.module.load_state_dict(ours.apply.state_dict(ours.params, ours.buffers))
    optimizer_there.load_state_dict(optim.state.state_dict(ours.state, ours.params, "index", groups=GROUPS))
    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


def test_ddp_and_zero_both_ways():
    """What one rank consolidated would be other values in fshard, or ours in ZeroRedundancyOptimizer."""
    gloo(zero_both_ways)


def odd_leaves(mesh: Any) -> None:
    """DTensors of leaves of every kind are those that torch distributes, and are read again to the bit."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    w = rand(5, 3, seed=0)
    params = {"w": w, "few": rand(2, 2, seed=1), "scalar": rand(seed=2), "none": rand(0, 2, seed=3), "tied": w}
    params |= {"whole": rand(3, seed=4), "n": torch.arange(7), "half": rand(9, seed=5).bfloat16()}
    names = mesh.mesh_dim_names
    for over in [(), ("shard",), *([("replicate", "shard")] if "replicate" in names else [])]:
        axes = {"params_over": over, "grads_over": over or "shard", "state_over": over or "shard"}
        plan = fshard.make_plan(params, mesh, whole="whole", units=["w"], **axes)
        sharded = fshard.shard_params(params, plan)
        written = fshard.state_dict(sharded, dtensors=True)
        assert written["w"] is written["tied"]
        for name, x in params.items():
            is_cut = name not in ("scalar", "whole")
            placements = [Shard(0) if is_cut and axis in over else Replicate() for axis in names]
            same_dtensors({name: written[name]}, {name: distribute_tensor(x, mesh, placements)})
            assert same_bits(written[name].full_tensor(), x)
            chunk = written[name].to_local()
            assert chunk.untyped_storage().nbytes() == chunk.nbytes, "a chunk keeps no whole unit in memory"
        zeros = fshard.init_params(plan, lambda path, like: torch.zeros(like.shape, dtype=like.dtype))
        assert same_bits(fshard.load_state_dict(zeros, written).tensors, sharded.tensors)
    state = optim.adamw(0.1).init(fshard.shard_params({"w": w}, fshard.make_plan({"w": w}, mesh, **axes)))
    entry = optim.state.state_dict(state, {"w": w}, dtensors=True)["state"]["w"]  # the parameters have no mesh
    replicated = distribute_tensor(torch.zeros_like(w), mesh, [Replicate() for _ in names])
    same_dtensors({"exp_avg": entry["exp_avg"]}, {"exp_avg": replicated})


@pytest.mark.parametrize(("shard", "replicate"), [(2, 1), (2, 2), (3, 1)])
def test_dtensors_of_leaves_of_every_kind(shard, replicate):
    """A leaf that some ranks have nothing of, or that all have whole, would be other values in DTensors.

    In other worlds chunks along two axes, or with no element for the last rank, would be other ones than torch's.
    """
    gloo(odd_leaves, shard=shard, replicate=replicate)


def of_an_ended_group(mesh: Any) -> None:
    """DTensors would refer to process groups that have ended; another group has begun since."""
    sharded = fshard.shard_params({"w": torch.ones(3)}, fshard.make_plan({"w": torch.ones(3)}, mesh))
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"a DeviceMesh that is still there"):
        fshard.state_dict(sharded, dtensors=True)


def test_no_dtensors_of_an_ended_group():
    """torch's own error names a group that cannot be resolved, when the tensors are used."""
    gloo(of_an_ended_group, shard=1)


class Unreadable(dict[str, Any]):
    """A file that cannot be read on one rank."""

    def __getitem__(self, name: str) -> Any:
        raise OSError("disk failure")


def whole_tensors(x: Any) -> Any:
    """Nested dicts with whole tensors in place of DTensors."""
    return {k: whole_tensors(v) if isinstance(v, dict) else v.full_tensor() for k, v in x.items()}


def without(x: dict[str, Any], name: str) -> dict[str, Any]:
    """A dict that lacks a name."""
    return {key: value for key, value in x.items() if key != name}


def differing(mesh: Any) -> dict[str, list[str]]:
    """The errors of loads for which rank 1 has something else than rank 0: of parameters, of optimizer state."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    ours, is_other = Ours(mesh), mesh.get_rank() == 1
    saved = fshard.state_dict(ours.params, dtensors=True)
    plain = whole_tensors(saved)
    saved_state = optim.state.state_dict(ours.state, ours.params, dtensors=True)["state"]
    mixed = {**saved_state, "scale": {**saved_state["scale"], "exp_avg": torch.zeros(1).double()}}
    params: list[Any] = [plain, without(saved, "scale"), Unreadable(saved), [saved], {**saved, "scale": plain["scale"]}]
    states: list[Any] = [mixed, without(saved_state, "scale"), {**saved_state, "w": {}}, None]
    errors: dict[str, list[str]] = {"mapping": [], "saved": []}

    def error_of(fn: Any) -> str:
        with pytest.raises(Exception) as failure:  # noqa: PT011  its words are looked at below
            fn()
        dist.barrier()  # no rank is still inside
        return str(failure.value)

    for other in params:
        given = other if is_other else saved
        errors["mapping"].append(error_of(lambda given=given: fshard.load_state_dict(ours.params, given)))
    for other in states:
        given = {"state": other if is_other else saved_state}
        errors["saved"].append(
            error_of(lambda given=given: optim.state.load_state_dict(given, ours.state, ours.params))
        )
    # leaves that one rank alone lacks keep their state on all ranks or on none
    given = {"state": without(saved_state, "scale") if is_other else saved_state}
    errors["saved"].append(error_of(lambda: optim.state.load_state_dict(given, ours.state, ours.params, strict=False)))
    one_rank = saved if is_other else {}
    errors["mapping"].append(error_of(lambda: fshard.load_state_dict(ours.params, one_rank, src=1)))
    one_state = {"state": saved_state} if is_other else {}
    errors["saved"].append(error_of(lambda: optim.state.load_state_dict(one_state, ours.state, ours.params, src=1)))
    return errors


def test_what_ranks_have_differs():
    """Ranks would wait for each other forever, or one would go on with another model."""
    of_rank_0, of_rank_1 = gloo(differing)
    chunk = "a DTensor torch.float64 [1] (Shard(dim=0),) over [2] ranks"
    sharded = [
        f"mapping differs between ranks: rank 0 has 'scale': {chunk}",
        "whole tensors on all ranks or on no",
    ]
    states = [f"saved differs between ranks: rank 0 has 'mu.scale': {chunk}; rank 1 has 'mu.embed.weight'"]
    alone = f"'scale': {chunk}, which rank 1 alone cannot make whole: leave src out"
    expected = {
        "mapping": [sharded, "it lacks 1 names: 'scale'", "disk failure", "an object of type list", sharded, alone],
        "saved": [
            states,
            "leaf 'scale': expected 'exp_avg' in its state, there is nothing",
            "the state has 'w', which is no leaf of the tree",
            "saved: expected a dict with 'state'",
            states,
            f"leaf {alone}",
        ],
    }
    for kind, sentences in expected.items():
        for words, *errors in zip(sentences, of_rank_0[kind], of_rank_1[kind], strict=True):
            for error in errors:
                assert all(part in error for part in ([words] if isinstance(words, str) else words))
            if isinstance(words, str):  # an error of rank 1 alone
                assert errors[0].startswith("rank 1: ")
                assert errors[0].endswith(
                    f"{errors[1]}. This rank has no such error: give all ranks the same arguments"
                )
