"""On one device nothing is sent: small units cost as one, and train with the bits of one unit, and of plain torch."""

from itertools import product
from typing import Any

import pytest
import torch
from support.memory import Live
from support.models import rand, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import AbstractMesh, optim, tree
from fshard.reduction import Sums


def parameters(num: int = 7) -> dict[str, Any]:
    """An embedding, layers with a frozen scale each, and a head."""
    layers = [
        {"w": rand(5, 5, seed=i), "b": rand(5, seed=100 + i), "scale": torch.tensor([1 + i], dtype=torch.int32)}
        for i in range(num)
    ]
    return {"embed": rand(5, seed=1), "layers": layers, "head": rand(5, seed=2)}


def in_order(p: Any, x: Tensor) -> Any:
    """Layers one after the other, but one that is not read."""
    x = x * p["embed"]
    for number, layer in enumerate(p["layers"]):
        if number != 3:
            x = torch.tanh((x @ layer["w"] + layer["b"]) / layer["scale"])
    rows = (x * p["head"]).square().sum(1)
    return fshard.Mean(rows.sum(), len(rows))


def back_and_forth(p: Any, x: Tensor) -> Any:
    """Layers that are read twice, also where gradients are off."""
    with torch.no_grad():
        target = in_order(p, x).total
    for layer in [*p["layers"], *reversed(p["layers"])]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return fshard.Mean(((x * p["embed"]).sum(1) - target).square().sum(), len(x))


STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero1": {"params_over": (), "grads_over": ()},
    "together": {"together": True, "block": 8},
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "clipped": {"clip_norm": 0.1},
    "in micro-batches": {"accumulate": 3},
    "gathered": {"accumulate": 3, "keep_gathered": True},
    "tree": {"reduction": "tree"},
}
OPTIMIZERS = {"sgd": optim.sgd(0.1, momentum=0.9), "adam": optim.adam(0.01)}


def trained(mesh: Any, loss: Any, tx: Any, options: dict[str, Any], **plan_options: Any) -> Any:
    """The rows of parameters and optimizer state after two steps, and the metrics."""
    whole = parameters()
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, frozen="**.scale", **plan_options))
    step, state, rows = fshard.train_step(loss, tx, **options), fshard.init_state(params, tx), []
    for i in range(2):
        state, metrics = step(state, rand(8, 5, seed=i))
        rows.append(metrics)
    return fshard.gather_params(state.params), tree.leaves(state.opt_state), rows


UNITS: list[dict[str, Any]] = [
    {"units": ["layers.*"]},
    {"units": ["layers.*"], "regather": {"layers.2": False}},
    {"units": ["layers.*"], "bucket": 700},
    {"units": 1},
]


def unlike(mesh: Any, strategy: str, step: str) -> list[str]:
    """Where small units train otherwise than one unit of all leaves."""
    wrong = []
    for (name, tx), loss in product(OPTIMIZERS.items(), (in_order, back_and_forth)):
        one = trained(mesh, loss, tx, STEPS[step], **STRATEGIES[strategy])
        for units in UNITS:
            if not same_bits(trained(mesh, loss, tx, STEPS[step], **STRATEGIES[strategy] | units), one):
                wrong.append(f"{name}, {loss.__name__}, {units}")
    return wrong


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_small_units_have_the_bits_of_one(on_mesh: bool, strategy: str, step: str) -> None:
    """A leaf that is read, or a gradient that is written, at another leaf's place, or twice, would train otherwise."""
    found = simulated(unlike, strategy, step, shard=1) if on_mesh else [unlike(None, strategy, step)]
    assert found == [[]]


@pytest.mark.parametrize("loss", [in_order, back_and_forth])
def test_gradients_have_the_bits_of_plain_torch(loss: Any) -> None:
    """The oracle that knows of no units."""
    whole, x = parameters(), rand(4, 5, seed=3)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=["layers.*"], frozen="**.scale"))
    flat, spec = tree.flatten(whole)
    plain = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in flat]
    mean, trained = loss(tree.unflatten(spec, plain), x), [leaf for leaf in plain if leaf.requires_grad]
    expected = torch.autograd.grad(mean.total / mean.count, trained, materialize_grads=True)
    value, grads = fshard.value_and_grad(loss)(sharded, x)
    assert same_bits(tree.leaves(fshard.gather_params(grads)), list(expected))
    assert same_bits(value, fshard.evaluate(loss)(sharded, x))


