"""Which leaves train: what a leaf says of itself, beside leaves that say the same or something else."""

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from support.says import says
from support.worlds import simulated
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fshard
from fshard import optim, tree
from fshard.module import functionalize
from fshard.testing import simulate

W = torch.linspace(1, 2, 3)


def still(x: Tensor) -> nn.Parameter:
    """A parameter that requires no gradient."""
    return nn.Parameter(x, requires_grad=False)


def gathered(x: Tensor) -> Any:
    """A parameter that was trained, and is whole again."""
    params = {"x": nn.Parameter(x)}
    return fshard.gather_params(fshard.shard_params(params, fshard.make_plan(params)))["x"]


def fake(x: Tensor) -> Tensor:
    """A tensor without values."""
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


# leaves by what they say: a gradient, none, or nothing; integers have none
LEAVES: dict[str, dict[str, Callable[[], Any]]] = {
    "trains": {
        "parameter": lambda: nn.Parameter(W.clone()),
        "requires_grad_": lambda: W.clone().requires_grad_(),
        "of a graph": lambda: nn.Parameter(W) * 2,
        "tied to a plain tensor": lambda: (lambda x: [x.detach(), x])(nn.Parameter(W.clone())),
        "meta": lambda: nn.Parameter(W.to("meta")),
        "fake": lambda: fake(nn.Parameter(W)),
    },
    "still": {
        "parameter": lambda: still(W.clone()),
        "buffer": lambda: nn.Buffer(W.clone()),
        "tied to a plain tensor": lambda: (lambda x: [x.detach(), x])(still(W.clone())),
        "fake": lambda: fake(still(W)),
    },
    "nothing": {
        "plain": W.clone,
        "0-d": lambda: torch.tensor(2.0),
        "complex": lambda: torch.ones(2, dtype=torch.complex64),
        "gathered": lambda: gathered(W.clone()),
        "detached": lambda: nn.Parameter(W.clone()).detach(),
        "of a state dict": lambda: nn.LayerNorm(2).state_dict()["weight"],
        "cast": lambda: still(W).double(),
        "statistics": lambda: functionalize(nn.BatchNorm1d(2))[2]["running_var"],
        "meta": lambda: W.to("meta"),
        "fake": lambda: fake(W),
    },
    "integer": {
        "int": lambda: torch.tensor([1, 2]),
        "bool": lambda: torch.tensor(True),
        "parameter": lambda: still(torch.tensor([1, 2])),
    },
}
COMPANY: dict[str, Callable[[], Any]] = {
    "alone": dict,
    "integers": lambda: {"n": torch.arange(3)},
    "plain": lambda: {"w": torch.ones(2), "b": torch.tensor(1.0)},
    "module": lambda: functionalize(nn.LayerNorm(2))[1],
    "partly frozen": lambda: {"w": nn.Parameter(torch.ones(2)), "b": still(torch.ones(2))},
    "frozen": lambda: {"w": still(torch.ones(2))},
}
ERROR = "ValueError"
# by what the leaf says, in the order of COMPANY; where no leaf requires a gradient, those of a frozen module train
DECIDED: dict[str, dict[str, str]] = {
    "of themselves": {
        "trains": f"moves moves {ERROR} moves moves moves",
        "still": f"moves moves {ERROR} stays stays moves",
        "nothing": f"moves moves moves {ERROR} {ERROR} {ERROR}",
        "integer": "stays stays stays stays stays stays",
    },
    "frozen=x": {
        "trains": f"stays stays stays stays {ERROR} {ERROR}",
        "still": "stays stays stays stays stays stays",
        "nothing": "stays stays stays stays stays stays",
        "integer": "stays stays stays stays stays stays",
    },
    "frozen=company": {
        "trains": f"- moves moves moves {ERROR} moves",
        "still": f"- moves moves {ERROR} {ERROR} moves",
        "nothing": f"- moves moves moves {ERROR} moves",
        "integer": f"- stays stays stays {ERROR} stays",
    },
}
ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "of themselves": [{}, {"frozen": []}],
    "frozen=x": [{"frozen": "x"}],
    "frozen=company": [{"frozen": "company"}],
}


def loss(p: Any, *_: Any) -> Tensor:
    """A loss in which every leaf has a gradient that is not zero."""
    leaves = [x for x in tree.leaves(p) if x.is_floating_point() or x.is_complex()]
    return sum((x.abs().double().square().sum() for x in leaves), torch.zeros((), dtype=torch.float64))


