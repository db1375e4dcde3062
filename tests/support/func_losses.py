"""Losses that use torch.func's transforms around what touches the parameters, written for one device."""

from collections.abc import Callable

import torch
from torch import Tensor, func

import fshard
from fshard import tree
from fshard.core.tree import Tree

from .models import rand

UNITS = ["embed", "layers.*", "head"]
FEATURES = 3


def params() -> dict[str, Tree]:
    """A network in four units and a root: odd sizes, a frozen shift, a scalar in the root."""
    layers = [{"w": rand(5, 5, seed=10 + i) / 3, "b": rand(5, seed=20 + i) / 3} for i in range(2)]
    whole = {"embed": rand(FEATURES, 5, seed=1), "layers": layers, "gain": rand(seed=2)}
    return {**whole, "shift": rand(5, seed=3), "head": rand(5, FEATURES, seed=4)}


FROZEN = ["shift"]


def batch(step: int, rank: int, even: bool = False) -> dict[str, Tensor]:
    """One rank's data; the number of rows differs by rank."""
    rows = 2 if even else 2 + 2 * rank
    seeds = {"x": 0, "y": 1, "t": 2}
    return {name: rand(rows, FEATURES, seed=1000 * step + 10 * rank + i) for name, i in seeds.items()}


def net(p: Tree, x: Tensor) -> Tensor:
    """(..., features) -> (..., features), not linear in anything."""
    h = torch.tanh(x @ p["embed"] + p["shift"])
    for layer in p["layers"]:
        h = h + p["gain"] * torch.tanh(h @ layer["w"] + layer["b"])
    return h @ p["head"]


def meanflow(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """The average velocity along the flow, whose target has the network's directional derivative."""
    tangents = b["y"], torch.ones_like(b["t"])
    u, du, *_ = func.jvp(lambda x, t: net(p, x * (1 + t)), (b["x"], b["t"]), tangents)
    return fshard.Mean((u - (b["y"] - b["t"] * du.detach())).square().sum() + du.square().sum(), u.numel())


def physics(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """Heat equation: the trace of the network's Hessian in its input."""
    trace = func.vmap(lambda x: func.hessian(lambda x: net(p, x).sum())(x).diagonal().sum())(b["x"])
    return fshard.Mean((trace - net(p, b["y"]).sum(1)).square().sum(), len(trace))


def laplacian(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """The same in reverse mode alone."""
    hessian = func.vmap(func.jacrev(func.jacrev(lambda x: net(p, x).sum())))(b["x"])
    return fshard.Mean(torch.einsum("nii->n", hessian).sub(net(p, b["y"]).sum(1)).square().sum(), len(hessian))


def score(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """Implicit score matching: the trace of the score's Jacobian, and its norm."""
    trace = func.vmap(lambda x: func.jacrev(lambda x: net(p, x))(x).diagonal().sum())(b["x"])
    return fshard.Mean((trace + net(p, b["x"]).square().sum(1) / 2).sum(), len(trace))


def sliced(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """The same with forward mode, and a projection instead of the trace."""
    jacobian = func.vmap(func.jacfwd(lambda x: net(p, x)))(b["x"])
    return fshard.Mean(torch.einsum("ni,nij,nj->", b["y"], jacobian, b["y"]).square(), len(b["x"]))


def maml(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """One inner step of gradient descent on all parameters, differentiated through."""

    def inner(p: Tree, x: Tensor) -> Tensor:
        return net(p, x).square().mean()

    slopes = func.grad(inner)(p, b["x"])
    after = tree.map(lambda w, slope: w - 0.1 * slope, p, slopes)
    return fshard.Mean((net(after, b["y"]) - b["t"]).square().sum(), len(b["x"]))


def clipped(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """A penalty on the gradients of single samples with respect to one layer."""

    def one(layer: Tree, x: Tensor) -> Tensor:
        layers = [p["layers"][0], layer]
        whole = {name: p[name] for name in ("embed", "gain", "shift", "head")}
        return net({**whole, "layers": layers}, x).square().sum()

    layer = fshard.gather_params(p["layers"][1])
    rows = func.vmap(func.grad(one), (None, 0))(layer, b["x"])
    return fshard.Mean(rows["w"].square().sum() + rows["b"].sum(), len(b["x"]))


def pulled_back(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """A vjp in the input."""
    out, back, *_ = func.vjp(lambda x: net(p, x), b["x"])
    return fshard.Mean((back(b["y"])[0] * out).sum(), len(out))


def curvature(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """Forward over reverse: how the input's gradient changes along a direction."""

    def total(x: Tensor) -> Tensor:
        return net(p, x).square().sum()

    change = func.jvp(func.grad(total), (b["x"],), (b["y"],))[1]
    return fshard.Mean(change.square().sum(), len(change))


def nested(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """Every unit touched first at another depth of transforms."""
    h = b["x"] @ p["embed"]

    def within(h: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(h @ p["layers"][0]["w"] + p["layers"][0]["b"] + x.sum())

        def deeper(h: Tensor) -> Tensor:
            h = torch.sin(h @ p["layers"][1]["w"] + p["layers"][1]["b"])
            return func.vmap(lambda row: (row @ p["head"] * p["gain"]).sum())(h).square().sum()

        return func.grad(deeper)(h).square().sum()

    change = func.jvp(lambda h: within(h, b["y"]), (h,), (h.cos(),))[1]
    return fshard.Mean(change, len(b["x"]))


def dropped(p: Tree, b: dict[str, Tensor]) -> fshard.Mean:
    """Dropout before a reverse-mode transform starts, inside it, and after it."""
    drop = torch.nn.functional.dropout
    x = drop(b["x"], 0.5)
    slope = func.grad(lambda x: drop(net(p, x), 0.5).square().sum())(x)
    return fshard.Mean((drop(slope, 0.5) * net(p, b["y"])).sum(), len(x))


LOSSES: dict[str, Callable[..., fshard.Mean]] = {
    f.__name__: f for f in (meanflow, physics, laplacian, score, sliced, maml, clipped, pulled_back, curvature, nested)
}
