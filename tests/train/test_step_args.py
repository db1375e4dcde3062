"""Arguments of a step besides state and batch; how a step is built; and which tensors a donated step gives away."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.models import STRATEGIES, rand, same_bits
from support.steps import QUIET, rank_of
from support.worlds import fates, gloo, simulated
from torch import Tensor

import fshard
from fshard import DonatedError, MismatchError, gather_params, optim, tree
from fshard.comm import primitives
from fshard.comm.ranks import tally
from fshard.testing import oracle, record
from fshard.train.describe import describe

pytestmark = pytest.mark.filterwarnings(QUIET)
ROWS, CLASSES = 6, 6  # as many classes as rows: weights must not be cut because they could be
TX = optim.sgd(0.1, momentum=0.9)


def model(seed: int = 0) -> dict[str, Any]:
    """Parameters of two units."""
    shapes = {"a": (4, 5), "c": (5, CLASSES)}
    return {name: {"w": rand(*shape, seed=seed + len(shape) + shape[0])} for name, shape in shapes.items()}


def sharded(mesh: Any, seed: int = 0, **plan: Any) -> fshard.Sharded:
    """The parameters of `model` on a mesh."""
    whole = model(seed)
    return fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a", "c"], **plan))


def data(step: int, rank: int) -> dict[str, Tensor]:
    """The rows of one rank."""
    seed = 10 * step + rank
    targets = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(seed))
    return {"x": rand(ROWS, 4, seed=seed), "y": targets}


def logits(params: Any, x: Tensor) -> Tensor:
    """The scores of every row."""
    return torch.tanh(x @ params["a"]["w"]) @ params["c"]["w"]


def total(params: Any, batch: Any, weights: Tensor, teacher: Any, temperature: float) -> Tensor:
    """Weighted cross entropy, the distance to a teacher, and a term that mixes a teacher's layer with the student's."""
    out = logits(params, batch["x"])
    cross = torch.nn.functional.cross_entropy(out, batch["y"], weights, reduction="sum")
    mixed = torch.tanh(batch["x"] @ params["a"]["w"]) @ teacher["c"]["w"]  # saved for the gradient of the student
    return cross + ((logits(teacher, batch["x"]) - out) / temperature).square().sum() + mixed.sin().sum()


def mean_loss(params: Any, batch: Any, *args: Any) -> fshard.Mean:
    """The total as a mean over rows."""
    return fshard.Mean(total(params, batch, *args), len(batch["x"]))


def sum_loss(params: Any, batch: Any, *args: Any) -> fshard.Sum:
    """The total as a sum over all rows."""
    return fshard.Sum(0.01 * total(params, batch, *args))


WEIGHTS = rand(CLASSES, seed=99).abs()


def train(mesh: Any, loss: Any, accumulate: int, how: Callable[[Any], Any] = lambda step: step, **plan: Any) -> Any:
    """Losses and parameters of two steps with class weights, a sharded teacher and a temperature."""
    state = fshard.init_state(sharded(mesh, **plan), TX)
    step, teacher, losses = how(fshard.train_step(loss, TX, accumulate=accumulate)), sharded(mesh, seed=50), []
    for i in range(2):
        state, metrics = step(state, data(i, rank_of(mesh)), WEIGHTS, teacher, 2.0)
        losses.append(metrics["loss"])
    return losses, gather_params(state.params)


def planned(loss: Any, num_ranks: int) -> Any:
    """The same two steps by the oracle, on whole tensors."""
    plain, losses = oracle(loss, TX), []
    state = plain.init(model())
    for i in range(2):
        state, metrics = plain.step(state, [data(i, rank) for rank in range(num_ranks)], WEIGHTS, model(50), 2.0)
        losses.append(metrics["loss"])
    return losses, state.params


def close(a: Any, b: Any) -> None:
    """Check that two trees differ in the last places at most."""
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [mean_loss, sum_loss])
@pytest.mark.parametrize("shard", [None, 1, 2, 3])
def test_arguments_go_to_every_micro_batch_uncut(loss, shard):
    """Extra arguments reach every micro-batch uncut: otherwise class weights or a teacher would be cut like rows."""
    expected = planned(loss, shard or 1)
    for accumulate in (1, 2, 3):
        job = partial(train, loss=loss, accumulate=accumulate)
        for found in [job(None)] if shard is None else simulated(job, shard=shard):
            close(found, expected)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not name.startswith("wide")])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_teacher_gathers_in_every_strategy(strategy, backend):
    """A sharded teacher works in every strategy, eagerly and jitted: otherwise distillation would work in some
    strategies only."""
    how = (lambda step: step) if backend is None else partial(fshard.jit, backend=backend)
    job = partial(train, loss=mean_loss, accumulate=2, how=how, **STRATEGIES[strategy])
    for found in simulated(job, shard=2):
        close(found, planned(mean_loss, 2))


def test_real_processes_and_torch_compile():
    """Steps with a teacher run in processes and under torch.compile: otherwise distillation would work in simulation
    alone."""
    job = partial(train, loss=mean_loss, accumulate=2)
    assert same_bits(gloo(job), simulated(job))
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager")
    close(train(None, mean_loss, 2, compiled), planned(mean_loss, 1))


def gathers(mesh: Any, fn: Callable[..., Any]) -> list[str]:
    """The units that a function of student and teacher gathers, in order; the names of the teacher's begin with t."""
    student = sharded(mesh)
    whole = {f"t{name}": leaf for name, leaf in model(50).items()}
    teacher = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["ta", "tc"]))
    with tally() as records:
        fn(student, teacher)
    return [record.label for record in records.select("all_gather")]


