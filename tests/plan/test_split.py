"""Leaves of which the ranks along an axis have different parts: how they are cut, and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from support.worlds import gloo
from torch import Tensor

import fshard
from fshard import optim, tree
from fshard.comm.ranks import MismatchError
from fshard.testing import World

SHAPES = [(6,), (5, 4), (4, 6, 3), (1, 2), (0, 3), (8, 1)]
HOW = [("tensor", 0), ("tensor", -1), ("tensor", 1, 2), ("tensor", 0, 2)]


def there(mesh: Any, shape: tuple[int, ...], how: tuple[Any, ...], plan: dict[str, Any]) -> Any:
    """A leaf after shard and gather, as a loss sees it, its own elements, and a rank's state as a file has them."""
    whole = {"x": torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape), "y": torch.ones(3).double()}
    params = fshard.shard_params(whole, fshard.make_plan(whole, mesh, split={"x": how}, data="shard", **plan))
    seen = list[Tensor]()

    def loss(p: Any) -> Tensor:
        seen.append(p["x"].detach().clone())
        return p["x"].sum() + p["y"].sum()

    fshard.evaluate(loss)(params)
    return fshard.gather_params(params)["x"], seen[0], mesh.get_local_rank("tensor"), fshard.state_dict(params)["x"]


PLANS = [{}, {"params_over": ()}, dict.fromkeys(("params_over", "grads_over", "state_over"), ("shard", "tensor"))]


