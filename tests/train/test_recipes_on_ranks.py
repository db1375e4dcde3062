"""What the pages show for many ranks is, on ranks with other and unequal data, the plain program of one device."""

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pages import defined
from torch import Tensor, nn
from torch.nn import functional as F

import fshard
from fshard import tree
from fshard.testing import simulate

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
    return value.detach(), tree.unflatten(spec, list(torch.autograd.grad(value, leaves, materialize_grads=True)))


def is_near(got: Any, expected: Any) -> None:
    for x, y in zip(tree.leaves(got), tree.leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, check_dtype=False)


def on_ranks(loss: Callable[..., Any], params: Any, batch: Any, rows: Sequence[int]) -> list[Any]:
    """Value and gradients of a page's loss, which takes its mesh, on ranks with these rows, for each plan."""

    def on_a_rank(mesh: Any) -> Any:
        own, results = parts(batch, rows)[mesh.get_rank()], []
        for options in PLANS:
            sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["*"], **options))
            value, grads = fshard.value_and_grad(loss)(sharded, own, mesh)
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
    for result in on_ranks(defined("recipes.md", *titles)["clip_loss"], params, batch, rows):
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
    for result in on_ranks(defined("recipes.md", title)["vicreg"], params, batch, rows):
        is_near(result, expected)


@pytest.mark.parametrize("rows", ROWS)
def test_the_balance_of_experts_over_all_rows(rows: tuple[int, ...]) -> None:
    """The balance would be a mean of those of ranks, which is not that of all rows."""
    params, batch = {"router": normal(8, 4)}, {"x": normal(sum(rows), 8, seed=1)}

    def plain(params: Any) -> Tensor:
        scores = batch["x"] @ params["router"]
        shares = F.one_hot(scores.argmax(1), 4).double().mean(0)
        return 4 * (shares * scores.softmax(1).mean(0)).sum()

    balance = defined("recipes.md", "Statistics of all ranks' rows")["balance_of_all"]

    def loss(params: Any, batch: Any, mesh: Any) -> Any:
        scores = batch["x"] @ params["router"]
        return fshard.Mean(balance(scores, scores.argmax(1), mesh), 1)

    expected = plain_grads(plain, params)
    for result in on_ranks(loss, params, batch, rows):
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


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_best_checkpoint_is_that_of_the_least_loss(num_ranks: int, tmp_path: Path) -> None:
    """The best would be the last, or a rank stop at another step."""
    slopes = [1.5 + rank for rank in range(num_ranks)]
    rows = [1 + rank for rank in range(num_ranks)]
    target, num, lr = 4.0, sum(rows), 0.35

    def loss(params: Any, batch: Tensor) -> Any:
        """Rows pull the parameter up; the loss of `valid` (rows of 0) is least on the way."""
        pulled = torch.where(batch == 0, (params["w"] - target).square(), -batch * params["w"])
        return fshard.Mean(pulled.sum(), len(batch)), {}

    pull, w, losses = sum(a * n for a, n in zip(slopes, rows, strict=True)) / num, 0.0, list[float]()
    while len(losses) < 3 or min(losses[-2:]) < min(losses[:-2]):
        w += lr * pull
        losses.append((w - target) ** 2)
    best = min(range(len(losses)), key=losses.__getitem__)
    assert best == len(losses) - 3 > 0

    def on_a_rank(mesh: Any) -> Any:
        page, rank = defined("logging.md", "Stop early, and keep the best", folder=tmp_path, loss=loss), mesh.get_rank()
        params = {"w": torch.zeros((), dtype=torch.float64)}
        page["params"], page["tx"] = params, fshard.optim.sgd(lr)
        page["start"] = lambda mesh, tx: fshard.init_state(
            fshard.shard_params(params, fshard.make_plan(params, mesh)), tx
        )
        data = torch.full((rows[rank],), slopes[rank], dtype=torch.float64)
        page["batches"] = lambda mesh: [torch.zeros_like(data), data]
        kept = page["until_no_better"](mesh)
        return kept["best"], kept["state"].step.item(), fshard.gather_params(kept["state"].params)["w"].item()

    for value, step, w in simulate(on_a_rank, shard=num_ranks):
        assert (round(value - losses[best], 9), step) == (0, best + 1)
        assert abs(w - (best + 1) * lr * pull) < 1e-9
    assert fshard.checkpoint.steps(tmp_path / "best") == [best + 1]
    assert fshard.checkpoint.steps(tmp_path / "last") == [len(losses)]


