"""A checkpoint of leaves that are split, restored by another split, or by none: every element where it was."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fshard
from fshard import checkpoint, optim, tree
from fshard.testing import World

COLUMNS = {"**.up": ("tensor", 1), "**.down": ("tensor", 0), "**.bias": ("tensor", 0)}
ROWS = {"**.up": ("tensor", 0), "**.down": ("tensor", 1), "**.cube": ("tensor", 2)}
PACKED = {"**.up": ("tensor", 1, 2), "**.cube": ("tensor", 1, 3), "embed": ("tensor", 0)}
BOTH = dict.fromkeys(("params_over", "grads_over", "state_over"), ("shard", "tensor")) | {"data": "shard"}
# by name: the axes, and arguments of `make_plan`
WAYS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({"shard": 1, "tensor": 1}, {"split": COLUMNS}),
    "whole": ({"shard": 4, "tensor": 1}, {}),
    "columns": ({"shard": 2, "tensor": 2}, {"split": COLUMNS}),
    "columns by 3, over both": ({"tensor": 3, "shard": 2}, {"split": COLUMNS} | BOTH),
    "rows": ({"shard": 1, "tensor": 4}, {"split": ROWS, "params_over": ()}),
    "packed": ({"shard": 2, "tensor": 2}, {"split": PACKED, "whole": "**.bias"}),
    "packed by 3": ({"shard": 1, "tensor": 3}, {"split": PACKED}),
}
OPTIMIZERS = {"adamw": lambda: optim.adamw(1e-2), "muon": lambda: optim.muon(1e-2)}


def whole(seed: int) -> Any:
    """Parameters whose dims divide by few numbers."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"up": (5, 8), "bias": (8,), "down": (8, 5), "cube": (3, 6, 2)}
    layers = [{name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()} for _ in range(2)]
    return {"embed": torch.randn(7, 5, generator=draw), "layers": layers}


def state_of(mesh: Any, plan: dict[str, Any], tx: Any, seed: int) -> fshard.TrainState:
    """A state whose optimizer has made an update with gradients of random numbers."""
    params = whole(seed)
    made = fshard.make_plan(params, mesh, units=["layers.*"], **plan)
    state = fshard.init_state(fshard.shard_params(params, made), tx)
    if not seed:
        return state

    def loss(p: Any, _: Tensor) -> fshard.Mean:
        return fshard.Mean(torch.stack([x.sin().sum() for x in tree.leaves(p)]).sum(), 1)

    return fshard.train_step(loss, tx)(state, torch.zeros(1))[0]


def bits(state: fshard.TrainState) -> list[Tensor]:
    """The whole leaves of a state."""
    return tree.leaves(fshard.testing.whole_state(state))


def saved(mesh: Any, name: str, tx: Any, folder: str, seed: int = 1) -> list[Tensor]:
    """Save a state and its parameters; returns the whole leaves."""
    state = state_of(mesh, WAYS[name][1], tx, seed)
    checkpoint.save(folder, state, 3)
    checkpoint.save_safetensors(folder, state.params)
    return bits(state)


def restored(mesh: Any, name: str, tx: Any, folder: str, donate: bool) -> tuple[list[Tensor], Any]:
    """Restore into another state; returns its whole leaves, and the parameters that are read from safetensors."""
    like = state_of(mesh, WAYS[name][1], tx, 0)
    params = checkpoint.load_safetensors(f"{folder}/model.safetensors", like.params.plan)
    return bits(checkpoint.restore(folder, like, donate=donate)), fshard.gather_params(params)


@pytest.mark.sample(15)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", WAYS)
def test_a_checkpoint_is_read_by_every_split(name: str, optimizer: str, tmp_path: Path) -> None:
    """Elements in the order of the split that saved them would be other elements to the one that restores."""
    make, folder = OPTIMIZERS[optimizer], str(tmp_path)
    expected = World(axes=WAYS[name][0]).run(saved, name, make(), folder)[0]
    files = load_file(f"{folder}/model.safetensors")
    for donate, other in zip(itertools.cycle([False, True]), WAYS):
        for got, params in World(axes=WAYS[other][0]).run(restored, other, make(), folder, donate):
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x, y)
            for path, x in zip(tree.paths(tree.flatten(params)[1]), tree.leaves(params), strict=True):
                assert torch.equal(x, files[path])


@pytest.mark.slow
def test_what_inspects_and_compares_knows_the_order(tmp_path: Path) -> None:
    """Two equal checkpoints would differ, and other ones be equal: who looks at them would not trust a run."""
    tx = OPTIMIZERS["adamw"]()
    for name in ("whole", "columns", "packed by 3"):
        World(axes=WAYS[name][0]).run(saved, name, tx, str(tmp_path / name), 0)
    for name in ("columns", "packed by 3"):
        done = subprocess.run(
            [sys.executable, "-m", "fshard", "inspect", tmp_path / name, "--verify"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        done = subprocess.run(
            [sys.executable, "-m", "fshard", "inspect", tmp_path / "whole", "--against", tmp_path / name],
            capture_output=True,
            text=True,
        )
        assert "0 of " in done.stdout, done.stdout + done.stderr
