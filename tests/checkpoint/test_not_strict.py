"""`restore(strict=False)`: a new head on a trained backbone, and whatever else one of the two lacks."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import rand, same_bits
from support.worlds import gloo, simulated

import fshard
from fshard import checkpoint, optim, tree

OPTIMIZERS = {"sgd": optim.sgd(0.1, momentum=0.9), "adam": optim.adamw(0.1)}


def backbone(seed: int) -> list[dict[str, torch.Tensor]]:
    """Layers of uneven sizes."""
    return [{"w": rand(3, 3, seed=seed + i), "b": rand(3, seed=seed + 5 + i)} for i in range(2)]


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """The head is the last matrix."""
    for layer in params["body"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return ((x @ params[[*params][-1]]) ** 2).mean()


def state_of(mesh: Any, params: Any, name: str, extra: Any = None, **plan: Any) -> fshard.TrainState:
    """The state after one step."""
    tx = OPTIMIZERS[name]
    state = fshard.init_state(fshard.shard_params(params, fshard.make_plan(params, mesh, **plan)), tx, extra=extra)
    return fshard.train_step(loss, tx)(state, rand(4, 3, seed=mesh.get_rank()))[0]


def save(mesh: Any, folder: str, name: str) -> Any:
    """A state with the head `old`."""
    state = state_of(mesh, {"body": backbone(0), "old": rand(3, 2, seed=20)}, name, extra={"seen": 7})
    checkpoint.save(folder, state, 1)
    return [fshard.gather_params(state.params), optim.state.gather_state(state.opt_state)]


def restored(mesh: Any, folder: str, name: str, donate: bool) -> Any:
    """The state restored into one with the head `new`: whole, before and after; and the losses of two steps."""
    like = state_of(mesh, {"body": backbone(40), "new": rand(3, 4, seed=60)}, name, units=[], extra={"more": 3})
    begun = [fshard.gather_params(like.params), optim.state.gather_state(like.opt_state)]
    state = checkpoint.restore(folder, like, strict=False, donate=donate)
    whole = [fshard.gather_params(state.params), optim.state.gather_state(state.opt_state)]
    assert state.extra == {"more": 3}
    losses = []
    for _ in range(2):
        state, metrics = fshard.train_step(loss, OPTIMIZERS[name], donate=donate)(state, rand(4, 3, seed=1))
        losses.append(metrics["loss"].item())
    assert losses[1] < losses[0]
    return begun, whole


def quietly(mesh: Any, *args: Any) -> Any:
    """The same in a process of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return restored(mesh, *args)


def check(saved: Any, found: list[Any]) -> None:
    """What both have is the saved one, and what the checkpoint lacks is of `like`."""
    for begun, whole in found:
        for old, before, after in zip(saved, begun, whole, strict=True):
            was, mine = (dict(zip(tree.paths(x), tree.leaves(x), strict=True)) for x in (old, before))
            for path, leaf in zip(tree.paths(after), tree.leaves(after), strict=True):
                assert (path not in was) == path.endswith("new")
                assert same_bits(leaf, was.get(path, mine.get(path))), path


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_new_head_on_a_trained_backbone(tmp_path: Path, name: str, ranks: int, donate: bool) -> None:
    """A head of zeros, or of the memory's old values, would train from there; one rank says what was not restored."""
    saved = simulated(save, str(tmp_path), name, shard=2)[0]
    with pytest.warns(UserWarning, match=r"restore\(strict=False\) of step 1") as told:
        found = simulated(restored, str(tmp_path), name, donate, shard=ranks)
    (text,) = (str(x.message) for x in told)
    assert re.search(r"kept as in `like`: .*'extra.more', .*'params.new'", text)
    assert re.search(r"not read: .*'extra.seen', .*'params.old'", text)
    assert "new leaves share the restored 'opt_state.count', as if" in text
    check(saved, found)


def test_on_processes(tmp_path: Path) -> None:
    """The same over gloo."""
    check(gloo(save, str(tmp_path), "adam", shard=3)[0], gloo(quietly, str(tmp_path), "adam", True, shard=2))


def test_what_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    """A leaf on meta has no values, other shapes are no missing names, and another model has nothing in common."""
    checkpoint.save(tmp_path, {"w": torch.ones(2), "n": 1}, 1)
    like = {"w": torch.zeros(2), "new": torch.zeros(1, device="meta")}
    with pytest.raises(ValueError, match="'new': the checkpoint lacks it, and the one of `like` is on meta"):
        checkpoint.restore(tmp_path, like, strict=False)
    with pytest.raises(ValueError, match=re.escape("'w': expected a tensor [3], got one [2]")):
        checkpoint.restore(tmp_path, {"w": torch.zeros(3), "new": torch.zeros(1)}, strict=False)
    with pytest.raises(ValueError, match="it lacks 1 names: 'v'"):
        checkpoint.restore(tmp_path, {"v": torch.zeros(2)}, strict=False)
    with pytest.raises(ValueError, match="it lacks 1 names: 'v'"):
        checkpoint.restore(tmp_path, {"w": torch.zeros(2), "n": 0, "v": torch.zeros(2)})
    with pytest.raises(TypeError, match="strict=1"):
        checkpoint.restore(tmp_path, {"w": torch.zeros(2), "n": 0}, strict=1)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.restore(tmp_path, {"w": torch.zeros(2), "n": 0}, strict=False)["n"] == 1
