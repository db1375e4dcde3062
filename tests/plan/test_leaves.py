"""Leaves that are one tensor (tied), leaves that share memory in other ways, and leaves that are frozen."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import same_bits
from support.says import says
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fshard
from fshard import optim, tree
from fshard.core.storage import share_elements

F = nn.functional


def tied_module() -> nn.Module:
    """A module with tied embedding and head, a norm with a frozen bias, and a frozen embedding."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 3),
            "norm": nn.LayerNorm(3),
            "still": nn.Embedding(5, 3),
            "head": nn.Linear(3, 5, False),
        }
    )
    module["head"].weight = module["embed"].weight
    module["norm"].bias.requires_grad_(False)
    module["still"].requires_grad_(False)
    return module.double()


def loss(p: Any, batch: Tensor) -> fshard.Mean:
    """The cross entropy of the next token."""
    x = F.embedding(batch, p["embed.weight"]) + F.embedding(batch, p["still.weight"])
    x = F.layer_norm(x, (3,), p["norm.weight"], p["norm.bias"])
    logits = x @ p["head.weight"].T
    return fshard.Mean(F.cross_entropy(logits, (batch + 1) % 5, reduction="sum"), len(batch))


def batch(step: int, rank: int) -> Tensor:
    """Tokens that differ on every rank, and in number."""
    return (torch.arange(3 + rank) * (step + 2) + rank) % 5


TREES: dict[str, Any] = {
    "state_dict": lambda m: dict(m.state_dict()),
    "named_parameters": lambda m: dict(m.named_parameters(remove_duplicate=False)),
    "detach": lambda m: {k: x.detach() for k, x in m.named_parameters(remove_duplicate=False)},
    "data": lambda m: {k: x.data for k, x in m.named_parameters(remove_duplicate=False)},
}


def expected(module: nn.Module, num_ranks: int, lr: float, frozen: bool) -> dict[str, Tensor]:
    """The parameters after three steps of torch's SGD on all ranks' tokens; without `frozen` all of them train."""
    for x in module.parameters():
        x.requires_grad_(x.requires_grad or not frozen)
    optimizer = torch.optim.SGD([x for x in module.parameters() if x.requires_grad], lr)
    for step in range(3):
        optimizer.zero_grad()
        batches = [batch(step, rank) for rank in range(num_ranks)]
        given = dict(module.named_parameters(remove_duplicate=False))
        total = sum(loss(given, b).total for b in batches) / sum(len(b) for b in batches)
        total.backward()
        optimizer.step()
    return {k: x.detach() for k, x in module.state_dict().items()}


def trained(mesh: Any, name: str, kwargs: dict[str, Any]) -> None:
    """Assert that the module trains as with torch: tied weights stay tied, frozen weights keep their bits."""
    module, rank = tied_module(), mesh.get_rank()
    params = TREES[name](module)
    start = {k: x.detach().clone() for k, x in params.items()}
    plan = fshard.make_plan(params, mesh, **kwargs)
    assert len(plan.slots) == len(params) - 1
    tx = optim.sgd(0.5)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(loss, tx)
    for number in range(3):
        state, _ = step(state, batch(number, rank))
    got = fshard.gather_params(state.params)
    assert got["embed.weight"] is got["head.weight"]
    reads = name == "named_parameters"
    for key, want in expected(module, mesh.size(), 0.5, frozen=reads).items():
        torch.testing.assert_close(got[key].detach(), want, rtol=1e-12, atol=1e-12)
        still = reads and key in ("norm.bias", "still.weight")
        assert same_bits(got[key].detach(), start[key]) == still, key


