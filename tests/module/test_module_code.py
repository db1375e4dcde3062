"""What the code of modules does in a forward: right in a function of the module, or an error that says what to do."""

import collections
import copy
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.worlds import simulated
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import tree
from fshard.module import functionalize

Forward = Callable[[Any, Tensor], Tensor]
# The ways in which code finds the weight of a submodule.
READS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters()": lambda m: next(m.parameters()),
    "named_parameters()": lambda m: dict(m.named_parameters())["weight"],
    "get": lambda m: m._parameters.get("weight"),
    "items": lambda m: dict(m._parameters.items())["weight"],
    "values": lambda m: next(iter(m._parameters.values())),
    "state_dict()": lambda m: m.state_dict(keep_vars=True)["weight"],
}
CONTEXT: ContextVar[Any] = ContextVar("a parameter")


class Reader(nn.Linear):
    """A submodule that finds its weight in another way."""

    def forward(self, x: Tensor, read: Callable[[nn.Module], Any]) -> Tensor:  # type: ignore[override]
        """The product."""
        return x @ read(self)


class Codes(nn.Module):
    """A module with parameters of many kinds; a forward of its own, and what `setup` adds to it."""

    registry: ClassVar[dict[str, Any]] = {}

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.code = forward
        self.linear, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.reader = Reader(2, 2, bias=False)
        self.rows = nn.ParameterList([torch.randn(2) for _ in range(3)])
        self.named = nn.ParameterDict({"gain": torch.randn(2)})
        self.linear.weight.gain = 3.0
        self.register_buffer("kept", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the code does."""
        return self.code(self, x) + self.other(x)


def made(forward: Forward, setup: Any = None) -> Codes:
    """The module, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = Codes(forward).double()
    if setup is not None:
        setup(module)
    return module


def data(rank: int) -> Tensor:
    """The rows of a rank, (3, 2)."""
    return torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def other(params: Any) -> Any:
    """Other values than those of the module."""
    return tree.map(lambda x: x.detach() * 1.5 + 0.25, params)


def run(mesh: Any, module: nn.Module, how: str) -> Any:
    """Values and gradients of a function of a module for other parameters than its own."""
    apply, params, buffers = functionalize(module)
    x, again = data(mesh.get_rank()), other(params)

    def loss(p: Any, x: Tensor) -> Tensor:
        return apply(p, buffers, x)[0].square().sum()

    if how == "whole":
        leaves = tree.map(lambda x: x.requires_grad_(), again)
        value = loss(leaves, x)
        grads = torch.autograd.grad(value, tree.leaves(leaves), allow_unused=True)
        return value, [torch.zeros_like(p) if g is None else g for g, p in zip(grads, tree.leaves(again), strict=True)]
    if how == "torch.func":
        grads, value = torch.func.grad_and_value(loss)(again, x)
        return value, tree.leaves(grads)
    sharded = fshard.shard_params(again, fshard.make_plan(again, mesh, units=["linear", "other"]))
    step = fshard.value_and_grad(loss)
    step = fshard.jit(step, backend="eager") if how == "jitted" else step
    value, grads = step(sharded, x)
    return value, tree.leaves(fshard.gather_params(grads))


def expected(forward: Forward, world: int) -> Any:
    """The same of the module itself, with the other values written into it: the mean of all ranks."""
    values, results = other(functionalize(made(forward))[1]), []
    paths = tree.paths(values)
    for rank in range(world):
        module = made(forward)
        named = dict(module.named_parameters())
        with torch.no_grad():
            for path, x in zip(paths, tree.leaves(values), strict=True):
                named[path].copy_(x)
        value = module(data(rank)).square().sum()
        grads = torch.autograd.grad(value, [named[path] for path in paths], allow_unused=True)
        grads = [torch.zeros_like(named[path]) if g is None else g for g, path in zip(grads, paths, strict=True)]
        results.append([value.detach(), *grads])
    value, *grads = [torch.stack(x).mean(0) for x in zip(*results, strict=True)]
    return value, grads


HOWS = ["whole", "torch.func", "sharded", "jitted"]


def all_runs(module: nn.Module, how: str) -> Any:
    """The results of all ranks: of two, if parameters are sharded."""
    return simulated(run, module, how, shard=2 if how in ("sharded", "jitted") else 1)


# --- what is right ---


def of_listed(fn: Callable[[Tensor], Any]) -> Forward:
    """What a function makes of a weight that `parameters` yields, where nothing is differentiated."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = torch.as_tensor(fn(next(self.linear.parameters()))).sum()
        return self.linear(x) * factor

    return forward


RIGHT: dict[str, Forward] = {
    "isinstance": lambda s, x: s.linear(x) * (2 if isinstance(s.linear.weight, nn.Parameter) else 5),
    "is_leaf": lambda s, x: s.linear(x) * (2 if s.linear.weight.is_leaf and next(s.parameters()).is_leaf else 5),
    "attribute": lambda s, x: s.linear(x) * s.linear.weight.gain * next(s.linear.parameters()).gain,
    "slice of a list": lambda s, x: x * sum(s.rows[:2]),
    "copy of a dict": lambda s, x: x * s.named.copy()["gain"],
    "list in a list": lambda s, x: x * nn.ParameterList(s.rows)[2],
    "data that is read": lambda s, x: s.linear(x) * s.linear.weight.data.sum() * next(s.parameters()).data.sum(),
    "requires_grad": lambda s, x: s.linear(x) * (2 if s.linear.weight.requires_grad else 5),
    "the same again": lambda s, x: setattr(s.linear, "weight", s.linear.weight) or s.linear(x),
    "functional_call": lambda s, x: functional_call(s.linear, {k: v * 2 for k, v in s.linear.named_parameters()}, x),
    "functional_call of itself": lambda s, x: functional_call(s.linear, dict(s.linear.named_parameters()), x),
    "functional_call of another": lambda s, x: (
        functional_call(s.linear, {"weight": s.other.weight}, x) @ s.linear.weight
    ),
    "functional_call again": lambda s, x: checkpoint(
        lambda x: functional_call(s.linear, {"bias": s.rows[0]}, x).exp(), x, use_reentrant=False
    ),
    **{
        f"functional_call, {name}": lambda s, x, read=read: (
            functional_call(s.reader, {"weight": s.linear.weight * 2}, (x, read)) + s.reader(x, read)
        )
        for name, read in READS.items()
    },
    # what asks no class of tensors
    "Variable": of_listed(torch.autograd.Variable),
    "legacy constructor": of_listed(lambda p: torch.DoubleTensor(p)),
    "vmap": of_listed(torch.vmap(torch.sin)),
    "list": of_listed(lambda p: p.tolist()),
    "numpy": of_listed(lambda p: p.numpy().copy()),
}
NOT_IN = {"torch.func": ["functional_call again", "Variable", "legacy constructor", "vmap", "list", "numpy"]}
NOT_IN["jitted"] = ["Variable", "legacy constructor", "vmap", "list", "numpy"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", RIGHT)
def test_code_computes_what_it_computes_in_the_module(name: str, how: str) -> None:
    """A forward that asks what its parameters are, or puts them elsewhere, would give other values, or no gradient."""
    if name in NOT_IN.get(how, ()):
        pytest.skip("an error, of torch or of ours")
    value, grads = expected(RIGHT[name], 2 if how in ("sharded", "jitted") else 1)
    for got, got_grads in all_runs(made(RIGHT[name]), how):
        torch.testing.assert_close(got, value)
        torch.testing.assert_close(got_grads, grads)


# --- what is an error ---


def set_data(self: Any, x: Tensor) -> Tensor:
    """Double the weight."""
    self.linear.weight.data = self.linear.weight.data * 2
    return self.linear(x)


def write_data(self: Any, x: Tensor) -> Tensor:
    """Double the weight in place."""
    self.linear.weight.data.mul_(2)
    return self.linear(x)


def write_listed(self: Any, x: Tensor) -> Tensor:
    """Double the weight in place, as `parameters` yields it."""
    for p in self.linear.parameters():
        p.data.mul_(2)
    return self.linear(x)


def replace(self: Any, x: Tensor) -> Tensor:
    """Another parameter for the weight."""
    self.linear.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    return self.linear(x)


def delete(self: Any, x: Tensor) -> Tensor:
    """No weight any more."""
    weight = self.linear.weight
    del self.linear.weight
    return x @ weight


class Twice(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """In another way than torch's."""
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its gradient."""
        return grads[0] * 2


def registering(name: str, listed: bool) -> Forward:
    """A hook on the gradient of a weight."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = next(self.linear.parameters()) if listed else self.linear.weight
        getattr(weight, name)(lambda grad: None)
        return self.linear(x)

    return forward


WRONG: dict[str, tuple[Forward, str]] = {
    "data set": (set_data, r"the module set (the data of )?its parameter 'linear\.weight'"),
    "data written to": (write_data, r"wrote .*'linear\.weight'"),
    "data of listed ones written to": (write_listed, r"wrote .*'linear\.weight'"),
    "replaced": (replace, r"the module set its parameter 'linear\.weight' in its forward"),
    "deleted": (delete, r"the module set its parameter 'linear\.weight' in its forward"),
    "copied": (lambda s, x: copy.deepcopy(s.linear)(x), r"copied \(copy\.deepcopy\) its parameter 'linear\.weight'"),
    **{
        f"{name}, {'listed' if listed else 'read'}": (
            registering(name, listed),
            r"registered a hook on its parameter 'linear\.weight' .*: change the gradients",
        )
        for name in ("register_hook", "register_post_accumulate_grad_hook")
        for listed in (False, True)
    },
    "requires_grad set": (
        lambda s, x: s.linear.weight.requires_grad_(False) @ x.T,
        r"set requires_grad of its parameter 'linear\.weight'.*: set it before functionalize, and make a second",
    ),
    "given to torch.func": (
        lambda s, x: x * torch.func.grad(lambda w: w.sin().sum())(next(s.linear.parameters())).sum(),
        r"was given 'linear\.weight' from parameters\(\).*: give it the attribute",
    ),
    "given to vmap": (
        lambda s, x: x @ torch.vmap(torch.sin)(next(s.linear.parameters())),
        r"was given 'linear\.weight' from parameters\(\).*: give it the attribute",
    ),
    "given to an autograd function": (
        lambda s, x: x * sum(Twice.apply(p).sum() for p in s.linear.parameters()),
        r"an autograd function was given 'linear\.(weight|bias)' from parameters\(\).*: give it the attribute",
    ),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", WRONG)
def test_code_that_a_function_cannot_run_is_an_error(name: str, how: str) -> None:
    """The caller's parameters would change, a change would be lost, or a gradient would be zero."""
    if (how, name) == ("torch.func", "given to an autograd function"):
        pytest.skip("torch.func takes no such autograd functions")
    forward, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        all_runs(made(forward), how)


# --- buffers that the backward touches ---


def hook(fn: Any) -> Forward:
    """A hook on the gradient of what a submodule returns."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x + self.kept)
        y.register_hook(lambda grad: fn(self, grad))
        return y

    return forward


def again(fn: Any, **how: Any) -> Forward:
    """A checkpoint that touches a buffer, each time it runs."""

    def part(self: Any, x: Tensor) -> Tensor:
        fn(self, x)
        return self.linear(x)

    return lambda self, x: checkpoint(part, self, x, **how)


@torch.no_grad()
def count(self: Any, x: Any) -> None:
    """One more, in place."""
    self.kept.add_(1)


@torch.no_grad()
def count_listed(self: Any, x: Any) -> None:
    """One more, in what `buffers` yields."""
    for buffer in self.buffers():
        buffer.add_(1)


@torch.no_grad()
def count_anew(self: Any, x: Any) -> None:
    """One more, in a new tensor."""
    self.kept = self.kept + 1


class Counted(torch.autograd.Function):
    """The identity, of which the backward counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        """The same."""
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its gradient."""
        count(ctx.module, None)
        return grads[0], None


def on_module(fn: Any) -> Callable[[Any], None]:
    """A hook of a backward on the module."""

    def hook(module: Any, grads: Any) -> None:
        fn(module, grads)

    return lambda s: s.register_full_backward_pre_hook(hook)


TOUCH = {"in place": count, "in place, listed": count_listed, "anew": count_anew}
OF_HOOKS: dict[str, tuple[Forward, Any]] = {
    "autograd function": (lambda s, x: Counted.apply(s.linear(x), s), None),
    **{f"of a tensor, {name}": (hook(fn), None) for name, fn in TOUCH.items()},
    **{f"of the module, {name}": (lambda s, x: s.linear(x), on_module(fn)) for name, fn in TOUCH.items()},
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("how", ["whole", "torch.func", "sharded", "jitted"])
@pytest.mark.parametrize("name", OF_HOOKS)
def test_a_buffer_that_a_hook_of_the_backward_writes_is_an_error(name: str, how: str) -> None:
    """The buffers were returned before: what the hook writes would be lost."""
    forward, setup = OF_HOOKS[name]
    if how == "torch.func" and not name.startswith("of a tensor"):
        pytest.skip("torch.func takes no such autograd functions, nor hooks of modules")
    with pytest.raises(ValueError, match=r"a hook of the backward wrote to the buffer 'kept', .*: write .* in the for"):
        all_runs(made(forward, setup), how)


HARMLESS: dict[str, Forward] = {
    "a hook reads": hook(lambda self, grad: grad * self.kept),
    "a hook writes to what it keeps": hook(lambda self, grad: grad * self.kept.clone().add_(1)),
    **{f"again, {name}": again(fn, use_reentrant=False) for name, fn in TOUCH.items()},
    **{f"again, reentrant, {name}": again(fn, use_reentrant=True) for name, fn in TOUCH.items()},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_reads_or_runs_again_may_touch_buffers(name: str) -> None:
    """Hooks that read, and checkpoints, would be refused, or a buffer be counted twice."""
    module, x = made(HARMLESS[name]), data(0).requires_grad_()
    apply, params, buffers = functionalize(module)
    out, after = apply(params, buffers, x)
    out.square().sum().backward()
    got = x.grad
    assert torch.equal(after["kept"], torch.full((2,), 2.0 if "again" in name else 1.0, dtype=x.dtype))
    x.grad = None
    module(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_a_backward_in_the_thread_of_another_call_is_an_error() -> None:
    """Nodes are numbered by thread: what runs again would read the parameters of the other call."""
    apply, params, buffers = functionalize(made(again(lambda self, x: None, use_reentrant=False)))
    results: list[Any] = []

    def forward(factor: float) -> Tensor:
        leaves = tree.map(lambda x: (x.detach() * factor).requires_grad_(), params)
        results.append(apply(leaves, buffers, data(0))[0].sum())
        return results[-1]

    def backward_of_the_first() -> None:
        forward(2.0)
        with pytest.raises(RuntimeError, match="in a backward of another thread, and 2 calls may be meant"):
            results[0].backward()
        results.append("ended")

    for target in (lambda: forward(1.0), backward_of_the_first):  # each numbers its nodes from the same number on
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert results[-1] == "ended"


@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_an_error(add: str) -> None:
    """A hook that clips or masks a gradient would never run."""
    with pytest.raises(ValueError, match=r"'linear\.weight' has hooks on its gradient, which would not run: remove"):
        functionalize(made(lambda s, x: x, lambda s: getattr(s.linear.weight, add)(lambda grad: None)))


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def test_parameters_of_other_classes_are_an_error() -> None:
    """What the class does would be lost."""
    module = made(lambda s, x: x, lambda s: s.register_parameter("more", Scaled(torch.ones(2))))
    with pytest.raises(TypeError, match=r"functionalize: 'more' is of class Scaled, and plans hold plain tensors"):
        functionalize(module)


def test_a_plan_of_a_module_is_an_error() -> None:
    """The error would not say how a module becomes parameters."""
    with pytest.raises(ValueError, match=r"apply, params, buffers = fshard\.module\.functionalize\(module\)"):
        fshard.make_plan(nn.Linear(2, 2))


class InsideCached(nn.Module):
    """A forward that keeps the values of parametrizations while it runs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """The module in the block."""
        with parametrize.cached():
            return self.module(x) + self.module(x)


@pytest.mark.parametrize("inside", [False, True])
def test_cached_parametrizations_are_an_error(inside: bool) -> None:
    """A second set of parameters, or another rank, would compute with the weight of the first."""
    module: nn.Module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    apply, params, buffers = functionalize(InsideCached(module) if inside else module)
    words = r"parametrize\.cached\(\) keeps the weight of the first call.*: leave it out"
    with nullcontext() if inside else parametrize.cached(), pytest.raises(ValueError, match=words):
        apply(params, buffers, torch.ones(1, 2))
    assert not parametrize._cache


def test_buffers_may_lie_in_one_memory_side_by_side() -> None:
    """Buffers that `chunk` made would be refused, or those with a common element taken."""
    whole = torch.arange(8.0).view(4, 2)
    module = nn.BatchNorm1d(2, affine=False)
    for i, part in enumerate(whole.chunk(2, 1)):
        module.register_buffer(f"part{i}", part)
    _, _, buffers = functionalize(module)
    assert torch.equal(buffers["part1"], whole[:, 1:])
    module.register_buffer("last", whole[3])
    with pytest.raises(ValueError, match="buffer 'last' shares memory with 'part0'"):
        functionalize(module)


class Tied(nn.Module):
    """A batch norm under two names, and two buffers that are one tensor, of which the second is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = self.b = nn.BatchNorm1d(2)
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("second", self.first)

    def forward(self, x: Tensor) -> Tensor:
        """Both names are used."""
        self.second += 1
        return self.b(self.a(x)) + self.first


@pytest.mark.parametrize("calls", [1, 3])
def test_tied_buffers_have_one_value_under_all_names(calls: int) -> None:
    """The second name would keep its first value, in the buffers and in a state dict."""
    module, x = Tied(), torch.randn(5, 2)
    apply, params, buffers = functionalize(copy.deepcopy(module))
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    for _ in range(calls):
        out, buffers = apply(params, buffers, x)
        torch.testing.assert_close(out, module(x))
    torch.testing.assert_close(apply.state_dict(sharded, buffers), module.state_dict())


OLD: dict[str, Callable[[nn.Module], Any]] = {
    "attribute": lambda m: m.k,
    "_buffers": lambda m: m._buffers["k"],
    "buffers()": lambda m: next(m.buffers()),
    "named_buffers()": lambda m: dict(m.named_buffers())["k"],
    "state_dict()": lambda m: m.state_dict()["k"],
    "in place": lambda m: next(m.buffers()).add_(1),
}


class Replaced(nn.Module):
    """A module that reads a buffer, puts another tensor in its place, and computes with both."""

    def __init__(self, read: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("k", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        """The difference is lost if the first is the second."""
        old = self.read(self)
        self.k = self.k * 3
        return x * old - self.k * next(self.buffers())


@pytest.mark.parametrize("name", OLD)
def test_what_was_read_of_a_buffer_stays_when_another_is_put_in_its_place(name: str) -> None:
    """What `buffers()` gave before would have the value of the new buffer."""
    module, x = Replaced(OLD[name]), torch.randn(3, 2)
    apply, params, buffers = functionalize(copy.deepcopy(module))
    for _ in range(2):
        out, buffers = apply(params, buffers, x)
        torch.testing.assert_close(out, module(x))
        torch.testing.assert_close(buffers, dict(module.named_buffers()))


class Pair(nn.Module):
    """Two submodules with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.b.running_mean = self.a.running_mean

    def forward(self, x: Tensor) -> Tensor:
        """Both in evaluation, so that the running mean counts."""
        return self.b.eval()(x) + 2 * self.a.eval()(x)


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("path", ["a.running_mean", "b.running_mean"])
def test_functional_call_with_another_tied_buffer(path: str, ties: bool) -> None:
    """The buffer would keep the value that it had for a while, under all its names."""

    class Outer(Pair):
        def forward(self, x: Tensor) -> Tensor:
            given = {path.replace("a.", "0.").replace("b.", "1."): torch.full((2,), 5.0)}
            pair = nn.Sequential(self.a.eval(), self.b.eval())
            return functional_call(pair, given, (x,), tie_weights=ties) + super().forward(x)

    module, x = Outer(), torch.randn(3, 2)
    apply, params, buffers = functionalize(copy.deepcopy(module))
    for _ in range(2):
        out, buffers = apply(params, buffers, x)
        torch.testing.assert_close(out, module(x))
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    torch.testing.assert_close(apply.state_dict(sharded, buffers), module.state_dict())


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_tied_buffer_that_becomes_two_is_an_error(name: str) -> None:
    """Both names would have the new value, or at the next call one value again."""

    class Unties(Pair):
        def forward(self, x: Tensor) -> Tensor:
            self.get_submodule(name).running_mean = x.mean(0)
            return super().forward(x)

    apply, params, buffers = functionalize(Unties())
    with pytest.raises(ValueError, match=r"'b\.running_mean' are one tensor in the module"):
        apply(params, buffers, torch.randn(3, 2))


class Caching(nn.Linear):
    """A module that keeps a result of its weight in evaluation, and drops it in training, as LeViT of timm."""

    kept: Tensor | None = None

    def train(self, mode: bool = True) -> "Caching":
        """Drop what was kept."""
        self.kept = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight that is kept."""
        if self.training:
            return super().forward(x)
        self.kept = self.weight * 2 if self.kept is None else self.kept
        return x @ self.kept


@pytest.mark.parametrize("evaluated", [False, True])  # the module itself, before it is made a function
def test_what_evaluation_keeps_is_of_its_own_call(evaluated: bool) -> None:
    """The second evaluation would compute with the weights of the first."""
    module, x = Caching(2, 2), torch.randn(3, 2)
    apply, params, buffers = functionalize(module.train(not evaluated))
    for factor in (1.0, 2.0, 3.0):
        scaled = tree.map(lambda p, factor=factor: p.detach() * factor, params)
        for function in (apply.eval, apply) if evaluated else (apply.eval,):
            torch.testing.assert_close(function(scaled, buffers, x)[0], x @ scaled["weight"] * 2)


NAMES = ["number", "path", "trains", "form", "stand", "calls", "is_buffer", "place"]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_keep_what_the_module_has_put_on_them(name: str) -> None:
    """A name of ours would take the place of the module's, or a buffer on a parameter keep its first value."""

    def forward(self: Any, x: Tensor) -> Tensor:
        for p in (self.linear.weight, next(self.linear.parameters())):
            x = x * getattr(p, name) * p.kept
        return x * getattr(self.kept, name) * next(self.buffers()).more

    def setup(self: Any) -> None:
        setattr(self.linear.weight, name, 2.0)
        self.linear.weight.kept = self.kept
        setattr(self.kept, name, 3.0)
        self.kept.more = 5.0

    apply, params, buffers = functionalize(made(forward, setup))
    x = torch.ones(1, 2, dtype=torch.float64)
    out, _ = apply(params, {"kept": buffers["kept"] * 7}, x)
    torch.testing.assert_close(out - made(lambda s, x: 0 * x).other(x), x * (2 * 7) ** 2 * 3 * 5)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("units", [(), ("linear", "other")])
def test_a_loss_reads_plain_tensors_beside_a_module(units: Any, jitted: bool) -> None:
    """What the module's code is told of a parameter would be told to the loss: that it is a leaf without hooks."""
    apply, params, buffers = functionalize(made(lambda s, x: s.linear(x)))
    seen = []

    def loss(p: Any, x: Tensor) -> Tensor:
        out = apply(p, buffers, x)[0].sum()
        weight = p["other"]["weight"]
        seen.append(isinstance(weight, nn.Parameter))
        weight.register_hook(lambda grad: grad * 2)
        return out + weight.sum()

    grads = fshard.value_and_grad(loss)
    sharded = fshard.shard_params(params, fshard.make_plan(params, units=list(units) or None))
    _, got = (fshard.jit(grads, backend="eager") if jitted else grads)(sharded, data(0))
    assert not any(seen)
    got_weight = fshard.gather_params(got)["other"]["weight"]
    torch.testing.assert_close(got_weight, 2 * (data(0).sum(0).expand(2, 2) + 1))


def test_parameters_with_common_elements_are_an_error() -> None:
    """Two parameters that are views of one tensor would be two leaves, which an update moves apart."""
    module = nn.Linear(2, 2)
    module.register_parameter("first", nn.Parameter(module.weight.detach()[0]))
    with pytest.raises(ValueError, match=r"parameter 'first' shares memory with 'weight': \.clone"):
        functionalize(module)


# --- functions that hold a module ---


def keep(self: Any, fn: Any) -> None:
    """Put a function on the module."""
    self.fn = fn


def default(self: Any) -> None:
    """A weight as a default argument."""

    def fn(x: Tensor, weight: Tensor = self.linear.weight) -> Tensor:
        return x @ weight

    self.fn = fn


def attribute(self: Any) -> None:
    """A weight as an attribute of a function."""

    def fn(x: Tensor) -> Tensor:
        return x @ fn.weight  # type: ignore[attr-defined]

    fn.weight = self.linear.weight  # type: ignore[attr-defined]
    self.fn = fn


def wrapped(self: Any) -> None:
    """A forward around the forward."""
    forward = self.linear.forward
    self.linear.forward = lambda x: forward(x)
    self.fn = nn.Identity()


HELD: dict[str, Callable[[Any], None]] = {
    "bound method": wrapped,
    "list in a closure": lambda s: keep(s, (lambda held: lambda x: x @ held[0])([s.linear.weight])),
    "dict in a closure": lambda s: keep(s, (lambda held: lambda x: x @ held["w"])({"w": s.linear.weight})),
    "function in a list": lambda s: keep(s, [(lambda w: lambda x: x @ w)(s.linear.weight)]),
    "function in an object": lambda s: keep(s, SimpleNamespace(fn=(lambda w: lambda x: x @ w)(s.linear.weight))),
    "default argument": default,
    "attribute of a function": attribute,
    "weak reference in an object": lambda s: keep(s, SimpleNamespace(fn=weakref.ref(s.linear))),
    "weak dictionary": lambda s: keep(s, weakref.WeakValueDictionary({"w": s.linear})),
}


@pytest.mark.parametrize("name", HELD)
def test_what_holds_the_module_is_an_error(name: str) -> None:
    """A copy would compute with the first weights for ever, wherever Python can keep a reference."""
    words = (
        r"'(fn|forward)' holds the module, a submodule or a tensor of it \(linear(\.weight)?\), .*: make it a method"
    )
    with pytest.raises(TypeError, match=words):
        functionalize(made(lambda s, x: x, HELD[name]))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "deque": lambda view: collections.deque([view]),
    "object": lambda view: SimpleNamespace(view=view),
    "closure": lambda view: lambda x: x @ view,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_parameter_is_an_error_wherever_it_is(name: str) -> None:
    """A view that was made in __init__ would keep its first value."""
    with pytest.raises(ValueError, match=r"'fn' shares memory with 'linear\.weight', and would not see the value"):
        functionalize(made(lambda s, x: x, lambda s: keep(s, VIEWS[name](s.linear.weight.detach().T))))


# Places that no look at the module finds: how a weight is put there, and how it is found again.
PLACES: dict[str, tuple[Callable[[Any], object], Forward]] = {
    "class": (lambda s: Codes.registry.update(w=s.linear.weight), lambda s, x: x @ s.registry["w"]),
    "context variable": (lambda s: CONTEXT.set(s.linear.weight), lambda s, x: x @ CONTEXT.get()),
    "view in a class": (lambda s: Codes.registry.update(w=s.linear.weight.T), lambda s, x: x @ s.registry["w"]),
    "module in a class": (
        lambda s: Codes.registry.update(w=s.linear),
        lambda s, x: checkpoint(s.registry["w"], x, use_reentrant=False),
    ),
}


@pytest.mark.parametrize("how", ["whole", "sharded"])  # jit raises for every tensor that is no argument
@pytest.mark.parametrize("name", PLACES)
def test_the_first_call_tells_whether_it_computed_with_the_module(name: str, how: str) -> None:
    """A weight from a registry would be the first one for ever, and its gradient zero."""
    setup, forward = PLACES[name]
    with pytest.raises(ValueError, match=r"Codes: the forward computed with the module's own 'linear\."):
        simulated(lambda mesh: run(mesh, made(forward, setup), how))


def test_calls_that_cannot_tell_leave_it_to_the_next() -> None:
    """A first call without gradients, or with the module's own parameters, would be taken for a proof."""
    setup, forward = PLACES["class"]
    apply, params, buffers = functionalize(made(forward, setup))
    with torch.no_grad():
        apply(other(params), buffers, data(0))
    torch.func.grad(lambda p: apply(p, buffers, data(0))[0].sum())(other(params))
    apply(params, buffers, data(0))
    with pytest.raises(ValueError, match="the module's own"):
        apply(other(params), buffers, data(0))


def test_what_the_caller_makes_of_the_parameters_is_no_error() -> None:
    """A step inside a loss (MAML), and a call that is given a parameter of the module, would be refused."""
    module = made(lambda s, x: s.linear(x))
    apply, params, buffers = functionalize(Argument(module))
    inner, weight = tree.map(lambda x: x - 0.1 * x, params), params["module"]["linear"]["weight"]
    out, _ = apply(inner, buffers, data(0), weight)
    (grad,) = torch.autograd.grad(out.sum(), [weight])

    def again(w: Tensor) -> Tensor:
        values = tree.map(lambda x: x.detach() * 0.9, params)
        values["module"]["linear"]["weight"] = w * 0.9
        return apply(values, buffers, data(0), w)[0].sum()

    torch.testing.assert_close(grad, torch.func.grad(again)(weight.detach()))


class Argument(nn.Module):
    """A module that is given a tensor."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Both in one product."""
        return self.module(x) @ weight


class Switching(torch.nn.Linear):
    """A module with a `train` of its own, so that each call in evaluation gets a new copy."""

    weights: ClassVar[list[Tensor]] = []

    def train(self, mode: bool = True) -> "Switching":
        """As torch's."""
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        """With the weight of the call, or with one from the class."""
        return x @ (self.weights[-1] if self.weights else self.weight)


def test_a_new_copy_is_checked_in_the_place_of_one_that_is_gone() -> None:
    """It would have the identity of one that was checked, and its gradient would be zero."""
    module = Switching(4, 4, bias=False).eval()
    apply, params, buffers = functionalize(module)
    for _ in range(10):
        apply(other(params), buffers, torch.ones(2, 4))
        Switching.weights.append(module.weight)
        with pytest.raises(ValueError, match="the module's own"):
            apply(other(params), buffers, torch.ones(2, 4))
        Switching.weights.clear()
