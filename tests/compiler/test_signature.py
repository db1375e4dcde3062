"""What a graph depends on: each such thing changed between two calls of a jitted function gives the eager result."""

import gc
import random
import weakref
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models import NARROW, STRATEGIES, rand, same_bits
from support.steps import EXACT, batch, loss, params, rank_of, start
from support.worlds import simulated
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import DynamicLossScale, optim
from fshard.comm.mesh import MESHES, is_mesh
from fshard.compiler.signature import fixed
from fshard.compiler.trace import TraceError
from fshard.core import tree

eager = partial(fshard.jit, backend="eager")


# --- the mesh, and this rank's place on it ---


def steps(mesh: Any, run: Any, donate: bool, **kw: Any) -> Any:
    """Check that two steps of a jitted function, made elsewhere, have the eager bits; a weak reference to the mesh."""
    state, step = start(mesh, scale=DynamicLossScale(8.0, growth_interval=1), **kw)
    other = start(mesh, scale=DynamicLossScale(8.0, growth_interval=1), **kw)[0]
    for i in range(2):
        data = batch(i, rank_of(mesh))
        state, row = step(state, data)
        other, found = run(other, data)
        assert same_bits((other, found), (state, row))
        assert [part.mesh for part in tree.nodes(other.params, fshard.Sharded)] == [state.params.mesh]
    return None if mesh is None else weakref.ref(mesh)


@pytest.mark.parametrize("donate", [False, True])
def test_one_jitted_step_serves_all_ranks_and_worlds(donate):
    """One jitted step serves every rank and world, and keeps no mesh alive: otherwise a rank would run another's
    graph, or memory leak."""
    run = eager(start(None)[1], donate=donate)
    steps(None, run, donate)
    refs = [ref for size in (2, 3, 2) for ref in simulated(partial(steps, run=run, donate=donate), shard=size)]
    refs += simulated(partial(steps, run=run, donate=donate), shard=2, replicate=2)
    gc.collect()
    assert {ref() for ref in refs} == {None}
    assert run.explain().count("for another plan, or on another mesh") == 2 + 3 + 2 + 4


@pytest.mark.parametrize("partition", ["flat", "leaf"])
def test_the_mesh_of_a_state_without_tensors(partition):
    """A mesh held by a state without tensors is told apart: otherwise a graph would communicate on another mesh."""
    whole = {"a": rand(5, seed=1), "b": rand(3, seed=2)}
    shared: dict[int, Any] = {}

    def law(mesh: Any) -> Any:
        tx = fshard.zero(optim.sgd(0.1), mesh, partition, "local")
        grads = tree.map(lambda x: x * (1 + mesh.get_rank()), whole)
        state = tx.init(whole)
        run = shared.setdefault(0, eager(lambda g, s, p: tx.update(g, s, p)[0]))
        assert same_bits(run(grads, state, whole), tx.update(grads, state, whole)[0])

    for _ in range(2):
        simulated(law, shard=2)


def test_a_mesh_as_an_argument():
    """A mesh argument is neither taken for an equal one nor kept alive: otherwise a graph would send to the wrong
    ranks."""

    def total(mesh: Any, x: Tensor) -> Tensor:
        return fshard.all_reduce(x, mesh, "shard") + mesh.get_rank()

    run = eager(total)

    def law(mesh: Any) -> Any:
        x = torch.tensor(1.0 + mesh.get_rank())
        assert run(mesh, x) == total(mesh, x)
        return weakref.ref(mesh)

    refs = [ref for size in (2, 3) for ref in simulated(law, shard=size)]
    gc.collect()
    assert {ref() for ref in refs} == {None}


class EqualMesh(fshard.AbstractMesh):
    """A mesh that equals all others of its class, as torch's meshes of two process groups do."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualMesh)

    def __hash__(self) -> int:
        return 0


def test_equal_meshes_have_different_names():
    """Two equal meshes have different names in graphs: otherwise a graph would use a process group that is gone."""
    one, other = EqualMesh(shard=2), EqualMesh(shard=2)
    assert one == other
    assert len({MESHES.of(mesh) for mesh in (one, other)}) == 2
    assert MESHES.find(MESHES.of(other)) is other


# --- values that are no tensors, and bits of tensors ---


@dataclass(frozen=True)
class Rate:
    """A dataclass of the user's."""

    by: Any


