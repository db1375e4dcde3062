"""Small models of transformers and timm with random weights, their batches, and how torch alone trains them."""

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

logging.getLogger("transformers").setLevel(logging.ERROR)  # remarks on the ids of special words, which are not used

WORDS, LENGTH = 23, 6
_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "hidden_size": 16}
_TEXT = {**_SMALL, "vocab_size": WORDS, "max_position_embeddings": 16}
_LLAMA = {**_TEXT, "num_key_value_heads": 1}
_NO_WORDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def model_of_timm(config: dict[str, Any]) -> Any:
    """A model of timm; timm is imported when the first is made, because this takes 2 s."""
    from .timm_models import create

    return create(**config)


def text(generator: torch.Generator) -> dict[str, Tensor]:
    """Words that are inputs and labels."""
    tokens = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def picture(generator: torch.Generator) -> dict[str, Tensor]:
    """Pictures and their classes."""
    pixels = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=generator)}


def sound(generator: torch.Generator) -> dict[str, Tensor]:
    """Spectra and words."""
    spectrum = torch.randn(2, 4, 16, generator=generator, dtype=torch.float64)
    return {"input_features": spectrum, "labels": text(generator)["labels"]}


def own_loss(out: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return out.loss


def loss_of_scores(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a model of timm, which returns scores of classes."""
    return cross_entropy(out, batch["labels"])


def pixels(batch: dict[str, Tensor]) -> dict[str, Any]:
    """What a model of timm takes."""
    return {"x": batch["pixel_values"]}


def checkpoints_of_transformers(module: Any) -> None:
    """Switch activation checkpointing on."""
    module.activation_checkpointing_enable({"use_reentrant": False})


def checkpoints_of_timm(module: Any) -> None:
    """Switch activation checkpointing on."""
    module.set_grad_checkpointing()


class Model(NamedTuple):
    """A model: what makes it of a configuration with a probability of dropout, and what its training needs."""

    make: Callable[[Any], Any]
    config: Callable[[float], Any]
    units: list[str]
    batch: Callable[[torch.Generator], dict[str, Tensor]] = text
    arguments: Callable[[dict[str, Tensor]], dict[str, Any]] = dict
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = own_loss
    checkpoints: Callable[[Any], None] | None = checkpoints_of_transformers


MODELS = {
    "GPT-2": Model(
        hf.GPT2LMHeadModel,
        lambda p: hf.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=WORDS, n_positions=16, resid_pdrop=p, embd_pdrop=p,
            attn_pdrop=p, use_cache=False, **_NO_WORDS,
        ),
        ["transformer.h.*"],
    ),
    "Llama": Model(hf.LlamaForCausalLM, lambda p: hf.LlamaConfig(**_LLAMA, use_cache=False), ["model.layers.*"]),
    "Qwen3": Model(
        hf.Qwen3ForCausalLM, lambda p: hf.Qwen3Config(**_LLAMA, head_dim=8, use_cache=False), ["model.layers.*"]
    ),
    "Mixtral": Model(
        hf.MixtralForCausalLM,
        # one expert of three for each word: some experts get no word on some ranks
        lambda p: hf.MixtralConfig(
            **_LLAMA, num_local_experts=3, num_experts_per_tok=1, use_cache=False, experts_implementation="eager"
        ),
        ["model.layers.*"],
    ),
    "Mamba": Model(
        hf.MambaForCausalLM,
        lambda p: hf.MambaConfig(
            hidden_size=16, num_hidden_layers=2, vocab_size=WORDS, state_size=4, use_cache=False, **_NO_WORDS
        ),
        ["backbone.layers.*"],
    ),
    "BERT": Model(
        hf.BertForMaskedLM,
        lambda p: hf.BertConfig(**_TEXT, hidden_dropout_prob=p, attention_probs_dropout_prob=p),
        ["bert.encoder.layer.*"],
    ),
    "T5": Model(
        hf.T5ForConditionalGeneration,
        lambda p: hf.T5Config(
            d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=WORDS, dropout_rate=p,
            decoder_start_token_id=0, use_cache=False,
        ),
        ["encoder.block.*", "decoder.block.*"],
    ),
    "Whisper": Model(
        hf.WhisperForConditionalGeneration,
        lambda p: hf.WhisperConfig(
            vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=8,
            max_target_positions=8, dropout=p, pad_token_id=0, decoder_start_token_id=1, bos_token_id=1, eos_token_id=2,
            suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
        ),
        ["model.encoder.layers.*", "model.decoder.layers.*"],
        sound,
    ),
    "ViT": Model(
        hf.ViTForImageClassification,
        lambda p: hf.ViTConfig(
            **_SMALL, image_size=32, patch_size=16, num_labels=5, hidden_dropout_prob=p, attention_probs_dropout_prob=p
        ),
        ["vit.encoder.layer.*", "vit.layers.*"],
        picture,
    ),
    "ResNet": Model(
        hf.ResNetForImageClassification,
        lambda p: hf.ResNetConfig(
            embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=5, layer_type="basic"
        ),
        ["resnet.encoder.stages.*"],
        picture,
        checkpoints=None,
    ),
    "ConvNeXt": Model(
        hf.ConvNextForImageClassification,
        lambda p: hf.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, num_labels=5, drop_path_rate=p),
        ["convnext.encoder.stages.*"],
        picture,
        checkpoints=None,
    ),
    "ResNet of timm": Model(
        model_of_timm,
        lambda p: {
            "name": "resnet18", "layers": (1, 1, 1, 1), "channels": (4, 4, 8, 8), "stem_width": 4,
            "num_classes": 5, "drop_rate": p,
        },
        ["layer1.*", "layer2.*", "layer3.*", "layer4.*"],
        picture,
        pixels,
        loss_of_scores,
        checkpoints_of_timm,
    ),
    "ConvNeXt of timm": Model(
        model_of_timm,
        lambda p: {
            "name": "convnext_atto", "depths": (1, 1, 1, 1), "dims": (4, 4, 8, 8), "num_classes": 5,
            "drop_rate": p,
        },
        ["stages.*"],
        picture,
        pixels,
        loss_of_scores,
        checkpoints_of_timm,
    ),
}  # fmt: skip


def model(name: str, checkpoints: bool = False, dropout: float = 0.0) -> Any:
    """A model in float64 and in training mode, the same in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = MODELS[name].make(MODELS[name].config(dropout)).double().train()
    switch = MODELS[name].checkpoints
    if checkpoints and switch is not None:
        switch(module)
    return module


def data(name: str, step: int, rank: int) -> dict[str, Tensor]:
    """One rank's batch."""
    return MODELS[name].batch(torch.Generator().manual_seed(100 * step + rank))


def trained(
    name: str, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int, world: int
) -> list[nn.Module]:
    """A copy of a model for each rank, trained by torch alone: gradients are averaged over the copies."""
    copies: list[Any] = [copy.deepcopy(model(name)) for _ in range(world)]
    leaves = [[x for x in module.parameters() if x.requires_grad] for module in copies]
    optimizers = [optimizer(params) for params in leaves]
    for step in range(steps):
        losses = [_loss(name, module, data(name, step, rank)) for rank, module in enumerate(copies)]
        pairs = zip(losses, leaves, strict=True)
        grads = [torch.autograd.grad(loss, ps, allow_unused=True, materialize_grads=True) for loss, ps in pairs]
        for params, opt in zip(leaves, optimizers, strict=True):
            for i, x in enumerate(params):
                x.grad = torch.stack([grad[i] for grad in grads]).mean(0)
            opt.step()
    return copies


def _loss(name: str, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = module(**MODELS[name].arguments(batch))
    return MODELS[name].loss(out, batch)
