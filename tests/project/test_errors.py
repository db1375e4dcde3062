"""A mistake is an error that names the leaf or the call, what was expected, what came, and what to do."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.says import says
from support.worlds import gloo, simulated
from torch.distributed.device_mesh import init_device_mesh

import fshard

pytestmark = pytest.mark.law


def params(dtype: torch.dtype = torch.float32, rows: int = 4, layers: int = 2) -> dict[str, Any]:
    """A root leaf and a list of blocks."""
    blocks = [{"w": torch.ones(rows, 3, dtype=dtype), "b": torch.zeros(3, dtype=dtype)} for _ in range(layers)]
    return {"blocks": blocks, "head": torch.ones(3, dtype=dtype)}


def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
    """A mean that says its count."""
    for block in p["blocks"]:
        x = torch.tanh(x @ block["w"] + block["b"]) @ torch.ones(3, 4)
    return fshard.Mean((x[:, :3] * p["head"]).sum(), x.shape[0])


def sharded(mesh: Any = None, **kwargs: Any) -> fshard.Sharded:
    """`params()` on a mesh."""
    whole = params()
    return fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"], **kwargs))


# --- trees that are not the plan's ---


def with_leaf(path: tuple[Any, ...], leaf: Any) -> dict[str, Any]:
    """`params()` with another leaf at one path."""
    whole = params()
    at: Any = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = leaf
    return whole


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (
            params(layers=1),
            ["lacks ['blocks.1.w', 'blocks.1.b']", "has nothing besides", "expected 5", "got 3", "Make"],
        ),
        (params(layers=3), ["lacks nothing", "['blocks.2.w', 'blocks.2.b'] besides", "Make the plan from this tree"]),
        ({"blocks": [], "tail": torch.ones(3)}, ["lacks", "'blocks.0.w'", "has ['tail']", "expected 5", "got 1"]),
        (torch.ones(3), ["lacks", "expected 5 leaves, got 1", "Make the plan"]),
        (
            with_leaf(("blocks", 1, "w"), torch.ones(3, 4)),
            ["leaf 'blocks.1.w'", "expected torch.float32 [4, 3]", "got torch.float32 [3, 4]", "convert the leaf"],
        ),
        (
            with_leaf(("head",), torch.ones(3, dtype=torch.float64)),
            ["leaf 'head'", "expected torch.float32 [3]", "got torch.float64 [3]", "Make the plan from this tree"],
        ),
        (
            with_leaf(("blocks", 0, "b"), torch.ones(3, device="meta")),
            ["leaf 'blocks.0.b'", "expected a tensor on cpu", "got one on meta", "Move it"],
        ),
        (with_leaf(("head",), 3.0), ["leaf 'head'", "expected torch.float32 [3]", "got float", "Make the plan"]),
    ],
)
def test_a_tree_that_is_not_the_plans(tree: Any, words: list[str]) -> None:
    """A tree that does not fit its plan is an error that names the leaf: otherwise shards would hold wrong elements."""
    plan = fshard.make_plan(params())
    says(lambda: fshard.shard_params(tree, plan), ValueError, *words)


def test_leaves_that_are_no_longer_tied() -> None:
    """A leaf that is no longer tied is an error that names both leaves: otherwise one weight would be lost."""
    shared = torch.ones(2)
    plan = fshard.make_plan({"embed": shared, "head": shared})
    untied = {"embed": torch.ones(2), "head": torch.ones(2)}
    words = ["leaf 'head'", "expected the very tensor of 'embed'", "got another one", "Tie them again"]
    says(lambda: fshard.shard_params(untied, plan), ValueError, *words)


@dataclass
class Unregistered:
    """A class that no pytree library knows."""

    w: Any


@pytest.mark.parametrize(
    ("leaf", "name"), [(Unregistered(torch.ones(2)), "Unregistered"), (3.0, "float"), ("abc", "str"), (len, "builtin")]
)
def test_leaves_that_are_no_tensors(leaf: Any, name: str) -> None:
    """A leaf that is no tensor is an error of make_plan that names it: otherwise a later call would fail unnamed."""
    tree = {"blocks": [{"w": torch.ones(2)}, {"w": leaf}]}
    words = ["leaf 'blocks.1.w'", "expected a tensor", f"got {name}", "register its type", "register_dataclass"]
    says(lambda: fshard.make_plan(tree), ValueError, *words)


def test_a_sparse_leaf() -> None:
    """A sparse leaf is an error that says to make it dense: otherwise sharding would fail inside torch."""
    tree = {"w": torch.ones(2, 2).to_sparse()}
    says(lambda: fshard.make_plan(tree), ValueError, "leaf 'w'", "expected a dense tensor", "sparse_coo", ".to_dense()")


# --- plans ---


@pytest.mark.parametrize("name", ["params_over", "grads_over", "state_over"])
def test_a_mesh_without_the_axis(name: str) -> None:
    """A wrong axis name is an error that lists the mesh's axes: otherwise users would see only a KeyError."""
    axes = {"params_over": (), "grads_over": (), "state_over": (), name: "model"}

    def plan(mesh: Any) -> Any:
        return fshard.make_plan(params(), mesh, **axes)

    words = [f"{name}='model'", "no axis 'model'", "'replicate', 'shard'", "mesh_dim_names"]
    says(lambda: simulated(plan, shard=2), ValueError, *words)


