"""Checkpoints of tensors on a GPU: copies are made before the memory changes, and come back to the device."""

from typing import Any

import pytest
import torch
from support.models import same_bits

import fshard
from fshard import checkpoint
from fshard.testing import simulate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TX = fshard.optim.adamw(0.1)


def state_on(mesh: Any, device: str, seed: int) -> fshard.TrainState:
    """A state on a device, with a tensor in host memory and one on the device beside it."""
    generator = torch.Generator().manual_seed(seed)
    params = {
        "w": torch.randn(7, 300, generator=generator).to(device),
        "b": torch.randn(5, generator=generator).to(device),
    }
    plan = fshard.make_plan(params, mesh, units=["w"])
    extra = {"queue": torch.randn(3, generator=generator).to(device), "count": torch.tensor(seed)}
    scaler = fshard.DynamicLossScale(growth_interval=1)
    return fshard.init_state(fshard.shard_params(params, plan), TX, scaler, seed=seed, extra=extra)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss of all parameters."""
    return (params["w"] @ x).square().mean() + params["b"].square().sum()


@pytest.mark.parametrize("device", DEVICES)
def test_a_donated_state_is_saved_as_it_was(device, tmp_path):
    """A checkpoint would have values of the next step, or be restored to another device or with other bits."""

    def on_a_rank(mesh):
        state, step = state_on(mesh, device, 1), fshard.train_step(loss, TX, donate=True)
        state, _ = step(state, torch.randn(300, 2, device=device))
        before = fshard.tree.map(lambda x: x.detach().clone(), state)
        saving = checkpoint.save(tmp_path, state, 1, wait=False)
        for _ in range(3):
            state, _ = step(state, torch.randn(300, 2, device=device))
        saving.wait()
        for donate in (False, True):
            restored = checkpoint.restore(tmp_path, state_on(mesh, device, 2), donate=donate)
            assert same_bits(restored, before)
            assert {x.device.type for x in restored.params.tensors} == {device}
            assert restored.extra["queue"].device.type == device
            assert restored.step.device.type == "cpu"

    simulate(on_a_rank, shard=2, device=device)
