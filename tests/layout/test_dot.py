"""Dot products of trees, and what users build with them: conjugate gradients, Hessian-vector products."""

import re
import warnings
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, NARROW, STRATEGIES, TREES, WORLDS, lm_batch, lm_params, mean_loss, rand, same_bits
from support.steps import QUIET
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import gather_params, tree
from fshard.core.tree import nodes

pytestmark = pytest.mark.filterwarnings(QUIET)

CASES = [(world, name) for world in WORLDS for name in (STRATEGIES if world == "2x2" else NARROW)]


def once(x: Any, y: Any) -> Tensor:
    """The dot product of plain trees by torch, a tied leaf counted once."""
    pairs = {id(a): (a, b) for a, b in zip(tree.leaves(x), tree.leaves(y), strict=True)}
    wide = [torch.vdot(*(z.reshape(-1).to(torch.complex128) for z in pair)) for pair in pairs.values()]
    return torch.stack([*wide, torch.zeros((), dtype=torch.complex128)]).sum()


def dots(mesh: Any, name: str, strategy: str, whole: bool) -> Any:
    """Dot products of one tree of the registry with another, and of the children of both; with the oracle's."""
    x = TREES[name]()
    options = {"whole": ["**"] if whole else None}
    plan = fshard.make_plan(x, mesh, units=1, **options, **STRATEGIES[strategy])
    # padding is filled, too, and complex numbers have imaginary parts, other ones in each factor
    first = fshard.shard_params(x, plan)
    params, other = (
        tree.map(lambda row, n=n: (row + (n + n * n * 1j if row.is_complex() else n)).to(row.dtype), first)
        for n in (1, 2)
    )
    found = [(tree.dot(params, other), once(*map(gather_params, (params, other))))]
    states = tree.dot(params.for_state, other.for_state)  # views, where the state is cut further
    found.append((states, tree.dot(params.trainable, other.trainable)))
    if isinstance(x, dict | list | tuple):
        for key in x if isinstance(x, dict) else range(len(x)):
            parts = params[key], other[key]
            if all(isinstance(part, fshard.Sharded) for part in parts):
                found.append((tree.dot(*parts), once(*map(gather_params, parts))))
    return found


@pytest.mark.law
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("world", "strategy"), CASES)
def test_a_dot_product_is_that_of_whole_trees(world, strategy, name):
    """Padding would count, or a tied leaf, a replica, or a leaf kept whole would count more than once."""
    replicate, shard = WORLDS[world]
    for whole in (False, True):
        ranks = simulated(dots, name, strategy, whole, shard=shard, replicate=replicate)
        for products in zip(*ranks, strict=True):
            assert all(same_bits(got, products[0][0]) for got, _ in products), "ranks differ"
            got, expected = products[0]
            assert not got.dim()
            # whole numbers are summed without rounding
            assert got == (expected if got.is_complex() else expected.real)


def test_a_rank_may_hold_nothing():
    """Ranks would send results of other shapes under vmap, where one of them holds no element."""

    def on_a_rank(mesh: Any) -> Tensor:
        x = fshard.shard_params({"w": torch.ones(1)}, fshard.make_plan({"w": torch.ones(1)}, mesh))
        return torch.func.vmap(lambda gain: tree.dot(tree.map(lambda row: gain * row, x), x))(torch.tensor([1.0, 2.0]))

    for got in simulated(on_a_rank, shard=3):
        assert got.tolist() == [1, 2]


