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
from fshard.testing import simulate

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


LENGTHS = (1, 2, 0, 3)  # of the parts of uneven cuts, by how far the receiver is behind the sender


def cut(rows: int, rank: int, size: int, back: int = 1) -> list[int]:
    """How many of the rows a rank sends to each; with `back` -1, how many it receives from each."""
    times = rows // sum(LENGTHS[:size])
    return [times * LENGTHS[back * (peer - rank) % size] for peer in range(size)]


def dealt(xs: Tensor, split: int, join: int, uneven: bool = False) -> Tensor:
    """Each rank's parts along `split`, and what rank p gets of all of them along `join`, for every p."""
    size, length = len(xs), xs[0].shape[split]
    lengths = [cut(length, rank, size) if uneven else [length // size] * size for rank in range(size)]
    given = [x.split(row, split) for x, row in zip(xs, lengths, strict=True)]
    return torch.stack([torch.cat([parts[rank] for parts in given], join) for rank in range(size)])


def shifted(xs: Tensor, by: int, wrap: bool = True) -> Tensor:
    """Row r is row r - by, of a ring or of a line that goes on with zeros."""
    zeros, size = xs[0] * xs.new_zeros(()), len(xs)
    return torch.stack([xs[(r - by) % size] if wrap or 0 <= r - by < size else zeros for r in range(size)])


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda xs: repeated(xs.flatten(0, 1) if xs.dim() > 1 else xs, len(xs)),
    "reduce_scatter": lambda xs: ordered_sum(parts(xs)),
    "all_reduce": lambda xs: repeated(ordered_sum(xs), len(xs)),
    "all_to_all": lambda xs: parts(xs).transpose(0, 1).flatten(1, 2),
    "broadcast": lambda xs: repeated(xs[-1], len(xs)),
    "vary": lambda xs: xs,
    "max": lambda xs: repeated(xs.amax(0), len(xs)),
    "min": lambda xs: repeated(xs.amin(0), len(xs)),
    "all_gather, dim 1": lambda xs: repeated(torch.cat([*xs], 1), len(xs)),
    "reduce_scatter, dim -1": lambda xs: dealt(repeated(ordered_sum(xs), len(xs)), 1, 1).unflatten(2, (len(xs), -1))[
        :, :, 0
    ],
    "all_to_all, 1 to 0": lambda xs: dealt(xs, 1, 0),
    "all_to_all, 0 to 1": lambda xs: dealt(xs, 0, 1),
    "all_to_all, sizes": lambda xs: dealt(xs, 0, 0, uneven=True),
    "shift": lambda xs: shifted(xs, 1),
    "shift, 1 without wrap": lambda xs: shifted(xs, 1, wrap=False),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all_gather, dim 1": {"dim": 1},
    "reduce_scatter, dim -1": {"dim": -1},
    "all_to_all, 1 to 0": {"split": 1},
    "all_to_all, 0 to 1": {"join": -1},
    "shift, 1 without wrap": {"wrap": False},
}
LINEAR = [name for name in REFERENCE if name not in ("max", "min")]
DIVIDES = {"reduce_scatter": 0, "all_to_all": 0, "all_to_all, 0 to 1": 0, "all_to_all, sizes": 0}  # the dim
DIVIDES |= {"reduce_scatter, dim -1": 1, "all_to_all, 1 to 0": 1}
ALONG_1 = [name for name, options in OPTIONS.items() if not name.startswith("shift")]  # tensors of one dim lack it
SUMS = ("reduce_scatter", "reduce_scatter, dim -1", "all_reduce")


def collective(name: str, mesh: Any, axis: str = "shard") -> Callable[[Any], Any]:
    """One of `REFERENCE`, over an axis; broadcasts come from the last rank."""
    size, rank = mesh.size(mesh.mesh_dim_names.index(axis)), mesh.get_local_rank(axis)
    if name in ("max", "min"):
        return lambda x: fshard.all_reduce(x, mesh, axis, op=name)
    if name == "all_to_all, sizes":
        sizes = lambda x: (cut(len(x), rank, size), cut(len(x), rank, size, -1))  # noqa: E731
        return lambda x: fshard.all_to_all(x, mesh, axis, sizes=sizes(x))
    extra = {"src": size - 1} if name == "broadcast" else OPTIONS.get(name, {})
    return lambda x: getattr(fshard.collectives, name.partition(",")[0])(x, mesh, axis, **extra)


def stack(name: str, size: int, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 3) -> Tensor:
    """What `size` ranks put in."""
    return randn(size, *shape_of(name, size, 2, width), seed=seed, dtype=dtype)


def shape_of(name: str, size: int, *shape: int) -> list[int]:
    """A shape, with as many times the length of the dim that the collective divides."""
    dim, times = DIVIDES.get(name), sum(LENGTHS[:size]) if name == "all_to_all, sizes" else size
    return [length * times if dim == number else length for number, length in enumerate(shape)]


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
        found[name, "large"] = randn(size, *shape_of(name, size, 12, 2000), seed=len(found), dtype=torch.float32)
        found[name, "empty"] = torch.zeros(size, *shape_of(name, size, 0, 3))
        found[name, "transposed"] = stack(name, size, seed=len(found)).transpose(1, 2).contiguous().transpose(1, 2)
        if name not in ALONG_1:
            found[name, "long"] = randn(size, *shape_of(name, size, 30011), seed=len(found))
        if name not in ALONG_1 and name not in DIVIDES:
            found[name, "scalar"] = randn(size, seed=len(found))
        if name not in SUMS:
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
    for key in (("all_reduce", "large"), ("reduce_scatter", "torch.float32")):
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


# --- dims, shifts, sizes, and one rank without a mesh ---

FORMATS = [torch.contiguous_format, torch.channels_last]


def of_dims(mesh: Any, axis: str, form: torch.memory_format) -> list[bool]:
    """Whether a collective along each dim is the one along dim 0 of the tensor with the dim moved, to the bit."""
    x = randn(12, 4, 6, 2, seed=mesh.get_rank(), dtype=torch.float32).contiguous(memory_format=form)
    same = list[bool]()
    for dim in range(-4, 4):
        for call in (fshard.all_gather, fshard.reduce_scatter):
            moved = call(x.movedim(dim, 0), mesh, axis).movedim(0, dim)
            same.append(torch.equal(call(x, mesh, axis, dim=dim), moved))
        for join in range(-4, 4):
            parts = x.tensor_split(mesh.size(axis), dim)
            arrived = [fshard.all_gather(part[None], mesh, axis)[:, None] for part in parts]
            right = torch.cat([*arrived[mesh.get_local_rank(axis)][:, 0]], join)
            same.append(torch.equal(fshard.all_to_all(x, mesh, axis, split=dim, join=join), right))
    return same


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("axis", "sizes"), [("b", {"b": 1}), ("b", {"b": 2}), ("a", {"a": 2, "b": 2}), ("b", {"a": 2, "b": 2})]
)
def test_a_collective_along_any_dim(axis: str, sizes: dict[str, int], form: torch.memory_format) -> None:
    """A dim would be another one where it is negative, behind a longer one, or in a tensor of another memory format."""
    assert all(all(same) for same in simulate(lambda mesh: of_dims(mesh, axis, form), **sizes))


