"""Batches that choose what a rank computes: all ranks call the same collectives, with the gradients of one device."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from support.steps import apart
from support.worlds import between_hosts, gloo, simulated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.core import tree
from fshard.grad.grad import _check_differentiable

UNITS = ["a", "b", "c", "d"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "keep": {"regather": False},
    "ahead": {"prefetch": 2},
    "zero2": {"params_over": ()},
    "ddp": {"params_over": (), "grads_over": (), "state_over": ()},
    "a unit is whole": {"whole": ["b.*"]},
    "a unit is whole, keep": {"whole": ["b.*"], "regather": False},
    "a unit is frozen": {"frozen": ["c.*"]},
}
WAYS: dict[str, tuple[dict[str, Any], int]] = {  # how a step is built, and the losses of a rank that it averages
    "step": ({}, 1),
    "tree": ({"reduction": "tree"}, 2),
    "accumulate": ({"accumulate": 2}, 2),
    "reduced once": ({"accumulate": 2, "reduce_once": True}, 2),
    "kept": ({"accumulate": 2, "keep_gathered": True}, 2),
    "in backward": ({"in_backward": True, "donate": True}, 1),
}


def again(h: Tensor, unit: Any, other: Any) -> Tensor:
    """Checkpoints inside another one, which reads a unit of its own last."""
    for read in (other, unit):
        h = checkpoint(lambda h, read=read: torch.tanh(h @ read()["w"]), h, use_reentrant=False)
    return h + other()["b"]


CHECKPOINTS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "checkpoint": lambda h, unit, other: torch.tanh(h @ unit()["w"] + unit()["b"]),
    "checkpoint of two": lambda h, unit, other: torch.tanh(h @ unit()["w"] + other()["b"]) @ other()["w"] + unit()["b"],
    "nested": again,
}


class Op:
    """One line of a program: what it does with a unit, and on whose batches it is computed and counted."""

    def __init__(self, draw: random.Random):
        self.what = draw.choice(["layer", "layer", "shift", "product", "side", "frozen input", *CHECKPOINTS])
        self.unit, self.other = draw.choice(UNITS), draw.choice(UNITS)
        self.computed, self.counted = (draw.choice([True, True, None]) for _ in range(2))
        self.reads = {self.unit, self.other} if self.what in CHECKPOINTS else {self.unit}

    def run(self, p: Any, h: Tensor, total: Tensor, chosen: bool) -> tuple[Tensor, Tensor]:
        """The hidden values and the loss after this line; `chosen` is what the batch says."""
        if block := CHECKPOINTS.get(self.what):  # computed by all ranks, which read its units there
            out = checkpoint(block, h, lambda: p[self.unit], lambda: p[self.other], use_reentrant=False)
            return out if self.counted or chosen else h, total
        w, b = p[self.unit]["w"], p[self.unit]["b"]
        if not (self.computed or chosen):
            return h, total
        if self.what == "product":  # autograd saves no place of the unit
            return h, total + (h.detach() * b).sum() * (self.counted or chosen)
        if self.what in ("side", "frozen input"):  # computed by all ranks, perhaps counted by some
            side = torch.sin((h.detach() if "frozen" in self.what else h) @ w).sum()
            return h, total + side if self.counted or chosen else total
        return (h + b if self.what == "shift" else torch.tanh(h @ w + b)), total


def program(seed: int, early: bool, lazy: list[str]) -> Callable[[Any, Any], Tensor]:
    """A loss that reads all units at its beginning, or each where it is used; those of `lazy` only if they are used."""
    draw = random.Random(seed)
    ops = [Op(draw) for _ in range(7)]

    def loss(p: Any, batch: Any) -> Tensor:
        chosen = bool(batch["chosen"].any())
        h, total = torch.tanh(batch["x"] @ p["first"]), torch.zeros((), dtype=torch.float64)
        read = {name: dict(p[name]) for name in UNITS} if early else {}
        for op in ops:
            if not op.reads <= {*lazy} or op.computed or chosen:
                h, total = op.run(read or p, h, total, chosen)
        return total + h.sum()

    return loss


def params_of(seed: int) -> Any:
    """A first leaf, and units of two leaves, whose sizes no number of ranks divides."""
    generator = torch.Generator().manual_seed(seed)
    new = partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"first": new(3, 3), **{name: {"w": new(3, 3), "b": new(3)} for name in UNITS}}


def batches(seed: int, ranks: int) -> list[Any]:
    """Two rows for each rank, of which each chooses for itself."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed + 1)
    xs = torch.randn(ranks, 2, 3, generator=generator, dtype=torch.float64)
    return [{"x": x, "chosen": torch.tensor([draw.random() < 0.5] * 2)} for x in xs]


