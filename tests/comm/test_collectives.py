"""Collectives against plain torch on the stacked values of all ranks, and their derivatives of every order."""

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.models import same_bits
from support.worlds import gloo, simulated
from torch import Tensor, func
from torch.utils._python_dispatch import TorchDispatchMode

import fshard
from fshard.comm import announce, primitives

Call = Callable[[Tensor], Tensor]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers from a seed of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- the reference: what W ranks with the rows of `xs` (W, ...) get, as the rows of the result ---


def ordered_sum(xs: Tensor) -> Tensor:
    """Row 0 plus row 1, plus row 2, and so on; half precision in single, rounded once."""
    half = xs.is_floating_point() and xs.element_size() < 4
    total = xs[0].float() if half else xs[0]
    for x in xs[1:]:
        total = total + x
    return total.to(xs.dtype)


def parts(xs: Tensor) -> Tensor:
    """(W, W n, ...) -> (W, W, n, ...): rank, part."""
    return xs.unflatten(1, (len(xs), -1))


def repeated(x: Tensor, size: int) -> Tensor:
    """The same on every rank."""
    return x.expand(size, *x.shape)


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda xs: repeated(xs.flatten(0, 1) if xs.dim() > 1 else xs, len(xs)),
    "reduce_scatter": lambda xs: ordered_sum(parts(xs)),
    "all_reduce": lambda xs: repeated(ordered_sum(xs), len(xs)),
    "all_to_all": lambda xs: parts(xs).transpose(0, 1).flatten(1, 2),
    "broadcast": lambda xs: repeated(xs[-1], len(xs)),
    "vary": lambda xs: xs,
    "max": lambda xs: repeated(xs.amax(0), len(xs)),
    "min": lambda xs: repeated(xs.amin(0), len(xs)),
}
LINEAR = [name for name in REFERENCE if name not in ("max", "min")]
DIVIDES = ("reduce_scatter", "all_to_all")


def collective(name: str, mesh: Any, axis: str = "shard") -> Callable[[Any], Any]:
    """One of `REFERENCE`, over an axis; broadcasts come from the last rank."""
    if name in ("max", "min"):
        return lambda x: fshard.all_reduce(x, mesh, axis, op=name)
    extra = {"src": mesh.size(mesh.mesh_dim_names.index(axis)) - 1} if name == "broadcast" else {}
    return lambda x: getattr(fshard.collectives, name)(x, mesh, axis, **extra)


def stack(name: str, size: int, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 3) -> Tensor:
    """What `size` ranks put in."""
    rows = 2 * size if name in DIVIDES else 2
    return randn(size, rows, width, seed=seed, dtype=dtype)


# --- values ---

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64]


def cases(size: int) -> dict[tuple[Any, ...], Tensor]:
    """Every collective over dtypes and sizes: what all ranks put in."""
    found: dict[tuple[Any, ...], Tensor] = {}
    for name in REFERENCE:
        for dtype in DTYPES:
            if not (dtype.is_complex and name in ("max", "min")):
                scaled = stack(name, size, seed=len(found), dtype=torch.float64) * 10
                found[name, str(dtype)] = scaled.to(dtype)
        found[name, "large"] = randn(size, 6 * size, 2000 + size, seed=len(found), dtype=torch.float32)
        found[name, "long"] = randn(size, 30011 if name not in DIVIDES else 30011 * size, seed=len(found))
        found[name, "empty"] = torch.zeros(size, 0, 3)
        found[name, "transposed"] = randn(size, 3, 2 * size, seed=len(found)).transpose(1, 2)
        if name not in DIVIDES:
            found[name, "scalar"] = randn(size, seed=len(found))
    for name in ("all_gather", "all_to_all", "broadcast", "vary", "max", "min"):
        found[name, "bool"] = stack(name, size, seed=len(found)) > 0
    return found


