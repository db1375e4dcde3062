"""Checkpoints that torch's libraries wrote are restored into fshard, and ours by them; pickles run nothing."""

import dataclasses
import datetime
import errno
import io
import os
import pickle
import random
import re
import threading
import tracemalloc
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.optim as to
from support.models import rand, same_bits
from support.worlds import gloo
from torch import Tensor, nn

import fshard
from fshard import checkpoint, optim
from fshard.files import inert_pickle
from fshard.files.folders import LocalFolder
from fshard.files.safetensors_file import DTYPES
from fshard.module import functionalize
from fshard.testing import simulate

LR = 0.1


class Net(nn.Module):
    """Tied embeddings, a block and buffers; no size divides by the number of ranks, and one is smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, words: Tensor) -> Tensor:
        """(rows,) -> (rows, 7)."""
        x = self.embed(words)
        return self.head(self.norm(x + torch.tanh(self.block(x)))) * self.scale


def net(seed: int = 5) -> Net:
    """In float64, the same on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Net().double()
        for x in model.parameters():
            nn.init.normal_(x, std=0.5)
    return model


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """A batch of a rank."""
    words = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"words": words, "target": rand(6, 7, seed=1000 + 10 * step + rank)}


TORCH = {
    "adamw": lambda x: to.AdamW(x, LR, weight_decay=0.01),
    "sgd": lambda x: to.SGD(x, LR, momentum=0.9),
}
OURS = {"adamw": optim.adamw(LR), "sgd": optim.sgd(LR, momentum=0.9)}


def torch_steps(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """torch's own steps: the losses, and the model is changed."""
    losses = []
    for i in steps:
        data = batch(i, dist.get_rank())
        optimizer.zero_grad()
        loss = (model(data["words"]) - data["target"]).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


class Ours:
    """The model in fshard: `state` changes with each call of `steps`."""

    def __init__(self, mesh: Any, kind: str, **plan: Any):
        self.apply, shapes, buffers = functionalize(net(seed=6))
        self.tx = OURS[kind]
        params = fshard.shard_params(shapes, fshard.make_plan(shapes, mesh, units=self.apply.units(nn.Linear), **plan))
        self.state = fshard.init_state(params, self.tx, extra=buffers)

    def restore(self, folder: str, count: int, **names: Any) -> None:
        """The state becomes that of a checkpoint of torch."""
        state = self.state
        opt_state: Any = state.opt_state
        if not isinstance(OURS["adamw"].init({}), type(opt_state)):
            opt_state = {"momentum": opt_state.momentum}
        like = {"params": state.params, "opt_state": opt_state, "extra": state.extra}
        rename = optim.state.torch_names(state.opt_state, state.params, buffers=state.extra, **names)
        read = checkpoint.restore(folder, like, rename=rename)
        if isinstance(opt_state, dict):
            read["opt_state"] = state.opt_state._replace(count=torch.tensor(float(count)), **read["opt_state"])
        self.state = dataclasses.replace(state, **read)

    def steps(self, steps: range) -> list[float]:
        """Our own steps: the losses."""

        def loss(params: Any, extra: Any, data: Any) -> Any:
            out, extra = self.apply(params, extra, data["words"])
            return (out - data["target"]).square().mean(), extra

        step, losses = fshard.train_step(loss, self.tx, with_extra=True), []
        for i in steps:
            self.state, metrics = step(self.state, batch(i, dist.get_rank()))
            losses.append(metrics["loss"].item())
        return losses

    def torch_state(self, kind: str) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves of this state."""
        settings = TORCH[kind]([torch.ones(1)]).param_groups[0]
        groups = [{key: x for key, x in settings.items() if key != "params"}]
        opt_state = optim.state.state_dict(self.state.opt_state, self.state.params, groups=groups, dtensors=True)
        for entry in opt_state["state"].values():
            if kind == "sgd":
                entry.pop("step")  # torch's SGD has none
        return {"model": self.apply.state_dict(self.state.params, self.state.extra, dtensors=True), "optim": opt_state}


def alike(a: list[float], b: list[float]) -> None:
    """Losses are equal in float64 up to rounding."""
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def fsdp2(mesh: Any, kind: str) -> tuple[nn.Module, Any]:
    """A model and its optimizer in FSDP2, the block wrapped."""
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, TORCH[kind](model.parameters())


def fsdp2_both_ways(mesh: Any, folder: str, kind: str, flat: bool, plan: dict[str, Any]) -> None:
    """FSDP2 trains and saves, fshard goes on and saves, FSDP2 goes on from there, each beside the one that stayed."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = fsdp2(mesh, kind)
    torch_steps(model, optimizer, range(3))
    names = ("model", "optim")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer, options=options), strict=True)), checkpoint_id=folder)

    ours = Ours(mesh, kind, **plan)
    ours.restore(folder, count=3)
    whole = {name: x.full_tensor() for name, x in model.state_dict().items() if hasattr(x, "full_tensor")}
    assert same_bits(fshard.state_dict(ours.state.params), whole)
    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))

    dcp.save(ours.torch_state(kind), checkpoint_id=f"{folder}/2")
    there, optimizer_there = fsdp2(mesh, kind)
    torch_steps(there, optimizer_there, range(1))  # other values, and a state to load into
    into = dict(zip(names, get_state_dict(there, optimizer_there), strict=True))
    dcp.load(into, checkpoint_id=f"{folder}/2")
    set_state_dict(there, optimizer_there, model_state_dict=into["model"], optim_state_dict=into["optim"])
    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