def trained(mesh: Any, seeds: list[int], strategy: str, way: str) -> None:
    """Two steps of every program are those of plain torch on all batches."""
    how, num = WAYS[way]
    ranks, rank = 1 if mesh is None else mesh.size(), 0 if mesh is None else mesh.get_rank()
    whole = UNITS if STRATEGIES[strategy].get("params_over") == () else ["b"] * ("whole" in STRATEGIES[strategy])
    for seed in seeds:
        loss = program(seed, early=seed % 2 == 0, lazy=whole * (seed % 3 == 0))
        params, plain = params_of(seed), tree.map(lambda x: x.clone().requires_grad_(), params_of(seed))
        plan = fshard.make_plan(params, mesh, units=UNITS, **STRATEGIES[strategy])
        state = fshard.init_state(fshard.shard_params(params, plan), optim.sgd(0.1, momentum=0.9))
        step = fshard.train_step(loss, optim.sgd(0.1, momentum=0.9), **how)
        reference = torch.optim.SGD(tree.leaves(plain), 0.1, momentum=0.9)
        for number in range(2):
            given = batches(seed + number, ranks)
            state, _ = step(state, given[rank])
            parts = [tree.map(lambda x, i=i: x.chunk(num)[i], batch) for batch in given for i in range(num)]
            reference.zero_grad()
            (sum(loss(plain, part) for part in parts) / len(parts)).backward()
            for x in tree.leaves(plain):
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
            for x in tree.leaves(plain["c"]) if "frozen" in STRATEGIES[strategy] else ():
                x.grad = torch.zeros_like(x)
            reference.step()
        wrong = apart(fshard.gather_params(state.params), tree.map(torch.detach, plain))
        assert wrong < 1e-12, (seed, strategy, way, wrong)


@pytest.mark.law
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("axes", [{"shard": 2}, {"shard": 2, "replicate": 2}])
def test_programs_that_batches_choose(axes: dict[str, int], strategy: str, way: str) -> None:
    """Ranks would start different collectives: an error, and between hosts wrong gradients without a word."""
    simulated(trained, [0, 1], strategy, way, **axes)


def all_trained(mesh: Any) -> None:
    """A program with every strategy and way of stepping."""
    for number, (strategy, way) in enumerate(product(STRATEGIES, WAYS)):
        trained(mesh, [number], strategy, way)


def test_programs_that_batches_choose_between_hosts() -> None:
    """Messages would be paired with others, and gradients be wrong without a word."""
    gloo(between_hosts, all_trained, shard=2)


NOTHING: dict[str, Callable[[Tensor], Tensor]] = {  # the total of a rank, or a micro-batch, that has no rows
    "a constant": lambda h: h.new_zeros(()),
    "a constant that requires a gradient": lambda h: h.new_zeros((), requires_grad=True),
    "detached": lambda h: 0 * h.detach().sum(),
}


def of_some_rows(p: Any, batch: Any, nothing: str, lazy: bool) -> fshard.Mean:
    """The mean over the rows that are used; with `lazy` no parameter is read for none."""
    x = batch["x"][batch["used"]]
    if lazy and not len(x):
        return fshard.Mean(NOTHING[nothing](x), 0)
    h = torch.tanh(x @ p["first"])
    for name in UNITS:
        h = torch.tanh(h @ p[name]["w"] + p[name]["b"])
    return fshard.Mean(h.square().sum() if len(x) else NOTHING[nothing](h), len(x))


