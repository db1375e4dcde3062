"""Several modules in one loss, each with a policy of its own: each computes what it computes alone."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.says import says
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim, tree
from fshard.module import functionalize

BF16 = torch.bfloat16
# how a module's inputs come, and what its body and its head return: x, t, body, head
POLICIES = {
    None: "f32 f32 f32 f32",
    "compute=bf16": "bf16 bf16 bf16 bf16",
    "compute=bf16,cast_inputs=no": "f32 f32 bf16 bf16",
    "compute=bf16,cast_inputs=no,cast_at=body": "f32 f32 bf16 bf16",
    "compute=bf16; **.head: compute=f32": "bf16 bf16 bf16 bf16",
    "; **.head: compute=bf16": "f32 f32 f32 f32",  # most elements are in the head
    "compute=f64": "f64 f64 f64 f64",
    "storage=bf16": "bf16 bf16 bf16 bf16",
}
UNITS = {"one": None, "one below": ["net"], "each": ["net.body", "net.head"], "some": ["net.body"], "full": 20}
WHOLE = dict.fromkeys(("params_over", "grads_over", "state_over"), ())
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "FSDP": (2, {}),
    "kept": (2, {"regather": False}),
    "ZeRO-2": (2, {"params_over": ()}),
    "DDP": (3, WHOLE),
}


class Net(nn.Module):
    """Returns what it was given, and what its submodules return; `t` is a number that bfloat16 would round."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 9)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        """Two tensors of dtypes that weights have, whatever the policy, and those of the arguments."""
        inner = self.body(x.to(self.body.weight.dtype))
        return x, t, inner, self.head(inner.to(self.head.weight.dtype))


def nets(number: int) -> list[Any]:
    """Modules as functions, with parameters below a name."""
    torch.manual_seed(0)
    return [(apply, {"net": params}) for apply, params, _ in (functionalize(Net()) for _ in range(number))]


X, T = torch.linspace(-1, 1, 6).view(2, 3), torch.tensor(998.39)
NETS = nets(3)


def out_of(number: int, p: Any) -> Any:
    """What a module returns for its parameters."""
    return NETS[number][0](p, {}, X, T)[0]


def sharded(number: int, mesh: Any, policy: str | None, units: Any = None, **how: Any) -> Any:
    """A module's parameters by a plan of their own."""
    params = NETS[number][1]
    return fshard.shard_params(params, fshard.make_plan(params, mesh, units=units, policy=policy, **how))


def loss_of(*outs: Any) -> tuple[fshard.Mean, Any]:
    """A loss that depends on all outputs, and these as an aux."""
    total = sum((x.double().square().sum() for out in outs for x in out[2:]), torch.zeros((), dtype=torch.float64))
    return fshard.Mean(total, 1), tree.map(torch.Tensor.detach, outs)


CALLS: dict[str, Callable[[int, Any], Any]] = {
    "as it is": lambda n, p: out_of(n, p["net"]),
    "held while others are read": lambda n, p: out_of(n, p["net"]),
    "a tree of its own": lambda n, p: out_of(n, {part: dict(p["net"][part]) for part in ("body", "head")}),
    "mapped": lambda n, p: out_of(n, tree.map(lambda x: x.view_as(x), p["net"])),
    "checkpointed": lambda n, p: checkpoint(partial(out_of, n), p["net"], use_reentrant=False),
    "remat": lambda n, p: fshard.remat(partial(out_of, n))(p["net"]),
    "remat of all": lambda n, p: fshard.remat(lambda: out_of(n, p["net"]))(),
    "vmapped": lambda n, p: tree.map(lambda x: x[0], torch.func.vmap(lambda _: out_of(n, p["net"]))(torch.zeros(1))),
    "differentiated": lambda n, p: torch.func.vjp(lambda q: out_of(n, q), tree.map(lambda x: x, p["net"]))[0],
}


def trained(fn: Callable[..., Any], params: Any, others: list[Any]) -> Any:
    """The aux of a step's metrics."""
    tx = optim.sgd(0.1)
    return fshard.train_step(fn, tx, has_aux=True)(fshard.init_state(params, tx), *others)[1]["aux"]


PLACES: dict[str, Callable[..., Any]] = {
    "predict": lambda fn, p, others: fshard.predict(lambda *a: fn(*a)[1])(p, *others),
    "evaluate": lambda fn, p, others: fshard.evaluate(fn, has_aux=True)(p, *others)[1],
    "gradients": lambda fn, p, others: fshard.value_and_grad(fn, has_aux=True)(p, *others)[0][1],
    "step": trained,
    "jit": lambda fn, p, others: fshard.jit(fshard.value_and_grad(fn, has_aux=True), backend="eager")(p, *others)[0][1],
}


