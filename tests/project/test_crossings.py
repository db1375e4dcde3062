"""Steps copy nothing between a device and its host, so the host never waits for the device: every copy is counted."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.accelerator import DEVICE, Mesh, on_accelerator
from support.models import LM_UNITS, WIRED, lm_batch, lm_params, lm_total
from support.optimizers import ROWS, TRANSFORMS
from support.traced import NAME, accelerator, crossed
from support.worlds import gloo
from torch import Tensor

import fshard
from fshard import DynamicLossScale, NoLossScale, StaticLossScale, tree
from fshard.layout.row import put

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
    """A loss with dropout that returns its count as a number, as a tensor, or not at all."""

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
    """The copies between host and device in the second and third step, by direction and by function."""
    how = STEPS[step]
    with on_accelerator() as apart:
        params, transform = tree.map(lambda x: x.to(DEVICE), lm_params(torch.float32)), TRANSFORMS[tx]()
        sizes = {"replicate": 2, "shard": 2} if "replicate" in str(WIRED[plan]) else {}
        mesh, block = Mesh(**sizes), ROWS[tx].block
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


# These classes of torch.optim keep a count in host memory, or compute there: so they do in torch's own steps.
ALLOWED = {
    "from_torch-Adam": {("to the host", "scalars")},
    "from_torch-Rprop": {("to the host", "scalars"), ("to the device", "torch_optim")},
    "from_torch-Adafactor": {("to the host", "scalars"), ("to the host", "torch_optim")},
}


def modules(found: Counter[tuple[str, str]]) -> set[tuple[str, str]]:
    """The directions, with the modules instead of the functions."""
    return {(direction, place.partition(".")[0]) for direction, place in found}


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_scalers(loss, scaler):
    """No form of a loss and no loss scale copies to or from the host: otherwise each step would wait for the GPU."""
    assert crossings(loss=loss, scaler=scaler, step="micro") == {}


@pytest.mark.parametrize("scaler", ["none", "dynamic"])
@pytest.mark.parametrize("plan", WIRED)
def test_plans(plan, scaler):
    """No strategy, wire or precision copies to or from the host: otherwise choosing one would make steps slower."""
    assert crossings(plan, "micro", scaler=scaler) == {}


@pytest.mark.parametrize("step", STEPS)
def test_steps(step):
    """No option of a step copies to or from the host: otherwise clipping or micro-batches would wait for the GPU."""
    assert crossings(step=step, scaler="dynamic") == {}
    assert crossings("zero1", step, "sgd-all") == {}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_optimizers(name):
    """No optimizer copies to or from the host, except some classes of torch.optim: otherwise steps would wait."""
    found = crossings(step="clip", tx=name, scaler="dynamic", loss="tensor")
    assert modules(found) <= ALLOWED.get(name, set()), found


def test_what_is_allowed_is_needed():
    """Every exception is still needed: otherwise new copies of these optimizers would hide behind an old exception."""
    for name, allowed in ALLOWED.items():
        assert modules(crossings(step="clip", tx=name, scaler="dynamic", loss="tensor")) == allowed


CROSS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: torch.ones(()).to(x.device),
    "tensor": lambda x: torch.tensor(1.0, device=x.device),
    "tensors": lambda x: torch.as_tensor([1, 2], device=x.device),
    "array": lambda x: torch.asarray([1, 2], device=x.device),
    "new": lambda x: x.new_tensor(2.0),
    "set": lambda x: x.clone().__setitem__(0, 1.0),
    "index": lambda x: x[[0, 1]],
    "copy": lambda x: x.clone().copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", CROSS)
def test_the_count_can_fail(name):
    """Each of these operations, which wait for a GPU, is counted: otherwise the tests above would pass with copies."""
    with on_accelerator() as apart:
        CROSS[name](torch.ones(3, device=DEVICE))
    direction = "to the host" if name in ("item", "bool", "cpu") else "to the device"
    assert apart.crossed == {(direction, "test_crossings.<lambda>"): 1}


def test_devices_do_not_mix():
    """The counting device refuses tensors of the host, except 0-d numbers: else faults would show on GPUs only."""
    with on_accelerator():
        assert (torch.ones(3, device=DEVICE) * torch.ones(())).device == DEVICE
        for wrong in (torch.add, lambda x, y: torch.cat([x, y]), lambda x, y: torch.stack([x[0], y[0]])):
            with pytest.raises(AssertionError, match="of tensors on"):
                wrong(torch.ones(3, device=DEVICE), torch.ones(3))


# (plan, optimizer, scaler, loss, step): every value of each, with the usual others. Classes that read cannot be traced.
GRAPHS = [
    *((plan, "adamw", "dynamic", "number", "micro") for plan in WIRED),
    *(("full", name, "dynamic", "tensor", "clip") for name in TRANSFORMS if not name.startswith("from_torch-Ada")),
    *(("full", "adamw", "static", loss, "micro") for loss in LOSSES),
    *(("full", "adamw", scaler, "plain", "micro") for scaler in SCALERS),
    *(("zero1", "sgd-all", "dynamic", "number", step) for step in STEPS),
]
PARTS = 22  # of `GRAPHS`, each traced in a process of its own
GRAPHS_HAVE = {
    "adamw_8bit": {f"constant on {NAME}": 2},  # code books
    "adafactor": {f"constant on {NAME}": 1},  # the sizes of leaves
    "from_torch-Rprop": {"_to_copy": 1},  # torch's class makes a tensor from a number
}


def crossings_of_a_graph(device: torch.device, plan: str, tx: str, scaler: str, loss: str, step: str) -> Counter[str]:
    """The operators of the graph of a step that mix host and device, and its constants, by device."""
    how, transform, scale = STEPS[step], TRANSFORMS[tx](), SCALERS[scaler]()

    def there(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x

    def begun(params: Any) -> Any:
        sizes = {"replicate": 2, "shard": 2} if "replicate" in str(WIRED[plan]) else {"shard": 2}
        mesh, block = fshard.AbstractMesh(NAME, **sizes), ROWS[tx].block
        made = fshard.make_plan(params, mesh, units=LM_UNITS, block=block, **WIRED[plan])
        return fshard.init_state(fshard.shard_params(params, made), transform, tree.map(there, scale))

    state = fshard.eval_shape(begun, tree.map(there, lm_params(torch.float32)))
    run = fshard.train_step(loss_of(loss, how.get("has_aux", False)), transform, **{**how, "donate": False})
    batch = tree.map(lambda x: there(x[:4]), lm_batch(0, 0))
    return crossed(fshard.jit(run, donate=how.get("donate", False)).lower(state, batch))


def crossings_of_graphs(_: Any, cases: list[tuple[str, ...]]) -> list[Counter[str]]:
    """The counts of `crossings_of_a_graph`, for several cases."""
    device = accelerator()
    return [crossings_of_a_graph(device, *case) for case in cases]


@pytest.mark.parametrize("part", range(PARTS))
def test_graphs(part):
    """No operator in a step's graph mixes host and device, except listed ones: otherwise a compiled step would wait."""
    cases = GRAPHS[part::PARTS]
    (found,) = gloo(crossings_of_graphs, cases, shard=1)
    assert dict(zip(cases, found, strict=True)) == {case: GRAPHS_HAVE.get(case[1], {}) for case in cases}


