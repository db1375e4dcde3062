"""Policies over modules: submodules that compute in another dtype cast what goes in, and cast back what comes out."""

import copy
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from support.hf_models import MODELS, data, model
from support.models import same_bits
from support.worlds import simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import fshard
from fshard import Policy, optim, tree
from fshard.module import functionalize
from fshard.module.skeleton import in_tree_order

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OPTIMIZERS = {"sgd": optim.sgd(0.1), "adamw": optim.adamw(1e-2, weight_decay=1e-2)}
NAMES = ["Llama", "Qwen3", "BERT", "ViT", "GPT-2"]
WAYS = {"plain": (False, False), "checkpointed": (True, False), "jitted": (False, True)}


def is_norm(path: str, part: nn.Module) -> bool:
    """Whether a submodule is a norm: LayerNorm, or a model's own RMSNorm."""
    return type(part).__name__.endswith("Norm")


def by_hand(name: str) -> Any:
    """The loss of a model with norms in float32, with casts written out, and all else in the dtypes of parameters."""
    made = copy.deepcopy(model(name).float())
    for path, part in made.named_modules():
        if is_norm(path, part):
            part.forward = lambda x, forward=part.forward: forward(x.to(F32)).to(BF16)

    def loss(params: Any, batch: Any) -> Any:
        names = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
        return torch.func.functional_call(made, names, (), batch, tie_weights=False).loss

    return loss


def plan_of(apply: Any, params: Any, mesh: Any, name: str) -> fshard.Plan:
    """A plan with norms in float32, all else in bfloat16."""
    norms = "**.*norm*" if name in ("Llama", "Qwen3") else apply.units(is_norm)
    policy = Policy(compute=BF16, reduce=F32, overrides=[(norms, "compute=f32")])
    return fshard.make_plan(params, mesh, units=apply.units(MODELS[name].units[-1]), policy=policy)


def train(mesh: Any, name: str, optimizer: str, way: str) -> Any:
    """Train a model of transformers on a rank: the parameters, and the losses."""
    again, jitted = WAYS[way]
    apply, params, buffers = functionalize(model(name, again).float())
    plan = plan_of(apply, params, mesh, name)

    def loss(p: Any, extra: Any, batch: Any) -> Any:
        out, extra = apply(p, extra, **batch)
        return out.loss, extra

    state = fshard.init_state(fshard.shard_params(params, plan), OPTIMIZERS[optimizer], extra=buffers)
    step = fshard.train_step(loss, OPTIMIZERS[optimizer], with_extra=True)
    step = fshard.jit(step, backend="eager") if jitted else step
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own use of torch
        for i in range(3):
            state, metrics = step(state, data(name, i, mesh.get_rank()))
            losses.append(metrics["loss"])
    return fshard.gather_params(state.params), losses


def expected(name: str, optimizer: str, world: int) -> Any:
    """The same by the loss written by hand, and whole tensors."""
    apply, params, _ = functionalize(model(name).float())
    policy = plan_of(apply, params, None, name).policy
    reference = fshard.testing.oracle(by_hand(name), OPTIMIZERS[optimizer], policy=policy)
    state, losses = reference.init(params), []
    for i in range(3):
        state, metrics = reference.step(state, [data(name, i, rank) for rank in range(world)])
        losses.append(metrics["loss"])
    return state.params, losses


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [("plain", "sgd"), ("plain", "adamw"), ("checkpointed", "sgd"), ("checkpointed", "adamw"), ("jitted", "sgd")],
)
@pytest.mark.parametrize("name", NAMES)
def test_norms_in_float32_are_those_written_by_hand(name, way, optimizer):
    """A model with norms in float32 would fail, or compute other values than with casts in its code."""
    params, losses = expected(name, optimizer, 2)
    for got, got_losses in simulated(train, name, optimizer, way):
        if way != "jitted" and optimizer == "sgd":
            assert same_bits((got, got_losses), (params, losses))
        else:
            # fused AdamW rounds the last elements of a tensor otherwise; a graph's operators round bfloat16 otherwise
            error = 2e-2 if way == "jitted" else 1e-5
            for x, y in zip(*map(tree.leaves, ((got, got_losses), (params, losses))), strict=True):
                assert torch.allclose(x, y, rtol=error, atol=error)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_any_number_of_ranks(world):
    """Casts would be other ones on some numbers of ranks."""
    _, losses = expected("Qwen3", "sgd", world)
    for _, got in simulated(train, "Qwen3", "sgd", "checkpointed", shard=world):
        assert torch.allclose(torch.stack(got), torch.stack(losses), rtol=1e-3)


