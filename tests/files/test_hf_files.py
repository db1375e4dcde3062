"""Models of transformers from their files to shards, and back to files that transformers reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files import saved
from support.hf_models import MODELS, model
from support.models import WORLDS, same_bits
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard.checkpoint import load_safetensors, save_safetensors
from fshard.module import functionalize


def there_and_back(mesh: Any, name: str, source: Path, target: Path, max_bytes: int = 10**9) -> dict[str, Tensor]:
    """A directory to shards of a model on meta, and to another directory."""
    with torch.device("meta"):
        apply, params, buffers = functionalize(MODELS[name].make(MODELS[name].config(0.0)).double())
    plan = fshard.make_plan(params, mesh, units=apply.units(1000))
    kept = apply.persistent(buffers)
    loaded = load_safetensors(source, plan, dict.fromkeys(kept))
    if kept:
        only = lambda there: there if there in kept else None  # noqa: E731
        buffers = fshard.gather_params(load_safetensors(source, fshard.make_plan(buffers, mesh), only))
    save_safetensors(target, loaded, apply.persistent(buffers), max_bytes)
    return fshard.state_dict(loaded)


def is_the_model(name: str, folder: Path, written: Any) -> None:
    """What transformers reads from a directory is the model that was written, to the bit."""
    shutil.copy(written / "config.json", folder)
    module, info = MODELS[name].make.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values())
    assert same_bits(dict(module.state_dict()), dict(model(name).state_dict()))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Llama", "ResNet"])
def test_a_directory_comes_back_to_the_bit(name, world, tmp_path):
    """A model that was fine-tuned would not be the one that transformers reads, or lack a tied or buffered tensor."""
    model(name).save_pretrained(tmp_path / "hf")
    replicate, shard = WORLDS[world]
    args = (name, tmp_path / "hf", tmp_path / "ours")
    expected = {x: y.detach() for x, y in model(name).named_parameters(remove_duplicate=False)}
    for params in simulated(there_and_back, *args, shard=shard, replicate=replicate):
        assert same_bits(params, {path: expected[path] for path in params})
    assert same_bits(saved(tmp_path / "ours"), saved(tmp_path / "hf"))
    is_the_model(name, tmp_path / "ours", tmp_path / "hf")


@pytest.mark.parametrize("run", [simulated, gloo])
def test_models_of_several_files_are_read_and_written(run, tmp_path):
    """A large model, which Hugging Face writes to several files, would be read or written wrongly."""
    model("GPT-2").save_pretrained(tmp_path / "hf", max_shard_size="9KB")
    run(there_and_back, "GPT-2", tmp_path / "hf", tmp_path / "ours", 9000)
    for folder in ("hf", "ours"):
        assert len(list((tmp_path / folder).glob("*.safetensors"))) > 3
    assert all(path.stat().st_size < 12_000 for path in (tmp_path / "ours").glob("model-*"))
    theirs, ours = (json.loads((tmp_path / x / "model.safetensors.index.json").read_text()) for x in ("hf", "ours"))
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    is_the_model("GPT-2", tmp_path / "ours", tmp_path / "hf")
