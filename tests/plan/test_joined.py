"""Small units that travel as one: which are joined (`make_plan(bucket=)`), and that nothing but messages changes."""

import re
from typing import Any

import pytest
import torch
from support import graphs
from support.models import rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import optim, tree
from fshard.core import lazy

NAMES = ["a", "b", "c", "d", "e"]


def names_of(params: Any, **options: Any) -> list[str]:
    """The names of the units of a plan on one device."""
    return [unit.name for unit in fshard.make_plan(params, **{"units": NAMES, **options}).units]


def leaves(*numels: int) -> dict[str, Tensor]:
    """Leaves of 8 bytes an element: an embedding, units of these sizes, and a head."""
    blocks = {name: torch.zeros(numel, dtype=torch.float64) for name, numel in zip(NAMES, numels, strict=False)}
    return {"embed": torch.zeros(2), **blocks, "head": torch.zeros(2)}


def test_neighbours_are_joined_until_the_bucket_is_full() -> None:
    """A bucket is filled to its last byte and not beyond, in the order of use, and a larger unit is by itself: a bucket
    that took one unit more would take more memory than asked for."""
    params = leaves(4, 4, 2, 18, 2)
    assert names_of(params, bucket=80) == ["(first)", "a to c", "d", "e", "(last)"]
    assert names_of(params, bucket=79) == ["(first)", "a to b", "c", "d", "e", "(last)"]
    assert names_of(params, bucket=0) == ["(first)", *NAMES, "(last)"] == names_of(params)
    assert names_of(params, bucket=48, policy="compute=f32") == ["(first)", "a to c", "d", "e", "(last)"]
    assert names_of(params, bucket=80, block=16) == ["(first)", *NAMES, "(last)"]  # with their padding
    plan = fshard.make_plan(params, units=NAMES, bucket=80)
    assert [unit.joined for unit in plan.units] == [(), ("a", "b", "c"), (), (), ()]
    assert [slot.unit for slot in plan.slots] == list(plan.claims) == [0, 1, 1, 1, 2, 3, 4]


def test_ends_and_units_that_stay_are_not_joined() -> None:
    """The unit that stays gathered would keep its neighbours in memory, or be gathered again with them."""
    params = leaves(1, 1, 1, 1, 1)
    assert names_of(params, bucket=1 << 20) == ["(first)", "a to e", "(last)"]
    expected = ["(first)", "a to b", "c", "d to e", "(last)"]
    assert names_of(params, bucket=1 << 20, regather={"c": False}) == expected
    tied = {**params, "head": params["embed"]}  # used at both ends: in the root
    assert names_of(tied, bucket=1 << 20) == ["(root)", "a to e"]


def test_a_tied_leaf_counts_once() -> None:
    """A leaf that several units read is stored with the first: counted in each, it would fill their buckets."""
    shared = torch.zeros(4, dtype=torch.float64)
    params = {"a": [shared, torch.zeros(4)], "b": [shared, torch.zeros(4)], "c": [shared, torch.zeros(4)]}
    assert names_of(params, units=["*"], bucket=80) == ["a to c"]


def stack(num: int, numel: int = 2) -> list[Tensor]:
    """So many leaves."""
    return [torch.zeros(numel) for _ in range(num)]


def test_units_are_joined_on_request_alone() -> None:
    """Memory and the names of units would change at a number of layers that nobody set."""
    for num in (2, 33, 400):
        assert len(fshard.make_plan(stack(num), units=["*"]).units) == num
        assert names_of(stack(num), units=["*"], bucket=1 << 20) == [f"0 to {num - 1}"]
    small = [torch.empty(1 << 16, device="meta") for _ in range(33)]  # 256 KiB each
    assert [len(unit.joined) for unit in fshard.make_plan(small, units=["*"], bucket=1 << 20).units] == [4] * 8 + [0]
    assert len(fshard.make_plan(stack(40), units=2).units) == 40
    assert len(fshard.make_plan(stack(40), units=2, bucket=32).units) == 20


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("1", TypeError)])
def test_a_bucket_is_a_number_of_bytes(value: Any, error: type[Exception]) -> None:
    """Anything else is refused, before ranks differ by it."""
    with pytest.raises(error, match=re.escape(f"bucket={value!r}: expected a number of bytes")):
        fshard.make_plan(stack(2), units=["*"], bucket=value)