@pytest.mark.parametrize(
    ("kind", "flat", "replicate"), [("adamw", False, 1), ("sgd", False, 1), ("adamw", True, 2), ("sgd", True, 2)]
)
def test_fsdp2_both_ways(tmp_path, kind, flat, replicate):
    """What FSDP2 saved would be other values in fshard, or ours in FSDP2, or training would go on otherwise."""
    plan = {"state_over": ("replicate", "shard")} if replicate == 2 and kind == "adamw" else {}
    gloo(fsdp2_both_ways, str(tmp_path), kind, flat, plan, replicate=replicate)


def ddp_both_ways(mesh: Any, folder: str) -> None:
    """DDP trains and saves plain tensors, its optimizer by number; fshard goes on and saves, DDP goes on from there."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    import torch.distributed.checkpoint as dcp

    model = nn.parallel.DistributedDataParallel(net())
    optimizer = TORCH["adamw"](model.parameters())
    torch_steps(model, optimizer, range(3))
    dcp.save({"net": model.state_dict(), "o": optimizer.state_dict()}, checkpoint_id=folder)
    ours = Ours(mesh, "adamw")
    ours.restore(folder, 3, model="net.module", optim="o")
    params = fshard.state_dict(ours.state.params)
    assert same_bits(params, {name: model.module.state_dict()[name] for name in params})
    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))

    there = nn.parallel.DistributedDataParallel(net(seed=7))
    optimizer_there = TORCH["adamw"](there.parameters())
    torch_steps(there, optimizer_there, range(1))  # other values, and a state to load into
    state = ours.torch_state("adamw")
    numbers = optim.state.state_dict(ours.state.opt_state, ours.state.params, "index", dtensors=True)
    dcp.save({"net": state["model"], "o": {"state": numbers["state"]}}, checkpoint_id=f"{folder}/2")
    into = {"net": there.module.state_dict(), "o": {"state": optimizer_there.state_dict()["state"]}}
    dcp.load(into, checkpoint_id=f"{folder}/2")
    there.module.load_state_dict(into["net"])
    optimizer_there.load_state_dict({**optimizer_there.state_dict(), **into["o"]})
    stayed = torch_steps(model, optimizer, range(5, 7))
    alike(torch_steps(there, optimizer_there, range(5, 7)), stayed)
    alike(ours.steps(range(5, 7)), stayed)


def fsdp1_to_fshard(mesh: Any, folder: str) -> None:
    """FSDP1 trains and saves ShardedTensors; fshard goes on."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    import torch.distributed.checkpoint as dcp
    from torch.distributed import fsdp
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = TORCH["adamw"](model.parameters())
    torch_steps(model, optimizer, range(3))
    # with offload_to_cpu torch 2.13 gives on CPUs one buffer for all: exp_avg has exp_avg_sq's values
    configs = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT, *configs):
        state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
    ours = Ours(mesh, "adamw")
    ours.restore(folder, count=3)
    alike(ours.steps(range(3, 5)), torch_steps(model, optimizer, range(3, 5)))


@pytest.mark.parametrize("library", [ddp_both_ways, fsdp1_to_fshard])
def test_other_libraries(tmp_path, library):
    """Plain tensors, states by number, or ShardedTensors would be other values in fshard, or ours in DDP."""
    gloo(library, str(tmp_path))


def saved(folder: Path, tree: Any, **options: Any) -> Any:
    """torch.distributed.checkpoint saves a tree without processes; the tree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own libraries
        import torch.distributed.checkpoint as dcp

        dcp.save(tree, checkpoint_id=folder, **options)
    return tree


def tensors() -> dict[str, Tensor]:
    """Tensors of every dtype and of some shapes, empty ones and scalars among them."""
    values = {str(kind): torch.arange(16, dtype=torch.uint8).view(kind) for kind in DTYPES.values()}
    values["torch.bool"] = torch.tensor([True, False])
    shapes = {"none": (0, 3), "scalar": (), "long": (1000,), "deep": (2, 3, 4)}
    return values | {name: rand(*shape, seed=3) for name, shape in shapes.items()}


def zeros_like(values: dict[str, Tensor], mesh: Any = None) -> Any:
    """Sharded zeros of the shapes of some tensors."""
    zeros = {name: torch.zeros_like(x) for name, x in values.items()}
    return fshard.shard_params(zeros, fshard.make_plan(values, mesh))


def restored(mesh: Any, path: Path, values: dict[str, Tensor]) -> Any:
    """What a checkpoint has in place of some tensors, restored into shards and gathered."""
    return fshard.gather_params(checkpoint.restore(path, zeros_like(values, mesh)))


@pytest.mark.parametrize("world", [1, 3])
def test_every_dtype_and_shape(tmp_path, world):
    """Tensors of some dtype or shape would be other values in fshard."""
    values = saved(tmp_path, tensors())

    for whole in simulate(lambda mesh: restored(mesh, tmp_path, values), shard=world):
        assert same_bits(whole, values)


@pytest.mark.parametrize("more", [(), (None,), ((3, 1), "of a later torch")])
def test_properties_of_later_releases(tmp_path, monkeypatch, more):
    """Checkpoints that torch 2.15 wrote, whose properties of tensors have an entry more, could not be restored."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    plain = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*plain(self)[:5], *more))
    values = saved(tmp_path, {"w": rand(5, 3, seed=1)})
    assert same_bits(restored(None, tmp_path, values), values)