def trained_on_some(mesh: Any, used: list[list[bool]], strategy: str, way: str, nothing: str) -> None:
    """A step where some ranks have no rows, and its gradients alone, are those of plain torch on all rows."""
    params, plain = params_of(0), tree.map(lambda x: x.clone().requires_grad_(), params_of(0))
    given = [{"x": 1 + x["x"], "used": torch.tensor(rows)} for x, rows in zip(batches(5, len(used)), used, strict=True)]
    lazy, rank = STRATEGIES[strategy].get("params_over") == (), mesh.get_rank()
    loss = partial(of_some_rows, nothing=nothing, lazy=lazy)
    everything = tree.map(lambda *xs: torch.cat(xs), *given)
    expected = loss(plain, everything)
    (expected.total / expected.count).backward()
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=UNITS, **STRATEGIES[strategy]))
    own = fshard.value_and_grad(loss, reduce=False)(sharded, given[rank])[1]
    wanted = tree.map(lambda x: x.grad, plain)
    if strategy == "a unit is frozen":
        wanted["c"] = tree.map(torch.zeros_like, wanted["c"])
    steps = fshard.train_step(loss, optim.sgd(1.0), **WAYS[way][0])
    state, metrics = steps(fshard.init_state(sharded, optim.sgd(1.0)), given[rank])
    new = fshard.gather_params(state.params)
    assert apart(tree.map(lambda x, y: x - y, params, new), wanted) < 1e-12
    assert metrics["loss"].item() == pytest.approx((expected.total / expected.count).item())
    found = fshard.gather_params(fshard.reduce_grads(own))
    assert all(apart(found[name], wanted[name]) < 1e-12 for name in found if found[name] is not None and name != "c")


SOME = {
    "the last": [[True, True], [False, False]],
    "the first": [[False, False], [True, True]],
    "half of the first": [[True, False], [True, True]],
    "all but one": [[False, False], [False, False], [True, True], [False, False]],
}


@pytest.mark.law
@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("used", SOME)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_use_nothing(strategy: str, way: str, used: str, nothing: str) -> None:
    """The error of a rank without rows alone would leave the others waiting."""
    simulated(trained_on_some, SOME[used], strategy, way, nothing, shard=len(SOME[used]))


def trained_on_some_or_refused(mesh: Any) -> None:
    """Every strategy where one rank has no row, and the error where none has."""
    for strategy, way in zip(STRATEGIES, [*WAYS, *WAYS], strict=False):
        trained_on_some(mesh, SOME["the last"], strategy, way, "a constant")
        plan = fshard.make_plan(params_of(0), mesh, units=UNITS, **STRATEGIES[strategy])
        state = fshard.init_state(fshard.shard_params(params_of(0), plan), optim.sgd(1.0))
        step = fshard.train_step(
            partial(of_some_rows, nothing="a constant", lazy=False), optim.sgd(1.0), **WAYS[way][0]
        )
        with pytest.raises((ValueError, RuntimeError), match="depends on no trainable parameter"):
            step(state, {"x": torch.ones(2, 3, dtype=torch.float64), "used": torch.tensor([False, False])})


def test_ranks_of_which_none_uses_anything() -> None:
    """Zeros for all of them would train nothing, without a word."""
    simulated(trained_on_some_or_refused)
    gloo(between_hosts, trained_on_some_or_refused)


def of_rows(p: Any, x: Tensor, nothing: str, reads: bool) -> fshard.Mean:
    """`of_some_rows` of a batch that has no other rows; with `reads` parameters are only read for none."""
    if reads and not len(x):
        _ = [p["first"], *(dict(p[name]) for name in UNITS)]
        return fshard.Mean(NOTHING[nothing](x), 0)
    return of_some_rows(p, {"x": x, "used": slice(None)}, nothing, lazy=False)


