"""Derivatives through updates and steps of every transformation, by parameters and by hyper-parameters, on ranks.

The oracle is a central difference of the formulas of `update` on one device, in float64, with the data of all ranks.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.optimizers import TRANSFORMS, VALUES, hyperparams, makers
from support.worlds import gloo
from torch import Tensor, func, nn
from torch.autograd import forward_ad

import fshard
from fshard import optim, tree
from fshard.testing import simulate

Tree = Any
Fn = Callable[[Tensor], Tensor]
F64 = torch.float64
WITHOUT = {name for name in TRANSFORMS if name.startswith("from_torch")}  # an error
# muon in bfloat16 and adamw_8bit, whose moments are rounded, have no central differences
MADE = {**TRANSFORMS, "muon": lambda: optim.muon(0.1, dtype=F64)}
NAMES = sorted(MADE.keys() - WITHOUT)


def randn(*shape: int, seed: int) -> Tensor:
    """Random float64 numbers of a generator with this seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def weights(seed: int) -> Tree:
    """Three leaves: one is no matrix, and three ranks do not own as many matrices."""
    return {"w": randn(4, 3, seed=seed), "b": randn(3, seed=seed + 1), "v": randn(3, 4, seed=seed + 2)}


PARAMS, TANGENT, DATA, AT = weights(0), weights(3), randn(6, 4, seed=6), torch.tensor(0.2, dtype=F64)


def inner(p: Tree, x: Tensor) -> Tensor:
    """The loss whose gradients are given to the optimizer; a sum over rows."""
    return (torch.tanh(x @ p["w"] + p["b"]) @ p["v"] - x).square().sum()


def outer(p: Tree, x: Tensor) -> Tensor:
    """The loss of the parameters after the steps; a sum over rows."""
    return (x @ p["w"] + p["b"]).sin().sum() + len(x) / len(DATA) * p["v"].square().sum()


def trained(tx: optim.Transform, p: Tree, x: Tensor, how: str, steps: int) -> Tree:
    """Parameters after some steps: sharded, or whole, of one device."""
    sharded = isinstance(p, fshard.Sharded)
    fine = (lambda q: q.for_state) if sharded else lambda q: q
    state = tx.init(fine(p))
    for _ in range(steps):
        grads = fine(func.grad(lambda q: inner(fshard.gather_params(q) if sharded else q, x))(p))
        if how == "update":
            updates, state = tx.update(grads, state, fine(p))
            new = optim.apply_updates(fine(p), updates)
        else:
            new, state = tx.step(grads, state, fine(p), donate=how == "donated")
        p = p.with_trained(new) if sharded else new
    return p


def moved(p: Tree, tangent: Tree, s: Tensor) -> Tree:
    """Parameters at a place on a line."""
    return tree.map(lambda x, t: x + s * t, p, tangent)


def by_grad(f: Fn, s: Tensor) -> Tensor:
    """Reverse mode of torch.func."""
    return func.grad(f)(s)


def by_jvp(f: Fn, s: Tensor) -> Tensor:
    """Forward mode of torch.func."""
    return func.jvp(f, (s,), (torch.ones_like(s),))[1]


def by_vmap(f: Fn, s: Tensor) -> Tensor:
    """Gradients of a batch of functions."""
    return func.vmap(func.grad(f))(torch.stack([s + 0.3, s]))[1]


def by_values(f: Fn, s: Tensor) -> Tensor:
    """A central difference of a batch of values."""
    up, down = func.vmap(f)(torch.stack([s + 1e-6, s - 1e-6]))
    return (up - down) / 2e-6


def by_autograd(f: Fn, s: Tensor) -> Tensor:
    """Reverse mode of autograd, without torch.func."""
    s = s.clone().requires_grad_()
    return torch.autograd.grad(f(s), s)[0]


