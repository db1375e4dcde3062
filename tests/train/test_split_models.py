"""Models of split leaves train as the plain models do, on every mesh, with every optimizer, in every way."""

import functools
from typing import Any

import pytest
import torch
from support.split_models import MODELS, SplitModel, drawn
from support.worlds import gloo
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, jvp

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


CASES = [
    (name, mesh, optimizer, way)
    for name in MODELS
    for mesh in MESHES
    for optimizer in OPTIMIZERS
    for way in ("eager", "clip", "accumulate")
    if way != "accumulate" or not MODELS[name].differ  # a balance loss is a second mean, of one batch
]
JIT_CASES = [
    (name, mesh, optimizer, "jit")
    for mesh in ("2x2", "1x2")
    for optimizer in OPTIMIZERS
    for name in reversed(MODELS)
    if not MODELS[name].differ  # the host reads how many rows go to the experts
]


def check(name: str, mesh: str, optimizer: str, way: str) -> None:
    """Compare a split model with the plain one, leaf by leaf, relative to the largest element."""
    model = MODELS[name]
    axes = axes_of(MESHES[mesh], model.axis)
    ranks = World(axes={axis: axes[axis] for axis in differing(tuple(axes), model)}).size
    num_rows = 2 * ranks + ranks * (ranks - 1) // 2
    expected = plainly(name, optimizer, way, num_rows, ranks)
    for got in World(axes=axes).run(trained, model, optimizer, way, num_rows):
        for x, y in zip(got, expected, strict=True):
            assert (x - y).abs().max() <= 1e-10 * y.abs().max()


@pytest.mark.law
@pytest.mark.parametrize(("name", "mesh", "optimizer", "way"), CASES)
def test_a_split_model_is_the_plain_one(name: str, mesh: str, optimizer: str, way: str) -> None:
    """A sum over ranks that is missing, or made twice, would train another model."""
    check(name, mesh, optimizer, way)


@pytest.mark.parametrize(("name", "mesh", "optimizer", "way"), JIT_CASES)
def test_a_compiled_split_model_is_the_plain_one(name: str, mesh: str, optimizer: str, way: str) -> None:
    """A graph whose collectives go along another axis, or whose masks differ along "tensor", would train another."""
    check(name, mesh, optimizer, way)


@pytest.mark.parametrize(
    ("way", "words"), [("jit", "depends on the values of a tensor"), ("accumulate", "use accumulate=1")]
)
def test_experts_that_get_any_number_of_rows_are_refused(way: str, words: str) -> None:
    """The page says so; a graph with the numbers of rows of its first call would send others' rows."""
    with pytest.raises((ValueError, RuntimeError), match=words):
        World(axes={"shard": 1, "expert": 2}).run(trained, MODELS["experts"], "sgd", way, 5)


ALONE = ("sequence, tied, again", "dropout, again", "experts without rows", "ring, again", "stages")


def of_processes(mesh: Any) -> Any:
    """Results of this rank of four processes, whose mesh gets the axes of the models."""
    axes = {MODELS[name].axis: None for name in ALONE}
    meshes = {axis: init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", axis)) for axis in axes}
    return {name: trained(meshes[MODELS[name].axis], MODELS[name], "muon", "clip", 14) for name in ALONE}


def test_models_in_processes_have_the_bits_of_simulated_ranks() -> None:
    """What is simulated would not be what runs."""
    real = gloo(of_processes, shard=2, replicate=2)
    for name in ALONE:
        simulated = World(axes={"shard": 2, MODELS[name].axis: 2}).run(trained, MODELS[name], "muon", "clip", 14)
        for got, expected in zip(real, simulated, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got[name], expected, strict=True)), name


def rules(mesh: Any) -> dict[str, Tensor]:
    """Gradients by torch.func of y = sin(a x), in x and in a, made of what each rank gets; a: (6, 6), x: (6,)."""
    rank, ranks = fshard.rank_and_size(mesh, "tensor")
    a, x, v = drawn(0)(6, 6), drawn(1)(6), drawn(2)(6)

    def add(value: Tensor) -> Tensor:
        return fshard.all_reduce(value, mesh, "tensor")

    part = a.chunk(ranks, 1)[rank], x.chunk(ranks)[rank]
    whole = lambda a, x: add((a @ x).sin().sum())  # noqa: E731, rows of a: a summand on each rank
    of_parts = lambda a, x: add(a @ x).sin().sum()  # noqa: E731, columns of a: equal on all ranks
    rows = a.chunk(ranks)[rank]

    def joined(value: Tensor, dim: int = 0) -> Tensor:
        return fshard.all_gather(value, mesh, "tensor", dim=dim)

    return {
        "whole in, whole out": add(grad(whole, 1)(rows, x)) / ranks,
        "whole in, summands out": add(grad(lambda a, x: (a @ x).sin().sum(), 1)(rows, x)),
        "parts in, whole out": joined(grad(of_parts, 1)(*part)) / ranks,
        "parts in, parts out": joined(
            grad(lambda a, x: fshard.reduce_scatter(a @ x, mesh, "tensor").sin().sum(), 1)(*part)
        ),
        "a split leaf": joined(grad(of_parts)(*part), 1) / ranks,
        "a whole leaf": add(grad(lambda b: of_parts(part[0], part[1] * b.chunk(ranks)[rank]))(torch.ones_like(x)))
        / ranks,
        "jvp": jvp(of_parts, part, (part[0], v.chunk(ranks)[rank]))[1],
        "without a sum": grad(whole, 1)(rows, x) / ranks,
    }


@pytest.mark.parametrize("t", [2, 3])
def test_gradients_by_torch_func_are_summed_and_divided_as_the_page_says(t: int) -> None:
    """Losses with scores or inner steps would train other models."""
    plain = rules(None)
    for got in World(axes={"tensor": t}).run(rules):
        for name, expected in plain.items():
            assert torch.allclose(got[name], expected, rtol=1e-12) == (name != "without a sum"), name
