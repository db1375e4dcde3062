"""What a GPU needs of the code, as far as a CPU can show it: names, dtypes and kernels of other backends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import LM_UNITS, STRATEGIES, WIRED, lm_batch, lm_params, mean_loss, same_bits
from support.worlds import gloo, simulated
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import optim
from fshard.comm import primitives
from fshard.comm.mesh import mesh_device
from fshard.comm.process_groups import as_sent, first_of
from fshard.core.storage import MOST, as_bytes
from fshard.layout import norms
from fshard.layout.row import put
from fshard.testing import scheduler
from fshard.testing.world import _SimulatedRanks
from fshard.update import kernels

ODD = [*(torch.int16, torch.uint16, torch.uint32, torch.uint64), *(torch.float8_e4m3fn, torch.float8_e5m2)]
COMPLEX = [torch.complex64, torch.complex128]
PLAIN = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*PLAIN, *FLOATS, *ODD, *COMPLEX]


def bits_of(dtype: torch.dtype, numel: int, seed: int = 0) -> Tensor:
    """A tensor of random bits; for booleans, only the bits that they may have."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def test_names_of_collectives() -> None:
    """A collective is called by its new name if torch has it, else by its old one: otherwise old torch would fail."""
    old, new = SimpleNamespace(old=lambda: "old"), SimpleNamespace(old=lambda: "old", new=lambda: "new")
    assert first_of(old, "new", "old")() == "old"
    assert first_of(new, "new", "old")() == "new"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_is_the_same_memory(dtype: torch.dtype) -> None:
    """What is sent is the same memory in a dtype that the backend knows: otherwise results would be lost in a copy."""
    for shape in ((), (6,), (2, 3), (0, 3)):
        x = bits_of(dtype, torch.Size(shape).numel()).view(shape)
        for dtypes in ([*PLAIN, *FLOATS], [torch.uint8]):
            sent = as_sent(x, dtypes)
            assert sent.dtype in dtypes
            assert sent.nbytes == x.nbytes
            assert sent.data_ptr() == x.data_ptr()
            assert torch.equal(as_bytes(sent), as_bytes(x))


def moved(mesh: Any) -> list[Tensor]:
    """What every dtype arrives as, in a broadcast and in an all-to-all."""
    ranks, found = primitives.along(mesh, "shard"), []
    for number, dtype in enumerate(DTYPES):
        x = bits_of(dtype, 2 * ranks.size, seed=100 * number + ranks.rank)
        found.append(as_bytes(primitives.broadcast(x.view(2, -1), ranks, 1).wait()))
        found.append(as_bytes(primitives.all_to_all(x, ranks).wait()))
    return found


def gathered(mesh: Any, built_in: bool) -> list[Tensor]:
    """All-gathers of every dtype: by messages, or by the backend's own all-gather."""
    ranks, found = primitives.along(mesh, "shard"), []
    if built_in:
        ranks.built_in = mesh.get_group("shard")
    for number, dtype in enumerate(DTYPES):
        x = bits_of(dtype, 4, seed=100 * number + ranks.rank)
        found.append(as_bytes(primitives.all_gather(x.view(2, 2), ranks).wait()))
    return found


def summed(mesh: Any, fast: bool) -> list[Tensor]:
    """Reduce-scatters and all-reduces of whole numbers, which are exact in any order."""
    ranks, found = primitives.along(mesh, "shard"), []
    if fast:
        ranks.built_in = mesh.get_group("shard")
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        x = (torch.arange(2 * ranks.size) + ranks.rank).to(dtype) * (1j if dtype.is_complex else 1)
        found.append(primitives.reduce_scatter(x, ranks, fast=fast).wait())
        found.append(primitives.all_reduce(x, ranks, fast=fast).wait())
    return found


def lazy(mesh: Any) -> list[Tensor]:
    """Collectives of tensors that are lazily conjugated or negated."""
    z = torch.arange(4.0) + 1j * (mesh.get_rank() + 1)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "shift")
    found = [getattr(fshard, name)(x, mesh, "shard") for name in names for x in (z.conj(), torch._neg_view(z.real))]
    return [x.resolve_conj().resolve_neg() for x in found]


def on_processes(mesh: Any) -> list[Any]:
    """The results by messages, and by the backend's own collectives; a warning is an error."""
    by_messages = [moved(mesh), gathered(mesh, False), summed(mesh, False), lazy(mesh)]
    return [by_messages, [by_messages[0], gathered(mesh, True), summed(mesh, True), by_messages[-1]]]


def on_threads(mesh: Any) -> list[Any]:
    """The same results between simulated ranks."""
    return [[moved(mesh), gathered(mesh, False), summed(mesh, False), lazy(mesh)]] * 2


def test_every_dtype_travels() -> None:
    """Collectives of every dtype have the bits of simulated ranks: otherwise some leaf could not be sharded."""
    assert same_bits(gloo(on_processes), simulated(on_threads))