@pytest.mark.parametrize(
    ("over", "name", "before"),
    [
        ({"grads_over": ()}, "grads_over=()", "('shard',)"),
        ({"state_over": "replicate"}, "state_over='replicate'", "('shard',)"),
        ({"params_over": ("shard", "shard")}, "params_over=('shard', 'shard')", "once"),
    ],
)
def test_partitions_that_do_not_extend_one_another(over: dict[str, Any], name: str, before: str) -> None:
    """State is sharded at least as gradients, and these as parameters: otherwise no rank could update its shard."""
    words = [name, "must", before, "stays sharded from parameters to gradients to optimizer state"]
    says(lambda: simulated(lambda mesh: fshard.make_plan(params(), mesh, **over), shard=2), ValueError, *words)


def test_patterns_that_match_nothing() -> None:
    """A pattern that matches no leaf is an error: otherwise a misspelt unit would silently be part of the root."""
    for name in ("units", "whole", "frozen"):
        words = [f"{name}: the pattern 'block.*' matches nothing", "top level is 'blocks', 'head'"]
        says(lambda name=name: fshard.make_plan(params(), **{name: ["block.*"]}), ValueError, *words)
    says(lambda: fshard.make_plan(params(), units=0), ValueError, "units=0", "at least 1")


def test_patterns_of_a_flat_tree() -> None:
    """A state dict has flat names, which no pattern matches: the error would show hundreds of names, and no remedy."""
    flat = {f"layers.{i}.weight": torch.ones(2) for i in range(20)}
    for name in ("units", "whole", "frozen", "policy"):
        where = "; layers.*: compute=bf16" if name == "policy" else "layers.*"
        words = [
            "'layers.7.weight', ... (20 in all)",
            "It is flat",
            "fshard.module.functionalize(module) returns nested",
        ]
        says(lambda name=name, where=where: fshard.make_plan(flat, **{name: where}), ValueError, *words)


def test_a_mesh_of_another_size() -> None:
    """A plan on a mesh of another size is an error that names both: otherwise shards would be cut at wrong places."""
    plan = simulated(lambda mesh: fshard.make_plan(params(), mesh), shard=2)[0]
    words = ["made for a mesh with axes {'replicate': 1, 'shard': 2}", "'shard': 3", "make the plan again"]
    says(lambda: simulated(plan.on, shard=3), ValueError, *words)
    says(lambda: plan.on(None), ValueError, "'shard': 2", "this one has {}", "make the plan again")
    assert simulated(plan.on, shard=2)[1] == plan