# --- what is cast ---


class Pair(NamedTuple):
    """A pair of tensors."""

    a: Any
    b: Any


@dataclass
class Out:
    """An output that is no node of a tree."""

    x: Tensor
    more: Any


class Inner(nn.Module):
    """A submodule that multiplies its inputs by its weight, and returns the product in some container."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.weight, self.pack = nn.Parameter(torch.full((2,), 1.0 + 2**-10)), pack

    def forward(self, x: Any, *, scale: Any, seen: list[Any]) -> Any:
        """Note the dtypes of what is given."""
        seen.append((x.dtype, tree.map(lambda t: t.dtype, scale)))
        return self.pack(x * self.weight * scale["s"])


class Outer(nn.Module):
    """A module around it; `again` runs it under torch's checkpoint."""

    def __init__(self, pack: Any, again: bool) -> None:
        super().__init__()
        self.first, self.inner, self.again = nn.Linear(2, 2), Inner(pack), again

    def forward(self, x: Tensor, seen: list[Any]) -> Any:
        """The output of the inner module for that of a linear layer."""

        def run(y: Tensor) -> Any:
            return self.inner(y, scale={"s": y, "n": torch.ones(1, dtype=torch.int64)}, seen=seen)

        y = self.first(x)
        return checkpoint(run, y, use_reentrant=False) if self.again else run(y)


PACKS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None, "text"),
    "list in dict": lambda x: {"a": [x, x.long()]},
    "named tuple": lambda x: Pair(x, (x,)),
    "dataclass": lambda x: Out(x, {"y": x}),
    "output of transformers": lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
}


def tensors(x: Any) -> list[Tensor]:
    """The floating tensors in an output."""
    if isinstance(x, Out | BaseModelOutput):
        return [t for value in vars(x).values() for t in tensors(value)]
    return [t for t in tree.leaves(x) if isinstance(t, Tensor) and t.is_floating_point()]


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("pack", PACKS)
def test_inputs_and_outputs_of_all_kinds_are_cast(pack, again):
    """A tensor in a container, or given by name, would keep its dtype; a list would be another one."""
    torch.manual_seed(0)
    module, x, seen = Outer(PACKS[pack], again), torch.randn(3, 2, dtype=BF16), list[Any]()
    apply, params, buffers = functionalize(module)
    plan = fshard.make_plan(params, policy="compute=bf16; inner: compute=f32")
    outs = list[Any]()

    def loss(p: Any) -> Tensor:
        outs.append(apply(p, buffers, x, seen)[0])
        return sum(t.float().sum() for t in tensors(outs[0]))

    grads = fshard.gather_params(fshard.value_and_grad(loss)(fshard.shard_params(params, plan))[1])
    assert seen == [(F32, {"s": F32, "n": torch.int64})] * (1 + again)

    module.first.to(BF16)
    y = module.first(x).float()
    expected = PACKS[pack](y * module.inner.weight * y)
    assert type(outs[0]) is type(expected)
    for got, t in zip(tensors(outs[0]), tensors(expected), strict=True):
        assert got.dtype == BF16
        assert torch.equal(got, t.to(BF16))
    sum(t.to(BF16).float().sum() for t in tensors(expected)).backward()
    assert torch.equal(grads["inner"]["weight"], module.inner.weight.grad)
    assert torch.equal(grads["first"]["weight"], module.first.weight.grad.float())


