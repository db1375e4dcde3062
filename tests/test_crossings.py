"""Steps on a device that counts what crosses to it and from it: nothing does, so the host never waits for it."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE, Mesh, on_accelerator
from models import LM_UNITS, WIRED, lm_batch, lm_params, lm_total
from optimizers import TRANSFORMS
from torch import Tensor

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, tree

LOSSES = ("number", "tensor", "sum", "plain")
SCALERS = {
    "none": lambda: None,
    "no": NoLossScale,
    "static": lambda: StaticLossScale(8.0),
    "dynamic": lambda: DynamicLossScale(8.0, hysteresis=2),
}
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "donate": {"donate": True},
    "clip": {"clip_norm": 0.1},
    "micro": {"accumulate": 2, "clip_norm": 0.1, "donate": True},
    "once": {"accumulate": 2, "reduce_once": True},
    "fast": {"reduction": "fast"},
    "tree": {"reduction": "tree", "clip_norm": 0.1},
    "aux": {"has_aux": True, "accumulate": 2},
}


def loss_of(kind: str, has_aux: bool = False) -> Any:
    """A loss with dropout, which says what it counts as a number or as a tensor, or not."""

    def loss(params: Any, batch: Any) -> Any:
        total, count = lm_total(params, batch)
        total = F.dropout(total.expand(3), 0.5).sum()
        forms = {
            "number": lambda: fshard.Mean(total, batch["tokens"].numel()),
            "tensor": lambda: fshard.Mean(total, count),
            "sum": lambda: fshard.Sum(total),
            "plain": lambda: total / 7,
        }
        return (forms[kind](), {"count": count}) if has_aux else forms[kind]()

    return loss


def crossings(
    plan: str = "full", step: str = "plain", tx: str = "adamw", scaler: str = "none", loss: str = "number"
) -> Counter[tuple[str, str]]:
    """What crosses over in the second and third step, by direction and place."""
    how = STEPS[step]
    with on_accelerator() as apart:
        params, transform = tree.map(lambda x: x.to(DEVICE), lm_params(torch.float32)), TRANSFORMS[tx]()
        sizes = {"replicate": 2, "shard": 2} if "replicate" in str(WIRED[plan]) else {}
        mesh, block = Mesh(**sizes), 4 if tx == "adamw_8bit" else 1
        made = fshard.make_plan(params, mesh, units=LM_UNITS, block=block, **WIRED[plan])
        state = fshard.init_state(fshard.shard_params(params, made), transform, SCALERS[scaler]())
        run = fshard.train_step(loss_of(loss, how.get("has_aux", False)), transform, **how)
        batch = tree.map(lambda x: x[:4].to(DEVICE), lm_batch(0, 0))
        state, _ = run(state, batch)
        apart.crossed.clear()
        for _ in range(2):
            state, metrics = run(state, batch)
        found = apart.crossed.copy()
    assert all(x.device == DEVICE for x in tree.leaves(metrics) if isinstance(x, Tensor))
    return found


# Classes of torch's that keep a count in host memory, or compute with numbers there: torch's own steps do as well.
ALLOWED = {
    "from_torch-Adam": {("to the host", "kernels")},
    "from_torch-Rprop": {("to the host", "kernels"), ("to the device", "adaptor")},
    "from_torch-Adafactor": {("to the host", "kernels"), ("to the host", "adaptor")},
}


def modules(found: Counter[tuple[str, str]]) -> set[tuple[str, str]]:
    """Directions, and the modules that stand for the places."""
    return {(direction, place.partition(".")[0]) for direction, place in found}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_scalers(loss, scaler):
    """However a loss says what it counts, and with no scale as with one."""
    assert crossings(loss=loss, scaler=scaler, step="micro") == {}


@pytest.mark.sample(3)
@pytest.mark.parametrize("scaler", ["none", "dynamic"])
@pytest.mark.parametrize("plan", WIRED)
def test_plans(plan, scaler):
    """Strategies, wires, precisions."""
    assert crossings(plan, "micro", scaler=scaler) == {}


@pytest.mark.sample(2)
@pytest.mark.parametrize("step", STEPS)
def test_steps(step):
    """Clipping, micro-batches, reductions, donation."""
    assert crossings(step=step, scaler="dynamic") == {}
    assert crossings("zero1", step, "sgd-all") == {}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_optimizers(name):
    """Rates, norms and matrices are the device's; of torch's own classes what they keep in host memory is not."""
    found = crossings(step="clip", tx=name, scaler="dynamic", loss="tensor")
    assert modules(found) <= ALLOWED.get(name, set()), found


def test_what_is_allowed_is_needed():
    """No name stands there for nothing."""
    for name, allowed in ALLOWED.items():
        assert modules(crossings(step="clip", tx=name, scaler="dynamic", loss="tensor")) == allowed


CROSS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: torch.ones(()).to(x.device),
    "tensor": lambda x: torch.tensor(1.0, device=x.device),
    "tensors": lambda x: torch.as_tensor([1, 2], device=x.device),
    "set": lambda x: x.clone().__setitem__(0, 1.0),
    "index": lambda x: x[[0, 1]],
    "copy": lambda x: x.clone().copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", CROSS)
def test_the_count_can_fail(name):
    """Each of these waits for a GPU, and each is counted, with the place it stands at."""
    with on_accelerator() as apart:
        CROSS[name](torch.ones(3, device=DEVICE))
    direction = "to the host" if name in ("item", "bool", "cpu") else "to the device"
    assert apart.crossed == {(direction, "test_crossings.<lambda>"): 1}


def test_devices_do_not_mix():
    """But numbers multiply anything."""
    with on_accelerator():
        assert (torch.ones(3, device=DEVICE) * torch.ones(())).device == DEVICE
        for wrong in (torch.add, lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack([x[0], y[0]])):
            with pytest.raises(AssertionError, match="of tensors on"):
                wrong(torch.ones(3, device=DEVICE), torch.ones(3))
