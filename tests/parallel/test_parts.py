"""Which leaves are parts: no guess, by the plan of the call. What no style knows is an error."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parallel_models import (
    COLUMN_ROW,
    MLP,
    MODELS,
    WHOLE_EXPERTS,
    WIDTH,
    Gated,
    Model,
    Sparse,
    Words,
    loss_of,
    trained,
    words,
)
from support.says import says
from torch import Tensor, nn

import fshard
from fshard.module import functionalize
from fshard.testing import World, same_loss

Loss = Callable[[Any, Tensor], Any]


def split_value(
    styles: dict[str, str],
    module: nn.Module,
    split: Any = None,
    change: Any = None,
    world: World | None = None,
    **plan: Any,
) -> Any:
    """The value of a split module's mean square on two ranks, and that of the module."""

    def value(mesh: Any) -> Tensor:
        apply, params, buffers = functionalize(module, parallel=styles)
        parts = apply.split(mesh, "tensor") if split is None else split
        given = {} if mesh is None else {"split": parts, "data": ()} | plan
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, **given))
        loss = lambda p, x: apply(p if change is None else change(p), buffers, x)[0].square().mean()  # noqa: E731
        return fshard.value_and_grad(loss)(sharded, torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, WIDTH))[0]

    return (world or World(axes={"tensor": 2})).run(value), value(None)


def mlp(hidden: int = 6) -> nn.Module:
    """Two layers with drawn parameters."""
    torch.manual_seed(0)
    return MLP(hidden).double()


STYLES = {"up": "colwise", "down": "rowwise"}


def test_errors_of_styles() -> None:
    """A word that nobody knows would leave a layer whole, without a word."""
    styled = lambda styles, module=None: lambda: functionalize(module or mlp(), parallel=styles)  # noqa: E731
    says(styled({"up": "columns"}), ValueError, "parallel['up']: expected one of colwise, ", "rowwise", "got 'columns'")
    says(styled({"upp": "colwise"}), ValueError, "parallel: no path of MLP fits 'upp'")
    says(styled(["up"]), TypeError, "parallel", "a mapping of patterns to styles")
    says(styled({"0": "rowwise"}, nn.Sequential(nn.Embedding(3, 4))), TypeError, "'0' is 'rowwise'", "torch.nn.Linear")
    says(styled({"0": "embedding_rowwise"}, nn.Sequential(nn.Linear(3, 4))), TypeError, "torch.nn.Embedding")
    alone = {"**.experts.down": "rowwise"}
    says(
        styled(alone, MODELS["experts"].module()), ValueError, "'blocks.0.experts.down' is 'rowwise'", "sums", "moe_tp"
    )
    tied = {"head": "rowwise_rep"}
    says(styled(tied, MODELS["tied table"].module()), ValueError, "'table.weight' is tied to 'head.weight'")


def test_an_axis_that_the_mesh_lacks() -> None:
    """A mesh without the axis would train with whole leaves."""
    apply, *_ = functionalize(mlp(), parallel=STYLES)
    says(lambda: apply.split(fshard.AbstractMesh(shard=2), "tensr"), ValueError, "expected one of shard, got 'tensr'")
    assert apply.split(None, "tensor") == {}
    assert functionalize(mlp())[0].split(fshard.AbstractMesh(tensor=2)) == {}


def test_a_part_that_no_style_knows() -> None:
    """A submodule would compute with a part of its leaf as if it were whole."""
    up = {"up.weight": ("tensor", 0), "up.bias": ("tensor", 0)}
    run = functools.partial(split_value, module=mlp())
    says(
        lambda: run({"down": "rowwise"}, split=up),
        ValueError,
        "leaf 'up.weight' is split over tensor",
        "submodule 'up'",
    )
    says(
        lambda: run({"down": "rowwise"}, split=up),
        ValueError,
        "has no style in parallel=",
        "apply.split(mesh, 'tensor')",
    )
    other = {"up.weight": ("tensor", 1)}
    says(lambda: run(STYLES, split=other), ValueError, "leaf 'up.weight'", "along dim 1", "is 'colwise'", "along dim 0")
    blocks = {"up.weight": ("tensor", 0, 2), "up.bias": ("tensor", 0, 2)}
    says(lambda: run(STYLES, split=blocks), ValueError, "2 blocks", "along dim 0, 1 blocks")
    two = {"up.weight": ("tensor", 0), "up.bias": ("shard", 0)}
    axes = World(axes={"tensor": 2, "shard": 2})
    says(lambda: run(STYLES, split=two, world=axes), ValueError, "'up.bias' is split over shard", "over 'tensor'")
    bias = {"down.bias": ("tensor", 0)}
    says(lambda: run(STYLES, split=bias), ValueError, "leaf 'down.bias'", "is 'rowwise'", "expected a whole leaf")