def sequences(num_ranks: int, least: int) -> list[list[tuple[Tensor, int]]]:
    """Tokens and a label of each sequence, of each rank: other numbers of both; rank 1 has the least."""
    generator = torch.Generator().manual_seed(0)
    numbers = [least if rank == 1 else 2 + rank for rank in range(num_ranks)]
    lengths = torch.randint(1, 6, (sum(numbers),), generator=generator).tolist()
    drawn = [(torch.randint(10, (n,), generator=generator), int(n) % 3) for n in lengths]
    return [drawn[sum(numbers[:rank]) :][:n] for rank, n in enumerate(numbers)]


def packed(rows: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
    tokens = [x for x, _ in rows]
    cu_seqlens = torch.tensor([0, *(len(x) for x in tokens)]).cumsum(0)
    return {
        "tokens": torch.cat([torch.zeros(0, dtype=torch.int64), *tokens]),
        "cu_seqlens": cu_seqlens,
        "labels": labels(rows),
    }


def labels(rows: Sequence[tuple[Tensor, int]]) -> Tensor:
    return torch.tensor([y for _, y in rows], dtype=torch.int64)


def graphs(rows: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
    """A path of nodes for each sequence."""
    batch, first = packed(rows), 0
    edges, graph = [torch.zeros(2, 0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for i, (x, _) in enumerate(rows):
        path = first + torch.arange(len(x))
        edges.append(torch.stack([path[:-1], path[1:]]))
        graph.append(torch.full((len(x),), i))
        first += len(x)
    return {
        "nodes": batch["tokens"],
        "edges": torch.cat(edges, 1),
        "graph": torch.cat(graph),
        "labels": batch["labels"],
    }


def listed(rows: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
    return {"tokens": [x for x, _ in rows], "labels": labels(rows)}


def mean_of_tokens(params: Any, x: Tensor) -> Tensor:
    return params["embed"][x].mean(0)


def sum_of_nodes(params: Any, x: Tensor) -> Tensor:
    nodes = params["embed"][x]
    messages = torch.cat([torch.zeros_like(nodes[:1]), torch.tanh(nodes[:-1] @ params["message"])])
    return (nodes + messages).sum(0)


RAGGED = {
    "packed": ("packed_loss", packed, mean_of_tokens),
    "graphs": ("graph_loss", graphs, sum_of_nodes),
    "lists": ("list_loss", listed, mean_of_tokens),
}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "call", [lambda step: step, lambda step: fshard.jit(step, backend="eager")], ids=["eager", "jit"]
)
def test_ragged_batches_are_those_of_one_device(name: str, num_ranks: int, call: Any) -> None:
    """A rank with more sequences, or longer ones, would count too little, or a step would refuse the batch."""
    loss, batch_of, embedded = RAGGED[name]
    rows = sequences(num_ranks, least=int(name == "lists"))  # torch stacks no empty list
    params = {"embed": normal(10, 4), "message": normal(4, 4, seed=1), "head": normal(4, 3, seed=2)}
    every, ys = zip(*[row for of_rank in rows for row in of_rank], strict=True)
    page, tx = defined("data.md", "Ragged data"), fshard.optim.sgd(1.0)

    def plain(params: Any) -> Tensor:
        scores = torch.stack([embedded(params, x) for x in every]) @ params["head"]
        return F.cross_entropy(scores, torch.tensor(ys))

    def on_a_rank(mesh: Any) -> Any:
        step = call(fshard.train_step(page[loss], tx))
        before = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
        state, metrics = step(before, batch_of(rows[mesh.get_rank()]))
        after = fshard.gather_params(state.params)
        return metrics["loss"], tree.map(torch.sub, params, after)

    for result in simulate(on_a_rank, shard=num_ranks):
        is_near(result, plain_grads(plain, params))


def whole_grads(params: Any, loss: Callable[..., Any], batches: Sequence[Any]) -> list[tuple[Tensor, Any]]:
    """Value and gradients of a module's loss on ranks that have a batch each."""

    def on_a_rank(mesh: Any) -> tuple[Tensor, Any]:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["*.**.weight"]))
        value, grads = fshard.value_and_grad(loss)(sharded, batches[mesh.get_rank()])
        return value, fshard.state_dict(grads)

    return simulate(on_a_rank, shard=len(batches))


@pytest.mark.parametrize("no_labels", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loss_of_a_model_counts_labels(num_ranks: int, no_labels: bool) -> None:
    """Ranks with few labels would weigh as much as others, or the shift by one token be forgotten."""
    page = defined("modules.md", "A loss that the model returns")
    config = page["LlamaConfig"](
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    module = page["LlamaForCausalLM"](config).double()
    apply, params, buffers = fshard.module.functionalize(module)
    generator, batches = torch.Generator().manual_seed(0), []
    for rank in range(num_ranks):
        ids, labels = torch.randint(16, (2, 2 + rank, 6), generator=generator)
        for row in range(2 + rank):
            labels[row, 1 + (row + 2 * rank) % 4 :] = -100
        batches.append({"input_ids": ids, "labels": labels})
    loss = page["language_loss"]
    if no_labels:
        for batch in batches[1:]:
            batch["labels"].fill_(-100)

        def loss(params: Any, batch: Any) -> Any:
            out, _ = apply(params, buffers, **batch, num_items_in_batch=1)
            return fshard.Mean(out.loss, (batch["labels"][:, 1:] != -100).sum())

    page.update(llama=apply, llama_buffers=buffers)
    expected = module(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss
    expected.backward()
    grads = {name: x.grad for name, x in module.named_parameters()}
    for value, got in whole_grads(params, loss, batches):
        assert got.keys() == grads.keys()
        is_near((value, [got[name] for name in grads]), (expected.detach(), [*grads.values()]))


def autoencoder() -> tuple[dict[str, Any], torch.nn.Module, Any, Any, Any]:
    """The page's program of methods, its autoencoder, and that module's methods as a function."""
    page = defined("modules.md", "Other methods than forward")
    torch.manual_seed(0)
    module = page["Autoencoder"]().double()
    return page, module, *fshard.module.functionalize(page["Methods"](module))


@pytest.mark.parametrize("rows", ROWS)
def test_methods_other_than_forward(rows: tuple[int, ...]) -> None:
    """A method would compute with the module's own parameters, and predictions be those of other rows."""
    page, module, call, params, buffers = autoencoder()
    x = normal(sum(rows), 8)
    page.update(call=call, auto_buffers=buffers)
    expected = module.training_step(x, 0)
    expected.backward()
    grads = {f"module.{name}": y.grad for name, y in module.named_parameters()}
    batches = [own for own in x.split(list(rows)) if len(own)]  # a mean of no rows is NaN
    for value, got in whole_grads(params, page["auto_loss"], batches):
        is_near((value, [got[name] for name in grads]), (expected.detach(), [*grads.values()]))


@pytest.mark.parametrize("rows", ROWS)
def test_embeddings_of_all_ranks(rows: tuple[int, ...]) -> None:
    """A rank without rows would stop the others, or embeddings be in another order."""
    _, module, call, params, buffers = autoencoder()
    x = normal(sum(rows), 8)
    rows_of_all = defined("recipes.md", "Rows of all ranks")["rows_of_all"]

    def on_a_rank(mesh: Any) -> Tensor:
        encode = fshard.predict(lambda params, x: call.eval(params, buffers, "encode", x)[0])
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        return rows_of_all(encode(sharded, x.split(list(rows))[mesh.get_rank()]), mesh)[0]

    for embeddings in simulate(on_a_rank, shard=len(rows)):
        is_near(embeddings, module.encode(x).detach())


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_number_of_parameters(num_ranks: int) -> None:
    """Padding or tied leaves would count, or frozen ones as trained."""
    module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3))
    module[1].weight = module[0].weight
    module[2].requires_grad_(False)
    apply, params, _ = fshard.module.functionalize(module)

    def on_a_rank(mesh: Any) -> tuple[int, int]:
        plan = fshard.make_plan(params, mesh, units=apply.units(nn.Linear), frozen=apply.frozen)
        trained = sum(slot.numel for slot in plan.slots if plan.kinds[slot.kind].trainable)
        return sum(slot.numel for slot in plan.slots), trained

    assert simulate(on_a_rank, shard=num_ranks) == [(25 + 5 + 5 + 15 + 3, 25 + 5 + 5)] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_copies_and_pickles_of_a_state(num_ranks: int, tmp_path: Path) -> None:
    """A copy would share memory with the state; the page would refuse what works, or promise what does not."""
    params, tx = {"w": normal(5, 3)}, fshard.optim.adam(0.1)
    step = fshard.train_step(lambda params, x: fshard.Sum((x @ params["w"]).square().sum()), tx, donate=True)

    def on_a_rank(mesh: Any) -> None:
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
        path, kept, x = tmp_path / f"{mesh.get_rank()}.pt", copy.deepcopy(state), normal(2, 5, seed=mesh.get_rank())
        torch.save(state, path)
        loaded = torch.load(path, weights_only=False)
        is_near(loaded, state)
        with pytest.raises(ValueError, match=r"no mesh .*call plan\.on"):
            fshard.gather_params(loaded.params)
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            torch.load(path)
        after, _ = step(state, x)
        is_near(fshard.gather_params(kept.params), params)
        is_near(step(kept, x)[0], after)
        whole = fshard.state_dict(after.params, rank=0)
        if mesh.get_rank() == 0:
            torch.save(whole, path)
            assert torch.load(path)["w"].shape == (5, 3)

    simulate(on_a_rank, shard=num_ranks)