def uses_of(plan: Any) -> list[Callable[[], Any]]:
    """The calls that need the mesh of a plan."""
    return [
        lambda: fshard.shard_params(params(), plan),
        lambda: fshard.shard_params(params(), plan, src=0),
    ]


@pytest.mark.parametrize("use", [0, 1])
def test_a_plan_that_was_pickled_has_no_mesh(use: int) -> None:
    """A plan that was pickled says how to give it a mesh: otherwise its first use would fail in an obscure way."""
    plan = simulated(lambda mesh: fshard.make_plan(params(), mesh), shard=2)[0]
    without = pickle.loads(pickle.dumps(plan))
    assert without == plan
    says(uses_of(without)[use], ValueError, "this plan has no mesh", "plan.on(mesh)", "'shard': 2")


PLANS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shape": lambda rank: {"params": params(rows=4 + rank)},
    "dtype": lambda rank: {"params": params(dtype=[torch.float32, torch.float64][rank > 0])},
    "layers": lambda rank: {"params": params(layers=2 + rank)},
    "order": lambda rank: {"params": dict(reversed(params().items())) if rank else params()},
    "frozen": lambda rank: {"params": params(), "frozen": ["blocks.1.b"] if rank else None},
    "whole": lambda rank: {"params": params(), "whole": ["head"] if rank else None},
    "units": lambda rank: {"params": params(), "units": ["blocks.*"] if rank else []},
    "regather": lambda rank: {"params": params(), "regather": bool(rank)},
    "strategy": lambda rank: {"params": params(), "params_over": () if rank else "shard"},
}
DIFFERENCES = {  # what the error says of rank 0, and of the first rank that differs
    "shape": ("leaf 'blocks.0.w' float32[4, 3]", "leaf 'blocks.0.w' float32[5, 3]"),
    "dtype": ("leaf 'blocks.0.w' float32", "leaf 'blocks.0.w' float64"),
    "layers": ("leaf 'head'", "leaf 'blocks.2.w'"),
    "order": ("leaf 'blocks.0.w'", "leaf 'head'"),
    "frozen": ("leaf 'blocks.1.b' float32[3]", "leaf 'blocks.1.b' float32 frozen[3]"),
    "whole": ("leaf 'head' float32[3]", "leaf 'head' float32 whole[3]"),
    "units": ("in unit '(root)'", "in unit 'blocks.0'"),
    "regather": ("regather=False", "regather=True"),
    "strategy": ("params_over=('shard',)", "params_over=()"),
}


def plans_that_differ(mesh: Any, good: bool = False) -> dict[str, str]:
    """The errors that this rank gets when ranks make different plans."""
    found = {}
    for name, arguments in PLANS.items():
        try:
            fshard.make_plan(mesh=mesh, **arguments(0 if good else mesh.get_rank()))
        except fshard.MismatchError as failure:
            found[name] = str(failure)
    return found


@pytest.mark.parametrize("world", [simulated, gloo])
def test_ranks_whose_plans_differ(world: Any) -> None:
    """Ranks with different plans get an error that names the difference: otherwise they would mix up their shards."""
    for heard in world(plans_that_differ, shard=3):
        assert list(heard) == list(PLANS)
        for name, text in heard.items():
            here, there = DIFFERENCES[name]
            assert text.startswith("the plan differs between ranks: rank 0 has"), text
            assert here in text.split(";")[0], text
            assert "rank 1 has" in text, text
            assert there in text.split("rank 1 has")[1], text
            assert text.endswith("Build the same tree, in the same order, on all of them."), text


def test_plans_that_do_not_differ() -> None:
    """Ranks with equal plans get no error: otherwise the test above would pass for a check that always fails."""
    assert simulated(plans_that_differ, True, shard=3) == [{}] * 3