def jitted_on_some(mesh: Any, used: list[list[bool]], strategy: str, nothing: str, how: dict[str, Any]) -> None:
    """A step that is one graph, where some ranks have no rows, and its gradients alone, are those of plain torch."""
    params, plain = params_of(0), tree.map(lambda x: x.clone().requires_grad_(), params_of(0))
    rows = [1 + x["x"][torch.tensor(rows)] for x, rows in zip(batches(5, len(used)), used, strict=True)]
    expected = of_rows(plain, torch.cat(rows), nothing, reads=False)
    (expected.total / expected.count).backward()
    wanted = tree.map(lambda x: x.grad, plain)
    if strategy == "a unit is frozen":
        wanted["c"] = tree.map(torch.zeros_like, wanted["c"])
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=UNITS, **STRATEGIES[strategy]))
    loss, x = partial(of_rows, nothing=nothing, reads=how["reads"]), rows[mesh.get_rank()]
    options = {name: value for name, value in how.items() if name != "reads"}
    step = fshard.jit(fshard.train_step(loss, optim.sgd(1.0)), **options)
    new = fshard.gather_params(step(fshard.init_state(sharded, optim.sgd(1.0)), x)[0].params)
    assert apart(tree.map(lambda x, y: x - y, params, new), wanted) < 1e-12
    found = fshard.gather_params(fshard.jit(fshard.value_and_grad(loss), **options)(sharded, x)[1])
    assert all(apart(found[name], wanted[name]) < 1e-12 for name in found if name != "c")


