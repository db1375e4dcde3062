"""Steps of a plan without a mesh: tensors lie where the parameters do. `make fakegpu` runs this file, on the stub."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard

DEVICE = torch.device("cuda", 0)
IN_BACKWARD = {"in_backward": True, "donate": True}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donated": {"donate": True},
    "in backward": IN_BACKWARD,
    "in backward, clipped": IN_BACKWARD | {"clip_norm": 1.0},
    "accumulated": {"accumulate": 2},
}


@pytest.mark.parametrize("policy", [None, "compute=bf16", "compute=bf16, reduce=f32"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_without_a_mesh_is_where_its_parameters_are(name: str, policy: str | None) -> None:
    """Sums would be allocated on the host."""
    params = {block: {"w": torch.ones(4, 4, device=DEVICE), "b": torch.ones(4, device=DEVICE)} for block in "ab"}
    tx = fshard.optim.adamw(0.1)

    def loss(p: Any, x: torch.Tensor) -> fshard.Mean:
        for block in "ab":
            x = torch.tanh(x.to(p[block]["w"].dtype) @ p[block]["w"] + p[block]["b"])
        return fshard.Mean(x.square().sum(), len(x))

    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, units=["*"], policy=policy)), tx)
    step = fshard.train_step(loss, tx, **STEPS[name])
    for _ in range(2):
        state, _ = step(state, torch.ones(8, 4, device=DEVICE))
    torch.cuda.synchronize()
    assert {x.device for x in fshard.tree.leaves((state.params, state.opt_state)) if x.numel() > 1} == {DEVICE}


def devices(x: Any) -> set[torch.device]:
    """Where the tensors of a tree are."""
    return {leaf.device for leaf in fshard.tree.leaves(x)}


def test_parameters_are_made_on_the_default_device(tmp_path: Path) -> None:
    """No tensor says where they are made: they would be made on the host."""
    plan = fshard.make_plan(whole := {"w": torch.ones(4, 4)})
    fshard.checkpoint.save_safetensors(tmp_path, fshard.shard_params(whole, plan))
    with DEVICE:
        made = (
            fshard.init_params(plan, lambda path, like: torch.ones_like(like, device="cpu")),
            fshard.checkpoint.load_safetensors(tmp_path, plan),
        )
    assert devices(made) == {DEVICE}


@contextmanager
def no_waits() -> Iterator[None]:
    """A block in which torch raises where the host waits for the device."""
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("src", [None, 0])
def test_what_is_loaded_does_not_pass_the_host(src: int | None) -> None:
    """Each leaf would be copied to the host and back, and the host would wait for it."""
    whole = {"w": torch.ones(4, 4, device=DEVICE)}
    params = fshard.shard_params(whole, fshard.make_plan(whole))
    moments = fshard.optim.sgd(0.1, momentum=0.9).init(params)
    saved = {key: x.to(DEVICE) for key, x in fshard.optim.state.gather_state(moments).items()}
    with no_waits():
        loaded = fshard.load_state_dict(params, whole, src=src), fshard.optim.state.shard_state(saved, moments, src)
    assert devices(loaded) == {DEVICE}


def test_a_count_on_the_host_is_not_waited_for() -> None:
    """Rows are often counted on the host: each step would wait for the one before."""
    params, tx = {"w": torch.ones(4, 4, device=DEVICE)}, fshard.optim.sgd(0.1)
    step = fshard.train_step(lambda p, x: fshard.Mean((x @ p["w"]).sum(), torch.tensor(8)), tx)
    state, x = (
        fshard.init_state(fshard.shard_params(params, fshard.make_plan(params)), tx),
        torch.ones(8, 4, device=DEVICE),
    )
    state, _ = step(state, x)
    with no_waits():
        step(state, x)
