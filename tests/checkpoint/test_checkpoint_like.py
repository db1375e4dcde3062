"""What a state is restored into: `like` without values or with memory to read into, parts, and what does not fit."""

import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import PARAMS, state_of
from support.models import same_bits
from support.steps import start
from support.worlds import simulated

import fshard
from fshard import checkpoint, tree


def test_no_values_are_needed_of_like(tmp_path):
    """A run would have to make a first state, with its memory, before it can read the one that it goes on from."""

    def law(mesh: Any) -> None:
        plan = fshard.make_plan(PARAMS, mesh)

        def begun(params: Any) -> Any:
            tx, scaler = fshard.optim.adamw(0.1), fshard.DynamicLossScale()
            return fshard.init_state(fshard.shard_params(params, plan), tx, scaler, extra={"x": params["c"]})

        state = begun(PARAMS)
        checkpoint.save(tmp_path, state, 1)
        for like in (fshard.eval_shape(begun, PARAMS), tree.map(lambda x: x.to("meta"), state)):
            again = checkpoint.restore(tmp_path, like)
            assert same_bits(again, state)
            assert all(x.device.type == "cpu" for x in tree.leaves(again))

    for shard in (1, 2):
        simulated(law, shard=shard)


def test_memory_of_like_is_read_into(tmp_path):
    """With donate=True a second state would be in memory; or leaves of `like` in the same memory, as parameters and
    their first average, would get each other's values."""

    def law(mesh: Any) -> None:
        state = state_of(mesh, 3)
        checkpoint.save(tmp_path, {**state, "average": state_of(mesh, 4)["params"]}, 1)
        like = state_of(mesh, 0)
        address = like["params"].tensors[0].data_ptr()
        with_average = {**like, "average": like["params"]}
        again = checkpoint.restore(tmp_path, with_average, donate=True)
        assert same_bits(again, {**state, "average": state_of(mesh, 4)["params"]})
        assert again["params"].tensors[0].data_ptr() == address
        assert same_bits(checkpoint.restore(tmp_path, state_of(mesh, 0), rename=_no_average), state)

    simulated(law)


def _no_average(name: str) -> str | None:
    return None if name.startswith("average") else name


def test_a_part_of_a_checkpoint(tmp_path):
    """Parameters alone, a subtree, or leaves that have other names now could not be read; or one that is left out by
    mistake would keep its first value without a word."""

    def law(mesh: Any) -> None:
        state, _ = start(mesh, scale=fshard.DynamicLossScale())
        params = state.params
        checkpoint.save(tmp_path, state, 1)

        def read(like: Any, rename: Any) -> Any:
            return checkpoint.restore(tmp_path, tree.map(torch.zeros_like, like), rename=rename)

        alone = read({"params": params}, lambda name: name if name.startswith("params.") else None)
        assert same_bits(alone, {"params": params})
        assert same_bits(read(params, lambda name: name.removeprefix("params.") if name[0] == "p" else None), params)
        inner = read({"x": params["a"]}, lambda name: name.replace("params", "x") if "params.a." in name else None)
        assert same_bits(inner, {"x": params["a"]})
        scale = {"loss_scale": state.loss_scale, "steps": state.step}
        kept = {**dict.fromkeys(["rng"]), "step": "steps"}
        others = {name: None for name in everything(tmp_path) if name.startswith(("params", "opt_state"))}
        assert same_bits(read(scale, {**others, **kept}), scale)
        with pytest.raises(ValueError, match=r"it has \d+ names that `like` has not: 'opt_state.*left out"):
            read(scale, {**kept, **{name: x for name, x in others.items() if name.startswith("params")}})
        with pytest.raises(ValueError, match=r"'x.a.w'.* other shape|'x.a.w'.*expected"):
            read({"x": params["a"]}, lambda name: "x.a.w" if name.startswith("params.a") else None)
        with pytest.raises(TypeError, match="rename=3: expected a dict, or fn"):
            read(scale, 3)

    simulated(law)


def everything(dir: Path, step: int = 1) -> list[str]:
    """The names of all leaves and values in a checkpoint."""
    index = json.loads((dir / f"step-{step:012}" / "index.json").read_text())
    return [*index["leaves"], *index["values"]]


def test_all_differences_at_once(tmp_path):
    """A state that does not fit would be restored in part, or its differences be told one after the other."""
    state = {"a": torch.ones(2), "b": torch.ones(3), "c": 1, "d": torch.ones(2), "e": "x", "f": 1.5, "g": 3, "h": True}
    like = {
        "a": torch.ones(2, 1),
        "b": torch.ones(3).int(),
        "c": torch.ones(1),
        "d": 1,
        "e": 2,
        "f": 1,
        "g": 1.0,
        "i": 5,
    }

    def law(mesh: Any) -> None:
        sharded = {"z": fshard.shard_params(torch.ones(4), fshard.make_plan(torch.ones(4), mesh))}
        checkpoint.save(tmp_path, {**state, **sharded}, 1)
        with pytest.raises(ValueError, match=r"the checkpoint of step 1 .*differs from `like`") as error:
            checkpoint.restore(tmp_path, {**like, **sharded})
        for line in (
            "it lacks 1 names: 'i'",
            "it has 1 names that `like` has not: 'h'",
            "'a': expected a tensor [2, 1], got one [2]",
            "'b': expected torch.int32, got torch.float32",
            "'c': expected a tensor, got a number or a string",
            "'d': expected a number or a string, got a tensor",
            "'e': expected int, got str",
            "'f': expected int, got float",
        ):
            assert line in str(error.value)
        assert "'g'" not in str(error.value)
        assert "'z'" not in str(error.value)

    simulated(law)
    with pytest.raises(ValueError, match=r"names that come twice, or mean something else: 'a.b', '__metadata__'"):
        checkpoint.save(tmp_path, {"a": {"b": 1}, "a.b": 2, "__metadata__": torch.ones(1)}, 2)
    with pytest.raises(ValueError, match=r"'w' is torch.bits8"):
        checkpoint.save(tmp_path, {"w": torch.empty(2, dtype=torch.bits8)}, 2)
    with pytest.raises(TypeError, match=r"'w': expected a tensor, a number or a string, got .*Nothing is pickled"):
        checkpoint.save(tmp_path, {"w": object()}, 2)
    assert checkpoint.steps(tmp_path) == [1]


def test_numbers_of_other_classes(tmp_path):
    """A number of numpy's, or of an enumeration, could be saved but not be restored."""
    state = {"x": np.float64(0.1), "kind": enum.IntEnum("Kind", ["A", "B"]).B}  # type: ignore[attr-defined]
    checkpoint.save(tmp_path, state, 1)
    assert checkpoint.restore(tmp_path, state) == {"x": 0.1, "kind": 2}
