"""`predict`: a rank's own result of any function of sharded parameters."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from support.models import LM_UNITS, NARROW, STRATEGIES, lm_batch, lm_params, rand, same_bits
from support.worlds import by_process_groups, gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import gather_params, optim, tree

HOW = {
    "eager": lambda fn: fn,
    "jit": partial(fshard.jit, backend="eager"),
    "inference": torch.inference_mode(),
    "gradients on": torch.enable_grad(),
}
POLICIES = {"plain": (None, torch.float64), "cast": ("compute=f32, output=f64", torch.float32)}


def rows_of(rank: int) -> Tensor:
    """A rank's tokens: ranks have other rows, and other numbers of them; rank 1 has none."""
    return lm_batch(0, rank)["tokens"][: 0 if rank == 1 else rank + 2]


def hidden(params: Any, tokens: Tensor, teacher: Any) -> dict[str, Any]:
    """Hidden states of a language model, parts of parameters, an intermediate of a teacher, and what is no tensor."""
    x = params["embed"][tokens]
    for block in params["blocks"]:
        x = x + block["scale"] * (torch.tanh(x @ block["w"] + block["b"]) @ block["out"])
    return {"x": x, "tail": (params["tail"], teacher["blocks"][0]["w"].sum(0)), "rows": len(tokens), "none": None}


def predicted(mesh: Any, strategy: str, how: str, policy: str | None) -> Any:
    """This rank's result, which is written to afterwards: parameters stay as they are."""
    params, other = lm_params(), tree.map(torch.neg, lm_params())
    cuts = STRATEGIES[strategy] if mesh is not None else {}
    student = fshard.shard_params(params, fshard.make_plan(params, mesh, units=LM_UNITS, policy=policy, **cuts))
    teacher = fshard.shard_params(other, fshard.make_plan(other, mesh, units=LM_UNITS))
    rank, _ = fshard.rank_and_size(mesh)
    result = HOW[how](fshard.predict(hidden))(student, rows_of(rank), teacher)
    tensors = [x for x in tree.leaves(result) if isinstance(x, Tensor)]
    assert not any(x.requires_grad for x in tensors)
    whole = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, result)
    if how != "inference":
        for x in tensors:
            x.fill_(7)
    assert same_bits(gather_params(student), params)
    assert same_bits(gather_params(teacher), other)
    return whole