def gradients(mesh: Any) -> Any:
    """Dot products of gradients, of optimizer states, and of parameters without frozen leaves."""
    plan = fshard.make_plan(lm_params(), mesh, units=LM_UNITS, frozen=["tail.**"], whole=["blocks.0"])
    params = fshard.shard_params(lm_params(), plan)
    grads = fshard.value_and_grad(mean_loss)(params, lm_batch(0, mesh.get_rank()))[1]
    tx = fshard.optim.adamw(1e-2)
    opt_state = tx.update(grads, tx.init(params.trainable), params.trainable)[1]
    moments = nodes(opt_state, fshard.Sharded)[0]
    plain = {"g": gather_params(grads), "m": gather_params(moments)}
    pairs = [(grads, grads, plain["g"], plain["g"]), (moments, grads, plain["m"], plain["g"])]
    nested = ({"a": x, "b": [torch.ones(2), moments], "c": None} for x in (grads, moments))
    return (
        [(tree.dot(x, y), once(a, b).real) for x, y, a, b in pairs],
        (tree.dot(grads, grads).sqrt(), fshard.optim.global_norm(grads)),
        (tree.dot(*nested), once(plain["m"], plain["g"]).real + 2 + once(plain["m"], plain["m"]).real),
        (tree.dot(params.trainable, grads), once(gather_params(params.trainable), plain["g"]).real),
    )


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_and_states_have_dot_products(world):
    """Frozen leaves, nested trees or optimizer states would be refused, or count wrongly."""
    replicate, shard = WORLDS[world]
    for products, *others in simulated(gradients, shard=shard, replicate=replicate):
        for got, expected in [*products, *others]:
            assert torch.allclose(got, expected, rtol=1e-12, atol=0)


def test_sums_are_wide():
    """A sum in half precision would overflow, and one in float32 would lose small summands."""
    for dtype, wide in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = {"a": torch.full((100,), 300.0).to(dtype), "b": torch.ones(1, dtype=torch.bfloat16)}
        (got, _), *_ = simulated(lambda _, x=x: (tree.dot(x, x), 0), shard=1)
        assert (got.dtype, got.item()) == (wide, 100 * float(x["a"][0]) ** 2 + 1)
    x = torch.cat([torch.full((1,), 4096.0), torch.full((1 << 17,), 2.0**-8)])  # 2^24 + 2^17 / 2^16
    assert tree.dot(x, x).item() == 2.0**24 + 2
    plan = fshard.make_plan({"a": torch.ones(3, dtype=torch.float16), "n": torch.ones(2)})
    params = fshard.shard_params({"a": torch.ones(3, dtype=torch.float16), "n": torch.ones(2)}, plan)
    mixed = tree.dot(params, tree.map(torch.Tensor.double, params))
    assert (mixed.dtype, mixed.item()) == (torch.float64, 5)


def derivatives(mesh: Any, strategy: str) -> Any:
    """Derivatives of dot products by torch.func, and the same values from a graph."""
    params, y = lm_params(), tree.map(torch.sin, lm_params())
    plan = fshard.make_plan(params, mesh, units=LM_UNITS, whole=["tail"], **STRATEGIES[strategy])
    x, y = fshard.shard_params(params, plan), fshard.shard_params({**y, "head": y["embed"]}, plan)
    batch = lm_batch(0, mesh.get_rank())

    def loss(p: Any) -> Tensor:
        return mean_loss(gather_params(p), batch).total

    first = torch.func.grad(loss)
    gains = torch.tensor([1.0, 2.0], dtype=torch.float64)
    return {
        "grad": (gather_params(torch.func.grad(lambda p: tree.dot(p, p) * 0.5)(x)), gather_params(x)),
        "jvp": (torch.func.jvp(lambda p: tree.dot(p, p), (x,), (y,))[1], 2 * tree.dot(x, y)),
        "vmap": (
            torch.func.vmap(lambda gain: tree.dot(tree.map(lambda row: gain * row, x), y))(gains),
            gains * tree.dot(x, y),
        ),
        "jit": (fshard.jit(tree.dot, backend="eager")(x, y), tree.dot(x, y)),
        "hvp": (
            gather_params(torch.func.grad(lambda p: tree.dot(first(p), y))(x)),
            gather_params(torch.func.jvp(first, (x,), (y,))[1]),
        ),
    }


@pytest.mark.parametrize(
    ("world", "strategy"), [("3", "full"), ("2x2", "full"), ("1", "full"), ("3", "ddp"), ("2x2", "ddp")]
)
def test_a_dot_product_is_one_value_of_the_mesh(world, strategy):
    """Derivatives would be multiplied by the number of ranks, or be those of this rank's part."""
    replicate, shard = WORLDS[world]
    for found in simulated(derivatives, strategy, shard=shard, replicate=replicate):
        for name, (got, expected) in found.items():
            for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True):
                assert torch.allclose(a, b, rtol=1e-11, atol=1e-13), name


