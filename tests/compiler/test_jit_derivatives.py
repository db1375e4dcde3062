"""A jitted function through which a derivative passes: its parameters train as without `jit`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import rand
from support.worlds import simulated
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import tree
from fshard.compiler.trace import TraceError
from fshard.core.func_levels import is_dual

eager = partial(fshard.jit, backend="eager")
Jit = Callable[..., Any]
Model = Callable[[Any, Tensor], Tensor]

PARAMS = {name: {"w": rand(3, 3, seed=i), "b": rand(3, seed=i + 10)} for i, name in enumerate("ab")}


def layer(p: Any, x: Tensor) -> Tensor:
    """The helper that is jitted."""
    return torch.tanh(x @ p["w"] + p["b"])


def affine(w: Tensor, x: Tensor) -> Tensor:
    """Another one, of tensors alone."""
    return torch.tanh(x @ w)


# --- how a helper gets its parameters ---


def arguments(jit: Jit) -> Model:
    """Tensors as arguments, of which one is a result of a helper."""
    run = jit(affine)
    return lambda p, x: run(p["b"]["w"], run(p["a"]["w"], x))


def containers(jit: Jit) -> Model:
    """The container of a unit."""
    run = jit(layer)
    return lambda p, x: run(p["b"], run(p["a"], x))


def whole_tree(jit: Jit) -> Model:
    """All parameters."""
    return jit(lambda p, x: layer(p["b"], layer(p["a"], x)))


def activations(jit: Jit) -> Model:
    """No parameter, but what was computed with one."""
    run = jit(torch.sin)
    return lambda p, x: layer(p["b"], run(layer(p["a"], x)))


def of_a_list(jit: Jit) -> Model:
    """A list of units, whose results are a dict with a number."""
    run = jit(lambda units, x: {"out": layer(units[1], layer(units[0], x)), "n": 2, "sum": x.sum()})
    return lambda p, x: (out := run([p["a"], p["b"]], x))["out"] * out["n"] + out["sum"]


def donated(jit: Jit) -> Model:
    """A helper that may write to its first argument."""
    run = jit(lambda h, w: torch.tanh(h @ w), **({} if jit is plain else {"donate": True}))
    return lambda p, x: run(run(x * 1, p["a"]["w"]), p["b"]["w"])


def with_its_own(jit: Jit) -> Model:
    """A helper that takes a derivative itself."""
    run = jit(lambda w, x: torch.func.grad(lambda w: affine(w, x).sin().sum())(w))
    return lambda p, x: x @ (run(p["a"]["w"], x) + p["b"]["w"])


def nested(jit: Jit) -> Model:
    """A helper of a helper."""
    inner = jit(affine)
    return lambda p, x: jit(lambda w, x: 2 * inner(w, x))(p["a"]["w"], x) @ p["b"]["w"]


def in_vmap(jit: Jit) -> Model:
    """A helper of a row."""
    run = jit(affine)
    return lambda p, x: torch.func.vmap(lambda row: run(p["a"]["w"], row))(x) @ p["b"]["w"]


def in_remat(jit: Jit) -> Model:
    """A helper that runs again in the backward."""
    run = jit(layer)
    return lambda p, x: layer(p["b"], fshard.remat(run)(p["a"], x))


def of_remat(jit: Jit) -> Model:
    """A helper with a function inside that runs again."""
    run = jit(fshard.remat(layer))
    return lambda p, x: layer(p["b"], run(p["a"], x))


def in_checkpoint(jit: Jit) -> Model:
    """The same with torch's own checkpoint."""
    run = jit(affine)
    return lambda p, x: checkpoint(run, p["a"]["w"], x, use_reentrant=False) @ p["b"]["w"]


def in_scan(jit: Jit) -> Model:
    """A helper in the body of a scan."""
    run = jit(layer)
    return lambda p, x: fshard.scan(lambda unit, x: run(unit, x), x, [p["a"], p["b"]])[0]


def dropped(jit: Jit) -> Model:
    """A helper that draws random numbers, and is called again in the backward."""
    run = jit(lambda w, x: nn.functional.dropout(affine(w, x)))
    return lambda p, x: nn.functional.dropout(fshard.remat(run)(p["a"]["w"], run(p["b"]["w"], x)))


def without_gradients(jit: Jit) -> Model:
    """A helper of what is constant."""
    run = jit(affine)

    def model(p: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = run(p["a"]["w"], x)
        return layer(p["b"], h)

    return model


class Layer(nn.Module):
    """A module that calls a helper with its parameter."""

    def __init__(self, jit: Jit) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.zeros_like(PARAMS["a"][name])) for name in "wb")
        self.run = jit(affine)

    def forward(self, x: Tensor) -> Tensor:
        """The helper, with and without gradients."""
        with torch.no_grad():
            constant = self.run(self.w, x)
        return self.run(self.w, x) + self.b * constant