def by_dual(f: Fn, s: Tensor) -> Tensor:
    """Forward mode of autograd, without torch.func."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(s, torch.ones_like(s)))).tangent


WAYS = {way.__name__: way for way in (by_grad, by_jvp, by_vmap, by_values, by_autograd, by_dual)}


def difference(f: Fn, s: Tensor, h: float = 1e-6) -> Tensor:
    """A central difference."""
    return (f(s + h) - f(s - h)) / (2 * h)


def one_device(tx: optim.Transform, steps: int) -> Fn:
    """The outer loss of one device by the place on the line where training starts."""
    return lambda s: outer(trained(tx, moved(PARAMS, TANGENT, s), DATA, "update", steps), DATA)


def rows_of(mesh: Any) -> Tensor:
    """The rows of this rank."""
    return DATA if mesh is None else DATA.tensor_split(mesh.size())[mesh.get_rank()]


def place(mesh: Any, **plan_of: Any) -> tuple[Tree, Tree]:
    """Sharded parameters and a tangent."""
    plan = fshard.make_plan(PARAMS, mesh, **plan_of)
    return fshard.shard_params(PARAMS, plan), fshard.shard_params(TANGENT, plan)


def of_start(mesh: Any, name: str, how: str, way: str, steps: int) -> Tensor:
    """This rank's part of the derivative along the line where training starts."""
    p, tangent = place(mesh, block=4 if name == "adamw_8bit" else 1)
    x, tx = rows_of(mesh), MADE[name]()
    f = lambda s: outer(fshard.gather_params(trained(tx, moved(p, tangent, s), x, how, steps)), x)  # noqa: E731
    return WAYS[way](f, AT)


def on(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of one device (0), or of simulated ranks."""
    return simulate(lambda mesh: fn(mesh, *args), shard=ranks) if ranks else [fn(None, *args)]


@pytest.mark.parametrize("how", ["update", "step", "donated"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [0, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_derivative_by_what_training_starts_from(name: str, ranks: int, way: str, how: str) -> None:
    """On three ranks one owns no matrix."""
    if ranks and way == "by_dual":  # levels of forward mode are the process's, and so are not those of one rank
        return
    rough = name == "adamw_8bit"  # float32, and rounded moments: a second step would see the codes
    if rough and way == "by_values":
        return
    steps = 1 if rough else 2
    right = difference(one_device(MADE[name](), steps), AT, 1e-2 if rough else 1e-6)
    found = sum(on(ranks, of_start, name, how, way, steps))
    torch.testing.assert_close(found, right, rtol=2e-2 if rough else 1e-5, atol=1e-6)


def pulled() -> optim.Transform:
    """A transformation of one's own, over leaves, that pulls parameters to where they began."""

    def update(g: Tree, start: Tree, p: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        return tree.map(lambda g, p, q: -0.1 * g - 0.05 * (p - q) * q, g, p, start), start

    return optim.Transform(lambda p: p, update)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "by_dual"])
@pytest.mark.parametrize("ranks", [0, 2, 3, 4])
def test_a_derivative_through_parameters_that_a_state_keeps(monkeypatch: Any, ranks: int, way: str) -> None:
    """A rank that owns no leaf keeps nothing through which a gradient could pass to other ranks, which would wait."""
    monkeypatch.setitem(MADE, "pulled", pulled)
    right = difference(one_device(pulled(), 2), AT)
    if ranks == 4 and way in ("by_grad", "by_vmap", "by_autograd"):
        with pytest.raises(TypeError, match=r"pulled.update: its init keeps parameters.*own no leaf.*tree.detached"):
            on(ranks, of_start, "pulled", "step", way, 2)
        return
    torch.testing.assert_close(sum(on(ranks, of_start, "pulled", "step", way, 2)), right, rtol=1e-5, atol=1e-6)


def built(make: Callable[..., optim.Transform], name: str, value: Tensor) -> optim.Transform:
    """A transformation with one hyper-parameter given; what makes no step of its own goes before one."""
    known = inspect.signature(make).parameters
    given = {n: VALUES[n] for n in hyperparams(make) if known[n].default is inspect.Parameter.empty}
    more = {optim.muon: {"dtype": F64}, optim.adamw_8bit: {"block": 4}}.get(make, {})
    tx = make(**given | {name: value}, **more)
    return tx if "lr" in known or make is optim.scale else optim.chain(tx, optim.sgd(0.1))


HYPER = [(maker, name) for maker, make in makers().items() for name in hyperparams(make) if maker != "adamw_8bit"]
# what norms of leaves or their directions depend on: a rank that owns nothing does not see its `requires_grad`
BEFORE_RANKS = {("lamb", name) for name in ("b1", "b2", "eps", "weight_decay")}
BEFORE_RANKS |= {("muon", "momentum"), ("adafactor", "beta2_decay")}


def of_hyper(mesh: Any, maker: str, name: str, how: str, way: str) -> Tensor:
    """This rank's part of the derivative by a hyper-parameter, which nothing but the transformation has."""
    p, x = place(mesh)[0], rows_of(mesh)
    f = lambda h: outer(fshard.gather_params(trained(built(makers()[maker], name, h), p, x, how, 2)), x)  # noqa: E731
    return WAYS[way](f, torch.tensor(VALUES[name], dtype=F64))


