"""Checkpoints of tensors on a GPU: copies are made before the memory changes, and come back to the device."""

from itertools import product
from typing import Any

import pytest
import torch
from support.accelerator import DEVICE, on_accelerator
from support.models import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import checkpoint
from fshard.checkpoint import host_copies, saving
from fshard.checkpoint.contents import contents_of
from fshard.core.storage import as_bytes
from fshard.files.safetensors_file import CHUNK, read_entries
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


class Copies(TorchDispatchMode):
    """The copies from the device, and the waits of the host for it, in their order; stands in for torch.cuda, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def synchronize(self, device: torch.device) -> None:
        """The host waits for the device."""
        assert device == DEVICE
        self.seen.append("wait")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device != args[0].device:
            self.seen.append("copy" if kwargs == {"non_blocking": True} or args[2:] == (True,) else "copy and wait")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("wait", "waits"), [(False, 1), (True, 4)])
def test_the_host_waits_for_many_copies_at_once(wait, waits, tmp_path, monkeypatch):
    """The device would be idle between the copies of a checkpoint, thousands of times where leaves are small."""
    monkeypatch.setattr(saving, "contents_to_save", lambda state, mesh: contents_of(state, "save", mesh))
    state: dict[str, Any] = {f"{i:02}": torch.ones(1000 + i, device=DEVICE) for i in range(66)}
    state["large"] = torch.ones(2 * CHUNK // 4 + 5, device=DEVICE)
    state["near"] = torch.arange(9)
    copies = Copies()
    with on_accelerator(), monkeypatch.context() as patch:  # undone before what `on_accelerator` has put there
        patch.setattr(torch, "get_device_module", lambda x: copies)
        with copies:
            checkpoint.save(tmp_path, state, 1, wait=wait).wait()
    assert copies.seen.count("copy and wait") == 0
    assert copies.seen.count("copy") == 66 + 3
    assert copies.seen.count("wait") <= waits
    assert copies.seen[-1] == "wait"


def test_what_is_written_through_host_memory_has_its_bits(tmp_path, monkeypatch):
    """Small leaves that share a buffer, or a large one that fills it, would be written over, or not in their order."""
    monkeypatch.setattr(host_copies, "HOST", torch.device("meta"))  # as if all were on a device
    monkeypatch.setattr(host_copies, "host_row", lambda numel, dtype, device: torch.full((numel,), 7, dtype=dtype))
    monkeypatch.setattr(host_copies, "CHUNK", 64)
    generator = torch.Generator().manual_seed(0)
    sizes = [0, 1, 5, 16, 17, 3, 100, 1, 15, 33]
    dtypes = [torch.float32, torch.uint8, torch.complex64, torch.int16, torch.bool]
    tensors = [
        (str(i), torch.randn(n, generator=generator).to(dtype)) for i, (n, dtype) in enumerate(product(sizes, dtypes))
    ]
    found: dict[str, bytes] = {}
    for name, data in host_copies.in_host_memory(tensors):
        assert data.numel() <= 64
        found[name] = found.get(name, b"") + bytes(data.tolist())
    assert found == {name: bytes(as_bytes(x).tolist()) for name, x in tensors}


def test_the_next_ones_are_copied_while_these_are_written(monkeypatch):
    """The device would be idle while a block is written, and the disk while the next one is copied."""
    copies = Copies()
    with on_accelerator(), monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda x: copies)
        with copies:
            for name, _ in host_copies.in_host_memory([("large", torch.ones(3 * CHUNK // 4, device=DEVICE))]):
                copies.seen.append(name)
    assert copies.seen == ["copy", "wait", *(["copy", "large", "wait"] * 2), "large"]


def test_a_copy_of_a_state_is_in_several_blocks(tmp_path, monkeypatch):
    """Pinned memory would be rounded up to twice the size of a state, leaves that lie in two blocks would be read
    wrongly, or each save would touch new memory."""
    asked, memory, make = list[int](), saving.InFlight(), host_copies.host_row
    monkeypatch.setattr(saving, "_ALONE", memory)
    monkeypatch.setattr(host_copies, "host_row", lambda numel, *how: asked.append(numel) or make(numel, *how))
    monkeypatch.setattr(host_copies, "_BLOCK", 2 * CHUNK)
    words, generator = CHUNK // 4, torch.Generator().manual_seed(0)
    sizes = [3, words, 2 * words + 5, 0, 3 * words, 1]
    state = {str(n): torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    for step in (1, 2):
        checkpoint.save(tmp_path, state, step, wait=False).wait()
        assert same_bits(checkpoint.restore(tmp_path, fshard.tree.map(torch.empty_like, state)), state)
        assert len(asked) == len(memory.memory) > 3
        assert max(asked) <= 2 * CHUNK
        assert sum(asked) <= 4 * sum(sizes) + 16 * 9  # parts are aligned
    entries = read_entries(next(tmp_path.rglob("*.safetensors")))
    assert {*entries} == {name for name, x in state.items() if x.numel()}  # no leaf is cut in the file
