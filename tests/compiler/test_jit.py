"""`fshard.jit`: what functions it takes, when it traces, what it gives away, what it refuses, what a graph holds."""

import gc
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch.nn.functional as F
from support.closed import MORE, double_backward
from support.closed import loss as plain_loss
from support.closed import params as closed_params
from support.models import STRATEGIES, Pair, rand, same_bits
from support.steps import QUIET, alike, apart, batch, loss, params, rank_of, start
from support.wires import WIRES
from support.worlds import simulated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fshard
from fshard import DynamicLossScale, gather_params, optim, tree
from fshard.compiler.trace import TraceError
from fshard.core.storage import as_bytes
from fshard.core.tracing import is_tracing

pytestmark = pytest.mark.filterwarnings(QUIET)
eager = partial(fshard.jit, backend="eager", bucket=0)
aot = partial(fshard.jit, backend="aot_eager")


# --- other functions than steps ---

FUNCTIONS = {name: program for name, program in MORE.items() if program is not double_backward}


def sharded_loss(p: Any, x: Tensor) -> Tensor:
    """Gathering is a function like another."""
    return plain_loss(gather_params(p), x)


def derivatives(mesh: Any, names: list[str], backend: str, **strategy: Any) -> None:
    """Derivatives of a loss that gathers, jitted and not."""
    warnings.filterwarnings("ignore", ".*torch.jit.script")
    plan = fshard.make_plan(closed_params(), mesh, units=["w1", "w2"], **strategy)
    p, v = (fshard.shard_params(closed_params(seed), plan) for seed in (0, 10))
    x = rand(2, 6, seed=100 + rank_of(mesh))
    for name in names:
        run = partial(MORE[name], sharded_loss)
        assert apart(fshard.jit(run, backend=backend)(p, x, v), run(p, x, v)) <= 1e-10, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_of_a_loss_that_gathers(name):
    """A transform of torch.func would give other values in a graph than eagerly."""
    simple = name.startswith(("gradient", "directional", "per-sample"))
    simulated(partial(derivatives, names=[name], backend="aot_eager" if simple else "eager"))


def test_derivatives_by_inductor():
    """Inductor would compile some derivative wrongly."""

    def run(p: Any, x: Tensor, v: Any) -> Any:
        wanted = (
            "gradient: `grad`",
            "per-sample gradients: `vmap` of `grad`",
            "Hessian-vector product: `jvp` of `grad`",
        )
        return [MORE[name](sharded_loss, p, x, v) for name in wanted]

    p, v = (fshard.shard_params(q, fshard.make_plan(q)) for q in (closed_params(), closed_params(10)))
    args = p, rand(2, 6, seed=100), v
    assert apart(fshard.jit(run)(*args), run(*args)) <= 1e-10


def test_a_compilation_is_kept():
    """A second process would compile the same step again."""
    mesh = fshard.AbstractMesh(shard=2)

    def compiled() -> dict[str, int]:
        state = fshard.eval_shape(lambda whole: start(mesh, whole=whole)[0], params())
        torch._dynamo.utils.counters.clear()
        fshard.jit(start(mesh)[1], donate=True).lower(state, batch(0, 0)).compile()
        return dict(torch._dynamo.utils.counters["inductor"])

    first, second = compiled(), compiled()
    assert "fxgraph_cache_bypass" not in first
    assert second["fxgraph_cache_hit"] == 1


@pytest.mark.parametrize("make", [eager, aot])
def test_plain_trees(make):
    """`jit` would need a plan, or not take named tuples, None and keyword arguments."""

    def fn(pair: Pair, n: int, word: str, none: Any = None, *, scale: Tensor, flag: bool = False) -> Any:
        out = {"sum": pair.left * n + scale, "word": word + "!", "none": none, "flag": flag, "three": 3}
        return [Pair(pair.right, out), (), {"same": pair.left, "view": pair.left.view(1, 3)}]

    args = Pair(rand(3, seed=1), [rand(2, seed=2), None]), 3, "seven"
    for kw in ({}, {"flag": True}):
        found, expected = (f(*args, scale=torch.tensor(2.0), **kw) for f in (make(fn), fn))
        assert tree.flatten(found)[1] == tree.flatten(expected)[1]
        assert same_bits(found, expected)
    assert make(fn)(*args, scale=torch.tensor(2.0))[2]["same"] is args[0].left