@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(("maker", "name"), HYPER)
def test_a_derivative_by_a_hyper_parameter(maker: str, name: str, ranks: int, way: str, how: str) -> None:
    """The tensor is in the transformation's closure, not among the arguments of a step."""
    if ranks and way == "by_dual":
        return
    if ranks and way == "by_autograd" and (maker, name) in BEFORE_RANKS:
        with pytest.raises(TypeError, match=r"by a hyper-parameter alone.*torch.func.grad"):
            on(ranks, of_hyper, maker, name, how, way)
        return
    plain = lambda h: outer(trained(built(makers()[maker], name, h), PARAMS, DATA, "update", 2), DATA)  # noqa: E731
    right = difference(plain, torch.tensor(VALUES[name], dtype=F64))
    torch.testing.assert_close(sum(on(ranks, of_hyper, maker, name, how, way)), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("maker", "name"), HYPER)
def test_a_graph_reads_hyper_parameters(maker: str, name: str) -> None:
    """A graph would refuse a tensor in the transformation's closure, or keep the one of its first call."""
    h = torch.tensor(VALUES[name], dtype=F64)
    tx = built(makers()[maker], name, h)
    state = fshard.init_state(place(None)[0], tx)
    step = fshard.train_step(lambda p, x: outer(fshard.gather_params(p), x), tx)
    run = fshard.jit(step, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(tree.leaves(run(state, DATA)), tree.leaves(step(state, DATA)))
        h.mul_(0.9)
    assert "again" not in run.explain()


@pytest.mark.parametrize("name", ["clip_by_global_norm", "lamb"])
def test_ranks_that_are_processes(name: str) -> None:
    """Over gloo."""
    right = difference(one_device(MADE[name](), 2), AT)
    torch.testing.assert_close(sum(gloo(of_start, name, "step", "by_grad", 2)), right, rtol=1e-5, atol=1e-6)


S, R = "shard", "replicate"
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "whole": ({S: 2}, {"params_over": (), "grads_over": (), "state_over": ()}),
    "zero1": ({S: 2}, {"params_over": (), "grads_over": (), "state_over": (S,)}),
    "zero2": ({S: 2}, {"params_over": (), "grads_over": (S,), "state_over": (S,)}),
    "two axes": ({R: 2, S: 2}, {}),
    "state over two axes": ({R: 2, S: 2}, {"params_over": (S,), "state_over": (S, R)}),
    "a whole leaf": ({S: 2}, {"whole": ["b"]}),
    "units": ({S: 3}, {"units": ["w", "b", "v"]}),
}
OVER_RANKS = ["adamw", "clip_by_global_norm", "clip_by_global_norm-inf", "clip_by_leaf_norm", "lamb", "adafactor"]
OVER_RANKS += ["muon", "lbfgs", "whole_leaves", "resting", "by_label", "own clip"]


