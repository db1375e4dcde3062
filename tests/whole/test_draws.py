"""Random numbers that an update draws come from the state's seed and step: alike where ranks have copies."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import STRATEGIES, same_bits
from support.worlds import simulated

import fshard
from fshard import optim, tree

WORLDS: dict[str, dict[str, int] | None] = {
    **{"alone": None, "1": {"shard": 1}, "2": {"shard": 2}, "3": {"shard": 3}},
    "2x2": {"replicate": 2, "shard": 2},
}
WAYS = ["step", "donated", "jit", "in_backward"]
SHAPES = {"w": (4, 3), "b": (5,), "s": (), "v": (7, 3)}


def noise(over: str, **kw: Any) -> optim.Transform:
    """optax.add_noise: the gradients and normal noise."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        return tree.map(lambda x: x + torch.randn_like(x), g), s

    return optim.Transform(lambda p: (), update, over=over, **kw)


def langevin(over: str) -> optim.Transform:
    """A state that keeps what was drawn, and a mask of another kind of draws."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        kept = tree.map(lambda m, x: 0.5 * m + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5)), s[1], g)
        return tree.map(lambda x, m: -x - m, g, kept), (s[0] + 1, kept)

    return optim.Transform(lambda p: (torch.zeros(()), tree.map(torch.zeros_like, p)), update, over=over)


def fused(over: str) -> optim.Transform:
    """A twin in place that draws as well."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        return tree.map(lambda x: torch.randn_like(x), g), s

    def in_place(g: Any, s: Any, p: Any, found_inf: Any, donate: bool, **_: Any) -> Any:
        p = p if donate else tree.map(torch.clone, p)
        return tree.map(lambda x: x.add_(torch.randn_like(x)), p), s

    return optim.Transform(lambda p: (), update, in_place, over=over)


def around(over: str) -> optim.Transform:
    """A user's wrapper around another one of his, which passes nothing on."""
    inner = noise(over)
    return optim.Transform(lambda p: inner.init(p), lambda g, s, p=None, **_: inner.update(g, s, p), over=over)


KINDS: dict[str, Any] = {
    "noise": noise,
    "langevin": langevin,
    "fused": fused,
    "around": around,
    "chain": lambda over: optim.chain(noise(over), noise(over), optim.sgd(0.1)),
    "by_label": lambda over: optim.by_label({"a": noise(over), "b": langevin(over)}, {"w": "a", "v": "a", "**": "b"}),
    "masked": lambda over: optim.masked(noise(over), lambda path, leaf: leaf.ndim != 1),
    "with_hyperparams": lambda over: optim.with_hyperparams(
        lambda rate: optim.chain(noise(over), optim.sgd(rate)), rate=0.1
    ),
    "resting": lambda over: optim.resting(noise(over)),
    "whole_leaves": lambda over: optim.whole_leaves(noise(over)),
    "both": lambda over: optim.chain(optim.clip_by_global_norm(1.0), noise("leaves"), noise(over)),
}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(((params[name] * x.mean()).sum() for name in SHAPES), torch.zeros(()))


def run(mesh: Any, kind: str, over: str, way: str, strategy: dict[str, Any], seed: int) -> list[Any]:
    """What the first step changes, twice from one state, and what the second one does."""
    tx, params = KINDS[kind](over), {name: torch.ones(shape) for name, shape in SHAPES.items()}
    plan = fshard.make_plan(params, mesh, units=["w", "b"], whole=["s"], **strategy)
    make = {"donated": {"donate": True}, "in_backward": {"donate": True, "in_backward": True}}.get(way, {})
    step: Any = fshard.train_step(loss, tx, **make)
    step = fshard.jit(step, backend="eager") if way == "jit" else step
    before, moved = torch.get_rng_state(), list[Any]()
    for _ in range(2):
        state, old = fshard.init_state(fshard.shard_params(params, plan), tx, seed=seed), params
        torch.rand(3)  # torch's own generator has no say
        between = torch.get_rng_state()
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
            new = fshard.gather_params(state.params)
            moved.append(tree.map(torch.sub, new, old))
            old = new
        assert torch.equal(torch.get_rng_state(), between), "a step draws from torch's own generator"
    torch.set_rng_state(before)
    assert same_bits(moved[:2], moved[2:]), "another result of the same state"
    return moved[:2]


def places() -> Iterator[tuple[str, str, str, str, str]]:
    for kind, over, world, way in itertools.product(KINDS, ("leaves", "elements"), WORLDS, WAYS):
        if way == "in_backward" and (over == "leaves" or kind in ("resting", "whole_leaves", "both")):
            continue
        if way == "jit" and (kind not in ("noise", "langevin", "by_label") or world not in ("alone", "2", "2x2")):
            continue
        for strategy in ("full", "ddp", "zero1"):
            yield kind, over, world, way, strategy


@pytest.mark.parametrize(("kind", "over", "world", "way", "strategy"), [*places()])
def test_random_numbers_of_an_update_come_from_the_state(kind, over, world, way, strategy):
    """The step would be no function of its state, and copies of parameters would part without a word."""
    axes = WORLDS[world]
    args = (kind, over, way, STRATEGIES[strategy])
    (first, second), *others = simulated(run, *args, 3, **axes) if axes else [run(None, *args, 3)]
    assert all(same_bits(x, [first, second]) for x in others), "ranks have other parameters"
    assert not same_bits(first, second), "each step draws the same numbers"
    other_seed = simulated(run, *args, 4, **axes) if axes else [run(None, *args, 4)]
    assert not same_bits(other_seed[0][0], first)
    drawn = [
        x for name in ("w", "b", "v") if not (kind == "masked" and name == "b") for x in first[name].flatten().tolist()
    ]
    assert len({round(x, 5) for x in drawn}) > 0.7 * len(drawn), "parts of the parameters get the same numbers"
    if over == "leaves" and kind not in ("both",):
        alone = run(None, kind, over, "step", {}, 3)
        for x, want in zip(tree.leaves([first, second]), tree.leaves(alone), strict=True):
            torch.testing.assert_close(x, want, rtol=1e-5, atol=1e-6)


def refused(mesh: Any, tx: Any, with_zero: bool) -> None:
    params = {"w": torch.ones(4), "b": torch.ones(3)}
    if with_zero:
        zero = fshard.zero(tx, mesh)
        zero.step(params, zero.init(params), params)
        return
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
    fshard.train_step(lambda p, x: p["w"].sum() * x.mean(), tx)(state, torch.ones(2))


@pytest.mark.parametrize("with_zero", [False, True])
def test_what_would_differ_between_copies_is_an_error(with_zero):
    """Nothing says which random numbers of a whole tree ranks share, nor those of ZeRO, which has no seed."""
    match = (
        r"zero: .*draws random numbers.*train_step" if with_zero else r"over='tree' draws random numbers.*optim.chain"
    )
    with pytest.raises(ValueError, match=match):
        simulated(refused, noise("elements" if with_zero else "tree"), with_zero, shard=2)
    simulated(refused, noise("tree"), with_zero, shard=1)


def test_a_norm_of_all_and_noise_are_two_transformations():
    """Leaves that draw are updated one by one: a norm of all of them would be that of one, on one device, too."""

    def update(g: Any, s: Any, p: Any = None, **_: Any) -> Any:
        norm = sum(x.square().sum() for x in tree.leaves(g)) ** 0.5
        return tree.map(lambda x: x / norm + torch.randn_like(x), g), s

    with pytest.raises(
        ValueError, match=r"depends on other leaves .*and draws random numbers, but leaves are updated one"
    ):
        refused(None, optim.Transform(lambda p: (), update), False)
