"""LoRA: a frozen model, sharded, and adapters that train, by hand and by PEFT."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.modules import error, tied, words
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard import optim, tree
from fshard.module import functionalize

# transformers and PEFT warn of each other, and of their own use of torch
QUIET = {"module": "transformers|peft|torch"}
pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore::{kind}:{QUIET['module']}") for kind in ("FutureWarning", "UserWarning")),
]

STEPS = 5
OPTIMIZERS = {
    "sgd": (lambda: optim.sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "adamw": (lambda: optim.adamw(1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2)),
}
WORLDS = {"1": (1, 1), "2": (1, 2), "3": (1, 3), "2x2": (2, 2)}  # replicate, shard


class Adapted(nn.Module):
    """A frozen linear layer, and the product of two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float64) / 4)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, dtype=torch.float64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.base(x) + x @ self.down.T @ self.up.T

    def merged(self) -> nn.Linear:
        """The linear layer that computes the same."""
        self.base.weight.data += self.up @ self.down
        return self.base


class ByHand:
    """A language model whose blocks have adapters of our own."""

    units = "blocks.*"

    @staticmethod
    def module(again: bool) -> Any:
        """The model, the same in every call."""
        module = tied("checkpointed" if again else "plain").requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            for block in module.blocks:
                block.up, block.down = Adapted(block.up), Adapted(block.down)
        return module

    @staticmethod
    def batch(step: int, rank: int) -> dict[str, Tensor]:
        """One rank's words."""
        return words(step, rank)

    @staticmethod
    def loss(call: Any, batch: dict[str, Tensor]) -> Tensor:
        """The mean over this rank's words."""
        return error(call(batch["tokens"]), batch) / batch["next"].numel()

    @staticmethod
    def merged(module: Any) -> Any:
        """The model with the adapters added to its weights."""
        for block in module.blocks:
            block.up, block.down = block.up.merged(), block.down.merged()
        return module


class ByPeft:
    """A model of transformers with the adapters of PEFT."""

    units = "base_model.model.model.layers.*"

    @staticmethod
    def module(again: bool) -> Any:
        """The model, the same in every call, checkpointed as in PEFT's recipes."""
        from peft import LoraConfig, get_peft_model
        from support.hf_models import model

        base = model("Llama")
        if again:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            base.enable_input_require_grads()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
            return get_peft_model(base, config).double()

    @staticmethod
    def batch(step: int, rank: int) -> dict[str, Tensor]:
        """One rank's words."""
        from support.hf_models import data

        return data("Llama", step, rank)

    @staticmethod
    def loss(call: Any, batch: dict[str, Tensor]) -> Tensor:
        """The loss that the model computes."""
        return call(**batch).loss

    @staticmethod
    def merged(module: Any) -> Any:
        """The model with the adapters added to its weights."""
        return module.merge_and_unload()


class OfParameters(ByHand):
    """Adapters that PEFT registers as parametrizations while the forward runs, as for experts."""

    units = "base_model.model.blocks.*"
    rotates = False

    @classmethod
    def module(cls, again: bool) -> Any:
        """The model, the same in every call."""
        from peft import LoraConfig, OFTConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(5)
            lora = LoraConfig(r=2, target_modules=[], target_parameters=["up.weight"], init_lora_weights=False)
            oft = OFTConfig(target_modules=["up"], oft_block_size=2, init_weights=False)
            module = tied("checkpointed" if again else "plain")
            return get_peft_model(module, oft if cls.rotates else lora).double()


class Rotations(OfParameters):
    """PEFT's OFT, whose buffers are views of one tensor without a common element."""

    rotates = True


KINDS: dict[str, Any] = {"by hand": ByHand, "PEFT": ByPeft}
ALL: dict[str, Any] = {**KINDS, "PEFT, parameters": OfParameters, "PEFT, rotations": Rotations}


