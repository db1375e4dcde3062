"""Models of split leaves train as the plain models do, on every mesh, with every optimizer, in every way."""

import functools
from typing import Any

import pytest
import torch
from support.split_models import MODELS, SplitModel
from support.worlds import gloo
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import optim, tree
from fshard.testing import World

MESHES = {  # sizes of (replicate, shard, the axis of splits)
    "1x2": (0, 1, 2),
    "2x2": (0, 2, 2),
    "2x3": (0, 2, 3),
    "2x2x2": (2, 2, 2),
}
# Newton-Schulz iterations enlarge what is rounded by 3.4445^5 = 485 at most, so float64 leaves room to 1e-10
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, momentum=0.9),
    "adamw": optim.adamw(1e-2),
    "muon": optim.muon(1e-2, dtype=torch.float64),
}
BOTH = ("params_over", "grads_over", "state_over")
WAYS: dict[str, dict[str, Any]] = {  # arguments of a step, which take plans in turn
    "eager": {"plan": {}},
    "clip": {"plan": {"over": "both"}, "clip_norm": 0.1},
    "accumulate": {"plan": {"regather": False}, "clip_norm": 0.1, "accumulate": 2},
    "jit": {"plan": {"params_over": ()}, "clip_norm": 0.1},
}
STEPS = 3


def axes_of(sizes: tuple[int, int, int], axis: str) -> dict[str, int]:
    """A mesh: names of axes and their sizes; 0 is no axis."""
    return {name: size for name, size in zip(("replicate", "shard", axis), sizes, strict=True) if size}


def differing(axes: tuple[str, ...], model: SplitModel) -> tuple[str, ...]:
    """The axes along which batches differ."""
    return tuple(axis for axis in axes if model.differ or axis != model.axis)


def of_a_rank(rows: Tensor, mesh: Any, axes: tuple[str, ...]) -> Tensor:
    """This rank's rows, other numbers of them on each rank along `axes`."""
    ranks, rank = 1, 0
    for axis in axes:
        ranks, rank = ranks * mesh[axis].size(), rank * mesh[axis].size() + mesh.get_local_rank(axis)
    bounds = [2 * i + i * (i - 1) // 2 for i in range(ranks + 1)]  # 2, 3, 4 and so on
    return rows[bounds[rank] : bounds[rank + 1]]


def trained(mesh: Any, model: SplitModel, optimizer: str, way: str, num_rows: int) -> Any:
    """Some steps: the losses, the norms and the parameters after them."""
    how, whole = WAYS[way], model.params()
    axes = () if mesh is None else tuple(mesh.mesh_dim_names)
    data = differing(axes, model)
    plan = dict.fromkeys(BOTH, ("shard", model.axis)) if "over" in how["plan"] else how["plan"]
    plan = {} if mesh is None else plan | {"split": model.split, "data": data}
    tx = OPTIMIZERS[optimizer]
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["layers.*"], **plan)), tx)
    more = {"accumulate": how.get("accumulate", 1)} if mesh is not None else {}
    step: Any = fshard.train_step(model.loss(mesh, data), tx, clip_norm=how.get("clip_norm"), **more)
    step = fshard.jit(step, backend="eager") if way == "jit" and mesh is not None else step
    metrics = list[Tensor]()
    for i in range(STEPS):
        rows = model.batch(num_rows, i)
        state, logged = step(state, rows if mesh is None else of_a_rank(rows, mesh, data))
        metrics += [logged["loss"], logged["grad_norm"]]
    return [*metrics, *tree.leaves(fshard.gather_params(state.params))]


@functools.cache
def plainly(name: str, optimizer: str, way: str, num_rows: int, ranks: int) -> Any:
    """The plain model with all ranks' rows; with dropout the model on as many ranks, because masks differ by rank."""
    if "dropout" not in name:
        return trained(None, MODELS[name], optimizer, way, num_rows)
    world = World(axes={"shard": ranks, "tensor": 1})
    return world.run(trained, MODELS[name], optimizer, way, num_rows)[0]


def fits(name: str, way: str) -> bool:
    """Whether a model can be trained in a way: two means need one batch, and the host reads the numbers of rows."""
    return not name.startswith("experts") or way in ("eager", "clip")


CASES = [
    (name, mesh, optimizer, way)
    for name in MODELS
    for mesh in MESHES
    for optimizer in OPTIMIZERS
    for way in WAYS
    if fits(name, way)
]


@pytest.mark.sample(23)
@pytest.mark.parametrize(("name", "mesh", "optimizer", "way"), CASES)
def test_a_split_model_is_the_plain_one(name: str, mesh: str, optimizer: str, way: str) -> None:
    """A sum over ranks that is missing, or made twice, would train another model."""
    model = MODELS[name]
    axes = axes_of(MESHES[mesh], model.axis)
    ranks = World(axes={axis: axes[axis] for axis in differing(tuple(axes), model)}).size
    num_rows = 2 * ranks + ranks * (ranks - 1) // 2
    expected = plainly(name, optimizer, way, num_rows, ranks)
    for got in World(axes=axes).run(trained, model, optimizer, way, num_rows):
        for x, y in zip(got, expected, strict=True):
            assert (x - y).abs().max() <= 1e-10 * y.abs().max()
