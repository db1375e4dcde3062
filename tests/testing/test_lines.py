"""`same_loss` finds what is forgotten, doubled or misplaced in losses on ranks, and names the line."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.split_models import MODELS
from torch import Tensor
from torch.nn import functional as F

import fshard
from fshard import all_gather, all_reduce, all_to_all, rank_and_size, reduce_scatter, shift
from fshard.testing import World, first_difference, observed, same_loss

T = "tensor"
MLP = {"up": (T, 1), "down": (T, 0)}
HEADS = {"q": (T, 1), "o": (T, 0)}
HEAD = {"head": (T, 0)}


def drawn() -> dict[str, Tensor]:
    """Leaves in general position."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"up": (4, 6), "down": (6, 4), "bias": (4,), "hidden_bias": (6,), "norm": (6,), "gate_up": (4, 12)}
    shapes |= {"head": (12, 4), "q": (4, 6, 3), "k": (2, 4, 3), "v": (2, 4, 3), "o": (6, 3, 4), "experts": (6, 4, 4)}
    return {name: torch.randn(shape, generator=draw) / 2 for name, shape in shapes.items()}


def rows(*shape: int) -> Tensor:
    """Rows of a batch."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


X, WORDS = rows(6, 4), torch.randint(12, (6, 12), generator=torch.Generator().manual_seed(2))
SEQUENCE = rows(2, 12, 4)


@dataclass(frozen=True)
class Case:
    """A loss of (p, batch, mesh, bad), wrong if `bad`, and the arguments of `same_loss`."""

    loss: Callable[..., Any]
    batch: Any = field(default_factory=lambda: X)
    how: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(batch: Any = X, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a loss into the table by its name."""

    def enter(loss: Callable[..., Any]) -> Callable[..., Any]:
        CASES[loss.__name__] = Case(loss, batch, how)
        return loss

    return enter


def mean(y: Tensor) -> Any:
    """A loss of rows."""
    return fshard.Mean(y.square().sum(), len(y))


def mlp(p: Any, x: Tensor) -> Tensor:
    """A column and a row: a summand on each rank."""
    return torch.tanh(x @ p["up"]) @ p["down"]


# the first wrong line of a case has its name as a mark; with "from" it is an input of that line


