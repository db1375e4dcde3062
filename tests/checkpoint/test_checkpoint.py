"""Checkpoints come back: any tree, plan and number of ranks, to the bit."""

import tempfile
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import strategies
from support.examples import examples
from support.models import STRATEGIES, TREES, padding, rand, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import checkpoint, tree
from fshard.files.safetensors_file import DTYPES

SHAPES = ((), (0,), (3, 0), (1,), (7,), (2, 5))


class Kept(NamedTuple):
    """Parameters, and what every rank has besides."""

    params: Any
    extra: Any = None

    def whole(self) -> "Kept":
        """The same with whole parameters."""
        return Kept(fshard.gather_params(self.params), self.extra)


def kept(mesh: Any, params: Any, plan: dict[str, Any], extra: Any = None) -> Kept:
    """Parameters sharded by a plan, and what every rank has besides."""
    return Kept(fshard.shard_params(params, fshard.make_plan(params, mesh, **plan)), extra)


def saves(mesh: Any, dir: str, *args: Any) -> Kept:
    """Save, and return the state whole."""
    state = kept(mesh, *args)
    checkpoint.save(dir, state, 1)
    return state.whole()


def blank(x: Any) -> Any:
    """Other values of the same kinds; leaves that are tied stay so."""
    leaves, spec = tree.flatten(x)
    others = {id(leaf): torch.zeros_like(leaf) if isinstance(leaf, Tensor) else type(leaf)() for leaf in leaves}
    return tree.unflatten(spec, [others[id(leaf)] for leaf in leaves])


def restores(mesh: Any, dir: str, params: Any, plan: dict[str, Any], extra: Any = None) -> tuple[Kept, Kept]:
    """What is restored into a state of zeros, whole, and the zeros."""
    like = kept(mesh, blank(params), plan, blank(extra))
    zeros, state = like.whole(), checkpoint.restore(dir, like).whole()
    again = checkpoint.restore(dir, like, donate=True)
    assert not any(pad.any() for pad in padding(again.params))
    assert same_bits(again.whole(), state)
    return state, zeros


def as_in(expected: Any, like: Any) -> Any:
    """The values in the dtypes of a state like these."""

    def cast(x: Any, y: Any) -> Any:
        return x.to(y.dtype).resolve_conj().resolve_neg() if isinstance(x, Tensor) else x

    return tree.map(cast, expected, like)


def moves(case: Any, before: tuple[dict[str, int], Any], after: tuple[dict[str, int], Any], extra: Any = None) -> None:
    """A state that some ranks save is what other ranks restore, with other plans."""
    with tempfile.TemporaryDirectory() as dir:
        expected = simulated(saves, dir, case, before[1], extra, **before[0])[0]
        for state, like in simulated(restores, dir, case, after[1], extra, **after[0]):
            assert same_bits(state, as_in(expected, like))


@examples(30)
@given(st.data())
def test_any_tree_is_restored_on_any_ranks(data):
    """For some tree, plan and numbers of ranks, parameters would come back with other bits, or their padding with
    other values than zero."""
    params = data.draw(strategies.trees(strategies.DTYPES, bits=True), "params")
    cases = [(data.draw(strategies.meshes(5), "mesh"), data.draw(strategies.plans(params), "plan")) for _ in range(2)]
    moves(params, *cases)


@examples(20)
@given(st.data())
def test_storage_may_be_in_another_dtype(data):
    """For some policy, values in another storage dtype would not be those that `.to` gives."""
    params = data.draw(strategies.trees((torch.float64, torch.float32, torch.bfloat16, torch.int64)), "params")
    drawn = strategies.plans(params, strategies.policies())
    moves(params, *((data.draw(strategies.meshes(5), "mesh"), data.draw(drawn, "plan")) for _ in range(2)))


# Numbers of ranks, and plans for them.
PLACES: list[Any] = [
    ({"shard": 1}, STRATEGIES["ddp"]),
    ({"shard": 3}, STRATEGIES["full"]),
    ({"replicate": 2, "shard": 2}, STRATEGIES["wide_state"]),
    ({"shard": 2}, STRATEGIES["zero1"]),
    ({"replicate": 2, "shard": 2}, {**STRATEGIES["full"], "units": 9, "whole": lambda path, _: len(path) % 2 == 1}),
    ({"shard": 4}, {**STRATEGIES["keep"], "whole": lambda path, _: len(path) % 2 == 0}),
    ({"shard": 2}, STRATEGIES["zero2"]),
]


@pytest.mark.parametrize("name", [name for name in TREES if name != "dtypes"])
def test_trees_of_every_kind(name):
    """Leaves of a user's classes, or of other shapes, kinds and strides, would come back elsewhere or changed."""
    params, extra = TREES[name](), {"all": TREES["strides"](), "more": [TREES[name](), 3, 0.5, "é", True, -(2**80)]}
    for before, after in pairwise(PLACES):
        moves(params, before, after, extra)


