"""States move between plans, strategies, splits and numbers of ranks with the bits that checkpoints have."""

from typing import Any

import pytest
import torch
from support.models import same_bits
from support.survivors import KINDS, NOTE, TX, axes_of, batch_of, data_rank, loss_of, params, whole

import fshard
from fshard import checkpoint, elastic, tree
from fshard.elastic import Kept, keeping
from fshard.testing import World, simulate

PLANS = [kind for kind in KINDS if kind not in ("donated", "in the backward", "by leaf", "jit")]


def trained(mesh: Any, kind: str, tx: str, steps: int = 1) -> fshard.TrainState:
    """A state of a plan and an optimizer after a step."""
    plan = fshard.make_plan(params(), mesh, units=["blocks.*"], **KINDS[kind].plan)
    state = fshard.init_state(fshard.shard_params(params(), plan), TX[tx], seed=7)
    step = fshard.train_step(loss_of(mesh, kind), TX[tx])
    for k in range(steps):
        state, _ = step(state, batch_of(k, *data_rank(mesh, kind)))
    return state


def on_meta(state: Any) -> Any:
    return tree.map(lambda x: x.to("meta"), state)


@pytest.mark.parametrize("ranks", range(1, 7))
@pytest.mark.parametrize("other", PLANS)
@pytest.mark.parametrize("kind", PLANS)
def test_between_all_plans_and_numbers_of_ranks(
    kind: str, other: str, ranks: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element would come from another place than a checkpoint's, or not at all."""
    tx = ("adamw", "sgd", "muon")[(PLANS.index(kind) + PLANS.index(other)) % 3]

    def first(mesh: Any) -> Kept:
        state = trained(mesh, kind, tx)
        checkpoint.save(tmp_path, state, 1)
        return elastic.keep({"train": state, **NOTE}, 1)

    monkeypatch.setattr(keeping, "_BATCH", (1 << 26, 16)[ranks % 2])  # all in one message, or a few leaves in each
    kept = World(axes=axes_of(kind, ranks)).run(first)

    def then(mesh: Any) -> bool:
        held = kept[mesh.get_rank() :: mesh.size()]
        like = trained(mesh, other, tx, 0)
        got = elastic.move(held, {"train": on_meta(like), "tag": "", "n": 0})
        expected = checkpoint.restore(tmp_path, on_meta(like))
        return same_bits(got.pop("train"), expected) and got == NOTE

    number = 1 + (ranks + PLANS.index(kind) + PLANS.index(other)) % 6
    assert all(World(axes=axes_of(other, number)).run(then))
    assert all(World(axes=axes_of(other, ranks)).run(then))


@pytest.mark.parametrize("kind", PLANS)
def test_a_live_state_is_resharded_on_its_ranks(kind: str) -> None:
    """An evaluator's state would share memory with the trainer's, or have other values."""

    def on_rank(mesh: Any) -> None:
        state = trained(mesh, kind, "adamw")
        before = whole(state)
        like = trained(mesh, "split" if "tensor" in KINDS[kind].axes else "ddp", "adamw", 0)
        got = elastic.replan(state, like, donate=True)
        assert same_bits(whole(got), before)
        tree.map(lambda x: x.zero_(), got.params)
        assert same_bits(whole(state), before)
        with pytest.raises(fshard.DonatedError):
            fshard.gather_params(like.params)
        half = tree.map(lambda x: x.to(torch.bfloat16), state.params)
        got = elastic.replan(state.params, half)
        assert same_bits(fshard.gather_params(got), fshard.gather_params(half))

    World(axes=axes_of(kind, 4)).run(on_rank)


def test_some_ranks_give_and_others_take() -> None:
    """Spare ranks, new ranks and an evaluator's ranks would wait for each other."""
    state = {"w": torch.arange(35.0).view(7, 5), "b": torch.arange(5.0)}

    def on_rank(mesh: Any) -> Any:
        mine = mesh["shard"]
        plan = fshard.make_plan(state, mine, strategy="zero3")
        params = {"params": fshard.shard_params(state, plan), "epoch": 3}
        if mesh.get_local_rank("part") == 0:
            return elastic.move([elastic.keep(params, 1)], None, mesh=mesh)
        like = {"params": tree.map(torch.zeros_like, params["params"]), "epoch": 0}
        got = elastic.move([], like, mesh=mesh)
        return fshard.gather_params(got["params"]), got["epoch"]

    *givers, one, other = World(axes={"part": 2, "shard": 2}).run(on_rank)
    assert givers == [None, None]
    assert same_bits(one, (state, 3))
    assert same_bits(other, (state, 3))


def test_ranks_that_hold_nothing() -> None:
    """Ranks without any state would go on with zeros."""

    def on_rank(mesh: Any) -> None:
        assert elastic.last_whole([], mesh) is None
        with pytest.raises(elastic.LostError, match="no rank holds a state: begin with a new one"):
            elastic.move([], {"w": torch.zeros(3)}, mesh=mesh)

    simulate(on_rank, shard=3)
    on_rank(None)


def test_parts_of_two_rounds_are_never_mixed() -> None:
    """A rank that was taken for dead would mix its own step 12 with that of the others."""

    def kept(mesh: Any, value: float, round: int) -> Kept:
        whole = {"w": torch.full((7,), value)}
        return elastic.keep(fshard.shard_params(whole, fshard.make_plan(whole, mesh)), 12, round=round)

    old = World(3).run(kept, 1.0, 0)
    new = World(2).run(kept, 2.0, 1)

    def moved(mesh: Any, held: list[list[Kept]]) -> Any:
        like = fshard.shard_params({"w": torch.zeros(7)}, fshard.make_plan({"w": torch.zeros(7)}, mesh))
        got = elastic.move(held[mesh.get_rank()], like)
        return fshard.gather_params(got)["w"].unique().tolist()

    assert World(3).run(moved, [[old[0]], [new[0]], [new[1]]]) == [[2.0]] * 3
    assert World(3).run(moved, [[old[0], new[1]], [old[1]], [old[2]]]) == [[2.0]] * 3
    new = World(4).run(kept, 2.0, 1)
    with pytest.raises(elastic.LostError, match=r"of step 12 \(round 1\), no rank has"):
        World(3).run(moved, [[old[0]], [new[0]], [new[0]]])


def test_differences_from_like_are_errors_on_all_ranks() -> None:
    """A state would be made with a leaf of zeros, or one rank wait for others with an error."""
    state = {"w": torch.ones(3), "i": torch.ones(2, dtype=torch.int64), "n": 1, "t": torch.ones(())}

    def on_rank(mesh: Any) -> None:
        kept = elastic.keep(state, 7, mesh=mesh)
        assert elastic.move([kept], {**state, "w": torch.zeros(3, dtype=torch.float64)}, mesh=mesh)["w"].sum() == 3
        for change, text in (
            (
                {"w": torch.ones(4)},
                r"step 7 differs from `like`: 'w': expected a tensor \[4\], got one \[3\]",
            ),
            ({"i": torch.ones(2)}, r"'i': expected torch.float32, got torch.int64"),
            ({"n": torch.ones(())}, r"'n': expected a tensor, got a number or a string"),
            ({"t": 0.0}, r"'t': expected a number or a string, got a tensor"),
            ({"more": 0.0}, r"it lacks 1 names: 'more'"),
        ):
            with pytest.raises((ValueError, fshard.MismatchError), match=text):
                elastic.move([kept], {**state, **(change if mesh.get_rank() == 1 else {})}, mesh=mesh)
        with pytest.raises(TypeError, match=r"move: held=.*: expected a list of what `keep` returned"):
            elastic.move(kept, state, mesh=mesh)  # type: ignore[arg-type]

    simulate(on_rank, shard=2)
