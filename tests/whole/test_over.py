"""Own transformations, and those of TorchOpt, over whole leaves, elements and trees: as in plain torch, or an error."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from support.models import STRATEGIES, rand
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.compiler.trace import TraceError
from fshard.core import tree

torchopt = pytest.importorskip("torchopt")
LR, STEPS, CLOSE = 0.1, 3, 1e-9
WORLDS: dict[str, dict[str, int] | None] = {
    **{"alone": None, "1": {"shard": 1}, "2": {"shard": 2}, "3": {"shard": 3}},
    "2x2": {"replicate": 2, "shard": 2},
}
WAYS = ["step", "donated", "jit", "flat", "leaf"]


def start() -> Any:
    """Parameters of uneven shapes, of which no rank's part is a whole leaf, in an order that is not that of sizes."""
    shapes = {"b": (5,), "w": (4, 3), "c": (2, 3, 2), "s": (), "v": (7, 3)}
    return {
        name: rand(*shape, seed=seed, dtype=torch.float64) + 0.5 for seed, (name, shape) in enumerate(shapes.items())
    }


def loss(params: Any, x: Tensor) -> Tensor:
    """A loss whose gradients are far apart in size from leaf to leaf."""
    return sum((3.0**i * (params[name] * x.mean()).square().sum() for i, name in enumerate("bwcsv")), torch.zeros(()))


BATCHES = [torch.tensor([1.0, 2.0 + i], dtype=torch.float64) for i in range(STEPS)]


class Own(NamedTuple):
    """A user's pair: `init(params)` and `update(grads, state, params)`, of plain trees; how it may be run on ranks."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]
    over: str | None = None  # what it says of itself
    on_ranks: bool = True  # right over several ranks, else a ValueError


def each(fn: Callable[[Tensor, Tensor], Tensor]) -> Own:
    """A pair without a state, of a function of a gradient and a parameter."""
    return Own(lambda p: (), lambda g, s, p=None, **_: (tree.map(lambda g, p: -LR * fn(g, p), g, p), s))


def running(first: Callable[[Tensor], Tensor], seen: Callable[[Tensor], Tensor]) -> Own:
    """A pair that divides by a running mean of something of each leaf, of any shape."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        s = tree.map(lambda s, g: 0.5 * s + 0.5 * seen(g), s, g)
        return tree.map(lambda g, s: -LR * g / (1 + s), g, s), s

    return Own(lambda p: tree.map(first, p), update)


def by_global_norm(most: float) -> Own:
    """A clip by the norm of all leaves together, which acts above a threshold alone."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        norm = sum(x.square().sum() for x in tree.leaves(g)) ** 0.5
        return tree.map(lambda x: -LR * x * (most / norm).clamp(max=1.0), g), s

    return Own(lambda p: (), update, on_ranks=False)


def if_all_finite() -> Own:
    """A pair that makes no update if any gradient is not finite: here all are."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        finite = torch.stack([x.isfinite().all() for x in tree.leaves(g)]).all()
        return tree.map(lambda x: torch.where(finite, -LR * x, 0.0), g), s + ~finite

    return Own(lambda p: torch.tensor(0), update, on_ranks=False)


def with_count() -> Own:
    """A pair whose state is a count made of the first leaf, and a tuple with an entry for each leaf."""

    def init(p: Any) -> Any:
        return tree.leaves(p)[0].new_zeros(()), tuple(torch.zeros_like(x) for x in tree.leaves(p))

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        flat, spec = tree.flatten(g)
        moments = tuple(0.9 * m + x for m, x in zip(s[1], flat, strict=True))
        return tree.unflatten(spec, [-LR * m / (s[0] + 1) for m in moments]), (s[0] + 1, moments)

    return Own(init, update)


def with_tuples() -> Own:
    """A pair whose state is a list of a tuple for each leaf: a moment, and the sum of squares."""

    def init(p: Any) -> Any:
        return [(torch.zeros_like(x), {"sum": x.new_zeros(())}) for x in tree.leaves(p)]

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        flat, spec = tree.flatten(g)
        s = [(0.9 * m + x, {"sum": v["sum"] + x.square().sum()}) for (m, v), x in zip(s, flat, strict=True)]
        return tree.unflatten(spec, [-LR * m / (1 + v["sum"]) for m, v in s]), s

    return Own(init, update)