def test_functions_without_tensors():
    """A function without tensors would fail to trace."""
    assert eager(lambda: 3)() == 3
    assert eager(lambda x: None)(torch.ones(2)) is None
    assert same_bits(aot(lambda: torch.arange(3))(), torch.arange(3))


def test_the_doors_of_a_plan():
    """`evaluate`, `value_and_grad`, `reduce_grads`, a collective or `shard_params` would differ in a graph."""

    def everything(p: Any, b: Any) -> Any:
        value, grads = fshard.value_and_grad(loss)(p, b)
        own = fshard.value_and_grad(loss, reduce=False)(p, b)[1]
        mesh = p.plan.live_mesh()
        sums = fshard.all_reduce(b["x"][:4], mesh, "shard"), fshard.all_gather(b["x"][:4], mesh, "shard")
        half = fshard.reduce_scatter(b["x"][:4], mesh, "shard"), fshard.all_to_all(b["x"][:4], mesh, "shard")
        half = *half, fshard.shift(b["x"][:4], mesh, "shard"), fshard.all_gather(b["x"][:4], mesh, "shard", dim=1)
        more = fshard.broadcast(b["x"][:4], mesh, "shard"), fshard.optim.global_norm(grads)
        return value, grads, fshard.reduce_grads(own), fshard.evaluate(loss)(p, b), gather_params(p), sums, half, more

    def law(mesh: Any) -> None:
        state, _ = start(mesh)
        expected = everything(state.params, batch(0, mesh.get_rank()))
        for make in (eager, aot):
            assert same_bits(make(everything)(state.params, batch(0, mesh.get_rank())), expected)

    simulated(law)


# --- when it traces ---


def counted() -> tuple[Callable[..., Any], list[int]]:
    """A function, and how often Python ran it."""
    runs: list[int] = []

    def fn(x: dict[str, Tensor], n: int = 2) -> dict[str, Tensor]:
        runs.append(1)
        return {k: n * v for k, v in x.items()}

    return fn, runs


def test_the_same_signature_is_traced_once():
    """Other values would be traced again, or another signature would run the old graph."""
    fn, runs = counted()
    fast = eager(fn)
    assert fast.explain() == "not traced yet"
    for i in range(3):
        assert same_bits(fast({"a": rand(2, 3, seed=i)}), {"a": 2 * rand(2, 3, seed=i)})
    assert (len(runs), fast.explain()) == (1, "traced for the first call")
    x = rand(2, 3, seed=1)
    others: list[tuple[tuple[Any, ...], str]] = [
        (({"a": rand(4, 3, seed=1)},), r"'0\.0\.a' was float64\[2, 3\].* is float64\[4, 3\]"),
        (({"a": x.float()},), r"'0\.0\.a' was float64.* is float32"),
        (({"a": rand(3, 2, seed=1).t()},), r"strides \[3, 1\].* strides \[1, 2\]"),
        (({"b": x},), "the structure"),
        (({"a": x}, 3), "the structure"),
    ]
    for number, (args, words) in enumerate(others, start=2):
        for _ in range(2):
            fast(*args)
        assert len(runs) == number
        assert re.search(words, fast.explain().splitlines()[-1])


def test_another_value_that_is_no_tensor_is_traced_again():
    """A graph of 1 would run for 1.0 or True."""
    fn, runs = counted()
    fast, x = eager(fn), {"a": rand(2, seed=1)}
    for n in (2, 3, 2.0, True, 1, 2, 3):
        assert same_bits(fast(x, n), {"a": n * x["a"]})
    assert len(runs) == 5
    assert "argument '0.1' was 2, is 3" in fast.explain()