class Reordered(Copies):
    """The operators that copy elements to another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = (torch.ops.aten.clone.default, torch.ops.aten.cat.default)
        self.found += [str(func)] * (func in copies)
        return func(*args, **(kwargs or {}))


def reordered(mesh: Any) -> list[int]:
    """How many copies are made beside those of the messages."""
    x, counts = torch.ones(4, 3, 2), list[int]()
    for call in (
        lambda: fshard.all_gather(x, mesh, "shard"),
        lambda: fshard.all_gather(x.transpose(0, 1), mesh, "shard", dim=1),
        lambda: fshard.reduce_scatter(x.transpose(0, 1), mesh, "shard", dim=1),
        lambda: fshard.all_to_all(x, mesh, "shard"),
        lambda: fshard.all_gather(x, mesh, "shard", dim=2),
        lambda: fshard.all_to_all(x, mesh, "shard", split=2),
        lambda: fshard.all_to_all(x, mesh, "shard", join=2),
        lambda: fshard.shift(x, mesh, "shard"),
    ):
        with Reordered() as copies:
            call()
        counts.append(len(copies.found))
    return counts


def test_no_copy_where_the_memory_has_the_order() -> None:
    """Sequence-first activations would be copied before and after each gather along the sequence."""
    assert simulated(reordered, shard=2) == [[0, 0, 0, 0, 1, 1, 1, 0]] * 2


def shifts(mesh: Any, dtype: torch.dtype) -> list[list[Any]]:
    """What arrives by every shift."""
    x = torch.tensor([[mesh.get_rank() + 1]]).to(dtype)
    return [[fshard.shift(x, mesh, "shard", by, wrap=wrap).item() for by in range(-7, 8)] for wrap in (True, False)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shifts(size: int, dtype: torch.dtype) -> None:
    """A shift would send to another rank, or what has no sender would not be zeros."""
    xs = torch.arange(1, size + 1).to(dtype)
    assert same_bits(fshard.shift(xs, None, "", wrap=False), torch.zeros_like(xs))
    assert fshard.shift(xs, None, "", 0, wrap=False) is xs
    for rank, (ring, line) in enumerate(simulated(shifts, dtype, shard=size)):
        assert ring == [xs[(rank - by) % size].item() for by in range(-7, 8)]
        assert line == [xs[rank - by].item() if 0 <= rank - by < size else 0 for by in range(-7, 8)]


def test_no_nan_comes_over_the_end_of_a_line() -> None:
    """What no rank sends would be NaN times zero, on a mesh and without one."""

    def job(mesh: Any) -> list[bool]:
        x = torch.full((2,), torch.nan)
        nowhere = fshard.shift(x, mesh, "shard", 3, wrap=False)
        return [nowhere.eq(0).all().item(), fshard.shift(x, None, "", 1, wrap=False).eq(0).all().item()]

    assert simulated(job, shard=2) == [[True, True]] * 2


# row r: how many rows rank r sends to each; ranks send and receive different numbers, one nothing at all
COUNTS = {1: [[3]], 2: [[1, 4], [0, 2]], 3: [[0, 2, 1], [0, 0, 0], [3, 1, 2]]}


def uneven(mesh: Any) -> list[Tensor]:
    """An all-to-all of other sizes on each rank, along either dim, and the gradient of its squares."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own, where jvp is first used
    rank, size = mesh.get_rank(), mesh.size()
    sent, received = COUNTS[size][rank], [row[rank] for row in COUNTS[size]]
    x, seen = randn(sum(sent), 2, seed=rank), list[Tensor]()
    for dim, y in ((0, x), (-1, x.T)):
        f = partial(fshard.all_to_all, mesh=mesh, axis="shard", sizes=(sent, received), split=dim, join=dim)
        seen += [f(y), func.grad(lambda y, f=f: (rank + 2) * f(y).square().sum())(y)]
        seen += [func.vmap(f)(torch.stack([y, 2 * y])), func.jvp(f, (y,), (2 * y,))[1]]
    return seen


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("world", [simulated, gloo])
def test_an_uneven_all_to_all(world: Any, size: int) -> None:
    """Parts of different lengths would be cut elsewhere than they are joined, or gradients go to other ranks."""
    xs = [randn(sum(row), 2, seed=rank) for rank, row in enumerate(COUNTS[size])]
    for rank, seen in enumerate(world(uneven, shard=size)):
        right = torch.cat([x.split(row)[rank] for x, row in zip(xs, COUNTS[size], strict=True)])
        scale = torch.cat([torch.full((n, 1), 2.0 * (p + 2)) for p, n in enumerate(COUNTS[size][rank])])
        grad = scale.double() * xs[rank]
        both = torch.stack([right, 2 * right])
        expected = [right, grad, both, 2 * right, right.T, grad.T, both.transpose(1, 2), 2 * right.T]
        for got, wanted_here in zip(seen, expected, strict=True):
            assert torch.equal(got, wanted_here)