def meshes_that_do_not_fit(mesh: Any) -> None:
    """Real meshes without axis names, with other names, and of another size."""
    says(lambda: sharded(init_device_mesh("cpu", (2,))), ValueError, "no axis names", "mesh_dim_names=('shard',)")
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "data"))
    says(lambda: sharded(other), ValueError, "has axes 'model', 'data'", "or an axis 'shard'", "say params_over=")
    says(lambda: fshard.all_gather(torch.ones(2), mesh, "model"), ValueError, "no axis 'model'", "it has 'shard'")
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    says(lambda: sharded(two).plan.on(mesh), ValueError, "'replicate': 2", "{'shard': 2}", "make the plan again")
    without = pickle.loads(pickle.dumps(sharded(mesh).plan))
    says(lambda: fshard.shard_params(params(), without), ValueError, "no mesh", "plan.on(mesh)")
    assert fshard.shard_params(params(), without.on(mesh)).tensors[0].numel() == sharded(mesh).tensors[0].numel()


def test_real_meshes_that_do_not_fit() -> None:
    """Errors about real meshes name the axes and the remedy: otherwise only simulated ranks would explain mistakes."""
    gloo(meshes_that_do_not_fit, shard=2)


# --- losses ---


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda p, x: torch.tensor(3), "torch.int64 tensor of shape ()"),
        (lambda p, x: p["head"] * 2, "torch.float32 tensor of shape (3,)"),
        (lambda p, x: 3.0, "3.0"),
        (lambda p, x: None, "None"),
        (lambda p, x: {"loss": p["head"].sum()}, "'loss'"),
        (lambda p, x: (p["head"].sum(), 2), "2)"),
        (lambda p, x: fshard.Mean(p["head"], 3), "torch.float32 tensor of shape (3,)"),
        (lambda p, x: fshard.Sum(p["head"]), "torch.float32 tensor of shape (3,)"),
        (lambda p, x: fshard.Mean(2.5, 3), "2.5"),
    ],
)
def test_a_loss_that_is_no_scalar(result: Any, got: str) -> None:
    """A loss that returns no scalar is an error that says what to return: otherwise torch would fail later."""
    for call in (fshard.value_and_grad(result), fshard.evaluate(result)):
        words = [
            "the loss function",
            "expected a 0-d floating tensor",
            f"got {got}" if got[0] == "N" else got,
            "fshard.Mean(",
        ]
        says(lambda call=call: call(sharded(), None), ValueError, *words)


@pytest.mark.parametrize(
    "result",
    [
        lambda p, x: torch.tensor(3.0),
        lambda p, x: p["head"].sum().detach(),
        lambda p, x: fshard.Mean(torch.zeros(()), 1),
    ],
)
def test_a_loss_that_depends_on_no_parameter(result: Any) -> None:
    """A gradient of a detached loss is an error, its value is not: otherwise a model would train with zeros."""
    words = ["the loss function", "depends on no trainable parameter", "detached"]
    says(lambda: fshard.value_and_grad(result)(sharded(), None), ValueError, *words)
    fshard.evaluate(result)(sharded(), None)


def test_has_aux_without_aux() -> None:
    """`has_aux=True` with a loss that returns no pair is an error that says so: otherwise unpacking it would fail."""
    words = ["the loss function", "expected (loss, aux), as has_aux=True says", "got Mean"]
    says(lambda: fshard.value_and_grad(loss, has_aux=True)(sharded(), torch.ones(2, 4)), ValueError, *words)
    for returned, got in (([torch.ones(()), 1], "got list"), ((torch.ones(()), 1, 2), "got a tuple of 3")):
        many = fshard.value_and_grad(lambda p, x, returned=returned: returned, has_aux=True)
        says(lambda many=many: many(sharded(), None), ValueError, *words[:2], got)


