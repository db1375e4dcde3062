"""Observed steps: quiet for what is right on any ranks, and for each planted fault its unit and line."""

import json
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.costs import cost
from support.strategies import PARTITIONS
from support.worlds import gloo
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fshard
from fshard import optim
from fshard.cli.main import main
from fshard.reduction import Sums
from fshard.testing import Difference, World, assert_trees_equal, first_difference, observed, record, simulate

ROWS = 16
DTYPES = (torch.float32, torch.float64)
MESHES = {1: {"shard": 1}, 2: {"shard": 2}, 4: {"replicate": 2, "shard": 2}, 8: {"replicate": 2, "shard": 4}}


class Wrong(torch.autograd.Function):
    """The identity, whose backward is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Return x."""
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return what is too large."""
        return ctx.factor * grad, None


def drawn(dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function of a shape that draws a tensor."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2


def params(dtype: torch.dtype = torch.float64) -> Any:
    """An embedding, three blocks of attention and a linear layer, a head."""
    new = drawn(dtype)
    shapes = {"norm": (4,), "qkv": (12, 4), "bias": (12,), "w": (4, 4), "b": (4,)}
    blocks = [{name: new(*shape) + (name == "norm") for name, shape in shapes.items()} for _ in range(3)]
    return {"embed": new(10, 4), "blocks": blocks, "head": new(4)}


def batch(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> dict[str, Tensor]:
    """Rows of five words, and weights of rows."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(10, (rows, 5), generator=generator)
    return {"words": words, "weight": torch.randint(1, 4, (rows,), generator=generator).to(dtype)}


def loss(p: Any, b: Any, fault: str = "", where: int = 1) -> Any:
    """A small transformer. `fault` is what goes wrong in the block `where`, or behind the blocks."""
    x = p["embed"][b["words"]]  # embed
    for number, block in enumerate(p["blocks"]):
        here = fault if number == where else ""
        h = F.layer_norm(x, (4,), block["norm"])  # norm
        q, k, v = F.linear(h, block["qkv"], block["bias"]).chunk(3, -1)  # qkv
        h = F.scaled_dot_product_attention(q, k, v, scale=0.9 if here == "scale" else 0.5)  # attention
        h = F.linear(h, block["w"] * SCALES.get(here, 1), block["b"])  # linear
        if here == "bf16":
            h = h.bfloat16().to(x.dtype)  # bf16
        h = torch.sin(h) if here == "sin" else torch.tanh(h)  # tanh
        h = Wrong.apply(h, FACTORS[here]) if here in FACTORS else h.clone()  # clone
        h = h.detach() if here == "detach" else h  # detach
        h = h - h.mean(0) if here == "batch" else h  # shift
        x = x + h * (1.02 if here == "factor" else 1)  # add
    head = p["head"].detach() if fault == "head" else p["head"]  # head
    each = (x @ head).square().sum(-1)  # each
    return LOSSES[fault if fault in LOSSES else ""](each, b["weight"], each.dtype)


FACTORS = {"backward": 1.5, "doubled": 2.0}  # of gradients
SCALES = {"half": 0.5, "scaled": 1.01}  # of weights

LOSSES: dict[str, Callable[[Tensor, Tensor, torch.dtype], Any]] = {
    "": lambda each, weight, _: fshard.Mean((each * weight).sum(), weight.sum()),
    "plain": lambda each, weight, _: each.mean(),  # plain
    "sum": lambda each, weight, _: fshard.Sum((each * weight).sum()),
    "terms": lambda each, weight, _: (
        fshard.Mean(each.sum(), len(each)) + 0.1 * fshard.Mean(weight @ each, weight.sum())
    ),
    "count": lambda each, weight, _: fshard.Mean((each * weight).sum(), weight.sum() + 1),  # count
    "number": lambda each, weight, _: fshard.Mean((each * weight).sum(), 7),  # number
    "weighted": lambda each, weight, _: (each * weight).sum() / weight.sum(),  # weighted
    "global": lambda each, weight, _: fshard.Mean((each * weight).sum(), 26),  # global
    "maximum": lambda each, weight, _: fshard.Mean((each / each.max()).sum(), len(each)),  # maximum
    "low": lambda each, weight, _: fshard.Mean((each * weight).sum().bfloat16(), weight.sum()),  # low
}


def lines() -> dict[str, str]:
    """The lines of this file by their marks."""
    text = Path(__file__).read_text().splitlines()
    marks = ((re.search(r"# (\w+)$", line), number) for number, line in enumerate(text, 1))
    return {mark[1]: f"{__file__}:{number}" for mark, number in marks if mark}


LINES = lines()