def read_both(params: Any, teacher: Any) -> Tensor:
    """A function that uses layers of the student and the teacher in turn."""
    h = torch.tanh(torch.ones(2, 4, dtype=torch.float64) @ params["a"]["w"])
    return (torch.tanh(h @ teacher["tc"]["w"]) @ params["c"]["w"].T @ teacher["ta"]["w"].T).sum()


def test_a_teacher_is_gathered_again_and_let_go():
    """A teacher's units are gathered one by one and freed: otherwise a teacher would need memory for all its
    parameters."""
    both = simulated(gathers, fshard.value_and_grad(read_both))[0]
    assert sorted(both) == ["a", "c", "ta", "tc", "tc"]  # the gradient of what is first needs no a
    assert sorted(simulated(gathers, fshard.evaluate(read_both))[0]) == ["a", "c", "ta", "tc"]


def test_no_gradient_goes_to_a_teacher():
    """A teacher gets no gradient, and may be a part of a `Sharded`: otherwise the student's gradients would be
    wrong."""

    def law(mesh: Any) -> None:
        student, teacher = sharded(mesh), sharded(None, seed=50)
        fn = fshard.value_and_grad(lambda p, t: (p["a"]["w"] * t["w"]).sum())
        _, grads = fn(student, teacher["a"])
        found = gather_params(grads)
        close(found, {"a": model(50)["a"], "c": {"w": torch.zeros(5, CLASSES, dtype=torch.float64)}})

    simulated(law)


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "0-d": ({"x": rand(4, 4, seed=1), "n": torch.tensor(3.0)}, ("'n'", "4 rows", "leaf 'x'", "a 0-d tensor")),
    "number": ({"x": rand(4, 4, seed=1), "n": 3.0}, ("'n'", "float, which is no tensor")),
    "array": ({"x": rand(4, 4, seed=1), "n": np.ones(4)}, ("'n'", "ndarray, which is no tensor")),
    "list": ({"x": rand(4, 4, seed=1), "n": [1.0, 2.0, 3.0, 4.0]}, ("'n.0'", "float, which is no tensor")),
    "class weights": ({"x": rand(4, 4, seed=1), "n": rand(3, seed=1)}, ("'n'", "expected 4 rows", "got 3")),
    "sharded": ({"x": rand(4, 4, seed=1), "n": sharded(None)}, ("'n'", "Sharded, which is no tensor")),
    "mixed": ([torch.tensor(1.0), 3], ("'0'", "the batch's rows", "a 0-d tensor")),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize(("accumulate", "reduction"), [(2, "exact"), (1, "tree"), (2, "tree")])
def test_what_has_not_the_batchs_rows_is_an_error(name, accumulate, reduction):
    """In a batch that is cut, a leaf without its rows is an error that names it; without it a leaf would be cut at the
    wrong places."""
    batch, words = WRONG[name]
    step = fshard.train_step(lambda p, b: p["a"]["w"].sum(), TX, accumulate=accumulate, reduction=reduction)
    with pytest.raises(ValueError, match="batch leaf") as caught:
        step(fshard.init_state(sharded(None), TX), batch)
    for word in (*words, "torch.as_tensor", "step(state, batch, *args)"):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_that_is_not_cut_is_any_tree(name, jitted):
    """Without micro-batches the loss gets the batch as it is: otherwise graphs and packed rows could not be trained."""
    batch, _ = WRONG[name]
    seen: list[Any] = []

    def loss_fn(params: Any, batch: Any) -> Tensor:
        seen.append([getattr(x, "shape", x) for x in fshard.tree.leaves(batch)])
        return params["a"]["w"].sum()

    step, state = fshard.train_step(loss_fn, TX), fshard.init_state(sharded(None), TX)
    if jitted and name == "array":  # a graph would keep its values
        with pytest.raises(TypeError, match=r"argument '0\.1\.n' is a ndarray.*: pass tensors"):
            fshard.jit(step, backend="eager")(state, batch)
        return
    (fshard.jit(step, backend="eager") if jitted else step)(state, batch)
    whole = gather_params(batch["n"]) if name == "sharded" else None
    expected = batch if whole is None else {**batch, "n": whole}
    assert seen == [[getattr(x, "shape", x) for x in fshard.tree.leaves(expected)]]