def test_parameters_that_are_not_sharded() -> None:
    """Plain parameters, or a subtree of a Sharded, are an error: otherwise gradients of one rank would be returned."""
    for call in (fshard.value_and_grad(loss), fshard.evaluate(loss)):
        words = ["expected a Sharded, got dict", "call fshard.shard_params(params, plan) first"]
        says(lambda call=call: call(params(), torch.ones(2, 4)), TypeError, *words)
        words = ["expected the whole Sharded", "got a subtree", "index it inside the loss"]
        says(lambda call=call: call(sharded()["blocks"], torch.ones(2, 4)), TypeError, *words)
    says(lambda: fshard.init_state(params(), fshard.optim.sgd(0.1)), TypeError, "expected a Sharded, got dict")


def test_a_key_that_is_not_there() -> None:
    """A wrong key is a KeyError that lists the right keys: otherwise users would have to print the tree."""
    says(lambda: sharded()["block"], KeyError, "'block'", "'blocks', 'head'")
    says(lambda: fshard.evaluate(lambda p, x: p["block"])(sharded(), None), KeyError, "'block'", "'blocks', 'head'")


# --- steps ---


def run_step(mesh: Any = None, batch: Any = None, loss: Any = loss, **kwargs: Any) -> Any:
    """Run one step of SGD."""
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(sharded(mesh), tx)
    return fshard.train_step(loss, tx, **kwargs)(state, torch.ones(4, 4) if batch is None else batch)


def test_arguments_of_a_step() -> None:
    """A wrong option is an error that lists the right values: otherwise another reduction or number would be used."""
    for build in (fshard.value_and_grad, lambda f, **kw: fshard.train_step(f, fshard.optim.sgd(0.1), **kw)):
        says(lambda build=build: build(loss, reduction="exakt"), ValueError, "'exakt'", "expected 'exact'", "'fast'")
    _, own = fshard.value_and_grad(loss, reduce=False)(sharded(), torch.ones(2, 4))
    says(lambda: fshard.reduce_grads(own, reduction="exakt"), ValueError, "'exakt'", "expected 'exact'", "'fast'")
    for accumulate in (0, -1):
        says(lambda n=accumulate: run_step(accumulate=n), ValueError, f"accumulate={accumulate}", "at least 1")
    says(lambda: fshard.optim.sgd(0.1, nesterov=True), ValueError, "sgd", "nesterov=True", "momentum")
    says(lambda: fshard.DynamicLossScale(backoff_factor=2.0), ValueError, "0 < backoff_factor < 1", "got", "2.0")


def test_too_few_rows() -> None:
    """A leaf with other rows than the batch names both: otherwise its micro-batches would be those of other rows."""
    batch = {"x": torch.ones(2, 4)}
    words = ["batch leaf 'y'", "expected 2 rows along dim 0, as leaf 'x' has", "got 4", "step(state, batch, *args)"]
    says(lambda: run_step(batch={**batch, "y": torch.ones(4)}, accumulate=2), ValueError, *words)


def test_micro_batches_of_unequal_size_under_a_plain_scalar() -> None:
    """Unequal micro-batches under a loss without a count are an error: otherwise a mean of means would be wrong."""

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        out = loss(p, x)
        return out.total / out.count

    words = ["the loss function", "mean of equally weighted micro-batches", "[1, 2] rows", "fshard.Mean(total, count)"]
    says(lambda: run_step(batch=torch.ones(3, 4), loss=plain, accumulate=2), ValueError, *words)
    run_step(batch=torch.ones(4, 4), loss=plain, accumulate=2)
    run_step(batch=torch.ones(3, 4), accumulate=2)

    def job(mesh: Any, **options: Any) -> Any:
        return run_step(mesh, torch.ones(0 if mesh.get_rank() == 2 else 4, 4), plain, **options)

    words = ["[0] rows on rank 2", "fshard.Mean(total, count), which may be (0, 0)", "give every rank a batch of rows"]
    for options in ({"accumulate": 1}, {"accumulate": 2}, {"donate": True, "in_backward": True}):
        odd = partial(job, **options)
        says(lambda odd=odd: simulated(odd, shard=3), ValueError, *words)


