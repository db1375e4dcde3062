"""The order of sums over many ranks, and what a collective costs the host, whatever the number of ranks."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.accelerator import DEVICE, Mesh, on_accelerator
from support.models import LM_UNITS, lm_batch, lm_params, mean_loss
from support.worlds import gloo, simulated
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # private: this test fails if torch removes it
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard import optim, tree
from fshard.comm import primitives
from fshard.comm.mesh import ProcessMesh
from fshard.comm.process_groups import GroupRanks
from fshard.comm.reduction import TREE, tree_sum
from fshard.core.storage import as_bytes

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMMED = (*FLOATS, torch.int16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def draw(dtype: torch.dtype, *shape: int, seed: int) -> Tensor:
    """Numbers whose sums are rounded, where sums of this dtype are."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    if dtype.is_complex:
        return torch.complex(x.float(), x.flip(0).float())
    return (x * 20).to(dtype) if not dtype.is_floating_point and dtype != torch.bool else (x.abs() + 0.1).to(dtype)


def in_order(xs: Sequence[Tensor], op: str) -> Tensor:
    """The first, combined with the second, and so on."""
    total = xs[0]
    for x in xs[1:]:
        total = COMBINE[op](total, x)
    return total


def oracle(xs: Sequence[Tensor], op: str = "sum") -> Tensor:
    """In rank order within groups of eight, then the groups in the same way."""
    wide = xs[0].dtype.is_floating_point and xs[0].dtype.itemsize < 4 and op == "sum"
    xs = [x.float() if wide else x for x in xs]
    while len(xs) > 8:
        xs = [in_order(xs[i : i + 8], op) for i in range(0, len(xs), 8)]
    return in_order(xs, op)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


SIZES = [*range(1, 41), 63, 64, 65, 72, 100, 512, 513, 600]


@pytest.mark.parametrize("numel", [5, 0])
@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_a_sum(size: int, numel: int) -> None:
    """Ranks that have the contributions in one buffer, and ranks that have them one by one, add them in the order that
    the docs say: otherwise processes and simulated ranks would have other bits."""
    xs = [draw(torch.float32, numel, seed=rank) for rank in range(size)]
    one_by_one = primitives.fold(xs, "sum", torch.empty(numel))
    in_a_buffer = primitives.fold_rows(torch.stack(xs), "sum", torch.empty(numel))
    assert same(one_by_one, oracle(xs))
    assert same(in_a_buffer, oracle(xs))


@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_a_tree(size: int) -> None:
    """A tree of contributions in one buffer would be another tree: other bits on another number of ranks."""
    xs = [draw(torch.float32, 5, seed=rank) for rank in range(size)]
    assert same(primitives.fold_rows(torch.stack(xs), "sum", torch.empty(5), group=2), tree_sum(xs))


@pytest.mark.parametrize("size", [3, 8, 9, 24, 65])
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
def test_the_order_of_a_sum_of_every_dtype(dtype: torch.dtype, size: int) -> None:
    """A sum of many ranks would round between groups, wrap around otherwise, or be refused for some dtype."""
    xs = [draw(dtype, 2, 3, seed=rank) for rank in range(size)]
    expected = oracle(xs)
    for into in {expected.dtype, dtype, *((torch.float64,) if dtype.is_floating_point else ())}:
        out = torch.empty(2, 3, dtype=into)
        assert same(primitives.fold(xs, "sum", out).clone(), expected.to(into))
        assert same(primitives.fold_rows(torch.stack(xs), "sum", out), expected.to(into))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int16, torch.bool], ids=str)
def test_the_largest_and_smallest_of_many_ranks(dtype: torch.dtype, op: str) -> None:
    """A flag of one of many ranks, or a NaN, would get lost."""
    xs = [draw(dtype, 7, seed=rank) for rank in range(21)]
    if dtype.is_floating_point:
        xs[13][2] = float("nan")
    expected = oracle(xs, op)
    assert same(primitives.fold(xs, op, torch.empty_like(xs[0])), expected)
    assert same(primitives.fold_rows(torch.stack(xs), op, torch.empty_like(xs[0])), expected)


def sums_of_ranks(mesh: Any) -> list[Tensor]:
    """Sums of every kind: whole tensors, parts, one that does not divide, and one of half precision into float32."""
    rank, size = mesh.get_rank(), mesh.size()
    x, odd = draw(torch.float32, size * 3, seed=rank), draw(torch.float32, 2 * size + 1, seed=rank)
    ranks = primitives.along(mesh, "shard")
    half, wide = x.bfloat16(), torch.empty(3)
    return [
        *(fshard.all_reduce(x, mesh, "shard"), fshard.reduce_scatter(x, mesh, "shard")),
        *(fshard.all_reduce(odd, mesh, "shard"), primitives.reduce_scatter(half, ranks, "", wide).wait()),
    ]