def of_values(listed: bool) -> Own:
    """A pair whose `init` reads values, and makes a state of other shapes than the parameters, in a tree or a list."""

    def init(p: Any) -> Any:
        if any(float(x.abs().sum()) == 0 for x in tree.leaves(p)):
            raise ArithmeticError
        rows = tree.map(lambda x: x.new_zeros(x.shape[:1]), p)
        return {"rows": tree.leaves(rows) if listed else rows}

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        flat, spec = tree.flatten(g)
        sums = [x.square().reshape(*x.shape[:1], -1).sum(-1) if x.dim() else x.square() for x in flat]
        rows = [r + x for r, x in zip(tree.leaves(s), sums, strict=True)]
        scaled = [r.reshape([*r.shape, *[1] * (x.dim() - 1)]) for r, x in zip(rows, flat, strict=True)]
        new = [-LR * x / (1 + r) for x, r in zip(flat, scaled, strict=True)]
        return tree.unflatten(spec, new), {"rows": rows if listed else tree.unflatten(spec, rows)}

    return Own(init, update)


OWN: dict[str, Own] = {
    "norm": each(lambda g, p: g / g.norm()),
    "row-wise": each(lambda g, p: g / (1 + g.norm(dim=-1, keepdim=True)) if g.dim() > 1 else g),
    "largest": each(lambda g, p: g / g.abs().max()),
    "sign": each(lambda g, p: g.sign()),
    "trust ratio": each(lambda g, p: g * p.norm() / g.norm()),
    "transposed": each(lambda g, p: (g.mT @ g @ g.mT).mT / g.norm() ** 2 if g.dim() == 2 else g),
    "matrices alone": each(lambda g, p: torch.linalg.qr(g)[0] if g.dim() == 2 else 0 * g),
    "centered": each(lambda g, p: g - g.mean(0) if g.dim() else g),
    "by shape": each(lambda g, p: g + 0.1 * p if p.dim() > 1 else g),
    "mean of largest": running(lambda p: p.new_zeros(()), lambda g: g.abs().max()),
    "row sums": running(lambda p: p.new_zeros(*p.shape[:-1], 1) if p.dim() else p.new_zeros(()), lambda g: g.square().sum(-1, keepdim=True) if g.dim() else g.square()),  # noqa: E501
    "count": with_count(),
    "tuples": with_tuples(),
    "values": of_values(listed=False),
    "values, listed": of_values(listed=True),
    "global norm": by_global_norm(0.5),
    "global norm, high": by_global_norm(1e5),
    "all finite": if_all_finite(),
    "each finite": each(lambda g, p: torch.where(g.isfinite().all(), g, 0.0)),
    "elements": each(lambda g, p: g.sign() + 0.1 * p)._replace(over="elements"),
}  # fmt: skip


def of_torchopt(pair: Any, on_ranks: bool = True) -> Own:
    """A pair of TorchOpt: plain, it is given parameters by name, and told to write to nothing."""
    return Own(pair.init, lambda g, s, p=None, **_: pair.update(g, s, params=p, inplace=False), on_ranks=on_ranks)


FOREIGN: dict[str, tuple[Callable[[], Any], bool]] = {
    "torchopt.sgd": (lambda: torchopt.sgd(LR, momentum=0.9), True),
    "torchopt.adam": (lambda: torchopt.adam(LR), True),
    "torchopt.adamw": (lambda: torchopt.adamw(LR), True),
    "torchopt.rmsprop": (lambda: torchopt.rmsprop(LR), True),
    "torchopt.adagrad": (lambda: torchopt.adagrad(LR), True),
    "torchopt.clip_grad_norm": (lambda: torchopt.chain(torchopt.clip_grad_norm(0.5), torchopt.sgd(LR)), False),
}
NAMES = [*OWN, *FOREIGN]


def pair_of(name: str) -> tuple[Own, Any]:
    """The plain pair, and what a program gives to fshard."""
    if name in FOREIGN:
        make, on_ranks = FOREIGN[name]
        return of_torchopt(make(), on_ranks), make()
    own = OWN[name]
    return own, optim.Transform(own.init, own.update, **({"over": own.over} if own.over else {}))


def plainly(own: Own) -> Any:
    """The parameters after some steps in plain torch."""
    params = start()
    state = own.init(params)
    for batch in BATCHES:
        with_grad = {name: x.clone().requires_grad_() for name, x in params.items()}
        grads = dict(zip(with_grad, torch.autograd.grad(loss(with_grad, batch), [*with_grad.values()]), strict=True))
        updates, state = own.update(grads, state, params)
        params = {name: x + updates[name] for name, x in params.items()}
    return params