def test_an_optimizer_state_made_for_other_parameters() -> None:
    """A state of other parameters is an error that names the first leaf: otherwise moments would be mixed up."""
    tx = fshard.optim.adamw(0.1)

    def job(mesh: Any, other: Any) -> Any:
        state = fshard.init_state(sharded(mesh), tx)
        theirs = fshard.init_state(other(mesh), tx).opt_state
        mixed = fshard.TrainState(state.params, theirs, state.loss_scale, state.step, state.rng, state.extra)
        return fshard.train_step(loss, tx)(mixed, torch.ones(4, 4))

    def taller(mesh: Any) -> fshard.Sharded:
        whole = params(layers=3)
        return fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["blocks.*"]))

    words = [
        "the optimizer state was made for other parameters",
        "leaf 'head'",
        "leaf 'blocks.2.w'",
        "fshard.init_state",
    ]
    says(lambda: simulated(job, taller, shard=2), ValueError, *words)

    def cut_more(mesh: Any) -> fshard.Sharded:
        return sharded(mesh, state_over=("shard", "replicate"))

    words = ["the optimizer state was made for other parameters", "('shard', 'replicate')", "fshard.init_state"]
    says(lambda: simulated(job, cut_more, shard=2, replicate=2), ValueError, *words)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            fshard.optim.adamw(0.1),
            fshard.optim.sgd(0.1),
            ["optim.adamw", "AdamState", "got SgdState", "another optimizer"],
        ),
        (
            fshard.optim.sgd(0.1),
            fshard.optim.adamw(0.1),
            ["optim.sgd", "SgdState", "got AdamState", "another optimizer"],
        ),
        (fshard.optim.sgd(0.1, momentum=0.9), fshard.optim.sgd(0.1), ["optim.sgd", "momentum", "init"]),
        (fshard.optim.sgd(0.1), fshard.optim.sgd(0.1, momentum=0.9), ["optim.sgd", "momentum", "init"]),
    ],
)
def test_an_optimizer_state_made_by_another_optimizer(ours: Any, theirs: Any, words: list[str]) -> None:
    """Another optimizer's state is an error that names both: otherwise a fused kernel would use wrong moments."""
    state = fshard.init_state(sharded(), theirs)
    says(lambda: fshard.train_step(loss, ours)(state, torch.ones(4, 4)), ValueError, *words)
    whole = params()
    says(lambda: ours.update(whole, theirs.init(whole), whole), ValueError, *words)


# --- ranks that do different things ---


def on_ranks(*jobs: Callable[[Any], Any]) -> Callable[[], Any]:
    """A run in which rank r calls the r-th job."""
    return lambda: simulated(lambda mesh: jobs[mesh.get_rank()](mesh), shard=len(jobs))


def gathers(mesh: Any) -> Any:
    """Call an all-gather."""
    return fshard.all_gather(torch.ones(3), mesh, "shard", "left")


SUM = "all_reduce(float32[3], axis='shard')"
GATHER = "all_gather(float32[3], axis='shard') for unit 'left'"


def sums(mesh: Any) -> Any:
    """Call an all-reduce."""
    return fshard.all_reduce(torch.ones(3), mesh, "shard")


