"""A state may keep what an update was given: parameters, and the old values of its other fields, in any place.

The reference is the same update of copies, of plain dicts on one device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard
from fshard import optim, tree
from fshard.optim import Transform

Make = Callable[[str | None], Transform]


def _zeros(p: Any) -> Any:
    return tree.map(torch.zeros_like, p)


def _own(init: Callable[[Any], Any], update: Callable[[Any, Any, Any], Any]) -> Make:
    return lambda over: Transform(init, lambda g, state, p=None, **extra: update(g, state, p), over=over)


def _by_iterates(rate: float) -> Make:
    """Heavy ball, by the parameters of the step before."""

    def update(g: Any, old: Any, p: Any) -> tuple[Any, Any]:
        return tree.map(lambda g, p, q: rate * (g - 5 * (p - q)), g, p, old), p

    return _own(lambda p: p, update)


def _two_moments(first: int) -> Make:
    """The newest moment and the one before it, the newest as field `first`."""

    def update(g: Any, state: Any, p: Any) -> tuple[Any, Any]:
        new = tree.map(lambda m, g: 0.5 * m + g, state[first], g)
        kept = (new, state[first]) if first == 0 else (state[first], new)
        return tree.map(lambda m, q: -0.1 * m - 0.05 * q, new, state[1 - first]), kept

    return _own(lambda p: (_zeros(p), _zeros(p)), update)


def _rotated(g: Any, state: Any, p: Any) -> tuple[Any, Any]:
    a, b, c = state
    return tree.map(lambda g, a, b, c: -0.1 * (g + a - 0.3 * b + 0.2 * c), g, a, b, c), (b, c, a)


KEPT: dict[str, Make] = {
    "parameters": _by_iterates(-0.1),
    "parameters, as views": _own(
        lambda p: p,
        lambda g, q, p: (tree.map(lambda g, p, q: p - q - g / 9, g, p, q), tree.map(torch.Tensor.detach, p)),
    ),
    "old moment last": _two_moments(0),
    "old moment first": _two_moments(1),
    "its updates": _own(_zeros, lambda g, m, p: (new := tree.map(lambda m, g: 0.5 * m + g, m, g), new)),
    "rotated": _own(lambda p: (_zeros(p), tree.map(torch.ones_like, p), _zeros(p)), _rotated),
}

WAYS: dict[str, Callable[[Make, str | None], Transform]] = {
    "alone": lambda make, over: make(over),
    "before sgd": lambda make, over: optim.chain(optim.scale(-1.0), make(over), optim.sgd(0.3, momentum=0.5)),
    "before a clip": lambda make, over: optim.chain(optim.scale(-1.0), make(over), optim.clip_by_global_norm(0.1)),
    "behind sgd": lambda make, over: optim.chain(optim.sgd(0.1), optim.scale(-1.0), make(over)),
    "labelled": lambda make, over: optim.by_label(
        {True: make(over), False: optim.chain(make(over), optim.scale(-1.0), optim.sgd(0.3))},
        lambda path, leaf: leaf.ndim > 1,
    ),
    "in hyperparams": lambda make, over: optim.with_hyperparams(
        lambda factor: optim.chain(make(over), optim.scale(factor)), factor=0.5
    ),
}


def _params() -> Any:
    values = torch.linspace(-1, 1, 23, dtype=torch.float64).sin()
    return {"a": [values[:6].view(3, 2), values[6:9]], "b": values[9:].view(7, 2)}


def _loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(((leaf - x) ** 2).sum() for leaf in tree.leaves(p)) / 3


def _expected(tx: Transform, batches: list[list[torch.Tensor]]) -> Any:
    p = _params()
    state = tree.map(torch.clone, tx.init(p))
    for xs in batches:
        grads = torch.func.grad(lambda p, xs=xs: sum(_loss(p, x) for x in xs) / len(xs))(p)
        updates, state = tx.update(*tree.map(torch.clone, (grads, state, p)))
        p, state = tree.map(torch.clone, (optim.apply_updates(p, updates), state))
    return p


def _steps(how: str, tx: Transform, mesh: Any, xs: list[torch.Tensor], strategy: dict[str, Any]) -> Any:
    if how.startswith(("tree", "zero")):
        if how.startswith("zero"):
            tx = fshard.zero(tx, mesh, "leaf" if "leaf" in how else "flat", grads="local")
        p, ranks = _params(), 1 if mesh is None else mesh.size()
        state = tx.init(p)
        for x in xs:
            grads = torch.func.grad(lambda p, x=x: _loss(p, x) / ranks)(p)
            p, state = tx.step(grads, state, p, donate=how.endswith("donated"))
        return p
    plan = fshard.make_plan(_params(), mesh, units=["a"], **strategy)
    state = fshard.init_state(fshard.shard_params(_params(), plan), tx)
    step = fshard.train_step(_loss, tx, donate=how != "plain", in_backward=how == "in backward")
    for x in xs:
        state, _ = step(state, x)
    return fshard.gather_params(state.params)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_state_keeps_is_not_overwritten(way: str, kept: str, ranks: int) -> None:
    """An update in place would write new parameters, or another field, before the state has the old ones."""
    batches = [[torch.tensor(step + rank / 3, dtype=torch.float64) for rank in range(ranks)] for step in range(3)]
    for over in ("elements", None):
        expected = _expected(WAYS[way](KEPT[kept], over), batches)
        hows = ["plain", "donated", "zero", "zero, donated", "zero by leaf", "zero by leaf, donated"]
        hows += ["tree", "tree, donated"] * (ranks == 1)
        for how in hows + ["in backward"] * (over == "elements" and way != "before a clip"):

            def on_rank(mesh: Any, how: str = how, over: str | None = over) -> Any:
                rank = 0 if mesh is None else mesh.get_rank()
                strategy = {"params_over": (), "grads_over": ()} if kept == "rotated" else {}
                return _steps(how, WAYS[way](KEPT[kept], over), mesh, [xs[rank] for xs in batches], strategy)

            for found in [on_rank(None)] if ranks == 1 else fshard.testing.simulate(on_rank, shard=ranks):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [optim.clip_by_global_norm, optim.clip_by_leaf_norm])
def test_the_last_of_a_chain_overwrites_no_updates(clip: Callable[[float], Transform]) -> None:
    """A step lends its gradients (`own_grads`) to the first transformation alone: the state may keep its updates."""
    tx, params = optim.chain(KEPT["its updates"]("elements"), clip(0.1)), {"w": torch.zeros(3)}
    updates, (kept, _) = tx.update({"w": torch.ones(3)}, tx.init(params), params, own_grads=True)
    assert torch.equal(kept["w"], torch.ones(3))
    assert not torch.equal(updates["w"], kept["w"])


def test_a_chain_updates_no_labels_in_the_backward() -> None:
    """The labels of its last part are not those of its state, a tuple."""
    tx = optim.chain(optim.scale(2.0), optim.masked(optim.sgd(0.1), lambda path, leaf: leaf.ndim > 1))
    state = fshard.init_state(fshard.shard_params(_params(), fshard.make_plan(_params())), tx)
    with pytest.raises(ValueError, match=r"in_backward=True\) with tx: expected a transformation with over='elements'"):
        fshard.train_step(_loss, tx, donate=True, in_backward=True)(state, torch.ones(()))