NAN = float("nan")
VALUES = [0.0, -0.0, 1, 1.0, True, NAN, Rate(1), Rate(1.0), Rate(-0.0), Rate(0.0)]


def times(x: Tensor, by: Any) -> Tensor:
    """A product with a number."""
    return x * (by.by if isinstance(by, Rate) else by)


def test_numbers_that_are_equal_are_not_the_same():
    """0.0 and -0.0, 1 and True, and NaN get a graph each, once: otherwise a graph would use the wrong constant."""
    run, x = eager(times), torch.tensor([1, 2])
    for _ in range(2):
        for value in VALUES:
            assert same_bits(run(x, value), times(x, value)), value
    assert len(run.explain().splitlines()) == len(VALUES) == len({fixed(value) for value in VALUES})
    assert "was 0.0, is -0.0" in run.explain()
    assert fixed(complex(0, -0.0)) != fixed(complex(0, 0.0))


@pytest.mark.parametrize(
    "base", [int, float, complex, str, bytes, tuple, list, frozenset], ids=lambda base: base.__name__
)
def test_attributes_of_numbers_and_containers(base):
    """A graph would be run for an argument that is equal and has another attribute."""
    run, kind, x = eager(lambda x, n: x * n.rate), type("Own", (base,), {}), torch.ones(2)
    for rate in (2.0, 3.0, 2.0):
        number = kind()
        number.rate = rate
        assert same_bits(run(x, number), x * rate)
    assert len(run.explain().splitlines()) == 2


def test_an_empty_set_is_explained():
    """explain() names an argument that was an empty set: otherwise a user who asks why jit traced again would get an
    error."""
    run = eager(lambda x, names: x * len(names))
    run(torch.ones(2), frozenset())
    assert run(torch.ones(2), frozenset({"a"})).equal(torch.ones(2))
    assert "was an empty frozenset" in run.explain()


Z = torch.tensor([1 + 2j, 3 - 1j])
BITS = {"plain": Z, "conjugate": Z.conj(), "negative": Z.conj().imag, "real": Z.real, "matrix": rand(2, 3, seed=1).mH}


@pytest.mark.parametrize(("first", "second"), [*product(BITS, BITS)])
def test_conjugate_and_negative_bits(first, second):
    """Tensors with conjugate or negative bits get graphs of their own: otherwise complex values would have wrong
    signs."""

    def parts(x: Tensor) -> list[Tensor]:
        return [torch.view_as_real(x) if x.is_complex() else x.clone(), 2 * x, x]

    run = eager(parts)
    for name in (first, second):
        x = BITS[name]
        assert same_bits(run(x), [part.resolve_conj().resolve_neg() for part in parts(x.resolve_conj())])


# --- torch's global state ---


@contextmanager
def setting(get: Any, set_: Any, value: Any) -> Any:
    """Set a global of torch inside the block, and restore it."""
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def mixed(x: Tensor) -> Any:
    """A result that depends on autocast, default dtype and device, grad mode, determinism and matmul precision."""
    product = x @ x
    with torch.autocast("cpu", enabled=False):
        exact = x @ x
    flags = [
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
    ]
    return product, exact, torch.ones(2) * 3, torch.full((2,), 0.5), [str(f) for f in flags]


def _kernel() -> AbstractContextManager[Any]:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


STATES: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu"),
    "autocast ": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": lambda: torch.device("meta"),
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "matmul precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "attention": _kernel,
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_of_torch_is_traced_again(name):
    """Another global state of torch is traced again: otherwise autocast or no_grad would be ignored in a graph."""
    x = rand(3, 3, seed=1, dtype=torch.float32)
    torch.set_float32_matmul_precision("highest")  # says what else is only meant
    for order in ((nullcontext, STATES[name]), (STATES[name], nullcontext)):
        run = eager(mixed)
        for state in (*order, *order):
            with state():
                found, expected = run(x), mixed(x)
            kinds = [[(t.dtype, t.device) for t in tree.leaves(tensors[:4])] for tensors in (found, expected)]
            assert kinds[0] == kinds[1]
            assert same_bits(found[:2], expected[:2])
            assert found[4] == expected[4]
        _, again = run.explain().splitlines()
        words = name.strip() if name != "inference mode" else "grad mode"  # which inference mode turns off
        assert again.startswith(f"traced again: torch's {words} was")