class Calls(TorchDispatchMode):
    """Records the calls of these operators; on meta tensors it does not run them."""

    def __init__(self, *names: str):
        super().__init__()
        self.names, self.found = names, list[dict[str, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, and run it."""
        if func.overloadpacket.__name__ in self.names:
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            self.found.append({"overload": func._overloadname, **named, **(kwargs or {})})
            if self._tensors(args[0])[0].is_meta:
                return None
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _tensors(x: Any) -> list[Tensor]:
        return [x] if isinstance(x, Tensor) else x

    def largest(self) -> int:
        """The largest number of elements that one of the calls gets in one tensor."""
        lists = [value for call in self.found for value in call.values() if isinstance(value, Tensor | list)]
        return max(x.numel() for tensors in lists for x in self._tensors(tensors))


ADAM = {"b1": 0.9, "b2": 0.99, "eps": 1e-8}
FUSED = {
    "adamw": (kernels.adam_, 2, {**ADAM, "weight_decay": 0.1, "decoupled": True}),
    "adam": (kernels.adam_, 2, {**ADAM, "weight_decay": 0.1, "decoupled": False}),
    "sgd": (kernels.sgd_, 0, {"momentum": 0.0, "nesterov": False, "weight_decay": 0.1}),
    "momentum": (kernels.sgd_, 1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0}),
}


def fused(name: str, lr: Any, device: str, sizes: list[int], most: int = MOST) -> list[Tensor]:
    """Parameters and moments after one call of a fused kernel."""
    kernel, num_moments, constants = FUSED[name]
    generator = torch.Generator().manual_seed(0)
    columns = [[torch.rand(n, generator=generator).to(device) for n in sizes] for _ in range(2 + num_moments)]
    kernel(columns, torch.tensor(3.0, device=device), None, {"lr": lr, **constants}, most)
    return [*columns[0], *(x for column in columns[2:] for x in column)]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("schedule", ["constant", "linear", "number", "float32"])
def test_rates_of_fused_kernels(name: str, schedule: str) -> None:
    """A rate is a float32 tensor on an accelerator (here meta): otherwise a fused kernel would read wrong bytes."""
    rates = {
        "constant": optim.schedules.constant(0.1),
        "linear": optim.schedules.linear(0.0, 0.1, 5),
        "number": lambda count: 0.1,
    }
    rates["float32"] = lambda count: torch.tensor(0.1, device=count.device)
    for device, want in (("meta", torch.float32), ("cpu", torch.float64)):
        lr = rates[schedule](torch.tensor(3.0, device=device))
        with Calls("_fused_sgd_", "_fused_adam_", "_fused_adamw_") as calls:
            fused(name, lr, device, [4])
        (call,) = calls.found
        if schedule == "number":
            assert call["lr"] == 0.1
        else:
            assert call["overload"] == "tensor_lr"
            assert call["lr"].dtype == (torch.float32 if schedule == "float32" else want)
            assert call["lr"].device.type == device


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_take_tensors_in_parts(name: str) -> None:
    """A long tensor is updated in parts with the same bits: otherwise a kernel that counts in 32 bits would fail."""
    sizes = [200, 0, 64, 65, 3]
    with Calls("_fused_sgd_", "_fused_adam_", "_fused_adamw_") as calls:
        parts = fused(name, 0.1, "cpu", sizes, 64)
    assert calls.largest() == 64
    assert same_bits(parts, fused(name, 0.1, "cpu", sizes))


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unscaling_in_parts(dtype: torch.dtype, bad: float | None) -> None:
    """Unscaling in parts, or by hand, has the bits of the kernel and its found_inf: otherwise overflows would pass."""
    x = (torch.arange(-100, 100) * 0.37).to(dtype)
    if bad is not None:
        x[150] = bad
    for inverse in (torch.tensor(2.0**-7, dtype=torch.float64), torch.tensor(1 / 3, dtype=torch.float64)):
        whole, parts, by_hand = x.clone(), x.clone(), x.clone()
        found = kernels.unscale_([whole], inverse)
        assert found == float(bad is not None)
        with Calls("_amp_foreach_non_finite_check_and_unscale_") as calls:
            assert same_bits(kernels.unscale_([parts[:0], parts], inverse, most=64), found)
        assert calls.largest() == 64
        assert same_bits(parts, whole)
        assert same_bits(kernels.unscale_by_parts_(by_hand, inverse), found)
        assert same_bits(by_hand, whole)


def test_unscaling_is_by_device() -> None:
    """Rows of bfloat16 do not reach a kernel that lacks the dtype (here meta): otherwise a step on GPUs would fail."""
    for dtype, calls_of in ((torch.bfloat16, {"cpu": 1, "meta": 0}), (torch.float16, {"cpu": 1, "meta": 1})):
        for device, number in calls_of.items():
            rows = [torch.ones(n, dtype=dtype, device=device) for n in (3, 4)]
            with Calls("_amp_foreach_non_finite_check_and_unscale_") as calls:
                kernels.unscale_(rows, torch.ones((), dtype=torch.float64, device=device))
            assert len(calls.found) == number


@pytest.mark.parametrize("p", [1, 2, 3.5, torch.inf])
def test_norms_in_parts(p: float) -> None:
    """A norm that is computed in parts is the norm of the whole: otherwise long leaves would be clipped wrongly."""
    for x in (torch.arange(-100.0, 100.0), torch.arange(200.0).to(torch.complex64) * 1j, torch.ones(3).bfloat16()):
        with Calls("linalg_vector_norm", "aminmax") as calls:
            parts = norms._norm(x, p, 64)
        assert calls.largest() == min(len(x), 64)
        torch.testing.assert_close(parts, norms._norm(x, p), rtol=1e-6, atol=0.0)


class Module:
    """A stand-in for torch.cuda that records what it is asked to do."""

    def __init__(self) -> None:
        self.set_to = list[torch.device]()
        self.synchronized = 0

    def current_device(self) -> int:
        """The number of the caller's current device."""
        return 3

    def set_device(self, device: torch.device) -> None:
        """Record the device of this thread."""
        self.set_to.append(device)

    def synchronize(self) -> None:
        """Count the call."""
        self.synchronized += 1


@pytest.mark.parametrize(("name", "number"), [("cuda:1", 1), ("cuda", 3)])
def test_a_world_on_a_device(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a world run on the named or current device: otherwise tensors would be made on another GPU."""
    module, seeded = Module(), list[torch.device]()

    def none(num_ranks: int, device: torch.device) -> list[Any]:
        """Make no random states, for the device does not exist."""
        seeded.append(device)
        return []

    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(scheduler, "generators_of", none)

    def of_rank(mesh: Any) -> tuple[Any, ...]:
        primitives.total(torch.ones(1), mesh, label="sum")
        return mesh.device, mesh.device_type, mesh_device(mesh), primitives.along(mesh, "shard").device

    want = torch.device("cuda", number)
    assert fshard.testing.simulate(of_rank, shard=2, device=name) == [(want, "cuda", want, want)] * 2
    assert module.set_to == [want] * 2
    assert seeded == [want]
    assert module.synchronized == 2 * 2


def test_an_abstract_mesh_of_a_device_there_is_no_build_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AbstractMesh on "cuda" needs a CUDA build, not a GPU: otherwise the error would come later and be obscure."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match=rf"AbstractMesh: device='{name}': .* a build for CPUs alone. Use a CUDA"):
            fshard.AbstractMesh(name, shard=2)
    assert fshard.AbstractMesh(shard=2).device == fshard.AbstractMesh("cpu:0", shard=2).device == torch.device("cpu")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, number in (("cuda", 0), ("cuda:1", 1)):
        mesh = fshard.AbstractMesh(name, shard=2)
        assert (mesh.device_type, mesh.device) == ("cuda", torch.device("cuda", number))


@pytest.mark.parametrize("add", [False, True])
def test_leaves_are_put_one_by_one_where_lists_are_too_long(add: bool) -> None:
    """Leaves that are copied one by one give the bits of one call: otherwise large units would be gathered wrongly."""
    parts, starts = [torch.rand(3, 5), torch.rand(40), torch.rand(())], [4, 20, 64]
    places = [torch.arange(70.0) for _ in range(2)]
    for place, most, num_calls in zip(places, (MOST, 64), (1, 0), strict=True):
        with Calls("_foreach_copy_", "_foreach_add_") as calls:
            put(place, parts, starts, add, most)
        assert len(calls.found) == num_calls
    assert same_bits(*places)
    assert places[0][:4].tolist() == ([0.0, 1.0, 2.0, 3.0] if add else [0.0] * 4)


SENT: dict[str, dict[str, Any]] = {name: WIRED[name] for name in (*STRATEGIES, "together", "bf16", "half")}
HOW: list[dict[str, Any]] = [{}, {"accumulate": 2, "clip_norm": 0.1}, {"reduction": "tree"}, {"reduce_once": True}]


def steps(plan: str, how: dict[str, Any]) -> Any:
    """A job of a rank: two steps, and a gather of the parameters."""

    def job(mesh: Any) -> None:
        params, tx = lm_params(torch.float32), optim.muon(0.1)
        made = fshard.make_plan(params, mesh, units=LM_UNITS, **SENT[plan])
        state, step = fshard.init_state(fshard.shard_params(params, made), tx), fshard.train_step(mean_loss, tx, **how)
        for i in range(2):
            state, _ = step(state, lm_batch(i, 0))
        fshard.gather_params(state.params)

    return job


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("plan", SENT)
def test_no_nan_is_sent(plan: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_NCCL_NAN_CHECK=1 would stop a healthy run: what lies between leaves is sent with them. Memory is filled
    with NaN here before it is used, as that of a GPU may be."""
    meet, found = _SimulatedRanks._meet, list[bool]()

    def watched(self: Any, call: Any, sends: Any, into: Any, act: Any) -> Any:
        found.extend(bool(x.isnan().any()) for x in sends if x.is_floating_point())
        return meet(self, call, sends, into, act)

    monkeypatch.setattr(_SimulatedRanks, "_meet", watched)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        fshard.testing.simulate(steps(plan, how), replicate=2, shard=2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found
    assert not any(found)
