"""Random numbers between column and row projections differ by rank, and are equal after them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.parallel_models import COLUMN_ROW, HEADS, MLP, WIDTH, Attention, Model, Words, trained
from support.says import says
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.module import functionalize
from fshard.testing import World

STYLES = {"**.up": "colwise", "**.gate": "colwise", "**.down": "rowwise"}
WAYS = ("first", "second", "first and second")


class Drops(nn.Module):
    """Draws before, between and after the projections of a submodule."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.again = again

    def inner(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        hidden = self.up(x) * self.gate(x)
        between = F.dropout(torch.ones_like(hidden), 0.5, self.training)
        y = self.down(hidden * between)
        after = F.dropout(torch.ones_like(y), 0.5, self.training)
        seen += [between.detach(), after.detach()]
        return y * after

    def forward(self, x: Tensor, seen: list[Tensor], fails: bool = False) -> Tensor:
        if fails:
            self.up(x)
            raise KeyError("between")
        return checkpoint(self.inner, x, seen, use_reentrant=False) if self.again else self.inner(x, seen)


class Around(nn.Module):
    """Draws around the submodule."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.drops = Drops(again)

    def forward(self, x: Tensor, seen: list[Tensor], fails: bool = False) -> Tensor:
        seen.append(torch.rand(5))
        try:
            y = self.drops(x, seen, fails)
        except KeyError:
            y = x * sum(p.sum() for p in self.parameters())
        seen.append(torch.rand(5))
        return y


def masks(mesh: Any, again: bool = False, fails: bool = False, evaluates: bool = False) -> Any:
    """What a rank draws, and its gradients."""
    torch.manual_seed(0)
    apply, params, buffers = functionalize(Around(again).double(), parallel=STYLES)
    split = {} if mesh is None else {"split": apply.split(mesh)}
    call, seen = apply.eval if evaluates else apply, list[Tensor]()

    def loss(p: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return call(p, buffers, x, seen, fails)[0].square().mean()

    x = torch.ones(3, WIDTH, dtype=torch.float64)
    _, grads = fshard.value_and_grad(loss)(fshard.shard_params(params, fshard.make_plan(params, mesh, **split)), x)
    return [*seen, torch.rand(5)], fshard.tree.leaves(fshard.gather_params(grads))


@pytest.mark.parametrize("again", [False, True])
def test_masks_differ_between_projections_alone(again: bool) -> None:
    """Heads of all ranks would drop the same; activations after the row, which are equal, would not be."""
    (first, grads), (second, grads_too) = World(axes={"shard": 1, "tensor": 2}).run(lambda mesh: masks(mesh, again))
    assert len(first) == (7 if again else 5)  # the checkpoint runs `inner` once more
    assert [torch.equal(x, y) for x, y in zip(first, second, strict=True)][:4] == [True, False, True, True]
    assert all(torch.equal(x, y) for x, y in zip(grads, grads_too, strict=True))
    if again:
        assert torch.equal(first[1], first[4])
        assert torch.equal(first[2], first[5])
        (without, _), _ = World(axes={"shard": 1, "tensor": 2}).run(masks)
        assert all(torch.equal(x, y) for x, y in zip(first[:4], without[:4], strict=True))


class InParts(nn.Module):
    """Checkpoints that begin or end between the projections, twice in a call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), way

    def first(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.up(x)), 0.5, self.training)

    def second(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.dropout(x, 0.5, self.training)), 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        def part(name: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
            return checkpoint(fn, x, use_reentrant=False) if name in self.way else fn(x)

        for _ in range(2):
            x = x + part("second", self.second, part("first", self.first, x))
        return x


@pytest.mark.parametrize("jit", [False, True])
def test_checkpoints_cut_between_projections(jit: bool) -> None:
    """A second run that drew other numbers would give other gradients, and other masks to the next step."""

    def trained(mesh: Any, way: str) -> Any:
        torch.manual_seed(0)
        apply, params, buffers = functionalize(InParts(way).double(), parallel=STYLES)
        loss, tx = lambda p, x: apply(p, buffers, x)[0].square().mean(), optim.sgd(0.1)
        step = fshard.train_step(loss, tx)
        step = fshard.jit(step, backend="eager") if jit else step
        plan = fshard.make_plan(params, mesh, split=apply.split(mesh))
        state = fshard.init_state(fshard.shard_params(params, plan), tx)
        for _ in range(2):
            state, _ = step(state, torch.ones(3, WIDTH, dtype=torch.float64))
        return fshard.tree.leaves(fshard.gather_params(state.params))

    none, *others = (World(axes={"shard": 1, "tensor": 2}).run(trained, way) for way in ("", *WAYS))
    for got in others:
        assert all(torch.equal(x, y) for x, y in zip(got[0], none[0], strict=True))


def test_an_error_between_projections_leaves_no_other_numbers() -> None:
    """Later draws would differ on ranks with equal activations."""
    (first, _), (second, _) = World(axes={"shard": 1, "tensor": 2}).run(lambda mesh: masks(mesh, fails=True))
    assert len(first) == 3
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_plain_module_draws_as_ever() -> None:
    """A module on one rank, or in evaluation mode, draws what it draws without styles."""
    torch.manual_seed(1)
    expected = torch.rand(5)
    plain, alone = masks(None), World(axes={"shard": 1, "tensor": 1}).run(masks)[0]
    assert torch.equal(plain[0][0], expected)
    assert all(torch.equal(x, y) for x, y in zip(plain[0], alone[0], strict=True))
    evaluated = World(axes={"shard": 1, "tensor": 2}).run(lambda mesh: masks(mesh, evaluates=True))
    for (seen, _), of_plain in zip(evaluated, [masks(None, evaluates=True)] * 2, strict=True):
        assert torch.equal(seen[-1], of_plain[0][-1])


@pytest.mark.parametrize("way", ["eager", "jit"])
def test_ranks_stay_equal_with_dropout(way: str) -> None:
    """Whole leaves would drift apart, or a graph would draw what the eager step does not."""
    model = Model(lambda: Words(Attention(4, 2, rate=0.3), MLP(5, rate=0.3)), HEADS | COLUMN_ROW)
    eager = World(axes={"shard": 2, "tensor": 2}).run(trained, model)
    for got in World(axes={"shard": 2, "tensor": 2}).run(lambda mesh: trained(mesh, model, way=way)):
        for x, y in zip(got, eager[0], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_other_errors_stay_as_they_are() -> None:
    """An error that is not of shapes would be told as one."""

    class Fails(Drops):
        def forward(self, x: Tensor, *args: Any) -> Tensor:
            self.up(x)
            raise ValueError("my own: must match")

    apply, params, buffers = functionalize(Fails(), parallel={"up": "colwise", "down": "rowwise"})

    def run(mesh: Any, error: type[Exception]) -> Any:
        plan = fshard.make_plan(params, mesh, split=apply.split(mesh), data=())
        loss = lambda p, x: apply(p, buffers, x)[0].sum()  # noqa: E731
        return fshard.value_and_grad(loss)(fshard.shard_params(params, plan), torch.ones(2, WIDTH))

    says(lambda: World(axes={"tensor": 2}).run(lambda mesh: run(mesh, ValueError)), RuntimeError, "Fails: my own")
    says(lambda: apply(params, buffers, torch.ones(2, WIDTH)), ValueError, "my own: must match")