def boxes(mesh: Any, folder: str, names: tuple[str, ...]) -> None:
    """torch saves DTensors that are cut along other dimensions."""
    warnings.simplefilter("ignore")  # what torch says of its own libraries
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cuts: dict[str, list[Any]] = {"a": [Shard(1)], "b": [Shard(2)], "c": [Shard(0)], "d": [Replicate()]}
    if len(names) == 2:
        cuts = {"a": [Shard(0), Shard(1)], "b": [Shard(2), Shard(0)], "c": [Shard(1), Shard(1)], "d": [Shard(0)] * 2}
    values = {name: distribute_tensor(WHOLE[name], mesh, how) for name, how in cuts.items()}
    dcp.save(values, checkpoint_id=f"{folder}/dcp")
    dcp.save(values, storage_writer=HuggingFaceStorageWriter(f"{folder}/hf", save_distributed=True))


WHOLE = {"a": rand(5, 7, seed=1), "b": rand(3, 4, 5, seed=2), "c": rand(7, 2, seed=3), "d": rand(3, seed=4)}


@pytest.mark.parametrize("replicate", [1, 2])
def test_boxes_are_runs_of_elements(tmp_path, replicate):
    """What ranks wrote of tensors that are cut along other dimensions than the first would be other values."""
    names = ("replicate", "shard")[2 - replicate :]
    gloo(boxes, str(tmp_path), names, replicate=replicate)

    for folder in ("dcp", "hf"):
        for whole in simulate(lambda mesh, path=tmp_path / folder: restored(mesh, path, WHOLE), shard=3):
            assert same_bits(whole, WHOLE)


@pytest.mark.parametrize("kind", ["one file", "a file", "several files", "torch's writer"])
def test_hugging_face_files(tmp_path, kind):
    """Tensors of a Hugging Face directory would be other values, or be read whole by every rank."""
    params = fshard.shard_params(WHOLE, fshard.make_plan(WHOLE))
    if kind == "torch's writer":
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        saved(tmp_path, WHOLE, storage_writer=HuggingFaceStorageWriter(str(tmp_path)))
    else:
        checkpoint.save_safetensors(tmp_path, params, **({"max_bytes": 400} if kind == "several files" else {}))
        assert (tmp_path / "model.safetensors.index.json").exists() == (kind == "several files")
    path = tmp_path / "model.safetensors" if kind == "a file" else tmp_path

    for whole in simulate(lambda mesh: restored(mesh, path, WHOLE), shard=2):
        assert same_bits(whole, WHOLE)
    like = {"params": params, "epoch": 0}
    with pytest.raises(ValueError, match=r"differs from `like`: it lacks 1 names: 'epoch'"):
        checkpoint.restore(path, like, rename=lambda name: f"params.{name}")


class Counted:
    """A file that counts the bytes that are read."""

    def __init__(self, file: Any, num_bytes: list[int]):
        self._file, self.size, self._num_bytes = file, file.size, num_bytes

    def read_into(self, offset: int, view: memoryview) -> int:
        """As the file."""
        self._num_bytes.append(len(view))
        return self._file.read_into(offset, view)


@pytest.mark.parametrize("kind", ["Hugging Face", "torch"])
def test_a_rank_reads_what_it_needs(tmp_path, kind):
    """Every rank would read the whole checkpoint: on a thousand ranks that is the data a thousand times."""
    values, num_bytes, opened = {"w": rand(1000, 64, seed=1), "v": rand(100_000, seed=2)}, list[int](), LocalFolder.open
    if kind == "torch":
        saved(tmp_path, values)
    else:
        checkpoint.save_safetensors(tmp_path, fshard.shard_params(values, fshard.make_plan(values)))

    @contextmanager
    def counted(place: Any, name: str) -> Any:
        with opened(place, name) as file:
            yield Counted(file, num_bytes)

    with mock.patch.object(LocalFolder, "open", counted):
        for whole in simulate(lambda mesh: restored(mesh, tmp_path, values), shard=4):
            assert same_bits(whole, values)
    size = sum(x.nbytes for x in values.values())
    assert size <= sum(num_bytes) <= size + 4 * 30_000  # pickles, zip directories and headers


def steps_of(**steps: float) -> dict[str, Any]:
    """What a torch program saves of parameters `a` and `b`, with these steps."""
    moments = {name: {"exp_avg": rand(2, seed=1), "exp_avg_sq": rand(2, seed=2)} for name in steps}
    state = {name: {**moments[name], "step": torch.tensor(step)} for name, step in steps.items()}
    groups = [
        {"lr": 0.25, "betas": (0.9, 0.5), "weight_decay": 0.125, "eps": 1e-8, "foreach": None, "params": [*steps]}
    ]
    params = {name: rand(2, seed=3) for name in steps}
    return {"model": params, "optim": {"state": state, "param_groups": groups}}


