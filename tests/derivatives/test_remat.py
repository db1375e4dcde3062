"""`remat`: values and derivatives of the function it is given, in all transforms; what it cannot keep is an error."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.closed import MORE, net, params, randn
from support.steps import QUIET
from torch import Tensor, func
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import remat, tree
from fshard.testing import simulate

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


def forward_over_backward(f: Any, p: Any, x: Tensor, v: Any) -> Any:
    """Forward mode without torch.func, of a gradient by torch.autograd."""
    with torch.autograd.forward_ad.dual_level():
        duals = tree.map(torch.autograd.forward_ad.make_dual, tree.map(Tensor.requires_grad_, p), v)
        slopes = torch.autograd.grad(f(duals, x), tree.leaves(duals))
        return [torch.autograd.forward_ad.unpack_dual(slope).tangent for slope in slopes]


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
    "forward mode of a gradient, both of torch.autograd": forward_over_backward,
}


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees, in the largest element."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    scale = max(float(y.abs().max()) for _, y in pairs)
    return float(torch.stack([(x - y).abs().max() for x, y in pairs]).max()) / scale  # NaN, if there is one


NO_GRAPH = {  # what torch cannot trace or run as a graph, with `remat` or without
    ("Hessian-vector product: `jvp` of `grad`", "within"),
    ("jvp of vmap of grad", "within"),
    ("third order", "within"),
}


def result(program: Any, net: Net, how: str) -> Any:
    """What a transform gives, eager or as a graph."""
    if how == "eager":
        return program(of(net), params(), X, V)
    return fshard.jit(lambda p, x, v: program(of(net), p, x, v), backend="eager")(params(), X, V)


@pytest.mark.law
@pytest.mark.parametrize("how", ["eager", "jit"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_derivatives_are_those_of_the_function(transform: str, source: str, how: str) -> None:
    """A derivative of any order in any transform would lack a term, silently."""
    with_remat, plain = SOURCES[source]
    program = TRANSFORMS[transform]
    if source == "within" and program in (plain_forward, forward_over_backward):
        pytest.skip("torch nests no forward mode of its own in torch.func's")
    if how == "jit" and (transform, source) in NO_GRAPH:
        with pytest.raises((fshard.TraceError, RuntimeError)):
            result(program, with_remat, how)
        return
    expected = program(of(plain), params(), X, V)
    assert max(float(x.abs().max()) for x in tree.leaves(expected)) > 0.1
    assert apart(result(program, with_remat, how), expected) < 1e-10


W = randn(6, 6, seed=7)


def leaves() -> tuple[Tensor, Tensor]:
    """Two tensors of plain autograd."""
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def writes_an_argument(x: Tensor, w: Tensor) -> Tensor:
    """In place."""
    return remat(lambda y: y.mul_(2) @ w)(x * 1).sum()


def writes_outside(x: Tensor, w: Tensor) -> Tensor:
    """To a tensor that is no result."""
    room = torch.zeros(5, 6, dtype=torch.float64)

    def fn(x: Tensor) -> Tensor:
        room[1:] = (x @ w)[1:].tanh()
        return x @ w

    return remat(fn)(x).sum() + room.sum()


def collects(x: Tensor, w: Tensor) -> Tensor:
    """In a list, from outside: an auxiliary loss."""
    beside: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        h = (x @ w).tanh()
        beside.append(h.square().mean())
        return h

    return remat(fn)(x).sum() + beside[0]


def collects_results(x: Tensor, w: Tensor) -> Tensor:
    """The very tensor that it returns."""
    beside: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        beside.append((x @ w).tanh())
        return beside[-1]

    return remat(fn)(x).sum() + beside[0].sum()


class Twice(torch.autograd.Function):
    """A function that torch shows to no mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Twice the tensor."""
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Twice the gradient."""
        return grad * 2


def collects_of_a_function(x: Tensor, w: Tensor) -> Tensor:
    """What a torch.autograd.Function gave."""
    beside: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        beside.append(Twice.apply(x @ w))
        return beside[-1].tanh()

    return remat(fn)(x).sum() + beside[0].sum()