class Echo(nn.Module):
    """Returns what it is given, and notes its dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), list[torch.dtype]()

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """The same, in another list."""
        self.seen += [x.dtype for x in xs]
        return [x * self.weight.detach().to(x.dtype) for x in xs]


def test_real_floating_tensors_of_every_dtype_are_cast_and_no_others():
    """Indices, masks and complex tensors would be cast, or inputs in float64 or float16 would not."""
    floating, rest = [torch.float64, F32, F16, BF16], [torch.int64, torch.uint8, torch.complex64]
    seen = list[torch.dtype]()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.echo = nn.Linear(4, 4), Echo()

        def forward(self) -> list[Tensor]:
            out = self.echo([torch.ones(shape, dtype=dtype) for dtype in floating + rest for shape in ((), (2,))])
            seen.extend(self.echo.seen)
            return out

    apply, params, buffers = functionalize(Around())
    sharded = fshard.shard_params(params, fshard.make_plan(params, policy="compute=bf16; echo: compute=f32"))
    outs = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers)[0]), has_aux=True)(sharded)[1]
    kept = [dtype for dtype in rest for _ in range(2)]
    assert seen == [F32] * 8 + kept
    assert [x.dtype for x in outs] == [BF16] * 8 + kept


class Lists(nn.Module):
    """Norms in a list, one of them in a sequence as well, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(2) for _ in range(2)])
        self.last = nn.Sequential(nn.Linear(2, 2), self.norms[1])

    def forward(self, n: Tensor) -> Tensor:
        """All of them, one after the other."""
        return self.last(self.norms[1](self.norms[0](self.embed(n))))


class Dtypes(torch.overrides.TorchFunctionMode):
    """Notes the dtypes that functions take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        out = func(*args, **(kwargs or {}))
        if func in (nn.functional.layer_norm, nn.functional.linear, nn.functional.embedding):
            weight = next(x for x in [*args[1:], *(kwargs or {}).values()] if isinstance(x, Tensor))
            self.seen.append((func.__name__, args[0].dtype, weight.dtype, out.dtype))
        return out


def dtypes_of(policy: Any, cast: Any = None) -> tuple[list[Any], torch.dtype]:
    """The dtypes of what the functions of `Lists` take and return, and of its output."""
    apply, params, buffers = functionalize(Lists())
    params = params if cast is None else cast(params)
    n = torch.arange(3)
    with Dtypes() as mode:
        if policy is None:
            return mode.seen, apply(params, buffers, n)[0].dtype
        sharded = fshard.shard_params(params, fshard.make_plan(params, policy=policy))
        out = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers, n)[0]), has_aux=True)(sharded)[1]
        return mode.seen, out.dtype


def called(embed: Any, norm: Any, linear: Any) -> list[Any]:
    """The functions of `Lists` in dtypes of what they take, of their weight, and of what they return."""
    rows = [("embedding", *embed), ("layer_norm", *norm), ("layer_norm", *norm)]
    return [*rows, ("linear", *linear), ("layer_norm", *norm)]


F32S, BF16S, INDEXED = (F32,) * 3, (BF16,) * 3, (torch.int64, BF16, BF16)


def test_lists_of_modules_and_modules_in_two_places():
    """A list is not called, so its norms would get no casts; a norm in two places would get them twice."""
    assert dtypes_of("compute=bf16; norms: compute=f32") == (called(INDEXED, F32S, BF16S), BF16)


def test_modules_without_floating_inputs_are_cast_back():
    """The output of an embedding in float32 would reach layers in bfloat16, or decide what is cast."""
    got = dtypes_of("compute=bf16; embed: compute=f32")
    assert got == (called((torch.int64, F32, F32), BF16S, BF16S), BF16)


def test_the_policy_says_which_dtype_is_around():
    """The dtype of the larger part would be the one to cast to: other values in a model with more words."""
    assert dtypes_of("; embed: compute=bf16") == (called(INDEXED, F32S, F32S), F32)
    assert dtypes_of("compute=bf16; last.0: compute=f32") == (called(INDEXED, BF16S, F32S), BF16)
    # every parameter has another dtype than the policy's: the whole module casts
    assert dtypes_of("compute=f16; **: compute=bf16") == (called(INDEXED, BF16S, BF16S), torch.float16)


def test_whole_tensors_are_cast_alike():
    """A loss would run on sharded parameters, and fail on whole ones, as torch.func and tests take them."""

    def cast(params: Any) -> Any:
        plan = fshard.make_plan(params, policy="compute=bf16; norms: compute=f32")
        computes = [plan.kinds[plan.slots[n].kind].precision.compute for n in plan.leaves]
        leaves, spec = tree.flatten(params)
        return tree.unflatten(spec, [x.detach().to(dtype) for x, dtype in zip(leaves, computes, strict=True)])

    assert dtypes_of(None, cast) == (called(INDEXED, F32S, BF16S), BF16)


def entered(mesh: Any, policy: str, jitted: bool) -> Any:
    """The dtypes of a module's arguments in it, those of its output and of a target beside it; gradients."""
    torch.manual_seed(0)
    apply, params, buffers = functionalize(Scaled())
    batch = {"x": torch.randn(4, 2), "n": torch.arange(4), "masks": [torch.rand(4, 2)], "target": torch.randn(4, 2)}
    found = list[Any]()

    def loss(p: Any, batch: Any) -> Tensor:
        seen.clear()
        out = apply(p, buffers, batch["x"], batch["n"], masks=batch["masks"])[0]
        found[:] = [*seen, out.dtype, batch["target"].dtype]
        return (out.float() - batch["target"]).square().mean()

    step: Any = fshard.value_and_grad(loss)
    step = fshard.jit(step, backend="eager") if jitted else step
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, policy=policy))
    value, grads = step(sharded, batch)
    want = mse_by_hand(params, batch) if mesh.size() == 1 and "f32" not in policy else value
    assert torch.equal(value, want)
    return found, tree.leaves(fshard.gather_params(grads))[0].dtype


