"""Models of transformers, split by their own plans, train as on one device."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tp_models import (
    CONFIGS,
    EXPERTS,
    batch,
    is_near,
    is_the_plain_one,
    loss_of,
    model,
    plainly,
    trained,
    units,
)
from support.worlds import gloo
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard import optim
from fshard.module import functionalize
from fshard.testing import World

# transformers and PEFT warn of their own use of torch
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

MESHES = {"1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4), "1x3": (1, 3), "one unit": (2, 2)}
CASES = [(name, mesh, optimizer) for name in CONFIGS for mesh in MESHES for optimizer in ("adamw", "sgd")]


@pytest.mark.parametrize(("name", "mesh", "optimizer"), CASES)
def test_a_model_split_by_its_plan_is_the_model(name: str, mesh: str, optimizer: str) -> None:
    """A style read otherwise than transformers means it would train another model."""
    is_the_plain_one(name, MESHES[mesh], optimizer, **({"units": []} if mesh == "one unit" else {}))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("way", ["tokens travel", "equal tokens", "both"])
def test_experts_by_the_plan_for_experts(name: str, way: str) -> None:
    """Whole experts over the axis of FSDP itself, whose tokens differ, or over the axis of columns and rows."""
    made = model(name)
    styles = made.ep_plan if way != "both" else {**made.tp_plan, **made.ep_plan}
    axis = {"tokens travel": {"axis": "shard"}, "equal tokens": {"axis": "tensor"}}
    axes = axis.get(way, {"axis": "tensor", "experts": "shard"})
    is_the_plain_one(name, (3, 1) if way == "tokens travel" else (2, 2), styles=styles, axes=axes)


def of_processes(mesh: Any, name: str) -> Any:
    """A model on the four processes of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    return trained(mesh, model(name), model(name).tp_plan)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_processes(name: str) -> None:
    """Simulated ranks share a process: what a rank reads of another's memory would be silent there."""
    for got in gloo(of_processes, name, shard=4):
        is_near(got, plainly(name, "adamw"), name)


@pytest.mark.parametrize("one_unit", [False, True])
def test_a_graph(one_unit: bool) -> None:
    """In a graph leaves are fake tensors, and each call has a copy of the module of its own."""
    step = functools.partial(fshard.jit, backend="eager")
    is_the_plain_one("llama", (2, 2), step_of=step, **({"units": []} if one_unit else {}))


def test_activation_checkpoints() -> None:
    """The second run of a layer must be split as the first was, and draw the same numbers."""

    def gradients(mesh: Any, again: bool) -> Any:
        made = model("qwen3", torch.float32, attention_dropout=0.3)
        if again:
            made.activation_checkpointing_enable({"use_reentrant": False})
        apply, params, buffers = functionalize(made, parallel=made.tp_plan)
        plan = fshard.make_plan(params, mesh, units=units(apply), split=apply.split(mesh))
        loss = loss_of(apply, buffers, wide=False)
        return fshard.state_dict(fshard.value_and_grad(loss)(fshard.shard_params(params, plan), batch())[1])

    results = [World(axes={"shard": 2, "tensor": 2}).run(gradients, again) for again in (False, True)]
    for once, twice in zip(*results, strict=True):
        assert all(torch.equal(twice[path], x) for path, x in once.items())


def test_parameters_made_on_a_plan() -> None:
    """A model on meta has the same first parameters, however it is split."""
    with torch.device("meta"):
        made = model("llama")
    apply, params, _ = functionalize(made, parallel=made.tp_plan)

    def first(mesh: Any) -> Any:
        splits = {} if mesh is None else {"split": apply.split(mesh)}
        return fshard.state_dict(apply.init(fshard.make_plan(params, mesh, units=units(apply), **splits), seed=3))

    expected = first(None)
    for got in World(axes={"shard": 2, "tensor": 2}).run(first):
        assert all(torch.equal(got[path], x) for path, x in expected.items())