def hidden(x: Tensor, w: Tensor) -> Tensor:
    """A tensor from outside goes to a torch.autograd.Function alone."""
    return remat(lambda x: (x @ Twice.apply(w)).tanh())(x).sum()


def differentiates_by_outside(x: Tensor, w: Tensor) -> Tensor:
    """A transform inside of the function."""
    return remat(lambda x: func.grad(lambda w: (x @ w).square().sum())(w))(x).sum()


def other_reads(x: Tensor, w: Tensor) -> Tensor:
    """What is read depends on how often it ran."""
    runs: list[int] = []

    def fn(x: Tensor) -> Tensor:
        runs.append(1)
        return x @ w if len(runs) == 1 else x.clone()

    return remat(fn)(x).sum()


def changes_parameters(x: Tensor, w: Tensor) -> Tensor:
    """A container of parameters."""
    whole = {"layers": [{"w": W}, {"w": W}]}

    def loss(p: Any, x: Tensor) -> Tensor:
        def fn(x: Tensor) -> Tensor:
            p["layers"][0]["w"] = 2 * p["layers"][0]["w"]
            return x @ p["layers"][0]["w"]

        return remat(fn)(x).square().sum()

    return fshard.value_and_grad(loss)(fshard.shard_params(whole, fshard.make_plan(whole, units=["layers.*"])), x)[0]


def of_a_call(x: Tensor, w: Tensor) -> Tensor:
    """A module whose parameters torch.func.functional_call replaces; they are constants."""
    layer = torch.nn.Linear(6, 6).double()
    whole = torch.nn.ModuleList([layer])
    whole.forward = lambda x: remat(layer)(x)  # type: ignore[method-assign]
    return func.functional_call(whole, {"0.weight": W, "0.bias": W[0]}, (x,)).sum() + w.sum()


def grows(x: Tensor, w: Tensor) -> Tensor:
    """A list of weights is longer when the function runs again."""
    ws = [w]
    out = remat(lambda x: torch.stack([x @ w for w in ws]))(x)
    ws.append(W.clone().requires_grad_())
    return out.sum()


def grows_by_constants(x: Tensor, w: Tensor) -> Tensor:
    """A list of constants."""
    ws = [w, W]
    out = remat(lambda x: torch.stack([x @ w for w in ws]))(x)
    ws[1] = 2 * W
    return out.sum()


def fills_a_mask(x: Tensor, w: Tensor) -> Tensor:
    """The constant of all layers is another for each."""
    mask = torch.zeros(6, dtype=torch.float64)
    for number in range(3):
        mask[number] = 1
        x = remat(lambda x: x @ w * mask)(x)
    return x.sum()


def changes_a_frozen_module(x: Tensor, w: Tensor) -> Tensor:
    """In place, before the backward."""
    layer = torch.nn.Linear(6, 6).double().requires_grad_(False)
    out = remat(layer)(x @ w)
    layer.weight.mul_(2)
    return out.sum()


def counts(x: Tensor, w: Tensor) -> Tensor:
    """A tensor from outside, which would count twice."""
    count = torch.zeros((), dtype=torch.float64)
    return remat(lambda x: x @ w * count.add_(1))(x).sum()


def has_statistics(x: Tensor, w: Tensor) -> Tensor:
    """Batch norm in training writes to buffers."""
    return remat(torch.nn.BatchNorm1d(6).double())(x @ w).square().sum()


ERRORS: dict[Callable[..., Tensor], str] = {
    writes_an_argument: r"writes in place to a torch.float64 tensor of shape \[5, 6\] from outside of it, .*: clone it",
    writes_outside: r"writes what it computes to a torch.float64 tensor of shape \[5, 6\] from outside of it: return",
    collects: r"keeps a torch.float64 tensor of shape \[\], which it has computed, beside its results",
    collects_results: r"keeps a torch.float64 tensor of shape \[5, 6\], which",
    collects_of_a_function: r"keeps a torch.float64 tensor of shape \[5, 6\], which",
    hidden: "depends on a tensor from outside that cannot be seen there",
    differentiates_by_outside: r"differentiates by a torch.float64 tensor of shape \[6, 6\] from outside of it",
    other_reads: "reads other tensors when it runs again",
    of_a_call: r"functional_call has given a module are gone .*use fshard.module.functionalize",
    grows: "reads other tensors when it runs again",
    grows_by_constants: "reads other tensors when it runs again",
    fills_a_mask: "when it runs again, or one that was written to since",
    changes_a_frozen_module: "when it runs again, or one that was written to since",
    counts: r"writes in place to a torch.float64 tensor of shape \[\] from outside of it, and would do so again",
    has_statistics: r"writes in place to a torch.int64 tensor of shape \[\] .* \(buffers of a module: fshard.mod",
    changes_parameters: "keeps a torch.float64 tensor of shape",
}