EAGER = {"backend": "eager"}
GRAPHS: dict[str, dict[str, Any]] = {  # how ranks without rows read, and which collectives of a graph are merged
    "small units": EAGER | {"reads": False},
    "large units": EAGER | {"reads": False, "bucket": 1},
    "only read": EAGER | {"reads": True},
    "only read, large units": EAGER | {"reads": True, "bucket": 1},
    "inductor": {"reads": False},
}


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("used", ["the last", "the first", "all but one"])
@pytest.mark.parametrize("graph", [name for name in GRAPHS if name != "inductor"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_use_nothing_in_a_graph(strategy: str, graph: str, used: str, nothing: str) -> None:
    """The error of a rank while it traces alone would leave the others waiting, and so would a gather that is left
    out there. Where the others gather again what this rank has not saved, all raise."""
    again = GRAPHS[graph]["reads"] and strategy in ("full", "ahead", "a unit is whole", "a unit is frozen")
    with pytest.raises(RuntimeError, match="regather=False") if again else nullcontext():
        simulated(jitted_on_some, SOME[used], strategy, nothing, GRAPHS[graph], shard=len(SOME[used]))


def test_ranks_that_use_nothing_in_a_compiled_graph() -> None:
    """A compiler would leave out the gathers of which a rank reads nothing but the shape."""
    simulated(jitted_on_some, SOME["the last"], "keep", "a constant", GRAPHS["inductor"])


def jitted_on_some_or_refused(mesh: Any) -> None:
    """Graphs where one rank has no row, and the error where none has."""
    jitted_on_some(mesh, SOME["the last"], "full", "detached", GRAPHS["large units"])
    sharded = fshard.shard_params(params_of(0), fshard.make_plan(params_of(0), mesh, units=UNITS))
    fn = fshard.jit(fshard.value_and_grad(partial(of_rows, nothing="a constant", reads=False)), **EAGER)
    with pytest.raises(RuntimeError, match="depends on no trainable parameter"):
        fn(sharded, torch.ones(0, 3, dtype=torch.float64))


def test_ranks_of_which_none_uses_anything_in_a_graph() -> None:
    """As above: no rank knows while it traces."""
    simulated(jitted_on_some_or_refused)
    gloo(between_hosts, jitted_on_some_or_refused)


def test_a_graph_for_gpus_of_a_rank_that_uses_nothing() -> None:
    """Where no rank uses anything, an error on the device would end the processes; so it is one while tracing."""
    with FakeTensorMode(), pytest.raises(ValueError, match="depends on no trainable parameter"):
        _check_differentiable([torch.zeros((), device="cuda")], True, mock.Mock(), False, True)


def at_other_times(p: Any, x: Tensor, rank: int) -> Tensor:
    """Ranks save the same units, one of them later ones again."""
    x = torch.tanh(torch.tanh(x @ p["first"] @ p["a"]["w"]) @ p["b"]["w"])
    x = x + p["c"]["b"]  # of this unit nothing is saved
    again = [p["a"]["w"], p["b"]["w"]]
    for w in again if rank == 0 else ():
        x = torch.tanh(x @ w)
    return (x @ p["d"]["w"]).square().sum()


def in_a_checkpoint_too(p: Any, x: Tensor, rank: int) -> Tensor:
    """A unit is used in checkpoints, of which ranks count different ones, and outside."""
    x = torch.tanh(x @ p["first"])
    ways = [checkpoint(lambda h: torch.tanh(h @ p["b"]["w"]), x + n, use_reentrant=False) for n in range(2)]
    x = torch.tanh(ways[rank % 2] @ p["b"]["w"])
    return torch.tanh(x @ p["c"]["w"]).sum()


def a_whole_unit_last(p: Any, x: Tensor, rank: int) -> Tensor:
    """A unit that every rank has whole is read by some, between others and last."""
    for name in ("a", "b", "c", "d"):
        if name not in "bd" or rank:
            x = torch.tanh(x @ p[name]["w"])
    return x.sum()


def a_whole_unit_between(p: Any, x: Tensor, rank: int) -> Tensor:
    """A unit is read again in a checkpoint; before it some ranks read another one, which every rank has whole."""
    x = layer(p, "a", x)
    x = layer(p, "b", x) if rank else x
    return checkpoint(lambda x: layer(p, "a", x), x, use_reentrant=False).sum()


def layer(p: Any, name: str, x: Tensor) -> Tensor:
    """One layer."""
    return torch.tanh(x @ p[name]["w"] + p[name]["b"])


def shared_with_a_checkpoint(p: Any, x: Tensor, rank: int) -> Tensor:
    """A unit of a checkpoint of two, of which ranks take different results, is used outside, too."""

    def both(x: Tensor) -> Tensor:
        fshard.collectives.prefetch(p, "a")
        return [layer(p, "c", x), layer(p, "a", x)][rank % 2]

    return layer(p, "a", checkpoint(both, x, use_reentrant=False)).square().sum()


def depth_in_a_checkpoint(p: Any, x: Tensor, rank: int) -> Tensor:
    """Stochastic depth inside a checkpoint, whose last layer the head shares."""

    def both(x: Tensor) -> Tensor:
        x = x + layer(p, "a", x)
        more = layer(p, "b", x)
        return x + more if rank == 0 else x

    return layer(p, "b", checkpoint(both, x, use_reentrant=False)).square().sum()


def frozen_first(p: Any, x: Tensor, rank: int) -> Tensor:
    """A frozen unit is read first, in checkpoints, of which some ranks do not use the second."""
    for name in "ab":
        more = checkpoint(lambda x, name=name: layer(p, name, layer(p, "c", x)), x, use_reentrant=False)
        x = x + more if rank == 0 or name == "a" else x
    return x.square().sum()


def frozen_in_a_nested_one(p: Any, x: Tensor, rank: int) -> Tensor:
    """A frozen unit is read outside, and last in a checkpoint inside another one, which gathers it twice."""
    x, more = layer(p, "d", x), layer(p, "b", x)
    x = layer(p, "c", layer(p, "c", x + more if rank == 0 else x))
    inner = partial(checkpoint, lambda x: layer(p, "c", layer(p, "a", x)), use_reentrant=False)
    more = checkpoint(inner, x, use_reentrant=False)
    return (more if rank == 0 else x).square().sum()


def towers(p: Any, x: Tensor, rank: int) -> Tensor:
    """Two towers in a checkpoint, each of checkpoints, and two in another: ranks use one of each."""
    run = partial(checkpoint, use_reentrant=False)

    def deep(x: Tensor) -> Tensor:
        one = run(lambda x: layer(p, "a", x), x)
        other = run(lambda x: layer(p, "c", x), run(lambda x: layer(p, "b", x), x))
        return one if rank else other

    def flat(x: Tensor) -> Tensor:
        one, other = layer(p, "b", x), layer(p, "a", x)
        return one if rank else other

    return run(flat, run(deep, x)).square().sum()


PROGRAMS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "towers in checkpoints": (towers, {}),
    "shared with a checkpoint": (shared_with_a_checkpoint, {}),
    "depth in a checkpoint": (depth_in_a_checkpoint, {}),
    "frozen first": (frozen_first, {"frozen": "c"}),
    "frozen in a nested one": (frozen_in_a_nested_one, {"frozen": "c"}),
    "saved at other times": (at_other_times, {}),
    "in a checkpoint, too": (in_a_checkpoint_too, {}),
    "a whole unit between": (a_whole_unit_between, {"whole": ["b.*"]}),
    "a whole unit last": (a_whole_unit_last, {"whole": ["b.*", "d.*"]}),
}


def has_plain_gradients(mesh: Any, name: str, more: dict[str, Any]) -> None:
    """The gradients of a program are those of plain torch."""
    loss, strategy = PROGRAMS[name]
    params, ranks = params_of(3), range(mesh.size())
    plain = tree.map(lambda x: x.clone().requires_grad_(), params_of(3))
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, units=UNITS, **strategy, **more))
    xs = [torch.full((2, 3), 1.0 + rank, dtype=torch.float64) for rank in ranks]
    _, grads = fshard.value_and_grad(loss)(sharded, xs[mesh.get_rank()], mesh.get_rank())
    with mock.patch.object(fshard.collectives, "prefetch"):  # of plain leaves
        (sum(loss(plain, xs[rank], rank) for rank in ranks) / len(ranks)).backward()
    expected = tree.map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, plain)
    found = fshard.gather_params(grads)
    assert all(apart(found[name], expected[name]) < 1e-12 for name in found if name != strategy.get("frozen"))


