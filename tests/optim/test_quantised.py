"""AdamW in 8 bits: the paper's algorithm and numbers in slow Python; where blocks lie; memory; training."""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.models import WORLDS, rand, same_bits
from support.worlds import simulated

import fshard
from fshard import optim
from fshard.comm.mesh import axis_sizes
from fshard.core import tree
from fshard.layout.pieces import Parts, clear_padding_
from fshard.optim import adam_8bit, adamw_8bit
from fshard.optim.state import gather_state

SHAPES = {"w": (5, 3), "blocks": [{"a": (3, 4), "b": (5,)}, {"a": (2, 3, 2), "b": (1,)}], "s": (), "long": (1101,)}
PLACES = ("plain", 1, 1), ("sharded", 1, 3), ("flat", 2, 2)
HOWS = ("sharded", "units", "flat", "leaf")
DEFAULTS: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
HYPERPARAMS: dict[str, dict[str, Any]] = {
    "small blocks": {"lr": 0.1, "block": 4},  # more of them in a leaf than are worked on at a time
    "odd blocks": {"lr": 0.01, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.0, "block": 7},
    "no first moment": {"lr": 0.3, "b1": 0.0, "b2": 0.5, "eps": 0.1, "weight_decay": 0.5, "block": 64},
    "one each, a schedule": {"lr": lambda count: 0.1 / (count + 1), "block": 1},
    "paper's": {"lr": 0.001, "block": 256},
}