def own_clip() -> optim.Transform:
    """A clip of one's own."""

    def update(g: Tree, state: Tree, p: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        factor = 1 / (1 + optim.global_norm(g))
        return tree.map(lambda g: -0.1 * factor * g, g), state

    return optim.Transform(lambda p: (), update, over="tree")


MADE["own clip"] = own_clip


def of_sharded(mesh: Any, name: str, mode: str, plan_of: Any) -> Tensor:
    """The derivative by sharded parameters, along the line."""
    p, tangent = place(mesh, **plan_of)
    x, tx = rows_of(mesh), MADE[name]()
    f = lambda q: outer(fshard.gather_params(trained(tx, q, x, "step", 2)), x)  # noqa: E731
    start = moved(p, tangent, AT)
    return tree.dot(func.grad(f)(start), tangent) if mode == "grad" else func.jvp(f, (start,), (tangent,))[1]


@pytest.mark.parametrize("mode", ["grad", "jvp"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OVER_RANKS)
def test_a_derivative_by_sharded_parameters_on_every_plan(name: str, plan: str, mode: str) -> None:
    """A gradient is cut as the parameters are, and its dot product with a tangent is one value of the mesh."""
    sizes, plan_of = PLANS[plan]
    run = lambda: simulate(lambda mesh: of_sharded(mesh, name, mode, plan_of), **sizes)  # noqa: E731
    if plan == "a whole leaf" and name in ("lbfgs", "whole_leaves", "own clip"):
        with pytest.raises(TypeError, match=f"{name.replace(' ', '_')}.*: where a derivative passes.*all cut alike"):
            run()
        return
    found = run()
    right = difference(one_device(MADE[name](), 2), AT)
    torch.testing.assert_close(found[0] if mode == "grad" else sum(found), right, rtol=1e-5, atol=1e-6)


def of_rate(mesh: Any, maker: str, mode: str, plan_of: Any) -> Tensor:
    """This rank's derivative by the rate."""
    p, x = place(mesh, **plan_of)[0], rows_of(mesh)
    f = lambda h: outer(fshard.gather_params(trained(built(makers()[maker], "lr", h), p, x, "step", 2)), x)  # noqa: E731
    return WAYS[f"by_{mode}"](f, torch.tensor(VALUES["lr"], dtype=F64))


@pytest.mark.parametrize("mode", ["grad", "jvp"])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "a whole leaf"])
@pytest.mark.parametrize("maker", ["sgd", "adamw", "lamb", "muon", "adafactor"])
def test_a_derivative_by_the_rate_on_every_plan(maker: str, plan: str, mode: str) -> None:
    """The sum over the axes that the state is cut over, in forward mode over all ranks, each of which has its rows."""
    sizes, plan_of = PLANS[plan]
    found = torch.stack(simulate(lambda mesh: of_rate(mesh, maker, mode, plan_of), **sizes)).view(*sizes.values())
    over = plan_of.get("state_over", ("shard",))
    plain = lambda h: outer(trained(built(makers()[maker], "lr", h), PARAMS, DATA, "update", 2), DATA)  # noqa: E731
    right = difference(plain, torch.tensor(VALUES["lr"], dtype=F64))
    for n, axis in reversed([*enumerate(sizes)]):
        found = found.sum(n) if mode == "jvp" or axis in over else found.select(n, -1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


NORMS = {f"p={p}{', exact' * exact}": (p, exact) for p in (1, 2, 3, math.inf) for exact in (False, True)}


def of_norm(mesh: Any, p: float, exact: bool, program: str) -> Tree:
    """Derivatives of a norm of sharded parameters, divided by the number of ranks as any value of a rank."""
    q, tangent = place(mesh)
    n = 1 if mesh is None else mesh.size()
    norm = lambda q: optim.global_norm(q, p, exact) / n  # noqa: E731
    if program == "jvp":
        return func.jvp(norm, (q,), (tangent,))[1] * n
    if program == "grad":
        return fshard.gather_params(func.grad(norm)(q))
    if program == "grad of grad":
        return fshard.gather_params(func.grad(lambda q: tree.dot(func.grad(norm)(q), tangent))(q))
    loss = lambda q: inner(fshard.gather_params(q), rows_of(mesh))  # noqa: E731
    return fshard.gather_params(func.grad(lambda q: optim.global_norm(func.grad(loss)(q), p, exact) / n)(q))


def norm_of(p: float) -> Callable[[Tree], Tensor]:
    """A norm of whole leaves in torch's words."""
    return lambda q: torch.linalg.vector_norm(torch.cat([x.reshape(-1) for x in tree.leaves(q)]), p)


@pytest.mark.parametrize("program", ["grad", "jvp", "grad of grad", "penalty"])
@pytest.mark.parametrize("ranks", [0, 2, 3])
@pytest.mark.parametrize("kind", NORMS)
def test_a_derivative_of_a_norm(kind: str, ranks: int, program: str) -> None:
    """A penalty on the norm of a gradient, say, had no gradient on ranks."""
    (p, exact), f = NORMS[kind], norm_of(NORMS[kind][0])
    right: Tree = func.jvp(f, (PARAMS,), (TANGENT,))[1]
    if program == "grad":
        right = func.grad(f)(PARAMS)
    elif program == "grad of grad":
        right = func.jvp(func.grad(f), (PARAMS,), (TANGENT,))[1]
    elif program == "penalty":
        right = func.grad(lambda q: f(func.grad(inner)(q, DATA)))(PARAMS)
    for found in on(ranks, of_norm, p, exact, program):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)


ZEROS = [{"partition": partition, "grads": grads} for partition in ("flat", "leaf") for grads in ("reduced", "local")]


