"""Small models of transformers with plans of their own, and their training on a mesh or on one device."""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fshard
from fshard import optim, tree
from fshard.comm.mesh import rank_and_size
from fshard.module import functionalize
from fshard.testing import World

logging.getLogger("transformers").setLevel(logging.ERROR)

WORDS, STEPS = 23, 3
_BASE = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2, "use_cache": False,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_HEADS = {**_BASE, "head_dim": 8}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 4, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen2": _BASE,
    "qwen2_moe": {**_BASE, **_EXPERTS, "shared_expert_intermediate_size": 6},
    "qwen3": _HEADS,
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "gemma": {**_HEADS, "num_key_value_heads": 1},
    "gemma2": _HEADS,
    "gemma3_text": _HEADS,
    "mistral": _BASE,
    "ministral": _HEADS,
    "mixtral": {**_BASE, "num_local_experts": 5, "num_experts_per_tok": 2},
    "phi": {**_BASE, "num_key_value_heads": 4},
    "phi3": _BASE,
    "olmo": _BASE,
    "olmo2": _BASE,
    "olmoe": {**_BASE, "num_experts": 5, "num_experts_per_tok": 2},
    "cohere": _BASE,
    "cohere2": _BASE,
    "glm": _HEADS,
    "glm4": _HEADS,
    "starcoder2": _BASE,
    "deepseek_v2": {**_BASE, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_BASE, **_LATENT},
    "granite": _BASE,
    "helium": {**_BASE, "head_dim": 4},
    "smollm3": _BASE,
    "gpt_neox": {name: x for name, x in _BASE.items() if name != "num_key_value_heads"},
    "nemotron": _BASE,
    "ernie4_5": _HEADS,
    "exaone4": {**_HEADS, "sliding_window": 4},
    "jais2": _BASE,
    "seed_oss": {**_HEADS, "attention_dropout": 0.0, "residual_dropout": 0.0},
}
EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "deepseek_v2", "deepseek_v3")


def model(name: str, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A model with drawn parameters."""
    made: Any = hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[name](**{**CONFIGS[name], **config})).to(dtype)
    made.set_experts_implementation("eager")  # torch's grouped product has no float64
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in made.parameters():
            x.copy_(torch.randn(x.shape, generator=generator, dtype=torch.float64) / (4 if x.dim() > 1 else 10))
    return made


class Wide(TorchFunctionMode):
    """Compute in float64 where the code of models asks for float32."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def batch(rows: int = 4, seed: int = 0) -> Tensor:
    """Words, which are inputs and labels."""
    return torch.randint(WORDS, (rows, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(apply: Any, buffers: Any, wide: bool = True) -> Callable[[Any, Tensor], fshard.Mean]:
    """The model's own loss, as a mean over words."""

    def loss(params: Any, rows: Tensor) -> fshard.Mean:
        with Wide() if wide else warnings.catch_warnings():
            out, _ = apply(params, buffers, input_ids=rows, labels=rows)
        return fshard.Mean(out.loss * rows[:, 1:].numel(), rows[:, 1:].numel())

    return loss


def units(apply: Any) -> list[str]:
    """The layers."""
    picked: list[str] = apply.units("**.layers.*")
    return picked


def trained(
    mesh: Any,
    module: nn.Module,
    styles: Mapping[str, str],
    axes: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
    step_of: Callable[[Any], Any] = lambda step: step,
    **plan: Any,
) -> Any:
    """Loss, gradients, and parameters after clipped steps. `axes`: arguments of `apply.split`; plain without them."""
    apply, params, buffers = functionalize(module, parallel=styles)
    plan = {"units": units(apply), "frozen": apply.frozen} | plan
    plan |= {} if mesh is None else {"split": apply.split(mesh, **(axes or {"axis": "tensor"})), "data": "shard"}
    sharded, loss = fshard.shard_params(params, fshard.make_plan(params, mesh, **plan)), loss_of(apply, buffers)
    rank, ranks = (0, 1) if mesh is None else rank_and_size(mesh, "shard")
    rows = batch()[rank::ranks]
    value, grads = fshard.value_and_grad(loss)(sharded, rows)
    tx = {"adamw": optim.adamw(1e-3), "sgd": optim.sgd(1e-2, momentum=0.9)}[optimizer]
    state, step = fshard.init_state(sharded, tx), step_of(fshard.train_step(loss, tx, clip_norm=0.5))
    for _ in range(STEPS):
        state, _ = step(state, rows)
    return value, fshard.state_dict(grads), fshard.state_dict(state.params)


@functools.cache
def plainly(name: str, optimizer: str) -> Any:
    """The model on one device."""
    return trained(None, model(name), {}, optimizer=optimizer)


def is_near(got: Any, expected: Any, name: str) -> None:
    """The loss to 1e-9, gradients to 1e-8, parameters to 1e-7, relative to the largest element."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-9, atol=0)
    for part, rtol in ((1, 1e-8), (2, 1e-7)):
        largest = max(x.abs().max() for x in expected[part].values())
        for path, x in expected[part].items():
            far = (got[part][path] - x).abs().max()
            assert far <= rtol * x.abs().max().clamp(min=1e-4 * largest), (name, path, far)


def is_the_plain_one(name: str, sizes: tuple[int, int], optimizer: str = "adamw", **how: Any) -> None:
    """A model split by its own plan trains as the model does."""
    styles = how.pop("styles", None) or model(name).tp_plan
    run = lambda mesh: trained(mesh, model(name), styles, optimizer=optimizer, **how)  # noqa: E731
    for got in World(axes={"shard": sizes[0], "tensor": sizes[1]}).run(run):
        is_near(got, plainly(name, optimizer), name)


def first_of(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """All leaves."""
    return tree.leaves(dict(tensors))