def graph_loss(params: Any, graph: Any) -> fshard.Mean:
    """Messages along edges, summed at their targets: nodes and edges have other numbers of rows."""
    x = torch.tanh(graph["nodes"] @ params["a"]["w"])
    sources, targets = graph["edges"].unbind(1)
    x = x + torch.zeros_like(x).index_add(0, targets, x[sources]) * graph["weight"]
    return fshard.Mean((x @ params["c"]["w"]).square().sum(), len(x))


def graph_of(rank: int) -> dict[str, Any]:
    """This rank's graph: ranks have other numbers of nodes and of edges, and rank 1 has no edges."""
    nodes = rand(3 + 2 * rank, 4, seed=rank)
    edges = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]][: 4 * (rank != 1)], dtype=torch.int64).reshape(-1, 2)
    return {"edges": edges, "nodes": nodes, "weight": 0.5 + rank}


@pytest.mark.parametrize("tx", [fshard.optim.sgd(0.1), TX], ids=["sgd", "adamw"])
def test_ragged_batches_are_those_of_one_device(tx):
    """Graphs of other numbers of nodes and edges on each rank are averaged by their counts, with a rank without edges:
    otherwise ragged data would need padding."""

    def trained(mesh: Any, ranks: int) -> Any:
        state, step = fshard.init_state(sharded(mesh), tx), fshard.train_step(ranks_loss, tx)
        rank, _ = fshard.rank_and_size(mesh)
        graphs = [graph_of(r) for r in (range(ranks) if mesh is None else [rank])]
        for _ in range(3):
            state, metrics = step(state, graphs)
        return fshard.gather_params(state.params), metrics["loss"], metrics["grad_norm"]

    def ranks_loss(params: Any, graphs: Any) -> fshard.Mean:
        losses = [graph_loss(params, graph) for graph in graphs]
        return fshard.Mean(sum(x.total for x in losses), sum(x.count for x in losses))

    for ranks in (1, 2, 3):
        for got in fshard.testing.simulate(partial(trained, ranks=ranks), shard=ranks):
            close(got, trained(None, ranks))


def test_a_rank_with_an_empty_leaf_is_no_empty_batch():
    """A plain loss counts the longest leaf: a graph without edges is a graph, and a batch without rows is an error."""
    step = fshard.train_step(lambda p, b: p["a"]["w"].sum() * (1 + sum(map(len, b))), TX)
    state = fshard.init_state(sharded(None), TX)
    step(state, [torch.zeros(0, 2), torch.zeros(3, 2)])
    with pytest.raises(ValueError, match=r"\[0\] rows"):
        step(state, [torch.zeros(0, 2), torch.zeros(0, 3)])


def test_a_sharded_in_a_batch_has_no_rows():
    """A rank's shard of a teacher is none of its rows: a batch without rows would pass for one that has them."""
    step = fshard.train_step(lambda p, b: p["a"]["w"].sum() + b["teacher"]["a"]["w"].sum(), TX)
    nothing = {"w": torch.zeros(0)}
    empty = fshard.shard_params(nothing, fshard.make_plan(nothing))
    assert step(fshard.init_state(sharded(None), TX), {"teacher": {"a": empty}, "n": 2})[1]["loss"].isfinite()
    with pytest.raises(ValueError, match=r"\[0\] rows"):
        step(fshard.init_state(sharded(None), TX), {"x": torch.zeros(0, 2), "teacher": sharded(None)})