seen = list[torch.dtype]()


class Scaled(nn.Module):
    """A linear layer of scaled inputs, which has to be given inputs in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, n: Tensor, masks: list[Tensor]) -> Tensor:
        """W (x m) + n."""
        seen.extend([x.dtype, n.dtype, masks[0].dtype])
        return self.linear(x * masks[0].to(x.dtype)) + n[:, None]


def mse_by_hand(params: Any, batch: Any) -> Tensor:
    """The loss of `Scaled` in bfloat16, with the casts of FSDP2 written out: the input's, and no other."""
    p = tree.map(lambda x: x.detach().to(BF16), params)
    out = nn.functional.linear(
        batch["x"].to(BF16) * batch["masks"][0].to(BF16), p["linear"]["weight"], p["linear"]["bias"]
    )
    return (((out + batch["n"][:, None]).float() - batch["target"]).square().mean()).detach()


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_module_casts_what_it_is_given_and_nothing_else(jitted, shard):
    """A module casts the floating tensors among its arguments, as with FSDP2; a target beside it would be rounded."""
    cast = [BF16, torch.int64, BF16, BF16, F32]
    assert simulated(entered, "compute=bf16", jitted, shard=shard) == [(cast, F32)] * shard
    same = [F32, torch.int64, F32, F32, F32]
    assert simulated(entered, "compute=f32", jitted, shard=shard) == [(same, F32)] * shard


def test_without_cast_inputs_nothing_is_cast():
    """A module that casts by itself would be given other dtypes than it asked for."""
    with pytest.raises(RuntimeError, match="dtype"):
        dtypes_of("compute=bf16,cast_inputs=no; last.0: compute=f32")


def test_a_module_of_several_dtypes_keeps_its_own_casts():
    """A module whose code casts would be cast again, and return another dtype than the module does."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(2, 2, dtype=BF16), nn.LayerNorm(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x).float())

    apply, params, buffers = functionalize(Careful())
    assert apply(params, buffers, torch.ones(1, 2, dtype=BF16))[0].dtype == F32
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    out = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers, torch.ones(1, 2, dtype=BF16))[0]), True)
    assert out(sharded)[1].dtype == F32


class Entered(nn.Module):
    """Returns the dtypes of its inputs, and those that its submodule is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x: Tensor, *, step: Any = None) -> Any:
        """Two tensors of no elements."""
        seen = [x.new_empty(0), self.stem(x.to(self.stem.weight.dtype)).new_empty(0)]
        return seen if step is None else [*seen, step + 0]