def ours_of(tx: Any) -> tuple[Any, Any]:
    """A tree to restore parameters `a` and `b` and the state of their optimizer into, and what gives the names."""
    params = {"a": torch.zeros(2).double(), "b": torch.zeros(2).double()}
    state = tx.init(params)
    return {"params": params, "opt_state": state}, optim.state.torch_names(state, params)


def test_steps_must_be_equal(tmp_path):
    """A state with one count for all leaves would have that of any of them."""
    like, names = ours_of(optim.adamw(LR))
    saved(tmp_path / "equal", steps_of(a=3.0, b=3.0))
    assert checkpoint.restore(tmp_path / "equal", like, rename=names)["opt_state"].count == 3
    saved(tmp_path / "other", steps_of(a=3.0, b=4.0))
    words = r"'opt_state.count': 'optim.state.a.step' and 'optim.state.b.step' are both called so, and differ"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.restore(tmp_path / "other", like, rename=names)
    saved(tmp_path / "numbers", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match="'n': 'a' and 'b' are both called so, and differ"):
        checkpoint.restore(tmp_path / "numbers", {"n": 0}, rename=lambda name: "n")


def test_tied_leaves_must_be_equal(tmp_path):
    """A tied leaf would have the values of any of its names."""
    w = rand(3, 2, seed=1)
    plan = fshard.make_plan({"a": w, "b": w})
    like = fshard.shard_params({"a": w, "b": w}, plan)
    saved(tmp_path / "tied", {"a": w, "b": w.clone()})
    assert same_bits(checkpoint.restore(tmp_path / "tied", like).tensors, like.tensors)
    saved(tmp_path / "b", {"b": w})
    assert same_bits(checkpoint.restore(tmp_path / "b", like).tensors, like.tensors)
    saved(tmp_path / "other", {"a": w, "b": w + 1})
    with pytest.raises(checkpoint.CheckpointError, match="leaf 'a': 'a' and 'b' are both called so, and differ"):
        checkpoint.restore(tmp_path / "other", like)


@pytest.mark.parametrize("flat", [False, True])
def test_hyper_parameters_are_those_of_torchs_groups(tmp_path, flat):
    """A learning rate that torch's scheduler has set would be the first one again."""
    like, names = ours_of(optim.with_hyperparams(optim.adamw, lr=LR, weight_decay=0.5))
    # the count of schedules is ours alone
    like["opt_state"] = {"hyperparams": like["opt_state"].hyperparams, "inner": like["opt_state"].inner}
    state = steps_of(a=3.0, b=3.0)
    if flat:
        (group,) = state["optim"].pop("param_groups")
        settings = {f"param_groups.{name}.{key}": x for name in group.pop("params") for key, x in group.items()}
        moments = {f"state.{n}.{key}": x for n, of in state["optim"]["state"].items() for key, x in of.items()}
        state["optim"] = {**moments, **settings}
    saved(tmp_path, state)
    hyperparams = checkpoint.restore(tmp_path, like, rename=names)["opt_state"]["hyperparams"]
    assert {name: x.item() for name, x in hyperparams.items()} == {"lr": 0.25, "weight_decay": 0.125}


@pytest.mark.parametrize(
    ("leaves", "groups", "order"),
    [
        (["0", "1"], [["1", "0"]], ["1", "0"]),
        (["0", "1", "2"], [["2"], ["0", "1"]], ["2", "0", "1"]),
        (["1", "0"], [["1", "0"]], ["1", "0"]),
        (["a", "0"], [["a", "0"]], ["a", "0"]),
        (["0", "1"], [["0", "1"]], None),
        (["a", "b"], [["b", "a"]], ["b", "a"]),
    ],
)
@pytest.mark.parametrize("by_number", [False, True])
def test_leaves_that_have_numbers_as_names(tmp_path, leaves, groups, order, by_number):
    """A number would be taken for a name: leaves would get the moments of others, without an error."""
    params = {leaf: nn.Parameter(torch.ones(2).double()) for leaf in leaves}
    optimizer = torch.optim.AdamW([{"params": [params[leaf] for leaf in group]} for group in groups], lr=LR)
    sum((x * (3 + n)).sum() for n, x in enumerate(params.values())).backward()
    optimizer.step()
    state, names = optimizer.state_dict(), [leaf for group in groups for leaf in group]
    if not by_number:
        state["state"] = {names[number]: entry for number, entry in state["state"].items()}
    saved(tmp_path, {"model": {leaf: x.detach() for leaf, x in params.items()}, "optim": state})
    like: Any = {"params": {leaf: torch.zeros(2).double() for leaf in leaves}}
    like["opt_state"] = optim.adamw(LR).init(like["params"])
    rename = optim.state.torch_names(like["opt_state"], like["params"], order=order if by_number or not order else ())
    restored = checkpoint.restore(tmp_path, like, rename=rename)
    expected = {leaf: optimizer.state[x]["exp_avg"] for leaf, x in params.items()}
    assert same_bits(restored["opt_state"].mu, expected)


