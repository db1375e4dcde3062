"""What a checkpoint has in its files: every element once, evenly, readable by the library of safetensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import STRATEGIES, WORLDS, rand, same_bits
from support.worlds import simulated
from torch import Tensor

import fshard
from fshard import checkpoint, optim
from fshard.files.index import read_index
from fshard.files.safetensors_file import CHUNK
from fshard.optim.state import gather_state

PARAMS = {
    "w": rand(50, 7, seed=1).float(),
    "h": rand(33, seed=2).bfloat16(),
    "e": torch.ones(0, 3),
    "s": torch.ones(()),
}
PARAMS["tied"] = PARAMS["w"]


def saved(
    mesh: Any, dir: Path, plan: dict[str, Any], params: Any = PARAMS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save; the leaves that all ranks share, whole, and those of this rank, by the names that they have in files."""
    sharded = fshard.shard_params(params, fshard.make_plan(params, mesh, **plan))
    opt, rank = fshard.init_state(sharded, optim.adam(0.1)).opt_state, mesh.get_rank()
    state = {"p": sharded, "opt": opt, "x": torch.arange(5), "own": rand(3, seed=rank), "n": rank, "epoch": 4}
    checkpoint.save(dir, state, 1)
    whole = fshard.gather_params(sharded)
    leaves = {f"p.{name}": x for name, x in whole.items() if name != "tied"}
    leaves |= {f"opt.{name}": x for name, x in gather_state(opt).items()}
    return leaves | {"x": state["x"]}, {f"own@{rank}": state["own"]}


def data_bytes(path: Path) -> int:
    """The bytes of a safetensors file after its header."""
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_element_is_written_once(tmp_path, name):
    """Replicas would write an element twice, an element would be in no file, or another program would read another
    tensor under its name."""
    world = "2x2" if name.startswith("wide") else "3"
    sizes = dict(zip(("replicate", "shard"), WORLDS[world], strict=True))
    ranks = simulated(saved, tmp_path, STRATEGIES[name], **sizes)
    leaves = {**ranks[0][0], **{key: x for _, of_rank in ranks for key, x in of_rank.items()}}
    folder = tmp_path / "step-000000000001"
    text = (folder / "index.json").read_bytes()
    index, raw = read_index(text, "index.json"), json.loads(text)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["index.json", *index.files])
    assert {path.name: path.stat().st_size for path in folder.glob("*.safetensors")} == dict(index.files)
    assert sum(map(data_bytes, folder.glob("*.safetensors"))) == sum(x.nbytes for x in leaves.values())
    read = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert sum(x.nbytes for of_file in read.values() for x in of_file.values()) == sum(
        x.nbytes for x in leaves.values()
    )
    assert {*index.leaves} == {*leaves}
    for key, entry in index.leaves.items():
        parts = [_element(read[piece.file], key, piece, leaves[key]) for piece in entry.pieces]
        assert same_bits(torch.cat([*parts, leaves[key].new_empty(0)]).view(leaves[key].shape), leaves[key])
    assert (raw["format"], raw["step"], raw["ranks"], len(raw["plans"]) > 0) == ("fshard", 1, len(ranks), True)
    assert index.values == {"epoch": 4, **{f"n@{rank}": rank for rank in range(len(ranks))}}
    assert index.by_rank == {"own", "n"}


def _element(file: dict[str, Tensor], key: str, piece: Any, leaf: Tensor) -> Tensor:
    """What a file has of a leaf: under the name of the leaf if it is whole, else with the elements in brackets."""
    if piece.numel == leaf.numel():
        assert file[key].shape == leaf.shape
        return file[key].reshape(-1)
    return file[f"{key}[{piece.begin}:{piece.end}]"]


@pytest.mark.parametrize(("name", "world"), [("ddp", "3"), ("full", "2x2"), ("zero1", "4"), ("full", "3")])
def test_ranks_write_alike_much(tmp_path, name, world):
    """One rank would write all copies of large leaves, while the others wait."""
    whole = {"w": torch.ones(1501, 2000), "b": torch.ones(300_001), "small": torch.ones(100)}
    sizes = dict(zip(("replicate", "shard"), WORLDS[world], strict=True))
    simulated(saved, tmp_path, STRATEGIES[name], whole, **sizes)
    written = [data_bytes(path) for path in (tmp_path / "step-000000000001").glob("*.safetensors")]
    assert len(written) == WORLDS[world][0] * WORLDS[world][1]
    assert max(written) - min(written) <= CHUNK