DTYPES = {"f32": F32, "bf16": BF16, None: None}


@pytest.mark.parametrize("given", [F32, BF16, torch.float64])
@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("storage", DTYPES)
@pytest.mark.parametrize("own", [F32, BF16])
@pytest.mark.parametrize("where", ["", "**: "])
def test_inputs_are_cast_whatever_dtype_the_module_is_made_in(where, own, storage, compute, given):
    """A module made in bfloat16 with float32 masters would be given inputs in float32."""
    apply, params, buffers = functionalize(Entered(own))
    words = ",".join(f"{name}={x}" for name, x in (("storage", storage), ("compute", compute)) if x)
    policy = "; " * bool(where and words) + where * bool(words) + words
    sharded = fshard.shard_params(params, fshard.make_plan(params, policy=policy))
    out = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers, torch.ones(1, 2, dtype=given))[0]), True)
    stored = DTYPES[storage] or own
    computed = DTYPES[compute] or stored
    casts = (compute is not None and not where) or storage is not None or computed != own
    assert [x.dtype for x in out(sharded)[1]] == [computed if casts else given, computed]


def test_a_timestep_that_is_not_rounded():
    """A diffusion model would be told another time than that of its noise."""
    apply, params, buffers = functionalize(Entered(F32))
    t, x = torch.tensor(998.39), torch.ones(1, 2)
    for policy, found in (
        (apply.policy("compute=bf16"), torch.tensor(1000.0)),
        (apply.policy("compute=bf16,cast_inputs=no", cast=["stem"]), t),
    ):
        sharded = fshard.shard_params(params, fshard.make_plan(params, policy=policy))
        out = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers, x, step=t)[0]), True)(sharded)[1]
        assert out[-1].float() == found


def test_one_function_with_several_policies():
    """A function that was called with one policy would go on with its casts."""
    apply, params, buffers = functionalize(Lists())
    same = "**: storage=f32,compute=bf16"  # the parameters of two policies have the same dtypes
    fields, dtypes = ("compute", "storage"), {"f16": F16, "f32": F32}
    policies = {f"{field}={name}; {same}": dtype for field in fields for name, dtype in dtypes.items()}
    policies |= {"": F32, "compute=bf16; norms: compute=f32": BF16, "; norms: compute=bf16": F32}
    for policy, dtype in [*policies.items(), *reversed(policies.items())]:
        sharded = fshard.shard_params(params, fshard.make_plan(params, policy=policy))
        fn = fshard.evaluate(lambda p: (torch.zeros(()), apply(p, buffers, torch.arange(3))[0]), has_aux=True)
        assert fn(sharded)[1].dtype == dtype


# --- batch norms ---


def resnet(kind: Any = torch.float32) -> Any:
    """transformers' small ResNet, with running statistics of some steps."""
    return model("ResNet").to(kind)


def norms_by_hand(module: nn.Module) -> nn.Module:
    """A module in bfloat16, but for batch norms, with casts written out."""
    for part in module.modules():
        tensors = [*part.parameters(recurse=False)]
        if isinstance(part, nn.BatchNorm2d):
            part.forward = lambda x, forward=part.forward: forward(x.to(F32)).to(BF16)
        else:
            for x in tensors:
                x.data = x.data.to(BF16)
    return module


def images(rank: int) -> dict[str, Tensor]:
    """The images of a rank, in bfloat16."""
    batch = data("ResNet", 0, rank)
    return {**batch, "pixel_values": batch["pixel_values"].to(BF16)}