def test_batches_that_differ_along_the_axis() -> None:
    """Parts of the features of different rows would be joined."""
    run = lambda: split_value(STYLES, mlp(), data="tensor")  # noqa: E731
    says(run, ValueError, "leaf 'up.weight'", "along which batches differ (data=('tensor',))", "data=()")


@pytest.mark.parametrize("units", [[], ["up", "down"]])
def test_a_tensor_that_is_no_leaf(units: list[str]) -> None:
    """What is computed from a part is a part, and no plan knows it."""
    double = lambda p: fshard.tree.map(lambda x: 2 * x, p)  # noqa: E731
    says(lambda: split_value(STYLES, mlp(), change=double, units=units), ValueError, "'up.weight'", "(6, 6)", "(3, 6)")
    values, plain = split_value({"up": "replicate"}, mlp(), change=double, units=units)
    assert all(torch.equal(x, plain) for x in values)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "leaves": lambda p: p,
    "other containers": lambda p: {name: dict(p[name].items()) for name in ("up", "down")},
    "views": lambda p: fshard.tree.map(lambda x: x[...], p),
}


@pytest.mark.law
@pytest.mark.parametrize("units", [[], ["up"], ["up", "down"]])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize("change", list(VIEWS))
@pytest.mark.parametrize("hidden", [1, 2, 3, 6])
def test_parts_are_known_by_their_tape(units: list[str], strategy: str, change: str, hidden: int) -> None:
    """With one hidden feature the first rank's part is as long as the whole, and the other's is empty."""
    values, plain = split_value(STYLES, mlp(hidden), change=VIEWS[change], units=units, strategy=strategy)
    for value in values:
        torch.testing.assert_close(value, plain, rtol=1e-12, atol=0)


def test_empty_parts_of_a_unit_that_was_freed() -> None:
    """An empty tensor lies nowhere: the module's other leaves tell its place."""
    modules = {name: mlp(1) for name in ("one", "two")}
    apply, *_ = functionalize(modules["one"], parallel=STYLES)
    whole = {name: functionalize(module)[1] for name, module in modules.items()}
    x = torch.ones(2, WIDTH, dtype=torch.float64)

    def value(mesh: Any) -> Tensor:
        splits = {} if mesh is None else {f"{n}.{path}": how for n in whole for path, how in apply.split(mesh).items()}
        plan = fshard.make_plan(whole, mesh, units=["one", "two"], split=splits, data=())

        def loss(p: Any, x: Tensor) -> Tensor:
            one, two = p["one"], p["two"]  # reading the second frees the first
            return sum(apply(each, {}, x)[0].square().mean() for each in (one, two))

        return fshard.value_and_grad(loss)(fshard.shard_params(whole, plan), x)[0]

    for got in World(axes={"tensor": 2}).run(value):
        torch.testing.assert_close(got, value(None), rtol=1e-12, atol=0)


def test_two_modules_of_equal_leaves() -> None:
    """A module that is called with the other's leaves has the parts of those: one is split, one is whole."""
    apply, *_ = functionalize(mlp(), parallel=STYLES)
    whole = {name: functionalize(mlp())[1] for name in ("split", "whole")}
    x = torch.ones(2, WIDTH, dtype=torch.float64)

    def value(mesh: Any, units: list[str]) -> Tensor:
        splits = {} if mesh is None else {f"split.{path}": how for path, how in apply.split(mesh).items()}
        plan = fshard.make_plan(whole, mesh, units=units, split=splits, data=())
        loss = lambda p, x: apply(p["split"], {}, apply(p["whole"], {}, x)[0])[0].mean()  # noqa: E731
        return fshard.value_and_grad(loss)(fshard.shard_params(whole, plan), x)[0]

    for units in ([], ["split", "whole"], ["split.*", "whole"]):
        for got in World(axes={"tensor": 2}).run(functools.partial(value, units=units)):
            torch.testing.assert_close(got, value(None, units), rtol=1e-12, atol=0)