UNLIKE: dict[str, Callable[[int], Any]] = {
    "number": lambda place: place,
    "text": lambda place: "ab"[place],
    "array": lambda place: np.full(3, place),
    "length": lambda place: torch.zeros(8 * place + 8),
    "empty": lambda place: [torch.ones(place), torch.ones(1 - place)],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_of_one_batch_are_told_of_what_differs(name):
    """Ranks along an axis that no batch is cut over must have the same batch: one would be lost in the mean."""

    def run(mesh: Any, same: bool) -> Any:
        place = 0 if same else mesh.get_local_rank("shard")
        step = fshard.train_step(lambda p, b: p["a"]["w"].sum() + b["teacher"]["a"]["w"].sum(), TX)
        batch = {"teacher": sharded(mesh), "x": UNLIKE[name](place)}  # whose shards differ, as they should
        return step(fshard.init_state(sharded(mesh, data="replicate"), TX), batch)[1]["loss"]

    simulated(run, True, shard=2, replicate=2)
    with pytest.raises(MismatchError, match=r"batch: leaf 'x(\.0)?': expected the same on all ranks along 'shard'"):
        simulated(run, False, shard=2, replicate=2)


def test_a_batch_of_nothing_is_taken_once():
    """A batch without rows is used once, and is an error with micro-batches: otherwise a sum would count it several
    times."""
    once = fshard.train_step(lambda p, b: b * p["a"]["w"].sum(), TX)(
        fshard.init_state(sharded(None), TX), torch.tensor(2.0)
    )
    assert once[1]["loss"] == 2 * model()["a"]["w"].sum()
    sums = fshard.train_step(lambda p, b: fshard.Sum(b * p["a"]["w"].sum()), TX, accumulate=2)
    with pytest.raises(ValueError, match=r"step\(state, batch, \*args\)"):
        sums(fshard.init_state(sharded(None), TX), torch.tensor(2.0))
    state = fshard.init_state(sharded(None), TX)
    fshard.train_step(lambda p, b: fshard.Sum(p["a"]["w"].sum()), TX)(state, None)
    with pytest.raises(ValueError, match="batch: expected rows to cut into 2 micro-batches"):
        fshard.train_step(lambda p, b: fshard.Sum(p["a"]["w"].sum()), TX, accumulate=2)(state, None)


# --- extra ---


def extra_loss(params: Any, extra: Any, batch: Any, gain: Any = 1.0) -> Any:
    """A loss whose extra has a running mean, a queue of the last two rows, and a count."""
    h = torch.tanh(batch["x"] @ params["a"]["w"])
    mean = 0.9 * extra["mean"] + 0.1 * h.mean(0)
    queue = torch.cat([extra["queue"], h.detach()])[-2:]
    loss = fshard.Mean(((h - extra["mean"]).square().sum() * params["c"]["w"].square().sum() * gain), len(h))
    return loss, {**extra, "mean": mean, "queue": queue, "count": extra["count"] + 1}


def start_extra() -> Any:
    """The first extra of `extra_loss`."""
    zeros = partial(torch.zeros, dtype=torch.float64)
    return {"mean": zeros(5), "queue": zeros(2, 5), "count": torch.tensor(0), "teacher": None}


def train_extra(mesh: Any, accumulate: int, donate: bool, how: Any = lambda step, donate: step, **kw: Any) -> Any:
    """Three steps with extra; where there is a loss scale, the second step overflows."""
    scale = kw.pop("scale", None)
    state = fshard.init_state(sharded(mesh), TX, scale, extra=start_extra())
    step = fshard.train_step(extra_loss, TX, accumulate=accumulate, with_extra=True, donate=donate, **kw)
    step, extras = how(step, donate=donate), []
    for i in range(3):
        gain = torch.tensor(torch.inf if scale is not None and i == 1 else 1.0, dtype=torch.float64)
        state, _ = step(state, data(i, rank_of(mesh)), gain)
        extras.append(tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state.extra))
    return gather_params(state.params), extras


def planned_extra(num_ranks: int, accumulate: int, scale: Any = None) -> Any:
    """The same three steps by the oracle, with the extras of every rank."""
    plain, extras = oracle(extra_loss, TX, accumulate=accumulate, with_extra=True), []
    state = plain.init(model(), scale, extra=[start_extra() for _ in range(num_ranks)])
    for i in range(3):
        gain = torch.tensor(torch.inf if scale is not None and i == 1 else 1.0, dtype=torch.float64)
        state, _ = plain.step(state, [data(i, rank) for rank in range(num_ranks)], gain)
        extras.append(state.extra)
    return state.params, extras


def eager_jit(step: Any, donate: bool) -> Any:
    return fshard.jit(step, donate=donate, backend="eager")


def same_extra(found: Any, expected: Any, rank: int = 0) -> None:
    """Check the parameters and extras of one rank against the oracle."""
    (params, extras), (others, all_extras) = found, expected
    close(params, others)
    for one, row in zip(extras, all_extras, strict=True):
        assert one["teacher"] is None
        assert not one["mean"].requires_grad
        close([one["mean"], one["queue"], one["count"]], [row[rank][key] for key in ("mean", "queue", "count")])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("how", "given"), [("eager", False), ("eager", True), ("jit", False), ("jit", True)])
def test_extra_goes_through_the_micro_batches(how, given, accumulate, scaled):
    """Extra passes through micro-batches in order, and stays when an update is skipped: otherwise running statistics
    would be wrong."""
    scale = fshard.DynamicLossScale(8.0) if scaled else None
    job = partial(train_extra, accumulate=accumulate, donate=given and how == "eager", scale=scale)
    if how == "jit":
        job = partial(job, how=lambda step, donate: eager_jit(step, given))
    expected = planned_extra(2, accumulate, scale)
    for rank, found in enumerate(simulated(job)):
        same_extra(found, expected, rank)
        if scaled:
            assert same_bits(found[1][0], found[1][1])
    same_extra(job(None), planned_extra(1, accumulate, scale))