def deep(p: Any, x: Tensor) -> fshard.Mean:
    """A stack of layers between an embedding and a head."""
    x = x * p["embed"]
    for layer in p["layers"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    rows = (x * p["head"]).square().sum(1)
    return fshard.Mean(rows.sum(), len(rows))


def params(num: int) -> dict[str, Any]:
    """Of `deep`, with shapes that ranks do not divide."""
    layers = [{"w": rand(5, 5, seed=i), "b": rand(5, seed=100 + i)} for i in range(num)]
    return {"embed": rand(5, seed=1), "layers": layers, "head": rand(5, seed=2)}


STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero2": {"params_over": ()},
    "zero1": {"params_over": (), "grads_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
}


def trained(mesh: Any, bucket: int, tx: Any, strategy: dict[str, Any], **options: Any) -> tuple[Any, Any, int]:
    """The parameters and metrics after three steps, and the number of units."""
    whole = params(7)
    plan = fshard.make_plan(whole, mesh, units=["layers.*"], bucket=bucket, **strategy)
    state = fshard.init_state(fshard.shard_params(whole, plan), tx)
    step = fshard.train_step(deep, tx, **options)
    rank, rows = (0 if mesh is None else mesh.get_rank()), []
    for i in range(3):
        x = rand(3 + 3 * rank, 5, seed=10 * i + rank)
        state, metrics = step(state, x)
        rows.append(metrics)
    return fshard.gather_params(state.params), rows, len(plan.units)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "in backward": {"donate": True, "in_backward": True},
    "clipped": {"clip_norm": 0.1},
    "in micro-batches": {"accumulate": 3},
}


def alike(mesh: Any, strategy: str, option: str) -> list[str]:
    """Where joined units train otherwise than each by itself."""
    wrong = []
    for name, tx in {"sgd": optim.sgd(0.1), "adam": optim.adam(0.01)}.items():
        alone, rows, num = trained(mesh, 0, tx, STRATEGIES[strategy], **OPTIONS[option])
        for bucket, expected in ((700, 6), (1 << 20, 3)):
            joined, others, num_joined = trained(mesh, bucket, tx, STRATEGIES[strategy], **OPTIONS[option])
            assert (num, num_joined) == (9, expected)
            # a norm is summed row by row, and a fused kernel computes the last elements of a piece otherwise
            same = same_bits(joined, alone) if name == "sgd" and option != "clipped" else close(joined, alone)
            if not (same and close(others, rows)):
                wrong.append(f"{name}, bucket={bucket}")
    return wrong


def close(a: Any, b: Any) -> bool:
    """Whether two trees agree but for rounding."""
    return all(torch.allclose(x, y, 1e-12, 1e-14) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.law
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_joined_units_train_as_units_by_themselves(size: int, strategy: str, option: str) -> None:
    """A leaf that is cut out of the joined buffer at another leaf's place, or a gradient that is put there, would train
    other parameters."""
    assert simulated(alike, strategy, option, shard=size) == [[]] * size


def test_joined_units_train_as_one_device_does() -> None:
    """The oracle that knows of no units."""
    whole, tx = params(7), optim.sgd(0.1)
    leaf, spec = tree.flatten(whole)
    for i in range(3):
        flat = [x.detach().requires_grad_() for x in leaf]
        means = [deep(tree.unflatten(spec, flat), rand(3 + 3 * rank, 5, seed=10 * i + rank)) for rank in range(3)]
        loss = sum(mean.total for mean in means) / sum(mean.count for mean in means)
        leaf = [x - 0.1 * g for x, g in zip(flat, torch.autograd.grad(loss, flat), strict=True)]
    for ended, _, _ in simulated(trained, 700, tx, {}, shard=3):
        assert close(ended, tree.unflatten(spec, leaf))


def in_processes(mesh: Any) -> list[str]:
    """`alike` on processes, for strategies that send what the others do not."""
    return alike(mesh, "full", "donated") + alike(mesh, "ddp", "plain") + alike(mesh, "zero1", "in backward")


@pytest.mark.parametrize("size", [2, 3])
def test_joined_units_train_alike_on_processes(size: int) -> None:
    """Simulated ranks share memory that processes do not."""
    assert gloo(in_processes, shard=size) == [[]] * size


def messages(mesh: Any, bucket: int) -> dict[str, int]:
    """How many collectives one value and gradient of 40 layers consist of."""
    whole = params(40)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["layers.*"], bucket=bucket))
    with fshard.collectives.tally() as calls:
        fshard.value_and_grad(deep)(sharded, rand(2, 5, seed=mesh.get_rank()))
    kinds = [call.kind for call in calls]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def test_joined_units_are_one_message() -> None:
    """What joining is for: without it, there were a gather, another and a reduction for each of 40 layers."""
    for counts in simulated(messages, 1 << 20, shard=2):
        assert counts["all_gather"] <= 5
        assert counts["reduce_scatter"] == 3
    for counts in simulated(messages, 0, shard=2):
        assert counts["all_gather"] >= 80
        assert counts["reduce_scatter"] == 42