def test_a_loss_has_dot_products():
    """A penalty in a loss would have another gradient, or none."""

    def on_a_rank(mesh: Any) -> Any:
        params = fshard.shard_params(lm_params(), fshard.make_plan(lm_params(), mesh, units=LM_UNITS))
        return gather_params(fshard.value_and_grad(lambda p: tree.dot(p, p))(params)[1])

    expected = tree.map(lambda x: 2 * x, lm_params())
    expected["embed"] = expected["head"] = 2 * expected["head"]  # whole trees have no ties: each place counts
    for got in simulated(on_a_rank):
        assert all(
            torch.allclose(a, b, rtol=1e-12) for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True)
        )


def test_one_small_collective():
    """A dot product would send more than one number to each rank."""

    def on_a_rank(mesh: Any) -> Any:
        x = fshard.shard_params(lm_params(), fshard.make_plan(lm_params(), mesh, units=LM_UNITS))
        with fshard.collectives.tally() as calls:
            tree.dot(x, x)
        return [(call.kind, call.nbytes) for call in calls]

    assert simulated(on_a_rank, shard=3) == [[("all_reduce", 2 * 8)]] * 3


# --- conjugate gradients, as a user writes them ---


def quadratic(params: Any, x: Tensor) -> fshard.Mean:
    """A loss that is convex in the parameters."""
    out = x @ params["w"] @ torch.ones(3, dtype=torch.float64) + x[:, :2] @ params["b"]
    return fshard.Mean(out.square().sum() / 2, len(x))


def start() -> Any:
    return {"w": rand(5, 3, seed=1), "b": rand(2, seed=2)}


def data(rank: int) -> Tensor:
    return rand(4 + rank, 5, seed=10 + rank)


def solve(params: Any, grads: Any, batch: Tensor, damping: float = 0.1, steps: int = 12) -> Any:
    """The solution of (H + damping I) s = grads."""
    product = fshard.hvp(quadratic)
    solution, residual = tree.map(torch.zeros_like, grads), grads
    direction, size = residual, tree.dot(residual, residual)
    for _ in range(steps):
        image = tree.map(lambda h, d: h + damping * d, product(params, direction, batch), direction)
        rate = size / tree.dot(direction, image).clamp(min=1e-300)
        solution = tree.map(lambda s, d, a=rate: s + a * d, solution, direction)
        residual = tree.map(lambda r, i, a=rate: r - a * i, residual, image)
        size, old = tree.dot(residual, residual), size
        direction = tree.map(lambda r, d, b=size / old: r + b * d, residual, direction)
    return solution


