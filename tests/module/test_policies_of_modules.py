"""`make_plan(policy={"net": ..., "critic": ...})`: each module has the policy that it has in a plan of its own."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.module import functionalize
from fshard.plan.precision import Policy
from fshard.testing import oracle

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Net(nn.Module):
    """Layers, a norm, and a call of a submodule with a float32 tensor made inside."""

    def __init__(self, width: int, norm: type[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.norm, self.time = norm(width), nn.Linear(1, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Return a value in the dtype of the module's computation."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.time(t[:, None].float().to(x.dtype))


POLICIES = [
    "compute=bf16",
    "compute=f16,cast_inputs=no; time: compute=f32",
    "storage=bf16,reduce=f32",
    "; **.layers.*: compute=bf16; time: compute=f16",
    "compute=bf16; layers.0: compute=f32; **.bias: reduce=f32",
    "storage=f64; norm: storage=f32",
    "",
]
NORMS = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
Drawn = tuple[str, str, tuple[str, ...]]  # policy, norm, cast
modules = st.tuples(
    st.sampled_from(POLICIES), st.sampled_from([*NORMS]), st.sampled_from([(), ("time",), ("layers.1", "norm")])
)


def made(drawn: Drawn, width: int) -> Any:
    text, norm, cast = drawn
    torch.manual_seed(width)
    apply, params, buffers = functionalize(Net(width, NORMS[norm]))
    return apply, params, buffers, apply.policy(text, cast=list(cast))


def outcome(mesh: Any, first: Drawn, second: Drawn, units: Any) -> Any:
    """Outputs and gradients of two modules: in one plan with a dict of policies, and in two plans."""
    parts = {"net": made(first, 3), "critic": made(second, 4)}
    x = {name: torch.linspace(-1, 1, 5 * width).view(5, width) for name, width in zip(parts, (3, 4), strict=True)}

    def called(params: Any, name: str) -> tuple[Tensor, Tensor]:
        apply, _, buffers, _ = parts[name]
        t = torch.full((5,), 1001.3)
        try:
            out, _ = apply(params, buffers, x[name], t)
        except RuntimeError as error:  # a policy without casts
            return params["norm"]["weight"].double().sum(), torch.tensor(len(str(error)))
        return out.double().square().sum(), out

    def together(p: Any) -> tuple[Tensor, dict[str, Tensor]]:
        outs = {name: called(p[name], name) for name in parts}
        return sum((total for total, _ in outs.values()), torch.zeros(())), {n: out for n, (_, out) in outs.items()}

    params = {name: part[1] for name, part in parts.items()}
    plan = fshard.make_plan(params, mesh, units=units, policy={name: part[3] for name, part in parts.items()})
    sharded = fshard.shard_params(params, plan)
    (_, outs), grads = fshard.value_and_grad(together, has_aux=True)(sharded)
    one = {n: (outs[n], fshard.gather_params(grads[n])) for n in parts}
    two = {}
    for name, part in parts.items():
        alone = fshard.shard_params(part[1], fshard.make_plan(part[1], mesh, policy=part[3]))
        (_, out), grads = fshard.value_and_grad(lambda p, name=name: called(p, name), has_aux=True)(alone)
        two[name] = out, fshard.gather_params(grads)
    assert Policy.parse(str(plan.policy)) == plan.policy
    return one, two


@pytest.mark.filterwarnings("ignore:.*drops the running statistics")
@pytest.mark.law
@hypothesis.given(modules, modules, st.sampled_from([None, [], ["net.layers.*", "critic"]]), st.sampled_from([1, 2, 3]))
@hypothesis.settings(deadline=None, max_examples=30)
def test_two_modules_in_one_plan_are_each_as_in_their_own(first: Drawn, second: Drawn, units: Any, ranks: int) -> None:
    """Outputs, their dtypes and gradients have the bits of plans of one module."""
    for one, two in simulated(lambda mesh: outcome(mesh, first, second, units), shard=ranks):
        same(one, two)


def same(one: Any, two: Any) -> None:
    pairs = zip(fshard.tree.leaves(one), fshard.tree.leaves(two), strict=True)
    for path, (a, b) in zip(fshard.tree.paths(one), pairs, strict=True):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path


def on_processes(mesh: Any) -> Any:
    return outcome(mesh, (POLICIES[0], "batch", ("time",)), (POLICIES[1], "layer", ()), None)


@pytest.mark.filterwarnings("ignore:.*drops the running statistics")
def test_on_processes() -> None:
    """Ranks of processes gather each module in its dtypes."""
    for one, two in gloo(on_processes):
        same(one, two)


def tied(units: Any) -> list[torch.dtype]:
    """The dtypes of outputs of an actor and a critic that share their first leaf."""
    (actor, a, _), (critic, c, _) = (functionalize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) for _ in "ac")
    c["0"] = a["0"]
    params = {"actor": a, "critic": c}
    plan = fshard.make_plan(
        params, units=units, policy={"actor": "compute=bf16", "critic": "compute=bf16,cast_inputs=no"}
    )
    x = torch.ones(1, 2)

    def loss(p: Any) -> tuple[Tensor, list[torch.dtype]]:
        out = actor(p["actor"], {}, x)[0]
        with pytest.raises(RuntimeError, match="dtype"):
            critic(p["critic"], {}, x)
        return out.float().sum(), [out.dtype, critic(p["critic"], {}, x.bfloat16())[0].dtype]

    return fshard.evaluate(loss, has_aux=True)(fshard.shard_params(params, plan))[1]


@pytest.mark.parametrize("units", [None, [], ["actor", "critic"]])
def test_a_leaf_of_two_modules_does_not_name_the_module(units: Any) -> None:
    """The critic would be called with the policy of the actor."""
    assert tied(units) == [BF16, BF16]


def test_one_policy_for_several_modules() -> None:
    """A key may be a pattern; the submodule casts what it is given in each of them."""
    apply, params, buffers, policy = made((POLICIES[1], "layer", ("time",)), 2)
    params = {
        "critics": [fshard.tree.map(lambda x: nn.Parameter(x.detach().clone()), params) for _ in range(2)],
        "other": nn.Parameter(torch.ones(2)),
    }
    sharded = fshard.shard_params(params, fshard.make_plan(params, policy={"critics.*": policy}))

    def loss(p: Any) -> tuple[Tensor, list[torch.dtype]]:
        outs = [apply(q, buffers, torch.ones(1, 2, dtype=F16), torch.ones(1))[0] for q in p["critics"]]
        return p["other"].sum(), [out.dtype for out in outs]

    assert fshard.evaluate(loss, has_aux=True)(sharded)[1] == [F32, F32]


def first_of(p: Any) -> Any:
    """Read both modules, and return the first."""
    net, _ = p["net"], p["critic"]
    return net


WAYS: dict[str, Any] = {
    "directly": lambda p: p["net"],
    "both are read first": first_of,
    "copied": lambda p: dict(p)["net"],
    "mapped": lambda p: fshard.tree.map(lambda t: t, p)["net"],
    "detached": lambda p: fshard.tree.map(torch.Tensor.detach, p["net"]),
    "views": lambda p: fshard.tree.map(lambda t: t[...], p["net"]),
    "gathered": lambda p: fshard.gather_params(p)["net"],
    "computed": lambda p: fshard.tree.map(lambda t: t * 1, p["net"]),
    "assembled": lambda p: {"2": p["net"]["2"], "0": p["net"]["0"]},
}
CALLS: dict[str, Any] = {
    "called": lambda fn, p, x: fn(p, x),
    "remat": lambda fn, p, x: fshard.remat(fn)(p, x),
    "checkpoint": lambda fn, p, x: checkpoint(fn, p, x, use_reentrant=False),
    "twice": lambda fn, p, x: fn(p, x) + 0 * fn(p, x),
}


def net_of(width: int) -> Any:
    torch.manual_seed(width)
    return functionalize(nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)))


@pytest.mark.parametrize("critic_width", [5, 6])
@pytest.mark.parametrize("units", [None, [], ["net", "critic"], ["net.*", "critic"]])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", CALLS)
def test_however_parameters_are_read(critic_width: int, units: Any, way: str, how: str) -> None:
    """The module followed the policy of the other one, or none, if its parameters were read before the other's."""
    net, params, _ = net_of(6)
    _, others, _ = net_of(critic_width)
    if critic_width == 6 and way == "computed":
        pytest.skip("computed parameters of equal modules are told by nothing: an error")
    policy, x = net.policy("compute=bf16; 0: compute=f32", cast=["2"]), torch.linspace(-1, 1, 20).view(5, 4)
    read = lambda p, x: CALLS[how](lambda q, x: net(q, {}, x)[0], WAYS[way](p), x)  # noqa: E731
    both = {"critic": others, "net": params}

    def run(mesh: Any) -> list[Tensor]:
        policies = {"critic": "compute=f16", "net": policy}
        of_both = fshard.make_plan(both, mesh, units=units, policy=policies)
        alone = fshard.make_plan(params, mesh, policy=policy)
        in_own = lambda p, x: CALLS[how](lambda q, x: net(q, {}, x)[0], p, x)  # noqa: E731
        return [
            fshard.predict(read)(fshard.shard_params(both, of_both), x),
            fshard.predict(in_own)(fshard.shard_params(params, alone), x),
        ]

    for found, expected in simulated(run, shard=2):
        assert found.dtype == expected.dtype == BF16
        assert torch.equal(found, expected)