def test_extra_in_real_processes_and_torch_compile():
    """Extra works in processes and under torch.compile: otherwise running statistics would work in simulation alone."""
    job = partial(train_extra, accumulate=2, donate=True)
    assert same_bits(gloo(job), simulated(job))
    how = lambda step, donate: torch.compile(step, fullgraph=True, backend="aot_eager")  # noqa: E731
    same_extra(train_extra(None, 2, False, how), planned_extra(1, 2))


def test_extra_with_aux_and_a_sharded_in_it():
    """Extra may hold a `Sharded`, and aux comes third: otherwise an averaged model could not be part of the state."""

    def loss(params: Any, extra: Any, batch: Any) -> Any:
        near = (params["a"]["w"] - extra["teacher"]["a"]["w"]).square().sum()
        return near, {**extra, "seen": extra["seen"] + 1}, {"rows": len(batch["x"])}

    def law(mesh: Any) -> None:
        extra = {"teacher": sharded(mesh, 50), "seen": torch.tensor(0)}
        state = fshard.init_state(sharded(mesh), TX, extra=extra)
        step = fshard.train_step(loss, TX, accumulate=2, with_extra=True, has_aux=True, donate=True)
        for i in range(2):
            state, metrics = step(state, data(i, 0))
        assert metrics["aux"] == [{"rows": ROWS // 2}] * 2
        assert state.extra["seen"] == 4
        assert same_bits(gather_params(state.extra["teacher"]), model(50))

    law(None)
    simulated(law)


BAD_EXTRA: dict[str, tuple[Callable[[Any], Any], str]] = {
    "structure": (lambda e: {"mean": e["mean"], "n": 3}, r"lacks \['queue'"),
    "more": (lambda e: {**e, "other": e["mean"]}, r"has \['other'\] besides"),
    "shape": (lambda e: {**e, "mean": e["mean"][:1]}, r"extra leaf 'mean': expected torch.float64\[5\]"),
    "dtype": (lambda e: {**e, "mean": e["mean"].float()}, r"extra leaf 'mean': .* got torch.float32\[5\]"),
    "a number": (lambda e: {**e, "n": 4}, "extra leaf 'n': expected 3, as in the state, got 4"),
    "in place": (lambda e: {**e, "mean": e["mean"].add_(1)}, "extra leaf 'mean' was changed in place"),
}


@pytest.mark.parametrize("name", BAD_EXTRA)
def test_extra_keeps_its_form(name):
    """Extra that changes structure, shape or dtype is an error with the leaf; without it a later step or checkpoint
    would fail."""
    change, words = BAD_EXTRA[name]
    state = fshard.init_state(sharded(None), TX, extra={**start_extra(), "n": 3})
    step = fshard.train_step(lambda p, e, b: (p["a"]["w"].sum(), change(e)), TX, with_extra=True)
    with pytest.raises(ValueError, match=words):
        step(state, data(0, 0))
    loss = lambda p, e, b: p["a"]["w"].sum()  # noqa: E731
    with pytest.raises(ValueError, match=r"expected \(loss, extra\), as with_extra=True says, got Tensor"):
        fshard.train_step(loss, TX, with_extra=True)(state, data(0, 0))
    with pytest.raises(ValueError, match="with_extra with reduction='tree'"):
        fshard.train_step(loss, TX, with_extra=True, reduction="tree")


def test_recorded_arguments_run_again(tmp_path):
    """A replay takes extra arguments from the record: otherwise a step with a teacher could not be replayed."""
    from fshard.testing import replay

    def loss(params: Any, extra: Any, batch: Any, *args: Any) -> Any:
        return mean_loss(params, batch, *args), {"n": extra["n"] + 1}

    def make(mesh: Any) -> Any:
        state = fshard.init_state(sharded(mesh), TX, extra={"n": torch.tensor(0)})
        return fshard.train_step(loss, TX, with_extra=True), state, data(0, 0), loss, 0 * WEIGHTS, sharded(mesh), 2.0

    def law(mesh: Any) -> None:
        step, state, *_ = make(mesh)
        step = record(step, tmp_path, steps={0})
        step(state, data(0, rank_of(mesh)), WEIGHTS, sharded(mesh, 50), 2.0)

    simulated(law)
    assert [str(found) for found in replay(tmp_path, make)] == ["step 0 on 2 rank(s): same bits"]


# --- donated tensors ---


def aux_loss(params: Any, batch: Any) -> Any:
    """A mean, and parameters as aux: a leaf, a view of a leaf, and the whole tree."""
    loss = fshard.Mean(logits(params, batch["x"]).square().sum(), len(batch["x"]))
    return loss, {"leaf": params["a"]["w"], "view": params["c"]["w"][1:, ::2], "all": params}


def held(mesh: Any, donate: bool, **plan: Any) -> Any:
    """What a caller keeps of several steps: aux, gathered parameters, and an average in extra."""
    params, kept = sharded(mesh, **plan), []
    average = tree.map(lambda x: x, params)  # the same tensors
    state = fshard.init_state(params, TX)
    state = replace(state, extra={"average": average, "first": params, "row": params.tensors[0]})
    step = fshard.train_step(aux_loss, TX, has_aux=True, donate=donate)
    for i in range(3):
        kept.append(gather_params(state.params))
        kept.append(gather_params(state.params["a"]))
        state, metrics = step(state, data(i, rank_of(mesh)))
        kept.append(metrics["aux"])
    return kept, gather_params(state.params), [gather_params(state.extra[key]) for key in ("average", "first")]


def auxes(mesh: Any, jit: bool, **plan: Any) -> list[Any]:
    """The aux of a gradient, of `evaluate`, and of a step."""
    params, batch, made = sharded(mesh, **plan), data(0, rank_of(mesh)), fshard.jit if jit else lambda fn, **_: fn
    (_, first), _ = made(fshard.value_and_grad(aux_loss, has_aux=True), backend="eager")(params, batch)
    _, second = made(fshard.evaluate(aux_loss, has_aux=True), backend="eager")(params, batch)
    step = made(fshard.train_step(aux_loss, TX, has_aux=True), backend="eager")
    return [first, second, step(fshard.init_state(params, TX), batch)[1]["aux"]]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "keep", "full"])