def resnets_gradients(mesh: Any) -> Any:
    """Of a rank: the loss of all, its own new buffers, the gradients, and the dtypes in which norms are reduced."""
    apply, params, buffers = functionalize(resnet())
    policy = apply.policy("compute=bf16,reduce=bf16")
    plan = fshard.make_plan(params, mesh, units=apply.units(MODELS["ResNet"].units[0]), policy=policy)

    def loss(p: Any) -> Any:
        out, new = apply(p, buffers, **images(0 if mesh is None else mesh.get_rank()))
        return out.loss, new

    (value, new), grads = fshard.value_and_grad(loss, has_aux=True)(fshard.shard_params(params, plan))
    kinds = {plan.kinds[slot.kind].precision.reduce for slot in plan.slots if "normalization" in slot.path}
    return value, new, tree.leaves(fshard.gather_params(grads)), kinds


@pytest.mark.parametrize("shard", [1, 2])
def test_batch_norms_stay_in_float32(shard):
    """Batch norms in bfloat16 lose running statistics, or do not run; the policy of a module would forget them."""
    plains = [norms_by_hand(resnet()) for _ in range(shard)]
    losses = [plain(**images(rank)).loss for rank, plain in enumerate(plains)]
    for loss in losses:
        (loss / shard).backward()
    for plain, (value, new, grads, kinds) in zip(plains, simulated(resnets_gradients, shard=shard), strict=True):
        mean = sum(loss.detach().float() for loss in losses) / shard
        torch.testing.assert_close(value.float(), mean, rtol=2**-8, atol=0)
        assert same_bits(tree.leaves(new), [*in_tree_order(dict(plain.named_buffers())).values()])
        for got, *addends in zip(grads, *(plain.parameters() for plain in plains), strict=True):
            assert torch.equal(got, sum(x.grad.float() for x in addends))
        assert kinds == {F32}


def test_overrides_of_the_user_come_first():
    """A policy that says otherwise for a batch norm would be changed."""
    apply, params, _ = functionalize(nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, dtype=torch.float64)))
    policy = apply.policy("compute=bf16; 0.weight: compute=f16")
    plan = fshard.make_plan(params, policy=policy)
    f16, f64 = torch.float16, torch.float64
    assert [plan.kinds[plan.slots[n].kind].precision.compute for n in plan.leaves] == [f16, F32, f64, f64]