def values(mesh: Any) -> dict[tuple[Any, ...], Tensor]:
    """This rank's results."""
    rank = mesh.get_local_rank("shard")
    size = mesh.size(mesh.mesh_dim_names.index("shard"))
    return {key: collective(key[0], mesh)(xs[rank]) for key, xs in cases(size).items()}


def check_values(ranks: list[dict[tuple[Any, ...], Tensor]]) -> None:
    """To the bit: sums are in rank order, whatever the size of the tensor."""
    for key, xs in cases(len(ranks)).items():
        for found, wanted in zip(ranks, REFERENCE[key[0]](xs), strict=True):
            assert found[key].dtype == wanted.dtype, key
            assert torch.equal(found[key], wanted), key


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_on_simulated_ranks(size: int) -> None:
    """A collective would give other values than its definition on the stacked inputs."""
    check_values(simulated(values, shard=size))


def test_values_on_two_axes() -> None:
    """A collective along one axis would mix ranks of another row of the mesh."""
    ranks = simulated(values, shard=2, replicate=2)
    check_values(ranks[:2])
    check_values(ranks[2:])


def along_the_other_axis(mesh: Any) -> list[Tensor]:
    """All-gather over `replicate`, and over both axes, the outer one slowest."""
    x = torch.tensor([mesh.get_rank()])
    inner = fshard.all_gather(x, mesh, "shard")
    return [fshard.all_gather(x, mesh, "replicate"), fshard.all_gather(inner, mesh, "replicate")]


def test_axes_nest() -> None:
    """Collectives along two axes in turn would not cover the mesh in order."""
    for rank, (column, everything) in enumerate(simulated(along_the_other_axis, shard=2, replicate=2)):
        assert column.tolist() == [rank % 2, rank % 2 + 2]
        assert everything.tolist() == [0, 1, 2, 3]


def test_a_sum_in_rank_order_is_not_any_sum() -> None:
    """The tests of bits would pass with any order of addition."""
    for key in (("all_reduce", "large"), ("all_reduce", "torch.float32")):
        xs = cases(3)[key]
        assert not torch.equal(ordered_sum(xs), ordered_sum(xs.flip(0)))
    assert cases(3)["all_reduce", "large"][0].nbytes > 1 << 16


def on_trees(mesh: Any) -> Any:
    """A tree of several shapes and dtypes, and an empty one."""
    rank = mesh.get_local_rank("shard")
    x = {"a": torch.full((4,), rank), "b": [torch.tensor(float(rank)), (None, torch.ones(2, 3) * rank)]}
    assert fshard.all_reduce({}, mesh, "shard") == {}
    return fshard.all_gather(x, mesh, "shard"), fshard.all_reduce(x, mesh, "shard")


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16]


class Copies(TorchDispatchMode):
    """The operators that bring a tensor into another dtype, by itself, before it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += [str(func)] * (func is torch.ops.aten._to_copy.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("into", [*NARROW, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32, torch.float64, torch.int32, torch.bool], ids=str)
def test_a_sum_of_one_dtype_into_another(dtype: torch.dtype, into: torch.dtype, size: int) -> None:
    """A sum would be rounded to the dtype of its inputs between two addends."""
    xs = [(randn(103, seed=i) * 3).to(dtype) for i in range(size)]
    total = xs[0].to(primitives.sum_dtype(dtype))
    for x in xs[1:]:
        total = total + x.to(total.dtype)
    with Copies() as copies:
        found = primitives.fold(xs, "sum", torch.empty(103, dtype=into))
    expected = total.to(into)
    assert found.dtype == into
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert len(copies.found) <= (size if dtype.itemsize == 1 else 1)


def test_trees() -> None:
    """A collective of a tree would lose a None, or reject a scalar."""
    for gathered, summed in simulated(on_trees, shard=2):
        assert gathered["a"].tolist() == [0] * 4 + [1] * 4
        assert gathered["b"][0].tolist() == [0.0, 1.0]
        assert gathered["b"][1][0] is None
        assert gathered["b"][1][1].shape == (4, 3)
        assert summed["b"][0].item() == 1.0
        assert summed["a"].tolist() == [1] * 4


def inputs_kept(mesh: Any) -> list[bool]:
    """Whether inputs are as they were, and results share no memory with them."""
    same = []
    for name in set(REFERENCE) - {"vary"}:
        x = stack(name, mesh.size(mesh.mesh_dim_names.index("shard")), seed=mesh.get_rank())[0]
        before = x.clone()
        collective(name, mesh)(x).mul_(0)
        same.append(torch.equal(x, before))
    return same


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_are_not_changed(size: int) -> None:
    """Writing to a result would change the caller's input, on one rank or on several."""
    assert all(all(same) for same in simulated(inputs_kept, shard=size))