def plain_and_alone(mesh: Any) -> list[bool]:
    """Whether each collective gives without a mesh what it gives on a mesh of one rank; and its gradient."""
    same = list[bool]()
    for name in REFERENCE:
        options = {"op": name} if name in ("max", "min") else OPTIONS.get(name, {})
        call = getattr(fshard.collectives, "all_reduce" if "op" in options else name.partition(",")[0])
        for x in (stack(name, 1)[0], *([torch.tensor(2.5)] if name == "all_gather" else [])):
            alone = lambda x, call=call, options=options: call(x, None, "no axis of any mesh", **options)  # noqa: E731
            same.append(torch.equal(alone(x), collective(name, mesh)(x)))
            if "op" not in options:
                f, g = (lambda x, c=c: c(x).sin().sum() for c in (alone, collective(name, mesh)))
                same.append(torch.equal(func.grad(f)(x), func.grad(g)(x)))
                same.append(torch.equal(func.vmap(alone)(x[None]), func.vmap(collective(name, mesh))(x[None])))
    return same


def test_one_rank_needs_no_mesh() -> None:
    """A loss with collectives would not run as the plain model."""
    assert all(simulated(plain_and_alone, shard=1)[0])
    x = torch.ones(3)
    assert fshard.all_gather(x, None, "shard") is x
    assert fshard.collectives.vary({"a": x}, None, "shard")["a"] is x