def stepped(mesh: Any, fn: Any = loss, *, wrap: Any = observed, plan: Any = None, tx: Any = None, **how: Any) -> Any:
    """What the step of a rank, or of one device, returns; most of `how` are arguments of `train_step`."""
    dtype = how.pop("dtype", torch.float64)
    whole, rows = params(dtype), how.pop("batch", None) or batch(dtype)
    tx, scale, change = tx or optim.adamw(1e-2), how.pop("scale", None), how.pop("change", None)
    plan = fshard.make_plan(whole, mesh, units=["blocks.*"], **(plan or {}))
    extra = torch.zeros(()) if how.get("with_extra") else None
    state = fshard.init_state(fshard.shard_params(whole, plan), tx, loss_scale=scale, extra=extra)
    ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
    if change and rank == 1:
        state, rows = change(state, rows)
    graph = how.pop("graph", "")
    step = wrap(fshard.train_step(fn, tx, **how))
    step = fshard.jit(step, backend=graph) if graph else step
    return step(state, {name: x.tensor_split(ranks)[rank] for name, x in rows.items()})


def ran(mesh: Any, fn: Any = loss, **how: Any) -> Any:
    """What a rank, or one device, has seen."""
    return stepped(mesh, fn, **how)[1]


def with_extra(p: Any, extra: Tensor, b: Any) -> Any:
    """The loss, and a count of its calls."""
    return loss(p, b), extra + 1


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"fn": partial(loss, fault="sum")},
    "mean of rows": {"fn": partial(loss, fault="plain")},
    "terms": {"fn": partial(loss, fault="terms")},
    "accumulate": {"accumulate": 2},
    "once": {"accumulate": 2, "reduce_once": True},
    "kept": {"accumulate": 2, "keep_gathered": True},
    "clip": {"clip_norm": 0.1},
    "scaler": {"scale": fshard.DynamicLossScale(), "clip_norm": 0.1, "accumulate": 2},
    "extra": {"fn": with_extra, "with_extra": True, "accumulate": 2},
    "in backward": {"in_backward": True, "donate": True},
    "in backward, clipped": {"in_backward": True, "donate": True, "clip_norm": 0.1},
    "frozen": {"plan": {"frozen": ["head", "blocks.1.*"]}},
    "tree": {"reduction": "tree", "accumulate": 2, "clip_norm": 0.1},
    "graph": {"graph": "eager"},
    "graph of micro-batches": {"graph": "eager", "accumulate": 2, "clip_norm": 0.1},
}


@pytest.mark.law
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("strategy", range(len(PARTITIONS)))
@pytest.mark.parametrize("ranks", MESHES)
def test_ranks_compute_what_one_device_does(ranks: int, strategy: int, how: str, dtype: torch.dtype) -> None:
    """A right program would be said to differ."""
    cut, fn = PARTITIONS[strategy], HOW[how].get("fn", loss)
    if ranks < 4:  # without that axis
        cut = {name: tuple(x for x in over if x != "replicate") if over else over for name, over in cut.items()}
    given = {"dtype": dtype} | HOW[how]
    frozen = given.pop("plan", {})
    of_both = {name: given[name] for name in ("clip_norm", "with_extra") if name in given}
    one = ran(None, fn=fn, dtype=dtype, plan=frozen, **of_both)
    got = simulate(lambda mesh: ran(mesh, plan=cut | frozen, **given), **MESHES[ranks])
    assert first_difference(got, [one]) is None


def predicted(p: Any, b: Any, add: Callable[[Tensor, Any], Tensor] = lambda h, block: h) -> Tensor:
    """Numbers (rows, 5)."""
    x = p["embed"][b["words"]]
    for block in p["blocks"]:
        x = x + add(torch.tanh(F.linear(x, block["w"], block["b"])), block)
    return x @ p["head"]


def mean(each: Tensor) -> Any:
    """The loss of numbers by row."""
    return fshard.Mean(each.sum(), len(each))  # mean


def rows_by_number(p: Any, b: Any) -> Any:
    """Row numbers of a rank, also in an index of all elements."""
    y, first = predicted(p, b), b["words"][:, 0] % 5
    n = torch.arange(len(y))
    return mean(y[n, first] * y.reshape(-1)[5 * n + first])


def sorted_rows(p: Any, b: Any) -> Any:
    """Rows in an order of their own."""
    return mean(predicted(p, b)[b["weight"].argsort()].tanh().square().sum(-1))


def shifted(p: Any, b: Any) -> Any:
    """A maximum and a mean of the batch are subtracted, and cancel."""
    y = predicted(p, b)
    return mean(-(y - y.max() - y.mean()).log_softmax(-1)[:, 0])


def chosen(p: Any, b: Any) -> Any:
    """Rows by a mask, and by class."""
    y, mask = predicted(p, b), b["words"] > 4
    by_class = [y[b["words"][:, 0] == number].square().sum() for number in range(10)]
    return fshard.Mean(y[mask].square().sum() + torch.stack(by_class).sum(), mask.sum())


def logged(p: Any, b: Any) -> Any:
    """What does not go into the loss."""
    each = predicted(p, b).square().sum(-1)
    return mean(each + 0 * (each.mean().exp() * (each > 1).double().mean()).detach().isnan())