def test_batch_norms_in_another_dtype_than_their_statistics_are_an_error():
    """torch would say that it expected some scalar type, and not how to keep the norm in float32."""
    apply, params, buffers = functionalize(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    sharded = fshard.shard_params(params, fshard.make_plan(params, policy="compute=bf16"))
    x = torch.ones(3, 2, dtype=BF16)
    words = r"batch norm '1' would be computed in torch.bfloat16.*: make_plan\(policy=apply.policy"
    with pytest.raises(ValueError, match=words):
        fshard.evaluate(lambda p: apply(p, buffers, x)[0].sum())(sharded)
    # all in bfloat16 is what torch's module computes
    cast = Policy(buffers="bf16").cast(buffers, "buffers")
    fshard.evaluate(lambda p: apply(p, cast, x)[0].sum())(sharded)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_of_torch_casts_in_both_modes(training: bool) -> None:
    """In evaluation torch's layer would read the parameters of its submodules without calling them, in two dtypes."""
    layer, x = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), torch.randn(2, 3, 4)
    apply, params, buffers = functionalize(layer)
    plan = fshard.make_plan(params, policy="compute=f64; linear1: compute=f32")
    function = apply if training else apply.eval
    loss = lambda params, x: function(params, buffers, x)[0].sum()  # noqa: E731
    value = fshard.evaluate(loss)(fshard.shard_params(params, plan), x)
    torch.testing.assert_close(value.float(), layer(x).sum(), rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A linear layer of masked inputs, which casts by hand what it is given, or not."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.linear, self.by_hand = nn.Linear(3, 3), by_hand

    def forward(self, x: Tensor, *, masks: dict[str, Tensor]) -> Tensor:
        """W (x m)."""
        mask = masks["float"]
        x, mask = (x.to(BF16), mask.to(BF16)) if self.by_hand else (x, mask)
        assert (x.dtype, mask.dtype, masks["int"].dtype) == (BF16, BF16, torch.int64)
        return self.linear(x * mask)


class Masked(nn.Module):
    """An embedding in float32, and blocks that are given it and a mask that is made in the forward."""

    def __init__(self, by_hand: bool = False, again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.blocks, self.again = nn.ModuleList([Block(by_hand) for _ in range(2)]), again

    def forward(self, n: Tensor) -> Tensor:
        """x + block(x), twice."""
        x, masks = self.embed(n), {"float": torch.linspace(0.1, 1, 3, dtype=F32), "int": n}
        for block in self.blocks:
            y = checkpoint(block, x, masks=masks, use_reentrant=False) if self.again else block(x, masks=masks)
            x = x + y
        return x


def indices(rank: int) -> Tensor:
    """The indices of a rank, (6,)."""
    return torch.randint(5, (6,), generator=torch.Generator().manual_seed(rank))


CHOSEN: dict[str, Any] = {
    "class": lambda apply: Block,
    "pattern": lambda apply: "blocks.*",
    "units": lambda apply: apply.units(Block),
    "submodules inside, too": lambda apply: [Block, nn.Linear],
}


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_chosen_submodules_cast_what_they_are_given(chosen, how):
    """A mask or an embedding in float32 would meet weights in bfloat16, which FSDP casts at each wrapped module."""
    again, jitted = WAYS[how]
    torch.manual_seed(0)
    initial = Masked().state_dict()

    def run(mesh: Any) -> Any:
        module = Masked(again=again)
        module.load_state_dict(initial)
        apply, params, buffers = functionalize(module)
        policy = apply.policy("compute=bf16,reduce=f32,cast_inputs=no; embed: compute=f32", cast=CHOSEN[chosen](apply))
        plan = fshard.make_plan(params, mesh, units=apply.units(Block), policy=fshard.Policy.parse(str(policy)))
        step = fshard.value_and_grad(lambda p, n: apply(p, buffers, n)[0].square().sum())
        step = fshard.jit(step, backend="eager") if jitted else step
        value, grads = step(fshard.shard_params(params, plan), indices(mesh.get_rank()))
        return value, fshard.gather_params(grads)

    results = []
    for rank in range(2):
        module = Masked(by_hand=True)
        module.load_state_dict(initial)
        module.blocks.to(BF16)
        value = module(indices(rank)).square().sum()
        value.backward()
        results.append([value.detach(), *(p.grad.float() for p in module.parameters())])
    value, *grads = [(a + b) / 2 for a, b in zip(*results, strict=True)]
    names = [name for name, _ in module.named_parameters()]
    for got, found in simulated(run, shard=2):
        torch.testing.assert_close(got, value)
        flat = dict(zip(tree.paths(found), tree.leaves(found), strict=True))
        for name, grad in zip(names, grads, strict=True):
            assert torch.equal(flat[name], grad), name


class Met(nn.Module):
    """A forward that makes float32, for a submodule or for a weight of its own."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part, self.weight = part, nn.Parameter(torch.ones(4, 4))

    def forward(self, *shape: int) -> Any:
        """Compute with ones that no policy casts."""
        x = torch.ones(shape, dtype=F32)
        if isinstance(self.part, nn.MultiheadAttention):
            return self.part(x, x, x)[0]
        return x @ self.weight if self.part is None else self.part(x)


MEETS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "addmm": (nn.Linear(4, 4), (2, 4)),
    "mm": (nn.Linear(4, 4, bias=False), (2, 4)),
    "convolution": (nn.Conv1d(4, 4, 1), (1, 4, 4)),
    "norm": (nn.LayerNorm(4), (2, 4)),
    "attention": (nn.MultiheadAttention(4, 1), (2, 4)),
    "prelu": (nn.PReLU(), (2, 4)),
}


def value_of(apply: Any, params: Any, policy: Any, *shape: int) -> Any:
    """The sum of what a module makes."""
    run = fshard.value_and_grad(lambda p: apply(p, {}, *shape)[0].float().sum())
    return run(fshard.shard_params(params, fshard.make_plan(params, policy=policy)))[0]


@pytest.mark.parametrize("name", MEETS)
def test_an_error_of_two_dtypes_names_the_submodule(name):
    """Torch says which dtypes meet, but neither where nor what would cast."""
    part, shape = MEETS[name]
    apply, params, _ = functionalize(Met(part))
    words = r"Met: .* apply\.policy\(policy, cast=\['part'\]\) casts what"
    with pytest.raises(RuntimeError, match=words) as caught:
        value_of(apply, params, "compute=bf16", *shape)
    assert str(caught.value.__cause__) in str(caught.value)
    value_of(apply, params, apply.policy("compute=bf16", cast="part"), *shape)


def test_an_error_of_two_dtypes_in_a_forward_itself():
    """Nothing that a module is given is cast to help there; errors of shapes are as torch raised them."""
    apply, params, _ = functionalize(Met())
    with pytest.raises(
        RuntimeError, match=r"^Met: expected m1 and m2 .* not what its forward makes: cast in the forward$"
    ):
        value_of(apply, params, "compute=bf16", 2, 4)
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        value_of(apply, params, None, 2, 3)


def test_a_path_that_is_no_submodule_is_an_error():
    """A typo would cast nothing."""
    apply, params, buffers = functionalize(Masked())
    sharded = fshard.shard_params(params, fshard.make_plan(params, policy="compute=bf16,cast_at=block.0"))
    with pytest.raises(ValueError, match=r"cast_at: 'block\.0' is no submodule of Masked: give apply\.policy\(cast="):
        fshard.value_and_grad(lambda p: apply(p, buffers, indices(0))[0].sum())(sharded)
    with pytest.raises(TypeError, match="policy: cast_at='blocks': expected paths of submodules"):
        fshard.Policy(cast_at="blocks")


class Widening(nn.Module):
    """A layer that is given float32, whatever it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())


def test_casts_of_one_module_of_a_plan_of_two():
    """The head has no submodule of that name: it would be an error."""
    (net, of_net, _), (head, of_head, _) = functionalize(Widening()), functionalize(nn.Linear(4, 2))
    params, x = {"net": of_net, "head": of_head}, torch.linspace(-1, 1, 8).view(2, 4)
    plan = fshard.make_plan(params, policy=net.policy("compute=bf16", cast=["inner"]))
    found = fshard.evaluate(lambda p: head(p["head"], {}, net(p["net"], {}, x)[0])[0].float().sum())(
        fshard.shard_params(params, plan)
    )
    half = fshard.tree.map(Tensor.bfloat16, params)
    hidden = nn.functional.linear(x.bfloat16(), half["net"]["inner"]["weight"], half["net"]["inner"]["bias"])
    out = nn.functional.linear(hidden, half["head"]["weight"], half["head"]["bias"])
    torch.testing.assert_close(found, out.float().sum())


class Time(nn.Module):
    """A precise time, of which bfloat16 has fewer bits."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, t: Tensor) -> Tensor:
        return t.float() * self.w.float()


@pytest.mark.parametrize("units", [None, ["d"], ["g", "d.*"]])
@pytest.mark.parametrize("cast", ["time", "d.time", "g.time"])
def test_a_cast_that_may_be_of_several_modules_says_of_which(cast: str, units: Any):
    """The other module's time would lose its bits without a word."""
    (g, of_g, _), (d, of_d, _) = (functionalize(nn.Sequential(OrderedDict(time=Time()))) for _ in "gd")
    params, t = {"g": of_g, "d": of_d}, torch.tensor([1001.3])
    policy = Policy.parse(f"compute=bf16,cast_inputs=no,cast_at={cast}")

    def run(mesh: Any) -> Any:
        loss = lambda p: torch.cat([g(p["g"], {}, t)[0], d(p["d"], {}, t)[0]])  # noqa: E731
        return fshard.predict(loss)(
            fshard.shard_params(params, fshard.make_plan(params, mesh, units=units, policy=policy))
        )

    if cast == "time":
        with pytest.raises(ValueError, match=r"cast_at: 'time' is a submodule of several modules.*\('g.time'\)"):
            simulated(run, shard=2)
        return
    for found in simulated(run, shard=2):
        assert [x == t for x in found] == [cast == "d.time", cast == "g.time"]
