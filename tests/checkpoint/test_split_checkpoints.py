"""A checkpoint of leaves that are split, restored by another split, or by none: every element where it was."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import optimizers
from torch import Tensor

import fshard
from fshard import checkpoint, optim, tree
from fshard.checkpoint.comparing import compare
from fshard.checkpoint.inspecting import verify
from fshard.files.directory import dir_at
from fshard.files.index import read_index, sealed
from fshard.files.safetensors_file import CHUNK
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
    made = fshard.make_plan(params, mesh, units=["layers.*"], block=4, **plan)
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
            for path, x in zip(tree.paths(params), tree.leaves(params), strict=True):
                assert torch.equal(x, files[path])


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


# by name: ways of `WAYS` in which leaves are split along other dims, by blocks, or not at all
OF_OWNERS = ["columns", "rows", "packed", "packed by 3", "whole", "in host memory"]
WAYS["in host memory"] = WAYS["packed"][0], WAYS["packed"][1] | {"offload": "**.up"}


# What needs the leaves as matrices, or in blocks of elements: the ways that it refuses, by the text of the error.
NO_MATRICES = {*OF_OWNERS} - {"columns", "whole"}
REFUSED = dict.fromkeys(("adafactor", "whole_leaves-adafactor"), NO_MATRICES) | {"adamw_8bit": {*OF_OWNERS} - {"whole"}}


def takes(name: str, way: str) -> bool:
    """Whether an optimizer takes leaves that are split in this way; the others say that they do not."""
    return way not in REFUSED.get(name, ())


def checked(mesh: Any, way: str, tx: Any, folder: str, again: str) -> list[Tensor]:
    """Restore, and save what was restored; returns its whole leaves."""
    state = checkpoint.restore(folder, state_of(mesh, WAYS[way][1], tx, 0))
    checkpoint.save(again, state, 3)
    return bits(state)


@pytest.mark.law
@pytest.mark.parametrize("way", OF_OWNERS)
@pytest.mark.parametrize("name", [x for x in optimizers.TRANSFORMS | optimizers.OWNERS if x != "from_torch-Muon"])
def test_every_state_is_read_by_every_split(name: str, way: str, tmp_path: Path) -> None:
    """Training would go on with another leaf's columns of the moments, and nothing would say so."""
    make = (optimizers.TRANSFORMS | optimizers.OWNERS)[name]
    if not takes(name, way):
        with pytest.raises(ValueError, match=r"optim\.adafactor: leaf .* split|adamw_8bit: leaf .* split"):
            World(axes=WAYS[way][0]).run(saved, way, make(), str(tmp_path))
        return
    expected = World(axes=WAYS[way][0]).run(saved, way, make(), str(tmp_path / "a"))[0]
    after = OF_OWNERS.index(way) + 1
    for other in [x for x in OF_OWNERS[after:] + OF_OWNERS[:after] if takes(name, x)][:3]:
        folders = [tmp_path / "a", tmp_path / other]
        for got in World(axes=WAYS[other][0]).run(checked, other, make(), str(tmp_path / "a"), str(folders[1])):
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x, y), other
        assert not [line.text for line in compare(dir_at(folders[0]), 3, dir_at(folders[1]), 3) if line.is_fault], other


def of_version_2(folder: Path) -> None:
    """Make a checkpoint one of version 2, which gave every leaf of a split the order of its parts."""
    file = folder / "step-000000000003" / "index.json"
    raw = json.loads(file.read_bytes())
    del raw["checksum"]
    orders = {name.removeprefix("params."): x["order"] for name, x in raw["leaves"].items() if "order" in x}
    for name, x in raw["leaves"].items():
        for end, order in orders.items():
            if name.endswith("." + end):
                x["order"] = order
    assert raw["version"] == 3
    file.write_bytes(sealed({**raw, "version": 2}))


@pytest.mark.parametrize("name", ["whole_leaves-adam", "adamw"])
def test_a_checkpoint_of_version_2_is_read_right(name: str, tmp_path: Path) -> None:
    """Its index gives whole leaves the order of split ones, and a long run would lose its moments."""
    make = (optimizers.OWNERS | OPTIMIZERS)[name]
    for way in ("columns", "packed"):
        expected = World(axes=WAYS[way][0]).run(saved, way, make(), str(tmp_path))[0]
        of_version_2(tmp_path)
        assert not [line.text for line in verify(dir_at(tmp_path), 3) if line.is_fault]
        for other in ("columns", "packed by 3", "whole"):
            got, _ = World(axes=WAYS[other][0]).run(restored, other, make(), str(tmp_path), False)[0]
            assert all(map(torch.equal, got, expected)), (way, other)


@pytest.mark.parametrize(("numel", "ranks", "is_read"), [(1 << 20, 4, False), (1 << 20, 2, True), (1 << 18, 4, True)])
def test_equal_pieces_of_version_2_do_not_tell_who_wrote_them(numel: int, ranks: int, is_read: bool) -> None:
    """Ranks with copies of a whole leaf cut it as ranks that split it do, and neither order would be right for both."""
    half = numel // 2
    pieces = [[f"{n}.safetensors", 0, n * half, half, [0] * -(-half * 4 // CHUNK)] for n in range(2)]
    leaf = {"shape": [numel // 4, 4], "dtype": "F32", "pieces": pieces, "order": [1]}
    head = {"format": "fshard", "version": 2, "step": 3, "ranks": ranks, "plans": [], "values": {}, "by_rank": []}
    text = sealed({**head, "files": {f"{n}.safetensors": half * 4 for n in range(2)}, "leaves": {"mu.w": leaf}})
    if is_read:
        assert read_index(text, "a").leaves["mu.w"].order == (1,)
    else:
        with pytest.raises(checkpoint.CheckpointError, match=r"'mu.w'.*version 2.*mesh that saved it"):
            read_index(text, "a")
