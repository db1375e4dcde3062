"""Users' optimizer classes as transformations: the class's own results, on any mesh."""

from typing import Any

import pytest
import torch
from support.models import WORLDS, rand, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import optim

START = {"w": rand(5, 3, seed=0), "b": rand(3, seed=1), "s": rand(seed=2)}
GRADS = [{name: rand(*x.shape, seed=10 * i + x.ndim) for name, x in START.items()} for i in range(1, 5)]


class Momentum(torch.optim.Optimizer):
    """Keeps a Python number, a tensor and a copy of the initial value; its update depends on the whole leaf."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, gain: float = 1.0) -> None:
        """m <- 0.9 m + g / |g|; p <- p - lr gain m / (1 - 0.9^t) - lr (p - p0)."""
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept.update(t=0, first=p.clone(), m=torch.zeros_like(p))
                kept["t"] += 1
                kept["m"].mul_(0.9).add_(p.grad / p.grad.norm().clamp(min=1e-9))
                p.sub_(group["lr"] * (gain * kept["m"] / (1 - 0.9 ** kept["t"]) + p - kept["first"]))


class Counting(Momentum):
    """Keeps one number for all parameters in its param group."""

    def step(self, closure: Any = None) -> None:
        """Step, and count the steps in the group."""
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Elsewhere(Momentum):
    """Keeps a number in its state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        """Step, and count the steps under a name."""
        super().step()
        self.state["steps"] = self.state.get("steps", 0) + 1


class Together(torch.optim.SGD):
    """Divides by the norm of all gradients, so that an update depends on the other parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """p <- p - lr g / |all g|."""
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm)


class Rebinding(torch.optim.Optimizer):
    """Gives parameters new memory, and writes to their gradients."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """p <- p - 0.1 g."""
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.1)
            p.data = p.data - p.grad


class Late(Momentum):
    """Adds an entry to its state in its second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step, and from the second step on keep a copy of the parameter."""
        had = {p: bool(self.state[p]) for p in self.param_groups[0]["params"]}
        super().step()
        for p in (p for p, before in had.items() if before):
            self.state[p]["before"] = p.clone()


class Adam(torch.optim.Optimizer):
    """Has the name of torch's class, and its update depends on the whole leaf."""

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Subtract the mean of the gradient."""
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.mean())


class Given(Momentum):
    """Needs an argument."""

    def step(self, loss: Any) -> None:  # type: ignore[override]
        """The step with a gain."""
        super().step(gain=float(loss) / 4)


class OfWords(Momentum):
    """Needs an argument that is no number."""

    def step(self, how: str) -> None:  # type: ignore[override]
        """Look the gain up."""
        super().step(gain={"slow": 0.1}[how])


class Closed(Momentum):
    """Needs a closure."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        """Never called."""
        super().step(closure)


def by_class(cls: Any, skipped: int | None = None, **extra: Any) -> dict[str, Tensor]:
    """The parameters by the class itself."""
    params = {name: x.clone().requires_grad_() for name, x in START.items()}
    optimizer = cls(params.values())
    for i, grads in enumerate(GRADS):
        for name, p in params.items():
            p.grad = grads[name].clone()
        if i != skipped:
            optimizer.step(**extra)
    return {name: p.detach() for name, p in params.items()}


def ours(mesh: Any, cls: Any, how: str, skipped: int | None = None, **extra: Any) -> Any:
    """The parameters over shards, or by ZeRO over whole leaves, and the state at the end."""
    tx = optim.from_torch(cls)
    if how == "zero":
        tx, params, grads = fshard.zero(tx, mesh, "leaf"), START, GRADS
    else:
        over = {"params_over": (), "grads_over": ()} if how == "ZeRO-1" else {}
        plan = fshard.make_plan(START, mesh, units=["w"], **over)
        params, grads = fshard.shard_params(START, plan), [fshard.shard_params(g, plan) for g in GRADS]
    state = tx.init(params)
    for i, g in enumerate(grads):
        found = None if skipped is None else torch.tensor(float(i == skipped))
        params, state = tx.step(g, state, params, found, donate=i > 1, **extra)
    return fshard.gather_params(params), optim.state.gather_state(state)


@pytest.mark.parametrize("how", ["Sharded", "ZeRO-1", "zero"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_class_of_ones_own_on_ranks(world: str, how: str) -> None:
    """A user's class has its own bits on any mesh, skipped updates included: otherwise from_torch would alter it."""
    replicate, shard = WORLDS[world]
    gradients = [{name: x.clone() for name, x in grads.items()} for grads in GRADS]
    for cls, skipped, extra in (
        (Momentum, None, {}),
        (Momentum, 0, {}),
        (Momentum, 2, {"gain": 0.5}),
        (Given, 1, {"loss": 2.0}),
        (Adam, None, {}),
        (Rebinding, None, {}),
    ):
        want = by_class(cls, skipped, **extra)
        assert all((x - START[name]).abs().max() > 1e-3 for name, x in want.items())
        case = (cls, how, skipped)
        for found, state in simulated(
            lambda mesh, case=case, extra=extra: ours(mesh, *case, **extra), replicate=replicate, shard=shard
        ):
            assert same_bits(found, want)
            steps = {float(x) for key, x in state.items() if ".t." in f".{key}."}
            assert same_bits(GRADS, gradients)
            assert steps == ({len(GRADS) - (skipped is not None)} if issubclass(cls, Momentum) else set())


def test_in_processes() -> None:
    """A user's class has its own bits in two gloo processes: otherwise only simulated ranks would be right."""
    for found, _ in gloo(ours, Momentum, "Sharded"):
        assert same_bits(found, by_class(Momentum))


@pytest.mark.parametrize(
    ("cls", "error"),
    [
        (Counting, r"Counting changes its param_groups\[0\]\['k'\], which belongs to no parameter"),
        (Elsewhere, r"Elsewhere keeps state\['steps'\], which belongs to no parameter"),
        (Together, "Together updates a parameter otherwise beside others than alone"),
        (torch.optim.LBFGS, "cannot run 'LBFGS' as a transformation: its step needs a closure. Use lbfgs"),
        (torch.optim.SparseAdam, "takes sparse gradients alone"),
        (Closed, "cannot run 'Closed' as a transformation: its step needs a closure"),
        (OfWords, r"step of OfWords failed with 1\.0 for 'how' \(KeyError.*: give 'how' a default, with which"),
        (dict, "it is no optimizer of torch.optim's kind"),
    ],
)
def test_what_cannot_be_a_value(cls: Any, error: str) -> None:
    """A class whose state cannot be a value is refused by from_torch: otherwise its training would be wrong later."""
    with pytest.raises(ValueError, match=error):
        optim.from_torch(cls)


def test_a_state_made_late_is_an_error() -> None:
    """A state that the class extends after its first step is an error: otherwise the new part would be lost."""
    tx = optim.from_torch(Late)
    params, state = tx.step(GRADS[0], tx.init(START), START)
    with pytest.raises(ValueError, match="keeps 'before' of a parameter, which its first step"):
        tx.step(GRADS[1], state, params)


def test_an_argument_that_is_not_given_is_an_error() -> None:
    """A class would be called without the argument on the ranks that hold a leaf alone, and others would wait."""
    tx = optim.from_torch(Given)
    with pytest.raises(ValueError, match=r"Given needs 'loss': call update\(grads, state, params, loss=\.\.\.\)"):
        tx.update(GRADS[0], tx.init(START), START)