GRAPHS_CROSS = {
    "cpu": (lambda x: x.cpu(), {"_to_copy": 1}),
    "to": (lambda x: torch.ones(3).to(x.device), {"_to_copy": 1}),
    "constant": (lambda x: torch.tensor([1.0, 2.0]).to(x.device), {"_to_copy": 1, "constant on cpu": 1}),
    "index": (lambda x: x[torch.tensor([0, 1])], {"index": 1, "constant on cpu": 1}),
    "list": (lambda x: x[[0, 1]], {f"constant on {NAME}": 1}),
    "copy": (lambda x: x.clone().copy_(torch.ones(3)), {"copy_": 1}),
    "number": (lambda x: torch.where(x > 0, torch.ones(()), x), {"where": 1}),
    "put": (lambda x: put(x.clone(), [torch.ones(3)], [0]), {"fshard.put": 1}),
    "none": (lambda x: x * torch.ones(()) + 2, {}),
}


def found_in_graphs(_: Any) -> dict[str, Counter[str]]:
    """The counts for functions that wait for a GPU."""
    x = torch.empty(3, device=accelerator())
    return {name: crossed(fshard.jit(fn).lower(x)) for name, (fn, _) in GRAPHS_CROSS.items()}


def test_the_count_of_graphs_can_fail():
    """Every operator that mixes host and device is counted: otherwise the test of graphs would pass with copies."""
    (found,) = gloo(found_in_graphs, shard=1)
    assert found == {name: expected for name, (_, expected) in GRAPHS_CROSS.items()}