class Heard(Sums):
    """Sums that tell which units they are given."""

    def __init__(self, names: list[str]):
        super().__init__()
        self.names = names

    def after(self, total: Tensor, name: str) -> Tensor:
        """Note the unit."""
        self.names.append(name)
        return total


def test_who_is_handed_each_unit_has_those_that_were_asked_for() -> None:
    """A hook that treats units by name would not know the names of several, nor get the gradients of one."""
    names, whole = list[str](), parameters()
    plan = fshard.make_plan(whole, units=["layers.*"])
    fshard.value_and_grad(in_order, reduction=Heard(names))(fshard.shard_params(whole, plan), rand(2, 5, seed=0))
    assert sorted(names) == sorted(unit.name for unit in plan.units)


@pytest.mark.parametrize("kilobytes", [64, 256])
def test_gradients_are_in_memory_once(kilobytes: int) -> None:
    """If all units were one, the gradients of all leaves would be there beside the buffer that they are copied to."""
    width = int((kilobytes * 256) ** 0.5)
    whole = [torch.eye(width) for _ in range(8192 // kilobytes)]  # 8 MiB
    sharded, x = fshard.shard_params(whole, fshard.make_plan(whole, units=["*"])), torch.ones(1, width)

    def loss(p: Any, x: Tensor) -> Tensor:
        for w in p:
            x = x @ w
        return x.sum()

    live = Live()
    live.leave_out([*sharded.tensors, x])
    with live:
        fshard.value_and_grad(loss)(sharded, x)
    assert live.peak <= (8 << 20) + (3 << 19), live.peak / (1 << 20)


def test_a_subtree_is_read_beside_the_parameters() -> None:
    """Rows of a subtree begin with its first unit: by the plan of fewer units they would be read at other places."""
    whole, x = parameters(), rand(4, 5, seed=3)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=["layers.*"], frozen="**.scale"))

    def loss(p: Any, layers: Any, x: Tensor) -> Tensor:
        return in_order({**p, "layers": layers}, x).total

    found = fshard.evaluate(loss)(sharded, sharded["layers"], x)
    assert same_bits(found, in_order(whole, x).total)


@pytest.mark.parametrize("policy", [None, "compute=f32"])
def test_a_layer_whose_order_was_changed_keeps_it(policy: str | None) -> None:
    """A container that a loss has changed is what it reads again, also when another unit was read meanwhile."""
    whole, orders = parameters(), list[list[str]]()
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=["layers.*"], policy=policy))

    def loss(p: Any) -> Tensor:
        p["layers"][0]["w"] = p["layers"][0].pop("w")
        p["layers"][1]["factor"] = p["layers"][1].pop("scale")  # the last one
        total = p["layers"][2]["w"].sum()
        orders.extend([[*p["layers"][0]], [*p["layers"][1]]])
        return total

    fshard.evaluate(loss)(sharded)
    assert orders == [["b", "scale", "w"], ["w", "b", "factor"]]


def test_print_says_which_bucket_would_send_fewer_messages() -> None:
    """Of small units each costs its message: a user who does not know of `bucket=` would not look for it."""
    layers = [{"w": torch.zeros(64, 64), "b": torch.zeros(64)} for _ in range(100)]
    whole = {"embed": torch.zeros(1 << 20), "layers": layers}
    two, line = AbstractMesh(shard=2), "100 units of 16.2 KiB: bucket=1 << 20 would send 2 in place of 100 messages."
    assert line in str(fshard.make_plan(whole, two, units=["layers.*"])).splitlines()
    joined = fshard.make_plan(whole, two, units=["layers.*"], bucket=1 << 20)
    assert len(joined.units) == 3  # as the line says, and the embedding
    larger = {"layers": [torch.zeros(1 << 17) for _ in range(20)]}  # 512 KiB each, of which two are a bucket
    few = {"layers": layers[:8]}  # one message would be seven fewer
    assert "20 units of 512 KiB: bucket=1 << 20 would send 10 in" in str(
        fshard.make_plan(larger, two, units="layers.*")
    )
    none = [joined, fshard.make_plan(whole, units=["layers.*"]), fshard.make_plan(few, two, units=["layers.*"])]
    none += [fshard.make_plan(whole, AbstractMesh(shard=1), units=["layers.*"]), fshard.make_plan(whole, two, units=[])]
    assert not any("bucket=" in str(plan) for plan in none)
    still = fshard.make_plan(whole, two, units=["layers.*"], frozen="**", whole="**")
    assert "bucket" not in str(still), "nothing is sent"