def test_numbers_as_names_need_an_order():
    """Which of two leaves a number means would be guessed."""
    params = {"a": torch.zeros(2), "0": torch.zeros(2)}
    with pytest.raises(ValueError, match="the number of leaf 'a' is '0', and another leaf has this name: pass"):
        optim.state.torch_names(optim.adamw(LR).init(params), params)


@pytest.mark.parametrize(
    ("number", "dtype"), [(1e300, torch.float32), (2**40, torch.float16), (-(10**400), torch.float64)]
)
def test_a_number_that_a_dtype_cannot_hold(tmp_path, number, dtype):
    """It would be infinite, or an error without the name of the leaf."""
    checkpoint.save(tmp_path, {"a": number}, 1)
    with pytest.raises(ValueError, match=re.escape(f"'a': expected a number that {dtype} can hold, got {number}")):
        checkpoint.restore(tmp_path, {"a": torch.zeros((), dtype=dtype)})
    checkpoint.save(tmp_path, {"a": float("inf")}, 2)
    assert checkpoint.restore(tmp_path, {"a": torch.zeros((), dtype=dtype)})["a"] == float("inf")


def test_what_is_refused_and_why(tmp_path):
    """Pickles of torch.save would be read, or a user would not learn what to do."""
    like = {"w": torch.zeros(2)}
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    for path in (tmp_path, tmp_path / "model.pt"):
        with pytest.raises(checkpoint.CheckpointError, match="a pickle, which may run any code"):
            checkpoint.restore(path, like)
    saved(tmp_path / "dcp", {"w": torch.ones(2), "none": None, "when": datetime.date(2026, 1, 1)})
    for wrong in ({"step": 3}, {"fall_back": True}):
        words = (
            "expected None and False, because .* has one checkpoint of torch.distributed.checkpoint, and none of steps"
        )
        with pytest.raises(ValueError, match=words):
            checkpoint.restore(tmp_path / "dcp", like, **wrong)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(tmp_path / "model.pt")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"links/model.safetensors: expected a regular file: a link may"
    ):
        checkpoint.restore(tmp_path / "links", like)
    # what cannot be read is no obstacle, unless `like` has it
    assert checkpoint.restore(tmp_path / "dcp", like)["w"].tolist() == [1, 1]
    words = "it lacks 2 names: 'none', 'when'; 'none': 'none' is None, .*; 'when': .* names 'datetime.date'"
    with pytest.raises(ValueError, match=words):
        checkpoint.restore(tmp_path / "dcp", {**like, "none": 0, "when": ""})
    # a directory of `save` is one of steps, whatever else is in it
    checkpoint.save(tmp_path / "dcp", {"w": torch.full((2,), 5.0)}, step=1)
    assert checkpoint.restore(tmp_path / "dcp", like)["w"].tolist() == [5, 5]


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_every_rank_raises_if_one_cannot_read(tmp_path, file):
    """A rank that does not see a file would let the others wait, or they would go on with another state."""
    values, blind, opened = saved(tmp_path, {"w": rand(4, 2, seed=1)}), set[int](), LocalFolder.open

    def seen(place: Any, name: str) -> Any:
        if name == file and threading.get_ident() in blind:
            raise FileNotFoundError(errno.ENOENT, "not yet here", name)
        return opened(place, name)

    def read(mesh: Any) -> str:
        if mesh.get_rank() == 1:
            blind.add(threading.get_ident())
        with pytest.raises(checkpoint.CheckpointError, match="not yet here") as failure:
            restored(mesh, tmp_path, values)
        return str(failure.value)

    with mock.patch.object(LocalFolder, "open", seen):
        first, second = simulate(read, shard=2)
    assert f"{tmp_path}/{file}: " in second
    assert f"rank 1: {second}" in first or second in first


def test_a_tensor_that_is_a_view(tmp_path):
    """A chunk that begins in the middle of what torch.save wrote would be other elements."""
    saved(tmp_path, {"w": torch.ones(3, 4)})
    _of(torch.arange(20.0)[4:16].view(3, 4))(tmp_path)
    read = checkpoint.restore(tmp_path, {"w": torch.zeros(3, 4)})
    assert read["w"].flatten().tolist() == list(range(4, 16))


def test_numbers_strings_and_lists(tmp_path):
    """Numbers of torch's checkpoint would be others, or those within lists could not be read."""
    saved(tmp_path, {"a": {"b": [1, 2.5, "x", True]}, "t": (3, {"u": -(2**63)}), "inf": float("inf")})
    like = {"a": {"b": [0, 0.0, "", False]}, "t": [0, {"u": 0}], "inf": 0.0}
    read = checkpoint.restore(tmp_path, like)
    assert read == {"a": {"b": [1, 2.5, "x", True]}, "t": [3, {"u": -(2**63)}], "inf": float("inf")}