def started_early(mesh: Any) -> list[str]:
    """The gathers of a loss that asks for one of the joined units, and nothing else."""
    whole = params(4)
    plan = fshard.make_plan(whole, mesh, units=["layers.*"], bucket=512, prefetch=0)
    sharded = fshard.shard_params(whole, plan)

    def loss(p: Any, x: Tensor) -> Tensor:
        fshard.collectives.prefetch(p, "layers.3")
        return (p["embed"] * x).sum()

    with fshard.collectives.tally() as calls:
        fshard.evaluate(loss)(sharded, torch.ones(5, dtype=torch.float64))
    with pytest.raises(ValueError, match=re.escape("the pattern 'layers.4' matches no unit; the units are")):
        fshard.evaluate(lambda p, x: fshard.collectives.prefetch(p, "layers.4"))(sharded, torch.ones(5))
    return [call.label for call in calls if call.kind == "all_gather"]


@pytest.mark.parametrize("bucket", [0, 1 << 20])
def test_a_container_of_joined_units_stays_lazy(bucket: int) -> None:
    """A loss that only hands on a list of layers reads none of them, whether the layers are joined or not."""

    def loss(params: Any) -> Tensor:
        assert isinstance(params["blocks"], lazy.Branch)
        assert isinstance(params["blocks"][1], dict)
        return params["blocks"][1]["w"].sum()

    def run(mesh: Any) -> None:
        params = {"blocks": [{"w": torch.ones(3), "b": torch.ones(2)} for _ in range(3)]}
        plan = fshard.make_plan(params, mesh, units=["blocks.*"], bucket=bucket)
        assert len(plan.units) == (1 if bucket else 3)
        fshard.value_and_grad(loss)(fshard.shard_params(params, plan))

    simulated(run, shard=2)


def test_a_joined_unit_is_prefetched_by_the_name_of_each() -> None:
    """A loss that names its layers need not know which of them are joined."""
    assert simulated(started_early, shard=2) == [["layers.2 to layers.3", "(first)"]] * 2


def test_what_the_backward_gathers_again_is_joined_in_a_graph_too() -> None:
    """The passes find units by the labels of their collectives."""

    def fn(mesh: Any) -> list[str]:
        sharded, tokens = graphs.sharded(mesh, bucket=1300), graphs.batch(mesh.get_rank())
        lowered = fshard.jit(fshard.value_and_grad(graphs.mean), bucket=0).lower(sharded, tokens)
        graphs.is_right(lowered, fshard.value_and_grad(graphs.mean), sharded, tokens)
        return sorted(set(graphs.labels(lowered.graph)))

    assert simulated(fn, shard=2) == [["(last)", "blocks.0 to blocks.1", "blocks.2 to blocks.3"]] * 2


def in_turn(mesh: Any, graph: bool) -> tuple[int, list[str]]:
    """The number of units, and the labels of the gathers of a loss that reads two stacks in turn."""
    whole = {name: [rand(8, 8, seed=i) for i in range(16)] for name in ("attention", "mlp")}
    plan = fshard.make_plan(whole, mesh, units=["attention.*", "mlp.*"], bucket=8 << 9)  # eight of 512 bytes
    sharded = fshard.shard_params(whole, plan)

    def loss(p: Any, x: Tensor) -> Tensor:
        for a, b in zip(p["attention"], p["mlp"], strict=True):
            x = torch.tanh(torch.tanh(x @ a) @ b)
        return x.square().mean()

    fn, x = fshard.value_and_grad(loss), rand(2, 8, seed=mesh.get_rank())
    if graph:
        return len(plan.units), graphs.labels(fshard.jit(fn, bucket=0).lower(sharded, x).graph)
    with fshard.collectives.tally() as calls:
        fn(sharded, x)
    return len(plan.units), [call.label for call in calls if call.kind == "all_gather"]


@pytest.mark.parametrize("graph", [False, True])
def test_stacks_that_are_read_in_turn_are_not_gathered_for_each_layer(graph: bool) -> None:
    """Of a tree of stacks, as in JAX, layers of two joined units are read in turn: each would gather eight layers."""
    for num, gathers in simulated(in_turn, graph, shard=2):
        assert num == 4
        assert len(gathers) <= 4 * num  # by each layer it would be 16
