"""LoRA (Hu et al., 2021): a frozen base, cut over the ranks like any parameters, and adapters that alone are trained.

    python examples/lora.py                           # two simulated ranks
    torchrun --nproc-per-node=2 examples/lora.py      # two processes

The base is a GPT that counts in ones. The adapters teach it to count in threes. A model of PEFT is used in the same
way: `fshard.module.functionalize(get_peft_model(...))`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from gpt_model import GPT, GPTConfig
from ranks import on_ranks
from torch import Tensor, nn

import fshard

DIGITS, LENGTH, ROWS, STEPS = 10, 12, 16, 100  # the rows are those of one rank; the steps, of base and adapters each


class Adapted(nn.Module):
    """A frozen linear layer, and the product of two small matrices beside it, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def counting(rows: int, by: int) -> Tensor:
    """Digits that go up by a number, from any first one: (rows, length)."""
    return (torch.randint(DIGITS, (rows, 1)) + by * torch.arange(LENGTH)) % DIGITS


def fit(model: GPT, mesh: Any, by: int) -> tuple[list[float], fshard.Sharded]:
    """Train what requires a gradient, with the losses; frozen parameters have no gradient and no optimizer state."""
    apply, params, _ = fshard.module.functionalize(model)

    def loss(params: Any, digits: Tensor) -> fshard.Mean:
        scores, _ = apply(params, {}, digits[:, :-1])
        total = F.cross_entropy(scores.flatten(0, 1), digits[:, 1:].flatten(), reduction="sum")
        return fshard.Mean(total, digits[:, 1:].numel())

    plan = fshard.make_plan(params, mesh, frozen=apply.frozen)
    tx = fshard.optim.adamw(1e-2)
    state = fshard.init_state(fshard.shard_params(params, plan), tx)
    step, losses = fshard.train_step(loss, tx, clip_norm=1.0, donate=True), []
    for _ in range(STEPS):
        state, metrics = step(state, counting(ROWS, by).to(mesh.device_type))
        losses.append(metrics["loss"].item())
    return losses, state.params


@torch.no_grad()
def written(model: GPT, device: str) -> str:
    """What the model writes after a 0."""
    digits = torch.zeros(1, 1, dtype=torch.long, device=device)
    while digits.shape[1] < LENGTH:
        digits = torch.cat([digits, model(digits)[:, -1:].argmax(-1)], 1)
    return "".join(map(str, digits[0].tolist()))


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # all ranks make the same model, and each keeps its shards
    model = GPT(GPTConfig(LENGTH, DIGITS, n_layer=2, n_head=2, n_embd=32)).to(mesh.device_type)
    torch.manual_seed(mesh.get_rank())  # and have different digits
    _, base = fit(model, mesh, by=1)
    model.load_state_dict(fshard.state_dict(base))
    ones = written(model, mesh.device_type)

    model.requires_grad_(False)
    torch.manual_seed(0)
    for name, layer in [*model.h.named_modules()]:
        if isinstance(layer, nn.Linear):
            model.h.set_submodule(name, Adapted(layer))
    model.to(mesh.device_type)
    torch.manual_seed(mesh.get_rank())
    losses, tuned = fit(model, mesh, by=3)
    adapters = fshard.state_dict(tuned.trainable)  # the base is not gathered
    model.load_state_dict(adapters, strict=False)  # it is in the module already, and has not changed
    threes = written(model, mesh.device_type)
    share = sum(x.numel() for x in adapters.values()) / sum(x.numel() for x in model.parameters())
    if mesh.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, trained share of the parameters {share:.3f}")
        print(f"the base writes {ones}, with adapters {threes}")


if __name__ == "__main__":
    on_ranks(main)