def test_a_step_is_traced_once():
    """The second step would be traced again."""
    runs: list[int] = []

    def counting(p: Any, b: Any) -> Any:
        runs.append(1)
        return loss(p, b)

    for kw in ({"scale": DynamicLossScale()}, {"tx": optim.adamw(optim.schedules.warmup_cosine(0.1, 2, 8))}):
        state, step = start(None, loss_fn=counting, **kw)
        fast = eager(step)
        for i in range(3):
            state, _ = fast(state, batch(i, 0))
        assert fast.explain() == "traced for the first call"
    assert len(runs) == 2


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_lowering_needs_no_values(kind):
    """Meta and fake tensors could not be lowered, or their graph would not run on real ones."""
    state, step = start(None, optim.adamw(0.1))
    args = state, batch(0, 0)
    mode = FakeTensorMode()
    abstract = tree.map(lambda x: x.to("meta") if kind == "meta" else mode.from_tensor(x), args)
    lowered = eager(step).lower(*abstract)
    assert [n.target for n in lowered.graph.nodes] == [n.target for n in eager(step).lower(*args).graph.nodes]
    assert same_bits(lowered.compile("eager")(*args), eager(step)(*args))


def test_what_is_compiled_refuses_other_arguments():
    """A compiled function would run on other arguments, or not name the first that differs."""
    run = eager(lambda x: 2 * x).lower(rand(3, seed=1)).compile("eager")
    with pytest.raises(ValueError, match=r"compiled for other arguments: argument '0\.0' was float64\[3\]"):
        run(rand(4, seed=1))


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_of_cycles_waits_for_a_graph(is_enabled, fails):
    """It rests while a function is traced and compiled, and is afterwards as the user left it, also after an error."""
    seen = []

    def fn(x):
        seen.append(gc.isenabled())
        return {False: x}[fails]

    gc.enable() if is_enabled else gc.disable()
    try:
        aot(fn)(torch.ones(2))
    except TraceError:
        assert fails
    after = gc.isenabled()
    gc.enable()
    assert (seen, after) == ([False], is_enabled)


def test_a_mesh_is_let_go():
    """A jitted function would keep a mesh and its connections alive."""

    def law(mesh: Any) -> Any:
        state, step = start(mesh)
        eager(step)(state, batch(0, mesh.get_rank()))
        return weakref.ref(mesh)

    refs = simulated(law)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# --- what it refuses ---

OUTSIDE = torch.ones(3, requires_grad=True)


def uses_outside(x: Tensor) -> Tensor:
    """Finds a tensor elsewhere."""
    return x + OUTSIDE


def branches(x: Tensor) -> Tensor:
    """Looks at a value."""
    if x.sum() > 0:
        return x
    return -x


def reads(x: Tensor) -> Tensor:
    """Looks at a value."""
    return x * x.sum().item()


def counts(x: Tensor) -> Tensor:
    """Has a shape that depends on values."""
    return x[x > 0]


def writes(x: Tensor) -> Tensor:
    """Changes its argument."""
    return x.add_(1)


def where(fn: Callable[..., Any], line: int) -> str:
    """The place of a line of a function, as an error names it."""
    return re.escape(f"{__file__}:{fn.__code__.co_firstlineno + line} (")


REFUSED = [
    (branches, r"asks for the value of a tensor .* at " + where(branches, 2) + ".*torch.where or fshard.select"),
    (reads, r"asks for the value of a tensor .* at " + where(reads, 2)),
    (counts, where(counts, 2)),
    (
        uses_outside,
        r"a tensor that is not among its arguments \('OUTSIDE' of uses_outside\) at " + where(uses_outside, 2),
    ),
    (writes, r"changes its argument '0\.0' in place"),
]


