"""`same_loss` names what a split loss does wrong, and lets what is right pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard
from fshard import optim
from fshard.testing import World, oracle, record, replay, same_loss

SPLIT = {
    "up": ("tensor", 1),
    "down": ("tensor", 0),
    "gu": ("tensor", 1, 2),
    "back": ("tensor", 0),
    "head": ("tensor", 1),
}
Make = Callable[[Any], Callable[..., Any]]


def whole() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"bias": (4,), "norm": (4,), "up": (4, 7), "down": (7, 4), "gu": (4, 10), "back": (5, 4), "head": (4, 5)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def block(p: Any, x: Tensor, mesh: Any) -> Tensor:
    """A column and a row, leaves that are whole, and gate and up in one leaf."""
    y = fshard.all_reduce(torch.tanh((x * p["norm"]) @ p["up"]) @ p["down"], mesh, "tensor") + p["bias"]
    gate, up = (y @ p["gu"]).chunk(2, -1)
    return fshard.all_reduce((gate.sigmoid() * up) @ p["back"], mesh, "tensor")


def right(mesh: Any) -> Callable[..., Any]:
    size = 1 if mesh is None else mesh.size("tensor")

    def loss(p: Any, x: Tensor, weight: float) -> fshard.Mean:
        y = torch.nn.functional.dropout(block(p, x, mesh), 0.2)
        return weight * fshard.Mean((y @ p["head"]).square().sum(), len(x) / size) - fshard.Mean(y.sum(), len(x))

    return loss


class _Raw(torch.autograd.Function):
    """An all-reduce whose backward is the identity, as other libraries have one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any) -> Tensor:
        return fshard.all_reduce(x, mesh, "tensor")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def changed(fn: Callable[[Any, Tensor, Any], Any]) -> Make:
    return lambda mesh: lambda p, x: fn(p, x, mesh)


def mlp(p: Any, x: Tensor, mesh: Any, add: Callable[..., Tensor] = fshard.all_reduce) -> Tensor:
    y = torch.tanh((x * p["norm"]) @ p["up"]) @ p["down"]
    return add(y, mesh, "tensor")


# by name: the loss, and words of the error
WRONG: dict[str, tuple[Make, str]] = {
    "no sum": (
        changed(lambda p, x, mesh: fshard.Mean(mlp(p, x, mesh, lambda y, *_: y).square().sum(), len(x))),
        "the loss: expected",
    ),
    "a sum too many": (
        changed(lambda p, x, mesh: fshard.Mean(fshard.all_reduce(mlp(p, x, mesh), mesh, "tensor").sum(), len(x))),
        "the loss: expected",
    ),
    "a bias before the sum": (
        changed(
            lambda p, x, mesh: fshard.Mean(
                fshard.all_reduce(torch.tanh(x @ p["up"]) @ p["down"] + p["bias"], mesh, "tensor").square().sum(),
                len(x),
            )
        ),
        "the loss: expected",
    ),
    "a part of the total": (
        changed(lambda p, x, mesh: fshard.Mean((mlp(p, x, mesh) @ p["head"]).square().sum(), len(x))),
        "the loss: expected",
    ),
    "a sum of equals": (changed(lambda p, x, mesh: fshard.Sum(mlp(p, x, mesh).sum())), "the loss: expected"),
    "a raw backward": (
        changed(lambda p, x, mesh: mlp(p, x, mesh, lambda y, *_: _Raw.apply(y, mesh)).square().sum()),
        "the gradient of leaf 'norm', at .* The loss is right here",
    ),
}


def test_a_right_loss_passes() -> None:
    """A tool that cries wolf is not used."""
    torch.manual_seed(1)
    same_loss(right, right(None), whole(), torch.randn(6, 4), 0.3, leaves=SPLIT)
    same_loss(right, right(None), whole(), torch.randn(6, 4), 0.3, leaves=SPLIT, sizes=(1, 4))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    """Each trains another model, most of them without a word."""
    make, words = WRONG[name]
    with pytest.raises(AssertionError, match=words):
        same_loss(make, make(None), whole(), torch.randn(6, 4), leaves=SPLIT)


