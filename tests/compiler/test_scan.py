"""A loop over equal units: eagerly the loop, and in a graph the graph of the loop, whose body is traced once."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import rand, same_bits
from support.steps import EXACT
from support.worlds import simulated
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.graph.dataflow import has_effect

D = 8
Body = Callable[..., Any]


def loop(body: Body, carry: Any, units: Any, xs: Any = None) -> tuple[Any, Any]:
    """What `fshard.scan` is, written by hand."""
    rows = [()] * len(units) if xs is None else [(x,) for x in xs.unbind()]
    ys, form = [], fshard.tree.flatten(carry)[1]
    for unit, row in zip(units, rows, strict=True):
        out = body(unit, carry, *row)
        carry, y = (out, None) if fshard.tree.flatten(out)[1] == form else out
        ys.append(y)
    return carry, fshard.tree.map(lambda *y: torch.stack(y), *ys)


class Twice(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return 2 x."""
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Read what was saved, too."""
        return 2 * grad + 0 * ctx.saved_tensors[0]


def dense(p: Any, h: Tensor) -> Tensor:
    """A layer, (n, D) to (n, D)."""
    return torch.tanh(h @ p["w"] + p["b"]) * p["g"]


def in_place(p: Any, h: Tensor) -> Tensor:
    """A body that writes to what it has made."""
    return h + dense(p, h).clone().mul_(2).add_(1)


def writes_carry(p: Any, h: Tensor) -> Tensor:
    """A body that writes to what it is given."""
    return h.mul_(1.5).add(dense(p, h.clone()))


def without_gradient(p: Any, h: Tensor) -> Tensor:
    """A body of which a part has no derivative."""
    with torch.no_grad():
        size = dense(p, h).abs().mean()
    return h + dense({**p, "b": p["b"].detach()}, h) / (1 + size)


def with_penalty(p: Any, h: Tensor) -> Tensor:
    """A body that differentiates."""
    x = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(dense(p, x).sum(), x, create_graph=True)
    return h + slope


def beside(p: Any, h: Tensor) -> Tensor:
    """A checkpoint that reads what was computed outside of it."""
    a = torch.sin(h) * 2
    return h + checkpoint(lambda p: torch.tanh(a @ p["w"]) * a, p, use_reentrant=False) + p["b"] + p["g"]


def attention(p: Any, h: Tensor) -> Tensor:
    """Attention and a layer norm."""
    q = (h @ p["w"]).view(1, 2, -1, D // 2)
    x = F.scaled_dot_product_attention(q, q, q).reshape(h.shape)
    return h + F.layer_norm(x, (D,), p["g"], p["b"])


def conjugated(p: Any, h: Tensor) -> Tensor:
    """Complex numbers."""
    return h + (torch.fft.ifft(torch.fft.fft(h).conj() * torch.fft.fft(dense(p, h)))).real * 0.1


# how often a trace calls a body for five units: as often as there are units, or for three of them
BODIES: dict[str, tuple[Body, int]] = {
    "dense": (lambda p, h: h + dense(p, h), 3),
    "dropout": (lambda p, h: F.dropout(h + F.dropout(dense(p, h), 0.3), 0.1) + torch.rand_like(h), 3),
    "checkpoint": (lambda p, h: checkpoint(lambda p, h: F.dropout(dense(p, h), 0.3), p, h, use_reentrant=False) + h, 3),
    "beside": (beside, 3),
    "custom": (lambda p, h: h + Twice.apply(dense(p, h)), 3),
    "in place": (in_place, 3),
    "detached": (without_gradient, 3),
    "penalty": (with_penalty, 3),
    "constant": (lambda p, h: h + dense(p, h) * torch.tensor([0.5] * D), 3),
    "twice": (lambda p, h: h + dense(p, h) @ p["w"].t(), 3),
    "view": (lambda p, h: (h + dense(p, h)).reshape(-1).view(h.shape), 3),
    "attention": (attention, 3),
    "conjugated": (conjugated, 3),
    "writes": (writes_carry, 6),
    "same": (lambda p, h: h, 6),
    "vmap": (lambda p, h: h + torch.func.vmap(lambda row: dense(p, row))(h), 5),
}


def pair(run: Body, body: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A carry of two tensors, and results of each unit; of both one part is never used."""

    def both(unit: Any, carry: tuple[Tensor, Tensor]) -> Any:
        h, total = body(unit, carry[0]), carry[1]
        return (h, total + h.square().sum()), {"sin": h.sin(), "cos": h.cos() + unit["b"], "norm": h.detach().norm()}

    (h, _), ys = run(both, (h, torch.zeros(())), units)
    return h + ys["sin"].sum(0) + ys["norm"].sum()