def peak_of(fn: Any) -> int:
    """The most bytes that Python's objects took while a function ran."""
    tracemalloc.start()
    try:
        fn()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def _zipped(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    """A zip file as torch.save makes them."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", kind) as file:
        for name, content in members.items():
            file.writestr(f"archive/{name}", content)
    return data.getvalue()


def _metadata(folder: Path) -> Any:
    """torch's metadata: in the tests of what torch itself wrote."""
    return pickle.loads((folder / ".metadata").read_bytes())


def _changed(folder: Path, change: Any) -> None:
    """Change torch's metadata."""
    metadata = _metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _info(metadata: Any, name: str) -> Any:
    """Where the first chunk of a tensor lies."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def _put_item(folder: Path, name: str, data: bytes, **changes: Any) -> None:
    """Put other bytes in place of an item, in a file of their own."""
    (folder / "other").write_bytes(data)
    where = {"relative_path": "other", "offset": 0, "length": len(data), **changes}
    _changed(folder, lambda metadata: vars(_info(metadata, name)).update(where))


def _put(**members: bytes | None) -> Any:
    """Put other members into the item of the tensor `w`; None: leave one out."""

    def change(folder: Path) -> None:
        _put_item(folder, "w", _zipped(_members(torch.ones(3, 4), members)))

    return change


def _members(x: Tensor, changes: dict[str, bytes | None]) -> dict[str, bytes]:
    """The members of the zip file that torch.save makes of a tensor, some of them changed."""
    data = io.BytesIO()
    torch.save(x, data)
    with zipfile.ZipFile(data) as file:
        members: dict[str, Any] = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    members |= {name.replace("_", "/"): content for name, content in changes.items()}
    return {name: content for name, content in members.items() if content is not None}


def _of(x: Any) -> Any:
    """Put what torch.save writes of another object into the item of the tensor `w`."""

    def change(folder: Path) -> None:
        data = io.BytesIO()
        torch.save(x, data)
        _put_item(folder, "w", data.getvalue())

    return change


def _with(change: Any) -> Any:
    """Change torch's metadata; `change` has the metadata, where `w` lies, and the form of `w`."""
    return lambda folder: _changed(folder, lambda x: change(x, _info(x, "w"), x.state_dict_metadata["w"]))


def _symlink(folder: Path) -> None:
    (folder / "__0_0.distcp").rename(folder / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(folder / "elsewhere")


def _pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def _flagged(folder: Path) -> None:
    """An encrypted member."""
    data = bytearray(_zipped(_members(torch.ones(3, 4), {})))
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    _put_item(folder, "w", bytes(data))


def _far(folder: Path) -> None:
    """A member whose directory entry says that it goes on beyond the zip file, in a file that is long enough."""
    data = bytearray(_zipped(_members(torch.ones(3, 4), {})))
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"archive/data/0"))
    data[at + 20 : at + 28] = (1 << 16).to_bytes(4, "little") * 2
    _put_item(folder, "w", bytes(data))
    with open(folder / "other", "ab") as file:
        file.write(bytes(1 << 17))