class Fixed(nn.Module):
    """Projections with a number of heads in the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).view(len(x), 4, 2).flatten(1))


def test_code_that_knows_its_number_of_heads() -> None:
    """torch's error of shapes alone says nothing of parts."""
    run = lambda: split_value(STYLES, Fixed().double())  # noqa: E731
    says(
        run, RuntimeError, "is invalid for input of size", "split over 'tensor'", "numbers of heads", "out of parallel="
    )


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_row_with_a_forward_of_its_own() -> None:
    """A bias in a forward of its own would be added on every rank."""

    def module(bias: bool) -> nn.Module:
        torch.manual_seed(0)
        made = MLP(6)
        made.down = Scaled(6, WIDTH, bias=bias)
        return made.double()

    says(lambda: split_value(STYLES, module(True)), TypeError, "'down' is rowwise", "no bias", "got Scaled with a bias")
    values, plain = split_value(STYLES, module(False))
    for value in values:
        torch.testing.assert_close(value, plain, rtol=1e-12, atol=0)


def test_experts_over_an_axis_of_their_own() -> None:
    """Columns and rows over one axis, whole experts over another, along which tokens differ."""
    model = Model(lambda: Words(Sparse(), MLP()), COLUMN_ROW | WHOLE_EXPERTS)

    def run(mesh: Any) -> Any:
        apply, params, buffers = functionalize(model.module(), parallel=model.styles)
        split = apply.split(mesh, "tensor", experts="expert")
        assert {how[0] for how in split.values()} == {"tensor", "expert"}
        plan = fshard.make_plan(
            params, mesh, split=split, data=("expert",), params_over=(), grads_over=(), state_over=()
        )
        rows = words(7)[mesh.get_local_rank("expert") :: 2]
        value, grads = fshard.value_and_grad(loss_of(apply, buffers))(fshard.shard_params(params, plan), rows)
        return [value, *fshard.tree.leaves(fshard.gather_params(grads))]

    expected = trained(None, model)
    for got in World(axes={"expert": 2, "tensor": 2}).run(run):
        for x, y in zip(got, expected, strict=False):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_a_wrong_plan_is_found() -> None:
    """Transformers has such a plan: gate and up lie in one matrix, which is split as if it were one block."""

    def compare(style: str) -> None:
        styles = {"**.gate_up": style, "**.down": "rowwise"}
        apply, params, buffers = functionalize(Model(lambda: Words(Gated(6)), styles).module(), parallel=styles)
        loss = loss_of(apply, buffers)
        same_loss(lambda mesh: loss, loss, params, words(3), leaves=apply.split, axes="tensor")

    compare("packed_colwise")
    says(lambda: compare("colwise"), AssertionError, "same_loss: {'tensor': 2}")


class Adapted(nn.Module):
    """A layer with matrices around it, as PEFT makes them."""

    def __init__(self, base: nn.Linear, magnitudes: bool = False):
        super().__init__()
        self.base_layer, kinds = base, ("first", "second")
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({kind: nn.Linear(base.in_features, 2, bias=False) for kind in kinds})
        self.lora_B = nn.ModuleDict({kind: nn.Linear(2, base.out_features, bias=False) for kind in kinds})
        if magnitudes:
            self.lora_magnitude_vector = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + sum(self.lora_B[kind](self.lora_A[kind](x)) for kind in self.lora_A)


def with_adapters(magnitudes: bool = False) -> nn.Module:
    """Two layers with adapters."""
    module = mlp()
    for name in ("up", "down"):
        setattr(module, name, Adapted(getattr(module, name), magnitudes))
    return module.double()


def test_adapters() -> None:
    """Of two matrices around a layer one has its split dim; other adapters compute with the whole layer."""
    values, plain = split_value(STYLES, with_adapters())
    for value in values:
        torch.testing.assert_close(value, plain, rtol=1e-12, atol=0)
    apply, *_ = functionalize(with_adapters(), parallel=STYLES)
    parts = {"up.base_layer.weight", "up.base_layer.bias", "down.base_layer.weight"}
    parts |= {f"{name}.{kind}.weight" for name in ("up.lora_B", "down.lora_A") for kind in ("first", "second")}
    assert {*apply.split(fshard.AbstractMesh(tensor=2))} == parts
    other = lambda: functionalize(with_adapters(True), parallel=STYLES)  # noqa: E731
    says(other, TypeError, "'up'", "LoRA's two matrices", "'lora_magnitude_vector'")