def test_what_is_compiled_refuses_another_state_or_mesh():
    """A compiled function refuses another global state or mesh: otherwise it would compute for the old one."""
    run = eager(mixed).lower(torch.ones(2, 2)).compile("eager")
    with torch.autocast("cpu"), pytest.raises(ValueError, match="compiled for other arguments: torch's autocast was"):
        run(torch.ones(2, 2))
    mesh, other = fshard.AbstractMesh(shard=2), fshard.AbstractMesh(shard=2, rank=1)
    states = [fshard.eval_shape(lambda p, m=m: start(m, whole=p)[0], params()) for m in (mesh, other)]
    data = batch(0, 0)
    compiled = eager(start(None)[1]).lower(states[0], data).compile("eager")
    with pytest.raises(ValueError, match="the mesh that the arguments lie on is another one"):
        compiled(states[1], data)


# --- what functions read elsewhere ---

FACTOR = 2.0


def of_the_module(x: Tensor) -> Tensor:
    """A function that reads a global of this module."""
    return x * FACTOR


def test_variables_that_change():
    """A changed variable of a closure, a module or a called function is seen: otherwise a graph would use the old
    value."""
    global FACTOR
    by, inner, x = 2.0, of_the_module, rand(3, seed=1)

    def scaled(x: Tensor) -> Tensor:
        return by * inner(x) if by else x

    runs = [eager(fn) for fn in (scaled, partial(scaled), lambda x: scaled(x))]
    for by, FACTOR, inner in product((2.0, 0.0, -0.0, None, 3), (1.0, 5.0), (of_the_module, torch.sin)):  # noqa: B007
        for run in runs:
            assert same_bits(run(x), scaled(x))
    assert "'by' of" in runs[0].explain()
    FACTOR = 2.0


def test_a_loss_that_reads_a_variable():
    """A jitted step sees a changed variable of the loss: otherwise a new weight would have no effect on training."""
    weight = 1.0

    def weighted(p: Any, b: Any) -> fshard.Mean:
        mean = loss(p, b)
        return fshard.Mean(weight * mean.total, mean.count)

    state, step = start(None, loss_fn=weighted, clip_norm=0.5)
    run = eager(step)
    for weight in (1.0, 2.0, 1.0):  # noqa: B007
        assert same_bits(run(state, batch(0, 0)), step(state, batch(0, 0)))
    assert "'weight' of" in run.explain()


def by_default(x: Tensor, by: float = 2.0, *, plus: float = 1.0) -> Tensor:
    """A function that reads the defaults of its parameters."""
    return x * by + plus


def test_defaults_that_change():
    """Changed defaults are seen, of tensors, too: otherwise a graph would use the old default."""
    x = rand(3, seed=1)
    runs = [eager(fn) for fn in (by_default, partial(by_default), lambda x: by_default(x))]
    try:
        for by, plus in product((2.0, 0.0, -0.0, 3), (1.0, 5.0)):
            by_default.__defaults__, by_default.__kwdefaults__ = (by,), {"plus": plus}
            for run in runs:
                assert same_bits(run(x), by_default(x))
    finally:
        by_default.__defaults__, by_default.__kwdefaults__ = (2.0,), {"plus": 1.0}
    assert "a default of by_default changed" in runs[0].explain()

    def with_tensor(x: Tensor, by: Tensor = x) -> Tensor:
        return x * by

    run = eager(with_tensor)
    for default in (x, rand(3, seed=2), rand(1, seed=3)):
        with_tensor.__defaults__ = (default,)
        assert same_bits(run(x), x * default)