CUTS: dict[str, dict[str, Any]] = {
    "full": {"units": ["embed*", "norm*"]},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "zero1": {"params_over": (), "grads_over": ()},
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_modules_parameters_train_as_torchs(name: str, num: int) -> None:
    """A module's tied and frozen parameters train as with torch: otherwise tied weights would drift apart."""
    for cut in CUTS.values():
        simulated(trained, name, cut, shard=num)


def in_processes(mesh: Any) -> None:
    """The same training in processes."""
    for name in ("state_dict", "named_parameters"):
        trained(mesh, name, CUTS["full"])


def test_in_processes() -> None:
    """Two gloo processes train tied and frozen parameters as torch: otherwise only simulated ranks would be right."""
    gloo(in_processes)


@pytest.mark.parametrize("places", [*product([True, False], repeat=3)])
def test_a_tied_leaf_is_frozen_if_no_place_requires_a_gradient(places: tuple[bool, ...]) -> None:
    """A leaf that is detached in one of its places trains: otherwise the order of the places would freeze it."""
    w = nn.Parameter(torch.ones(2))
    params = {"first": torch.ones(2, requires_grad=True)}
    still = nn.Parameter(w.detach(), requires_grad=False)
    params |= {str(number): w if requires else still for number, requires in enumerate(places)}
    assert _frozen(fshard.make_plan(params)) == (set() if any(places) else {"0"})


def test_frozen_leaves_have_no_state() -> None:
    """Frozen leaves have no optimizer state and keep their bits: otherwise fine-tuning would waste memory."""
    params = dict(tied_module().named_parameters())
    tx = optim.adam(0.1)
    still = {"norm.bias", "still.weight"}

    def run(mesh: Any) -> None:
        state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh)), tx)
        whole = optim.state.gather_state(state.opt_state)
        assert {k.removeprefix("mu.") for k in whole if k.startswith("mu.")} == params.keys() - still
        for partition in ("flat", "leaf"):
            ztx = fshard.zero(tx, mesh, partition)
            start = ztx.init(params)
            names = {k.removeprefix("mu.") for k in optim.state.gather_state(start) if k.startswith("mu.")}
            assert names == params.keys() - still
            grads = {k: None if k in still else torch.ones_like(x) for k, x in params.items()}
            after, _ = ztx.step(grads, start, params)
            assert {k for k in params if same_bits(after[k].detach(), params[k].detach())} == still

    simulated(run, shard=2)


def test_frozen_against_requires_grad() -> None:
    """`frozen=` may not contradict a partly frozen tree: otherwise a leaf that is marked as frozen would train."""
    module = tied_module()
    params = dict(module.named_parameters())
    words = ["frozen: leaf 'embed.weight' requires a gradient", "leaf 'norm.bias'", "does not", "requires_grad"]
    says(lambda: fshard.make_plan(params, frozen="embed*"), ValueError, *words)
    plan = fshard.make_plan(params, frozen="still*")  # agrees with requires_grad
    assert _frozen(plan) == {"norm.bias", "still.weight"}
    module.requires_grad_(True)
    assert _frozen(fshard.make_plan(params, frozen="embed*")) == {"embed.weight"}
    assert _frozen(fshard.make_plan(TREES["data"](module), frozen="norm*")) == {"norm.weight", "norm.bias"}
    # a tied leaf trains if it requires a gradient at any path; integers never train, and their flags mean nothing
    w = torch.ones(2, requires_grad=True)
    c = nn.Parameter(torch.ones(1), requires_grad=False)
    assert _frozen(fshard.make_plan({"a": w.detach(), "b": w, "n": torch.tensor(1), "c": c})) == {"c", "n"}


def _frozen(plan: fshard.Plan) -> set[str]:
    return {slot.path for slot in plan.slots if not plan.kinds[slot.kind].trainable}