def test_bfloat16_by_policy() -> None:
    """Sums over ranks round otherwise than products, and no further from the model in float32."""
    made, losses = model("llama", torch.float32), list[Any]()
    apply, params, buffers = functionalize(made, parallel=made.tp_plan)

    def value(mesh: Any, policy: str) -> Any:
        splits = {} if mesh is None else {"split": apply.split(mesh)}
        plan = fshard.make_plan(params, mesh, units=units(apply), policy=policy, **splits)
        loss = loss_of(apply, buffers, wide=False)
        value, grads = fshard.value_and_grad(loss)(fshard.shard_params(params, plan), batch())
        return value, fshard.state_dict(grads)["lm_head.weight"]

    exact = value(None, "compute=f32")
    losses = [value(None, "compute=bf16"), *World(axes={"shard": 1, "tensor": 2}).run(value, "compute=bf16")]
    far = [[((x - y).norm() / y.norm()).item() for x, y in zip(got, exact, strict=True)] for got in losses]
    assert 0 < far[1][1] < 2 * far[0][1] < 0.1
    assert abs(far[1][0]) < 0.02


def test_a_checkpoint_on_other_meshes(tmp_path: Path) -> None:
    """Parts of leaves, heads that are whole on other numbers of ranks, and one device go on alike."""
    made, tx = model("llama"), optim.adamw(1e-3)
    apply, params, buffers = functionalize(made, parallel=made.tp_plan)
    step = fshard.train_step(loss_of(apply, buffers), tx, clip_norm=0.5)

    def start(mesh: Any) -> Any:
        splits = {} if mesh is None else {"split": apply.split(mesh), "data": "shard"}
        plan = fshard.make_plan(params, mesh, units=units(apply), **splits)
        return fshard.init_state(fshard.shard_params(params, plan), tx)

    def steps(mesh: Any, state: Any) -> Any:
        rank, ranks = (0, 1) if mesh is None else fshard.rank_and_size(mesh, "shard")
        for i in range(2):
            state, _ = step(state, batch(4, i)[rank::ranks])
        return state

    def go_on(mesh: Any) -> Any:
        return fshard.state_dict(steps(mesh, fshard.checkpoint.restore(tmp_path, start(mesh))).params)

    World(axes={"shard": 2, "tensor": 2}).run(
        lambda mesh: fshard.checkpoint.save(tmp_path, steps(mesh, start(mesh)), 2)
    )
    expected = fshard.state_dict(steps(None, steps(None, start(None))).params)
    results = [go_on(None)]
    for sizes in ((1, 4), (4, 1), (1, 3)):
        results += World(axes={"shard": sizes[0], "tensor": sizes[1]}).run(go_on)
    for got in results:
        for path, x in expected.items():
            torch.testing.assert_close(got[path], x, rtol=1e-8, atol=1e-10)


def adapted() -> Any:
    """A model with LoRA around columns and rows."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    made = get_peft_model(model("llama"), LoraConfig(r=3, target_modules=targets, lora_dropout=0.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, x in made.named_parameters():
            if "lora" in path:
                x.copy_(torch.randn(x.shape, generator=generator) / 4)
    return made.double()


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 4), (1, 3)])
def test_adapters_on_top(sizes: tuple[int, int]) -> None:
    """Of an adapter the matrix that meets the split dim is split, too."""
    made = adapted()
    styles = {f"base_model.model.{pattern}": style for pattern, style in model("llama").tp_plan.items()}
    plain = trained(None, made, {})
    for got in World(axes={"shard": sizes[0], "tensor": sizes[1]}).run(lambda mesh: trained(mesh, made, styles)):
        is_near(got, plain, "LoRA")


def test_a_trained_model_generates() -> None:
    """Gathered parameters are those of the model: transformers' own code goes on with them."""
    made = model("llama")
    results = World(axes={"shard": 1, "tensor": 2}).run(lambda mesh: trained(mesh, made, made.tp_plan))
    texts = list[Any]()
    for params in (results[0][2], plainly("llama", "adamw")[2]):
        made.load_state_dict(params)
        texts.append(made.eval().generate(batch(2), max_new_tokens=5, do_sample=False))
    assert torch.equal(*texts)
