"""Models of transformers and timm, unchanged: trained as functions they have the parameters of the plain model."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_models import MODELS, data, model, trained
from support.worlds import gloo, simulated
from torch import Tensor

import fshard
from fshard import optim
from fshard.core import tree
from fshard.module import functionalize

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"
STEPS = 5
OPTIMIZERS = {
    "sgd": (optim.sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "adamw": (optim.adamw(1e-2, weight_decay=1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=1e-2)),
}
STRATEGIES = {
    "full": ({}, 1),
    "zero1": ({"params_over": (), "grads_over": ()}, 1),
    "hybrid": ({}, 2),
}


def by_name(x: Any) -> dict[str, Tensor]:
    """The leaves of a tree by their dotted names."""
    return dict(zip(tree.paths(x), tree.leaves(x), strict=True))


def train(
    mesh: Any, name: str, optimizer: str = "sgd", strategy: str = "full", again: bool = False, dropout: float = 0.0
) -> Any:
    """Train a model as a function on a rank: its parameters and this rank's buffers."""
    apply, params, buffers = functionalize(model(name, again, dropout))
    kept = [path for path in MODELS[name].units if _has(params, path)]
    plan = fshard.make_plan(params, mesh, units=apply.units(*kept), frozen=apply.frozen, **STRATEGIES[strategy][0])
    tx = OPTIMIZERS[optimizer][0]
    state = fshard.init_state(fshard.shard_params(params, plan), tx, seed=7, extra=buffers)
    step = fshard.train_step(loss_of(name, apply), tx, with_extra=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own use of torch
        for i in range(STEPS):
            state, _ = step(state, data(name, i, mesh.get_rank()))
    return fshard.state_dict(state.params), by_name(state.extra)


def loss_of(name: str, apply: Any) -> Any:
    """The loss of a model, and its buffers."""

    def loss(params: Any, buffers: Any, batch: dict[str, Tensor]) -> Any:
        out, buffers = apply(params, buffers, **MODELS[name].arguments(batch))
        return MODELS[name].loss(out, batch), buffers

    return loss


def _has(params: Any, path: str) -> bool:
    return path.removesuffix(".*") in {".".join(names) for names, _, _ in tree.walk(tree.flatten(params)[1])}


def is_near(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names and values, to the rounding of float64."""
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        assert torch.allclose(got[path], x.detach(), rtol=1e-10, atol=1e-10), path


def is_trained(results: list[Any], name: str, optimizer: str) -> None:
    """Each rank has the parameters of the plain models, and the buffers of its own."""
    copies = trained(name, OPTIMIZERS[optimizer][1], STEPS, len(results))
    start = dict(model(name).named_parameters())
    for (params, buffers), module in zip(results, copies, strict=True):
        is_near(params, dict(module.named_parameters(remove_duplicate=False)))
        is_near(buffers, dict(module.named_buffers(remove_duplicate=False)))
        assert not all(torch.allclose(params[path], x) for path, x in start.items()), "nothing was trained"


CASES = [(name, again) for name in MODELS for again in (False, True) if MODELS[name].checkpoints or not again]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "again"), CASES)
def test_a_model_is_trained_as_by_torch(name, again, optimizer, strategy):
    """A model would be trained wrongly: with tied weights, unused experts, or when it runs again."""
    results = simulated(train, name, optimizer, strategy, again, replicate=STRATEGIES[strategy][1])
    is_trained(results, name, optimizer)


def train_each(mesh: Any, cases: list[tuple[str, bool]]) -> list[Any]:
    """Train several models one after the other: a process imports transformers once."""
    return [train(mesh, name, "adamw", "full", again) for name, again in cases]


@pytest.mark.parametrize("first", range(5))
def test_processes_train_models_as_torch_does(first):
    """A model would be trained rightly in simulation alone."""
    cases = CASES[first::5]
    for (name, _), *results in zip(cases, *gloo(train_each, cases), strict=True):
        is_trained(results, name, "adamw")


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Whisper", "ViT"])
def test_dropout_is_that_of_one_device(name):
    """Dropout would be other than that of the unsharded step with the same seed."""
    apply, params, buffers = functionalize(model(name, dropout=0.3))
    reference = fshard.testing.oracle(loss_of(name, apply), OPTIMIZERS["sgd"][0], with_extra=True, frozen=apply.frozen)
    state = reference.init(params, seed=7, extra=[buffers] * 2)
    for i in range(STEPS):
        state, _ = reference.step(state, [data(name, i, rank) for rank in range(2)])
    whole, plain = by_name(state.params), simulated(train, name)[0][0]
    for again in (False, True):
        for params_of_rank, _ in simulated(train, name, "sgd", "full", again, 0.3):
            is_near(params_of_rank, whole)
    assert not all(torch.allclose(whole[path], x) for path, x in plain.items()), "there was dropout"


@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_a_model_generates_after_training(name):
    """A model that was trained could not be used by transformers again, or would say something else."""
    (params, _), *_ = simulated(train, name, "adamw")
    module, (expected, *_) = model(name), trained(name, OPTIMIZERS["adamw"][1], STEPS, 2)
    module.load_state_dict(params)
    tokens = data(name, 0, 0)["input_ids"]
    outs = [m.eval().generate(tokens, max_new_tokens=5, do_sample=False) for m in (module, expected)]
    assert torch.equal(*outs)


def test_the_page_lists_the_models():
    """The page would promise models that no test trains, or leave some out."""
    text = PAGE.read_text().partition("\n## Models of transformers and timm\n")[2].partition("\n## ")[0]
    listed = " ".join(text.split()).partition(" trains ")[2].partition(", with their")[0]
    assert listed.replace(", and ", ", ").split(", ") == [*MODELS]