@pytest.mark.parametrize("more", [{}, {"prefetch": 0}, {"prefetch": 2}, {"regather": False}])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_rank_saves_and_runs_again(name: str, more: dict[str, Any]) -> None:
    """Gathers of a backward would come between other reductions on each rank."""
    for shard in (2, 3):
        simulated(has_plain_gradients, name, more, shard=shard)


LOSSES: dict[str, Callable[..., Any]] = {
    "gradients": lambda loss, params, *args: fshard.value_and_grad(loss)(params, *args),
    "value": lambda loss, params, *args: fshard.evaluate(loss)(params, *args),
    "step": lambda loss, params, *args: fshard.train_step(loss, optim.sgd(0.1))(
        fshard.init_state(params, optim.sgd(0.1)), *args
    ),
}


def prefetched(p: Any, _: Any, rank: int) -> list[Tensor]:
    """All units, in one order, of which one rank has the last one sent first."""
    if rank:
        fshard.collectives.prefetch(p, "c")
    return [p[name] for name in "abc"]


READS: dict[str, Callable[[Any, Any, int], list[Tensor]]] = {  # of a loss that also takes a teacher of the same plan
    "other units": lambda p, t, rank: [p["ab"[rank]]],
    "another last unit": lambda p, t, rank: [p["a"], p["bc"[rank]]],
    "another tree first": lambda p, t, rank: [x["a"] for x in ((p, t), (t, p))[rank]],
    "another one sent first": prefetched,
}


def read_apart(mesh: Any, name: str, reads: str, ahead: int) -> None:
    """A loss that reads another unit on each rank; the units have one size."""
    params = {name: torch.ones(8, 8) for name in "abc"}
    plan = fshard.make_plan(params, mesh, units=["a", "b", "c"], prefetch=ahead)
    sharded, teacher = (fshard.shard_params(params, plan) for _ in range(2))

    def loss(p: Any, x: Tensor, t: Any) -> Tensor:
        for w in READS[reads](p, t, mesh.get_rank()):
            x = x @ w
        return x.sum()

    LOSSES[name](loss, sharded, torch.ones(2, 8), teacher)


def errors_of(mesh: Any, reads: str, ahead: int) -> list[str]:
    """The errors of `read_apart` on this rank."""
    texts = []
    for name in LOSSES:
        with pytest.raises(RuntimeError) as failure:
            read_apart(mesh, name, reads, ahead)
        texts.append(str(failure.value))
    return texts


@pytest.mark.parametrize(
    ("reads", "ahead"),
    [("other units", 0), ("another last unit", 1), ("another tree first", 0), ("another one sent first", 0)],
)
def test_units_that_not_all_ranks_gather_are_an_error(reads: str, ahead: int) -> None:
    """Ranks would take one unit for another of the same size, and train on it; or not be told what to do."""
    with pytest.raises(RuntimeError, match=r"an empty batch.*params_over=\(\)"):
        simulated(read_apart, "gradients", reads, ahead, shard=2)
    for texts in gloo(between_hosts, errors_of, reads, ahead, shard=2):
        for text in texts:
            assert "an empty batch" in text
            assert "params_over=()" in text