def alone(number: int, policy: str | None) -> Any:
    """What a module returns alone, on one device, each submodule in a unit of its own."""
    return fshard.predict(lambda p: out_of(number, p["net"]))(sharded(number, None, policy, ["net.body", "net.head"]))


def test_alone_a_module_has_the_dtypes_of_its_policy():
    """The law below would hold if a policy said nothing."""
    names = {torch.float32: "f32", BF16: "bf16", torch.float64: "f64"}
    for policy, dtypes in POLICIES.items():
        assert " ".join(names[x.dtype] for x in alone(0, policy)) == dtypes, policy


Case = tuple[tuple[str, ...], tuple[str | None, ...]]  # units and policies


def cases(number: int, every: int = 1) -> list[Case]:
    """Every unit list with every other, and every policy with every other, for so many modules."""
    policies = [*itertools.permutations(POLICIES, number)]
    units = [*itertools.product(UNITS, repeat=number)]
    return [(units[i * 7 % len(units)], chosen) for i, chosen in enumerate(policies)][::every]


def differing(mesh: Any, strategy: str, call: str, place: str, chosen: list[Case]) -> list[Any]:
    """The cases in which a module returns something else in a loss with others than alone."""
    how, wrong = STRATEGIES[strategy][1] if mesh is not None else {}, []
    for units, policies in chosen:
        pairs = zip(policies, units, strict=True)
        trees = [sharded(n, mesh, policy, UNITS[unit], **how) for n, (policy, unit) in enumerate(pairs)]

        def loss(*params: Any) -> Any:
            held = [{"net": p["net"]} for p in params] if call.startswith("held") else params
            return loss_of(*(CALLS[call](n, p) for n, p in enumerate(held)))

        outs = PLACES[place](loss, trees[0], trees[1:])
        wrong += [
            (units, policies, n)
            for n, (out, policy) in enumerate(zip(outs, policies, strict=True))
            if not same_bits([*out], [*alone(n, policy)])
        ]
    return wrong


def check(strategy: str, call: str, place: str, chosen: list[Case]) -> None:
    """No module differs, on any rank."""
    ranks = STRATEGIES[strategy][0]
    assert differing(None, "one device", call, place, chosen) == []
    assert ranks == 1 or simulated(differing, strategy, call, place, chosen, shard=ranks) == [[]] * ranks