def in_blocks(p: Any, b: Any) -> Any:
    """Checkpoints, which run again in the backward."""

    def again(h: Tensor, block: Any) -> Tensor:
        return checkpoint(lambda h: torch.sin(h) * block["norm"], h, use_reentrant=False)

    return mean(predicted(p, b, again).square().sum(-1))


def transformed(p: Any, b: Any) -> Any:
    """torch.func inside, which refuses hooks on what is saved: the loss runs twice."""
    slope = torch.func.vmap(torch.func.grad(lambda x: torch.sin(x @ p["head"]).sum()))(p["embed"][b["words"]])
    return mean(predicted(p, b).square().sum(-1) + slope.square().sum((-1, -2)))


def written(p: Any, b: Any) -> Any:
    """Writes in place, and a complex number."""
    y = predicted(p, b).clone()
    y[:, 0] = 0
    y.mul_(2).add_(1)
    z = torch.complex(y, y.sin())
    return mean((z * z.conj()).real.sum(-1))


def scanned(p: Any, b: Any) -> Any:
    """A loop that a graph traces once."""
    x, _ = fshard.scan(lambda block, x: x + torch.tanh(F.linear(x, block["w"])), p["embed"][b["words"]], p["blocks"])
    return mean((x @ p["head"]).square().sum(-1))


def twice(p: Any, b: Any) -> Any:
    """Blocks that are read twice."""
    return mean(predicted(p, b).square().sum(-1) + predicted(p, {"words": b["words"].flip(1)}).square().sum(-1))


def half(p: Any, b: Any) -> Any:
    """A part in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mean(predicted(p, b).float().square().sum(-1))


def monitored(p: Any, b: Any) -> Any:
    """Row numbers and sums over rows that count for nothing; memory that is written to later."""
    y = predicted(p, b)
    y = y + 0 * (torch.arange(len(y)).to(y.dtype)[:, None] + y.cumsum(0) + y.softmax(0)).detach()
    filled = torch.empty_like(y)
    filled.copy_(y.square())
    return mean(filled.sum(-1))


def reordered(p: Any, b: Any) -> Any:
    """Rows in another order, two views of each, and positions among rows."""
    y = predicted(p, b)[b["weight"].argsort()].flip(0)
    both = torch.cat([y, 2 * y]).transpose(0, 1).reshape(-1, 1)
    return mean(both.square().sum() * torch.ones(len(y), dtype=y.dtype) / len(y))


def experts(p: Any, b: Any) -> Any:
    """Rows by class, each class through a function of its own, and back."""
    y, kinds = predicted(p, b), b["words"][:, 0] % 3
    order = kinds.argsort(stable=True)
    parts = y[order].split(kinds.bincount(minlength=3).tolist())
    out = torch.cat([part * (2 + number) for number, part in enumerate(parts)])[order.argsort()]
    return mean(out.square().sum(-1))


PROGRAMS = (
    monitored,
    reordered,
    experts,
    rows_by_number,
    sorted_rows,
    shifted,
    chosen,
    logged,
    in_blocks,
    transformed,
    written,
    scanned,
    twice,
    half,
)


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"plan": {"bucket": 1 << 20}}, {"graph": "eager"}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fn", PROGRAMS)
def test_programs_that_are_right(fn: Any, dtype: torch.dtype, how: dict[str, Any]) -> None:
    """What differs between ranks, and has no effect, would be called a fault."""
    rows = batch(dtype, 14)
    if how.get("graph") and fn in (chosen, experts):
        pytest.skip("torch cannot trace a mask, or sizes that depend on values")
    if fn is half and dtype == torch.float64:
        pytest.skip("float64 is not cast by autocast")
    one = ran(None, fn=fn, dtype=dtype, batch=rows)
    got = simulate(lambda mesh: ran(mesh, fn=fn, dtype=dtype, batch=rows, **how), shard=3)
    assert first_difference(got, [one]) is None


class WrongSums(Sums):
    """Sums of gradients of which one unit's is wrong."""

    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def reduce_scatter(self, x: Tensor, ranks: Any, label: str, out: Any = None) -> Any:
        """Twice the sum."""
        return super().reduce_scatter(x * 2 if label == self.unit else x, ranks, label, out)


def other_weights(state: Any, rows: Any, block: int) -> Any:
    """A rank's shard of a block changed."""
    for path, piece in state.params.local_views().items():
        if path == f"blocks.{block}.w":
            piece.add_(0.1)
    return state, rows


def other_rows(state: Any, rows: Any) -> Any:
    """A rank's words changed."""
    return state, rows | {"words": (rows["words"] + 1) % 10}


BLOCK = {  # the fault, and the mark of the line where it shows
    **dict.fromkeys(("half", "scaled"), "linear"),
    **{"scale": "attention", "bf16": "bf16", "sin": "tanh", "factor": "add", "batch": "shift", "detach": "detach"},
}
WHOLE = {"params_over": (), "grads_over": (), "state_over": ()}
Fault = tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]  # of ranks, of one device; kind, unit and mark