def test_what_is_right_for_the_first_parameters_alone_is_named() -> None:
    """Biases begin at zero: what every rank adds is seen in the gradient, and its square not even there."""
    params, x = whole() | {"bias": torch.zeros(4)}, torch.randn(6, 4)
    make = WRONG["a bias before the sum"][0]
    with pytest.raises(AssertionError, match=r"the params given: the gradient of leaf 'bias'.* it takes summands"):
        same_loss(make, make(None), params, x, leaves=SPLIT)
    make = changed(lambda p, x, mesh: mlp(p, x, mesh).sum() + fshard.all_reduce(p["bias"] ** 2, mesh, "tensor").sum())
    with pytest.raises(AssertionError, match="the params nearby: the loss"):
        same_loss(make, make(None), params, x, leaves=SPLIT)


def test_batches_that_differ() -> None:
    """Experts have other tokens on each rank of their axis."""

    def make(mesh: Any) -> Callable[..., Any]:
        def loss(p: Any, batch: Any) -> fshard.Mean:
            x = fshard.all_gather(batch["x"], mesh, "expert")  # to all experts, of which each adds its own
            y = sum((torch.tanh(x @ e) for e in p["e"]), torch.zeros_like(x))
            return fshard.Mean((fshard.reduce_scatter(y, mesh, "expert") - batch["x"]).square().sum(), len(batch["x"]))

        return loss

    params, batch = {"e": torch.randn(5, 4, 4)}, {"x": torch.randn(6, 4), "number": torch.tensor(3)}
    same_loss(make, make(None), params, batch, leaves={"e": ("expert", 0)}, data="expert")
    same_loss(make, make(None), params, batch, leaves={"e": ("expert", 0)}, data=("shard", "expert"), sizes=(1, 3))


def test_a_count_of_the_whole() -> None:
    """Tokens of all ranks in the count of each make a loss that is too small, whatever the batch."""
    make = changed(lambda p, x, mesh: fshard.Mean((x * p["w"]).square().sum(), 6))
    with pytest.raises(AssertionError, match="the loss: expected"):
        same_loss(make, make(None), {"w": torch.ones(4)}, torch.randn(6, 4), leaves={}, data="shard")


def test_leaves_by_mesh() -> None:
    """A function of the mesh, as `apply.split`, could not be given, or would be asked without a mesh."""
    asked = set[tuple[int, str]]()

    def leaves(mesh: Any, axis: str) -> Any:
        asked.add((mesh.size(axis), axis))
        return SPLIT if mesh.size(axis) < 4 else {}  # 7 features on 4 ranks: all are whole

    def summed(p: Any, x: Tensor, mesh: Any) -> fshard.Mean:
        copies = fshard.rank_and_size(mesh, "tensor")[1] if p["up"].shape[1] == 7 else 1
        return fshard.Mean((mlp(p, x, mesh) / copies).square().sum(), len(x))

    make = changed(summed)
    same_loss(make, make(None), whole(), torch.randn(6, 4), leaves=leaves, axes="tensor", sizes=(1, 2, 4))
    assert asked == {(1, "tensor"), (2, "tensor"), (4, "tensor")}
    wrong = WRONG["no sum"][0]
    with pytest.raises(AssertionError, match=r"{'tensor': 2}.*the loss: expected .* along 'tensor' it takes summands"):
        same_loss(wrong, wrong(None), whole(), torch.randn(6, 4), leaves=leaves, axes=("tensor",))


def context(mesh: Any, cuts: bool, scale: float = 1.0) -> Callable[..., Any]:
    """Attention over the words of all ranks of "context", each of which has some."""

    def loss(p: Any, x: Tensor) -> fshard.Mean:
        rank, ranks = fshard.rank_and_size(mesh, "context")
        x = x.chunk(ranks, 1)[rank] if cuts else x
        first = rank * x.shape[1]
        k = fshard.all_gather(x @ p["k"], mesh, "context", dim=1)
        seen = torch.arange(k.shape[1]) <= torch.arange(first, first + x.shape[1])[:, None]
        y = torch.nn.functional.scaled_dot_product_attention(x, k * scale, k, attn_mask=seen)
        return fshard.Mean(y.square().sum(), y.numel())

    return loss


@pytest.mark.parametrize("cuts", [True, False])
def test_axes_that_split_no_leaf(cuts: bool) -> None:
    """Context parallelism, of which no leaf tells the axis, could not be compared."""
    how: dict[str, Any] = {"axes": "context"} if cuts else {"data": {"shard": 0, "context": 1}}
    x, params = torch.randn(6, 12, 4), {"k": torch.randn(4, 4)}
    same_loss(lambda mesh: context(mesh, cuts), context(None, cuts), params, x, leaves={}, **how)
    with pytest.raises(AssertionError, match=r"'context': .*the loss: expected .* at .*k \* scale"):
        same_loss(lambda mesh: context(mesh, cuts, 1.1), context(None, cuts), params, x, leaves={}, **how)


