"""What ranks send for split leaves, in bytes: activations along the axis of the split, leaves along the other one."""

import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from support.split_models import MODELS, PAGE, WORDS, drawn, page
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard
from fshard.testing import World

ROWS, LENGTH, WIDTH, SHARDS, BYTES = 4, 8, 128, 2, 8  # b, s, h, ranks along "shard", of an element
ACTIVATIONS = ROWS * LENGTH * WIDTH * BYTES  # 32 KiB: up to 16 KiB an all-reduce sends whole tensors
SPLIT = {"q": (WIDTH, 4, 8), "o": (4, 8, WIDTH), "up": (WIDTH, 64), "up_bias": (64,), "down": (64, WIDTH)}
WHOLE = {"norm1": (WIDTH,), "norm2": (WIDTH,), "k": (WIDTH, 8), "v": (WIDTH, 8), "bias": (WIDTH,)}


def numel(shapes: dict[str, tuple[int, ...]]) -> int:
    """Elements of leaves."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def sent(mesh: Any, by_sequence: bool, again: bool = False) -> Counter[tuple[str, ...]]:
    """Bytes that a rank sends for one gradient of two layers, by axis, label and kind."""
    it, draw = page(), drawn(0)
    layers = [{name: draw(*shape) for name, shape in (SPLIT | WHOLE).items()} for _ in range(2)]
    ends = {"embed": draw(WORDS, WIDTH), "head": draw(WORDS, WIDTH), "positions": draw(LENGTH, WIDTH)}
    whole = {**ends, "norm": draw(WIDTH), "layers": layers}
    plan = fshard.make_plan(whole, mesh, units=["layers.*"], split=MODELS["replicated"].split)
    block = it.sequence_block if by_sequence else it.block
    block = partial(checkpoint, block, use_reentrant=False) if again else block
    loss = it.model(mesh, block, by_sequence)
    words = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    params = fshard.shard_params(whole, plan)
    with fshard.collectives.tally() as calls:
        fshard.value_and_grad(loss)(params, words)
    return by_axis(calls)


def by_axis(calls: Any) -> Counter[tuple[str, ...]]:
    """Bytes by axis, label and kind."""
    counter = Counter[tuple[str, ...]]()
    for call in calls:
        counter[call.axis, call.label, call.kind] += call.nbytes
    return counter


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("by_sequence", [False, True])
def test_a_block_sends_eight_times_its_activations(by_sequence: bool, again: bool, t: int) -> None:
    """A collective too many would make each layer slower, and no value would tell."""
    part = ACTIVATIONS * (t - 1) // t  # what an all-gather or a reduce-scatter sends
    statistics = ROWS * LENGTH * BYTES * (t - 1)  # a number of each word, to each of the others
    if by_sequence:
        expected = {
            # two layers; two in the forward, and the backward of the two others; a checkpoint leaves the last one out
            ("block", "all_gather"): 2 * (4 + 2 * again) * part,
            ("block", "reduce_scatter"): 2 * (4 + again) * part,
            ("embed", "reduce_scatter"): part,
            ("embed", "all_gather"): part,
            ("head", "all_gather"): part,
            ("head", "reduce_scatter"): part,
            ("head", "all_reduce"): 5 * statistics,
        }
    else:
        expected = {
            ("block", "all_reduce"): 2 * (8 + 2 * again) * part,
            ("embed", "all_reduce"): 2 * 2 * part,
            ("head", "all_reduce"): 5 * statistics,  # the largest; the sum and the logit; gradients of these two
        }
    for counter in World(axes={"shard": SHARDS, "tensor": t}).run(sent, by_sequence, again):
        labels = ("block", "embed", "head")
        got = {key[1:]: x for key, x in counter.items() if key[0] == "tensor" and key[1] in labels}
        assert got == expected


@pytest.mark.parametrize("t", [2, 4])
def test_a_part_of_a_leaf_is_sent_along_the_other_axis(t: int) -> None:
    """Whole leaves would be gathered where a part is needed, or a part's gradients be summed over the ranks of it."""
    part, whole = (n * BYTES // SHARDS for n in (numel(SPLIT) // t, numel(WHOLE)))  # of a rank
    for counter in World(axes={"shard": SHARDS, "tensor": t}).run(sent, False):
        for unit in ("layers.0", "layers.1"):
            assert counter["shard", unit, "all_gather"] == 2 * (SHARDS - 1) * (part + whole)  # and in the backward
            assert counter["shard", unit, "reduce_scatter"] == (SHARDS - 1) * (part + whole)
            assert counter["tensor", unit, "all_reduce"] == (t - 1) * whole  # small: sent whole to each rank


def sent_to_experts(mesh: Any) -> Counter[tuple[str, ...]]:
    """Bytes for one gradient of experts that get equally many rows."""
    it, draw = page(), drawn(0)
    shapes = {"up": (it.EXPERTS, WIDTH, 8), "down": (it.EXPERTS, 8, WIDTH), "scale": (WIDTH,)}
    whole = {name: draw(*shape) for name, shape in shapes.items()}
    whole |= {"router": 100 * torch.eye(WIDTH, it.EXPERTS).double(), "lean": torch.zeros(it.EXPERTS).double()}
    whole["scale"] = torch.ones(WIDTH).double()
    split = {"up": ("expert", 0), "down": ("expert", 0)}
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, split=split, data=("shard", "expert")))
    rows = torch.eye(it.EXPERTS, WIDTH).double().repeat(LENGTH, 1)  # row i to expert i
    with fshard.collectives.tally() as calls:
        fshard.value_and_grad(lambda p, x: it.experts(p, x * p["scale"], mesh)[0].square().sum())(params, rows)
    return by_axis(calls)


@pytest.mark.parametrize("e", [2, 4])
def test_experts_send_each_row_there_and_back(e: int) -> None:
    """A row of this rank's own experts would be sent, or a row sent to ranks that do not have its expert."""
    experts = page().EXPERTS
    for counter in World(axes={"shard": 1, "expert": e}).run(sent_to_experts):
        rows = experts * LENGTH * (e - 1) // e  # those of other ranks' experts
        assert counter["expert", "rows", "all_to_all"] == 4 * rows * WIDTH * BYTES  # there, back, and gradients of both
        assert counter["expert", "counts", "all_to_all"] == 8 * experts * (e - 1) // e


def kept(attend: Any, ranks: int = 2, words: int = 256) -> float:
    """What the graph of one attention keeps, in units of one rank's q."""

    def of_a_rank(mesh: Any) -> float:
        q, k, v = (drawn(i)(1, 4, words // ranks, 16).requires_grad_() for i in range(3))
        storages = dict[int, int]()

        def noted(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda x: x):
            y = attend(q, k, v, mesh)
        y.sum().backward()
        return sum(storages.values()) / q.nbytes

    return max(World(axes={"context": ranks}).run(of_a_rank))


@pytest.mark.parametrize("name", ["ring", "ring_again", "gathered", "by_heads"])
def test_what_attention_keeps(name: str) -> None:
    """The page would promise other memory."""
    (told,) = re.findall(rf"^\| `{name}` \| ([\d.]+)", PAGE.read_text(), re.MULTILINE)
    assert round(kept(getattr(page(), name)), 1) == float(told)