def test_aux_is_plain_values(strategy, jit):
    """Parameters in aux come out as plain values without a graph: otherwise aux would keep activations or gathered
    units alive."""
    whole = model()
    expected = {"leaf": whole["a"]["w"], "view": whole["c"]["w"][1:, ::2], "all": whole}
    for found in [auxes(None, jit), *simulated(partial(auxes, jit=jit, **STRATEGIES[strategy]), shard=2)]:
        for aux in found:
            assert tree.flatten(aux)[1] == tree.flatten(expected)[1]
            assert type(aux["all"]["a"]) is dict
            assert not any(x.requires_grad for x in tree.leaves(aux))
            assert same_bits(aux, expected)


@pytest.mark.parametrize("shard", [None, 1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "keep", "full"])
def test_what_a_caller_holds_keeps_its_value(strategy, shard):
    """What a caller keeps has the same bits whether steps are donated or not: otherwise a donated step would
    overwrite it."""
    jobs = [partial(held, donate=donate, **STRATEGIES[strategy]) for donate in (True, False)]
    donated, kept_apart = ([job(None)] if shard is None else simulated(job, shard=shard) for job in jobs)
    assert same_bits(donated, kept_apart)
    kept, _, averages = donated[0]
    assert same_bits(kept[0], model())
    assert same_bits(kept[2]["leaf"].detach(), model()["a"]["w"])
    assert same_bits(averages, [model(), model()])


def test_the_same_tensors_have_the_same_life():
    """A container of donated tensors is refused, one of copies still works: otherwise old containers would show new
    values."""
    whole = {**model(), "still": {"w": rand(3, seed=1)}}
    params = fshard.shard_params(whole, fshard.make_plan(whole, units=["a", "c"], frozen="still"))
    state = fshard.init_state(params, TX)
    same, part = tree.map(lambda x: x, params), tree.map(lambda x: x, params["a"])
    others = [tree.map(torch.clone, params), tree.map(lambda x: x if x.numel() == 3 else x + 0, params)]
    step = fshard.train_step(lambda p, b: logits(p, b["x"]).square().mean(), TX, donate=True)
    before = gather_params(params)
    after, _ = step(state, data(0, 0))
    for gone in (same, part, params):
        with pytest.raises(DonatedError):
            gather_params(gone)
    for other in others:
        assert same_bits(gather_params(other), before)
    step(after, data(1, 0))


def first_row(state: Any) -> Tensor:
    """A part of this rank's elements of the first leaf."""
    return state.params.local_views()["a.w"][:ROWS]