def in_a_module(jit: Jit) -> Model:
    """A helper in the forward of a module."""
    apply = fshard.module.functionalize(nn.Sequential(Layer(jit)))[0]
    return lambda p, x: layer(p["b"], apply({"0": p["a"]}, {}, x)[0])


def of_a_module(jit: Jit) -> Model:
    """A module's function as a helper."""
    apply = fshard.module.functionalize(Layer(plain))[0]
    run = jit(lambda p, x: apply(p, {}, x)[0])
    return lambda p, x: layer(p["b"], run(p["a"], x))


def closure(jit: Jit) -> Model:
    """A variable around."""
    return lambda p, x: (lambda w: jit(lambda x: affine(w, x))(x))(p["a"]["w"]) @ p["b"]["w"]


def closure_of_all(jit: Jit) -> Model:
    """All parameters in a variable around."""
    return lambda p, x: jit(lambda x: layer(p["b"], layer(p["a"], x)))(x)


REFUSED = (closure, closure_of_all)  # a tensor in a closure that requires a gradient is a TraceError
HOLDERS = (
    *(arguments, containers, whole_tree, activations, of_a_list, donated, with_its_own, nested, in_vmap, in_remat),
    *(of_remat, in_checkpoint, in_scan, dropped, without_gradients, in_a_module, of_a_module, *REFUSED),
)


def plain(fn: Any) -> Any:
    """A helper that is not jitted."""
    return fn


# --- how the derivative is taken ---


def batch(mesh: Any = None) -> Tensor:
    """The rows of a rank."""
    return rand(4, 3, seed=20 + (0 if mesh is None else mesh.get_rank()))


def loss_of(model: Model) -> Callable[[Any, Tensor], Any]:
    """A loss, as the mean of rows."""
    return lambda p, x: fshard.Mean(model(p, x).square().sum(), len(x))


def of_value_and_grad(model: Model, mesh: Any) -> Any:
    """Gradients of fshard's own."""
    params = fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh, units=["a", "b"]))
    value, grads = fshard.value_and_grad(loss_of(model))(params, batch(mesh))
    return value, fshard.gather_params(grads)


def of_a_step(model: Model, mesh: Any, wrap: Any = plain, accumulate: int = 1, **plan: Any) -> Any:
    """Two steps."""
    tx = fshard.optim.adamw(1e-2)
    state = fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh, units=["a", "b"], **plan))
    state, step = fshard.init_state(state, tx), wrap(fshard.train_step(loss_of(model), tx, accumulate=accumulate))
    for _ in range(2):
        state, metrics = step(state, batch(mesh))[:2]
    return metrics["loss"], fshard.gather_params(state.params)


def of_predict(model: Model, mesh: Any) -> Any:
    """No derivative."""
    params = fshard.shard_params(PARAMS, fshard.make_plan(PARAMS, mesh, units=["a", "b"]))
    return fshard.predict(model)(params, batch(mesh))


def of_autograd(model: Model, mesh: Any) -> Any:
    """Torch's autograd, with respect to leaves."""
    torch.manual_seed(0)
    params = tree.map(lambda x: x.clone().requires_grad_(), PARAMS)
    return torch.autograd.grad(model(params, batch()).square().sum(), tree.leaves(params), materialize_grads=True)


def of_func_grad(model: Model, mesh: Any) -> Any:
    """A transform of torch's."""
    torch.manual_seed(0)
    return torch.func.grad(lambda p: model(p, batch()).square().sum())(PARAMS)


def of_forward_mode(model: Model, mesh: Any) -> Any:
    """Tangents of torch's autograd."""
    torch.manual_seed(0)
    with forward_ad.dual_level():
        params = tree.map(lambda x: forward_ad.make_dual(x, x.cos()), PARAMS)
        out = forward_ad.unpack_dual(model(params, batch()).square().sum())
        return out.primal, out.tangent


ALONE = (of_autograd, of_func_grad, of_forward_mode)
WAYS: dict[str, Any] = {
    "value_and_grad": of_value_and_grad,
    "step": of_a_step,
    "micro-batches": partial(of_a_step, accumulate=2),
    "guard": partial(of_a_step, wrap=fshard.guard),
    "check": partial(of_a_step, wrap=fshard.check),
    "regather": partial(of_a_step, regather=True),
    "zero1": partial(of_a_step, params_over=(), grads_over=()),
    "predict": of_predict,
    **{way.__name__: way for way in ALONE},
}


