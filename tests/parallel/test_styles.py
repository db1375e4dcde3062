"""A module with styles, split over the ranks of an axis, is the module."""

from typing import Any

import pytest
import torch
from support.parallel_models import MODELS, is_the_plain_one, loss_of, rows_of, trained, words
from support.says import says
from support.worlds import gloo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import tree
from fshard.module import functionalize
from fshard.parallel.styles import STYLES
from fshard.testing import World

MESHES = ((1, 2), (2, 2), (1, 3), (1, 4), (2, 3))
CASES = [
    (name, mesh, optimizer, units)
    for name in MODELS
    for mesh in MESHES
    for optimizer in ("sgd", "adamw")
    for units in ("layers", "one unit")
]


@pytest.mark.law
@pytest.mark.parametrize(("name", "sizes", "optimizer", "units"), CASES)
def test_a_split_module_is_the_plain_one(name: str, sizes: tuple[int, int], optimizer: str, units: str) -> None:
    """A sum that is missing or made twice, or a leaf that is taken for a whole one, would train another model."""
    is_the_plain_one(name, sizes, optimizer, **({"units": []} if units == "one unit" else {}))


@pytest.mark.law
@pytest.mark.parametrize(("name", "sizes"), [(x, y) for x in MODELS if MODELS[x].experts for y in MESHES])
def test_tokens_travel_to_experts(name: str, sizes: tuple[int, int]) -> None:
    """A token that comes to another expert, or whose row comes back elsewhere, would train another model."""
    is_the_plain_one(name, sizes, differ=True)


@pytest.mark.law
@pytest.mark.parametrize("name", [x for x in MODELS if "expert" not in x])
@pytest.mark.parametrize("units", ["layers", "one unit"])
def test_a_graph_of_a_split_module_is_the_plain_one(name: str, units: str) -> None:
    """In a trace leaves are fake tensors: a leaf that is not found again there would be taken for a whole one."""
    is_the_plain_one(name, (2, 2), way="jit", **({"units": []} if units == "one unit" else {}))