def plan_says(params: Any, plan: fshard.Plan) -> str:
    """What a plan says of the leaf x."""
    slot = plan.slots[plan.leaves[next(i for i, path in enumerate(plan.paths) if path.split(".")[0] == "x")]]
    return "moves" if plan.kinds[slot.kind].trainable else "stays"


def becomes(params: Any, mesh: Any, how: dict[str, Any]) -> str:
    """What becomes of the leaf x in a step; a step without a leaf that trains is an error of its own."""
    plan = fshard.make_plan(params, mesh, **how)
    said = plan_says(params, plan)
    (x, *_), tx = tree.leaves(params["x"]), optim.sgd(0.1)
    if x.is_meta or type(x) not in (Tensor, nn.Parameter, nn.Buffer) or not any(kind.trainable for kind in plan.kinds):
        return said
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    after = fshard.gather_params(fshard.train_step(loss, tx)(state, torch.ones(mesh.size() if mesh else 1))[0].params)
    moved = not all(torch.equal(a, b) for a, b in zip(tree.leaves(after["x"]), tree.leaves(params["x"]), strict=True))
    assert moved == (said == "moves")
    return said


def run(mesh: Any, said: str, how: str) -> None:
    """Every leaf that says this, in each company."""
    for leaf, (number, company), kwargs in product(LEAVES[said], enumerate(COMPANY), ARGUMENTS[how]):
        wanted = DECIDED[how][said].split()[number]
        params = {"x": LEAVES[said][leaf](), "company": COMPANY[company]()}
        if wanted == ERROR:
            with pytest.raises(ValueError, match=r"nothing says whether they train|frozen: leaf"):
                fshard.make_plan(params, mesh, **kwargs)
        elif wanted != "-":
            assert becomes(params, mesh, kwargs) == wanted, (leaf, company)


@pytest.mark.parametrize("how", DECIDED)
@pytest.mark.parametrize("said", LEAVES)
def test_every_leaf_trains_is_frozen_or_refused(said: str, how: str) -> None:
    """An embedding table beside a module would be frozen without a word."""
    run(None, said, how)
    simulated(run, said, how, shard=2)


@pytest.mark.parametrize("partition", ["flat", "leaf"])
def test_zero_decides_as_a_plan(partition: Any) -> None:
    """A leaf would train with a plan and stay with ZeRO."""
    for said, (number, company) in product(LEAVES, enumerate(COMPANY)):
        for leaf, make in LEAVES[said].items():
            params = {"x": make(), "company": COMPANY[company]()}
            flat = tree.leaves(params)
            if len(params["x"].shape if isinstance(params["x"], Tensor) else ()) == 0 or leaf in ("meta", "fake"):
                continue
            tx, wanted = fshard.zero(optim.sgd(0.1), None, partition), DECIDED["of themselves"][said].split()[number]
            if wanted == ERROR:
                says(lambda tx=tx, params=params: tx.init(params), ValueError, "nothing says whether they train")
                continue
            grads = tree.map(lambda x: torch.ones_like(x) if x.is_floating_point() or x.is_complex() else None, params)
            after, _ = tx.step(grads, tx.init(params), params)
            assert torch.equal(tree.leaves(after["x"])[0], flat[0]) == (wanted == "stays"), (said, leaf, company)


REMEDIES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], bool]] = {
    "nn.Parameter(x)": (lambda p: {**p, "x": nn.Parameter(p["x"])}, {}, True),
    "x.requires_grad_()": (lambda p: {**p, "x": p["x"].requires_grad_()}, {}, True),
    "frozen=": (lambda p: p, {"frozen": ["x"]}, False),
    "nn.Parameter(x, requires_grad=False)": (lambda p: {**p, "x": still(p["x"])}, {}, False),
    "tree.map(torch.Tensor.detach, params)": (lambda p: tree.map(torch.Tensor.detach, p), {}, True),
}


@pytest.mark.parametrize("words", REMEDIES)
def test_the_error_names_the_leaves_and_what_to_do(words: str) -> None:
    """Who reads it would not know which leaf is meant, or be told what does not help."""
    params = {"x": W.clone(), "net": functionalize(nn.Linear(2, 2))[1]}
    says(lambda: fshard.make_plan(params), ValueError, "'x'", "1 of 3", "'net.", words)
    remedy, kwargs, trains = REMEDIES[words]
    fixed = remedy(params)
    assert plan_says(fixed, fshard.make_plan(fixed, **kwargs)) == ("moves" if trains else "stays")
    many = {"x": [W.clone() for _ in range(20)], "net": params["net"]}
    says(lambda: fshard.make_plan(many), ValueError, "'x.0', 'x.1'", "and so on: 20 of 22")