@pytest.mark.parametrize(("fn", "words"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_what_cannot_be_a_graph(fn, words):
    """A function that a graph cannot hold would be compiled wrongly, or the error would not name the line."""
    for run in (fn, partial(fn), lambda x: fn(x)):
        with pytest.raises(TraceError, match=words):
            eager(run)(torch.ones(3))
    with pytest.raises(TraceError, match=words):
        simulated(lambda mesh: eager(fn)(torch.ones(3)))


def test_a_loss_that_cannot_be_a_graph():
    """The error would name a line of this library instead of the loss."""

    def bad(p: Any, b: Any) -> Any:
        return loss(p, b) if p["a"]["w"].sum() > 0 else None

    state, step = start(None, loss_fn=bad)
    with pytest.raises(TraceError, match=r"the value of a tensor.*" + where(bad, 1)):
        eager(step)(state, batch(0, 0))
    good = start(None)[1]
    assert same_bits(eager(good)(state, batch(0, 0)), good(state, batch(0, 0)))  # and leaves nothing behind
    outside = torch.ones((), requires_grad=True)
    with pytest.raises(TraceError, match=r"'outside' of .*lambda"):
        eager(start(None, loss_fn=lambda p, b: outside * loss(p, b).total)[1])(state, batch(0, 0))


def test_an_argument_of_a_tree_changed_in_place():
    """A write to an argument would be lost, or the error would not name its path."""

    def fn(x: Any, y: Any) -> Any:
        y["k"][1].mul_(2)
        return x

    with pytest.raises(TraceError, match=r"changes its argument '0\.1\.k\.1' in place"):
        eager(fn)(torch.ones(1), {"k": [torch.ones(1), torch.ones(1)]})


def test_errors_of_the_function_stay_what_they_are():
    """A ValueError or TypeError of the user's would come out as another error."""

    def fails(kind: type[Exception], x: Tensor) -> Tensor:
        raise kind("seven")

    for kind in (ValueError, TypeError):
        with pytest.raises(kind, match=r"^seven$"):
            eager(partial(fails, kind))(torch.ones(1))
    with pytest.raises(TraceError, match=where(fails, 1) + ".*ZeroDivisionError: seven"):
        eager(partial(fails, ZeroDivisionError))(torch.ones(1))


def test_a_step_for_gpus_where_there_is_none(monkeypatch):
    """The error would name an internal check of torch's, which a CUDA build makes without a GPU, and no way out."""

    def backward(*args: Any) -> Any:
        raise RuntimeError("hasPrimaryContext expects a valid device index, but got device_index=0")

    monkeypatch.setattr(torch.autograd, "grad", backward)
    with pytest.raises(TraceError, match=r"^jit: torch's backward .* none: lower .* or for AbstractMesh\(shard=...\)"):
        fshard.jit(lambda x: torch.autograd.grad(x.sum(), x)[0], backend="eager")(torch.ones(2))


# --- what of torch's it uses ---


def test_private_parts_of_torch():
    """A release of torch would change the private parts that tracing needs: fake tensors, modes, backends."""
    seen: list[bool] = []

    def fn(x: Tensor) -> Tensor:
        seen.append(is_tracing())
        return 2 * x

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        pass
    graph = make_fx(fn, tracing_mode="fake", record_stack_traces=True)(
        mode.from_tensor(torch.ones(2), static_shapes=True)
    )
    assert (seen, is_tracing()) == ([True], False)
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "call_function", "output"]
    assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    assert all(callable(torch._dynamo.lookup_backend(name)) for name in ("eager", "aot_eager", "inductor"))
    assert torch._inductor.config.triton.cudagraphs is False
    torch._dynamo.reset()
    opaque = torch._dynamo.nonstrict_trace(fn)
    counter = torch._dynamo.testing.CompileCounter()
    assert torch.compile(lambda x: opaque(x) + 1, backend=counter, fullgraph=True)(torch.ones(1)) == 3


def test_a_ticket_keeps_what_is_under_way():
    """A buffer would be freed while a collective still reads it."""
    ticket = torch.empty(1)
    thing = Counter()
    ticket.untyped_storage().under_way = thing
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert ticket.view(-1).untyped_storage().under_way is gone()
    del ticket
    gc.collect()
    assert gone() is None


# --- what a graph holds ---


def operators(mesh: Any, **kw: Any) -> list[tuple[str, str]]:
    """The nodes of a step's graph that are this library's: operator and unit."""
    state, step = start(mesh, **kw)
    nodes = eager(step).lower(state, batch(0, mesh.get_rank())).graph.nodes
    ours = [n for n in nodes if str(n.target).startswith("fshard.")]
    labels = [next((a for a in n.args if a in ("a", "c", "loss", "norm", "found_inf")), "") for n in ours]
    return [(str(n.target).split(".")[1], label) for n, label in zip(ours, labels, strict=True)]


@pytest.mark.parametrize("regather", [True, False])
def test_the_collectives_of_a_step(regather):
    """A unit would be gathered or reduced more than once, or more than a unit ahead."""
    for found in simulated(partial(operators, plan={"regather": regather})):
        counts = Counter(found)
        for unit in ("a", "c"):
            assert counts["reduce_scatter", unit] == 1
            # nothing is saved of the first one's leaves: its input asks for no gradient; and the last one's stay
            assert counts["all_gather", unit] == 1
        assert counts["all_reduce", "loss"] == counts["all_reduce", "norm"] == 1
        started = sum(n for (kind, _), n in counts.items() if kind in ("all_gather", "reduce_scatter", "all_reduce"))
        assert sum(n for (kind, _), n in counts.items() if kind == "wait") == started
        flying = 0
        for kind, _ in found:
            flying += {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1, "wait": -1}.get(kind, 0)
            assert 0 <= flying <= 3


def test_a_wire_travels_by_exchange():
    """With a wire in a graph, gradients would be sent unencoded."""
    kw = {"plan": {"grad_wire": WIRES["int8"]}, "whole": params(torch.float32)}

    def nodes(mesh: Any) -> Counter[str]:
        state, step = start(mesh, **kw)
        graph = eager(step).lower(state, batch(0, mesh.get_rank(), dtype=torch.float32)).graph
        return Counter(str(n.target) for n in graph.nodes)

    for counts in simulated(nodes):
        assert counts["fshard.exchange.default"] == 2
        assert counts["fshard.reduce_scatter.default"] == 0


def test_one_device_sends_nothing():
    """A step without a mesh would have a collective."""
    state, step = start(None)
    targets = [str(n.target) for n in eager(step).lower(state, batch(0, 0)).graph.nodes]
    assert not any("gather" in t or "reduce_scatter" in t or "all_reduce" in t for t in targets)


def test_a_graph_sends_what_the_eager_step_sends():
    """A graph would send other collectives or bytes than the eager step."""

    def law(mesh: Any) -> None:
        for kw in ({}, {"plan": {"regather": False}}, {"plan": STRATEGIES["zero1"]}, {"accumulate": 2}):
            state, step = start(mesh, **kw)
            fast = aot(step, bucket=0)
            fast(state, batch(0, mesh.get_rank()))
            sent = []
            for run in (step, fast):
                with fshard.collectives.tally() as records:
                    run(state, batch(0, mesh.get_rank()))
                sent.append(Counter(r for r in records if r.nbytes))
            assert sent[0] == sent[1]

    simulated(law)


def test_models_of_several_kinds():
    """Some kind of layer would have other bits in a graph than eagerly."""

    def net(p: Any, b: dict[str, Tensor]) -> fshard.Mean:
        x = F.embedding((b["x"].abs() * 3).long().clamp(max=6), p["e"])
        x = F.layer_norm(x, (4,), p["g"], p["b"])
        x = x + F.scaled_dot_product_attention(x, x, x)
        x = F.conv1d(x, p["k"], padding=1).relu()
        return fshard.Mean(F.cross_entropy(x[:, :, 0], b["x"].argmax(1), reduction="sum"), len(x))

    whole = {"e": rand(7, 4, seed=1), "g": rand(4, seed=2), "b": rand(4, seed=3), "k": rand(4, 4, 3, seed=4)}
    job = partial(alike, compiled=aot, loss_fn=net, whole=whole, plan={"units": ["e", "k"]})
    assert [bits for bits, _, _ in simulated(job)] == [True, True]


@pytest.mark.parametrize("stride", [0, 1, 7])
def test_bytes_of_one_element(stride):
    """Inductor gives a tensor of one element any stride: its bytes would be read from another place."""
    x = torch.ones(8).as_strided((1,), (stride,), 1)
    assert same_bits(as_bytes(x), torch.ones(1).view(torch.uint8))
    as_bytes(x).zero_()
    assert x == 0