@pytest.mark.parametrize("program", ERRORS)
def test_what_would_lose_a_gradient_is_an_error(program: Callable[..., Tensor]) -> None:
    """The gradient would lack a part, without a word."""
    x, w = leaves()
    with pytest.raises(RuntimeError, match=ERRORS[program]):
        torch.autograd.grad(program(x, w), (x, w))
    with pytest.raises(TypeError, match=r"remat: fn=3: expected fn\(\*args, \*\*kwargs\), a function or a module"):
        remat(3)  # type: ignore[arg-type]


FORWARDS: dict[str, Callable[..., Any]] = {
    "with a context": lambda ctx, x: x * 2,
    "wrapped": torch.amp.custom_fwd(lambda ctx, x: x * 2, device_type="cpu"),
    "partial": functools.partial(lambda y, ctx, x: x * y, 2),
    "in a block": lambda ctx, x: torch.no_grad()(torch.mul)(x, 2),
    "in a function": lambda ctx, x: Twice.apply(x),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_forward_computes_and_keeps_is_an_error(name: str) -> None:
    """However the forward of a torch.autograd.Function is written, its result has a gradient, which would be lost."""
    double = type("Double", (torch.autograd.Function,), {"forward": staticmethod(FORWARDS[name])})
    double.backward = staticmethod(lambda ctx, grad: 2 * grad)
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(double.apply(x))
        return kept[-1].tanh()

    with pytest.raises(RuntimeError, match=r"keeps a torch.float64 tensor of shape \[5, 6\], which"):
        remat(fn)(leaves()[0])


def test_remat_in_a_forward_may_keep_what_it_computes() -> None:
    """In the forward of a torch.autograd.Function nothing has a gradient, so that nothing is lost."""
    kept: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        kept.append(x * 2)
        return x.tanh()

    class Outer(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: remat(fn)(x))
        backward = staticmethod(lambda ctx, grad: grad)

    x = leaves()[0]
    assert torch.equal(torch.autograd.grad(Outer.apply(x).sum(), x)[0], torch.ones_like(x))
    assert torch.equal(kept[0], 2 * x)


def gradients(program: Callable[[Any, Tensor, Tensor], Tensor], how: Any) -> list[Tensor]:
    """A value and two gradients, and what is drawn at random afterwards."""
    torch.manual_seed(3)
    x, w = leaves()
    value = program(how, x, w)
    return [value.detach(), *torch.autograd.grad(value, (x, w)), torch.rand(3)]


def logs(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Detached values are kept, and values without a gradient, and constants."""
    kept: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        h = (x @ w).tanh()
        kept.append((h.detach().mean(), torch.arange(6).cos()))
        with torch.no_grad():
            kept.append(h.mean())
        with torch.inference_mode():
            kept.append(h.mean())
        return h

    return call(fn)(x).square().sum()


def draws(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Dropout, in two functions and between."""
    drop = lambda x: torch.nn.functional.dropout(x @ w, 0.5)  # noqa: E731
    return call(drop)(torch.nn.functional.dropout(call(drop)(x))).square().sum()


def writes_results(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Results are written to in place; one of them is a view of an argument."""
    flat, product, number = call(lambda x, y: (y.view(-1), x @ w, 3))(x, x * 1)
    return flat.mul_(2).square().sum() + product.mul_(number).square().sum()


def of_trees(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Trees, keywords and other objects go in and out."""
    out = call(lambda a, *, b, name: {name: a["x"] @ b[0], "n": a["x"].argmax(), "none": None})(
        {"x": x}, b=(w,), name="y"
    )
    assert out["n"].dtype == torch.int64
    assert out["none"] is None
    return out["y"].square().sum()


def casts(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Autocast is put back in the backward."""
    with torch.autocast("cpu", torch.bfloat16):
        out = call(lambda x: x.float() @ w.float())(x)
    assert out.dtype == torch.bfloat16
    return out.float().square().sum()


def calls_checkpoint(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """torch's checkpoint inside and outside."""
    fn = lambda x: (x @ w).tanh()  # noqa: E731
    inside = call(lambda x: checkpoint(fn, x, use_reentrant=False))(x)
    return checkpoint(call(fn), inside, use_reentrant=False).square().sum()


def of_functions(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """A torch.autograd.Function of what the function computes."""
    return call(lambda x: Twice.apply((x @ w).tanh()).square())(x).sum()


def half_used(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """One result has no use, one no derivative, and one argument none."""
    out, _, constant = call(lambda x, w: (x.square(), x @ w, torch.ones(5)))(x, w)
    return out.sum() + constant.sum() + 0 * w.sum()


def infinite(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """A result without a use has an infinite derivative; zero times that is no number."""
    return call(lambda x: (x @ w, (x - x).sqrt()))(x)[0].square().sum()


def caches(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Constants are made in the first of two calls, and anew in each run; a cache is empty when its function reruns."""
    cache: dict[str, Tensor] = {}

    def row(name: str) -> Tensor:
        if name not in cache:
            cache[name] = torch.arange(6.0).cos()
        return cache[name]

    inner = lambda x: x @ w * row("inner") * torch.ones(6)  # noqa: E731
    fn = lambda x: call(inner)(x) * row("a")  # noqa: E731
    out = call(lambda x: call(fn)(x) * row("b"))(call(fn)(call(fn)(x))).square().sum()
    del cache["b"]
    return out + torch.autograd.grad(out, w, create_graph=True)[0].square().sum()


def unseen(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """Constants that no mode sees in the making, and one of them is a result."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.arange(2))
        return x[rows] @ w * torch.from_numpy(np.ones(6)), rows

    return call(fn)(x)[0].square().sum()


def draws_from_generators(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """One from outside, in two functions and between; one made inside."""
    generator = torch.Generator().manual_seed(5)

    def fn(x: Tensor) -> Tensor:
        inner = torch.Generator().manual_seed(6)
        noise = torch.rand(6, generator=generator) + torch.rand(6, generator=inner)
        return call(lambda x: x @ w * torch.rand(6, generator=generator))(x) * noise

    out = call(fn)(call(fn)(x) * torch.rand(6, generator=generator)).square().sum()
    slopes = torch.autograd.grad(out, w, create_graph=True)[0] * torch.rand(6, generator=generator)
    return out + slopes.square().sum()


def returns_from_outside(call: Any, x: Tensor, w: Tensor) -> Tensor:
    """A tensor from outside is a result as it is, also one that is computed, and a constant."""
    hidden = x @ w
    out, weight, same, constant = call(lambda x: (x @ w, w, hidden, W))(x)
    return (out @ weight * same @ constant).square().sum() + call(lambda x: (x * 2, w))(x)[1].square().sum()


USES = [
    logs,
    draws,
    writes_results,
    of_trees,
    casts,
    calls_checkpoint,
    of_functions,
    half_used,
    infinite,
    caches,
    unseen,
    draws_from_generators,
    returns_from_outside,
]


@pytest.mark.parametrize("program", USES)
def test_a_function_may_do_what_it_does_without(program: Any) -> None:
    """What is harmless would be refused, or be computed or drawn otherwise."""
    assert apart(gradients(program, remat), gradients(program, lambda fn: fn)) < 1e-14


ZERO = torch.zeros(5, 6, dtype=torch.float64)
UNUSED: dict[str, Callable[[Any], Any]] = {
    "result": lambda call: func.jvp(func.grad(lambda x: infinite(call, x, W)), (X,), (X,)),
    "tangent": lambda call: func.jvp(lambda x: call(lambda x, y: x + x * y.sqrt())(x, ZERO), (X,), (X,)),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_has_no_use_has_no_derivative(name: str) -> None:
    """An infinite derivative times zero is no number."""
    assert apart(UNUSED[name](remat), UNUSED[name](lambda fn: fn)) < 1e-14


def noisy(call: Any) -> Callable[[Tensor], Tensor]:
    """A function that draws, (..., 6) -> (..., 6)."""
    return call(lambda x: torch.tanh(x @ W) * torch.rand(6) + func.vmap(torch.sin)(x) * torch.rand(()))


def pulled(call: Any, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The vjp of a function that has drawn, and is not linear in what it is given."""
    pull = func.vjp(noisy(call), x)[1]
    return lambda v: pull(v)[0].sin()


Mapped = Callable[[Any, str], Any]
ROWS = randn(3, 5, 6, seed=8)
DRAWS: dict[str, Mapped] = {
    "vmap of grad": lambda call, how: func.vmap(func.grad(lambda x: noisy(call)(x).sum()), randomness=how)(X),
    "grad of vmap": lambda call, how: func.grad(lambda x: func.vmap(noisy(call), randomness=how)(x).sum())(X),
    "vmap of jvp": lambda call, how: func.vmap(lambda x: func.jvp(noisy(call), (x,), (x,)), randomness=how)(X),
    "vmap of vjp": lambda call, how: func.vmap(pulled(call, X), randomness=how)(ROWS),
    "vmap of vmap of vjp": lambda call, how: func.vmap(
        func.vmap(pulled(call, X[0]), randomness="different"), randomness=how
    )(ROWS),
    "vmap of grad of vjp": lambda call, how: (
        lambda pull: func.vmap(func.grad(lambda v: pull(v).sin().sum()), randomness=how)(ROWS)
    )(pulled(call, X)),
    "vmap of vjp of vmap": lambda call, how: (lambda pull: func.vmap(pull, randomness="different")(ROWS))(
        func.vjp(func.vmap(noisy(call), randomness=how), X)[1]
    ),
    "vmap of vmap of vjp inside": lambda call, how: func.vmap(
        lambda x, v: func.vmap(pulled(call, x), randomness="different")(v), randomness=how
    )(X, ROWS.movedim(1, 0)),
    "vmap of jacrev": lambda call, how: func.vmap(func.jacrev(noisy(call)), randomness=how)(X),
    "jacrev of jacrev": lambda call, how: func.jacrev(func.jacrev(lambda x: noisy(call)(x).square().sum()))(X),
}


@pytest.mark.parametrize("how", ["same", "different"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_function_draws_again_what_it_drew(name: str, how: str) -> None:
    """A `vmap` around the derivative alone would draw for each of its rows, or be refused."""
    results = []
    for call in (remat, lambda fn: fn):
        torch.manual_seed(4)
        results.append([DRAWS[name](call, how), torch.rand(3)])
    assert apart(*results) < 1e-12


def test_other_results_are_not_kept() -> None:
    """A mask that the caller drops would live until the backward."""
    x, w = leaves()
    out, mask = remat(lambda x: ((x @ w).sum(), x > 0))(x)
    known = weakref.ref(mask)
    del mask
    assert known() is None
    assert torch.autograd.grad(out, x)[0].shape == x.shape


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo hides it, too
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", ["inside", "around", "around, whole"])
def test_in_torch_compile(where: str, backend: str) -> None:
    """Dynamo would trace what `remat` does."""
    torch.compiler.reset()

    def program(call: Any, x: Tensor, w: Tensor) -> Tensor:
        compiled = functools.partial(torch.compile, backend=backend, fullgraph="whole" in where)
        fn = lambda x: (x @ w).tanh()  # noqa: E731
        if where == "inside":
            return call(compiled(fn))(x).square().sum()
        return compiled(lambda x: call(lambda x, *, by: fn(x) * by)(x, by=2).square().sum())(x)

    assert apart(gradients(program, remat), gradients(program, lambda fn: fn)) < 1e-14


def collective(kind: str, mesh: Any, x: Tensor) -> Tensor:
    """A function of collectives that is not linear, in `remat` and outside."""
    apply = {
        "all_reduce": lambda x: fshard.all_reduce(x, mesh, "shard"),
        "all_gather": lambda x: fshard.all_gather(x, mesh, "shard")[:2],
        "shift": lambda x: fshard.shift(x, mesh, "shard"),
    }[kind]
    return (apply(x.sin() * x).cos() * remat(lambda x: apply(x.exp()) * x)(x)).sum()


def alone(kind: str, rows: list[Tensor]) -> list[Tensor]:
    """The same on one device: the value of each rank, from the tensors of all."""
    apply = {
        "all_reduce": lambda xs: [sum(xs)] * len(xs),
        "all_gather": lambda xs: [torch.cat(xs)[:2]] * len(xs),
        "shift": lambda xs: [xs[-1], *xs[:-1]],
    }[kind]
    first, second = apply([x.sin() * x for x in rows]), apply([x.exp() for x in rows])
    return [(a.cos() * (b * x)).sum() for a, b, x in zip(first, second, rows, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "shift"])
def test_forward_mode_of_forward_mode_through_collectives(kind: str, size: int) -> None:
    """In a rule of forward mode torch switches forward mode off: a second derivative might be 0, silently."""
    xs = [randn(2, seed=40 + rank) for rank in range(size)]
    vs = [randn(2, seed=50 + rank) for rank in range(size)]

    def twice(f: Any, x: Any, v: Any) -> Any:
        return func.jvp(lambda x: func.jvp(f, (x,), (v,))[1], (x,), (v,))[1]

    def job(mesh: Any) -> Tensor:
        rank = mesh.get_rank()
        return twice(lambda x: collective(kind, mesh, x), xs[rank], vs[rank])

    got = simulate(job, shard=size)
    expected = twice(lambda *xs: torch.stack(alone(kind, list(xs[0]))), xs, vs)
    assert apart(list(got), list(expected)) < 1e-10


COLLECTIVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, mesh: fshard.all_reduce(x, mesh, "shard"),
    "all_gather": lambda x, mesh: fshard.all_gather(x, mesh, "shard", dim=1),
    "reduce_scatter": lambda x, mesh: fshard.reduce_scatter(x.repeat(6, 1), mesh, "shard"),
    "all_to_all": lambda x, mesh: fshard.all_to_all(x.repeat(6, 1), mesh, "shard", split=0, join=1),
    "shift": lambda x, mesh: fshard.shift(x, mesh, "shard"),
    "broadcast": lambda x, mesh: fshard.broadcast(x, mesh, "shard", 1),
}


def by_autograd(loss: Any, w: Tensor, x: Tensor) -> Any:
    """Of first and of second order."""
    w = w.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss({"w": w}, x), w, create_graph=True)
    return slope.detach(), torch.autograd.grad(slope.square().sum(), w)


ORDERS: dict[str, Callable[[Any, Tensor, Tensor, Any], Any]] = {
    "autograd": lambda loss, w, x, mesh: by_autograd(loss, w, x),
    "func": lambda loss, w, x, mesh: func.jvp(func.grad(lambda w: loss({"w": w}, x)), (w,), (w,)),
    "value_and_grad": lambda loss, w, x, mesh: fshard.gather_params(
        fshard.value_and_grad(loss)(fshard.shard_params({"w": w}, fshard.make_plan({"w": w}, mesh)), x)[1]
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_is_one_operator(kind: str, order: str, size: int) -> None:
    """What a simulated rank writes to the memory of others would count as written by the function."""

    def job(mesh: Any, call: Any) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            return call(lambda x: COLLECTIVES[kind]((x * p["w"]).sin(), mesh) * x.sum())(x).square().sum()

        return ORDERS[order](loss, randn(3, 6, seed=2), randn(3, 6, seed=3 + mesh.get_rank()), mesh)

    by = (simulate(lambda mesh, call=call: job(mesh, call), shard=size) for call in (remat, lambda fn: fn))
    assert apart(*map(list, by)) < 1e-12


def test_torch_switches_forward_mode_off_in_a_rule() -> None:
    """Without the trap of torch, `remat` need not switch forward mode on."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(inputs[0])

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * ctx.saved_tensors[0].cos()

    x, one = torch.tensor(1.0), torch.tensor(1.0)
    twice = func.jvp(lambda x: func.jvp(Sine.apply, (x,), (one,))[1], (x,), (one,))[1]
    assert twice == 0  # it is -sin(1)