def of_processes(mesh: Any, name: str) -> Any:
    """A split module on the four processes of a mesh."""
    return trained(init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor")), MODELS[name])


@pytest.mark.parametrize("name", ["few heads", "tied table", "experts"])
def test_processes_have_the_bits_of_simulated_ranks(name: str) -> None:
    """Simulated ranks say nothing of processes, if these sum in another order."""
    simulated = World(axes={"shard": 2, "tensor": 2}).run(trained, MODELS[name])
    for got, expected in zip(gloo(of_processes, name, shard=4), simulated, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["few heads", "tied table", "packed"])
@pytest.mark.parametrize("units", ["layers", "one unit"])
def test_other_ways_to_run(name: str, units: str) -> None:
    """Tensors with tangents, and those of a forward alone, are leaves, too; random numbers have no derivative."""
    model = MODELS[name]

    def run(mesh: Any) -> list[Tensor]:
        apply, params, buffers = functionalize(model.module(), parallel=model.styles)
        splits = {} if mesh is None else {"split": apply.split(mesh), "data": "shard"}
        named = apply.units("blocks.*") if units == "layers" else []
        x = fshard.shard_params(params, fshard.make_plan(params, mesh, units=named, **splits))
        loss, rows = loss_of(apply, buffers), rows_of(words(6), mesh, ("shard",))
        predict = fshard.predict(lambda p, batch: apply.eval(p, buffers, batch)[0])
        product = fshard.hvp(loss)(x, tree.map(torch.ones_like, x), rows)
        return [
            fshard.evaluate(loss)(x, rows),
            predict(x, words(2)[:, :-1]),
            *tree.leaves(fshard.gather_params(product)),
        ]

    for got in World(axes={"shard": 2, "tensor": 2}).run(run):
        for x, y in zip(got, run(None), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@pytest.mark.law
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["heads", "tied table", "experts"])
def test_every_strategy(name: str, strategy: str) -> None:
    """With whole parameters a loss is given the caller's own tensors: their slots must be known, too."""
    is_the_plain_one(name, (2, 2), strategy=strategy)


@pytest.mark.parametrize("name", list(MODELS))
def test_without_split_leaves_a_module_is_itself(name: str) -> None:
    """A style that acts on whole leaves would sum what is equal on all ranks."""
    expected = trained(None, MODELS[name])
    plain = trained(None, MODELS[name].__class__(MODELS[name].make, {"**": "replicate"}))
    assert all(torch.equal(x, y) for x, y in zip(expected, plain, strict=True))

    def whole(mesh: Any) -> Any:
        return trained(mesh, MODELS[name])

    for got in World(axes={"shard": 1, "tensor": 1}).run(whole):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_splits_of_every_style() -> None:
    """A dim of another end would still train, if the sizes are equal."""
    shapes = ((6,), (6, 4), (8, 6, 4))
    assert {name: [style.split(x) for x in shapes] for name, style in STYLES.items() if style.dim is not None} == {
        **{name: [(0, 1), (0, 1), (1, 1)] for name in ("colwise", "colwise_gather_output", "colwise_rep")},
        **{name: [None, (1, 1), (2, 1)] for name in ("rowwise", "rowwise_split_input", "rowwise_rep")},
        "packed_colwise": [(0, 2), (0, 2), (1, 2)],
        "packed_rowwise": [None, (1, 2), (2, 2)],
        "embedding_rowwise": [(0, 1), (0, 1), (1, 1)],
        "embedding_colwise": [None, (1, 1), (2, 1)],
        "grouped_gemm": [(0, 1), (0, 1), (0, 1)],
    }


def test_what_each_number_of_ranks_splits() -> None:
    """Heads of keys that do not divide stay whole; of heads that do not divide, the attention."""

    def split(name: str, ranks: int) -> set[str]:
        apply, *_ = functionalize(MODELS[name].module(), parallel=MODELS[name].styles)
        return {path.removeprefix("blocks.0.") for path in apply.split(fshard.AbstractMesh(tensor=ranks))}

    both = {"q.weight", "q.bias", "o.weight", "sinks"}
    keys = {f"{name}.{kind}" for name in "kv" for kind in ("weight", "bias")}
    assert [split("few heads", ranks) for ranks in (1, 2, 3, 4, 5)] == [set(), both | keys, both, both, set()]
    assert split("no groups", 2) == both | keys
    assert split("no groups", 4) == set()
    mlp = {f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight")}
    assert split("heads that do not divide", 2) == mlp
    assert split("heads that do not divide", 5) == mlp | both | keys
    assert split("tied table", 2) >= {"table.weight", "head.weight"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("stacked", [False, True])
def test_an_encoder_of_torch_in_evaluation(stacked: bool) -> None:
    """Torch's fast path takes weights past the layers: each rank would give a summand."""
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)
    styles = {"**.linear1": "colwise", "**.linear2": "rowwise"}
    apply, params, buffers = functionalize(nn.TransformerEncoder(made, 2) if stacked else made, parallel=styles)
    x, padding = torch.randn(3, 4, 6), torch.tensor([[False] * 3 + [True]] * 3)

    def predicted(mesh: Any) -> Tensor:
        plan = fshard.make_plan(params, mesh, split=apply.split(mesh), data=())
        out = lambda p, x: apply.eval(p, buffers, x, src_key_padding_mask=padding)[0]  # noqa: E731
        return fshard.predict(out)(fshard.shard_params(params, plan), x)[:, :3]

    for got in World(axes={"tensor": 3}).run(predicted):
        torch.testing.assert_close(got, predicted(None))


def test_a_table_that_counts_ids() -> None:
    """A rank looks a row of its own up in place of ids of other ranks, and would count it."""
    table = nn.Embedding(5, 2, scale_grad_by_freq=True)
    apply, params, buffers = functionalize(nn.Sequential(table), parallel={"0": "embedding_rowwise"})

    def value(mesh: Any) -> Any:
        plan = fshard.make_plan(params, mesh, split=apply.split(mesh), data=())
        loss = lambda p, x: apply(p, buffers, x)[0].sum()  # noqa: E731
        return fshard.value_and_grad(loss)(fshard.shard_params(params, plan), torch.tensor([0, 3]))

    told = "parallel: '0': expected scale_grad_by_freq=False"
    says(lambda: World(axes={"tensor": 2}).run(value), TypeError, told)