def rows(run: Body, body: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """Rows that have a gradient, and parameters that are read beside the units."""
    xs = torch.arange(len(units) * D, dtype=h.dtype).view(len(units), D) * p["shared"]["s"]
    made = torch.tanh(xs[0]) * p["shared"]["s"]
    return run(lambda unit, h, x: body(unit, h + made) * p["shared"]["s"] + x, h, units, xs)[0] * made


def twice_beside(run: Body, body: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """What is read beside the units gets two gradients of each."""
    s = p["shared"]["s"]
    return run(lambda unit, h: body(unit, h * s) + s, h, units)[0]


def nested(run: Body, body: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A scan in the body of a scan."""
    many = [{"b": 0.1 * n} for n in [1] * 4]
    return run(lambda unit, h: run(lambda few, h: body(unit, h + few["b"]), h, many)[0], h, units)[0]


def outside(run: Body, body: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """Units are read outside, too."""
    return run(body, h, units)[0] + sum(unit["w"].square().sum() for unit in units)


USES: dict[str, Body] = {
    "carry": lambda run, body, h, units, p: run(body, h, units)[0],
    "pair": pair,
    "rows": rows,
    "twice beside": twice_beside,
    "nested": nested,
    "outside": outside,
    "one result twice": lambda run, body, h, units, p: run(lambda u, h: (body(u, h),) * 2, h, units)[1].mean(0),
    "the carry before": lambda run, body, h, units, p: run(lambda u, h: (body(u, h), h), h, units)[1].mean(0),
    "in a checkpoint": lambda run, body, h, units, p: checkpoint(
        lambda h: run(body, h, units)[0], h, use_reentrant=False
    ),
    "several times": lambda run, body, h, units, p: run(body, run(body, h, units)[0], units)[0],
    "one unit": lambda run, body, h, units, p: run(body, h, [units[0]] * 5)[0],
    "no gradient": lambda run, body, h, units, p: h @ units[0]["w"] + run(body, h.detach(), units)[0].detach(),
}
PLANS: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "zero1": {"params_over": (), "grads_over": ()},
    "bf16": {"policy": "compute=bf16"},
    "frozen": {"frozen": ["blocks.*.b"]},
    "whole": {"whole": ["blocks.*.g"]},
    "parts": {"units": ["blocks.*.w", "blocks.*.b"]},
    "bucket": {"bucket": 1 << 20},
    "beside": {"units": ["blocks.*", "shared"]},
}
WAYS: dict[str, dict[str, Any]] = {"once": {}, "accumulate": {"accumulate": 2}, "clip": {"clip_norm": 0.1}}


def params(units: int = 5) -> Any:
    """An embedding, equal blocks, a leaf that all of them may read, and a head."""
    blocks = [{"w": rand(D, D, seed=n) / D, "b": rand(D, seed=n + 9), "g": rand(D, seed=n + 19)} for n in range(units)]
    return {"embed": rand(D, D, seed=0), "blocks": blocks, "shared": {"s": rand(D, seed=1)}, "head": rand(D, 3, seed=2)}


def loss_of(run: Body, body: Body, use: Body) -> Body:
    """A loss that runs over the blocks."""

    def loss(p: Any, x: Tensor) -> Tensor:
        h = (x.to(p["embed"].dtype) @ p["embed"]).sin()
        return (use(run, body, h, p["blocks"], p) @ p["head"]).float().square().mean()

    return loss


class Counted:
    """A body that counts its calls, in what no other call reads."""

    def __init__(self, body: Body):
        self.body, self.calls = body, 0

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        self.calls += 1
        return self.body(*args)


def lowered(mesh: Any, run: Body, body: Body, use: Body, plan: str, way: str) -> Any:
    """The graph of a training step."""
    whole = params()
    laid = fshard.make_plan(whole, mesh, **{"units": ["blocks.*"], **PLANS[plan]})
    state = fshard.init_state(fshard.shard_params(whole, laid), EXACT, seed=3)
    x = rand(*([2] * (way == "accumulate")), 4, D, seed=5)
    return fshard.jit(fshard.train_step(loss_of(run, body, use), EXACT, **WAYS[way])).lower(state, x)


def meaning(graph: fx.Graph) -> tuple[int, Counter[int]]:
    """What a graph returns, as a number of the expression of its inputs, and those of the nodes that write."""
    keys: dict[fx.Node, int] = {}
    inputs = itertools.count()
    for node in graph.nodes:
        args = fx.node.map_arg((node.args, node.kwargs), lambda read: f"n{keys[read]}")
        # constants have no value here, and inputs are told apart by their number
        what = next(inputs) if node.op == "placeholder" else "constant" if node.op == "get_attr" else str(node.target)
        # a sum of two has the same bits in either order; ranks compare the order of reads as a large number
        text = str(sorted(map(str, args[0])) if what == "aten.add.Tensor" else args)
        # a scan may copy a part of merged gathers once more
        if what == "fshard.parts.default":
            text = str(args[0][:2])
        elif node.args and str(getattr(node.args[0], "target", "")) == "fshard.parts.default":
            text = f"{args[0][0]} {node.args[0].args[2][node.args[1]]}"
        keys[node] = hash((node.op, what, re.sub(r"\b\d{6,10}\b", "reads", text)))
    return keys[node], Counter(key for node, key in keys.items() if node.op == "call_function" and has_effect(node))


CASES = [
    *((body, "carry", "full", "once") for body in BODIES),
    *((body, use, "full", "once") for use in USES for body in ("dense", "checkpoint")),
    *((body, use, plan, way) for plan in PLANS for way in WAYS for body in ("dropout", "checkpoint") for use in USES),
]


# The graph of a scan merges these gathers in other messages than the loop's, and gathers a unit or two once more.
OTHER_BUCKETS = {
    ("checkpoint", use, "bf16", way) for use in ("outside", "in a checkpoint", "several times") for way in WAYS
}


@pytest.mark.parametrize(("body", "use", "plan", "way"), [x for x in dict.fromkeys(CASES) if x not in OTHER_BUCKETS])
def test_a_graph_of_a_scan_is_that_of_the_loop(body: str, use: str, plan: str, way: str) -> None:
    """A step would compute something else under `jit`, or in another order, or send other messages."""
    mesh = fshard.AbstractMesh(shard=2)
    by_hand = lowered(mesh, loop, BODIES[body][0], USES[use], plan, way)
    called = Counted(BODIES[body][0])
    copied = lowered(mesh, fshard.scan, called, USES[use], plan, way)
    (result, effects), (expected, others) = meaning(copied.graph), meaning(by_hand.graph)
    assert result == expected
    assert copied.collectives() == by_hand.collectives()
    # a checkpoint around stops where it has what it needs: in the middle of a unit, or after it
    assert use == "in a checkpoint" or (effects, copied.flops()) == (others, by_hand.flops())
    # a generator's state, of 5056 bytes, is more than a layer here
    states = 2 * 5056 * (body in ("checkpoint", "dropout"))
    assert copied.memory().peak <= 1.02 * by_hand.memory().peak + states
    if (use, plan, way) == ("carry", "full", "once"):
        assert called.calls == BODIES[body][1]


STEPS = [
    ("dropout", "pair", "full", {}, EXACT),
    ("checkpoint", "rows", "frozen", {"clip_norm": 0.1}, optim.adamw(0.05)),
    ("penalty", "outside", "keep", {"accumulate": 2}, optim.sgd(0.1, momentum=0.9)),
    ("attention", "in a checkpoint", "bf16", {}, optim.adamw(0.05)),
    ("in place", "several times", "whole", {}, optim.muon(0.05)),
    ("checkpoint", "several times", "bf16", {"accumulate": 2}, optim.adamw(0.05)),
]


@pytest.mark.law
@pytest.mark.parametrize(("body", "use", "plan", "kw", "tx"), STEPS, ids=[step[0] for step in STEPS])
def test_steps_have_the_bits_of_the_loop(body: str, use: str, plan: str, kw: dict[str, Any], tx: Any) -> None:
    """Training would go another way: two donated steps, with other rows on each rank."""

    def job(mesh: Any, run: Body) -> Any:
        whole = params()
        laid = fshard.make_plan(whole, mesh, **{"units": ["blocks.*"], **PLANS[plan]})
        state = fshard.init_state(fshard.shard_params(whole, laid), tx, seed=3)
        loss = loss_of(run, BODIES[body][0], USES[use])
        step = fshard.jit(fshard.train_step(loss, tx, **kw), donate=True, backend="aot_eager")
        losses = []
        for n in range(2):
            x = rand(*([2] * ("accumulate" in kw)), 4, D, seed=10 * n + mesh.get_local_rank("shard"))
            state, metrics = step(state, x)
            losses.append(metrics["loss"].clone())
        return losses, fshard.gather_params(state.params)

    by_hand, copied = simulated(job, loop), simulated(job, fshard.scan)
    assert same_bits(copied, by_hand)


def test_eagerly_it_is_the_loop() -> None:
    """A program would depend on `jit`."""
    p, h = params(), rand(4, D, seed=5)
    for use in USES.values():
        results = []
        for run in (fshard.scan, loop):
            leaves = fshard.tree.map(lambda x: x.clone().requires_grad_(), p)
            torch.manual_seed(0)
            out = use(run, BODIES["dropout"][0], h * leaves["shared"]["s"], leaves["blocks"], leaves)
            grads = torch.autograd.grad(out.sum(), fshard.tree.leaves(leaves), allow_unused=True)
            results.append((out, [x for x in grads if x is not None]))
        assert same_bits(*results)


DERIVATIVES: dict[str, Body] = {
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (torch.ones_like(w),))[1],
    "hessian": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "vmap": lambda f: lambda w: torch.func.vmap(lambda k: f(w * k))(torch.arange(3.0, dtype=w.dtype)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_torch_func_are_those_of_the_loop(name: str) -> None:
    """A transform would see a node that it knows no rule of."""
    p, h = params(), rand(4, D, seed=5)

    def at(run: Body) -> Body:
        def f(w: Tensor) -> Tensor:
            units = [{**unit, "b": w * n} for n, unit in enumerate(p["blocks"])]
            return run(BODIES["dense"][0], h, units)[0].sin().sum()

        return f

    expected = DERIVATIVES[name](at(loop))(rand(D, seed=7))
    assert same_bits(DERIVATIVES[name](at(fshard.scan))(rand(D, seed=7)), expected)
    jitted = fshard.jit(DERIVATIVES[name](at(fshard.scan)), backend="aot_eager")(rand(D, seed=7))
    torch.testing.assert_close(jitted, expected, rtol=1e-12, atol=1e-12)


def test_hvp_and_torch_compile() -> None:
    """Neither takes the copies of a graph; values are those of the loop."""
    whole, x = params(), rand(4, D, seed=5)
    sharded = fshard.shard_params(whole, fshard.make_plan(whole, units=["blocks.*"]))
    results = []
    for run in (loop, fshard.scan):
        loss = loss_of(run, BODIES["dense"][0], USES["pair"])
        product = fshard.jit(fshard.hvp(loss), backend="aot_eager")(sharded, sharded, x)
        value = torch.compile(loss, backend="aot_eager")(whole, x)
        results.append([fshard.tree.leaves(product), value])
    assert same_bits(*results)


def test_units_that_differ_are_called() -> None:
    """A copy would have the numbers, shapes or dtypes of another unit."""
    body = Counted(lambda unit, c: (torch.tanh(c[0] @ unit["w"]) * unit["k"], c[1] + 1))
    units: list[dict[str, Any]] = [{"w": rand(D, D, seed=n), "k": 2.0 if n == 5 else 3.0} for n in range(9)]
    units[6]["w"] = units[6]["w"].t()

    def f(run: Body) -> Body:
        def doubled(unit: Any, x: Tensor) -> Tensor:
            return body(unit, (x, 0))[0]

        return lambda x, units: run(doubled, x, units)[0]

    expected = f(loop)(rand(4, D, seed=1), units)
    body.calls = 0
    assert same_bits(fshard.jit(f(fshard.scan), backend="eager")(rand(4, D, seed=1), units), expected)
    assert body.calls == 3 + 2
    # a number in the carry that changes is another one for each unit
    body.calls = 0
    counting = fshard.jit(lambda x, units: fshard.scan(body, (x, 0), units)[0][0], backend="eager")
    assert same_bits(counting(rand(4, D, seed=1), units[:5]), f(loop)(rand(4, D, seed=1), units[:5]))
    assert body.calls == 5 + 5  # the third is copied once; those of the loop, too


class Rounded(TorchDispatchMode):
    """Rounds what products return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it."""
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().to(out.dtype) if func is torch.ops.aten.mm.default else out


class Noisy(torch.autograd.Function):
    """A function whose derivative draws."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return noise."""
        return grad * torch.rand_like(grad)


def counter(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A body that counts, and keeps what it has made."""
    count, kept = [0], list[Tensor]()

    def body(unit: Any, h: Tensor) -> Tensor:
        count[0] += 1
        kept.append(h + count[0] * dense(unit, h))
        return kept[-1]

    return run(body, h, units)[0] + sum(kept)


def upstream(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A body that differentiates with respect to what its carry was made of."""

    def body(unit: Any, c: Tensor) -> tuple[Tensor, Tensor]:
        c = dense(unit, c) + h
        return c, torch.autograd.grad(c.square().sum(), h, retain_graph=True)[0].clone()

    c, ys = run(body, h, units)
    return c + ys.sum(0)


def hooked(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A hook that would see a part of the gradient alone."""
    w = p["shared"]["s"]

    def body(unit: Any, h: Tensor) -> Tensor:
        w.register_hook(lambda grad: grad / grad.norm())
        return h + dense(unit, h) * w

    return run(body, h, units)[0]


def enabled(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """Gradients are off outside, and on inside."""

    def body(unit: Any, h: Tensor) -> Tensor:
        with torch.enable_grad():
            return h + dense(unit, h)

    with torch.no_grad():
        return run(body, h, units)[0]


def rounded(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A mode of others around the scan."""
    with Rounded():
        return run(BODIES["dense"][0], h, units)[0]


def noisy(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A derivative that draws."""
    return run(lambda unit, h: Noisy.apply(h + dense(unit, h)), F.dropout(h, 0.2), units)[0]


def asking(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A body that asks whether its tensors were computed."""
    return run(lambda unit, h: h + dense(unit, h) * (2 if h.is_leaf else 3) + (h.grad_fn is None), h, units)[0]


def numbered(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """Units with numbers and keys that are equal, and not the same."""
    signs: list[Any] = [0.0, 0.0, 0.0, -0.0, 0.0]
    keys: list[Any] = [1, 1, 1, True, 1.0]
    extra = [{"s": sign, "k": {key: 2.0}} for sign, key in zip(signs, keys, strict=True)]

    def body(unit: Any, h: Tensor) -> Tensor:
        (key,) = unit[1]["k"]
        return torch.copysign(h, torch.full_like(h, unit[1]["s"])) + dense(unit[0], h) * (2 + isinstance(key, bool))

    return run(body, h, [*zip(units, extra, strict=True)])[0]


def tied(run: Body, h: Tensor, units: Any, p: Any) -> Tensor:
    """A unit that has a tensor twice, and a body that sees it."""
    twins = [{**unit, "w2": unit["w"]} for unit in units]
    return run(lambda unit, h: h + dense(unit, h) * (2 if unit["w2"] is unit["w"] else 3), h, twins)[0]


ODD: dict[str, Body] = {
    each.__name__: each for each in (counter, upstream, hooked, enabled, rounded, noisy, asking, numbered, tied)
}


@pytest.mark.parametrize("name", ODD)
def test_a_body_of_which_a_copy_would_be_another_is_called(name: str) -> None:
    """A step would have other values under `jit`, without a word."""
    mesh = fshard.AbstractMesh(shard=2)
    graphs = [
        lowered(mesh, run, dense, lambda run, body, h, units, p: ODD[name](run, h, units, p), "keep", "once").graph
        for run in (loop, fshard.scan)
    ]
    assert meaning(graphs[0]) == meaning(graphs[1])


CAPTURED = [rand(3, seed=n) for n in range(6)]


def test_captured_tensors() -> None:
    """A copy would read the tensors of another unit, or their values of the first call."""

    def f(x: Tensor) -> tuple[Any, ...]:
        inside = fshard.scan(lambda unit, x: torch.tanh(x * unit + CAPTURED[0]), x, CAPTURED)[0]
        rows = fshard.scan(lambda unit, x, row: (x * row, x + unit), x, CAPTURED, torch.stack(CAPTURED))
        return inside, rows

    step = fshard.jit(f, backend="eager")
    for _ in range(2):
        assert same_bits(step(rand(3, seed=9)), f(rand(3, seed=9)))
        CAPTURED[0].mul_(2)


def test_what_a_body_puts_somewhere_is_an_error_in_a_graph() -> None:
    """A graph would read a tensor of a trace that is over."""

    class Holder:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    def f(x: Tensor, units: Any) -> Tensor:
        holder = Holder()

        def body(unit: Any, x: Tensor) -> Tensor:
            holder.seen.append(x * unit)
            return holder.seen[-1]

        return fshard.scan(body, x, units)[0] + sum(holder.seen)

    units = [rand(3, seed=n) for n in range(5)]
    with pytest.raises(fshard.TraceError, match=r"the body of a scan put somewhere.*carry, y"):
        fshard.jit(f, backend="eager")(rand(3, seed=9), units)


def test_a_second_derivative_in_a_graph_is_an_error() -> None:
    """A derivative of the copy would lack what the copy does not know."""

    def f(x: Tensor, units: Any) -> Tensor:
        x = x.detach().requires_grad_()
        out = fshard.scan(lambda unit, x: torch.tanh(x * unit), x, units)[0]
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(slope.sum(), x)[0]

    with pytest.raises(fshard.TraceError, match=r"scan: create_graph=True around it.*write the loop"):
        fshard.jit(f, backend="eager")(rand(3, seed=9), [rand(3, seed=n) for n in range(5)])


UNITS = [torch.ones(2), torch.ones(2)]
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "body": (lambda: fshard.scan(torch.nn.Linear(2, 2), torch.ones(2), UNITS), TypeError, "scan: body="),
    "units": (lambda: fshard.scan(torch.mul, torch.ones(2), torch.ones(3, 2)), TypeError, r"a list of trees.*unbind"),
    "number of rows": (lambda: fshard.scan(torch.mul, torch.ones(2), UNITS, torch.ones(3)), ValueError, "2 rows"),
    "no rows": (lambda: fshard.scan(torch.mul, torch.ones(2), UNITS, {"a": 1}), TypeError, "xs 'a'"),
    "carry": (lambda: fshard.scan(lambda u, c: {"b": c["a"]}, {"a": UNITS[0]}, UNITS), TypeError, r"lacks \['a'\]"),
    "y": (lambda: fshard.scan(lambda u, c: (c, {"n": 1}), UNITS[0], UNITS), TypeError, "scan: y 'n'=1"),
    "shapes": (lambda: fshard.scan(lambda u, c: (torch.cat([c, u]), c), UNITS[0], UNITS), ValueError, "shapes"),
    "trees": (
        lambda: fshard.scan(lambda u, c: (c, [u] if u[0] else u), UNITS[0], [-u for u in UNITS] + [0 * UNITS[0]]),
        ValueError,
        "later unit",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments(name: str) -> None:
    """An error would come from somewhere inside, or not at all."""
    call, kind, words = ERRORS[name]
    with pytest.raises(kind, match=words):
        call()


def test_no_units_and_no_results() -> None:
    """A loop over nothing returns what it was given."""
    assert fshard.scan(torch.mul, UNITS[0], [])[1] is None
    assert fshard.scan(torch.mul, UNITS[0], UNITS)[1] is None