@pytest.mark.law
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_module_computes_what_it_computes_alone(strategy: str, place: str, call: str) -> None:
    """A teacher's timestep would be rounded by the policy of its student, or not, as units are cut."""
    check(strategy, call, place, cases(2, 19 if place == "jit" else 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_modules(strategy: str) -> None:
    """The third would take the policy of the second."""
    check(strategy, "as it is", "gradients", cases(3, 17))


def test_in_processes() -> None:
    """Only simulated ranks would be right."""
    assert gloo(differing, "FSDP", "checkpointed", "step", cases(2, 7)) == [[], []]


def test_plain_tensors_have_the_policy_of_the_loss() -> None:
    """Parameters that a loss has computed, as by a mask, would be used in other dtypes than those it was given."""
    named = [policy for policy in POLICIES if policy is None or not policy.startswith(";")]
    for policy, units in itertools.product(named, UNITS.values()):
        params = sharded(0, None, policy, units)
        out = fshard.predict(lambda p: out_of(0, tree.map(lambda leaf: leaf * 1, p["net"])))(params)
        assert same_bits([*out], [*alone(0, policy)])


# --- a module that runs again in the backward ---


def gradients(mesh: Any, units: Any, policy: str | None, way: Callable[..., Any] | None) -> Any:
    """The gradients of a sum of two modules, of which each is called in a checkpoint."""
    student, teacher = sharded(0, mesh, policy, units), sharded(1, mesh, "compute=f64", units)

    def loss(p: Any, q: Any) -> Tensor:
        outs = [out_of(n, x["net"]) if way is None else way(n, x["net"]) for n, x in enumerate((p, q))]
        return sum((x.double() * x.double().cos() for out in outs for x in map(torch.sum, out[2:])), torch.zeros(()))

    value, grads = fshard.value_and_grad(loss)(student, teacher)
    return value, tree.leaves(fshard.gather_params(grads))


AGAIN: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda n, p: checkpoint(partial(out_of, n), p, use_reentrant=False),
    "checkpoint of a closure": lambda n, p: checkpoint(lambda: out_of(n, p), use_reentrant=False),
    "checkpoint of leaves": lambda n, p: checkpoint(
        lambda *x: out_of(n, tree.unflatten(tree.flatten(p)[1], x)), *tree.leaves(p), use_reentrant=False
    ),
    "remat": lambda n, p: fshard.remat(partial(out_of, n))(p),
    "remat of a closure": lambda n, p: fshard.remat(lambda: out_of(n, p))(),
}


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("policy", POLICIES)
def test_in_the_backward_a_module_casts_as_in_the_forward(policy: str | None, again: str) -> None:
    """What runs again would cast by no policy: other gradients than those of the loss."""
    for units in UNITS.values():
        right = gradients(None, units, policy, None)
        assert same_bits(gradients(None, units, policy, AGAIN[again]), right)
    for units in (None, ["net.body"]):
        first, second = (simulated(gradients, units, policy, way, shard=2) for way in (None, AGAIN[again]))
        assert same_bits(first, second)


# --- trees of several plans, and of one memory ---


@pytest.mark.parametrize("units", UNITS)
def test_one_module_of_two_policies_is_refused(units: str) -> None:
    """The casts would be those of the leaf that comes first."""
    first, second = sharded(0, None, "compute=bf16", UNITS[units]), sharded(0, None, "compute=bf16,cast_inputs=no")

    def merged(p: Any, q: Any) -> Any:
        return out_of(0, {"body": p["net"]["body"], "head": q["net"]["head"]})

    says(
        lambda: fshard.predict(merged)(first, second),
        ValueError,
        "Net: params: leaves of plans with different policies",
        "'compute=bf16'",
        "'compute=bf16,cast_inputs=no'",
        "with_policy",
    )
    same = sharded(0, None, "compute=bf16; **.head: compute=f32")
    assert [x.dtype for x in fshard.predict(merged)(first, same)] == [BF16] * 4


@pytest.mark.parametrize("policy", ["compute=f32,cast_inputs=no", "compute=bf16", "compute=f32,cast_at=body"])
@pytest.mark.parametrize("units", UNITS)
def test_the_same_tensors_under_two_policies(units: str, policy: str) -> None:
    """A full-precision copy of a model beside it has its memory: it would be told by that alone."""
    x = X.double()
    once = sharded(0, None, "compute=f32", UNITS[units])
    other = once.with_policy(policy)

    def out(p: Any) -> Any:
        return NETS[0][0](p["net"], {}, x, T.double())[0]

    for first, second in ((once, other), (other, once)):
        both = fshard.predict(lambda p, q: (out(p), out(q)))(first, second)
        assert same_bits([*both], [fshard.predict(out)(first), fshard.predict(out)(second)])


def test_a_loss_inside_a_loss() -> None:
    """In an inner loss a module would take the inner loss's policy for what the outer one has gathered."""
    outer, inner = "compute=bf16,cast_inputs=no", "compute=f64"
    for units, more in itertools.product(UNITS.values(), repeat=2):
        params, others = sharded(0, None, outer, units), sharded(1, None, inner, more)

        def both(p: Any, others: Any = others) -> Any:
            net = p["net"]
            return fshard.predict(lambda q: (out_of(0, net), out_of(1, q["net"])))(others)

        assert same_bits([*fshard.predict(both)(params)], [alone(0, outer), alone(1, inner)])


# --- the mesh and the mode of a tree ---


@pytest.mark.parametrize("units", [None, ["0", "1"]])
def test_batch_norms_take_the_batch_of_their_own_ranks(units: Any) -> None:
    """A teacher that each rank has for itself would take its statistics over the ranks of the student."""
    torch.manual_seed(0)
    norm, params, buffers = functionalize(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), sync_batch_norm=True)
    batches = torch.randn(2, 4, 3)

    def run(mesh: Any) -> Any:
        rank, _ = fshard.rank_and_size(mesh)
        own, student = (fshard.shard_params(params, fshard.make_plan(params, m, units=units)) for m in (None, mesh))

        def out(p: Any, q: Any) -> Any:
            return norm(p, buffers, batches[rank])[0], norm(q, buffers, batches[rank])[0]

        return [*fshard.predict(out)(student, own), *reversed(fshard.predict(out)(own, student))]

    whole = norm(params, buffers, batches.flatten(0, 1))[0].detach().view(2, 4, 2)
    for rank, (student, teacher, *swapped) in enumerate(simulated(run, shard=2)):
        torch.testing.assert_close(student, whole[rank])
        torch.testing.assert_close(teacher, norm(params, buffers, batches[rank])[0].detach())
        assert same_bits([student, teacher], swapped)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("strategy", ["FSDP", "ZeRO-2"])
def test_ranks_compare_the_modes_of_modules_that_are_cut(strategy: str, units: str) -> None:
    """With one unit, ranks in different modes would go on, and with several not."""

    def run(mesh: Any) -> Any:
        apply = NETS[0][0] if mesh.get_rank() else NETS[0][0].eval
        params = sharded(0, mesh, None, UNITS[units], **STRATEGIES[strategy][1])
        return fshard.evaluate(lambda p: apply(p["net"], {}, X, T)[0][-1].sum())(params)

    if strategy == "FSDP":
        with pytest.raises(RuntimeError, match=r"Net in (evaluation|training)"):
            simulated(run, shard=2)
    else:
        assert len(simulated(run, shard=2)) == 2