def _chunk(offsets: Any, sizes: Any) -> Any:
    """The form of `w` with one more chunk."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return _with(lambda x, info, form: form.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))))


CONJUGATE = torch.ones(3, 4, dtype=torch.complex64).conj()
DAMAGES: dict[str, tuple[Any, str]] = {
    "compressed": (
        lambda folder: _put_item(folder, "w", _zipped(_members(torch.ones(3, 4), {}), zipfile.ZIP_DEFLATED)),
        "'data.pkl' is compressed",
    ),
    "zip bomb": (
        lambda folder: _put_item(folder, "w", _zipped({"data.pkl": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)),
        "'data.pkl' is compressed",
    ),
    "long pickle": (_put(**{"data.pkl": bytes(1 << 25)}), "expected at most 16,777,216 bytes, got 33,554,432"),
    "encrypted": (_flagged, "is encrypted"),
    "long names": (_put(**{f"{n}" + 60_000 * "m": b"" for n in range(300)}), "expected at most 16,777,216 bytes"),
    "no data": (_put(data_0=None), "the zip file lacks 'data/0'"),
    "no pickle": (_put(**{"data.pkl": None}), "the zip file lacks 'data.pkl'"),
    "few data": (_put(data_0=bytes(47)), "expected 48 bytes, got 47"),
    "far data": (_far, "65,536 bytes from byte [0-9,]+ on are beyond the zip file"),
    "big-endian": (_put(byteorder=b"big"), "expected little-endian numbers, got b'big'"),
    "no zip file": (lambda folder: _put_item(folder, "w", b"PK" + bytes(1000)), "expected a zip file"),
    "no tensor": (_of([1]), "expected a tensor, got an object of type list"),
    "an evil tensor": (_of(Evil("ran")), "names 'posix.system'"),
    "another dtype": (_of(torch.ones(3, 4).int()), r"expected torch.float32 \[3, 4\], got torch.int32 \[3, 4\]"),
    "another shape": (_of(torch.ones(4, 3)), r"expected torch.float32 \[3, 4\], got torch.float32 \[4, 3\]"),
    "other strides": (_of(torch.ones(4, 3).t()), r"with strides \[1, 3\]: expected \[4, 1\]; save x.contiguous\(\)"),
    "conjugated": (_of(CONJUGATE), "a tensor that is conjugated"),
    "beyond the file": (_with(lambda x, info, form: vars(info).update(offset=1 << 40)), "beyond the end of the file"),
    "longer": (_with(lambda x, info, form: vars(info).update(length=1 << 40)), "overlap|beyond the end of the file"),
    "overlap": (_with(lambda x, info, form: vars(info).update(vars(_info(x, "v")))), "overlap"),
    "negative": (_with(lambda x, info, form: vars(info).update(offset=-1)), "expected up to 64 numbers of at least 0"),
    "another folder": (_with(lambda x, info, form: vars(info).update(relative_path="../x")), "got '../x'"),
    "absolute": (_with(lambda x, info, form: vars(info).update(relative_path="/etc/passwd")), "got '/etc/passwd'"),
    "symbolic link": (_symlink, "symbolic link"),
    "pipe": (_pipe, "expected a regular file"),
    "no file": (lambda folder: (folder / "__0_0.distcp").unlink(), "No such file"),
    "transformed": (
        _with(lambda x, info, form: vars(info).update(transform_descriptors=["zstd"])),
        "its bytes were transformed",
    ),
    "chunk outside": (_chunk((3, 0), (1, 4)), r"a chunk \[1, 4\] at \[3, 0\] is not inside the tensor \[3, 4\]"),
    "chunk twice": (_chunk((0, 0), (3, 4)), "'w': expected elements from 12 on, got 12 from 0 on"),
    "unknown chunk": (_chunk((1, 0), (1, 4)), "'w': no file has the chunk at"),
    "another dimension": (_chunk((0,), (1,)), "is not inside the tensor"),
    "few chunks": (_with(lambda x, info, form: form.chunks.clear()), "'w': expected 12 elements, got 0"),
    "many dimensions": (
        _with(lambda x, info, form: setattr(form, "size", torch.Size([2] * 100))),
        "'w': size: expected up to 64 numbers",
    ),
    "huge": (_with(lambda x, info, form: setattr(form, "size", torch.Size([1 << 62] * 64))), "'w': "),
    "no storage": (_with(lambda x, info, form: setattr(x, "storage_data", None)), "storage_data: expected dict"),
    "many runs": (
        _with(
            lambda x, info, form: (
                setattr(form, "size", torch.Size([1 << 40, 5])),
                setattr(form.chunks[0], "sizes", torch.Size([1 << 40, 4])),
            )
        ),
        "there are more than 1,048,576 runs",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_of_torch(tmp_path, name):
    """A file that is damaged, or made to do harm, would be restored, read elsewhere, or take up the memory."""
    saved(tmp_path, {"v": torch.ones(3, 4), "w": torch.ones(3, 4)})
    change, sentence = DAMAGES[name]
    change(tmp_path)
    like = {"v": torch.zeros(3, 4), "w": torch.zeros(3, 4)}

    def read() -> None:
        with pytest.raises(checkpoint.CheckpointError, match=sentence) as failure:
            checkpoint.restore(tmp_path, like)
        assert str(failure.value).startswith(str(tmp_path))

    assert peak_of(read) < 200e6
    assert not Path("ran").exists()


def opcodes(*parts: bytes) -> bytes:
    """A pickle of these opcodes."""
    return b"\x80\x04" + b"".join(parts) + b"."


def word(text: str) -> bytes:
    """The opcode of a short string."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


RUN = (word("touch") + b"\x85R", word("os") + word("system") + b"\x93")  # the call of a function, os.system


def bombs(path: str) -> dict[str, bytes]:
    """Pickles that run code in an unpickler, take up its memory, or never end."""
    evil = pickle.dumps(Evil(path), protocol=4)
    laughs = [b"]\x94", *(b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(60))]
    tuples = b")" + b"\x86".join(b"\x94h" + bytes([n]) for n in range(60)) + b"\x86"
    return {
        "os.system": evil,
        "old os.system": pickle.dumps(Evil(path), protocol=0),
        "nested": pickle.dumps({"state_dict_metadata": [{"a": (1, Evil(path))}]}),
        "names from the memo": opcodes(word("os"), b"\x94", word("system"), b"\x940h\x00h\x01\x93", RUN[0]),
        "torch's own loader": opcodes(word("torch"), word("load"), b"\x93", word("x"), b"\x85R"),
        "a method of what is expected": opcodes(word("torch"), word("Size.__init__.__globals__"), b"\x93"),
        "a module below one": opcodes(word("torch.os"), word("system"), b"\x93"),
        "names that are no strings": opcodes(b"]", word("x"), b"\x93"),
        "extension": opcodes(b"\x82\x01"),
        "extension of 4 bytes": opcodes(b"\x84\x01\x00\x00\x00"),
        "instance": opcodes(b"(ios\nsystem\n"),
        "object": opcodes(b"(", RUN[1], word("x"), b"o"),
        "persistent id": opcodes(word("x"), b"Q"),
        "persistent id in words": opcodes(b"Px\n"),
        "keyword arguments": opcodes(word("torch"), word("Size"), b"\x93)}\x92"),
        "call of a value": opcodes(b"K\x01)R"),
        "call of a result": opcodes(word("torch"), word("Size"), b"\x93)R)R"),
        "state of a class": opcodes(word("torch"), word("Size"), b"\x93}b"),
        "state of a dict": opcodes(b"}N}", word("pop"), b"Ns\x86b"),
        "state of the class of dicts": opcodes(b"c.\n.\nN}", word("__setitem__"), b"Ns\x86b"),
        "arguments of the class of dicts": opcodes(b"c.\n.\n(", word("ab"), b"tR"),
        "set": opcodes(b"\x8f"),
        "escapes": opcodes(b"S'\\)'\n"),
        "no operation": opcodes(b"\xff"),
        "buffer": opcodes(b"\x97"),
        "long frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "long string": opcodes(b"\x8d" + b"\xff" * 8),
        "long string of 4 bytes": opcodes(b"X" + b"\xff" * 4),
        "long number": opcodes(b"\x8b\xff\xff\xff\x7f"),
        "digits": b"I" + b"9" * 100_000 + b"\n.",
        "wide number": opcodes(b"\x8a\x09" + b"\x01" * 9),
        "billion laughs": opcodes(*laughs),
        "hashes of nested tuples": opcodes(b"}", tuples, b"Ns"),
        "a list in itself": opcodes(b"]\x94h\x00a"),
        "deep lists": opcodes(b"]" * 100_000, b"a" * 99_999),
        "deep marks": opcodes(b"(" * 100_000),
        "deep tuples": opcodes(b")", b"\x85" * 100_000),
        "no memo": opcodes(b"h\x07"),
        "far memo": opcodes(b"Nr\xff\xff\xff\xff"),
        "empty stack": opcodes(b"a"),
        "append to a tuple": opcodes(b")Na"),
        "odd items": opcodes(b"}(Nu"),
        "no end": b"\x80\x04N",
        "nothing": b"",
        "text": b'{"format": "fshard"}',
        "a zip file": b"PK\x03\x04" + bytes(100),
        "numbers": opcodes(b"K\x01"),
    }