class Scaled(torch.autograd.Function):
    """Reads globals in the forward and in the backward."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * FACTOR

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * FACTOR * SLOPE


SLOPE = 1.0


def test_variables_of_an_autograd_function():
    """Globals read by an autograd.Function are seen when they change: otherwise gradients would use old values."""
    global FACTOR, SLOPE
    run, x = eager(torch.func.grad_and_value(lambda x: Scaled.apply(x).sum())), rand(3, seed=1)
    for FACTOR, SLOPE in product((2.0, 5.0), (1.0, -1.0)):
        assert same_bits(run(x), (torch.full_like(x, FACTOR * SLOPE), (x * FACTOR).sum()))
    FACTOR, SLOPE = 2.0, 1.0


def test_a_function_that_counts_its_traces_is_traced_once():
    """A variable that tracing itself changes is not compared: otherwise such a function would be traced on every
    call."""
    runs = 0

    def counting(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return 2 * x

    run = eager(counting)
    for _ in range(3):
        run(torch.ones(2))
    assert runs == 1


# --- what is refused ---


def data_in_place(x: Tensor) -> Tensor:
    """Writes to `.data`, which raises no version counter."""
    x.data.add_(1)
    return x


def data_assigned(x: Tensor) -> Tensor:
    """Assigns another tensor to `.data` of the argument."""
    x.data = x.data + 1
    return 2 * x


def in_a_list(x: Tensor) -> Tensor:
    """Writes by an operator that takes lists of tensors."""
    torch._foreach_mul_([x, x.clone()], 2)
    return x


def backward(x: Tensor) -> Tensor:
    """Leaves a gradient in `.grad` of the argument."""
    y = x.detach().requires_grad_()
    x.requires_grad_()
    (x * y).sum().backward()
    return y.grad


def seeded(x: Tensor) -> Tensor:
    """Sets the seed of the global generator."""
    torch.manual_seed(0)
    return x + torch.rand(3)


def drawn(x: Tensor) -> Tensor:
    """Chooses by Python's random numbers."""
    return x if random.random() < 0.5 else 2 * x


def put_back(x: Tensor) -> Tensor:
    """Draws, puts the generator back, and draws the same numbers again."""
    with torch.random.fork_rng([]):
        x = x + torch.rand(3)
    return x + torch.rand(3)


def put_back_last(x: Tensor) -> Tensor:
    """Draws and puts the generator back, so that the next call draws the same numbers."""
    with torch.random.fork_rng([]):
        return x + torch.rand(3)


def state_set(x: Tensor) -> Tensor:
    """Sets the generator's state back and draws the same numbers again."""
    state = torch.get_rng_state()
    y = x + torch.rand(3)
    torch.set_rng_state(state)
    return y - torch.rand(3)


def dropout_again(x: Tensor) -> Tensor:
    """Recomputes dropout in the backward, where no state says what was dropped."""
    y = x.clone().requires_grad_()
    return torch.autograd.grad(checkpoint(lambda z: F.dropout(z).sin().sum(), y, use_reentrant=False), y)[0]


def of_an_embedding(x: Tensor) -> Tensor:
    """A sparse gradient."""
    w = torch.outer(x, x).requires_grad_()
    return torch.autograd.grad(F.embedding(torch.zeros(2, dtype=torch.long), w, sparse=True).sum(), w)[0].to_dense()


OWN: list[Any] = [
    lambda x, g: x + torch.rand(3, generator=g),
    lambda x, g: x + torch.randn(3, generator=g),
    lambda x, g: x + torch.randint(5, (3,), generator=g),
    lambda x, g: x[torch.randperm(3, generator=g)],
    lambda x, g: torch.bernoulli(x / 2, generator=g),
    lambda x, g: x[torch.multinomial(x, 3, generator=g)],
    lambda x, g: torch.normal(x, 1.0, generator=g),
    lambda x, g: torch.poisson(x, generator=g),
    lambda x, g: torch.empty(3).uniform_(generator=g) + x,
    lambda x, g: torch.func.vmap(lambda y: y + torch.rand((), generator=g), randomness="different")(x),
]


@pytest.mark.parametrize("draw", OWN)
def test_a_generator_of_its_own(draw):
    """A generator made or passed by the user is an error that names the line; without it a graph would repeat one
    draw."""
    words = r"with a generator of its own at .*test_signature\.py:\d+: .*from the state's seed"
    with pytest.raises(TraceError, match=words):
        eager(lambda x: draw(x, torch.Generator().manual_seed(3)))(torch.ones(3))
    with pytest.raises(TraceError, match=words):
        eager(draw)(torch.ones(3), torch.Generator())