NESTED: dict[str, list[str]] = {
    "in the middle": ["layers.*", "layers.*.mlp"],
    "first": ["layers.*", "layers.*.ln"],
    "last": ["layers.*", "layers.*.out"],
    "two": ["layers.*", "layers.*.ln", "layers.*.mlp"],
}


def nested(p: Any, x: Tensor) -> Tensor:
    """Layers that have a part of their own unit."""
    for layer in p["layers"]:
        x = torch.tanh((x * layer["ln"]) @ layer["mlp"]["w"] @ layer["out"])
    return x.square().mean()


@pytest.mark.parametrize("bucket", [0, 700, 1 << 20])
@pytest.mark.parametrize("units", NESTED)
def test_units_inside_others_that_are_joined(units: str, bucket: int) -> None:
    """Their leaves lie behind those of the unit around them, and were looked for between these."""
    layers = [
        {
            "ln": rand(5, seed=i),
            "mlp": {"w": rand(5, 5, seed=10 + i)},
            "e": torch.empty(0),
            "out": rand(5, 5, seed=20 + i),
        }
        for i in range(4)
    ]
    whole, x = {"layers": layers}, rand(2, 5, seed=3)
    plain = tree.map(lambda leaf: leaf.clone().requires_grad_(), whole)
    loss = nested(plain, x)
    loss.backward()
    expected = tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, plain)

    def job(mesh: Any) -> None:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=NESTED[units], bucket=bucket))
        got, grads = fshard.value_and_grad(nested)(params, x)
        assert same_bits(got, loss.detach())
        assert same_bits(fshard.gather_params(params), whole)
        torch.testing.assert_close(fshard.gather_params(grads), expected)

    job(None)
    simulated(job, shard=1)
    simulated(job)


class Linear:
    """A node whose class makes its tensors anew."""

    def __init__(self, w: Any) -> None:
        self.w = w.view(w.shape) if isinstance(w, Tensor) else w


tree.register(Linear, lambda x: ([x.w], None), lambda _, children: Linear(*children))


def test_nodes_that_make_their_tensors_anew_are_let_go() -> None:
    """Every gathered unit would stay in memory, as if the program had changed it."""
    whole = {"layers": [Linear(rand(16, 16, seed=i)) for i in range(20)]}

    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = torch.tanh(x @ layer.w)
        return x.square().mean()

    def job(mesh: Any) -> int:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["layers.*"], prefetch=0))
        with Live() as live:
            fshard.evaluate(loss)(params, rand(2, 16, seed=3))
        return live.peak

    assert max(simulated(job)) < 20 * 16 * 16 * 8, "two ranks have less than all layers"


def test_parameters_are_made_on_the_default_device() -> None:
    """Without a mesh no tensor says where parameters are made: on the CPU one GPU would need a copy of each."""
    like = tree.map(lambda x: x.to("meta"), parameters())
    plan, cut = fshard.make_plan(like), fshard.make_plan(like, AbstractMesh(shard=2))
    assert plan.device == torch.device("cpu")
    with torch.device("cuda:1"):
        assert (plan.device, cut.device) == (torch.device("cuda:1"), torch.device("cpu"))
    with torch.device("meta"):  # where a module is made that no rank can hold: parameters have values
        made = fshard.init_params(plan, lambda path, like: torch.ones_like(like, device="cpu"))
    assert {x.device for x in tree.leaves(made)} == {torch.device("cpu")}
