"""PPO as one function: a rollout, advantages normalized over all ranks, and four updates with clipped gradients."""

from typing import Any

import torch
from torch import Tensor, nn

import fshard

from .parts import ROWS, STEPS, descend, functional, mean, normal, seeded, started, tensors

PLACE, TIME, UPDATES = 3, 5, 4
TX = fshard.optim.adam(1e-2)


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(PLACE, 8), nn.Tanh(), nn.Linear(8, PLACE))
        self.critic = nn.Sequential(nn.Linear(PLACE, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means of actions, and values."""
        return self.actor(x), self.critic(x)[..., 0]


def modules() -> dict[str, nn.Module]:
    return {"agent": Agent()}


def batches() -> list[dict[str, Tensor]]:
    return [
        {"start": normal(ROWS, PLACE, seed=step), "noise": normal(ROWS, TIME, PLACE, seed=100 + step)}
        for step in range(STEPS)
    ]


def rollout(agent: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Places, actions, their log-densities, advantages and returns: (rows, TIME)."""
    x, places, actions, rewards = batch["start"], [], [], []
    for noise in batch["noise"].unbind(1):
        action = agent(x)[0] + 0.5 * noise
        places.append(x)
        actions.append(action)
        x = 0.9 * x + 0.3 * torch.tanh(action)
        rewards.append(-x.square().sum(1))
    data = {"places": torch.stack(places, 1), "actions": torch.stack(actions, 1)}
    values, last, gain = agent(data["places"])[1], agent(x)[1], torch.zeros_like(x[:, 0])
    found: list[Tensor] = []
    for t in reversed(range(TIME)):
        gain = rewards[t] + 0.9 * last - values[:, t] + 0.8 * gain
        found.append(gain)
        last = values[:, t]
    gains = torch.stack(found[::-1], 1)
    return data | {"log_p": log_density(agent, data), "gains": gains, "returns": gains + values}


def log_density(agent: Any, data: dict[str, Tensor]) -> Tensor:
    return -2 * (data["actions"] - agent(data["places"])[0]).square().sum(-1)


def rows(agent: Any, data: dict[str, Tensor]) -> Tensor:
    ratio = (log_density(agent, data) - data["log_p"]).exp()
    surrogate = torch.minimum(ratio * data["gains"], ratio.clamp(0.8, 1.2) * data["gains"])
    return (agent(data["places"])[1] - data["returns"]).square() - surrogate


NETWORKS, PARAMS = functional(seeded(modules))


def called(params: Any) -> Any:
    return NETWORKS(params)["agent"]


def loss(params: Any, data: dict[str, Tensor]) -> fshard.Mean:
    return mean(rows(called(params), data))


def start(mesh: Any) -> dict[str, Any]:
    return {"state": started(PARAMS, mesh, TX)}


def step(state: dict[str, Any], batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    new, losses = state["state"], []
    data = fshard.predict(lambda params, batch: rollout(called(params), batch))(new.params, batch)
    mean_of = fshard.evaluate(lambda _, x: mean(x))
    gains = data["gains"] - mean_of(new.params, data["gains"])
    data["gains"] = gains / (mean_of(new.params, gains.square()).sqrt() + 1e-8)
    for _ in range(UPDATES):
        new, metrics = fshard.train_step(loss, TX, clip_norm=0.5)(new, data)
        losses.append(metrics["loss"])
    return {"state": new}, torch.stack(losses)


def plain(batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], dict[str, dict[str, Tensor]]]:
    networks, losses = seeded(modules), []
    agent = networks["agent"]
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
    for batch in batches:
        with torch.no_grad():
            data = rollout(agent, batch)
        gains = data["gains"] - data["gains"].mean()
        data["gains"] = gains / (gains.square().mean().sqrt() + 1e-8)
        losses.append(torch.stack([descend(rows(agent, data).mean(), optimizer, 0.5) for _ in range(UPDATES)]))
    return losses, {"state": tensors(networks)}