# --- adjoints ---


def dot(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> of one rank, real where they are complex."""
    return (x.conj() * y).real.sum() if x.is_complex() else (x * y).sum()


def adjoint_sides(mesh: Any, name: str, dtype: torch.dtype) -> tuple[float, float]:
    """This rank's <A x, y> and <x, A^T y>."""
    size, rank = mesh.size(mesh.mesh_dim_names.index("shard")), mesh.get_local_rank("shard")
    x = stack(name, size, seed=1, dtype=dtype)[rank]
    x = x * (1 + 2j) if dtype.is_complex else x
    out, back = func.vjp(collective(name, mesh), x)
    y = randn(*out.shape, seed=50 + mesh.get_rank()).to(dtype)
    y = y * (2 - 1j) if dtype.is_complex else y
    return float(dot(out, y)), float(dot(x, back(y)[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", sorted(set(LINEAR) - {"vary"}))
def test_transposes_are_true_adjoints(name: str, dtype: torch.dtype) -> None:
    """Gradients through a collective would be wrong: `<A x, y>` is not `<x, A^T y>`, summed over ranks."""
    for shape in ({"shard": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"shard": 2, "replicate": 2}):
        sides = simulated(adjoint_sides, name, dtype, **shape)
        left, right = (sum(side) for side in zip(*sides, strict=True))
        assert abs(left - right) < 1e-12 * max(1.0, abs(left))


def vary_sides(mesh: Any) -> tuple[float, float]:
    """As `adjoint_sides`, of one value that all ranks have."""
    x = randn(3, seed=1)
    out, back = func.vjp(lambda x: fshard.collectives.vary(x, mesh, "shard"), x)
    y = randn(3, seed=50 + mesh.get_rank())
    return float(dot(out, y)), float(dot(x, back(y)[0]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_transpose_of_vary_counts_an_invariant_value_once(size: int) -> None:
    """The gradient of a value that all ranks share would be counted once for each rank."""
    sides = simulated(vary_sides, shard=size)
    for _, right in sides:
        assert abs(sum(left for left, _ in sides) - right) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_the_gradient_of_a_broadcast_is_one_graph(dtype: torch.dtype) -> None:
    """The ranks of a jitted gradient would rearrange it differently, and NaN would reach ranks that have no part in
    it."""

    def law(mesh: Any) -> tuple[list[str], Tensor]:
        graph = fshard.jit(partial(reduce_of, mesh), backend="eager").lower(torch.ones(2, dtype=dtype)).graph
        names = [str(node.target) for node in graph.nodes]
        names = names[names.index("fshard.all_reduce.default") :]  # the broadcast itself receives on one rank alone
        return names, reduce_of(mesh, torch.tensor([1.0, torch.nan], dtype=dtype))

    (first, zeros), (second, total) = simulated(law, shard=2)
    assert first == second
    assert torch.equal(zeros, torch.zeros(2, dtype=dtype))
    assert total.dtype == dtype
    assert total[0] == 2
    assert total[1].isnan()


def reduce_of(mesh: Any, g: Tensor) -> Tensor:
    """The transpose of a broadcast."""
    return func.vjp(lambda x: fshard.broadcast(x, mesh, "shard", src=1), torch.ones_like(g))[1](g)[0]


# --- closed under torch.func ---
# f is not linear: f(x) = sum of w * sin(C(cos x)), with a C and w of each rank. On all ranks' inputs at once that is
# one function of one device, F(xs) = sum of f over ranks, with the reference in the place of C.


def weights(shape: Any, rank: int) -> Tensor:
    """This rank's w."""
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).add(7 * rank + 1).sin().view(shape)


def of_a_rank(mesh: Any, name: str) -> Callable[[Tensor], Tensor]:
    """f of this rank."""

    def f(x: Tensor) -> Tensor:
        out = collective(name, mesh)(x.cos()).sin()
        return (weights(out.shape, mesh.get_local_rank("shard")) * out).sum()

    return f


def of_all(name: str) -> Callable[[Tensor], Tensor]:
    """F, the sum over ranks; an invariant value goes in once (`vary`)."""

    def total(xs: Tensor) -> Tensor:
        out = REFERENCE[name](xs.cos()).sin()
        w = torch.stack([weights(out.shape[1:], rank) for rank in range(len(xs))])
        return (w * out).sum()

    return total


def grad_grad(f: Call, x: Tensor, v: Tensor) -> Tensor:
    """grad of <grad, v>."""
    return func.grad(lambda x: (func.grad(f)(x) * v).sum())(x)


def jvp_grad(f: Call, x: Tensor, v: Tensor) -> Tensor:
    """jvp of grad."""
    return func.jvp(func.grad(f), (x,), (v,))[1]


def jvp_grad_grad(f: Call, x: Tensor, v: Tensor) -> Tensor:
    """Third order."""
    return func.jvp(lambda x: grad_grad(f, x, v), (x,), (v,))[1]


def double_backward(f: Call, x: Tensor, v: Tensor) -> Tensor:
    """grad of <grad, v> by plain autograd."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((g * v).sum(), x)[0]


PROGRAMS: dict[str, Callable[[Call, Tensor, Tensor], Tensor]] = {
    "grad": lambda f, x, v: func.grad(f)(x),
    "vjp": lambda f, x, v: func.vjp(f, x)[1](torch.tensor(2.0, dtype=x.dtype))[0],
    "grad(grad)": grad_grad,
    "jvp(grad)": jvp_grad,
    "jvp(grad(grad))": jvp_grad_grad,
    "vmap(grad)": lambda f, x, v: func.vmap(func.grad(f))(torch.stack([x, v, x + v])),
    "vmap(grad), batched at the end": lambda f, x, v: func.vmap(func.grad(f), -1, -1)(torch.stack([x, v], -1)),
    "vmap(jvp(grad))": lambda f, x, v: func.vmap(partial(jvp_grad, f, x))(torch.stack([x, v])),
    "vmap(vmap(grad))": lambda f, x, v: func.vmap(func.vmap(func.grad(f)))(
        torch.stack([x, v, x, v]).unflatten(0, (2, 2))
    ),
    "double backward": double_backward,
}
BATCH = {"vmap(grad)": 0, "vmap(grad), batched at the end": -1, "vmap(jvp(grad))": 0, "vmap(vmap(grad))": 0}


def derivatives(mesh: Any) -> dict[tuple[str, ...], Tensor]:
    """Every program of every collective, on this rank's rows; and the forward derivative of the collective itself."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own, where jvp is first used
    size, rank = mesh.size(mesh.mesh_dim_names.index("shard")), mesh.get_local_rank("shard")
    found = {}
    for name in LINEAR:
        x, v = (stack(name, size, seed=seed)[0 if name == "vary" else rank] for seed in (1, 2))
        for key, program in PROGRAMS.items():
            found[name, key] = program(of_a_rank(mesh, name), x, v)
        inner = collective(name, mesh)
        found[name, "jvp"] = func.jvp(lambda x, inner=inner: inner(x.cos()).sin(), (x,), (v,))[1]
        found[name, "vmap"] = func.vmap(inner)(torch.stack([x, v, x + v]))
    return {key: x.detach() for key, x in found.items()}


def wanted(name: str, key: str, size: int) -> list[Tensor]:
    """The same on one device."""
    xs, vs = (stack(name, size, seed=seed) for seed in (1, 2))
    if name == "vary":
        out = wanted_of(lambda x: of_all(name)(repeated(x, size)), name, key, xs[0], vs[0])
        if key in ("jvp", "vmap"):
            return [wanted_of(lambda x: x, name, key, xs[0], vs[0])] * size
        return [out] * size
    if key in ("jvp", "vmap"):
        out = wanted_of(REFERENCE[name], name, key, xs, vs)
        return list(out.transpose(0, 1) if key == "vmap" else out)
    out = wanted_of(of_all(name), name, key, xs, vs)
    batch = 2 if "vmap(vmap" in key else BATCH.get(key)
    return list(out if batch in (None, -1) else out.movedim(batch if batch == 2 else 1, 0))


def wanted_of(total: Call, name: str, key: str, x: Tensor, v: Tensor) -> Tensor:
    """One program of one function."""
    if key == "jvp":
        return func.jvp(lambda x: total(x.cos()).sin(), (x,), (v,))[1]
    if key == "vmap":
        return torch.stack([total(x), total(v), total(x + v)])
    return PROGRAMS[key](total, x, v).detach()


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Any]]:
    """The derivatives of every world."""
    return {
        **{str(size): simulated(derivatives, shard=size) for size in (1, 2, 3, 4)},
        "2 x 2": simulated(derivatives, shard=2, replicate=2),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("key", [*PROGRAMS, "jvp", "vmap"])
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_are_those_of_the_sum_over_ranks(name: str, key: str, worlds: dict[str, list[Any]]) -> None:
    """Some nesting of torch.func's transforms through a collective would differ from one device."""
    for world in ("1", "2", "3", "4", "2 x 2"):
        ranks = worlds[world]
        rows = [ranks[:2], ranks[2:]] if world == "2 x 2" else [ranks]
        for row in rows:
            for found, right in zip(row, wanted(name, key, len(row)), strict=True):
                assert found[name, key].shape == right.shape, world
                assert (found[name, key] - right).abs().max() <= 1e-12 * max(1.0, float(right.abs().max())), world


def test_processes_have_the_bits_of_the_simulation() -> None:
    """Simulated ranks would prove nothing about real processes."""
    found = gloo(values, shard=3)
    check_values(found)
    assert same_bits(found, simulated(values, shard=3))


@pytest.mark.slow
def test_derivatives_in_processes_have_the_bits_of_the_simulation(worlds: dict[str, list[Any]]) -> None:
    """A derivative would send otherwise than the function."""
    assert same_bits(gloo(derivatives, shard=3), worlds["3"])


def gradients_of_trees(mesh: Any) -> Any:
    """grad of a function of a tree that gathers one leaf and reduces the other."""
    rank = mesh.get_local_rank("shard")

    def f(p: Any) -> Tensor:
        whole = fshard.all_gather({"a": p["a"]}, mesh, "shard")["a"]
        return (rank + 1) * whole.sum() * fshard.all_reduce(p["b"], mesh, "shard")

    return func.grad(f)({"a": torch.ones(2), "b": torch.tensor(2.0)})


def test_gradients_of_trees() -> None:
    """The gradient of a function of several leaves would miss the product rule between them."""
    for grads in simulated(gradients_of_trees, shard=2):
        assert grads["a"].tolist() == [3 * 4.0] * 2
        assert grads["b"].item() == 3 * 4.0


# --- what is sent ---


def bytes_sent(mesh: Any) -> dict[str, list[tuple[str, int]]]:
    """The tally of each collective, of 12,000 and 24 elements."""
    found = {}
    for name in LINEAR:
        with fshard.collectives.tally() as records:
            for numel in (12000, 24):
                collective(name, mesh)(torch.ones(numel, dtype=torch.float64))
        found[name] = [(r.kind, r.nbytes) for r in records]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_is_sent_is_what_a_ring_would_send(size: int) -> None:
    """A collective would send more bytes than its algorithm needs."""
    for rank, found in enumerate(simulated(bytes_sent, shard=size)):
        big, small = 8 * 12000, 8 * 24
        assert found["all_gather"] == [("all_gather", (size - 1) * n) for n in (big, small)]
        for name in ("reduce_scatter", "all_to_all"):
            assert found[name] == [(name, (size - 1) * n // size) for n in (big, small)]
        assert found["all_reduce"] == [("all_reduce", 2 * (size - 1) * big // size), ("all_reduce", (size - 1) * small)]
        assert found["broadcast"] == [("broadcast", (size - 1) * n * (rank == size - 1)) for n in (big, small)]
        assert found["vary"] == []


# --- edges ---


def scattered_scalars(mesh: Any, name: str) -> Any:
    """A scalar of each sample has no dim 0 to divide."""
    return func.vmap(collective(name, mesh))(torch.ones(4))


@pytest.mark.parametrize("name", DIVIDES)
def test_the_batch_of_vmap_is_no_dim_to_divide(name: str) -> None:
    """Under vmap a collective would divide the batch over ranks instead of dim 0."""
    with pytest.raises(ValueError, match="dim 0 of a tensor"):
        simulated(scattered_scalars, name, shard=2)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_backward_on_another_thread_is_the_callers(kind: str) -> None:
    """Collectives of a backward on autograd's own thread, as on GPUs, would be neither counted nor checked."""
    announced_axes = list[str]()

    def around(ranks: Any, mesh: Any) -> Any:
        announced_axes.append(ranks.axis)
        return ranks

    def job(mesh: Any) -> tuple[list[str], list[str]]:
        x = torch.ones(2, requires_grad=True)
        with fshard.collectives.tally() as records, announce.announcing(around):
            y = getattr(fshard.collectives, kind)(x, mesh, "shard").sum()
            before = [len(records), len(announced_axes)]
            thread = threading.Thread(target=torch.autograd.grad, args=(y, x))
            thread.start()
            thread.join()
        backward = [one.kind for one in records[before[0] :]]
        return backward, announced_axes[before[1] :]

    expected = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce"}[kind]
    assert simulated(job, shard=1) == [([expected], ["shard"])]


def test_a_tally_around_the_backward_alone_counts_it() -> None:
    """A tally opened after the forward would miss the collectives of the backward."""

    def job(mesh: Any) -> list[int]:
        x, counts = torch.ones(2, requires_grad=True), list[int]()

        def backward(y: Tensor) -> None:
            with fshard.collectives.tally() as records:
                torch.autograd.grad(y, x)
            counts.append(len(records))

        with fshard.collectives.tally() as outer:
            ys = [fshard.all_gather(x, mesh, "shard").sum() for _ in range(2)]
        backward(ys[0])
        thread = threading.Thread(target=backward, args=(ys[1],))
        thread.start()
        thread.join()
        return [len(outer), *counts]

    assert simulated(job, shard=1) == [[2, 1, 1]]


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_what_can_be_combined(op: str) -> None:
    """A reduction of a dtype that cannot be summed would run, or a possible one would be refused."""
    for dtype in (*INTEGERS, *FLOATS, *NARROW, torch.uint16, torch.uint32, torch.uint64):
        if dtype in INTEGERS + FLOATS or (op == "sum" and dtype in NARROW):
            primitives.check_combines("all_reduce", op, dtype)
        else:
            with pytest.raises(TypeError, match=f"all_reduce: torch has no {op} of {dtype}: convert it first"):
                primitives.check_combines("all_reduce", op, dtype)