def faults() -> dict[str, Fault]:
    """Planted faults by name: how ranks run, how one device does, and the kind, unit and line (by its mark) to name."""
    table: dict[str, Fault] = {}
    for (fault, mark), where in product(BLOCK.items(), range(3)):
        fn = {"fn": partial(loss, fault=fault, where=where)}
        table[f"{fault} in block {where}"] = fn, {}, ("operator", f"blocks.{where}", mark)
    for where in range(3):
        unit, before = f"blocks.{where}", "gradient on this rank of"
        for fault in FACTORS:
            backward = {"fn": partial(loss, fault=fault, where=where)}
            table[f"{fault} of block {where}"] = backward, {}, (before, unit, "norm")
        table[f"sum of block {where}"] = {"reduction": WrongSums(unit)}, {}, ("summed gradient of", unit, "norm")
        change = {"change": partial(other_weights, block=where), "plan": WHOLE}
        table[f"weights of block {where}"] = change, {}, ("operator", unit, "linear")
    uneven = {"batch": batch(rows=13)}
    plain = {"fn": partial(loss, fault="plain")} | uneven
    table["mean of unequal rows"] = plain, plain, ("operator", "(last)", "plain")
    weighted = {"fn": partial(loss, fault="weighted")} | uneven
    table["mean of unequal weights"] = weighted, weighted, ("operator", "(last)", "weighted")
    for fault in ("count", "number", "maximum", "low"):
        table[fault] = {"fn": partial(loss, fault=fault)}, {}, ("operator", "(last)", fault)
    for name, how in {"rows": {}, "rows, cut": {"plan": {"regather": False}}}.items():
        table[name] = {"change": other_rows, **how}, {}, ("operator", "(first)", "embed")
    table["another policy"] = {"plan": {"policy": fshard.Policy(compute="bf16")}}, {}, ("operator", "(first)", "embed")
    table["a head that is detached"] = {"fn": partial(loss, fault="head")}, {}, ("operator", "(last)", "head")
    total = {"fn": partial(loss, fault="global")}  # 26 on one device, too
    table["a count that is global"] = total, total, ("operator", "(last)", "global")
    clipped = [{"clip_norm": norm, "tx": optim.sgd(1.0)} for norm in (0.1, 0.5)]
    table["another clipping"] = *clipped, ("new parameter", "(last)", "each")
    table["another rate"] = {"tx": optim.adamw(0.02)}, {}, ("new parameter", "(last)", "each")
    low, lower = ({"tx": optim.adamw(rate)} for rate in (3e-4, 1e-4))
    table["another low rate"] = low, lower, ("new parameter", "(last)", "each")
    of_leaf = optim.by_label({"a": optim.sgd(0.1), "b": optim.sgd(0.2)}, {"blocks.0.bias": "b", "**": "a"})
    table["a rate of a leaf"] = {"tx": of_leaf}, {"tx": optim.sgd(0.1)}, ("new parameter", "blocks.0", "norm")
    return table


FAULTS = faults()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, ranks: int, dtype: torch.dtype) -> None:
    """A user would look at another unit, or another line."""
    of_ranks, of_one, (kind, unit, mark) = FAULTS[name]
    one = ran(None, dtype=dtype, **of_one)
    got = simulate(lambda mesh: ran(mesh, dtype=dtype, **of_ranks), shard=ranks)
    found = first_difference(got, [one])
    assert found is not None
    assert (found.kind, found.unit, found.line) == (kind, unit, LINES[mark]), str(found)
    assert found.text in str(found)
    assert found.line in str(found)


def test_there_are_enough_faults() -> None:
    """A fault would be left out of the table without a word."""
    assert len(FAULTS) == 51


@pytest.mark.parametrize("fault", BLOCK)
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_rank_is_named(fault: str, ranks: int) -> None:
    """A user of many ranks would not know on which to look."""
    got = simulate(lambda mesh: ran(mesh, partial(loss, fault=fault if mesh.get_rank() == 2 else "")), shard=ranks)
    for expected in ([ran(None)], simulate(ran, shard=ranks)):
        found = first_difference(got, expected)
        assert found is not None
        assert (found.rank, found.unit, found.line) == (2, "blocks.1", LINES[BLOCK[fault]])


