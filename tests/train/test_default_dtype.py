"""A step has the same dtypes and bits under any torch.set_default_dtype and torch.set_default_device."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.optimizers import TRANSFORMS
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, optim, tree

DTYPES = [torch.float64, torch.bfloat16, torch.float16]
META = torch.device("meta")  # a tensor made there has no values, so it shows in all results
DEFAULTS = [*DTYPES, META]
# torch.optim keeps its step counts in the default dtype if that is float64
OURS = [name for name in TRANSFORMS if not name.startswith("from_torch")]
SCALERS = {
    "none": lambda: None,
    "static": lambda: StaticLossScale(1000.25),
    "dynamic": lambda: DynamicLossScale(2.0**16 + 1, growth_interval=1),
}


@contextmanager
def by_default(default: torch.dtype | torch.device) -> Iterator[None]:
    """Set another default dtype, or the default device of this thread, inside the block."""
    if isinstance(default, torch.device):
        with default:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _params(dtype: torch.dtype) -> dict[str, Tensor]:
    rows = torch.arange(16, dtype=torch.float64, device="cpu").sin()
    return {"w": rows[:12].view(4, 3).to(dtype), "b": rows[12:].to(dtype)}


def _loss(params: Any, x: Tensor) -> fshard.Mean:
    rows = (x.to(params["w"].dtype) @ params["w"]).square().sum(1) + (params["b"] * params["b"]).sum()
    return fshard.Mean(rows.sum(), len(x))


def _run(name: str, scaler: str, dtype: torch.dtype, mesh: Any = None) -> list[Tensor]:
    """All tensors of the state and the metrics after 0, 1 and 2 steps; with a loss scale the second overflows."""
    params, tx = _params(dtype), TRANSFORMS[name]()
    plan = fshard.make_plan(params, mesh, block=4)
    state = fshard.init_state(fshard.shard_params(params, plan), tx, loss_scale=SCALERS[scaler]())
    step = fshard.train_step(_loss, tx, accumulate=2, clip_norm=0.5)
    x, kept = torch.arange(8, dtype=torch.float32, device="cpu").cos().view(2, 4), [*tree.leaves(state)]
    for batch in (x, x + (torch.inf if scaler != "none" else 1)):
        state, metrics = step(state, batch)
        kept += [*tree.leaves(state), *metrics.values()]
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("name", OURS)
def test_a_step_is_the_same_under_any_default(name: str, scaler: str, dtype: torch.dtype) -> None:
    """A step's dtypes and bits depend on no default: otherwise a line elsewhere in a program would alter training."""
    expected = _run(name, scaler, dtype)
    for default in DEFAULTS:
        with by_default(default):
            found = _run(name, scaler, dtype)
        assert [x.dtype for x in found] == [x.dtype for x in expected], default
        assert same_bits(found, expected), default


def _on_ranks(mesh: Any, device: Any = None) -> dict[str, list[Tensor]]:
    with device or nullcontext():  # of this rank's thread
        return {name: _run(name, "dynamic", torch.float32, mesh) for name in ("adamw", "adamw_8bit", "lamb", "lbfgs")}


def test_nor_on_two_ranks() -> None:
    """On two ranks the bits depend on no default: otherwise ranks with different defaults would disagree."""
    expected = simulated(_on_ranks, shard=2)
    for default in DTYPES:
        with by_default(default):
            found = simulated(_on_ranks, shard=2)
        assert same_bits(found, expected), default
    assert same_bits(simulated(_on_ranks, META, shard=2), expected)


def _in_a_graph() -> list[Tensor]:
    """All tensors of the state and the metrics after one jitted step with dropout."""
    params, tx = _params(torch.float32), optim.adamw(optim.schedules.linear(0.1, 0.2, 5))
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx, DynamicLossScale(8.0))

    def loss(p: Any, x: Tensor) -> fshard.Mean:
        return _loss({"w": torch.nn.functional.dropout(p["w"], 0.3), "b": p["b"]}, x)

    step = fshard.jit(fshard.train_step(loss, tx, accumulate=2, clip_norm=0.5), backend="eager")
    state, metrics = step(state, torch.arange(8, dtype=torch.float32, device="cpu").cos().view(2, 4))
    return [*tree.leaves(state), *metrics.values()]


def test_nor_in_a_graph() -> None:
    """A graph that is traced under any default keeps its bits: otherwise it would hold tensors of that dtype or
    device."""
    expected = _in_a_graph()
    for default in DEFAULTS:
        with by_default(default):
            assert same_bits(_in_a_graph(), expected), default