@case(leaves=MLP)
def no_sum(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The sum after a row is forgotten."""
    y = mlp(p, x)
    y = y if bad else all_reduce(y, mesh, T)
    return mean(torch.tanh(y))  # no_sum


@case(leaves=MLP)
def residual_of_a_summand(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A residual is added before the sum."""
    add = (lambda y, *_: y) if bad else all_reduce
    y = x + add(mlp(p, x), mesh, T)  # residual_of_a_summand
    y = all_reduce(y, mesh, T) if bad else y  # no other line sums
    return mean(y)


@case(leaves=MLP)
def two_sums(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A sum is taken twice."""
    y = all_reduce(mlp(p, x), mesh, T)
    y = all_reduce(y, mesh, T) if bad else y  # two_sums
    return mean(y)


@case(leaves=MLP)
def sum_after_the_nonlinearity(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The sum comes after what is not linear."""
    y = mlp(p, x)
    if not bad:
        y = all_reduce(y, mesh, T)
    y = torch.sigmoid(y)  # sum_after_the_nonlinearity
    return mean(all_reduce(y, mesh, T) if bad else y)


@case(leaves=MLP)
def bias_before_the_sum(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A bias counts once for every rank."""
    y = mlp(p, x)
    if not bad:
        y = all_reduce(y, mesh, T)
    y = y + p["bias"]  # bias_before_the_sum
    return mean(all_reduce(y, mesh, T) if bad else y)


@case(leaves=MLP)
def mean_of_summands(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A mean over ranks in place of a sum."""
    y = all_reduce(mlp(p, x), mesh, T)
    y = y / (rank_and_size(mesh, T)[1] if bad else 1)  # from mean_of_summands
    return mean(y + x)


@case(SEQUENCE, leaves={"head": (T, 0)})
def gather_of_another_dim(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Parts of the features are joined as if they were words."""
    y = torch.tanh(x @ p["head"].T)
    y = all_gather(y, mesh, T, dim=1 if bad else 2)  # gather_of_another_dim
    return mean(y.flatten(0, 1).cumsum(0))


@case(rows(6, 12, 4), leaves=MLP)
def scatter_of_another_dim(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Rows are cut where words should be."""
    y = reduce_scatter(mlp(p, x), mesh, T, dim=0 if bad else 1)  # from scatter_of_another_dim
    y = all_gather(torch.tanh(y), mesh, T, dim=1)
    return fshard.Mean(y.cumsum(1).square().sum(), 6)


@case(WORDS[:, :2], leaves=HEAD)
def softmax_of_parts(p: Any, words: Tensor, mesh: Any, bad: bool) -> Any:
    """A cross entropy over the words of a rank alone."""
    logits = p["head"].sum(1) * (1 + words[:, :1])  # (rows, part)
    if bad:
        each = logits.logsumexp(-1)  # softmax_of_parts
    else:
        top = all_reduce(logits.detach().amax(-1), mesh, T, "max")
        each = top + all_reduce((logits - top[:, None]).exp().sum(-1), mesh, T).log()
    return fshard.Mean(each.sum(), len(words))


@case(WORDS[:, :2], leaves=HEAD)
def softmax_without_a_sum(p: Any, words: Tensor, mesh: Any, bad: bool) -> Any:
    """The maximum is that of all, the sum is a rank's."""
    logits = p["head"].sum(1) * (1 + words[:, :1])
    top = all_reduce(logits.detach().amax(-1), mesh, T, "max")
    total = (logits - top[:, None]).exp().sum(-1)
    total = total if bad else all_reduce(total, mesh, T)
    each = top + total.log()  # softmax_without_a_sum
    return fshard.Mean(each.sum(), len(words))


@case(WORDS[:, :2], leaves=HEAD)
def softmax_without_a_maximum(p: Any, words: Tensor, mesh: Any, bad: bool) -> Any:
    """Each rank subtracts the largest of its own, and the sums do not fit."""
    logits = p["head"].sum(1) * (1 + words[:, :1])
    top = logits.detach().amax(-1)  # softmax_without_a_maximum
    top = top if bad else all_reduce(top, mesh, T, "max")
    each = top + all_reduce((logits - top[:, None]).exp().sum(-1), mesh, T).log()
    return fshard.Mean(each.sum(), len(words))


@case(leaves={"up": (T, 1), "norm": (T, 0), "down": (T, 0)})
def norm_of_parts(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A norm over the features of a rank."""
    y = x @ p["up"]
    scale = y.square().mean(-1, keepdim=True)
    if not bad:
        scale = all_reduce(y.square().sum(-1, keepdim=True), mesh, T) / 6
    y = y * (scale + 1).rsqrt() * p["norm"]  # norm_of_parts
    return mean(all_reduce(y @ p["down"], mesh, T))


@case(leaves=MLP, data="shard")
def count_of_one_rank(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The total is that of all ranks, the count is not."""
    y = all_reduce(mlp(p, x), mesh, T).square().sum()
    count = torch.tensor(float(len(x)), dtype=x.dtype)
    y, count = all_reduce(y, mesh, "shard"), count if bad else all_reduce(count, mesh, "shard")
    return fshard.Mean(y * 1.0, count)  # count_of_one_rank


@case(leaves={}, data="shard")
def count_of_all(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The count is that of all ranks, the total is not."""
    y = (x * p["bias"]).square().sum()  # count_of_all
    return fshard.Mean(y, 6 if bad else len(x))


@case(leaves=MLP)
def sum_of_equals(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A Sum adds what all ranks have."""
    y = all_reduce(mlp(p, x), mesh, T).square().sum()  # sum_of_equals
    return fshard.Sum(y) if bad else fshard.Mean(y, 1)


@case(leaves=MLP)
def total_divided_by_ranks(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The total is a share, the count is whole."""
    y = all_reduce(mlp(p, x), mesh, T).square().sum()
    ranks = rank_and_size(mesh, T)[1] if bad else 1
    y = y / ranks  # total_divided_by_ranks
    return fshard.Mean(y, len(x))


@case(leaves={"head": (T, 1)})
def part_of_the_total(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The total is that of some features."""
    y = (x.repeat(1, 3) @ p["head"]).square().sum()  # part_of_the_total
    return fshard.Mean(y if bad else all_reduce(y, mesh, T), len(x))


@case(WORDS, leaves=HEAD)
def look_up_without_a_mask(p: Any, words: Tensor, mesh: Any, bad: bool) -> Any:
    """Words of other ranks are looked up, too."""
    rank, ranks = rank_and_size(mesh, T)
    place = words - rank * (12 // ranks)
    mine = (place >= 0) & (place < len(p["head"]))
    x = p["head"][place.clamp(0, len(p["head"]) - 1)]  # look_up_without_a_mask
    x = x if bad else x * mine[..., None]
    return mean(torch.tanh(all_reduce(x, mesh, T)))


@case(WORDS[:, :2], leaves=HEAD)
def choice_among_parts(p: Any, words: Tensor, mesh: Any, bad: bool) -> Any:
    """Each rank chooses among its own."""
    logits = p["head"].sum(1) * (words[:, :1] - 5)
    logits = logits if bad else all_gather(logits, mesh, T, dim=1)
    best = logits.argmax(-1)  # from choice_among_parts
    weight = torch.arange(12.0, dtype=torch.float64)[best]
    return fshard.Mean((weight * all_reduce(p["head"].square().sum(), mesh, T)).sum(), len(words))


@case(SEQUENCE, leaves=HEADS)
def heads_of_another_rank(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Query heads get the head of keys of the first rank."""
    rank = 0 if bad else rank_and_size(mesh, T)[0]
    here = p["q"].shape[1]
    which = torch.arange(rank * here, rank * here + here) // 3
    q = torch.einsum("bsh,hnd->bnsd", x, p["q"])
    k, v = (torch.einsum("bsh,nhd->bnsd", x, p[n][which]) for n in "kv")  # heads_of_another_rank
    each = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mean(all_reduce(torch.einsum("bnsd,ndh->bsh", each, p["o"]), mesh, T).flatten(0, 1))


@case(leaves={"gate_up": (T, 1), "down": (T, 0)})
def gate_and_up_without_blocks(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Gate and up are cut as one matrix."""
    p = p if bad else p | {"gate_up": all_gather(p["gate_up"], mesh, T, dim=1)}
    gate, up = (x @ p["gate_up"]).chunk(2, -1)  # gate_and_up_without_blocks
    hidden = torch.sigmoid(gate) * up
    if not bad:
        hidden = hidden.tensor_split(rank_and_size(mesh, T)[1], 1)[rank_and_size(mesh, T)[0]]
    return mean(all_reduce(hidden @ p["down"], mesh, T))


@case(leaves=MLP)
def penalty_of_parts(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A penalty of a rank's part."""
    y = all_reduce(mlp(p, x), mesh, T).square().sum()
    size = p["up"].square().sum()
    size = size if bad else all_reduce(size, mesh, T)
    y = y + 0.1 * size * len(x)  # penalty_of_parts
    return fshard.Mean(y, len(x))


@case(leaves=MLP)
def penalty_of_a_whole_leaf(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A penalty of a leaf that all ranks have is summed."""
    y = all_reduce(mlp(p, x), mesh, T).square().sum()
    size = p["bias"].square().sum()
    size = all_reduce(size, mesh, T) if bad else size  # penalty_of_a_whole_leaf
    return fshard.Mean(y + 0.1 * size * len(x), len(x))


@case(leaves={"head": (T, 0)}, data="shard")
def balance_of_one_rank(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """A term of a loss has counts of one rank."""
    scores = (x @ p["up"]).softmax(-1)
    counts = scores.argmax(-1).bincount(minlength=6)
    counts = counts if bad else all_reduce(counts, mesh, "shard")
    balance = fshard.Mean((scores.sum(0) * counts / counts.sum()).sum(), len(x))  # balance_of_one_rank
    return fshard.Mean((x * p["bias"]).sum(), len(x)) + 0.1 * balance


C = "context"
QKV = rows(2, 6, 12, 4)  # (b, heads, words, d)


def cut(x: Tensor, mesh: Any) -> Tensor:
    """The words of a rank."""
    rank, ranks = rank_and_size(mesh, C)
    return x.chunk(ranks, -2)[rank]


@case(SEQUENCE, leaves={}, axes=C)
def positions_of_the_first_rank(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Each rank counts its words from 0."""
    x = cut(x, mesh) * p["bias"]
    first = 0 if bad else rank_and_size(mesh, C)[0] * x.shape[1]
    at = first + torch.arange(x.shape[1], dtype=x.dtype)  # positions_of_the_first_rank
    x = x + torch.sin(at)[:, None]
    return fshard.Mean(x.square().sum(), x.shape[1])


@case(rows(2, 6, 36, 4), leaves={}, axes=C)
def heads_of_other_dims(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Words are sent where heads should be."""
    x = cut(x, mesh)
    q, k, v = (x * p["bias"] * i for i in (1, 2, 3))
    one, two = (2, 1) if bad else (1, 2)
    q, k, v = (all_to_all(y, mesh, C, split=one, join=two) for y in (q, k, v))  # heads_of_other_dims
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = all_to_all(y, mesh, C, split=two, join=one)
    return fshard.Mean(y.square().sum(), y.shape[2])


def ring(q: Tensor, k: Tensor, v: Tensor, mesh: Any, by: int = 1, short: int = 0) -> Tensor:
    """Attention to the words of all ranks."""
    rank, ranks = rank_and_size(mesh, C)
    words = q.shape[2]
    at = rank * words + torch.arange(words)
    total, weight = torch.zeros_like(v), torch.zeros_like(v[..., :1])
    for hop in range(ranks - (short if ranks > 1 else 0)):
        came = (rank - hop) % ranks * words + torch.arange(words)
        e = (q @ k.mT).exp() * (came <= at[:, None])  # ring_one_step_short
        total, weight = total + e @ v, weight + e.sum(-1, keepdim=True)
        k, v = (shift(y, mesh, C, by) for y in (k, v))  # from ring_the_other_way
    return total / weight


@case(QKV, leaves={}, axes=C)
def ring_the_other_way(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """Keys come from the rank after this one."""
    x = cut(x, mesh)
    q, k, v = (x * p["bias"] * i for i in (1, 2, 3))
    y = ring(q, k, v, mesh, -1 if bad else 1)
    return fshard.Mean(y.square().sum(), y.shape[2])


@case(QKV, leaves={}, axes=C)
def ring_one_step_short(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The words of one rank are never seen."""
    x = cut(x, mesh)
    q, k, v = (x * p["bias"] * i for i in (1, 2, 3))
    y = ring(q, k, v, mesh, short=bad)
    return fshard.Mean(y.square().sum(), y.shape[2])


@case(SEQUENCE[0], leaves={}, axes=C)
def targets_of_another_rank(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """The next word of a part's last one is another part's first one."""
    x = cut(x * p["bias"], mesh)
    before = shift(x[-1:], mesh, C, wrap=False) if mesh is not None else torch.zeros_like(x[-1:])
    before = torch.zeros_like(before) if bad else before
    x = x - torch.cat([before, x[:-1]])  # targets_of_another_rank
    return fshard.Mean(x.square().sum(), len(x))


@case(leaves={"experts": ("expert", 0)}, data="expert")
def rows_in_the_order_of_experts(p: Any, x: Tensor, mesh: Any, bad: bool) -> Any:
    """What experts return is not put back in order."""
    chosen = (x.sum(-1) * 7).long() % 6
    order, (_, ranks) = chosen.argsort(stable=True), rank_and_size(mesh, "expert")
    counts = chosen.bincount(minlength=6)
    taken = all_to_all(counts, mesh, "expert")
    sizes = counts.view(ranks, -1).sum(1).tolist(), taken.view(ranks, -1).sum(1).tolist()
    sent = all_to_all(x[order], mesh, "expert", sizes=sizes)
    which = torch.arange(6 // ranks).repeat(ranks).repeat_interleave(taken)
    done = torch.einsum("ri,rio->ro", sent, p["experts"][which])
    back = all_to_all(done, mesh, "expert", sizes=sizes[::-1])
    back = back if bad and mesh is not None else back[order.argsort()]
    y = x * back  # rows_in_the_order_of_experts
    return mean(y)


def marked(mark: str) -> list[tuple[int, str]]:
    """The lines of this file with a mark, and their numbers."""
    lines = enumerate(Path(__file__).read_text().splitlines(), 1)
    return [(number, line.strip()) for number, line in lines if re.search(rf"  # {mark}$", line)]


def compared(name: str, bad: bool) -> None:
    """Compare the loss on ranks with that on one device."""
    one = CASES[name]

    def make(mesh: Any) -> Callable[..., Any]:
        return lambda p, x: one.loss(p, x, mesh, bad)

    same_loss(make, make(None), drawn(), one.batch, **one.how)


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_is_quiet(name: str) -> None:
    """A right loss would be called wrong, or the case be wrong for another reason."""
    compared(name, False)


@pytest.mark.parametrize("name", CASES)
def test_the_line_is_named(name: str) -> None:
    """A user would search through all of a loss."""
    with pytest.raises(AssertionError, match=r"the loss: expected .* First wrong is ") as error:
        compared(name, True)
    text = str(error.value)
    ((number, line),) = marked(name) or marked(f"from {name}")
    assert f"`{line}`" in text, text
    assert not marked(name) or f"at {__file__}:{number}: `{line}`: " in text, text


def step_of(mesh: Any, loss: Callable[..., Any], params: Any, batch: Any, how: dict[str, Any]) -> Any:
    """What a rank of an observed step has seen."""
    plan = fshard.make_plan(params, mesh, data=how.get("data", ()), **({"split": how["leaves"]} if mesh else WHOLE))
    rank, ranks = rank_and_size(mesh, how.get("data", ()))
    state = fshard.init_state(fshard.shard_params(params, plan), fshard.optim.sgd(0.1))
    return observed(fshard.train_step(loss, fshard.optim.sgd(0.1)))(state, batch.tensor_split(ranks)[rank])[1]


WHOLE: dict[str, Any] = {"params_over": (), "grads_over": (), "state_over": ()}
SPLIT = [name for name, one in CASES.items() if one.how["leaves"]]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SPLIT)
def test_first_difference_names_the_same_line(name: str, ranks: int) -> None:
    """Each of the two tools would have a search of its own."""
    one, params = CASES[name], {name: x.double() for name, x in drawn().items()}
    batch = one.batch.double() if one.batch.is_floating_point() else one.batch
    axes = dict.fromkeys([axis for axis, *_ in one.how["leaves"].values()], ranks)
    axes = {one.how["data"]: 2} | axes if "data" in one.how else axes

    def seen(mesh: Any, bad: bool) -> Any:
        return step_of(mesh, lambda p, x: one.loss(p, x, mesh, bad), params, batch, one.how)

    for bad in (False, True):
        found = first_difference(World(axes=axes).run(seen, bad), [seen(None, bad)])
        assert (found is not None) == bad, str(found)
    for number, line in marked(name):
        assert (found.line, line in found.text) == (f"{__file__}:{number}", True), str(found)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_of_the_page_are_quiet(name: str) -> None:
    """A right program has values that no kind fits (row numbers, maxima): the search would end in these."""
    model = MODELS[name]
    data = ("shard", model.axis) if model.differ else () if "dropout" in name else ("shard",)
    how: dict[str, Any] = {"leaves": model.split, "data": data, "axes": model.axis}
    params, batch = model.params(), model.batch(12, 3)
    same_loss(lambda mesh: model.loss(mesh, data), model.loss(None, data), params, batch, **how)
    ranks = World(axes={"shard": 2, model.axis: 3} if data else {model.axis: 3}).run(
        lambda mesh: step_of(mesh, model.loss(mesh, data), params, batch, how)
    )
    found = first_difference(ranks, [step_of(None, model.loss(None, data), params, batch, how)])
    assert found is None, str(found)


def test_there_are_enough_cases() -> None:
    """A case would be left out without a word, or few have their line as the first one."""
    assert len(CASES) == 30
    assert sum(len(marked(name)) for name in CASES) == 26