NAMES_OF_BOMBS = [*bombs("")]


@pytest.mark.parametrize("name", NAMES_OF_BOMBS)
def test_a_pickle_runs_nothing(tmp_path, name):
    """A pickle under the name .metadata would run code, take up the memory, or never end."""
    (tmp_path / ".metadata").write_bytes(bombs(str(tmp_path / "ran"))[name])

    def read() -> None:
        with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata: "):
            checkpoint.restore(tmp_path, {"w": torch.zeros(1)})

    assert peak_of(read) < 200e6
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [name for name in NAMES_OF_BOMBS if name.startswith(("call", "state", "hashes"))])
def test_calls_and_states_are_refused_where_they_stand(name):
    """What reads the data of a pickle would have to know what cannot be called, filled, or hashed."""
    with pytest.raises(ValueError, match=r"a pickle that .* or was made to do harm"):
        inert_pickle.read_pickle(bombs("")[name], {"torch.Size"})
    assert inert_pickle.read_pickle(pickle.dumps({"a": [1]}), set()) == {"a": [1]}


@pytest.mark.parametrize("name", NAMES_OF_BOMBS[:-1])
def test_a_pickle_of_a_number_runs_nothing(tmp_path, name):
    """A pickle in place of a number of torch's would run code when it is read, or never end."""
    saved(tmp_path, {"n": 1, "w": torch.ones(2)})
    data = bombs(str(tmp_path / "ran"))[name]
    _put_item(tmp_path, "n", _zipped({"data.pkl": data}))
    like = {"w": torch.zeros(2)}
    # nobody asks for it
    assert checkpoint.restore(tmp_path, like, rename=lambda x: None if x.startswith("n") else x)["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"it lacks 1 names: 'n'.*'n': "):
        checkpoint.restore(tmp_path, {**like, "n": 0})
    assert not (tmp_path / "ran").exists()


OPERATIONS = b"(.0FGIJKLMNPQRSTUVX]abcdehijlopqrstu})\x80\x81\x82\x85\x86\x87\x88\x8a\x8b\x8c\x8d\x8e\x92\x93\x94\x95"


@pytest.mark.parametrize("seed", range(80))
def test_any_damage_is_an_error_or_none(tmp_path, seed):
    """Damaged bytes would end in an error that does not name the file, or in a tensor of another shape or dtype."""
    tree = {"w": torch.arange(12.0).view(3, 4), "n": 3, "t": ("a", {"x": torch.ones(2)})}
    like = {"w": torch.zeros(3, 4), "n": 0, "t": ["", {"x": torch.zeros(2)}]}
    saved(tmp_path, {**tree, "t": ["a", tree["t"][1]]})
    r = random.Random(seed)
    path = tmp_path / (".metadata" if seed % 4 else "__0_0.distcp")
    whole = path.read_bytes()
    for _ in range(5):
        data = bytearray(whole)
        for _ in range(r.randrange(1, 4)):
            at = r.randrange(len(data))
            data[at : at + r.randrange(3)] = r.choice(
                [b"", bytes([r.choice(OPERATIONS)]), r.randbytes(2), data[: r.randrange(40)]]
            )
        path.write_bytes(data)
        error, read = _outcome(tmp_path, like)
        if isinstance(error, checkpoint.CheckpointError):
            assert str(error).startswith(str(tmp_path))
        elif error is not None:
            assert "differs from `like`" in str(error)
        else:
            assert (read["w"].shape, read["w"].dtype, type(read["n"])) == ((3, 4), torch.float32, int)


def _outcome(folder: Path, like: Any) -> tuple[Exception | None, Any]:
    """The ValueError of a restore, or what it returns."""
    try:
        return None, checkpoint.restore(folder, like)
    except ValueError as error:
        return error, None