W = torch.arange(12.0).view(3, 4)
APART = {
    "columns": {"a": W[:, :2], "b": W[:, 2:]},
    "rows": {"a": W[0], "b": W[1:]},
    "every other": {"a": W.view(-1)[::2], "b": W.view(-1)[1::2]},
    "empty": {"a": W[:0], "b": W[:0], "c": W},
    "parts": {"a": torch.view_as_real(torch.ones(3, dtype=torch.complex64))[:, 0], "b": torch.ones(3)},
}
OVERLAP = {
    "rows": {"a": W[:2], "b": W[1:]},
    "transposed": {"a": W, "b": W.T},
    "shape": {"a": W, "b": W.view(-1)},
    "expanded": {"a": W[0, :1].expand(3), "b": W[0, :1].expand(4)},
    "bits": {"a": W, "b": W.view(torch.int32)},
    "inside": {"a": W, "b": W[1, 1:3]},
}


@pytest.mark.parametrize("name", APART)
def test_leaves_that_share_storage_and_nothing_else(name: str) -> None:
    """Views of one tensor that do not overlap are separate leaves: otherwise a fused weight could not be split."""
    params = APART[name]
    plan = fshard.make_plan(params)
    assert len(plan.slots) == len(params)
    assert same_bits(tree.leaves(fshard.gather_params(fshard.shard_params(params, plan))), tree.leaves(params))


@pytest.mark.parametrize("name", OVERLAP)
def test_leaves_that_share_a_part(name: str) -> None:
    """Leaves that overlap are an error that names both: otherwise an update of one would alter the other."""
    words = ["leaves ", "share memory", "shapes", ".clone()"]

    def run(mesh: Any) -> None:
        tx = fshard.zero(optim.sgd(0.1), mesh)
        for call in (lambda: fshard.make_plan(OVERLAP[name], mesh), lambda: tx.init(OVERLAP[name])):
            says(call, ValueError, *words)
            with pytest.raises(ValueError, match=r"'a'.*'b'|'b'.*'a'"):
                call()

    run(None)
    simulated(run, shard=2)


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), max_size=3)


@given(shapes, st.integers(0, 9), shapes, st.integers(0, 9))
def test_views_share_elements_if_they_have_an_element_in_common(
    dims: Sequence[tuple[int, int]], begin: int, other_dims: Sequence[tuple[int, int]], other_begin: int
) -> None:
    """Two leaves would be updated in one place, or an error would refuse two that have nothing in common."""
    row = torch.arange(60)
    views = (dims, begin), (other_dims, other_begin)
    x, y = (row.as_strided([size for size, _ in d], [stride for _, stride in d], b) for d, b in views)
    expected = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
    assert share_elements(x, y) == expected
    with FakeTensorMode():  # where tensors have no values
        assert share_elements(x, y) == expected


def test_columns_of_a_large_matrix_have_no_common_element() -> None:
    """A plan on the meta device would take a byte of memory for each byte of a matrix: here 256 GiB."""
    columns = torch.empty(4, 2**34, device="meta").chunk(2, dim=1)
    assert len(fshard.make_plan({"a": columns[0], "b": columns[1]}).slots) == 2


def test_a_dimension_of_size_1_has_any_stride() -> None:
    """Two views of the same elements would be refused for strides that mean nothing."""
    x = torch.ones(3, 1)
    y = x.as_strided((3, 1), (1, 7))
    assert fshard.make_plan({"a": x, "b": y}).leaves == (0, 0)


def test_conjugates_are_no_ties() -> None:
    """A tensor and its conjugate are an error, not a tie: otherwise both leaves would get the same values."""
    x = torch.ones(2, dtype=torch.complex64)
    says(lambda: fshard.make_plan({"a": x, "b": x.conj()}), ValueError, "'a'", "'b'", "share memory")