def expected(rank: int, dtype: torch.dtype) -> Any:
    """What one device computes in a dtype, and returns in float64."""
    params = tree.map(lambda x: x.to(dtype), lm_params())
    return tree.map(
        lambda x: x.double() if isinstance(x, Tensor) else x,
        hidden(params, rows_of(rank), tree.map(torch.neg, lm_params())),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_result_is_that_of_one_device_on_this_ranks_rows(strategy, how, policy):
    """Ranks would get other ranks' rows, a mean over ranks, or rounded values."""
    text, dtype = POLICIES[policy]
    worlds = [{"shard": n} for n in (1, 2, 3)] if strategy in NARROW else [{"replicate": 2, "shard": 2}]
    results = [enumerate(simulated(predicted, strategy, how, text, **world)) for world in worlds]
    for rank, got in [(0, predicted(None, strategy, how, text)), *(each for result in results for each in result)]:
        want = expected(rank, dtype)
        assert same_bits(got, want)


@pytest.mark.parametrize("strategy", ["ddp", "full"])
def test_processes_predict_as_simulated_ranks_do(strategy):
    """What holds on simulated ranks would fail on processes."""
    assert same_bits(gloo(predicted, strategy, "eager", None), simulated(predicted, strategy, "eager", None))


class Net(nn.Module):
    """A module that trains and evaluates differently, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        """Scores: (n, 3)."""
        return self.layers(x)


def of_module(mesh: Any, how: str) -> Tensor:
    """Scores of a trained module in evaluation mode, which do not change when a donated step overwrites the state."""
    torch.manual_seed(0)
    apply, params, buffers = fshard.module.functionalize(Net())
    plan = fshard.make_plan(params, mesh, units=apply.units(nn.Linear))
    tx = optim.sgd(0.1)
    state = fshard.init_state(fshard.shard_params(params, plan), tx, extra=buffers)

    def loss(params: Any, buffers: Any, x: Tensor) -> Any:
        out, buffers = apply(params, buffers, x)
        return fshard.Mean(out.square().sum(), len(x)), buffers

    step = fshard.train_step(loss, tx, with_extra=True, donate=True)
    rank, _ = fshard.rank_and_size(mesh)
    x = rand(5, 4, seed=rank)
    predict = HOW[how](fshard.predict(lambda p, buffers, x: apply.eval(p, buffers, x)[0]))
    state, _ = step(state, x)
    got = predict(state.params, state.extra, x[: 1 + rank])
    before = got.clone()
    module = Net()
    module.load_state_dict(apply.state_dict(state.params, state.extra))
    assert torch.equal(got, module.eval()(x[: 1 + rank]).detach())
    step(state, x)
    assert torch.equal(got, before)
    return got


@pytest.mark.parametrize("how", ["eager", "jit"])
def test_a_module_in_evaluation_mode(how):
    """Predictions of a module would differ from those of the module that loads its parameters."""
    for ranks in (1, 2, 3):
        for rank, got in enumerate(simulated(of_module, how, shard=ranks)):
            assert got.shape == (1 + rank, 3)
    of_module(None, how)


def other_order(mesh: Any, hosts: bool) -> None:
    """Rank 1 reads units in another order; with `hosts` as between hosts, where nobody compares calls."""
    params = {"a": torch.ones(4), "b": torch.zeros(4)}
    plan = fshard.make_plan(params, mesh, units=["a", "b"])
    sharded = fshard.shard_params(params, by_process_groups(plan, mesh) if hosts else plan)
    order = "ab" if fshard.rank_and_size(mesh)[0] == 0 else "ba"
    fshard.predict(lambda p: [p[name].sum() for name in order])(sharded)


def test_ranks_that_read_units_in_another_order_are_an_error():
    """Ranks would get each other's units as the ones that they read, without a word."""
    with pytest.raises(fshard.MismatchError, match=r"for unit 'a' .*for unit 'b'"):
        simulated(other_order, False)
    for hosts, words in ((False, r"for unit 'a', .*for unit 'b'"), (True, "or read different units: read the same")):
        with pytest.raises(Exception, match=words):
            gloo(other_order, hosts)


def alone(mesh: Any) -> float | None:
    """What rank 0 predicts without the others."""
    params = {"w": torch.arange(3.0)}
    plan = fshard.make_plan(params, mesh, params_over=(), grads_over=())
    sharded = fshard.shard_params(params, plan)
    if fshard.rank_and_size(mesh)[0]:
        return None
    return fshard.predict(lambda p: p["w"].sum())(sharded).item()


def test_a_rank_that_has_all_parameters_predicts_alone():
    """Samples for the log would need all ranks where no parameter is cut."""
    assert simulated(alone) == gloo(alone) == [3.0, None]


def test_errors():
    """A module, a plain tree, or parameters given to a module outside of a loss would fail somewhere inside."""
    apply, params, buffers = fshard.module.functionalize(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"fn=.*expected fn\(params, \*args, \*\*kwargs\), a function.*functional_call"):
        fshard.predict(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"expected a Sharded, got dict: call fshard\.shard_params"):
        fshard.predict(lambda p: p)(params)
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    with pytest.raises(TypeError, match=r"in a loss or fshard\.predict\(lambda p, x: apply\(p, buffers, x\)\[0\]\)"):
        apply(sharded, buffers, torch.ones(1, 2))


@dataclass
class Output:
    """A result of a class that torch alone has registered."""

    w: Any


pytree.register_dataclass(Output)
VIEWS: dict[str, tuple[Any, Any]] = {  # of a leaf (6,), and how its elements are read
    "array": (lambda w: w[1:].numpy(), torch.from_numpy),
    "dataclass": (lambda w: Output(w[1:]), lambda x: x.w),
    "sparse": (
        lambda w: torch.sparse_coo_tensor(
            torch.arange(1, 6)[None], w[1:], (6,), is_coalesced=True, check_invariants=True
        ),
        lambda x: x.to_dense()[1:],
    ),
}


@pytest.mark.parametrize("cuts", [{}, {"params_over": ()}], ids=["sharded", "whole"])
@pytest.mark.parametrize("name", VIEWS)
def test_what_shares_memory_with_parameters_is_copied(name: str, cuts: Any) -> None:
    """A donated step overwrites the parameters where they lie: an array, say, of one device would change with them."""
    take, read = VIEWS[name]

    def kept(mesh: Any) -> Any:
        whole = {"w": torch.arange(6.0)}
        sharded = fshard.shard_params(whole, fshard.make_plan(whole, mesh, **(cuts if mesh is not None else {})))
        predicted = fshard.predict(lambda p: take(p["w"]))(sharded)
        _, aux = fshard.evaluate(lambda p: (p["w"].sum(), [take(p["w"])]), has_aux=True)(sharded)
        for x in sharded.tensors:
            x.zero_()
        return [read(x).tolist() for x in (predicted, *aux)]

    for results in (kept(None), *simulated(kept)):
        assert results == [[1.0, 2.0, 3.0, 4.0, 5.0]] * 2
