"""AdamW in 8 bits: the paper's algorithm and numbers, restated in slow Python; whose blocks lie where; what it costs."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from models import WORLDS, rand, same_bits
from torch import Tensor
from worlds import simulated

import fshard
from fshard import optim, quantised, tree
from fshard.optim import adamw_8bit, apply_updates, gather_state

SHAPES = {"w": (5, 3), "blocks": [{"a": (3, 4), "b": (5,)}, {"a": (2, 3, 2), "b": (1,)}], "s": (), "long": (1101,)}
HOWS = ("sharded", "units", "flat", "leaf")
MOMENTS = (("mu", True), ("nu", False))  # name, signed
DEFAULTS: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
HYPERPARAMS: dict[str, dict[str, Any]] = {
    "small blocks": {"lr": 0.1, "block": 4},  # more of them in a leaf than are worked on at a time
    "odd blocks": {"lr": 0.01, "b1": 0.8, "b2": 0.95, "eps": 1e-3, "weight_decay": 0.0, "block": 7},
    "no first moment": {"lr": 0.3, "b1": 0.0, "b2": 0.5, "eps": 0.1, "weight_decay": 0.5, "block": 64},
    "one each, a schedule": {"lr": lambda count: 0.1 / (count + 1), "block": 1},
    "paper's": {"lr": 0.001, "block": 256},
}


def tree_of(seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """A tree of normal numbers, many magnitudes of them in each block."""
    seeds = itertools.count(100 * seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return (rand(*shape, seed=next(seeds)) * 10 ** (2 * rand(*shape, seed=next(seeds)))).to(dtype)

    return tree.map_tops(normal, tuple, SHAPES)


def run(mesh: Any, how: str, dtype: torch.dtype, steps: int, hyperparams: Any) -> list[tuple[Any, dict[str, Tensor]]]:
    """Whole parameters and state before and after every step, over one of the partitions."""
    params, *grads = (tree_of(i, dtype) for i in range(steps + 1))
    tx, block, place = adamw_8bit(**hyperparams), hyperparams["block"], lambda x: x
    if how in ("sharded", "units"):
        plan = fshard.make_plan(params, mesh, units=["blocks.*"] if how == "sharded" else 12, block=block)
        place = lambda x: fshard.shard_params(x, plan)  # noqa: E731
    elif how != "plain":
        tx = fshard.zero(tx, mesh, how, bucket=20, block=block)
    params = place(params)
    state = tx.init(params)
    found = [(fshard.gather_params(params), gather_state(state))]
    for g in grads:
        params, state = tx.step(place(g), state, params)
        found.append((fshard.gather_params(params), gather_state(state)))
    return found


def paper_value(byte: int, signed: bool) -> float:
    """What a byte means in figure 2: a sign; a zero bit for each decade; a one; the rest a fraction of 0.1 to 1."""
    bits = 7 if signed else 8
    negative, magnitude = divmod(byte, 2**bits)
    if magnitude == 0:
        return float(negative)  # minus zero is 1
    if magnitude == 1 and not signed:
        return 1.0  # and so is what would be an eighth decade
    length = magnitude.bit_length() - 1
    fraction = (magnitude - 2**length + 0.5) / 2**length
    return (-1) ** negative * 10.0 ** (length - bits + 1) * (0.1 + 0.9 * fraction)


def paper_book(signed: bool) -> np.ndarray:
    """All values, from zero up, then the negative ones."""
    return np.array(sorted((paper_value(byte, signed) for byte in range(256)), key=lambda x: (x < 0, x)))


BOOKS = {name: paper_book(signed) for name, signed in MOMENTS}


def paper_step(p: Any, g: Any, old: dict[str, Any], t: int, hp: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Procedure of section 2: moments in 8 bits to 32, Adam's update with decoupled decay; element by element."""
    lr = hp["lr"](t - 1) if callable(hp["lr"]) else hp["lr"]
    changed, new = [], {"mu": [], "nu": []}
    for i in range(len(p)):
        mu, nu = (BOOKS[m][old[m][0][i]] * old[m][1][i // hp["block"]] for m in ("mu", "nu"))
        mu = hp["b1"] * mu + (1 - hp["b1"]) * g[i]
        nu = hp["b2"] * nu + (1 - hp["b2"]) * g[i] ** 2
        step = mu / (1 - hp["b1"] ** t) / (math.sqrt(nu / (1 - hp["b2"] ** t)) + hp["eps"])
        changed.append(p[i] - lr * (step + hp["weight_decay"] * p[i]))
        new["mu"].append(mu)
        new["nu"].append(nu)
    return np.array(changed), {m: np.array(x) for m, x in new.items()}


def check_rounded(x: Any, codes: Any, scales: Any, book: Any, block: int) -> None:
    """Scales are the blocks' largest magnitudes; no value of the book is nearer to an element than the one taken."""
    top = [abs(x[i : i + block]).max() for i in range(0, len(x), block)]
    np.testing.assert_allclose(scales, top, rtol=1e-5)
    each = np.repeat(scales, block)[: len(x), None]
    taken, nearest = abs(book[codes] * each[:, 0] - x), abs(book * each - x[:, None]).min(1)
    assert (taken <= nearest + 1e-6 * abs(x) + 1e-8 * each[:, 0]).all()


def flat(x: Tensor) -> Any:
    """An array of one dimension."""
    return x.reshape(-1).numpy()


@pytest.mark.parametrize("name", HYPERPARAMS)
@pytest.mark.parametrize(("world", "how"), [("1", "plain"), ("3", "sharded"), ("2x2", "flat")])
def test_as_the_paper(world, how, name):
    """Every step from where the last has ended: parameters, scales, and codes."""
    hp, (replicate, shard) = DEFAULTS | HYPERPARAMS[name], WORLDS[world]
    found = simulated(run, how, torch.float64, 3, hp, replicate=replicate, shard=shard)[0]
    for t, ((before, old), (after, new)) in enumerate(itertools.pairwise(found), 1):
        assert new["count"] == t
        names = tree.paths(tree.flatten(before)[1])
        for path, p, g, q in zip(names, *map(tree.leaves, (before, tree_of(t), after)), strict=True):
            held = {m: (flat(old[f"{m}.codes.{path}"]), flat(old[f"{m}.scales.{path}"])) for m, _ in MOMENTS}
            want, moments = paper_step(flat(p), flat(g), held, t, hp)
            np.testing.assert_allclose(flat(q) - flat(p), want - flat(p), rtol=2e-5, atol=1e-9)
            for m, x in moments.items():
                codes, scales = flat(new[f"{m}.codes.{path}"]), flat(new[f"{m}.scales.{path}"])
                check_rounded(x, codes, scales, BOOKS[m], hp["block"])


@pytest.mark.parametrize(("name", "signed"), MOMENTS)
def test_the_code_book_is_the_papers(name, signed):
    """256 different values that a byte stands for, code 0 for zero, then rising; of the signed, all but 1 in pairs."""
    book = quantised.code_book(signed)
    assert (book.dtype, book.unique().numel(), book[0].item(), book.max().item()) == (torch.float32, 256, 0.0, 1.0)
    np.testing.assert_allclose(book, BOOKS[name], rtol=1e-6)
    if signed:
        positive, negative = book[1:129], book[129:]
        assert positive.min() > 0
        assert torch.equal(positive[:-1], -negative.flip(0))
    else:
        assert (book.diff() > 0).all()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed):
    """By brute force, in float64, on both sides of every middle; values of the book come back as they are."""
    book = quantised.code_book(signed)
    rising = book.sort().values.double()
    middles = (rising[1:] + rising[:-1]) / 2
    gaps = rising.diff() / 2
    xs = torch.cat([rising, middles - 0.01 * gaps, middles + 0.01 * gaps, torch.linspace(-signed, 1, 1000).double()])
    for scale in (1.0, 2.0**-100, 3e30):
        rows = torch.stack([xs, torch.ones_like(xs)], 1).float() * scale  # a one keeps the scale
        codes, scales = quantised.encode(rows, book)
        assert scales.eq(scale).all()
        assert book[codes[:, 1].int()].eq(1).all()
        error = (book[codes[:, 0].int()].double() - xs).abs()
        assert (error <= (book.double() - xs[:, None]).abs().min(1).values * (1 + 1e-4)).all()
        got = quantised.decode(codes, scales, book)[: len(rising), 0]
        torch.testing.assert_close(got, rows[: len(rising), 0], rtol=1e-6, atol=0)


def held_blocks(mesh: Any, how: str, block: int, shapes: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """The leaf and number of every block this rank holds. Elements say which they are, in rows as they lie."""
    sizes, axes = [math.prod(shape) for shape in shapes], tuple(fshard.comm.axis_sizes(mesh))
    params = [
        torch.arange(1.0, n + 1).reshape(s) + 1000 * i for i, (n, s) in enumerate(zip(sizes, shapes, strict=True))
    ]
    if how == "flat":  # this state begins as a copy of the parameters
        tx = fshard.zero(optim.schedule_free_adamw(0.1), mesh, over=axes, bucket=20, block=block)
        rows = tx.init(params).inner.z.tensors
    else:
        over = dict.fromkeys(("params_over", "grads_over", "state_over"), axes)
        plan = fshard.make_plan(params, mesh, units=None if how == "sharded" else 20, block=block, **over)
        rows = fshard.shard_params(params, plan).tensors
    found = []
    for row in rows:
        assert len(row) % block == 0
        for chunk in row.long().split(block):
            if numbers := chunk[chunk > 0].sub(1).tolist():
                leaf, first = divmod(numbers[0], 1000)
                whole = range(first, min(first + block, sizes[leaf]))
                assert first % block == 0
                assert numbers == chunk[: len(numbers)].sub(1).tolist() == [1000 * leaf + i for i in whole]
                found.append((leaf, first // block))
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("how", ["sharded", "units", "flat"])
def test_no_block_is_cut(how, world):
    """Every block lies whole, aligned and alone on one rank, for uneven leaves: looked up in what the ranks hold."""
    replicate, shard = WORLDS[world]
    for block, shapes in itertools.product((1, 3, 4, 7, 16), ([(5, 3), (), (1,), (7,), (30,)], [(0,), (2,)], [(61,)])):
        found = simulated(held_blocks, how, block, shapes, replicate=replicate, shard=shard)
        want = {(i, k) for i, shape in enumerate(shapes) for k in range(-(-math.prod(shape) // block))}
        assert Counter(itertools.chain(*found)) == dict.fromkeys(want, 1)


@pytest.mark.parametrize("block", [4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_do_not_matter(dtype, block):
    """The very bits of a plain tree's parameters and state, in every partition of every world, on every rank."""
    hyperparams = {"lr": 0.1, "block": block}
    want = run(None, "plain", dtype, 2, hyperparams)
    for (replicate, shard), how in itertools.product(WORLDS.values(), HOWS):
        for found in simulated(run, how, dtype, 2, hyperparams, replicate=replicate, shard=shard):
            assert same_bits(found, want)


def test_blocks_that_would_be_cut_are_refused():
    """With the way out: by a plan's blocks that are none of the optimizer's, in a Sharded and in zero; one is 0."""
    params = {"a": torch.ones(5), "b": torch.ones(9)}
    for block, good in ((1, False), (6, False), (4, True), (8, True)):
        sharded = fshard.shard_params(params, fshard.make_plan(params, block=block))
        zero = fshard.zero(adamw_8bit(0.1, block=4), block=block)
        for tx, x in ((adamw_8bit(0.1, block=4), sharded), (zero, params)):
            if good:
                assert tx.init(x)
            else:
                with pytest.raises(ValueError, match=r"leaf 'b': a block of 4 .* make_plan or zero and block=4"):
                    tx.init(x)
    with pytest.raises(ValueError, match="block=0"):
        fshard.make_plan(params, block=0)


def test_a_block_has_elements():
    """Else an error that says so, as make_plan's."""
    for block in (0, -4):
        with pytest.raises(ValueError, match=f"block={block}"):
            adamw_8bit(0.1, block=block).init(torch.ones(8))


@pytest.mark.parametrize(("made", "used", "numel"), [(4, 8, 8), (8, 4, 8), (2, 4, 8), (4, 4, 7), (256, 256, 300)])
def test_a_state_of_other_blocks_is_refused(made, used, numel):
    """Made with blocks of another size, or for a leaf of another one: never read as if it were of these."""
    state = adamw_8bit(0.1, block=made).init(torch.ones(numel))
    x = torch.ones(8)
    with pytest.raises(ValueError, match="adamw_8bit"):
        adamw_8bit(0.1, block=used).update(x, state, x)


@pytest.mark.parametrize("block", [16, 64, 256])
def test_two_bytes_an_element(block):
    """And a scale in float32 for each block of each moment."""

    def held(mesh: Any) -> int:
        params = {"a": torch.ones(1024, 3), "b": torch.ones(4096)}
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, block=block))
        state = adamw_8bit(0.1, block=block).init(sharded)
        return sum(x.nbytes for x in tree.leaves((state.mu, state.nu)))

    for shard in (1, 4):
        assert sum(simulated(held, shard=shard)) / 7168 == pytest.approx(2 + 8 / block, rel=0.01)
