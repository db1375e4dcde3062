"""What the pages show for many ranks is, on ranks with other and unequal data, the plain program of one device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.pages import defined
from torch import Tensor, nn
from torch.nn import functional as F

import fshard
from fshard import tree
from fshard.testing import assert_trees_equal, simulate

ROWS = [(5,), (2, 4), (3, 0, 2)]  # of each rank
PLANS: list[dict[str, Any]] = [{}, {"params_over": (), "grads_over": (), "state_over": ()}]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(batch: dict[str, Tensor], rows: Sequence[int]) -> list[dict[str, Tensor]]:
    """The batch of each rank: the first rows, the next ones, and so on."""
    cut = {name: x.split(list(rows)) for name, x in batch.items()}
    return [{name: xs[rank] for name, xs in cut.items()} for rank in range(len(rows))]


def plain_grads(loss: Callable[[Any], Tensor], params: Any) -> tuple[Tensor, Any]:
    """The value of a loss, and its gradients by torch's autograd."""
    leaves, spec = tree.flatten(tree.map(lambda x: x.clone().requires_grad_(), params))
    value = loss(tree.unflatten(spec, leaves))
    return value.detach(), tree.unflatten(spec, list(torch.autograd.grad(value, leaves)))


def is_near(got: Any, expected: Any) -> None:
    for x, y in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, check_dtype=False)


def on_ranks(loss_of: Callable[[Any], Any], params: Any, batch: Any, rows: Sequence[int]) -> list[Any]:
    """Value and gradients of a loss that a page defines (given a mesh) on ranks with these rows, for each plan."""

    def on_a_rank(mesh: Any) -> Any:
        own, results = parts(batch, rows)[mesh.get_rank()], []
        for options in PLANS:
            sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["*"], **options))
            value, grads = fshard.value_and_grad(loss_of(mesh))(sharded, own)
            results.append((value, fshard.gather_params(grads)))
        return results

    return [result for of_rank in simulate(on_a_rank, shard=len(rows)) for result in of_rank]


