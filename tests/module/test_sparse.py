"""Modules with `sparse=True`: their gradients are those of dense ones."""

from typing import Any

import pytest
import torch
from support.models import NARROW, STRATEGIES, same_bits
from support.modules import WORDS
from support.worlds import simulated
from torch import Tensor, nn

import fshard
from fshard import optim, tree
from fshard.compiler.trace import TraceError

TOKENS = torch.tensor([[1, 2, 2], [0, 4, 0]])


class Words(nn.Module):
    """Words and bags of them; the table of words is the head, too."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.word, self.bag = nn.Embedding(WORDS, 3, sparse=sparse), nn.EmbeddingBag(WORDS, 3, sparse=sparse)
        self.head = nn.Linear(3, WORDS)
        self.head.weight = self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) of words -> (rows, WORDS)."""
        return self.head(self.bag(tokens) + self.word(tokens[:, 0]))


class Apart(Words):
    """Words and bags that are looked up, and nothing else: the whole gradient is sparse."""

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) of words -> (rows, 3)."""
        return self.bag(tokens) * self.word(tokens[:, 0])


def made(kind: type[Words], sparse: bool) -> Any:
    """A loss of a model, and its parameters, the same for both kinds of gradients."""
    torch.manual_seed(0)
    apply, params, _ = fshard.module.functionalize(kind(sparse).double())
    return lambda p, x: fshard.Sum(apply(p, {}, x)[0].square().sum()), params


@pytest.mark.parametrize("strategy", NARROW)
@pytest.mark.parametrize("kind", [Words, Apart])
def test_sparse_gradients_of_a_module_are_made_dense(kind, strategy):
    """A module with `sparse=True` could not be trained, or would be trained otherwise than without it."""

    def trained(mesh: Any, sparse: bool) -> Any:
        (loss, params), tx = made(kind, sparse), optim.sgd(0.1)
        plan = fshard.make_plan(params, mesh, units=["*"], **STRATEGIES[strategy])
        state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(loss, tx)
        for i in range(2):
            state, _ = step(state, TOKENS + i + mesh.get_rank())
        assert (fshard.gather_params(state.params)["word"]["weight"] != params["word"]["weight"]).any()
        return fshard.gather_params(state.params)

    assert same_bits(simulated(trained, True), simulated(trained, False))


@pytest.mark.parametrize("kind", [Words, Apart])
def test_sparse_gradients_of_whole_parameters(kind):
    """Plain autograd over whole parameters of a module with `sparse=True` would fail."""

    def grads(sparse: bool) -> list[Tensor]:
        loss, params = made(kind, sparse)
        leaves = tree.map(lambda x: x.detach().requires_grad_(), params)
        picked = leaves["word"]["weight"], leaves["bag"]["weight"]
        return [x.to_dense() for x in torch.autograd.grad(loss(leaves, TOKENS).total, picked)]

    assert same_bits(grads(True), grads(False))


def test_a_graph_takes_no_sparse_gradients():
    """The error would not say what to do."""
    loss, params = made(Apart, True)
    run = fshard.jit(fshard.value_and_grad(loss), backend="eager")
    with pytest.raises(TraceError, match="sparse=False in embedding and embedding_bag"):
        run(fshard.shard_params(params, fshard.make_plan(params)), TOKENS)