def test_a_trained_backbone_beside_a_new_head() -> None:
    """Transfer learning would train the head alone."""
    back, head = (functionalize(nn.Linear(2, 2))[1] for _ in range(2))
    whole = fshard.gather_params(fshard.shard_params(back, fshard.make_plan(back)))
    says(lambda: fshard.make_plan({"back": whole, "head": head}), ValueError, "'back.weight', 'back.bias'", "2 of 4")
    again = tree.map(torch.Tensor.detach, {"back": whole, "head": head})
    for params, frozen, number in ((again, None, 4), (again, ["back"], 2), ({"back": whole, "head": head}, "back", 2)):
        plan = fshard.make_plan(params, frozen=frozen)
        assert sum(plan.kinds[slot.kind].trainable for slot in plan.slots) == number


LABELS: dict[str, Any] = {
    "patterns": {"base.**": "slow", "**": "fast"},
    "whole subtrees": {"base": "slow", "head": "fast"},
    "function": lambda path, x: "slow" if path.startswith("base") else "fast",
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("frozen", [None, "base.w", "base", "head"])
def test_a_label_of_frozen_leaves_alone_is_told(frozen: Any, labels: str) -> None:
    """A learning rate for leaves that do not train would do nothing without a word."""
    params = {"base": {"w": W, "b": W + 1}, "head": W + 2}
    sharded = fshard.shard_params(params, fshard.make_plan(params, frozen=frozen))
    txs = {"slow": optim.sgd(0.1), "fast": optim.sgd(1.0), "unused": optim.sgd(1.0)}
    if labels == "function":
        del txs["unused"]
    of = {"base": ("slow", "'base.w', 'base.b'"), "head": ("fast", "'head'")}
    for tx in (
        optim.by_label(txs, LABELS[labels]),
        optim.chain(optim.clip_by_global_norm(1.0), optim.by_label(txs, LABELS[labels])),
    ):
        if frozen not in of:
            fshard.init_state(sharded, tx)
            continue
        label, paths = of[frozen]
        with pytest.warns(
            UserWarning, match=f"by_label: no leaf that trains has the label '{label}'; frozen are {paths}"
        ):
            fshard.init_state(sharded, tx)


@pytest.mark.parametrize("mask", [{"base": True, "head": False}, lambda path, x: path.startswith("base")])
def test_a_mask_of_frozen_leaves_alone_is_told(mask: Any) -> None:
    """Weight decay of frozen leaves would do nothing; a mask that leaves out frozen leaves alone is as it should be."""
    params = {"base": {"w": W, "b": W + 1}, "head": W + 2}
    tx = optim.masked(optim.add_decayed_weights(0.1), mask)
    with pytest.warns(UserWarning, match="the label True; frozen are 'base.w', 'base.b'"):
        fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, frozen="base")), tx)
    fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, frozen="head")), tx)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("frozen", [None, "head"])
@pytest.mark.parametrize("nested", ["by_label", "masked", "muon"])
def test_a_leaf_of_another_label_is_not_frozen(nested: str, frozen: str | None, ranks: int) -> None:
    """A label within a label was told that the leaves of other labels are frozen; what is frozen is still told."""
    params = {"base": {"w": torch.ones(2, 2), "v": W + 1}, "head": W + 2}
    slow = {
        "by_label": lambda: optim.by_label({"a": optim.sgd(0.1), "b": optim.sgd(1.0)}, {"base.**": "a", "head": "b"}),
        "masked": lambda: optim.masked(optim.sgd(0.1), lambda path, x: path != "head"),
        "muon": lambda: optim.muon(0.1),
    }[nested]
    tx = optim.by_label({"slow": slow(), "fast": optim.sgd(1.0)}, lambda path, x: "slow" if "w" in path else "fast")

    def begun(mesh: Any) -> None:
        fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, frozen=frozen)), tx)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulate(begun, shard=ranks)
    told = ["the label 'b'; frozen are 'head'" in str(each.message) for each in caught]
    assert told == [True] * ranks * (nested == "by_label" and frozen is not None)