@pytest.mark.parametrize("place", ["first", "second"])
@pytest.mark.parametrize("option", ["frozen", "whole", "offload", "policy", "by_label", "function"])
def test_what_selects_one_place_of_a_tied_leaf_selects_the_leaf(option: str, place: str) -> None:
    """The option would do nothing without a word where it names the second place: a frozen leaf would train."""
    weight = torch.ones(3, 2)
    params = {"first": {"w": weight}, "second": {"w": weight}, "other": torch.ones(2)}

    def run(mesh: Any) -> None:
        if option in ("by_label", "function"):
            labels: Any = {place: "still", "**": "moves"}
            if option == "function":
                labels = lambda path, x: "still" if path.startswith(place) else "moves"  # noqa: E731
            tx = optim.by_label({"still": optim.sgd(0.0), "moves": optim.sgd(0.1)}, labels)
            sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
            if place == "second" or option == "function":
                with pytest.raises(ValueError, match=r"leaf 'second.w' is tied to 'first.w', and their labels are"):
                    tx.init(sharded)
                return
            assert optim.state.state_dict(tx.init(sharded), sharded)["param_groups"][0]["params"] == ["first.w"]
            return
        option_of = {"policy": fshard.Policy(overrides=[(place, "compute=bf16")])}
        plan = fshard.make_plan(params, mesh, **{option: option_of.get(option, place)})
        kind = plan.kinds[plan.slots[0].kind]
        assert {
            "frozen": not kind.trainable,
            "whole": kind.whole,
            "offload": kind.host,
            "policy": kind.precision.compute == torch.bfloat16,
        }[option]

    with pytest.warns(UserWarning, match="is the same tensor as") if option == "frozen" else nullcontext():
        simulated(run, shard=2)


