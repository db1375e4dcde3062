"""`remat`: values and derivatives of the function it is given, in all transforms; what it cannot keep is an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import func_losses
from support.closed import MORE, dot, loss, net, params, randn
from support.func_losses import LOSSES
from torch import Tensor, func

import fshard
from fshard import remat, tree

X, V = randn(5, 6, seed=100), params(seed=10)
Net = Callable[[Any, Tensor], Tensor]


def argument(p: Any, x: Tensor) -> Tensor:
    """All that the function reads is an argument."""
    return remat(net)(p, x)


def closure(p: Any, x: Tensor) -> Tensor:
    """The parameters come from outside, and one of them twice."""
    hidden = remat(lambda x: torch.tanh(x @ p["w1"] + p["b"]))(x)
    return remat(lambda h: h @ p["w2"] + 0 * p["w1"].sum())(hidden)


def nested(p: Any, x: Tensor) -> Tensor:
    """One function inside of another: one parameter is read by both, one by the inner alone, one by the outer."""

    def outer(b: Tensor, x: Tensor) -> Tensor:
        hidden = remat(lambda x: torch.tanh(x @ p["w1"] + b))(x)
        return hidden @ p["w2"] + 0 * p["w1"].sum()

    return remat(outer)(p["b"], x)


def within(p: Any, x: Tensor) -> Tensor:
    """The function differentiates: the network is a derivative in forward mode."""

    def slope(b: Tensor) -> Tensor:
        hidden = x @ p["w1"] + b
        return func.jvp(lambda h: h - h * torch.tanh(h) ** 2 / 2, (hidden,), (torch.tanh(hidden) * p["b"],))[1]

    return remat(slope)(p["b"]) @ p["w2"]


def plain_within(p: Any, x: Tensor) -> Tensor:
    """The same without `remat`."""
    hidden = x @ p["w1"] + p["b"]
    change = torch.tanh(hidden) * p["b"]
    t = torch.tanh(hidden)
    return (change * (1 - t**2 / 2 - hidden * t * (1 - t**2))) @ p["w2"]


def mapped(p: Any, x: Tensor) -> Tensor:
    """A `vmap` inside of the function, and one around it; rows are batched in the one, parameters in none."""

    def rows(x: Tensor) -> Tensor:
        return func.vmap(lambda row: torch.tanh(row @ p["w1"] + p["b"]))(x)

    return remat(rows)(torch.atleast_2d(x)).reshape(*x.shape[:-1], -1) @ p["w2"]


SOURCES: dict[str, tuple[Net, Net]] = {
    "argument": (argument, net),
    "closure": (closure, net),
    "nested": (nested, net),
    "within": (within, plain_within),
    "mapped": (mapped, net),
}


def of(net: Net) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a network."""
    return lambda p, x: net(p, x).square().sum()


def jacobian(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """All rows of the Jacobian of the gradient in one parameter, by reverse mode."""
    return func.jacrev(lambda b: func.grad(f)({**p, "b": b}, x)["w2"])(p["b"])


def hessian(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """Forward over reverse mode, both mapped."""
    return func.hessian(lambda b: f({**p, "b": b}, x))(p["b"])


def twice_forward(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """jvp of jvp, which torch loses silently in a rule that is not linear."""
    along = lambda p: func.jvp(lambda p: f(p, x), (p,), (v,))[1]  # noqa: E731
    return func.jvp(along, (p,), (v,))[1]


def reverse_over_forward(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """grad of jvp."""
    return func.grad(lambda p: func.jvp(lambda p: f(p, x), (p,), (v,))[1])(p)


def mapped_hessian(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """A Hessian of every row, in the row."""
    return func.vmap(func.hessian(lambda row: f(p, row)))(x)


def mapped_jacobian(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """A Jacobian of every row's gradient, in forward mode, mapped over other dims of two arguments."""
    rows = func.vmap(func.jacfwd(func.grad(lambda row, b: f({**p, "b": b}, row))), (1, None))(x.T, p["b"])
    return func.vmap(func.grad(lambda b, row: f({**p, "b": b}, row)), (1, 0))(p["b"][:, None].expand(4, 5), x), rows


def directional_gradients(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """jvp of per-sample gradients."""
    return func.jvp(lambda p: func.vmap(func.grad(f), (None, 0))(p, x), (p,), (v,))[1]


def plain_forward(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """Forward mode without torch.func."""
    with torch.autograd.forward_ad.dual_level():
        duals = tree.map(torch.autograd.forward_ad.make_dual, p, v)
        return torch.autograd.forward_ad.unpack_dual(f(duals, x)).tangent


TRANSFORMS = {
    **MORE,
    "jacrev of grad": jacobian,
    "hessian": hessian,
    "jvp of jvp": twice_forward,
    "grad of jvp": reverse_over_forward,
    "vmap of hessian": mapped_hessian,
    "vmap of jacfwd of grad": mapped_jacobian,
    "jvp of vmap of grad": directional_gradients,
    "forward mode of torch.autograd": plain_forward,
}


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees, in the largest element."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    scale = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / scale


NO_GRAPH = {  # what torch cannot trace or run as a graph, with `remat` or without
    *(("vmap of hessian", source) for source in SOURCES),
    *(("vmap of jacfwd of grad", source) for source in SOURCES),
    ("Hessian-vector product: `jvp` of `grad`", "within"),
    ("jvp of vmap of grad", "within"),
    ("third order", "within"),
}


def result(program: Any, net: Net, how: str) -> Any:
    """What a transform gives, eager or as a graph."""
    if how == "eager":
        return program(of(net), params(), X, V)
    return fshard.jit(lambda p, x, v: program(of(net), p, x, v), backend="eager")(params(), X, V)


@pytest.mark.sample(30)
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_are_those_of_the_function(transform: str, source: str, how: str) -> None:
    """A derivative of any order in any transform would lack a term, silently."""
    with_remat, plain = SOURCES[source]
    program = TRANSFORMS[transform]
    if (transform, "within") == (transform, source) and program is plain_forward:
        pytest.skip("torch nests no forward mode of its own in torch.func's")
    if how == "jit" and (transform, source) in NO_GRAPH:
        with pytest.raises((fshard.TraceError, RuntimeError)):
            result(program, with_remat, how)
        return
    expected = program(of(plain), params(), X, V)
    assert max(float(x.abs().max()) for x in tree.leaves(expected)) > 0.1
    assert apart(result(program, with_remat, how), expected) < 1e-10
