"""What the first state of a run must have alike on all ranks: copies of parameters, the seed, the loss scale."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import NARROW, STRATEGIES, rand
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import DynamicLossScale, MismatchError, StaticLossScale, optim
from fshard.comm.consensus import unlike_index

WORLDS = [(1, 2), (1, 3), (2, 2)]
TX = optim.sgd(0.1)


def params() -> dict[str, Any]:
    """Leaves of several dtypes, one of them frozen."""
    return {"a": rand(5, 3, seed=1), "half": rand(7, seed=2).bfloat16(), "n": torch.arange(3), "s": rand(seed=3)}


def begun(mesh: Any, strategy: dict[str, Any], whole: Any = None, changed: str | None = None, **given: Any) -> None:
    """A first state, the leaf `changed` another on the second half of the ranks."""
    own, last = params(), mesh.get_rank() >= mesh.size() // 2
    if changed is not None and last:
        own[changed] = own[changed] + torch.ones_like(own[changed])
    plan = fshard.make_plan(own, mesh, units=["a"], whole=whole, **strategy)
    fshard.init_state(fshard.shard_params(own, plan), TX, **{key: make(last) for key, make in given.items()})


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("changed", list(params()))
def test_copies_of_parameters_are_equal(name: str, changed: str) -> None:
    """Replicas that begin with different parameters would train apart."""
    for replicate, shard in WORLDS:
        if replicate == 1 and name not in NARROW:
            continue
        over, refused = STRATEGIES[name].get("params_over", "shard"), f"leaf {changed!r}: ranks along .* src=0"
        copied = (replicate > 1 and "replicate" not in over) or "shard" not in over
        for whole in (None, changed):
            simulated(begun, STRATEGIES[name], whole, replicate=replicate, shard=shard)
            if copied or whole:
                with pytest.raises(MismatchError, match=refused):
                    simulated(begun, STRATEGIES[name], whole, changed, replicate=replicate, shard=shard)
            else:  # nobody has a second copy to compare with
                simulated(begun, STRATEGIES[name], whole, changed, replicate=replicate, shard=shard)


def unlike(mesh: Any, dtype: torch.dtype, first: int, bit: int | None) -> int | None:
    """Which of two tensors differs: the second from element `first` of its memory on, with one bit turned on rank 1."""
    x = (rand(11, seed=1).float() * 100).to(dtype)
    if bit is not None and mesh.get_rank() == 1:
        (torch.view_as_real(x) if dtype.is_complex else x).view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
    return unlike_index([torch.zeros(0), x[first:]], mesh, ("shard",))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex128], ids=str
)
def test_one_other_bit_is_noticed_wherever_it_lies(dtype: torch.dtype) -> None:
    """Bits are summed as words, which a tensor may not fill, or begin in the middle of."""
    size = dtype.itemsize
    for first in (0, 1, 3):
        assert simulated(unlike, dtype, first, None) == [None, None]
        for element in {first, first + 1, 9, 10}:
            bit = 8 * (element * size + size - 1) + (element % 7 if dtype is not torch.bool else 0)
            assert simulated(unlike, dtype, first, bit) == [1, 1], (first, element)


OTHERS: dict[str, tuple[str, Callable[[bool], Any], str]] = {
    "seed": ("seed", lambda last: int(last), "rank 0 has seed=0; rank . has seed=1"),
    "scale": ("loss_scale", lambda last: DynamicLossScale(16.0 if last else 8.0), r"of \[8.0, .*of \[16.0, "),
    "interval": ("loss_scale", lambda last: DynamicLossScale(8.0, growth_interval=1 + last), "loss_scale=Dynamic"),
    "class": ("loss_scale", lambda last: StaticLossScale(8.0) if last else DynamicLossScale(8.0), "loss_scale=Static"),
    "none": ("loss_scale", lambda last: StaticLossScale(8.0) if last else None, "loss_scale=NoLossScale"),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("name", NARROW)
def test_what_a_state_begins_with_is_equal(name: str, what: str) -> None:
    """Gradients scaled by 8 on one rank and by 16 on another would be summed as if they had one scale."""
    argument, make, words = OTHERS[what]
    for replicate, shard in WORLDS:
        alike = partial(begun, strategy=STRATEGIES[name], **{argument: lambda last: make(False)})
        simulated(alike, replicate=replicate, shard=shard)
        with pytest.raises(MismatchError, match=f"init_state: the first state differs.*{words}.*Give init_state"):
            simulated(partial(begun, strategy=STRATEGIES[name], **{argument: make}), replicate=replicate, shard=shard)


def in_processes(mesh: Any) -> None:
    """Both errors, on every rank."""
    for given in ({"changed": "half"}, {"seed": int}):
        with pytest.raises(MismatchError, match="init_state"):
            begun(mesh, STRATEGIES["ddp"], **given)
    begun(mesh, STRATEGIES["ddp"])


def test_in_processes() -> None:
    """Real processes that begin differently would not be told."""
    gloo(in_processes, shard=2)


def test_a_state_that_is_not_there_is_not_compared() -> None:
    """Planning with fake tensors, or on an abstract mesh, would try to communicate."""

    def shapes_of(plan: fshard.Plan) -> Any:
        return fshard.eval_shape(lambda p: fshard.init_state(fshard.shard_params(p, plan), TX), params())

    def law(mesh: Any) -> None:
        plan = fshard.make_plan(params(), mesh, params_over=())
        with fshard.collectives.tally() as records:
            shapes_of(plan)
        assert not [*records]

    simulated(law, shard=2)
    plan = fshard.make_plan(params(), fshard.AbstractMesh(shard=4), params_over=())
    shapes_of(plan)
    fshard.init_state(fshard.shard_params(params(), plan), TX)  # tensors with values, of one rank


def test_an_extra_without_values_is_an_error() -> None:
    """The first call of a module with buffers on meta would fail, far from the place that made them."""
    extra = {"norm": {"mean": torch.zeros(2), "var": torch.ones(2, device="meta")}}

    def begin(p: Any) -> Any:
        return fshard.init_state(fshard.shard_params(p, fshard.make_plan(params())), TX, extra=extra)

    with pytest.raises(ValueError, match=r"extra leaf 'norm.var': expected values.* Use apply.init_buffers"):
        begin(params())
    fshard.eval_shape(begin, params())  # shapes alone are asked for
    begin({name: x.to("meta") for name, x in params().items()})


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda p: p,
    "detached": lambda p: p.detach(),
    "a view": lambda p: p.view(-1)[:].view(p.shape),
}
WRAPPERS: dict[str, Callable[[optim.Transform], optim.Transform]] = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optim.chain(tx, optim.scale(0.5)),
    "by_label": lambda tx: optim.by_label({"a": tx, "b": optim.sgd(0.1)}, {"a": "a", "**": "b"}),
    "masked": lambda tx: optim.masked(tx, lambda path, _: path == "a"),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "in backward": {"donate": True, "in_backward": True},
    "jit": {"donate": True, "backend": "eager"},
}


def pulled(alias: Callable[[Tensor], Tensor]) -> optim.Transform:
    """Pulls to the first parameters, as L2-SP does, and to a mean that begins there: a state of one tensor, twice."""

    def init(params: Any) -> Any:
        first = fshard.tree.map(alias, params)
        return {"first": first, "mean": first}

    def update(grads: Any, state: Any, params: Any = None, **extra: object) -> tuple[Any, Any]:
        mean = fshard.tree.map(lambda m, g: m - 0.5 * g, state["mean"], grads)
        new = {"first": state["first"], "mean": mean}
        return fshard.tree.map(
            lambda g, p, first, m: -0.1 * (g + 2 * p - first - m), grads, params, state["first"], mean
        ), new

    return optim.Transform(init, update, elementwise=True)


def trained(mesh: Any, tx: optim.Transform, way: dict[str, Any]) -> Any:
    """Whole parameters after three steps, on this rank's rows of the batches."""
    whole = {"a": rand(5, 3, seed=1), "b": {"c": rand(7, seed=2), "d": rand(3, seed=3)}}
    state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a", "b"])), tx)

    def loss(p: Any, x: Tensor) -> fshard.Sum:
        return fshard.Sum((x @ p["a"]).square().sum() + sum((x[:, :1] * y).square().sum() for y in p["b"].values()))

    step: Any = fshard.train_step(loss, tx, **({} if "backend" in way else way))
    step = fshard.jit(step, **way) if "backend" in way else step
    for i in range(3):
        rows = rand(12, 5, seed=10 + i)
        state, _ = step(state, rows if mesh is None else rows.chunk(mesh.size())[mesh.get_rank()])
    return fshard.gather_params(state.params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("alias", ALIASES)
def test_an_optimizer_may_return_the_parameters(alias: str, wrapper: str, way: str) -> None:
    """An update in place would move what the optimizer has kept of the parameters, or two tensors of its as one."""
    make = WRAPPERS[wrapper]
    expected = trained(None, make(pulled(torch.clone)), {})
    for size in (None, 1, 2, 3) if way != "jit" else (None, 2):
        tx = make(pulled(ALIASES[alias]))
        got = trained(None, tx, WAYS[way]) if size is None else simulated(trained, tx, WAYS[way], shard=size)[0]
        for x, y in zip(fshard.tree.leaves(got), fshard.tree.leaves(expected), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


_CHECKED = """
import torch, fshard
from fshard.collectives import tally

def law(mesh):
    params = {"a": torch.ones(4, 2), "b": torch.ones(4), "c": torch.ones(4)}
    plan = fshard.make_plan(params, mesh, units=[], split={"a": ("replicate", 0)}, whole=["a", "b"])
    with tally() as calls:
        fshard.init_state(fshard.shard_params(params, plan), fshard.optim.sgd(0.1))
    return [call.axis for call in calls]

print(fshard.testing.simulate(law, replicate=2, shard=2)[0])
"""


def test_processes_check_copies_in_one_order():
    """Processes hash strings differently: each would compare copies along another axis first, and all would wait."""
    orders = set[str]()
    for seed in ("4", "5"):  # with these a set of axes has two orders in Python 3.11
        command, env = [sys.executable, "-c", _CHECKED], os.environ | {"PYTHONHASHSEED": seed}
        orders.add(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
    assert len(orders) == 1
