"""`remat` in modules: a part of a forward runs again, and reads the parameters of its own call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.steps import QUIET
from torch import Tensor, func, nn

import fshard
from fshard import optim, remat, tree
from fshard.module import functionalize
from fshard.testing import simulate

pytestmark = pytest.mark.filterwarnings(QUIET)
X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4).sin()


def same(fn: Any) -> Any:
    """The function itself."""
    return fn


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4) -> (rows, 4)."""
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, each called by `call`; the head's weight is read in a function, too."""

    def __init__(self, call: Any, norm: bool):
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4) -> (rows, 4)."""
        for block in self.blocks:
            x = self.call(block)(x)
        return self.head(self.call(lambda x: torch.tanh(x @ self.head.weight))(x))


def made(call: Any, norm: bool = False) -> Any:
    """The module's function, parameters and buffers."""
    torch.manual_seed(0)
    return functionalize(Net(call, norm).double())


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees."""
    return max(float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def trained(mesh: Any, call: Any, how: str, norm: bool) -> Any:
    """Parameters, and buffers after two steps."""
    apply, params, buffers = made(call, norm)
    plan = fshard.make_plan(params, mesh, units=apply.units("blocks.*"))

    def loss(p: Any, buffers: Any, x: Tensor) -> Any:
        out, buffers = apply(p, buffers, x)
        return out.square().mean(), buffers

    step: Any = fshard.train_step(loss, optim.sgd(0.1), with_extra=True)
    step = {"eager": same, "jit": lambda s: fshard.jit(s, backend="eager"), "compile": compiled}[how](step)
    state = fshard.init_state(fshard.shard_params(params, plan), optim.sgd(0.1), extra=buffers)
    for _ in range(2):
        state, _ = step(state, X if mesh is None else X * (1 + mesh.get_rank()))
    return fshard.gather_params(state.params), state.extra


def compiled(step: Any) -> Any:
    """The user's own torch.compile."""
    return torch.compile(step, fullgraph=True, backend="eager")


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
@pytest.mark.parametrize("how", ["eager", "jit", "compile"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_module_trains_as_without(size: int | None, how: str, norm: bool) -> None:
    """What a module reads when it runs again would have no gradient, or its buffers would be written twice."""
    if (how != "eager" and norm and size) or (how == "compile" and (size or norm)):
        pytest.skip("it takes long, and simulated ranks share one dynamo")

    def run(call: Any) -> Any:
        job = lambda mesh: trained(mesh, call, how, norm)  # noqa: E731
        return job(None) if size is None else simulate(job, shard=size)

    assert apart(run(remat), run(same)) < 1e-12


def value(apply: Any, buffers: Any) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a module."""
    return lambda p, x: apply(p, buffers, x)[0].square().sum()


def twice(f: Any, p: Any, v: Any) -> Any:
    """A Hessian-vector product by plain autograd: the second backward begins when the call has returned."""
    leaves = tree.leaves(p)
    slopes = torch.autograd.grad(f(p, X), leaves, create_graph=True)
    return torch.autograd.grad(sum((a * b).sum() for a, b in zip(slopes, tree.leaves(v), strict=True)), leaves)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, p, v: func.grad(f)(p, X),
    "per-sample": lambda f, p, v: func.vmap(func.grad(f), (None, 0))(p, X[:, None]),
    "jvp": lambda f, p, v: func.jvp(lambda p: f(p, X), (p,), (v,))[1],
    "jvp of grad": lambda f, p, v: func.jvp(lambda p: func.grad(f)(p, X), (p,), (v,))[1],
    "grad of jvp": lambda f, p, v: func.grad(lambda p: func.jvp(lambda p: f(p, X), (p,), (v,))[1])(p),
    "plain": lambda f, p, v: torch.autograd.grad(f(p, X), tree.leaves(p)),
    "plain, twice": twice,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_transforms_of_a_module(name: str) -> None:
    """A parameter that a module reads by itself would be a constant."""
    results = []
    for call in (remat, same):
        apply, params, buffers = made(call)
        params = tree.map(lambda x: x.detach().requires_grad_("plain" in name), params)
        results.append(PROGRAMS[name](value(apply, buffers), params, tree.map(lambda x: x.detach().cos(), params)))
    assert apart(*results) < 1e-10


@pytest.mark.parametrize("call", [same, remat])
@pytest.mark.parametrize("size", [None, 2])
def test_hvp_of_a_module(size: int | None, call: Any) -> None:
    """A module's view of a leaf would have no tangent: the product was wrong, silently, with `remat` or without."""
    apply, params, buffers = made(same)
    v = tree.map(lambda x: x.detach().cos(), params)
    ranks = [1.0 + rank for rank in range(size or 1)]
    total = lambda p: sum(value(apply, buffers)(p, X * by) for by in ranks)  # noqa: E731
    expected = func.jvp(func.grad(total), (tree.map(torch.Tensor.detach, params),), (v,))[1]

    def job(mesh: Any) -> Any:
        apply, params, buffers = made(call)
        plan = fshard.make_plan(params, mesh, units=apply.units("blocks.*"))
        loss = lambda p, x: fshard.Sum(value(apply, buffers)(p, x))  # noqa: E731
        by = 1.0 if mesh is None else 1.0 + mesh.get_rank()
        params, along = fshard.shard_params(params, plan), fshard.shard_params(v, plan)
        return fshard.gather_params(fshard.hvp(loss)(params, along, X * by))

    for got in [job(None)] if size is None else simulate(job, shard=size):
        assert apart(got, expected) < 1e-10


def test_hvp_of_a_module_with_layer_norms() -> None:
    """When the function runs again, layer norm would be torch's, whose second derivatives are wrong."""
    results = []
    for call in (remat, same):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for _ in range(2)).double()
        apply, params, buffers = functionalize(Calls(layers, call))
        plan = fshard.make_plan(params, units=["layers.*"])
        v = fshard.shard_params(tree.map(lambda x: x.detach().cos(), params), plan)
        product = fshard.hvp(value(apply, buffers))(fshard.shard_params(params, plan), v, X)
        results.append(fshard.gather_params(product))
    assert apart(*results) < 1e-12


class Calls(nn.Module):
    """Calls layers by `call`."""

    def __init__(self, layers: nn.ModuleList, call: Any):
        super().__init__()
        self.layers, self.call = layers, call

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4) -> (rows, 4)."""
        for layer in self.layers:
            x = self.call(layer)(x)
        return x


def test_a_transformer() -> None:
    """A model of transformers, whose own checkpoints are replaced by `remat`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 30}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    ids = torch.arange(12).reshape(2, 6)

    def gradient(call: Any) -> Any:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False)).double()
        if call is not None:
            # the name of older versions is an error here
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        for part in model.modules():
            if call is not None and hasattr(part, "_gradient_checkpointing_func"):
                part._gradient_checkpointing_func = lambda fn, *args, **kw: call(fn)(*args, **kw)
        apply, params, buffers = functionalize(model.train())
        plan = fshard.make_plan(params, units=["model.layers.*"])
        loss = lambda p, ids: apply(p, buffers, input_ids=ids, labels=ids)[0].loss  # noqa: E731
        value, grads = fshard.value_and_grad(loss)(fshard.shard_params(params, plan), ids)
        return value, fshard.gather_params(grads)

    assert apart(gradient(remat), gradient(None)) < 1e-12