@pytest.mark.parametrize("size", [1, 2, 8, 9, 13, 17, 40])
def test_simulated_ranks_have_this_order(size: int) -> None:
    """A simulated world would promise bits that processes do not have."""
    xs = [draw(torch.float32, size * 3, seed=rank) for rank in range(size)]
    odd = [draw(torch.float32, 2 * size + 1, seed=rank) for rank in range(size)]
    whole = oracle(xs)
    wide = oracle([x.bfloat16() for x in xs])
    for rank, found in enumerate(simulated(sums_of_ranks, shard=size)):
        part = slice(3 * rank, 3 * rank + 3)
        expected = [whole, whole[part], oracle(odd), wide[part]]
        assert all(same(a, b) for a, b in zip(found, expected, strict=True))


# --- processes whose collectives are the backend's own ---


class Few(ProcessMesh):
    """A mesh that takes any number of processes for many."""

    def __init__(self, mesh: Any):
        super().__init__(mesh)
        for axis in self.mesh_dim_names:
            self._ranks[axis] = GroupRanks(axis, mesh.get_group(axis), self.device, few=1)


def all_collectives(mesh: Any) -> list[Tensor]:
    """Results of every collective and dtype, with uneven sizes and without elements."""
    rank, size, ranks = mesh.get_rank(), mesh.size(), primitives.along(mesh, "shard")
    found = list[Tensor]()
    for number, dtype in enumerate(SUMMED):
        for numel in (0, 3, *[3000] * (dtype in FLOATS[:3:2])):
            x = draw(dtype, numel * size, 2, seed=10 * number + rank)
            found += [primitives.reduce_scatter(x, ranks).wait(), primitives.all_gather(x, ranks).wait()]
            found += [primitives.all_to_all(x, ranks).wait(), primitives.broadcast(x, ranks, size - 1).wait()]
            odd = draw(dtype, numel * size + 1, seed=10 * number + rank)
            found += [primitives.all_reduce(odd, ranks).wait(), primitives.all_reduce(x, ranks).wait()]
    for op in ("max", "min"):
        found += [primitives.all_reduce(draw(dtype, 9001, seed=rank), ranks, op=op).wait() for dtype in FLOATS]
    wide = torch.empty(2)
    found.append(primitives.reduce_scatter(draw(torch.bfloat16, 2 * size, seed=rank), ranks, out=wide).wait())
    found.append(primitives.all_reduce(draw(torch.bfloat16, 9, seed=rank), ranks, out=torch.empty(9)).wait())
    for dtype in (torch.bfloat16, torch.float32):
        x = draw(dtype, 3000 * size, seed=rank)
        found += [TREE.reduce_scatter(x, ranks, "", out).wait() for out in (None, torch.empty(3000, dtype=dtype))]
        found += [TREE.all_reduce(x[:numel], ranks, "", None).wait() for numel in (3000 * size, 2999)]
    whole = torch.empty(20000 * size)
    found.append(primitives.all_reduce(draw(torch.bfloat16, 20000 * size, seed=rank), ranks, out=whole).wait())
    return found


def trained(mesh: Any) -> list[Tensor]:
    """Parameters after two steps."""
    params, tx = lm_params(torch.float32), optim.adamw(0.05)
    plan = replace(fshard.make_plan(params, mesh, units=LM_UNITS), mesh=mesh)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step = fshard.train_step(mean_loss, tx, clip_norm=1.0)
    for i in range(2):
        state, _ = step(state, lm_batch(i, mesh.get_rank()))
    return tree.leaves(fshard.gather_params(state.params))


def in_a_graph(mesh: Any, jit: bool) -> list[Tensor]:
    """Collectives of one function, or of its graph: large and small ones, and one that does not divide."""

    def fn(x: Tensor) -> list[Tensor]:
        part = fshard.reduce_scatter(x, mesh, "shard")
        sums = [fshard.all_reduce(y, mesh, "shard") for y in (x, x[:7], x[:-1])]
        sums += [fshard.shift(x, mesh, "shard"), fshard.shift(x, mesh, "shard", -1, wrap=False)]
        sums += [
            fshard.all_to_all(x.view(4, -1), mesh, "shard", split=1),
            fshard.all_gather(x[None], mesh, "shard", dim=1),
        ]
        return [part, *sums, fshard.all_gather(part, mesh, "shard"), fshard.all_to_all(x, mesh, "shard")]

    x = draw(torch.float32, 20000 * mesh.size(), seed=mesh.get_rank())
    return (fshard.jit(fn, backend="eager") if jit else fn)(x)


def everything(mesh: Any, many: bool) -> list[Any]:
    """All results; with `many` each collective of processes is one call of gloo's, and of a graph on three."""
    mesh = Few(mesh) if many else mesh
    results = [*all_collectives(mesh), *trained(mesh), *in_a_graph(mesh, jit=many and mesh.size() == 3)]
    return [(str(x.dtype), x.shape, as_bytes(x).numpy().tobytes()) for x in results]  # torch cannot pickle some dtypes


