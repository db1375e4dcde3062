"""What a rank holds: copies in host memory of its own part and a neighbour's, of a state that all ranks agree on."""

from typing import Any

import pytest
import torch
from support.survivors import KINDS, axes_of, new_state

import fshard
from fshard import elastic, tree
from fshard.comm.ranks import tally
from fshard.testing import World, simulate


def own_bytes(mesh: Any, kind: str) -> tuple[int, int, int]:
    """Bytes of a rank's part, of what it holds, and of what it sends as copies."""
    params = {"w": torch.ones(64, 65), "b": torch.ones(99)}
    plan = fshard.make_plan(params, mesh, **KINDS[kind].plan)
    state = fshard.init_state(fshard.shard_params(params, plan), fshard.optim.sgd(0.1, momentum=0.9))
    own = sum(x.nbytes for x in tree.leaves((state.params, state.opt_state)) if x.dim())
    with tally() as sent:
        kept = elastic.keep(state, 1)
    return (
        own,
        sum(x.nbytes for _, _, x in kept.parts()),
        sum(call.nbytes for call in sent.select("all_to_all", "copies")),
    )


def test_what_other_ranks_have_is_not_sent() -> None:
    """Replicas would be sent and held twice, or a part that no other rank has not be sent."""
    for kind, sends in {"ddp": 0, "hsdp": 0, "zero3": 1, "zero1": 1 / 5, "state over all": 1 / 3}.items():
        for own, held, sent in World(axes=axes_of(kind, 4)).run(own_bytes, kind):
            assert sent == pytest.approx(sends * own, rel=0.02, abs=1), kind
            assert held == pytest.approx((1 + sends) * own, rel=0.02), kind


def test_a_kept_state_does_not_change_with_the_live_one() -> None:
    """A step that donates its state would write to what was kept."""

    def on_rank(mesh: Any) -> None:
        for axis in (None, *axes_of("two axes", 4)):
            state = new_state(mesh, "two axes")
            kept = elastic.keep({"train": state, "plain": (plain := torch.ones(3))}, 1, axis=axis)
            before = [x.clone() for _, _, x in kept.parts()]
            plain.zero_()
            tree.map(lambda x: x.zero_(), (state.params, state.opt_state))
            assert all(torch.equal(x, y) for x, (_, _, y) in zip(before, kept.parts(), strict=True))
            assert sum(float(x.abs().sum()) for x in before) > 1

    World(axes=axes_of("two axes", 4)).run(on_rank)


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (
            lambda rank: {"position": rank},
            r"the state differs between ranks: rank 0 has 'position' = 0; rank 1",
        ),
        (lambda rank: {"name": f"rank {rank // 2}"}, r"'name' = 'rank 0'; rank 2 has 'name' = 'rank 1'"),
        (lambda rank: {"seen": torch.full((3,), rank)}, r"'seen' with bits"),
        (lambda rank: {"seen": torch.zeros(2 + rank)}, r"'seen' torch.float32 \[2\]"),
    ],
)
def test_values_that_differ_by_rank_are_named(mine: Any, text: str) -> None:
    """The values of one rank would be given to all in silence."""

    def on_rank(mesh: Any) -> None:
        with pytest.raises(fshard.MismatchError, match=text):
            elastic.keep({"train": new_state(mesh, "zero3"), **mine(mesh.get_rank())}, 1)
        with pytest.raises(fshard.MismatchError, match=text):
            elastic.replan({"train": new_state(mesh, "zero3"), **mine(mesh.get_rank())}, new_state(mesh, "zero3"))

    simulate(on_rank, shard=3)


def test_wrong_calls_are_errors_on_all_ranks() -> None:
    """One rank would have an error, and the others wait for it; or copies lie at the rank itself."""

    def on_rank(mesh: Any) -> None:
        state, bad = new_state(mesh, "zero3"), mesh.get_rank() == 1
        kept = elastic.keep(state, 1)
        for call, text in (
            (lambda: elastic.keep(state, -1), "keep: step=-1: expected the number of a step, at least 0"),
            (lambda: elastic.keep(state, 1, round=-1 if bad else 0), "keep: round=-1: expected the number of a round"),
            (lambda: elastic.keep(state, 1, distance=3), "keep: distance=3: expected no multiple of 3"),
            (lambda: elastic.keep(state, 1, axis="data"), "the mesh has no axis 'data'"),
            (lambda: elastic.keep(state, 2 if bad else 1), "rank 0 has keep: step=1, .*; rank 1 has keep: step=2"),
            (
                lambda: elastic.keep({"x": torch.ones(2, device="meta")}, 1, mesh=mesh),
                "leaf 'x': expected a tensor with",
            ),
            (lambda: elastic.keep({"x": object()}, 1, mesh=mesh), "keep: leaf 'x': expected a tensor, a number or a"),
        ):
            with pytest.raises((ValueError, TypeError, fshard.MismatchError), match=text):
                call()
        assert elastic.last_whole([kept], mesh) == (0, 1)

    simulate(on_rank, shard=3)
    assert repr(elastic.keep({"w": torch.ones(2)}, 3)) == "Kept(key=(0, 3))"