PLAYER = {"blocks": [{"w": torch.ones(3, 2)}, {"w": torch.ones(3, 2)}], "steps": torch.tensor(1)}
STILL = nn.Parameter(torch.ones(2), requires_grad=False)
# params, `frozen`, and the two paths, number of leaves in the warning, if any
CHOICES: dict[str, tuple[Any, Any, tuple[str, str, int] | None]] = {
    "a reference": (
        {"actor": PLAYER, "critic": torch.ones(2), "reference": PLAYER},
        ["reference"],
        ("reference.blocks.0.w", "actor.blocks.0.w", 2),
    ),
    "the first place": (
        {"actor": PLAYER, "reference": PLAYER},
        "actor",
        ("actor.blocks.0.w", "reference.blocks.0.w", 2),
    ),
    "one block": (
        {"actor": PLAYER, "reference": PLAYER},
        lambda path, part: path == "reference.blocks.1",
        ("reference.blocks.1.w", "actor.blocks.1.w", 1),
    ),
    "three places": (dict.fromkeys("abc", PLAYER["blocks"][0]), ["a", "b"], ("b.w", "c.w", 1)),
    "both places": ({"actor": PLAYER, "reference": PLAYER}, ["reference", "actor"], None),
    "all": ({"actor": PLAYER, "reference": PLAYER}, "**", None),
    "a clone": ({"actor": PLAYER, "reference": tree.map(torch.clone, PLAYER)}, ["reference"], None),
    "without frozen": ({"actor": PLAYER, "reference": PLAYER}, None, None),
    "integers alone": ({"a": PLAYER["steps"], "b": PLAYER["steps"], "w": torch.ones(1)}, "a", None),
    "frozen by the tree": ({"a": STILL, "b": STILL, "w": nn.Parameter(torch.ones(1))}, "a", None),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_leaf_that_is_frozen_by_its_tie_is_told(name: str) -> None:
    """An actor that shares its tensors with a frozen reference would not train, without a word."""
    params, frozen, words = CHOICES[name]

    def run(mesh: Any) -> Any:
        return fshard.make_plan(params, mesh, frozen=frozen)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plans = simulated(run, shard=2)
    assert len(caught) == (0 if words is None else len(plans))  # one for each plan
    for each in caught:
        named, other, number = words
        expected = f"frozen: leaf {named!r} is the same tensor as {other!r}, outside of frozen=, so both are frozen"
        assert str(each.message).startswith(f"{expected} ({number} such leaves). To train one, clone it")
        assert (each.filename, each.lineno) == (__file__, run.__code__.co_firstlineno + 1)


def test_ties_of_meta_tensors() -> None:
    """Ties of meta and fake tensors are found: otherwise a plan that is made without memory would lose them."""
    x = torch.empty(3, 4, device="meta")
    assert len(fshard.make_plan({"a": x, "b": x.detach(), "c": torch.empty(3, 4, device="meta")}).slots) == 2
    with torch._subclasses.FakeTensorMode():
        y = torch.empty(3, 4)
        assert len(fshard.make_plan({"a": y, "b": y.detach(), "c": torch.empty(3, 4)}).slots) == 2


def test_ties_are_checked_when_leaves_are_sharded() -> None:
    """Sharding checks the ties of the plan, and ZeRO refuses ties: otherwise the value of one leaf would be lost."""
    w = torch.ones(2)
    plan = fshard.make_plan({"embed": w, "head": w})
    got = fshard.gather_params(fshard.shard_params({"embed": w, "head": w.detach()}, plan))
    assert got["embed"] is got["head"]
    untied = {"embed": w, "head": w.clone()}
    says(lambda: fshard.shard_params(untied, plan), ValueError, "leaf 'head'", "the very tensor of 'embed'")
    ties = {"embed": w, "head": w.data}
    says(lambda: fshard.zero(optim.sgd(0.1)).init(ties), ValueError, "'embed' and 'head' are the same tensor")


def test_units_of_empty_subtrees() -> None:
    """A pattern may name a subtree without leaves: otherwise a layer without parameters would need another plan."""
    params = {"w": torch.ones(2), "norm": {}, "bias": None, "blocks": [{"a": torch.ones(1)}, {}]}
    plan = fshard.make_plan(params, units=["norm", "bias", "blocks.*"], whole="norm", frozen=["bias"])
    assert [unit.name for unit in plan.units] == ["(first)", "blocks.0"]
    assert _frozen(plan) == set()
    says(lambda: fshard.make_plan(params, units="norms"), ValueError, "units: the pattern 'norms' matches nothing")


def test_gathering_a_tree_with_sharded_trees_in_it() -> None:
    """`gather_params` gathers every Sharded in a tree: otherwise users would have to gather an average by hand."""
    params = {"w": torch.ones(2)}
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    got = fshard.gather_params({"ema": sharded, "best": [sharded["w"], torch.zeros(1)], "step": 3})
    assert got["ema"]["w"].tolist() == [1, 1]
    assert got["best"][0].tolist() == [1, 1]
    assert got["step"] == 3


def sparse_loss(p: Any, batch: Tensor, sparse: bool = True) -> fshard.Sum:
    """A loss with an embedding, which is read before and after the head, and some of its rows twice."""
    scaled = F.embedding(batch, p["embed"], sparse=sparse) * p["head"]
    return fshard.Sum((scaled + F.embedding(batch.flip(0), p["embed"], sparse=sparse)).square().sum())


def sparse_and_dense(mesh: Any) -> None:
    """Assert that a sparse gradient of an embedding gives the bits of a dense one."""
    rank = 0 if mesh is None else mesh.get_rank()
    params = {"embed": torch.arange(10.0).view(5, 2), "head": torch.tensor([1.0, 2.0])}
    for units in ("embed", None):
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=units))
        found = [
            fshard.gather_params(
                fshard.value_and_grad(lambda p, x, s=s: sparse_loss(p, x, s))(sharded, batch(1, rank))[1]
            )
            for s in (True, False)
        ]
        assert same_bits(*found)
        assert found[0]["embed"].count_nonzero()


@pytest.mark.parametrize("num", [1, 2, 3])
def test_sparse_gradients_are_made_dense(num: int) -> None:
    """A sparse gradient of an embedding is reduced as a dense one: otherwise `sparse=True` would fail on ranks."""
    sparse_and_dense(None)
    simulated(sparse_and_dense, shard=num)