def test_equal_modules_that_nothing_tells_apart() -> None:
    """The first policy would be taken in silence."""
    net, params, _ = net_of(6)
    policies = {"a": "compute=bf16", "b": "compute=f32"}
    both = {"a": params, "b": net_of(6)[1]}
    sharded = fshard.shard_params(both, fshard.make_plan(both, policy=policies))
    loss = lambda p: net(fshard.tree.map(lambda t: t * 1, p["b"]), {}, torch.ones(1, 4))[0].sum()  # noqa: E731
    with pytest.raises(ValueError, match="modules of equal leaves have different policies \\('a' and 'b'\\)"):
        fshard.evaluate(loss)(sharded)


def test_derivatives_and_the_oracle_know_the_module() -> None:
    """Forward derivatives, and the oracle's plain tensors, were computed without the policy."""
    net, params, _ = net_of(6)
    policy, tx = net.policy("compute=bf16; 0: compute=f32", cast=["2"]), optim.sgd(0.1)
    both, policies = {"net": params, "critic": net_of(5)[1]}, {"net": policy, "critic": "compute=f32"}
    x = torch.linspace(-1, 1, 20).view(5, 4)
    loss = lambda p, x: net(p, {}, x)[0].float().square().sum()  # noqa: E731
    sharded = fshard.shard_params(both, fshard.make_plan(both, policy=policies))
    alone = fshard.shard_params(params, fshard.make_plan(params, policy=policy))
    products = [
        fshard.gather_params(fshard.hvp(fn)(p, fshard.tree.map(torch.ones_like, p), x))
        for fn, p in ((lambda p, x: loss(p["net"], x), sharded), (loss, alone))
    ]
    same(products[0]["net"], products[1])
    plain = oracle(lambda p, x: loss(p["net"], x), tx, policy=policies)
    _, expected = plain.step(plain.init(both), [x])
    _, found = fshard.train_step(lambda p, x: loss(p["net"], x), tx)(fshard.init_state(sharded, tx), x)
    assert torch.equal(found["loss"], expected["loss"])