def test_axes_have_unlike_sizes() -> None:
    """A size that is taken for another would be right on a square mesh alone."""

    def make(mesh: Any) -> Callable[..., Any]:
        size = 1 if mesh is None else mesh.size("shard")  # of "tensor" it would be right
        return lambda p, x: fshard.Mean(fshard.all_reduce((x * p["n"]).sum(), mesh, "tensor") / size, len(x))

    x = torch.randn(6, 4)
    with pytest.raises(AssertionError, match=r"{'shard': 2, 'tensor': 3}.*the loss"):
        same_loss(
            make, make(None), {"n": torch.ones(4), "s": torch.ones(6)}, x, leaves={"s": ("tensor", 0)}, data="shard"
        )


def test_small_losses_are_compared_too() -> None:
    """A loss of 1e-12 that is twice too large is wrong."""
    make = changed(lambda p, x, mesh: 1e-12 * fshard.Sum((x * p["norm"]).sum()))
    with pytest.raises(AssertionError, match="the loss"):
        same_loss(make, make(None), whole(), torch.randn(6, 4), leaves=SPLIT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"leaves": {}},
        {"leaves": lambda mesh: SPLIT},
        {"sizes": ()},
        {"sizes": (1,)},
        {"rtol": torch.inf},
        {"rtol": 0.0},
    ],
)
def test_nothing_to_compare_is_an_error(wrong: dict[str, Any]) -> None:
    """A call that compares nothing would pass."""
    with pytest.raises(ValueError, match="same_loss: "):
        same_loss(right, right(None), whole(), torch.randn(6, 4), 0.3, **({"leaves": SPLIT} | wrong))


def test_batches_of_any_leaves_and_losses_without_a_value() -> None:
    """Batches have numbers and words beside tensors; and a plain loss that is NaN has no cause in ranks."""
    make = changed(lambda p, b, mesh: (mlp(p, b["x"], mesh) * p["z"].real).sum() * b["n"])
    params = whole() | {"z": torch.ones(4, dtype=torch.complex64)}
    same_loss(make, make(None), params, {"x": torch.randn(6, 4), "n": 2, "name": "a"}, leaves=SPLIT)
    make = changed(lambda p, b, mesh: (0 * p["norm"]).log().sum() * 0)
    with pytest.raises(AssertionError, match="The plain loss has no value there"):
        same_loss(make, make(None), params, torch.randn(6, 4), leaves=SPLIT)


def tools(mesh: Any) -> Any:
    """A step with dropout, its first state and batch, and the loss, which is NaN if masks differ along "tensor"."""
    params = {name: whole()[name] for name in ("norm", "up", "down")}
    plan, tx = fshard.make_plan(params, mesh, split={"up": ("tensor", 1), "down": ("tensor", 0)}), optim.adamw(1e-2)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))

    def loss(p: Any, x: Tensor) -> fshard.Mean:
        y = torch.nn.functional.dropout(mlp(p, x, mesh), 0.4)
        drawn = torch.rand(())
        most, least = (fshard.all_reduce(drawn, mesh, "tensor", op) for op in ("max", "min"))
        return fshard.Mean((y - x).square().sum() * torch.where(most > least, torch.nan, 1.0), len(x))

    rows = x if mesh is None else x.chunk(mesh.size("shard"))[mesh.get_local_rank("shard")]
    return (
        fshard.train_step(loss, tx, clip_norm=0.5),
        fshard.init_state(fshard.shard_params(params, plan), tx),
        rows,
        loss,
    )


def test_the_oracle_and_a_replay_know_splits(tmp_path: Any) -> None:
    """A tool that draws other masks, or takes parts for wholes, would find faults where there are none."""

    def run(mesh: Any) -> Any:
        step, state, rows, _ = tools(mesh)
        state, metrics = record(step, tmp_path, steps={0})(state, rows)
        return fshard.gather_params(state.params), metrics["loss"]

    got = World(axes={"shard": 1, "tensor": 3}).run(run)[0]
    _, state, rows, loss = tools(None)
    init, step = oracle(loss, optim.adamw(1e-2), clip_norm=0.5)
    state, metrics = step(init(fshard.gather_params(state.params)), [rows])
    torch.testing.assert_close(got, (state.params, metrics["loss"]))
    (replayed,) = replay(tmp_path, tools)
    assert (replayed.different, replayed.nonfinite) == (None, None)