def seen_by(ranks: int, step: Any = None, **how: Any) -> Any:
    """What the ranks of a small step have seen."""
    return simulate(lambda mesh: ran(mesh, **how), shard=ranks)


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two versions could not be compared, or what is in a file would be other values."""
    new, old = seen_by(2, fn=partial(loss, fault="scale")), seen_by(2)
    for name, seen in {"new": new, "old": old}.items():
        torch.save(seen, tmp_path / f"{name}.pt")
    assert first_difference(torch.load(tmp_path / "old.pt", weights_only=True), old) is None
    files = [str(tmp_path / name) for name in ("new.pt", "old.pt")]
    assert main(["compare", *files]) == 1
    assert capsys.readouterr().out == f"{first_difference(new, old)}\n"
    assert main(["compare", *files, "--json"]) == 1
    difference = Difference(**json.loads(capsys.readouterr().out)["difference"])
    assert difference == first_difference(new, old)
    assert (difference.rank, difference.unit, difference.line) == (0, "blocks.1", LINES["attention"])
    assert main(["compare", files[0], files[0]]) == 0
    assert "no difference in" in capsys.readouterr().out
    torch.save([{"names": 3}], tmp_path / "broken.pt")
    (tmp_path / "empty").mkdir()
    for broken in ("broken.pt", "empty", "none.pt"):
        assert main(["compare", str(tmp_path / broken), files[0]]) == 2
        assert broken in capsys.readouterr().err


def test_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fshard compare` would not find what a recorded step has seen, or compare another step or rank."""
    for name, fault, meshes in (("right", "", 2), ("wrong", "sin", 2), ("one", "", 0)):

        def wrap(step: Any, name: str = name) -> Any:
            return record(observed(step), tmp_path / name, steps={0})

        run = partial(stepped, fn=partial(loss, fault=fault), wrap=wrap)
        simulate(run, shard=meshes) if meshes else run(None)
    folders = {name: str(tmp_path / name) for name in ("right", "wrong", "one")}
    for expected in ("right", "one"):
        assert main(["compare", folders["right"], folders[expected]]) == 0
        assert main(["compare", folders["wrong"], folders[expected], "--at", "0"]) == 1
        assert f"unit 'blocks.1', at {LINES['tanh']}" in capsys.readouterr().out
    (tmp_path / "wrong" / "step-00000000").rename(tmp_path / "wrong" / "step-00000007")
    assert main(["compare", folders["wrong"], folders["right"]]) == 2
    assert "ends with step 7" in capsys.readouterr().err
    about = tmp_path / "right" / "step-00000000" / "rank-1" / "about.json"
    known = json.loads(about.read_text())
    del known["after seen"]["plain"]["0"]
    about.write_text(json.dumps(known))
    assert main(["compare", folders["right"], folders["one"]]) == 2
    assert "names and as many values, got others" in capsys.readouterr().err
    simulate(lambda mesh: stepped(mesh, wrap=lambda step: record(step, tmp_path / "plain", steps={0})), shard=2)
    assert main(["compare", str(tmp_path / "plain"), folders["one"]]) == 2
    assert "record(observed(step), dir)" in capsys.readouterr().err


def test_eager_and_graph() -> None:
    """A graph would be said to differ by rounding, or a fault in a graph not be named."""
    graph, eager = seen_by(2, graph="eager"), seen_by(2)
    assert first_difference(graph, eager, 1e-12) is None
    found = first_difference(graph, seen_by(2, fn=partial(loss, fault="factor")), 1e-12)
    assert found is not None
    assert (found.rank, found.unit, found.line) == (0, "blocks.1", LINES["add"])


def test_in_processes() -> None:
    """Processes would hang where simulated ranks do not, or have other values."""
    for fault in ("", "sin"):
        got = gloo(ran, partial(loss, fault=fault))
        assert first_difference(got, seen_by(2, fn=partial(loss, fault=fault))) is None
        difference = first_difference(got, [ran(None)])
        assert (difference and (difference.unit, difference.line)) == ((fault and ("blocks.1", LINES["tanh"])) or None)