# What a caller may pass to a step besides the state, in memory of the state, and what the error names.
SHARED: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str]] = {
    "a detached tree": (lambda s: (data(0, 0), tree.map(torch.detach, s.params)), r"args\[0\], leaf 'a\.w'"),
    "the parameters": (lambda s: (data(0, 0), {"t": s.params}), r"args\[0\], leaf 't\.a\.w'"),
    "a subtree": (lambda s: (data(0, 0), WEIGHTS, s.params["c"]), r"args\[1\], leaf 'c\.w'"),
    "a view": (lambda s: (data(0, 0), [first_row(s)]), r"args\[0\], leaf '0'"),
    "a lone view": (lambda s: (data(0, 0), first_row(s)), r"args\[0\]: expected a tensor"),
    "an array's": (
        lambda s: ({**data(0, 0), "w": torch.from_numpy(first_row(s).numpy())},),
        r"batch, leaf 'w'",
    ),
    "in the batch": (lambda s: ({**data(0, 0), "w": first_row(s)},), r"batch, leaf 'w'"),
    "the batch": (lambda s: (first_row(s),), r"batch: expected a tensor"),
    "a moment": (lambda s: (data(0, 0), s.opt_state.momentum), r"args\[0\], leaf 'a\.w'"),
    "the state": (lambda s: (data(0, 0), s), r"args\[0\], leaf 'params\.a\.w'"),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("strategy", ["ddp", "full"])
def test_what_a_donated_step_would_overwrite_is_not_taken(name, strategy):
    """A batch or argument in the memory of a donated state is an error that names it: otherwise a teacher made by
    `detach` would follow its student."""
    give, words = SHARED[name]

    def law(mesh: Any) -> None:
        state = fshard.init_state(sharded(mesh, **STRATEGIES[strategy]), TX)
        before = gather_params(state.params)
        loss = lambda p, b, *args: p["a"]["w"].sum() + p["c"]["w"].sum()  # noqa: E731
        with pytest.raises(ValueError, match=rf"train_step\(donate=True\): {words}"):
            fshard.train_step(loss, TX, donate=True)(state, *give(state))
        assert same_bits(gather_params(state.params), before)  # the state is still there
        kept = tree.map(torch.clone, give(state))
        fshard.train_step(loss, TX)(state, *give(state))
        assert same_bits(give(state), kept)
        fshard.train_step(loss, TX, donate=True)(state, *kept)

    simulated(law)


def test_frozen_leaves_may_be_shared_with_a_donated_step():
    """Memory that a donated step does not write to may be passed as well: otherwise a frozen backbone would have to be
    copied for a teacher."""
    whole = {**model(), "still": {"w": rand(3, seed=1)}}

    def law(mesh: Any) -> None:
        params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, units=["a", "c"], frozen="still"))
        step = fshard.train_step(lambda p, b, t: (p["a"]["w"] * t["w"].sum()).sum(), TX, donate=True)
        state, teacher = fshard.init_state(params, TX), tree.map(torch.detach, params["still"])
        for i in range(2):
            state, _ = step(state, data(i, 0), teacher)
        assert same_bits(gather_params(teacher), whole["still"])

    simulated(law)


def test_zero_leaves_the_callers_parameters():
    """A donated ZeRO step leaves the caller's first parameters as they were: otherwise a user's model would be
    overwritten."""

    def law(mesh: Any) -> None:
        for partition in ("flat", "leaf"):
            params, tx = model(), fshard.zero(TX, mesh, partition=partition)
            grads, state = tree.map(torch.ones_like, params), tx.init(params)
            found, state = tx.step(grads, state, params, donate=True)
            assert same_bits(params, model())
            close(found, tree.map(lambda x: x - 0.1, model()))

    simulated(law)
    law(None)


# --- steps that ranks built with other options ---

BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"tx": optim.sgd(0.2, momentum=0.9)}, "lr=0.2"),
    "optimizer": ({"tx": optim.lion(0.1)}, "name='lion'"),
    "schedule": ({"tx": optim.sgd(optim.schedules.linear(0.1, 0.0, 10), momentum=0.9)}, "end=0.0"),
    "chain": ({"tx": optim.chain(optim.clip(2.0), TX)}, "max_magnitude=2.0"),
    "torch": ({"tx": optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)}, "cls=SGD"),
    "clip_norm": ({"clip_norm": 2.0}, "clip_norm=2.0"),
    "accumulate": ({"accumulate": 2}, "accumulate=2"),
    "reduce_once": ({"reduce_once": True}, "reduce_once=True"),
    "reduction": ({"reduction": "fast"}, "reduction='fast'"),
    "sum": ({"loss_fn": sum_loss}, "loss=Sum"),
    "scalar": ({"loss_fn": lambda p, b, *args: total(p, b, *args)}, "loss=a scalar"),
}


def built(mesh: Any, name: str, odd: int, how: Any = lambda step: step) -> None:
    """One step, which rank `odd` built with other options."""
    other = BUILT[name][0] if mesh.get_rank() == odd else {}
    step = how(fshard.train_step(**{"loss_fn": mean_loss, "tx": TX, "clip_norm": 1.0, **other}))
    state = fshard.init_state(sharded(mesh), {"tx": TX, **other}["tx"])
    step(state, data(0, mesh.get_rank()), WEIGHTS, model(50), 2.0)