class Holder:
    """An object that draws from a generator in an attribute."""

    def __init__(self, rng: Any, normal: str):
        self.parts = {"rng": [rng]}
        self.normal = normal

    def __call__(self, x: Tensor) -> Tensor:
        """Scaled by a number drawn."""
        return x * getattr(self.parts["rng"][0], self.normal)(0, 1)

    def method(self, x: Tensor) -> Tensor:
        """The same."""
        return self(x)


HOLDING: dict[str, Any] = {
    "a closure": lambda h: lambda x: h(x),
    "the object": lambda h: h,
    "a method": lambda h: h.method,
    "a partial": lambda h: partial(lambda h, x: h(x), h),
    "a default": lambda h: lambda x, h=h: h(x),
    "a list": lambda h: lambda x, hs=[h]: hs[0](x),
    "a nested function": lambda h: (lambda inner: lambda x: inner(x))(lambda x: h(x)),
    "a closure of an object": lambda h: (lambda it: lambda x: it.draw(x))(type("It", (), {"draw": staticmethod(h)})()),
    "an argument": lambda h: partial(lambda x, h: h(x), h=h),
}
RNGS = {
    "numpy.random.*Generator": lambda: Holder(np.random.default_rng(0), "normal"),
    "numpy.random.*RandomState": lambda: Holder(np.random.RandomState(0), "normal"),
    "random.Random": lambda: Holder(random.Random(0), "uniform"),
}


@pytest.mark.parametrize("rng", RNGS)
@pytest.mark.parametrize("place", HOLDING)
def test_generators_that_a_function_holds(place, rng):
    """A graph would repeat the numbers that the first call drew from a generator of numpy or Python."""
    with pytest.raises(TraceError, match=rf"draws from a {rng} that it holds.*or pass drawn numbers as arguments"):
        eager(HOLDING[place](RNGS[rng]()))(torch.ones(3))


def test_a_function_that_makes_a_generator():
    """A new generator beside one that is at rest would be taken for a draw from that."""
    rngs = [random.Random(0)]
    run = eager(lambda x: rngs.append(random.Random(1)) or 2 * x)
    assert same_bits(run(torch.ones(3)), 2 * torch.ones(3))


def test_generators_that_a_loss_holds_and_those_that_are_at_rest():
    """A generator in a loss would be missed, or one that is not drawn from would be an error."""
    numpys = RNGS["numpy.random.*Generator"]()
    state, step = start(None, loss_fn=lambda p, b: loss(p, {**b, "gain": numpys(b["gain"])}))
    with pytest.raises(TraceError, match=r"draws from a numpy.* that it holds"):
        eager(step)(state, batch(0, 0))
    assert same_bits(eager(lambda x: 2 * x if numpys.parts else x)(torch.ones(3)), 2 * torch.ones(3))


REFUSED = [
    *((fn, r"puts back its state.*fork_rng.*from the state's seed") for fn in (put_back, put_back_last, state_set)),
    (dropout_again, r"checkpoint around what draws\) before aten.*test_signature\.py"),
    (of_an_embedding, r"sparse tensor at .*test_signature\.py:\d+.*use dense tensors, and sparse=False"),
    (lambda x: {"a": x, "b": [2, (y for y in x)]}, r"gives back a generator at 'b\.1'"),
    (lambda x: (x, lambda: x), r"gives back a function at '1'.*tensors, numbers, strings and None"),
    (lambda x: torch.func.vjp(torch.sin, x), r"gives back a function at '1'"),
    (lambda x: Rate(x), r"gives back a Rate, which a graph cannot make"),
    (data_in_place, r"changes its argument '0\.0' in place"),
    (data_assigned, r"assigns to \.data of its argument '0\.0'"),
    (in_a_list, r"changes its argument '0\.0' in place"),
    (backward, r"assigns to \.grad of its argument '0\.0'.*torch\.autograd\.grad"),
    (seeded, "seeds torch's generator"),
    (drawn, "draws Python's"),
]