def test_numbers_of_ranks_that_cannot_be_compared() -> None:
    """Ranks would be compared with others, or some with none."""
    one, two, three = [ran(None)], seen_by(2), seen_by(3)
    for got, expected in ((two, three), (one, two), (two, seen_by(2, accumulate=2))):
        with pytest.raises(ValueError, match=r"by rank .* give runs on equally many ranks and micro-batches, or as"):
            first_difference(got, expected)
    names = one[0]["names"]
    for wrong in ([], 3, one[0], [(None, one[0])], [{"names": [], "values": []}], [one[0] | {"values": names}]):
        with pytest.raises(
            ValueError, match=r"got: expected what observed\(step\) returns beside its results, by rank"
        ):
            first_difference(wrong, one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got: expected what all 3 ranks have seen, got 1"):
        first_difference(three[:1], one)
    for rtol in (float("nan"), float("inf"), -1, "x"):
        with pytest.raises(ValueError, match=r"first_difference: rtol=.*: expected a finite number from 0 on"):
            first_difference(two, one, rtol)  # type: ignore[arg-type]


ODD = [torch.arange(4).to(x) for x in (torch.uint64, torch.bool, torch.complex64, torch.float8_e5m2, torch.float16)]
ODD += [torch.ones(shape) for shape in ((), (0,), (4, 3), (1, 1, 1))]
FIELDS = [
    "",
    "forward",
    "operator",
    "collective",
    "split",
    "metric",
    "0",
    "-1",
    "3,2",
    "2x2",
    "x".join("2" * 9),
    "9" * 5000,
    "the loss's ",
]


def changed(runs: Any, draw: random.Random) -> Any:
    """What ranks have seen, of which some values are others, or gone, or there twice, and a name is another one."""
    runs = [{key: [*x] for key, x in run.items()} for run in runs]
    for _ in range(draw.randrange(3)):
        names, values = draw.choice(runs).values()
        i, j, kind = draw.randrange(len(names)), draw.randrange(len(names)), draw.randrange(4)
        if kind == 0:
            values[i] = draw.choice(ODD)
        elif kind == 1:
            fields = names[i].split("\t")
            fields[draw.randrange(len(fields))] = draw.choice(FIELDS)
            names[i] = "\t".join(fields)
        elif kind == 2:
            del names[i], values[i]
        else:
            names.insert(j, names[i]), values.insert(j, draw.choice(ODD))
    return runs


def test_changed_values_are_a_difference_or_an_error() -> None:
    """A file that somebody else wrote would end `fshard compare` with a traceback, whose status is a difference's."""

    step = observed(fshard.train_step(lambda p, x: (x @ p["w"]).tanh().square().mean(), tx := optim.sgd(0.5)))
    whole = {"w": torch.arange(4.0), "b": torch.ones(3)}

    def small(mesh: Any) -> Any:
        ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_rank())
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), tx)
        return step(state, torch.arange(32.0).reshape(8, 4).sin().tensor_split(ranks)[rank])[1]

    found = set[str]()
    pairs = [(simulate(small, shard=2), [small(None)]), (simulate(small, shard=2),) * 2, ([small(None)],) * 2]
    by_line = [seen | {"names": [x.replace("2\t\t", "2\tsplit\t") for x in seen["names"]]} for seen in pairs[0][0]]
    assert all("split\treplicate,shard" in seen["names"][0] for seen in by_line)
    pairs.append((by_line, pairs[0][1]))
    for seed in range(200):
        draw = random.Random(seed)
        got, expected = (changed(each, draw) for each in pairs[seed % 4])
        try:
            found.add(type(first_difference(got, expected, draw.choice([None, 1e-3]))).__name__)
        except ValueError:
            found.add("an error")
    assert found == {"an error", "Difference", "NoneType"}


ADD, FORWARD = "operator\tadd\t\tx.py:1\t", "forward\t\t\t\t"
# the names of what a rank has seen, of about n items
MANY: dict[str, Callable[[int], list[str]]] = {
    "operators": lambda n: [ADD] * n + [f"metric\t{i}\t\t\t" for i in range(n)],
    "micro-batches": lambda n: [ADD] + [FORWARD, ADD] * n,
    "inputs": lambda n: [f"{ADD}{','.join(map(str, range(i)))}" for i in range(n)],
    "equal inputs": lambda n: [ADD] + [f"{ADD}{',0' * n}"] * 40,
}