def nothing(mesh: Any) -> None:
    """Call no collective."""


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (
            [gathers, sums],
            ["different collectives", f"rank 0 {GATHER} at", ".py:", f"rank 1 {SUM} at", "in the same order"],
        ),
        ([gathers, gathers, sums], ["different collectives", f"rank 0 {GATHER}", f"rank 2 {SUM}", "same order"]),
        (
            [gathers, nothing],
            ["rank 1", "returned", f"rank 0 waits in {GATHER}", "rank 1 has returned", "All ranks must"],
        ),
        ([nothing, gathers], ["rank 1 is in", GATHER, "rank 0 has returned", "All ranks must call the same"]),
        (
            [gathers, lambda mesh: fshard.all_gather(torch.ones(4), mesh, "shard", "left")],
            ["different collectives", GATHER, "all_gather(float32[4], axis='shard') for unit 'left'"],
        ),
        (
            [gathers, lambda mesh: fshard.all_gather(torch.ones(3).double(), mesh, "shard", "left")],
            ["different collectives", GATHER, "all_gather(float64[3]"],
        ),
        (
            [gathers, lambda mesh: fshard.all_gather(torch.ones(3), mesh, "shard", "right")],
            ["different collectives", GATHER, "for unit 'right'"],
        ),
    ],
)
def test_ranks_that_call_different_things(jobs: Any, words: list[str]) -> None:
    """Ranks that call different collectives get an error that names both calls: otherwise they would hang."""
    says(on_ranks(*jobs), fshard.MismatchError, *words)


def test_ranks_that_wait_for_each_other_on_different_axes() -> None:
    """Ranks that wait on different axes get an error that lists where each waits: otherwise they would hang."""

    def job(mesh: Any) -> Any:
        order = ("shard", "replicate") if mesh.get_rank() in (0, 3) else ("replicate", "shard")
        for axis in order:
            fshard.all_reduce(torch.ones(3), mesh, axis)

    words = [
        "no rank can go on",
        "rank 0 waits in all_reduce",
        "'shard'",
        "rank 1 waits",
        "'replicate'",
        "rank 3 waits",
    ]
    says(lambda: simulated(job, shard=2, replicate=2), fshard.MismatchError, *words)


def test_ranks_that_reduce_with_another_operation() -> None:
    """A sum on one rank and a maximum on another is an error: otherwise ranks would silently get different results."""
    jobs = [lambda mesh: sums(mesh), lambda mesh: fshard.all_reduce(torch.ones(3), mesh, "shard", op="max")]
    says(on_ranks(*jobs), fshard.MismatchError, "different collectives", "all_reduce")


def test_ranks_that_broadcast_from_different_ranks() -> None:
    """Broadcasts from different ranks are an error: otherwise no rank would send, or two would."""
    jobs = [lambda mesh, src=src: fshard.broadcast(torch.ones(3), mesh, "shard", src=src) for src in (0, 1)]
    says(on_ranks(*jobs), fshard.MismatchError, "different collectives", "broadcast")


def test_ranks_that_use_units_in_another_order() -> None:
    """Ranks that use units in different orders get the names of both: otherwise they would get wrong parameters."""

    def job(mesh: Any) -> Any:
        def other(p: Any, x: torch.Tensor) -> fshard.Mean:
            order = [0, 1] if mesh.get_rank() == 0 else [1, 0]
            return fshard.Sum(sum(p["blocks"][i]["w"].sum() for i in order) * x.sum())

        return fshard.value_and_grad(other)(sharded(mesh), torch.ones(2, 4))

    words = [
        "different collectives",
        "rank 0 all_gather",
        "'blocks.0'",
        "rank 1 all_gather",
        "'blocks.1'",
        "same order",
    ]
    says(lambda: simulated(job, shard=2), fshard.MismatchError, *words)


def test_a_rank_that_skips_a_step() -> None:
    """A rank that makes one step less is named: otherwise the others would hang at the end of the data."""

    def job(mesh: Any) -> Any:
        tx = fshard.optim.sgd(0.1)
        state, step = fshard.init_state(sharded(mesh), tx), fshard.train_step(loss, tx)
        for _ in range(3 if mesh.get_rank() == 0 else 2):
            state, _ = step(state, torch.ones(4, 4))
        return state

    words = ["rank 1", "returned", "rank 0 waits in all_gather", "unit", "rank 1 has returned"]
    says(lambda: simulated(job, shard=2), fshard.MismatchError, *words)