@pytest.mark.parametrize(
    ("others", "name", "policies"),
    [
        ("net", "net.0", {"net": "compute=f16"}),
        ("x[0]", "x0", {"x[0]": "compute=f16"}),
        ("*", "b", {"*": "compute=f16"}),
    ],
)
def test_a_name_means_itself(others: str, name: str, policies: Any) -> None:
    """The policy of another module, whose name is a pattern or a beginning of this name."""
    net, params, _ = net_of(6)
    both = {others: net_of(5)[1], name: params}
    plan = fshard.make_plan(both, policy={**policies, name: "compute=bf16"})
    out = fshard.predict(lambda p: net(p[name], {}, torch.ones(1, 4))[0])(fshard.shard_params(both, plan))
    assert out.dtype == BF16


def test_a_module_beside_the_named_ones() -> None:
    """It would cast its inputs because another module's parameters are stored in another dtype."""
    net, params, _ = net_of(6)
    apply, own, _ = functionalize(nn.Sequential(nn.LayerNorm(4)).double())
    both = {"net": params, "norm": own}
    plan = fshard.make_plan(both, policy={"net": net.policy("storage=bf16", cast=["2"])})
    outs = lambda p, x: [apply(q, {}, x)[0] for q in (p["norm"], own)]  # noqa: E731
    found = fshard.predict(outs)(fshard.shard_params(both, plan), torch.ones(1, 4, dtype=torch.float64))
    assert [x.dtype for x in found] == [torch.float64] * 2
    with pytest.raises(ValueError, match=r"policy: '\*\*\.net': cast_at: expected a pattern of modules without"):
        fshard.make_plan(both, policy={"**.net": net.policy("compute=bf16", cast=["2"])})


def test_an_override_has_paths_below_its_pattern() -> None:
    """The inner override had no effect."""
    params = {"a": {"w": torch.ones(2), "b": torch.ones(2)}, "b": torch.ones(2)}
    plan = fshard.make_plan(params, policy=Policy(overrides={"a": "compute=f16", "b": "storage=f64"}))
    nested = Policy(
        compute="bf16", overrides={"a": Policy(compute="f16", cast_at=("x",), overrides={"b": "reduce=f32"})}
    )
    assert str(nested) == "compute=bf16,cast_at=a.x; a.b: compute=f16,reduce=f32; a: compute=f16"
    assert Policy.parse(str(nested)) == nested
    computed = {slot.path: str(plan.kinds[slot.kind].precision) for slot in plan.slots}
    assert computed == {"a.w": "float32, computed in f16", "a.b": "float32, computed in f16", "b": "float64"}
    with pytest.raises(ValueError, match="the pattern 'nett' matches nothing; the tree's top level is 'net'"):
        fshard.make_plan({"net": params}, policy={"nett": "compute=bf16"})
    with pytest.raises(ValueError, match="policy: 'a': output=torch\\.float32 is the dtype of the loss, one for"):
        fshard.make_plan(params, policy={"a": "output=f32"})
    with pytest.raises(TypeError, match="expected patterns above and in a policy with paths of its own"):
        Policy(overrides=[(lambda path, x: True, Policy(cast_at=("x",)))])
    assert Policy(output="f32", overrides={"a": "output=f32"}).output == F32