class Operators(TorchDispatchMode):
    """Counts the operators of torch that run."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MANY)
def test_work_grows_with_the_values_and_no_faster(kind: str) -> None:
    """A file of as many values as there may be would keep `fshard compare` busy for hours."""

    def work(num: int) -> tuple[int, float]:
        names = [FORWARD, *MANY[kind](num)]
        seen = [{"names": names, "values": [torch.ones(()) for _ in names]}]
        with Operators() as operators:
            first_difference(seen, seen, 1e-3)
        numbers = sum(len(name.split(",")) for name in names)  # n * n of "inputs", which are read and no more
        return operators.num, cost(lambda: first_difference(seen, seen, 1e-3)) / (len(names) + numbers)

    (few, cheap), (many, dear) = work(25), work(100)
    assert many < 4.5 * few
    assert dear < 1.2 * cheap


def test_what_cannot_be_observed() -> None:
    """Values would be those of a trace, or missing, without a word."""
    for wrong in (
        lambda step: observed(fshard.jit(step, backend="eager")),
        lambda step: observed(lambda state, batch: (state, {})),
    ):
        with pytest.raises(TypeError, match=r"write jit\(observed\(step\)\)"):
            stepped(None, wrap=wrong)
    state, step = fshard.init_state(shard_of(torch.ones(2)), optim.sgd(0.1)), fshard.jit(STEP, backend="eager")
    step(state, torch.ones(2))
    with pytest.raises(TypeError, match=r"write jit\(observed\(step\)\)"):
        observed(step)(state, torch.ones(2))  # a graph that is there already runs no Python
    with pytest.raises(TypeError, match="observed: step"):
        observed(torch.nn.Linear)  # type: ignore[arg-type]


def shard_of(x: Any) -> fshard.Sharded:
    """Parameters on one device."""
    return fshard.shard_params(x, fshard.make_plan(x))


STEP = fshard.train_step(lambda w, x: (w * x).sum(), optim.sgd(0.1))


@pytest.mark.parametrize(
    ("how", "graph"),
    [("plain", ""), ("scaler", ""), ("in backward, clipped", ""), ("tree", ""), ("plain", "eager")],
)
def test_the_bits_are_those_of_the_step(how: str, graph: str) -> None:
    """What is observed would be another step."""

    def both(mesh: Any) -> None:
        (after, _), plain = (
            stepped(mesh, wrap=wrap, graph=graph, **HOW[how]) for wrap in (observed, lambda step: step)
        )
        for got, wanted in zip(after, plain, strict=True):
            assert_trees_equal(got, wanted)

    simulate(both, shard=2)


def test_what_is_compiled_in_a_loss() -> None:
    """It would be compiled operator by operator: another program, in which a wrong compiler is right."""
    graphs: list[int] = []

    def wrong(graph: Any, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.op in ("call_function", "call_method")]
        graphs.append(len(calls))
        return lambda *args: [x * 1.5 for x in graph(*args)]

    inner = torch.compile(lambda x: torch.tanh(x @ x.T) + 1, backend=wrong)
    fn = lambda p, x: (inner(x) * p).square().mean()  # noqa: E731
    state = fshard.init_state(shard_of(torch.ones(3)), optim.sgd(0.1))
    step = fshard.train_step(fn, optim.sgd(0.1))
    (_, metrics), _ = observed(step)(state, torch.ones(3, 2))
    assert torch.equal(metrics["loss"], step(state, torch.ones(3, 2))[1]["loss"])
    assert {*graphs} == {4}


def test_micro_batches_that_call_other_operators() -> None:
    """An error of Python would come in place of the difference."""
    calls = 0

    def sometimes(p: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        y = (x * p).square().sum()
        return fshard.Sum(y.neg().neg() if calls % 2 else y)

    def seen(accumulate: int) -> Any:
        state = fshard.init_state(shard_of(torch.ones(2)), optim.sgd(0.1))
        step = fshard.train_step(sometimes, optim.sgd(0.1), accumulate=accumulate)
        return [observed(step)(state, torch.ones(4, 2))[1]]

    difference = first_difference(seen(2), seen(1))
    assert difference is not None
    assert (difference.name, "not in all micro-batches" in difference.text) == ("neg", True)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "adafactor"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_gradients_that_are_rounding(seed: int, dtype: torch.dtype, optimizer: str) -> None:
    """What an optimizer makes of them, over several steps, would be called a fault."""
    tx, new = getattr(optim, optimizer)(1e-2), drawn(dtype)
    whole = {"w": new(4, 4), "b": new(4), "head": new(4, 3)}
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    def cancelled(p: Any, x: Tensor) -> Any:
        y = (x @ p["w"]) + p["b"].sum()
        return fshard.Mean(((y.softmax(1) * x) @ p["head"]).square().sum(), len(x))

    def seen(mesh: Any) -> Any:
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), tx)
        step, values = observed(fshard.train_step(cancelled, tx)), []
        for _ in range(6):
            (state, _), values_of_step = step(state, rows if mesh is None else rows.chunk(2)[mesh.get_rank()])
            values.append(values_of_step)
        return values

    for got, one in zip(zip(*simulate(seen, shard=2), strict=True), seen(None), strict=True):
        assert first_difference(got, [one]) is None


def test_weights_beside_micro_batches_of_one_device() -> None:
    """Numbers of a weight in another order would count as pieces of the copies that each micro-batch has."""

    def turned(p: Any, b: Any, wrong: bool = False) -> Any:
        w = p["blocks"][0]["w"]
        return mean((p["embed"][b["words"]] @ (w.flip(0) if wrong else w.flip(1))).square().sum((-1, -2)))

    difference = first_difference(seen_by(2, fn=partial(turned, wrong=True)), [ran(None, fn=turned, accumulate=2)])
    assert difference is not None
    assert difference.name == "flip"


def test_names_with_tabs() -> None:
    """A name would have more fields than a name has."""
    whole = {"a\tb": torch.ones(2)}
    state = fshard.init_state(shard_of(whole), optim.sgd(0.1))
    step = observed(fshard.train_step(lambda p, x: (p["a\tb"] * x).sum(), optim.sgd(0.1)))
    seen = [step(state, torch.ones(2))[1]]
    assert first_difference(seen, seen) is None


def test_a_long_chain_of_wrong_values() -> None:
    """An error of Python would come in place of where it begins."""

    def chain(p: Any, x: Tensor, wrong: bool = False) -> Any:
        y = x * p - x.mean(0) * wrong  # a mean of rows of a rank
        for _ in range(1500):
            y = y.neg()
        return fshard.Mean(y.square().sum(), len(x))

    def seen(mesh: Any) -> Any:
        rows = torch.linspace(1, 2, 8, dtype=torch.float64).view(4, 2)
        rows = rows if mesh is None else rows.tensor_split(2)[mesh.get_rank()]
        whole = torch.ones(2, dtype=torch.float64)
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), optim.sgd(0.1))
        return observed(fshard.train_step(partial(chain, wrong=True), optim.sgd(0.1)))(state, rows)[1]

    difference = first_difference(simulate(seen, shard=2), [seen(None)])
    assert difference is not None
    assert difference.name in ("mean", "sub")


def test_a_module() -> None:
    """Operators of torch's modules would be missing, or have lines inside of torch."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, dtype=torch.float64)
    module = torch.nn.Sequential(layer, torch.nn.Linear(4, 3, dtype=torch.float64))
    apply, whole, buffers = fshard.module.functionalize(module)
    rows, tx = torch.randn(6, 5, 4, dtype=torch.float64), optim.adamw(1e-2)

    def run(mesh: Any, scale: float = 1.0) -> Any:
        def loss_fn(p: Any, x: Tensor) -> Any:
            return mean(apply(p, buffers, x * scale)[0].square().sum((1, 2)))  # module

        plan = fshard.make_plan(whole, mesh, units=apply.units("0", "1"))
        state = fshard.init_state(fshard.shard_params(whole, plan), tx)
        mine = rows if mesh is None else rows.tensor_split(mesh.size())[mesh.get_rank()]
        return observed(fshard.train_step(loss_fn, tx))(state, mine)[1]

    one = run(None)
    fields = [name.split("\t") for name in one["names"] if name.startswith("operator")]
    assert {line for _, _, _, line, _ in fields} == {LINES["module"], LINES["mean"]}
    assert {"linear", "layer_norm"} <= {name for _, name, *_ in fields}
    assert first_difference(simulate(run, shard=2), [one]) is None
    found = first_difference(simulate(lambda mesh: run(mesh, 1.1), shard=2), [one])
    assert found is not None
    assert (found.name, found.line) == ("mul", LINES["module"])