def bits_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random bits, NaNs among them."""
    numel, generator = torch.Size(shape).numel(), torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    data = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def test_every_dtype():
    """The elements of a dtype that safetensors has would come back with other bits, as NaNs may."""
    extra = {name: [bits_of(dtype, *shape) for shape in SHAPES] for name, dtype in DTYPES.items()}
    extra["conj"] = bits_of(torch.complex64, 3).conj()
    extra["neg"] = torch.complex(*rand(2, 3, seed=1)).conj().imag
    moves({"w": torch.ones(3)}, ({"shard": 2}, {}), ({"shard": 3}, {}), extra)
    sharded = {name: x for name, x in extra.items() if name[0] in "FBC" and not name.startswith("F8")}
    moves(sharded, ({"shard": 2}, {}), ({"shard": 3}, {"units": 9}))


def saves_by_rank(mesh: Any, dir: str, extra: Any) -> None:
    """Save what differs between ranks: `extra(rank)`."""
    checkpoint.save(dir, kept(mesh, {"w": torch.ones(3)}, {}, extra(mesh.get_rank())), 1)


def restores_by_rank(mesh: Any, dir: str, extra: Any) -> Any:
    """What a rank gets back."""
    return checkpoint.restore(dir, kept(mesh, {"w": torch.ones(3)}, {}, blank(extra(0)))).extra


def positions(rank: int) -> Any:
    """What a rank may have of its own: small and large tensors, numbers and strings; and what all have."""
    generator = torch.Generator().manual_seed(rank)
    swapped = torch.arange(30_000)  # elements that are as far apart as columns of a checksum are wide
    swapped[rank], swapped[rank + 2 * 8191] = swapped[rank + 2 * 8191].clone(), swapped[rank].clone()
    return {
        "order": torch.randperm(300_000, generator=generator),
        "swapped": swapped,
        "shifted": torch.arange(8191 * 4).roll(8191 * rank),
        "shifted less": torch.arange(1009 * 8).roll(1009 * rank),
        "one": torch.tensor(rank),
        "bytes": torch.arange(9, dtype=torch.uint8)[1:] + rank,
        "position": 10 * rank,
        "name": f"rank {rank}",
        "zero": -0.0 if rank else 0.0,
        "alike": [torch.arange(5), 7, "x"],
    }


def test_what_ranks_have_of_their_own_comes_back_to_each():
    """A rank would get another rank's position in the data; or a queue of which each rank has another order would be
    taken for one that all have alike."""
    with tempfile.TemporaryDirectory() as dir:
        simulated(saves_by_rank, dir, positions, shard=3)
        for rank, extra in enumerate(simulated(restores_by_rank, dir, positions, shard=3)):
            assert same_bits(extra, positions(rank))
            assert str(extra["zero"]) == str(positions(rank)["zero"])
        names = "order|swapped|shifted|shifted less|one|bytes|position|name|zero"
        for ranks in (1, 2, 4):
            with pytest.raises(ValueError, match="leave it out") as error:
                simulated(restores_by_rank, dir, positions, shard=ranks)
            for name in names.split("|"):
                line = f"'extra.{name}': it differs between the 3 ranks that saved it, and there are {ranks} now: leave"
                assert line in str(error.value)
            assert "alike" not in str(error.value)


# Names in which parts of a path, slices of leaves, and numbers of ranks could be mistaken for each other.
NAMES = (
    "w",
    "w.w",
    "w[0:2]",
    "w[2:4]",
    "w@0",
    "w@1",
    "@0",
    "é",
    "\U0001f600",
    "a\nb",
    'a"b\\',
    "__metadata__",
    "..",
    "/",
)
SIZES = tuple({"shard": n} for n in range(1, 6))


@examples(25)
@given(st.data())
def test_any_names(data):
    """A leaf whose name looks like a part of another leaf, or like one rank's value, would be mixed up with it."""
    leaves = st.builds(rand, st.integers(0, 9), seed=st.integers(0, 99))
    nested = st.recursive(leaves, lambda inner: st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=4))
    params = {"p": data.draw(nested, "params")}
    if len({*tree.paths(params)}) < len(tree.leaves(params)):
        return  # refused: test_checkpoint_calls.py
    extra = {
        "n": data.draw(
            st.dictionaries(st.sampled_from(NAMES), st.integers() | st.floats(allow_nan=False) | st.text()), "extra"
        )
    }
    if len({*tree.paths(extra)}) < len(tree.leaves(extra)):
        return
    plans = st.sampled_from([*STRATEGIES.values()][:5])
    moves(params, *((data.draw(st.sampled_from(SIZES)), data.draw(plans)) for _ in range(2)), extra)


def test_a_name_that_means_one_ranks_value():
    """A leaf called "pos@1" and rank 1's value of a leaf "pos" would be one entry, and one of them lost."""

    def extra(rank: int) -> Any:
        return {"pos": rank, "pos@1": 5}

    with tempfile.TemporaryDirectory() as dir:
        with pytest.raises(ValueError, match=r"'extra.pos' differs between ranks, and 'extra.pos@1', .*another name"):
            simulated(saves_by_rank, dir, extra, shard=2)
        assert checkpoint.steps(dir) == []
        simulated(saves_by_rank, dir, extra, shard=1)
        assert simulated(restores_by_rank, dir, extra, shard=1) == [{"pos": 0, "pos@1": 5}]


def test_a_name_that_looks_like_a_piece():
    """A leaf "w[4:6]" and elements 4 and 5 of a leaf "w" would be one tensor of a file, and one of them lost."""
    params = {"w": rand(6, seed=1), "w[4:6]": rand(2, seed=2)}  # rank 1 of two has both
    moves(params, ({"shard": 2}, {}), ({"shard": 3}, {}))