def of_zero(mesh: Any, name: str, kind: Any, how: str, way: str) -> Tensor:
    """This rank's part of the derivative through steps of `zero`, whose parameters are whole."""
    x, tx = rows_of(mesh), fshard.zero(MADE[name](), mesh, **kind)
    state = tx.init(PARAMS)

    def f(s: Tensor) -> Tensor:
        p, now = moved(PARAMS, TANGENT, s), state
        for _ in range(2):
            grads = func.grad(inner)(p, x if kind.get("grads") == "local" else DATA)
            if how == "step":
                p, now = tx.step(grads, now, p)
            else:
                updates, now = tx.update(grads, now, p)
                p = optim.apply_updates(p, updates)
        return outer(p, x)

    return WAYS[way](f, AT)


@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize("way", ["by_grad", "by_jvp", "by_vmap", "by_autograd"])
@pytest.mark.parametrize("ranks", [0, 2, 3])
@pytest.mark.parametrize("kind", ZEROS, ids=str)
@pytest.mark.parametrize("name", ["adamw", "lamb", "clip_by_global_norm", "lbfgs"])
def test_a_derivative_through_zero(name: str, kind: Any, ranks: int, way: str, how: str) -> None:
    """Each rank updates all leaves there."""
    right = difference(one_device(MADE[name](), 2), AT)
    torch.testing.assert_close(sum(on(ranks, of_zero, name, kind, how, way)), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize("way", ["by_grad", "by_jvp", "by_values", "by_autograd", "by_dual"])
@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_a_step_of_torchs_own_has_no_derivative(name: str, way: str, how: str) -> None:
    """It was 0, or that of an update of zero."""
    with pytest.raises(TypeError, match=r"from_torch: the step of \w+ has no derivative.*fshard.optim"):
        of_start(None, name, how, way, 1)


def test_a_rate_of_torchs_own_that_requires_a_gradient() -> None:
    """It is an argument of the class, not of the step."""
    tx = optim.from_torch(torch.optim.SGD, lr=torch.tensor(0.1, requires_grad=True))
    w = torch.ones(2)
    with pytest.raises(TypeError, match="SGD has no derivative"):
        tx.step(w, tx.init(w), w)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "adagrad", "lamb", "adafactor", "clip_by_leaf_norm"])
def test_a_gradient_of_zero_has_a_finite_derivative(name: str) -> None:
    """Of a first step as that of Adam, -lr g / (|g| + eps): a root of 0 times 0 was NaN for rows that no loss reads."""
    tx, p = MADE[name](), {"w": torch.ones(3, 2, dtype=F64), "b": torch.ones(2, dtype=F64)}

    def f(s: Tensor) -> Tensor:
        grads = {"w": s * torch.zeros(3, 2, dtype=F64), "b": s + torch.zeros(2, dtype=F64)}
        return outer_sum(tx.step(grads, tx.init(p), p)[0])

    outer_sum = lambda p: p["w"].sum() + p["b"].square().sum()  # noqa: E731
    torch.testing.assert_close(func.grad(f)(AT), difference(f, AT), rtol=1e-5, atol=1e-6)


def test_adams_first_step_at_zero_has_the_derivative_of_the_limit() -> None:
    """-lr g / (|g| + eps) at 0: -lr / eps."""
    w, tx = torch.tensor(1.0, dtype=F64), optim.adam(0.1, eps=1e-2)
    found = func.grad(lambda g: tx.step(g, tx.init(w), w)[0])(torch.tensor(0.0, dtype=F64))
    torch.testing.assert_close(found, torch.tensor(-10.0, dtype=F64))


def test_a_step_is_detached_where_nothing_is_recorded() -> None:
    """Under no_grad parameters that require a gradient take the kernel."""
    w, tx = nn.Parameter(torch.ones(3)), optim.adamw(0.1)
    with torch.no_grad():
        new, state = tx.step(w.detach(), tx.init(w.detach()), w)
    assert not any(x.requires_grad for x in tree.leaves((new, state)))


def train(mesh: Any, lr: Tensor) -> Any:
    plan, tx = fshard.make_plan(PARAMS, mesh), optim.adamw(lr)
    state = fshard.init_state(fshard.shard_params(PARAMS, plan), tx)
    return fshard.train_step(inner, tx)(state, rows_of(mesh))[0]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_train_step_has_no_derivative(ranks: int) -> None:
    """Its gradients are values, so a derivative by the rate alone would be a part of the right one."""
    with pytest.raises(TypeError, match=r"train_step.*hyper-parameter alone"):
        on(ranks, train, torch.tensor(0.1, requires_grad=True))
    with pytest.raises(TypeError, match=r"init_state.*cannot run inside torch.func.*tx.step"):
        on(ranks, lambda mesh: func.grad(lambda lr: train(mesh, lr).params.tensors[0].sum())(torch.tensor(0.1)))
