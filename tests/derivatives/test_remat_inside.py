"""`remat` of functions that transform by themselves, that make tensors no mode sees, and that scan over units."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.closed import randn
from torch import Tensor, func

import fshard
from fshard import remat, tree
from fshard.testing import simulate

W, X = randn(4, 4, seed=1) / 2, randn(3, 4, seed=2)
Layer = Callable[[Tensor, Tensor], Tensor]


def value(w: Tensor, z: Tensor) -> Tensor:
    """A function that the layers differentiate."""
    return torch.tanh(z @ w).square().sum()


def of_vjp(w: Tensor, x: Tensor) -> Tensor:
    """The function that `vjp` returns is given another result."""
    out, pull = func.vjp(lambda z: torch.tanh(z @ w), x)
    return out * pull(out.sin())[0]


def of_jvp(w: Tensor, x: Tensor) -> Tensor:
    """Value and tangent."""
    out, tangent = func.jvp(lambda z: torch.tanh(z @ w), (x,), (x.cos(),))
    return out + tangent


LAYERS: dict[str, Layer] = {
    "x + grad": lambda w, x: x + func.grad(lambda z: value(w, z))(x),
    "jacrev": lambda w, x: func.vmap(func.jacrev(lambda z: torch.tanh(z @ w)))(x).sum(-1),
    "jacfwd": lambda w, x: func.vmap(func.jacfwd(lambda z: torch.tanh(z @ w)))(x).sum(-1) * x,
    "hessian": lambda w, x: func.vmap(func.hessian(lambda z: value(w, z)))(x).sum(-1) + x,
    "vjp": of_vjp,
    "jvp": of_jvp,
    "vmap of grad": lambda w, x: func.vmap(func.grad(lambda z: value(w, z)))(x) * x,
    "grad of grad": lambda w, x: x + func.grad(lambda y: (y * func.grad(lambda z: value(w, z))(y)).sum())(x),
    "by both": lambda w, x: x @ func.grad(lambda w: value(w, x))(w),
}
AROUND: dict[str, Callable[[Layer, Tensor, Tensor], Tensor]] = {
    "nothing": lambda layer, w, x: layer(w, x).square().sum(),
    "grad": lambda layer, w, x: func.grad(lambda z: layer(w, z).square().sum())(x).square().sum(),
    "jvp of vmap": lambda layer, w, x: func.jvp(
        lambda z: func.vmap(lambda row: layer(w, row[None]))(z), (x,), (x.sin(),)
    )[1].sum(),
}
NESTED: dict[str, Callable[[Any, Layer], Layer]] = {
    "once": lambda call, layer: call(layer),
    "twice": lambda call, layer: call(lambda w, x: call(layer)(w, call(lambda x: layer(w, x.sin()))(x)) + x),
}


def sharded(mesh: Any) -> fshard.Sharded:
    """The matrix, on a mesh."""
    return fshard.shard_params({"w": W}, fshard.make_plan({"w": W}, mesh))


def by_autograd(loss: Any, mesh: Any) -> Any:
    """Without torch.func."""
    w = W.clone().requires_grad_()
    return torch.autograd.grad(loss({"w": w}), w)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "torch.autograd": by_autograd,
    "grad": lambda loss, mesh: func.grad(loss)({"w": W}),
    "value_and_grad": lambda loss, mesh: fshard.gather_params(fshard.value_and_grad(loss)(sharded(mesh))[1]),
    "hvp": lambda loss, mesh: fshard.gather_params(fshard.hvp(loss)(sharded(mesh), sharded(mesh))),
    "jvp": lambda loss, mesh: func.jvp(
        lambda params: loss(fshard.gather_params(params)), (sharded(mesh),), (sharded(mesh),)
    ),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_function_may_transform(layer: str, around: str, way: str, nested: str) -> None:
    """What a transform makes inside, which no mode sees, would count as read from outside."""

    def result(call: Any, mesh: Any) -> Any:
        return WAYS[way](lambda p: AROUND[around](NESTED[nested](call, LAYERS[layer]), p["w"], X), mesh)

    expected = tree.leaves(result(lambda fn: fn, None))
    if (layer, nested) == ("by both", "twice"):
        with pytest.raises(RuntimeError, match=r"differentiates by a .* from outside of it: give it to the function"):
            result(remat, None)
        return
    got = simulate(lambda mesh: tree.leaves(result(remat, mesh)), shard=2)
    assert all(torch.allclose(x, y, rtol=1e-9) for leaves in got for x, y in zip(leaves, expected, strict=True))
    assert max(float(x.abs().max()) for x in expected) > 1e-3


def test_a_tensor_may_have_the_identity_of_one_that_is_gone() -> None:
    """A write to it would count as one of what the function computes, by chance."""
    met = 0

    def fn(x: Tensor) -> Tensor:
        nonlocal met
        for _ in range(20):
            number = id(x * 2)
            fresh = torch.from_numpy(np.ones(4))  # which no mode sees
            if id(fresh) == number:
                met, x = met + 1, x * fresh.add_(1)
        return x

    x = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(remat(fn)(x).sum(), x)[0] == 1, torch.full_like(x, met == 0).bool())
    assert met > 1


LAYERS_OF_A_SCAN = {"layers": [{"w": randn(4, 4, seed=seed)} for seed in range(5)], "out": W}


def scanned(around: Any, body: Any) -> Callable[[Any, Tensor], Tensor]:
    """A loss of a loop over layers, with something around the loop, or around each layer."""
    layer = body(lambda unit, h: torch.tanh(h @ unit["w"]))
    return lambda p, x: (around(lambda x: fshard.scan(layer, x, p["layers"])[0])(x) @ p["out"]).square().sum()


@pytest.mark.parametrize("units", [["layers.*"], ["layers"]])
@pytest.mark.parametrize("where", ["around", "body"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_scan_in_a_graph(size: int, where: str, units: list[str]) -> None:
    """A trace would take values of a copied body, which it does not know, for constants."""

    def gradients(mesh: Any, loss: Any, way: Any) -> list[Tensor]:
        params = fshard.shard_params(LAYERS_OF_A_SCAN, fshard.make_plan(LAYERS_OF_A_SCAN, mesh, units=units))
        return tree.leaves(fshard.gather_params(way(fshard.value_and_grad(loss))(params, X)[1]))

    plain: Any = lambda fn: fn  # noqa: E731
    loss = scanned(remat, plain) if where == "around" else scanned(plain, remat)
    expected = gradients(None, scanned(plain, plain), plain)
    for got in simulate(lambda mesh: gradients(mesh, loss, lambda fn: fshard.jit(fn, backend="eager")), shard=size):
        assert all(torch.allclose(x, y, rtol=1e-9) for x, y in zip(got, expected, strict=True))