@pytest.mark.parametrize("plan", PLANS, ids=["full", "zero 2", "over both"])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("how", HOW)
def test_parts_are_those_of_chunk(how: tuple[Any, ...], parts: int, plan: dict[str, Any]) -> None:
    """A part with other rows than the page says would be a word looked up in the wrong place."""
    blocks, dim = (*how, 1)[2], how[1]
    for shape in (shape for shape in SHAPES if -len(shape) <= dim < len(shape) and shape[dim] % blocks == 0):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        each = [block.split(max(1, -(-block.shape[dim] // parts)), dim) for block in whole.chunk(blocks, dim)]
        for gathered, seen, rank, saved in World(axes={"tensor": parts, "shard": 2}).run(there, shape, how, plan):
            assert torch.equal(gathered, whole)
            assert torch.equal(saved, whole)
            part = [x[rank] if rank < len(x) else x[0].narrow(dim, 0, 0) for x in each]
            assert torch.equal(seen, torch.cat(part, dim))


def test_a_split_over_an_axis_of_one_rank_is_none() -> None:
    """A leaf would lie in another order, and a run on one rank have other bits than before."""

    def described(mesh: Any, split: Any) -> str:
        params = {"w": torch.ones(4, 4), "b": torch.ones(4)}
        return (
            fshard.make_plan(params, mesh, split=split)
            .describe()
            .replace("data=('shard',)", "data=('shard', 'tensor')")
        )

    world = World(axes={"shard": 2, "tensor": 1})
    assert world.run(described, {"w": ("tensor", 1)}) == world.run(described, None)


WRONG = {
    "no such axis": ({"split": {"w": ("tenso", 0)}}, r"split\['w'\].*no axis 'tenso', it has 'shard', 'tensor'"),
    "no such dim": ({"split": {"w": ("tensor", 2)}}, r"leaf 'w' of shape \[4, 6\] has no dim 2"),
    "no blocks": ({"split": {"w": ("tensor", 1, 4)}}, "dim 1 is not 4 blocks of one size"),
    "nothing": ({"split": {"v": ("tensor", 1)}}, "the pattern 'v' matches nothing"),
    "two ways": ({"split": {"w": ("tensor", 1), "*": ("tensor", 0)}}, "leaf 'w' .* as another pattern says"),
    "both": (
        {"split": {"w": ("tensor", 1)}, "state_over": ("shard", "tensor")},
        "Say along which axes they do: data=",
    ),
    "no such data": ({"data": "date"}, "data='date': the mesh has no axis 'date'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_split_is_said(name: str) -> None:
    """A leaf that is split otherwise than meant would train another model."""
    arguments, words = WRONG[name]
    params = {"w": torch.ones(4, 6), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=words):
        World(axes={"shard": 2, "tensor": 2}).run(lambda mesh: fshard.make_plan(params, mesh, **arguments))


def test_a_split_that_is_no_pair_is_said() -> None:
    """A word in place of a pair would be taken apart letter by letter."""
    for how in ("tensor", ("tensor",), ("tensor", "0"), ("tensor", True)):
        with pytest.raises(TypeError, match=r"split\['w'\].*: expected \(axis, dim\), or \(axis, dim, blocks\)"):
            World(axes={"shard": 1, "tensor": 2}).run(
                lambda mesh, how=how: fshard.make_plan({"w": torch.ones(4)}, mesh, split={"w": how})
            )


def trained(mesh: Any, other_rows: bool = False, tx: Any = None, then: Any = None) -> Any:
    """Two steps of a column and row linear map; along "tensor" ranks have equal batches, or the same rows turned."""
    generator = torch.Generator().manual_seed(0)
    whole = {"up": torch.randn(4, 6, generator=generator), "down": torch.randn(6, 4, generator=generator)}
    split = {"up": ("tensor", 1), "down": ("tensor", 0)}
    plan, tx = fshard.make_plan(whole, mesh, split=split), tx or optim.adamw(1e-2)

    def loss(p: Any, x: Tensor) -> fshard.Mean:
        out = fshard.all_reduce(torch.tanh(x @ p["up"]) @ p["down"], mesh, "tensor")
        return fshard.Mean((out - x).square().sum(), len(x))

    state, step = fshard.init_state(fshard.shard_params(whole, plan), tx), fshard.train_step(loss, tx, clip_norm=0.1)
    for i in range(2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * i + mesh.get_local_rank(0)))
        state, metrics = step(state, x.flip(0) if other_rows and mesh.get_local_rank("tensor") else x)
    return then(state) if then else (fshard.gather_params(state.params), metrics)


def test_batches_that_differ_along_an_axis_without_data_are_said() -> None:
    """Ranks with other rows compute summands of different values, and nothing else would tell."""
    with pytest.raises(MismatchError, match=r"expected the same on all ranks along 'tensor'.*make_plan\(data=\)"):
        World(axes={"shard": 2, "tensor": 2}).run(trained, True)


def over_replicate(mesh: Any) -> Any:
    """Loss, gradients and norm of a column and row linear map over an axis that is called "replicate"."""
    whole = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    plan = fshard.make_plan(whole, mesh, split={"up": ("replicate", 1), "down": ("replicate", 0)})
    params = fshard.shard_params(whole, plan)

    def loss(p: Any, x: Tensor) -> fshard.Mean:
        return fshard.Mean(fshard.all_reduce(torch.tanh(x @ p["up"]) @ p["down"], mesh, "replicate").sum(), len(x))

    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(mesh.get_local_rank("shard")))
    value, grads = fshard.value_and_grad(loss, reduction="exact")(params, x)
    return value, fshard.gather_params(grads), optim.global_norm(grads)


def test_processes_have_the_bits_of_simulated_ranks() -> None:
    """What is simulated would not be what runs."""
    real = gloo(over_replicate, shard=2, replicate=2)
    simulated = World(2, 2).run(over_replicate)
    for x, y in zip(tree.leaves(real), tree.leaves(simulated), strict=True):
        assert torch.equal(x, y)


REFUSED = {
    "gradients": (
        None,
        lambda state: fshard.reduction.unreduced({}, state.params),
        "unreduced: params: leaves are split",
    ),
    "8 bits": (lambda: optim.adamw_8bit(1e-2), None, "leaf 'up' is split over tensor along dim 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_read_elements_in_another_order_is_refused(name: str) -> None:
    """Elements in the order of another split would be other elements."""
    tx, then, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        World(axes={"shard": 1, "tensor": 2}).run(lambda mesh: trained(mesh, tx=tx and tx(), then=then))


def test_ranks_along_an_axis_without_data_draw_the_same() -> None:
    """Masks of dropout that differ along "tensor" would train another model; equal ones along "shard" would, too."""

    def drawn(mesh: Any, **plan: Any) -> list[float]:
        whole, tx, masks = {"w": torch.ones(4)}, optim.sgd(0.1), list[Tensor]()
        state = fshard.init_state(fshard.shard_params(whole, fshard.make_plan(whole, mesh, **plan)), tx)

        def loss(p: Any) -> Tensor:
            masks.append(torch.rand(3))
            return p["w"].sum()

        fshard.train_step(lambda p, _: loss(p), tx)(state, torch.ones(1))
        return masks[0].tolist()

    sizes = {"shard": 2, "tensor": 2}
    (a, b, c, d), (e, f, g, h) = (
        World(axes=sizes).run(lambda mesh, x=x: drawn(mesh, **x)) for x in ({"data": "shard"}, {})
    )
    assert a == b != c == d
    assert all(x != y for x, y in itertools.combinations((e, f, g, h), 2))