@pytest.mark.parametrize(("fn", "words"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_a_graph_would_do_otherwise(fn, words):
    """What a graph cannot do is a TraceError without side effects; without it a graph would silently differ from
    eager code."""
    torch.manual_seed(0)
    x, python = torch.ones(3), random.getstate()
    try:
        for _ in range(2):
            with pytest.raises(TraceError, match=words):
                eager(fn)(x)
        assert same_bits(x, torch.ones(3))
        assert same_bits(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
    finally:
        random.setstate(python)
    assert same_bits(eager(lambda x: 2 * x)(x), 2 * x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:.*torch.jit.script")
def test_operators_of_functions():
    """torch.cond and flex_attention can be traced: otherwise losses with them could not be jitted."""
    x = rand(16, 16, seed=1, dtype=torch.float32)

    def branch(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    def attend(x: Tensor) -> Tensor:
        return flex_attention(x[None, None], x[None, None], x[None, None])

    for fn in (branch, attend):
        assert torch.allclose(eager(fn)(x), fn(x), atol=1e-6)


def test_what_is_no_tensor_comes_back():
    """Constants and passed objects come out of a jitted function: otherwise a result would lose what is no tensor."""
    rate = Rate(1)
    found = eager(lambda x, rate: [2 * x, 3, True, "s", None, x.dtype, x.device, rate])(torch.ones(2), rate)
    assert found[1:] == [3, True, "s", None, torch.float32, torch.device("cpu"), rate]


def test_arguments_that_cannot_be_compared():
    """An argument that cannot be compared is an error with its path; without it a graph would run for other values."""
    for bad, words in (
        (bytearray(b"x"), "is a bytearray"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo: make it dense"),
    ):
        with pytest.raises(TypeError, match=r"jit: argument '0\.1\.k' is a.*" + words.removeprefix("is a")):
            eager(lambda x, bad: x)(torch.ones(2), {"k": bad})


def test_inside_a_transform():
    """A jitted function inside a transform runs as it is written, a transform inside jit is compiled: otherwise
    derivatives would be wrong."""
    run, x = eager(lambda x: (x * x).sum()), torch.ones(2)
    run(x)
    assert same_bits(torch.func.grad(run)(x), 2 * x)
    assert same_bits(torch.func.vmap(run)(x), x * x)
    assert same_bits(torch.func.jvp(run, (x,), (x,)), ((x * x).sum(), (2 * x * x).sum()))
    assert same_bits(eager(torch.func.grad(lambda x: (x * x).sum()))(x), 2 * x)


@pytest.mark.parametrize("donate", [False, True])
def test_inside_another_jitted_function(donate):
    """A jitted function inside another becomes part of its graph: otherwise the inner call would run apart from the
    outer graph."""
    inner = eager(lambda t: (t[0] + 1, 2 * t[1]), donate=donate)

    def outer(x: Tensor) -> Any:
        return inner((x, 3 * x)), x

    assert same_bits(eager(outer)(torch.ones(2)), ((torch.full((2,), 2.0), torch.full((2,), 6.0)), torch.ones(2)))
    assert inner.explain() == "not traced yet"


def test_after_an_error_a_good_call():
    """An exception while tracing leaves nothing behind: otherwise the next good call would fail."""
    fail = [ValueError("seven"), ZeroDivisionError("eight")]

    def fn(x: Tensor) -> Tensor:
        y = 2 * x
        if fail:
            raise fail.pop()
        return y

    run = eager(fn)
    for kind in (TraceError, ValueError):
        with pytest.raises(kind):
            run(torch.ones(2))
    assert same_bits(run(torch.ones(2)), torch.full((2,), 2.0))
    assert run.explain() == "traced for the first call"


# --- all at once ---

WORLDS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
PASSES: list[dict[str, Any]] = [
    {"bucket": 10**6},
    {"in_flight": 10**6},
    {"bucket": 300, "in_flight": 500},
]


@pytest.mark.law
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("options", PASSES, ids=str)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_step_by_every_way(world, donate, options, name):
    """Every strategy, pass and donation has the eager step's bits: otherwise an option of jit would change training."""
    run = eager(start(None, EXACT)[1], donate=donate, **options)
    replicate, shard = world
    simulated(partial(steps, run=run, donate=donate, plan=STRATEGIES[name]), replicate=replicate, shard=shard)


class AnswersAll:
    """An object with every attribute, as a mock or a config of defaults."""

    def __getattr__(self, name: str) -> Any:
        return name


def test_an_object_with_every_attribute_is_no_mesh() -> None:
    """Its axes would be asked for."""
    config = AnswersAll()
    assert same_bits(eager(lambda x: x * len(config.name))(torch.ones(2)), torch.full((2,), 4.0))
    assert not is_mesh(config)