@pytest.mark.parametrize("size", [3, 4])
def test_processes_have_the_bits_of_simulated_ranks(size: int) -> None:
    """A collective that is one call of the backend would have other bits than messages: many processes could not be
    reproduced by simulated ranks."""
    both = gloo(everything, True, shard=size), simulated(everything, False, shard=size)
    for found, expected in zip(*both, strict=True):
        assert len(found) == len(expected)
        assert [a[:2] for a, b in zip(found, expected, strict=True) if a != b] == []


# --- what it costs the host ---


class Counted(TorchDispatchMode):
    """The number of operators called, by namespace: `c10d` are calls of the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.namespace] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_group(size: int) -> Iterator[Any]:
    """A mesh of so many ranks, of which this process is the first: messages are not sent."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


COLLECTIVES: dict[str, Callable[[Tensor, Any], Any]] = {
    "reduce_scatter": lambda x, ranks: primitives.reduce_scatter(x, ranks),
    "all_gather": lambda x, ranks: primitives.all_gather(x[: len(x) // ranks.size], ranks),
    "all_reduce": lambda x, ranks: primitives.all_reduce(x, ranks),
    "all_to_all": lambda x, ranks: primitives.all_to_all(x, ranks),
    "broadcast": lambda x, ranks: primitives.broadcast(x, ranks),
    "tree": lambda x, ranks: TREE.reduce_scatter(x, ranks, "", None),
    "flag": lambda x, ranks: primitives.all_reduce(x[:1], ranks, op="max"),
    "norm": lambda x, ranks: primitives.all_reduce(x[:1], ranks),
    "odd": lambda x, ranks: primitives.all_reduce(x[1:], ranks),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_cost_of_a_collective_does_not_grow(name: str) -> None:
    """A collective would cost the host a call for each rank: 8192 ranks take 0.1 s then, where 8 take 0.1 ms."""
    counts = dict[int, Counter[str]]()
    for size in (8, 64, 512, 4096):
        with fake_group(size) as mesh, Counted() as counted:
            COLLECTIVES[name](torch.zeros(1 << 16), primitives.along(mesh, "shard")).wait()
        counts[size] = counted.calls
    assert all(counts[size]["c10d"] <= 2 for size in (64, 512, 4096)), counts
    # sums: seven additions for each factor of eight, in a tree three, and views
    assert all(counts[size]["aten"] - counts[size // 8]["aten"] <= 18 for size in (512, 4096)), counts
    assert counts[4096]["aten"] <= 90, counts


def test_what_does_not_divide_is_not_sent_whole_to_many_ranks() -> None:
    """An all-reduce of 1 MB over 4096 ranks would receive 4 GB, because its elements do not divide by the ranks."""
    with fake_group(4096) as mesh, fshard.collectives.tally() as records:
        total = primitives.all_reduce(torch.ones(250_001), primitives.along(mesh, "shard")).wait()
    assert total.shape == (250_001,)
    assert [call.nbytes for call in records] == [4095 * 2 * 62 * 4]


# --- which order a step takes ---


@pytest.mark.parametrize(
    ("device", "named", "fast"),
    [(d, n, f) for d in ("cpu", DEVICE) for n, f in ((None, d != "cpu"), ("exact", False), ("fast", True))],
)
def test_the_backend_chooses_on_a_gpu_unless_said_otherwise(
    device: Any, named: str | None, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would have a slower order on GPUs than FSDP, or lose the bits of simulated ranks on CPUs, or not take the
    order that was asked for."""
    asked = list[bool]()

    def spy(name: str) -> None:
        plain = getattr(primitives, name)

        def called(x: Any, ranks: Any, label: str = "", *args: Any, fast: bool | None = None, **kw: Any) -> Any:
            asked.extend([] if fast is None else [fast])
            return plain(x, ranks, label, *args, **({} if fast is None else {"fast": fast}), **kw)

        monkeypatch.setattr(primitives, name, called)

    def job(mesh: Any) -> None:
        params = {"w": torch.ones(4, 2, device=mesh.device)}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        tx, x = optim.sgd(0.1), torch.ones(2, 2, device=mesh.device)

        def loss(p: Any, x: Tensor) -> Tensor:
            return (p["w"][:2] * x).sum()

        fshard.value_and_grad(loss, reduction=named)(sharded, x)
        fshard.reduce_grads(fshard.value_and_grad(loss, reduce=False)(sharded, x)[1], reduction=named)
        fshard.train_step(loss, tx, reduction=named)(fshard.init_state(sharded, tx), x)

    for name in ("reduce_scatter", "all_reduce"):
        spy(name)
    if device == "cpu":
        simulated(job, shard=2)
    else:
        with on_accelerator():
            job(Mesh(shard=2))
    assert len(asked) >= 3
    assert set(asked) == {fast}