def newton(mesh: Any, strategy: dict[str, Any], steps: int = 12, jitted: bool = False) -> Any:
    """One step of Newton's method by conjugate gradients."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    params = fshard.shard_params(start(), fshard.make_plan(start(), mesh, units=["w"], **strategy))
    batch = data(mesh.get_rank())
    grads = fshard.value_and_grad(quadratic)(params, batch)[1]
    fn = fshard.jit(solve, backend="eager") if jitted else solve
    return gather_params(fn(params, grads, batch, 0.1, steps))


def newton_of_one_device(ranks: int) -> Any:
    """The same by torch.linalg, with the whole Hessian."""
    batch, whole = torch.cat([data(rank) for rank in range(ranks)]), start()
    flat = torch.cat([x.reshape(-1) for x in whole.values()])

    def loss(flat: Tensor) -> Tensor:
        mean = quadratic({"w": flat[:15].view(5, 3), "b": flat[15:]}, batch)
        return mean.total / mean.count

    hessian = torch.func.hessian(loss)(flat) + 0.1 * torch.eye(len(flat), dtype=torch.float64)
    found = torch.linalg.solve(hessian, torch.func.grad(loss)(flat))
    return {"w": found[:15].view(5, 3), "b": found[15:]}


@pytest.mark.parametrize(("world", "strategy"), [("1", "full"), ("2", "zero2"), ("3", "full"), ("2x2", "wide")])
def test_conjugate_gradients_solve_newtons_equation(world, strategy):
    """A method that users build of `hvp`, `dot` and `tree.map` would go another way on several ranks."""
    replicate, shard = WORLDS[world]
    whole = newton_of_one_device(replicate * shard)
    for got in simulated(newton, STRATEGIES[strategy], shard=shard, replicate=replicate):
        for name, x in whole.items():
            assert torch.allclose(got[name], x, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("how", ["processes", "graphs"])
def test_conjugate_gradients_elsewhere(how):
    """Processes would have other bits than simulated ranks, or a graph other values."""
    first, *others = simulated(newton, {}, 2)
    for got in [*others, *(gloo(newton, {}, 2) if how == "processes" else [])]:
        assert same_bits(got, first)
    for got in simulated(newton, {}, 2, True) if how == "graphs" else []:
        assert all(torch.allclose(got[name], x, rtol=1e-9, atol=1e-12) for name, x in first.items())


# --- wrong calls ---


def sharded(x: Any, **options: Any) -> fshard.Sharded:
    """A tree on one device, sharded."""
    return fshard.shard_params(x, fshard.make_plan(x, **options))


X = {"a": torch.ones(3), "b": torch.ones(2)}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tree.dot(X, {"a": X["a"]}), ValueError, "dot: y is not of the structure of x: it lacks ['b']"),
        (lambda: tree.dot(X, {**X, "b": torch.ones(3)}), ValueError, "leaf 'b': expected shape [2], as in x, got [3]"),
        (lambda: tree.dot(X, {**X, "b": 1.0}), TypeError, "leaf 'b': expected tensors, got a torch.float32 tensor"),
        (lambda: tree.dot(sharded(X), X), ValueError, "dot: y is not of the structure of x: expected a Sharded, got a"),
        (
            lambda: tree.dot({"p": sharded(X)}, {"p": torch.ones(5)}),
            ValueError,
            "leaf 'p': expected a Sharded, as in x, got a tensor",
        ),
        (
            lambda: tree.dot(sharded(X), sharded(X, frozen=["a"]).trainable),
            ValueError,
            "y: expected leaves that are cut as in x, got Sharded(2 leaves over",
        ),
        (
            lambda: tree.dot(*[fshard.value_and_grad(lambda p: p["a"].sum(), reduce=False)(sharded(X))[1]] * 2),
            TypeError,
            "fshard.reduce_grads gives the mesh's",
        ),
    ],
)
def test_trees_that_do_not_fit_are_errors(call, error, words):
    """Elements of one leaf would be multiplied by those of another."""
    with pytest.raises(error, match=re.escape(words)):
        call()


LEAVES = {"blocks": [{"w": torch.arange(15.0).view(3, 5), "b": torch.arange(5.0)}], "s": torch.tensor(2.0)}


def norms(mesh: Any, strategy: str, whole: list[str] | None) -> Any:
    """Norms of the gradients of a subtree and of leaves, some of which every rank has whole."""
    plan = fshard.make_plan(LEAVES, mesh, units=["blocks.*"], whole=whole, **STRATEGIES[strategy])

    def loss(p: Any) -> Tensor:
        return (p["blocks"][0]["w"].square().sum() + p["blocks"][0]["b"].square().sum() + p["s"].square()) / 2

    _, grads = fshard.value_and_grad(loss)(fshard.shard_params(LEAVES, plan))
    block = grads["blocks"][0]
    return [fshard.optim.global_norm(x) for x in (block, block["w"], block["b"], grads["s"])]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_of_a_leaf_counts_each_element_once(strategy):
    """The norm of a leaf or a subtree would count what several ranks hold several times."""
    block = LEAVES["blocks"][0]
    want = [torch.cat([x.flatten() for x in block.values()]).norm(), block["w"].norm(), block["b"].norm(), LEAVES["s"]]
    for whole in (None, ["**.b", "s"]):
        for found in simulated(norms, strategy, whole, replicate=2):
            torch.testing.assert_close(found, want)