def test_a_donated_state_says_so() -> None:
    """A donated state is an error that says what to use: otherwise users would read memory that was written over."""
    tx = fshard.optim.sgd(0.1)
    state = fshard.init_state(sharded(), tx)
    params_before = state.params
    fshard.train_step(loss, tx, donate=True)(state, torch.ones(4, 4))
    says(lambda: state.params, fshard.DonatedError, "TrainState", "given away", "Use the", "donate=False")
    says(lambda: params_before.tensors, fshard.DonatedError, "Sharded", "given away", "Use the")


# --- collectives ---


COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift", "vary"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_over_a_missing_axis(name: str) -> None:
    """A collective over a missing axis lists the mesh's axes: otherwise users would see only a KeyError."""
    call = getattr(fshard.collectives, name)
    words = ["no axis 'model'", "it has 'replicate', 'shard'"]
    says(lambda: simulated(lambda mesh: call(torch.ones(2), mesh, "model"), shard=2), ValueError, *words)


def over(call: Any, x: Any, **kwargs: Any) -> Callable[[], Any]:
    """A collective on two simulated ranks."""
    return lambda: simulated(lambda mesh: call(x, mesh, "shard", **kwargs), shard=2)


DIM_1: dict[Any, Any] = {fshard.reduce_scatter: {"dim": -1}, fshard.all_to_all: {"split": -1}}


def test_what_does_not_divide_and_an_operation_there_is_not() -> None:
    """A dim that the ranks do not divide, or an unknown `op`, is an error with a remedy: else rows would be lost."""
    for call in (fshard.reduce_scatter, fshard.all_to_all):
        words = ["dim 0", "shape (3, 2)", "does not divide over the 2 ranks", "'shard'", "multiple of 2"]
        says(over(call, torch.ones(3, 2)), ValueError, *words)
        says(over(call, torch.tensor(1.0)), ValueError, "leaf ''", "dim 0", "shape ()")
        says(over(call, {"a": torch.ones(2, 3)}, **DIM_1[call]), ValueError, "leaf 'a'", "dim 1", "(2, 3)", "2 ranks")
    words = ["op='sum', 'max', 'min'", "'prod'"]
    says(over(fshard.all_reduce, torch.ones(2), op="prod"), ValueError, *words)


@pytest.mark.parametrize("src", [2, -1])
def test_a_broadcast_from_a_rank_there_is_not(src: int) -> None:
    """A broadcast from a rank outside of the axis is an error: otherwise all ranks would return random memory."""
    says(over(fshard.broadcast, torch.ones(2), src=src), ValueError, "broadcast", f"src={src}", "2")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_of_what_is_no_tensor(name: str) -> None:
    """A collective of a tree with a leaf that is no tensor names its type: otherwise the leaf would be skipped."""
    call = getattr(fshard.collectives, name)
    says(over(call, {"a": [torch.ones(2), 1.5]}), TypeError, "expected a tensor", "float")


def test_a_maximum_has_no_derivative() -> None:
    """Differentiating a maximum over ranks is an error with a remedy: otherwise its gradient would be wrong."""

    def largest(mesh: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: fshard.all_reduce(x, mesh, "shard", op="max")

    x, words = torch.tensor(1.0), ["all_reduce(op='max')", "no derivative", "x.detach()", "all_gather"]
    says(lambda: simulated(lambda mesh: torch.func.grad(largest(mesh))(x), shard=2), NotImplementedError, *words)
    says(
        lambda: simulated(lambda mesh: torch.func.jvp(largest(mesh), (x,), (x,)), shard=2), NotImplementedError, *words
    )
    simulated(lambda mesh: torch.func.grad(lambda x: x * largest(mesh)(x.detach()))(x), shard=2)