def stepped(mesh: Any, tx: Any, way: str, strategy: dict[str, Any]) -> Any:
    """The parameters after the same steps of fshard, and of a state that went through a checkpoint."""
    if way in ("flat", "leaf"):
        return zeroed(mesh, tx, way)
    plan = fshard.make_plan(start(), mesh, units=["b", "w"], **strategy)
    state = fshard.init_state(fshard.shard_params(start(), plan), tx)
    step: Any = fshard.train_step(loss, tx, donate=way == "donated")
    step = fshard.jit(step, backend="eager") if way == "jit" else step
    for batch in BATCHES:
        state, _ = step(state, batch)
    kept = optim.state.gather_state(state.opt_state)
    again = optim.state.shard_state(kept, fshard.init_state(state.params, tx).opt_state)
    fshard.testing.assert_trees_equal(again, state.opt_state)
    alone = fshard.init_state(fshard.shard_params(start(), fshard.make_plan(start())), tx).opt_state
    known = optim.state.gather_state(alone)  # a whole state says nothing of ranks
    assert {name: x.shape for name, x in kept.items()} == {name: x.shape for name, x in known.items()}
    return fshard.gather_params(state.params)


def zeroed(mesh: Any, tx: Any, partition: str) -> Any:
    """The parameters after the same steps of ZeRO."""
    params, zero = start(), fshard.zero(tx, mesh, partition)
    state = zero.init(params)
    for batch in BATCHES:
        grads = torch.func.grad(loss)(params, batch)
        params, state = zero.step(grads, state, params)
    return params


def places() -> Iterator[tuple[str, str, str]]:
    """The worlds, ways and strategies that go together."""
    for world, way in itertools.product(WORLDS, WAYS):
        for strategy in ("full", "ddp", "zero1") if way not in ("flat", "leaf") else ("full",):
            yield world, way, strategy