@pytest.mark.parametrize("name", BUILT)
def test_ranks_that_built_other_steps_are_told(name):
    """Ranks with different options get an error that has both; without it parameters would differ silently."""
    with pytest.raises(MismatchError, match="for unit 'loss'") as caught:
        simulated(built, name, 1)
    assert BUILT[name][1] in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_compiled_steps_and_real_processes_are_told_too():
    """The error comes in graphs and processes too: otherwise a cluster would train different models silently."""
    with pytest.raises(MismatchError, match=r"lr=0\.2"):
        simulated(built, "lr", 1, partial(fshard.jit, backend="eager"))
    for fate in fates(built, "lr", 1):
        assert "MismatchError" in fate.error
        assert "lr=0.2" in fate.error


def test_what_is_described():
    """A step's text has numbers of fshard's functions, not the user's: otherwise a rank's own number would be called
    a difference."""

    def made(rank: int) -> str:
        return describe(tx=optim.sgd(lambda count: 0.1 / (count + rank)))

    assert made(3) == made(4)
    assert "lr=0.1" in describe(tx=optim.sgd(0.1))
    assert describe(tx=optim.sgd(torch.tensor(0.1))) == describe(tx=optim.sgd(torch.tensor(0.2)))
    long = [describe(tx=optim.chain(*[optim.scale(x) for x in xs])) for xs in ([0.1] * 99, [0.1] * 98 + [0.2])]
    assert long[0] != long[1]
    assert max(map(len, long)) < 400
    ring: list[Any] = [1.5]
    ring.append(ring)
    assert describe(x=[ring, ring]) == "x=1.5"


@pytest.mark.parametrize("strategy", ["ddp", "full"])
def test_a_tree_of_unequal_rows_is_told(strategy):
    """Ranks with different numbers of rows in a tree reduction get an error; without it slices would count
    unequally."""

    def law(mesh: Any) -> None:
        state = fshard.init_state(sharded(mesh, **STRATEGIES[strategy]), TX)
        step = fshard.train_step(lambda p, b: fshard.Mean((b @ p["a"]["w"]).sum(), len(b)), TX, reduction="tree")
        step(state, rand(2 + 2 * mesh.get_rank(), 4, seed=1))

    with pytest.raises(MismatchError, match=r"rows=2, .*rows=4, "):
        simulated(law)


@pytest.mark.parametrize("scale", [None, fshard.StaticLossScale(2.0)], ids=["plain", "scaled"])
def test_a_tree_of_unequal_rows_is_nan_where_nothing_is_compared(scale, monkeypatch):
    """Where ranks compare nothing, unequal rows in a tree reduction make gradients NaN and set found_inf: otherwise
    gradients would be wrong unnoticed."""

    def law(mesh: Any) -> None:
        state = fshard.init_state(sharded(mesh, **STRATEGIES["ddp"]), TX, scale)
        step = fshard.train_step(lambda p, b: fshard.Mean((b @ p["a"]["w"]).sum(), len(b)), TX, reduction="tree")
        new, metrics = step(state, rand(2 + 2 * mesh.get_rank(), 4, seed=1))
        assert metrics["found_inf"] == 1
        assert metrics["grad_norm"].isnan()
        if scale is None:  # without a loss scale no update is skipped
            assert gather_params(new.params)["a"]["w"].isnan().all()
        else:
            assert same_bits(gather_params(new.params), model())

    total_of = primitives.total
    monkeypatch.setattr(primitives, "total", lambda *args, more="", **how: total_of(*args, **how))
    simulated(law)


@pytest.mark.parametrize("jitted", [False, True])
def test_extra_with_keys_in_another_order(jitted: bool) -> None:
    """It is the same dict, and was refused with another reason."""
    params = fshard.shard_params({"w": torch.ones(3)}, fshard.make_plan({"w": torch.ones(3)}))
    tx = optim.sgd(0.1)

    def loss(p: Any, extra: Any, x: Tensor) -> Any:
        return (p["w"] * x).sum(), {"b": {"d": extra["b"]["d"] + 1, "c": extra["b"]["c"] + 2}, "a": extra["a"] + 3}

    state = fshard.init_state(
        params, tx, extra={"a": torch.zeros(()), "b": {"c": torch.zeros(()), "d": torch.zeros(())}}
    )
    step = fshard.train_step(loss, tx, with_extra=True, accumulate=2)
    step = fshard.jit(step, backend="eager") if jitted else step
    for number in (1, 2):
        state, _ = step(state, torch.ones(2, 3))
        assert state.extra == {"a": 6 * number, "b": {"c": 4 * number, "d": 2 * number}}
        assert [*state.extra["b"]] == ["c", "d"]