def tree_of(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A tree of numbers of many magnitudes."""
    seeds = itertools.count(100 * seed)
    numbers = lambda shape: rand(*shape, seed=next(seeds)) * 10 ** rand(*shape, seed=next(seeds))  # noqa: E731
    return tree.map_tops(lambda shape: numbers(shape).to(dtype), tuple, SHAPES)


def parted(mesh: Any, how: str, like: Any, block: int, **hyperparams: Any) -> tuple[Any, Any]:
    """The optimizer over one of the partitions, and a function that places trees for it."""
    tx = adamw_8bit(**{"lr": 0.1, "block": block} | hyperparams)
    if how not in ("sharded", "units"):
        return (tx if how == "plain" else fshard.zero(tx, mesh, how, bucket=8 * 20, block=block)), lambda x: x
    plan = fshard.make_plan(like, mesh, units=None if how == "sharded" else 20, block=block)
    return tx, lambda x: fshard.shard_params(x, plan)


def run(mesh: Any, how: str, dtype: torch.dtype, steps: int, hyperparams: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Whole parameters and state before and after every step; gaps between leaves and units must stay zero."""
    params, *grads = (tree_of(i, dtype) for i in range(steps + 1))
    tx, place = parted(mesh, how, params, **hyperparams)
    found = [(place(params), tx.init(place(params)))]
    for g in grads:
        found.append(tx.step(place(g), *found[-1][::-1]))
    assert all(same_bits(x, clear_padding_(tree.map(torch.clone, x))) for x in tree.nodes(found, Parts))
    return [(fshard.gather_params(params), gather_state(state)) for params, state in found]


def paper_value(byte: int, signed: bool) -> float:
    """The value of a byte in the paper's figure 2: sign; a zero bit per decade; a one; a fraction from 0.1 to 1."""
    bits = 7 if signed else 8
    negative, magnitude = divmod(byte, 2**bits)
    if magnitude == 0 or magnitude + signed == 1:  # minus zero is 1, and so is what would be an eighth decade
        return float(negative or magnitude)
    length = magnitude.bit_length() - 1
    return (-1) ** negative * 10.0 ** (length - bits + 1) * (0.1 + 0.9 * ((magnitude + 0.5) / 2**length - 1))


BOOKS = {  # from zero up, then the negative ones
    name: np.array(sorted((paper_value(byte, signed) for byte in range(256)), key=lambda x: (x < 0, x)))
    for name, signed in (("mu", True), ("nu", False))
}


def paper_step(p: Any, g: Any, old: dict[str, Any], t: int, hp: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The paper's section 2: moments from 8 to 32 bits, then Adam with decoupled weight decay, element by element."""
    lr = hp["lr"](t - 1) if callable(hp["lr"]) else hp["lr"]
    change, new = np.empty_like(p), {"mu": np.empty_like(p), "nu": np.empty_like(p)}
    for i in range(len(p)):
        mu, nu = (BOOKS[m][old[m][0][i]] * old[m][1][i // hp["block"]] for m in new)
        new["mu"][i] = mu = hp["b1"] * mu + (1 - hp["b1"]) * g[i]
        new["nu"][i] = nu = hp["b2"] * nu + (1 - hp["b2"]) * g[i] ** 2
        step = mu / (1 - hp["b1"] ** t) / (math.sqrt(nu / (1 - hp["b2"] ** t)) + hp["eps"])
        change[i] = -lr * (step + hp["weight_decay"] * p[i])
    return change, new


@pytest.mark.parametrize(("place", "name"), [*itertools.product(PLACES, HYPERPARAMS)])
def test_as_the_paper(place, name):
    """Every step has the paper's parameters, scales and codes: otherwise published results for 8-bit Adam would not
    hold."""
    hp, (how, replicate, shard) = DEFAULTS | HYPERPARAMS[name], place
    found = simulated(run, how, torch.float64, 3, hp, replicate=replicate, shard=shard)[0]
    for t, ((before, old), (after, new)) in enumerate(itertools.pairwise(found), 1):
        assert new["count"] == t
        leaves = zip(tree.paths(before), *map(tree.leaves, (before, tree_of(t), after)), strict=True)
        for path, *tensors in leaves:
            (p, g, q), keys = (x.reshape(-1).numpy() for x in tensors), (f"codes.{path}", f"scales.{path}")
            held, kept = ({m: [s[f"{m}.{k}"].reshape(-1).numpy() for k in keys] for m in BOOKS} for s in (old, new))
            change, moments = paper_step(p, g, held, t, hp)
            np.testing.assert_allclose(q - p, change, rtol=2e-5, atol=1e-8)
            for (m, x), (codes, scales) in zip(moments.items(), kept.values(), strict=True):
                top = np.maximum.reduceat(abs(x), range(0, len(x), hp["block"]))
                each = scales.repeat(hp["block"])[: len(x)]
                np.testing.assert_allclose(scales, top, rtol=1e-5, atol=1e-7)
                far = abs(BOOKS[m] * each[:, None] - x[:, None])
                far[(x > 0) & (m == "nu"), 0] = np.inf  # a second moment above zero stays so
                nearest = far.min(1)
                assert (abs(BOOKS[m][codes] * each - x) <= nearest + 1e-6 * abs(x) + 1e-8 * each).all()


@pytest.mark.parametrize(("moment", "signed"), [("mu", True), ("nu", False)])
def test_the_code_book_is_the_papers(moment, signed):
    """The code book is the paper's and encoding takes the nearest code: otherwise moments would lose more precision
    than they must."""
    book = adam_8bit.code_book(signed)
    np.testing.assert_allclose(book, BOOKS[moment], rtol=1e-6)
    assert (book.unique().numel(), book.min() < 0, book[0], book.max()) == (256, signed, 0, 1)
    rising = book.sort().values.double()
    middles, off = (rising[1:] + rising[:-1]) / 2, 0.01 * rising.diff()
    xs = torch.cat([rising, middles - off, middles + off, torch.linspace(-signed, 1, 1000)])
    distances = (book.double() - xs[:, None]).abs()
    for scale in (1.0, 2.0**-100, 3e30):
        rows = torch.stack([xs, torch.ones_like(xs)], 1).float() * scale  # a one keeps the scale
        codes, scales = adam_8bit.encode(rows, book)
        assert (distances.gather(1, codes.long()[:, :1])[:, 0] <= distances.min(1).values * (1 + 1e-4)).all()
        got = adam_8bit.decode(codes, scales, book)
        torch.testing.assert_close(got[:256, 0], rows[:256, 0], rtol=1e-6, atol=0)
        assert torch.equal(got[:, 1], rows[:, 1])


def held_blocks(mesh: Any, how: str, block: int, shapes: list[tuple[int, ...]]) -> list[tuple[int, float]]:
    """The leaf and number of every block this rank holds, read from elements that encode their position."""
    axes = tuple(axis_sizes(mesh))
    params = [torch.arange(1.0, 1 + math.prod(s)).reshape(s) + 1000 * i for i, s in enumerate(shapes)]
    if how == "flat":  # the state is a copy of the parameters
        kept = optim.Transform(lambda xs: tree.map(torch.clone, xs), lambda *args: args[:2], elementwise=True)
        zero = fshard.zero(kept, mesh, over=axes, bucket=8 * 20, block=block)
        rows = zero.init(params).inner.tensors
    else:
        over = dict.fromkeys(("params_over", "grads_over", "state_over"), axes)
        plan = fshard.make_plan(params, mesh, units=20 if how == "units" else None, block=block, **over)
        rows = fshard.shard_params(params, plan).tensors
    found = []
    for chunk in itertools.chain(*(row.long().split(block) for row in rows)):
        if numbers := chunk[chunk > 0].sub(1).tolist():
            leaf, first = divmod(numbers[0], 1000)
            want = [1000 * leaf + i for i in range(first, min(first + block, params[leaf].numel()))]
            assert chunk[: len(numbers)].sub(1).tolist() == numbers == want
            found.append((leaf, first / block))  # a block that begins elsewhere has no whole number
    return found


@pytest.mark.parametrize(("how", "world"), [*itertools.product(("sharded", "units", "flat"), WORLDS)])
def test_no_block_is_cut(how, world):
    """Every block lies whole and aligned on one rank: otherwise the block's scale would depend on the number of
    ranks."""
    replicate, shard = WORLDS[world]
    for block, shapes in itertools.product((1, 3, 4, 7, 16), ([(5, 3), (), (1,), (7,), (30,)], [(0,), (2,)], [(61,)])):
        found = simulated(held_blocks, how, block, shapes, replicate=replicate, shard=shard)
        want = [(i, k) for i, shape in enumerate(shapes) for k in range(-(-math.prod(shape) // block))]
        assert sorted(itertools.chain(*found)) == want


@pytest.mark.parametrize(("block", "dtype"), [*itertools.product((4, 7), (torch.float32, torch.bfloat16))])
def test_ranks_do_not_matter(block, dtype):
    """Every partition and world gives the bits of one device: otherwise 8-bit training would depend on the hardware."""
    want = run(None, "plain", dtype, 2, {"block": block})
    for (replicate, shard), how in itertools.product(WORLDS.values(), HOWS):
        for found in simulated(run, how, dtype, 2, {"block": block}, replicate=replicate, shard=shard):
            assert same_bits(found, want)


@pytest.mark.parametrize(("block", "good"), [(1, False), (6, False), (8, True), (16, True)])
def test_blocks_that_would_be_cut_are_refused(block, good):
    """A plan whose blocks do not fit the optimizer's is an error with the remedy; without it blocks would be cut."""
    params, tx = {"a": torch.ones(3), "b": torch.ones(9)}, adamw_8bit(0.1, block=8)
    sharded = fshard.shard_params(params, fshard.make_plan(params, block=block))
    refused = pytest.raises(ValueError, match=r"leaf 'b': a block of 8 .* make_plan or zero and block=8")
    for some, x in ((tx, sharded), (fshard.zero(tx, block=block), params)):
        with nullcontext() if good else refused:
            assert gather_state(some.init(x))["mu.scales.b"].shape == (2,)


def test_a_block_has_elements():
    """A block size of 0 is an error that says so; without it a user would meet a division by zero."""
    with pytest.raises(ValueError, match="block=0"):
        adamw_8bit(0.1, block=0).init(torch.ones(8))


@pytest.mark.parametrize(("block", "numel"), [(8, 8), (1, 8), (5, 8), (4, 7)])
def test_a_state_of_other_blocks_is_refused(block, numel):
    """A state with other blocks or for another leaf is an error; without it codes would be read with wrong scales."""
    state, x = adamw_8bit(0.1, block=block).init(torch.ones(numel)), torch.ones(8)
    with pytest.raises(ValueError, match="adamw_8bit"):
        adamw_8bit(0.1, block=4).update(x, state, x)


@pytest.mark.parametrize("how", HOWS)
def test_two_bytes_an_element(how):
    """The state takes two bytes an element and a float32 per block and moment: otherwise 8 bits would not save
    memory."""

    def held(mesh: Any) -> int:
        params = {"a": torch.ones(1024, 3), "b": torch.ones(4096)}
        tx, place = parted(mesh, how, params, block)
        return sum(x.nbytes for x in tree.leaves(tx.init(place(params)))) - 4  # of the count

    for shard, block in itertools.product((1, 4), (16, 64, 256)):
        assert sum(simulated(held, shard=shard)) == 7168 * (2 + 8 / block)


def test_zeros_and_nan_stay_in_their_blocks():
    """Zeros and NaN affect their own block alone: otherwise one bad block would spoil the whole leaf."""
    tx, p, g = adamw_8bit(0.1, weight_decay=0.0, block=4), rand(12, seed=1), rand(12, seed=2)
    grads = [torch.where(torch.arange(12) // 4 == 1, x, g) for x in (g, 0 * g, math.nan * g)]
    good, zero, bad = ({"p": q} | gather_state(state) for q, state in (tx.step(x, tx.init(p), p) for x in grads))
    for key in good.keys() - {"count"}:
        first, *others = (x[key].view(3, -1) for x in (good, zero, bad))
        assert all(torch.equal(first[::2], x[::2]) for x in others)
        assert torch.equal(others[0][1], p[4:8] if key == "p" else torch.zeros_like(first[1]))
        assert "codes" in key or others[1][1].isnan().all()


@pytest.mark.parametrize("how", ["plain", *HOWS])
def test_what_overflowed_is_skipped(how):
    """A gradient that overflowed changes no bit of the state: otherwise one overflow would destroy the moments."""

    def skips(mesh: Any, bad: float, donate: bool) -> None:
        (tx, place), start = parted(mesh, how, tree_of(0), 4), tree_of(0)
        good, wrong = place(start), place(tree.map(lambda x: torch.full_like(x, bad), start))
        params, state = tx.step(place(tree_of(1)), tx.init(good), good)
        before, want = tree.map(torch.clone, ((params, state), tx.step(good, state, params)))
        params, state = tx.step(wrong, state, params, found_inf=torch.ones(()), donate=donate)
        assert same_bits((params, state), before)
        assert same_bits(tx.step(good, state, params, found_inf=torch.zeros(()), donate=donate), want)

    for bad, donate, shard in itertools.product((math.nan, math.inf), (False, True), (1, 3)):
        simulated(skips, bad, donate, shard=shard)


def test_it_trains():
    """Least squares with noise ends within 2 % of AdamW's loss: otherwise 8 bits would cost users accuracy."""
    x, noise, rate = rand(200, 24, seed=1), 0.1 * rand(200, 12, seed=2), optim.schedules.cosine(0.1, 200)
    y = x @ rand(24, 12, seed=3) + noise

    def fitted(mesh: Any, tx: Any) -> float:
        w, state = 0 * x.T @ y, tx.init(x.T @ y)
        for _ in range(200):
            w, state = tx.step(x.T @ (x @ w - y) / 100, state, w)
        return (x @ w - y).square().mean().item()

    made = optim.sgd(0.0), optim.adamw(rate), adamw_8bit(rate, block=16), adamw_8bit(rate)
    start, best, *found = (simulated(fitted, tx, shard=1)[0] for tx in made)
    assert best < 1e-3 * start
    assert found == pytest.approx([best] * 2, rel=0.02)


def test_small_gradients_do_not_explode():
    """A small gradient beside a large one makes no huge step: otherwise a second moment rounded to 0 would divide by
    eps."""
    tx, p = adamw_8bit(0.1, weight_decay=0.0), torch.zeros(4)
    _, state = tx.update(torch.tensor([1.0, 3e-4, 0.0, 0.0]), tx.init(p), p)
    assert tx.update(torch.tensor([1.0, 0.0, 0.0, 0.0]), state, p)[0].abs().max() < 1