def _values() -> dict[str, Any]:
    """What functions return that make tensors from numbers, or from no tensor of the caller's dtype."""
    grads = {
        "w": torch.tensor([1.0, torch.inf], dtype=torch.float32, device="cpu"),
        "c": torch.ones(2, dtype=torch.complex64, device="cpu"),
    }
    scaler, none = DynamicLossScale(), NoLossScale()
    like, empty = _params(torch.float32), torch.zeros(0, dtype=torch.float32, device="cpu")
    state = optim.adamw(0.1).init(like)
    saved = optim.state.state_dict(state, like)
    saved["state"]["w"]["step"] = 3000.0
    saved["state"]["b"]["step"] = 3000.0
    return {
        "value": [scaler.value, StaticLossScale(1000.3).value, none.value],
        "unscale": [scaler.unscale(grads), none.unscale(grads), scaler.unscale(grads, labels={"**": "a"})[1]],
        "nonfinite_leaves": torch.tensor([path == "w" for path in fshard.tree.nonfinite_leaves(grads)], device="cpu"),
        "global_norm": [
            fshard.optim.global_norm({}),
            fshard.optim.global_norm({"e": empty}),
        ],
        "join_batches": [weight for _, weight in fshard.collectives.join_batches([1, 2])],
        "schedules": [
            make(3001.0) for make in (optim.schedules.linear(0.0, 1.0, 5000), optim.schedules.cosine(1.0, 5000))
        ],
        "join": optim.schedules.join([optim.schedules.constant(1.0), optim.schedules.linear(0.0, 1.0, 5000)], [3])(
            3001.0
        ),
        "load_state_dict": optim.state.load_state_dict(saved, state, like),
        "mean": fshard.evaluate(lambda p: fshard.Mean(p["w"].sum(), 3001.0))(
            fshard.shard_params(like, fshard.make_plan(like))
        ),
    }


def test_nor_does_what_other_functions_make() -> None:
    """Scales, norms, weights and schedules depend on no default: otherwise counts would be rounded in bfloat16."""
    expected = _values()
    for default in DEFAULTS:
        with by_default(default):
            found = _values()
        for name, value in expected.items():
            assert same_bits(found[name], value), (default, name)


class _Mean(torch.optim.Optimizer):
    """A user's optimizer whose state has a number and a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:  # type: ignore[override]
        """Subtract the mean of all gradients so far."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["made"] = state.get("made", 0.0) + 1.0
                state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                p.data.sub_(state["sum"] / state["made"], alpha=group["lr"])


def _adapted() -> list[Any]:
    params, tx = _params(torch.float32), optim.from_torch(_Mean)
    return [tx.init(params), tx.step(params, tx.init(params), params), optim.from_torch(_Mean).init({})]


def test_nor_does_the_state_of_a_users_class() -> None:
    """The state of a user's class under `from_torch` depends on no default: otherwise its bits would change."""
    expected = _adapted()
    for default in DEFAULTS:
        with by_default(default):
            assert same_bits(_adapted(), expected), default


@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name.startswith("from_torch")])
@pytest.mark.parametrize("default", [torch.float32, *DTYPES])
def test_torchs_own_state_is_torchs(name: str, default: torch.dtype) -> None:
    """`from_torch` keeps the dtypes of torch's own state: otherwise a checkpoint of torch would not fit."""
    with by_default(default):
        kept = tree.leaves(TRANSFORMS[name]().init(_params(torch.float32)))
        leaf = torch.nn.Parameter(_params(torch.float32)["w"])
        leaf.grad = torch.zeros_like(leaf)
        theirs = getattr(torch.optim, name.removeprefix("from_torch-"))([leaf], **_settings(name))
        theirs.step()
    expected = {x.dtype for x in theirs.state[leaf].values()}
    assert {x.dtype for x in kept} == expected


def _settings(name: str) -> dict[str, Any]:
    return {"momentum": 0.9} if name == "from_torch-SGD" else {"amsgrad": True} if name == "from_torch-Adam" else {}


# Functions of torch that make a tensor on the default device unless they get `device=`.
_FACTORIES = {
    *("tensor", "as_tensor", "asarray", "zeros", "ones", "empty", "full", "arange", "linspace", "logspace", "eye"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor", "empty_strided", "tril_indices", "triu_indices"),
}


def made_anywhere(source: str) -> list[int]:
    """The lines that make a tensor without a device; `as_tensor` counts too, for it moves tensors."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)]
    made = [call for call in named if call.func.value.id == "torch" and call.func.attr in _FACTORIES]  # type: ignore
    return [call.lineno for call in made if not {"device", None} & {word.arg for word in call.keywords}]


def test_every_tensor_is_made_somewhere() -> None:
    """Every call that makes a tensor names a device: otherwise set_default_device would move part of a state."""
    assert made_anywhere("torch.zeros(2)\ntorch.zeros(2, device='cpu')\ntorch.tensor(1, **options)") == [1]
    sources = {path: path.read_text() for path in Path(fshard.__file__).parent.rglob("*.py")}
    assert {path: lines for path, source in sources.items() if (lines := made_anywhere(source))} == {}
