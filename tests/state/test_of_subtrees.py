"""What is saved of one module of several: a subtree's leaves have the names that they have in the subtree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.worlds import gloo, simulated
from torch import Tensor, nn

import fshard
from fshard.core import tree

TREE: dict[str, Any] = {
    "actor": {"layers": [{"w": (5, 3), "b": (3,)} for _ in range(2)], "norm": {"scale": (3,)}},
    "critic": {"w": (3, 7), "n": (2,), "deep": {"v": (1,)}},
    "rate": (),
}


def whole() -> Any:
    """Numbers by place; the critic has an integer leaf, and a leaf of the actor's tied."""
    torch.manual_seed(3)
    made: Any = tree.map_tops(torch.randn, lambda x: isinstance(x, tuple), TREE)
    made["critic"]["n"] = torch.arange(2)
    made["critic"]["tied"] = made["actor"]["layers"][0]["w"]
    return made


def subtrees(x: Any) -> dict[str, Any]:
    """Subtrees that are no leaf, by path."""
    return {"": x, "actor": x["actor"], "actor.layers": x["actor"]["layers"], "critic": x["critic"]}


def saved(mesh: Any, folder: str, units: Any, strategy: str) -> None:
    """A subtree's state dict and file have its whole tensors by their names in it, on every rank."""
    plan = fshard.make_plan(whole(), mesh, units=units, strategy=strategy, frozen=["critic.w"])
    params, expected = fshard.shard_params(whole(), plan), subtrees(whole())
    for path, subtree in subtrees(params).items():
        named = dict(zip(fshard.tree.paths(expected[path]), tree.leaves(expected[path]), strict=True))
        check(fshard.state_dict(subtree), named)
        check(fshard.state_dict(subtree, rank=0), named if fshard.rank_and_size(mesh)[0] == 0 else {})
        trained = fshard.state_dict(params.trainable["critic"])
        assert sorted(trained) == ["deep.v", "tied"]
        fshard.checkpoint.save_safetensors(Path(folder) / path, subtree)
        alone = fshard.make_plan(expected[path], mesh)
        check(fshard.state_dict(fshard.checkpoint.load_safetensors(Path(folder) / path, alone)), named)


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("units", [None, [], ["actor.layers.*", "critic.deep"], 10])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_subtree_has_its_own_names(tmp_path: Path, units: Any, strategy: str, shard: int) -> None:
    """One module of several could not be saved, or would have the names of its neighbours."""
    simulated(lambda mesh: saved(mesh, str(tmp_path), units, strategy), shard=shard)


def test_on_processes(tmp_path: Path) -> None:
    """Rank 0 writes one file, and all read it."""
    gloo(saved, str(tmp_path), ["actor.layers.*"], "zero3")


def test_a_module_of_several_is_saved_as_alone() -> None:
    """`apply.state_dict` of a subtree would not load into the module."""
    made = {name: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for name in ("encoder", "decoder")}
    functions = {name: fshard.module.functionalize(module) for name, module in made.items()}
    params = {name: params for name, (_, params, _) in functions.items()}

    def run(mesh: Any) -> Any:
        sharded = fshard.shard_params(params, fshard.make_plan(params, mesh))
        return {name: apply.state_dict(sharded[name], buffers) for name, (apply, _, buffers) in functions.items()}

    for rank in simulated(run, shard=2):
        for name, module in made.items():
            check(rank[name], module.state_dict())
            module.load_state_dict(rank[name])