@pytest.mark.parametrize("rows", ROWS)
def test_a_contrastive_loss_is_that_of_all_rows(rows: tuple[int, ...]) -> None:
    """Negatives of other ranks would be missing, their gradients be lost, or be counted once for each rank."""
    params = {"image": normal(8, 4), "text": normal(5, 4, seed=1), "scale": torch.tensor(0.7, dtype=torch.float64)}
    batch = {"image": normal(sum(rows), 8, seed=2), "text": normal(sum(rows), 5, seed=3)}

    def plain(params: Any) -> Tensor:
        image, text = (F.normalize(batch[name] @ params[name], dim=1) for name in ("image", "text"))
        scores, right = params["scale"].exp() * image @ text.T, torch.arange(sum(rows))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    titles = ("Rows of all ranks", "A contrastive loss over all ranks")
    expected = plain_grads(plain, params)
    for result in on_ranks(lambda mesh: defined("recipes.md", *titles, mesh=mesh)["clip_loss"], params, batch, rows):
        is_near(result, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_vicreg_has_the_statistics_of_all_rows(rows: tuple[int, ...]) -> None:
    """A variance would be that of a rank's rows, or its gradient have the weight of the number of ranks."""
    params = {"blocks": [{"w": normal(8, 8) / 2}], "out": normal(8, 3, seed=1)}
    batch = {"x": normal(sum(rows), 8, seed=2), "other": normal(sum(rows), 8, seed=3)}

    def spread(z: Tensor) -> Tensor:
        covariance = torch.cov(z.T)
        off = covariance - torch.diag(covariance.diagonal())
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + off.square().sum() / z.shape[1]

    def plain(params: Any) -> Tensor:
        z, other = (torch.tanh(batch[name] @ params["blocks"][0]["w"]) @ params["out"] for name in ("x", "other"))
        return F.mse_loss(z, other) + spread(z) + spread(other)

    expected = plain_grads(plain, params)
    title = "Statistics of all ranks' rows"
    for result in on_ranks(lambda mesh: defined("recipes.md", title, mesh=mesh)["vicreg"], params, batch, rows):
        is_near(result, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_the_balance_of_experts_over_all_rows(rows: tuple[int, ...]) -> None:
    """The balance would be a mean of those of ranks, which is not that of all rows."""
    params, batch = {"router": normal(8, 4)}, {"x": normal(sum(rows), 8, seed=1)}

    def plain(params: Any) -> Tensor:
        scores = batch["x"] @ params["router"]
        shares = F.one_hot(scores.argmax(1), 4).double().mean(0)
        return 4 * (shares * scores.softmax(1).mean(0)).sum()

    def loss_of(mesh: Any) -> Any:
        balance = defined("recipes.md", "Statistics of all ranks' rows", mesh=mesh)["balance_of_all"]

        def loss(params: Any, batch: Any) -> Any:
            scores = batch["x"] @ params["router"]
            return fshard.Mean(balance(scores, scores.argmax(1)), 1)

        return loss

    expected = plain_grads(plain, params)
    for result in on_ranks(loss_of, params, batch, rows):
        is_near(result, expected)


@pytest.mark.parametrize("rows", [*ROWS, (0, 0)])
def test_rows_of_all_ranks_are_in_the_order_of_ranks(rows: tuple[int, ...]) -> None:
    """Rows that fill up would be among them, or a rank would not find its own."""
    x = torch.arange(sum(rows) * 2).view(-1, 2)

    def on_a_rank(mesh: Any) -> Any:
        own = x.split(list(rows))[mesh.get_rank()]
        return own, *defined("recipes.md", "Rows of all ranks")["rows_of_all"](own, mesh)

    for own, everything, first in simulate(on_a_rank, shard=len(rows)):
        assert torch.equal(everything, x)
        assert torch.equal(everything[first : first + len(own)], own)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("options", PLANS, ids=["full", "ddp"])
def test_tokens_of_all_ranks_end_a_step(num_ranks: int, options: dict[str, Any]) -> None:
    """Batches of many tokens would count as much as those of few, or ranks would stop at different batches."""
    labels = torch.full((2, 3, 4, 6), -100)  # of steps, batches, ranks and rows
    for i, label in enumerate(labels.view(-1, 6)):
        label[: (5 * i) % 7] = (torch.arange((5 * i) % 7) + i) % 3
    x = normal(2, 3, 4, 6, 8)
    params, least = {"blocks": [{"w": normal(8, 8) / 3}], "out": normal(8, 3, seed=1)}, 6 * num_ranks

    model = defined("recipes.md")["model"]
    leaves, spec = tree.flatten(tree.map(lambda x: nn.Parameter(x.clone()), params))
    optimizer, losses, used = torch.optim.Adam(leaves, 0.1), [], []
    for xs, ys in zip(x[:, :, :num_ranks], labels[:, :, :num_ranks], strict=True):
        number = next(n for n in (1, 2, 3) if (ys[:n] != -100).sum() >= least)
        rows = xs[:number].flatten(0, 2), ys[:number].flatten()
        loss = F.cross_entropy(model(tree.unflatten(spec, leaves), rows[0]), rows[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        used.append(number)
    assert max(used) > 1

    def on_a_rank(mesh: Any) -> Any:
        page, rank = defined("recipes.md", "Accumulate until N tokens", mesh=mesh), mesh.get_rank()
        tx = fshard.optim.adam(0.1)
        state = fshard.init_state(page["sharded"](params, units=["blocks.*"], **options), tx)
        values = []
        for number, xs, ys in zip(used, x[:, :, rank], labels[:, :, rank], strict=True):
            batches = iter([{"x": a, "y": b} for a, b in zip(xs, ys, strict=True)])
            state, value = page["train_tokens"](state, tx, batches, least)
            assert len([*batches]) == 3 - number
            values.append(value)
        assert int(state.step) == 2
        return values, fshard.gather_params(state.params)

    for result in simulate(on_a_rank, shard=num_ranks):
        is_near(result, (losses, tree.unflatten(spec, [x.detach() for x in leaves])))