@pytest.mark.law
@pytest.mark.parametrize(("world", "way", "strategy"), [*places()])
@pytest.mark.parametrize("name", NAMES)
def test_a_transformation_of_ones_own_is_right_or_an_error(name, world, way, strategy):
    """A pair that says nothing of itself runs on whole leaves, wherever parameters are cut: it would see flat rows of
    many leaves, or the leaves of one rank, and train otherwise without a word."""
    own, tx = pair_of(name)
    want, axes = plainly(own), WORLDS[world]
    several = any(size > 1 for size in (axes or {}).values())
    if not own.on_ranks and several:
        with pytest.raises(ValueError, match=r"depends on other leaves .*over='tree'.*clip_norm"):
            simulated(stepped, tx, way, STRATEGIES[strategy], **axes)
        return
    if (name, way) == ("torchopt.clip_grad_norm", "jit"):
        with pytest.raises(TraceError, match="asks for the value of a tensor"):  # float(total_norm)
            simulated(stepped, tx, way, STRATEGIES[strategy], **(axes or {"shard": 1}))
        return
    runs = (
        simulated(stepped, tx, way, STRATEGIES[strategy], **axes)
        if axes
        else [stepped(None, tx, way, STRATEGIES[strategy])]
    )
    for got in runs:
        for leaf, x in want.items():
            torch.testing.assert_close(got[leaf], x, rtol=CLOSE, atol=CLOSE, msg=lambda m, leaf=leaf: f"{leaf}: {m}")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_leaf_has_its_path_where_ranks_own_leaves(ranks: int) -> None:
    """A rate by the path would be that of no leaf."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        leaves, spec = tree.flatten(grads)
        rates = [0.1 if path == "b.head" else 1.0 for path in tree.leaf_paths(spec)]
        return tree.unflatten(spec, [-rate * x for rate, x in zip(rates, leaves, strict=True)]), state

    whole = {"a": torch.ones(3), "b": {"head": torch.ones(2), "w": torch.ones(2, 2)}}
    tx = optim.Transform(lambda params: (), update)

    def run(mesh: Any) -> Any:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh))
        return fshard.gather_params(tx.update(params, tx.init(params), params)[0])

    for got in simulated(run, shard=ranks):
        torch.testing.assert_close(got, tx.update(whole, ())[0])


def test_what_a_transformation_says_of_itself():
    """A word that is no word, or two that contradict each other, would be taken for "leaves"."""
    functions = (lambda p: (), lambda g, s, p=None, **_: (g, s))
    for said, over in (({}, "leaves"), ({"over": "tree"}, "tree"), ({"elementwise": True}, "elements")):
        tx = optim.Transform(*functions, **said)
        assert (tx.over, tx.elementwise) == (over, over == "elements")
        assert (tx._replace(update=functions[1]).over, optim.chain(tx).over) == (
            over,
            "elements" if tx.elementwise else "tree",
        )
    for said, match in (
        ({"over": "rows"}, r"over='rows': expected 'leaves', 'elements' or 'tree'"),
        ({"over": True}, r"over=True: expected 'leaves'"),
        ({"over": "leaves", "elementwise": True}, r"over='leaves' with elementwise=True.*Leave elementwise out"),
        ({"over": "elements", "elementwise": False}, r"over='elements' with elementwise=False"),
    ):
        with pytest.raises(ValueError, match=match):
            optim.Transform(*functions, **said)


def test_what_cannot_be_run_over_leaves_is_an_error():
    """A function that reads subtrees, or returns another tree, would fail in another place, or not at all."""
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    by_name = optim.Transform(lambda p: p["a"].clone(), lambda g, s, p=None, **_: (g, s))
    with pytest.raises(TypeError, match=r"\['a'\]: of this tree a rank has some leaves.*over='tree'"):
        by_name.init(sharded)
    other = optim.Transform(lambda p: (), lambda g, s, p=None, **_: (tree.leaves(g), s))
    with pytest.raises(ValueError, match=r"expected updates of the structure of the gradients"):
        other.update(sharded, other.init(sharded), sharded)


def wrapped_clip(mesh: Any) -> Any:
    """The parameters after a step of a user's wrapper, which says nothing, around a clip of fshard's."""
    inner = optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(LR))
    tx = optim.Transform(inner.init, lambda g, s, p=None, **extra: inner.update(g, s, p, **extra), elementwise=False)
    state = fshard.init_state(fshard.shard_params(start(), fshard.make_plan(start(), mesh)), tx)
    return fshard.gather_params(fshard.train_step(loss, tx)(state, BATCHES[0])[0].params)


def test_a_wrapper_of_fshards_norms_says_nothing():
    """fshard's norms are those of all ranks, whichever leaves each has: the trial would refuse what is right."""
    want = wrapped_clip(None)
    for num in (1, 2, 3, 6):  # of which one rank owns no leaf
        for got in simulated(wrapped_clip, shard=num):
            for name, x in want.items():
                torch.testing.assert_close(got[name], x)


def test_a_trial_leaves_torchs_generator_alone():
    """The first state would change what a program draws after it."""
    drawing = optim.Transform(lambda p: (), lambda g, s, p=None, **_: (tree.map(torch.rand_like, g), s))
    sharded = fshard.shard_params(start(), fshard.make_plan(start()))
    before = torch.get_rng_state()
    drawing.init(sharded)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("apart", [True, False])
def test_a_trial_compares_what_vmap_batches(apart: bool):
    """An update that closes over a batched rate is judged by its leaves, as any other."""

    def after(rate: Tensor, sharded: Any) -> Tensor:
        def update(g: Any, s: Any, p: Any = None, **_: object) -> tuple[Any, Any]:
            total = sum(x.norm() for x in tree.leaves(g))
            return tree.map(lambda x: -rate * x / (x.norm() if apart else total), g), s

        tx = optim.Transform(lambda p: (), update)
        new, _ = tx.step(sharded, tx.init(sharded), sharded)
        return fshard.tree.dot(new, new)

    def on_rank(mesh: Any) -> Tensor:
        sharded = fshard.shard_params(start(), fshard.make_plan(start(), mesh))
        return torch.func.vmap(lambda rate: after(rate, sharded))(rates)

    rates = torch.tensor([0.1, 0.2], dtype=torch.float64)
    if not apart:
        with pytest.raises(ValueError, match="depends on other leaves"):
            simulated(on_rank, shard=2)
        return
    want = sum(
        (x.square().sum() * (1 - rates / x.norm()) ** 2 for x in tree.leaves(start())),
        torch.zeros(2, dtype=rates.dtype),
    )
    for got in simulated(on_rank, shard=2):
        torch.testing.assert_close(got, want)
