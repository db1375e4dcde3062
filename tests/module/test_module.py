"""Modules as functions: the values, gradients and buffers of the module itself, on any number of ranks."""

import functools
import gc
import re
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support.models import STRATEGIES, same_bits
from support.modules import BLOCKS, WORDS, Block, Recurrent, error, tied, trained, words
from support.worlds import gloo, simulated
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim, tree
from fshard.module import functionalize

OPTIMIZERS = {
    "sgd": (optim.sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    # eps is large for biases before a norm, whose gradients are zero but for rounding
    "adamw": (optim.adamw(1e-2, eps=1e-5, weight_decay=1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2, eps=1e-5)),
}


def by_name(x: Any) -> dict[str, Tensor]:
    """The leaves of a tree by their dotted names."""
    return dict(zip(tree.paths(x), tree.leaves(x), strict=True))


def train(mesh: Any, name: str, optimizer: str, plan: dict[str, Any], jitted: bool = False, steps: int = 3) -> Any:
    """Train a module as a function on a rank; its parameters, and its buffers after the first step."""
    apply, params, buffers = functionalize(tied(name))
    laid = fshard.make_plan(params, mesh, **{"units": apply.units("blocks.*"), "frozen": apply.frozen, **plan})

    def loss(p: Any, extra: Any, batch: dict[str, Tensor]) -> Any:
        out, extra = apply(p, extra, batch["tokens"])
        return fshard.Mean(error(out, batch), batch["next"].numel()), extra

    tx = OPTIMIZERS[optimizer][0]
    state = fshard.init_state(fshard.shard_params(params, laid), tx, extra=buffers)
    step = fshard.train_step(loss, tx, with_extra=True)
    step = fshard.jit(step, backend="eager") if jitted else step
    kept = None
    for i in range(steps):
        state, _ = step(state, words(i, mesh.get_rank()))
        kept = state.extra if kept is None else kept
    return by_name(fshard.gather_params(state.params)), by_name(kept)


def is_near(got: dict[str, Tensor], module: nn.Module) -> None:
    """The same parameters under the same names, to the rounding of float64."""
    expected = dict(module.named_parameters(remove_duplicate=False))
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        assert torch.allclose(got[path], x, rtol=1e-10, atol=1e-10), path


@pytest.mark.law
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", BLOCKS)
def test_training_is_that_of_the_module(name, strategy, optimizer, jitted):
    """A module trained as a function has the parameters of the plain module: otherwise nobody could change over."""
    plan = STRATEGIES[strategy]
    replicate = 2 if strategy.startswith("wide") else 1
    expected = trained(tied(name), OPTIMIZERS[optimizer][1], 3, world=2 * replicate)
    for params, _ in simulated(train, name, optimizer, plan, jitted, replicate=replicate):
        is_near(params, expected)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_ranks_trains_the_module(world):
    """Uneven shares of odd shapes would be put together wrongly."""
    expected = trained(tied("checkpointed"), OPTIMIZERS["sgd"][1], 3, world)
    for params, _ in simulated(train, "checkpointed", "sgd", {}, shard=world):
        is_near(params, expected)


def test_processes_have_the_bits_of_the_simulation():
    """A module on real ranks would be trained in another way than in the tests of its user."""
    assert same_bits(
        gloo(train, "batch norm, checkpointed", "sgd", {}), simulated(train, "batch norm, checkpointed", "sgd", {})
    )


def cast(mesh: Any) -> Any:
    """The gradients of a small model with checkpoints and norms in float32."""
    apply, params, buffers = functionalize(tied("checkpointed").float())
    policy = fshard.Policy(compute="bf16", overrides=[(apply.units(nn.LayerNorm), "compute=f32")])
    plan = fshard.make_plan(params, mesh, units=apply.units("blocks.*"), policy=policy)
    batch = words(0, mesh.get_rank())
    loss = fshard.value_and_grad(lambda p: error(apply(p, buffers, batch["tokens"])[0], batch))
    return fshard.gather_params(loss(fshard.shard_params(params, plan))[1])


def test_processes_cast_as_the_simulation():
    """Casts would be right in simulation alone."""
    assert same_bits(gloo(cast), simulated(cast))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", ["batch norm", "batch norm, checkpointed"])
def test_buffers_are_those_of_the_module(name, jitted):
    """Running statistics would stay, or be updated again in the backward."""
    for rank, (_, buffers) in enumerate(simulated(train, name, "sgd", {}, jitted)):
        model = tied(name)
        model(words(0, rank)["tokens"])
        assert same_bits(buffers, dict(model.named_buffers()))


# --- as a function of plain trees ---


@pytest.mark.parametrize("name", BLOCKS)
def test_the_function_has_the_bits_of_the_module(name):
    """The function would give other values than the module, in training or in evaluation mode, or change the module."""
    module, again = tied(name), tied(name)
    before = {path: x.clone() for path, x in module.state_dict().items()}
    apply, params, buffers = functionalize(module)
    given = tree.map(torch.clone, buffers)
    tokens = words(0, 0)["tokens"]
    for fn, mode in ((apply, True), (apply.eval, False)):
        out, new = fn(params, given, tokens)
        assert torch.equal(out, again.train(mode)(tokens))
        assert same_bits(by_name(new), dict(again.named_buffers()))
        assert same_bits(given, buffers)
        again.load_state_dict(before)
    assert same_bits(dict(module.state_dict()), before)
    assert module.training


def test_gradients_of_plain_trees():
    """torch.func.grad of the function would differ from the module's backward."""
    module, batch = tied("plain"), words(0, 0)
    apply, params, buffers = functionalize(module)
    grads = torch.func.grad(lambda p: error(apply(p, buffers, batch["tokens"])[0], batch))(params)
    error(module(batch["tokens"]), batch).backward()
    for path, x in module.named_parameters():
        if x.requires_grad:
            assert torch.allclose(by_name(grads)[path], x.grad, rtol=1e-10), path


def test_two_parameter_sets_under_checkpoints():
    """What runs again in the backward would read the parameters of the other call: of the teacher, or of the last."""
    module, batch = tied("checkpointed"), words(0, 0)
    apply, params, buffers = functionalize(module)
    others = tree.map(lambda x: x.detach() * 1.5, params)

    def grads(first: Any, second: Any) -> Any:
        leaves = [x for x in tree.leaves(first) if x.requires_grad]
        loss = sum(error(apply(p, buffers, batch["tokens"])[0], batch) for p in (first, second, first))
        return torch.autograd.grad(loss, leaves)

    def alone(p: Any) -> Any:
        leaves = [x for x in tree.leaves(p) if x.requires_grad]
        return torch.autograd.grad(2 * error(apply(p, buffers, batch["tokens"])[0], batch), leaves)

    for x, y in zip(grads(params, others), alone(params), strict=True):
        assert torch.allclose(x, y, rtol=1e-10)


def test_one_function_serves_all_simulated_ranks():
    """Ranks that share a function, as tests do, would read one another's parameters."""
    apply, params, buffers = functionalize(tied("batch norm, checkpointed"))

    def job(mesh: Any) -> Any:
        scaled = tree.map(lambda x: x.detach() * (1 + mesh.get_rank()) if x.is_floating_point() else x, params)
        sharded = fshard.shard_params(scaled, fshard.make_plan(scaled, None, units=apply.units("blocks.*")))
        batch = words(0, 0)

        def loss(p: Any) -> Any:
            fshard.all_reduce(torch.ones(()), mesh, "shard")  # the other ranks run
            out, after = apply(p, buffers, batch["tokens"])
            return error(out, batch), after

        return fshard.value_and_grad(loss, has_aux=True)(sharded)[0][0]

    first, second = simulated(job)
    batch = words(0, 0)
    for rank, value in enumerate((first, second)):
        scaled = tree.map(lambda x: x.detach() * (1 + rank), params)  # noqa: B023
        assert torch.allclose(value, error(apply(scaled, buffers, batch["tokens"])[0], batch))


def test_the_form_of_parameters_is_known_without_a_gather():
    """`next(self.parameters()).dtype`, as many models ask, would gather a unit, or have the dtype of storage."""

    seen = list[Any]()

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            last = list(self.parameters())[-1]
            seen.append((last.dtype, last.shape, last.device.type, last.numel(), last.requires_grad))
            seen.append(isinstance(last, nn.Parameter))
            return self.parts[0](x.to(last.dtype)).sum()

    apply, params, buffers = functionalize(Asks())
    plan = fshard.make_plan(params, None, units=apply.units("parts.*"), policy="compute=bf16")

    def loss(p: Any) -> Any:
        out, _ = apply(p, buffers, torch.ones(1, 2))
        return out.float()

    with fshard.collectives.tally() as log:
        fshard.value_and_grad(loss)(fshard.shard_params(params, plan))
    assert seen == [(torch.bfloat16, (2,), "cpu", 2, True), True]
    assert not [call for call in log if call.label == "parts.1"]


def test_the_module_may_be_freed():
    """The module's whole weights would stay in memory beside the shards."""
    module = tied("recurrent")
    weights = [weakref.ref(x) for x in module.parameters()]
    apply, params, buffers = functionalize(module)
    sharded = fshard.shard_params(params, fshard.make_plan(params, units=apply.units(Recurrent)))
    del module, params
    gc.collect()
    assert not [ref for ref in weights if ref() is not None]
    fshard.evaluate(lambda p: apply(p, buffers, words(0, 0)["tokens"])[0].sum())(sharded)


def test_a_call_is_forgotten_with_its_graph():
    """A function would keep the parameters of each call for ever."""
    module, batch = tied("checkpointed"), words(0, 0)
    apply, params, buffers = functionalize(module)
    out, _ = apply(params, buffers, batch["tokens"])
    assert len(apply._calls._alive) == 1
    del out
    gc.collect()
    assert len(apply._calls._alive) == 0


# --- units and frozen leaves ---


def test_units_by_class_path_predicate_and_size():
    """A class, a path, a predicate or a size would select other submodules than it says."""
    apply, _, _ = functionalize(tied("plain"))
    blocks = [f"blocks.{i}" for i in range(3)]
    assert (
        apply.units(Block)
        == apply.units("blocks.*")
        == apply.units(lambda path, part: isinstance(part, Block))
        == blocks
    )
    assert apply.units("embed", Block) == ["embed", *blocks]
    assert apply.units(WORDS * 6, Block) == ["embed", *blocks]
    assert apply.units(60) == blocks
    assert apply.frozen == ["blocks.1.up.weight"]


def test_an_argument_that_selects_no_unit_is_an_error():
    """A class that is not in the model would leave one unit, without a word."""
    apply, _, _ = functionalize(tied("plain"))
    names = re.escape("embed (Embedding), blocks (ModuleList), head (Linear)")
    for which in (nn.Conv2d, "layers.*", lambda path, part: False):
        with pytest.raises(ValueError, match=f"selects no submodule with parameters; there are {names}"):
            apply.units(which)
    with pytest.raises(TypeError, match="units=the class Tensor: expected a class of submodules"):
        apply.units(Tensor)
    with pytest.raises(ValueError, match="units"):
        apply.units(0)
    with pytest.raises(ValueError, match="units: no submodule has 1,000,000 elements: give a smaller number"):
        apply.units(10**6)


class Counting(nn.Module):
    """A block with buffers, one written in place and one replaced, and with an option."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        self.calls += 1
        self.total = self.total + x.detach().sum()
        return x + self.norm(self.linear(x)) * scale


class Blocks(nn.Module):
    """Blocks, compiled if there is a backend."""

    def __init__(self, backend: Any, checkpoints: bool) -> None:
        super().__init__()
        blocks = [Counting() for _ in range(3)]
        self.blocks = nn.ModuleList(torch.compile(x, backend=backend) if backend else x for x in blocks)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, scale=0.5) if self.checkpoints else block(x, scale=0.5)
        return x


# dynamo's own, while it traces a function of tensors that are not leaves of autograd
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("policy", [None, "compute=f32; **.norm: compute=f64"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_compiled_submodules_compute_with_the_tensors_of_the_call(checkpoints, policy):
    """They would compute with the weights of the module, or not be compiled."""
    graphs, were_compiled = list[Any](), list[bool]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(mesh: Any, with_backend: Any) -> Any:
        torch.manual_seed(0)
        apply, params, buffers = functionalize(Blocks(with_backend, checkpoints).double())
        plan = fshard.make_plan(params, mesh, units=apply.units(Counting), policy=policy)
        tx = optim.adamw(1e-2)
        state = fshard.init_state(fshard.shard_params(params, plan), tx, extra=buffers)

        def loss(params: Any, buffers: Any, x: Tensor) -> Any:
            out, buffers = apply(params, buffers, x)
            return out.square().mean(), buffers

        step = fshard.train_step(loss, tx, with_extra=True)
        for number in range(3):
            generator = torch.Generator().manual_seed(10 * number + mesh.get_rank())
            state, _ = step(state, torch.randn(4, 3, dtype=torch.float64, generator=generator))
        were_compiled.append(bool(graphs))
        whole, x = fshard.gather_params(state.params), torch.ones(2, 3, dtype=torch.float64)
        outputs = [function(whole, state.extra, x)[0] for function in (apply.eval, fshard.jit(apply))]
        return fshard.state_dict(state.params), tree.leaves(state.extra) + outputs

    expected, got = (simulated(run, x, shard=3) for x in (None, backend))
    # a part with casts inside runs as it is
    assert were_compiled == [False] * 3 + [policy is None] * 3
    for (params, extra), (compiled, compiled_extra) in zip(expected, got, strict=True):
        assert [name.replace("_orig_mod.", "") for name in compiled] == list(params)
        for x, y in zip([*params.values(), *extra], [*compiled.values(), *compiled_extra], strict=True):
            torch.testing.assert_close(y, x, rtol=1e-10, atol=1e-10)


def test_a_forward_that_freezes_its_parameters_is_an_error():
    """The parameters of the caller would be frozen, for ever."""

    class Freezes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * len(list(self.requires_grad_(False).parameters()))

    apply, params, buffers = functionalize(Freezes(2, 2))
    with pytest.raises(
        ValueError, match="Freezes: the module set requires_grad of its parameter 'weight' in its forward"
    ):
        apply(params, buffers, torch.ones(1, 2))
    assert all(x.requires_grad for x in tree.leaves(params))


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_a_forward_that_writes_to_its_parameters_is_an_error(how):
    """The parameters of the caller would change, or the new values would be lost with what was gathered."""

    class Clamps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    apply, params, buffers = functionalize(Clamps(2, 2))
    if how == "whole":
        with pytest.raises(ValueError, match="Clamps: the module wrote to its parameter 'weight' in its forward"):
            apply(params, buffers, torch.ones(1, 2))
        return

    def run(mesh: Any) -> None:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        with pytest.raises(ValueError, match="weight"):
            fshard.value_and_grad(lambda p: apply(p, buffers, torch.ones(1, 2))[0].sum())(sharded)

    fshard.testing.simulate(run, shard=2)


# --- wrong use ---


def test_what_is_no_module_is_an_error():
    """Another object, or a module without shapes, would fail far from the call."""
    with pytest.raises(TypeError, match=r"functionalize: module=the class Linear: expected a torch\.nn\.Module"):
        functionalize(nn.Linear)
    with pytest.raises(ValueError, match="'weight' has no shape yet: run the module once"):
        functionalize(nn.LazyLinear(3))
    module = nn.Linear(1, 1)
    module.lock = threading.Lock()
    with pytest.raises(TypeError, match="functionalize: Linear cannot be copied: TypeError"):
        functionalize(module)


PRUNED = functools.partial(prune.random_unstructured, amount=1)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("old", [nn.utils.spectral_norm, nn.utils.weight_norm, PRUNED])
def test_old_hooks_that_keep_a_weight_are_errors(old, device, ran):
    """The errors would speak of memory, or of a deep copy, and not of what to use."""
    with torch.device(device):
        module = nn.Sequential(old(nn.Linear(2, 2), name="weight"))
        if ran:
            module(torch.ones(1, 2))
    with pytest.raises(
        TypeError, match=r"'0': the hook \w+ of torch.nn.utils keeps .* use torch.nn.utils.parametrizations"
    ):
        functionalize(module)
    if old is PRUNED:
        prune.remove(module[0], "weight")
        functionalize(module)


def test_trees_that_do_not_fit_are_errors():
    """Missing or renamed leaves would be read from elsewhere."""
    apply, params, buffers = functionalize(tied("batch norm"))
    tokens = words(0, 0)["tokens"]
    with pytest.raises(ValueError, match=re.escape("Tied: params: it lacks ['scale']")):
        apply({k: v for k, v in params.items() if k != "scale"}, buffers, tokens)
    with pytest.raises(ValueError, match="Tied: buffers: it lacks"):
        apply(params, {}, tokens)
    with pytest.raises(
        TypeError, match="params=an object of type Sharded: expected the parameters that a loss is given"
    ):
        apply(fshard.shard_params(params, fshard.make_plan(params)), buffers, tokens)


def test_a_target_that_the_loss_closes_over():
    """Inside of a loss, "call it in a loss" would help nobody."""
    apply, params, buffers = functionalize(nn.Linear(2, 1))
    target = fshard.shard_params(params, fshard.make_plan(params))

    def loss(params: Any, x: Tensor, *given: Any) -> Tensor:
        return sum(apply(p, buffers, x)[0].sum() for p in (params, *(given or [target])))

    for run in (fshard.evaluate, fshard.predict, fshard.value_and_grad):
        with pytest.raises(TypeError, match=r"Linear: params=.* Sharded: .* Pass it to the step as one more argument"):
            run(loss)(target, torch.ones(1, 2))
    assert fshard.evaluate(loss)(target, torch.ones(1, 2), target) == 2 * apply(params, buffers, torch.ones(1, 2))[0]


def test_a_submodule_is_of_no_use_outside_of_a_call():
    """A submodule that was kept would compute with tensors of no call."""
    apply, params, buffers = functionalize(Keeps())
    apply(params, buffers, torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="Keeps: parameters were read outside of a call"):
        Keeps.kept[0](torch.ones(1, 2))


class Keeps(nn.Module):
    """A module that gives a submodule away."""

    kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the submodule."""
        self.kept.append(self.linear)
        return self.linear(x)


def test_a_forward_that_sets_parameters_is_an_error():
    """A parameter or a new buffer that is set in a forward would stay in the function."""

    class Sets(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight = nn.Parameter(torch.zeros(2, 2))
            return x

    apply, params, buffers = functionalize(Sets(2, 2))
    with pytest.raises(ValueError, match="Sets: the module set its parameter 'weight' in its forward"):
        apply(params, buffers, torch.ones(1, 2))


def test_what_torch_does_not_publish_is_there():
    """The numbers of autograd nodes would be gone, and recomputation would not find its call."""
    x = torch.ones((), requires_grad=True)
    before = torch.autograd._get_sequence_nr()
    node = (x * 1).grad_fn
    assert before == node._sequence_nr() < torch.autograd._get_sequence_nr()
    assert torch._C._current_autograd_node() is None
    node.metadata["kept"] = 1


def test_modes_see_what_is_read_of_a_tensor() -> None:
    """A parameter's data could be set unseen, and a module read its stand's own attributes."""
    seen = list[Any]()

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Sees():
        assert (x.data.tolist(), x.requires_grad, x.grad_fn, x.is_leaf) == ([1, 1], False, None, True)
        x.data, x.requires_grad = torch.zeros(2), True
    names = ("data", "requires_grad", "grad_fn", "is_leaf")
    assert {getattr(Tensor, name).__get__ for name in names} <= {*seen}
    assert {Tensor.data.__set__, Tensor.requires_grad.__set__} <= {*seen}
    assert torch.Tensor.requires_grad.__get__(x)


# --- what hostile modules do ---


class Refers(nn.Module):
    """A module with a function on it that `make` returns for it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("kept", torch.ones(2))
        self.fn = make(self)

    def forward(self, x: Tensor) -> Tensor:
        """Whatever the function does."""
        return self.fn(self.linear(x))


def hooked(module: nn.Module) -> nn.Module:
    """A module with a hook that holds the module."""
    module.linear.register_forward_pre_hook(lambda _, args: (args[0] * module.linear.weight.sum(),))
    return nn.Identity()


REFERRING = {
    "closure over self": lambda module: lambda x: x * module.linear.bias,
    "closure over a parameter": lambda module: (lambda w: lambda x: x * w)(module.linear.bias),
    "weak reference": weakref.ref,
    "cache of a method": lambda module: functools.lru_cache(module.extra_repr),
    "closure in a closure": lambda module: (lambda inner: lambda x: inner(x))(lambda x: x * module.linear.bias),
    "hook": hooked,
}


@pytest.mark.parametrize("name", REFERRING)
def test_a_function_that_holds_the_module_is_an_error(name):
    """The function would read the module's own weights, which no step changes."""
    with pytest.raises(TypeError, match=r"holds the module, a submodule or a tensor of it.*: make it a method"):
        functionalize(Refers(REFERRING[name]))


def test_functions_that_hold_nothing_of_the_module_are_copied():
    """Activations given as lambdas, or a method kept under another name, would be refused."""
    factor = torch.ones(2)
    ones = torch.ones(1, 2)
    for make in (lambda m: lambda x: x * factor, lambda m: torch.tanh, lambda m: m.linear.forward):
        module = Refers(make)
        apply, params, buffers = functionalize(module)
        assert torch.equal(apply(params, buffers, ones)[0], module(ones))


SHARING = {
    "attribute of a parameter": (lambda m: m.linear.weight.detach().T, "'fn' shares memory with 'linear.weight'"),
    "attribute of a buffer": (lambda m: [m.kept[:1]], "'fn' shares memory with 'kept'"),
}


@pytest.mark.parametrize("name", SHARING)
def test_a_tensor_in_the_memory_of_another_is_an_error(name):
    """A view that was made in __init__ would keep its value while the parameter is trained."""
    make, words = SHARING[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        functionalize(Refers(make))


def test_buffers_that_share_memory_are_an_error():
    """A write to a buffer would not be seen in its view."""
    module = nn.Linear(2, 2)
    module.register_buffer("all", torch.ones(4))
    module.register_buffer("first", module.all[:2])
    with pytest.raises(ValueError, match="buffer 'first' shares memory with 'all'"):
        functionalize(module)


def test_a_module_that_torch_jit_compiled_is_an_error():
    """It would compute with its own weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"functionalize: '0' was compiled by torch\.jit"):
        functionalize(module)


class Counts(nn.Module):
    """A forward that writes to a buffer, and reads it where it runs again."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.ones(1)), inside
        self.register_buffer("count", torch.zeros(1))

    def part(self, x: Tensor) -> Tensor:
        """What runs again."""
        if self.inside:
            self.count = x.detach() * 3
        return (self.weight * self.count * x).exp()

    def forward(self, x: Tensor) -> Tensor:
        """Count, then compute."""
        self.count = self.count + 1
        return checkpoint(self.part, x, use_reentrant=False)


@pytest.mark.parametrize("inside", [False, True])
def test_what_runs_again_reads_the_buffers_of_its_call(inside):
    """What runs again would read the buffers from before the call: the gradient would be another one."""
    module, x = Counts(inside), torch.ones(1)
    apply, params, buffers = functionalize(Counts(inside))
    out, after = apply(params, buffers, x)
    (grad,) = torch.autograd.grad(out, [params["weight"]])
    module(x).backward()
    assert torch.equal(grad, module.weight.grad)
    assert same_bits(after, dict(Counts(inside).named_buffers()) | {"count": module.count})
    assert torch.equal(buffers["count"], torch.zeros(1))


class Stashes(nn.Module):
    """A forward that keeps a value on the module for later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """The value is used after other units were gathered."""
        self.h = torch.tanh(self.a(x))
        return self.b(x) * self.h


def test_what_a_forward_keeps_is_of_its_own_rank():
    """Ranks that share a function would use one another's values, or wait for one another for ever."""
    torch.manual_seed(0)
    module = Stashes().double()
    apply, params, buffers = functionalize(module)

    def job(mesh: Any) -> Any:
        x = torch.full((2, 3), 1.0 + mesh.get_rank(), dtype=torch.float64)
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=["a", "b.*"]))
        value, grads = fshard.value_and_grad(lambda p: apply(p, buffers, x)[0].square().mean())(sharded)
        return value, by_name(fshard.gather_params(grads))

    losses = [module(torch.full((2, 3), 1.0 + rank, dtype=torch.float64)).square().mean() for rank in range(2)]
    loss = torch.stack(losses).mean()
    loss.backward()
    for value, grads in simulated(job):
        assert torch.allclose(value, loss.detach())
        for path, x in module.named_parameters():
            assert torch.allclose(grads[path], x.grad, rtol=1e-10), path


def test_a_value_kept_while_a_graph_is_traced_is_not_used_afterwards():
    """A mask that a forward makes once would be a tracer's tensor in the next eager call."""

    class Lazily(nn.Linear):
        mask = None

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None:
                self.mask = torch.ones_like(x) * 2
            return super().forward(x * self.mask)

    module = Lazily(2, 2)
    apply, params, buffers = functionalize(module)
    x = torch.ones(1, 2)
    plain = tree.map(lambda x: x.detach(), params)
    jitted = fshard.jit(lambda p, x: apply(p, buffers, x)[0], backend="eager")(plain, x)
    assert torch.equal(jitted, apply(plain, buffers, x)[0])


def test_a_backward_inside_a_forward_reads_its_own_call():
    """A part that runs again inside another call would read the parameters of that one."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def part(self, x: Tensor) -> Tensor:
            return (self.weight * x).exp()

        def forward(self, x: Tensor, before: Any = None) -> Tensor:
            y = checkpoint(self.part, x, use_reentrant=False)
            return y if before is None else y * torch.autograd.grad(before[0].sum(), before[1])[0]

    apply, params, buffers = functionalize(Inner())
    x = torch.ones(1, requires_grad=True)
    first, _ = apply({"weight": torch.full((1,), 2.0)}, buffers, x)
    out, _ = apply(params, buffers, torch.ones(1), (first, x))
    e = torch.tensor([1.0]).exp()
    assert torch.allclose(out, e * 2 * e * e)


def test_outputs_that_are_no_trees_keep_their_call():
    """A dataclass as output would lose the call, and its checkpoints could not run again."""

    @dataclass
    class Out:
        loss: Tensor

    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block(again=True)

        def forward(self, x: Tensor) -> Out:
            return Out(self.block(x).sum())

    apply, params, buffers = functionalize(Wraps())
    grads = torch.autograd.grad(apply(params, buffers, torch.ones(2, 6))[0].loss, tree.leaves(params))
    assert all(x.isfinite().all() for x in grads)


def test_data_of_parameters_is_not_set():
    """A momentum encoder that is updated by `.data` would never move."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=True):
                b.data = b.data * 0.5 + a.data * 0.5
            return self.q(x) - self.k(x)

    apply, params, buffers = functionalize(Momentum())
    with pytest.raises(ValueError, match=r"Momentum: the module set the data of its parameter 'k\.weight'"):
        apply(params, buffers, torch.ones(1, 2))
