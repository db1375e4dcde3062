"""The losses of `networks.py` for JAX, with the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Loss = Callable[[Any, Any], jax.Array]


def _norm(p: Any, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + epsilon)
    return x * p[name] + p[f"{name}_bias"]


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -picked.mean()


def transformer(heads: int) -> Loss:
    """The loss of `networks.py` `transformer`."""

    def block(p: Any, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        qkv = _norm(p, "norm1", x) @ p["qkv"] + p["qkv_bias"]
        q, k, v = (qkv.reshape(b, t, 3, heads, d // heads)[:, :, i] for i in range(3))  # (b, t, heads, d / heads)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d)
        x = x + h @ p["proj"] + p["proj_bias"]
        h = jax.nn.gelu(_norm(p, "norm2", x) @ p["up"] + p["up_bias"], approximate=False)
        return x + h @ p["down"] + p["down_bias"]

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens[:, :-1]] + p["pos"]
        for one in p["blocks"]:
            x = block(one, x)
        return _cross_entropy(_norm(p, "norm", x) @ p["head"], tokens[:, 1:] % p["head"].shape[1])

    return loss


def deep() -> Loss:
    """The loss of `networks.py` `deep`."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        for one in p["layers"]:
            x = x @ one["w"].T + one["b"]
        return jnp.square(x).mean()

    return loss


def convolutional(groups: int) -> Loss:
    """The loss of `networks.py` `convolutional`."""

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv(x, kernel, (1, 1), "SAME")  # (rows, channels, height, width), as torch's

    def norm(p: Any, name: str, x: jax.Array) -> jax.Array:
        grouped = x.reshape(len(x), groups, -1)
        mean, var = grouped.mean(-1, keepdims=True), grouped.var(-1, keepdims=True)
        x = ((grouped - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)
        return x * p[name][:, None, None] + p[f"{name}_bias"][:, None, None]

    def loss(p: Any, batch: Any) -> jax.Array:
        x = convolved(batch["images"], p["stem"])
        for one in p["blocks"]:
            h = convolved(jax.nn.relu(norm(one, "norm1", x)), one["conv1"])
            x = x + convolved(jax.nn.relu(norm(one, "norm2", h)), one["conv2"])
        x = jax.nn.relu(norm(p, "norm", x)).mean((2, 3))
        return _cross_entropy(x @ p["head"] + p["bias"], batch["labels"])

    return loss


def experts(count: int) -> Loss:
    """The loss of `networks.py` `experts`."""

    def layer(p: Any, x: jax.Array) -> jax.Array:
        h = _norm(p, "norm", x)
        probabilities = jax.nn.softmax(h @ p["router"])
        weights = probabilities * jax.nn.one_hot(probabilities.argmax(-1), count)
        for i, expert in enumerate(p["experts"]):
            x = x + weights[..., i : i + 1] * (jax.nn.gelu(h @ expert["up"], approximate=False) @ expert["down"])
        return x

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = p["embed"][tokens[:, :-1]]
        for one in p["layers"]:
            x = layer(one, x)
        return _cross_entropy(x @ p["head"], tokens[:, 1:])

    return loss