def train(mesh: Any, kind: str, optimizer: str, again: bool = False, count: bool = False, **strategy: Any) -> Any:
    """Train adapters on a rank: whole parameters; with `count`, also what is held and sent."""
    warnings.filterwarnings("ignore", **QUIET)  # in a process of its own
    apply, params, buffers = functionalize(ALL[kind].module(again))
    plan = fshard.make_plan(params, mesh, units=apply.units(ALL[kind].units), frozen=apply.frozen, **strategy)
    tx = OPTIMIZERS[optimizer][0]()
    state = fshard.init_state(fshard.shard_params(params, plan), tx)

    def loss(params: Any, batch: dict[str, Tensor]) -> Tensor:
        return ALL[kind].loss(lambda *args, **kwargs: apply(params, buffers, *args, **kwargs)[0], batch)

    if count:
        return counted(state, tx, loss, ALL[kind].batch(0, mesh.get_rank()))
    step = fshard.train_step(loss, tx)
    for number in range(STEPS):
        state, _ = step(state, ALL[kind].batch(number, mesh.get_rank()))
    return fshard.state_dict(state.params)


def trained(kind: str, optimizer: str, ranks: int) -> Any:
    """The same model, trained by torch on one device with all ranks' data."""
    module = ALL[kind].module(again=False)
    opt = OPTIMIZERS[optimizer][1]([x for x in module.parameters() if x.requires_grad])
    for step in range(STEPS):
        opt.zero_grad()
        losses = [ALL[kind].loss(module, ALL[kind].batch(step, rank)) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        opt.step()
    return module


def is_trained(results: list[dict[str, Tensor]], kind: str, optimizer: str) -> None:
    """Every rank has the adapters of the plain model, and the very base."""
    expected, start = trained(kind, optimizer, len(results)), ALL[kind].module(again=False).state_dict()
    for got in results:
        assert set(got) <= set(start)
        for name, x in expected.named_parameters():
            if x.requires_grad:
                assert torch.allclose(got[name], x, rtol=1e-10, atol=1e-10), name
                assert not torch.equal(got[name], start[name]), name
            else:
                assert torch.equal(got[name], start[name]), name


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_as_in_torch(kind, world, optimizer, again):
    """Adapters would get gradients of one rank, none under checkpointing, or the base would move."""
    replicate, shard = WORLDS[world]
    is_trained(simulated(train, kind, optimizer, again, shard=shard, replicate=replicate), kind, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_in_processes(kind):
    """Adapters would train in simulation alone."""
    is_trained(gloo(train, kind, "adamw", True), kind, "adamw")


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["PEFT, parameters", "PEFT, rotations"])
def test_adapters_of_single_parameters_train(kind, optimizer, again):
    """The model would be refused."""
    is_trained(simulated(train, kind, optimizer, again, shard=2), kind, optimizer)


# --- what a frozen base costs ---


def counted(state: Any, tx: Any, loss: Any, batch: Any) -> Any:
    """Bytes that a rank holds, bytes that it sends in a step, and those of all trainable and of all frozen leaves."""
    plan, sizes = state.params.plan, {True: 0, False: 0}
    for unit in plan.units:
        for kind, length in zip(plan.kinds, unit.lengths, strict=True):
            sizes[kind.trainable] += length * kind.dtype.itemsize  # with padding
    grads, unreduced = (fshard.value_and_grad(loss, reduce=now)(state.params, batch)[1] for now in (True, False))
    with fshard.collectives.tally() as calls:
        new, _ = fshard.train_step(loss, tx)(state, batch)
    moments = [x for x in tree.leaves(new.opt_state) if x.dim()]
    trees = {"parameters": state.params, "moments": moments, "gradients": grads, "unreduced": unreduced.local}
    held = {name: sum(leaf.nbytes for leaf in tree.leaves(x)) for name, x in trees.items()}
    return held, calls, sizes[True], sizes[False]


@pytest.mark.parametrize("again", [False, True], ids=["once", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_base_has_no_gradients_moments_or_reductions(kind, again):
    """A frozen base would cost as much memory and traffic as one that trains."""
    for held, calls, adapters, base in simulated(train, kind, "adamw", again, True, shard=3):
        assert held["parameters"] == (adapters + base) // 3
        assert held["moments"] == 2 * adapters // 3
        assert held["gradients"] == adapters // 3
        assert held["unreduced"] == adapters
        assert calls.nbytes("reduce_scatter") == adapters * 2 // 3  # two parts, one for each of the others
        # to two others this rank's third: in the forward, and in the backward where a unit is gathered again
        assert (adapters + base) * 2 // 3 <= calls.nbytes("all_gather") <= (adapters + base) * 4 // 3
        # the loss's total, count, whether it has a gradient and what ranks compare, and the norm
        assert calls.nbytes("all_reduce") <= 96
        assert {call.kind for call in calls} == {"reduce_scatter", "all_gather", "all_reduce"}


@pytest.mark.parametrize("state_over", ["shard", ()], ids=["zero1", "ddp"])
def test_a_frozen_base_that_is_whole_is_never_sent(state_over):
    """An all-reduce would sum zeros for the base, or ZeRO-1 would gather it after each update."""
    strategy = {"params_over": (), "grads_over": (), "state_over": state_over}
    parts = 2 if state_over else 1
    for held, calls, adapters, base in simulated(
        lambda mesh: train(mesh, "by hand", "adamw", count=True, **strategy), shard=2
    ):
        assert held["parameters"] == adapters + base
        assert held["gradients"] == held["unreduced"] == adapters
        assert held["moments"] == 2 * adapters // parts
        assert calls.nbytes("all_gather") == (adapters // 2 if state_over else 0)
        assert calls.nbytes("all_reduce") <= adapters + 96


# --- out again ---


def adapters_alone(mesh: Any) -> Any:
    """Whole trained parameters, the adapters alone, and the bytes that it takes to gather these."""
    apply, params, _ = functionalize(ByPeft.module(again=False))
    plan = fshard.make_plan(params, mesh, units=apply.units(ByPeft.units), frozen=apply.frozen)
    moved = tree.map(lambda row: row + 0.25, fshard.shard_params(params, plan).trainable)
    sharded = fshard.shard_params(params, plan).updated(moved)
    with fshard.collectives.tally() as calls:
        alone = fshard.state_dict(sharded.trainable)
    return fshard.state_dict(sharded), alone, calls.nbytes(), sum(row.nbytes for row in moved.tensors)


def test_adapters_are_saved_under_the_names_of_peft():
    """Adapters could not be loaded by PEFT, or the base would be gathered to save them."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    (whole, alone, sent, share), *_ = simulated(adapters_alone)
    assert sent == share
    module, start = ByPeft.module(again=False), ByPeft.module(again=False).state_dict()
    saved = get_peft_model_state_dict(module, state_dict=alone)
    assert saved.keys() == get_peft_model_state_dict(module).keys()
    set_peft_model_state_dict(module, saved)
    for name, x in module.state_dict().items():
        assert torch.equal(x, whole[name]), name
        assert torch.equal(x, start[name] + 0.25 * (name in alone)), name


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_compute_the_same(kind):
    """The merged model would not be the one that was trained."""
    module, batch = KINDS[kind].module(again=False), KINDS[kind].batch(0, 0)
    module.load_state_dict(simulated(train, kind, "sgd")[0])
    before = KINDS[kind].loss(module, batch)
    merged = KINDS[kind].merged(module)
    assert torch.allclose(KINDS[kind].loss(merged, batch), before, rtol=1e-10, atol=0)
    assert not [name for name in merged.state_dict() if "lora" in name or name.endswith("up.up")]


class Switched(nn.Module):
    """What PEFT's `disable_adapter` does: a flag and `requires_grad` are set, and set back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.adapter, self.is_on = nn.Linear(3, 3), nn.Linear(3, 3), True

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.is_on = False
        self.adapter.requires_grad_(False)
        yield
        self.adapter.requires_grad_(True)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x) if self.is_on else self.layer(x)


class Compares(Switched):
    """Computes with the adapter and without."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with self.disable_adapter():
            return out - super().forward(x)


def test_an_adapter_that_is_switched_off() -> None:
    """The error named a remedy for values; the one that it names now gives both functions."""
    apply, params, _ = functionalize(Compares())
    with pytest.raises(ValueError, match=r"'adapter\.weight' in its forward: .* second function .*disable_adapter"):
        apply(params, {}, torch.ones(1, 3))
    model, x = Switched(), torch.ones(1, 3)
    apply, params, _ = functionalize(model)
    with model.disable_adapter():
        base, _, _ = functionalize(model)
    sharded = fshard.shard_params(params, fshard.make_plan(params))
    value, grads = fshard.value_and_grad(lambda p: (apply(p, {}, x)[0] - base(p, {}, x)[0]).sum())(sharded)
    torch.testing.assert_close(value, model.adapter(x).sum())
    grads = fshard.gather_params(grads)
    assert torch.equal(grads["adapter"]["weight"], torch.ones(3, 3))
    assert not grads["layer"]["weight"].any()