def result(way: Any, model: Model) -> Any:
    """What a way gives, on two ranks or alone; an error as a value."""
    try:
        return way(model, None) if way in ALONE else simulated(partial(way, model), shard=2)[0]
    except (TraceError, RuntimeError) as failure:
        return failure


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_derivative_through_a_jitted_helper(holder, way):
    """The parameters of a helper would not train: a graph's results have no gradient."""
    expected, found = (result(WAYS[way], holder(jit)) for jit in (plain, eager))
    if isinstance(expected, Exception):  # torch.func and checkpoints exclude each other
        assert type(found) is type(expected)
    elif isinstance(found, TraceError):
        assert holder in REFUSED, found
        assert "not among its arguments" in str(found)
    else:
        assert holder not in REFUSED or WAYS[way] in ALONE[1:] or way == "predict"
        pairs = zip(tree.leaves(expected), tree.leaves(found), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)


def test_what_is_said_of_a_derivative():
    """`explain` would not say why nothing was compiled, and a gradient that a function takes itself would not be."""
    w, x = rand(3, 3, seed=1).requires_grad_(), rand(3, seed=2)
    run, inside = eager(affine), eager(lambda w, x: torch.autograd.grad(affine(w, x).sum(), w))
    for _ in range(2):
        assert run(w, x).requires_grad
        assert run(2 * w, x).requires_grad
        assert not inside(w, x)[0].requires_grad
    first, second = run.explain().split("\n")
    assert first.startswith("traced for the first call, and not compiled: a result requires a gradient")
    assert "torch.no_grad()" in second
    assert inside.explain() == "traced for the first call"
    with torch.no_grad():
        assert not run(w, x).requires_grad
    assert run.explain().endswith("torch's grad mode was True, is False")


def test_a_compiled_graph_with_a_derivative():
    """A graph that was compiled by hand would return results without the gradient that they had."""
    w, x = rand(3, 3, seed=1).requires_grad_(), rand(3, seed=2)
    compiled = eager(affine).lower(w, x).compile("eager")
    with pytest.raises(TypeError, match="the result requires a gradient"):
        compiled(w, x)
    compiled = eager(affine).lower(w.detach(), x).compile("eager")
    with forward_ad.dual_level(), pytest.raises(TypeError, match="the result requires a gradient"):
        compiled(forward_ad.make_dual(w.detach(), w.detach()), x)


def test_an_artifact_and_a_derivative(tmp_path):
    """A file would get a program without the gradient, which later processes load."""
    path = tmp_path / "f.artifact"
    run = fshard.jit(affine, artifact=path)
    w, x = rand(3, 3, seed=1).requires_grad_(), rand(3, seed=2)
    assert run(w, x).requires_grad
    assert not path.exists()
    with pytest.raises(TypeError, match="artifact: the result requires a gradient"):
        run.lower(w, x).compile("eager")._lowered or run.lower(w, x).program()


def test_tangents_in_a_closure():
    """A graph would take a tensor with a tangent for a constant. `is_dual` reads a private name of torch."""
    w, x = rand(3, seed=1), rand(3, seed=2)
    run = eager(lambda x: w * x)
    run(x)
    with forward_ad.dual_level():
        w = forward_ad.make_dual(w, x)
        assert is_dual(w)
        assert not is_dual(x)
        with pytest.raises(TraceError, match="not among its arguments"):
            run(x)
    assert not is_dual(x)


NORMS: dict[str, Any] = {
    "layer norm": lambda x, w: F.layer_norm(x, (3,), w, w),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w, w, True),
    "group norm": lambda x, w: F.group_norm(x, 1, w, w),
}
FORWARD: dict[str, Any] = {
    "jvp": lambda f, x: func.jvp(f, (x,), (x.sin(),))[1],
    "jvp of jvp": lambda f, x: func.jvp(lambda y: func.jvp(f, (y,), (x,))[1], (x,), (x.sin(),))[1],
    "jvp of grad": lambda f, x: func.jvp(func.grad(lambda y: f(y).cos().sum()), (x,), (x.sin(),))[1],
    "hessian": lambda f, x: func.hessian(lambda y: f(y).cos().sum())(x),
    "vmap of jacfwd": lambda f, x: func.vmap(func.jacfwd(f))(torch.stack([x, x.sin()])),
}


@pytest.mark.parametrize("how", FORWARD)
@pytest.mark.parametrize("norm", NORMS)
def test_forward_mode_past_what_has_no_tangent(norm: str, how: str) -> None:
    """Torch stands a tensor without memory for a tangent of zero, whose views a trace takes for the user's tensors."""
    fn = lambda x, w: FORWARD[how](lambda y: NORMS[norm](y, w), x)  # noqa: E731
    args = rand(4, 3, seed=1), rand(3, seed=2)
    torch.testing.assert_close(eager(fn)(*args), fn(*args))