def compiled(mesh: Any, name: str) -> tuple[list[str], bool]:
    """The operators of a graph of a collective and of its gradient; whether they have the bits of the eager ones."""
    size, rank = mesh.size(mesh.mesh_dim_names.index("shard")), mesh.get_local_rank("shard")
    f = of_a_rank(mesh, name)
    both = lambda x: (collective(name, mesh)(x), func.grad(f)(x), func.grad(lambda x: func.grad(f)(x).sum())(x))  # noqa: E731
    x = stack(name, size, seed=3)[0 if name == "vary" else rank]
    jitted = fshard.jit(both, backend="eager")
    nodes = [str(node.target) for node in jitted.lower(x).graph.nodes]
    return nodes, same_bits(jitted(x), both(x))


@pytest.mark.parametrize("name", [name for name in LINEAR if name != "broadcast"])
def test_graphs_have_the_bits_and_are_alike(name: str) -> None:
    """A jitted loss would have other values, or ranks graphs of different nodes, which passes reorder differently."""
    for size in (1, 3):
        ranks = simulated(compiled, name, shard=size)
        assert all(good for _, good in ranks)
        assert [nodes for nodes, _ in ranks] == [ranks[0][0]] * size


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
        if name in ALONG_1:
            continue
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
        own = big // sum(LENGTHS[:size])  # this rank's part, of length 1
        assert found["all_to_all, sizes"][0] == ("all_to_all", big - own)
        assert found["shift"] == [("shift", n * (size > 1)) for n in (big, small)]
        assert found["shift, 1 without wrap"] == [("shift", n * (rank + 1 < size)) for n in (big, small)]


# --- edges ---


def scattered_scalars(mesh: Any, name: str) -> Any:
    """A scalar of each sample has no dim 0 to divide."""
    return func.vmap(collective(name, mesh))(torch.ones(4))


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_the_batch_of_vmap_is_no_dim_to_divide(name: str) -> None:
    """Under vmap a collective would divide the batch over ranks instead of dim 0."""
    with pytest.raises(ValueError, match="expected a tensor with a dim 0, got one of shape"):
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


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "shift"])
def test_a_column_of_no_rows(name: str) -> None:
    """A rank may have no tokens; torch calls a tensor without elements contiguous, whatever its strides."""

    def run(mesh: Any) -> tuple[int, ...]:
        return tuple(getattr(fshard, name)(torch.zeros(0, 2)[..., 0], mesh, "shard").shape)

    assert fshard.testing.World(axes={"shard": 2}, late=True).run(run) == [(0,)] * 2


@pytest.mark.parametrize(
    "axis",
    [{"replicate", "shard"}, ("shard", "shard"), 0, (0,), b"shard"],
    ids=["set", "twice", "number", "numbers", "bytes"],
)
def test_a_rank_has_one_number_along_axes(axis: Any) -> None:
    """The order of a set is another one in each process, and an axis named twice is no axis: ranks would get the same
    number."""
    for mesh in (None, fshard.AbstractMesh(replicate=2, shard=2, rank=2)):
        with pytest.raises(TypeError, match=r"rank_and_size: .*axis.*expected the name of an axis, or a tuple"):
            fshard.rank_and_size(mesh, axis)
    assert fshard.rank_and_size(fshard.AbstractMesh(replicate=2, shard=2, rank=2), ["shard", "replicate"]) == (1, 4)


def test_over_two_axes_one_after_the_other() -> None:
    """The order that the error of a tuple of axes names would mix the ranks' parts."""

    def run(mesh: Any) -> None:
        rank = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
        gathered, part = torch.tensor([rank]), torch.arange(4)
        for axis in ("shard", "replicate"):
            gathered = fshard.all_gather(gathered, mesh, axis)
        for axis in ("replicate", "shard"):
            part = fshard.reduce_scatter(part, mesh, axis)
        assert (gathered.tolist(), part.tolist()) == ([0, 1, 2, 3], [4 * rank])

    simulated(run, shard=2, replicate=2)