def split_loss(mesh: Any, fault: str = "") -> Any:
    """Two layers whose features are split over "tensor"; gate and up lie end to end."""

    def loss_fn(p: Any, x: Tensor) -> Any:
        for layer in p["layers"]:
            gate, up = (x @ layer["gate_up"]).chunk(2, -1)
            y = (gate.sigmoid() * up) @ layer["down"]
            y = y if fault == "sum" else fshard.all_reduce(y, mesh, "tensor")
            y = y * 1.0 if fault == "more" else y  # one device lacks it, and it is right
            x = x + y.tanh()  # missing
        total = x.square().sum() * {"part": 0.5, "more": 1.3}.get(fault, 1)  # more
        return fshard.Sum(0.1 * total) if fault == "twofold" else fshard.Mean(total, len(x))  # total

    return loss_fn


MARKS = {"sum": ("layers.0", "missing"), "more": ("layers.1", "more")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["", "sum", "more"])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 3}, {"shard": 2, "tensor": 2}])
def test_leaves_that_are_split(sizes: dict[str, int], fault: str, dtype: torch.dtype) -> None:
    """Parts of features, and sums not taken yet, would be faults; or a sum that is missing would not be one."""
    new = drawn(dtype)
    whole = {"layers": [{"gate_up": new(4, 14), "down": new(7, 4)} for _ in range(2)]}
    rows, tx = new(6, 4), optim.adamw(1e-2)
    split = {"**.gate_up": ("tensor", 1, 2), "**.down": ("tensor", 0)}

    def run(mesh: Any, fault: str = "") -> Any:
        how = {} if mesh is None else {"split": split, **({} if "shard" in sizes else WHOLE)}
        plan = fshard.make_plan(whole, mesh, units=["layers.*"], **how)
        state = fshard.init_state(fshard.shard_params(whole, plan), tx)
        number, of = (0, 1) if mesh is None or "shard" not in sizes else (mesh.get_local_rank("shard"), sizes["shard"])
        return observed(fshard.train_step(split_loss(mesh, fault), tx))(state, rows.chunk(of)[number])[1]

    found = first_difference(World(axes=sizes).run(lambda mesh: run(mesh, fault)), [run(None)])
    assert (found is None) == (not fault)
    if found is not None:
        unit, mark = MARKS[fault]
        assert (found.kind, found.unit, found.line) == ("operator", unit, LINES[mark])


def test_the_first_run_of_a_loss_that_runs_twice_does_not_count() -> None:
    """Under regathering torch.func refuses hooks, and the loss runs again: operators would come twice."""
    two = simulate(lambda mesh: ran(mesh, transformed), shard=2)
    assert len(two[0]["names"]) == len(ran(None, transformed)["names"])


def test_a_value_below_all_transforms() -> None:
    """A private name of torch would be gone (`core/func_levels.py`), or a batched value be one row."""
    names = ran(None, transformed)
    shapes = [value.shape for name, value in zip(*names.values(), strict=True) if "\tsin\t" in name]
    assert shapes == [torch.Size([ROWS, 5])]
