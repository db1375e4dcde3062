"""GRPO with LoRA: groups of samples of each prompt, two clipped updates of the adapters, KL to the base model."""

from typing import Any

import torch
from torch import Tensor, nn

import fshard

from .parts import ROWS, STEPS, descend, functional, integers, mean, normal, seeded, started, tensors

WORDS, WIDTH, PROMPT, NEW, GROUP = 6, 8, 3, 4, 4


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH) / 4)

    def forward(self, x: Tensor, adapters: bool) -> Tensor:
        return self.base(x) + x @ self.down @ self.up if adapters else self.base(x)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(False)

    def forward(self, tokens: Tensor, adapters: bool = True) -> Tensor:
        x = self.embed(tokens).cumsum(1)  # of all tokens up to this one
        for block in self.blocks:
            x = x + torch.tanh(block(x, adapters))
        return self.head(x)


def modules() -> dict[str, nn.Module]:
    return {"policy": Language()}


def batches() -> list[dict[str, Tensor]]:
    def uniform(step: int) -> Tensor:
        return torch.special.ndtr(normal(ROWS, GROUP, NEW, WORDS, seed=100 + step))

    prompts = [integers(WORDS, ROWS, PROMPT, seed=step) for step in range(STEPS)]
    return [{"prompts": x, "gumbel": -(-uniform(step).log()).log()} for step, x in enumerate(prompts)]


def samples(scores: Any, batch: dict[str, Tensor]) -> Tensor:
    """Samples of all groups, (rows * GROUP, PROMPT + NEW): the noise is given."""
    tokens, gumbel = batch["prompts"].repeat_interleave(GROUP, 0), batch["gumbel"].flatten(0, 1)
    for i in range(NEW):
        tokens = torch.cat([tokens, (scores(tokens)[:, -1] + gumbel[:, i]).argmax(-1, keepdim=True)], 1)
    return tokens


def log_probs(scores: Any, tokens: Tensor, *args: bool) -> Tensor:
    """Log-probabilities of sampled tokens."""
    log_p = scores(tokens, *args)[:, PROMPT - 1 : -1].log_softmax(-1)
    return log_p.gather(-1, tokens[:, PROMPT:, None])[..., 0]


def advantages(tokens: Tensor) -> Tensor:
    """Advantages in groups; the reward counts tokens that repeat the first one of the prompt."""
    rewards = (tokens[:, PROMPT:] == tokens[:, :1]).double().mean(1).view(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.1)).flatten()


def rows(scores: Any, tokens: Tensor, old: Tensor) -> Tensor:
    new, base = log_probs(scores, tokens), log_probs(scores, tokens, False)
    ratio, gain = (new - old).exp(), advantages(tokens)[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    return 0.1 * ((base - new).exp() - (base - new) - 1) - surrogate


NETWORKS, PARAMS = functional(seeded(modules))
TX = fshard.optim.adam(2e-2)


def policy(params: Any) -> Any:
    return NETWORKS(params)["policy"]


def start(mesh: Any) -> dict[str, Any]:
    return {"state": started(PARAMS, mesh, TX)}


def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    new = state["state"]
    tokens = fshard.predict(lambda params, batch: samples(policy(params), batch))(new.params, batch)
    old = fshard.predict(lambda params, tokens: log_probs(policy(params), tokens))(new.params, tokens)
    update, losses = fshard.train_step(lambda params, *args: mean(rows(policy(params), *args)), TX), []
    for _ in range(2):
        new, metrics = update(new, tokens, old)
        losses.append(metrics["loss"])
    return {"state": new}, torch.stack(losses)


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    model = networks["policy"]
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], 2e-2)
    for batch in batches:
        with torch.no_grad():
            tokens = samples(model, batch)
            old = log_probs(model, tokens)
        losses.append(torch.stack([descend(rows(model, tokens, old).mean(), optimizer) for _ in range(2)]))
    return losses, {"state": tensors(networks)}
